/* Places a decoder model on the device: products and the embedding in bf16 (e4m3: weights_fp8.c),
 * vectors in f32. Runs once in open. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/engine/cuda/weights_priv.h"
#include "common/log/log.h"

#define STAGE_BYTES (64u << 20)

bt_status_t bt_cu_loader_error(struct bt_cu_loader *l, cudaError_t e, size_t bytes)
{
    snprintf(l->err, l->err_cap, "%s: %zu bytes of weights: %s", l->dir, bytes,
             cudaGetErrorString(e));
    return e == cudaErrorMemoryAllocation ? BT_ERR_NO_MEMORY : BT_ERR_DEVICE;
}

bt_status_t bt_cu_loader_take(struct bt_cu_loader *l, size_t bytes, void **p)
{
    struct bt_cu_model *m = &l->e->model;
    cudaError_t e = cudaMalloc(p, bytes);
    if (e != cudaSuccess) {
        return bt_cu_loader_error(l, e, bytes);
    }
    if (m->n_memory == m->cap_memory) {
        m->cap_memory = BT_MAX(64u, m->cap_memory * 2);
        m->memory = bt_realloc(m->memory, m->cap_memory * sizeof(*m->memory));
    }
    m->memory[m->n_memory++] = *p;
    m->bytes += bytes;
    return BT_OK;
}

static size_t item_of(bt_tensor_dtype_t as)
{
    return as == BT_TENSOR_F32 ? 4 : as == BT_TENSOR_F8 ? 1 : 2;
}

/* Values of rows [row, row + n) of a view. */
static void read_rows(const struct bt_cu_view *v, size_t row, size_t n, bt_tensor_dtype_t as,
                      uint8_t *out)
{
    size_t item = item_of(as);
    if (v->stride == v->width) {
        bt_tensor_values(v->t, v->from + row * v->stride, n * v->width, as, out);
        return;
    }
    for (size_t r = 0; r < n; r++) {
        bt_tensor_values(v->t, v->from + (row + r) * v->stride, v->width, as,
                         out + r * v->width * item);
    }
}

/* The same of a matrix that lies turned, in bf16. all: its values. */
static void turn_rows(const struct bt_cu_view *v, const uint16_t *all, size_t row, size_t n,
                      uint16_t *out)
{
    for (size_t c = 0; c < v->width; c++) {
        for (size_t r = 0; r < n; r++) {
            out[r * v->width + c] = all[c * v->rows + row + r];
        }
    }
}

/* Copies through two pinned buffers: while one is sent, several threads fill the other. */
bt_status_t bt_cu_loader_upload(struct bt_cu_loader *l, const struct bt_cu_view *v,
                                bt_tensor_dtype_t as, uint8_t *to)
{
    size_t item = item_of(as), per = BT_MAX(STAGE_BYTES / item / v->width, (size_t)1);
    uint16_t *all = v->turned ? bt_malloc(v->rows * v->width * sizeof(*all)) : NULL;
    cudaError_t e = cudaSuccess;
    bt_tensor_ahead(v->t);
    if (all) {
        bt_tensor_values(v->t, 0, v->rows * v->width, BT_TENSOR_BF16, all);
    }
    for (size_t at = 0, m; e == cudaSuccess && at < v->rows; at += m) {
        m = BT_MIN(per, v->rows - at);
        int i = l->turn ^= 1;
        e = cudaEventSynchronize(l->sent[i]);
        if (e == cudaSuccess && all) {
            turn_rows(v, all, at, m, (uint16_t *)l->stage[i]);
        } else if (e == cudaSuccess) {
            read_rows(v, at, m, as, l->stage[i]);
        }
        if (e == cudaSuccess) {
            e = cudaMemcpyAsync(to + at * v->width * item, l->stage[i], m * v->width * item,
                                cudaMemcpyHostToDevice, l->e->load);
        }
        e = e == cudaSuccess ? cudaEventRecord(l->sent[i], l->e->load) : e;
    }
    free(all);
    return e == cudaSuccess ? BT_OK : bt_cu_loader_error(l, e, v->rows * v->width * item);
}

