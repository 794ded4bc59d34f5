/* The simulator's presets against what their costs were fitted to, and plans of models with experts
 * and latents. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "conductor/sim/cluster.h"
#include "conductor/sim/plan.h"

static struct bt_sim_cluster load(const char *name)
{
    struct bt_sim_cluster c;
    char err[256];
    if (bt_sim_cluster_load(name, &c, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    return c;
}

static void near_ms(const char *what, double ns, double ms, double share)
{
    print_message("%s: %.2f ms, measured %.2f\n", what, 1e-6 * ns, ms);
    assert_true(fabs(1e-6 * ns / ms - 1) < share);
}

static double rows_ns(const struct bt_sim_cluster *c, double rows, double context)
{
    struct bt_batch_work w = {.tokens = rows, .kv = rows * context};
    return bt_batch_work_ns(&c->decode, &w);
}

/* Steps of the GPU engine, and the other presets' parts (docs/SIMULATION.md says which). */
static void test_measured(void **state)
{
    (void)state;
    struct bt_sim_cluster q = load("h200-qwen3-30b"), l = load("h200-8b");
    near_ms("Qwen3-30B-A3B, 1 row", rows_ns(&q, 1, 1024), 3.47, 0.03);
    near_ms("Qwen3-30B-A3B, 8 rows", rows_ns(&q, 8, 1024), 8.62, 0.03);
    near_ms("Qwen3-30B-A3B, 64 rows", rows_ns(&q, 64, 1024), 18.10, 0.03);
    near_ms("Qwen3-30B-A3B, 8k", bt_batch_prefill_ns(&q.prefill, 0, 8192, 8192), 138, 0.03);
    near_ms("Llama-3-8B, 64 rows", rows_ns(&l, 64, 1024), 8.25, 0.03);
    near_ms("Llama-3-8B, 8k", bt_batch_prefill_ns(&l.prefill, 0, 8192, 8192), 212.6, 0.03);
    struct bt_sim_cluster v = load("h200-v2-lite");
    static const double rows[] = {1, 8, 32}, us[] = {33.5, 152.9, 262.1};
    for (int i = 0; i < 3; i++) { /* 26 layers of experts, less what a launch takes */
        double ns = bt_batch_experts_ns(&v.decode, rows[i]);
        near_ms("V2-Lite, experts", ns, 26e-3 * us[i], i == 0 ? 0.3 : 0.06);
    }
}

/* What a preset and the model's own numbers must agree on: the plan counts them from config.json.
 */
static void test_every_preset(void **state)
{
    (void)state;
    uint32_t n = 0;
    for (const char *name; (name = bt_sim_cluster_preset(n)) != NULL; n++) {
        struct bt_sim_cluster c = load(name);
        assert_non_null(strstr(bt_sim_cluster_names, name));
        assert_true(c.prefill.missed == c.decode.missed && c.decode.missed < 1);
        assert_true((c.decode.experts_ns > 0) == (c.decode.missed > 0));
        assert_true(c.cache_tokens >= BT_SIM_BLOCK_TOKENS && c.kv_tokens > 100e3);
        assert_int_equal(bt_sim_cluster_gpus(name),
                         strncmp(name, "a800", 4) == 0 || strstr(name, "x8") != NULL ? 8 : 1);
    }
    assert_int_equal(n, 5);
}

/* A model of experts and latents: one row reads a part of the experts, many rows all of them. */
static void test_plan_of_experts(void **state)
{
    (void)state;
    struct bt_sim_cluster c;
    char err[256];
    uint32_t gpus;
    assert_int_equal(bt_sim_plan_instance("tests/golden/models/tiny-deepseek-v3", "h200", &c, &gpus,
                                          err, sizeof(err)),
                     BT_OK);
    assert_int_equal(gpus, 1);
    assert_true(c.decode.experts_ns > 0 && c.decode.missed > 0 && c.decode.missed < 1);
    assert_true(c.prefill.experts_ns == 0); /* read while it computes */
    assert_true(rows_ns(&c, 1, 0) < rows_ns(&c, 2, 0));
    assert_int_equal(bt_sim_plan_instance("tests/golden/models/tiny-llama31", "h200", &c, &gpus,
                                          err, sizeof(err)),
                     BT_OK);
    assert_true(c.decode.experts_ns == 0 && c.decode.missed == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_measured),
        cmocka_unit_test(test_every_preset),
        cmocka_unit_test(test_plan_of_experts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
