/* The SIGBUS handler for mapped slabs. Control threads add and remove areas under a lock. The
 * handler runs on the thread that used the page, takes no lock, and calls only async-signal-safe
 * functions: the log line was prepared when the area was added. */
#include "common/slab/guard.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#include "common/log/log.h"

#define AREAS_MAX 32

struct area {
    _Atomic uintptr_t at; /* 0: free; stored last */
    _Atomic size_t bytes;
    struct bt_log_line line;
};

static struct area areas[AREAS_MAX];
static pthread_mutex_t areas_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t installed = PTHREAD_ONCE_INIT;
static struct sigaction before; /* the handler before: a sanitizer's, or the default */
static atomic_flag told = ATOMIC_FLAG_INIT;

static struct area *area_of(uintptr_t p)
{
    for (size_t i = 0; i < AREAS_MAX; i++) {
        uintptr_t at = atomic_load_explicit(&areas[i].at, memory_order_acquire);
        if (at != 0 && p >= at && p - at < atomic_load(&areas[i].bytes)) {
            return &areas[i];
        }
    }
    return NULL;
}

static void on_sigbus(int signo, siginfo_t *info, void *context)
{
    (void)context;
    /* Only BUS_ADRERR is about the file's length. Others come from failed memory or from a signal
     * that a process sent. */
    struct area *a = info->si_code == BUS_ADRERR ? area_of((uintptr_t)info->si_addr) : NULL;
    if (a == NULL) {
        sigaction(signo, &before, NULL);
        if (info->si_code <= 0) {
            raise(signo);
        }
        return; /* the fault comes again, now to the handler before */
    }
    if (atomic_flag_test_and_set(&told)) {
        for (;;) {
            pause(); /* another thread writes the line and ends the process */
        }
    }
    bt_log_line_write(&a->line);
    struct sigaction dfl = {.sa_handler = SIG_DFL};
    sigaction(signo, &dfl, NULL);
    /* Blocked until this returns: the core file then shows the access, not the handler. */
    raise(signo);
}

static void install(void)
{
    struct sigaction sa = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
    sigemptyset(&sa.sa_mask);
    if (sigaction(SIGBUS, &sa, &before) != 0) {
        BT_WARN("slab_guard", "why=%s", "SIGBUS cannot be handled");
    }
}

void bt_slab_guard_add(const void *at, size_t bytes, const char *path)
{
    pthread_once(&installed, install);
    pthread_mutex_lock(&areas_lock);
    for (size_t i = 0; i < AREAS_MAX; i++) {
        struct area *a = &areas[i];
        if (atomic_load(&a->at) == 0) {
            bt_log_line_prepare(
                &a->line, BT_LOG_ERROR, "slab_cut", "path=%s why=%s", path,
                "the slab's file became shorter while it is mapped, so this process ends by "
                "SIGBUS. Find out which program writes to the file or shortens it (only its "
                "kvstore may), and start this daemon again: the kvstore makes a new slab");
            atomic_store(&a->bytes, bytes);
            atomic_store_explicit(&a->at, (uintptr_t)at, memory_order_release);
            break;
        }
    }
    pthread_mutex_unlock(&areas_lock);
}

void bt_slab_guard_remove(const void *at)
{
    pthread_mutex_lock(&areas_lock);
    for (size_t i = 0; i < AREAS_MAX; i++) {
        if (atomic_load(&areas[i].at) == (uintptr_t)at) {
            atomic_store(&areas[i].at, 0);
        }
    }
    pthread_mutex_unlock(&areas_lock);
}
