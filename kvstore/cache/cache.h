/* The node's cache: keeps pool, index and eviction policy consistent. Callers hold slots by
 * leases. A cached slot without a lease can be evicted; any other slot without a lease is free.
 * Control thread. */
#ifndef BT_KVSTORE_CACHE_CACHE_H
#define BT_KVSTORE_CACHE_CACHE_H

#include "common/policy/evict/evict.h"
#include "common/policy/evict/quota.h"
#include "kvstore/cache/index.h"
#include "kvstore/cache/pool.h"

/* Callbacks of the tier below the slab (kvstore/cache/tier.h). */
struct bt_cache_lower {
    /* A new block is cached in slot; its caller holds a lease. */
    void (*sealed)(void *arg, uint32_t slot);
    /* A later request has found the block and leased it. */
    void (*hit)(void *arg, uint32_t slot);
    /* The block is about to be evicted ahead of demand. true: the callee has leased it to save it,
     * and calls bt_cache_evict afterwards. */
    bool (*evicting)(void *arg, uint32_t slot);
    void *arg;
};

/* Callbacks of the pins (kvstore/cache/pins.h). */
struct bt_cache_guard {
    /* The block in slot can be found now; its caller holds a lease. */
    void (*cached)(void *arg, uint32_t slot);
    /* The block is about to leave the cache; it has no lease. */
    void (*dropped)(void *arg, uint32_t slot);
    void *arg;
};

struct bt_cache {
    struct bt_pool *pool;
    struct bt_index *index;
    const struct bt_evict_policy *policy;
    struct bt_evict *evict;
    uint32_t low; /* slots that are kept free ahead of demand */
    uint64_t evicted, hits, misses, sealed, duplicates;
    struct bt_cache_lower lower; /* functions may be NULL */
    struct bt_cache_guard guard; /* functions may be NULL */
    /* Copies of other nodes' blocks that only one request has used here. While there are more than
     * copies_max, a copy leaves with its last lease. */
    uint8_t *copy; /* [n_slots], COPY_* of cache.c */
    uint32_t copies, copies_max;
    /* bt_cache_take counts slots for tenants from then on. NULL: there are no tenants. */
    struct bt_tenants *tenants;
    struct bt_quota quota;
    uint8_t *group; /* [n_slots], BT_QUOTA_NONE: not counted */
};

/* A block to be sealed. */
struct bt_cache_block {
    const struct bt_kv_key *key;
    const struct bt_kv_key *parent; /* of the block before it in the chain; NULL: none or unknown */
    uint32_t n_tokens, depth;
    uint32_t reused_tokens; /* cached prefix of the request that made it */
    bt_evict_origin_t origin;
    /* A block of a pass-through prompt: it leaves with its last lease, unless another request has
     * used it. The tier below is not told. */
    bool passing;
};

struct bt_cache *bt_cache_create(struct bt_slab *slab, const struct bt_kv_layout *layout,
                                 uint32_t transit_max, const struct bt_evict_policy *policy);
void bt_cache_destroy(struct bt_cache *c);
/* Call before any slot is taken or adopted. tenants must outlive the cache. */
void bt_cache_set_tenants(struct bt_cache *c, struct bt_tenants *tenants);

/* Leases the longest prefix of keys[0..n) that is cached; returns its length, slots[0..ret). */
uint32_t bt_cache_prefix(struct bt_cache *c, const struct bt_kv_key *keys, uint32_t n,
                         uint32_t *slots);
/* Leases the cached block of key without counting a use; its slot or UINT32_MAX. */
uint32_t bt_cache_hold(struct bt_cache *c, const struct bt_kv_key *key);
/* Takes n WRITING slots for a tenant's group, with a lease each, and evicts as needed: first the
 * group's own blocks beyond its quota. ERR_EXHAUSTED: no slot is taken. */
bt_status_t bt_cache_take(struct bt_cache *c, uint8_t group, uint32_t n,
                          uint32_t *slots) BT_MUST_CHECK;
/* Seals a WRITING slot and indexes its block. false: the key is indexed already; the slot stays
 * private to its holders. */
bool bt_cache_seal(struct bt_cache *c, uint32_t slot, const struct bt_cache_block *b);
/* As bt_cache_seal, for a block that one request has fetched from another node. That request's
 * lookup does not count as a second use. */
bool bt_cache_seal_copy(struct bt_cache *c, uint32_t slot, const struct bt_cache_block *b);
/* Indexes a SEALED slot of an adopted slab if bt_pool_header_ok. Its number of uses comes from its
 * header, and it becomes the most recently used block. false: the bytes are wrong, or the key is
 * indexed already. Takes the caller's lease in both cases. */
bool bt_cache_readmit(struct bt_cache *c, uint32_t slot);
/* Drops one lease of each slot, last first, so that a chain is evicted from its end. */
void bt_cache_put(struct bt_cache *c, const uint32_t *slots, uint32_t n);
/* The same after a receiver has found wrong bytes: computes the CRC of each cached block. A
 * damaged block is logged and leaves the cache with its last lease. */
void bt_cache_put_doubted(struct bt_cache *c, const uint32_t *slots, uint32_t n);
/* Drops one lease of a cached block and, if it was the last, the block. */
void bt_cache_evict(struct bt_cache *c, uint32_t slot);
/* Marks a held slot that is not cached: a dead process may still write to it. Cached slots stay. */
void bt_cache_quarantine(struct bt_cache *c, uint32_t slot);
/* Evicts at most max blocks, until `low` slots are free or being saved to the tier below. */
void bt_cache_trim(struct bt_cache *c, uint32_t max);

#endif
