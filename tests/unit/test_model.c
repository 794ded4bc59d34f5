/* Model directories: config.json in its spellings, safetensors single and sharded, every bad input
 * refused with the file and the thing named, digest and root key. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/engine/model_config.h"
#include "common/engine/safetensors.h"

#define MODEL "deploy/models/shakespeare-llama-6m"

static char dir[64];
static char err[1024];

static void put(const char *name, const void *p, size_t n)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void drop(const char *name)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    unlink(path);
}

static int setup(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/baton-test-model-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    static const char *const names[] = {"config.json",       "generation_config.json",
                                        "model.safetensors", "model.safetensors.index.json",
                                        "a.safetensors",     "b.safetensors"};
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        drop(names[i]);
    }
    return rmdir(dir);
}

static void expect_err(bt_status_t got, bt_status_t want, const char *file, const char *what)
{
    if (got != want || !strstr(err, file) || !strstr(err, what)) {
        fail_msg("status %s, expected %s with \"%s\" and \"%s\"; error: %s", bt_status_name(got),
                 bt_status_name(want), file, what, got == BT_OK ? "-" : err);
    }
    assert_true(strlen(err) <= 600);
}

/* ---- config.json ---- */

#define BASE                                                                                       \
    "\"architectures\":[\"LlamaForCausalLM\"],\"vocab_size\":100,\"hidden_size\":64,"              \
    "\"intermediate_size\":128,\"num_hidden_layers\":2,\"num_attention_heads\":4,"                 \
    "\"num_key_value_heads\":2,\"max_position_embeddings\":512"

static bt_status_t load(const char *text, struct bt_model_config *c)
{
    err[0] = 0;
    put("config.json", text, strlen(text));
    return bt_model_config_load(dir, c, err, sizeof(err));
}

static void test_shipped(void **state)
{
    (void)state;
    struct bt_model_config c;
    assert_int_equal(bt_model_config_load(MODEL, &c, err, sizeof(err)), BT_OK);
    assert_string_equal(c.architecture, "LlamaForCausalLM");
    assert_int_equal(c.vocab, 2048);
    assert_int_equal(c.hidden, 256);
    assert_int_equal(c.layers, 6);
    assert_int_equal(c.heads, 8);
    assert_int_equal(c.kv_heads, 2);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.max_model_len, 8192);
    assert_true(c.rope_theta == 500000.0 && c.rope_kind == BT_ROPE_DEFAULT);
    assert_true(c.tie_embeddings);
    assert_int_equal(c.bos, 2043);
    assert_int_equal(c.n_eos, 2); /* generation_config.json's */
    assert_int_equal(c.eos[1], 2047);
    assert_true(c.temperature < 0 && c.top_k < 0);
}

static void test_rope_spellings(void **state)
{
    (void)state;
    struct bt_model_config a, b, c;
    assert_int_equal(load("{" BASE ",\"rope_theta\":500000.0}", &a), BT_OK);
    assert_int_equal(load("{" BASE ",\"rope_parameters\":{\"rope_theta\":500000.0,"
                          "\"rope_type\":\"default\"}}",
                          &b),
                     BT_OK);
    assert_string_equal(a.rope_text, b.rope_text);
#define SCALED                                                                                     \
    "\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"                             \
    "\"original_max_position_embeddings\":256"
    assert_int_equal(load("{" BASE ",\"rope_theta\":500000.0,\"rope_scaling\":{" SCALED
                          ",\"rope_type\":\"llama3\"}}",
                          &b),
                     BT_OK);
    assert_int_equal(load("{" BASE ",\"rope_parameters\":{\"rope_theta\":500000.0," SCALED
                          ",\"rope_type\":\"llama3\"}}",
                          &c),
                     BT_OK);
    assert_string_equal(b.rope_text, c.rope_text);
    assert_string_not_equal(a.rope_text, b.rope_text);
    float fa[8], fb[8];
    bt_model_rope_inv_freq(&a, fa);
    bt_model_rope_inv_freq(&b, fb);
    assert_true(fa[0] == 1.0f && fb[0] == 1.0f); /* short waves stay */
    assert_true(fb[7] == fa[7] / 8.0f);          /* long ones are stretched */
    assert_int_equal(load("{" BASE ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}}", &b),
                     BT_OK);
    assert_int_equal(load("{" BASE "}", &a), BT_OK); /* theta 10000 */
    bt_model_rope_inv_freq(&a, fa);
    bt_model_rope_inv_freq(&b, fb);
    for (int i = 0; i < 8; i++) {
        assert_true(fb[i] == fa[i] / 2.0f);
    }
}

