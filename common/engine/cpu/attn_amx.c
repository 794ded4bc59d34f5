/* Attention of kernels.h on AMX tiles, with transposed scores: K (64 tokens; a hi and a lo tile for
 * each 16 tokens and 32 dimensions) x Q^T (16 queries) -> S^T, then V^T x P^T -> O^T. Each query
 * has its own vector lane, so softmax needs no sums across lanes, and the vector code writes P^T in
 * the order that the next product needs. Queries, keys, values and probabilities are each split
 * into two bf16 parts (exact for f16 KV). Of the four products of parts the smallest is omitted,
 * which leaves about 16 bits. Softmax is computed online over tiles of 64 tokens that begin at
 * absolute multiples of 64, and all arithmetic is per lane, so a row's result does not depend on
 * the block it is computed in. Pure; called from OpenMP threads. */
#include <immintrin.h>
#include <string.h>

#include "common/engine/cpu/kernels.h"

#define TILE   512  /* bf16 of one AMX tile, 16 x 32 */
#define PAIR   1024 /* a tile of hi parts, followed by the tile of lo parts */
#define ROWS   BT_CPU_AMX_ROWS
#define TOKENS BT_CPU_TILE
#define STEPS  (TOKENS / 32) /* of V^T x P^T */
#define LANES  16
#define SCORES (TOKENS * LANES)
#define HALF   (TOKENS / 4) /* pairs of tokens in half a tile */

/* Scores are base-2 exponents. The running maximum changes only when a score exceeds it by SLACK:
 * so the output is rarely rescaled, and probabilities are at most 2^SLACK. */
#define SLACK 8.0f

#define ALWAYS __attribute__((always_inline))

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")

#include "common/engine/cpu/avx512.h"

struct work {
    const struct bt_cpu_attn *a;
    uint32_t d, vd, rows, cols; /* d: of K, vd: of V; cols: tiles of 16 queries */
    uint16_t *q;                /* [cols][d / 32] hi-lo pairs; a tile row holds two dimensions */
    uint16_t *k;                /* [tokens / 16][d / 32] pairs */
    uint16_t *v;                /* [vd / 16][tokens / 32] pairs */
    float *s;                   /* [cols][tokens][16 queries]; P^T overwrites it */
    float *o;                   /* [cols][vd][16] */
    float *m, *l;               /* [cols][16] */
    uint32_t *pos;              /* [cols][16] */
    uint16_t *zero;             /* [d] */
    uint16_t *wide;             /* [tokens][d]: latents as f16 */
};

size_t bt_cpu_attn_amx_scratch(uint32_t d, uint32_t vd)
{
    size_t pairs = (size_t)ROWS / LANES * (d / 32) + TOKENS / 16 * (d / 32) + vd / 16 * STEPS;
    size_t floats = (size_t)ROWS * (TOKENS + vd) + (size_t)3 * ROWS;
    return pairs * PAIR * sizeof(uint16_t) + floats * sizeof(float) +
           (size_t)(1 + TOKENS) * d * sizeof(uint16_t) + 64;
}

static void carve(struct work *w, const struct bt_cpu_attn *a)
{
    uint32_t d = a->head_dim, vd = a->v_dim;
    *w = (struct work){.a = a, .d = d, .vd = vd, .rows = a->n * a->group};
    w->cols = BT_DIV_UP(w->rows, (uint32_t)LANES);
    w->k = a->scratch;
    w->v = w->k + (size_t)TOKENS / 16 * (d / 32) * PAIR;
    w->s = (float *)(w->v + (size_t)vd / 16 * STEPS * PAIR);
    w->m = w->s + (size_t)ROWS * TOKENS;
    w->l = w->m + ROWS;
    w->pos = (uint32_t *)(w->l + ROWS);
    w->q = (uint16_t *)(w->pos + ROWS);
    w->o = (float *)(w->q + (size_t)ROWS / LANES * (d / 32) * PAIR);
    w->zero = (uint16_t *)(w->o + (size_t)ROWS * vd);
    w->wide = w->zero + d;
    memset(w->zero, 0, d * sizeof(*w->zero));
}

struct parts { /* bf16 pairs: lane i has x0[i] in the low half, x1[i] in the high half */
    __m512i hi, lo;
};

