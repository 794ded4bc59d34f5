/* A loop over independent parts on several threads, for work that happens once: reading weights. */
#ifndef BT_ENGINE_PARALLEL_H
#define BT_ENGINE_PARALLEL_H

#include <stdint.h>

/* Calls fn(arg, i) for all i below n and returns when all calls have returned. It uses as many
 * threads as this process may use, at most eight, the caller's included. (Eight read faster than
 * any disk fills the page cache.) fn: on any thread, must not fail. */
void bt_parallel(uint32_t n, void (*fn)(void *arg, uint32_t i), void *arg);

#endif
