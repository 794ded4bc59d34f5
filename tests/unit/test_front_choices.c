/* Several choices in one answer: n, arrays of prompts, echo and prompt logprobs; what happens to
 * the others when one of them fails or the client leaves. Fixture: front_fixture.h. */
#include "tests/unit/front_fixture.h"

static void say(struct bt_request *r, uint32_t choice, const char *text, uint32_t id)
{
    struct bt_gen_token t = {.id = id, .logprob = -0.5f};
    delta_to(r, choice, text, &t, 1);
}

static void end(struct bt_request *r, uint32_t choice, bt_finish_t reason, const char *stop)
{
    r->ops->on_finish(r->arg, choice, reason, stop);
}

/* ---- n ---- */

static void test_n_choices(void **state)
{
    (void)state;
    int fd = begin("/v1/chat/completions",
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"n\":3,\"best_of\":3}");
    assert_int_equal(now->spec.n, 3);
    uint32_t prompt = (uint32_t)now->spec.prompt.n;
    say(now, 2, "two", 40);
    say(now, 0, "nu", 41);
    say(now, 1, "one", 42);
    say(now, 0, "ll", 43);
    end(now, 1, BT_FINISH_STOP, "!");
    end(now, 2, BT_FINISH_LENGTH, NULL);
    end(now, 0, BT_FINISH_STOP, NULL);
    done(4, 16);
    receive(fd);
    json_t *j = parse(ans.body);
    static const char *const texts[] = {"null", "one", "two"};
    static const char *const why[] = {"stop", "stop", "length"};
    assert_int_equal(json_array_size(at(j, "choices")), 3);
    for (size_t i = 0; i < 3; i++) {
        json_t *c = json_array_get(at(j, "choices"), i);
        assert_int_equal(json_integer_value(at(c, "index")), i);
        assert_string_equal(str_at(c, "message.content"), texts[i]);
        assert_string_equal(str_at(c, "message.role"), "assistant");
        assert_string_equal(str_at(c, "finish_reason"), why[i]);
    }
    assert_string_equal(str_at(j, "choices.1.stop_reason"), "!");
    assert_int_equal(json_integer_value(at(j, "usage.prompt_tokens")), prompt);
    assert_int_equal(json_integer_value(at(j, "usage.completion_tokens")), 4);
    json_decref(j);
}

/* Every event has one choice; each choice's first has the role, each has its own finish. */
static void test_n_choices_streamed(void **state)
{
    (void)state;
    int fd = begin("/v1/chat/completions",
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"n\":2,\"stream\":true,"
                   "\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true}}");
    uint32_t prompt = (uint32_t)now->spec.prompt.n;
    say(now, 0, "a", 40);
    say(now, 1, "x", 41);
    bt_loop_poll(loop, 10);
    say(now, 0, "b", 42);
    end(now, 0, BT_FINISH_LENGTH, NULL);
    say(now, 1, "y", 43);
    bt_loop_poll(loop, 10);
    end(now, 1, BT_FINISH_STOP, NULL);
    done(4, 0);
    receive(fd);
    static const struct {
        int index;
        const char *content, *finish;
        bool role;
        int tokens;
    } want[] = {{0, "a", NULL, true, 1},
                {1, "x", NULL, true, 1},
                {0, "b", "length", false, 2},
                {1, "y", NULL, false, 2},
                {1, "", "stop", false, 2}};
    char *s = ans.body;
    for (size_t i = 0; i < BT_ARRAY_LEN(want); i++) {
        char *stop = strstr(s, "\n\n");
        assert_non_null(stop);
        *stop = '\0';
        json_t *j = parse(s + strlen("data: "));
        assert_int_equal(json_array_size(at(j, "choices")), 1);
        assert_int_equal(json_integer_value(at(j, "choices.0.index")), want[i].index);
        assert_string_equal(str_at(j, "choices.0.delta.content"), want[i].content);
        assert_int_equal(at(j, "choices.0.delta.role") != NULL, want[i].role);
        if (want[i].finish != NULL) {
            assert_string_equal(str_at(j, "choices.0.finish_reason"), want[i].finish);
        } else {
            assert_true(json_is_null(at(j, "choices.0.finish_reason")));
        }
        /* continuous usage is of the event's own choice, as vLLM tells it */
        assert_int_equal(json_integer_value(at(j, "usage.completion_tokens")), want[i].tokens);
        assert_int_equal(json_integer_value(at(j, "usage.prompt_tokens")), prompt);
        json_decref(j);
        s = stop + 2;
    }
    assert_non_null(strstr(s, "\"choices\":[],\"usage\":{\"prompt_tokens\":"));
    assert_non_null(strstr(s, "\"completion_tokens\":4,"));
    assert_non_null(strstr(s, "data: [DONE]\n\n"));
}

