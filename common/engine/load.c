/* Finds and loads engine plugins. Called once by a worker's main thread, before other threads. */
#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/conf/conf.h"
#include "common/engine/engine.h"

/* Appends "text; " to err as far as it fits. */
static void note(char *err, size_t err_cap, const char *text)
{
    size_t n = strlen(err);
    if (n + 1 < err_cap) {
        snprintf(err + n, err_cap - n, "%s%s", n ? "; " : "", text);
    }
}

static const struct bt_engine_vtable *try_file(const char *path, char *err, size_t err_cap)
{
    if (access(path, R_OK) != 0) {
        char *t = bt_sprintf("%s: not there", path);
        note(err, err_cap, t);
        free(t);
        return NULL;
    }
    /* By default libgomp's threads spin without limit between parallel loops; with several workers
     * on a machine that takes CPU time from the others. libgomp reads this variable when it is
     * loaded. A value that the user set stays. */
    setenv("GOMP_SPINCOUNT", "20000", 0);
    void *so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!so) {
        note(err, err_cap, dlerror());
        return NULL;
    }
    bt_engine_plugin_fn fn;
    *(void **)&fn = dlsym(so, "bt_engine_plugin");
    const struct bt_engine_vtable *vt = fn ? fn(BT_ENGINE_ABI) : NULL;
    if (!vt) {
        char *t = bt_sprintf("%s: is not an engine of this version (ABI %d); rebuild it", path,
                             BT_ENGINE_ABI);
        note(err, err_cap, t);
        free(t);
        dlclose(so);
    }
    return vt;
}

/* Searches near the executable: DIR/lib and DIR/lib/baton for each DIR above it. So build/bin/x,
 * build/tests/unit/x and PREFIX/bin/x all find their plugins. */
static const struct bt_engine_vtable *search(const char *name, char *err, size_t err_cap)
{
    const struct bt_engine_vtable *vt = NULL;
    const char *env = bt_conf_env("BATON_PLUGIN_DIR");
    if (env) {
        char *path = bt_sprintf("%s/baton-engine-%s.so", env, name);
        vt = try_file(path, err, err_cap);
        free(path);
        return vt;
    }
    char exe[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    if (n <= 0) {
        note(err, err_cap, "/proc/self/exe cannot be read");
        return NULL;
    }
    exe[n] = 0;
    char *dir = dirname(exe);
    for (int up = 0; up < 4 && strcmp(dir, "/") != 0 && !vt; up++) {
        dir = dirname(dir);
        static const char *const subs[] = {"lib", "lib/baton"};
        for (size_t i = 0; i < BT_ARRAY_LEN(subs) && !vt; i++) {
            char *path =
                bt_sprintf("%s/%s/baton-engine-%s.so", strcmp(dir, "/") ? dir : "", subs[i], name);
            if (access(path, R_OK) == 0 || up == 0) {
                vt = try_file(path, err, err_cap);
            }
            free(path);
        }
    }
    return vt;
}

/* Returns whether the CUDA driver is installed. Without it no GPU can be used, so the plugin with
 * its libraries need not be loaded. */
static bool cuda_driver(char *err, size_t err_cap)
{
    void *so = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!so) {
        note(err, err_cap, "cuda: no driver (libcuda.so.1)");
        return false;
    }
    dlclose(so);
    return true;
}

bt_status_t bt_engine_load(const char *name, const struct bt_engine_vtable **vt_p, char *err,
                           size_t err_cap)
{
    static const char *const known[] = {"cpu", "cuda", "null"};
    bool ok = strcmp(name, "auto") == 0;
    for (size_t i = 0; i < BT_ARRAY_LEN(known); i++) {
        ok |= strcmp(name, known[i]) == 0;
    }
    if (err_cap) {
        err[0] = 0;
    }
    if (!ok) {
        snprintf(err, err_cap, "engine.device: %.32s is not known; auto, cpu, cuda or null", name);
        return BT_ERR_INVALID;
    }
    const struct bt_engine_vtable *vt = NULL;
    if (strcmp(name, "auto") == 0) {
        vt = cuda_driver(err, err_cap) ? search("cuda", err, err_cap) : NULL;
        name = "cpu";
    }
    vt = vt ? vt : search(name, err, err_cap);
    if (!vt) {
        return BT_ERR_NOT_FOUND;
    }
    *vt_p = vt;
    return BT_OK;
}
