/* A ring of the connections that came last to guarded ports, in order. It is not known whether gRPC
 * has closed a connection, so before one is shut down, it is checked by its descriptor and the
 * kernel's cookie. A connection of an authorized peer leaves an empty place in the ring. Any
 * thread; one lock. */
#include "common/loop/newcomers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/base/base.h"
#include "common/base/clock.h"
#include "common/log/log.h"

#define NEWCOMERS_MAX 512u
#define RING          (2 * NEWCOMERS_MAX)
#define PORTS_MAX     16
#define SAY_NS        10000000000ull

struct address { /* IPv4 addresses in their IPv6 form */
    struct in6_addr ip;
    in_port_t port; /* network order */
};

struct newcomer {
    struct address from;
    uint64_t cookie; /* the kernel's id of the socket, as the descriptor may be reused */
    int fd;          /* -1: authorized */
};

static struct {
    pthread_mutex_t lock;
    uint16_t ports[PORTS_MAX]; /* 0: none; a port that two servers guard is here twice */
    struct newcomer ring[RING];
    uint64_t n;     /* number of all that ever came; the last is ring[(n - 1) % RING] */
    uint64_t first; /* all before this one are shut down or authorized */
    struct bt_log_pace pace;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

uint32_t bt_newcomers_max(void)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur / 8 >= NEWCOMERS_MAX) {
        return NEWCOMERS_MAX;
    }
    return BT_MAX((uint32_t)(r.rlim_cur / 8), 1u);
}

/* ---- addresses ---- */

static bool address_of(const struct sockaddr_storage *a, struct address *to)
{
    *to = (struct address){0};
    if (a->ss_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)a;
        to->ip = v6->sin6_addr;
        to->port = v6->sin6_port;
        return true;
    }
    if (a->ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)a;
        to->ip.s6_addr[10] = to->ip.s6_addr[11] = 0xff;
        memcpy(&to->ip.s6_addr[12], &v4->sin_addr, 4);
        to->port = v4->sin_port;
        return true;
    }
    return false;
}

/* Copies the host part of "HOST:PORT" without its brackets. */
static bool split(const char *text, char *host, size_t cap, in_port_t *port_p)
{
    const char *colon = strrchr(text, ':');
    if (colon == NULL) {
        return false;
    }
    const char *end = colon;
    if (strncmp(text, "%5B", 3) == 0 && end - text >= 6 && strncmp(end - 3, "%5D", 3) == 0) {
        text += 3;
        end -= 3;
    } else if (text[0] == '[' && end > text + 1 && end[-1] == ']') {
        text++;
        end--;
    }
    /* The scope of a link-local address. */
    const char *scope = memchr(text, '%', (size_t)(end - text));
    end = scope != NULL ? scope : end;
    unsigned long port = strtoul(colon + 1, NULL, 10);
    if ((size_t)(end - text) >= cap || port == 0 || port > UINT16_MAX) {
        return false;
    }
    memcpy(host, text, (size_t)(end - text));
    host[end - text] = '\0';
    *port_p = htons((uint16_t)port);
    return true;
}

static bool address_parse(const char *peer, struct address *to)
{
    char host[INET6_ADDRSTRLEN];
    *to = (struct address){0};
    if (strncmp(peer, "ipv4:", 5) == 0 && split(peer + 5, host, sizeof(host), &to->port)) {
        to->ip.s6_addr[10] = to->ip.s6_addr[11] = 0xff;
        return inet_pton(AF_INET, host, &to->ip.s6_addr[12]) == 1;
    }
    return strncmp(peer, "ipv6:", 5) == 0 && split(peer + 5, host, sizeof(host), &to->port) &&
           inet_pton(AF_INET6, host, &to->ip) == 1;
}

static bool address_equal(const struct address *a, const struct address *b)
{
    return a->port == b->port && memcmp(&a->ip, &b->ip, sizeof(a->ip)) == 0;
}

/* ---- guarded ports ---- */

