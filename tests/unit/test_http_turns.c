/* How much of a turn of the loop the HTTP server takes, and who is served in it: clients that send
 * one request behind another take turns, and other work of the loop goes on between. The clock
 * stands but for what the work is said to cost, so that the machine's other work changes nothing.
 * Fixture: http_fixture.h. */
#include "tests/unit/http_fixture.h"

#define CLIENTS  40
#define REQUESTS 30
#define WORK_NS  500000ull /* a request */
#define SEND_NS  1ull      /* a byte that goes to the kernel */
#define LIMIT_NS BT_LOOP_SLOW_NS
#define HEAD     "GET /work?%d HTTP/1.1\r\nHost: a\r\n\r\n"
#define LARGE    (300 * 1024)
#define N_LARGE  400
#define BEAT_MS  5
#define HOLD     "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n"

static uint64_t longest_ns;
static int served[CLIENTS], n_served, ahead_most, n_beats;

static void on_tick(void *arg, const struct bt_loop_tick *t)
{
    (void)arg;
    longest_ns = BT_MAX(longest_ns, t->wall_ns);
}

__attribute__((visibility("hidden"))) ssize_t send(int fd, const void *data, size_t len, int flags)
{
    ssize_t n = syscall(SYS_sendto, fd, data, len, flags, NULL, 0);
    atomic_fetch_add(&clock_ahead_ns, n > 0 ? (uint64_t)n * SEND_NS : 0);
    return n;
}

/* /work?CLIENT takes half a millisecond; the others as in the fixture. */
static void work(void *arg, struct bt_http_req *req)
{
    if (strcmp(bt_http_path(req), "/work") != 0) {
        handler(arg, req);
        return;
    }
    int who = atoi(query_of(req)), least = REQUESTS;
    atomic_fetch_add(&clock_ahead_ns, WORK_NS);
    n_served++;
    served[who]++;
    for (int i = 0; i < CLIENTS; i++) {
        least = BT_MIN(least, served[i]);
    }
    ahead_most = BT_MAX(ahead_most, served[who] - least);
    bt_http_respond(req, 200, "text/plain", "ok", 2);
}

static int setup_work(void **state)
{
    (void)state;
    struct bt_http_options o;
    bt_http_options_default(&o);
    o.listen = "127.0.0.1:0";
    n_held = n_gone = n_requests = n_served = ahead_most = n_beats = 0;
    memset(held, 0, sizeof(held));
    memset(served, 0, sizeof(served));
    clock_stop();
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    assert_int_equal(bt_http_create(loop, &o, work, NULL, &http, &port), BT_OK);
    longest_ns = 0;
    bt_loop_watch(loop, on_tick, NULL);
    return 0;
}

static void on_beat(void *arg)
{
    (void)arg;
    n_beats++;
}

/* Many clients, each with many requests in one packet. */
static void test_pipelined_requests_take_turns(void **state)
{
    (void)state;
    int fds[CLIENTS];
    char text[REQUESTS * 64];
    struct bt_timer beat = {0};
    for (int i = 0; i < CLIENTS; i++) {
        size_t n = 0;
        fds[i] = dial();
        for (int r = 0; r < REQUESTS; r++) {
            n += (size_t)snprintf(text + n, sizeof(text) - n, HEAD, i);
        }
        assert_int_equal(send(fds[i], text, n, MSG_NOSIGNAL), (ssize_t)n);
    }
    bt_timer_start(loop, &beat, BEAT_MS, BEAT_MS, on_beat, NULL);
    WAIT_FOR(n_served == CLIENTS * REQUESTS);
    bt_timer_stop(loop, &beat);
    assert_true(longest_ns < LIMIT_NS);
    /* Who is accepted first has what fits into a turn before the others are there. */
    assert_in_range(ahead_most, 0, REQUESTS / 2);
    assert_true(n_beats >= (int)(CLIENTS * REQUESTS * WORK_NS / LIMIT_NS));
    for (int i = 0; i < CLIENTS; i++) {
        close(fds[i]);
    }
    WAIT_FOR(bt_http_conns(http) == 0);
}

/* One of them leaves while it waits for its turn; one sends the rest of a request later. */
static void test_who_waits_may_leave(void **state)
{
    (void)state;
    int fds[CLIENTS];
    char text[64];
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = dial();
        snprintf(text, sizeof(text), HEAD, i);
        for (int r = 0; r < REQUESTS; r++) {
            puts_to(fds[i], text);
        }
        puts_to(fds[i], "GET /wo");
    }
    WAIT_FOR(n_served > CLIENTS);
    for (int i = 0; i < CLIENTS; i += 2) {
        struct linger now = {1, 0}; /* RST */
        setsockopt(fds[i], SOL_SOCKET, SO_LINGER, &now, sizeof(now));
        close(fds[i]);
    }
    WAIT_FOR(bt_http_conns(http) == CLIENTS / 2);
    for (int i = 1; i < CLIENTS; i += 2) {
        snprintf(text, sizeof(text), "rk?%d HTTP/1.1\r\nHost: a\r\n\r\n", i);
        puts_to(fds[i], text);
        WAIT_FOR(served[i] == REQUESTS + 1);
        close(fds[i]);
    }
    assert_true(longest_ns < LIMIT_NS);
    WAIT_FOR(bt_http_conns(http) == 0);
}

/* Hundreds of answers at once: 117 MiB go to the kernel, turn by turn. */
static void test_answers_leave_by_and_by(void **state)
{
    (void)state;
    static int fds[N_LARGE];
    char *body = calloc(1, LARGE);
    assert_non_null(body);
    for (int i = 0; i < N_LARGE; i++) {
        fds[i] = dial();
        puts_to(fds[i], HOLD);
    }
    WAIT_FOR(n_held == N_LARGE);
    longest_ns = 0;
    for (int i = 0; i < N_LARGE; i++) {
        struct bt_http_req *req = held[i];
        held[i] = NULL;
        bt_http_on_gone(req, NULL, NULL);
        bt_http_respond(req, 200, "text/plain", body, LARGE);
    }
    free(body);
    WAIT_FOR(bt_http_unsent(http) < (size_t)LARGE * N_LARGE / 2);
    for (int i = 0; i < N_LARGE; i++) {
        size_t got = 0;
        while (got < LARGE) {
            static char piece[65536];
            ssize_t n = recv(fds[i], piece, sizeof(piece), 0);
            if (n > 0) {
                got += (size_t)n;
            } else {
                turn(1);
            }
        }
        close(fds[i]);
    }
    assert_true(longest_ns < LIMIT_NS);
    WAIT_FOR(bt_http_conns(http) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup_work, teardown)
        T(test_pipelined_requests_take_turns),
        T(test_who_waits_may_leave),
        T(test_answers_leave_by_and_by),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
