/* Products of few rows (skinny.h) on Hopper. 64 weight rows are the M of a warpgroup's product and
 * tokens its N. The tensor cores are idle most of the time; what counts is that weights are fetched
 * without a pause:
 *   - a tile is 64 weight rows for each computing warpgroup of a block. One warp copies weights in
 *     boxes of 8 KB, 64 rows of 128 bytes, through a ring for each warpgroup; the rings fill most
 *     of the shared memory. It fetches `depth` neighbouring boxes of 64 rows before it goes to the
 *     next 64 rows, as memory is faster with longer pieces of a row. Another warp copies the
 *     activations, which all warpgroups share. They come from the L2 cache, and with many weight
 *     rows in a block there is little of that traffic;
 *   - the blocks of a cluster divide k and add their sums through each other's shared memory,
 *     always in the same order;
 *   - weights do not depend on the kernel before: their ring is filled while that kernel still runs
 *     (programmatic dependent launch);
 *   - gate and up rows alternate in groups of eight in a tile. The tensor map does this, so that
 *     one thread holds both values of a SwiGLU. */
#include "common/engine/cuda/gemm/skinny.h"

#include "common/engine/cuda/device.h"
#include "common/engine/cuda/hopper.cuh"
#include "common/engine/cuda/mma.cuh"
#include "common/engine/cuda/tensor_map.h"
#include "common/engine/cuda/value.h"

#define BOX       8192u /* 64 rows of 64 weights */
#define MAX_SLOTS 26
#define X_BOXES   7    /* 64 columns of all tokens each */
#define PITCH     68u  /* floats from token to token of a warpgroup's 64 sums */
#define STAGED    2176 /* ... of 8 of those tokens */
#define SMEM_MAX  231424u

struct skinny_args {
    void *y;
    uint32_t m, n, tiles, steps;             /* steps: k in units of 64 columns */
    uint32_t depth, slots, x_slots, cluster; /* slots: of each warpgroup */
    enum bt_cu_skinny_end end;
};

struct skinny_bars {
    uint64_t full[MAX_SLOTS], empty[MAX_SLOTS], x_full[X_BOXES], x_empty[X_BOXES];
};

/* The units of 64 columns of this block: [first, end). */
struct columns {
    uint32_t first, end;
};
static __device__ __forceinline__ struct columns columns_of(const struct skinny_args &a)
{
    uint32_t rank = blockIdx.x % a.cluster;
    return {a.steps * rank / a.cluster, a.steps * (rank + 1) / a.cluster};
}

/* ---- the copying warps, one thread each ---- */

