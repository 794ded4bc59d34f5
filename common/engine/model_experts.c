/* Mixture of experts in config.json: how many there are, how a token chooses some, which layers
 * have them. Numbers whose defaults in published code differ between versions must be in the
 * file. */
#include <stdio.h>
#include <string.h>

#include "common/engine/model_read.h"

#define EXPERTS_MAX      1024
#define EXPERTS_USED_MAX 32

static void want(struct bt_model_reader *r, const char *name)
{
    if (!json_object_get(r->root, name)) {
        bt_model_fail(r, BT_ERR_INVALID, "%s: missing; this architecture needs it", name);
    }
}

/* A text that must be `only`; its absence says the same. */
static void only_text(struct bt_model_reader *r, const char *name, const char *only)
{
    const char *s = bt_model_str(r, r->root, name, only);
    if (strcmp(s, only) != 0) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "%s: %.32s is not supported; accepted is %s", name, s,
                      only);
    }
}

static void set_layer(struct bt_model_experts *e, uint32_t layer, bool on)
{
    uint8_t bit = (uint8_t)(1u << layer % 8);
    e->layers[layer / 8] = (uint8_t)(on ? e->layers[layer / 8] | bit : e->layers[layer / 8] & ~bit);
}

static uint32_t expert_size(struct bt_model_reader *r, const char *name)
{
    uint32_t n = (uint32_t)bt_model_int(r, name, 1, 1 << 22, true, 8);
    if (n % 8 != 0) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "%s: %u; must be a multiple of 8", name, n);
    }
    return n;
}

/* ---- DeepSeek ---- */

static void read_groups(struct bt_model_reader *r, struct bt_model_experts *e)
{
    e->groups = (uint32_t)bt_model_int(r, "n_group", 1, EXPERTS_MAX, false, 1);
    if (e->groups == 1) {
        return;
    }
    e->groups_used = (uint32_t)bt_model_int(r, "topk_group", 1, e->groups, true, 1);
    if (r->status == BT_OK && e->n % e->groups != 0) {
        bt_model_fail(r, BT_ERR_INVALID, "n_group: %u does not divide n_routed_experts %u",
                      e->groups, e->n);
    } else if (r->status == BT_OK && e->n / e->groups < e->group_best) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "n_group: %u groups of %u experts; supported are groups of at least %u",
                      e->groups, e->n / e->groups, e->group_best);
    }
}

static void read_v2(struct bt_model_reader *r, struct bt_model_experts *e)
{
    bool many = bt_model_int(r, "n_group", 1, EXPERTS_MAX, false, 1) > 1;
    const char *method = bt_model_str(r, r->root, "topk_method", many ? "(missing)" : "greedy");
    e->router = BT_ROUTER_SOFTMAX;
    e->group_best = 1;
    only_text(r, "scoring_func", "softmax");
    if (strcmp(method, "group_limited_greedy") == 0) {
        read_groups(r, e);
    } else if (strcmp(method, "greedy") != 0) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "topk_method: %.32s is not supported; accepted are greedy, "
                      "group_limited_greedy",
                      method);
    }
    e->normalise = bt_model_bool(r, "norm_topk_prob", false);
    if (e->normalise && e->scale != 1.0f) { /* published code applies one or both */
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "routed_scaling_factor: only 1 is supported where norm_topk_prob is true");
    }
}

static void read_v3(struct bt_model_reader *r, struct bt_model_experts *e)
{
    static const char *const needed[] = {"n_group", "norm_topk_prob", "routed_scaling_factor",
                                         "first_k_dense_replace"};
    for (size_t i = 0; i < BT_ARRAY_LEN(needed); i++) {
        want(r, needed[i]);
    }
    only_text(r, "scoring_func", "sigmoid");
    only_text(r, "topk_method", "noaux_tc");
    e->router = BT_ROUTER_SIGMOID;
    e->bias = true;
    e->group_best = 2;
    read_groups(r, e);
    e->normalise = bt_model_bool(r, "norm_topk_prob", true);
}

static void read_deepseek(struct bt_model_reader *r, struct bt_model_config *c, bool v3)
{
    struct bt_model_experts *e = &c->experts;
    e->n = (uint32_t)bt_model_int(r, "n_routed_experts", 1, EXPERTS_MAX, true, 1);
    e->intermediate = expert_size(r, "moe_intermediate_size");
    want(r, "n_shared_experts");
    e->shared = e->intermediate * (uint32_t)bt_model_int(r, "n_shared_experts", 0, 64, false, 0);
    e->scale = (float)bt_model_num(r, r->root, "routed_scaling_factor", 1e-6, 1e6, false, 1.0);
    v3 ? read_v3(r, e) : read_v2(r, e);
    uint32_t dense = (uint32_t)bt_model_int(r, "first_k_dense_replace", 0, c->layers, false, 0);
    if (bt_model_int(r, "moe_layer_freq", 1, BT_MODEL_LAYERS_MAX, false, 1) != 1) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "moe_layer_freq: only 1 is supported");
    }
    for (uint32_t i = dense; i <= c->layers; i++) { /* and the MTP layer, if there is one */
        set_layer(e, i, true);
    }
}

