/* The HTTP server: answers, pipelining, streams, refusals, many connections, drain, the status
 * page. Deadlines and clients that leave: test_http_clients.c. Fixture: http_fixture.h. */
#include "tests/unit/http_fixture.h"

#include <jansson.h>

/* ---- answers ---- */

static void test_keep_alive_and_head(void **state)
{
    (void)state;
    int fd = dial();
    for (int i = 0; i < 3; i++) {
        puts_to(fd, "POST /echo?a=%20 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello");
        const char *a = get(fd, "hello");
        expect_status(a, 200);
        assert_non_null(strstr(a, "X-Got: a=%20\r\n"));
        assert_non_null(strstr(a, "Content-Length: 5\r\n"));
        assert_non_null(strstr(a, "\r\nDate: "));
        assert_null(strstr(a, "Connection: close"));
    }
    puts_to(fd, "HEAD /none HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    const char *a = get(fd, NULL);
    expect_status(a, 404);
    assert_non_null(strstr(a, "Content-Length: 2\r\n"));
    assert_non_null(strstr(a, "Connection: close\r\n"));
    assert_string_equal(strstr(a, "\r\n\r\n"), "\r\n\r\n"); /* no body */
    close(fd);
    WAIT_FOR(bt_http_conns(http) == 0);
}

static void test_stream(void **state)
{
    (void)state;
    int fd = dial();
    puts_to(fd, "GET /stream HTTP/1.1\r\nHost: a\r\n\r\n");
    const char *a = get(fd, "0\r\n\r\n");
    assert_non_null(strstr(a, "Transfer-Encoding: chunked\r\n"));
    assert_non_null(strstr(a, "Content-Type: text/event-stream\r\n"));
    assert_string_equal(strstr(a, "\r\n\r\n"), "\r\n\r\n4\r\none\n\r\n6\r\nthree\n\r\n0\r\n\r\n");
    /* the connection lives on */
    puts_to(fd, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(fd, "no"), 404);
    close(fd);
    /* HTTP/1.0: no chunks, the end of the stream is the end of the connection */
    fd = dial();
    puts_to(fd, "GET /stream HTTP/1.0\r\n\r\n");
    a = get(fd, NULL);
    assert_null(strstr(a, "chunked"));
    assert_string_equal(strstr(a, "\r\n\r\n"), "\r\n\r\none\nthree\n");
    close(fd);
    /* HEAD of a stream: fields only */
    fd = dial();
    puts_to(fd, "HEAD /stream HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    assert_string_equal(strstr(get(fd, NULL), "\r\n\r\n"), "\r\n\r\n");
    close(fd);
}

static void test_pipelining(void **state)
{
    (void)state;
    struct bt_buf b;
    bt_buf_init(&b);
    for (int i = 0; i < 2000; i++) {
        bt_buf_printf(&b, "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\n%06d", i);
    }
    bt_buf_puts(&b, "GET /end HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    int fd = dial();
    put(fd, b.data, b.len);
    const char *a = get(fd, NULL);
    for (int i = 0; i < 2000; i++) { /* all, and in order */
        char want[32];
        snprintf(want, sizeof(want), "\r\n\r\n%06d", i);
        a = strstr(a, want);
        assert_non_null(a);
    }
    assert_int_equal(n_requests, 2001);
    bt_buf_cleanup(&b);
    close(fd);
}

/* A request sent ahead waits until the one before it is answered, and then is served. */
static void test_pipelined_behind_a_held_one(void **state)
{
    (void)state;
    int fd = dial();
    puts_to(fd, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\nGET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    turn(20);
    assert_int_equal(n_requests, 1);
    struct bt_http_req *r = held[0];
    held[0] = NULL;
    bt_http_respond(r, 200, "text/plain", "first", 5);
    const char *a = get(fd, "\r\n\r\nno");
    assert_non_null(strstr(a, "first"));
    assert_int_equal(n_requests, 2);
    close(fd);
}

static void test_expect_continue(void **state)
{
    (void)state;
    int fd = dial();
    puts_to(fd, "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
                "Expect: 100-continue\r\n\r\n");
    assert_string_equal(get(fd, "\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
    puts_to(fd, "hello");
    expect_status(get(fd, "hello"), 200);
    /* no 100 where the body would be refused */
    puts_to(fd, "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5000000\r\n"
                "Expect: 100-continue\r\n\r\n");
    expect_status(get(fd, NULL), 413);
    close(fd);
}

/* ---- refusals ---- */

static void test_refusals_close(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        int status;
    } cases[] = {
        {"GET / HTTP/1.1\nHost: a\n\n", 400},
        {"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx", 400},
        {"GET / HTTP/1.1\r\n\r\n", 400},
        {"GET / HTTP/3.0\r\nHost: a\r\n\r\n", 505},
        {"POST / HTTP/1.1\r\nHost: a\r\nExpect: more\r\n\r\n", 417},
        {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 400},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        int fd = dial();
        puts_to(fd, cases[i].bytes);
        puts_to(fd, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n"); /* must not be served */
        const char *a = get(fd, NULL);
        expect_status(a, cases[i].status);
        assert_non_null(strstr(a, "Connection: close\r\n"));
        json_t *j =
            json_loads(strstr(a, "\r\n\r\n") + 4, 0, NULL); /* whatever the message quotes */
        const json_t *e = json_object_get(j, "error");
        assert_int_equal(json_integer_value(json_object_get(e, "code")), cases[i].status);
        assert_true(json_string_length(json_object_get(e, "message")) > 10);
        json_decref(j);
        close(fd);
    }
    assert_int_equal(n_requests, 0);
}

static void test_large_body_and_header(void **state)
{
    (void)state;
    const size_t len = 5 * 1024 * 1024;
    char *big = bt_malloc(len);
    memset(big, 'x', len);
    /* 5 MiB announced, 5 MiB in chunks: the client reads its 413 though it never stops sending */
    for (int chunked = 0; chunked <= 1; chunked++) {
        int fd = dial();
        puts_to(fd, chunked ? "POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
                              "300000\r\n"
                            : "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5242880\r\n\r\n");
        put(fd, big, chunked ? 0x300000 : len);
        puts_to(fd, chunked ? "\r\n200000\r\n" : "");
        put(fd, big, chunked ? 0x200000 : 0);
        expect_status(get(fd, NULL), 413);
        close(fd);
    }
    int fd = dial();
    puts_to(fd, "GET / HTTP/1.1\r\nHost: a\r\nX: ");
    put(fd, big, 17 * 1024);
    puts_to(fd, "\r\n\r\n");
    expect_status(get(fd, NULL), 431);
    close(fd);
    /* 4 MiB exactly is served */
    fd = dial();
    puts_to(fd, "POST /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
                "Content-Length: 4194304\r\n\r\n");
    put(fd, big, 4194304);
    const char *a = get(fd, NULL);
    expect_status(a, 200);
    assert_int_equal(strlen(strstr(a, "\r\n\r\n") + 4), 4194304);
    close(fd);
    free(big);
    assert_int_equal(n_requests, 1);
}

/* Byte by byte over the wire is the same as at once. */
static void test_dribbled_request(void **state)
{
    (void)state;
    static const char req[] = "POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
                              "5\r\nhello\r\n0\r\n\r\n";
    int fd = dial();
    for (size_t i = 0; i < sizeof(req) - 1; i++) {
        put(fd, req + i, 1);
        turn(1);
    }
    expect_status(get(fd, "\r\n\r\nhello"), 200);
    close(fd);
}

/* ---- many ---- */

static void test_thousand_connections(void **state)
{
    (void)state;
    enum { N = 1000 };
    static int fds[N];
    struct rlimit rl;
    getrlimit(RLIMIT_NOFILE, &rl);
    if (rl.rlim_cur < 2 * N + 100) {
        rl.rlim_cur = BT_MIN(rl.rlim_max, (rlim_t)(2 * N + 100));
        setrlimit(RLIMIT_NOFILE, &rl);
    }
    if (rl.rlim_cur < 2 * N + 100) {
        skip();
    }
    for (int i = 0; i < N; i++) {
        fds[i] = dial();
        puts_to(fds[i], "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
        if (i % 16 == 0) {
            turn(0);
        }
    }
    WAIT_FOR(n_held == N);
    assert_int_equal(bt_http_conns(http), N);
    for (int i = 0; i < N; i++) {
        bt_http_start(held[i], 200, "text/event-stream");
    }
    for (int e = 0; e < 5; e++) {
        for (int i = 0; i < N; i++) {
            char text[32];
            int n = snprintf(text, sizeof(text), "data: %d.%d\n\n", i, e);
            bt_http_write(held[i], text, (size_t)n);
        }
        turn(1);
    }
    for (int i = 0; i < N; i++) { /* odd ones leave, even ones finish */
        if (i % 2 == 1) {
            close(fds[i]);
        } else {
            struct bt_http_req *r = held[i];
            held[i] = NULL;
            bt_http_end(r);
        }
    }
    for (int i = 0; i < N; i += 2) {
        char last[32];
        snprintf(last, sizeof(last), "data: %d.4\n\n", i);
        assert_non_null(strstr(get(fds[i], "0\r\n\r\n"), last));
        close(fds[i]);
    }
    WAIT_FOR(bt_http_conns(http) == 0);
    assert_int_equal(n_gone, N / 2);
}

static int setup_two_conns(void **state)
{
    (void)state;
    open_server(0, 0, 0, 2, 0);
    return 0;
}

static void test_connection_limit(void **state)
{
    (void)state;
    int a = dial(), b = dial(), c = dial();
    const char *answer = get(c, NULL);
    expect_status(answer, 503);
    assert_non_null(strstr(answer, "Retry-After: "));
    close(a);
    close(c);
    WAIT_FOR(bt_http_conns(http) == 1);
    c = dial();
    puts_to(c, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(c, "\r\n\r\nno"), 404);
    close(b);
    close(c);
}

static uint32_t lines_with(FILE *f, const char *word)
{
    char line[1024];
    uint32_t n = 0;
    rewind(f);
    while (fgets(line, sizeof(line), f) != NULL) {
        n += strstr(line, word) != NULL;
    }
    return n;
}

/* Out of descriptors: 503 or a close, no spinning, one line of log, and service comes back. */
static void test_descriptors_run_out(void **state)
{
    (void)state;
    int fd = dial(); /* in the backlog; the client side has its descriptor already */
    int second = dial();
    FILE *log = tmpfile();
    int stderr_was = dup(STDERR_FILENO);
    assert_true(log != NULL && stderr_was >= 0 && dup2(fileno(log), STDERR_FILENO) >= 0);
    struct rlimit rl, low;
    getrlimit(RLIMIT_NOFILE, &rl);
    int top = dup(0);
    assert_true(top >= 0);
    close(top);
    low = rl;
    low.rlim_cur = (rlim_t)top; /* no descriptor is free below */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    expect_status(get(fd, NULL), 503);
    expect_status(get(second, NULL), 503); /* with the next attempt */
    close(second);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &rl), 0);
    assert_true(dup2(stderr_was, STDERR_FILENO) >= 0);
    assert_int_equal(lines_with(log, "http_accept_failed"), 1);
    close(stderr_was);
    fclose(log);
    second = dial();
    puts_to(second, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(second, "\r\n\r\nno"), 404);
    close(fd);
    close(second);
}

static void test_drain(void **state)
{
    (void)state;
    int idle = dial(), busy = dial();
    puts_to(idle, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(idle, "\r\n\r\nno"), 404);
    puts_to(busy, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    bt_http_drain(http);
    bt_http_drain(http); /* twice is harmless */
    assert_string_equal(get(idle, NULL), "");
    struct bt_http_req *r = held[0];
    held[0] = NULL;
    bt_http_respond(r, 200, "text/plain", "done", 4);
    assert_non_null(strstr(get(busy, NULL), "Connection: close\r\n"));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof(at)), -1);
    close(fd);
    close(idle);
    close(busy);
    WAIT_FOR(bt_http_conns(http) == 0);
}

static void test_destroy_tells_the_handler(void **state)
{
    (void)state;
    int fd = dial();
    puts_to(fd, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    bt_http_destroy(http);
    http = NULL;
    assert_int_equal(n_gone, 1);
    close(fd);
}

static void test_bad_addresses(void **state)
{
    (void)state;
    static const char *const bad[] = {"",    "localhost",       "127.0.0.1:", "127.0.0.1:x",
                                      ":80", "127.0.0.1:65536", "::1:80",     "127.0.0.1:-1"};
    struct bt_http_options o;
    struct bt_http *h = NULL;
    bt_http_options_default(&o);
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        o.listen = bad[i];
        assert_int_equal(bt_http_create(loop, &o, handler, NULL, &h, NULL), BT_ERR_CONFIG);
    }
    char taken[32];
    snprintf(taken, sizeof(taken), "127.0.0.1:%d", port);
    o.listen = taken;
    assert_int_equal(bt_http_create(loop, &o, handler, NULL, &h, NULL), BT_ERR_IO);
}

/* ---- the status page ---- */

static const char *unhealthy;

static const char *health(void *arg)
{
    (void)arg;
    return unhealthy;
}

static void test_status_page(void **state)
{
    (void)state;
    struct bt_metrics *m = bt_metrics_create();
    struct bt_status_page *page;
    int at;
    bt_metric_add(bt_metrics_counter(m, "baton_test_total", NULL), 3);
    assert_int_equal(bt_status_page_create(loop, "127.0.0.1:0", m, health, NULL, &page, &at),
                     BT_OK);
    int fd = dial_port(at);
    puts_to(fd, "GET /health HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(fd, "\r\n\r\nok"), 200);
    unhealthy = "no slab";
    puts_to(fd, "GET /health HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(fd, "\r\n\r\nno slab"), 503);
    unhealthy = NULL;
    puts_to(fd, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    const char *a = get(fd, "baton_test_total 3\n");
    assert_non_null(strstr(a, "Content-Type: text/plain; version=0.0.4\r\n"));
    puts_to(fd, "POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n");
    a = get(fd, "method not allowed\n");
    expect_status(a, 405);
    assert_non_null(strstr(a, "Allow: GET, HEAD\r\n"));
    puts_to(fd, "GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(fd, "/metrics\n"), 404);
    close(fd);
    bt_status_page_destroy(page);
    bt_metrics_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn)              cmocka_unit_test_setup_teardown(fn, setup, teardown)
#define T_WITH(fn, set_up) cmocka_unit_test_setup_teardown(fn, set_up, teardown)
        T(test_keep_alive_and_head),
        T(test_stream),
        T(test_pipelining),
        T(test_pipelined_behind_a_held_one),
        T(test_expect_continue),
        T(test_refusals_close),
        T(test_large_body_and_header),
        T(test_dribbled_request),
        T(test_thousand_connections),
        T_WITH(test_connection_limit, setup_two_conns),
        T(test_descriptors_run_out),
        T(test_drain),
        T(test_destroy_tells_the_handler),
        T(test_bad_addresses),
        T(test_status_page),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
