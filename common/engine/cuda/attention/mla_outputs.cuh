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

/* Lets a part of the tile be overwritten, once all who read it have called this. */
template <int C>
static __device__ __forceinline__ void release(struct mla_shared *b, uint32_t stage, int part)
{
    uint32_t bar = smem_addr(&b->empty[stage][part]);
    __syncwarp();
    if (C == 1) {
        if (threadIdx.x % 32 == 0) {
            bar_arrive(bar);
        }
    } else if (threadIdx.x % 32 < C) {
        cluster_arrive(bar, threadIdx.x % 32);
    }
}

/* Adds a tile to the outputs, 64 rows after 64 rows in two groups, and releases the first one's
 * part while the second one is still computed. */
template <int N, int C>
static __device__ __forceinline__ void outputs(struct out_state<N> &t, struct mla_shared *b,
                                               uint32_t stage, int half, uint64_t v, uint64_t p)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_hold(t.o[i]);
    }
    wgmma_fence();
#pragma unroll
    for (int g = 0; g < 4; g += 2) {
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++) { /* 16 tokens: 16 rows of V, 32 bytes of P */
#pragma unroll
            for (int i = g; i < g + 2; i++) {
                wgmma_ts_f16(t.o[i], v + (uint64_t)(i * BOX + k * 2048) / 16,
                             p + (uint64_t)(k * 32) / 16, 1);
            }
        }
        wgmma_commit();
    }
    wgmma_wait<1>();
    release<C>(b, stage, half * 2);
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

/* 1 / sum of a column's weights; 0 if the query sees no token. */
static __device__ __forceinline__ float inverse(float l)
{
    return l > 0 ? 1.0f / l : 0.0f;
}
static __device__ __forceinline__ float sum_of(const struct mla_shared *b, uint32_t stage, int c)
{
    return b->l[stage][0][c] + b->l[stage][1][c] + b->l[stage][2][c] + b->l[stage][3][c];
}

/* Writes eight columns of the result, each 8 x 8 values transposed: pairs of threads exchange
 * halves, so that four threads write 32 bytes of a row. o(i): the thread's four values of rows
 * i * 64 + ...; f: what its columns are multiplied by. */
