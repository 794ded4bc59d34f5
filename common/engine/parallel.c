/* Starts threads for a single loop: starting eight takes less time than copying a megabyte. */
#include "common/engine/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

#include "common/base/base.h"

#define THREADS_MAX 8

struct loop {
    void (*fn)(void *arg, uint32_t i);
    void *arg;
    uint32_t n;
    atomic_uint next;
};

static void *take_turns(void *arg)
{
    struct loop *l = arg;
    for (uint32_t i; (i = atomic_fetch_add(&l->next, 1)) < l->n;) {
        l->fn(l->arg, i);
    }
    return NULL;
}

static uint32_t processors(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? (uint32_t)CPU_COUNT(&set) : 1;
}

void bt_parallel(uint32_t n, void (*fn)(void *arg, uint32_t i), void *arg)
{
    struct loop l = {.fn = fn, .arg = arg, .n = n};
    pthread_t threads[THREADS_MAX];
    uint32_t want = BT_MIN(BT_MIN(n, processors()), (uint32_t)THREADS_MAX), have = 0;
    sigset_t all, before;
    sigfillset(&all); /* the threads must not take signals: the main loop's thread handles them */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (have + 1 < want && pthread_create(&threads[have], NULL, take_turns, &l) == 0) {
        have++; /* with fewer threads the loop only takes longer */
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    take_turns(&l);
    for (uint32_t i = 0; i < have; i++) {
        pthread_join(threads[i], NULL);
    }
}
