/* What the front answers: whole responses, streams, logprobs, errors of the request machine,
 * clients that leave, drain. Fixture: front_fixture.h. */
#include "tests/unit/front_fixture.h"

/* ---- whole answers ---- */

static void test_completion_defaults(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"ROMEO:\\n\"}");
    const struct bt_gen_spec *s = &now->spec;
    static const uint32_t ids[] = {2043, 870, 266};
    assert_int_equal(s->prompt.n, 3);
    assert_memory_equal(s->prompt.ids, ids, sizeof(ids));
    assert_int_equal(s->max_tokens, 16);
    assert_int_equal(s->n, 1);
    assert_true(s->sampling.temperature == 1.0f && s->sampling.top_p == 1.0f);
    assert_true(s->sampling.repetition_penalty == 1.0f && s->sampling.min_p == 0.0f);
    assert_int_equal(s->sampling.top_k, 0);
    assert_int_equal(s->sampling.logprobs, -1);
    assert_int_equal(s->sampling.n_eos, 2);
    assert_int_equal(s->sampling.eos[0], 2044);
    assert_true(s->unseeded && s->skip_special && !s->include_stop && !s->no_cache);
    assert_null(s->stop);
    assert_null(s->tenant);
    assert_null(s->cache_salt);
    assert_int_equal(s->speculation, BT_SPEC_AUTO);
    assert_true(s->received_ns > 0);
    assert_int_equal(strncmp(s->id, "cmpl-", 5), 0);
    char id[64];
    snprintf(id, sizeof(id), "%s", s->id);
    token("I will \"not\"\n", 40);
    token("", 41);
    delta(" do't", NULL, 0);
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(2, 1);
    receive(fd);
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.head, "Content-Type: application/json\r\n"));
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "id"), id);
    assert_string_equal(str_at(j, "object"), "text_completion");
    assert_string_equal(str_at(j, "model"), MODEL_ID);
    assert_true(json_integer_value(at(j, "created")) > 1600000000);
    assert_string_equal(str_at(j, "choices.0.text"), "I will \"not\"\n do't");
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "length");
    assert_true(json_is_null(at(j, "choices.0.logprobs")));
    assert_true(json_is_null(at(j, "choices.0.stop_reason")));
    assert_int_equal(json_integer_value(at(j, "usage.prompt_tokens")), 3);
    assert_int_equal(json_integer_value(at(j, "usage.completion_tokens")), 2);
    assert_int_equal(json_integer_value(at(j, "usage.total_tokens")), 5);
    assert_int_equal(json_integer_value(at(j, "usage.prompt_tokens_details.cached_tokens")), 1);
    assert_null(at(j, "timings"));
    json_decref(j);
    assert_int_equal(bt_front_open(front), 0);
}

