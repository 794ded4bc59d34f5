/* Keeps pool, index and policy consistent. Control thread. */
#include "kvstore/cache/cache.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/sha256.h"
#include "common/log/log.h"

enum { COPY_NONE, COPY_UNUSED, COPY_USED, COPY_PASSING };

struct bt_cache *bt_cache_create(struct bt_slab *slab, const struct bt_kv_layout *layout,
                                 uint32_t transit_max, const struct bt_evict_policy *policy)
{
    struct bt_cache *c = bt_calloc(1, sizeof(*c));
    uint32_t n = slab->super->n_slots;
    c->pool = bt_pool_create(slab, layout, transit_max);
    c->index = bt_index_create(n);
    c->policy = policy;
    c->evict = policy->create(n);
    c->low = n / 64;
    c->copy = bt_calloc(n, 1);
    c->group = bt_malloc(BT_MAX(n, 1u));
    memset(c->group, BT_QUOTA_NONE, n);
    bt_quota_init(&c->quota, NULL, BT_TENANT_SLAB, n);
    c->copies_max = n;
    return c;
}

void bt_cache_destroy(struct bt_cache *c)
{
    if (c == NULL) {
        return;
    }
    c->policy->destroy(c->evict);
    bt_index_destroy(c->index);
    bt_pool_destroy(c->pool);
    free(c->copy);
    free(c->group);
    free(c);
}

void bt_cache_set_tenants(struct bt_cache *c, struct bt_tenants *tenants)
{
    c->tenants = tenants;
    bt_quota_init(&c->quota, tenants, BT_TENANT_SLAB, bt_index_slots(c->index));
}

/* Counts the slot for a group until it is free. */
static void own(struct bt_cache *c, uint32_t slot, uint8_t group)
{
    if (c->group[slot] == BT_QUOTA_NONE) {
        c->group[slot] = group;
        bt_quota_add(&c->quota, group);
    }
}

static void free_slot(struct bt_cache *c, uint32_t slot)
{
    if (c->group[slot] != BT_QUOTA_NONE) {
        bt_quota_sub(&c->quota, c->group[slot]);
        c->group[slot] = BT_QUOTA_NONE;
    }
    bt_pool_free(c->pool, slot);
}

/* Counts a request that has found the block in slot. false: it is the request that fetched the
 * block. */
static bool count_use(struct bt_cache *c, uint32_t slot)
{
    if (c->copy[slot] == COPY_UNUSED) {
        c->copy[slot] = COPY_USED;
        return false;
    }
    /* A second request has used it, so it becomes an ordinary block. */
    c->copies -= c->copy[slot] == COPY_USED;
    c->copy[slot] = COPY_NONE;
    return true;
}

uint32_t bt_cache_prefix(struct bt_cache *c, const struct bt_kv_key *keys, uint32_t n,
                         uint32_t *slots)
{
    uint32_t i = 0;
    for (; i < n; i++) {
        uint32_t slot = bt_index_find(c->index, &keys[i]);
        if (slot == UINT32_MAX) {
            break;
        }
        bt_pool_lease(c->pool, slot);
        c->policy->pin(c->evict, slot);
        slots[i] = slot;
    }
    c->hits += i;
    c->misses += n - i;
    uint64_t now = i > 0 ? bt_mono_ns() : 0;
    for (uint32_t k = 0; k < i; k++) {
        if (!count_use(c, slots[k])) {
            continue;
        }
        bt_pool_used(c->pool, slots[k], now, true);
        c->policy->hit(c->evict, slots[k], k > 0 ? slots[k - 1] : BT_EVICT_NONE);
        if (c->lower.hit != NULL) {
            c->lower.hit(c->lower.arg, slots[k]);
        }
    }
    return i;
}

uint32_t bt_cache_hold(struct bt_cache *c, const struct bt_kv_key *key)
{
    uint32_t slot = bt_index_find(c->index, key);
    if (slot != UINT32_MAX) {
        bt_pool_lease(c->pool, slot);
        c->policy->pin(c->evict, slot);
    }
    return slot;
}

