/* Masks of constrained rows: what a row's tokens and drafts allow, on one thread and in the pool of
 * threads. The grammars are lists of choices; tests of grammars are elsewhere. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/worker/request.h"
#include "common/worker/stats.h"

#define MODEL "deploy/models/shakespeare-llama-6m"
#define EOS   7u
#define VOCAB 40u
#define WORDS 2u
#define ROWS  96u

/* Ids 8 and above have no token. */
static const char *const texts[] = {"a", "b", "ab", "c", "bc", "d", "<x>", "<eos>"};
enum { A, B, AB, C, BC, D, X };

static struct bt_grammar_vocab *vocabulary(void)
{
    struct bt_grammar_token t[VOCAB] = {0};
    struct bt_grammar_vocab *v;
    const uint32_t eos = EOS;
    for (size_t i = 0; i < BT_ARRAY_LEN(texts); i++) {
        t[i] = (struct bt_grammar_token){
            .bytes = texts[i], .n = (uint32_t)strlen(texts[i]), .special = i >= X};
    }
    assert_int_equal(bt_grammar_vocab_create(t, VOCAB, &eos, 1, &v), BT_OK);
    return v;
}

static struct bt_wgrammar *choices(const char *text)
{
    struct bt_wgrammar *g = bt_wgrammar_create(BT_GRAMMAR_CHOICE, text, strlen(text));
    const struct bt_grammar_spec spec = {BT_GRAMMAR_CHOICE, g->text, g->len};
    char err[128] = "";
    assert_int_equal(bt_grammar_compile(&spec, &g->grammar, err, sizeof(err)), BT_OK);
    return g;
}

struct row { /* a request with a prompt of one token */
    struct bt_submission sub;
    struct bt_wreq r;
    uint32_t tokens[16];
};

static void set_row(struct row *w, struct bt_wgrammar *g, const uint32_t *tokens, uint32_t n)
{
    *w = (struct row){.sub = {.n = 1, .n_prompt = 1, .grammar = g}};
    for (uint32_t i = 0; i < n; i++) {
        w->tokens[1 + i] = tokens[i];
    }
    w->r.sub = &w->sub;
    w->r.tokens = w->tokens;
    w->r.len = 1 + n;
}

static void forget(struct row *w)
{
    bt_matcher_destroy(w->r.match.matcher);
    w->r.match.matcher = NULL;
}

static bt_status_t make(struct row *w, const struct bt_grammar_vocab *v, const uint32_t *drafts,
                        uint32_t n, uint32_t *bits)
{
    const struct bt_wvocab of = {.vocab = (struct bt_grammar_vocab *)v, .n_eos = 1, .eos = {EOS}};
    struct bt_wmask_job j = {.r = &w->r, .drafts = drafts, .n_draft = n};
    memset(bits, 0x55, (n + 1) * WORDS * sizeof(bits[0]));
    return bt_wmask_make(&j, &of, bits, WORDS);
}

static uint32_t set(uint32_t a, uint32_t b, uint32_t c)
{
    return 1u << a | 1u << b | 1u << c;
}

#define ASSERT_MASK(bits, want)                                                                    \
    do {                                                                                           \
        assert_int_equal((bits)[0], want);                                                         \
        assert_int_equal((bits)[1], 0);                                                            \
    } while (0)