static void test_completion_all_options(void **state)
{
    (void)state;
    int fd =
        begin("/v1/completions",
              "{\"model\":\"" MODEL_ID "\",\"prompt\":[1,2,2047],\"max_tokens\":8189,"
              "\"temperature\":0,\"top_p\":0.5,\"top_k\":7,\"min_p\":0.1,\"seed\":-5,"
              "\"typical_p\":0.7,\"xtc_probability\":0.25,"
              "\"stop\":[\"a\",\"b\"],\"logprobs\":20,\"ignore_eos\":true,\"min_tokens\":3,"
              "\"repetition_penalty\":1.1,\"frequency_penalty\":-2,\"presence_penalty\":2,"
              "\"skip_special_tokens\":false,\"include_stop_str_in_output\":true,"
              "\"cache_salt\":\"s\",\"speculation\":\"ngram\",\"stop_token_ids\":[9],\"n\":1,"
              "\"best_of\":1,\"echo\":false,"
              "\"logit_bias\":{\"5\":-100,\"2047\":1.5},\"user\":\"u\",\"metadata\":{\"x\":[]},"
              "\"response_format\":{\"type\":\"text\"},\"length_penalty\":1.0,\"suffix\":null,"
              "\"guided_json\":null,\"tools\":[],\"stream_options\":null}");
    const struct bt_gen_spec *s = &now->spec;
    assert_int_equal(s->prompt.n, 3);
    assert_int_equal(s->prompt.ids[2], 2047);
    assert_int_equal(s->max_tokens, model.max_model_len - 3);
    assert_true(s->sampling.temperature == 0.0f && s->sampling.top_p == 0.5f);
    assert_true(s->sampling.min_p == 0.1f && s->sampling.repetition_penalty == 1.1f);
    assert_true(s->sampling.frequency_penalty == -2.0f && s->sampling.presence_penalty == 2.0f);
    assert_int_equal(s->sampling.top_k, 7);
    assert_true(s->sampling.typical_p == 0.7f && s->sampling.xtc_probability == 0.25f &&
                s->sampling.xtc_threshold == 0.1f);
    assert_true(s->sampling.seed == (uint64_t)-5 && !s->unseeded);
    assert_string_equal(s->stop[0], "a");
    assert_string_equal(s->stop[1], "b");
    assert_null(s->stop[2]);
    assert_int_equal(s->sampling.logprobs, 20);
    assert_int_equal(s->sampling.min_new, 3);
    assert_int_equal(s->sampling.n_eos, 1); /* the model's are ignored, the client's own is not */
    assert_int_equal(s->sampling.eos[0], 9);
    assert_false(s->skip_special);
    assert_true(s->include_stop);
    assert_string_equal(s->cache_salt, "s");
    assert_int_equal(s->speculation, BT_SPEC_NGRAM);
    assert_int_equal(s->sampling.n_bias, 2);
    for (int i = 0; i < 2; i++) {
        bool five = s->sampling.bias_ids[i] == 5;
        assert_true(five || s->sampling.bias_ids[i] == 2047);
        assert_true(s->sampling.bias[i] == (five ? -100.0f : 1.5f));
    }
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    /* null is absent, -1 of top_k is off, a list of one string is a string */
    fd = begin("/v1/completions",
               "{\"prompt\":[\"ROMEO:\\n\"],\"add_special_tokens\":false,\"logprobs\":null,"
               "\"stop\":null,\"seed\":null,\"max_tokens\":null,\"temperature\":null,"
               "\"top_k\":-1,\"stream\":null,\"model\":null,\"stop_token_ids\":null}");
    assert_int_equal(now->spec.prompt.n, 2);
    assert_int_equal(now->spec.max_tokens, 16);
    assert_int_equal(now->spec.sampling.top_k, 0);
    assert_true(now->spec.unseeded);
    close(fd);
    WAIT_FOR(n_cancelled == 2);
}

static void test_chat(void **state)
{
    (void)state;
    int fd = begin(
        "/v1/chat/completions",
        "{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"},"
        "{\"role\":\"user\",\"name\":null,\"content\":[{\"type\":\"text\",\"text\":\"Speak,\"},"
        "{\"type\":\"text\",\"text\":\"good sir.\"}]}],\"max_tokens\":5,"
        "\"max_completion_tokens\":9,\"stop\":\"\\n\"}");
    struct bt_buf text = {0};
    assert_int_equal(
        bt_tokenizer_decode(tok, now->spec.prompt.ids, now->spec.prompt.n, false, &text), BT_OK);
    assert_string_equal(text.data,
                        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief."
                        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nSpeak,\ngood sir."
                        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
    bt_buf_cleanup(&text);
    assert_int_equal(now->spec.max_tokens, 9);
    assert_int_equal(strncmp(now->spec.id, "chatcmpl-", 9), 0);
    token("Aye.", 40);
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, "\n");
    done(2, 0);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "object"), "chat.completion");
    assert_string_equal(str_at(j, "choices.0.message.role"), "assistant");
    assert_string_equal(str_at(j, "choices.0.message.content"), "Aye.");
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "stop");
    assert_string_equal(str_at(j, "choices.0.stop_reason"), "\n");
    assert_true(json_is_null(at(j, "choices.0.logprobs")));
    json_decref(j);
    /* without a limit: all the context that is left; without the generation prompt: shorter */
    fd = begin("/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}");
    size_t n = now->spec.prompt.n;
    assert_int_equal(now->spec.max_tokens, model.max_model_len - n);
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    fd = begin("/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                                       "\"add_generation_prompt\":false}");
    assert_true(now->spec.prompt.n < n);
    close(fd);
    WAIT_FOR(n_cancelled == 2);
}

