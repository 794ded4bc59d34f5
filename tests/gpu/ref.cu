/* Slow kernels of ref.h: one block per (row, head), f32 sums. */
#include "tests/gpu/ref.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/engine/cuda/mma.cuh"

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        cudaError_t e_ = (x);                                                                      \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_));            \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static __device__ float value(const void *p, size_t i, int type)
{
    return type == BT_CU_F16 ? __half2float(((const __half *)p)[i])
                             : __bfloat162float(((const __nv_bfloat16 *)p)[i]);
}
static __device__ void put(void *p, size_t i, int type, float v)
{
    if (type == BT_CU_F16) {
        ((__half *)p)[i] = __float2half(v);
    } else if (type == BT_CU_E4M3) {
        ((uint8_t *)p)[i] = (uint8_t)__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
    } else {
        ((__nv_bfloat16 *)p)[i] = __float2bfloat16(v);
    }
}
static __device__ uint32_t hash(uint32_t a, uint32_t b)
{
    uint64_t x = ((uint64_t)a << 32 | b) * 0x9E3779B97F4A7C15ull;
    x ^= x >> 31;
    x *= 0xBF58476D1CE4E5B9ull;
    return (uint32_t)(x >> 32);
}
static __device__ float normal(uint32_t seed, size_t i)
{
    uint32_t a = hash(seed, (uint32_t)i), b = hash(seed + 0x9E37u, (uint32_t)(i >> 16) ^ a);
    float u = ((float)(a >> 8) + 0.5f) * 0x1p-24f, v = (float)(b >> 8) * 0x1p-24f;
    return sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v);
}

static __global__ void fill_kernel(void *p, size_t n, int type, float sigma, uint32_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        put(p, i, type, normal(seed, i) * sigma);
    }
}

extern "C" void ref_fill(void *p, size_t n, int type, float sigma, uint32_t seed)
{
    fill_kernel<<<1024, 256>>>(p, n, type, sigma, seed);
    CHECK(cudaGetLastError());
}

static __device__ size_t kv_row(const struct bt_attn_pool &p, uint32_t layer_row,
                                const int32_t *table, int token, int head, int plane)
{
    size_t page = (size_t)table[token / p.page_tokens];
    return page * p.page_rows + layer_row + ((size_t)head * 2 + plane) * p.page_tokens +
           token % p.page_tokens;
}

/* E4M3: the scale's byte of a row, counted from the segment. */
static __device__ uint8_t *scale_at(const struct bt_attn_pool &p, uint32_t layer_row,
                                    const int32_t *table, int token, int head, int plane)
{
    size_t segment = (size_t)table[token / p.page_tokens] * p.page_rows + layer_row;
    return (uint8_t *)p.kv + (segment + p.scale_row) * p.head_dim +
           ((size_t)head * 2 + plane) * p.page_tokens + token % p.page_tokens;
}
static __device__ float kv_value(const struct bt_attn_pool &p, uint32_t layer_row,
                                 const int32_t *table, int token, int head, int plane, int d)
{
    size_t at = kv_row(p, layer_row, table, token, head, plane) * p.head_dim + d;
    if (p.type != BT_CU_E4M3) {
        return value(p.kv, at, p.type);
    }
    __half_raw h = __nv_cvt_fp8_to_halfraw(((const __nv_fp8_storage_t *)p.kv)[at], __NV_E4M3);
    int e = *scale_at(p, layer_row, table, token, head, plane);
    return __half2float(__half(h)) * (e ? exp2f((float)(e - 127)) : 0.0f);
}

static __global__ void fill_kv_kernel(struct bt_attn_pool p, uint32_t layer_row,
                                      const int32_t *table, int len, uint32_t seed)
{
    int token = blockIdx.x;
    for (int i = threadIdx.x; i < (int)(p.kv_heads * 2 * p.head_dim); i += blockDim.x) {
        int d = i % p.head_dim, plane = i / p.head_dim % 2, head = i / p.head_dim / 2;
        size_t at = kv_row(p, layer_row, table, token, head, plane) * p.head_dim + d;
        if (p.type != BT_CU_E4M3) {
            put((void *)p.kv, at, p.type, normal(seed + token, i));
            continue;
        }
        uint32_t row = hash(seed ^ 77u, token * 64u + head * 2 + plane); /* scales go far apart */
        put((void *)p.kv, at, p.type, normal(seed + token, i) * 120.0f);
        *scale_at(p, layer_row, table, token, head, plane) =
            (uint8_t)(row % 64 == 0 ? 0 : 127 - 6 - row / 64 % 6);
    }
}

