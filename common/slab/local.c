/* A worker's side of the session with its node's kvstore: connect, attach, packets, doorbells. Runs
 * on the loop's thread, except bt_local_ring. Owns the socket, the mapped slab and the two eventfds
 * of one attachment. It frees all of these when the socket ends, and tries to attach again every
 * 200 ms. */
#include "common/slab/local.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/list.h"
#include "common/log/log.h"
#include "common/rpc/ranges.h"

#define RETRY_MS         200
#define REFUSED_RETRY_MS 2000
#define ANSWER_WAIT_MS   3000 /* for LocalAttached: longer than the kvstore waits for us */
#define QUEUE_MSGS_MAX   4096u
#define QUEUE_BYTES_MAX  (8u << 20)
#define FDS_MAX          4 /* because of alignment, CMSG_SPACE of three has room for four */

typedef enum { LOCAL_IDLE, LOCAL_ATTACHING, LOCAL_ATTACHED } local_state_t;

struct packet {
    struct bt_list link;
    size_t len;
    uint8_t data[];
};

struct bt_local {
    struct bt_loop *loop;
    char *path, *name;
    uint64_t incarnation;
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    struct bt_local_ops ops;
    void *arg;
    bool has_kvstore_uid;
    uid_t kvstore_uid; /* this user's kvstore is trusted, and root's and this process's user's */

    local_state_t state;
    int sock, pidfd, bell_in;
    struct bt_loop_fd *sock_w, *bell_w;
    struct bt_slab *slab;
    struct bt_timer timer; /* next attempt, or the limit of an attach */
    struct bt_list queue;
    uint32_t queued;
    size_t queued_bytes;
    uint8_t *rx;

    pthread_mutex_t ring_lock; /* for bell_out: any thread rings it, the loop's thread replaces
                                  it */
    int bell_out;

    int depth; /* callbacks in progress: the struct must not be freed meanwhile */
    bool stopped;
};

static void local_connect(void *arg);
static void local_drop(struct bt_local *l, uint64_t retry_ms);

static void local_free(struct bt_local *l)
{
    pthread_mutex_destroy(&l->ring_lock);
    if (l->pidfd >= 0) {
        close(l->pidfd);
    }
    free(l->rx);
    free(l->path);
    free(l->name);
    free(l);
}

/* Around every callback: the owner may stop the session inside it. */
static void enter(struct bt_local *l)
{
    l->depth++;
}
static bool leave(struct bt_local *l) /* false: l was freed */
{
    if (--l->depth == 0 && l->stopped) {
        local_free(l);
        return false;
    }
    return !l->stopped;
}

static void queue_clear(struct bt_local *l)
{
    while (!bt_list_empty(&l->queue)) {
        struct packet *p = BT_CONTAINER_OF(l->queue.next, struct packet, link);
        bt_list_remove(&p->link);
        free(p);
    }
    l->queued = 0;
    l->queued_bytes = 0;
}

/* Closes everything of the attachment. The slab stays mapped until the owner was told
 * (on_detached). */
static void local_drop(struct bt_local *l, uint64_t retry_ms)
{
    bool was = l->state == LOCAL_ATTACHED;
    l->state = LOCAL_IDLE;
    if (l->sock_w != NULL) {
        bt_loop_fd_del(l->loop, l->sock_w);
        l->sock_w = NULL;
    }
    if (l->bell_w != NULL) {
        bt_loop_fd_del(l->loop, l->bell_w);
        l->bell_w = NULL;
    }
    if (l->sock >= 0) {
        close(l->sock);
        l->sock = -1;
    }
    if (l->bell_in >= 0) {
        close(l->bell_in);
        l->bell_in = -1;
    }
    pthread_mutex_lock(&l->ring_lock);
    if (l->bell_out >= 0) {
        close(l->bell_out);
        l->bell_out = -1;
    }
    pthread_mutex_unlock(&l->ring_lock);
    queue_clear(l);
    if (retry_ms != 0) {
        bt_timer_start(l->loop, &l->timer, retry_ms, 0, local_connect, l);
    } else {
        bt_timer_stop(l->loop, &l->timer);
    }
    struct bt_slab *slab = l->slab;
    l->slab = NULL;
    if (was) {
        enter(l);
        l->ops.on_detached(l->arg);
        leave(l);
    }
    bt_slab_unmap(slab);
}

