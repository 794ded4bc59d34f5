/* How the kvstore controls its wire process: start, messages, silence, death, restart. wx_proxy.c
 * handles the messages. Control thread. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/log/log.h"
#include "common/rpc/session_core.h"
#include "kvstore/wire/wx_priv.h"

#define BACKOFF_MS     100u
#define BACKOFF_MAX_MS 5000u
#define GOOD_LIFE_NS   (30000ull * 1000000) /* a process that ran this long is restarted at once */
#define PING_MS        500
/* The same as for a peer's silence. */
#define SILENCE_NS (BT_RPC_SESSION_SILENCE_MS * 1000000ull)
/* Limit while UCX starts on a card. */
#define CARDS_NS     (60000ull * 1000000)
#define QUIT_NS      (10000ull * 1000000) /* the transfer thread needs 6 s at most */
#define DEATH_NS     (10000ull * 1000000) /* limit from SIGKILL to the end */
#define UNSENT_MAX   (256u << 20)
#define SOCKET_BYTES (1 << 20)

static void on_sock(void *arg, uint32_t events);
static void on_pidfd(void *arg, uint32_t events);
static void on_again(void *arg);
static void on_ping(void *arg);

/* ---- arguments ---- */

static int by_value(const void *a, const void *b)
{
    return *(const int *)a - *(const int *)b;
}

bool bt_wx_child_args(int argc, char **argv, long *parent_p, struct bt_wx_child_fds *fds_p)
{
    int *const to[] = {&fds_p->sock, &fds_p->slab, &fds_p->wake, &fds_p->board, &fds_p->crcs};
    int keep[BT_ARRAY_LEN(to)];
    if (argc != 3 + (int)BT_ARRAY_LEN(to)) {
        return false;
    }
    *parent_p = strtol(argv[2], NULL, 10);
    for (size_t i = 0; i < BT_ARRAY_LEN(to); i++) {
        *to[i] = keep[i] = atoi(argv[3 + i]);
        if (*to[i] < 3 && to[i] != &fds_p->crcs) {
            return false;
        }
    }
    qsort(keep, BT_ARRAY_LEN(keep), sizeof(keep[0]), by_value);
    int from = 3;
    for (size_t i = 0; i < BT_ARRAY_LEN(keep); i++) {
        if (keep[i] > from) {
            (void)syscall(SYS_close_range, from, keep[i] - 1, 0);
        }
        from = BT_MAX(from, keep[i] + 1);
    }
    (void)syscall(SYS_close_range, from, ~0u, 0);
    return true;
}

/* The environment without the variables for talking to the service manager. The caller frees the
 * list. */
static char **environment(void)
{
    static const char *const own[] = {"NOTIFY_SOCKET=", "WATCHDOG_", "LISTEN_"};
    size_t n = 0;
    while (environ[n] != NULL) {
        n++;
    }
    char **list = bt_calloc(n + 1, sizeof(*list)), **to = list;
    for (char **e = environ; *e != NULL; e++) {
        bool keep = true;
        for (size_t i = 0; i < BT_ARRAY_LEN(own); i++) {
            keep = keep && strncmp(*e, own[i], strlen(own[i])) != 0;
        }
        if (keep) {
            *to++ = *e;
        }
    }
    return list;
}

/* Returns 0 and sets pid_p, or returns an errno value. */
static int spawn(const struct bt_wx_child_fds *fds, pid_t *pid_p)
{
    const int inherit[] = {fds->sock, fds->slab, fds->wake, fds->board, fds->crcs};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none, all;
    char numbers[6][16], *title = bt_sprintf("%s: wire", program_invocation_short_name);
    char *argv[] = {title,      (char *)(uintptr_t)BT_WX_CHILD_ARG,
                    numbers[5], numbers[0],
                    numbers[1], numbers[2],
                    numbers[3], numbers[4],
                    NULL};
    char **env = environment();
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    for (size_t i = 0; i < BT_ARRAY_LEN(inherit); i++) {
        snprintf(numbers[i], sizeof(numbers[i]), "%d", inherit[i]);
        if (inherit[i] >= 0) { /* dup to itself clears close-on-exec */
            posix_spawn_file_actions_adddup2(&files, inherit[i], inherit[i]);
        }
    }
    snprintf(numbers[5], sizeof(numbers[5]), "%d", (int)getpid());
    posix_spawnattr_init(&attr);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &all);
    int rc = posix_spawn(pid_p, "/proc/self/exe", &files, &attr, argv, env);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&files);
    free((void *)env);
    free(title);
    return rc;
}

