/* common/rpc in memory: one thread, no sockets. Streams that the owner has closed lie in a list of
 * their own until the callback that is running has returned. */
#include "tests/fuzz/fake_rpc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/list.h"

#define QUEUE_MAX   (8u << 20)
#define METHODS_MAX 16

struct message {
    struct bt_list link;
    size_t len;
    uint8_t data[];
};

struct bt_rpc_stream {
    struct bt_list link; /* rpc->streams, or rpc->closed */
    struct bt_rpc *rpc;
    struct bt_rpc_channel *channel; /* client side */
    struct bt_rpc_server *server;   /* server side */
    const char *method;
    struct bt_rpc_stream_ops ops;
    void *arg;
    struct bt_list sent; /* messages */
    size_t queued, queue_max;
    bool closed, full, was_full;
};

struct call {
    struct bt_list link;
    struct bt_rpc_channel *channel;
    const char *method;
    uint8_t *data;
    size_t len;
    bt_rpc_reply_fn done;
    void *arg;
};

struct bt_rpc_call {
    bool answered;
    int code;
};

struct bt_rpc {
    struct bt_loop *loop;
    struct bt_list streams, closed, calls, servers;
    uint32_t inside; /* callbacks that run */
    uint32_t n_streams;
    bool strangers;
};

struct bt_rpc_channel {
    struct bt_rpc *rpc;
    bool dying;
    char target[64];
};

struct bt_rpc_server {
    struct bt_list link;
    struct bt_rpc *rpc;
    bool started;
    struct {
        const char *name;
        bt_rpc_unary_fn unary;
        bt_rpc_accept_fn accept;
        void *arg;
    } methods[METHODS_MAX];
    uint32_t n_methods;
};

static struct bt_rpc *last;

/* ---- life ---- */

struct bt_rpc *fake_rpc_create(struct bt_loop *loop)
{
    struct bt_rpc *rpc = bt_calloc(1, sizeof(*rpc));
    rpc->loop = loop;
    bt_list_init(&rpc->streams);
    bt_list_init(&rpc->closed);
    bt_list_init(&rpc->calls);
    bt_list_init(&rpc->servers);
    last = rpc;
    return rpc;
}

struct bt_rpc *fake_rpc_last(void)
{
    return last;
}

bt_status_t bt_rpc_create(struct bt_loop *loop, struct bt_rpc **rpc_p)
{
    *rpc_p = fake_rpc_create(loop);
    return BT_OK;
}

void bt_rpc_set_tls(struct bt_rpc *rpc, struct bt_tls *tls)
{
    (void)rpc;
    (void)tls;
}

void bt_rpc_set_bulk(struct bt_rpc *rpc)
{
    (void)rpc;
}

struct bt_loop *bt_rpc_loop(const struct bt_rpc *rpc)
{
    return rpc->loop;
}

static void stream_free(struct bt_rpc_stream *s)
{
    while (!bt_list_empty(&s->sent)) {
        struct message *m = BT_CONTAINER_OF(s->sent.next, struct message, link);
        bt_list_remove(&m->link);
        free(m);
    }
    bt_list_remove(&s->link);
    free(s);
}

static void sweep(struct bt_rpc *rpc)
{
    while (rpc->inside == 0 && !bt_list_empty(&rpc->closed)) {
        stream_free(BT_CONTAINER_OF(rpc->closed.next, struct bt_rpc_stream, link));
    }
}

static void close_stream(struct bt_rpc_stream *s)
{
    s->closed = true;
    s->rpc->n_streams--;
    bt_list_remove(&s->link);
    bt_list_insert_tail(&s->rpc->closed, &s->link);
}

static void call_free(struct call *c)
{
    bt_list_remove(&c->link);
    free(c->data);
    free(c);
}

void bt_rpc_destroy(struct bt_rpc *rpc)
{
    if (rpc == NULL) {
        return;
    }
    BT_ASSERT(rpc->inside == 0);
    while (!bt_list_empty(&rpc->streams)) {
        stream_free(BT_CONTAINER_OF(rpc->streams.next, struct bt_rpc_stream, link));
    }
    while (!bt_list_empty(&rpc->calls)) {
        call_free(BT_CONTAINER_OF(rpc->calls.next, struct call, link));
    }
    BT_ASSERT(bt_list_empty(&rpc->servers));
    sweep(rpc);
    free(rpc);
}

