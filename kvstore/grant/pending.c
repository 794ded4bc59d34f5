/* Reservations that wait. If more of the prefix is on the SSD or on other nodes, the kvstore keeps
 * the Reserve until those blocks are in the slab or the waiting time is over. Then it makes the
 * grant as if the Reserve had just arrived. Until then an open of a worker waits, and a peer that
 * asks for the flow gets the answer to ask again. Control thread. */
#include <stdlib.h>
#include <string.h>

#include "common/rpc/ranges.h"
#include "kvstore/grant/grant_priv.h"

struct pending {
    struct bt_list link;
    struct bt_grants *gs;
    void *session;
    uint64_t request;
    uint32_t epoch;
    uint32_t beginning; /* number of blocks; for a prompt that is larger than the slab */
    Baton__Reserve *reserve;
    struct bt_fetch *fetch;
};

static void pending_free(struct pending *w)
{
    bt_list_remove(&w->link);
    bt_fetch_end(w->fetch);
    baton__reserve__free_unpacked(w->reserve, NULL);
    free(w);
}

static void on_fetched(void *arg)
{
    struct pending *w = arg;
    bt_list_remove(&w->link);
    bt_grant_make(w->gs, w->session, w->reserve); /* before the fetch drops its leases */
    pending_free(w);
}

size_t bt_grant_fetch_sources(Baton__Source *const *from, size_t n, struct bt_fetch_source *to)
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

void bt_grant_fetch_ask(const struct bt_grants *gs, const Baton__Reserve *r,
                        struct bt_grant_fetch_ask *a)
{
    /* The part of the prefix that the grant can use. */
    bool whole = r->role == BATON__GRANT_ROLE__RECEIVE || r->streams;
    a->keys = bt_malloc(r->keys.len + 1);        /* the message is not aligned */
    bt_copy(a->keys, r->keys.data, r->keys.len); /* a short prompt has none */
    a->ask = (struct bt_fetch_ask){
        .request = r->request,
        .group = bt_grant_group(gs, r->tenant),
        .epoch = r->epoch,
        .class = BT_WIRE_FETCH,
        .keys = a->keys,
        .n = bt_grant_prefix_max(whole, r->n_tokens, gs->c.layout.page_tokens),
        .sources = a->sources,
        .n_sources = bt_grant_fetch_sources(r->sources, r->n_sources, a->sources),
        .prefill_tokens_per_s = r->prefill_tokens_per_s};
}

static struct bt_fetch *fetch(struct pending *w, const Baton__Reserve *r)
{
    struct bt_grant_fetch_ask a;
    bt_grant_fetch_ask(w->gs, r, &a);
    struct bt_fetch *g = bt_fetch_start(w->gs->fetches, &a.ask, on_fetched, w);
    free(a.keys);
    return g;
}

bool bt_grant_pending_start(struct bt_grants *gs, void *session, const Baton__Reserve *r)
{
    if ((gs->c.tier == NULL && r->n_sources == 0) || r->no_cache || gs->stopping ||
        bt_grant_overlap_wanted(gs, r)) {
        return false;
    }
    struct pending *w = bt_calloc(1, sizeof(*w));
    w->gs = gs;
    w->fetch = fetch(w, r);
    if (w->fetch == NULL) {
        free(w);
        return false;
    }
    w->session = session;
    w->request = r->request;
    w->epoch = r->epoch;
    w->beginning = r->streams ? r->n_tokens / gs->c.layout.page_tokens : 0;
    w->reserve = bt_message_copy(&r->base);
    bt_list_insert_tail(&gs->pending, &w->link);
    return true;
}

bool bt_grant_pending_has(const struct bt_grants *gs, uint64_t request, uint32_t epoch)
{
    struct bt_list *i;
    bt_list_for_each (i, &gs->pending) {
        const struct pending *w = BT_CONTAINER_OF(i, struct pending, link);
        if (w->request == request && w->epoch == epoch) {
            return true;
        }
    }
    return false;
}

bool bt_grant_pending_of_another(const struct bt_grants *gs, const void *session, uint64_t request,
                                 uint32_t epoch)
{
    struct bt_list *i;
    bt_list_for_each (i, &gs->pending) {
        const struct pending *w = BT_CONTAINER_OF(i, struct pending, link);
        if (w->request == request && w->epoch <= epoch && w->session != session) {
            return true;
        }
    }
    return false;
}

void bt_grant_pending_drop(struct bt_grants *gs, void *session, uint64_t request, uint32_t epoch,
                           const char *why)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &gs->pending) {
        struct pending *w = BT_CONTAINER_OF(i, struct pending, link);
        if (w->request == request && w->epoch <= epoch &&
            (session == NULL || w->session == session)) {
            bt_grant_answer(gs, w->session, w->request, w->epoch, BT_ERR_STALE, 0, why);
            pending_free(w);
        }
    }
}

void bt_grant_pending_session_end(struct bt_grants *gs, void *session)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &gs->pending) {
        struct pending *w = BT_CONTAINER_OF(i, struct pending, link);
        if (session == NULL || w->session == session) {
            pending_free(w);
        }
    }
}

uint32_t bt_grant_pending_count(const struct bt_grants *gs)
{
    struct bt_list *i;
    uint32_t n = 0;
    bt_list_for_each (i, &gs->pending) {
        n++;
    }
    return n;
}

uint32_t bt_grant_pending_beginnings(const struct bt_grants *gs)
{
    struct bt_list *i;
    uint32_t n = 0;
    bt_list_for_each (i, &gs->pending) {
        n += BT_CONTAINER_OF(i, struct pending, link)->beginning;
    }
    return n;
}
