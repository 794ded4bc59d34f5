/* Sessions between kvstores (common/rpc/session.h): the hello fields beside the identity, the
 * connection for KV that belongs to a session, and what ends together with it. There is one session
 * per direction of dialing: the dialer pulls flows from the listener. Control thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/ranges.h"
#include "common/rpc/session_hello.h"
#include "kvstore/wire/wire_priv.h"

_Static_assert(BT_RANGE_CARDS_MAX == BT_NICS_MAX && BT_RANGE_FETCH_MAX == BT_WIRE_FETCH_MAX,
               "the ranges of messages are the limits of the code behind them");

static void session_free(struct bt_wire_session *s)
{
    BT_ASSERT(bt_wire_session_dead(s) && s->n_flows == 0 && s->n_paths == 0);
    bt_rpc_session_cleanup(&s->rpc);
    bt_list_remove(&s->link);
    free(s);
}

static void session_maybe_free(struct bt_wire_session *s)
{
    if (bt_wire_session_dead(s) && s->n_flows == 0 && s->n_paths == 0 &&
        (!s->conn_open || s->conn_stopped)) {
        session_free(s);
    }
}

void bt_wire_session_unref(struct bt_wire_session *s)
{
    BT_ASSERT(s->n_flows > 0);
    s->n_flows--;
    s->busy_ns = bt_mono_ns();
    session_maybe_free(s);
}

void bt_wire_session_unref_path(struct bt_wire_session *s)
{
    session_maybe_free(s);
}

static const struct bt_rpc_session_rules rules = {
    .prepares = true,
    .joins = true,
    .beats_if_quiet = true,
    .tick_ms = BT_WIRE_TICK_MS,
};
static const struct bt_rpc_session_ops session_ops;

static struct bt_wire_session *session_new(struct bt_wire *w, bool dialer)
{
    struct bt_wire_session *s = bt_calloc(1, sizeof(*s));
    s->w = w;
    s->dialer = dialer;
    s->conn.obj.kind = BT_WX_CONN;
    s->conn.heard_at = &s->conn.heard;
    s->busy_ns = bt_mono_ns();
    bt_rpc_session_init(&s->rpc, w->loop, dialer, &rules, &session_ops, s);
    bt_list_init(&s->sends);
    bt_list_init(&s->paths);
    bt_list_insert_tail(&w->sessions, &s->link);
    return s;
}

/* The role and name that the certificate of a peer must have: "kvstore/n1" for "kvstore-n1". */
static void peer_role(const char *name, char *who, size_t cap)
{
    size_t skip =
        strncmp(name, BT_WIRE_NAME, sizeof(BT_WIRE_NAME) - 1) == 0 ? sizeof(BT_WIRE_NAME) - 1 : 0;
    snprintf(who, cap, "%s/%s", BT_WIRE_ROLE, name + skip);
}

static void session_open_conn(struct bt_wire_session *s)
{
    s->conn_open = true;
    s->conn.several = s->w->n_cards > 1;
    s->conn.dialer = s->dialer;
    peer_role(s->name, s->conn.who, sizeof(s->conn.who));
    snprintf(s->conn.peer, sizeof(s->conn.peer), "%s", s->name);
    bt_wx_command(s->w->x, &s->conn.obj, BT_WX_CMD_OPEN);
}

/* ---- ends ---- */

/* The text for logs, for flows and for the peer's dialer. */
static void end_text(const struct bt_wire_session *s, const struct bt_rpc_session_end *e,
                     char *text, size_t cap)
{
    if (e->cause != BT_RPC_SESSION_CLOSED) {
        snprintf(text, cap, "%s", e->why);
    } else if (s->dialer && e->code == BT_GRPC_FAILED_PRECONDITION) {
        snprintf(text, cap, "refused: %s", e->why);
    } else {
        snprintf(text, cap, "stream ended, gRPC code %d: %s", e->code, e->why);
    }
}

