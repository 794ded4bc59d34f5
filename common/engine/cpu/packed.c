/* Packing of weights and the two kernels of packed.h. The panels of 16 columns are spread over
 * OpenMP threads. Pure functions on caller memory. */
#include "common/engine/cpu/packed.h"

#include <immintrin.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PANEL_COLS       16
#define TILE_K           32      /* columns of an act tile, rows of a weight tile */
#define TILE_ELEMS       512     /* bf16 of either */
#define PARALLEL_FLOPS   500000u /* below, waking the other threads costs more than it gives */
#define PREFETCH_TILES   6
#define ALWAYS           __attribute__((always_inline))
#define PARTS_PER_THREAD 2
#define ACT_STEP         1024       /* act elements from tile to tile: hi and lo */
#define WEIGHT_BYTES     (1u << 20) /* of weights that stay in L2 while rows pass */
#define ROWS_MAX         512u       /* of one part */

struct bt_packed {
    uint32_t k, n;
    uint32_t tiles;  /* of 32 rows of K */
    uint32_t parts;  /* 1, or 2: hi, then lo of the weights */
    uint32_t panels; /* of 16 columns, padded with zeros; SwiGLU: gate and up in turns */
    bool amx, swiglu;
    uint16_t *w; /* [panels][parts][tiles][16 pairs of rows][16 columns][2] */
};

static uint16_t to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0
                                                    : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static float from_bf16(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

bool bt_packed_amx_usable(void)
{
#ifdef SYS_arch_prctl
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

static bool needs_two(const float *w, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, w + i, 4);
        if (u & 0xffff) {
            return true;
        }
    }
    return false;
}

/* Where a column of the checkpoint's matrix stands: panel * 16 + column. */
static uint32_t place_of(const struct bt_packed *p, uint32_t col)
{
    if (!p->swiglu) {
        return col;
    }
    uint32_t half = p->n / 2, i = col % half;
    return (i / PANEL_COLS * 2 + col / half) * PANEL_COLS + i % PANEL_COLS;
}

bt_status_t bt_packed_create(const struct bt_packed_spec *spec, const float *w_nk,
                             struct bt_packed **p_p)
{
    struct bt_packed *p = bt_calloc(1, sizeof(*p));
    uint32_t k = spec->k, n = spec->n;
    *p = (struct bt_packed){.k = k, .n = n, .amx = spec->amx, .swiglu = spec->swiglu};
    p->tiles = BT_DIV_UP(k, TILE_K);
    p->panels = p->swiglu ? 2 * BT_DIV_UP(n / 2, PANEL_COLS) : BT_DIV_UP(n, PANEL_COLS);
    p->parts = needs_two(w_nk, (size_t)k * n) ? 2 : 1;
    size_t panel = (size_t)p->parts * p->tiles * TILE_ELEMS, all = p->panels * panel;
    p->w = aligned_alloc(4096, BT_ALIGN_UP(all * sizeof(*p->w), (size_t)4096));
    if (!p->w) {
        free(p);
        return BT_ERR_NO_MEMORY;
    }
    memset(p->w, 0, all * sizeof(*p->w));
    for (uint32_t col = 0; col < n; col++) {
        uint32_t place = place_of(p, col);
        uint16_t *at = p->w + place / PANEL_COLS * panel + (size_t)(place % PANEL_COLS) * 2;
        for (uint32_t i = 0; i < k; i++) {
            float v = w_nk[(size_t)col * k + i];
            size_t off = (size_t)(i / 2) * PANEL_COLS * 2 + i % 2;
            at[off] = to_bf16(v);
            if (p->parts == 2) {
                at[off + (size_t)p->tiles * TILE_ELEMS] = to_bf16(v - from_bf16(at[off]));
            }
        }
    }
    *p_p = p;
    return BT_OK;
}

void bt_packed_destroy(struct bt_packed *p)
{
    if (p) {
        free(p->w);
        free(p);
    }
}

static const uint16_t *panel_of(const struct bt_packed *p, uint32_t panel)
{
    panel = BT_MIN(panel, p->panels - 1); /* a block that hangs over computes the last one again */
    return p->w + (size_t)panel * p->parts * p->tiles * TILE_ELEMS;
}

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")

#include "common/engine/cpu/avx512.h"

/* Where a block of rows and panels goes. */
struct block {
    const struct bt_packed *p;
    const uint16_t *act;
    void *dst;
    uint32_t m;
    bt_packed_out_t out;
};

