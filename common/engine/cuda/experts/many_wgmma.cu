/* Experts of many rows on Hopper: two grouped products with wide_tile.cuh's main loop, bound by the
 * tensor cores. A part is up to 256 rows of one expert, and blocks run in pairs:
 *   - with more than 128 rows, the blocks of a pair compute the two halves of a part's rows times
 * the same 256 rows of weights. Each fetches half of those for both;
 *   - with up to 128 rows, they compute the same rows times neighbouring 256 rows of weights. So no
 *     block is idle where an expert has an odd number of tiles;
 *   - a pass over x first puts its rows in the order of their places, so that one thread can copy
 *     everything through TMA. Four warps that gathered rows by cp.async kept the tensor cores busy
 *     for 69 % of the time, this way it is 88 %;
 *   - a warpgroup whose 64 rows lie beyond the part leaves its products out;
 *   - the list of items (part, column) is made with the order of rows; a pair takes every n-th.
 * The second product's rows are scattered to their uses in bf16; combine adds them in their order.
 */
#include "common/engine/cuda/experts/experts_priv.h"
#include "common/engine/cuda/gemm/wide_tile.cuh"
#include "common/engine/cuda/tensor_map.h"
#include "common/engine/cuda/value.h"

enum product { UP, DOWN };

/* The number of parts of a tile's ending; each part runs during one step of the next tile. */
template <enum product P> struct parts {
    static constexpr int n = P == UP ? 5 : 4;
};

struct many_args {
    struct bt_cu_experts_plan p;
    uint32_t k, hidden, inter;
};
struct many_maps {
    CUtensorMap x, w;
};

/* One block's tile. */
struct tile {
    uint32_t expert, first, rows; /* its places of `uses` */
    uint32_t col;
    bool shared; /* weights, with the other block */
};
template <enum product P>
static __device__ __forceinline__ struct tile tile_at(const struct many_args &a, uint32_t i,
                                                      uint32_t items)
{
    if (i >= items) {
        return {};
    }
    const uint32_t item = a.p.items[P][i], rank = cluster_rank();
    const struct bt_cu_experts_part part = a.p.parts[item & 0xffff];
    const uint32_t col = item >> 16;
    if (part.rows > BM) {
        return {part.expert, part.first + rank * BM, rank ? part.rows - BM : BM, col, true};
    }
    return {part.expert, part.first, part.rows, col * 2 + rank, false};
}

/* ---- the copying warps ---- */

/* Copies one stage: up to 128 rows of x in halves; 128 gate rows and 128 up rows, or 256 rows, of
 * weights. */
template <enum product P>
static __device__ __forceinline__ void
copy_stage(const struct many_args &a, const struct many_maps &maps, const struct tile &t,
           uint32_t at, uint32_t bar, uint32_t step)
{
    const uint32_t row = t.col * (P == UP ? BN / 2 : BN), half = P == UP ? a.inter : BN / 2;
    const uint32_t rank = cluster_rank(), rows = t.shared || t.rows > BM / 2 ? BM : BM / 2;
    const int col = (int)(step * BK), e = (int)t.expert;
    const uint32_t w = at + X_BYTES;
    bar_expect(bar, W_BYTES + rows * BK * 2);
    if (t.shared) {
        tma_load_3d_both(w + rank * (W_BYTES / 2), &maps.w, bar, col, (int)(row + rank * half), e);
    } else {
        tma_load_3d(w, &maps.w, bar, col, (int)row, e);
        tma_load_3d(w + W_BYTES / 2, &maps.w, bar, col, (int)(row + half), e);
    }
    for (uint32_t i = 0; i < rows; i += BM / 2) {
        tma_load_2d(at + i * BK * 2, &maps.x, bar, col, (int)(t.first + i), TMA_EVICT_NORMAL);
    }
}

