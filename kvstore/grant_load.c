/* Grants, reservations that wait: a Reserve whose prefix goes on on the SSD is kept until those
 * blocks are in the slab (or late), and is then made as if it had come just now. Until then a
 * worker's open waits, and a peer that asks for the flow is told to ask again. Control thread. */
#include <stdlib.h>

#include "kvstore/grant_priv.h"

struct loading {
    struct bt_list link;
    struct bt_grants *gs;
    void *session;
    uint64_t request;
    uint32_t epoch;
    uint8_t *packed; /* the Reserve */
    size_t len;
    struct bt_tier_load *load;
};

static void loading_free(struct loading *w)
{
    bt_list_remove(&w->link);
    bt_tier_load_end(w->load);
    free(w->packed);
    free(w);
}

static void on_loaded(void *arg)
{
    struct loading *w = arg;
    Baton__Reserve *r = baton__reserve__unpack(NULL, w->len, w->packed);
    BT_ASSERT(r != NULL);
    bt_list_remove(&w->link);
    grant_reserve_now(w->gs, w->session, r); /* leases what the load holds, before it lets go */
    baton__reserve__free_unpacked(r, NULL);
    loading_free(w);
}

bool load_start(struct bt_grants *gs, void *session, const Baton__Reserve *r)
{
    if (gs->c.tier == NULL || r->no_cache || gs->stopping) {
        return false;
    }
    /* As much of the prefix as a grant would use: a writer computes at least the last token. */
    uint32_t bt = gs->c.layout.page_tokens, full = r->n_tokens / bt;
    uint32_t n =
        r->role == BATON__GRANT_ROLE__RECEIVE ? full : BT_MIN(full, (r->n_tokens - 1) / bt);
    struct loading *w = bt_calloc(1, sizeof(*w));
    w->load = bt_tier_load(gs->c.tier, (const struct bt_kv_key *)(const void *)r->keys.data, n,
                           on_loaded, w);
    if (w->load == NULL) {
        free(w);
        return false;
    }
    w->gs = gs;
    w->session = session;
    w->request = r->request;
    w->epoch = r->epoch;
    w->len = baton__reserve__get_packed_size(r);
    w->packed = bt_malloc(w->len + 1);
    baton__reserve__pack(r, w->packed);
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
