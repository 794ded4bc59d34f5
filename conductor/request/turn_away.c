/* Refusals that need no look at the prompt. Under overload most answers are refusals, and parsing
 * and tokenizing a refused prompt would take time from other requests. Pure. */
#include <stdio.h>

#include "conductor/request/machine_priv.h"

#define GATE_NS 2000000ull

/* The policy's verdict on the shortest prompt of a class with these objectives, if it had a place
 * at once. Under overload one answer serves all requests that arrive within GATE_NS. */
static void ask_gate(struct bt_machine *mc, struct bt_gate *g, uint64_t now_ns)
{
    struct bt_sched_params params = bt_request_params(mc, g->slo_ttft_ms, g->slo_tbt_ms);
    struct bt_view_snapshot v;
    struct bt_sched_plan plan;
    struct bt_sched_request req = {.n_tokens = 1,
                                   .n_choices = 1,
                                   .max_new = 1,
                                   .expect_new = 1,
                                   .block_tokens = mc->conf.block_tokens,
                                   .token_bytes = mc->conf.token_bytes,
                                   .waited_ms = g->waited_ms};
    mc->env->snapshot(mc->env_arg, NULL, 0, g->priority, &v);
    bt_expect_show(mc, now_ns, &v.snap);
    g->refuses = bt_sched_decide(mc->conf.policy, mc->conf.admission, &params, &v.snap, &req, &plan,
                                 &g->rej) == BT_SCHED_OVERLOADED;
    g->asked_ns = now_ns;
}

static bool same_gate(const struct bt_gate *a, const struct bt_gate *b)
{
    return a->priority == b->priority && a->slo_ttft_ms == b->slo_ttft_ms &&
           a->slo_tbt_ms == b->slo_tbt_ms;
}

/* Returns why the shortest prompt would be refused even if a place were free now. Then this request
 * would be refused too: its prefill does not end earlier, its cached tokens do not shorten the
 * queue, and late requests of any length wait for the same time. NULL: it would not be refused. */
static const struct bt_sched_reject *hopeless(struct bt_machine *mc, const struct bt_gen_terms *t,
                                              uint64_t now_ns)
{
    struct bt_gate want = {.priority =
                               t->knows_priority ? bt_request_class(t->priority) : INT32_MIN,
                           .slo_ttft_ms = t->slo_ttft_ms,
                           .slo_tbt_ms = t->slo_tbt_ms,
                           .waited_ms = (double)(now_ns - t->received_ns) / 1e6};
    struct bt_sched_params params = bt_request_params(mc, t->slo_ttft_ms, t->slo_tbt_ms);
    if (params.objective.ttft_ms == 0 && params.objective.tbt_ms == 0) {
        return NULL;
    }
    struct bt_gate *g = NULL;
    for (size_t i = 0; i < BT_ARRAY_LEN(mc->gates); i++) {
        g = same_gate(&mc->gates[i], &want) ? &mc->gates[i] : g;
    }
    bool fresh = g != NULL && g->asked_ns != 0 && now_ns - g->asked_ns < GATE_NS;
    /* A request that has waited longer is refused too. One that has waited less may be accepted. */
    if (!fresh || (g->refuses && want.waited_ms < g->waited_ms)) {
        g = g != NULL ? g : &mc->gates[mc->next_gate++ % BT_ARRAY_LEN(mc->gates)];
        *g = want;
        ask_gate(mc, g, now_ns);
    }
    return g->refuses ? &g->rej : NULL;
}

bool bt_machine_turn_away(struct bt_machine *mc, const struct bt_gen_terms *t, char *why,
                          size_t cap, uint32_t *retry_after_s_p, uint64_t now_ns)
{
    struct bt_sequence *instead;
    if (t->knows_priority &&
        bt_queue_ask(mc, bt_request_class(t->priority), t->tenant, &instead) == BT_QUEUE_FULL) {
        snprintf(why, cap, "%s", bt_queue_full_text);
        *retry_after_s_p = bt_queue_retry_after_s(mc);
        bt_metric_add(mc->m.rejected[BT_REJECT_QUEUE_FULL], 1);
        return true;
    }
    const struct bt_sched_reject *rej = hopeless(mc, t, now_ns);
    if (rej == NULL) {
        return false;
    }
    bt_overload_text(rej, why, cap);
    *retry_after_s_p = bt_overload_retry_s(mc, rej);
    bt_metric_add(mc->m.rejected[BT_REJECT_OVERLOADED], 1);
    return true;
}
