/* Answers that are long or are not read: they are made as fast as they are read, in slices of the
 * loop's time, within a bound of memory. Fixture: front_fixture.h. */
#include "tests/unit/front_fixture.h"

#define TOKENS 8000
#define TOPS   20
#define TICK_NS                                                                                    \
    (sanitized() ? UINT64_MAX : 20000000ull) /* CPU of the thread: others cannot lengthen it */

static bool sanitized(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return true;
#else
    return false;
#endif
}

/* ---- what a turn of the loop takes ---- */

static uint64_t longest_ns;

static void on_tick(void *arg, const struct bt_loop_tick *t)
{
    (void)arg;
    longest_ns = BT_MAX(longest_ns, t->cpu_ns);
}

static int open_with(size_t max)
{
    answers_max = max;
    open_front(NULL, tmpl);
    longest_ns = 0;
    bt_loop_watch(loop, on_tick, NULL);
    return 0;
}

static int setup_output(void **state)
{
    (void)state;
    return open_with(0);
}

static int setup_small(void **state)
{
    (void)state;
    return open_with(16 * 1024 * 1024);
}

static int teardown_output(void **state)
{
    answers_max = 0;
    return teardown(state);
}

static double held_bytes(void)
{
    static const char name[] = "baton_http_answer_bytes{of=\"generations\"} ";
    receive(send_raw("GET", "/metrics", "", "", 0));
    assert_int_equal(ans.status, 200);
    const char *at = strstr(ans.body, name);
    assert_non_null(at);
    return strtod(at + sizeof(name) - 1, NULL);
}

