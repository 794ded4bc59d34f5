/* Models that write the arguments of calls as elements: what the API gives of their answers, and
 * the grammars that force them. Scripted tokens; the forms themselves are test_reply.c's. Fixture:
 * front_fixture.h. */
#include "tests/unit/front_grammars.h"

#define SMALL "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tools }}"
static const char qwen[] = SMALL "{# <tool_call> <function= <parameter= #}";
static const char glm[] = SMALL "{# <tool_call> <arg_key> <think> </think> #}";

#define CHAT(more)                                                                                 \
    "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[{\"type\":\"function\","     \
    "\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"$defs\":{\"N\":{\"type\":" \
    "\"integer\",\"maximum\":9}},\"properties\":{\"s\":{\"type\":\"string\"},\"n\":{\"$ref\":"     \
    "\"#/$defs/N\"},\"e\":{\"enum\":[\"x.y\",\"z\"]},\"u\":{\"anyOf\":[{\"type\":\"string\"},{"    \
    "\"type\":\"null\"}]},\"o\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"boolean\"}" \
    "},\"required\":[\"a\"],\"additionalProperties\":false}},\"required\":[\"s\",\"n\"]" more

static int open_qwen(void **state)
{
    (void)state;
    open_with_template(qwen);
    return 0;
}

static int open_glm(void **state)
{
    (void)state;
    open_with_template(glm);
    return 0;
}

static uint32_t offset; /* of the next token's text */

static void say(const char *text)
{
    struct bt_gen_token t = {.id = 40, .text_offset = offset};
    offset += (uint32_t)strlen(text);
    delta(text, &t, 1);
}

/* The call of an answer, whole, then streamed with a token for each byte. */
static void expect_call(const char *answer, const char *name, const char *arguments)
{
    for (int stream = 0; stream <= 1; stream++) {
        int fd =
            begin("/v1/chat/completions", stream ? CHAT("}}}],\"stream\":true}") : CHAT("}}}]}"));
        offset = 0;
        for (size_t i = 0; answer[i] != '\0'; i++) {
            char one[2] = {answer[i], '\0'};
            say(one);
        }
        now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
        done(9, 0);
        receive(fd);
        if (stream) {
            assert_non_null(strstr(ans.body, "\"finish_reason\":\"tool_calls\""));
            continue;
        }
        json_t *j = parse(ans.body);
        assert_string_equal(str_at(j, "choices.0.message.tool_calls.0.function.name"), name);
        assert_string_equal(str_at(j, "choices.0.message.tool_calls.0.function.arguments"),
                            arguments);
        json_decref(j);
    }
}

/* Values are JSON or strings as the tool's schema says, not as they look. */
static void test_answers_of_qwen(void **state)
{
    (void)state;
    expect_call("<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n7\n"
                "</parameter>\n<parameter=u>\n1\n</parameter>\n<parameter=e>\ntrue\n</parameter>\n"
                "<parameter=o>\n{\"a\": true}\n</parameter>\n<parameter=other>\n5\n</parameter>\n"
                "</function>\n</tool_call>",
                "f",
                "{\"s\": \"12\", \"n\": 7, \"u\": \"1\", \"e\": \"true\", \"o\": {\"a\": true}, "
                "\"other\": 5}");
}

static void test_answers_of_glm(void **state)
{
    (void)state;
    expect_call("\n<think>hm</think>\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a\"b"
                "</arg_value>\n<arg_key>u</arg_key>\n<arg_value>null</arg_value>\n</tool_call>",
                "f", "{\"s\": \"a\\\"b\", \"u\": null}");
}

/* ---- forced calls ---- */

static void abandon(int fd)
{
    fail_now(500, "enough", 0);
    receive(fd);
}

#define QP(key, value) "<parameter=" key ">\n" value "\n</parameter>\n"
#define QC(members)    "<tool_call>\n<function=f>\n" members "</function>\n</tool_call>"
#define GP(key, value) "<arg_key>" key "</arg_key>\n<arg_value>" value "</arg_value>\n"
#define GC(members)    "<tool_call>f\n" members "</tool_call>"

