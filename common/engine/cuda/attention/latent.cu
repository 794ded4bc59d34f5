/* Kernels of latent.h. For single tokens the time is that of reading kv_b: its rows are requested
 * before the kernel waits for the one in front of it. The two products of each head have a head's
 * values as the M of an m16n8k16 product and tokens as its N, since there are few tokens. */
#include "common/engine/cuda/attention/latent.h"

#include "common/engine/cuda/attention/mla.h"
#include "common/engine/cuda/copy_async.cuh"
#include "common/engine/cuda/fp8.cuh"
#include "common/engine/cuda/mma.cuh"

#define WARPS 4
#define ROWS  64 /* tokens of a block of absorb and values, at most */
#define TILE  64 /* values of a query that a block of absorb makes */

static __device__ __forceinline__ float warp_sum(float v)
{
    for (int d = 16; d > 0; d /= 2) {
        v += __shfl_xor_sync(~0u, v, d);
    }
    return v;
}

static __device__ __forceinline__ uint2 pack4(const float4 &v)
{
    return make_uint2(pack2<__half>(v.x, v.y), pack2<__half>(v.z, v.w));
}

/* Lane l turns its pair of 64 values and writes it. */
template <class T>
static __device__ __forceinline__ void rope64(const struct bt_cu_rope &r, uint32_t t, uint32_t lane,
                                              const float *in, T *out)
{
    const float *cs = r.table + (size_t)r.pos[t] * BT_LATENT_ROPE;
    uint32_t i = r.pairs ? 2 * lane : lane, j = r.pairs ? i + 1 : i + BT_LATENT_ROPE / 2;
    float c = cs[lane], s = cs[BT_LATENT_ROPE / 2 + lane], lo = in[i], hi = in[j];
    const uint32_t both = pack2<T>(lo * c - hi * s, hi * c + lo * s);
    ((uint16_t *)out)[i] = (uint16_t)both;
    ((uint16_t *)out)[j] = (uint16_t)(both >> 16);
}

/* ---- append: a warp computes one row's latent or one row's q ---- */

/* A warp stores 128 latents, a lane four of them, and their scale: as bt_kv_latent_store does
 * (common/kv/latent.h), bit for bit. */
static __device__ __forceinline__ void store_e4m3(const float4 &v, uint32_t lane, uint8_t *values,
                                                  uint8_t *scale)
{
    uint32_t top = max(max(__float_as_uint(v.x) << 1, __float_as_uint(v.y) << 1),
                       max(__float_as_uint(v.z) << 1, __float_as_uint(v.w) << 1));
    top = __reduce_max_sync(~0u, top) >> 1; /* bits of the largest absolute value */
    const bool nan = top > 0x7f800000u;
    int k = (int)(top >> 23) - 127 - 8 + ((top & 0x7fffffu) > 0x600000u);
    k = min(max(k, -15), 7);
    const float f = __uint_as_float((uint32_t)(127 - k) << 23);
    const uint32_t four = e4m3_of(v.x * f) | e4m3_of(v.y * f) << 8 | e4m3_of(v.z * f) << 16 |
                          (uint32_t)e4m3_of(v.w * f) << 24;
    *(uint32_t *)(values + lane * 4) = nan ? 0 : four;
    if (lane == 0) {
        *(uint32_t *)scale = nan ? 0x7fc00000u : (uint32_t)(127 + k) << 23;
    }
}

static __device__ void append_latent(const struct bt_cu_latent_append &a, uint32_t t, uint32_t lane)
{
    constexpr int QUADS = BT_LATENT / 4 / 32;
    const float *in = a.in + (size_t)t * a.in_stride + a.in_stride - BT_LATENT_ROW;
    const float4 *w = (const float4 *)a.latent_norm;
    float4 v[QUADS];
    float sum = 0;
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
        v[k] = ((const float4 *)in)[k * 32 + lane];
        sum += v[k].x * v[k].x + v[k].y * v[k].y + v[k].z * v[k].z + v[k].w * v[k].w;
    }
    float f = rsqrtf(warp_sum(sum) / BT_LATENT + a.eps);
    uint32_t pos = (uint32_t)a.rope.pos[t];
    size_t page = (size_t)a.table[(size_t)a.slots[t] * a.table_stride + pos / a.page_tokens];
    size_t row = page * a.page_rows + a.layer_row + pos % a.page_tokens;
    uint8_t *out = (uint8_t *)a.pool + row * (a.e4m3 ? BT_MLA_E4M3_ROW : BT_LATENT_ROW * 2);