/* A block for each (row, head, K or V): exchanges the last token's bytes with what is kept. */
static __global__ void last_kv_kernel(struct bt_attn_pool p, uint32_t layer_row,
                                      const struct ref_row *rows, const int32_t *table,
                                      uint32_t table_stride, uint8_t *kept, uint32_t late_us)
{
    uint32_t bytes = p.head_dim * (p.type == BT_CU_E4M3 ? 1 : 2);
    struct ref_row r = rows[blockIdx.x];
    int head = blockIdx.y / 2, plane = blockIdx.y % 2;
    early_next();
    for (uint32_t us = 0; us < late_us; us++) {
        __nanosleep(1000);
    }
    if (r.pos < 0) {
        return;
    }
    const int32_t *pages = table + (size_t)r.slot * table_stride;
    uint8_t *at = (uint8_t *)p.kv + kv_row(p, layer_row, pages, r.pos, head, plane) * bytes;
    kept += (blockIdx.x * (size_t)gridDim.y + blockIdx.y) * (bytes + 1);
    for (uint32_t i = threadIdx.x; i < bytes + (p.type == BT_CU_E4M3); i += blockDim.x) {
        uint8_t *x = i < bytes ? at + i : scale_at(p, layer_row, pages, r.pos, head, plane);
        uint8_t v = *x;
        *x = kept[i];
        kept[i] = v;
    }
}

extern "C" void ref_last_kv(const struct bt_attn_pool *p, uint32_t layer_row,
                            const struct ref_row *rows, uint32_t n, const int32_t *table,
                            uint32_t table_stride, void *kept, uint32_t late_us)
{
    last_kv_kernel<<<dim3(n, p->kv_heads * 2), 64>>>(*p, layer_row, rows, table, table_stride,
                                                     (uint8_t *)kept, late_us);
    CHECK(cudaGetLastError());
}

extern "C" void ref_fill_kv(const struct bt_attn_pool *p, uint32_t layer_row,
                            const int32_t *table_row, int len, uint32_t seed)
{
    if (len > 0) {
        fill_kv_kernel<<<len, 256>>>(*p, layer_row, table_row, len, seed);
        CHECK(cudaGetLastError());
    }
}

