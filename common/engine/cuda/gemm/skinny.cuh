/* The kernel of skinny.h, for bf16 and e4m3 weights; skinny.cu says how it works. Its launches are
 * in skinny.cu, skinny_e4m3.cu and skinny_rounded.cu. Device code, included once by each. */
#ifndef BT_CUDA_SKINNY_CUH
#define BT_CUDA_SKINNY_CUH

#include "common/engine/cuda/fp8.cuh"
#include "common/engine/cuda/gemm/skinny_priv.h"
#include "common/engine/cuda/hopper.cuh"
#include "common/engine/cuda/mma.cuh"
#include "common/engine/cuda/wgmma_e4m3.cuh"

#define BOX       8192u /* 64 rows of 128 bytes of weights */
#define MAX_SLOTS 26
#define X_BOXES   7    /* 64 columns of all tokens each */
#define PITCH     68u  /* floats from token to token of a warpgroup's 64 sums */
#define STAGED    2176 /* ... of 8 of those tokens */

struct skinny_bars {
    uint64_t full[MAX_SLOTS], empty[MAX_SLOTS], x_full[X_BOXES], x_empty[X_BOXES];
};

/* The boxes' columns of this block, in units of 128 bytes: [first, end). */
struct columns {
    uint32_t first, end;
};
static __device__ __forceinline__ struct columns columns_of(const struct bt_cu_skinny_args &a)
{
    uint32_t rank = blockIdx.x % a.cluster;
    return {a.steps * rank / a.cluster, a.steps * (rank + 1) / a.cluster};
}

/* ---- the copying warps, one thread each ---- */

template <int GROUPS>
static __device__ __forceinline__ void copy_weights(const struct bt_cu_skinny_args &a,
                                                    const CUtensorMap *map, struct skinny_bars *b,
                                                    uint32_t smem)
{
    const struct columns k = columns_of(a);
    struct ring first = {0, 1}, r = first;
    for (uint32_t tile = blockIdx.x / a.cluster; tile < a.tiles; tile += gridDim.x / a.cluster) {
        for (uint32_t at = k.first; at < k.end; at += a.depth) {
            uint32_t depth = min(a.depth, k.end - at);
            for (uint32_t g = 0; g < GROUPS; g++) {
                int rows = (int)(tile * GROUPS + g);
                r = first;
                for (uint32_t i = 0; i < depth; i++) {
                    uint32_t slot = g * a.slots + r.at, bar = smem_addr(&b->full[slot]);
                    int col = (int)(at + i) * 64; /* pairs of e4m3, as the map has them */
                    bar_wait(smem_addr(&b->empty[slot]), r.phase);
                    bar_expect(bar, BOX);
                    if (a.end == BT_CU_SKINNY_SWIGLU) {
                        tma_load_4d(smem + slot * BOX, map, bar, col, 0, 0, rows * 4,
                                    TMA_EVICT_FIRST);
                    } else {
                        tma_load_2d(smem + slot * BOX, map, bar, col, rows * 64, TMA_EVICT_FIRST);
                    }
                    r.next(a.slots);
                }
            }
            first = r;
        }
    }
}

/* scales: where those of e4m3 activations go, NT for each slot. */
template <int NT, enum bt_cu_skinny_kind KIND>
static __device__ __forceinline__ void
copy_activations(const struct bt_cu_skinny_args &a, const CUtensorMap *map, struct skinny_bars *b,
                 uint32_t smem, uint32_t scales)
{
    const struct columns k = columns_of(a);
    const uint32_t some = KIND == SKINNY_E4M3 ? min((uint32_t)NT, a.x_stride) * 4 : 0;
    struct ring r = {0, 1};
    for (uint32_t tile = blockIdx.x / a.cluster; tile < a.tiles; tile += gridDim.x / a.cluster) {
        constexpr uint32_t per = KIND == SKINNY_F16 ? 2 : 1; /* boxes for a box of weights */
        for (uint32_t at = k.first * per; at < k.end * per; at++) {
            uint32_t bar = smem_addr(&b->x_full[r.at]);
            bar_wait(smem_addr(&b->x_empty[r.at]), r.phase);
            bar_expect(bar, NT * 128 + some);
            tma_load_2d(smem + r.at * NT * 128, map, bar, (int)at * 64, 0, TMA_EVICT_NORMAL);
            if constexpr (KIND == SKINNY_E4M3) {
                bulk_load(scales + r.at * NT * 4, a.x_scale + (size_t)at * a.x_stride, some, bar);
            }
            r.next(a.x_slots);
        }
    }
}

