/* Fixture of the HTTP server's unit tests: the server over real sockets and a handler that holds,
 * echoes or streams by path. One thread: the test drives the loop and talks to it through
 * non-blocking sockets. */
#ifndef TESTS_HTTP_FIXTURE_H
#define TESTS_HTTP_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/base.h"
#include "common/base/buf.h"
#include "common/http/http.h"
#include "common/http/http_priv.h"
#include "common/http/status_page.h"
#include "common/loop/loop.h"
#include "tests/unit/virtual_clock.h"

/* What stands behind the '?' of the path, raw; "" without. No route of the daemons reads it. */
static inline const char *query_of(const struct bt_http_req *r)
{
    return r->parser.head.data + r->parser.query;
}

#define PATIENCE_MS 60000 /* of the machine's time: only a hang takes so long */

static struct bt_loop *loop;
static struct bt_http *http;
static int port;

/* what the handler saw and holds */
static struct bt_http_req *held[2048];
static int n_held, n_gone, n_requests;

static void on_gone(void *arg)
{
    struct bt_http_req **slot = arg;
    assert_non_null(*slot);
    *slot = NULL;
    n_gone++;
}

static void handler(void *arg, struct bt_http_req *req)
{
    (void)arg;
    const char *path = bt_http_path(req);
    size_t len;
    const void *body = bt_http_body(req, &len);
    n_requests++;
    if (strcmp(path, "/hold") == 0) {
        assert_true(n_held < (int)BT_ARRAY_LEN(held));
        held[n_held] = req;
        bt_http_on_gone(req, on_gone, &held[n_held]);
        n_held++;
    } else if (strcmp(path, "/echo") == 0) {
        bt_http_add_header(req, "X-Got", query_of(req));
        bt_http_respond(req, 200, "text/plain", body, len);
    } else if (strcmp(path, "/stream") == 0) {
        bt_http_start(req, 200, "text/event-stream");
        bt_http_write(req, "one\n", 4);
        bt_http_write(req, "", 0);
        bt_http_write(req, "three\n", 6);
        bt_http_end(req);
    } else {
        bt_http_respond(req, 404, "text/plain", "no", 2);
    }
}

static inline void open_with(const struct bt_http_options *o)
{
    n_held = n_gone = n_requests = 0;
    memset(held, 0, sizeof(held));
    clock_skip_stalls();
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    assert_int_equal(bt_http_create(loop, o, handler, NULL, &http, &port), BT_OK);
    assert_true(port > 0);
}

static inline void open_server(uint32_t header_ms, uint32_t body_ms, uint32_t idle_ms,
                               uint32_t conns_max, size_t out_max)
{
    struct bt_http_options o;
    bt_http_options_default(&o);
    o.listen = "127.0.0.1:0";
    o.header_timeout_ms = header_ms > 0 ? header_ms : o.header_timeout_ms;
    o.body_timeout_ms = body_ms > 0 ? body_ms : o.body_timeout_ms;
    o.idle_timeout_ms = idle_ms > 0 ? idle_ms : o.idle_timeout_ms;
    o.conns_max = conns_max > 0 ? conns_max : o.conns_max;
    o.out_max = out_max > 0 ? out_max : o.out_max;
    open_with(&o);
}

static inline int setup(void **state)
{
    (void)state;
    open_server(0, 0, 0, 0, 0);
    return 0;
}

static inline int teardown(void **state)
{
    (void)state;
    clock_go_on();
    bt_http_destroy(http); /* NULL: it was destroyed by the test */
    bt_loop_destroy(loop);
    for (int i = 0; i < n_held; i++) {
        assert_null(held[i]); /* every request was ended or reported gone */
    }
    return 0;
}

static inline int dial_port(int to)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)to),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    return fd;
}

static inline int dial(void)
{
    return dial_port(port);
}

static inline void turn(int ms)
{
    bt_loop_poll(loop, ms);
}

/* Turns of the loop in which no time passes: all that has been sent to it is read. */
static inline void turns(int n)
{
    for (int i = 0; i < n; i++) {
        turn(0);
    }
}

/* Of a clock that stands: so much time passes in steps, and each is acted upon. */
static inline void pass(uint64_t ms)
{
    for (uint64_t step; ms > 0; ms -= step) {
        step = BT_MIN(ms, (uint64_t)10);
        clock_jump(step);
        turns(4);
    }
}

/* Sends all, turning the loop meanwhile. */
static inline void put(int fd, const char *data, size_t len)
{
    uint64_t until = clock_machine_ns() + PATIENCE_MS * 1000000ull;
    while (len > 0) {
        ssize_t n = send(fd, data, len, MSG_NOSIGNAL);
        if (n > 0) {
            data += n;
            len -= (size_t)n;
            continue;
        }
        if (errno != EAGAIN) {
            return; /* the server has closed: the caller looks at the answer */
        }
        assert_true(clock_machine_ns() < until);
        turn(1);
    }
}

static inline void puts_to(int fd, const char *text)
{
    put(fd, text, strlen(text));
}

/* Reads until `what` has come (NULL: until the server closes); the text is in a static buffer. */
static inline const char *get(int fd, const char *what)
{
    static char text[8 * 1024 * 1024];
    size_t len = 0;
    uint64_t until = clock_machine_ns() + PATIENCE_MS * 1000000ull;
    text[0] = '\0';
    for (;;) {
        ssize_t n = recv(fd, text + len, sizeof(text) - 1 - len, 0);
        if (n > 0) {
            len += (size_t)n;
            text[len] = '\0';
        } else if (n == 0 || errno == ECONNRESET) {
            if (what != NULL && strstr(text, what) == NULL) {
                fail_msg("closed before \"%s\": \"%s\"", what, text);
            }
            return text;
        }
        if (what != NULL && strstr(text, what) != NULL) {
            return text;
        }
        if (clock_machine_ns() > until) {
            fail_msg("waited in vain for %s, got \"%s\"", what != NULL ? what : "the end", text);
        }
        if (n < 0) {
            turn(1);
        }
    }
}

#define WAIT_FOR(cond)                                                                             \
    do {                                                                                           \
        uint64_t until_ = clock_machine_ns() + PATIENCE_MS * 1000000ull;                           \
        while (!(cond)) {                                                                          \
            assert_true(clock_machine_ns() < until_);                                              \
            turn(1);                                                                               \
        }                                                                                          \
    } while (0)

static inline void expect_status(const char *answer, int status)
{
    char line[32];
    snprintf(line, sizeof(line), "HTTP/1.1 %d ", status);
    if (strncmp(answer, line, strlen(line)) != 0) {
        fail_msg("want %d, got \"%s\"", status, answer);
    }
}

#endif