static __device__ float block_reduce(float v, bool max)
{
    __shared__ float s[16];
    for (int d = 16; d > 0; d /= 2) {
        float o = __shfl_xor_sync(~0u, v, d);
        v = max ? fmaxf(v, o) : v + o;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        s[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = s[0];
    for (int i = 1; i < (int)blockDim.x / 32; i++) {
        v = max ? fmaxf(v, s[i]) : v + s[i];
    }
    return v;
}

static __global__ void attn_kernel(struct bt_attn_pool p, uint32_t layer_row, const void *q,
                                   uint32_t q_stride, const struct ref_row *rows,
                                   const int32_t *table, uint32_t table_stride, float *out)
{
    extern __shared__ float score[];
    int q_type = p.type == BT_CU_BF16 ? BT_CU_BF16 : BT_CU_F16;
    int row = blockIdx.x, head = blockIdx.y, d_n = p.head_dim,
        kv_head = head / (p.heads / p.kv_heads);
    struct ref_row r = rows[row];
    int to = r.pos + 1, from = p.window && to > (int)p.window ? to - (int)p.window : 0;
    const int32_t *t = table + (size_t)r.slot * table_stride;
    float scale = p.scale != 0 ? p.scale : rsqrtf((float)d_n), mx = -INFINITY, sum = 0;
    for (int i = from + threadIdx.x; i < to; i += blockDim.x) {
        float s = 0;
        for (int d = 0; d < d_n; d++) {
            s += value(q, (size_t)row * q_stride + (size_t)head * d_n + d, q_type) *
                 kv_value(p, layer_row, t, i, kv_head, 0, d);
        }
        score[i - from] = s * scale;
        mx = fmaxf(mx, s * scale);
    }
    mx = block_reduce(mx, true);
    for (int i = from + threadIdx.x; i < to; i += blockDim.x) {
        score[i - from] = expf(score[i - from] - mx);
        sum += score[i - from];
    }
    sum = block_reduce(sum, false);
    for (int d = threadIdx.x; d < d_n; d += blockDim.x) {
        float o = 0;
        for (int i = from; i < to; i++) {
            o += score[i - from] * kv_value(p, layer_row, t, i, kv_head, 1, d);
        }
        out[((size_t)row * p.heads + head) * d_n + d] = o / sum;
    }
}

extern "C" void ref_attn(const struct bt_attn_pool *p, uint32_t layer_row, const void *q,
                         uint32_t q_stride, const struct ref_row *rows, uint32_t n_rows,
                         const int32_t *table, uint32_t table_stride, float *out)
{
    CHECK(
        cudaFuncSetAttribute(attn_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    dim3 grid(n_rows, p->heads);
    attn_kernel<<<grid, 256, 200 * 1024>>>(*p, layer_row, q, q_stride, rows, table, table_stride,
                                           out);
    CHECK(cudaGetLastError());
}

/* The product of two rows of k values, by a warp. */
static __device__ double warp_dot(const __nv_bfloat16 *x, const __nv_bfloat16 *y, uint32_t k)
{
    double sum = 0;
    for (uint32_t i = threadIdx.x % 32; i < k; i += 32) {
        sum += (double)__bfloat162float(x[i]) * (double)__bfloat162float(y[i]);
    }
    for (int d = 16; d > 0; d /= 2) {
        sum += __shfl_xor_sync(~0u, sum, d);
    }
    return sum;
}

static __global__ void experts_up_kernel(const __nv_bfloat16 *w, const __nv_bfloat16 *a,
                                         const uint32_t *expert, size_t uses, uint32_t used,
                                         uint32_t hidden, uint32_t inter, __nv_bfloat16 *h)
{
    size_t warps = (size_t)gridDim.x * blockDim.x / 32;
    for (size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) / 32; i < uses * inter;
         i += warps) {
        size_t use = i / inter, at = i % inter, e = expert[use];
        if (e == 0xffffffffu) {
            continue;
        }
        const __nv_bfloat16 *x = a + use / used * hidden, *row = w + (e * 2 * inter + at) * hidden;
        double gate = warp_dot(row, x, hidden),
               up = warp_dot(row + inter * (size_t)hidden, x, hidden);
        if (threadIdx.x % 32 == 0) {
            h[i] = __float2bfloat16((float)(gate / (1 + exp(-gate)) * up));
        }
    }
}

static __global__ void experts_down_kernel(const __nv_bfloat16 *w, const __nv_bfloat16 *h,
                                           const uint32_t *expert, const float *weight,
                                           uint32_t rows, uint32_t used, uint32_t hidden,
                                           uint32_t inter, float *out)
{
    size_t warps = (size_t)gridDim.x * blockDim.x / 32;
    for (size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) / 32; i < (size_t)rows * hidden;
         i += warps) {
        size_t row = i / hidden, at = i % hidden;
        double sum = 0;
        for (size_t use = row * used; use < (row + 1) * used; use++) {
            size_t e = expert[use];
            if (e != 0xffffffffu) {
                sum +=
                    weight[use] * warp_dot(w + (e * hidden + at) * inter, h + use * inter, inter);
            }
        }
        if (threadIdx.x % 32 == 0) {
            out[i] = (float)sum;
        }
    }
}

extern "C" void ref_experts(const void *gate_up, const void *down, const void *a,
                            const uint32_t *expert, const float *weight, uint32_t rows,
                            uint32_t used, uint32_t hidden, uint32_t inter, void *h, float *out)
{
    experts_up_kernel<<<4096, 256>>>((const __nv_bfloat16 *)gate_up, (const __nv_bfloat16 *)a,
                                     expert, (size_t)rows * used, used, hidden, inter,
                                     (__nv_bfloat16 *)h);
    experts_down_kernel<<<4096, 256>>>((const __nv_bfloat16 *)down, (const __nv_bfloat16 *)h,
                                       expert, weight, rows, used, hidden, inter, out);
    CHECK(cudaGetLastError());
}

/* A scale has three bits, so that its product with four bits of e4m3 is exact in bf16. */
static __global__ void fill_e4m3_weights_kernel(uint8_t *w, float *scale, __nv_bfloat16 *values,
                                                size_t n, uint32_t k, uint32_t stride, float sigma,
                                                uint32_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n * k;
         i += (size_t)gridDim.x * blockDim.x) {
        const size_t row = i / k, col = i % k, block = row / 128 * stride + col / 128;
        const uint32_t h = hash(seed, (int)block), at = col % 16;
        const float s = ldexpf(1.0f + (float)(h % 4) / 4, (int)(h / 4 % 5) - 5) * sigma;
        const uint8_t v =
            (uint8_t)__nv_cvt_float_to_fp8(normal(seed, i) * sigma / s, __NV_SATFINITE, __NV_E4M3);
        const __half_raw f = __nv_cvt_fp8_to_halfraw(v, __NV_E4M3);
        w[i - at + at % 8 / 2 * 4 + at / 8 * 2 + at % 2] = v;
        if (values) {
            values[i] = __float2bfloat16(__half2float(f) * s);
        }
        if (row % 128 == 0 && col % 128 == 0) {
            scale[block] = s;
        }
    }
}

extern "C" void ref_fill_e4m3(const struct bt_cu_weight *w, void *bf16, size_t n, uint32_t k,
                              float sigma, uint32_t seed)
{
    fill_e4m3_weights_kernel<<<4096, 256>>>((uint8_t *)w->w, w->scale, (__nv_bfloat16 *)bf16, n, k,
                                            bt_cu_scale_stride(k), exp2f(rintf(log2f(sigma))),
                                            seed);
    CHECK(cudaGetLastError());
}

static __device__ uint8_t *mla_row(const struct bt_mla_pool &p, uint32_t layer_row,
                                   const int32_t *table, int token)
{
    size_t page = (size_t)table[token / BT_MLA_PAGE_TOKENS];
    size_t row = page * p.page_rows + layer_row + token % BT_MLA_PAGE_TOKENS;
    return (uint8_t *)p.kv + row * (p.e4m3 ? BT_MLA_E4M3_ROW : BT_MLA_ROW * 2);
}
static __device__ float mla_value(const struct bt_mla_pool &p, const uint8_t *row, int d)
{
    if (!p.e4m3) {
        return __half2float(((const __half *)row)[d]);
    }
    if (d >= BT_MLA_LATENT) {
        return __bfloat162float(
            ((const __nv_bfloat16 *)(row + BT_MLA_E4M3_ROPE))[d - BT_MLA_LATENT]);
    }
    __half_raw h = __nv_cvt_fp8_to_halfraw(row[d], __NV_E4M3);
    return __half2float(h) * ((const float *)(row + BT_MLA_E4M3_SCALES))[d / 128];
}

/* In e4m3, groups of a row differ in size, a scale is up to 2^4 larger than the values need, and
 * some rows are so small that the smallest scale is too large for them. */
static __device__ void fill_e4m3(uint8_t *row, float sigma, uint32_t seed, bool even)
{
    if (!even && hash(seed, 77) % 16 == 0) {
        sigma *= 0x1p-12f;
    }
    for (int i = threadIdx.x; i < BT_MLA_LATENT; i += blockDim.x) {
        uint32_t h = hash(seed, 1000 + i / 128);
        float size = sigma * (!even && h % 8 == 0 ? 0x1p-5f : 1.0f);
        int k = min(max(ilogbf(size * 4.5f / 448) + 1 + (int)(h / 8 % 5), -15), 7);
        row[i] = (uint8_t)__nv_cvt_float_to_fp8(ldexpf(normal(seed, i) * size, -k), __NV_SATFINITE,
                                                __NV_E4M3);
        if (i % 128 == 0) {
            ((float *)(row + BT_MLA_E4M3_SCALES))[i / 128] = ldexpf(1, k);
        }
    }
    for (int i = threadIdx.x; i < BT_MLA_ROW - BT_MLA_LATENT; i += blockDim.x) {
        ((__nv_bfloat16 *)(row + BT_MLA_E4M3_ROPE))[i] =
            __float2bfloat16(normal(seed, BT_MLA_LATENT + i) * sigma);
    }
}

static __global__ void fill_mla_kernel(struct bt_mla_pool p, uint32_t layer_row,
                                       const int32_t *table, uint32_t seed, bool even)
{
    int token = blockIdx.x;
    float sigma = even || hash(seed, token) % 16 ? 1.0f : 1.0f + (float)(token % 4096) / 800.0f;
    uint8_t *row = mla_row(p, layer_row, table, token);
    if (p.e4m3) {
        fill_e4m3(row, sigma, seed + token, even);
        return;
    }
    for (int i = threadIdx.x; i < BT_MLA_ROW; i += blockDim.x) {
        ((__half *)row)[i] = __float2half(normal(seed + token, i) * sigma);
    }
}

extern "C" void ref_fill_mla(const struct bt_mla_pool *p, uint32_t layer_row,
                             const int32_t *table_row, int len, uint32_t seed, bool even)
{
    if (len > 0) {
        fill_mla_kernel<<<len, 192>>>(*p, layer_row, table_row, seed, even);
        CHECK(cudaGetLastError());
    }
}

static __global__ void mla_kernel(struct bt_mla_pool p, uint32_t layer_row, const __half *q,
                                  const struct ref_row *rows, const int32_t *table,
                                  uint32_t table_stride, float *out)
{
    extern __shared__ float score[];
    int row = blockIdx.x, head = blockIdx.y, n = rows[row].pos + 1;
    const int32_t *t = table + (size_t)rows[row].slot * table_stride;
    q += ((size_t)row * p.heads + head) * BT_MLA_ROW;
    float mx = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const uint8_t *k = mla_row(p, layer_row, t, i);
        float s = 0;
        for (int d = 0; d < BT_MLA_ROW; d++) {
            s += __half2float(q[d]) * mla_value(p, k, d);
        }
        score[i] = s * p.scale;
        mx = fmaxf(mx, score[i]);
    }
    mx = block_reduce(mx, true);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        score[i] = expf(score[i] - mx);
        sum += score[i];
    }
    sum = block_reduce(sum, false);
    for (int d = threadIdx.x; d < BT_MLA_LATENT; d += blockDim.x) {
        float o = 0;
        for (int i = 0; i < n; i++) {
            o += score[i] * mla_value(p, mla_row(p, layer_row, t, i), d);
        }
        out[((size_t)row * p.heads + head) * BT_MLA_LATENT + d] = sum > 0 ? o / sum : 0.0f;
    }
}

