/* A bounded ring of fixed-size messages from one thread to one other, with an eventfd that wakes
 * the reader. The eventfd is written only when the reader said that it is about to sleep, so a busy
 * reader costs no system call. */
#ifndef BT_WORKER_RING_H
#define BT_WORKER_RING_H

#include <stdatomic.h>

#include "common/base/base.h"

struct bt_ring {
    uint8_t *mem;
    uint32_t elem, mask;
    int efd;
    _Atomic uint32_t sleeping;
    _Alignas(64) _Atomic uint32_t head; /* written by the reader */
    _Alignas(64) _Atomic uint32_t tail; /* written by the writer */
};

/* n is rounded up to a power of two. ERR_IO without an eventfd. */
bt_status_t bt_ring_init(struct bt_ring *r, uint32_t n, uint32_t elem_bytes) BT_MUST_CHECK;
void bt_ring_cleanup(struct bt_ring *r);
/* Writer: false when full. */
bool bt_ring_push(struct bt_ring *r, const void *msg) BT_MUST_CHECK;
/* Reader: false when empty. */
bool bt_ring_pop(struct bt_ring *r, void *msg);
/* Reader, before it sleeps on efd: false if something has come meanwhile. */
bool bt_ring_arm(struct bt_ring *r);
/* Reader, after it woke: takes the eventfd's count. */
void bt_ring_disarm(struct bt_ring *r);
/* Writer: wakes the reader if it sleeps, so that it looks at shared state beside the ring. */
void bt_ring_nudge(struct bt_ring *r);
/* Any thread: wakes the reader without a message. */
void bt_ring_wake(struct bt_ring *r);

#endif
