/* The states of a lane (states.def). Every function here runs on the loop's thread, may call the
 * front (which may cancel the request from inside), and never frees the lane: that is done by the
 * pool once its flights are over. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/log/log.h"
#include "conductor/request/request_priv.h"

typedef void (*state_fn)(struct bt_lane *k, const struct bt_lane_input *in);

struct bt_lane *bt_lane_create(struct bt_request *r, uint32_t first, uint32_t n)
{
    struct bt_lane *k = bt_calloc(1, sizeof(*k));
    k->r = r;
    k->first = first;
    k->n = n;
    bt_list_init(&k->flights);
    bt_list_init(&k->queue);
    do {
        bt_random(&k->id, sizeof(k->id));
    } while (k->id == 0 || bt_map_get(r->rs->map, &k->id) != NULL);
    (void)bt_map_put(r->rs->map, &k->id, k);
    bt_list_insert_tail(&r->lanes, &k->link);
    return k;
}

void bt_lane_destroy(struct bt_lane *k)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &k->flights) {
        bt_flight_destroy(BT_CONTAINER_OF(l, struct bt_flight, link));
    }
    bt_requests_unqueue(k);
    bt_list_remove(&k->link);
    (void)bt_map_del(k->r->rs->map, &k->id);
    free(k->keys);
    free(k->tokens);
    free(k);
}

const char *bt_lane_state_name(bt_lane_state_t s)
{
    static const char *const names[LANE_STATES] = {"waiting",  "planning", "prefilling",
                                                   "decoding", "settling", "finishing"};
    return s < LANE_STATES ? names[s] : "?";
}

void bt_lane_set_state(struct bt_lane *k, bt_lane_state_t s)
{
    BT_DEBUG("request_state", "req=%016" PRIx64 " epoch=%u from=%s to=%s", k->id, k->epoch,
             bt_lane_state_name(k->state), bt_lane_state_name(s));
    k->state = s;
}

void bt_lane_finishing(struct bt_lane *k, bool hard, uint64_t now_ns)
{
    bt_requests_unqueue(k); /* counts by the state that it leaves */
    bt_requests_fits(k);
    bt_lane_set_state(k, LANE_FINISHING);
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &k->flights) {
        struct bt_flight *f = BT_CONTAINER_OF(l, struct bt_flight, link);
        if (hard || f->wind == FLIGHT_ACTIVE) {
            bt_flight_wind(f, hard, now_ns);
        }
    }
}

/* ---- admission and planning ---- */

static void on_admit(struct bt_lane *k, const struct bt_lane_input *in)
{
    (void)in;
    bt_requests_unqueue(k);
    bt_requests_count(k->r);
    bt_lane_set_state(k, LANE_PLANNING);
    bt_requests_queue_planning(k);
}

void bt_overload_text(const struct bt_sched_reject *rej, char *why, size_t cap)
{
    double p = rej->predicted_ms, o = rej->objective_ms;
    int digits = BT_MIN(p, o) < 10 ? 3 : 0; /* what differs shall look different */
    if (p > 0) { /* less than the objective: rows get the share of it that admission asks for */
        snprintf(why, cap, "%s: %.*f ms predicted%s, at most %.*f ms are asked for", rej->reason,
                 digits, p, p <= o ? " without rows that come later" : "", digits, o);
    } else {
        snprintf(why, cap, "%s", rej->reason);
    }
}

/* One that can never be in time is served late when there is room for that. */
uint32_t bt_overload_retry_s(const struct bt_requests *rs, const struct bt_sched_reject *rej)
{
    bool late = rs->conf.policy->late != NULL && rs->conf.sched.late_wait_ms > 0;
    return rej->retry_after_s != 0 || !late ? rej->retry_after_s : bt_requests_retry_after_s(rs);
}

static void refuse_overload(struct bt_lane *k, const struct bt_sched_reject *rej)
{
    char why[192];
    bt_overload_text(rej, why, sizeof(why));
    bt_request_fail(k->r, REJECT_OVERLOADED, 429, bt_overload_retry_s(k->r->rs, rej), why);
}

static void refuse_too_large(struct bt_lane *k, const struct bt_sched_reject *rej)
{
    char why[256];
    snprintf(why, sizeof(why), "%s (it has %u, %u fit)", rej->reason, k->n_tokens,
             rej->fits_tokens);
    bt_request_fail(k->r, REJECT_TOO_LARGE, 400, 0, why);
}

