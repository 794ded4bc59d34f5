/* Attention of kernels.h on AMX tiles. Queries, keys, values and probabilities are split into two
 * bf16 each (f16 KV exactly), and of the four products of parts the smallest is left out: some 16
 * bits remain. Softmax is online over tiles of 64 tokens at absolute multiples, so a row's result
 * does not depend on the block it is computed in. Pure; called from OpenMP threads. */
#include <immintrin.h>
#include <string.h>

#include "common/engine/cpu/kernels.h"

#define TILE 512  /* bf16 of one AMX tile, 16 x 32 */
#define PAIR 1024 /* a tile of hi parts and the one of lo parts behind it */
#define ROWS BT_CPU_AMX_ROWS
#define COLS BT_CPU_TILE

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")

#include "common/engine/cpu/avx512.h"

struct work {
    const struct bt_cpu_attn *a;
    uint32_t d, rows, row_tiles;
    uint16_t *q;    /* [row tile][d / 32] pairs */
    uint16_t *k;    /* [tokens / 16][d / 32] pairs */
    uint16_t *v;    /* [d / 16][tokens / 32] pairs */
    uint16_t *p;    /* [row tile][tokens / 32] pairs */
    float *s;       /* [ROWS][COLS] */
    float *o;       /* [ROWS][d] */
    float *m, *l;   /* [ROWS] */
    uint16_t *zero; /* [d] */
};

size_t bt_cpu_attn_amx_scratch(uint32_t d)
{
    size_t pairs = (size_t)ROWS / 16 * (d / 32) + COLS / 16 * (d / 32) + d / 16 * (COLS / 32) +
                   ROWS / 16 * (COLS / 32);
    return pairs * PAIR * 2 + ((size_t)ROWS * (COLS + d) + 2 * ROWS) * sizeof(float) + d * 2 + 64;
}

static void carve(struct work *w, const struct bt_cpu_attn *a)
{
    uint32_t d = a->head_dim;
    *w = (struct work){.a = a, .d = d, .rows = a->n * a->group};
    w->row_tiles = (w->rows + 15) / 16;
    w->q = a->scratch;
    w->k = w->q + (size_t)ROWS / 16 * (d / 32) * PAIR;
    w->v = w->k + (size_t)COLS / 16 * (d / 32) * PAIR;
    w->p = w->v + (size_t)d / 16 * (COLS / 32) * PAIR;
    w->s = (float *)(w->p + (size_t)ROWS / 16 * (COLS / 32) * PAIR);
    w->o = w->s + (size_t)ROWS * COLS;
    w->m = w->o + (size_t)ROWS * d;
    w->l = w->m + ROWS;
    w->zero = (uint16_t *)(w->l + ROWS);
    memset(w->zero, 0, d * sizeof(*w->zero));
}

/* 32 floats as a row of a hi tile and one of the lo tile behind it. */
static inline void split_row(__m512 x0, __m512 x1, uint16_t *to)
{
    __m512i hi = (__m512i)_mm512_cvtne2ps_pbh(x1, x0);
    __m512 r0 = _mm512_sub_ps(x0, bt_widen_bf16(_mm512_castsi512_si256(hi)));
    __m512 r1 = _mm512_sub_ps(x1, bt_widen_bf16(_mm512_extracti64x4_epi64(hi, 1)));
    _mm512_store_si512(to, hi);
    _mm512_store_si512(to + TILE, (__m512i)_mm512_cvtne2ps_pbh(r1, r0));
}

static void pack_q(struct work *w)
{
    const struct bt_cpu_attn *a = w->a;
    memset(w->q, 0, (size_t)w->row_tiles * (w->d / 32) * PAIR * sizeof(*w->q));
    for (uint32_t r = 0; r < w->rows; r++) {
        const float *q = a->q + r / a->group * a->q_stride + (size_t)(r % a->group) * w->d;
        uint16_t *to = w->q + (size_t)(r / 16) * (w->d / 32) * PAIR + (size_t)(r % 16) * 32;
        for (uint32_t i = 0; i < w->d / 32; i++) {
            split_row(_mm512_loadu_ps(q + i * 32), _mm512_loadu_ps(q + i * 32 + 16),
                      to + (size_t)i * PAIR);
        }
    }
}

/* Pointers to the tile's rows of a plane (K, or V behind it); behind the last token, to zeros. */
static void tile_rows(const struct work *w, uint32_t t0, uint32_t valid, size_t plane,
                      const uint16_t **rows)
{
    const struct bt_cpu_attn *a = w->a;
    for (uint32_t t = 0; t < COLS; t++) {
        uint32_t page = (t0 + t) / a->page_tokens, off = (t0 + t) % a->page_tokens;
        rows[t] = t < valid
                      ? (const uint16_t *)(a->kv + (size_t)(a->pages[page] - 1) * a->seg_bytes +
                                           a->head_off + plane) +
                            (size_t)off * w->d
                      : w->zero;
    }
}

/* 16 x 16 of 32 bits, transposed in place. */
static inline void transpose16(__m512i r[16])
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

