/* Loading of a decoder model onto the device: checks every tensor's shape, joins Q, K, V and gate,
 * up. Weights are bf16, vectors f32. Runs once in open; reads the model directory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/cuda_priv.h"
#include "common/engine/safetensors.h"

#define STAGE_BYTES (64u << 20)

struct loader {
    struct bt_engine *e;
    const struct bt_engine_config *conf;
    const struct bt_model_config *c;
    struct bt_weights *w; /* NULL: dummy */
    uint32_t seed;
    uint8_t *stage[2]; /* pinned, taken in turns */
    cudaEvent_t sent[2];
    int turn;
    char *err;
    size_t err_cap;
};

static bt_status_t device_error(struct loader *l, cudaError_t e, size_t bytes)
{
    snprintf(l->err, l->err_cap, "%s: %zu bytes of weights: %s", l->conf->model_dir, bytes,
             cudaGetErrorString(e));
    return e == cudaErrorMemoryAllocation ? BT_ERR_NO_MEMORY : BT_ERR_DEVICE;
}

static bt_status_t take(struct loader *l, size_t bytes, void **p)
{
    struct bt_cu_model *m = &l->e->model;
    cudaError_t e = cudaMalloc(p, bytes);
    if (e != cudaSuccess) {
        return device_error(l, e, bytes);
    }
    if (m->n_memory == m->cap_memory) {
        m->cap_memory = BT_MAX(64u, m->cap_memory * 2);
        m->memory = bt_realloc(m->memory, m->cap_memory * sizeof(*m->memory));
    }
    m->memory[m->n_memory++] = *p;
    m->bytes += bytes;
    return BT_OK;
}

