/* config.json (and generation_config.json) of a Hugging Face model directory: the numbers the
 * engine, the KV layout and the front need. Both spellings of RoPE (rope_theta + rope_scaling,
 * rope_parameters). */
#ifndef BT_ENGINE_MODEL_CONFIG_H
#define BT_ENGINE_MODEL_CONFIG_H

#include "common/base/base.h"
#include "common/kv/key.h"
#include "common/kv/layout.h"

typedef enum { BT_ROPE_DEFAULT = 0, BT_ROPE_LINEAR = 1, BT_ROPE_LLAMA3 = 2 } bt_rope_kind_t;

struct bt_model_config {
    char architecture[64];
    uint32_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, max_model_len;
    float norm_eps;
    double rope_theta;
    bt_rope_kind_t rope_kind;
    double rope_factor, rope_low, rope_high, rope_original_len; /* LINEAR: factor; LLAMA3: all */
    bool qkv_bias, qk_norm;                                     /* by architecture */
    uint32_t window;     /* a token sees itself and the window - 1 before it; 0: all before it */
    char rope_text[256]; /* canonical text of the RoPE parameters, for the root hash */
    bool tie_embeddings;
    uint32_t bos, n_eos,
        eos[16]; /* eos: generation_config's, else config's; bos UINT32_MAX: none */
    /* sampling defaults of generation_config.json; negative: not given */
    float temperature, top_p, min_p, repetition_penalty;
    int32_t top_k;
    uint32_t max_new_tokens; /* of a chat answer whose request names no length; 0: not given */
};

/* ERR_INVALID / ERR_UNSUPPORTED / ERR_NOT_FOUND; err names file, field and the allowed values. */
bt_status_t bt_model_config_load(const char *dir, struct bt_model_config *c, char *err,
                                 size_t err_cap) BT_MUST_CHECK;
/* The KV layout of this model under model.kv_dtype: f16 (NULL: the same), as large as bf16 with
 * three more bits, since rounding keys to bf16 alone moved logprobs of long prompts by 0.2; or fp8
 * (e4m3, a scale for each token and head). ERR_INVALID for another one. */
bt_status_t bt_model_kv_layout(const struct bt_model_config *c, const char *kv_dtype,
                               uint32_t page_tokens, struct bt_kv_layout *l) BT_MUST_CHECK;
/* SHA-256 over the weight files' names and bytes (dummy: over the shape). Reads everything once. */
bt_status_t bt_model_weights_digest(const char *dir, const char *load_format, uint8_t out[32],
                                    char *err, size_t err_cap) BT_MUST_CHECK;
/* The shared (saltless) root key of this model directory under model.activations (NULL:
 * bf16-mlp), model.kv_dtype and block_tokens. Calls the three above. */
bt_status_t bt_model_root_key(const char *dir, const char *load_format, const char *activations,
                              const char *kv_dtype, uint32_t block_tokens,
                              struct bt_kv_layout *layout_p, struct bt_kv_key *root_p, char *err,
                              size_t err_cap) BT_MUST_CHECK;

/* Inverse frequencies of the model's RoPE, head_dim / 2 of them (Su et al., RoFormer). LLAMA3, as
 * published with Llama 3.1: wavelengths above original_len / low are stretched by factor, those
 * below original_len / high stay, the ones between are interpolated. */
void bt_model_rope_inv_freq(const struct bt_model_config *c, float *inv_freq);

#endif
