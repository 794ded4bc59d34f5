/* The values that identify a model's KV: its layout, the digest of its weights, and the root key of
 * both. Reads the model directory. */
#include <stdio.h>
#include <string.h>

#include "common/base/buf.h"
#include "common/base/sha256.h"
#include "common/engine/model_config.h"
#include "common/engine/model_fp8.h"
#include "common/engine/safetensors.h"

/* Says how a deterministic engine computes, as equal bits are its promise. Raise the number when
 * the bits of its KV change, so that what an older version stored is not used. */
#define DETERMINISTIC "deterministic-2"

bt_status_t bt_model_kv_layout(const struct bt_model_config *c, const char *kv_dtype,
                               uint32_t page_tokens, struct bt_kv_layout *l)
{
    bool fp8 = kv_dtype && strcmp(kv_dtype, "fp8") == 0;
    if (kv_dtype && !fp8 && strcmp(kv_dtype, "f16") != 0) {
        return BT_ERR_INVALID;
    }
    bt_dtype_t dtype = fp8 ? BT_DT_FP8_E4M3 : BT_DT_F16;
    if (c->mla.kv_rank) {
        return bt_kv_layout_mla(page_tokens, bt_model_kv_layers(c), c->mla.kv_rank, c->mla.rope,
                                dtype, l);
    }
    return bt_kv_layout_gqa(page_tokens, c->layers, c->kv_heads, c->head_dim, dtype, c->window, l);
}

/* The digest for random weights: of their shape. */
static void dummy_digest(const struct bt_model_config *c, uint8_t out[32])
{
    const struct bt_model_mla *m = &c->mla;
    const struct bt_model_experts *e = &c->experts;
    struct bt_buf text;
    bt_buf_init(&text);
    bt_buf_printf(&text, "dummy %s %u %u %u %u %u %u %u %d", c->architecture, c->vocab, c->hidden,
                  c->intermediate, c->layers, c->heads, c->kv_heads, c->head_dim,
                  c->tie_embeddings);
    if (m->kv_rank) {
        bt_buf_printf(&text, " mla %u %u %u %u %u", m->kv_rank, m->q_rank, m->nope, m->rope, m->v);
    }
    if (e->n) {
        bt_buf_printf(&text, " experts %u %u %u %d ", e->n, e->intermediate, e->shared, e->bias);
        for (uint32_t i = 0; i < c->layers; i++) {
            bt_buf_puts(&text, bt_model_has_experts(c, i) ? "1" : "0");
        }
    }
    if (c->gpt2) {
        bt_buf_printf(&text, " positions %u", c->max_model_len);
    }
    bt_sha256(text.data, text.len, out);
    bt_buf_cleanup(&text);
}

bt_status_t bt_model_weights_digest(const char *dir, const char *load_format, uint8_t out[32],
                                    char *err, size_t err_cap)
{
    if (load_format && strcmp(load_format, "dummy") == 0) {
        struct bt_model_config c;
        bt_status_t st = bt_model_config_load(dir, &c, err, err_cap);
        if (st != BT_OK) {
            return st;
        }
        dummy_digest(&c, out);
        return BT_OK;
    }
    struct bt_weights *w;
    bt_status_t st = bt_weights_open(dir, &w, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    bt_weights_digest(w, out);
    bt_weights_close(w);
    return BT_OK;
}

static bool is_fp8(const char *quantize)
{
    return quantize && strcmp(quantize, "fp8") == 0;
}

bt_status_t bt_model_root_key(const char *dir, const struct bt_model_settings *s,
                              struct bt_kv_layout *layout_p, struct bt_kv_key *root_p, char *err,
                              size_t err_cap)
{
    struct bt_model_config c;
    struct bt_kv_layout layout;
    struct bt_kv_root root = {0};
    const bool split = s->activations && strcmp(s->activations, "split") == 0;
    const bool fp8 = is_fp8(s->quantize);
    char rounds[64];
    bt_status_t st = bt_model_config_load(dir, &c, err, err_cap);
    if (st == BT_OK && fp8) {
        st = bt_model_fp8_check_quantize(dir, err, err_cap);
    }
    if (st == BT_OK && s->mtp) {
        st = bt_model_take_mtp(&c, dir, err, err_cap);
    }
    if (st != BT_OK) {
        return st;
    }
    st = bt_model_kv_layout(&c, s->kv_dtype, s->block_tokens, &layout);
    if (st != BT_OK) {
        snprintf(err, err_cap,
                 "kv.block_tokens %u, model.kv_dtype %s: no KV layout for this model: %s",
                 s->block_tokens, s->kv_dtype ? s->kv_dtype : "f16", bt_status_text(st));
        return st;
    }
    st = bt_model_weights_digest(dir, s->load_format, root.weights_digest, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    root.architecture = c.architecture;
    root.layout = &layout;
    root.rope = c.rope_text;
    /* Parts are joined by spaces; without deterministic the texts are those of older versions. */
    snprintf(rounds, sizeof(rounds), "%s%s%s%s%s", split ? "" : "bf16-mlp",
             !split && fp8 ? " " : "", fp8 ? "fp8-weights" : "",
             s->deterministic && (!split || fp8) ? " " : "", s->deterministic ? DETERMINISTIC : "");
    root.rounds = rounds;
    bt_kv_root_key(&root, root_p);
    *layout_p = layout;
    return BT_OK;
}
