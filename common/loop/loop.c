/* epoll event loop with timers, posted tasks and signals. Owned by one thread; any thread may call
 * bt_loop_post and bt_loop_stop. */
#include "common/loop/loop.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "common/base/list.h"
#include "common/log/log.h"

#define EVENTS_PER_TURN 64
#define SIGNALS_MAX     8
/* Time for posted tasks in one turn, as timers and sockets wait. */
#define POSTED_NS 4000000ull
/* Time of a turn after which timers and long work get only a slice. */
#define TURN_NS     10000000ull
#define SLOW_SAY_NS 10000000000ull /* between two log lines about slow turns */

extern const char __executable_start[]; /* set by the linker: the program's address */

struct bt_loop_fd {
    struct bt_list link; /* in loop->fds, or loop->dead until the turn ends */
    int fd;
    bt_loop_fd_fn fn; /* NULL: removed */
    void *arg;
};

struct bt_loop {
    int epfd, wakefd, sigfd;
    _Atomic bool stopping;
    uint64_t now_ns;
    struct bt_list fds, dead;
    struct bt_timer **heap; /* 1-based binary heap by due_ns */
    uint32_t n_timers, heap_cap;
    pthread_mutex_t lock; /* guards the posted list only */
    struct bt_task *posted, **posted_tail;
    struct bt_task *todo; /* taken from `posted` and not run yet */
    struct {
        int signo;
        bt_loop_signal_fn fn;
        void *arg;
    } signals[SIGNALS_MAX];
    uint32_t n_signals;
    struct { /* the current turn, see measure() */
        void (*fn)(void *arg, const struct bt_loop_tick *t);
        void *arg;
        uint64_t last_ns, longest_ns; /* end of the last callback; duration of the longest one */
        uintptr_t longest_at;
        struct bt_log_pace pace; /* of lines about slow turns */
    } turn;
};

static void on_wake(void *arg, uint32_t events)
{
    struct bt_loop *l = arg;
    uint64_t n;
    (void)events;
    if (read(l->wakefd, &n, sizeof(n)) < 0) {
        BT_ASSERT(errno == EAGAIN || errno == EINTR);
    }
}

bt_status_t bt_loop_create(struct bt_loop **loop_p)
{
    struct bt_loop *l = bt_calloc(1, sizeof(*l));
    l->epfd = epoll_create1(EPOLL_CLOEXEC);
    l->wakefd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    l->sigfd = -1;
    if (l->epfd < 0 || l->wakefd < 0) {
        if (l->epfd >= 0) {
            close(l->epfd);
        }
        free(l);
        return BT_ERR_IO;
    }
    bt_list_init(&l->fds);
    bt_list_init(&l->dead);
    pthread_mutex_init(&l->lock, NULL);
    l->posted_tail = &l->posted;
    l->now_ns = bt_mono_ns();
    bt_loop_fd_add(l, l->wakefd, EPOLLIN, on_wake, l);
    *loop_p = l;
    return BT_OK;
}

static void free_dead(struct bt_loop *l)
{
    while (!bt_list_empty(&l->dead)) {
        struct bt_loop_fd *w = BT_CONTAINER_OF(l->dead.next, struct bt_loop_fd, link);
        bt_list_remove(&w->link);
        free(w);
    }
}

void bt_loop_destroy(struct bt_loop *l)
{
    if (l == NULL) {
        return;
    }
    while (!bt_list_empty(&l->fds)) {
        struct bt_loop_fd *w = BT_CONTAINER_OF(l->fds.next, struct bt_loop_fd, link);
        bt_loop_fd_del(l, w);
    }
    free_dead(l);
    if (l->sigfd >= 0) {
        close(l->sigfd);
    }
    close(l->epfd);
    close(l->wakefd);
    pthread_mutex_destroy(&l->lock);
    free(l->heap);
    free(l);
}