static void local_refused(struct bt_local *l, bt_status_t st, const char *why)
{
    char text[512];
    snprintf(text, sizeof(text), "%s", why);
    BT_WARN("kvstore_refused", "status=%s why=%s", bt_status_name(st), text);
    enter(l);
    local_drop(l, REFUSED_RETRY_MS);
    if (!l->stopped) {
        l->ops.on_refused(l->arg, st, text);
    }
    leave(l);
}

/* local_stop disarms the timer, so l is valid here. */
static void attach_timeout(void *arg)
{
    struct bt_local *l = arg;
    BT_WARN(
        "kvstore_attach_timeout", "socket=%s why=%s", l->path,
        "the kvstore did not answer and is tried again; if this repeats, it hangs: see its log");
    local_drop(l, RETRY_MS);
}

static void on_bell_fd(void *arg, uint32_t events)
{
    struct bt_local *l = arg;
    uint64_t n;
    (void)events;
    if (read(l->bell_in, &n, sizeof(n)) == sizeof(n)) {
        enter(l);
        l->ops.on_bell(l->arg);
        leave(l);
    }
}

static void close_fds(int *fds, int n)
{
    for (int i = 0; i < n; i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
}

/* The kvstore's answer: maps the slab and takes the doorbells. Takes ownership of fds. */
static void on_attached_msg(struct bt_local *l, const Baton__LocalAttached *m, int *fds, int n_fds)
{
    if (m->status != BT_OK) {
        close_fds(fds, n_fds);
        local_refused(l, (bt_status_t)m->status, m->detail);
        return;
    }
    if (n_fds != 3) {
        close_fds(fds, n_fds);
        local_refused(l, BT_ERR_PEER_PROTOCOL,
                      "the kvstore did not pass the slab and the doorbells");
        return;
    }
    char err[512];
    bt_status_t st = bt_slab_map(fds[0], &l->layout, &l->root, &l->slab, err, sizeof(err));
    close(fds[0]);
    if (st != BT_OK) {
        close_fds(fds + 1, 2);
        local_refused(l, st, err);
        return;
    }
    bt_timer_stop(l->loop, &l->timer);
    l->bell_in = fds[1];
    l->bell_w = bt_loop_fd_add(l->loop, l->bell_in, EPOLLIN, on_bell_fd, l);
    pthread_mutex_lock(&l->ring_lock);
    l->bell_out = fds[2];
    pthread_mutex_unlock(&l->ring_lock);
    l->state = LOCAL_ATTACHED;
    l->ops.on_attached(l->arg, l->slab, m->incarnation);
}

/* Receives one packet and its descriptors. Returns its length, 0 at the end, -1 with errno. */
static ssize_t local_recv(struct bt_local *l, int fds[FDS_MAX], int *n_fds_p)
{
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(FDS_MAX * sizeof(int))];
    } u;
    struct iovec iov = {l->rx, BT_LOCAL_MSG_MAX};
    struct msghdr mh = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = u.buf, .msg_controllen = sizeof(u.buf)};
    *n_fds_p = 0;
    ssize_t n;
    do {
        n = recvmsg(l->sock, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        return n;
    }
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&mh); c != NULL; c = CMSG_NXTHDR(&mh, c)) {
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            *n_fds_p = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(fds, CMSG_DATA(c), (size_t)*n_fds_p * sizeof(int));
        }
    }
    if ((mh.msg_flags & MSG_TRUNC) != 0) {
        close_fds(fds, *n_fds_p);
        *n_fds_p = 0;
        errno = EMSGSIZE;
        return -1;
    }
    return n;
}

static void queue_flush(struct bt_local *l);

static void on_sock(void *arg, uint32_t events)
{
    struct bt_local *l = arg;
    enter(l);
    if ((events & EPOLLOUT) != 0) {
        queue_flush(l);
    }
    /* A limited number of packets in a turn, so that other watchers are served too. */
    for (int i = 0; i < 64 && l->sock >= 0 && !l->stopped; i++) {
        int fds[FDS_MAX] = {-1, -1, -1, -1}, n_fds;
        ssize_t n = local_recv(l, fds, &n_fds);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            break;
        }
        if (n <= 0) {
            BT_INFO("kvstore_detached", "socket=%s why=%s", l->path,
                    n == 0 ? "closed by the kvstore" : strerror(errno));
            local_drop(l, RETRY_MS);
            break;
        }
        char why[256] = "unexpected packet";
        Baton__LocalMsg *m = bt_local_unpack(l->rx, (size_t)n, why, sizeof(why));
        if (m != NULL && m->m_case == BATON__LOCAL_MSG__M_ATTACHED && l->state == LOCAL_ATTACHING) {
            on_attached_msg(l, m->attached, fds, n_fds);
        } else {
            close_fds(fds, n_fds);
            if (m == NULL || l->state != LOCAL_ATTACHED) {
                BT_WARN("kvstore_protocol", "what=%s", why);
                local_drop(l, RETRY_MS);
            } else {
                l->ops.on_message(l->arg, m);
            }
        }
        if (m != NULL) {
            baton__local_msg__free_unpacked(m, NULL);
        }
    }
    leave(l);
}

