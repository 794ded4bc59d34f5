/* What prefill attention kernels on Hopper share, whatever their keys and values are. The tensor
 * cores limit the speed, so the design keeps them busy:
 *   - a tile is 128 rows against KV tiles of BN tokens. Both products are WGMMA, and the scores'
 *     16-bit copy stays in registers;
 *   - a warp copies keys and another one values through TMA, some KV tiles ahead, for two
 *     warpgroups of 64 rows, so that the softmax of one can run during the products of the other
 *     (named barriers that make them alternate cost 1 to 2 %). The copying warps must do little
 *     else: with one warp for both and divisions in its loop, a tile's keys came 260 cycles late;
 *   - within a warpgroup the scores of the next KV tile are computed while the last tile's output
 *     is summed;
 *   - in KV tiles without a mask no maximum is searched: that would cost 10 %;
 *   - blocks are persistent and take tiles from a counter.
 * The kernels differ in their Work, a class of which each thread has one, with
 *   make(i)              the i-th tile
 *   tile                 the tile that the thread works on
 *   load_q(to, bar)      by one thread
 *   load_k, load_v(to, bar, n, i, one)   by a warp: KV tile n, the i-th of this tile; thread `one`
 *                        copies
 *   start(state, row), store(state, sum, row)   the rows' limits; their results, with the sums of
 *                        their weights
 *   FIXED                whether KV is summed in segments (segments.cuh), from the last one that a
 *                        tile sees to the first. A row's result then depends on no other row: each
 *                        KV tile counts as masked, so that its maximum is searched; a tile that is
 *                        computed again because of one row would change the others. Then also
 *   unit                 of segments, in KV tiles
 *   kept(i)              where a thread keeps four outputs of the segments so far
 *   leave(state, now, row)   the result of a tile that is one segment alone
 * Device code only. */
#ifndef BT_CUDA_ATTN_PREFILL_HOPPER_CUH
#define BT_CUDA_ATTN_PREFILL_HOPPER_CUH

#include "common/engine/cuda/attention/prefill_tile.cuh"
#include "common/engine/cuda/attention/segments.cuh"
#include "common/engine/cuda/hopper.cuh"

#define GROUPS     2 /* computing warpgroups */
#define THREADS    ((GROUPS + 1) * 128)
#define MAX_STAGES 3       /* of K and of V */
#define SMEM_MAX   232448u /* of a block, sm_90 */
#define NAMED_WG0  1       /* + warpgroup */

/* Queries and keys of DK dimensions, values of DV; the places of their tiles in shared memory, each
 * [dimensions / 64][rows] rows of 128 bytes. */
template <class T_, int DK_, int DV_, int BN_, int STAGES_> struct prefill_shape {
    typedef T_ T;
    static constexpr int DK = DK_, DV = DV_, BN = BN_, STAGES = STAGES_;
    static constexpr uint32_t q = BM * DK * 2, k = BN * DK * 2, v = BN * DV * 2;
    static constexpr uint32_t k_at = q, v_at = q + STAGES * k, bytes = q + STAGES * (k + v);
    typedef tile_state<T, DV, BN> state;
};

/* A tile of queries: rows of one head against KV tiles [first, last], from the last to the first.
 */
struct prefill_work {
    int head; /* negative: no more tiles */
    int row, n, pos;
    int first, last;
    int clear, edge; /* KV tiles from clear on and those below edge need a mask; below clear all
                        rows have a base */
    int end;         /* positions from here on are not the sequence's */
    int place;       /* slot of a page table, or first row of the KV */
    struct bt_attn_part part; /* FIXED: its segment, if it is not all that its rows see */
};

struct prefill_bars {
    uint64_t q_full, q_empty, tile_full, tile_empty;
    uint64_t k_full[MAX_STAGES], k_empty[MAX_STAGES], v_full[MAX_STAGES], v_empty[MAX_STAGES];
    struct prefill_work tiles[2]; /* this one and the next */
};

static __device__ __forceinline__ void init_bars(struct prefill_bars *b)
{
    bar_init(smem_addr(&b->q_full), 1);
    bar_init(smem_addr(&b->q_empty), GROUPS * 4);
    bar_init(smem_addr(&b->tile_full), 1);
    bar_init(smem_addr(&b->tile_empty), GROUPS * 4 + 1); /* and the warp that copies values */
    for (int i = 0; i < MAX_STAGES; i++) {
        bar_init(smem_addr(&b->k_full[i]), 1);
        bar_init(smem_addr(&b->k_empty[i]), GROUPS * 4);
        bar_init(smem_addr(&b->v_full[i]), 1);
        bar_init(smem_addr(&b->v_empty[i]), GROUPS * 4);
    }
    bar_init_fence();
}

