/* Experts of few rows on Hopper: one kernel that reads the weights of the experts that are hit,
 * once and without a pause. What a block computes at a time is an item: 16 WM weight rows of one
 * expert times up to 64 rows of activations, in the first product (gate and up, ends in SwiGLU) or
 * in the second (down).
 *   - Blocks are persistent and take items from a counter, first those of all first products. One
 *     warp copies an item's weights in boxes of 64 columns through TMA into a ring of 200 KB. It
 *     runs ahead: weights of the second product are requested while the first is not done.
 *   - An item of a second product waits until all items of its expert's first product are done.
 *     Blocks take items in order and finish them in order, so what it waits for is always running.
 *   - Weights are the M of m16n8k16 and activations its N. A dot product may run over k in any
 *     order, so each thread reads 16 contiguous bytes and uses them as the columns that its
 *     fragments need. Activations come from the L2 cache into registers, one box ahead.
 *   - The warps form groups of WM. A group computes every (8 / WM)-th box of an item, and the
 * groups add their sums in shared memory in a fixed order. So a result depends on neither which
 * block computed it nor on the other rows.
 *   - In a box of the first product, gate and up alternate in groups of eight rows; the tensor map
 *     does this. So one thread holds both values of a SwiGLU. */
#include "common/engine/cuda/experts/experts_priv.h"
#include "common/engine/cuda/hopper.cuh"
#include "common/engine/cuda/mma.cuh"

#define WARPS   8 /* that compute */
#define THREADS ((WARPS + 1) * 32)
#define TOKENS  BT_CU_EXPERTS_FEW_PART
#define RING    204800u
#define QUEUE   4
#define NONE    0xffffffffu

/* WM: warps below each other in a box, each 16 rows of weights. */
template <int WM> struct cut {
    static constexpr uint32_t rows = WM * 16, box = rows * 128, groups = WARPS / WM,
                              slots = RING / box, sums = (groups - 1) * rows * TOKENS * 4,
                              smem = RING + sums + 1024;
};

struct few_args {
    struct bt_cu_experts_plan p;
    const uint16_t *a;
    uint32_t used, hidden, inter;
    uint32_t tiles[2]; /* of a part in the first and in the second product */
};

/* An item as the copying warp hands it to the others; part.rows 0: there is no more. */
struct item {
    struct bt_cu_experts_part part;
    uint32_t at, tile; /* the part's number; which 16 WM rows of weights */
    bool down;
};

template <int WM> struct few_bars {
    uint64_t full[cut<WM>::slots], empty[cut<WM>::slots], queued[QUEUE], taken[QUEUE];
    struct item queue[QUEUE];
};

/* ---- the copying warp, one thread ---- */

static __device__ __forceinline__ uint32_t take(struct bt_cu_experts_state *s)
{
    return atomicAdd(&s->next, 1);
}

template <int WM>
static __device__ __forceinline__ void
copy_items(const struct few_args &a, const CUtensorMap *up_map, const CUtensorMap *down_map,
           struct few_bars<WM> *b, uint32_t smem)
{
    const uint32_t parts = a.p.state->parts, ups = parts * a.tiles[0];
    const uint32_t all = ups + parts * a.tiles[1];
    struct ring q = {0, 1}, r = {0, 1};
    uint32_t next = take(a.p.state);
    for (;;) {
        struct item it = {};
        const uint32_t now = next;
        if (now < all) {
            it.down = now >= ups;
            const uint32_t i = it.down ? now - ups : now, tiles = a.tiles[it.down];
            it.at = i / tiles;
            it.tile = i % tiles;
            it.part = a.p.parts[it.at];
            next = take(a.p.state);
        }
        bar_wait(smem_addr(&b->taken[q.at]), q.phase);
        b->queue[q.at] = it;
        bar_arrive(smem_addr(&b->queued[q.at]));
        q.next(QUEUE);
        if (now >= all) {
            return;
        }
        const uint32_t boxes = ((it.down ? a.inter : a.hidden) + 63) / 64;
        const CUtensorMap *map = it.down ? down_map : up_map;
        for (uint32_t i = 0; i < boxes; i++) {
            uint32_t bar = smem_addr(&b->full[r.at]);
            bar_wait(smem_addr(&b->empty[r.at]), r.phase);
            bar_expect(bar, cut<WM>::box);
            tma_load_5d(smem + r.at * cut<WM>::box, map, bar, (int)(i * 64), 0, 0,
                        (int)(it.tile * WM), (int)it.part.expert, TMA_EVICT_FIRST);
            r.next(cut<WM>::slots);
        }
    }
}

