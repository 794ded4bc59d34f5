/* The open connections of each listening socket, by descriptor. It is not known whether UCX has
 * closed a connection, so each is checked again when another one comes, by its descriptor and the
 * kernel's cookie. Any thread; one lock. */
#include "common/loop/one_peer.h"
#include "common/base/clock.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "common/base/base.h"
#include "common/log/log.h"

#define SAY_NS 10000000000ull

struct listener {
    uint64_t cookie; /* the kernel's id of the socket, as the descriptor may be reused */
    uint32_t n;
    struct {
        uint64_t cookie;
        int fd;
    } open[BT_ONE_PEER_MAX];
};

static struct {
    pthread_mutex_t lock;
    uint32_t max;            /* 0: no limit */
    struct listener **by_fd; /* [n], NULL: not a listening socket */
    uint32_t n;
    struct bt_log_pace pace;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

void bt_one_peer_limit(uint32_t max)
{
    pthread_mutex_lock(&all.lock);
    for (uint32_t i = 0; i < all.n; i++) {
        free(all.by_fd[i]);
    }
    free(all.by_fd);
    all.by_fd = NULL;
    all.n = 0;
    all.max = BT_MIN(max, (uint32_t)BT_ONE_PEER_MAX);
    pthread_mutex_unlock(&all.lock);
}

/* 0: fd is not a socket. */
static uint64_t cookie_of(int fd)
{
    uint64_t cookie = 0;
    socklen_t len = sizeof(cookie);
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &len) == 0 ? cookie : 0;
}

static struct listener *listener_of(int fd)
{
    uint64_t cookie = cookie_of(fd);
    uint32_t at = (uint32_t)fd;
    if (at >= all.n) {
        uint32_t n = BT_MAX(at + 1, 2 * all.n);
        all.by_fd = bt_realloc(all.by_fd, n * sizeof(struct listener *));
        memset(all.by_fd + all.n, 0, (n - all.n) * sizeof(struct listener *));
        all.n = n;
    }
    struct listener *l = all.by_fd[at];
    if (l == NULL) {
        l = all.by_fd[at] = bt_calloc(1, sizeof(*l));
    }
    if (l->cookie != cookie) {
        *l = (struct listener){.cookie = cookie};
    }
    return l;
}

static void say(void)
{
    uint32_t times = bt_log_due(&all.pace, bt_mono_ns(), SAY_NS);
    if (times > 0) {
        BT_WARN("strangers_refused", "times=%u remedy=%s", times,
                "many connections reach this node's ports for KV, but no peer opened them: find "
                "out which hosts do, and let only the cluster's nodes reach kvstore.wire.listen");
    }
}

bool bt_one_peer_came(int listener, int fd)
{
    pthread_mutex_lock(&all.lock);
    if (all.max == 0) {
        pthread_mutex_unlock(&all.lock);
        return true;
    }
    struct listener *l = listener_of(listener);
    uint32_t n = 0;
    for (uint32_t i = 0; i < l->n; i++) { /* closed connections give their place to the new one */
        if (l->open[i].cookie != 0 && cookie_of(l->open[i].fd) == l->open[i].cookie) {
            l->open[n++] = l->open[i];
        }
    }
    l->n = n;
    bool fits = n < all.max;
    if (fits) {
        l->open[l->n].fd = fd;
        l->open[l->n++].cookie = cookie_of(fd);
    } else {
        say();
    }
    pthread_mutex_unlock(&all.lock);
    return fits;
}
