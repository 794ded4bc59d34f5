/* Clients of the HTTP server that are slow, leave, vanish or do not read. Fixture: http_fixture.h.
 */
#include "tests/unit/http_fixture.h"

/* ---- deadlines ---- */

/* The clock stands: only pass() lets time go by. */
static int setup_short(void **state)
{
    (void)state;
    clock_stop();
    open_server(60, 90, 150, 0, 0);
    return 0;
}

/* Nothing has come, and the server has not closed. */
static bool silent(int fd)
{
    char byte;
    return recv(fd, &byte, 1, MSG_PEEK) < 0 && errno == EAGAIN;
}

static void test_deadlines(void **state)
{
    (void)state;
    int idle = dial(), header = dial(), body = dial(), kept = dial();
    puts_to(header, "GET / HTTP/1.1\r\nHos");
    puts_to(body, "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhel");
    puts_to(kept, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(kept, "\r\n\r\nno"), 404);
    WAIT_FOR(bt_http_conns(http) == 4);
    turns(10);
    pass(59);
    assert_true(silent(header));
    pass(2);
    expect_status(get(header, NULL), 408);
    pass(28);
    assert_true(silent(body));
    pass(2);
    expect_status(get(body, NULL), 408);
    pass(58);
    assert_true(silent(idle) && silent(kept));
    pass(2);
    assert_string_equal(get(idle, NULL), ""); /* nothing was asked, nothing is answered */
    assert_string_equal(get(kept, NULL), "");
    close(idle);
    close(header);
    close(body);
    close(kept);
    WAIT_FOR(bt_http_conns(http) == 0);
}

/* A byte now and then does not buy more time for the header. */
static void test_slow_header_has_one_deadline(void **state)
{
    (void)state;
    int fd = dial();
    for (int ms = 0; ms < 55; ms += 5) {
        puts_to(fd, "G");
        turns(4);
        assert_true(silent(fd));
        pass(5);
    }
    puts_to(fd, "G");
    pass(10);
    expect_status(get(fd, NULL), 408);
    close(fd);
}

/* A handler may think longer than every deadline. */
static void test_no_deadline_while_answering(void **state)
{
    (void)state;
    int fd = dial();
    puts_to(fd, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    pass(500);
    assert_int_equal(n_gone, 0);
    struct bt_http_req *r = held[0];
    held[0] = NULL;
    bt_http_respond(r, 200, "text/plain", "late", 4);
    expect_status(get(fd, "late"), 200);
    close(fd);
}

/* ---- clients that leave ---- */

/* The client's side takes no packet any more and so acknowledges nothing, as if its machine had
 * lost power: no FIN, no RST. */
static void vanish(int fd)
{
    struct sock_filter drop[] = {{BPF_RET | BPF_K, 0, 0, 0}};
    struct sock_fprog program = {BT_ARRAY_LEN(drop), drop};
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)), 0);
}

