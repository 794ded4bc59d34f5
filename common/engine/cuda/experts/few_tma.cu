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
 *     does this. So one thread holds both values of a SwiGLU.
 *   - Weights in e4m3 (E4M3 below): a box is 128 columns, which have one scale for each row of
 *     blocks. They become f16 in registers, exactly, and a box's sums times the scale are added in
 *     f32. A thread's 16 bytes of weights are 16 columns, whose activations are four units of 16
 *     bytes, of a box; with bf16, a unit is 16 bytes of both. */
#include "common/engine/cuda/experts/experts_priv.h"
#include "common/engine/cuda/fp8.cuh"
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
    uint32_t tiles[2];      /* of a part in the first and in the second product */
    const float *scale[2];  /* of e4m3 weights, of the two products: [n][rows of blocks][stride] */
    uint32_t scale_step[2]; /* from one row of blocks to the next */
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

/* Boxes of k columns. */
template <bool E4M3> static __device__ __forceinline__ uint32_t boxes_of(uint32_t k)
{
    return E4M3 ? k / 128 : (k + 63) / 64;
}

/* ---- the copying warp, one thread ---- */

static __device__ __forceinline__ uint32_t take(struct bt_cu_experts_state *s)
{
    return atomicAdd(&s->next, 1);
}

template <int WM, bool E4M3>
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
        const uint32_t boxes = boxes_of<E4M3>(it.down ? a.inter : a.hidden);
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

/* Units of a box. */
template <bool E4M3> static constexpr int units = E4M3 ? 4 : 2;

/* The piece of each row that a lane uses in one unit of a box. */
template <int NT, bool E4M3>
static __device__ __forceinline__ void load_unit(uint4 (&x)[NT], const struct source<NT> &s,
                                                 uint32_t box, uint32_t unit)
{
    const uint32_t t = threadIdx.x % 4;
    const uint32_t piece =
        E4M3 ? box * 16 + (unit / 2 * 4 + t) * 2 + unit % 2 : box * 8 + unit * 4 + t;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        x[n] = make_uint4(0, 0, 0, 0);
        if (s.at[n] != NONE && piece < s.pieces) {
            x[n] = load_written(s.from + s.at[n] + piece);
        }
    }
}
template <int NT, bool E4M3>
static __device__ __forceinline__ void load_box(uint4 (&x)[units<E4M3>][NT],
                                                const struct source<NT> &s, uint32_t box)
{
#pragma unroll
    for (int u = 0; u < units<E4M3>; u++) {
        load_unit<NT, E4M3>(x[u], s, box, u);
    }
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

/* 32 columns of bf16. */
template <int NT>
static __device__ __forceinline__ void multiply_bf16(const struct weights &v, int unit,
                                                     const uint4 (&x)[NT], float (&acc)[NT][4])
{
    const uint32_t a0[4] = {v.lo[unit].x, v.hi[unit].x, v.lo[unit].y, v.hi[unit].y};
    const uint32_t a1[4] = {v.lo[unit].z, v.hi[unit].z, v.lo[unit].w, v.hi[unit].w};
#pragma unroll
    for (int n = 0; n < NT; n++) {
        mma16816<__nv_bfloat16>(acc[n], a0, x[n].x, x[n].y);
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
        mma16816<__nv_bfloat16>(acc[n], a1, x[n].z, x[n].w);
    }
}

/* 32 columns of e4m3: of each 16, the first eight (even units) or the others. In the order of
 * weight.h, they are the low or the high halves of a thread's four words. */
template <int NT>
static __device__ __forceinline__ void multiply_e4m3(const struct weights &v, int unit,
                                                     const uint4 (&x)[NT], float (&acc)[NT][4])
{
    const uint32_t shift = unit % 2 * 16;
    const uint4 &lo = v.lo[unit / 2], &hi = v.hi[unit / 2];
    const uint32_t a0[4] = {e4m3_pair(lo.x >> shift & 0xffff), e4m3_pair(hi.x >> shift & 0xffff),
                            e4m3_pair(lo.y >> shift & 0xffff), e4m3_pair(hi.y >> shift & 0xffff)};
    const uint32_t a1[4] = {e4m3_pair(lo.z >> shift & 0xffff), e4m3_pair(hi.z >> shift & 0xffff),
                            e4m3_pair(lo.w >> shift & 0xffff), e4m3_pair(hi.w >> shift & 0xffff)};
#pragma unroll
    for (int n = 0; n < NT; n++) {
        mma16816<__half>(acc[n], a0, x[n].x, x[n].y);
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
        mma16816<__half>(acc[n], a1, x[n].z, x[n].w);
    }
}

template <int NT, bool E4M3>
static __device__ __forceinline__ void multiply_unit(const struct weights &v, int unit,
                                                     const uint4 (&x)[NT], float (&acc)[NT][4])
{
    if constexpr (E4M3) {
        multiply_e4m3<NT>(v, unit, x, acc);
    } else {
        multiply_bf16<NT>(v, unit, x, acc);
    }
}

/* The scales of a warp's rows 0 to 7 and 8 to 15, a box after the other. A lane keeps those of one
 * box of 32, so that a load brings them all. */
struct scales {
    const float *from[2];
    uint32_t boxes, base; /* base: the first of the 32 */
    float mine[2];
};
static __device__ __forceinline__ void load_scales(struct scales &s, uint32_t base)
{
    const uint32_t box = base + threadIdx.x % 32;
    s.base = base;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s.mine[i] = box < s.boxes ? __ldg(s.from[i] + box) : 0;
    }
}
template <int NT>
static __device__ __forceinline__ void add_scaled(struct scales &s, uint32_t box,
                                                  const float (&part)[NT][4], float (&acc)[NT][4])
{
    if (box / 32 * 32 != s.base) {
        load_scales(s, box / 32 * 32);
    }
    const float f[2] = {__shfl_sync(~0u, s.mine[0], box % 32),
                        __shfl_sync(~0u, s.mine[1], box % 32)};
#pragma unroll
    for (int i = 0; i < NT * 4; i++) {
        acc[i / 4][i % 4] += part[i / 4][i % 4] * f[i % 4 / 2];
    }
}

