/* Decode attention's inner part over e4m3 pages, in attn_decode.cu's place of take_tokens: values
 * become f16 in registers, as the products of mma.cuh take them.
 *   - ldmatrix moves pairs of bytes, so a thread gets other values of a row than from f16. A
 * product does not care in which order its inner dimension runs, so K's bytes stay as they come and
 * the query is loaded in that order; of V, a pair's even and odd dimension go to two products, and
 *     the output is put in order when it leaves the registers.
 *   - K's scale is applied to the score. V's belongs to the weight, which must fit f16: the running
 *     maximum is of score + log2(V's scale), so that no scaled weight exceeds 1. Sums of weights
 * are taken without that scale, against the same maximum, so that merging pieces is as for f16. */
#ifndef BT_CUDA_ATTN_DECODE_E4M3_CUH
#define BT_CUDA_ATTN_DECODE_E4M3_CUH

#include "common/engine/cuda/e4m3.cuh"
#include "common/engine/cuda/mma.cuh"

/* Bytes of a row in a box, and of 64 tokens' K and V. */
template <int D> struct e4m3_tile {
    static constexpr uint32_t row = D < 128 ? D : 128, half = 64 * 2 * row;
};

/* Where 16 bytes of a row lie: swizzled by the row, `c` counted over the whole row. */
template <int D> static __device__ __forceinline__ uint32_t e4m3_chunk(uint32_t c, uint32_t lane)
{
    if (D == 64) {
        return (c ^ lane % 8 / 2) * 16;
    }
    return c / 8 * e4m3_tile<D>::half + (c % 8 ^ lane % 8) * 16;
}

template <int D, int ROWS>
static __device__ __forceinline__ void load_q_e4m3(const __half *base, uint32_t group,
                                                   uint32_t (&q)[D / 16][4])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) { /* a thread's four bytes of K: two values, two values */
            int r = lane / 4 + i % 2 * 8, c = k * 16 + lane % 4 * 4 + i / 2 * 2;
            bool in = r < (int)group && (ROWS == 16 || i % 2 == 0);
            q[k][i] = in ? *(const uint32_t *)(base + (size_t)r * D + c) : 0;
        }
    }
}

/* The byte of token c0 + i % 2 of 8 tokens each, two loaded at once. */
static __device__ __forceinline__ uint32_t e4m3_scale_at(const uint8_t *s, int c0, int i)
{
    uint32_t two = *(const uint16_t *)(s + i / 2 * 8 + c0);
    return two >> i % 2 * 8 & 0xff;
}

/* For a token whose V is zero: low, so that it does not push the others' weights out of f16, and
 * not so low that the sum of weights, taken against it, could overflow. */
#define ZERO_SHIFT (-40.0f)

/* One warp's 16 tokens of a tile. lo, hi: the tokens of the 16 that count; k_scale, v_scale: the
 * first token's. w.m: the maximum, as a score. */
template <int D, int ROWS, class STATE>
static __device__ __forceinline__ void
take_tokens_e4m3(STATE &w, const uint32_t (&q)[D / 16][4], uint32_t k_at, uint32_t v_at,
                 const uint8_t *k_scale, const uint8_t *v_scale, int lo, int hi, float scale)
{
    constexpr uint32_t row = e4m3_tile<D>::row;
    int lane = threadIdx.x % 32, c0 = lane % 4 * 2;
    float s[2][2][4] = {}; /* [even and odd k][tokens 0-7, 8-15] */
    uint32_t k_row = k_at + (lane / 16 * 8 + lane % 8) * row;
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        uint32_t b[4];
        ldmatrix4(b, k_row + e4m3_chunk<D>(k * 2 + lane / 8 % 2, lane));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            mma16816<__half>(s[i % 2][i / 2], q[k * 2 + i % 2], e4m3_pair(b[i]),
                             e4m3_pair(b[i] >> 16));
        }
    }
    float vs[4], shift[4], ks[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int token = i / 2 * 8 + c0 + i % 2;
        bool in = token >= lo && token < hi;
        uint32_t e = in ? e4m3_scale_at(v_scale, c0, i) : 0;
        ks[i] = e4m3_scale_value(e4m3_scale_at(k_scale, c0, i));
        vs[i] = e4m3_scale_value(e);
        shift[i] = in ? e ? (float)((int)e - 127) : ZERO_SHIFT : -INFINITY;
    }
    uint32_t p[4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (r * 8 >= ROWS) {
            p[1] = p[3] = 0;
            break;
        }
        float v[4], mx = w.m[r] * scale; /* in powers of two from here on */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x = (s[0][i / 2][r * 2 + i % 2] + s[1][i / 2][r * 2 + i % 2]) * ks[i] * scale;
            v[i] = shift[i] == -INFINITY ? -INFINITY : x;
            mx = fmaxf(mx, v[i] + shift[i]);
        }
        mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 1));
        mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 2));
        if (__any_sync(~0u, mx > w.m[r] * scale)) {
            float f = w.m[r] == -INFINITY ? 0.0f : ex2(w.m[r] * scale - mx);
            w.l[r] *= f;
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                w.o[j][r * 2] *= f;
                w.o[j][r * 2 + 1] *= f;
            }
            w.m[r] = mx / scale;
        }
        float base = w.m[r] == -INFINITY ? 0.0f : w.m[r] * scale;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x = ex2(v[i] - base);
            w.l[r] += x;
            v[i] = x * vs[i];
        }
        p[r] = pack2<__half>(v[0], v[1]);
        p[r + 2] = pack2<__half>(v[2], v[3]);
    }
    /* What lies beyond the sequence may be NaN, and 0 * NaN is no zero. */
    uint32_t keep[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int t = h * 8 + c0;
        keep[h] =
            (t >= lo && t < hi ? 0xffffu : 0u) | (t + 1 >= lo && t + 1 < hi ? 0xffff0000u : 0u);
    }
    uint32_t v_row = v_at + (lane / 8 % 2 * 8 + lane % 8) * row;
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        uint32_t b[4];
        ldmatrix4_t(b, v_row + e4m3_chunk<D>(j * 2 + lane / 16, lane));
#pragma unroll
        for (int i = 0; i < 4; i++) { /* two tokens' two dimensions -> one dimension's two tokens */
            b[i] = __byte_perm(b[i] & keep[i % 2], 0, 0x3120);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            mma16816<__half>(w.o[(j * 2 + i) * 2], p, e4m3_pair(b[i * 2]), e4m3_pair(b[i * 2 + 1]));
            mma16816<__half>(w.o[(j * 2 + i) * 2 + 1], p, e4m3_pair(b[i * 2] >> 16),
                             e4m3_pair(b[i * 2 + 1] >> 16));
        }
    }
}

/* Four values of row r at 16-dimension block i, in order: dimensions 16 i + lane % 4 * 4 and on. */
template <class STATE>
static __device__ __forceinline__ float4 output_e4m3(const STATE &w, int i, int r)
{
    const float *even = w.o[i * 2] + r * 2, *odd = w.o[i * 2 + 1] + r * 2;
    return make_float4(even[0], odd[0], even[1], odd[1]);
}

#endif
