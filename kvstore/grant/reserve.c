/* The conductors' side of grants: checks a Reserve, lets it wait for its prefix (pending.c), and
 * makes a grant of it. Release, or the end of the session, frees the grant. Control thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/ranges.h"
#include "kvstore/grant/grant_priv.h"

void bt_grant_answer(struct bt_grants *gs, void *session, uint64_t request, uint32_t epoch,
                     bt_status_t st, uint32_t resident, const char *detail)
{
    Baton__FromKvstore m = BATON__FROM_KVSTORE__INIT;
    Baton__Reserved a = BATON__RESERVED__INIT;
    a.request = request;
    a.epoch = epoch;
    a.status = st;
    a.detail = (char *)(uintptr_t)detail;
    a.resident_blocks = resident;
    m.m_case = BATON__FROM_KVSTORE__M_RESERVED;
    m.reserved = &a;
    if (!gs->stopping) {
        gs->c.to_session(session, &m);
    }
}

static void answer(struct bt_grants *gs, void *session, const Baton__Reserve *r, bt_status_t st,
                   uint32_t resident, const char *detail)
{
    bt_grant_answer(gs, session, r->request, r->epoch, st, resident, detail);
}

static bt_status_t reserve_check(const struct bt_grants *gs, const Baton__Reserve *r, char *why,
                                 size_t cap)
{
    uint32_t bt = gs->c.layout.page_tokens;
    if (r->epoch == 0 || r->n_tokens == 0) {
        snprintf(why, cap, "Reserve needs an epoch and n_tokens above 0");
        return BT_ERR_INVALID;
    }
    if (r->role != BATON__GRANT_ROLE__WRITE && r->role != BATON__GRANT_ROLE__RECEIVE) {
        snprintf(why, cap, "Reserve: unknown role %d", (int)r->role);
        return BT_ERR_INVALID;
    }
    if (r->keys.len != (size_t)(r->n_tokens / bt) * 32) {
        snprintf(why, cap,
                 "Reserve: %u tokens have %u full blocks of %u, but there are %zu bytes "
                 "of keys",
                 r->n_tokens, r->n_tokens / bt, bt, r->keys.len);
        return BT_ERR_INVALID;
    }
    if (BT_DIV_UP(r->n_tokens, bt) > BT_GRANT_BLOCKS_MAX) {
        snprintf(why, cap, "a prompt may have %u blocks, this one has %u", BT_GRANT_BLOCKS_MAX,
                 BT_DIV_UP(r->n_tokens, bt));
        return BT_ERR_TOO_LARGE;
    }
    if (r->role == BATON__GRANT_ROLE__RECEIVE && (r->peer[0] == '\0' || r->peer_rpc[0] == '\0')) {
        snprintf(why, cap, "Reserve: RECEIVE needs peer and peer_rpc");
        return BT_ERR_INVALID;
    }
    if (bt_grant_is_stale(gs, r->request, r->epoch)) {
        snprintf(why, cap, "epoch %u of this request is over", r->epoch);
        return BT_ERR_STALE;
    }
    if (bt_grant_find(gs, r->request, r->epoch) != NULL ||
        bt_grant_pending_has(gs, r->request, r->epoch)) {
        snprintf(why, cap, "epoch %u of this request is reserved already", r->epoch);
        return BT_ERR_EXISTS;
    }
    return BT_OK;
}

/* Ends the session's reservations of the request up to `epoch`; session NULL: those of all
 * sessions. */
static void release_upto(struct bt_grant_request *req, uint32_t epoch, void *session,
                         bt_status_t st, const char *why)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &req->grants) {
        struct bt_grant *g = BT_CONTAINER_OF(i, struct bt_grant, in_request);
        if (g->epoch <= epoch && (session == NULL || g->res.session == session)) {
            bt_grant_hold(g);
            g->res.session = NULL;
            bt_grant_revoke(g, st, why);
            bt_grant_unhold(g);
        }
    }
}

uint32_t bt_grant_prefix_max(bool whole, uint32_t n_tokens, uint32_t block_tokens)
{
    return (whole ? n_tokens : n_tokens - 1) / block_tokens;
}

