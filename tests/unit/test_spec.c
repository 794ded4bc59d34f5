/* Drafts: the index of a sequence's own text against a plain search, and how many drafts a step
 * gets: none that do not pay, all that do, trials within their share of the time. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/spec/choose.h"
#include "common/spec/match.h"

#define LEN 3000

static uint32_t rng(uint64_t *s)
{
    *s = *s * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*s >> 33);
}

static struct bt_spec_match *index_new(bt_spec_kind_t kind, uint32_t len)
{
    struct bt_spec_match *m = calloc(1, bt_spec_match_bytes(len));
    bt_spec_match_init(m, kind, len);
    return m;
}

/* The length of the longest suffix of t[0, n) that ends before, at least `least`; the last place of
 * those that have it. */
static uint32_t plain(const uint32_t *t, uint32_t n, uint32_t least, uint32_t *end_p)
{
    uint32_t best = 0;
    for (uint32_t end = n - 1; end >= 1; end--) {
        uint32_t len = 0;
        while (len < end && len < BT_SPEC_MATCH_MAX && t[end - 1 - len] == t[n - 1 - len]) {
            len++;
        }
        if (len >= least && len > best) {
            best = len;
            *end_p = end;
        }
    }
    return best;
}

/* Text of few enough repeated pairs that the chains are not cut. */
static void test_finds_the_longest_suffix(void **state)
{
    (void)state;
    uint64_t s = 3;
    uint32_t t[LEN];
    struct bt_spec_match *m = index_new(BT_SPEC_SUFFIX, LEN);
    struct bt_spec_draft d;
    uint32_t found = 0;
    for (uint32_t n = 0; n < LEN;) {
        uint32_t copy = n > 100 && rng(&s) % 3 == 0 ? 1 + rng(&s) % 40 : 0;
        uint32_t from = copy ? rng(&s) % (n - 50) : 0;
        t[n] = copy ? t[from] : rng(&s) % 500;
        n++;
        for (uint32_t i = 1; i < copy && n < LEN; i++) {
            t[n++] = t[from + i];
        }
        while (!bt_spec_match_extend(m, t, n, 7)) { /* in pieces */
        }
        uint32_t end = 0, len = plain(t, n, 2, &end);
        bt_spec_match_find(m, t, n, 8, &d);
        assert_int_equal(d.match, len);
        assert_int_equal(d.n, len ? 8 : 0);
        for (uint32_t i = 0; i < d.n; i++) {
            assert_int_equal(d.tokens[i], end + i < n ? t[end + i] : d.tokens[end + i - n]);
        }
        found += len > 4;
    }
    assert_true(found > 20);
    free(m);
}

static void test_a_period_goes_on(void **state)
{
    (void)state;
    uint32_t t[64];
    struct bt_spec_match *m = index_new(BT_SPEC_SUFFIX, 64);
    struct bt_spec_draft d;
    for (uint32_t i = 0; i < 9; i++) {
        t[i] = i % 3;
    }
    bt_spec_match_find(m, t, 0, 16, &d);
    assert_int_equal(d.n, 0); /* no text */
    assert_true(bt_spec_match_extend(m, t, 9, 64));
    bt_spec_match_find(m, t, 9, 100, &d);
    assert_int_equal(d.n, BT_SPEC_MAX);
    for (uint32_t i = 0; i < d.n; i++) {
        assert_int_equal(d.tokens[i], i % 3);
    }
    bt_spec_match_find(m, t, 9, 2, &d);
    assert_int_equal(d.n, 2);
    free(m);
}

static void test_ngram_takes_the_latest_three(void **state)
{
    (void)state;
    static const uint32_t t[] = {1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 7, 8, 1, 2, 3, 4};
    uint32_t n = BT_ARRAY_LEN(t);
    struct bt_spec_match *m = index_new(BT_SPEC_NGRAM, n), *longest = index_new(BT_SPEC_SUFFIX, n);
    struct bt_spec_draft d;
    assert_true(bt_spec_match_extend(m, t, n, n) && bt_spec_match_extend(longest, t, n, n));
    bt_spec_match_find(m, t, n, 1, &d);
    assert_int_equal(d.tokens[0], 60);
    bt_spec_match_find(longest, t, n, 1, &d);
    assert_int_equal(d.tokens[0], 50); /* there the text is 1 2 3 4, too */
    free(m);
    free(longest);
}

/* A text of one token has each place in one chain: a search ends. */
static void test_a_hostile_text_is_bounded(void **state)
{
    (void)state;
    enum { MANY = 200000 };
    uint32_t *t = calloc(MANY, sizeof(*t));
    struct bt_spec_match *m = index_new(BT_SPEC_SUFFIX, MANY);
    struct bt_spec_draft d;
    assert_true(bt_spec_match_bytes(MANY) < 9 * MANY);
    assert_true(bt_spec_match_extend(m, t, MANY, UINT32_MAX));
    bt_spec_match_find(m, t, MANY, 4, &d);
    assert_int_equal(d.match, BT_SPEC_MATCH_MAX);
    free(m);
    free(t);
}

