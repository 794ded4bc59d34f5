/* The same model in other files gives the same logprobs: f32 and f16 tensors, shards, a head of its
 * own, fp8 beside model.quantize; random weights of a shape ("dummy"). The files are made from the
 * shipped draft model. */
#include "tests/golden/drive.h"

#include <jansson.h>
#include <math.h>
#include <unistd.h>

#include "common/engine/decoder.h"
#include "common/engine/fp8.h"
#include "common/engine/model_config.h"

#define MODEL "deploy/models/shakespeare-draft-1m"
#define N_NEW 12

static char dir[64];
static json_t *header; /* of the shipped weights */
static uint8_t *data;
static size_t data_bytes;
static struct bt_engine_out expect[N_NEW];
static const uint32_t prompt[] = {5, 99, 1023, 17, 256, 31, 31, 8, 700, 1500, 2, 64, 900};

enum form { AS_IS, AS_F32, AS_F16, AS_FP8 }; /* FP8: matrices of layers, in blocks of 128 x 128 */

static void read_file(const char *path, uint8_t **p, size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    *n = (size_t)ftell(f);
    rewind(f);
    *p = malloc(*n);
    assert_int_equal(fread(*p, 1, *n, f), *n);
    fclose(f);
}

static FILE *create(const char *name)
{
    char path[160];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    return f;
}

static void put_json(const char *name, json_t *o)
{
    FILE *f = create(name);
    assert_int_equal(json_dumpf(o, f, 0), 0);
    fclose(f);
    json_decref(o);
}

/* config.json of the model with one field replaced (name NULL: as it is). */
static void put_config(const char *name, json_t *value)
{
    json_t *c = json_load_file(MODEL "/config.json", 0, NULL);
    if (name) {
        json_object_set_new(c, name, value);
    }
    put_json("config.json", c);
}

static size_t convert(const uint8_t *from, size_t bytes, enum form form, uint8_t *to)
{
    bool same = form == AS_IS || form == AS_FP8;
    for (size_t i = 0; !same && i < bytes / 2; i++) {
        uint32_t u = ((uint32_t)from[2 * i] | (uint32_t)from[2 * i + 1] << 8) << 16;
        float f;
        memcpy(&f, &u, 4);
        _Float16 h = (_Float16)f;
        memcpy(to + i * (form == AS_F32 ? 4 : 2), form == AS_F32 ? (void *)&u : (void *)&h,
               form == AS_F32 ? 4 : 2);
    }
    if (same) {
        memcpy(to, from, bytes);
    }
    return form == AS_F32 ? bytes * 2 : bytes;
}