bool bt_lane_refused_early(struct bt_lane *k, uint64_t now_ns, double wait_ms)
{
    struct bt_sched_reject rej = {0};
    if (!bt_lane_hopeless(k, now_ns, wait_ms, &rej)) {
        return false;
    }
    refuse_overload(k, &rej);
    return true;
}

static void on_plan(struct bt_lane *k, const struct bt_lane_input *in)
{
    if (in->now_ns < k->plan_at_ns) {
        return;
    }
    struct bt_requests *rs = k->r->rs;
    struct bt_sched_reject rej = {0};
    switch (bt_lane_plan(k, in->now_ns, &rej)) {
    case PLAN_SUBMITTED:
        bt_requests_unqueue(k);
        k->no_worker_ns = 0;
        k->progress_ns = in->now_ns;
        bt_lane_set_state(k, LANE_PREFILLING);
        return;
    case PLAN_REFUSED:
        if (rej.verdict == BT_SCHED_TOO_LARGE) {
            refuse_too_large(k, &rej);
        } else {
            refuse_overload(k, &rej);
        }
        return;
    case PLAN_NO_ROOM:
        if (!bt_lane_refused_early(k, in->now_ns, bt_requests_wait_ms(rs, k->r->spec.priority))) {
            bt_requests_starve(k, in->now_ns);
        }
        return;
    case PLAN_WAIT:
        if (rs->probe == k) {
            bt_requests_queue_planning(k);
            bt_requests_nobody(rs);
        }
        break;
    }
    if (k->no_worker_ns == 0) {
        k->no_worker_ns = in->now_ns;
    }
    if (in->now_ns - k->no_worker_ns > (uint64_t)rs->conf.no_worker_ms * 1000000) {
        bt_request_fail(k->r, REJECT_NO_WORKER, 503, BT_MAX(rej.retry_after_s, 1u), rej.reason);
    }
}

static bool past_deadline(struct bt_request *r, uint64_t now_ns)
{
    if (r->spec.timeout_ms == 0 || now_ns < r->spec.received_ns + r->spec.timeout_ms * 1000000) {
        return false;
    }
    bt_request_fail(r, REJECT_DEADLINE, 504, 0, "the request's time limit has passed");
    return true;
}

static void on_tick_waiting(struct bt_lane *k, const struct bt_lane_input *in)
{
    if (!past_deadline(k->r, in->now_ns)) {
        (void)bt_lane_queued_too_long(k, in->now_ns);
    }
}

/* ---- the end ---- */

static void settle(struct bt_lane *k, uint64_t now_ns)
{
    bt_lane_finishing(k, false, now_ns);
    bt_request_settled(k->r, now_ns);
}

static void settle_if_known(struct bt_lane *k, uint64_t now_ns)
{
    if (k->state == LANE_SETTLING && k->r->have_prefill_done && !k->want_flow) {
        settle(k, now_ns);
    }
}

static void on_tick_settling(struct bt_lane *k, const struct bt_lane_input *in)
{
    if (in->now_ns - k->settle_ns > (uint64_t)k->r->rs->conf.settle_ms * 1000000) {
        settle(k, in->now_ns);
    }
}

void bt_lane_choice_finished(struct bt_lane *k, uint32_t choice, bool by_worker, uint64_t now_ns)
{
    for (uint32_t i = k->first; i < k->first + k->n; i++) {
        if (!k->r->choices[i].finished) {
            if (!by_worker) {
                bt_flight_cancel_choice(k->flight, choice);
            }
            return;
        }
    }
    bt_lane_set_state(k, LANE_SETTLING);
    k->settle_ns = now_ns;
    struct bt_flight *f = k->flight;
    k->want_flow = !f->both && !f->same_kv && f->got_decode && !f->flow_done;
    f->decode_useless = !by_worker || (!f->both && !f->got_decode);
    bt_flight_wind(f, false, now_ns);
    settle_if_known(k, now_ns);
}

/* ---- tokens and numbers ---- */

/* The worker that should go on has ended, but no token of the prefill's side is on its way, and
 * none waits behind the prompt's logprobs. */
