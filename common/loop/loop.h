/* The event loop of a control thread: epoll, timers, tasks posted by other threads, signals.
 * Everything but bt_loop_post and bt_loop_stop is called on the loop's own thread (or before
 * bt_loop_run). A callback may remove any watcher or timer, its own included. */
#ifndef BT_LOOP_LOOP_H
#define BT_LOOP_LOOP_H

#include <stdint.h>
#include <sys/socket.h>

#include "common/base/base.h"
#include "common/base/clock.h"

struct bt_loop;
struct bt_loop_fd;

typedef void (*bt_loop_fd_fn)(void *arg, uint32_t events); /* EPOLLIN | EPOLLOUT | ... */
typedef void (*bt_loop_fn)(void *arg);
typedef void (*bt_loop_signal_fn)(void *arg, int signo);

/* A timer lives in caller memory; zero-initialise it once. */
struct bt_timer {
    uint64_t due_ns;    /* bt_mono_ns() time */
    uint64_t period_ns; /* 0: once */
    bt_loop_fn fn;
    void *arg;
    uint32_t heap_pos; /* 0: not armed */
};

/* A task lives in caller memory and may be posted again only after it has run. */
struct bt_task {
    struct bt_task *next;
    bt_loop_fn fn;
    void *arg;
};

bt_status_t bt_loop_create(struct bt_loop **loop_p) BT_MUST_CHECK;
void bt_loop_destroy(struct bt_loop *loop);
/* Runs until bt_loop_stop. */
void bt_loop_run(struct bt_loop *loop);
/* One turn: waits at most timeout_ms (-1: until something happens). For tests. */
void bt_loop_poll(struct bt_loop *loop, int timeout_ms);
void bt_loop_stop(struct bt_loop *loop); /* any thread */

/* Watches fd (level-triggered); the caller closes fd after bt_loop_fd_del. */
struct bt_loop_fd *bt_loop_fd_add(struct bt_loop *loop, int fd, uint32_t events, bt_loop_fd_fn fn,
                                  void *arg);
void bt_loop_fd_mod(struct bt_loop *loop, struct bt_loop_fd *w, uint32_t events);
void bt_loop_fd_del(struct bt_loop *loop, struct bt_loop_fd *w);

/* Arms (or re-arms) the timer to fire in delay_ms and, if period_ms > 0, every period_ms after. One
 * that is due already and started again without a delay keeps its turn. */
void bt_timer_start(struct bt_loop *loop, struct bt_timer *t, uint64_t delay_ms, uint64_t period_ms,
                    bt_loop_fn fn, void *arg);
void bt_timer_stop(struct bt_loop *loop, struct bt_timer *t);

/* Runs task->fn(task->arg) on the loop's thread, in order of posting. Any thread; never blocks. */
void bt_loop_post(struct bt_loop *loop, struct bt_task *task);

/* For a thread that wakes often, works briefly and is waited for: asks the kernel for time slices
 * of this many microseconds (100 at least), so that it gets a busy CPU sooner after it wakes. Its
 * share of the CPU does not change. Before Linux 6.12, or where it is refused, nothing changes. */
void bt_loop_short_slices(uint32_t us);
#define BT_LOOP_SLICE_US 200 /* of a thread that hands messages on */
/* For a thread whose work may wait: on a busy CPU, threads that others wait for have three times
 * its share. Where it is refused, nothing changes. */
void bt_loop_low_priority(void);

/* For the whole process, at its start. Raises the limit of open files to the hard limit (shells and
 * containers give 1,024; a conductor's clients alone may need more). A closed peer, and a file that
 * may not grow, become errors of their calls instead of signals. A fatal signal is logged
 * (common/log/last_words.h). Returns the limit of open files; a low one is logged. */
uint64_t bt_loop_process_limits(void);

/* The kernel's accept4, for a listener that handles a lack of descriptors itself. accept and
 * accept4 of this process are those of accept.c: they close and log connections for which no
 * descriptor is left, and fail only with EAGAIN or for errors of the listening socket. */
int bt_loop_accept(int fd, struct sockaddr *addr, socklen_t *len, int flags);
/* Reserves the descriptor with which connections are refused when no other is left; otherwise the
 * first connection does. bt_loop_process_limits calls it, so that accept.c is linked into every
 * program that sets its limits. */
void bt_loop_accept_ready(void);

/* Delivers signo through signalfd (call before starting threads: it blocks the signal). */
void bt_loop_on_signal(struct bt_loop *loop, int signo, bt_loop_signal_fn fn, void *arg);

/* Duration of one turn of the loop, from the arrival of its events to its end. During a turn this
 * thread does nothing else: no heartbeat, no token. */
struct bt_loop_tick {
    uint64_t wall_ns;
    /* CPU time of this thread, which other work of the machine does not lengthen */
    uint64_t cpu_ns;
};
/* Calls fn at the end of every turn that did something. NULL: no function. A turn above
 * BT_LOOP_SLOW_NS of CPU is logged as well (slow_loop_tick), with its longest callback: `at` is an
 * address for addr2line -e PROGRAM. */
void bt_loop_watch(struct bt_loop *loop, void (*fn)(void *arg, const struct bt_loop_tick *t),
                   void *arg);
#define BT_LOOP_SLOW_NS 20000000ull

/* Long work is done in slices of this length; between two slices the loop turns. A turn may have a
 * few of them and should stay below 20 ms. */
#define BT_LOOP_SLICE_NS 1000000ull

/* The begin of the current turn (bt_mono_ns); it also tells turns apart. */
uint64_t bt_loop_turn_ns(const struct bt_loop *loop);
/* The time (bt_mono_ns) until which work that wants want_ns of this turn may go on. It is less
 * where others have used the turn already, but never less than BT_LOOP_SLICE_NS from now. */
uint64_t bt_loop_until(const struct bt_loop *loop, uint64_t want_ns);

#endif
