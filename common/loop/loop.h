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

/* The calling thread wakes often, works briefly and is waited for: it asks the kernel for time
 * slices of so many microseconds (100 at least), and so gets a busy CPU sooner after it wakes. Its
 * share of the CPU stays what it was. Before Linux 6.12, or where it is refused, nothing changes.
 */
void bt_loop_short_slices(uint32_t us);
#define BT_LOOP_SLICE_US 200 /* of a thread that hands messages on */

/* For the whole process, at its start: as many open files as the hard limit has (shells and
 * containers give 1,024, of which a conductor's clients alone may need more); a closed peer and a
 * file that may not grow are errors of their calls, no signals that end it; what ends it by a
 * signal of its own is logged (common/log/last_words.h). Returns the limit of open files; few are
 * warned about. */
uint64_t bt_loop_process_limits(void);

/* accept4 as the kernel has it, for a listener that answers a lack of descriptors itself. accept
 * and accept4 of this process (accept.c) close connections that they have no descriptor for, log
 * it, and fail with EAGAIN only, or for what is wrong with the listening socket. */
int bt_loop_accept(int fd, struct sockaddr *addr, socklen_t *len, int flags);
/* Takes the descriptor that is spared for clients that there is no room for, which else happens
 * with the first client. bt_loop_process_limits calls it: so the functions of accept.c are part of
 * every program that sets its limits. */
void bt_loop_accept_ready(void);

/* Delivers signo through signalfd (call before starting threads: it blocks the signal). */
void bt_loop_on_signal(struct bt_loop *loop, int signo, bt_loop_signal_fn fn, void *arg);

/* What one turn of the loop took, from the moment its events were there to its end. While it lasts
 * nothing else of this thread happens: no heartbeat, no token. */
struct bt_loop_tick {
    uint64_t wall_ns;
    uint64_t cpu_ns; /* of this thread: what the machine's other work cannot lengthen */
};
/* fn is told of every turn that did something, at its end. NULL: nobody is. A turn above
 * BT_LOOP_SLOW_NS of CPU is logged as well (slow_loop_tick), with its longest callback: `at` is an
 * address for addr2line -e PROGRAM. */
void bt_loop_watch(struct bt_loop *loop, void (*fn)(void *arg, const struct bt_loop_tick *t),
                   void *arg);
#define BT_LOOP_SLOW_NS 20000000ull

/* Work that may be long goes in slices of so much time: then it lets the loop turn. A turn may hold
 * a few of them, and shall stay below 20 ms. */
#define BT_LOOP_SLICE_NS 1000000ull

/* When the turn began that runs now (bt_mono_ns): tells turns apart. */
uint64_t bt_loop_turn_ns(const struct bt_loop *loop);
/* Until when (bt_mono_ns) work may go on that would like to have want_ns of this turn: it gets less
 * where others have used the turn already, but never less than BT_LOOP_SLICE_NS. */
uint64_t bt_loop_until(const struct bt_loop *loop, uint64_t want_ns);

#endif
