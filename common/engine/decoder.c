/* The walk over a decoder model's tensors, and the checks of a configuration that all back ends
 * share. Runs in a back end's open, on the engine's thread; reads the model directory. */
#include <stdio.h>
#include <string.h>

#include "common/engine/decoder.h"

struct walk {
    const struct bt_engine_config *conf;
    const struct bt_model_config *c;
    struct bt_weights *w;     /* NULL: dummy */
    struct bt_model_fp8 *fp8; /* NULL: no matrix is fp8 */
    bool quantize;            /* model.quantize is fp8 */
    const char *base;         /* of GPT-2's names */
    bt_decoder_sink_fn sink;
    void *arg;
    char *err;
    size_t err_cap;
};

struct part { /* one tensor of an item: its name after the layer's prefix */
    const char *name;
    uint32_t rows;
};

#define IN_NO_LAYER UINT32_MAX

static bt_fp8_role_t fp8_role(const struct bt_model_config *c, bt_decoder_item_t item,
                              uint32_t cols)
{
    bool looked_up = item == BT_DECODER_EMBED || item == BT_DECODER_POSITIONS ||
                     (item == BT_DECODER_HEAD && c->tie_embeddings);
    if (cols == 0 || looked_up) {
        return BT_FP8_OF_NONE;
    }
    return item == BT_DECODER_HEAD     ? BT_FP8_OF_HEAD
           : item == BT_DECODER_ROUTER ? BT_FP8_OF_ROUTER
                                       : BT_FP8_OF_LAYER;
}

/* DeepSeek's fp8 checkpoints have the MTP layer's joining matrix in bf16, and do not say so. */
static bool stays_wide(const struct walk *w, bt_decoder_item_t item, const char *name)
{
    const struct bt_tensor *t = NULL;
    if (item == BT_DECODER_MTP_JOIN && w->w != NULL) {
        t = bt_weights_find(w->w, name);
    }
    return item == BT_DECODER_MTP_JOIN && (t == NULL || t->dtype != BT_TENSOR_F8);
}

static bt_status_t give_expert(const struct walk *w, bt_decoder_item_t item, uint32_t layer,
                               uint32_t expert, uint32_t cols, const struct part *parts, uint32_t n)
{
    struct bt_decoder_tensors d = {.item = item, .expert = expert, .cols = cols, .n_parts = n};
    char prefix[32] = "";
    if (layer != IN_NO_LAYER) {
        d.layer = layer;
        snprintf(prefix, sizeof(prefix), w->c->gpt2 ? "%sh.%u." : "%slayers.%u.",
                 w->c->gpt2 ? w->base : "model.", layer);
    }
    for (uint32_t i = 0; i < n; i++) {
        struct bt_decoder_part *p = &d.parts[i];
        snprintf(p->name, sizeof(p->name), "%s%s", prefix, parts[i].name);
        p->rows = parts[i].rows;
        /* The tables of tokens and positions are looked up by row, so they are not turned. */
        p->transposed = w->c->gpt2 && cols != 0 && layer != IN_NO_LAYER;
        d.rows += p->rows;
        const bt_fp8_role_t role =
            stays_wide(w, item, p->name) ? BT_FP8_OF_NONE : fp8_role(w->c, item, cols);
        const struct bt_fp8_form *form = bt_model_fp8_form(w->fp8, p->name, role);
        d.quantize = (w->quantize && role == BT_FP8_OF_LAYER) || (w->w == NULL && form != NULL);
        if (w->w != NULL) {
            struct bt_weights_wish wish = {.name = p->name,
                                           .rows = p->transposed ? cols
                                                   : cols        ? p->rows
                                                                 : 0,
                                           .cols = p->transposed || !cols ? p->rows : cols,
                                           .fp8 = form,
                                           .dir = w->conf->model_dir,
                                           .architecture = w->c->architecture,
                                           .layers = w->c->layers};
            bt_status_t st = bt_weights_want(w->w, &wish, &p->t, w->err, w->err_cap);
            if (st != BT_OK) {
                return st;
            }
        }
    }
    uint64_t values;
    if (d.rows > INT32_MAX || __builtin_mul_overflow(d.rows, cols ? cols : 1u, &values) ||
        values > INT64_MAX / sizeof(float)) {
        snprintf(w->err, w->err_cap, "%s: %s: matrix too large", w->conf->model_dir,
                 d.parts[0].name);
        return BT_ERR_TOO_LARGE;
    }
    return w->sink(w->arg, &d);
}

