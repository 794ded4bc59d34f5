/* The server side: a listener, a table of methods, a set of armed accepts for all methods, and
 * unary calls. Methods are distinguished here, because gRPC never answers calls to unregistered
 * methods. Loop's thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/loop/newcomers.h"
#include "common/rpc/tls_priv.h"

#define ACCEPTS_ARMED            16
#define CALL_MAGIC               0x63616c6cu
#define SRV_KEEPALIVE_MS         10000
#define SRV_KEEPALIVE_TIMEOUT_MS 5000
#define SRV_PING_INTERVAL_MIN_MS 1000
#define CONNECTION_STREAMS_MAX   128  /* a daemon needs two, batonctl one */
#define STREAMS_MAX              1024 /* open at once on one server; the same number of calls */
#define REQUEST_WAIT_MS          5000 /* for the message of a unary call */
#define AUTHORIZATION_BYTES      1024
#define HANDSHAKE_MS             5000 /* for TLS and HTTP/2; a client's attempt ends earlier */

struct method {
    struct bt_list link;
    char *name, *caller;
    bt_rpc_unary_fn unary; /* one of the two is set */
    bt_rpc_accept_fn stream;
    void *arg;
};

struct accept {
    struct bt_rpc_server *srv;
    struct bt_rpc_op op;
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array md;
};

struct bt_rpc_server {
    struct bt_rpc *rpc;
    struct bt_tls *tls;
    struct bt_list link; /* rpc->servers */
    grpc_server *server;
    char *listen;
    uint16_t port; /* checked for newcomers; 0: a Unix socket */
    bool started, dying, shut_down;
    uint32_t n_armed;
    struct accept accepts[ACCEPTS_ARMED];
    struct bt_rpc_op op_shutdown;
    struct bt_list methods, streams, calls;
};

struct bt_rpc_call {
    uint32_t magic;
    uint32_t refs; /* one for the answer, one for each op in flight */
    struct bt_rpc *rpc;
    struct bt_list link; /* srv->calls, or rpc->orphan_calls */
    grpc_call *call;
    bt_rpc_unary_fn fn; /* NULL when the server is destroyed */
    void *arg;
    bool replied;
    bool has_cert;
    char *authorization; /* NULL: none */
    bt_rpc_replied_fn on_reply;
    void *on_reply_arg;
    grpc_byte_buffer *recv_bb, *send_bb;
    int cancelled;
    struct bt_timer wait; /* limit for the request message */
    struct bt_rpc_op op_end, op_recv, op_reply;
};

/* ---- unary calls ---- */

static void call_put(struct bt_rpc_call *c)
{
    BT_ASSERT(c->magic == CALL_MAGIC && c->refs > 0);
    if (--c->refs > 0) {
        return;
    }
    bt_timer_stop(c->rpc->loop, &c->wait);
    bt_list_remove(&c->link);
    if (c->authorization != NULL) {
        explicit_bzero(c->authorization, strlen(c->authorization));
        free(c->authorization);
    }
    if (c->recv_bb != NULL) {
        grpc_byte_buffer_destroy(c->recv_bb);
    }
    if (c->send_bb != NULL) {
        grpc_byte_buffer_destroy(c->send_bb);
    }
    grpc_call_unref(c->call);
    c->magic = 0;
    free(c);
}

static void on_call_op(void *owner, bool success)
{
    (void)success; /* it does not matter whether the client still wants the answer */
    call_put(owner);
}

static void tell_reply(struct bt_rpc_call *c, int code, const char *detail)
{
    bt_rpc_replied_fn fn = c->on_reply;
    c->on_reply = NULL;
    if (fn != NULL) {
        fn(c->on_reply_arg, code, detail);
    }
}

