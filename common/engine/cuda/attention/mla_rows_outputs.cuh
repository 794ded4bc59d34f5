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
    return {a.out + (size_t)(first_row(a, w) + first) * BT_MLA_LATENT + half * 256, row,
            rows_of(a, w) - first};
}

/* Whether the sequence has any of this warp's rows. */
template <int C>
static __device__ __forceinline__ bool has_rows(const struct mla_args &a, const struct walk &w)
{
    return group_of<C>(w) * ROWS + (int)threadIdx.x % 128 / 32 * 16 < rows_of(a, w);
}

static __device__ __forceinline__ void put_part(const struct mla_args &a, size_t part,
                                                const struct out_sums &t, int half)
{
#pragma unroll
    for (int n = 0; n < 32; n++) {
        const float *o = t.o[n / 16] + n % 16 * 4;
        __stcg(part_at<32>(a, part, half, n), make_float4(o[0], o[1], o[2], o[3]));
    }
}

/* Writes the part of a cut sequence. */
template <int C>
static __device__ __forceinline__ void store_part(const struct mla_args &a, const struct walk &w,
                                                  size_t part, const struct out_sums &t, int half)
{
    if (has_rows<C>(a, w)) {
        put_part(a, part, t, half);
    }
    part_written<C>(a, w);
}

/* Adds a segment to those before it, which the thread keeps in memory: there is none if `first`,
 * and there comes none if `last`. total: of the thread's two rows; now: of the segment. */
static __device__ __forceinline__ void end_segment(const struct mla_args &a, struct out_sums &t,
                                                   struct segment_sums (&total)[2],
                                                   const struct segment_sums (&now)[2], int half,
                                                   bool first, bool last)
{
    const struct segment_factors f[2] = {add_sums(total[0], now[0]), add_sums(total[1], now[1])};
#pragma unroll
    for (int n = 0; n < 32; n++) {
        float4 *at = part_at<32>(a, blockIdx.x, half, n);
        float *o = t.o[n / 16] + n % 16 * 4;
        if (!first) {
            const float4 v = __ldcg(at);
            o[0] = add_output(v.x, o[0], f[0]);
            o[1] = add_output(v.y, o[1], f[0]);
            o[2] = add_output(v.z, o[2], f[1]);
            o[3] = add_output(v.w, o[3], f[1]);
        }
        if (!last) {
            __stcg(at, make_float4(o[0], o[1], o[2], o[3]));
        }
    }
}

static __device__ __forceinline__ void store_sums(const struct out_rows &to,
                                                  const struct out_sums &t, float f0, float f1)
{
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

/* Sums the tiles of a piece. now: sums of the thread's two rows. part: where a part's sums go, or
 * negative. */
template <int C>
static __device__ __forceinline__ void sum_piece(const struct mla_args &a, const struct walk &w,
                                                 uint32_t smem, struct rows_shared *b,
                                                 struct ring &h, struct ring &p, struct out_sums &t,
                                                 struct segment_sums (&now)[2], long part)
{
    const int warp = threadIdx.x % 128 / 32, thread = threadIdx.x % 128;
    const int half = (int)threadIdx.x / 128 - WG_OUT, row = warp * 16 + threadIdx.x % 32 / 4;
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
#pragma unroll
            for (int r = 0; r < 2; r++) {
                now[r] = sums_of(b->m[p.at][row + r * 8], b->l[p.at][row + r * 8]);
            }
            if (part >= 0 && half == 0 && thread < ROWS) {
                const struct segment_sums s = sums_of(b->m[p.at][thread], b->l[p.at][thread]);
                __stcg((float2 *)a.part_ml + part * ROWS + thread, make_float2(s.m, s.l));
            }
        }
        release<C>(&b->rope_empty[p.at]);
        p.next(ROPES);
        h.next(HALVES); /* the other warpgroup's */
        h.next(HALVES);
    }
}

/* FIXED: KV is cut at segments alone. A sequence that lies in one run is added up segment by
 * segment, and others leave a part for each, which are added up in the same way. */
template <int C, bool FIXED>
static __device__ __forceinline__ void sum(const struct mla_args &a, struct walk w, uint32_t smem,
                                           struct rows_shared *b)
{
    const int half = (int)threadIdx.x / 128 - WG_OUT;
    struct ring h = {(uint32_t)half, 0}, p = {0, 0};
    struct out_sums t;
    struct segment_sums total[2] = {no_sums(), no_sums()};
    for (; piece<FIXED>(a, w); walk_next(a, w)) {
        const bool whole = w.n == w.s.tiles;
        long part = -1;
        if (!whole) {
            const struct bt_mla_cut cut = cut_of(a, w);
            part = FIXED ? (cut.first < cut.last
                                ? (long)segment_part<C>(a, cut, segment_of(w.tile, a.unit))
                                : -1)
                         : (long)part_of<C>(cut, (int)blockIdx.x / C);
        }
        struct segment_sums now[2];
        sum_piece<C>(a, w, smem, b, h, p, t, now, part);
        if (part >= 0) {
            store_part<C>(a, w, (size_t)part, t, half);
            continue;
        }
        if (FIXED && !has_rows<C>(a, w)) {
            continue;
        }
        if (FIXED && !whole) {
            const bool last = w.tile + w.n == w.s.tiles;
            if (w.tile == 0) {
                total[0] = total[1] = no_sums();
            }
            end_segment(a, t, total, now, half, w.tile == 0, last);
            if (!last) {
                continue;
            }
            now[0] = total[0];
            now[1] = total[1];
        }
        store_sums(out_of<C>(a, w, half), t, inverse(now[0].l), inverse(now[1].l));
    }
    for (w = run_walk<C>(a); walk_piece(w); walk_next(a, w)) {
        if (w.n == w.s.tiles) {
            continue;
        }
        if (FIXED) {
            combine_segments<ROWS, C>(a, w, has_rows<C>(a, w), out_of<C>(a, w, half), half);
        } else {
            combine<ROWS, C>(a, w, &b->total, out_of<C>(a, w, half), half);
        }
    }
}

#endif
