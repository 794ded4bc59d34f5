/* Copies the pins of the cluster from etcd (/baton/<cluster>/pins/) into the kvstore's table.
 * While etcd is unavailable the pins stay and end at their times. Control thread. */
#ifndef BT_KVSTORE_SERVE_PIN_WATCH_H
#define BT_KVSTORE_SERVE_PIN_WATCH_H

#include "common/etcd/etcd.h"
#include "kvstore/cache/pins.h"

struct bt_pin_watch;

/* pins outlives it. */
struct bt_pin_watch *bt_pin_watch_start(struct bt_etcd *e, const char *cluster,
                                        struct bt_pins *pins);
/* Call before bt_etcd_destroy. Pins stay in the table. */
void bt_pin_watch_stop(struct bt_pin_watch *w); /* NULL is fine */

#endif
