/* Kernels of rows.h. All are bound by memory: 16-byte accesses, each value read once. */
#include "common/engine/cuda/rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>

#include "common/engine/cuda/mma.cuh"

static __device__ __forceinline__ float block_sum(float v)
{
    __shared__ float s[33];
    for (int d = 16; d > 0; d /= 2) {
        v += __shfl_xor_sync(~0u, v, d);
    }
    if (threadIdx.x % 32 == 0) {
        s[threadIdx.x / 32] = v;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        float w = threadIdx.x < blockDim.x / 32 ? s[threadIdx.x] : 0;
        for (int d = 16; d > 0; d /= 2) {
            w += __shfl_xor_sync(~0u, w, d);
        }
        if (threadIdx.x == 0) {
            s[32] = w;
        }
    }
    __syncthreads();
    return s[32];
}

static __device__ __forceinline__ float2 bf16_pair(uint32_t v)
{
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

static __global__ void embed_kernel(const int32_t *ids, const int32_t *slots,
                                    const int32_t *last_token, const uint32_t *embed,
                                    uint32_t hidden, float2 *x)
{
    size_t t = blockIdx.x;
    int slot = slots[t], id = slot < 0 ? 0 : ids[t];
    id = id == BT_CU_ID_LAST ? last_token[slot] : id;
    for (uint32_t i = threadIdx.x; i < hidden / 2; i += blockDim.x) {
        float2 v = bf16_pair(embed[(size_t)id * (hidden / 2) + i]);
        x[t * (hidden / 2) + i] = slot < 0 ? make_float2(0, 0) : v;
    }
}

extern "C" cudaError_t bt_cu_embed(const int32_t *ids, const int32_t *slots,
                                   const int32_t *last_token, const void *embed, uint32_t n,
                                   uint32_t hidden, float *x, cudaStream_t s)
{
    embed_kernel<<<n, 256, 0, s>>>(ids, slots, last_token, (const uint32_t *)embed, hidden,
                                   (float2 *)x);
    return cudaGetLastError();
}

static __global__ void norm_kernel(const float *x, const int32_t *rows, const float *w,
                                   uint32_t hidden, float eps, uint2 *a)
{
    size_t t = blockIdx.x, from = rows ? (size_t)rows[t] : t;
    early_next(); /* gemv.cu asks for its weights */
    early_wait();
    const float4 *in = (const float4 *)(x + from * hidden), *wt = (const float4 *)w;
    float sum = 0;
    for (uint32_t i = threadIdx.x; i < hidden / 4; i += blockDim.x) {
        float4 v = in[i];
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    float f = rsqrtf(block_sum(sum) / (float)hidden + eps);
    for (uint32_t i = threadIdx.x; i < hidden / 4; i += blockDim.x) {
        float4 v = in[i], u = wt[i]; /* the second read comes from the cache */
        a[t * (hidden / 4) + i] = make_uint2(pack2<__nv_bfloat16>(v.x * f * u.x, v.y * f * u.y),
                                             pack2<__nv_bfloat16>(v.z * f * u.z, v.w * f * u.w));
    }
}

extern "C" cudaError_t bt_cu_norm(const float *x, const int32_t *rows, const float *w, uint32_t n,
                                  uint32_t hidden, float eps, void *a, cudaStream_t s)
{
    return launch_early(norm_kernel, n, hidden >= 4096 ? 512 : 128, 0, s, x, rows, w, hidden, eps,
                        (uint2 *)a);
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

/* One warp per (token, head); lane l holds pairs (i, i + D / 2), the halves that RoPE turns. */
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
    __half *out;
    if (is_q) {
        out = (__half *)a.q + ((size_t)t * a.heads + head) * D;
    } else {
        uint32_t kv = head - a.heads - (is_v ? a.kv_heads : 0);
        size_t page = (size_t)a.table[(size_t)a.slots[t] * a.table_stride + pos / a.page_tokens];
        size_t row = page * a.page_rows + a.layer_row + ((size_t)kv * 2 + is_v) * a.page_tokens +
                     pos % a.page_tokens;
        out = (__half *)a.pool + row * D;
    }
    const float *cs = a.rope + (size_t)pos * D;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int d = i * 32 + (int)lane;
        float c = is_v ? 1.0f : cs[d], s = is_v ? 0.0f : cs[D / 2 + d];
        out[d] = __float2half(v[0][i] * c - v[1][i] * s);
        out[D / 2 + d] = __float2half(v[1][i] * c + v[0][i] * s);
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

/* ---- drawing ---- */

/* bt_philox4x32 of common/base/philox.h for the device: the draws must be the same. */
static __device__ __forceinline__ void philox(const uint32_t (&key)[2],
                                              const uint32_t (&counter)[4], uint32_t (&out)[4])
{
    uint32_t k0 = key[0], k1 = key[1];
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint32_t n0 = __umulhi(0xCD9E8D57u, c2) ^ c1 ^ k0, n2 = __umulhi(0xD2511F53u, c0) ^ c3 ^ k1;
        c1 = 0xCD9E8D57u * c2;
        c3 = 0xD2511F53u * c0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

struct best {
    float v;
    uint32_t id;
};
static __device__ __forceinline__ struct best better(struct best a, struct best b)
{
    return b.v > a.v || (b.v == a.v && b.id < a.id) ? b : a;
}
static __device__ struct best block_best(struct best b)
{
    __shared__ struct best s[32];
    for (int d = 16; d > 0; d /= 2) {
        b = better(b, {__shfl_xor_sync(~0u, b.v, d), __shfl_xor_sync(~0u, b.id, d)});
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        s[threadIdx.x / 32] = b;
    }
    __syncthreads();
    b = s[threadIdx.x % 32];
    for (int d = 16; d > 0; d /= 2) {
        b = better(b, {__shfl_xor_sync(~0u, b.v, d), __shfl_xor_sync(~0u, b.id, d)});
    }
    return b;
}

static __global__ void __launch_bounds__(1024)
    draw_kernel(const float *logits, uint32_t vocab, const struct bt_cu_draw *draws,
                struct bt_cu_drawn *out, int32_t *last_token)
{
    const struct bt_cu_draw w = draws[blockIdx.x];
    const float *l = logits + (size_t)w.row * vocab;
    struct best top = {-INFINITY, 0xffffffffu};
    bool bad = false;
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) {
        bad |= !(l[i] < INFINITY); /* NaN too */
        top = better(top, {l[i], i});
    }
    bad = __syncthreads_or(bad);
    top = block_best(top);
    struct best chosen = top;
    float sum = 0;
    if (w.inv_temperature > 0) {
        const uint32_t key[2] = {(uint32_t)w.seed, (uint32_t)(w.seed >> 32)};
        chosen = {-INFINITY, 0xffffffffu};
        for (uint32_t g = threadIdx.x; g * 4 < vocab; g += blockDim.x) {
            const uint32_t counter[4] = {w.position, w.choice, g, 0};
            uint32_t words[4];
            philox(key, counter, words);
#pragma unroll
            for (uint32_t i = 0; i < 4 && g * 4 + i < vocab; i++) {
                float u = ((float)(words[i] >> 9) + 0.5f) * 0x1p-23f;
                float v = (l[g * 4 + i] - top.v) * w.inv_temperature - logf(-logf(u));
                chosen = better(chosen, {v, g * 4 + i});
            }
        }
        chosen = block_best(chosen);
    }
    if (w.logprob) {
        for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) {
            sum += expf(l[i] - top.v);
        }
        sum = block_sum(sum);
    }
    if (threadIdx.x == 0) {
        bad |= !(top.v > -INFINITY) || chosen.id >= vocab;
        uint32_t token = bad ? 0 : chosen.id;
        out[blockIdx.x] = {token, w.logprob && !bad ? l[token] - top.v - logf(sum) : 0.0f, bad};
        last_token[w.slot] = (int32_t)token;
    }
}

extern "C" cudaError_t bt_cu_draw(const float *logits, uint32_t vocab,
                                  const struct bt_cu_draw *draws, uint32_t n,
                                  struct bt_cu_drawn *out, int32_t *last_token, cudaStream_t s)
{
    draw_kernel<<<n, 1024, 0, s>>>(logits, vocab, draws, out, last_token);
    return cudaGetLastError();
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