/* ---- the computing warpgroups ---- */

/* Each warp releases separately. */
static __device__ __forceinline__ void release(uint32_t bar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        bar_arrive(bar);
    }
}

struct consumer {
    struct skinny_bars *b;
    uint32_t smem, x_smem, group;
    const float *x_scale; /* of e4m3 activations, NT for each slot */
    struct ring w, x;
};

/* Computes one tile: this warpgroup's 64 rows times all tokens, over this block's columns. */
template <int NT, int GROUPS>
static __device__ __forceinline__ void sum_tile(const struct bt_cu_skinny_args &a,
                                                struct consumer &c, float (&acc)[NT / 2])
{
    const struct columns k = columns_of(a);
    for (uint32_t at = k.first; at < k.end; at++) {
        uint32_t slot = c.group * a.slots + c.w.at;
        uint64_t w = wgmma_desc(c.smem + slot * BOX, 0, 1024);
        uint64_t x = wgmma_desc(c.x_smem + c.x.at * NT * 128, 0, 1024);
        bar_wait(smem_addr(&c.b->x_full[c.x.at]), c.x.phase);
        bar_wait(smem_addr(&c.b->full[slot]), c.w.phase);
        wgmma_hold(acc);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) { /* 16 columns are 32 bytes */
            wgmma_ss_bf16(acc, w + j * 2, x + j * 2, at > k.first || j > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(acc);
        release(smem_addr(&c.b->empty[slot]));
        release(smem_addr(&c.b->x_empty[c.x.at]));
        c.w.next(a.slots);
        c.x.next(a.x_slots);
    }
}

/* Loads 16 rows of 64 columns of e4m3 as the f16 fragments of four products. at: this lane's row
 * and column in the box, half: which 64 columns. The box is in 128-byte swizzle. */
static __device__ __forceinline__ void load_e4m3(uint32_t (&f)[4][4], uint32_t box, uint32_t row,
                                                 uint32_t half)
{
    const uint32_t piece = half * 4 + threadIdx.x % 32 / 16;
#pragma unroll
    for (int j = 0; j < 4; j += 2) { /* a piece of 16 bytes is 16 columns */
        uint32_t r[4];
        ldmatrix4(r, box + row * 128 + ((piece + j) ^ row % 8) * 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            f16_of_e4m3(r[i * 2], f[j + i][0], f[j + i][2]);
            f16_of_e4m3(r[i * 2 + 1], f[j + i][1], f[j + i][3]);
        }
    }
}

/* The scales of this thread's rows in a box of 64: lane / 4 of its warp's 16, and 8 further. */
struct scales {
    const float *at[2];
    uint32_t step;
    __device__ __forceinline__ float2 load(uint32_t box) const
    {
        return make_float2(__ldg(at[0] + box * step), __ldg(at[1] + box * step));
    }
};
static __device__ __forceinline__ struct scales scales_of(const struct bt_cu_skinny_args &a,
                                                          uint32_t box)
{
    const uint32_t in = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    struct scales s;
    s.step = a.scale_step;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        /* With SwiGLU, eight rows of gate and eight of up alternate. */
        uint32_t row = a.end == BT_CU_SKINNY_SWIGLU
                           ? i * (a.n / 2) + box * 32 + in / 16 * 8 + in % 8
                           : box * 64 + in + i * 8;
        s.at[i] = a.scale + (size_t)(min(row, a.n - 1) >> a.scale_shift) * a.scale_stride;
    }
    return s;
}

