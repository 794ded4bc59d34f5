/* The fit of a step's cost: it finds what steps cost, keeps what it is not told, never goes below
 * zero, and a machine that holds a step up does not lead it astray. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/batch/fit.h"

static const struct bt_batch_cost prior = {
    .base_ns = 1e6, .token_ns = BT_BATCH_TOKEN_NS(1e4), .kv_ns = 10, .attn_ns = 1};
/* A GPU's: rows are nearly free until 256, then each token costs. */
static const struct bt_batch_cost truth = {
    .base_ns = 4.9e6, .token_ns = {2e3, 1e3, 4e3, 22010}, .kv_ns = 51.8, .attn_ns = 0.9625};

static uint64_t rng(uint64_t *s)
{
    *s = *s * 6364136223846793005ull + 1442695040888963407ull;
    return *s >> 33;
}

static double uniform(uint64_t *s)
{
    return (double)(rng(s) % 1000000) / 1e6;
}

static struct bt_batch_work decode_step(uint64_t *s)
{
    double rows = (double)(1 + rng(s) % 200);
    return (struct bt_batch_work){.tokens = rows, .kv = rows * (500 + (double)(rng(s) % 8000))};
}

static struct bt_batch_work prompt_step(uint64_t *s)
{
    double n = (double)(64 * (1 + rng(s) % 128)), h = (double)(rng(s) % 32768);
    return (struct bt_batch_work){.tokens = n, .attn = n * (h + n / 2), .prompt = true};
}

static void near(double got, double want, double share)
{
    if (fabs(got - want) > share * want) {
        fail_msg("%g is not within %g of %g", got, share, want);
    }
}

static double mean_error(const struct bt_batch_fit *f, bool prompt, uint64_t *s)
{
    double sum = 0;
    for (int i = 0; i < 200; i++) {
        struct bt_batch_work w = prompt ? prompt_step(s) : decode_step(s);
        sum += fabs(bt_batch_work_ns(&f->cost, &w) / bt_batch_work_ns(&truth, &w) - 1) / 200;
    }
    return sum;
}

static void test_finds_the_truth(void **state)
{
    (void)state;
    struct bt_batch_fit f;
    uint64_t s = 1;
    bt_batch_fit_init(&f, &prior);
    for (int i = 0; i < 400; i++) {
        struct bt_batch_work w = i % 2 ? prompt_step(&s) : decode_step(&s);
        double noise = 0.95 + 0.1 * uniform(&s);
        (void)bt_batch_fit_step(&f, &w, noise * bt_batch_work_ns(&truth, &w));
    }
    assert_true(mean_error(&f, false, &s) < 0.05);
    assert_true(mean_error(&f, true, &s) < 0.05);
    near(f.cost.kv_ns, truth.kv_ns, 0.1);
    near(f.cost.attn_ns, truth.attn_ns, 0.1);
    near(f.cost.token_ns[3], truth.token_ns[3], 0.1);
}

static void test_a_handful_of_steps_is_enough_to_begin(void **state)
{
    (void)state;
    struct bt_batch_fit f;
    uint64_t s = 2;
    bt_batch_fit_init(&f, &prior);
    for (int i = 0; i < 8; i++) {
        struct bt_batch_work w = i % 2 ? prompt_step(&s) : decode_step(&s);
        (void)bt_batch_fit_step(&f, &w, bt_batch_work_ns(&truth, &w));
    }
    assert_true(mean_error(&f, true, &s) < 0.3);
    assert_true(mean_error(&f, false, &s) < 0.5);
}