/* ---- the computing warps ---- */

/* What a warp keeps from item to item. */
template <int WM> struct worker {
    struct few_bars<WM> *b;
    const uint8_t *ring; /* in shared memory, as the next */
    float *sums;
    uint32_t group, warp, lane; /* warp: in its group */
    uint32_t boxes;             /* those of all items so far */
    bool ready;                 /* all first products are done */
};

/* Where a lane's activations come from: row lane / 4 of each eight; in units of 16 bytes. */
template <int NT> struct source {
    const uint4 *from;
    uint32_t at[NT], pieces; /* NONE: no such row */
};

/* The pieces of each row that a lane uses from half a box, 32 columns. */
template <int NT>
static __device__ __forceinline__ void load_half(uint4 (&x)[NT], const struct source<NT> &s,
                                                 uint32_t box, uint32_t half)
{
    const uint32_t piece = box * 8 + half * 4 + threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < NT; t++) {
        x[t] = make_uint4(0, 0, 0, 0);
        if (s.at[t] != NONE && piece < s.pieces) {
            x[t] = load_written(s.from + s.at[t] + piece);
        }
    }
}
template <int NT>
static __device__ __forceinline__ void load_box(uint4 (&x)[2][NT], const struct source<NT> &s,
                                                uint32_t box)
{
    load_half<NT>(x[0], s, box, 0);
    load_half<NT>(x[1], s, box, 1);
}

/* Lane / 4 to a row of eight: two neighbours that read the same pieces are four rows apart, where
 * the swizzle puts them into other banks. */
static __device__ __forceinline__ uint32_t row_of(uint32_t lane)
{
    return lane / 4 % 2 * 4 + lane / 8;
}

/* A box of weights as fragments: 16 bytes of rows row_of(lane) and + 8 from either half. */
struct weights {
    uint4 lo[2], hi[2];
};
template <int WM>
static __device__ __forceinline__ void load_weights(struct weights &v, const struct worker<WM> &w,
                                                    uint32_t box)
{
    const uint32_t seq = w.boxes + box, slot = seq % cut<WM>::slots;
    const uint32_t row = row_of(w.lane), t = w.lane % 4;
    const uint8_t *at = w.ring + slot * cut<WM>::box + w.warp * 2048 + row * 128;
    bar_wait(smem_addr(&w.b->full[slot]), seq / cut<WM>::slots & 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t piece = ((half * 4 + t) ^ row) * 16;
        v.lo[half] = *(const uint4 *)(at + piece);
        v.hi[half] = *(const uint4 *)(at + 1024 + piece);
    }
    __syncwarp();
    if (w.lane == 0) {
        bar_arrive(smem_addr(&w.b->empty[slot]));
    }
}

template <int NT>
static __device__ __forceinline__ void multiply_half(const struct weights &v, int half,
                                                     const uint4 (&x)[NT], float (&acc)[NT][4])
{
    const uint32_t a0[4] = {v.lo[half].x, v.hi[half].x, v.lo[half].y, v.hi[half].y};
    const uint32_t a1[4] = {v.lo[half].z, v.hi[half].z, v.lo[half].w, v.hi[half].w};
#pragma unroll
    for (int n = 0; n < NT; n++) {
        mma16816<__nv_bfloat16>(acc[n], a0, x[n].x, x[n].y);
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
        mma16816<__nv_bfloat16>(acc[n], a1, x[n].z, x[n].w);
    }
}
template <int WM, int NT>
static __device__ __forceinline__ void multiply(const struct worker<WM> &w, uint32_t box,
                                                const uint4 (&x)[2][NT], float (&acc)[NT][4])
{
    struct weights v;
    load_weights<WM>(v, w, box);
    multiply_half<NT>(v, 0, x[0], acc);
    multiply_half<NT>(v, 1, x[1], acc);
}

/* This group's boxes of an item. Activations of the next box are on their way while one is
 * multiplied; with many rows the registers hold one box alone, and each half is replaced once it
 * has been used. */