static void test_names(void **state)
{
    (void)state;
    assert_int_equal(bt_spec_kind("off"), BT_SPEC_OFF);
    assert_int_equal(bt_spec_kind("auto"), BT_SPEC_AUTO);
    assert_int_equal(bt_spec_kind("ngram"), BT_SPEC_NGRAM);
    assert_int_equal(bt_spec_kind("draft"), BT_SPEC_MODEL);
    assert_int_equal(bt_spec_kind("mtp"), BT_SPEC_MTP);
    assert_int_equal(bt_spec_kind("suffix "), BT_SPEC_KINDS);
}

/* ---- how many ---- */

static const struct bt_batch_cost bound_by_memory = {
    .base_ns = 5e6, .token_ns = BT_BATCH_TOKEN_NS(2e4), .kv_ns = 1};
static const struct bt_batch_cost bound_by_arithmetic = {
    .base_ns = 1e3, .token_ns = BT_BATCH_TOKEN_NS(2e5), .kv_ns = 1};

static uint32_t choose(const struct bt_batch_cost *c, float rate, uint32_t n,
                       struct bt_spec_row *rows, struct bt_spec_trial *t)
{
    struct bt_batch_work w = {.tokens = n, .kv = 500.0 * n};
    for (uint32_t i = 0; i < n; i++) {
        rows[i] = (struct bt_spec_row){.rate = rate, .n = 8, .pos = 500};
    }
    uint32_t m = bt_spec_choose(c, &w, n, 1000, rows, n, t), sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        assert_true(rows[i].take <= rows[i].n);
        sum += rows[i].take;
    }
    assert_int_equal(sum, m);
    return m;
}

static void test_takes_what_pays(void **state)
{
    (void)state;
    struct bt_spec_row rows[64];
    struct bt_spec_trial t = {.n = 1000};
    assert_int_equal(choose(&bound_by_memory, 0.95f, 1, rows, &t), 8);
    assert_int_equal(choose(&bound_by_memory, 0.95f, 64, rows, &t), 8 * 64);
    uint32_t some = choose(&bound_by_memory, 0.5f, 64, rows, &t); /* the last ones do not pay */
    assert_true(some >= 64 && some < 8 * 64);
    t = (struct bt_spec_trial){.n = 1000, .credit_ns = -1e12};
    assert_int_equal(choose(&bound_by_arithmetic, 0.95f, 1, rows, &t), 0);
    assert_int_equal(choose(&bound_by_arithmetic, 0.95f, 64, rows, &t), 0);
    assert_int_equal(choose(&bound_by_memory, 0.001f, 64, rows, &t), 0);
    /* No more than there is room for. */
    struct bt_batch_work w = {.tokens = 1, .kv = 500};
    rows[0] = (struct bt_spec_row){.rate = 0.95f, .n = 8, .pos = 500};
    assert_true(bt_spec_choose(&bound_by_memory, &w, 1, 3, rows, 1, &t) <= 3);
}

/* The row with the better rate gets more. */
static void test_each_row_by_its_rate(void **state)
{
    (void)state;
    struct bt_spec_row rows[2] = {{.rate = 0.9f, .n = 8, .pos = 9},
                                  {.rate = 0.2f, .n = 8, .pos = 9}};
    struct bt_batch_work w = {.tokens = 2, .kv = 18};
    struct bt_spec_trial t = {.n = 1000};
    const struct bt_batch_cost c = {.base_ns = 1e6, .token_ns = BT_BATCH_TOKEN_NS(2e5)};
    assert_true(bt_spec_choose(&c, &w, 2, 1000, rows, 2, &t) > 0);
    assert_true(rows[0].take > rows[1].take);
}

/* Sure drafts of many rows make more tokens a second, but the row without any, or with unsure ones,
 * keeps half of its pace. */
