/* What the front takes: bad bodies, routes, tokenize and detokenize, API keys. Fixture:
 * front_fixture.h. */
#include <poll.h>

#include "tests/unit/front_fixture.h"

/* ---- bad input ---- */

#define COMPLETION "/v1/completions"
#define CHAT       "/v1/chat/completions"
#define USER       "\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]"
static const struct {
    const char *path, *body;
    int status;
    const char *param;
} bad_bodies[] = {
    {COMPLETION, "", 400, NULL},
    {COMPLETION, "{\"prompt\":\"a\"", 400, NULL},
    {COMPLETION, "[]", 400, NULL},
    {COMPLETION, "\"a\"", 400, NULL},
    {COMPLETION, "{\"prompt\":\"a\",\"prompt\":\"b\"}", 400, NULL},
    {COMPLETION, "{\"prompt\":\"\xff\"}", 400, NULL},
    {COMPLETION, "{\"prompt\":\"\\ud800\"}", 400, NULL},
    {COMPLETION, "{\"prompt\":\"a\",\"temperature\":NaN}", 400, NULL},
    {COMPLETION, "{\"prompt\":\"a\",\"temperature\":1e999}", 400, "temperature"},
    {COMPLETION, "{\"prompt\":\"a\"} x", 400, NULL},
    {COMPLETION, "{\"prompt\":\"a\",}", 400, NULL},
    {COMPLETION, "{\"prompt\":\"a\",\"\\u0000\":1}", 400, NULL},
    {COMPLETION, "{\"prompt\":\"a\",\"stop\":\"a\\u0000b\"}", 400, "stop"},
    {COMPLETION, "{\"prompt\":\"a\",\"model\":\"a\\u0000b\"}", 400, "model"},
    {COMPLETION, "{\"prompt\":\"a\",\"cache_salt\":\"a\\u0000b\"}", 400, "cache_salt"},
    {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":1e300}", 400, "max_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"seed\":1e16}", 400, "seed"},
    {CHAT, "{" USER ",\"modalities\":[\"text\",\"audio\"]}", 400, "modalities"},
    {CHAT, "{" USER ",\"web_search_options\":{}}", 400, "web_search_options"},
    {COMPLETION, "{}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":null}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":5}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":[]}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":\"\",\"add_special_tokens\":false}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":[\"a\",5]}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":[\"a\",[]]}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":[[1],[2048]]}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":[[1],[[2]]]}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":[[]]}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":{\"a\":1}}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":[1,\"a\"]}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":[2048]}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":[-1]}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":[1.5]}", 400, "prompt"},
    {COMPLETION, "{\"prompt\":\"a\",\"model\":\"gpt-4\"}", 404, "model"},
    {COMPLETION, "{\"prompt\":\"a\",\"model\":5}", 400, "model"},
    {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":0}", 400, "max_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":-1}", 400, "max_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":4294967296}", 400, "max_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":1.5}", 400, "max_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":\"9\"}", 400, "max_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":4,\"min_tokens\":5}", 400, "min_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"min_tokens\":-1}", 400, "min_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"n\":0}", 400, "n"},
    {COMPLETION, "{\"prompt\":\"a\",\"n\":17}", 400, "n"},
    {COMPLETION, "{\"prompt\":\"a\",\"n\":-1}", 400, "n"},
    {COMPLETION, "{\"prompt\":\"a\",\"n\":\"2\"}", 400, "n"},
    {COMPLETION, "{\"prompt\":\"a\",\"n\":1000000000}", 400, "n"},
    {COMPLETION, "{\"prompt\":\"a\",\"best_of\":2,\"stream\":true}", 400, "best_of"},
    {COMPLETION, "{\"prompt\":\"a\",\"best_of\":\"all\"}", 400, "best_of"},
    {COMPLETION, "{\"prompt\":\"a\",\"n\":2,\"best_of\":1}", 400, "best_of"},
    {COMPLETION, "{\"prompt\":\"a\",\"n\":2,\"best_of\":17}", 400, "best_of"},
    {COMPLETION, "{\"prompt\":\"a\",\"echo\":true,\"max_tokens\":-1}", 400, "max_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"prompt_logprobs\":1,\"max_tokens\":0}", 400, "max_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"prompt_logprobs\":21}", 400, "prompt_logprobs"},
    {COMPLETION, "{\"prompt\":\"a\",\"prompt_logprobs\":-1}", 400, "prompt_logprobs"},
    {COMPLETION, "{\"prompt\":\"a\",\"prompt_logprobs\":0,\"stream\":true}", 400,
     "prompt_logprobs"},
    {COMPLETION, "{\"prompt\":\"a\",\"guided_json\":5}", 400, "guided_json"},
    {COMPLETION, "{\"prompt\":\"a\",\"guided_choice\":[]}", 400, "guided_choice"},
    {COMPLETION, "{\"prompt\":\"a\",\"structured_outputs\":{\"regex\":5}}", 400,
     "structured_outputs.regex"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":1}", 400, "use_beam_search"},
    {COMPLETION, "{\"prompt\":\"a\",\"num_beams\":4}", 400, "num_beams"},
    {COMPLETION, "{\"prompt\":\"a\",\"length_penalty\":0.5}", 400, "length_penalty"},
    {COMPLETION, "{\"prompt\":\"a\",\"length_penalty\":true}", 400, "length_penalty"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"length_penalty\":11}", 400,
     "length_penalty"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"length_penalty\":1e999}", 400,
     "length_penalty"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"early_stopping\":\"maybe\"}", 400,
     "early_stopping"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"early_stopping\":2}", 400,
     "early_stopping"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"n\":17}", 400, "n"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"n\":3,\"best_of\":2}", 400,
     "best_of"},
    {COMPLETION,
     "{\"prompt\":\"a\",\"use_beam_search\":true,\"best_of\":16,\"stop_token_ids\":[1,2,3,4]}", 400,
     "best_of"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"temperature\":0.7}", 400,
     "temperature"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"top_p\":0.9}", 400, "top_p"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"top_k\":5}", 400, "top_k"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"min_p\":0.1}", 400, "min_p"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"repetition_penalty\":1.1}", 400,
     "repetition_penalty"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"frequency_penalty\":1}", 400,
     "frequency_penalty"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"presence_penalty\":1}", 400,
     "presence_penalty"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"logit_bias\":{\"5\":1}}", 400,
     "logit_bias"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"stop\":\"x\"}", 400, "stop"},
    {COMPLETION, "{\"prompt\":\"a\",\"use_beam_search\":true,\"guided_regex\":\"a+\"}", 400,
     "use_beam_search"},
    {COMPLETION, "{\"prompt\":\"a\",\"allowed_token_ids\":[1]}", 400, "allowed_token_ids"},
    {COMPLETION, "{\"prompt\":\"a\",\"bad_words\":[\"a\"]}", 400, "bad_words"},
    {COMPLETION, "{\"prompt\":\"a\",\"truncate_prompt_tokens\":-1}", 400, "truncate_prompt_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"return_token_ids\":true}", 400, "return_token_ids"},
    {COMPLETION, "{\"prompt\":\"a\",\"resume\":\"forged\"}", 400, "resume"},
    {COMPLETION, "{\"prompt\":\"a\",\"temperature\":-1}", 400, "temperature"},
    {COMPLETION, "{\"prompt\":\"a\",\"temperature\":\"hot\"}", 400, "temperature"},
    {COMPLETION, "{\"prompt\":\"a\",\"top_p\":0}", 400, "top_p"},
    {COMPLETION, "{\"prompt\":\"a\",\"top_p\":1.1}", 400, "top_p"},
    {COMPLETION, "{\"prompt\":\"a\",\"top_k\":-2}", 400, "top_k"},
    {COMPLETION, "{\"prompt\":\"a\",\"min_p\":1.5}", 400, "min_p"},
    {COMPLETION, "{\"prompt\":\"a\",\"typical_p\":0}", 400, "typical_p"},
    {COMPLETION, "{\"prompt\":\"a\",\"typical_p\":1.1}", 400, "typical_p"},
    {COMPLETION, "{\"prompt\":\"a\",\"xtc_probability\":-1}", 400, "xtc_probability"},
    {COMPLETION, "{\"prompt\":\"a\",\"xtc_threshold\":0}", 400, "xtc_threshold"},
    {COMPLETION, "{\"prompt\":\"a\",\"repetition_penalty\":0}", 400, "repetition_penalty"},
    {COMPLETION, "{\"prompt\":\"a\",\"frequency_penalty\":3}", 400, "frequency_penalty"},
    {COMPLETION, "{\"prompt\":\"a\",\"presence_penalty\":-3}", 400, "presence_penalty"},
    {COMPLETION, "{\"prompt\":\"a\",\"seed\":1.5}", 400, "seed"},
    {COMPLETION, "{\"prompt\":\"a\",\"seed\":99999999999999999999}", 400, "seed"},
    {COMPLETION, "{\"prompt\":\"a\",\"stop\":\"\"}", 400, "stop"},
    {COMPLETION, "{\"prompt\":\"a\",\"stop\":[\"a\",\"\"]}", 400, "stop"},
    {COMPLETION, "{\"prompt\":\"a\",\"stop\":[1]}", 400, "stop"},
    {COMPLETION,
     "{\"prompt\":\"a\",\"stop\":[\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\","
     "\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\"]}",
     400, "stop"},
    {COMPLETION, "{\"prompt\":\"a\",\"stop_token_ids\":[2048]}", 400, "stop_token_ids"},
    {COMPLETION, "{\"prompt\":\"a\",\"stop_token_ids\":5}", 400, "stop_token_ids"},
    {COMPLETION, "{\"prompt\":\"a\",\"logprobs\":21}", 400, "logprobs"},
    {COMPLETION, "{\"prompt\":\"a\",\"logprobs\":true}", 400, "logprobs"},
    {COMPLETION, "{\"prompt\":\"a\",\"stream\":1}", 400, "stream"},
    {COMPLETION, "{\"prompt\":\"a\",\"stream_options\":1}", 400, "stream_options"},
    {COMPLETION, "{\"prompt\":\"a\",\"echo\":1}", 400, "echo"},
    {COMPLETION, "{\"prompt\":\"a\",\"suffix\":\"b\"}", 400, "suffix"},
    {COMPLETION, "{\"prompt\":\"a\",\"guided_regex\":\"(a+\"}", 400, "guided_regex"},
    {COMPLETION, "{\"prompt\":\"a\",\"response_format\":{\"type\":\"json\"}}", 400,
     "response_format"},
    {COMPLETION, "{\"prompt\":\"a\",\"response_format\":\"json\"}", 400, "response_format"},
    {COMPLETION, /* cut in the middle of a character where it is named */
     "{\"prompt\":\"a\",\"response_format\":{\"type\":\"a€€€€€€€€€€€€\"}}", 400, "response_format"},
    {COMPLETION, "{\"prompt\":\"a\",\"cache_salt\":\"\"}", 400, "cache_salt"},
    {COMPLETION, "{\"prompt\":\"a\",\"speculation\":\"eagle\"}", 400, "speculation"},
    {COMPLETION, "{\"prompt\":\"a\",\"speculation\":true}", 400, "speculation"},
    {COMPLETION, "{\"prompt\":\"a\",\"dola_layers\":\"middle\"}", 400, "dola_layers"},
    {COMPLETION, "{\"prompt\":\"a\",\"dola_layers\":3}", 400, "dola_layers"},
    {COMPLETION, "{\"prompt\":\"a\",\"dola_layers\":[]}", 400, "dola_layers"},
    {COMPLETION, "{\"prompt\":\"a\",\"dola_layers\":[0,6]}", 400, "dola_layers"},
    {COMPLETION, "{\"prompt\":\"a\",\"dola_layers\":[-1]}", 400, "dola_layers"},
    {COMPLETION, "{\"prompt\":\"a\",\"dola_layers\":[1.5]}", 400, "dola_layers"},
    {COMPLETION, "{\"prompt\":\"a\",\"dola_layers\":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]}", 400,
     "dola_layers"},
    {COMPLETION, "{\"prompt\":\"a\",\"logit_bias\":{\"5\":101}}", 400, "logit_bias"},
    {COMPLETION, "{\"prompt\":\"a\",\"logit_bias\":{\"2048\":1}}", 400, "logit_bias"},
    {COMPLETION, "{\"prompt\":\"a\",\"logit_bias\":{\"x\":1}}", 400, "logit_bias"},
    {COMPLETION, "{\"prompt\":\"a\",\"logit_bias\":{\"1\":null}}", 400, "logit_bias"},
    {CHAT, "{}", 400, "messages"},
    {CHAT, "{\"messages\":[]}", 400, "messages"},
    {CHAT, "{\"messages\":\"a\"}", 400, "messages"},
    {CHAT, "{\"messages\":[5]}", 400, "messages"},
    {CHAT, "{\"messages\":[{\"content\":\"a\"}]}", 400, "messages"},
    {CHAT, "{\"messages\":[{\"role\":\"user\"}]}", 400, "messages"},
    {CHAT, "{\"messages\":[{\"role\":\"king\",\"content\":\"a\"}]}", 400, "messages"},
    {CHAT, "{\"messages\":[{\"role\":\"tool\",\"content\":\"a\"}]}", 400, "messages"},
    {CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}", 400,
     "messages"},
    {CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}", 400,
     "messages"},
    {CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":5}]}", 400, "messages"},
    {CHAT, "{" USER ",\"logprobs\":5}", 400, "logprobs"},
    {CHAT, "{" USER ",\"top_logprobs\":2}", 400, "top_logprobs"},
    {CHAT, "{" USER ",\"logprobs\":true,\"top_logprobs\":21}", 400, "top_logprobs"},
    {CHAT, "{" USER ",\"tools\":[{\"type\":\"function\"}]}", 400, "tools"},
    {CHAT, "{" USER ",\"tool_choice\":\"required\"}", 400, "tool_choice"},
    {CHAT, "{" USER ",\"functions\":[{}]}", 400, "functions"},
    {CHAT, "{" USER ",\"chat_template_kwargs\":5}", 400, "chat_template_kwargs"},
    {CHAT, "{" USER ",\"max_completion_tokens\":0}", 400, "max_completion_tokens"},
    {CHAT, "{" USER ",\"max_tokens\":0}", 400, "max_tokens"},
    {CHAT, "{" USER ",\"echo\":true}", 400, "echo"},
    {CHAT, "{" USER ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{}}}", 400,
     "response_format"},
    {CHAT, "{" USER ",\"function_call\":\"auto\"}", 400, "function_call"},
    {CHAT, "{" USER ",\"tool_choice\":{\"type\":\"function\"}}", 400, "tool_choice"},
    {CHAT, "{" USER ",\"chat_template\":\"{{ x }}\"}", 400, "chat_template"},
    {CHAT, "{" USER ",\"continue_final_message\":true,\"add_generation_prompt\":true}", 400,
     "continue_final_message"},
    {CHAT,
     "{\"messages\":[{\"role\":\"assistant\",\"content\":\"\"}],"
     "\"continue_final_message\":true}",
     400, "continue_final_message"},
    {CHAT, "{" USER ",\"n\":17}", 400, "n"},
    {CHAT, "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"tool_calls\":[{}]}]}", 400,
     "messages"},
    {"/tokenize", "{}", 400, "prompt"},
    {"/tokenize", "{\"prompt\":[\"a\",\"b\"]}", 400, "prompt"},
    {"/tokenize", "{" USER ",\"tools\":[{}]}", 400, "tools"},
    {"/tokenize", "{\"prompt\":\"a\",\"model\":\"x\"}", 404, "model"},
    {"/detokenize", "{}", 400, "tokens"},
    {"/detokenize", "{\"tokens\":\"a\"}", 400, "tokens"},
    {"/detokenize", "{\"tokens\":[4294967296]}", 400, "tokens"},
};

