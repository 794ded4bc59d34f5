/* Places a decoder model for the CPU engine: vectors in f32, the embedding in bf16 parts, products
 * packed. Runs once in open. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cpu/cpu_priv.h"
#include "common/engine/decoder.h"
#include "common/engine/fp8.h"

struct loader {
    struct bt_cpu_model *m;
    struct bt_gemm *g;
    const char *dir;
    uint32_t mlp_acts;
    uint64_t seed; /* of dummy weights */
    char *err;
    size_t err_cap;
};

/* A random value that bf16 holds exactly; norm weights are near 1. */
static float dummy_value(struct loader *l, uint32_t cols)
{
    l->seed = l->seed * 6364136223846793005ull + 1442695040888963407ull;
    float u = (float)(int32_t)(l->seed >> 32) * 0x1p-31f;
    float v = cols == 0 ? 1.0f + 0.1f * u : u * bt_decoder_dummy_width(cols);
    return bt_f32_of_bf16(bt_bf16_of_f32(v));
}

/* [cols, rows] becomes [rows, cols]. */
static void turn(float *w, uint32_t rows, uint32_t cols)
{
    float *old = bt_malloc((size_t)rows * cols * sizeof(*old));
    memcpy(old, w, (size_t)rows * cols * sizeof(*old));
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t c = 0; c < cols; c++) {
            w[(size_t)r * cols + c] = old[(size_t)c * rows + r];
        }
    }
    free(old);
}

/* All parts one below the other, in f32; the caller frees. */
static bt_status_t join(struct loader *l, const struct bt_decoder_tensors *d, float **out)
{
    size_t width = BT_MAX(d->cols, 1u), at = 0;
    float *all = malloc(d->rows * width * sizeof(*all));
    if (!all) {
        snprintf(l->err, l->err_cap, "%s: %s: no memory for %zu bytes of weights", l->dir,
                 d->parts[0].name, d->rows * width * sizeof(*all));
        return BT_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < d->n_parts; i++) {
        size_t n = d->parts[i].rows * width;
        if (d->parts[i].t) {
            bt_tensor_values(d->parts[i].t, 0, n, BT_TENSOR_F32, all + at);
        }
        if (d->parts[i].t && d->parts[i].transposed) {
            turn(all + at, d->parts[i].rows, d->cols);
        }
        for (size_t j = 0; !d->parts[i].t && j < n; j++) {
            all[at + j] = dummy_value(l, d->cols);
        }
        if (d->quantize && !bt_fp8_quantize(all + at, d->parts[i].rows, d->cols, NULL, NULL)) {
            snprintf(l->err, l->err_cap,
                     "%s: tensor %s has a value that is not finite; model.quantize cannot convert "
                     "it",
                     l->dir, d->parts[i].name);
            free(all);
            return BT_ERR_INVALID;
        }
        at += n;
    }
    *out = all;
    return BT_OK;
}

/* Stores the embedding as bf16, with a second bf16 part if one is not exact. */
static bt_status_t place_embedding(struct loader *l, const float *all, size_t n)
{
    struct bt_cpu_model *m = l->m;
    m->embed = malloc(n * sizeof(*m->embed));
    if (!m->embed) {
        snprintf(l->err, l->err_cap, "%s: no memory for the embedding", l->dir);
        return BT_ERR_NO_MEMORY;
    }
    for (size_t i = 0; i < n; i++) {
        m->embed[i] = bt_bf16_of_f32(all[i]);
        float lo = all[i] - bt_f32_of_bf16(m->embed[i]);
        if (lo != 0 && !m->embed_lo) {
            m->embed_lo = bt_calloc(n, sizeof(*m->embed_lo));
        }
        if (lo != 0) {
            m->embed_lo[i] = bt_bf16_of_f32(lo);
        }
    }
    return BT_OK;
}

/* Packs a matrix [n, k]. */
static bt_status_t pack(struct loader *l, const float *w_nk, uint32_t k, uint32_t n, uint32_t acts,
                        bool swiglu, struct bt_linear **to)
{
    const struct bt_linear_spec spec = {.k = k, .n = n, .acts = acts, .swiglu = swiglu};
    return bt_linear_create(l->g, &spec, w_nk, to, l->err, l->err_cap);
}

/* MLA's matrix [heads * (nope + v), kv_rank]: a head's first rows make keys from latents; their
 * transpose takes queries to latents. Its other rows make values. */
