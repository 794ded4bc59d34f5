/* Which prefixes are used often: uses of block keys, faded over a window, for the few hundred most
 * used keys. A plain value in the caller's memory. PURE: time is an argument. */
#ifndef BT_POLICY_SCHED_HOT_H
#define BT_POLICY_SCHED_HOT_H

#include "common/base/base.h"

#define BT_HOT_SETS 128
#define BT_HOT_WAYS 4

struct bt_hot {
    double window_ms;
    struct bt_hot_key {
        uint64_t key;
        double uses, at_ms;
    } sets[BT_HOT_SETS][BT_HOT_WAYS];
};

void bt_hot_init(struct bt_hot *h, double window_ms);
/* A request uses the prefix that ends with this key. Returns the number of its uses within about
 * the window, with this one. */
double bt_hot_use(struct bt_hot *h, uint64_t key, double now_ms);
/* The number of copies for this number of uses: one for each `uses_per_copy`, at least one. */
uint32_t bt_hot_copies(double uses, double uses_per_copy, uint32_t most);

#endif
