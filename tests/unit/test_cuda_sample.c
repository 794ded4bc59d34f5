/* The device's sampler (common/engine/cuda/sample/sample_row.cuh), its text compiled for this
 * processor and run thread by thread, against the host's sampler: the same tokens, logprobs and
 * counts. What only a GPU can show (its logarithms, its atomics) is left to make check-gpu.
 * BT_SAMPLE_CASES: how many rounds instead of one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/cuda_block.h"

#include "common/engine/cuda/sample/sample_row.cuh"
#include "common/engine/ids.h"
#include "tests/unit/sample_cases.h"

#ifdef __SANITIZE_THREAD__ /* it does not follow fibers */
#define NEEDS_FIBERS skip()
#else
#define NEEDS_FIBERS ((void)0)
#endif

static void body(void *arg)
{
    sample_draw(arg, blockIdx.x);
}

enum ids { ALL_IDS, TAIL_UNKNOWN, HOLES };

/* near_p counts draws that differ by the last bits of a logarithm. */
static uint32_t run_cases(uint64_t seed, uint32_t vocab, uint32_t n, bool masked, enum ids ids,
                          uint32_t *near_p)
{
    struct sample_cases c;
    sample_cases_make(&c, seed, vocab, n, masked);
    if (ids != ALL_IDS) {
        sample_cases_ids(&c, ids == HOLES);
    }
    struct bt_cu_drawn *out = bt_malloc(n * sizeof(*out));
    float *adjusted = bt_malloc((size_t)n * vocab * sizeof(*adjusted));
    int32_t *last = bt_malloc(n * sizeof(*last));
    uint32_t *counts = bt_malloc((size_t)n * vocab * sizeof(*counts));
    memcpy(counts, c.counts, (size_t)n * vocab * sizeof(*counts));
    memset(out, 0xff, n * sizeof(*out));
    memset(adjusted, 0xff, (size_t)n * vocab * sizeof(*adjusted)); /* NaN */
    struct bt_cu_sampling a = {.logits = c.logits,
                               .draws = c.draws,
                               .early = c.early,
                               .mask = c.mask,
                               .bias = c.biases,
                               .counts = counts,
                               .adjusted = adjusted,
                               .out = out,
                               .last_token = last,
                               .vocab = vocab,
                               .known = c.known,
                               .n_known = c.n_known,
                               .end_known = c.end_known};
    for (uint32_t i = 0; i < n; i++) {
        cuda_block_run(body, &a, BT_CU_SAMPLE_THREADS, i);
    }
    uint32_t wrong = sample_cases_check(&c, out, near_p);
    for (uint32_t i = 0; i < n; i++) { /* the next draw sees this one */
        assert_true(out[i].bad || bt_ids_bit(c.known, out[i].token));
        for (uint32_t k = 0; k < out[i].n_top; k++) {
            assert_true(bt_ids_bit(c.known, out[i].top_id[k]));
        }
        assert_int_equal(last[i], out[i].token);
        c.counts[(size_t)i * vocab + out[i].token] += bt_cu_penalizes(&c.params[i]) && !out[i].bad;
    }
    assert_memory_equal(counts, c.counts, (size_t)n * vocab * sizeof(*counts));
    free(out);
    free(adjusted);
    free(last);
    free(counts);
    sample_cases_free(&c);
    return wrong;
}

static void test_cases(void **state)
{
    (void)state;
    NEEDS_FIBERS;
    static const uint32_t vocabs[] = {1, 2, 31, 257, 1024, 1500, 5003};
    const char *rounds = getenv("BT_SAMPLE_CASES");
    uint32_t n = 0, wrong = 0, near = 0;
    for (int round = 0; round < (rounds ? atoi(rounds) : 1); round++) {
        for (uint32_t v = 0; v < sizeof(vocabs) / sizeof(vocabs[0]); v++) {
            for (int masked = 0; masked < 2; masked++) {
                uint32_t m = masked ? 6 : 18;
                wrong += run_cases(1000003u * (uint32_t)round + 17 * v + (uint32_t)masked,
                                   vocabs[v], m, masked, ALL_IDS, &near);
                n += m;
            }
            for (enum ids ids = TAIL_UNKNOWN; ids <= HOLES; ids++) {
                wrong += run_cases(31 * (uint64_t)round + 7 * v + ids, vocabs[v], 6, round % 2, ids,
                                   &near);
                n += 6;
            }
        }
    }
    printf("# %u rows, %u ties\n", n, near);
    assert_int_equal(wrong, 0);
    assert_true(near <= 1 + n / 1000);
}

/* More equal logits than one block ranks at once, in one group or three, and cuts in the middle of
 * each. */
