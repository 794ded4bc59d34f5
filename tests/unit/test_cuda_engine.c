/* The cuda engine's host code (calls, steps, graphs, flows, draws, tickets) without a GPU: the
 * checks of make check-gpu over tests/cuda_host, which does the device's work late, in a random
 * interleaving of its streams, and in plain C. What it cannot show is whether the kernels are
 * right. */
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
#define ON_HOST        1

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BRIEF 1
#endif

#include "tests/gpu/check_engine.c"