/* hi is rounded. lo, the remainder of either sign, is cut off: less than 2^-16 of the number is
 * lost. */
static inline struct parts split(__m512 x0, __m512 x1)
{
    const __m512i half = _mm512_set1_epi32(0x8000), top = _mm512_set1_epi32((int)0xffff0000);
    __m512i h0 = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x0), half), top);
    __m512i h1 = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x1), half), top);
    __m512i l0 = _mm512_castps_si512(_mm512_sub_ps(x0, _mm512_castsi512_ps(h0)));
    __m512i l1 = _mm512_castps_si512(_mm512_sub_ps(x1, _mm512_castsi512_ps(h1)));
    return (struct parts){
        .hi = _mm512_or_si512(_mm512_srli_epi32(h0, 16), h1),
        .lo = _mm512_ternarylogic_epi32(_mm512_srli_epi32(l0, 16), l1, top, 0xf8), /* a | b & c */
    };
}

static inline void store_parts(uint16_t *to, struct parts x)
{
    _mm512_store_si512(to, x.hi);
    _mm512_store_si512(to + TILE, x.lo);
}

/* Packs queries times scale, one query per lane; a tile row holds dimensions i and 16 + i of 32. */
static void pack_q(struct work *w, float scale)
{
    const struct bt_cpu_attn *a = w->a;
    for (uint32_t c = 0; c < w->cols; c++) {
        for (uint32_t i = 0; i < w->d / 32; i++) {
            uint16_t *to = w->q + ((size_t)c * (w->d / 32) + i) * PAIR;
            __m512i hi[LANES], lo[LANES];
            for (uint32_t j = 0; j < LANES; j++) {
                /* Padding lanes repeat the last row. */
                uint32_t r = BT_MIN(c * LANES + j, w->rows - 1);
                const float *q =
                    a->q + r / a->group * a->q_stride + (size_t)(r % a->group) * w->d + i * 32;
                struct parts x =
                    split(_mm512_mul_ps(_mm512_loadu_ps(q), _mm512_set1_ps(scale)),
                          _mm512_mul_ps(_mm512_loadu_ps(q + 16), _mm512_set1_ps(scale)));
                hi[j] = x.hi;
                lo[j] = x.lo;
            }
            bt_transpose16(hi);
            bt_transpose16(lo);
            for (uint32_t j = 0; j < LANES; j++) {
                store_parts(to + j * 32, (struct parts){.hi = hi[j], .lo = lo[j]});
            }
        }
    }
}

static inline __m512 load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static void pack_k(struct work *w, const uint16_t *const *rows)
{
    for (uint32_t t = 0; t < TOKENS; t++) {
        uint16_t *to = w->k + (size_t)t / 16 * (w->d / 32) * PAIR + (size_t)(t % 16) * 32;
        for (uint32_t i = 0; i < w->d / 32; i++) {
            const uint16_t *k = rows[t] + i * 32;
            store_parts(to + (size_t)i * PAIR, split(load_f16(k), load_f16(k + 16)));
        }
    }
}

/* Packs values with dimensions as rows; a pair holds tokens i and 16 + i of 32. */
static void pack_v(struct work *w, const uint16_t *const *rows)
{
    for (uint32_t step = 0; step < STEPS; step++) {
        for (uint32_t c = 0; c < w->vd / 16; c++) {
            uint16_t *to = w->v + ((size_t)c * STEPS + step) * PAIR;
            __m512i hi[16], lo[16];
            for (uint32_t j = 0; j < 16; j++) {
                struct parts x = split(load_f16(rows[step * 32 + j] + c * 16),
                                       load_f16(rows[step * 32 + 16 + j] + c * 16));
                hi[j] = x.hi;
                lo[j] = x.lo;
            }
            bt_transpose16(hi);
            bt_transpose16(lo);
            for (uint32_t j = 0; j < 16; j++) {
                store_parts(to + j * 32, (struct parts){.hi = hi[j], .lo = lo[j]});
            }
        }
    }
}

/* The mask of those of 16 queries that see token t: from position t to window - 1 positions behind
 * it; none if t is before the first. */