static bt_status_t place_kv_b(struct loader *l, struct bt_cpu_mla *m, const float *all)
{
    const struct bt_model_config *c = &l->m->config;
    uint32_t nope = c->mla.nope, v = c->mla.v, rank = c->mla.kv_rank;
    float *turned = bt_malloc((size_t)nope * rank * sizeof(*turned));
    m->k_up = bt_calloc(c->heads, sizeof(*m->k_up));
    m->v_up = bt_calloc(c->heads, sizeof(*m->v_up));
    bt_status_t st = BT_OK;
    for (uint32_t h = 0; st == BT_OK && h < c->heads; h++) {
        const float *k = all + (size_t)h * (nope + v) * rank;
        for (uint32_t i = 0; i < nope; i++) {
            for (uint32_t j = 0; j < rank; j++) {
                turned[(size_t)j * nope + i] = k[(size_t)i * rank + j];
            }
        }
        st = pack(l, turned, nope, rank, 2, false, &m->k_up[h]);
        st = st == BT_OK ? pack(l, k + (size_t)nope * rank, rank, v, 2, false, &m->v_up[h]) : st;
    }
    free(turned);
    return st;
}

/* Where a vector goes; NULL: the item is a matrix. */
static float **vector_of(struct bt_cpu_model *m, const struct bt_decoder_tensors *d)
{
    struct bt_cpu_layer *y = &m->layers[d->layer];
    float **const vectors[BT_DECODER_ITEMS] = {
        [BT_DECODER_NORM_ATTN] = &y->norm_attn,
        [BT_DECODER_NORM_ATTN_BIAS] = &y->norm_attn_bias,
        [BT_DECODER_NORM_MLP] = &y->norm_mlp,
        [BT_DECODER_NORM_MLP_BIAS] = &y->norm_mlp_bias,
        [BT_DECODER_QKV_BIAS] = &y->qkv_bias,
        [BT_DECODER_Q_NORM] = &y->q_norm,
        [BT_DECODER_K_NORM] = &y->k_norm,
        [BT_DECODER_Q_A_NORM] = &y->mla.q_a_norm,
        [BT_DECODER_KV_A_NORM] = &y->mla.kv_a_norm,
        [BT_DECODER_O_BIAS] = &y->o_bias,
        [BT_DECODER_UP_BIAS] = &y->up_bias,
        [BT_DECODER_DOWN_BIAS] = &y->down_bias,
        [BT_DECODER_ROUTER_BIAS] = &y->router_bias,
        [BT_DECODER_MTP_NORM_EMBED] = &m->mtp.norm_embed,
        [BT_DECODER_MTP_NORM_STATE] = &m->mtp.norm_state,
        [BT_DECODER_MTP_NORM] = &m->mtp.norm,
        [BT_DECODER_NORM] = &m->norm,
        [BT_DECODER_NORM_BIAS] = &m->norm_bias,
        [BT_DECODER_POSITIONS] = &m->positions,
    };
    return vectors[d->item];
}

/* Where a product goes; *mlp_p: it is part of an MLP, *swiglu_p: gate and up. */
static struct bt_linear **product_of(struct bt_cpu_model *m, const struct bt_decoder_tensors *d,
                                     bool *mlp_p, bool *swiglu_p)
{
    struct bt_cpu_layer *y = &m->layers[d->layer];
    bool routed = d->item == BT_DECODER_EXPERT_GATE_UP || d->item == BT_DECODER_EXPERT_DOWN;
    if (routed && !y->experts) {
        y->experts = bt_calloc(m->config.experts.n, sizeof(*y->experts));
    }
    struct bt_cpu_mlp *x = routed ? &y->experts[d->expert] : &y->mlp;
    struct bt_linear **const products[BT_DECODER_ITEMS] = {
        [BT_DECODER_QKV] = &y->qkv,
        [BT_DECODER_Q_A] = &y->mla.q_a,
        [BT_DECODER_Q_B] = &y->mla.q_b,
        [BT_DECODER_KV_A] = &y->mla.kv_a,
        [BT_DECODER_O] = &y->o,
        [BT_DECODER_ROUTER] = &y->router,
        [BT_DECODER_MTP_JOIN] = &m->mtp.join,
        [BT_DECODER_HEAD] = &m->lm_head,
        [BT_DECODER_GATE_UP] = &x->in,
        [BT_DECODER_UP] = &x->in,
        [BT_DECODER_DOWN] = &x->down,
        [BT_DECODER_EXPERT_GATE_UP] = &x->in,
        [BT_DECODER_EXPERT_DOWN] = &x->down,
        [BT_DECODER_SHARED_GATE_UP] = &y->shared.in,
        [BT_DECODER_SHARED_DOWN] = &y->shared.down,
    };
    *swiglu_p = d->item == BT_DECODER_GATE_UP || d->item == BT_DECODER_EXPERT_GATE_UP ||
                d->item == BT_DECODER_SHARED_GATE_UP;
    *mlp_p = *swiglu_p || d->item == BT_DECODER_UP || d->item == BT_DECODER_DOWN ||
             d->item == BT_DECODER_EXPERT_DOWN || d->item == BT_DECODER_SHARED_DOWN;
    return products[d->item];
}

