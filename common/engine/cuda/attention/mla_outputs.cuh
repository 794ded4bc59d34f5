/* The outputs' warpgroups of the MLA decode kernel (mla_wgmma.cu): O^T, the result, and the sum
 * over the pieces of a cut sequence. Device code only. */
#ifndef BT_CUDA_MLA_OUTPUTS_CUH
#define BT_CUDA_MLA_OUTPUTS_CUH

#include "common/engine/cuda/attention/mla_pieces.cuh"

/* o[i][n * 4 + ...]: rows i * 64 + warp * 16 + lane / 4 (+ 8) of the warpgroup's 256, columns as in
 * score_state. */
template <int N> struct out_state {
    float o[4][N / 2];
};

/* Adds a tile to the outputs, 64 rows after 64 rows in two groups, and releases the first one's
 * part while the second one is still computed. */
template <int N>
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
    release<1>(&b->empty[stage][half * 2]);
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

static __device__ __forceinline__ float sum_of(const struct mla_weights *b, uint32_t place, int c)
{
    return b->l[place][0][c] + b->l[place][1][c] + b->l[place][2][c] + b->l[place][3][c];
}

/* Where a thread's results go. */
template <int N> struct out_columns {
    /* A unit: 64 rows of O^T and eight columns. Values 0 and 2 of four are of a column, 1 and 3 of
     * the next one. */
    static constexpr int UNITS = N / 2, GROUP = 4, FIRST = 1, NEXT = 1;
    __half *to; /* of the sequence and the warpgroup's half: first query row */
    int rows;   /* of the sequence */

    __device__ __forceinline__ int query(int unit) const
    {
        return unit / 4 * 8 + threadIdx.x % 4 * 2;
    }
    /* Each 8 x 8 values are transposed, and pairs of threads exchange halves: so four threads write
     * 32 bytes of a row. v: K units from `unit` on; f: what the columns are multiplied by. */
    template <int K>
    __device__ __forceinline__ void store(int unit, const float (&v)[K][4], float f0,
                                          float f1) const
    {
        const int lane = threadIdx.x % 32, odd = lane % 2, row = unit / 4 * 8 + lane / 4;
        __half *at = to + (size_t)row * BT_MLA_LATENT + unit % 4 * 64 +
                     threadIdx.x % 128 / 32 * 16 + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
        for (int i = 0; i < K; i++) {
            uint32_t lo = transpose8(pack2<__half>(v[i][0] * f0, v[i][1] * f1));
            uint32_t hi = transpose8(pack2<__half>(v[i][2] * f0, v[i][3] * f1));
            uint32_t got = __shfl_xor_sync(~0u, odd ? lo : hi, 1);
            if (row < rows) {
                *(uint2 *)(at + i * 64) = odd ? make_uint2(got, hi) : make_uint2(lo, got);
            }
        }
    }
};
template <int N>
static __device__ __forceinline__ struct out_columns<N> out_of(const struct mla_args &a,
                                                               const struct walk &w, int half) {
    return {a.out + (size_t)first_row(a, w) * BT_MLA_LATENT + half * 256, rows_of(a, w)};
}

/* Writes the part of a cut sequence. */
template <int N, int C>
static __device__ __forceinline__ void store_part(const struct mla_args &a, const struct walk &w,
                                                  const struct out_state<N> &t, int half)
{
    const size_t part = part_of<C>(cut_of(a, w), (int)blockIdx.x / C);
#pragma unroll
    for (int u = 0; u < N / 2; u++) {
        const float *o = t.o[u % 4] + u / 4 * 4;
        __stcg(part_at<N / 2>(a, part, half, u), make_float4(o[0], o[1], o[2], o[3]));
    }
    part_written<C>(a, w);
}

/* The reference and the sum of column c, which belong to the part. */
template <int N, int C>
static __device__ __forceinline__ void
store_part_sum(const struct mla_args &a, const struct walk &w, const struct mla_weights *b,
               uint32_t place, int c)
{
    const size_t part = part_of<C>(cut_of(a, w), (int)blockIdx.x / C);
    const float l = sum_of(b, place, c);
    __stcg((float2 *)a.part_ml + part * N + c, make_float2(l > 0 ? b->m[place][c] : -INFINITY, l));
}

template <int N>
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
            if (*(volatile int *)&b->w.raised[r.at]) {
                rescale(t, b->w.factor[r.at]);
            }
            outputs(t, b, r.at, half, wgmma_desc(tile + half * 4 * BOX, BOX, 1024),
                    wgmma_desc(tile + P_BOX * BOX, 0, 1024));
            if (i == w.n - 1) {
                if (whole) {
#pragma unroll
                    for (int c = 0; c < N / 4; c++) {
                        l[c] = inverse(sum_of(&b->w, r.at, c / 2 * 8 + lane % 4 * 2 + c % 2));
                    }
                } else if (half == 0 && thread < N) {
                    store_part_sum<N, 1>(a, w, &b->w, r.at, thread);
                }
            }
            release<1>(&b->empty[r.at][half * 2 + 1]);
            release<1>(&b->empty[r.at][PARTS - 1]);
            r.next(STAGES);
        }
        if (!whole) {
            store_part<N, 1>(a, w, t, half);
            continue;
        }
        const struct out_columns<N> to = out_of<N>(a, w, half);
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            float v[4][4];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                v[i / 4][i % 4] = t.o[i / 4][n * 4 + i % 4];
            }
            to.store(n * 4, v, l[n * 2], l[n * 2 + 1]);
        }
    }
    for (w = run_walk<1>(a); walk_piece(w); walk_next(a, w)) {
        if (w.n < w.s.tiles) {
            combine<N, 1>(a, w, &b->w.total, out_of<N>(a, w, half), half);
        }
    }
}

#endif