static bool ended_short(const struct bt_lane *k)
{
    const struct bt_flight *f = k->flight;
    return bt_lane_running(k) && f != NULL && f->decode_ended && f->decode != NULL &&
           (f->both || f->got_first) && k->r->prompt == NULL;
}

/* What waited behind the prompt's logprobs is given; was it all? */
static void deliver_waiting(struct bt_lane *k, uint64_t now_ns)
{
    for (uint32_t i = k->first; i < k->first + k->n && bt_lane_running(k); i++) {
        bt_request_deliver(k, i, now_ns);
    }
    if (ended_short(k)) {
        bt_lane_replan(k, NULL, "the decode worker ended before the request's end", now_ns);
    }
}

static void on_token(struct bt_lane *k, const struct bt_lane_input *in)
{
    const Baton__Token *t = in->msg;
    struct bt_flight *f = k->flight;
    if (t->choice < k->first || t->choice - k->first >= k->n || t->finish == BATON__FINISH__ERROR ||
        (in->session != f->prefill && in->session != f->decode)) {
        return; /* an ERROR is followed by Ended with the reason */
    }
    /* The first choice's first token is the prefill's; the decode worker forks the others. */
    bool first = t->offset == 0 && t->choice == k->first;
    k->progress_ns = in->now_ns;
    k->queued_ns = 0;
    k->put_offs = 0;
    bt_status_t st = bt_request_put(k->r, t);
    if (st == BT_ERR_EXHAUSTED || st == BT_ERR_INVALID) {
        bt_lane_avoid(k, in->session);
        bt_lane_replan(k, NULL,
                       st == BT_ERR_INVALID
                           ? "a worker sent a token that the tokenizer does not have"
                           : "a worker's tokens ran ahead of one that is missing",
                       in->now_ns);
        return;
    }
    if (st != BT_OK) {
        bt_metric_add(k->r->rs->m.stale, 1);
        return;
    }
    k->stuck = false;
    f->got_first = f->got_first || first;
    f->got_decode = f->got_decode || (!f->both && !first);
    if (f->expected && (f->both || f->got_decode)) {
        bt_expect_row(f, in->now_ns);
    }
    bt_request_deliver(k, t->choice, in->now_ns);
    if (ended_short(k)) {
        bt_lane_replan(k, NULL, "the decode worker ended before the request's end", in->now_ns);
    }
}

static void on_prompt(struct bt_lane *k, const struct bt_lane_input *in)
{
    struct bt_request *r = k->r;
    k->progress_ns = in->now_ns;
    if (r->prompt == NULL || in->session != k->flight->prefill) {
        return;
    }
    if (!bt_prompt_add(r->prompt, in->msg)) {
        bt_lane_avoid(k, in->session);
        bt_lane_replan(k, NULL, "a worker's prompt logprobs are not those of the prompt",
                       in->now_ns);
        return;
    }
    k->stuck = false;
    deliver_waiting(k, in->now_ns); /* tokens may have come before its logprobs */
}

static void on_prefill_done(struct bt_lane *k, const struct bt_lane_input *in)
{
    if (k->flight != NULL) {
        bt_flight_prefilled(k->flight);
    }
    k->stuck = false;
    k->progress_ns = in->now_ns;
    bt_request_prefill_done(k->r, in->msg, in->now_ns);
    bt_outcome_prefilled(k);
    if (k->state == LANE_PREFILLING && k->r->spec.max_tokens == 0) {
        bt_request_no_tokens(k, in->now_ns);
    }
    settle_if_known(k, in->now_ns);
}

static void on_flow_done(struct bt_lane *k, const struct bt_lane_input *in)
{
    k->progress_ns = in->now_ns;
    bt_request_flow_done(k->r, in->msg);
    k->want_flow = false;
    if (k->flight != NULL && in->session == k->flight->kv_decode) {
        k->flight->flow_done = true;
        bt_flight_step(k->flight, in->now_ns);
    }
    settle_if_known(k, in->now_ns);
}

/* ---- failures ---- */

/* Does the current plan still need what this session does? The prefill worker is needed until all
 * that only it says has come, whatever its peers have done by then: messages of different sessions
 * have no order, so the decode worker's tokens and FlowDone may be here long before its own. */
