/* The ends of flows on the control thread: opening, refusals and retries, trailers, deadlines,
 * callbacks. The transfer thread moves the bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "kvstore/wire/wire_priv.h"

static void send_close(struct bt_wire_session *s, uint32_t stream, bt_status_t st, const char *why)
{
    Baton__FlowClose c = BATON__FLOW_CLOSE__INIT;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    c.stream = stream;
    c.status = st;
    c.detail = (char *)(uintptr_t)why;
    m.m_case = BATON__PEER_MSG__M_FLOW_CLOSE;
    m.flow_close = &c;
    bt_wire_session_send(s, &m);
}

/* A status from the network: unknown values become a known error. */
static bt_status_t peer_status(int32_t v, bt_status_t otherwise)
{
    return v < 0 && v >= BT_ERR_CONFIG ? (bt_status_t)v : otherwise;
}

/* ---- receiving ---- */

static void recv_quiet(struct bt_wire_recv *r)
{
    struct bt_wire_session *s = r->session;
    BT_ASSERT(r->ended);
    r->ops.on_quiet(r->arg);
    free(r->slots);
    free(r->names);
    free(r);
    if (s != NULL) {
        bt_wire_session_unref(s);
    }
}

/* Marks the flow as ended. The caller then informs the core and calls recv_stopping. */
static void recv_leave(struct bt_wire_recv *r, bt_status_t st, const char *why)
{
    struct bt_loop *l = r->w->loop;
    r->ended = true;
    bt_list_remove(&r->link);
    bt_timer_stop(l, &r->deadline);
    bt_timer_stop(l, &r->reach);
    bt_timer_stop(l, &r->retry);
    if (r->session != NULL) {
        if (!bt_wire_session_dead(r->session)) {
            send_close(r->session, r->x.stream, st, why);
        }
        if (r->added) {
            bt_wx_command(r->w->x, &r->x.obj, BT_WX_CMD_STOP);
        }
    }
}

static void recv_left(struct bt_wire_recv *r)
{
    struct bt_wire_peer *p = r->peer;
    r->peer = NULL;
    if (!r->added) {
        recv_quiet(r); /* nothing was ever received */
    }
    bt_wire_peer_idle(p);
}

void bt_wire_recv_fail(struct bt_wire_recv *r, bt_status_t st, const char *why)
{
    char text[200];
    if (r->ended) {
        return;
    }
    snprintf(text, sizeof(text), "%s: %s", r->peer->name, why);
    recv_leave(r, st, text);
    bt_metric_add(r->w->flows_failed, 1);
    BT_INFO("wire_recv_failed", "req=%016llx epoch=%u peer=%s status=%s why=%s",
            (unsigned long long)r->x.request, r->x.epoch, r->peer->name, bt_status_name(st), why);
    r->ops.on_failed(r->arg, st, text);
    recv_left(r);
}

static void recv_maybe_done(struct bt_wire_recv *r)
{
    if (r->ended || !r->landed || !r->has_trailer) {
        return;
    }
    recv_leave(r, BT_OK, "");
    if (r->x.first_ns != 0) {
        bt_metric_observe(r->w->flow_seconds, (double)(r->x.last_ns - r->x.first_ns) * 1e-9);
    }
    r->ops.on_done(r->arg, &r->trailer, r->x.first_ns, r->x.last_ns, r->x.bytes, r->x.segments);
    recv_left(r);
}

static void recv_send_open(struct bt_wire_recv *r)
{
    Baton__FlowOpen o = BATON__FLOW_OPEN__INIT;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    o.request = r->x.request;
    o.epoch = r->x.epoch;
    o.first_block = r->x.first_block;
    o.n_tokens = r->x.shape.n_tokens;
    o.chunk_tokens = r->x.shape.chunk_tokens;
    o.stream = r->x.stream;
    o.priority = r->class;
    if (r->n_keys != 0) {
        o.keys.data = (uint8_t *)r->names;
        o.keys.len = r->n_keys * sizeof(*r->names);
    }
    m.m_case = BATON__PEER_MSG__M_FLOW_OPEN;
    m.flow_open = &o;
    bt_wire_session_send(r->session, &m);
}

static void on_retry(void *arg)
{
    recv_send_open(arg);
}

void bt_wire_recv_attach(struct bt_wire_recv *r, struct bt_wire_session *s)
{
    r->session = s;
    s->n_flows++;
    r->x.conn = &s->conn;
    r->x.stream = ++r->w->next_stream;
    r->opened_ns = bt_mono_ns();
    bt_timer_stop(r->w->loop, &r->reach);
    if (r->n_keys == 0) { /* a fetch learns from the offer which blocks it will receive */
        r->added = true;
        bt_wx_command(r->w->x, &r->x.obj, BT_WX_CMD_ADD);
    }
    recv_send_open(r);
}

void bt_wire_recv_event(struct bt_wire_recv *r, uint32_t events)
{
    if ((events & BT_WX_EV_PROGRESS) && !r->ended) {
        r->ops.on_progress(r->arg);
    }
    if (events & BT_WX_EV_LANDED) {
        r->landed = true;
        recv_maybe_done(r);
    }
    if (events & BT_WX_EV_LOST) {
        bt_wire_recv_fail(r, r->x.lost, r->x.why);
    }
    if (events & BT_WX_EV_STOPPED) {
        recv_quiet(r);
    }
}