/* Multiplies a box. MORE: each unit of x is replaced once it has been used, by that HELD units
 * later; the box after this one is `next`. */
template <int WM, int NT, bool E4M3, bool MORE, int HELD>
static __device__ __forceinline__ void
multiply_box(const struct worker<WM> &w, const struct source<NT> &s, struct scales &scale,
             uint32_t box, uint32_t next, uint4 (&x)[HELD][NT], float (&acc)[NT][4])
{
    struct weights v;
    float part[E4M3 ? NT : 1][4] = {};
    load_weights<WM>(v, w, box);
#pragma unroll
    for (int u = 0; u < units<E4M3>; u++) {
        if constexpr (E4M3) {
            multiply_unit<NT, E4M3>(v, u, x[u % HELD], part);
        } else {
            multiply_unit<NT, E4M3>(v, u, x[u % HELD], acc);
        }
        if constexpr (MORE) {
            const bool here = u + HELD < units<E4M3>;
            load_unit<NT, E4M3>(x[u % HELD], s, here ? box : next, (u + HELD) % units<E4M3>);
        }
    }
    if constexpr (E4M3) {
        add_scaled<NT>(scale, box, part, acc);
    }
}

/* This group's boxes of an item. Activations of the next box are on their way while one is
 * multiplied; with many rows the registers hold 16 tiles of eight rows alone. */
