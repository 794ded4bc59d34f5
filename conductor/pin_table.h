/* Pins of the cluster: the records under /baton/<cluster>/pins/ in etcd, and how a pin is made and
 * ended. Every conductor follows the same keys. Kvstores protect the blocks (kvstore/cache/pins.h).
 * Loop thread. */
#ifndef BT_CONDUCTOR_PIN_TABLE_H
#define BT_CONDUCTOR_PIN_TABLE_H

#include "cluster.pb-c.h"
#include "common/base/list.h"
#include "common/etcd/etcd.h"
#include "common/kv/key.h"

#define BT_PIN_BLOCKS_ONE 32768u  /* in one pin: its record stays below etcd's limit of 1.5 MiB */
#define BT_PIN_BLOCKS_ALL 131072u /* in all pins: every kvstore keeps them */
#define BT_PIN_ALL        4096u

struct bt_pin_table;

struct bt_pin_table *bt_pin_table_create(struct bt_etcd *e, const char *cluster);
void bt_pin_table_destroy(struct bt_pin_table *p); /* before bt_etcd_destroy */

struct bt_pin_spec {
    const struct bt_kv_key *keys; /* of a chain, from its first block on */
    uint32_t n;                   /* >= 1 */
    uint32_t tokens;              /* of the prompt */
    uint64_t ttl_ms;
    const char *label, *tenant; /* "": none */
};

struct bt_pin_info {
    const Baton__Pin *pin; /* as in etcd; its keys may be missing */
    uint32_t blocks;
    uint64_t left_ms;
    bool renewed; /* the pin existed before */
};

/* Result of a call. x is valid during the call. If st is not OK, x is NULL and why says what to
 * do. */
typedef void (*bt_pin_table_done_fn)(void *arg, bt_status_t st, const struct bt_pin_info *x,
                                     const char *why);
/* Pins a prefix, or gives an existing pin a new time. done is called once, possibly inside this
 * call. */
void bt_pin_table_pin(struct bt_pin_table *p, const struct bt_pin_spec *spec,
                      bt_pin_table_done_fn done, void *arg);
/* ERR_NOT_FOUND: no pin has this id. */
void bt_pin_table_unpin(struct bt_pin_table *p, uint64_t id, bt_pin_table_done_fn done, void *arg);

/* Iterates over the pins that have not expired, oldest first; *it starts at 0. False: no more. The
 * result is valid until the loop turns. */
bool bt_pin_table_next(const struct bt_pin_table *p, size_t *it, struct bt_pin_info *out);

#endif
