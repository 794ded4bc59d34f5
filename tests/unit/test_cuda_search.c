/* DoLa and contrastive search through the cuda engine's host code against the references of
 * tests/golden/test_engine_search.c, over tests/cuda_host and so without a GPU. */
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

int search_main(void);
#define main search_main
#include "tests/golden/test_engine_search.c"
#undef main

int main(void)
{
    setenv("BT_GOLDEN_ENGINE", "cuda", 1);
    setenv("BT_GOLDEN_BRIEF", "1", 1); /* each step is slow */
    return search_main();
}
