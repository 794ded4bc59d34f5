/* Places matrices in e4m3: those of fp8 checkpoints, and those that model.quantize converts. Runs
 * in open; what it enqueues is on the stream of loads. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/weights_priv.h"
#include "common/engine/fp8.h"

bt_status_t bt_cu_fp8_open(struct bt_cu_loader *l)
{
    size_t bytes = l->e->model.config.layers * sizeof(*l->bad);
    cudaError_t e = cudaMalloc((void **)&l->bad, bytes);
    e = e == cudaSuccess ? cudaMemsetAsync(l->bad, 0, bytes, l->e->load) : e;
    return e == cudaSuccess ? BT_OK : bt_cu_loader_error(l, e, bytes);
}

bt_status_t bt_cu_fp8_check(struct bt_cu_loader *l)
{
    uint32_t n = l->e->model.config.layers, *bad = bt_malloc(n * sizeof(*bad));
    cudaError_t e = cudaStreamSynchronize(l->e->load);
    e = e == cudaSuccess ? cudaMemcpy(bad, l->bad, n * sizeof(*bad), cudaMemcpyDeviceToHost) : e;
    bt_status_t st = e == cudaSuccess ? BT_OK : bt_cu_loader_error(l, e, n * sizeof(*bad));
    for (uint32_t i = 0; st == BT_OK && i < n; i++) {
        if (bad[i]) {
            snprintf(l->err, l->err_cap, "%s: a matrix of layer %u has values that are not finite",
                     l->dir, i);
            st = BT_ERR_INVALID;
        }
    }
    free(bad);
    return st;
}

void bt_cu_fp8_close(struct bt_cu_loader *l)
{
    cudaFree(l->scratch);
    cudaFree(l->bad);
}

/* Room for a matrix that is not yet as it will be kept. Work that uses the old room comes before.
 */
static bt_status_t scratch(struct bt_cu_loader *l, size_t bytes)
{
    if (bytes <= l->scratch_bytes) {
        return BT_OK;
    }
    cudaError_t e = cudaStreamSynchronize(l->e->load);
    cudaFree(l->scratch);
    l->scratch = NULL;
    l->scratch_bytes = 0;
    e = e == cudaSuccess ? cudaMalloc(&l->scratch, bytes) : e;
    if (e != cudaSuccess) {
        return bt_cu_loader_error(l, e, bytes);
    }
    l->scratch_bytes = bytes;
    return BT_OK;
}

/* A matrix that bt_cu_product multiplies with (step/products.c). */
static bool of_layer(const struct bt_decoder_tensors *d)
{
    return d->item == BT_DECODER_QKV || d->item == BT_DECODER_O || d->item == BT_DECODER_GATE_UP ||
           d->item == BT_DECODER_DOWN;
}

/* No block has rows of two parts. */
static bool parts_aligned(const struct bt_decoder_tensors *d)
{
    for (uint32_t i = 0; i + 1 < d->n_parts; i++) {
        if (d->parts[i].rows % BT_CU_WEIGHT_BLOCK) {
            return false;
        }
    }
    return true;
}

static bool is_blocks(const struct bt_tensor *t)
{
    uint64_t block = BT_CU_WEIGHT_BLOCK;
    return t->block_rows == BT_MIN(block, t->dims[0]) && t->block_cols == block;
}

static bool is_rows(const struct bt_tensor *t)
{
    return (t->block_rows == 1 || t->block_rows == t->dims[0]) && t->block_cols == t->dims[1];
}

static enum bt_cu_weight_kind kind_of(const struct bt_decoder_tensors *d)
{
    bool blocks = parts_aligned(d), rows = true;
    if (!of_layer(d) || !bt_cu_gemm_e4m3_fits((uint32_t)d->rows, d->cols)) {
        return BT_CU_WEIGHT_BF16;
    }
    if (d->quantize) {
        return blocks ? BT_CU_WEIGHT_BLOCKS : BT_CU_WEIGHT_BF16;
    }
    for (uint32_t i = 0; i < d->n_parts; i++) {
        const struct bt_tensor *t = d->parts[i].t;
        if (!t || t->dtype != BT_TENSOR_F8) {
            return BT_CU_WEIGHT_BF16;
        }
        blocks = blocks && is_blocks(t);
        rows = rows && is_rows(t);
    }
    return blocks ? BT_CU_WEIGHT_BLOCKS : rows ? BT_CU_WEIGHT_ROWS : BT_CU_WEIGHT_BF16;
}

enum bt_cu_weight_kind bt_cu_fp8_kind(const struct bt_cu_loader *l,
                                      const struct bt_decoder_tensors *d)
{
    return l->e->model.e4m3 ? kind_of(d) : BT_CU_WEIGHT_BF16;
}

static bt_status_t look(void *arg, const struct bt_decoder_tensors *d)
{
    bool *all = arg;
    *all = *all && (!of_layer(d) || kind_of(d) != BT_CU_WEIGHT_BF16);
    return BT_OK;
}

bt_status_t bt_cu_fp8_look(struct bt_cu_loader *l, const struct bt_engine_config *conf)
{
    const struct bt_model_config *c = &l->e->model.config;
    /* invariant.c has bf16 alone. */
    bool all = !l->e->deterministic && bt_model_stays_fp8(c) &&
               bt_model_is_fp8(conf->model_dir, conf->quantize);
    struct bt_engine_config quiet = *conf;
    quiet.progress = NULL;
    bt_status_t st = all ? bt_decoder_load(&quiet, c, look, &all, l->err, l->err_cap) : BT_OK;
    l->e->model.e4m3 = all;
    return st;
}