/* rope_theta, rope_scaling and rope_parameters may stand beside each other if they agree. */
static void test_rope_twice(void **state)
{
    (void)state;
#define NEWER ",\"rope_parameters\":{\"rope_type\":"
#define OLDER ",\"rope_scaling\":{\"rope_type\":"
    static const char *const good[] = {
        "{" BASE ",\"rope_theta\":5e5" OLDER "\"llama3\"," SCALED "}" NEWER
        "\"llama3\",\"rope_theta\":5e5," SCALED "}}",
        "{" BASE OLDER "\"llama3\"," SCALED "}" NEWER "\"llama3\",\"rope_theta\":5e5," SCALED "}}",
        "{" BASE ",\"rope_theta\":5e5,\"rope_scaling\":null" NEWER "\"llama3\"," SCALED "}}",
        "{" BASE OLDER "\"llama3\",\"type\":\"llama3\",\"rope_theta\":5e5," SCALED "}}",
    };
    struct bt_model_config first, c;
    for (size_t i = 0; i < BT_ARRAY_LEN(good); i++) {
        assert_int_equal(load(good[i], &c), BT_OK);
        first = i == 0 ? c : first;
        assert_string_equal(c.rope_text, first.rope_text);
    }
    static const struct {
        const char *text, *what;
        bt_status_t status;
    } bad[] = {
        {"{" BASE OLDER "\"linear\",\"factor\":2}" NEWER "\"default\"}}", "rope_scaling",
         BT_ERR_INVALID},
        {"{" BASE OLDER "\"default\"}" NEWER "\"linear\",\"factor\":2}}", "rope_scaling",
         BT_ERR_INVALID},
        {"{" BASE OLDER "\"linear\",\"factor\":4}" NEWER "\"linear\",\"factor\":2}}",
         "rope_scaling", BT_ERR_INVALID},
        {"{" BASE OLDER "\"dynamic\",\"factor\":4}" NEWER "\"default\"}}", "dynamic",
         BT_ERR_UNSUPPORTED},
        {"{" BASE ",\"rope_theta\":1e4" NEWER "\"default\",\"rope_theta\":5e5}}", "rope_theta",
         BT_ERR_INVALID},
        {"{" BASE OLDER "\"linear\",\"type\":\"dynamic\",\"factor\":4}}", "rope_type",
         BT_ERR_INVALID},
        {"{" BASE NEWER "\"default\",\"mrope_section\":[16,24,24]}}", "mrope_section",
         BT_ERR_UNSUPPORTED},
        {"{" BASE NEWER "\"llama3\",\"attention_factor\":1.5," SCALED "}}", "attention_factor",
         BT_ERR_UNSUPPORTED},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        expect_err(load(bad[i].text, &c), bad[i].status, "config.json", bad[i].what);
    }
}