/* ---- start ---- */

static void close_all(const int *fds, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
}

static void ring_anew(struct bt_wx_proxy *p)
{
    uint64_t v;
    /* Wake-ups that the previous process did not read. */
    ssize_t ignored = read(p->x->wakefd, &v, sizeof(v));
    (void)ignored;
    atomic_store(&p->board->bell.woken, false);
    atomic_store(&p->board->bell.kicked, true); /* flow words may have changed */
    atomic_store(&p->board->posted, true);
}

bt_status_t bt_wx_process_start(struct bt_wx_proxy *p, char *err, size_t err_cap)
{
    struct bt_wx_process *c = &p->process;
    const struct bt_wx_config *conf = &p->x->conf;
    int ends[3] = {-1, -1, -1}, bytes = SOCKET_BYTES; /* this side's socket, the process's socket,
                                                         the slab */
    ring_anew(p);
    int rc = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0 ? errno : 0;
    if (rc == 0 && (ends[2] = bt_slab_open_again(conf->slab)) < 0) {
        rc = errno;
    }
    if (rc == 0) {
        for (int i = 0; i < 2; i++) {
            (void)setsockopt(ends[i], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
        }
        struct bt_wx_child_fds fds = {.sock = ends[1],
                                      .slab = ends[2],
                                      .wake = p->x->wakefd,
                                      .board = p->board_fd,
                                      .crcs =
                                          conf->crcs != NULL ? bt_slab_crcs_fd(conf->crcs) : -1};
        rc = spawn(&fds, &c->pid);
    }
    if (rc == 0) {
        c->pidfd = (int)syscall(SYS_pidfd_open, c->pid, 0);
        if (c->pidfd < 0) {
            rc = errno;
            (void)kill(c->pid, SIGKILL);
            (void)waitpid(c->pid, NULL, 0);
        }
    }
    if (rc != 0) {
        c->pid = 0;
        close_all(ends, BT_ARRAY_LEN(ends));
        snprintf(err, err_cap,
                 "the wire process (this program, as /proc/self/exe) cannot be started: %s. It "
                 "needs /proc, descriptors and one more process",
                 strerror(rc));
        return BT_ERR_IO;
    }
    close_all(ends + 1, 2);
    bt_wx_pipe_init(&c->pipe, ends[0]);
    c->told = c->sock_out = false;
    c->start_ns = bt_mono_ns();
    c->ping_ns = c->tick_ns = 0;
    c->pidfd_w = bt_loop_fd_add(conf->loop, c->pidfd, EPOLLIN, on_pidfd, p);
    c->sock_w = bt_loop_fd_add(conf->loop, ends[0], EPOLLIN, on_sock, p);
    bt_timer_start(conf->loop, &c->ping, PING_MS, PING_MS, on_ping, p);
    bt_wx_proxy_greet(p);
    bt_wx_process_post(p);
    BT_INFO("wire_process_started", "pid=%d", (int)c->pid);
    return BT_OK;
}

/* ---- messages ---- */

void bt_wx_process_kill(struct bt_wx_proxy *p, const char *why)
{
    struct bt_wx_process *c = &p->process;
    if (c->pid == 0 || c->told) {
        return;
    }
    c->told = true;
    snprintf(c->why, sizeof(c->why), "%s", why);
    /* A child that is not reaped: no other process can have its number. */
    (void)kill(c->pid, SIGKILL);
}

static void watch_sock(struct bt_wx_proxy *p, bool out)
{
    struct bt_wx_process *c = &p->process;
    if (c->sock_w != NULL && c->sock_out != out) {
        c->sock_out = out;
        bt_loop_fd_mod(p->x->conf.loop, c->sock_w, out ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
}

static void unwatch_sock(struct bt_wx_proxy *p)
{
    struct bt_wx_process *c = &p->process;
    if (c->sock_w != NULL) {
        bt_loop_fd_del(p->x->conf.loop, c->sock_w);
        c->sock_w = NULL;
    }
}

void bt_wx_process_post(struct bt_wx_proxy *p)
{
    struct bt_wx_process *c = &p->process;
    if (c->pid == 0 || c->told) {
        return;
    }
    /* If it is lost, the socket becomes readable too. */
    bt_status_t st = bt_wx_pipe_flush(&c->pipe);
    atomic_store(&p->board->posted, true);
    watch_sock(p, st == BT_AGAIN);
    if (bt_wx_pipe_unsent(&c->pipe) > UNSENT_MAX) {
        bt_wx_process_kill(p, "it does not read its commands");
    }
}

/* Statuses as of bt_wx_pipe_read. */
static bt_status_t read_messages(struct bt_wx_proxy *p)
{
    struct bt_wx_process *c = &p->process;
    struct bt_wx_ipc_msg m;
    bt_status_t got = bt_wx_pipe_read(&c->pipe), st;
    while (!c->told && (st = bt_wx_pipe_next(&c->pipe, &m)) != BT_AGAIN) {
        if (st != BT_OK || !bt_wx_proxy_message(p, &m)) {
            bt_wx_process_kill(p, "it sent a malformed message");
        }
    }
    return got;
}

static void on_sock(void *arg, uint32_t events)
{
    struct bt_wx_proxy *p = arg;
    if (events & EPOLLOUT) {
        bt_wx_process_post(p);
    }
    if ((events & ~(uint32_t)EPOLLOUT) && read_messages(p) == BT_ERR_PEER_LOST) {
        unwatch_sock(p);
        (void)kill(p->process.pid,
                   SIGKILL); /* it is ending already; it may be writing a core file */
    }
}

/* ---- silence ---- */

static void on_ping(void *arg)
{
    struct bt_wx_proxy *p = arg;
    struct bt_wx_process *c = &p->process;
    uint64_t now = bt_mono_ns();
    uint64_t limit = bt_wx_proxy_cards_asked(p) ? CARDS_NS : SILENCE_NS;
    if (bt_stood_still(&c->tick_ns, now, SILENCE_NS / 2)) {
        c->ping_ns = c->ping_ns != 0 ? now : 0; /* its answer may be unread in the socket */
    }
    if (c->ping_ns != 0 && now - c->ping_ns > limit) {
        bt_wx_process_kill(p, "it did not answer");
    } else if (c->ping_ns == 0) {
        struct bt_log_settings log;
        bt_log_settings_get(&log);
        struct bt_wx_ipc_ping b = {.log_level = (int32_t)log.level};
        struct iovec part = {&b, sizeof(b)};
        c->ping_ns = now;
        bt_wx_pipe_put(&c->pipe, BT_WX_M_PING, 0, &part, 1);
        bt_wx_process_post(p);
    }
    bt_wx_proxy_tick(p, now);
}

/* ---- death ---- */

static void describe(const siginfo_t *info, bool known, char *to, size_t cap)
{
    if (!known) {
        snprintf(to, cap, "unknown: another part of the process collected its exit status");
    } else if (info->si_code == CLD_EXITED) {
        snprintf(to, cap, "exit status %d", info->si_status);
    } else {
        snprintf(to, cap, "signal %d", info->si_status);
    }
}

static void start_again(struct bt_wx_proxy *p)
{
    struct bt_wx_process *c = &p->process;
    bt_timer_start(p->x->conf.loop, &c->again, c->backoff_ms, 0, on_again, p);
    c->backoff_ms = BT_MIN(c->backoff_ms * 2, BACKOFF_MAX_MS);
}

static void on_again(void *arg)
{
    struct bt_wx_proxy *p = arg;
    char err[512];
    if (bt_wx_process_start(p, err, sizeof(err)) != BT_OK) {
        BT_WARN("wire_process_start", "why=%s retry_ms=%u", err, p->process.backoff_ms);
        start_again(p);
    }
}

static void log_loss(struct bt_wx_proxy *p, const char *how)
{
    struct bt_wx_process *c = &p->process;
    BT_ERROR("wire_process_lost", "pid=%d how=%s why=%s retry_ms=%u lost=%s remedy=%s", (int)c->pid,
             how, c->told ? c->why : "it ended by itself", c->backoff_ms,
             "the transfers under way, which are planned again; the cache is intact",
             "it is started again. If this repeats, look for UCX messages above and for a core "
             "file; kvstore.wire.transport: grpc carries KV without UCX");
}

/* The process is dead: delivers its last messages, then reports its loss. */
static void gone(struct bt_wx_proxy *p)
{
    struct bt_wx_process *c = &p->process;
    struct bt_loop *loop = p->x->conf.loop;
    char how[64], why[160];
    siginfo_t info = {.si_pid = 0};
    bool known = waitid(P_PID, (id_t)c->pid, &info, WEXITED | WNOHANG) == 0;
    if (known && info.si_pid == 0) {
        return; /* not dead yet */
    }
    describe(&info, known, how, sizeof(how));
    while (!c->told && read_messages(p) == BT_OK) {
    }
    bt_loop_fd_del(loop, c->pidfd_w);
    unwatch_sock(p);
    bt_timer_stop(loop, &c->ping);
    close(c->pidfd);
    close(c->pipe.fd);
    bt_wx_pipe_cleanup(&c->pipe);
    if (!p->finishing) {
        if (bt_mono_ns() - c->start_ns > GOOD_LIFE_NS) {
            c->backoff_ms = BACKOFF_MS;
        }
        log_loss(p, how);
        bt_metric_add(p->x->conf.process_restarts, 1);
        start_again(p);
    }
    c->pid = 0;
    snprintf(why, sizeof(why), "the wire process ended (%s); it is started again", how);
    bt_wx_proxy_lost(p, why);
}

static void on_pidfd(void *arg, uint32_t events)
{
    (void)events;
    gone(arg);
}

/* ---- without the loop ---- */

bool bt_wx_process_wait(struct bt_wx_proxy *p, int ms)
{
    struct bt_wx_process *c = &p->process;
    if (c->pid == 0) {
        return false;
    }
    short sock = (short)(bt_wx_pipe_unsent(&c->pipe) > 0 ? POLLIN | POLLOUT : POLLIN);
    struct pollfd fds[2] = {{.fd = c->pidfd, .events = POLLIN},
                            {.fd = c->sock_w != NULL ? c->pipe.fd : -1, .events = sock}};
    if (poll(fds, 2, ms) > 0) {
        if (fds[1].revents != 0) {
            on_sock(p, (uint32_t)fds[1].revents); /* poll and epoll have the same bits */
        }
        if (fds[0].revents != 0) {
            gone(p);
        }
    }
    return c->pid != 0;
}

void bt_wx_process_finish(struct bt_wx_proxy *p)
{
    struct bt_wx_process *c = &p->process;
    uint64_t end = bt_mono_ns() + QUIT_NS;
    p->finishing = true;
    bt_timer_stop(p->x->conf.loop, &c->again);
    if (c->pid == 0) {
        return;
    }
    bt_wx_pipe_put(&c->pipe, BT_WX_M_QUIT, 0, NULL, 0);
    bt_wx_process_post(p);
    while (bt_mono_ns() < end && bt_wx_process_wait(p, 100)) {
    }
    if (c->pid != 0) {
        BT_WARN("wire_process_stuck", "pid=%d then=%s", (int)c->pid, "it is killed");
        bt_wx_process_kill(p, "it did not end");
        end = bt_mono_ns() + DEATH_NS;
        while (bt_wx_process_wait(p, 100)) {
            BT_ASSERT(bt_mono_ns() < end); /* else it might write to slots that were reused */
        }
    }
}
