/* Products of many rows in e4m3 (wide_e4m3.h) on Hopper. Tiles, the ring, pairs of blocks and the
 * order of tiles are wide.cu's; the main loop is wide_e4m3.cuh's. A tile ends at once, without the
 * next tile's products beside it, as two sets of sums fill the registers. */
#include "common/engine/cuda/gemm/wide_e4m3.h"

#include "common/engine/cuda/device.h"
#include "common/engine/cuda/fp8.cuh"
#include "common/engine/cuda/gemm/wide_append.cuh"
#include "common/engine/cuda/gemm/wide_e4m3.cuh"
#include "common/engine/cuda/tensor_map.h"
#include "common/engine/cuda/value.h"

#define BAND 8 /* pairs of tiles below each other in a band */

enum wide_end { SWIGLU, APPEND, SUM };

struct e4m3_args {
    uint32_t m, n, steps;  /* steps: k in units of 128 columns */
    uint32_t pairs, cols;  /* numbers of tiles: pairs of them down, columns across */
    uint32_t half_row;     /* from w's first row of a tile to the row of its second 128 */
    uint32_t rows_per_col; /* w's rows from one column of tiles to the next */
    const float *x_scale, *w_scale;
    uint32_t x_stride, w_stride; /* BLOCKS: w_stride from one row of blocks to the next */
    bool blocks;
    bool add; /* SUM: y += */
    void *y;
    float *y_scale; /* SWIGLU */
    struct bt_cu_append append;
};

struct tile { /* the first row of x, and the column of tiles */
    uint32_t row, col;
};
static __device__ __forceinline__ struct tile tile_at(const struct e4m3_args &a, uint32_t t)
{
    uint32_t band = t / (BAND * a.cols), in = t % (BAND * a.cols);
    uint32_t high = min((uint32_t)BAND, a.pairs - band * BAND);
    return {((band * BAND + in % high) * 2 + cluster_rank()) * BM, in / high};
}

/* The first of w's rows in a half of a column of tiles. */
static __device__ __forceinline__ uint32_t half_at(const struct e4m3_args &a, uint32_t col,
                                                   uint32_t half)
{
    return col * a.rows_per_col + half * a.half_row;
}

static __device__ __forceinline__ void produce(const struct e4m3_args &a, const CUtensorMap *x_map,
                                               const CUtensorMap *w_map, struct wide_bars *b,
                                               uint32_t smem)
{
    const uint32_t rank = cluster_rank();
    struct ring r = {0, 1};
    for (uint32_t t = blockIdx.x / 2; t < a.pairs * a.cols; t += gridDim.x / 2) {
        const struct tile at = tile_at(a, t);
        const int w_row = (int)half_at(a, at.col, rank);
        for (uint32_t i = 0; i < a.steps; i++) {
            uint32_t x = smem + r.at * STAGE, bar = smem_addr(&b->full[r.at]);
            bar_wait(smem_addr(&b->empty[r.at]), r.phase); /* of both blocks */
            bar_expect(bar, STAGE);
            const int col = (int)i * 64; /* pairs of e4m3, as the maps have them */
            tma_load_2d(x, x_map, bar, col, (int)at.row, TMA_EVICT_NORMAL);
            tma_load_2d_both(x + X_BYTES + rank * (W_BYTES / 2), w_map, bar, col, w_row);
            r.next(STAGES);
        }
    }
}

/* ---- endings; sums are in the order of wide_append.cuh ---- */

static __device__ __forceinline__ struct e4m3_scales scales_at(const struct e4m3_args &a,
                                                               uint32_t row0, uint32_t col)
{
    static const float one = 1.0f;
    struct e4m3_scales s;
    s.x_step = a.x_stride;
    s.w_step = a.blocks ? 1 : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t w_row = min(half_at(a, col, i), a.n - 1);
        s.x[i] = a.x_scale + min(row0 + threadIdx.x % 32 / 4 + i * 8, a.m - 1);
        s.w[i] = a.blocks ? a.w_scale + (size_t)(w_row / BT_CU_WEIGHT_BLOCK) * a.w_stride : &one;
    }
    return s;
}

/* A scale for each of w's rows does not change along k. */
static __device__ __forceinline__ void scale_rows(const struct e4m3_args &a, uint32_t col,
                                                  float (&acc)[128])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        uint32_t row = half_at(a, col, i / 16) + i % 16 * 8 + threadIdx.x % 4 * 2;
        float lo = __ldg(a.w_scale + min(row, a.n - 1)),
              hi = __ldg(a.w_scale + min(row + 1, a.n - 1));
        acc[i * 4] *= lo;
        acc[i * 4 + 1] *= hi;
        acc[i * 4 + 2] *= lo;
        acc[i * 4 + 3] *= hi;
    }
}

