/* gRPC sessions between kvstores: hello and its checks, the life of the connection inside the
 * session, heartbeats, silence. One session per direction of dialing: the dialer pulls flows from
 * the listener. Control thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/ranges.h"
#include "kvstore/wire/wire_priv.h"

_Static_assert(BT_RANGE_CARDS_MAX == BT_NICS_MAX && BT_RANGE_FETCH_MAX == BT_WIRE_FETCH_MAX,
               "the ranges of messages are the limits of the code behind them");

static void session_free(struct bt_wire_session *s)
{
    BT_ASSERT(s->state == BT_WS_DEAD && s->n_flows == 0 && s->n_paths == 0 && s->stream == NULL);
    bt_timer_stop(s->w->loop, &s->broken);
    bt_list_remove(&s->link);
    free(s);
}

static void session_maybe_free(struct bt_wire_session *s)
{
    if (s->state == BT_WS_DEAD && s->n_flows == 0 && s->n_paths == 0 &&
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

static struct bt_wire_session *session_new(struct bt_wire *w, bool dialer)
{
    struct bt_wire_session *s = bt_calloc(1, sizeof(*s));
    s->w = w;
    s->dialer = dialer;
    s->conn.obj.kind = BT_WX_CONN;
    s->conn.heard_at = &s->conn.heard;
    s->last_rx_ns = s->last_tx_ns = s->busy_ns = bt_mono_ns();
    bt_list_init(&s->sends);
    bt_list_init(&s->paths);
    bt_list_insert_tail(&w->sessions, &s->link);
    return s;
}

/* Who a peer of this name must be by its certificate: "kvstore/n1" of "kvstore-n1". */
static void peer_role(const char *name, char *who, size_t cap)
{
    size_t skip =
        strncmp(name, BT_WIRE_NAME, sizeof(BT_WIRE_NAME) - 1) == 0 ? sizeof(BT_WIRE_NAME) - 1 : 0;
    snprintf(who, cap, "%s/%s", BT_WIRE_ROLE, name + skip);
}

static void session_open_conn(struct bt_wire_session *s)
{
    s->state = BT_WS_OPENING;
    s->conn_open = true;
    s->conn.several = s->w->n_cards > 1;
    s->conn.dialer = s->dialer;
    peer_role(s->name, s->conn.who, sizeof(s->conn.who));
    snprintf(s->conn.peer, sizeof(s->conn.peer), "%s", s->name);
    bt_wx_command(s->w->x, &s->conn.obj, BT_WX_CMD_OPEN);
}

/* ---- ends ---- */

/* final: the listener will say the same next time. */
static void session_end(struct bt_wire_session *s, const char *why, int code, bool final)
{
    if (s->state == BT_WS_DEAD) {
        return;
    }
    bool was_up = s->state == BT_WS_UP;
    char text[200]; /* `why` may belong to what is freed below */
    snprintf(text, sizeof(text), "%s", why);
    s->state = BT_WS_DEAD;
    if (was_up) {
        bt_wire_count_up(s->w, -1);
        bt_metric_add(s->w->sessions_lost, 1);
    }
    BT_INFO("wire_session_end", "peer=%s inc=%016llx dialer=%d was_up=%d why=%s", s->name,
            (unsigned long long)s->incarnation, s->dialer, was_up, text);
    if (s->stream != NULL) {
        struct bt_rpc_stream *stream = s->stream;
        s->stream = NULL;
        bt_rpc_stream_close(stream, code, text, false); /* a stopped peer takes nothing */
    }
    if (s->channel != NULL) {
        bt_rpc_channel_destroy(s->channel);
        s->channel = NULL;
    }
    s->n_flows++; /* callbacks below must not free s */
    while (!bt_list_empty(&s->sends)) {
        bt_wire_send_end(BT_CONTAINER_OF(s->sends.next, struct bt_wire_send, link),
                         BT_ERR_PEER_LOST);
    }
    struct bt_wire_peer *p = s->peer;
    s->peer = NULL;
    if (p != NULL) {
        p->session = NULL;
        bt_wire_peer_lost(p, was_up, final, text);
    }
    bt_wire_paths_stop(s);
    if (s->conn_open) { /* flows and paths were told first */
        bt_wx_command(s->w->x, &s->conn.obj, BT_WX_CMD_STOP);
    }
    s->n_flows--;
    session_maybe_free(s);
}

