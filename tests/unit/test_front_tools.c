/* Tools and reasoning over the API: what the chat template gets, what is refused, and answers that
 * are taken apart, whole and streamed. Scripted tokens; the forms themselves are test_reply.c's.
 * Fixture: front_fixture.h. */
#include "tests/unit/front_grammars.h"

#include "common/grammar/grammar.h"

#define TOOL(name) "{\"type\":\"function\",\"function\":{\"name\":\"" name "\"}}"
#define USER       "{\"role\":\"user\",\"content\":\"a\"}"
#define CHAT(more) "{\"messages\":[" USER "]," more "}"
#define TOOLS      "\"tools\":[" TOOL("f") "," TOOL("g") "]"

/* In each form's constructs: what a test asks for is in the prompt. */
#define ROWS                                                                                       \
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}"                                         \
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}|{{ c.id }} {{ c.function.name "   \
    "}} "                                                                                          \
    "{% if c.function.arguments is string %}text {{ c.function.arguments }}"                       \
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endif %}"              \
    "{% if m.tool_call_id is defined %}|{{ m.tool_call_id }} {{ m.name }}{% endif %}]{% endfor %}" \
    "{% if tools %}{{ tools | tojson }}{% endif %}"
static const char hermes[] = ROWS "{# <tool_call> <think> #}{% if think is defined %}<think>\n"
                                  "{% endif %}";
static const char kimi[] = ROWS "{# <|tool_calls_section_begin|> #}";
static const char mistral[] = ROWS "{# [TOOL_CALLS] #}";
static const char deaf[] = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
static const char foreign[] = ROWS "{# <call> #}";

static int open_hermes(void **state)
{
    (void)state;
    open_with_template(hermes);
    return 0;
}

/* The text of the running request's prompt, and of its quotes' escapes. */
static const char *prompt_text(void)
{
    static struct bt_buf text;
    bt_buf_clear(&text);
    assert_int_equal(
        bt_tokenizer_decode(tok, now->spec.prompt.ids, now->spec.prompt.n, false, &text), BT_OK);
    return text.data;
}

static void abandon(int fd)
{
    close(fd);
    WAIT_FOR(n_cancelled > 0);
    n_cancelled = 0;
}

static void expect_prompt(const char *body, const char *want)
{
    int fd = begin("/v1/chat/completions", body);
    assert_string_equal(prompt_text(), want);
    abandon(fd);
}

static uint32_t offset; /* of the next token's text */

static void say_to(uint32_t choice, const char *text)
{
    struct bt_gen_token t = {.id = 40, .logprob = -0.5f, .text_offset = offset};
    offset += (uint32_t)strlen(text);
    delta_to(now, choice, text, &t, 1);
}

static void say(const char *text)
{
    say_to(0, text);
}

static void end(bt_finish_t reason)
{
    now->ops->on_finish(now->arg, 0, reason, NULL);
    done(9, 0);
}

/* ---- prompts ---- */

static void test_prompts(void **state)
{
    (void)state;
    expect_prompt(
        CHAT("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"d\","
             "\"strict\":false,\"parameters\":{\"type\":\"object\"}}}," TOOL("g") "]"),
        "[user|a][{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"d\", "
        "\"parameters\": {\"type\": \"object\"}}}, {\"type\": \"function\", \"function\": "
        "{\"name\": "
        "\"g\", \"parameters\": {\"type\": \"object\", \"properties\": {}}}}]");
    expect_prompt(CHAT(TOOLS ",\"tool_choice\":\"none\""), "[user|a]");
    expect_prompt(CHAT("\"tools\":[],\"tool_choice\":\"auto\""), "[user|a]");
    expect_prompt(CHAT(TOOLS ",\"tool_choice\":{\"type\":\"allowed_tools\",\"allowed_tools\":{"
                             "\"mode\":\"auto\",\"tools\":[" TOOL("g") "," TOOL("g") "]}}"),
                  "[user|a][{\"type\": \"function\", \"function\": {\"name\": \"g\", "
                  "\"parameters\": {\"type\": \"object\", \"properties\": {}}}}]");
}

#define CALL(id, name, args)                                                                       \
    "{\"id\":\"" id "\",\"type\":\"function\",\"function\":{\"name\":\"" name                      \
    "\",\"arguments\":" args "}}"