/* A device hundreds of times slower or faster than the prior says. */
static void test_a_prior_that_is_far_off(void **state)
{
    (void)state;
    for (int slower = 0; slower < 2; slower++) {
        struct bt_batch_fit f;
        struct bt_batch_cost far = prior;
        uint64_t s = 5;
        double by = slower ? 1.0 / 800 : 800;
        far.base_ns *= by;
        far.kv_ns *= by;
        far.attn_ns *= by;
        for (int i = 0; i < BT_BATCH_SEGMENTS; i++) {
            far.token_ns[i] *= by;
        }
        bt_batch_fit_init(&f, &far);
        for (int i = 0; i < 24; i++) {
            struct bt_batch_work w = i % 2 ? prompt_step(&s) : decode_step(&s);
            (void)bt_batch_fit_step(&f, &w, bt_batch_work_ns(&truth, &w));
        }
        assert_true(mean_error(&f, true, &s) < 0.15);
        assert_true(mean_error(&f, false, &s) < 0.15);
        /* One prompt alone costs what it costs, though steps held sixteen of them. */
        bt_batch_fit_init(&f, &far);
        for (int i = 0; i < 200; i++) {
            struct bt_batch_work w = {.tokens = i % 8 ? 4096 : 256, .prompt = true};
            (void)bt_batch_fit_step(&f, &w, 2e6 + 4e4 * w.tokens);
        }
        struct bt_batch_work one = {.tokens = 256, .prompt = true};
        near(bt_batch_work_ns(&f.cost, &one), 2e6 + 4e4 * 256, 0.05);
    }
}

/* A device of another shape than the prior: tokens cost it fifty times as much beside the base.
 * What a worker computes at its start is enough. */
static void test_a_prior_of_another_shape(void **state)
{
    (void)state;
    static const struct bt_batch_cost far = {
        .base_ns = 5e5, .token_ns = BT_BATCH_TOKEN_NS(900), .kv_ns = 1, .attn_ns = 0.1};
    static const struct {
        double rows, depth, n;
    } shapes[] = {{1, 16, 1}, {1, 0, 16},   {8, 16, 1},  {1, 0, 512},     {1, 0, 256},
                  {1, 0, 64}, {1, 0, 2048}, {64, 16, 1}, {1, 6144, 2048}, {1, 8191, 1}};
    struct bt_batch_fit f;
    bt_batch_fit_init(&f, &far);
    for (size_t i = 0; i < 2 * BT_ARRAY_LEN(shapes); i++) {
        double rows = shapes[i / 2].rows, h = shapes[i / 2].depth, n = shapes[i / 2].n;
        bool prompt = n > 1;
        struct bt_batch_work w = {.tokens = rows * n,
                                  .kv = prompt ? 0 : rows * h,
                                  .attn = prompt ? rows * n * (h + n / 2) : 0,
                                  .prompt = prompt};
        (void)bt_batch_fit_step(&f, &w, 5e5 + 45e3 * w.tokens);
    }
    for (double n = 16; n <= 2048; n *= 2) {
        struct bt_batch_work w = {.tokens = n, .attn = n * n / 2, .prompt = true};
        near(bt_batch_work_ns(&f.cost, &w), 5e5 + 45e3 * n, 0.2);
    }
}

/* Tokens cost hundreds of thousands of times what the prior says beside the base, and a device so
 * slow gets few steps done at its start. The first prompts say it. */
static void test_a_prior_that_knows_of_no_tokens(void **state)
{
    (void)state;
    static const struct bt_batch_cost far = {
        .base_ns = 1e5, .token_ns = BT_BATCH_TOKEN_NS(40), .kv_ns = 0.3, .attn_ns = 0.02};
    static const double tokens[] = {1, 1, 16, 16, 100, 100, 100, 100};
    struct bt_batch_fit f;
    bt_batch_fit_init(&f, &far);
    for (size_t i = 0; i < BT_ARRAY_LEN(tokens); i++) {
        double n = tokens[i];
        struct bt_batch_work w = {
            .tokens = n, .kv = n > 1 ? 0 : 16, .attn = n > 1 ? n * n / 2 : 0, .prompt = n > 1};
        (void)bt_batch_fit_step(&f, &w, 1e6 + 1e7 * n);
    }
    for (double n = 50; n <= 100; n *= 2) {
        struct bt_batch_work w = {.tokens = n, .attn = n * n / 2, .prompt = true};
        near(bt_batch_work_ns(&f.cost, &w), 1e6 + 1e7 * n, n == 100 ? 0.1 : 0.6);
    }
    /* nineteen of them in a step, more tokens than were ever seen in one, come not for nothing */
    const struct bt_batch_work many = {.tokens = 1900, .attn = 19 * 5000, .prompt = true};
    near(bt_batch_work_ns(&f.cost, &many), 1e6 + 1e7 * 1900, 0.4);
}

