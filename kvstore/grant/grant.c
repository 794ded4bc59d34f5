/* Grants: their making, their progress and their end, and the conductor's side of them.
 * Control thread. */
#include "kvstore/grant/grant.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/ranges.h"
#include "kvstore/grant/grant_priv.h"

static void grants_tick(void *arg);

/* ---- requests ---- */

struct bt_grant_request *bt_grant_request_find(const struct bt_grants *gs, uint64_t id)
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

static struct bt_grant_request *request_get(struct bt_grants *gs, uint64_t id)
{
    struct bt_grant_request *r = bt_grant_request_find(gs, id);
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
    struct bt_grant_request *r = bt_grant_request_find(gs, request);
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
    struct bt_grant_request *r = bt_grant_request_find(gs, request);
    return r != NULL && (epoch < r->epoch_max || epoch <= r->released);
}

/* ---- end of a grant ---- */

static void grant_free(struct bt_grant *g)
{
    if (g->res.rest != NULL) {
        baton__reserve__free_unpacked(g->res.rest, NULL);
    }
    free(g->blocks.slots);
    free(g->blocks.names);
    free(g->transfer.peer);
    free(g->transfer.peer_rpc);
    free(g);
}

void bt_grant_hold(struct bt_grant *g)
{
    g->busy++;
}

void bt_grant_unhold(struct bt_grant *g)
{
    BT_ASSERT(g->busy > 0);
    g->busy--;
    bt_grant_unref(g);
}

/* All that is left are opens of the dead (or of an earlier attachment), waiting for their second.
 */
static bool only_void_left(const struct bt_grant *g)
{
    struct bt_list *i;
    bt_list_for_each (i, &g->opens) {
        if (BT_CONTAINER_OF(i, struct bt_grant_open, in_grant)->w != NULL) {
            return false;
        }
    }
    return true;
}

/* The beginning of a prompt that no slab holds is written, and cached: nobody needs this grant for
 * more than its name, for as long as the rest takes. */
static void let_go(struct bt_grant *g)
{
    if (g->res.beginning && g->seal.produced && bt_list_empty(&g->opens)) {
        bt_cache_put(g->gs->c.cache, g->blocks.slots, g->blocks.n);
        g->blocks.n = g->blocks.n_full = g->blocks.resident = 0;
    }
}

void bt_grant_unref(struct bt_grant *g)
{
    struct bt_grants *gs = g->gs;
    if (g->busy > 0 || !bt_list_empty(&g->transfer.sends) || g->transfer.receiving ||
        g->seal.active) {
        return;
    }
    if (g->res.session != NULL) {
        let_go(g);
        return;
    }
    if (!bt_list_empty(&g->opens)) {
        if (only_void_left(g)) {
            bt_grant_quarantine(g);
        }
        return;
    }
    bt_grant_overlap_end(g);
    BT_DEBUG("grant_end", "req=%016llx epoch=%u blocks=%u resident=%u",
             (unsigned long long)g->req->id, g->epoch, g->blocks.n, g->blocks.resident);
    (g->transfer.doubted ? bt_cache_put_doubted : bt_cache_put)(gs->c.cache, g->blocks.slots,
                                                                g->blocks.n);
    bt_pool_transit_put(gs->c.cache->pool, g->blocks.n_transit);
    atomic_store_explicit(g->flow.word, 0, memory_order_release);
    gs->flows.free[gs->flows.n_free++] = g->flow.index;
    bt_list_remove(&g->in_all);
    bt_list_remove(&g->in_request);
    gs->n_grants--;
    if (bt_list_empty(&g->req->grants)) {
        request_idle(gs, g->req);
    }
    grant_free(g);
}

void bt_grant_quarantine(struct bt_grant *g)
{
    for (uint32_t b = g->blocks.resident; b < g->blocks.n; b++) {
        if (!g->seal.active || b >= g->seal.end) {
            bt_cache_quarantine(g->gs->c.cache, g->blocks.slots[b]);
        }
    }
}

