/* The front ends for patterns, choices, GBNF and tags, through compiled grammars: which texts an
 * answer may be, and errors with their places. */
#include "tests/unit/grammar_texts.h"

static void test_regex(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"[a-c]+", {"a", "abc"}, {"", "abd", "xa"}},
        {"\xc3\xa4|b", {"\xc3\xa4", "b"}, {"\xc3", "a"}},
        {"(?!ab)[a-z]{2}", {"ba", "aa"}, {"ab", "b"}},
    };
    check_rows(BT_GRAMMAR_REGEX, rows, BT_ARRAY_LEN(rows));
    static const struct error errors[] = {
        {"a(", BT_ERR_INVALID, "offset 1"},
        {"(a)\\1", BT_ERR_UNSUPPORTED, "back reference"},
        {"a(?=b)", BT_ERR_INVALID, ""}, /* matches no whole text */
    };
    check_errors(BT_GRAMMAR_REGEX, errors, BT_ARRAY_LEN(errors));
}

static void test_choice(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"[\"yes\", \"no\"]", {"yes", "no"}, {"", "y", "yess", "yesno"}},
        {"[\"a\", \"ab\", \"abc\", \"b\", \"a\"]", {"a", "ab", "abc", "b"}, {"", "abcd", "bc"}},
        {"[\"\", \"x\"]", {"", "x"}, {"xx"}},
        {"[\"\\u00e4\\\"\"]", {"\xc3\xa4\""}, {"\xc3\xa4"}},
    };
    check_rows(BT_GRAMMAR_CHOICE, rows, BT_ARRAY_LEN(rows));
    static const struct error errors[] = {
        {"[]", BT_ERR_INVALID, "at least one"},
        {"{}", BT_ERR_INVALID, "at least one"},
        {"[\"a\", 1]", BT_ERR_INVALID, "choice 1"},
        {"[\"a\"", BT_ERR_INVALID, "JSON"},
    };
    check_errors(BT_GRAMMAR_CHOICE, errors, BT_ARRAY_LEN(errors));
}

static void test_gbnf(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"root ::= \"a\" | \"b\" \"c\"", {"a", "bc"}, {"", "b", "abc"}},
        {"# rules\nroot ::= x+ # one\n\nx ::= [0-9a-f]{2} \",\"?\n",
         {"00", "0a,ff"},
         {"", "0", ",00"}},
        {"root ::= (\n  \"a\"\n  \"b\" # two\n)*\n", {"", "ab", "abab"}, {"a", "aba"}},
        {"root ::= \"a\" |\n  \"b\"\n  | \"c\"\nx ::= \"d\"", {"a", "b", "c"}, {"d", "ab"}},
        {"root ::=\n  \"a\"", {"a"}, {""}},
        {"root ::= a\r\na ::= \"x\"\r\n", {"x"}, {""}},
        {"root ::= \"\\x41\\u00e4\\U0001F600\\n\\t\\\\\\\"\\[\\]\"",
         {"A\xc3\xa4\xf0\x9f\x98\x80\n\t\\\"[]"},
         {"A"}},
        {"root ::= [^a-c\\n] [\\]x-]", {"d]", "\xc3\xa4x", "z-"}, {"a]", "\n]", "dy"}},
        {"root ::= . .", {"ab", "\n\xc3\xa4"}, {"a", "\xc3\xa4"}},
        {"root ::= \"a\"{2,3} \"b\"{2} \"c\"{1,}",
         {"aabbc", "aaabbcc"},
         {"abbc", "aaaabbc", "aabb"}},
        {"root ::= |\"a\"", {"", "a"}, {"aa"}},
        {"root ::= expr\nexpr ::= term (\"+\" term)*\nterm ::= [0-9]+ | \"(\" expr \")\"",
         {"1", "(1+2)+3", "((1))"},
         {"", "(1", "1+", "1)"}},
        {"root ::= \"(\" root \")\" | \"\"", {"", "()", "((()))"}, {"(", "(()", ")"}},
        {"root ::= a-b_1\na-b_1 ::= \"x\"", {"x"}, {"y"}},
        {"root ::= <call> \"x\" </call>", {"\1x\2", "<call>x</call>", "<call>x\2"}, {"x", "\1x"}},
        {"root ::= !</think>* </think> \"a\"",
         {"b\3"
          "a",
          "\3"
          "a",
          "<x></think>a"},
         {"a", "\1\3"
               "a"}},
        {"root ::= [a-z]+ \"=\" root | [0-9]", {"1", "a=b=2"}, {"a", "a="}},
        {"root ::= x x x\nx ::= y y\ny ::= \"a\" | z\nz ::= \"\" | \"b\" x",
         {"", "ab", "bbaa"},
         {"c"}},
    };
    check_rows(BT_GRAMMAR_GBNF, rows, BT_ARRAY_LEN(rows));
}