void bt_wire_session_fail(struct bt_wire_session *s, const char *why, int code)
{
    session_end(s, why, code, false);
}

static void on_broken(void *arg)
{
    bt_wire_session_fail(arg, "session queue is full or broken", BT_GRPC_UNAVAILABLE);
}

void bt_wire_session_send(struct bt_wire_session *s, const Baton__PeerMsg *msg)
{
    if (s->stream == NULL) {
        return;
    }
    if (bt_rpc_stream_send_pb(s->stream, &msg->base) != BT_OK) {
        bt_timer_start(s->w->loop, &s->broken, 0, 0, on_broken, s);
    }
    s->last_tx_ns = bt_mono_ns();
}

static void violation(struct bt_wire_session *s, const char *what)
{
    BT_WARN("wire_protocol", "peer=%s inc=%016llx what=%s", s->name,
            (unsigned long long)s->incarnation, what);
    session_end(s, what, BT_GRPC_INVALID_ARGUMENT, false);
}

/* The echo can overtake the peer's hello, which takes another way. */
void bt_wire_session_maybe_up(struct bt_wire_session *s)
{
    if (s->state != BT_WS_WIREUP || !s->proven) {
        return;
    }
    s->state = BT_WS_UP;
    s->busy_ns = bt_mono_ns();
    bt_wire_count_up(s->w, 1);
    BT_INFO("wire_session_up", "peer=%s inc=%016llx dialer=%d", s->name,
            (unsigned long long)s->incarnation, s->dialer);
    if (s->peer != NULL) {
        bt_wire_peer_up(s->peer);
    }
}

/* ---- hello ---- */

/* first: the path whose address goes with it; NULL: none. */
static void send_hello(struct bt_wire_session *s, const struct bt_wire_path *first)
{
    struct bt_wire *w = s->w;
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
    h.version = BT_WIRE_PROTO_VERSION;
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

/* Is the dialer who it says it is? The dialer has asked the listener's certificate itself. */
static bool name_is_proved(const struct bt_wire_session *s, const char *name)
{
    char who[sizeof(BT_WIRE_ROLE) + sizeof(s->name)];
    peer_role(name, who, sizeof(who));
    return s->dialer || bt_rpc_stream_peer_is(s->stream, BT_WIRE_ROLE, strchr(who, '/') + 1);
}

static const char *transport_name(Baton__KvTransport t)
{
    return t == BATON__KV_TRANSPORT__UCX    ? "ucx"
           : t == BATON__KV_TRANSPORT__GRPC ? "grpc"
                                            : "a later one";
}

/* NULL if the two belong together, else why not. */
static const char *hello_mismatch(const struct bt_wire_session *s, const Baton__PeerHello *h,
                                  char *text, size_t cap)
{
    const struct bt_wire *w = s->w;
    struct bt_wire_way way = {.card = h->card,
                              .nonce = h->nonce,
                              .address = h->ucx_address.data,
                              .address_len = h->ucx_address.len};
    if (h->version != BT_WIRE_PROTO_VERSION) {
        snprintf(text, cap, "peer protocol version %u, here %u: upgrade the older kvstore",
                 h->version, BT_WIRE_PROTO_VERSION);
    } else if (strcmp(h->cluster, w->cluster) != 0) {
        snprintf(text, cap, "cluster.name \"%.40s\", here \"%.40s\"", h->cluster, w->cluster);
    } else if (!name_is_proved(s, h->name)) {
        snprintf(text, cap, "\"%.40s\" is not the kvstore of its certificate's node", h->name);
    } else if (h->layout_id != w->layout.layout_id) {
        snprintf(text, cap, "layout %016llx, here %016llx: same model and kv.block_tokens?",
                 (unsigned long long)h->layout_id, (unsigned long long)w->layout.layout_id);
    } else if (h->root_key.len != sizeof(w->root.b) ||
               memcmp(h->root_key.data, w->root.b, sizeof(w->root.b)) != 0) {
        snprintf(
            text, cap,
            "root key differs: same weights, model.activations, kv.salt_file and kv settings?");
    } else if (h->expect_incarnation != 0 && h->expect_incarnation != w->incarnation) {
        snprintf(text, cap, "incarnation %016llx is gone, here is %016llx",
                 (unsigned long long)h->expect_incarnation, (unsigned long long)w->incarnation);
    } else if (s->dialer && h->incarnation != s->incarnation) {
        snprintf(text, cap, "dialed incarnation %016llx, %016llx answered",
                 (unsigned long long)s->incarnation, (unsigned long long)h->incarnation);
    } else if (s->dialer && strcmp(h->name, s->name) != 0) {
        snprintf(text, cap, "dialed %s, \"%.40s\" answered", s->name, h->name);
    } else if (h->transport != w->transport) {
        snprintf(text, cap, "kvstore.wire.transport is %s there, %s here: the same everywhere",
                 transport_name(h->transport), transport_name(w->transport));
    } else if (h->ucx_address.len == 0 && (!s->dialer || h->n_cards == 0)) {
        snprintf(text, cap, "KV address of 0 bytes");
    } else if (!bt_wire_member_is(s, &way, &h->address_mac)) {
        snprintf(text, cap,
                 "its KV address has no proof of a member of this cluster: the same kv.salt_file "
                 "everywhere, and no older version");
    } else {
        return NULL;
    }
    return text;
}

/* The same process has dialed again: it has given up the old session. */
static void drop_older(struct bt_wire_session *s)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &s->w->sessions) {
        struct bt_wire_session *o = BT_CONTAINER_OF(i, struct bt_wire_session, link);
        if (o != s && !o->dialer && o->state != BT_WS_DEAD && o->state != BT_WS_ACCEPTED &&
            o->incarnation == s->incarnation && strcmp(o->name, s->name) == 0) {
            /* Ending one frees or removes no session but itself; callbacks may add at the tail. */
            bt_wire_session_fail(o, "replaced by a newer session of the same peer",
                                 BT_GRPC_CANCELLED);
            tmp = s->w->sessions.next;
        }
    }
}

