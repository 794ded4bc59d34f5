/* The node's cache: pool, index and eviction policy joined, so that their three views of a slot
 * never disagree. Callers hold slots by leases; a cached slot without a lease is evictable, any
 * other slot without a lease is free. Control thread. */
#ifndef BT_KVSTORE_CACHE_CACHE_H
#define BT_KVSTORE_CACHE_CACHE_H

#include "common/policy/evict/evict.h"
#include "common/policy/evict/quota.h"
#include "kvstore/cache/index.h"
#include "kvstore/cache/pool.h"

/* What lies below the slab (kvstore/cache/tier.h) is told what happens to cached blocks. */
struct bt_cache_lower {
    /* A new block is cached in slot; its caller holds a lease. */
    void (*sealed)(void *arg, uint32_t slot);
    /* A later request has found the block and leased it. */
    void (*hit)(void *arg, uint32_t slot);
    /* Nobody holds the block and it would be evicted now, without hurry. true: it has been leased
     * to be saved; whoever did calls bt_cache_evict afterwards. */
    bool (*evicting)(void *arg, uint32_t slot);
    void *arg;
};

/* Who protects blocks (kvstore/cache/pins.h) is told what comes and goes. */
struct bt_cache_guard {
    /* The block in slot can be found now; its caller holds a lease. */
    void (*cached)(void *arg, uint32_t slot);
    /* It is about to leave the cache; nobody holds it. */
    void (*dropped)(void *arg, uint32_t slot);
    void *arg;
};

struct bt_cache {
    struct bt_pool *pool;
    struct bt_index *index;
    const struct bt_evict_policy *policy;
    struct bt_evict *evict;
    uint32_t low; /* so many slots are kept free ahead of demand */
    uint64_t evicted, hits, misses, sealed, duplicates;
    struct bt_cache_lower lower; /* functions may be NULL */
    struct bt_cache_guard guard; /* functions may be NULL */
    /* Copies of other nodes' blocks, until a second request here has used them. Beyond copies_max
     * one leaves as soon as nobody holds it. */
    uint8_t *copy; /* [n_slots], COPY_* of cache.c */
    uint32_t copies, copies_max;
    /* Whose slots are whose, from bt_cache_take on; NULL: everything is nobody's. */
    struct bt_tenants *tenants;
    struct bt_quota quota;
    uint8_t *group; /* [n_slots], BT_QUOTA_NONE: not counted */
};

/* A block that is sealed. */
struct bt_cache_block {
    const struct bt_kv_key *key;
    const struct bt_kv_key *parent; /* of the block before it in the chain; NULL: none or unknown */
    uint32_t n_tokens, depth;
    uint32_t reused_tokens; /* of the request that made it: what was cached of its prompt */
    bt_evict_origin_t origin;
    /* It only passes through, on its way to or from the SSD: it leaves as soon as nobody holds it,
     * unless another request has used it. What lies below is not told of it. */
    bool passing;
};

struct bt_cache *bt_cache_create(struct bt_slab *slab, const struct bt_kv_layout *layout,
                                 uint32_t transit_max, const struct bt_evict_policy *policy);
void bt_cache_destroy(struct bt_cache *c);
/* Before any slot is taken or adopted; tenants outlives the cache. */
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
/* Seals a WRITING slot and indexes it; false: the key was there already, the slot stays private
 * to its holders. */
bool bt_cache_seal(struct bt_cache *c, uint32_t slot, const struct bt_cache_block *b);
/* As bt_cache_seal, for a block that was fetched from another node for one request: that
 * request's lookup counts as no second use of it, so it stays on probation. */
bool bt_cache_seal_copy(struct bt_cache *c, uint32_t slot, const struct bt_cache_block *b);
/* Indexes a SEALED slot of an adopted slab, if its bytes are the sealed ones (bt_pool_header_ok),
 * used as often as its header says, and last of all so far; false: they are not, or the key is
 * there already. Takes the caller's lease. */
bool bt_cache_readmit(struct bt_cache *c, uint32_t slot);
/* Drops one lease of each, last first: a chain's head is left the youngest. */
void bt_cache_put(struct bt_cache *c, const uint32_t *slots, uint32_t n);
/* The same, where a receiver has found other bytes than were sealed: the CRC of each cached block
 * is computed, and one that has gone bad leaves the cache with its last lease (logged). */
void bt_cache_put_doubted(struct bt_cache *c, const uint32_t *slots, uint32_t n);
/* Drops one lease of a cached block and, if it was the last, the block. */
void bt_cache_evict(struct bt_cache *c, uint32_t slot);
/* Marks a held, not cached slot as possibly still written by the dead. Cached ones stay. */
void bt_cache_quarantine(struct bt_cache *c, uint32_t slot);
/* Evicts until `low` slots are free (or being saved below) or nothing is evictable; at most max of
 * them. */
void bt_cache_trim(struct bt_cache *c, uint32_t max);

#endif