static size_t resident(void)
{
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%*u %lu", &pages), 1);
    fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* ---- requests ---- */

/* n_prompts prompts of TOKENS tokens and what else the body says. */
static struct bt_buf body_with(int n_prompts, const char *more)
{
    struct bt_buf b = {0};
    bt_buf_printf(&b, "{%s,\"max_tokens\":1,\"prompt\":[", more);
    for (int k = 0; k < n_prompts; k++) {
        bt_buf_puts(&b, k == 0 ? "[41" : ",[41");
        for (int i = 1; i < TOKENS; i++) {
            bt_buf_puts(&b, ",41");
        }
        bt_buf_puts(&b, "]");
    }
    bt_buf_puts(&b, "]}");
    return b;
}

static int begin_with(int n_prompts, const char *more)
{
    struct bt_buf b = body_with(n_prompts, more);
    int before = n_started, fd = begin("/v1/completions", b.data);
    bt_buf_cleanup(&b);
    WAIT_FOR(n_started == before + n_prompts);
    return fd;
}

static void refused(int n_prompts, const char *more, int status, const char *word)
{
    struct bt_buf b = body_with(n_prompts, more);
    receive(post("/v1/completions", b.data));
    bt_buf_cleanup(&b);
    assert_int_equal(ans.status, status);
    if (strstr(ans.body, word) == NULL) {
        fail_msg("no %s: %s", word, ans.body);
    }
}

static void tell_tokens(struct bt_request *r)
{
    uint32_t tops[TOPS];
    float lps[TOPS];
    struct bt_gen_token *t = bt_calloc(TOKENS, sizeof(*t));
    for (uint32_t k = 0; k < TOPS; k++) {
        tops[k] = 300 + 7 * k;
        lps[k] = -0.123456f * (float)(k + 1);
    }
    for (int i = 0; i < TOKENS; i++) {
        t[i] = (struct bt_gen_token){.id = 41,
                                     .logprob = i == 0 ? NAN : -(float)i,
                                     .n_top = i == 0 ? 0 : r->spec.prompt_top,
                                     .top_id = tops,
                                     .top_logprob = lps};
    }
    r->ops->on_prompt(r->arg, t, TOKENS);
    free(t);
}

static void finish_all(struct bt_request *r)
{
    struct bt_gen_token t = {.id = 42, .logprob = -0.5f};
    for (uint32_t i = 0; i < r->spec.n; i++) {
        delta_to(r, i, "x", &t, 1);
        r->ops->on_finish(r->arg, i, BT_FINISH_LENGTH, NULL);
    }
    done_with(r, r->spec.n, 0);
}

/* Reads an answer of any length; closes fd. */
static struct bt_buf receive_all(int fd)
{
    struct bt_buf all = {0};
    static char part[1024 * 1024];
    uint64_t until = bt_mono_ns() + 2 * PATIENCE_MS * 1000000ull;
    for (ssize_t n = 1; n != 0;) {
        assert_true(bt_mono_ns() < until);
        bt_loop_poll(loop, 0);
        n = recv(fd, part, sizeof(part), 0);
        if (n > 0) {
            bt_buf_append(&all, part, (size_t)n);
        }
    }
    close(fd);
    return all;
}

/* ---- the tests ---- */

#define ECHO_ALL "\"echo\":true,\"logprobs\":20,\"n\":16"

/* 12 clients ask for 44 MB each and read nothing: a prompt is kept once. Another client is served;
 * when they leave, all of it is free. */
static void test_unread(void **state)
{
    (void)state;
    int fds[12];
    size_t before = resident();
    for (int i = 0; i < 12; i++) {
        fds[i] = begin_with(1, ECHO_ALL);
        struct bt_request *r = now;
        tell_tokens(r);
        finish_all(r);
        for (int k = 0; k < 20; k++) {
            bt_loop_poll(loop, 0);
        }
    }
    assert_int_equal(bt_front_open(front), 12);
    assert_true(held_bytes() < 12 * 2e6 && held_bytes() > 12 * 1e6);
    if (!sanitized()) {
        assert_true(resident() - before < 64 * 1024 * 1024);
    }
    json_t *j = get_json("/version");
    json_decref(j);
    for (int i = 0; i < 12; i++) {
        close(fds[i]);
    }
    WAIT_FOR(bt_front_open(front) == 0);
    WAIT_FOR(held_bytes() == 0);
    assert_true(longest_ns < TICK_NS);
}

static void check_choice(json_t *lp, size_t n)
{
    static const char *const arrays[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    for (size_t k = 0; k < BT_ARRAY_LEN(arrays); k++) {
        assert_int_equal(json_array_size(at(lp, arrays[k])), n);
    }
    for (size_t i = 1; i < TOKENS; i++) {
        assert_true(json_number_value(json_array_get(at(lp, "token_logprobs"), i)) == -(double)i);
        assert_int_equal(json_object_size(json_array_get(at(lp, "top_logprobs"), i)), TOPS + 1);
    }
}

/* It is whole when it is read, and no turn was long. */
static void test_read_at_last(void **state)
{
    (void)state;
    int fd = begin_with(1, "\"echo\":true,\"logprobs\":20,\"n\":2,\"prompt_logprobs\":1");
    struct bt_request *r = now;
    tell_tokens(r);
    finish_all(r);
    struct bt_buf all = receive_all(fd);
    json_t *j = parse(strstr(all.data, "\r\n\r\n") + 4);
    for (int i = 0; i < 2; i++) {
        json_t *c = json_array_get(at(j, "choices"), (size_t)i);
        assert_int_equal(json_integer_value(at(c, "index")), i);
        assert_int_equal(json_array_size(at(c, "prompt_logprobs")), TOKENS);
        assert_string_equal(str_at(c, "finish_reason"), "length");
        check_choice(at(c, "logprobs"), TOKENS + 1);
        json_t *offsets = at(c, "logprobs.text_offset");
        assert_int_equal(json_integer_value(json_array_get(offsets, TOKENS)),
                         strlen(str_at(c, "text")) - 1);
    }
    json_decref(j);
    bt_buf_cleanup(&all);
    assert_true(longest_ns < TICK_NS);
}

/* Text of all lengths of characters, so long that it is cut in many places. */
static void test_text_is_cut_between_characters(void **state)
{
    (void)state;
    static const char *const chars[] = {"a",  "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80",
                                        "\"", "\n"};
    struct bt_buf text = {0};
    for (unsigned i = 0; i < 120000; i++) {
        bt_buf_puts(&text, chars[(i * 7 + i / 11) % BT_ARRAY_LEN(chars)]);
    }
    int fd = begin("/v1/completions", "{\"prompt\":\"a\"}");
    struct bt_request *r = now;
    delta_to(r, 0, text.data, NULL, 0);
    r->ops->on_finish(r->arg, 0, BT_FINISH_STOP, NULL);
    done_with(r, 1, 0);
    struct bt_buf all = receive_all(fd);
    json_t *j = parse(strstr(all.data, "\r\n\r\n") + 4);
    assert_string_equal(str_at(j, "choices.0.text"), text.data);
    json_decref(j);
    bt_buf_cleanup(&all);
    bt_buf_cleanup(&text);
}

/* Each event that begins with its prompt is whole, and what comes meanwhile stands behind it. */
static void test_stream_echo(void **state)
{
    (void)state;
    int fd = begin_with(1, "\"echo\":true,\"logprobs\":20,\"n\":2,\"stream\":true"), events = 0;
    struct bt_request *r = now;
    struct bt_gen_token t = {.id = 43, .logprob = -0.25f};
    tell_tokens(r);
    delta_to(r, 1, "first", &t, 1);
    bt_loop_poll(loop, 0);
    delta_to(r, 1, "second", &t, 1);
    bt_loop_poll(loop, 0);
    r->ops->on_finish(r->arg, 1, BT_FINISH_STOP, NULL);
    r->ops->on_finish(r->arg, 0, BT_FINISH_LENGTH, NULL); /* without any text */
    done_with(r, 2, 0);
    assert_int_equal(bt_front_open(front), 1);
    struct bt_buf all = receive_all(fd);
    assert_int_equal(bt_front_open(front), 0);
    char *save = NULL;
    for (char *line = strtok_r(all.data, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        if (strncmp(line, "data: {", 7) != 0) {
            continue;
        }
        json_t *j = parse(line + 6), *lp = at(j, "choices.0.logprobs");
        const char *text = str_at(j, "choices.0.text");
        int64_t index = json_integer_value(at(j, "choices.0.index"));
        size_t len = strlen(text);
        assert_int_equal(index, events == 3 ? 0 : 1);
        if (events == 0) {
            assert_true(len > TOKENS && strcmp(text + len - 5, "first") == 0);
            check_choice(lp, TOKENS + 1);
        } else if (events == 1) {
            assert_string_equal(text, "second");
            assert_int_equal(json_array_size(at(lp, "tokens")), 1);
        } else if (events == 2) {
            assert_string_equal(str_at(j, "choices.0.finish_reason"), "stop");
        } else {
            check_choice(lp, TOKENS);
            assert_string_equal(str_at(j, "choices.0.finish_reason"), "length");
        }
        events++;
        json_decref(j);
    }
    assert_int_equal(events, 4);
    bt_buf_cleanup(&all);
    assert_true(longest_ns < TICK_NS);
}

/* What is unread is bounded; a client that goes on to read finds the reason behind it. */
static void expect_reason(int fd)
{
    char part[65536];
    struct bt_buf all = {0};
    uint64_t until = bt_mono_ns() + PATIENCE_MS * 1000000ull;
    for (ssize_t n = 1; n != 0;) {
        n = recv(fd, part, sizeof(part), 0);
        if (n > 0) {
            bt_buf_append(&all, part, (size_t)n);
        } else if (n < 0) {
            assert_true(bt_mono_ns() < until);
            bt_loop_poll(loop, 1);
        }
    }
    assert_non_null(strstr(all.data + all.len - BT_MIN(all.len, (size_t)600), "so it ends here"));
    bt_buf_cleanup(&all);
    close(fd);
    WAIT_FOR(bt_front_open(front) == 0);
}

/* A client that does not read an echo, and whose tokens go on: its stream ends. */
static void test_stream_unread(void **state)
{
    (void)state;
    int fd = begin_with(1, "\"echo\":true,\"logprobs\":20,\"stream\":true");
    struct bt_request *r = now;
    tell_tokens(r);
    char *text = bt_calloc(1, 65537);
    memset(text, 'y', 65536);
    for (int i = 0; i < 1000 && n_cancelled == 0; i++) {
        delta_to(r, 0, text, NULL, 0);
        bt_loop_poll(loop, 0);
        bt_loop_poll(loop, 0);
    }
    assert_int_equal(n_cancelled, 1);
    free(text);
    expect_reason(fd);
}

/* The same of the other APIs' streams: one that is written, and one that is pulled. */
static void test_other_streams_unread(void **state)
{
    (void)state;
    static const char *const bodies[][2] = {
        {"/v1/messages", "{\"max_tokens\":99,\"stream\":true,\"messages\":[{\"role\":\"user\","
                         "\"content\":\"a\"}]}"},
        {"/v1/responses", "{\"stream\":true,\"input\":\"a\"}"}};
    char *text = bt_calloc(1, 65537);
    memset(text, 'y', 65536);
    for (size_t k = 0; k < BT_ARRAY_LEN(bodies); k++) {
        int fd = begin(bodies[k][0], bodies[k][1]);
        struct bt_request *r = now;
        n_cancelled = 0;
        for (int i = 0; i < 1000 && n_cancelled == 0; i++) {
            delta_to(r, 0, text, NULL, 0);
            bt_loop_poll(loop, 0);
            bt_loop_poll(loop, 0);
        }
        assert_int_equal(n_cancelled, 1);
        expect_reason(fd);
        WAIT_FOR(held_bytes() == 0);
    }
    free(text);
}

/* The end of a response repeats its text four times. It is held once, and made as it is read. */
static void test_response_unread(void **state)
{
    (void)state;
    enum { N = 32, SIZE = 65536 };
    int fd = begin("/v1/responses", "{\"stream\":true,\"input\":\"a\"}");
    struct bt_request *r = now;
    struct bt_buf all = {0};
    char *text = bt_calloc(1, SIZE + 1), part[65536];
    memset(text, 'y', SIZE);
    for (int i = 0; i < N; i++) {
        delta_to(r, 0, text, NULL, 0);
        for (ssize_t n = 1; n != 0 && all.len < (size_t)i * SIZE;) {
            bt_loop_poll(loop, 0);
            n = recv(fd, part, sizeof(part), 0);
            bt_buf_append(&all, part, n > 0 ? (size_t)n : 0);
        }
    }
    longest_ns = 0;
    r->ops->on_finish(r->arg, 0, BT_FINISH_STOP, NULL);
    done_with(r, N, 0);
    for (int i = 0; i < 100; i++) { /* nothing is read */
        bt_loop_poll(loop, 0);
    }
    assert_int_equal(bt_front_open(front), 1);
    assert_true(held_bytes() < 2.5 * N * SIZE); /* the buffer of the text, and the last delta */
    struct bt_buf rest = receive_all(fd);
    bt_buf_append(&all, rest.data, rest.len);
    assert_true(all.len > 5 * (size_t)N * SIZE && all.len < 5.1 * N * SIZE);
    assert_non_null(strstr(rest.data, "event: response.completed\n"));
    assert_int_equal(bt_front_open(front), 0);
    assert_true(longest_ns < TICK_NS);
    bt_buf_cleanup(&rest);
    bt_buf_cleanup(&all);
    free(text);
}

/* An error behind a prompt that is still being sent, while another of its requests runs. */
static void test_stream_error(void **state)
{
    (void)state;
    int fd = begin_with(2, "\"echo\":true,\"logprobs\":20,\"stream\":true");
    struct bt_request *r = live[0];
    tell_tokens(r);
    delta_to(r, 0, "x", NULL, 0);
    bt_loop_poll(loop, 0);
    fail_with(r, 503, "lost", 1);
    WAIT_FOR(n_cancelled == 1); /* the other one, at once */
    assert_int_equal(bt_front_open(front), 1);
    struct bt_buf all = receive_all(fd);
    assert_non_null(strstr(all.data, "data: {\"error\":{\"message\":\"lost\""));
    assert_null(strstr(all.data, "[DONE]"));
    bt_buf_cleanup(&all);
    assert_int_equal(bt_front_open(front), 0);
}

/* Answers that are long texts leave in pieces as well. */
static void test_tokenize(void **state)
{
    (void)state;
    struct bt_buf b = {0};
    bt_buf_puts(&b, "{\"return_token_strs\":true,\"prompt\":\"");
    for (int i = 0; i < 40000; i++) {
        bt_buf_puts(&b, "forsooth, ");
    }
    bt_buf_puts(&b, "\"}");
    int leaver = post("/tokenize", b.data);
    WAIT_FOR(held_bytes() > 256 * 1024);
    assert_int_equal(bt_front_open(front), 1); /* a conductor that ends waits for it */
    close(leaver);
    WAIT_FOR(held_bytes() == 0);
    struct bt_buf all = receive_all(post("/tokenize", b.data));
    const char *length = strstr(all.data, "Content-Length: ");
    assert_non_null(length);
    assert_int_equal(strtoul(length + 16, NULL, 10), strlen(strstr(all.data, "\r\n\r\n") + 4));
    json_t *j = parse(strstr(all.data, "\r\n\r\n") + 4);
    size_t n = (size_t)json_integer_value(at(j, "count"));
    assert_true(n >= 80000);
    assert_int_equal(json_array_size(at(j, "tokens")), n);
    assert_int_equal(json_array_size(at(j, "token_strs")), n);
    json_decref(j);
    bt_buf_cleanup(&all);
    bt_buf_cleanup(&b);
    assert_true(held_bytes() == 0);
    assert_true(longest_ns < TICK_NS);
}

/* ---- bounds; of 16 MiB 12 are for generations, one may have 3 ---- */

static void test_refused_before_any_work(void **state)
{
    (void)state;
    refused(3, ECHO_ALL, 400, "conductor.http.answers_max");
    refused(40, "\"echo\":true,\"logprobs\":20,\"n\":16", 400, "at most 64 million");
    assert_int_equal(n_started, 0);
    int fds[8], n = 0;
    struct bt_buf b = body_with(1, ECHO_ALL);
    for (; n < 8; n++) { /* 1.5 MiB each; one address has half of 12 if nobody else has any */
        int before = n_started;
        char c;
        fds[n] = post("/v1/completions", b.data);
        WAIT_FOR(n_started > before || recv(fds[n], &c, 1, MSG_PEEK) == 1);
        if (n_started == before) {
            break;
        }
    }
    assert_int_equal(n, 3);
    receive(fds[n]);
    assert_int_equal(ans.status, 503);
    assert_non_null(strstr(ans.head, "Retry-After: "));
    assert_non_null(strstr(ans.body, "conductor.http.answers_max"));
    close(begin("/v1/completions", "{\"prompt\":\"a\"}")); /* a small one is served still */
    WAIT_FOR(n_cancelled == 1);
    close(fds[0]); /* whoever leaves makes room */
    WAIT_FOR(n_cancelled == 2);
    bt_loop_poll(loop, 10);
    fds[0] = begin("/v1/completions", b.data);
    bt_buf_cleanup(&b);
    for (int i = 0; i < n; i++) {
        close(fds[i]);
    }
    WAIT_FOR(n_cancelled == n + 2);
}

/* What is generated counts as well. */
static void test_growth(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":[\"a\",\"b\"]}");
    char *text = bt_calloc(1, 65537);
    memset(text, 'z', 65536);
    for (int i = 0; i < 100 && n_cancelled == 0; i++) {
        delta_to(live[0], 0, text, NULL, 0);
        bt_loop_poll(loop, 0);
    }
    assert_int_equal(n_cancelled, 2);
    receive(fd);
    assert_int_equal(ans.status, 400); /* it would never have room */
    assert_null(strstr(ans.head, "Retry-After: "));
    assert_non_null(strstr(ans.body, "conductor.http.answers_max"));
    WAIT_FOR(held_bytes() == 0);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn, setup_fn) cmocka_unit_test_setup_teardown(fn, setup_fn, teardown_output)
        T(test_unread, setup_output),
        T(test_read_at_last, setup_output),
        T(test_text_is_cut_between_characters, setup_output),
        T(test_stream_echo, setup_output),
        T(test_stream_unread, setup_output),
        T(test_other_streams_unread, setup_output),
        T(test_response_unread, setup_output),
        T(test_stream_error, setup_output),
        T(test_tokenize, setup_output),
        T(test_refused_before_any_work, setup_small),
        T(test_growth, setup_small),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