void bt_rpc_call_reply(struct bt_rpc_call *c, int code, const char *detail, const void *data,
                       size_t len)
{
    BT_ASSERT(c->magic == CALL_MAGIC && !c->replied);
    c->replied = true;
    if (code == BT_GRPC_OK && len > BT_RPC_MESSAGE_MAX_BYTES) {
        code = BT_GRPC_EXHAUSTED;
        detail = "the reply is larger than the 16 MiB that a message may have";
    }
    tell_reply(c, code, detail);
    grpc_slice text = grpc_slice_from_copied_string(detail == NULL ? "" : detail);
    grpc_op ops[3] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                      {.op = GRPC_OP_SEND_STATUS_FROM_SERVER}};
    ops[1].data.send_status_from_server.status = (grpc_status_code)code;
    ops[1].data.send_status_from_server.status_details = &text;
    size_t n = 2;
    if (code == BT_GRPC_OK) {
        c->send_bb = bt_rpc_byte_buffer(data, len);
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        ops[n++].data.send_message.send_message = c->send_bb;
    }
    c->refs++;
    bt_rpc_batch(c->rpc, c->call, ops, n, &c->op_reply);
    grpc_slice_unref(text);
    call_put(c);
}

static void on_request(void *owner, bool success)
{
    struct bt_rpc_call *c = owner;
    bt_timer_stop(c->rpc->loop, &c->wait);
    if (!c->replied) { /* replied: bt_rpc_destroy has completed it meanwhile */
        if (!success || c->recv_bb == NULL) {
            bt_rpc_call_reply(c, BT_GRPC_INVALID_ARGUMENT, "the call carries no request message",
                              NULL, 0);
        } else if (c->fn == NULL) {
            bt_rpc_call_reply(c, BT_GRPC_UNAVAILABLE, "shutting down", NULL, 0);
        } else {
            struct bt_rpc_bytes b;
            bt_rpc_bytes_open(c->recv_bb, &b);
            c->fn(c->arg, c, b.data, b.len); /* may answer; the op's own reference keeps c */
            bt_rpc_bytes_close(&b);
        }
    }
    call_put(c);
}

static struct bt_rpc_call *call_new(struct bt_rpc_server *srv, grpc_call *call)
{
    struct bt_rpc_call *c = bt_calloc(1, sizeof(*c));
    c->magic = CALL_MAGIC;
    c->refs = 1;
    c->rpc = srv->rpc;
    c->call = call;
    bt_rpc_op_init(&c->op_end, on_call_op, c);
    bt_rpc_op_init(&c->op_recv, on_request, c);
    bt_rpc_op_init(&c->op_reply, on_call_op, c);
    bt_list_insert_tail(&srv->calls, &c->link);
    grpc_op end = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
    end.data.recv_close_on_server.cancelled = &c->cancelled;
    c->refs++;
    bt_rpc_batch(c->rpc, c->call, &end, 1, &c->op_end);
    return c;
}

/* on_request follows, without a message. */
static void on_request_timeout(void *arg)
{
    struct bt_rpc_call *c = arg;
    grpc_call_cancel_with_status(c->call, GRPC_STATUS_DEADLINE_EXCEEDED,
                                 "the call's message did not come within 5 s", NULL);
}

/* Copies the metadata `authorization`; NULL: there is none, "": it is too long. The first one
 * counts, and a second one is refused with it: two could mean different callers. */
static char *authorization_of(const grpc_metadata_array *md)
{
    char *value = NULL;
    for (size_t i = 0; i < md->count; i++) {
        const grpc_slice *v = &md->metadata[i].value;
        size_t n = GRPC_SLICE_LENGTH(*v);
        if (grpc_slice_str_cmp(md->metadata[i].key, "authorization") != 0) {
            continue;
        }
        bool bad = value != NULL || n > AUTHORIZATION_BYTES ||
                   memchr(GRPC_SLICE_START_PTR(*v), '\0', n) != NULL;
        free(value);
        value = bt_calloc(1, n + 1);
        if (bad) {
            return value; /* "": it has no key */
        }
        bt_copy(value, GRPC_SLICE_START_PTR(*v), n);
    }
    return value;
}

const char *bt_rpc_call_authorization(const struct bt_rpc_call *c)
{
    return c->authorization;
}

bool bt_rpc_call_has_certificate(const struct bt_rpc_call *c)
{
    return c->has_cert;
}