static void test_bad_bodies(void **state)
{
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(bad_bodies); i++) {
        receive(post(bad_bodies[i].path, bad_bodies[i].body));
        if (ans.status != bad_bodies[i].status) {
            fail_msg("%s: got %d %s", bad_bodies[i].body, ans.status, ans.body);
        }
        json_t *j = parse(ans.body);
        assert_true(strlen(str_at(j, "error.message")) > 10);
        assert_true(strlen(str_at(j, "error.message")) < 512);
        assert_string_equal(str_at(j, "error.type"), "invalid_request_error");
        assert_non_null(at(j, "error.code"));
        if (bad_bodies[i].param == NULL) {
            assert_true(json_is_null(at(j, "error.param")));
        } else if (strcmp(str_at(j, "error.param"), bad_bodies[i].param) != 0) {
            fail_msg("%s: %s", bad_bodies[i].body, ans.body);
        }
        json_decref(j);
    }
    assert_int_equal(n_started, 0);
}

/* What the server or the model's files set, what the server cannot do, and too many names. */
static void test_template_kwargs(void **state)
{
    static const struct {
        const char *kwargs, *want;
    } cases[] = {
        {"{\"tools\":null}", "'tools': it is a field of the request itself"},
        {"{\"documents\":[1]}", "'documents'"},
        {"{\"functions\":[{}]}", "'functions'"},
        {"{\"custom_tools\":[{}]}", "'custom_tools'"},
        {"{\"messages\":[]}", "'messages': it is a field of the request"},
        {"{\"add_generation_prompt\":false}", "'add_generation_prompt': it is a field"},
        {"{\"x\":1,\"bos_token\":\"x\"}", "'bos_token': the model's files set it"},
        {"{\"additional_special_tokens\":[]}", "the model's files set it"},
        {"{\"chat_template\":\"x\"}", "'chat_template': the server sets it"},
        {"{\"raise_exception\":1}", "'raise_exception': it is a function of templates"},
    };
    struct bt_buf b = {0};
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        bt_buf_clear(&b);
        bt_buf_printf(&b, "{" USER ",\"chat_template_kwargs\":%s}", cases[i].kwargs);
        receive(post(CHAT, b.data));
        assert_int_equal(ans.status, 400);
        if (strstr(ans.body, cases[i].want) == NULL) {
            fail_msg("%s: %s", cases[i].kwargs, ans.body);
        }
    }
    for (int n = 256; n <= 257; n++) {
        bt_buf_clear(&b);
        bt_buf_puts(&b, "{" USER ",\"chat_template_kwargs\":{\"enable_thinking\":false");
        for (int i = 1; i < n; i++) {
            bt_buf_printf(&b, ",\"k%d\":1", i);
        }
        bt_buf_puts(&b, "}}");
        receive(post("/tokenize", b.data));
        assert_int_equal(ans.status, n == 256 ? 200 : 400);
    }
    assert_non_null(strstr(ans.body, "has 257 members; at most 256"));
    bt_buf_cleanup(&b);
}

