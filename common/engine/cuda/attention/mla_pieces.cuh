/* The sum over the pieces of a sequence whose tiles lie in several blocks' runs, for both MLA
 * decode kernels. Each block leaves its part of the result in memory. At the end of its run it
 * waits for the other parts of the sequences that it has pieces of, and adds up a slice of each.
 * All blocks of a launch run at once, one on each multiprocessor, so that they may wait for each
 * other. Device code only. */
#ifndef BT_CUDA_MLA_PIECES_CUH
#define BT_CUDA_MLA_PIECES_CUH

#include "common/engine/cuda/attention/mla_tile.cuh"
#include "common/engine/cuda/attention/segments.cuh"

/* 1 / sum of a query row's weights; 0 if the query sees no token. */
static __device__ __forceinline__ float inverse(float l)
{
    return l > 0 ? 1.0f / l : 0.0f;
}

static __device__ __forceinline__ struct bt_mla_cut cut_of(const struct mla_args &a,
                                                           const struct walk &w)
{
    int4 v = __ldcg((const int4 *)a.cuts + (size_t)w.seq * a.kv_heads + w.head);
    return {v.x, v.y, v.z, v.w};
}

/* Index of a run's part. The blocks of a cluster have the same runs. */
template <int C>
static __device__ __forceinline__ size_t part_of(const struct bt_mla_cut &cut, int run)
{
    size_t block = C == 1 ? (size_t)run : (size_t)run * C + cluster_rank();
    return block * 2 + (run == cut.first ? cut.slot : 0);
}

/* A thread's four values of a unit of a part. A part has UNITS units for each of the two outputs'
 * warpgroups. */
template <int UNITS>
static __device__ __forceinline__ float4 *part_at(const struct mla_args &a, size_t part, int half,
                                                  int unit)
{
    return (float4 *)a.part_o + ((part * 2 + half) * UNITS + unit) * 128 + threadIdx.x % 128;
}

/* Counts of a sequence's and group's parts that are written, and of the blocks that have seen all
 * of them. The last of these returns both counts to 0. */
template <int C>
static __device__ __forceinline__ uint32_t *counts_of(const struct mla_args &a,
                                                      const struct walk &w)
{
    return a.arrived + ((size_t)w.seq * (a.kv_heads * C) + group_of<C>(w)) * 2;
}

/* Called by the outputs' warpgroups after they have written a part. */
template <int C>
static __device__ __forceinline__ void part_written(const struct mla_args &a, const struct walk &w)
{
    named_sync(NAMED_O, 256);
    if (threadIdx.x == 128 * WG_OUT) {
        __threadfence(); /* also for the block's other threads, which passed the barrier before */
        atomicAdd(counts_of<C>(a, w), 1);
    }
}

/* pieces: of the sequence; blocks: that wait for them. */
template <int C>
static __device__ __forceinline__ void wait_parts(const struct mla_args &a, const struct walk &w,
                                                  uint32_t pieces, uint32_t blocks)
{
    if (threadIdx.x == 128 * WG_OUT) {
        uint32_t *n = counts_of<C>(a, w);
        while (load_acquire(n) < pieces) {
        }
        if (atomicAdd(n + 1, 1) == blocks - 1) {
            n[0] = n[1] = 0; /* for the next launch */
        }
    }
    named_sync(NAMED_O, 256);
}

/* Computes the N query rows' references and inverse sums over all pieces. Some threads share a row,
 * and each takes some pieces. */
template <int N, int C>
static __device__ __forceinline__ void
total_sums(const struct mla_args &a, const struct bt_mla_cut &cut, struct mla_totals *b)
{
    constexpr int SHARE = 256 / N, DEPTH = 8;
    const int row = (threadIdx.x - 128 * WG_OUT) / SHARE, sub = threadIdx.x % SHARE;
    float m = -INFINITY, l = 0;
    for (int from = cut.first + sub; from <= cut.last; from += SHARE * DEPTH) {
        float2 ml[DEPTH];
        float top = m;
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            const int i = from + k * SHARE;
            size_t part = part_of<C>(cut, min(i, cut.last));
            ml[k] = __ldcg((const float2 *)a.part_ml + part * N + row);
            ml[k].y = i <= cut.last ? ml[k].y : 0.0f;
            top = fmaxf(top, ml[k].x);
        }
        const float base = top == -INFINITY ? 0.0f : top;
        l *= ex2(m - base);
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            l = fmaf(ml[k].y, ex2(ml[k].x - base), l);
        }
        m = top;
    }
    float top = m;
