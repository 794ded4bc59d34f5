/* common/grammar: masks against their definition (a token is in the mask if and only if a fork
 * accepts it), on random grammars and a vocabulary whose tokens cut characters and JSON tokens
 * anywhere; rollback, forks, limits, threads, the end of a text, forced text. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/grammar/grammar_priv.h"

static uint64_t seed;

static uint32_t draw(uint32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

/* ---- a vocabulary: single bytes, pieces of sample texts, special tokens ---- */
#define VOCAB 900u
#define EOS   0u
#define TOOL  1u
static char pool[65536];
static struct bt_grammar_token tokens[VOCAB];

static const char *const samples[] = {
    "{\"name\": \"Grüße aus Köln\", \"age\": 42, \"list\": [1, -2.5e+10, true, null]}",
    "\\u00e9\\n\\\\ \\ud83d\\ude00\" , \"b\":{}} ],[\t\r\n",
    "<tool>日本語テキスト😀 hello world, this is text</tool>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa          ",
    "\"age\":\"name\":\"x\":\"a\",\"b\"}\"}]},{",
    /* spaces beyond ASCII, and their neighbours */
    "me@x.org "
    "a\u00a0b\u00a1\u2027\u2028\u2029\u202f\u205f\u3000\u3001\u1680\u1681\ufeff\uff0c/:;a.b",
};

static struct bt_grammar_vocab *make_vocab(void)
{
    size_t used = 0;
    seed = 7;
    tokens[EOS] = (struct bt_grammar_token){"<eos>", 5, true};
    tokens[TOOL] = (struct bt_grammar_token){"<tool>", 6, true};
    tokens[2] = (struct bt_grammar_token){NULL, 0, false};
    for (uint32_t i = 3; i < VOCAB; i++) {
        const char *s = samples[draw(BT_ARRAY_LEN(samples))];
        uint32_t len = (uint32_t)strlen(s), at = draw(len);
        uint32_t n = 1 + draw(draw(4) ? 5 : 40);
        n = BT_MIN(n, len - at);
        memcpy(pool + used, s + at, n);
        if (i < 3 + 256) {
            pool[used] = (char)(i - 3);
            n = 1;
        }
        tokens[i] = (struct bt_grammar_token){pool + used, n, i > 300 && draw(200) == 0};
        used += n;
        assert_true(used + 64 < sizeof(pool));
    }
    uint32_t eos = EOS;
    struct bt_grammar_vocab *v;
    assert_int_equal(bt_grammar_vocab_create(tokens, VOCAB, &eos, 1, &v), BT_OK);
    return v;
}

/* ---- random grammars ---- */
static bt_rx_t text(struct bt_rx_set *s, const char *t)
{
    return bt_rx_text(s, t, strlen(t));
}

static bt_rx_t some_chars(struct bt_rx_set *s)
{
    static const struct bt_rx_range ranges[][2] = {
        {{0, 0x10FFFF}, {0, 0}}, {{'a', 'z'}, {0, 0}},       {{'a', 'z'}, {'A', 'Z'}},
        {{' ', 0x17F}, {0, 0}},  {{0x3000, 0x9FFF}, {0, 0}}, {{' ', '~'}, {0x1F000, 0x1FFFF}}};
    const struct bt_rx_range *r = ranges[draw(BT_ARRAY_LEN(ranges))];
    return bt_rx_chars(s, BT_RX_JSON_STRING, r, r[1].last ? 2 : 1);
}

static bt_rx_t string(struct bt_rx_set *s)
{
    uint32_t min = draw(3) ? 0 : draw(10), max = draw(2) ? BT_RX_NO_MAX : min + draw(60);
    bt_rx_t parts[3] = {text(s, "\""), bt_rx_repeat(s, some_chars(s), min, max), text(s, "\"")};
    if (draw(5) == 0) { /* a condition beside it */
        bt_rx_t no = bt_rx_concat(s, text(s, "a"), bt_rx_repeat(s, some_chars(s), 0, BT_RX_NO_MAX));
        parts[1] = bt_rx_and(s, parts[1], bt_rx_not(s, no));
    }
    return bt_rx_seq(s, parts, 3);
}