/* Keys, tokens as columns: row i of a tile is dimensions 2i and 2i + 1 of 16 tokens. */
static void pack_k(struct work *w, const uint16_t *const *rows)
{
    uint16_t row[PAIR] __attribute__((aligned(64)));
    for (uint32_t t = 0; t < COLS; t += 16) {
        for (uint32_t i = 0; i < w->d / 32; i++) {
            __m512i hi[16], lo[16];
            for (int j = 0; j < 16; j++) {
                const __m256i *x = (const __m256i *)(rows[t + (uint32_t)j] + i * 32);
                split_row(_mm512_cvtph_ps(_mm256_loadu_si256(x)),
                          _mm512_cvtph_ps(_mm256_loadu_si256(x + 1)), row);
                hi[j] = _mm512_load_si512(row);
                lo[j] = _mm512_load_si512(row + TILE);
            }
            uint16_t *to = w->k + ((size_t)t / 16 * (w->d / 32) + i) * PAIR;
            transpose16(hi);
            transpose16(lo);
            for (int j = 0; j < 16; j++) {
                _mm512_store_si512(to + j * 32, hi[j]);
                _mm512_store_si512(to + TILE + j * 32, lo[j]);
            }
        }
    }
}

/* Values: row i of a tile is tokens 2i and 2i + 1 of 16 dimensions, in turns. */
static void pack_v(struct work *w, const uint16_t *const *rows)
{
    for (uint32_t t = 0; t < COLS; t += 2) {
        for (uint32_t c = 0; c < w->d; c += 16) {
            __m512 x0 = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(rows[t] + c)));
            __m512 x1 = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(rows[t + 1] + c)));
            __m256i h0 = (__m256i)_mm512_cvtneps_pbh(x0), h1 = (__m256i)_mm512_cvtneps_pbh(x1);
            __m256i l0 = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x0, bt_widen_bf16(h0)));
            __m256i l1 = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x1, bt_widen_bf16(h1)));
            uint16_t *to =
                w->v + ((size_t)c / 16 * (COLS / 32) + t / 32) * PAIR + (size_t)(t % 32) * 16;
            _mm512_store_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(h0),
                                                   _mm512_castps_si512(bt_widen_bf16(h1))));
            _mm512_store_si512(to + TILE, _mm512_or_si512(_mm512_cvtepu16_epi32(l0),
                                                          _mm512_castps_si512(bt_widen_bf16(l1))));
        }
    }
}

/* c[16 or 32 rows][32 columns] += x * y, of n steps of 32 each: hi hi, lo hi, hi lo. x1 NULL: 16
 * rows. */