struct part { /* what one thread computes at a time */
    uint32_t row, row_end, panel, panel_end;
};

static inline __mmask16 panel_mask(const struct bt_packed *p, uint32_t panel)
{
    if (panel * PANEL_COLS >= p->n) {
        return 0;
    }
    uint32_t left = p->n - panel * PANEL_COLS;
    return left >= PANEL_COLS ? 0xffff : (__mmask16)((1u << left) - 1);
}

/* Columns 16 i .. 16 i + 15 of a row of act. */
static inline uint16_t *act_at(const struct block *b, uint32_t row, uint32_t i)
{
    return (uint16_t *)b->dst + bt_act_row(row, b->p->n / 2) + bt_act_col(i * PANEL_COLS);
}

static inline void emit_swiglu(const struct block *b, uint32_t row, uint32_t rows, uint32_t panel,
                               const float *c0, const float *c1)
{
    const __m512 minus_log2e = _mm512_set1_ps(-1.44269504f), one = _mm512_set1_ps(1.0f);
    if (panel >= b->p->panels) {
        return;
    }
    bool last = panel + 2 == b->p->panels && panel / 2 % 2 == 0; /* half a tile is left */
    for (uint32_t i = 0; i < rows; i++) {
        uint16_t *to = act_at(b, row + i, panel / 2);
        __m512 g = _mm512_load_ps(c0 + i * 16), up = _mm512_load_ps(c1 + i * 16);
        __m512 e = bt_exp2(_mm512_mul_ps(g, minus_log2e));
        __m512 x = _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(one, e)), up);
        __m256i hi = (__m256i)_mm512_cvtneps_pbh(x);
        __m256i lo = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x, bt_widen_bf16(hi)));
        _mm256_store_si256((__m256i *)to, hi);
        _mm256_store_si256((__m256i *)(to + BT_ACT_LO), lo);
        if (last) {
            _mm256_store_si256((__m256i *)(to + 16), _mm256_setzero_si256());
            _mm256_store_si256((__m256i *)(to + 16 + BT_ACT_LO), _mm256_setzero_si256());
        }
    }
}

/* Results of two panels, c0 and c1 [rows][16], to where they go. */
static inline void emit(const struct block *b, uint32_t row, uint32_t rows, uint32_t panel,
                        const float *c0, const float *c1)
{
    if (b->out == BT_PACKED_SWIGLU) {
        emit_swiglu(b, row, rows, panel, c0, c1);
        return;
    }
    __mmask16 m0 = panel_mask(b->p, panel), m1 = panel_mask(b->p, panel + 1);
    for (uint32_t i = 0; m0 && i < rows; i++) {
        float *to = (float *)b->dst + (size_t)(row + i) * b->p->n + (size_t)panel * PANEL_COLS;
        __m512 x0 = _mm512_load_ps(c0 + i * 16), x1 = _mm512_load_ps(c1 + i * 16);
        if (b->out == BT_PACKED_ADD) {
            x0 = _mm512_add_ps(_mm512_maskz_loadu_ps(m0, to), x0);
            x1 = _mm512_add_ps(_mm512_maskz_loadu_ps(m1, to + PANEL_COLS), x1);
        }
        _mm512_mask_storeu_ps(to, m0, x0);
        _mm512_mask_storeu_ps(to + PANEL_COLS, m1, x1);
    }
}

/* ---- AVX512-BF16 ---- */