static bt_node_t value(struct bt_program *p, uint32_t depth, bt_node_t any)
{
    struct bt_rx_set *s = bt_program_rx(p);
    struct bt_rx_range digit = {'0', '9'};
    bt_rx_t digits = bt_rx_repeat(s, bt_rx_chars(s, BT_RX_UTF8, &digit, 1), 1, 3 + draw(20));
    bt_rx_t space = bt_rx_repeat(s, bt_rx_or(s, text(s, " "), text(s, "\n")), 0, draw(3));
    switch (depth == 0 ? draw(3) : draw(9)) {
    case 0: return bt_program_regex(p, string(s));
    case 1: return bt_program_regex(p, digits);
    case 2: return bt_program_regex(p, bt_rx_or(s, text(s, "true"), text(s, "null")));
    case 3: {
        bt_node_t two[2] = {value(p, depth - 1, any), value(p, depth - 1, any)};
        return bt_program_alt(p, two, 2);
    }
    case 4:
    case 5: {
        bt_node_t sep = bt_program_regex(p, bt_rx_concat(s, text(s, ","), space));
        uint32_t min = draw(3);
        bt_node_t parts[3] = {bt_program_regex(p, text(s, "[")),
                              bt_program_repeat_sep(p, value(p, depth - 1, any), sep, min,
                                                    draw(2) ? BT_RX_NO_MAX : min + draw(4)),
                              bt_program_regex(p, text(s, "]"))};
        return bt_program_seq(p, parts, 3);
    }
    case 6: {
        struct bt_rx_range lower = {'a', 'z'};
        bt_rx_t word = bt_rx_repeat(s, bt_rx_chars(s, BT_RX_UTF8, &lower, 1), 0, 3 + draw(9));
        bt_node_t parts[2] = {draw(2) ? bt_program_special(p, "<tool>") : bt_program_regex(p, word),
                              value(p, depth - 1, any)};
        return bt_program_seq(p, parts, 2);
    }
    case 7: return any;
    default: break;
    }
    static const char *const names[] = {"name", "age", "list", "a", "b", "Grüße"};
    struct bt_program_property props[6];
    size_t n = draw(7);
    bt_rx_t known = BT_RX_NONE;
    for (size_t i = 0; i < n; i++) {
        props[i] = (struct bt_program_property){names[i], strlen(names[i]),
                                                value(p, depth - 1, any), draw(3) == 0};
        bt_rx_t chars[16];
        size_t k = 0;
        for (const char *c = names[i]; *c; c++) {
            chars[k++] = bt_rx_text(s, c, 1);
        }
        known = bt_rx_or(s, known, bt_rx_seq(s, chars, k));
    }
    struct bt_rx_range lower = {'a', 'z'};
    bt_rx_t keys = bt_rx_repeat(s, bt_rx_chars(s, BT_RX_UTF8, &lower, 1), 1, 8);
    struct bt_program_pattern rest = {bt_rx_and(s, keys, bt_rx_not(s, known)),
                                      draw(2) ? value(p, 0, any) : BT_NODE_NONE};
    struct bt_program_object o = {.props = props,
                                  .n_props = n,
                                  .patterns = &rest,
                                  .n_patterns = 1,
                                  .min = draw(3) ? 0 : draw(3),
                                  .max = draw(2) ? BT_RX_NO_MAX : 2 + draw(5),
                                  .space = space,
                                  .blank = space};
    return bt_program_object(p, &o);
}