static void test_gbnf_errors(void **state)
{
    (void)state;
    static const struct error errors[] = {
        {"", BT_ERR_INVALID, "no rule named root"},
        {"a ::= \"b\"", BT_ERR_INVALID, "no rule named root"},
        {"root ::= a\nb ::= c", BT_ERR_INVALID, "line 1, column 10: the rule a is not defined"},
        {"root ::= \"a\"\n  b ::= \"c", BT_ERR_INVALID, "line 2, column 9: the literal has no end"},
        {"root ::= \"a\nb\"", BT_ERR_INVALID, "no end"},
        {"root ::= [a", BT_ERR_INVALID, "closing ]"},
        {"root ::= [z-a]", BT_ERR_INVALID, "range"},
        {"root ::= (\"a\"", BT_ERR_INVALID, "closing )"},
        {"root ::= (\"a\"\nx ::= \"b\")", BT_ERR_INVALID, "a ) is missing"},
        {"root ::= \"a\" )", BT_ERR_INVALID, "line 1, column 14: ')' is not expected"},
        {"root ::= \"\\q\"", BT_ERR_INVALID, "escape"},
        {"root ::= \"\\x4\"", BT_ERR_INVALID, "2 hexadecimal"},
        {"root ::= *", BT_ERR_INVALID, "nothing before"},
        {"root ::= \"a\"{3,2}", BT_ERR_INVALID, "m <= n"},
        {"root ::= \"a\"{x}", BT_ERR_INVALID, "number"},
        {"root = \"a\"", BT_ERR_INVALID, "\"::=\""},
        {"root ::= \"a\"\nroot ::= \"b\"", BT_ERR_INVALID, "defined twice, first in line 1"},
        {"root ::= 'a'", BT_ERR_INVALID, "double quotes"},
        {"root ::= <[12]>", BT_ERR_UNSUPPORTED, "token ids"},
        {"root ::= !<a>", BT_ERR_UNSUPPORTED, "!<text>*"},
        {"?start: \"a\"\n", BT_ERR_UNSUPPORTED, "Lark"},
        {"start: \"a\"\n", BT_ERR_UNSUPPORTED, "Lark"},
        {"%import common.WS\n", BT_ERR_UNSUPPORTED, "Lark"},
        {"root ::= e\ne ::= e \"+\" e | \"1\"", BT_ERR_UNSUPPORTED,
         "line 2, column 1: the rule e is left"},
        {"root ::= a\na ::= [x]? b\nb ::= a \"y\" | \"z\"", BT_ERR_UNSUPPORTED, "left recursive"},
        {"root ::= a b\na ::= a2 root? \"q\"\na2 ::= \"\" | \"(\" a2\nb ::= \"x\" | \"(\" a \"(\"",
         BT_ERR_UNSUPPORTED, "left recursive"},
        {"root ::= \"a\" root", BT_ERR_INVALID, ""}, /* never ends */
        {"root ::= \"a\"{99999999999}", BT_ERR_EXHAUSTED, "repeat"},
    };
    check_errors(BT_GRAMMAR_GBNF, errors, BT_ARRAY_LEN(errors));
}