template <int WM, int NT>
static __device__ __forceinline__ void sum_boxes(const struct worker<WM> &w,
                                                 const struct source<NT> &s, uint32_t boxes,
                                                 float (&acc)[NT][4])
{
    constexpr uint32_t step = cut<WM>::groups;
    uint4 x[2][NT];
    load_box<NT>(x, s, w.group);
    if constexpr (NT > 4) {
        for (uint32_t i = w.group; i < boxes; i += step) {
            struct weights v;
            load_weights<WM>(v, w, i);
            multiply_half<NT>(v, 0, x[0], acc);
            load_half<NT>(x[0], s, i + step, 0);
            multiply_half<NT>(v, 1, x[1], acc);
            load_half<NT>(x[1], s, i + step, 1);
        }
    } else {
        uint4 y[2][NT];
        for (uint32_t i = w.group; i < boxes; i += 2 * step) {
            load_box<NT>(y, s, i + step); /* beyond the last: zeros */
            multiply<WM, NT>(w, i, x, acc);
            if (i + step < boxes) {
                load_box<NT>(x, s, i + 2 * step);
                multiply<WM, NT>(w, i + step, y, acc);
            }
        }
    }
}

/* The first group gets the sums of all groups. */
template <int WM, int NT>
static __device__ __forceinline__ void add_groups(const struct worker<WM> &w, float (&acc)[NT][4])
{
    constexpr uint32_t threads = WM * 32;
    const uint32_t thread = w.warp * 32 + w.lane;
    if (w.group > 0) {
        float *to = w.sums + (w.group - 1) * (NT * 4 * threads) + thread;
#pragma unroll
        for (int i = 0; i < NT * 4; i++) {
            to[i * threads] = acc[i / 4][i % 4];
        }
    }
    named_sync(1, WARPS * 32);
    if (w.group == 0) {
        for (uint32_t g = 1; g < cut<WM>::groups; g++) {
            const float *from = w.sums + (g - 1) * (NT * 4 * threads) + thread;
#pragma unroll
            for (int i = 0; i < NT * 4; i++) {
                acc[i / 4][i % 4] += from[i * threads];
            }
        }
    }
    named_sync(2, WARPS * 32); /* the sums may be written again */
}

static __device__ __forceinline__ float swiglu(float gate, float up)
{
    return gate / (1.0f + __expf(-gate)) * up;
}

/* A lane holds weight rows row_of(lane) and + 8 of its warp's 16, activation rows 8 n + lane % 4 *
 * 2 and the next: acc[n][2 (weight row) + (activation row)]. */
template <int WM, int NT>
static __device__ __forceinline__ void put(const struct few_args &a, const struct worker<WM> &w,
                                           const struct item &it, const float (&acc)[NT][4])
{
    const uint32_t block = it.tile * WM + w.warp, row = row_of(w.lane);
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint32_t j = n * 8 + w.lane % 4 * 2 + c, col = block * 8 + row;
            if (j >= it.part.rows) {
                continue;
            }
            if (!it.down) {
                if (col < a.inter) {
                    ((__nv_bfloat16 *)a.p.h)[(size_t)(it.part.first + j) * a.inter + col] =
                        __float2bfloat16(swiglu(acc[n][c], acc[n][c + 2]));
                }
                continue;
            }
            const uint32_t at = block * 16 + row;
            if (at < a.hidden) { /* a multiple of 16 */
                float *y = (float *)a.p.y + (size_t)(it.part.first + j) * a.hidden + at;
                y[0] = acc[n][c];
                y[8] = acc[n][c + 2];
            }
        }
    }
}

/* Waits for the first product of a part. */
template <int WM>
static __device__ __forceinline__ void wait_first(const struct few_args &a, struct worker<WM> &w,
                                                  uint32_t part)
{
    if (w.ready) {
        return;
    }
    const uint32_t all = a.p.state->parts * a.tiles[0];
    w.ready = load_acquire(&a.p.state->ready) == all;
    while (!w.ready && load_acquire(a.p.done + part) != a.tiles[0]) {
        __nanosleep(64);
    }
    w.ready = __all_sync(~0u, w.ready);
    __syncwarp();
}

/* Tells all blocks that an item of the first product is done. */
template <int WM>
static __device__ __forceinline__ void tell(const struct few_args &a, const struct worker<WM> &w,
                                            uint32_t part)
{
    if (w.group == 0) {
        named_sync(3, WM * 32);
        if (w.warp == 0 && w.lane == 0) {
            __threadfence();
            atomicAdd(a.p.done + part, 1);
            atomicAdd(&a.p.state->ready, 1);
        }
    }
}

