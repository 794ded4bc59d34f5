/* Models that the cuda engine cannot run are refused at once, by name and remedy: also where there
 * is no GPU, so this needs none. It runs the engine's host code over tests/cuda_host. */
#include "tests/unit/model_dir.h"

#include "common/engine/engine.h"

static const struct bt_engine_vtable *vt;
static char err[1024];
static const char *kv_dtype; /* of engines to come; NULL: f16 */
static bool mtp;             /* likewise */
static bool deterministic;
static uint32_t max_rows = 64;

static int setup(void **state)
{
    vt = bt_engine_plugin(BT_ENGINE_ABI);
    return vt ? model_setup(state) : -1;
}

static uint32_t page_tokens = 64;

/* Opens the model that the directory's config.json describes. */
static bt_status_t open_dir(void)
{
    const struct bt_engine_config c = {.size = sizeof(c),
                                       .model_dir = model_dir,
                                       .load_format = "dummy",
                                       .page_tokens = page_tokens,
                                       .pages = 16,
                                       .max_slots = 4,
                                       .max_rows = max_rows,
                                       .ranks = 1,
                                       .kv_dtype = kv_dtype,
                                       .deterministic = deterministic,
                                       .mtp = mtp};
    struct bt_engine *e = NULL;
    const struct bt_engine_info *info;
    err[0] = 0;
    bt_status_t st = vt->open(&c, &e, &info, err, sizeof(err));
    if (st == BT_OK) {
        vt->close(e);
    }
    return st;
}

static bt_status_t open_shape(const char *shape)
{
    char text[1024];
    int n = snprintf(
        text, sizeof(text),
        "{\"architectures\":[\"LlamaForCausalLM\"],\"vocab_size\":100,\"num_hidden_layers\":2,"
        "\"max_position_embeddings\":512,%s}",
        shape);
    model_put("config.json", text, (size_t)n);
    return open_dir();
}

static void expect_refused(bt_status_t st, const char *what)
{
    if (st != BT_ERR_UNSUPPORTED || !strstr(err, what) || !strstr(err, model_dir) ||
        !strstr(err, "engine.device: cpu")) {
        fail_msg("%s: %s", bt_status_name(st), err);
    }
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *shape, *what;
    } cases[] = {
        {"\"hidden_size\":384,\"intermediate_size\":128,\"num_attention_heads\":4,"
         "\"num_key_value_heads\":2",
         "head_dim is 96"},
        {"\"hidden_size\":128,\"intermediate_size\":128,\"num_attention_heads\":4,"
         "\"num_key_value_heads\":2,\"head_dim\":32",
         "head_dim is 32"},
        {"\"hidden_size\":2048,\"intermediate_size\":128,\"num_attention_heads\":32,"
         "\"num_key_value_heads\":1,\"head_dim\":64",
         "32 heads over 1 KV heads"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        expect_refused(open_shape(cases[i].shape), cases[i].what);
    }
    mtp = true;
    bt_status_t st = open_dir();
    mtp = false;
    assert_int_equal(st, BT_ERR_UNSUPPORTED);
    assert_non_null(strstr(err, "set model.mtp to false in all daemons, or engine.device: cpu"));
}

#define SMALL                                                                                      \
    "\"hidden_size\":64,\"head_dim\":64,\"num_attention_heads\":2,\"num_key_value_heads\":1,"      \
    "\"num_hidden_layers\":2,\"vocab_size\":100,\"max_position_embeddings\":512,"                  \
    "\"bos_token_id\":1,\"eos_token_id\":2,"

static void test_architectures(void **state)
{
    (void)state;
    static const struct {
        const char *config, *changes, *what, *lacks;
    } cases[] = {
        {deepseek_v3, "{\"first_k_dense_replace\":61,\"kv_lora_rank\":256}", "kv_lora_rank 256",
         "latent attention for 512, 64, 128, 128"},
        {deepseek_v3, "{\"first_k_dense_replace\":61,\"qk_nope_head_dim\":64,\"qk_head_dim\":128}",
         "qk_nope_head_dim 64", "latent attention"},
        {deepseek_v3,
         "{\"first_k_dense_replace\":61,\"num_attention_heads\":192,\"num_key_value_heads\":192}",
         "192 heads", "up to 128 heads"},
        {qwen3_moe, "{" SMALL "\"hidden_size\":72,\"moe_intermediate_size\":48}",
         "128 experts of 72 x 48", "multiple of 16"},
    };
    struct bt_model_config c;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        assert_int_equal(model_load(cases[i].config, cases[i].changes, &c), BT_OK);
        expect_refused(open_dir(), cases[i].what);
        assert_non_null(strstr(err, cases[i].lacks));
    }
}

#define LATENTS                                                                                    \
    "{\"hidden_size\":128,\"intermediate_size\":128,\"num_hidden_layers\":2,"                      \
    "\"first_k_dense_replace\":2,\"q_lora_rank\":64,\"max_position_embeddings\":512,"