bt_status_t bt_cu_loader_dummy(struct bt_cu_loader *l, const struct bt_decoder_tensors *d, void *to)
{
    cudaError_t e;
    if (d->cols) {
        e = bt_cu_dummy_bf16(to, d->rows * d->cols, bt_decoder_dummy_width(d->cols), ++l->seed,
                             l->e->load);
        return e == cudaSuccess ? BT_OK : bt_cu_loader_error(l, e, d->rows * d->cols * 2);
    }
    float *ones = bt_malloc(d->rows * sizeof(*ones));
    for (size_t i = 0; i < d->rows; i++) {
        ones[i] = 1;
    }
    e = cudaMemcpy(to, ones, d->rows * sizeof(*ones), cudaMemcpyHostToDevice);
    free(ones);
    return e == cudaSuccess ? BT_OK : bt_cu_loader_error(l, e, d->rows * sizeof(*ones));
}

/* Where a matrix is kept; NULL: the item is a vector. */
static struct bt_cu_weight *matrix_home(struct bt_cu_model *m, const struct bt_decoder_tensors *d)
{
    struct bt_cu_layer *y = &m->layers[d->layer];
    struct bt_cu_weight *const homes[BT_DECODER_ITEMS] = {
        [BT_DECODER_EMBED] = &m->embed,
        [BT_DECODER_POSITIONS] = &m->positions,
        [BT_DECODER_QKV] = &y->qkv,
        [BT_DECODER_Q_A] = &y->qkv,
        [BT_DECODER_Q_B] = m->config.mla.q_rank ? &y->latent.q_b : &y->qkv,
        [BT_DECODER_KV_A] = &y->qkv,
        [BT_DECODER_KV_B] = &y->latent.kv_b,
        [BT_DECODER_O] = &y->o,
        [BT_DECODER_GATE_UP] = &y->mlp.in,
        [BT_DECODER_UP] = &y->mlp.in,
        [BT_DECODER_DOWN] = &y->mlp.down,
        [BT_DECODER_ROUTER] = &y->experts.router,
        [BT_DECODER_EXPERT_GATE_UP] = &y->experts.in,
        [BT_DECODER_EXPERT_DOWN] = &y->experts.down,
        [BT_DECODER_SHARED_GATE_UP] = &y->experts.in,
        [BT_DECODER_SHARED_DOWN] = &y->experts.down,
        [BT_DECODER_HEAD] = &m->lm_head,
    };
    return homes[d->item];
}

static float **vector_home(struct bt_cu_model *m, const struct bt_decoder_tensors *d)
{
    struct bt_cu_layer *y = &m->layers[d->layer];
    float **const homes[BT_DECODER_ITEMS] = {
        [BT_DECODER_NORM_ATTN] = &y->norm_attn,
        [BT_DECODER_NORM_MLP] = &y->norm_mlp,
        [BT_DECODER_NORM_ATTN_BIAS] = &y->bias.norm_attn,
        [BT_DECODER_NORM_MLP_BIAS] = &y->bias.norm_mlp,
        [BT_DECODER_QKV_BIAS] = &y->qkv_bias,
        [BT_DECODER_Q_NORM] = &y->q_norm,
        [BT_DECODER_K_NORM] = &y->k_norm,
        [BT_DECODER_Q_A_NORM] = &y->latent.q_a_norm,
        [BT_DECODER_KV_A_NORM] = &y->latent.kv_a_norm,
        [BT_DECODER_O_BIAS] = &y->bias.o,
        [BT_DECODER_UP_BIAS] = &y->bias.up,
        [BT_DECODER_DOWN_BIAS] = &y->bias.down,
        [BT_DECODER_ROUTER_BIAS] = &y->experts.bias,
        [BT_DECODER_NORM] = &m->norm,
        [BT_DECODER_NORM_BIAS] = &m->norm_bias,
    };
    return homes[d->item];
}

