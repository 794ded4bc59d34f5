/* The pins of the cluster as etcd has them (/baton/<cluster>/pins/), fed into the kvstore's own
 * table. An etcd that is away changes nothing; pins end by their time then, too. Control thread. */
#ifndef BT_KVSTORE_SERVE_PIN_WATCH_H
#define BT_KVSTORE_SERVE_PIN_WATCH_H

#include "common/etcd/etcd.h"
#include "kvstore/cache/pins.h"

struct bt_pin_watch;

/* pins outlives it. */
struct bt_pin_watch *bt_pin_watch_start(struct bt_etcd *e, const char *cluster,
                                        struct bt_pins *pins);
/* Before bt_etcd_destroy. What is pinned stays so. */
void bt_pin_watch_stop(struct bt_pin_watch *w); /* NULL is fine */

#endif
