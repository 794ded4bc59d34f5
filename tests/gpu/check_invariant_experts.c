/* make check-gpu: a row's experts have the same bits whatever the other rows of the step are
 * (engine.deterministic): norm, router, choice and sum, for steps of 1 to 300 rows, compared with
 * steps of one row. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/experts/experts.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define ROWS 300u

static int failed;

struct bed {
    struct bt_cu_experts x;
    void *gate_up, *down, *router, *a, *scratch;
    float *in, *norm, *scores, *out;
};

/* All rows, `step` at a time: norms, scores and results one behind the other, on the host. */
static uint8_t *all_rows(const struct bed *b, uint32_t step)
{
    const struct bt_cu_experts *x = &b->x;
    const size_t n = x->n - x->always;
    const struct bt_cu_experts_router router = {b->router, NULL};
    CHECK(cudaMemset(b->out, 0, ROWS * x->hidden * 4));
    for (uint32_t r = 0; r < ROWS; r += step) {
        const uint32_t m = step < ROWS - r ? step : ROWS - r;
        const size_t at = (size_t)r * x->hidden;
        const struct bt_cu_experts_norm norm = {b->in + at, b->norm, 1e-5f};
        uint16_t *a = (uint16_t *)b->a + at;
        CHECK(
            bt_cu_experts_choose(x, &norm, &router, NULL, m, a, b->scores + r * n, b->scratch, 0));
        CHECK(bt_cu_experts_run(x, bt_cu_bf16(b->gate_up), bt_cu_bf16(b->down), a, m, b->scratch,
                                b->out + at, true, NULL, 0));
    }
    CHECK(cudaDeviceSynchronize());
    uint8_t *all = malloc(ROWS * (x->hidden * 6 + n * 4));
    CHECK(cudaMemcpy(all, b->out, ROWS * x->hidden * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(all + ROWS * x->hidden * 4, b->scores, ROWS * n * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(all + ROWS * (x->hidden * 4 + n * 4), b->a, ROWS * x->hidden * 2,
                     cudaMemcpyDeviceToHost));
    return all;
}

static uint32_t rows_that_differ(const uint8_t *a, const uint8_t *b, size_t row)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < ROWS; r++) {
        n += memcmp(a + r * row, b + r * row, row) != 0;
    }
    return n;
}

static void check(const char *name, struct bt_cu_experts x)
{
    static const uint32_t steps[] = {2, 4, 5, 8, 9, 16, 33, 64, 100, 128, 129, 200, ROWS};
    const size_t n = x.n - x.always, each = (size_t)x.n * x.hidden * x.inter;
    const uint32_t most = bt_cu_experts_rows(&x) < ROWS ? bt_cu_experts_rows(&x) : ROWS;
    struct bed b = {.x = x};
    b.x.invariant = true;
    b.gate_up = device_memory(NULL, each * 4);
    b.down = device_memory(NULL, each * 2);
    b.router = device_memory(NULL, n * x.hidden * 2);
    b.a = device_memory(NULL, ROWS * x.hidden * 2);
    b.in = device_memory(NULL, ROWS * x.hidden * 4);
    b.norm = device_memory(NULL, x.hidden * 4);
    b.scores = device_memory(NULL, ROWS * n * 4);
    b.out = device_memory(NULL, ROWS * x.hidden * 4);
    b.scratch = device_memory(NULL, bt_cu_experts_scratch(&b.x, most));
    CHECK(cudaMemset(b.scratch, 0, 256));
    ref_fill(b.gate_up, each * 2, BT_CU_BF16, 1 / sqrtf((float)x.hidden), 1);
    ref_fill(b.down, each, BT_CU_BF16, 1 / sqrtf((float)x.inter), 2);
    ref_fill(b.router, n * x.hidden, BT_CU_BF16, 1 / sqrtf((float)x.hidden), 3);
    float *h = malloc(ROWS * x.hidden * 4);
    for (uint32_t i = 0; i < ROWS * x.hidden; i++) {
        h[i] = (float)rnd(20001) / 10000 - 1;
    }
    CHECK(cudaMemcpy(b.in, h, ROWS * x.hidden * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(b.norm, h, x.hidden * 4, cudaMemcpyHostToDevice));
    uint8_t *want = all_rows(&b, 1);
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]) && steps[i] <= most; i++) {
        uint8_t *got = all_rows(&b, steps[i]);
        const size_t scores = ROWS * x.hidden * 4, norms = scores + ROWS * n * 4;
        uint32_t differ[3] = {rows_that_differ(want, got, x.hidden * 4),
                              rows_that_differ(want + scores, got + scores, n * 4),
                              rows_that_differ(want + norms, got + norms, x.hidden * 2)};
        bool bad = differ[0] || differ[1] || differ[2];
        failed += bad;
        printf("%s %s, %u rows at a time: of %u rows, results of %u differ, scores of %u, norms "
               "of %u\n",
               bad ? "FAIL" : "ok  ", name, steps[i], ROWS, differ[0], differ[1], differ[2]);
        free(got);
    }
    fflush(stdout);
    free(want);
    free(h);
    void *all[] = {b.gate_up, b.down, b.router, b.a, b.in, b.norm, b.scores, b.out, b.scratch};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        CHECK(cudaFree(all[i]));
    }
}

int main(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        printf("no GPU\n");
        return 0;
    }
    const struct bt_cu_experts v2 = {.n = 66,
                                     .used = 8,
                                     .hidden = 2048,
                                     .inter = 1408,
                                     .groups = 1,
                                     .groups_used = 1,
                                     .scale = 1,
                                     .always = 2};
    const struct bt_cu_experts qwen3 = {.n = 128,
                                        .used = 8,
                                        .hidden = 2048,
                                        .inter = 768,
                                        .groups = 1,
                                        .groups_used = 1,
                                        .normalise = true,
                                        .scale = 1};
    const struct bt_cu_experts mixtral = {.n = 8,
                                          .used = 2,
                                          .hidden = 1024,
                                          .inter = 1792,
                                          .groups = 1,
                                          .groups_used = 1,
                                          .normalise = true,
                                          .scale = 1};
    const struct bt_cu_experts small = {.n = 8,
                                        .used = 3,
                                        .hidden = 64,
                                        .inter = 48,
                                        .groups = 1,
                                        .groups_used = 1,
                                        .normalise = true,
                                        .scale = 1};
    const struct bt_cu_experts groups = {.n = 33,
                                         .used = 5,
                                         .hidden = 512,
                                         .inter = 320,
                                         .groups = 8,
                                         .groups_used = 4,
                                         .group_best = 2,
                                         .sigmoid = true,
                                         .normalise = true,
                                         .scale = 2.5f,
                                         .always = 1};
    check("64 experts and 2 shared", v2);
    check("128 experts", qwen3);
    check("8 large experts", mixtral);
    check("8 small experts", small);
    check("groups", groups);
    printf("%d failed\n", failed);
    return failed > 0;
}
