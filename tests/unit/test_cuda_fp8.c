/* fp8 weights in the cuda engine's host code: how they are placed and which kernels read them, over
 * tests/cuda_host and so without a GPU, beside the CPU engine. */
#include <string.h>

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

#include "tests/gpu/check_fp8_engine.c"