static inline void product(const uint16_t *x0, const uint16_t *x1, const uint16_t *y0,
                           const uint16_t *y1, uint32_t n, float *c, size_t stride)
{
    size_t bytes = stride * sizeof(*c);
    _tile_loadd(0, c, bytes);
    _tile_loadd(1, c + 16, bytes);
    if (x1) {
        _tile_loadd(2, c + 16 * stride, bytes);
        _tile_loadd(3, c + 16 * stride + 16, bytes);
    }
    for (size_t i = 0; i < (size_t)n * PAIR; i += PAIR) {
        _tile_loadd(6, y0 + i, 64);
        _tile_loadd(7, y1 + i, 64);
        _tile_loadd(4, x0 + i, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (x1) {
            _tile_loadd(5, x1 + i, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            _tile_loadd(5, x1 + i + TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_loadd(5, x0 + i + TILE, 64);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(6, y0 + i + TILE, 64);
        _tile_loadd(7, y1 + i + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (x1) {
            _tile_loadd(5, x1 + i, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, bytes);
    _tile_stored(1, c + 16, bytes);
    if (x1) {
        _tile_stored(2, c + 16 * stride, bytes);
        _tile_stored(3, c + 16 * stride + 16, bytes);
    }
}

/* c [rows][32 * n_cols] += x (n steps a row tile) * y (n steps a column tile). */
static void multiply(const struct work *w, uint32_t first_tile, const uint16_t *x,
                     const uint16_t *y, uint32_t n, uint32_t n_cols, float *c, size_t stride)
{
    for (uint32_t r = first_tile; r < w->row_tiles; r += 2) {
        const uint16_t *x0 = x + (size_t)r * n * PAIR;
        const uint16_t *x1 = r + 1 < w->row_tiles ? x0 + (size_t)n * PAIR : NULL;
        for (uint32_t j = 0; j < n_cols; j++) {
            const uint16_t *y0 = y + (size_t)j * 2 * n * PAIR;
            product(x0, x1, y0, y0 + (size_t)n * PAIR, n, c + (size_t)r * 16 * stride + j * 32,
                    stride);
        }
    }
}

/* Scores of one row, of which [from, end) count, to probabilities in p's tiles; rescales the
 * output row. */
static void softmax_row(struct work *w, uint32_t r, uint32_t from, uint32_t end, float scale)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const float *s = w->s + (size_t)r * COLS;
    __m512 v[COLS / 16], max = _mm512_set1_ps(-1e30f), sum = _mm512_setzero_ps();
    for (uint32_t j = 0; j < COLS / 16; j++) {
        __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(j * 16)));
        __mmask16 ok = _mm512_cmplt_epu32_mask(at, _mm512_set1_epi32((int)end)) &
                       _mm512_cmpge_epu32_mask(at, _mm512_set1_epi32((int)from));
        v[j] = _mm512_mask_mul_ps(_mm512_set1_ps(-1e30f), ok, _mm512_load_ps(s + j * 16),
                                  _mm512_set1_ps(scale));
        max = _mm512_max_ps(v[j], max);
    }
    float m = _mm512_reduce_max_ps(max), old = w->m[r];
    m = old > m ? old : m;
    uint16_t *to = w->p + (size_t)(r / 16) * (COLS / 32) * PAIR + (size_t)(r % 16) * 32;
    for (uint32_t j = 0; j < COLS / 16; j += 2) {
        v[j] = bt_exp2(_mm512_sub_ps(v[j], _mm512_set1_ps(m)));
        v[j + 1] = bt_exp2(_mm512_sub_ps(v[j + 1], _mm512_set1_ps(m)));
        sum = _mm512_add_ps(_mm512_add_ps(sum, v[j]), v[j + 1]);
        split_row(v[j], v[j + 1], to + (size_t)j / 2 * PAIR);
    }
    if (m != old) {
        __m512 alpha = bt_exp2(_mm512_set1_ps(old - m));
        float *o = w->o + (size_t)r * w->d;
        w->l[r] *= _mm512_cvtss_f32(alpha);
        w->m[r] = m;
        for (uint32_t i = 0; i < w->d; i += 16) {
            _mm512_store_ps(o + i, _mm512_mul_ps(_mm512_load_ps(o + i), alpha));
        }
    }
    w->l[r] += _mm512_reduce_add_ps(sum);
}

/* One tile of 64 tokens from t0 on. */
static void attend(struct work *w, uint32_t t0, float scale)
{
    const struct bt_cpu_attn *a = w->a;
    const uint16_t *rows[COLS];
    uint32_t valid = BT_MIN(a->pos + a->n - t0, (uint32_t)COLS);
    uint32_t first = (t0 > a->pos ? t0 - a->pos : 0) * a->group, tile = first / 16;
    tile_rows(w, t0, valid, 0, rows);
    pack_k(w, rows);
    tile_rows(w, t0, valid, (size_t)a->page_tokens * w->d * 2, rows);
    pack_v(w, rows);
    memset(w->s + (size_t)tile * 16 * COLS, 0,
           (size_t)(w->row_tiles - tile) * 16 * COLS * sizeof(*w->s));
    multiply(w, tile, w->q, w->k, w->d / 32, COLS / 32, w->s, COLS);
    /* Rows that see nothing of the tile, and those behind the last, take part with zeros. */
    memset(w->p + (size_t)tile * (COLS / 32) * PAIR, 0, (COLS / 32) * PAIR * sizeof(*w->p));
    memset(w->p + (size_t)(w->row_tiles - 1) * (COLS / 32) * PAIR, 0,
           (COLS / 32) * PAIR * sizeof(*w->p));
    for (uint32_t r = first; r < w->rows; r++) {
        uint32_t q = a->pos + r / a->group;
        uint32_t from = a->window && q + 1 > a->window + t0 ? q + 1 - a->window - t0 : 0;
        softmax_row(w, r, from, BT_MIN(q + 1 - t0, (uint32_t)COLS), scale);
    }
    multiply(w, tile, w->p, w->v, COLS / 32, w->d / 32, w->o, w->d);
}

void bt_cpu_attn_amx(const struct bt_cpu_attn *a)
{
    struct work w;
    carve(&w, a);
    bt_packed_tile_config();
    memset(w.o, 0, (size_t)w.row_tiles * 16 * w.d * sizeof(*w.o));
    for (uint32_t r = 0; r < w.rows; r++) {
        w.m[r] = -1e30f;
        w.l[r] = 0;
    }
    pack_q(&w);
    /* Tiles that only some of the rows see are masked for the others: what those add is wiped by
     * the first score that counts, exactly, so where the block begins does not show. */
    uint32_t start = a->window && a->pos >= a->window ? a->pos - a->window + 1 : 0;
    for (uint32_t t0 = start / COLS * COLS; t0 < a->pos + a->n; t0 += COLS) {
        attend(&w, t0, a->scale * 1.44269504f);
    }
    _tile_release();
    for (uint32_t r = 0; r < w.rows; r++) {
        uint32_t row = a->out_row + r / a->group, col = a->out_col + r % a->group * w.d;
        uint16_t *out = (uint16_t *)a->out + bt_act_row(row, a->out_width);
        __m512 inv = _mm512_set1_ps(1.0f / w.l[r]);
        for (uint32_t i = 0; i < w.d; i += 32) {
            const float *o = w.o + (size_t)r * w.d + i;
            split_row(_mm512_mul_ps(_mm512_load_ps(o), inv),
                      _mm512_mul_ps(_mm512_load_ps(o + 16), inv), out + bt_act_col(col + i));
        }
    }
}

#pragma GCC pop_options