/* A thread's two columns of a row are 8 bytes, four threads' a sector of memory. All loads of a
 * half come before its stores. */
static __device__ __forceinline__ void end_sum(const struct e4m3_args &a, uint32_t row0,
                                               uint32_t col, const float (&acc)[128])
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t first = half_at(a, col, half) + lane % 4 * 2;
        float2 old[32];
#pragma unroll
        for (int i = 0; i < 32; i++) {
            uint32_t row = row0 + lane / 4 + i % 2 * 8, c = first + i / 2 * 8;
            bool in = a.add && row < a.m && c < a.n;
            old[i] = in ? *(const float2 *)((const float *)a.y + (size_t)row * a.n + c)
                        : make_float2(0, 0);
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
            uint32_t row = row0 + lane / 4 + i % 2 * 8, c = first + i / 2 * 8;
            if (row < a.m && c < a.n) {
                const float *v = acc + half * 64 + i * 2;
                *(float2 *)((float *)a.y + (size_t)row * a.n + c) =
                    make_float2(old[i].x + v[0], old[i].y + v[1]);
            }
        }
    }
}

/* A tile's 128 columns are what one scale of a row is for; four lanes hold a row of them. In the
 * order of weight.h, a thread's four values of 16 columns are one word. */
static __device__ __forceinline__ void end_swiglu(const struct e4m3_args &a, uint32_t row0,
                                                  uint32_t col, float (&acc)[128])
{
    const uint32_t lane = threadIdx.x % 32, wide = a.n / 2;
    float top[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        uint32_t c = col * 128 + i / 4 * 8 + lane % 4 * 2;
        acc[i] = c < wide ? swiglu_fast(acc[i], acc[i + 64]) : 0;
        top[i / 2 % 2] = fmaxf(top[i / 2 % 2], fabsf(acc[i]));
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t row = row0 + lane / 4 + r * 8;
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        const float f = e4m3_factor(top[r]);
        uint8_t *to = (uint8_t *)a.y + (size_t)row * wide + col * 128 + lane % 4 * 4;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float *v = acc + j * 8 + r * 2;
            uint32_t four = pack_e4m3(v[0] * f, v[1] * f, v[4] * f, v[5] * f);
            if (row < a.m && col * 128 + j * 16 < wide) {
                *(uint32_t *)(to + j * 16) = four;
            }
        }
        if (row < a.m && lane % 4 == 0) {
            a.y_scale[(size_t)col * a.x_stride + row] = e4m3_scale_of(f);
        }
    }
}

template <int D>
static __device__ __forceinline__ void end_append(const struct e4m3_args &a, uint32_t row0,
                                                  uint32_t col, uint8_t *stage, float (&acc)[128])
{
    int pos;
    const uint32_t place = place_of(a.append, row0, &pos);
    float2 cs[D / 4];
    angles<D>(a.append, pos, cs);
    turn<D>(a.append, col * (BN / D), cs, acc);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t v[32];
#pragma unroll
        for (int i = 0; i < 32; i++) {
            v[i] = pack2<__half>(acc[half * 64 + i * 2], acc[half * 64 + i * 2 + 1]);
        }
        stage_append(v, stage);
        put_append<D>(a.append, a.n, row0, col * BN + half * 128, place, stage);
    }
}

template <enum wide_end END, int D>
static __device__ __forceinline__ void consume(const struct e4m3_args &a, struct wide_bars *b,
                                               uint8_t *smem)
{
    const uint32_t warp = threadIdx.x / 32 - 4, base = smem_addr(smem);
    struct place c = {{0, 0}, 0};
    begin_turns();
    for (uint32_t t = blockIdx.x / 2; t < a.pairs * a.cols; t += gridDim.x / 2) {
        const struct tile at = tile_at(a, t);
        const uint32_t row0 = at.row + warp * 16;
        float acc[128];
        sum_e4m3(b, base, c, scales_at(a, row0, at.col), a.steps, acc);
        if (!a.blocks) {
            scale_rows(a, at.col, acc);
        }
        if constexpr (END == SWIGLU) {
            end_swiglu(a, row0, at.col, acc);
        } else if constexpr (END == APPEND) {
            end_append<D>(a, row0, at.col, smem + STAGES * STAGE + warp * STAGED, acc);
        } else {
            end_sum(a, row0, at.col, acc);
        }
    }
}

