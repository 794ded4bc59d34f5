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

/* A long prompt that no worker could have in time may be prefilled late in the background: is it
 * ruled out that this is one, by the length of its body? */
static bool short_enough(const struct bt_requests *rs, const struct bt_sched_params *params,
                         const struct bt_view_snapshot *v, size_t body_bytes)
{
    if (!rs->conf.policy->mixes || !(params->background_share > 0) ||
        params->ttft_objective_ms == 0) {
        return true;
    }
    uint32_t tokens = (uint32_t)BT_MIN(body_bytes, (size_t)UINT32_MAX);
    for (uint32_t i = 0; i < v->snap.n_workers; i++) {
        const struct bt_sched_worker *w = &v->workers[i];
        double rate = bt_request_tokens_per_s(w, BT_MAX(tokens, 1u), params);
        rate = rate > 0 ? rate : params->prefill_tokens_per_s;
        double ms = 1e3 * tokens / rate;
        if (w->prefill && (tokens == 0 || ms >= params->ttft_objective_ms)) {
            return false;
        }
    }
    return true;
}

/* What the shortest prompt would meet, if it had a place at once. Of a longer one no prefill ends
 * earlier, and what of it is cached does not matter to the queue. */
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
    bt_view_overtake(&v, t->knows_priority ? t->priority : INT32_MIN);
    if (!short_enough(rs, &params, &v, t->body_bytes)) {
        return false;
    }
    bt_expect_show(rs, now_ns, &v.snap);
    return bt_sched_decide(rs->conf.policy, rs->conf.admission, &params, &v.snap, &req, &plan,
                           rej) == BT_SCHED_OVERLOADED;
}

bool bt_requests_turn_away(struct bt_requests *rs, const struct bt_gen_terms *t, char *why,
                           size_t cap, uint32_t *retry_after_s_p)
{
    struct bt_sched_reject rej;
    if (t->knows_priority && full(rs, t->priority, t->tenant)) {
        snprintf(why, cap, "%s", bt_queue_full_text);
        *retry_after_s_p = bt_requests_retry_after_s(rs);
        bt_metric_add(rs->m.rejected[REJECT_QUEUE_FULL], 1);
        return true;
    }
    if (!hopeless(rs, t, bt_mono_ns(), &rej)) {
        return false;
    }
    bt_overload_text(&rej, why, cap);
    *retry_after_s_p = rej.retry_after_s;
    bt_metric_add(rs->m.rejected[REJECT_OVERLOADED], 1);
    return true;
}