/* Keys that change what a model computes are refused by name unless they are neutral. */
static void test_refused_keys(void **state)
{
    (void)state;
    static const struct {
        const char *key, *bad, *neutral;
    } keys[] = {
        {"attn_logit_softcapping", "50.0", "null"},
        {"final_logit_softcapping", "30.0", "0"},
        {"residual_multiplier", "0.22", "1.0"},
        {"embedding_multiplier", "12", "1"},
        {"logits_scaling", "8", "1.0"},
        {"attention_multiplier", "0.0078125", "null"},
        {"query_pre_attn_scalar", "256", "null"},
        {"clip_qkv", "8.0", "null"},
        {"is_causal", "false", "true"},
        {"num_experts", "64", "0"},
        {"dual_chunk_attention_config", "{\"chunk_size\":262144}", "null"},
        {"no_rope_layers", "[1,1]", "[]"},
        {"qk_norm", "true", "false"},
        {"v_head_dim", "128", "16"},
        {"layer_types", "[\"full_attention\"]", "[\"full_attention\",\"full_attention\"]"},
        {"quantization", "{\"bits\":4}", "null"},
        {"hidden_activation", "\"gelu_pytorch_tanh\"", "\"silu\""},
    };
    struct bt_model_config c;
    for (size_t i = 0; i < BT_ARRAY_LEN(keys); i++) {
        char text[1024];
        snprintf(text, sizeof(text), "{" BASE ",\"%s\":%s}", keys[i].key, keys[i].bad);
        bt_status_t st = load(text, &c);
        expect_err(st, st == BT_ERR_INVALID ? st : BT_ERR_UNSUPPORTED, "config.json",
                   strncmp(keys[i].key, "hidden", 6) == 0 ? "hidden_act" : keys[i].key);
        snprintf(text, sizeof(text), "{" BASE ",\"%s\":%s}", keys[i].key, keys[i].neutral);
        assert_int_equal(load(text, &c), BT_OK);
    }
    static const char *const bad[] = {"num_beams", "typical_p", "no_repeat_ngram_size"};
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        char text[128];
        snprintf(text, sizeof(text), "{\"%s\":4}", bad[i]);
        put("generation_config.json", text, strlen(text));
        expect_err(load("{" BASE "}", &c), BT_ERR_UNSUPPORTED, "generation_config.json", bad[i]);
    }
    static const char full[] =
        "{\"num_beams\":1,\"typical_p\":1.0,\"no_repeat_ngram_size\":0,\"do_sample\":true,"
        "\"suppress_tokens\":null,\"min_p\":0.05,\"max_new_tokens\":300}";
    put("generation_config.json", full, sizeof(full) - 1);
    assert_int_equal(load("{" BASE "}", &c), BT_OK);
    assert_true(c.min_p == 0.05f && c.max_new_tokens == 300);
    drop("generation_config.json");
}

#define MISTRAL                                                                                    \
    "\"architectures\":[\"MistralForCausalLM\"],\"vocab_size\":100,\"hidden_size\":64,"            \
    "\"intermediate_size\":128,\"num_hidden_layers\":2,\"num_attention_heads\":4,"                 \
    "\"max_position_embeddings\":512"
#define QWEN                                                                                       \
    "\"architectures\":[\"Qwen3ForCausalLM\"],\"vocab_size\":100,\"hidden_size\":64,"              \
    "\"intermediate_size\":128,\"num_hidden_layers\":2,\"num_attention_heads\":4,"                 \
    "\"max_position_embeddings\":512"

static void test_window(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint32_t window;
    } cases[] = {
        {"{" MISTRAL ",\"sliding_window\":128}", 128},
        {"{" MISTRAL ",\"sliding_window\":null}", 0},
        {"{" MISTRAL "}", 0},
        {"{" QWEN ",\"sliding_window\":128,\"use_sliding_window\":false}", 0},
        {"{" QWEN ",\"sliding_window\":128}", 0},
        {"{" QWEN ",\"sliding_window\":128,\"use_sliding_window\":true,"
         "\"layer_types\":[\"sliding_attention\",\"sliding_attention\"]}",
         128},
        {"{" QWEN ",\"sliding_window\":128,\"use_sliding_window\":true,"
         "\"layer_types\":[\"full_attention\",\"full_attention\"]}",
         0},
    };
    struct bt_model_config c;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        assert_int_equal(load(cases[i].text, &c), BT_OK);
        assert_int_equal(c.window, cases[i].window);
    }
    static const struct {
        const char *text, *what;
        bt_status_t status;
    } bad[] = {
        {"{" BASE ",\"sliding_window\":128}", "sliding_window", BT_ERR_UNSUPPORTED},
        {"{" MISTRAL ",\"sliding_window\":0}", "sliding_window", BT_ERR_INVALID},
        {"{" MISTRAL ",\"sliding_window\":\"x\"}", "sliding_window", BT_ERR_INVALID},
        {"{" QWEN ",\"sliding_window\":128,\"use_sliding_window\":true}", "use_sliding_window",
         BT_ERR_UNSUPPORTED},
        {"{" QWEN ",\"sliding_window\":128,\"use_sliding_window\":true,"
         "\"layer_types\":[\"full_attention\",\"sliding_attention\"]}",
         "layer_types", BT_ERR_UNSUPPORTED},
        {"{" QWEN ",\"layer_types\":[\"linear_attention\"]}", "layer_types", BT_ERR_UNSUPPORTED},
        {"{" QWEN ",\"layer_types\":[\"sliding_attention\",\"sliding_attention\"]}", "layer_types",
         BT_ERR_INVALID},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        expect_err(load(bad[i].text, &c), bad[i].status, "config.json", bad[i].what);
    }
    /* the window is part of the layout, so blocks of another window have other keys */
    struct bt_kv_layout with, without;
    assert_int_equal(load(cases[0].text, &c), BT_OK);
    assert_int_equal(bt_model_kv_layout(&c, NULL, 16, &with), BT_OK);
    assert_int_equal(load(cases[1].text, &c), BT_OK);
    assert_int_equal(bt_model_kv_layout(&c, NULL, 16, &without), BT_OK);
    assert_int_equal(with.groups[0].window, 128);
    assert_int_not_equal(with.layout_id, without.layout_id);
}

