/* The scores' warpgroup of the MLA decode kernel for 64 query rows (mla_rows_wgmma.cu): S, softmax,
 * P; and what its warpgroups share. Device code only. */
#ifndef BT_CUDA_MLA_ROWS_SCORES_CUH
#define BT_CUDA_MLA_ROWS_SCORES_CUH

#include "common/engine/cuda/attention/mla_pieces.cuh"

#define ROWS    64
#define HALF    (4 * BOX)
#define HALVES  5
#define ROPES   3
#define Q_REGS  4 /* boxes of Q in registers: the first ones */
#define ROPE_AT (HALVES * HALF)
#define Q_AT    (ROPE_AT + ROPES * BOX)
#define SHARED  (Q_AT + (BOXES - Q_REGS) * BOX)

struct rows_shared {
    uint64_t full[HALVES], empty[HALVES], rope_full[ROPES], rope_empty[ROPES];
    uint64_t scored[ROPES], weighed[ROPES];
    uint64_t q_full, q_empty;
    /* Of the tile whose weights are in a RoPE box, valid from `weighed` to `rope_empty`. */
    float factor[ROPES][ROWS];            /* of earlier outputs, if raised */
    float m[ROPES][ROWS], l[ROPES][ROWS]; /* piece's last tile: references, sums of weights */
    int raised[ROPES][4];                 /* by the scores' warps */
    struct mla_totals total;
};
static_assert(SHARED + sizeof(struct rows_shared) <= SMEM_MAX, "tiles do not fit");

/* A thread's part of a tile's scores, s[32]: s[n * 4 + {0, 1}] are row warp * 16 + lane / 4, tokens
 * n
 * * 8 + lane % 4 * 2 + {0, 1}; s[n * 4 + {2, 3}] are eight rows further. m and l are of these rows.
 */
struct score_rows {
    float m[2], l[2];
    uint32_t q[Q_REGS * 4][4];
    struct ring h, r; /* the tile's halves and RoPE box */
};

/* Loads the first boxes of Q in the order in which the products read registers. row: of the
 * sequence, the thread's first. */
static __device__ __forceinline__ void load_q(struct score_rows &t, const struct mla_args &a,
                                              const struct walk &w, int row)
{
    const int words = BT_MLA_ROW / 2, rows = rows_of(a, w); /* words: of a row */
    const uint32_t *q =
        (const uint32_t *)a.q + (size_t)(first_row(a, w) + row) * words + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < Q_REGS * 16; i++) {
        bool valid = row + i % 2 * 8 < rows;
        t.q[i / 4][i % 4] = valid ? __ldcg(q + i / 4 * 8 + i / 2 % 2 * 4 + i % 2 * 8 * words) : 0;
    }
}

static __device__ __forceinline__ void scores_half(float (&s)[32], const struct score_rows &t,
                                                   int from, uint64_t k, uint64_t q)
{
    wgmma_fence();
#pragma unroll
    for (int i = from; i < from + 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) { /* 16 values are 32 bytes */
            const uint64_t at = k + (uint64_t)((i - from) * BOX + j * 32) / 16;
            if (i < Q_REGS) {
                wgmma_rs_f16(s, t.q[i * 4 + j], at, i + j > 0);
            } else {
                wgmma_ss_f16(s, q + (uint64_t)((i - Q_REGS) * BOX + j * 32) / 16, at, 1);
            }
        }
    }
}

static __device__ __forceinline__ void scores(float (&s)[32], const struct score_rows &t,
                                              struct rows_shared *b, uint32_t smem)
{
    const uint64_t q = wgmma_desc(smem + Q_AT, 0, 1024);
    struct ring h = t.h, r = t.r;
    wgmma_hold(s);
    bar_wait(smem_addr(&b->full[h.at]), h.phase);
    scores_half(s, t, 0, wgmma_desc(smem + h.at * HALF, 0, 1024), q);
    h.next(HALVES);
    bar_wait(smem_addr(&b->full[h.at]), h.phase);
    scores_half(s, t, 4, wgmma_desc(smem + h.at * HALF, 0, 1024), q);
    bar_wait(smem_addr(&b->rope_full[r.at]), r.phase);
    const uint64_t k = wgmma_desc(smem + ROPE_AT + r.at * BOX, 0, 1024);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        wgmma_ss_f16(s, q + (uint64_t)((BOXES - 1 - Q_REGS) * BOX + j * 32) / 16,
                     k + (uint64_t)(j * 32) / 16, 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(s);
}

/* Hides tokens that a query may not see. base: first token of the tile; row: of the sequence. */
static __device__ __forceinline__ void mask(float (&s)[32], const struct mla_args &a,
                                            const struct walk &w, int base, int row)
{
    const int len = w.s.len, queries = w.s.n;
    const int token = base + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int seen = min(len - queries + 1 + (row + r * 8) / (int)a.heads, len);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float *v = s + i / 2 * 4 + r * 2 + i % 2;
            *v = token + i / 2 * 8 + i % 2 < seen ? *v : -INFINITY;
        }
    }
}

/* Clears values behind the sequence: they may be NaN, and 0 * NaN is not 0. */
static __device__ __forceinline__ void clear_tail(uint8_t *half, int from)
{
    const int n = (TOKENS - from) * 8;
    for (int i = threadIdx.x % 128; i < n * 4; i += 128) {
        *(uint4 *)(half + i / n * BOX + from * 128 + i % n * 16) = make_uint4(0, 0, 0, 0);
    }
}