static void test_monstrous_bodies(void **state)
{
    (void)state;
    struct bt_buf b = {0};
    for (int kind = 0; kind < 8; kind++) {
        bt_buf_clear(&b);
        bt_buf_puts(&b, "{\"prompt\":");
        if (kind == 0) { /* 10^4 deep */
            for (int i = 0; i < 10000; i++) {
                bt_buf_puts(&b, "[");
            }
        } else if (kind == 1) { /* very many empty arrays */
            bt_buf_puts(&b, "[");
            for (int i = 0; i < 100000; i++) {
                bt_buf_puts(&b, "[],");
            }
        } else if (kind == 2) { /* a million ids, the context is 8192 */
            bt_buf_puts(&b, "[1");
            for (int i = 1; i < 1000000; i++) {
                bt_buf_puts(&b, ",1");
            }
            bt_buf_puts(&b, "]}");
        } else if (kind == 3) { /* exactly the context: nothing is left to generate */
            bt_buf_puts(&b, "[1");
            for (uint32_t i = 1; i < model.max_model_len; i++) {
                bt_buf_puts(&b, ",1");
            }
            bt_buf_puts(&b, "]}");
        } else if (kind == 5) { /* 4 MB of text are refused before they are tokenized */
            bt_buf_puts(&b, "\"");
            for (int i = 0; i < 1000000; i++) {
                bt_buf_puts(&b, "ab, ");
            }
            bt_buf_puts(&b, "\"}");
        } else if (kind == 6 || kind == 7) { /* too many prompts; too many choices of them */
            bt_buf_puts(&b, "[\"a\"");
            for (int i = 1; i < (kind == 6 ? 1025 : 65); i++) {
                bt_buf_puts(&b, ",\"a\"");
            }
            bt_buf_puts(&b, kind == 6 ? "]}" : "],\"n\":16}");
        } else { /* a long name is cut in the answer, and stays valid UTF-8 */
            bt_buf_puts(&b, "\"a\",\"model\":\"");
            for (int i = 0; i < 1000; i++) {
                bt_buf_puts(&b, "x\xf0\x9f\x98\x80");
            }
            bt_buf_puts(&b, "\"}");
        }
        receive(send_raw("POST", "/v1/completions", "Content-Type: application/json\r\n", b.data,
                         b.len));
        assert_int_equal(ans.status, kind == 4 ? 404 : 400);
        json_t *j = parse(ans.body);
        if (kind == 2 || kind == 3) {
            assert_string_equal(str_at(j, "error.code"), "context_length_exceeded");
            assert_non_null(strstr(str_at(j, "error.message"), "8192"));
            assert_non_null(strstr(str_at(j, "error.message"), kind == 2 ? "1000000" : "8192"));
        } else if (kind == 5) {
            assert_string_equal(str_at(j, "error.code"), "context_length_exceeded");
            assert_non_null(strstr(str_at(j, "error.message"), "4000000 bytes"));
        }
        json_decref(j);
    }
    bt_buf_cleanup(&b);
    /* one token less than the context is served */
    bt_buf_puts(&b, "{\"prompt\":[1");
    for (uint32_t i = 2; i < model.max_model_len; i++) {
        bt_buf_puts(&b, ",1");
    }
    bt_buf_puts(&b, "]}");
    int fd = begin("/v1/completions", b.data);
    assert_int_equal(now->spec.max_tokens, 1);
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    bt_buf_cleanup(&b);
}