static void test_head_dim(void **state)
{
    (void)state;
    struct bt_model_config c;
    assert_int_equal(load("{" BASE "}", &c), BT_OK);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(load("{" BASE ",\"head_dim\":32}", &c), BT_OK);
    assert_int_equal(c.head_dim, 32);
    assert_int_equal(c.bos, UINT32_MAX);
    assert_int_equal(c.n_eos, 0);
}

static void test_bad_configs(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bt_status_t status;
        const char *what;
    } cases[] = {
        {"", BT_ERR_INVALID, "JSON"},
        {"[]", BT_ERR_INVALID, "object"},
        {"{\"vocab_size\":1,\"vocab_size\":2}", BT_ERR_INVALID, "JSON"},
        {"{}", BT_ERR_INVALID, "architectures"},
        {"{\"architectures\":[\"OPTForCausalLM\"]}", BT_ERR_UNSUPPORTED, "LlamaForCausalLM"},
        {"{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":64}", BT_ERR_INVALID,
         "vocab_size"},
        {"{" BASE ",\"head_dim\":0}", BT_ERR_INVALID, "head_dim"},
        {"{" BASE ",\"head_dim\":24}", BT_ERR_UNSUPPORTED, "multiples of 16"},
        {"{" BASE ",\"hidden_act\":\"gelu\"}", BT_ERR_UNSUPPORTED, "hidden_act"},
        {"{" BASE ",\"attention_bias\":true}", BT_ERR_UNSUPPORTED, "attention_bias"},
        {"{" BASE ",\"mlp_bias\":true}", BT_ERR_UNSUPPORTED, "mlp_bias"},
        {"{" BASE ",\"mlp_bias\":1}", BT_ERR_INVALID, "mlp_bias"},
        {"{" BASE ",\"sliding_window\":128}", BT_ERR_UNSUPPORTED, "sliding_window"},
        {"{" BASE ",\"quantization_config\":{}}", BT_ERR_UNSUPPORTED, "quantization_config"},
        {"{" BASE ",\"dtype\":\"float8\"}", BT_ERR_UNSUPPORTED, "dtype"},
        {"{" BASE ",\"rope_theta\":0}", BT_ERR_INVALID, "rope_theta"},
        {"{" BASE ",\"rope_theta\":\"x\"}", BT_ERR_INVALID, "rope_theta"},
        {"{" BASE ",\"rope_scaling\":{\"type\":\"longrope\"}}", BT_ERR_UNSUPPORTED, "llama3"},
        {"{" BASE ",\"rope_scaling\":{\"type\":\"linear\"}}", BT_ERR_INVALID, "factor"},
        {"{" BASE ",\"rope_scaling\":7}", BT_ERR_INVALID, "rope_scaling"},
        {"{" BASE ",\"rope_scaling\":{\"factor\":2}}", BT_ERR_INVALID, "rope_type: missing"},
        {"{" BASE ",\"rope_parameters\":{\"full_attention\":{\"rope_theta\":1e4}}}",
         BT_ERR_UNSUPPORTED, "full_attention"},
        {"{" BASE ",\"partial_rotary_factor\":0.5}", BT_ERR_UNSUPPORTED, "partial_rotary_factor"},
        {"{" BASE ",\"eos_token_id\":100}", BT_ERR_INVALID, "eos_token_id"},
        {"{" BASE ",\"eos_token_id\":[1,-1]}", BT_ERR_INVALID, "eos_token_id"},
        {"{" BASE ",\"bos_token_id\":100}", BT_ERR_INVALID, "bos_token_id"},
        {"{" BASE ",\"rms_norm_eps\":-1}", BT_ERR_INVALID, "rms_norm_eps"},
    };
    struct bt_model_config c;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        expect_err(load(cases[i].text, &c), cases[i].status, "config.json", cases[i].what);
    }
    /* one number of the base changed */
    static const struct {
        const char *name, *value, *what;
    } nums[] = {
        {"num_hidden_layers", "0", "num_hidden_layers"},
        {"num_hidden_layers", "-1", "num_hidden_layers"},
        {"num_hidden_layers", "2.5", "num_hidden_layers"},
        {"num_hidden_layers", "99999999999", "num_hidden_layers"},
        {"vocab_size", "4294967297", "vocab_size"},
        {"num_attention_heads", "5", "num_attention_heads"},
        {"num_key_value_heads", "3", "num_key_value_heads"},
        {"num_key_value_heads", "0", "num_key_value_heads"},
        {"max_position_embeddings", "0", "max_position_embeddings"},
        {"hidden_size", "\"64\"", "hidden_size"},
        {"intermediate_size", "null", "intermediate_size"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(nums); i++) {
        char text[1024], key[64];
        snprintf(key, sizeof(key), "\"%s\":", nums[i].name);
        const char *at = strstr("{" BASE "}", key), *rest = at + strlen(key);
        rest += strcspn(rest, ",}");
        snprintf(text, sizeof(text), "%.*s%s%s%s", (int)(at - ("{" BASE "}")), "{" BASE "}", key,
                 nums[i].value, rest);
        expect_err(load(text, &c), BT_ERR_INVALID, "config.json", nums[i].what);
    }
    drop("config.json");
    expect_err(bt_model_config_load(dir, &c, err, sizeof(err)), BT_ERR_NOT_FOUND, "config.json",
               "model.path");
    assert_int_equal(load("{" BASE "}", &c), BT_OK);
    put("generation_config.json", "{\"top_p\":2}", 11);
    expect_err(bt_model_config_load(dir, &c, err, sizeof(err)), BT_ERR_INVALID,
               "generation_config.json", "top_p");
    put("generation_config.json", "{\"top_p\":0.5,\"top_k\":3,\"temperature\":0.7}", 41);
    assert_int_equal(bt_model_config_load(dir, &c, err, sizeof(err)), BT_OK);
    assert_true(c.top_p == 0.5f && c.top_k == 3 && c.temperature == 0.7f);
    drop("generation_config.json");
}

