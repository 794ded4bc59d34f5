/* Blocks that local workers read without a grant (LocalLease, LocalUnlease). A preempted row takes
 * its KV back from the slab or from the SSD. A pass-through prompt comes back from the SSD or from
 * other nodes through a window of a few slots, piece by piece. A leased slot cannot be evicted.  A
 * lease ends with the worker's LocalUnlease, or one quarantine after the worker's proven death. A
 * lease that is reclaim_ms old is recalled. A worker that keeps it for another reclaim_ms is
 * assumed to hang and is killed. Control thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/grant/grant_priv.h"

#define LEASE_WAIT_MS 1800 /* shorter than the worker's wait for the answer */

struct lease {
    struct bt_list in_worker; /* or in gs->leases.dead */
    struct bt_grants *gs;
    uint64_t id, expire_ns;
    uint64_t given_ns, recalled_ns; /* recalled_ns 0: not recalled */
    uint32_t in_window;             /* blocks that the window counts */
    uint32_t n;
    uint32_t slots[];
};

struct asked { /* a lease that waits for its blocks, or for room for them */
    struct bt_list in_worker, in_waits;
    struct bt_grant_worker *w;
    struct bt_fetch *fetch; /* NULL: waits for room */
    uint64_t id, request, since_ns;
    uint32_t epoch, first;
    bool passing;
    uint32_t in_window; /* blocks that the window counts */
    uint32_t n;
    struct bt_kv_key keys[];
};

static void start_waiting(struct bt_grants *gs);

static void lease_free(struct lease *l)
{
    bt_cache_put(l->gs->c.cache, l->slots, l->n);
    l->gs->window.in -= l->in_window;
    bt_list_remove(&l->in_worker);
    free(l);
}

static struct lease *lease_find(const struct bt_grant_worker *w, uint64_t id)
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

/* Leases the longest prefix of the keys that is in the slab; NULL: the first block is not. For
 * eviction this does not count as a use, since the blocks return to the row that they belong to. */
static struct lease *lease_make(struct bt_grant_worker *w, uint64_t id, bool passing,
                                const struct bt_kv_key *keys, uint32_t n)
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
    l->in_window = passing ? l->n : 0;
    w->gs->window.in += l->in_window;
    if (passing && w->gs->m.passed_in != NULL) {
        bt_metric_add(w->gs->m.passed_in, l->n);
    }
    bt_list_insert_tail(&w->leases, &l->in_worker);
    w->n_leases++;
    return l;
}

static void answer(struct bt_grant_worker *w, uint64_t id, bt_status_t st, const struct lease *l)
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
    bt_grant_worker_send(w, &msg);
    free(gens);
}

static void lease_give(struct bt_grant_worker *w, uint64_t id, bool passing,
                       const struct bt_kv_key *keys, uint32_t n)
{
    struct lease *l = lease_make(w, id, passing, keys, n);
    answer(w, id, l != NULL ? BT_OK : BT_ERR_NOT_FOUND, l);
}

/* ---- blocks that must be fetched first ---- */

static struct asked *asked_find(const struct bt_grant_worker *w, uint64_t id)
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
    bt_list_remove(&q->in_waits);
    q->w->n_leases--;
    q->w->gs->window.in -= q->in_window;
    if (q->fetch != NULL) {
        bt_fetch_end(q->fetch);
    }
    free(q);
}

/* Leases to the worker those of the first n blocks that are in the slab. */
static void asked_give(struct asked *q, uint32_t n)
{
    lease_give(q->w, q->id, q->passing, q->keys, n); /* before the fetch drops its leases */
    asked_free(q);
}

static void on_fetched(void *arg)
{
    struct asked *q = arg;
    struct bt_grants *gs = q->w->gs;
    asked_give(q, q->n);
    start_waiting(gs);
}