void bt_rpc_call_caller(const struct bt_rpc_call *c, char *text, size_t cap)
{
    if (c->has_cert) {
        snprintf(text, cap, "cert:");
        bt_tls_call_name(c->call, text + 5, cap - 5);
        return;
    }
    char *peer = grpc_call_get_peer(c->call); /* ipv4:192.0.2.7:4711 */
    const char *colon = strchr(peer, ':'), *port = strrchr(peer, ':');
    const char *at = colon != NULL && colon != port ? colon + 1 : peer;
    snprintf(text, cap, "addr:%.*s", port > at ? (int)(port - at) : (int)strlen(at), at);
    gpr_free(peer);
}

void bt_rpc_call_on_reply(struct bt_rpc_call *c, bt_rpc_replied_fn fn, void *arg)
{
    BT_ASSERT(!c->replied && c->on_reply == NULL);
    c->on_reply = fn;
    c->on_reply_arg = arg;
}

void *bt_rpc_call_watcher(const struct bt_rpc_call *c, bt_rpc_replied_fn fn)
{
    return c->on_reply == fn ? c->on_reply_arg : NULL;
}

static void start_unary(struct bt_rpc_server *srv, grpc_call *call, const struct method *m,
                        char *authorization)
{
    struct bt_rpc_call *c = call_new(srv, call);
    c->authorization = authorization;
    c->has_cert = srv->tls != NULL;
    c->fn = m->unary;
    c->arg = m->arg;
    grpc_op recv = {.op = GRPC_OP_RECV_MESSAGE};
    recv.data.recv_message.recv_message = &c->recv_bb;
    c->refs++;
    bt_timer_start(c->rpc->loop, &c->wait, REQUEST_WAIT_MS, 0, on_request_timeout, c);
    bt_rpc_batch(c->rpc, c->call, &recv, 1, &c->op_recv);
}

static void refuse(struct bt_rpc_server *srv, grpc_call *call, int code, const char *why)
{
    bt_rpc_call_reply(call_new(srv, call), code, why, NULL, 0);
}

/* Frees calls that were not answered and can no longer be. */
void bt_rpc_calls_abandon(struct bt_rpc *rpc)
{
    struct bt_list *pos, *tmp;
    bt_list_for_each_safe (pos, tmp, &rpc->orphan_calls) {
        struct bt_rpc_call *c = BT_CONTAINER_OF(pos, struct bt_rpc_call, link);
        grpc_call_cancel(c->call, NULL);
        if (!c->replied) {
            c->replied = true;
            tell_reply(c, BT_GRPC_UNAVAILABLE, "shutting down");
            call_put(c);
        }
    }
}

/* ---- accepting ---- */

static struct method *find_method(struct bt_rpc_server *srv, const char *name)
{
    struct bt_list *pos;
    bt_list_for_each (pos, &srv->methods) {
        struct method *m = BT_CONTAINER_OF(pos, struct method, link);
        if (strcmp(m->name, name) == 0) {
            return m;
        }
    }
    return NULL;
}

static void server_maybe_free(struct bt_rpc_server *srv)
{
    if (!srv->dying || !srv->shut_down || srv->n_armed > 0) {
        return;
    }
    grpc_server_destroy(srv->server);
    while (!bt_list_empty(&srv->methods)) {
        struct method *m = BT_CONTAINER_OF(srv->methods.next, struct method, link);
        bt_list_remove(&m->link);
        free(m->name);
        free(m->caller);
        free(m);
    }
    free(srv->listen);
    free(srv);
}

static void arm(struct accept *a)
{
    struct bt_rpc_server *srv = a->srv;
    grpc_call_details_init(&a->details);
    grpc_metadata_array_init(&a->md);
    a->call = NULL;
    srv->n_armed++;
    bt_rpc_op_begin(srv->rpc, &a->op);
    grpc_call_error err = grpc_server_request_call(srv->server, &a->call, &a->details, &a->md,
                                                   srv->rpc->cq, srv->rpc->cq, &a->op);
    BT_ASSERT(err == GRPC_CALL_OK);
}

