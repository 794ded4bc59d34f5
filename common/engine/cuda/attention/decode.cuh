/* Decode attention: a query token of each sequence, or a few, over paged KV, bound by the memory's
 * bandwidth.
 * The time is at least bytes of KV / bandwidth, so the design keeps enough bytes in flight on every
 * multiprocessor all the time:
 *   - the step's tiles (64 tokens of one KV head: K and V, 32 KiB at head_dim 128) are one long
 *     list, which is cut evenly over persistent blocks, whatever the sequences' lengths (plan.cu);
 *   - some warps only feed a ring of stages and run ahead across the borders of sequences; four
 *     warps compute 16 tokens of each tile;
 *   - all query heads of a KV head are the columns of one matrix product (decode_warp.cuh), so
 *     KV is read once. Several tokens of a sequence (MANY) are more columns: up to 16, or 32 in two
 *     sets, for each of which four warps compute every tile;
 *   - KV of earlier steps is requested before the previous kernel has ended (attention.h, early).
 * e4m3 pages have twice as many tokens in a byte, so two teams of four warps take tiles in turn
 * (decode_e4m3.cuh). Each warp keeps its own softmax; they are merged once per piece. If a
 * sequence's head was cut, the block that finishes its last piece combines the pieces.
 *
 * The template parameter COPY copies bytes to a stage: decode_tma.cu for Hopper's copy engine,
 * decode_mma.cu for sm_80 and newer. All lanes of the copying warps call it:
 *   COPY::WARPS              number of copying warps
 *   COPY::ARRIVALS           arrivals at the barrier of a full stage
 *   COPY::prepare(map)       called by one thread, once, when the barriers are initialized
 *   COPY::begin(full, empty, phase, bytes)   waits until the stage is free for `bytes`
 *   COPY::page<E4M3, D>(args, map, page, row, to, scales_to, full)
 *                            copies K and V of one page's head, from pool row `row` of the page on,
 *                            to shared memory at `to`; for e4m3 also their scales
 *   COPY::end(full)          all of the stage's pages have been requested
 */
#ifndef BT_CUDA_ATTN_DECODE_CUH
#define BT_CUDA_ATTN_DECODE_CUH

#include "common/engine/cuda/attention/attention_priv.h"
#include "common/engine/cuda/attention/decode_e4m3.cuh"
#include "common/engine/cuda/attention/runs.cuh"
#include "common/engine/cuda/mma.cuh"
#include "common/engine/cuda/ring.cuh"

#define TEAM       4   /* warps that compute a tile */
#define MAX_STAGES 8   /* of any ring */
#define SCALES     128 /* bytes of a tile's scales */

/* Constants that differ between 16-bit values and e4m3. T is the query's type. */
template <bool E4M3, int D> struct tile_of {
    static constexpr int teams = E4M3 && D < 256 ? 2 : 1, warps = teams * TEAM; /* they compute */
    static constexpr uint32_t value = E4M3 ? 1 : 2;
    static constexpr uint32_t row = D * value < 128 ? D * value : 128; /* bytes of a row in a box */
    static constexpr uint32_t halves = D * value / row;
    static constexpr uint32_t stages = E4M3 ? 8 : 4; /* 128 KiB of 128 dimensions: more only lets
                                                      * blocks drift apart */
    static constexpr uint32_t bytes = DECODE_TILE * D * value * 2, scales = E4M3 ? SCALES : 0;
};

/* Whether there is a kernel with two sets of columns. */
template <bool E4M3, int D> static constexpr bool two_sets(void)
{
    return !E4M3 && D <= 128;
}

struct decode_args {
    const void *q;
    void *out;
    const uint8_t *kv; /* the pool */
    uint32_t q_stride, out_stride;
    const int32_t *table;
    uint32_t table_stride;
    uint32_t kv_heads, group, page_tokens, page_rows, layer_row, window, stages;
    uint32_t columns; /* of an entry, at most */
    int fresh;        /* last tokens of a sequence that the kernel in front may write */
    float scale_log2;
    bool out_bf16, early;
    const uint8_t *scales; /* E4M3: of page 0 of the layer */
    const struct bt_cu_decode_plan *plan;
    const struct bt_cu_decode_seq *seqs;
    const struct bt_cu_decode_run *runs;
    uint32_t *arrived;
    float *part_o, *part_ml;
};

/* ---- the copying warps ---- */

/* If it may start early (attention.h), it waits for the previous kernel before the first tile that
 * holds a fresh token. */
