/* Reasoning and calls of tools in /v1/messages and /v1/responses: what the chat template gets, and
 * answers whole and streamed. Scripted tokens. Fixture: front_fixture.h. */
#include "tests/unit/front_fixture.h"

static const char form[] =
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}"
    "{% if m.reasoning_content is defined %}|thought {{ m.reasoning_content }}{% endif %}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}|{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}"
    "{% if m.tool_call_id is defined %}|{{ m.tool_call_id }}{% endif %}]{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking is defined %}"
    "{{ enable_thinking }}{% endif %}{# <tool_call> <think> #}";

static int open_own(void **state)
{
    (void)state;
    open_with_template(form);
    return 0;
}

/* ---- prompts ---- */

static void expect_prompt(const char *path, const char *body, const char *want)
{
    struct bt_buf text = {0};
    int fd = begin(path, body);
    assert_int_equal(
        bt_tokenizer_decode(tok, now->spec.prompt.ids, now->spec.prompt.n, false, &text), BT_OK);
    assert_string_equal(text.data, want);
    bt_buf_cleanup(&text);
    fail_now(500, "enough", 0);
    receive(fd);
}

#define F_TOOL                                                                                     \
    "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"d\", "           \
    "\"parameters\": {\"type\": \"object\"}}}]"
#define HISTORY                                                                                    \
    "[system|s][user|a][assistant|None|thought hm|c1 f {\"x\": 0.1}|c2 f {}][tool|r|c1]"           \
    "[tool|Error: no|c2][user|b]"

static void test_prompts_of_messages(void **state)
{
    (void)state;
    expect_prompt(
        "/v1/messages",
        "{\"max_tokens\":8,\"system\":\"s\",\"messages\":[{\"role\":\"user\",\"content\":\"a\"},"
        "{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\",\"thinking\":\"hm\","
        "\"signature\":\"\"},{\"type\":\"tool_use\",\"id\":\"c1\",\"name\":\"f\",\"input\":{\"x\":"
        "0.1}},{\"type\":\"tool_use\",\"id\":\"c2\",\"name\":\"f\",\"input\":{}}]},{\"role\":"
        "\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"c1\",\"content\":[{"
        "\"type\":\"text\",\"text\":\"r\"}]},{\"type\":\"tool_result\",\"tool_use_id\":\"c2\","
        "\"content\":\"no\",\"is_error\":true},{\"type\":\"text\",\"text\":\"b\"}]}],\"tools\":[{"
        "\"name\":\"f\",\"description\":\"d\",\"input_schema\":{\"type\":\"object\"}}]}",
        HISTORY F_TOOL);
}

static void test_thinking(void **state)
{
    (void)state;
    static const char *const types[][2] = {
        {"enabled", "[user|a]True"}, {"disabled", "[user|a]False"}, {"adaptive", "[user|a]"}};
    for (size_t i = 0; i < BT_ARRAY_LEN(types); i++) {
        char *body = bt_sprintf("{\"max_tokens\":8,\"messages\":[{\"role\":\"user\",\"content\":"
                                "\"a\"}],\"thinking\":{\"type\":\"%s\"}}",
                                types[i][0]);
        expect_prompt("/v1/messages", body, types[i][1]);
        free(body);
    }
}