static inline __mmask16 sees(const struct work *w, __m512i pos, uint32_t t)
{
    __m512i at = _mm512_set1_epi32((int)t);
    __mmask16 ok = t < w->a->first ? 0 : _mm512_cmple_epu32_mask(at, pos);
    if (w->a->window) {
        __m512i end = _mm512_set1_epi32((int)(t + w->a->window));
        ok &= _mm512_cmplt_epu32_mask(pos, end);
    }
    return ok;
}

/* State while the scores of a column become probabilities. */
struct soft {
    float *s;             /* [tokens][16] */
    uint32_t at, end, t0; /* pairs of tokens; the tile's first token */
    __m512i pos;          /* positions of the queries, for a tile that is partly masked */
    __m512 m, sum0, sum1;
};

/* Converts the next n pairs of tokens (t and 16 + t of 32) to tiles of P^T: of these 32 rows of
 * scores hi replaces the first 16, lo the other 16. */
static inline ALWAYS void soft_some(const struct work *w, struct soft *f, bool masked, uint32_t n)
{
    for (uint32_t end = BT_MIN(f->at + n, f->end); f->at < end; f->at++) {
        uint32_t t = f->at / 16 * 32 + f->at % 16;
        float *s = f->s + (size_t)t * LANES;
        __m512 x0 = bt_exp2(_mm512_sub_ps(_mm512_load_ps(s), f->m));
        __m512 x1 = bt_exp2(_mm512_sub_ps(_mm512_load_ps(s + 16 * LANES), f->m));
        if (masked) {
            x0 = _mm512_maskz_mov_ps(sees(w, f->pos, f->t0 + t), x0);
            x1 = _mm512_maskz_mov_ps(sees(w, f->pos, f->t0 + t + 16), x1);
        }
        f->sum0 = _mm512_add_ps(f->sum0, x0);
        f->sum1 = _mm512_add_ps(f->sum1, x1);
        struct parts x = split(x0, x1);
        _mm512_store_si512(s, x.hi);
        _mm512_store_si512(s + 16 * LANES, x.lo);
    }
}

/* Returns whether a query of column c can see a token of the tile's second half. If not, that half
 * is skipped. The mask applies the window. */
static inline bool two_halves(const struct work *w, uint32_t c, uint32_t t0)
{
    return w->pos[(size_t)c * LANES + LANES - 1] >= t0 + TOKENS / 2;
}

/* Two accumulators (T, U) += the row tiles x0, x1 times the column tile in 6 (hi) and 7 (lo):
 * hi hi, hi lo, lo hi. Softmax code runs between the products, so that tile and vector units work
 * at the same time. */
#define GROUP(T, U, x0, x1)                                                                        \
    do {                                                                                           \
        _tile_loadd(4, x0, 64);                                                                    \
        _tile_loadd(5, x1, 64);                                                                    \
        _tile_dpbf16ps(T, 4, 6);                                                                   \
        _tile_dpbf16ps(U, 5, 6);                                                                   \
        soft_some(w, f, masked, per);                                                              \
        _tile_dpbf16ps(T, 4, 7);                                                                   \
        _tile_dpbf16ps(U, 5, 7);                                                                   \
        _tile_loadd(4, (x0) + TILE, 64);                                                           \
        _tile_loadd(5, (x1) + TILE, 64);                                                           \
        soft_some(w, f, masked, per);                                                              \
        _tile_dpbf16ps(T, 4, 6);                                                                   \
        _tile_dpbf16ps(U, 5, 6);                                                                   \
    } while (0)

/* S^T of column c. */
static inline ALWAYS void scores(const struct work *w, uint32_t c, struct soft *f, bool masked,
                                 uint32_t per)
{
    uint32_t n = w->d / 32;
    const uint16_t *q = w->q + (size_t)c * n * PAIR, *k = w->k;
    size_t row = (size_t)n * PAIR;
    float *s = w->s + (size_t)c * SCORES;
    bool two = two_halves(w, c, f->t0);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t i = 0; i < n; i++, q += PAIR, k += PAIR) {
        _tile_loadd(6, q, 64);
        _tile_loadd(7, q + TILE, 64);
        GROUP(0, 1, k, k + row);
        if (two) {
            GROUP(2, 3, k + 2 * row, k + 3 * row);
        }
    }
    _tile_stored(0, s, 64);
    _tile_stored(1, s + 16 * LANES, 64);
    if (two) {
        _tile_stored(2, s + 32 * LANES, 64);
        _tile_stored(3, s + 48 * LANES, 64);
    }
}