uint64_t bt_cu_loader_rows(const struct bt_model_config *c, const struct bt_decoder_tensors *d,
                           uint64_t *before_p)
{
    uint64_t latents = c->mla.kv_rank + c->mla.rope;
    uint64_t queries = c->mla.q_rank ? c->mla.q_rank : (uint64_t)c->heads * c->head_dim;
    bool first = d->item == BT_DECODER_Q_A || (d->item == BT_DECODER_Q_B && !c->mla.q_rank);
    *before_p = d->item == BT_DECODER_KV_A ? queries : 0;
    return first || d->item == BT_DECODER_KV_A ? queries + latents : d->rows;
}

/* Memory for an item of `bytes`. All experts of a layer share one piece, which the first of them
 * takes, with the shared expert behind them; so do the parts of a layer's first product. */
static bt_status_t memory_of(struct bt_cu_loader *l, const struct bt_decoder_tensors *d,
                             size_t bytes, uint8_t **to_p)
{
    struct bt_cu_model *m = &l->e->model;
    const struct bt_cu_experts x = bt_cu_experts_of(&m->config);
    struct bt_cu_weight *w = matrix_home(m, d);
    void **home = w ? &w->w : (void **)vector_home(m, d);
    uint64_t before, rows = bt_cu_loader_rows(&m->config, d, &before);
    size_t row = bytes / d->rows, each = bt_cu_is_shared(d) ? bytes / x.always : bytes;
    bt_status_t st = BT_OK;
    if (*home == NULL) {
        st = bt_cu_loader_take(l, row * rows * (bt_cu_is_expert(d) ? x.n : 1), home);
    }
    if (st == BT_OK) {
        size_t at = bt_cu_is_shared(d) ? m->config.experts.n : d->expert;
        *to_p = (uint8_t *)*home + at * each + row * before;
    }
    return st;
}

/* A shared expert that is `always` times as wide as a routed one is as many of them: their results
 * add up to its own. */
static bt_status_t place_shared(struct bt_cu_loader *l, const struct bt_decoder_tensors *d,
                                uint8_t *to)
{
    const struct bt_model_config *c = &l->e->model.config;
    size_t inter = c->experts.intermediate, hidden = c->hidden, each = inter * hidden;
    bt_status_t st = BT_OK;
    for (uint32_t part = 0; st == BT_OK && part < d->n_parts; part++) {
        const struct bt_decoder_part *p = &d->parts[part];
        struct bt_tensor rounded = {0}; /* whole: its blocks do not end where experts do */
        st = d->quantize ? bt_cu_fp8_round(l, p, d->cols, &rounded) : BT_OK;
        const struct bt_tensor *t = d->quantize ? &rounded : p->t;
        for (uint32_t i = 0; st == BT_OK && i < c->experts.shared / inter; i++) {
            const struct bt_cu_view up = {t, i * each, inter, hidden, hidden, false};
            const struct bt_cu_view down = {t, i * inter, hidden, inter, c->experts.shared, false};
            st = bt_cu_loader_upload(l, d->item == BT_DECODER_SHARED_DOWN ? &down : &up,
                                     BT_TENSOR_BF16, to + (i * d->n_parts + part) * each * 2);
        }
        free((void *)rounded.data);
    }
    return st;
}

static bt_status_t make_f16(struct bt_cu_loader *l, const struct bt_decoder_tensors *d, void *w)
{
    cudaError_t e = bt_cu_bf16_to_f16(w, d->rows * d->cols, l->e->load);
    return e == cudaSuccess ? BT_OK : bt_cu_loader_error(l, e, d->rows * d->cols * 2);
}

