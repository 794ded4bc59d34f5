/* Blocks that local workers read without a grant: a row that was preempted takes its KV back from
 * the slab, or through it from the SSD (LocalLease, LocalUnlease). A leased slot cannot be evicted.
 * A lease ends as an open does: by the worker's word, or one quarantine after its proven death. One
 * that has been held for reclaim_ms is recalled; a worker that keeps it for as long again is hung
 * and is killed. Control thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/grant_priv.h"

struct lease {
    struct bt_list in_worker; /* or in gs->void_leases */
    struct bt_grants *gs;
    uint64_t id, expire_ns;
    uint64_t given_ns, recalled_ns; /* mono; recalled 0: not yet */
    uint32_t n;
    uint32_t slots[];
};

struct asked { /* a lease whose blocks are on their way from the SSD */
    struct bt_list in_worker;
    struct bt_gworker *w;
    struct bt_tier_load *load;
    uint64_t id;
    uint32_t n;
    struct bt_kv_key keys[];
};

static void lease_free(struct lease *l)
{
    bt_cache_put(l->gs->c.cache, l->slots, l->n);
    bt_list_remove(&l->in_worker);
    free(l);
}

static struct lease *lease_find(const struct bt_gworker *w, uint64_t id)
{
    struct bt_list *i;
    bt_list_for_each (i, &w->leases) {
        struct lease *l = BT_CONTAINER_OF(i, struct lease, in_worker);
        if (l->id == id) {
            return l;
        }
    }
    return NULL;
}

/* Leases the longest prefix of the keys that is here; NULL: not even the first. It counts as no use
 * of the blocks: nobody has asked for them but the row that they belong to. */
static struct lease *lease_make(struct bt_gworker *w, uint64_t id, const struct bt_kv_key *keys,
                                uint32_t n)
{
    struct bt_cache *cache = w->gs->c.cache;
    struct lease *l = bt_calloc(1, sizeof(*l) + n * sizeof(l->slots[0]));
    for (; l->n < n; l->n++) {
        uint32_t slot = bt_cache_hold(cache, &keys[l->n]);
        if (slot == UINT32_MAX) {
            break;
        }
        l->slots[l->n] = slot;
    }
    if (l->n == 0) {
        free(l);
        return NULL;
    }
    l->gs = w->gs;
    l->id = id;
    l->given_ns = bt_mono_ns();
    bt_list_insert_tail(&w->leases, &l->in_worker);
    w->n_leases++;
    return l;
}

static void answer(struct bt_gworker *w, uint64_t id, bt_status_t st, const struct lease *l)
{
    Baton__LocalMsg msg = BATON__LOCAL_MSG__INIT;
    Baton__LocalLeased a = BATON__LOCAL_LEASED__INIT;
    uint32_t *gens = NULL;
    a.lease = id;
    a.status = st;
    if (l != NULL) {
        gens = bt_malloc(l->n * sizeof(*gens));
        for (uint32_t i = 0; i < l->n; i++) {
            gens[i] = bt_pool_generation(w->gs->c.cache->pool, l->slots[i]);
        }
        a.n_slots = a.n_generations = l->n;
        a.slots = (uint32_t *)(uintptr_t)l->slots;
        a.generations = gens;
    }
    msg.m_case = BATON__LOCAL_MSG__M_LEASED;
    msg.leased = &a;
    local_send(w, &msg);
    free(gens);
}

static void lease_give(struct bt_gworker *w, uint64_t id, const struct bt_kv_key *keys, uint32_t n)
{
    struct lease *l = lease_make(w, id, keys, n);
    answer(w, id, l != NULL ? BT_OK : BT_ERR_NOT_FOUND, l);
}

/* ---- blocks of the SSD ---- */

static struct asked *asked_find(const struct bt_gworker *w, uint64_t id)
{
    struct bt_list *i;
    bt_list_for_each (i, &w->asked) {
        struct asked *q = BT_CONTAINER_OF(i, struct asked, in_worker);
        if (q->id == id) {
            return q;
        }
    }
    return NULL;
}

static void asked_free(struct asked *q)
{
    bt_list_remove(&q->in_worker);
    q->w->n_leases--;
    bt_tier_load_end(q->load);
    free(q);
}

static void on_loaded(void *arg)
{
    struct asked *q = arg;
    lease_give(q->w, q->id, q->keys, q->n); /* before the load lets go of them */
    asked_free(q);
}

/* true: they come, and the answer with them. */
static bool load_first(struct bt_gworker *w, uint64_t id, const struct bt_kv_key *keys, uint32_t n)
{
    struct bt_grants *gs = w->gs;
    if (gs->c.tier == NULL || gs->stopping) {
        return false;
    }
    struct asked *q = bt_malloc(sizeof(*q) + n * sizeof(q->keys[0]));
    *q = (struct asked){.w = w, .id = id, .n = n};
    memcpy(q->keys, keys, n * sizeof(q->keys[0]));
    q->load = bt_tier_load(gs->c.tier, q->keys, n, on_loaded, q);
    if (q->load == NULL) {
        free(q);
        return false;
    }
    bt_list_insert_tail(&w->asked, &q->in_worker);
    w->n_leases++;
    return true;
}

