/* Models that the cuda engine cannot run are refused at once, by name and remedy: also where there
 * is no GPU, so this needs none. Skipped where the plugin was not built. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/engine/engine.h"

static const struct bt_engine_vtable *vt;
static char dir[64], path[128], err[1024];

static int setup(void **state)
{
    (void)state;
    if (bt_engine_load("cuda", &vt, err, sizeof(err)) != BT_OK) {
        printf("# %s\n", err);
        vt = NULL;
    }
    strcpy(dir, "/tmp/baton-test-cuda-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}
static int teardown(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(dir);
}

static bt_status_t open_shape(const char *shape)
{
    snprintf(path, sizeof(path), "%s/config.json", dir);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f,
            "{\"architectures\":[\"LlamaForCausalLM\"],\"vocab_size\":100,\"num_hidden_layers\":2,"
            "\"max_position_embeddings\":512,%s}",
            shape);
    assert_int_equal(fclose(f), 0);
    const struct bt_engine_config c = {.size = sizeof(c),
                                       .model_dir = dir,
                                       .load_format = "dummy",
                                       .page_tokens = 64,
                                       .pages = 16,
                                       .max_slots = 4,
                                       .max_rows = 64,
                                       .ranks = 1};
    struct bt_engine *e = NULL;
    const struct bt_engine_info *info;
    err[0] = 0;
    bt_status_t st = vt->open(&c, &e, &info, err, sizeof(err));
    if (st == BT_OK) {
        vt->close(e);
    }
    return st;
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
    if (!vt) {
        skip();
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        bt_status_t st = open_shape(cases[i].shape);
        if (st != BT_ERR_UNSUPPORTED || !strstr(err, cases[i].what) || !strstr(err, path) ||
            !strstr(err, "engine.device: cpu")) {
            fail_msg("%s: %s", bt_status_name(st), err);
        }
    }
}

static void test_taken(void **state)
{
    (void)state;
    if (!vt) {
        skip();
    }
    /* A good shape gets as far as the device: it opens, or no GPU answers. */
    bt_status_t st = open_shape("\"hidden_size\":256,\"intermediate_size\":128,"
                                "\"num_attention_heads\":4,\"num_key_value_heads\":2");
    if (st != BT_OK && (st != BT_ERR_DEVICE || !strstr(err, "GPU"))) {
        fail_msg("%s: %s", bt_status_name(st), err);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_taken),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
