/* The inside of packed.h: packed.c packs and shares out, packed_x86.c computes. */
#ifndef BT_ENGINE_CPU_PACKED_PRIV_H
#define BT_ENGINE_CPU_PACKED_PRIV_H

#include "common/engine/cpu/packed.h"

#define BT_PANEL_COLS 16
#define BT_TILE_K     32  /* columns of an act tile, rows of a weight tile */
#define BT_TILE_ELEMS 512 /* bf16 of either */

struct bt_packed {
    uint32_t k, n;
    uint32_t tiles;  /* of 32 rows of K */
    uint32_t parts;  /* of the weights: 1, or 2: hi, then lo */
    uint32_t acts;   /* parts of act that are read, and written by SwiGLU */
    uint32_t panels; /* of 16 columns, padded with zeros; SwiGLU: gate and up in turns */
    bool amx, swiglu;
    uint16_t *w; /* [panels][parts][tiles][16 pairs of rows][16 columns][2] */
};

/* A product on its way. */
struct bt_packed_job {
    const struct bt_packed *p;
    const uint16_t *act;
    void *dst;
    uint32_t m;
    bt_packed_out_t out;
};

/* The part of a product that one thread computes at a time. */
struct bt_packed_part {
    uint32_t row, row_end, panel, panel_end;
    uint32_t next_panel; /* where its next part probably begins, to be fetched meanwhile */
};

/* A block that hangs over computes the last panel again. */
static inline const uint16_t *bt_packed_panel(const struct bt_packed *p, uint32_t panel)
{
    panel = BT_MIN(panel, p->panels - 1);
    return p->w + (size_t)panel * p->parts * p->tiles * BT_TILE_ELEMS;
}

void bt_packed_dot(const struct bt_packed_job *b, const struct bt_packed_part *at);
void bt_packed_amx(const struct bt_packed_job *b, const struct bt_packed_part *at);

#endif