static float bf16_value(const uint8_t *from)
{
    uint32_t u = ((uint32_t)from[0] | (uint32_t)from[1] << 8) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static void add_tensor(json_t *out, const char *name, const char *dtype, uint32_t rows,
                       uint32_t cols, size_t at, size_t bytes)
{
    json_object_set_new(out, name,
                        json_pack("{s:s, s:[i,i], s:[I,I]}", "dtype", dtype, "shape", (int)rows,
                                  (int)cols, "data_offsets", (json_int_t)at,
                                  (json_int_t)(at + bytes)));
}

/* A matrix of bf16 as e4m3, and its scales; returns the bytes of both. */
static size_t put_fp8(json_t *out, const char *name, const json_t *shape, const uint8_t *from,
                      uint8_t *to, size_t at)
{
    uint32_t rows = (uint32_t)json_integer_value(json_array_get(shape, 0));
    uint32_t cols = (uint32_t)json_integer_value(json_array_get(shape, 1));
    uint32_t down = BT_DIV_UP(rows, 128), across = BT_DIV_UP(cols, 128);
    size_t n = (size_t)rows * cols, scales = (size_t)down * across * 4;
    float *w = malloc(n * sizeof(*w)), *scale = malloc(scales);
    char scale_name[160];
    for (size_t i = 0; i < n; i++) {
        w[i] = bf16_value(from + 2 * i);
    }
    assert_true(bt_fp8_quantize(w, rows, cols, to, scale));
    memcpy(to + n, scale, scales);
    snprintf(scale_name, sizeof(scale_name), "%s_scale_inv", name);
    add_tensor(out, name, "F8_E4M3", rows, cols, at, n);
    add_tensor(out, scale_name, "F32", down, across, at + n, scales);
    free(w);
    free(scale);
    return n + scales;
}

/* Writes the tensors whose number is `part` modulo `parts`, and, if asked, the embedding again as
 * the head. map gets their names for the index. */
static void put_weights(const char *name, enum form form, int part, int parts, bool head,
                        json_t *map)
{
    json_t *out = json_object();
    uint8_t *bytes = malloc(3 * data_bytes);
    size_t at = 0;
    int i = 0;
    const char *key;
    json_t *t;
    json_object_foreach(header, key, t)
    {
        if (strcmp(key, "__metadata__") == 0 || i++ % parts != part) {
            continue;
        }
        json_t *offs = json_object_get(t, "data_offsets");
        size_t from = (size_t)json_integer_value(json_array_get(offs, 0));
        size_t n = (size_t)json_integer_value(json_array_get(offs, 1)) - from;
        bool twice = head && strcmp(key, "model.embed_tokens.weight") == 0;
        if (form == AS_FP8 && strstr(key, "_proj.weight")) {
            at += put_fp8(out, key, json_object_get(t, "shape"), data + from, bytes + at, at);
            continue;
        }
        for (int k = 0; k <= twice; k++) {
            size_t size = convert(data + from, n, form, bytes + at);
            json_t *e = json_pack("{s:s, s:O, s:[I,I]}", "dtype",
                                  form == AS_F32   ? "F32"
                                  : form == AS_F16 ? "F16"
                                                   : "BF16",
                                  "shape", json_object_get(t, "shape"), "data_offsets",
                                  (json_int_t)at, (json_int_t)(at + size));
            json_object_set_new(out, k ? "lm_head.weight" : key, e);
            if (map) {
                json_object_set_new(map, key, json_string(name));
            }
            at += size;
        }
    }
    char *text = json_dumps(out, JSON_COMPACT);
    uint64_t len = strlen(text);
    FILE *f = create(name);
    fwrite(&len, 1, 8, f);
    fwrite(text, 1, len, f);
    fwrite(bytes, 1, at, f);
    assert_int_equal(fclose(f), 0);
    free(text);
    free(bytes);
    json_decref(out);
}

static void generate(const char *model, const char *format, struct bt_engine_out *out)
{
    struct drive d;
    drive_open_as(&d, "cpu", model, format, 16);
    const struct bt_engine_params p = drive_greedy(20);
    drive_slot(&d, 0, &p, prompt, BT_ARRAY_LEN(prompt), N_NEW);
    out[0] = drive_prefill(&d, 0, prompt, 0, BT_ARRAY_LEN(prompt), 64);
    for (int i = 1; i < N_NEW; i++) {
        out[i] = drive_decode(&d, 0);
    }
    drive_close(&d);
}

static void check(float tolerance)
{
    struct bt_engine_out got[N_NEW];
    generate(dir, "auto", got);
    for (int i = 0; i < N_NEW; i++) {
        assert_false(got[i].bad);
        assert_int_equal(got[i].token, expect[i].token);
        if (!(fabsf(got[i].logprob - expect[i].logprob) <= tolerance)) {
            fail_msg("token %d: logprob %.7f, expected %.7f", i, got[i].logprob, expect[i].logprob);
        }
    }
}

static int setup(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/baton-test-weights-XXXXXX");
    if (!mkdtemp(dir)) {
        return -1;
    }
    uint8_t *all;
    size_t n;
    uint64_t len;
    read_file(MODEL "/model.safetensors", &all, &n);
    memcpy(&len, all, 8);
    header = json_loadb((char *)all + 8, len, 0, NULL);
    data_bytes = n - 8 - len;
    data = malloc(data_bytes);
    memcpy(data, all + 8 + len, data_bytes);
    free(all);
    generate(MODEL, "auto", expect);
    return header ? 0 : -1;
}

static void clear(void)
{
    static const char *const names[] = {
        "config.json",   "model.safetensors", "model.safetensors.index.json",
        "a.safetensors", "b.safetensors",     "c.safetensors"};
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        char path[160];
        snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
        unlink(path);
    }
}

static int teardown(void **state)
{
    (void)state;
    clear();
    json_decref(header);
    free(data);
    return rmdir(dir);
}

