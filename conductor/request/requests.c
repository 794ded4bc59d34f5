/* All requests of a conductor: gives the request machine (machine.h) its events and the time, and
 * applies its actions. Only this file reads the clock and has timers. Loop thread. */
#include "conductor/request/requests.h"

#include <stdlib.h>

#include "conductor/request/receive.h"
#include "conductor/request/send.h"
#include "conductor/request/sources.h"
#include "conductor/request/spans.h"
#include "conductor/view/view.h"

#define FREE_NS 2000000ull /* of a tick: to free requests that are over */
#define LOSE_NS 2000000ull /* of a turn of the loop: to tell flights of lost daemons */

struct bt_requests {
    struct bt_loop *loop;
    struct bt_view *view;
    struct bt_machine *mc;
    struct bt_machine_env env;
    struct bt_timer tick, round, lose;
    struct bt_trace *trace; /* NULL: nothing is traced */
    const char *model;
    bool applying;
};

/* ---- questions of the machine ---- */

static void ask_snapshot(void *arg, const struct bt_kv_key *keys, uint32_t n_keys, int32_t priority,
                         struct bt_view_snapshot *out)
{
    struct bt_requests *rs = arg;
    bt_view_snapshot(rs->view, keys, n_keys, out);
    bt_view_overtake(out, priority);
}

static void ask_facts(void *arg, const struct bt_peer *p, struct bt_peer_facts *out)
{
    (void)arg;
    bt_session_facts(bt_session_of_peer(p), out);
}

static void ask_sources(void *arg, const struct bt_view_snapshot *v,
                        const struct bt_sched_plan *plan, const struct bt_kv_key *keys,
                        uint32_t n_keys, uint32_t n, struct bt_sources *out)
{
    const struct bt_requests *rs = arg;
    bt_sources_find(rs->view, v, plan, keys, n_keys, n, out);
}

static uint32_t ask_spread(void *arg, const struct bt_view_snapshot *v,
                           const struct bt_kv_key *keys, uint32_t n)
{
    const struct bt_requests *rs = arg;
    return bt_sources_spread(rs->view, v, keys, n);
}

static void ask_random(void *arg, void *out, size_t n)
{
    (void)arg;
    bt_random(out, n);
}

/* ---- time, and the actions that follow ---- */

static void on_round(void *arg);

/* Applies all actions. A callback may call this file again with a cancel or a new request. The loop
 * below applies these actions too, so the inner call returns at once. */
static void apply(void *arg)
{
    struct bt_requests *rs = arg;
    if (rs->applying) {
        return;
    }
    rs->applying = true;
    struct bt_action a;
    while (bt_machine_action(rs->mc, &a)) {
        if (a.type == BT_ACT_TRACED && rs->trace != NULL) {
            bt_spans_offer(rs->trace, rs->model, bt_request_spec(a.r), bt_request_usage(a.r),
                           a.traced.record);
        }
        bt_action_apply(&a);
    }
    rs->applying = false;
    if (bt_machine_wants_round(rs->mc)) {
        bt_timer_start(rs->loop, &rs->round, 0, 0, on_round, rs);
    }
}

/* A plan takes some tens of microseconds, and a thousand may be waiting. When the time is over, the
 * rest is planned first in the loop's next turn. */
static void on_round(void *arg)
{
    struct bt_requests *rs = arg;
    bool (*const parts[])(struct bt_machine *, uint64_t) = {bt_machine_place, bt_machine_plan};
    bool broken_off = false;
    bt_machine_round(rs->mc, bt_mono_ns());
    apply(rs);
    for (size_t i = 0; i < BT_ARRAY_LEN(parts); i++) {
        uint64_t now = bt_mono_ns(), until_ns = now + BT_LOOP_SLICE_NS;
        while (now < until_ns && parts[i](rs->mc, now)) {
            apply(rs);
            now = bt_mono_ns();
        }
        broken_off = broken_off || now >= until_ns;
    }
    bt_machine_probe(rs->mc, bt_mono_ns());
    apply(rs);
    if (broken_off) {
        bt_timer_start(rs->loop, &rs->round, 0, 0, on_round, rs);
    }
}

static void on_tick(void *arg)
{
    struct bt_requests *rs = arg;
    uint64_t now = bt_mono_ns(), until_ns = now + FREE_NS;
    bt_machine_tick(rs->mc, now, bt_real_ns());
    apply(rs);
    while (bt_machine_free(rs->mc)) {
        if (bt_mono_ns() >= until_ns) { /* soon again: a thousand may have ended at once */
            bt_timer_start(rs->loop, &rs->tick, 1, BT_MACHINE_TICK_MS, on_tick, rs);
            return;
        }
    }
}

static void on_lose(void *arg)
{
    struct bt_requests *rs = arg;
    uint64_t until_ns = bt_loop_until(rs->loop, LOSE_NS), now;
    while ((now = bt_mono_ns()) < until_ns) {
        if (!bt_machine_lose(rs->mc, now)) {
            return;
        }
        apply(rs);
    }
    bt_timer_start(rs->loop, &rs->lose, 0, 0, on_lose, rs);
}

/* ---- messages of the sessions ---- */

static void on_worker(void *arg, struct bt_session *s, const Baton__FromWorker *m)
{
    struct bt_requests *rs = arg;
    bt_receive_worker(rs->mc, s, m, bt_mono_ns(), apply, rs);
}

