/* common/grammar: programs against a slow matcher that follows the definition of their nodes, on
 * random programs, all short texts and random walks; objects against a parser of their own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include <cmocka.h>

#include "common/grammar/grammar_priv.h"

static uint64_t seed;

static uint32_t draw(uint32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

static struct bt_grammar_vocab *bytes_vocab(void)
{
    static uint8_t byte[256];
    struct bt_grammar_token t[257];
    for (uint32_t i = 0; i < 256; i++) {
        byte[i] = (uint8_t)i;
        t[i] = (struct bt_grammar_token){&byte[i], 1, false};
    }
    t[256] = (struct bt_grammar_token){"<eos>", 5, true};
    uint32_t eos = 256;
    struct bt_grammar_vocab *v;
    assert_int_equal(bt_grammar_vocab_create(t, 257, &eos, 1, &v), BT_OK);
    return v;
}

/* ---- the definition ---- */
enum kind { TEXT, EMPTY, SEQ, ALT, REPEAT, OBJECT, RULE };
struct property {
    const char *name;
    uint32_t value;
    bool required;
};
struct tree {
    enum kind kind;
    char text[4];
    uint32_t part[3], n; /* SEQ, ALT; REPEAT: item, separator */
    uint32_t min, max;
    struct property props[3]; /* OBJECT: n of them */
    uint32_t rest;            /* OBJECT: value of keys x and y; 0: none */
};
#define TREES 24
static struct tree trees[TREES]; /* 0 is EMPTY; a rule may name any tree */
static uint32_t n_trees;

static uint32_t grow(int depth)
{
    uint32_t id = n_trees++;
    struct tree t = {0};
    uint32_t k = depth == 0 || n_trees > TREES - 8 ? 0 : draw(14);
    t.kind = k < 3    ? TEXT
             : k < 4  ? EMPTY
             : k < 7  ? SEQ
             : k < 9  ? ALT
             : k < 11 ? REPEAT
             : k < 13 ? OBJECT
                      : RULE;
    t.n = 1 + draw(3);
    t.min = draw(3);
    t.max = draw(3) == 0 ? BT_RX_NO_MAX : t.min + draw(3);
    static const char *texts[] = {"a", "b", "ab", "ba", "aa", "", "1"};
    strcpy(t.text, texts[draw(BT_ARRAY_LEN(texts))]);
    for (uint32_t i = 0; i < t.n && (t.kind == SEQ || t.kind == ALT); i++) {
        t.part[i] = grow(depth - 1);
    }
    if (t.kind == REPEAT) {
        t.part[0] = grow(depth - 1);
        t.part[1] = draw(2) ? grow(0) : 0;
    }
    static const char *names[] = {"p", "pq", "q"};
    for (uint32_t i = 0; i < t.n && t.kind == OBJECT; i++) {
        t.props[i] = (struct property){names[i], grow(depth - 1), draw(3) == 0};
    }
    if (t.kind == OBJECT) {
        t.rest = draw(2) ? grow(0) : 0;
        t.min = draw(4) ? 0 : t.min;
        t.max = draw(2) ? BT_RX_NO_MAX : t.max;
    }
    if (t.kind == RULE) {
        t.part[0] = draw(n_trees);
    }
    trees[id] = t;
    return id;
}

/* The ends of the texts that tree id matches from at on: a bit for each place. depth ends the
 * recursion of rules that consume nothing. */
static uint64_t ends(uint32_t id, const char *s, uint32_t at, uint32_t depth);

static uint64_t ends_all(uint32_t id, const char *s, uint64_t from, uint32_t depth)
{
    uint64_t to = 0;
    for (uint32_t i = 0; i < 64; i++) {
        to |= from >> i & 1 ? ends(id, s, i, depth) : 0;
    }
    return to;
}

static uint64_t repeat_ends(const struct tree *t, const char *s, uint32_t at, uint32_t depth)
{
    uint64_t now = 1ull << at, to = t->min == 0 ? now : 0;
    for (uint32_t i = 1; i <= BT_MIN(t->max, 64u) && now; i++) {
        if (i > 1 && t->part[1]) {
            now = ends_all(t->part[1], s, now, depth);
        }
        now = ends_all(t->part[0], s, now, depth);
        to |= i >= t->min ? now : 0;
    }
    return to;
}

static uint64_t expect(const char *s, uint64_t from, const char *text)
{
    uint64_t to = 0;
    for (uint32_t i = 0; i < 64; i++) {
        if (from >> i & 1 && strncmp(s + i, text, strlen(text)) == 0) {
            to |= 1ull << (i + strlen(text));
        }
    }
    return to;
}