#define EXPECT_ROWS(C, P)                                                                          \
    {                                                                                              \
        assert_true(allows(v, C(P("s", "a \"b\" <c>") P("n", "7"))));                              \
        assert_true(allows(                                                                        \
            v, C(P("s", "") P("n", "-1") P("e", "x.y") P("u", "null") P("o", "{\"a\": true}"))));  \
        assert_true(allows(v, C(P("s", "a") P("n", "7")) "\n" C(P("s", "a") P("n", "7"))));        \
        assert_false(allows(v, C(P("s", "a"))));                                                   \
        assert_false(allows(v, C(P("s", "a") P("n", "10"))));                                      \
        assert_false(allows(v, C(P("s", "a") P("n", "\"7\""))));                                   \
        assert_false(allows(v, C(P("s", "a") P("n", "7") P("e", "xay"))));                         \
        assert_false(allows(v, C(P("s", "a") P("n", "7") P("o", "{}"))));                          \
        assert_false(allows(v, C(P("s", "a") P("n", "7") P("x", "1"))));                           \
        assert_false(allows(v, "text"));                                                           \
    }

static void test_forced_qwen(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = bytes_vocab();
    int fd = begin("/v1/chat/completions", CHAT("}}}],\"tool_choice\":\"required\"}"));
    EXPECT_ROWS(QC, QP)
    abandon(fd);
    /* strict: text, or calls that follow the schema */
    fd = begin("/v1/chat/completions", CHAT("},\"strict\":true}}]}"));
    assert_true(allows(v, "text"));
    assert_true(allows(v, "text\n" QC(QP("s", "a") QP("n", "7"))));
    assert_false(allows(v, QC(QP("s", "a") QP("n", "x"))));
    abandon(fd);
    /* or what response_format says */
    fd =
        begin("/v1/chat/completions", CHAT("}}}],\"response_format\":{\"type\":\"json_object\"}}"));
    assert_true(allows(v, "{}"));
    assert_true(allows(v, QC("anything")));
    assert_false(allows(v, "text"));
    abandon(fd);
    bt_grammar_vocab_destroy(v);
}

static void test_forced_glm(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = bytes_vocab();
    int fd = begin("/v1/chat/completions", CHAT("}}}],\"tool_choice\":\"required\"}"));
    EXPECT_ROWS(GC, GP)
    assert_true(allows(v, "<think>x</think>\n" GC(GP("s", "a") GP("n", "7"))));
    abandon(fd);
    bt_grammar_vocab_destroy(v);
}

/* What cannot be enforced in text without quotes is refused if it is strict. */
static void test_refusals(void **state)
{
    (void)state;
#define ONE(parameters)                                                                            \
    "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[{\"type\":\"function\","     \
    "\"function\":{\"name\":\"f\",\"strict\":true,\"parameters\":" parameters "}}]}"
    static const char *const rows[][2] = {
        {ONE("{\"properties\":{\"a\":{\"type\":\"string\",\"pattern\":\"^a\"}}}"), "'pattern' of"},
        {ONE("{\"properties\":{\"a\":{\"enum\":[1,\"a\"]}}}"), "'enum' of the argument 'a'"},
        {ONE("{\"anyOf\":[{\"required\":[\"a\"]}],\"properties\":{\"a\":{}}}"), "'anyOf' of"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        receive(post("/v1/chat/completions", rows[i][0]));
        assert_int_equal(ans.status, 400);
        if (strstr(ans.body, rows[i][1]) == NULL) {
            fail_msg("%s", ans.body);
        }
    }
}

int main(void)
{
#define QWEN(test) cmocka_unit_test_setup_teardown(test, open_qwen, close_own)
#define GLM(test)  cmocka_unit_test_setup_teardown(test, open_glm, close_own)
    const struct CMUnitTest tests[] = {
        QWEN(test_answers_of_qwen), GLM(test_answers_of_glm), QWEN(test_forced_qwen),
        GLM(test_forced_glm),       QWEN(test_refusals),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
