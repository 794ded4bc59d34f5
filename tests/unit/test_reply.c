/* conductor/reply: answers of each form of tool calls and reasoning, cut at every place and into
 * single bytes, give the same bits; what is no call comes back as text; damaged answers lose
 * nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/buf.h"
#include "conductor/reply/reply.h"

#define H  BT_TOOLS_HERMES
#define L  BT_TOOLS_LLAMA3
#define ML BT_TOOLS_MISTRAL_LIST
#define M  BT_TOOLS_MISTRAL
#define D3 BT_TOOLS_DEEPSEEK_V3
#define D  BT_TOOLS_DEEPSEEK_V31
#define K  BT_TOOLS_KIMI
#define Q  BT_TOOLS_QWEN_XML
#define G  BT_TOOLS_GLM_XML
#define N  BT_TOOLS_NONE

#define DS(body)  "<｜tool▁calls▁begin｜>" body "<｜tool▁calls▁end｜>"
#define DC(body)  "<｜tool▁call▁begin｜>" body "<｜tool▁call▁end｜>"
#define DSEP      "<｜tool▁sep｜>"
#define KS(body)  "<|tool_calls_section_begin|>" body "<|tool_calls_section_end|>"
#define KC(id, a) "<|tool_call_begin|>" id "<|tool_call_argument_begin|>" a "<|tool_call_end|>"
#define HC(body)  "<tool_call>\n" body "\n</tool_call>"

#define QC(body)       "<tool_call>\n<function=" body "</function>\n</tool_call>"
#define QP(key, value) "<parameter=" key ">\n" value "\n</parameter>\n"
#define GP(key, value) "<arg_key>" key "</arg_key>\n<arg_value>" value "</arg_value>\n"

enum { THINKS = 1, KEEP = 2, ONE = 4, OFF = 8 };

/* Bits in one line: T text, R reasoning, C name of a call, A its arguments. */
struct example {
    enum bt_reply_tools tools;
    enum bt_reply_thoughts thoughts;
    unsigned how;
    const char *text, *bits;
};

