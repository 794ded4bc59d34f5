/* Which kvstore has which block, as far as their events say: a hint, never the truth. Bounded; a
 * full index forgets new blocks, not old ones. No I/O; owned by the loop thread. */
#ifndef BT_CONDUCTOR_INDEX_H
#define BT_CONDUCTOR_INDEX_H

#include "common/base/base.h"
#include "common/kv/key.h"

#define BT_INDEX_KVSTORES_MAX 256 /* ids are below this */

struct bt_index;

struct bt_index *bt_index_create(size_t keys_max);
void bt_index_destroy(struct bt_index *x);

/* Block `key` (the depth-th of its chain) is sealed in kvstore id. False: the index is full. */
bool bt_index_add(struct bt_index *x, const struct bt_kv_key *key, uint32_t depth, uint32_t id);
void bt_index_remove(struct bt_index *x, const struct bt_kv_key *key, uint32_t id);
/* Forgets all blocks of a kvstore (a resync begins, or it is gone). */
void bt_index_forget(struct bt_index *x, uint32_t id);

/* For each kvstore id below n_ids: how many of keys[0..n) are there without a hole from the first
 * on. match: [n_ids], written. */
void bt_index_match(const struct bt_index *x, const struct bt_kv_key *keys, uint32_t n,
                    uint32_t *match, uint32_t n_ids);

size_t bt_index_keys(const struct bt_index *x);       /* distinct blocks */
uint64_t bt_index_replicas(const struct bt_index *x); /* sum over kvstores */
uint64_t bt_index_dropped(const struct bt_index *x);  /* refused because the index was full */

/* Iterates: *it starts at 0; false at the end. holds: one bit an id, BT_INDEX_KVSTORES_MAX bits. */
bool bt_index_next(const struct bt_index *x, size_t *it, const struct bt_kv_key **key_p,
                   uint32_t *depth_p, const uint64_t **holds_p);

#endif
