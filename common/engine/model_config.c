/* Reads config.json and generation_config.json of a Hugging Face model directory. Runs in the
 * thread that starts the daemon; only reads files. Strict: a number that is missing, of the wrong
 * type or out of range is an error that names the file, the field and the allowed values. */
#include "common/engine/model_config.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/engine/model_fp8.h"
#include "common/engine/model_read.h"
#include "common/engine/model_refused.h"

static const struct bt_model_arch archs[] = {
    {"LlamaForCausalLM", .family = BT_FAMILY_DENSE},
    {"MistralForCausalLM", .window = true},
    {"Qwen2ForCausalLM", .qkv_bias = true, .window = true, .window_switched = true},
    {"Qwen3ForCausalLM", .qk_norm = true, .window = true, .window_switched = true},
    {"DeepseekV3ForCausalLM", .family = BT_FAMILY_DEEPSEEK_V3},
    {"DeepseekV2ForCausalLM", .family = BT_FAMILY_DEEPSEEK_V2},
    {"Qwen3MoeForCausalLM", .qk_norm = true, .window = true, .window_switched = true,
     .family = BT_FAMILY_QWEN_MOE},
    {"MixtralForCausalLM", .window = true, .family = BT_FAMILY_MIXTRAL},
    {"GPT2LMHeadModel", .qkv_bias = true, .family = BT_FAMILY_GPT2},
};

static bool is_deepseek(const struct bt_model_arch *a)
{
    return a->family == BT_FAMILY_DEEPSEEK_V2 || a->family == BT_FAMILY_DEEPSEEK_V3;
}

/* One window for all layers. Models whose layers differ would need a KV group for each kind of
 * layer. */
static void read_window(struct bt_model_reader *r, struct bt_model_config *c,
                        const struct bt_model_arch *a)
{
    size_t sliding = 0, n = 0;
    const json_t *types = bt_model_field(r->root, "layer_types");
    for (; types && n < json_array_size(types); n++) {
        const char *t = json_string_value(json_array_get(types, n));
        if (!t || (strcmp(t, "full_attention") != 0 && strcmp(t, "sliding_attention") != 0)) {
            bt_model_fail(r, BT_ERR_UNSUPPORTED,
                          "layer_types: entry %zu is not supported; supported are full_attention, "
                          "sliding_attention",
                          n);
            return;
        }
        sliding += t[0] == 's';
    }
    if (sliding != 0 && sliding != n) {
        bt_model_fail(
            r, BT_ERR_UNSUPPORTED,
            "layer_types: %zu of %zu layers are sliding_attention; supported are all or none",
            sliding, n);
        return;
    }
    bool on = bt_model_field(r->root, "sliding_window") &&
              (!a->window_switched || bt_model_bool(r, "use_sliding_window", false));
    if (sliding != 0 && !on) {
        bt_model_fail(r, BT_ERR_INVALID, "layer_types: sliding_attention without sliding_window");
    } else if (on && !a->window) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "sliding_window: only null is supported for %s",
                      a->name);
    } else if (on && n == 0 && a->window_switched) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "use_sliding_window: only false is supported for %s without layer_types",
                      a->name);
    } else if (on && (n == 0 || sliding)) {
        c->window = (uint32_t)bt_model_int(r, "sliding_window", 1, 1 << 24, true, 1);
    }
}

/* NULL: fails. */
static const struct bt_model_arch *read_architecture(struct bt_model_reader *r,
                                                     struct bt_model_config *c)
{
    const json_t *list = bt_model_field(r->root, "architectures");
    const json_t *first = list && json_is_array(list) ? json_array_get(list, 0) : NULL;
    const char *name = json_string_value(first);
    if (!name) {
        bt_model_fail(r, BT_ERR_INVALID,
                      "architectures: missing; must be a list with one name, such as "
                      "[\"LlamaForCausalLM\"]");
        return NULL;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(archs); i++) {
        if (strcmp(name, archs[i].name) == 0) {
            snprintf(c->architecture, sizeof(c->architecture), "%s", name);
            c->qkv_bias = archs[i].qkv_bias;
            c->qk_norm = archs[i].qk_norm;
            return &archs[i];
        }
    }
    char known[256] = "";
    for (size_t i = 0; i < BT_ARRAY_LEN(archs); i++) {
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", i ? ", " : "",
                 archs[i].name);
    }
    bt_model_fail(r, BT_ERR_UNSUPPORTED, "architectures: %.64s is not supported; supported are %s",
                  name, known);
    return NULL;
}

