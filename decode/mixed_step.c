/* Mixed steps: how many prompt tokens may join a step that also generates, without violating the
 * TBT objective of the rows. Engine thread. */
#include "decode/decode.h"

/* Returns whether a row is on its way from another node. It will wait until the step that is
 * planned now has ended. Late rows may wait, so they do not count. */
static bool rows_due(const struct bt_wcore *c)
{
    struct bt_list *it;
    bt_list_for_each (it, &c->reqs.waiting) {
        const struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->stage == BT_WREQ_LANDING && !r->sub->late) {
            return true;
        }
    }
    return false;
}

void bt_decode_bound_prompts(struct bt_wcore *c)
{
    uint64_t step_ns = atomic_load(&c->mixed_step_ns), gap_ns = atomic_load(&c->mixed_gap_ns);
    struct bt_batch_limits *l = &c->batch.lim;
    if (step_ns == 0) {
        l->prompt_tokens = (uint32_t)c->conf->engine_mixed_prompt_tokens;
        l->rows_due = false;
        return;
    }
    double budget_ns = bt_batch_mixed_ns(&c->batch, (double)step_ns, (double)gap_ns);
    l->prompt_tokens = bt_batch_prompt_room(&c->batch, &c->speed.fit.cost, budget_ns);
    l->rows_due = rows_due(c);
}
