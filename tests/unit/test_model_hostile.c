/* config.json of models with latents and experts, with values that no tool writes: what is refused,
 * and that the largest accepted values overflow nothing. */
#include <math.h>

#include "tests/unit/model_dir.h"

static const struct {
    const char *from, *to, *what; /* in the text of V3's config.json */
} cases[] = {
    {"\"n_group\":8", "\"n_group\":8,\"n_group\":4", "duplicate"},
    {"\"kv_lora_rank\":512", "\"kv_lora_rank\":512,\"kv_lora_rank\":512", "duplicate"},
    {"\"factor\":40", "\"factor\":1e999", "JSON"},
    {"\"factor\":40", "\"factor\":NaN", "JSON"},
    {"\"factor\":40", "\"factor\":-40", "factor"},
    {"\"mscale\":1.0", "\"mscale\":1e300", "mscale"},
    {"\"n_routed_experts\":256", "\"n_routed_experts\":99999999999999999999", "JSON"},
    {"\"n_routed_experts\":256", "\"n_routed_experts\":4294967552", "n_routed_experts"},
    {"\"n_routed_experts\":256", "\"n_routed_experts\":0", "n_routed_experts"},
    {"\"n_routed_experts\":256", "\"n_routed_experts\":-256", "n_routed_experts"},
    {"\"n_routed_experts\":256", "\"n_routed_experts\":2.56e2", "n_routed_experts"},
    {"\"num_experts_per_tok\":8", "\"num_experts_per_tok\":0", "num_experts_per_tok"},
    {"\"n_shared_experts\":1", "\"n_shared_experts\":65", "n_shared_experts"},
    {"\"moe_intermediate_size\":2048", "\"moe_intermediate_size\":4194312", "moe_inter"},
    {"\"hidden_size\":7168", "\"hidden_size\":18446744073709558784", "JSON"},
    {"\"num_hidden_layers\":61", "\"num_hidden_layers\":1025", "num_hidden_layers"},
    {"\"kv_lora_rank\":512", "\"kv_lora_rank\":8208", "kv_lora_rank"},
    {"\"v_head_dim\":128", "\"v_head_dim\":-128", "v_head_dim"},
    {"\"qk_nope_head_dim\":128", "\"qk_nope_head_dim\":256", "up to 256"},
    {"\"routed_scaling_factor\":2.5", "\"routed_scaling_factor\":-2.5", "routed_scaling"},
};

static void test_text(void **state)
{
    (void)state;
    struct bt_model_config c;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        const char *at = strstr(deepseek_v3, cases[i].from);
        assert_non_null(at);
        char text[4096];
        snprintf(text, sizeof(text), "%.*s%s%s", (int)(at - deepseek_v3), deepseek_v3, cases[i].to,
                 at + strlen(cases[i].from));
        model_put("config.json", text, strlen(text));
        model_err[0] = 0;
        bt_status_t st = bt_model_config_load(model_dir, &c, model_err, sizeof(model_err));
        if ((st != BT_ERR_INVALID && st != BT_ERR_UNSUPPORTED) ||
            !strstr(model_err, "config.json") || !strstr(model_err, cases[i].what)) {
            fail_msg("%s: status %s, expected \"%s\": %s", cases[i].to, bt_status_name(st),
                     cases[i].what, model_err);
        }
    }
}

/* All limits at once: the sums of bt_model_count stay below 2^64, and there is a layout of the
 * right size or none. */
static void test_largest(void **state)
{
    (void)state;
    static const char largest[] =
        "{\"vocab_size\":16777216,\"hidden_size\":1048576,\"intermediate_size\":4194304,"
        "\"num_hidden_layers\":1024,\"num_attention_heads\":4096,\"num_key_value_heads\":4096,"
        "\"kv_lora_rank\":8192,\"q_lora_rank\":65536,\"qk_nope_head_dim\":192,\"v_head_dim\":256,"
        "\"n_routed_experts\":1024,\"moe_intermediate_size\":4194304,\"n_shared_experts\":64,"
        "\"num_experts_per_tok\":32,\"first_k_dense_replace\":0,"
        "\"max_position_embeddings\":16777216}";
    struct bt_model_config c;
    struct bt_model_size s;
    struct bt_kv_layout l;
    assert_int_equal(model_load(deepseek_v3, largest, &c), BT_OK);
    bt_model_count(&c, &s);
    double expert = 3 * 0x1p20 * 0x1p22, router = 1024 * (0x1p20 + 1), v = 4096 * 256.0;
    double q = 65536 * (0x1p20 + 1 + 4096 * 256.0);
    double up = 4096 * (192 + 256.0) * 8192, latent = 0x1p20 * (8192 + 64) + 8192;
    double layer = q + up + latent + v * 0x1p20 + router + 64 * expert + 2 * 0x1p20;
    double all = 1024 * (layer + 1024 * expert) + 2 * 0x1p24 * 0x1p20 + 0x1p20;
    assert_true(all < 0x1p64 && fabs(((double)s.weights + (double)s.embed) / all - 1) < 1e-9);
    assert_true(s.wide < s.dense + s.embed);
    for (uint64_t tokens = 1; tokens <= 1u << 20; tokens *= 16) {
        for (int fp8 = 0; fp8 < 2; fp8++) {
            uint64_t row = fp8 ? 8192 + 64 * 4 + 128 : (8192 + 64) * 2;
            bt_status_t st = bt_model_kv_layout(&c, fp8 ? "fp8" : "f16", (uint32_t)tokens, &l);
            assert_int_equal(st, row * tokens <= UINT32_MAX / 2 ? BT_OK : BT_ERR_INVALID);
            assert_true(st != BT_OK || l.block_bytes >= 1024 * row * tokens);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_largest),
    };
    return cmocka_run_group_tests(tests, model_setup, model_teardown);
}
