/* Reads a row of e4m3 latents (common/kv/latent.h) as its format is documented, one value at a
 * time: what tests compare the engines' ways with. */
#ifndef BT_TESTS_UNIT_LATENT_ROW_H
#define BT_TESTS_UNIT_LATENT_ROW_H

#include <math.h>
#include <string.h>

#include "common/kv/latent.h"

static inline float latent_of_e4m3(uint8_t b)
{
    float m = (float)(b & 7), e = (float)(b >> 3 & 15);
    float a = e == 0 ? ldexpf(m, -9) : ldexpf(8 + m, (int)e - 10);
    a = (b & 0x7f) == 0x7f ? NAN : a;
    return b & 0x80 ? -a : a;
}

/* A row's values -> x [latent + rope] f32; exact. */
static inline void latent_row_read(const struct bt_kv_group *g, const uint8_t *row, float *x)
{
    uint32_t latent = bt_kv_latent(g);
    for (uint32_t i = 0; i < latent; i++) {
        float scale;
        memcpy(&scale, row + bt_kv_latent_scales(g) + i / BT_KV_LATENT_GROUP * sizeof(scale),
               sizeof(scale));
        x[i] = latent_of_e4m3(row[i]) * scale;
    }
    for (uint32_t i = 0; i < g->rope; i++) {
        uint16_t b;
        memcpy(&b, row + bt_kv_latent_rope(g) + i * sizeof(b), sizeof(b));
        uint32_t bits = (uint32_t)b << 16;
        memcpy(&x[latent + i], &bits, sizeof(bits));
    }
}

#endif