template <class COPY, bool E4M3, int D>
static __device__ void produce(const struct decode_args &a, const CUtensorMap *map, struct walk w,
                               uint32_t stages_at, uint32_t full, uint32_t empty)
{
    typedef tile_of<E4M3, D> tile;
    const uint32_t pt = a.page_tokens, per_tile = DECODE_TILE / pt, box = 2 * pt * tile::row;
    const uint32_t scales_at = stages_at + a.stages * tile::bytes;
    int lane = threadIdx.x % 32;
    bool waited = false;
    struct ring r = {0, 1}; /* all stages are free at first */
    for (; walk_piece(w); walk_next(a, w)) {
        const int32_t *table = a.table + (size_t)w.s.slot * a.table_stride;
        int last = (w.s.len - 1) / (int)pt, page0 = (w.s.tile0 + w.tile) * (int)per_tile, ids = 0;
        for (int t = 0; t < w.n; t++) {
            int at = t * (int)per_tile;
            if (at % 32 == 0) {
                ids = __ldcg(table + min(page0 + at + lane, last));
            }
            if (!waited && (w.s.tile0 + w.tile + t + 1) * DECODE_TILE > w.s.len - a.fresh) {
                early_wait();
                waited = true;
            }
            uint32_t bar = full + r.at * 8;
            COPY::begin(bar, empty + r.at * 8, r.phase, tile::bytes + tile::scales);
            for (uint32_t p = 0; p < per_tile; p++) {
                COPY::template page<E4M3, D>(a, map, __shfl_sync(~0u, ids, (at + p) % 32),
                                             (uint32_t)w.head * 2 * pt,
                                             stages_at + r.at * tile::bytes + p * box,
                                             scales_at + r.at * SCALES + p * 2 * pt, bar);
            }
            COPY::end(bar);
            r.next(a.stages);
        }
    }
}

/* ---- the computing warps ---- */

/* A column is a head of a query token. Where its values begin in q or out, counted in values. */
template <bool MANY, int D>
static __device__ __forceinline__ size_t value_of(const struct decode_args &a, const struct walk &w,
                                                  uint32_t stride, uint32_t column)
{
    uint32_t token = MANY ? column / a.group : 0, head = column - token * a.group;
    return ((size_t)w.s.row + token) * stride + ((size_t)w.head * a.group + head) * D;
}
template <bool MANY>
static __device__ __forceinline__ uint32_t columns_of(const struct decode_args &a,
                                                      const struct walk &w)
{
    return MANY ? (uint32_t)w.s.n * a.group : a.group;
}

/* Loads the queries of a piece: the part that a thread's products use, of ROWS columns from `first`
 * on. For e4m3 in the order of decode_e4m3.cuh. */
template <bool E4M3, bool MANY, class T, int D, int ROWS>
static __device__ __forceinline__ void load_q(const struct decode_args &a, const struct walk &w,
                                              uint32_t first, uint32_t (&q)[D / 16][ROWS / 8][2])
{
    constexpr int EACH = E4M3 ? 4 : 2, NEXT = E4M3 ? 1 : 4;
    uint32_t lane = threadIdx.x % 32, columns = columns_of<MANY>(a, w);
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        uint32_t c = first + n * 8 + lane / 4;
        const T *base = (const T *)a.q + value_of<MANY, D>(a, w, a.q_stride, c);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            const uint32_t *at = (const uint32_t *)(base + k * 16 + lane % 4 * EACH);
            q[k][n][0] = c < columns ? at[0] : 0;
            q[k][n][1] = c < columns ? at[NEXT] : 0;
        }
    }
}

/* How many of a sequence's tokens a column's query does not see, of a thread's scores: its two
 * columns of each eight. Columns that there are not are the last query's. */
template <bool MANY, int ROWS>
static __device__ __forceinline__ void find_unseen(const struct decode_args &a,
                                                   const struct walk &w, uint32_t first,
                                                   int (&unseen)[ROWS / 8][2])
{
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        uint32_t c = first + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        unseen[i / 2][i % 2] = MANY ? max(w.s.n - 1 - (int)(c / a.group), 0) : 0;
    }
}

/* Computes one warp's 16 tokens of a tile. lo, hi: the last query sees tokens [lo, hi) of the 16, a
 * column `unseen` tokens earlier; lo_of_any: the first token that a query sees. */
