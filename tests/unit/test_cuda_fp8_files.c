/* fp8 checkpoints of models with latent attention and experts in the cuda engine's host code, over
 * tests/cuda_host and so without a GPU, beside the CPU engine: the same files, in each form of
 * scales, give nearly the same logprobs. Which of the tensors are fp8, and their shapes, the
 * decoder's own list says. Chunks are so short that no engine rounds activations to fp8. */
#include <jansson.h>
#include <math.h>
#include <unistd.h>

#include "common/engine/engine.h"

static inline bt_status_t load_here(const char *name, const struct bt_engine_vtable **vt_p,
                                    char *err, size_t err_cap)
{
    if (strcmp(name, "cuda") != 0) {
        return bt_engine_load(name, vt_p, err, err_cap);
    }
    *vt_p = bt_engine_plugin(BT_ENGINE_ABI);
    return *vt_p ? BT_OK : BT_ERR_INTERNAL;
}
#define bt_engine_load load_here

#include "tests/golden/drive.h"

#include "common/engine/decoder.h"
#include "common/engine/fp8.h"

#define BLOCK   128u
#define TOKENS  20u
#define N_STEPS 4

enum form { BLOCKS, WHOLE, ROWS };

static char dir[64];
static uint32_t seed;

static float uniform(void) /* -1 to 1 */
{
    seed = seed * 1664525u + 1013904223u;
    return (float)(seed >> 8) / (1u << 23) - 1;
}

/* ---- the files ---- */

struct files {
    enum form form;
    json_t *tensors;
    FILE *data;
    size_t at;
};

static void put_tensor(struct files *f, const char *name, const char *dtype, json_t *shape,
                       const void *v, size_t bytes)
{
    json_object_set_new(f->tensors, name,
                        json_pack("{s:s, s:o, s:[I,I]}", "dtype", dtype, "shape", shape,
                                  "data_offsets", (json_int_t)f->at, (json_int_t)(f->at + bytes)));
    assert_int_equal(fwrite(v, 1, bytes, f->data), bytes);
    f->at += bytes;
}

static void put_fp8(struct files *f, const char *name, uint32_t rows, uint32_t cols)
{
    size_t n = (size_t)rows * cols;
    uint32_t down = f->form == BLOCKS ? BT_DIV_UP(rows, BLOCK) : f->form == ROWS ? rows : 1;
    uint32_t across = f->form == BLOCKS ? BT_DIV_UP(cols, BLOCK) : 1;
    uint8_t *v = malloc(n);
    float *scale = malloc((size_t)down * across * sizeof(*scale));
    char scale_name[128];
    for (size_t i = 0; i < n; i++) {
        v[i] = bt_e4m3_of_f32(uniform() * 400);
    }
    for (uint32_t i = 0; i < down * across; i++) { /* they differ by up to a factor of 4 */
        scale[i] = bt_decoder_dummy_width(cols) / 400 * exp2f(uniform());
    }
    put_tensor(f, name, "F8_E4M3", json_pack("[i,i]", (int)rows, (int)cols), v, n);
    snprintf(scale_name, sizeof(scale_name), "%s_scale%s", name, f->form == BLOCKS ? "_inv" : "");
    put_tensor(f, scale_name, "F32",
               f->form == WHOLE ? json_pack("[i]", 1) : json_pack("[i,i]", (int)down, (int)across),
               scale, (size_t)down * across * sizeof(*scale));
    free(v);
    free(scale);
}

static void put_f32(struct files *f, const char *name, uint32_t rows, uint32_t cols)
{
    size_t n = (size_t)rows * (cols ? cols : 1);
    float *v = malloc(n * sizeof(*v));
    for (size_t i = 0; i < n; i++) {
        v[i] = cols ? uniform() * bt_decoder_dummy_width(cols) : 1 + uniform() / 4;
    }
    put_tensor(f, name, "F32",
               cols ? json_pack("[i,i]", (int)rows, (int)cols) : json_pack("[i]", (int)rows), v,
               n * sizeof(*v));
    free(v);
}

static bt_status_t put_item(void *arg, const struct bt_decoder_tensors *d)
{
    for (uint32_t i = 0; i < d->n_parts; i++) {
        (d->quantize ? put_fp8 : put_f32)(arg, d->parts[i].name, d->parts[i].rows, d->cols);
    }
    return BT_OK;
}

static FILE *create(const char *name)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "wb+");
    assert_non_null(f);
    return f;
}

