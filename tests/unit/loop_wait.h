/* Waiting in tests whose fixture has a loop (`loop`). Include after cmocka.h. */
#ifndef BT_TESTS_LOOP_WAIT_H
#define BT_TESTS_LOOP_WAIT_H

#include <time.h>

#include "common/base/base.h"
#include "common/loop/loop.h"

#define LOOP_WAIT_MS 60000 /* only a hang takes so long */

/* The machine's time, also where the test has a clock of its own. */
static inline uint64_t loop_wait_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC_RAW, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* Turns the loop until `cond` holds. */
#define LOOP_UNTIL(loop, cond)                                                                     \
    do {                                                                                           \
        uint64_t end_ = loop_wait_ns() + LOOP_WAIT_MS * 1000000ull;                                \
        while (!(cond) && loop_wait_ns() < end_) {                                                 \
            bt_loop_poll(loop, 20);                                                                \
        }                                                                                          \
        assert_true(cond);                                                                         \
    } while (0)

/* The same of a fixture that has one. */
#define WAIT_FOR(f, cond) LOOP_UNTIL((f)->loop, cond)

/* Turns it for `ms` milliseconds, for what must not happen. */
static inline void loop_run_for(struct bt_loop *loop, uint64_t ms)
{
    for (uint64_t end = bt_mono_ns() + ms * 1000000ull; bt_mono_ns() < end;) {
        bt_loop_poll(loop, 10);
    }
}

#endif
