/* Kernels of quant.h. All are bound by memory. Of activations, a thread rounds 16 neighbouring
 * columns, whose order changes; of weights, a warp rounds 128 columns of a row, each lane four. */
#include "common/engine/cuda/rows/quant.h"

#include "common/engine/cuda/block_sum.cuh"
#include "common/engine/cuda/fp8.cuh"
#include "common/engine/cuda/mma.cuh"

struct target { /* of activations */
    uint8_t *v;
    float *scale;
    uint32_t stride, k;
};

/* Rounds 16 columns of a row, from `col` on; eight lanes have the 128 columns of one scale. All
 * lanes of a warp run this together; those beyond k have zeros. */
static __device__ __forceinline__ void put16(const struct target &to, size_t row, uint32_t col,
                                             const float (&v)[16])
{
    const float f = e4m3_factor(top128(v));
    const uint4 w = ordered16(v, f);
    if (col < to.k) {
        *(uint4 *)(to.v + row * to.k + col) = w;
        if (col % BT_CU_WEIGHT_BLOCK == 0) {
            to.scale[(size_t)(col / BT_CU_WEIGHT_BLOCK) * to.stride + row] = e4m3_scale_of(f);
        }
    }
}

static __device__ __forceinline__ float4 bf16_quad(const uint2 &v)
{
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                       __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
}

/* A block has a row, and a thread 16 columns at a time: of the first, it keeps the values. */
static __global__ void norm_e4m3_kernel(const float *x, const float *w, uint32_t hidden, float eps,
                                        const __grid_constant__ struct target to)
{
    const float4 *in = (const float4 *)(x + (size_t)blockIdx.x * hidden);
    const float4 *wt = (const float4 *)w, zero = make_float4(0, 0, 0, 0);
    const uint32_t first = threadIdx.x * 4, all = hidden / 4, rounded = (all + 127) / 128 * 128;
    float4 v[4], u[4];
    float sum = 0;
    early_next();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u[i] = first + i < all ? wt[first + i] : zero;
    }
    early_wait();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = first + i < all ? in[first + i] : zero;
        sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    }
    for (uint32_t at = first + blockDim.x * 4; at < all; at += blockDim.x * 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 t = at + i < all ? in[at + i] : zero;
            sum += t.x * t.x + t.y * t.y + t.z * t.z + t.w * t.w;
        }
    }
    const float f = rsqrtf(block_sum(sum) / (float)hidden + eps);
    for (uint32_t at = first; at < rounded; at += blockDim.x * 4) { /* whole warps */
        float r[16];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool kept = at == first, is = at + i < all;
            float4 t = kept ? v[i]
                       : is ? in[at + i]
                            : zero,
                   g = kept ? u[i]
                       : is ? wt[at + i]
                            : zero;
            r[i * 4] = t.x * f * g.x;
            r[i * 4 + 1] = t.y * f * g.y;
            r[i * 4 + 2] = t.z * f * g.z;
            r[i * 4 + 3] = t.w * f * g.w;
        }
        put16(to, blockIdx.x, at * 4, r);
    }
}

/* Eight lanes take 128 columns of a row; those of rows follow each other. */
template <bool SWIGLU>
static __global__ void rows_e4m3_kernel(const uint4 *a, uint32_t m,
                                        const __grid_constant__ struct target to)
{
    const uint32_t blocks = (to.k + 127) / 128, eighths = to.k / 8;
    const size_t at = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) / 8;
    const size_t row = at / blocks;
    const uint32_t col = (uint32_t)(at % blocks) * 128 + threadIdx.x % 8 * 16;
    const bool in = row < m && col < to.k;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    float v[16];
    early_next();
    early_wait();
    const uint4 *from = a + row * eighths * (SWIGLU ? 2 : 1) + col / 8;
    const uint4 x[2] = {in ? from[0] : zero, in ? from[1] : zero};
    wide8<SWIGLU>(x[0], v);
    wide8<SWIGLU>(x[1], v + 8);
    if (SWIGLU) {
        const uint4 y[2] = {in ? from[eighths] : zero, in ? from[eighths + 1] : zero};
        float up[16];
        wide8<true>(y[0], up);
        wide8<true>(y[1], up + 8);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = swiglu_fast(v[i], up[i]);
        }
    }
    put16(to, row, in ? col : to.k, v);
}

static struct target target_of(const struct bt_cu_e4m3_rows *to, uint32_t m, uint32_t k)
{
    return {to->v, to->scale, bt_cu_e4m3_stride(m), k};
}

extern "C" cudaError_t bt_cu_norm_e4m3(const float *x, const float *w, uint32_t m, uint32_t hidden,
                                       float eps, const struct bt_cu_e4m3_rows *to, cudaStream_t s)
{
    return launch_early(norm_e4m3_kernel, m, hidden >= 4096 ? 256 : 128, 0, s, x, w, hidden, eps,
                        target_of(to, m, hidden));
}

template <bool SWIGLU>
static cudaError_t launch_rows(const void *a, uint32_t m, uint32_t k,
                               const struct bt_cu_e4m3_rows *to, cudaStream_t s)
{
    size_t threads = (size_t)m * ((k + 127) / 128) * 8;
    return launch_early(rows_e4m3_kernel<SWIGLU>, (uint32_t)((threads + 255) / 256), 256, 0, s,
                        (const uint4 *)a, m, target_of(to, m, k));
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
