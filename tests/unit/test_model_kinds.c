/* config.json of models with latent attention, experts, YaRN, and of GPT-2: what is read, what is
 * refused by name, the number of parameters, the KV layout, the root key. */
#include <math.h>

#include "tests/unit/model_dir.h"

static const struct {
    const char *config;
    uint64_t parameters;  /* published, without MTP */
    uint64_t pair;        /* multiply-adds: layers x heads x (key + value) */
    uint64_t latent_pair; /* layers x heads x (latent + rope + latent) */
    uint32_t expert_layers;
} models[] = {
    {deepseek_v3, 671026419200, 61ull * 128 * (192 + 128), 61ull * 128 * 1088, 58},
    {deepseek_v2_lite, 15706484224, 27ull * 16 * (192 + 128), 27ull * 16 * 1088, 26},
    {qwen3_moe, 30532122624, 48ull * 32 * 256, 48ull * 32 * 256, 48},
    {mixtral, 46702792704, 32ull * 32 * 256, 32ull * 32 * 256, 32},
    {gpt2, 124439808, 12ull * 12 * 128, 12ull * 12 * 128, 0},
};

static void test_count(void **state)
{
    (void)state;
    struct bt_model_config c;
    struct bt_model_size s;
    for (size_t i = 0; i < BT_ARRAY_LEN(models); i++) {
        assert_int_equal(model_load(models[i].config, "{}", &c), BT_OK);
        bt_model_count(&c, &s);
        assert_int_equal(s.weights + s.embed, models[i].parameters);
        assert_int_equal(s.pair, models[i].pair);
        assert_int_equal(s.latent_pair, models[i].latent_pair);
        assert_int_equal(s.expert_layers, models[i].expert_layers);
        assert_int_equal(s.weights, s.dense + (uint64_t)c.experts.n * s.expert * s.expert_layers);
    }
    /* 37 billion parameters of V3 work on a token; its embedding is only looked up */
    assert_int_equal(model_load(deepseek_v3, "{}", &c), BT_OK);
    bt_model_count(&c, &s);
    uint64_t used = s.dense + s.expert * c.experts.used * s.expert_layers;
    assert_in_range(used, 36000000000, 37600000000);
    assert_int_equal(s.embed, 129280ull * 7168);
}

static void test_deepseek(void **state)
{
    (void)state;
    struct bt_model_config c;
    assert_int_equal(model_load(deepseek_v3, "{}", &c), BT_OK);
    assert_int_equal(c.mla.kv_rank, 512);
    assert_int_equal(c.mla.q_rank, 1536);
    assert_int_equal(c.mla.nope, 128);
    assert_int_equal(c.mla.rope, 64);
    assert_int_equal(c.mla.v, 128);
    assert_int_equal(c.head_dim, 192);
    assert_int_equal(bt_model_rope_dim(&c), 64);
    assert_int_equal(c.n_mtp, 1);
    assert_true(c.rope_pairs && !c.gpt2 && !c.qkv_bias && !c.qk_norm);
    const struct bt_model_experts *e = &c.experts;
    assert_int_equal(e->n, 256);
    assert_int_equal(e->used, 8);
    assert_int_equal(e->intermediate, 2048);
    assert_int_equal(e->shared, 2048);
    assert_int_equal(e->groups, 8);
    assert_int_equal(e->groups_used, 4);
    assert_int_equal(e->group_best, 2);
    assert_int_equal(e->router, BT_ROUTER_SIGMOID);
    assert_true(e->bias && e->normalise && e->scale == 2.5f);
    assert_true(!bt_model_has_experts(&c, 2) && bt_model_has_experts(&c, 3));
    assert_true(bt_model_has_experts(&c, 60));

    /* Kimi K2: no groups; transformers' spelling of head_dim */
    assert_int_equal(model_load(deepseek_v3,
                                "{\"n_group\":1,\"topk_group\":1,\"head_dim\":64,"
                                "\"rope_interleave\":false,\"num_nextn_predict_layers\":0,"
                                "\"scoring_func\":\"absent\",\"topk_method\":\"absent\"}",
                                &c),
                     BT_OK);
    assert_int_equal(c.experts.groups, 1);
    assert_false(c.rope_pairs);
    assert_int_equal(c.n_mtp, 0);
    assert_int_equal(bt_model_take_mtp(&c, model_dir, model_err, sizeof(model_err)),
                     BT_ERR_UNSUPPORTED);
    assert_non_null(strstr(model_err, "set model.mtp to false"));
    assert_int_equal(model_load(deepseek_v3, "{\"n_group\":null,\"topk_group\":null}", &c), BT_OK);
    assert_int_equal(c.experts.groups, 1);

    assert_int_equal(model_load(deepseek_v2_lite, "{}", &c), BT_OK);
    assert_int_equal(c.mla.q_rank, 0);
    assert_int_equal(c.experts.shared, 2 * 1408);
    assert_int_equal(c.experts.router, BT_ROUTER_SOFTMAX);
    assert_true(c.rope_pairs && !c.experts.bias && !c.experts.normalise);
    assert_true(c.experts.scale == 1.0f && c.experts.groups == 1);
    assert_int_equal(model_load(deepseek_v2_lite,
                                "{\"topk_method\":\"group_limited_greedy\",\"n_group\":8,"
                                "\"topk_group\":3,\"routed_scaling_factor\":16.0}",
                                &c),
                     BT_OK);
    assert_int_equal(c.experts.groups, 8);
    assert_int_equal(c.experts.groups_used, 3);
    assert_int_equal(c.experts.group_best, 1);
    assert_true(c.experts.scale == 16.0f);
    /* greedy: groups have no effect */
    assert_int_equal(model_load(deepseek_v2_lite, "{\"n_group\":8,\"topk_group\":3}", &c), BT_OK);
    assert_int_equal(c.experts.groups, 1);
}

