/* Pins of the cluster: what etcd has under /baton/<cluster>/pins/, and how one is made and ended.
 * Every conductor follows the same keys; kvstores do the protecting (kvstore/cache/pins.h). Loop
 * thread.
 */
#ifndef BT_CONDUCTOR_PIN_TABLE_H
#define BT_CONDUCTOR_PIN_TABLE_H

#include "cluster.pb-c.h"
#include "common/base/list.h"
#include "common/etcd/etcd.h"
#include "common/kv/key.h"

#define BT_PIN_BLOCKS_ONE 32768u  /* of one pin: its record stays below etcd's bound of 1.5 MiB */
#define BT_PIN_BLOCKS_ALL 131072u /* what every kvstore follows */
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
    const Baton__Pin *pin; /* as it is in etcd, its keys may be left out */
    uint32_t blocks;
    uint64_t left_ms;
    bool renewed; /* it was there before */
};

/* x is valid during the call. st != OK: x is NULL and why says what to do. */
typedef void (*bt_pin_table_done_fn)(void *arg, bt_status_t st, const struct bt_pin_info *x,
                                     const char *why);
/* Pins a prefix, or gives it a new time. done comes once, possibly inside the call. */
void bt_pin_table_pin(struct bt_pin_table *p, const struct bt_pin_spec *spec,
                      bt_pin_table_done_fn done, void *arg);
/* ERR_NOT_FOUND: there is none of this id. */
void bt_pin_table_unpin(struct bt_pin_table *p, uint64_t id, bt_pin_table_done_fn done, void *arg);

/* What has not expired, oldest first; *it starts at 0. False: no more. Valid until the loop turns.
 */
bool bt_pin_table_next(const struct bt_pin_table *p, size_t *it, struct bt_pin_info *out);

#endif