#pragma unroll
    for (int d = 1; d < SHARE; d *= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    }
    top = top == -INFINITY ? 0.0f : top;
    l *= ex2(m - top);
#pragma unroll
    for (int d = 1; d < SHARE; d *= 2) {
        l += __shfl_xor_sync(~0u, l, d);
    }
    if (sub == 0) {
        b->m[row] = top;
        b->f[row] = inverse(l);
    }
    named_sync(NAMED_O, 256);
}

/* Adds up the k-th of n slices of a result, in the pieces' order: GROUP units at once, DEPTH pieces
 * of them, which is what registers allow. L says which query rows a unit has and stores it:
 *   UNITS; query(unit): row of the thread's values FIRST, the others are of NEXT rows further;
 *   store<GROUP>(unit, values, two factors) */
template <int N, int C, int GROUP, int DEPTH, class L>
static __device__ __forceinline__ void
add_slice(const struct mla_args &a, const struct bt_mla_cut &cut, const struct mla_totals *b,
          const L &to, int half, int k, int n)
{
    constexpr int GROUPS = L::UNITS / GROUP;
#pragma unroll 1
    for (int g = GROUPS * k / n; g < GROUPS * (k + 1) / n; g++) {
        const int query = to.query(g * GROUP);
        const float m[2] = {b->m[query], b->m[query + L::NEXT]};
        float acc[GROUP][4] = {};
#pragma unroll 1
        for (int i = cut.first; i <= cut.last; i += DEPTH) {
            float f[DEPTH][2];
            float4 v[DEPTH][GROUP];
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const size_t part = part_of<C>(cut, min(i + d, cut.last));
                const float2 *ml = (const float2 *)a.part_ml + part * N + query;
                f[d][0] = i + d <= cut.last ? __ldcg(ml).x : -INFINITY;
                f[d][1] = i + d <= cut.last ? __ldcg(ml + L::NEXT).x : -INFINITY;
#pragma unroll
                for (int u = 0; u < GROUP; u++) {
                    v[d][u] = __ldcg(part_at<L::UNITS>(a, part, half, g * GROUP + u));
                }
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const float f0 = ex2(f[d][0] - m[0]), f1 = ex2(f[d][1] - m[1]);
#pragma unroll
                for (int u = 0; u < GROUP; u++) {
                    acc[u][0] = fmaf(v[d][u].x, f0, acc[u][0]);
                    acc[u][1] = fmaf(v[d][u].y, L::FIRST == 2 ? f0 : f1, acc[u][1]);
                    acc[u][2] = fmaf(v[d][u].z, L::FIRST == 2 ? f1 : f0, acc[u][2]);
                    acc[u][3] = fmaf(v[d][u].w, f1, acc[u][3]);
                }
            }
        }
        to.store(g * GROUP, acc, b->f[query], b->f[query + L::NEXT]);
    }
}

/* Writes this block's slice of the result of a cut sequence. All threads of the outputs' warpgroups
 * call it, after the block has written all its parts. */
template <int N, int C, class L>
static __device__ __forceinline__ void combine(const struct mla_args &a, const struct walk &w,
                                               struct mla_totals *b, const L &to, int half)
{
    const struct bt_mla_cut cut = cut_of(a, w);
    const int n = cut.last - cut.first + 1, k = (int)blockIdx.x / C - cut.first;
    wait_parts<C>(a, w, (uint32_t)n, (uint32_t)n);
    total_sums<N, C>(a, cut, b);
    if (n < 8) {
        add_slice<N, C, L::GROUP, 16 / L::GROUP>(a, cut, b, to, half, k, n);
    } else {
        add_slice<N, C, L::GROUP / 4, 64 / L::GROUP>(a, cut, b, to, half, k, n);
    }
    named_sync(NAMED_O, 256); /* before another sequence's sums replace b's */
}

