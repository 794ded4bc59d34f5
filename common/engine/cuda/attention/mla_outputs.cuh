/* The outputs' warpgroups of the MLA decode kernel (mla_wgmma.cu): O^T, the result, and the sum
 * over the pieces of a cut sequence. Device code only. */
#ifndef BT_CUDA_MLA_OUTPUTS_CUH
#define BT_CUDA_MLA_OUTPUTS_CUH

#include "common/engine/cuda/attention/mla_tile.cuh"

/* o[i][n * 4 + ...]: rows i * 64 + warp * 16 + lane / 4 (+ 8) of the warpgroup's 256, columns as in
 * score_state. */
template <int N> struct out_state {
    float o[4][N / 2];
};

template <int N>
static __device__ __forceinline__ void outputs(struct out_state<N> &t, uint64_t v, uint64_t p)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_hold(t.o[i]);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) { /* 16 tokens: 16 rows of V, 32 bytes of P */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma_ts_f16(t.o[i], v + (uint64_t)(i * BOX + k * 2048) / 16,
                         p + (uint64_t)(k * 32) / 16, 1);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_hold(t.o[i]);
    }
}

template <int N>
static __device__ __forceinline__ void rescale(struct out_state<N> &t, const float *factor)
{
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float2 f = *(const float2 *)(factor + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            t.o[i][n * 4] *= f.x;
            t.o[i][n * 4 + 1] *= f.y;
            t.o[i][n * 4 + 2] *= f.x;
            t.o[i][n * 4 + 3] *= f.y;
        }
    }
}

/* Lets the tile's half, and with the other warpgroup its weights, be overwritten. */
template <int C>
static __device__ __forceinline__ void release(struct mla_shared *b, uint32_t stage, int half)
{
    uint32_t mine = smem_addr(&b->empty[stage][half]), p = smem_addr(&b->empty[stage][2]);
    __syncwarp();
    if (C == 1) {
        if (threadIdx.x % 32 == 0) {
            bar_arrive(mine);
            bar_arrive(p);
        }
    } else if (threadIdx.x % 32 < C) {
        cluster_arrive(mine, threadIdx.x % 32);
        cluster_arrive(p, threadIdx.x % 32);
    }
}

/* 1 / sum of a column's weights; 0 if the query sees no token. */
static __device__ __forceinline__ float inverse(float l)
{
    return l > 0 ? 1.0f / l : 0.0f;
}
static __device__ __forceinline__ float sum_of(const struct mla_shared *b, uint32_t stage, int c)
{
    return b->l[stage][0][c] + b->l[stage][1][c] + b->l[stage][2][c] + b->l[stage][3][c];
}

/* Writes columns [n * 8, n * 8 + 8) of the result, each 8 x 8 values transposed: pairs of threads
 * exchange halves, so that four threads write 32 bytes of a row. scale: of the thread's columns. */
template <int N>
static __device__ __forceinline__ void store_columns(const struct out_state<N> &t, __half *out,
                                                     int n, float scale0, float scale1, bool valid)
{
    const int lane = threadIdx.x % 32, odd = lane % 2;
    __half *to = out + (threadIdx.x % 128 / 32) * 16 + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *o = t.o[i] + n * 4;
        uint32_t lo = transpose8(pack2<__half>(o[0] * scale0, o[1] * scale1));
        uint32_t hi = transpose8(pack2<__half>(o[2] * scale0, o[3] * scale1));
        uint32_t got = __shfl_xor_sync(~0u, odd ? lo : hi, 1);
        if (valid) {
            *(uint2 *)(to + i * 64) = odd ? make_uint2(got, hi) : make_uint2(lo, got);
        }
    }
}

/* Where the pieces of a sequence's cut rows are. */
struct pieces {
    int first, last; /* runs */
    int first_slot;  /* of run `first`: 0 if this is its first piece */
};
template <int C>
static __device__ __forceinline__ struct pieces pieces_of(const struct mla_args &a,
                                                          const struct walk &w)
{
    int total = __ldcg(&a.plan->total), runs = __ldcg(&a.plan->runs);
    int begin = w.s.first * (int)a.kv_heads + w.head * w.s.tiles;
    int first = run_of(begin, total, runs);
    return {first, run_of(begin + w.s.tiles - 1, total, runs),
            run_begin(first, total, runs) != begin};
}