/* Does bf16 not hold most of the weights in `dir`? */
static bool exceeds_bf16(void)
{
    return bt_decoder_exceeds_bf16(&(struct bt_engine_config){.model_dir = dir});
}

static void test_f32(void **state)
{
    (void)state;
    clear();
    put_config("dtype", json_string("float32"));
    put_weights("model.safetensors", AS_F32, 0, 1, false, NULL);
    assert_true(exceeds_bf16());
    check(0); /* the same numbers */
}

static void test_f16(void **state)
{
    (void)state;
    clear();
    put_config("dtype", json_string("float16"));
    put_weights("model.safetensors", AS_F16, 0, 1, false, NULL);
    assert_true(exceeds_bf16());
    check(1e-3f); /* f16 rounds the smallest weights */
}

/* model.quantize makes the numbers and scales of an fp8 checkpoint, and is refused for one. */
static void test_quantize(void **state)
{
    (void)state;
    struct bt_engine_out quantized[N_NEW], got[N_NEW];
    drive_quantize = "fp8";
    generate(MODEL, "auto", quantized);
    drive_quantize = NULL;
    clear();
    put_config("quantization_config", json_pack("{s:s, s:s, s:[i,i]}", "quant_method", "fp8", "fmt",
                                                "e4m3", "weight_block_size", 128, 128));
    put_weights("model.safetensors", AS_FP8, 0, 1, false, NULL);
    assert_false(exceeds_bf16());
    generate(dir, "auto", got);
    uint32_t moved = 0;
    for (int i = 0; i < N_NEW; i++) {
        assert_false(got[i].bad);
        assert_int_equal(got[i].token, quantized[i].token);
        assert_true(got[i].logprob == quantized[i].logprob);
        moved += got[i].token != expect[i].token || got[i].logprob != expect[i].logprob;
    }
    assert_true(moved > 0);
    const struct bt_engine_vtable *vt;
    struct bt_engine *e;
    const struct bt_engine_info *info;
    struct bt_kv_layout layout;
    struct bt_kv_key key;
    char err[1024];
    assert_int_equal(bt_engine_load("cpu", &vt, err, sizeof(err)), BT_OK);
    const struct bt_engine_config c = {.size = sizeof(c),
                                       .model_dir = dir,
                                       .page_tokens = 16,
                                       .max_slots = 1,
                                       .max_rows = 16,
                                       .ranks = 1,
                                       .quantize = "fp8"};
    assert_int_equal(vt->open(&c, &e, &info, err, sizeof(err)), BT_ERR_UNSUPPORTED);
    assert_non_null(strstr(err, "the weights are fp8 already; remove model.quantize"));
    assert_int_equal(bt_model_root_key(dir,
                                       &(struct bt_model_settings){.load_format = "auto",
                                                                   .quantize = "fp8",
                                                                   .block_tokens = 16},
                                       &layout, &key, err, sizeof(err)),
                     BT_ERR_UNSUPPORTED);
    assert_non_null(strstr(err, "remove model.quantize"));
}

static void test_shards(void **state)
{
    (void)state;
    clear();
    put_config(NULL, NULL);
    json_t *map = json_object();
    static const char *const names[] = {"a.safetensors", "b.safetensors", "c.safetensors"};
    for (int i = 0; i < 3; i++) {
        put_weights(names[i], i == 1 ? AS_F32 : AS_IS, i, 3, false, map);
    }
    put_json("model.safetensors.index.json", json_pack("{s:o}", "weight_map", map));
    check(0);
}

static void test_separate_head(void **state)
{
    (void)state;
    clear();
    put_config("tie_word_embeddings", json_false());
    put_weights("model.safetensors", AS_IS, 0, 1, true, NULL);
    check(0);
    clear(); /* and without one, an error that names it */
    put_config("tie_word_embeddings", json_false());
    put_weights("model.safetensors", AS_IS, 0, 1, false, NULL);
    const struct bt_engine_vtable *vt;
    struct bt_engine *e;
    const struct bt_engine_info *info;
    char err[1024];
    assert_int_equal(bt_engine_load("cpu", &vt, err, sizeof(err)), BT_OK);
    const struct bt_engine_config c = {.size = sizeof(c),
                                       .model_dir = dir,
                                       .page_tokens = 16,
                                       .max_slots = 1,
                                       .max_rows = 16,
                                       .ranks = 1};
    assert_int_equal(vt->open(&c, &e, &info, err, sizeof(err)), BT_ERR_INVALID);
    assert_non_null(strstr(err, "lm_head.weight is missing"));
}