static struct bt_grammar *random_grammar(uint32_t number)
{
    for (seed = number;; seed += 1000003) {
        struct bt_program *p = bt_program_create(BT_GRAMMAR_BYTES_MAX);
        bt_node_t any = bt_program_rule(p), start = value(p, 3, any);
        bt_program_rule_set(p, any, value(p, 1, any));
        struct bt_grammar *g;
        char err[200];
        if (bt_grammar_take(p, start, &g, err, sizeof(err)) == BT_OK) {
            return g;
        }
    }
}

/* ---- masks ---- */
static bool in_mask(const uint32_t *bits, uint32_t id)
{
    return bits[id >> 5] >> (id & 31) & 1;
}

/* Compares the mask with what the matcher accepts; returns the number of allowed tokens. */
static uint32_t check_mask(struct bt_matcher *m, uint32_t *bits, uint32_t number)
{
    uint32_t n = 0;
    assert_int_equal(bt_matcher_mask(m, bits), BT_OK);
    for (uint32_t id = 0; id < VOCAB; id++) {
        bt_status_t st = bt_matcher_accept(m, id);
        bt_matcher_rollback(m, st == BT_OK ? 1 : 0);
        assert_true(st == BT_OK || st == BT_ERR_INVALID);
        if ((st == BT_OK) != in_mask(bits, id)) {
            fail_msg("grammar %u: token %u '%.*s' after %u tokens is %s the mask", number, id,
                     (int)tokens[id].n, (const char *)tokens[id].bytes, bt_matcher_tokens(m),
                     in_mask(bits, id) ? "in" : "missing in");
        }
        n += st == BT_OK;
    }
    return n;
}

static uint32_t pick(const uint32_t *bits, uint32_t n)
{
    uint32_t k = draw(n);
    for (uint32_t id = 0;; id++) {
        if (in_mask(bits, id) && k-- == 0) {
            return id;
        }
    }
}

static bool may_end(struct bt_matcher *m)
{
    bool may;
    return bt_matcher_may_end(m, &may) == BT_OK && may;
}

static void masks_are_what_forks_accept(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = make_vocab();
    for (uint32_t number = 0; number < 250; number++) {
        struct bt_grammar *g = random_grammar(number);
        struct bt_matcher *m = bt_matcher_create(g, v);
        uint32_t bits[BT_DIV_UP(VOCAB, 32)];
        assert_non_null(m);
        for (uint32_t i = 0; i < 40; i++) {
            uint32_t n = check_mask(m, bits, number);
            if (n == 0) {
                fail_msg("grammar %u: a dead end after %u tokens", number, i);
            }
            assert_int_equal(in_mask(bits, EOS), may_end(m));
            uint32_t id = pick(bits, n);
            assert_int_equal(bt_matcher_accept(m, id), BT_OK);
            if (id == EOS) {
                assert_int_equal(bt_matcher_accept(m, 3 + 'a'), BT_ERR_INVALID);
                bt_matcher_rollback(m, 1);
                assert_int_equal(check_mask(m, bits, number), n);
                break;
            }
        }
        bt_matcher_destroy(m);
        bt_grammar_unref(g);
    }
    bt_grammar_vocab_destroy(v);
}

