/* The two kernels of packed.h: AVX512-BF16 and AMX. Pure functions on caller memory. */
#include <immintrin.h>
#include <string.h>

#include "common/engine/cpu/packed_priv.h"

#define ALWAYS         __attribute__((always_inline))
#define PREFETCH_TILES 6
#define EMIT_ROWS      4 /* rows of results written at each step of the next product */
#define LINE           64

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")

#include "common/engine/cpu/avx512.h"

/* The variant that a kernel is compiled for: its fields are constants in the kernel. */
struct kind {
    uint32_t acts;
    bt_packed_out_t out;
};

static inline __mmask16 panel_mask(const struct bt_packed *p, uint32_t panel)
{
    if (panel * BT_PANEL_COLS >= p->n) {
        return 0;
    }
    uint32_t left = p->n - panel * BT_PANEL_COLS;
    return left >= BT_PANEL_COLS ? 0xffff : (__mmask16)((1u << left) - 1);
}

/* Columns 16 i .. 16 i + 15 of a row of the SwiGLU output, which is an act. */
static inline ALWAYS uint16_t *act_at(const struct bt_packed_job *b, struct kind k, uint32_t row,
                                      uint32_t i)
{
    return (uint16_t *)b->dst + bt_act_row(row, b->p->n / 2, k.acts) +
           bt_act_col(i * BT_PANEL_COLS, k.acts);
}

static inline ALWAYS void emit_swiglu(const struct bt_packed_job *b, struct kind k, uint32_t row,
                                      uint32_t panel, __m512 g, __m512 up)
{
    if (panel >= b->p->panels) {
        return;
    }
    uint16_t *to = act_at(b, k, row, panel / 2);
    bool last = panel + 2 == b->p->panels && panel / 2 % 2 == 0; /* the output's last tile is only
                                                                    half full */
    __m512 e = bt_exp2(_mm512_mul_ps(g, _mm512_set1_ps(-1.44269504f)));
    __m512 x = _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e)), up);
    __m256i hi = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_store_si256((__m256i *)to, hi);
    if (last) {
        _mm256_store_si256((__m256i *)(to + 16), _mm256_setzero_si256());
    }
    if (k.acts == 2) {
        __m256i lo = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x, bt_widen_bf16(hi)));
        _mm256_store_si256((__m256i *)(to + BT_ACT_LO), lo);
        if (last) {
            _mm256_store_si256((__m256i *)(to + 16 + BT_ACT_LO), _mm256_setzero_si256());
        }
    }
}

/* Writes a row's results of two panels to their destination. */
static inline ALWAYS void emit(const struct bt_packed_job *b, struct kind k, uint32_t row,
                               uint32_t panel, __m512 x0, __m512 x1)
{
    if (k.out == BT_PACKED_SWIGLU) {
        emit_swiglu(b, k, row, panel, x0, x1);
        return;
    }
    __mmask16 m0 = panel_mask(b->p, panel), m1 = panel_mask(b->p, panel + 1);
    float *to = (float *)b->dst + (size_t)row * b->p->n + (size_t)panel * BT_PANEL_COLS;
    if (k.out == BT_PACKED_ADD) {
        x0 = _mm512_add_ps(_mm512_maskz_loadu_ps(m0, to), x0);
        x1 = _mm512_add_ps(_mm512_maskz_loadu_ps(m1, to + BT_PANEL_COLS), x1);
    }
    _mm512_mask_storeu_ps(to, m0, x0);
    _mm512_mask_storeu_ps(to + BT_PANEL_COLS, m1, x1);
}

/* Calls NAME with the kind of b as a compile-time constant. */
#define FOR_KIND(NAME, b, ...)                                                                     \
    do {                                                                                           \
        switch ((b)->out) {                                                                        \
        case BT_PACKED_STORE: FOR_ACTS(NAME, BT_PACKED_STORE, b, __VA_ARGS__); break;              \
        case BT_PACKED_ADD: FOR_ACTS(NAME, BT_PACKED_ADD, b, __VA_ARGS__); break;                  \
        case BT_PACKED_SWIGLU: FOR_ACTS(NAME, BT_PACKED_SWIGLU, b, __VA_ARGS__); break;            \
        }                                                                                          \
    } while (0)
