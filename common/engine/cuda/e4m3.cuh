/* e4m3 values with a power-of-two scale for each token and head (common/kv/layout.h): conversion to
 * and from f32 and f16. A scale that is a power of two loses no precision and fits into one byte.
 * Device code only. */
#ifndef BT_CUDA_E4M3_CUH
#define BT_CUDA_E4M3_CUH

#include <cuda_fp8.h>
#include <stdint.h>

/* The scale's byte for values up to `top`: the smallest with top / scale <= 448 = 1.75 * 2^8. */
static __device__ __forceinline__ uint32_t e4m3_scale(float top)
{
    uint32_t bits = __float_as_uint(top), over = (bits & 0x7fffffu) > 0x600000u;
    return top == 0.0f ? 0 : (uint32_t)max((int)(bits >> 23) - 8 + (int)over, 1);
}
static __device__ __forceinline__ float e4m3_scale_value(uint32_t e)
{
    return __uint_as_float(e << 23); /* 0: zero */
}
/* The factor for values before they are rounded. */
static __device__ __forceinline__ float e4m3_scale_inverse(uint32_t e)
{
    return __uint_as_float((254 - e) << 23);
}

static __device__ __forceinline__ uint8_t e4m3_of(float v)
{
    return (uint8_t)__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
}
/* The two values in the low 16 bits as f16, without the scale: exact. */
static __device__ __forceinline__ uint32_t e4m3_pair(uint32_t two)
{
#if __CUDA_ARCH__ >= 890
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((uint16_t)two));
    return r;
#else /* the bits, moved to f16's places, mean value / 2^8, also for subnormals; NaN: below */
    uint32_t bits = (two & 0x80) << 8 | (two & 0x7f) << 7, r;
    bits |= (two & 0x8000) << 16 | (two & 0x7f00) << 15;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(bits), "r"(0x5c005c00));
    r |= (two & 0x7f) == 0x7f ? 0x7e00u : 0;
    return r | ((two & 0x7f00) == 0x7f00 ? 0x7e000000u : 0);
#endif
}
/* Four values as f16, without scales: exact. One instruction takes either half of a register. */
static __device__ __forceinline__ void e4m3_four(uint32_t four, uint32_t &low, uint32_t &high)
{
#if __CUDA_ARCH__ >= 890
    asm("{\n"
        ".reg .b16 l, h;\n"
        "mov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l;\n"
        "cvt.rn.f16x2.e4m3x2 %1, h;\n"
        "}"
        : "=r"(low), "=r"(high)
        : "r"(four));
#else
    low = e4m3_pair(four & 0xffff);
    high = e4m3_pair(four >> 16);
#endif
}
/* The same times two scales in f16. Exact if the scales are powers of two and f16 has the products.
 */
static __device__ __forceinline__ void e4m3_scaled(uint32_t four, uint32_t scales, uint32_t &low,
                                                   uint32_t &high)
{
    e4m3_four(four, low, high);
    asm("mul.rn.f16x2 %0, %0, %2;\n"
        "mul.rn.f16x2 %1, %1, %2;"
        : "+r"(low), "+r"(high)
        : "r"(scales));
}

#endif