#pragma unroll
    for (int k = 0; k < QUADS; k++) { /* 128 values */
        float4 u = w[k * 32 + lane];
        u = make_float4(v[k].x * f * u.x, v[k].y * f * u.y, v[k].z * f * u.z, v[k].w * f * u.w);
        if (a.e4m3) {
            store_e4m3(u, lane, out + k * 128, out + BT_MLA_E4M3_SCALES + k * 4);
        } else {
            ((uint2 *)out)[k * 32 + lane] = pack4(u);
        }
    }
    if (a.e4m3) {
        rope64(a.rope, t, lane, in + BT_LATENT, (__nv_bfloat16 *)(out + BT_MLA_E4M3_ROPE));
    } else {
        rope64(a.rope, t, lane, in + BT_LATENT, (__half *)out + BT_LATENT);
    }
}

static __device__ void append_q(const struct bt_cu_latent_append &a, uint32_t t, uint32_t lane)
{
    const float4 *in = (const float4 *)(a.in + (size_t)t * a.in_stride),
                 *w = (const float4 *)a.q_norm;
    uint2 *out = (uint2 *)a.q + (size_t)t * (a.q_rank / 4);
    float sum = 0;
    for (uint32_t i = lane; i < a.q_rank / 4; i += 32) {
        float4 v = in[i];
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    float f = rsqrtf(warp_sum(sum) / (float)a.q_rank + a.eps);
    for (uint32_t i = lane; i < a.q_rank / 4; i += 32) { /* the cache still has these values */
        float4 v = in[i], u = w[i];
        out[i] = pack4_as(a.q_f16, v.x * f * u.x, v.y * f * u.y, v.z * f * u.z, v.w * f * u.w);
    }
}

static __device__ __forceinline__ void append(const struct bt_cu_latent_append &a, uint32_t block)
{
    uint32_t warp = block * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < a.n) {
        if (a.slots[warp] >= 0) {
            append_latent(a, warp, lane);
        }
    } else if (a.q_rank && warp < 2 * a.n) {
        append_q(a, warp - a.n, lane);
    }
}
static uint32_t append_blocks(const struct bt_cu_latent_append *a)
{
    return ((a->q_rank ? 2 * a->n : a->n) + WARPS - 1) / WARPS;
}

static __global__ void append_kernel(const __grid_constant__ struct bt_cu_latent_append a)
{
    early_next();
    early_wait();
    append(a, blockIdx.x);
}

extern "C" cudaError_t bt_cu_latent_append(const struct bt_cu_latent_append *a, cudaStream_t s)
{
    return launch_early(append_kernel, append_blocks(a), WARPS * 32, 0, s, *a);
}

/* ---- queries of prompts: a warp writes one head of one token ---- */

static __global__ void queries_kernel(const __grid_constant__ struct bt_cu_latent_queries a)
{
    uint32_t warp = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t t = warp / a.heads, head = warp % a.heads;
    early_next();
    early_wait();
    if (t >= a.n) {
        return;
    }
    const float *in = a.in + (size_t)t * a.in_stride + head * BT_LATENT_HEAD;
    __half *out = (__half *)a.out + (size_t)warp * BT_LATENT_HEAD;
    ((uint2 *)out)[lane] = pack4(((const float4 *)in)[lane]);
    rope64(a.rope, t, lane, in + BT_LATENT_NOPE, out + BT_LATENT_NOPE);
}

extern "C" cudaError_t bt_cu_latent_queries(const struct bt_cu_latent_queries *a, cudaStream_t s)
{
    uint32_t warps = a->n * a->heads;
    return launch_early(queries_kernel, (warps + WARPS - 1) / WARPS, WARPS * 32, 0, s, *a);
}

/* ---- absorbed queries ---- */

/* Tokens of a block: fewer where there would be few blocks. */
static uint32_t rows_of_block(uint32_t n, uint32_t heads)
{
    uint32_t rows = ROWS;
    while (rows > 16 && heads * ((n + rows - 1) / rows) < 64) {
        rows /= 2;
    }
    return rows;
}