void bt_grant_revoke(struct bt_grant *g, bt_status_t st, const char *why)
{
    if (g->revoked.on) {
        return;
    }
    g->revoked.on = true;
    g->revoked.status = st;
    snprintf(g->revoked.why, sizeof(g->revoked.why), "%s", why);
    bt_grant_hold(g);
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &g->opens) {
        bt_grant_worker_revoke(BT_CONTAINER_OF(i, struct bt_grant_open, in_grant));
    }
    bt_grant_transfer_revoke(g);
    bt_grant_unhold(g);
}

static void tell(const struct bt_grant *g, const Baton__FromKvstore *m)
{
    if (g->res.session != NULL && !g->gs->stopping) {
        g->gs->c.to_session(g->res.session, m);
    }
}

void bt_grant_fail(struct bt_grant *g, bt_status_t st, const char *why)
{
    if (g->revoked.on) {
        return;
    }
    BT_WARN("grant_failed", "req=%016llx epoch=%u role=%s status=%s why=%s",
            (unsigned long long)g->req->id, g->epoch, g->res.receive ? "receive" : "write",
            bt_status_name(st), why);
    if (g->gs->m.failed != NULL) {
        bt_metric_add(g->gs->m.failed, 1);
    }
    Baton__FromKvstore m = BATON__FROM_KVSTORE__INIT;
    Baton__GrantFailed f = BATON__GRANT_FAILED__INIT;
    char text[sizeof(g->revoked.why)];
    snprintf(text, sizeof(text), "%s", why);
    f.request = g->req->id;
    f.epoch = g->epoch;
    f.status = st;
    f.detail = text;
    m.m_case = BATON__FROM_KVSTORE__M_GRANT_FAILED;
    m.grant_failed = &f;
    tell(g, &m);
    bt_grant_revoke(g, st, text);
}

/* ---- progress ---- */

/* Blocks [first, end), which are cached, have to be on the SSD for what passes behind them. */
static void save_beginning(const struct bt_grant *g, uint32_t first, uint32_t end)
{
    for (uint32_t b = first; g->res.rest != NULL && g->gs->c.tier != NULL && b < end; b++) {
        bt_tier_save_beginning(g->gs->c.tier, g->blocks.slots[b]);
    }
}

static void on_sealed(void *arg)
{
    struct bt_grant *g = arg;
    struct bt_cache *cache = g->gs->c.cache;
    for (uint32_t b = g->blocks.resident; b < g->seal.end; b++) {
        if (bt_pool_state(cache->pool, g->blocks.slots[b]) == BT_SLOT_WRITING) {
            struct bt_cache_block block = {
                .key = &g->blocks.names[b],
                .parent = b > 0 ? &g->blocks.names[b - 1] : NULL,
                .n_tokens = g->blocks.shape.block_tokens,
                .depth = b,
                .reused_tokens = g->blocks.resident * g->blocks.shape.block_tokens,
                .origin = g->res.receive ? BT_EVICT_COPY : BT_EVICT_COMPUTED};
            if (bt_cache_seal_block(cache, g->blocks.slots[b], &block)) {
                save_beginning(g, b, b + 1);
            }
        }
    }
    g->seal.active = false;
    bt_grant_unref(g);
}

uint32_t bt_grant_complete_blocks(const struct bt_grant *g)
{
    uint32_t p = BT_MIN(bt_flow_read(g->flow.word, g->epoch), g->flow.items);
    uint32_t chunks = p / g->blocks.shape.n_layers,
             per = g->blocks.shape.chunk_tokens / g->blocks.shape.block_tokens;
    return BT_MIN((uint64_t)chunks * per, (uint64_t)g->blocks.n_full);
}

