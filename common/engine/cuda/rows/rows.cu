/* Kernels of rows.h. All are bound by memory: 16-byte accesses, each value read once. */
#include "common/engine/cuda/rows/rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>

#include "common/engine/cuda/block_sum.cuh"
#include "common/engine/cuda/e4m3.cuh"
#include "common/engine/cuda/fp8.cuh"
#include "common/engine/cuda/mma.cuh"

static __device__ __forceinline__ float2 bf16_pair(uint32_t v)
{
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

static __global__ void fetch_kernel(const uint4 *from, uint4 *to, uint32_t n)
{
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        to[i] = from[i];
    }
}

extern "C" cudaError_t bt_cu_fetch(const void *pinned, void *to, size_t bytes, cudaStream_t s)
{
    fetch_kernel<<<1, 256, 0, s>>>((const uint4 *)pinned, (uint4 *)to, (uint32_t)(bytes / 16));
    return cudaGetLastError();
}

static __global__ void embed_kernel(const __grid_constant__ struct bt_cu_embed a)
{
    const size_t t = blockIdx.x, pairs = a.hidden / 2;
    const uint32_t *embed = (const uint32_t *)a.embed, *positions = (const uint32_t *)a.positions;
    float2 *x = (float2 *)a.x + t * pairs;
    int slot = a.slots[t], id = slot < 0 ? 0 : a.ids[t];
    id = id == BT_CU_ID_LAST ? a.last_token[slot] : id;
    for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
        float2 v = bf16_pair(embed[(size_t)id * pairs + i]);
        if (positions) {
            float2 p = bf16_pair(positions[(size_t)a.pos[t] * pairs + i]);
            v = make_float2(v.x + p.x, v.y + p.y);
        }
        x[i] = slot < 0 ? make_float2(0, 0) : v;
    }
}

extern "C" cudaError_t bt_cu_embed(const struct bt_cu_embed *a, cudaStream_t s)
{
    embed_kernel<<<a->n, 256, 0, s>>>(*a);
    return cudaGetLastError();
}

static __device__ __forceinline__ float square4(const float4 &v)
{
    return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}
template <class T>
static __device__ __forceinline__ uint2 scaled4(const float4 &v, float f, const float4 &w)
{
    const auto limit = [](float u) {
        if constexpr (__is_same(T, __half)) {
            return f16_range(u);
        } else {
            return u;
        }
    };
    return make_uint2(pack2<T>(limit(v.x * f * w.x), limit(v.y * f * w.y)),
                      pack2<T>(limit(v.z * f * w.z), limit(v.w * f * w.w)));
}

template <class T>
static __global__ void norm_kernel(const float *x, const int32_t *rows, const float *w,
                                   uint32_t hidden, float eps, uint2 *a)
{
    constexpr int KEPT = 2; /* groups of four that a thread reads once */
    const uint32_t quads = hidden / 4, rest = threadIdx.x + KEPT * blockDim.x;
    const float4 *wt = (const float4 *)w, zero = make_float4(0, 0, 0, 0);
    float4 v[KEPT], u[KEPT];
    early_next(); /* lets the next kernel start: it prefetches weights */
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        uint32_t i = threadIdx.x + k * blockDim.x;
        u[k] = i < quads ? wt[i] : zero;
    }
    early_wait();
    size_t t = blockIdx.x, from = rows ? (size_t)rows[t] : t;
    const float4 *in = (const float4 *)(x + from * hidden);
    float sum = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        uint32_t i = threadIdx.x + k * blockDim.x;
        v[k] = i < quads ? in[i] : zero;
        sum += square4(v[k]);
    }
    for (uint32_t i = rest; i < quads; i += blockDim.x) {
        sum += square4(in[i]);
    }
    float f = rsqrtf(block_sum(sum) / (float)hidden + eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        uint32_t i = threadIdx.x + k * blockDim.x;
        if (i < quads) {
            a[t * quads + i] = scaled4<T>(v[k], f, u[k]);
        }
    }
    for (uint32_t i = rest; i < quads; i += blockDim.x) { /* the cache still has these values */
        a[t * quads + i] = scaled4<T>(in[i], f, wt[i]);
    }
}

extern "C" cudaError_t bt_cu_norm(const float *x, const int32_t *rows, const float *w, uint32_t n,
                                  uint32_t hidden, float eps, void *a, cudaStream_t s)
{
    return launch_early(norm_kernel<__nv_bfloat16>, n, hidden >= 4096 ? 512 : 128, 0, s, x, rows, w,
                        hidden, eps, (uint2 *)a);
}

extern "C" cudaError_t bt_cu_norm_f16(const float *x, const int32_t *rows, const float *w,
                                      uint32_t n, uint32_t hidden, float eps, void *a,
                                      cudaStream_t s)
{
    return launch_early(norm_kernel<__half>, n, hidden >= 4096 ? 512 : 128, 0, s, x, rows, w,
                        hidden, eps, (uint2 *)a);
}