template <enum wide_end END, int D>
static __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    wide_e4m3_kernel(const __grid_constant__ CUtensorMap x_map,
                     const __grid_constant__ CUtensorMap w_map,
                     const __grid_constant__ struct e4m3_args a)
{
    extern __shared__ uint8_t raw[];
    __shared__ struct wide_bars b;
    uint8_t *smem = raw + (1024 - smem_addr(raw) % 1024) % 1024;
    early_next();
    if (threadIdx.x == 0) {
        tma_prefetch(&x_map);
        tma_prefetch(&w_map);
        for (int i = 0; i < STAGES; i++) {
            bar_init(smem_addr(&b.full[i]), 1);
            bar_init(smem_addr(&b.empty[i]), 2 * WARPS);
        }
        bar_init_fence();
    }
    __syncthreads();
    cluster_sync(); /* the other block has initialized its barriers */
    early_wait();
    if (threadIdx.x < 128) {
        regs_give<40>();
        if (threadIdx.x == 0) {
            produce(a, &x_map, &w_map, &b, smem_addr(smem));
        }
        __syncwarp();
    } else {
        regs_take<232>();
        consume<END, D>(a, &b, smem);
    }
    cluster_sync(); /* neither block ends while the other copies to it or arrives at its barriers */
}

/* ---- launches ---- */

extern "C" bool bt_cu_wide_e4m3_fits(uint32_t m, uint32_t n, uint32_t k)
{
    return bt_cu_hopper() && m > 0 && n > 0 && n % 16 == 0 && k > 0 && k % BT_CU_WEIGHT_BLOCK == 0;
}

template <enum wide_end END, int D>
static cudaError_t launch(const struct bt_cu_wide_e4m3 *p, struct e4m3_args &a, cudaStream_t s)
{
    if (!bt_cu_wide_e4m3_fits(p->m, p->n, p->k) || p->w.kind == BT_CU_WEIGHT_BF16) {
        return cudaErrorInvalidValue;
    }
    const uint64_t x_dims[2] = {p->k / 2, p->m}, w_dims[2] = {p->k / 2, p->n}, strides[1] = {p->k};
    const uint32_t box[2] = {64, 128};
    CUtensorMap x_map, w_map;
    cudaError_t e = bt_cu_tensor_map(&x_map, BT_CU_BF16, p->x.v, 2, x_dims, strides, box);
    e = e == cudaSuccess ? bt_cu_tensor_map(&w_map, BT_CU_BF16, p->w.w, 2, w_dims, strides, box)
                         : e;
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(wide_e4m3_kernel<END, D>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    }
    if (e != cudaSuccess) {
        return e;
    }
    a.m = p->m;
    a.n = p->n;
    a.steps = p->k / BT_CU_WEIGHT_BLOCK;
    a.x_scale = p->x.scale;
    a.x_stride = bt_cu_e4m3_stride(p->m);
    a.w_scale = p->w.scale;
    a.w_stride = bt_cu_scale_stride(p->k);
    a.blocks = p->w.kind == BT_CU_WEIGHT_BLOCKS;
    a.rows_per_col = END == SWIGLU ? BN / 2 : BN;
    a.half_row = END == SWIGLU ? a.n / 2 : BN / 2;
    a.pairs = (a.m + 2 * BM - 1) / (2 * BM);
    a.cols = ((END == SWIGLU ? a.n / 2 : a.n) + a.rows_per_col - 1) / a.rows_per_col;
    uint32_t all = a.pairs * a.cols, most = multiprocessors() / 2;
    return launch_early(wide_e4m3_kernel<END, D>, 2 * (all < most ? all : most), THREADS, SMEM, s,
                        x_map, w_map, a);
}

extern "C" cudaError_t bt_cu_wide_e4m3_sum(const struct bt_cu_wide_e4m3 *p, float *y, bool add,
                                           cudaStream_t s)
{
    struct e4m3_args a = {};
    a.y = y;
    a.add = add;
    return launch<SUM, 0>(p, a, s);
}

extern "C" cudaError_t bt_cu_wide_e4m3_swiglu(const struct bt_cu_wide_e4m3 *p,
                                              const struct bt_cu_e4m3_rows *to, cudaStream_t s)
{
    struct e4m3_args a = {};
    const uint32_t unit = p->w.kind == BT_CU_WEIGHT_BLOCKS ? BT_CU_WEIGHT_BLOCK : 16;
    a.y = to->v;
    a.y_scale = to->scale;
    return p->n / 2 % unit == 0 ? launch<SWIGLU, 0>(p, a, s) : cudaErrorInvalidValue;
}

extern "C" cudaError_t bt_cu_wide_e4m3_append(const struct bt_cu_wide_e4m3 *p,
                                              const struct bt_cu_append *append, cudaStream_t s)
{
    struct e4m3_args a = {};
    a.append = *append;
    if (append->e4m3 || append->n != p->m ||
        p->n != (append->heads + 2 * append->kv_heads) * append->head_dim) {
        return cudaErrorInvalidValue;
    }
    switch (append->head_dim) {
    case 64: return launch<APPEND, 64>(p, a, s);
    case 128: return launch<APPEND, 128>(p, a, s);
    case 256: return launch<APPEND, 256>(p, a, s);
    default: return cudaErrorInvalidValue;
    }
}
