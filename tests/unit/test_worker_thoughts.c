/* The budget of reasoning: where it begins, ends and is forced to end, by tokens and by text; and
 * in masks: behind drafts, with a grammar, and as drafts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "common/worker/request.h"

#define VOCAB 40u
#define WORDS 2u
#define NONE  BT_WTHOUGHTS_FREE

enum { A, NL, OPEN, CLOSE, LT, THINK, GT, LTS, TWO, HALF, REST, EOS, B };
static const char *const texts[] = {"a",  "\n",  "<t>",  "</t>", "<",     "t", ">",
                                    "</", ">\n", "\xc3", "\xa9", "<eos>", "b"};

static struct bt_grammar_vocab *vocabulary(void)
{
    struct bt_grammar_token t[VOCAB] = {0};
    struct bt_grammar_vocab *v;
    const uint32_t eos = EOS;
    for (size_t i = 0; i < BT_ARRAY_LEN(texts); i++) {
        t[i] = (struct bt_grammar_token){.bytes = texts[i],
                                         .n = (uint32_t)strlen(texts[i]),
                                         .special = i == OPEN || i == CLOSE || i == EOS};
    }
    assert_int_equal(bt_grammar_vocab_create(t, VOCAB, &eos, 1, &v), BT_OK);
    return v;
}

static struct bt_wmarker marker(const char *text, uint32_t id)
{
    struct bt_wmarker m = {.id = id, .len = (uint32_t)strlen(text)};
    memcpy(m.text, text, m.len);
    return m;
}

/* by_token: only the tokens are markers. */
static struct bt_wthoughts_rule rule_of(uint32_t budget, bool begun, bool by_token)
{
    return (struct bt_wthoughts_rule){
        .budget = budget,
        .begun = begun,
        .open = marker("<t>", by_token ? OPEN : BT_WMARKER_AS_TEXT),
        .n_ends = 2,
        .ends = {marker("</t>", by_token ? CLOSE : BT_WMARKER_AS_TEXT),
                 marker("aab", BT_WMARKER_AS_TEXT)},
        .n_force = 3,
        .force = {NL, CLOSE, NL},
    };
}

#define END VOCAB /* of a list of tokens */

/* Takes the tokens; *next: what must come behind each of them, from the beginning on. */
static void follow(const struct bt_wthoughts_rule *rule, const uint32_t *tokens,
                   const uint32_t *next)
{
    struct bt_grammar_vocab *v = vocabulary();
    struct bt_wthoughts t = {0};
    for (uint32_t i = 0;; i++) {
        if (bt_wthoughts_next(&t, rule) != next[i]) {
            fail_msg("behind %u tokens: %u, wanted %u", i, bt_wthoughts_next(&t, rule), next[i]);
        }
        if (tokens[i] == END) {
            break;
        }
        bt_wthoughts_take(&t, rule, v, tokens[i]);
        assert_int_equal(t.n_tokens, i + 1);
    }
    bt_grammar_vocab_destroy(v);
}

#define FOLLOW(rule, ...) FOLLOW_(rule, __VA_ARGS__)
#define FOLLOW_(rule, tokens, next)                                                                \
    do {                                                                                           \
        const struct bt_wthoughts_rule r_ = rule;                                                  \
        follow(&r_, (const uint32_t[])LIST tokens, (const uint32_t[])LIST next);                   \
    } while (0)
#define LIST(...)                                                                                  \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

static void test_the_budget(void **state)
{
    (void)state;
    /* Begun by the prompt, by a token, by text. */
    FOLLOW(rule_of(2, true, true), (A, A, NL, CLOSE, NL, A, END),
           (NONE, NONE, NL, CLOSE, NL, NONE, NONE));
    FOLLOW(rule_of(1, false, true), (NL, OPEN, A, NL, CLOSE, NL, END),
           (NONE, NONE, NONE, NL, CLOSE, NL, NONE));
    FOLLOW(rule_of(1, false, false), (NL, LT, THINK, TWO, A, NL, END),
           (NONE, NONE, NONE, NONE, NONE, NL, CLOSE));
    FOLLOW(rule_of(0, true, true), (NL, CLOSE, NL, END), (NL, CLOSE, NL, NONE));
    FOLLOW(rule_of(0, false, true), (OPEN, NL, CLOSE, NL, END), (NONE, NL, CLOSE, NL, NONE));
    /* It ends before, once. */
    FOLLOW(rule_of(2, true, true), (A, CLOSE, A, A, OPEN, A, A, END),
           (NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE));
    FOLLOW(rule_of(4, true, false), (LTS, THINK, GT, A, A, A, END),
           (NONE, NONE, NONE, NONE, NONE, NONE, NONE));
    FOLLOW(rule_of(4, true, true), (A, A, A, B, A, END), (NONE, NONE, NONE, NONE, NONE, NONE));
    /* There is none. */
    FOLLOW(rule_of(1, false, true), (A, OPEN, A, A, END), (NONE, NONE, NONE, NONE, NONE));
    FOLLOW(rule_of(1, false, false), (LT, A, GT, A, A, END), (NONE, NONE, NONE, NONE, NONE, NONE));
    /* A text is no marker where a token is. */
    FOLLOW(rule_of(4, true, true), (LTS, THINK, GT, A, NL, END),
           (NONE, NONE, NONE, NONE, NL, CLOSE));
    FOLLOW(rule_of(1, false, true), (LT, THINK, GT, A, A, END),
           (NONE, NONE, NONE, NONE, NONE, NONE));
    /* No character is cut; bytes that are no character do not count. */
    FOLLOW(rule_of(1, true, true), (HALF, REST, NL, END), (NONE, NONE, NL, CLOSE));
    FOLLOW(rule_of(1, true, true), (HALF, HALF, HALF, HALF, END), (NONE, NONE, NONE, NONE, NL));
    /* Another token was drawn: the answer stays as it is. */
    FOLLOW(rule_of(1, true, true), (A, A, A, END), (NONE, NL, NONE, NONE));
}