template <int WM, int NT>
static __device__ __forceinline__ void compute_item(const struct few_args &a, struct worker<WM> &w,
                                                    const struct item &it)
{
    const uint32_t k = it.down ? a.inter : a.hidden, boxes = (k + 63) / 64;
    struct source<NT> s;
    float acc[NT][4] = {};
    s.from = (const uint4 *)(it.down ? (const uint16_t *)a.p.h : a.a);
    s.pieces = k / 8;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        uint32_t j = n * 8 + w.lane / 4, row = it.part.first + j;
        s.at[n] = NONE;
        if (j < it.part.rows) {
            row = it.down ? row : a.p.uses[row] / a.used;
            s.at[n] = row * s.pieces;
        }
    }
    if (it.down) {
        wait_first<WM>(a, w, it.at);
    }
    sum_boxes<WM, NT>(w, s, boxes, acc);
    add_groups<WM, NT>(w, acc);
    if (w.group == 0) {
        put<WM, NT>(a, w, it, acc);
    }
    if (!it.down) {
        tell<WM>(a, w, it.at);
    }
    w.boxes += boxes;
}

template <int WM>
static __device__ __forceinline__ void compute_items(const struct few_args &a, struct worker<WM> &w)
{
    struct ring q = {0, 0};
    for (;;) {
        bar_wait(smem_addr(&w.b->queued[q.at]), q.phase);
        const struct item it = w.b->queue[q.at];
        __syncwarp();
        if (w.lane == 0) {
            bar_arrive(smem_addr(&w.b->taken[q.at]));
        }
        q.next(QUEUE);
        if (it.part.rows == 0) {
            return;
        } else if (it.part.rows <= 8) {
            compute_item<WM, 1>(a, w, it);
        } else if (it.part.rows <= 16) {
            compute_item<WM, 2>(a, w, it);
        } else if (it.part.rows <= 32) {
            compute_item<WM, 4>(a, w, it);
        } else {
            compute_item<WM, 8>(a, w, it);
        }
    }
}

template <int WM>
static __global__ void __launch_bounds__(THREADS, 1)
    few_kernel(const __grid_constant__ CUtensorMap up_map,
               const __grid_constant__ CUtensorMap down_map,
               const __grid_constant__ struct few_args a)
{
    extern __shared__ uint8_t raw[];
    __shared__ struct few_bars<WM> bars;
    uint8_t *smem = raw + (1024 - smem_addr(raw) % 1024) % 1024;
    const uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        tma_prefetch(&up_map);
        tma_prefetch(&down_map);
        for (uint32_t i = 0; i < cut<WM>::slots; i++) {
            bar_init(smem_addr(&bars.full[i]), 1);
            bar_init(smem_addr(&bars.empty[i]), WM);
        }
        for (uint32_t i = 0; i < QUEUE; i++) {
            bar_init(smem_addr(&bars.queued[i]), 1);
            bar_init(smem_addr(&bars.taken[i]), WARPS);
        }
        bar_init_fence();
    }
    __syncthreads();
    early_wait();
    early_next(); /* combine_kernel relies on this order */
    if (warp == WARPS) {
        if (threadIdx.x % 32 == 0) {
            copy_items<WM>(a, &up_map, &down_map, &bars, smem_addr(smem));
        }
    } else {
        struct worker<WM> w = {
        };
        w.b = &bars;
        w.ring = smem;
        w.sums = (float *)(smem + RING);
        w.group = warp / WM;
        w.warp = warp % WM;
        w.lane = threadIdx.x % 32;
        compute_items<WM>(a, w);
    }
}

/* ---- host ---- */

template <int WM>
static cudaError_t launch(const struct bt_cu_experts *x, struct few_args &a,
                          const struct bt_cu_experts_product *w, cudaStream_t s)
{
    CUtensorMap up, down;
    cudaError_t e = bt_cu_experts_weights_map(&up, x, w->gate_up, false, WM);
    e = e == cudaSuccess ? bt_cu_experts_weights_map(&down, x, w->down, true, WM) : e;
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(few_kernel<WM>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 cut<WM>::smem);
    }
    if (e != cudaSuccess) {
        return e;
    }
    a.tiles[0] = (x->inter + WM * 8 - 1) / (WM * 8);
    a.tiles[1] = (x->hidden + WM * 16 - 1) / (WM * 16);
    return launch_early(few_kernel<WM>, multiprocessors(), THREADS, cut<WM>::smem, s, up, down, a);
}

extern "C" cudaError_t bt_cu_experts_few(const struct bt_cu_experts *x,
                                         const struct bt_cu_experts_plan *p,
                                         const struct bt_cu_experts_product *w, bool small,
                                         cudaStream_t s)
{
    struct few_args a = {};
    a.p = *p;
    a.a = (const uint16_t *)w->a;
    a.used = x->used;
    a.hidden = x->hidden;
    a.inter = x->inter;
    return small ? launch<2>(x, a, w, s) : launch<4>(x, a, w, s);
}
