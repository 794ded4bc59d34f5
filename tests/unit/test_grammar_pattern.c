/* Patterns of ECMA-262 (common/grammar/rx_parse.c, rx_look.c): which texts match, as UTF-8 and in
 * each spelling of a JSON string; errors; limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "common/base/buf.h"
#include "common/grammar/chars.h"
#include "common/grammar/rx.h"

#define SET_BYTES (16u << 20)

static bool matches(struct bt_rx_set *s, bt_rx_t x, const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x = bt_rx_step(s, x, (uint8_t)p[i]);
        assert_int_not_equal(x, BT_RX_FAILED);
        if (x == BT_RX_NONE) {
            return false;
        }
    }
    return bt_rx_accepts(s, x);
}

enum spelling { SHORT, ESCAPED, ESCAPED_UPPER, SPELLINGS };

static void spell(struct bt_buf *b, uint32_t cp, enum spelling how, const char *utf8, size_t n)
{
    const char *const format = how == ESCAPED_UPPER ? "\\u%04X" : "\\u%04x";
    if (how != SHORT && cp >= 0x10000) {
        bt_buf_printf(b, format, 0xd800 + ((cp - 0x10000) >> 10));
        bt_buf_printf(b, format, 0xdc00 + ((cp - 0x10000) & 0x3ff));
    } else if (how != SHORT || (cp < 0x20 && cp != '\n' && cp != '\t')) {
        bt_buf_printf(b, format, cp);
    } else if (cp == '\n' || cp == '\t' || cp == '"' || cp == '\\') {
        bt_buf_printf(b, "\\%c", cp == '\n' ? 'n' : cp == '\t' ? 't' : (char)cp);
    } else {
        bt_buf_append(b, utf8, n);
    }
}

static void json_string(struct bt_buf *b, const char *text, enum spelling how)
{
    bt_buf_clear(b);
    for (size_t i = 0, n = strlen(text); i < n;) {
        uint32_t cp;
        size_t k = bt_chars_decode(text + i, n - i, &cp);
        assert_true(k > 0);
        spell(b, cp, how, text + i, k);
        i += k;
    }
}

/* Checks one text in UTF-8 and in all spellings. */
static void check(const char *pattern, bool search, const char *text, bool expected)
{
    char err[256] = "";
    struct bt_rx_set *s = bt_rx_set_create(SET_BYTES);
    bt_rx_t x;
    bt_status_t st =
        bt_rx_parse(s, pattern, strlen(pattern), search, BT_RX_UTF8, &x, err, sizeof(err));
    if (st != BT_OK) {
        fail_msg("%s: %s", pattern, err);
    }
    if (matches(s, x, text, strlen(text)) != expected) {
        fail_msg("%s%s should %smatch '%s'", pattern, search ? " (search)" : "",
                 expected ? "" : "not ", text);
    }
    st = bt_rx_parse(s, pattern, strlen(pattern), search, BT_RX_JSON_STRING, &x, err, sizeof(err));
    assert_int_equal(st, BT_OK);
    struct bt_buf b;
    bt_buf_init(&b);
    for (enum spelling how = 0; how < SPELLINGS; how++) {
        json_string(&b, text, how);
        if (matches(s, x, b.data != NULL ? b.data : "", b.len) != expected) {
            fail_msg("%s%s should %smatch \"%s\"", pattern, search ? " (search)" : "",
                     expected ? "" : "not ", b.data);
        }
    }
    bt_buf_cleanup(&b);
    bt_rx_set_destroy(s);
}

struct row {
    const char *pattern, *yes[7], *no[7];
};

static void check_rows(const struct row *rows, size_t n, bool search)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < 7 && rows[i].yes[k] != NULL; k++) {
            check(rows[i].pattern, search, rows[i].yes[k], true);
        }
        for (size_t k = 0; k < 7 && rows[i].no[k] != NULL; k++) {
            check(rows[i].pattern, search, rows[i].no[k], false);
        }
    }
}

