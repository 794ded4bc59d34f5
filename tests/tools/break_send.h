/* A connection that breaks while UCX writes: this program's send() and sendmsg() instead of libc's,
 * also for the libraries it is linked with. When told, a call of the transfer thread's fails: the
 * next for a socket whose last call could not send everything, as if the peer had reset the
 * connection just then, or the next of sendmsg() for whatever socket, which is none the worse for
 * it, as if the kernel had no memory. In life the thread mostly reads first, and so learns of the
 * end by reading; that writing is the first to learn of it takes luck. Other threads (gRPC's) are
 * left alone. */
#ifndef TESTS_TOOLS_BREAK_SEND_H
#define TESTS_TOOLS_BREAK_SEND_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/tools/wire_faults.h"

#define snap (wire_faults->snap_)

static inline bool snap_is_mine(void)
{
    static _Thread_local int mine = -1;
    char name[16] = "";
    if (mine < 0) {
        pthread_getname_np(pthread_self(), name, sizeof(name));
        mine = strcmp(name, "baton-wire") == 0;
    }
    return mine > 0;
}

/* Whether the call is to fail. */
static inline bool snap_now(int fd, snap_what_t what)
{
    snap_what_t want = what;
    if (!snap_is_mine() || (what == SNAP_HALF_SENT && fd != snap.half_sent) ||
        !atomic_compare_exchange_strong(&snap.armed, &want, SNAP_NOT)) {
        return false;
    }
    atomic_fetch_add(&snap.breaks, 1);
    if (what == SNAP_HALF_SENT) {
        shutdown(fd, SHUT_RDWR);
    }
    errno = what == SNAP_HALF_SENT ? ECONNRESET : ENOBUFS;
    return true;
}

static inline void snap_sent(int fd, ssize_t n, size_t len)
{
    int keep = errno;
    if (snap_is_mine()) {
        if (n > 0 && (size_t)n < len) {
            snap.half_sent = fd;
        } else if (n > 0 && snap.half_sent == fd) {
            snap.half_sent = -1;
        }
    }
    errno = keep;
}

ssize_t send(int fd, const void *buf, size_t len, int flags)
{
    if (snap_now(fd, SNAP_HALF_SENT)) {
        return -1;
    }
    ssize_t n = syscall(SYS_sendto, fd, buf, len, flags, NULL, 0); /* sets errno */
    snap_sent(fd, n, len);
    return n;
}

ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
    size_t len = 0;
    if (snap_now(fd, SNAP_HALF_SENT) || snap_now(fd, SNAP_NEXT)) {
        return -1;
    }
    for (size_t i = 0; i < msg->msg_iovlen; i++) {
        len += msg->msg_iov[i].iov_len;
    }
    ssize_t n = syscall(SYS_sendmsg, fd, msg, flags);
    snap_sent(fd, n, len);
    return n;
}

#endif
