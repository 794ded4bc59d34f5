/* CRC32C, in the fastest way that the processor has: carry-less products of 64 bytes at a time
 * (AVX-512 with VPCLMULQDQ), SSE4.2's instruction in three interleaved lanes, or a table. Lanes are
 * combined by multiplying by x^(8n) mod P, precomputed for one lane length. Any thread. */
#include "common/base/crc32c.h"

#include <stdbool.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define POLY 0x82f63b78u
/* Bytes of a lane. Three lanes hide the instruction's latency of three cycles. Wide lanes are in
 * different pages, and the processor prefetches in each of them (cold memory: 10 GB/s, not 7). */
#define LANE      1024u
#define LANE_WIDE 4096u
#define ROUND     (3 * LANE_WIDE)

static uint32_t table[256];
struct lane_shift { /* crc -> crc * x^(8*LANE), crc * x^(16*LANE) */
    uint32_t one[4][256], two[4][256];
};
static struct lane_shift shift_narrow, shift_wide;
static bool have_sse42;

/* Bytes that are d bits before other bytes have the same effect as their product with x^d mod P,
 * added to the later bytes. A product of 64 bits uses the low half with x^(d+32) and the high half
 * with x^(d-32): bits are reflected, so the first bits have the higher powers. A product of
 * reflected numbers is shifted by one (hence << 1 in fill_fold). */
#define FOLD_STEP 256u  /* distance over which one turn folds bytes */
#define STREAM    4096u /* bytes of one of the four streams of a wide turn */
static uint64_t fold_far[2], fold_near[2], fold_lane[2]; /* d = 8 * FOLD_STEP, 512, 128 */
static uint64_t fold_stream[3][2];                       /* d = 8 * STREAM * (1, 2, 3) */
static bool have_fold;

static uint32_t shift_by_zeros(uint32_t crc, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        crc = table[crc & 0xff] ^ (crc >> 8);
    }
    return crc;
}

/* Shifting is linear over GF(2): make a table for each byte of the register. */
static void fill_shift(uint32_t t[4][256], size_t n)
{
    uint32_t bit[32];
    for (int i = 0; i < 32; i++) {
        bit[i] = shift_by_zeros(1u << i, n);
    }
    for (int k = 0; k < 4; k++) {
        for (uint32_t v = 0; v < 256; v++) {
            uint32_t r = 0;
            for (int i = 0; i < 8; i++) {
                if (v >> i & 1) {
                    r ^= bit[8 * k + i];
                }
            }
            t[k][v] = r;
        }
    }
}

/* x^n mod P, reflected, times x. */
static uint64_t power(uint32_t n)
{
    uint32_t r = 0x80000000u;
    for (uint32_t i = 0; i < n; i++) {
        r = r & 1 ? POLY ^ (r >> 1) : r >> 1;
    }
    return (uint64_t)r << 1;
}

static void fill_fold(uint64_t k[2], uint32_t d)
{
    k[0] = power(d + 32);
    k[1] = power(d - 32);
}

void bt_crc32c_ways(int most)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    have_sse42 = most >= 1 && __builtin_cpu_supports("sse4.2");
    have_fold = most >= 2 && have_sse42 && __builtin_cpu_supports("avx512f") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq");
#else
    (void)most;
#endif
}

__attribute__((constructor)) static void crc32c_init(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) {
            c = c & 1 ? POLY ^ (c >> 1) : c >> 1;
        }
        table[i] = c;
    }
    fill_shift(shift_narrow.one, LANE);
    fill_shift(shift_narrow.two, 2 * LANE);
    fill_shift(shift_wide.one, LANE_WIDE);
    fill_shift(shift_wide.two, 2 * LANE_WIDE);
    bt_crc32c_ways(2);
#if defined(__x86_64__)
    fill_fold(fold_far, 8 * FOLD_STEP);
    fill_fold(fold_near, 512);
    fill_fold(fold_lane, 128);
    for (uint32_t i = 0; i < 3; i++) {
        fill_fold(fold_stream[i], 8 * STREAM * (i + 1));
    }
#endif
}

#if defined(__x86_64__)
static uint32_t shift(const uint32_t t[4][256], uint32_t c)
{
    return t[0][c & 0xff] ^ t[1][c >> 8 & 0xff] ^ t[2][c >> 16 & 0xff] ^ t[3][c >> 24];
}

