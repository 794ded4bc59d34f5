/* Refusals that need no look at the prompt: under overload they are most of the answers, and
 * parsing and tokenizing what is refused anyway would take the time that the others need. Loop
 * thread. */
#include <stdio.h>
#include <string.h>

#include "conductor/request/request_priv.h"

/* The queue is full, or the tenant has its share of it, and nobody of a lower class is in it. */
static bool full(struct bt_requests *rs, int32_t priority, const char *tenant)
{
    bool share = bt_requests_share_taken(rs, tenant);
    if ((!share && bt_requests_queued(rs) < rs->conf.max_waiting) ||
        bt_requests_at_once(rs, priority)) {
        return false;
    }
    uint64_t id = share ? bt_hash64(tenant, strlen(tenant), 0) : 0;
    struct bt_list *l;
    bt_list_for_each (l, &rs->waiting) {
        const struct bt_lane *k = BT_CONTAINER_OF(l, struct bt_lane, queue);
        if (k->r->refuse < 0 && k->r->spec.priority > priority && (!share || k->r->tenant == id)) {
            return false;
        }
    }
    return true;
}

/* Would the shortest prompt be refused, if it had a place at once? Then so would this one: its
 * prefill does not end earlier, what of it is cached does not matter to the queue, and late
 * requests wait for the same time whatever their length. */
static bool hopeless(struct bt_requests *rs, const struct bt_gen_terms *t, uint64_t now_ns,
                     struct bt_sched_reject *rej)
{
    struct bt_sched_params params = bt_request_params(rs, t->slo_ttft_ms, t->slo_tbt_ms);
    if (params.ttft_objective_ms == 0 && params.tbt_objective_ms == 0) {
        return false;
    }
    struct bt_view_snapshot v;
    struct bt_sched_plan plan;
    struct bt_sched_request req = {.n_tokens = 1,
                                   .n_choices = 1,
                                   .max_new = 1,
                                   .expect_new = 1,
                                   .block_tokens = rs->conf.block_tokens,
                                   .token_bytes = rs->conf.token_bytes,
                                   .waited_ms = (double)(now_ns - t->received_ns) / 1e6};
    bt_view_snapshot(rs->view, NULL, 0, &v);
    bt_view_overtake(&v, t->knows_priority ? bt_request_class(t->priority) : INT32_MIN);
    bt_expect_show(rs, now_ns, &v.snap);
    return bt_sched_decide(rs->conf.policy, rs->conf.admission, &params, &v.snap, &req, &plan,
                           rej) == BT_SCHED_OVERLOADED;
}

bool bt_requests_turn_away(struct bt_requests *rs, const struct bt_gen_terms *t, char *why,
                           size_t cap, uint32_t *retry_after_s_p)
{
    struct bt_sched_reject rej;
    if (t->knows_priority && full(rs, bt_request_class(t->priority), t->tenant)) {
        snprintf(why, cap, "%s", bt_queue_full_text);
        *retry_after_s_p = bt_requests_retry_after_s(rs);
        bt_metric_add(rs->m.rejected[REJECT_QUEUE_FULL], 1);
        return true;
    }
    if (!hopeless(rs, t, bt_mono_ns(), &rej)) {
        return false;
    }
    bt_overload_text(&rej, why, cap);
    *retry_after_s_p = bt_overload_retry_s(rs, &rej);
    bt_metric_add(rs->m.rejected[REJECT_OVERLOADED], 1);
    return true;
}
