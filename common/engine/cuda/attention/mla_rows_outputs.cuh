/* The outputs' warpgroups of the MLA decode kernel for 64 query rows (mla_rows_wgmma.cu): O, the
 * result, and the parts of cut sequences. Device code only. */
#ifndef BT_CUDA_MLA_ROWS_OUTPUTS_CUH
#define BT_CUDA_MLA_ROWS_OUTPUTS_CUH

#include "common/engine/cuda/attention/mla_rows_scores.cuh"

/* Rows as in score_rows; columns i * 128 + n * 8 + ... of the warpgroup's 256 instead of tokens.
 * One product of 256 columns would need more registers than a thread has before regs_take(). */
struct out_sums {
    float o[2][64];
};

static __device__ __forceinline__ void outputs(struct out_sums &t, uint64_t p, uint64_t v)
{
    wgmma_hold(t.o[0]);
    wgmma_hold(t.o[1]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) { /* 16 tokens: 32 bytes of P, 16 rows of V */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            wgmma_st_f16(t.o[i], p + (uint64_t)(k * 32) / 16,
                         v + (uint64_t)(i * 2 * BOX + k * 2048) / 16, 1);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(t.o[0]);
    wgmma_hold(t.o[1]);
}

static __device__ __forceinline__ void rescale(struct out_sums &t, const float *factor, int row)
{
    const float f0 = factor[row], f1 = factor[row + 8];
#pragma unroll
    for (int i = 0; i < 128; i++) {
        t.o[i / 64][i % 64] *= i / 2 % 2 ? f1 : f0;
    }
}

/* Where a thread's results go. */
struct out_rows {
    /* A unit: 64 rows and eight columns. Values 0 and 1 of four are of a row, 2 and 3 of the row
     * eight rows further. */
    static constexpr int UNITS = 32, GROUP = 8, FIRST = 2, NEXT = 8;
    __half *to; /* first row, first column of the warpgroup's half */
    int row;    /* of the block's 64, the first */
    int rows;   /* from that one to the sequence's last */

    __device__ __forceinline__ int query(int unit) const
    {
        (void)unit;
        return row;
    }
    /* Pairs of threads exchange halves, so that four threads write 32 bytes of a row. v: K units
     * from `unit` on; f: what the rows are multiplied by. */
    template <int K>
    __device__ __forceinline__ void store(int unit, const float (&v)[K][4], float f0,
                                          float f1) const
    {
        const int lane = threadIdx.x % 32, odd = lane % 2;
        __half *at = to + unit * 8 + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
        for (int k = 0; k < K; k += 2, at += 16) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float f = r ? f1 : f0;
                uint32_t lo = pack2<__half>(v[k][r * 2] * f, v[k][r * 2 + 1] * f);
                uint32_t hi = pack2<__half>(v[k + 1][r * 2] * f, v[k + 1][r * 2 + 1] * f);
                uint32_t got = __shfl_xor_sync(~0u, odd ? lo : hi, 1);
                if (r * 8 < rows) {
                    *(uint2 *)(at + r * 8 * BT_MLA_LATENT) =
                        odd ? make_uint2(got, hi) : make_uint2(lo, got);
                }
            }
        }
    }
};
template <int C>
static __device__ __forceinline__ struct out_rows out_of(const struct mla_args &a,
                                                         const struct walk &w, int half)
{
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int first = group_of<C>(w) * ROWS + row;
    return {a.out + ((size_t)w.seq * a.rows + first) * BT_MLA_LATENT + half * 256, row,
            (int)a.rows - first};
}

/* Writes the part of a cut sequence. */
template <int C>
static __device__ __forceinline__ void store_part(const struct mla_args &a, const struct walk &w,
                                                  const struct out_sums &t, int half)
{
    const size_t part = part_of<C>(cut_of(a, w), (int)blockIdx.x / C);
#pragma unroll
    for (int n = 0; n < 32; n++) {
        const float *o = t.o[n / 16] + n % 16 * 4;
        __stcg(part_at<32>(a, part, half, n), make_float4(o[0], o[1], o[2], o[3]));
    }
    part_written<C>(a, w);
}

template <int C>
static __device__ __forceinline__ void sum(const struct mla_args &a, struct walk w, uint32_t smem,
                                           struct rows_shared *b)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, thread = threadIdx.x % 128;
    const int half = (int)threadIdx.x / 128 - WG_OUT, row = warp * 16 + lane / 4;
    struct ring h = {(uint32_t)half, 0}, p = {0, 0};
    struct out_sums t;
    for (; walk_piece(w); walk_next(a, w)) {
        const bool whole = w.n == w.s.tiles;
        float f0 = 0, f1 = 0;
#pragma unroll
        for (int i = 0; i < 128; i++) {
            t.o[i / 64][i % 64] = 0;
        }
        for (int i = 0; i < w.n; i++) {
            bar_wait(smem_addr(&b->weighed[p.at]), p.phase);
            bar_wait(smem_addr(&b->full[h.at]), h.phase);
            if (half == 1 && i + 1 < w.n) {
                struct ring next = p;
                next.next(ROPES);
                bar_wait(smem_addr(&b->scored[next.at]), next.phase);
            }
            if (*(volatile int *)&b->raised[p.at][warp]) {
                rescale(t, b->factor[p.at], row);
            }
            outputs(t, wgmma_desc(smem + ROPE_AT + p.at * BOX, 0, 1024),
                    wgmma_desc(smem + h.at * HALF, BOX, 1024));
            release<C>(&b->empty[h.at]);
            if (i == w.n - 1) {
                f0 = inverse(b->l[p.at][row]);
                f1 = inverse(b->l[p.at][row + 8]);
                if (!whole && half == 0 && thread < ROWS) {
                    const size_t part = part_of<C>(cut_of(a, w), (int)blockIdx.x / C);
                    const float l = b->l[p.at][thread];
                    __stcg((float2 *)a.part_ml + part * ROWS + thread,
                           make_float2(l > 0 ? b->m[p.at][thread] : -INFINITY, l));
                }
            }
            release<C>(&b->rope_empty[p.at]);
            p.next(ROPES);
            h.next(HALVES); /* the other warpgroup's */
            h.next(HALVES);
        }
        if (!whole) {
            store_part<C>(a, w, t, half);
            continue;
        }
        const struct out_rows to = out_of<C>(a, w, half);
#pragma unroll
        for (int n = 0; n < 32; n += 2) {
            float v[2][4];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                v[i / 4][i % 4] = t.o[n / 16][n % 16 * 4 + i];
            }
            to.store(n, v, f0, f1);
        }
    }
    for (w = run_walk<C>(a); walk_piece(w); walk_next(a, w)) {
        if (w.n < w.s.tiles) {
            combine<ROWS, C>(a, w, &b->total, out_of<C>(a, w, half), half);
        }
    }
}

#endif
