/* Single-producer, single-consumer ring with a doorbell. The reader publishes `sleeping` before its
 * last look and the writer reads it after publishing the message (both sequentially consistent), so
 * one of the two always sees the other. */
#include "common/worker/ring.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

bt_status_t bt_ring_init(struct bt_ring *r, uint32_t n, uint32_t elem_bytes)
{
    uint32_t cap = 1;
    while (cap < n) {
        cap *= 2;
    }
    memset(r, 0, sizeof(*r));
    r->efd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (r->efd < 0) {
        return BT_ERR_IO;
    }
    r->elem = elem_bytes;
    r->mask = cap - 1;
    /* Write to all of it now: memory use is final from the start, and no push causes a page
     * fault. */
    r->mem = bt_malloc((size_t)cap * elem_bytes);
    memset(r->mem, 0xa5, (size_t)cap * elem_bytes);
    return BT_OK;
}

void bt_ring_cleanup(struct bt_ring *r)
{
    if (r->mem != NULL) {
        close(r->efd);
        free(r->mem);
        r->mem = NULL;
    }
}

void bt_ring_wake(struct bt_ring *r)
{
    uint64_t one = 1;
    /* If the counter is full the reader is going to wake anyway. */
    ssize_t n = write(r->efd, &one, sizeof(one));
    (void)n;
}

bool bt_ring_push(struct bt_ring *r, const void *msg)
{
    uint32_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    if (tail - atomic_load_explicit(&r->head, memory_order_acquire) > r->mask) {
        return false;
    }
    memcpy(r->mem + (size_t)(tail & r->mask) * r->elem, msg, r->elem);
    atomic_store(&r->tail, tail + 1);
    bt_ring_nudge(r);
    return true;
}

void bt_ring_nudge(struct bt_ring *r)
{
    if (atomic_load(&r->sleeping) != 0 && atomic_exchange(&r->sleeping, 0) != 0) {
        bt_ring_wake(r);
    }
}

bool bt_ring_pop(struct bt_ring *r, void *msg)
{
    uint32_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    if (head == atomic_load_explicit(&r->tail, memory_order_acquire)) {
        return false;
    }
    memcpy(msg, r->mem + (size_t)(head & r->mask) * r->elem, r->elem);
    atomic_store_explicit(&r->head, head + 1, memory_order_release);
    return true;
}

bool bt_ring_arm(struct bt_ring *r)
{
    atomic_store(&r->sleeping, 1);
    if (atomic_load(&r->tail) != atomic_load_explicit(&r->head, memory_order_relaxed)) {
        atomic_store(&r->sleeping, 0);
        return false;
    }
    return true;
}

void bt_ring_disarm(struct bt_ring *r)
{
    uint64_t count;
    atomic_store(&r->sleeping, 0);
    ssize_t n = read(r->efd, &count, sizeof(count));
    (void)n;
}
