/* Blocks of an adopted slab are compared in batches, so that new blocks do not wait long for the
 * seal thread. Control thread. */
#include "kvstore/cache/adopt.h"

#include <stdlib.h>

#include "common/base/sha256.h"
#include "common/log/log.h"

#define BATCH 64u

struct found {
    uint64_t used_ns;
    uint32_t slot, depth;
};

struct bt_adopt {
    struct bt_loop *loop;
    struct bt_cache *cache;
    struct bt_sealer *sealer;
    struct found *found;
    uint32_t n_found, at, n_batch; /* [at, at + n_batch) are being compared */
    uint32_t *quarantine, n_quarantine;
    uint64_t start_ns;
    struct bt_adopt_stats n;
    struct bt_timer timer;
};

static void next_batch(struct bt_adopt *a);

static void on_checked(void *arg)
{
    struct bt_adopt *a = arg;
    for (uint32_t i = a->at; i < a->at + a->n_batch; i++) {
        uint32_t slot = a->found[i].slot;
        struct bt_kv_key name = *bt_pool_key(a->cache->pool, slot);
        bool bad = !bt_pool_header_ok(a->cache->pool, slot);
        if (bt_cache_readmit(a->cache, slot)) {
            a->n.blocks++;
        } else {
            char key[17];
            a->n.bad += bad;
            bt_hex(name.b, 8, key);
            BT_DEBUG("block_gone", "tier=slab key=%s why=%s", key,
                     bad ? "not adopted: wrong checksum" : "not adopted: here twice");
        }
    }
    a->at += a->n_batch;
    a->n.pending -= a->n_batch;
    a->n_batch = 0;
    next_batch(a);
}

static void next_batch(struct bt_adopt *a)
{
    uint32_t slots[BATCH], n = BT_MIN(BATCH, a->n_found - a->at);
    struct bt_kv_key names[BATCH];
    if (n == 0) {
        BT_INFO("slab_checked", "blocks=%u bad=%u ms=%llu", a->n.blocks, a->n.bad,
                (unsigned long long)((bt_mono_ns() - a->start_ns) / 1000000));
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = a->found[a->at + i].slot;
        names[i] = *bt_pool_key(a->cache->pool, slots[i]);
    }
    a->n_batch = n;
    bt_sealer_submit(a->sealer, slots, names, n, on_checked, a);
}

static void on_slot(void *arg, uint32_t slot, bool sealed)
{
    struct bt_adopt *a = arg;
    if (!sealed) {
        a->quarantine[a->n_quarantine++] = slot;
        return;
    }
    uint32_t count;
    uint64_t used_ns = bt_pool_last_use(a->cache->pool, slot, &count);
    uint32_t depth = bt_pool_depth(a->cache->pool, slot);
    a->found[a->n_found++] = (struct found){used_ns, slot, depth};
}

/* The longest unused comes first, so that it is evicted first. Within one request the end of a
 * chain comes before its beginning. */
static int by_age(const void *x, const void *y)
{
    const struct found *a = x, *b = y;
    if (a->used_ns != b->used_ns) {
        return a->used_ns < b->used_ns ? -1 : 1;
    }
    return a->depth == b->depth ? 0 : a->depth > b->depth ? -1 : 1;
}

static void release_quarantine(struct bt_adopt *a)
{
    bt_cache_put(a->cache, a->quarantine, a->n_quarantine);
    a->n_quarantine = 0;
}

static void on_time(void *arg)
{
    release_quarantine(arg);
}

struct bt_adopt *bt_adopt_start(struct bt_loop *loop, struct bt_cache *cache,
                                struct bt_sealer *sealer)
{
    struct bt_adopt *a = bt_calloc(1, sizeof(*a));
    struct bt_pool_counts c;
    bt_pool_counts(cache->pool, &c);
    a->loop = loop;
    a->cache = cache;
    a->sealer = sealer;
    a->found = bt_calloc(c.total, sizeof(*a->found));
    a->quarantine = bt_calloc(c.total, sizeof(*a->quarantine));
    a->start_ns = bt_mono_ns();
    bt_pool_adopt(cache->pool, on_slot, a);
    qsort(a->found, a->n_found, sizeof(*a->found), by_age);
    a->n.headers = a->n.pending = a->n_found;
    a->n.quarantine = a->n_quarantine;
    BT_INFO("slab_adopted", "slots=%u headers=%u quarantine=%u ms=%llu", c.total, a->n_found,
            a->n_quarantine, (unsigned long long)((bt_mono_ns() - a->start_ns) / 1000000));
    bt_timer_start(loop, &a->timer, BT_POOL_QUARANTINE_MS, 0, on_time, a);
    if (a->n_found > 0) {
        next_batch(a);
    }
    return a;
}

void bt_adopt_stats(const struct bt_adopt *a, struct bt_adopt_stats *s_p)
{
    *s_p = a->n;
    s_p->quarantine = a->n_quarantine;
}

void bt_adopt_destroy(struct bt_adopt *a)
{
    if (a == NULL) {
        return;
    }
    bt_timer_stop(a->loop, &a->timer);
    release_quarantine(a);
    for (; a->at < a->n_found; a->at++) {
        bt_cache_put(a->cache, &a->found[a->at].slot, 1);
    }
    free(a->found);
    free(a->quarantine);
    free(a);
}