/* ---- sampling defaults ---- */

/* A model that comes with its own defaults (generation_config.json). */
static int setup_defaults(void **state)
{
    struct bt_model_config own = model;
    model.temperature = 0.6f;
    model.top_p = 0.9f;
    model.top_k = 20;
    model.repetition_penalty = 1.05f;
    model.min_p = 0.05f;
    model.max_new_tokens = 300;
    int rc = setup(state);
    model = own;
    return rc;
}

static void test_sampling_defaults(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"temperature\":null}");
    const struct bt_engine_params *s = &now->spec.sampling;
    assert_true(s->temperature == 0.6f && s->top_p == 0.9f && s->repetition_penalty == 1.05f);
    assert_int_equal(s->top_k, 20);
    assert_true(s->min_p == 0.05f);
    assert_int_equal(now->spec.max_tokens, 16);
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    /* what the client says wins, the rest stays the model's */
    fd = begin("/v1/chat/completions", "{" USER ",\"temperature\":0,\"top_k\":-1}");
    s = &now->spec.sampling;
    assert_true(s->temperature == 0.0f && s->top_p == 0.9f);
    assert_int_equal(s->top_k, 0);
    assert_int_equal(now->spec.max_tokens, 300);
    close(fd);
    WAIT_FOR(n_cancelled == 2);
}