/* Random weights need config.json only, and are the same in every process. */
static void test_dummy(void **state)
{
    (void)state;
    clear();
    put_config("vocab_size", json_integer(3000));
    struct bt_engine_out a[N_NEW], b[N_NEW];
    generate(dir, "dummy", a);
    generate(dir, "dummy", b);
    uint32_t kinds = 0;
    for (int i = 0; i < N_NEW; i++) {
        assert_false(a[i].bad);
        assert_int_equal(a[i].token, b[i].token);
        assert_true(a[i].logprob == b[i].logprob && a[i].logprob < 0 && a[i].logprob > -20);
        kinds += i > 0 && a[i].logprob != a[i - 1].logprob;
    }
    assert_true(kinds > 0);
}

/* 27 TB of weights: said before any is made. */
/* Sets the byte at `offset` of a tensor of model.safetensors. */
static void set_byte(const char *name, size_t offset, uint8_t value)
{
    char path[160];
    uint8_t *all;
    size_t n;
    uint64_t len;
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    read_file(path, &all, &n);
    memcpy(&len, all, 8);
    json_t *h = json_loadb((char *)all + 8, len, 0, NULL);
    json_t *offs = json_object_get(json_object_get(h, name), "data_offsets");
    all[8 + len + (size_t)json_integer_value(json_array_get(offs, 0)) + offset] = value;
    FILE *f = create("model.safetensors");
    fwrite(all, 1, n, f);
    assert_int_equal(fclose(f), 0);
    json_decref(h);
    free(all);
}

/* A number of an fp8 matrix that is none, or that is too large with its scale. */
static void test_numbers_that_are_not_finite(void **state)
{
    (void)state;
    static const struct {
        const char *tensor;
        size_t at;
        uint8_t value;
    } cases[] = {{"model.layers.1.mlp.down_proj.weight", 4321, 0x7f},
                 {"model.layers.0.self_attn.k_proj.weight", 0, 0xff},
                 {"model.layers.1.mlp.up_proj.weight_scale_inv", 3, 0x7f}}; /* 1e38 */
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        const struct bt_engine_vtable *vt;
        struct bt_engine *e;
        const struct bt_engine_info *info;
        char err[1024] = "";
        clear();
        put_config("quantization_config", json_pack("{s:s, s:s, s:[i,i]}", "quant_method", "fp8",
                                                    "fmt", "e4m3", "weight_block_size", 128, 128));
        put_weights("model.safetensors", AS_FP8, 0, 1, false, NULL);
        set_byte(cases[i].tensor, cases[i].at, cases[i].value);
        assert_int_equal(bt_engine_load("cpu", &vt, err, sizeof(err)), BT_OK);
        const struct bt_engine_config c = {.size = sizeof(c),
                                           .model_dir = dir,
                                           .page_tokens = 16,
                                           .max_slots = 1,
                                           .max_rows = 16,
                                           .ranks = 1};
        assert_int_equal(vt->open(&c, &e, &info, err, sizeof(err)), BT_ERR_INVALID);
        char *name = bt_strdup(cases[i].tensor), *end = strstr(name, "_scale_inv");
        if (end != NULL) {
            *end = '\0';
        }
        if (!strstr(err, name) || !strstr(err, "not finite")) {
            fail_msg("%s", err);
        }
        free(name);
    }
}