template <class T, int D, int ROWS>
static __device__ __forceinline__ void
take_tokens(struct warp_state<D, ROWS> &w, const uint32_t (&q)[D / 16][ROWS / 8][2],
            const int (&unseen)[ROWS / 8][2], uint32_t k_at, uint32_t v_at, int lo, int hi,
            int lo_of_any, float scale)
{
    const int lane = threadIdx.x % 32, token = lane / 4;
    float s[2][ROWS / 8][4] = {}, x[ROWS / 8][4]; /* [even and odd 16 dimensions] */
    uint32_t k_row = k_at + (lane / 8 % 2 * 8 + lane % 8) * 128;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[4], chunk = (k % 4 * 2 + lane / 16) ^ (lane % 8);
        ldmatrix4(a, k_row + k / 4 * (DECODE_TILE * 256) + chunk * 16);
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            mma16816<T>(s[k % 2][n], a, q[k][n][0], q[k][n][1]);
        }
    }
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int t = token + i / 2 * 8 + unseen[n][i % 2];
            bool in = t >= lo && t < hi;
            x[n][i] = in ? (s[0][n][i] + s[1][n][i]) * scale : -INFINITY;
        }
    }
    const float one[2] = {1, 1}, none[2] = {0, 0};
    uint32_t p[ROWS / 8][2], keep[2];
    raise_reference(w, x, none);
    weigh<T>(w, x, one, p);
    keep_tokens(lo_of_any, hi, keep);
    uint32_t v_row = v_at + (lane / 16 * 8 + lane % 8) * 128;
#pragma unroll
    for (int j = 0; j < D / 16; j++) { /* dimensions 0-7, 8-15 of tokens 0-7, then 8-15 */
        uint32_t a[4], chunk = (j % 4 * 2 + lane / 8 % 2) ^ (lane % 8);
        ldmatrix4_t(a, v_row + j / 4 * (DECODE_TILE * 256) + chunk * 16);
        const uint32_t kept[4] = {a[0] & keep[0], a[1] & keep[0], a[2] & keep[1], a[3] & keep[1]};
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            mma16816<T>(w.o[j][n], kept, p[n][0], p[n][1]);
        }
    }
}

/* Shared memory of the merge: [warps][columns][D + 4] sums, [warps][columns] {m, l}. warps: that
 * compute the same columns. */
static __host__ __device__ constexpr uint32_t merge_bytes(uint32_t warps, uint32_t columns,
                                                          uint32_t d)
{
    return warps * columns * (d + 4) * 4 + warps * columns * 8;
}

/* first: the warp's first column of `columns`. */
template <bool E4M3, int D, int ROWS>
static __device__ __forceinline__ void spill_state(struct warp_state<D, ROWS> &w, float *so,
                                                   float *sml, int columns, int first)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % tile_of<E4M3, D>::warps, row = lane / 4;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        int n = i / 2, h = i % 2, column = first + n * 8 + lane % 4 * 2 + h;
        float l = w.l[n][h];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
            l += __shfl_xor_sync(~0u, l, d);
        }
        float *o = so + ((size_t)warp * columns + column) * (D + 4);
#pragma unroll
        for (int j = 0; j < D / 16 && column < columns; j++) {
            float lo = w.o[j][n][h], hi = w.o[j][n][2 + h];
            if (E4M3) { /* even and odd dimensions: decode_e4m3.cuh */
                *(float2 *)(o + j * 16 + row * 2) = make_float2(lo, hi);
            } else {
                o[j * 16 + row] = lo;
                o[j * 16 + row + 8] = hi;
            }
        }
        if (row == 0 && column < columns) {
            *(float2 *)(sml + (warp * columns + column) * 2) = make_float2(w.m[n][h], l);
        }
    }
}

static __device__ __forceinline__ void add_scaled(float4 &o, const float4 &v, float f)
{
    o.x = fmaf(v.x, f, o.x);
    o.y = fmaf(v.y, f, o.y);
    o.z = fmaf(v.z, f, o.z);
    o.w = fmaf(v.w, f, o.w);
}

template <bool MANY, int D>
static __device__ __forceinline__ void store_out(const struct decode_args &a, const struct walk &w,
                                                 int column, int d, float4 o, float l)
{
    float f = l > 0 ? 1.0f / l : 0.0f;
    size_t at = value_of<MANY, D>(a, w, a.out_stride, column) + d;
    *(uint2 *)((uint16_t *)a.out + at) =
        make_uint2(pack2_as(a.out_bf16, o.x * f, o.y * f), pack2_as(a.out_bf16, o.z * f, o.w * f));
}

