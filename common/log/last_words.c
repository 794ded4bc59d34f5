/* Handlers for the signals by which a process ends itself. Lines are prepared in advance. A handler
 * runs on the thread that gets the signal and calls only async-signal-safe functions. */
#include "common/log/last_words.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "common/base/base.h"
#include "common/log/log.h"

static const struct {
    int signo;
    const char *name;
} signals[] = {{SIGABRT, "SIGABRT"}, {SIGSEGV, "SIGSEGV"}, {SIGILL, "SIGILL"}, {SIGFPE, "SIGFPE"}};

static struct bt_log_line of_memory[BT_ARRAY_LEN(signals)], other[BT_ARRAY_LEN(signals)];
/* The handlers before: UCX's, a sanitizer's, or the default. */
static struct sigaction before[BT_ARRAY_LEN(signals)];
static bool installed;
static atomic_flag told = ATOMIC_FLAG_INIT;

static void on_signal(int signo, siginfo_t *info, void *context)
{
    (void)context;
    /* A library usually aborts directly after the call that failed, so errno is still set. */
    bool no_memory = errno == ENOMEM;
    if (atomic_flag_test_and_set(&told)) {
        for (;;) {
            pause(); /* another thread writes the line and ends the process */
        }
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(signals); i++) {
        if (signals[i].signo == signo && !bt_last_said()) {
            bt_log_line_write(no_memory ? &of_memory[i] : &other[i]);
        }
        (void)sigaction(signals[i].signo, &before[i], NULL);
    }
    if (info->si_code <= 0) { /* sent: abort(), kill() */
        raise(signo);         /* blocked until this returns */
    } /* otherwise the instruction faults again, now for the handler before */
}

void bt_log_last_words(void)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(signals); i++) {
        bt_log_line_prepare(&of_memory[i], BT_LOG_ERROR, "out_of_memory", "signal=%s why=%s",
                            signals[i].name,
                            "an allocation of memory failed in a library, so the process ends. "
                            "Give it more memory, or lower the sizes in its configuration");
        bt_log_line_prepare(&other[i], BT_LOG_ERROR, "ended_by_signal", "signal=%s why=%s",
                            signals[i].name,
                            "a bug, in this program or in a library, ends the process: the lines "
                            "around this one and the core dump show where");
        struct sigaction sa = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
        sigemptyset(&sa.sa_mask);
        if (!installed) {
            (void)sigaction(signals[i].signo, &sa, &before[i]);
        }
    }
    installed = true;
}
