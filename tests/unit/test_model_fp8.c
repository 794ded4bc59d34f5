/* fp8 checkpoints: quantization_config in its forms, what it refuses, scales of blocks with ragged
 * edges, of rows and of whole matrices, and every fp8 number. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/engine/model_fp8.h"
#include "common/engine/safetensors.h"

static char dir[64];
static char err[1024];

static int setup(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/baton-test-fp8-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    char *config = bt_sprintf("%s/config.json", dir);
    char *weights = bt_sprintf("%s/model.safetensors", dir);
    unlink(config);
    unlink(weights);
    free(config);
    free(weights);
    return rmdir(dir);
}

static FILE *create(const char *name)
{
    char *path = bt_sprintf("%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    free(path);
    assert_non_null(f);
    return f;
}

/* ---- quantization_config ---- */

static bt_status_t load(const char *quant, struct bt_model_fp8 **q)
{
    FILE *f = create("config.json");
    fprintf(f, "{\"quantization_config\":%s}", quant);
    assert_int_equal(fclose(f), 0);
    err[0] = 0;
    return bt_model_fp8_load(dir, q, err, sizeof(err));
}

static const struct bt_fp8_form *of_layer(const struct bt_model_fp8 *q, const char *name)
{
    return bt_model_fp8_form(q, name, BT_FP8_OF_LAYER);
}

static void test_none(void **state)
{
    (void)state;
    struct bt_model_fp8 *q;
    assert_int_equal(load("null", &q), BT_OK);
    assert_null(q);
    assert_null(of_layer(q, "model.layers.0.mlp.up_proj.weight"));
    bt_model_fp8_destroy(q);
}

static void test_blocks(void **state)
{
    (void)state;
    struct bt_model_fp8 *q;
    assert_int_equal(load("{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"activation_scheme\":"
                          "\"dynamic\",\"weight_block_size\":[64,128],\"modules_to_not_convert\":"
                          "[\"model.layers.1\",\"q_a_proj\"]}",
                          &q),
                     BT_OK);
    const struct bt_fp8_form *f = of_layer(q, "model.layers.10.mlp.up_proj.weight");
    assert_non_null(f);
    assert_int_equal(f->block_rows, 64);
    assert_int_equal(f->block_cols, 128);
    assert_null(of_layer(q, "model.layers.1.mlp.up_proj.weight"));
    assert_null(of_layer(q, "model.layers.2.self_attn.q_a_proj.weight"));
    assert_non_null(of_layer(q, "model.layers.2.self_attn.kq_a_proj.weight"));
    assert_null(of_layer(q, "model.layers.2.self_attn.q_proj.bias"));
    assert_null(bt_model_fp8_form(q, "lm_head.weight", BT_FP8_OF_HEAD));
    assert_null(bt_model_fp8_form(q, "model.layers.2.mlp.gate.weight", BT_FP8_OF_ROUTER));
    bt_model_fp8_destroy(q);
}

static void test_whole(void **state)
{
    (void)state;
    struct bt_model_fp8 *q;
    assert_int_equal(load("{\"quant_method\":\"fp8\",\"activation_scheme\":\"static\","
                          "\"ignored_layers\":[\"lm_head\"]}",
                          &q),
                     BT_OK);
    assert_int_equal(of_layer(q, "a.weight")->block_rows, UINT32_MAX);
    assert_int_equal(of_layer(q, "a.weight")->block_cols, UINT32_MAX);
    bt_model_fp8_destroy(q);
}

#define GROUP(WEIGHTS)                                                                             \
    "\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"],\"weights\":{\"num_bits\":8,"        \
    "\"type\":\"float\",\"symmetric\":true,\"dynamic\":false," WEIGHTS                             \
    "},\"input_activations\":{\"dynamic\":true}}}"