#define HISTORY                                                                                    \
    "{\"messages\":[" USER ",{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[" CALL(      \
        "call_1", "f",                                                                             \
        "\"{\\\"x\\\": 1}\"") "," CALL("123456789", "g",                                           \
                                       "\"\"") "]},"                                               \
                                               "{\"role\":\"tool\",\"tool_call_id\":"              \
                                               "\"123456789\",\"content\":\"r\"},"                 \
                                               "{\"role\":\"assistant\",\"content\":\"t\",\"tool_" \
                                               "calls\":[" CALL(                                   \
                                                   "call_1", "h",                                  \
                                                   "\"{\"") "]},"                                  \
                                                            "{\"role\":\"tool\",\"tool_call_id\":" \
                                                            "\"call_1\",\"name\":\"n\","           \
                                                            "\"content\":[{\"type\":"              \
                                                            "\"text\",\"text\":\"s\"}]},{"         \
                                                            "\"role\":\"tool\",\"tool_call_id\":"  \
                                                            "\"other\",\"content\":\"\"}]}"

static void test_history(void **state)
{
    (void)state;
    expect_prompt(HISTORY, "[user|a][assistant|None|call_1 f {\"x\": 1}|123456789 g {}]"
                           "[tool|r|123456789 g][assistant|t|call_1 h text {]"
                           "[tool|s|call_1 n][tool||other ]");
}

static void test_history_of_kimi(void **state)
{
    (void)state;
    open_with_template(kimi);
    expect_prompt(HISTORY, "[user|a][assistant|None|functions.f:0 f {\"x\": 1}|functions.g:1 g {}]"
                           "[tool|r|functions.g:1 g][assistant|t|functions.h:2 h text {]"
                           "[tool|s|functions.h:2 n][tool||other ]");
}

/* DeepSeek's templates add the text of the arguments to another text. */
static void test_history_as_text(void **state)
{
    (void)state;
    open_with_template(
        "{% for m in messages %}[{{ m.role }}{% for c in m.tool_calls or [] %}"
        "{{ '|' + c.function.name + '|' + c.function.arguments }}{% endfor %}]{% endfor %}"
        "{{ tools }}{# <｜tool▁calls▁begin｜> #}");
    expect_prompt(
        "{\"messages\":[" USER
        ",{\"role\":\"assistant\",\"tool_calls\":[" CALL("a", "f", "\"{\\\"x\\\":1}\"") "," CALL(
            "b", "g", "{\"y\":[2]}") "," CALL("c", "h", "\"\"") "]}]}",
        "[user][assistant|f|{\"x\":1}|g|{\"y\": [2]}|h|{}]None");
}

/* Mistral's templates refuse ids of other lengths than 9. */
static void test_history_of_mistral(void **state)
{
    (void)state;
    open_with_template(mistral);
    int fd = begin("/v1/chat/completions", HISTORY);
    char id[10] = "", again[10] = "", other[10] = "";
    const char *text = prompt_text(), *s = strstr(text, "[tool|s|"), *o = strstr(text, "[tool||");
    assert_int_equal(sscanf(text, "[user|a][assistant|None|%9[0-9A-Za-z] f ", id), 1);
    assert_non_null(strstr(text, "|123456789 g {}][tool|r|123456789 g]"));
    assert_int_equal(sscanf(s, "[tool|s|%9[0-9A-Za-z] n]", again), 1);
    assert_int_equal(sscanf(o, "[tool||%9[0-9A-Za-z] ]", other), 1);
    assert_string_equal(id, again);
    assert_true(strlen(id) == 9 && strlen(other) == 9 && strcmp(id, other) != 0);
    abandon(fd);
}

/* ---- refusals ---- */

static void refused(const char *body, const char *param, const char *part)
{
    receive(post("/v1/chat/completions", body));
    json_t *j = parse(ans.body);
    if (ans.status != 400 || strcmp(str_at(j, "error.param"), param) != 0 ||
        strstr(str_at(j, "error.message"), part) == NULL) {
        fail_msg("%s:\n%d %s", body, ans.status, ans.body);
    }
    json_decref(j);
}