/* ---- streams ---- */

/* ans.body with id and created blanked: comparable. */
static const char *stream_text(void)
{
    static char out[sizeof(ans.body)];
    size_t n = 0;
    for (const char *s = ans.body; *s != '\0';) {
        if (strncmp(s, "\"id\":\"", 6) == 0) {
            n += (size_t)sprintf(out + n, "\"id\":\"I\"");
            s += 6 + strcspn(s + 6, "\"") + 1;
        } else if (strncmp(s, "\"created\":", 10) == 0) {
            n += (size_t)sprintf(out + n, "\"created\":0");
            s += 10 + strspn(s + 10, "0123456789");
        } else {
            out[n++] = *s++;
        }
    }
    out[n] = '\0';
    return out;
}

#define CHUNK(object)                                                                              \
    "data: {\"id\":\"I\",\"object\":\"" object "\",\"created\":0,\"model\":\"" MODEL_ID "\","
#define TC CHUNK("text_completion")
#define CC CHUNK("chat.completion.chunk")

static void test_completion_stream(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    token("", 40); /* the first event is the first token, whatever its text */
    bt_loop_poll(loop, 10);
    token("x", 41);
    token("\xe2\x82\xac", 42); /* two tokens in one turn are two events */
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    bt_loop_poll(loop, 10);
    done(3, 0);
    receive(fd);
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.head, "Content-Type: text/event-stream\r\n"));
    assert_string_equal(
        stream_text(),
        TC "\"choices\":[{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":null,"
           "\"stop_reason\":null}]}\n\n" TC
           "\"choices\":[{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":null,"
           "\"stop_reason\":null}]}\n\n" TC
           "\"choices\":[{\"index\":0,\"text\":\"\xe2\x82\xac\",\"logprobs\":null,"
           "\"finish_reason\":\"stop\",\"stop_reason\":null}]}\n\n"
           "data: [DONE]\n\n");
}

static void test_chat_stream_with_usage(void **state)
{
    (void)state;
    int fd = begin("/v1/chat/completions",
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"stream\":true,"
                   "\"stream_options\":{\"include_usage\":true}}");
    int n = (int)now->spec.prompt.n;
    token("Hi", 40);
    bt_loop_poll(loop, 10);
    bt_loop_poll(loop, 10);
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, "!"); /* comes alone */
    done(2, 16);
    receive(fd);
    char want[4096];
    snprintf(want, sizeof(want),
             CC "\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"Hi\"},"
                "\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null}],"
                "\"usage\":null}\n\n" CC
                "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"logprobs\":null,"
                "\"finish_reason\":\"stop\",\"stop_reason\":\"!\"}],\"usage\":null}\n\n" CC
                "\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":2,"
                "\"total_tokens\":%d,\"prompt_tokens_details\":{\"cached_tokens\":16}}}\n\n"
                "data: [DONE]\n\n",
             n, n + 2);
    assert_string_equal(stream_text(), want);
}

static void test_continuous_usage_and_timings(void **state)
{
    (void)state;
    static const char body[] = "{\"prompt\":[1,2],\"stream\":true,\"stream_options\":"
                               "{\"include_usage\":true,\"continuous_usage_stats\":true}}";
    int fd = send_raw("POST", "/v1/completions",
                      "Content-Type: application/json; charset=UTF-8\r\nX-Baton-Timings: 1\r\n"
                      "X-Request-Id: abc-1\r\n",
                      body, sizeof(body) - 1);
    WAIT_FOR(now != NULL);
    token("x", 41);
    token("y", 42);
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(2, 1);
    receive(fd);
    assert_non_null(strstr(ans.head, "x-request-id: abc-1\r\n"));
    const char *s = ans.body;
    for (int i = 1; i <= 2; i++) {
        char want[64];
        snprintf(want, sizeof(want), "\"completion_tokens\":%d,\"total_tokens\":%d}", i, i + 2);
        s = strstr(s, want);
        assert_non_null(s);
    }
    s = strstr(s, "data: ");
    char last[2048];
    snprintf(last, sizeof(last), "%.*s", (int)(strstr(s, "\n\n") - s - 6), s + 6);
    json_t *j = parse(last);
    assert_int_equal(json_array_size(at(j, "choices")), 0);
    assert_int_equal(json_integer_value(at(j, "usage.prompt_tokens_details.cached_tokens")), 1);
    assert_true(json_number_value(at(j, "timings.ttft_ms")) == 12.5);
    assert_true(json_is_null(at(j, "timings.queue_ms")));
    assert_int_equal(json_integer_value(at(j, "timings.kv_bytes")), 98304);
    assert_int_equal(json_integer_value(at(j, "timings.kv_segments")), 12);
    assert_int_equal(json_integer_value(at(j, "timings.replans")), 0);
    assert_int_equal(json_integer_value(at(j, "timings.cached_tokens")), 1);
    assert_true(json_number_value(at(j, "timings.hidden_fraction")) == 0.75);
    assert_string_equal(str_at(j, "timings.prefill"), "prefill-1");
    assert_string_equal(str_at(j, "timings.decode"), "decode-\"2\"");
    assert_string_equal(strstr(s, "\n\n"), "\n\ndata: [DONE]\n\n");
    json_decref(j);
}