/* What the start has told of longer steps outlives some hundred steps of one shape: a worker that
 * believed two prompts in a step to be as cheap as one would put all of them into one. */
static void test_one_shape_forgets_no_others(void **state)
{
    (void)state;
    static const struct bt_batch_cost far = {
        .base_ns = 1.1e5, .token_ns = BT_BATCH_TOKEN_NS(40), .kv_ns = 1.5, .attn_ns = 0.02};
    static const struct {
        double rows, depth, n;
    } shapes[] = {{1, 16, 1}, {1, 0, 16},  {8, 16, 1},  {1, 0, 128},    {1, 0, 256},
                  {1, 0, 64}, {1, 0, 512}, {64, 16, 1}, {1, 1536, 512}, {1, 2047, 1}};
    struct bt_batch_fit f;
    bt_batch_fit_init(&f, &far);
    struct bt_batch_work w;
    for (size_t i = 0; i < 2 * BT_ARRAY_LEN(shapes); i++) {
        double rows = shapes[i / 2].rows, h = shapes[i / 2].depth, n = shapes[i / 2].n;
        bool prompt = n > 1;
        w = (struct bt_batch_work){.tokens = rows * n,
                                   .kv = prompt ? 0 : rows * h,
                                   .attn = prompt ? rows * n * (h + n / 2) : 0,
                                   .prompt = prompt};
        (void)bt_batch_fit_step(&f, &w, 2e6 + 4e4 * w.tokens);
    }
    const struct bt_batch_work one = {.tokens = 256, .attn = 256 * 128, .prompt = true},
                               two = {.tokens = 512, .attn = 2 * 256 * 128, .prompt = true};
    for (int i = 0; i < 300; i++) {
        (void)bt_batch_fit_step(&f, &one, 2e6 + 4e4 * 256);
    }
    near(bt_batch_work_ns(&f.cost, &one), 2e6 + 4e4 * 256, 0.02);
    near(bt_batch_work_ns(&f.cost, &two), 2e6 + 4e4 * 512, 0.15);
}

static void test_a_hold_up_counts_little(void **state)
{
    (void)state;
    struct bt_batch_fit f;
    uint64_t s = 3;
    bt_batch_fit_init(&f, &prior);
    for (int i = 0; i < 600; i++) {
        struct bt_batch_work w = i % 2 ? prompt_step(&s) : decode_step(&s);
        double hold =
            i > 50 && i % 25 < 2 ? 20 : 1; /* 8 % of all steps take twenty times as long */
        (void)bt_batch_fit_step(&f, &w, hold * bt_batch_work_ns(&truth, &w));
    }
    assert_true(mean_error(&f, true, &s) < 0.2);
    assert_true(mean_error(&f, false, &s) < 0.2);
}

static void test_follows_a_change(void **state)
{
    (void)state;
    struct bt_batch_fit f;
    uint64_t s = 4;
    bt_batch_fit_init(&f, &prior);
    for (int i = 0; i < 2400; i++) {
        struct bt_batch_work w = i % 2 ? prompt_step(&s) : decode_step(&s);
        (void)bt_batch_fit_step(&f, &w, (i < 600 ? 3 : 1) * bt_batch_work_ns(&truth, &w));
    }
    assert_true(mean_error(&f, true, &s) < 0.05);
    assert_true(mean_error(&f, false, &s) < 0.05);
}

/* For a while all steps take several times as long: two hundred of a kind that do not are enough.
 */
static void test_recovers_from_a_disturbance(void **state)
{
    (void)state;
    for (int slow = 2; slow <= 16; slow *= 2) {
        struct bt_batch_fit f;
        uint64_t s = 6;
        bt_batch_fit_init(&f, &prior);
        for (int i = 0; i < 1400; i++) {
            struct bt_batch_work w = i % 2 ? prompt_step(&s) : decode_step(&s);
            double by = i >= 200 && i < 1000 ? slow : 1;
            (void)bt_batch_fit_step(&f, &w, by * bt_batch_work_ns(&truth, &w));
        }
        double prompt = mean_error(&f, true, &s), decode = mean_error(&f, false, &s);
        print_message("after steps %d times as long: %.3f, %.3f off\n", slow, prompt, decode);
        assert_true(prompt < 0.15 && decode < 0.15);
    }
}

