/* Eviction policy: which cached slot is given up when room is needed, among all slots or those of
 * one group. Pure: no clock, no I/O. The cache reports what happens to slots and asks for victims.
 * A policy is a table of functions over its own state, so the cache and the simulator can use any
 * of them. */
#ifndef BT_POLICY_EVICT_EVICT_H
#define BT_POLICY_EVICT_EVICT_H

#include "common/base/base.h"

#define BT_EVICT_NONE   UINT32_MAX
#define BT_EVICT_GROUPS 255u /* of slots: tenants (common/policy/evict/tenants.h) */

struct bt_evict; /* a policy's state */

struct bt_evict_groups { /* a set */
    uint64_t bits[BT_DIV_UP(BT_EVICT_GROUPS, 64u)];
};

static inline bool bt_evict_groups_has(const struct bt_evict_groups *s, uint32_t group)
{
    return (s->bits[group / 64] >> (group % 64) & 1) != 0;
}

static inline void bt_evict_groups_set(struct bt_evict_groups *s, uint32_t group, bool in)
{
    uint64_t bit = 1ull << (group % 64);
    s->bits[group / 64] = (s->bits[group / 64] & ~bit) | (in ? bit : 0);
}

typedef enum {
    BT_EVICT_COMPUTED,  /* by a prefill */
    BT_EVICT_GENERATED, /* of an answer */
    BT_EVICT_COPY,      /* copied from another node */
    BT_EVICT_PARTIAL    /* not full; only replayed traces have them */
} bt_evict_origin_t;

/* The properties of a new block that a policy may use. */
struct bt_evict_block {
    uint64_t hash;          /* of its key */
    uint32_t depth;         /* ordinal in its chain */
    uint32_t start_tokens;  /* tokens of the chain before it */
    uint32_t parent;        /* slot of the block before it, BT_EVICT_NONE: unknown or not cached */
    uint32_t reused_tokens; /* cached prefix of the request that made it */
    bt_evict_origin_t origin;
    /* 0: the block is new. Otherwise it was adopted after a restart, and had so many uses before.
     * Its admission does not count as a use, and nothing is learned from it. */
    uint32_t uses;
    uint8_t group; /* below BT_EVICT_GROUPS */
};

struct bt_evict_policy {
    const char *name;
    struct bt_evict *(*create)(uint32_t n_slots);
    void (*destroy)(struct bt_evict *e);
    /* A new block is cached in slot; it is in use (pinned) at first. */
    void (*admit)(struct bt_evict *e, uint32_t slot, const struct bt_evict_block *b);
    /* A later request has found the block, behind the one in slot parent (BT_EVICT_NONE: none). */
    void (*hit)(struct bt_evict *e, uint32_t slot, uint32_t parent);
    /* pin: in use, never a victim. unpin: not in use any more, and the youngest of its class. */
    void (*pin)(struct bt_evict *e, uint32_t slot);
    void (*unpin)(struct bt_evict *e, uint32_t slot);
    /* The block leaves the cache. */
    void (*drop)(struct bt_evict *e, uint32_t slot);
    /* The first slot to give up, of some groups or (NULL) of all. BT_EVICT_NONE: all are in use.
     * The slot stays cached until drop. */
    uint32_t (*victim)(const struct bt_evict *e, const struct bt_evict_groups *of);
    /* The same among the slots of one group. */
    uint32_t (*victim_of)(const struct bt_evict *e, uint8_t group);
    uint32_t (*evictable)(const struct bt_evict *e);
};

/* Segmented LRU: new blocks are on probation and go before any block that was hit. A hit block is
 * protected. At most 4/5 of the slots are protected; the oldest of them return to probation.
 * Callers unpin a chain from its end, so that it is evicted from its end. */
extern const struct bt_evict_policy bt_evict_slru;
/* For comparison. LRU: least recently used first. LFU: fewest uses since it was cached, then least
 * recently used. LengthAware: as LFU, then the deepest first. */
extern const struct bt_evict_policy bt_evict_lru, bt_evict_lfu, bt_evict_length_aware;
/* The default: learns from requests how many hits a slot earns, by the uses, origin and age of its
 * block (common/policy/evict/density.c). Evicts a chain from its end, unless all blocks behind are
 * in use. */
extern const struct bt_evict_policy bt_evict_density;

extern const char bt_evict_names[]; /* names of all policies, for messages */
/* NULL: no policy has this name. */
const struct bt_evict_policy *bt_evict_by_name(const char *name);

#endif
