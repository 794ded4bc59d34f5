/* The CPU engine against float32 outputs of the reference implementation: top-10 logprobs of the
 * next token within 0.05 (0.1 where model.activations is bf16-mlp), greedy tokens equal up to
 * near-ties (gaps below that). tests/run runs it again with ONEDNN_MAX_CPU_ISA=AVX2;
 * BT_GOLDEN_ENGINE names another engine (make check-gpu), BT_GOLDEN_KV what it keeps KV as,
 * BT_GOLDEN_MODEL and BT_GOLDEN_REF another model and its file, for a run of their own. */
#include "tests/golden/drive.h"

#include <jansson.h>
#include <math.h>
#include <unistd.h>

#include "common/conf/conf.h"
#include "common/engine/model_config.h"

/* Engines that round products to bf16 come as near as that allows. */
#define TOLERANCE                                                                                  \
    (bf16_mlp ? 0.1 : drive_kv_dtype ? INFINITY : bt_conf_env("BT_GOLDEN_ENGINE") ? 0.2 : 0.05)
/* fp8 KV: three bits of mantissa; single logprobs may be far off, random models' the most */
#define FP8_MEAN (fp8_latents ? 0.15 : 0.25)

static bool bf16_mlp;    /* model.activations of the engines to come */
static bool has_bf16;    /* products of the last engine have bf16 factors */
static bool fp8_latents; /* model.kv_dtype of the engines to come is fp8 */

struct differences { /* of logprobs to the reference's */
    double worst, sum;
    uint32_t n;
};

static void add(struct differences *d, double diff)
{
    d->worst = fmax(d->worst, diff);
    d->sum += diff;
    d->n++;
}

static uint32_t *ids_of(const json_t *list, uint32_t *n_p)
{
    uint32_t n = (uint32_t)json_array_size(list), *ids = malloc((n + 1) * sizeof(*ids));
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    }
    *n_p = n;
    return ids;
}

static double num(const json_t *o, const char *name, size_t i)
{
    return json_number_value(json_array_get(json_object_get(o, name), i));
}

static double logprob_of(const struct bt_engine_out *o, uint32_t id)
{
    for (uint32_t i = 0; i < o->n_top; i++) {
        if (o->top_id[i] == id) {
            return o->top_logprob[i];
        }
    }
    return drive_kv_dtype ? o->top_logprob[o->n_top - 1] : -INFINITY; /* at most that */
}

static void check_next(const json_t *c, const struct bt_engine_out *o, struct differences *diffs)
{
    uint32_t n;
    uint32_t *ids = ids_of(json_object_get(c, "next_top10_ids"), &n);
    assert_int_equal(n, 10);
    for (uint32_t i = 0; i < n; i++) {
        double diff = fabs(logprob_of(o, ids[i]) - num(c, "next_top10_logprobs", i));
        add(diffs, diff);
        if (!(diff <= TOLERANCE)) {
            fail_msg("token %u: logprob %f, reference %f", ids[i], logprob_of(o, ids[i]),
                     num(c, "next_top10_logprobs", i));
        }
    }
    free(ids);
}

/* Greedy continuation. At a near-tie (gap below TOLERANCE) where the engine decides otherwise, the
 * reference's token is fed instead, and the comparison goes on. Returns the near-ties. */
