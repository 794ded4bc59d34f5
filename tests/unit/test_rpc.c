/* common/rpc through its public interface: a server and its clients in one process, on loopback,
 * one loop. Everything is driven by bt_loop_poll until a condition holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/rpc/rpc.h"
#include "tests/unit/loop_wait.h"

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
    struct side server; /* of the stream accepted last */
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

static const struct bt_rpc_stream_ops side_ops = {
    .on_message = on_message, .on_close = on_close, .on_writable = on_writable};

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
    bt_rpc_server_unary(f->srv, "/t.T/Upper", NULL, on_upper, f);
    bt_rpc_server_unary(f->srv, "/t.T/Held", NULL, on_held, f);
    bt_rpc_server_unary(f->srv, "/t.T/Size", NULL, on_size, f);
    bt_rpc_server_stream(f->srv, "/t.T/Stream", NULL, on_accept, f);
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
    assert_int_equal(bt_rpc_channel_create(f->rpc, f->target, NULL, &f->ch), BT_OK);
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
    bt_rpc_stream_close(d.s, 0, NULL, true);
    WAIT_FOR(f, f->server.closes == 1);
    assert_int_equal(f->server.code, BT_GRPC_OK);
    assert_int_equal(d.closes, 0); /* the owner closed it: no callback */
}

static void test_server_finishes(void **state)
{
    struct fixture *f = *state;
    struct side d = {0};
    open_stream(f, &d);
    WAIT_FOR(f, f->server.s != NULL);
    for (int i = 0; i < 50; i++) {
        assert_int_equal(bt_rpc_stream_send(f->server.s, "x", 1), BT_OK);
    }
    assert_true(bt_rpc_stream_queued(f->server.s) > 0);
    bt_rpc_stream_close(f->server.s, BT_GRPC_NOT_FOUND, "it is over", true);
    WAIT_FOR(f, d.closes == 1);
    assert_int_equal(d.messages, 50); /* all that was queued came before the status */
    assert_int_equal(d.code, BT_GRPC_NOT_FOUND);
    assert_string_equal(d.detail, "it is over");
    assert_int_equal(f->server.closes, 0);
}

static void test_server_drops_queue(void **state)
{
    struct fixture *f = *state;
    struct side d = {0};
    open_stream(f, &d);
    WAIT_FOR(f, f->server.s != NULL);
    char big[4096] = {0};
    for (int i = 0; i < 100; i++) {
        assert_int_equal(bt_rpc_stream_send(f->server.s, big, sizeof(big)), BT_OK);
    }
    bt_rpc_stream_close(f->server.s, BT_GRPC_EXHAUSTED, "overflow", false);
    WAIT_FOR(f, d.closes == 1);
    assert_true(d.messages < 100);
    assert_int_equal(d.code, BT_GRPC_EXHAUSTED);
    assert_string_equal(d.detail, "overflow");
}

static void test_refused_in_accept(void **state)
{
    struct fixture *f = *state;
    struct side d = {0};
    f->refuse_accept = true;
    open_stream(f, &d);
    WAIT_FOR(f, d.closes == 1);
    assert_int_equal(d.code, BT_GRPC_EXHAUSTED);
    assert_string_equal(d.detail, "no room");
}

static void test_client_cancels(void **state)
{
    struct fixture *f = *state;
    struct side d = {0};
    open_stream(f, &d);
    WAIT_FOR(f, f->server.s != NULL);
    bt_rpc_stream_close(d.s, 0, NULL, false);
    WAIT_FOR(f, f->server.closes == 1);
    assert_int_equal(f->server.code, BT_GRPC_CANCELLED);
    assert_int_equal(d.closes, 0);
}

