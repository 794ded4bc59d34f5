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

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup_head, teardown)
        T(test_refused_before_the_body),
        T(test_refused_and_kept),
        T(test_sends_on_after_its_answer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
