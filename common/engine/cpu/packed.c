/* Packs weights, and divides products: panels of 16 columns are distributed over OpenMP threads.
 * Pure functions on caller memory. */
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/engine/cpu/packed_priv.h"
#include "common/engine/cpu/pages.h"

/* Below it, waking the other threads costs more time than it saves. */
#define PARALLEL_FLOPS   500000u
#define PARTS_PER_THREAD 2
#define WEIGHT_BYTES     (1u << 20) /* weights that stay in the L2 cache while rows pass */
#define ROWS_MAX         512u       /* rows of one part */

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

/* The position of a column of the checkpoint's matrix: panel * 16 + column. */
static uint32_t place_of(const struct bt_packed *p, uint32_t col)
{
    if (!p->swiglu) {
        return col;
    }
    uint32_t half = p->n / 2, i = col % half;
    return (i / BT_PANEL_COLS * 2 + col / half) * BT_PANEL_COLS + i % BT_PANEL_COLS;
}

bt_status_t bt_packed_create(const struct bt_packed_spec *spec, const float *w_nk,
                             struct bt_packed **p_p)
{
    struct bt_packed *p = bt_calloc(1, sizeof(*p));
    uint32_t k = spec->k, n = spec->n;
    *p = (struct bt_packed){
        .k = k, .n = n, .acts = spec->acts, .amx = spec->amx, .swiglu = spec->swiglu};
    p->tiles = BT_DIV_UP(k, BT_TILE_K);
    p->panels = p->swiglu ? 2 * BT_DIV_UP(n / 2, BT_PANEL_COLS) : BT_DIV_UP(n, BT_PANEL_COLS);
    p->parts = needs_two(w_nk, (size_t)k * n) ? 2 : 1;
    size_t panel = (size_t)p->parts * p->tiles * BT_TILE_ELEMS, all = p->panels * panel;
    p->w = bt_pages_alloc(all * sizeof(*p->w));
    if (!p->w) {
        free(p);
        return BT_ERR_NO_MEMORY;
    }
    memset(p->w, 0, all * sizeof(*p->w));
    for (uint32_t col = 0; col < n; col++) {
        uint32_t place = place_of(p, col);
        uint16_t *at = p->w + place / BT_PANEL_COLS * panel + (size_t)(place % BT_PANEL_COLS) * 2;
        for (uint32_t i = 0; i < k; i++) {
            float v = w_nk[(size_t)col * k + i];
            size_t off = (size_t)(i / 2) * BT_PANEL_COLS * 2 + i % 2;
            at[off] = to_bf16(v);
            if (p->parts == 2) {
                at[off + (size_t)p->tiles * BT_TILE_ELEMS] = to_bf16(v - from_bf16(at[off]));
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

void bt_packed_run(const struct bt_packed *p, const uint16_t *act, uint32_t m, bt_packed_out_t out,
                   void *dst, int threads)
{
    const struct bt_packed_job b = {.p = p, .act = act, .dst = dst, .m = m, .out = out};
    bool alone = (uint64_t)m * p->k * p->n * 2 < PARALLEL_FLOPS;
    BT_ASSERT(p->swiglu == (out == BT_PACKED_SWIGLU));
    uint32_t blocks = BT_DIV_UP(m, ROWS_MAX), groups = BT_DIV_UP(p->panels, 4u);
    uint32_t keep = BT_MAX(WEIGHT_BYTES / (p->parts * p->tiles * BT_TILE_ELEMS * 2 * 4), 1u);
    /* More parts than threads, so that a delayed thread does not delay the others. */
    uint32_t cols = BT_MAX(BT_DIV_UP(groups, keep), (uint32_t)threads * PARTS_PER_THREAD);
    cols = BT_DIV_UP(cols, (uint32_t)threads) * (uint32_t)threads; /* the same number for each */
    cols = alone ? 1 : BT_MIN(cols, groups);
#pragma omp parallel for num_threads(alone ? 1 : threads) schedule(dynamic, 1)
    for (uint32_t i = 0; i < blocks * cols; i++) {
        uint64_t row = (uint64_t)(i % blocks) * ROWS_MAX, col = i / blocks;
        /* The part that this thread gets next if all threads are equally fast. */
        uint32_t next = (i + (uint32_t)threads) / blocks;
        const struct bt_packed_part at = {.row = (uint32_t)row,
                                          .row_end = (uint32_t)BT_MIN(row + ROWS_MAX, (uint64_t)m),
                                          .panel = (uint32_t)(groups * col / cols) * 4,
                                          .panel_end = (uint32_t)(groups * (col + 1) / cols) * 4,
                                          .next_panel =
                                              (uint32_t)(groups * (uint64_t)next / cols) * 4};
        if (p->amx) {
            bt_packed_amx(&b, &at);
        } else {
            bt_packed_dot(&b, &at);
        }
    }
}