template <int GROUPS>
static __device__ __forceinline__ void copy_weights(const struct skinny_args &a,
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
                    int col = (int)(at + i) * 64;
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

template <int NT>
static __device__ __forceinline__ void copy_activations(const struct skinny_args &a,
                                                        const CUtensorMap *map,
                                                        struct skinny_bars *b, uint32_t smem)
{
    const struct columns k = columns_of(a);
    struct ring r = {0, 1};
    for (uint32_t tile = blockIdx.x / a.cluster; tile < a.tiles; tile += gridDim.x / a.cluster) {
        for (uint32_t at = k.first; at < k.end; at++) {
            uint32_t bar = smem_addr(&b->x_full[r.at]);
            bar_wait(smem_addr(&b->x_empty[r.at]), r.phase);
            bar_expect(bar, NT * 128);
            tma_load_2d(smem + r.at * NT * 128, map, bar, (int)at * 64, 0, TMA_EVICT_NORMAL);
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
    struct ring w, x;
};

/* Computes one tile: this warpgroup's 64 rows times all tokens, over this block's columns. */
template <int NT, int GROUPS>
static __device__ __forceinline__ void sum_tile(const struct skinny_args &a, struct consumer &c,
                                                float (&acc)[NT / 2])
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

static __device__ __forceinline__ float swiglu(float gate, float up)
{
    return gate / (1.0f + __expf(-gate)) * up;
}

/* Writes a warpgroup's sums, 8 tokens at a time and through shared memory, so that a token's values
 * are written in one piece. It must be short, as no weights are requested meanwhile. */
template <int NT>
static __device__ __forceinline__ void put(const struct skinny_args &a, uint32_t row0, float *stage,
                                           uint32_t group, const float (&acc)[NT / 2])
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
                    pack2<__nv_bfloat16>(swiglu(gate[0], gate[8]), swiglu(gate[1], gate[9]));
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

static __device__ __forceinline__ float4 gather(const float *at, uint32_t cluster)
{
    float4 v = make_float4(0, 0, 0, 0);
    for (uint32_t c = 0; c < cluster; c++) {
        float4 u = cluster_load4(smem_addr(at), c);
        v = make_float4(v.x + u.x, v.y + u.y, v.z + u.z, v.w + u.w);
    }
    return v;
}

/* Each block of the cluster finishes a part of the tokens. */
template <int NT, int GROUPS>
static __device__ __forceinline__ void put_shared(const struct skinny_args &a, uint32_t tile,
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
                make_uint2(pack2<__nv_bfloat16>(swiglu(g.x, u.x), swiglu(g.y, u.y)),
                           pack2<__nv_bfloat16>(swiglu(g.z, u.z), swiglu(g.w, u.w)));
            continue;
        }
        float4 *y = (float4 *)((float *)a.y + (size_t)t * wide + at);
        float4 old = a.end == BT_CU_SKINNY_ADD ? *y : make_float4(0, 0, 0, 0);
        float4 v = gather(sum + t * pitch + q, a.cluster);
        *y = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
    }
}

template <int NT, int GROUPS>
static __device__ __forceinline__ void compute(const struct skinny_args &a, struct skinny_bars *b,
                                               uint8_t *smem, uint32_t x_smem, float *stage)
{
    struct consumer c = {b, smem_addr(smem), x_smem, threadIdx.x / 128, {0, 0}, {0, 0}};
    float acc[NT / 2];
    for (uint32_t tile = blockIdx.x / a.cluster; tile < a.tiles; tile += gridDim.x / a.cluster) {
        sum_tile<NT, GROUPS>(a, c, acc);
        if (a.cluster == 1) {
            put<NT>(a, (tile * GROUPS + c.group) * 64, stage + c.group * (STAGED / 4), c.group,
                    acc);
        } else {
            share<NT, GROUPS>((float *)smem, c.group, acc);
        }
    }
}

template <int NT, int GROUPS>
static __global__ void __launch_bounds__(GROUPS * 128 + 64, 1)
    skinny_kernel(const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ struct skinny_args a)
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
        early_wait();
        if (warp < GROUPS * 4) {
            compute<NT, GROUPS>(a, &bars, smem, x_smem, (float *)(x + a.x_slots * NT * 128));
        } else if (threadIdx.x % 32 == 0) {
            copy_activations<NT>(a, &x_map, &bars, x_smem);
        }
    }
    if (a.cluster > 1) { /* there is one tile: see launch() */
        __syncwarp();
        cluster_sync();
        if (warp < GROUPS * 4) {
            put_shared<NT, GROUPS>(a, blockIdx.x / a.cluster, (const float *)smem);
        }
        __syncwarp();
        cluster_sync(); /* no block ends while others read its sums */
    }
}

/* ---- host ---- */

static const struct way {
    uint32_t groups, cluster, depth;
} ways[] = {{2, 1, 4}, {2, 1, 2}, {3, 1, 4}, {4, 1, 4}, {2, 2, 4}, {2, 2, 8}, {3, 2, 4},
            {2, 3, 4}, {2, 3, 8}, {3, 3, 4}, {3, 4, 4}, {4, 4, 4}, {3, 5, 4}, {4, 6, 4}};

extern "C" uint32_t bt_cu_skinny_ways(void)
{
    return sizeof(ways) / sizeof(ways[0]);
}

static uint32_t tiles_of(const struct way *y, uint32_t n)
{
    return (n + y->groups * 64 - 1) / (y->groups * 64);
}

/* How many clusters of this many blocks run at once, with one block to a multiprocessor. */
static uint32_t clusters_of(uint32_t blocks)
{
    static int known[9]; /* the number + 1; 0: not known */
    if (known[blocks] == 0) {
        cudaLaunchConfig_t c = {};
        cudaLaunchAttribute attr[1];
        attr[0].id = cudaLaunchAttributeClusterDimension;
        attr[0].val.clusterDim.x = blocks;
        attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
        c.gridDim = dim3(blocks);
        c.blockDim = dim3(2 * 128 + 64);
        c.dynamicSmemBytes = SMEM_MAX - 1024;
        c.attrs = attr;
        c.numAttrs = 1;
        int n = 0;
        if (cudaFuncSetAttribute(skinny_kernel<8, 2>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SMEM_MAX - 1024) != cudaSuccess ||
            cudaOccupancyMaxActiveClusters(&n, skinny_kernel<8, 2>, &c) != cudaSuccess) {
            n = 0;
        }
        known[blocks] = n + 1;
    }
    return (uint32_t)known[blocks] - 1;
}