/* Many rules, deep groups, rules that double in size: an error or a grammar, soon. */
static void test_gbnf_limits(void **state)
{
    (void)state;
    struct bt_buf b;
    char err[512];
    struct bt_grammar *g = NULL;
    bt_buf_init(&b);
    bt_buf_puts(&b, "root ::= r0\n");
    for (int i = 0; i < 20000; i++) {
        bt_buf_printf(&b, "r%d ::= r%d\n", i, i + 1);
    }
    bt_buf_puts(&b, "r20000 ::= \"x\"\n");
    assert_int_equal(compile(BT_GRAMMAR_GBNF, b.data, &g, err, sizeof(err)), BT_ERR_EXHAUSTED);
    bt_buf_clear(&b);
    bt_buf_puts(&b, "root ::= ");
    for (int i = 0; i < 100000; i++) {
        bt_buf_puts(&b, "(");
    }
    assert_int_equal(compile(BT_GRAMMAR_GBNF, b.data, &g, err, sizeof(err)), BT_ERR_EXHAUSTED);
    bt_buf_clear(&b);
    bt_buf_puts(&b, "root ::= r0\n");
    for (int i = 0; i < 40; i++) {
        bt_buf_printf(&b, "r%d ::= r%d r%d\n", i, i + 1, i + 1);
    }
    bt_buf_puts(&b, "r40 ::= \"x\"\n");
    if (compile(BT_GRAMMAR_GBNF, b.data, &g, err, sizeof(err)) == BT_OK) {
        bt_grammar_unref(g);
    }
    bt_buf_cleanup(&b);
}

#define TOOL(begin, schema)                                                                        \
    "{\"begin\": [{\"special\": \"<call>\"}, \"" begin "\"], \"schema\": " schema                  \
    ", \"end\": {\"special\": \"</call>\"}}"
#define TOOLS                                                                                      \
    "\"tags\": [" TOOL("f:", "{\"type\": \"integer\"}") ", " TOOL("g:", "{\"const\": \"x\"}") "]"

