/* The walk over a decoder model's tensors, and the checks of a configuration that all back ends
 * share. Runs in a back end's open, on the engine's thread; reads the model directory. */
#include <stdio.h>
#include <string.h>

#include "common/engine/decoder.h"

struct walk {
    const struct bt_engine_config *conf;
    const struct bt_model_config *c;
    struct bt_weights *w; /* NULL: dummy */
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

static bt_status_t give(const struct walk *w, bt_decoder_item_t item, uint32_t layer, uint32_t cols,
                        const struct part *parts, uint32_t n)
{
    struct bt_decoder_tensors d = {.item = item, .cols = cols, .n_parts = n};
    char prefix[32] = "";
    if (layer != IN_NO_LAYER) {
        d.layer = layer;
        snprintf(prefix, sizeof(prefix), "model.layers.%u.", layer);
    }
    for (uint32_t i = 0; i < n; i++) {
        struct bt_decoder_part *p = &d.parts[i];
        snprintf(p->name, sizeof(p->name), "%s%s", prefix, parts[i].name);
        p->rows = parts[i].rows;
        d.rows += p->rows;
        if (w->w != NULL) {
            struct bt_weights_wish wish = {.name = p->name,
                                           .rows = cols ? p->rows : 0,
                                           .cols = cols ? cols : p->rows,
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

static bt_status_t layer(const struct walk *w, uint32_t i)
{
    const struct bt_model_config *c = w->c;
    const struct part gate_up[] = {{"mlp.gate_proj.weight", c->intermediate},
                                   {"mlp.up_proj.weight", c->intermediate}};
    bt_status_t st = vector(w, BT_DECODER_NORM_ATTN, i, "input_layernorm.weight", c->hidden);
    if (st == BT_OK) {
        st = vector(w, BT_DECODER_NORM_MLP, i, "post_attention_layernorm.weight", c->hidden);
    }
    if (st == BT_OK) {
        st = attention(w, i);
    }
    if (st == BT_OK) {
        st = give(w, BT_DECODER_GATE_UP, i, c->hidden, gate_up, 2);
    }
    return st == BT_OK
               ? matrix(w, BT_DECODER_DOWN, i, "mlp.down_proj.weight", c->hidden, c->intermediate)
               : st;
}

static bt_status_t model(const struct walk *w)
{
    const struct bt_model_config *c = w->c;
    static const char embed[] = "model.embed_tokens.weight";
    bt_status_t st = matrix(w, BT_DECODER_EMBED, IN_NO_LAYER, embed, c->vocab, c->hidden);
    for (uint32_t i = 0; st == BT_OK && i < c->layers; i++) {
        st = layer(w, i);
        if (st == BT_OK && w->conf->progress) {
            w->conf->progress(w->conf->progress_arg, "weights", (double)(i + 1) / c->layers);
        }
    }
    if (st == BT_OK) {
        st = vector(w, BT_DECODER_NORM, IN_NO_LAYER, "model.norm.weight", c->hidden);
    }
    return st == BT_OK ? matrix(w, BT_DECODER_HEAD, IN_NO_LAYER,
                                c->tie_embeddings ? embed : "lm_head.weight", c->vocab, c->hidden)
                       : st;
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
    bt_status_t st = is_dummy(conf) ? BT_OK : bt_weights_open(conf->model_dir, &w.w, err, err_cap);
    if (st == BT_OK) {
        st = model(&w);
    }
    const struct bt_tensor *more = st == BT_OK && w.w ? bt_weights_unused(w.w, c->layers) : NULL;
    if (more) { /* without this tensor the results would be wrong */
        snprintf(err, err_cap,
                 "%s/%s: tensor %s: architecture %s has no such tensor with this config.json",
                 conf->model_dir, more->file, more->name, c->architecture);
        st = BT_ERR_UNSUPPORTED;
    }
    bt_weights_close(w.w);
    return st;
}

float bt_decoder_dummy_width(uint32_t cols)
{
    return 1.7f / __builtin_sqrtf((float)cols);
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
    }
    if (what[0]) {
        snprintf(err, err_cap, "engine %s: %s", limits->name, what);
        return BT_ERR_CONFIG;
    }
    return BT_OK;
}