static bool needed(const struct bt_flight *f, const struct bt_session *s)
{
    const struct bt_request *r = f->lane->r;
    bool prompt_missing = r->prompt != NULL;
    bool landed = f->flow_done || f->got_decode;
    if (r->spec.max_tokens == 0) {
        return prompt_missing && (s == f->prefill || s == f->kv_prefill);
    }
    if (s == f->decode && !f->decode_ended) {
        return true;
    }
    if (s == f->prefill) {
        return prompt_missing || !f->got_first || (!f->both && !landed);
    }
    if (s == f->kv_prefill) {
        return f->both ? !f->got_first : !landed;
    }
    return s == f->kv_decode && !f->got_decode;
}

static void on_reserved(struct bt_lane *k, const struct bt_lane_input *in)
{
    const Baton__Reserved *v = in->msg;
    struct bt_flight *f = k->flight;
    k->progress_ns = in->now_ns;
    if (v->status == BT_OK) {
        f->reserved++;
        if (bt_flight_reserved(f)) {
            bt_requests_fits(k);
        }
    } else if (needed(f, in->session)) {
        bt_lane_repair(k, in->session, v->status, v->detail, in->now_ns);
    }
}

static void on_grant_failed(struct bt_lane *k, const struct bt_lane_input *in)
{
    const Baton__GrantFailed *g = in->msg;
    struct bt_flight *f = k->flight;
    if (!needed(f, in->session)) {
        return;
    }
    /* The receiving side tells of its peer: it is the peer that the next plan should avoid. */
    const struct bt_session *at = in->session;
    if (at == f->kv_decode && !f->same_kv && g->status <= BT_ERR_PEER_LOST &&
        g->status > BT_ERR_NO_MEMORY) {
        bt_lane_avoid(k, f->kv_prefill);
        at = NULL;
    }
    int32_t status = g->status != BT_OK ? g->status : BT_ERR_INTERNAL;
    bt_lane_repair(k, at, status, g->detail, in->now_ns);
}

static void on_ended_old(struct bt_lane *k, const struct bt_lane_input *in)
{
    (void)k;
    bt_flight_ended(in->flight, in->session);
    bt_flight_step(in->flight, in->now_ns);
}

static void on_lost_old(struct bt_lane *k, const struct bt_lane_input *in)
{
    (void)k;
    bt_flight_lose(in->flight, in->session);
    bt_flight_step(in->flight, in->now_ns);
}

/* The request goes on, but the plan was left before: perhaps because the worker's death had been
 * told by its kvstore or by a peer, who may notice first. */
static void on_lost_late(struct bt_lane *k, const struct bt_lane_input *in)
{
    on_lost_old(k, in);
    bt_lane_lost_late(k, in->flight, in->session);
}

static void on_lost_settling(struct bt_lane *k, const struct bt_lane_input *in)
{
    if (in->flight == k->flight) {
        k->want_flow = k->want_flow && in->session != in->flight->kv_decode;
        /* A numbers' source is gone: they stay unknown. */
        k->r->have_prefill_done = k->r->have_prefill_done || in->session == in->flight->prefill;
    }
    on_lost_old(k, in);
    settle_if_known(k, in->now_ns);
}

/* No tokens are wanted and the prompt's logprobs are there: nothing that is lost now is missed. */
static bool has_all(struct bt_lane *k, uint64_t now_ns)
{
    struct bt_request *r = k->r;
    if (k->state != LANE_PREFILLING || r->spec.max_tokens != 0 || r->prompt != NULL) {
        return false;
    }
    r->have_prefill_done = true; /* its numbers will not come */
    bt_request_no_tokens(k, now_ns);
    settle_if_known(k, now_ns);
    return true;
}

static void on_ended(struct bt_lane *k, const struct bt_lane_input *in)
{
    struct bt_flight *f = in->flight;
    const Baton__Ended *e = in->msg;
    if (f != k->flight) {
        on_ended_old(k, in);
        return;
    }
    k->progress_ns = in->now_ns;
    bool need = needed(f, in->session);
    bt_flight_ended(f, in->session);
    if (has_all(k, in->now_ns)) {
        return;
    }
    if (e->status != BT_OK && need) {
        bt_lane_repair(k, in->session, e->status, e->detail, in->now_ns);
        return;
    }
    if (in->session == f->prefill && ((!f->both && !f->got_first) || k->r->prompt != NULL)) {
        bt_lane_avoid(k, in->session);
        bt_lane_replan(k, NULL, "the prefill worker ended without what was asked for", in->now_ns);
        return;
    }
    if (ended_short(k)) {
        bt_lane_avoid(k, in->session);
        bt_lane_replan(k, NULL, "the decode worker ended before the request's end", in->now_ns);
        return;
    }
    bt_flight_step(f, in->now_ns);
}