static void test_tags(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"{" TOOLS ", \"triggers\": [\"<call>\"]}",
         {"", "hello", "a\1f:12\2", "\1f:1\2\1g:\"x\"\2 and", "<cal\1f:1\2", "<call>f:1</call>x"},
         {"\1", "\1f:a\2", "\1h:1\2", "<call>", "a<call>b", "\2", "\1f:1"}},
        {"{" TOOLS ", \"at_least_one\": true}", {"a\1f:1\2", "\1f:1\2"}, {"", "a"}},
        {"{" TOOLS ", \"stop_after_first\": true}",
         {"", "a\1f:1\2"},
         {"\1f:1\2 ", "\1f:1\2\1f:2\2"}},
        {"{" TOOLS ", \"free_text\": false, \"at_least_one\": true, \"separator\": \"\\n\"}",
         {"\1f:1\2", "\1f:1\2\n\1g:\"x\"\2"},
         {"", "a\1f:1\2", "\1f:1\2\1f:1\2", "\1f:1\2\n"}},
        {"{" TOOLS ", \"open\": \"[\", \"close\": \"]\", \"separator\": \", \"}",
         {"", "a", "a[\1f:1\2]", "[\1f:1\2, \1f:2\2] b"},
         {"[", "[]", "[\1f:1\2", "\1f:1\2"}},
        {"{\"tags\": [{\"begin\": [\"f:\", {\"regex\": \"[0-9]+\"}, \"=\"], \"any\": true, "
         "\"end\": "
         "\";\"}]}",
         {"f:12=abc;", "x f:1=;f:2=a;"},
         {"f:=a;", "f:1=a"}},
        {"{\"tags\" :[{\"schema\": {\"type\":\"number\",\"minimum\":0.1, \"maximum\": 3 , "
         "\"x\":\"a\\\"]\"}, "
         "\"end\":\"\"}, "
         "{ \"end\": \"]\\\\\", \"begin\":\"[\" ,\"schema\" "
         ":{\"const\": 5}},{\"begin\":\"b\",\"schema\":{\"const\":7}}] "
         ", \"free_text\": false, \"at_least_one\":true,\"stop_after_first\":true}",
         {"0.1", "3", "b7", "[5]\\"},
         {"0.09", "3.1", "b8", "7", "[5]"}},
        {"{\"tags\": [{\"begin\": [{\"special\": \"<call>\"}], \"members\": [{\"begin\": \"a=\", "
         "\"any\": true, \"end\": \";\"}, {\"begin\": \"b=\", \"schema\": {\"const\": 1}, "
         "\"end\": \";\", \"optional\": true}, {\"regex\": \"x|y\", \"end\": \"\"}], \"end\": "
         "{\"special\": \"</call>\"}}], \"instead\": {\"schema\": {\"const\": 2}}, \"free_text\": "
         "false, \"at_least_one\": true}",
         {"\1a=;x\2", "\1a=b=2;b=1;y\2\1a=z;x\2", "2"},
         {"\1a=x\2", "\1a=;b=2;x\2", "\1b=1;x\2", "2\1a=;x\2", "1", ""}},
        {"{\"first\": {\"any\": true, \"end\": {\"special\": \"</think>\"}}, \"tags\": "
         "[{\"schema\": "
         "true, \"end\": \"\"}], \"free_text\": false, \"at_least_one\": true, "
         "\"stop_after_first\": "
         "true}",
         {"so\3[1]", "\3{}", "a</think>1"},
         {"1", "a", "a\3", "\3{"}},
        {"{\"first\": {\"any\": true, \"end\": {\"special\": \"</think>\"}, \"optional\": true}, "
         "\"tags\": [{\"regex\": \"[a-c]\"}], \"free_text\": false, \"at_least_one\": true, "
         "\"stop_after_first\": true}",
         {"so\3"
          "a",
          "b"},
         {"so", "\3"}},
    };
    check_rows(BT_GRAMMAR_TAGS, rows, BT_ARRAY_LEN(rows));
    static const struct error errors[] = {
        {"[]", BT_ERR_INVALID, "object"},
        {"{", BT_ERR_INVALID, "JSON"},
        {"{}", BT_ERR_INVALID, "\"tags\""},
        {"{\"tags\": []}", BT_ERR_INVALID, "\"tags\""},
        {"{\"tags\": [1]}", BT_ERR_INVALID, "tags/0 must be an object"},
        {"{\"tags\": [{\"begin\": \"a\"}]}", BT_ERR_INVALID, "one of schema"},
        {"{\"tags\": [{\"begin\": \"a\", \"members\": 1}]}", BT_ERR_INVALID, "one of schema"},
        {"{\"tags\": [{\"begin\": \"a\", \"members\": [{\"members\": []}]}]}", BT_ERR_INVALID,
         "tags/0/members/0 has an unknown key"},
        {"{\"tags\": [{\"begin\": \"a\", \"regex\": \"b\"}], \"instead\": {}}", BT_ERR_INVALID,
         "instead must have one of schema"},
        {"{\"tags\": [{\"begin\": 1, \"any\": true, \"end\": \"b\"}]}", BT_ERR_INVALID, "tags/0"},
        {"{\"tags\": [{\"begin\": \"a\", \"any\": true}]}", BT_ERR_INVALID, "end that begins"},
        {"{\"tags\": [{\"any\": true, \"end\": \"b\"}]}", BT_ERR_INVALID, "free_text"},
        {"{\"tags\": [{\"begin\": \"a\", \"regex\": \"(\"}]}", BT_ERR_INVALID,
         "tags/0: at offset 0"},
        {"{\"tags\": [{\"begin\": \"a\", \"schema\": {\"type\": \"int\"}}]}", BT_ERR_INVALID,
         "tags/0: #"},
        {"{" TOOLS ", \"trigger\": []}", BT_ERR_INVALID, "unknown key \"trigger\""},
        {"{" TOOLS ", \"triggers\": [1]}", BT_ERR_INVALID, "trigger 0"},
        {"{" TOOLS ", \"at_least_one\": 1}", BT_ERR_INVALID, "at_least_one"},
        {"{" TOOLS ", \"text_after\": true, \"stop_after_first\": true}", BT_ERR_INVALID,
         "contradicts"},
    };
    check_errors(BT_GRAMMAR_TAGS, errors, BT_ARRAY_LEN(errors));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_regex),       cmocka_unit_test(test_choice),
        cmocka_unit_test(test_gbnf),        cmocka_unit_test(test_gbnf_errors),
        cmocka_unit_test(test_gbnf_limits), cmocka_unit_test(test_tags),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