static void read_sizes(struct bt_model_reader *r, struct bt_model_config *c,
                       const struct bt_model_arch *a)
{
    /* Published defaults of the others are not these. */
    bool newer = a->family != BT_FAMILY_DENSE;
    c->vocab = (uint32_t)bt_model_int(r, "vocab_size", 2, 1 << 24, true, 2);
    c->hidden = (uint32_t)bt_model_int(r, "hidden_size", 1, 1 << 20, true, 1);
    c->intermediate = (uint32_t)bt_model_int(r, "intermediate_size", 1, 1 << 22, true, 1);
    c->layers = (uint32_t)bt_model_int(r, "num_hidden_layers", 1, BT_MODEL_LAYERS_MAX, true, 1);
    c->heads = (uint32_t)bt_model_int(r, "num_attention_heads", 1, 4096, true, 1);
    c->kv_heads = (uint32_t)bt_model_int(r, "num_key_value_heads", 1, 4096,
                                         newer && !is_deepseek(a), c->heads);
    c->max_model_len = (uint32_t)bt_model_int(r, "max_position_embeddings", 1, 1 << 24, true, 1);
    c->norm_eps = (float)bt_model_num(r, r->root, "rms_norm_eps", 1e-12, 0.1, newer, 1e-6);
    c->tie_embeddings = bt_model_bool(r, "tie_word_embeddings", false);
}

static void read_head_dim(struct bt_model_reader *r, struct bt_model_config *c)
{
    c->head_dim = (uint32_t)bt_model_int(r, "head_dim", 1, 1024, false, 0);
    if (r->status == BT_OK && c->head_dim == 0) {
        if (c->hidden % c->heads != 0) {
            bt_model_fail(r, BT_ERR_INVALID,
                          "num_attention_heads: %u does not divide hidden_size %u, and "
                          "there is no head_dim",
                          c->heads, c->hidden);
            return;
        }
        c->head_dim = c->hidden / c->heads;
    }
}

static void read_shape(struct bt_model_reader *r, struct bt_model_config *c,
                       const struct bt_model_arch *a)
{
    if (a->family == BT_FAMILY_GPT2) {
        bt_model_read_gpt2(r, c);
    } else {
        read_sizes(r, c, a);
    }
    if (r->status == BT_OK && is_deepseek(a)) {
        bt_model_read_mla(r, c, a);
    } else if (r->status == BT_OK && !c->gpt2) {
        read_head_dim(r, c);
    }
    if (r->status == BT_OK && a->family != BT_FAMILY_DENSE && !c->gpt2) {
        bt_model_read_experts(r, c, a);
    }
    if (r->status != BT_OK) {
        return;
    }
    c->attn_scale = 1.0f / sqrtf((float)c->head_dim);
    if (c->heads % c->kv_heads != 0) {
        bt_model_fail(r, BT_ERR_INVALID,
                      "num_key_value_heads: %u does not divide num_attention_heads %u", c->kv_heads,
                      c->heads);
    }
    if (c->head_dim % 16 != 0 || c->head_dim > 256) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "head_dim: %u; supported are multiples of 16 up to 256", c->head_dim);
    }
    if (c->hidden % 8 != 0 || c->intermediate % 8 != 0) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "hidden_size %u and intermediate_size %u must be multiples "
                      "of 8",
                      c->hidden, c->intermediate);
    }
}