static void test_qwen_and_mixtral(void **state)
{
    (void)state;
    struct bt_model_config c;
    assert_int_equal(model_load(qwen3_moe, "{}", &c), BT_OK);
    assert_true(c.qk_norm && !c.qkv_bias && !c.rope_pairs && c.experts.normalise);
    assert_int_equal(c.experts.n, 128);
    assert_int_equal(c.experts.intermediate, 768);
    assert_int_equal(c.intermediate, 6144);
    assert_true(c.attn_scale == 1.0f / sqrtf(128) && c.rope_scale == 1.0f);
    assert_int_equal(
        model_load(qwen3_moe, "{\"decoder_sparse_step\":2,\"mlp_only_layers\":[1,4]}", &c), BT_OK);
    assert_true(!bt_model_has_experts(&c, 0) && !bt_model_has_experts(&c, 1));
    assert_true(!bt_model_has_experts(&c, 2) && bt_model_has_experts(&c, 3));
    assert_true(!bt_model_has_experts(&c, 4) && bt_model_has_experts(&c, 47));
    assert_int_equal(model_load(qwen3_moe, "{\"norm_topk_prob\":false}", &c), BT_OK);
    assert_false(c.experts.normalise);
    assert_int_equal(
        model_load(qwen3_moe, "{\"num_experts\":\"absent\",\"num_local_experts\":64}", &c), BT_OK);
    assert_int_equal(c.experts.n, 64);

    assert_int_equal(model_load(mixtral, "{}", &c), BT_OK);
    assert_true(c.experts.normalise && c.experts.router == BT_ROUTER_SOFTMAX);
    assert_int_equal(c.experts.n, 8);
    assert_int_equal(c.experts.used, 2);
    assert_int_equal(c.experts.intermediate, 14336);
    assert_int_equal(c.experts.shared, 0);
    assert_int_equal(c.window, 0);
    assert_int_equal(model_load(mixtral, "{\"sliding_window\":4096}", &c), BT_OK);
    assert_int_equal(c.window, 4096);
}

static void test_gpt2(void **state)
{
    (void)state;
    struct bt_model_config c;
    assert_int_equal(model_load(gpt2, "{}", &c), BT_OK);
    assert_true(c.gpt2 && c.qkv_bias && c.tie_embeddings);
    assert_int_equal(c.intermediate, 3072);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.kv_heads, 12);
    assert_int_equal(c.max_model_len, 1024);
    assert_string_equal(c.rope_text, "none");
    assert_true(c.norm_eps == 1e-5f && c.attn_scale == 0.125f);
    assert_int_equal(model_load(gpt2,
                                "{\"n_inner\":1024,\"tie_word_embeddings\":false,"
                                "\"activation_function\":\"gelu_pytorch_tanh\","
                                "\"scale_attn_weights\":true,\"reorder_and_upcast_attn\":true,"
                                "\"add_cross_attention\":false}",
                                &c),
                     BT_OK);
    assert_int_equal(c.intermediate, 1024);
    assert_false(c.tie_embeddings);
}