#define TOOL_WITH(f) CHAT("\"tools\":[{\"type\":\"function\",\"function\":" f "}]")
#define MESSAGE(m)   "{\"messages\":[" USER "," m "]}"
#define CALLS(c)     MESSAGE("{\"role\":\"assistant\",\"tool_calls\":" c "}")

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *body, *param, *part;
    } rows[] = {
        {CHAT("\"tools\":{}"), "tools", "an array"},
        {CHAT("\"tools\":[1]"), "tools", "'tools[0]' must be"},
        {CHAT("\"tools\":[{\"type\":\"web_search\"}]"), "tools", "'tools[0].type' is 'web_search'"},
        {CHAT("\"tools\":[{\"type\":\"function\",\"name\":\"f\"}]"), "tools", "'tools[0]' must be"},
        {TOOL_WITH("{}"), "tools", "'tools[0].function.name'"},
        {TOOL_WITH("{\"name\":\"a b\"}"), "tools", "letters, digits"},
        {TOOL_WITH("{\"name\":\"f\",\"parameters\":[]}"), "tools", "a JSON schema"},
        {TOOL_WITH("{\"name\":\"f\",\"description\":1}"), "tools", "description' must be a string"},
        {TOOL_WITH("{\"name\":\"f\",\"paramters\":{}}"), "tools[0].function.paramters",
         "did you mean 'tools[0].function.parameters'"},
        {CHAT("\"tools\":[" TOOL("f") "," TOOL("f") "]"), "tools",
         "'f', the name of an earlier tool"},
        {CHAT("\"tool_choice\":\"required\""), "tool_choice", "'tools' is empty"},
        {CHAT(TOOLS ",\"tool_choice\":\"any\""), "tool_choice", "none, auto, required"},
        {CHAT(TOOLS ",\"tool_choice\":1"), "tool_choice", "'tool_choice' must be"},
        {CHAT(TOOLS ",\"tool_choice\":" TOOL("h")), "tool_choice", "'h', but 'tools'"},
        {CHAT("\"tool_choice\":" TOOL("h")), "tool_choice", "'h', but 'tools'"},
        {CHAT(TOOLS ",\"tool_choice\":{\"type\":\"allowed_tools\"}"), "tool_choice", "'mode'"},
        {CHAT(TOOLS ",\"tool_choice\":{\"type\":\"allowed_tools\",\"allowed_tools\":{\"mode\":"
                    "\"all\",\"tools\":[" TOOL("g") "]}}"),
         "tool_choice", "mode' is 'all'"},
        {CHAT(TOOLS ",\"parallel_tool_calls\":1"), "parallel_tool_calls", "true or false"},
        {CHAT("\"chat_template_kwargs\":{\"tools\":[]}"), "chat_template_kwargs",
         "a field of the request itself"},
        {CHAT("\"functions\":[1]"), "functions", "use `tools`"},
        {MESSAGE("{\"role\":\"tool\",\"content\":\"x\"}"), "messages",
         "'messages[1].tool_call_id' must be"},
        {MESSAGE("{\"role\":\"function\",\"content\":\"x\"}"), "messages", "assistant, tool"},
        {MESSAGE("{\"role\":\"user\",\"content\":\"\",\"tool_calls\":[1]}"), "messages",
         "of role assistant"},
        {CALLS("1"), "messages", "'messages[1].tool_calls' must be an array"},
        {CALLS("[{}]"), "messages", "'messages[1].tool_calls[0]' must be"},
        {CALLS("[" TOOL("f") "]"), "messages", "tool_calls[0].id' must be"},
        {CALLS("[" CALL("i", "f", "1") "]"), "messages", "arguments' must be a string"},
        {CALLS("[" CALL("i", "", "\"\"") "]"), "messages", "function.name' must have"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        refused(rows[i].body, rows[i].param, rows[i].part);
    }
    receive(post("/v1/completions", "{\"prompt\":\"a\"," TOOLS "}"));
    assert_int_equal(ans.status, 400);
}

static void test_models_without_tools(void **state)
{
    (void)state;
    open_with_template(deaf);
    refused(CHAT(TOOLS), "tools", "does not know tools");
    expect_prompt(CHAT(TOOLS ",\"tool_choice\":\"none\""), "[a]");
    close_own(state);
    open_with_template(foreign);
    refused(CHAT(TOOLS), "tools", "conductor.answer_form");
    expect_prompt(CHAT(TOOLS ",\"tool_choice\":\"none\""), "[user|a]");
}

/* ---- answers ---- */

static void test_whole_calls(void **state)
{
    (void)state;
    int fd = begin("/v1/chat/completions", CHAT(TOOLS));
    say("<tool_call>\n{\"name\": \"f\", \"argum");
    say("ents\": {\"x\": \"\\\"\"}}\n</tool_call>\n<tool_call>{\"name\":\"g\"}</tool_");
    say("call>");
    end(BT_FINISH_STOP);
    receive(fd);
    json_t *j = parse(ans.body);
    json_t *m = at(j, "choices.0.message");
    assert_true(json_is_null(at(m, "content")));
    assert_null(at(m, "reasoning_content"));
    assert_int_equal(json_array_size(at(m, "tool_calls")), 2);
    assert_string_equal(str_at(m, "tool_calls.0.type"), "function");
    assert_string_equal(str_at(m, "tool_calls.0.function.name"), "f");
    assert_string_equal(str_at(m, "tool_calls.0.function.arguments"), "{\"x\": \"\\\"\"}");
    assert_string_equal(str_at(m, "tool_calls.1.function.arguments"), "{}");
    assert_true(strncmp(str_at(m, "tool_calls.0.id"), "call_", 5) == 0);
    assert_string_not_equal(str_at(m, "tool_calls.0.id"), str_at(m, "tool_calls.1.id"));
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "tool_calls");
    json_decref(j);
    /* without tools the same text is content; cut short it is content too */
    fd = begin("/v1/chat/completions", CHAT("\"n\":1"));
    say("<tool_call>{\"name\":\"g\"}</tool_call>");
    end(BT_FINISH_STOP);
    receive(fd);
    j = parse(ans.body);
    assert_string_equal(str_at(j, "choices.0.message.content"),
                        "<tool_call>{\"name\":\"g\"}</tool_call>");
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "stop");
    json_decref(j);
    fd = begin("/v1/chat/completions", CHAT(TOOLS));
    say("<tool_call>{\"na");
    end(BT_FINISH_LENGTH);
    receive(fd);
    j = parse(ans.body);
    assert_string_equal(str_at(j, "choices.0.message.content"), "<tool_call>{\"na");
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "length");
    json_decref(j);
}