/* Leases the resident prefix and takes slots for the rest. */
static bt_status_t grant_fill(struct bt_grant *g, char *why, size_t cap)
{
    struct bt_cache *cache = g->gs->c.cache;
    struct bt_pool_counts n;
    uint32_t most = bt_grant_prefix_max(g->res.receive || g->res.rest != NULL,
                                        g->blocks.shape.n_tokens, g->blocks.shape.block_tokens);
    g->blocks.resident =
        g->res.no_cache ? 0 : bt_cache_prefix(cache, g->blocks.names, most, g->blocks.slots);
    uint32_t need = g->blocks.n - g->blocks.resident;
    bt_pool_counts(cache->pool, &n);
    if (g->gs->flows.n_free == 0) {
        snprintf(why, cap, "no flow word is free (%u grants are open)", g->gs->n_grants);
    } else if (g->res.receive && !g->res.keep && bt_pool_transit_get(cache->pool, need) != BT_OK) {
        snprintf(
            why, cap,
            "hand-offs may take half of the slots: this one needs %u more, and %u of %u are taken",
            need, n.transit, n.total);
    } else if (bt_cache_take(cache, g->res.group, need, g->blocks.slots + g->blocks.resident) !=
               BT_OK) {
        if (g->res.receive && !g->res.keep) {
            bt_pool_transit_put(cache->pool, need);
        }
        snprintf(why, cap, "%u slots needed; %u free, %u in use, %u in all", need, n.free,
                 n.total - n.free - cache->policy->evictable(cache->evict), n.total);
    } else {
        g->blocks.n_transit = g->res.receive && !g->res.keep ? need : 0;
        g->flow.index = g->gs->flows.free[--g->gs->flows.n_free];
        g->flow.word = &g->gs->c.slab->flows[g->flow.index];
        g->flow.announced = bt_flow_resident_items(&g->blocks.shape, g->blocks.resident);
        /* The writer does not know the grant yet, so raise the word for it. */
        bt_flow_raise(g->flow.word, g->epoch, g->flow.announced);
        bt_grant_save_beginning(g, 0, g->blocks.resident);
        return BT_OK;
    }
    bt_cache_put(cache, g->blocks.slots, g->blocks.resident);
    return BT_ERR_EXHAUSTED;
}

uint8_t bt_grant_group(const struct bt_grants *gs, const char *tenant)
{
    struct bt_tenants *t = gs->c.cache->tenants;
    return t != NULL ? bt_tenants_group(t, tenant) : BT_TENANT_NOBODY;
}

/* A copy of the Reserve without its keys, for the blocks behind the beginning. */
static Baton__Reserve *rest_of(const Baton__Reserve *r)
{
    Baton__Reserve most = *r;
    most.keys = (ProtobufCBinaryData){0};
    return bt_message_copy(&most.base);
}

static struct bt_grant *grant_create(struct bt_grants *gs, void *session, const Baton__Reserve *r,
                                     struct bt_grant_request *req)
{
    struct bt_grant *g = bt_calloc(1, sizeof(*g));
    g->gs = gs;
    g->req = req;
    g->epoch = r->epoch;
    g->res.session = session;
    g->res.receive = r->role == BATON__GRANT_ROLE__RECEIVE;
    g->res.keep = r->keep && !r->no_cache;
    g->res.no_cache = r->no_cache;
    g->res.beginning = r->streams;
    g->res.group = bt_grant_group(gs, r->tenant);
    g->blocks.shape = (struct bt_flow_shape){.n_tokens = r->n_tokens,
                                             .block_tokens = gs->c.layout.page_tokens,
                                             .chunk_tokens = gs->c.flow_chunk_tokens,
                                             .n_layers = gs->c.layout.n_layers};
    g->blocks.n = bt_flow_blocks(&g->blocks.shape);
    g->blocks.n_full = r->n_tokens / g->blocks.shape.block_tokens;
    g->flow.items = bt_flow_items(&g->blocks.shape);
    g->blocks.slots = bt_calloc(g->blocks.n, sizeof(*g->blocks.slots));
    g->blocks.names = bt_calloc(g->blocks.n, sizeof(*g->blocks.names));
    if (g->blocks.n_full > 0) {
        memcpy(g->blocks.names, r->keys.data, r->keys.len);
    }
    if (r->streams && !r->no_cache) {
        g->res.rest = rest_of(r);
    }
    if (g->blocks.n_full < g->blocks.n) {
        bt_slab_private_key(r->request, r->epoch, g->blocks.n_full,
                            &g->blocks.names[g->blocks.n_full]);
    }
    bt_list_init(&g->in_all);
    bt_list_init(&g->in_request);
    bt_list_init(&g->opens);
    bt_list_init(&g->transfer.sends);
    return g;
}

/* Reports the refusal to the conductor, and to the workers whose opens wait. Later opens get the
 * kept answer. */
static void refuse(struct bt_grants *gs, void *session, const Baton__Reserve *r,
                   struct bt_grant_request *req, bt_status_t st, const char *why)
{
    req->refused = r->epoch;
    req->refusal = st;
    answer(gs, session, r, st, 0, why);
    bt_grant_worker_answer_waiting(gs, r->request, r->epoch, st, why);
}