/* Index of a run's part. The blocks of a cluster have the same runs. */
template <int C> static __device__ __forceinline__ size_t part_of(const struct pieces &p, int run)
{
    size_t block = C == 1 ? (size_t)run : (size_t)run * C + cluster_rank();
    return block * 2 + (run == p.first ? p.first_slot : 0);
}
template <int N>
static __device__ __forceinline__ size_t part_at(size_t part, int half, int n, int i)
{
    return ((((part * 2 + half) * (N / 8) + n) * 4 + i) * 128 + threadIdx.x % 128) * 4;
}

/* A thread's part of the sum over a sequence's pieces: columns [n * 8, n * 8 + 8). */
struct total {
    float o[4][4], m[2], l[2];
    __device__ __forceinline__ void add(int i, const float4 &v, float f0, float f1)
    {
        o[i][0] = fmaf(v.x, f0, o[i][0]);
        o[i][1] = fmaf(v.y, f1, o[i][1]);
        o[i][2] = fmaf(v.z, f0, o[i][2]);
        o[i][3] = fmaf(v.w, f1, o[i][3]);
    }
};

/* Adds the pieces of runs [from, to). */
template <int N, int C>
static __device__ __forceinline__ void add_pieces(const struct mla_args &a, struct total &t,
                                                  const struct pieces &p, int from, int to,
                                                  int half, int n)
{
    constexpr int PIECES = N == 64 ? 1 : 4; /* loaded at a time: what registers allow */
    const int column = n * 8 + threadIdx.x % 4 * 2;
#pragma unroll 1
    for (; from < to; from += PIECES) {
        float4 ml[PIECES], v[PIECES][4];
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            size_t part = part_of<C>(p, min(from + k, to - 1));
            ml[k] = __ldcg((const float4 *)(a.part_ml + (part * N + column) * 2));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[k][i] = __ldcg((const float4 *)(a.part_o + part_at<N>(part, half, n, i)));
            }
        }
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            float f0 = from + k < to ? ex2(ml[k].x - t.m[0]) : 0.0f;
            float f1 = from + k < to ? ex2(ml[k].z - t.m[1]) : 0.0f;
            t.l[0] = fmaf(ml[k].y, f0, t.l[0]);
            t.l[1] = fmaf(ml[k].w, f1, t.l[1]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                t.add(i, v[k][i], f0, f1);
            }
        }
    }
}

/* Replaces the outputs of this block's piece (run `own`) by the sum over all pieces, in their
 * order. Returns the columns' sums of weights. */
template <int N, int C>
static __device__ __forceinline__ float2 combine(const struct mla_args &a, struct out_state<N> &t,
                                                 const struct pieces &p, int own, int half, int n)
{
    const float *ml_at = a.part_ml + (n * 8 + threadIdx.x % 4 * 2) * 2;
    struct total sum = {{}, {-INFINITY, -INFINITY}, {0, 0}};
#pragma unroll 1
    for (int run = p.first; run <= p.last; run++) {
        float4 ml = __ldcg((const float4 *)(ml_at + part_of<C>(p, run) * N * 2));
        sum.m[0] = fmaxf(sum.m[0], ml.x);
        sum.m[1] = fmaxf(sum.m[1], ml.z);
    }
    sum.m[0] = sum.m[0] == -INFINITY ? 0.0f : sum.m[0];
    sum.m[1] = sum.m[1] == -INFINITY ? 0.0f : sum.m[1];
    add_pieces<N, C>(a, sum, p, p.first, own, half, n);
    float4 ml = __ldcg((const float4 *)(ml_at + part_of<C>(p, own) * N * 2));
    float f0 = ex2(ml.x - sum.m[0]), f1 = ex2(ml.z - sum.m[1]);
    sum.l[0] = fmaf(ml.y, f0, sum.l[0]);
    sum.l[1] = fmaf(ml.w, f1, sum.l[1]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *o = t.o[i] + n * 4;
        sum.add(i, make_float4(o[0], o[1], o[2], o[3]), f0, f1);
    }
    add_pieces<N, C>(a, sum, p, own + 1, p.last + 1, half, n);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        t.o[i / 4][n * 4 + i % 4] = sum.o[i / 4][i % 4];
    }
    return make_float2(sum.l[0], sum.l[1]);
}

