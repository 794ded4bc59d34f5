/* Arithmetic on AVX-512 vectors that products and attention share. To be included where GCC's
 * target has avx512f, avx512dq and avx512bf16. Pure. */
#ifndef BT_ENGINE_CPU_AVX512_H
#define BT_ENGINE_CPU_AVX512_H

#include <immintrin.h>

static inline __m512 bt_widen_bf16(__m256i bf16)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

/* 2^x by x = n + f, 0 <= f < 1, and a polynomial of least relative error for 2^f (below 1.5e-7; 1
 * at 0). 0 for x below -150, infinity above 128. */
static inline __m512 bt_exp2(__m512 x)
{
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(1.867130050e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.017030708e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.579991266e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.401644439e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931512952e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x); /* by 2^floor(x) */
}

/* 16 x 16 of 32 bits, transposed in place. */
static inline void bt_transpose16(__m512i r[16])
{
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) { /* r[4g + i]: columns i, 4 + i, 8 + i, 12 + i of rows 4g.. */
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

#endif