/* A part's scales into those of the whole matrix of n rows, whose row `row` is the part's first. */
static void join_scales(enum bt_cu_weight_kind kind, const struct bt_tensor *t, uint32_t row,
                        uint32_t n, float *to)
{
    uint32_t rows = (uint32_t)t->dims[0], cols = (uint32_t)t->dims[1];
    uint32_t down = BT_DIV_UP(rows, t->block_rows), across = BT_DIV_UP(cols, t->block_cols);
    uint32_t stride = bt_cu_scale_stride(cols);
    float *from = bt_malloc((size_t)down * across * sizeof(*from));
    bt_tensor_values(t->scale, 0, (size_t)down * across, BT_TENSOR_F32, from);
    for (uint32_t i = 0; kind == BT_CU_WEIGHT_BLOCKS && i < down; i++) {
        memcpy(to + (size_t)(row / BT_CU_WEIGHT_BLOCK + i) * stride, from + (size_t)i * across,
               across * sizeof(*to));
    }
    for (uint32_t i = 0; kind == BT_CU_WEIGHT_ROWS && i < rows * stride; i++) {
        to[(size_t)(i / rows) * n + row + i % rows] = from[i % rows / t->block_rows];
    }
    free(from);
}

static bt_status_t place_scales(struct bt_cu_loader *l, const struct bt_decoder_tensors *d,
                                const struct bt_cu_weight *w, size_t n)
{
    float *all = bt_calloc(n, sizeof(*all));
    uint32_t row = 0;
    for (uint32_t i = 0; i < d->n_parts; i++) {
        join_scales(w->kind, d->parts[i].t, row, (uint32_t)d->rows, all);
        row += d->parts[i].rows;
    }
    cudaError_t e = cudaMemcpy(w->scale, all, n * sizeof(*all), cudaMemcpyHostToDevice);
    free(all);
    return e == cudaSuccess ? BT_OK : bt_cu_loader_error(l, e, n * sizeof(*all));
}

/* Into the scratch memory, part below part. */
static bt_status_t gather(struct bt_cu_loader *l, const struct bt_decoder_tensors *d,
                          bt_tensor_dtype_t as)
{
    size_t item = as == BT_TENSOR_F8 ? 1 : 2, at = 0;
    bt_status_t st = scratch(l, (size_t)d->rows * d->cols * item);
    if (st == BT_OK && !d->parts[0].t) {
        return bt_cu_loader_dummy(l, d, l->scratch);
    }
    for (uint32_t i = 0; st == BT_OK && i < d->n_parts; i++) {
        const struct bt_cu_view v = {d->parts[i].t, 0, d->parts[i].rows, d->cols, d->cols, false};
        st = bt_cu_loader_upload(l, &v, as, (uint8_t *)l->scratch + at * item);
        at += (size_t)d->parts[i].rows * d->cols;
    }
    return st;
}

bt_status_t bt_cu_fp8_place(struct bt_cu_loader *l, const struct bt_decoder_tensors *d,
                            struct bt_cu_weight *w)
{
    const uint32_t n = (uint32_t)d->rows, k = d->cols, stride = bt_cu_scale_stride(k);
    const enum bt_cu_weight_kind kind = kind_of(d);
    uint32_t *bad = l->bad + d->layer;
    size_t scales = kind == BT_CU_WEIGHT_BLOCKS ? (size_t)BT_DIV_UP(n, BT_CU_WEIGHT_BLOCK) * stride
                                                : (size_t)stride * n;
    struct bt_cu_weight y = {.kind = kind};
    bt_status_t st = bt_cu_loader_take(l, (size_t)n * k, &y.w);
    st = st == BT_OK ? bt_cu_loader_take(l, scales * sizeof(*y.scale), (void **)&y.scale) : st;
    st = st == BT_OK ? gather(l, d, d->quantize ? BT_TENSOR_BF16 : BT_TENSOR_F8) : st;
    if (st != BT_OK) {
        return st;
    }
    *w = y;
    cudaError_t e = d->quantize ? bt_cu_quantize(l->scratch, n, k, y.w, y.scale, bad, l->e->load)
                                : bt_cu_order(l->scratch, n, k, y.w, bad, l->e->load);
    if (e != cudaSuccess) {
        return bt_cu_loader_error(l, e, (size_t)n * k);
    }
    return d->quantize ? BT_OK : place_scales(l, d, w, scales);
}

bt_status_t bt_cu_fp8_round(struct bt_cu_loader *l, const struct bt_decoder_part *p, uint32_t cols,
                            struct bt_tensor *rounded_p)
{
    size_t n = (size_t)p->rows * cols;
    float *w = malloc(n * sizeof(*w));
    if (!w) {
        return bt_cu_loader_error(l, cudaErrorMemoryAllocation, n * sizeof(*w));
    }
    bt_tensor_values(p->t, 0, n, BT_TENSOR_F32, w);
    if (p->transposed) {
        float *turned = bt_malloc(n * sizeof(*turned));
        for (size_t i = 0; i < n; i++) {
            turned[i] = w[i % cols * p->rows + i / cols];
        }
        free(w);
        w = turned;
    }
    if (!bt_fp8_quantize(w, p->rows, cols, NULL, NULL)) {
        snprintf(l->err, l->err_cap,
                 "%s: tensor %s has a value that is not finite; model.quantize cannot convert it",
                 l->dir, p->name);
        free(w);
        return BT_ERR_INVALID;
    }
    *rounded_p = (struct bt_tensor){
        .dtype = BT_TENSOR_F32, .data = (const uint8_t *)w, .bytes = n * sizeof(*w)};
    return BT_OK;
}