/* After count properties of which those of the bits in seen are declared. */
static uint64_t object_ends(const struct tree *t, const char *s, uint64_t now, uint32_t seen,
                            uint32_t count, uint32_t depth)
{
    bool missing = false;
    for (uint32_t i = 0; i < t->n; i++) {
        missing |= t->props[i].required && !(seen >> i & 1);
    }
    uint64_t to = !missing && count >= t->min && count <= t->max ? expect(s, now, "}") : 0;
    if (count > 0) {
        now = expect(s, now, ",");
    }
    for (uint32_t i = 0; i < t->n + 2 && now && count < t->max; i++) {
        char key[8];
        uint32_t value = i < t->n ? t->props[i].value : t->rest;
        bool once = i < t->n || t->min > 1; /* undeclared keys: where a minimum counts them */
        if ((once && seen >> i & 1) || (i >= t->n && !t->rest)) {
            continue;
        }
        sprintf(key, "\"%s\":", i < t->n ? t->props[i].name : i == t->n ? "x" : "y");
        uint64_t next = ends_all(value, s, expect(s, now, key), depth);
        to |= next ? object_ends(t, s, next, seen | 1u << i, count + 1, depth) : 0;
    }
    return to;
}

static uint64_t ends(uint32_t id, const char *s, uint32_t at, uint32_t depth)
{
    const struct tree *t = &trees[id];
    uint64_t to = 0, now = 1ull << at;
    switch (t->kind) {
    case EMPTY: return now;
    case TEXT: return expect(s, now, t->text);
    case SEQ:
        for (uint32_t i = 0; i < t->n && now; i++) {
            now = ends_all(t->part[i], s, now, depth);
        }
        return now;
    case ALT:
        for (uint32_t i = 0; i < t->n; i++) {
            to |= ends(t->part[i], s, at, depth);
        }
        return to;
    case REPEAT: return repeat_ends(t, s, at, depth);
    case OBJECT: return object_ends(t, s, expect(s, now, "{"), 0, 0, depth);
    case RULE: return depth == 0 ? 0 : ends(t->part[0], s, at, depth - 1);
    }
    return 0;
}

static bool defined(const char *s)
{
    return ends(1, s, 0, 12) >> strlen(s) & 1;
}

/* ---- the program ---- */
static bt_node_t made[TREES], rules[TREES];

static bt_node_t make(struct bt_program *p, uint32_t id)
{
    const struct tree *t = &trees[id];
    struct bt_rx_set *s = bt_program_rx(p);
    bt_node_t part[3], n = BT_NODE_EMPTY;
    for (uint32_t i = 0; i < t->n && (t->kind == SEQ || t->kind == ALT); i++) {
        part[i] = make(p, t->part[i]);
    }
    switch (t->kind) {
    case EMPTY: break;
    case TEXT: n = bt_program_regex(p, bt_rx_text(s, t->text, strlen(t->text))); break;
    case SEQ: n = bt_program_seq(p, part, t->n); break;
    case ALT: n = bt_program_alt(p, part, t->n); break;
    case REPEAT:
        part[0] = make(p, t->part[0]);
        part[1] = t->part[1] ? make(p, t->part[1]) : BT_NODE_EMPTY;
        n = bt_program_repeat_sep(p, part[0], part[1], t->min, t->max);
        break;
    case OBJECT: {
        struct bt_program_property props[3];
        for (uint32_t i = 0; i < t->n; i++) {
            props[i] =
                (struct bt_program_property){t->props[i].name, strlen(t->props[i].name),
                                             make(p, t->props[i].value), t->props[i].required};
        }
        struct bt_program_pattern rest = {bt_rx_or(s, bt_rx_text(s, "x", 1), bt_rx_text(s, "y", 1)),
                                          t->rest ? make(p, t->rest) : BT_NODE_NONE};
        struct bt_program_object o = {.props = props,
                                      .n_props = t->n,
                                      .patterns = &rest,
                                      .n_patterns = 1,
                                      .min = t->min,
                                      .max = t->max,
                                      .space = BT_RX_EMPTY,
                                      .blank = BT_RX_EMPTY};
        n = bt_program_object(p, &o);
        break;
    }
    case RULE: n = rules[t->part[0]]; break;
    }
    made[id] = n;
    bt_program_rule_set(p, rules[id], n);
    return n;
}

static bool may_end(struct bt_matcher *m)
{
    bool may;
    return bt_matcher_may_end(m, &may) == BT_OK && may;
}

static bool accepts(struct bt_matcher *m, const char *s)
{
    bt_status_t st = bt_matcher_accept_bytes(m, s, strlen(s));
    assert_true(st == BT_OK || st == BT_ERR_INVALID);
    bool yes = st == BT_OK && may_end(m);
    bt_matcher_rollback(m, st == BT_OK);
    return yes;
}

static void same(struct bt_matcher *m, const char *s, uint32_t number)
{
    if (accepts(m, s) != defined(s)) {
        fail_msg("program %u: '%s' %s", number, s, defined(s) ? "is refused" : "is accepted");
    }
}

