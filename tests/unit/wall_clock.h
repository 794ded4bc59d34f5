/* A wall clock that a test sets, in place of the machine's: the functions of libc that read it, and
 * the one by which abseil (and so gRPC) waits until a wall-clock time, count from it. As in the
 * kernel, a wait under way ends when the clock that was set shows its time. The includer defines
 * wall_ahead_s(). Any thread. Not faked: time(), gettimeofday(), pthread's timed waits. */
#ifndef BT_TESTS_WALL_CLOCK_H
#define BT_TESTS_WALL_CLOCK_H

#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WALL_LOOK_NS 20000000 /* between looks whether the clock was set during a wait */

static int64_t wall_ahead_s(void); /* by how much the clock is ahead of the machine's */

/* libc's syscall() is the function below. */
static inline long wall_kernel(long n, const long a[6])
{
    register long r10 __asm__("r10") = a[3];
    register long r8 __asm__("r8") = a[4];
    register long r9 __asm__("r9") = a[5];
    long rc;
    __asm__ volatile("syscall"
                     : "=a"(rc)
                     : "a"(n), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return rc;
}

static inline long wall_result(long rc)
{
    if (rc < 0 && rc >= -4095) {
        errno = (int)-rc;
        return -1;
    }
    return rc;
}

static inline int64_t wall_ns(const struct timespec *t)
{
    return (int64_t)t->tv_sec * 1000000000 + t->tv_nsec;
}

static inline int64_t wall_now_ns(clockid_t id)
{
    struct timespec t;
    (void)clock_gettime(id, &t);
    return wall_ns(&t);
}

int clock_gettime(clockid_t id, struct timespec *t)
{
    long rc = wall_kernel(SYS_clock_gettime, (const long[6]){id, (long)t});
    if (rc == 0 && id == CLOCK_REALTIME) {
        t->tv_sec += wall_ahead_s();
    }
    return (int)wall_result(rc);
}

/* A futex wait until a wall-clock time, in steps of the monotonic clock. */
static inline long wall_wait(const long a[6])
{
    int64_t until_ns = wall_ns((const struct timespec *)a[3]);
    for (;;) {
        int64_t left_ns = until_ns - wall_now_ns(CLOCK_REALTIME);
        if (left_ns <= 0) {
            return -ETIMEDOUT;
        }
        int64_t end_ns = wall_now_ns(CLOCK_MONOTONIC);
        end_ns += left_ns < WALL_LOOK_NS ? left_ns : WALL_LOOK_NS;
        struct timespec end = {end_ns / 1000000000, end_ns % 1000000000};
        long rc = wall_kernel(SYS_futex, (const long[6]){a[0], a[1] & ~(long)FUTEX_CLOCK_REALTIME,
                                                         a[2], (long)&end, a[4], a[5]});
        if (rc != -ETIMEDOUT) {
            return rc;
        }
    }
}

long syscall(long n, ...)
{
    long a[6];
    va_list ap;
    va_start(ap, n);
    for (int i = 0; i < 6; i++) {
        a[i] = va_arg(ap, long);
    }
    va_end(ap);
    bool until = n == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) != 0 && a[3] != 0;
    return wall_result(until ? wall_wait(a) : wall_kernel(n, a));
}

#endif