static const struct example examples[] = {
    /* content only */
    {N, 0, 0, "Hello <tool_call> there", "T:Hello <tool_call> there"},
    {H, 0, OFF, HC("{\"name\": \"f\", \"arguments\": {}}"),
     "T:" HC("{\"name\": \"f\", \"arguments\": {}}")},
    {H, 0, 0, "  two\n lines <tool", "T:  two\n lines <tool"},
    {H, 0, 0, " \n ", "T: \n "},
    {H, 0, 0, "", ""},
    /* Hermes */
    {H, 0, 0, HC("{\"name\": \"f\", \"arguments\": {\"a\": [1, {\"b\": \"}\\\"]\"}]}}"),
     "C0:f|A0:{\"a\": [1, {\"b\": \"}\\\"]\"}]}"},
    {H, 0, 0,
     "Let me see.\n" HC("{\"name\": \"f\", \"arguments\": {\"x\": \"</tool_call>\"}}") "\n" HC(
         "{\"name\": \"g_2\", \"arguments\": {}}"),
     "T:Let me see.\n|C0:f|A0:{\"x\": \"</tool_call>\"}|C1:g_2|A1:{}"},
    {H, 0, ONE,
     HC("{\"name\": \"f\", \"arguments\": {}}") HC("{\"name\": \"g\", \"arguments\": {}}"),
     "C0:f|A0:{}"},
    {H, 0, 0, HC("{\"arguments\": {\"a\": 1}, \"id\": \"x\", \"name\": \"f\\u0067\"}") " Done.",
     "C0:fg|A0:{\"a\": 1}|T: Done."},
    {H, 0, 0,
     HC("{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": \\\"\\u00e4\\ud83d\\ude00\\n\\\"}\"}"),
     "C0:f|A0:{\"a\": \"ä😀\n\"}"},
    {H, 0, 0, HC("{\"name\": \"f\"}"), "C0:f|A0:{}"},
    {H, 0, 0, HC("{\"name\": \"f\", \"arguments\": {\"a\": 1}"), "C0:f|A0:{\"a\": 1}"},
    {H, 0, 0,
     "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"he said \"hi\" \"}}</tool_call> B",
     "C0:f|A0:{\"a\": \"he said \"hi\" \"}}|T: B"},
    {H, 0, 0, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"cut o",
     "C0:f|A0:{\"a\": \"cut o"},
    {H, 0, 0, "<tool_call>{\"name\": \"f\", \"argu", "T:<tool_call>{\"name\": \"f\", \"argu"},
    {H, 0, 0, "<tool_call>\nprint(1)\n</tool_call>", "T:<tool_call>\nprint(1)\n</tool_call>"},
    {H, 0, 0, "\n<tool_call><tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
     "T:\n<tool_call>|C0:f|A0:{}"},
    {H, 0, 0, HC("{\"name\": 7, \"arguments\": {}}"), "T:" HC("{\"name\": 7, \"arguments\": {}}")},
    {H, 0, 0, HC("{\"name\": \"\", \"arguments\": {}}"),
     "T:" HC("{\"name\": \"\", \"arguments\": {}}")},
    {H, 0, 0, HC("{\"arguments\": {}}"), "T:" HC("{\"arguments\": {}}")},
    {H, 0, 0, HC("{\"name\": \"f\", \"arguments\": null}"), "C0:f|A0:null"},
    /* Llama 3 */
    {L, 0, 0, "{\"name\": \"f\", \"parameters\": {\"q\": \"x\"}}", "C0:f|A0:{\"q\": \"x\"}"},
    {L, 0, 0,
     "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}; "
     "{\"name\": \"g\", \"parameters\": {\"a\": 2}}",
     "C0:f|A0:{}|C1:g|A1:{\"a\": 2}"},
    {L, 0, 0, "Sure: {\"name\": \"f\", \"parameters\": {}}",
     "T:Sure: {\"name\": \"f\", \"parameters\": {}}"},
    {L, 0, 0, "{\"name\": \"Bob\", \"age\": 3}", "T:{\"name\": \"Bob\", \"age\": 3}"},
    {L, 0, 0, "{\"name\": \"Bob\"}", "T:{\"name\": \"Bob\"}"},
    {L, 0, 0, "<|python_tag|>brave_search.call(query=\"x\")",
     "T:<|python_tag|>brave_search.call(query=\"x\")"},
    /* Mistral */
    {ML, 0, 0,
     "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": []}}, "
     "{\"name\": \"g\", \"arguments\": {}, \"id\": \"123456789\"}]",
     "C0:f|A0:{\"a\": []}|C1:g|A1:{}"},
    {ML, 0, 0, "Text[TOOL_CALLS] [1]", "T:Text[TOOL_CALLS] [1]"},
    {M, 0, 0, "[TOOL_CALLS]f[ARGS]{\"a\": \"[TOOL_CALLS]\"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}",
     "C0:f|A0:{\"a\": \"[TOOL_CALLS]\"}|C1:g|A1:{}"},
    {M, 0, 0, "[TOOL_CALLS]get.it{\"a\": 1}[x]", "C0:get.it|A0:{\"a\": 1}|T:[x]"},
    {M, 0, 0, "[TOOL_CALLS]what is this", "T:[TOOL_CALLS]what is this"},
    {M, 0, 0, "[TOOL_CALLS]f[ARGS]none", "T:[TOOL_CALLS]f[ARGS]none"},
    {M, BT_THOUGHTS_BRACKETS, 0, "[THINK]hm[/THINK]Hi[TOOL_CALLS]f[ARGS]{}",
     "R:hm|T:Hi|C0:f|A0:{}"},
    /* DeepSeek */
    {D3, 0, 0,
     "A" DS(DC("function" DSEP "f\n```json\n{\"a\": 1}\n```") "\n" DC("function" DSEP
                                                                      "g\n```json\n{}\n```")),
     "T:A|C0:f|A0:{\"a\": 1}|C1:g|A1:{}"},
    {D, 0, 0, DS(DC("f" DSEP "{\"a\": \"`\"}") DC("g" DSEP "{}")),
     "C0:f|A0:{\"a\": \"`\"}|C1:g|A1:{}"},
    {D, BT_THOUGHTS_TAGS, THINKS, "so\n\nthen" DS(DC("f" DSEP "{}")), "R:so\n\nthen|C0:f|A0:{}"},
    {D, 0, 0, DS("nothing"), "T:" DS("nothing")},
    {D, 0, 0, DS(DC("f" DSEP "{\"a\": } x")) "B", "C0:f|A0:{\"a\": } x|T:B"},
    /* Kimi */
    {K, 0, 0,
     KS(KC("functions.get_weather:0", "{\"city\": \"Rome\"}") KC("functions.f:g:12", "{}")),
     "C0:get_weather|A0:{\"city\": \"Rome\"}|C1:f:g|A1:{}"},
    {K, 0, 0,
     "<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.f:0"
     "<|tool_call_argument_begin|>\n{}\n<|tool_call_end|>\n<|tool_calls_section_end|>\nEnd",
     "C0:f|A0:{}|T:\nEnd"},
    {K, 0, 0, KS(KC("f", "[1]")), "T:" KS(KC("f", "[1]"))},
    /* elements: s is a string, n a number, b a boolean or null, u a string or null */
    {Q, 0, 0,
     "I look.\n" QC("get_weather>\n" QP("s", "New\nYork \"1\"\t\\") QP("n", "1.5e3")
                        QP("b", "True")),
     "T:I look.\n|C0:get_weather|A0:{\"s\": \"New\\nYork \\\"1\\\"\\t\\\\\", \"n\": 1.5e3, \"b\": "
     "true}"},
    {Q, 0, 0, QC("f>\n") "\n" QC("g>\n" QP("n", "x y")) " End",
     "C0:f|A0:{}|C1:g|A1:{\"n\": \"x y\"}|T: End"},
    {Q, 0, 0,
     QC("f>\n" QP("u", "null") QP("u", "12") QP("s", "null") QP("s", "</param")
            QP("s", "\n\na\n\n")),
     "C0:f|A0:{\"u\": null, \"u\": \"12\", \"s\": \"null\", \"s\": \"</param\", \"s\": "
     "\"\\n\\na\\n\\n\"}"},
    {Q, 0, 0,
     QC("f>\n" QP("o", "{\"a\": [1, \"</parameter\", null]}") QP("x", "[1, 2") QP("x", "\"q\"")),
     "C0:f|A0:{\"o\": {\"a\": [1, \"</parameter\", null]}, \"x\": \"[1, 2\", \"x\": \"q\"}"},
    {Q, 0, 0, QC("f>\n" QP("o", "{\"a\": True}") QP("o", "[01]")),
     "C0:f|A0:{\"o\": \"{\\\"a\\\": True}\", \"o\": \"[01]\"}"},
    {Q, 0, 0, "<function=f>\n" QP("s", "a") "</function>\n", "C0:f|A0:{\"s\": \"a\"}"},
    {Q, 0, 0, "<tool_call>\n<function=f>\n" QP("s", "a") "</tool_call>", "C0:f|A0:{\"s\": \"a\"}"},
    {Q, 0, 0, "<tool_call>\n<function=f>\n<parameter=s>\nab", "C0:f|A0:{\"s\": \"ab"},
    {Q, 0, 0, "<tool_call>\n<function=f>\n<parameter=n>\n12", "C0:f|A0:{\"n\": 12"},
    {Q, 0, 0, "<tool_call>\n<function=f>\nso <parameter=s>a</parameter></function></tool_call>",
     "C0:f|A0:{\"s\": \"a\"}"},
    {Q, 0, 0, "<tool_call> and <function= f>", "T:<tool_call> and <function= f>"},
    {Q, 0, 0, "<tool_call>\n{\"name\": 1}", "T:<tool_call>\n{\"name\": 1}"},
    {Q, 0, OFF, QC("f>\n"), "T:" QC("f>\n")},
    {Q, 0, ONE, QC("f>\n") QC("g>\n"), "C0:f|A0:{}"},
    {Q, BT_THOUGHTS_TAGS, THINKS, "hm <tool_call></think>" QC("f>\n" QP("s", "")),
     "R:hm <tool_call>|C0:f|A0:{\"s\": \"\"}"},
    {G, 0, 0, "\n<tool_call>get_weather\n" GP("s", "a\n\"b\"") GP("n", "-3") "</tool_call>",
     "C0:get_weather|A0:{\"s\": \"a\\n\\\"b\\\"\", \"n\": -3}"},
    {G, 0, 0, "Hm<tool_call>f\n</tool_call>\n<tool_call>g</tool_call>",
     "T:Hm|C0:f|A0:{}|C1:g|A1:{}"},
    {G, 0, 0, "<tool_call>f<arg_key> x </arg_key><arg_value>{\"a\": 1}</arg_value></tool_call>",
     "C0:f|A0:{\"x\": {\"a\": 1}}"},
    {G, 0, 0, "<tool_call>s is a string", "T:<tool_call>s is a string"},
    {G, 0, 0, "<tool_call>string\nis", "T:<tool_call>string\nis"},
    {G, BT_THOUGHTS_TAGS, 0, "\n<think>a</think>\n<tool_call>f\n" GP("b", "None") "</tool_call>",
     "R:a|C0:f|A0:{\"b\": null}"},
    /* reasoning */
    {N, BT_THOUGHTS_TAGS, 0, "<think>\na\nb\n</think>\n\nYes\n", "R:a\nb|T:Yes\n"},
    {N, BT_THOUGHTS_TAGS, THINKS, "a <b</think>Yes", "R:a <b|T:Yes"},
    {N, BT_THOUGHTS_TAGS, THINKS, "<think>\na</think>", "R:a"},
    {N, BT_THOUGHTS_TAGS, THINKS, "no end\n", "R:no end\n"},
    {N, BT_THOUGHTS_TAGS, 0, "\n<think>\n\n</think>\n\nYes", "T:Yes"},
    {N, BT_THOUGHTS_TAGS, 0, "Say <think>x</think>", "T:Say <think>x</think>"},
    {N, BT_THOUGHTS_TAGS, KEEP, "<think>\na\n</think>\n\nYes", "T:<think>\na\n</think>\n\nYes"},
    {N, BT_THOUGHTS_TAGS, KEEP | THINKS, "\na\n</think>\n\nYes", "T:\na\n</think>\n\nYes"},
    {N, BT_THOUGHTS_TRIANGLES, 0, "◁think▷a◁/think▷b", "R:a|T:b"},
    {N, BT_THOUGHTS_SEED, 0, "<seed:think>a</seed:think>b", "R:a|T:b"},
    {H, BT_THOUGHTS_TAGS, 0,
     "<think>use <tool_call>?</think>\n\n" HC("{\"name\": \"f\", \"arguments\": {}}"),
     "R:use <tool_call>?|C0:f|A0:{}"},
    {L, BT_THOUGHTS_TAGS, 0, "<think>a</think>\n{\"name\": \"f\", \"parameters\": {}}",
     "R:a|C0:f|A0:{}"},
};