/* ---- Qwen3, Mixtral ---- */

/* transformers has used both names for both architectures. */
static uint32_t number_of_experts(struct bt_model_reader *r, const char *name, const char *other)
{
    bool first = bt_model_field(r->root, name) != NULL;
    uint32_t n = (uint32_t)bt_model_int(r, first ? name : other, 1, EXPERTS_MAX,
                                        first || bt_model_field(r->root, other), 0);
    if (n == 0) {
        (void)bt_model_int(r, name, 1, EXPERTS_MAX, true, 1);
    } else if (bt_model_int(r, other, 1, EXPERTS_MAX, false, n) != n) {
        bt_model_fail(r, BT_ERR_INVALID, "%s: does not say the same as %s, %u", other, name, n);
    }
    return n;
}

static void read_qwen(struct bt_model_reader *r, struct bt_model_config *c)
{
    struct bt_model_experts *e = &c->experts;
    e->n = number_of_experts(r, "num_experts", "num_local_experts");
    e->intermediate = expert_size(r, "moe_intermediate_size");
    want(r, "norm_topk_prob");
    e->normalise = bt_model_bool(r, "norm_topk_prob", false);
    uint32_t every =
        (uint32_t)bt_model_int(r, "decoder_sparse_step", 1, BT_MODEL_LAYERS_MAX, false, 1);
    for (uint32_t i = every - 1; i < c->layers; i += every) {
        set_layer(e, i, true);
    }
    const json_t *dense = bt_model_field(r->root, "mlp_only_layers");
    bool valid = !dense || json_is_array(dense);
    for (size_t i = 0; valid && i < json_array_size(dense); i++) {
        const json_t *v = json_array_get(dense, i);
        valid = json_is_integer(v) && json_integer_value(v) >= 0 &&
                json_integer_value(v) < (json_int_t)c->layers;
        if (valid) {
            set_layer(e, (uint32_t)json_integer_value(v), false);
        }
    }
    if (!valid) {
        bt_model_fail(r, BT_ERR_INVALID, "mlp_only_layers: must be a list of layers from 0 to %u",
                      c->layers - 1);
    }
}

static void read_mixtral(struct bt_model_reader *r, struct bt_model_config *c)
{
    struct bt_model_experts *e = &c->experts;
    e->n = number_of_experts(r, "num_local_experts", "num_experts");
    e->intermediate = c->intermediate;
    e->normalise = true;
    for (uint32_t i = 0; i < c->layers; i++) {
        set_layer(e, i, true);
    }
}

/* Newer files also name each layer's kind. */
static void check_layers(struct bt_model_reader *r, const struct bt_model_config *c)
{
    const json_t *kinds = bt_model_field(r->root, "mlp_layer_types");
    if (kinds && json_array_size(kinds) != c->layers) {
        bt_model_fail(r, BT_ERR_INVALID, "mlp_layer_types: must be a list of %u entries",
                      c->layers);
        return;
    }
    for (uint32_t i = 0; kinds && i < c->layers; i++) {
        const char *kind = json_string_value(json_array_get(kinds, i));
        if (!kind || strcmp(kind, bt_model_has_experts(c, i) ? "sparse" : "dense") != 0) {
            bt_model_fail(r, BT_ERR_INVALID,
                          "mlp_layer_types: entry %u must be %s, as other keys say", i,
                          bt_model_has_experts(c, i) ? "sparse" : "dense");
            return;
        }
    }
}

void bt_model_read_experts(struct bt_model_reader *r, struct bt_model_config *c,
                           const struct bt_model_arch *a)
{
    struct bt_model_experts *e = &c->experts;
    e->groups = e->groups_used = e->group_best = 1;
    e->scale = 1;
    e->used = (uint32_t)bt_model_int(r, "num_experts_per_tok", 1, EXPERTS_USED_MAX, true, 1);
    if (a->family == BT_FAMILY_QWEN_MOE) {
        read_qwen(r, c);
    } else if (a->family == BT_FAMILY_MIXTRAL) {
        read_mixtral(r, c);
    } else {
        read_deepseek(r, c, a->family == BT_FAMILY_DEEPSEEK_V3);
    }
    check_layers(r, c);
    uint32_t open = r->status == BT_OK ? e->n / e->groups * e->groups_used : 0;
    if (r->status == BT_OK && e->used > open) {
        bt_model_fail(r, BT_ERR_INVALID,
                      "num_experts_per_tok: %u, but a token can choose from %u experts only",
                      e->used, open);
    }
}
