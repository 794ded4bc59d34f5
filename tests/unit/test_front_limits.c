/* What the front refuses by a header alone, and what a key may take. Fixture: front_fixture.h. */
#include "tests/unit/front_fixture.h"

#include <poll.h>

static char keys_path[64];

static int open_keys(const char *text)
{
    strcpy(keys_path, "/tmp/test_front_limits_XXXXXX");
    int fd = mkstemp(keys_path); /* mode 0600 */
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    open_front(keys_path, tmpl);
    return 0;
}

static int setup_keys(void **state)
{
    (void)state;
    return open_keys("sk-one\nsk-two\n");
}

static int teardown_keys(void **state)
{
    unlink(keys_path);
    return teardown(state);
}

#define ONE "Authorization: Bearer sk-one\r\n"
#define TWO "Authorization: Bearer sk-two\r\n"

/* Sends a header that announces a body of so many bytes, and none of them; expects an answer. */
static void announce(const char *path, const char *headers, size_t len, int status)
{
    char text[512];
    snprintf(text, sizeof(text),
             "POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %zu\r\n%s\r\n",
             path, len, headers);
    int fd = dial();
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), strlen(text));
    receive(fd);
    if (ans.status != status) {
        fail_msg("%s: %d instead of %d: %s", path, ans.status, status, ans.body);
    }
}

static void test_refused_before_the_body(void **state)
{
    (void)state;
    announce("/v1/completions", "", 4000000, 401);
    announce("/tokenize", "Authorization: Bearer sk-none\r\n", 4000000, 401);
    announce("/v1/completions", "Expect: 100-continue\r\n", 2, 401);
    announce("/nothing", ONE, 4000000, 404);
    announce("/health", ONE, 4000000, 405);
    announce("/tokenize", ONE "Content-Type: text/plain\r\n", 4000000, 415);
    announce("/tokenize", ONE, 5000000, 413);
    assert_non_null(strstr(ans.body, "4194304 bytes (conductor.http.body_max)"));
}

/* Routes without a key need no body: one that is announced takes no place of the total. */
static void test_open_routes_take_no_body(void **state)
{
    (void)state;
    static const char *const paths[] = {"/health", "/version", "/openapi.json"};
    for (size_t i = 0; i < BT_ARRAY_LEN(paths); i++) {
        char text[256];
        snprintf(text, sizeof(text),
                 "GET %s HTTP/1.1\r\nHost: a\r\nContent-Length: 4000000\r\n\r\n", paths[i]);
        int fd = dial();
        assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), strlen(text));
        receive(fd); /* the answer and its end, though no byte of the body is sent */
        assert_int_equal(ans.status, 200);
    }
}

/* Which of two would be meant? A proxy in front may have checked the other one. */
static void test_two_of_a_header(void **state)
{
    (void)state;
    static const char *const twice[] = {ONE TWO, TWO ONE, ONE "authorization: Basic x\r\n",
                                        ONE "Content-Type: application/json\r\n"
                                            "Content-Type: application/json; charset=latin1\r\n",
                                        ONE "X-Request-Id: 1\r\nX-Request-Id: 2\r\n"};
    for (size_t i = 0; i < BT_ARRAY_LEN(twice); i++) {
        receive(send_raw("GET", "/v1/models", twice[i], "", 0));
        assert_int_equal(ans.status, 400);
        assert_non_null(strstr(ans.body, "more than once with different values"));
    }
    receive(send_raw("GET", "/v1/models", ONE ONE, "", 0));
    assert_int_equal(ans.status, 200);
    receive(send_raw("POST", "/v1/completions", ONE "x-baton-timings: 1\r\nx-baton-timings: 0\r\n",
                     "{\"prompt\":\"a\"}", 14));
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "x-baton-timings"));
}

/* ---- limits of a key ---- */

static int setup_limits(void **state)
{
    (void)state;
    return open_keys("sk-one rps=0.02\nsk-two tokens_per_s=1\nsk-few concurrency=4\nsk-free\n");
}

#define FEW "Authorization: Bearer sk-few\r\n"

static bool readable(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0) > 0;
}