template <int WM, int NT, bool E4M3>
static __device__ __forceinline__ void sum_boxes(const struct worker<WM> &w,
                                                 const struct source<NT> &s, struct scales &scale,
                                                 uint32_t boxes, float (&acc)[NT][4])
{
    constexpr uint32_t step = cut<WM>::groups;
    constexpr int held = 16 / NT < units<E4M3> ? 16 / NT : units<E4M3>;
    if constexpr (NT * units<E4M3> * 2 > 16) {
        uint4 x[held][NT];
#pragma unroll
        for (int u = 0; u < held; u++) {
            load_unit<NT, E4M3>(x[u], s, w.group, u);
        }
        for (uint32_t i = w.group; i < boxes; i += step) {
            multiply_box<WM, NT, E4M3, true>(w, s, scale, i, i + step, x, acc);
        }
    } else {
        uint4 x[units<E4M3>][NT], y[units<E4M3>][NT];
        load_box<NT, E4M3>(x, s, w.group);
        for (uint32_t i = w.group; i < boxes; i += 2 * step) {
            load_box<NT, E4M3>(y, s, i + step); /* beyond the last: zeros */
            multiply_box<WM, NT, E4M3, false>(w, s, scale, i, 0, x, acc);
            if (i + step < boxes) {
                load_box<NT, E4M3>(x, s, i + 2 * step);
                multiply_box<WM, NT, E4M3, false>(w, s, scale, i + step, 0, y, acc);
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
    if (cut<WM>::groups == 1) {
        return;
    }
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
template <int WM, int NT, bool E4M3>
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
                const size_t to = (size_t)(it.part.first + j) * a.inter + col;
                const float v = swiglu(acc[n][c], acc[n][c + 2]);
                if (E4M3 && col < a.inter) {
                    ((__half *)a.p.h)[to] = __float2half(f16_range(v));
                } else if (col < a.inter) {
                    ((__nv_bfloat16 *)a.p.h)[to] = __float2bfloat16(v);
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

/* Where the scales of a warp's rows are: of the first product, rows 0 to 7 are gate's, and the
 * others up's. */
template <int WM>
static __device__ __forceinline__ void
find_scales(const struct few_args &a, const struct worker<WM> &w, const struct item &it,
            uint32_t boxes, struct scales &s)
{
    const uint32_t block = it.tile * WM + w.warp;
    const uint32_t each = it.down ? a.hidden / 128 : a.inter / 128 * 2; /* rows of blocks */
    const uint32_t row = min(it.down ? block * 16 / 128 : block * 8 / 128, each - 1);
    const float *from =
        a.scale[it.down] + ((size_t)it.part.expert * each + row) * a.scale_step[it.down];
    s.from[0] = from;
    s.from[1] = it.down ? from : from + (size_t)(a.inter / 128) * a.scale_step[0];
    s.boxes = boxes;
    load_scales(s, 0);
}

template <int WM, int NT, bool E4M3>
static __device__ __forceinline__ void compute_item(const struct few_args &a, struct worker<WM> &w,
                                                    const struct item &it)
{
    const uint32_t k = it.down ? a.inter : a.hidden, boxes = boxes_of<E4M3>(k);
    struct source<NT> s;
    struct scales scale;
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
    if constexpr (E4M3) {
        find_scales<WM>(a, w, it, boxes, scale);
    }
    if (it.down) {
        wait_first<WM>(a, w, it.at);
    }
    sum_boxes<WM, NT, E4M3>(w, s, scale, boxes, acc);
    add_groups<WM, NT>(w, acc);
    if (w.group == 0) {
        put<WM, NT, E4M3>(a, w, it, acc);
    }
    if (!it.down) {
        tell<WM>(a, w, it.at);
    }
    w.boxes += boxes;
}

template <int WM, bool E4M3>
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
            compute_item<WM, 1, E4M3>(a, w, it);
        } else if (it.part.rows <= 16) {
            compute_item<WM, 2, E4M3>(a, w, it);
        } else if (it.part.rows <= 32) {
            compute_item<WM, 4, E4M3>(a, w, it);
        } else {
            compute_item<WM, 8, E4M3>(a, w, it);
        }
    }
}

template <int WM, bool E4M3>
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
            copy_items<WM, E4M3>(a, &up_map, &down_map, &bars, smem_addr(smem));
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
        compute_items<WM, E4M3>(a, w);
    }
}

/* ---- host ---- */

template <int WM, bool E4M3>
static cudaError_t launch(const struct bt_cu_experts *x, struct few_args &a,
                          const struct bt_cu_experts_product *w, cudaStream_t s)
{
    CUtensorMap up, down;
    cudaError_t e = bt_cu_experts_weights_map(&up, x, w->gate_up.w, false, WM);
    e = e == cudaSuccess ? bt_cu_experts_weights_map(&down, x, w->down.w, true, WM) : e;
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(few_kernel<WM, E4M3>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 cut<WM>::smem);
    }
    if (e != cudaSuccess) {
        return e;
    }
    a.tiles[0] = (x->inter + WM * 8 - 1) / (WM * 8);
    a.tiles[1] = (x->hidden + WM * 16 - 1) / (WM * 16);
    return launch_early(few_kernel<WM, E4M3>, multiprocessors(), THREADS, cut<WM>::smem, s, up,
                        down, a);
}

extern "C" cudaError_t bt_cu_experts_few(const struct bt_cu_experts *x,
                                         const struct bt_cu_experts_plan *p,
                                         const struct bt_cu_experts_product *w, uint32_t item,
                                         cudaStream_t s)
{
    struct few_args a = {};
    a.p = *p;
    a.a = (const uint16_t *)w->a;
    a.used = x->used;
    a.hidden = x->hidden;
    a.inter = x->inter;
    a.scale[0] = w->gate_up.scale;
    a.scale[1] = w->down.scale;
    a.scale_step[0] = bt_cu_scale_stride(x->hidden);
    a.scale_step[1] = bt_cu_scale_stride(x->inter);
    if (x->e4m3) {
        return item == 128 ? launch<8, true>(x, a, w, s) : cudaErrorInvalidValue;
    }
    return item == 32   ? launch<2, false>(x, a, w, s)
           : item == 64 ? launch<4, false>(x, a, w, s)
                        : cudaErrorInvalidValue;
}