static void on_kvstore(void *arg, struct bt_session *s, const Baton__FromKvstore *m)
{
    struct bt_requests *rs = arg;
    bt_receive_kvstore(rs->mc, s, m, bt_mono_ns(), apply, rs);
}

static void on_up(void *arg, struct bt_session *s)
{
    struct bt_requests *rs = arg;
    bt_machine_up(rs->mc, &s->peer);
    apply(rs);
}

static void on_down(void *arg, struct bt_session *s, const char *why)
{
    struct bt_requests *rs = arg;
    (void)why;
    bt_machine_down(rs->mc, &s->peer);
    bt_timer_start(rs->loop, &rs->lose, 0, 0, on_lose, rs);
}

/* ---- life ---- */

struct bt_requests *bt_requests_create(struct bt_loop *loop, struct bt_view *view,
                                       const struct bt_tokenizer *tok,
                                       const struct bt_requests_config *conf,
                                       struct bt_metrics *metrics)
{
    static const struct bt_view_ops ops = {
        .on_up = on_up, .on_down = on_down, .on_worker = on_worker, .on_kvstore = on_kvstore};
    struct bt_requests *rs = bt_calloc(1, sizeof(*rs));
    rs->loop = loop;
    rs->view = view;
    rs->env = (struct bt_machine_env){.snapshot = ask_snapshot,
                                      .facts = ask_facts,
                                      .sources = ask_sources,
                                      .spread = ask_spread,
                                      .random = ask_random,
                                      .extent_blocks = bt_view_extent_blocks(view)};
    rs->mc = bt_machine_create(&rs->env, rs, tok, conf, metrics, bt_mono_ns(), bt_real_ns());
    bt_view_set_ops(view, &ops, rs);
    bt_timer_start(loop, &rs->tick, BT_MACHINE_TICK_MS, BT_MACHINE_TICK_MS, on_tick, rs);
    return rs;
}

void bt_requests_destroy(struct bt_requests *rs)
{
    if (rs == NULL) {
        return;
    }
    bt_machine_stop(rs->mc, bt_mono_ns());
    apply(rs);
    bt_timer_stop(rs->loop, &rs->tick);
    bt_timer_stop(rs->loop, &rs->round);
    bt_timer_stop(rs->loop, &rs->lose);
    bt_view_set_ops(rs->view, NULL, NULL);
    bt_machine_destroy(rs->mc);
    free(rs);
}

void bt_requests_set_trace(struct bt_requests *rs, struct bt_trace *t, const char *model)
{
    rs->trace = t;
    rs->model = model;
}

void bt_requests_trace(const struct bt_requests *rs, const char *traceparent,
                       struct bt_trace_context *out)
{
    bt_trace_begin(rs->trace, traceparent, out);
}

/* ---- clients ---- */

struct bt_request *bt_request_start(struct bt_requests *rs, struct bt_gen_spec *spec,
                                    const struct bt_gen_ops *ops, void *arg)
{
    struct bt_request *r = bt_machine_start(rs->mc, spec, ops, arg, bt_mono_ns());
    apply(rs);
    return r;
}

void bt_request_cancel(struct bt_request *r)
{
    struct bt_requests *rs = bt_request_env(r);
    bt_machine_cancel(rs->mc, r, bt_mono_ns());
    apply(rs);
}

bool bt_requests_turn_away(struct bt_requests *rs, const struct bt_gen_terms *t, char *why,
                           size_t cap, uint32_t *retry_after_s_p)
{
    return bt_machine_turn_away(rs->mc, t, why, cap, retry_after_s_p, bt_mono_ns());
}

uint32_t bt_requests_prompts_max(const struct bt_requests *rs, bool has_tenant)
{
    return bt_machine_prompts_max(rs->mc, has_tenant);
}

bool bt_requests_serving(const struct bt_requests *rs, const char **why_p)
{
    if (bt_machine_draining(rs->mc)) {
        if (why_p != NULL) {
            *why_p = "this conductor is being stopped";
        }
        return false;
    }
    return bt_view_serving(rs->view, why_p);
}

/* ---- operators ---- */

void bt_requests_set_sched(struct bt_requests *rs, const struct bt_sched_policy *policy,
                           const struct bt_sched_admission *admission,
                           const struct bt_sched_params *sched)
{
    bt_machine_set_sched(rs->mc, policy, admission, sched);
}

void bt_requests_drain(struct bt_requests *rs)
{
    bt_machine_drain(rs->mc);
}

const struct bt_requests_config *bt_requests_config(const struct bt_requests *rs)
{
    return bt_machine_config(rs->mc);
}

void bt_requests_stats(const struct bt_requests *rs, struct bt_requests_stats *out)
{
    bt_machine_stats(rs->mc, out);
}

void bt_requests_each(struct bt_requests *rs, bt_request_info_fn fn, void *arg)
{
    bt_machine_each(rs->mc, fn, arg, bt_mono_ns());
}

uint32_t bt_requests_on_worker(struct bt_requests *rs, const struct bt_session *s)
{
    return bt_machine_on_worker(rs->mc, &s->peer);
}

uint32_t bt_requests_on_node(struct bt_requests *rs, const char *node)
{
    return bt_machine_on_node(rs->mc, node);
}

const struct bt_explanation *bt_requests_explain(const struct bt_requests *rs, const char *id)
{
    return bt_machine_explain(rs->mc, id);
}

const struct bt_explanation *bt_requests_recent(const struct bt_requests *rs, uint32_t i)
{
    return bt_machine_recent(rs->mc, i);
}