/* ---- safetensors ---- */

/* Writes a file of header text and n zero bytes of data. */
static void put_tensors(const char *name, const char *header, size_t n)
{
    size_t h = strlen(header);
    uint8_t *p = calloc(1, 8 + h + n);
    for (int i = 0; i < 8; i++) {
        p[i] = (uint8_t)((uint64_t)h >> (8 * i));
    }
    memcpy(p + 8, header, h);
    put(name, p, 8 + h + n);
    free(p);
}

static bt_status_t open_weights(struct bt_weights **w)
{
    err[0] = 0;
    return bt_weights_open(dir, w, err, sizeof(err));
}

#define T(NAME, DT, SHAPE, A, B)                                                                   \
    "\"" NAME "\":{\"dtype\":\"" DT "\",\"shape\":" SHAPE ",\"data_offsets\":[" #A "," #B "]}"

static void test_good_tensors(void **state)
{
    (void)state;
    struct bt_weights *w;
    put_tensors("model.safetensors",
                "{\"__metadata__\":{\"format\":\"pt\"}," T("b", "F32", "[2,3]", 8, 32) "," T(
                    "a", "BF16", "[4]", 0, 8) "," T("s", "I64", "[]", 32, 40) "}   ",
                40);
    assert_int_equal(open_weights(&w), BT_OK);
    assert_non_null(bt_weights_find(w, "s"));
    const struct bt_tensor *b = bt_weights_find(w, "b");
    assert_non_null(b);
    assert_int_equal(b->n_dims, 2);
    assert_int_equal(b->dims[1], 3);
    assert_int_equal(b->bytes, 24);
    assert_int_equal(b->data - bt_weights_find(w, "a")->data, 8);
    assert_int_equal(bt_weights_find(w, "a")->dtype, BT_TENSOR_BF16);
    assert_null(bt_weights_find(w, "c"));
    bt_weights_close(w);
    put_tensors("model.safetensors", "{}", 0); /* nothing: no undefined behaviour either */
    assert_int_equal(open_weights(&w), BT_OK);
    assert_null(bt_weights_find(w, "a"));
    bt_weights_close(w);
}