static void test_one_call(void **state)
{
    (void)state;
    int fd = begin("/v1/chat/completions", CHAT(TOOLS ",\"parallel_tool_calls\":false"));
    say("<tool_call>{\"name\":\"g\"}</tool_call><tool_call>{\"name\":\"f\"}</tool_call>");
    end(BT_FINISH_STOP);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_int_equal(json_array_size(at(j, "choices.0.message.tool_calls")), 1);
    json_decref(j);
}

/* All events of a stream, without what they have in common. */
static struct bt_buf *events(void)
{
    static struct bt_buf b;
    bt_buf_clear(&b);
    bt_buf_append(&b, "", 0);
    char *save = NULL;
    for (char *line = strtok_r(ans.body, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        if (strncmp(line, "data: {", 7) != 0) {
            bt_buf_printf(&b, "%s\n", line + 6);
            continue;
        }
        json_t *j = parse(line + 6);
        json_t *d = at(j, "choices.0.delta");
        char *text = d != NULL ? json_dumps(d, JSON_COMPACT) : strdup("");
        const char *finish = json_string_value(at(j, "choices.0.finish_reason"));
        bt_buf_printf(&b, "%s%s%s\n", text, finish != NULL ? " " : "",
                      finish != NULL ? finish : "");
        free(text);
        json_decref(j);
    }
    return &b;
}

static void poll_once(void)
{
    bt_loop_poll(loop, 10);
}

static void test_streamed_calls(void **state)
{
    (void)state;
    char id[2][64];
    int fd = begin("/v1/chat/completions", CHAT(TOOLS ",\"stream\":true"));
    static const char *const texts[] = {"Let",
                                        " me.",
                                        "\n<tool",
                                        "_call>",
                                        "{\"name\": \"f\", ",
                                        "\"arguments\": ",
                                        "{\"x\"",
                                        ":1",
                                        "}}\n</tool_call>",
                                        "<tool_call>{\"name\":\"g\",\"arguments\":{}}",
                                        "</tool_call>"};
    for (size_t i = 0; i < BT_ARRAY_LEN(texts); i++) {
        say(texts[i]);
        poll_once();
    }
    end(BT_FINISH_STOP);
    receive(fd);
    char *first = strstr(ans.body, "call_");
    assert_int_equal(sscanf(first, "%63[0-9A-Za-z_]", id[0]), 1);
    char *second = strstr(strstr(ans.body, "\"name\":\"g\"") - 80, "call_");
    assert_int_equal(sscanf(second, "%63[0-9A-Za-z_]", id[1]), 1);
    assert_string_not_equal(id[0], id[1]);
    char *want = bt_sprintf("{\"role\":\"assistant\",\"content\":\"Let\"}\n{\"content\":\" "
                            "me.\"}\n{\"content\":\"\\n\"}\n"
                            "{\"tool_calls\":[{\"index\":0,\"id\":\"%s\",\"type\":\"function\","
                            "\"function\":{\"name\":\"f\","
                            "\"arguments\":\"{\\\"x\\\"\"}}]}\n"
                            "{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\":1\"}}]}\n"
                            "{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"}\"}}]}\n"
                            "{\"tool_calls\":[{\"index\":1,\"id\":\"%s\",\"type\":\"function\","
                            "\"function\":{\"name\":\"g\","
                            "\"arguments\":\"{}\"}}]}\n"
                            "{} tool_calls\n[DONE]\n",
                            id[0], id[1]);
    assert_string_equal(events()->data, want);
    free(want);
}

