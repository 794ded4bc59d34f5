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
#define PARTS_PER_THREAD 4
#define ACT_STEP         1024       /* act elements from tile to tile: hi and lo */
#define ACT_BYTES        (1u << 20) /* of act that one pass over the panels keeps in L2 */
#define ROWS_MAX         192u

struct bt_packed {
    uint32_t k, n;
    uint32_t tiles;  /* of 32 rows of K */
    uint32_t parts;  /* 1, or 2: hi, then lo of the weights */
    uint32_t panels; /* of 16 columns; the last one may be padded with zeros */
    bool amx;
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

bt_status_t bt_packed_create(uint32_t k, uint32_t n, const float *w_nk, bool amx,
                             struct bt_packed **p_p)
{
    struct bt_packed *p = bt_calloc(1, sizeof(*p));
    p->k = k;
    p->n = n;
    p->amx = amx;
    p->tiles = BT_DIV_UP(k, TILE_K);
    p->panels = BT_DIV_UP(n, PANEL_COLS);
    p->parts = needs_two(w_nk, (size_t)k * n) ? 2 : 1;
    size_t panel = (size_t)p->parts * p->tiles * TILE_ELEMS, all = p->panels * panel;
    p->w = aligned_alloc(4096, BT_ALIGN_UP(all * sizeof(*p->w), (size_t)4096));
    if (!p->w) {
        free(p);
        return BT_ERR_NO_MEMORY;
    }
    memset(p->w, 0, all * sizeof(*p->w));
    for (uint32_t col = 0; col < n; col++) {
        uint16_t *at = p->w + col / PANEL_COLS * panel + (size_t)(col % PANEL_COLS) * 2;
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

/* Where a block of rows and panels goes. */
struct block {
    const struct bt_packed *p;
    const uint16_t *act;
    float *dst;
    uint32_t m;
};

struct part { /* what one thread computes at a time */
    uint32_t row, row_end, panel, panel_end;
};

static inline __mmask16 panel_mask(const struct bt_packed *p, uint32_t panel)
{
    if (panel >= p->panels) {
        return 0;
    }
    uint32_t left = p->n - panel * PANEL_COLS;
    return left >= PANEL_COLS ? 0xffff : (__mmask16)((1u << left) - 1);
}

/* ---- AVX512-BF16 ---- */

/* R rows from `row` on (of one act tile) against P panels. */
#define DOT_BLOCK(NAME, R, P)                                                                      \
    static inline void NAME(const struct block *b, uint32_t row, uint32_t panel)                   \
    {                                                                                              \
        const struct bt_packed *p = b->p;                                                          \
        const uint16_t *a = b->act + bt_act_row(row, p->k), *w[P];                                 \
        __m512 acc[R][P];                                                                          \
        for (int j = 0; j < P; j++) {                                                              \
            w[j] = panel_of(p, panel + (uint32_t)j);                                               \
            for (int r = 0; r < R; r++) {                                                          \
                acc[r][j] = _mm512_setzero_ps();                                                   \
            }                                                                                      \
        }                                                                                          \
        for (uint32_t t = 0; t < p->tiles * p->parts; t++) {                                       \
            const uint16_t *at = a + (size_t)(t % p->tiles) * ACT_STEP;                            \
            for (uint32_t i = 0; i < TILE_K / 2; i++) {                                            \
                size_t off = (size_t)t * TILE_ELEMS + i * PANEL_COLS * 2;                          \
                for (int j = 0; j < P; j++) {                                                      \
                    __m512bh v = (__m512bh)_mm512_load_si512(w[j] + off);                          \
                    for (int r = 0; r < R; r++) {                                                  \
                        int32_t hi, lo;                                                            \
                        memcpy(&hi, at + r * 32 + i * 2, 4);                                       \
                        memcpy(&lo, at + BT_ACT_LO + r * 32 + i * 2, 4);                           \
                        acc[r][j] =                                                                \
                            _mm512_dpbf16_ps(acc[r][j], (__m512bh)_mm512_set1_epi32(hi), v);       \
                        acc[r][j] =                                                                \
                            _mm512_dpbf16_ps(acc[r][j], (__m512bh)_mm512_set1_epi32(lo), v);       \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (int j = 0; j < P; j++) {                                                              \
            __mmask16 mask = panel_mask(p, panel + (uint32_t)j);                                   \
            size_t at = (size_t)row * p->n + (panel + (uint32_t)j) * PANEL_COLS;                   \
            for (int r = 0; mask && r < R; r++) {                                                  \
                _mm512_mask_storeu_ps(b->dst + at + (size_t)r * p->n, mask, acc[r][j]);            \
            }                                                                                      \
        }                                                                                          \
    }
DOT_BLOCK(dot_1x4, 1, 4)
DOT_BLOCK(dot_4x4, 4, 4)

static void dot_panels(const struct block *b, const struct part *at)
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

/* Stores accumulator TILE (a constant): straight to dst, or what of it lies inside. */
#define TILE_OUT(TILE, B, ROW, PANEL)                                                              \
    do {                                                                                           \
        float *at_ = (B)->dst + (size_t)(ROW) * (B)->p->n + (size_t)(PANEL)*PANEL_COLS;            \
        if ((ROW) + 16 <= (B)->m && panel_mask((B)->p, PANEL) == 0xffff) {                         \
            _tile_stored(TILE, at_, (size_t)(B)->p->n * sizeof(float));                            \
        } else if (panel_mask((B)->p, PANEL)) {                                                    \
            float part_[256] __attribute__((aligned(64)));                                         \
            _tile_stored(TILE, part_, 64);                                                         \
            store_part(B, part_, at_, BT_MIN((B)->m - (ROW), 16u), panel_mask((B)->p, PANEL));     \
        }                                                                                          \
    } while (0)

static void store_part(const struct block *b, const float *c, float *dst, uint32_t rows,
                       __mmask16 mask)
{
    for (uint32_t i = 0; i < rows; i++) {
        _mm512_mask_storeu_ps(dst + (size_t)i * b->p->n, mask, _mm512_load_ps(c + i * 16));
    }
}

/* 32 rows from `row` on against two panels. Eight products for six loads. */
static void tile_2x2(const struct block *b, uint32_t row, uint32_t panel)
{
    const struct bt_packed *p = b->p;
    const uint16_t *w0 = panel_of(p, panel), *w1 = panel_of(p, panel + 1);
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
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w1, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a1, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            _tile_loadd(4, a0 + BT_ACT_LO, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a1 + BT_ACT_LO, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            w0 += TILE_ELEMS;
            w1 += TILE_ELEMS;
            a0 += ACT_STEP;
            a1 += ACT_STEP;
        }
    }
    TILE_OUT(0, b, row, panel);
    TILE_OUT(1, b, row, panel + 1);
    TILE_OUT(2, b, row + 16, panel);
    TILE_OUT(3, b, row + 16, panel + 1);
}

static inline void prefetch_tile(const uint16_t *w)
{
    for (int i = 0; i < TILE_ELEMS; i += 32) {
        _mm_prefetch((const char *)(w + i), _MM_HINT_T0);
    }
}

/* 16 rows from `row` on against four panels: few rows, so the weights come from memory. */
static void tile_1x4(const struct block *b, uint32_t row, uint32_t panel)
{
    const struct bt_packed *p = b->p;
    const uint16_t *w[4];
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
            _tile_loadd(5, a + BT_ACT_LO, 64);
            for (int j = 0; j < 4; j++) {
                prefetch_tile(w[j] + (size_t)PREFETCH_TILES * TILE_ELEMS);
            }
            _tile_loadd(6, w[0], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w[1], 64);
            _tile_dpbf16ps(1, 4, 7);
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
    TILE_OUT(0, b, row, panel);
    TILE_OUT(1, b, row, panel + 1);
    TILE_OUT(2, b, row, panel + 2);
    TILE_OUT(3, b, row, panel + 3);
}

static void tile_panels(const struct block *b, const struct part *at)
{
    uint32_t row = at->row;
    bt_packed_tile_config();
    for (uint32_t panel = at->panel; panel < at->panel_end; panel += 2) {
        for (row = at->row; row + 16 < at->row_end; row += 32) {
            tile_2x2(b, row, panel);
        }
    }
    for (uint32_t panel = at->panel; row < at->row_end && panel < at->panel_end; panel += 4) {
        tile_1x4(b, row, panel);
    }
    _tile_release();
}

#pragma GCC pop_options

void bt_packed_run(const struct bt_packed *p, const uint16_t *act, uint32_t m, float *dst,
                   int threads)
{
    const struct block b = {.p = p, .act = act, .dst = dst, .m = m};
    bool alone = (uint64_t)m * p->k * p->n * 2 < PARALLEL_FLOPS;
    uint32_t rows = BT_MIN(ACT_BYTES / (p->tiles * ACT_STEP / 16 * 2), ROWS_MAX) / 32 * 32;
    rows = BT_MAX(rows, 32u);
    /* More parts than threads, so that one that is held up does not hold up the others. */
    uint32_t blocks = BT_DIV_UP(m, rows), groups = BT_DIV_UP(p->panels, 4u);
    uint32_t cols = alone ? 1 : BT_DIV_UP((uint32_t)threads * PARTS_PER_THREAD, blocks);
    cols = BT_MIN(cols, groups);
#pragma omp parallel for num_threads(alone ? 1 : threads) schedule(dynamic, 1)
    for (uint32_t i = 0; i < blocks * cols; i++) {
        uint64_t row = i % blocks * rows, col = i / blocks;
        const struct part at = {.row = (uint32_t)row,
                                .row_end = (uint32_t)BT_MIN(row + rows, (uint64_t)m),
                                .panel = (uint32_t)(groups * col / cols) * 4,
                                .panel_end = (uint32_t)(groups * (col + 1) / cols) * 4};
        if (p->amx) {
            tile_panels(&b, &at);
        } else {
            dot_panels(&b, &at);
        }
    }
}
