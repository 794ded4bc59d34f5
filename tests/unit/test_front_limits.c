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
    snprintf(text, sizeof(text), "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %zu\r\n%s\r\n",
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
        assert_non_null(strstr(ans.body, "more than once, with different values"));
    }
    receive(send_raw("GET", "/v1/models", ONE ONE, "", 0));
    assert_int_equal(ans.status, 200);
    receive(send_raw("POST", "/v1/completions", ONE "x-baton-timings: 1\r\nx-baton-timings: 0\r\n",
                     "{\"prompt\":\"a\"}", 14));
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "x-baton-timings"));
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
        T(test_two_of_a_header, setup_keys),
        cmocka_unit_test_setup_teardown(test_without_keys, setup, teardown),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
