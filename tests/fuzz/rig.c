/* Clock, random numbers, log and files of the fuzz targets. One thread. */
#include "tests/fuzz/rig.h"

#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/base/base.h"
#include "common/log/fields.h"
#include "common/log/log.h"

#define START_NS 1000000000000ull       /* of the monotonic clock */
#define WALL_NS  1790000000000000000ull /* added for the wall clock: a day of 2026 */
#define LOOK_NS  1000u
#define FILES    16

int __wrap_clock_gettime(clockid_t id, struct timespec *ts);
void __wrap_bt_random(void *buf, size_t len);
void __wrap_bt_log(bt_log_level_t level, const char *ev, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static uint64_t now_ns = START_NS, random_state = 1, n_lines;

void rig_reset(void)
{
    BT_ASSERT(getenv("BATON_FUZZ_FAIL") == NULL); /* is a finding noticed? test_fuzz.py asks */
    now_ns = START_NS;
    random_state = 88172645463325252ull;
    n_lines = 0;
}

void rig_pass_ms(uint64_t ms)
{
    now_ns += BT_MIN(ms, (uint64_t)1 << 32) * 1000000u;
}

uint64_t rig_log_lines(void)
{
    return n_lines;
}

/* CPU time stands still: how long a machine takes is not what is tested. */
int __wrap_clock_gettime(clockid_t id, struct timespec *ts)
{
    uint64_t t = now_ns;
    if (id == CLOCK_MONOTONIC || id == CLOCK_REALTIME) {
        now_ns += LOOK_NS;
        t += id == CLOCK_REALTIME ? WALL_NS : 0;
    } else {
        t = 0;
    }
    ts->tv_sec = (time_t)(t / 1000000000u);
    ts->tv_nsec = (long)(t % 1000000000u);
    return 0;
}

void __wrap_bt_random(void *buf, size_t len)
{
    uint8_t *p = buf;
    for (size_t i = 0; i < len; i++) {
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        p[i] = (uint8_t)(random_state >> 32);
    }
}

/* The fields of the line are made as for a real one, in one of the two formats by turns. */
void __wrap_bt_log(bt_log_level_t level, const char *ev, const char *fmt, ...)
{
    char line[PIPE_BUF];
    va_list ap;
    (void)level;
    (void)ev;
    va_start(ap, fmt);
    size_t n = bt_log_fields(line, sizeof(line), (n_lines++ & 1) != 0, fmt, ap);
    va_end(ap);
    BT_ASSERT(n < sizeof(line) && strlen(line) == n);
    for (size_t i = 0; i < n; i++) {
        BT_ASSERT((unsigned char)line[i] >= 0x20 && line[i] != 0x7f);
    }
}

/* ---- files ---- */

static char dir[64];
static struct {
    char path[128];
    int fd;
} files[FILES];

static void remove_dir(void)
{
    for (int i = 0; i < FILES && files[i].path[0] != '\0'; i++) {
        unlink(files[i].path);
    }
    rmdir(dir);
}

const char *rig_dir(void)
{
    const char *given = getenv("BATON_FUZZ_DIR");
    if (dir[0] != '\0') {
        return dir;
    }
    if (given != NULL) {
        snprintf(dir, sizeof(dir), "%s", given);
    } else {
        snprintf(dir, sizeof(dir), "/dev/shm/baton-fuzz-XXXXXX");
        BT_ASSERT(mkdtemp(dir) != NULL);
        atexit(remove_dir);
    }
    return dir;
}

/* Its place among the files; a new one has fd -1. */
static int find(const char *name)
{
    char path[128];
    int i = 0;
    snprintf(path, sizeof(path), "%s/%s", rig_dir(), name);
    while (i < FILES && files[i].path[0] != '\0' && strcmp(files[i].path, path) != 0) {
        i++;
    }
    BT_ASSERT(i < FILES);
    if (files[i].path[0] == '\0') {
        memcpy(files[i].path, path, sizeof(path));
        files[i].fd = -1;
    }
    return i;
}

const char *rig_file(const char *name, const void *data, size_t len)
{
    int i = find(name);
    if (files[i].fd < 0) {
        files[i].fd = open(files[i].path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        BT_ASSERT(files[i].fd >= 0);
    }
    BT_ASSERT(ftruncate(files[i].fd, 0) == 0);
    BT_ASSERT(len == 0 || pwrite(files[i].fd, data, len, 0) == (ssize_t)len);
    return files[i].path;
}

void rig_no_file(const char *name)
{
    int i = find(name);
    if (files[i].fd >= 0) {
        close(files[i].fd);
        files[i].fd = -1;
    }
    unlink(files[i].path);
}