/* Frequencies at some indices, computed with another program from the paper's formulas. */
static void test_yarn(void **state)
{
    (void)state;
#define QWEN_YARN                                                                                  \
    "{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,"                                    \
    "\"original_max_position_embeddings\":32768}}"
    static const struct {
        const char *base, *changes;
        double scale, attn;
        struct {
            uint32_t i;
            double f;
        } at[6];
    } cases[] = {
        {deepseek_v3,
         "{}",
         1,
         0.1352337788608801,
         {{1, 0.749894209},
          {10, 0.0562341325},
          {11, 0.0390069266},
          {15, 0.00833450895},
          {23, 3.33380358e-05},
          {31, 3.33380358e-06}}},
        {deepseek_v3, /* both borders are the same: Kimi K2 */
         "{\"rope_theta\":50000.0,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":32,\"beta_fast\":"
         "1,"
         "\"beta_slow\":1,\"original_max_position_embeddings\":4096,\"mscale\":1.0,"
         "\"mscale_all_dim\":1.0}}",
         1,
         0.13086079996,
         {{1, 0.713111085},
          {8, 0.0668740305},
          {15, 0.00627130338},
          {20, 3.61404677e-05},
          {23, 1.31058542e-05},
          {31, 8.76441291e-07}}},
        {deepseek_v3,
         "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"truncate\":false,\"mscale\":0.5,"
         "\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":4096}}",
         0.865259992007406,
         0.1352337788608801,
         {{10, 0.0562341325},
          {11, 0.0403675845},
          {15, 0.00844623531},
          {20, 0.000722638342},
          {21, 0.000349887443},
          {23, 3.33380358e-05}}},
        {deepseek_v2_lite, "{}", 1, 0.11472138679292612, {{0, 1}, {20, 0.000790569415}}},
        {qwen3_moe,
         QWEN_YARN,
         1.138629436111989,
         0.08838834764831845,
         {{1, 0.805842188},
          {23, 0.00697830585},
          {24, 0.00537532149},
          {28, 0.00184827656},
          {37, 0.000129931495},
          {63, 3.1023444e-07}}},
        {qwen3_moe,
         "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"attention_factor\":0.75,"
         "\"original_max_position_embeddings\":32768}}",
         0.75,
         0.08838834764831845,
         {{28, 0.00184827656}}},
        /* the original length is max_position_embeddings */
        {qwen3_moe,
         "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4},\"max_position_embeddings\":32768}",
         1.138629436111989,
         0.08838834764831845,
         {{28, 0.00184827656}}},
    };
    struct bt_model_config c;
    float f[128];
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        assert_int_equal(model_load(cases[i].base, cases[i].changes, &c), BT_OK);
        assert_int_equal(c.rope_kind, BT_ROPE_YARN);
        assert_true(fabs(c.rope_scale / cases[i].scale - 1) < 1e-6);
        assert_true(fabs(c.attn_scale / cases[i].attn - 1) < 1e-6);
        bt_model_rope_inv_freq(&c, f);
        for (int k = 0; k < 6 && cases[i].at[k].f != 0; k++) {
            if (!(fabs(f[cases[i].at[k].i] / cases[i].at[k].f - 1) < 2e-6)) {
                fail_msg("case %zu, frequency %u: %.9g, expected %.9g", i, cases[i].at[k].i,
                         (double)f[cases[i].at[k].i], cases[i].at[k].f);
            }
        }
    }
}

