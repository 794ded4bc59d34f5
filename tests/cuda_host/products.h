/* Matrix products in plain C, and the values of weights in f32 that they read. A product gives a
 * row the same bits whatever its other rows are. */
#ifndef BT_TESTS_CUDA_HOST_PRODUCTS_H
#define BT_TESTS_CUDA_HOST_PRODUCTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/engine/cuda/gemm/gemm.h"
#include "tests/cuda_host/values.h"

/* y [m, n] = a [m, k] times w [n, k], in f32 or bf16; add: f32, added to what y holds. */
struct cuda_host_product {
    struct bt_cu_weight w;
    const uint16_t *a; /* bf16 (f16 where w is e4m3); NULL: e */
    struct bt_cu_e4m3_rows e;
    void *y;
    uint32_t m, n, k;
    bool bf16, add;
};
/* All of f16; y is no sum. */
struct cuda_host_product_f16 {
    const half *w, *a;
    half *y;
    uint32_t m, n, k;
};

/* Work of a stream, for cuda_host_launch(); args: the struct. */
void cuda_host_run_product(const void *args);
void cuda_host_run_product_f16(const void *args);

/* Weights [n, k], or n finite values of f16, as f32. They are kept until bt_cu_gemm_destroy(). */
const float *cuda_host_weights(const struct bt_cu_weight *w, uint32_t n, uint32_t k);
const float *cuda_host_weights_f16(const half *w, size_t n);

/* The value of each number in e4m3. */
extern float cuda_host_e4m3[256];

#endif