static void on_end(void *arg, const struct bt_rpc_session_end *e)
{
    struct bt_wire_session *s = arg;
    /* A listener that refuses will refuse the next time too. */
    bool final =
        e->cause == BT_RPC_SESSION_REFUSED ||
        (e->cause == BT_RPC_SESSION_CLOSED && s->dialer && e->code == BT_GRPC_FAILED_PRECONDITION);
    char text[BT_RPC_SESSION_WHY + 40];
    end_text(s, e, text, sizeof(text));
    if (e->cause == BT_RPC_SESSION_VIOLATION) {
        BT_WARN("wire_protocol", "peer=%s inc=%016llx what=%s", s->name,
                (unsigned long long)s->incarnation, text);
    }
    if (e->was_up) {
        bt_wire_count_up(s->w, -1);
        bt_metric_add(s->w->sessions_lost, 1);
    }
    BT_INFO("wire_session_down", "peer=%s inc=%016llx dialer=%d was_up=%d why=%s", s->name,
            (unsigned long long)s->incarnation, s->dialer, e->was_up, text);
    s->n_flows++; /* keeps s alive during the callbacks below */
    while (!bt_list_empty(&s->sends)) {
        bt_wire_send_end(BT_CONTAINER_OF(s->sends.next, struct bt_wire_send, link),
                         BT_ERR_PEER_LOST);
    }
    struct bt_wire_peer *p = s->peer;
    s->peer = NULL;
    if (p != NULL) {
        p->session = NULL;
        bt_wire_peer_lost(p, e->was_up, final, text);
    }
    bt_wire_paths_stop(s);
    if (s->conn_open) { /* flows and paths were stopped first */
        bt_wx_command(s->w->x, &s->conn.obj, BT_WX_CMD_STOP);
    }
    s->n_flows--;
    session_maybe_free(s);
}

void bt_wire_session_fail(struct bt_wire_session *s, const char *why, int code)
{
    bt_rpc_session_end(&s->rpc, BT_RPC_SESSION_BROKEN, code, why);
}

void bt_wire_session_send(struct bt_wire_session *s, const Baton__PeerMsg *msg)
{
    (void)bt_rpc_session_send(&s->rpc, &msg->base);
}

static void violation(struct bt_wire_session *s, const char *what)
{
    bt_rpc_session_fail(&s->rpc, BT_RPC_SESSION_VIOLATION, BT_GRPC_INVALID_ARGUMENT, what);
}

static void on_up(void *arg)
{
    struct bt_wire_session *s = arg;
    s->busy_ns = bt_mono_ns();
    bt_wire_count_up(s->w, 1);
    BT_INFO("wire_session_up", "peer=%s inc=%016llx dialer=%d", s->name,
            (unsigned long long)s->incarnation, s->dialer);
    if (s->peer != NULL) {
        bt_wire_peer_up(s->peer);
    }
}

/* ---- hello ---- */

static void say_hello(void *arg)
{
    struct bt_wire_session *s = arg;
    struct bt_wire *w = s->w;
    const struct bt_wire_path *first = s->first;
    Baton__PeerHello h = BATON__PEER_HELLO__INIT;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    Baton__PeerCard rows[BT_NICS_MAX], *cards[BT_NICS_MAX];
    uint8_t mac[BT_WIRE_MAC_BYTES];
    for (uint32_t i = 0; i < w->n_cards; i++) {
        struct bt_nic *nic = &w->cards[i].card.nic;
        baton__peer_card__init(&rows[i]);
        rows[i].address.data = nic->addr;
        rows[i].address.len = nic->family == 4 ? 4 : 16;
        rows[i].prefix = nic->prefix;
        rows[i].up = w->cards[i].link;
        cards[i] = &rows[i];
    }
    h.n_cards = w->n_cards;
    h.cards = cards;
    h.version = BT_RPC_SESSION_VERSION;
    h.oldest = BT_RPC_SESSION_OLDEST;
    h.release = (char *)bt_release();
    h.cluster = w->cluster;
    h.name = w->name;
    h.incarnation = w->incarnation;
    h.expect_incarnation = s->dialer ? s->incarnation : 0;
    h.layout_id = w->layout.layout_id;
    h.root_key.data = w->root.b;
    h.root_key.len = sizeof(w->root.b);
    h.transport = w->transport;
    if (first != NULL) {
        h.card = first->x.card;
        h.ucx_address.data = first->x.address;
        h.ucx_address.len = first->x.address_len;
        h.nonce = first->x.nonce;
        if (w->has_secret) {
            struct bt_wire_way way = {.card = h.card,
                                      .nonce = h.nonce,
                                      .address = h.ucx_address.data,
                                      .address_len = h.ucx_address.len};
            bt_wire_member_mac(s, true, &way, mac);
            h.address_mac = (ProtobufCBinaryData){.data = mac, .len = sizeof(mac)};
        }
    }
    m.m_case = BATON__PEER_MSG__M_HELLO;
    m.hello = &h;
    bt_wire_session_send(s, &m);
}

