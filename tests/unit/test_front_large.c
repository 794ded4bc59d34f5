/* Bodies that take long to read: they are read beside the loop, so that nobody else waits; clients
 * that leave meanwhile, too many of them, and the front's end meanwhile. Fixture: front_fixture.h.
 */
#include "tests/unit/front_fixture.h"

#include <math.h>

/* Two texts of 1.9 MB: both are tokenized (hundreds of ms), then refused, because the route takes
 * one. The caller cleans up. */
static struct bt_buf large_body(void)
{
    struct bt_buf b = {0};
    for (int i = 0; i < 2; i++) {
        bt_buf_puts(&b, i == 0 ? "{\"prompt\":[\"" : "\",\"");
        for (int k = 0; k < 190000; k++) {
            bt_buf_puts(&b, "forsooth, ");
        }
    }
    bt_buf_puts(&b, "\"]}");
    return b;
}

static int send_large(const struct bt_buf *b)
{
    return send_raw("POST", "/tokenize", "Content-Type: application/json\r\n", b->data, b->len);
}

static void test_others_do_not_wait(void **state)
{
    (void)state;
    struct bt_buf b = large_body();
    int stream = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    int fd = send_large(&b);
    WAIT_FOR(bt_front_open(front) == 2); /* the stream, and the body that is being read */
    receive(send_raw("GET", "/version", "", "", 0));
    assert_int_equal(ans.status, 200);
    json_t *j = post_json("/tokenize", "{\"prompt\":\"ROMEO:\\n\"}"); /* the loop's own tokenizer */
    assert_int_equal(json_integer_value(at(j, "count")), 3);
    json_decref(j);
    token("x", 41);
    assert_int_equal(bt_front_open(front), 2); /* it is still being read */
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    done(1, 0);
    receive(stream);
    assert_non_null(strstr(ans.body, "[DONE]"));
    receive(fd);
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "2 prompts"));
    assert_int_equal(bt_front_open(front), 0);
    bt_buf_cleanup(&b);
}