struct bt_loop_fd *bt_loop_fd_add(struct bt_loop *l, int fd, uint32_t events, bt_loop_fd_fn fn,
                                  void *arg)
{
    struct bt_loop_fd *w = bt_calloc(1, sizeof(*w));
    *w = (struct bt_loop_fd){.fd = fd, .fn = fn, .arg = arg};
    bt_list_insert_tail(&l->fds, &w->link);
    struct epoll_event ev = {.events = events, .data.ptr = w};
    BT_ASSERT(epoll_ctl(l->epfd, EPOLL_CTL_ADD, fd, &ev) == 0);
    return w;
}

void bt_loop_fd_mod(struct bt_loop *l, struct bt_loop_fd *w, uint32_t events)
{
    struct epoll_event ev = {.events = events, .data.ptr = w};
    BT_ASSERT(epoll_ctl(l->epfd, EPOLL_CTL_MOD, w->fd, &ev) == 0);
}

void bt_loop_fd_del(struct bt_loop *l, struct bt_loop_fd *w)
{
    BT_ASSERT(w->fn != NULL);
    epoll_ctl(l->epfd, EPOLL_CTL_DEL, w->fd, NULL);
    w->fn = NULL; /* an event of this turn may still point to it: freed at the end of the turn */
    bt_list_remove(&w->link);
    bt_list_insert_tail(&l->dead, &w->link);
}

/* ---- how long a turn takes ---- */

static uint64_t thread_cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* The callback at address `at` has returned. */
static void measure(struct bt_loop *l, uintptr_t at)
{
    uint64_t now = bt_mono_ns();
    if (now - l->turn.last_ns > l->turn.longest_ns) {
        l->turn.longest_ns = now - l->turn.last_ns;
        l->turn.longest_at = at;
    }
    l->turn.last_ns = now;
}

static void turn_over(struct bt_loop *l, uint64_t cpu_ns)
{
    struct bt_loop_tick t = {.wall_ns = l->turn.last_ns - l->now_ns,
                             .cpu_ns = thread_cpu_ns() - cpu_ns};
    if (l->turn.fn != NULL) {
        l->turn.fn(l->turn.arg, &t);
    }
    if (t.cpu_ns < BT_LOOP_SLOW_NS) {
        return;
    }
    uint32_t times = bt_log_due(&l->turn.pace, l->turn.last_ns, SLOW_SAY_NS);
    if (times > 0) {
        BT_WARN("slow_loop_tick", "ms=%.1f cpu_ms=%.1f longest_ms=%.1f at=%#zx times=%u",
                (double)t.wall_ns / 1e6, (double)t.cpu_ns / 1e6, (double)l->turn.longest_ns / 1e6,
                (size_t)(l->turn.longest_at - (uintptr_t)__executable_start), times);
    }
}

void bt_loop_watch(struct bt_loop *l, void (*fn)(void *arg, const struct bt_loop_tick *t),
                   void *arg)
{
    l->turn.fn = fn;
    l->turn.arg = arg;
}

uint64_t bt_loop_turn_ns(const struct bt_loop *l)
{
    return l->now_ns;
}

uint64_t bt_loop_until(const struct bt_loop *l, uint64_t want_ns)
{
    uint64_t now = bt_mono_ns();
    return BT_MAX(BT_MIN(now + want_ns, l->now_ns + TURN_NS), now + BT_LOOP_SLICE_NS);
}

/* ---- timers: a binary heap; each timer knows its position ---- */

static void heap_set(struct bt_loop *l, uint32_t pos, struct bt_timer *t)
{
    l->heap[pos] = t;
    t->heap_pos = pos;
}

static void heap_up(struct bt_loop *l, uint32_t pos, struct bt_timer *t)
{
    while (pos > 1 && l->heap[pos / 2]->due_ns > t->due_ns) {
        heap_set(l, pos, l->heap[pos / 2]);
        pos /= 2;
    }
    heap_set(l, pos, t);
}