#define FOR_ACTS(NAME, OUT, b, ...)                                                                \
    do {                                                                                           \
        if ((b)->p->acts == 2) {                                                                   \
            NAME(b, (struct kind){.acts = 2, .out = (OUT)}, __VA_ARGS__);                          \
        } else {                                                                                   \
            NAME(b, (struct kind){.acts = 1, .out = (OUT)}, __VA_ARGS__);                          \
        }                                                                                          \
    } while (0)

/* ---- AVX512-BF16 ---- */

static inline ALWAYS __m512 dot_pair(__m512 acc, const uint16_t *a, __m512bh w)
{
    int32_t pair;
    memcpy(&pair, a, sizeof(pair));
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(pair), w);
}

/* Multiplies R rows from `row` on (of one act tile) by four panels. */
#define DOT_BLOCK(NAME, R)                                                                         \
    static inline ALWAYS void NAME(const struct bt_packed_job *b, struct kind kd, uint32_t row,    \
                                   uint32_t panel)                                                 \
    {                                                                                              \
        const struct bt_packed *p = b->p;                                                          \
        const uint16_t *a = b->act + bt_act_row(row, p->k, kd.acts), *w[4];                        \
        __m512 acc[R][4];                                                                          \
        for (int j = 0; j < 4; j++) {                                                              \
            w[j] = bt_packed_panel(p, panel + (uint32_t)j);                                        \
            for (int r = 0; r < R; r++) {                                                          \
                acc[r][j] = _mm512_setzero_ps();                                                   \
            }                                                                                      \
        }                                                                                          \
        for (uint32_t t = 0; t < p->tiles * p->parts; t++) {                                       \
            const uint16_t *at = a + (size_t)(t % p->tiles) * BT_ACT_LO * kd.acts;                 \
            for (uint32_t i = 0; i < BT_TILE_K / 2; i++) {                                         \
                size_t off = (size_t)t * BT_TILE_ELEMS + i * BT_PANEL_COLS * 2;                    \
                for (int j = 0; j < 4; j++) {                                                      \
                    __m512bh v = (__m512bh)_mm512_load_si512(w[j] + off);                          \
                    for (int r = 0; r < R; r++) {                                                  \
                        acc[r][j] = dot_pair(acc[r][j], at + r * 32 + i * 2, v);                   \
                        if (kd.acts == 2) {                                                        \
                            acc[r][j] = dot_pair(acc[r][j], at + BT_ACT_LO + r * 32 + i * 2, v);   \
                        }                                                                          \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (uint32_t r = 0; r < R; r++) {                                                         \
            emit(b, kd, row + r, panel, acc[r][0], acc[r][1]);                                     \
            emit(b, kd, row + r, panel + 2, acc[r][2], acc[r][3]);                                 \
        }                                                                                          \
    }
DOT_BLOCK(dot_1x4, 1)
DOT_BLOCK(dot_4x4, 4)

static inline ALWAYS void dot_rows(const struct bt_packed_job *b, struct kind k,
                                   const struct bt_packed_part *at)
{
    for (uint32_t panel = at->panel; panel < at->panel_end; panel += 4) {
        uint32_t row = at->row;
        for (; row + 4 <= at->row_end; row += 4) {
            dot_4x4(b, k, row, panel);
        }
        for (; row < at->row_end; row++) {
            dot_1x4(b, k, row, panel);
        }
    }
}

void bt_packed_dot(const struct bt_packed_job *b, const struct bt_packed_part *at)
{
    FOR_KIND(dot_rows, b, at);
}

/* ---- AMX ---- */

void bt_packed_tile_config(void)
{
    /* A constant in memory: GCC's builtin only declares that it reads the first bytes. */
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1,
                                             .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                             .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

/* Results of up to 32 rows and two panels that are not written yet. They are written while the tile
 * units compute the next product, as the vector units are idle then. */
struct pending {
    uint32_t row, at, end, panel; /* at: the next of its rows to write */
    const float *c;               /* [32][2 panels] */
};

static inline ALWAYS void emit_some(const struct bt_packed_job *b, struct kind k, struct pending *w,
                                    uint32_t n)
{
    for (uint32_t end = BT_MIN(w->at + n, w->end); w->at < end; w->at++) {
        const float *c = w->c + (size_t)w->at * 2 * BT_PANEL_COLS;
        emit(b, k, w->row + w->at, w->panel, _mm512_load_ps(c), _mm512_load_ps(c + BT_PANEL_COLS));
    }
}

/* Prefetches the cache lines that a row of this product will be written to. */
static inline ALWAYS void claim(const struct bt_packed_job *b, struct kind k, uint32_t row,
                                uint32_t panel)
{
    if (k.out == BT_PACKED_SWIGLU) {
        const uint16_t *at = act_at(b, k, row, panel / 2);
        __builtin_prefetch(at, 1, 3);
        if (k.acts == 2) {
            __builtin_prefetch(at + BT_ACT_LO, 1, 3);
        }
        return;
    }
    const float *at = (const float *)b->dst + (size_t)row * b->p->n + panel * BT_PANEL_COLS;
    __builtin_prefetch(at, 1, 3);
    __builtin_prefetch(at + BT_PANEL_COLS, 1, 3);
}

/* Data of the next product to prefetch into the L2 cache: rows of act, and weights. */
struct ahead {
    const char *act, *w;
    uint32_t act_lines, w_lines; /* lines to prefetch at each step */
};

static inline ALWAYS void fetch(struct ahead *h)
{
    for (uint32_t i = 0; i < h->act_lines; i++, h->act += LINE) {
        _mm_prefetch(h->act, _MM_HINT_T1);
    }
    for (uint32_t i = 0; i < h->w_lines; i++, h->w += LINE) {
        _mm_prefetch(h->w, _MM_HINT_T1);
    }
}

/* Multiplies 32 rows from `row` on by two panels, into c; with two parts of act that is eight
 * products for six loads. Meanwhile writes the last results and prefetches the next data. */
static inline ALWAYS void tile_2x2(const struct bt_packed_job *b, struct kind k, uint32_t row,
                                   uint32_t panel, struct pending *last, struct ahead *h, float *c)
{
    const struct bt_packed *p = b->p;
    const size_t step = (size_t)BT_ACT_LO * k.acts;
    const uint16_t *w0 = bt_packed_panel(p, panel), *w1 = bt_packed_panel(p, panel + 1);
    uint32_t claimed = 0;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t part = 0; part < p->parts; part++) {
        const uint16_t *a0 = b->act + bt_act_row(row, p->k, k.acts);
        const uint16_t *a1 = a0 + p->tiles * step;
        for (uint32_t t = 0; t < p->tiles; t++) {
            _tile_loadd(6, w0, 64);
            _tile_loadd(4, a0, 64);
            _tile_loadd(7, w1, 64);
            _tile_loadd(5, a1, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            emit_some(b, k, last, EMIT_ROWS);
            if (k.acts == 2) {
                _tile_loadd(4, a0 + BT_ACT_LO, 64);
                _tile_loadd(5, a1 + BT_ACT_LO, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            for (uint32_t i = 0; i < EMIT_ROWS && claimed < 32; i++) {
                claim(b, k, row + claimed++, panel);
            }
            fetch(h);
            w0 += BT_TILE_ELEMS;
            w1 += BT_TILE_ELEMS;
            a0 += step;
            a1 += step;
        }
    }
    emit_some(b, k, last, 32);
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    _tile_stored(2, c + 16 * 32, 128);
    _tile_stored(3, c + 16 * 32 + 16, 128);
    *last = (struct pending){.row = row, .end = BT_MIN(32u, b->m - row), .panel = panel, .c = c};
}

static inline void prefetch_tile(const uint16_t *w)
{
    for (int i = 0; i < BT_TILE_ELEMS; i += 32) {
        _mm_prefetch((const char *)(w + i), _MM_HINT_T0);
    }
}

/* Multiplies 16 rows from `row` on by four panels. With so few rows the weights come from
 * memory. */
static inline ALWAYS void tile_1x4(const struct bt_packed_job *b, struct kind k, uint32_t row,
                                   uint32_t panel)
{
    const struct bt_packed *p = b->p;
    const uint16_t *w[4];
    float c[4][256] __attribute__((aligned(64)));
    for (uint32_t j = 0; j < 4; j++) {
        w[j] = bt_packed_panel(p, panel + j);
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t part = 0; part < p->parts; part++) {
        const uint16_t *a = b->act + bt_act_row(row, p->k, k.acts);
        for (uint32_t t = 0; t < p->tiles; t++) {
            _tile_loadd(4, a, 64);
            for (int j = 0; j < 4; j++) {
                prefetch_tile(w[j] + (size_t)PREFETCH_TILES * BT_TILE_ELEMS);
            }
            _tile_loadd(6, w[0], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w[1], 64);
            _tile_dpbf16ps(1, 4, 7);
            if (k.acts == 2) {
                _tile_loadd(5, a + BT_ACT_LO, 64);
                _tile_dpbf16ps(0, 5, 6);
                _tile_dpbf16ps(1, 5, 7);
            }
            _tile_loadd(6, w[2], 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, w[3], 64);
            _tile_dpbf16ps(3, 4, 7);
            if (k.acts == 2) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            a += (size_t)BT_ACT_LO * k.acts;
            for (int j = 0; j < 4; j++) {
                w[j] += BT_TILE_ELEMS;
            }
        }
    }
    _tile_stored(0, c[0], 64);
    _tile_stored(1, c[1], 64);
    _tile_stored(2, c[2], 64);
    _tile_stored(3, c[3], 64);
    for (uint32_t i = 0; i < BT_MIN(b->m - row, 16u); i++) {
        emit(b, k, row + i, panel, _mm512_load_ps(c[0] + i * 16), _mm512_load_ps(c[1] + i * 16));
        emit(b, k, row + i, panel + 2, _mm512_load_ps(c[2] + i * 16),
             _mm512_load_ps(c[3] + i * 16));
    }
}

/* The outer loop is over rows, the inner one over panels: the part's weights stay in L2, and each
 * act row is read once. */
static inline ALWAYS void tile_rows(const struct bt_packed_job *b, struct kind k,
                                    const struct bt_packed_part *at)
{
    float c[2][1024] __attribute__((aligned(64)));
    struct pending last = {0};
    uint32_t row = at->row, end = BT_MIN(at->panel_end, b->p->panels), flip = 0;
    uint32_t pairs = BT_DIV_UP(end - at->panel, 2u), blocks = BT_DIV_UP(at->row_end - row, 32u);
    struct ahead h = {.w = (const char *)bt_packed_panel(b->p, at->next_panel),
                      .w_lines = BT_DIV_UP(32u, blocks),
                      .act_lines = BT_DIV_UP(32 * k.acts, pairs)};
    for (; row + 16 < at->row_end; row += 32) {
        uint32_t next = row + 32 < at->row_end ? row + 32 : at->row;
        h.act = (const char *)(b->act + bt_act_row(next, b->p->k, k.acts));
        for (uint32_t panel = at->panel; panel < end; panel += 2, flip ^= 1) {
            tile_2x2(b, k, row, panel, &last, &h, c[flip]);
        }
    }
    emit_some(b, k, &last, 32);
    for (uint32_t panel = at->panel; row < at->row_end && panel < end; panel += 4) {
        tile_1x4(b, k, row, panel);
    }
}

void bt_packed_amx(const struct bt_packed_job *b, const struct bt_packed_part *at)
{
    bt_packed_tile_config();
    FOR_KIND(tile_rows, b, at);
    _tile_release();
}

#pragma GCC pop_options
