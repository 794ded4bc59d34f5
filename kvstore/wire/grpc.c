/* The transfer thread over gRPC, for networks that are not trusted. Connections, flows, messages,
 * priorities, limits and checks are the same as over UCX (xfer*.c), but a path is a gRPC stream
 * between the transfer threads of the two kvstores, with TLS where cluster.tls.* is given. It has
 * its own port and loop, so that neither heartbeats nor requests wait behind KV.
 *
 * The dialer of the session, which receives the KV, also dials the stream. The first message in
 * each direction returns the nonce of the other side's hello, and with TLS the certificate must be
 * that of the session's peer. This ties a stream to its session. Messages are copied into gRPC's
 * memory before they are sent, so a peer that reads slowly holds no slot. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "common/log/log.h"
#include "common/rpc/rpc.h"
#include "common/rpc/tls.h"
#include "kvstore/wire/xfer_priv.h"

#define METHOD          "/baton.Peer/Segments"
#define ROLE            "kvstore"
#define PROOF_NS        (2 * BT_WX_PROOF_NS) /* the time includes a TLS handshake */
#define STEP_MS         50
#define QUEUE_MAX_BYTES (1u << 30) /* effectively no limit: bytes_in_flight_max is lower */
#define STRANGERS_MAX   64

struct bt_wx_via { /* a path's gRPC part */
    struct bt_wx_path *path;
    struct bt_rpc_channel *channel; /* dialer */
    struct bt_rpc_stream *stream;   /* NULL: not open yet, or closed */
    struct bt_wx_out *head, **tail; /* messages that gRPC has, in order */
};

struct stranger { /* a stream that has not proved yet which session it belongs to */
    struct bt_list link;
    struct bt_wx *x;
    struct bt_rpc_stream *stream;
    uint64_t since_ns;
};

struct bt_wx_grpc {
    struct bt_loop *loop;
    struct bt_loop_fd *waker;
    struct bt_rpc *rpc;
    struct bt_rpc_server *server;
    char *address;
    struct bt_list strangers;
    uint32_t n_strangers;
};

/* ---- one connection ---- */

static void via_close(struct bt_wx_via *v, const char *why)
{
    if (v->stream != NULL) {
        bt_rpc_stream_close(v->stream, BT_GRPC_CANCELLED, why, false);
        v->stream = NULL;
    }
    bt_rpc_channel_destroy(v->channel);
    v->channel = NULL;
    while (v->head != NULL) {
        struct bt_wx_out *o = v->head;
        v->head = o->next;
        bt_wx_out_done(o, "the stream has ended");
    }
    v->tail = &v->head;
}

static void via_send_proof(struct bt_wx_via *v)
{
    struct bt_wire_proof p = {BT_WIRE_PROOF_MAGIC, BT_WIRE_VERSION, v->path->nonce_peer};
    if (bt_rpc_stream_send(v->stream, &p, sizeof(p)) != BT_OK) {
        bt_wx_path_kill(v->path, BT_ERR_PEER_LOST, "the KV stream accepts no more messages");
    }
}

/* Copies the first bytes of a message, at most cap; returns their number. */
static size_t copy_pieces(const struct iovec *pieces, size_t n, void *to, size_t cap)
{
    size_t got = 0;
    for (size_t i = 0; i < n && got < cap; i++) {
        size_t part = BT_MIN(pieces[i].iov_len, cap - got);
        memcpy((uint8_t *)to + got, pieces[i].iov_base, part);
        got += part;
    }
    return got;
}

static bool read_proof(const struct iovec *pieces, size_t n, size_t len, struct bt_wire_proof *p)
{
    return len == sizeof(*p) && copy_pieces(pieces, n, p, sizeof(*p)) == sizeof(*p) &&
           p->magic == BT_WIRE_PROOF_MAGIC && p->version == BT_WIRE_VERSION;
}

static void violation(struct bt_wx_path *l, const char *what)
{
    bt_metric_add(l->conn->x->conf.m.drop_garbled, 1);
    bt_wx_conn_kill(l->conn, BT_ERR_PEER_PROTOCOL, "%s", what);
}