/* What is read on the thread is what would be read on the loop. */
static void test_same_result(void **state)
{
    (void)state;
    struct bt_buf b = {0};
    bt_buf_puts(&b, "{\"max_tokens\":5,\"prompt\":\"");
    for (int i = 0; i < 1000; i++) {
        bt_buf_puts(&b, "forsooth, ");
    }
    bt_buf_puts(&b, "\"}");
    int fd = begin("/v1/completions", b.data);
    struct bt_tokens ids = {0};
    const char *text = strstr(b.data, "forsooth");
    assert_int_equal(bt_tokenizer_encode(tok, text, 10000, true, &ids), BT_OK);
    assert_int_equal(now->spec.prompt.n, ids.n);
    assert_memory_equal(now->spec.prompt.ids, ids.ids, ids.n * sizeof(ids.ids[0]));
    assert_int_equal(now->spec.max_tokens, 5);
    bt_tokens_cleanup(&ids);
    bt_buf_cleanup(&b);
    token("x", 41);
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(1, 0);
    receive(fd);
    assert_int_equal(ans.status, 200);
    /* chat: the thread has a template of its own */
    bt_buf_puts(&b, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
    for (int i = 0; i < 1000; i++) {
        bt_buf_puts(&b, "forsooth, ");
    }
    bt_buf_puts(&b, "\"}]}");
    fd = begin("/v1/chat/completions", b.data);
    assert_true(now->spec.prompt.n > 1000);
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    bt_buf_cleanup(&b);
}

/* ---- answers that are long: prompts' own logprobs ---- */

#define LONG 4000 /* tokens; each with two alternatives */

/* Tells r its prompt: LONG tokens of id 41 behind the first. */
static void tell_long_prompt(struct bt_request *r)
{
    static const uint32_t tops[] = {870, 40};
    static const float lps[] = {-1.5f, -2.5f};
    struct bt_gen_token *t = bt_calloc(LONG, sizeof(*t));
    for (int i = 0; i < LONG; i++) {
        t[i] = (struct bt_gen_token){
            .id = 41, .logprob = -(float)i, .n_top = 2, .top_id = tops, .top_logprob = lps};
    }
    t[0].logprob = NAN;
    t[0].n_top = 0;
    r->ops->on_prompt(r->arg, t, LONG);
    memset(t, 0xff, LONG * sizeof(*t)); /* valid during the call only */
    free(t);
}

static int begin_echo(void)
{
    struct bt_buf b = {0};
    bt_buf_puts(
        &b, "{\"max_tokens\":1,\"echo\":true,\"logprobs\":2,\"prompt_logprobs\":1,\"prompt\":[41");
    for (int i = 1; i < LONG; i++) {
        bt_buf_puts(&b, ",41");
    }
    bt_buf_puts(&b, "]}");
    int fd = begin("/v1/completions", b.data);
    bt_buf_cleanup(&b);
    return fd;
}

/* Reads until the server closes; what is larger than the fixture's answers. */
static struct bt_buf receive_all(int fd)
{
    struct bt_buf all = {0};
    char part[65536];
    uint64_t until = bt_mono_ns() + PATIENCE_MS * 1000000ull;
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

static void test_long_prompts_are_written_in_slices(void **state)
{
    (void)state;
    int fd = begin_echo();
    tell_long_prompt(now);
    token("x", 42);
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(1, 0);
    struct bt_buf all = receive_all(fd);
    json_t *j = json_loads(strstr(all.data, "\r\n\r\n") + 4, 0, NULL);
    assert_non_null(j);
    assert_int_equal(json_array_size(at(j, "choices.0.logprobs.tokens")), LONG + 1);
    assert_int_equal(json_array_size(at(j, "choices.0.logprobs.text_offset")), LONG + 1);
    const json_t *lps = at(j, "choices.0.logprobs.token_logprobs"),
                 *own = at(j, "choices.0.prompt_logprobs");
    assert_int_equal(json_array_size(own), LONG);
    assert_true(json_is_null(json_array_get(lps, 0)) && json_is_null(json_array_get(own, 0)));
    for (int i = 1; i < LONG; i++) {
        assert_true(json_number_value(json_array_get(lps, (size_t)i)) == -i);
    }
    json_decref(j);
    bt_buf_cleanup(&all);
}

/* Clients leave and requests fail while their prompts are kept, or are being written. */
static void test_prompts_that_nobody_waits_for(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        int fd = begin_echo();
        tell_long_prompt(now);
        if (i % 2 == 0) {
            close(fd);
            WAIT_FOR(n_cancelled == i / 2 + 1);
        } else {
            fail_now(503, "no worker is up", 1);
            receive(fd);
            assert_int_equal(ans.status, 503);
        }
        assert_int_equal(bt_front_open(front), 0);
    }
    int fd = begin_echo();
    tell_long_prompt(now);
    done(0, 0); /* teardown: its answer is being written */
    close(fd);
}

static void test_leaves_meanwhile(void **state)
{
    (void)state;
    struct bt_buf b = large_body();
    int first = send_large(&b), second = send_large(&b);
    WAIT_FOR(bt_front_open(front) == 2);
    close(second); /* not begun: it is never read */
    close(first);
    WAIT_FOR(bt_front_open(front) == 0);
    receive(send_raw("GET", "/metrics", "", "", 0));
    assert_non_null(strstr(ans.body, "baton_http_disconnects_total 2\n"));
    bt_buf_cleanup(&b);
}

static void test_destroy_meanwhile(void **state)
{
    (void)state;
    struct bt_buf b = large_body();
    int first = send_large(&b), second = send_large(&b);
    WAIT_FOR(bt_front_open(front) == 2);
    bt_front_destroy(front);
    front = NULL;
    close(first);
    close(second);
    bt_buf_cleanup(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_long_prompts_are_written_in_slices),
        T(test_prompts_that_nobody_waits_for),
        T(test_others_do_not_wait),
        T(test_same_result),
        T(test_leaves_meanwhile),
        T(test_destroy_meanwhile),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