/* Two calls and text in one delta; text that is held back until the end. */
static void test_streamed_at_once(void **state)
{
    (void)state;
    int fd = begin("/v1/chat/completions", CHAT(TOOLS ",\"stream\":true,\"logprobs\":true"));
    say("<too");
    poll_once();
    say("l_call>{\"name\":\"f\"}</tool_call><tool_call>{\"name\":\"g\"}</tool_call>x<tool");
    poll_once();
    say("_");
    end(BT_FINISH_LENGTH);
    receive(fd);
    size_t tokens = 0;
    for (const char *s = ans.body; (s = strstr(s, "\"logprob\":")) != NULL; s++) {
        tokens++;
    }
    assert_int_equal(tokens, 3);
    char *e = strdup(events()->data);
    assert_true(
        strncmp(e, "{\"role\":\"assistant\"}\n{\"content\":\"x\",\"tool_calls\":[{\"index\":0,",
                strlen("{\"role\":\"assistant\"}\n{\"content\":\"x\",\"tool_calls\":[{")) == 0);
    assert_non_null(strstr(e, "\"arguments\":\"{}\"}},{\"index\":1,"));
    assert_non_null(strstr(e, "}}]}\n{\"content\":\"<tool_\"} length\n[DONE]\n"));
    free(e);
}

static void test_choices_have_their_own_calls(void **state)
{
    (void)state;
    int fd = begin("/v1/chat/completions", CHAT(TOOLS ",\"n\":2"));
    say_to(0, "<tool_call>");
    say_to(1, "plain");
    say_to(0, "{\"name\":\"f\"}</tool_call>");
    now->ops->on_finish(now->arg, 1, BT_FINISH_STOP, NULL);
    end(BT_FINISH_STOP);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "choices.0.message.tool_calls.0.function.name"), "f");
    assert_string_equal(str_at(j, "choices.1.message.content"), "plain");
    assert_null(at(j, "choices.1.message.tool_calls"));
    assert_string_equal(str_at(j, "choices.1.finish_reason"), "stop");
    json_decref(j);
}

/* ---- reasoning ---- */

static json_t *think(const char *body)
{
    int fd = begin("/v1/chat/completions", body);
    offset = 0;
    say("<think>\n");
    say("hm");
    say("\n</think>\n\n");
    say("Yes");
    end(BT_FINISH_STOP);
    receive(fd);
    return parse(ans.body);
}

static void test_reasoning(void **state)
{
    (void)state;
    json_t *j = think(CHAT("\"n\":1"));
    assert_string_equal(str_at(j, "choices.0.message.content"), "Yes");
    assert_string_equal(str_at(j, "choices.0.message.reasoning_content"), "hm");
    assert_string_equal(str_at(j, "choices.0.message.reasoning"), "hm");
    assert_int_equal(json_integer_value(at(j, "usage.completion_tokens_details.reasoning_tokens")),
                     3);
    json_decref(j);
    j = think(CHAT("\"include_reasoning\":false"));
    assert_string_equal(str_at(j, "choices.0.message.content"), "Yes");
    assert_null(at(j, "choices.0.message.reasoning"));
    json_decref(j);
    j = think(CHAT("\"separate_reasoning\":false"));
    assert_string_equal(str_at(j, "choices.0.message.content"), "<think>\nhm\n</think>\n\nYes");
    assert_null(at(j, "choices.0.message.reasoning"));
    assert_int_equal(json_integer_value(at(j, "usage.completion_tokens_details.reasoning_tokens")),
                     3);
    json_decref(j);
    /* no reasoning; only reasoning, cut short, which the prompt has begun */
    int fd = begin("/v1/chat/completions", CHAT("\"n\":1"));
    say("Yes");
    end(BT_FINISH_STOP);
    receive(fd);
    j = parse(ans.body);
    assert_string_equal(str_at(j, "choices.0.message.content"), "Yes");
    assert_int_equal(json_integer_value(at(j, "usage.completion_tokens_details.reasoning_tokens")),
                     0);
    json_decref(j);
    fd = begin("/v1/chat/completions", CHAT("\"chat_template_kwargs\":{\"think\":1}"));
    say("so");
    end(BT_FINISH_LENGTH);
    receive(fd);
    j = parse(ans.body);
    assert_true(json_is_null(at(j, "choices.0.message.content")));
    assert_string_equal(str_at(j, "choices.0.message.reasoning"), "so");
    json_decref(j);
}