static void put_model(const char *config, enum form form)
{
    static const char *const quant[] = {
        "{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"activation_scheme\":\"dynamic\","
        "\"weight_block_size\":[128,128]}",
        "{\"quant_method\":\"fp8\",\"activation_scheme\":\"dynamic\"}",
        "{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\",\"config_groups\":"
        "{\"group_0\":{\"targets\":[\"Linear\"],\"weights\":{\"num_bits\":8,\"type\":\"float\","
        "\"symmetric\":true,\"dynamic\":false,\"strategy\":\"channel\"},\"input_activations\":"
        "{\"dynamic\":true}}},\"ignore\":[\"lm_head\",\"re:.*mlp.gate$\"]}"};
    struct files f = {.form = form, .tensors = json_object(), .data = tmpfile()};
    struct bt_model_config c;
    char err[1024] = "", buf[4096];
    FILE *out = create("config.json");
    fprintf(out, "{%s,\"quantization_config\":%s}", config, quant[form]);
    fclose(out);
    if (bt_model_config_load(dir, &c, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    const struct bt_engine_config conf = {
        .size = sizeof(conf), .model_dir = dir, .load_format = "dummy"};
    if (bt_decoder_load(&conf, &c, put_item, &f, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    char *head = json_dumps(f.tensors, JSON_COMPACT);
    uint64_t len = strlen(head);
    out = create("model.safetensors");
    fwrite(&len, 1, 8, out);
    fwrite(head, 1, len, out);
    rewind(f.data);
    for (size_t n; (n = fread(buf, 1, sizeof(buf), f.data)) > 0;) {
        fwrite(buf, 1, n, out);
    }
    assert_int_equal(fclose(out), 0);
    fclose(f.data);
    free(head);
    json_decref(f.tensors);
}

/* ---- both engines ---- */

/* Logprobs after the prompt and after each of some tokens, which both engines get. */
static void run(const char *engine, uint32_t page_tokens, struct bt_engine_out *out)
{
    struct drive d;
    uint32_t tokens[TOKENS + N_STEPS];
    for (uint32_t i = 0; i < TOKENS + N_STEPS; i++) {
        tokens[i] = (i * 37 + 11) % 120;
    }
    drive_open(&d, engine, dir, page_tokens);
    const struct bt_engine_params p = drive_greedy(BT_ENGINE_MAX_TOP);
    drive_slot(&d, 0, &p, tokens, TOKENS, N_STEPS);
    out[0] = drive_prefill(&d, 0, tokens, 0, TOKENS, 8);
    for (uint32_t i = 1; i < N_STEPS; i++) {
        out[i] = drive_prefill(&d, 0, tokens, TOKENS + i - 1, TOKENS + i, 1);
    }
    drive_close(&d);
}

static double differ(const struct bt_engine_out *x, const struct bt_engine_out *y)
{
    double worst = 0;
    for (int i = 0; i < N_STEPS; i++) {
        assert_false(x[i].bad || y[i].bad);
        for (uint32_t k = 0; k < 5; k++) {
            uint32_t j = 0;
            while (j + 1 < y[i].n_top && y[i].top_id[j] != x[i].top_id[k]) {
                j++;
            }
            worst = fmax(worst, fabs(x[i].top_logprob[k] - y[i].top_logprob[j]));
        }
    }
    return worst;
}

static void check(const char *what, const char *config, uint32_t page_tokens)
{
    static const char *const names[] = {"blocks", "one scale a matrix", "a scale a row"};
    for (enum form form = BLOCKS; form <= ROWS; form++) {
        struct bt_engine_out want[N_STEPS], got[N_STEPS];
        seed = 77;
        put_model(config, form);
        run("cpu", page_tokens, want);
        run("cuda", page_tokens, got);
        double worst = differ(want, got);
        printf("# %s, %s: largest difference %.4f\n", what, names[form], worst);
        assert_true(worst < 0.1);
    }
}

#define SIZES                                                                                      \
    "\"hidden_size\":256,\"num_hidden_layers\":2,\"vocab_size\":128,\"max_position_embeddings\":"  \
    "256,\"rms_norm_eps\":1e-6,\"tie_word_embeddings\":false,\"hidden_act\":\"silu\","             \
    "\"rope_theta\":10000,\"attention_bias\":false,\"torch_dtype\":\"bfloat16\","                  \
    "\"bos_token_id\":1,\"eos_token_id\":2,\"moe_intermediate_size\":128,"
#define LATENT                                                                                     \
    "\"num_attention_heads\":2,\"num_key_value_heads\":2,\"kv_lora_rank\":512,"                    \
    "\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"                         \
    "\"first_k_dense_replace\":1,\"moe_layer_freq\":1,\"n_routed_experts\":4,"                     \
    "\"num_experts_per_tok\":2,\"n_group\":1,\"topk_group\":1,"

/* The first product joins two matrices; the shared expert is two. */
static void test_latent(void **state)
{
    (void)state;
    check("latents",
          SIZES LATENT
          "\"architectures\":[\"DeepseekV3ForCausalLM\"],\"model_type\":\"deepseek_v3\","
          "\"q_lora_rank\":128,\"intermediate_size\":256,\"n_shared_experts\":2,"
          "\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\",\"norm_topk_prob\":true,"
          "\"routed_scaling_factor\":1.5",
          64);
}

/* Blocks do not end where an MLP's gate does, so MLPs become bf16; the rest stays fp8. */
static void test_mixed(void **state)
{
    (void)state;
    check("latents without q_lora",
          SIZES LATENT
          "\"architectures\":[\"DeepseekV2ForCausalLM\"],\"model_type\":\"deepseek_v2\","
          "\"q_lora_rank\":null,\"intermediate_size\":192,\"n_shared_experts\":1,"
          "\"scoring_func\":\"softmax\",\"topk_method\":\"greedy\",\"norm_topk_prob\":false,"
          "\"routed_scaling_factor\":1.5",
          64);
}

static void test_keys_and_values(void **state)
{
    (void)state;
    check("experts alone",
          SIZES "\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\","
                "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":64,"
                "\"intermediate_size\":256,\"num_experts\":4,\"num_experts_per_tok\":2,"
                "\"norm_topk_prob\":true,\"decoder_sparse_step\":1,\"mlp_only_layers\":[]",
          16);
}

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/baton_fp8_files.XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}
static int teardown(void **state)
{
    (void)state;
    char path[128];
    snprintf(path, sizeof(path), "%s/config.json", dir);
    unlink(path);
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    unlink(path);
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_latent), cmocka_unit_test(test_mixed),
                                       cmocka_unit_test(test_keys_and_values)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