/* Starts n requests of the machine; -1: it was answered at once (ans). */
static int begin_as(const char *headers, const char *body, int n)
{
    int before = n_started;
    int fd = send_raw("POST", "/v1/completions", headers, body, strlen(body));
    WAIT_FOR(n_started == before + n || readable(fd));
    if (n_started < before + n) {
        receive(fd);
        return -1;
    }
    return fd;
}

static void leave(int fd, int n)
{
    int before = n_cancelled;
    close(fd);
    WAIT_FOR(n_cancelled == before + n);
}

static void expect_429(const char *says)
{
    assert_int_equal(ans.status, 429);
    assert_non_null(strstr(ans.head, "Retry-After: "));
    assert_non_null(strstr(ans.body, "rate_limit_exceeded"));
    if (strstr(ans.body, says) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", ans.body, says);
    }
}

static void test_choices_are_requests(void **state)
{
    (void)state;
    /* 17 are more than a key of this limit may ever send at once */
    assert_int_equal(begin_as(ONE, "{\"prompt\":[[1],[1],[1],[1],[1],[1],[1],[1],[1]],\"n\":2}", 9),
                     -1);
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "counts as 18 requests"));
    assert_non_null(strstr(ans.body, "rps=0.02 this API key may send 16 at once"));
    assert_non_null(strstr(ans.body, "exceeds_key_limit"));
    bt_front_destroy(front); /* what reading that body took is back */
    bt_metrics_destroy(metrics);
    bt_loop_destroy(loop);
    open_front(keys_path, tmpl);
    int fd = begin_as(ONE, "{\"prompt\":[[1],[1],[1],[1]],\"n\":4}", 4);
    assert_true(fd >= 0);
    leave(fd, 4);
    announce("/v1/completions", ONE, 1000000, 429); /* without its body */
    expect_429("requests a second");
    int s = atoi(strstr(ans.head, "Retry-After: ") + 13);
    assert_true(s > 780 && s <= 801); /* 16 are paid back and one more is there, at 0.02 a second */
}

/* Counting tokens is work as well. */
static void test_tokenize_has_the_same_limits(void **state)
{
    (void)state;
    static const char text[] = "{\"prompt\":\"to be or not to be, that is the question, to be it "
                               "or not, that is the answer; to be or not to be, that is it\"}";
    receive(send_raw("POST", "/tokenize", ONE, text, sizeof(text) - 1));
    assert_int_equal(ans.status, 200);
    announce("/tokenize", ONE, 1000, 429);
    expect_429("requests a second");
    announce("/detokenize", ONE, 1000, 429);
    announce("/v1/chat/completions", ONE, 1000, 429);
    receive(send_raw("POST", "/tokenize", TWO, text, sizeof(text) - 1));
    assert_int_equal(ans.status, 200);
    announce("/tokenize", TWO, 1000, 429);
    expect_429("tokens a second");
    receive(send_raw("GET", "/v1/models", ONE, "", 0)); /* costs nothing */
    assert_int_equal(ans.status, 200);
    announce("/nothing", ONE, 1000, 404);
}