static void on_segments(struct bt_wx_path *l, const struct iovec *pieces, size_t n, size_t len)
{
    union {
        struct bt_wire_seg_hdr hdr;
        uint8_t raw[BT_WIRE_SEG_HDR_MAX];
    } h;
    size_t got = copy_pieces(pieces, n, h.raw, sizeof(h.raw));
    size_t want = got >= sizeof(h.hdr) && h.hdr.n_segs <= BT_WIRE_SEGS_MAX
                      ? sizeof(h.hdr) + 4u * h.hdr.n_segs
                      : 0;
    if (want == 0 || want > got) {
        violation(l, "message with a wrong number of segments");
        return;
    }
    struct bt_wx_land land;
    if (!bt_wx_land_begin(l, h.raw, want, len - want, true, &land)) {
        return;
    }
    for (size_t i = 0, skip = want; i < n; i++) {
        size_t past = BT_MIN(skip, pieces[i].iov_len);
        skip -= past;
        bt_wx_land_bytes(&land, (const uint8_t *)pieces[i].iov_base + past,
                         pieces[i].iov_len - past);
    }
    bt_wx_land_end(&land);
}

static void on_pieces(void *arg, struct bt_rpc_stream *s, const struct iovec *pieces, size_t n,
                      size_t len)
{
    struct bt_wx_path *l = ((struct bt_wx_via *)arg)->path;
    struct bt_wire_proof p;
    (void)s;
    BT_ASSERT(l->obj.kind == BT_WX_PATH);
    if (l->kill_wanted || l->stopping || l->conn->kill_wanted) {
        return;
    }
    if (l->proven && l->conn->dialer) {
        on_segments(l, pieces, n, len);
    } else if (!l->proven && read_proof(pieces, n, len, &p) && p.nonce == l->nonce) {
        bt_wx_path_proven(l);
    } else {
        violation(l, "the peer sent a message before its proof of the session, a wrong proof, or "
                     "KV in the wrong direction");
    }
}

static void on_sent(void *arg, struct bt_rpc_stream *s)
{
    struct bt_wx_via *v = arg;
    struct bt_wx_out *o = v->head;
    (void)s;
    if (o == NULL) {
        return; /* the proof was sent */
    }
    v->head = o->next;
    if (v->head == NULL) {
        v->tail = &v->head;
    }
    bt_wx_out_done(o, NULL);
}

static void on_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    struct bt_wx_via *v = arg;
    (void)s;
    v->stream = NULL;
    bt_wx_path_kill(v->path, BT_ERR_PEER_LOST, "KV stream ended, gRPC code %d: %s", code, detail);
}

static const struct bt_rpc_stream_ops via_ops = {
    .on_pieces = on_pieces, .on_sent = on_sent, .on_close = on_close};

static void path_open(struct bt_wx_path *l)
{
    struct bt_wx *x = l->conn->x;
    l->via = bt_calloc(1, sizeof(*l->via));
    l->via->path = l;
    l->via->tail = &l->via->head;
    l->connected = true; /* it counts as connected when it is proved */
    l->address = bt_strdup(x->grpc->address);
    l->address_len = strlen(l->address);
    bt_wx_event(x, &l->obj, BT_WX_EV_READY);
}

static void path_connect(struct bt_wx_path *l)
{
    struct bt_wx_via *v = l->via;
    struct bt_wx *x = l->conn->x;
    if (!l->conn->dialer) {
        return; /* the peer dials */
    }
    char *target = bt_sprintf("%.*s", (int)l->peer_address_len, (const char *)l->peer_address);
    if (bt_rpc_channel_create(x->grpc->rpc, target, l->conn->who, &v->channel) != BT_OK ||
        bt_rpc_stream_open(v->channel, METHOD, false, &via_ops, v, &v->stream) != BT_OK) {
        bt_wx_path_kill(l, BT_ERR_PEER_LOST, "KV address %s cannot be dialed", target);
    } else {
        bt_rpc_stream_set_queue_max(v->stream, QUEUE_MAX_BYTES);
        via_send_proof(v);
    }
    free(target);
}

static void post(struct bt_wx_out *o, size_t header_len)
{
    struct bt_wx_via *v = o->path->via;
    struct iovec iov[BT_WIRE_SEGS_MAX + 1] = {{o->raw, header_len}};
    memcpy(iov + 1, o->iov, o->hdr.n_segs * sizeof(iov[0]));
    o->next = NULL;
    *v->tail = o;
    v->tail = &o->next;
    bt_status_t st = v->stream != NULL ? bt_rpc_stream_send_iov(v->stream, iov, o->hdr.n_segs + 1u)
                                       : BT_ERR_PEER_LOST;
    if (st != BT_OK) { /* via_close, called soon, releases the message */
        bt_wx_path_kill(o->path, BT_ERR_PEER_LOST, "the KV stream accepts no more messages: %s",
                        bt_status_name(st));
    }
}