/* Makes the scores relative to the references, and raises those of rows whose weights would leave
 * the range of f16 to the tile's largest scores. Returns whether earlier outputs have to be
 * multiplied by `factor`. What becomes of a row does not depend on the others. */
static __device__ __forceinline__ bool refer(float (&s)[32], struct score_rows &t, float scale,
                                             bool begin, float (&factor)[2])
{
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 32; j++) {
        s[j] = fmaf(s[j], scale, -t.m[j / 2 % 2]);
        top[j / 2 % 2] = fmaxf(top[j / 2 % 2], s[j]);
    }
    if (!__any_sync(~0u, begin || fmaxf(top[0], top[1]) > LIMIT)) {
        return false;
    }
    float up[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        up[r] = top[r] > (begin ? -INFINITY : (float)LIMIT) ? top[r] - BIAS : 0.0f;
        factor[r] = begin ? 1.0f : ex2(-up[r]);
        t.m[r] += up[r];
        t.l[r] *= factor[r];
    }
#pragma unroll
    for (int j = 0; j < 32; j++) {
        s[j] -= up[j / 2 % 2];
    }
    return !begin; /* nothing is summed yet at the begin */
}

/* Stores the weights as f16: 64 rows of 64 tokens, 128 bytes, with the swizzle that the products
 * expect. */
static __device__ __forceinline__ void store_weights(const float (&s)[32], uint32_t p_at)
{
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < 8; n += 2) { /* 16 rows of 8 tokens, then of 8 more */
        const float *v = s + n * 4;
        const uint32_t p[4] = {pack2<__half>(v[0], v[1]), pack2<__half>(v[2], v[3]),
                               pack2<__half>(v[4], v[5]), pack2<__half>(v[6], v[7])};
        stmatrix4(p_at + row * 128 + ((n + lane / 16) ^ row % 8) * 16, p);
    }
}

/* Leaves what the outputs need beside the weights of a tile. end: it is the piece's last. */
static __device__ __forceinline__ void store_state(const struct score_rows &t,
                                                   struct rows_shared *b, uint32_t p, bool raised,
                                                   const float (&factor)[2], bool end)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    if (lane == 0) {
        b->raised[p][warp] = raised;
    }
    if (!raised && !end) {
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float l = t.l[r] + __shfl_xor_sync(~0u, t.l[r], 1);
        l += __shfl_xor_sync(~0u, l, 2);
        if (lane % 4 == 0) {
            const int row = warp * 16 + lane / 4 + r * 8;
            b->factor[p][row] = factor[r];
            b->l[p][row] = l;
            b->m[p][row] = t.m[r];
        }
    }
}

/* Computes the weights of tile i of a piece. row: of the sequence, the thread's first. */
template <bool FIXED>
static __device__ __forceinline__ void weigh(struct score_rows &t, const struct mla_args &a,
                                             const struct walk &w, int i, int row, uint8_t *smem,
                                             struct rows_shared *b)
{
    const uint32_t smem_at = smem_addr(smem);
    const int base = (w.tile + i) * TOKENS;
    const bool last = i == w.n - 1, leave_q = last && ends<FIXED>(w);
    float s[32], factor[2] = {1, 1};
    scores(s, t, b, smem_at);
    release<1>(&b->scored[t.r.at]);
    if (leave_q) {
        release<1>(&b->q_empty);
    }
    if (base + TOKENS > w.s.len - w.s.n + 1) {
        mask(s, a, w, base, row);
    }
    bool raised = refer(s, t, a.scale_log2, i == 0, factor);
#pragma unroll
    for (int j = 0; j < 32; j++) {
        s[j] = ex2(s[j]);
        t.l[j / 2 % 2] += s[j];
    }
    named_sync(NAMED_S, 128); /* all warps' products have read the tile */
    store_weights(s, smem_at + ROPE_AT + t.r.at * BOX);
    store_state(t, b, t.r.at, raised, factor, last);
    struct ring right = t.h;
    right.next(HALVES);
    if (base + TOKENS > w.s.len) {
        clear_tail(smem + t.h.at * HALF, w.s.len - base);
        clear_tail(smem + right.at * HALF, w.s.len - base);
    }
    fence_async_shared();
    release<1>(&b->weighed[t.r.at]);
    right.next(HALVES);
    t.h = right;
    t.r.next(ROPES);
}

template <int C, bool FIXED>
static __device__ __forceinline__ void score(const struct mla_args &a, struct walk w, uint8_t *smem,
                                             struct rows_shared *b)
{
    uint32_t q_phase = 0;
    bool begins = true;
    struct score_rows t;
    t.h = t.r = {0, 0};
    for (; piece<FIXED>(a, w); walk_next(a, w)) {
        const int row = group_of<C>(w) * ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        t.m[0] = t.m[1] = t.l[0] = t.l[1] = 0;
        if (begins) {
            load_q(t, a, w, row);
            bar_wait(smem_addr(&b->q_full), q_phase);
            q_phase ^= 1;
        }
        begins = ends<FIXED>(w);
        for (int i = 0; i < w.n; i++) {
            weigh<FIXED>(t, a, w, i, row, smem, b);
        }
    }
}

#endif