/* Products take 16 bits of a parameter, or 32: without bf16 units, and of fp8 with its scales. */
static void test_too_large(void **state)
{
    (void)state;
    struct drive d;
    drive_open(&d, "cpu", MODEL, 16);
    bool f32 = strstr(d.info->device, " f32 ") != NULL;
    drive_close(&d);
    clear();
    put_json("config.json",
             json_pack("{s:[s], s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f}", "architectures",
                       "LlamaForCausalLM", "vocab_size", 100, "hidden_size", 65536,
                       "intermediate_size", 65536, "num_hidden_layers", 1000, "num_attention_heads",
                       64, "head_dim", 16, "max_position_embeddings", 512, "rms_norm_eps", 1e-5));
    const struct bt_engine_vtable *vt;
    struct bt_engine *e;
    const struct bt_engine_info *info;
    char err[1024];
    assert_int_equal(bt_engine_load("cpu", &vt, err, sizeof(err)), BT_OK);
    struct bt_engine_config c = {.size = sizeof(c),
                                 .model_dir = dir,
                                 .load_format = "dummy",
                                 .page_tokens = 16,
                                 .max_slots = 1,
                                 .max_rows = 16,
                                 .ranks = 1};
    assert_int_equal(vt->open(&c, &e, &info, err, sizeof(err)), BT_ERR_TOO_LARGE);
    const char *text =
        f32 ? "weights take 52613.9 GB in 32 bits" : "weights take 26307.0 GB in 16 bits";
    assert_non_null(strstr(err, text));
    assert_non_null(strstr(err, "GB are missing"));
    c.quantize = "fp8";
    assert_int_equal(vt->open(&c, &e, &info, err, sizeof(err)), BT_ERR_TOO_LARGE);
    text = f32 ? "52613.9 GB in 32 bits" : "52613.6 GB in 16 and 32 bits";
    assert_non_null(strstr(err, text));
}

/* Sizes that fill no tile: hidden 72, 3 heads of 16, intermediate 200, 77 tokens. */
static void put_odd_config(void)
{
    put_json("config.json",
             json_pack("{s:[s], s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f}", "architectures",
                       "LlamaForCausalLM", "vocab_size", 77, "hidden_size", 72, "intermediate_size",
                       200, "num_hidden_layers", 3, "num_attention_heads", 3, "num_key_value_heads",
                       1, "head_dim", 16, "max_position_embeddings", 512, "rms_norm_eps", 1e-5));
}

/* Logprobs of all 77 tokens are not reported: the 20 first, after prompts of 1 to 90 tokens. */
static void odd_run(const char *model, uint32_t chunk, struct bt_engine_out *out)
{
    struct drive d;
    drive_open_as(&d, "cpu", model, "dummy", 16);
    const struct bt_engine_params p = drive_greedy(20);
    uint32_t text[90];
    for (uint32_t i = 0; i < 90; i++) {
        text[i] = i * 31 % 77;
    }
    for (uint32_t n = 1; n <= 90; n++) {
        d.next_page = 0;
        drive_slot(&d, 0, &p, text, n, 1);
        out[n - 1] = drive_prefill(&d, 0, text, 0, n, chunk);
        drive_slot_close(&d, 0);
    }
    drive_close(&d);
}

/* The same in a process that may not use bf16 units. */
static void odd_elsewhere(struct bt_engine_out *out)
{
    char exe[512], command[700];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    assert_true(n > 0);
    exe[n] = 0;
    snprintf(command, sizeof(command), "ONEDNN_MAX_CPU_ISA=AVX2 '%s' %s", exe, dir);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    assert_int_equal(fread(out, sizeof(*out), 90, f), 90);
    assert_int_equal(pclose(f), 0);
}

static void test_odd_sizes(void **state)
{
    (void)state;
    clear();
    put_odd_config();
    static struct bt_engine_out whole[90], parts[90], other[90];
    odd_run(dir, 2048, whole);
    odd_run(dir, 7, parts);
    odd_elsewhere(other);
    for (int i = 0; i < 90; i++) {
        assert_false(whole[i].bad);
        for (uint32_t k = 0; k < 20; k++) {
            float w = whole[i].top_logprob[k];
            if (!(fabsf(w - parts[i].top_logprob[k]) < 0.01f) ||
                !(fabsf(w - other[i].top_logprob[k]) < 0.01f)) {
                fail_msg("after %d tokens: %f, in chunks %f, in f32 %f", i + 1, w,
                         parts[i].top_logprob[k], other[i].top_logprob[k]);
            }
        }
    }
}

int main(int argc, char **argv)
{
    if (argc == 2) { /* for odd_elsewhere */
        static struct bt_engine_out out[90];
        odd_run(argv[1], 2048, out);
        return fwrite(out, sizeof(out[0]), 90, stdout) == 90 ? 0 : 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f32),       cmocka_unit_test(test_f16),
        cmocka_unit_test(test_quantize),  cmocka_unit_test(test_numbers_that_are_not_finite),
        cmocka_unit_test(test_shards),    cmocka_unit_test(test_separate_head),
        cmocka_unit_test(test_dummy),     cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_odd_sizes),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