/* ---- several prompts ---- */

static void test_prompts(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "{\"prompt\":[\"ROMEO:\\n\",\"a\"],\"n\":2,\"stop\":[\"s\",\"t\"],\"cache_salt\":\"c\","
        "\"logit_bias\":{\"5\":1}}",
        "{\"prompt\":[[2043,870,266],[2043,1]],\"n\":2,\"stop\":[\"s\",\"t\"],"
        "\"cache_salt\":\"c\",\"logit_bias\":{\"5\":1}}"};
    for (size_t b = 0; b < BT_ARRAY_LEN(bodies); b++) {
        int before = n_started;
        int fd = begin("/v1/completions", bodies[b]);
        assert_int_equal(n_started - before, 2);
        struct bt_request *first = live[before], *second = live[before + 1];
        static const uint32_t ids[] = {2043, 870, 266};
        assert_int_equal(first->spec.prompt.n, 3);
        assert_memory_equal(first->spec.prompt.ids, ids, sizeof(ids));
        assert_int_equal(second->spec.prompt.n, 2);
        for (int i = 0; i < 2; i++) { /* each has all options, as its own */
            const struct bt_gen_spec *s = &live[before + i]->spec;
            assert_int_equal(s->n, 2);
            assert_string_equal(s->stop[1], "t");
            assert_string_equal(s->cache_salt, "c");
            assert_int_equal(s->sampling.bias_ids[0], 5);
            assert_true(s->sampling.bias[0] == 1.0f);
        }
        assert_string_not_equal(first->spec.id, second->spec.id);
        say(second, 1, "3", 1);
        say(first, 1, "1", 1);
        say(second, 0, "2", 1);
        say(first, 0, "0", 1);
        for (uint32_t c = 0; c < 2; c++) {
            end(second, c, BT_FINISH_LENGTH, NULL);
            end(first, c, BT_FINISH_STOP, NULL);
        }
        done_with(second, 2, 1);
        assert_int_equal(bt_front_open(front), 1);
        done_with(first, 2, 2);
        assert_int_equal(bt_front_open(front), 0);
        receive(fd);
        json_t *j = parse(ans.body);
        assert_int_equal(json_array_size(at(j, "choices")), 4);
        for (size_t i = 0; i < 4; i++) {
            json_t *c = json_array_get(at(j, "choices"), i);
            const char text[] = {(char)('0' + i), '\0'};
            assert_int_equal(json_integer_value(at(c, "index")), i);
            assert_string_equal(str_at(c, "text"), text);
            assert_string_equal(str_at(c, "finish_reason"), i < 2 ? "stop" : "length");
        }
        assert_int_equal(json_integer_value(at(j, "usage.prompt_tokens")), 5);
        assert_int_equal(json_integer_value(at(j, "usage.completion_tokens")), 4);
        assert_int_equal(json_integer_value(at(j, "usage.total_tokens")), 9);
        assert_int_equal(json_integer_value(at(j, "usage.prompt_tokens_details.cached_tokens")), 3);
        json_decref(j);
    }
}