/* Each field of a budget becomes the same spec; with none there is none. */
static void test_budgets(void **state)
{
    (void)state;
#define ASK "\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]"
    static const struct {
        const char *path, *body;
        int64_t budget; /* -1: none */
        const char *prompt;
    } cases[] = {
        {"/v1/chat/completions", "{" ASK "}", -1, "[user|a]"},
        {"/v1/chat/completions", "{" ASK ",\"thinking_token_budget\":7}", 7, "[user|a]"},
        {"/v1/chat/completions", "{" ASK ",\"thinking_token_budget\":-1}", -1, "[user|a]"},
        {"/v1/chat/completions", "{" ASK ",\"thinking_budget\":0,\"enable_thinking\":true}", 0,
         "[user|a]True"},
        {"/v1/chat/completions", "{" ASK ",\"chat_template_kwargs\":{\"thinking_budget\":9}}", 9,
         "[user|a]"},
        {"/v1/chat/completions",
         "{" ASK ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":5},\"thinking_budget\":5}",
         5, "[user|a]True"},
        {"/v1/chat/completions", "{" ASK ",\"reasoning\":{\"max_tokens\":6,\"effort\":\"none\"}}",
         6, "[user|a]False"},
        {"/v1/chat/completions", "{" ASK ",\"reasoning_effort\":\"none\"}", -1, "[user|a]False"},
        {"/v1/messages",
         "{\"max_tokens\":8," ASK ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":2048}}",
         2048, "[user|a]True"},
        {"/v1/messages", "{\"max_tokens\":8," ASK ",\"output_config\":{\"effort\":\"none\"}}", -1,
         "[user|a]False"},
        {"/v1/responses", "{\"input\":\"a\",\"reasoning\":{\"max_tokens\":3}}", 3, "[user|a]"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        struct bt_buf text = {0};
        int fd = begin(cases[i].path, cases[i].body);
        const struct bt_gen_thoughts *t = &now->spec.thoughts;
        assert_int_equal(t->n_force > 0, cases[i].budget >= 0);
        if (cases[i].budget >= 0) {
            assert_int_equal(t->budget, cases[i].budget);
            assert_false(t->begun);
            assert_string_equal(t->open.text, "<think>");
            assert_int_equal(t->n_ends, 1);
            assert_string_equal(t->ends[0].text, "</think>");
            assert_int_equal(bt_tokenizer_decode(tok, t->force, t->n_force, false, &text), BT_OK);
            assert_string_equal(text.data, "</think>");
        }
        bt_buf_clear(&text);
        assert_int_equal(
            bt_tokenizer_decode(tok, now->spec.prompt.ids, now->spec.prompt.n, false, &text),
            BT_OK);
        assert_string_equal(text.data, cases[i].prompt);
        bt_buf_cleanup(&text);
        fail_now(500, "enough", 0);
        receive(fd);
    }
    static const char *const wrong[][2] = {
        {",\"thinking_token_budget\":\"7\"}", "thinking_token_budget"},
        {",\"thinking_budget\":-2}", "thinking_budget"},
        {",\"thinking_budget\":1,\"thinking_token_budget\":2}", "thinking_budget"},
        {",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1.5}}", "thinking.budget_tokens"},
        {",\"thinking\":true}", "thinking"},
        {",\"reasoning\":{\"max_tokens\":1e30}}", "reasoning.max_tokens"},
        {",\"reasoning\":{\"efort\":\"low\"}}", "reasoning.efort"},
        {",\"reasoning_effort\":3}", "reasoning_effort"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(wrong); i++) {
        char *body = bt_sprintf("{" ASK "%s", wrong[i][0]);
        receive(post("/v1/chat/completions", body));
        json_t *j = parse(ans.body);
        assert_int_equal(ans.status, 400);
        assert_string_equal(str_at(j, "error.param"), wrong[i][1]);
        json_decref(j);
        free(body);
    }
}

static void test_prompts_of_responses(void **state)
{
    (void)state;
    expect_prompt(
        "/v1/responses",
        "{\"instructions\":\"s\",\"input\":[{\"role\":\"user\",\"content\":\"a\"},{\"type\":"
        "\"reasoning\",\"summary\":[],\"content\":[{\"type\":\"reasoning_text\",\"text\":\"hm\"}]},"
        "{\"type\":\"function_call\",\"call_id\":\"c1\",\"name\":\"f\",\"arguments\":"
        "\"{\\\"x\\\":0.1}\"},{\"type\":\"function_call\",\"call_id\":\"c2\",\"name\":\"f\","
        "\"arguments\":\"{}\"},{\"type\":\"function_call_output\",\"call_id\":\"c1\",\"output\":"
        "\"r\"},{\"type\":\"function_call_output\",\"call_id\":\"c2\",\"output\":[{\"type\":"
        "\"input_text\",\"text\":\"Error: no\"}]},{\"role\":\"user\",\"content\":\"b\"}],\"tools\":"
        "[{\"type\":\"function\",\"name\":\"f\",\"description\":\"d\",\"parameters\":{\"type\":"
        "\"object\"},\"strict\":null}]}",
        HISTORY F_TOOL);
}

/* ---- answers ---- */

#define MESSAGES                                                                                   \
    "{\"max_tokens\":99,\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[{"         \
    "\"name\":\"f\",\"input_schema\":{\"type\":\"object\"}}]"
#define RESPONSES                                                                                  \
    "{\"input\":\"a\",\"tools\":[{\"type\":\"function\",\"name\":\"f\",\"parameters\":{\"type\":"  \
    "\"object\"}}]"

static uint32_t offset; /* of the next token's text */

static void say(const char *text)
{
    struct bt_gen_token t = {.id = 40, .logprob = -0.5f, .text_offset = offset};
    offset += (uint32_t)strlen(text);
    delta(text, &t, 1);
}

/* Reasoning, text and two calls. */
static void speak(void)
{
    static const char *const texts[] = {"<think>",
                                        "\nh",
                                        "m\n",
                                        "</think>",
                                        "\n\n",
                                        "I ",
                                        "see",
                                        "<tool_call>",
                                        "\n{\"name\": \"f\", \"arguments\"",
                                        ": {\"x\"",
                                        ": \"\\\"\"}}",
                                        "\n</tool_call>",
                                        "\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}"
                                        "\n</tool_call>"};
    offset = 0;
    for (size_t i = 0; i < BT_ARRAY_LEN(texts); i++) {
        say(texts[i]);
    }
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    done(BT_ARRAY_LEN(texts), 0);
}

static json_t *whole(const char *path, const char *body)
{
    int fd = begin(path, body);
    speak();
    receive(fd);
    assert_int_equal(ans.status, 200);
    return parse(ans.body);
}

static void test_whole_message(void **state)
{
    (void)state;
    json_t *j = whole("/v1/messages", MESSAGES "}");
    assert_string_equal(str_at(j, "stop_reason"), "tool_use");
    assert_int_equal(json_array_size(at(j, "content")), 4);
    assert_string_equal(str_at(j, "content.0.type"), "thinking");
    assert_string_equal(str_at(j, "content.0.thinking"), "hm");
    assert_true(strlen(str_at(j, "content.0.signature")) > 0);
    assert_string_equal(str_at(j, "content.1.text"), "I see");
    assert_string_equal(str_at(j, "content.2.type"), "tool_use");
    assert_string_equal(str_at(j, "content.2.name"), "f");
    assert_string_equal(str_at(j, "content.2.input.x"), "\"");
    assert_int_equal(json_object_size(at(j, "content.3.input")), 0);
    assert_int_equal(strncmp(str_at(j, "content.3.id"), "toolu_", 6), 0);
    assert_string_not_equal(str_at(j, "content.2.id"), str_at(j, "content.3.id"));
    json_decref(j);
}

static void test_whole_response(void **state)
{
    (void)state;
    json_t *j = whole("/v1/responses", RESPONSES "}");
    assert_string_equal(str_at(j, "status"), "completed");
    assert_int_equal(json_array_size(at(j, "output")), 4);
    assert_string_equal(str_at(j, "output.0.type"), "reasoning");
    assert_string_equal(str_at(j, "output.0.content.0.text"), "hm");
    assert_int_equal(json_array_size(at(j, "output.0.summary")), 0);
    assert_string_equal(str_at(j, "output.1.content.0.text"), "I see");
    assert_string_equal(str_at(j, "output.2.type"), "function_call");
    assert_string_equal(str_at(j, "output.2.name"), "f");
    assert_string_equal(str_at(j, "output.2.arguments"), "{\"x\": \"\\\"\"}");
    assert_string_equal(str_at(j, "output.3.arguments"), "{}");
    assert_string_not_equal(str_at(j, "output.2.call_id"), str_at(j, "output.3.call_id"));
    assert_string_equal(str_at(j, "tools.0.name"), "f");
    assert_true(json_integer_value(at(j, "usage.output_tokens_details.reasoning_tokens")) >= 3);
    json_decref(j);
}

/* ---- streams ---- */

/* The next event; NULL: there is none. */
static json_t *next_event(char **p)
{
    char *data = strstr(*p, "\ndata: ");
    if (data == NULL) {
        return NULL;
    }
    char *end = strstr(data, "\n\n");
    assert_non_null(end);
    *end = '\0';
    *p = end + 1;
    return parse(data + 7);
}

static void stream(const char *path, const char *body)
{
    int fd = begin(path, body);
    speak();
    receive(fd);
    assert_int_equal(ans.status, 200);
}

static void test_streamed_message(void **state)
{
    (void)state;
    static const struct {
        const char *type, *text;
    } blocks[] = {{"thinking", "hm"},
                  {"text", "I see"},
                  {"tool_use", "{\"x\": \"\\\"\"}"},
                  {"tool_use", "{}"}};
    struct bt_buf text = {0};
    stream("/v1/messages", MESSAGES ",\"stream\":true}");
    char *p = ans.body;
    int n = -1, stopped = -1;
    bool over = false;
    for (json_t *j; (j = next_event(&p)) != NULL; json_decref(j)) {
        const char *type = str_at(j, "type"), *kind = str_at(j, "delta.type");
        if (strcmp(type, "content_block_start") == 0) {
            assert_int_equal(json_integer_value(at(j, "index")), ++n);
            assert_string_equal(str_at(j, "content_block.type"), blocks[n].type);
            assert_int_equal(stopped, n - 1);
            bt_buf_clear(&text);
            bt_buf_puts(&text, "");
        } else if (strcmp(type, "content_block_delta") == 0 &&
                   strcmp(kind, "signature_delta") != 0) {
            const char *member = strcmp(kind, "thinking_delta") == 0 ? "delta.thinking"
                                 : strcmp(kind, "text_delta") == 0   ? "delta.text"
                                                                     : "delta.partial_json";
            bt_buf_puts(&text, str_at(j, member));
        } else if (strcmp(type, "content_block_stop") == 0) {
            assert_int_equal(json_integer_value(at(j, "index")), n);
            assert_string_equal(text.data, blocks[n].text);
            stopped = n;
        } else if (strcmp(type, "message_delta") == 0) {
            assert_string_equal(str_at(j, "delta.stop_reason"), "tool_use");
            over = true;
        }
    }
    bt_buf_cleanup(&text);
    assert_int_equal(stopped, 3);
    assert_true(over);
}

static void test_streamed_response(void **state)
{
    (void)state;
    static const char *const order[] = {
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    };
    stream("/v1/responses", RESPONSES ",\"stream\":true}");
    char *p = ans.body, last[64] = "";
    size_t n = 0;
    int sequence = 0;
    json_t *items = json_array();
    for (json_t *j; (j = next_event(&p)) != NULL; json_decref(j)) {
        const char *type = str_at(j, "type");
        assert_int_equal(json_integer_value(at(j, "sequence_number")), sequence++);
        if (strcmp(type, last) != 0) {
            assert_true(n < BT_ARRAY_LEN(order));
            assert_string_equal(type, order[n++]);
            snprintf(last, sizeof(last), "%s", type);
        }
        if (strcmp(type, "response.output_item.done") == 0) {
            json_array_append(items, at(j, "item"));
        } else if (strcmp(type, "response.completed") == 0) { /* the same items again */
            assert_true(json_equal(at(j, "response.output"), items));
        }
    }
    assert_int_equal(n, BT_ARRAY_LEN(order));
    assert_int_equal(json_array_size(items), 4);
    assert_string_equal(str_at(items, "2.arguments"), "{\"x\": \"\\\"\"}");
    json_decref(items);
}

/* A call that the limit has cut has no input that could be an object. */
static void test_cut_call(void **state)
{
    (void)state;
    int fd = begin("/v1/messages", MESSAGES "}");
    offset = 0;
    say("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1");
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(1, 0);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "stop_reason"), "max_tokens");
    assert_string_equal(str_at(j, "content.0.type"), "tool_use");
    assert_string_equal(str_at(j, "content.0.input.incomplete"), "{\"x\": 1");
    json_decref(j);
}

static void test_refusals(void **state)
{
    (void)state;
    receive(post("/v1/messages", MESSAGES ",\"tool_choice\":{\"type\":\"tool\",\"name\":\"g\"}}"));
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "tool_choice"));
    receive(post("/v1/responses", RESPONSES ",\"tool_choice\":{\"type\":\"function\",\"name\":"
                                            "\"g\"}}"));
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "\"param\":\"tool_choice\""));
}

int main(void)
{
#define OWN(test) cmocka_unit_test_setup_teardown(test, open_own, close_own)
    const struct CMUnitTest tests[] = {
        OWN(test_thinking),
        OWN(test_budgets),
        OWN(test_prompts_of_messages),
        OWN(test_prompts_of_responses),
        OWN(test_whole_message),
        OWN(test_whole_response),
        OWN(test_streamed_message),
        OWN(test_streamed_response),
        OWN(test_cut_call),
        OWN(test_refusals),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