template <enum product P>
static __device__ __forceinline__ void
produce(const struct many_args &a, const struct many_maps &maps, struct wide_bars *b, uint32_t smem)
{
    const uint32_t steps = (a.k + BK - 1) / BK, items = a.p.state->items[P];
    struct ring r = {0, 1};
    struct tile next = tile_at<P>(a, blockIdx.x / 2, items);
    for (uint32_t i = blockIdx.x / 2; i < items; i += gridDim.x / 2) {
        const struct tile t = next;
        for (uint32_t s = 0; s < steps; s++) {
            bar_wait(smem_addr(&b->empty[r.at]), r.phase); /* of both blocks */
            copy_stage<P>(a, maps, t, smem + r.at * STAGE, smem_addr(&b->full[r.at]), s);
            if (s == 0) {
                next = tile_at<P>(a, i + gridDim.x / 2, items);
            }
            r.next(STAGES);
        }
    }
}

/* ---- endings ---- */

/* A tile that is being written. */
struct leaving {
    uint32_t v[64]; /* each: two columns */
    uint32_t to;    /* the warp's first place */
    uint32_t rows;  /* of the warp */
    uint32_t col;
    bool any;
};

static __device__ __forceinline__ void leave_up(const struct many_args &a,
                                                const struct leaving &out, uint8_t *stage, int part)
{
    const uint32_t lane = threadIdx.x % 32, col = out.col * (BN / 2) + lane % 16 * 8;
    if (part < 4) {
        stage_swiglu(out.v, stage, part);
        return;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t row = i * 2 + lane / 16;
        uint4 v = *(const uint4 *)staged(stage, row, lane % 16);
        if (row < out.rows && col < a.inter) {
            *(uint4 *)((uint16_t *)a.p.h + (size_t)(out.to + row) * a.inter + col) = v;
        }
    }
    __syncwarp();
}

/* 128 columns in two parts. */
static __device__ __forceinline__ void
leave_down(const struct many_args &a, const struct leaving &out, uint8_t *stage, int part)
{
    const uint32_t lane = threadIdx.x % 32;
    const int half = part / 2;
    if (part % 2 == 0) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            staged(stage, lane / 4 + i % 2 * 8, i / 2)[lane % 4] = out.v[half * 32 + i];
        }
        __syncwarp();
        return;
    }
    const uint32_t col = out.col * BN + half * 128 + lane % 16 * 8;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t row = i * 2 + lane / 16;
        uint4 v = *(const uint4 *)staged(stage, row, lane % 16);
        if (row < out.rows && col < a.hidden) {
            *(uint4 *)((uint16_t *)a.p.y + (size_t)(out.to + row) * a.hidden + col) = v;
        }
    }
    __syncwarp();
}

template <enum product P>
static __device__ __forceinline__ void take(struct leaving &out, const struct tile &t,
                                            uint32_t warp, const float (&acc)[128])
{
    const uint32_t row0 = warp * 16;
    out.any = true;
    out.col = t.col;
    out.to = t.first + row0;
    out.rows = t.rows > row0 ? t.rows - row0 : 0;
    if constexpr (P == UP) {
        pack_swiglu(out.v, acc);
    } else {
#pragma unroll
        for (int i = 0; i < 64; i++) {
            out.v[i] = pack2<__nv_bfloat16>(acc[i * 2], acc[i * 2 + 1]);
        }
    }
}

/* ---- the computing warpgroups ---- */

template <enum product P>
static __device__ __forceinline__ void consume(const struct many_args &a, struct wide_bars *b,
                                               uint8_t *smem)
{
    constexpr int PARTS = parts<P>::n;
    const uint32_t warp = threadIdx.x / 32 - 4, base = smem_addr(smem);
    const uint32_t steps = (a.k + BK - 1) / BK, items = a.p.state->items[P];
    uint8_t *stage = smem + STAGES * STAGE + warp * STAGED;
    struct place c = {{0, 0}, 0};
    struct leaving out;
    struct tile next = tile_at<P>(a, blockIdx.x / 2, items);
    out.any = false;
    for (uint32_t i = blockIdx.x / 2; i < items; i += gridDim.x / 2) {
        const struct tile t = next;
        const bool active = warp / 4 * 64 < t.rows;
        float acc[128];
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            begin(b, base, c, acc, part == 0, active);
            if (out.any) {
                P == UP ? leave_up(a, out, stage, part) : leave_down(a, out, stage, part);
            }
            if (part == PARTS - 1) { /* the loads' time passes while products run */
                next = tile_at<P>(a, i + gridDim.x / 2, items);
            }
            settle(b, c, part == 0);
        }
        for (uint32_t s = PARTS; s < steps; s++) {
            begin(b, base, c, acc, false, active);
            settle(b, c, false);
        }
        wgmma_wait<0>();
        wgmma_hold(acc);
        release(c.before);
        take<P>(out, t, warp, acc);
    }