static void heap_down(struct bt_loop *l, uint32_t pos, struct bt_timer *t)
{
    for (;;) {
        uint32_t child = 2 * pos;
        if (child > l->n_timers) {
            break;
        }
        if (child < l->n_timers && l->heap[child + 1]->due_ns < l->heap[child]->due_ns) {
            child++;
        }
        if (l->heap[child]->due_ns >= t->due_ns) {
            break;
        }
        heap_set(l, pos, l->heap[child]);
        pos = child;
    }
    heap_set(l, pos, t);
}

static void timer_arm(struct bt_loop *l, struct bt_timer *t)
{
    if (l->n_timers + 1 >= l->heap_cap) {
        l->heap_cap = l->heap_cap == 0 ? 32 : l->heap_cap * 2;
        l->heap = bt_realloc(l->heap, l->heap_cap * sizeof(l->heap[0]));
    }
    heap_up(l, ++l->n_timers, t);
}

void bt_timer_stop(struct bt_loop *l, struct bt_timer *t)
{
    if (t->heap_pos == 0) {
        return;
    }
    uint32_t pos = t->heap_pos;
    BT_ASSERT(pos <= l->n_timers && l->heap[pos] == t);
    struct bt_timer *last = l->heap[l->n_timers--];
    t->heap_pos = 0;
    if (last != t) {
        if (pos > 1 && l->heap[pos / 2]->due_ns > last->due_ns) {
            heap_up(l, pos, last);
        } else {
            heap_down(l, pos, last);
        }
    }
}

void bt_timer_start(struct bt_loop *l, struct bt_timer *t, uint64_t delay_ms, uint64_t period_ms,
                    bt_loop_fn fn, void *arg)
{
    uint64_t now = bt_mono_ns();
    /* A timer that is due keeps its place. Otherwise code that starts it again in each turn would
     * delay it forever. */
    bool due = delay_ms == 0 && t->heap_pos != 0 && t->due_ns <= now;
    uint64_t due_ns = due ? t->due_ns : now + delay_ms * 1000000ull;
    bt_timer_stop(l, t);
    t->due_ns = due_ns;
    t->period_ns = period_ms * 1000000ull;
    t->fn = fn;
    t->arg = arg;
    timer_arm(l, t);
}

/* Timers that get no time are the first in the next turn. */
static void run_timers(struct bt_loop *l)
{
    uint64_t now = l->now_ns, until_ns = bt_loop_until(l, TURN_NS);
    while (l->n_timers > 0 && l->heap[1]->due_ns <= now && l->turn.last_ns < until_ns) {
        struct bt_timer *t = l->heap[1];
        bt_timer_stop(l, t);
        if (t->period_ns > 0) {
            /* After a delay missed periods are skipped, not run in a burst. */
            t->due_ns = BT_MAX(t->due_ns + t->period_ns, now + 1);
            timer_arm(l, t);
        }
        uintptr_t at = (uintptr_t)t->fn; /* fn may free the timer */
        t->fn(t->arg);
        measure(l, at);
    }
}

/* ---- tasks of other threads ---- */

void bt_loop_post(struct bt_loop *l, struct bt_task *task)
{
    task->next = NULL;
    pthread_mutex_lock(&l->lock);
    bool first = l->posted == NULL;
    *l->posted_tail = task;
    l->posted_tail = &task->next;
    pthread_mutex_unlock(&l->lock);
    if (first) {
        uint64_t one = 1;
        ssize_t n = write(l->wakefd, &one, sizeof(one));
        BT_ASSERT(n == sizeof(one) || errno == EAGAIN);
    }
}

static void take_posted(struct bt_loop *l)
{
    pthread_mutex_lock(&l->lock);
    l->todo = l->posted;
    l->posted = NULL;
    l->posted_tail = &l->posted;
    pthread_mutex_unlock(&l->lock);
}

