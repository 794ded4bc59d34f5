/* API keys at the front: scopes, keys that end, the file that changes while requests run, and what
 * the log has of it. The form of a line is test_api_keys.c's. */
#include "tests/unit/virtual_clock.h"

#include "tests/unit/front_fixture.h"

#include "common/log/log.h"

static char path[] = "/tmp/test_front_keys_XXXXXX";
static int reader = -1, own_stderr = -1;
static char text[65536];

static void write_keys(const char *lines, mode_t mode)
{
    char next[sizeof(path) + 4];
    snprintf(next, sizeof(next), "%s.new", path);
    FILE *file = fopen(next, "w");
    assert_non_null(file);
    fputs(lines, file);
    fclose(file);
    assert_int_equal(chmod(next, mode), 0);
    assert_int_equal(rename(next, path), 0);
}

#define KEYS                                                                                       \
    "infer tenant=t concurrency=2\nscrape scopes=metrics\nboth scopes=metrics,inference "          \
    "tenant=t\n"                                                                                   \
    "boss id=boss scopes=admin\nold id=former expires=2020-01-01\n"                                \
    "gone id=thief revoked=2026-05-01T10:00:00Z\n"

static int open_all(void **state)
{
    (void)state;
    int ends[2];
    strcpy(path + sizeof(path) - 7, "XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(pipe2(ends, O_NONBLOCK | O_CLOEXEC), 0);
    own_stderr = dup(STDERR_FILENO);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    close(ends[1]);
    reader = ends[0];
    write_keys(KEYS, 0600);
    access_share = 1;
    open_front(path, tmpl);
    return 0;
}

static int close_all(void **state)
{
    teardown(state);
    access_share = 0;
    dup2(own_stderr, STDERR_FILENO);
    close(own_stderr);
    close(reader);
    unlink(path);
    return 0;
}

/* What the log has had since the last call, in text. */
static const char *logged(void)
{
    ssize_t n = read(reader, text, sizeof(text) - 1);
    text[n > 0 ? n : 0] = '\0';
    return text;
}

static void ask(const char *method, const char *to, const char *key, int status)
{
    char headers[160] = "";
    static const char body[] = "{}";
    if (key != NULL) {
        snprintf(headers, sizeof(headers), "%s\r\n", key);
    }
    receive(send_raw(method, to, headers, body, strcmp(method, "POST") == 0 ? 2 : 0));
    if (ans.status != status) {
        fail_msg("%s %s with %s: %d %s", method, to, key != NULL ? key : "no key", ans.status,
                 ans.body);
    }
}

#define INFER  "Authorization: Bearer infer"
#define SCRAPE "Authorization: Bearer scrape"

static void a_scope_opens_its_routes(void **state)
{
    (void)state;
    ask("GET", "/health", NULL, 200);
    ask("GET", "/version", NULL, 200);
    ask("GET", "/metrics", NULL, 401);
    ask("GET", "/metrics", SCRAPE, 200);
    ask("GET", "/metrics", "api-key: both", 200);
    ask("GET", "/v1/models", "api-key: both", 200);
    ask("GET", "/v1/models", INFER, 200);
    ask("GET", "/metrics", INFER, 403);
    assert_non_null(strstr(ans.body, "\"code\":\"insufficient_scope\""));
    assert_non_null(
        strstr(ans.body, "has the scope inference, but this route needs the scope metrics"));
    assert_non_null(strstr(ans.head, "WWW-Authenticate: Bearer error=\"insufficient_scope\", "
                                     "scope=\"metrics\"\r\n"));
    ask("POST", "/v1/chat/completions", SCRAPE, 403);
    ask("POST", "/v1/messages", "x-api-key: scrape", 403);
    assert_non_null(strstr(ans.body, "permission_error"));
    ask("POST", "/v1/messages", "x-api-key: nobody", 401);
    assert_non_null(strstr(ans.body, "authentication_error"));
    ask("GET", "/v1/models", "Authorization: Bearer infer\r\napi-key: both", 401);
    ask("GET", "/v1/models", "Authorization: Bearer infer\r\napi-key: infer", 200);
    ask("GET", "/v1/models", "api-key: infer\r\napi-key: both", 400);
    ask("GET", "/nothing", SCRAPE, 404);
    ask("GET", "/nothing", NULL, 401);
    const char *log = logged();
    assert_non_null(strstr(log, "ev=keys_plain"));
    assert_non_null(strstr(log, "ev=key_refused"));
    assert_non_null(strstr(log, "tenant=t key="));
    assert_null(strstr(log, "Bearer"));
    assert_null(strstr(log, "scrape"));
}

static void a_key_that_ended_says_so(void **state)
{
    (void)state;
    ask("GET", "/v1/models", "api-key: old", 401);
    assert_non_null(strstr(ans.body, "(id former) expired at 2020-01-01T00:00:00Z"));
    ask("GET", "/v1/models", "api-key: gone", 401);
    assert_non_null(strstr(ans.body, "(id thief) was revoked at 2026-05-01T10:00:00Z"));
    ask("GET", "/metrics", SCRAPE, 200);
    assert_non_null(strstr(ans.body, "baton_http_keys_refused_total{reason=\"expired_key\"} 1\n"));
    assert_non_null(strstr(ans.body, "baton_http_keys_refused_total{reason=\"revoked_key\"} 1\n"));
    assert_non_null(strstr(ans.body, "baton_http_keys_refused_total{reason=\"no_key\"} 0\n"));
}

/* A thousand guesses are lines of a few seconds. */
static void guesses_do_not_fill_the_log(void **state)
{
    (void)state;
    (void)logged();
    clock_stop();
    for (int i = 0; i < 50; i++) {
        ask("GET", "/v1/models", "api-key: guess", 401);
    }
    clock_go_on();
    int lines = 0;
    for (const char *s = logged(); (s = strstr(s, "ev=key_refused")) != NULL; s++) {
        lines++;
    }
    assert_int_equal(lines, 1);
}

/* The front looks at its file; what it logs is in text. */
static void look(void)
{
    (void)logged();
    loop_pass(loop, 2500);
    (void)logged();
}

static int begin_as(const char *key)
{
    static const char body[] = "{\"prompt\":\"a\"}";
    char headers[80];
    int before = n_started;
    snprintf(headers, sizeof(headers), "api-key: %s\r\n", key);
    int fd = send_raw("POST", "/v1/completions", headers, body, sizeof(body) - 1);
    WAIT_FOR(n_started > before);
    return fd;
}

static void a_new_file_counts_within_seconds(void **state)
{
    (void)state;
    int first = begin_as("infer"), second = begin_as("both");
    ask("POST", "/v1/completions", "api-key: infer", 429); /* concurrency=2 of the tenant */
    write_keys("infer tenant=t concurrency=2 revoked=2026-01-01\nboth tenant=t\nnew tenant=t\n",
               0600);
    look();
    assert_non_null(strstr(text, "ev=audit who=file what=keys_reload"));
    assert_non_null(strstr(text, "result=ok keys=3 added=1 removed=4 revoked=1"));
    ask("GET", "/v1/models", "api-key: infer", 401);
    ask("GET", "/v1/models", "api-key: boss", 401);
    ask("GET", "/v1/models", "api-key: new", 200);
    /* The limits are the tenant's: what runs still counts, and goes on to its end. */
    ask("POST", "/v1/completions", "api-key: new", 429);
    done_with(live[0], 1, 0);
    receive(first);
    assert_int_equal(ans.status, 200);
    int third = begin_as("new");
    write_keys("elsewhere tenant=u\n", 0600); /* the tenant is gone while its requests run */
    look();
    done_with(live[1], 1, 0);
    receive(second);
    assert_int_equal(ans.status, 200);
    write_keys("infer tenant=t concurrency=1\n", 0600); /* and comes back */
    look();
    ask("POST", "/v1/completions", "api-key: infer", 429);
    done_with(now, 1, 0);
    receive(third);
    int fourth = begin_as("infer");
    done_with(now, 1, 0);
    receive(fourth);
    assert_int_equal(ans.status, 200);
}

static void a_wrong_file_changes_nothing(void **state)
{
    (void)state;
    static const struct {
        const char *lines, *why;
        mode_t mode;
    } wrong[] = {{"infer\nsha256:123\n", ":2: sha256:", 0600},
                 {"other\n", "chmod", 0644},
                 {"# nothing\n", "contains no key", 0600}};
    for (size_t i = 0; i < BT_ARRAY_LEN(wrong); i++) {
        write_keys(wrong[i].lines, wrong[i].mode);
        look();
        assert_non_null(strstr(text, "result=failed"));
        if (strstr(text, wrong[i].why) == NULL) {
            fail_msg("no %s in %s", wrong[i].why, text);
        }
        ask("GET", "/v1/models", INFER, 200);
        ask("GET", "/v1/models", "api-key: other", 401);
    }
    look(); /* says it once */
    assert_null(strstr(text, "ev=audit"));
    assert_int_equal(chmod(path, 0600), 0);
    unlink(path);
    look();
    assert_non_null(strstr(text, "No such file"));
    ask("GET", "/v1/models", INFER, 200);
    write_keys("other\n", 0600);
    look();
    ask("GET", "/v1/models", INFER, 401);
    ask("GET", "/v1/models", "api-key: other", 200);
}

static void administrators_need_their_scope(void **state)
{
    (void)state;
    static const struct {
        const char *shown, *why;
        bool known;
    } bad[] = {{NULL, "--key-file", false},
               {"Bearer nobody", "a valid API key is required", false},
               {"boss", "a valid API key is required", false},
               {"Bearer infer", "needs the scope admin", true},
               {"Bearer gone", "was revoked", false}};
    char id[33] = "", why[512];
    bool known = true;
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        assert_false(bt_front_admin_key(front, bad[i].shown, id, &known, why, sizeof(why)));
        assert_int_equal(known, bad[i].known);
        if (strstr(why, bad[i].why) == NULL) {
            fail_msg("no %s in %s", bad[i].why, why);
        }
    }
    assert_true(bt_front_admin_key(front, "Bearer boss", id, &known, why, sizeof(why)));
    assert_string_equal(id, "boss");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_scope_opens_its_routes, open_all, close_all),
        cmocka_unit_test_setup_teardown(a_key_that_ended_says_so, open_all, close_all),
        cmocka_unit_test_setup_teardown(guesses_do_not_fill_the_log, open_all, close_all),
        cmocka_unit_test_setup_teardown(a_new_file_counts_within_seconds, open_all, close_all),
        cmocka_unit_test_setup_teardown(a_wrong_file_changes_nothing, open_all, close_all),
        cmocka_unit_test_setup_teardown(administrators_need_their_scope, open_all, close_all),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
