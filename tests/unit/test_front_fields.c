/* Which fields a request may have: spelling mistakes and fields of other routes are refused by
 * name, and what popular clients send is not. Fixture: front_fixture.h. */
#include "tests/unit/front_fixture.h"

#define COMPLETION "/v1/completions"
#define CHAT       "/v1/chat/completions"
#define HELLO      "{\"role\":\"user\",\"content\":\"a\"}"
#define USER       "\"messages\":[" HELLO "]"

static const struct {
    const char *path, *body, *param, *says; /* says: part of the message, NULL: any */
} refused[] = {
    {COMPLETION, "{\"prompt\":\"a\",\"max_token\":5}", "max_token", "did you mean 'max_tokens'?"},
    {COMPLETION, "{\"prompt\":\"a\",\"temprature\":0}", "temprature", "did you mean 'temperature'"},
    {COMPLETION, "{\"prompt\":\"a\",\"Temperature\":0}", "Temperature", "mean 'temperature'"},
    {COMPLETION, "{\"prompt\":\"a\",\"max_token\":null}", "max_token", NULL},
    {COMPLETION, "{\"prompt\":\"a\",\"dry_multiplier\":0.8}", "dry_multiplier", "not supported"},
    {COMPLETION, "{\"prompt\":\"a\",\"max_new_tokens\":5}", "max_new_tokens", "max_tokens"},
    {COMPLETION, "{\"prompt\":\"a\",\"do_sample\":false}", "do_sample", "temperature"},
    {COMPLETION, "{\"prompt\":\"a\",\"truncate_prompt_tokens\":0}", "truncate_prompt_tokens", NULL},
    {COMPLETION, "{\"prompt\":\"a\",\"\":1}", NULL, NULL},
    {COMPLETION, "{\"prompt\":\"a\"," USER "}", "messages", "/v1/chat/completions"},
    {COMPLETION, "{\"prompt\":\"a\",\"top_logprobs\":2}", "top_logprobs", NULL},
    {COMPLETION, "{\"prompt\":\"a\",\"extra_body\":{\"top_k\":5}}", "extra_body", "directly into"},
    {COMPLETION, "{\"prompt\":\"a\",\"stream_options\":{\"include_usage\":true}}", "stream_options",
     "'stream': true"},
    {COMPLETION, "{\"prompt\":\"a\",\"stream\":true,\"stream_options\":{\"include_usge\":true}}",
     "stream_options.include_usge", "did you mean 'stream_options.include_usage'?"},
    {COMPLETION,
     "{\"prompt\":\"a\",\"response_format\":{\"type\":\"text\",\"json_schema\":{\"a\":1}}}",
     "response_format.json_schema", NULL},
    {CHAT, "{" USER ",\"prompt\":\"a\"}", "prompt", "/v1/completions"},
    {COMPLETION, "{\"prompt\":\"a\",\"thinking_token_budget\":5}", "thinking_token_budget", "chat"},
    {CHAT, "{" USER ",\"max_completion_token\":5}", "max_completion_token",
     "max_completion_tokens"},
    {CHAT, "{\"messages\":[" HELLO ",{\"role\":\"user\",\"contents\":\"a\",\"content\":\"a\"}]}",
     "messages[1].contents", "did you mean 'messages[1].content'?"},
    {CHAT, "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"prefix\":true}]}",
     "messages[0].prefix", "continue_final_message"},
    {CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"name\":5}]}", "messages", "name"},
    {CHAT,
     "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\","
     "\"txt\":\"b\"}]}]}",
     "messages[0].content[0].txt", "did you mean 'messages[0].content[0].text'?"},
    {"/tokenize", "{\"prompt\":\"a\",\"return_token_str\":true}", "return_token_str",
     "return_token_strs"},
    {"/tokenize", "{\"prompt\":\"a\"," USER "}", "prompt", "cannot be combined"},
    {"/detokenize", "{\"token\":[1]}", "token", "did you mean 'tokens'?"},
};