/* The block's next tile. Its place is written again only when all warps have begun the tile after
 * it. */
static __device__ __forceinline__ const struct prefill_work *next_tile(struct prefill_bars *b,
                                                                       uint32_t phase)
{
    bar_wait(smem_addr(&b->tile_full), phase);
    release(smem_addr(&b->tile_empty));
    return &b->tiles[phase];
}

/* ---- the copying warps ---- */

/* Keys and queries; this warp takes the tiles. From the last KV tile to the first, so that all
 * masked tiles come first. */
template <class S, class Work>
static __device__ __forceinline__ void copy_keys(Work &w, struct prefill_bars *b, uint32_t smem,
                                                 uint32_t tiles, uint32_t *tickets)
{
    const bool one = elect_one();
    struct ring r = {0, 1};
    uint32_t tile = blockIdx.x;
    for (uint32_t phase = 1;; phase ^= 1) {
        struct prefill_work next = {-1};
        if (tile < tiles) {
            next = w.make((int)tile);
        }
        bar_wait(smem_addr(&b->tile_empty), phase);
        w.tile = &b->tiles[phase ^ 1];
        if (one) {
            b->tiles[phase ^ 1] = next;
            bar_arrive(smem_addr(&b->tile_full));
        }
        if (tile >= tiles) {
            break;
        }
        __syncwarp();
        const int first = w.tile->first;
        for (int n = w.tile->last, i = 0; n >= first; n--, i++) {
            const uint32_t bar = smem_addr(&b->k_full[r.at]);
            bar_wait(smem_addr(&b->k_empty[r.at]), r.phase);
            if (one) {
                bar_expect(bar, S::k);
            }
            w.load_k(smem + S::k_at + r.at * S::k, bar, n, i, one);
            r.next(S::STAGES);
            if (i == 0) { /* the first keys need not wait for the end of the last tile */
                bar_wait(smem_addr(&b->q_empty), phase);
                if (one) {
                    w.load_q(smem, smem_addr(&b->q_full));
                }
            }
        }
        if (threadIdx.x % 32 == 0) {
            tile = gridDim.x + atomicAdd(tickets, 1);
        }
        tile = __shfl_sync(~0u, tile, 0);
    }
    if (one) {
        end_tickets(tickets);
    }
}

template <class S, class Work>
static __device__ __forceinline__ void copy_values(Work &w, struct prefill_bars *b, uint32_t smem)
{
    const bool one = elect_one();
    struct ring r = {0, 1};
    for (uint32_t phase = 0;; phase ^= 1) {
        w.tile = next_tile(b, phase);
        if (w.tile->head < 0) {
            break;
        }
        const int first = w.tile->first;
        for (int n = w.tile->last, i = 0; n >= first; n--, i++) {
            const uint32_t bar = smem_addr(&b->v_full[r.at]);
            bar_wait(smem_addr(&b->v_empty[r.at]), r.phase);
            if (one) {
                bar_expect(bar, S::v);
            }
            w.load_v(smem + S::v_at + r.at * S::v, bar, n, i, one);
            r.next(S::STAGES);
        }
    }
}

/* ---- the computing warpgroups ---- */

template <class S>
static __device__ __forceinline__ void scores(typename S::state &t, uint64_t q, uint64_t k)
{
#pragma unroll
    for (int i = 0; i < S::DK / 16; i++) { /* 16 columns are 32 bytes; 64 fill a row of 128 bytes */
        uint64_t qi = q + (uint64_t)(i / 4 * (BM * 128) + i % 4 * 32) / 16;
        uint64_t ki = k + (uint64_t)(i / 4 * (S::BN * 128) + i % 4 * 32) / 16;
        wgmma_ss<typename S::T>(t.s, qi, ki, i > 0);
    }
    wgmma_commit();
}
template <class S> static __device__ __forceinline__ void outputs(typename S::state &t, uint64_t v)
{
#pragma unroll
    for (int i = 0; i < S::BN / 16; i++) { /* 16 tokens are 16 rows of 128 bytes */
        wgmma_rs<typename S::T>(t.o, t.p + i * 4, v + (uint64_t)(i * 16 * 128) / 16);
    }
    wgmma_commit();
}