static void rollback_and_other_matchers_come_back_to_the_same_masks(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = make_vocab();
    enum { WORDS = BT_DIV_UP(VOCAB, 32), STEPS = 30 };
    static uint32_t masks[STEPS][WORDS], bits[WORDS];
    for (uint32_t number = 0; number < 200; number++) {
        struct bt_grammar *g = random_grammar(number);
        struct bt_matcher *m = bt_matcher_create(g, v);
        uint32_t steps = 0, said[STEPS];
        for (; steps < STEPS; steps++) {
            assert_int_equal(bt_matcher_mask(m, masks[steps]), BT_OK);
            uint32_t n = 0;
            for (uint32_t w = 0; w < WORDS; w++) {
                n += (uint32_t)__builtin_popcount(masks[steps][w]);
            }
            if (n == 0) {
                break;
            }
            said[steps] = pick(masks[steps], n);
            assert_int_equal(bt_matcher_accept(m, said[steps]), BT_OK);
        }
        while (steps > 1) {
            struct bt_matcher *f = bt_matcher_create(g, v);
            for (uint32_t i = 0; i < steps; i++) {
                assert_int_equal(bt_matcher_accept(f, said[i]), BT_OK);
            }
            uint32_t back = 1 + draw(bt_matcher_tokens(m));
            if (draw(4) == 0) { /* another matcher made the grammar forget its states */
                pthread_mutex_lock(&g->lock);
                bt_grammar_reset(g);
                pthread_mutex_unlock(&g->lock);
            }
            bt_matcher_rollback(m, back);
            steps = bt_matcher_tokens(m);
            assert_int_equal(bt_matcher_mask(m, bits), BT_OK);
            assert_memory_equal(bits, masks[steps], sizeof(bits));
            assert_int_equal(bt_matcher_tokens(f), steps + back);
            bt_matcher_rollback(f, back);
            assert_int_equal(bt_matcher_mask(f, bits), BT_OK);
            assert_memory_equal(bits, masks[steps], sizeof(bits));
            bt_matcher_destroy(f);
        }
        bt_matcher_destroy(m);
        bt_grammar_unref(g);
    }
    bt_grammar_vocab_destroy(v);
}

/* ---- limits ---- */
static struct bt_grammar *nested_lists(void)
{
    struct bt_program *p = bt_program_create(BT_GRAMMAR_BYTES_MAX);
    struct bt_rx_set *s = bt_program_rx(p);
    bt_node_t rule = bt_program_rule(p);
    bt_node_t parts[3] = {
        bt_program_regex(p, text(s, "[")),
        bt_program_repeat_sep(p, rule, bt_program_regex(p, text(s, ",")), 0, 1u << 20),
        bt_program_regex(p, text(s, "]"))};
    bt_program_rule_set(p, rule, bt_program_seq(p, parts, 3));
    struct bt_grammar *g;
    char err[200];
    assert_int_equal(bt_grammar_take(p, rule, &g, err, sizeof(err)), BT_OK);
    return g;
}