void bt_grant_produced(struct bt_grant *g)
{
    if (g->seal.produced) {
        return;
    }
    g->seal.produced = true;
    uint32_t end = bt_grant_complete_blocks(g);
    if (g->res.no_cache || (g->res.receive && !g->res.keep) || end <= g->blocks.resident) {
        return;
    }
    if (g->res.receive) { /* the wire has checked and stored the CRCs of what it raised the word for
                           */
        for (uint32_t b = g->blocks.resident; b < end; b++) {
            bt_pool_crcs_known(g->gs->c.cache->pool, g->blocks.slots[b]);
        }
    }
    g->seal.active = true;
    g->seal.end = end;
    bt_sealer_submit(g->gs->c.sealer, g->blocks.slots + g->blocks.resident,
                     g->blocks.names + g->blocks.resident, end - g->blocks.resident, on_sealed, g);
}

void bt_grant_progress(struct bt_grant *g)
{
    uint32_t p = BT_MIN(bt_flow_read(g->flow.word, g->epoch), g->flow.items);
    bool moved = p > g->flow.announced,
         complete = !g->flow.done && g->flow.has_trailer && p >= g->flow.items;
    g->flow.announced = BT_MAX(g->flow.announced, p);
    g->flow.done = g->flow.done || complete;
    bt_grant_hold(g);
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &g->opens) {
        struct bt_grant_open *o = BT_CONTAINER_OF(i, struct bt_grant_open, in_grant);
        if (o->mode != BATON__LOCAL_MODE__READER || o->w == NULL || o->w->conn == NULL) {
            continue;
        }
        if (moved) {
            o->w->ops.ring(o->w->conn);
        }
        if (complete) {
            bt_grant_worker_send_trailer(o);
        }
    }
    if (moved) {
        bt_grant_overlap_advance(g);
    }
    /* Whoever notices the movement tells the wire: a later bell finds nothing new. */
    if (moved && !bt_list_empty(&g->transfer.sends) && !g->gs->stopping) {
        g->gs->wire.kick(g->gs->wire.w);
    }
    if (complete) {
        bt_grant_produced(g);
    }
    bt_grant_unhold(g);
}

/* ---- conductors ---- */

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