extern "C" void ref_mla(const struct bt_mla_pool *p, uint32_t layer_row, const void *q,
                        const struct ref_row *rows, uint32_t n_rows, const int32_t *table,
                        uint32_t table_stride, float *out)
{
    const int bytes = 200 * 1024; /* the scores of 50k tokens */
    CHECK(cudaFuncSetAttribute(mla_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    mla_kernel<<<dim3(n_rows, p->heads), 512, bytes>>>(*p, layer_row, (const __half *)q, rows,
                                                       table, table_stride, out);
    CHECK(cudaGetLastError());
}

static __global__ void mla_prefill_kernel(struct bt_mla_prefill f, const struct ref_row *rows,
                                          const int32_t *at, float *out)
{
    extern __shared__ float score[];
    const int head = blockIdx.y, n = rows[blockIdx.x].pos + 1;
    const size_t first = (size_t)rows[blockIdx.x].slot;
    const __half *q = (const __half *)f.q + at[blockIdx.x] * f.q_stride + head * BT_MLA_HEAD_Q;
    const __half *kv = (const __half *)f.kv + first * f.kv_stride + head * BT_MLA_HEAD_KV;
    const __half *rope = (const __half *)f.k_rope + first * f.rope_stride;
    float mx = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float s = 0;
        for (int d = 0; d < BT_MLA_HEAD_NOPE; d++) {
            s += __half2float(q[d]) * __half2float(kv[i * f.kv_stride + d]);
        }
        for (int d = 0; d < BT_MLA_HEAD_ROPE; d++) {
            s += __half2float(q[BT_MLA_HEAD_NOPE + d]) * __half2float(rope[i * f.rope_stride + d]);
        }
        score[i] = s * f.scale;
        mx = fmaxf(mx, score[i]);
    }
    mx = block_reduce(mx, true);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        score[i] = expf(score[i] - mx);
        sum += score[i];
    }
    sum = block_reduce(sum, false);
    for (int d = threadIdx.x; d < BT_MLA_HEAD_VALUE; d += blockDim.x) {
        float o = 0;
        for (int i = 0; i < n; i++) {
            o += score[i] * __half2float(kv[i * f.kv_stride + BT_MLA_HEAD_NOPE + d]);
        }
        out[((size_t)blockIdx.x * f.heads + head) * BT_MLA_HEAD_VALUE + d] = o / sum;
    }
}

