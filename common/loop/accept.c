/* accept and accept4 of the whole process: the libraries' calls come here, because a program's own
 * symbols are found before libc's. gRPC 1.51 (iomgr/tcp_server_posix.cc, on_read) and UCX 1.13
 * (uct/tcp/tcp_iface.c) give a listening socket up for good when accept fails for want of a
 * descriptor: a daemon that once had none took no connection any more, until it was started again.
 * So these fail only for what is wrong with the listening socket itself. Any thread. */
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

#define SAY_NS    60000000000ull /* a line a minute at most */
#define TRIES_MAX 1024           /* clients turned away in one call */

/* The spare descriptor is closed to take a client that there is no room for, so that it learns of
 * it: its end closes the connection and dials again later. */
static struct {
    pthread_mutex_t lock;
    int fd; /* -1: none */
    uint64_t said_ns;
    uint32_t unsaid;
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
    uint64_t now_ns = bt_mono_ns();
    spare.unsaid++;
    if (spare.said_ns == 0 || now_ns - spare.said_ns >= SAY_NS) {
        BT_WARN("accept_failed", "err=%s times=%u remedy=%s", strerror(error), spare.unsaid,
                "peers cannot connect until descriptors are free: raise LimitNOFILE");
        spare.said_ns = now_ns;
        spare.unsaid = 0;
    }
}

/* No descriptor for the first client that waits: takes and closes its connection. False: there is
 * no client, or no spare descriptor either; what waits then waits for the next to dial. */
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
        case ECONNABORTED: /* that client's connection has failed: the next one */
        case EPROTO:
        case EPERM:
        case ENETDOWN:
        case ENETUNREACH:
        case EHOSTDOWN:
        case EHOSTUNREACH:
        case ENONET:
        case ENOPROTOOPT: break;
        default: /* nobody waits, or the listening socket is at fault */ return -1;
        }
    }
    errno = EAGAIN;
    return -1;
}

int accept(int fd, __SOCKADDR_ARG addr, socklen_t *restrict len)
{
    return accept4(fd, addr, len, 0);
}
