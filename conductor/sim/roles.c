/* Roles by load. See roles.h. */
#include "conductor/sim/roles.h"

#include <stdlib.h>

void bt_sim_roles_init(struct bt_sim_roles *r, uint32_t n, double window_ms)
{
    *r = (struct bt_sim_roles){
        .params = {.window_ms = window_ms, .high = BT_BALANCE_HIGH},
        .n = n,
        .changing = BT_BALANCE_NONE,
    };
    r->workers = bt_calloc(n, sizeof(*r->workers));
}

void bt_sim_roles_cleanup(struct bt_sim_roles *r)
{
    free(r->workers);
    r->workers = NULL;
}

bool bt_sim_roles_look(struct bt_sim_roles *r, const struct bt_sched_params *params,
                       struct bt_sched_worker *workers, bool idle, double now_ms,
                       uint32_t *worker_p)
{
    if (r->changing != BT_BALANCE_NONE) { /* nothing is counted during a change */
        r->balance = (struct bt_balance){0};
        *worker_p = r->changing;
        r->changing = idle ? BT_BALANCE_NONE : r->changing;
        return idle;
    }
    for (uint32_t i = 0; i < r->n; i++) {
        const struct bt_sched_worker *w = &workers[i];
        r->workers[i] = (struct bt_balance_worker){.prefill = w->prefill,
                                                   .decode = w->decode,
                                                   .fixed = w->kvstore == BT_SCHED_NONE,
                                                   .pressure = bt_sched_pressure(params, w)};
    }
    struct bt_balance_change c;
    bt_balance_step(&r->balance, &r->params, r->workers, r->n, now_ms, &c);
    if (c.worker != BT_BALANCE_NONE) {
        workers[c.worker].prefill = workers[c.worker].decode = false;
        r->changing = c.worker;
        r->to_prefill = c.to_prefill;
        r->changes++;
    }
    return false;
}