static void test_bad_tensors(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        const char *what;
    } cases[] = {
        {"{" T("a", "BF16", "[4]", 0, 8) "," T("b", "BF16", "[4]", 4, 12) "}", 12, "overlaps"},
        {"{" T("a", "BF16", "[4]", 0, 8) "," T("b", "BF16", "[4]", 12, 20) "}", 20, "hole"},
        {"{" T("a", "BF16", "[4]", 8, 16) "}", 16, "hole"},
        {"{" T("a", "BF16", "[4]", 0, 8) "}", 10, "behind the last"},
        {"{" T("a", "BF16", "[4]", 0, 8) "}", 7, "cut off"},
        {"{" T("a", "BF16", "[5]", 0, 8) "}", 8, "shape needs 10"},
        {"{" T("a", "BF16", "[4]", 8, 0) "}", 8, "data_offsets"},
        {"{" T("a", "BF16", "[4]", -8, 0) "}", 8, "data_offsets"},
        {"{" T("a", "BF16", "[-4]", 0, 8) "}", 8, "shape"},
        {"{" T("a", "BF16", "[1.5]", 0, 8) "}", 8, "shape"},
        {"{" T("a", "BF17", "[4]", 0, 8) "}", 8, "BF17"},
        {"{" T("a", "BF16", "[4]", 0, 8) "," T("a", "BF16", "[4]", 8, 16) "}", 16, "duplicate"},
        {"{" T("a", "BF16", "[4]", 0, 8) "," T("z", "BF16", "[0]", 4, 4) "}", 8, "no elements"},
        {"{" T("a", "BF16", "[4294967296,4294967296,2]", 0, 8) "}", 8, "overflow"},
        {"{" T("a", "F64", "[2305843009213693952]", 0, 8) "}", 8, "overflow"},
        {"{" T("a", "BF16", "[1,1,1,1,1,1,1,1,4]", 0, 8) "}", 8, "dimensions"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4]}}", 8, "data_offsets"},
        {"{\"a\":7}", 8, "tensor a"},
        {"[]", 0, "JSON"},
        {"{\"a\":", 0, "JSON"},
        {"", 0, "JSON"},
    };
    struct bt_weights *w;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        put_tensors("model.safetensors", cases[i].header, cases[i].data);
        expect_err(open_weights(&w), BT_ERR_INVALID, "model.safetensors", cases[i].what);
    }
    put("model.safetensors", "\1\0\0\0\0\0\0", 7);
    expect_err(open_weights(&w), BT_ERR_INVALID, "model.safetensors", "8 bytes");
    put("model.safetensors", "\1\0\0\0\0\0\0\0", 8);
    expect_err(open_weights(&w), BT_ERR_INVALID, "model.safetensors", "cut off");
    put("model.safetensors", "\1\341\365\5\0\0\0\0{}", 10); /* 100,000,001 */
    expect_err(open_weights(&w), BT_ERR_TOO_LARGE, "model.safetensors", "100000001");
    put("model.safetensors", "\377\377\377\377\377\377\377\377{}", 10);
    expect_err(open_weights(&w), BT_ERR_TOO_LARGE, "model.safetensors", "header length");
    static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:00\n";
    put("model.safetensors", lfs, sizeof(lfs) - 1); /* cloned without git-lfs */
    expect_err(open_weights(&w), BT_ERR_INVALID, "model.safetensors", "git lfs pull");
    drop("model.safetensors");
    expect_err(open_weights(&w), BT_ERR_NOT_FOUND, "model.safetensors", "safetensors");
}

static void put_index(const char *text)
{
    put("model.safetensors.index.json", text, strlen(text));
}