static void test_streamed_reasoning(void **state)
{
    (void)state;
    int fd = begin("/v1/chat/completions",
                   CHAT("\"stream\":true,\"stream_options\":{\"include_usage\":true}"));
    static const char *const texts[] = {"<think>", "\nhm", "\n\nso\n", "</think>", "\n\n", "Yes"};
    offset = 0;
    for (size_t i = 0; i < BT_ARRAY_LEN(texts); i++) {
        say(texts[i]);
        poll_once();
    }
    end(BT_FINISH_STOP);
    receive(fd);
    assert_non_null(strstr(ans.body, "\"completion_tokens_details\":{\"reasoning_tokens\":4}"));
    assert_string_equal(events()->data,
                        "{\"role\":\"assistant\"}\n"
                        "{\"reasoning_content\":\"hm\",\"reasoning\":\"hm\"}\n"
                        "{\"reasoning_content\":\"\\n\\nso\",\"reasoning\":\"\\n\\nso\"}\n"
                        "{\"content\":\"Yes\"}\n{} stop\n\n[DONE]\n");
}

/* An answer that continues a message is inside its reasoning if the message is. */
static void test_continued_reasoning(void **state)
{
    (void)state;
    static const char *const lasts[] = {"<think>a", "<think>a</think>b"};
    for (size_t i = 0; i < 2; i++) {
        char *body =
            bt_sprintf("{\"messages\":[" USER ",{\"role\":\"assistant\",\"content\":\"%s\"}],"
                       "\"continue_final_message\":true,\"add_generation_prompt\":false}",
                       lasts[i]);
        int fd = begin("/v1/chat/completions", body);
        say("more");
        end(BT_FINISH_STOP);
        receive(fd);
        json_t *j = parse(ans.body);
        assert_string_equal(
            str_at(j, i == 0 ? "choices.0.message.reasoning" : "choices.0.message.content"),
            "more");
        json_decref(j);
        free(body);
    }
}

/* Long parts are written in slices. */
static void test_long_parts(void **state)
{
    (void)state;
    struct bt_buf text;
    bt_buf_init(&text);
    for (int i = 0; i < 1700; i++) {
        bt_buf_puts(&text, "ä\"0123456");
    }
    int fd = begin("/v1/chat/completions", CHAT(TOOLS));
    say("<think>");
    say(text.data);
    say("</think><tool_call>{\"name\":\"f\",\"arguments\":\"");
    for (int i = 0; i < 1700; i++) {
        say("0123456");
    }
    say("\"}");
    end(BT_FINISH_STOP);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "choices.0.message.reasoning_content"), text.data);
    assert_string_equal(str_at(j, "choices.0.message.reasoning"), text.data);
    assert_int_equal(strlen(str_at(j, "choices.0.message.tool_calls.0.function.arguments")), 11900);
    json_decref(j);
    bt_buf_cleanup(&text);
}

/* ---- forced calls ---- */

/* The names and arguments of an answer's calls: "f{...}g{...}". */
static const char *calls_of(const char *answer)
{
    static struct bt_buf out;
    int fd = begin("/v1/chat/completions", CHAT(TOOLS));
    say(answer);
    end(BT_FINISH_STOP);
    receive(fd);
    json_t *j = parse(ans.body), *calls = at(j, "choices.0.message.tool_calls");
    bt_buf_clear(&out);
    bt_buf_puts(&out, "");
    for (size_t i = 0; i < json_array_size(calls); i++) {
        json_t *c = json_array_get(calls, i);
        bt_buf_printf(&out, "%s%s", str_at(c, "function.name"), str_at(c, "function.arguments"));
    }
    json_decref(j);
    return out.data;
}

#define SCHEMA                                                                                     \
    "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"required\":[\"a\"],"     \
    "\"additionalProperties\":false}"
#define FG(strict)                                                                                 \
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":" SCHEMA        \
    ",\"strict\":" strict "}}," TOOL("g") "]"
#define DC(name, args) "<｜tool▁call▁begin｜>" name "<｜tool▁sep｜>" args "<｜tool▁call▁end｜>"
#define KC(id, args)                                                                               \
    "<|tool_call_begin|>" id "<|tool_call_argument_begin|>" args "<|tool_call_end|>"

