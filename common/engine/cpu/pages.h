/* Large buffers on large pages, where the kernel has some to give (transparent_hugepage: always or
 * madvise): fewer misses of the translation buffers, and all of the second-level cache is usable.
 */
#ifndef BT_ENGINE_CPU_PAGES_H
#define BT_ENGINE_CPU_PAGES_H

#include <stdlib.h>
#include <sys/mman.h>

#include "common/base/base.h"

#define BT_PAGE_HUGE ((size_t)2 << 20)

/* bytes at a multiple of 64 at least, or NULL; for free(). Not zeroed. Three quarters of a large
 * page or more are rounded up to whole ones. */
static inline void *bt_pages_alloc(size_t bytes)
{
    void *p = NULL;
    bool huge = bytes >= BT_PAGE_HUGE / 4 * 3;
    bytes = BT_ALIGN_UP(BT_MAX(bytes, (size_t)1), huge ? BT_PAGE_HUGE : (size_t)64);
    if (posix_memalign(&p, huge ? BT_PAGE_HUGE : 64, bytes) != 0) {
        return NULL;
    }
    if (huge) {
        (void)madvise(p, bytes, MADV_HUGEPAGE); /* a wish */
    }
    return p;
}

#endif