static void a_full_grammar_forgets_and_goes_on(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = make_vocab();
    struct bt_grammar *g = nested_lists();
    struct bt_matcher *deep = bt_matcher_create(g, v);
    for (uint32_t i = 0; i < 1000; i++) {
        assert_int_equal(bt_matcher_accept(deep, 3 + '['), BT_OK);
    }
    uint32_t first = g->generation;
    for (uint32_t i = 0; i < 3000 && g->generation < first + 3; i++) { /* counts of its own each */
        struct bt_matcher *m = bt_matcher_create(g, v);
        for (uint32_t k = 0; k < 300; k++) {
            assert_int_equal(bt_matcher_accept(m, 3 + '['), BT_OK);
            for (uint32_t n = draw(4); n > 0; n--) {
                assert_int_equal(bt_matcher_accept_bytes(m, "[],", 3), BT_OK);
            }
        }
        bt_matcher_destroy(m);
    }
    assert_true(g->generation > first);
    assert_true(g->automaton.bytes <= BT_GRAMMAR_BYTES_MAX / 8);
    for (uint32_t i = 0; i < 1000; i++) {
        assert_int_equal(bt_matcher_accept(deep, 3 + ']'), BT_OK);
    }
    assert_true(may_end(deep));
    bt_matcher_destroy(deep);
    bt_grammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

static void too_deep_a_text_is_an_error(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = make_vocab();
    struct bt_grammar *g = nested_lists();
    struct bt_matcher *m = bt_matcher_create(g, v);
    bt_status_t st = BT_OK;
    static char open[4096];
    memset(open, '[', sizeof(open));
    for (uint32_t i = 0; i < 4096 && st == BT_OK; i++) {
        st = bt_matcher_accept_bytes(m, open, sizeof(open));
    }
    assert_int_equal(st, BT_ERR_EXHAUSTED);
    assert_true(g->automaton.bytes <= BT_GRAMMAR_BYTES_MAX / 8);
    bt_matcher_destroy(m);
    bt_grammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

/* Each character leaves 3,000 threads, so a mask would take billions of steps. */
static void too_many_threads_are_an_error(void **state)
{
    (void)state;
    enum { RULES = 1500 };
    struct bt_grammar_vocab *v = make_vocab();
    char *rules = bt_calloc(RULES, 48), err[160] = "";
    size_t n = (size_t)sprintf(rules, "root ::= r0");
    for (uint32_t i = 1; i < RULES; i++) {
        n += (size_t)sprintf(rules + n, " | r%u", i);
    }
    for (uint32_t i = 0; i < RULES; i++) {
        n += (size_t)sprintf(rules + n, "\nr%u ::= [a-z] r%u | \"%u\"", i, i, i);
    }
    const struct bt_grammar_spec spec = {.kind = BT_GRAMMAR_GBNF, .text = rules, .len = n};
    struct bt_grammar *g;
    assert_int_equal(bt_grammar_compile(&spec, &g, err, sizeof(err)), BT_OK);
    struct bt_matcher *m = bt_matcher_create(g, v);
    uint32_t bits[BT_DIV_UP(VOCAB, 32)];
    assert_int_equal(bt_matcher_mask(m, bits), BT_ERR_EXHAUSTED);
    assert_int_equal(bt_matcher_accept(m, 3 + 'a'), BT_OK);
    assert_true(g->program->rx->work <= BT_GRAMMAR_CALL_WORK - RULES); /* threads are work */
    bt_matcher_destroy(m);
    bt_grammar_unref(g);
    free(rules);
    bt_grammar_vocab_destroy(v);
}

/* A limited call ends soon, and what it needed is there after a call without a limit. */
static void a_limited_call_comes_back(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = make_vocab();
    const char pattern[] = "[a-z ,{\"]*a[a-z ,{\"]{30}b.*";
    const struct bt_grammar_spec spec = {BT_GRAMMAR_REGEX, pattern, sizeof(pattern) - 1};
    struct bt_grammar *g;
    char err[160] = "";
    assert_int_equal(bt_grammar_compile(&spec, &g, err, sizeof(err)), BT_OK);
    struct bt_matcher *m = bt_matcher_create(g, v), *other = bt_matcher_create(g, v);
    uint32_t bits[BT_DIV_UP(VOCAB, 32)], want[BT_DIV_UP(VOCAB, 32)];
    bt_matcher_limit(m, 1000);
    assert_int_equal(bt_matcher_mask(m, bits), BT_AGAIN);
    assert_true(bt_matcher_work(m) > 0 && bt_matcher_work(m) <= 1000);
    assert_int_equal(bt_matcher_tokens(m), 0);
    assert_int_equal(bt_matcher_mask(other, want), BT_OK);
    assert_true(bt_matcher_work(other) > 1000);
    assert_int_equal(bt_matcher_mask(m, bits), BT_OK);
    assert_memory_equal(bits, want, sizeof(bits));
    /* It does not wait for one without a limit either. */
    assert_true(bt_grammar_enter(g, false));
    assert_int_equal(bt_matcher_mask(m, bits), BT_AGAIN);
    assert_int_equal(bt_matcher_accept(m, 3 + 'a'), BT_AGAIN);
    assert_int_equal(bt_matcher_accept(m, EOS), BT_AGAIN);
    bt_grammar_leave(g);
    assert_int_equal(bt_matcher_accept(m, 3 + 'a'), BT_OK);
    assert_int_equal(bt_matcher_accept(m, EOS), BT_ERR_INVALID);
    bt_matcher_destroy(m);
    bt_matcher_destroy(other);
    bt_grammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

/* ---- the cache ---- */

static struct bt_grammar *get(struct bt_grammar_cache *c, const char *pattern, bt_status_t want)
{
    const struct bt_grammar_spec spec = {BT_GRAMMAR_REGEX, pattern, strlen(pattern)};
    struct bt_grammar *g = NULL;
    char err[160] = "";
    assert_int_equal(bt_grammar_cache_get(c, &spec, &g, err, sizeof(err)), want);
    assert_true(want == BT_OK || strstr(err, "try again later") != NULL);
    return g;
}

static void a_flood_drops_the_oldest_that_nobody_has(void **state)
{
    (void)state;
    enum { ROOM = 4 << 20 };
    struct bt_grammar_cache *c = bt_grammar_cache_create(ROOM);
    struct bt_grammar *held = get(c, "held", BT_OK), *idle = get(c, "idle", BT_OK);
    assert_ptr_equal(get(c, "held", BT_OK), held); /* two references now */
    bt_grammar_unref(idle);
    for (uint32_t i = 0; i < 2000; i++) {
        char pattern[32];
        snprintf(pattern, sizeof(pattern), "flood%u", i);
        bt_grammar_unref(get(c, pattern, BT_OK));
        assert_true(held->account->bytes <= ROOM);
    }
    assert_true(held->account->bytes > ROOM / 2);
    assert_ptr_equal(get(c, "held", BT_OK), held);
    assert_int_equal(held->refs, 4); /* the cache's, and ours */
    /* What a grammar builds while it is used counts, too. */
    struct bt_grammar_vocab *v = make_vocab();
    struct bt_matcher *m = bt_matcher_create(held, v);
    uint32_t bits[BT_DIV_UP(VOCAB, 32)];
    size_t before = held->account->bytes;
    assert_int_equal(bt_matcher_mask(m, bits), BT_OK);
    assert_true(held->account->bytes > before);
    bt_matcher_destroy(m);
    bt_grammar_vocab_destroy(v);
    /* Those in use may have four times the room. They outlive the cache. */
    struct bt_grammar *all[8192];
    uint32_t n = 0;
    while (held->account->bytes < 4 * (size_t)ROOM - 65536) {
        char pattern[32];
        snprintf(pattern, sizeof(pattern), "used%u", n);
        all[n++] = get(c, pattern, BT_OK);
        assert_true(n < BT_ARRAY_LEN(all));
    }
    for (uint32_t i = 0; i < 16; i++) {
        char pattern[32];
        snprintf(pattern, sizeof(pattern), "more%u", i);
        const struct bt_grammar_spec spec = {BT_GRAMMAR_REGEX, pattern, strlen(pattern)};
        char err[160] = "";
        bt_status_t st = bt_grammar_cache_get(c, &spec, &all[n], err, sizeof(err));
        n += st == BT_OK;
    }
    (void)get(c, "one more", BT_ERR_EXHAUSTED);
    bt_grammar_cache_destroy(c);
    while (n > 0) {
        bt_grammar_unref(all[--n]);
    }
    for (uint32_t i = 0; i < 3; i++) {
        bt_grammar_unref(held);
    }
}

/* ---- the rest ---- */
struct run {
    struct bt_grammar *g;
    struct bt_grammar_vocab *v;
    uint64_t seed;
    uint32_t done;
};

static void *run_thread(void *arg)
{
    struct run *r = arg;
    uint64_t own = r->seed;
    for (uint32_t round = 0; round < 20; round++) {
        struct bt_matcher *m = bt_matcher_create(r->g, r->v);
        uint32_t bits[BT_DIV_UP(VOCAB, 32)];
        for (uint32_t i = 0; i < 20; i++) {
            bt_matcher_limit(m, round % 2 ? 20000 : UINT32_MAX);
            bt_status_t st = bt_matcher_mask(m, bits);
            bt_matcher_limit(m, UINT32_MAX);
            st = st == BT_AGAIN ? bt_matcher_mask(m, bits) : st;
            if (st != BT_OK) {
                return NULL;
            }
            own = own * 6364136223846793005u + 1442695040888963407u;
            uint32_t id = (uint32_t)(own >> 33) % VOCAB;
            for (uint32_t k = 0; k < VOCAB && !in_mask(bits, id); k++) {
                id = (id + 1) % VOCAB;
            }
            if (!in_mask(bits, id)) {
                break;
            }
            if (bt_matcher_accept(m, id) != BT_OK) {
                return NULL;
            }
        }
        bt_matcher_destroy(m);
    }
    r->done = 1;
    return NULL;
}

static void threads_share_a_grammar(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = make_vocab();
    for (uint32_t number = 0; number < 20; number++) {
        struct bt_grammar *g = random_grammar(number);
        struct run runs[4];
        pthread_t threads[4];
        for (uint32_t i = 0; i < 4; i++) {
            runs[i] = (struct run){g, v, number * 4 + i, 0};
            assert_int_equal(pthread_create(&threads[i], NULL, run_thread, &runs[i]), 0);
        }
        for (uint32_t i = 0; i < 4; i++) {
            pthread_join(threads[i], NULL);
            assert_int_equal(runs[i].done, 1);
        }
        bt_grammar_unref(g);
    }
    bt_grammar_vocab_destroy(v);
}

static void forced_text_has_no_choice(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = make_vocab();
    struct bt_program *p = bt_program_create(BT_GRAMMAR_BYTES_MAX);
    struct bt_rx_set *s = bt_program_rx(p);
    bt_rx_t either = bt_rx_or(s, text(s, "{\"kind\":\"left\"}"), text(s, "{\"kind\":\"lemon\"}"));
    struct bt_grammar *g;
    char err[200], out[64];
    assert_int_equal(bt_grammar_take(p, bt_program_regex(p, either), &g, err, sizeof(err)), BT_OK);
    struct bt_matcher *m = bt_matcher_create(g, v);
    size_t n = bt_matcher_forced(m, out, sizeof(out));
    assert_int_equal(n, strlen("{\"kind\":\"le"));
    assert_memory_equal(out, "{\"kind\":\"le", n);
    assert_int_equal(bt_matcher_forced(m, out, 3), 3);
    assert_int_equal(bt_matcher_accept_bytes(m, "{\"kind\":\"lem", 12), BT_OK);
    n = bt_matcher_forced(m, out, sizeof(out));
    assert_int_equal(n, 4);
    assert_memory_equal(out, "on\"}", 4);
    assert_int_equal(bt_matcher_accept_bytes(m, "on\"}", 4), BT_OK);
    assert_int_equal(bt_matcher_forced(m, out, sizeof(out)), 0);
    assert_true(may_end(m));
    bt_matcher_destroy(m);
    bt_grammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

/* A token may leave the array whose items must differ, while the text goes on in an alternative
 * without such a rule. */
static void masks_leave_arrays_of_different_items(void **state)
{
    (void)state;
    static const char schema[] =
        "{\"anyOf\": [{\"type\": \"array\", \"uniqueItems\": true, \"items\": {\"type\": "
        "\"array\", \"items\": {\"type\": \"number\"}}}, {\"type\": \"array\", \"items\": "
        "{\"type\": \"array\", \"uniqueItems\": true, \"items\": {\"type\": \"string\"}}}]}";
    static const char *const texts[] = {"[[\"a\",\"b\"],[\"a\",\"c\"],[\"a\"],[\"b\",\"}\"]]",
                                        "[[1],[2,1],[1,2]]"};
    const struct bt_grammar_spec spec = {
        .kind = BT_GRAMMAR_JSON_SCHEMA, .text = schema, .len = strlen(schema)};
    struct bt_grammar_vocab *v = make_vocab();
    struct bt_grammar *g;
    char err[256];
    assert_int_equal(bt_grammar_compile(&spec, &g, err, sizeof(err)), BT_OK);
    for (uint32_t t = 0; t < BT_ARRAY_LEN(texts); t++) {
        struct bt_matcher *m = bt_matcher_create(g, v);
        uint32_t bits[BT_DIV_UP(VOCAB, 32)];
        for (const char *c = texts[t]; *c; c++) {
            assert_true(check_mask(m, bits, t) > 0);
            assert_int_equal(bt_matcher_accept(m, 3 + (uint8_t)*c), BT_OK);
        }
        assert_true(may_end(m));
        bt_matcher_destroy(m);
    }
    bt_grammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

static void masks_of_patterns_that_forbid_some_characters(void **state)
{
    (void)state;
    static const char *const patterns[] = {"^[^@]+@[^@ ]+$",
                                           "^\\\\S+$",
                                           "^.{1,200}$",
                                           "^[^b]*$",
                                           "^(?!foo).*$",
                                           "^[^/:;,.]{3,}$",
                                           "^[^\\\\s@]+$",
                                           "^[^0-9]*$",
                                           "^[^a-z]*$",
                                           "^[^<>&\u00e9]*$",
                                           "a.c",
                                           "^[^\u2028]+$",
                                           "^(?!.*[0-9]{2}).*$",
                                           "^[!-~]*$",
                                           "^[^ -/]*$",
                                           "^[^\\\\x20-\\\\x7e]*$",
                                           "^[\\\\s\\\\S]*x$",
                                           "o{2}"};
    struct bt_grammar_vocab *v = make_vocab();
    seed = 11;
    for (uint32_t p = 0; p < 3 * BT_ARRAY_LEN(patterns); p++) {
        char text[160], err[256];
        uint32_t of = p / 3, how = p % 3;
        snprintf(text, sizeof(text),
                 how == 0   ? "{\"type\": \"string\", \"pattern\": \"%s\"}"
                 : how == 1 ? "{\"type\": \"string\", \"not\": {\"pattern\": \"%s\"}}"
                            : "{\"type\": \"string\", \"maxLength\": 40, \"pattern\": \"%s\"}",
                 patterns[of]);
        const struct bt_grammar_spec spec = {
            .kind = BT_GRAMMAR_JSON_SCHEMA, .text = text, .len = strlen(text)};
        struct bt_grammar *g;
        bt_status_t st = bt_grammar_compile(&spec, &g, err, sizeof(err));
        if (st != BT_OK) {
            fail_msg("%s: %s", text, err);
        }
        struct bt_matcher *m = bt_matcher_create(g, v);
        uint32_t bits[BT_DIV_UP(VOCAB, 32)];
        for (uint32_t i = 0; i < 12; i++) {
            uint32_t n = check_mask(m, bits, p), id = pick(bits, n);
            assert_int_equal(bt_matcher_accept(m, id), BT_OK);
            if (id == EOS) {
                break;
            }
        }
        bt_matcher_destroy(m);
        bt_grammar_unref(g);
    }
    bt_grammar_vocab_destroy(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masks_are_what_forks_accept),
        cmocka_unit_test(rollback_and_other_matchers_come_back_to_the_same_masks),
        cmocka_unit_test(a_full_grammar_forgets_and_goes_on),
        cmocka_unit_test(too_deep_a_text_is_an_error),
        cmocka_unit_test(too_many_threads_are_an_error),
        cmocka_unit_test(a_limited_call_comes_back),
        cmocka_unit_test(a_flood_drops_the_oldest_that_nobody_has),
        cmocka_unit_test(threads_share_a_grammar),
        cmocka_unit_test(forced_text_has_no_choice),
        cmocka_unit_test(masks_leave_arrays_of_different_items),
        cmocka_unit_test(masks_of_patterns_that_forbid_some_characters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