static void test_refused(void **state)
{
    (void)state;
#define YARN(MORE)                                                                                 \
    "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,"                                         \
    "\"original_max_position_embeddings\":4096," MORE "}}"
    static const struct {
        const char *base, *changes;
        bt_status_t status;
        const char *what;
    } cases[] = {
        /* latent attention */
        {deepseek_v3, "{\"kv_lora_rank\":\"absent\"}", BT_ERR_INVALID, "kv_lora_rank: missing"},
        {deepseek_v3, "{\"kv_lora_rank\":0}", BT_ERR_INVALID, "kv_lora_rank"},
        {deepseek_v3, "{\"kv_lora_rank\":500}", BT_ERR_UNSUPPORTED, "multiples of 16"},
        {deepseek_v3, "{\"q_lora_rank\":\"x\"}", BT_ERR_INVALID, "q_lora_rank"},
        {deepseek_v3, "{\"q_lora_rank\":12}", BT_ERR_UNSUPPORTED, "q_lora_rank"},
        {deepseek_v3, "{\"qk_nope_head_dim\":\"absent\"}", BT_ERR_INVALID, "qk_nope_head_dim"},
        {deepseek_v3, "{\"qk_nope_head_dim\":208}", BT_ERR_UNSUPPORTED, "qk_nope_head_dim"},
        {deepseek_v3, "{\"qk_rope_head_dim\":31}", BT_ERR_UNSUPPORTED, "qk_rope_head_dim"},
        {deepseek_v3, "{\"v_head_dim\":\"absent\"}", BT_ERR_INVALID, "v_head_dim"},
        {deepseek_v3, "{\"v_head_dim\":512}", BT_ERR_INVALID, "v_head_dim"},
        {deepseek_v3, "{\"head_dim\":128}", BT_ERR_UNSUPPORTED, "qk_rope_head_dim, 64"},
        {deepseek_v3, "{\"qk_head_dim\":128}", BT_ERR_UNSUPPORTED, "qk_head_dim"},
        {deepseek_v3, "{\"num_key_value_heads\":8}", BT_ERR_UNSUPPORTED, "num_attention_heads"},
        {deepseek_v3, "{\"rope_interleave\":1}", BT_ERR_INVALID, "rope_interleave"},
        {deepseek_v3, "{\"attention_bias\":true}", BT_ERR_UNSUPPORTED, "attention_bias"},
        {deepseek_v3, "{\"num_nextn_predict_layers\":-1}", BT_ERR_INVALID, "num_nextn"},
        {deepseek_v3, "{\"quantization_config\":{\"quant_method\":\"awq\"}}", BT_ERR_UNSUPPORTED,
         "quantization_config"},
        {deepseek_v3, "{\"sliding_window\":4096}", BT_ERR_UNSUPPORTED, "sliding_window"},
        {deepseek_v2_lite, "{\"rope_interleave\":false}", BT_ERR_UNSUPPORTED, "rope_interleave"},
        /* DeepSeek's experts */
        {deepseek_v3, "{\"n_routed_experts\":\"absent\"}", BT_ERR_INVALID, "n_routed_experts"},
        {deepseek_v3, "{\"n_routed_experts\":1025}", BT_ERR_INVALID, "1024"},
        {deepseek_v3, "{\"num_experts\":64}", BT_ERR_UNSUPPORTED, "num_experts"},
        {deepseek_v3, "{\"moe_intermediate_size\":100}", BT_ERR_UNSUPPORTED, "multiple of 8"},
        {deepseek_v3, "{\"n_shared_experts\":\"absent\"}", BT_ERR_INVALID, "n_shared_experts"},
        {deepseek_v3, "{\"n_shared_experts\":1.5}", BT_ERR_INVALID, "n_shared_experts"},
        {deepseek_v3, "{\"num_experts_per_tok\":33}", BT_ERR_INVALID, "num_experts_per_tok"},
        {deepseek_v3, "{\"n_routed_experts\":16,\"topk_group\":2}", BT_ERR_INVALID,
         "from 4 experts"},
        {deepseek_v3, "{\"n_group\":\"absent\"}", BT_ERR_INVALID, "n_group: missing"},
        {deepseek_v3, "{\"n_group\":7,\"topk_group\":2}", BT_ERR_INVALID, "does not divide"},
        {deepseek_v3, "{\"n_group\":256}", BT_ERR_UNSUPPORTED, "at least 2"},
        {deepseek_v3, "{\"topk_group\":9}", BT_ERR_INVALID, "topk_group"},
        {deepseek_v3, "{\"topk_group\":\"absent\"}", BT_ERR_INVALID, "topk_group: missing"},
        {deepseek_v3, "{\"norm_topk_prob\":\"absent\"}", BT_ERR_INVALID, "norm_topk_prob"},
        {deepseek_v3, "{\"routed_scaling_factor\":\"absent\"}", BT_ERR_INVALID, "routed_scaling"},
        {deepseek_v3, "{\"routed_scaling_factor\":0}", BT_ERR_INVALID, "routed_scaling_factor"},
        {deepseek_v3, "{\"first_k_dense_replace\":62}", BT_ERR_INVALID, "first_k_dense_replace"},
        {deepseek_v3, "{\"moe_layer_freq\":2}", BT_ERR_UNSUPPORTED, "moe_layer_freq"},
        {deepseek_v3, "{\"scoring_func\":\"softmax\"}", BT_ERR_UNSUPPORTED, "sigmoid"},
        {deepseek_v3, "{\"topk_method\":\"greedy\"}", BT_ERR_UNSUPPORTED, "noaux_tc"},
        {deepseek_v3, "{\"mlp_layer_types\":[\"sparse\"]}", BT_ERR_INVALID, "mlp_layer_types"},
        {deepseek_v2_lite, "{\"scoring_func\":\"sigmoid\"}", BT_ERR_UNSUPPORTED, "softmax"},
        {deepseek_v2_lite, "{\"topk_method\":\"noaux_tc\"}", BT_ERR_UNSUPPORTED,
         "group_limited_greedy"},
        {deepseek_v2_lite, "{\"topk_method\":\"absent\",\"n_group\":8}", BT_ERR_UNSUPPORTED,
         "topk_method"},
        {deepseek_v2_lite, "{\"norm_topk_prob\":true,\"routed_scaling_factor\":16}",
         BT_ERR_UNSUPPORTED, "routed_scaling_factor"},
        {deepseek_v2_lite, "{\"rms_norm_eps\":\"absent\"}", BT_ERR_INVALID, "rms_norm_eps"},
        /* the other experts */
        {qwen3_moe, "{\"num_experts\":0}", BT_ERR_INVALID, "num_experts"},
        {qwen3_moe, "{\"num_experts\":\"absent\"}", BT_ERR_INVALID, "num_experts: missing"},
        {qwen3_moe, "{\"num_local_experts\":64}", BT_ERR_INVALID, "num_local_experts"},
        {qwen3_moe, "{\"num_experts\":4}", BT_ERR_INVALID, "num_experts_per_tok"},
        {qwen3_moe, "{\"norm_topk_prob\":\"absent\"}", BT_ERR_INVALID, "norm_topk_prob"},
        {qwen3_moe, "{\"decoder_sparse_step\":0}", BT_ERR_INVALID, "decoder_sparse_step"},
        {qwen3_moe, "{\"mlp_only_layers\":[48]}", BT_ERR_INVALID, "mlp_only_layers"},
        {qwen3_moe, "{\"mlp_only_layers\":3}", BT_ERR_INVALID, "mlp_only_layers"},
        {qwen3_moe, "{\"moe_intermediate_size\":\"absent\"}", BT_ERR_INVALID, "moe_intermediate"},
        {qwen3_moe, "{\"shared_expert_intermediate_size\":512}", BT_ERR_UNSUPPORTED,
         "shared_expert"},
        {qwen3_moe, "{\"n_routed_experts\":64}", BT_ERR_UNSUPPORTED, "n_routed_experts"},
        {qwen3_moe, "{\"kv_lora_rank\":512}", BT_ERR_UNSUPPORTED, "kv_lora_rank"},
        {qwen3_moe, "{\"rope_interleave\":true}", BT_ERR_UNSUPPORTED, "rope_interleave"},
        {qwen3_moe, "{\"use_sliding_window\":true,\"sliding_window\":4096}", BT_ERR_UNSUPPORTED,
         "use_sliding_window"},
        {mixtral, "{\"num_local_experts\":\"absent\"}", BT_ERR_INVALID, "num_local_experts"},
        {mixtral, "{\"rope_theta\":\"absent\"}", BT_ERR_INVALID, "rope_theta: missing"},
        {mixtral, "{\"num_key_value_heads\":\"absent\"}", BT_ERR_INVALID, "num_key_value_heads"},
        {mixtral, "{\"hidden_act\":\"gelu\"}", BT_ERR_UNSUPPORTED, "hidden_act"},
        /* YaRN */
        {mixtral, "{\"rope_scaling\":{\"type\":\"yarn\"}}", BT_ERR_INVALID, "factor: missing"},
        {mixtral, YARN("\"beta_fast\":1,\"beta_slow\":2"), BT_ERR_INVALID, "beta_fast"},
        {mixtral, YARN("\"beta_slow\":0"), BT_ERR_INVALID, "beta_slow"},
        {mixtral, YARN("\"truncate\":1"), BT_ERR_INVALID, "truncate"},
        {mixtral, YARN("\"attention_factor\":-1"), BT_ERR_INVALID, "attention_factor"},
        {mixtral, YARN("\"mscale\":0.7"), BT_ERR_UNSUPPORTED, "mscale: is not supported alone"},
        {deepseek_v3, YARN("\"mscale_all_dim\":0.7"), BT_ERR_UNSUPPORTED, "mscale_all_dim"},
        {mixtral, YARN("\"attn_factor\":0.7"), BT_ERR_UNSUPPORTED, "attn_factor"},
        {mixtral, YARN("\"rope_theta\":1"), BT_ERR_INVALID, "above 1"},
        {mixtral, "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":2,\"mscale\":1}}",
         BT_ERR_UNSUPPORTED, "mscale"},
        /* GPT-2 */
        {gpt2, "{\"n_embd\":\"absent\"}", BT_ERR_INVALID, "n_embd: missing"},
        {gpt2, "{\"n_head\":7}", BT_ERR_INVALID, "n_head"},
        {gpt2, "{\"n_layer\":0}", BT_ERR_INVALID, "n_layer"},
        {gpt2, "{\"n_positions\":\"absent\"}", BT_ERR_INVALID, "n_positions"},
        {gpt2, "{\"n_inner\":-1}", BT_ERR_INVALID, "n_inner"},
        {gpt2, "{\"activation_function\":\"gelu\"}", BT_ERR_UNSUPPORTED, "gelu_new"},
        {gpt2, "{\"scale_attn_weights\":false}", BT_ERR_UNSUPPORTED, "scale_attn_weights"},
        {gpt2, "{\"scale_attn_by_inverse_layer_idx\":true}", BT_ERR_UNSUPPORTED,
         "scale_attn_by_inverse_layer_idx"},
        {gpt2, "{\"add_cross_attention\":true}", BT_ERR_UNSUPPORTED, "add_cross_attention"},
        {gpt2, "{\"rope_scaling\":{\"type\":\"linear\"}}", BT_ERR_UNSUPPORTED, "rope_scaling"},
        {gpt2, "{\"pruned_heads\":{\"0\":[1]}}", BT_ERR_UNSUPPORTED, "pruned_heads"},
        {gpt2, "{\"num_experts\":8}", BT_ERR_UNSUPPORTED, "num_experts"},
    };
    struct bt_model_config c;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        bt_status_t st = model_load(cases[i].base, cases[i].changes, &c);
        if (st != cases[i].status || !strstr(model_err, "config.json") ||
            !strstr(model_err, cases[i].what)) {
            fail_msg("%s: status %s, expected %s with \"%s\": %s", cases[i].changes,
                     bt_status_name(st), bt_status_name(cases[i].status), cases[i].what, model_err);
        }
    }
}