/* ---- streams, as the owner sees them ---- */

bt_status_t bt_rpc_stream_send_iov(struct bt_rpc_stream *s, const struct iovec *iov, size_t n)
{
    size_t len = 0;
    BT_ASSERT(!s->closed);
    for (size_t i = 0; i < n; i++) {
        len += iov[i].iov_len;
    }
    if (s->full || (s->queued > 0 && s->queued + len > s->queue_max)) {
        s->was_full = true;
        return BT_AGAIN;
    }
    struct message *m = bt_malloc(sizeof(*m) + len);
    m->len = 0;
    for (size_t i = 0; i < n; i++) {
        bt_copy(m->data + m->len, iov[i].iov_base, iov[i].iov_len);
        m->len += iov[i].iov_len;
    }
    s->queued += len;
    bt_list_insert_tail(&s->sent, &m->link);
    return BT_OK;
}

bt_status_t bt_rpc_stream_send(struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct iovec iov = {(void *)(uintptr_t)data, len};
    return bt_rpc_stream_send_iov(s, &iov, 1);
}

size_t bt_rpc_stream_queued(const struct bt_rpc_stream *s)
{
    return s->queued;
}

bool bt_rpc_stream_sending(const struct bt_rpc_stream *s)
{
    return !bt_list_empty(&s->sent);
}

void bt_rpc_stream_set_queue_max(struct bt_rpc_stream *s, size_t bytes)
{
    s->queue_max = bytes;
}

void bt_rpc_stream_set_arg(struct bt_rpc_stream *s, const struct bt_rpc_stream_ops *ops, void *arg)
{
    BT_ASSERT(!s->closed);
    s->ops = *ops;
    s->arg = arg;
}

bool bt_rpc_stream_peer_is(const struct bt_rpc_stream *s, const char *role, const char *node)
{
    (void)role;
    (void)node;
    return !s->rpc->strangers;
}

bool bt_rpc_stream_same_connection(const struct bt_rpc_stream *a, const struct bt_rpc_stream *b)
{
    return a->rpc == b->rpc;
}

void bt_rpc_stream_close(struct bt_rpc_stream *s, int code, const char *detail, bool flush)
{
    (void)code;
    (void)flush;
    BT_ASSERT(!s->closed && detail != NULL);
    close_stream(s);
}

/* ---- streams, as the other end sees them ---- */

static struct bt_rpc_stream *stream_new(struct bt_rpc *rpc, const char *method)
{
    struct bt_rpc_stream *s = bt_calloc(1, sizeof(*s));
    s->rpc = rpc;
    s->method = method;
    s->queue_max = QUEUE_MAX;
    bt_list_init(&s->sent);
    bt_list_insert_tail(&rpc->streams, &s->link);
    rpc->n_streams++;
    return s;
}

uint32_t fake_rpc_streams(const struct bt_rpc *rpc)
{
    return rpc->n_streams;
}

bool fake_rpc_stands(const struct bt_rpc *rpc, const struct bt_rpc_stream *s)
{
    const struct bt_list *i;
    bt_list_for_each (i, &rpc->streams) {
        if (i == &s->link) {
            return true;
        }
    }
    return false;
}

struct bt_rpc_stream *fake_rpc_stream(const struct bt_rpc *rpc, uint32_t at)
{
    const struct bt_list *i;
    bt_list_for_each (i, &rpc->streams) {
        if (at-- == 0) {
            return BT_CONTAINER_OF(i, struct bt_rpc_stream, link);
        }
    }
    return NULL;
}

const char *fake_rpc_stream_method(const struct bt_rpc_stream *s)
{
    return s->method;
}

const char *fake_rpc_stream_target(const struct bt_rpc_stream *s)
{
    return s->channel != NULL ? s->channel->target : "";
}

