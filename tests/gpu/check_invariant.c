/* make check-gpu: a row's product has the same bits whatever the other rows of the step are: what
 * engine.deterministic rests on. Compares products of few rows, in each number of them, with the
 * row alone, and one way of skinny.h with another that divides k alike. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/gemm/skinny.h"
#include "common/engine/cuda/gemm/wide.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define ROWS 300u

static int failed;

struct shape {
    uint32_t n, k;
    enum bt_cu_skinny_end end;
};

static size_t row_bytes(const struct shape *s)
{
    return s->end == BT_CU_SKINNY_SWIGLU_ROUNDED ? (size_t)s->n : (size_t)s->n * 4;
}

/* All rows by `way`, at most `step` at a time, into host memory. */
static uint8_t *product(const struct shape *s, uint32_t way, uint32_t step, const void *w,
                        const uint8_t *x, uint8_t *y)
{
    size_t bytes = row_bytes(s);
    CHECK(cudaMemset(y, 0, ROWS * bytes));
    for (uint32_t r = 0; r < ROWS; r += step) {
        uint32_t m = step < ROWS - r ? step : ROWS - r;
        CHECK(bt_cu_skinny(way, bt_cu_bf16(w), x + (size_t)r * s->k * 2, y + r * bytes, m, s->n,
                           s->k, s->end, 0));
    }
    uint8_t *h = malloc(ROWS * bytes);
    CHECK(cudaMemcpy(h, y, ROWS * bytes, cudaMemcpyDeviceToHost));
    return h;
}

static void compare(const char *what, uint32_t way, uint32_t step, const uint8_t *a,
                    const uint8_t *b, size_t bytes)
{
    uint32_t rows = 0;
    for (uint32_t r = 0; r < ROWS; r++) {
        rows += memcmp(a + r * bytes, b + r * bytes, bytes) != 0;
    }
    failed += rows > 0;
    printf("%s %s, way %u, %u rows at a time: %u of %u rows differ\n", rows ? "FAIL" : "ok  ", what,
           way, step, rows, ROWS);
}

/* wide.h against rows alone by skinny.h. */
static void check_wide(const struct shape *s, uint32_t parts, const void *w, const void *x,
                       uint8_t *y, const uint8_t *want)
{
    const uint32_t steps = (s->k + 63) / 64;
    const size_t bytes = row_bytes(s);
    if (s->end == BT_CU_SKINNY_SWIGLU_ROUNDED && parts > 1) {
        return; /* wide.h sums a SwiGLU's k in one part */
    }
    uint8_t *got = malloc(ROWS * bytes);
    if (s->end == BT_CU_SKINNY_SWIGLU_ROUNDED) {
        CHECK(bt_cu_wide_swiglu(w, x, y, ROWS, s->n, s->k, 0));
    } else {
        CHECK(cudaMemset(y, 0, ROWS * bytes));
        for (uint32_t i = 0; i < parts; i++) {
            const struct bt_cu_wide_part part = {steps * i / parts, steps * (i + 1) / parts};
            bool add = s->end == BT_CU_SKINNY_ADD || i > 0;
            CHECK(bt_cu_wide_sum(w, x, (float *)y, ROWS, s->n, s->k, part, add, 0));
        }
    }
    CHECK(cudaMemcpy(got, y, ROWS * bytes, cudaMemcpyDeviceToHost));
    compare("wide.h, parts of k", parts, ROWS, want, got, bytes);
    free(got);
}

static void check(const struct shape *s, const char *name)
{
    static const uint32_t steps[] = {1, 7, 16, 33, 64, 100, 128};
    uint8_t *w, *x, *y, *alone[16] = {0};
    CHECK(cudaMalloc((void **)&w, (size_t)s->n * s->k * 2));
    CHECK(cudaMalloc((void **)&x, (size_t)ROWS * s->k * 2));
    CHECK(cudaMalloc((void **)&y, ROWS * row_bytes(s)));
    ref_fill(w, (size_t)s->n * s->k, BT_CU_BF16, 1 / sqrtf((float)s->k), 1);
    ref_fill(x, (size_t)ROWS * s->k, BT_CU_BF16, 1, 2);
    for (uint32_t way = 0; way < bt_cu_skinny_ways(); way++) {
        if (!bt_cu_skinny_fits(way, 1, s->n, s->k, BT_CU_WEIGHT_BF16)) {
            continue;
        }
        for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
            uint8_t *got = product(s, way, steps[i], w, x, y);
            uint32_t parts = bt_cu_skinny_parts(way);
            if (!alone[parts]) {
                alone[parts] = got;
                continue;
            }
            compare(name, way, steps[i], alone[parts], got, row_bytes(s));
            free(got);
        }
    }
    for (uint32_t parts = 1; parts < 16 && bt_cu_wide_fits(ROWS, s->n, s->k); parts++) {
        if (alone[parts]) {
            check_wide(s, parts, w, x, y, alone[parts]);
        }
    }
    for (int i = 0; i < 16; i++) {
        free(alone[i]);
    }
    cudaFree(w);
    cudaFree(x);
    cudaFree(y);
}

int main(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        printf("no GPU\n");
        return 0;
    }
    check(&(struct shape){6144, 4096, BT_CU_SKINNY_F32}, "qkv");
    check(&(struct shape){4096, 4096, BT_CU_SKINNY_ADD}, "o");
    check(&(struct shape){28672, 4096, BT_CU_SKINNY_SWIGLU_ROUNDED}, "gate and up");
    check(&(struct shape){3072, 576, BT_CU_SKINNY_SWIGLU_ROUNDED}, "small gate and up");
    check(&(struct shape){4096, 14336, BT_CU_SKINNY_ADD}, "down");
    check(&(struct shape){912, 200, BT_CU_SKINNY_F32}, "ragged");
    check(&(struct shape){1040, 712, BT_CU_SKINNY_ADD}, "ragged sums");
    printf("%d failed\n", failed);
    return failed > 0;
}
