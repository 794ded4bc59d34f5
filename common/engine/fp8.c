/* Implements fp8.h. The device's kernels (cuda/rows/quant.cu) do the same operations, so both
 * engines compute with the same weights. Runs in the thread that loads a model. */
#include "common/engine/fp8.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/parallel.h"

#define LARGEST 448.0f

float bt_f32_of_e4m3(uint8_t b)
{
    int e = b >> 3 & 15, m = b & 7;
    float v = e == 0 ? (float)m * 0x1p-9f : __builtin_ldexpf((float)(8 + m), e - 10);
    v = (b & 0x7f) == 0x7f ? __builtin_nanf("") : v;
    return b & 0x80 ? -v : v;
}

uint8_t bt_e4m3_of_f32(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    uint8_t sign = (uint8_t)(u >> 24 & 0x80);
    float v = fabsf(f);
    if (!(v < LARGEST)) {
        return v != v ? 0x7f : sign | 0x7e;
    }
    /* Adding this rounds v to a multiple of its last bit's value, which is 2^-9 at least. */
    int e = BT_MAX((int)(u >> 23 & 255) - 127, -6);
    uint32_t magic = (uint32_t)(e + 127 + 20) << 23 | 0x400000u, bits;
    float big, rounded;
    memcpy(&big, &magic, 4);
    rounded = v + big;
    memcpy(&bits, &rounded, 4);
    uint32_t n = bits - magic; /* in units of that bit: below 8 only if e is -6 */
    uint32_t code = (uint32_t)(e + 6) * 8 + n;
    return sign | (uint8_t)BT_MIN(code, 0x7eu);
}

struct matrix {
    float *w;
    uint32_t rows, cols;
    uint8_t *e4m3;
    float *scale;
    bool *bad; /* of each row of blocks */
};

/* One row of blocks. */
static void quantize_rows(void *arg, uint32_t i)
{
    const struct matrix *m = arg;
    uint32_t row0 = i * BT_FP8_BLOCK, row1 = BT_MIN(row0 + BT_FP8_BLOCK, m->rows);
    uint32_t across = BT_DIV_UP(m->cols, BT_FP8_BLOCK);
    for (uint32_t b = 0; b < across; b++) {
        uint32_t col0 = b * BT_FP8_BLOCK, col1 = BT_MIN(col0 + BT_FP8_BLOCK, m->cols);
        float top = 0;
        for (uint32_t r = row0; r < row1; r++) {
            for (uint32_t c = col0; c < col1; c++) {
                float v = fabsf(m->w[(size_t)r * m->cols + c]);
                top = v > top ? v : top;
                m->bad[i] |= !isfinite(v);
            }
        }
        float scale = fmaxf(top / LARGEST, 0x1p-126f);
        if (m->scale) {
            m->scale[(size_t)i * across + b] = scale;
        }
        for (uint32_t r = row0; r < row1; r++) {
            for (uint32_t c = col0; c < col1; c++) {
                size_t at = (size_t)r * m->cols + c;
                uint8_t v = bt_e4m3_of_f32(m->w[at] / scale);
                if (m->e4m3) {
                    m->e4m3[at] = v;
                }
                m->w[at] = bt_f32_of_e4m3(v) * scale;
            }
        }
    }
}

bool bt_fp8_quantize(float *w, uint32_t rows, uint32_t cols, uint8_t *e4m3, float *scale)
{
    uint32_t n = BT_DIV_UP(rows, BT_FP8_BLOCK);
    bool *bad = bt_calloc(n, sizeof(*bad)), ok = true;
    struct matrix m = {w, rows, cols, e4m3, scale, bad};
    bt_parallel(n, quantize_rows, &m);
    for (uint32_t i = 0; i < n; i++) {
        ok &= !bad[i];
    }
    free(bad);
    return ok;
}
