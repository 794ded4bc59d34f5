/* A child process that stands still. Include after cmocka.h. */
#ifndef BT_TESTS_STOP_PROCESS_H
#define BT_TESTS_STOP_PROCESS_H

#include <signal.h>
#include <sys/wait.h>

/* Returns once it has stopped. After SIGSTOP was sent its threads run on until the one that gets
 * the signal has a core: on a busy machine long enough to answer a request. */
static inline void stop_process(pid_t pid)
{
    siginfo_t info = {0};
    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WSTOPPED | WNOWAIT), 0);
}

#endif
