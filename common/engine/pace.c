/* A step that takes longer, for tests (pace.h). Owner thread: the engine's. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/conf/conf.h"
#include "common/engine/pace.h"

#define LOOK_NS 10000000ull
#define MOST_US 1000000000ull

bt_status_t bt_pace_open(struct bt_pace *p, char *err, size_t err_cap)
{
    const char *path = bt_conf_env("BATON_ENGINE_PACE");
    if (path == NULL || path[0] == '\0') {
        return BT_OK;
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        snprintf(err, err_cap, "BATON_ENGINE_PACE: %s: %s; name a file that has a number of us",
                 path, strerror(errno));
        return BT_ERR_CONFIG;
    }
    *p = (struct bt_pace){.on = true, .fd = fd};
    return BT_OK;
}

void bt_pace_close(struct bt_pace *p)
{
    if (p->on) {
        close(p->fd);
    }
    *p = (struct bt_pace){0};
}

/* A text that is not a number, and an empty file, mean 0. */
static uint64_t wanted_ns(const struct bt_pace *p)
{
    char text[24];
    ssize_t n = pread(p->fd, text, sizeof(text) - 1, 0);
    text[BT_MAX(n, 0)] = '\0';
    return BT_MIN(strtoull(text, NULL, 10), MOST_US) * 1000;
}

void bt_pace_wait(const struct bt_pace *p)
{
    uint64_t begin_ns = bt_mono_ns(), waited = 0, ns;
    while (p->on && (ns = wanted_ns(p)) > waited) {
        struct timespec t = {.tv_nsec = (long)BT_MIN(ns - waited, LOOK_NS)};
        nanosleep(&t, NULL);
        waited = bt_mono_ns() - begin_ns;
    }
}
