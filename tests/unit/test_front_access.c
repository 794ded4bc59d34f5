/* The access log and request ids: every way in which a response can end, over real HTTP. */
#include "tests/unit/front_fixture.h"

#include "common/log/log.h"

static int reader = -1, own_stderr = -1;
static char text[65536];

static void open_with(double share)
{
    int ends[2];
    assert_int_equal(pipe2(ends, O_NONBLOCK | O_CLOEXEC), 0);
    own_stderr = dup(STDERR_FILENO);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    close(ends[1]);
    reader = ends[0];
    access_share = share;
    open_front(NULL, tmpl);
}

static int close_all(void **state)
{
    teardown(state);
    access_share = 0;
    dup2(own_stderr, STDERR_FILENO);
    close(own_stderr);
    close(reader);
    return 0;
}

static size_t text_len;

/* Reads what the log has more; the number of access lines in all. */
static int lines(void)
{
    ssize_t n;
    while ((n = read(reader, text + text_len, sizeof(text) - 1 - text_len)) > 0) {
        text_len += (size_t)n;
    }
    text[text_len] = '\0';
    int count = 0;
    for (const char *s = text; (s = strstr(s, " ev=access ")) != NULL; s++) {
        count++;
    }
    return count;
}

/* Waits for the next access line; it is `text` then. */
static void next_line(void)
{
    text_len = 0;
    WAIT_FOR(lines() > 0);
    assert_int_equal(lines(), 1);
}

static void has(const char *part)
{
    if (strstr(text, part) == NULL) {
        printf("no %s in: %s", part, text); /* stderr is the log */
        fail();
    }
}

/* Sends bytes that are no or a wrong request; the answer is in ans. */
static void send_bytes(const char *bytes)
{
    int fd = dial();
    assert_int_equal(send(fd, bytes, strlen(bytes), MSG_NOSIGNAL), (ssize_t)strlen(bytes));
    shutdown(fd, SHUT_WR);
    receive(fd);
}

static void answered_with_id(int status)
{
    assert_int_equal(ans.status, status);
    const char *id = strstr(ans.head, "\r\nx-request-id: ");
    assert_non_null(id);
    assert_int_equal(strspn(id + 16, "0123456789abcdef"), 24);
    assert_null(strstr(id + 16, "x-request-id"));
}

static void test_every_answer_has_an_id(void **state)
{
    (void)state;
    open_with(0);
    receive(send_raw("GET", "/health", "", "", 0));
    answered_with_id(200);
    char first[2048];
    snprintf(first, sizeof(first), "%s", strstr(ans.head, "x-request-id"));
    receive(send_raw("GET", "/health", "", "", 0));
    assert_string_not_equal(strstr(ans.head, "x-request-id"), first);
    receive(send_raw("GET", "/nowhere", "", "", 0));
    answered_with_id(404);
    receive(post("/v1/completions", "{"));
    answered_with_id(400);
    send_bytes("no request at all\r\n\r\n");
    answered_with_id(400);
    send_bytes("POST /tokenize HTTP/1.0\r\nContent-Length: 99999999\r\n\r\n");
    answered_with_id(413);
    send_bytes("GET /health HTTP/1.0\r\nX-Request-Id: a\r\nX-Request-Id: b\r\n\r\n");
    answered_with_id(400);
    send_bytes(
        "POST /tokenize HTTP/1.0\r\nx-request-id: mine-1\r\nContent-Length: 99999999\r\n\r\n");
    assert_non_null(strstr(ans.head, "\r\nx-request-id: mine-1\r\n"));
    text_len = 0;
    assert_int_equal(lines(), 0); /* off */
}

static void test_lines(void **state)
{
    (void)state;
    open_with(1);
    receive(
        send_raw("GET", "/v1/models/x%20ev=forged?key=secret", "x-request-id: my-1\r\n", "", 0));
    next_line();
    has(" id=my-1 method=GET path=\"/v1/models/x ev=forged\" status=404 end=complete "
        "bytes_in=0 ");
    has(" client=127.0.0.1 tenant=- key=- cert=-\n");
    assert_null(strstr(text, "secret"));
    send_bytes("rubbish\r\n\r\n");
    next_line();
    has(" method=- path=- status=400 end=complete ");

    static const char body[] = "{\"prompt\":[1,2,3],\"stream\":true}";
    int fd = begin("/v1/completions", body);
    token("x", 41);
    token("y", 42);
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(2, 0);
    receive(fd);
    next_line();
    has(" path=/v1/completions status=200 end=complete bytes_in=32 bytes_out=");
    char want[64];
    snprintf(want, sizeof(want), " bytes_out=%zu ", strlen(ans.head) + 2 + strlen(ans.body));
    has(want);
    has(" req=cmpl-");
    has(" model=" MODEL_ID " prompt_tokens=3 completion_tokens=2 grammar=-\n");

    fd = begin("/v1/completions", body);
    token("x", 41);
    char some[16];
    WAIT_FOR(recv(fd, some, sizeof(some), MSG_PEEK) > 0);
    close(fd);
    next_line();
    has(" status=200 end=client_gone ");
    has(" prompt_tokens=3 completion_tokens=1 grammar=-\n");
    fd = begin("/v1/completions", body); /* leaves before its answer begins */
    close(fd);
    next_line();
    has(" status=0 end=client_gone bytes_in=32 bytes_out=0 ");
    has(" first_byte_ms=0.000 ");

    begin("/v1/completions", body);
    fail_now(504, "too late", 0);
    next_line();
    has(" status=504 ");
}

/* Two requests in one packet: a line for each, in order. */
static void test_pipelined(void **state)
{
    (void)state;
    open_with(1);
    send_bytes("GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.0\r\n\r\n");
    text_len = 0;
    WAIT_FOR(lines() == 2);
    char *first = strstr(text, "path=/version status=200 end=complete");
    assert_non_null(first);
    assert_non_null(strstr(first, "path=/health status=200 end=complete"));
}

static void test_sample(void **state)
{
    (void)state;
    open_with(1e-9);
    receive(send_raw("GET", "/health", "", "", 0));
    receive(send_raw("GET", "/nowhere", "", "", 0));
    not_serving = "no workers";
    receive(send_raw("GET", "/health", "", "", 0)); /* server errors are always there */
    next_line();
    has(" path=/health status=503 ");
}

static void test_share(void **state)
{
    static const char *const wrong[] = {"", "on", "0", "1", "-1", "2", "nan", "0.5x", "ALL"};
    double share = -1;
    char err[256];
    (void)state;
    assert_int_equal(bt_front_access_share("off", &share, err, sizeof(err)), BT_OK);
    assert_true(share == 0);
    assert_int_equal(bt_front_access_share("all", &share, err, sizeof(err)), BT_OK);
    assert_true(share == 1);
    assert_int_equal(bt_front_access_share("0.25", &share, err, sizeof(err)), BT_OK);
    assert_true(share == 0.25);
    for (size_t i = 0; i < BT_ARRAY_LEN(wrong); i++) {
        assert_int_equal(bt_front_access_share(wrong[i], &share, err, sizeof(err)), BT_ERR_CONFIG);
        assert_non_null(strstr(err, "conductor.access_log"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_every_answer_has_an_id, close_all),
        cmocka_unit_test_teardown(test_lines, close_all),
        cmocka_unit_test_teardown(test_pipelined, close_all),
        cmocka_unit_test_teardown(test_sample, close_all),
        cmocka_unit_test(test_share),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