static bt_status_t give(const struct walk *w, bt_decoder_item_t item, uint32_t layer, uint32_t cols,
                        const struct part *parts, uint32_t n)
{
    return give_expert(w, item, layer, 0, cols, parts, n);
}

static bt_status_t matrix(const struct walk *w, bt_decoder_item_t item, uint32_t layer,
                          const char *name, uint32_t rows, uint32_t cols)
{
    return give(w, item, layer, cols, &(struct part){name, rows}, 1);
}

static bt_status_t vector(const struct walk *w, bt_decoder_item_t item, uint32_t layer,
                          const char *name, uint32_t n)
{
    return give(w, item, layer, 0, &(struct part){name, n}, 1);
}

static bt_status_t attention(const struct walk *w, uint32_t i)
{
    const struct bt_model_config *c = w->c;
    uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const struct part qkv[] = {{"self_attn.q_proj.weight", q},
                               {"self_attn.k_proj.weight", kv},
                               {"self_attn.v_proj.weight", kv}};
    const struct part bias[] = {
        {"self_attn.q_proj.bias", q}, {"self_attn.k_proj.bias", kv}, {"self_attn.v_proj.bias", kv}};
    bt_status_t st = give(w, BT_DECODER_QKV, i, c->hidden, qkv, 3);
    if (st == BT_OK && c->qkv_bias) {
        st = give(w, BT_DECODER_QKV_BIAS, i, 0, bias, 3);
    }
    if (st == BT_OK && c->qk_norm) {
        st = vector(w, BT_DECODER_Q_NORM, i, "self_attn.q_norm.weight", c->head_dim);
    }
    if (st == BT_OK && c->qk_norm) {
        st = vector(w, BT_DECODER_K_NORM, i, "self_attn.k_norm.weight", c->head_dim);
    }
    return st == BT_OK ? matrix(w, BT_DECODER_O, i, "self_attn.o_proj.weight", c->hidden, q) : st;
}

/* Multi-head latent attention. */
static bt_status_t latent_attention(const struct walk *w, uint32_t i)
{
    const struct bt_model_config *c = w->c;
    const struct bt_model_mla *m = &c->mla;
    uint32_t q = c->heads * c->head_dim;
    bt_status_t st = BT_OK;
    if (m->q_rank != 0) {
        st = matrix(w, BT_DECODER_Q_A, i, "self_attn.q_a_proj.weight", m->q_rank, c->hidden);
        if (st == BT_OK) {
            st = vector(w, BT_DECODER_Q_A_NORM, i, "self_attn.q_a_layernorm.weight", m->q_rank);
        }
    }
    if (st == BT_OK) {
        st = m->q_rank != 0
                 ? matrix(w, BT_DECODER_Q_B, i, "self_attn.q_b_proj.weight", q, m->q_rank)
                 : matrix(w, BT_DECODER_Q_B, i, "self_attn.q_proj.weight", q, c->hidden);
    }
    if (st == BT_OK) {
        st = matrix(w, BT_DECODER_KV_A, i, "self_attn.kv_a_proj_with_mqa.weight",
                    m->kv_rank + m->rope, c->hidden);
    }
    if (st == BT_OK) {
        st = vector(w, BT_DECODER_KV_A_NORM, i, "self_attn.kv_a_layernorm.weight", m->kv_rank);
    }
    if (st == BT_OK) {
        st = matrix(w, BT_DECODER_KV_B, i, "self_attn.kv_b_proj.weight",
                    c->heads * (m->nope + m->v), m->kv_rank);
    }
    return st == BT_OK
               ? matrix(w, BT_DECODER_O, i, "self_attn.o_proj.weight", c->hidden, c->heads * m->v)
               : st;
}

/* Two matrices below each other and one: an MLP whose tensors begin with `prefix`. */
struct mlp {
    bt_decoder_item_t gate_up, down;
    const char *prefix, *gate, *up, *last;
    uint32_t intermediate;
};

