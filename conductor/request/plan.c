/* One plan of one request: snapshot, policy, and the messages that start it everywhere at once.
 * Loop thread. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/request_priv.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens travel as little-endian words");

/* Prompt and what was generated so far, with the keys of the full blocks. */
static void gather_tokens(struct bt_request *r)
{
    uint32_t n_prompt = (uint32_t)r->spec.prompt.n;
    uint32_t n = n_prompt + r->journal.n;
    if (n > r->tokens_cap) {
        r->tokens_cap = n;
        r->tokens = bt_realloc(r->tokens, (size_t)n * sizeof(*r->tokens));
    }
    if (r->n_tokens == n) {
        return; /* planned before, nothing was added since */
    }
    memcpy(r->tokens, r->spec.prompt.ids, (size_t)n_prompt * sizeof(*r->tokens));
    if (r->journal.n != 0) {
        memcpy(r->tokens + n_prompt, r->journal.tokens, (size_t)r->journal.n * sizeof(*r->tokens));
    }
    r->n_tokens = n;
    uint32_t bt = r->rs->conf.block_tokens;
    if (n / bt > r->keys_cap) {
        r->keys_cap = n / bt;
        r->keys = bt_realloc(r->keys, (size_t)r->keys_cap * sizeof(*r->keys));
    }
    r->n_keys = n / bt != 0 ? bt_kv_keys(&r->root, r->tokens, n, bt, r->keys) : 0;
}

/* full_p: because it had no room a moment ago. */
static bool avoided(const struct bt_request *r, const struct bt_session *s, uint64_t now_ns,
                    bool *full_p)
{
    for (uint32_t i = 0; i < r->n_avoid; i++) {
        if (r->avoid[i].incarnation == s->member->incarnation && now_ns < r->avoid[i].until_ns) {
            *full_p = *full_p || r->avoid[i].until_ns != UINT64_MAX;
            return true;
        }
    }
    return false;
}

static uint64_t deadline_wall_ns(const struct bt_request *r, uint64_t now_ns)
{
    if (r->spec.timeout_ms == 0) {
        return 0;
    }
    uint64_t due = r->spec.received_ns + r->spec.timeout_ms * 1000000;
    return bt_real_ns() + (due > now_ns ? due - now_ns : 0);
}

static void send_reserve(struct bt_request *r, struct bt_session *kv, Baton__GrantRole role,
                         const struct bt_session *peer, bool keep, uint64_t deadline_ns)
{
    Baton__Reserve v = BATON__RESERVE__INIT;
    v.request = r->id;
    v.epoch = r->epoch;
    v.role = role;
    v.keys.data = (uint8_t *)r->keys;
    v.keys.len = (size_t)r->n_keys * sizeof(*r->keys);
    v.n_tokens = r->n_tokens;
    v.keep = keep;
    v.no_cache = r->spec.no_cache;
    v.deadline_ns = deadline_ns;
    if (peer != NULL) {
        v.peer = peer->member->name;
        v.peer_rpc = peer->member->rpc;
        v.peer_incarnation = peer->member->incarnation;
    }
    Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
    m.m_case = BATON__TO_KVSTORE__M_RESERVE;
    m.reserve = &v;
    (void)bt_session_send_kvstore(kv, &m);
}

static void fill_sampling(const struct bt_request *r, Baton__Sampling *s)
{
    const struct bt_engine_params *p = &r->spec.sampling;
    s->temperature = p->temperature;
    s->top_p = p->top_p;
    s->top_k = p->top_k;
    s->min_p = p->min_p;
    s->repetition_penalty = p->repetition_penalty;
    s->frequency_penalty = p->frequency_penalty;
    s->presence_penalty = p->presence_penalty;
    s->seed = p->seed;
    s->logprobs = p->logprobs;
    s->max_new = r->spec.max_tokens - r->journal.n;
    s->min_new = p->min_new; /* counts from the prompt's end, as the engine does */
    s->n_stop_ids = p->n_eos;
    s->stop_ids = (uint32_t *)p->eos;
    s->n_bias_ids = s->n_bias = p->n_bias;
    s->bias_ids = (uint32_t *)p->bias_ids;
    s->bias = (float *)p->bias;
}

static void send_submit(struct bt_request *r, struct bt_session *w, Baton__Phases phases,
                        uint64_t deadline_ns)
{
    Baton__Sampling sampling = BATON__SAMPLING__INIT;
    fill_sampling(r, &sampling);
    Baton__Submit v = BATON__SUBMIT__INIT;
    v.request = r->id;
    v.epoch = r->epoch;
    v.phases = phases;
    v.tokens.data = (uint8_t *)r->tokens;
    v.tokens.len = (size_t)r->n_tokens * sizeof(*r->tokens);
    v.n_prompt = (uint32_t)r->spec.prompt.n;
    v.sampling = &sampling;
    v.deadline_ns = deadline_ns;
    v.root_key.data = r->root.b;
    v.root_key.len = sizeof(r->root.b);
    v.no_cache = r->spec.no_cache;
    Baton__ToWorker m = BATON__TO_WORKER__INIT;
    m.m_case = BATON__TO_WORKER__M_SUBMIT;
    m.submit = &v;
    (void)bt_session_send_worker(w, &m);
}