/* sum_tile for e4m3. Weights become f16 on their way from shared memory to the tensor cores; each
 * box's sums are multiplied with its scales and added up in f32. */
template <int NT, int GROUPS>
static __device__ __forceinline__ void sum_tile_e4m3(const struct bt_cu_skinny_args &a,
                                                     struct consumer &c, uint32_t tile,
                                                     float (&acc)[NT / 2])
{
    const struct columns k = columns_of(a);
    const struct scales s = scales_of(a, tile * GROUPS + c.group);
    const uint32_t row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
    float2 scale = s.load(k.first);
#pragma unroll
    for (int i = 0; i < NT / 2; i++) {
        acc[i] = 0;
    }
    for (uint32_t at = k.first; at < k.end; at++) {
        const uint32_t slot = c.group * a.slots + c.w.at;
        const float2 next = s.load(min(at + 1, k.end - 1));
        float part[NT / 2];
        uint32_t before = 0;
        bar_wait(smem_addr(&c.b->full[slot]), c.w.phase);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t f[4][4];
            uint64_t x = wgmma_desc(c.x_smem + c.x.at * NT * 128, 0, 1024);
            load_e4m3(f, c.smem + slot * BOX, row, half);
            if (half == 1) {
                release(smem_addr(&c.b->empty[slot]));
            }
            bar_wait(smem_addr(&c.b->x_full[c.x.at]), c.x.phase);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++) { /* 16 columns of x are 32 bytes */
                wgmma_rs_f16(part, f[j], x + j * 2, half > 0 || j > 0);
            }
            wgmma_commit();
            if (half == 0) {
                before = smem_addr(&c.b->x_empty[c.x.at]);
                c.x.next(a.x_slots);
            }
        }
        wgmma_wait<0>();
        wgmma_hold(part);
        release(before);
        release(smem_addr(&c.b->x_empty[c.x.at]));
        c.w.next(a.slots);
        c.x.next(a.x_slots);
#pragma unroll
        for (int i = 0; i < NT / 2; i++) {
            acc[i] += part[i] * (i / 2 % 2 ? scale.y : scale.x);
        }
        scale = next;
    }
}

/* sum_tile for e4m3 weights and activations: 64 tokens at a time, as both the sums of a box and
 * those of all boxes must be in registers. */
