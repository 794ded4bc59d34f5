/* Places matrices in e4m3: those of fp8 checkpoints, and those that model.quantize converts. Runs
 * in open; its work is enqueued on the stream of loads. */
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

/* Matrices that bt_cu_product multiplies with (step/products.c). */
static bool of_attention(const struct bt_decoder_tensors *d)
{
    return d->item == BT_DECODER_QKV || d->item == BT_DECODER_O || d->item == BT_DECODER_Q_A ||
           d->item == BT_DECODER_Q_B || d->item == BT_DECODER_KV_A;
}
static bool of_mlp(const struct bt_decoder_tensors *d)
{
    return d->item == BT_DECODER_GATE_UP || d->item == BT_DECODER_DOWN;
}
static bool of_experts(const struct bt_decoder_tensors *d)
{
    return bt_cu_is_expert(d) || bt_cu_is_shared(d);
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
static bool is_whole(const struct bt_tensor *t)
{
    return t->block_rows == t->dims[0] && t->block_cols == t->dims[1];
}
static bool is_rows(const struct bt_tensor *t)
{
    return is_whole(t) || (t->block_rows == 1 && t->block_cols == t->dims[1]);
}

/* What kernels can read; a whole number of blocks for each expert, and they have no scale for each
 * row. */
static enum bt_cu_weight_kind kind_of(const struct bt_model_config *c,
                                      const struct bt_decoder_tensors *d)
{
    const uint32_t block = BT_CU_WEIGHT_BLOCK;
    bool experts = of_experts(d), rows = !experts, blocks;
    bool fits = experts ? c->hidden % block == 0 && c->experts.intermediate % block == 0
                        : (of_attention(d) || of_mlp(d)) &&
                              bt_cu_gemm_e4m3_fits((uint32_t)d->rows, d->cols);
    uint64_t before;
    bt_cu_loader_rows(c, d, &before);
    blocks = parts_aligned(d) && before % block == 0;
    if (!fits) {
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
        blocks = blocks && (is_blocks(t) || (experts && is_whole(t)));
        rows = rows && is_rows(t);
    }
    return blocks ? BT_CU_WEIGHT_BLOCKS : rows ? BT_CU_WEIGHT_ROWS : BT_CU_WEIGHT_BF16;
}

enum bt_cu_weight_kind bt_cu_fp8_kind(const struct bt_cu_loader *l,
                                      const struct bt_decoder_tensors *d)
{
    const struct bt_cu_model *m = &l->e->model;
    bool may = of_experts(d)     ? m->e4m3_experts
               : of_attention(d) ? m->e4m3_attention
                                 : of_mlp(d) && m->e4m3_mlp;
    return may ? kind_of(&m->config, d) : BT_CU_WEIGHT_BF16;
}

/* What look has found: a matrix of each kind of scales that is joined from several items (MLA's
 * first) has one kind. */
struct found {
    const struct bt_model_config *c;
    bool attention, mlp, experts;
    enum bt_cu_weight_kind first; /* of the item before, in MLA's first matrix */
};

static bt_status_t look(void *arg, const struct bt_decoder_tensors *d)
{
    struct found *f = arg;
    const enum bt_cu_weight_kind kind = kind_of(f->c, d);
    uint64_t before;
    if (of_experts(d)) {
        f->experts = f->experts && kind != BT_CU_WEIGHT_BF16;
    } else if (of_mlp(d)) {
        f->mlp = f->mlp && kind != BT_CU_WEIGHT_BF16;
    } else if (of_attention(d)) {
        f->attention = f->attention && kind != BT_CU_WEIGHT_BF16;
        bt_cu_loader_rows(f->c, d, &before);
        f->attention = f->attention && (before == 0 || kind == f->first);
        f->first = bt_cu_loader_rows(f->c, d, &before) > d->rows ? kind : f->first;
    }
    return BT_OK;
}

bt_status_t bt_cu_fp8_look(struct bt_cu_loader *l, const struct bt_engine_config *conf)
{
    struct bt_cu_model *m = &l->e->model;
    const struct bt_model_config *c = &m->config;
    /* invariant.c has bf16 alone. */
    bool may = !l->e->deterministic && bt_model_stays_fp8(c) &&
               bt_model_is_fp8(conf->model_dir, conf->quantize);
    struct found f = {.c = c,
                      .attention = may,
                      .mlp = may && bt_cu_mlp_width(c),
                      .experts = may && bt_cu_has_experts(c)};
    struct bt_engine_config quiet = *conf;
    quiet.progress = NULL;
    bt_status_t st = may ? bt_decoder_load(&quiet, c, look, &f, l->err, l->err_cap) : BT_OK;
    m->e4m3_attention = f.attention;
    m->e4m3_mlp = f.mlp;
    m->e4m3_experts = f.experts;
    return st;
}

/* Part of a tensor, for rows of the matrix that it becomes. */
struct piece {
    const struct bt_tensor *t; /* NULL: dummy weights are wanted */
    uint32_t row, col;         /* of the tensor, where the piece begins */
    uint32_t rows, cols;
};

/* The i-th piece of an item: its parts below each other; false: there is no more. A shared expert
 * that is `always` times as wide as a routed one becomes as many of them (weights.c). */
static bool piece_at(const struct bt_model_config *c, const struct bt_decoder_tensors *d,
                     uint32_t i, struct piece *p)
{
    const uint32_t inter = c->experts.intermediate;
    uint32_t pieces = d->n_parts * (bt_cu_is_shared(d) ? c->experts.shared / inter : 1);
    if (i >= pieces) {
        return false;
    }
    const struct bt_decoder_part *part = &d->parts[i % d->n_parts];
    *p = (struct piece){part->t, 0, 0, part->rows, d->cols};
    if (d->item == BT_DECODER_SHARED_GATE_UP) {
        p->row = i / d->n_parts * inter;
        p->rows = inter;
    } else if (d->item == BT_DECODER_SHARED_DOWN) {
        p->col = i * inter;
        p->cols = inter;
    }
    return true;
}

/* Where an item is in the matrix that it is part of. */
struct target {
    uint32_t n, k; /* of the matrix */
    uint32_t row, rows;
};
static struct target target_of(const struct bt_model_config *c, const struct bt_decoder_tensors *d)
{
    const struct bt_cu_experts x = bt_cu_experts_of(c);
    uint64_t before, rows = bt_cu_loader_rows(c, d, &before);
    struct target to = {(uint32_t)rows, d->cols, (uint32_t)before, (uint32_t)d->rows};
    if (of_experts(d)) {
        const bool up =
            d->item == BT_DECODER_EXPERT_GATE_UP || d->item == BT_DECODER_SHARED_GATE_UP;
        const uint32_t each = up ? 2 * x.inter : x.hidden;
        const uint32_t at = bt_cu_is_shared(d) ? c->experts.n : d->expert;
        to = (struct target){x.n * each, up ? x.hidden : x.inter, at * each,
                             bt_cu_is_shared(d) ? x.always * each : each};
    }
    return to;
}

/* A piece's scales into those of the item, whose row `row` is the piece's first. */
static void join_scales(enum bt_cu_weight_kind kind, const struct piece *p, uint32_t row,
                        uint32_t rows, float *to)
{
    const struct bt_tensor *t = p->t;
    const uint32_t block = BT_CU_WEIGHT_BLOCK, stride = bt_cu_scale_stride(p->cols);
    size_t down = BT_DIV_UP(t->dims[0], t->block_rows),
           across = BT_DIV_UP(t->dims[1], t->block_cols);
    float *from = bt_malloc(down * across * sizeof(*from));
    bt_tensor_values(t->scale, 0, down * across, BT_TENSOR_F32, from);
    for (uint32_t i = 0; kind == BT_CU_WEIGHT_BLOCKS && i < p->rows; i += block) {
        for (uint32_t j = 0; j < p->cols; j += block) {
            to[(size_t)((row + i) / block) * stride + j / block] =
                from[(p->row + i) / t->block_rows * across + (p->col + j) / t->block_cols];
        }
    }
    for (uint32_t i = 0; kind == BT_CU_WEIGHT_ROWS && i < p->rows * stride; i++) {
        to[(size_t)(i / p->rows) * rows + row + i % p->rows] = from[i % p->rows / t->block_rows];
    }
    free(from);
}

/* Scales of an item, whose matrix is w. */
static bt_status_t place_scales(struct bt_cu_loader *l, const struct bt_decoder_tensors *d,
                                const struct bt_cu_weight *w, const struct target *to)
{
    const uint32_t stride = bt_cu_scale_stride(to->k);
    const bool blocks = w->kind == BT_CU_WEIGHT_BLOCKS;
    /* Runs of scales: those of rows are columns of the matrix's. */
    size_t n = blocks ? 1 : stride;
    size_t run = blocks ? (size_t)BT_DIV_UP(to->rows, BT_CU_WEIGHT_BLOCK) * stride : to->rows;
    size_t at = blocks ? (size_t)(to->row / BT_CU_WEIGHT_BLOCK) * stride : to->row;
    float *all = bt_calloc(n * run, sizeof(*all));
    cudaError_t e = cudaSuccess;
    struct piece p;
    for (uint32_t i = 0, row = 0; piece_at(&l->e->model.config, d, i, &p); i++, row += p.rows) {
        join_scales(w->kind, &p, row, to->rows, all);
    }
    for (size_t i = 0; e == cudaSuccess && i < n; i++) {
        e = cudaMemcpy(w->scale + at + i * to->n, all + i * run, run * sizeof(*all),
                       cudaMemcpyHostToDevice);
    }
    free(all);
    return e == cudaSuccess ? BT_OK : bt_cu_loader_error(l, e, n * run * sizeof(*all));
}

/* Into the scratch memory, piece below piece. */
static bt_status_t gather(struct bt_cu_loader *l, const struct bt_decoder_tensors *d,
                          bt_tensor_dtype_t as)
{
    size_t item = as == BT_TENSOR_F8 ? 1 : 2, at = 0;
    bt_status_t st = scratch(l, (size_t)d->rows * d->cols * item);
    struct piece p;
    if (st == BT_OK && !d->parts[0].t) {
        return bt_cu_loader_dummy(l, d, l->scratch);
    }
    for (uint32_t i = 0; st == BT_OK && piece_at(&l->e->model.config, d, i, &p); i++) {
        const size_t stride = p.t->dims[1], from = p.row * stride + p.col;
        const struct bt_cu_view v = {p.t, from, p.rows, p.cols, stride, false};
        st = bt_cu_loader_upload(l, &v, as, (uint8_t *)l->scratch + at * item);
        at += (size_t)p.rows * p.cols;
    }
    return st;
}

/* Memory of the matrix that an item is part of; its first item takes it. */
static bt_status_t take_matrix(struct bt_cu_loader *l, enum bt_cu_weight_kind kind,
                               const struct target *to, struct bt_cu_weight *w)
{
    const size_t stride = bt_cu_scale_stride(to->k);
    size_t scales = kind == BT_CU_WEIGHT_BLOCKS ? BT_DIV_UP(to->n, BT_CU_WEIGHT_BLOCK) * stride
                                                : stride * to->n;
    struct bt_cu_weight y = {.kind = kind};
    if (w->w) {
        return BT_OK;
    }
    bt_status_t st = bt_cu_loader_take(l, (size_t)to->n * to->k, &y.w);
    st = st == BT_OK ? bt_cu_loader_take(l, scales * sizeof(*y.scale), (void **)&y.scale) : st;
    *w = st == BT_OK ? y : *w;
    return st;
}

bt_status_t bt_cu_fp8_place(struct bt_cu_loader *l, const struct bt_decoder_tensors *d,
                            struct bt_cu_weight *w)
{
    const struct target to = target_of(&l->e->model.config, d);
    uint32_t *bad = l->bad + d->layer;
    bt_status_t st = take_matrix(l, kind_of(&l->e->model.config, d), &to, w);
    st = st == BT_OK ? gather(l, d, d->quantize ? BT_TENSOR_BF16 : BT_TENSOR_F8) : st;
    if (st != BT_OK) {
        return st;
    }
    uint8_t *at = (uint8_t *)w->w + (size_t)to.row * to.k;
    float *scale = w->scale + (size_t)(to.row / BT_CU_WEIGHT_BLOCK) * bt_cu_scale_stride(to.k);
    cudaError_t e = d->quantize
                        ? bt_cu_quantize(l->scratch, to.rows, to.k, at, scale, bad, l->e->load)
                        : bt_cu_order(l->scratch, to.rows, to.k, at, bad, l->e->load);
    if (e != cudaSuccess) {
        return bt_cu_loader_error(l, e, (size_t)to.rows * to.k);
    }
    return d->quantize ? BT_OK : place_scales(l, d, w, &to);
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