static bool is_full(const struct bt_list *open)
{
    size_t n = 0;
    for (const struct bt_list *i = open->next; i != open && n < STREAMS_MAX; i = i->next) {
        n++;
    }
    return n == STREAMS_MAX;
}

static void caller_known(grpc_call *call)
{
    char *peer = grpc_call_get_peer(call);
    bt_newcomers_known(peer);
    gpr_free(peer);
}

static void on_accept(void *owner, bool success)
{
    struct accept *a = owner;
    struct bt_rpc_server *srv = a->srv;
    srv->n_armed--;
    grpc_call *call = success ? a->call : NULL;
    char *name = success ? grpc_slice_to_c_string(a->details.method) : NULL;
    char *authorization = success ? authorization_of(&a->md) : NULL;
    grpc_call_details_destroy(&a->details);
    grpc_metadata_array_destroy(&a->md);
    if (srv->dying) {
        free(authorization);
        if (call != NULL) {
            grpc_call_unref(call);
        }
        gpr_free(name);
        server_maybe_free(srv);
        return;
    }
    arm(a); /* first, so that accepting does not wait for the handler */
    if (call == NULL) {
        free(authorization);
        return;
    }
    struct method *m = find_method(srv, name);
    char why[512];
    if (m == NULL) {
        snprintf(why, sizeof(why), "method %s is not served here", name);
        refuse(srv, call, BT_GRPC_UNIMPLEMENTED, why);
    } else if (!bt_tls_may_call(srv->tls, call, name, m->caller, why, sizeof(why))) {
        refuse(srv, call, BT_GRPC_PERMISSION_DENIED, why);
    } else if (is_full(m->unary != NULL ? &srv->calls : &srv->streams)) {
        refuse(srv, call, BT_GRPC_EXHAUSTED, "too many calls and streams are open here");
    } else if (m->unary != NULL) {
        caller_known(call);
        start_unary(srv, call, m, authorization);
        authorization = NULL;
    } else {
        caller_known(call);
        struct bt_rpc_stream *s = bt_rpc_stream_new(srv->rpc, call, srv->tls, true, &srv->streams);
        bt_rpc_stream_start_server(s, m->stream, m->arg);
    }
    gpr_free(name);
    free(authorization);
}

static void on_shutdown(void *owner, bool success)
{
    struct bt_rpc_server *srv = owner;
    (void)success;
    srv->shut_down = true;
    server_maybe_free(srv);
}

/* ---- life ---- */

static grpc_server *make_server(bool bulk)
{
    grpc_arg args[] = {
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_ALLOW_REUSEPORT, .value.integer = 0},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
         .value.integer = BT_RPC_MESSAGE_MAX_BYTES},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_KEEPALIVE_TIME_MS,
         .value.integer = SRV_KEEPALIVE_MS},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
         .value.integer = SRV_KEEPALIVE_TIMEOUT_MS},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS,
         .value.integer = 1},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA,
         .value.integer = 0},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
         .value.integer = SRV_PING_INTERVAL_MIN_MS},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_MAX_CONCURRENT_STREAMS,
         .value.integer = CONNECTION_STREAMS_MAX},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
         .value.integer = HANDSHAKE_MS},
        {.type = GRPC_ARG_INTEGER, /* the last one: only for bulk servers */
         .key = (char *)GRPC_ARG_HTTP2_MAX_FRAME_SIZE,
         .value.integer = BT_RPC_BULK_FRAME_BYTES},
    };
    grpc_channel_args list = {.num_args = BT_ARRAY_LEN(args) - (bulk ? 0 : 1), .args = args};
    return grpc_server_create(&list, NULL);
}