static void test_close_inside_callbacks(void **state)
{
    struct fixture *f = *state;
    struct side d = {0}, e = {.close_on_message = true};
    f->server.close_on_message = true; /* server side, in on_message */
    open_stream(f, &d);
    assert_int_equal(bt_rpc_stream_send(d.s, "a", 1), BT_OK);
    assert_int_equal(bt_rpc_stream_send(d.s, "b", 1), BT_OK);
    WAIT_FOR(f, d.closes == 1);
    assert_int_equal(f->server.messages, 1);
    assert_int_equal(f->server.closes, 0);
    assert_int_equal(d.code, BT_GRPC_FAILED_PRECONDITION);

    memset(&f->server, 0, sizeof(f->server)); /* client side, in on_message */
    f->server.f = f;
    f->server.echo = true;
    open_stream(f, &e);
    assert_int_equal(bt_rpc_stream_send(e.s, "a", 1), BT_OK);
    WAIT_FOR(f, e.messages == 1 && f->server.closes == 1);
    assert_null(e.s);
    assert_int_equal(e.closes, 0);
}

static void test_backpressure(void **state)
{
    struct fixture *f = *state;
    struct side d = {0};
    open_stream(f, &d);
    bt_rpc_stream_set_queue_max(d.s, 64 << 10);
    char msg[1000];
    memset(msg, 'm', sizeof(msg));
    int sent = 0;
    bt_status_t st;
    while ((st = bt_rpc_stream_send(d.s, msg, sizeof(msg))) == BT_OK) {
        assert_true(++sent < 1000);
    }
    assert_int_equal(st, BT_AGAIN);
    assert_true(bt_rpc_stream_queued(d.s) <= 64 << 10);
    assert_int_equal(d.writables, 0);
    WAIT_FOR(f, d.writables == 1);
    assert_true(bt_rpc_stream_queued(d.s) < 32 << 10);
    WAIT_FOR(f, f->server.messages == sent); /* the refused one was not queued */
    assert_int_equal(f->server.bytes, (size_t)sent * sizeof(msg));
    assert_int_equal(d.writables, 1);

    /* a message larger than the bound passes through an empty queue; larger than 16 MiB never */
    char *big = calloc(1, (16 << 20) + 1);
    assert_int_equal(bt_rpc_stream_send(d.s, big, 1 << 20), BT_OK);
    assert_int_equal(bt_rpc_stream_send(d.s, big, (16 << 20) + 1), BT_ERR_TOO_LARGE);
    free(big);
    WAIT_FOR(f, f->server.messages == sent + 1);

    while (bt_rpc_stream_send(d.s, msg, sizeof(msg)) == BT_OK) {
    }
    d.close_on_writable = true;
    WAIT_FOR(f, f->server.closes == 1);
    assert_int_equal(d.writables, 2);
}

static void test_sizes(void **state)
{
    struct fixture *f = *state;
    struct reply ok = {0}, over = {0};
    char *big = calloc(1, 17 << 20);
    bt_rpc_unary(f->ch, "/t.T/Size", big, 15 << 20, 10000, on_reply, &ok);
    bt_rpc_unary(f->ch, "/t.T/Size", big, 17 << 20, 10000, on_reply, &over);
    free(big);
    WAIT_FOR(f, ok.calls == 1 && over.calls == 1);
    size_t len;
    memcpy(&len, ok.data, sizeof(len));
    assert_int_equal(ok.code, BT_GRPC_OK);
    assert_int_equal(len, 15 << 20);
    assert_int_equal(over.code, BT_GRPC_EXHAUSTED);
}

/* ---- answers that come late or never ---- */

static void test_late_answer(void **state)
{
    struct fixture *f = *state;
    struct reply r = {0}, t = {0};
    bt_rpc_unary(f->ch, "/t.T/Held", "x", 1, 5000, on_reply, &r);
    WAIT_FOR(f, f->held != NULL);
    assert_int_equal(r.calls, 0);
    bt_rpc_call_reply(f->held, BT_GRPC_OK, NULL, "later", 5);
    f->held = NULL;
    WAIT_FOR(f, r.calls == 1);
    assert_string_equal(r.data, "later");

    bt_rpc_unary(f->ch, "/t.T/Held", "x", 1, 300, on_reply, &t);
    WAIT_FOR(f, t.calls == 1 && f->held != NULL);
    assert_int_equal(t.code, BT_GRPC_DEADLINE);
    bt_rpc_call_reply(f->held, BT_GRPC_OK, NULL, "too late", 8); /* nobody listens: no harm */
    for (int i = 0; i < 5; i++) {
        bt_loop_poll(f->loop, 10);
    }
    assert_int_equal(t.calls, 1);
}

/* ---- ends ---- */