static void test_whole(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"", {""}, {"a"}},
        {"a", {"a"}, {"", "aa", "b"}},
        {"a|bc|", {"a", "bc", ""}, {"b", "ab"}},
        {"(a|b)*c", {"c", "abac"}, {"", "ab"}},
        {"a{2,3}", {"aa", "aaa"}, {"a", "aaaa"}},
        {"a{2}", {"aa"}, {"a", "aaa"}},
        {"a{2,}", {"aa", "aaaaaa"}, {"a", ""}},
        {"(?:ab)+?", {"ab", "abab"}, {"", "aba"}},
        {"(?<year>\\d{4})-(?P<month>\\d\\d)", {"2024-05"}, {"2024-5", "x"}},
        {"a(?#comment)b", {"ab"}, {"a"}},
        {"[a-c]", {"a", "b", "c"}, {"d", "", "aa"}},
        {"[^a-c]", {"d", "\n", "ä", "\xf0\x9f\x98\x80"}, {"a", "dd"}},
        {"[]", {NULL}, {"", "a"}},
        {"[^]", {"a", "\n"}, {"", "aa"}},
        {"[\\w-.]+", {"a-.b"}, {"a,"}},
        {"[a\\-z]+", {"a-z"}, {"b"}},
        {"[-a]+[a-]", {"-a-"}, {"b"}},
        {".", {"a", "ä", "\"", "\\"}, {"\n", "\r", "", "\xe2\x80\xa8"}},
        {"(?s).", {"\n"}, {"", "aa"}},
        {"\\d\\w\\s", {"1a ", "2_\t", "3Z\xc2\xa0"}, {"a1 ", "1\xc3\xa4 "}},
        {"\\D\\W\\S", {"a a", "\xc3\xa4-1"}, {"1 a", "aaa"}},
        {"[\\s\\S]*", {"", "a\nb"}, {NULL}},
        {"\\x41\\u0042\\u{43}\\u{1F600}", {"ABC\xf0\x9f\x98\x80"}, {"ABC"}},
        {"\\ud83d\\ude00", {"\xf0\x9f\x98\x80"}, {"\xf0\x9f\x98\x81"}},
        {"[\\ud83d\\ude00-\\ud83d\\ude02]", {"\xf0\x9f\x98\x81"}, {"\xf0\x9f\x98\x83"}},
        {"\\t\\n\\cJ", {"\t\n\n"}, {"tn"}},
        {"\\-\\_\\/\\@\\.\\*\\\"\\'\\ ", {"-_/@.*\"' "}, {"-_/@a*\"' "}},
        {"a{b}]", {"a{b}]"}, {"ab"}},
        {"a{,b", {"a{,b"}, {"ab"}},
        {"\\p{Lu}\\p{L}\\P{L}",
         {"A\xc3\xa4"
          "1"},
         {"aa1", "Aaa"}},
        {"\\p{Letter}\\p{gc=Nd}",
         {"\xd0\xb6"
          "4"},
         {"44"}},
        {"\\p{Script=Greek}+", {"\xce\xb1\xce\xb2"}, {"ab"}},
        {"[^\\p{sc=Cyrl}\\d]", {"a"}, {"1", "\xd0\xb6"}},
        {"(?i)stra\xc3\x9f"
         "e",
         {"STRA\xc3\x9f"
          "e"},
         {"STRASSE"}},
        {"(?i)[a-c]x", {"Bx", "CX"}, {"dx"}},
        {"(?i:a)b", {"Ab", "ab"}, {"AB"}},
        {"(?i)[^a]", {"b", "B"}, {"a", "A"}},
        {"(?i)\xcf\x83", {"\xcf\x82", "\xce\xa3"}, {"s"}},
        {"^a$", {"a"}, {"", "aa"}},
        {"(^a|b$)c*", {"a", "acc", "b"}, {"bc", "ab"}},
    };
    check_rows(rows, BT_ARRAY_LEN(rows), false);
}

static void test_search(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"", {"", "abc"}, {NULL}},
        {"b",
         {"b", "abc",
          "\xc3\xa4"
          "b\xc3\xa4"},
         {"", "ac"}},
        {"^b", {"b", "bc"}, {"ab", ""}},
        {"b$", {"b", "ab"}, {"bc", "b\n"}},
        {"^(a|b)$", {"a", "b"}, {"ab", "ca"}},
        {"^a|b", {"ac", "cb"}, {"ca", "c"}},
        {"(^a|b$)", {"ac", "cb"}, {"ca", "bc"}},
        {"(?:^|,)x(?:,|$)", {"x", "a,x", "x,b", "a,x,b"}, {"ax", "a,xb"}},
        {"a^b", {NULL}, {"ab", "a^b"}},
        {"a$b", {NULL}, {"ab"}},
        {"^^a$$", {"a"}, {"aa"}},
        {"^*a", {"a", "ba"}, {"b"}},
        {"(?:^)+a(?!b)+(?!c)?", {"a", "ac"}, {"ba", "ab"}},
        {"\\Aa\\Z", {"a"}, {"ba", "ab"}},
        {"^((a|b)(,|$))+$", {"a", "a,b", "a,"}, {"", "ab", ",a"}},
        {"^(?:[a-z]+(?:,|$)){1,2}$", {"a,b", "ab", "a,"}, {"a,b,c", ""}},
        {"(?:^a|b)*c", {"abc", "c", "bac", "xc"}, {"ab"}},
        {"^(?:^a|b)*c$", {"abbc", "bc", "c"}, {"bac", "aac"}},
        {"\\bfoo\\b", {"foo", "a foo b", "-foo-"}, {"afoo", "foob", "_foo"}},
        {"\\Boo\\b", {"foo", "foo bar"}, {"oo", "food"}},
        {"^\\b", {"a", "ab"}, {"", "-a"}},
        {"^a\\b.c", {"a-c", "a c"}, {"abc"}},
        {"^\\w*\\b\\W*$", {"ab--", "ab"}, {"", "-"}},
    };
    check_rows(rows, BT_ARRAY_LEN(rows), true);
}

