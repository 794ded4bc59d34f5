/* e4m3 in registers: weights become f16, exactly; values are rounded to e4m3 with a scale for 128
 * columns. Device code only. */
#ifndef BT_CUDA_FP8_CUH
#define BT_CUDA_FP8_CUH

#include "common/engine/cuda/e4m3.cuh"
#include "common/engine/cuda/mma.cuh"

/* A word of weights in the order of weight.h (columns 2c, 2c + 1, 8 + 2c, 9 + 2c) as two pairs of
 * f16: what lane % 4 = c holds of a row in a product over 16 columns. */
static __device__ __forceinline__ void f16_of_e4m3(uint32_t w, uint32_t &low, uint32_t &high)
{
    low = e4m3_pair(w & 0xffff);
    high = e4m3_pair(w >> 16);
}

/* The nearest value that f16 has; NaN stays. */
static __device__ __forceinline__ float f16_range(float v)
{
    return v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
}

/* Four values in f16, limited to its range, or in bf16. */
static __device__ __forceinline__ uint2 pack4_as(bool f16, float x, float y, float z, float w)
{
    return f16 ? make_uint2(pack2<__half>(f16_range(x), f16_range(y)),
                            pack2<__half>(f16_range(z), f16_range(w)))
               : make_uint2(pack2<__nv_bfloat16>(x, y), pack2<__nv_bfloat16>(z, w));
}

#define LARGEST 448.0f /* of e4m3 */

static __device__ __forceinline__ uint32_t pack_e4m3(float x, float y, float z, float w)
{
    uint16_t lo = __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
    uint16_t hi = __nv_cvt_float2_to_fp8x2(make_float2(z, w), __NV_SATFINITE, __NV_E4M3);
    return lo | (uint32_t)hi << 16;
}

/* Exchanges bytes between lanes, so that each has a word of the new order, and stores it. own: the
 * values of columns 4 * lane and on; to: of column 0 of this warp's 128. */
static __device__ __forceinline__ void put_ordered(uint32_t own, uint8_t *to, bool in)
{
    const uint32_t lane = threadIdx.x % 32, q = lane % 4;
    uint32_t other = __shfl_xor_sync(~0u, own, 2);
    /* Lane 0: columns 0 1 8 9; lane 2: 2 3 10 11; lane 1: 4 5 12 13; lane 3: 6 7 14 15. */
    uint32_t v = q < 2 ? __byte_perm(own, other, 0x5410) : __byte_perm(other, own, 0x7632);
    if (in) {
        ((uint32_t *)to)[lane / 4 * 4 + (q < 2 ? q * 2 : q * 2 - 3)] = v;
    }
}

static __device__ __forceinline__ float warp_max(float v)
{
    for (int d = 16; d > 0; d /= 2) {
        v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    }
    return v;
}
static __device__ __forceinline__ float top4(const float4 &v)
{
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

/* The factor for values of which the largest is top. */
static __device__ __forceinline__ float e4m3_factor(float top)
{
    return fminf(top > 0 ? LARGEST / top : 0.0f, 0x1p126f); /* else infinite for a tiny top */
}
static __device__ __forceinline__ float e4m3_scale_of(float factor)
{
    return factor > 0 ? 1.0f / factor : 0.0f;
}

/* Times f, rounded and in the order of weight.h. */
static __device__ __forceinline__ uint4 ordered16(const float (&v)[16], float f)
{
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = pack_e4m3(v[i * 2] * f, v[i * 2 + 1] * f, v[i * 2 + 8] * f, v[i * 2 + 9] * f);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* The largest magnitude of 128 columns of a row, of which eight neighbouring lanes have 16 each.
 * All lanes of a warp run this together. */
static __device__ __forceinline__ float top128(const float (&v)[16])
{
    float top = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        top = fmaxf(top, fabsf(v[i]));
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    }
    return top;
}

/* Eight values of 16 bits. */
template <bool BF16> static __device__ __forceinline__ void wide8(const uint4 &v, float *to)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __half2 h;
        memcpy(&h, &w[i], 4);
        float2 f =
            BF16 ? make_float2(__uint_as_float(w[i] << 16), __uint_as_float(w[i] & 0xffff0000u))
                 : __half22float2(h);
        to[i * 2] = f.x;
        to[i * 2 + 1] = f.y;
    }
}

#endif