static uint64_t load64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

#define CRC_HW __attribute__((target("sse4.2")))

CRC_HW static inline __attribute__((always_inline)) uint32_t
crc_lanes(uint32_t crc, const uint8_t *p, size_t lane, const struct lane_shift *s)
{
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < lane; i += 8) {
        a = __builtin_ia32_crc32di(a, load64(p + i));
        b = __builtin_ia32_crc32di(b, load64(p + lane + i));
        c = __builtin_ia32_crc32di(c, load64(p + 2 * lane + i));
    }
    return shift(s->two, (uint32_t)a) ^ shift(s->one, (uint32_t)b) ^ (uint32_t)c;
}

CRC_HW static uint32_t crc_hw(uint32_t crc, const uint8_t *p, size_t n)
{
    for (; n >= 3 * LANE_WIDE; p += 3 * LANE_WIDE, n -= 3 * LANE_WIDE) {
        crc = crc_lanes(crc, p, LANE_WIDE, &shift_wide);
    }
    for (; n >= 3 * LANE; p += 3 * LANE, n -= 3 * LANE) {
        crc = crc_lanes(crc, p, LANE, &shift_narrow);
    }
    uint64_t r = crc;
    for (; n >= 8; p += 8, n -= 8) {
        r = __builtin_ia32_crc32di(r, load64(p));
    }
    for (; n > 0; p++, n--) {
        r = __builtin_ia32_crc32qi((uint32_t)r, *p);
    }
    return (uint32_t)r;
}

#define FOLDING __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")))

FOLDING static inline __m512i fold(__m512i a, __m512i k, __m512i next)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, k, 0x00),
                                     _mm512_clmulepi64_epi128(a, k, 0x11), next, 0x96);
}

FOLDING static inline __m512i fold_by(const uint64_t k[2])
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)k));
}

/* What happens to the bytes meanwhile: nothing, a copy, or a copy that bypasses the cache (`to` is
 * aligned to 64 bytes then). */
typedef enum { KEEP, COPY, STREAM_OUT } crc_way_t;

FOLDING static inline __attribute__((always_inline)) __m512i take(const uint8_t *p, uint8_t *to,
                                                                  size_t at, crc_way_t way)
{
    __m512i v = _mm512_loadu_si512(p + at);
    if (way == COPY) {
        _mm512_storeu_si512(to + at, v);
    } else if (way == STREAM_OUT) {
        _mm512_stream_si512((__m512i *)(void *)(to + at), v);
    }
    return v;
}

/* Folds four streams of STREAM bytes at the same time. The processor prefetches only within a page,
 * and with several pages at once it prefetches more (cold memory: 19 GB/s instead of 13). in: the
 * folded value of the bytes before. Returns the folded value at the end. */
FOLDING static inline __attribute__((always_inline)) __m512i fold_wide(__m512i in, const uint8_t *p,
                                                                       uint8_t *to, crc_way_t way)
{
    __m512i near = fold_by(fold_near);
    __m512i a = _mm512_xor_si512(in, take(p, to, 0, way)), b = take(p, to, STREAM, way),
            c = take(p, to, 2 * STREAM, way), d = take(p, to, 3 * STREAM, way);
    for (size_t i = 64; i < STREAM; i += 64) {
        a = fold(a, near, take(p, to, i, way));
        b = fold(b, near, take(p, to, STREAM + i, way));
        c = fold(c, near, take(p, to, 2 * STREAM + i, way));
        d = fold(d, near, take(p, to, 3 * STREAM + i, way));
    }
    d = fold(a, fold_by(fold_stream[2]), d);
    d = fold(b, fold_by(fold_stream[1]), d);
    return fold(c, fold_by(fold_stream[0]), d);
}

/* The CRC of 512 bits of folded value and the n < 64 bytes behind them. */
FOLDING static uint32_t fold_end(__m512i d, const uint8_t *p, size_t n)
{
    __m128i lane = _mm_loadu_si128((const __m128i *)fold_lane), x = _mm512_castsi512_si128(d);
    __m128i rest[3] = {_mm512_extracti32x4_epi32(d, 1), _mm512_extracti32x4_epi32(d, 2),
                       _mm512_extracti32x4_epi32(d, 3)};
    for (int i = 0; i < 3; i++) {
        x = _mm_xor_si128(rest[i], _mm_xor_si128(_mm_clmulepi64_si128(x, lane, 0x00),
                                                 _mm_clmulepi64_si128(x, lane, 0x11)));
    }
    uint64_t r = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(x));
    r = _mm_crc32_u64(r, (uint64_t)_mm_extract_epi64(x, 1));
    return crc_hw((uint32_t)r, p, n);
}