template <int NT, int GROUPS>
static __device__ __forceinline__ void sum_tile_rounded(const struct bt_cu_skinny_args &a,
                                                        struct consumer &c, uint32_t tile,
                                                        float (&acc)[NT / 2])
{
    constexpr int PART = NT < 64 ? NT : 64;
    const struct columns k = columns_of(a);
    const struct scales s = scales_of(a, tile * GROUPS + c.group);
    float2 scale = s.load(k.first);
#pragma unroll
    for (int i = 0; i < NT / 2; i++) {
        acc[i] = 0;
    }
    for (uint32_t at = k.first; at < k.end; at++) {
        const uint32_t slot = c.group * a.slots + c.w.at;
        const float2 next = s.load(min(at + 1, k.end - 1));
        const float2 *x_scale = (const float2 *)(c.x_scale + c.x.at * NT) + threadIdx.x % 4;
        uint64_t w = wgmma_desc(c.smem + slot * BOX, 0, 1024);
        uint64_t x = wgmma_desc(c.x_smem + c.x.at * NT * 128, 0, 1024);
        bar_wait(smem_addr(&c.b->x_full[c.x.at]), c.x.phase);
        bar_wait(smem_addr(&c.b->full[slot]), c.w.phase);
#pragma unroll
        for (int t = 0; t < NT; t += PART) {
            float part[PART / 2];
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++) { /* 32 columns are 32 bytes */
                wgmma_ss_e4m3(part, w + j * 2, x + t * 128 / 16 + j * 2, j > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(part);
            if (t + PART == NT) {
                release(smem_addr(&c.b->empty[slot]));
            }
#pragma unroll
            for (int i = 0; i < PART / 2; i += 4) { /* rows at, at + 8 of two tokens */
                const float2 u = x_scale[t / 2 + i];
                acc[t / 2 + i] += part[i] * (scale.x * u.x);
                acc[t / 2 + i + 1] += part[i + 1] * (scale.x * u.y);
                acc[t / 2 + i + 2] += part[i + 2] * (scale.y * u.x);
                acc[t / 2 + i + 3] += part[i + 3] * (scale.y * u.y);
            }
        }
        release(smem_addr(&c.b->x_empty[c.x.at]));
        c.w.next(a.slots);
        c.x.next(a.x_slots);
        scale = next;
    }
}

static __device__ __forceinline__ float swiglu(const struct bt_cu_skinny_args &a, float gate,
                                               float up)
{
    if (a.rounded) {
        return swiglu_fast(__bfloat162float(__float2bfloat16(gate)),
                           __bfloat162float(__float2bfloat16(up)));
    }
    return gate / (1.0f + __expf(-gate)) * up;
}

/* As the product that follows reads it: bf16, or f16 if the weights are e4m3. */
static __device__ __forceinline__ uint32_t pack_swiglu(const struct bt_cu_skinny_args &a, float lo,
                                                       float hi)
{
    return a.scale ? pack2<__half>(f16_range(lo), f16_range(hi)) : pack2<__nv_bfloat16>(lo, hi);
}

/* Writes a warpgroup's sums, 8 tokens at a time and through shared memory, so that a token's values
 * are written in one piece. It must be short, as no weights are requested meanwhile. */
template <int NT>
static __device__ __forceinline__ void put(const struct bt_cu_skinny_args &a, uint32_t row0,
                                           float *stage, uint32_t group, const float (&acc)[NT / 2])
{
    const uint32_t lane = threadIdx.x % 32, at = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const uint32_t token = threadIdx.x % 128 / 16, quad = threadIdx.x % 16 * 4;
    float *mine = stage + lane % 4 * 2 * PITCH;
#pragma unroll
    for (int i = 0; i < NT / 2; i += 4) { /* rows at, at + 8 of two tokens */
        uint32_t t = i * 2 + token;
        named_sync(2 + group, 128);
        mine[at] = acc[i];
        mine[PITCH + at] = acc[i + 1];
        mine[at + 8] = acc[i + 2];
        mine[PITCH + at + 8] = acc[i + 3];
        named_sync(2 + group, 128);
        if (a.end == BT_CU_SKINNY_SWIGLU) { /* eight rows of gate, then eight of up */
            uint32_t col = row0 / 2 + quad / 2;
            const float *gate = stage + token * PITCH + quad / 16 * 16 + quad % 16 / 2;
            if (t < a.m && col < a.n / 2) {
                *(uint32_t *)((uint16_t *)a.y + (size_t)t * (a.n / 2) + col) =
                    pack_swiglu(a, swiglu(a, gate[0], gate[8]), swiglu(a, gate[1], gate[9]));
            }
        } else if (t < a.m && row0 + quad < a.n) {
            float4 *y = (float4 *)((float *)a.y + (size_t)t * a.n + row0 + quad);
            float4 old = a.end == BT_CU_SKINNY_ADD ? *y : make_float4(0, 0, 0, 0);
            float4 v = *(const float4 *)(stage + token * PITCH + quad);
            *y = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
        }
    }
}

/* ---- sums over a cluster ---- */

/* A block's sums, token by token; the constant is the number of floats from one token to the next.
 * As with PITCH, eight rows of four token pairs are in different banks. */
template <int GROUPS> struct sums {
    static constexpr uint32_t pitch = GROUPS * 64 + 4;
};

template <int NT, int GROUPS>
static __device__ __forceinline__ void share(float *sum, uint32_t group, const float (&acc)[NT / 2])
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    named_sync(1, GROUPS * 128); /* all have stopped reading the ring, which uses the same memory */
#pragma unroll
    for (int i = 0; i < NT / 2; i++) {
        uint32_t t = lane % 4 * 2 + i / 4 * 8 + i % 2;
        sum[t * sums<GROUPS>::pitch + row + i / 2 % 2 * 8] = acc[i];
    }
}