/* False: there was no time for all of them. */
static bool run_todo(struct bt_loop *l)
{
    while (l->todo != NULL && l->turn.last_ns - l->now_ns < POSTED_NS) {
        struct bt_task *t = l->todo;
        uintptr_t at = (uintptr_t)t->fn;
        l->todo = t->next; /* fn may free or re-post the task */
        t->fn(t->arg);
        measure(l, at);
    }
    return l->todo == NULL;
}

static void run_posted(struct bt_loop *l)
{
    if (run_todo(l)) { /* first those of the last turn that got no time */
        take_posted(l);
        (void)run_todo(l);
    }
}

/* ---- signals ---- */

static void on_signalfd(void *arg, uint32_t events)
{
    struct bt_loop *l = arg;
    struct signalfd_siginfo si;
    (void)events;
    while (read(l->sigfd, &si, sizeof(si)) == sizeof(si)) {
        for (uint32_t i = 0; i < l->n_signals; i++) {
            if (l->signals[i].signo == (int)si.ssi_signo) {
                l->signals[i].fn(l->signals[i].arg, l->signals[i].signo);
            }
        }
    }
}

void bt_loop_on_signal(struct bt_loop *l, int signo, bt_loop_signal_fn fn, void *arg)
{
    BT_ASSERT(l->n_signals < SIGNALS_MAX);
    l->signals[l->n_signals].signo = signo;
    l->signals[l->n_signals].fn = fn;
    l->signals[l->n_signals++].arg = arg;
    sigset_t set;
    sigemptyset(&set);
    for (uint32_t i = 0; i < l->n_signals; i++) {
        sigaddset(&set, l->signals[i].signo);
    }
    BT_ASSERT(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0);
    bool first = l->sigfd < 0;
    l->sigfd = signalfd(l->sigfd, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    BT_ASSERT(l->sigfd >= 0);
    if (first) {
        bt_loop_fd_add(l, l->sigfd, EPOLLIN, on_signalfd, l);
    }
}

/* ---- running ---- */

static int wait_ms(const struct bt_loop *l, int timeout_ms)
{
    if (l->todo != NULL) {
        return 0;
    }
    if (l->n_timers > 0) {
        uint64_t now = bt_mono_ns(), due = l->heap[1]->due_ns;
        uint64_t ms = due <= now ? 0 : BT_DIV_UP(due - now, 1000000ull);
        if (timeout_ms < 0 || ms < (uint64_t)timeout_ms) {
            timeout_ms = (int)BT_MIN(ms, 3600000ull);
        }
    }
    return timeout_ms;
}

void bt_loop_poll(struct bt_loop *l, int timeout_ms)
{
    struct epoll_event ev[EVENTS_PER_TURN];
    int n = epoll_wait(l->epfd, ev, EVENTS_PER_TURN, wait_ms(l, timeout_ms));
    BT_ASSERT(n >= 0 || errno == EINTR);
    uint64_t cpu_ns = thread_cpu_ns();
    l->now_ns = l->turn.last_ns = bt_mono_ns();
    l->turn.longest_ns = 0;
    for (int i = 0; i < n; i++) {
        struct bt_loop_fd *w = ev[i].data.ptr;
        if (w->fn != NULL) {
            uintptr_t at = (uintptr_t)w->fn;
            w->fn(w->arg, ev[i].events);
            measure(l, at);
        }
    }
    run_posted(l);
    run_timers(l);
    free_dead(l);
    turn_over(l, cpu_ns);
}

void bt_loop_run(struct bt_loop *l)
{
    while (!l->stopping) {
        bt_loop_poll(l, -1);
    }
}

void bt_loop_stop(struct bt_loop *l)
{
    l->stopping = true;
    uint64_t one = 1;
    ssize_t n = write(l->wakefd, &one, sizeof(one));
    BT_ASSERT(n == sizeof(one) || errno == EAGAIN);
}