/* Reservations first: a worker asks its kvstore for the grant as soon as it has its Submit. */
static void submit(struct bt_request *r, struct bt_flight *f, bool keep, uint64_t now_ns)
{
    uint64_t deadline_ns = deadline_wall_ns(r, now_ns);
    send_reserve(r, f->kv_prefill, BATON__GRANT_ROLE__WRITE, NULL, true, deadline_ns);
    if (!f->same_kv) {
        send_reserve(r, f->kv_decode, BATON__GRANT_ROLE__RECEIVE, f->kv_prefill, keep, deadline_ns);
    }
    if (f->both) {
        send_submit(r, f->decode, BATON__PHASES__BOTH, deadline_ns);
    } else {
        send_submit(r, f->prefill, BATON__PHASES__PREFILL, deadline_ns);
        send_submit(r, f->decode, BATON__PHASES__DECODE, deadline_ns);
    }
}

static void count_plan(struct bt_request *r, const struct bt_sched_plan *plan)
{
    struct bt_requests *rs = r->rs;
    for (size_t i = 0; i < BT_PLAN_REASONS; i++) {
        if (strcmp(bt_plan_reasons[i], plan->reason) == 0) {
            bt_metric_add(rs->m.plan[plan->both][i], 1);
        }
    }
}

bt_plan_result_t bt_request_plan(struct bt_request *r, uint64_t now_ns, struct bt_sched_reject *rej)
{
    struct bt_requests *rs = r->rs;
    gather_tokens(r);
    struct bt_view_snapshot v;
    bt_view_snapshot(rs->view, r->keys, r->spec.no_cache ? 0 : r->n_keys, &v);
    bool full = false;
    for (uint32_t i = 0; i < v.snap.n_workers; i++) {
        v.workers[i].avoid = avoided(r, v.worker[i], now_ns, &full);
    }
    for (uint32_t i = 0; i < v.snap.n_kvstores; i++) {
        v.kvstores[i].avoid = avoided(r, v.kvstore[i], now_ns, &full);
    }
    struct bt_sched_request req = {.n_tokens = r->n_tokens,
                                   .max_new = r->spec.max_tokens - r->journal.n,
                                   .block_tokens = rs->conf.block_tokens,
                                   .token_bytes = rs->conf.token_bytes};
    bt_random(&req.random, sizeof(req.random));
    struct bt_sched_params params = rs->conf.sched;
    if (r->epoch != 0) { /* admitted already: an objective is no reason to drop it now */
        params.ttft_objective_ms = params.tbt_objective_ms = 0;
    }
    struct bt_sched_plan plan;
    bt_sched_verdict_t verdict = rs->conf.policy->place(&params, &v.snap, &req, &plan, rej);
    if (verdict != BT_SCHED_PLANNED) {
        return verdict == BT_SCHED_TOO_LARGE || verdict == BT_SCHED_OVERLOADED ? PLAN_REFUSED
                                                                               : PLAN_WAIT;
    }
    if (full && plan.last_resort && rs->probe != r) {
        return PLAN_NO_ROOM;
    }
    r->epoch++;
    bt_journal_begin(&r->journal, r->epoch);
    struct bt_flight *f = r->flight = bt_flight_create(r);
    f->both = plan.both;
    f->same_kv = plan.kv_prefill == plan.kv_decode;
    f->prefill = v.worker[plan.prefill];
    f->decode = v.worker[plan.decode];
    f->kv_prefill = v.kvstore[plan.kv_prefill];
    f->kv_decode = v.kvstore[plan.kv_decode];
    f->ttft_ms = plan.ttft_ms;
    f->submitted_ns = bt_real_ns();
    f->own_tokens = r->n_tokens - plan.cached_tokens;
    f->prefill->own_prefill_tokens += f->own_tokens;
    f->decode->own_requests++;
    snprintf(r->usage.prefill, sizeof(r->usage.prefill), "%s", f->prefill->member->name);
    snprintf(r->usage.decode, sizeof(r->usage.decode), "%s", f->decode->member->name);
    count_plan(r, &plan);
    BT_DEBUG("request_planned",
             "req=%016" PRIx64 " epoch=%u tokens=%u cached=%u prefill=%s decode=%s why=%s "
             "ttft_ms=%.1f",
             r->id, r->epoch, r->n_tokens, plan.cached_tokens, r->usage.prefill, r->usage.decode,
             plan.reason, plan.ttft_ms);
    /* What only passes through has a limit of its own; for the probe all slots count. */
    submit(r, f, plan.keep || rs->probe == r, now_ns);
    return PLAN_SUBMITTED;
}