static void test_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(refused); i++) {
        receive(post(refused[i].path, refused[i].body));
        json_t *j = parse(ans.body);
        const char *param = json_string_value(at(j, "error.param"));
        if (ans.status != 400 ||
            (refused[i].param != NULL && (param == NULL || strcmp(param, refused[i].param) != 0)) ||
            (refused[i].says != NULL &&
             strstr(str_at(j, "error.message"), refused[i].says) == NULL)) {
            fail_msg("%s: got %d %s", refused[i].body, ans.status, ans.body);
        }
        json_decref(j);
    }
    assert_int_equal(n_started, 0);
}

/* Names as long as a body may be are refused quickly and cut in the answer. */
static void test_long_name(void **state)
{
    (void)state;
    struct bt_buf b = {0};
    bt_buf_puts(&b, "{\"prompt\":\"a\",\"");
    for (int i = 0; i < 100000; i++) {
        bt_buf_puts(&b, "max_tokens\xf0\x9f\x98\x80");
    }
    bt_buf_puts(&b, "\":1}");
    receive(send_raw("POST", COMPLETION, "Content-Type: application/json\r\n", b.data, b.len));
    bt_buf_cleanup(&b);
    assert_int_equal(ans.status, 400);
    json_t *j = parse(ans.body);
    assert_non_null(strstr(str_at(j, "error.message"), "max_tokens"));
    json_decref(j);
}

