/* Numbers in e4m3 (OCP 8-bit floating point): sign, 4 bits of exponent with bias 7, 3 of mantissa;
 * the largest is 448, 0x7f is not a number. And what model.quantize: fp8 makes of a matrix. Pure.
 */
#ifndef BT_ENGINE_FP8_H
#define BT_ENGINE_FP8_H

#include "common/base/base.h"

#define BT_FP8_BLOCK 128u

float bt_f32_of_e4m3(uint8_t b);
/* Rounded to nearest even; beyond the largest: the largest. */
uint8_t bt_e4m3_of_f32(float f);

/* Rounds w [rows, cols] to e4m3 with one f32 scale for each block of 128 x 128 (fewer at the
 * edges): the block's largest magnitude divided by 448. Afterwards w has the rounded values, each
 * times its scale. e4m3: [rows, cols], the numbers; scale: [ceil(rows / 128), ceil(cols / 128)];
 * either may be NULL. Returns false if a value is not finite; then the results are not valid. */
bool bt_fp8_quantize(float *w, uint32_t rows, uint32_t cols, uint8_t *e4m3,
                     float *scale) BT_MUST_CHECK;

#endif
