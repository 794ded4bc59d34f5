/* Kernels of quant.h. All are bound by memory. A warp rounds 128 columns of a row, each lane four
 * neighbouring ones; four lanes have the 16 columns whose order changes. */
#include "common/engine/cuda/rows/quant.h"

#include "common/engine/cuda/e4m3.cuh"
#include "common/engine/cuda/mma.cuh"
#include "common/engine/cuda/rows/block_sum.cuh"

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

struct target { /* of activations */
    uint8_t *v;
    float *scale;
    uint32_t stride, k;
};

/* Rounds one row's 128 columns of block b; lanes beyond k have zeros. */
static __device__ __forceinline__ void put_row(const struct target &to, size_t row, uint32_t b,
                                               const float4 &v)
{
    const uint32_t lane = threadIdx.x % 32;
    float top = warp_max(top4(v)), f = top > 0 ? LARGEST / top : 0.0f;
    f = fminf(f, 0x1p126f); /* else infinite for a tiny top */
    put_ordered(pack_e4m3(v.x * f, v.y * f, v.z * f, v.w * f), to.v + row * to.k + b * 128,
                b * 128 + lane * 4 < to.k);
    if (lane == 0) {
        to.scale[(size_t)b * to.stride + row] = f > 0 ? 1.0f / f : 0.0f;
    }
}

static __device__ __forceinline__ float4 bf16_quad(const uint2 &v)
{
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                       __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
}

static __device__ __forceinline__ float4 f16_quad(const uint2 &v)
{
    __half2 a, b;
    memcpy(&a, &v.x, 4);
    memcpy(&b, &v.y, 4);
    float2 lo = __half22float2(a), hi = __half22float2(b);
    return make_float4(lo.x, lo.y, hi.x, hi.y);
}

/* A thread has quads threadIdx.x, + blockDim.x, ...: a warp's 32 are one block of columns. */
static __global__ void norm_e4m3_kernel(const float *x, const float *w, uint32_t hidden, float eps,
                                        const __grid_constant__ struct target to)
{
    constexpr int KEPT = 2;
    const uint32_t quads = hidden / 4, rounded = (quads + 31) / 32 * 32;
    const float4 *wt = (const float4 *)w, zero = make_float4(0, 0, 0, 0);
    early_next();
    early_wait();
    const float4 *in = (const float4 *)(x + (size_t)blockIdx.x * hidden);
    float4 v[KEPT];
    float sum = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        uint32_t i = threadIdx.x + k * blockDim.x;
        v[k] = i < quads ? in[i] : zero;
        sum += v[k].x * v[k].x + v[k].y * v[k].y + v[k].z * v[k].z + v[k].w * v[k].w;
    }
    for (uint32_t i = threadIdx.x + KEPT * blockDim.x; i < quads; i += blockDim.x) {
        float4 u = in[i];
        sum += u.x * u.x + u.y * u.y + u.z * u.z + u.w * u.w;
    }
    float f = rsqrtf(block_sum(sum) / (float)hidden + eps);
    int k = 0;
#pragma unroll 2
    for (uint32_t i = threadIdx.x; i < rounded; i += blockDim.x, k++) {
        float4 u = k == 0 ? v[0] : k == 1 ? v[1] : i < quads ? in[i] : zero;
        float4 t = i < quads ? wt[i] : zero;
        put_row(to, blockIdx.x, i / 32,
                make_float4(u.x * f * t.x, u.y * f * t.y, u.z * f * t.z, u.w * f * t.w));
    }
}

/* Warps take blocks of columns of rows one after the other. */
template <bool SWIGLU>
static __global__ void rows_e4m3_kernel(const uint2 *a, uint32_t m,
                                        const __grid_constant__ struct target to)
{
    const uint32_t blocks = (to.k + 127) / 128, quads = to.k / 4;
    const size_t warp = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) / 32;
    const size_t row = warp / blocks;
    const uint32_t b = (uint32_t)(warp % blocks), i = b * 32 + threadIdx.x % 32;
    early_next();
    early_wait();
    if (row >= m) {
        return;
    }
    float4 v = make_float4(0, 0, 0, 0);
    if (i < quads && !SWIGLU) {
        v = f16_quad(a[row * quads + i]);
    } else if (i < quads) {
        float4 g = bf16_quad(a[row * 2 * quads + i]), u = bf16_quad(a[row * 2 * quads + quads + i]);
        v = make_float4(
            __fdividef(g.x, 1.0f + __expf(-g.x)) * u.x, __fdividef(g.y, 1.0f + __expf(-g.y)) * u.y,
            __fdividef(g.z, 1.0f + __expf(-g.z)) * u.z, __fdividef(g.w, 1.0f + __expf(-g.w)) * u.w);
    }
    put_row(to, row, b, v);
}

static struct target target_of(const struct bt_cu_e4m3_rows *to, uint32_t m, uint32_t k)
{
    return {to->v, to->scale, bt_cu_e4m3_stride(m), k};
}

