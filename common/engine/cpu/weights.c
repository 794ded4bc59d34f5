/* Places a decoder model for the CPU engine: vectors in f32, the embedding in bf16 parts, products
 * packed. Runs once in open. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cpu/cpu_priv.h"
#include "common/engine/decoder.h"

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
        for (size_t j = 0; !d->parts[i].t && j < n; j++) {
            all[at + j] = dummy_value(l, d->cols);
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

static bt_status_t place(void *arg, const struct bt_decoder_tensors *d)
{
    struct loader *l = arg;
    struct bt_cpu_model *m = l->m;
    struct bt_cpu_layer *y = &m->layers[d->layer];
    struct bt_linear **const products[BT_DECODER_ITEMS] = {
        [BT_DECODER_QKV] = &y->qkv,         [BT_DECODER_O] = &y->o,
        [BT_DECODER_GATE_UP] = &y->gate_up, [BT_DECODER_DOWN] = &y->down,
        [BT_DECODER_HEAD] = &m->lm_head,
    };
    float **const vectors[BT_DECODER_ITEMS] = {
        [BT_DECODER_NORM_ATTN] = &y->norm_attn, [BT_DECODER_NORM_MLP] = &y->norm_mlp,
        [BT_DECODER_QKV_BIAS] = &y->qkv_bias,   [BT_DECODER_Q_NORM] = &y->q_norm,
        [BT_DECODER_K_NORM] = &y->k_norm,       [BT_DECODER_NORM] = &m->norm,
    };
    float *all;
    bt_status_t st = join(l, d, &all);
    if (st != BT_OK) {
        return st;
    }
    if (vectors[d->item]) {
        *vectors[d->item] = all;
        return BT_OK;
    }
    if (d->item == BT_DECODER_EMBED) {
        st = place_embedding(l, all, (size_t)d->rows * d->cols);
    } else {
        bool mlp = d->item == BT_DECODER_GATE_UP || d->item == BT_DECODER_DOWN;
        const struct bt_linear_spec spec = {.k = d->cols,
                                            .n = (uint32_t)d->rows,
                                            .acts = mlp ? l->mlp_acts : 2,
                                            .swiglu = d->item == BT_DECODER_GATE_UP};
        st = bt_linear_create(l->g, &spec, all, products[d->item], l->err, l->err_cap);
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
    m->layers = bt_calloc(m->config.layers, sizeof(*m->layers));
    return bt_decoder_load(conf, &m->config, place, &l, err, err_cap);
}

void bt_cpu_model_cleanup(struct bt_cpu_model *m)
{
    for (uint32_t i = 0; m->layers && i < m->config.layers; i++) {
        struct bt_cpu_layer *y = &m->layers[i];
        free(y->norm_attn);
        free(y->norm_mlp);
        free(y->qkv_bias);
        free(y->q_norm);
        free(y->k_norm);
        bt_linear_destroy(y->qkv);
        bt_linear_destroy(y->o);
        bt_linear_destroy(y->gate_up);
        bt_linear_destroy(y->down);
    }
    free(m->layers);
    free(m->embed);
    free(m->embed_lo);
    free(m->norm);
    bt_linear_destroy(m->lm_head);
}