static __device__ __forceinline__ float4 gather(const float *at, uint32_t cluster,
                                                float4 v = make_float4(0, 0, 0, 0))
{
    for (uint32_t c = 0; c < cluster; c++) {
        float4 u = cluster_load4(smem_addr(at), c);
        v = make_float4(v.x + u.x, v.y + u.y, v.z + u.z, v.w + u.w);
    }
    return v;
}

/* Each block of the cluster finishes a part of the tokens. */
template <int NT, int GROUPS>
static __device__ __forceinline__ void put_shared(const struct bt_cu_skinny_args &a, uint32_t tile,
                                                  const float *sum)
{
    constexpr uint32_t ROWS = GROUPS * 64, pitch = sums<GROUPS>::pitch;
    const uint32_t rank = blockIdx.x % a.cluster;
    const uint32_t first = NT * rank / a.cluster, per = NT * (rank + 1) / a.cluster - first;
    const bool pairs = a.end == BT_CU_SKINNY_SWIGLU;
    const uint32_t quads = pairs ? ROWS / 8 : ROWS / 4, wide = pairs ? a.n / 2 : a.n;
    for (uint32_t i = threadIdx.x; i < per * quads; i += GROUPS * 128) {
        uint32_t t = first + i / quads, q = i % quads * 4, at = tile * (quads * 4) + q;
        if (t >= a.m || at >= wide) {
            continue;
        }
        if (pairs) {
            const float *gate = sum + t * pitch + q / 8 * 16 + q % 8;
            float4 g = gather(gate, a.cluster), u = gather(gate + 8, a.cluster);
            *(uint2 *)((uint16_t *)a.y + (size_t)t * wide + at) =
                make_uint2(pack_swiglu(a, swiglu(a, g.x, u.x), swiglu(a, g.y, u.y)),
                           pack_swiglu(a, swiglu(a, g.z, u.z), swiglu(a, g.w, u.w)));
            continue;
        }
        float4 *y = (float4 *)((float *)a.y + (size_t)t * wide + at);
        float4 old = a.end == BT_CU_SKINNY_ADD ? *y : make_float4(0, 0, 0, 0);
        *y = gather(sum + t * pitch + q, a.cluster, old);
    }
}

/* put_shared for a SwiGLU in e4m3: a block's 256 rows are 128 columns, which have one scale. A warp
 * takes a token. */
template <int NT>
static __device__ __forceinline__ void put_rounded(const struct bt_cu_skinny_args &a, uint32_t tile,
                                                   const float *sum)
{
    const uint32_t rank = blockIdx.x % a.cluster, first = NT * rank / a.cluster;
    const uint32_t end = min(NT * (rank + 1) / a.cluster, a.m), q = threadIdx.x % 32 * 4;
    for (uint32_t t = first + threadIdx.x / 32; t < end; t += 16) {
        const float *gate = sum + t * sums<4>::pitch + q / 8 * 16 + q % 8;
        const float4 g = gather(gate, a.cluster), u = gather(gate + 8, a.cluster);
        const float4 v = make_float4(swiglu(a, g.x, u.x), swiglu(a, g.y, u.y), swiglu(a, g.z, u.z),
                                     swiglu(a, g.w, u.w));
        const float f = e4m3_factor(warp_max(top4(v)));
        put_ordered(pack_e4m3(v.x * f, v.y * f, v.z * f, v.w * f),
                    (uint8_t *)a.y + (size_t)t * (a.n / 2) + tile * 128, true);
        if (threadIdx.x % 32 == 0) {
            a.y_scale[(size_t)tile * a.x_stride + t] = e4m3_scale_of(f);
        }
    }
}

