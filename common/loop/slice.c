/* Time slices of the calling thread. */
#include <errno.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/log/log.h"
#include "common/loop/loop.h"

/* The kernel's struct; its header conflicts with those of later C libraries. */
struct attr {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t slice_ns, deadline_ns, period_ns; /* slice_ns is the kernel's sched_runtime: for
                                                  SCHED_OTHER the slice */
    uint32_t util_min, util_max;
};

#define RESET_ON_FORK 1u /* SCHED_FLAG_RESET_ON_FORK */

#define NICER 5

void bt_loop_low_priority(void)
{
    id_t self = (id_t)gettid(); /* a nice value is a thread's here */
    errno = 0;
    int nice_now = getpriority(PRIO_PROCESS, self);
    if (errno != 0 || setpriority(PRIO_PROCESS, self, nice_now + NICER) != 0) {
        BT_DEBUG("priority_refused", "by=%d", NICER);
    }
}

void bt_loop_short_slices(uint32_t us)
{
    struct attr a = {.size = sizeof(a)};
    if (syscall(SYS_sched_getattr, 0, &a, sizeof(a), 0) != 0 || a.policy != SCHED_OTHER) {
        return; /* the thread was given another policy */
    }
    a.slice_ns = us * 1000ull;
    /* Threads that this one starts must not get its slices. The flag would also reset a negative
     * nice value for them, so then it is not set. */
    if (a.nice >= 0) {
        a.flags |= RESET_ON_FORK;
    }
    if (syscall(SYS_sched_setattr, 0, &a, 0) != 0) {
        BT_DEBUG("slice_refused", "us=%u", us);
    }
}
