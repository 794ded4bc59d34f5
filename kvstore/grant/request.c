/* The state of a request id. It outlives the grants, so that late messages of an old epoch are
 * recognized. Control thread. */
#include <stdlib.h>

#include "kvstore/grant/grant_priv.h"

static struct bt_grant_request *request_find(const struct bt_grants *gs, uint64_t id)
{
    return bt_map_get(gs->requests.by_id, &id);
}

static void request_drop(struct bt_grants *gs, struct bt_grant_request *r)
{
    BT_ASSERT(bt_list_empty(&r->grants));
    bt_list_remove(&r->idle);
    gs->requests.n_idle--;
    bt_map_del(gs->requests.by_id, &r->id);
    free(r);
}

static void request_idle(struct bt_grants *gs, struct bt_grant_request *r)
{
    r->forget_ns = bt_mono_ns() + GRANT_FORGET_MS * 1000000ull;
    bt_list_remove(&r->idle);
    bt_list_insert_tail(&gs->requests.idle, &r->idle);
    gs->requests.n_idle++;
    if (gs->requests.n_idle > GRANT_REMEMBER_MAX) {
        request_drop(gs, BT_CONTAINER_OF(gs->requests.idle.next, struct bt_grant_request, idle));
    }
}

struct bt_grant_request *bt_grant_request_get(struct bt_grants *gs, uint64_t id)
{
    struct bt_grant_request *r = request_find(gs, id);
    if (r == NULL) {
        r = bt_calloc(1, sizeof(*r));
        r->id = id;
        bt_list_init(&r->grants);
        bt_list_init(&r->idle);
        bt_map_put(gs->requests.by_id, &r->id, r);
        request_idle(gs, r);
    }
    return r;
}

struct bt_grant *bt_grant_find(const struct bt_grants *gs, uint64_t request, uint32_t epoch)
{
    struct bt_grant_request *r = request_find(gs, request);
    struct bt_list *i;
    if (r == NULL) {
        return NULL;
    }
    bt_list_for_each (i, &r->grants) {
        struct bt_grant *g = BT_CONTAINER_OF(i, struct bt_grant, in_request);
        if (g->epoch == epoch) {
            return g;
        }
    }
    return NULL;
}

bool bt_grant_is_stale(const struct bt_grants *gs, uint64_t request, uint32_t epoch)
{
    struct bt_grant_request *r = request_find(gs, request);
    return r != NULL && (epoch < r->epoch_max || epoch <= r->released);
}

bt_status_t bt_grant_refusal(const struct bt_grants *gs, uint64_t request, uint32_t epoch)
{
    struct bt_grant_request *r = request_find(gs, request);
    return r != NULL && r->refused == epoch ? r->refusal : BT_OK;
}

void bt_grant_request_add(struct bt_grant_request *r, struct bt_grant *g)
{
    if (bt_list_empty(&r->grants)) {
        bt_list_remove(&r->idle);
        g->gs->requests.n_idle--;
    }
    bt_list_insert_tail(&r->grants, &g->in_request);
}

void bt_grant_request_remove(struct bt_grant *g)
{
    bt_list_remove(&g->in_request);
    if (bt_list_empty(&g->req->grants)) {
        request_idle(g->gs, g->req);
    }
}

void bt_grant_requests_init(struct bt_grants *gs)
{
    gs->requests.by_id = bt_map_create(sizeof(uint64_t));
    bt_list_init(&gs->requests.idle);
}

void bt_grant_requests_tick(struct bt_grants *gs, uint64_t now)
{
    while (!bt_list_empty(&gs->requests.idle)) {
        struct bt_grant_request *r =
            BT_CONTAINER_OF(gs->requests.idle.next, struct bt_grant_request, idle);
        if (r->forget_ns > now) {
            return;
        }
        request_drop(gs, r);
    }
}

void bt_grant_requests_destroy(struct bt_grants *gs)
{
    bt_grant_requests_tick(gs, UINT64_MAX);
    bt_map_destroy(gs->requests.by_id);
}
