/* An etcd that says what a test tells it, for answers that a real one gives when it is ill or busy:
 * up to two endpoints of one client. Include after cmocka.h. */
#ifndef BT_TESTS_ETCD_ANSWERS_H
#define BT_TESTS_ETCD_ANSWERS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/etcd/etcd.h"
#include "common/log/log.h"
#include "common/rpc/pb.h"
#include "etcd.pb-c.h"
#include "loop_wait.h"

enum { EA_RANGE, EA_PUT, EA_DELETE, EA_TXN, EA_GRANT, EA_REVOKE, EA_TIME, EA_METHODS };

static const char *const ea_methods[EA_METHODS] = {"/etcdserverpb.KV/Range",
                                                   "/etcdserverpb.KV/Put",
                                                   "/etcdserverpb.KV/DeleteRange",
                                                   "/etcdserverpb.KV/Txn",
                                                   "/etcdserverpb.Lease/LeaseGrant",
                                                   "/etcdserverpb.Lease/LeaseRevoke",
                                                   "/etcdserverpb.Lease/LeaseTimeToLive"};

struct ea_stream {
    struct bt_rpc_stream *s; /* NULL: none */
    uint32_t opened, heard;
    uint8_t last[256]; /* the last message */
    size_t len;
};

struct ea_end { /* one endpoint */
    struct bt_rpc_server *server;
    char target[64];
    struct ea_method {
        struct ea_end *of;
        struct bt_rpc_call *calls[32]; /* not answered yet, oldest first */
        uint32_t n_calls, n_seen;
        uint8_t last[512]; /* the last request */
        size_t len;
    } methods[EA_METHODS];
    struct ea_stream watch, alive;
};

static struct {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
    struct bt_etcd *e;
    struct ea_end ends[2];
} EA;

static inline void ea_on_call(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct ea_method *m = arg;
    assert_true(m->n_calls < BT_ARRAY_LEN(m->calls) && len <= sizeof(m->last));
    m->calls[m->n_calls++] = call;
    m->n_seen++;
    m->len = len;
    memcpy(m->last, data, len);
}

static inline void ea_on_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct ea_stream *x = arg;
    (void)s;
    x->heard++;
    x->len = BT_MIN(len, sizeof(x->last));
    memcpy(x->last, data, x->len);
}

static inline void ea_on_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    struct ea_stream *x = arg;
    (void)code;
    (void)detail;
    x->s = x->s == s ? NULL : x->s;
}

static inline void ea_accept(void *arg, struct bt_rpc_stream *s)
{
    static const struct bt_rpc_stream_ops ops = {.on_message = ea_on_message,
                                                 .on_close = ea_on_close};
    struct ea_stream *x = arg;
    x->s = s;
    x->opened++;
    bt_rpc_stream_set_arg(s, &ops, x);
}

static inline void ea_end_start(struct ea_end *x)
{
    int port;
    assert_int_equal(bt_rpc_server_create(EA.rpc, "127.0.0.1:0", &x->server, &port), BT_OK);
    snprintf(x->target, sizeof(x->target), "127.0.0.1:%d", port);
    for (uint32_t i = 0; i < EA_METHODS; i++) {
        x->methods[i].of = x;
        bt_rpc_server_unary(x->server, ea_methods[i], NULL, ea_on_call, &x->methods[i]);
    }
    bt_rpc_server_stream(x->server, "/etcdserverpb.Watch/Watch", NULL, ea_accept, &x->watch);
    bt_rpc_server_stream(x->server, "/etcdserverpb.Lease/LeaseKeepAlive", NULL, ea_accept,
                         &x->alive);
    bt_rpc_server_start(x->server);
}

static inline void ea_open(uint32_t n)
{
    char *endpoints[3] = {NULL};
    memset(&EA, 0, sizeof(EA));
    bt_log_init("test", "etcd", BT_LOG_ERROR, false);
    assert_int_equal(bt_loop_create(&EA.loop), BT_OK);
    assert_int_equal(bt_rpc_create(EA.loop, &EA.rpc), BT_OK);
    for (uint32_t i = 0; i < n; i++) {
        ea_end_start(&EA.ends[i]);
        endpoints[i] = EA.ends[i].target;
    }
    assert_int_equal(bt_etcd_create(EA.rpc, endpoints, NULL, &EA.e), BT_OK);
}

/* The oldest call of the method, when it comes. */
static inline struct bt_rpc_call *ea_call(uint32_t end, uint32_t method)
{
    struct ea_method *m = &EA.ends[end].methods[method];
    LOOP_UNTIL(EA.loop, m->n_calls > 0);
    struct bt_rpc_call *c = m->calls[0];
    memmove(m->calls, m->calls + 1, --m->n_calls * sizeof(m->calls[0]));
    return c;
}

static inline void ea_reply(uint32_t end, uint32_t method, const void *msg)
{
    bt_rpc_call_reply_pb(ea_call(end, method), msg);
}

static inline void ea_refuse(uint32_t end, uint32_t method, int code)
{
    bt_rpc_call_reply(ea_call(end, method), code, "scripted", NULL, 0);
}

static inline void ea_garbage(uint32_t end, uint32_t method)
{
    bt_rpc_call_reply(ea_call(end, method), BT_GRPC_OK, "", "\xff\xff\xff", 3);
}

static inline void ea_send(struct ea_stream *x, const void *msg)
{
    assert_non_null(x->s);
    assert_int_equal(bt_rpc_stream_send_pb(x->s, msg), BT_OK);
}

/* Answers what may be left: a lease that is stopped is revoked. */
static inline void ea_close(void)
{
    for (uint32_t i = 0; i < 2; i++) {
        if (EA.ends[i].server != NULL) {
            bt_rpc_server_destroy(EA.ends[i].server);
        }
    }
    bt_etcd_destroy(EA.e);
    bt_rpc_destroy(EA.rpc);
    bt_loop_poll(EA.loop, 0);
    bt_loop_destroy(EA.loop);
}

static inline int ea_one(void **state)
{
    (void)state;
    ea_open(1);
    return 0;
}

static inline int ea_two(void **state)
{
    (void)state;
    ea_open(2);
    return 0;
}

static inline int ea_stop(void **state)
{
    (void)state;
    ea_close();
    return 0;
}

#define UNTIL(cond) LOOP_UNTIL(EA.loop, cond)

static inline Etcdserverpb__ResponseHeader header_of(int64_t revision)
{
    Etcdserverpb__ResponseHeader h = ETCDSERVERPB__RESPONSE_HEADER__INIT;
    h.revision = revision;
    h.raft_term = 7;
    return h;
}

static inline Etcdserverpb__KeyValue kv_of(const char *key, const char *value, int64_t revision)
{
    Etcdserverpb__KeyValue kv = ETCDSERVERPB__KEY_VALUE__INIT;
    kv.key = (ProtobufCBinaryData){strlen(key), (uint8_t *)(uintptr_t)key};
    kv.value = (ProtobufCBinaryData){strlen(value), (uint8_t *)(uintptr_t)value};
    kv.mod_revision = revision;
    kv.lease = 99;
    return kv;
}

struct ea_got {
    uint32_t n;
    bt_status_t st;
    bool succeeded, has_current;
    size_t n_kvs;
    char keys[4][20], value[20];
    int64_t revision, lease;
    uint64_t term, left_s, granted_s;
};

static inline void ea_on_put(void *arg, bt_status_t st)
{
    struct ea_got *g = arg;
    g->n++;
    g->st = st;
}

#endif
