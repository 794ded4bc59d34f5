/* A monotonic clock that only the test moves, for all threads of the program. Include it once a
 * program. Timers of a loop and deadlines follow it; waits for threads and descriptors take real
 * time. */
#ifndef TESTS_UNIT_KV_CLOCK_H
#define TESTS_UNIT_KV_CLOCK_H

#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/loop/loop.h"

static _Atomic uint64_t clock_now_ns = 1000000000000ull;

int clock_gettime(clockid_t id, struct timespec *t)
{
    if (id != CLOCK_MONOTONIC) {
        return (int)syscall(SYS_clock_gettime, id, t);
    }
    uint64_t now = clock_now_ns;
    *t = (struct timespec){(time_t)(now / 1000000000ull), (long)(now % 1000000000ull)};
    return 0;
}

/* So many milliseconds later: what is due by then has run. */
static inline void clock_skip(struct bt_loop *loop, uint64_t ms)
{
    clock_now_ns += ms * 1000000ull;
    bt_loop_poll(loop, 0);
    bt_loop_poll(loop, 0);
}

#endif
