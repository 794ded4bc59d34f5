/* Grants and the wire: which blocks of a WRITE grant a peer may read, and the transfer that fills a
 * RECEIVE grant. Control thread. */
#include <stdlib.h>

#include "common/log/log.h"
#include "kvstore/grant/grant_priv.h"

const struct bt_grants_wire bt_grants_wire_real = {
    .recv_start = bt_wire_recv_start,
    .recv_cancel = bt_wire_recv_cancel,
    .kick = bt_wire_kick,
    .send_trailer = bt_wire_send_trailer,
    .send_abort = bt_wire_send_abort,
    .fetch_start = bt_wire_fetch_start,
    .fetch_take = bt_wire_fetch_take,
    .send_offer = bt_wire_send_offer,
};

/* ---- sending ---- */

static void send_deferred(void *arg)
{
    struct bt_grants *gs = arg;
    while (!bt_list_empty(&gs->transfers.due)) {
        struct bt_grant_send *s =
            BT_CONTAINER_OF(gs->transfers.due.next, struct bt_grant_send, in_due);
        bt_list_remove(&s->in_due);
        if (!gs->stopping && !s->g->revoked.on) {
            gs->wire.send_trailer(s->snd, &s->g->flow.trailer);
        }
    }
}

static bt_status_t on_lookup(void *arg, uint64_t request, uint32_t epoch, struct bt_wire_send *snd,
                             struct bt_wire_source *src_p)
{
    struct bt_grants *gs = arg;
    struct bt_grant *g = bt_grant_find(gs, request, epoch);
    if (gs->stopping || bt_grant_is_stale(gs, request, epoch) || (g != NULL && g->revoked.on)) {
        return BT_ERR_STALE;
    }
    if (g == NULL || g->res.receive || g->res.beginning) { /* no peer may read a beginning */
        /* NOT_FOUND would end the receiver, but the reservation here may still be waiting. */
        return g == NULL && bt_grant_pending_has(gs, request, epoch) ? BT_AGAIN : BT_ERR_NOT_FOUND;
    }
    struct bt_grant_send *s = bt_calloc(1, sizeof(*s));
    s->g = g;
    s->snd = snd;
    bt_list_init(&s->in_due);
    bt_list_insert_tail(&g->transfer.sends, &s->in_grant);
    *src_p = (struct bt_wire_source){.shape = g->blocks.shape,
                                     .slots = g->blocks.slots,
                                     .names = g->blocks.names,
                                     .word = g->flow.word,
                                     .grant = g};
    if (g->flow.has_trailer) { /* send it later, not inside the wire's call */
        bt_list_insert_tail(&gs->transfers.due, &s->in_due);
        bt_timer_start(gs->c.loop, &gs->transfers.defer, 0, 0, send_deferred, gs);
    }
    return BT_OK;
}

static void on_send_end(void *arg, void *grant, struct bt_wire_send *snd, bt_status_t status)
{
    struct bt_grants *gs = arg;
    struct bt_grant *g = grant;
    struct bt_list *i;
    BT_ASSERT(g->gs == gs);
    bt_list_for_each (i, &g->transfer.sends) {
        struct bt_grant_send *s = BT_CONTAINER_OF(i, struct bt_grant_send, in_grant);
        if (s->snd == snd) {
            if (status != BT_OK) {
                BT_DEBUG("send_end", "req=%016llx epoch=%u status=%s",
                         (unsigned long long)g->req->id, g->epoch, bt_status_name(status));
            }
            g->transfer.doubted = g->transfer.doubted || status == BT_ERR_DATA_LOSS;
            bt_list_remove(&s->in_grant);
            bt_list_remove(&s->in_due);
            free(s);
            bt_grant_unref(g);
            return;
        }
    }
    BT_ASSERT(!"send_end of an unknown send");
}

static bt_status_t on_want(void *arg, const struct bt_wire_want *want, struct bt_wire_send *snd,
                           void **handle_p)
{
    struct bt_grants *gs = arg;
    return gs->stopping ? BT_ERR_UNAVAILABLE
                        : bt_fetch_server_want(gs->server, want, snd, handle_p);
}

static void on_want_end(void *arg, void *handle, bt_status_t status)
{
    struct bt_grants *gs = arg;
    bt_fetch_server_want_end(gs->server, handle, status);
}

const struct bt_wire_ops bt_grants_wire_ops = {
    .lookup = on_lookup, .send_end = on_send_end, .want = on_want, .want_end = on_want_end};

