/* The two clocks of a host. The only file of common/base that reads one: pure code does not include
 * it, but takes the time as an argument. Any thread. */
#ifndef BT_BASE_CLOCK_H
#define BT_BASE_CLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

/* Monotonic time in ns: for deadlines and durations within one host. */
static inline uint64_t bt_mono_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

/* Wall-clock time in ns since 1970: for stamps that leave the process. */
static inline uint64_t bt_real_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

/* For a thread that ends sessions after silence; called at every check. Did this thread itself
 * stand still for more than limit_ns since the last check (*last_ns; 0: there was none)? Then
 * messages of others may lie unread, and their silence proves nothing. */
static inline bool bt_stood_still(uint64_t *last_ns, uint64_t now_ns, uint64_t limit_ns)
{
    bool still = *last_ns != 0 && now_ns > *last_ns && now_ns - *last_ns > limit_ns;
    *last_ns = now_ns;
    return still;
}

#endif