/* The last block of a cut sequence adds up all pieces in their order, with eight loads at a
 * time. */
template <bool MANY, int D, int WARPS>
static __device__ void combine(const struct decode_args &a, const struct walk &w, int first,
                               int last, int first_slot)
{
    const int columns = columns_of<MANY>(a, w);
    for (int i = threadIdx.x; i < columns * (D / 4); i += WARPS * 32) {
        int column = i / (D / 4), d = i % (D / 4) * 4;
        float m = -INFINITY, l = 0;
        float4 o = make_float4(0, 0, 0, 0);
        for (int p = first; p <= last; p += 8) {
            float2 ml[8];
            float4 v[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                int piece = min(p + k, last);
                size_t at = (size_t)piece * 2 + (piece == first ? first_slot : 0);
                ml[k] = __ldcg((const float2 *)(a.part_ml + (at * a.columns + column) * 2));
                v[k] = __ldcg((const float4 *)(a.part_o + (at * a.columns + column) * D + d));
            }
            float top = m;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                ml[k].x = p + k <= last ? ml[k].x : -INFINITY;
                top = fmaxf(top, ml[k].x);
            }
            float base = top == -INFINITY ? 0.0f : top, f = ex2(m - base);
            l *= f;
            o = make_float4(o.x * f, o.y * f, o.z * f, o.w * f);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                f = ex2(ml[k].x - base);
                l = fmaf(ml[k].y, f, l);
                add_scaled(o, v[k], f);
            }
            m = top;
        }
        store_out<MANY, D>(a, w, column, d, o, l);
    }
}

/* Ends a piece: merges the warps and writes the result or, if the sequence is cut, a part. The
 * block that writes the last part also writes the result. */
template <bool E4M3, bool MANY, int D, int ROWS, int SETS>
static __device__ void end_piece(const struct decode_args &a, const struct walk &w,
                                 struct warp_state<D, ROWS> &st, float *so, float *sml, int column0,
                                 bool first_piece, int *flag)
{
    constexpr int SAME = tile_of<E4M3, D>::warps, WARPS = SAME * SETS;
    const int columns = columns_of<MANY>(a, w);
    named_sync(1, WARPS * 32); /* the previous piece has been read */
    spill_state<E4M3>(st, so, sml, columns, column0);
    named_sync(1, WARPS * 32);
    bool whole = w.n == w.s.tiles;
    size_t at = (size_t)blockIdx.x * 2 + !first_piece;
    for (int i = threadIdx.x; i < columns * (D / 4); i += WARPS * 32) {
        int column = i / (D / 4), d = i % (D / 4) * 4;
        float m = -INFINITY, l = 0;
#pragma unroll
        for (int k = 0; k < SAME; k++) {
            m = fmaxf(m, sml[(k * columns + column) * 2]);
        }
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < SAME; k++) {
            float2 ml = *(const float2 *)(sml + (k * columns + column) * 2);
            float f = ml.x == -INFINITY ? 0.0f : ex2(ml.x - m);
            l = fmaf(ml.y, f, l);
            add_scaled(o, *(const float4 *)(so + ((size_t)k * columns + column) * (D + 4) + d), f);
        }
        if (whole) {
            store_out<MANY, D>(a, w, column, d, o, l);
        } else {
            __stcg((float4 *)(a.part_o + (at * a.columns + column) * D + d), o);
            if (d == 0) {
                __stcg((float2 *)(a.part_ml + (at * a.columns + column) * 2), make_float2(m, l));
            }
        }
    }
    if (whole) {
        return;
    }
    int total = a.plan->total, runs = a.plan->runs;
    int begin = (w.s.first * (int)a.kv_heads) + w.head * w.s.tiles;
    int first = run_of(begin, total, runs), last = run_of(begin + w.s.tiles - 1, total, runs);
    named_sync(1, WARPS * 32);
    if (threadIdx.x == 0) {
        uint32_t *n = a.arrived + (size_t)w.seq * a.kv_heads + w.head;
        __threadfence(); /* also for the block's other threads, which passed the barrier before */
        bool done = atomicAdd(n, 1) == (uint32_t)(last - first);
        if (done) {
            *n = 0; /* for the next launch */
        }
        __threadfence();
        *flag = done;
    }
    named_sync(1, WARPS * 32);
    if (*flag) {
        combine<MANY, D, WARPS>(a, w, first, last, run_begin(first, total, runs) != begin);
    }
}

