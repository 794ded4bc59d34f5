/* Which kvstore has which block, as far as their events say: a hint, never the truth. Bounded; a
 * full index forgets new blocks, not old ones. No I/O; owned by the loop thread. */
#ifndef BT_CONDUCTOR_HOLDERS_H
#define BT_CONDUCTOR_HOLDERS_H

#include "common/base/base.h"
#include "common/kv/key.h"

#define BT_HOLDERS_KVSTORES_MAX 256 /* ids are below this */

struct bt_holders;

struct bt_holders *bt_holders_create(size_t keys_max);
void bt_holders_destroy(struct bt_holders *x);

/* Block `key` (the depth-th of its chain) is sealed in kvstore id. False: the index is full. */
bool bt_holders_add(struct bt_holders *x, const struct bt_kv_key *key, uint32_t depth, uint32_t id);
void bt_holders_remove(struct bt_holders *x, const struct bt_kv_key *key, uint32_t id);
/* Forgets all blocks of a kvstore (a resync begins, or it is gone). */
void bt_holders_forget(struct bt_holders *x, uint32_t id);

/* For each kvstore id below n_ids: how many of keys[0..n) are there without a hole from the first
 * on. match: [n_ids], written. */
void bt_holders_match(const struct bt_holders *x, const struct bt_kv_key *keys, uint32_t n,
                      uint32_t *match, uint32_t n_ids);

size_t bt_holders_keys(const struct bt_holders *x);       /* distinct blocks */
uint64_t bt_holders_replicas(const struct bt_holders *x); /* sum over kvstores */
uint64_t bt_holders_dropped(const struct bt_holders *x);  /* refused because the index was full */

/* Iterates: *it starts at 0; false at the end. holds: one bit an id, BT_HOLDERS_KVSTORES_MAX bits.
 */
bool bt_holders_next(const struct bt_holders *x, size_t *it, const struct bt_kv_key **key_p,
                     uint32_t *depth_p, const uint64_t **holds_p);

#endif