/* Removes the block of a slot without a lease. why: for the log. */
static void drop_block(struct bt_cache *c, uint32_t slot, const char *why)
{
    BT_ASSERT(bt_pool_leases(c->pool, slot) == 0);
    if (bt_log_enabled(BT_LOG_DEBUG)) {
        char key[17];
        bt_hex(bt_pool_key(c->pool, slot)->b, 8, key);
        BT_DEBUG("block_gone", "tier=slab key=%s why=%s", key, why);
    }
    if (c->guard.dropped != NULL) {
        c->guard.dropped(c->guard.arg, slot);
    }
    c->evicted += c->copy[slot] != COPY_PASSING;
    c->copies -= c->copy[slot] == COPY_UNUSED || c->copy[slot] == COPY_USED;
    c->copy[slot] = COPY_NONE;
    c->policy->drop(c->evict, slot);
    bt_index_remove(c->index, slot);
    free_slot(c, slot);
}

static bool evict_one(struct bt_cache *c, uint8_t group, uint32_t more, const char *why)
{
    uint32_t slot = bt_quota_victim(&c->quota, c->policy, c->evict, group, more);
    if (slot == BT_EVICT_NONE) {
        return false;
    }
    drop_block(c, slot, why);
    return true;
}

void bt_cache_evict(struct bt_cache *c, uint32_t slot)
{
    BT_ASSERT(bt_index_has_slot(c->index, slot));
    if (bt_pool_unlease(c->pool, slot) == 0) {
        drop_block(c, slot, "evicted when it was saved");
    }
}

bt_status_t bt_cache_take(struct bt_cache *c, uint8_t group, uint32_t n, uint32_t *slots)
{
    struct bt_pool_counts counts;
    bt_pool_counts(c->pool, &counts);
    if (n > counts.free && n - counts.free > c->policy->evictable(c->evict)) {
        return BT_ERR_EXHAUSTED;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = bt_pool_take(c->pool);
        if (slot == BT_POOL_NONE) {
            BT_ASSERT(evict_one(c, group, n - i, "evicted for another"));
            slot = bt_pool_take(c->pool);
        }
        own(c, slot, group);
        if (c->tenants != NULL) {
            bt_pool_set_tenant(c->pool, slot, bt_tenants_tag(c->tenants, group));
        }
        slots[i] = slot;
    }
    return BT_OK;
}

/* Tells the policy about a block that was just indexed. uses: before a restart; 0: it is new. */
static void admit(struct bt_cache *c, uint32_t slot, const struct bt_cache_block *b, uint32_t uses)
{
    uint32_t parent = b->parent != NULL ? bt_index_find(c->index, b->parent) : UINT32_MAX;
    own(c, slot, BT_TENANT_NOBODY); /* if no group has it yet */
    struct bt_evict_block e = {.hash = bt_index_hash(b->key),
                               .depth = b->depth,
                               .start_tokens = b->depth * b->n_tokens,
                               .parent = parent == UINT32_MAX ? BT_EVICT_NONE : parent,
                               .reused_tokens = b->reused_tokens,
                               .origin = b->origin,
                               .uses = uses,
                               .group = c->group[slot]};
    c->policy->admit(c->evict, slot, &e);
    if (c->guard.cached != NULL) {
        c->guard.cached(c->guard.arg, slot);
    }
}

bool bt_cache_seal(struct bt_cache *c, uint32_t slot, const struct bt_cache_block *b)
{
    bt_pool_seal(c->pool, slot, b->key, b->n_tokens, b->depth, bt_mono_ns());
    if (!bt_index_add(c->index, b->key, b->depth, slot)) {
        c->duplicates++;
        return false;
    }
    admit(c, slot, b, 0);
    c->sealed++;
    if (b->passing) {
        c->copy[slot] = COPY_PASSING;
    } else if (c->lower.sealed != NULL) {
        c->lower.sealed(c->lower.arg, slot);
    }
    return true;
}

