/* Writes blocks to the SSD and reads them back. A block that is being written holds a lease of its
 * slab slot, so it cannot be evicted. A slot that a block is read into is WRITING and belongs to no
 * request. Control thread. */
#include "kvstore/cache/tier.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/list.h"
#include "common/base/map.h"
#include "common/policy/evict/recent.h"

#define RETRY_MS 20 /* interval at which a busy disk is tried again */

struct bt_tier_save {    /* a block being written, or about to be */
    struct bt_list link; /* in tier->saves, or tier->passing until its turn comes */
    struct bt_tier *t;
    uint32_t slot;
    bool evicting;
    bool lead;                               /* its slot is leased already while it waits */
    void (*done)(void *arg, bt_status_t st); /* may be NULL */
    void *arg;
};

struct fetch { /* a block being read */
    struct bt_tier *t;
    struct bt_kv_key key;
    uint32_t slot, depth;
    bool passing; /* for all waiters */
    struct bt_list waiters;
};

struct waiter { /* a bt_tier_read that waits for a block */
    struct bt_list link;
    struct bt_tier_read *l;
};

struct bt_tier_read {
    struct bt_list link;
    struct bt_tier *t;
    uint32_t *slots, n_slots; /* leased */
    struct waiter *waiters;
    uint32_t n, pending;
    struct bt_timer timer;
    void (*done)(void *arg);
    void *arg;
    bool ended; /* done was called */
};

struct bt_tier {
    struct bt_tier_config c;
    struct bt_ssd *ssd;
    struct bt_recent *recent;
    struct bt_map *fetches; /* key -> struct fetch */
    struct bt_list saves, passing, reads;
    uint32_t n_saves, saves_max; /* writes under way; the limit keeps them from filling a small
                                    slab */
    uint32_t n_leads;
    /* Slots whose blocks wait for their turn to be written, and their generations; 0: no. */
    uint32_t *wanted, *wanted_gen; /* a ring, and by slot: [n_slots] */
    uint32_t n_slots, wanted_at, n_wanted;
    struct bt_timer retry;
    struct {
        void (*fn)(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key,
                   uint32_t depth);
        void *arg;
    } observers[BT_TIER_OBSERVERS];
    bool destroying;
    struct {
        struct bt_metric *hits, *failed, *late;
    } m;
};

/* ---- writing ---- */

static void take_turns(struct bt_tier *t);

/* Frees v, which has ended or was never started. */
static void save_free(struct bt_tier_save *v)
{
    struct bt_tier *t = v->t;
    bt_list_remove(&v->link);
    if (v->lead) {
        t->n_leads--;
        bt_cache_put(t->c.cache, &v->slot, 1);
    }
    free(v);
}

/* The SSD counts and reports a failure; the block in the slab is unchanged. */
static void on_saved(void *arg, bt_status_t st)
{
    struct bt_tier_save *v = arg;
    struct bt_tier *t = v->t;
    t->n_saves--;
    if (v->evicting) {
        bt_cache_evict(t->c.cache, v->slot);
    } else {
        bt_cache_put(t->c.cache, &v->slot, 1);
    }
    if (v->done != NULL) {
        v->done(v->arg, st);
    }
    save_free(v);
    take_turns(t);
}

/* Leases v's block and writes it. Statuses as of bt_ssd_write. */
static bt_status_t begin(struct bt_tier *t, struct bt_tier_save *v)
{
    struct bt_pool *pool = t->c.cache->pool;
    uint32_t slot = v->slot;
    if (t->n_saves >= t->saves_max) {
        return BT_AGAIN;
    }
    bt_status_t st = bt_ssd_write(t->ssd, slot, bt_pool_key(pool, slot), bt_pool_depth(pool, slot),
                                  t->c.cache->group[slot], on_saved, v);
    if (st == BT_OK) {
        bt_pool_lease(pool, slot);
        if (bt_index_has_slot(t->c.cache->index, slot)) {
            t->c.cache->policy->pin(t->c.cache->evict, slot);
        }
        bt_list_remove(&v->link);
        bt_list_insert_tail(&t->saves, &v->link);
        t->n_saves++;
    }
    return st;
}