/* Under overload a body is not even parsed: what is refused whatever it says is refused first. */
static void test_turned_away_unread(void **state)
{
    (void)state;
    static const char heads[] = "Content-Type: application/json\r\nx-slo-ttft-ms: 40\r\n";
    int before = n_started;
    turn_away_why = "the time to first token would miss its objective";
    static const struct {
        const char *more, *body;
        bool knows;
        int32_t priority;
    } cases[] = {{"", "{this is no JSON", true, 0},
                 {"", "{\"prompt\":\"a\",\"priority\":-3}", false, 0},
                 {"x-priority: 5\r\n", "{\"prompt\":\"a\",\"priority\":-3}", true, 5}};
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        char all[256];
        snprintf(all, sizeof(all), "%s%s", heads, cases[i].more);
        receive(send_raw("POST", i == 0 ? "/v1/chat/completions" : "/v1/completions", all,
                         cases[i].body, strlen(cases[i].body)));
        assert_int_equal(ans.status, 429);
        assert_non_null(strstr(ans.head, "Retry-After: 7\r\n"));
        assert_non_null(strstr(ans.body, turn_away_why));
        assert_true(turn_away_terms.slo_ttft_ms == 40 && turn_away_terms.received_ns > 0);
        assert_int_equal(turn_away_terms.knows_priority, cases[i].knows);
        assert_int_equal(turn_away_terms.priority, cases[i].priority);
    }
    assert_int_equal(n_started, before);
    turn_away_why = NULL;
}

static void test_errors_of_the_machine(void **state)
{
    (void)state;
    /* before the first token: a status, streamed or not */
    for (int stream = 0; stream <= 1; stream++) {
        int fd = begin("/v1/completions",
                       stream ? "{\"prompt\":\"a\",\"stream\":true}" : "{\"prompt\":\"a\"}");
        fail_now(503, "no decode worker", 7);
        receive(fd);
        assert_int_equal(ans.status, 503);
        assert_non_null(strstr(ans.head, "Retry-After: 7\r\n"));
        json_t *j = parse(ans.body);
        assert_string_equal(str_at(j, "error.message"), "no decode worker");
        assert_string_equal(str_at(j, "error.type"), "server_error");
        json_decref(j);
    }
    /* after it: what there is, an error event, no [DONE] */
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    token("x", 41);
    bt_loop_poll(loop, 10);
    token("y", 42);
    fail_now(500, "worker \"d\" died twice", 0);
    receive(fd);
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.body, "\"text\":\"x\""));
    const char *y = strstr(ans.body, "\"text\":\"y\"");
    assert_non_null(y);
    assert_string_equal(strstr(y, "data: "),
                        "data: {\"error\":{\"message\":\"worker \\\"d\\\" died twice\","
                        "\"type\":\"server_error\",\"param\":null,\"code\":null}}\n\n");
    assert_null(strstr(ans.body, "[DONE]"));
    fd = begin("/v1/completions", "{\"prompt\":\"a\"}");
    fail_now(429, "overloaded", 1);
    receive(fd);
    assert_int_equal(ans.status, 429);
    assert_non_null(strstr(ans.body, "\"rate_limit_error\""));
    assert_int_equal(bt_front_open(front), 0);
}