/* Text may hold any character, a number may be written with a fraction of zero, and who names no
 * model means the one there is. */
static void test_unusual_but_right(void **state)
{
    (void)state;
    int fd = begin(COMPLETION, "{\"prompt\":\"a\\u0000b\",\"echo\":true,\"model\":\"\","
                               "\"max_tokens\":16.0,\"n\":2e0,\"seed\":-0.0}");
    struct bt_tokens ids = {0};
    assert_int_equal(bt_tokenizer_encode(tok, "a\0b", 3, true, &ids), BT_OK);
    assert_int_equal(now->spec.prompt.n, ids.n);
    assert_memory_equal(now->spec.prompt.ids, ids.ids, ids.n * sizeof(ids.ids[0]));
    bt_tokens_cleanup(&ids);
    assert_int_equal(now->spec.max_tokens, 16);
    assert_int_equal(now->spec.n, 2);
    assert_int_equal(now->spec.sampling.seed, 0);
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    /* what stands behind a NUL belongs to the message that is gone on with */
    fd = begin(CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\","
                     "\"content\":\"b\\u0000c\"}],\"continue_final_message\":true}");
    struct bt_buf text = {0};
    assert_int_equal(
        bt_tokenizer_decode(tok, now->spec.prompt.ids, now->spec.prompt.n, false, &text), BT_OK);
    assert_true(text.len > 3 && memcmp(text.data + text.len - 3, "b\0c", 3) == 0);
    bt_buf_cleanup(&text);
    close(fd);
    WAIT_FOR(n_cancelled == 2);
}

/* ---- routes ---- */

static void test_routes(void **state)
{
    (void)state;
    static const struct {
        const char *method, *path, *headers;
        int status;
        const char *allow;
    } cases[] = {
        {"GET", "/v2", "", 404, NULL},
        {"GET", "/v1", "", 404, NULL},
        {"POST", "/v1/embeddings", "", 404, NULL},
        {"GET", "/v1/models/x", "", 404, NULL},
        {"GET", "/health/", "", 404, NULL},
        {"GET", "/v1/completions", "", 405, "POST"},
        {"DELETE", "/v1/chat/completions", "", 405, "POST"},
        {"POST", "/v1/models", "", 405, "GET, HEAD"},
        {"PUT", "/health", "", 405, "GET, HEAD"},
        {"POST", "/v1/completions", "Content-Type: text/plain\r\n", 415, NULL},
        {"POST", "/v1/completions", "Content-Type: application/x-www-form-urlencoded\r\n", 415,
         NULL},
        {"POST", "/tokenize", "Content-Type: application/json; charset=latin1\r\n", 415, NULL},
        {"POST", "/tokenize", "Content-Type: application/jsonx\r\n", 415, NULL},
        {"POST", "/v1/completions", "Content-Type: application/json\r\nContent-Encoding: gzip\r\n",
         415, NULL},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        receive(send_raw(cases[i].method, cases[i].path, cases[i].headers, "{}", 2));
        if (ans.status != cases[i].status) {
            fail_msg("%s %s: %d", cases[i].method, cases[i].path, ans.status);
        }
        if (cases[i].allow != NULL) {
            char want[64];
            snprintf(want, sizeof(want), "Allow: %s\r\n", cases[i].allow);
            assert_non_null(strstr(ans.head, want));
        }
        json_t *j = parse(ans.body);
        assert_true(json_is_string(at(j, "error.message")));
        json_decref(j);
    }
    receive(send_raw("HEAD", "/v1/models", "", "", 0));
    assert_int_equal(ans.status, 200);
    assert_string_equal(ans.body, "");
    /* an id that could do harm is not echoed; the answer has another one */
    receive(send_raw("GET", "/health", "x-request-id: a\"b\r\n", "", 0));
    assert_non_null(strstr(ans.head, "x-request-id: "));
    assert_null(strstr(ans.head, "a\"b"));
}

static void test_small_routes(void **state)
{
    (void)state;
    json_t *j = get_json("/v1/models");
    assert_string_equal(str_at(j, "object"), "list");
    assert_string_equal(str_at(j, "data.0.id"), MODEL_ID);
    assert_string_equal(str_at(j, "data.0.object"), "model");
    assert_string_equal(str_at(j, "data.0.root"), MODEL "/");
    assert_int_equal(json_integer_value(at(j, "data.0.created")), 1234567890);
    assert_int_equal(json_integer_value(at(j, "data.0.max_model_len")), 8192);
    json_decref(j);
    j = get_json("/v1/models/" MODEL_ID);
    assert_string_equal(str_at(j, "id"), MODEL_ID);
    json_decref(j);
    j = get_json("/version");
    assert_true(strlen(str_at(j, "version")) > 0);
    json_decref(j);
    receive(send_raw("GET", "/health", "", "", 0));
    assert_int_equal(ans.status, 200);
    not_serving = "no decode worker";
    receive(send_raw("GET", "/health", "", "", 0));
    assert_int_equal(ans.status, 503);
    assert_string_equal(ans.body, "no decode worker");
    receive(send_raw("GET", "/metrics", "", "", 0));
    assert_non_null(strstr(ans.head, "Content-Type: text/plain; version=0.0.4\r\n"));
    assert_non_null(strstr(ans.body, "baton_http_responses_total{code=\"200\"} 4\n"));
    assert_non_null(strstr(ans.body, "baton_http_responses_total{code=\"503\"} 1\n"));
}