struct bt_wire_recv *bt_wire_recv_of(struct bt_wire_session *s, uint32_t stream)
{
    struct bt_list *i;
    if (s->peer != NULL) {
        bt_list_for_each (i, &s->peer->recvs) {
            struct bt_wire_recv *r = BT_CONTAINER_OF(i, struct bt_wire_recv, link);
            if (r->session == s && r->x.stream == stream) {
                return r;
            }
        }
    }
    return NULL; /* ended, but the message was already on its way */
}

void bt_wire_recv_refused(struct bt_wire_session *s, const Baton__FlowRefused *m)
{
    struct bt_wire_recv *r = bt_wire_recv_of(s, m->stream);
    if (r == NULL) {
        return;
    }
    bool soon = m->status == BT_ERR_NOT_FOUND && bt_mono_ns() - r->opened_ns < BT_WIRE_REFUSED_NS;
    if (m->status == BT_AGAIN) { /* the flow is reserved, so the deadline starts again */
        r->opened_ns = bt_mono_ns();
    }
    if (r->n_keys == 0 && (soon || m->status == BT_AGAIN)) {
        bt_timer_start(r->w->loop, &r->retry, BT_WIRE_RETRY_MS, 0, on_retry, r);
        return;
    }
    bt_wire_recv_fail(r, peer_status(m->status, BT_ERR_PEER_PROTOCOL),
                      m->detail[0] != '\0' ? m->detail : "flow refused");
}

void bt_wire_recv_trailer(struct bt_wire_session *s, const Baton__FlowTrailer *m)
{
    struct bt_wire_recv *r = bt_wire_recv_of(s, m->stream);
    if (r == NULL) {
        return;
    }
    r->trailer.first_token = m->first_token;
    r->trailer.finished = m->finished;
    r->trailer.last_compute_ns = m->last_compute_ns;
    r->has_trailer = true;
    recv_maybe_done(r);
}

void bt_wire_recv_closed(struct bt_wire_session *s, const Baton__FlowClose *m)
{
    struct bt_wire_recv *r = bt_wire_recv_of(s, m->stream);
    if (r != NULL) {
        bt_wire_recv_fail(r, peer_status(m->status, BT_ERR_PEER_LOST),
                          m->detail[0] != '\0' ? m->detail : "the sender ended the transfer");
    }
}

void bt_wire_recv_cancel(struct bt_wire_recv *r)
{
    if (!r->ended) {
        recv_leave(r, BT_ERR_CANCELLED, "cancelled");
        recv_left(r);
    }
}

/* ---- sending ---- */

static void send_trailer_now(struct bt_wire_send *snd)
{
    Baton__FlowTrailer t = BATON__FLOW_TRAILER__INIT;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    if (snd->ended || !snd->sent || !snd->has_trailer || snd->trailer_sent) {
        return;
    }
    snd->trailer_sent = true;
    t.stream = snd->x.stream;
    t.first_token = snd->trailer.first_token;
    t.finished = snd->trailer.finished;
    t.last_compute_ns = snd->trailer.last_compute_ns;
    m.m_case = BATON__PEER_MSG__M_FLOW_TRAILER;
    m.flow_trailer = &t;
    bt_wire_session_send(snd->session, &m);
}

void bt_wire_refuse(struct bt_wire_session *s, uint32_t stream, bt_status_t st, const char *why)
{
    Baton__FlowRefused r = BATON__FLOW_REFUSED__INIT;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    r.stream = stream;
    r.status = st;
    r.detail = (char *)(uintptr_t)why;
    m.m_case = BATON__PEER_MSG__M_FLOW_REFUSED;
    m.flow_refused = &r;
    bt_wire_session_send(s, &m);
}

struct bt_wire_send *bt_wire_send_of(struct bt_wire_session *s, uint32_t stream)
{
    struct bt_list *i;
    bt_list_for_each (i, &s->sends) {
        struct bt_wire_send *snd = BT_CONTAINER_OF(i, struct bt_wire_send, link);
        if (snd->x.stream == stream) {
            return snd;
        }
    }
    return NULL;
}