/* n >= FOLD_STEP. Inlined for each way. */
FOLDING static inline __attribute__((always_inline)) uint32_t
crc_fold(uint32_t crc, const uint8_t *p, size_t n, uint8_t *to, crc_way_t way)
{
    __m512i far = fold_by(fold_far), near = fold_by(fold_near), d = _mm512_setzero_si512();
    __m512i in = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc));
    size_t at = 0;
    for (; way != STREAM_OUT && at + 4 * STREAM <= n; at += 4 * STREAM) {
        d = fold_wide(in, p + at, to + (way == KEEP ? 0 : at), way);
        in = fold(d, near, _mm512_setzero_si512());
    }
    if (at + FOLD_STEP <= n) {
        __m512i a = _mm512_xor_si512(in, take(p, to, at, way)), b = take(p, to, at + 64, way),
                c = take(p, to, at + 128, way);
        d = take(p, to, at + 192, way);
        for (at += FOLD_STEP; at + FOLD_STEP <= n; at += FOLD_STEP) {
            a = fold(a, far, take(p, to, at, way));
            b = fold(b, far, take(p, to, at + 64, way));
            c = fold(c, far, take(p, to, at + 128, way));
            d = fold(d, far, take(p, to, at + 192, way));
        }
        d = fold(fold(fold(a, near, b), near, c), near, d);
    }
    for (; at + 64 <= n; at += 64) {
        d = fold(d, near, take(p, to, at, way));
    }
    if (way != KEEP) {
        memcpy(to + at, p + at, n - at);
    }
    if (way == STREAM_OUT) {
        _mm_sfence();
    }
    return fold_end(d, p + at, n - at);
}

FOLDING static uint32_t crc_only(uint32_t crc, const uint8_t *p, size_t n)
{
    return crc_fold(crc, p, n, NULL, KEEP);
}

FOLDING static uint32_t crc_copy(uint32_t crc, uint8_t *to, const uint8_t *p, size_t n)
{
    return crc_fold(crc, p, n, to, COPY);
}

FOLDING static uint32_t crc_stream(uint32_t crc, uint8_t *to, const uint8_t *p, size_t n)
{
    return crc_fold(crc, p, n, to, STREAM_OUT);
}
#endif

uint32_t bt_crc32c(uint32_t crc, const void *data, size_t n)
{
    const uint8_t *p = data;
    crc = ~crc;
#if defined(__x86_64__)
    if (have_fold && n >= FOLD_STEP) {
        return ~crc_only(crc, p, n);
    }
    if (have_sse42) {
        return ~crc_hw(crc, p, n);
    }
#endif
    for (; n > 0; p++, n--) {
        crc = table[(crc ^ *p) & 0xff] ^ (crc >> 8);
    }
    return ~crc;
}

uint32_t bt_crc32c_copy(uint32_t crc, void *to, const void *from, size_t n)
{
#if defined(__x86_64__)
    if (have_fold && n >= FOLD_STEP) {
        return ~crc_copy(~crc, to, from, n);
    }
#endif
    const uint8_t *p = from;
    /* Memcpy finds these bytes in the cache, as the CRC has read them. */
    for (size_t at = 0, part; at < n; at += part) {
        part = n - at < ROUND ? n - at : ROUND;
        crc = bt_crc32c(crc, p + at, part);
        memcpy((uint8_t *)to + at, p + at, part);
    }
    return crc;
}

uint32_t bt_crc32c_stream(uint32_t crc, void *to, const void *from, size_t n)
{
#if defined(__x86_64__)
    size_t head = -(uintptr_t)to & 63;
    if (have_fold && n >= head + FOLD_STEP) {
        crc = bt_crc32c_copy(crc, to, from, head);
        return ~crc_stream(~crc, (uint8_t *)to + head, (const uint8_t *)from + head, n - head);
    }
#endif
    return bt_crc32c_copy(crc, to, from, n);
}
