/* dola_layers: which layers "low" and "high" are in models of different depth, as transformers has
 * them. Bad values are in test_front_input.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "conductor/front/front_contrast.h"
#include "conductor/front/front_parse.h"

static struct bt_model_config config;
static const struct bt_front_model model = {.config = &config};

static bool take(const char *body, struct bt_gen_spec *spec, struct bt_front_error *e)
{
    json_t *root = json_loads(body, 0, NULL);
    assert_non_null(root);
    *spec = (struct bt_gen_spec){.sampling = {.temperature = 1, .top_p = 1}};
    *e = (struct bt_front_error){0};
    spec->sampling.top_k = (uint32_t)json_integer_value(json_object_get(root, "top_k"));
    uint32_t n = (uint32_t)json_integer_value(json_object_get(root, "n"));
    bool ok = bt_front_take_contrast(&model, root, n, spec, e);
    json_decref(root);
    return ok;
}

static const struct {
    uint32_t layers;
    bool tied;
    const char *value;
    uint32_t n;
    uint16_t want[12];
} buckets[] = {
    {6, true, "\"low\"", 1, {2}},
    {6, false, "\"low\"", 2, {0, 2}},
    {6, true, "\"high\"", 2, {3, 5}},
    {4, true, "\"low\"", 1, {2}},
    {2, true, "\"low\"", 1, {1}},
    {2, true, "\"high\"", 1, {1}},
    {1, true, "\"low\"", 1, {0}},
    {1, false, "\"high\"", 1, {0}},
    {3, true, "\"low\"", 1, {2}},
    {32, true, "\"low\"", 7, {2, 4, 6, 8, 10, 12, 14}},
    {32, false, "\"low\"", 8, {0, 2, 4, 6, 8, 10, 12, 14}},
    {32, false, "\"high\"", 8, {16, 18, 20, 22, 24, 26, 28, 30}},
    {40, false, "\"high\"", 10, {20, 22, 24, 26, 28, 30, 32, 34, 36, 38}},
    {61, false, "\"low\"", 10, {0, 2, 4, 6, 8, 10, 12, 14, 16, 18}},
    {61, false, "\"high\"", 10, {41, 43, 45, 47, 49, 51, 53, 55, 57, 59}},
    {61, true, "\"low\"", 9, {2, 4, 6, 8, 10, 12, 14, 16, 18}},
    {61, true, "[60, 0, 3]", 3, {60, 0, 3}},
    {6, true, "null", 0, {0}},
};

static void test_buckets(void **state)
{
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(buckets); i++) {
        struct bt_gen_spec s;
        struct bt_front_error e;
        char body[64];
        config = (struct bt_model_config){.layers = buckets[i].layers,
                                          .tie_embeddings = buckets[i].tied};
        snprintf(body, sizeof(body), "{\"dola_layers\": %s}", buckets[i].value);
        assert_true(take(body, &s, &e));
        assert_int_equal(s.sampling.n_dola, buckets[i].n);
        assert_memory_equal(s.sampling.dola, buckets[i].want,
                            buckets[i].n * sizeof(buckets[i].want[0]));
    }
}

static const struct {
    const char *body, *param;
} clashes[] = {
    {"{\"penalty_alpha\": 0.6}", "top_k"},
    {"{\"penalty_alpha\": 0.6, \"top_k\": 1}", "top_k"},
    {"{\"penalty_alpha\": 0.6, \"top_k\": 17}", "top_k"},
    {"{\"penalty_alpha\": 1.1, \"top_k\": 4}", "penalty_alpha"},
    {"{\"penalty_alpha\": -0.1, \"top_k\": 4}", "penalty_alpha"},
    {"{\"penalty_alpha\": \"0.5\", \"top_k\": 4}", "penalty_alpha"},
    {"{\"penalty_alpha\": 0.6, \"top_k\": 4, \"temperature\": 0.5}", "temperature"},
    {"{\"penalty_alpha\": 0.6, \"top_k\": 4, \"top_p\": 0.5}", "top_p"},
    {"{\"penalty_alpha\": 0.6, \"top_k\": 4, \"min_p\": 0.5}", "min_p"},
    {"{\"penalty_alpha\": 0.6, \"top_k\": 4, \"typical_p\": 0.5}", "typical_p"},
    {"{\"penalty_alpha\": 0.6, \"top_k\": 4, \"xtc_probability\": 0.5}", "xtc_probability"},
    {"{\"penalty_alpha\": 0.6, \"top_k\": 4, \"n\": 2}", "n"},
    {"{\"penalty_alpha\": 0.6, \"top_k\": 4, \"dola_layers\": \"low\"}", "dola_layers"},
    {"{\"penalty_alpha\": 0.6, \"top_k\": 4, \"use_beam_search\": true}", "use_beam_search"},
    {"{\"dola_layers\": \"low\", \"use_beam_search\": true}", "use_beam_search"},
};

static void test_clashes(void **state)
{
    (void)state;
    config = (struct bt_model_config){.layers = 6};
    for (size_t i = 0; i < BT_ARRAY_LEN(clashes); i++) {
        struct bt_gen_spec s;
        struct bt_front_error e;
        assert_false(take(clashes[i].body, &s, &e));
        assert_int_equal(e.http, 400);
        assert_string_equal(e.param, clashes[i].param);
    }
}

static void test_contrastive(void **state)
{
    (void)state;
    struct bt_gen_spec s;
    struct bt_front_error e;
    config = (struct bt_model_config){.layers = 6};
    assert_true(take("{\"penalty_alpha\": 0.6, \"top_k\": 4, \"temperature\": 0, \"top_p\": 1.0, "
                     "\"min_p\": null, \"use_beam_search\": false}",
                     &s, &e));
    assert_true(s.sampling.penalty_alpha == 0.6f && s.sampling.temperature == 0 && s.no_cache);
    assert_true(take("{\"penalty_alpha\": 0, \"temperature\": 0.5, \"n\": 2}", &s, &e));
    assert_true(s.sampling.penalty_alpha == 0 && s.sampling.temperature == 1 && !s.no_cache);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buckets),
        cmocka_unit_test(test_clashes),
        cmocka_unit_test(test_contrastive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
