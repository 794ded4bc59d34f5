/* Rows of MLA in FP8_E4M3, one value at a time: see latent.h. Pure. */
#include "common/kv/latent.h"

#include <math.h>
#include <string.h>

#define SCALE_MIN (-15)
#define SCALE_MAX 7
#define TOP       448.0f /* the largest e4m3 value, 1.75 * 2^8 */

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

static float of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

/* The exponent k of the smallest scale 2^k with top <= 448 * 2^k, inside the bounds. */
static int scale_of(float top)
{
    uint32_t u = bits_of(top);
    int k = (int)(u >> 23) - 127 - 8 + ((u & 0x7fffffu) > 0x600000u);
    return BT_MIN(BT_MAX(k, SCALE_MIN), SCALE_MAX);
}

/* |x| <= 448. Subnormals are multiples of 2^-9: adding 1.5 * 2^14 rounds to them. */
static uint8_t e4m3_of(float x)
{
    uint32_t u = bits_of(x), sign = u >> 24 & 0x80;
    float a = fabsf(x);
    if (a < 0.015625f) {
        return (uint8_t)(sign | (bits_of(a + 24576.0f) - bits_of(24576.0f)));
    }
    u = (u & 0x7fffffffu) + 0x7ffffu + (u >> 20 & 1);
    return (uint8_t)(sign | ((u >> 20) - (120u << 3)));
}

static uint16_t bf16_of(float x)
{
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)(u >> 16 | 0x40); /* a NaN stays one */
    }
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

/* Up to BT_KV_LATENT_GROUP latents and their scale. */
static float store_group(const float *x, uint32_t n, uint8_t *row)
{
    float top = 0;
    bool nan = false;
    for (uint32_t i = 0; i < n; i++) {
        top = BT_MAX(top, fabsf(x[i]));
        nan = nan || x[i] != x[i];
    }
    if (nan) {
        memset(row, 0, n);
        return NAN;
    }
    int k = scale_of(top);
    float inverse = of_bits((uint32_t)(127 - k) << 23);
    for (uint32_t i = 0; i < n; i++) {
        row[i] = e4m3_of(BT_MAX(BT_MIN(x[i] * inverse, TOP), -TOP));
    }
    return of_bits((uint32_t)(127 + k) << 23);
}

void bt_kv_latent_store(const struct bt_kv_group *g, const float *x, uint8_t *row)
{
    uint32_t latent = bt_kv_latent(g), rope_at = bt_kv_latent_rope(g);
    for (uint32_t i = 0; i < latent; i += BT_KV_LATENT_GROUP) {
        float scale = store_group(x + i, BT_MIN(latent - i, (uint32_t)BT_KV_LATENT_GROUP), row + i);
        memcpy(row + bt_kv_latent_scales(g) + i / BT_KV_LATENT_GROUP * sizeof(scale), &scale,
               sizeof(scale));
    }
    for (uint32_t i = 0; i < g->rope; i++) {
        uint16_t b = bf16_of(x[latent + i]);
        memcpy(row + rope_at + i * sizeof(b), &b, sizeof(b));
    }
    uint32_t end = rope_at + g->rope * 2;
    memset(row + end, 0, bt_kv_row_bytes(g) - end);
}
