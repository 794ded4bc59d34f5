/* Which kvstore has which extent, by their block events. This is a hint, never the truth. An extent
 * is known by the key of its last block, which stands for everything before it; the caller chooses
 * how many blocks make one (bt_view_config.extent_blocks). The index keeps the first eight bytes of
 * a key. Two keys that agree in these cause a plan that finds a shorter prefix than expected. The
 * size is fixed at the start: 32 bytes an extent for up to four holders. A full index drops new
 * extents, not old ones. No I/O; owned by the loop thread. */
#ifndef BT_CONDUCTOR_HOLDERS_H
#define BT_CONDUCTOR_HOLDERS_H

#include "common/base/base.h"
#include "common/kv/key.h"

#define BT_HOLDERS_KVSTORES_MAX 2048 /* ids are below this */

struct bt_holders;

struct bt_holders *bt_holders_create(size_t keys_max);
void bt_holders_destroy(struct bt_holders *x);

/* Kvstore id has extent `key`, whose last block is the depth-th of its chain. False: the index is
 * full. Its last quarter is full for a kvstore that has more than an equal share of it. */
bool bt_holders_add(struct bt_holders *x, const struct bt_kv_key *key, uint32_t depth, uint32_t id);
void bt_holders_remove(struct bt_holders *x, const struct bt_kv_key *key, uint32_t id);
/* Forgets all extents of a kvstore, because a resync begins or it is gone: from now on none of them
 * matches. Entries that no other kvstore had leave a large index step by step, with later calls of
 * add and sweep. */
void bt_holders_forget(struct bt_holders *x, uint32_t id);
/* Continues this removal over at most this many places of the index. */
void bt_holders_sweep(struct bt_holders *x, size_t places);

/* The number of forgotten kvstores whose entries are not all removed yet. */
uint32_t bt_holders_unswept(const struct bt_holders *x, uint32_t id);

/* For each kvstore id below n_ids: how many of the n keys keys[0], keys[stride] ... it has without
 * a gap from the first on. match: [n_ids], written. */
void bt_holders_match(const struct bt_holders *x, const struct bt_kv_key *keys, uint32_t n,
                      uint32_t stride, uint32_t *match, uint32_t n_ids);

/* The known holders of this extent: up to cap ids. Returns how many there are. */
uint32_t bt_holders_of(const struct bt_holders *x, const struct bt_kv_key *key, uint32_t *ids,
                       uint32_t cap);

size_t bt_holders_keys(const struct bt_holders *x);       /* distinct extents */
uint64_t bt_holders_replicas(const struct bt_holders *x); /* sum over kvstores */

/* Iterates: *it starts at 0. False at the end, or when *it has reached end (a number of places of
 * the index, at most 10 ns each; SIZE_MAX: all). key8: the first bytes of the key. Up to cap
 * holders go to ids; *n_p is their number. */
bool bt_holders_next(const struct bt_holders *x, size_t *it, size_t end, uint8_t key8[8],
                     uint32_t *depth_p, uint32_t *ids, uint32_t cap, uint32_t *n_p);

#endif
