/* Values of 16 bits as the device has them, and sums over them, for the kernels in plain C. */
#ifndef BT_TESTS_CUDA_HOST_VALUES_H
#define BT_TESTS_CUDA_HOST_VALUES_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef _Float16 half;

static inline float from_bf16(uint16_t v)
{
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint16_t to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* What a cast gives, and faster: without the processor's instruction that is a slow call. */
static inline half to_f16(float f)
{
    uint32_t u, bits;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u < 0x38800000) { /* a multiple of 2^-24, which is the last bit of 0.5 */
        float small;
        memcpy(&small, &u, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        bits -= 0x3f000000;
    } else if (u <= 0x7f800000) {
        bits = (u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13;
        bits = bits < 0x7c00 ? bits : 0x7c00; /* infinity */
    } else {
        bits = 0x7e00;
    }
    const uint16_t v = (uint16_t)(sign | bits);
    half h;
    memcpy(&h, &v, 2);
    return h;
}

static inline uint16_t half_bits(float f)
{
    half h = to_f16(f > 65504 ? 65504 : f < -65504 ? -65504 : f);
    uint16_t v;
    memcpy(&v, &h, 2);
    return v;
}

/* In f16, limited to its range, or in bf16. */
static inline uint16_t to_16(bool f16, float f)
{
    return f16 ? half_bits(f) : to_bf16(f);
}
static inline float from_16(bool f16, uint16_t v)
{
    half h;
    memcpy(&h, &v, 2);
    return f16 ? (float)h : from_bf16(v);
}

/* The place of a column in a row of e4m3 (cuda/weight.h). */
static inline uint32_t e4m3_place(uint32_t column)
{
    uint32_t in = column % 16;
    return column / 16 * 16 + in % 8 / 2 * 4 + in / 8 * 2 + in % 2;
}

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FAST                                                                                       \
    __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3", "fast-math")))
#else
#define FAST __attribute__((optimize("O3", "fast-math")))
#endif

FAST static inline float dot(const float *x, const float *y, uint32_t n)
{
    float sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

FAST static inline void add_scaled(float *to, float by, const float *v, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        to[i] += by * v[i];
    }
}

/* n finite f16 values as f32. */
FAST static inline void from_half(const half *v, uint32_t n, float *to)
{
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, &v[i], 2);
        uint32_t u = (h & 0x7fffu) << 13;
        float f;
        memcpy(&f, &u, 4);
        to[i] = (h & 0x8000 ? -0x1p112f : 0x1p112f) * f;
    }
}

struct bt_cu_e4m3_product;
/* Computes a product now, not in a stream's turn. */
void cuda_host_product_e4m3(const struct bt_cu_e4m3_product *q);

#endif