static bt_status_t mlp(const struct walk *w, uint32_t i, uint32_t expert, const struct mlp *m)
{
    char gate[64], up[64], down[64];
    snprintf(gate, sizeof(gate), "%s%s.weight", m->prefix, m->gate);
    snprintf(up, sizeof(up), "%s%s.weight", m->prefix, m->up);
    snprintf(down, sizeof(down), "%s%s.weight", m->prefix, m->last);
    const struct part gate_up[] = {{gate, m->intermediate}, {up, m->intermediate}};
    bt_status_t st = give_expert(w, m->gate_up, i, expert, w->c->hidden, gate_up, 2);
    return st == BT_OK ? give_expert(w, m->down, i, expert, m->intermediate,
                                     &(struct part){down, w->c->hidden}, 1)
                       : st;
}

static bt_status_t experts(const struct walk *w, uint32_t i)
{
    const struct bt_model_experts *e = &w->c->experts;
    bool mixtral = strcmp(w->c->architecture, "MixtralForCausalLM") == 0;
    const char *root = mixtral ? "block_sparse_moe." : "mlp.";
    char name[64];
    snprintf(name, sizeof(name), "%sgate.weight", root);
    bt_status_t st = matrix(w, BT_DECODER_ROUTER, i, name, e->n, w->c->hidden);
    if (st == BT_OK && e->bias) {
        st = vector(w, BT_DECODER_ROUTER_BIAS, i, "mlp.gate.e_score_correction_bias", e->n);
    }
    for (uint32_t x = 0; st == BT_OK && x < e->n; x++) {
        snprintf(name, sizeof(name), "%sexperts.%u.", root, x);
        const struct mlp m = {.gate_up = BT_DECODER_EXPERT_GATE_UP,
                              .down = BT_DECODER_EXPERT_DOWN,
                              .prefix = name,
                              .gate = mixtral ? "w1" : "gate_proj",
                              .up = mixtral ? "w3" : "up_proj",
                              .last = mixtral ? "w2" : "down_proj",
                              .intermediate = e->intermediate};
        st = mlp(w, i, x, &m);
    }
    const struct mlp shared = {.gate_up = BT_DECODER_SHARED_GATE_UP,
                               .down = BT_DECODER_SHARED_DOWN,
                               .prefix = "mlp.shared_experts.",
                               .gate = "gate_proj",
                               .up = "up_proj",
                               .last = "down_proj",
                               .intermediate = e->shared};
    return st == BT_OK && e->shared ? mlp(w, i, 0, &shared) : st;
}

static bt_status_t layer(const struct walk *w, uint32_t i)
{
    const struct bt_model_config *c = w->c;
    const struct mlp dense = {.gate_up = BT_DECODER_GATE_UP,
                              .down = BT_DECODER_DOWN,
                              .prefix = "mlp.",
                              .gate = "gate_proj",
                              .up = "up_proj",
                              .last = "down_proj",
                              .intermediate = c->intermediate};
    bt_status_t st = vector(w, BT_DECODER_NORM_ATTN, i, "input_layernorm.weight", c->hidden);
    if (st == BT_OK) {
        st = vector(w, BT_DECODER_NORM_MLP, i, "post_attention_layernorm.weight", c->hidden);
    }
    if (st == BT_OK) {
        st = c->mla.kv_rank ? latent_attention(w, i) : attention(w, i);
    }
    if (st != BT_OK) {
        return st;
    }
    return bt_model_has_experts(c, i) ? experts(w, i) : mlp(w, i, 0, &dense);
}

/* A checkpoint may repeat the embedding and the head in the MTP layer. Both are those of the model
 * (DeepSeek-V3, 2.2), which is checked. */
static bt_status_t check_shared(const struct walk *w, const char *name, const char *of)
{
    char full[96];
    snprintf(full, sizeof(full), "model.layers.%u.%s", w->c->layers, name);
    const struct bt_tensor *t = bt_weights_find(w->w, full), *all = bt_weights_find(w->w, of);
    if (t == NULL || all == NULL ||
        (t->dtype == all->dtype && t->bytes == all->bytes && t->n_dims == all->n_dims &&
         memcmp(t->data, all->data, t->bytes) == 0)) {
        return BT_OK;
    }
    snprintf(w->err, w->err_cap,
             "%s/%s: tensor %s differs from %s, and Baton runs MTP layers that share it; set "
             "model.mtp to false in all daemons",
             w->conf->model_dir, t->file, full, of);
    return BT_ERR_UNSUPPORTED;
}