void bt_grant_transfer_trailer(struct bt_grant *g)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &g->transfer.sends) {
        struct bt_grant_send *s = BT_CONTAINER_OF(i, struct bt_grant_send, in_grant);
        if (!g->gs->stopping) {
            g->gs->wire.send_trailer(s->snd, &g->flow.trailer);
        }
    }
}

/* ---- receiving ---- */

static void on_recv_progress(void *arg)
{
    bt_grant_progress(arg);
}

static void on_recv_done(void *arg, const struct bt_wire_trailer *t, uint64_t first_ns,
                         uint64_t last_ns, uint64_t bytes, uint64_t segments)
{
    struct bt_grant *g = arg;
    bt_grant_hold(g);
    g->transfer.recv_ended = true;
    g->flow.has_trailer = true;
    g->flow.trailer = *t;
    bt_grant_progress(g);
    if (!g->flow.done) {
        bt_grant_fail(g, BT_ERR_INTERNAL, "the transfer ended before all blocks had arrived");
    } else {
        Baton__FromKvstore m = BATON__FROM_KVSTORE__INIT;
        Baton__FlowDone d = BATON__FLOW_DONE__INIT;
        d.request = g->req->id;
        d.epoch = g->epoch;
        d.first_ns = first_ns;
        d.last_ns = last_ns;
        d.bytes = bytes;
        d.segments = segments;
        m.m_case = BATON__FROM_KVSTORE__M_FLOW_DONE;
        m.flow_done = &d;
        bt_grant_tell(g, &m);
    }
    bt_grant_unhold(g);
}

static void on_recv_failed(void *arg, bt_status_t st, const char *why)
{
    struct bt_grant *g = arg;
    bt_grant_hold(g);
    g->transfer.recv_ended = true; /* on_quiet follows, so there is nothing to cancel */
    bt_grant_fail(g, st, why);
    bt_grant_unhold(g);
}

static void on_recv_quiet(void *arg)
{
    struct bt_grant *g = arg;
    bt_grant_hold(g);
    g->transfer.receiving = false;
    g->transfer.recv = NULL;
    if (!g->flow.done) {
        bt_grant_produced(g); /* keep the chunks that have arrived */
    }
    bt_grant_unhold(g);
}

static const struct bt_wire_recv_ops recv_ops = {.on_progress = on_recv_progress,
                                                 .on_done = on_recv_done,
                                                 .on_failed = on_recv_failed,
                                                 .on_quiet = on_recv_quiet};

void bt_grant_transfer_receive(struct bt_grant *g, const Baton__Reserve *r)
{
    struct bt_grants *gs = g->gs;
    if (gs->stopping || g->revoked.on) {
        return;
    }
    g->transfer.peer = bt_strdup(r->peer);
    g->transfer.peer_rpc = bt_strdup(r->peer_rpc);
    struct bt_wire_peer_addr peer = {
        .name = g->transfer.peer, .rpc = g->transfer.peer_rpc, .incarnation = r->peer_incarnation};
    g->transfer.receiving = true;
    struct bt_wire_recv *rv = gs->wire.recv_start(
        gs->wire.w, &peer, g->req->id, g->epoch, &g->blocks.shape, g->blocks.resident,
        g->blocks.slots, g->blocks.names, g->flow.word, r->left_ms, &recv_ops, g);
    if (rv == NULL && g->transfer.receiving) {
        g->transfer.receiving = false;
        bt_grant_fail(g, BT_ERR_UNAVAILABLE, "no connection to the peer's kvstore is possible");
    }
    g->transfer.recv =
        g->transfer.receiving ? rv : NULL; /* all callbacks may have come inside the call */
    if (g->transfer.recv != NULL && g->revoked.on && !g->transfer.recv_ended) {
        gs->wire.recv_cancel(g->transfer.recv);
    }
}

void bt_grant_transfer_revoke(struct bt_grant *g)
{
    struct bt_grants *gs = g->gs;
    if (gs->stopping) {
        return;
    }
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &g->transfer.sends) {
        struct bt_grant_send *s = BT_CONTAINER_OF(i, struct bt_grant_send, in_grant);
        bt_list_remove(&s->in_due);
        gs->wire.send_abort(s->snd, g->revoked.status, g->revoked.why);
    }
    if (g->transfer.receiving && g->transfer.recv != NULL && !g->transfer.recv_ended) {
        gs->wire.recv_cancel(g->transfer.recv);
    }
}