/* Where 16 bytes of a row of 128 values lie in shared memory: two tables of 64 values each. */
static __device__ __forceinline__ uint32_t query_at(uint32_t row, uint32_t piece)
{
    return piece / 8 * ROWS * 128 + swizzled<128>(row, piece % 8);
}

/* The parts without position of `n` tokens' queries, as f16; zeros for the rest of 8 tokens. */
static __device__ __forceinline__ void load_queries(uint8_t *to, const float *in, size_t stride,
                                                    uint32_t n)
{
    constexpr uint32_t QUADS = BT_LATENT_NOPE / 4;
    const uint32_t all = (n + 7) / 8 * 8 * QUADS;
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < all; i += WARPS * 32) {
        uint32_t row = i / QUADS, quad = i % QUADS;
        float4 v =
            row < n ? *(const float4 *)(in + row * stride + quad * 4) : make_float4(0, 0, 0, 0);
        *(uint2 *)(to + query_at(row, quad / 2) + quad % 2 * 8) = pack4(v);
    }
}

struct absorb_args {
    struct bt_cu_latent_queries q;
    struct bt_cu_latent_append append;
    uint32_t rows;   /* of a block */
    uint32_t blocks; /* those behind these append */
};

/* 16 values of 8 tokens' queries. f: the warp's part of the key rows, for all k. */
static __device__ __forceinline__ void absorb8(const uint32_t (&f)[8][4], uint32_t queries,
                                               uint32_t t, uint32_t tokens, __half *out,
                                               uint32_t out_stride, uint32_t lane)
{
    float c[4] = {};
#pragma unroll
    for (int k = 0; k < 4; k++) { /* 32 of k at a time */
        uint32_t b[4];
        ldmatrix4(b, queries + query_at(t + lane % 8, k * 4 + lane / 8));
        mma16816<__half>(c, f[2 * k], b[0], b[1]);
        mma16816<__half>(c, f[2 * k + 1], b[2], b[3]);
    }
    /* a thread has values of two tokens; it needs two values of one */
    uint32_t lo = transpose8(pack2<__half>(c[0], c[1])), hi = transpose8(pack2<__half>(c[2], c[3]));
    if (t + lane / 4 < tokens) {
        uint32_t *to = (uint32_t *)(out + (size_t)(t + lane / 4) * out_stride) + lane % 4;
        to[0] = lo;
        to[4] = hi;
    }
}

/* A block makes one tile of the absorbed queries of some tokens of a head, or, for the last tile,
 * turns their part with position. */
static __global__ void __launch_bounds__(WARPS * 32)
    absorb_kernel(const __grid_constant__ struct absorb_args args)
{
    constexpr uint32_t TILES = BT_LATENT / TILE, PIECES = TILE / 8;
    __shared__ __align__(1024) uint8_t tile[BT_LATENT_NOPE * TILE * 2];
    __shared__ __align__(1024) uint8_t queries[ROWS * BT_LATENT_NOPE * 2];
    const struct bt_cu_latent_queries &a = args.q;
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(tile);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t j = blockIdx.x % (TILES + 1), rest = blockIdx.x / (TILES + 1);
    const uint32_t head = rest % a.heads, first = rest / a.heads * args.rows;
    const uint32_t n = min(args.rows, a.n - first), out_stride = a.heads * BT_LATENT_ROW;
    const __half *w = (const __half *)a.kv_b +
                      (size_t)head * (BT_LATENT_NOPE + BT_LATENT_V) * BT_LATENT + j * TILE;
    const float *in = a.in + (size_t)first * a.in_stride + head * BT_LATENT_HEAD;
    __half *out = (__half *)a.out + (size_t)first * out_stride + head * BT_LATENT_ROW;
    early_next();
    if (blockIdx.x >= args.blocks) {
        early_wait();
        append(args.append, blockIdx.x - args.blocks);
        return;
    }
    for (uint32_t i = threadIdx.x; j < TILES && i < BT_LATENT_NOPE * PIECES; i += WARPS * 32) {
        uint32_t row = i / PIECES, piece = i % PIECES;
        async_load(base + swizzled<TILE * 2>(row, piece), w + (size_t)row * BT_LATENT + piece * 8);
    }
    async_commit();
    early_wait();
    if (j == TILES) {
        for (uint32_t t = warp; t < n; t += WARPS) {
            rope64(a.rope, first + t, lane, in + (size_t)t * a.in_stride + BT_LATENT_NOPE,
                   out + (size_t)t * out_stride + BT_LATENT);
        }
        return;
    }
    load_queries(queries, in, a.in_stride, n);
    async_wait<0>();
    __syncthreads();
    uint32_t f[8][4];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        ldmatrix4_t(f[k], base + swizzled<TILE * 2>(k * 16 + lane / 16 * 8 + lane % 8,
                                                    warp * 2 + lane / 8 % 2));
    }
    for (uint32_t t = 0; t < n; t += 8) {
        absorb8(f, (uint32_t)__cvta_generic_to_shared(queries), t, n, out + j * TILE + warp * 16,
                out_stride, lane);
    }
}

