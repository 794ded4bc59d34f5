/* The sampler: each option alone on small rows, the distribution of many seeds, determinism. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "common/base/philox.h"
#include "common/engine/ids.h"
#include "common/engine/sampler.h"

#define V 10

static struct bt_sampler *smp;

static int setup(void **state)
{
    (void)state;
    smp = bt_sampler_create(V);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    bt_sampler_destroy(smp);
    return 0;
}

static struct bt_engine_params defaults(float temperature)
{
    return (struct bt_engine_params){
        .temperature = temperature, .top_p = 1.0f, .repetition_penalty = 1.0f, .logprobs = -1};
}

/* Runs one row; tokens: n known so far, n_prompt of them prompt. */
static struct bt_engine_out run_row(const float *logits, const struct bt_engine_params *p,
                                    uint32_t position, const uint32_t *tokens, uint32_t n,
                                    uint32_t n_prompt, const uint32_t *mask)
{
    float l[V];
    memcpy(l, logits, sizeof(l));
    const struct bt_sampler_row row = {.logits = l,
                                       .params = p,
                                       .position = position,
                                       .tokens = tokens,
                                       .n_tokens = n,
                                       .n_prompt = n_prompt,
                                       .mask = mask};
    struct bt_engine_out o = {.slot = 5};
    bt_sampler_run(smp, &row, &o);
    assert_int_equal(o.slot, 5);
    return o;
}

static uint32_t pick(const float *logits, const struct bt_engine_params *p)
{
    struct bt_engine_out o = run_row(logits, p, 0, NULL, 0, 0, NULL);
    assert_false(o.bad);
    return o.token;
}

