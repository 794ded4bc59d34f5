/* Eviction policy: which cached slot goes when room is needed. Pure: no clock, no I/O; the cache
 * tells it what happens to slots and asks for victims. A policy is a table of functions over its
 * own state, so that others can be tried (and simulated) without touching the cache. */
#ifndef BT_KVSTORE_EVICT_H
#define BT_KVSTORE_EVICT_H

#include "common/base/base.h"

#define BT_EVICT_NONE UINT32_MAX

struct bt_evict; /* a policy's state */

struct bt_evict_policy {
    const char *name;
    struct bt_evict *(*create)(uint32_t n_slots);
    void (*destroy)(struct bt_evict *e);
    /* A new block, the depth-th of its chain, is cached in slot; it is in use (pinned) at first. */
    void (*admit)(struct bt_evict *e, uint32_t slot, uint32_t depth);
    /* A later request has found the block. */
    void (*hit)(struct bt_evict *e, uint32_t slot);
    /* In use: never a victim / not in use any more: the youngest of its class. */
    void (*pin)(struct bt_evict *e, uint32_t slot);
    void (*unpin)(struct bt_evict *e, uint32_t slot);
    /* The block leaves the cache. */
    void (*drop)(struct bt_evict *e, uint32_t slot);
    /* The slot to give up first, BT_EVICT_NONE when all are in use. Stays until dropped. */
    uint32_t (*victim)(const struct bt_evict *e);
    uint32_t (*evictable)(const struct bt_evict *e);
};

/* Segmented LRU: new blocks are on probation and go before any block that was hit; a hit block is
 * protected, at most 4/5 of the slots are, the oldest of them return to probation. Users unpin a
 * chain from its tail to its head, so that among equals tails go first. */
extern const struct bt_evict_policy bt_evict_slru;
/* What it is compared with: the least recently used first; the least often used first (uses since
 * it was cached), among equals the least recently used; as LFU, among equals the deepest first. */
extern const struct bt_evict_policy bt_evict_lru, bt_evict_lfu, bt_evict_length_aware;
/* LRU in which a second use is worth one turnover of the cache (kvstore/evict_heap.c has the
 * reason). */
extern const struct bt_evict_policy bt_evict_reuse;

/* NULL: no policy has this name. */
const struct bt_evict_policy *bt_evict_by_name(const char *name);

#endif