/* ---- segments (segments.cuh), in rising order ---- */

static __device__ __forceinline__ struct segment_sums sums_of(float m, float l)
{
    return {l > 0 ? m : -INFINITY, l};
}

/* Index of the part that a segment leaves. Parts lie behind the sums that each
 * block keeps for itself. */
template <int C>
static __device__ __forceinline__ size_t segment_part(const struct mla_args &a,
                                                      const struct bt_mla_cut &cut, int segment)
{
    const int n = cut.slot + segment;
    return a.kept + (C == 1 ? (size_t)n : (size_t)n * C + cluster_rank());
}

/* As combine, for a sequence whose segments have left a part each. mine: it has rows of this warp.
 */
template <int N, int C, class L>
static __device__ __forceinline__ void
combine_segments(const struct mla_args &a, const struct walk &w, bool mine, const L &to, int half)
{
    constexpr int GROUP = 2, DEPTH = 4, GROUPS = L::UNITS / GROUP;
    const struct bt_mla_cut cut = cut_of(a, w);
    const int parts = segment_of(w.s.tiles - 1, a.unit) + 1;
    const int n = cut.last - cut.first + 1, k = (int)blockIdx.x / C - cut.first;
    wait_parts<C>(a, w, (uint32_t)parts, (uint32_t)n);
#pragma unroll 1
    for (int g = GROUPS * k / n; mine && g < GROUPS * (k + 1) / n; g++) {
        const int query = to.query(g * GROUP);
        struct segment_sums total[2] = {no_sums(), no_sums()};
        float acc[GROUP][4] = {};
#pragma unroll 1
        for (int i = 0; i < parts; i += DEPTH) {
            float2 ml[DEPTH][2];
            float4 v[DEPTH][GROUP];
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const size_t part = segment_part<C>(a, cut, min(i + d, parts - 1));
                const float2 *at = (const float2 *)a.part_ml + part * N + query;
                ml[d][0] = __ldcg(at);
                ml[d][1] = __ldcg(at + L::NEXT);
#pragma unroll
                for (int u = 0; u < GROUP; u++) {
                    v[d][u] = __ldcg(part_at<L::UNITS>(a, part, half, g * GROUP + u));
                }
            }
#pragma unroll
            for (int d = 0; d < DEPTH && i + d < parts; d++) {
                const struct segment_factors f[2] = {add_sums(total[0], {ml[d][0].x, ml[d][0].y}),
                                                     add_sums(total[1], {ml[d][1].x, ml[d][1].y})};
#pragma unroll
                for (int u = 0; u < GROUP; u++) {
                    acc[u][0] = add_output(acc[u][0], v[d][u].x, f[0]);
                    acc[u][1] = add_output(acc[u][1], v[d][u].y, f[0]);
                    acc[u][2] = add_output(acc[u][2], v[d][u].z, f[1]);
                    acc[u][3] = add_output(acc[u][3], v[d][u].w, f[1]);
                }
            }
        }
        static_assert(L::FIRST == 2, "values 2 and 3 are of the second row");
        to.store(g * GROUP, acc, inverse(total[0].l), inverse(total[1].l));
    }
}

/* The next piece of the run. FIXED: at most a segment of a sequence. */
template <bool FIXED>
static __device__ __forceinline__ bool piece(const struct mla_args &a, struct walk &w)
{
    const bool any = walk_piece(w);
    if (FIXED && any) {
        w.n = min(w.n, segment_begin(segment_of(w.tile, a.unit) + 1, a.unit) - w.tile);
    }
    return any;
}
/* Whether a piece is the run's last of its sequence. */
template <bool FIXED> static __device__ __forceinline__ bool ends(const struct walk &w)
{
    return !FIXED || w.tile + w.n == w.s.tiles || w.n == w.left;
}

/* The run of this block. */
template <int C> static __device__ __forceinline__ struct walk run_walk(const struct mla_args &a)
{
    struct bt_cu_decode_run run = run_at(a.runs + blockIdx.x / C);
    struct walk w = {run.seq, run.head, run.tile, run.n, 0, {}};
    walk_seq(a, w);
    return w;
}

#endif