const void *fake_rpc_sent(struct bt_rpc_stream *s, size_t *len_p)
{
    if (bt_list_empty(&s->sent)) {
        return NULL;
    }
    struct message *m = BT_CONTAINER_OF(s->sent.next, struct message, link);
    *len_p = m->len;
    return m->data;
}

void fake_rpc_sent_done(struct bt_rpc_stream *s)
{
    struct bt_rpc *rpc = s->rpc;
    struct message *m = BT_CONTAINER_OF(s->sent.next, struct message, link);
    BT_ASSERT(!bt_list_empty(&s->sent));
    bt_list_remove(&m->link);
    s->queued -= m->len;
    free(m);
    rpc->inside++;
    if (s->ops.on_sent != NULL) {
        s->ops.on_sent(s->arg, s);
    }
    if (!s->closed && s->was_full && !s->full && s->queued < s->queue_max / 2) {
        s->was_full = false;
        if (s->ops.on_writable != NULL) {
            s->ops.on_writable(s->arg, s);
        }
    }
    rpc->inside--;
    sweep(rpc);
}

/* Each piece is memory of its own, so that a read beyond it is seen. */
void fake_rpc_deliver(struct bt_rpc_stream *s, const void *data, size_t len, size_t cut)
{
    struct bt_rpc *rpc = s->rpc;
    struct iovec pieces[3];
    size_t n = s->ops.on_pieces != NULL && cut % 4 != 0 ? 1 + cut % 3 : 1, at = 0;
    for (size_t i = 0; i < n; i++) {
        size_t part = i + 1 == n ? len - at : BT_MIN(cut, len - at);
        pieces[i].iov_len = part;
        pieces[i].iov_base = bt_malloc(part + (part == 0));
        bt_copy(pieces[i].iov_base, (const uint8_t *)data + at, part);
        at += part;
    }
    rpc->inside++;
    if (s->ops.on_pieces != NULL) {
        s->ops.on_pieces(s->arg, s, pieces, n, len);
    } else if (s->ops.on_message != NULL) {
        s->ops.on_message(s->arg, s, pieces[0].iov_base, len);
    }
    rpc->inside--;
    for (size_t i = 0; i < n; i++) {
        free(pieces[i].iov_base);
    }
    sweep(rpc);
}

void fake_rpc_end(struct bt_rpc_stream *s, int code, const char *detail)
{
    struct bt_rpc *rpc = s->rpc;
    close_stream(s);
    rpc->inside++;
    if (s->ops.on_close != NULL) {
        s->ops.on_close(s->arg, s, code, detail);
    }
    rpc->inside--;
    sweep(rpc);
}

void fake_rpc_full(struct bt_rpc_stream *s, bool full)
{
    s->full = full;
}

void fake_rpc_strangers(struct bt_rpc *rpc, bool strangers)
{
    rpc->strangers = strangers;
}

/* ---- client ---- */

bt_status_t bt_rpc_channel_create_tls(struct bt_rpc *rpc, const char *target, struct bt_tls *tls,
                                      const char *who, struct bt_rpc_channel **ch_p)
{
    (void)tls;
    (void)who;
    if (target[0] == '\0') {
        return BT_ERR_INVALID;
    }
    *ch_p = bt_calloc(1, sizeof(**ch_p));
    (*ch_p)->rpc = rpc;
    snprintf((*ch_p)->target, sizeof((*ch_p)->target), "%s", target);
    return BT_OK;
}

bt_status_t bt_rpc_channel_create(struct bt_rpc *rpc, const char *target, const char *who,
                                  struct bt_rpc_channel **ch_p)
{
    return bt_rpc_channel_create_tls(rpc, target, NULL, who, ch_p);
}

static struct bt_rpc_stream *stream_of(const struct bt_rpc_channel *ch)
{
    const struct bt_list *i;
    bt_list_for_each (i, &ch->rpc->streams) {
        struct bt_rpc_stream *s = BT_CONTAINER_OF(i, struct bt_rpc_stream, link);
        if (s->channel == ch) {
            return s;
        }
    }
    return NULL;
}

static struct call *call_of(const struct bt_rpc_channel *ch)
{
    const struct bt_list *i;
    bt_list_for_each (i, &ch->rpc->calls) {
        struct call *c = BT_CONTAINER_OF(i, struct call, link);
        if (c->channel == ch) {
            return c;
        }
    }
    return NULL;
}

