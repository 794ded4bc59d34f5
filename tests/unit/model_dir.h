/* A model directory of a test: config.json from a base and changes. */
#ifndef BT_TESTS_MODEL_DIR_H
#define BT_TESTS_MODEL_DIR_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "common/engine/model_config.h"

static char model_dir[64], model_err[1024];

/* The public config.json of each model, as far as it changes results. */
static const char deepseek_v3[] =
    "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"attention_bias\":false,\"aux_loss_alpha\":"
    "0.001,\"bos_token_id\":0,\"eos_token_id\":1,\"ep_size\":1,\"first_k_dense_replace\":3,"
    "\"hidden_act\":\"silu\",\"hidden_size\":7168,\"intermediate_size\":18432,\"kv_lora_rank\":512,"
    "\"max_position_embeddings\":163840,\"model_type\":\"deepseek_v3\",\"moe_intermediate_size\":"
    "2048,\"moe_layer_freq\":1,\"n_group\":8,\"n_routed_experts\":256,\"n_shared_experts\":1,"
    "\"norm_topk_prob\":true,\"num_attention_heads\":128,\"num_experts_per_tok\":8,"
    "\"num_hidden_layers\":61,\"num_key_value_heads\":128,\"num_nextn_predict_layers\":1,"
    "\"pretraining_tp\":1,\"q_lora_rank\":1536,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,"
    "\"rms_norm_eps\":1e-06,\"rope_scaling\":{\"beta_fast\":32,\"beta_slow\":1,\"factor\":40,"
    "\"mscale\":1.0,\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":4096,\"type\":"
    "\"yarn\"},\"rope_theta\":10000,\"routed_scaling_factor\":2.5,\"scoring_func\":\"sigmoid\","
    "\"seq_aux\":true,\"tie_word_embeddings\":false,\"topk_group\":4,\"topk_method\":\"noaux_tc\","
    "\"torch_dtype\":\"bfloat16\",\"v_head_dim\":128,\"vocab_size\":129280}";
static const char deepseek_v2_lite[] =
    "{\"architectures\":[\"DeepseekV2ForCausalLM\"],\"attention_bias\":false,\"aux_loss_alpha\":"
    "0.001,\"bos_token_id\":100000,\"eos_token_id\":100001,\"first_k_dense_replace\":1,"
    "\"hidden_act\":\"silu\",\"hidden_size\":2048,\"intermediate_size\":10944,\"kv_lora_rank\":512,"
    "\"max_position_embeddings\":163840,\"moe_intermediate_size\":1408,\"moe_layer_freq\":1,"
    "\"n_group\":1,\"n_routed_experts\":64,\"n_shared_experts\":2,\"norm_topk_prob\":false,"
    "\"num_attention_heads\":16,\"num_experts_per_tok\":6,\"num_hidden_layers\":27,"
    "\"num_key_value_heads\":16,\"q_lora_rank\":null,\"qk_nope_head_dim\":128,"
    "\"qk_rope_head_dim\":64,\"rms_norm_eps\":1e-06,\"rope_scaling\":{\"beta_fast\":32,"
    "\"beta_slow\":1,\"factor\":40,\"mscale\":0.707,\"mscale_all_dim\":0.707,"
    "\"original_max_position_embeddings\":4096,\"type\":\"yarn\"},\"rope_theta\":10000,"
    "\"routed_scaling_factor\":1.0,\"scoring_func\":\"softmax\",\"seq_aux\":true,"
    "\"tie_word_embeddings\":false,\"topk_group\":1,\"topk_method\":\"greedy\",\"v_head_dim\":128,"
    "\"vocab_size\":102400}";
static const char qwen3_moe[] =
    "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"attention_bias\":false,\"bos_token_id\":151643,"
    "\"decoder_sparse_step\":1,\"eos_token_id\":151645,\"head_dim\":128,\"hidden_act\":\"silu\","
    "\"hidden_size\":2048,\"intermediate_size\":6144,\"max_position_embeddings\":40960,"
    "\"max_window_layers\":48,\"mlp_only_layers\":[],\"moe_intermediate_size\":768,"
    "\"norm_topk_prob\":true,\"num_attention_heads\":32,\"num_experts\":128,"
    "\"num_experts_per_tok\":8,\"num_hidden_layers\":48,\"num_key_value_heads\":4,"
    "\"output_router_logits\":false,\"rms_norm_eps\":1e-06,\"rope_scaling\":null,\"rope_theta\":"
    "1000000.0,\"router_aux_loss_coef\":0.001,\"sliding_window\":null,\"tie_word_embeddings\":"
    "false,\"use_sliding_window\":false,\"vocab_size\":151936}";
static const char mixtral[] =
    "{\"architectures\":[\"MixtralForCausalLM\"],\"bos_token_id\":1,\"eos_token_id\":2,"
    "\"hidden_act\":\"silu\",\"hidden_size\":4096,\"intermediate_size\":14336,"
    "\"max_position_embeddings\":32768,\"num_attention_heads\":32,\"num_experts_per_tok\":2,"
    "\"num_hidden_layers\":32,\"num_key_value_heads\":8,\"num_local_experts\":8,"
    "\"output_router_logits\":false,\"rms_norm_eps\":1e-05,\"rope_theta\":1000000.0,"
    "\"router_aux_loss_coef\":0.02,\"sliding_window\":null,\"tie_word_embeddings\":false,"
    "\"vocab_size\":32000}";
static const char gpt2[] =
    "{\"activation_function\":\"gelu_new\",\"architectures\":[\"GPT2LMHeadModel\"],\"attn_pdrop\":"
    "0.1,\"bos_token_id\":50256,\"eos_token_id\":50256,\"layer_norm_epsilon\":1e-05,\"n_ctx\":1024,"
    "\"n_embd\":768,\"n_head\":12,\"n_layer\":12,\"n_positions\":1024,\"vocab_size\":50257}";

static void model_put(const char *name, const void *p, size_t n)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", model_dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* Loads base with the keys of `changes` replaced; the value "absent" removes a key. */
static bt_status_t model_load(const char *base, const char *changes, struct bt_model_config *c)
{
    json_t *o = json_loads(base, 0, NULL), *with = json_loads(changes, 0, NULL), *v;
    const char *key;
    if (!o || !with) {
        fail_msg("not JSON: %s", o ? changes : base);
    }
    json_object_foreach(with, key, v)
    {
        if (json_is_string(v) && strcmp(json_string_value(v), "absent") == 0) {
            json_object_del(o, key);
        } else {
            json_object_set(o, key, v);
        }
    }
    char *text = json_dumps(o, 0);
    model_put("config.json", text, strlen(text));
    free(text);
    json_decref(o);
    json_decref(with);
    model_err[0] = 0;
    return bt_model_config_load(model_dir, c, model_err, sizeof(model_err));
}

static int model_setup(void **state)
{
    (void)state;
    strcpy(model_dir, "/tmp/baton-test-kinds-XXXXXX");
    return mkdtemp(model_dir) ? 0 : -1;
}

static int model_teardown(void **state)
{
    (void)state;
    static const char *const names[] = {"config.json", "model.safetensors"};
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        char path[256];
        snprintf(path, sizeof(path), "%s/%s", model_dir, names[i]);
        unlink(path);
    }
    return rmdir(model_dir);
}

#endif