/* Writes the part of a cut sequence; returns whether it was the last one. stage: of the piece's
 * last tile. */
template <int N, int C>
static __device__ __forceinline__ bool
store_part(const struct mla_args &a, const struct walk &w, const struct out_state<N> &t,
           const struct pieces &p, struct mla_shared *b, int half)
{
    const size_t part = part_of<C>(p, (int)blockIdx.x / C);
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *o = t.o[i] + n * 4;
            __stcg((float4 *)(a.part_o + part_at<N>(part, half, n, i)),
                   make_float4(o[0], o[1], o[2], o[3]));
        }
    }
    named_sync(NAMED_O, 256);
    if (half == 0 && threadIdx.x % 128 == 0) {
        uint32_t *n = a.arrived + (size_t)w.seq * (a.kv_heads * C) + group_of<C>(w);
        __threadfence(); /* also for the block's other threads, which passed the barrier before */
        bool done = atomicAdd(n, 1) == (uint32_t)(p.last - p.first);
        if (done) {
            *n = 0; /* for the next launch */
        }
        __threadfence();
        b->last = done;
    }
    named_sync(NAMED_O, 256);
    return *(volatile int *)&b->last;
}

template <int N, int C>
static __device__ __forceinline__ void sum(const struct mla_args &a, struct walk w, uint32_t smem,
                                           struct mla_shared *b)
{
    const int lane = threadIdx.x % 32, half = (int)threadIdx.x / 128 - WG_OUT;
    const int thread = threadIdx.x % 128;
    struct ring r = {0, 0};
    struct out_state<N> t;
    for (; walk_piece(w); walk_next(a, w)) {
        const bool whole = w.n == w.s.tiles;
        float l[N / 4];
#pragma unroll
        for (int i = 0; i < 4 * (N / 2); i++) {
            t.o[i / (N / 2)][i % (N / 2)] = 0;
        }
        for (int i = 0; i < w.n; i++) {
            const uint32_t tile = smem + r.at * TILE;
            bar_wait(smem_addr(&b->full[r.at][half]), r.phase);
            bar_wait(smem_addr(&b->weighed[r.at]), r.phase);
            if (*(volatile int *)&b->raised[r.at]) {
                rescale(t, b->factor[r.at]);
            }
            outputs(t, wgmma_desc(tile + half * 4 * BOX, BOX, 1024),
                    wgmma_desc(tile + P_BOX * BOX, 0, 1024));
            if (i == w.n - 1) {
                if (whole) {
#pragma unroll
                    for (int c = 0; c < N / 4; c++) {
                        l[c] = sum_of(b, r.at, c / 2 * 8 + lane % 4 * 2 + c % 2);
                    }
                } else if (half == 0 && thread < N) {
                    const struct pieces p = pieces_of<C>(a, w);
                    size_t part = part_of<C>(p, (int)blockIdx.x / C);
                    float sum = sum_of(b, r.at, thread);
                    __stcg((float2 *)(a.part_ml + (part * N + thread) * 2),
                           make_float2(sum > 0 ? b->m[r.at][thread] : -INFINITY, sum));
                }
            }
            release<C>(b, r.at, half);
            r.next(STAGES);
        }
        if (!whole) {
            const struct pieces p = pieces_of<C>(a, w);
            if (!store_part<N, C>(a, w, t, p, b, half)) {
                continue;
            }
#pragma unroll
            for (int n = 0; n < N / 8; n++) {
                float2 sums = combine<N, C>(a, t, p, (int)blockIdx.x / C, half, n);
                l[n * 2] = sums.x;
                l[n * 2 + 1] = sums.y;
            }
        }
        const int row = group_of<C>(w) * N + lane / 4;
        __half *out = a.out + ((size_t)w.seq * a.rows + row) * BT_MLA_LATENT + half * 256;
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            store_columns(t, out + (size_t)n * 8 * BT_MLA_LATENT, n, inverse(l[n * 2]),
                          inverse(l[n * 2 + 1]), row + n * 8 < (int)a.rows);
        }
    }
}

#endif
