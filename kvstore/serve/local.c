/* Local sessions: one SOCK_SEQPACKET connection for each worker. The first packet is LocalAttach
 * with the worker's pidfd; the answer carries the slab and two eventfds. Control thread.
 *
 * For each worker the slab is opened again: a duplicate of the kvstore's descriptor would share its
 * OFD lock and keep the slab locked as long as any worker lives. */
#include "kvstore/serve/local.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/list.h"
#include "common/conf/conf.h"
#include "common/log/log.h"
#include "common/rpc/ranges.h"
#include "common/slab/local.h"

#define CONNS_MAX       256u
#define QUEUE_BYTES_MAX (16u << 20)
#define ATTACH_WAIT_MS  2000 /* for LocalAttach, the first message of a worker */
#define FDS_MAX         4

struct packet {
    struct bt_list link;
    size_t len;
    uint8_t data[];
};

struct conn {
    struct bt_list link;
    struct bt_serve_local *sl;
    struct bt_grant_worker *worker; /* NULL: not attached yet */
    char *name;
    int sock, bell_out, bell_in; /* the kvstore rings bell_out; the worker rings bell_in */
    struct bt_loop_fd *sock_w, *bell_w;
    struct bt_timer timer; /* limit for attaching; later: closes soon */
    struct bt_list queue;
    size_t queued_bytes;
    bool broken;
};

struct bt_serve_local {
    struct bt_serve_local_config c;
    char *path, *lock_path;
    int lock_fd, sock;
    struct bt_loop_fd *sock_w;
    struct bt_list conns;
    uint32_t n_conns;
    uint8_t *rx;
};

static void conn_free(struct conn *c)
{
    struct bt_serve_local *sl = c->sl;
    bt_timer_stop(sl->c.loop, &c->timer);
    if (c->sock_w != NULL) {
        bt_loop_fd_del(sl->c.loop, c->sock_w);
    }
    if (c->bell_w != NULL) {
        bt_loop_fd_del(sl->c.loop, c->bell_w);
    }
    close(c->sock);
    if (c->bell_in >= 0) {
        close(c->bell_in);
    }
    if (c->bell_out >= 0) {
        close(c->bell_out);
    }
    while (!bt_list_empty(&c->queue)) {
        struct packet *p = BT_CONTAINER_OF(c->queue.next, struct packet, link);
        bt_list_remove(&p->link);
        free(p);
    }
    bt_list_remove(&c->link);
    sl->n_conns--;
    free(c->name);
    free(c);
}

/* Ends a session. The worker's slots stay reserved. */
static void conn_end(struct conn *c, const char *why)
{
    BT_INFO("worker_detached", "worker=%s why=%s", c->name != NULL ? c->name : "?", why);
    struct bt_grant_worker *w = c->worker;
    struct bt_grants *gs = c->sl->c.grants;
    conn_free(c);
    if (w != NULL) {
        bt_grants_detach(gs, w);
    }
}

static void conn_broken_now(void *arg)
{
    conn_end(arg, "the kvstore cannot send packets to it");
}

/* Called from inside the grants, so the session ends in a later turn of the loop. */
static void conn_break(struct conn *c)
{
    if (!c->broken) {
        c->broken = true;
        bt_timer_start(c->sl->c.loop, &c->timer, 0, 0, conn_broken_now, c);
    }
}

static void attach_timeout(void *arg)
{
    conn_end(arg, "no LocalAttach within 2 s");
}

/* ---- sending ---- */

static int try_send(int sock, const uint8_t *data, size_t len, const int *fds, int n_fds)
{
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(3 * sizeof(int))];
    } u;
    struct iovec iov = {(void *)(uintptr_t)data, len};
    struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n_fds > 0) {
        memset(&u, 0, sizeof(u));
        mh.msg_control = u.buf;
        mh.msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int));
        struct cmsghdr *cm = CMSG_FIRSTHDR(&mh);
        cm->cmsg_level = SOL_SOCKET;
        cm->cmsg_type = SCM_RIGHTS;
        cm->cmsg_len = CMSG_LEN((size_t)n_fds * sizeof(int));
        memcpy(CMSG_DATA(cm), fds, (size_t)n_fds * sizeof(int));
    }
    ssize_t n;
    do {
        n = sendmsg(sock, &mh, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n >= 0) {
        return 0;
    }
    return errno == EAGAIN || errno == EWOULDBLOCK ? 1 : -1;
}