static struct bt_tier_save *save_new(struct bt_tier *t, uint32_t slot)
{
    struct bt_tier_save *v = bt_calloc(1, sizeof(*v));
    v->t = t;
    v->slot = slot;
    bt_list_init(&v->link);
    return v;
}

static bt_status_t save(struct bt_tier *t, uint32_t slot, bool evicting)
{
    struct bt_tier_save *v = save_new(t, slot);
    v->evicting = evicting;
    bt_status_t st = begin(t, v);
    if (st != BT_OK) {
        free(v);
    }
    return st;
}

/* ---- blocks that wait for their turn ---- */

static void on_retry(void *arg)
{
    take_turns(arg);
}

/* Blocks of pass-through prompts go first, because they hold slots until they are written. */
static bt_status_t turn_of_passing(struct bt_tier *t)
{
    struct bt_tier_save *v = BT_CONTAINER_OF(t->passing.next, struct bt_tier_save, link);
    bt_status_t st = begin(t, v);
    if (st != BT_OK && st != BT_AGAIN) {
        if (v->done != NULL) {
            v->done(v->arg, st);
        }
        save_free(v);
    }
    return st;
}

static bt_status_t turn_of_wanted(struct bt_tier *t)
{
    uint32_t slot = t->wanted[t->wanted_at];
    bool there = bt_index_has_slot(t->c.cache->index, slot) &&
                 bt_pool_generation(t->c.cache->pool, slot) == t->wanted_gen[slot];
    bt_status_t st = there ? save(t, slot, false) : BT_OK;
    if (st != BT_AGAIN) {
        t->wanted_gen[slot] = 0;
        t->wanted_at = (t->wanted_at + 1) % t->n_slots;
        t->n_wanted--;
    }
    return st;
}

static void take_turns(struct bt_tier *t)
{
    bt_status_t st = BT_OK;
    while (st != BT_AGAIN && !t->destroying && (!bt_list_empty(&t->passing) || t->n_wanted > 0)) {
        st = !bt_list_empty(&t->passing) ? turn_of_passing(t) : turn_of_wanted(t);
    }
    /* No write is under way whose end would call this function. */
    if (st == BT_AGAIN && t->n_saves == 0) {
        bt_timer_start(t->c.loop, &t->retry, RETRY_MS, 0, on_retry, t);
    }
}

/* Writes the block now, or puts its slot into the queue. */
static void want(struct bt_tier *t, uint32_t slot)
{
    bool wait = t->n_wanted > 0 || !bt_list_empty(&t->passing);
    if (t->wanted_gen[slot] == 0 && (wait || save(t, slot, false) == BT_AGAIN)) {
        t->wanted[(t->wanted_at + t->n_wanted++) % t->n_slots] = slot;
        t->wanted_gen[slot] = bt_pool_generation(t->c.cache->pool, slot);
        if (t->n_saves == 0) {
            take_turns(t);
        }
    } else if (t->wanted_gen[slot] != 0) { /* the slot may have another block now */
        t->wanted_gen[slot] = bt_pool_generation(t->c.cache->pool, slot);
    }
}

bt_status_t bt_tier_admit(struct bt_tier *t, const struct bt_kv_key *key, uint32_t depth)
{
    struct bt_ssd_stats s;
    bt_ssd_stats(t->ssd, &s);
    if (!s.up || t->destroying) {
        return BT_ERR_UNAVAILABLE;
    }
    if (bt_ssd_has(t->ssd, key)) {
        return BT_ERR_EXISTS;
    }
    if (depth >= s.slots / 2) {
        return BT_ERR_EXHAUSTED;
    }
    return t->c.policy != BT_TIER_SECOND_USE || bt_recent_again(t->recent, key) ? BT_OK
                                                                                : BT_ERR_EXISTS;
}

/* Writes v now or when its turn comes. false: it cannot be written and was freed. */
static bool pass(struct bt_tier *t, struct bt_tier_save *v)
{
    bt_status_t st = bt_list_empty(&t->passing) ? begin(t, v) : BT_AGAIN;
    if (st == BT_AGAIN && !t->destroying) {
        bt_list_insert_tail(&t->passing, &v->link);
        if (t->n_saves == 0) {
            take_turns(t);
        }
    } else if (st != BT_OK) {
        save_free(v);
        return false;
    }
    return true;
}