static void test_channel_destroy(void **state)
{
    struct fixture *f = *state;
    struct side d = {0};
    struct reply r = {0};
    open_stream(f, &d);
    bt_rpc_unary(f->ch, "/t.T/Held", "x", 1, 60000, on_reply, &r);
    WAIT_FOR(f, f->held != NULL && f->server.s != NULL);
    bt_rpc_channel_destroy(f->ch);
    f->ch = NULL;
    assert_int_equal(d.closes, 1); /* told before destroy returns, and never again */
    assert_int_equal(d.code, BT_GRPC_CANCELLED);
    assert_int_equal(r.calls, 1);
    assert_int_equal(r.code, BT_GRPC_CANCELLED);
    WAIT_FOR(f, f->server.closes == 1);
    assert_int_equal(f->server.code, BT_GRPC_CANCELLED);
    assert_int_equal(d.closes, 1);
    assert_int_equal(r.calls, 1);
    /* f->held is never answered: bt_rpc_destroy must free it */
}

static void test_server_destroy(void **state)
{
    struct fixture *f = *state;
    struct side d = {0};
    struct reply r = {0}, late = {0};
    open_stream(f, &d);
    bt_rpc_unary(f->ch, "/t.T/Held", "x", 1, 60000, on_reply, &r);
    WAIT_FOR(f, f->held != NULL && f->server.s != NULL);
    bt_rpc_server_destroy(f->srv);
    f->srv = NULL;
    assert_int_equal(f->server.closes, 1);
    WAIT_FOR(f, d.closes == 1 && r.calls == 1);
    assert_int_equal(d.code, BT_GRPC_UNAVAILABLE);
    assert_int_not_equal(r.code, BT_GRPC_OK);
    bt_rpc_call_reply(f->held, BT_GRPC_OK, NULL, "x", 1); /* allowed still */
    bt_rpc_unary(f->ch, "/t.T/Upper", "x", 1, 5000, on_reply, &late);
    WAIT_FOR(f, late.calls == 1);
    assert_int_equal(late.code, BT_GRPC_UNAVAILABLE);
}

/* bt_rpc_destroy with everything open: no callback, no leak (the sanitizer build looks). */
static void test_destroy_with_all_open(void **state)
{
    struct fixture *f = *state;
    struct side d = {0}, e = {0};
    struct reply r = {0};
    struct bt_rpc_server *unstarted;
    char msg[1000] = {0};
    assert_int_equal(bt_rpc_server_create(f->rpc, "127.0.0.1:0", &unstarted, NULL), BT_OK);
    open_stream(f, &d);
    open_stream(f, &e);
    bt_rpc_unary(f->ch, "/t.T/Held", "x", 1, 60000, on_reply, &r);
    WAIT_FOR(f, f->held != NULL && f->accepts == 2);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(bt_rpc_stream_send(d.s, msg, sizeof(msg)), BT_OK);
        assert_int_equal(bt_rpc_stream_send(f->server.s, msg, sizeof(msg)), BT_OK);
    }
    bt_rpc_stream_close(e.s, 0, NULL, true); /* lingers */
    int closes = f->server.closes, messages = f->server.messages;
    bt_rpc_destroy(f->rpc);
    assert_int_equal(d.closes + r.calls + d.messages, 0);
    assert_int_equal(f->server.closes, closes);
    assert_int_equal(f->server.messages, messages);
    f->ch = NULL; /* went with it */
    f->srv = NULL;
    assert_int_equal(bt_rpc_create(f->loop, &f->rpc), BT_OK); /* for teardown; and it works again */
    start_server(f, "127.0.0.1:0");
    assert_int_equal(bt_rpc_channel_create(f->rpc, f->target, NULL, &f->ch), BT_OK);
    struct reply again = {0};
    bt_rpc_unary(f->ch, "/t.T/Upper", "x", 1, 5000, on_reply, &again);
    WAIT_FOR(f, again.calls == 1);
    assert_int_equal(again.code, BT_GRPC_OK);
}

/* ---- addresses ---- */