/* Refuses settings that the engine does not implement: it would ignore them and compute wrong
 * results. */
static void read_restrictions(struct bt_model_reader *r, const struct bt_model_config *c,
                              const struct bt_model_arch *a)
{
    static const char *const norms[] = {"qk_norm", "use_qk_norm", "qk_layernorm"};
    const char *act = bt_model_str(r, r->root, "hidden_act", "silu");
    act = bt_model_str(r, r->root, "hidden_activation", act);
    if (!c->gpt2 && strcmp(act, "silu") != 0) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "hidden_act: %.32s is not supported; supported is silu", act);
    }
    if (bt_model_bool(r, "attention_bias", c->qkv_bias) != c->qkv_bias) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "attention_bias: only %s is supported for %s",
                      c->qkv_bias ? "true" : "false", c->architecture);
    }
    if (bt_model_bool(r, "mlp_bias", false)) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "mlp_bias: only false is supported");
    }
    const json_t *types = bt_model_field(r->root, "layer_types");
    if (types && json_array_size(types) != c->layers) {
        bt_model_fail(r, BT_ERR_INVALID,
                      "layer_types: %zu entries for %u layers (num_hidden_layers)",
                      json_array_size(types), c->layers);
    }
    if (!c->mla.kv_rank &&
        bt_model_int(r, "v_head_dim", 1, 1 << 20, false, c->head_dim) != c->head_dim) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "v_head_dim: only the value of head_dim, %u, is supported", c->head_dim);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(norms); i++) {
        if (bt_model_bool(r, norms[i], c->qk_norm) != c->qk_norm) {
            bt_model_fail(r, BT_ERR_UNSUPPORTED, "%s: only %s is supported for %s", norms[i],
                          c->qk_norm ? "true" : "false", c->architecture);
        }
    }
    char why[256];
    uint32_t own = is_deepseek(a) ? BT_MODEL_OWN_MLA | BT_MODEL_OWN_ROUTED
                   : c->experts.n ? BT_MODEL_OWN_EXPERTS
                                  : 0;
    if (!bt_model_follows(r->root, BT_MODEL_CONFIG, own, why, sizeof(why))) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "%s", why);
    }
    const char *dt = bt_model_str(r, r->root, "torch_dtype", NULL);
    dt = bt_model_str(r, r->root, "dtype", dt);
    if (dt && strcmp(dt, "bfloat16") != 0 && strcmp(dt, "float16") != 0 &&
        strcmp(dt, "float32") != 0) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "dtype: %.32s is not supported; supported are bfloat16, "
                      "float16, float32",
                      dt);
    }
}

static void read_token_ids(struct bt_model_reader *r, struct bt_model_config *c)
{
    if (bt_model_field(r->root, "bos_token_id")) {
        c->bos = (uint32_t)bt_model_int(r, "bos_token_id", 0, (int64_t)c->vocab - 1, true, 0);
    }
    const json_t *eos = bt_model_field(r->root, "eos_token_id");
    if (!eos) {
        return;
    }
    size_t n = json_is_array(eos) ? json_array_size(eos) : 1;
    if (n > BT_ARRAY_LEN(c->eos)) {
        bt_model_fail(r, BT_ERR_INVALID, "eos_token_id: %zu ids, at most %zu are supported", n,
                      BT_ARRAY_LEN(c->eos));
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_is_array(eos) ? json_array_get(eos, i) : eos;
        if (!json_is_integer(v) || json_integer_value(v) < 0 ||
            json_integer_value(v) >= (json_int_t)c->vocab) {
            bt_model_fail(r, BT_ERR_INVALID,
                          "eos_token_id: must be an id below vocab_size %u, or a list "
                          "of such",
                          c->vocab);
            return;
        }
        c->eos[i] = (uint32_t)json_integer_value(v);
    }
    c->n_eos = (uint32_t)n;
}

