/* What the HTTP server decides before it reads a body, and what strangers may take of it. Fixture:
 * http_fixture.h. */
#include "tests/unit/http_fixture.h"

static int n_asked;

/* /echo and /hold may be read, everything else is refused by its header. */
static bool head(void *arg, struct bt_http_req *req)
{
    (void)arg;
    const char *path = bt_http_path(req);
    n_asked++;
    if (strcmp(path, "/echo") == 0 || strcmp(path, "/hold") == 0) {
        const char *owner = bt_http_header(req, "x-owner");
        bt_http_accept(req, owner != NULL ? strtoul(owner, NULL, 10) : 0);
        return true;
    }
    bt_http_respond(req, 401, "text/plain", "who?", 4);
    return false;
}

static int setup_head(void **state)
{
    (void)state;
    struct bt_http_options o;
    bt_http_options_default(&o);
    o.listen = "127.0.0.1:0";
    o.head = head;
    o.key_prefix = "conductor.http.";
    o.body_timeout_ms = 200;
    n_asked = 0;
    clock_stop(); /* only pass() lets that time go by */
    open_with(&o);
    return 0;
}

static int setup_small(void **state)
{
    (void)state;
    struct bt_http_options o;
    bt_http_options_default(&o);
    o.listen = "127.0.0.1:0";
    o.head = head;
    o.key_prefix = "conductor.http.";
    o.body_max = 4000;
    o.body_total = 10000;
    o.conns_max = 16;
    o.strangers_max = 8;
    o.header_timeout_ms = 60000;
    n_asked = 0;
    open_with(&o);
    return 0;
}

#define POST(path, fields) "POST " path " HTTP/1.1\r\nHost: a\r\n" fields "\r\n"

