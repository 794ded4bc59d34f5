/* Grants, reservations that wait: a Reserve whose prefix goes on on the SSD or on other nodes is
 * kept until those blocks are in the slab (or late), and is then made as if it had come just now.
 * Until then a worker's open waits, and a peer that asks for the flow is told to ask again. Control
 * thread. */
#include <stdlib.h>
#include <string.h>

#include "common/rpc/ranges.h"
#include "kvstore/grant/grant_priv.h"

struct loading {
    struct bt_list link;
    struct bt_grants *gs;
    void *session;
    uint64_t request;
    uint32_t epoch;
    uint32_t beginning; /* blocks, of a prompt that no slab holds */
    Baton__Reserve *reserve;
    struct bt_fetch *gather;
};

static void loading_free(struct loading *w)
{
    bt_list_remove(&w->link);
    bt_fetch_end(w->gather);
    baton__reserve__free_unpacked(w->reserve, NULL);
    free(w);
}

static void on_loaded(void *arg)
{
    struct loading *w = arg;
    bt_list_remove(&w->link);
    /* Leases what the gather holds, before it lets go. */
    grant_reserve_now(w->gs, w->session, w->reserve);
    loading_free(w);
}

size_t load_sources(Baton__Source *const *from, size_t n, struct bt_fetch_source *to)
{
    n = BT_MIN(n, (size_t)BT_FETCH_SOURCES_MAX);
    for (size_t i = 0; i < n; i++) {
        to[i] = (struct bt_fetch_source){.name = from[i]->peer,
                                         .rpc = from[i]->peer_rpc,
                                         .incarnation = from[i]->peer_incarnation,
                                         .first = from[i]->first,
                                         .count = from[i]->count,
                                         .n_runs = BT_MIN(from[i]->n_first, from[i]->n_count)};
    }
    return n;
}

void load_ask(const struct bt_grants *gs, const Baton__Reserve *r, struct load_ask *a)
{
    /* As much of the prefix as a grant would use. */
    bool whole = r->role == BATON__GRANT_ROLE__RECEIVE || r->streams;
    a->keys = bt_malloc(r->keys.len + 1);        /* the message is not aligned */
    bt_copy(a->keys, r->keys.data, r->keys.len); /* a short prompt has none */
    a->ask =
        (struct bt_fetch_ask){.request = r->request,
                              .group = bt_grants_group(gs, r->tenant),
                              .epoch = r->epoch,
                              .class = BT_WIRE_FETCH,
                              .keys = a->keys,
                              .n = grant_prefix_most(whole, r->n_tokens, gs->c.layout.page_tokens),
                              .sources = a->sources,
                              .n_sources = load_sources(r->sources, r->n_sources, a->sources),
                              .prefill_tokens_per_s = r->prefill_tokens_per_s};
}

static struct bt_fetch *gather(struct loading *w, const Baton__Reserve *r)
{
    struct load_ask a;
    load_ask(w->gs, r, &a);
    struct bt_fetch *g = bt_fetch_start(w->gs->gathers, &a.ask, on_loaded, w);
    free(a.keys);
    return g;
}

bool load_start(struct bt_grants *gs, void *session, const Baton__Reserve *r)
{
    if ((gs->c.tier == NULL && r->n_sources == 0) || r->no_cache || gs->stopping ||
        tail_wanted(gs, r)) {
        return false;
    }
    struct loading *w = bt_calloc(1, sizeof(*w));
    w->gs = gs;
    w->gather = gather(w, r);
    if (w->gather == NULL) {
        free(w);
        return false;
    }
    w->session = session;
    w->request = r->request;
    w->epoch = r->epoch;
    w->beginning = r->streams ? r->n_tokens / gs->c.layout.page_tokens : 0;
    w->reserve = bt_message_copy(&r->base);
    bt_list_insert_tail(&gs->loading, &w->link);
    return true;
}

bool load_waits(const struct bt_grants *gs, uint64_t request, uint32_t epoch)
{
    struct bt_list *i;
    bt_list_for_each (i, &gs->loading) {
        const struct loading *w = BT_CONTAINER_OF(i, struct loading, link);
        if (w->request == request && w->epoch == epoch) {
            return true;
        }
    }
    return false;
}

void load_drop(struct bt_grants *gs, void *session, uint64_t request, uint32_t epoch,
               const char *why)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &gs->loading) {
        struct loading *w = BT_CONTAINER_OF(i, struct loading, link);
        if (w->request == request && w->epoch <= epoch &&
            (session == NULL || w->session == session)) {
            grant_answer(gs, w->session, w->request, w->epoch, BT_ERR_STALE, 0, why);
            loading_free(w);
        }
    }
}

void load_session_end(struct bt_grants *gs, void *session)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &gs->loading) {
        struct loading *w = BT_CONTAINER_OF(i, struct loading, link);
        if (session == NULL || w->session == session) {
            loading_free(w);
        }
    }
}

uint32_t load_count(const struct bt_grants *gs)
{
    struct bt_list *i;
    uint32_t n = 0;
    bt_list_for_each (i, &gs->loading) {
        n++;
    }
    return n;
}

uint32_t load_beginnings(const struct bt_grants *gs)
{
    struct bt_list *i;
    uint32_t n = 0;
    bt_list_for_each (i, &gs->loading) {
        n += BT_CONTAINER_OF(i, struct loading, link)->beginning;
    }
    return n;
}
