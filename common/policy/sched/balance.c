/* Roles by load. Pure: see balance.h. */
#include "common/policy/sched/balance.h"

#include <math.h>

struct stage {
    uint32_t n;
    double sum;
};

static double mean(const struct stage *s)
{
    return s->n != 0 ? s->sum / s->n : 0;
}

static void add(struct stage *s, double pressure)
{
    s->n++;
    /* At most 1: one overloaded worker must not decide for its whole stage. */
    s->sum += BT_MIN(BT_MAX(pressure, 0), 1);
}

/* Returns whether a stage of n workers with this mean pressure can give one away. */
static bool can_give(const struct bt_balance_params *p, double pressure, uint32_t n)
{
    return n >= 2 && pressure * n / (n - 1) < p->high;
}

/* The worker that changes: the least busy one of the stage that gives. Workers with both roles
 * belong to both stages and need no change. */
static uint32_t donor(const struct bt_balance_worker *w, uint32_t n, bool of_decode)
{
    uint32_t best = BT_BALANCE_NONE;
    for (uint32_t i = 0; i < n; i++) {
        if (!w[i].fixed && w[i].decode == of_decode && w[i].prefill != of_decode &&
            (best == BT_BALANCE_NONE || w[i].pressure < w[best].pressure)) {
            best = i;
        }
    }
    return best;
}

void bt_balance_step(struct bt_balance *b, const struct bt_balance_params *params,
                     const struct bt_balance_worker *workers, uint32_t n, double now_ms,
                     struct bt_balance_change *change_p)
{
    struct stage prefill = {0}, decode = {0};
    *change_p = (struct bt_balance_change){.worker = BT_BALANCE_NONE};
    for (uint32_t i = 0; i < n; i++) {
        if (workers[i].prefill) {
            add(&prefill, workers[i].pressure);
        }
        if (workers[i].decode) {
            add(&decode, workers[i].pressure);
        }
    }
    if (b->samples == 0) {
        b->begin_ms = now_ms;
    }
    b->samples++;
    b->prefill += mean(&prefill);
    b->decode += mean(&decode);
    if (now_ms - b->begin_ms < params->window_ms) {
        return;
    }
    double p = b->prefill / b->samples, d = b->decode / b->samples;
    int wish = p > params->high && can_give(params, d, decode.n)    ? 1
               : d > params->high && can_give(params, p, prefill.n) ? -1
                                                                    : 0;
    int before = b->wish;
    *b = (struct bt_balance){.wish = wish};
    if (wish == 0 || wish != before) {
        return;
    }
    b->wish = 0; /* after a change two new windows must pass */
    *change_p = (struct bt_balance_change){
        .worker = donor(workers, n, wish > 0), .to_prefill = wish > 0, .prefill = p, .decode = d};
}