static void conn_send(void *conn, const Baton__LocalMsg *m)
{
    struct conn *c = conn;
    size_t len = baton__local_msg__get_packed_size(m);
    if (c->broken) {
        return;
    }
    if (len > BT_LOCAL_MSG_MAX || c->queued_bytes + len > QUEUE_BYTES_MAX) {
        BT_WARN(
            "worker_slow", "worker=%s queued=%zu len=%zu why=%s", c->name, c->queued_bytes, len,
            "the worker does not read its messages, or one is too large; its connection ends: see "
            "its log");
        conn_break(c);
        return;
    }
    struct packet *p = bt_malloc(sizeof(*p) + len);
    p->len = baton__local_msg__pack(m, p->data);
    if (bt_list_empty(&c->queue)) {
        int rc = try_send(c->sock, p->data, p->len, NULL, 0);
        if (rc != 1) {
            free(p);
            if (rc < 0) {
                conn_break(c);
            }
            return;
        }
        bt_loop_fd_mod(c->sl->c.loop, c->sock_w, EPOLLIN | EPOLLOUT);
    }
    bt_list_insert_tail(&c->queue, &p->link);
    c->queued_bytes += len;
}

static void conn_flush(struct conn *c)
{
    while (!bt_list_empty(&c->queue)) {
        struct packet *p = BT_CONTAINER_OF(c->queue.next, struct packet, link);
        int rc = try_send(c->sock, p->data, p->len, NULL, 0);
        if (rc == 1) {
            return;
        }
        bt_list_remove(&p->link);
        c->queued_bytes -= p->len;
        free(p);
        if (rc < 0) {
            conn_break(c);
            return;
        }
    }
    bt_loop_fd_mod(c->sl->c.loop, c->sock_w, EPOLLIN);
}

static void conn_ring(void *conn)
{
    struct conn *c = conn;
    uint64_t one = 1;
    ssize_t n = write(c->bell_out, &one, sizeof(one));
    (void)n; /* EAGAIN: an earlier bell was not read yet */
}

static void conn_drop(void *conn)
{
    struct conn *c = conn;
    c->worker = NULL;
    conn_free(c);
}

static const struct bt_grant_worker_ops worker_ops = {
    .send = conn_send, .ring = conn_ring, .drop = conn_drop};

/* ---- attach ---- */

static void attach_refuse(struct conn *c, bt_status_t st, const char *why)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalAttached a = BATON__LOCAL_ATTACHED__INIT;
    uint8_t buf[1024];
    char text[512];
    snprintf(text, sizeof(text), "%s", why);
    BT_WARN("worker_refused", "worker=%s status=%s why=%s", c->name != NULL ? c->name : "?",
            bt_status_name(st), text);
    a.status = st;
    a.detail = text;
    a.incarnation = c->sl->c.incarnation;
    a.node = (char *)(uintptr_t)c->sl->c.node;
    m.m_case = BATON__LOCAL_MSG__M_ATTACHED;
    m.attached = &a;
    if (baton__local_msg__get_packed_size(&m) <= sizeof(buf)) {
        (void)try_send(c->sock, buf, baton__local_msg__pack(&m, buf), NULL, 0);
    }
    conn_free(c);
}

/* Returns whether fd is a pidfd. *pid_p: its process in this PID namespace; 0: it is in another
 * one. */
static bool pidfd_pid(int fd, uint32_t *pid_p)
{
    char path[64], line[256];
    snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
    FILE *f = fopen(path, "re");
    bool found = false;
    if (f == NULL) {
        return false;
    }
    while (fgets(line, sizeof(line), f) != NULL) {
        long pid;
        if (sscanf(line, "Pid: %ld", &pid) == 1) {
            *pid_p = pid > 0 ? (uint32_t)pid : 0;
            found = true;
        }
    }
    fclose(f);
    return found;
}

/* The pidfd must be the sender's own. SO_PEERCRED names the connected process, if namespaces allow
 * it. */