static bt_status_t place(void *arg, const struct bt_decoder_tensors *d)
{
    struct loader *l = arg;
    struct bt_cpu_model *m = l->m;
    float *all, **vector = vector_of(m, d);
    bt_status_t st = join(l, d, &all);
    if (st != BT_OK) {
        return st;
    }
    if (vector) {
        *vector = all;
        return BT_OK;
    }
    bool mlp, swiglu;
    struct bt_linear **product = product_of(m, d, &mlp, &swiglu);
    if (d->item == BT_DECODER_EMBED) {
        st = place_embedding(l, all, (size_t)d->rows * d->cols);
    } else if (d->item == BT_DECODER_KV_B) {
        st = place_kv_b(l, &m->layers[d->layer].mla, all);
    } else {
        st = pack(l, all, d->cols, (uint32_t)d->rows, mlp ? l->mlp_acts : 2, swiglu, product);
    }
    free(all);
    return st;
}

bt_status_t bt_cpu_model_load(struct bt_cpu_model *m, struct bt_gemm *g, uint32_t mlp_acts,
                              const struct bt_engine_config *conf, char *err, size_t err_cap)
{
    struct loader l = {.m = m,
                       .g = g,
                       .dir = conf->model_dir,
                       .mlp_acts = mlp_acts,
                       .seed = 1,
                       .err = err,
                       .err_cap = err_cap};
    m->layers = bt_calloc(bt_model_kv_layers(&m->config), sizeof(*m->layers));
    return bt_decoder_load(conf, &m->config, place, &l, err, err_cap);
}

static void mlp_cleanup(struct bt_cpu_mlp *m)
{
    bt_linear_destroy(m->in);
    bt_linear_destroy(m->down);
}

static void mla_cleanup(struct bt_cpu_mla *m, uint32_t heads)
{
    bt_linear_destroy(m->q_a);
    free(m->q_a_norm);
    bt_linear_destroy(m->q_b);
    bt_linear_destroy(m->kv_a);
    free(m->kv_a_norm);
    for (uint32_t h = 0; m->k_up && h < heads; h++) {
        bt_linear_destroy(m->k_up[h]);
        bt_linear_destroy(m->v_up[h]);
    }
    free(m->k_up);
    free(m->v_up);
}

void bt_cpu_model_cleanup(struct bt_cpu_model *m)
{
    for (uint32_t i = 0; m->layers && i < bt_model_kv_layers(&m->config); i++) {
        struct bt_cpu_layer *y = &m->layers[i];
        free(y->norm_attn);
        free(y->norm_attn_bias);
        free(y->norm_mlp);
        free(y->norm_mlp_bias);
        bt_linear_destroy(y->qkv);
        free(y->qkv_bias);
        free(y->q_norm);
        free(y->k_norm);
        mla_cleanup(&y->mla, m->config.heads);
        bt_linear_destroy(y->o);
        free(y->o_bias);
        mlp_cleanup(&y->mlp);
        free(y->up_bias);
        free(y->down_bias);
        bt_linear_destroy(y->router);
        free(y->router_bias);
        for (uint32_t x = 0; y->experts && x < m->config.experts.n; x++) {
            mlp_cleanup(&y->experts[x]);
        }
        free(y->experts);
        mlp_cleanup(&y->shared);
    }
    free(m->layers);
    free(m->mtp.norm_embed);
    free(m->mtp.norm_state);
    free(m->mtp.norm);
    bt_linear_destroy(m->mtp.join);
    free(m->embed);
    free(m->embed_lo);
    free(m->positions);
    free(m->norm);
    free(m->norm_bias);
    bt_linear_destroy(m->lm_head);
}