/* R rows from `row` on (of one act tile) against four panels. */
#define DOT_BLOCK(NAME, R)                                                                         \
    static inline ALWAYS void NAME(const struct block *b, uint32_t row, uint32_t panel)            \
    {                                                                                              \
        const struct bt_packed *p = b->p;                                                          \
        const uint16_t *a = b->act + bt_act_row(row, p->k), *w[4];                                 \
        __m512 acc[R][4];                                                                          \
        float c[4][(R)*16] __attribute__((aligned(64)));                                           \
        for (int j = 0; j < 4; j++) {                                                              \
            w[j] = panel_of(p, panel + (uint32_t)j);                                               \
            for (int r = 0; r < R; r++) {                                                          \
                acc[r][j] = _mm512_setzero_ps();                                                   \
            }                                                                                      \
        }                                                                                          \
        for (uint32_t t = 0; t < p->tiles * p->parts; t++) {                                       \
            const uint16_t *at = a + (size_t)(t % p->tiles) * ACT_STEP;                            \
            for (uint32_t i = 0; i < TILE_K / 2; i++) {                                            \
                size_t off = (size_t)t * TILE_ELEMS + i * PANEL_COLS * 2;                          \
                for (int j = 0; j < 4; j++) {                                                      \
                    __m512bh v = (__m512bh)_mm512_load_si512(w[j] + off);                          \
                    for (int r = 0; r < R; r++) {                                                  \
                        int32_t hi, lo;                                                            \
                        memcpy(&hi, at + r * 32 + i * 2, 4);                                       \
                        acc[r][j] =                                                                \
                            _mm512_dpbf16_ps(acc[r][j], (__m512bh)_mm512_set1_epi32(hi), v);       \
                        memcpy(&lo, at + BT_ACT_LO + r * 32 + i * 2, 4);                           \
                        acc[r][j] =                                                                \
                            _mm512_dpbf16_ps(acc[r][j], (__m512bh)_mm512_set1_epi32(lo), v);       \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (int j = 0; j < 4; j++) {                                                              \
            for (int r = 0; r < R; r++) {                                                          \
                _mm512_store_ps(c[j] + r * 16, acc[r][j]);                                         \
            }                                                                                      \
        }                                                                                          \
        emit(b, row, R, panel, c[0], c[1]);                                                        \
        emit(b, row, R, panel + 2, c[2], c[3]);                                                    \
    }
DOT_BLOCK(dot_1x4, 1)
DOT_BLOCK(dot_4x4, 4)

static inline ALWAYS void dot_rows(const struct block *b, const struct part *at)
{
    for (uint32_t panel = at->panel; panel < at->panel_end; panel += 4) {
        uint32_t row = at->row;
        for (; row + 4 <= at->row_end; row += 4) {
            dot_4x4(b, row, panel);
        }
        for (; row < at->row_end; row++) {
            dot_1x4(b, row, panel);
        }
    }
}

static void dot_panels(const struct block *b, const struct part *at)
{
    dot_rows(b, at);
}

/* ---- AMX ---- */

void bt_packed_tile_config(void)
{
    /* In memory before the call: GCC's builtin only says that it reads the first bytes. */
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1,
                                             .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                             .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

/* Asks for the lines that emit will write: by the time the product is done they are there. */
static inline void claim(const struct block *b, uint32_t row, uint32_t panel)
{
    if (b->out == BT_PACKED_SWIGLU) {
        for (uint32_t i = 0; panel / 2 % 2 == 0 && i < 32; i++) {
            const uint16_t *at = act_at(b, row + i, panel / 2);
            __builtin_prefetch(at, 1, 3);
            __builtin_prefetch(at + BT_ACT_LO, 1, 3);
        }
        return;
    }
    for (uint32_t i = 0; i < 32; i++) {
        const float *at = (const float *)b->dst + (size_t)(row + i) * b->p->n + panel * PANEL_COLS;
        __builtin_prefetch(at, 1, 3);
        __builtin_prefetch(at + PANEL_COLS, 1, 3);
    }
}

static inline uint32_t rows_left(const struct block *b, uint32_t row)
{
    return row < b->m ? BT_MIN(b->m - row, 16u) : 0;
}

/* 32 rows from `row` on against two panels. Eight products for six loads, or four for four. */
static inline ALWAYS void tile_2x2(const struct block *b, uint32_t row, uint32_t panel)
{
    const struct bt_packed *p = b->p;
    const uint16_t *w0 = panel_of(p, panel), *w1 = panel_of(p, panel + 1);
    float c[4][256] __attribute__((aligned(64)));
    claim(b, row, panel);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t part = 0; part < p->parts; part++) {
        const uint16_t *a0 = b->act + bt_act_row(row, p->k);
        const uint16_t *a1 = a0 + (size_t)p->tiles * ACT_STEP;
        for (uint32_t t = 0; t < p->tiles; t++) {
            _tile_loadd(6, w0, 64);
            _tile_loadd(4, a0, 64);
            _tile_loadd(7, w1, 64);
            _tile_loadd(5, a1, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            _tile_loadd(4, a0 + BT_ACT_LO, 64);
            _tile_loadd(5, a1 + BT_ACT_LO, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            w0 += TILE_ELEMS;
            w1 += TILE_ELEMS;
            a0 += ACT_STEP;
            a1 += ACT_STEP;
        }
    }
    _tile_stored(0, c[0], 64);
    _tile_stored(1, c[1], 64);
    _tile_stored(2, c[2], 64);
    _tile_stored(3, c[3], 64);
    emit(b, row, rows_left(b, row), panel, c[0], c[1]);
    emit(b, row + 16, rows_left(b, row + 16), panel, c[2], c[3]);
}

static inline void prefetch_tile(const uint16_t *w)
{
    for (int i = 0; i < TILE_ELEMS; i += 32) {
        _mm_prefetch((const char *)(w + i), _MM_HINT_T0);
    }
}

/* 16 rows from `row` on against four panels: few rows, so the weights come from memory. */
static inline ALWAYS void tile_1x4(const struct block *b, uint32_t row, uint32_t panel)
{
    const struct bt_packed *p = b->p;
    const uint16_t *w[4];
    float c[4][256] __attribute__((aligned(64)));
    for (uint32_t j = 0; j < 4; j++) {
        w[j] = panel_of(p, panel + j);
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t part = 0; part < p->parts; part++) {
        const uint16_t *a = b->act + bt_act_row(row, p->k);
        for (uint32_t t = 0; t < p->tiles; t++) {
            _tile_loadd(4, a, 64);
            for (int j = 0; j < 4; j++) {
                prefetch_tile(w[j] + (size_t)PREFETCH_TILES * TILE_ELEMS);
            }
            _tile_loadd(6, w[0], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w[1], 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a + BT_ACT_LO, 64);
            _tile_dpbf16ps(0, 5, 6);
            _tile_dpbf16ps(1, 5, 7);
            _tile_loadd(6, w[2], 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, w[3], 64);
            _tile_dpbf16ps(3, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            a += ACT_STEP;
            for (int j = 0; j < 4; j++) {
                w[j] += TILE_ELEMS;
            }
        }
    }
    _tile_stored(0, c[0], 64);
    _tile_stored(1, c[1], 64);
    _tile_stored(2, c[2], 64);
    _tile_stored(3, c[3], 64);
    emit(b, row, rows_left(b, row), panel, c[0], c[1]);
    emit(b, row, rows_left(b, row), panel + 2, c[2], c[3]);
}

/* Rows outside, panels inside: the part's weights stay in L2, each act row is fetched once. */
static inline ALWAYS void tile_rows(const struct block *b, const struct part *at)
{
    uint32_t row = at->row, end = BT_MIN(at->panel_end, b->p->panels);
    for (; row + 16 < at->row_end; row += 32) {
        for (uint32_t panel = at->panel; panel < end; panel += 2) {
            tile_2x2(b, row, panel);
        }
    }
    for (uint32_t panel = at->panel; row < at->row_end && panel < end; panel += 4) {
        tile_1x4(b, row, panel);
    }
}

static void tile_panels(const struct block *b, const struct part *at)
{
    bt_packed_tile_config();
    tile_rows(b, at);
    _tile_release();
}

#pragma GCC pop_options

void bt_packed_run(const struct bt_packed *p, const uint16_t *act, uint32_t m, bt_packed_out_t out,
                   void *dst, int threads)
{
    const struct block b = {.p = p, .act = act, .dst = dst, .m = m, .out = out};
    bool alone = (uint64_t)m * p->k * p->n * 2 < PARALLEL_FLOPS;
    BT_ASSERT(p->swiglu == (out == BT_PACKED_SWIGLU));
    uint32_t blocks = BT_DIV_UP(m, ROWS_MAX), groups = BT_DIV_UP(p->panels, 4u);
    uint32_t keep = BT_MAX(WEIGHT_BYTES / (p->parts * p->tiles * TILE_ELEMS * 2 * 4), 1u);
    /* More parts than threads, so that one that is held up does not hold up the others. */
    uint32_t cols = BT_MAX(BT_DIV_UP(groups, keep), (uint32_t)threads * PARTS_PER_THREAD);
    cols = alone ? 1 : BT_MIN(cols, groups);
#pragma omp parallel for num_threads(alone ? 1 : threads) schedule(dynamic, 1)
    for (uint32_t i = 0; i < blocks * cols; i++) {
        uint64_t row = (uint64_t)(i % blocks) * ROWS_MAX, col = i / blocks;
        const struct part at = {.row = (uint32_t)row,
                                .row_end = (uint32_t)BT_MIN(row + ROWS_MAX, (uint64_t)m),
                                .panel = (uint32_t)(groups * col / cols) * 4,
                                .panel_end = (uint32_t)(groups * (col + 1) / cols) * 4};
        if (p->amx) {
            tile_panels(&b, &at);
        } else {
            dot_panels(&b, &at);
        }
    }
}