/* What clients send by default, with the least of a prompt. */
static const struct {
    const char *client, *path, *body;
} clients[] = {
    {"curl", COMPLETION, "{\"prompt\":\"a\"}"},
    {"openai: all of chat's fields that ask for nothing", CHAT,
     "{" USER ",\"model\":\"" MODEL_ID "\",\"audio\":null,\"frequency_penalty\":0,"
     "\"function_call\":null,\"functions\":null,\"logit_bias\":null,\"logprobs\":false,"
     "\"max_completion_tokens\":4,\"metadata\":{\"a\":\"b\"},\"modalities\":[\"text\"],\"n\":1,"
     "\"parallel_tool_calls\":true,\"prediction\":null,\"presence_penalty\":0,"
     "\"prompt_cache_key\":\"k\",\"prompt_cache_retention\":\"24h\",\"reasoning_effort\":\"low\","
     "\"response_format\":{\"type\":\"text\"},\"safety_identifier\":\"s\",\"seed\":1,"
     "\"service_tier\":\"auto\",\"stop\":null,\"store\":false,\"stream\":false,"
     "\"stream_options\":null,\"temperature\":1,\"tool_choice\":\"auto\",\"tools\":[],"
     "\"top_logprobs\":null,\"top_p\":1,\"user\":\"u\",\"verbosity\":\"medium\","
     "\"web_search_options\":null}"},
    {"openai: an answer's message goes back", CHAT,
     "{\"messages\":[" HELLO ",{\"role\":\"assistant\",\"content\":\"b\",\"refusal\":null,"
     "\"annotations\":[],\"audio\":null,\"function_call\":null,\"tool_calls\":null}," HELLO "]}"},
    {"openai: a stream", CHAT,
     "{" USER ",\"stream\":true,\"stream_options\":{\"include_usage\":true,"
     "\"include_obfuscation\":false}}"},
    {"LangChain OpenAI", COMPLETION,
     "{\"model\":\"" MODEL_ID "\",\"prompt\":[\"a\"],\"frequency_penalty\":0,\"logit_bias\":{},"
     "\"logprobs\":null,\"max_tokens\":256,\"n\":1,\"presence_penalty\":0,\"seed\":null,"
     "\"temperature\":0.7,\"top_p\":1}"},
    {"LangChain ChatOpenAI", CHAT,
     "{\"messages\":[{\"content\":\"a\",\"role\":\"system\"}," HELLO "],\"model\":\"" MODEL_ID "\","
     "\"max_completion_tokens\":9,\"n\":1,\"stream\":true,\"temperature\":0.7,"
     "\"stream_options\":{\"include_usage\":true},\"parallel_tool_calls\":false}"},
    {"LlamaIndex OpenAILike", CHAT,
     "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"}]}],"
     "\"model\":\"" MODEL_ID "\",\"stream\":false,\"temperature\":0.1,\"max_tokens\":64}"},
    {"vLLM bench serve", COMPLETION,
     "{\"model\":\"" MODEL_ID "\",\"prompt\":\"a\",\"temperature\":0.0,\"repetition_penalty\":1.0,"
     "\"best_of\":1,\"max_tokens\":16,\"logprobs\":null,\"stream\":true,\"ignore_eos\":true,"
     "\"use_beam_search\":false,\"stream_options\":{\"include_usage\":true}}"},
    {"vLLM bench serve, chat", CHAT,
     "{\"model\":\"" MODEL_ID "\",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\","
     "\"text\":\"a\"}]}],\"max_completion_tokens\":16,\"stream\":true,\"temperature\":0.0,"
     "\"stream_options\":{\"include_usage\":true},\"ignore_eos\":true}"},
    {"vLLM's own fields at their defaults", CHAT,
     "{" USER ",\"use_beam_search\":false,\"top_k\":null,\"min_p\":0.0,\"repetition_penalty\":1.0,"
     "\"length_penalty\":1.0,\"stop_token_ids\":[],\"include_stop_str_in_output\":false,"
     "\"ignore_eos\":false,\"min_tokens\":0,\"skip_special_tokens\":true,"
     "\"spaces_between_special_tokens\":true,\"truncate_prompt_tokens\":null,"
     "\"prompt_logprobs\":null,\"allowed_token_ids\":null,\"bad_words\":[],\"echo\":false,"
     "\"add_generation_prompt\":true,\"continue_final_message\":false,"
     "\"add_special_tokens\":false,\"documents\":null,\"chat_template\":null,"
     "\"chat_template_kwargs\":{\"enable_thinking\":false},\"mm_processor_kwargs\":null,"
     "\"structured_outputs\":null,\"priority\":0,\"request_id\":\"r\",\"cache_salt\":null,"
     "\"logits_processors\":null,\"return_tokens_as_token_ids\":null,\"return_token_ids\":false,"
     "\"kv_transfer_params\":null,\"vllm_xargs\":null,\"include_reasoning\":true}"},
    {"sglang bench_serving", COMPLETION,
     "{\"model\":\"" MODEL_ID "\",\"prompt\":\"a\",\"temperature\":0.0,\"best_of\":1,"
     "\"max_tokens\":16,\"stream\":true,\"ignore_eos\":true,"
     "\"stream_options\":{\"include_usage\":true}}"},
    {"sglang's own fields at their defaults", CHAT,
     "{" USER ",\"regex\":null,\"ebnf\":null,\"no_stop_trim\":false,\"stop_regex\":null,"
     "\"lora_path\":null,\"session_params\":null,\"separate_reasoning\":true,"
     "\"stream_reasoning\":true,\"return_hidden_states\":false,\"rid\":\"r\"}"},
    {"genai-perf", CHAT,
     "{\"model\":\"" MODEL_ID "\"," USER ",\"stream\":true,\"max_tokens\":16,\"min_tokens\":16,"
     "\"ignore_eos\":true,\"stream_options\":{\"include_usage\":true}}"},
    {"genai-perf, completions", COMPLETION,
     "{\"model\":\"" MODEL_ID "\",\"prompt\":[\"a\"],\"stream\":true,\"max_tokens\":16}"},
    {"aiperf", CHAT,
     "{\"model\":\"" MODEL_ID
     "\",\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"name\":\"\"}],"
     "\"stream\":true,\"max_completion_tokens\":16,\"min_tokens\":16,\"ignore_eos\":true,"
     "\"stream_options\":{\"include_usage\":true}}"},
    {"guidellm", COMPLETION,
     "{\"model\":\"" MODEL_ID "\",\"prompt\":\"a\",\"stream\":true,\"max_tokens\":16,"
     "\"max_completion_tokens\":16,\"stop\":null,\"ignore_eos\":true,"
     "\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true}}"},
    {"lm-eval-harness local-completions, likelihood", COMPLETION,
     "{\"model\":\"" MODEL_ID "\",\"prompt\":[[1,2,3]],\"max_tokens\":1,\"logprobs\":1,"
     "\"seed\":1234,\"echo\":true,\"temperature\":0}"},
    {"lm-eval-harness local-completions, text", COMPLETION,
     "{\"model\":\"" MODEL_ID "\",\"prompt\":[\"a\"],\"max_tokens\":256,\"temperature\":0,"
     "\"stop\":[\"\\n\\n\",\"Question:\"],\"seed\":1234}"},
    {"lm-eval-harness local-chat-completions", CHAT,
     "{\"model\":\"" MODEL_ID "\",\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"type\":"
     "\"text\"}],\"max_tokens\":256,\"temperature\":0,\"stop\":[\"a\"],\"seed\":1234}"},
    {"litellm", CHAT,
     "{\"model\":\"" MODEL_ID "\",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\","
     "\"text\":\"a\",\"cache_control\":{\"type\":\"ephemeral\"}}]}],\"extra_body\":{},"
     "\"user\":\"u\",\"metadata\":{}}"},
    {"Open WebUI", CHAT,
     "{\"stream\":true,\"model\":\"" MODEL_ID "\"," USER ",\"stream_options\":{\"include_usage\":"
     "true},\"temperature\":0.8,\"max_tokens\":100,\"seed\":3,\"reasoning_effort\":\"medium\"}"},
    {"editors that keep records in messages", CHAT,
     "{\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"id\":5,\"opts\":{\"visible\":false},"
     "\"timestamp\":1,\"metadata\":{}}],\"stream\":true}"},
};