static void test_keeps_what_it_is_not_told(void **state)
{
    (void)state;
    struct bt_batch_fit f;
    uint64_t s = 5;
    bt_batch_fit_init(&f, &prior);
    for (int i = 0; i < 300; i++) {
        struct bt_batch_work w = prompt_step(&s);
        (void)bt_batch_fit_step(&f, &w, bt_batch_work_ns(&truth, &w));
    }
    for (int i = 0; i < 20000; i++) { /* an hour of nothing but decoding */
        struct bt_batch_work w = decode_step(&s);
        (void)bt_batch_fit_step(&f, &w, bt_batch_work_ns(&truth, &w));
    }
    assert_true(mean_error(&f, true, &s) < 0.05);
    assert_true(mean_error(&f, false, &s) < 0.05);
}

/* Of a device a hundred times slower than the prior nothing but decode steps are known: prompts are
 * taken to be as much slower. Sixteen steps say it, and later ones say nothing of it any more. */
static void test_first_steps_scale_the_prior(void **state)
{
    (void)state;
    struct bt_batch_fit f;
    uint64_t s = 8;
    bt_batch_fit_init(&f, &prior);
    for (int i = 0; i < 200; i++) {
        struct bt_batch_work w = decode_step(&s);
        double by = i < 16 ? 100 : 800;
        (void)bt_batch_fit_step(&f, &w, by * bt_batch_work_ns(&prior, &w));
        near(f.cost.attn_ns, 100 * prior.attn_ns, 0.001);
        if (i == 0) {
            near(f.cost.token_ns[3], 100 * prior.token_ns[3], 0.001);
        }
    }
    /* Eight of each: the mean of their logarithms. */
    bt_batch_fit_init(&f, &prior);
    for (int i = 0; i < 16; i++) {
        struct bt_batch_work w = decode_step(&s);
        (void)bt_batch_fit_step(&f, &w, (i % 2 ? 100 : 25) * bt_batch_work_ns(&prior, &w));
    }
    near(f.cost.attn_ns, 50 * prior.attn_ns, 0.001);
}

/* One step is counted relative to what it took, against a pull of a hundredth. */
static void test_what_a_step_says_of_itself(void **state)
{
    (void)state;
    struct bt_batch_fit f;
    struct bt_batch_work w = {.tokens = 8, .kv = 1000};
    bt_batch_fit_init(&f, &prior);
    double believed = bt_batch_work_ns(&prior, &w);
    near(bt_batch_fit_step(&f, &w, believed / 2), 1, 1e-9);         /* twice as long */
    near(1 + bt_batch_fit_step(&f, &w, believed * 4), 0.125, 0.02); /* half was believed by then */
    assert_true(f.seen[0].steps == 2 && f.seen[1].steps == 0);
    assert_true(f.most_tokens == 8);
    w.prompt = true;
    w.tokens = 4;
    (void)bt_batch_fit_step(&f, &w, believed);
    assert_true(f.seen[0].steps == 2 && f.seen[1].steps == 1);
    assert_true(f.most_tokens == 8);
}

/* ---- experts ---- */

/* What a model of `experts` parameters in experts, `used` of n for a token, and `dense` others may
 * cost, by memory and arithmetic alone; as the worker believes at its start, off by a factor. */
static struct bt_batch_cost roofline(double dense, double experts, double used, double n,
                                     double bytes_per_s, double flops)
{
    return (struct bt_batch_cost){
        .base_ns = 1e5 + 2e9 * dense / bytes_per_s,
        .token_ns = BT_BATCH_TOKEN_NS(2e9 * (dense + experts * used / n) / flops),
        .kv_ns = 10,
        .attn_ns = 0.1,
        .experts_ns = 2e9 * experts / bytes_per_s,
        .missed = 1 - used / n,
    };
}

/* A model like V2-Lite: its steps of 1, 8 and 64 rows and of prompts are known, though they read
 * 2, 7 and 14 GB of experts. */
