/* model.quantize: fp8 on the cuda engine beside the CPU engine with the same setting, which
 * computes with the same rounded weights and does not round activations to fp8. Runs on a GPU (make
 * check-gpu); unit/test_cuda_fp8 runs it without one. */
#include "tests/golden/drive.h"

#include <jansson.h>
#include <math.h>
#include <unistd.h>

#define MODEL "deploy/models/shakespeare-llama-6m"
#define N_NEW 12
#define MOST  300

/* Logprobs of the tokens that the CPU engine finds likeliest, after the prompt and after each of
 * the tokens that it draws. */
struct course {
    struct bt_engine_out out[N_NEW];
};

/* The beginning of the reference's longest but one prompt. */
static void prompt_of(uint32_t n, uint32_t *tokens)
{
    json_t *cases = json_load_file("tests/golden/shakespeare-llama-6m.json", 0, NULL);
    const json_t *ids = json_object_get(json_array_get(cases, 4), "prompt_ids");
    assert_true(json_array_size(ids) >= n);
    for (uint32_t i = 0; i < n; i++) {
        tokens[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
    }
    json_decref(cases);
}

/* tokens: the prompt and what follows; follow: they are given, else the engine draws them. chunk:
 * tokens of the prompt in one step. */
static void run(struct drive *d, uint32_t slot, uint32_t *tokens, uint32_t n, uint32_t chunk,
                bool follow, struct course *c)
{
    const struct bt_engine_params p = drive_greedy(BT_ENGINE_MAX_TOP);
    drive_slot(d, slot, &p, tokens, n, N_NEW);
    c->out[0] = drive_prefill(d, slot, tokens, 0, n, chunk);
    for (uint32_t i = 1; i < N_NEW; i++) {
        if (!follow) {
            tokens[n + i - 1] = c->out[i - 1].token;
        }
        c->out[i] = drive_prefill(d, slot, tokens, n + i - 1, n + i, 1);
    }
}

static double logprob(const struct bt_engine_out *o, uint32_t id)
{
    for (uint32_t i = 0; i < o->n_top; i++) {
        if (o->top_id[i] == id) {
            return o->top_logprob[i];
        }
    }
    return o->top_logprob[o->n_top - 1];
}

/* Largest difference of the five likeliest tokens' logprobs; the mean in *mean. */
static double differ(const struct course *x, const struct course *y, double *mean)
{
    double worst = 0, sum = 0;
    for (int i = 0; i < N_NEW; i++) {
        assert_false(x->out[i].bad || y->out[i].bad);
        for (int k = 0; k < 5; k++) {
            double diff = fabs(x->out[i].top_logprob[k] - logprob(&y->out[i], x->out[i].top_id[k]));
            worst = fmax(worst, diff);
            sum += diff / (5 * N_NEW);
        }
    }
    *mean = sum;
    return worst;
}

/* Chunks of up to 32 rows read activations in f16, longer ones in e4m3. */
static void test_same_model(void **state)
{
    (void)state;
    static const struct {
        uint32_t n, chunk;
        double worst, mean;
    } cases[] = {{7, 7, 0.06, 0.02}, {30, 30, 0.06, 0.02}, {300, 25, 0.06, 0.02},
                 {60, 60, 2, 0.3},   {120, 120, 2, 0.3},   {300, 300, 2, 0.3}};
    struct drive cpu, gpu;
    const struct bt_engine_vtable *vt;
    char err[1024];
    if (bt_engine_load("cpu", &vt, err, sizeof(err)) != BT_OK) { /* a bundle for GPUs lacks it */
        printf("# SKIP no CPU engine to compare with: %s\n", err);
        skip();
    }
    drive_quantize = "fp8";
    drive_open(&cpu, "cpu", MODEL, 16);
    drive_open(&gpu, "cuda", MODEL, 16);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        uint32_t tokens[MOST + N_NEW];
        struct course want, got;
        double mean;
        prompt_of(cases[i].n, tokens);
        run(&cpu, i, tokens, cases[i].n, cases[i].chunk, false, &want);
        run(&gpu, i, tokens, cases[i].n, cases[i].chunk, true, &got);
        double worst = differ(&want, &got, &mean);
        printf("# %u tokens in chunks of %u: largest difference %.4f, mean %.4f\n", cases[i].n,
               cases[i].chunk, worst, mean);
        assert_true(worst < cases[i].worst && mean < cases[i].mean);
    }
    drive_close(&gpu);
    drive_close(&cpu);
}

/* Latent attention, experts, a shared one. Up to 24 rows no activation is rounded: experts round
 * theirs where they have more than eight rows each, three of nine for a row. */
static void test_experts(void **state)
{
    (void)state;
    static const struct {
        uint32_t n, chunk;
        double worst, mean;
    } cases[] = {{7, 7, 0.25, 0.03}, {300, 20, 0.25, 0.03}, {60, 60, 2, 0.3}, {300, 300, 2, 0.3}};
    const char *model = "../shared/models/shakespeare-deepseek-8m"; /* beside a checkout only */
    const struct bt_engine_vtable *vt;
    struct drive cpu, gpu;
    struct course want, got;
    uint32_t tokens[MOST + N_NEW];
    char err[1024];
    double mean;
    if (access(model, R_OK) != 0) {
        print_message("# left out: %s is not there\n", model);
        skip();
    }
    if (bt_engine_load("cpu", &vt, err, sizeof(err)) != BT_OK) { /* a bundle for GPUs lacks it */
        print_message("# left out: no CPU engine to compare with: %s\n", err);
        skip();
    }
    drive_quantize = "fp8";
    drive_open(&cpu, "cpu", model, 64);
    drive_open(&gpu, "cuda", model, 64);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        prompt_of(cases[i].n, tokens);
        run(&cpu, i, tokens, cases[i].n, cases[i].chunk, false, &want);
        run(&gpu, i, tokens, cases[i].n, cases[i].chunk, true, &got);
        double worst = differ(&want, &got, &mean);
        printf("# latents and experts, %u tokens in chunks of %u: largest difference %.4f, mean "
               "%.4f\n",
               cases[i].n, cases[i].chunk, worst, mean);
        assert_true(worst < cases[i].worst && mean < cases[i].mean);
    }
    drive_close(&gpu);
    drive_close(&cpu);
}

/* The rounded model is another one, and near the first. */
static void test_rounded(void **state)
{
    (void)state;
    struct course as_is, rounded;
    uint32_t tokens[MOST + N_NEW];
    double mean;
    prompt_of(100, tokens);
    for (int i = 0; i < 2; i++) {
        struct drive d;
        drive_quantize = i ? "fp8" : NULL;
        drive_open(&d, "cuda", MODEL, 16);
        run(&d, 0, tokens, 100, 25, i == 1, i ? &rounded : &as_is);
        drive_close(&d);
    }
    double worst = differ(&as_is, &rounded, &mean);
    printf("# fp8 weights move logprobs by up to %.4f, mean %.4f\n", worst, mean);
    assert_true(mean > 0.02 && mean < 0.4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_model),
                                       cmocka_unit_test(test_experts),
                                       cmocka_unit_test(test_rounded)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