struct line {
    struct bt_buf text;
    enum bt_reply_kind kind;
    uint32_t call;
};

static void add_bit(void *arg, const struct bt_reply_bit *b)
{
    struct line *l = arg;
    assert_true(b->len > 0);
    if (l->text.len == 0 || l->kind != b->kind || l->call != b->call || b->kind == BT_REPLY_CALL) {
        bt_buf_printf(&l->text, "%s%c", l->text.len > 0 ? "|" : "", "TRCA"[b->kind]);
        if (b->kind >= BT_REPLY_CALL) {
            bt_buf_printf(&l->text, "%u", b->call);
        }
        bt_buf_puts(&l->text, ":");
    }
    l->kind = b->kind;
    l->call = b->call;
    bt_buf_append(&l->text, b->text, b->len);
}

static unsigned kinds(const void *arg, const char *function, size_t function_len, const char *key,
                      size_t key_len)
{
    assert_ptr_equal(arg, examples);
    assert_true(function_len > 0 && function != NULL);
    switch (key_len == 1 ? key[0] : ' ') {
    case 's': return BT_REPLY_IS_STRING;
    case 'n': return BT_REPLY_IS_NUMBER;
    case 'b': return BT_REPLY_IS_BOOLEAN | BT_REPLY_IS_NULL;
    case 'u': return BT_REPLY_IS_STRING | BT_REPLY_IS_NULL;
    case 'o': return BT_REPLY_IS_OBJECT;
    default: return BT_REPLY_IS_ANY;
    }
}