/* The other APIs count as chat does, and a key in x-api-key is the same key. */
static void test_other_apis_have_the_same_limits(void **state)
{
    (void)state;
    static const char count[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"to be or not to be, "
        "that is the question, to be it or not, that is the answer\"}]}";
    static const char *const paths[] = {"/v1/messages", "/v1/messages/count_tokens",
                                        "/v1/responses", "/tokenize"};
    receive(send_raw("POST", "/v1/messages/count_tokens", "x-api-key: sk-two\r\n", count,
                     sizeof(count) - 1));
    assert_int_equal(ans.status, 200);
    for (size_t i = 0; i < BT_ARRAY_LEN(paths); i++) {
        announce(paths[i], TWO, 1000, 429);
        assert_non_null(strstr(ans.body, "tokens a second"));
        assert_non_null(strstr(ans.head, "\r\nRetry-After: "));
    }
}

/* A large body is several requests, whatever is in it. */
static void test_body_is_work(void **state)
{
    (void)state;
    char *body = bt_malloc(1 << 20);
    memset(body, ' ', 1 << 20);
    memcpy(body, "{\"prompt\":\"a\"}", 14);
    receive(send_raw("POST", "/tokenize", ONE, body, 1 << 20));
    free(body);
    assert_int_equal(ans.status, 200);
    announce("/tokenize", ONE, 10, 429);
    int s = atoi(strstr(ans.head, "Retry-After: ") + 13);
    assert_true(s > 180 && s <= 201); /* four, and one more */
}

static void test_concurrency(void **state)
{
    (void)state;
    static const char one[] = "{\"prompt\":[1]}";
    assert_int_equal(begin_as(FEW, "{\"prompt\":[[1],[2],[3],[4],[5]]}", 5), -1);
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "concurrency=4"));
    int a = begin_as(FEW, "{\"prompt\":[1],\"n\":3}", 1);
    assert_true(a >= 0);
    assert_int_equal(begin_as(FEW, "{\"prompt\":[1],\"n\":2}", 1), -1);
    expect_429("generations in flight");
    int b = begin_as(FEW, one, 1);
    assert_true(b >= 0);
    announce("/v1/completions", FEW, 1000, 429);
    expect_429("generations in flight");
    receive(send_raw("POST", "/tokenize", FEW, one, sizeof(one) - 1));
    assert_int_equal(ans.status, 200);
    int other = begin_as("Authorization: Bearer sk-free\r\n", "{\"prompt\":[1],\"n\":8}", 1);
    assert_true(other >= 0);
    leave(other, 1);
    done_with(live[n_started - 2], 3, 0); /* b's */
    receive(b);
    assert_int_equal(ans.status, 200);
    b = begin_as(FEW, one, 1);
    assert_true(b >= 0);
    leave(a, 1); /* one that leaves gives its places back, too */
    a = begin_as(FEW, "{\"prompt\":[1],\"n\":3}", 1);
    assert_true(a >= 0);
    fail_with(now, 500, "broken", 0);
    receive(a);
    assert_int_equal(ans.status, 500);
    a = begin_as(FEW, "{\"prompt\":[1],\"n\":3}", 1);
    assert_true(a >= 0);
    leave(a, 1);
    leave(b, 1);
}

/* More prompts than there are places: waiting would not help. */
static void test_more_prompts_than_places(void **state)
{
    (void)state;
    prompts_max = 3;
    assert_int_equal(begin_as(FEW, "{\"prompt\":[[1],[2],[3],[4]]}", 4), -1);
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "conductor.max_waiting"));
    int fd = begin_as(FEW, "{\"prompt\":[[1],[2],[3]]}", 3);
    assert_true(fd >= 0);
    leave(fd, 3);
    prompts_max = UINT32_MAX;
}

/* What was generated counts also if the client leaves before the end. */
static void test_tokens_of_one_that_leaves(void **state)
{
    (void)state;
    int fd = begin_as(TWO, "{\"prompt\":[1],\"stream\":true}", 1);
    assert_true(fd >= 0);
    for (int i = 0; i < 20; i++) {
        token("x", 5);
    }
    leave(fd, 1);
    announce("/v1/completions", TWO, 1000, 429);
    expect_429("tokens a second");
}

static void test_without_keys(void **state)
{
    (void)state;
    announce("/nothing", "", 4000000, 404);
    announce("/v1/models", "", 4000000, 405);
    receive(send_raw("GET", "/v1/models", ONE TWO, "", 0));
    assert_int_equal(ans.status, 400);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn, with) cmocka_unit_test_setup_teardown(fn, with, teardown_keys)
        T(test_refused_before_the_body, setup_keys),
        T(test_open_routes_take_no_body, setup_keys),
        T(test_two_of_a_header, setup_keys),
        T(test_choices_are_requests, setup_limits),
        T(test_tokenize_has_the_same_limits, setup_limits),
        T(test_other_apis_have_the_same_limits, setup_limits),
        T(test_body_is_work, setup_limits),
        T(test_concurrency, setup_limits),
        T(test_more_prompts_than_places, setup_limits),
        T(test_tokens_of_one_that_leaves, setup_limits),
        cmocka_unit_test_setup_teardown(test_without_keys, setup, teardown),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