static void test_compressed(void **state)
{
    (void)state;
    struct bt_model_fp8 *q;
    assert_int_equal(
        load("{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\"," GROUP(
                 "\"strategy\":\"channel\"") ",\"ignore\":[\"lm_head\",\"re:.*mlp.gate$\"]}",
             &q),
        BT_OK);
    assert_int_equal(of_layer(q, "a.weight")->block_rows, 1);
    assert_int_equal(of_layer(q, "a.weight")->block_cols, UINT32_MAX);
    assert_null(bt_model_fp8_form(q, "lm_head.weight", BT_FP8_OF_HEAD));
    assert_null(bt_model_fp8_form(q, "model.layers.2.mlp.gate.weight", BT_FP8_OF_ROUTER));
    assert_non_null(of_layer(q, "model.layers.2.mlp.gate_proj.weight"));
    assert_null(bt_model_fp8_form(q, "model.embed_tokens.weight", BT_FP8_OF_NONE));
    bt_model_fp8_destroy(q);
    assert_int_equal(
        load("{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\"," GROUP(
                 "\"strategy\":\"block\",\"block_structure\":[128,32]") "}",
             &q),
        BT_OK);
    assert_int_equal(of_layer(q, "a.weight")->block_cols, 32);
    assert_non_null(bt_model_fp8_form(q, "lm_head.weight", BT_FP8_OF_HEAD));
    bt_model_fp8_destroy(q);
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *quant, *names;
        bt_status_t status;
    } cases[] = {
        {"7", "must be an object", BT_ERR_INVALID},
        {"{}", "quant_method", BT_ERR_UNSUPPORTED},
        {"{\"quant_method\":\"awq\"}", "awq", BT_ERR_UNSUPPORTED},
        {"{\"quant_method\":\"fp8\",\"fmt\":\"e5m2\"}", "fmt", BT_ERR_UNSUPPORTED},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128]}", "weight_block_size",
         BT_ERR_INVALID},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[0,128]}", "weight_block_size",
         BT_ERR_INVALID},
        {"{\"quant_method\":\"fp8\",\"ignored_layers\":\"lm_head\"}", "ignored_layers",
         BT_ERR_INVALID},
        {"{\"quant_method\":\"fp8\",\"ignored_layers\":[3]}", "ignored_layers", BT_ERR_INVALID},
        {"{\"quant_method\":\"fp8\",\"rotation\":\"hadamard\"}", "rotation", BT_ERR_UNSUPPORTED},
        {"{\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\"}", "format",
         BT_ERR_UNSUPPORTED},
        {"{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\","
         "\"config_groups\":{\"a\":{},\"b\":{}}}",
         "one group", BT_ERR_UNSUPPORTED},
        {"{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\"," GROUP(
             "\"strategy\":\"group\"") "}",
         "strategy", BT_ERR_UNSUPPORTED},
        {"{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\"," GROUP(
             "\"strategy\":\"tensor\",\"zero_point\":true") "}",
         "zero_point", BT_ERR_UNSUPPORTED},
        {"{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\"," GROUP(
             "\"strategy\":\"tensor\"") ",\"kv_cache_scheme\":{\"num_bits\":8}}",
         "kv_cache_scheme", BT_ERR_UNSUPPORTED},
        {"{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\"," GROUP(
             "\"strategy\":\"tensor\"") ",\"ignore\":[\"re:(\"]}",
         "regular expression", BT_ERR_INVALID},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        struct bt_model_fp8 *q = NULL;
        bt_status_t st = load(cases[i].quant, &q);
        if (st != cases[i].status || !strstr(err, cases[i].names) || !strstr(err, "config.json")) {
            fail_msg("%s: %s: %s", cases[i].quant, bt_status_name(st), err);
        }
        assert_null(q);
    }
}

/* ---- values ---- */

#define ROWS 5
#define COLS 300

/* A matrix w of F8 [ROWS, COLS] with n scales of f32 in the shape given as text. */
static void put_matrix(const char *scale_name, const char *shape, const float *scales, uint32_t n)
{
    uint8_t values[ROWS * COLS];
    for (uint32_t i = 0; i < sizeof(values); i++) {
        values[i] = (uint8_t)(i * 7);
    }
    char *header = bt_sprintf(
        "{\"w.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[%d,%d],\"data_offsets\":[0,%d]},"
        "\"%s\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[%d,%d]}}",
        ROWS, COLS, ROWS * COLS, scale_name, shape, ROWS * COLS, ROWS * COLS + (int)n * 4);
    uint64_t len = strlen(header);
    FILE *f = create("model.safetensors");
    fwrite(&len, 1, 8, f);
    fwrite(header, 1, len, f);
    fwrite(values, 1, sizeof(values), f);
    fwrite(scales, 4, n, f);
    assert_int_equal(fclose(f), 0);
    free(header);
}