static bt_status_t read_generation(const char *dir, struct bt_model_config *c, char *err,
                                   size_t err_cap)
{
    c->temperature = c->top_p = c->min_p = c->repetition_penalty = -1.0f;
    c->top_k = -1;
    char why[256];
    struct bt_model_reader r;
    bt_model_reader_open(&r, dir, "generation_config.json", false, err, err_cap);
    if (r.status == BT_OK && r.root) {
        read_token_ids(&r, c);
        c->temperature = (float)bt_model_num(&r, r.root, "temperature", 0, 100, false, -1);
        c->top_p = (float)bt_model_num(&r, r.root, "top_p", 0, 1, false, -1);
        c->min_p = (float)bt_model_num(&r, r.root, "min_p", 0, 1, false, -1);
        c->repetition_penalty =
            (float)bt_model_num(&r, r.root, "repetition_penalty", 1e-3, 1e3, false, -1);
        c->max_new_tokens = (uint32_t)bt_model_int(&r, "max_new_tokens", 1, INT32_MAX, false, 0);
        c->top_k = (int32_t)bt_model_int(&r, "top_k", -1, 1 << 24, false, -1);
        if (!bt_model_follows(r.root, BT_MODEL_GENERATION, 0, why, sizeof(why))) {
            bt_model_fail(&r, BT_ERR_UNSUPPORTED, "%s; remove it if clients may do without", why);
        }
    }
    bt_model_reader_close(&r);
    return r.status;
}

/* Adds the numbers of MLA and experts to rope_text, which is part of the root key: they change KV
 * like RoPE's do, and the digest of the weights does not cover them. */
static void write_text(struct bt_model_config *c)
{
    char *at = c->rope_text + strlen(c->rope_text);
    const struct bt_model_mla *m = &c->mla;
    const struct bt_model_experts *e = &c->experts;
    size_t left = sizeof(c->rope_text) - strlen(c->rope_text);
    int n = 0;
    if (m->kv_rank) {
        n = snprintf(at, left, " pairs=%d attn=%.9g mla=%u,%u,%u,%u,%u", c->rope_pairs,
                     (double)c->attn_scale, m->kv_rank, m->q_rank, m->nope, m->rope, m->v);
    }
    if (e->n) {
        n += snprintf(at + n, left - (size_t)n,
                      " experts=%u,%u,%u,%u router=%d,%d,%d,%.9g groups=%u,%u,%u", e->n, e->used,
                      e->intermediate, e->shared, (int)e->router, e->bias, e->normalise,
                      (double)e->scale, e->groups, e->groups_used, e->group_best);
    }
    BT_ASSERT((size_t)n < left);
}

bt_status_t bt_model_config_load(const char *dir, struct bt_model_config *c_p, char *err,
                                 size_t err_cap)
{
    struct bt_model_config c = {.bos = UINT32_MAX};
    const struct bt_model_arch *a = NULL;
    struct bt_model_reader r;
    bt_model_reader_open(&r, dir, "config.json", true, err, err_cap);
    if (r.status == BT_OK) {
        a = read_architecture(&r, &c);
    }
    if (r.status == BT_OK) {
        read_window(&r, &c, a);
        read_shape(&r, &c, a);
    }
    if (r.status == BT_OK) {
        read_restrictions(&r, &c, a);
        if (!c.gpt2) {
            bt_model_read_rope(&r, &c, a);
        }
        write_text(&c);
        read_token_ids(&r, &c);
    }
    bt_model_reader_close(&r);
    if (r.status != BT_OK) {
        return r.status;
    }
    struct bt_model_fp8 *fp8 =
        NULL; /* read for its errors; the decoder needs it, loading weights */
    bt_status_t st = bt_model_fp8_load(dir, &fp8, err, err_cap);
    bt_model_fp8_destroy(fp8);
    if (st == BT_OK) {
        st = read_generation(dir, &c, err, err_cap);
    }
    if (st == BT_OK) {
        *c_p = c;
    }
    return st;
}