#define ALPHABET "ab1{}\",:pqxy"
static void short_texts(struct bt_matcher *m, char *s, uint32_t n, uint32_t number)
{
    s[n] = 0;
    same(m, s, number);
    for (const char *c = "ab1{}"; n < 4 && *c; c++) {
        s[n] = *c;
        short_texts(m, s, n + 1, number);
    }
    s[n] = 0;
}

/* Goes where the grammar allows, to an end: there is always a way on, and the text is defined. */
static void walk(struct bt_matcher *m, uint32_t number)
{
    char s[64] = "";
    for (uint32_t n = 0; n < 48; n++) {
        if (may_end(m)) {
            if (!defined(s)) {
                fail_msg("program %u: '%s' is accepted", number, s);
            }
            if (draw(4) == 0) {
                break;
            }
        }
        uint32_t start = draw(sizeof(ALPHABET) - 1), tries = 0;
        for (; tries < sizeof(ALPHABET) - 1; tries++) {
            s[n] = ALPHABET[(start + tries) % (sizeof(ALPHABET) - 1)];
            if (bt_matcher_accept(m, (uint8_t)s[n]) == BT_OK) {
                break;
            }
        }
        s[n + 1] = 0;
        if (tries == sizeof(ALPHABET) - 1) {
            s[n] = 0;
            if (!may_end(m)) {
                fail_msg("program %u: '%s' is a dead end", number, s);
            }
            break;
        }
    }
    bt_matcher_rollback(m, bt_matcher_tokens(m));
    uint32_t len = (uint32_t)strlen(s);
    for (uint32_t k = 0; k < 8 && len > 0; k++) { /* and texts near by */
        char t[64];
        strcpy(t, s);
        uint32_t at = draw(len);
        switch (draw(3)) {
        case 0: t[at] = ALPHABET[draw(sizeof(ALPHABET) - 1)]; break;
        case 1: memmove(t + at, t + at + 1, len - at); break;
        default: t[at] = 0;
        }
        same(m, t, number);
    }
    same(m, s, number);
}

static void random_programs_match_as_defined(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = bytes_vocab();
    uint32_t ran = 0;
    for (uint32_t number = 0; number < 3000; number++) {
        seed = number;
        n_trees = 1;
        trees[0] = (struct tree){.kind = EMPTY};
        grow(1 + (int)draw(4));
        struct bt_program *p = bt_program_create(BT_GRAMMAR_BYTES_MAX);
        for (uint32_t i = 0; i < TREES; i++) {
            rules[i] = bt_program_rule(p);
        }
        bt_program_rule_set(p, rules[0], BT_NODE_EMPTY);
        bt_node_t start = make(p, 1);
        struct bt_grammar *g;
        char err[200], text[64];
        bt_status_t st = bt_grammar_take(p, start, &g, err, sizeof(err));
        if (st != BT_OK) { /* left recursion, or nothing can be produced */
            assert_true(st == BT_ERR_UNSUPPORTED || st == BT_ERR_INVALID);
            assert_true(st == BT_ERR_UNSUPPORTED || !defined(""));
            continue;
        }
        struct bt_matcher *m = bt_matcher_create(g, v);
        assert_non_null(m);
        short_texts(m, text, 0, number);
        for (uint32_t i = 0; i < 12; i++) {
            walk(m, number);
        }
        bt_matcher_destroy(m);
        bt_grammar_unref(g);
        ran++;
    }
    assert_true(ran > 1500);
    bt_grammar_vocab_destroy(v);
}