static void test_tokenize(void **state)
{
    (void)state;
    json_t *j = post_json("/tokenize", "{\"prompt\":\"ROMEO:\\n\"}");
    assert_int_equal(json_integer_value(at(j, "count")), 3);
    assert_int_equal(json_integer_value(at(j, "max_model_len")), 8192);
    assert_int_equal(json_array_size(at(j, "tokens")), 3);
    assert_int_equal(json_integer_value(at(j, "tokens.0")), 2043);
    json_decref(j);
    j = post_json("/tokenize", "{\"prompt\":\"ROMEO:\\n\",\"add_special_tokens\":false,"
                               "\"return_token_strs\":true}");
    assert_int_equal(json_integer_value(at(j, "count")), 2);
    assert_string_equal(str_at(j, "token_strs.0"), "ROMEO");
    assert_string_equal(str_at(j, "token_strs.1"), ":\xc4\x8a"); /* GPT-2's sign for a newline */
    json_decref(j);
    j = post_json("/tokenize", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}");
    json_int_t with = json_integer_value(at(j, "count"));
    json_decref(j);
    j = post_json("/tokenize", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                               "\"add_generation_prompt\":false}");
    assert_true(json_integer_value(at(j, "count")) < with);
    json_decref(j);
    j = post_json("/detokenize", "{\"tokens\":[2043,870,266]}");
    assert_string_equal(str_at(j, "prompt"), "<|begin_of_text|>ROMEO:\n");
    json_decref(j);
    j = post_json("/detokenize", "{\"tokens\":[]}");
    assert_string_equal(str_at(j, "prompt"), "");
    json_decref(j);
}

/* Ids of a long token again and again: their text is refused before it is made. */
static void test_detokenize_long_text(void **state)
{
    (void)state;
    struct bt_buf b = {0};
    bt_buf_puts(&b, "{\"tokens\":[2045"); /* <|start_header_id|>, 19 bytes */
    for (int i = 0; i < 500000; i++) {
        bt_buf_puts(&b, ",2045");
    }
    bt_buf_puts(&b, "]}");
    receive(post("/detokenize", b.data));
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "longer than 8 MiB"));
    bt_buf_cleanup(&b);
}

/* ---- keys ---- */

static char keys_path[] = "/tmp/test_front_keys_XXXXXX";

static void write_keys(const char *text, mode_t mode)
{
    FILE *file = fopen(keys_path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    assert_int_equal(chmod(keys_path, mode), 0);
}

static int setup_keys(void **state)
{
    (void)state;
    strcpy(keys_path, "/tmp/test_front_keys_XXXXXX");
    int fd = mkstemp(keys_path);
    assert_true(fd >= 0);
    close(fd);
    write_keys("# the team's\n\n  sk-one  \r\nsk-two\n", 0600);
    open_front(keys_path, NULL);
    return 0;
}

static int teardown_keys(void **state)
{
    unlink(keys_path);
    return teardown(state);
}

static void test_keys(void **state)
{
    (void)state;
    static const char *const guarded[] = {"/v1/models", "/v1/models/x", "/v1/nothing",
                                          "/tokenize",  "/detokenize",  "/v1/completions"};
    static const char *const bad[] = {"",
                                      "Authorization: sk-one\r\n",
                                      "Authorization: Bearer\r\n",
                                      "Authorization: Bearer sk\r\n",
                                      "Authorization: Bearer sk-onex\r\n",
                                      "Authorization: Bearer # the team's\r\n",
                                      "Authorization: Basic sk-one\r\n"};
    for (size_t i = 0; i < BT_ARRAY_LEN(guarded); i++) {
        for (size_t k = 0; k < BT_ARRAY_LEN(bad); k++) {
            receive(send_raw("GET", guarded[i], bad[k], "", 0));
            assert_int_equal(ans.status, 401);
            assert_non_null(strstr(ans.head, "WWW-Authenticate: Bearer\r\n"));
            json_t *j = parse(ans.body);
            assert_string_equal(str_at(j, "error.code"), "invalid_api_key");
            assert_null(strstr(ans.body, "sk-"));
            json_decref(j);
        }
    }
    receive(send_raw("GET", "/v1/models", "Authorization: bearer sk-two\r\n", "", 0));
    assert_int_equal(ans.status, 200);
    receive(send_raw("GET", "/health", "", "", 0));
    assert_int_equal(ans.status, 200);
    receive(send_raw("GET", "/metrics", "", "", 0)); /* test_front_keys has the scopes */
    assert_int_equal(ans.status, 401);
    /* each key is a tenant of its own */
    char tenants[2][64];
    static const char body[] = "{\"prompt\":\"a\"}";
    for (int i = 0; i < 2; i++) {
        int fd = send_raw("POST", "/v1/completions",
                          i == 0 ? "Authorization: Bearer sk-one\r\n"
                                 : "Authorization: Bearer sk-two\r\n",
                          body, sizeof(body) - 1);
        WAIT_FOR(now != NULL);
        snprintf(tenants[i], sizeof(tenants[i]), "%s", now->spec.tenant);
        assert_null(strstr(tenants[i], "sk-"));
        close(fd);
        WAIT_FOR(n_cancelled == i + 1);
    }
    assert_string_not_equal(tenants[0], tenants[1]);
    /* this front has no template either */
    static const char chat[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}";
    receive(send_raw("POST", "/v1/chat/completions", "Authorization: Bearer sk-one\r\n", chat,
                     sizeof(chat) - 1));
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "chat template"));
}

static int setup_terms(void **state)
{
    (void)state;
    strcpy(keys_path, "/tmp/test_front_keys_XXXXXX");
    int fd = mkstemp(keys_path);
    assert_true(fd >= 0);
    close(fd);
    write_keys("sk-slow rps=0.01 priority=3 weight=2 slo_ttft_ms=500\n"
               "sk-words tokens_per_s=0.3\nsk-free\n"
               "sk-old tenant=acme weight=3\nsk-new tenant=acme\n",
               0600);
    open_front(keys_path, NULL);
    return 0;
}

static bool readable(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0) > 0;
}

