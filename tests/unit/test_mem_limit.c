/* Memory limits of control groups, read from files laid out as the kernel's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "kvstore/cache/mem_limit.h"

#define GIB (1ull << 30)

static char folder[64], groups[128];

static int setup(void **state)
{
    (void)state;
    snprintf(folder, sizeof(folder), "/tmp/baton-mem-limit-XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(groups, sizeof(groups), "%s/cgroup", folder);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof(command), "rm -r %s", folder);
    return system(command);
}

/* A file below the folder, with the folders above it. */
static void put(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    for (char *s = path + strlen(folder) + 1; (s = strchr(s, '/')) != NULL; s++) {
        *s = '\0';
        mkdir(path, 0700);
        *s = '/';
    }
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void version_2(void **state)
{
    (void)state;
    put("cgroup", "0::/a.slice/b.service\n");
    assert_true(bt_mem_limit(groups, folder) == UINT64_MAX); /* nothing there */
    put("a.slice/b.service/memory.max", "max\n");
    assert_true(bt_mem_limit(groups, folder) == UINT64_MAX);
    put("a.slice/memory.max", "3221225472\n"); /* one above counts as well */
    assert_true(bt_mem_limit(groups, folder) == 3 * GIB);
    put("a.slice/b.service/memory.max", "1073741824\n");
    assert_true(bt_mem_limit(groups, folder) == GIB);
    put("a.slice/memory.max", "nonsense\n");
    put("a.slice/b.service/memory.max", "");
    assert_true(bt_mem_limit(groups, folder) == UINT64_MAX);
}

/* A container: the path of the host is not there, its own group is the mount's root. */
static void container(void **state)
{
    (void)state;
    put("cgroup", "0::/system.slice/docker-0123.scope\n");
    put("memory.max", "2147483648\n");
    assert_true(bt_mem_limit(groups, folder) == 2 * GIB);
    put("cgroup", "0::/\n");
    assert_true(bt_mem_limit(groups, folder) == 2 * GIB);
}

static void version_1(void **state)
{
    (void)state;
    put("cgroup", "9:name=systemd:/\n5:cpu,memory:/x/y\n4:memory_like:/z\nbroken\n0::/\n");
    put("memory/memory.limit_in_bytes", "9223372036854771712\n"); /* its way to say none */
    put("memory/z/memory.limit_in_bytes", "1\n");
    put("memory/x/y/memory.limit_in_bytes", "1073741824\n");
    assert_true(bt_mem_limit(groups, folder) == GIB);
}

static void said(void **state)
{
    (void)state;
    char why[512];
    assert_true(bt_mem_limit("/nonexistent/cgroup", folder) == UINT64_MAX);
    assert_true(bt_mem_limit_allows(UINT64_MAX, 64 * GIB, why, sizeof(why)));
    assert_true(bt_mem_limit_allows(GIB, GIB, why, sizeof(why)));
    assert_false(bt_mem_limit_allows(GIB, 2 * GIB, why, sizeof(why)));
    assert_non_null(strstr(why, "kvstore.slab_bytes = 2147483648 "));
    assert_non_null(strstr(why, " 1073741824 bytes"));
    assert_non_null(strstr(why, "shared memory counts"));
    assert_non_null(strstr(why, "Raise the limit"));
    assert_true(strlen(why) < 500); /* fits into a value of the log whole */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(version_2, setup, teardown),
        cmocka_unit_test_setup_teardown(container, setup, teardown),
        cmocka_unit_test_setup_teardown(version_1, setup, teardown),
        cmocka_unit_test_setup_teardown(said, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
