/* common/grammar: expressions and their automaton against a slow matcher that follows the
 * definition, on random expressions (with And and Not) and all short texts; characters against an
 * encoder of their own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/grammar/rx.h"

#define BYTES ((size_t)64 << 20)

static uint64_t seed;

static uint32_t draw(uint32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

/* ---- the definition ---- */
enum kind { CLASS, EMPTY, CONCAT, OR, AND, NOT, REPEAT };
struct tree {
    enum kind kind;
    uint32_t set; /* CLASS: bit i: the byte 'a' + i */
    uint32_t min, max;
    bool done;
    const struct tree *a, *b;
};
static struct tree trees[64];
static uint32_t n_trees;

static const struct tree *grow(int depth)
{
    const struct tree *old = n_trees > 0 && draw(3) == 0 ? &trees[draw(n_trees)] : NULL;
    if (old && old->done) { /* laws about equal parts come into play */
        return old;
    }
    struct tree *t = &trees[n_trees++];
    assert_true(n_trees < BT_ARRAY_LEN(trees));
    memset(t, 0, sizeof(*t));
    uint32_t k = depth == 0 ? draw(6) : draw(16);
    t->kind = k < 5    ? CLASS
              : k == 5 ? EMPTY
              : k < 9  ? CONCAT
              : k < 11 ? OR
              : k < 12 ? AND
              : k < 13 ? NOT
                       : REPEAT;
    t->set = 1 + draw(7);
    t->min = draw(3);
    t->max = draw(3) == 0 ? BT_RX_NO_MAX : t->min + draw(3);
    if (t->kind >= CONCAT) {
        t->a = grow(depth - 1);
        t->b = t->kind <= AND ? grow(depth - 1) : NULL;
    }
    t->done = true;
    return t;
}

static bool matches(const struct tree *t, const char *s, uint32_t n);

/* s[0..n) is min to max pieces that each match. Pieces that are empty count towards min only. */
static bool repeats(const struct tree *t, uint32_t min, uint32_t max, const char *s, uint32_t n)
{
    if (n == 0) {
        return min == 0 || matches(t, s, 0);
    }
    if (max == 0) {
        return false;
    }
    for (uint32_t i = 1; i <= n; i++) {
        if (matches(t, s, i) &&
            repeats(t, min ? min - 1 : 0, max == BT_RX_NO_MAX ? max : max - 1, s + i, n - i)) {
            return true;
        }
    }
    /* an empty piece takes one of min */
    return min > 0 && matches(t, s, 0) &&
           repeats(t, min - 1, max == BT_RX_NO_MAX ? max : max - 1, s, n);
}

static bool matches(const struct tree *t, const char *s, uint32_t n)
{
    switch (t->kind) {
    case CLASS: return n == 1 && s[0] >= 'a' && s[0] <= 'c' && t->set >> (s[0] - 'a') & 1;
    case EMPTY: return n == 0;
    case CONCAT:
        for (uint32_t i = 0; i <= n; i++) {
            if (matches(t->a, s, i) && matches(t->b, s + i, n - i)) {
                return true;
            }
        }
        return false;
    case OR: return matches(t->a, s, n) || matches(t->b, s, n);
    case AND: return matches(t->a, s, n) && matches(t->b, s, n);
    case NOT: return !matches(t->a, s, n);
    case REPEAT: return t->max >= t->min && repeats(t->a, t->min, t->max, s, n);
    }
    return false;
}

static bt_rx_t make(struct bt_rx_set *s, const struct tree *t)
{
    uint64_t bits[4] = {0};
    bt_rx_t a = t->a ? make(s, t->a) : BT_RX_NONE, b = t->b ? make(s, t->b) : BT_RX_NONE;
    switch (t->kind) {
    case CLASS: bits[1] = (uint64_t)t->set << ('a' - 64); return bt_rx_class(s, bits);
    case EMPTY: return BT_RX_EMPTY;
    case CONCAT: return bt_rx_concat(s, a, b);
    case OR: return bt_rx_or(s, a, b);
    case AND: return bt_rx_and(s, a, b);
    case NOT: return bt_rx_not(s, a);
    case REPEAT: return bt_rx_repeat(s, a, t->min, t->max);
    }
    return BT_RX_FAILED;
}

#define LONGEST 5
/* All texts of at most LONGEST bytes that begin with text[0..n): compares, and says whether any of
 * them matches. */
static bool compare(struct bt_rx_set *s, const struct tree *t, bt_rx_t at, char *text, uint32_t n)
{
    bool want = matches(t, text, n), any = want;
    assert_int_not_equal(at, BT_RX_FAILED);
    if (bt_rx_accepts(s, at) != want) {
        fail_msg("seed %llu: '%.*s' %s", (unsigned long long)seed, (int)n, text,
                 want ? "is refused" : "is accepted");
    }
    for (char c = 'a'; n < LONGEST && c <= 'c'; c++) {
        text[n] = c;
        any |= compare(s, t, bt_rx_step(s, at, (uint8_t)c), text, n + 1);
    }
    bool none = true;
    assert_int_equal(bt_rx_is_none(s, at, 10000, &none), BT_OK);
    assert_true(!none || !any);
    assert_true(!none || n == 0 || at == BT_RX_NONE); /* a step names what is dead */
    return any;
}