void bt_grant_make(struct bt_grants *gs, void *session, const Baton__Reserve *r)
{
    char why[200] = "";
    struct bt_grant_request *req = bt_grant_request_get(gs, r->request);
    req->epoch_max = r->epoch;
    struct bt_grant *g = grant_create(gs, session, r, req);
    bt_status_t st = grant_fill(g, why, sizeof(why));
    if (st != BT_OK) {
        bt_grant_free(g);
        refuse(gs, session, r, req, st, why);
        return;
    }
    bt_grant_request_add(req, g);
    bt_list_insert_tail(&gs->all, &g->in_all);
    gs->n_grants++;
    BT_DEBUG("grant", "req=%016llx epoch=%u role=%s tokens=%u blocks=%u resident=%u",
             (unsigned long long)r->request, r->epoch, g->res.receive ? "receive" : "write",
             r->n_tokens, g->blocks.n, g->blocks.resident);
    bt_grant_hold(g);
    bt_grant_overlap_start(g, r); /* blocks may arrive before the writer opens */
    answer(gs, session, r, BT_OK, g->blocks.resident, "");
    bt_grant_worker_answer_waiting(gs, r->request, r->epoch, BT_OK, "");
    if (g->res.receive) {
        bt_grant_transfer_receive(g, r);
    }
    bt_grant_unhold(g);
}

void bt_grants_reserve(struct bt_grants *gs, void *session, const Baton__Reserve *r)
{
    char why[200] = "";
    bt_status_t st = reserve_check(gs, r, why, sizeof(why));
    if (st != BT_OK) {
        answer(gs, session, r, st, 0, why);
        return;
    }
    struct bt_grant_request *req = bt_grant_request_get(gs, r->request);
    req->epoch_max = r->epoch;
    req->refused = 0;
    if (r->epoch > 1) {
        bt_grant_pending_drop(gs, NULL, r->request, r->epoch - 1, "a newer epoch has begun");
        release_upto(req, r->epoch - 1, NULL, BT_ERR_STALE, "a newer epoch has begun");
    }
    Baton__Reserve part = *r;
    if (r->streams) {
        uint32_t bt = gs->c.layout.page_tokens, want = BT_DIV_UP(r->n_tokens, bt),
                 n = bt_grant_window_beginning(gs, want);
        if (n == 0) {
            snprintf(
                why, sizeof(why),
                "prompts that are too large for the slab would use more than three quarters of it");
            refuse(gs, session, r, req, BT_ERR_EXHAUSTED, why);
            return;
        }
        if (n < want) {
            part.n_tokens = n * bt;
            part.keys.len = (size_t)n * sizeof(struct bt_kv_key);
        }
    }
    if (!bt_grant_pending_start(gs, session, &part)) {
        bt_grant_make(gs, session, &part);
    }
}

/* Returns whether another session has reserved the request, up to epoch. */
static bool of_another(const struct bt_grants *gs, const struct bt_grant_request *req,
                       const void *session, uint32_t epoch)
{
    struct bt_list *i;
    bt_list_for_each (i, &req->grants) {
        const struct bt_grant *g = BT_CONTAINER_OF(i, struct bt_grant, in_request);
        if (g->epoch <= epoch && g->res.session != NULL && g->res.session != session) {
            return true;
        }
    }
    return bt_grant_pending_of_another(gs, session, req->id, epoch);
}

void bt_grants_release(struct bt_grants *gs, void *session, uint64_t request, uint32_t epoch)
{
    struct bt_grant_request *req = bt_grant_request_get(gs, request);
    if (of_another(gs, req, session, epoch)) {
        BT_WARN("release_ignored", "req=%016llx epoch=%u why=%s", (unsigned long long)request,
                epoch, "the reservation belongs to another session");
        return;
    }
    req->released = BT_MAX(req->released, epoch);
    req->epoch_max = BT_MAX(req->epoch_max, epoch);
    bt_grant_pending_drop(gs, session, request, epoch, "released by the conductor");
    release_upto(req, epoch, session, BT_ERR_CANCELLED, "released by the conductor");
    bt_grant_worker_answer_waiting(gs, request, epoch, BT_ERR_STALE, "released by the conductor");
}

void bt_grants_session_end(struct bt_grants *gs, void *session)
{
    bt_grant_pending_session_end(gs, session);
    bt_grant_replicas_drop(gs, session);
    /* Start again after each one: ending a grant may end others. */
    for (bool again = true; again;) {
        again = false;
        struct bt_list *i;
        bt_list_for_each (i, &gs->all) {
            struct bt_grant *g = BT_CONTAINER_OF(i, struct bt_grant, in_all);
            if (g->res.session == session) {
                bt_grant_hold(g);
                g->res.session = NULL;
                g->req->released = BT_MAX(g->req->released, g->epoch);
                bt_grant_revoke(g, BT_ERR_PEER_LOST, "the conductor's session ended");
                bt_grant_unhold(g);
                again = true;
                break;
            }
        }
    }
}