/* Ends reservations of the request up to epoch; session NULL: whoever made them. */
static void release_upto(struct bt_grants *gs, struct bt_grant_request *req, uint32_t epoch,
                         void *session, bt_status_t st, const char *why)
{
    struct bt_list *i, *tmp;
    (void)gs;
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
        snprintf(why, cap, "%u more slots in transit would pass half of the slots (%u of %u are)",
                 need, n.transit, n.total);
    } else if (bt_cache_take_for(cache, g->res.group, need, g->blocks.slots + g->blocks.resident) !=
               BT_OK) {
        if (g->res.receive && !g->res.keep) {
            bt_pool_transit_put(cache->pool, need);
        }
        snprintf(why, cap, "%u slots are wanted, of %u there are %u free and %u leased or in use",
                 need, n.total, n.free, n.total - n.free - cache->policy->evictable(cache->evict));
    } else {
        g->blocks.n_transit = g->res.receive && !g->res.keep ? need : 0;
        g->flow.index = g->gs->flows.free[--g->gs->flows.n_free];
        g->flow.word = &g->gs->c.slab->flows[g->flow.index];
        g->flow.announced = bt_flow_resident_items(&g->blocks.shape, g->blocks.resident);
        bt_flow_raise(g->flow.word, g->epoch,
                      g->flow.announced); /* before its one writer knows of it */
        save_beginning(g, 0, g->blocks.resident);
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

/* What is still of use of a Reserve once its grant is made: without its keys, in memory of ours. */
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

void bt_grants_reserve(struct bt_grants *gs, void *session, const Baton__Reserve *r)
{
    char why[200] = "";
    bt_status_t st = reserve_check(gs, r, why, sizeof(why));
    if (st != BT_OK) {
        answer(gs, session, r, st, 0, why);
        return;
    }
    struct bt_grant_request *req = request_get(gs, r->request);
    req->epoch_max = r->epoch;
    if (r->epoch > 1) {
        bt_grant_pending_drop(gs, NULL, r->request, r->epoch - 1, "a newer epoch has begun");
        release_upto(gs, req, r->epoch - 1, NULL, BT_ERR_STALE, "a newer epoch has begun");
    }
    Baton__Reserve part = *r;
    if (r->streams) {
        uint32_t bt = gs->c.layout.page_tokens, want = BT_DIV_UP(r->n_tokens, bt),
                 n = bt_grant_window_beginning(gs, want);
        if (n == 0) {
            snprintf(why, sizeof(why), "prompts that no slab holds have three quarters of it");
            answer(gs, session, r, BT_ERR_EXHAUSTED, 0, why);
            bt_grant_worker_answer_waiting(gs, r->request, r->epoch, BT_ERR_EXHAUSTED, why);
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

void bt_grant_make(struct bt_grants *gs, void *session, const Baton__Reserve *r)
{
    char why[200] = "";
    bt_status_t st = reserve_check(gs, r, why, sizeof(why));
    if (st != BT_OK) {
        answer(gs, session, r, st, 0, why);
        return;
    }
    struct bt_grant_request *req = request_get(gs, r->request);
    req->epoch_max = r->epoch;
    struct bt_grant *g = grant_create(gs, session, r, req);
    st = grant_fill(g, why, sizeof(why));
    if (st != BT_OK) {
        grant_free(g);
        answer(gs, session, r, st, 0, why);
        bt_grant_worker_answer_waiting(gs, r->request, r->epoch, st, why);
        return;
    }
    if (bt_list_empty(&req->grants)) {
        bt_list_remove(&req->idle);
        gs->requests.n_idle--;
    }
    bt_list_insert_tail(&req->grants, &g->in_request);
    bt_list_insert_tail(&gs->all, &g->in_all);
    gs->n_grants++;
    BT_DEBUG("grant", "req=%016llx epoch=%u role=%s tokens=%u blocks=%u resident=%u",
             (unsigned long long)r->request, r->epoch, g->res.receive ? "receive" : "write",
             r->n_tokens, g->blocks.n, g->blocks.resident);
    bt_grant_hold(g);
    bt_grant_overlap_start(g, r); /* its first blocks may be there before the writer opens */
    answer(gs, session, r, BT_OK, g->blocks.resident, "");
    bt_grant_worker_answer_waiting(gs, r->request, r->epoch, BT_OK, "");
    if (g->res.receive) {
        bt_grant_transfer_receive(g, r);
    }
    bt_grant_unhold(g);
}

void bt_grants_release(struct bt_grants *gs, void *session, uint64_t request, uint32_t epoch)
{
    struct bt_grant_request *req = request_get(gs, request);
    struct bt_list *i;
    bt_list_for_each (i, &req->grants) {
        struct bt_grant *g = BT_CONTAINER_OF(i, struct bt_grant, in_request);
        if (g->epoch <= epoch && g->res.session != NULL && g->res.session != session) {
            BT_WARN("release_ignored", "req=%016llx epoch=%u why=%s", (unsigned long long)request,
                    epoch, "the reservation belongs to another session");
            return;
        }
    }
    req->released = BT_MAX(req->released, epoch);
    req->epoch_max = BT_MAX(req->epoch_max, epoch);
    bt_grant_pending_drop(gs, session, request, epoch, "released by the conductor");
    release_upto(gs, req, epoch, session, BT_ERR_CANCELLED, "released by the conductor");
    bt_grant_worker_answer_waiting(gs, request, epoch, BT_ERR_STALE, "released by the conductor");
}

void bt_grants_session_end(struct bt_grants *gs, void *session)
{
    bt_grant_pending_session_end(gs, session);
    bt_grant_replicas_drop(gs, session);
    /* One at a time from the start: ending one may end others. */
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

/* ---- the whole ---- */

static void metrics_create(struct bt_grants *gs, struct bt_metrics *ms)
{
    static const char *const states[4] = {"state=\"free\"", "state=\"writing\"", "state=\"sealed\"",
                                          "state=\"quarantine\""};
    for (int i = 0; i < 4; i++) {
        gs->m.slots[i] =
            bt_metrics_gauge(ms, "baton_pool_slots", states[i], "Slots of the slab by state");
    }
    gs->m.transit =
        bt_metrics_gauge(ms, "baton_pool_transit_slots", NULL, "Slots that only land a hand-off");
    gs->m.leases = bt_metrics_gauge(ms, "baton_pool_leases", NULL, "Leases on slots");
    gs->m.copies = bt_metrics_gauge(ms, "baton_pool_copies", NULL,
                                    "Blocks fetched from other nodes that one request has used");
    gs->m.fetching = bt_metrics_gauge(ms, "baton_kvstore_fetching", NULL,
                                      "Transfers from other nodes' caches that have not ended");
    gs->m.served = bt_metrics_gauge(ms, "baton_kvstore_offers", NULL,
                                    "Transfers to other nodes' caches that have not ended");
    gs->m.grants = bt_metrics_gauge(ms, "baton_kvstore_grants", NULL, "Open grants");
    gs->m.opens = bt_metrics_gauge(ms, "baton_kvstore_opens", NULL, "Opens of local workers");
    gs->m.workers =
        bt_metrics_gauge(ms, "baton_kvstore_workers", NULL, "Local workers known and not dead");
    gs->m.passing = bt_metrics_gauge(ms, "baton_kvstore_stream_slots", NULL,
                                     "Slots with blocks of prompts that no slab holds, on their "
                                     "way to the SSD or from it");
    gs->m.overlaps = bt_metrics_gauge(ms, "baton_kvstore_tail_slots", NULL,
                                      "Slots that hold the end of a prefix beside those of its "
                                      "grant, until the worker has loaded it");
    const char *passed = "baton_kvstore_stream_blocks_total";
    const char *passed_help = "Blocks of prompts that no slab holds: written to the SSD, and lent "
                              "to a worker to read";
    gs->m.passed_out = bt_metrics_counter(ms, passed, "way=\"out\"", passed_help);
    gs->m.passed_in = bt_metrics_counter(ms, passed, "way=\"in\"", passed_help);
    gs->m.hits = bt_metrics_counter(ms, "baton_kvstore_prefix_blocks_total", "result=\"hit\"",
                                    "Prompt blocks looked up");
    gs->m.misses = bt_metrics_counter(ms, "baton_kvstore_prefix_blocks_total", "result=\"miss\"",
                                      "Prompt blocks looked up");
    gs->m.sealed =
        bt_metrics_counter(ms, "baton_kvstore_blocks_sealed_total", NULL, "Blocks indexed");
    gs->m.duplicates = bt_metrics_counter(ms, "baton_kvstore_blocks_duplicate_total", NULL,
                                          "Sealed blocks dropped because a copy was there");
    gs->m.evicted =
        bt_metrics_counter(ms, "baton_kvstore_blocks_evicted_total", NULL, "Blocks evicted");
    gs->m.killed = bt_metrics_counter(ms, "baton_kvstore_workers_killed_total", NULL,
                                      "Workers killed because they kept revoked slots");
    gs->m.failed = bt_metrics_counter(ms, "baton_kvstore_grants_failed_total", NULL,
                                      "Grants that could not be completed");
}

static void add_since(struct bt_metric *m, uint64_t now, uint64_t *last)
{
    bt_metric_add(m, now - *last);
    *last = now;
}

static void metrics_update(void *arg)
{
    struct bt_grants *gs = arg;
    const struct bt_cache *c = gs->c.cache;
    struct bt_pool_counts n;
    struct bt_grants_stats s;
    bt_pool_counts(c->pool, &n);
    bt_grants_stats(gs, &s);
    bt_metric_set(gs->m.slots[BT_SLOT_FREE], n.free);
    bt_metric_set(gs->m.slots[BT_SLOT_WRITING], n.writing);
    bt_metric_set(gs->m.slots[BT_SLOT_SEALED], n.sealed);
    bt_metric_set(gs->m.slots[BT_SLOT_QUARANTINE], n.quarantine);
    bt_metric_set(gs->m.transit, n.transit);
    bt_metric_set(gs->m.leases, n.leases);
    bt_metric_set(gs->m.copies, c->copies);
    bt_metric_set(gs->m.fetching, s.pieces);
    bt_metric_set(gs->m.served, s.served);
    bt_metric_set(gs->m.grants, s.grants);
    bt_metric_set(gs->m.opens, s.opens);
    bt_metric_set(gs->m.workers, s.workers);
    bt_metric_set(gs->m.passing, gs->window.out + gs->window.in);
    bt_metric_set(gs->m.overlaps, bt_fetches_backward_slots(gs->fetches));
    add_since(gs->m.hits, c->hits, &gs->m.last.hits);
    add_since(gs->m.misses, c->misses, &gs->m.last.misses);
    add_since(gs->m.sealed, c->sealed, &gs->m.last.sealed);
    add_since(gs->m.duplicates, c->duplicates, &gs->m.last.duplicates);
    add_since(gs->m.evicted, c->evicted, &gs->m.last.evicted);
}

static void grants_tick(void *arg)
{
    struct bt_grants *gs = arg;
    uint64_t now = bt_mono_ns();
    bt_grant_worker_tick(gs, now);
    while (!bt_list_empty(&gs->requests.idle)) {
        struct bt_grant_request *r =
            BT_CONTAINER_OF(gs->requests.idle.next, struct bt_grant_request, idle);
        if (r->forget_ns > now) {
            break;
        }
        request_drop(gs, r);
    }
    bt_cache_trim(gs->c.cache, 1024);
}

struct bt_grants *bt_grants_create(const struct bt_grants_config *c)
{
    struct bt_grants *gs = bt_calloc(1, sizeof(*gs));
    gs->c = *c;
    gs->requests.by_id = bt_map_create(sizeof(uint64_t));
    bt_list_init(&gs->requests.idle);
    bt_list_init(&gs->all);
    bt_list_init(&gs->workers.all);
    bt_list_init(&gs->workers.dead_opens);
    bt_list_init(&gs->puts.dead);
    bt_list_init(&gs->leases.dead);
    bt_list_init(&gs->puts.sealing);
    bt_list_init(&gs->transfers.due);
    bt_list_init(&gs->pending);
    bt_list_init(&gs->puts.waiting);
    bt_list_init(&gs->leases.waiting);
    bt_list_init(&gs->replicas.all);
    gs->window.slots = BT_MAX((uint32_t)(c->stream_max * c->slab->super->n_slots), 1u);
    uint32_t n = c->slab->super->n_flow_words;
    gs->flows.free = bt_calloc(n, sizeof(*gs->flows.free));
    for (uint32_t i = n; i-- > 1;) { /* word 0 stays unused: a zeroed message never names a flow */
        gs->flows.free[gs->flows.n_free++] = i;
    }
    struct bt_fetches_config gc = {.loop = c->loop,
                                   .cache = c->cache,
                                   .tier = c->tier,
                                   .layout = &gs->c.layout,
                                   .incarnation = c->slab->super->incarnation,
                                   .wait_ms = c->fetch_wait_ms,
                                   .stall_ms = c->fetch_stall_ms,
                                   .metrics = c->metrics};
    gs->fetches = bt_fetches_create(&gc);
    if (c->metrics != NULL) {
        metrics_create(gs, c->metrics);
        bt_metrics_refresh(c->metrics, metrics_update, gs);
    }
    bt_timer_start(c->loop, &gs->tick, GRANT_TICK_MS, GRANT_TICK_MS, grants_tick, gs);
    return gs;
}

void bt_grants_set_wire(struct bt_grants *gs, const struct bt_grants_wire *wire)
{
    gs->wire = *wire;
    struct bt_fetch_wire gw = {.w = wire->w,
                               .fetch_start = wire->fetch_start,
                               .fetch_take = wire->fetch_take,
                               .recv_cancel = wire->recv_cancel};
    bt_fetches_set_wire(gs->fetches, &gw);
    struct bt_fetch_server_config oc = {.loop = gs->c.loop,
                                        .cache = gs->c.cache,
                                        .tier = gs->c.tier,
                                        .n_layers = gs->c.layout.n_layers,
                                        .block_tokens = gs->c.layout.page_tokens,
                                        .peer_known = gs->c.peer_known,
                                        .arg = gs->c.peer_arg,
                                        .metrics = gs->c.metrics,
                                        .send_offer = wire->send_offer,
                                        .send_abort = wire->send_abort};
    gs->server = bt_fetch_server_create(&oc);
}

void bt_grants_stop(struct bt_grants *gs)
{
    gs->stopping = true;
    bt_fetches_stop(gs->fetches);
}

void bt_grants_destroy(struct bt_grants *gs)
{
    if (gs == NULL) {
        return;
    }
    gs->stopping = true;
    bt_timer_stop(gs->c.loop, &gs->tick);
    bt_timer_stop(gs->c.loop, &gs->transfers.defer);
    if (gs->c.metrics != NULL) {
        bt_metrics_refresh(gs->c.metrics, NULL, gs);
    }
    bt_fetches_stop(gs->fetches);
    struct bt_list *i;
    bt_list_for_each (i, &gs->workers.all) {
        bt_grant_lease_forget_asked(BT_CONTAINER_OF(i, struct bt_grant_worker, link));
    }
    bt_grant_pending_session_end(gs, NULL);
    bt_grant_replicas_drop(gs, NULL);
    bt_fetches_destroy(gs->fetches);
    bt_fetch_server_destroy(gs->server);
    bt_grant_worker_destroy(gs);
    while (!bt_list_empty(&gs->all)) {
        struct bt_grant *g = BT_CONTAINER_OF(gs->all.next, struct bt_grant, in_all);
        while (!bt_list_empty(&g->transfer.sends)) {
            struct bt_grant_send *s =
                BT_CONTAINER_OF(g->transfer.sends.next, struct bt_grant_send, in_grant);
            bt_list_remove(&s->in_grant);
            bt_list_remove(&s->in_due);
            free(s);
        }
        g->res.session = NULL;
        g->transfer.receiving = false;
        g->seal.active = false;
        g->busy = 0;
        bt_grant_unref(g);
    }
    while (!bt_list_empty(&gs->requests.idle)) {
        request_drop(gs, BT_CONTAINER_OF(gs->requests.idle.next, struct bt_grant_request, idle));
    }
    bt_map_destroy(gs->requests.by_id);
    free(gs->flows.free);
    free(gs);
}

void bt_grants_stats(const struct bt_grants *gs, struct bt_grants_stats *s_p)
{
    struct bt_grants_stats s = {.grants = gs->n_grants,
                                .requests_known = (uint32_t)bt_map_count(gs->requests.by_id),
                                .pending = bt_grant_pending_count(gs),
                                .pieces = bt_fetches_pieces(gs->fetches),
                                .served =
                                    gs->server != NULL ? bt_fetch_server_count(gs->server) : 0,
                                .killed = gs->workers.killed};
    struct bt_list *i, *k;
    bt_list_for_each (i, &gs->all) {
        struct bt_grant *g = BT_CONTAINER_OF(i, struct bt_grant, in_all);
        bt_list_for_each (k, &g->opens) {
            s.opens++;
        }
        bt_list_for_each (k, &g->transfer.sends) {
            s.sends++;
        }
        s.recvs += g->transfer.receiving;
    }
    bt_list_for_each (i, &gs->workers.all) {
        struct bt_grant_worker *w = BT_CONTAINER_OF(i, struct bt_grant_worker, link);
        s.workers++;
        s.waiting_opens += w->n_waits;
    }
    s.puts = bt_grant_put_count(gs);
    s.leases = bt_grant_lease_count(gs);
    *s_p = s;
}

const struct bt_rates *bt_grants_rates(const struct bt_grants *gs)
{
    return bt_fetches_rates(gs->fetches);
}
