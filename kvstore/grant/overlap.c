/* Grants, tails: where bringing a prefix here is about as dear as computing it, its end comes from
 * the SSD or from other nodes while the writer computes from its beginning. The grant has slots of
 * its own for all that is not resident, which the writer fills, with what it has computed or
 * loaded: the flow has one writer, and a block that comes too late harms nobody. The tail's slots
 * are second ones for the same blocks: leased until the writer says that it reads them no more
 * (LocalTailEnd), has closed or is dead, and for all tails together at most a quarter of the slab.
 * Control thread. */
#include <stdlib.h>

#include "kvstore/grant/grant_priv.h"

bool tail_wanted(const struct bt_grants *gs, const Baton__Reserve *r)
{
    if (!gs->c.overlap || r->role != BATON__GRANT_ROLE__WRITE || r->no_cache || gs->stopping ||
        (gs->c.tier == NULL && r->n_sources == 0)) {
        return false;
    }
    struct load_ask a;
    load_ask(gs, r, &a);
    bool dear = bt_fetch_overlap_pays(gs->gathers, &a.ask);
    free(a.keys);
    return dear;
}

static void on_landed(void *arg)
{
    tail_tell(arg);
}

void tail_start(struct grant *g, const Baton__Reserve *r)
{
    if (!tail_wanted(g->gs, r)) {
        return;
    }
    struct load_ask a;
    load_ask(g->gs, r, &a);
    g->tail_told = UINT32_MAX;
    g->tail = bt_fetch_backward(g->gs->gathers, &a.ask, on_landed, g);
    free(a.keys);
}

static struct open *writer_of(const struct grant *g)
{
    struct bt_list *i;
    bt_list_for_each (i, &g->opens) {
        struct open *o = BT_CONTAINER_OF(i, struct open, in_grant);
        if (o->mode == BATON__LOCAL_MODE__WRITER && o->w != NULL) {
            return o;
        }
    }
    return NULL;
}

static void send_tail(const struct open *o, uint32_t first, uint32_t end)
{
    const struct grant *g = o->g;
    uint32_t n = end - first, *slots = bt_malloc(2 * (size_t)n * sizeof(*slots));
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = bt_fetch_slot(g->tail, first + i);
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
    local_send(o->w, &m);
    free(slots);
}

void tail_tell(struct grant *g)
{
    const struct open *o = g->tail != NULL && !g->revoked ? writer_of(g) : NULL;
    uint32_t first, end;
    if (o == NULL) {
        return;
    }
    bt_fetch_landed(g->tail, &first, &end);
    end = BT_MIN(end, g->tail_told);
    if (first < end) {
        send_tail(o, first, end);
        g->tail_told = first;
    }
}

void tail_front(struct grant *g)
{
    if (g->tail != NULL) {
        bt_fetch_computed(g->tail, grant_complete_blocks(g));
    }
}

void tail_end(struct grant *g)
{
    struct bt_fetch *t = g->tail;
    g->tail = NULL;
    if (t != NULL) {
        bt_fetch_end(t);
    }
}
