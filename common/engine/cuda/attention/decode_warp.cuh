/* A decode warp's state, and its softmax over 16 tokens. Device code only.
 * Products have KV as their first operand (tokens or dimensions are the 16 rows), and query heads
 * as the 8 columns, so a group of up to 8 heads wastes no rows. Of the scores a thread holds tokens
 * lane / 4 and lane / 4 + 8 for two heads; of the output it holds two dimensions for the same two
 * heads, so nothing moves between threads when the output is scaled. Arrays over groups of eight
 * heads have [ROWS / 8]. Scores are base-2 exponents. */
#ifndef BT_CUDA_ATTN_DECODE_WARP_CUH
#define BT_CUDA_ATTN_DECODE_WARP_CUH

#include "common/engine/cuda/mma.cuh"

template <int D, int ROWS> struct warp_state {
    float o[D / 16][ROWS / 8][4]; /* [16 dimensions]: {row lane / 4, that + 8} x {head, head + 1} */
    float m[ROWS / 8][2], l[ROWS / 8][2]; /* weights are 2^(score - m); l: the sum over this
                                             thread's tokens */
};

template <int D, int ROWS>
static __device__ __forceinline__ void clear_state(struct warp_state<D, ROWS> &w)
{
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        w.m[n][0] = w.m[n][1] = -INFINITY;
        w.l[n][0] = w.l[n][1] = 0;
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            w.o[j][n][0] = w.o[j][n][1] = w.o[j][n][2] = w.o[j][n][3] = 0;
        }
    }
}

/* The reference m is at most 8 below the maximum. Raising it rescales the whole output and
 * exchanges values among eight threads, so it is raised only when a weight would exceed 2^8, which
 * is well inside f16. */
#define RAISE_AT 8.0f

/* x: scores, -inf where a token does not count; shift[token]: log2 of a later factor of the weight,
 * which counts for m. */
template <int D, int ROWS>
static __device__ __forceinline__ void raise_reference(struct warp_state<D, ROWS> &w,
                                                       const float (&x)[ROWS / 8][4],
                                                       const float (&shift)[2])
{
    bool any = false;
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            any |= x[n][i] + shift[i / 2] > w.m[n][i % 2] + RAISE_AT;
        }
    }
    if (!__any_sync(~0u, any)) {
        return;
    }
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = fmaxf(w.m[n][h], fmaxf(x[n][h] + shift[0], x[n][2 + h] + shift[1]));
#pragma unroll
            for (int d = 4; d < 32; d *= 2) {
                top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            }
            float f = w.m[n][h] == -INFINITY ? 0.0f : ex2(w.m[n][h] - top);
            w.m[n][h] = top;
            w.l[n][h] *= f;
#pragma unroll
            for (int j = 0; j < D / 16; j++) {
                w.o[j][n][h] *= f;
                w.o[j][n][2 + h] *= f;
            }
        }
    }
}

/* Weights of 16 tokens, multiplied by by[token], as the second operand of the product with V. */
template <class T, int D, int ROWS>
static __device__ __forceinline__ void weigh(struct warp_state<D, ROWS> &w,
                                             const float (&x)[ROWS / 8][4], const float (&by)[2],
                                             uint32_t (&p)[ROWS / 8][2])
{
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float m = w.m[n][i % 2], v = ex2(x[n][i] - (m == -INFINITY ? 0.0f : m));
            w.l[n][i % 2] += v;
            y[i] = v * by[i / 2];
        }
        p[n][0] = transpose8(pack2<T>(y[0], y[1]));
        p[n][1] = transpose8(pack2<T>(y[2], y[3]));
    }
}

/* Bit masks that keep tokens [lo, hi) of 16, in pairs (lane % 4 * 2, + 1) of the first and the last
 * 8. Values beyond a sequence may be NaN, and 0 * NaN is not 0. */
static __device__ __forceinline__ void keep_tokens(int lo, int hi, uint32_t (&keep)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int t = h * 8 + threadIdx.x % 4 * 2;
        keep[h] =
            (t >= lo && t < hi ? 0xffffu : 0u) | (t + 1 >= lo && t + 1 < hi ? 0xffff0000u : 0u);
    }
}

#endif