static struct bt_reply *start(const struct example *x, struct line *l)
{
    struct bt_reply_options o = {.style = {x->tools, x->thoughts},
                                 .tools = x->tools != N && !(x->how & OFF),
                                 .thinks = (x->how & THINKS) != 0,
                                 .keep_thoughts = (x->how & KEEP) != 0,
                                 .one_call = (x->how & ONE) != 0,
                                 .kinds = kinds,
                                 .kinds_arg = examples};
    *l = (struct line){0};
    return bt_reply_create(&o, add_bit, l);
}

/* Feeds the text cut at a and b, or byte by byte, and compares the bits with `want`. */
static void check(const struct example *x, const char *text, size_t len, size_t a, size_t b,
                  const char *want)
{
    struct line l;
    struct bt_reply *r = start(x, &l);
    if (b == 0) {
        for (size_t i = 0; i < len; i++) {
            bt_reply_feed(r, text + i, 1);
        }
    } else {
        bt_reply_feed(r, text, a);
        bt_reply_feed(r, text + a, b - a);
        bt_reply_feed(r, text + b, len - b);
    }
    bt_reply_end(r);
    const char *got = l.text.len > 0 ? l.text.data : "";
    if (strcmp(got, want) != 0) {
        fail_msg("'%s' cut at %zu and %zu:\n got %s\nwant %s", text, a, b, got, want);
    }
    bt_reply_destroy(r);
    bt_buf_cleanup(&l.text);
}

