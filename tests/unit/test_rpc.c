/* common/rpc through its public interface: a server and its clients in one process, on loopback,
 * one loop. Everything is driven by bt_loop_poll until a condition holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/rpc/rpc.h"

#define WAIT_MS 10000

/* ---- fixture: an echo server, and an event counter on each side ---- */

struct side {
    struct bt_rpc_stream *s; /* NULL: closed */
    int messages, closes, writables, code;
    size_t bytes;
    char last[128];
    char detail[128];
    struct fixture *f;
    /* what the callback shall do */
    bool echo, close_on_message, close_on_writable;
};

struct fixture {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
    struct bt_rpc_server *srv;
    struct bt_rpc_channel *ch;
    char target[64];
    int port, accepts;
    struct side server;      /* of the stream accepted last */
    bool server_sides_count; /* all accepted streams report to `server` */
    bool refuse_accept;
    struct bt_rpc_call *held; /* the call to Held that waits for its answer */
    bool bad;
};

static void on_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct side *d = arg;
    d->messages++;
    d->bytes += len;
    snprintf(d->last, sizeof(d->last), "%.*s", (int)BT_MIN(len, 100u), (const char *)data);
    if (d->echo && bt_rpc_stream_send(s, data, len) != BT_OK) {
        d->f->bad = true;
    }
    if (d->close_on_message) {
        d->s = NULL;
        bt_rpc_stream_close(s, BT_GRPC_FAILED_PRECONDITION, "seen enough", true);
    }
}

static void on_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    struct side *d = arg;
    (void)s;
    d->closes++;
    d->code = code;
    snprintf(d->detail, sizeof(d->detail), "%s", detail);
    d->s = NULL;
}

static void on_writable(void *arg, struct bt_rpc_stream *s)
{
    struct side *d = arg;
    d->writables++;
    if (d->close_on_writable) {
        d->s = NULL;
        bt_rpc_stream_close(s, BT_GRPC_OK, "", false);
    }
}

static const struct bt_rpc_stream_ops side_ops = {on_message, on_close, on_writable};

static void on_accept(void *arg, struct bt_rpc_stream *s)
{
    struct fixture *f = arg;
    f->accepts++;
    if (f->refuse_accept) {
        bt_rpc_stream_close(s, BT_GRPC_EXHAUSTED, "no room", true);
        return;
    }
    f->server.s = s;
    bt_rpc_stream_set_arg(s, &side_ops, &f->server);
}

static void on_upper(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    (void)arg;
    char buf[256];
    size_t n = BT_MIN(len, sizeof(buf));
    for (size_t i = 0; i < n; i++) {
        char c = ((const char *)data)[i];
        buf[i] = (char)(c >= 'a' && c <= 'z' ? c - 32 : c);
    }
    if (n > 0 && buf[0] == '!') {
        bt_rpc_call_reply(call, BT_GRPC_NOT_FOUND, "no such thing", NULL, 0);
    } else {
        bt_rpc_call_reply(call, BT_GRPC_OK, NULL, buf, n);
    }
}

static void on_held(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct fixture *f = arg;
    (void)data;
    (void)len;
    f->held = call;
}

static void on_size(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    (void)arg;
    (void)data;
    bt_rpc_call_reply(call, BT_GRPC_OK, NULL, &len, sizeof(len));
}

static void start_server(struct fixture *f, const char *listen)
{
    assert_int_equal(bt_rpc_server_create(f->rpc, listen, &f->srv, &f->port), BT_OK);
    bt_rpc_server_unary(f->srv, "/t.T/Upper", on_upper, f);
    bt_rpc_server_unary(f->srv, "/t.T/Held", on_held, f);
    bt_rpc_server_unary(f->srv, "/t.T/Size", on_size, f);
    bt_rpc_server_stream(f->srv, "/t.T/Stream", on_accept, f);
    bt_rpc_server_start(f->srv);
    snprintf(f->target, sizeof(f->target), "127.0.0.1:%d", f->port);
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    f->server.f = f;
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    assert_int_equal(bt_rpc_create(f->loop, &f->rpc), BT_OK);
    start_server(f, "127.0.0.1:0");
    assert_true(f->port > 0);
    assert_int_equal(bt_rpc_channel_create(f->rpc, f->target, &f->ch), BT_OK);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    assert_false(f->bad);
    bt_rpc_channel_destroy(f->ch);
    bt_rpc_server_destroy(f->srv);
    bt_rpc_destroy(f->rpc);
    bt_loop_destroy(f->loop);
    free(f);
    return 0;
}