static void test_shards(void **state)
{
    (void)state;
    struct bt_weights *w;
    drop("model.safetensors");
    put_tensors("a.safetensors", "{" T("x", "BF16", "[4]", 0, 8) "}", 8);
    put_tensors("b.safetensors", "{" T("y", "BF16", "[4]", 0, 8) "}", 8);
    put_index("{\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"b.safetensors\"}}");
    assert_int_equal(open_weights(&w), BT_OK);
    assert_string_equal(bt_weights_find(w, "y")->file, "b.safetensors");
    bt_weights_close(w);

    put_index("{\"weight_map\":{\"x\":\"b.safetensors\",\"y\":\"a.safetensors\"}}");
    expect_err(open_weights(&w), BT_ERR_INVALID, "index.json", "not in");
    put_index("{\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"c.safetensors\"}}");
    expect_err(open_weights(&w), BT_ERR_NOT_FOUND, "index.json", "c.safetensors");
    put_index("{\"weight_map\":{\"x\":\"../a.safetensors\"}}");
    expect_err(open_weights(&w), BT_ERR_INVALID, "index.json", "same directory");
    put_index("{\"weight_map\":{}}");
    expect_err(open_weights(&w), BT_ERR_INVALID, "index.json", "weight_map");
    put_index("{");
    expect_err(open_weights(&w), BT_ERR_INVALID, "index.json", "JSON");
    put_tensors("b.safetensors", "{" T("x", "BF16", "[4]", 0, 8) "}", 8);
    put_index("{\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"b.safetensors\"}}");
    assert_int_not_equal(open_weights(&w), BT_OK); /* x twice, y nowhere */
    drop("model.safetensors.index.json");
}

/* ---- more than one thread takes at once ---- */

static void write_large(const uint8_t *data, size_t n)
{
    static const char header[] = "{" T("a", "F32", "[5242880]", 0, 20971520) "}";
    uint64_t h = strlen(header);
    char path[256];
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(&h, 1, 8, f) + fwrite(header, 1, h, f), 8 + h);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}
static void digest_of(uint8_t out[32])
{
    assert_int_equal(bt_model_weights_digest(dir, "auto", out, err, sizeof(err)), BT_OK);
}

static void test_large(void **state)
{
    (void)state;
    enum { N = 5 << 20 };
    float *v = malloc(N * sizeof(*v));
    uint16_t *got = malloc(N * sizeof(*got));
    for (uint32_t i = 0; i < N; i++) {
        v[i] = (float)(i * 2654435761u >> 8) * 0x1p-20f - 3;
    }
    uint8_t a[32], b[32];
    write_large((const uint8_t *)v, N * sizeof(*v));
    digest_of(a);
    struct bt_weights *w;
    assert_int_equal(bt_weights_open(dir, &w, err, sizeof(err)), BT_OK);
    const struct bt_tensor *t = bt_weights_find(w, "a");
    assert_non_null(t);
    bt_tensor_ahead(t);
    enum { FROM = 12345 };
    bt_tensor_values(t, FROM, N - FROM, BT_TENSOR_BF16, got);
    for (uint32_t i = FROM; i < N; i++) {
        assert_int_equal(got[i - FROM], bt_bf16_of_f32(v[i]));
    }
    bt_weights_close(w);
    static const uint32_t at[] = {0, (16 << 20) / 4 - 20, (16 << 20) / 4 + 100, N - 1};
    for (uint32_t i = 0; i < 4; i++) { /* each piece counts */
        v[at[i]] += 1;
        write_large((const uint8_t *)v, N * sizeof(*v));
        digest_of(b);
        assert_memory_not_equal(a, b, 32);
        memcpy(a, b, 32);
    }
    free(v);
    free(got);
    drop("model.safetensors");
}

/* ---- digest, root key ---- */