static void every_cut_gives_the_same_bits(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(examples) / sizeof(examples[0]); i++) {
        const struct example *x = &examples[i];
        size_t len = strlen(x->text);
        check(x, x->text, len, len, len, x->bits);
        check(x, x->text, len, 0, 0, x->bits);
        for (size_t a = 0; a <= len; a++) {
            for (size_t b = a > 0 ? a : 1; b <= len; b += len > 80 ? 7 : 1) {
                check(x, x->text, len, a, b, x->bits);
            }
        }
    }
}

static uint32_t draw(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* Everything of a damaged answer that is no white space, marker or frame comes out: letters that
 * the frames do not have are counted. */
static size_t count(const char *s, size_t n, char c)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        k += s[i] == c;
    }
    return k;
}

static void damage_loses_nothing_and_no_cut_matters(void **state)
{
    (void)state;
    static const char *const parts[] = {"Z",
                                        "{",
                                        "}",
                                        "\"",
                                        ":",
                                        ",",
                                        "[",
                                        "]",
                                        "\\",
                                        "\n",
                                        " ",
                                        "<",
                                        "{\"name\": \"Z\", \"arguments\": {",
                                        "\"parameters\": ",
                                        "<tool_call>",
                                        "</tool_call>",
                                        "<|python_tag|>",
                                        "[TOOL_CALLS]",
                                        "[ARGS]",
                                        "<think>",
                                        "</think>",
                                        "[THINK]",
                                        "<｜tool▁calls▁begin｜>",
                                        "<｜tool▁call▁begin｜>",
                                        DSEP,
                                        "<｜tool▁call▁end｜>",
                                        "<|tool_calls_section_begin|>",
                                        "<|tool_call_begin|>",
                                        "<|tool_call_argument_begin|>",
                                        "<|tool_call_end|>",
                                        "functions.Z:0",
                                        "```json\n{",
                                        "<function=Z>",
                                        "</function>",
                                        "<parameter=s>",
                                        "</parameter>",
                                        "<arg_key>n</arg_key>",
                                        "<arg_value>",
                                        "</arg_value>"};
    uint32_t seed = 7;
    for (int round = 0; round < 20000; round++) {
        struct example x = {.tools = 1 + draw(&seed) % (BT_TOOLS_STYLES - 1),
                            .thoughts = draw(&seed) % BT_THOUGHTS_STYLES,
                            .how = draw(&seed) % 4};
        struct bt_buf text;
        bt_buf_init(&text);
        for (uint32_t k = 1 + draw(&seed) % 12; k > 0; k--) {
            bt_buf_puts(&text, parts[draw(&seed) % (sizeof(parts) / sizeof(parts[0]))]);
        }
        struct line l;
        struct bt_reply *r = start(&x, &l);
        bt_reply_feed(r, text.data, text.len);
        bt_reply_end(r);
        char *whole = strdup(l.text.len > 0 ? l.text.data : "");
        check(&x, text.data, text.len, 0, 0, whole);
        size_t a = draw(&seed) % (text.len + 1), b = a + draw(&seed) % (text.len - a + 1);
        check(&x, text.data, text.len, a, b > 0 ? b : 1, whole);
        /* a name may stand at the end of a key that calls do not have */
        if (count(whole, strlen(whole), 'Z') != count(text.data, text.len, 'Z') &&
            strstr(whole, "C0") == NULL) {
            fail_msg("'%s' has become '%s'", text.data, whole);
        }
        free(whole);
        bt_reply_destroy(r);
        bt_buf_cleanup(&l.text);
        bt_buf_cleanup(&text);
    }
}

