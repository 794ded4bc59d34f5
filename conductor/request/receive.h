/* How messages of daemons reach the request machine. Loop thread. */
#ifndef BT_CONDUCTOR_REQUEST_RECEIVE_H
#define BT_CONDUCTOR_REQUEST_RECEIVE_H

#include "conductor/request/machine.h"
#include "conductor/view/view.h"

/* Hands over every event of the message. After each event it calls apply(arg), which applies the
 * machine's actions. */
void bt_receive_worker(struct bt_machine *mc, struct bt_session *s, const Baton__FromWorker *m,
                       uint64_t now_ns, void (*apply)(void *arg), void *arg);
void bt_receive_kvstore(struct bt_machine *mc, struct bt_session *s, const Baton__FromKvstore *m,
                        uint64_t now_ns, void (*apply)(void *arg), void *arg);

#endif