/* One of three fails: the others are cancelled, the answer is one error. */
static void test_one_prompt_fails(void **state)
{
    (void)state;
    for (int kind = 0; kind < 3; kind++) { /* whole; streamed before and after the first token */
        int before = n_started, cancelled = n_cancelled;
        int fd = begin("/v1/completions", kind == 0
                                              ? "{\"prompt\":[\"a\",\"b\",\"c\"]}"
                                              : "{\"prompt\":[\"a\",\"b\",\"c\"],\"stream\":true}");
        struct bt_request *r[3] = {live[before], live[before + 1], live[before + 2]};
        if (kind == 2) {
            say(r[0], 0, "x", 41);
            bt_loop_poll(loop, 10);
        }
        fail_with(r[1], 429, "overloaded", 3);
        /* what still comes in the same turn is not told any more; cancelling is the loop's */
        assert_int_equal(n_cancelled, cancelled);
        say(r[0], 0, "late", 42);
        if (kind == 1) {
            end(r[0], 0, BT_FINISH_LENGTH, NULL);
            done_with(r[0], 1, 0);
        } else if (kind == 2) {
            fail_with(r[2], 500, "another", 0);
        }
        WAIT_FOR(bt_front_open(front) == 0);
        assert_int_equal(n_cancelled - cancelled, kind == 0 ? 2 : 1);
        receive(fd);
        assert_null(strstr(ans.body, "late"));
        assert_null(strstr(ans.body, "another"));
        assert_null(strstr(ans.body, "[DONE]"));
        if (kind == 2) {
            assert_int_equal(ans.status, 200);
            assert_non_null(strstr(ans.body, "\"text\":\"x\""));
            assert_non_null(strstr(ans.body, "data: {\"error\":{\"message\":\"overloaded\""));
        } else {
            assert_int_equal(ans.status, 429);
            assert_non_null(strstr(ans.head, "Retry-After: 3\r\n"));
        }
    }
}

static void test_client_leaves_many(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":[\"a\",\"b\",\"c\"],\"stream\":true}");
    end(live[1], 0, BT_FINISH_LENGTH, NULL);
    done_with(live[1], 1, 0);
    say(live[0], 0, "x", 41);
    close(fd);
    WAIT_FOR(n_cancelled == 2); /* the one that was over is not cancelled */
    assert_int_equal(bt_front_open(front), 0);
}

/* The front ends between a failure and the cancelling of the rest. */
static void test_destroy_while_ending(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":[\"a\",\"b\"]}");
    fail_with(live[0], 500, "died", 0);
    bt_front_destroy(front);
    front = NULL;
    assert_int_equal(n_cancelled, 1);
    assert_null(now);
    close(fd);
}

/* ---- echo and prompt logprobs ---- */

static const uint32_t tops[] = {870, 40, 41};
static const float top_lps[] = {-0.25f, -1.5f, -2.5f};

/* The prompt <BOS> ROMEO :\n with n_top of the most likely; 266 is not among them. */
static void tell_prompt(struct bt_request *r, uint32_t n_top)
{
    struct bt_gen_token t[3] = {
        {.id = 2043, .logprob = NAN},
        {.id = 870, .logprob = -0.25f, .n_top = n_top, .top_id = tops, .top_logprob = top_lps},
        {.id = 266,
         .logprob = -7.0f,
         .rank = 57,
         .n_top = n_top,
         .top_id = tops,
         .top_logprob = top_lps}};
    r->ops->on_prompt(r->arg, t, 3); /* so few are written at once */
}

static void test_echo(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"ROMEO:\\n\",\"echo\":true,\"n\":2}");
    assert_false(now->spec.prompt_logprobs);
    say(now, 1, "I", 40);
    end(now, 0, BT_FINISH_STOP, NULL); /* no text at all */
    end(now, 1, BT_FINISH_LENGTH, NULL);
    done(1, 0);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "choices.0.text"), "ROMEO:\n");
    assert_string_equal(str_at(j, "choices.1.text"), "ROMEO:\nI");
    json_decref(j);
    /* ids are told as text; max_tokens 0 */
    fd = begin("/v1/completions", "{\"prompt\":[2043,870,266],\"echo\":true,\"max_tokens\":0}");
    assert_int_equal(now->spec.max_tokens, 0);
    assert_true(now->spec.prompt_logprobs);
    tell_prompt(now, 0);
    end(now, 0, BT_FINISH_LENGTH, NULL);
    done(0, 0);
    receive(fd);
    j = parse(ans.body);
    assert_string_equal(str_at(j, "choices.0.text"), "ROMEO:\n");
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "length");
    assert_true(json_is_null(at(j, "choices.0.logprobs")));
    assert_int_equal(json_integer_value(at(j, "usage.completion_tokens")), 0);
    json_decref(j);
}