static void the_end_of_reasoning_is_counted_in_bytes(void **state)
{
    (void)state;
    static const struct {
        struct example x;
        uint64_t end;
    } rows[] = {{{N, BT_THOUGHTS_TAGS, 0, "<think>ab</think>c", ""}, 17},
                {{N, BT_THOUGHTS_TAGS, THINKS, "ab", ""}, UINT64_MAX},
                {{N, BT_THOUGHTS_TAGS, 0, "ab", ""}, 0},
                {{N, BT_THOUGHTS_TAGS, 0, " ", ""}, 0},
                {{N, BT_THOUGHTS_TAGS, KEEP, "<think>ab</think>c", ""}, 17},
                {{D, BT_THOUGHTS_TAGS, THINKS, "ab" DS(DC("f" DSEP "{}")), ""}, 2},
                {{H, BT_THOUGHTS_NONE, 0, "ab", ""}, 0}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct line l;
        struct bt_reply *r = start(&rows[i].x, &l);
        bt_reply_feed(r, rows[i].x.text, strlen(rows[i].x.text));
        bt_reply_end(r);
        assert_int_equal(bt_reply_thoughts_end(r), rows[i].end);
        bt_reply_destroy(r);
        bt_buf_cleanup(&l.text);
    }
}

/* Where a marker is a token, only the token counts; before it an incomplete character may become
 * U+FFFD, and its text may come late. */