static int send_attach(struct bt_local *l)
{
    Baton__LocalAttach a = BATON__LOCAL_ATTACH__INIT;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    a.version = BT_LOCAL_VERSION;
    a.name = l->name;
    a.incarnation = l->incarnation;
    a.layout_id = l->layout.layout_id;
    a.root_key.data = l->root.b;
    a.root_key.len = sizeof(l->root.b);
    a.pid = (uint32_t)getpid();
    m.m_case = BATON__LOCAL_MSG__M_ATTACH;
    m.attach = &a;
    uint8_t *buf = bt_malloc(baton__local_msg__get_packed_size(&m));
    struct iovec iov = {buf, baton__local_msg__pack(&m, buf)};
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(sizeof(int))];
    } u;
    memset(&u, 0, sizeof(u));
    struct msghdr mh = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = u.buf, .msg_controllen = sizeof(u.buf)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&mh);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &l->pidfd, sizeof(int));
    ssize_t n = sendmsg(l->sock, &mh, MSG_DONTWAIT | MSG_NOSIGNAL);
    free(buf);
    return n < 0 ? -1 : 0;
}

/* The process that listens there gets this worker's KV, and this worker loads prefixes from it. */
static bool trusted(const struct bt_local *l, char *why, size_t cap)
{
    struct ucred cred = {0};
    socklen_t len = sizeof(cred);
    if (getsockopt(l->sock, SOL_SOCKET, SO_PEERCRED, &cred, &len) != 0) {
        snprintf(why, cap, "%s: the kernel does not name its owner: %s", l->path, strerror(errno));
        return false;
    }
    if (cred.uid == geteuid() || cred.uid == 0 ||
        (l->has_kvstore_uid && cred.uid == l->kvstore_uid)) {
        return true;
    }
    snprintf(why, cap,
             "%s: the kvstore there runs as user %u (process %d), this worker as user %u: run both "
             "as one user, or name the kvstore's in worker.kvstore_user if it is yours",
             l->path, (unsigned)cred.uid, (int)cred.pid, (unsigned)geteuid());
    return false;
}