static void random_expressions_match_as_defined(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 30000; i++) {
        seed = i;
        n_trees = 0;
        const struct tree *t = grow(i % 5);
        struct bt_rx_set *s = bt_rx_set_create(BYTES);
        char text[LONGEST];
        compare(s, t, make(s, t), text, 0);
        bt_rx_set_destroy(s);
    }
}

/* ---- characters ---- */
static uint32_t utf8(uint32_t c, char *out)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    uint32_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (uint32_t i = n; i-- > 1; c >>= 6) {
        out[i] = (char)(0x80 | (c & 63));
    }
    out[0] = (char)((n == 2 ? 0xC0 : n == 3 ? 0xE0 : 0xF0) | c);
    return n;
}

static bool run(struct bt_rx_set *s, bt_rx_t a, const char *p, size_t n)
{
    for (size_t i = 0; i < n && a != BT_RX_NONE; i++) {
        a = bt_rx_step(s, a, (uint8_t)p[i]);
        assert_int_not_equal(a, BT_RX_FAILED);
    }
    return bt_rx_accepts(s, a);
}

static bool in_ranges(const struct bt_rx_range *r, size_t n, uint32_t c)
{
    for (size_t i = 0; i < n; i++) {
        if (c >= r[i].first && c <= r[i].last) {
            return true;
        }
    }
    return false;
}

static void check_character(struct bt_rx_set *s, bt_rx_t raw, bt_rx_t json, uint32_t c, bool in)
{
    char b[16];
    size_t n = utf8(c, b);
    bool surrogate = c >= 0xD800 && c <= 0xDFFF;
    assert_int_equal(run(s, raw, b, n), in && !surrogate);
    assert_int_equal(run(s, json, b, n), in && !surrogate && c >= 0x20 && c != '"' && c != '\\');
    if (c < 0x10000) {
        n = (size_t)sprintf(b, draw(2) ? "\\u%04x" : "\\u%04X", c);
    } else {
        n = (size_t)sprintf(b, "\\u%04x\\u%04X", 0xD800 + ((c - 0x10000) >> 10),
                            0xDC00 + (c & 0x3FF));
    }
    assert_int_equal(run(s, json, b, n), in && !surrogate);
    static const char escapes[][2] = {{'"', '"'},  {'\\', '\\'}, {'/', '/'},  {'b', '\b'},
                                      {'f', '\f'}, {'n', '\n'},  {'r', '\r'}, {'t', '\t'}};
    for (size_t i = 0; i < BT_ARRAY_LEN(escapes); i++) {
        if (c == (uint32_t)escapes[i][1]) {
            b[0] = '\\';
            b[1] = escapes[i][0];
            assert_int_equal(run(s, json, b, 2), in);
        }
    }
}

static void characters_have_all_their_spellings(void **state)
{
    (void)state;
    static const uint32_t edges[] = {0,       1,       0x1F,    0x20,    0x22,    0x2F,
                                     0x5C,    0x7F,    0x80,    0x7FF,   0x800,   0xFFF,
                                     0x1000,  0xD7FF,  0xD800,  0xDFFF,  0xE000,  0xFFFF,
                                     0x10000, 0x103FF, 0x10400, 0x1F600, 0x10FFFF};
    for (uint32_t i = 0; i < 200; i++) {
        seed = i;
        struct bt_rx_range r[3];
        size_t n = 1 + draw(3);
        for (size_t k = 0; k < n; k++) {
            r[k].first = draw(2) ? edges[draw(BT_ARRAY_LEN(edges))] : draw(0x110000);
            r[k].last = draw(2) ? edges[draw(BT_ARRAY_LEN(edges))] : r[k].first + draw(3000);
        }
        struct bt_rx_set *s = bt_rx_set_create(BYTES);
        bt_rx_t raw = bt_rx_chars(s, BT_RX_UTF8, r, n);
        bt_rx_t json = bt_rx_chars(s, BT_RX_JSON_STRING, r, n);
        for (size_t k = 0; k < BT_ARRAY_LEN(edges); k++) {
            check_character(s, raw, json, edges[k], in_ranges(r, n, edges[k]));
        }
        for (size_t k = 0; k < 2 * n; k++) { /* around the ends of the ranges */
            uint32_t end = k & 1 ? r[k / 2].last : r[k / 2].first;
            for (uint32_t c = end > 2 ? end - 2 : 0; c <= end + 2 && c < 0x110000; c++) {
                check_character(s, raw, json, c, in_ranges(r, n, c));
            }
        }
        for (uint32_t k = 0; k < 500; k++) {
            uint32_t c = draw(4) ? draw(0x10000) : draw(0x110000);
            check_character(s, raw, json, c, in_ranges(r, n, c));
        }
        static const char *wrong[] = {
            "\xC0\x80",     "\xED\xA0\x80", "\xF4\x90\x80\x80", "\x80",  "\xFF",
            "\xE0\x80\x80", "\\ud800",      "\\udc00\\ud800",   "\\u12", "\\a"};
        for (size_t k = 0; k < BT_ARRAY_LEN(wrong); k++) {
            assert_false(run(s, raw, wrong[k], strlen(wrong[k])));
            assert_false(run(s, json, wrong[k], strlen(wrong[k])));
        }
        bt_rx_set_destroy(s);
    }
}