static void test_forced_calls(void **state)
{
    static const struct {
        const char *form, *one, *two, *wrong;
    } rows[] = {
        {"{# <tool_call> #}",
         "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>",
         "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>\n"
         "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
         "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":\"1\"}}\n</tool_call>"},
        {"{# <|python_tag|> #}", "{\"name\": \"f\", \"parameters\": {\"a\":1}}",
         "{\"name\": \"f\", \"parameters\": {\"a\":1}}; {\"name\": \"g\", \"parameters\": {}}",
         "{\"name\": \"f\", \"parameters\": {}}"},
        {"{# [TOOL_CALLS] #}", "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\":1}}]",
         "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\":1}}, {\"name\": \"g\", "
         "\"arguments\": {}}]",
         "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\":1}}"},
        {"{# [TOOL_CALLS] [ARGS] #}", "[TOOL_CALLS]f[ARGS]{\"a\":1}",
         "[TOOL_CALLS]f[ARGS]{\"a\":1}[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]h[ARGS]{}"},
        {"{# <｜tool▁calls▁begin｜> ```json #}",
         "<｜tool▁calls▁begin｜>" DC("function",
                                     "f\n```json\n{\"a\":1}\n```") "<｜tool▁calls▁end｜>",
         "<｜tool▁calls▁begin｜>" DC("function", "f\n```json\n{\"a\":1}\n```") "\n" DC(
             "function", "g\n```json\n{}\n```") "<｜tool▁calls▁end｜>",
         "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"},
        {"{# <｜tool▁calls▁begin｜> #}",
         "<｜tool▁calls▁begin｜>" DC("f", "{\"a\":1}") "<｜tool▁calls▁end｜>",
         "<｜tool▁calls▁begin｜>" DC("f", "{\"a\":1}") DC("g", "{}") "<｜tool▁calls▁end｜>",
         "text"},
        {"{# <|tool_calls_section_begin|> #}",
         "<|tool_calls_section_begin|>" KC("functions.f:0",
                                           "{\"a\":1}") "<|tool_calls_section_end|>",
         "<|tool_calls_section_begin|>" KC("functions.f:0", "{\"a\":1}")
             KC("functions.g:1", "{}") "<|tool_calls_section_end|>",
         "<|tool_calls_section_begin|>" KC("functions.f:x",
                                           "{\"a\":1}") "<|tool_calls_section_end|>"},
    };
    struct bt_grammar_vocab *v = bytes_vocab();
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        char *text = bt_sprintf(
            "%s%s", "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}", rows[i].form);
        open_with_template(text);
        int fd = begin("/v1/chat/completions", CHAT(FG("false") ",\"tool_choice\":\"required\""));
        assert_true(allows(v, rows[i].one));
        assert_true(allows(v, rows[i].two));
        assert_false(allows(v, rows[i].wrong));
        assert_false(allows(v, "text"));
        assert_false(allows(v, ""));
        abandon(fd);
        fd = begin("/v1/chat/completions",
                   CHAT(FG("false") ",\"tool_choice\":\"required\",\"parallel_tool_calls\":false"));
        assert_true(allows(v, rows[i].one));
        assert_false(allows(v, rows[i].two));
        abandon(fd);
        fd = begin("/v1/chat/completions", CHAT(FG("false") ",\"tool_choice\":" TOOL("g")));
        assert_false(allows(v, rows[i].one));
        abandon(fd);
        fd = begin("/v1/chat/completions", CHAT(FG("true")));
        assert_true(allows(v, "text"));
        assert_true(allows(v, rows[i].one));
        assert_true(allows(v, rows[i].two));
        abandon(fd);
        fd = begin("/v1/chat/completions", CHAT(FG("false")));
        assert_null(now->spec.grammar);
        abandon(fd);
        assert_string_equal(calls_of(rows[i].one), "f{\"a\":1}");
        assert_string_equal(calls_of(rows[i].two), "f{\"a\":1}g{}");
        close_own(state);
        free(text);
    }
    bt_grammar_vocab_destroy(v);
    open_with_template(hermes);
}

#define FORMAT(schema)                                                                             \
    "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"n\","               \
    "\"schema\":" schema "}}"