template <bool E4M3, bool MANY, class T, int D, int ROWS, int SETS>
static __device__ void consume(const struct decode_args &a, struct walk w, uint8_t *stages,
                               uint32_t full, uint32_t empty, float *so, float *sml, int *flag)
{
    typedef tile_of<E4M3, D> tile;
    const uint32_t pt = a.page_tokens, stages_at = smem_addr(stages);
    const uint8_t *scales = stages + a.stages * tile::bytes;
    const uint32_t warp = threadIdx.x / 32 % tile::warps, team = warp / TEAM;
    const uint32_t token0 = warp % TEAM * 16, column0 = threadIdx.x / 32 / tile::warps * ROWS;
    uint32_t row = token0 / pt * (2 * pt) + token0 % pt; /* of K; V's row is pt behind */
    uint32_t k_off = row * tile::row, v_off = k_off + pt * tile::row;
    struct ring r = {0, 0}; /* an even number of stages where there are two teams */
    bool first = true, more = walk_piece(w);
    struct warp_state<D, ROWS> st;
    uint32_t q[D / 16][ROWS / 8][2];
    if (more) {
        load_q<E4M3, MANY, T, D, ROWS>(a, w, column0, q);
    }
    while (more) {
        const struct walk piece = w;
        int lo = a.window && w.s.len > (int)a.window ? w.s.len - (int)a.window : 0;
        int lo_of_any = MANY ? lo - w.s.n + 1 : lo, unseen[ROWS / 8][2];
        find_unseen<MANY, ROWS>(a, w, column0, unseen);
        clear_state(st);
        for (int t = 0; t < w.n; t++) {
            int base = (w.s.tile0 + w.tile + t) * DECODE_TILE + (int)token0;
            uint32_t at = stages_at + r.at * tile::bytes;
            if (tile::teams > 1 && r.at % tile::teams != team) {
                r.next(a.stages);
                continue;
            }
            bar_wait(full + r.at * 8, r.phase);
            if constexpr (E4M3) {
                const uint8_t *ks = scales + r.at * SCALES + row;
                take_tokens_e4m3(st, q, unseen, at + k_off, at + v_off, ks, ks + pt, lo - base,
                                 w.s.len - base, lo_of_any - base, a.scale_log2);
            } else {
                take_tokens<T>(st, q, unseen, at + k_off, at + v_off, lo - base, w.s.len - base,
                               lo_of_any - base, a.scale_log2);
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                bar_arrive(empty + r.at * 8);
            }
            r.next(a.stages);
        }
        walk_next(a, w);
        more = walk_piece(w);
        if (more) { /* loads the next query while this piece ends */
            load_q<E4M3, MANY, T, D, ROWS>(a, w, column0, q);
        }
        end_piece<E4M3, MANY, D, ROWS, SETS>(a, piece, st, so, sml, column0, first, flag);
        first = false;
    }
}

template <class COPY, bool E4M3, bool MANY, class T, int D, int ROWS, int SETS>
static __global__ void __launch_bounds__((tile_of<E4M3, D>::warps * SETS + COPY::WARPS) * 32, 1)
    decode_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ decode_args a)
{
    typedef tile_of<E4M3, D> tile;
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t bars[2 * MAX_STAGES];
    __shared__ int flag;
    early_next(); /* lets the next kernel start: it prefetches weights */
    if (!a.early) {
        early_wait();
    }
    struct bt_cu_decode_run run = run_at(a.runs + blockIdx.x);
    uint32_t full = smem_addr(bars), empty = full + MAX_STAGES * 8;
    if (run.n == 0) {
        early_wait(); /* else this kernel could end before the one in front of it */
        return;
    }
    struct walk w = {run.seq, run.head, run.tile, run.n, 0, {}};
    walk_seq(a, w);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < a.stages; i++) {
            bar_init(full + i * 8, COPY::ARRIVALS);
            bar_init(empty + i * 8, TEAM * SETS);
        }
        COPY::prepare(&map);
    }
    __syncthreads();
    if (threadIdx.x >= tile::warps * SETS * 32) {
        produce<COPY, E4M3, D>(a, &map, w, smem_addr(smem), full, empty);
    } else {
        early_wait();
        float *so = (float *)(smem + a.stages * (tile::bytes + tile::scales));
        consume<E4M3, MANY, T, D, ROWS, SETS>(a, w, smem, full, empty, so,
                                              so + tile::warps * a.columns * (D + 4), &flag);
    }
}

/* ---- launches ---- */

