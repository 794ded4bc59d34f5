/* Index of sealed blocks: a hash map from key to slot, and the way back. Control thread. Pure. */
#include "kvstore/index.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"

struct entry {
    struct bt_kv_key key;
    uint32_t depth;
    bool used;
};

struct bt_index {
    struct bt_map *by_key; /* values point at the slot's entry */
    struct entry *slots;
    uint32_t n;
    bt_index_observer_fn fn;
    void *arg;
};

struct bt_index *bt_index_create(uint32_t n_slots)
{
    struct bt_index *ix = bt_calloc(1, sizeof(*ix));
    ix->by_key = bt_map_create(sizeof(struct bt_kv_key));
    ix->slots = bt_calloc(n_slots, sizeof(*ix->slots));
    ix->n = n_slots;
    return ix;
}

void bt_index_destroy(struct bt_index *ix)
{
    if (ix == NULL) {
        return;
    }
    bt_map_destroy(ix->by_key);
    free(ix->slots);
    free(ix);
}

void bt_index_observe(struct bt_index *ix, bt_index_observer_fn fn, void *arg)
{
    ix->fn = fn;
    ix->arg = arg;
}

bool bt_index_add(struct bt_index *ix, const struct bt_kv_key *key, uint32_t depth, uint32_t slot)
{
    BT_ASSERT(slot < ix->n && !ix->slots[slot].used);
    if (bt_map_get(ix->by_key, key) != NULL) {
        return false;
    }
    ix->slots[slot] = (struct entry){*key, depth, true};
    bt_map_put(ix->by_key, key, &ix->slots[slot]);
    if (ix->fn != NULL) {
        ix->fn(ix->arg, true, slot, key, depth);
    }
    return true;
}

uint32_t bt_index_find(const struct bt_index *ix, const struct bt_kv_key *key)
{
    const struct entry *e = bt_map_get(ix->by_key, key);
    return e == NULL ? UINT32_MAX : (uint32_t)(e - ix->slots);
}

void bt_index_remove(struct bt_index *ix, uint32_t slot)
{
    BT_ASSERT(slot < ix->n && ix->slots[slot].used);
    struct entry *e = &ix->slots[slot];
    bt_map_del(ix->by_key, &e->key);
    e->used = false;
    if (ix->fn != NULL) {
        ix->fn(ix->arg, false, slot, &e->key, e->depth);
    }
}

bool bt_index_has_slot(const struct bt_index *ix, uint32_t slot)
{
    return slot < ix->n && ix->slots[slot].used;
}

const struct bt_kv_key *bt_index_key(const struct bt_index *ix, uint32_t slot, uint32_t *depth_p)
{
    BT_ASSERT(slot < ix->n && ix->slots[slot].used);
    *depth_p = ix->slots[slot].depth;
    return &ix->slots[slot].key;
}

uint32_t bt_index_count(const struct bt_index *ix)
{
    return (uint32_t)bt_map_count(ix->by_key);
}

uint32_t bt_index_slots(const struct bt_index *ix)
{
    return ix->n;
}
