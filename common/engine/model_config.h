/* config.json (and generation_config.json) of a Hugging Face model directory: the numbers the
 * engine, the KV layout and the front need. Both spellings of RoPE (rope_theta + rope_scaling,
 * rope_parameters). */
#ifndef BT_ENGINE_MODEL_CONFIG_H
#define BT_ENGINE_MODEL_CONFIG_H

#include "common/base/base.h"
#include "common/kv/key.h"
#include "common/kv/layout.h"

#define BT_MODEL_LAYERS_MAX 1024

typedef enum {
    BT_ROPE_DEFAULT = 0,
    BT_ROPE_LINEAR = 1,
    BT_ROPE_LLAMA3 = 2,
    BT_ROPE_YARN = 3
} bt_rope_kind_t;

/* Multi-head latent attention (DeepSeek-V2, 2.1). A head's query has `nope` values without position
 * and `rope` with; its value has `v`. Keys and values of all heads come from one latent of kv_rank
 * values, and one key part of `rope` values is common to all heads. head_dim is nope + rope. */
struct bt_model_mla {
    uint32_t kv_rank; /* 0: the model has no MLA */
    uint32_t q_rank;  /* of the queries' own latent; 0: one matrix makes them */
    uint32_t nope, rope, v;
};

typedef enum { BT_ROUTER_SOFTMAX = 0, BT_ROUTER_SIGMOID = 1 } bt_router_t;

/* Mixture of experts. A token's router scores are softmax or sigmoid of hidden x [experts]. They
 * are compared with a bias added where there is one. First the `groups_used` best groups are
 * chosen, by the sum of the `group_best` best scores of each, then the `used` best experts of
 * those. An expert's weight is its score without bias, divided by the sum of the chosen ones if
 * `normalise`, times scale. */
struct bt_model_experts {
    uint32_t n; /* 0: the model has none */
    uint32_t used;
    uint32_t intermediate; /* of one expert */
    uint32_t shared;       /* intermediate of the expert that every token uses; 0: none */
    uint32_t groups, groups_used, group_best; /* groups 1: no choice of groups */
    bt_router_t router;
    bool bias, normalise;
    float scale;
    /* bit: the layer has experts, not one MLP; the MTP layer's number is the one behind the last */
    uint8_t layers[BT_MODEL_LAYERS_MAX / 8 + 1];
};