static void test_client_leaves(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"a\"}");
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    fd = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    token("x", 41);
    bt_loop_poll(loop, 10);
    token("y", 42); /* an event is half written */
    close(fd);
    WAIT_FOR(n_cancelled == 2);
    assert_int_equal(bt_front_open(front), 0);
}

/* ---- logprobs ---- */

/* First id of the vocabulary whose bytes are no text by themselves. */
static uint32_t find_broken_id(void)
{
    for (uint32_t id = 0; id < model.vocab; id++) {
        struct bt_buf piece = {0};
        assert_int_equal(bt_tokenizer_piece(tok, id, &piece), BT_OK);
        bool broken = piece.len == 1 && (unsigned char)piece.data[0] >= 0x80;
        bt_buf_cleanup(&piece);
        if (broken) {
            return id;
        }
    }
    fail_msg("no such token");
    return 0;
}

static uint32_t id_of(const char *text)
{
    struct bt_tokens ids = {0};
    assert_int_equal(bt_tokenizer_encode(tok, text, strlen(text), false, &ids), BT_OK);
    assert_int_equal(ids.n, 1);
    uint32_t id = ids.ids[0];
    bt_tokens_cleanup(&ids);
    return id;
}

static void feed_logprobs(void)
{
    uint32_t broken = find_broken_id();
    static uint32_t top_a[2], top_b[1];
    static float lp_a[2] = {-0.25f, -INFINITY}, lp_b[1] = {-0.125f};
    top_a[0] = id_of("I");
    top_a[1] = broken;
    top_b[0] = id_of("I");
    struct bt_gen_token t[2] = {
        {.id = id_of("I"), .logprob = -0.25f, .n_top = 2, .top_id = top_a, .top_logprob = lp_a},
        {.id = broken, .logprob = -3.5f, .n_top = 1, .top_id = top_b, .top_logprob = lp_b}};
    delta("I", t, 1);
    delta("\xef\xbf\xbd", t + 1, 1);
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(2, 0);
}

static void test_completion_logprobs(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"logprobs\":2}");
    assert_int_equal(now->spec.sampling.logprobs, 2);
    feed_logprobs();
    receive(fd);
    json_t *j = parse(ans.body), *lp = at(j, "choices.0.logprobs");
    struct bt_buf piece = {0};
    char name[32];
    assert_int_equal(bt_tokenizer_piece(tok, find_broken_id(), &piece), BT_OK);
    snprintf(name, sizeof(name), "bytes:\\x%02x", (unsigned char)piece.data[0]);
    bt_buf_cleanup(&piece);
    assert_int_equal(json_array_size(at(lp, "tokens")), 2);
    assert_string_equal(str_at(lp, "tokens.0"), "I");
    assert_string_equal(str_at(lp, "tokens.1"), name);
    assert_true(json_number_value(at(lp, "token_logprobs.0")) == -0.25);
    assert_true(json_number_value(at(lp, "token_logprobs.1")) == -3.5);
    assert_int_equal(json_integer_value(at(lp, "text_offset.0")), 0);
    assert_int_equal(json_integer_value(at(lp, "text_offset.1")), 1);
    json_t *top = at(lp, "top_logprobs.0");
    assert_int_equal(json_object_size(top), 2);
    assert_true(json_number_value(json_object_get(top, "I")) == -0.25);
    assert_true(json_number_value(json_object_get(top, name)) == -9999.0); /* -inf */
    top = at(lp, "top_logprobs.1"); /* the chosen one is told though it is not among the top */
    assert_int_equal(json_object_size(top), 2);
    assert_true(json_number_value(json_object_get(top, name)) == -3.5);
    json_decref(j);
    /* as ids */
    fd = begin("/v1/completions",
               "{\"prompt\":\"a\",\"logprobs\":2,\"return_tokens_as_token_ids\":true}");
    feed_logprobs();
    receive(fd);
    j = parse(ans.body);
    snprintf(name, sizeof(name), "token_id:%u", id_of("I"));
    assert_string_equal(str_at(j, "choices.0.logprobs.tokens.0"), name);
    assert_non_null(json_object_get(at(j, "choices.0.logprobs.top_logprobs.1"), name));
    json_decref(j);
}