static void path_free(struct bt_wx_path *l)
{
    BT_ASSERT(l->n_sends == 0);
    free(l->via);
    l->via = NULL;
    bt_wx_path_gone(l);
}

/* Does the path's work that is due now. This may free l. */
static void path_turn(struct bt_wx_path *l)
{
    uint64_t now = l->conn->x->now_ns;
    bt_list_remove(&l->hot_link); /* removed, so that every path gets its turn */
    if (l->connect_ns != 0 && !l->proven && now - l->connect_ns > PROOF_NS) {
        bt_wx_path_kill(l, BT_ERR_PEER_LOST, "no KV stream within two seconds");
    }
    if (bt_wx_path_ends(l) && !l->closing) {
        l->closing = true;
        via_close(l->via, l->killed ? l->why : "the session has ended");
    }
    if (l->stopping) {
        path_free(l);
    }
}

static void conn_turn(struct bt_wx_conn *c)
{
    struct bt_list *i, *tmp;
    bt_wx_send_pump(c);
    bt_list_for_each_safe (i, tmp, &c->paths) {
        path_turn(BT_CONTAINER_OF(i, struct bt_wx_path, link));
    }
    bt_wx_conn_step(c);
}

/* ---- incoming streams ---- */

static void stranger_free(struct stranger *s)
{
    s->x->grpc->n_strangers--;
    bt_list_remove(&s->link);
    free(s);
}

static void stranger_end(struct stranger *s, int code, const char *why)
{
    bt_metric_add(s->x->conf.m.drop_garbled, 1);
    bt_rpc_stream_close(s->stream, code, why, false);
    stranger_free(s);
}

static struct bt_wx_path *find_path(struct bt_wx *x, uint64_t nonce)
{
    struct bt_list *i, *j;
    bt_wx_take_commands(x); /* the command that opens its session may not be handled yet */
    bt_list_for_each (i, &x->conns) {
        struct bt_wx_conn *c = BT_CONTAINER_OF(i, struct bt_wx_conn, link);
        bt_list_for_each (j, &c->paths) {
            struct bt_wx_path *l = BT_CONTAINER_OF(j, struct bt_wx_path, link);
            if (!c->dialer && l->connect_ns != 0 && l->nonce == nonce) {
                return l;
            }
        }
    }
    return NULL;
}

static void on_first(void *arg, struct bt_rpc_stream *stream, const struct iovec *pieces, size_t n,
                     size_t len)
{
    struct stranger *s = arg;
    struct bt_wire_proof p;
    struct bt_wx_path *l = read_proof(pieces, n, len, &p) ? find_path(s->x, p.nonce) : NULL;
    if (l == NULL || l->proven || l->kill_wanted || l->stopping) {
        stranger_end(s, BT_GRPC_NOT_FOUND, "no session of this kvstore waits for this stream");
        return;
    }
    const char *node = strchr(l->conn->who, '/');
    if (!bt_rpc_stream_peer_is(stream, ROLE, node != NULL ? node + 1 : NULL)) {
        stranger_end(s, BT_GRPC_PERMISSION_DENIED,
                     "this stream's certificate is not the one of its session");
        return;
    }
    l->via->stream = stream;
    bt_rpc_stream_set_arg(stream, &via_ops, l->via);
    bt_rpc_stream_set_queue_max(stream, QUEUE_MAX_BYTES);
    stranger_free(s);
    via_send_proof(l->via);
    bt_wx_path_proven(l);
}

static void on_stranger_close(void *arg, struct bt_rpc_stream *stream, int code, const char *detail)
{
    (void)stream;
    (void)code;
    (void)detail;
    stranger_free(arg);
}

static void on_accept(void *arg, struct bt_rpc_stream *stream)
{
    static const struct bt_rpc_stream_ops ops = {.on_pieces = on_first,
                                                 .on_close = on_stranger_close};
    struct bt_wx *x = arg;
    if (x->grpc->n_strangers >= STRANGERS_MAX) {
        bt_rpc_stream_close(stream, BT_GRPC_EXHAUSTED, "too many streams without a session", false);
        return;
    }
    struct stranger *s = bt_calloc(1, sizeof(*s));
    s->x = x;
    s->stream = stream;
    s->since_ns = bt_mono_ns();
    bt_list_insert_tail(&x->grpc->strangers, &s->link);
    x->grpc->n_strangers++;
    bt_rpc_stream_set_arg(stream, &ops, s);
}