static void on_hello(struct bt_wire_session *s, const Baton__PeerHello *h)
{
    char text[200 + BT_WIRE_NAME_BYTES];
    if (s->state != (s->dialer ? BT_WS_HELLO : BT_WS_ACCEPTED)) {
        violation(s, "hello out of turn");
        return;
    }
    if (!s->dialer) {
        snprintf(s->name, sizeof(s->name), "%s", h->name);
        s->incarnation = h->incarnation;
    }
    if (hello_mismatch(s, h, text, sizeof(text)) != NULL) {
        BT_WARN("wire_hello_refused", "peer=%s inc=%016llx why=%s", s->name,
                (unsigned long long)h->incarnation, text);
        session_end(s, text, BT_GRPC_FAILED_PRECONDITION, true);
        return;
    }
    if (s->dialer) {
        s->state = BT_WS_WIREUP;
    } else {
        drop_older(s);
        session_open_conn(s);
    }
    const char *why = bt_wire_paths_hello(s, h);
    if (why != NULL) {
        session_end(s, why, BT_GRPC_FAILED_PRECONDITION, true);
    } else if (!s->dialer && s->n_paths == 0) {
        bt_wire_session_ready(s, NULL);
    } else {
        bt_wire_session_maybe_up(s);
    }
}

/* ---- the stream ---- */