/* Does the dialer's certificate have its name? The dialer has checked the listener's
 * certificate. */
static bool name_is_proved(const struct bt_wire_session *s, const char *name)
{
    char who[sizeof(BT_WIRE_ROLE) + sizeof(s->name)];
    peer_role(name, who, sizeof(who));
    return s->dialer || bt_rpc_stream_peer_is(s->rpc.stream, BT_WIRE_ROLE, strchr(who, '/') + 1);
}

static const char *transport_name(Baton__KvTransport t)
{
    return t == BATON__KV_TRANSPORT__UCX    ? "ucx"
           : t == BATON__KV_TRANSPORT__GRPC ? "grpc"
                                            : "a later one";
}

/* Compares what all daemons' hellos have; NULL: it fits. */
static const char *identity_mismatch(const struct bt_wire_session *s, const Baton__PeerHello *h,
                                     char *text, size_t cap)
{
    const struct bt_wire *w = s->w;
    const struct bt_rpc_identity self = {.cluster = w->cluster,
                                         .name = w->name,
                                         .incarnation = w->incarnation,
                                         .root = &w->root,
                                         .layout_id = w->layout.layout_id};
    const struct bt_rpc_hello theirs = {.version = h->version,
                                        .oldest = h->oldest,
                                        .cluster = h->cluster,
                                        .name = h->name,
                                        .release = h->release,
                                        .incarnation = h->incarnation,
                                        .expect_incarnation = h->expect_incarnation,
                                        .root_key = h->root_key,
                                        .layout_id = h->layout_id};
    uint64_t dialled = s->dialer ? s->incarnation : 0;
    bt_hello_fault_t fault =
        bt_rpc_hello_compare(&self, &theirs, dialled, name_is_proved(s, h->name));
    return bt_rpc_hello_why(fault, &self, &theirs, dialled, text, cap);
}

/* NULL if the two kvstores can work together, else the reason why not. */
static const char *hello_mismatch(const struct bt_wire_session *s, const Baton__PeerHello *h,
                                  char *text, size_t cap)
{
    const struct bt_wire *w = s->w;
    struct bt_wire_way way = {.card = h->card,
                              .nonce = h->nonce,
                              .address = h->ucx_address.data,
                              .address_len = h->ucx_address.len};
    const char *why = identity_mismatch(s, h, text, cap);
    if (why != NULL) {
        return why;
    }
    if (s->dialer && strcmp(h->name, s->name) != 0) {
        snprintf(text, cap, "dialed %s, but \"%.40s\" answered", s->name, h->name);
        return text;
    }
    if (h->transport != w->transport) {
        snprintf(
            text, cap,
            "kvstore.wire.transport is %s at the peer and %s here; set the same in all kvstores",
            transport_name(h->transport), transport_name(w->transport));
        return text;
    }
    if (h->ucx_address.len == 0 && (!s->dialer || h->n_cards == 0)) {
        return "the peer's hello has no KV address";
    }
    return bt_wire_member_is(s, &way, &h->address_mac)
               ? NULL
               : "the peer did not prove that it belongs to this cluster; give all daemons the "
                 "same kv.salt_file and release";
}