/* Clears rows of V behind the sequence: they may be NaN, and 0 * NaN is not 0. Both warpgroups do
 * this; they write the same values. */
template <class S> static __device__ __forceinline__ void clear_tail(uint8_t *v, int from)
{
    for (int i = threadIdx.x % 128; i < (S::BN - from) * 8 * (S::DV / 64); i += 128) {
        int h = i / ((S::BN - from) * 8), j = i % ((S::BN - from) * 8);
        *(uint4 *)(v + h * (S::BN * 128) + from * 128 + j * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async_shared();
}

/* Computes the scores of this warp's rows again, with instructions that need only this warp. q and
 * k must be unchanged. */
template <class S>
static __device__ __forceinline__ void scores_again(typename S::state &t, uint32_t q, uint32_t k)
{
    const uint32_t lane = threadIdx.x % 32, q_row = lane % 16, k_row = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < S::BN / 2; i++) {
        t.s[i] = 0;
    }
#pragma unroll 1
    /* Rows of 128 bytes; their 16-byte pieces are permuted by row. */
    for (uint32_t c = 0; c < S::DK / 16; c++) {
        uint32_t a[4], b[4], piece = c % 4 * 2;
        ldmatrix4(a, q + c / 4 * (BM * 128) + q_row * 128 + ((piece + lane / 16) ^ q_row % 8) * 16);
#pragma unroll
        for (int n = 0; n < S::BN / 16; n++) {
            ldmatrix4(b, k + c / 4 * (S::BN * 128) + (n * 16 + k_row) * 128 +
                             ((piece + lane / 8 % 2) ^ k_row % 8) * 16);
            mma16816<typename S::T>(*(float(*)[4])(t.s + n * 8), a, b[0], b[1]);
            mma16816<typename S::T>(*(float(*)[4])(t.s + n * 8 + 4), a, b[2], b[3]);
        }
    }
}

/* A warpgroup's state, kept over all its tiles. */
struct consumer {
    struct prefill_bars *b;
    uint32_t smem, group_bar; /* named barrier of this warpgroup */
    uint32_t q_warp;          /* this warp's rows of Q */
    uint64_t q;
    struct ring k, v;
    float scale;
};

/* Computes the scores of KV tile n while the output of the previous tile is summed, then the
 * softmax of n. In a tile without mask every row has a base already, and no maximum is searched.
 * Only if a row's weights have so large a sum that one of them may exceed the range of f16, the
 * tile is computed again. */
template <bool MASK, bool APART, class S>
static __device__ __forceinline__ void step(struct consumer &c, typename S::state &t, int n)
{
    const uint32_t k = c.smem + S::k_at + c.k.at * S::k;
    bar_wait(smem_addr(&c.b->k_full[c.k.at]), c.k.phase);
    wgmma_hold(t.s);
    wgmma_hold(t.o);
    wgmma_fence();
    scores<S>(t, c.q, wgmma_desc(k, 0, 1024));
    bar_wait(smem_addr(&c.b->v_full[c.v.at]), c.v.phase);
    wgmma_fence();
    outputs<S>(t, wgmma_desc(c.smem + S::v_at + c.v.at * S::v, S::BN * 128, 1024));
    wgmma_wait<1>();
    wgmma_hold(t.s);
    if (MASK) {
        release(smem_addr(&c.b->k_empty[c.k.at]));
        mask(t, n * S::BN);
        softmax<APART>(t, c.scale);
    } else {
        float sum[2];
        weigh(t, c.scale, sum);
        t.moved = __any_sync(~0u, sum[0] >= 0x1p15f || sum[1] >= 0x1p15f);
        if (t.moved) {
            scores_again<S>(t, c.q_warp, k);
            softmax<APART>(t, c.scale);
        } else {
            t.l[0] += sum[0];
            t.l[1] += sum[1];
        }
        release(smem_addr(&c.b->k_empty[c.k.at]));
    }
    c.k.next(S::STAGES);
    wgmma_wait<0>();
    wgmma_hold(t.o);
    release(smem_addr(&c.b->v_empty[c.v.at]));
    c.v.next(S::STAGES);
    rescale(t);
    to_weights(t);
}

/* The first KV tile, which is the last that the rows see: there is no earlier output to sum. */
template <bool APART, class S>
static __device__ __forceinline__ void first_step(struct consumer &c, typename S::state &t, int n,
                                                  int end, uint8_t *smem)
{
    bar_wait(smem_addr(&c.b->k_full[c.k.at]), c.k.phase);
    wgmma_hold(t.s);
    wgmma_fence();
    scores<S>(t, c.q, wgmma_desc(c.smem + S::k_at + c.k.at * S::k, 0, 1024));
    wgmma_wait<0>();
    wgmma_hold(t.s);
    release(smem_addr(&c.b->k_empty[c.k.at]));
    c.k.next(S::STAGES);
    mask(t, n * S::BN);
    softmax<APART>(t, c.scale);
    to_weights(t);
    if (end < (n + 1) * S::BN) {
        bar_wait(smem_addr(&c.b->v_full[c.v.at]), c.v.phase);
        clear_tail<S>(smem + S::v_at + c.v.at * S::v, end - n * S::BN);
        named_sync(c.group_bar, 128);
    }
}

template <class S>
static __device__ __forceinline__ void last_step(struct consumer &c, typename S::state &t)
{
    release(smem_addr(&c.b->q_empty));
    bar_wait(smem_addr(&c.b->v_full[c.v.at]), c.v.phase);
    wgmma_hold(t.o);
    wgmma_fence();
    outputs<S>(t, wgmma_desc(c.smem + S::v_at + c.v.at * S::v, S::BN * 128, 1024));
    wgmma_wait<0>();
    wgmma_hold(t.o);
    release(smem_addr(&c.b->v_empty[c.v.at]));
    c.v.next(S::STAGES);
}

/* ---- segments ---- */

/* The sums of the segment that a thread's rows have just seen. */
template <class S>
static __device__ __forceinline__ void sums_of(const typename S::state &t, float scale,
                                               struct segment_sums (&now)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        now[r] = {t.m[r] == -INFINITY ? -INFINITY : t.m[r] * scale, row_sum(t.l[r])};
    }
}