void lease_forget_asked(struct bt_gworker *w)
{
    while (!bt_list_empty(&w->asked)) {
        asked_free(BT_CONTAINER_OF(w->asked.next, struct asked, in_worker));
    }
}

/* ---- what workers say ---- */

bt_status_t lease_ask(struct bt_gworker *w, const Baton__LocalLease *m)
{
    size_t n = m->keys.len / sizeof(struct bt_kv_key);
    if (m->keys.len % sizeof(struct bt_kv_key) != 0 || n == 0 || n > BT_GRANT_BLOCKS_MAX ||
        lease_find(w, m->lease) != NULL || asked_find(w, m->lease) != NULL) {
        return BT_ERR_PEER_PROTOCOL;
    }
    const struct bt_kv_key *keys = (const struct bt_kv_key *)(const void *)m->keys.data;
    if (w->n_leases >= GRANT_LEASES_MAX) {
        answer(w, m->lease, BT_ERR_EXHAUSTED, NULL);
    } else if (load_first(w, m->lease, keys, (uint32_t)n)) {
        answer(w, m->lease, BT_AGAIN, NULL);
    } else {
        lease_give(w, m->lease, keys, (uint32_t)n);
    }
    return BT_OK;
}

void lease_end(struct bt_gworker *w, const Baton__LocalUnlease *m)
{
    struct lease *l = lease_find(w, m->lease);
    struct asked *q = asked_find(w, m->lease);
    if (l != NULL) { /* otherwise of an earlier attachment */
        lease_free(l);
        w->n_leases--;
    }
    if (q != NULL) {
        asked_free(q);
    }
}

void lease_void(struct bt_gworker *w, uint64_t until)
{
    lease_forget_asked(w);
    while (!bt_list_empty(&w->leases)) {
        struct lease *l = BT_CONTAINER_OF(w->leases.next, struct lease, in_worker);
        bt_list_remove(&l->in_worker);
        bt_list_insert_tail(&w->gs->void_leases, &l->in_worker);
        l->expire_ns = until;
        w->n_leases--;
    }
}

static void recall(struct lease *l, struct bt_gworker *w, uint64_t now)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalRecall r = BATON__LOCAL_RECALL__INIT;
    r.lease = l->id;
    m.m_case = BATON__LOCAL_MSG__M_RECALL;
    m.recall = &r;
    l->recalled_ns = now;
    local_send(w, &m);
}

static void reclaim(struct bt_gworker *w, uint64_t now)
{
    uint64_t limit_ns = w->gs->c.reclaim_ms * 1000000ull;
    struct bt_list *i;
    bt_list_for_each (i, &w->leases) {
        struct lease *l = BT_CONTAINER_OF(i, struct lease, in_worker);
        if (l->recalled_ns == 0 && now - l->given_ns >= limit_ns) {
            recall(l, w, now);
        } else if (l->recalled_ns != 0 && now - l->recalled_ns >= limit_ns) {
            char what[64];
            snprintf(what, sizeof(what), "lease=%llu slots=%u", (unsigned long long)l->id, l->n);
            local_kill_hung(w, what, now);
        }
    }
}

void lease_tick(struct bt_grants *gs, uint64_t now)
{
    struct bt_list *i, *tmp;
    bt_list_for_each (i, &gs->workers) {
        reclaim(BT_CONTAINER_OF(i, struct bt_gworker, link), now);
    }
    bt_list_for_each_safe (i, tmp, &gs->void_leases) {
        struct lease *l = BT_CONTAINER_OF(i, struct lease, in_worker);
        if (now >= l->expire_ns) {
            lease_free(l);
        }
    }
}

static void free_list(struct bt_list *head)
{
    while (!bt_list_empty(head)) {
        lease_free(BT_CONTAINER_OF(head->next, struct lease, in_worker));
    }
}

void lease_destroy(struct bt_grants *gs)
{
    struct bt_list *i;
    bt_list_for_each (i, &gs->workers) {
        struct bt_gworker *w = BT_CONTAINER_OF(i, struct bt_gworker, link);
        lease_forget_asked(w);
        free_list(&w->leases);
    }
    free_list(&gs->void_leases);
}

uint32_t lease_count(const struct bt_grants *gs)
{
    uint32_t n = 0;
    struct bt_list *i;
    bt_list_for_each (i, &gs->workers) {
        n += BT_CONTAINER_OF(i, struct bt_gworker, link)->n_leases;
    }
    bt_list_for_each (i, &gs->void_leases) {
        n++;
    }
    return n;
}
