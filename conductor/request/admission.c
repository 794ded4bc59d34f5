/* Refusals that need no look at the prompt: under overload they are most of the answers, and
 * parsing and tokenizing what is refused anyway would take the time that the others need. Pure. */
#include <stdio.h>
#include <string.h>

#include "conductor/request/machine_priv.h"

/* The queue is full, or the tenant has its share of it, and nobody of a lower class is in it. */
static bool full(struct bt_machine *mc, int32_t priority, const char *tenant)
{
    bool share = bt_queue_share_taken(mc, tenant);
    if ((!share && bt_queue_queued(mc) < mc->conf.max_waiting) || bt_queue_at_once(mc, priority)) {
        return false;
    }
    uint64_t id = share ? bt_hash64(tenant, strlen(tenant), 0) : 0;
    struct bt_list *l;
    bt_list_for_each (l, &mc->queues.waiting) {
        const struct bt_sequence *sq = BT_CONTAINER_OF(l, struct bt_sequence, queue);
        if (sq->r->refuse < 0 && sq->r->spec.priority > priority &&
            (!share || sq->r->tenant == id)) {
            return false;
        }
    }
    return true;
}

/* Would the shortest prompt be refused, if it had a place at once? Then so would this one: its
 * prefill does not end earlier, what of it is cached does not matter to the queue, and late
 * requests wait for the same time whatever their length. */
static bool hopeless(struct bt_machine *mc, const struct bt_gen_terms *t, uint64_t now_ns,
                     struct bt_sched_reject *rej)
{
    struct bt_sched_params params = bt_request_params(mc, t->slo_ttft_ms, t->slo_tbt_ms);
    if (params.ttft_objective_ms == 0 && params.tbt_objective_ms == 0) {
        return false;
    }
    struct bt_view_snapshot v;
    struct bt_sched_plan plan;
    struct bt_sched_request req = {.n_tokens = 1,
                                   .n_choices = 1,
                                   .max_new = 1,
                                   .expect_new = 1,
                                   .block_tokens = mc->conf.block_tokens,
                                   .token_bytes = mc->conf.token_bytes,
                                   .waited_ms = (double)(now_ns - t->received_ns) / 1e6};
    mc->env->snapshot(mc->env_arg, NULL, 0,
                      t->knows_priority ? bt_request_class(t->priority) : INT32_MIN, &v);
    bt_expect_show(mc, now_ns, &v.snap);
    return bt_sched_decide(mc->conf.policy, mc->conf.admission, &params, &v.snap, &req, &plan,
                           rej) == BT_SCHED_OVERLOADED;
}

bool bt_machine_turn_away(struct bt_machine *mc, const struct bt_gen_terms *t, char *why,
                          size_t cap, uint32_t *retry_after_s_p, uint64_t now_ns)
{
    struct bt_sched_reject rej;
    if (t->knows_priority && full(mc, bt_request_class(t->priority), t->tenant)) {
        snprintf(why, cap, "%s", bt_queue_full_text);
        *retry_after_s_p = bt_queue_retry_after_s(mc);
        bt_metric_add(mc->m.rejected[BT_REJECT_QUEUE_FULL], 1);
        return true;
    }
    if (!hopeless(mc, t, now_ns, &rej)) {
        return false;
    }
    bt_overload_text(&rej, why, cap);
    *retry_after_s_p = bt_overload_retry_s(mc, &rej);
    bt_metric_add(mc->m.rejected[BT_REJECT_OVERLOADED], 1);
    return true;
}