void bt_wire_send_open(struct bt_wire_session *s, const Baton__FlowOpen *o)
{
    struct bt_wire *w = s->w;
    if (o->keys.len != 0) {
        bt_wire_want_open(s, o);
        return;
    }
    if (bt_wire_send_of(s, o->stream) != NULL) {
        bt_wire_session_fail(s, "the peer used a stream number twice", BT_GRPC_INVALID_ARGUMENT);
        return;
    }
    struct bt_wire_send *snd = bt_calloc(1, sizeof(*snd));
    struct bt_wire_source *src = &snd->x.src;
    snd->w = w;
    snd->session = s;
    snd->x.obj.kind = BT_WX_SEND;
    snd->x.conn = &s->conn;
    snd->x.request = o->request;
    snd->x.epoch = o->epoch;
    snd->x.stream = o->stream;
    snd->x.first_block = o->first_block;
    snd->x.class = BT_MIN(o->priority, (uint32_t)BT_WX_CLASSES - 1);
    bt_list_init(&snd->link);
    bt_status_t st = w->ops.lookup(w->ops_arg, o->request, o->epoch, snd, src);
    if (st != BT_OK) {
        bt_wire_refuse(s, o->stream, st,
                       st == BT_ERR_NOT_FOUND ? "request is not reserved here"
                                              : bt_status_text(st));
        free(snd);
        return;
    }
    snd->grant = src->grant;
    if (snd->ended || o->n_tokens != src->shape.n_tokens || /* ended: aborted inside lookup */
        o->chunk_tokens != src->shape.chunk_tokens ||
        o->first_block > bt_flow_blocks(&src->shape)) {
        st = snd->ended ? snd->status : BT_ERR_MISMATCH;
        bt_wire_refuse(s, o->stream, st,
                       snd->ended ? snd->why
                                  : "sender and receiver differ in the number of tokens, the chunk "
                                    "size or the first block");
        w->ops.send_end(w->ops_arg, snd->grant, snd, st);
        free(snd);
        return;
    }
    snd->open = true;
    bt_list_insert_tail(&s->sends, &snd->link);
    s->n_flows++;
    bt_wx_command(w->x, &snd->x.obj, BT_WX_CMD_ADD);
}

/* Calls the core, unless the flow still waits for STOPPED or for the receiver's FlowClose. */
static void send_maybe_quiet(struct bt_wire_send *snd)
{
    struct bt_wire_session *s = snd->session;
    const struct bt_wire *w = snd->w;
    if (snd->closing || (snd->open && !snd->stopped)) {
        return;
    }
    if (snd->want) {
        w->ops.want_end(w->ops_arg, snd->grant, snd->status);
    } else {
        w->ops.send_end(w->ops_arg, snd->grant, snd, snd->status);
    }
    free(snd);
    bt_wire_session_unref(s);
}

/* The receiver has said its last word about a flow that was aborted here, or will not say it. */
static void send_heard(struct bt_wire_send *snd, bt_status_t st)
{
    snd->closing = false;
    bt_list_remove(&snd->link);
    if (st == BT_ERR_DATA_LOSS) { /* the receiver found it before it knew of the abort */
        snd->status = st;
    }
    send_maybe_quiet(snd);
}

void bt_wire_send_end(struct bt_wire_send *snd, bt_status_t st)
{
    if (snd->closing) {
        send_heard(snd, st);
        return;
    }
    if (snd->ended) {
        return;
    }
    snd->ended = true;
    snd->status = st;
    bt_list_remove(&snd->link);
    if (snd->open) {
        bt_wx_command(snd->w->x, &snd->x.obj, BT_WX_CMD_STOP);
    } else if (snd->want) {
        send_maybe_quiet(snd); /* the receiver has not taken this fetch yet */
    }
}

void bt_wire_send_closed(struct bt_wire_session *s, const Baton__FlowClose *m)
{
    struct bt_wire_send *snd = bt_wire_send_of(s, m->stream);
    if (snd == NULL) {
        return;
    }
    /* The receiver of a fetch may report the end earlier than UCX does. */
    bool whole = m->status == BT_OK && (snd->want ? snd->open : snd->sent && snd->trailer_sent);
    bt_wire_send_end(snd, whole ? BT_OK : peer_status(m->status, BT_ERR_PEER_PROTOCOL));
}

void bt_wire_send_event(struct bt_wire_send *snd, uint32_t events)
{
    if (events & BT_WX_EV_SENT) {
        snd->sent = true;
        send_trailer_now(snd);
    }
    if (events & BT_WX_EV_STOPPED) {
        snd->stopped = true;
        send_maybe_quiet(snd);
    }
}

void bt_wire_send_trailer(struct bt_wire_send *snd, const struct bt_wire_trailer *t)
{
    snd->trailer = *t;
    snd->has_trailer = true;
    send_trailer_now(snd);
}

void bt_wire_send_abort(struct bt_wire_send *snd, bt_status_t st, const char *why)
{
    if (snd->ended) {
        return;
    }
    struct bt_wire_session *s = snd->session;
    bool told = (snd->open || snd->want) && !bt_wire_session_dead(s);
    if (told) {
        send_close(s, snd->x.stream, st, why);
    }
    snprintf(snd->why, sizeof(snd->why), "%s", why);
    bool waits = told && snd->open && !snd->ended;
    bt_wire_send_end(snd, st);
    if (waits) { /* STOPPED comes later, so snd is still there */
        snd->closing = true;
        snd->closing_ns = bt_mono_ns();
        bt_list_insert_tail(&s->sends, &snd->link);
    }
}

void bt_wire_send_tick(struct bt_wire_send *snd, uint64_t now_ns)
{
    if (snd->closing && now_ns > snd->closing_ns && now_ns - snd->closing_ns > BT_WIRE_CLOSED_NS) {
        send_heard(snd, snd->status);
    }
}