/* The sources' runs of blocks, counted from block `first`; the caller frees *runs_p. */
static size_t sources_behind(const Baton__Reserve *r, uint32_t first, struct bt_fetch_source *to,
                             uint32_t **runs_p)
{
    size_t n = bt_grant_fetch_sources(r->sources, r->n_sources, to), total = 0, used = 0;
    for (size_t s = 0; s < n; s++) {
        total += to[s].n_runs;
    }
    uint32_t *runs = *runs_p = bt_calloc(2 * total + 1, sizeof(*runs));
    for (size_t s = 0; s < n; s++) {
        size_t at = used;
        for (size_t k = 0; k < to[s].n_runs; k++) {
            uint64_t begin = to[s].first[k], end = begin + to[s].count[k];
            begin = BT_MAX(begin, (uint64_t)first); /* end may exceed 32 bits */
            if (end > begin) {
                runs[used] = (uint32_t)(begin - first);
                runs[total + used] = (uint32_t)BT_MIN(end - begin, (uint64_t)UINT32_MAX);
                used++;
            }
        }
        to[s].first = runs + at;
        to[s].count = runs + total + at;
        to[s].n_runs = used - at;
    }
    return n;
}

/* The grant of the pass-through prompt that q belongs to; NULL: unknown. */
static const struct bt_grant *passing_grant(const struct asked *q)
{
    const struct bt_grant *g = q->passing ? bt_grant_find(q->w->gs, q->request, q->epoch) : NULL;
    return g != NULL && g->res.rest != NULL ? g : NULL;
}

/* true: the blocks are being fetched, and the answer follows later. */
static bool fetch_first(struct asked *q)
{
    struct bt_grants *gs = q->w->gs;
    const struct bt_grant *g = passing_grant(q);
    struct bt_fetch_source sources[BT_FETCH_SOURCES_MAX];
    uint32_t *runs = NULL;
    struct bt_fetch_ask ask = {.keys = q->keys,
                               .n = q->n,
                               .group = BT_TENANT_NOBODY,
                               .sources = sources,
                               .class = q->passing ? BT_WIRE_WINDOW : BT_WIRE_FETCH,
                               .wait_ms = LEASE_WAIT_MS};
    if (g != NULL) {
        ask.request = g->req->id;
        ask.epoch = g->epoch;
        ask.group = bt_grant_group(gs, g->res.rest->tenant);
        ask.n_sources = sources_behind(g->res.rest, q->first, sources, &runs);
        ask.prefill_tokens_per_s = g->res.rest->prefill_tokens_per_s;
    }
    q->fetch = bt_fetch_start(gs->fetches, &ask, on_fetched, q);
    free(runs);
    return q->fetch != NULL;
}

/* Answers q with the first n of its blocks, or starts to fetch them. */
static void asked_start(struct asked *q, uint32_t n)
{
    q->n = n;
    if (fetch_first(q)) {
        q->in_window = q->passing ? n : 0;
        q->w->gs->window.in += q->in_window;
        answer(q->w, q->id, BT_AGAIN, NULL);
    } else {
        asked_give(q, n);
    }
}

/* Starts leases that wait for room in the window, the oldest first. */
static void start_waiting(struct bt_grants *gs)
{
    while (!bt_list_empty(&gs->leases.waiting) && !gs->stopping) {
        struct asked *q = BT_CONTAINER_OF(gs->leases.waiting.next, struct asked, in_waits);
        uint32_t part = bt_grant_window_piece(gs, q->n);
        if (part == 0) {
            return;
        }
        bt_list_remove(&q->in_waits);
        asked_start(q, part);
    }
}

/* Answers leases that have waited too long for room in the window: the workers compute instead. */
static void give_up_late(struct bt_grants *gs, uint64_t now)
{
    while (!bt_list_empty(&gs->leases.waiting)) {
        struct asked *q = BT_CONTAINER_OF(gs->leases.waiting.next, struct asked, in_waits);
        if (now - q->since_ns < LEASE_WAIT_MS * 1000000ull) {
            return;
        }
        answer(q->w, q->id, BT_ERR_EXHAUSTED, NULL);
        asked_free(q);
    }
}

void bt_grant_lease_forget_asked(struct bt_grant_worker *w)
{
    while (!bt_list_empty(&w->asked)) {
        asked_free(BT_CONTAINER_OF(w->asked.next, struct asked, in_worker));
    }
}

/* ---- messages of workers ---- */