static bt_status_t place(void *arg, const struct bt_decoder_tensors *d)
{
    struct bt_cu_loader *l = arg;
    struct bt_cu_model *m = &l->e->model;
    if (d->item == BT_DECODER_HEAD && m->config.tie_embeddings) {
        m->lm_head = m->embed;
        return BT_OK;
    }
    if (bt_cu_fp8_kind(l, d) != BT_CU_WEIGHT_BF16) {
        return bt_cu_fp8_place(l, d, matrix_home(m, d));
    }
    bool vector = matrix_home(m, d) == NULL;
    size_t width = vector ? 1 : d->cols, item = vector ? 4 : 2;
    uint8_t *to = NULL;
    bt_status_t st = memory_of(l, d, d->rows * width * item, &to);
    if (st == BT_OK && !d->parts[0].t) {
        st = bt_cu_loader_dummy(l, d, to);
        return st == BT_OK && d->item == BT_DECODER_KV_B ? make_f16(l, d, to) : st;
    }
    if (st == BT_OK && bt_cu_is_shared(d)) {
        return place_shared(l, d, to);
    }
    size_t at = 0;
    for (uint32_t i = 0; st == BT_OK && i < d->n_parts; i++) {
        const struct bt_decoder_part *p = &d->parts[i];
        struct bt_tensor rounded = {0};
        st = d->quantize ? bt_cu_fp8_round(l, p, d->cols, &rounded) : BT_OK;
        const struct bt_cu_view v = {d->quantize ? &rounded : p->t, 0, p->rows, width, width,
                                     !d->quantize && p->transposed};
        if (st == BT_OK) {
            st = bt_cu_loader_upload(l, &v, vector ? BT_TENSOR_F32 : BT_TENSOR_BF16, to + at);
        }
        free((void *)rounded.data);
        at += p->rows * width * item;
    }
    return st == BT_OK && d->item == BT_DECODER_KV_B ? make_f16(l, d, to) : st;
}

bt_status_t bt_cu_model_load(struct bt_engine *e, const struct bt_engine_config *conf, char *err,
                             size_t err_cap)
{
    struct bt_cu_loader l = {.e = e, .dir = conf->model_dir, .err = err, .err_cap = err_cap};
    bt_status_t st = BT_OK;
    uint64_t t0 = bt_mono_ns();
    e->model.layers = bt_calloc(e->model.config.layers, sizeof(*e->model.layers));
    for (int i = 0; st == BT_OK && i < 2; i++) {
        cudaError_t ce = cudaMallocHost((void **)&l.stage[i], STAGE_BYTES);
        if (ce == cudaSuccess) {
            ce = cudaEventCreateWithFlags(&l.sent[i], cudaEventDisableTiming);
        }
        st = ce == cudaSuccess ? BT_OK : bt_cu_loader_error(&l, ce, STAGE_BYTES);
    }
    st = st == BT_OK ? bt_cu_fp8_open(&l) : st;
    st = st == BT_OK ? bt_cu_fp8_look(&l, conf) : st;
    if (st == BT_OK) {
        st = bt_decoder_load(conf, &e->model.config, place, &l, err, err_cap);
    }
    cudaError_t ce = cudaStreamSynchronize(e->load);
    if (st == BT_OK && ce != cudaSuccess) {
        st = bt_cu_loader_error(&l, ce, e->model.bytes);
    }
    st = st == BT_OK ? bt_cu_fp8_check(&l) : st;
    bt_cu_fp8_close(&l);
    if (st == BT_OK) {
        double s = (double)(bt_mono_ns() - t0) * 1e-9, gb = (double)e->model.bytes * 1e-9;
        BT_INFO("engine_weights", "engine=cuda gb=%.1f seconds=%.2f gb_per_s=%.1f", gb, s, gb / s);
    }
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(l.stage[i]);
        if (l.sent[i]) {
            cudaEventDestroy(l.sent[i]);
        }
    }
    return st;
}

void bt_cu_model_cleanup(struct bt_cu_model *m)
{
    for (uint32_t i = 0; i < m->n_memory; i++) {
        cudaFree(m->memory[i]);
    }
    free(m->memory);
    free(m->layers);
}
