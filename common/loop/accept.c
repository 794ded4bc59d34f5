/* accept and accept4 of the whole process: libraries call these functions, because a program's
 * symbols are found before libc's. They are needed because gRPC 1.51 (iomgr/tcp_server_posix.cc,
 * on_read) and UCX 1.13 (uct/tcp/tcp_iface.c) never accept again after accept has failed for lack
 * of a descriptor: the daemon then got no connections until it was restarted. So these functions
 * fail only for errors of the listening socket itself. Any thread. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/log/log.h"
#include "common/loop/loop.h"
#include "common/loop/newcomers.h"
#include "common/loop/one_peer.h"

#define SAY_NS    60000000000ull /* at most one log line a minute */
#define TRIES_MAX 1024           /* clients refused in one call */

/* A spare descriptor. It is closed to accept a client for which no other descriptor is left. Then
 * the client's connection is closed, so that the client notices and dials again later. */
static struct {
    pthread_mutex_t lock;
    int fd; /* -1: none */
    struct bt_log_pace pace;
} spare = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

int bt_loop_accept(int fd, struct sockaddr *addr, socklen_t *len, int flags)
{
    return (int)syscall(SYS_accept4, fd, addr, len, flags);
}

static void spare_take(void)
{
    if (spare.fd < 0) {
        spare.fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
}

static void say(int error)
{
    uint32_t times = bt_log_due(&spare.pace, bt_mono_ns(), SAY_NS);
    if (times > 0) {
        BT_WARN("accept_failed", "err=%s times=%u remedy=%s", strerror(error), times,
                "peers cannot connect until descriptors are free: raise LimitNOFILE");
    }
}

/* Called when no descriptor is left: accepts the client that has waited longest and closes its
 * connection. Returns false if no client waits, or if there is no spare descriptor either; then
 * clients wait until the next one dials. */
static bool turn_away(int fd, int error)
{
    bool turned = false;
    pthread_mutex_lock(&spare.lock);
    say(error);
    if (spare.fd >= 0) {
        close(spare.fd);
        spare.fd = -1;
        int client = bt_loop_accept(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (client >= 0) {
            close(client);
            turned = true;
        }
    }
    spare_take();
    pthread_mutex_unlock(&spare.lock);
    return turned;
}

void bt_loop_accept_ready(void)
{
    pthread_mutex_lock(&spare.lock);
    spare_take();
    pthread_mutex_unlock(&spare.lock);
}

int accept4(int fd, __SOCKADDR_ARG addr, socklen_t *restrict len, int flags)
{
    for (int i = 0; i < TRIES_MAX; i++) {
        int client = bt_loop_accept(fd, addr.__sockaddr__, len, flags);
        if (client >= 0) {
            bt_loop_accept_ready();
            if (bt_newcomers_came(client) && bt_one_peer_came(fd, client)) {
                return client;
            }
            close(client);
            continue;
        }
        switch (errno) {
        case EMFILE:
        case ENFILE:
        case ENOBUFS:
        case ENOMEM:
            if (!turn_away(fd, errno)) {
                errno = EAGAIN;
                return -1;
            }
            break;
        case ECONNABORTED: /* this client's connection has failed: take the next one */
        case EPROTO:
        case EPERM:
        case ENETDOWN:
        case ENETUNREACH:
        case EHOSTDOWN:
        case EHOSTUNREACH:
        case ENONET:
        case ENOPROTOOPT: break;
        default: /* no client waits, or the listening socket has an error */ return -1;
        }
    }
    errno = EAGAIN;
    return -1;
}

int accept(int fd, __SOCKADDR_ARG addr, socklen_t *restrict len)
{
    return accept4(fd, addr, len, 0);
}
