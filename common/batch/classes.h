/* Sums by class of requests (Submit.priority): the smaller number is the higher class and goes
 * first. A worker counts what it has of each class and says so in its heartbeats; a conductor
 * counts what it has sent and what runs. A plain value in the caller's memory. PURE. */
#ifndef BT_BATCH_CLASSES_H
#define BT_BATCH_CLASSES_H

#include "common/base/base.h"

#define BT_CLASSES_MAX 8

struct bt_class {
    int32_t priority;
    int32_t lowest;   /* the lowest class counted here: priority, unless classes were merged */
    uint32_t users;   /* bt_classes_join without bt_classes_leave */
    double queue_ns;  /* to compute its prompts */
    uint32_t rows;    /* sequences that generate */
    uint32_t pages;   /* ... and their pages */
    uint32_t waiting; /* for a slot and pages */
    uint32_t landing; /* of these: their KV has not come */
};
struct bt_classes { /* zeroed: empty */
    uint32_t n;
    struct bt_class of[BT_CLASSES_MAX]; /* [n], the highest class first */
};

/* The sums of a class, which are added if it is new; the pointer is valid until the next call.
 * Beyond BT_CLASSES_MAX classes the two lowest are merged and count as the higher of them. So a
 * request never counts as one of a lower class than its own. */
struct bt_class *bt_classes_at(struct bt_classes *c, int32_t priority);
/* As bt_classes_at, for a request that will leave again. Merged sums stay merged until all requests
 * that joined them have left. */
struct bt_class *bt_classes_join(struct bt_classes *c, int32_t priority);
/* A request that joined leaves. The caller has subtracted its part from the sums. */
void bt_classes_leave(struct bt_classes *c, int32_t priority);
/* The sums over all classes that are lower than priority. */
struct bt_class bt_classes_below(const struct bt_classes *c, int32_t priority);

#endif
