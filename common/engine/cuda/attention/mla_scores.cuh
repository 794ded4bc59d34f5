/* The scores' warpgroup of the MLA decode kernel (mla_wgmma.cu): S^T, softmax, P. Device code only.
 */
#ifndef BT_CUDA_MLA_SCORES_CUH
#define BT_CUDA_MLA_SCORES_CUH

#include "common/engine/cuda/attention/mla_tile.cuh"

/* A thread's part of a tile's scores: columns c = n * 8 + lane % 4 * 2 + {0, 1} are [n * 2 + {0,
 * 1}] of m and l, and [n * 4 + {0, 1}] and [n * 4 + {2, 3}] of s, the latter 8 tokens further. */
template <int N> struct score_state {
    float s[N / 2], m[N / 4], l[N / 4];
};

template <int N>
static __device__ __forceinline__ void scores(struct score_state<N> &t, struct mla_shared *b,
                                              const struct ring &r, uint64_t k, uint64_t q)
{
    wgmma_hold(t.s);
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
        if (i % 2 == 0) {
            bar_wait(smem_addr(&b->full[r.at][i / 2]), r.phase);
            wgmma_fence();
        }
#pragma unroll
        for (int j = 0; j < 4; j++) { /* 16 values are 32 bytes */
            wgmma_ss_f16(t.s, k + (uint64_t)(i * BOX + j * 32) / 16,
                         q + (uint64_t)(i * (N * 128) + j * 32) / 16, i + j > 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(t.s);
}

/* Hides tokens that a query may not see. base: first token of the tile; first: row of the sequence
 * that is the block's first column. */
template <int N>
static __device__ __forceinline__ void mask(struct score_state<N> &t, const struct mla_args &a,
                                            const struct walk &w, int base, int first)
{
    const int token = base + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int c = 0; c < N / 4; c++) {
        int row = first + c / 2 * 8 + threadIdx.x % 4 * 2 + c % 2;
        int seen = min(w.s.len - w.s.n + 1 + row / (int)a.heads, w.s.len);
#pragma unroll
        for (int i = c % 2; i < 4; i += 2) {
            float *s = t.s + c / 2 * 4 + i;
            *s = token + i / 2 * 8 < seen ? *s : -INFINITY;
        }
    }
}

/* Raises the references to the tile's largest scores. s: relative to the old ones. */
template <int N>
static __device__ __forceinline__ void raise(struct score_state<N> &t, struct mla_weights *b,
                                             uint32_t place, bool begin)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int c = 0; c < N / 4; c++) {
        float top = fmaxf(t.s[c / 2 * 4 + c % 2], t.s[c / 2 * 4 + 2 + c % 2]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
            top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        }
        if (lane < 4) {
            b->top[warp][c / 2 * 8 + lane * 2 + c % 2] = top;
        }
    }
    named_sync(NAMED_S, 128);
#pragma unroll
    for (int c = 0; c < N / 4; c++) {
        int column = c / 2 * 8 + lane % 4 * 2 + c % 2;
        float top = fmaxf(fmaxf(b->top[0][column], b->top[1][column]),
                          fmaxf(b->top[2][column], b->top[3][column]));
        float up = top == -INFINITY ? 0.0f : begin ? top - BIAS : fmaxf(top - BIAS, 0.0f);
        float factor = begin ? 1.0f : ex2(-up); /* nothing is summed yet at the begin */
        t.m[c] += up;
        t.l[c] *= factor;
        t.s[c / 2 * 4 + c % 2] -= up;
        t.s[c / 2 * 4 + 2 + c % 2] -= up;
        if (warp == 0 && lane < 4) {
            b->factor[place][column] = factor;
        }
    }
}

/* Makes scores relative to the references, and raises these if a weight would leave the range of
 * f16. `place` has what the outputs learn of it. No warp returns before all have their scores. */
template <int N>
static __device__ __forceinline__ void relate(struct score_state<N> &t, const struct mla_args &a,
                                              struct mla_weights *b, uint32_t place, bool begin)
{
    bool over = begin;
#pragma unroll
    for (int j = 0; j < N / 2; j++) {
        t.s[j] = fmaf(t.s[j], a.scale_log2, -t.m[j / 4 * 2 + j % 2]);
        over |= t.s[j] > LIMIT;
    }
    over = named_any(NAMED_S, 128, over);
    if (over) {
        raise(t, b, place, begin);
    }
    if (threadIdx.x % 128 == 0) {
        b->raised[place] = over && !begin;
    }
}

