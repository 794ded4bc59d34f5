/* All grants of a node: creation, the tick, the end, statistics. Control thread. */
#include <stdlib.h>

#include "kvstore/grant/grant_priv.h"

static void grants_tick(void *arg)
{
    struct bt_grants *gs = arg;
    uint64_t now = bt_mono_ns();
    bt_grant_worker_tick(gs, now);
    bt_grant_requests_tick(gs, now);
    bt_cache_trim(gs->c.cache, 1024);
}

struct bt_grants *bt_grants_create(const struct bt_grants_config *c)
{
    struct bt_grants *gs = bt_calloc(1, sizeof(*gs));
    gs->c = *c;
    bt_grant_requests_init(gs);
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
        bt_grant_metrics_create(gs, c->metrics);
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
    bt_list_for_each (i, &gs->all) { /* a dead writer's grant may still be in quarantine */
        bt_grant_overlap_end(BT_CONTAINER_OF(i, struct bt_grant, in_all));
    }
    bt_fetches_destroy(gs->fetches);
    bt_fetch_server_destroy(gs->server);
    bt_grant_worker_destroy(gs);
    while (!bt_list_empty(&gs->all)) {
        struct bt_grant *g = BT_CONTAINER_OF(gs->all.next, struct bt_grant, in_all);
        while (!bt_list_empty(&g->transfer.sends)) {
            struct bt_grant_send *s =
                BT_CONTAINER_OF(g->transfer.sends.next, struct bt_grant_send, in_grant);
            bt_list_remove(&s->in_grant);
            free(s);
        }
        g->res.session = NULL;
        g->transfer.receiving = false;
        g->seal.active = false;
        g->busy = 0;
        bt_grant_unref(g);
    }
    bt_grant_requests_destroy(gs);
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
