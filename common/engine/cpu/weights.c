/* Loading of a decoder model for the CPU engine: checks every tensor's shape, joins Q, K, V and
 * gate, up, packs. Runs once in open; reads the model directory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cpu/cpu_priv.h"
#include "common/engine/safetensors.h"

struct loader {
    const struct bt_engine_config *conf;
    struct bt_weights *w; /* NULL: dummy */
    struct bt_gemm *g;
    const struct bt_model_config *c;
    uint64_t seed; /* of dummy weights */
    char *err;
    size_t err_cap;
};

static float bf16_to_f32(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint16_t f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0
                                                    : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static float f16_to_f32(uint16_t b)
{
    _Float16 h;
    memcpy(&h, &b, 2);
    return (float)h;
}

/* Random weights of about the size trained ones have, exact in bf16; norms near 1. */
static float dummy_value(struct loader *l, uint32_t cols, bool vector)
{
    l->seed = l->seed * 6364136223846793005ull + 1442695040888963407ull;
    float u = (float)(int32_t)(l->seed >> 32) * 0x1p-31f;
    float v = vector ? 1.0f + 0.1f * u : u * 1.7f / __builtin_sqrtf((float)cols);
    return bf16_to_f32(f32_to_bf16(v));
}

static void convert(const struct bt_tensor *t, size_t n, float *out)
{
    if (t->dtype == BT_TENSOR_F32) {
        memcpy(out, t->data, n * 4);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t b;
        memcpy(&b, t->data + i * 2, 2); /* data may lie at an odd address */
        out[i] = t->dtype == BT_TENSOR_BF16 ? bf16_to_f32(b) : f16_to_f32(b);
    }
}

/* Reads tensor `name`, [rows, cols] or [cols] when rows is 0, into out. */
static bt_status_t read_tensor(struct loader *l, const char *name, uint32_t rows, uint32_t cols,
                               float *out)
{
    size_t n = (size_t)BT_MAX(rows, 1u) * cols;
    if (!l->w) {
        for (size_t i = 0; i < n; i++) {
            out[i] = dummy_value(l, cols, rows == 0);
        }
        return BT_OK;
    }
    const struct bt_tensor *t;
    bt_status_t st = bt_weights_want(l->w, name, rows, cols, l->conf->model_dir, l->c->architecture,
                                     l->c->layers, &t, l->err, l->err_cap);
    if (st != BT_OK) {
        return st;
    }
    convert(t, n, out);
    return BT_OK;
}

static bt_status_t read_vector(struct loader *l, const char *prefix, const char *name, uint32_t n,
                               float **v_p)
{
    char full[160];
    snprintf(full, sizeof(full), "%s%s", prefix, name);
    float *v = bt_malloc(n * sizeof(*v));
    bt_status_t st = read_tensor(l, full, 0, n, v);
    if (st != BT_OK) {
        free(v);
        return st;
    }
    *v_p = v;
    return BT_OK;
}

struct part {
    const char *name;
    uint32_t rows;
};

typedef enum { LINEAR_PLAIN, LINEAR_SWIGLU } linear_t;

/* Joins matrices [rows_i, cols] below each other and packs them as one product. */
static bt_status_t read_linear(struct loader *l, const char *prefix, uint32_t cols,
                               const struct part *parts, uint32_t n_parts, linear_t kind,
                               struct bt_linear **out)
{
    uint64_t rows = 0;
    for (uint32_t i = 0; i < n_parts; i++) {
        rows += parts[i].rows;
    }
    size_t at = 0, bytes;
    if (rows > INT32_MAX || __builtin_mul_overflow((size_t)rows * cols, sizeof(float), &bytes)) {
        snprintf(l->err, l->err_cap, "%s: %s%s: matrix too large", l->conf->model_dir, prefix,
                 parts[0].name);
        return BT_ERR_TOO_LARGE;
    }
    float *w = malloc(bytes);
    if (!w) {
        snprintf(l->err, l->err_cap, "%s: no memory for %zu bytes of weights", l->conf->model_dir,
                 bytes);
        return BT_ERR_NO_MEMORY;
    }
    bt_status_t st = BT_OK;
    for (uint32_t i = 0; st == BT_OK && i < n_parts; i++) {
        char full[160];
        snprintf(full, sizeof(full), "%s%s", prefix, parts[i].name);
        st = read_tensor(l, full, parts[i].rows, cols, w + at);
        at += (size_t)parts[i].rows * cols;
    }
    if (st == BT_OK) {
        const struct bt_linear_spec spec = {
            .k = cols, .n = (uint32_t)rows, .swiglu = kind == LINEAR_SWIGLU};
        st = bt_linear_create(l->g, &spec, w, out, l->err, l->err_cap);
    }
    free(w);
    return st;
}

static bt_status_t read_attention(struct loader *l, const char *p, struct bt_cpu_layer *y)
{
    const struct bt_model_config *c = l->c;
    uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const struct part qkv[] = {{"self_attn.q_proj.weight", q},
                               {"self_attn.k_proj.weight", kv},
                               {"self_attn.v_proj.weight", kv}};
    bt_status_t st = read_linear(l, p, c->hidden, qkv, 3, LINEAR_PLAIN, &y->qkv);
    if (st == BT_OK && c->qkv_bias) {
        static const char *const names[] = {"self_attn.q_proj.bias", "self_attn.k_proj.bias",
                                            "self_attn.v_proj.bias"};
        const uint32_t rows[] = {q, kv, kv};
        y->qkv_bias = bt_malloc((size_t)(q + 2 * kv) * sizeof(float));
        float *at = y->qkv_bias;
        for (int i = 0; st == BT_OK && i < 3; i++) {
            char full[160];
            snprintf(full, sizeof(full), "%s%s", p, names[i]);
            st = read_tensor(l, full, 0, rows[i], at);
            at += rows[i];
        }
    }
    if (st == BT_OK && c->qk_norm) {
        st = read_vector(l, p, "self_attn.q_norm.weight", c->head_dim, &y->q_norm);
        if (st == BT_OK) {
            st = read_vector(l, p, "self_attn.k_norm.weight", c->head_dim, &y->k_norm);
        }
    }
    const struct part o = {"self_attn.o_proj.weight", c->hidden};
    return st == BT_OK ? read_linear(l, p, q, &o, 1, LINEAR_PLAIN, &y->o) : st;
}

static bt_status_t read_layer(struct loader *l, uint32_t i, struct bt_cpu_layer *y)
{
    const struct bt_model_config *c = l->c;
    char p[64];
    snprintf(p, sizeof(p), "model.layers.%u.", i);
    bt_status_t st = read_vector(l, p, "input_layernorm.weight", c->hidden, &y->norm_attn);
    if (st == BT_OK) {
        st = read_vector(l, p, "post_attention_layernorm.weight", c->hidden, &y->norm_mlp);
    }
    if (st == BT_OK) {
        st = read_attention(l, p, y);
    }
    if (st == BT_OK) {
        const struct part gu[] = {{"mlp.gate_proj.weight", c->intermediate},
                                  {"mlp.up_proj.weight", c->intermediate}};
        st = read_linear(l, p, c->hidden, gu, 2, LINEAR_SWIGLU, &y->gate_up);
    }
    if (st == BT_OK) {
        const struct part down = {"mlp.down_proj.weight", c->hidden};
        st = read_linear(l, p, c->intermediate, &down, 1, LINEAR_PLAIN, &y->down);
    }
    return st;
}

/* The embedding as bf16, with a second part where that is not exact. */
static bt_status_t read_embedding(struct loader *l, struct bt_cpu_model *m)
{
    const struct bt_model_config *c = l->c;
    size_t n = (size_t)c->vocab * c->hidden;
    float *all = malloc(n * sizeof(*all));
    m->embed = malloc(n * sizeof(*m->embed));
    if (!all || !m->embed) {
        free(all);
        snprintf(l->err, l->err_cap, "%s: no memory for the embedding", l->conf->model_dir);
        return BT_ERR_NO_MEMORY;
    }
    bt_status_t st = read_tensor(l, "model.embed_tokens.weight", c->vocab, c->hidden, all);
    for (size_t i = 0; st == BT_OK && i < n; i++) {
        m->embed[i] = f32_to_bf16(all[i]);
        float lo = all[i] - bf16_to_f32(m->embed[i]);
        if (lo != 0 && !m->embed_lo) {
            m->embed_lo = bt_calloc(n, sizeof(*m->embed_lo));
        }
        if (lo != 0) {
            m->embed_lo[i] = f32_to_bf16(lo);
        }
    }
    free(all);
    return st;
}

static bt_status_t read_model(struct loader *l, struct bt_cpu_model *m)
{
    const struct bt_model_config *c = l->c;
    bt_status_t st = read_embedding(l, m);
    m->layers = bt_calloc(c->layers, sizeof(*m->layers));
    for (uint32_t i = 0; st == BT_OK && i < c->layers; i++) {
        st = read_layer(l, i, &m->layers[i]);
        if (l->conf->progress) {
            l->conf->progress(l->conf->progress_arg, "weights", (double)(i + 1) / c->layers);
        }
    }
    if (st == BT_OK) {
        st = read_vector(l, "model.", "norm.weight", c->hidden, &m->norm);
    }
    if (st == BT_OK) {
        const struct part head = {
            c->tie_embeddings ? "model.embed_tokens.weight" : "lm_head.weight", c->vocab};
        st = read_linear(l, "", c->hidden, &head, 1, LINEAR_PLAIN, &m->lm_head);
    }
    return st;
}

bt_status_t bt_cpu_model_load(struct bt_cpu_model *m, struct bt_gemm *g,
                              const struct bt_engine_config *conf, char *err, size_t err_cap)
{
    struct loader l = {
        .conf = conf, .g = g, .c = &m->config, .seed = 1, .err = err, .err_cap = err_cap};
    if (!conf->load_format || strcmp(conf->load_format, "dummy") != 0) {
        bt_status_t st = bt_weights_open(conf->model_dir, &l.w, err, err_cap);
        if (st != BT_OK) {
            return st;
        }
    }
    bt_status_t st = read_model(&l, m);
    bt_weights_close(l.w);
    return st;
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