/* Clears values behind the sequence: they may be NaN, and 0 * NaN is not 0. */
static __device__ __forceinline__ void clear_tail(uint8_t *tile, int from)
{
    const int n = (TOKENS - from) * 8;
    for (int i = threadIdx.x % 128; i < n * P_BOX; i += 128) {
        *(uint4 *)(tile + i / n * BOX + from * 128 + i % n * 16) = make_uint4(0, 0, 0, 0);
    }
}

/* Makes weights of scores, sums them, and stores them as f16: N rows of 64 tokens, 128 bytes, with
 * the swizzle that the products expect. */
template <int N>
static __device__ __forceinline__ void weigh(struct score_state<N> &t, uint32_t p_at)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const uint32_t chunk = (uint32_t)((warp * 2 + lane / 8 % 2) ^ lane % 8);
    const uint32_t at = p_at + (lane / 16 * 8 + lane % 8) * 128 + chunk * 16;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        t.s[i] = ex2(t.s[i]);
        t.l[i / 4 * 2 + i % 2] += t.s[i];
    }
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) { /* tokens 0-7 and 8-15 of 8 columns, then of 8 more */
        const float *s = t.s + n * 4;
        const uint32_t p[4] = {pack2<__half>(s[0], s[1]), pack2<__half>(s[2], s[3]),
                               pack2<__half>(s[4], s[5]), pack2<__half>(s[6], s[7])};
        stmatrix4_t(at + n * (8 * 128), p);
    }
}

template <int N>
static __device__ __forceinline__ void store_sums(struct score_state<N> &t, struct mla_weights *b,
                                                  uint32_t place)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int c = 0; c < N / 4; c++) {
        float l = t.l[c];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
            l += __shfl_xor_sync(~0u, l, d);
        }
        if (lane < 4) {
            b->l[place][warp][c / 2 * 8 + lane * 2 + c % 2] = l;
            if (warp == 0) {
                b->m[place][c / 2 * 8 + lane * 2 + c % 2] = t.m[c];
            }
        }
    }
}

template <int N>
static __device__ __forceinline__ void score(const struct mla_args &a, struct walk w, uint8_t *smem,
                                             struct mla_shared *b)
{
    typedef shape<N> at;
    const uint32_t smem_at = smem_addr(smem);
    const bool leader = threadIdx.x % 32 == 0;
    struct ring r = {0, 0}, qr = {0, 0};
    struct score_state<N> t;
    for (; walk_piece(w); walk_next(a, w)) {
        const uint64_t q = wgmma_desc(smem_at + at::q_at + qr.at * at::q_bytes, 0, 1024);
#pragma unroll
        for (int c = 0; c < N / 4; c++) {
            t.m[c] = 0;
            t.l[c] = 0;
        }
        bar_wait(smem_addr(&b->q_full[qr.at]), qr.phase);
        for (int i = 0; i < w.n; i++) {
            const int base = (w.tile + i) * TOKENS;
            const uint32_t tile = r.at * TILE;
            scores(t, b, r, wgmma_desc(smem_at + tile, 0, 1024), q);
            if (i == w.n - 1 && leader) {
                bar_arrive(smem_addr(&b->q_empty[qr.at]));
            }
            if (base + TOKENS > w.s.len - w.s.n + 1) {
                mask(t, a, w, base, 0);
            }
            relate(t, a, &b->w, r.at, i == 0); /* now all warps have read the RoPE box */
            if (base + TOKENS > w.s.len) {
                clear_tail(smem + tile, w.s.len - base);
            }
            weigh(t, smem_at + tile + P_BOX * BOX);
            if (i == w.n - 1) {
                store_sums(t, &b->w, r.at);
            }
            fence_async_shared();
            __syncwarp();
            if (leader) {
                bar_arrive(smem_addr(&b->weighed[r.at]));
            }
            r.next(STAGES);
        }
        qr.next(at::q_stages);
    }
}

#endif