static void check_echo_logprobs(json_t *lp, size_t n)
{
    assert_int_equal(json_array_size(at(lp, "tokens")), n);
    assert_int_equal(json_array_size(at(lp, "top_logprobs")), n);
    assert_string_equal(str_at(lp, "tokens.0"), "<|begin_of_text|>");
    assert_string_equal(str_at(lp, "tokens.1"), "ROMEO");
    assert_string_equal(str_at(lp, "tokens.2"), ":\n");
    assert_true(json_is_null(at(lp, "token_logprobs.0")));
    assert_true(json_is_null(at(lp, "top_logprobs.0")));
    assert_true(json_number_value(at(lp, "token_logprobs.1")) == -0.25);
    assert_true(json_number_value(at(lp, "token_logprobs.2")) == -7.0);
    assert_int_equal(json_object_size(at(lp, "top_logprobs.1")), 2);
    assert_int_equal(json_object_size(at(lp, "top_logprobs.2")), 3); /* and the prompt's own */
    static const int offsets[] = {0, 0, 5, 7};
    for (size_t i = 0; i < n; i++) {
        json_t *o = json_array_get(at(lp, "text_offset"), i);
        assert_int_equal(json_integer_value(o), offsets[i]);
    }
}

static void test_echo_logprobs(void **state)
{
    (void)state;
    int fd = begin("/v1/completions",
                   "{\"prompt\":\"ROMEO:\\n\",\"echo\":true,\"logprobs\":2,\"prompt_logprobs\":3}");
    assert_true(now->spec.prompt_logprobs);
    assert_int_equal(now->spec.prompt_top, 3);
    assert_int_equal(now->spec.sampling.logprobs, 2);
    tell_prompt(now, 3);
    say(now, 0, "I", 40);
    end(now, 0, BT_FINISH_LENGTH, NULL);
    done(1, 0);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "choices.0.text"), "ROMEO:\nI");
    check_echo_logprobs(at(j, "choices.0.logprobs"), 4);
    /* the prompt's own token comes first, whatever its rank */
    assert_non_null(strstr(ans.body, "{\":\\n\":-7,\"ROMEO\":-0.25,"));
    json_t *p = at(j, "choices.0.prompt_logprobs");
    assert_int_equal(json_array_size(p), 3);
    assert_true(json_is_null(json_array_get(p, 0)));
    assert_int_equal(json_object_size(json_array_get(p, 1)), 3);
    assert_int_equal(json_object_size(json_array_get(p, 2)), 4);
    assert_int_equal(json_integer_value(at(p, "1.870.rank")), 1);
    assert_string_equal(str_at(p, "1.870.decoded_token"), "ROMEO");
    assert_true(json_number_value(at(p, "1.870.logprob")) == -0.25);
    assert_int_equal(json_integer_value(at(p, "1.41.rank")), 3);
    assert_int_equal(json_integer_value(at(p, "2.266.rank")), 57); /* beyond the listed ones */
    assert_true(json_number_value(at(p, "2.266.logprob")) == -7.0);
    json_decref(j);
    /* streamed: all of the prompt's in the first event, also if nothing is generated */
    for (int generate = 0; generate <= 1; generate++) {
        fd = begin("/v1/completions", generate ? "{\"prompt\":\"ROMEO:\\n\",\"echo\":true,"
                                                 "\"logprobs\":2,\"stream\":true}"
                                               : "{\"prompt\":\"ROMEO:\\n\",\"echo\":true,"
                                                 "\"logprobs\":2,\"stream\":true,"
                                                 "\"max_tokens\":0}");
        tell_prompt(now, 2);
        if (generate) {
            say(now, 0, "I", 40);
            say(now, 0, "J", 41);
        }
        end(now, 0, BT_FINISH_LENGTH, NULL);
        done(generate ? 2 : 0, 0);
        receive(fd);
        char *stop = strstr(ans.body, "\n\n");
        *stop = '\0';
        j = parse(ans.body + strlen("data: "));
        assert_string_equal(str_at(j, "choices.0.text"), generate ? "ROMEO:\nI" : "ROMEO:\n");
        check_echo_logprobs(at(j, "choices.0.logprobs"), generate ? 4 : 3);
        json_decref(j);
        if (generate) {
            j = parse(strtok(stop + 2, "\n") + strlen("data: "));
            assert_string_equal(str_at(j, "choices.0.text"), "J");
            assert_int_equal(json_array_size(at(j, "choices.0.logprobs.tokens")), 1);
            assert_int_equal(json_integer_value(at(j, "choices.0.logprobs.text_offset.0")), 8);
            json_decref(j);
        }
    }
}