struct bt_tier_save *bt_tier_pass(struct bt_tier *t, uint32_t slot,
                                  void (*done)(void *arg, bt_status_t st), void *arg)
{
    struct bt_tier_save *v = save_new(t, slot);
    v->done = done;
    v->arg = arg;
    return pass(t, v) ? v : NULL;
}

void bt_tier_pass_forget(struct bt_tier_save *v)
{
    struct bt_list *i;
    v->done = NULL;
    bt_list_for_each (i, &v->t->passing) {
        if (i == &v->link) { /* its write has not started */
            save_free(v);
            return;
        }
    }
}

void bt_tier_save_beginning(struct bt_tier *t, uint32_t slot)
{
    struct bt_pool *pool = t->c.cache->pool;
    bool waits = t->wanted_gen[slot] != 0 && t->wanted_gen[slot] == bt_pool_generation(pool, slot);
    if (t->destroying || bt_ssd_has(t->ssd, bt_pool_key(pool, slot)) ||
        (t->c.policy != BT_TIER_EVICT && !waits)) {
        return; /* written, being written, or rejected by the policy */
    }
    struct bt_tier_save *v = save_new(t, slot);
    v->lead = true;
    t->n_leads++;
    BT_ASSERT(bt_cache_hold(t->c.cache, bt_pool_key(pool, slot)) == slot);
    (void)pass(t, v); /* if it is not written, it stays an ordinary block */
}

uint32_t bt_tier_beginnings(const struct bt_tier *t)
{
    return t->n_leads;
}

bt_status_t bt_tier_save(struct bt_tier *t, uint32_t slot)
{
    return save(t, slot, false);
}

static void on_sealed(void *arg, uint32_t slot)
{
    struct bt_tier *t = arg;
    const struct bt_kv_key *key = bt_pool_key(t->c.cache->pool, slot);
    if (t->c.policy == BT_TIER_ALWAYS ||
        (t->c.policy == BT_TIER_SECOND_USE && bt_recent_again(t->recent, key))) {
        want(t, slot);
    }
}

static void on_hit(void *arg, uint32_t slot)
{
    struct bt_tier *t = arg;
    if (t->c.policy != BT_TIER_EVICT && !bt_ssd_has(t->ssd, bt_pool_key(t->c.cache->pool, slot))) {
        want(t, slot);
    }
}

static bool on_evicting(void *arg, uint32_t slot)
{
    struct bt_tier *t = arg;
    return t->c.policy == BT_TIER_EVICT && save(t, slot, true) == BT_OK;
}

/* ---- reading ---- */

static void load_done(struct bt_tier_read *l)
{
    if (!l->ended) {
        l->ended = true;
        bt_timer_stop(l->t->c.loop, &l->timer);
        l->done(l->arg); /* may end the read */
    }
}

static void on_late(void *arg)
{
    struct bt_tier_read *l = arg;
    if (l->t->m.late != NULL) {
        bt_metric_add(l->t->m.late, 1);
    }
    load_done(l);
}

/* The block has been read, or its read has failed. Reads that have given up are not in waiters any
 * more. */
static void on_fetched(void *arg, bt_status_t st)
{
    struct fetch *f = arg;
    struct bt_tier *t = f->t;
    struct bt_cache *cache = t->c.cache;
    struct bt_metric *m = st == BT_OK ? t->m.hits : t->m.failed;
    if (m != NULL) {
        bt_metric_add(m, 1);
    }
    if (st == BT_OK) { /* if the same block was computed meanwhile, that one stays */
        struct bt_cache_block b = {.key = &f->key,
                                   .n_tokens = t->c.block_tokens,
                                   .depth = f->depth,
                                   .passing = f->passing};
        bt_cache_seal(cache, f->slot, &b);
    }
    bt_map_del(t->fetches, &f->key);
    while (!bt_list_empty(&f->waiters)) {
        struct waiter *w = BT_CONTAINER_OF(f->waiters.next, struct waiter, link);
        struct bt_tier_read *l = w->l;
        bt_list_remove(&w->link);
        uint32_t slot = st == BT_OK && !l->ended ? bt_cache_hold(cache, &f->key) : UINT32_MAX;
        if (slot != UINT32_MAX) {
            l->slots[l->n_slots++] = slot;
        }
        if (--l->pending == 0) {
            load_done(l);
        }
    }
    bt_cache_put(cache, &f->slot, 1);
    free(f);
}