static void local_connect(void *arg)
{
    struct bt_local *l = arg;
    if (l->pidfd < 0) {
        l->pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
        if (l->pidfd < 0) {
            char why[256];
            snprintf(why, sizeof(why),
                     "pidfd_open of the own process failed (%s): the kvstore accepts only workers "
                     "whose death it can prove; Linux 5.3 or later is needed and no seccomp filter "
                     "may forbid pidfd_open",
                     strerror(errno));
            local_refused(l, BT_ERR_UNSUPPORTED, why);
            return;
        }
    }
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    if (strlen(l->path) >= sizeof(sa.sun_path)) {
        char why[256];
        snprintf(why, sizeof(why), "the socket path is longer than %zu bytes: shorten run_dir",
                 sizeof(sa.sun_path) - 1);
        local_refused(l, BT_ERR_CONFIG, why);
        return;
    }
    memcpy(sa.sun_path, l->path, strlen(l->path) + 1);
    l->sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (l->sock < 0 || connect(l->sock, (struct sockaddr *)&sa, sizeof(sa)) != 0) {
        BT_DEBUG("kvstore_connect", "socket=%s why=%s", l->path, strerror(errno));
        local_drop(l, RETRY_MS);
        return;
    }
    char why[512];
    if (!trusted(l, why, sizeof(why))) {
        local_refused(l, BT_ERR_CONFIG, why);
        return;
    }
    int room = BT_LOCAL_MSG_MAX;
    setsockopt(l->sock, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
    if (send_attach(l) != 0) {
        local_drop(l, RETRY_MS);
        return;
    }
    l->state = LOCAL_ATTACHING;
    l->sock_w = bt_loop_fd_add(l->loop, l->sock, EPOLLIN, on_sock, l);
    bt_timer_start(l->loop, &l->timer, ANSWER_WAIT_MS, 0, attach_timeout, l);
}

struct bt_local *bt_local_start(struct bt_loop *loop, const char *run_dir, const char *worker_name,
                                uint64_t incarnation, const struct bt_kv_layout *layout,
                                const struct bt_kv_key *root, const struct bt_local_ops *ops,
                                void *arg)
{
    struct bt_local *l = bt_calloc(1, sizeof(*l));
    l->loop = loop;
    l->path = bt_sprintf("%s/kvstore.sock", run_dir);
    l->name = bt_strdup(worker_name);
    l->incarnation = incarnation;
    l->layout = *layout;
    l->root = *root;
    l->ops = *ops;
    l->arg = arg;
    l->sock = l->pidfd = l->bell_in = l->bell_out = -1;
    l->rx = bt_malloc(BT_LOCAL_MSG_MAX);
    bt_list_init(&l->queue);
    pthread_mutex_init(&l->ring_lock, NULL);
    /* Started by the loop, so that no callback comes before this function has returned. */
    bt_timer_start(loop, &l->timer, 0, 0, local_connect, l);
    return l;
}

void bt_local_trust(struct bt_local *l, uid_t uid)
{
    l->has_kvstore_uid = true;
    l->kvstore_uid = uid;
}

void bt_local_stop(struct bt_local *l)
{
    if (l == NULL || l->stopped) {
        return;
    }
    l->stopped = true;
    l->state = LOCAL_IDLE; /* the owner has asked for it: no on_detached */
    local_drop(l, 0);
    if (l->depth == 0) {
        local_free(l);
    }
}

/* 0 sent, 1 would block, -1 the session is over (its end is noticed by the watcher). */
static int try_send(struct bt_local *l, const uint8_t *data, size_t len)
{
    ssize_t n;
    do {
        n = send(l->sock, data, len, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n >= 0) {
        return 0;
    }
    return errno == EAGAIN || errno == EWOULDBLOCK ? 1 : -1;
}

static void queue_flush(struct bt_local *l)
{
    while (!bt_list_empty(&l->queue) && l->sock >= 0) {
        struct packet *p = BT_CONTAINER_OF(l->queue.next, struct packet, link);
        if (try_send(l, p->data, p->len) == 1) {
            return;
        }
        bt_list_remove(&p->link);
        l->queued--;
        l->queued_bytes -= p->len;
        free(p);
    }
    if (l->sock_w != NULL) {
        bt_loop_fd_mod(l->loop, l->sock_w, EPOLLIN);
    }
}

bt_status_t bt_local_send(struct bt_local *l, const Baton__LocalMsg *msg)
{
    if (l->state != LOCAL_ATTACHED) {
        return BT_ERR_UNAVAILABLE;
    }
    size_t len = baton__local_msg__get_packed_size(msg);
    if (len > BT_LOCAL_MSG_MAX) {
        return BT_ERR_TOO_LARGE;
    }
    if (l->queued >= QUEUE_MSGS_MAX || l->queued_bytes + len > QUEUE_BYTES_MAX) {
        return BT_AGAIN;
    }
    struct packet *p = bt_malloc(sizeof(*p) + len);
    p->len = baton__local_msg__pack(msg, p->data);
    if (bt_list_empty(&l->queue)) {
        int rc = try_send(l, p->data, p->len);
        if (rc != 1) {
            free(p);
            return rc == 0 ? BT_OK : BT_ERR_UNAVAILABLE;
        }
        bt_loop_fd_mod(l->loop, l->sock_w, EPOLLIN | EPOLLOUT);
    }
    bt_list_insert_tail(&l->queue, &p->link);
    l->queued++;
    l->queued_bytes += len;
    return BT_OK;
}

void bt_local_ring(struct bt_local *l)
{
    uint64_t one = 1;
    pthread_mutex_lock(&l->ring_lock);
    if (l->bell_out >= 0) {
        /* EAGAIN: the counter is full, so the other side will wake anyway. */
        ssize_t n = write(l->bell_out, &one, sizeof(one));
        (void)n;
    }
    pthread_mutex_unlock(&l->ring_lock);
}