/* Starts a generation with these headers; -1: it was answered at once (ans). */
static int begin_with(const char *headers, const char *body)
{
    int before = n_started;
    int fd = send_raw("POST", "/v1/completions", headers, body, strlen(body));
    WAIT_FOR(n_started > before || readable(fd));
    if (n_started == before) {
        receive(fd);
        return -1;
    }
    return fd;
}

static void leave(int fd)
{
    int before = n_cancelled;
    close(fd);
    WAIT_FOR(n_cancelled == before + 1);
}

/* What stands behind a key holds for its requests; headers and fields only within that. */
static void test_terms_of_keys(void **state)
{
    (void)state;
#define SLOW "Authorization: Bearer sk-slow\r\n"
#define FREE "Authorization: Bearer sk-free\r\n"
    int fd = begin_with(SLOW "x-priority: 1\r\nx-slo-tbt-ms: 50.5\r\n", "{\"prompt\":\"a\"}");
    assert_true(fd >= 0);
    assert_int_equal(now->spec.priority, 3); /* its key's class is the best that it can have */
    assert_true(now->spec.weight == 2 && now->spec.slo_ttft_ms == 500 &&
                now->spec.slo_tbt_ms == 50.5);
    leave(fd);
    assert_int_equal(begin_with(SLOW, "{\"prompt\":\"a\"}"), -1);
    assert_int_equal(ans.status, 429);
    assert_non_null(strstr(ans.head, "Retry-After: 100\r\n"));
    assert_non_null(strstr(ans.body, "rate_limit_exceeded"));
    assert_non_null(strstr(ans.body, "requests a second"));
    fd = begin_with(FREE "x-slo-ttft-ms: 9\r\n", "{\"prompt\":\"a\",\"priority\":-7}");
    assert_int_equal(now->spec.priority, -7);
    assert_true(now->spec.weight == 0 && now->spec.slo_ttft_ms == 9 && now->spec.slo_tbt_ms == 0);
    leave(fd);
    fd = begin_with("Authorization: Bearer sk-words\r\n", "{\"prompt\":[1,2]}");
    assert_true(fd >= 0);
    done(5, 0); /* two of the prompt and five more: three saved up are not enough */
    receive(fd);
    assert_int_equal(ans.status, 200);
    assert_int_equal(begin_with("Authorization: Bearer sk-words\r\n", "{\"prompt\":[1,2]}"), -1);
    assert_int_equal(ans.status, 429);
    assert_non_null(strstr(ans.body, "tokens a second"));
    for (int i = 0; i < 2; i++) { /* two keys of one tenant: one cache, one set of terms */
        fd = begin_with(i == 0 ? "Authorization: Bearer sk-old\r\n"
                               : "Authorization: Bearer sk-new\r\n",
                        "{\"prompt\":\"a\"}");
        assert_string_equal(now->spec.tenant, "acme");
        assert_true(now->spec.weight == 3);
        leave(fd);
    }
    assert_string_equal(bt_front_tenant(front, "acme"), "acme");
    assert_null(bt_front_tenant(front, "sk-new"));
    static const char *const bad[] = {"x-priority: high\r\n", "x-priority: 1.5\r\n",
                                      "x-priority: 3000000000\r\n", "x-priority: -\r\n"};
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        char headers[128];
        snprintf(headers, sizeof(headers), FREE "%s", bad[i]);
        assert_int_equal(begin_with(headers, "{\"prompt\":\"a\"}"), -1);
        assert_int_equal(ans.status, 400);
        assert_non_null(strstr(ans.body, "give a whole number from -2147483648 to 2147483647"));
    }
    /* Which of two would be meant? */
    static const char *const twice[] = {"x-priority: 1\r\nX-Priority: 2\r\n",
                                        "x-slo-ttft-ms: 5\r\nx-slo-ttft-ms: 5000\r\n",
                                        "x-baton-plan: 1\r\nx-baton-plan: 0\r\n"};
    for (size_t i = 0; i < BT_ARRAY_LEN(twice); i++) {
        char headers[128];
        snprintf(headers, sizeof(headers), FREE "%s", twice[i]);
        assert_int_equal(begin_with(headers, "{\"prompt\":\"a\"}"), -1);
        assert_int_equal(ans.status, 400);
        assert_non_null(strstr(ans.body, "more than once with different values"));
    }
    fd = begin_with(FREE "x-priority: 2\r\nx-priority: 2\r\n", "{\"prompt\":\"a\"}");
    assert_int_equal(now->spec.priority, 2);
    leave(fd);
}

static void expect_refused(const char *path, const char *word)
{
    char err[256] = "";
    struct bt_front *other = NULL;
    struct bt_front_config conf = {.model_path = MODEL, .model = &model, .api_keys_file = path};
    bt_http_options_default(&conf.http);
    conf.http.listen = "127.0.0.1:0";
    struct bt_metrics *m = bt_metrics_create();
    struct bt_front_parts parts = {.loop = loop, .tok = tok, .metrics = m};
    assert_int_equal(bt_front_create(&parts, &conf, &other, NULL, err, sizeof(err)), BT_ERR_CONFIG);
    bt_metrics_destroy(m);
    if (strstr(err, word) == NULL || strstr(err, path) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err, word);
    }
}

