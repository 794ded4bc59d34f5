/* Products of up to 128 rows of activations, bound by reading the weights once: y = x * w^T with x
 * [m][k], w [n][k] in bf16, or x in f16 and w in e4m3, sums in f32 and in an order that depends on
 * the way and the shape alone. A way is one cutting of the work; which is fastest depends on the
 * shape, and is to be timed. */
#ifndef BT_CUDA_SKINNY_H
#define BT_CUDA_SKINNY_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/engine/cuda/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BT_CU_SKINNY_ROWS 128
#define BT_CU_WIDTHS      8  /* rows 1, 2, up to 4, 8, ... 128 */
#define BT_CU_F16_ROWS    32 /* up to so many, e4m3 weights become f16 */

/* Which of them so many rows are. */
static inline uint32_t bt_cu_width(uint32_t m)
{
    uint32_t width = 0;
    while (1u << width < m) {
        width++;
    }
    return width;
}

enum bt_cu_skinny_end {
    BT_CU_SKINNY_F32, /* y[m][n] f32 */
    BT_CU_SKINNY_ADD, /* y += */
    /* w: gate's n / 2 rows, then up's; y[m][n / 2] = silu(gate) * up, as x */
    BT_CU_SKINNY_SWIGLU,
    BT_CU_SKINNY_SWIGLU_ROUNDED /* gate and up are rounded to bf16 before, as in wide.h */
};

/* Ways are 0 to this - 1. */
uint32_t bt_cu_skinny_ways(void);
/* Whether a way is for this product: a Hopper device, at most 128 rows, n a multiple of 16, k of 8
 * (e4m3: 16), and no more clusters than run at once; some are not for many rows and e4m3. */
bool bt_cu_skinny_fits(uint32_t way, uint32_t m, uint32_t n, uint32_t k,
                       enum bt_cu_weight_kind kind);
/* The parts into which a way divides k: part i of p begins at step `steps` * i / p of 64 columns.
 * Each is summed from its beginning to its end, then they are added in their order, to y first with
 * ADD. Ways of equal parts give the same bits, for any m. */
uint32_t bt_cu_skinny_parts(uint32_t way);
/* y not in x's place. cudaErrorInvalidValue: it does not fit. */
cudaError_t bt_cu_skinny(uint32_t way, struct bt_cu_weight w, const void *x, void *y, uint32_t m,
                         uint32_t n, uint32_t k, enum bt_cu_skinny_end end, cudaStream_t s);

/* The same with weights and activations in e4m3 (SWIGLU's result is f16): sums of 128 columns have
 * about 14 bits, and are added up in f32. For 33 rows and more, where converting weights to f16
 * takes longer than reading them. k is a multiple of 128. */
bool bt_cu_skinny_rounded_fits(uint32_t way, uint32_t m, uint32_t n, uint32_t k);
cudaError_t bt_cu_skinny_rounded(uint32_t way, struct bt_cu_weight w,
                                 const struct bt_cu_e4m3_rows *x, void *y, uint32_t m, uint32_t n,
                                 uint32_t k, enum bt_cu_skinny_end end, cudaStream_t s);
/* SWIGLU whose result is rounded for the next product; not in x's place. Some ways can. */
bool bt_cu_skinny_rounds(uint32_t way, uint32_t m, uint32_t n, uint32_t k);
cudaError_t bt_cu_skinny_rounded_swiglu(uint32_t way, struct bt_cu_weight w,
                                        const struct bt_cu_e4m3_rows *x,
                                        const struct bt_cu_e4m3_rows *to, uint32_t m, uint32_t n,
                                        uint32_t k, cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