bt_status_t bt_rpc_server_create(struct bt_rpc *rpc, const char *listen,
                                 struct bt_rpc_server **srv_p, int *port_p)
{
    struct bt_rpc_server *srv = bt_calloc(1, sizeof(*srv));
    srv->rpc = rpc;
    srv->listen = bt_strdup(listen);
    bt_list_init(&srv->methods);
    bt_list_init(&srv->streams);
    bt_list_init(&srv->calls);
    bt_rpc_op_init(&srv->op_shutdown, on_shutdown, srv);
    for (size_t i = 0; i < ACCEPTS_ARMED; i++) {
        srv->accepts[i].srv = srv;
        bt_rpc_op_init(&srv->accepts[i].op, on_accept, &srv->accepts[i]);
    }
    srv->server = make_server(rpc->bulk);
    grpc_server_register_completion_queue(srv->server, rpc->cq, NULL);
    srv->tls = rpc->tls;
    grpc_server_credentials *creds = bt_tls_server_credentials(srv->tls);
    int port = grpc_server_add_http2_port(srv->server, listen, creds);
    grpc_server_credentials_release(creds);
    bt_list_insert_tail(&rpc->servers, &srv->link);
    if (port == 0) {
        BT_ERROR("rpc_listen_failed", "listen=%s remedy=%s", listen,
                 "the address is wrong or taken: see the grpc line above");
        bt_rpc_server_end(srv, false);
        return BT_ERR_IO;
    }
    if (strncmp(listen, "unix:", 5) != 0) {
        srv->port = (uint16_t)port;
        bt_newcomers_guard(srv->port);
    }
    if (port_p != NULL) {
        *port_p = port;
    }
    *srv_p = srv;
    return BT_OK;
}

static void add_method(struct bt_rpc_server *srv, const char *name, const char *caller,
                       bt_rpc_unary_fn unary, bt_rpc_accept_fn stream, void *arg)
{
    BT_ASSERT(!srv->started && find_method(srv, name) == NULL);
    struct method *m = bt_calloc(1, sizeof(*m));
    m->name = bt_strdup(name);
    m->caller = caller != NULL ? bt_strdup(caller) : NULL;
    m->unary = unary;
    m->stream = stream;
    m->arg = arg;
    bt_list_insert_tail(&srv->methods, &m->link);
}

void bt_rpc_server_unary(struct bt_rpc_server *srv, const char *method, const char *caller,
                         bt_rpc_unary_fn fn, void *arg)
{
    add_method(srv, method, caller, fn, NULL, arg);
}

void bt_rpc_server_stream(struct bt_rpc_server *srv, const char *method, const char *caller,
                          bt_rpc_accept_fn fn, void *arg)
{
    add_method(srv, method, caller, NULL, fn, arg);
}

void bt_rpc_server_start(struct bt_rpc_server *srv)
{
    BT_ASSERT(!srv->started);
    srv->started = true;
    grpc_server_start(srv->server);
    for (size_t i = 0; i < ACCEPTS_ARMED; i++) {
        arm(&srv->accepts[i]);
    }
}

struct bt_rpc_server *bt_rpc_server_of(struct bt_list *link)
{
    return BT_CONTAINER_OF(link, struct bt_rpc_server, link);
}

void bt_rpc_server_end(struct bt_rpc_server *srv, bool notify)
{
    BT_ASSERT(!srv->dying);
    srv->dying = true;
    if (srv->port != 0) {
        bt_newcomers_unguard(srv->port);
    }
    bt_list_remove(&srv->link);
    bt_rpc_op_begin(srv->rpc, &srv->op_shutdown);
    grpc_server_shutdown_and_notify(srv->server, srv->rpc->cq, &srv->op_shutdown);
    bt_rpc_streams_abort(srv->rpc, &srv->streams, notify);
    while (!bt_list_empty(&srv->calls)) {
        struct bt_rpc_call *c = BT_CONTAINER_OF(srv->calls.next, struct bt_rpc_call, link);
        bt_list_remove(&c->link);
        bt_list_insert_tail(&srv->rpc->orphan_calls, &c->link);
        c->fn = NULL;
        grpc_call_cancel(c->call, NULL);
    }
    grpc_server_cancel_all_calls(srv->server);
}

void bt_rpc_server_destroy(struct bt_rpc_server *srv)
{
    if (srv != NULL) {
        bt_rpc_server_end(srv, true);
    }
}