static void test_finds_experts(void **state)
{
    (void)state;
    const struct bt_batch_cost moe = roofline(1.2e9, 14.4e9, 6, 64, 3.6e12, 500e12);
    struct bt_batch_cost far = roofline(1.2e9, 14.4e9, 6, 64, 2e12, 300e12);
    static const double rows[] = {1, 2, 4, 8, 16, 32, 64, 128};
    struct bt_batch_fit f;
    uint64_t s = 9;
    bt_batch_fit_init(&f, &far);
    for (int i = 0; i < 400; i++) {
        struct bt_batch_work w = i % 2 ? prompt_step(&s) : decode_step(&s);
        w.tokens = i % 4 == 0 ? (double)(1 + rng(&s) % 24) : w.tokens;
        double noise = 0.95 + 0.1 * uniform(&s);
        (void)bt_batch_fit_step(&f, &w, noise * bt_batch_work_ns(&moe, &w));
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        struct bt_batch_work w = {.tokens = rows[i], .kv = 1024 * rows[i]};
        near(bt_batch_work_ns(&f.cost, &w), bt_batch_work_ns(&moe, &w), 0.04);
    }
    for (double n = 512; n <= 8192; n *= 4) {
        struct bt_batch_work w = {.tokens = n, .attn = n * n / 2, .prompt = true};
        near(bt_batch_work_ns(&f.cost, &w), bt_batch_work_ns(&moe, &w), 0.04);
    }
    near(f.cost.experts_ns, moe.experts_ns, 0.1);
    assert_true(f.cost.missed == moe.missed);
}

/* One layer's experts as measured on an H200 (docs/measurements/2026-11-gpu-experts.md). Steps of
 * 1, of 128 and of 8,192 rows are seen, those of 8 and 32 rows are not. */
static void test_predicts_measured_experts(void **state)
{
    (void)state;
    static const double rows[] = {1, 8, 32, 128, 8192};
    static const struct {
        const char *name;
        double n, used, parameters, us[BT_ARRAY_LEN(rows)], limit;
    } layers[] = {
        {"V2-Lite", 64, 6, 3 * 2048 * 1408., {33.6, 152.7, 262.6, 291.2, 1602}, 0.03},
        {"Qwen3-30B-A3B", 128, 8, 3 * 2048 * 768., {31.7, 128.1, 261.8, 303.3, 1365}, 0.03},
        {"V3, 32 experts", 32, 8, 3 * 7168 * 2048., {185.6, 573.1, 665.1, 1012, 10443}, 0.2},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(layers); i++) {
        double worst[2] = {0}; /* with the experts' term; as a model without experts */
        for (int dense = 0; dense < 2; dense++) {
            double n = layers[i].n, used = layers[i].used, all = n * layers[i].parameters;
            struct bt_batch_cost p =
                dense ? roofline(all, 0, 1, 1, 2e12, 300e12)
                      : roofline(used * layers[i].parameters / 64, all, used, n, 2e12, 300e12);
            p.base_ns -= dense ? 0 : 1e5 - 2e3; /* of a step; a layer has a launch */
            struct bt_batch_fit f;
            bt_batch_fit_init(&f, &p);
            for (int k = 0; k < 60; k++) {
                size_t at = (size_t[]){0, 3, 4}[k % 3];
                struct bt_batch_work w = {.tokens = rows[at], .prompt = at == 4};
                (void)bt_batch_fit_step(&f, &w, 1e3 * layers[i].us[at]);
            }
            for (size_t at = 0; at < BT_ARRAY_LEN(rows); at++) {
                struct bt_batch_work w = {.tokens = rows[at], .prompt = at == 4};
                double us = 1e-3 * bt_batch_work_ns(&f.cost, &w);
                double off = us / layers[i].us[at] - 1;
                worst[dense] = fmax(worst[dense], fabs(off));
                print_message("%s%s, %g rows: %.1f us, measured %.1f (%+.0f %%)\n", layers[i].name,
                              dense ? " as dense" : "", rows[at], us, layers[i].us[at], 100 * off);
            }
        }
        /* V3's 128 rows read weights twice, which the fit takes for reading experts. */
        assert_true(worst[0] < layers[i].limit);
        assert_true(worst[1] > 0.5); /* so the term is what predicts them */
    }
}