extern "C" bool bt_cu_skinny_fits(uint32_t way, uint32_t m, uint32_t n, uint32_t k)
{
    if (!bt_cu_hopper() || way >= bt_cu_skinny_ways() || m == 0 || m > BT_CU_SKINNY_ROWS ||
        n % 16 || k % 8) {
        return false;
    }
    const struct way *y = &ways[way];
    return y->cluster == 1 || (k / 64 >= y->cluster && tiles_of(y, n) <= clusters_of(y->cluster));
}

static cudaError_t weights_map(CUtensorMap *map, const void *w, uint32_t n, uint32_t k,
                               enum bt_cu_skinny_end end)
{
    if (end != BT_CU_SKINNY_SWIGLU) {
        const uint64_t dims[2] = {k, n}, strides[1] = {k * 2ull};
        const uint32_t box[2] = {64, 64};
        return bt_cu_tensor_map(map, BT_CU_BF16, w, 2, dims, strides, box);
    }
    const uint64_t dims[4] = {k, 8, 2, n / 16};
    const uint64_t strides[3] = {k * 2ull, (uint64_t)n * k, k * 16ull};
    const uint32_t box[4] = {64, 8, 2, 4};
    return bt_cu_tensor_map(map, BT_CU_BF16, w, 4, dims, strides, box);
}

template <int NT, int GROUPS>
static cudaError_t launch(const CUtensorMap &w_map, const CUtensorMap &x_map, struct skinny_args &a,
                          cudaStream_t s)
{
    constexpr uint32_t x_slots = NT == 128 ? X_BOXES / 2 : X_BOXES;
    constexpr uint32_t beside = x_slots * NT * 128 + GROUPS * STAGED + 1024;
    constexpr uint32_t room = (SMEM_MAX - beside) / BOX;
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute attr[2];
    a.x_slots = x_slots;
    a.slots = (room < MAX_SLOTS ? room : MAX_SLOTS) / GROUPS;
    a.depth = a.depth < a.slots ? a.depth : a.slots;
    uint32_t bytes = GROUPS * a.slots * BOX + beside;
    cudaError_t e = cudaFuncSetAttribute(skinny_kernel<NT, GROUPS>,
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
    return cudaLaunchKernelEx(&c, skinny_kernel<NT, GROUPS>, w_map, x_map, a);
}

template <int NT>
static cudaError_t launch_groups(const struct way *y, const CUtensorMap &w_map,
                                 const CUtensorMap &x_map, struct skinny_args &a, cudaStream_t s)
{
    switch (y->groups) {
    case 2: return launch<NT, 2>(w_map, x_map, a, s);
    case 3: return launch<NT, 3>(w_map, x_map, a, s);
    default: return launch<NT, 4>(w_map, x_map, a, s);
    }
}

extern "C" cudaError_t bt_cu_skinny(uint32_t way, const void *w, const void *x, void *y, uint32_t m,
                                    uint32_t n, uint32_t k, enum bt_cu_skinny_end end,
                                    cudaStream_t s)
{
    if (!bt_cu_skinny_fits(way, m, n, k)) {
        return cudaErrorInvalidValue;
    }
    const struct way *how = &ways[way];
    const uint32_t tokens = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128;
    const uint64_t dims[2] = {k, m}, strides[1] = {k * 2ull};
    const uint32_t box[2] = {64, tokens};
    CUtensorMap w_map, x_map;
    cudaError_t e = weights_map(&w_map, w, n, k, end);
    e = e == cudaSuccess ? bt_cu_tensor_map(&x_map, BT_CU_BF16, x, 2, dims, strides, box) : e;
    if (e != cudaSuccess) {
        return e;
    }
    struct skinny_args a = {};
    a.y = y;
    a.m = m;
    a.n = n;
    a.tiles = tiles_of(how, n);
    a.steps = (k + 63) / 64;
    a.depth = how->depth;
    a.cluster = how->cluster;
    a.end = end;
    switch (tokens) {
    case 8: return launch_groups<8>(how, w_map, x_map, a, s);
    case 16: return launch_groups<16>(how, w_map, x_map, a, s);
    case 32: return launch_groups<32>(how, w_map, x_map, a, s);
    case 64: return launch_groups<64>(how, w_map, x_map, a, s);
    default: return launch_groups<128>(how, w_map, x_map, a, s);
    }
}