static void test_chat_logprobs(void **state)
{
    (void)state;
    static const char body[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                               "\"logprobs\":true,\"top_logprobs\":2}";
    int fd = begin("/v1/chat/completions", body);
    assert_int_equal(now->spec.sampling.logprobs, 2);
    feed_logprobs();
    receive(fd);
    json_t *j = parse(ans.body), *c = at(j, "choices.0.logprobs.content");
    assert_int_equal(json_array_size(c), 2);
    assert_string_equal(str_at(c, "0.token"), "I");
    assert_true(json_number_value(at(c, "0.logprob")) == -0.25);
    assert_int_equal(json_integer_value(at(c, "0.bytes.0")), 'I');
    assert_int_equal(json_array_size(at(c, "0.top_logprobs")), 2);
    assert_int_equal(json_array_size(at(c, "0.top_logprobs.1.bytes")), 1);
    assert_int_equal(json_array_size(at(c, "1.top_logprobs")), 1);
    assert_string_equal(str_at(c, "1.top_logprobs.0.token"), "I");
    json_decref(j);
    fd = begin("/v1/chat/completions",
               "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"logprobs\":true,"
               "\"stream\":true}");
    assert_int_equal(now->spec.sampling.logprobs, 0);
    feed_logprobs();
    receive(fd);
    assert_non_null(strstr(ans.body,
                           "\"logprobs\":{\"content\":[{\"token\":\"I\",\"logprob\":-0.25,"
                           "\"bytes\":[73],\"top_logprobs\":["));
    /* each event has its own token only */
    const char *second = strstr(strstr(ans.body, "\n\n"), "\"content\":[");
    assert_null(strstr(second, "\"token\":\"I\",\"logprob\":-0.25"));
}

/* Text that is hostile to JSON comes back as it was. */
static void test_escaping(void **state)
{
    (void)state;
    static const char text[] = "\x01\x1f\"\\/\b\f\n\r\t\x7f</script> \xf0\x9f\x98\x80";
    for (int stream = 0; stream <= 1; stream++) {
        int fd = begin("/v1/completions",
                       stream ? "{\"prompt\":\"a\",\"stream\":true}" : "{\"prompt\":\"a\"}");
        token(text, 1);
        token("\xff\xc0\x80\xed\xa0\x80", 2); /* never from our detokenizer: still valid JSON */
        now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
        done(2, 0);
        receive(fd);
        char *body = ans.body + (stream ? 6 : 0);
        if (stream) {
            *strstr(body, "\n\n") = '\0';
        }
        json_t *j = parse(body);
        assert_int_equal(strncmp(str_at(j, "choices.0.text"), text, sizeof(text) - 1), 0);
        json_decref(j);
    }
}

/* ---- the end ---- */

static void test_drain(void **state)
{
    (void)state;
    int kept = dial();
    assert_int_equal(send(kept, "GET /heal", 9, 0), 9); /* a request is on its way */
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    assert_int_equal(bt_front_open(front), 1);
    bt_front_drain(front);
    static const char rest[] = "th HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_int_equal(send(kept, rest, sizeof(rest) - 1, 0), sizeof(rest) - 1);
    receive(kept);
    assert_int_equal(ans.status, 503);
    assert_string_equal(ans.body, "shutting down");
    token("x", 41); /* the open one goes on */
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    done(1, 0);
    receive(fd);
    assert_non_null(strstr(ans.body, "data: [DONE]\n\n"));
    assert_int_equal(bt_front_open(front), 0);
}

static void test_destroy_cancels(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    token("x", 41);
    bt_front_destroy(front);
    front = NULL;
    assert_int_equal(n_cancelled, 1);
    assert_null(now);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_completion_defaults),
        T(test_completion_all_options),
        T(test_chat),
        T(test_completion_stream),
        T(test_chat_stream_with_usage),
        T(test_continuous_usage_and_timings),
        T(test_turned_away_unread),
        T(test_errors_of_the_machine),
        T(test_client_leaves),
        T(test_completion_logprobs),
        T(test_chat_logprobs),
        T(test_escaping),
        T(test_drain),
        T(test_destroy_cancels),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