static void test_layout(void **state)
{
    (void)state;
    struct bt_model_config c;
    struct bt_kv_layout l;
    assert_int_equal(model_load(deepseek_v3, "{}", &c), BT_OK);
    assert_int_equal(bt_model_kv_layout(&c, NULL, 64, &l), BT_OK);
    assert_int_equal(l.n_layers, 61);
    assert_int_equal(l.block_bytes, 1152ull * 64 * 61); /* bytes of a token and layer */
    assert_int_equal(l.groups[0].kind, BT_KV_MLA);
    assert_int_equal(bt_kv_row_bytes(&l.groups[0]), 1152);
    assert_int_equal(bt_kv_planes(&l.groups[0]), 1);
    assert_int_equal(bt_model_kv_layout(&c, "fp8", 64, &l), BT_OK);
    assert_int_equal(l.block_bytes, 656ull * 64 * 61);
    assert_int_equal(bt_model_kv_layout(&c, "fp4", 64, &l), BT_ERR_INVALID);
    assert_int_equal(model_load(gpt2, "{}", &c), BT_OK);
    assert_int_equal(bt_model_kv_layout(&c, NULL, 64, &l), BT_OK);
    assert_int_equal(l.block_bytes, 12ull * 64 * 12 * 64 * 2 * 2);
}