static struct fetch *fetch_start(struct bt_tier *t, const struct bt_kv_key *key, bool passing)
{
    struct fetch *f = bt_map_get(t->fetches, key);
    if (f != NULL) {
        f->passing = f->passing && passing;
        return f;
    }
    f = bt_calloc(1, sizeof(*f));
    f->t = t;
    f->key = *key;
    f->passing = passing;
    bt_list_init(&f->waiters);
    uint32_t pos = bt_ssd_find(t->ssd, key);
    uint8_t group = pos != UINT32_MAX ? bt_ssd_group(t->ssd, pos) : BT_TENANT_NOBODY;
    if (bt_cache_take(t->c.cache, group, 1, &f->slot) != BT_OK) {
        free(f);
        return NULL;
    }
    if (bt_ssd_read(t->ssd, key, f->slot, &f->depth, on_fetched, f) != BT_OK) {
        bt_cache_put(t->c.cache, &f->slot, 1);
        free(f);
        return NULL;
    }
    bt_map_put(t->fetches, key, f);
    return f;
}

struct bt_tier_read *bt_tier_read(struct bt_tier *t, const struct bt_kv_key *keys, uint32_t n,
                                  bool passing, void (*done)(void *arg), void *arg)
{
    uint32_t end = 0, below = 0;
    for (; end < n; end++) {
        if (bt_index_find(t->c.cache->index, &keys[end]) == UINT32_MAX) {
            if (!bt_ssd_has(t->ssd, &keys[end]) && bt_map_get(t->fetches, &keys[end]) == NULL) {
                break;
            }
            below++;
        }
    }
    if (below == 0 || t->destroying) {
        return NULL;
    }
    struct bt_tier_read *l = bt_calloc(1, sizeof(*l));
    l->t = t;
    l->done = done;
    l->arg = arg;
    l->slots = bt_calloc(end, sizeof(*l->slots));
    l->waiters = bt_calloc(below, sizeof(*l->waiters));
    bt_list_insert_tail(&t->reads, &l->link);
    for (uint32_t i = 0; i < end;
         i++) { /* lease blocks of the slab first, so that reads do not evict them */
        uint32_t slot = bt_cache_hold(t->c.cache, &keys[i]);
        if (slot != UINT32_MAX) {
            l->slots[l->n_slots++] = slot;
        }
    }
    for (uint32_t i = 0; i < end; i++) {
        if (bt_index_find(t->c.cache->index, &keys[i]) != UINT32_MAX) {
            continue;
        }
        struct fetch *f = fetch_start(t, &keys[i], passing);
        if (f == NULL) {
            break; /* blocks behind a gap are useless */
        }
        struct waiter *w = &l->waiters[l->n++];
        w->l = l;
        l->pending++;
        bt_list_insert_tail(&f->waiters, &w->link);
    }
    if (l->pending == 0) {
        bt_tier_read_end(l);
        return NULL;
    }
    bt_timer_start(t->c.loop, &l->timer, t->c.load_ms, 0, on_late, l);
    return l;
}

void bt_tier_read_end(struct bt_tier_read *l)
{
    bt_timer_stop(l->t->c.loop, &l->timer);
    for (uint32_t i = 0; i < l->n; i++) {
        bt_list_remove(&l->waiters[i].link);
    }
    bt_cache_put(l->t->c.cache, l->slots, l->n_slots);
    bt_list_remove(&l->link);
    free(l->slots);
    free(l->waiters);
    free(l);
}

/* ---- create and destroy ---- */

static uint32_t segment_crc(void *arg, uint32_t slot, uint32_t layer, const struct bt_kv_key *key)
{
    struct bt_tier *t = arg; /* c.cache never changes, so any thread may read it */
    return bt_pool_segment_crc(t->c.cache->pool, slot, layer, key);
}

static void on_change(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key,
                      uint32_t depth)
{
    struct bt_tier *t = arg;
    for (uint32_t i = 0; i < BT_TIER_OBSERVERS; i++) {
        if (t->observers[i].fn != NULL) {
            t->observers[i].fn(t->observers[i].arg, added, pos, key, depth);
        }
    }
}