/* O^T of column c += V^T x P^T, 32 dimensions at a time. */
static inline ALWAYS void values(const struct work *w, uint32_t c, struct soft *f, bool masked,
                                 uint32_t per)
{
    const uint16_t *p = (const uint16_t *)(w->s + (size_t)c * SCORES), *v = w->v;
    float *o = w->o + (size_t)c * w->vd * LANES;
    uint32_t steps = two_halves(w, c, f->t0) ? STEPS : 1;
    for (uint32_t i = 0; i < w->vd; i += 32, o += 32 * LANES, v += 2 * STEPS * PAIR) {
        _tile_loadd(0, o, 64);
        _tile_loadd(1, o + 16 * LANES, 64);
        for (uint32_t step = 0; step < steps; step++) {
            _tile_loadd(6, p + step * PAIR, 64);
            _tile_loadd(7, p + step * PAIR + TILE, 64);
            GROUP(0, 1, v + step * PAIR, v + (STEPS + step) * PAIR);
        }
        _tile_stored(0, o, 64);
        _tile_stored(1, o + 16 * LANES, 64);
    }
}

/* Sets the maxima for column c's probabilities; rescales its O^T and sums if they have changed. */
static inline ALWAYS void soft_begin(struct work *w, uint32_t c, bool masked, struct soft *f)
{
    const __m512 least = _mm512_set1_ps(-1e30f);
    __m512 max[4] = {least, least, least, least};
    uint32_t tokens = two_halves(w, c, f->t0) ? TOKENS : TOKENS / 2;
    for (uint32_t t = 0; t < tokens; t += 4) {
        for (uint32_t j = 0; j < 4; j++) {
            __m512 x = _mm512_load_ps(f->s + (size_t)(t + j) * LANES);
            max[j] = masked ? _mm512_mask_max_ps(max[j], sees(w, f->pos, f->t0 + t + j), x, max[j])
                            : _mm512_max_ps(x, max[j]);
        }
    }
    __m512 old = _mm512_load_ps(w->m + (size_t)c * LANES);
    __m512 top = _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
    __mmask16 above =
        _mm512_cmp_ps_mask(top, _mm512_add_ps(old, _mm512_set1_ps(SLACK)), _CMP_NLE_UQ);
    f->m = _mm512_mask_mov_ps(old, above, top);
    if (above) {
        __m512 alpha = bt_exp2(_mm512_sub_ps(old, f->m));
        float *o = w->o + (size_t)c * w->vd * LANES, *l = w->l + (size_t)c * LANES;
        _mm512_store_ps(l, _mm512_mul_ps(_mm512_load_ps(l), alpha));
        _mm512_store_ps(w->m + (size_t)c * LANES, f->m);
        for (uint32_t i = 0; i < w->vd; i++, o += LANES) {
            _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), alpha));
        }
    }
}

/* Half of column c's softmax, first or second, mixed with tile products: the first half with the
 * scores of the next column, the second half with the values of the previous column. */
static inline ALWAYS void half(struct work *w, uint32_t c, uint32_t first, struct soft *f,
                               bool masked, bool second)
{
    /* Pairs for each call between tile products. */
    uint32_t per = BT_MAX(HALF / (w->d / 32 * 4), 1u);
    float *l = w->l + (size_t)c * LANES;
    f->s = w->s + (size_t)c * SCORES;
    f->at = second ? HALF : 0;
    f->end = second && !two_halves(w, c, f->t0) ? HALF : f->at + HALF;
    f->sum0 = f->sum1 = _mm512_setzero_ps();
    if (second) {
        f->m = _mm512_load_ps(w->m + (size_t)c * LANES);
        if (c > first) {
            values(w, c - 1, f, masked, per);
        }
    } else {
        soft_begin(w, c, masked, f);
        if (c + 1 < w->cols) {
            scores(w, c + 1, f, masked, per);
        }
    }
    soft_some(w, f, masked, HALF);
    _mm512_store_ps(l, _mm512_add_ps(_mm512_load_ps(l), _mm512_add_ps(f->sum0, f->sum1)));
}