/* The same process has dialed again, so it has given up the old session: ends that one. */
static void drop_older(struct bt_wire_session *s)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &s->w->sessions) {
        struct bt_wire_session *o = BT_CONTAINER_OF(i, struct bt_wire_session, link);
        if (o != s && !o->dialer && !bt_wire_session_dead(o) && o->incarnation == s->incarnation &&
            strcmp(o->name, s->name) == 0) {
            /* Ending a session frees or removes no other one; callbacks may add sessions at the
             * tail. */
            bt_wire_session_fail(o, "replaced by a newer session of the same peer",
                                 BT_GRPC_CANCELLED);
            tmp = s->w->sessions.next;
        }
    }
}

static void note_heard(struct bt_wire_session *s)
{
    atomic_fetch_add_explicit(s->conn.heard_at, 1, memory_order_relaxed);
}

static const char *on_hello(void *arg, const void *hello, char *buf, size_t cap)
{
    struct bt_wire_session *s = arg;
    const Baton__PeerHello *h = hello;
    note_heard(s);
    if (!s->dialer) {
        snprintf(s->name, sizeof(s->name), "%s", h->name);
        s->incarnation = h->incarnation;
    }
    const char *why = hello_mismatch(s, h, buf, cap);
    if (why != NULL) {
        BT_WARN("wire_hello_refused", "peer=%s inc=%016llx why=%s", s->name,
                (unsigned long long)h->incarnation, why);
        return why;
    }
    if (!s->dialer) {
        drop_older(s);
        session_open_conn(s);
    }
    why = bt_wire_paths_hello(s, h);
    if (why == NULL && !s->dialer && s->n_paths == 0) {
        bt_wire_session_ready(s, NULL);
    }
    return why;
}

/* ---- messages ---- */

static void say_heartbeat(void *arg, uint64_t seq)
{
    Baton__PeerHeartbeat hb = BATON__PEER_HEARTBEAT__INIT;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    hb.seq = seq;
    m.m_case = BATON__PEER_MSG__M_HEARTBEAT;
    m.heartbeat = &hb;
    bt_wire_session_send(arg, &m);
}

static void on_heartbeat(void *arg, const void *heartbeat)
{
    (void)heartbeat;
    note_heard(arg);
}

static void on_message(void *arg, ProtobufCMessage *msg)
{
    struct bt_wire_session *s = arg;
    const Baton__PeerMsg *m = (const Baton__PeerMsg *)msg;
    bool flows = bt_rpc_session_met(&s->rpc);
    note_heard(s);
    switch (m->m_case) {
    case BATON__PEER_MSG__M_FLOW_OPEN:
        if (!flows || s->dialer) {
            violation(
                s, "the peer sent FlowOpen before the session was up, or in the wrong direction");
            return;
        }
        bt_wire_send_open(s, m->flow_open);
        return;
    case BATON__PEER_MSG__M_FLOW_REFUSED:
        if (s->dialer) {
            bt_wire_recv_refused(s, m->flow_refused);
        }
        return;
    case BATON__PEER_MSG__M_FLOW_TRAILER:
        if (s->dialer) {
            bt_wire_recv_trailer(s, m->flow_trailer);
        }
        return;
    case BATON__PEER_MSG__M_FLOW_OFFER:
        if (s->dialer) {
            bt_wire_fetch_offered(s, m->flow_offer);
        }
        return;
    case BATON__PEER_MSG__M_FLOW_TAKE:
        if (!s->dialer) {
            bt_wire_want_taken(s, m->flow_take);
        }
        return;
    case BATON__PEER_MSG__M_FLOW_CLOSE:
        if (s->dialer) {
            bt_wire_recv_closed(s, m->flow_close);
        } else {
            bt_wire_send_closed(s, m->flow_close);
        }
        return;
    case BATON__PEER_MSG__M_LANE_OPEN:
        if (!flows || s->dialer) {
            violation(
                s, "the peer sent LaneOpen before the session was up, or in the wrong direction");
            return;
        }
        bt_wire_path_asked(s, m->lane_open);
        return;
    case BATON__PEER_MSG__M_LANE_OPENED:
        if (s->dialer) {
            bt_wire_path_answered(s, m->lane_opened);
        }
        return;
    case BATON__PEER_MSG__M_LANE_CLOSE: bt_wire_path_closed(s, m->lane_close); return;
    case BATON__PEER_MSG__M_LANE_END:
        if (!s->dialer) {
            bt_wire_path_ended(s, m->lane_end);
        }
        return;
    case BATON__PEER_MSG__M_HELLO:
    case BATON__PEER_MSG__M_HEARTBEAT:
    case BATON__PEER_MSG__M__NOT_SET:
    case _BATON__PEER_MSG__M__CASE_IS_INT_SIZE: break;
    }
    /* a message of a newer version: ignored */
}