bt_status_t bt_tier_create(const struct bt_tier_config *c, const struct bt_ssd_config *ssd,
                           struct bt_tier **t_p, char *err, size_t err_cap)
{
    struct bt_tier *t = bt_calloc(1, sizeof(*t));
    struct bt_ssd_config sc = *ssd;
    t->c = *c;
    t->fetches = bt_map_create(sizeof(struct bt_kv_key));
    bt_list_init(&t->saves);
    bt_list_init(&t->passing);
    bt_list_init(&t->reads);
    sc.loop = c->loop;
    sc.slab = c->slab;
    sc.metrics = c->metrics;
    sc.tenants = c->cache->tenants;
    sc.segment_crc = segment_crc;
    sc.on_change = on_change;
    sc.arg = t;
    bt_status_t st = bt_ssd_open(&sc, &t->ssd, err, err_cap);
    if (st != BT_OK) {
        bt_map_destroy(t->fetches);
        free(t);
        return st;
    }
    uint32_t n = t->n_slots = c->slab->super->n_slots;
    t->saves_max = BT_MAX(n / 8, 1u);
    t->wanted = bt_calloc(n, sizeof(*t->wanted));
    t->wanted_gen = bt_calloc(n, sizeof(*t->wanted_gen));
    /* Remember at least as many keys as the SSD has slots, so that a prompt that fills it can get
     * its second use. */
    uint64_t below = BT_MIN(ssd->bytes / c->slab->super->slot_bytes, (uint64_t)UINT32_MAX);
    t->recent = bt_recent_create(BT_MAX(BT_MIN(n, UINT32_MAX / 8) * 8, (uint32_t)below));
    c->cache->lower = (struct bt_cache_lower){
        .sealed = on_sealed, .hit = on_hit, .evicting = on_evicting, .arg = t};
    if (c->policy == BT_TIER_EVICT) {
        c->cache->low =
            BT_MAX(c->cache->low, n / 16); /* free slots early enough to write their blocks first */
    }
    if (c->metrics != NULL) {
        static const char *const name = "baton_kvstore_ssd_loads_total";
        t->m.hits = bt_metrics_counter(c->metrics, name, "result=\"ok\"");
        t->m.failed = bt_metrics_counter(c->metrics, name, "result=\"failed\"");
        t->m.late = bt_metrics_counter(c->metrics, "baton_kvstore_ssd_late_total", NULL);
    }
    *t_p = t;
    return BT_OK;
}

void bt_tier_destroy(struct bt_tier *t)
{
    if (t == NULL) {
        return;
    }
    BT_ASSERT(bt_list_empty(&t->reads));
    t->destroying = true;
    while (!bt_list_empty(&t->passing)) {
        struct bt_tier_save *v = BT_CONTAINER_OF(t->passing.next, struct bt_tier_save, link);
        BT_ASSERT(v->lead); /* callers have ended all others */
        save_free(v);
    }
    bt_timer_stop(t->c.loop, &t->retry);
    t->c.cache->lower = (struct bt_cache_lower){0};
    bt_ssd_close(t->ssd); /* ends every write and read; observers hear nothing of it */
    BT_ASSERT(bt_list_empty(&t->saves) && bt_map_count(t->fetches) == 0);
    bt_map_destroy(t->fetches);
    bt_recent_destroy(t->recent);
    free(t->wanted);
    free(t->wanted_gen);
    free(t);
}

struct bt_ssd *bt_tier_ssd(const struct bt_tier *t)
{
    return t->ssd;
}

void bt_tier_observe(struct bt_tier *t,
                     void (*fn)(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key,
                                uint32_t depth),
                     void *arg)
{
    uint32_t i = 0;
    while (i < BT_TIER_OBSERVERS && t->observers[i].arg != arg) {
        i++;
    }
    for (uint32_t k = 0; i == BT_TIER_OBSERVERS && k < BT_TIER_OBSERVERS; k++) {
        i = t->observers[k].fn == NULL ? k : i;
    }
    BT_ASSERT(i < BT_TIER_OBSERVERS);
    t->observers[i].fn = fn;
    t->observers[i].arg = fn != NULL ? arg : NULL;
}
