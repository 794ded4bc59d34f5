/* Which kvstore has which extent, as far as their events say: a hint, never the truth. An extent is
 * known by its last block's key, which stands for everything before it; how many blocks make one is
 * the caller's (bt_view_config.extent_blocks). Of a key its first eight bytes are kept: two that
 * agree in these cost a plan that finds less than it hoped for. Bounded and sized at the start, 32
 * bytes an extent for up to four holders; a full index forgets new extents, not old ones. No I/O;
 * owned by the loop thread. */
#ifndef BT_CONDUCTOR_HOLDERS_H
#define BT_CONDUCTOR_HOLDERS_H

#include "common/base/base.h"
#include "common/kv/key.h"

#define BT_HOLDERS_KVSTORES_MAX 2048 /* ids are below this */

struct bt_holders;

struct bt_holders *bt_holders_create(size_t keys_max);
void bt_holders_destroy(struct bt_holders *x);

/* Extent `key`, whose last block is the depth-th of its chain, is in kvstore id. False: the index
 * is full; its last quarter is full for a kvstore that has more than an equal share of it. */
bool bt_holders_add(struct bt_holders *x, const struct bt_kv_key *key, uint32_t depth, uint32_t id);
void bt_holders_remove(struct bt_holders *x, const struct bt_kv_key *key, uint32_t id);
/* Forgets all of a kvstore (a resync begins, or it is gone): nothing of it is matched any more.
 * What it alone held leaves a large index a little at a time, with later calls of add and sweep. */
void bt_holders_forget(struct bt_holders *x, uint32_t id);
/* Goes on with that, over at most so many places. */
void bt_holders_sweep(struct bt_holders *x, size_t places);

/* How often a kvstore was forgotten whose contents of then are not all out of the index yet. */
uint32_t bt_holders_unswept(const struct bt_holders *x, uint32_t id);

/* For each kvstore id below n_ids: how many of keys[0], keys[stride] ... (n of them) are there
 * without a hole from the first on. match: [n_ids], written. */
void bt_holders_match(const struct bt_holders *x, const struct bt_kv_key *keys, uint32_t n,
                      uint32_t stride, uint32_t *match, uint32_t n_ids);

/* Who has this extent, as far as is known: up to cap ids; returns how many there are. */
uint32_t bt_holders_of(const struct bt_holders *x, const struct bt_kv_key *key, uint32_t *ids,
                       uint32_t cap);

size_t bt_holders_keys(const struct bt_holders *x);       /* distinct extents */
uint64_t bt_holders_replicas(const struct bt_holders *x); /* sum over kvstores */

/* Iterates: *it starts at 0; false at the end, or when *it has reached end (places of the index
 * that are looked at, 10 ns each at most; SIZE_MAX: all). key8: the key's first bytes. Up to cap
 * holders go to ids, *n_p says how many there are. */
bool bt_holders_next(const struct bt_holders *x, size_t *it, size_t end, uint8_t key8[8],
                     uint32_t *depth_p, uint32_t *ids, uint32_t cap, uint32_t *n_p);

#endif