#pragma unroll
    for (int part = 0; part < PARTS && out.any; part++) {
        P == UP ? leave_up(a, out, stage, part) : leave_down(a, out, stage, part);
    }
}

template <enum product P>
static __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    many_kernel(const __grid_constant__ struct many_maps maps,
                const __grid_constant__ struct many_args a)
{
    extern __shared__ uint8_t raw[];
    __shared__ struct wide_bars b;
    uint8_t *smem = raw + (1024 - smem_addr(raw) % 1024) % 1024;
    early_next();
    if (threadIdx.x == 0) {
        tma_prefetch(&maps.x);
        tma_prefetch(&maps.w);
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
            produce<P>(a, maps, &b, smem_addr(smem));
        }
        __syncwarp();
    } else {
        regs_take<232>();
        consume<P>(a, &b, smem);
    }
    cluster_sync(); /* neither block ends while the other copies to it or arrives at its barriers */
}

/* ---- launches ---- */

struct gather_args {
    const uint4 *a;
    uint4 *x;
    const uint32_t *places;
    uint32_t used, pieces; /* of a row, of 16 bytes */
};

/* Puts the rows of a in the order of their places: a block for each. */
static __global__ void __launch_bounds__(256)
    gather_kernel(const __grid_constant__ struct gather_args a)
{
    __shared__ uint32_t to[BT_CU_EXPERTS_USED_MAX];
    early_next();
    early_wait();
    if (threadIdx.x < a.used) {
        to[threadIdx.x] = a.places[blockIdx.x * a.used + threadIdx.x];
    }
    __syncthreads();
    if (to[0] == ~0u) {
        return;
    }
    for (uint32_t i = threadIdx.x; i < a.pieces; i += 256) {
        const uint4 v = a.a[(size_t)blockIdx.x * a.pieces + i];
        for (uint32_t k = 0; k < a.used; k++) {
            a.x[(size_t)to[k] * a.pieces + i] = v;
        }
    }
}

template <enum product P>
static cudaError_t launch(const void *w, uint32_t experts, const void *x, uint64_t uses,
                          const struct many_args &a, cudaStream_t s)
{
    const uint64_t rows = P == UP ? 2 * a.inter : a.hidden;
    const uint64_t w_dims[3] = {a.k, rows, experts}, x_dims[2] = {a.k, uses};
    const uint64_t strides[2] = {a.k * 2ull, a.k * 2ull * rows};
    const uint32_t w_box[3] = {BK, 128, 1}, x_box[2] = {BK, BM / 2};
    struct many_maps maps;
    cudaError_t e = bt_cu_tensor_map(&maps.w, BT_CU_BF16, w, 3, w_dims, strides, w_box);
    e = e == cudaSuccess ? bt_cu_tensor_map(&maps.x, BT_CU_BF16, x, 2, x_dims, strides, x_box) : e;
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(many_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    }
    if (e != cudaSuccess) {
        return e;
    }
    return launch_early(many_kernel<P>, multiprocessors() / 2 * 2, THREADS, SMEM, s, maps, a);
}

extern "C" cudaError_t bt_cu_experts_many(const struct bt_cu_experts *x,
                                          const struct bt_cu_experts_plan *p,
                                          const struct bt_cu_experts_product *w, cudaStream_t s)
{
    const struct gather_args g = {(const uint4 *)w->a, (uint4 *)p->y, p->places, x->used,
                                  x->hidden / 8};
    const uint64_t uses = (uint64_t)w->rows * x->used;
    struct many_args a = {*p, x->hidden, x->hidden, x->inter};
    cudaError_t e = launch_early(gather_kernel, w->rows, 256, 0, s, g);
    e = e == cudaSuccess ? launch<UP>(w->gate_up, x->n, p->y, uses, a, s) : e;
    a.k = x->inter;
    return e == cudaSuccess ? launch<DOWN>(w->down, x->n, p->h, uses, a, s) : e;
}