static uint32_t check_greedy(struct drive *d, const json_t *c, const struct bt_engine_params *p,
                             struct differences *diffs)
{
    uint32_t n, n_prompt, ties = 0, cap;
    uint32_t *prompt = ids_of(json_object_get(c, "prompt_ids"), &n_prompt);
    uint32_t *want = ids_of(json_object_get(c, "greedy_ids"), &n);
    cap = n_prompt + n;
    uint32_t *all = malloc(cap * sizeof(*all));
    memcpy(all, prompt, n_prompt * sizeof(*all));
    memcpy(all + n_prompt, want, n * sizeof(*all));
    drive_slot(d, 0, p, prompt, n_prompt, n);
    struct bt_engine_out o = drive_prefill(d, 0, prompt, 0, n_prompt, 2048);
    check_next(c, &o, diffs);
    for (uint32_t i = 0; i < n; i++) {
        double gap = num(c, "greedy_top2_gap", i), ref = num(c, "greedy_logprobs", i);
        double got = logprob_of(&o, want[i]);
        assert_false(o.bad);
        add(diffs, fabs(got - ref));
        if (!(fabs(got - ref) <= TOLERANCE)) {
            fail_msg("greedy %u, token %u: logprob %f, reference %f", i, want[i], got, ref);
        }
        if (o.token != want[i]) {
            if (gap >= TOLERANCE) {
                fail_msg("greedy %u: token %u, reference %u with gap %f", i, o.token, want[i], gap);
            }
            ties++;
            if (!drive_kv_dtype) {
                printf("# near-tie: greedy %u: token %u, reference %u, gap %f\n", i, o.token,
                       want[i], gap);
            }
            if (i + 1 < n) { /* go on from the reference's token */
                drive_slot_close(d, 0);
                d->next_page = 0;
                drive_slot(d, 0, p, all, n_prompt + i + 1, n - i - 1);
                o = drive_prefill(d, 0, all, 0, n_prompt + i + 1, 2048);
            }
        } else if (i + 1 < n) {
            o = drive_decode(d, 0);
        }
    }
    drive_slot_close(d, 0);
    d->next_page = 0;
    free(prompt);
    free(want);
    free(all);
    return ties;
}