/* Mean and variance in two passes, as the mean may be much larger than the deviations. */
static __global__ void layer_norm_kernel(const __grid_constant__ struct bt_cu_layer_norm a)
{
    early_next();
    early_wait();
    const size_t t = blockIdx.x, from = a.rows ? (size_t)a.rows[t] : t;
    float *x = a.x + from * a.hidden;
    float sum = 0, square = 0;
    for (uint32_t i = threadIdx.x; i < a.hidden; i += blockDim.x) {
        float v = x[i] + (a.add ? a.add[i] : 0.0f);
        if (a.keep) {
            x[i] = v;
        }
        sum += v;
    }
    float mean = block_sum(sum) / (float)a.hidden;
    __syncthreads(); /* block_sum's memory is used again */
    for (uint32_t i = threadIdx.x; i < a.hidden; i += blockDim.x) {
        float v = x[i] + (a.add && !a.keep ? a.add[i] : 0.0f) - mean;
        square += v * v;
    }
    float f = rsqrtf(block_sum(square) / (float)a.hidden + a.eps);
    for (uint32_t i = threadIdx.x; i < a.hidden; i += blockDim.x) {
        float v = x[i] + (a.add && !a.keep ? a.add[i] : 0.0f) - mean;
        ((__nv_bfloat16 *)a.a)[t * a.hidden + i] = __float2bfloat16(v * f * a.w[i] + a.bias[i]);
    }
}

extern "C" cudaError_t bt_cu_layer_norm(const struct bt_cu_layer_norm *a, cudaStream_t s)
{
    return launch_early(layer_norm_kernel, a->n, 256, 0, s, *a);
}

static __global__ void gelu_kernel(const float *y, const float *bias, size_t n, uint32_t width,
                                   __nv_bfloat16 *a)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    early_next();
    early_wait();
    if (i < n) {
        float v = y[i] + bias[i % width];
        float t = tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v));
        a[i] = __float2bfloat16(0.5f * v * (1.0f + t));
    }
}

extern "C" cudaError_t bt_cu_gelu(const float *y, const float *bias, uint32_t n, uint32_t width,
                                  void *a, cudaStream_t s)
{
    const size_t all = (size_t)n * width;
    return launch_early(gelu_kernel, (uint32_t)((all + 255) / 256), 256, 0, s, y, bias, all, width,
                        (__nv_bfloat16 *)a);
}

static __device__ __forceinline__ uint32_t silu_mul(uint32_t gate, uint32_t up)
{
    float2 g = bf16_pair(gate), u = bf16_pair(up);
    return pack2<__nv_bfloat16>(g.x / (1.0f + __expf(-g.x)) * u.x,
                                g.y / (1.0f + __expf(-g.y)) * u.y);
}

static __global__ void swiglu_kernel(const uint4 *gu, uint32_t n, uint32_t inter8, uint4 *a)
{
    size_t at = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (at >= (size_t)n * inter8) {
        return;
    }
    size_t t = at / inter8, i = at % inter8;
    uint4 g = gu[t * 2 * inter8 + i], u = gu[t * 2 * inter8 + inter8 + i];
    a[at] =
        make_uint4(silu_mul(g.x, u.x), silu_mul(g.y, u.y), silu_mul(g.z, u.z), silu_mul(g.w, u.w));
}

extern "C" cudaError_t bt_cu_swiglu(const void *gu, uint32_t n, uint32_t inter, void *a,
                                    cudaStream_t s)
{
    size_t work = (size_t)n * (inter / 8);
    swiglu_kernel<<<(uint32_t)((work + 255) / 256), 256, 0, s>>>((const uint4 *)gu, n, inter / 8,
                                                                 (uint4 *)a);
    return cudaGetLastError();
}

/* A warp computes one row: lane l has values i * 32 + l of both halves. */
template <int D>
static __device__ __forceinline__ void put_f16(__half *out, uint32_t lane,
                                               const float (&v)[2][D / 64])
{
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        out[i * 32 + lane] = __float2half(v[0][i]);
        out[D / 2 + i * 32 + lane] = __float2half(v[1][i]);
    }
}
template <int D>
static __device__ __forceinline__ void put_e4m3(uint8_t *out, uint8_t *scale, uint32_t lane,
                                                const float (&v)[2][D / 64])
{
    float top = 0;
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        top = fmaxf(top, fmaxf(fabsf(v[0][i]), fabsf(v[1][i])));
    }
    for (int d = 16; d > 0; d /= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    }
    uint32_t e = e4m3_scale(top);
    float f = e4m3_scale_inverse(e);
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        out[i * 32 + lane] = e4m3_of(v[0][i] * f);
        out[D / 2 + i * 32 + lane] = e4m3_of(v[1][i] * f);
    }
    if (lane == 0) {
        *scale = (uint8_t)e;
    }
}