static void test_look_around(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"^(?=.*[A-Z])(?=.*\\d).{3,5}$", {"aB1", "1aBcd"}, {"ab1", "aBc", "B1", "aaaaB1"}},
        {"^(?!foo|bar).*$", {"", "fo", "xfoo"}, {"foo", "barx"}},
        {"^(?!.*--)[a-z-]+$", {"a-b", "-"}, {"a--b", ""}},
        {"(?!foo)", {"foo", ""}, {NULL}},
        {"^(?!.*foo)", {"fo", "bar"}, {"foo", "xfoox"}},
        {"a(?=b)", {"ab", "xab"}, {"a", "ac"}},
        {"a(?!b)", {"a", "ac", "abab a"}, {"ab", "b"}},
        {"^a(?=b|$)", {"a", "ab"}, {"ac"}},
        {"^((?!foo).)*$", {"", "fo", "ofo"}, {"foo", "xfoox"}},
        {"^(?:(?!foo)[^,])+$", {"fo"}, {"", "xfoo", "a,b"}},
        {"^(?:[a-z]|-(?!-))+$", {"a-b", "-"}, {"a--b", ""}},
        {"^(?:.(?!x))*$", {"", "xa", "ab"}, {"ax", "xx"}},
        {"^[a-z\\d](?:[a-z\\d]|-(?=[a-z\\d])){0,4}$",
         {"a", "a-b", "abcde"},
         {"a-", "a--b", "abcdef"}},
        {"^(?:(?!a)[a-z]){2}$", {"bc"}, {"ab", "ba", "b"}},
        {"^[a-z-]+(?<!-)$", {"a", "a-b"}, {"a-", "-", ""}},
        {"^(?!-)[a-z-]{1,4}(?<!-)$", {"a", "a-b"}, {"-a", "a-", "-", "abcde"}},
        {"^(?:[a-z]+(?<![xy])-?){1,2}$", {"a-b", "xa"}, {"x-a", "ay", "ax"}},
        {"^(?:(?<=^|,)x,?){1,3}$", {"x", "x,x,"}, {"xx", "x,xx"}},
        {"^(?:\\b[a-z]|(?<=a)-|(?<![a-b])\\+){0,4}$", {"a-b", "a-", "+a", ""}, {"ab", "b-", "a+"}},
        {"^((?!-)[A-Za-z0-9-]{1,3}(?<!-)\\.)+[a-z]{2,6}$",
         {"a.b-c.de", "x.yz"},
         {"-a.de", "a-.de", "abcd.de", "de", "a..de", "a.b-.de"}},
        {"^(?:(?!ab)(?=[a-y]{2})[a-z]{2}(?<!ba),?)*$",
         {"", "aa,bb", "ca"},
         {"ab", "zb", "ba", "aa,ba"}},
        {"^(?:(?!ab)[a-z](?:b|c))+$", {"acbb"}, {"ab", "acab"}},
        {"^<!--(?:(?!-->).)*-->$",
         {"<!---->", "<!--a->-->", "<!-->-->", "<!----->"},
         {"<!--a-->-->", "<!-->"}},
        {"^(?:(?!ab|cd{2})[a-d])*x?ab$", {"ab", "aab", "cdab", "cdxab"}, {"abab", "cddab", "x"}},
        {"/\\*((?!\\*/)[^])*\\*/", {"/* a */", "x/**/y*/"}, {"/* a", "*/"}},
        {"(?<!ab)c(?<=c)$", {"c", "bc"}, {"abc"}},
        {"(?<=a)b", {"ab", "xab"}, {"b", "cb"}},
        {"(?<!a)b", {"b", "cb", "abb"}, {"ab", "a"}},
        {"(?<=^|,)x", {"x", "a,x"}, {"ax"}},
        {"(?<![a-z])foo(?![a-z])", {"foo", "1foo2"}, {"afoo", "foob"}},
        {"^(?!a(?!b))", {"ab", "b", ""}, {"a", "ac"}},
        {"(?=a)", {"ba"}, {"b"}},
        {"x(?!)", {NULL}, {"x"}},
        {"(?:a(?=b)b)+", {"ab"}, {"a"}},
    };
    check_rows(rows, BT_ARRAY_LEN(rows), true);
}