/* The number of stages that fit beside the merge of so many columns; 0: none. */
template <bool E4M3, int D> static uint32_t stages_of(const struct bt_attn *a, uint32_t columns)
{
    typedef tile_of<E4M3, D> tile;
    uint32_t rest = 1024 + merge_bytes(tile::warps, columns, D);
    uint32_t fit = a->shared < rest ? 0 : (a->shared - rest) / (tile::bytes + tile::scales);
    return min(fit, tile::stages) / tile::teams * tile::teams;
}

template <class COPY, bool E4M3, bool MANY, class T, int D, int ROWS, int SETS>
static cudaError_t launch(struct bt_attn *a, struct decode_args &args, cudaStream_t s)
{
    typedef tile_of<E4M3, D> tile;
    args.columns = MANY ? ROWS * SETS : args.group;
    args.stages = stages_of<E4M3, D>(a, args.columns);
    if (args.stages == 0) {
        return cudaErrorInvalidValue;
    }
    uint32_t bytes =
        args.stages * (tile::bytes + tile::scales) + merge_bytes(tile::warps, args.columns, D);
    cudaError_t e = cudaFuncSetAttribute(decode_kernel<COPY, E4M3, MANY, T, D, ROWS, SETS>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e != cudaSuccess) {
        return e;
    }
    return launch_early(decode_kernel<COPY, E4M3, MANY, T, D, ROWS, SETS>, a->blocks,
                        (tile::warps * SETS + COPY::WARPS) * 32, bytes, s, a->kv_pair, args);
}

template <class COPY, bool E4M3, class T, int D>
static cudaError_t launch_rows(struct bt_attn *a, struct decode_args &args, uint32_t most,
                               cudaStream_t s)
{
    if (most == 1) {
        return args.group <= 8 ? launch<COPY, E4M3, false, T, D, 8, 1>(a, args, s)
                               : launch<COPY, E4M3, false, T, D, 16, 1>(a, args, s);
    }
    if constexpr (two_sets<E4M3, D>()) {
        if (most * args.group > 16) {
            return launch<COPY, E4M3, true, T, D, 16, 2>(a, args, s);
        }
    }
    return launch<COPY, E4M3, true, T, D, 16, 1>(a, args, s);
}

template <class COPY, bool E4M3, class T>
static cudaError_t launch_dim(struct bt_attn *a, struct decode_args &args, uint32_t most,
                              cudaStream_t s)
{
    switch (a->pool.head_dim) {
    case 64: return launch_rows<COPY, E4M3, T, 64>(a, args, most, s);
    case 128: return launch_rows<COPY, E4M3, T, 128>(a, args, most, s);
    case 256: return launch_rows<COPY, E4M3, T, 256>(a, args, most, s);
    default: return cudaErrorInvalidValue;
    }
}

template <class COPY>
static cudaError_t decode_with(struct bt_attn *a, const struct bt_attn_decode *d,
                               uint32_t layer_row, cudaStream_t s)
{
    const struct bt_attn_pool *p = &a->pool;
    struct decode_args args = {};
    if (d->most == 0 || d->most > bt_attn_decode_most(a)) {
        return cudaErrorInvalidValue;
    }
    args.q = d->q;
    args.out = d->out;
    args.kv = (const uint8_t *)p->kv;
    args.q_stride = d->q_stride;
    args.out_stride = d->out_stride;
    args.table = d->table;
    args.table_stride = d->table_stride;
    args.kv_heads = p->kv_heads;
    args.group = p->heads / p->kv_heads;
    args.page_tokens = p->page_tokens;
    args.page_rows = p->page_rows;
    args.layer_row = layer_row;
    args.window = p->window;
    args.early = d->early;
    args.fresh = (int)d->fresh;
    args.scale_log2 = a->scale_log2;
    args.out_bf16 = p->out_type == BT_CU_BF16;
    args.plan = a->plan;
    args.seqs = a->seqs;
    args.runs = a->decode_runs;
    args.arrived = a->arrived;
    args.part_o = a->part_o;
    args.part_ml = a->part_ml;
    if (p->type == BT_CU_E4M3) {
        args.scales = args.kv + ((size_t)layer_row + p->scale_row) * p->head_dim;
        return launch_dim<COPY, true, __half>(a, args, d->most, s);
    }
    return p->type == BT_CU_F16 ? launch_dim<COPY, false, __half>(a, args, d->most, s)
                                : launch_dim<COPY, false, __nv_bfloat16>(a, args, d->most, s);
}

#endif
