/* What the GPU checks and benchmarks share on the host: error checks, random numbers, values of 16
 * bits, times. One thread; everything is static, so that a program takes what it needs. */
#ifndef BT_TESTS_GPU_KIT_H
#define BT_TESTS_GPU_KIT_H

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/value.h"

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        cudaError_t e_ = (x);                                                                      \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_));            \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static uint64_t rng;
/* 0 to n - 1. */
static inline uint32_t rnd(uint32_t n)
{
    rng = rng * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((rng >> 33) % n);
}

/* A random order of 0 to n - 1; the caller frees it. */
static inline int32_t *random_order(uint32_t n)
{
    int32_t *order = malloc(n * sizeof(*order));
    for (uint32_t i = 0; i < n; i++) {
        order[i] = (int32_t)i;
    }
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = rnd(i);
        int32_t t = order[i - 1];
        order[i - 1] = order[j];
        order[j] = t;
    }
    return order;
}

/* A value of type BT_CU_F16 or BT_CU_BF16. */
static inline float to_float(uint16_t v, int type)
{
    uint32_t u;
    if (type == BT_CU_BF16) {
        u = (uint32_t)v << 16;
    } else {
        uint32_t e = v >> 10 & 31, m = v & 1023;
        if (e == 0) {
            return ldexpf((float)m, -24) * (v >> 15 ? -1.0f : 1.0f);
        }
        u = (uint32_t)(v >> 15) << 31 | (e == 31 ? 255u : e + 112) << 23 | m << 13;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Device memory; with what is at `from`, unless that is NULL. */
static inline void *device_memory(const void *from, size_t bytes)
{
    void *p;
    CHECK(cudaMalloc(&p, bytes));
    if (from) {
        CHECK(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice));
    }
    return p;
}

/* A copy of device memory on the host; the caller frees it. */
static inline void *host_copy(const void *from, size_t bytes)
{
    void *h = malloc(bytes);
    CHECK(cudaMemcpy(h, from, bytes, cudaMemcpyDeviceToHost));
    return h;
}

static inline int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Times of a launch in ms: the median of nine, and the mean after 0.4 s of launches, when the clock
 * is what power leaves (seconds 0: not measured). */
struct launch_times {
    float median, hot;
};
static inline struct launch_times time_launches(void (*launch)(void *, cudaStream_t), void *arg,
                                                float seconds, cudaStream_t s)
{
    cudaEvent_t t0, t1;
    float v[9], ms = 0;
    CHECK(cudaEventCreate(&t0));
    CHECK(cudaEventCreate(&t1));
    for (int i = -2; i < 9; i++) {
        CHECK(cudaEventRecord(t0, s));
        launch(arg, s);
        CHECK(cudaEventRecord(t1, s));
        CHECK(cudaEventSynchronize(t1));
        if (i >= 0) {
            CHECK(cudaEventElapsedTime(&v[i], t0, t1));
        }
    }
    qsort(v, 9, sizeof(v[0]), by_value);
    int n = (int)(seconds * 1000 / v[4]) + 1;
    for (int i = 0; seconds > 0 && i < 2 * n; i++) {
        if (i == n) {
            CHECK(cudaEventRecord(t0, s));
        }
        launch(arg, s);
    }
    if (seconds > 0) {
        CHECK(cudaEventRecord(t1, s));
        CHECK(cudaEventSynchronize(t1));
        CHECK(cudaEventElapsedTime(&ms, t0, t1));
    }
    CHECK(cudaEventDestroy(t0));
    CHECK(cudaEventDestroy(t1));
    return (struct launch_times){v[4], ms / (float)n};
}

#endif
