/* Products of deterministic engines (engine.deterministic): a row's result has the same bits
 * whatever the other rows of the step are, and on every GPU of this kind. All kernels add up k in
 * one order, which the shape alone decides: k is cut into parts at multiples of 64, a part is
 * summed from its beginning to its end in steps of 16, and the parts are added in their order. So
 * which kernel takes a product may depend on the number of rows. cuBLASLt is not used: its order
 * depends on the algorithm that it chooses. Asynchronous on the compute stream; owner thread: the
 * engine's. */
#include <stdio.h>

#include "common/engine/cuda/device.h"
#include "common/engine/cuda/gemm/wide.h"
#include "common/engine/cuda/step/step_priv.h"

/* A GPU has 132 multiprocessors, and a block of skinny.h computes at least 64 rows of weights. So
 * small matrices are cut into parts until about as many blocks read them. The numbers are constants
 * and not the device's, as results depend on them. */
uint32_t bt_cu_invariant_parts(uint32_t n, uint32_t k)
{
    uint32_t parts = 1;
    while (parts < 4 && n / 64 * (parts * 2) <= 132 && k / 64 >= parts * 2) {
        parts *= 2;
    }
    return parts;
}

bool bt_cu_invariant_way(uint32_t way, uint32_t m, uint32_t n, uint32_t k)
{
    return bt_cu_skinny_parts(way) == bt_cu_invariant_parts(n, k) &&
           bt_cu_skinny_fits(way, m, n, k, BT_CU_WEIGHT_BF16);
}

/* The way of skinny.h for so many rows: the timed one, or the first that cuts k alike. */
static uint32_t way_for(const struct bt_engine *e, uint32_t m, uint32_t n, uint32_t k,
                        enum bt_cu_skinny_end end)
{
    int way = bt_cu_gemm_way(e->gemm, m, n, k, BT_CU_WEIGHT_BF16, end);
    uint32_t i = 0;
    if (way >= 0) {
        return (uint32_t)way;
    }
    while (!bt_cu_invariant_way(i, BT_CU_SKINNY_ROWS, n, k)) {
        i++; /* bt_cu_check_invariant has found one */
    }
    return i;
}

/* y (+)= a * w^T of many rows: one launch for each part of k. */
static bt_status_t sum_parts(struct bt_engine *e, const struct bt_cu_weight *w, const void *a,
                             float *y, uint32_t m, uint32_t n, uint32_t k, bool add)
{
    uint32_t parts = bt_cu_invariant_parts(n, k), steps = BT_DIV_UP(k, 64u);
    for (uint32_t i = 0; i < parts; i++) {
        const struct bt_cu_wide_part part = {steps * i / parts, steps * (i + 1) / parts};
        BT_CU_TRY(e, bt_cu_wide_sum(w->w, a, y, m, n, k, part, add || i > 0, e->compute));
    }
    return BT_OK;
}

bt_status_t bt_cu_product_invariant(struct bt_engine *e, const struct bt_cu_weight *w,
                                    const void *a, void *y, uint32_t m, uint32_t n, uint32_t k,
                                    enum bt_cu_skinny_end end)
{
    const bool swiglu = end == BT_CU_SKINNY_SWIGLU_ROUNDED;
    const size_t from = (size_t)k * 2, to = swiglu ? (size_t)n : (size_t)n * 4;
    /* wide.h sums a SwiGLU's k in one part. */
    const bool whole = bt_cu_invariant_parts(n, k) == 1;
    if (m > BT_CU_SKINNY_ROWS && bt_cu_wide_fits(m, n, k) && (whole || !swiglu)) {
        if (!swiglu) {
            return sum_parts(e, w, a, y, m, n, k, end == BT_CU_SKINNY_ADD);
        }
        BT_CU_TRY(e, bt_cu_wide_swiglu(w->w, a, y, m, n, k, e->compute));
        return BT_OK;
    }
    for (uint32_t r = 0; r < m; r += BT_CU_SKINNY_ROWS) {
        uint32_t rows = BT_MIN(m - r, (uint32_t)BT_CU_SKINNY_ROWS);
        BT_CU_TRY(e, bt_cu_skinny(way_for(e, rows, n, k, end), *w, (const uint8_t *)a + r * from,
                                  (uint8_t *)y + r * to, rows, n, k, end, e->compute));
    }
    return BT_OK;
}

static bool any_way(uint32_t n, uint32_t k)
{
    for (uint32_t i = 0; i < bt_cu_skinny_ways(); i++) {
        if (bt_cu_invariant_way(i, BT_CU_SKINNY_ROWS, n, k)) {
            return true;
        }
    }
    return false;
}

bt_status_t bt_cu_check_invariant(const struct bt_engine *e, char *err, size_t err_cap)
{
    const struct bt_model_config *c = &e->model.config;
    struct bt_cu_layer_product of[BT_CU_LAYER_PRODUCTS_MAX];
    const char *lacks = !bt_cu_hopper() ? "GPUs before Hopper"
                        : c->gpt2       ? "GPT-2's layers"
                        : e->e4m3       ? "model.kv_dtype: fp8"
                                        : NULL;
    uint32_t n = lacks ? 0 : bt_cu_layer_products(e, of);
    for (uint32_t i = 0; !lacks && i < n; i++) {
        lacks = any_way(of[i].n, of[i].k) ? NULL : "products of these sizes";
    }
    if (!lacks && !any_way(c->vocab, c->hidden)) {
        lacks = "a vocabulary that 16 does not divide";
    }
    if (lacks) {
        snprintf(err, err_cap,
                 "engine.deterministic: the cuda engine has no deterministic kernels for %s; set "
                 "it to false, or engine.device: cpu",
                 lacks);
        return BT_ERR_UNSUPPORTED;
    }
    return BT_OK;
}