bt_status_t bt_grant_lease_ask(struct bt_grant_worker *w, const Baton__LocalLease *m)
{
    size_t n = m->keys.len / sizeof(struct bt_kv_key);
    if (lease_find(w, m->lease) != NULL || asked_find(w, m->lease) != NULL) {
        return BT_ERR_PEER_PROTOCOL;
    }
    if (w->n_leases >= GRANT_LEASES_MAX) {
        answer(w, m->lease, BT_ERR_EXHAUSTED, NULL);
        return BT_OK;
    }
    struct bt_grants *gs = w->gs;
    struct asked *q = bt_malloc(sizeof(*q) + n * sizeof(q->keys[0]));
    *q = (struct asked){.w = w,
                        .id = m->lease,
                        .request = m->request,
                        .epoch = m->epoch,
                        .first = m->first,
                        .passing = m->passing,
                        .since_ns = bt_mono_ns(),
                        .n = (uint32_t)n};
    memcpy(q->keys, m->keys.data, m->keys.len);
    bt_list_init(&q->in_waits);
    bt_list_insert_tail(&w->asked, &q->in_worker);
    w->n_leases++;
    if (!q->passing) {
        asked_start(q, q->n);
        return BT_OK;
    }
    bt_list_insert_tail(&gs->leases.waiting, &q->in_waits);
    start_waiting(gs);
    if (asked_find(w, m->lease) == q && q->fetch == NULL) {
        answer(w, m->lease, BT_AGAIN, NULL);
    }
    return BT_OK;
}

void bt_grant_lease_end(struct bt_grant_worker *w, const Baton__LocalUnlease *m)
{
    struct lease *l = lease_find(w, m->lease);
    struct asked *q = asked_find(w, m->lease);
    if (l != NULL) { /* otherwise the lease is of an earlier attachment */
        lease_free(l);
        w->n_leases--;
    }
    if (q != NULL) {
        asked_free(q);
    }
    start_waiting(w->gs);
}

void bt_grant_lease_void(struct bt_grant_worker *w, uint64_t until)
{
    bt_grant_lease_forget_asked(w);
    while (!bt_list_empty(&w->leases)) {
        struct lease *l = BT_CONTAINER_OF(w->leases.next, struct lease, in_worker);
        bt_list_remove(&l->in_worker);
        bt_list_insert_tail(&w->gs->leases.dead, &l->in_worker);
        l->expire_ns = until;
        w->n_leases--;
    }
}

static void recall(struct lease *l, struct bt_grant_worker *w, uint64_t now)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalRecall r = BATON__LOCAL_RECALL__INIT;
    r.lease = l->id;
    m.m_case = BATON__LOCAL_MSG__M_RECALL;
    m.recall = &r;
    l->recalled_ns = now;
    bt_grant_worker_send(w, &m);
}

static void reclaim(struct bt_grant_worker *w, uint64_t now)
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
            bt_grant_worker_kill(w, what, now);
        }
    }
}

void bt_grant_lease_tick(struct bt_grants *gs, uint64_t now)
{
    struct bt_list *i, *tmp;
    bt_list_for_each (i, &gs->workers.all) {
        reclaim(BT_CONTAINER_OF(i, struct bt_grant_worker, link), now);
    }
    bt_list_for_each_safe (i, tmp, &gs->leases.dead) {
        struct lease *l = BT_CONTAINER_OF(i, struct lease, in_worker);
        if (now >= l->expire_ns) {
            lease_free(l);
        }
    }
    start_waiting(gs);
    give_up_late(gs, now);
}

static void free_list(struct bt_list *head)
{
    while (!bt_list_empty(head)) {
        lease_free(BT_CONTAINER_OF(head->next, struct lease, in_worker));
    }
}

void bt_grant_lease_destroy(struct bt_grants *gs)
{
    struct bt_list *i;
    bt_list_for_each (i, &gs->workers.all) {
        struct bt_grant_worker *w = BT_CONTAINER_OF(i, struct bt_grant_worker, link);
        bt_grant_lease_forget_asked(w);
        free_list(&w->leases);
    }
    free_list(&gs->leases.dead);
}

uint32_t bt_grant_lease_count(const struct bt_grants *gs)
{
    uint32_t n = 0;
    struct bt_list *i;
    bt_list_for_each (i, &gs->workers.all) {
        n += BT_CONTAINER_OF(i, struct bt_grant_worker, link)->n_leases;
    }
    bt_list_for_each (i, &gs->leases.dead) {
        n++;
    }
    return n;
}
