/* Decode attention's inner part over e4m3 pages; decode.cuh uses it in place of take_tokens. Values
 * become f16 in registers, as the products of mma.cuh need them.
 *   - ldmatrix moves pairs of bytes, so a thread gets other values of a row than from f16. A
 *     product may run over its inner dimension in any order. So K's bytes stay as they are, and the
 *     query is loaded in the same order: a thread's four bytes of K are two pairs of values. Of V,
 * the even dimensions of the pairs are the first 8 rows of a product and the odd ones the last 8;
 * the output is put in order when it is written.
 *   - K's scale is applied to the score. V's scale belongs to the weight, which must fit f16: so
 *     the reference of the weights is that of score + log2(V's scale). Sums of weights are taken
 *     without that scale but with the same reference, so that pieces are merged as for f16. */
#ifndef BT_CUDA_ATTN_DECODE_E4M3_CUH
#define BT_CUDA_ATTN_DECODE_E4M3_CUH

#include "common/engine/cuda/attention/decode_warp.cuh"
#include "common/engine/cuda/e4m3.cuh"

/* Bytes of a row in a box, and of K and V of 64 tokens in half a row. */
template <int D> struct e4m3_tile {
    static constexpr uint32_t row = D < 128 ? D : 128, half = 64 * 2 * row;
};

/* The place of 16 bytes of a row: swizzled by the row; `c` counts over the whole row. */
template <int D> static __device__ __forceinline__ uint32_t e4m3_chunk(uint32_t c, uint32_t lane)
{
    if (D == 64) {
        return (c ^ lane % 8 / 2) * 16;
    }
    return c / 8 * e4m3_tile<D>::half + (c % 8 ^ lane % 8) * 16;
}

/* The shift of a token whose V is zero. It is low, so that the token does not push other weights
 * out of f16's range, but not so low that the sum of weights could overflow against it. */
#define ZERO_SHIFT (-40.0f)

/* One warp's 16 tokens of a tile. lo, hi, unseen, lo_of_any: as take_tokens; k_scale, v_scale: the
 * first token's. */
template <int D, int ROWS>
static __device__ __forceinline__ void
take_tokens_e4m3(struct warp_state<D, ROWS> &w, const uint32_t (&q)[D / 16][ROWS / 8][2],
                 const int (&unseen)[ROWS / 8][2], uint32_t k_at, uint32_t v_at,
                 const uint8_t *k_scale, const uint8_t *v_scale, int lo, int hi, int lo_of_any,
                 float scale)
{
    constexpr uint32_t row = e4m3_tile<D>::row;
    const int lane = threadIdx.x % 32, token = lane / 4;
    const uint32_t of_lane = (lane / 8 % 2 * 8 + lane % 8) * row;
    float s[2][ROWS / 8][4] = {}, x[ROWS / 8][4]; /* [even and odd 16 dimensions] */
    uint32_t p[ROWS / 8][2], v[D / 32][4], e[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        e[0][i] = k_scale[token + i * 8];
        e[1][i] = v_scale[token + i * 8];
    }
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        uint32_t b[4]; /* tokens 0-7, 8-15 of 16 dimensions, and of the next 16 */
        ldmatrix4(b, k_at + of_lane + e4m3_chunk<D>(k * 2 + lane / 16, lane));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t a[4] = {e4m3_pair(b[i * 2]), e4m3_pair(b[i * 2 + 1]),
                                   e4m3_pair(b[i * 2] >> 16), e4m3_pair(b[i * 2 + 1] >> 16)};
#pragma unroll
            for (int n = 0; n < ROWS / 8; n++) {
                mma16816<__half>(s[i][n], a, q[k * 2 + i][n][0], q[k * 2 + i][n][1]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < D / 32; j++) { /* loaded while the weights are computed */
        ldmatrix4_t(v[j], v_at + of_lane + e4m3_chunk<D>(j * 2 + lane / 16, lane));
    }
    float by[2], shift[2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
        bool in = token + t * 8 >= lo_of_any && token + t * 8 < hi;
        float f = e4m3_scale_value(e[0][t]) * scale;
        by[t] = in ? e4m3_scale_value(e[1][t]) : 0.0f;
        shift[t] = e[1][t] ? (float)((int)e[1][t] - 127) : ZERO_SHIFT;
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int at = token + t * 8 + unseen[n][i];
                float v = (s[0][n][t * 2 + i] + s[1][n][t * 2 + i]) * f;
                x[n][t * 2 + i] = at >= lo && at < hi ? v : -INFINITY;
            }
        }
    }
    raise_reference(w, x, shift);
    weigh<__half>(w, x, by, p);
    if (lo_of_any > 0 || hi < 16) { /* the same for the whole warp */
        uint32_t keep[2];
        keep_tokens(lo_of_any, hi, keep);
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) { /* a pair of bytes belongs to one token */
                v[j][i] &= keep[i % 2];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
        uint32_t b[2]; /* from two dimensions of each of two tokens to two tokens of each
                          dimension */
        b[0] = __byte_perm(v[j / 2][j % 2 * 2], 0, 0x3120);
        b[1] = __byte_perm(v[j / 2][j % 2 * 2 + 1], 0, 0x3120);
        const uint32_t a[4] = {e4m3_pair(b[0]), e4m3_pair(b[0] >> 16), e4m3_pair(b[1]),
                               e4m3_pair(b[1] >> 16)};
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            mma16816<__half>(w.o[j][n], a, p[n][0], p[n][1]);
        }
    }
}

#endif
