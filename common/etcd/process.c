/* Checks by /proc and a pidfd whether a process is alive. A pid alone proves nothing: another
 * process may have it by now, or it may be of another namespace. */
#include "common/etcd/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool read_text(const char *path, char *out, size_t cap)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, out, cap - 1) : -1;
    if (fd >= 0) {
        close(fd);
    }
    out[BT_MAX(n, 0)] = '\0';
    out[strcspn(out, "\n")] = '\0';
    return n > 0;
}

/* Reads field 22 of /proc/<pid>/stat; the name before it may contain spaces and parentheses. */
static bool start_ticks(uint32_t pid, uint64_t *ticks_p)
{
    char path[64], text[1024];
    snprintf(path, sizeof(path), "/proc/%u/stat", pid);
    char *at = read_text(path, text, sizeof(text)) ? strrchr(text, ')') : NULL;
    for (int field = 2; at != NULL && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    if (at == NULL) {
        return false;
    }
    *ticks_p = strtoull(at + 1, NULL, 10);
    return true;
}

bool bt_process_id(uint32_t pid, struct bt_process_id *id_p)
{
    struct stat ns;
    char path[64];
    snprintf(path, sizeof(path), "/proc/%u/ns/pid", pid);
    memset(id_p, 0, sizeof(*id_p));
    id_p->pid = pid;
    if (!read_text("/proc/sys/kernel/random/boot_id", id_p->boot_id, sizeof(id_p->boot_id)) ||
        stat(path, &ns) != 0 || !start_ticks(pid, &id_p->start_ticks)) {
        return false;
    }
    id_p->pid_ns = (uint64_t)ns.st_ino;
    return true;
}

bt_process_state_t bt_process_state(const Baton__Member *m)
{
    struct bt_process_id here;
    uint64_t ticks;
    if (m->boot_id[0] == '\0' || m->pid == 0 || !bt_process_id((uint32_t)getpid(), &here) ||
        strcmp(m->boot_id, here.boot_id) != 0 || m->pid_ns != here.pid_ns) {
        return BT_PROCESS_UNKNOWN;
    }
    int fd = (int)syscall(SYS_pidfd_open, (pid_t)m->pid, 0);
    if (fd < 0) {
        return errno == ESRCH ? BT_PROCESS_DEAD : BT_PROCESS_UNKNOWN;
    }
    /* A pidfd is readable once the last thread has ended, also before the parent has waited for
     * it. */
    struct pollfd p = {.fd = fd, .events = POLLIN};
    bool ended = poll(&p, 1, 0) == 1;
    close(fd);
    if (ended) {
        return BT_PROCESS_DEAD;
    }
    if (!start_ticks(m->pid, &ticks)) {
        return BT_PROCESS_UNKNOWN; /* it has ended meanwhile or cannot be seen; only time can
                                      tell */
    }
    return ticks == m->start_ticks ? BT_PROCESS_ALIVE : BT_PROCESS_DEAD;
}