/* Whether a block's sums go through put_rounded. */
template <int GROUPS, enum bt_cu_skinny_kind KIND>
static __device__ __forceinline__ bool rounds(const struct bt_cu_skinny_args &a)
{
    return GROUPS == 4 && KIND == SKINNY_E4M3 && a.y_scale;
}

template <int NT, int GROUPS, enum bt_cu_skinny_kind KIND>
static __device__ __forceinline__ void compute(const struct bt_cu_skinny_args &a,
                                               struct skinny_bars *b, uint8_t *smem,
                                               uint32_t x_smem, float *stage, const float *x_scale)
{
    struct consumer c = {b, smem_addr(smem), x_smem, threadIdx.x / 128, x_scale, {0, 0}, {0, 0}};
    float acc[NT / 2];
    for (uint32_t tile = blockIdx.x / a.cluster; tile < a.tiles; tile += gridDim.x / a.cluster) {
        if constexpr (KIND == SKINNY_E4M3) {
            sum_tile_rounded<NT, GROUPS>(a, c, tile, acc);
        } else if constexpr (KIND == SKINNY_F16) {
            sum_tile_e4m3<NT, GROUPS>(a, c, tile, acc);
        } else {
            sum_tile<NT, GROUPS>(a, c, acc);
        }
        if (a.cluster == 1 && !rounds<GROUPS, KIND>(a)) {
            put<NT>(a, (tile * GROUPS + c.group) * 64, stage + c.group * (STAGED / 4), c.group,
                    acc);
        } else {
            share<NT, GROUPS>((float *)smem, c.group, acc);
        }
    }
}

template <int NT, int GROUPS, enum bt_cu_skinny_kind KIND>
static __global__ void __launch_bounds__(GROUPS * 128 + 64, 1)
    skinny_kernel(const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ struct bt_cu_skinny_args a)
{
    extern __shared__ uint8_t raw[];
    __shared__ struct skinny_bars bars;
    uint8_t *smem = raw + (1024 - smem_addr(raw) % 1024) % 1024;
    uint8_t *x = smem + GROUPS * a.slots * BOX;
    const uint32_t x_smem = smem_addr(x);
    const uint32_t warp = threadIdx.x / 32;
    early_next();
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < GROUPS * a.slots; i++) {
            bar_init(smem_addr(&bars.full[i]), 1);
            bar_init(smem_addr(&bars.empty[i]), 4);
        }
        for (uint32_t i = 0; i < a.x_slots; i++) {
            bar_init(smem_addr(&bars.x_full[i]), 1);
            bar_init(smem_addr(&bars.x_empty[i]), GROUPS * 4);
        }
        bar_init_fence();
    }
    __syncthreads();
    if (warp == GROUPS * 4) {
        if (threadIdx.x % 32 == 0) {
            copy_weights<GROUPS>(a, &w_map, &bars, smem_addr(smem));
        }
    } else {
        float *stage = (float *)(x + a.x_slots * NT * 128), *scales = stage + GROUPS * STAGED / 4;
        early_wait();
        if (warp < GROUPS * 4) {
            compute<NT, GROUPS, KIND>(a, &bars, smem, x_smem, stage, scales);
        } else if (threadIdx.x % 32 == 0) {
            copy_activations<NT, KIND>(a, &x_map, &bars, x_smem, smem_addr(scales));
        }
    }
    if (a.cluster > 1 || rounds<GROUPS, KIND>(a)) { /* there is one tile: see launch() */
        __syncwarp();
        cluster_sync();
        if (warp < GROUPS * 4) {
            const float *sum = (const float *)smem;
            rounds<GROUPS, KIND>(a) ? put_rounded<NT>(a, blockIdx.x / a.cluster, sum)
                                    : put_shared<NT, GROUPS>(a, blockIdx.x / a.cluster, sum);
        }
        __syncwarp();
        cluster_sync(); /* no block ends while others read its sums */
    }
}