/* model.mtp: one layer more of weights and KV; the published numbers stay as they are. */
static void test_mtp(void **state)
{
    (void)state;
    struct bt_model_config c;
    struct bt_model_size before, s;
    struct bt_kv_layout l, with;
    struct bt_kv_key a, b;
    assert_int_equal(model_load(deepseek_v3, "{}", &c), BT_OK);
    bt_model_count(&c, &before);
    assert_int_equal(before.mtp, 0);
    assert_int_equal(bt_model_kv_layers(&c), 61);
    assert_int_equal(bt_model_take_mtp(&c, model_dir, model_err, sizeof(model_err)), BT_OK);
    assert_true(bt_model_has_experts(&c, 61));
    assert_int_equal(bt_model_kv_layout(&c, NULL, 64, &l), BT_OK);
    assert_int_equal(l.n_layers, 62);
    bt_model_count(&c, &s);
    assert_int_equal(s.weights, before.weights);
    assert_true(s.mtp > 11400000000 && s.mtp < 11700000000); /* 11.5 B by DeepSeek */
    struct bt_model_settings set = {.load_format = "dummy", .block_tokens = 64};
    assert_int_equal(bt_model_root_key(model_dir, &set, &l, &a, model_err, sizeof(model_err)),
                     BT_OK);
    set.mtp = true;
    assert_int_equal(bt_model_root_key(model_dir, &set, &with, &b, model_err, sizeof(model_err)),
                     BT_OK);
    assert_true(with.layout_id != l.layout_id && memcmp(&a, &b, sizeof(a)) != 0);
    assert_int_equal(model_load(gpt2, "{}", &c), BT_OK);
    assert_int_equal(bt_model_root_key(model_dir, &set, &with, &b, model_err, sizeof(model_err)),
                     BT_ERR_UNSUPPORTED);
}

