/* fp8 products for checks and benchmarks: random weights with adversarial scales on host and
 * device, activations, and what a product should be in double precision. */
#ifndef BT_TESTS_GPU_FP8_CASE_H
#define BT_TESTS_GPU_FP8_CASE_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/gemm/gemm.h"
#include "common/engine/cuda/rows/quant.h"
#include "common/engine/cuda/rows/rows.h"
#include "common/engine/fp8.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

static inline float fp8_bf16(uint16_t v)
{
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t fp8_next(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* Weights [n][k] of either kind, on the device as the engine keeps them and as f32 on the host. */
struct fp8_weights {
    struct bt_cu_weight w;
    float *values;
    uint32_t n, k;
};

/* Any of the numbers that e4m3 has. wide: scales differ by up to 2^24, and some are 0. */
static inline struct fp8_weights
fp8_weights_open(uint32_t n, uint32_t k, enum bt_cu_weight_kind kind, bool wide, uint32_t seed)
{
    struct fp8_weights f = {.n = n, .k = k};
    const bool blocks = kind == BT_CU_WEIGHT_BLOCKS;
    const uint32_t across = bt_cu_scale_stride(k), down = BT_DIV_UP(n, BT_CU_WEIGHT_BLOCK);
    const size_t values = (size_t)n * k,
                 scales = blocks ? (size_t)down * across : (size_t)across * n;
    uint8_t *raw = malloc(values);
    float *scale = malloc(scales * sizeof(*scale)), table[256];
    f.values = malloc(values * sizeof(*f.values));
    for (size_t i = 0; i < 256; i++) {
        table[i] = bt_f32_of_e4m3((uint8_t)i);
    }
    for (size_t i = 0; i < values; i++) {
        uint8_t v = (uint8_t)fp8_next(&seed);
        raw[i] = (v & 0x7f) == 0x7f ? 0x01 : v;
    }
    for (size_t i = 0; i < (blocks ? scales : n); i++) {
        uint32_t r = fp8_next(&seed);
        float s = (1.0f + (float)(r % 1024) / 1024) * 0x1p-9f;
        s = wide ? ldexpf(s, (int)(r / 1024 % 25) - 12) : s;
        scale[i] = wide && r % 37 == 0 ? 0 : s;
    }
    for (size_t i = n; !blocks && i < scales; i++) {
        scale[i] = scale[i % n];
    }
    for (size_t i = 0; i < values; i++) {
        size_t row = i / k, col = i % k;
        f.values[i] = table[raw[i]] * (blocks ? scale[row / 128 * across + col / 128] : scale[row]);
    }
    uint8_t *plain = device_memory(raw, values), *ordered;
    uint32_t *bad, zero = 0;
    CHECK(cudaMalloc((void **)&ordered, values));
    bad = device_memory(&zero, 4);
    CHECK(bt_cu_order(plain, n, k, ordered, bad, 0));
    CHECK(cudaMemcpy(&zero, bad, 4, cudaMemcpyDeviceToHost));
    f.w = (struct bt_cu_weight){ordered, device_memory(scale, scales * sizeof(*scale)), kind};
    cudaFree(plain);
    cudaFree(bad);
    free(raw);
    free(scale);
    if (zero) {
        printf("FAIL order: finite numbers reported as NaN\n");
        exit(1);
    }
    return f;
}
static inline void fp8_weights_close(struct fp8_weights *f)
{
    cudaFree((void *)f->w.w);
    cudaFree((void *)f->w.scale);
    free(f->values);
}

/* Random activations of 16 bits, on the device and as f32 on the host. */
static inline float *fp8_random_rows(uint32_t m, uint32_t k, int type, void **device, uint32_t seed)
{
    CHECK(cudaMalloc(device, (size_t)m * k * 2));
    ref_fill(*device, (size_t)m * k, type, 1, seed);
    CHECK(cudaDeviceSynchronize());
    uint16_t *h = host_copy(*device, (size_t)m * k * 2);
    float *x = malloc((size_t)m * k * sizeof(*x));
    for (size_t i = 0; i < (size_t)m * k; i++) {
        _Float16 f;
        memcpy(&f, &h[i], 2);
        x[i] = type == BT_CU_F16 ? (float)f : fp8_bf16(h[i]);
    }
    free(h);
    return x;
}

/* Room for rounded activations, poisoned. */
static inline struct bt_cu_e4m3_rows fp8_rows_open(uint32_t m, uint32_t k)
{
    struct bt_cu_e4m3_rows r;
    uint32_t stride = bt_cu_e4m3_stride(m);
    CHECK(cudaMalloc((void **)&r.v, (size_t)stride * k));
    CHECK(cudaMalloc((void **)&r.scale, (size_t)BT_DIV_UP(k, 128) * stride * 4));
    CHECK(cudaMemset(r.v, 0x7f, (size_t)stride * k));
    CHECK(cudaMemset(r.scale, 0xff, (size_t)BT_DIV_UP(k, 128) * stride * 4));
    return r;
}
static inline void fp8_rows_close(struct bt_cu_e4m3_rows *r)
{
    cudaFree(r->v);
    cudaFree(r->scale);
}

/* Column of a place in a row of ordered e4m3. */
static inline uint32_t fp8_column(uint32_t at)
{
    static const uint8_t in[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    return at / 16 * 16 + in[at % 16];
}

/* Ordered activations of the device as f32 [m][k]. */
static inline float *fp8_rows_values(const struct bt_cu_e4m3_rows *r, uint32_t m, uint32_t k)
{
    uint32_t stride = bt_cu_e4m3_stride(m);
    uint8_t *v = host_copy(r->v, (size_t)m * k);
    float *scale = host_copy(r->scale, (size_t)BT_DIV_UP(k, 128) * stride * 4);
    float *out = malloc((size_t)m * k * sizeof(*out)), table[256];
    for (size_t i = 0; i < 256; i++) {
        table[i] = bt_f32_of_e4m3((uint8_t)i);
    }
    for (size_t i = 0; i < m; i++) {
        for (uint32_t j = 0; j < k; j++) {
            uint32_t c = fp8_column(j);
            out[i * k + c] = table[v[i * k + j]] * scale[c / 128 * stride + i];
        }
    }
    free(v);
    free(scale);
    return out;
}

/* The product of two rows, and in *all the sum of its terms' magnitudes. */
static inline double fp8_dot(const float *x, const float *w, uint32_t k, double *all)
{
    double sum = 0;
    *all = 0;
    for (uint32_t i = 0; i < k; i++) {
        double t = (double)x[i] * w[i];
        sum += t;
        *all += fabs(t);
    }
    return sum;
}

#endif
