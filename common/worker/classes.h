/* What a worker has of each class of requests (Submit.priority): whoever is of a higher class, the
 * smaller number, goes before it. Written by the engine thread into a plain value, which stats.c
 * hands to the control thread for heartbeats. PURE. */
#ifndef BT_WORKER_CLASSES_H
#define BT_WORKER_CLASSES_H

#include "common/base/base.h"

#define BT_WORKER_CLASSES 8

struct bt_wclass {
    int32_t priority;
    double queue_ns;           /* to compute its prompts, but for the step under way */
    uint32_t rows, pages;      /* of sequences that generate */
    uint32_t waiting, landing; /* for slot and pages; of these: whose KV has not come */
};
struct bt_wclasses { /* zeroed: empty */
    uint32_t n;
    struct bt_wclass of[BT_WORKER_CLASSES]; /* [n], the highest class first */
};

/* The place of a class, made if it is new; for changing until the next call. When there are too
 * many the two lowest become one, as the higher of them: nobody is taken for lower than he is. */
struct bt_wclass *bt_wclasses_at(struct bt_wclasses *c, int32_t priority);

#endif