struct bt_model_config {
    char architecture[64];
    uint32_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, max_model_len;
    struct bt_model_mla mla;
    struct bt_model_experts experts;
    bool gpt2; /* LayerNorm, learned positions, GELU, biases; otherwise RMSNorm, RoPE, SwiGLU */
    float norm_eps;
    float attn_scale; /* of the scores: 1 / sqrt(head_dim), MLA with YaRN: more */
    double rope_theta;
    bt_rope_kind_t rope_kind;
    bool rope_pairs; /* values 2i and 2i + 1 turn together; otherwise i and i + dim / 2 */
    double rope_factor, rope_low, rope_high,
        rope_original_len;  /* LINEAR: factor; LLAMA3, YARN: all;
                               YARN: beta_slow, beta_fast */
    bool rope_truncate;     /* YARN: whole numbers as borders of its ramp */
    float rope_scale;       /* of cosines and sines; YARN only, otherwise 1 */
    bool qkv_bias, qk_norm; /* by architecture */
    uint32_t window;        /* a token sees itself and the window - 1 before it; 0: all before it */
    char rope_text[512]; /* canonical text of the parameters of RoPE, MLA and experts, for the root
                            hash */
    bool tie_embeddings;
    uint32_t n_mtp; /* layers behind the last that predict further tokens */
    bool mtp;       /* the first of them is used (bt_model_take_mtp) */
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
/* model.mtp: the MTP layer is used. It becomes one more layer of weights and of KV. ERR_UNSUPPORTED
 * if config.json names none; err names the remedy. */
bt_status_t bt_model_take_mtp(struct bt_model_config *c, const char *dir, char *err,
                              size_t err_cap) BT_MUST_CHECK;
/* The KV layout of this model under model.kv_dtype: f16 (NULL: the same), as large as bf16 with
 * three more bits, since rounding keys to bf16 alone moved logprobs of long prompts by 0.2; or fp8
 * (e4m3, a scale for each token and head; MLA: as in common/kv/latent.h). ERR_INVALID for another
 * one. */
bt_status_t bt_model_kv_layout(const struct bt_model_config *c, const char *kv_dtype,
                               uint32_t page_tokens, struct bt_kv_layout *l) BT_MUST_CHECK;
/* SHA-256 over the weight files' names and bytes (dummy: over the shape). Reads everything once. */
bt_status_t bt_model_weights_digest(const char *dir, const char *load_format, uint8_t out[32],
                                    char *err, size_t err_cap) BT_MUST_CHECK;
/* The keys of the configuration that decide the content of a model's KV. They are the same in all
 * daemons. */
struct bt_model_settings {
    const char *load_format, *activations, *quantize, *kv_dtype; /* model.*; NULL: the default */
    bool deterministic;                                          /* engine.deterministic */
    bool mtp;                                                    /* model.mtp */
    uint32_t block_tokens;                                       /* kv.block_tokens */
};
/* The shared (saltless) root key of this model directory. Calls the three above. ERR_UNSUPPORTED,
 * too, if model.quantize is not for this checkpoint. */
bt_status_t bt_model_root_key(const char *dir, const struct bt_model_settings *s,
                              struct bt_kv_layout *layout_p, struct bt_kv_key *root_p, char *err,
                              size_t err_cap) BT_MUST_CHECK;

static inline bool bt_model_has_experts(const struct bt_model_config *c, uint32_t layer)
{
    return c->experts.n > 0 && c->experts.layers[layer / 8] >> layer % 8 & 1;
}

/* Layers that keep KV. */
static inline uint32_t bt_model_kv_layers(const struct bt_model_config *c)
{
    return c->layers + (c->mtp ? 1 : 0);
}

/* Values of a head that RoPE turns. */
static inline uint32_t bt_model_rope_dim(const struct bt_model_config *c)
{
    return c->mla.kv_rank ? c->mla.rope : c->head_dim;
}

/* The sizes of a model's parts, for counting memory and work. */
struct bt_model_size {
    uint64_t weights; /* parameters of all layers and the head; the embedding counts if it is the
                         head */
    uint64_t embed;   /* parameters that are only looked up */
    uint64_t dense;   /* of `weights`, those that every token uses */
    uint64_t expert;  /* parameters of one routed expert of one layer */
    uint32_t expert_layers;
    uint64_t wide; /* of weights and embed, those that stay in 16 bits where the others are fp8:
                      embedding, head, norms, biases, routers */
    uint64_t pair; /* multiply-adds of attention for one pair of tokens, all layers and heads; MLA:
                      with the keys and values of each head, as a prompt may be computed */
    uint64_t latent_pair; /* the same with the latent, as single tokens are; without MLA: pair */
    uint64_t mtp;         /* parameters of the MTP layer, if it is used; in no other number */
};
/* Norms and biases count, MTP layers do not: weights + embed is the model's published size. */
void bt_model_count(const struct bt_model_config *c, struct bt_model_size *s);

/* Inverse frequencies of the model's RoPE, bt_model_rope_dim / 2 of them (Su et al., RoFormer).
 * LLAMA3, as published with Llama 3.1: wavelengths above original_len / low are stretched by
 * factor, those below original_len / high stay, the ones between are interpolated. YARN (Peng et
 * al. 2023, 3.2): dimensions that turn more than beta_fast times within original_len stay, those
 * that turn less than beta_slow times are stretched, the ones between are interpolated by their
 * index. */
void bt_model_rope_inv_freq(const struct bt_model_config *c, float *inv_freq);

#endif
