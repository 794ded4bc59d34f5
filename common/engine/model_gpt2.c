/* config.json of GPT-2, whose keys have names of their own. */
#include <stdio.h>
#include <string.h>

#include "common/engine/model_read.h"

/* Settings that the engine does not implement. */
static void check(struct bt_model_reader *r)
{
    static const struct {
        const char *name;
        bool only;
    } keys[] = {{"scale_attn_weights", true},
                {"scale_attn_by_inverse_layer_idx", false},
                {"add_cross_attention", false}};
    for (size_t i = 0; i < BT_ARRAY_LEN(keys); i++) {
        if (bt_model_bool(r, keys[i].name, keys[i].only) != keys[i].only) {
            bt_model_fail(r, BT_ERR_UNSUPPORTED, "%s: only %s is supported", keys[i].name,
                          keys[i].only ? "true" : "false");
        }
    }
    const char *act = bt_model_str(r, r->root, "activation_function", "gelu_new");
    if (strcmp(act, "gelu_new") != 0 && strcmp(act, "gelu_pytorch_tanh") != 0) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "activation_function: %.32s is not supported; supported are gelu_new, "
                      "gelu_pytorch_tanh",
                      act);
    }
    static const char *const rope[] = {"rope_scaling", "rope_parameters"};
    for (size_t i = 0; i < BT_ARRAY_LEN(rope); i++) {
        if (bt_model_field(r->root, rope[i])) {
            bt_model_fail(r, BT_ERR_UNSUPPORTED, "%s: GPT-2 has no RoPE; accepted is null",
                          rope[i]);
        }
    }
}

void bt_model_read_gpt2(struct bt_model_reader *r, struct bt_model_config *c)
{
    c->vocab = (uint32_t)bt_model_int(r, "vocab_size", 2, 1 << 24, true, 2);
    c->hidden = (uint32_t)bt_model_int(r, "n_embd", 1, 1 << 20, true, 1);
    c->layers = (uint32_t)bt_model_int(r, "n_layer", 1, BT_MODEL_LAYERS_MAX, true, 1);
    c->heads = c->kv_heads = (uint32_t)bt_model_int(r, "n_head", 1, 4096, true, 1);
    c->max_model_len = (uint32_t)bt_model_int(r, "n_positions", 1, 1 << 24, true, 1);
    c->intermediate = (uint32_t)bt_model_int(r, "n_inner", 1, 1 << 22, false, 4 * c->hidden);
    c->norm_eps = (float)bt_model_num(r, r->root, "layer_norm_epsilon", 1e-12, 0.1, false, 1e-5);
    c->tie_embeddings = bt_model_bool(r, "tie_word_embeddings", true);
    check(r);
    if (r->status == BT_OK && c->hidden % c->heads != 0) {
        bt_model_fail(r, BT_ERR_INVALID, "n_head: %u does not divide n_embd %u", c->heads,
                      c->hidden);
        return;
    }
    c->head_dim = c->hidden / c->heads;
    c->gpt2 = true;
    c->rope_theta = 10000; /* unused, but its frequencies are finite */
    c->rope_scale = 1;
    snprintf(c->rope_text, sizeof(c->rope_text), "none");
}