static void test_clients(void **state)
{
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(clients); i++) {
        int before = n_cancelled;
        print_message("%s\n", clients[i].client);
        close(begin(clients[i].path, clients[i].body));
        WAIT_FOR(n_cancelled > before);
    }
    json_decref(post_json("/tokenize", "{\"model\":\"" MODEL_ID "\",\"prompt\":\"a\","
                                       "\"add_special_tokens\":true,\"return_token_strs\":false}"));
    json_decref(post_json("/detokenize", "{\"model\":\"" MODEL_ID "\",\"tokens\":[1]}"));
}

/* A prompt of n ids with what else is asked for. */
static void put_prompt(struct bt_buf *b, uint32_t n, const char *more)
{
    bt_buf_clear(b);
    bt_buf_printf(b, "{%s\"prompt\":[1", more);
    for (uint32_t i = 1; i < n; i++) {
        bt_buf_puts(b, ",1");
    }
    bt_buf_puts(b, "]}");
}

/* Lengths given by number must fit into the context together; without them the rest is used. */
static void test_context(void **state)
{
    (void)state;
    static const struct {
        uint32_t n;
        const char *more, *sum; /* sum: what the error says is asked for; NULL: it is served */
        uint32_t max_tokens;
    } cases[] = {
        {8000, "\"max_tokens\":500,", "8500", 0},
        {8000, "\"max_completion_tokens\":193,", "8193", 0},
        {8000, "\"max_tokens\":2147483647,", "2147491647", 0},
        {8190, "\"min_tokens\":3,", "8193", 0},
        {8000, "\"max_tokens\":192,", NULL, 192},
        {8190, "", NULL, 2},
        {8190, "\"max_tokens\":null,", NULL, 2},
        {8192, "\"max_tokens\":0,\"echo\":true,", NULL, 0},
    };
    struct bt_buf b = {0};
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        put_prompt(&b, cases[i].n, cases[i].more);
        if (cases[i].sum == NULL) {
            int before = n_cancelled;
            int fd = begin(COMPLETION, b.data);
            assert_int_equal(now->spec.max_tokens, cases[i].max_tokens);
            close(fd);
            WAIT_FOR(n_cancelled > before);
            continue;
        }
        receive(send_raw("POST", COMPLETION, "Content-Type: application/json\r\n", b.data, b.len));
        assert_int_equal(ans.status, 400);
        json_t *j = parse(ans.body);
        assert_string_equal(str_at(j, "error.param"), "prompt");
        assert_string_equal(str_at(j, "error.code"), "context_length_exceeded");
        const char *message = str_at(j, "error.message");
        assert_non_null(strstr(message, "maximum context length is 8192 tokens"));
        assert_non_null(strstr(message, cases[i].sum));
        json_decref(j);
    }
    bt_buf_cleanup(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_long_name, setup, teardown),
        cmocka_unit_test_setup_teardown(test_clients, setup, teardown),
        cmocka_unit_test_setup_teardown(test_context, setup, teardown),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
