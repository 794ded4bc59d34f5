/* Products of many rows (wide.h) on Hopper. A tile is 128 rows of x times 256 of w:
 *   - one thread copies 64 columns of both through TMA into a ring of four stages; two warpgroups
 *     of 64 rows each multiply (m64n256k16, the instruction that reads shared memory least);
 *   - blocks run in pairs. The two tiles of a pair lie below each other and share the rows of w:
 *     each block fetches half of them for both. That reduces reads from the L2 cache by a third,
 *     and power with it;
 *   - blocks are persistent. They take tiles in bands of rows, so that a band's x stays in the L2
 *     cache while w is read once for each band;
 *   - with SwiGLU the 256 rows of w are 128 of gate and 128 of up, and with RoPE they are whole
 *     heads. So the values that are combined are always in one thread;
 *   - a tile's sums are converted to 16 bits at once. The rest of the ending is done during the
 *     next tile's products, which need the registers of the sums. */
#include "common/engine/cuda/gemm/wide.h"

#include "common/engine/cuda/device.h"
#include "common/engine/cuda/gemm/wide_append.cuh"
#include "common/engine/cuda/gemm/wide_tile.cuh"
#include "common/engine/cuda/tensor_map.h"
#include "common/engine/cuda/value.h"

#ifndef BAND
#define BAND 8 /* pairs of tiles below each other in a band */
#endif

enum wide_end { SWIGLU, APPEND, SUM };

/* The number of parts of a tile's ending; each part runs during one step of the next tile. */
template <enum wide_end END> struct parts {
    static constexpr int n = END == SWIGLU ? 5 : END == APPEND ? 4 : 1;
};

struct wide_args {
    uint32_t m, n, steps;  /* steps: k, or its part, in units of 64 columns */
    uint32_t from;         /* first step of the part */
    uint32_t pairs, cols;  /* numbers of tiles: pairs of them down, columns across */
    uint32_t half_row;     /* from w's first row of a tile to the row of its second 128 */
    uint32_t rows_per_col; /* w's rows from one column of tiles to the next */
    void *y;
    bool add; /* SUM: y += */
    struct bt_cu_append append;
};

/* This block's tile in turn t of the cluster: the first row of x, and the column of tiles. */
struct tile {
    uint32_t row, col;
};
static __device__ __forceinline__ struct tile tile_at(const struct wide_args &a, uint32_t t)
{
    uint32_t band = t / (BAND * a.cols), in = t % (BAND * a.cols);
    uint32_t high = min((uint32_t)BAND, a.pairs - band * BAND);
    return {((band * BAND + in % high) * 2 + cluster_rank()) * BM, in / high};
}

/* ---- the copying thread ---- */

static __device__ __forceinline__ void produce(const struct wide_args &a, const CUtensorMap *x_map,
                                               const CUtensorMap *w_map, struct wide_bars *b,
                                               uint32_t smem)
{
    const uint32_t rank = cluster_rank();
    struct ring r = {0, 1};
    for (uint32_t t = blockIdx.x / 2; t < a.pairs * a.cols; t += gridDim.x / 2) {
        const struct tile at = tile_at(a, t);
        const int w_row = (int)(at.col * a.rows_per_col + rank * a.half_row);
        for (uint32_t i = 0; i < a.steps; i++) {
            uint32_t x = smem + r.at * STAGE, bar = smem_addr(&b->full[r.at]);
            bar_wait(smem_addr(&b->empty[r.at]), r.phase); /* of both blocks */
            bar_expect(bar, STAGE);
            const int col = (int)((a.from + i) * BK);
            tma_load_2d(x, x_map, bar, col, (int)at.row, TMA_EVICT_NORMAL);
            tma_load_2d_both(x + X_BYTES + rank * (W_BYTES / 2), w_map, bar, col, w_row);
            r.next(STAGES);
        }
    }
}

/* ---- the computing warpgroups ---- */

/* Starts the products of 64 columns. */
static __device__ __forceinline__ void begin(struct wide_bars *b, uint32_t smem,
                                             const struct place &c, float (&acc)[128], bool first)
{
    uint32_t at = smem + c.r.at * STAGE;
    uint64_t x = wgmma_desc(at + (threadIdx.x / 128 - 1) * (64 * 128), 0, 1024);
    uint64_t w = wgmma_desc(at + X_BYTES, 0, 1024);
    bar_wait(smem_addr(&b->full[c.r.at]), c.r.phase);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < BK / 16; j++) { /* 16 columns are 32 bytes */
        wgmma_ss_bf16(acc, x + j * 2, w + j * 2, !first || j > 0);
    }
    wgmma_commit();
}
/* ---- endings ---- */