static void strangers_turn(struct bt_wx *x)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &x->grpc->strangers) {
        struct stranger *s = BT_CONTAINER_OF(i, struct stranger, link);
        if (x->quit || x->now_ns > s->since_ns + PROOF_NS) {
            stranger_end(s, BT_GRPC_DEADLINE, "the stream sent no proof of a session in time");
        }
    }
}

/* ---- the loop ---- */

static void on_wake(void *arg, uint32_t events)
{
    (void)events;
    bt_wx_unwake(arg);
}

/* How long to sleep, ms; -1: until an event. */
static int sleep_ms(const struct bt_wx *x)
{
    const struct bt_list *i, *j;
    if (!bt_list_empty(&x->hot)) {
        return 0;
    }
    int ms = bt_list_empty(&x->grpc->strangers) ? -1 : STEP_MS;
    bt_list_for_each (i, &x->conns) {
        const struct bt_wx_conn *c = BT_CONTAINER_OF(i, struct bt_wx_conn, link);
        ms = c->n_stopping > 0 || c->stopping ? STEP_MS : ms;
        bt_list_for_each (j, &c->paths) {
            const struct bt_wx_path *l = BT_CONTAINER_OF(j, struct bt_wx_path, link);
            ms = l->connect_ns != 0 && !l->proven ? STEP_MS : ms;
        }
    }
    return ms;
}

static void *thread_main(void *arg)
{
    struct bt_wx *x = arg;
    struct bt_list *i, *tmp;
    bt_loop_short_slices(BT_WX_SLICE_US);
    while (!bt_wx_over(x)) {
        bt_loop_poll(x->grpc->loop, sleep_ms(x));
        x->now_ns = bt_mono_ns();
        bt_wx_take_commands(x);
        bt_wx_look_at_words(x);
        bt_list_for_each_safe (i, tmp, &x->conns) {
            conn_turn(BT_CONTAINER_OF(i, struct bt_wx_conn, link));
        }
        bt_wx_recv_notify(x);
        strangers_turn(x);
    }
    return NULL;
}

/* ---- start and end, control thread ---- */

static void create(struct bt_wx *x)
{
    x->header_max = BT_WIRE_SEG_HDR_MAX;
    x->alone_min = UINT32_MAX; /* all bytes are copied anyway */
}

static void destroy(struct bt_wx *x)
{
    struct bt_wx_grpc *t = x->grpc;
    if (t == NULL) {
        return;
    }
    bt_rpc_server_destroy(t->server);
    bt_rpc_destroy(t->rpc);
    BT_ASSERT(bt_list_empty(&t->strangers));
    if (t->waker != NULL) {
        bt_loop_fd_del(t->loop, t->waker);
    }
    bt_loop_destroy(t->loop);
    free(t->address);
    free(t);
    x->grpc = NULL;
}

static bt_status_t card_start(struct bt_wx *x, uint32_t card, bool wait, char *err, size_t err_cap)
{
    struct bt_wx_grpc *t = bt_calloc(1, sizeof(*t));
    const char *listen = x->conf.grpc_listen;
    int port;
    (void)card;
    (void)wait;
    bt_list_init(&t->strangers);
    x->grpc = t;
    if (bt_loop_create(&t->loop) != BT_OK || bt_rpc_create(t->loop, &t->rpc) != BT_OK) {
        snprintf(err, err_cap, "no loop for the transfer thread: raise the limit of open files");
        destroy(x);
        return BT_ERR_IO;
    }
    bt_rpc_set_tls(t->rpc, x->conf.tls);
    bt_rpc_set_bulk(t->rpc);
    if (bt_rpc_server_create(t->rpc, listen, &t->server, &port) != BT_OK) {
        snprintf(err, err_cap, "kvstore.wire.listen: this host cannot listen on %s", listen);
        destroy(x);
        return BT_ERR_CONFIG;
    }
    t->address = bt_sprintf("%.*s:%d", (int)(strrchr(listen, ':') - listen), listen, port);
    bt_rpc_server_stream(t->server, METHOD, ROLE, on_accept, x);
    bt_rpc_server_start(t->server);
    t->waker = bt_loop_fd_add(t->loop, x->wakefd, EPOLLIN, on_wake, x);
    bt_wx_start_thread(x, thread_main);
    return BT_OK;
}

const struct bt_wx_transport bt_wx_over_grpc = {.create = create,
                                                .card_start = card_start,
                                                .destroy = destroy,
                                                .path_open = path_open,
                                                .path_connect = path_connect,
                                                .post = post};
