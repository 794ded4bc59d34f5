/* The tables of model_refused.h. A new key of Hugging Face's config.json that changes results must
 * be added here, or be read in the files that model_read.h names. Pure. */
#include "common/engine/model_refused.h"

#include <stdio.h>
#include <string.h>

enum neutral {
    NONE, /* null only */
    OFF,  /* null, false, 0, an empty string, list or object */
    ONE,  /* null, 1 */
    ON    /* null, true */
};

struct key {
    const char *name;
    enum neutral neutral;
};

/* Keys of the tables below that some architectures follow. */
static const struct owner {
    const char *name;
    enum bt_model_own own;
} owners[] = {
    {"kv_lora_rank", BT_MODEL_OWN_MLA},
    {"q_lora_rank", BT_MODEL_OWN_MLA},
    {"rope_interleave", BT_MODEL_OWN_MLA},
    {"n_routed_experts", BT_MODEL_OWN_ROUTED},
    {"n_shared_experts", BT_MODEL_OWN_ROUTED},
    {"num_experts", BT_MODEL_OWN_EXPERTS},
    {"num_local_experts", BT_MODEL_OWN_EXPERTS},
    {"attention_factor", BT_MODEL_OWN_YARN},
    {"mscale", BT_MODEL_OWN_YARN},
    {"mscale_all_dim", BT_MODEL_OWN_YARN},
    {"beta_fast", BT_MODEL_OWN_YARN},
    {"beta_slow", BT_MODEL_OWN_YARN},
};

static const struct key config_keys[] = {
    /* scales and caps */
    {"attn_logit_softcapping", OFF},
    {"final_logit_softcapping", OFF},
    {"query_pre_attn_scalar", NONE},
    {"attention_multiplier", NONE},
    {"residual_multiplier", ONE},
    {"embedding_multiplier", ONE},
    {"logits_scaling", ONE},
    {"logit_scale", ONE},
    {"scale_emb", ONE},
    {"scale_depth", NONE},
    {"dim_model_base", NONE},
    {"clip_qkv", OFF},
    /* attention */
    {"is_causal", ON},
    {"use_bidirectional_attention", OFF},
    {"alibi", OFF},
    {"attention_chunk_size", OFF},
    {"sliding_window_pattern", OFF},
    {"dual_chunk_attention_config", NONE},
    {"rope_interleaved", OFF},
    {"rope_interleave", OFF},
    {"rope_local_base_freq", NONE},
    {"no_rope_layers", OFF},
    {"no_rope_layer_interval", OFF},
    {"kv_lora_rank", OFF},
    {"q_lora_rank", OFF},
    {"parallel_attn", OFF},
    {"use_parallel_residual", OFF},
    /* experts */
    {"num_experts", OFF},
    {"num_local_experts", OFF},
    {"n_routed_experts", OFF},
    {"n_shared_experts", OFF},
    {"shared_expert_intermediate_size", OFF},
    /* weights in other forms */
    {"pruned_heads", OFF},
    {"quantization", OFF},
    {"compression_config", OFF},
};

static const struct key rope_keys[] = {
    {"attention_factor", NONE},    {"mscale", NONE},           {"mscale_all_dim", NONE},
    {"beta_fast", NONE},           {"beta_slow", NONE},        {"attn_factor", ONE},
    {"extrapolation_factor", ONE}, {"short_factor", NONE},     {"long_factor", NONE},
    {"mrope_section", OFF},        {"mrope_interleaved", OFF},
};

static const struct key generation_keys[] = {
    {"typical_p", ONE},
    {"epsilon_cutoff", OFF},
    {"eta_cutoff", OFF},
    {"top_a", OFF},
    {"num_beams", ONE},
    {"num_beam_groups", ONE},
    {"penalty_alpha", OFF},
    {"no_repeat_ngram_size", OFF},
    {"encoder_no_repeat_ngram_size", OFF},
    {"encoder_repetition_penalty", ONE},
    {"diversity_penalty", OFF},
    {"guidance_scale", ONE},
    {"min_length", OFF},
    {"min_new_tokens", OFF},
    {"bad_words_ids", OFF},
    {"sequence_bias", OFF},
    {"suppress_tokens", OFF},
    {"begin_suppress_tokens", OFF},
    {"forced_bos_token_id", NONE},
    {"forced_eos_token_id", NONE},
    {"forced_decoder_ids", OFF},
    {"watermarking_config", NONE},
};

static const struct {
    const struct key *keys;
    size_t n;
} tables[] = {[BT_MODEL_CONFIG] = {config_keys, BT_ARRAY_LEN(config_keys)},
              [BT_MODEL_ROPE] = {rope_keys, BT_ARRAY_LEN(rope_keys)},
              [BT_MODEL_GENERATION] = {generation_keys, BT_ARRAY_LEN(generation_keys)}};

static bool is_own(const char *name, uint32_t own)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(owners); i++) {
        if ((owners[i].own & own) && strcmp(owners[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

static bool is_neutral(const json_t *v, enum neutral n)
{
    switch (n) {
    case NONE: return false;
    case ON: return json_is_true(v);
    case ONE: return json_is_number(v) && json_number_value(v) == 1.0;
    case OFF:
        return json_is_false(v) || (json_is_number(v) && json_number_value(v) == 0) ||
               (json_is_string(v) && json_string_length(v) == 0) ||
               (json_is_array(v) && json_array_size(v) == 0) ||
               (json_is_object(v) && json_object_size(v) == 0);
    }
    return false;
}

bool bt_model_follows(const json_t *o, enum bt_model_object kind, uint32_t own, char *text,
                      size_t cap)
{
    static const char *const accepted[] = {
        [NONE] = "null", [OFF] = "null, false, 0 or empty", [ONE] = "null or 1", [ON] = "true"};
    for (size_t i = 0; i < tables[kind].n; i++) {
        const struct key *k = &tables[kind].keys[i];
        const json_t *v = json_object_get(o, k->name);
        if (v != NULL && !json_is_null(v) && !is_neutral(v, k->neutral) && !is_own(k->name, own)) {
            snprintf(text, cap, "%s: is not supported; accepted is %s", k->name,
                     accepted[k->neutral]);
            return false;
        }
    }
    return true;
}
