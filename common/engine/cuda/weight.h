/* A matrix of weights [n][k] in device memory: bf16, or e4m3 with scales in f32. And activations in
 * e4m3. */
#ifndef BT_CUDA_WEIGHT_H
#define BT_CUDA_WEIGHT_H

#include <stdint.h>

enum bt_cu_weight_kind {
    BT_CU_WEIGHT_BF16,
    BT_CU_WEIGHT_BLOCKS, /* e4m3, a scale for each block of 128 x 128 */
    BT_CU_WEIGHT_ROWS    /* e4m3, a scale for each row */
};

#define BT_CU_WEIGHT_BLOCK 128u

/* e4m3: a value is its number times its scale. In each row, the order of 16 neighbouring columns is
 *   0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15
 * so that a word holds what one thread needs of 16 columns for a tensor core's product (fp8.cuh);
 * activations in e4m3 have the same order. k is a multiple of 16.
 * Scales of BLOCKS: [rows of blocks][bt_cu_scale_stride(k)].
 * Scales of ROWS: [bt_cu_scale_stride(k)][n], the same n values in each of its rows: cuBLASLt reads
 * a scale for each row and 128 columns. */
struct bt_cu_weight {
    void *w;      /* NULL: there is no such matrix */
    float *scale; /* bf16: NULL */
    enum bt_cu_weight_kind kind;
};

/* Scales of blocks in a row of blocks: cuBLASLt wants a multiple of four. */
static inline uint32_t bt_cu_scale_stride(uint32_t k)
{
    return (k + 4 * BT_CU_WEIGHT_BLOCK - 1) / (4 * BT_CU_WEIGHT_BLOCK) * 4;
}

static inline struct bt_cu_weight bt_cu_bf16(const void *w)
{
    struct bt_cu_weight y = {(void *)w, 0, BT_CU_WEIGHT_BF16};
    return y;
}

/* Activations [m][k], a scale for each row and 128 columns: [k / 128, rounded up][stride] with
 * stride = bt_cu_e4m3_stride(m), from one 128 columns to the next. k is a multiple of 16. */
struct bt_cu_e4m3_rows {
    uint8_t *v;
    float *scale;
};
/* cuBLASLt wants a multiple of four rows; the values of those that are added do not matter. */
static inline uint32_t bt_cu_e4m3_stride(uint32_t m)
{
    return (m + 3) / 4 * 4;
}

#endif
