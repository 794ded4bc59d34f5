/* The conductor's counters over the last half hour, for pages that show how goodput changes. It
 * takes one sample every few seconds and costs nothing else. Loop thread. */
#ifndef BT_CONDUCTOR_HISTORY_H
#define BT_CONDUCTOR_HISTORY_H

#include "admin.pb-c.h"
#include "common/loop/loop.h"
#include "conductor/request/requests.h"

struct bt_history;

/* loop and rs outlive it. */
struct bt_history *bt_history_create(struct bt_loop *loop, const struct bt_requests *rs);
void bt_history_destroy(struct bt_history *h);
/* Makes the message with all samples, and one of now, and hands it to use. */
void bt_history_make(const struct bt_history *h, void (*use)(void *arg, const ProtobufCMessage *m),
                     void *arg);

#endif
