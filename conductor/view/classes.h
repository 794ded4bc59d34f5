/* Sums by class of requests (x-priority): prefills that this conductor has queued on a worker,
 * rows, requests that run. Who is of a higher class, the smaller number, goes before lower ones.
 * PURE. */
#ifndef BT_CONDUCTOR_VIEW_CLASSES_H
#define BT_CONDUCTOR_VIEW_CLASSES_H

#include "common/base/base.h"

#define BT_VIEW_CLASSES 8

struct bt_view_classes { /* zeroed: nobody */
    struct {
        int32_t priority;
        uint32_t n; /* 0: the place is free */
        double sum;
    } of[BT_VIEW_CLASSES];
};

/* Another one of the class, of so much. Returns its place, for bt_view_classes_remove(); with as
 * many classes as there are places it is not told apart (BT_VIEW_CLASSES) and is lower than nobody.
 */
uint32_t bt_view_classes_add(struct bt_view_classes *c, int32_t priority, double amount);
void bt_view_classes_remove(struct bt_view_classes *c, uint32_t place, double amount);
/* The sum of those whose class is lower than this one. */
double bt_view_classes_below(const struct bt_view_classes *c, int32_t priority);

#endif