/* Adds the segment that ends to those before it, which the thread keeps in memory: there is none if
 * `first`, and there comes none if `last`. */
template <class S, class Work>
static __device__ __forceinline__ void end_segment(const Work &w, typename S::state &t, float scale,
                                                   struct segment_sums (&total)[2], bool first,
                                                   bool last)
{
    if (!__any_sync(~0u, t.limit[0] > 0 || t.limit[1] > 0)) {
        return; /* no token has any of this warp's rows */
    }
    struct segment_sums now[2];
    sums_of<S>(t, scale, now);
    const struct segment_factors f[2] = {add_sums(total[0], now[0]), add_sums(total[1], now[1])};
    if (any_scale(f)) {
#pragma unroll 1
        for (int i = 0; i < S::DV / 8; i++) {
            scale_kept(w.kept(i), f);
        }
    }
#pragma unroll
    for (int i = 0; i < S::DV / 8; i++) {
        float *o = t.o + i * 4;
        if (first) {
            __stcg(w.kept(i), make_float4(o[0], o[1], o[2], o[3]));
        } else if (last) {
            take_kept(w.kept(i), o, f);
        } else {
            add_kept(w.kept(i), o, f);
        }
    }
}

/* As step, for a KV tile that is the first of the next segment. */
template <class S, class Work>
static __device__ __forceinline__ void next_segment(const Work &w, struct consumer &c,
                                                    typename S::state &t, int n,
                                                    struct segment_sums (&total)[2], bool first)
{
    const uint32_t k = c.smem + S::k_at + c.k.at * S::k;
    bar_wait(smem_addr(&c.b->k_full[c.k.at]), c.k.phase);
    wgmma_hold(t.s);
    wgmma_hold(t.o);
    wgmma_fence();
    scores<S>(t, c.q, wgmma_desc(k, 0, 1024));
    bar_wait(smem_addr(&c.b->v_full[c.v.at]), c.v.phase);
    wgmma_fence();
    outputs<S>(t, wgmma_desc(c.smem + S::v_at + c.v.at * S::v, S::BN * 128, 1024));
    wgmma_wait<0>();
    wgmma_hold(t.s);
    wgmma_hold(t.o);
    release(smem_addr(&c.b->k_empty[c.k.at]));
    release(smem_addr(&c.b->v_empty[c.v.at]));
    c.k.next(S::STAGES);
    c.v.next(S::STAGES);
    end_segment<S>(w, t, c.scale, total, first, false);
    clear_state(t);
    mask(t, n * S::BN);
    softmax<true>(t, c.scale);
    to_weights(t);
}