extern "C" void ref_mla_prefill(const struct bt_mla_prefill *f, const struct ref_row *rows,
                                const int32_t *at, uint32_t n_rows, float *out)
{
    const int bytes = 200 * 1024; /* the scores of 50k tokens */
    CHECK(cudaFuncSetAttribute(mla_prefill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               bytes));
    mla_prefill_kernel<<<dim3(n_rows, f->heads), 256, bytes>>>(*f, rows, at, out);
    CHECK(cudaGetLastError());
}

static __global__ void worst_kernel(const void *out, uint32_t out_stride, int type,
                                    const float *ref, uint32_t heads, uint32_t dim, float *worst)
{
    int row = blockIdx.x, head = blockIdx.y;
    float diff = 0, norm = 0;
    for (int d = threadIdx.x; d < (int)dim; d += blockDim.x) {
        float r = ref[((size_t)row * heads + head) * dim + d];
        float o = value(out, (size_t)row * out_stride + (size_t)head * dim + d, type);
        diff += (o - r) * (o - r);
        norm += r * r;
    }
    diff = block_reduce(diff, false);
    norm = block_reduce(norm, false);
    float e = diff == 0 ? 0.0f : sqrtf(diff / norm);
    if (threadIdx.x == 0) { /* positive floats order like their bits */
        atomicMax((int *)worst, __float_as_int(e == e ? e : 1e9f));
    }
}