/* What is forced begins behind the reasoning. */
static void test_forced_behind_reasoning(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = bytes_vocab();
    int fd = begin("/v1/chat/completions", CHAT(FG("false") ",\"tool_choice\":" TOOL("g")));
    static const char call[] = "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    char *thought = bt_sprintf("<think>\nI {\n</think>\n\n%s", call);
    assert_true(allows(v, call));
    assert_true(allows(v, thought));
    assert_false(allows(v, "<think>\nI\n</think>\n\nNo."));
    abandon(fd);
    free(thought);
    fd = begin("/v1/chat/completions", CHAT(FORMAT(SCHEMA)));
    assert_true(allows(v, "{\"a\":1}"));
    assert_true(allows(v, "<think>\n{}\n</think>\n{\"a\":1}"));
    assert_false(allows(v, "<think>\n{}\n</think>\n{}"));
    abandon(fd);
    fd = begin("/v1/chat/completions",
               CHAT(FORMAT(SCHEMA) ",\"chat_template_kwargs\":{\"think\":1}"));
    assert_true(allows(v, "hm</think>{\"a\":1}"));
    assert_false(allows(v, "{\"a\":1}"));
    abandon(fd);
    fd = begin("/v1/chat/completions", CHAT("\"regex\":\"a\\\\d\""));
    assert_true(allows(v, "<think>x</think>a1"));
    abandon(fd);
    bt_grammar_vocab_destroy(v);
    refused(CHAT("\"grammar\":\"root ::= \\\"a\\\"\""), "messages", "of kind 'grammar'");
}

/* With tools, an answer is a call or what response_format says. */
static void test_formats_beside_tools(void **state)
{
    static const char call[] =
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>";
    struct bt_grammar_vocab *v = bytes_vocab();
    int fd = begin("/v1/chat/completions", CHAT(FG("true") "," FORMAT(SCHEMA)));
    assert_true(allows(v, call));
    assert_true(allows(v, "{\"a\":1}"));
    assert_true(allows(v, "<think>x</think>\n{\"a\":1}"));
    assert_false(allows(v, "{\"a\":1}{\"a\":1}"));
    assert_false(allows(v, "text"));
    abandon(fd);
    fd = begin("/v1/chat/completions",
               CHAT(FG("false") ",\"tool_choice\":\"required\"," FORMAT(SCHEMA)));
    assert_true(allows(v, call));
    assert_false(allows(v, "{\"a\":1}"));
    abandon(fd);
    close_own(state);
    open_with_template(ROWS "{# <|python_tag|> #}");
    fd = begin("/v1/chat/completions", CHAT(FG("false") "," FORMAT(SCHEMA)));
    assert_true(allows(v, "{\"name\": \"f\", \"parameters\": {\"a\":1}}"));
    assert_true(allows(v, "{\"a\":1}"));
    abandon(fd);
    close_own(state);
    static const char *const framed[][3] = {
        {kimi,
         "<|tool_calls_section_begin|>" KC("functions.f:0", "{\"a\":1}")
             KC("functions.g:1", "{}") "<|tool_calls_section_end|>",
         "<|tool_calls_section_begin|><|tool_calls_section_end|>"},
        {mistral, "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\":1}}]", "[TOOL_CALLS] []"},
        {ROWS "{# <｜tool▁calls▁begin｜> #}",
         "<｜tool▁calls▁begin｜>" DC("f", "{\"a\":1}") DC("g", "{}") "<｜tool▁calls▁end｜>",
         "<｜tool▁calls▁begin｜>{\"a\":1}"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(framed); i++) {
        open_with_template(framed[i][0]);
        fd = begin("/v1/chat/completions", CHAT(FG("true") "," FORMAT(SCHEMA)));
        assert_true(allows(v, framed[i][1]));
        assert_true(allows(v, "{\"a\":1}"));
        assert_false(allows(v, "{\"a\":\"1\"}"));
        assert_false(allows(v, framed[i][2]));
        assert_false(allows(v, "text"));
        abandon(fd);
        close_own(state);
    }
    open_with_template(hermes);
    bt_grammar_vocab_destroy(v);
}

static void test_forced_refusals(void **state)
{
    (void)state;
    refused(CHAT(FG("true") ",\"guided_choice\":[\"a\"]"), "messages", "of kind 'choice'");
    refused(CHAT(FG("true") ",\"tool_choice\":\"required\",\"guided_regex\":\"a\""), "tool_choice",
            "constrains the answer");
    refused(CHAT(FG("true") ",\"ignore_eos\":true"), "ignore_eos", "could not end");
    refused(TOOL_WITH("{\"name\":\"f\",\"strict\":true,\"parameters\":{\"type\":\"object\","
                      "\"properties\":{\"a\":{\"type\":\"word\"}}}}"),
            "tools", "a type is null");
    /* without strict the schema only helps */
    int fd =
        begin("/v1/chat/completions",
              CHAT("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{"
                   "\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"word\"}}}}}],"
                   "\"tool_choice\":\"required\""));
    struct bt_grammar_vocab *v = bytes_vocab();
    assert_true(
        allows(v, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":0}}\n</tool_call>"));
    bt_grammar_vocab_destroy(v);
    abandon(fd);
}

#define OWN(test) cmocka_unit_test_setup_teardown(test, NULL, close_own)
#define H(test)   cmocka_unit_test_setup_teardown(test, open_hermes, close_own)

int main(void)
{
    const struct CMUnitTest tests[] = {
        H(test_prompts),
        H(test_history),
        OWN(test_history_of_kimi),
        OWN(test_history_of_mistral),
        OWN(test_history_as_text),
        H(test_refusals),
        OWN(test_models_without_tools),
        H(test_whole_calls),
        H(test_one_call),
        H(test_streamed_calls),
        H(test_streamed_at_once),
        H(test_choices_have_their_own_calls),
        H(test_reasoning),
        H(test_streamed_reasoning),
        H(test_continued_reasoning),
        H(test_long_parts),
        OWN(test_forced_calls),
        H(test_forced_behind_reasoning),
        H(test_formats_beside_tools),
        H(test_forced_refusals),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