static void on_lost(struct bt_lane *k, const struct bt_lane_input *in)
{
    struct bt_flight *f = in->flight;
    const struct bt_session *s = in->session;
    if (f != k->flight) {
        on_lost_late(k, in);
        return;
    }
    bool need = needed(f, s);
    bt_flight_lose(f, s);
    if (has_all(k, in->now_ns) || !need) {
        return;
    }
    char why[128];
    snprintf(why, sizeof(why), "%s %s was lost", s->member->kind, s->member->name);
    bt_lane_avoid(k, s);
    bt_lane_replan(k, s, why, in->now_ns);
}

/* A worker that changes its role does not go on with what it has for the old one, given time. */
static bool role_goes(const struct bt_flight *f, uint64_t now_ns)
{
    uint32_t after_ms = f->lane->r->rs->conf.role_move_ms;
    return (f->prefill != NULL && needed(f, f->prefill) &&
            bt_session_gives_up(f->prefill, f->both ? BT_ROLES_BOTH : BT_ROLES_PREFILL, after_ms,
                                now_ns)) ||
           (f->decode != NULL && needed(f, f->decode) &&
            bt_session_gives_up(f->decode, f->both ? BT_ROLES_BOTH : BT_ROLES_DECODE, after_ms,
                                now_ns));
}

static bool needs_leaving(const struct bt_flight *f, uint64_t now_ns)
{
    const struct bt_session *const all[] = {f->prefill, f->decode, f->kv_prefill, f->kv_decode};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (all[i] != NULL && bt_session_leaving(all[i]) && needed(f, all[i])) {
            return true;
        }
    }
    return role_goes(f, now_ns);
}

static void on_tick_running(struct bt_lane *k, const struct bt_lane_input *in)
{
    if (past_deadline(k->r, in->now_ns)) {
        return;
    }
    struct bt_flight *f = k->flight;
    if (needs_leaving(f, in->now_ns)) {
        bt_lane_move(k, in->now_ns);
        if (k->flight != f) {
            return;
        }
    }
    if (k->r->spec.max_tokens == 0 && k->r->prompt == NULL) { /* as while settling */
        if (in->now_ns - k->progress_ns > (uint64_t)k->r->rs->conf.settle_ms * 1000000) {
            (void)has_all(k, in->now_ns);
        }
        return;
    }
    struct bt_session *s = bt_lane_due(k);
    if (bt_lane_watch(k, in->now_ns) || s == NULL) {
        return;
    }
    /* A queue is no hang: what counts is whether this worker finishes anything at all. */
    uint64_t last = BT_MAX(k->progress_ns, s->output_ns);
    last = BT_MAX(last, k->r->rs->awake_ns);
    double limit_ms = k->r->rs->conf.stall_ms;
    if (k->state == LANE_PREFILLING) {
        limit_ms += 2 * f->plan.ttft_ms;
    }
    if (in->now_ns > last && (double)(in->now_ns - last) / 1e6 > limit_ms) {
        bt_lane_avoid(k, s);
        char why[128];
        snprintf(why, sizeof(why), "%s has not finished anything for %.0f s", s->member->name,
                 (double)(in->now_ns - last) / 1e9);
        bt_lane_replan(k, s, why, in->now_ns);
    }
}

/* ---- the table ---- */

static const state_fn table[LANE_STATES][EV_EVENTS] = {
#define BT_LANE_ROW(state, event, fn) [LANE_##state][EV_##event] = fn,
#include "states.def"
#undef BT_LANE_ROW
};

void bt_lane_event(struct bt_lane *k, bt_lane_event_t ev, const struct bt_lane_input *in)
{
    BT_ASSERT(k->state < LANE_STATES && ev < EV_EVENTS);
    state_fn fn = table[k->state][ev];
    if (fn != NULL) {
        fn(k, in);
    }
}