/* Latents in f16 and e4m3. */
static void test_latents(void **state)
{
    (void)state;
    static const char *const forms[] = {"f16", "fp8"};
    struct bt_model_config c;
    assert_int_equal(model_load(deepseek_v3,
                                LATENTS "\"vocab_size\":100,\"num_attention_heads\":2,"
                                        "\"num_key_value_heads\":2}",
                                &c),
                     BT_OK);
    for (size_t i = 0; i < BT_ARRAY_LEN(forms); i++) {
        kv_dtype = forms[i];
        bt_status_t st = open_dir();
        kv_dtype = NULL;
        if (st != BT_OK) {
            fail_msg("%s: %s", forms[i], err);
        }
    }
}

/* Random weights, as test_cuda_golden has checkpoints with few shapes. */
static void test_small(void **state)
{
    (void)state;
    static const struct {
        const char *config, *changes;
    } cases[] = {
        {qwen3_moe, "{" SMALL "\"moe_intermediate_size\":48,\"intermediate_size\":96,"
                    "\"num_experts\":6,\"num_experts_per_tok\":2,\"mlp_only_layers\":[0]}"},
        {qwen3_moe, "{" SMALL "\"moe_intermediate_size\":48,\"num_experts\":6,"
                    "\"num_experts_per_tok\":6}"},
        {mixtral, "{" SMALL "\"intermediate_size\":96,\"rope_scaling\":{\"type\":\"yarn\","
                  "\"factor\":4,\"original_max_position_embeddings\":128}}"},
        {gpt2, "{\"n_embd\":128,\"n_head\":2,\"n_layer\":2,\"vocab_size\":101,"
               "\"bos_token_id\":1,\"eos_token_id\":2}"},
    };
    struct bt_model_config c;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        if (model_load(cases[i].config, cases[i].changes, &c) != BT_OK || open_dir() != BT_OK) {
            fail_msg("%s: %s %s", cases[i].changes, model_err, err);
        }
    }
}

/* What deterministic engines have no kernels for, and what they take beside it. */
static void test_deterministic(void **state)
{
    (void)state;
    static const struct {
        const char *config, *changes, *kv_dtype;
        uint32_t max_rows;
        const char *what; /* NULL: taken */
    } cases[] = {
        {gpt2,
         "{\"n_embd\":128,\"n_head\":2,\"n_layer\":2,\"vocab_size\":112,\"bos_token_id\":1,"
         "\"eos_token_id\":2}",
         NULL, 64, "GPT-2's layers"},
        {mixtral, "{" SMALL "\"vocab_size\":112,\"intermediate_size\":96}", "fp8", 64,
         "model.kv_dtype: fp8"},
        {mixtral, "{" SMALL "\"vocab_size\":112,\"intermediate_size\":96}", NULL, 64, NULL},
        {deepseek_v3,
         LATENTS "\"vocab_size\":112,\"num_attention_heads\":2,\"num_key_value_heads\":2}", "fp8",
         64, "model.kv_dtype: fp8"},
        {deepseek_v3,
         LATENTS "\"vocab_size\":112,\"num_attention_heads\":2,\"num_key_value_heads\":2}", NULL,
         64, NULL},
        {deepseek_v3,
         LATENTS "\"vocab_size\":112,\"num_attention_heads\":2,\"num_key_value_heads\":2}", NULL,
         65536, "engine.max_rows 65536"},
    };
    struct bt_model_config c;
    deterministic = true;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        if (model_load(cases[i].config, cases[i].changes, &c) != BT_OK) {
            fail_msg("case %zu: %s", i, model_err);
        }
        kv_dtype = cases[i].kv_dtype;
        max_rows = cases[i].max_rows;
        bt_status_t st = open_dir();
        bool right = cases[i].what ? st != BT_OK && strstr(err, "engine.deterministic") &&
                                         strstr(err, cases[i].what)
                                   : st == BT_OK;
        if (!right) {
            fail_msg("case %zu: %s: %s", i, bt_status_name(st), err);
        }
    }
    deterministic = false;
    kv_dtype = NULL;
    max_rows = 64;
}

/* Latents lie in pages of 64 tokens only. */
static void test_latent_pages(void **state)
{
    (void)state;
    struct bt_model_config c;
    assert_int_equal(model_load(deepseek_v2_lite, "{}", &c), BT_OK);
    page_tokens = 16;
    assert_int_equal(open_dir(), BT_ERR_CONFIG);
    assert_non_null(strstr(err, "kv.block_tokens must be 64"));
    page_tokens = 64;
}

static void test_taken(void **state)
{
    (void)state;
    assert_int_equal(open_shape("\"hidden_size\":256,\"intermediate_size\":128,"
                                "\"num_attention_heads\":4,\"num_key_value_heads\":2"),
                     BT_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),       cmocka_unit_test(test_architectures),
        cmocka_unit_test(test_latent_pages),  cmocka_unit_test(test_taken),
        cmocka_unit_test(test_latents),       cmocka_unit_test(test_small),
        cmocka_unit_test(test_deterministic),
    };
    return cmocka_run_group_tests(tests, setup, model_teardown);
}