/* A matcher catches up with its row, whether it has seen the tokens before or not. */
static void test_tokens_decide(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = vocabulary();
    struct bt_wgrammar *g = choices("[\"abc\", \"abd\", \"a\"]");
    uint32_t bits[WORDS];
    struct row w;
    set_row(&w, g, (const uint32_t[]){A, BC, EOS}, 0);
    assert_int_equal(make(&w, v, NULL, 0, bits), BT_OK);
    ASSERT_MASK(bits, set(A, AB, A));
    w.tokens[1] = A;
    w.r.len = 2;
    for (int fresh = 0; fresh < 2; fresh++) {
        assert_int_equal(make(&w, v, NULL, 0, bits), BT_OK);
        ASSERT_MASK(bits, set(B, BC, EOS));
        assert_int_equal(make(&w, v, NULL, 0, bits), BT_OK); /* again, as after a failed step */
        ASSERT_MASK(bits, set(B, BC, EOS));
        forget(&w);
    }
    set_row(&w, g, (const uint32_t[]){A, D}, 2); /* what another worker says is wrong */
    assert_int_equal(make(&w, v, NULL, 0, bits), BT_ERR_INVALID);
    forget(&w);
    set_row(&w, g, (const uint32_t[]){A, X}, 2);
    assert_int_equal(make(&w, v, NULL, 0, bits), BT_ERR_INVALID);
    forget(&w);
    bt_wgrammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

static void test_drafts(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = vocabulary();
    struct bt_wgrammar *g = choices("[\"abcd\", \"abd\"]");
    uint32_t bits[4 * WORDS];
    struct row w;
    set_row(&w, g, (const uint32_t[]){A}, 1);
    assert_int_equal(make(&w, v, (const uint32_t[]){B, C, D}, 3, bits), BT_OK);
    ASSERT_MASK(bits, set(B, BC, B));
    ASSERT_MASK(bits + WORDS, set(C, D, C));
    ASSERT_MASK(bits + 2 * WORDS, set(D, D, D));
    ASSERT_MASK(bits + 3 * WORDS, set(EOS, EOS, EOS));
    /* They are taken back: the row goes another way. Behind a forbidden draft nothing is drawn. */
    w.tokens[2] = BC;
    w.r.len = 3;
    assert_int_equal(make(&w, v, (const uint32_t[]){C, D, D}, 3, bits), BT_OK);
    ASSERT_MASK(bits, set(D, D, D));
    for (uint32_t i = WORDS; i < 4 * WORDS; i++) {
        assert_int_equal(bits[i], UINT32_MAX);
    }
    assert_int_equal(make(&w, v, (const uint32_t[]){D, EOS, A}, 3, bits), BT_OK);
    ASSERT_MASK(bits + WORDS, set(EOS, EOS, EOS));
    assert_int_equal(bits[2 * WORDS], UINT32_MAX);
    assert_int_equal(make(&w, v, NULL, 0, bits), BT_OK);
    ASSERT_MASK(bits, set(D, D, D));
    forget(&w);
    bt_wgrammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

static void test_the_end_waits_for_min_new(void **state)
{
    (void)state;
    struct bt_grammar_vocab *v = vocabulary();
    struct bt_wgrammar *g = choices("[\"a\", \"ad\", \"b\"]");
    uint32_t bits[3 * WORDS];
    struct row w;
    g->min_new = 2;
    set_row(&w, g, (const uint32_t[]){A}, 1);
    assert_int_equal(make(&w, v, NULL, 0, bits), BT_OK);
    ASSERT_MASK(bits, set(D, D, D));
    w.tokens[2] = D;
    w.r.len = 3;
    assert_int_equal(make(&w, v, NULL, 0, bits), BT_OK);
    ASSERT_MASK(bits, set(EOS, EOS, EOS));
    forget(&w);
    g->min_new = 1;
    set_row(&w, g, (const uint32_t[]){A}, 1);
    assert_int_equal(make(&w, v, NULL, 0, bits), BT_OK);
    ASSERT_MASK(bits, set(D, EOS, D));
    forget(&w);
    g->min_new = 9; /* the grammar ends here all the same */
    set_row(&w, g, (const uint32_t[]){B}, 1);
    assert_int_equal(make(&w, v, NULL, 0, bits), BT_OK);
    ASSERT_MASK(bits, set(EOS, EOS, EOS));
    forget(&w);
    bt_wgrammar_unref(g);
    bt_grammar_vocab_destroy(v);
}

/* ---- the pool ---- */

static struct bt_loop *loop;
static uint32_t n_done;

static void done(void *arg, struct bt_wgrammar *g)
{
    assert_ptr_equal(arg, loop);
    n_done++;
    bt_wgrammar_unref(g);
}

static struct bt_wgrammar *compile(struct bt_wmask_pool *p, enum bt_grammar_kind kind,
                                   const char *text, bool all_ends)
{
    struct bt_wgrammar *g = bt_wgrammar_create(kind, text, strlen(text));
    g->done = done;
    g->arg = loop;
    g->stop[g->n_stop++] = 2044; /* the model's */
    if (all_ends) {
        g->stop[g->n_stop++] = 2047;
    }
    bt_wmask_pool_compile(p, g);
    return g;
}

static void wait_for(uint32_t n)
{
    uint64_t until = bt_mono_ns() + 60000000000ull;
    while (n_done < n) {
        assert_true(bt_mono_ns() < until);
        bt_loop_poll(loop, 10);
    }
}

static struct bt_wmask_pool *start(struct bt_wstats *stats, const char *model, uint32_t vocab)
{
    n_done = 0;
    struct bt_wmask_pool *p = bt_wmask_pool_create(&(struct bt_wmask_pool_conf){
        .loop = loop, .stats = stats, .model_path = model, .vocab = vocab});
    assert_non_null(p);
    return p;
}

/* The text of a lone choice is forced: its tokens are drafts once the first of them was drawn. */
static void test_forced_text(void **state)
{
    (void)state;
    struct bt_wvocab v;
    char err[128];
    assert_int_equal(bt_wvocab_load(MODEL, 2048, &v, err, sizeof(err)), BT_OK);
    const char text[] = "What, shall this speech be spoke for our excuse";
    uint32_t ids[BT_SPEC_MAX + 1], bits[64], at, n;
    n = bt_wvocab_tokens(&v, text, strlen(text), ids, BT_ARRAY_LEN(ids));
    assert_true(n > 6);
    struct bt_wgrammar *g = choices("[\"What, shall this speech be spoke for our excuse\"]");
    struct row w;
    struct bt_spec_draft d;
    set_row(&w, g, NULL, 0);
    assert_int_equal(bt_wmask_make(&(struct bt_wmask_job){.r = &w.r}, &v, bits, 64), BT_OK);
    assert_int_equal(bt_wmask_forced(&w.r, 16, &d), 0); /* nothing was drawn behind it */
    w.tokens[w.r.len++] = ids[0];
    assert_int_equal(bt_wmask_forced(&w.r, 16, &d), BT_MIN(n - 1, (uint32_t)BT_SPEC_MAX));
    assert_memory_equal(d.tokens, ids + 1, d.n * sizeof(ids[0]));
    assert_int_equal(bt_wmask_forced(&w.r, 2, &d), 2);
    w.tokens[w.r.len - 1] = ids[0] + 1; /* drawn in another way */
    assert_int_equal(bt_wmask_forced(&w.r, 16, &d), 0);
    w.tokens[w.r.len - 1] = ids[0];
    at = w.r.len; /* behind accepted drafts it goes on, and at the end nothing is forced */
    assert_int_equal(
        bt_wmask_make(&(struct bt_wmask_job){.r = &w.r, .drafts = ids + 1, .n_draft = 3}, &v,
                      (uint32_t[4 * 64]){0}, 64),
        BT_OK);
    memcpy(&w.tokens[at], ids + 1, 4 * sizeof(ids[0]));
    w.r.len = at + 4;
    assert_true(bt_wmask_forced(&w.r, 16, &d) > 0);
    assert_int_equal(d.tokens[0], ids[5]);
    forget(&w);
    bt_wgrammar_unref(g);
    bt_wvocab_cleanup(&v);
}

/* Many steps of many rows: each mask is what one thread makes. */
static void test_the_pool_makes_all_masks(void **state)
{
    (void)state;
    struct bt_wstats *stats = bt_wstats_create("m", "decode");
    struct bt_wmask_pool *p = start(stats, MODEL, 2048);
    struct bt_wgrammar *g = compile(p, BT_GRAMMAR_CHOICE, "[\"a\", \"be\"]", true);
    const uint32_t words = 64;
    struct bt_wvocab v;
    char err[128];
    wait_for(1);
    assert_int_equal(g->status, BT_OK);
    assert_int_equal(bt_wvocab_load(MODEL, 2048, &v, err, sizeof(err)), BT_OK);
    assert_int_equal(v.n_eos, 2);
    struct row *rows = bt_calloc(ROWS, sizeof(*rows)), one;
    struct bt_wmask_job *jobs = bt_calloc(ROWS, sizeof(*jobs));
    uint32_t *bits = bt_calloc((size_t)ROWS * words, sizeof(*bits)), want[64];
    set_row(&one, g, NULL, 0);
    assert_int_equal(bt_wmask_make(&(struct bt_wmask_job){.r = &one.r}, &v, want, words), BT_OK);
    for (uint32_t step = 0; step < 50; step++) {
        uint32_t n = 1 + step * 37 % ROWS;
        memset(bits, 0, (size_t)ROWS * words * sizeof(*bits));
        for (uint32_t i = 0; i < n; i++) {
            set_row(&rows[i], g, (const uint32_t[]){2044}, i % 7 == 3); /* EOS: not allowed */
            jobs[i] = (struct bt_wmask_job){.r = &rows[i].r, .at = i};
        }
        bt_wmask_pool_start(p, jobs, n, bits, words);
        bt_wmask_pool_wait(p, 60000000000ull);
        for (uint32_t i = 0; i < n; i++) {
            assert_int_equal(jobs[i].status, i % 7 == 3 ? BT_ERR_INVALID : BT_OK);
            if (i % 7 != 3) {
                assert_memory_equal(bits + (size_t)i * words, want, sizeof(want));
            }
            forget(&rows[i]);
        }
    }
    forget(&one);
    bt_wvocab_cleanup(&v);
    bt_wgrammar_unref(g);
    bt_wmask_pool_destroy(p);
    bt_wstats_destroy(stats);
    free(rows);
    free(jobs);
    free(bits);
}

/* ---- masks that take long ---- */

static struct bt_wahead *made;

static void on_made(void *arg, struct bt_wahead *a)
{
    assert_ptr_equal(arg, loop);
    made = a;
    n_done++;
}

/* A grammar whose first mask needs more work than a step gives: the row's is missing, its
 * neighbour's is there, and the slow thread makes it. */
static void test_a_slow_mask_holds_up_nobody(void **state)
{
    (void)state;
    struct bt_wstats *stats = bt_wstats_create("m", "decode");
    n_done = 0;
    struct bt_wmask_pool *p = bt_wmask_pool_create(&(struct bt_wmask_pool_conf){.loop = loop,
                                                                                .stats = stats,
                                                                                .model_path = MODEL,
                                                                                .vocab = 2048,
                                                                                .made = on_made,
                                                                                .arg = loop});
    struct bt_wgrammar *slow = compile(p, BT_GRAMMAR_REGEX, "[a-z .]*[aeiou][a-z .]{60}x.*", true),
                       *quick = compile(p, BT_GRAMMAR_CHOICE, "[\"a\", \"be\"]", true);
    enum { W = 64 };
    uint32_t bits[2 * W], want[W], zero[W] = {0};
    struct row w[2];
    wait_for(2);
    set_row(&w[0], slow, NULL, 0);
    set_row(&w[1], quick, NULL, 0);
    struct bt_wmask_job j[2] = {{.r = &w[0].r, .at = 0}, {.r = &w[1].r, .at = 1}};
    bt_wmask_pool_start(p, j, 2, bits, W);
    bt_wmask_pool_wait(p, 60000000000ull);
    assert_int_equal(j[1].status, BT_OK);
    assert_int_equal(j[0].status, BT_AGAIN);
    assert_true(j[0].begun && j[0].n_made == 0);
    assert_memory_equal(bits, zero, sizeof(zero));
    struct bt_wahead *a = bt_wahead_create(NULL, 0, W);
    a->grammar = slow;
    slow->refs++;
    a->matcher = w[0].r.match.matcher;
    w[0].r.match.matcher = NULL;
    bt_wmask_pool_slow(p, a);
    wait_for(3);
    assert_true(made == a && a->status == BT_OK &&
                bt_matcher_work(a->matcher) > BT_WMASK_STEP_WORK);
    memcpy(want, a->bits, sizeof(want));
    w[0].r.match.ahead = a; /* the next step has it at once, and the matcher's state with it */
    w[0].r.match.matcher = a->matcher;
    a->matcher = NULL;
    bt_wmask_pool_start(p, j, 2, bits, W);
    bt_wmask_pool_wait(p, 60000000000ull);
    assert_true(j[0].status == BT_OK && j[1].status == BT_OK);
    assert_memory_equal(bits, want, sizeof(want));
    bt_wahead_destroy(a);
    forget(&w[0]);
    forget(&w[1]);
    bt_wgrammar_unref(slow);
    bt_wgrammar_unref(quick);
    bt_wmask_pool_destroy(p);
    bt_wstats_destroy(stats);
}

/* Without time one job begins, and those that have not begun are the next step's first ones. A
 * prompt's mask was made ahead: it begins in any case. */
static void test_no_time_for_masks(void **state)
{
    (void)state;
    enum { W = 64, N = 12 };
    struct bt_wstats *stats = bt_wstats_create("m", "decode");
    struct bt_wmask_pool *p = start(stats, MODEL, 2048);
    struct bt_wgrammar *g = compile(p, BT_GRAMMAR_CHOICE, "[\"a\", \"be\"]", true);
    uint32_t *bits = bt_calloc(N * W, sizeof(*bits)), had[N] = {0}, least = 0;
    struct row *rows = bt_calloc(N, sizeof(*rows));
    wait_for(1);
    for (uint32_t i = 0; i < N; i++) {
        set_row(&rows[i], g, NULL, 0);
    }
    for (uint32_t step = 0; step < 4 * N && least < 2; step++) {
        struct bt_wmask_job j[N] = {0};
        for (uint32_t i = 0; i < N; i++) {
            j[i] = (struct bt_wmask_job){.r = &rows[i].r, .at = i, .must = i == 3};
        }
        bt_wmask_pool_start(p, j, N, bits, W);
        bt_wmask_pool_wait(p, 0);
        uint32_t n = 0;
        least = UINT32_MAX;
        for (uint32_t i = 0; i < N; i++) {
            assert_int_equal(j[i].status, j[i].begun ? BT_OK : BT_AGAIN);
            had[i] += j[i].begun;
            n += j[i].begun;
            least = BT_MIN(least, had[i]);
        }
        assert_true(n >= 1 && j[3].begun);
    }
    assert_true(least >= 2); /* nobody is left out */
    for (uint32_t i = 0; i < N; i++) {
        forget(&rows[i]);
    }
    bt_wgrammar_unref(g);
    bt_wmask_pool_destroy(p);
    bt_wstats_destroy(stats);
    free(rows);
    free(bits);
}

/* What cannot be compiled says why; a submission that has ended is not compiled, and what waits
 * when the pool ends goes with it. */
static void test_compiling(void **state)
{
    (void)state;
    struct bt_wstats *stats = bt_wstats_create("m", "decode");
    struct bt_wmask_pool *p = start(stats, MODEL, 2048);
    struct bt_wgrammar *wrong = compile(p, BT_GRAMMAR_CHOICE, "[1", true),
                       *ends = compile(p, BT_GRAMMAR_CHOICE, "[\"a\"]", false),
                       *good = compile(p, BT_GRAMMAR_CHOICE, "[\"a\"]", true);
    wait_for(3);
    assert_true(wrong->status == BT_ERR_INVALID && wrong->detail[0] != '\0');
    assert_int_equal(ends->status, BT_ERR_INVALID);
    assert_non_null(strstr(ends->detail, "end-of-text token 2047"));
    assert_int_equal(good->status, BT_OK);
    bt_wgrammar_unref(wrong);
    bt_wgrammar_unref(ends);
    bt_wgrammar_unref(good);
    bt_wmask_pool_destroy(p);
    p = start(stats, "tests/no-such-model", 2048);
    struct bt_wgrammar *none = compile(p, BT_GRAMMAR_CHOICE, "[\"a\"]", true);
    wait_for(1);
    assert_int_equal(none->status, BT_ERR_UNAVAILABLE); /* another worker may have the files */
    assert_non_null(strstr(none->detail, "tests/no-such-model"));
    bt_wgrammar_unref(none);
    for (uint32_t i = 0; i < 100; i++) {
        bt_wgrammar_unref(compile(p, BT_GRAMMAR_CHOICE, "[\"a\"]", true));
    }
    bt_wmask_pool_destroy(p);
    bt_loop_poll(loop, 0);
    bt_wstats_destroy(stats);
}

static int set_up(void **state)
{
    (void)state;
    return bt_loop_create(&loop) == BT_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    bt_loop_destroy(loop);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokens_decide),
        cmocka_unit_test(test_drafts),
        cmocka_unit_test(test_the_end_waits_for_min_new),
        cmocka_unit_test(test_forced_text),
        cmocka_unit_test(test_the_pool_makes_all_masks),
        cmocka_unit_test(test_a_slow_mask_holds_up_nobody),
        cmocka_unit_test(test_no_time_for_masks),
        cmocka_unit_test(test_compiling),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