static const struct bt_rpc_session_ops session_ops = {
    .incoming = &baton__peer_msg__descriptor,
    .say_hello = say_hello,
    .say_heartbeat = say_heartbeat,
    .on_hello = on_hello,
    .on_up = on_up,
    .on_heartbeat = on_heartbeat,
    .on_message = on_message,
    .on_end = on_end,
};

void bt_wire_session_accept(void *arg, struct bt_rpc_stream *stream)
{
    struct bt_wire_session *s = session_new(arg, false);
    snprintf(s->name, sizeof(s->name), "unknown");
    bt_rpc_session_accept(&s->rpc, stream);
}

struct bt_wire_session *bt_wire_session_dial(struct bt_wire_peer *p)
{
    struct bt_wire_session *s = session_new(p->w, true);
    s->peer = p;
    s->incarnation = p->incarnation;
    snprintf(s->name, sizeof(s->name), "%s", p->name);
    bt_rpc_session_begin(&s->rpc);
    session_open_conn(s);
    bt_wire_paths_dial(s);
    return s;
}

/* ---- events of the transfer thread ---- */

void bt_wire_session_ready(struct bt_wire_session *s, const struct bt_wire_path *first)
{
    bt_rpc_session_state_t state = bt_rpc_session_state(&s->rpc);
    if (s->rpc.core.said || state == BT_RPC_SESSION_IDLE || state == BT_RPC_SESSION_ENDING) {
        return;
    }
    s->first = first;
    if (!s->dialer) {
        bt_rpc_session_ready(&s->rpc);
        s->first = NULL;
        return;
    }
    char who[sizeof(BT_WIRE_ROLE) + sizeof(s->name)];
    peer_role(s->name, who, sizeof(who));
    bt_status_t st = bt_rpc_session_dial(&s->rpc, s->w->rpc, s->peer->rpc, who, BT_WIRE_METHOD);
    s->first = NULL;
    if (st != BT_OK) {
        bt_rpc_session_end(&s->rpc, BT_RPC_SESSION_REFUSED, BT_GRPC_UNAVAILABLE,
                           "its rpc address cannot be dialed");
    }
}

void bt_wire_session_event(struct bt_wire_session *s, uint32_t events)
{
    if ((events & BT_WX_EV_LOST) && !bt_wire_session_dead(s)) {
        bt_wire_session_fail(s, s->conn.why,
                             s->conn.lost == BT_ERR_PEER_PROTOCOL ? BT_GRPC_INVALID_ARGUMENT
                                                                  : BT_GRPC_UNAVAILABLE);
        return; /* STOPPED cannot be among these events, since STOP was sent only now */
    }
    if (events & BT_WX_EV_STOPPED) {
        s->conn_stopped = true;
        session_maybe_free(s);
    }
}

void bt_wire_session_tick(struct bt_wire_session *s, uint64_t now_ns)
{
    if (bt_wire_session_dead(s) || !bt_rpc_session_tick(&s->rpc, now_ns)) {
        return;
    }
    bt_wire_sends_tick(s, now_ns);
    bt_wire_paths_tick(s, now_ns);
    if (bt_wire_session_dead(s)) {
        return;
    }
    if (s->n_flows > 0) {
        s->busy_ns = now_ns;
    }
    if (s->dialer && bt_wire_session_up(s) && now_ns > s->busy_ns &&
        now_ns - s->busy_ns > s->w->idle_ns) {
        bt_wire_session_fail(s, "idle", BT_GRPC_OK);
    }
}