extern "C" float ref_worst(const void *out, uint32_t out_stride, int type, const float *ref,
                           uint32_t rows, uint32_t heads, uint32_t dim)
{
    float *d, h;
    CHECK(cudaMalloc(&d, 4));
    CHECK(cudaMemset(d, 0, 4));
    worst_kernel<<<dim3(rows, heads), 64>>>(out, out_stride, type, ref, heads, dim, d);
    CHECK(cudaMemcpy(&h, d, 4, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(d));
    return h;
}

static __global__ void __launch_bounds__(512) read_kernel(const uint4 *p, size_t n, uint32_t *out)
{
    uint32_t a = 0;
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i + 7 * step < n;
         i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            v[k] = __ldcs(p + i + k * step);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            a ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
        }
    }
    if (a == 0x12345678u) {
        *out = a;
    }
}

extern "C" float ref_read_gbs(cudaStream_t s)
{
    size_t bytes = (size_t)4 << 30;
    uint32_t *p;
    cudaEvent_t t0, t1;
    float best = 0;
    CHECK(cudaMalloc(&p, bytes + 256));
    ref_fill(p, bytes / 2, BT_CU_F16, 1.0f, 3);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventCreate(&t0));
    CHECK(cudaEventCreate(&t1));
    for (int i = 0; i < 9; i++) {
        float ms;
        CHECK(cudaEventRecord(t0, s));
        read_kernel<<<132 << (i % 3), 512, 0, s>>>((const uint4 *)p, bytes / 16, p + bytes / 4);
        CHECK(cudaEventRecord(t1, s));
        CHECK(cudaEventSynchronize(t1));
        CHECK(cudaEventElapsedTime(&ms, t0, t1));
        best = fmaxf(best, (float)bytes / ms / 1e6f);
    }
    CHECK(cudaFree(p));
    return best;
}