/* n values of a tensor as they are wanted: f32 or bf16. */
static void convert(const struct bt_tensor *t, size_t from, size_t n, bool f32, uint8_t *out)
{
    size_t item = t->dtype == BT_TENSOR_F32 ? 4 : 2;
    const uint8_t *in = t->data + from * item;
    if (item == (f32 ? 4u : 2u) && (f32 || t->dtype == BT_TENSOR_BF16)) {
        memcpy(out, in, n * item);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t u = 0;
        memcpy(&u, in + i * item, item); /* data may lie at an odd address */
        if (t->dtype == BT_TENSOR_BF16) {
            u <<= 16;
        } else if (t->dtype == BT_TENSOR_F16) {
            uint16_t h = (uint16_t)u;
            _Float16 v;
            memcpy(&v, &h, 2);
            float f = (float)v;
            memcpy(&u, &f, 4);
        }
        if (f32) {
            memcpy(out + i * 4, &u, 4);
        } else {
            uint16_t b = (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
            memcpy(out + i * 2, &b, 2);
        }
    }
}

/* Through two pinned buffers: one is filled while the other travels. */
static bt_status_t upload(struct loader *l, const struct bt_tensor *t, size_t n, bool f32,
                          uint8_t *to)
{
    size_t item = f32 ? 4 : 2, per = STAGE_BYTES / item;
    for (size_t at = 0; at < n; at += per) {
        size_t m = BT_MIN(per, n - at);
        int i = l->turn ^= 1;
        cudaError_t e = cudaEventSynchronize(l->sent[i]);
        if (e == cudaSuccess) {
            convert(t, at, m, f32, l->stage[i]);
            e = cudaMemcpyAsync(to + at * item, l->stage[i], m * item, cudaMemcpyHostToDevice,
                                l->e->load);
        }
        if (e == cudaSuccess) {
            e = cudaEventRecord(l->sent[i], l->e->load);
        }
        if (e != cudaSuccess) {
            return device_error(l, e, m * item);
        }
    }
    return BT_OK;
}

/* Reads tensor `name`, [rows, cols] or [cols] when rows is 0. */
static bt_status_t read_tensor(struct loader *l, const char *name, uint32_t rows, uint32_t cols,
                               bool f32, void *to)
{
    const struct bt_tensor *t;
    bt_status_t st = bt_weights_want(l->w, name, rows, cols, l->conf->model_dir, l->c->architecture,
                                     l->c->layers, &t, l->err, l->err_cap);
    if (st != BT_OK) {
        return st;
    }
    return upload(l, t, (size_t)BT_MAX(rows, 1u) * cols, f32, to);
}

struct part {
    const char *name;
    uint32_t rows;
};

/* Joins matrices [rows_i, cols] below each other; cols 0: vectors [rows_i], in f32. */
static bt_status_t read_parts(struct loader *l, const char *prefix, uint32_t cols,
                              const struct part *parts, uint32_t n_parts, void **out)
{
    bool vector = cols == 0;
    size_t item = vector ? 4 : 2, rows = 0, at = 0, width = vector ? 1 : cols;
    for (uint32_t i = 0; i < n_parts; i++) {
        rows += parts[i].rows;
    }
    bt_status_t st = take(l, rows * width * item, out);
    if (st == BT_OK && !l->w) {
        cudaError_t e;
        if (vector) { /* norms of 1, no bias */
            float *ones = bt_malloc(rows * sizeof(*ones));
            for (size_t i = 0; i < rows; i++) {
                ones[i] = 1;
            }
            e = cudaMemcpy(*out, ones, rows * 4, cudaMemcpyHostToDevice);
            free(ones);
        } else {
            e = bt_cu_dummy_bf16(*out, rows * width, 1.7f / __builtin_sqrtf((float)cols), ++l->seed,
                                 l->e->load);
        }
        return e == cudaSuccess ? BT_OK : device_error(l, e, rows * width * item);
    }
    for (uint32_t i = 0; st == BT_OK && i < n_parts; i++) {
        char full[160];
        snprintf(full, sizeof(full), "%s%s", prefix, parts[i].name);
        st = read_tensor(l, full, vector ? 0 : parts[i].rows, vector ? parts[i].rows : cols, vector,
                         (uint8_t *)*out + at);
        at += parts[i].rows * width * item;
    }
    return st;
}

static bt_status_t read_attention(struct loader *l, const char *p, struct bt_cu_layer *y)
{
    const struct bt_model_config *c = l->c;
    uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const struct part qkv[] = {{"self_attn.q_proj.weight", q},
                               {"self_attn.k_proj.weight", kv},
                               {"self_attn.v_proj.weight", kv}};
    const struct part bias[] = {
        {"self_attn.q_proj.bias", q}, {"self_attn.k_proj.bias", kv}, {"self_attn.v_proj.bias", kv}};
    const struct part q_norm = {"self_attn.q_norm.weight", c->head_dim},
                      k_norm = {"self_attn.k_norm.weight", c->head_dim},
                      o = {"self_attn.o_proj.weight", c->hidden};
    bt_status_t st = read_parts(l, p, c->hidden, qkv, 3, &y->qkv);
    if (st == BT_OK && c->qkv_bias) {
        st = read_parts(l, p, 0, bias, 3, (void **)&y->qkv_bias);
    }
    if (st == BT_OK && c->qk_norm) {
        st = read_parts(l, p, 0, &q_norm, 1, (void **)&y->q_norm);
        if (st == BT_OK) {
            st = read_parts(l, p, 0, &k_norm, 1, (void **)&y->k_norm);
        }
    }
    return st == BT_OK ? read_parts(l, p, q, &o, 1, &y->o) : st;
}

static bt_status_t read_layer(struct loader *l, uint32_t i, struct bt_cu_layer *y)
{
    const struct bt_model_config *c = l->c;
    const struct part norms[] = {{"input_layernorm.weight", c->hidden},
                                 {"post_attention_layernorm.weight", c->hidden}};
    const struct part gate_up[] = {{"mlp.gate_proj.weight", c->intermediate},
                                   {"mlp.up_proj.weight", c->intermediate}},
                      down = {"mlp.down_proj.weight", c->hidden};
    char p[64];
    snprintf(p, sizeof(p), "model.layers.%u.", i);
    bt_status_t st = read_parts(l, p, 0, &norms[0], 1, (void **)&y->norm_attn);
    if (st == BT_OK) {
        st = read_parts(l, p, 0, &norms[1], 1, (void **)&y->norm_mlp);
    }
    if (st == BT_OK) {
        st = read_attention(l, p, y);
    }
    if (st == BT_OK) {
        st = read_parts(l, p, c->hidden, gate_up, 2, &y->gate_up);
    }
    return st == BT_OK ? read_parts(l, p, c->intermediate, &down, 1, &y->down) : st;
}

static bt_status_t read_model(struct loader *l, struct bt_cu_model *m)
{
    const struct bt_model_config *c = l->c;
    const struct part embed = {"model.embed_tokens.weight", c->vocab},
                      norm = {"model.norm.weight", c->hidden}, head = {"lm_head.weight", c->vocab};
    bt_status_t st = read_parts(l, "", c->hidden, &embed, 1, &m->embed);
    m->layers = bt_calloc(c->layers, sizeof(*m->layers));
    for (uint32_t i = 0; st == BT_OK && i < c->layers; i++) {
        st = read_layer(l, i, &m->layers[i]);
        if (l->conf->progress) {
            l->conf->progress(l->conf->progress_arg, "weights", (double)(i + 1) / c->layers);
        }
    }
    if (st == BT_OK) {
        st = read_parts(l, "", 0, &norm, 1, (void **)&m->norm);
    }
    if (st == BT_OK && c->tie_embeddings) {
        m->lm_head = m->embed;
        return BT_OK;
    }
    return st == BT_OK ? read_parts(l, "", c->hidden, &head, 1, &m->lm_head) : st;
}

bt_status_t bt_cu_model_load(struct bt_engine *e, const struct bt_engine_config *conf, char *err,
                             size_t err_cap)
{
    struct loader l = {.e = e, .conf = conf, .c = &e->model.config, .err = err, .err_cap = err_cap};
    bt_status_t st = BT_OK;
    if (!conf->load_format || strcmp(conf->load_format, "dummy") != 0) {
        st = bt_weights_open(conf->model_dir, &l.w, err, err_cap);
    }
    for (int i = 0; st == BT_OK && i < 2; i++) {
        cudaError_t ce = cudaMallocHost((void **)&l.stage[i], STAGE_BYTES);
        if (ce == cudaSuccess) {
            ce = cudaEventCreateWithFlags(&l.sent[i], cudaEventDisableTiming);
        }
        st = ce == cudaSuccess ? BT_OK : device_error(&l, ce, STAGE_BYTES);
    }
    if (st == BT_OK) {
        st = read_model(&l, &e->model);
    }
    cudaError_t ce = cudaStreamSynchronize(e->load);
    if (st == BT_OK && ce != cudaSuccess) {
        st = device_error(&l, ce, e->model.bytes);
    }
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(l.stage[i]);
        if (l.sent[i]) {
            cudaEventDestroy(l.sent[i]);
        }
    }
    bt_weights_close(l.w);
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
