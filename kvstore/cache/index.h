/* The node's index: block key -> slot. It contains only sealed blocks; the first copy of a key
 * wins. It reports every change to an observer, which sends block events to conductors. Control
 * thread. Pure. */
#ifndef BT_KVSTORE_CACHE_INDEX_H
#define BT_KVSTORE_CACHE_INDEX_H

#include "common/base/base.h"
#include "common/kv/key.h"

struct bt_index;

/* added: the key is here now; else it is gone. */
typedef void (*bt_index_observer_fn)(void *arg, bool added, uint32_t slot,
                                     const struct bt_kv_key *key, uint32_t depth);

struct bt_index *bt_index_create(uint32_t n_slots);
void bt_index_destroy(struct bt_index *ix);
/* NULL: no observer */
void bt_index_observe(struct bt_index *ix, bt_index_observer_fn fn, void *arg);

/* false: the key is in the index already (that copy stays). */
bool bt_index_add(struct bt_index *ix, const struct bt_kv_key *key, uint32_t depth, uint32_t slot);
/* Slot of the key or UINT32_MAX. */
uint32_t bt_index_find(const struct bt_index *ix, const struct bt_kv_key *key);
/* A short hash of the key, the same in every process. */
uint64_t bt_index_hash(const struct bt_kv_key *key);
/* Removes the slot's key; the slot must be in the index. */
void bt_index_remove(struct bt_index *ix, uint32_t slot);
bool bt_index_has_slot(const struct bt_index *ix, uint32_t slot);
/* Key and depth of a slot that is in the index. */
const struct bt_kv_key *bt_index_key(const struct bt_index *ix, uint32_t slot, uint32_t *depth_p);
uint32_t bt_index_slots(const struct bt_index *ix);

#endif