/* Everything that changes KV changes the root key, and nothing else does. */
static void test_root_key(void **state)
{
    (void)state;
    static const struct {
        const char *base, *changes;
        bool same;
    } cases[] = {
        {deepseek_v3, "{\"num_experts_per_tok\":7}", false},
        {deepseek_v3, "{\"routed_scaling_factor\":2.4}", false},
        {deepseek_v3, "{\"norm_topk_prob\":false}", false},
        {deepseek_v3, "{\"topk_group\":3}", false},
        {deepseek_v3, "{\"n_group\":4}", false},
        {deepseek_v3, "{\"rope_interleave\":false}", false},
        {deepseek_v3, "{\"first_k_dense_replace\":4}", false},
        {deepseek_v3, "{\"q_lora_rank\":null}", false},
        {deepseek_v3,
         "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"mscale\":0.9,\"mscale_all_dim\":0.9,"
         "\"original_max_position_embeddings\":4096}}",
         false},
        {deepseek_v3,
         "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"truncate\":false,\"mscale\":1,"
         "\"mscale_all_dim\":1,\"original_max_position_embeddings\":4096}}",
         false},
        {deepseek_v3, "{\"num_nextn_predict_layers\":0,\"aux_loss_alpha\":0.5,\"ep_size\":8}",
         true},
        {qwen3_moe, "{\"norm_topk_prob\":false}", false},
        {qwen3_moe, "{\"mlp_only_layers\":[7]}", false},
        {mixtral, "{\"router_aux_loss_coef\":0.5}", true},
        {gpt2, "{\"n_inner\":1024}", false},
        {gpt2, "{\"n_inner\":3072,\"attn_pdrop\":0}", true},
    };
    struct bt_model_config c;
    struct bt_kv_layout l;
    struct bt_kv_key a, b;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        assert_int_equal(model_load(cases[i].base, "{}", &c), BT_OK);
        assert_int_equal(bt_model_root_key(model_dir,
                                           &(struct bt_model_settings){.load_format = "dummy",
                                                                       .block_tokens = 64},
                                           &l, &a, model_err, sizeof(model_err)),
                         BT_OK);
        assert_int_equal(model_load(cases[i].base, cases[i].changes, &c), BT_OK);
        assert_int_equal(bt_model_root_key(model_dir,
                                           &(struct bt_model_settings){.load_format = "dummy",
                                                                       .block_tokens = 64},
                                           &l, &b, model_err, sizeof(model_err)),
                         BT_OK);
        if ((memcmp(&a, &b, sizeof(a)) == 0) != cases[i].same) {
            fail_msg("%s: the root key %s", cases[i].changes,
                     cases[i].same ? "changed" : "stayed the same");
        }
    }
    assert_int_equal(model_load(deepseek_v3, "{}", &c), BT_OK);
    assert_int_equal(bt_model_root_key(model_dir,
                                       &(struct bt_model_settings){.load_format = "dummy",
                                                                   .kv_dtype = "f16",
                                                                   .block_tokens = 64},
                                       &l, &a, model_err, sizeof(model_err)),
                     BT_OK);
    assert_int_equal(bt_model_root_key(model_dir,
                                       &(struct bt_model_settings){.load_format = "dummy",
                                                                   .kv_dtype = "fp8",
                                                                   .block_tokens = 64},
                                       &l, &b, model_err, sizeof(model_err)),
                     BT_OK);
    assert_memory_not_equal(&a, &b, sizeof(a));
}

