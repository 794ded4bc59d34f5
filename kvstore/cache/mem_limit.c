/* Reads the memory limit of the process's control group and of every group above it. Inside a
 * container the mount's root often is the container's own group, while /proc/self/cgroup has the
 * path of the host. So groups that do not exist are skipped. */
#include "kvstore/cache/mem_limit.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"

/* UINT64_MAX: the file says "max" or does not exist. */
static uint64_t read_bytes(const char *path)
{
    char text[32] = "", *end;
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        return UINT64_MAX;
    }
    bool got = fgets(text, sizeof(text), f) != NULL;
    fclose(f);
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    return got && end != text && errno == 0 ? v : UINT64_MAX;
}

/* The smallest limit of the group and all groups above it. Shortens group on the way. */
static uint64_t least_upwards(const char *mount, char *group, const char *file)
{
    uint64_t least = UINT64_MAX;
    for (;;) {
        char path[PATH_MAX];
        int n = snprintf(path, sizeof(path), "%s%s/%s", mount, group, file);
        if (n > 0 && (size_t)n < sizeof(path)) {
            uint64_t bytes = read_bytes(path);
            least = BT_MIN(least, bytes);
        }
        char *slash = strrchr(group, '/');
        if (slash == NULL) {
            return least;
        }
        *slash = '\0';
    }
}

/* Does "a,b" contain the word memory? */
static bool has_memory(char *controllers)
{
    char *save = NULL;
    for (char *c = strtok_r(controllers, ",", &save); c != NULL; c = strtok_r(NULL, ",", &save)) {
        if (strcmp(c, "memory") == 0) {
            return true;
        }
    }
    return false;
}

uint64_t bt_mem_limit(const char *groups, const char *mount)
{
    uint64_t least = UINT64_MAX;
    char line[PATH_MAX], v1[PATH_MAX];
    FILE *f = fopen(groups, "re");
    if (f == NULL) {
        return least;
    }
    snprintf(v1, sizeof(v1), "%s/memory", mount);
    while (fgets(line, sizeof(line), f) != NULL) { /* ID:CONTROLLERS:PATH */
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL) {
            continue;
        }
        *group++ = '\0';
        uint64_t limit = UINT64_MAX;
        if (strcmp(line, "0:") == 0) {
            limit = least_upwards(mount, group, "memory.max");
        } else if (has_memory(controllers + 1)) {
            limit = least_upwards(v1, group, "memory.limit_in_bytes");
        }
        least = BT_MIN(least, limit);
    }
    fclose(f);
    return least;
}

bool bt_mem_limit_allows(uint64_t limit, uint64_t slab_bytes, char *why, size_t cap)
{
    if (limit >= slab_bytes) {
        return true;
    }
    snprintf(
        why, cap,
        "kvstore.slab_bytes = %" PRIu64 " (%" PRIu64 " MiB), but this process may have %" PRIu64
        " bytes (%" PRIu64 " MiB) of memory by its control group, and shared memory counts: the "
        "kernel may kill it while the slab is reserved. Raise the limit (MemoryMax= of the unit, "
        "--memory of the container) above the slab's size, or lower kvstore.slab_bytes",
        slab_bytes, slab_bytes >> 20, limit, limit >> 20);
    return false;
}