static void test_philox(void **state)
{
    (void)state;
    const uint32_t key[2] = {0, 0}, counter[4] = {0, 0, 0, 0};
    uint32_t out[4];
    bt_philox4x32(key, counter, out);
    const uint32_t want[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    assert_memory_equal(out, want, sizeof(want));
}

static void test_greedy(void **state)
{
    (void)state;
    const struct bt_engine_params p = defaults(0);
    const float a[V] = {1, 2, 7, 3, 7, 7, 0, -1, 6.999f, 2};
    assert_int_equal(pick(a, &p), 2); /* ties: the lowest id */
    const float b[V] = {-INFINITY, -INFINITY, -5, -INFINITY, -4, -9, -9, -9, -9, -9};
    assert_int_equal(pick(b, &p), 4);
}

static void test_bad(void **state)
{
    (void)state;
    const struct bt_engine_params p = defaults(0), t = defaults(1);
    float l[V] = {0};
    l[7] = NAN;
    assert_true(run_row(l, &p, 0, NULL, 0, 0, NULL).bad);
    assert_true(run_row(l, &t, 0, NULL, 0, 0, NULL).bad);
    l[7] = INFINITY;
    assert_true(run_row(l, &p, 0, NULL, 0, 0, NULL).bad);
    for (int i = 0; i < V; i++) {
        l[i] = -INFINITY;
    }
    assert_true(run_row(l, &t, 0, NULL, 0, 0, NULL).bad);
    const float ok[V] = {0};
    const uint32_t mask[1] = {0}; /* nothing is allowed */
    assert_true(run_row(ok, &p, 0, NULL, 0, 0, mask).bad);
}

static void test_logprobs(void **state)
{
    (void)state;
    struct bt_engine_params p = defaults(0);
    const float l[V] = {1, 5, 2, 5, 0, -3, 4, -INFINITY, 2, 1};
    double sum = 0;
    for (int i = 0; i < V; i++) {
        sum += exp(l[i]);
    }
    p.logprobs = 4;
    p.temperature = 0.3f; /* reported before temperature, truncation and bias */
    p.top_k = 1;
    const uint32_t ids[] = {6};
    const float bias[] = {50};
    p.n_bias = 1;
    p.bias_ids = ids;
    p.bias = bias;
    struct bt_engine_out o = run_row(l, &p, 0, NULL, 0, 0, NULL);
    assert_int_equal(o.token, 6);
    assert_true(fabs(o.logprob - (4 - log(sum))) < 1e-5);
    const uint32_t want[] = {1, 3, 6, 2};
    assert_int_equal(o.n_top, 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(o.top_id[i], want[i]);
        assert_true(fabs(o.top_logprob[i] - (l[want[i]] - log(sum))) < 1e-5);
    }
    p.logprobs = 20; /* more than there are tokens */
    assert_int_equal(run_row(l, &p, 0, NULL, 0, 0, NULL).n_top, V);
    p.logprobs = 0;
    o = run_row(l, &p, 0, NULL, 0, 0, NULL);
    assert_int_equal(o.n_top, 0);
    assert_true(o.logprob < 0);
}

static void test_penalties(void **state)
{
    (void)state;
    const float l[V] = {4, 3.9f, 3, -1, 0, 0, 0, 0, 0, 0};
    const uint32_t tokens[] = {0, 1, 1, 2}; /* prompt: 0, 1; generated: 1, 2 */
    struct bt_engine_params p = defaults(0);
    assert_int_equal(run_row(l, &p, 4, tokens, 4, 2, NULL).token, 0);
    p.repetition_penalty = 1.2f; /* 4 / 1.2 and 3.9 / 1.2 (once each), 3 / 1.2 */
    assert_int_equal(run_row(l, &p, 4, tokens, 4, 2, NULL).token, 0);
    const float m[V] = {4, 3.5f, 0, 0, 0, 0, 0, 0, 0, 0};
    const uint32_t only0[] = {0, 0, 0, 0, 0};
    assert_int_equal(run_row(m, &p, 5, only0, 5, 5, NULL).token, 1); /* 4/1.2 = 3.33 < 3.5 */
    p.repetition_penalty = 1.1f;                                     /* 3.63 > 3.5: not 4/1.1^5 */
    assert_int_equal(run_row(m, &p, 5, only0, 5, 5, NULL).token, 0);
    const float neg[V] = {-1, -1.05f, -9, -9, -9, -9, -9, -9, -9, -9};
    assert_int_equal(run_row(neg, &p, 1, only0, 1, 1, NULL).token, 1); /* -1 * 1.1 */

    p = defaults(0); /* frequency and presence see generated tokens only */
    p.frequency_penalty = 0.3f;
    assert_int_equal(run_row(m, &p, 5, only0, 5, 5, NULL).token, 0);
    assert_int_equal(run_row(m, &p, 5, only0, 5, 4, NULL).token, 0); /* 4 - 0.3 */
    assert_int_equal(run_row(m, &p, 5, only0, 5, 3, NULL).token, 1); /* 4 - 0.6 */
    p = defaults(0);
    p.presence_penalty = 0.6f;
    assert_int_equal(run_row(m, &p, 5, only0, 5, 4, NULL).token, 1);
    p.presence_penalty = 0.4f;
    assert_int_equal(run_row(m, &p, 5, only0, 5, 0, NULL).token, 0); /* once, however often */
    /* nothing is left behind in the scratch */
    p = defaults(0);
    p.repetition_penalty = 1.2f;
    assert_int_equal(run_row(m, &p, 0, NULL, 0, 0, NULL).token, 0);
}

static void test_min_new_and_mask(void **state)
{
    (void)state;
    const float l[V] = {0, 0, 0, 9, 8, 7, 0, 0, 0, 0};
    const uint32_t tokens[] = {1, 1, 1};
    struct bt_engine_params p = defaults(0);
    p.n_eos = 2;
    p.eos[0] = 3;
    p.eos[1] = 4;
    p.min_new = 2;
    assert_int_equal(run_row(l, &p, 3, tokens, 3, 2, NULL).token, 5); /* one generated */
    assert_int_equal(run_row(l, &p, 3, tokens, 3, 1, NULL).token, 3); /* two */
    const uint32_t mask[1] = {1u << 0 | 1u << 4 | 1u << 5};
    assert_int_equal(run_row(l, &p, 3, tokens, 3, 1, mask).token, 4);
}

/* Draws with n seeds; counts[i] of token i. */
static void draw_many(const float *l, const struct bt_engine_params *base, uint32_t n,
                      uint32_t *counts)
{
    memset(counts, 0, V * sizeof(*counts));
    for (uint32_t i = 0; i < n; i++) {
        struct bt_engine_params p = *base;
        p.seed = 0x9e3779b97f4a7c15ull * (i + 1);
        counts[run_row(l, &p, i % 7, NULL, 0, 0, NULL).token]++;
    }
}

static void check_distribution(const float *l, const struct bt_engine_params *p, const double *prob)
{
    enum { N = 40000 };
    uint32_t counts[V];
    draw_many(l, p, N, counts);
    double chi = 0;
    for (int i = 0; i < V; i++) {
        if (prob[i] == 0) {
            assert_int_equal(counts[i], 0);
        } else {
            chi += (counts[i] - N * prob[i]) * (counts[i] - N * prob[i]) / (N * prob[i]);
        }
    }
    assert_true(chi < 33.7); /* 9 degrees of freedom, p = 0.0001; the seeds are fixed */
}

static void softmax(const float *l, double t, double *prob)
{
    double sum = 0;
    for (int i = 0; i < V; i++) {
        prob[i] = exp(l[i] / t);
        sum += prob[i];
    }
    for (int i = 0; i < V; i++) {
        prob[i] /= sum;
    }
}

static void renormalise(double *prob, const int *keep)
{
    double sum = 0;
    for (int i = 0; i < V; i++) {
        prob[i] = keep[i] ? prob[i] : 0;
        sum += prob[i];
    }
    for (int i = 0; i < V; i++) {
        prob[i] /= sum;
    }
}

static const float shape[V] = {0.1f, 2.0f, 1.5f, -1, 0.7f, 1.9f, 0, -0.5f, 0.3f, 1.0f};

static void test_distribution(void **state)
{
    (void)state;
    double prob[V];
    static const float ts[] = {0.5f, 1.0f, 2.0f};
    for (size_t i = 0; i < BT_ARRAY_LEN(ts); i++) {
        struct bt_engine_params p = defaults(ts[i]);
        softmax(shape, ts[i], prob);
        check_distribution(shape, &p, prob);
    }
}

static void test_truncation(void **state)
{
    (void)state;
    double prob[V];
    struct bt_engine_params p = defaults(1);
    p.top_k = 3; /* 1, 5, 2 */
    softmax(shape, 1, prob);
    renormalise(prob, (const int[V]){0, 1, 1, 0, 0, 1, 0, 0, 0, 0});
    check_distribution(shape, &p, prob);

    p = defaults(1); /* probabilities 0.267, 0.241, 0.162, 0.098, ...: 0.6 needs three */
    p.top_p = 0.6f;
    check_distribution(shape, &p, prob);
    p.top_p = 0.5f;
    p.top_k = 2; /* of the two, 0.5 of the mass is reached by the first */
    assert_int_equal(pick(shape, &p), 1);
    p.top_p = 1e-6f; /* at least one stays */
    p.top_k = 0;
    assert_int_equal(pick(shape, &p), 1);

    p = defaults(1); /* p >= 0.55 max p: l >= 2 + ln 0.55 = 1.40 */
    p.min_p = 0.55f;
    check_distribution(shape, &p, prob);

    p = defaults(1); /* ties: the lower ids stay */
    const float flat[V] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    uint32_t counts[V];
    p.top_k = 2;
    draw_many(flat, &p, 500, counts);
    assert_int_equal(counts[0] + counts[1], 500);
    assert_true(counts[0] > 100 && counts[1] > 100);
    p.top_k = 0;
    p.top_p = 0.35f; /* 4 of 10 */
    draw_many(flat, &p, 2000, counts);
    assert_int_equal(counts[0] + counts[1] + counts[2] + counts[3], 2000);
    assert_true(counts[3] > 100);
}

/* The documented formula, written out. */
static void test_formula(void **state)
{
    (void)state;
    for (uint32_t pos = 0; pos < 50; pos++) {
        struct bt_engine_params p = defaults(0.8f);
        p.seed = 0xfedcba9876543210ull;
        p.choice = 3;
        double best = -INFINITY;
        uint32_t want = 0;
        for (uint32_t i = 0; i < V; i++) {
            const uint32_t key[2] = {0x76543210, 0xfedcba98}, counter[4] = {pos, 3, i / 4, 0};
            uint32_t w[4];
            bt_philox4x32(key, counter, w);
            double u = ((w[i % 4] >> 9) + 0.5) * 0x1p-23, g = -log(-log(u));
            if (shape[i] / 0.8f + g > best) {
                best = shape[i] / 0.8f + g;
                want = i;
            }
        }
        assert_int_equal(run_row(shape, &p, pos, NULL, 0, 0, NULL).token, want);
    }
}

static void test_determinism(void **state)
{
    (void)state;
    struct bt_engine_params p = defaults(1);
    p.seed = 42;
    uint32_t seq[64], other = 0, differ[3] = {0};
    for (uint32_t i = 0; i < 64; i++) {
        seq[i] = run_row(shape, &p, i, NULL, 0, 0, NULL).token;
    }
    for (uint32_t i = 0; i < 64; i++) {
        assert_int_equal(run_row(shape, &p, i, NULL, 0, 0, NULL).token, seq[i]);
        struct bt_engine_params q = p;
        q.seed = 42ull << 32;
        differ[0] += run_row(shape, &q, i, NULL, 0, 0, NULL).token != seq[i];
        q = p;
        q.choice = 1;
        differ[1] += run_row(shape, &q, i, NULL, 0, 0, NULL).token != seq[i];
        differ[2] += run_row(shape, &p, i + 64, NULL, 0, 0, NULL).token != seq[i];
        other |= seq[i] != seq[0];
    }
    assert_true(other && differ[0] > 20 && differ[1] > 20 && differ[2] > 20);
}

/* A wide vocabulary, where most tokens are skipped as unable to win. */
static void test_skipping(void **state)
{
    (void)state;
    enum { W = 50000 };
    struct bt_sampler *s = bt_sampler_create(W);
    float *l = malloc(W * sizeof(*l));
    struct bt_engine_params p = defaults(1);
    for (uint32_t pos = 0; pos < 4; pos++) {
        double best = -INFINITY;
        uint32_t want = 0;
        for (uint32_t i = 0; i < W; i++) {
            const uint32_t key[2] = {0, 0}, counter[4] = {pos, 0, i / 4, 0};
            uint32_t w[4];
            bt_philox4x32(key, counter, w);
            l[i] = (float)((i * 2654435761u >> 16) % 4000) / 100.0f;
            double v = l[i] - log(-log(((w[i % 4] >> 9) + 0.5) * 0x1p-23));
            if (v > best) {
                best = v;
                want = i;
            }
        }
        struct bt_engine_out o = {0};
        const struct bt_sampler_row row = {.logits = l, .params = &p, .position = pos};
        bt_sampler_run(s, &row, &o);
        assert_int_equal(o.token, want);
    }
    free(l);
    bt_sampler_destroy(s);
}

static void test_check(void **state)
{
    (void)state;
    const char *what;
    struct bt_engine_params p = defaults(1);
    assert_int_equal(bt_sampler_check(&p, V, &what), BT_OK);
#define BAD(change)                                                                                \
    do {                                                                                           \
        struct bt_engine_params q = p;                                                             \
        change;                                                                                    \
        assert_int_equal(bt_sampler_check(&q, V, &what), BT_ERR_INVALID);                          \
        assert_non_null(what);                                                                     \
    } while (0)
    BAD(q.temperature = -1);
    BAD(q.temperature = NAN);
    BAD(q.temperature = BT_ENGINE_MAX_TEMPERATURE + 1);
    BAD(q.top_p = 0);
    BAD(q.top_p = 1.1f);
    BAD(q.min_p = -0.1f);
    BAD(q.repetition_penalty = 0);
    BAD(q.repetition_penalty = BT_ENGINE_MAX_REPETITION + 1);
    BAD(q.frequency_penalty = INFINITY);
    BAD(q.frequency_penalty = BT_ENGINE_MAX_PENALTY + 1);
    BAD(q.presence_penalty = -BT_ENGINE_MAX_PENALTY - 1);
    BAD(q.logprobs = 21);
    BAD(q.logprobs = -2);
    BAD(q.n_eos = 17);
    BAD(q.n_bias = 1);
    const uint32_t id = V;
    const float b = 1;
    BAD((q.n_bias = 1, q.bias_ids = &id, q.bias = &b));
    p.temperature = BT_ENGINE_MAX_TEMPERATURE;
    p.repetition_penalty = BT_ENGINE_MAX_REPETITION;
    p.frequency_penalty = p.presence_penalty = -BT_ENGINE_MAX_PENALTY;
    assert_int_equal(bt_sampler_check(&p, V, &what), BT_OK);
}

/* Ids without a token have the largest logits: none is drawn or listed, whatever the parameters,
 * and they stay in the sum of the logprobs. */
static void test_ids_without_a_token(void **state)
{
    (void)state;
    float l[V];
    uint32_t known[(V + 31) / 32] = {0};
    double sum = 0;
    for (uint32_t i = 0; i < V; i++) {
        bool is = i % 5 != 3 && i < V - 3;
        known[i / 32] |= (uint32_t)is << i % 32;
        l[i] = is ? (float)(i % 11) * 0.1f : 9;
        sum += exp(l[i]);
    }
    for (uint32_t n = 0; n < 200; n++) {
        float row_logits[V];
        memcpy(row_logits, l, sizeof(l));
        struct bt_engine_params p = defaults(n % 4 == 0 ? 0 : 1);
        p.top_k = n % 4 == 1 ? 5 : 0;
        p.top_p = n % 4 == 2 ? 0.5f : 1;
        p.seed = n;
        p.logprobs = 20;
        const struct bt_sampler_row row = {
            .logits = row_logits, .params = &p, .position = n, .known = known};
        struct bt_engine_out o = {0};
        bt_sampler_run(smp, &row, &o);
        assert_false(o.bad);
        assert_true(bt_ids_bit(known, o.token));
        assert_true(fabs(o.logprob - (l[o.token] - log(sum))) < 1e-4);
        for (uint32_t k = 0; k < o.n_top; k++) {
            assert_true(bt_ids_bit(known, o.top_id[k]));
        }
        struct bt_engine_out prompt = {0};
        bt_sampler_logprob(l, V, known, 3, 20, &prompt); /* a prompt may have such an id */
        assert_true(fabs(prompt.logprob - (9 - log(sum))) < 1e-4);
        assert_int_equal(prompt.rank, 1);
        for (uint32_t k = 0; k < o.n_top; k++) { /* ranks are places in the list */
            struct bt_engine_out one = {0};
            bt_sampler_logprob(l, V, known, o.top_id[k], 0, &one);
            assert_int_equal(one.rank, k + 1);
        }
        assert_memory_equal(prompt.top_id, o.top_id, o.n_top * sizeof(o.top_id[0]));
    }
    memset(known, 0, sizeof(known)); /* nothing can be drawn: bad, as with a mask of zeros */
    struct bt_engine_params p = defaults(1);
    const struct bt_sampler_row row = {.logits = l, .params = &p, .known = known};
    struct bt_engine_out o = {0};
    bt_sampler_run(smp, &row, &o);
    assert_true(o.bad);
}

/* Which tokens of a hundred positions are drawn, as bits. */
static uint32_t drawn(const float *l, const struct bt_engine_params *p)
{
    uint32_t bits = 0;
    for (uint32_t pos = 0; pos < 100; pos++) {
        bits |= 1u << run_row(l, p, pos, NULL, 0, 0, NULL).token;
    }
    return bits;
}

/* By hand: 0.5, 0.25, 0.125, 0.125 have an entropy of 1.2130; their surprise is 0.69, 1.39, 2.08,
 * 2.08, so the second is the most typical one, then the first. */
static void test_typical(void **state)
{
    (void)state;
    struct bt_engine_params p = defaults(1);
    float l[V];
    const float share[V] = {0.5f, 0.25f, 0.125f, 0.125f};
    for (int i = 0; i < V; i++) {
        l[i] = logf(share[i]);
    }
    assert_int_equal(drawn(l, &p), 15);
    p.typical_p = 0.2f;
    assert_int_equal(drawn(l, &p), 2);
    p.typical_p = 0.26f;
    assert_int_equal(drawn(l, &p), 3);
    p.typical_p = 0.8f;
    assert_int_equal(drawn(l, &p), 7);
    p.typical_p = 1;
    assert_int_equal(drawn(l, &p), 15);
    p.top_k = 2; /* of two: 2/3 and 1/3, entropy 0.6365, surprise 0.405 and 1.0986 */
    p.typical_p = 0.5f;
    assert_int_equal(drawn(l, &p), 1);
}

static void test_xtc(void **state)
{
    (void)state;
    struct bt_engine_params p = defaults(1);
    float l[V];
    const float share[V] = {0.5f, 0.25f, 0.125f, 0.125f};
    for (int i = 0; i < V; i++) {
        l[i] = logf(share[i]);
    }
    p.xtc_probability = 1;
    p.xtc_threshold = 0.2f;
    assert_int_equal(drawn(l, &p), 14); /* the last one that reaches 0.2 stays */
    p.xtc_threshold = 0.4f;
    assert_int_equal(drawn(l, &p), 15); /* one alone stays */
    p.xtc_threshold = 0.1f;
    assert_int_equal(drawn(l, &p), 8);
    p.xtc_probability = 0.5f;
    p.xtc_threshold = 0.2f;
    uint32_t first = 0;
    for (uint32_t pos = 0; pos < 2000; pos++) { /* 0 where XTC does nothing: half of 0.5 */
        first += run_row(l, &p, pos, NULL, 0, 0, NULL).token == 0;
    }
    assert_in_range(first, 420, 580);
    p.temperature = 0; /* the most likely token */
    assert_int_equal(drawn(l, &p), 1);
}

/* DoLa, by hand: the filter is a tenth of the most likely token that may be drawn, and the rest is
 * in the order of the last layer's logprob minus the early one's. */
static void test_dola(void **state)
{
    (void)state;
    struct bt_engine_params p = defaults(0);
    const float last[V] = {5, 4.9f, 4, 2.6f, 0, 0, 0, 0, 0, 0};
    const float early[V] = {3, 2.9f, 1, -5, -9, 0, 0, 0, 0, 0};
    float l[V];
    struct bt_sampler_row row = {.logits = l, .params = &p, .early = early};
    struct bt_engine_out o = {0};
    p.logprobs = 0;
    memcpy(l, last, sizeof(l));
    bt_sampler_run(smp, &row, &o); /* 3 is the best, but 2.4 below the largest: less than a tenth */
    assert_int_equal(o.token, 2);
    double sum = 0;
    for (int i = 0; i < V; i++) {
        sum += exp(last[i]);
    }
    assert_true(fabs(o.logprob - (4 - log(sum))) < 1e-5); /* the model's own */
    const uint32_t mask[1] = {~3u};                       /* without 0 and 1 a tenth is of 2's */
    row.mask = mask;
    memcpy(l, last, sizeof(l));
    bt_sampler_run(smp, &row, &o);
    assert_int_equal(o.token, 3);
    row.mask = NULL;
    p.min_new = p.n_eos = 1; /* the same of an end that may not come yet */
    p.eos[0] = 0;
    memcpy(l, last, sizeof(l));
    l[2] = -INFINITY;
    bt_sampler_run(smp, &row, &o);
    assert_int_equal(o.token, 3);
    /* penalties come behind: they see the difference, here of two negative numbers */
    p = defaults(0);
    p.repetition_penalty = 2;
    const float flat[V] = {0};
    const uint32_t seen[] = {0};
    row = (struct bt_sampler_row){
        .logits = l, .params = &p, .early = flat, .tokens = seen, .n_tokens = 1, .n_prompt = 1};
    memcpy(l, last, sizeof(l));
    bt_sampler_run(smp, &row, &o);
    assert_int_equal(o.token, 1);
    float bad[V] = {0};
    bad[4] = NAN;
    row.early = bad;
    memcpy(l, last, sizeof(l));
    bt_sampler_run(smp, &row, &o);
    assert_true(o.bad);
}

static void test_divergence(void **state)
{
    (void)state;
    const float a[2] = {0, 0}, b[2] = {logf(0.9f), logf(0.1f)}, bad[2] = {0, NAN};
    double p[2] = {0.5, 0.5}, q[2] = {0.9, 0.1}, want = 0;
    for (int i = 0; i < 2; i++) {
        double m = (p[i] + q[i]) / 2;
        want += m * log(m / p[i]) + m * log(m / q[i]);
    }
    assert_true(fabs(bt_sampler_divergence(a, b, 2) - want) < 1e-6);
    assert_true(fabs(bt_sampler_divergence(a, a, 2)) < 1e-6);
    assert_true(bt_sampler_divergence(a, bad, 2) == -INFINITY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_bad),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_penalties),
        cmocka_unit_test(test_min_new_and_mask),
        cmocka_unit_test(test_distribution),
        cmocka_unit_test(test_truncation),
        cmocka_unit_test(test_formula),
        cmocka_unit_test(test_determinism),
        cmocka_unit_test(test_skipping),
        cmocka_unit_test(test_check),
        cmocka_unit_test(test_ids_without_a_token),
        cmocka_unit_test(test_typical),
        cmocka_unit_test(test_xtc),
        cmocka_unit_test(test_dola),
        cmocka_unit_test(test_divergence),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