static void test_flat(void **state)
{
    (void)state;
    NEEDS_FIBERS;
    enum { V = 6000 };
    static float l[V], judged[V];
    const uint32_t ks[] = {1, 1023, 1025, 3000, 5500};
    struct bt_cu_drawn out;
    int32_t last;
    struct bt_sampler *host = bt_sampler_create(V);
    for (uint32_t n = 0; n < 2 * 2 * 5; n++) {
        bool by_mass = n % 2, groups = n / 2 % 2;
        uint32_t k = ks[n / 4];
        struct bt_engine_params p = {.temperature = 1,
                                     .top_p = by_mass ? (float)k / V : 1,
                                     .top_k = by_mass ? 0 : k,
                                     .repetition_penalty = 1,
                                     .seed = n,
                                     .logprobs = -1};
        for (uint32_t i = 0; i < V; i++) {
            l[i] = groups ? (float)(i % 3) * 0.3f : 0;
        }
        for (uint32_t pos = 0; pos < 10; pos++) {
            struct bt_cu_draw d = bt_cu_draw_make(&p, 0, 0, pos, pos);
            struct bt_cu_sampling a = {
                .logits = l, .draws = &d, .out = &out, .last_token = &last, .vocab = V};
            cuda_block_run(body, &a, BT_CU_SAMPLE_THREADS, 0);
            memcpy(judged, l, sizeof(judged));
            const struct bt_sampler_row r = {.logits = judged, .params = &p, .position = pos};
            struct bt_engine_out want = {0};
            bt_sampler_run(host, &r, &want);
            assert_false(out.bad);
            assert_int_equal(out.token, want.token);
        }
    }
    bt_sampler_destroy(host);
}

/* Rows with right drafts, then wrong ones: each draw is what the host's sampler draws behind the
 * accepted drafts, and these alone are counted. */
static void test_drafts(void **state)
{
    (void)state;
    NEEDS_FIBERS;
    enum { V = 257, K = 6, KNOWN = 20, PROMPT = 8 };
    static float logits[(K + 1) * V], adjusted[(K + 1) * V], judged[V];
    struct bt_sampler *host = bt_sampler_create(V);
    for (uint32_t n = 0; n < 40; n++) {
        const struct bt_engine_params p = {.temperature = n % 4 ? 0.8f : 0,
                                           .top_p = n % 3 ? 1 : 0.9f,
                                           .repetition_penalty = n % 5 ? 1.4f : 1,
                                           .frequency_penalty = n % 2 ? 0.7f : 0,
                                           .presence_penalty = n % 7 ? 0.3f : 0,
                                           .min_new = KNOWN - PROMPT + 3,
                                           .n_eos = 1,
                                           .eos = {n},
                                           .seed = n,
                                           .logprobs = n % 3 ? -1 : 2};
        uint32_t tokens[KNOWN + K + 1], counts[V] = {0}, want[V] = {0}, right = n % (K + 1);
        uint64_t x = n + 1;
        for (uint32_t i = 0; i < (K + 1) * V; i++) {
            x = x * 6364136223846793005ull + 1442695040888963407ull;
            logits[i] = (float)(x >> 40 & 0x3ff) / 400;
        }
        for (uint32_t i = 0; i < KNOWN; i++) {
            tokens[i] = (i * i + n) % 11; /* some of them again and again */
            counts[tokens[i]] = i < PROMPT ? BT_CU_COUNT_PROMPT : counts[tokens[i]] + 1;
        }
        memcpy(want, counts, sizeof(want));
        struct bt_cu_draw draws[K + 1];
        struct bt_cu_drawn out[K + 1];
        struct bt_cu_chosen chosen[K + 1];
        struct bt_engine_out truth[K + 1];
        int32_t last = -1;
        for (uint32_t i = 0; i <= K; i++) {
            const struct bt_sampler_row r = {.logits = judged,
                                             .params = &p,
                                             .position = KNOWN + i,
                                             .tokens = tokens,
                                             .n_tokens = KNOWN + i,
                                             .n_prompt = PROMPT};
            memcpy(judged, logits + (size_t)i * V, sizeof(judged));
            truth[i] = (struct bt_engine_out){0};
            bt_sampler_run(host, &r, &truth[i]);
            tokens[KNOWN + i] = truth[i].token;
            want[truth[i].token] += i <= right && bt_cu_penalizes(&p);
            draws[i] = bt_cu_draw_make(&p, i, 0, KNOWN + i, KNOWN - PROMPT + i);
            draws[i].drafts = 1;
            draws[i].n_before = i;
            draws[i].draft = i == K      ? BT_CU_NO_DRAFT
                             : i < right ? truth[i].token
                                         : (truth[i].token + 1) % V;
        }
        struct bt_cu_sampling a = {.logits = logits,
                                   .draws = draws,
                                   .counts = counts,
                                   .adjusted = adjusted,
                                   .out = out,
                                   .chosen = chosen,
                                   .last_token = &last,
                                   .vocab = V};
        for (uint32_t i = 0; i <= K; i++) {
            cuda_block_run(body, &a, BT_CU_SAMPLE_THREADS, K - i); /* blocks come in any order */
        }
        for (uint32_t i = 0; i <= K; i++) {
            sample_accept(&a, i);
        }
        for (uint32_t i = 0; i <= right; i++) {
            assert_int_equal(out[i].token, truth[i].token);
            assert_int_equal(out[i].n_top, truth[i].n_top);
        }
        assert_int_equal(last, truth[right].token);
        assert_memory_equal(counts, want, sizeof(want));
    }
    bt_sampler_destroy(host);
}

static int teardown(void **state)
{
    (void)state;
    cuda_block_free();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_flat),
        cmocka_unit_test(test_drafts),
    };
    return cmocka_run_group_tests(tests, NULL, teardown);
}
