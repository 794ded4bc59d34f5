/* The time of a unit test: the machine's, and as much more as the test has let pass. What is linked
 * into the program reads it in place of the monotonic clock; libraries (gRPC, UCX, libc) keep the
 * machine's. So a test of a limit of two seconds takes none of them.
 *
 * Time that passes at once looks like a process that stood still. A fixture lets it pass in steps,
 * and lets everybody hear of each: see pass() in conductor_fixture.h and loop_pass() in
 * loop_wait.h. Include this in one file of a program. */
#ifndef BT_TESTS_VIRTUAL_CLOCK_H
#define BT_TESTS_VIRTUAL_CLOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/loop/loop.h"

static atomic_uint_fast64_t clock_ahead_ns;
static atomic_int_fast64_t clock_wall_ahead_s; /* of the wall clock, which a test may set */
static atomic_uint_fast64_t clock_stopped_ns;  /* the machine's time when it stopped; 0: it runs */

static inline uint64_t clock_machine_ns(void)
{
    struct timespec t;
    (void)syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
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
        (stopped_ns != 0 ? stopped_ns : clock_machine_ns()) + atomic_load(&clock_ahead_ns);
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
    (void)atomic_compare_exchange_strong(&clock_stopped_ns, &runs, clock_machine_ns());
}

static inline void clock_go_on(void)
{
    uint64_t stopped_ns = atomic_exchange(&clock_stopped_ns, 0);
    if (stopped_ns != 0) { /* no jump: it goes on where it stood */
        atomic_fetch_sub(&clock_ahead_ns, clock_machine_ns() - stopped_ns);
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

/* Of a clock that stands: lets as much time pass as the machine has counted since `*last_ns_p` (its
 * time, which becomes the present one), but at most `most_ms`. So what a test does at a rate goes
 * on at that rate, and a time for which the process got no CPU is no time. */
static inline void clock_follow(uint64_t *last_ns_p, uint64_t most_ms)
{
    uint64_t now = clock_machine_ns(), passed = now - *last_ns_p;
    *last_ns_p = now;
    atomic_fetch_add(&clock_ahead_ns, BT_MIN(passed, most_ms * 1000000));
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
