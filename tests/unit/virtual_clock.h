/* The time of a unit test: the machine's, and as much more as the test has let pass. What is linked
 * into the program reads it in place of the monotonic clock; libraries (gRPC, UCX, libc) keep the
 * machine's. So a test of a limit of two seconds takes none of them.
 *
 * Time that passes at once looks like a process that stood still. A fixture lets it pass in steps,
 * and lets everybody hear of each: see pass() in conductor_fixture.h and loop_pass() in
 * loop_wait.h. Include this in one file of a program. */
#ifndef BT_TESTS_VIRTUAL_CLOCK_H
#define BT_TESTS_VIRTUAL_CLOCK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/loop/loop.h"

static atomic_uint_fast64_t clock_ahead_ns;
static atomic_int_fast64_t clock_wall_ahead_s; /* of the wall clock, which a test may set */
static atomic_uint_fast64_t clock_stopped_ns;  /* clock_counted_ns when it stopped; 0: it runs */
static atomic_uint_fast64_t clock_most_ns;     /* see clock_skip_stalls; 0: all time counts */

static inline uint64_t clock_machine_ns(void)
{
    struct timespec t;
    (void)syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* The machine's time less what does not count. */
static inline uint64_t clock_counted_ns(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static uint64_t seen_ns, lost_ns;
    pthread_mutex_lock(&lock);
    uint64_t now = clock_machine_ns(), most = atomic_load(&clock_most_ns);
    if (most > 0 && seen_ns > 0 && now - seen_ns > most) {
        lost_ns += now - seen_ns - most;
    }
    seen_ns = now;
    uint64_t counted = now - lost_ns;
    pthread_mutex_unlock(&lock);
    return counted;
}

/* Between two looks at the clock no more than 30 ms pass. So a process that the machine does not
 * run for a second meets none of its limits; a loop that is polled for 30 ms or less loses no time.
 */
static inline void clock_skip_stalls(void)
{
    atomic_store(&clock_most_ns, 30000000);
}

/* Hidden: a library's call goes to libc. */
__attribute__((visibility("hidden"))) int clock_gettime(clockid_t id, struct timespec *t)
{
    if (id != CLOCK_MONOTONIC) {
        int rc = (int)syscall(SYS_clock_gettime, id, t);
        t->tv_sec += rc == 0 && id == CLOCK_REALTIME ? (time_t)atomic_load(&clock_wall_ahead_s) : 0;
        return rc;
    }
    uint64_t stopped_ns = atomic_load(&clock_stopped_ns);
    uint64_t ns =
        (stopped_ns != 0 ? stopped_ns : clock_counted_ns()) + atomic_load(&clock_ahead_ns);
    t->tv_sec = (time_t)(ns / 1000000000);
    t->tv_nsec = (long)(ns % 1000000000);
    return 0;
}

/* So many milliseconds pass at once. */
static inline void clock_jump(uint64_t ms)
{
    atomic_fetch_add(&clock_ahead_ns, ms * 1000000);
}

static inline bool clock_stands(void)
{
    return atomic_load(&clock_stopped_ns) != 0;
}

/* No time passes any more but by clock_jump, however long the machine takes: what happens needs no
 * timer. */
static inline void clock_stop(void)
{
    uint64_t runs = 0;
    (void)atomic_compare_exchange_strong(&clock_stopped_ns, &runs, clock_counted_ns());
}

static inline void clock_go_on(void)
{
    uint64_t stopped_ns = atomic_exchange(&clock_stopped_ns, 0);
    if (stopped_ns != 0) { /* no jump: it goes on where it stood */
        atomic_fetch_sub(&clock_ahead_ns, clock_counted_ns() - stopped_ns);
    }
}

/* Lets `ms` milliseconds pass in a tenth of the time, for limits of the code that is tested, not of
 * the machine's libraries. */
static inline void loop_pass(struct bt_loop *loop, uint64_t ms)
{
    for (uint64_t end = bt_mono_ns() + ms * 1000000ull; bt_mono_ns() < end;) {
        bt_loop_poll(loop, 1);
        clock_jump(9);
    }
}

/* Time passes like that until `cond` holds: two minutes of it at most. */
#define PASS_UNTIL(f, cond)                                                                        \
    do {                                                                                           \
        uint64_t end_ = bt_mono_ns() + 120 * 1000000000ull;                                        \
        while (!(cond) && bt_mono_ns() < end_) {                                                   \
            loop_pass((f)->loop, 10);                                                              \
        }                                                                                          \
        assert_true(cond);                                                                         \
    } while (0)

#endif