/* ---- arrays of different values ---- */
static void items_of_distinct_arrays_differ(void **state)
{
    (void)state;
    /* the same digit: the same value */
    static const char *const items[] = {
        "1\"a\"", "1\"\\u0061\"", "2{\"a\":[1,2]}", "2{\"a\":[1.0,2e0]}", "3[]", "4{\"a\":[2,1]}",
        "51"};
    enum { ITEMS = BT_ARRAY_LEN(items), LONGEST = 4 };
    struct bt_grammar_vocab *v = bytes_vocab();
    for (uint32_t number = 0; number < 40; number++) {
        uint32_t min = number % 3, max = number % 4 ? min + number % 5 : BT_RX_NO_MAX;
        struct bt_program *p = bt_program_create(BT_GRAMMAR_BYTES_MAX);
        struct bt_rx_set *s = bt_program_rx(p);
        bt_rx_t all = BT_RX_NONE, space = bt_rx_repeat(s, bt_rx_text(s, " ", 1), 0, 1);
        for (uint32_t i = 0; i < ITEMS; i++) {
            all = bt_rx_or(s, all, bt_rx_text(s, items[i] + 1, strlen(items[i]) - 1));
        }
        bt_node_t item = bt_program_item(p, bt_program_regex(p, all));
        bt_node_t comma = bt_program_regex(p, bt_rx_concat(s, bt_rx_text(s, ",", 1), space));
        bt_node_t parts[] = {bt_program_regex(p, bt_rx_text(s, "[", 1)),
                             bt_program_repeat_sep(p, item, comma, min, max),
                             bt_program_regex(p, bt_rx_text(s, "]", 1))};
        bt_node_t array = bt_program_distinct(p, bt_program_seq(p, parts, 3), min, "here");
        struct bt_grammar *g;
        char err[200];
        assert_int_equal(bt_grammar_take(p, array, &g, err, sizeof(err)), BT_OK);
        struct bt_matcher *m = bt_matcher_create(g, v);
        for (uint32_t code = 0; code < ITEMS * ITEMS * ITEMS * ITEMS * (LONGEST + 1); code++) {
            uint32_t n = code % (LONGEST + 1), rest = code / (LONGEST + 1), which[LONGEST];
            char text[128] = "[";
            bool differ = true;
            for (uint32_t i = 0; i < n; i++, rest /= ITEMS) {
                which[i] = rest % ITEMS;
                strcat(strcat(text, i ? ", " : ""), items[which[i]] + 1);
                for (uint32_t k = 0; k < i; k++) {
                    differ &= items[which[k]][0] != items[which[i]][0];
                }
            }
            if (rest > 0 || (code % 7 && n == LONGEST)) {
                continue;
            }
            bool want = differ && n >= min && n <= max;
            if (accepts(m, strcat(text, "]")) != want) {
                fail_msg("min %u, max %u: %s is %s", min, max, text, want ? "refused" : "accepted");
            }
        }
        /* Five values are all there are. */
        static const char five[] = "[\"a\",{\"a\":[1,2]},[],{\"a\":[2,1]},1";
        bt_status_t st = bt_matcher_accept_bytes(m, five, sizeof(five) - 1);
        assert_int_equal(st, max < 5 ? BT_ERR_INVALID : BT_OK);
        uint32_t bits[9];
        assert_int_equal(bt_matcher_mask(m, bits), BT_OK);
        assert_false(st == BT_OK && bits[',' >> 5] >> (',' & 31) & 1);
        assert_false(st == BT_OK && !(bits[']' >> 5] >> (']' & 31) & 1));
        bt_matcher_destroy(m);
        bt_grammar_unref(g);
    }
    bt_grammar_vocab_destroy(v);
}

static void counted_keys_differ_in_any_spelling(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool valid;
    } cases[] = {{"{\"a\":1,\"b\":1}", true},
                 {"{\"a\":1}", false},
                 {"{\"a\":1,\"a\":1}", false},
                 {"{\"a\":1,\"\\u0061\":1}", false},
                 {"{\"\\uD83D\\uDE00\":1,\"\xF0\x9F\x98\x80\":1}", false},
                 {"{\"\\uD83D\\uDE00\":1,\"\xF0\x9F\x98\x81\":1}", true},
                 {"{\"\\n\":1,\"\\u000A\":1}", false},
                 {"{\"\\\"\":1,\"\\u0022\":1}", false},
                 {"{\"\\\"\":1,\"\\\\\":1}", true},
                 {"{\"a\":1,\"b\":1,\"\\u0062\":1}", false},
                 {"{\"\":1,\"b\":1,\"c\":1}", true}};
    struct bt_grammar_vocab *v = bytes_vocab();
    struct bt_program *p = bt_program_create(BT_GRAMMAR_BYTES_MAX);
    struct bt_rx_set *s = bt_program_rx(p);
    struct bt_rx_range all = {0, 0x10FFFF};
    struct bt_program_pattern rest = {
        bt_rx_repeat(s, bt_rx_chars(s, BT_RX_JSON_STRING, &all, 1), 0, BT_RX_NO_MAX),
        bt_program_regex(p, bt_rx_text(s, "1", 1))};
    struct bt_program_object o = {.patterns = &rest,
                                  .n_patterns = 1,
                                  .min = 2,
                                  .max = BT_RX_NO_MAX,
                                  .space = BT_RX_EMPTY,
                                  .blank = BT_RX_EMPTY};
    struct bt_grammar *g;
    char err[200];
    assert_int_equal(bt_grammar_take(p, bt_program_object(p, &o), &g, err, sizeof(err)), BT_OK);
    struct bt_matcher *m = bt_matcher_create(g, v);
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        if (accepts(m, cases[i].text) != cases[i].valid) {
            fail_msg("%s", cases[i].text);
        }
    }
    bt_matcher_destroy(m);
    bt_grammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_programs_match_as_defined),
        cmocka_unit_test(items_of_distinct_arrays_differ),
        cmocka_unit_test(counted_keys_differ_in_any_spelling),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