static void tokens_are_no_text(void **state)
{
    (void)state;
    static const struct bt_reply_tokens tokens = {
        .n = 4,
        .marker = {"<think>", "</think>", "<tool_call>", "</arg_value>"},
        .id = {50, 51, 52, 53}};
    static const struct {
        enum bt_reply_tools tools;
        const char *text; /* \1 to \4: the tokens */
        const char *bits;
    } rows[] = {
        {H, "\1say </think>\2ok", "R:say </think>|T:ok"},
        {H, "<think>\1a\2b", "T:<think><think>a</think>b"},
        {H, "a<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
         "T:a<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>"},
        {H, "<tool_call>\3\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
         "T:<tool_call>|C0:f|A0:{}"},
        {G, "\3f\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>b\4</tool_call>",
         "C0:f|A0:{\"s\": \"a</arg_value>b\"}"},
        {H, "\1\357\277\275\357\277\275\2ok", "R:\357\277\275\357\277\275|T:ok"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (int late = 0; late <= 1; late++) { /* the text comes with the tokens, or at the end */
            struct example x = {.tools = rows[i].tools, .thoughts = BT_THOUGHTS_TAGS};
            struct bt_reply_options o = {.style = {x.tools, x.thoughts},
                                         .tools = true,
                                         .tokens = &tokens,
                                         .kinds = kinds,
                                         .kinds_arg = examples};
            struct line l = {0};
            struct bt_reply *r = bt_reply_create(&o, add_bit, &l);
            struct bt_buf held;
            uint64_t at = 0;
            bt_buf_init(&held);
            for (const char *c = rows[i].text; *c != '\0'; c++) {
                bool token = *c >= '\1' && *c <= '\4';
                const char *text = token ? tokens.marker[*c - '\1'] : c;
                size_t n = token ? strlen(text) : 1;
                bool broken = token && c - rows[i].text > 3 && c[-1] == '\275';
                bt_reply_token(r, token ? tokens.id[*c - '\1'] : 9, at - (broken ? 6 : 0));
                bt_buf_append(&held, text, n);
                at += n;
                if (late == 0) {
                    bt_reply_feed(r, held.data, held.len);
                    bt_buf_clear(&held);
                }
            }
            bt_reply_feed(r, held.data, held.len);
            bt_reply_end(r);
            assert_string_equal(l.text.data, rows[i].bits);
            bt_reply_destroy(r);
            bt_buf_cleanup(&l.text);
            bt_buf_cleanup(&held);
        }
    }
}

static void deep_arguments_end_at_the_limit(void **state)
{
    (void)state;
    struct example x = {.tools = M};
    struct bt_buf text;
    struct line l;
    bt_buf_init(&text);
    bt_buf_puts(&text, "[TOOL_CALLS]f[ARGS]{\"a\":");
    for (int i = 0; i < 100000; i++) {
        bt_buf_puts(&text, "[");
    }
    struct bt_reply *r = start(&x, &l);
    bt_reply_feed(r, text.data, text.len);
    bt_reply_end(r);
    assert_int_equal(l.text.len, strlen("C0:f|A0:{\"a\":") + 100000);
    bt_reply_destroy(r);
    bt_buf_cleanup(&l.text);
    bt_buf_cleanup(&text);
}

static void styles_come_from_templates_and_words(void **state)
{
    (void)state;
    static const struct {
        const char *words, *text;
        enum bt_reply_tools tools;
        enum bt_reply_thoughts thoughts;
    } rows[] = {
        {"auto", NULL, N, BT_THOUGHTS_NONE},
        {NULL, "{% if tools %}<tool_call>", H, BT_THOUGHTS_NONE},
        {"auto", "{{ m.tools }}<tool_call>{{ my_tools }}", N, BT_THOUGHTS_NONE},
        {"auto", "{% for t in tools %}<tool_call><think>", H, BT_THOUGHTS_TAGS},
        {"auto", "{%- if tools %}<tool_call>\n<function={name}>\n<parameter={key}>", Q,
         BT_THOUGHTS_NONE},
        {"auto", "{%- if tools %}<tool_call>{name}\n<arg_key><think></think>", G, BT_THOUGHTS_TAGS},
        {"glm-xml", NULL, G, BT_THOUGHTS_NONE},
        {"auto",
         "{% if custom_tools is defined %}{% set tools = custom_tools %} ipython \"parameters\"", L,
         BT_THOUGHTS_NONE},
        {"auto", "tools [TOOL_CALLS] [{\"name\": \"", ML, BT_THOUGHTS_NONE},
        {"auto", "tools [TOOL_CALLS][ARGS]\"name\"[THINK]", M, BT_THOUGHTS_BRACKETS},
        {"auto", "tools <｜tool▁calls▁begin｜>```json</think>", D3, BT_THOUGHTS_TAGS},
        {"auto", "tools <｜tool▁calls▁begin｜>", D, BT_THOUGHTS_NONE},
        {"auto", "tools <|tool_calls_section_begin|>", K, BT_THOUGHTS_NONE},
        {"auto", "{% if tools %}<|im_system|>tool_declare<|im_middle|>", K, BT_THOUGHTS_NONE},
        {"none", "tools <tool_call>", N, BT_THOUGHTS_NONE},
        {"hermes", NULL, H, BT_THOUGHTS_NONE},
        {"think-seed", NULL, N, BT_THOUGHTS_SEED},
        {"deepseek-v3.1, think", NULL, D, BT_THOUGHTS_TAGS},
    };
    struct bt_reply_style s;
    char err[400];
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        assert_int_equal(bt_reply_style_read(rows[i].words, rows[i].text, &s, err, sizeof(err)),
                         BT_OK);
        assert_int_equal(s.tools, rows[i].tools);
        assert_int_equal(s.thoughts, rows[i].thoughts);
    }
    static const char *const wrong[] = {"", "hermes,", "qwen", "hermes think", ",", "auto,hermes"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_int_equal(bt_reply_style_read(wrong[i], NULL, &s, err, sizeof(err)), BT_ERR_CONFIG);
        assert_non_null(strstr(err, "hermes"));
    }
    s = (struct bt_reply_style){K, BT_THOUGHTS_TAGS};
    size_t n = 0;
    while (bt_reply_marker(&s, n) != NULL) {
        n++;
    }
    assert_int_equal(n, 7);
    assert_true(bt_reply_prompt_thinks(&s, "a<think>\n", 9));
    assert_false(bt_reply_prompt_thinks(&s, "<think>\n\n</think>\n\n", 19));
    assert_false(bt_reply_prompt_thinks(&s, "\n", 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_cut_gives_the_same_bits),
        cmocka_unit_test(damage_loses_nothing_and_no_cut_matters),
        cmocka_unit_test(the_end_of_reasoning_is_counted_in_bytes),
        cmocka_unit_test(tokens_are_no_text),
        cmocka_unit_test(deep_arguments_end_at_the_limit),
        cmocka_unit_test(styles_come_from_templates_and_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