static void test_chat_prompt_logprobs(void **state)
{
    (void)state;
    int fd = begin("/v1/chat/completions",
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"prompt_logprobs\":0}");
    assert_true(now->spec.prompt_logprobs);
    assert_int_equal(now->spec.prompt_top, 0);
    assert_int_equal(now->spec.sampling.logprobs, -1);
    tell_prompt(now, 0);
    say(now, 0, "I", 40);
    end(now, 0, BT_FINISH_LENGTH, NULL);
    done(1, 0);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_int_equal(json_array_size(at(j, "prompt_logprobs")), 3);
    assert_int_equal(json_object_size(at(j, "prompt_logprobs.2")), 1);
    assert_null(at(j, "choices.0.prompt_logprobs"));
    json_decref(j);
}

/* ---- what ended a choice ---- */

static void test_stop_reason_of_ids(void **state)
{
    (void)state;
    static const struct {
        const char *body;
        uint32_t last;
        int reason; /* 0: null */
    } cases[] = {
        {"{\"prompt\":\"a\",\"stop_token_ids\":[9,10]}", 10, 10},
        {"{\"prompt\":\"a\",\"stop_token_ids\":[9,10]}", 2044, 0},    /* EOS */
        {"{\"prompt\":\"a\",\"stop_token_ids\":[2044,10]}", 2044, 0}, /* EOS, also said */
        {"{\"prompt\":\"a\",\"stop_token_ids\":[2044],\"ignore_eos\":true}", 2044, 2044},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        int fd = begin("/v1/completions", cases[i].body);
        say(now, 0, "x", 40);
        say(now, 0, "", cases[i].last);
        end(now, 0, BT_FINISH_STOP, NULL);
        done(2, 0);
        receive(fd);
        json_t *j = parse(ans.body);
        json_t *reason = at(j, "choices.0.stop_reason");
        if (cases[i].reason == 0) {
            assert_true(json_is_null(reason));
        } else {
            assert_int_equal(json_integer_value(reason), cases[i].reason);
        }
        json_decref(j);
    }
}

/* ---- chat that goes on in the last message ---- */

static void test_continue_final_message(void **state)
{
    (void)state;
    static const char messages[] = "\"messages\":[{\"role\":\"user\",\"content\":\"Speak.\"},"
                                   "{\"role\":\"assistant\",\"content\":\"I will\"}]";
    char body[512];
    snprintf(body, sizeof(body), "{%s,\"continue_final_message\":true}", messages);
    json_t *j = post_json("/tokenize", body);
    struct bt_buf b = {0};
    bt_buf_puts(&b, "{\"tokens\":");
    char *ids = json_dumps(at(j, "tokens"), JSON_COMPACT);
    bt_buf_puts(&b, ids);
    bt_buf_puts(&b, "}");
    free(ids);
    size_t count = json_array_size(at(j, "tokens"));
    json_decref(j);
    j = post_json("/detokenize", b.data);
    const char *text = str_at(j, "prompt");
    assert_true(strlen(text) > 6);
    assert_string_equal(text + strlen(text) - 6, "I will"); /* nothing behind it */
    assert_non_null(strstr(text, "Speak."));
    json_decref(j);
    bt_buf_cleanup(&b);
    int fd = begin("/v1/chat/completions", body);
    assert_int_equal(now->spec.prompt.n, count);
    close(fd);
    WAIT_FOR(n_cancelled == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_n_choices),
        T(test_n_choices_streamed),
        T(test_prompts),
        T(test_one_prompt_fails),
        T(test_client_leaves_many),
        T(test_destroy_while_ending),
        T(test_echo),
        T(test_echo_logprobs),
        T(test_chat_prompt_logprobs),
        T(test_stop_reason_of_ids),
        T(test_continue_final_message),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