/* The cuda engine keeps latents in pages of 64 tokens only. */
static uint32_t page_tokens(const char *engine, const char *model)
{
    struct bt_model_config c;
    char err[1024];
    if (bt_model_config_load(model, &c, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    return engine && strcmp(engine, "cuda") == 0 && c.mla.kv_rank ? 64 : 16;
}

static void check_model(const char *model, const char *ref)
{
    json_error_t je;
    json_t *cases = json_load_file(ref, 0, &je);
    if (!cases) {
        fail_msg("%s: %s", ref, je.text);
    }
    struct drive d;
    const char *engine = bt_conf_env("BT_GOLDEN_ENGINE");
    const char *kv = bt_conf_env("BT_GOLDEN_KV");
    drive_kv_dtype = fp8_latents ? "fp8" : kv && strcmp(kv, "f16") != 0 ? kv : NULL;
    drive_open_with(&d, engine ? engine : "cpu", model, "auto", page_tokens(engine, model),
                    bf16_mlp ? "bf16-mlp" : "split");
    const struct bt_engine_params p = drive_greedy(BT_ENGINE_MAX_TOP);
    struct differences diffs = {0};
    uint32_t ties = 0;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        ties += check_greedy(&d, json_array_get(cases, i), &p, &diffs);
    }
    printf("# %s on %s%s%s: largest difference %.4f, mean %.4f, near-ties %u\n", model,
           d.info->device, bf16_mlp ? " (bf16-mlp)" : "", drive_kv_dtype ? " (fp8 KV)" : "",
           diffs.worst, diffs.sum / diffs.n, ties);
    assert_true(diffs.sum / diffs.n < (drive_kv_dtype ? FP8_MEAN : 0.02));
    drive_close(&d);
    json_decref(cases);
}

static void check_small(const char *name)
{
    char model[128], ref[160];
    snprintf(model, sizeof(model), "tests/golden/models/%s", name);
    snprintf(ref, sizeof(ref), "%s.json", model);
    check_model(model, ref);
}
static void check_tiny(const char *name)
{
    char model[96];
    snprintf(model, sizeof(model), "tiny-%s", name);
    check_small(model);
}

static void test_llama(void **state)
{
    (void)state;
    check_model("deploy/models/shakespeare-llama-6m", "tests/golden/shakespeare-llama-6m.json");
}

static void test_draft(void **state)
{
    (void)state;
    check_model("deploy/models/shakespeare-draft-1m", "tests/golden/shakespeare-draft-1m.json");
}

/* One small random model for each architecture: sliding window (48 tokens, prompts of up to 300),
 * Llama 3.1's RoPE in f16, QKV bias with a tied head in f32 shards, QK norm in bf16 shards. */
static void test_mistral(void **state)
{
    (void)state;
    check_model("tests/golden/models/tiny-mistral", "tests/golden/models/tiny-mistral.json");
}

static void test_llama31(void **state)
{
    (void)state;
    check_model("tests/golden/models/tiny-llama31", "tests/golden/models/tiny-llama31.json");
}

static void test_qwen2(void **state)
{
    (void)state;
    check_model("tests/golden/models/tiny-qwen2", "tests/golden/models/tiny-qwen2.json");
}

static void test_qwen3(void **state)
{
    (void)state;
    check_model("tests/golden/models/tiny-qwen3", "tests/golden/models/tiny-qwen3.json");
}

/* MLA: queries by one matrix, softmax router and two shared experts; queries by two, groups of
 * experts; sigmoid router with bias, groups, YaRN. */
static void test_deepseek_v2(void **state)
{
    (void)state;
    check_tiny("deepseek-v2");
    check_tiny("deepseek-v2-groups");
}

static void test_deepseek_v3(void **state)
{
    (void)state;
    check_tiny("deepseek-v3");
}

/* Experts beside an MLP layer; experts everywhere. */
static void test_experts(void **state)
{
    (void)state;
    check_tiny("qwen3-moe");
    check_tiny("mixtral");
    check_small("gpu-qwen3-moe");
    check_small("gpu-mixtral");
    check_small("gpu-deepseek-v2");
}

static void test_gpt2(void **state)
{
    (void)state;
    check_tiny("gpt2");
}

static void test_yarn(void **state)
{
    (void)state;
    check_tiny("qwen3-yarn");
    check_small("gpu-yarn");
}

/* Blocks of 128 x 128 with ragged edges, one scale a matrix, one a row. */
static void test_fp8_weights(void **state)
{
    (void)state;
    check_tiny("fp8-blocks");
    check_tiny("fp8-tensor");
    check_tiny("fp8-channel");
}

/* A trained model with MLA and experts, which lies beside a checkout only. */
static const char deepseek[] = "../shared/models/shakespeare-deepseek-8m";
static const char deepseek_ref[] = "../shared/reference/shakespeare-deepseek-8m.json";

static void test_deepseek(void **state)
{
    (void)state;
    if (access(deepseek_ref, R_OK) != 0) {
        skip();
    }
    check_model(deepseek, deepseek_ref);
}

/* The cuda engine refuses them. */
static void test_fp8_latents(void **state)
{
    (void)state;
    if (bt_conf_env("BT_GOLDEN_ENGINE")) {
        skip();
    }
    fp8_latents = true;
    check_tiny("deepseek-v2");
    if (access(deepseek_ref, R_OK) == 0) {
        check_model(deepseek, deepseek_ref);
    }
    fp8_latents = false;
}

static void test_bf16_mlp(void **state)
{
    if (bt_conf_env("BT_GOLDEN_ENGINE")) {
        skip(); /* the CPU's setting */
    }
    bf16_mlp = true;
    test_draft(state);
    if (has_bf16) { /* without such products all results are those of above */
        test_llama(state);
        test_mistral(state);
        test_llama31(state);
        test_qwen2(state);
        test_qwen3(state);
        test_deepseek_v3(state);
        test_experts(state);
        test_gpt2(state);
    }
    bf16_mlp = false;
}

/* A model that is not in the repository. */
static void test_named(void **state)
{
    (void)state;
    const char *model = bt_conf_env("BT_GOLDEN_MODEL"), *ref = bt_conf_env("BT_GOLDEN_REF");
    assert_non_null(ref);
    check_model(model, ref);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama),       cmocka_unit_test(test_draft),
        cmocka_unit_test(test_mistral),     cmocka_unit_test(test_llama31),
        cmocka_unit_test(test_qwen2),       cmocka_unit_test(test_qwen3),
        cmocka_unit_test(test_deepseek_v2), cmocka_unit_test(test_deepseek_v3),
        cmocka_unit_test(test_experts),     cmocka_unit_test(test_gpt2),
        cmocka_unit_test(test_yarn),        cmocka_unit_test(test_fp8_weights),
        cmocka_unit_test(test_deepseek),    cmocka_unit_test(test_fp8_latents),
        cmocka_unit_test(test_bf16_mlp),
    };
    const struct CMUnitTest named[] = {cmocka_unit_test(test_named)};
    if (bt_conf_env("BT_GOLDEN_MODEL")) {
        return cmocka_run_group_tests(named, NULL, NULL);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