bool bt_cache_seal_copy(struct bt_cache *c, uint32_t slot, const struct bt_cache_block *b)
{
    if (!bt_cache_seal(c, slot, b)) {
        return false;
    }
    if (!b->passing) {
        c->copy[slot] = COPY_UNUSED;
        c->copies++;
    }
    return true;
}

bool bt_cache_readmit(struct bt_cache *c, uint32_t slot)
{
    uint32_t uses;
    struct bt_cache_block b = {.key = bt_pool_key(c->pool, slot),
                               .n_tokens = bt_pool_header(c->pool, slot)->n_tokens,
                               .depth = bt_pool_depth(c->pool, slot)};
    if (!bt_pool_header_ok(c->pool, slot) || !bt_index_add(c->index, b.key, b.depth, slot)) {
        bt_cache_put(c, &slot, 1);
        return false;
    }
    if (c->tenants != NULL) {
        own(c, slot, bt_tenants_by_tag(c->tenants, bt_pool_header(c->pool, slot)->tenant));
    }
    (void)bt_pool_last_use(c->pool, slot, &uses);
    admit(c, slot, &b, uses);
    /* Ending a lease is not a use, so the header does not change. */
    if (bt_pool_unlease(c->pool, slot) == 0) {
        c->policy->unpin(c->evict, slot);
    }
    return true;
}

void bt_cache_put(struct bt_cache *c, const uint32_t *slots, uint32_t n)
{
    uint64_t now = 0;
    while (n-- > 0) {
        uint32_t slot = slots[n];
        if (bt_pool_unlease(c->pool, slot) > 0) {
            continue;
        }
        bool copy = c->copy[slot] == COPY_UNUSED || c->copy[slot] == COPY_USED;
        if (bt_index_has_slot(c->index, slot) &&
            (c->copy[slot] == COPY_PASSING || (copy && c->copies > c->copies_max))) {
            drop_block(c, slot,
                       copy ? "copies of other nodes' blocks had more than a quarter of the slots"
                            : "its prompt is too large to stay in the slab");
        } else if (bt_index_has_slot(c->index, slot)) {
            now = now != 0 ? now : bt_mono_ns();
            bt_pool_used(c->pool, slot, now, false); /* it was in use until now */
            c->policy->unpin(c->evict, slot);
        } else {
            free_slot(c, slot);
        }
    }
}

void bt_cache_put_doubted(struct bt_cache *c, const uint32_t *slots, uint32_t n)
{
    while (n-- > 0) {
        uint32_t slot = slots[n];
        if (!bt_index_has_slot(c->index, slot) || bt_pool_verify(c->pool, slot) == BT_OK) {
            bt_cache_put(c, &slot, 1);
            continue;
        }
        BT_ERROR("block_bad", "slot=%u then=%s", slot,
                 "its bytes in the slab have changed since it was sealed; the block is removed");
        if (bt_pool_unlease(c->pool, slot) == 0) {
            drop_block(c, slot, "its bytes have changed");
        }
    }
}

void bt_cache_quarantine(struct bt_cache *c, uint32_t slot)
{
    bt_slot_state_t s = bt_pool_state(c->pool, slot);
    if (!bt_index_has_slot(c->index, slot) && (s == BT_SLOT_WRITING || s == BT_SLOT_SEALED)) {
        bt_pool_quarantine(c->pool, slot);
    }
}

void bt_cache_trim(struct bt_cache *c, uint32_t max)
{
    struct bt_pool_counts counts;
    bt_pool_counts(c->pool, &counts);
    for (uint32_t left = counts.free; left < c->low && max > 0; left++, max--) {
        uint32_t slot = bt_quota_victim(&c->quota, c->policy, c->evict, BT_QUOTA_NONE, 0);
        bool saving = slot != BT_EVICT_NONE && c->lower.evicting != NULL &&
                      c->lower.evicting(c->lower.arg, slot);
        if (!saving && !evict_one(c, BT_QUOTA_NONE, 0, "evicted ahead of need")) {
            break;
        }
    }
}