/* deploy/shapes: what `baton-sim size` and docs/MODELS.md count from. */
static void test_shapes(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        uint64_t parameters; /* published, without MTP */
    } shapes[] = {
        {"Llama-3.1-8B", 8030261248},   {"Llama-3.1-70B", 70553706496},
        {"Qwen3-8B", 8190735360},       {"Qwen3-32B", 32762123264},
        {"Qwen3-30B-A3B", 30532122624}, {"Qwen3-235B-A22B", 235093634560},
        {"Mixtral-8x7B", 46702792704},  {"DeepSeek-V2-Lite", 15706484224},
        {"DeepSeek-V2", 235741434880},  {"DeepSeek-V3", 671026419200},
        {"Kimi-K2", 1026408232448},     {"GPT-2", 124439808},
    };
    struct bt_model_config c;
    struct bt_model_size s;
    for (size_t i = 0; i < BT_ARRAY_LEN(shapes); i++) {
        char dir[128];
        snprintf(dir, sizeof(dir), "deploy/shapes/%s", shapes[i].name);
        assert_int_equal(bt_model_config_load(dir, &c, model_err, sizeof(model_err)), BT_OK);
        bt_model_count(&c, &s);
        if (s.weights + s.embed != shapes[i].parameters) {
            fail_msg("%s: %llu parameters, published are %llu", shapes[i].name,
                     (unsigned long long)(s.weights + s.embed),
                     (unsigned long long)shapes[i].parameters);
        }
        assert_true(s.wide >= 2 * s.embed - (c.gpt2 ? s.embed : 0) && s.wide < s.weights);
    }
    /* Mixtral: embedding, head, a norm of the end, and of each layer two norms and a router. */
    assert_int_equal(model_load(mixtral, "{}", &c), BT_OK);
    bt_model_count(&c, &s);
    assert_int_equal(s.wide, 2ull * 32000 * 4096 + 65 * 4096 + 32 * 8 * 4096);
}

/* KV on SSDs stays valid only if the text of dense models never changes. */
static void test_text_stays(void **state)
{
    (void)state;
    static const char llama[] =
        "{\"architectures\":[\"LlamaForCausalLM\"],\"vocab_size\":100,\"hidden_size\":64,"
        "\"intermediate_size\":128,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
        "\"max_position_embeddings\":512}";
    static const struct {
        const char *changes, *text;
    } cases[] = {
        {"{}", "kind=0 theta=10000 dim=16 factor=0 low=0 high=0 len=0"},
        {"{\"rope_theta\":500000.5}", "kind=0 theta=500000.5 dim=16 factor=0 low=0 high=0 len=0"},
        {"{\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.5}}",
         "kind=1 theta=10000 dim=16 factor=2.5 low=0 high=0 len=0"},
        {"{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,"
         "\"high_freq_factor\":4,\"original_max_position_embeddings\":8192},\"head_dim\":64}",
         "kind=2 theta=10000 dim=64 factor=8 low=1 high=4 len=8192"},
    };
    struct bt_model_config c;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        assert_int_equal(model_load(llama, cases[i].changes, &c), BT_OK);
        assert_string_equal(c.rope_text, cases[i].text);
        assert_true(c.attn_scale == 1.0f / sqrtf((float)c.head_dim) && c.rope_scale == 1.0f);
    }
    static const uint8_t want[32] = {0x18, 0x21, 0x01, 0x72, 0x0d, 0x76, 0xb3, 0x2f,
                                     0xce, 0xf9, 0xed, 0x5c, 0x6c, 0x4a, 0xb7, 0x7d,
                                     0xaf, 0x0a, 0x5a, 0x1e, 0xf3, 0xd8, 0x53, 0x61,
                                     0x5f, 0xbf, 0x9c, 0x12, 0xa2, 0xfc, 0x17, 0xdf};
    uint8_t digest[32];
    assert_int_equal(model_load(llama, "{}", &c), BT_OK);
    assert_int_equal(
        bt_model_weights_digest(model_dir, "dummy", digest, model_err, sizeof(model_err)), BT_OK);
    assert_memory_equal(digest, want, 32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_count),      cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_deepseek),   cmocka_unit_test(test_qwen_and_mixtral),
        cmocka_unit_test(test_gpt2),       cmocka_unit_test(test_yarn),
        cmocka_unit_test(test_refused),    cmocka_unit_test(test_layout),
        cmocka_unit_test(test_mtp),        cmocka_unit_test(test_root_key),
        cmocka_unit_test(test_text_stays),
    };
    return cmocka_run_group_tests(tests, model_setup, model_teardown);
}
