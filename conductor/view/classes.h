/* What this conductor has queued on a worker, by class: a request of a higher class is computed
 * before those of lower ones (common/worker/core.c), so it does not wait for them. PURE. */
#ifndef BT_CONDUCTOR_VIEW_CLASSES_H
#define BT_CONDUCTOR_VIEW_CLASSES_H

#include "common/base/base.h"

#define BT_VIEW_CLASSES 8

struct bt_view_classes { /* zeroed: nothing is queued */
    struct {
        int32_t priority;
        uint32_t n; /* 0: the place is free */
        double ms;
    } of[BT_VIEW_CLASSES];
};

/* Another prefill of so long. Returns its place, for bt_view_classes_remove(); with as many classes
 * as there are places it is not told apart (BT_VIEW_CLASSES) and everybody waits for it. */
uint32_t bt_view_classes_add(struct bt_view_classes *c, int32_t priority, double ms);
void bt_view_classes_remove(struct bt_view_classes *c, uint32_t place, double ms);
/* Milliseconds of prefills whose class is lower than this one. */
double bt_view_classes_below(const struct bt_view_classes *c, int32_t priority);

#endif
