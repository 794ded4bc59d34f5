/* Overlap: if fetching a prefix takes about as long as computing it, its end is fetched while the
 * writer computes its beginning. The grant has its own slot for every block that is not resident,
 * and the writer fills all of them: with blocks that it computes, or with copies of fetched blocks.
 * So the flow has one writer, and a block that arrives too late does no harm. The fetched blocks
 * need slots too. These stay leased until the writer has read them (LocalTailEnd), closes or dies.
 * All backward fetches together use at most a quarter of the slab. Control thread. */
#include <stdlib.h>

#include "kvstore/grant/grant_priv.h"

bool bt_grant_overlap_wanted(const struct bt_grants *gs, const Baton__Reserve *r)
{
    if (!gs->c.overlap || r->role != BATON__GRANT_ROLE__WRITE || r->no_cache || gs->stopping ||
        (gs->c.tier == NULL && r->n_sources == 0)) {
        return false;
    }
    struct bt_grant_fetch_ask a;
    bt_grant_fetch_ask(gs, r, &a);
    bool dear = bt_fetch_overlap_pays(gs->fetches, &a.ask);
    free(a.keys);
    return dear;
}

static void on_landed(void *arg)
{
    bt_grant_overlap_tell(arg);
}

void bt_grant_overlap_start(struct bt_grant *g, const Baton__Reserve *r)
{
    if (!bt_grant_overlap_wanted(g->gs, r)) {
        return;
    }
    struct bt_grant_fetch_ask a;
    bt_grant_fetch_ask(g->gs, r, &a);
    g->overlap.told = UINT32_MAX;
    g->overlap.fetch = bt_fetch_backward(g->gs->fetches, &a.ask, on_landed, g);
    free(a.keys);
}

static struct bt_grant_open *writer_of(const struct bt_grant *g)
{
    struct bt_list *i;
    bt_list_for_each (i, &g->opens) {
        struct bt_grant_open *o = BT_CONTAINER_OF(i, struct bt_grant_open, in_grant);
        if (o->mode == BATON__LOCAL_MODE__WRITER && o->w != NULL) {
            return o;
        }
    }
    return NULL;
}

static void send_landed(const struct bt_grant_open *o, uint32_t first, uint32_t end)
{
    const struct bt_grant *g = o->g;
    uint32_t n = end - first, *slots = bt_malloc(2 * (size_t)n * sizeof(*slots));
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = bt_fetch_slot(g->overlap.fetch, first + i);
        slots[n + i] = bt_pool_generation(g->gs->c.cache->pool, slots[i]);
    }
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalTail t = BATON__LOCAL_TAIL__INIT;
    t.request = g->req->id;
    t.epoch = g->epoch;
    t.first = first;
    t.n_slots = t.n_generations = n;
    t.slots = slots;
    t.generations = slots + n;
    m.m_case = BATON__LOCAL_MSG__M_TAIL;
    m.tail = &t;
    bt_grant_worker_send(o->w, &m);
    free(slots);
}

void bt_grant_overlap_tell(struct bt_grant *g)
{
    const struct bt_grant_open *o =
        g->overlap.fetch != NULL && !g->revoked.on ? writer_of(g) : NULL;
    uint32_t first, end;
    if (o == NULL) {
        return;
    }
    bt_fetch_landed(g->overlap.fetch, &first, &end);
    end = BT_MIN(end, g->overlap.told);
    if (first < end) {
        send_landed(o, first, end);
        g->overlap.told = first;
    }
}

void bt_grant_overlap_advance(struct bt_grant *g)
{
    if (g->overlap.fetch != NULL) {
        bt_fetch_computed(g->overlap.fetch, bt_grant_complete_blocks(g));
    }
}

void bt_grant_overlap_end(struct bt_grant *g)
{
    struct bt_fetch *t = g->overlap.fetch;
    g->overlap.fetch = NULL;
    if (t != NULL) {
        bt_fetch_end(t);
    }
}