/* ---- sizes ---- */
static bt_rx_t any_char(struct bt_rx_set *s)
{
    return bt_rx_chars(s, BT_RX_JSON_STRING, &(struct bt_rx_range){0, 0x10FFFF}, 1);
}

static void counted_characters_need_a_state_each(void **state)
{
    (void)state;
    struct bt_rx_set *s = bt_rx_set_create(BYTES);
    bt_rx_t a = bt_rx_repeat(s, any_char(s), 10, 5000);
    for (int i = 0; i < 5000; i++) {
        assert_int_equal(bt_rx_accepts(s, a), i >= 10);
        a = bt_rx_step(s, a, 'x');
    }
    assert_int_equal(a, BT_RX_EMPTY);
    assert_true(bt_rx_set_bytes(s) < 2u << 20);
    bt_rx_set_destroy(s);
}

static void many_texts_become_a_trie(void **state)
{
    (void)state;
    struct bt_rx_set *s = bt_rx_set_create(BYTES);
    static bt_rx_t texts[5000];
    char b[64];
    for (uint32_t i = 0; i < BT_ARRAY_LEN(texts); i++) {
        texts[i] = bt_rx_text(s, b, (size_t)sprintf(b, "name-%u-of-many", i * 7919u));
    }
    bt_rx_t all = bt_rx_or_list(s, texts, BT_ARRAY_LEN(texts));
    for (uint32_t i = 0; i < BT_ARRAY_LEN(texts); i++) {
        assert_true(run(s, all, b, (size_t)sprintf(b, "name-%u-of-many", i * 7919u)));
        assert_false(run(s, all, b, (size_t)sprintf(b, "name-%u-of-many", i * 7919u + 1)));
    }
    assert_true(bt_rx_set_bytes(s) < 8u << 20);
    bt_rx_set_destroy(s);
}

static void multiples_are_counted_in_digits(void **state)
{
    (void)state;
    struct bt_rx_set *s = bt_rx_set_create(BYTES);
    static const uint32_t of[] = {1, 2, 7, 10, 1000, 999999937, 1000000000};
    for (size_t i = 0; i < BT_ARRAY_LEN(of); i++) {
        bt_rx_t a = bt_rx_multiple(s, of[i], 0, true);
        for (uint32_t k = 0; k < 2000; k++) {
            char b[40];
            uint64_t x = draw(2) ? (uint64_t)of[i] * draw(100000) : draw(1u << 30);
            size_t n =
                (size_t)sprintf(b, "%llu.%02u", (unsigned long long)(x / 100), (unsigned)(x % 100));
            assert_int_equal(run(s, a, b, n), x % of[i] == 0);
        }
        assert_false(run(s, a, "1e0", 3));
        assert_false(run(s, bt_rx_multiple(s, of[i], 0, false), "0.0", 3));
        assert_true(run(s, bt_rx_multiple(s, 7, 3, false), "5", 1)); /* 35 */
    }
    bt_rx_set_destroy(s);
}

static void limits_end_the_work(void **state)
{
    (void)state;
    struct bt_rx_set *s = bt_rx_set_create(1 << 20); /* .*a.{30}: 2^30 states */
    bt_rx_t any = any_char(s), a = bt_rx_text(s, "a", 1);
    bt_rx_t parts[3] = {bt_rx_repeat(s, any, 0, BT_RX_NO_MAX), a, bt_rx_repeat(s, any, 30, 30)};
    bt_rx_t at = bt_rx_seq(s, parts, 3);
    seed = 1;
    for (uint32_t i = 0; at != BT_RX_FAILED; i++) {
        assert_true(i < 1u << 20);
        at = bt_rx_step(s, at, (uint8_t)(draw(2) ? 'a' : 'b'));
    }
    assert_true(bt_rx_set_full(s));
    assert_true(bt_rx_set_bytes(s) <= 1 << 20);
    bt_rx_set_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_expressions_match_as_defined),
        cmocka_unit_test(characters_have_all_their_spellings),
        cmocka_unit_test(counted_characters_need_a_state_each),
        cmocka_unit_test(many_texts_become_a_trie),
        cmocka_unit_test(multiples_are_counted_in_digits),
        cmocka_unit_test(limits_end_the_work),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