static void test_never_negative(void **state)
{
    (void)state;
    struct bt_batch_fit f;
    uint64_t s = 6;
    bt_batch_fit_init(&f, &prior);
    for (int i = 0; i < 500; i++) { /* more context is faster here: no coefficient may say so */
        struct bt_batch_work w = decode_step(&s);
        (void)bt_batch_fit_step(&f, &w, 1e9 / w.kv * 1e4 + 1);
        const double all[] = {f.cost.base_ns,     f.cost.token_ns[0], f.cost.token_ns[1],
                              f.cost.token_ns[2], f.cost.token_ns[3], f.cost.kv_ns,
                              f.cost.attn_ns,     f.cost.experts_ns};
        for (size_t k = 0; k < BT_ARRAY_LEN(all); k++) {
            assert_true(all[k] >= 0 && isfinite(all[k]));
        }
    }
    struct bt_batch_cost before = f.cost;
    struct bt_batch_work nothing = {0}, one = {.tokens = 1};
    assert_true(bt_batch_fit_step(&f, &nothing, 5) == 0);
    assert_true(bt_batch_fit_step(&f, &one, 0) == 0);
    assert_true(bt_batch_fit_step(&f, &one, NAN) == 0);
    assert_memory_equal(&before, &f.cost, sizeof(before));
}

static void test_cost_of_tokens_is_a_curve(void **state)
{
    (void)state;
    struct bt_batch_cost c = {.base_ns = 100, .token_ns = {1, 2, 3, 4}, .attn_ns = 0.5};
    struct bt_batch_work w = {.tokens = 8};
    assert_true(bt_batch_work_ns(&c, &w) == 100 + 8);
    w.tokens = 300;
    assert_true(bt_batch_work_ns(&c, &w) == 100 + 8 + 2 * 56 + 3 * 192 + 4 * 44);
    /* chunks of 100: the pairs are those of the whole, the base is paid three times */
    double chunks = 2 * (100 + 8 + 2 * 56 + 3 * 36) + (100 + 8 + 2 * 42);
    assert_true(bt_batch_prefill_ns(&c, 50, 300, 100) == chunks + 0.5 * 250 * (50 + 125));
    /* ... which end at multiples of 100: behind a prefix of 50 there is a short one in front */
    assert_true(bt_batch_prefill_ns(&c, 50, 230, 100) ==
                2 * 100 + (100 + 8 + 2 * 56 + 3 * 36) + 2 * 8 + 2 * (42 + 22) + 0.5 * 180 * 140);
    assert_true(bt_batch_prefill_ns(&c, 50, 50, 100) == 0);
    assert_true(bt_batch_prefill_ns(&c, 0, 8, 0) == 100 + 8 + 0.5 * 32);
    /* a token uses a quarter of the experts, two tokens 7/16 of them, very many all */
    c = (struct bt_batch_cost){.base_ns = 100, .experts_ns = 1600, .missed = 0.75};
    w.tokens = 1;
    assert_true(bt_batch_work_ns(&c, &w) == 100 + 400);
    w.tokens = 2;
    assert_true(bt_batch_work_ns(&c, &w) == 100 + 700);
    assert_true(bt_batch_prefill_ns(&c, 0, 4002, 4000) == 100 + 1600 + 100 + 700);
    w.tokens = 0;
    assert_true(bt_batch_work_ns(&c, &w) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finds_the_truth),
        cmocka_unit_test(test_a_handful_of_steps_is_enough_to_begin),
        cmocka_unit_test(test_a_prior_that_is_far_off),
        cmocka_unit_test(test_a_prior_of_another_shape),
        cmocka_unit_test(test_a_prior_that_knows_of_no_tokens),
        cmocka_unit_test(test_one_shape_forgets_no_others),
        cmocka_unit_test(test_a_hold_up_counts_little),
        cmocka_unit_test(test_follows_a_change),
        cmocka_unit_test(test_recovers_from_a_disturbance),
        cmocka_unit_test(test_keeps_what_it_is_not_told),
        cmocka_unit_test(test_first_steps_scale_the_prior),
        cmocka_unit_test(test_what_a_step_says_of_itself),
        cmocka_unit_test(test_finds_experts),
        cmocka_unit_test(test_predicts_measured_experts),
        cmocka_unit_test(test_never_negative),
        cmocka_unit_test(test_cost_of_tokens_is_a_curve),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