static void test_port_taken(void **state)
{
    struct fixture *f = *state;
    struct bt_rpc_server *other = NULL;
    int port = -1;
    assert_int_equal(bt_rpc_server_create(f->rpc, f->target, &other, &port), BT_ERR_IO);
    assert_null(other);
    assert_int_equal(port, -1);
    struct bt_rpc_channel *ch = NULL;
    assert_int_equal(bt_rpc_channel_create(f->rpc, "", NULL, &ch), BT_ERR_INVALID);
    assert_null(ch);
}

static void test_unix_socket(void **state)
{
    struct fixture *f = *state;
    char dir[] = "/tmp/baton-test-XXXXXX", addr[64];
    struct bt_rpc_server *tcp = f->srv;
    struct bt_rpc_channel *ch;
    struct reply r = {0};
    assert_non_null(mkdtemp(dir));
    snprintf(addr, sizeof(addr), "unix:%s/s", dir);
    start_server(f, addr);
    assert_int_equal(bt_rpc_channel_create(f->rpc, addr, NULL, &ch), BT_OK);
    bt_rpc_unary(ch, "/t.T/Upper", "u", 1, 5000, on_reply, &r);
    WAIT_FOR(f, r.calls == 1);
    assert_string_equal(r.data, "U");
    bt_rpc_channel_destroy(ch);
    bt_rpc_server_destroy(f->srv);
    f->srv = tcp;
    unlink(addr + 5);
    rmdir(dir);
}

/* ---- a peer in another process ---- */

extern char **environ;

/* `test_rpc --serve ADDR`: an echo server until killed; prints its port. */
static int serve(const char *listen)
{
    struct fixture f = {.server = {.echo = true}};
    f.server.f = &f;
    if (bt_loop_create(&f.loop) != BT_OK || bt_rpc_create(f.loop, &f.rpc) != BT_OK) {
        return 1;
    }
    if (bt_rpc_server_create(f.rpc, listen, &f.srv, &f.port) != BT_OK) {
        return 1;
    }
    bt_rpc_server_unary(f.srv, "/t.T/Upper", NULL, on_upper, &f);
    bt_rpc_server_stream(f.srv, "/t.T/Stream", NULL, on_accept, &f);
    bt_rpc_server_start(f.srv);
    printf("%d\n", f.port);
    fflush(stdout);
    bt_loop_run(f.loop);
    return 0;
}

static pid_t spawn_server(const char *listen, int *port_p)
{
    int fds[2];
    pid_t pid;
    posix_spawn_file_actions_t fa;
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, fds[1], STDOUT_FILENO);
    char *argv[] = {"test_rpc", "--serve", (char *)listen, NULL};
    assert_int_equal(posix_spawn(&pid, "/proc/self/exe", &fa, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&fa);
    close(fds[1]);
    char buf[16] = {0};
    assert_true(read(fds[0], buf, sizeof(buf) - 1) > 0);
    close(fds[0]);
    *port_p = atoi(buf);
    return pid;
}

static void end_server(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static void test_peer_killed_and_back(void **state)
{
    struct fixture *f = *state;
    struct side d = {.f = f}, w = {.f = f};
    struct bt_rpc_channel *ch;
    struct reply r = {0};
    char target[64];
    int port;
    pid_t pid = spawn_server("127.0.0.1:0", &port);
    snprintf(target, sizeof(target), "127.0.0.1:%d", port);
    assert_int_equal(bt_rpc_channel_create(f->rpc, target, NULL, &ch), BT_OK);
    assert_int_equal(bt_rpc_stream_open(ch, "/t.T/Stream", false, &side_ops, &d, &d.s), BT_OK);
    struct bt_rpc_stream *s = d.s;
    assert_int_equal(bt_rpc_stream_send(s, "x", 1), BT_OK);
    WAIT_FOR(f, d.messages == 1);
    end_server(pid);
    WAIT_FOR(f, d.closes == 1);
    assert_int_equal(d.code, BT_GRPC_UNAVAILABLE);

    /* nobody there: calls fail at once, a stream that waits for the peer waits. The channel hears
     * of its peer's end after the stream does; what is opened before that goes down with it as
     * well. */
    do {
        r = (struct reply){0};
        bt_rpc_unary(ch, "/t.T/Upper", "x", 1, 30000, on_reply, &r);
        WAIT_FOR(f, r.calls == 1);
        assert_int_equal(r.code, BT_GRPC_UNAVAILABLE);
    } while (strcasestr(r.detail, "failed to connect") == NULL);
    assert_int_equal(bt_rpc_stream_open(ch, "/t.T/Stream", true, &side_ops, &w, &w.s), BT_OK);
    assert_int_equal(bt_rpc_stream_send(w.s, "y", 1), BT_OK);
    for (int i = 0; i < 10; i++) {
        bt_loop_poll(f->loop, 10);
    }
    assert_int_equal(w.closes, 0);
    pid = spawn_server(target, &port);
    WAIT_FOR(f, w.messages == 1);
    assert_int_equal(w.closes, 0);
    bt_rpc_channel_destroy(ch);
    end_server(pid);
}

/* ---- many ---- */

static int count_fds(void)
{
    int n = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir) != NULL) {
        n++;
    }
    closedir(dir);
    return n;
}