void bt_rpc_channel_destroy(struct bt_rpc_channel *ch)
{
    struct bt_rpc_stream *s;
    struct call *c;
    if (ch == NULL) {
        return;
    }
    ch->dying = true;
    while ((s = stream_of(ch)) != NULL) {
        fake_rpc_end(s, BT_GRPC_CANCELLED, "the channel is destroyed");
    }
    while ((c = call_of(ch)) != NULL) {
        bt_rpc_reply_fn done = c->done;
        void *arg = c->arg;
        call_free(c);
        done(arg, BT_GRPC_CANCELLED, "the channel is destroyed", NULL, 0);
    }
    free(ch);
}

void bt_rpc_channel_dial_again(struct bt_rpc_channel *ch)
{
    BT_ASSERT(!ch->dying);
}

void bt_rpc_unary(struct bt_rpc_channel *ch, const char *method, const void *data, size_t len,
                  uint64_t deadline_ms, bt_rpc_reply_fn done, void *arg)
{
    struct call *c = bt_calloc(1, sizeof(*c));
    (void)deadline_ms;
    BT_ASSERT(!ch->dying);
    c->channel = ch;
    c->method = method;
    c->data = bt_malloc(len + 1);
    bt_copy(c->data, data, len);
    c->len = len;
    c->done = done;
    c->arg = arg;
    bt_list_insert_tail(&ch->rpc->calls, &c->link);
}

bt_status_t bt_rpc_stream_open(struct bt_rpc_channel *ch, const char *method, bool wait_ready,
                               const struct bt_rpc_stream_ops *ops, void *arg,
                               struct bt_rpc_stream **s_p)
{
    (void)wait_ready;
    if (ch->dying) {
        return BT_ERR_CANCELLED;
    }
    struct bt_rpc_stream *s = stream_new(ch->rpc, method);
    s->channel = ch;
    s->ops = *ops;
    s->arg = arg;
    *s_p = s;
    return BT_OK;
}

int bt_rpc_unary_blocking(const struct bt_rpc_question *q, void **reply_p, size_t *reply_len_p,
                          char *detail, size_t detail_cap)
{
    (void)q;
    (void)reply_p;
    (void)reply_len_p;
    (void)detail;
    (void)detail_cap;
    return BT_GRPC_UNAVAILABLE;
}

static struct call *call_at(const struct bt_rpc *rpc, uint32_t at)
{
    const struct bt_list *i;
    bt_list_for_each (i, &rpc->calls) {
        if (at-- == 0) {
            return BT_CONTAINER_OF(i, struct call, link);
        }
    }
    return NULL;
}

uint32_t fake_rpc_calls(const struct bt_rpc *rpc)
{
    const struct bt_list *i;
    uint32_t n = 0;
    bt_list_for_each (i, &rpc->calls) {
        n++;
    }
    return n;
}

struct fake_rpc_call fake_rpc_call(const struct bt_rpc *rpc, uint32_t i)
{
    const struct call *c = call_at(rpc, i);
    return (struct fake_rpc_call){.method = c->method, .data = c->data, .len = c->len};
}

void fake_rpc_answer(struct bt_rpc *rpc, uint32_t i, int code, const void *data, size_t len)
{
    struct call *c = call_at(rpc, i);
    bt_rpc_reply_fn done = c->done;
    void *arg = c->arg, *copy = bt_malloc(len + (len == 0)); /* exact: a read beyond it is seen */
    bt_copy(copy, data, len);
    call_free(c);
    rpc->inside++;
    done(arg, code, code == BT_GRPC_OK ? "" : "as the tape says", copy, len);
    rpc->inside--;
    free(copy);
    sweep(rpc);
}

/* ---- servers ---- */

bt_status_t bt_rpc_server_create(struct bt_rpc *rpc, const char *listen,
                                 struct bt_rpc_server **srv_p, int *port_p)
{
    struct bt_rpc_server *srv = bt_calloc(1, sizeof(*srv));
    (void)listen;
    srv->rpc = rpc;
    bt_list_insert_tail(&rpc->servers, &srv->link);
    *srv_p = srv;
    if (port_p != NULL) {
        *port_p = 7100;
    }
    return BT_OK;
}

