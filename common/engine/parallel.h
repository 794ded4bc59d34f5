/* A loop over independent parts on several threads, for what happens once: reading weights. */
#ifndef BT_ENGINE_PARALLEL_H
#define BT_ENGINE_PARALLEL_H

#include <stdint.h>

/* Calls fn(arg, i) for all i below n, on as many threads as this process may use, at most eight
 * (which read faster than any disk writes to the page cache); the caller's is one of them. Returns
 * when all calls have. fn: of any thread, must not fail. */
void bt_parallel(uint32_t n, void (*fn)(void *arg, uint32_t i), void *arg);

#endif