/* ---- masks ---- */

struct row { /* a request with a prompt of one token */
    struct bt_submission sub;
    struct bt_wreq r;
    uint32_t tokens[16];
};

static void set_row(struct row *w, struct bt_wgrammar *g, const uint32_t *tokens, uint32_t n)
{
    *w = (struct row){.sub = {.n = 1, .n_prompt = 1, .grammar = g}};
    memcpy(w->tokens + 1, tokens, n * sizeof(tokens[0]));
    w->r.sub = &w->sub;
    w->r.tokens = w->tokens;
    w->r.len = 1 + n;
}

static void make(struct row *w, struct bt_grammar_vocab *v, const uint32_t *drafts, uint32_t n,
                 uint32_t *bits)
{
    const struct bt_wvocab of = {.vocab = v, .n_eos = 1, .eos = {EOS}};
    struct bt_wmask_job j = {.r = &w->r, .drafts = drafts, .n_draft = n};
    memset(bits, 0x55, (n + 1) * WORDS * sizeof(bits[0]));
    assert_int_equal(bt_wmask_make(&j, &of, bits, WORDS), BT_OK);
}

static void expect(const uint32_t *bits, uint32_t token)
{
    assert_int_equal(bits[0], token == NONE ? UINT32_MAX : 1u << token);
    assert_int_equal(bits[1], token == NONE ? UINT32_MAX : 0);
}

static void test_masks(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = vocabulary();
    struct bt_wgrammar *g = bt_wgrammar_create(BT_GRAMMAR_ANY, NULL, 0);
    uint32_t bits[4 * WORDS];
    struct bt_spec_draft d;
    struct row w;
    g->thoughts = rule_of(3, true, true);
    set_row(&w, g, (const uint32_t[]){A, A}, 2);
    assert_true(bt_wmask_needed(&w.r));
    make(&w, v, (const uint32_t[]){A, NL, CLOSE}, 3, bits); /* behind drafts */
    expect(bits, NONE);
    expect(bits + WORDS, NL);
    expect(bits + 2 * WORDS, CLOSE);
    expect(bits + 3 * WORDS, NL);
    make(&w, v, NULL, 0, bits); /* they are taken back */
    expect(bits, NONE);
    /* Whoever has drawn the tokens: what follows is the same. The rest of the end are drafts. */
    set_row(&w, g, (const uint32_t[]){A, A, A}, 3);
    make(&w, v, NULL, 0, bits);
    expect(bits, NL);
    w.tokens[w.r.len++] = NL;
    assert_int_equal(bt_wmask_forced(&w.r, 16, &d), 2);
    assert_true(d.tokens[0] == CLOSE && d.tokens[1] == NL);
    make(&w, v, d.tokens, 2, bits);
    expect(bits, CLOSE);
    expect(bits + WORDS, NL);
    expect(bits + 2 * WORDS, NONE);
    assert_true(bt_wmask_needed(&w.r));
    w.tokens[w.r.len++] = CLOSE;
    w.tokens[w.r.len++] = NL;
    make(&w, v, NULL, 0, bits);
    expect(bits, NONE);
    assert_false(bt_wmask_needed(&w.r)); /* the rest is free and needs no masks */
    bt_wgrammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

/* The grammar of an answer behind reasoning takes the forced end, and then the answer follows. */
static void test_with_a_grammar(void **state)
{
    (void)state;
    static const char text[] =
        "{\"tags\":[{\"begin\":\"\",\"regex\":\"b\",\"end\":\"\"}],\"first\":{\"any\":true,"
        "\"begin\":"
        "[],\"end\":[{\"special\":\"</t>\"},{\"regex\":\"\\\\n*\"}]},\"at_least_one\":true,"
        "\"free_text\":false,\"stop_after_first\":true}";
    struct bt_grammar_vocab *v = vocabulary();
    struct bt_wgrammar *g = bt_wgrammar_create(BT_GRAMMAR_TAGS, text, strlen(text));
    const struct bt_grammar_spec spec = {BT_GRAMMAR_TAGS, text, strlen(text)};
    char err[256] = "";
    uint32_t bits[WORDS];
    struct row w;
    assert_int_equal(bt_grammar_compile(&spec, &g->grammar, err, sizeof(err)), BT_OK);
    g->thoughts = rule_of(1, true, false);
    static const uint32_t tokens[] = {HALF, REST, NL, CLOSE, NL, B};
    static const uint32_t next[] = {NONE, REST, NL, CLOSE, NL, NONE, EOS};
    for (uint32_t n = 0; n <= BT_ARRAY_LEN(tokens); n++) {
        set_row(&w, g, tokens, n);
        make(&w, v, NULL, 0, bits);
        if (next[n] != NONE) {
            expect(bits, next[n]);
        }
        bt_matcher_destroy(w.r.match.matcher);
    }
    set_row(&w, g, tokens, 5);
    make(&w, v, NULL, 0, bits);
    assert_int_equal(bits[0], 1u << NL | 1u << B);
    bt_matcher_destroy(w.r.match.matcher);
    bt_wgrammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_budget),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_with_a_grammar),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