static bt_status_t want(const struct bt_fp8_form *form, struct bt_weights **w,
                        const struct bt_tensor **t)
{
    const struct bt_weights_wish wish = {.name = "w.weight",
                                         .rows = ROWS,
                                         .cols = COLS,
                                         .fp8 = form,
                                         .dir = dir,
                                         .architecture = "X"};
    assert_int_equal(bt_weights_open(dir, w, err, sizeof(err)), BT_OK);
    return bt_weights_want(*w, &wish, t, err, sizeof(err));
}

/* By the definition of the format, digit by digit. */
static float decoded(uint8_t b)
{
    int sign = b >> 7, e = b >> 3 & 15, m = b & 7;
    float v = e ? (1 + (float)m / 8) * powf(2, (float)e - 7) : (float)m / 8 * powf(2, -6);
    return (b & 0x7f) == 0x7f ? NAN : sign ? -v : v;
}

static void check_values(const struct bt_fp8_form *form, const char *name, const char *shape,
                         uint32_t n)
{
    float scales[64];
    struct bt_weights *w;
    const struct bt_tensor *t;
    for (uint32_t i = 0; i < n; i++) {
        scales[i] = 0.37f * (float)(i + 1);
    }
    put_matrix(name, shape, scales, n);
    if (want(form, &w, &t) != BT_OK) {
        fail_msg("%s", err);
    }
    uint32_t rows = BT_MIN(form->block_rows, ROWS), cols = BT_MIN(form->block_cols, COLS);
    uint32_t across = BT_DIV_UP(COLS, cols), from = 123;
    float got[ROWS * COLS];
    bt_tensor_values(t, from, ROWS * COLS - from, BT_TENSOR_F32, got);
    for (uint32_t i = from; i < ROWS * COLS; i++) {
        float v = decoded((uint8_t)(i * 7)) * scales[i / COLS / rows * across + i % COLS / cols];
        assert_true(got[i - from] == v || (isnan(v) && isnan(got[i - from])));
    }
    bt_weights_close(w);
}

static void test_values(void **state)
{
    (void)state;
    check_values(&(struct bt_fp8_form){2, 128}, "w.weight_scale_inv", "[3,3]", 9);
    check_values(&(struct bt_fp8_form){128, 128}, "w.weight_scale_inv", "[1,3]", 3);
    check_values(&(struct bt_fp8_form){1, UINT32_MAX}, "w.weight_scale", "[5,1]", 5);
    check_values(&(struct bt_fp8_form){1, UINT32_MAX}, "w.weight_scale", "[5]", 5);
    check_values(&(struct bt_fp8_form){UINT32_MAX, UINT32_MAX}, "w.weight_scale", "[]", 1);
    check_values(&(struct bt_fp8_form){UINT32_MAX, UINT32_MAX}, "w.weight_scale", "[1]", 1);
}

static void expect_bad(const struct bt_fp8_form *form, bt_status_t status, const char *text)
{
    struct bt_weights *w;
    const struct bt_tensor *t;
    bt_status_t st = want(form, &w, &t);
    if (st != status || !strstr(err, text) || !strstr(err, "w.weight")) {
        fail_msg("%s: %s", bt_status_name(st), err);
    }
    bt_weights_close(w);
}

static void test_bad_scales(void **state)
{
    (void)state;
    float scales[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    const struct bt_fp8_form blocks = {2, 128};
    put_matrix("w.weight_scale_inv", "[3,3]", scales, 9);
    expect_bad(NULL, BT_ERR_UNSUPPORTED, "not fp8");
    put_matrix("w.weight_scale_inv", "[9]", scales, 9);
    expect_bad(&blocks, BT_ERR_INVALID, "3 x 3 scales");
    put_matrix("w.weight_scale_inv", "[2,3]", scales, 6);
    expect_bad(&blocks, BT_ERR_INVALID, "3 x 3 scales");
    put_matrix("w.input_scale", "[]", scales, 1);
    expect_bad(&blocks, BT_ERR_INVALID, "_scale_inv");
    scales[4] = INFINITY;
    put_matrix("w.weight_scale_inv", "[3,3]", scales, 9);
    expect_bad(&blocks, BT_ERR_INVALID, "scale 4 is not a finite number");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_none),       cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_whole),      cmocka_unit_test(test_compressed),
        cmocka_unit_test(test_refused),    cmocka_unit_test(test_values),
        cmocka_unit_test(test_bad_scales),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