static void test_bad_key_files(void **state)
{
    (void)state;
    char err[256] = "";
    expect_refused("/nonexistent/keys", "No such file");
    expect_refused("/tmp", "it is a directory");
    write_keys("sk-one\n", 0644);
    expect_refused(keys_path, "chmod");
    write_keys("# nothing\n\n", 0600);
    expect_refused(keys_path, "no key");
    static const struct {
        const char *text, *says; /* the line, too */
    } whole[] = {
        {"sk-one\n\nsk-two\nsk-one tenant=b\n", ":4: this key is listed twice"},
        {"sk-one rps=1 rps=2\n", ":1: rps= occurs twice"},
        {"sk-one tenant=a tenant=b\n", ":1: tenant= occurs twice"},
        {"# two\nsk one\n", ":2: 'one' is not one of tenant="},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(whole); i++) {
        write_keys(whole[i].text, 0600);
        expect_refused(keys_path, whole[i].says);
    }
    static const char *const terms[] = {"rps=0",   "rps=many",     "weight",
                                        "speed=3", "priority=1.5", "slo_ttft_ms=-1"};
    for (size_t i = 0; i < BT_ARRAY_LEN(terms); i++) {
        char text[64];
        snprintf(text, sizeof(text), "sk-one rps=2\nsk-two %s\n", terms[i]);
        write_keys(text, 0600);
        expect_refused(keys_path, terms[i]);
    }
    static const char *const names[] = {"tenant=", "tenant=-", "tenant=a/b",
                                        "tenant=a-name-that-is-longer-than-it-may-be"};
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        char text[96];
        snprintf(text, sizeof(text), "sk-one %s\n", names[i]);
        write_keys(text, 0600);
        expect_refused(keys_path, names[i]);
    }
    write_keys("sk-one tenant=a\nsk-two tenant=a rps=2\n", 0600);
    expect_refused(keys_path, "with its first key only");
    char line[1024];
    memset(line, 'k', sizeof(line));
    line[sizeof(line) - 1] = '\0';
    write_keys(line, 0600);
    expect_refused(keys_path, "512");
    /* an address in use is named, too */
    struct bt_front *other = NULL;
    char taken[32];
    struct bt_front_config conf = {.model_path = MODEL, .model = &model};
    bt_http_options_default(&conf.http);
    snprintf(taken, sizeof(taken), "127.0.0.1:%d", port);
    conf.http.listen = taken;
    struct bt_metrics *m = bt_metrics_create();
    struct bt_front_parts parts = {.loop = loop, .tok = tok, .metrics = m};
    assert_int_equal(bt_front_create(&parts, &conf, &other, NULL, err, sizeof(err)), BT_ERR_IO);
    bt_metrics_destroy(m);
    assert_non_null(strstr(err, taken));
}

/* Valid JSON has numbers of any size: they are ignored where nobody reads them, and name their
 * field where somebody does. */
static void test_huge_numbers(void **state)
{
    (void)state;
    static const char *const taken[] = {
        "\"user\":{\"id\":123456789012345678901234567890}",
        "\"user\":[-9223372036854775809,18446744073709551616,1e400,-9E+999,9e308]",
        "\"metadata\":{\"\\\"1\":\"\\\\\",\"x\":99999999999999999999}",
        "\"seed\":9223372036854775807",
        "\"seed\":-9223372036854775808",
        "\"user\":\"99999999999999999999999 1e999\""};
    for (size_t i = 0; i < BT_ARRAY_LEN(taken); i++) {
        char body[256];
        snprintf(body, sizeof(body), "{\"prompt\":\"a\",%s}", taken[i]);
        int fd = begin(COMPLETION, body);
        if (i == 3 || i == 4) {
            assert_true(now->spec.sampling.seed == (i == 3 ? INT64_MAX : (uint64_t)INT64_MIN));
        }
        close(fd);
        WAIT_FOR(n_cancelled == (int)i + 1);
    }
    static const struct {
        const char *member, *says;
    } known[] = {
        {"\"seed\":9223372036854775808", "'seed' is a number that does not fit into 64 bits; "
                                         "allowed: -9223372036854775808 to 9223372036854775807"},
        {"\"seed\":-99999999999999999999", "'seed' is a number that does not fit into 64 bits"},
        {"\"max_tokens\":123456789012345678901234567890", "allowed: 1 to 2147483647"},
        {"\"n\":1e400", "'n' is a number that does not fit into 64 bits; allowed: 1 to 16"},
        {"\"temperature\":99999999999999999999",
         "'temperature' is out of range; allowed: 0 to 100"},
        {"\"stop_token_ids\":[99999999999999999999]", "token ids of this model are 0 to"},
        {"\"logit_bias\":{\"5\":99999999999999999999}", "values -100 to 100"},
        {"\"stream\":99999999999999999999", "'stream' must be true or false"},
        /* no numbers at all */
        {"\"user\":00000000000000000000001", "not valid JSON"},
        {"\"user\":99999999999999999999.", "not valid JSON"},
        {"\"user\":99999999999999999999e", "not valid JSON"},
        {"\"user\":-", "not valid JSON"},
        {"\"user\":--99999999999999999999", "not valid JSON"},
        {"\"user\":9999999999999999999999x", "not valid JSON"},
        {"\"user\":99999999999999999999 99999999999999999999", "not valid JSON"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(known); i++) {
        char body[256];
        snprintf(body, sizeof(body), "{\"prompt\":\"a\",%s}", known[i].member);
        receive(post(COMPLETION, body));
        assert_int_equal(ans.status, 400);
        if (strstr(ans.body, known[i].says) == NULL) {
            fail_msg("%s: %s", known[i].member, ans.body);
        }
    }
    receive(post("/detokenize", "{\"tokens\":[1,99999999999999999999]}"));
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "'tokens[1]' is a number that does not fit into 64 bits"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_bad_bodies),
        T(test_template_kwargs),
        T(test_monstrous_bodies),
        T(test_unusual_but_right),
        T(test_huge_numbers),
        cmocka_unit_test_setup_teardown(test_sampling_defaults, setup_defaults, teardown),
        T(test_routes),
        T(test_small_routes),
        T(test_tokenize),
        T(test_detokenize_long_text),
        cmocka_unit_test_setup_teardown(test_keys, setup_keys, teardown_keys),
        cmocka_unit_test_setup_teardown(test_terms_of_keys, setup_terms, teardown_keys),
        cmocka_unit_test_setup_teardown(test_bad_key_files, setup_keys, teardown_keys),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