template <class S, class Work>
static __device__ __forceinline__ void sum_segments(const Work &w, struct consumer &c,
                                                    typename S::state &t, int row, uint8_t *smem)
{
    const int first = w.tile->first, last = w.tile->last;
    int begin = segment_begin(segment_of(last, w.unit), w.unit);
    const bool one = begin <= first;
    struct segment_sums total[2] = {no_sums(), no_sums()};
    bool kept = false;
    first_step<true, S>(c, t, last, w.tile->end, smem);
    for (int n = last - 1; n >= first; n--) {
        if (n < begin) {
            next_segment<S>(w, c, t, n, total, !kept);
            kept = true;
            begin = segment_begin(segment_of(n, w.unit), w.unit);
        } else {
            step<true, true, S>(c, t, n);
        }
    }
    last_step<S>(c, t);
    if (one) {
        sums_of<S>(t, c.scale, total);
        if (w.tile->part.n > 0) {
            w.leave(t, total, row);
            return;
        }
    } else {
        end_segment<S>(w, t, c.scale, total, false, true);
    }
    const float sum[2] = {total[0].l, total[1].l};
    w.store(t, sum, row);
}

/* All KV that a tile of queries sees. */
template <class S, class Work>
static __device__ __forceinline__ void sum_all(const Work &w, struct consumer &c,
                                               typename S::state &t, int row, uint8_t *smem)
{
    const int first = w.tile->first, clear = max(first, w.tile->clear);
    const int edge = max(first, w.tile->edge);
    int n = w.tile->last;
    first_step<false, S>(c, t, n, w.tile->end, smem);
    for (n--; n >= clear; n--) {
        step<true, false, S>(c, t, n);
    }
    for (; n >= edge; n--) {
        step<false, false, S>(c, t, n);
    }
    for (; n >= first; n--) { /* tiles that the window cuts */
        step<true, false, S>(c, t, n);
    }
    last_step<S>(c, t);
    const float sum[2] = {row_sum(t.l[0]), row_sum(t.l[1])};
    w.store(t, sum, row);
}

template <class S, class Work>
static __device__ __forceinline__ void consume(Work &w, struct prefill_bars *b, uint8_t *smem,
                                               float scale_log2)
{
    const int wg = threadIdx.x / 128 - 1;
    const int row = wg * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    struct consumer c = {b,
                         smem_addr(smem),
                         (uint32_t)(NAMED_WG0 + wg),
                         smem_addr(smem) + (threadIdx.x / 32 - 4) * (16 * 128),
                         wgmma_desc(smem_addr(smem) + wg * (64 * 128), 0, 1024),
                         {0, 0},
                         {0, 0},
                         scale_log2};
    for (uint32_t phase = 0;; phase ^= 1) {
        w.tile = next_tile(b, phase);
        if (w.tile->head < 0) {
            return;
        }
        typename S::state t;
        w.start(t, row);
        bar_wait(smem_addr(&b->q_full), phase);
        if constexpr (Work::FIXED) {
            sum_segments<S>(w, c, t, row, smem);
        } else {
            sum_all<S>(w, c, t, row, smem);
        }
    }
}

/* The body of a kernel of THREADS threads, one block a multiprocessor. */
template <class S, class Work>
static __device__ __forceinline__ void prefill(Work &w, uint8_t *smem, uint32_t tiles,
                                               uint32_t *tickets, float scale_log2)
{
    static_assert(S::bytes + 2048 <= SMEM_MAX, "tile does not fit");
    __shared__ struct prefill_bars b;
    if (threadIdx.x == 0) {
        init_bars(&b);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        regs_give<40>();
        if (threadIdx.x < 32) {
            copy_keys<S>(w, &b, smem_addr(smem), tiles, tickets);
        } else if (threadIdx.x < 64) {
            copy_values<S>(w, &b, smem_addr(smem));
        }
    } else {
        regs_take<232>();
        consume<S>(w, &b, smem, scale_log2);
    }
}

#endif
