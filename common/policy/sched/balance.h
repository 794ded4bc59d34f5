/* Which worker should change its role, from the load of both stages over minutes. PURE: time and
 * load are arguments; the state is a plain value of the caller. It is slow on purpose, because a
 * change costs a warm batch: a stage must lack workers for two whole windows, and the other stage
 * must have room to spare without the worker. */
#ifndef BT_POLICY_SCHED_BALANCE_H
#define BT_POLICY_SCHED_BALANCE_H

#include "common/base/base.h"

#define BT_BALANCE_NONE UINT32_MAX
#define BT_BALANCE_HIGH 0.6 /* params.high of conductors */

struct bt_balance_worker {
    bool prefill, decode;
    bool fixed; /* must not be changed: an operator has set its role, its role is changing, or it is
                   drained or not serving */
    double pressure; /* of its stage: 0 idle, 1 at its limit; more counts as 1 */
};

struct bt_balance_params {
    double window_ms;
    double high; /* a stage above this wants a worker; the other gives one if it stays below without
                    it. The change is not reversed at once: without the worker, the first stage
                    would be above it again */
};

struct bt_balance {
    double begin_ms;        /* of the present window */
    double prefill, decode; /* sums of the stages' mean pressures */
    uint32_t samples;
    int wish; /* wish of the last whole window: 1 more prefill workers, -1 more decode workers, 0
                 none */
};

struct bt_balance_change {
    uint32_t worker;        /* index; BT_BALANCE_NONE: no worker changes */
    bool to_prefill;        /* else to decode */
    double prefill, decode; /* mean pressures over the window that decided it */
};

/* Takes one sample; called about once a second. */
void bt_balance_step(struct bt_balance *b, const struct bt_balance_params *params,
                     const struct bt_balance_worker *workers, uint32_t n, double now_ms,
                     struct bt_balance_change *change_p);

#endif