/* v[4 i + 2 (row)] is gate; up follows it. */
static __device__ __forceinline__ void pack_swiglu(uint32_t (&v)[64], const float (&acc)[128])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        v[i * 2] = pack2<__nv_bfloat16>(acc[i * 2], acc[i * 2 + 1]);
        v[i * 2 + 1] = pack2<__nv_bfloat16>(acc[i * 2 + 64], acc[i * 2 + 65]);
    }
}

/* Puts a quarter of a warp's results into shared memory: 16 rows of 128 columns after four parts.
 */
static __device__ __forceinline__ void stage_swiglu(const uint32_t (&v)[64], uint8_t *stage,
                                                    int part)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = part * 4; i < part * 4 + 4; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float2 g = bf16_pair(v[i * 4 + r * 2]), u = bf16_pair(v[i * 4 + r * 2 + 1]);
            staged(stage, lane / 4 + r * 8, i)[lane % 4] =
                pack2<__nv_bfloat16>(swiglu_fast(g.x, u.x), swiglu_fast(g.y, u.y));
        }
    }
}

/* A tile that is being written. */
struct leaving {
    uint32_t v[64]; /* each: two columns */
    uint32_t row0;  /* the warp's first row */
    uint32_t col, place;
    bool any;
};

static __device__ __forceinline__ void
leave_swiglu(const struct wide_args &a, const struct leaving &out, uint8_t *stage, int part)
{
    const uint32_t lane = threadIdx.x % 32, wide = a.n / 2, col = out.col * 128 + lane % 16 * 8;
    if (part < 4) {
        stage_swiglu(out.v, stage, part);
        return;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t row = i * 2 + lane / 16, t = out.row0 + row;
        uint4 v = *(const uint4 *)staged(stage, row, lane % 16);
        if (t < a.m && col < wide) {
            *(uint4 *)((uint16_t *)a.y + (size_t)t * wide + col) = v;
        }
    }
    __syncwarp();
}

static __device__ __forceinline__ void take_append(struct leaving &out, const float (&acc)[128])
{
#pragma unroll
    for (int i = 0; i < 64; i++) {
        out.v[i] = pack2<__half>(acc[i * 2], acc[i * 2 + 1]);
    }
}

/* Writes queries to their rows, keys and values to their pages: 128 columns in two parts. */
template <int D>
static __device__ __forceinline__ void
leave_append(const struct wide_args &w, const struct leaving &out, uint8_t *stage, int part)
{
    const int half = part / 2;
    if (part % 2 == 0) {
        stage_append(out.v + half * 32, stage);
    } else {
        put_append<D>(w.append, w.n, out.row0, out.col * BN + half * 128, out.place, stage);
    }
}

/* Writes a tile's sums at once, since they must not be rounded: a thread's two columns of a row are
 * 8 bytes, four threads' a sector of memory. */
static __device__ __forceinline__ void leave_sum(const struct wide_args &a, uint32_t row0,
                                                 uint32_t col, const float (&acc)[128])
{
    const uint32_t lane = threadIdx.x % 32, first = col * BN + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        uint32_t row = row0 + lane / 4 + i % 2 * 8, c = first + i / 2 * 8;
        if (row < a.m && c < a.n) {
            float2 *y = (float2 *)((float *)a.y + (size_t)row * a.n + c);
            float2 old = a.add ? *y : make_float2(0, 0);
            *y = make_float2(old.x + acc[i * 2], old.y + acc[i * 2 + 1]);
        }
    }
}

template <enum wide_end END, int D>
static __device__ __forceinline__ void leave(const struct wide_args &a, const struct leaving &out,
                                             uint8_t *stage, int part)
{
    if constexpr (END == SWIGLU) {
        leave_swiglu(a, out, stage, part);
    } else if constexpr (END == APPEND) {
        leave_append<D>(a, out, stage, part);
    }
}

template <enum wide_end END, int D>
static __device__ __forceinline__ void consume(const struct wide_args &a, struct wide_bars *b,
                                               uint8_t *smem)
{
    constexpr int PARTS = parts<END>::n;
    const uint32_t warp = threadIdx.x / 32 - 4, base = smem_addr(smem);
    uint8_t *stage = smem + STAGES * STAGE + warp * STAGED;
    struct place c = {{0, 0}, 0};
    struct leaving out;
    out.any = false;
    for (uint32_t t = blockIdx.x / 2; t < a.pairs * a.cols; t += gridDim.x / 2) {
        const struct tile at = tile_at(a, t);
        float acc[128];
        int pos = 0;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            begin(b, base, c, acc, part == 0);
            if (out.any) {
                leave<END, D>(a, out, stage, part);
            }
            settle(b, c, part == 0);
        }
        out.row0 = at.row + warp * 16;
        out.col = at.col;
        out.any = END != SUM;
        if constexpr (END == APPEND) {
            out.place = place_of(a.append, out.row0, &pos);
        }
        for (uint32_t i = PARTS; i < a.steps; i++) {
            begin(b, base, c, acc, false);
            settle(b, c, false);
        }
        if constexpr (END == APPEND) {
            float2 cs[D / 4];
            angles<D>(a.append, pos, cs);
            wgmma_wait<0>();
            wgmma_hold(acc);
            release(c.before);
            turn<D>(a.append, at.col * (BN / D), cs, acc);
            take_append(out, acc);
        } else if constexpr (END == SUM) {
            wgmma_wait<0>();
            wgmma_hold(acc);
            release(c.before);
            leave_sum(a, out.row0, out.col, acc);
        } else {
            wgmma_wait<0>();
            wgmma_hold(acc);
            release(c.before);
            pack_swiglu(out.v, acc);
        }
    }