static void test_root_key(void **state)
{
    (void)state;
    struct bt_kv_layout l;
    struct bt_kv_key a, b;
    assert_int_equal(
        bt_model_root_key(MODEL,
                          &(struct bt_model_settings){.load_format = "auto", .block_tokens = 16},
                          &l, &a, err, sizeof(err)),
        BT_OK);
    assert_int_equal(l.groups[0].seg_bytes, 8192);
    assert_int_equal(l.block_bytes, 6 * 8192);
    assert_int_equal(
        bt_model_root_key(MODEL,
                          &(struct bt_model_settings){.load_format = "auto", .block_tokens = 16},
                          &l, &b, err, sizeof(err)),
        BT_OK);
    assert_memory_equal(&a, &b, sizeof(a));
    assert_int_equal(
        bt_model_root_key(MODEL,
                          &(struct bt_model_settings){.load_format = "auto", .block_tokens = 64},
                          &l, &b, err, sizeof(err)),
        BT_OK);
    assert_memory_not_equal(&a, &b, sizeof(a));
    assert_int_equal(
        bt_model_root_key(MODEL,
                          &(struct bt_model_settings){.load_format = "dummy", .block_tokens = 16},
                          &l, &b, err, sizeof(err)),
        BT_OK);
    assert_memory_not_equal(&a, &b, sizeof(a));
    assert_int_equal(bt_model_root_key(MODEL,
                                       &(struct bt_model_settings){.load_format = "auto",
                                                                   .activations = "bf16-mlp",
                                                                   .block_tokens = 16},
                                       &l, &b, err, sizeof(err)),
                     BT_OK);
    assert_memory_equal(&a, &b, sizeof(a));
    assert_int_equal(bt_model_root_key(MODEL,
                                       &(struct bt_model_settings){.load_format = "auto",
                                                                   .activations = "split",
                                                                   .block_tokens = 16},
                                       &l, &b, err, sizeof(err)),
                     BT_OK);
    assert_memory_not_equal(&a, &b, sizeof(a));
    assert_int_equal(bt_model_root_key(MODEL,
                                       &(struct bt_model_settings){.load_format = "auto",
                                                                   .deterministic = true,
                                                                   .block_tokens = 16},
                                       &l, &b, err, sizeof(err)),
                     BT_OK);
    assert_memory_not_equal(&a, &b, sizeof(a));
    const struct bt_kv_key split = b;
    for (int i = 0; i < 2; i++) { /* rounded weights make other KV */
        assert_int_equal(
            bt_model_root_key(MODEL,
                              &(struct bt_model_settings){.load_format = "auto",
                                                          .activations = i ? "split" : NULL,
                                                          .quantize = "fp8",
                                                          .block_tokens = 16},
                              &l, &b, err, sizeof(err)),
            BT_OK);
        assert_memory_not_equal(&a, &b, sizeof(a));
        assert_memory_not_equal(&split, &b, sizeof(b));
    }
    assert_int_equal(bt_model_root_key(MODEL,
                                       &(struct bt_model_settings){.load_format = "auto",
                                                                   .quantize = "none",
                                                                   .block_tokens = 16},
                                       &l, &b, err, sizeof(err)),
                     BT_OK);
    assert_memory_equal(&a, &b, sizeof(a));
    assert_int_equal(
        bt_model_root_key(MODEL,
                          &(struct bt_model_settings){.load_format = "auto", .block_tokens = 0}, &l,
                          &b, err, sizeof(err)),
        BT_ERR_INVALID);

    /* one weight or one RoPE parameter more */
    struct bt_model_config c;
    const char *header = "{" T("a", "BF16", "[4]", 0, 8) "}";
    assert_int_equal(load("{" BASE "}", &c), BT_OK);
    put_tensors("model.safetensors", header, 8);
    assert_int_equal(
        bt_model_root_key(dir,
                          &(struct bt_model_settings){.load_format = "auto", .block_tokens = 16},
                          &l, &a, err, sizeof(err)),
        BT_OK);
    assert_int_equal(load("{" BASE ",\"rope_theta\":10001}", &c), BT_OK);
    assert_int_equal(
        bt_model_root_key(dir,
                          &(struct bt_model_settings){.load_format = "auto", .block_tokens = 16},
                          &l, &b, err, sizeof(err)),
        BT_OK);
    assert_memory_not_equal(&a, &b, sizeof(a));
    assert_int_equal(load("{" BASE "}", &c), BT_OK);
    char file[256];
    size_t h = strlen(header);
    memset(file, 0, sizeof(file));
    file[0] = (char)h;
    memcpy(file + 8, header, h);
    file[8 + h + 3] = 1;
    put("model.safetensors", file, 8 + h + 8);
    assert_int_equal(
        bt_model_root_key(dir,
                          &(struct bt_model_settings){.load_format = "auto", .block_tokens = 16},
                          &l, &b, err, sizeof(err)),
        BT_OK);
    assert_memory_not_equal(&a, &b, sizeof(a));
    drop("model.safetensors");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shipped),     cmocka_unit_test(test_rope_spellings),
        cmocka_unit_test(test_rope_twice),  cmocka_unit_test(test_refused_keys),
        cmocka_unit_test(test_window),      cmocka_unit_test(test_head_dim),
        cmocka_unit_test(test_bad_configs), cmocka_unit_test(test_good_tensors),
        cmocka_unit_test(test_bad_tensors), cmocka_unit_test(test_shards),
        cmocka_unit_test(test_large),       cmocka_unit_test(test_root_key),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