/* ---- launches ---- */

template <int NT, int GROUPS, enum bt_cu_skinny_kind KIND>
static cudaError_t launch(const CUtensorMap &w_map, const CUtensorMap &x_map,
                          struct bt_cu_skinny_args &a, cudaStream_t s)
{
    constexpr bool both = KIND == SKINNY_E4M3;
    constexpr uint32_t x_slots = both ? NT == 128 ? 4 : 5 : NT == 128 ? X_BOXES / 2 : X_BOXES;
    constexpr uint32_t beside = x_slots * NT * (128 + (both ? 4 : 0)) + GROUPS * STAGED + 1024;
    constexpr uint32_t room = (SMEM_MAX - beside) / BOX;
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute attr[2];
    a.x_slots = x_slots;
    a.slots = (room < MAX_SLOTS ? room : MAX_SLOTS) / GROUPS;
    a.depth = a.depth < a.slots ? a.depth : a.slots;
    uint32_t bytes = GROUPS * a.slots * BOX + beside;
    cudaError_t e = cudaFuncSetAttribute(skinny_kernel<NT, GROUPS, KIND>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e != cudaSuccess) {
        return e;
    }
    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    attr[1].id = cudaLaunchAttributeClusterDimension;
    attr[1].val.clusterDim.x = a.cluster;
    attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
    uint32_t all = a.tiles * a.cluster, blocks = multiprocessors();
    c.gridDim = dim3(all < blocks || a.cluster > 1 ? all : blocks);
    c.blockDim = dim3(GROUPS * 128 + 64);
    c.dynamicSmemBytes = bytes;
    c.stream = s;
    c.attrs = attr;
    c.numAttrs = a.cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&c, skinny_kernel<NT, GROUPS, KIND>, w_map, x_map, a);
}

/* Ways whose sums and fragments do not fit in registers are refused by bt_cu_skinny_fits. */
template <int NT, enum bt_cu_skinny_kind KIND>
static cudaError_t launch_groups(const CUtensorMap &w_map, const CUtensorMap &x_map,
                                 struct bt_cu_skinny_args &a, uint32_t groups, cudaStream_t s)
{
    if constexpr (KIND != SKINNY_F16) {
        if (groups == 1) {
            return launch<NT, 1, KIND>(w_map, x_map, a, s);
        }
    }
    if constexpr (NT <= bt_cu_skinny_most(KIND, 3)) {
        if (groups == 3) {
            return launch<NT, 3, KIND>(w_map, x_map, a, s);
        }
    }
    if constexpr (NT <= bt_cu_skinny_most(KIND, 4)) {
        if (groups == 4) {
            return launch<NT, 4, KIND>(w_map, x_map, a, s);
        }
    }
    return groups == 2 ? launch<NT, 2, KIND>(w_map, x_map, a, s) : cudaErrorInvalidValue;
}

template <enum bt_cu_skinny_kind KIND>
static cudaError_t launch_tokens(const CUtensorMap &w_map, const CUtensorMap &x_map,
                                 struct bt_cu_skinny_args &a, uint32_t groups, uint32_t tokens,
                                 cudaStream_t s)
{
    switch (tokens) {
    case 8: return launch_groups<8, KIND>(w_map, x_map, a, groups, s);
    case 16: return launch_groups<16, KIND>(w_map, x_map, a, groups, s);
    case 32: return launch_groups<32, KIND>(w_map, x_map, a, groups, s);
    case 64: return launch_groups<64, KIND>(w_map, x_map, a, groups, s);
    default: return launch_groups<128, KIND>(w_map, x_map, a, groups, s);
    }
}

#endif
