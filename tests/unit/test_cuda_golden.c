/* Whole models through the cuda engine's host code against references: how it places their weights
 * and which kernels it launches in which order, over tests/cuda_host and so without a GPU.
 * tests/gpu/run does the same on a GPU. */
#include <stdlib.h>

#include "common/engine/engine.h"

static inline bt_status_t load_here(const char *name, const struct bt_engine_vtable **vt_p,
                                    char *err, size_t err_cap)
{
    (void)name;
    (void)err;
    (void)err_cap;
    *vt_p = bt_engine_plugin(BT_ENGINE_ABI);
    return *vt_p ? BT_OK : BT_ERR_INTERNAL;
}
#define bt_engine_load load_here

int golden_main(void);
#define main golden_main
#include "tests/golden/test_engine_golden.c"
#undef main

/* Experts beside an MLP layer; experts everywhere; latent attention; YaRN; LayerNorm, biases,
 * positions. */
static const char *const names[] = {"gpu-qwen3-moe", "gpu-mixtral", "gpu-deepseek-v2", "gpu-yarn",
                                    "tiny-gpt2"};

static void test_small(void **state)
{
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        check_small(names[i]);
    }
}

/* Other kernels, and other calls of the same ones. Not GPT-2: it is refused. */
static void test_deterministic(void **state)
{
    (void)state;
    drive_deterministic = true;
    for (size_t i = 0; i + 1 < BT_ARRAY_LEN(names); i++) {
        check_small(names[i]);
    }
    drive_deterministic = false;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_small),
                                       cmocka_unit_test(test_deterministic)};
    setenv("BT_GOLDEN_ENGINE", "cuda", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
