/* Bytes that this process has allocated, for tests and benchmarks that measure the memory of an
 * object: the difference of two calls. */
#ifndef TESTS_TOOLS_HEAP_H
#define TESTS_TOOLS_HEAP_H

#include <malloc.h>
#include <stddef.h>

/* The sanitizers' allocator counts for itself. */
size_t __sanitizer_get_current_allocated_bytes(void) __attribute__((weak));

static inline size_t heap_bytes(void)
{
    if (__sanitizer_get_current_allocated_bytes != NULL) {
        return __sanitizer_get_current_allocated_bytes();
    }
    struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

#endif