template <class O>
static __device__ __forceinline__ void store_columns(O o, __half *out, float2 f, bool valid)
{
    const int lane = threadIdx.x % 32, odd = lane % 2;
    __half *to = out + (threadIdx.x % 128 / 32) * 16 + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *v = o(i);
        uint32_t lo = transpose8(pack2<__half>(v[0] * f.x, v[1] * f.y));
        uint32_t hi = transpose8(pack2<__half>(v[2] * f.x, v[3] * f.y));
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

/* Computes the columns' references and inverse sums over all pieces, one column a thread. */
template <int N, int C>
static __device__ __forceinline__ void total_sums(const struct mla_args &a, const struct pieces &p,
                                                  struct mla_shared *b)
{
    constexpr int PIECES = 8;
    const int column = threadIdx.x - 128 * WG_OUT;
    if (column < N) {
        float m = -INFINITY, l = 0;
        for (int from = p.first; from <= p.last; from += PIECES) {
            float2 ml[PIECES];
            float top = m;
#pragma unroll
            for (int k = 0; k < PIECES; k++) {
                size_t part = part_of<C>(p, min(from + k, p.last));
                ml[k] = __ldcg((const float2 *)(a.part_ml + (part * N + column) * 2));
                ml[k].y = from + k <= p.last ? ml[k].y : 0.0f;
                top = fmaxf(top, ml[k].x);
            }
            float base = top == -INFINITY ? 0.0f : top;
            l *= ex2(m - base);
#pragma unroll
            for (int k = 0; k < PIECES; k++) {
                l = fmaf(ml[k].y, ex2(ml[k].x - base), l);
            }
            m = top;
        }
        b->total_m[column] = m == -INFINITY ? 0.0f : m;
        b->total_f[column] = inverse(l);
    }
    named_sync(NAMED_O, 256);
}

/* Writes the result of a cut sequence: the sum of all pieces, in their order. They are read back
 * from memory, this block's too, so that the registers hold many loads at a time. */
template <int N, int C>
static __device__ __forceinline__ void combine(const struct mla_args &a, const struct pieces &p,
                                               struct mla_shared *b, __half *out, int half,
                                               int rows)
{
    constexpr int PIECES = N == 64 ? 6 : 4; /* what registers allow */
    total_sums<N, C>(a, p, b);
#pragma unroll 1
    for (int n = 0; n < N / 8; n++) {
        const int column = n * 8 + threadIdx.x % 4 * 2;
        const float2 m = *(const float2 *)(b->total_m + column);
        float acc[4][4] = {};
#pragma unroll 1
        for (int from = p.first; from <= p.last; from += PIECES) {
            float4 ml[PIECES], v[PIECES][4];
#pragma unroll
            for (int k = 0; k < PIECES; k++) {
                size_t part = part_of<C>(p, min(from + k, p.last));
                ml[k] = __ldcg((const float4 *)(a.part_ml + (part * N + column) * 2));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    v[k][i] = make_float4(0, 0, 0, 0);
                    if (from + k <= p.last) {
                        v[k][i] = __ldcg((const float4 *)(a.part_o + part_at<N>(part, half, n, i)));
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < PIECES; k++) {
                float f0 = ex2(ml[k].x - m.x), f1 = ex2(ml[k].z - m.y);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    acc[i][0] = fmaf(v[k][i].x, f0, acc[i][0]);
                    acc[i][1] = fmaf(v[k][i].y, f1, acc[i][1]);
                    acc[i][2] = fmaf(v[k][i].z, f0, acc[i][2]);
                    acc[i][3] = fmaf(v[k][i].w, f1, acc[i][3]);
                }
            }
        }
        store_columns([&](int i) { return acc[i]; }, out + (size_t)n * 8 * BT_MLA_LATENT,
                      *(const float2 *)(b->total_f + column), n * 8 < rows);
    }
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
            bar_wait(smem_addr(&b->full[r.at][half * 2]), r.phase);
            bar_wait(smem_addr(&b->full[r.at][half * 2 + 1]), r.phase);
            bar_wait(smem_addr(&b->weighed[r.at]), r.phase);
            if (*(volatile int *)&b->raised[r.at]) {
                rescale(t, b->factor[r.at]);
            }
            outputs<N, C>(t, b, r.at, half, wgmma_desc(tile + half * 4 * BOX, BOX, 1024),
                          wgmma_desc(tile + P_BOX * BOX, 0, 1024));
            if (i == w.n - 1) {
                if (whole) {
#pragma unroll
                    for (int c = 0; c < N / 4; c++) {
                        l[c] = inverse(sum_of(b, r.at, c / 2 * 8 + lane % 4 * 2 + c % 2));
                    }
                } else if (half == 0 && thread < N) {
                    const struct pieces p = pieces_of<C>(a, w);
                    size_t part = part_of<C>(p, (int)blockIdx.x / C);
                    float sum = sum_of(b, r.at, thread);
                    __stcg((float2 *)(a.part_ml + (part * N + thread) * 2),
                           make_float2(sum > 0 ? b->m[r.at][thread] : -INFINITY, sum));
                }
            }
            release<C>(b, r.at, half * 2 + 1);
            release<C>(b, r.at, PARTS - 1);
            r.next(STAGES);
        }
        const int row = group_of<C>(w) * N + lane / 4;
        __half *out = a.out + ((size_t)w.seq * a.rows + row) * BT_MLA_LATENT + half * 256;
        if (!whole) {
            const struct pieces p = pieces_of<C>(a, w);
            if (store_part<N, C>(a, w, t, p, b, half)) {
                combine<N, C>(a, p, b, out, half, (int)a.rows - row);
            }
            continue;
        }
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            store_columns([&](int i) { return t.o[i] + n * 4; },
                          out + (size_t)n * 8 * BT_MLA_LATENT, make_float2(l[n * 2], l[n * 2 + 1]),
                          row + n * 8 < (int)a.rows);
        }
    }
}

#endif