static void dispatch(struct bt_wire_session *s, const Baton__PeerMsg *m)
{
    bool flows = s->state == BT_WS_WIREUP || s->state == BT_WS_UP;
    switch (m->m_case) {
    case BATON__PEER_MSG__M_HELLO: on_hello(s, m->hello); return;
    case BATON__PEER_MSG__M_HEARTBEAT: return;
    case BATON__PEER_MSG__M_FLOW_OPEN:
        if (!flows || s->dialer) {
            violation(s, "FlowOpen out of turn");
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
            violation(s, "LaneOpen out of turn");
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
    case BATON__PEER_MSG__M__NOT_SET:
    case _BATON__PEER_MSG__M__CASE_IS_INT_SIZE: break;
    }
    /* a newer peer's message: not for us */
}

static void on_message(void *arg, struct bt_rpc_stream *stream, const void *data, size_t len)
{
    struct bt_wire_session *s = arg;
    (void)stream;
    s->last_rx_ns = bt_mono_ns();
    atomic_fetch_add_explicit(s->conn.heard_at, 1, memory_order_relaxed);
    char why[256];
    Baton__PeerMsg *m = bt_peer_unpack(data, len, why, sizeof(why));
    if (m == NULL) {
        violation(s, why);
        return;
    }
    dispatch(s, m);
    baton__peer_msg__free_unpacked(m, NULL);
}

static void on_close(void *arg, struct bt_rpc_stream *stream, int code, const char *detail)
{
    struct bt_wire_session *s = arg;
    char text[200];
    (void)stream;
    s->stream = NULL;
    if (s->dialer && code == BT_GRPC_FAILED_PRECONDITION) {
        snprintf(text, sizeof(text), "refused: %s", detail);
        session_end(s, text, code, true);
        return;
    }
    snprintf(text, sizeof(text), "stream ended, gRPC code %d: %s", code, detail);
    session_end(s, text, code, false);
}

static const struct bt_rpc_stream_ops stream_ops = {.on_message = on_message, .on_close = on_close};

void bt_wire_session_accept(void *arg, struct bt_rpc_stream *stream)
{
    struct bt_wire_session *s = session_new(arg, false);
    snprintf(s->name, sizeof(s->name), "unknown");
    s->state = BT_WS_ACCEPTED;
    s->stream = stream;
    bt_rpc_stream_set_arg(stream, &stream_ops, s);
}

struct bt_wire_session *bt_wire_session_dial(struct bt_wire_peer *p)
{
    struct bt_wire_session *s = session_new(p->w, true);
    s->peer = p;
    s->incarnation = p->incarnation;
    snprintf(s->name, sizeof(s->name), "%s", p->name);
    session_open_conn(s);
    bt_wire_paths_dial(s);
    return s;
}

/* ---- events of the transfer thread ---- */

void bt_wire_session_ready(struct bt_wire_session *s, const struct bt_wire_path *first)
{
    if (s->state != BT_WS_OPENING) {
        return;
    }
    if (!s->dialer) {
        s->state = BT_WS_WIREUP;
        send_hello(s, first);
        bt_wire_session_maybe_up(s);
        return;
    }
    char who[sizeof(BT_WIRE_ROLE) + sizeof(s->name)];
    peer_role(s->name, who, sizeof(who));
    if (bt_rpc_channel_create(s->w->rpc, s->peer->rpc, who, &s->channel) != BT_OK ||
        bt_rpc_stream_open(s->channel, BT_WIRE_METHOD, false, &stream_ops, s, &s->stream) !=
            BT_OK) {
        session_end(s, "its rpc address cannot be dialed", BT_GRPC_UNAVAILABLE, true);
        return;
    }
    s->state = BT_WS_HELLO;
    send_hello(s, first);
}

void bt_wire_session_event(struct bt_wire_session *s, uint32_t events)
{
    if ((events & BT_WX_EV_LOST) && s->state != BT_WS_DEAD) {
        session_end(s, s->conn.why,
                    s->conn.lost == BT_ERR_PEER_PROTOCOL ? BT_GRPC_INVALID_ARGUMENT
                                                         : BT_GRPC_UNAVAILABLE,
                    false);
        return; /* STOPPED cannot be in the same events: STOP was sent just now */
    }
    if (events & BT_WX_EV_STOPPED) {
        s->conn_stopped = true;
        session_maybe_free(s);
    }
}

void bt_wire_session_tick(struct bt_wire_session *s, uint64_t now_ns)
{
    if (s->state == BT_WS_DEAD) {
        return;
    }
    if (now_ns > s->last_rx_ns && now_ns - s->last_rx_ns > BT_WIRE_SILENCE_NS) {
        bt_wire_session_fail(s, "silent for two seconds", BT_GRPC_UNAVAILABLE);
        return;
    }
    bt_wire_want_tick(s, now_ns);
    bt_wire_paths_tick(s, now_ns);
    if (s->state == BT_WS_DEAD) {
        return;
    }
    if (s->n_flows > 0) {
        s->busy_ns = now_ns;
    }
    if (s->dialer && s->state == BT_WS_UP && now_ns > s->busy_ns &&
        now_ns - s->busy_ns > s->w->idle_ns) {
        bt_wire_session_fail(s, "idle", BT_GRPC_OK);
        return;
    }
    if ((s->state == BT_WS_WIREUP || s->state == BT_WS_UP) && now_ns > s->last_tx_ns &&
        now_ns - s->last_tx_ns >= BT_WIRE_HEARTBEAT_NS - 1000000ull * (BT_WIRE_TICK_MS / 2)) {
        Baton__PeerHeartbeat hb = BATON__PEER_HEARTBEAT__INIT;
        Baton__PeerMsg m = BATON__PEER_MSG__INIT;
        hb.seq = ++s->seq;
        m.m_case = BATON__PEER_MSG__M_HEARTBEAT;
        m.heartbeat = &hb;
        bt_wire_session_send(s, &m);
    }
}