/* One warp for each (token, head); lane l has pairs (i, i + D / 2), which RoPE rotates. */
template <int D> static __global__ void append_kernel(const __grid_constant__ struct bt_cu_append a)
{
    constexpr int PAIRS = D / 64;
    uint32_t all = a.heads + 2 * a.kv_heads,
             warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    uint32_t t = warp / all, head = warp % all, lane = threadIdx.x % 32;
    early_next();
    early_wait();
    if (t >= a.n || a.slots[t] < 0) {
        return;
    }
    bool is_q = head < a.heads, is_v = head >= a.heads + a.kv_heads;
    const float *in = a.qkv + ((size_t)t * all + head) * D;
    const float *norm = is_q ? a.q_norm : is_v ? NULL : a.k_norm;
    int pos = a.pos[t];
    float v[2][PAIRS];
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int d = h * (D / 2) + i * 32 + (int)lane;
            v[h][i] = in[d] + (a.bias ? a.bias[(size_t)head * D + d] : 0.0f);
        }
    }
    if (norm) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            sum += v[0][i] * v[0][i] + v[1][i] * v[1][i];
        }
        for (int d = 16; d > 0; d /= 2) {
            sum += __shfl_xor_sync(~0u, sum, d);
        }
        float f = rsqrtf(sum / D + a.eps);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            v[0][i] *= f * norm[i * 32 + lane];
            v[1][i] *= f * norm[D / 2 + i * 32 + lane];
        }
    }
    const float *cs = a.rope + (size_t)pos * D;
#pragma unroll
    for (int i = 0; i < PAIRS && !is_v; i++) {
        int d = i * 32 + (int)lane;
        float c = cs[d], s = cs[D / 2 + d], lo = v[0][i], hi = v[1][i];
        v[0][i] = lo * c - hi * s;
        v[1][i] = hi * c + lo * s;
    }
    if (is_q) {
        put_f16<D>((__half *)a.q + ((size_t)t * a.heads + head) * D, lane, v);
        return;
    }
    uint32_t plane = (head - a.heads - (is_v ? a.kv_heads : 0)) * 2 + is_v;
    size_t page = (size_t)a.table[(size_t)a.slots[t] * a.table_stride + pos / a.page_tokens];
    size_t segment = page * a.page_rows + a.layer_row;
    uint32_t row = plane * a.page_tokens + pos % a.page_tokens;
    if (a.e4m3) {
        put_e4m3<D>((uint8_t *)a.pool + (segment + row) * D,
                    (uint8_t *)a.pool + (segment + a.scale_row) * D + row, lane, v);
    } else {
        put_f16<D>((__half *)a.pool + (segment + row) * D, lane, v);
    }
}

extern "C" cudaError_t bt_cu_append(const struct bt_cu_append *a, cudaStream_t s)
{
    uint32_t warps = a->n * (a->heads + 2 * a->kv_heads), grid = (warps + 7) / 8;
    switch (a->head_dim) {
    case 64: return launch_early(append_kernel<64>, grid, 256, 0, s, *a);
    case 128: return launch_early(append_kernel<128>, grid, 256, 0, s, *a);
    case 256: return launch_early(append_kernel<256>, grid, 256, 0, s, *a);
    default: return cudaErrorInvalidValue;
    }
}

static __global__ void dummy_kernel(uint32_t *w, size_t n2, float sigma, uint32_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n2;
         i += (size_t)gridDim.x * blockDim.x) {
        uint64_t x = ((uint64_t)seed << 40 ^ i) * 0x9E3779B97F4A7C15ull;
        x ^= x >> 29;
        x *= 0xBF58476D1CE4E5B9ull;
        float a = (float)(int32_t)(x >> 32) * 0x1p-31f, b = (float)(int32_t)x * 0x1p-31f;
        w[i] = pack2<__nv_bfloat16>(a * sigma, b * sigma);
    }
}

extern "C" cudaError_t bt_cu_dummy_bf16(void *w, size_t n, float sigma, uint32_t seed,
                                        cudaStream_t s)
{
    dummy_kernel<<<1024, 256, 0, s>>>((uint32_t *)w, n / 2, sigma, seed);
    return cudaGetLastError();
}

static __global__ void f16_kernel(uint32_t *w, size_t n2)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n2;
         i += (size_t)gridDim.x * blockDim.x) {
        float2 v = bf16_pair(w[i]);
        w[i] = pack2<__half>(v.x, v.y);
    }
}

extern "C" cudaError_t bt_cu_bf16_to_f16(void *w, size_t n, cudaStream_t s)
{
    f16_kernel<<<1024, 256, 0, s>>>((uint32_t *)w, n / 2);
    return cudaGetLastError();
}