static void add_method(struct bt_rpc_server *srv, const char *name, bt_rpc_unary_fn unary,
                       bt_rpc_accept_fn accept, void *arg)
{
    BT_ASSERT(!srv->started && srv->n_methods < METHODS_MAX);
    srv->methods[srv->n_methods].name = name;
    srv->methods[srv->n_methods].unary = unary;
    srv->methods[srv->n_methods].accept = accept;
    srv->methods[srv->n_methods++].arg = arg;
}

void bt_rpc_server_unary(struct bt_rpc_server *srv, const char *method, const char *caller,
                         bt_rpc_unary_fn fn, void *arg)
{
    (void)caller;
    add_method(srv, method, fn, NULL, arg);
}

void bt_rpc_server_stream(struct bt_rpc_server *srv, const char *method, const char *caller,
                          bt_rpc_accept_fn fn, void *arg)
{
    (void)caller;
    add_method(srv, method, NULL, fn, arg);
}

void bt_rpc_server_start(struct bt_rpc_server *srv)
{
    srv->started = true;
}

void bt_rpc_call_reply(struct bt_rpc_call *call, int code, const char *detail, const void *data,
                       size_t len)
{
    (void)data;
    (void)len;
    BT_ASSERT(!call->answered && detail != NULL);
    call->answered = true;
    call->code = code;
}

static struct bt_rpc_stream *stream_served(const struct bt_rpc_server *srv)
{
    const struct bt_list *i;
    bt_list_for_each (i, &srv->rpc->streams) {
        struct bt_rpc_stream *s = BT_CONTAINER_OF(i, struct bt_rpc_stream, link);
        if (s->server == srv) {
            return s;
        }
    }
    return NULL;
}

void bt_rpc_server_destroy(struct bt_rpc_server *srv)
{
    struct bt_rpc_stream *s;
    if (srv == NULL) {
        return;
    }
    while ((s = stream_served(srv)) != NULL) {
        fake_rpc_end(s, BT_GRPC_UNAVAILABLE, "the server stops");
    }
    bt_list_remove(&srv->link);
    free(srv);
}

/* The server that has the method, and which of its methods it is. */
static struct bt_rpc_server *find_method(const struct bt_rpc *rpc, const char *name, bool stream,
                                         uint32_t *at_p)
{
    const struct bt_list *i;
    bt_list_for_each (i, &rpc->servers) {
        struct bt_rpc_server *srv = BT_CONTAINER_OF(i, struct bt_rpc_server, link);
        for (uint32_t k = 0; srv->started && k < srv->n_methods; k++) {
            if (strcmp(srv->methods[k].name, name) == 0 &&
                stream == (srv->methods[k].accept != NULL)) {
                *at_p = k;
                return srv;
            }
        }
    }
    return NULL;
}

struct bt_rpc_stream *fake_rpc_open(struct bt_rpc *rpc, const char *method)
{
    uint32_t at;
    struct bt_rpc_server *srv = find_method(rpc, method, true, &at);
    if (srv == NULL) {
        return NULL;
    }
    struct bt_rpc_stream *s = stream_new(rpc, srv->methods[at].name);
    s->server = srv;
    rpc->inside++;
    srv->methods[at].accept(srv->methods[at].arg, s);
    rpc->inside--;
    bool gone = s->closed;
    sweep(rpc);
    return gone ? NULL : s;
}

bool fake_rpc_ask(struct bt_rpc *rpc, const char *method, const void *data, size_t len, int *code_p)
{
    uint32_t at;
    struct bt_rpc_call call = {0};
    struct bt_rpc_server *srv = find_method(rpc, method, false, &at);
    if (srv == NULL) {
        return false;
    }
    rpc->inside++;
    srv->methods[at].unary(srv->methods[at].arg, &call, data, len);
    rpc->inside--;
    sweep(rpc);
    /* A later answer would be to a call that is gone: such methods are not for this. */
    BT_ASSERT(call.answered);
    *code_p = call.code;
    return true;
}