#pragma unroll
    for (int part = 0; part < PARTS && out.any; part++) {
        leave<END, D>(a, out, stage, part);
    }
}

template <enum wide_end END, int D>
static __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    wide_kernel(const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap w_map,
                const __grid_constant__ struct wide_args a)
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

template <enum wide_end END, int D>
static cudaError_t launch(const void *w, const void *x, struct wide_args &a, uint32_t k,
                          cudaStream_t s)
{
    const uint64_t x_dims[2] = {k, a.m}, w_dims[2] = {k, a.n}, strides[1] = {k * 2ull};
    const uint32_t box[2] = {BK, 128};
    CUtensorMap x_map, w_map;
    cudaError_t e = bt_cu_tensor_map(&x_map, BT_CU_BF16, x, 2, x_dims, strides, box);
    e = e == cudaSuccess ? bt_cu_tensor_map(&w_map, BT_CU_BF16, w, 2, w_dims, strides, box) : e;
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(wide_kernel<END, D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SMEM);
    }
    if (e != cudaSuccess) {
        return e;
    }
    a.steps = END == SUM ? a.steps : (k + BK - 1) / BK;
    a.rows_per_col = END == SWIGLU ? BN / 2 : BN;
    a.half_row = END == SWIGLU ? a.n / 2 : BN / 2;
    a.pairs = (a.m + 2 * BM - 1) / (2 * BM);
    a.cols = ((END == SWIGLU ? a.n / 2 : a.n) + a.rows_per_col - 1) / a.rows_per_col;
    uint32_t all = a.pairs * a.cols, most = multiprocessors() / 2;
    return launch_early(wide_kernel<END, D>, 2 * (all < most ? all : most), THREADS, SMEM, s, x_map,
                        w_map, a);
}

extern "C" bool bt_cu_wide_fits(uint32_t m, uint32_t n, uint32_t k)
{
    return bt_cu_hopper() && m > 0 && n % 16 == 0 && k % 8 == 0 && k > (parts<SWIGLU>::n - 1) * BK;
}

extern "C" cudaError_t bt_cu_wide_swiglu(const void *w, const void *x, void *y, uint32_t m,
                                         uint32_t n, uint32_t k, cudaStream_t s)
{
    struct wide_args a = {};
    a.m = m;
    a.n = n;
    a.y = y;
    return bt_cu_wide_fits(m, n, k) ? launch<SWIGLU, 0>(w, x, a, k, s) : cudaErrorInvalidValue;
}

extern "C" cudaError_t bt_cu_wide_sum(const void *w, const void *x, float *y, uint32_t m,
                                      uint32_t n, uint32_t k, struct bt_cu_wide_part part, bool add,
                                      cudaStream_t s)
{
    struct wide_args a = {};
    a.m = m;
    a.n = n;
    a.y = y;
    a.add = add;
    a.from = part.first;
    a.steps = part.end - part.first;
    return bt_cu_wide_fits(m, n, k) && part.first < part.end && part.end <= (k + BK - 1) / BK
               ? launch<SUM, 0>(w, x, a, k, s)
               : cudaErrorInvalidValue;
}

extern "C" cudaError_t bt_cu_wide_append(const void *w, const void *x, uint32_t k,
                                         const struct bt_cu_append *append, cudaStream_t s)
{
    struct wide_args a = {};
    a.m = append->n;
    a.n = (append->heads + 2 * append->kv_heads) * append->head_dim;
    a.append = *append;
    if (!bt_cu_wide_fits(a.m, a.n, k) || append->e4m3) {
        return cudaErrorInvalidValue;
    }
    switch (append->head_dim) {
    case 64: return launch<APPEND, 64>(w, x, a, k, s);
    case 128: return launch<APPEND, 128>(w, x, a, k, s);
    case 256: return launch<APPEND, 256>(w, x, a, k, s);
    default: return cudaErrorInvalidValue;
    }
}