static void test_vanished(void **state)
{
    (void)state;
    int streaming = dial(), waiting = dial();
    puts_to(streaming, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    puts_to(waiting, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 2);
    bt_http_start(held[0], 200, "text/event-stream");
    bt_http_write(held[0], "x", 1);
    assert_non_null(get(streaming, "x"));
    vanish(streaming);
    vanish(waiting);
    bt_http_write(held[0], "y", 1); /* nobody acknowledges it */
    WAIT_FOR(held[0] == NULL);
    WAIT_FOR(held[1] == NULL); /* nothing is sent to it but probes */
    assert_int_equal(n_gone, 2);
    close(streaming);
    close(waiting);
}

static void test_gone(void **state)
{
    (void)state;
    int waiting = dial(), streaming = dial(), reset = dial();
    puts_to(waiting, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    puts_to(streaming, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    puts_to(reset, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\nGET /next HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 3);
    bt_http_start(held[1], 200, "text/event-stream");
    bt_http_write(held[1], "x", 1);
    struct bt_http_req *s = held[1];
    (void)s;
    assert_non_null(get(streaming, "x"));
    close(waiting);
    WAIT_FOR(n_gone == 1);
    assert_null(held[0]);
    close(streaming); /* idle: nothing is being written to it */
    WAIT_FOR(n_gone == 2);
    assert_null(held[1]);
    struct linger l = {1, 0};
    setsockopt(reset, SOL_SOCKET, SO_LINGER, &l, sizeof(l));
    close(reset); /* with unread requests */
    WAIT_FOR(n_gone == 3);
    WAIT_FOR(bt_http_conns(http) == 0);
    assert_int_equal(n_requests, 3);
}

/* Who has sent all that he wants to send, and has shut that side, is answered; if he then leaves,
 * that is noticed though his FIN has come long before. */
static void test_half_closed_is_answered(void **state)
{
    (void)state;
    int whole = dial(), stream = dial(), old = dial(), leaves = dial();
    puts_to(whole, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\nGET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    puts_to(stream, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 2);
    puts_to(old, "GET /hold HTTP/1.0\r\n\r\n");
    WAIT_FOR(n_held == 3);
    puts_to(leaves, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 4);
    struct bt_http_req *w = held[0], *s = held[1];
    held[0] = held[1] = NULL;
    bt_http_start(s, 200, "text/event-stream");
    bt_http_write(s, "x", 1);
    assert_non_null(strstr(get(stream, "x"), "1\r\nx"));
    shutdown(whole, SHUT_WR);
    shutdown(stream, SHUT_WR);
    shutdown(old, SHUT_WR);
    shutdown(leaves, SHUT_WR);
    assert_string_equal(get(leaves, "\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
    close(leaves);
    WAIT_FOR(n_gone == 2); /* and both probes of the others have been sent */
    assert_null(held[2]);  /* HTTP/1.0 */
    assert_null(held[3]);
    turn(10);
    bt_http_respond(w, 200, "text/plain", "all", 3);
    const char *a = get(whole, NULL), *answer = strstr(a, "HTTP/1.1 200");
    assert_int_equal(strncmp(a, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 ", 34), 0);
    assert_non_null(answer);
    assert_non_null(strstr(answer, "all"));
    assert_non_null(strstr(answer, "HTTP/1.1 404")); /* what he had asked ahead */
    bt_http_write(s, "yz", 2);
    bt_http_end(s);
    a = get(stream, NULL);
    assert_int_equal(a[0], '0'); /* one for each probe */
    assert_string_equal(a + strspn(a, "0"), "2\r\nyz\r\n0\r\n\r\n");
    assert_int_equal(n_gone, 2);
    close(whole);
    close(stream);
    close(old);
    WAIT_FOR(bt_http_conns(http) == 0);
}

static int setup_small_out(void **state)
{
    (void)state;
    open_server(0, 0, 0, 0, 64 * 1024);
    return 0;
}

static void test_slow_reader_is_dropped(void **state)
{
    (void)state;
    static char piece[16 * 1024];
    int slow = dial(), other = dial();
    memset(piece, 'x', sizeof(piece));
    puts_to(slow, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    bt_http_start(held[0], 200, "text/event-stream");
    size_t written = 0;
    while (n_gone == 0) { /* it never reads: kernel buffers fill, then ours, then it is gone */
        bt_http_write(held[0], piece, sizeof(piece));
        written += sizeof(piece);
        assert_true(written < 64 * 1024 * 1024);
        turn(0);
    }
    puts_to(other, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(other, "\r\n\r\nno"), 404);
    close(slow);
    close(other);
}

/* A large whole answer to a slow but living reader is not a stream that falls behind. */
static void test_large_answer_is_not_dropped(void **state)
{
    (void)state;
    size_t len = 4 * 1024 * 1024;
    char *big = bt_malloc(len + 1);
    memset(big, 'y', len);
    int fd = dial();
    puts_to(fd, "GET /hold HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    WAIT_FOR(n_held == 1);
    struct bt_http_req *r = held[0];
    held[0] = NULL;
    bt_http_respond(r, 200, "text/plain", big, len);
    for (int i = 0; i < 20; i++) {
        turn(1);
    }
    const char *a = get(fd, NULL);
    assert_int_equal(strlen(strstr(a, "\r\n\r\n") + 4), len);
    free(big);
    close(fd);
}

/* ---- answers that are pulled ---- */

static struct source { /* bytes that tell their place */
    size_t made, total;
    bool ended;
} sources[16];

static bt_http_pull_t give(void *arg, struct bt_buf *out)
{
    struct source *s = arg;
    assert_false(s->ended);
    for (int i = 0; i < 8192 && s->made < s->total; i++, s->made += 4) {
        bt_buf_printf(out, "%03zx\n", (s->made / 4) & 0xfff);
    }
    s->ended = s->made >= s->total;
    return s->ended ? BT_HTTP_END : BT_HTTP_MORE;
}

static bool is_source(const char *text, size_t total)
{
    char want[8];
    for (size_t at = 0; at < total; at += 4) {
        snprintf(want, sizeof(want), "%03zx\n", (at / 4) & 0xfff);
        if (memcmp(text + at, want, 4) != 0) {
            return false;
        }
    }
    return text[total] == '\0';
}

static int dial_pull(const char *version, size_t total)
{
    int k = n_held, fd = dial();
    puts_to(fd, "GET /hold ");
    puts_to(fd, version);
    puts_to(fd, "\r\nHost: a\r\nConnection: close\r\n\r\n");
    WAIT_FOR(n_held == k + 1);
    sources[k] = (struct source){.total = total};
    bt_http_start(held[k], 200, "text/plain");
    bt_http_pull(held[k], give, &sources[k]);
    return fd;
}

/* The bytes of a chunked body, in place. */
static char *unchunk(char *body)
{
    char *to = body, *from = body, *end;
    for (size_t n; (n = strtoul(from, &end, 16)) > 0; from = end + 2 + n + 2) {
        memmove(to, end + 2, n);
        to += n;
    }
    *to = '\0';
    return body;
}

static void test_pulled(void **state)
{
    (void)state;
    const size_t total = 5 * 1024 * 1024;
    for (int old = 0; old <= 1; old++) {
        int fd = dial_pull(old ? "HTTP/1.0" : "HTTP/1.1", total), other = dial();
        puts_to(other, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
        expect_status(get(other, "\r\n\r\nno"), 404);
        for (int i = 0; i < 200; i++) {
            turn(0);
        }
        /* What the kernel of both ends takes, and next to nothing more. */
        size_t before = sources[old].made;
        assert_true(bt_http_unsent(http) < 100 * 1024);
        assert_false(sources[old].ended);
        turn(1);
        assert_int_equal(sources[old].made, before);
        char *body = strstr(get(fd, NULL), "\r\n\r\n") + 4;
        assert_true(is_source(old ? body : unchunk(body), total));
        assert_true(sources[old].ended);
        held[old] = NULL;
        assert_int_equal(bt_http_unsent(http), 0);
        close(fd);
        close(other);
    }
    assert_int_equal(n_gone, 0);
}

static bt_http_pull_t give_once(void *arg, struct bt_buf *out)
{
    int *n = arg;
    bt_buf_printf(out, "<%d>", ++*n);
    return *n == 3 ? BT_HTTP_END : BT_HTTP_WAIT;
}

static void test_pull_waits(void **state)
{
    (void)state;
    int fd = dial(), n = 0;
    puts_to(fd, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    bt_http_start(held[0], 200, "text/plain");
    bt_http_pull(held[0], give_once, &n);
    get(fd, "<1>");
    turn(1);
    assert_int_equal(n, 1);
    bt_http_resume(held[0]);
    get(fd, "<2>");
    bt_http_resume(held[0]);
    get(fd, "<3>\r\n0\r\n\r\n");
    held[0] = NULL;
    /* the connection goes on */
    puts_to(fd, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(fd, "\r\n\r\nno"), 404);
    close(fd);
}

/* The kernel's own limit for clients that take nothing is of the same length, and of real time. */
static int setup_long(void **state)
{
    (void)state;
    clock_stop();
    open_server(0, 0, 20000, 0, 0);
    return 0;
}

/* A client that reads nothing is gone after the idle time; one that leaves, at once. */
static void test_pull_is_given_up(void **state)
{
    (void)state;
    int reads_nothing = dial_pull("HTTP/1.1", SIZE_MAX), leaver = dial_pull("HTTP/1.1", SIZE_MAX);
    close(leaver);
    WAIT_FOR(n_gone == 1);
    pass(19500);
    assert_non_null(held[0]);
    pass(1000);
    assert_null(held[0]);
    assert_int_equal(bt_http_unsent(http), 0);
    close(reads_nothing);
}

static int setup_rate(void **state)
{
    (void)state;
    open_server(0, 0, 20000, 0, 0);
    return 0;
}

/* What a client has read at so many bytes a second since from_ns. */
static void read_at(int fd, uint64_t from_ns, size_t per_s, size_t *got)
{
    char piece[4096];
    size_t due = (size_t)((double)(bt_mono_ns() - from_ns) / 1e9 * (double)per_s);
    while (*got < due) {
        ssize_t n = recv(fd, piece, BT_MIN(sizeof(piece), due - *got), 0);
        if (n <= 0) {
            return;
        }
        *got += (size_t)n;
    }
}

/* Of two clients that read without pause the one below 8 KiB a second is given up. The other is
 * not, though the kernel takes new output from us in large pieces only. A second of them is a tenth
 * of the machine's. */
static void test_rate_of_reading(void **state)
{
    (void)state;
    int slow = dial_pull("HTTP/1.1", SIZE_MAX), steady = dial_pull("HTTP/1.1", SIZE_MAX);
    int small = 4096, second = 65536;
    setsockopt(slow, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    setsockopt(steady, SOL_SOCKET, SO_RCVBUF, &second, sizeof(second));
    turns(100); /* buffers fill */
    size_t slow_got = 0, steady_got = 0;
    clock_stop();
    uint64_t t0 = bt_mono_ns(), last_ns = clock_machine_ns();
    while (bt_mono_ns() - t0 < 50000000000ull) {
        read_at(slow, t0, 2048, &slow_got);
        read_at(steady, t0, 65536, &steady_got);
        turn(5);
        uint64_t ms = (clock_machine_ns() - last_ns) / 1000000;
        if (ms > 0) {
            clock_jump(10 * BT_MIN(ms, (uint64_t)20)); /* no more, if the process stood still */
            last_ns = clock_machine_ns();
        }
    }
    assert_null(held[0]);
    assert_non_null(held[1]);
    assert_int_equal(n_gone, 1);
    close(slow);
    close(steady);
    WAIT_FOR(n_gone == 2);
}

/* A stream whose client has all there is waits for its handler, however long. */
static void test_a_stream_without_news_is_kept(void **state)
{
    (void)state;
    int fd = dial();
    puts_to(fd, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    bt_http_start(held[0], 200, "text/plain");
    bt_http_write(held[0], "one", 3);
    get(fd, "one");
    pass(600);
    assert_int_equal(n_gone, 0);
    bt_http_write(held[0], "two", 3);
    get(fd, "two");
    bt_http_end(held[0]);
    held[0] = NULL;
    close(fd);
}

static int setup_small_total(void **state)
{
    (void)state;
    open_server(0, 0, 0, 0, 0);
    bt_http_destroy(http);
    struct bt_http_options o;
    bt_http_options_default(&o);
    o.listen = "127.0.0.1:0";
    o.out_total = 16 * 1024 * 1024;
    assert_int_equal(bt_http_create(loop, &o, handler, NULL, &http, &port), BT_OK);
    return 0;
}

/* Answers of 12 MiB whose clients do not read: not more of them than fit. Another one is served. */
static void test_total(void **state)
{
    (void)state;
    const size_t len = 12 * 1024 * 1024;
    char *big = bt_calloc(1, len);
    int fds[6], other = dial(), closed = 0;
    for (int i = 0; i < 6; i++) {
        fds[i] = dial();
        puts_to(fds[i], "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
        WAIT_FOR(n_held == i + 1);
        struct bt_http_req *r = held[i];
        held[i] = NULL;
        bt_http_respond(r, 200, "text/plain", big, len);
        turn(0);
        turn(0);
        assert_true(bt_http_unsent(http) <= 16 * 1024 * 1024);
        closed = 6 + 1 - (int)bt_http_conns(http);
    }
    assert_true(closed > 0);
    puts_to(other, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    expect_status(get(other, "\r\n\r\nno"), 404);
    for (int i = 0; i < 6; i++) {
        close(fds[i]);
    }
    WAIT_FOR(bt_http_unsent(http) == 0);
    close(other);
    free(big);
}

/* No on_gone registered: the handler ends the request into the void. */
static void test_gone_without_callback(void **state)
{
    (void)state;
    int fd = dial();
    puts_to(fd, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    struct bt_http_req *r = held[0];
    held[0] = NULL;
    bt_http_on_gone(r, NULL, NULL);
    close(fd);
    WAIT_FOR(bt_http_conns(http) == 0);
    bt_http_start(r, 200, "text/plain");
    bt_http_write(r, "x", 1);
    bt_http_end(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn)              cmocka_unit_test_setup_teardown(fn, setup, teardown)
#define T_WITH(fn, set_up) cmocka_unit_test_setup_teardown(fn, set_up, teardown)
        T_WITH(test_deadlines, setup_short),
        T_WITH(test_slow_header_has_one_deadline, setup_short),
        T_WITH(test_no_deadline_while_answering, setup_short),
        T(test_gone),
        T(test_half_closed_is_answered),
        T_WITH(test_vanished, setup_short),
        T_WITH(test_slow_reader_is_dropped, setup_small_out),
        T_WITH(test_large_answer_is_not_dropped, setup_small_out),
        T(test_gone_without_callback),
        T(test_pulled),
        T(test_pull_waits),
        T_WITH(test_pull_is_given_up, setup_long),
        T_WITH(test_rate_of_reading, setup_rate),
        T_WITH(test_a_stream_without_news_is_kept, setup_short),
        T_WITH(test_total, setup_small_total),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