extern "C" cudaError_t bt_cu_latent_absorb(const struct bt_cu_latent_queries *a,
                                           const struct bt_cu_latent_append *append, cudaStream_t s)
{
    uint32_t rows = rows_of_block(a->n, a->heads);
    struct absorb_args args = {*a, {}, rows, 0};
    args.blocks = (BT_LATENT / TILE + 1) * a->heads * ((a->n + rows - 1) / rows);
    uint32_t more = append ? append_blocks(append) : 0;
    if (append) {
        args.append = *append;
    }
    return launch_early(absorb_kernel, args.blocks + more, WARPS * 32, 0, s, args);
}

/* ---- values ---- */

/* Volatile, so that it stays before the wait for the kernel in front. */
static __device__ __forceinline__ uint4 load_ahead(const __half *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

struct values_args {
    const __half *mix, *kv_b;
    uint16_t *out;
    uint32_t n, heads, rows; /* rows: of a block */
    bool f16;
};

/* A block makes 16 values of some tokens of a head; its warps divide k. A dot product may run over
 * k in any order: a thread loads 16 contiguous bytes of a row and uses them as the columns that its
 * fragments need. */
static __global__ void __launch_bounds__(WARPS * 32)
    values_kernel(const __grid_constant__ struct values_args a)
{
    constexpr uint32_t TILES = BT_LATENT_V / 16, K = BT_LATENT / WARPS, STEPS = K / 32, GROUPS = 2;
    __shared__ float sum[WARPS][16][ROWS + 1];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const uint32_t tile = blockIdx.x % TILES, rest = blockIdx.x / TILES;
    const uint32_t head = rest % a.heads, first = rest / a.heads * a.rows;
    const uint32_t rows = min(a.n - first, a.rows), k0 = warp * K + lane % 4 * 8;
    const __half *w =
        a.kv_b +
        ((size_t)head * (BT_LATENT_NOPE + BT_LATENT_V) + BT_LATENT_NOPE + tile * 16 + g) *
            BT_LATENT +
        k0;
    uint4 lo[STEPS], hi[STEPS];
    early_next();
#pragma unroll
    for (uint32_t k = 0; k < STEPS; k++) {
        lo[k] = load_ahead(w + k * 32);
        hi[k] = load_ahead(w + 8 * BT_LATENT + k * 32);
    }
    early_wait();
    const __half *mix = a.mix + ((size_t)first * a.heads + head) * BT_LATENT + k0;
    for (uint32_t t0 = 0; t0 < rows; t0 += 8 * GROUPS) {
        uint4 x[GROUPS][STEPS];
#pragma unroll
        for (uint32_t i = 0; i < GROUPS * STEPS; i++) {
            uint32_t t = t0 + i / STEPS * 8 + g, k = i % STEPS;
            x[i / STEPS][k] = t < rows
                                  ? *(const uint4 *)(mix + (size_t)t * a.heads * BT_LATENT + k * 32)
                                  : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t i = 0; i < GROUPS; i++) {
            float c[4] = {};
#pragma unroll
            for (uint32_t k = 0; k < STEPS; k++) {
                const uint32_t a0[4] = {lo[k].x, hi[k].x, lo[k].y, hi[k].y};
                const uint32_t a1[4] = {lo[k].z, hi[k].z, lo[k].w, hi[k].w};
                mma16816<__half>(c, a0, x[i][k].x, x[i][k].y);
                mma16816<__half>(c, a1, x[i][k].z, x[i][k].w);
            }
#pragma unroll
            for (uint32_t v = 0; v < 4; v++) {
                sum[warp][g + v / 2 * 8][t0 + i * 8 + lane % 4 * 2 + v % 2] = c[v];
            }
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < rows * 16; i += WARPS * 32) {
        uint32_t d = i % 16, t = i / 16;
        float v = sum[0][d][t];
#pragma unroll
        for (uint32_t k = 1; k < WARPS; k++) {
            v += sum[k][d][t];
        }
        a.out[((size_t)(first + t) * a.heads + head) * BT_LATENT_V + tile * 16 + d] =
            (uint16_t)(a.f16 ? pack2<__half>(f16_range(v), 0) : pack2<__nv_bfloat16>(v, 0));
    }
}

extern "C" cudaError_t bt_cu_latent_values(const void *mix, const void *kv_b, uint32_t n,
                                           uint32_t heads, void *out, bool f16, cudaStream_t s)
{
    const struct values_args a = {(const __half *)mix,
                                  (const __half *)kv_b,
                                  (uint16_t *)out,
                                  n,
                                  heads,
                                  rows_of_block(n, heads),
                                  f16};
    uint32_t grid = BT_LATENT_V / 16 * heads * ((n + a.rows - 1) / a.rows);
    return launch_early(values_kernel, grid, WARPS * 32, 0, s, a);
}

/* ---- gather: a warp copies one row ---- */

/* Two bf16 values as f16. */
static __device__ __forceinline__ uint32_t f16_of_bf16(uint32_t two)
{
    return pack2<__half>(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}

/* A lane converts 16 latents; eight lanes convert eight values of the key part each. */
static __device__ __forceinline__ void gather_e4m3(const uint8_t *from, uint32_t lane,
                                                   uint4 *latent, uint4 *k_rope)
{
    const uint4 v = *(const uint4 *)(from + lane * 16);
    const float scale = *(const float *)(from + BT_MLA_E4M3_SCALES + lane / 8 * 4);
    const uint32_t f = pack2<__half>(scale, scale), in[4] = {v.x, v.y, v.z, v.w};
    uint32_t h[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        e4m3_scaled(in[i], f, h[i * 2], h[i * 2 + 1]);
    }
    latent[lane * 2] = make_uint4(h[0], h[1], h[2], h[3]);
    latent[lane * 2 + 1] = make_uint4(h[4], h[5], h[6], h[7]);
    if (lane < BT_LATENT_ROPE / 8) {
        const uint4 r = *(const uint4 *)(from + BT_MLA_E4M3_ROPE + lane * 16);
        k_rope[lane] =
            make_uint4(f16_of_bf16(r.x), f16_of_bf16(r.y), f16_of_bf16(r.z), f16_of_bf16(r.w));
    }
}

static __global__ void gather_kernel(const __grid_constant__ struct bt_cu_latent_gather a)
{
    constexpr uint32_t PIECES = BT_LATENT_ROW / 8, LATENT = BT_LATENT / 8;
    uint32_t row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    early_next();
    early_wait();
    if (row >= a.rows) {
        return;
    }
    uint32_t lo = 0, hi = a.n_spans; /* the last span whose first row is not behind this one */
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        bool behind = a.spans[mid].first > (int32_t)row;
        lo = behind ? lo : mid;
        hi = behind ? mid : hi;
    }
    uint32_t pos = row - (uint32_t)a.spans[lo].first;
    size_t page = (size_t)a.table[(size_t)a.spans[lo].slot * a.table_stride + pos / a.page_tokens];
    const size_t at = page * a.page_rows + a.layer_row + pos % a.page_tokens;
    uint4 *latent = (uint4 *)a.latent + (size_t)row * LATENT,
          *k_rope = (uint4 *)a.k_rope + (size_t)row * (PIECES - LATENT);
    if (a.e4m3) {
        gather_e4m3((const uint8_t *)a.pool + at * BT_MLA_E4M3_ROW, lane, latent, k_rope);
        return;
    }
    const uint4 *from = (const uint4 *)a.pool + at * PIECES;
#pragma unroll
    for (uint32_t i = lane; i < PIECES; i += 32) {
        uint4 v = from[i];
        if (i < LATENT) {
            latent[i] = v;
        } else {
            k_rope[i - LATENT] = v;
        }
    }
}

extern "C" cudaError_t bt_cu_latent_gather(const struct bt_cu_latent_gather *a, cudaStream_t s)
{
    return launch_early(gather_kernel, (a->rows + WARPS - 1) / WARPS, WARPS * 32, 0, s, *a);
}