static void test_other_rows_keep_their_pace(void **state)
{
    (void)state;
    const struct bt_batch_cost c = {.base_ns = 1e6, .token_ns = BT_BATCH_TOKEN_NS(2e5)};
    struct bt_spec_row rows[9];
    struct bt_spec_trial t = {.n = 1000, .credit_ns = -1e12};
    const double alone = 1e6 + 9 * 2e5;
    for (uint32_t n = 8; n <= 9; n++) { /* the ninth row has no drafts, or one that is unsure */
        for (uint32_t i = 0; i < n; i++) {
            rows[i] = (struct bt_spec_row){.rate = 0.99f, .n = 16, .pos = 9};
        }
        rows[8].rate = n == 9 ? 0.1f : 0;
        struct bt_batch_work w = {.tokens = 9, .kv = 81};
        uint32_t m = bt_spec_choose(&c, &w, 9, 1000, rows, n, &t);
        assert_true(m > 0 && alone + m * 2e5 <= 2 * alone);
    }
    for (uint32_t i = 0; i < 9; i++) { /* all are sure: each gains more than the step costs */
        rows[i] = (struct bt_spec_row){.rate = 0.99f, .n = 16, .pos = 9};
    }
    struct bt_batch_work w = {.tokens = 9, .kv = 81};
    assert_true(alone + bt_spec_choose(&c, &w, 9, 1000, rows, 9, &t) * 2e5 > 3 * alone);
    /* The same of a model. */
    const float sure[9] = {0.99f, 0.99f, 0.99f, 0.99f, 0.99f, 0.99f, 0.99f, 0.99f, 0.99f};
    uint32_t k = bt_spec_choose_passes(&c, &w, 9, 16, sure, 9, 1e4, &t);
    assert_true(alone + k * (9 * 2e5 + 1e4) > 3 * alone);
    k = bt_spec_choose_passes(&c, &w, 9, 16, sure, 8, 1e4, &t);
    assert_true(alone + k * (8 * 2e5 + 1e4) <= 2 * alone);
}

static void test_trials_take_their_share(void **state)
{
    (void)state;
    struct bt_spec_row rows[4];
    struct bt_spec_trial t = {0};
    double all = 0, lost = 0;
    uint32_t first = 0, later = 0;
    for (int i = 0; i < 20000; i++) {
        uint32_t m = choose(&bound_by_arithmetic, 0.3f, 4, rows, &t);
        double step = 1e3 + 2e5 * (4 + m) + 500 * (4 + m), without = 1e3 + 2e5 * 4 + 2000;
        bt_spec_trial_over(&t, step);
        first += i < 16 && m > 0;
        later += i >= 16 && m > 0;
        all += step;
        lost += step - without;
    }
    assert_int_equal(first, 16);
    assert_true(later > 100);
    assert_true(lost < 0.011 * all);
}

/* A model that drafts costs a pass for each draft of all rows. */
static void test_passes_of_a_model(void **state)
{
    (void)state;
    const float sure[4] = {0.9f, 0.9f, 0.9f, 0.9f}, unsure[4] = {0.1f, 0.1f, 0.2f, 0.1f};
    struct bt_batch_work w = {.tokens = 4, .kv = 2000};
    struct bt_spec_trial t = {.n = 1000, .credit_ns = -1e12};
    const struct bt_batch_cost *c = &bound_by_memory;
    uint32_t cheap = bt_spec_choose_passes(c, &w, 4, 8, sure, 4, 2e5, &t);
    uint32_t dear = bt_spec_choose_passes(c, &w, 4, 8, sure, 4, 2e6, &t);
    assert_true(cheap > dear && dear > 0 && cheap <= 8);
    assert_int_equal(bt_spec_choose_passes(c, &w, 4, 8, sure, 4, 6e6, &t), 0);
    assert_int_equal(bt_spec_choose_passes(c, &w, 4, 8, unsure, 4, 2e6, &t), 0);
    assert_int_equal(bt_spec_choose_passes(c, &w, 4, 0, sure, 4, 2e5, &t), 0);
    t = (struct bt_spec_trial){0};
    assert_int_equal(bt_spec_choose_passes(c, &w, 4, 8, unsure, 4, 2e6, &t), 2);
    assert_true(t.now);
}

static void test_learns_rates(void **state)
{
    (void)state;
    struct bt_spec_rates own, all;
    bt_spec_rates_init(&own);
    bt_spec_rates_init(&all);
    float before = bt_spec_rate(&all, 20);
    for (int i = 0; i < 60; i++) {
        bt_spec_rates_learn(&own, &all, 20, 4, 4);
        bt_spec_rates_learn(&own, &all, 2, 4, 0);
    }
    assert_true(bt_spec_rate(&own, 20) > 0.99f && bt_spec_rate(&own, 2) < 0.01f);
    assert_true(bt_spec_rate(&all, 20) > before);
    for (int i = 0; i < 200; i++) { /* three of four: what is behind the refused one says nothing */
        bt_spec_rates_learn(&own, &all, 5, 8, 3);
    }
    assert_true(fabsf(bt_spec_rate(&own, 5) - 0.75f) < 0.15f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finds_the_longest_suffix),
        cmocka_unit_test(test_a_period_goes_on),
        cmocka_unit_test(test_ngram_takes_the_latest_three),
        cmocka_unit_test(test_a_hostile_text_is_bounded),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_takes_what_pays),
        cmocka_unit_test(test_each_row_by_its_rate),
        cmocka_unit_test(test_other_rows_keep_their_pace),
        cmocka_unit_test(test_trials_take_their_share),
        cmocka_unit_test(test_passes_of_a_model),
        cmocka_unit_test(test_learns_rates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
