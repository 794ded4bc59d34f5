/* Eviction policy: which cached slot goes when room is needed, of all or of one group. Pure: no
 * clock, no I/O; the cache tells it what happens to slots and asks for victims. A policy is a table
 * of functions over its own state, so that others can be tried (and simulated) without touching the
 * cache. */
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
    BT_EVICT_COPY,      /* came from another node, which had it then */
    BT_EVICT_PARTIAL    /* not full. The kvstore caches none, replayed traces have them */
} bt_evict_origin_t;

/* What a policy may know of a new block. */
struct bt_evict_block {
    uint64_t hash;          /* of its key */
    uint32_t depth;         /* ordinal in its chain */
    uint32_t start_tokens;  /* of its chain that lie before it */
    uint32_t parent;        /* slot of the block before it, BT_EVICT_NONE: unknown or not cached */
    uint32_t reused_tokens; /* of the request that made it: what was cached of its prompt */
    bt_evict_origin_t origin;
    uint32_t uses; /* 0: it is new. Else it was kept over a restart and used so often before: that
                    * it comes now is no use of it, and nothing to learn from */
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
    /* In use: never a victim / not in use any more: the youngest of its class. */
    void (*pin)(struct bt_evict *e, uint32_t slot);
    void (*unpin)(struct bt_evict *e, uint32_t slot);
    /* The block leaves the cache. */
    void (*drop)(struct bt_evict *e, uint32_t slot);
    /* The slot to give up first, of some groups or (NULL) of all; BT_EVICT_NONE when all are in
     * use. Stays until dropped. */
    uint32_t (*victim)(const struct bt_evict *e, const struct bt_evict_groups *of);
    /* The same among the slots of one group. */
    uint32_t (*victim_of)(const struct bt_evict *e, uint8_t group);
    uint32_t (*evictable)(const struct bt_evict *e);
};

/* Segmented LRU: new blocks are on probation and go before any block that was hit; a hit block is
 * protected, at most 4/5 of the slots are, the oldest of them return to probation. Users unpin a
 * chain from its tail to its head, so that among equals tails go first. */
extern const struct bt_evict_policy bt_evict_slru;
/* What it is compared with: the least recently used first; the least often used first (uses since
 * it was cached), among equals the least recently used; as LFU, among equals the deepest first. */
extern const struct bt_evict_policy bt_evict_lru, bt_evict_lfu, bt_evict_length_aware;
/* What is learned from the requests decides: what a slot can earn with the block that it has, by
 * how the block was used, where it came from and its age (common/policy/evict/density.c). Never
 * gives up a block before what is cached behind it, unless all of that is in use. */
extern const struct bt_evict_policy bt_evict_density;

extern const char bt_evict_names[]; /* of all policies, for messages */
/* NULL: no policy has this name. */
const struct bt_evict_policy *bt_evict_by_name(const char *name);

#endif