static bt_status_t pidfd_check(const struct conn *c, int fd, uint32_t *pid_p, char *why, size_t cap)
{
    struct ucred cred = {0};
    socklen_t len = sizeof(cred);
    if (fd < 0 || !pidfd_pid(fd, pid_p)) {
        snprintf(why, cap,
                 "LocalAttach must carry the worker's own pidfd: without it the worker's "
                 "death cannot be proven");
        return BT_ERR_PEER_PROTOCOL;
    }
    if (getsockopt(c->sock, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0 && cred.pid > 0 &&
        *pid_p != 0 && (uint32_t)cred.pid != *pid_p) {
        snprintf(why, cap, "the pidfd is of process %u, the socket of process %d", *pid_p,
                 (int)cred.pid);
        return BT_ERR_PEER_PROTOCOL;
    }
    return BT_OK;
}

static bt_status_t attach_check(const struct conn *c, const Baton__LocalAttach *a, char *why,
                                size_t cap)
{
    const struct bt_slab_super *s = c->sl->c.slab->super;
    if (a->version != BT_LOCAL_VERSION) {
        snprintf(why, cap, "the worker speaks version %u of the local protocol, the kvstore %d",
                 a->version, BT_LOCAL_VERSION);
        return BT_ERR_MISMATCH;
    }
    if (a->name[0] == '\0' || a->incarnation == 0) {
        snprintf(why, cap, "LocalAttach needs a name and an incarnation");
        return BT_ERR_INVALID;
    }
    if (a->layout_id != s->layout_id) {
        snprintf(why, cap,
                 "the worker's KV layout is %016llx, the kvstore's %016llx: set the same "
                 "model.path, model.kv_dtype, model.mtp and kv.block_tokens in both",
                 (unsigned long long)a->layout_id, (unsigned long long)s->layout_id);
        return BT_ERR_MISMATCH;
    }
    if (a->root_key.len != sizeof(s->root_key) ||
        memcmp(a->root_key.data, s->root_key, sizeof(s->root_key)) != 0) {
        snprintf(why, cap,
                 "the worker's root key differs from the kvstore's: not the same model "
                 "weights or settings");
        return BT_ERR_MISMATCH;
    }
    return BT_OK;
}

/* Makes the doorbells and a new descriptor of the slab; sends the answer. */
static bt_status_t attach_answer(struct conn *c, char *why, size_t cap)
{
    struct bt_serve_local *sl = c->sl;
    int slab_fd = bt_slab_open_again(sl->c.slab);
    c->bell_out = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->bell_in = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (slab_fd < 0 || c->bell_out < 0 || c->bell_in < 0) {
        snprintf(why, cap, "the kvstore has no descriptors left: %s", strerror(errno));
        if (slab_fd >= 0) {
            close(slab_fd);
        }
        return BT_ERR_EXHAUSTED;
    }
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalAttached a = BATON__LOCAL_ATTACHED__INIT;
    a.incarnation = sl->c.incarnation;
    a.node = (char *)(uintptr_t)sl->c.node;
    m.m_case = BATON__LOCAL_MSG__M_ATTACHED;
    m.attached = &a;
    uint8_t buf[1024];
    BT_ASSERT(baton__local_msg__get_packed_size(&m) <= sizeof(buf));
    int fds[3] = {slab_fd, c->bell_out, c->bell_in};
    int rc = try_send(c->sock, buf, baton__local_msg__pack(&m, buf), fds, 3);
    close(slab_fd);
    if (rc != 0) {
        snprintf(why, cap, "the answer cannot be sent: %s", strerror(errno));
        return BT_ERR_IO;
    }
    return BT_OK;
}

static void on_bell(void *arg, uint32_t events)
{
    struct conn *c = arg;
    uint64_t n;
    (void)events;
    if (read(c->bell_in, &n, sizeof(n)) == sizeof(n) && c->worker != NULL) {
        bt_grants_bell(c->sl->c.grants, c->worker);
    }
}

/* Returns false if the connection has ended. Takes ownership of pidfd. */
static bool on_attach(struct conn *c, const Baton__LocalAttach *a, int pidfd)
{
    char why[512] = "";
    uint32_t pid = 0;
    c->name = bt_strdup(a->name);
    bt_status_t st = pidfd_check(c, pidfd, &pid, why, sizeof(why));
    if (st == BT_OK) {
        st = attach_check(c, a, why, sizeof(why));
    }
    if (st == BT_OK) {
        st = attach_answer(c, why, sizeof(why));
    }
    if (st != BT_OK) {
        if (pidfd >= 0) {
            close(pidfd);
        }
        attach_refuse(c, st, why);
        return false;
    }
    bt_timer_stop(c->sl->c.loop, &c->timer);
    c->bell_w = bt_loop_fd_add(c->sl->c.loop, c->bell_in, EPOLLIN, on_bell, c);
    c->worker = bt_grants_attach(c->sl->c.grants, a->name, a->incarnation, pid != 0 ? pid : a->pid,
                                 pidfd, &worker_ops, c);
    BT_INFO("worker_attached", "worker=%s incarnation=%016llx pid=%u", a->name,
            (unsigned long long)a->incarnation, pid);
    return true;
}

/* ---- receiving ---- */

static ssize_t conn_recv(struct conn *c, int fds[FDS_MAX], int *n_fds_p)
{
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(FDS_MAX * sizeof(int))];
    } u;
    struct iovec iov = {c->sl->rx, BT_LOCAL_MSG_MAX};
    struct msghdr mh = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = u.buf, .msg_controllen = sizeof(u.buf)};
    ssize_t n;
    *n_fds_p = 0;
    do {
        n = recvmsg(c->sock, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        return n;
    }
    for (struct cmsghdr *cm = CMSG_FIRSTHDR(&mh); cm != NULL; cm = CMSG_NXTHDR(&mh, cm)) {
        if (cm->cmsg_level == SOL_SOCKET && cm->cmsg_type == SCM_RIGHTS) {
            *n_fds_p = (int)((cm->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(fds, CMSG_DATA(cm), (size_t)*n_fds_p * sizeof(int));
        }
    }
    if ((mh.msg_flags & MSG_TRUNC) != 0) {
        errno = EMSGSIZE;
        return -1;
    }
    return n;
}

/* Handles one packet; false: the connection has ended. */
static bool conn_packet(struct conn *c, size_t len, int *fds, int n_fds)
{
    bool alive = true;
    char why[256];
    Baton__LocalMsg *m = bt_local_unpack(c->sl->rx, len, why, sizeof(why));
    bool attach = m != NULL && c->worker == NULL && m->m_case == BATON__LOCAL_MSG__M_ATTACH;
    int keep = attach && n_fds > 0 ? 1 : 0;
    for (int i = keep; i < n_fds; i++) {
        close(fds[i]);
    }
    if (attach) {
        alive = on_attach(c, m->attach, keep ? fds[0] : -1);
    } else if (m == NULL) {
        BT_WARN("worker_protocol", "worker=%s what=%s", c->name != NULL ? c->name : "?", why);
        conn_end(c, why);
        alive = false;
    } else if (c->worker == NULL || bt_grants_message(c->sl->c.grants, c->worker, m) != BT_OK) {
        conn_end(c, "the worker sent an unexpected packet");
        alive = false;
    }
    if (m != NULL) {
        baton__local_msg__free_unpacked(m, NULL);
    }
    return alive;
}

static void on_conn(void *arg, uint32_t events)
{
    struct conn *c = arg;
    if ((events & EPOLLOUT) != 0) {
        conn_flush(c);
    }
    for (int i = 0; i < 64; i++) { /* after this many packets others get their turn */
        int fds[FDS_MAX], n_fds;
        ssize_t n = conn_recv(c, fds, &n_fds);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            return;
        }
        if (n <= 0) {
            for (int k = 0; k < n_fds; k++) {
                close(fds[k]);
            }
            conn_end(c, n == 0 ? "socket closed" : strerror(errno));
            return;
        }
        if (!conn_packet(c, (size_t)n, fds, n_fds)) {
            return;
        }
    }
}

static void on_accept(void *arg, uint32_t events)
{
    struct bt_serve_local *sl = arg;
    (void)events;
    for (;;) {
        int sock = accept4(sl->sock, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (sock < 0) {
            return;
        }
        if (sl->n_conns >= CONNS_MAX) {
            BT_WARN("worker_refused", "why=%s", "too many local sessions");
            close(sock);
            continue;
        }
        int room = BT_LOCAL_MSG_MAX;
        setsockopt(sock, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
        struct conn *c = bt_calloc(1, sizeof(*c));
        c->sl = sl;
        c->sock = sock;
        c->bell_in = c->bell_out = -1;
        bt_list_init(&c->queue);
        bt_list_insert_tail(&sl->conns, &c->link);
        sl->n_conns++;
        c->sock_w = bt_loop_fd_add(sl->c.loop, sock, EPOLLIN, on_conn, c);
        bt_timer_start(sl->c.loop, &c->timer, ATTACH_WAIT_MS, 0, attach_timeout, c);
    }
}

/* ---- the listener ---- */

/* Only one kvstore for each run_dir. The lock decides; files of a dead kvstore do not matter. */
static bt_status_t run_dir_lock(struct bt_serve_local *sl, char *err, size_t cap)
{
    char why[512];
    bt_status_t st = bt_conf_dir_private(sl->c.run_dir, why, sizeof(why));
    if (st == BT_ERR_CONFIG) {
        snprintf(err, cap, "run_dir %s: %s", sl->c.run_dir, why);
        return st;
    }
    sl->lock_fd = open(sl->lock_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0660);
    if (sl->lock_fd < 0) {
        snprintf(err, cap, "cannot create %s: %s. %s", sl->lock_path, strerror(errno),
                 bt_file_remedy(errno, "Does run_dir exist, and may this user write it?"));
        return BT_ERR_IO;
    }
    struct flock lk = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fcntl(sl->lock_fd, F_OFD_SETLK, &lk) != 0) {
        snprintf(
            err, cap,
            "another kvstore runs in run_dir %s: a node has exactly one; stop it, or give this "
            "one its own run_dir and node.id",
            sl->c.run_dir);
        close(sl->lock_fd);
        sl->lock_fd = -1;
        return BT_ERR_EXISTS;
    }
    return BT_OK;
}

static bt_status_t sock_listen(struct bt_serve_local *sl, char *err, size_t cap)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    if (strlen(sl->path) >= sizeof(sa.sun_path)) {
        snprintf(err, cap, "the socket path %s is longer than %zu bytes: shorten run_dir", sl->path,
                 sizeof(sa.sun_path) - 1);
        return BT_ERR_CONFIG;
    }
    memcpy(sa.sun_path, sl->path, strlen(sl->path) + 1);
    unlink(sl->path);
    sl->sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (sl->sock < 0 || bind(sl->sock, (struct sockaddr *)&sa, sizeof(sa)) != 0 ||
        chmod(sl->path, 0660) != 0 || listen(sl->sock, 64) != 0) {
        snprintf(
            err, cap, "cannot listen on %s: %s. %s", sl->path, strerror(errno),
            bt_file_remedy(errno, "run_dir is a folder of this host that this user may write"));
        return BT_ERR_IO;
    }
    sl->sock_w = bt_loop_fd_add(sl->c.loop, sl->sock, EPOLLIN, on_accept, sl);
    return BT_OK;
}

bt_status_t bt_serve_local_create(const struct bt_serve_local_config *c,
                                  struct bt_serve_local **sl_p, char *err, size_t err_cap)
{
    struct bt_serve_local *sl = bt_calloc(1, sizeof(*sl));
    sl->c = *c;
    sl->lock_fd = sl->sock = -1;
    bt_list_init(&sl->conns);
    sl->path = bt_sprintf("%s/kvstore.sock", c->run_dir);
    sl->lock_path = bt_sprintf("%s/kvstore.lock", c->run_dir);
    sl->rx = bt_malloc(BT_LOCAL_MSG_MAX);
    bt_status_t st = run_dir_lock(sl, err, err_cap);
    if (st == BT_OK) {
        st = sock_listen(sl, err, err_cap);
    }
    if (st != BT_OK) {
        bt_serve_local_destroy(sl);
        return st;
    }
    *sl_p = sl;
    return BT_OK;
}

void bt_serve_local_destroy(struct bt_serve_local *sl)
{
    if (sl == NULL) {
        return;
    }
    while (!bt_list_empty(&sl->conns)) {
        conn_end(BT_CONTAINER_OF(sl->conns.next, struct conn, link), "the kvstore stops");
    }
    if (sl->sock_w != NULL) {
        bt_loop_fd_del(sl->c.loop, sl->sock_w);
    }
    if (sl->sock >= 0) {
        close(sl->sock);
        unlink(sl->path);
    }
    if (sl->lock_fd >= 0) {
        close(sl->lock_fd); /* the file stays: after an unlink two processes could hold the lock */
    }
    free(sl->path);
    free(sl->lock_path);
    free(sl->rx);
    free(sl);
}
