/* Index of sealed blocks: keys by slot, and an open-addressing table of slot numbers over them. It
 * needs 43 to 48 bytes a slot. Control thread. Pure. */
#include "kvstore/cache/index.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"

#define UNUSED UINT32_MAX /* as depth: the slot is not in the index */

struct entry {
    struct bt_kv_key key;
    uint32_t depth;
};

struct bt_index {
    struct entry *slots;
    uint32_t *table; /* slot + 1; 0: empty. Linear probing, no tombstones */
    uint32_t n, mask, count;
    uint64_t seed; /* a random seed, so that clients cannot choose keys that collide */
    bt_index_observer_fn fn;
    void *arg;
};

struct bt_index *bt_index_create(uint32_t n_slots)
{
    struct bt_index *ix = bt_calloc(1, sizeof(*ix));
    uint64_t cap = 16;
    while (cap < n_slots + (uint64_t)n_slots / 2) {
        cap *= 2;
    }
    ix->slots = bt_malloc(BT_MAX(n_slots, 1u) * sizeof(*ix->slots));
    for (uint32_t i = 0; i < n_slots; i++) {
        ix->slots[i].depth = UNUSED;
    }
    ix->table = bt_calloc(cap, sizeof(*ix->table));
    ix->mask = (uint32_t)(cap - 1);
    ix->n = n_slots;
    bt_random(&ix->seed, sizeof(ix->seed));
    return ix;
}

void bt_index_destroy(struct bt_index *ix)
{
    if (ix == NULL) {
        return;
    }
    free(ix->slots);
    free(ix->table);
    free(ix);
}

void bt_index_observe(struct bt_index *ix, bt_index_observer_fn fn, void *arg)
{
    ix->fn = fn;
    ix->arg = arg;
}

static uint32_t home(const struct bt_index *ix, const struct bt_kv_key *key)
{
    return (uint32_t)bt_hash64(key->b, sizeof(key->b), ix->seed) & ix->mask;
}

/* Position of key's slot, or of the empty place where the search ends. */
static uint32_t probe(const struct bt_index *ix, const struct bt_kv_key *key)
{
    uint32_t i = home(ix, key);
    while (ix->table[i] != 0 && memcmp(&ix->slots[ix->table[i] - 1].key, key, sizeof(*key)) != 0) {
        i = (i + 1) & ix->mask;
    }
    return i;
}

bool bt_index_add(struct bt_index *ix, const struct bt_kv_key *key, uint32_t depth, uint32_t slot)
{
    BT_ASSERT(slot < ix->n && ix->slots[slot].depth == UNUSED && depth != UNUSED);
    uint32_t at = probe(ix, key);
    if (ix->table[at] != 0) {
        return false;
    }
    ix->table[at] = slot + 1;
    ix->slots[slot] = (struct entry){*key, depth};
    ix->count++;
    if (ix->fn != NULL) {
        ix->fn(ix->arg, true, slot, key, depth);
    }
    return true;
}

uint32_t bt_index_find(const struct bt_index *ix, const struct bt_kv_key *key)
{
    return ix->table[probe(ix, key)] - 1; /* 0 - 1: not found */
}

uint64_t bt_index_hash(const struct bt_kv_key *key)
{
    return bt_hash64(key->b, sizeof(key->b), 0);
}

void bt_index_remove(struct bt_index *ix, uint32_t slot)
{
    BT_ASSERT(bt_index_has_slot(ix, slot));
    struct entry e = ix->slots[slot];
    uint32_t hole = probe(ix, &e.key);
    /* Move later entries of the run up, but none before its home position. */
    for (uint32_t i = (hole + 1) & ix->mask; ix->table[i] != 0; i = (i + 1) & ix->mask) {
        uint32_t from = home(ix, &ix->slots[ix->table[i] - 1].key);
        if (((i - from) & ix->mask) >= ((i - hole) & ix->mask)) {
            ix->table[hole] = ix->table[i];
            hole = i;
        }
    }
    ix->table[hole] = 0;
    ix->slots[slot].depth = UNUSED;
    ix->count--;
    if (ix->fn != NULL) {
        ix->fn(ix->arg, false, slot, &e.key, e.depth);
    }
}

bool bt_index_has_slot(const struct bt_index *ix, uint32_t slot)
{
    return slot < ix->n && ix->slots[slot].depth != UNUSED;
}

const struct bt_kv_key *bt_index_key(const struct bt_index *ix, uint32_t slot, uint32_t *depth_p)
{
    BT_ASSERT(bt_index_has_slot(ix, slot));
    *depth_p = ix->slots[slot].depth;
    return &ix->slots[slot].key;
}

uint32_t bt_index_slots(const struct bt_index *ix)
{
    return ix->n;
}