static void column(struct work *w, uint32_t c, uint32_t first, uint32_t t0, bool second)
{
    const uint32_t *pos = w->pos + (size_t)c * LANES;
    uint32_t window = w->a->window;
    struct soft f = {.t0 = t0, .pos = _mm512_load_si512(pos)};
    bool all =
        pos[0] >= t0 + TOKENS - 1 && (!window || pos[LANES - 1] < t0 + window) && t0 >= w->a->first;
    if (all && second) {
        half(w, c, first, &f, false, true);
    } else if (all) {
        half(w, c, first, &f, false, false);
    } else if (second) {
        half(w, c, first, &f, true, true);
    } else {
        half(w, c, first, &f, true, false);
    }
}

/* One tile of 64 tokens from t0 on: first all scores, while K is in the L1 cache, then V. */
static void attend(struct work *w, uint32_t t0)
{
    const struct bt_cpu_attn *a = w->a;
    const uint16_t *rows[TOKENS];
    uint32_t valid = BT_MIN(a->pos + a->n - t0, (uint32_t)TOKENS);
    uint32_t first = (t0 > a->pos ? t0 - a->pos : 0) * a->group / LANES;
    struct soft none = {.t0 = t0};
    bt_cpu_tile_rows(a, t0, valid, a->k_off, w->zero, w->wide, rows);
    pack_k(w, rows);
    scores(w, first, &none, false, 0);
    for (uint32_t c = first; c < w->cols; c++) {
        column(w, c, first, t0, false);
    }
    if (a->v_off != a->k_off) {
        bt_cpu_tile_rows(a, t0, valid, a->v_off, w->zero, w->wide, rows);
    }
    pack_v(w, rows);
    for (uint32_t c = first; c < w->cols; c++) {
        column(w, c, first, t0, true);
    }
    values(w, w->cols - 1, &none, false, 0);
}

/* Writes O^T / l to rows of act. */
static void finish(const struct work *w)
{
    const struct bt_cpu_attn *a = w->a;
    for (uint32_t c = 0; c < w->cols; c++) {
        const float *o = w->o + (size_t)c * w->vd * LANES;
        __m512 inv = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(w->l + (size_t)c * LANES));
        for (uint32_t i = 0; i < w->vd; i += 16, o += 16 * LANES) {
            __m512i x[16];
            for (uint32_t j = 0; j < 16; j++) {
                x[j] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(o + j * LANES), inv));
            }
            bt_transpose16(x);
            for (uint32_t j = 0; j < BT_MIN(w->rows - c * LANES, (uint32_t)LANES); j++) {
                uint32_t r = c * LANES + j, head = r % a->group;
                uint32_t col = a->out_col + head * a->out_step + i;
                uint16_t *to = a->out + head * a->out_next +
                               bt_act_row(a->out_row + r / a->group, a->out_width, 2) +
                               bt_act_col(col, 2);
                __m512 v = _mm512_castsi512_ps(x[j]);
                __m256i hi = (__m256i)_mm512_cvtneps_pbh(v);
                __m512 rest = _mm512_sub_ps(v, bt_widen_bf16(hi));
                _mm256_store_si256((__m256i *)to, hi);
                _mm256_store_si256((__m256i *)(to + BT_ACT_LO), (__m256i)_mm512_cvtneps_pbh(rest));
            }
        }
    }
}

void bt_cpu_attn_amx(const struct bt_cpu_attn *a)
{
    struct work w;
    carve(&w, a);
    bt_packed_tile_config();
    memset(w.o, 0, (size_t)w.cols * LANES * w.vd * sizeof(*w.o));
    for (uint32_t r = 0; r < w.cols * LANES; r++) {
        w.m[r] = -1e30f;
        w.l[r] = 0;
        w.pos[r] = a->pos + r / a->group;
    }
    pack_q(&w, a->scale * 1.44269504f);
    /* Tiles that only some of the rows see add exact zeros to the other rows. So the result does
     * not depend on where the block begins. */
    uint32_t start = a->window && a->pos >= a->window ? a->pos - a->window + 1 : 0;
    for (uint32_t t0 = start / TOKENS * TOKENS; t0 < a->pos + a->n; t0 += TOKENS) {
        attend(&w, t0);
    }
    _tile_release();
    finish(&w);
}

#pragma GCC pop_options