static void test_errors(void **state)
{
    (void)state;
    static const struct {
        const char *pattern;
        bt_status_t status;
        const char *part;
    } rows[] = {
        {"a(b", BT_ERR_INVALID, "offset 1"},
        {"ab)", BT_ERR_INVALID, "offset 2"},
        {"*a", BT_ERR_INVALID, "nothing before"},
        {"a|+", BT_ERR_INVALID, "offset 2"},
        {"a**", BT_ERR_INVALID, "quantifier"},
        {"a{3,2}", BT_ERR_INVALID, "maximum"},
        {"[b-a]", BT_ERR_INVALID, "range"},
        {"[ab", BT_ERR_INVALID, "closing ]"},
        {"a\\", BT_ERR_INVALID, "backslash"},
        {"\\u12", BT_ERR_INVALID, "four hexadecimal"},
        {"\\u{110000}", BT_ERR_INVALID, "10FFFF"},
        {"\\x1", BT_ERR_INVALID, "two hexadecimal"},
        {"\\y", BT_ERR_INVALID, "\\y"},
        {"\\pL", BT_ERR_INVALID, "braces"},
        {"\xff", BT_ERR_INVALID, "UTF-8"},
        {"(?<a", BT_ERR_INVALID, "name"},
        {"(a)\\1", BT_ERR_UNSUPPORTED, "offset 4"},
        {"(?<n>a)\\k<n>", BT_ERR_UNSUPPORTED, "back reference"},
        {"(?P=n)", BT_ERR_UNSUPPORTED, "back reference"},
        {"\\p{Klingon}", BT_ERR_UNSUPPORTED, "Klingon"},
        {"a++", BT_ERR_UNSUPPORTED, "possessive"},
        {"(?>a)", BT_ERR_UNSUPPORTED, "group"},
        {"(?m)a", BT_ERR_UNSUPPORTED, "flags i and s"},
        {"a{,3}", BT_ERR_UNSUPPORTED, "{0,n}"},
        {"^(?:(?!abc)[a-z]b)+$", BT_ERR_UNSUPPORTED, "repeated without a limit"},
        {"^(?:(?!aa).)*aa$", BT_ERR_UNSUPPORTED, "repeated without a limit"},
        {"^(?:(?!a[bc]).)+[cd]$", BT_ERR_UNSUPPORTED, "repeated without a limit"},
        {"(a(?<!b)c)", BT_OK, ""},
        {"^(?:a(?<!ba)c|d)$", BT_ERR_UNSUPPORTED, "look-behind"},
        {"(?=a)b(?<=ab)", BT_ERR_UNSUPPORTED, "look-ahead before a look-behind"},
        {"(?<=a)(?<=[bc])(?<=[cd])(?<=[de])(?<=[fg])(?<=[gh])(?<=[hi])(?<=[ij])\\bx",
         BT_ERR_UNSUPPORTED, "too many classes"},
        {"((a{1000}){1000}){1000}", BT_ERR_EXHAUSTED, "repeats"},
        {"a{99999999999}", BT_ERR_EXHAUSTED, "repeats"},
        {"(?:a(?=b)){300}", BT_ERR_EXHAUSTED, "too often"},
        {"(?:(?:a(?=b)){100}){100}", BT_ERR_EXHAUSTED, "too often"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        char err[256] = "";
        struct bt_rx_set *s = bt_rx_set_create(SET_BYTES);
        bt_rx_t x;
        bt_status_t st = bt_rx_parse(s, rows[i].pattern, strlen(rows[i].pattern), true,
                                     BT_RX_JSON_STRING, &x, err, sizeof(err));
        if (st != rows[i].status || strstr(err, rows[i].part) == NULL) {
            fail_msg("%s: status %d, '%s'", rows[i].pattern, (int)st, err);
        }
        bt_rx_set_destroy(s);
    }
}

/* Hostile patterns end at a limit; those of many classes too. */
static void test_limits(void **state)
{
    (void)state;
    static const struct {
        const char *unit;
        size_t n;
    } rows[] = {{"(", 500000},      {"(?:", 100000},  {"\\p{L}", 80000},
                {"(?i)[a]", 60000}, {"(?=a", 100000}, {"(?:(?=ab)a){0,9}", 30000}};
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        struct bt_buf b;
        bt_buf_init(&b);
        for (size_t k = 0; k < rows[i].n; k++) {
            bt_buf_puts(&b, rows[i].unit);
        }
        char err[256] = "";
        struct bt_rx_set *s = bt_rx_set_create(SET_BYTES);
        bt_rx_t x;
        assert_int_equal(
            bt_rx_parse(s, b.data, b.len, true, BT_RX_JSON_STRING, &x, err, sizeof(err)),
            BT_ERR_EXHAUSTED);
        bt_rx_set_destroy(s);
        bt_buf_cleanup(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),       cmocka_unit_test(test_search),
        cmocka_unit_test(test_look_around), cmocka_unit_test(test_errors),
        cmocka_unit_test(test_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