/* The answer comes before the body, and no body is waited for. */
static void test_refused_before_the_body(void **state)
{
    (void)state;
    static const char *const heads[] = {POST("/x", "Content-Length: 4000000\r\n"),
                                        POST("/x", "Transfer-Encoding: chunked\r\n"),
                                        POST("/x", "Content-Length: 5\r\nExpect: 100-continue\r\n"),
                                        "POST /x HTTP/1.0\r\nContent-Length: 4000000\r\n\r\n"};
    for (size_t i = 0; i < BT_ARRAY_LEN(heads); i++) {
        int fd = dial();
        puts_to(fd, heads[i]);
        const char *a = get(fd, NULL);
        expect_status(a, 401); /* in particular no 100 */
        assert_non_null(strstr(a, "Connection: close\r\n"));
        close(fd);
    }
    assert_int_equal(n_asked, BT_ARRAY_LEN(heads));
    assert_int_equal(n_requests, 0);
    int fd = dial();
    puts_to(fd, POST("/echo", "Content-Length: 2\r\nExpect: 100-continue\r\n"));
    assert_string_equal(get(fd, "\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
    puts_to(fd, "hi");
    expect_status(get(fd, "hi"), 200);
    puts_to(fd, POST("/echo", "Content-Length: 5000000\r\nExpect: 100-continue\r\n"));
    const char *a = get(fd, NULL);
    expect_status(a, 413);
    assert_non_null(strstr(a, "larger than 4194304 bytes (conductor.http.body_max)"));
    close(fd);
}

/* A short body is skipped and its connection goes on; what is in it is never a request. */
static void test_refused_and_kept(void **state)
{
    (void)state;
    static const char sneaky[] = "GET /echo HTTP/1.1\r\nHost: a\r\n\r\n";
    int fd = dial();
    for (int piece = 1; piece <= 64; piece *= 8) {
        char text[512];
        size_t len = (size_t)snprintf(text, sizeof(text),
                                      POST("/x", "Content-Length: %zu\r\n") "%s" POST(
                                          "/echo", "Content-Length: 5\r\n") "hello",
                                      sizeof(sneaky) - 1, sneaky);
        for (size_t at = 0; at < len; at += (size_t)piece) {
            put(fd, text + at, BT_MIN((size_t)piece, len - at));
            turn(0);
        }
        const char *a = get(fd, "hello");
        expect_status(a, 401);
        assert_null(strstr(a, "Connection: close"));
        a = strstr(a, "who?");
        assert_non_null(a);
        expect_status(a + 4, 200); /* and nothing in between */
    }
    assert_int_equal(n_requests, 3);
    puts_to(fd, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n" POST("/x", "Content-Length: 9\r\n") "half");
    turns(10);
    assert_int_equal(bt_http_conns(http), 1);
    pass(220);
    const char *a = get(fd, NULL); /* the rest of the body does not come: closed without a word */
    expect_status(a, 401);
    assert_null(strstr(a, " 408 "));
    close(fd);
    WAIT_FOR(bt_http_conns(http) == 0);
}

/* A client that goes on sending megabytes after its answer still reads it. */
static void test_sends_on_after_its_answer(void **state)
{
    (void)state;
    static char lump[1 << 20];
    memset(lump, 'x', sizeof(lump));
    int fd = dial();
    puts_to(fd, POST("/x", "Content-Length: 4000000\r\n"));
    for (int i = 0; i < 3; i++) {
        put(fd, lump, sizeof(lump));
    }
    expect_status(get(fd, NULL), 401);
    close(fd);
    WAIT_FOR(bt_http_conns(http) == 0);
    assert_int_equal(n_requests, 0);
}

/* ---- totals and shares ---- */

static int dial_from(const char *address)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in from = {.sin_family = AF_INET};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(inet_pton(AF_INET, address, &from.sin_addr), 1);
    assert_int_equal(bind(fd, (struct sockaddr *)&from, sizeof(from)), 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    return fd;
}

/* So many bytes of a body of 3,000, which the server has read when this returns. */
static int begin_body(const char *owner, size_t bytes)
{
    static const char zeros[4000];
    char text[256];
    int fd = dial(), before = n_asked;
    snprintf(text, sizeof(text), POST("/echo", "X-Owner: %s\r\nContent-Length: 3000\r\n"), owner);
    puts_to(fd, text);
    WAIT_FOR(n_asked > before);
    put(fd, zeros, bytes);
    for (int i = 0; i < 5; i++) {
        turn(1);
    }
    return fd;
}

static void end_body(int fd, size_t bytes)
{
    static const char zeros[4000];
    put(fd, zeros, bytes);
    expect_status(get(fd, "\r\n\r\n"), 200);
    close(fd);
}

/* One owner may have half of what the others leave; what has gone is there again. */
static void test_total_of_bodies(void **state)
{
    (void)state;
    for (int round = 0; round < 3; round++) {
        int a = begin_body("1", 2900), b = begin_body("1", 0);
        const char *answer = get(b, NULL); /* 2,900 and 3,000 are more than the half of 10,000 */
        expect_status(answer, 429);
        assert_non_null(strstr(answer, "share of the total of 10000 bytes: send fewer at once"));
        assert_non_null(strstr(answer, "Retry-After: 1\r\n"));
        assert_non_null(strstr(answer, "rate_limit_error"));
        close(b);
        b = begin_body("2", 2900);
        end_body(b, 100);
        b = begin_body("2", 2900);
        int c = begin_body("3", 0); /* of the 4,000 that are left it may have 2,000 */
        expect_status(get(c, NULL), 429);
        close(c);
        end_body(a, 100);
        c = begin_body("3", 2900);
        end_body(b, 100);
        end_body(c, 100);
    }
    WAIT_FOR(bt_http_conns(http) == 0);
}

/* What is announced counts at once; what comes in chunks counts as it comes. */
static void test_announced_and_chunked(void **state)
{
    (void)state;
    static const char zeros[4000];
    int a = begin_body("1", 10), b = begin_body("2", 10), c = begin_body("3", 0);
    expect_status(get(c, NULL), 429); /* 4,000 are free, 3,000 of its own leave 1,000 */
    close(c);
    c = dial();
    puts_to(c, POST("/echo", "X-Owner: 3\r\nTransfer-Encoding: chunked\r\n"));
    puts_to(c, "7d0\r\n");
    put(c, zeros, 2000);
    puts_to(c, "\r\n");
    for (int i = 0; i < 10; i++) {
        turn(1);
    }
    puts_to(c, "64\r\n");
    put(c, zeros, 100);
    expect_status(get(c, NULL), 429);
    close(c);
    end_body(a, 2990);
    end_body(b, 2990);
    WAIT_FOR(bt_http_conns(http) == 0);
}

/* A body counts as long as its handler has it, and no longer than that. */
static void test_body_of_a_held_request(void **state)
{
    (void)state;
    static const char zeros[3000];
    int fd = dial(), other;
    puts_to(fd, POST("/hold", "X-Owner: 1\r\nContent-Length: 3000\r\n"));
    put(fd, zeros, sizeof(zeros));
    WAIT_FOR(n_held == 1);
    other = begin_body("1", 0);
    expect_status(get(other, NULL), 429);
    close(other);
    size_t len;
    char *body = bt_http_take_body(held[0], &len);
    assert_int_equal(len, sizeof(zeros));
    free(body);
    other = begin_body("1", 0);
    expect_status(get(other, NULL), 429);
    close(other);
    bt_http_body_done(held[0]);
    end_body(begin_body("1", 2900), 100);
    struct bt_http_req *r = held[0];
    held[0] = NULL;
    bt_http_respond(r, 200, "text/plain", "ok", 2);
    expect_status(get(fd, "ok"), 200);
    close(fd);
    WAIT_FOR(bt_http_conns(http) == 0);
}

#define ECHO "GET /echo HTTP/1.1\r\nHost: a\r\n\r\n"

/* Who opens connections and says nothing loses the oldest of them; others get through. */
static void test_strangers(void **state)
{
    (void)state;
    int slow[40];
    int known = dial_from("127.0.0.2"), waiting = dial_from("127.0.0.3");
    puts_to(known, ECHO);
    expect_status(get(known, "\r\n\r\n"), 200);
    puts_to(waiting, "GET /ech");
    for (int i = 0; i < 40; i++) {
        slow[i] = dial();
        puts_to(slow[i], "GET / HT");
        turn(1);
        if (i % 8 == 7) { /* a newcomer from elsewhere, and from the same address */
            for (int k = 0; k < 2; k++) {
                int fd = k == 0 ? dial_from("127.0.0.4") : dial();
                puts_to(fd, ECHO);
                expect_status(get(fd, "\r\n\r\n"), 200);
                close(fd);
            }
        }
    }
    WAIT_FOR(bt_http_conns(http) == 1 + 8);
    expect_status(get(slow[0], NULL), 503);
    puts_to(known, ECHO);
    expect_status(get(known, "\r\n\r\n"), 200);
    puts_to(waiting, "o HTTP/1.1\r\nHost: a\r\n\r\n"); /* one of few of its address: it stays */
    expect_status(get(waiting, "\r\n\r\n"), 200);
    for (int i = 0; i < 40; i++) {
        close(slow[i]);
    }
    close(known);
    close(waiting);
    WAIT_FOR(bt_http_conns(http) == 0);
}

/* A refused request makes nobody known. */
static void test_refused_stays_a_stranger(void **state)
{
    (void)state;
    int fds[12];
    for (int i = 0; i < 12; i++) {
        fds[i] = dial();
        puts_to(fds[i], "GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
        expect_status(get(fds[i], "who?"), 401);
    }
    assert_int_equal(bt_http_conns(http), 8);
    for (int i = 0; i < 12; i++) {
        close(fds[i]);
    }
    WAIT_FOR(bt_http_conns(http) == 0);
}

/* An owner has at most as many connections as it leaves free. */
static void test_connections_of_one_owner(void **state)
{
    (void)state;
    int fds[16], n = 0;
    const char *a;
    for (int i = 0; i < 12; i++) {
        fds[i] = dial();
        puts_to(fds[i], ECHO);
        a = get(fds[i], "\r\n\r\n");
        n += strncmp(a, "HTTP/1.1 200", 12) == 0;
        if (n <= i) {
            expect_status(a, 429);
            assert_non_null(strstr(a, "(conductor.http.conns_max)"));
        }
    }
    assert_int_equal(n, 8);
    int other = dial_from("127.0.0.2");
    puts_to(other, ECHO);
    expect_status(get(other, "\r\n\r\n"), 200);
    for (int i = 0; i < 12; i++) {
        close(fds[i]);
    }
    close(other);
    WAIT_FOR(bt_http_conns(http) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup_head, teardown)
        T(test_refused_before_the_body),   T(test_refused_and_kept),
        T(test_sends_on_after_its_answer),
#define S(fn) cmocka_unit_test_setup_teardown(fn, setup_small, teardown)
        S(test_total_of_bodies),           S(test_announced_and_chunked),
        S(test_body_of_a_held_request),    S(test_strangers),
        S(test_refused_stays_a_stranger),  S(test_connections_of_one_owner),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