/* The MTP layer: norms of its two inputs, the matrix that joins them, a layer, a norm. */
static bt_status_t mtp_layer(const struct walk *w)
{
    const struct bt_model_config *c = w->c;
    const uint32_t i = c->layers, h = c->hidden;
    char name[64];
    snprintf(name, sizeof(name), "model.layers.%u.eh_proj.weight", i);
    if (w->w != NULL && bt_weights_find(w->w, name) == NULL) {
        snprintf(w->err, w->err_cap,
                 "%s: tensor %s is missing: the checkpoint came without its MTP layer; set "
                 "model.mtp to false in all daemons",
                 w->conf->model_dir, name);
        return BT_ERR_UNSUPPORTED;
    }
    bt_status_t st =
        w->w != NULL ? check_shared(w, "embed_tokens.weight", "model.embed_tokens.weight") : BT_OK;
    if (st == BT_OK && w->w != NULL) {
        st = check_shared(w, "shared_head.head.weight",
                          c->tie_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
    }
    if (st == BT_OK) {
        st = vector(w, BT_DECODER_MTP_NORM_EMBED, i, "enorm.weight", h);
    }
    if (st == BT_OK) {
        st = vector(w, BT_DECODER_MTP_NORM_STATE, i, "hnorm.weight", h);
    }
    if (st == BT_OK) {
        st = matrix(w, BT_DECODER_MTP_JOIN, i, "eh_proj.weight", h, 2 * h);
    }
    if (st == BT_OK) {
        st = layer(w, i);
    }
    return st == BT_OK ? vector(w, BT_DECODER_MTP_NORM, i, "shared_head.norm.weight", h) : st;
}

static bt_status_t gpt2_layer(const struct walk *w, uint32_t i)
{
    const struct bt_model_config *c = w->c;
    const uint32_t h = c->hidden, wide = c->intermediate;
    const struct {
        bt_decoder_item_t item;
        const char *name;
        uint32_t rows, cols;
    } t[] = {
        {BT_DECODER_NORM_ATTN, "ln_1.weight", h, 0},
        {BT_DECODER_NORM_ATTN_BIAS, "ln_1.bias", h, 0},
        {BT_DECODER_NORM_MLP, "ln_2.weight", h, 0},
        {BT_DECODER_NORM_MLP_BIAS, "ln_2.bias", h, 0},
        {BT_DECODER_QKV, "attn.c_attn.weight", 3 * h, h},
        {BT_DECODER_QKV_BIAS, "attn.c_attn.bias", 3 * h, 0},
        {BT_DECODER_O, "attn.c_proj.weight", h, h},
        {BT_DECODER_O_BIAS, "attn.c_proj.bias", h, 0},
        {BT_DECODER_UP, "mlp.c_fc.weight", wide, h},
        {BT_DECODER_UP_BIAS, "mlp.c_fc.bias", wide, 0},
        {BT_DECODER_DOWN, "mlp.c_proj.weight", h, wide},
        {BT_DECODER_DOWN_BIAS, "mlp.c_proj.bias", h, 0},
    };
    bt_status_t st = BT_OK;
    for (size_t k = 0; st == BT_OK && k < BT_ARRAY_LEN(t); k++) {
        st = matrix(w, t[k].item, i, t[k].name, t[k].rows, t[k].cols);
    }
    return st;
}

/* The names of tensors of no layer. */
struct names {
    char embed[48], norm[48], norm_bias[48], positions[48];
};

static bt_status_t before_layers(const struct walk *w, const struct names *n)
{
    const struct bt_model_config *c = w->c;
    bt_status_t st = matrix(w, BT_DECODER_EMBED, IN_NO_LAYER, n->embed, c->vocab, c->hidden);
    return st == BT_OK && c->gpt2 ? matrix(w, BT_DECODER_POSITIONS, IN_NO_LAYER, n->positions,
                                           c->max_model_len, c->hidden)
                                  : st;
}

static bt_status_t behind_layers(const struct walk *w, const struct names *n)
{
    const struct bt_model_config *c = w->c;
    bt_status_t st = vector(w, BT_DECODER_NORM, IN_NO_LAYER, n->norm, c->hidden);
    if (st == BT_OK && c->gpt2) {
        st = vector(w, BT_DECODER_NORM_BIAS, IN_NO_LAYER, n->norm_bias, c->hidden);
    }
    return st == BT_OK
               ? matrix(w, BT_DECODER_HEAD, IN_NO_LAYER,
                        c->tie_embeddings ? n->embed : "lm_head.weight", c->vocab, c->hidden)
               : st;
}

static bt_status_t model(struct walk *w)
{
    const struct bt_model_config *c = w->c;
    struct names n = {"model.embed_tokens.weight", "model.norm.weight", "", ""};
    if (c->gpt2) { /* files from before the head was part of the model have no prefix */
        w->base = w->w && bt_weights_find(w->w, "wte.weight") ? "" : "transformer.";
        snprintf(n.embed, sizeof(n.embed), "%swte.weight", w->base);
        snprintf(n.positions, sizeof(n.positions), "%swpe.weight", w->base);
        snprintf(n.norm, sizeof(n.norm), "%sln_f.weight", w->base);
        snprintf(n.norm_bias, sizeof(n.norm_bias), "%sln_f.bias", w->base);
    }
    bt_status_t st = before_layers(w, &n);
    for (uint32_t i = 0; st == BT_OK && i < c->layers; i++) {
        st = c->gpt2 ? gpt2_layer(w, i) : layer(w, i);
        if (st == BT_OK && w->conf->progress) {
            w->conf->progress(w->conf->progress_arg, "weights", (double)(i + 1) / c->layers);
        }
    }
    st = st == BT_OK && c->mtp ? mtp_layer(w) : st;
    return st == BT_OK ? behind_layers(w, &n) : st;
}

/* Layers for speculation behind the last one: as many as config.json says, or has forgotten. */
static uint32_t mtp_layers(const struct walk *w)
{
    char name[64];
    for (uint32_t n = 0;; n++) {
        snprintf(name, sizeof(name), "model.layers.%u.eh_proj.weight", w->c->layers + n);
        if (n >= w->c->n_mtp && (w->c->mla.kv_rank == 0 || !bt_weights_find(w->w, name))) {
            return n;
        }
    }
}

static bool is_dummy(const struct bt_engine_config *c)
{
    return c->load_format && strcmp(c->load_format, "dummy") == 0;
}

bt_status_t bt_decoder_load(const struct bt_engine_config *conf, const struct bt_model_config *c,
                            bt_decoder_sink_fn sink, void *arg, char *err, size_t err_cap)
{
    struct walk w = {
        .conf = conf, .c = c, .sink = sink, .arg = arg, .err = err, .err_cap = err_cap};
    bt_status_t st = BT_OK;
    w.quantize = conf->quantize && strcmp(conf->quantize, "fp8") == 0;
    if (w.quantize) {
        st = bt_model_fp8_check_quantize(conf->model_dir, err, err_cap);
    }
    st = st == BT_OK ? bt_model_fp8_load(conf->model_dir, &w.fp8, err, err_cap) : st;
    if (st == BT_OK && !is_dummy(conf)) {
        st = bt_weights_open(conf->model_dir, &w.w, err, err_cap);
    }
    if (st == BT_OK) {
        st = model(&w);
    }
    const struct bt_tensor *more =
        st == BT_OK && w.w ? bt_weights_unused(w.w, c->layers, mtp_layers(&w)) : NULL;
    if (more) { /* without this tensor the results would be wrong */
        snprintf(err, err_cap,
                 "%s/%s: tensor %s: architecture %s has no such tensor with this config.json",
                 conf->model_dir, more->file, more->name, c->architecture);
        st = BT_ERR_UNSUPPORTED;
    }
    const struct bt_tensor *bad = st == BT_OK && w.w ? bt_weights_not_finite(w.w) : NULL;
    if (bad) {
        snprintf(err, err_cap,
                 "%s/%s: tensor %s has a number that is not finite (NaN, or too large with its "
                 "scale): the file is damaged or was converted wrongly; get it anew",
                 conf->model_dir, bad->file, bad->name);
        st = BT_ERR_INVALID;
    }
    bt_weights_close(w.w);
    bt_model_fp8_destroy(w.fp8);
    return st;
}

float bt_decoder_dummy_width(uint32_t cols)
{
    return 1.7f / __builtin_sqrtf((float)cols);
}

bool bt_decoder_exceeds_bf16(const struct bt_engine_config *conf)
{
    struct bt_weights *w;
    char err[64];
    if (is_dummy(conf) || bt_weights_open(conf->model_dir, &w, err, sizeof(err)) != BT_OK) {
        /* dummy weights are bf16; if the files cannot be read, loading reports the reason */
        return false;
    }
    bool exceeds = bt_weights_wide(w);
    bt_weights_close(w);
    return exceeds;
}

bt_status_t bt_engine_check_fits(const struct bt_engine_config *conf,
                                 const struct bt_model_config *c, struct bt_engine_bytes bytes,
                                 uint64_t free_bytes, const char *where, char *err, size_t err_cap)
{
    struct bt_model_size size;
    bt_model_count(c, &size);
    bool fp8 = bt_model_is_fp8(conf->model_dir, conf->quantize);
    uint32_t matrix = fp8 ? bytes.fp8 : bytes.other;
    double matrices = (double)(size.weights + size.mtp + size.embed - size.wide);
    double need = matrices * matrix + (double)(size.wide - size.embed) * bytes.other +
                  (double)size.embed * bytes.embed;
    double have = (double)free_bytes;
    if (need <= have) {
        return BT_OK;
    }
    char bits[32] = "16 bits";
    if (matrix != 2 || bytes.other != 2) {
        uint32_t low = 8 * BT_MIN(matrix, bytes.other), high = 8 * BT_MAX(matrix, bytes.other);
        snprintf(bits, sizeof(bits), low < high ? "%u and %u bits" : "%u bits", low, high);
    }
    snprintf(err, err_cap,
             "%s: the weights take %.1f GB in %s, and the %s has %.1f GB free: %.1f GB are "
             "missing; take a smaller model or a larger %s",
             conf->model_dir, need / 1e9, bits, where, have / 1e9, (need - have) / 1e9, where);
    return BT_ERR_TOO_LARGE;
}

bt_status_t bt_engine_check_config(const struct bt_engine_config *c,
                                   const struct bt_engine_limits *limits, char *err, size_t err_cap)
{
    char what[96] = "";
    if (c->size != sizeof(*c)) {
        snprintf(what, sizeof(what), "the plugin was built for another version of Baton");
    } else if (!c->model_dir) {
        snprintf(what, sizeof(what), "model.path is missing");
    } else if (c->max_slots == 0 || c->max_slots > limits->max_slots) {
        snprintf(what, sizeof(what), "max_slots: 1 to %u", limits->max_slots);
    } else if (c->max_rows == 0 || c->max_rows > limits->max_rows) {
        snprintf(what, sizeof(what), "max_rows: 1 to %u", limits->max_rows);
    } else if (c->page_tokens == 0) {
        snprintf(what, sizeof(what), "kv.block_tokens: must not be 0");
    } else if (c->ranks > 1) {
        snprintf(what, sizeof(what), "this engine runs a model on one rank only");
    } else if (c->load_format && strcmp(c->load_format, "auto") != 0 && !is_dummy(c)) {
        snprintf(what, sizeof(what), "model.load_format: auto or dummy");
    } else if (c->activations && strcmp(c->activations, "split") != 0 &&
               strcmp(c->activations, "bf16-mlp") != 0) {
        snprintf(what, sizeof(what), "model.activations: split or bf16-mlp");
    } else if (c->quantize && strcmp(c->quantize, "none") != 0 && strcmp(c->quantize, "fp8") != 0) {
        snprintf(what, sizeof(what), "model.quantize: none or fp8");
    }
    if (what[0]) {
        snprintf(err, err_cap, "engine %s: %s", limits->name, what);
        return BT_ERR_CONFIG;
    }
    return BT_OK;
}