extern "C" cudaError_t bt_cu_norm_e4m3(const float *x, const float *w, uint32_t m, uint32_t hidden,
                                       float eps, const struct bt_cu_e4m3_rows *to, cudaStream_t s)
{
    return launch_early(norm_e4m3_kernel, m, hidden >= 4096 ? 512 : 128, 0, s, x, w, hidden, eps,
                        target_of(to, m, hidden));
}

template <bool SWIGLU>
static cudaError_t launch_rows(const void *a, uint32_t m, uint32_t k,
                               const struct bt_cu_e4m3_rows *to, cudaStream_t s)
{
    size_t warps = (size_t)m * ((k + 127) / 128);
    return launch_early(rows_e4m3_kernel<SWIGLU>, (uint32_t)((warps + 7) / 8), 256, 0, s,
                        (const uint2 *)a, m, target_of(to, m, k));
}

extern "C" cudaError_t bt_cu_swiglu_e4m3(const void *gu, uint32_t m, uint32_t inter,
                                         const struct bt_cu_e4m3_rows *to, cudaStream_t s)
{
    return launch_rows<true>(gu, m, inter, to, s);
}

extern "C" cudaError_t bt_cu_rows_e4m3(const void *a, uint32_t m, uint32_t k,
                                       const struct bt_cu_e4m3_rows *to, cudaStream_t s)
{
    return launch_rows<false>(a, m, k, to, s);
}

/* ---- weights ---- */

/* A block of 128 x 128: eight warps of 16 rows. */
static __global__ void quantize_kernel(const uint2 *from, uint32_t n, uint32_t k, uint8_t *w,
                                       float *scale, uint32_t stride, uint32_t *bad)
{
    __shared__ float tops[8];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, quads = k / 4;
    const uint32_t quad = blockIdx.x * 32 + lane;
    uint2 v[16];
    float top = 0;
    bool finite = true;
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) {
        uint32_t row = blockIdx.y * 128 + warp * 16 + i;
        v[i] = row < n && quad < quads ? from[(size_t)row * quads + quad] : make_uint2(0, 0);
        float t = top4(bf16_quad(v[i]));
        finite &= (v[i].x & 0x7f80u) != 0x7f80u && (v[i].x >> 16 & 0x7f80u) != 0x7f80u &&
                  (v[i].y & 0x7f80u) != 0x7f80u && (v[i].y >> 16 & 0x7f80u) != 0x7f80u;
        top = fmaxf(top, t);
    }
    top = warp_max(top);
    if (lane == 0) {
        tops[warp] = top;
    }
    __syncthreads();
    for (int i = 0; i < 8; i++) {
        top = fmaxf(top, tops[i]);
    }
    const float s = fmaxf(__fdiv_rn(top, LARGEST), 0x1p-126f);
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) {
        uint32_t row = blockIdx.y * 128 + warp * 16 + i;
        float4 f = bf16_quad(v[i]);
        uint32_t four =
            pack_e4m3(__fdiv_rn(f.x, s), __fdiv_rn(f.y, s), __fdiv_rn(f.z, s), __fdiv_rn(f.w, s));
        put_ordered(four, w + (size_t)row * k + blockIdx.x * 128, row < n && quad < quads);
    }
    if (threadIdx.x == 0) {
        scale[blockIdx.y * stride + blockIdx.x] = s;
    }
    if (!finite) {
        *bad = 1;
    }
}

extern "C" cudaError_t bt_cu_quantize(const void *from, uint32_t n, uint32_t k, uint8_t *w,
                                      float *scale, uint32_t *bad, cudaStream_t s)
{
    quantize_kernel<<<dim3((k + 127) / 128, (n + 127) / 128), 256, 0, s>>>(
        (const uint2 *)from, n, k, w, scale, bt_cu_scale_stride(k), bad);
    return cudaGetLastError();
}

static __device__ __forceinline__ bool any_nan(uint32_t v)
{
    return __vcmpeq4(v & 0x7f7f7f7fu, 0x7f7f7f7fu) != 0;
}

/* A thread orders 16 columns. */
static __global__ void order_kernel(const uint4 *from, size_t n16, uint4 *w, uint32_t *bad)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= n16) {
        return;
    }
    uint4 v = from[i];
    w[i] = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                      __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
    if (any_nan(v.x) || any_nan(v.y) || any_nan(v.z) || any_nan(v.w)) {
        *bad = 1;
    }
}

extern "C" cudaError_t bt_cu_order(const uint8_t *from, uint32_t n, uint32_t k, uint8_t *w,
                                   uint32_t *bad, cudaStream_t s)
{
    size_t n16 = (size_t)n * k / 16;
    order_kernel<<<(uint32_t)((n16 + 255) / 256), 256, 0, s>>>((const uint4 *)from, n16, (uint4 *)w,
                                                               bad);
    return cudaGetLastError();
}