static void test_thousand_streams(void **state)
{
    struct fixture *f = *state;
    static struct side d[50];
    int fds = 0;
    f->server.echo = true;
    for (int round = 0; round < 20; round++) {
        memset(d, 0, sizeof(d));
        f->server.closes = 0;
        for (int i = 0; i < 50; i++) {
            open_stream(f, &d[i]);
            assert_int_equal(bt_rpc_stream_send(d[i].s, "ping", 4), BT_OK);
        }
        for (int i = 0; i < 50; i++) {
            WAIT_FOR(f, d[i].messages == 1);
            bt_rpc_stream_close(d[i].s, 0, NULL, i % 2 == 0);
        }
        WAIT_FOR(f, f->server.closes == 50);
        if (round == 0) {
            fds = count_fds();
        }
    }
    assert_int_equal(f->accepts, 1000);
    assert_int_equal(count_fds(), fds);
}

/* ---- the blocking client ---- */

struct blocking {
    const char *target, *method;
    int code;
    char *reply;
    size_t len;
    char detail[128];
    _Atomic bool done;
};

static void *blocking_thread(void *arg)
{
    struct blocking *b = arg;
    struct bt_rpc_question q = {
        .target = b->target, .method = b->method, .data = "hey", .len = 3, .deadline_ms = 5000};
    b->code = bt_rpc_unary_blocking(&q, (void **)&b->reply, &b->len, b->detail, sizeof(b->detail));
    b->done = true;
    return NULL;
}

static void test_blocking(void **state)
{
    struct fixture *f = *state;
    struct blocking b = {.target = f->target, .method = "/t.T/Upper"};
    struct blocking no = {.target = f->target, .method = "/t.T/Nope"};
    struct blocking down = {.target = "127.0.0.1:1", .method = "/t.T/Upper"};
    struct blocking *all[] = {&b, &no, &down};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        pthread_t t;
        assert_int_equal(pthread_create(&t, NULL, blocking_thread, all[i]), 0);
        WAIT_FOR(f, all[i]->done);
        pthread_join(t, NULL);
    }
    assert_int_equal(b.code, BT_GRPC_OK);
    assert_int_equal(b.len, 3);
    assert_string_equal(b.reply, "HEY");
    free(b.reply);
    assert_int_equal(no.code, BT_GRPC_UNIMPLEMENTED);
    assert_null(no.reply);
    assert_int_equal(down.code, BT_GRPC_UNAVAILABLE);
    assert_true(down.detail[0] != '\0');
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--serve") == 0) {
        return serve(argv[2]);
    }
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_unary),
        T(test_unary_empty_message),
        T(test_unknown_method),
        T(test_stream_both_ways),
        T(test_server_finishes),
        T(test_server_drops_queue),
        T(test_refused_in_accept),
        T(test_client_cancels),
        T(test_close_inside_callbacks),
        T(test_backpressure),
        T(test_sizes),
        T(test_late_answer),
        T(test_channel_destroy),
        T(test_server_destroy),
        T(test_destroy_with_all_open),
        T(test_port_taken),
        T(test_unix_socket),
        T(test_peer_killed_and_back),
        T(test_thousand_streams),
        T(test_blocking),
    };
    return cmocka_run_group_tests_name("rpc", tests, NULL, NULL);
}