static void port_replace(uint16_t from, uint16_t to)
{
    pthread_mutex_lock(&all.lock);
    for (size_t i = 0; i < PORTS_MAX; i++) {
        if (all.ports[i] == from) {
            all.ports[i] = to;
            break;
        }
    }
    pthread_mutex_unlock(&all.lock);
}

void bt_newcomers_guard(uint16_t port)
{
    port_replace(0, port);
}

void bt_newcomers_unguard(uint16_t port)
{
    port_replace(port, 0);
}

/* Caller holds the lock. */
static bool guarded(const struct sockaddr_storage *local)
{
    struct address here;
    if (address_of(local, &here) && here.port != 0) {
        for (size_t i = 0; i < PORTS_MAX; i++) {
            if (all.ports[i] == ntohs(here.port)) {
                return true;
            }
        }
    }
    return false;
}

/* ---- connections ---- */

static void say(void)
{
    uint32_t times = bt_log_due(&all.pace, bt_mono_ns(), SAY_NS);
    if (times > 0) {
        BT_WARN("strangers_ended", "times=%u remedy=%s", times,
                "many connections reach this daemon's gRPC port but make no call: find out which "
                "hosts open them, and let only the cluster's hosts reach the port");
    }
}

static bool is_at(int fd, const struct newcomer *c)
{
    uint64_t cookie;
    socklen_t len = sizeof(cookie);
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &len) == 0 && cookie == c->cookie;
}

/* Shuts the connection down; gRPC then reads its end and closes it. Uses a duplicate, because gRPC
 * may close the descriptor on another thread meanwhile. Without a free descriptor it does
 * nothing. */
static void end(const struct newcomer *old)
{
    if (old->fd < 0) {
        return;
    }
    int copy = fcntl(old->fd, F_DUPFD_CLOEXEC, 0);
    int fd = copy >= 0 ? copy : old->fd;
    if (is_at(fd, old)) {
        (void)shutdown(fd, SHUT_RDWR); /* fails if the peer has ended it already */
        say();
    }
    if (copy >= 0) {
        close(copy);
    }
}

/* Caller holds the lock. */
static bool add(const struct newcomer *c)
{
    uint32_t max = bt_newcomers_max();
    if (all.n >= 2 * (uint64_t)max) {
        const struct newcomer *last = &all.ring[(all.n - 2 * (uint64_t)max) % RING];
        if (last->fd >= 0 && is_at(last->fd, last)) {
            say();
            return false;
        }
    }
    while (all.n - all.first >= max) {
        end(&all.ring[all.first++ % RING]);
    }
    all.ring[all.n++ % RING] = *c;
    return true;
}

bool bt_newcomers_came(int fd)
{
    struct sockaddr_storage local, peer;
    socklen_t local_len = sizeof(local), peer_len = sizeof(peer), len = sizeof(uint64_t);
    struct newcomer c = {.fd = fd};
    if (getsockname(fd, (struct sockaddr *)&local, &local_len) != 0 ||
        getpeername(fd, (struct sockaddr *)&peer, &peer_len) != 0 || !address_of(&peer, &c.from) ||
        getsockopt(fd, SOL_SOCKET, SO_COOKIE, &c.cookie, &len) != 0) {
        return true;
    }
    pthread_mutex_lock(&all.lock);
    bool stays = !guarded(&local) || add(&c);
    pthread_mutex_unlock(&all.lock);
    return stays;
}

void bt_newcomers_known(const char *peer)
{
    struct address from;
    if (!address_parse(peer, &from)) {
        return; /* a Unix socket, which is not guarded */
    }
    pthread_mutex_lock(&all.lock);
    for (uint64_t i = all.n; i > all.first;
         i--) { /* the newest first: the peer is most likely one of them */
        struct newcomer *c = &all.ring[(i - 1) % RING];
        if (c->fd >= 0 && address_equal(&c->from, &from)) {
            c->fd = -1;
            break;
        }
    }
    pthread_mutex_unlock(&all.lock);
}