#define WAIT_FOR(f, cond)                                                                          \
    do {                                                                                           \
        uint64_t end_ = bt_mono_ns() + WAIT_MS * 1000000ull;                                       \
        while (!(cond) && bt_mono_ns() < end_) {                                                   \
            bt_loop_poll((f)->loop, 20);                                                           \
        }                                                                                          \
        assert_true(cond);                                                                         \
    } while (0)

struct reply {
    int calls, code;
    size_t len;
    char data[256], detail[256];
};

static void on_reply(void *arg, int code, const char *detail, const void *data, size_t len)
{
    struct reply *r = arg;
    r->calls++;
    r->code = code;
    r->len = len;
    memcpy(r->data, data, BT_MIN(len, sizeof(r->data) - 1));
    snprintf(r->detail, sizeof(r->detail), "%s", detail);
}

static void open_stream(struct fixture *f, struct side *d)
{
    d->f = f;
    assert_int_equal(bt_rpc_stream_open(f->ch, "/t.T/Stream", false, &side_ops, d, &d->s), BT_OK);
}

/* ---- unary ---- */

static void test_unary(void **state)
{
    struct fixture *f = *state;
    struct reply r = {0}, e = {0};
    bt_rpc_unary(f->ch, "/t.T/Upper", "hello", 5, 5000, on_reply, &r);
    bt_rpc_unary(f->ch, "/t.T/Upper", "!x", 2, 5000, on_reply, &e);
    WAIT_FOR(f, r.calls == 1 && e.calls == 1);
    assert_int_equal(r.code, BT_GRPC_OK);
    assert_string_equal(r.data, "HELLO");
    assert_int_equal(e.code, BT_GRPC_NOT_FOUND);
    assert_string_equal(e.detail, "no such thing");
}

static void test_unary_empty_message(void **state)
{
    struct fixture *f = *state;
    struct reply r = {0};
    bt_rpc_unary(f->ch, "/t.T/Upper", NULL, 0, 5000, on_reply, &r);
    WAIT_FOR(f, r.calls == 1);
    assert_int_equal(r.code, BT_GRPC_OK);
    assert_int_equal(r.len, 0);
}

/* gRPC C core leaves such calls hanging when nobody asks for them. */
static void test_unknown_method(void **state)
{
    struct fixture *f = *state;
    struct reply r = {0};
    struct side d = {.f = f};
    bt_rpc_unary(f->ch, "/t.T/Nope", "x", 1, 5000, on_reply, &r);
    assert_int_equal(bt_rpc_stream_open(f->ch, "/t.T/NopeS", false, &side_ops, &d, &d.s), BT_OK);
    WAIT_FOR(f, r.calls == 1 && d.closes == 1);
    assert_int_equal(r.code, BT_GRPC_UNIMPLEMENTED);
    assert_non_null(strstr(r.detail, "/t.T/Nope"));
    assert_int_equal(d.code, BT_GRPC_UNIMPLEMENTED);
}

/* ---- streams ---- */

static void test_stream_both_ways(void **state)
{
    struct fixture *f = *state;
    struct side d = {0};
    f->server.echo = true;
    open_stream(f, &d);
    char msg[32];
    for (int i = 0; i < 200; i++) {
        snprintf(msg, sizeof(msg), "message %d", i);
        assert_int_equal(bt_rpc_stream_send(d.s, msg, strlen(msg)), BT_OK);
    }
    WAIT_FOR(f, d.messages == 200);
    assert_string_equal(d.last, "message 199"); /* in order: the last is the last */
    assert_non_null(strstr(bt_rpc_stream_peer(d.s), "127.0.0.1"));
    assert_non_null(strstr(bt_rpc_stream_peer(f->server.s), "127.0.0.1"));
    bt_rpc_stream_close(d.s, 0, NULL, true);
    WAIT_FOR(f, f->server.closes == 1);
    assert_int_equal(f->server.code, BT_GRPC_OK);
    assert_int_equal(d.closes, 0); /* the owner closed it: no callback */
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_unary),
        T(test_unary_empty_message),
        T(test_unknown_method),
        T(test_stream_both_ways),
    };
    return cmocka_run_group_tests_name("rpc", tests, NULL, NULL);
}
