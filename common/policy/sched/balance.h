/* Which worker should change its role, from the load of both stages over minutes. PURE: time and
 * load are arguments; the state is a plain value of the caller. Slow on purpose: a change costs a
 * warm batch, so a stage must be short for two whole windows, and the other one must do with a
 * worker less afterwards with room to spare. */
#ifndef BT_POLICY_SCHED_BALANCE_H
#define BT_POLICY_SCHED_BALANCE_H

#include "common/base/base.h"

#define BT_BALANCE_NONE UINT32_MAX
#define BT_BALANCE_HIGH 0.6 /* of params, where nothing else is known */
#define BT_BALANCE_LOW  0.5

struct bt_balance_worker {
    bool prefill, decode;
    bool fixed; /* may not be changed: an operator's choice, on its way, drained, not serving */
    double pressure; /* of its stage: 0 idle, 1 at its limit, more beyond */
};

struct bt_balance_params {
    double window_ms;
    double high, low; /* a stage above `high` wants a worker; the other gives one if it stays below
                         `low` without it. low < high: what was changed does not change back. */
};

struct bt_balance {
    double begin_ms;        /* of the present window */
    double prefill, decode; /* sums of the stages' mean pressures */
    uint32_t samples;
    int wish; /* of the last whole window: 1 more prefill, -1 more decode, 0 none */
};

struct bt_balance_change {
    uint32_t worker;        /* index; BT_BALANCE_NONE: nobody */
    bool to_prefill;        /* else to decode */
    double prefill, decode; /* mean pressures over the window that decided it */
};

/* One sample, of every second or so. */
void bt_balance_step(struct bt_balance *b, const struct bt_balance_params *params,
                     const struct bt_balance_worker *workers, uint32_t n, double now_ms,
                     struct bt_balance_change *change_p);

#endif
