/* The states of a sequence (states.def). Pure. This file never frees a sequence: machine.c does
 * when its flights are over. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/log/log.h"
#include "conductor/request/machine_priv.h"

typedef void (*state_fn)(struct bt_sequence *sq, const struct bt_sequence_input *in);

struct bt_sequence *bt_sequence_create(struct bt_request *r, uint32_t first, uint32_t n)
{
    struct bt_sequence *sq = bt_calloc(1, sizeof(*sq));
    sq->r = r;
    sq->first = first;
    sq->n = n;
    bt_list_init(&sq->flights);
    bt_list_init(&sq->queue);
    do {
        r->mc->env->random(r->mc->env_arg, &sq->id, sizeof(sq->id));
    } while (sq->id == 0 || bt_map_get(r->mc->map, &sq->id) != NULL);
    (void)bt_map_put(r->mc->map, &sq->id, sq);
    bt_list_insert_tail(&r->sequences, &sq->link);
    return sq;
}

void bt_sequence_destroy(struct bt_sequence *sq)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &sq->flights) {
        bt_flight_destroy(BT_CONTAINER_OF(l, struct bt_flight, link));
    }
    bt_queue_leave(sq);
    bt_list_remove(&sq->link);
    (void)bt_map_del(sq->r->mc->map, &sq->id);
    free(sq->keys);
    free(sq->tokens);
    free(sq);
}

const char *bt_sequence_state_name(bt_sequence_state_t s)
{
    static const char *const names[BT_SEQ_STATES] = {"waiting",  "planning", "prefilling",
                                                     "decoding", "settling", "finishing"};
    return s < BT_SEQ_STATES ? names[s] : "?";
}

void bt_sequence_set_state(struct bt_sequence *sq, bt_sequence_state_t s)
{
    BT_DEBUG("request_state", "req=%016" PRIx64 " epoch=%u from=%s to=%s", sq->id, sq->epoch,
             bt_sequence_state_name(sq->state), bt_sequence_state_name(s));
    sq->state = s;
}

void bt_sequence_finishing(struct bt_sequence *sq, bool hard, uint64_t now_ns)
{
    bt_queue_leave(sq); /* before the state changes: the queue counts by state */
    bt_queue_fits(sq);
    bt_sequence_set_state(sq, BT_SEQ_FINISHING);
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &sq->flights) {
        struct bt_flight *f = BT_CONTAINER_OF(l, struct bt_flight, link);
        if (hard || f->wind == BT_FLIGHT_ACTIVE) {
            bt_flight_wind(f, hard, now_ns);
        }
    }
}

/* ---- a place, and a plan ---- */

static void on_place(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    (void)in;
    bt_queue_leave(sq);
    bt_queue_count(sq->r);
    bt_sequence_set_state(sq, BT_SEQ_PLANNING);
    bt_queue_plan(sq);
}

void bt_overload_text(const struct bt_sched_reject *rej, char *why, size_t cap)
{
    double p = rej->predicted_ms, o = rej->objective_ms;
    int digits = BT_MIN(p, o) < 10 ? 3 : 0; /* what differs shall look different */
    /* The limit of a price is known to a quarter of an octave, so it may lie above p. */
    bool below = p <= o && rej->miss == BT_SCHED_MISS_TBT; /* it leaves no room for later rows */
    if (p > o || below) {
        snprintf(why, cap, "%s: predicted %.*f ms%s, objective %.*f ms", rej->reason, digits, p,
                 below ? " and longer when more requests join" : "", digits, o);
    } else {
        snprintf(why, cap, "%s", rej->reason);
    }
}

/* How long the client should wait before it tries again. A request that can never be in time may be
 * served late, so another try can help. */
uint32_t bt_overload_retry_s(const struct bt_machine *mc, const struct bt_sched_reject *rej)
{
    bool late = mc->conf.policy->late != NULL && mc->conf.sched.late.wait_ms > 0;
    return rej->retry_after_s != 0 || !late ? rej->retry_after_s : bt_queue_retry_after_s(mc);
}

void bt_sequence_overloaded(struct bt_sequence *sq, const struct bt_sched_reject *rej)
{
    char why[192];
    bt_overload_text(rej, why, sizeof(why));
    bt_request_fail(sq->r, BT_REJECT_OVERLOADED, 429, bt_overload_retry_s(sq->r->mc, rej), why);
}

static void refuse_too_large(struct bt_sequence *sq, const struct bt_sched_reject *rej)
{
    char why[256];
    snprintf(why, sizeof(why), "%s (it has %u tokens; at most %u fit)", rej->reason, sq->n_tokens,
             rej->fits_tokens);
    bt_request_fail(sq->r, BT_REJECT_TOO_LARGE, 400, 0, why);
}

static void on_plan(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    if (in->now_ns < sq->plan_at_ns) {
        return;
    }
    struct bt_machine *mc = sq->r->mc;
    struct bt_sched_reject rej = {0};
    switch (bt_sequence_plan(sq, in->now_ns, &rej)) {
    case BT_PLAN_SUBMITTED: bt_queue_leave(sq); return;
    case BT_PLAN_REFUSED:
        if (rej.verdict == BT_SCHED_TOO_LARGE) {
            refuse_too_large(sq, &rej);
        } else {
            bt_sequence_overloaded(sq, &rej);
        }
        return;
    case BT_PLAN_NO_ROOM: bt_queue_starve(sq, in->now_ns); return;
    case BT_PLAN_FOLLOW: return;
    case BT_PLAN_WAIT:
        if (mc->queues.probe == sq) {
            bt_queue_plan(sq);
            bt_queue_nobody(mc);
        }
        break;
    }
    if (sq->no_worker_ns == 0) {
        sq->no_worker_ns = in->now_ns;
    }
    if (in->now_ns - sq->no_worker_ns > (uint64_t)mc->conf.no_worker_ms * 1000000) {
        bt_request_fail(sq->r, BT_REJECT_NO_WORKER, 503, BT_MAX(rej.retry_after_s, 1u), rej.reason);
    }
}

static bool past_deadline(struct bt_request *r, uint64_t now_ns)
{
    if (r->spec.timeout_ms == 0 || now_ns < r->spec.received_ns + r->spec.timeout_ms * 1000000) {
        return false;
    }
    bt_request_fail(r, BT_REJECT_DEADLINE, 504, 0, "the request's time limit has passed");
    return true;
}

static void on_tick_waiting(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    if (!past_deadline(sq->r, in->now_ns)) {
        (void)bt_sequence_queued_too_long(sq, in->now_ns);
    }
}

/* ---- the end ---- */

static void settle(struct bt_sequence *sq, uint64_t now_ns)
{
    bt_sequence_finishing(sq, false, now_ns);
    bt_request_settled(sq->r, now_ns);
}

static void settle_if_known(struct bt_sequence *sq, uint64_t now_ns)
{
    if (sq->state == BT_SEQ_SETTLING && sq->r->have_prefill_done && !sq->want_flow) {
        settle(sq, now_ns);
    }
}

static void on_tick_settling(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    if (in->now_ns - sq->settle_ns > (uint64_t)sq->r->mc->conf.settle_ms * 1000000) {
        settle(sq, in->now_ns);
    }
}

void bt_sequence_choice_finished(struct bt_sequence *sq, uint32_t choice, bool by_worker,
                                 uint64_t now_ns)
{
    for (uint32_t i = sq->first; i < sq->first + sq->n; i++) {
        if (!sq->r->choices[i].finished) {
            if (!by_worker) {
                bt_flight_cancel_choice(sq->flight, choice);
            }
            return;
        }
    }
    bt_sequence_set_state(sq, BT_SEQ_SETTLING);
    sq->settle_ns = now_ns;
    struct bt_flight *f = sq->flight;
    sq->want_flow = !f->both && !f->same_kv && f->got_decode && !f->flow_done;
    f->decode_useless = !by_worker || (!f->both && !f->got_decode);
    bt_flight_wind(f, false, now_ns);
    settle_if_known(sq, now_ns);
}

/* ---- tokens and numbers ---- */

/* The decode worker has ended before the answer's end, no token of the prefill side is still to
 * come, and no token waits for the prompt's logprobs. */
static bool ended_short(const struct bt_sequence *sq)
{
    const struct bt_flight *f = sq->flight;
    return bt_sequence_running(sq) && f != NULL && f->decode_ended && sq->r->spec.max_tokens != 0 &&
           (f->both || f->got_first) && sq->r->prompt == NULL;
}

/* Delivers the tokens that waited for the prompt's logprobs, and replans if the answer is still
 * incomplete. */
static void deliver_waiting(struct bt_sequence *sq, uint64_t now_ns)
{
    for (uint32_t i = sq->first; i < sq->first + sq->n && bt_sequence_running(sq); i++) {
        bt_request_deliver(sq, i, now_ns);
    }
    if (ended_short(sq)) {
        bt_sequence_replan(
            sq, NULL, "the decode worker ended the request before all its tokens had come", now_ns);
    }
}

static void on_token(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    const struct bt_event *ev = in->ev;
    struct bt_flight *f = sq->flight;
    if (ev->token.choice < sq->first || ev->token.choice - sq->first >= sq->n ||
        ev->token.at->finish == BT_TOKEN_ERROR ||
        (in->peer != f->prefill && in->peer != f->decode)) {
        return; /* after ERROR comes Ended with the reason */
    }
    /* The first token of the first choice comes from prefill; the decode worker forks the
     * others. */
    bool first = ev->token.offset == 0 && ev->token.choice == sq->first;
    sq->progress_ns = in->now_ns;
    sq->queued_ns = 0;
    sq->put_offs = 0;
    bt_status_t st = bt_request_put(sq->r, ev);
    if (st == BT_ERR_EXHAUSTED || st == BT_ERR_INVALID) {
        bt_sequence_avoid(sq, in->peer);
        bt_sequence_replan(sq, NULL,
                           st == BT_ERR_INVALID
                               ? "a worker sent a token id that the tokenizer does not have"
                               : "a worker sent later tokens although an earlier one is missing",
                           in->now_ns);
        return;
    }
    if (st == BT_ERR_MISMATCH) {
        bt_request_fail(sq->r, BT_REJECT_FAILED, 500, 0,
                        "the beam search began again after a failure, and its answer differs from "
                        "the part that was already sent, because the worker's engine is not exact");
        return;
    }
    if (st == BT_ERR_EXISTS && sq->r->spec.beams.width > 0) {
        return; /* it was given out by an earlier plan */
    }
    if (st != BT_OK) {
        bt_metric_add(sq->r->mc->m.stale, 1);
        return;
    }
    sq->stuck = false;
    f->got_first = f->got_first || first;
    f->got_decode = f->got_decode || (!f->both && !first);
    if (f->expected && (f->both || f->got_decode)) {
        bt_expect_row(f, in->now_ns);
    }
    bt_request_deliver(sq, ev->token.choice, in->now_ns);
    if (ended_short(sq)) {
        bt_sequence_replan(sq, NULL,
                           "the decode worker ended the request before all its tokens had come",
                           in->now_ns);
    }
}

/* A beam search goes on. It has computed its prompt, so this stands for its first tokens, which
 * come at its end. */
static void on_searching(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    struct bt_flight *f = sq->flight;
    if (sq->r->spec.beams.width == 0 || in->peer != f->decode) {
        return;
    }
    sq->progress_ns = in->now_ns;
    sq->queued_ns = 0;
    sq->put_offs = 0;
    sq->stuck = false;
    f->got_first = true;
    f->got_decode = !f->both;
    if (f->expected) {
        bt_expect_row(f, in->now_ns);
    }
    if (sq->state == BT_SEQ_PREFILLING) {
        bt_sequence_set_state(sq, BT_SEQ_DECODING);
    }
}

static void on_prompt(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    struct bt_request *r = sq->r;
    sq->progress_ns = in->now_ns;
    if (r->prompt == NULL || in->peer != sq->flight->prefill) {
        return;
    }
    if (!bt_prompt_add(r->prompt, in->ev->prompt.at, in->ev->prompt.first, in->ev->prompt.n)) {
        bt_sequence_avoid(sq, in->peer);
        bt_sequence_replan(sq, NULL,
                           "a worker sent prompt logprobs that do not belong to this prompt",
                           in->now_ns);
        return;
    }
    sq->stuck = false;
    deliver_waiting(sq, in->now_ns); /* tokens may have come before the logprobs */
}

static void on_prefill_done(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    if (sq->flight != NULL) {
        bt_flight_prefilled(sq->flight);
    }
    sq->stuck = false;
    sq->progress_ns = in->now_ns;
    bt_request_prefill_done(sq->r, in->ev, in->now_ns);
    bt_record_prefilled(sq, in->ev, in->now_ns);
    bt_outcome_prefilled(sq);
    if (sq->state == BT_SEQ_PREFILLING && sq->r->spec.max_tokens == 0) {
        bt_request_no_tokens(sq, in->now_ns);
    }
    settle_if_known(sq, in->now_ns);
}

static void on_flow_done(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    sq->progress_ns = in->now_ns;
    bt_request_flow_done(sq->r, in->ev);
    bt_record_flow(sq, in->ev, in->now_ns);
    sq->want_flow = false;
    if (sq->flight != NULL && in->peer == sq->flight->kv_decode) {
        sq->flight->flow_done = true;
        bt_flight_step(sq->flight, in->now_ns);
    }
    settle_if_known(sq, in->now_ns);
}

/* ---- failures ---- */

/* Returns whether the current plan still needs this peer. It needs the prefill worker until
 * everything has arrived that only this worker can send. Messages of different sessions have no
 * order, so the decode worker's tokens and FlowDone may arrive long before that. */
static bool needed(const struct bt_flight *f, const struct bt_peer *p)
{
    const struct bt_request *r = f->sequence->r;
    bool prompt_missing = r->prompt != NULL;
    bool landed = f->flow_done || f->got_decode;
    if (r->spec.max_tokens == 0) {
        return prompt_missing && (p == f->prefill || p == f->kv_prefill);
    }
    if (p == f->decode && !f->decode_ended) {
        return true;
    }
    bool first_missing = !f->got_first && (f->both || r->spec.beams.width == 0);
    if (p == f->prefill) {
        return prompt_missing || first_missing || (!f->both && !landed);
    }
    if (p == f->kv_prefill) {
        return f->both ? !f->got_first : !landed;
    }
    return p == f->kv_decode && !f->got_decode;
}

static void on_reserved(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    const struct bt_event *v = in->ev;
    struct bt_flight *f = sq->flight;
    sq->progress_ns = in->now_ns;
    if (v->status == BT_OK) {
        f->reserved++;
        if (bt_flight_reserved(f)) {
            bt_queue_fits(sq);
        }
    } else if (needed(f, in->peer)) {
        bt_sequence_repair(sq, in->peer, v->status, v->detail, in->now_ns);
    }
}

static void on_grant_failed(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    const struct bt_event *g = in->ev;
    struct bt_flight *f = sq->flight;
    if (!needed(f, in->peer)) {
        return;
    }
    /* The receiving side reports a fault of the sending side: the next plan should avoid the
     * sender. */
    const struct bt_peer *at = in->peer;
    if (at == f->kv_decode && !f->same_kv && g->status <= BT_ERR_PEER_LOST &&
        g->status > BT_ERR_NO_MEMORY) {
        bt_sequence_avoid(sq, f->kv_prefill);
        at = NULL;
    }
    int32_t status = g->status != BT_OK ? g->status : BT_ERR_INTERNAL;
    bt_sequence_repair(sq, at, status, g->detail, in->now_ns);
}

static void on_ended_old(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    (void)sq;
    bt_flight_ended(in->flight, in->peer);
    bt_flight_step(in->flight, in->now_ns);
}

static void on_lost_old(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    (void)sq;
    bt_flight_lose(in->flight, in->peer);
    bt_flight_step(in->flight, in->now_ns);
}

/* The request continues, but it left this plan before the loss. Perhaps the worker's kvstore or a
 * peer noticed the worker's death first and reported it. */
static void on_lost_late(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    bool died = bt_sequence_count_late(sq, in->flight, in->peer);
    on_lost_old(sq, in); /* may end the flight */
    if (died) {
        bt_sequence_died_late(sq);
    }
}

static void on_lost_settling(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    if (in->flight == sq->flight) {
        sq->want_flow = sq->want_flow && in->peer != in->flight->kv_decode;
        /* The source of these numbers is lost: they stay unknown. */
        sq->r->have_prefill_done = sq->r->have_prefill_done || in->peer == in->flight->prefill;
    }
    on_lost_old(sq, in);
    settle_if_known(sq, in->now_ns);
}

/* True: the request wants no tokens and the prompt's logprobs are there, so a loss changes
 * nothing. */
static bool has_all(struct bt_sequence *sq, uint64_t now_ns)
{
    struct bt_request *r = sq->r;
    if (sq->state != BT_SEQ_PREFILLING || r->spec.max_tokens != 0 || r->prompt != NULL) {
        return false;
    }
    r->have_prefill_done = true; /* the numbers will not come */
    bt_request_no_tokens(sq, now_ns);
    settle_if_known(sq, now_ns);
    return true;
}

static void on_ended(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    struct bt_flight *f = in->flight;
    const struct bt_event *e = in->ev;
    if (f != sq->flight) {
        on_ended_old(sq, in);
        return;
    }
    sq->progress_ns = in->now_ns;
    bool need = needed(f, in->peer);
    bt_flight_ended(f, in->peer);
    if (has_all(sq, in->now_ns)) {
        return;
    }
    if (e->status != BT_OK && need) {
        bt_sequence_repair(sq, in->peer, e->status, e->detail, in->now_ns);
        return;
    }
    bool first_due = !f->both && !f->got_first && sq->r->spec.beams.width == 0;
    if (in->peer == f->prefill && (first_due || sq->r->prompt != NULL)) {
        bt_sequence_avoid(sq, in->peer);
        bt_sequence_replan(
            sq, NULL,
            "the prefill worker ended the request without its first token or prompt logprobs",
            in->now_ns);
        return;
    }
    if (ended_short(sq)) {
        bt_sequence_avoid(sq, in->peer);
        bt_sequence_replan(sq, NULL,
                           "the decode worker ended the request before all its tokens had come",
                           in->now_ns);
        return;
    }
    bt_flight_step(f, in->now_ns);
}

static void on_lost(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    struct bt_flight *f = in->flight;
    const struct bt_peer *p = in->peer;
    if (f != sq->flight) {
        on_lost_late(sq, in);
        return;
    }
    bool need = needed(f, p);
    bt_flight_lose(f, p);
    if (has_all(sq, in->now_ns) || !need) {
        return;
    }
    char why[128];
    snprintf(why, sizeof(why), "%s %s was lost", p->kind, p->name);
    bt_sequence_avoid(sq, p);
    bt_sequence_replan(sq, p, why, in->now_ns);
}

/* Returns whether p changes its role and no longer does the flight's work in the new one.
 * role_move_ms gives it time to finish first. */
static bool gives_up(const struct bt_flight *f, const struct bt_peer_facts *p, bool prefill,
                     bool decode, uint64_t now_ns)
{
    uint64_t after_ns = f->sequence->r->mc->conf.role_move_ms * 1000000ull;
    return ((prefill && p->gives_up_prefill) || (decode && p->gives_up_decode)) &&
           now_ns - p->gives_up_ns >= after_ns;
}

/* Returns whether the plan needs a daemon that is leaving, or that gives up the role it has in the
 * plan. */
static bool needs_leaving(const struct bt_flight *f, uint64_t now_ns)
{
    const struct bt_peer *const all[] = {f->prefill, f->decode, f->kv_prefill, f->kv_decode};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (all[i] == NULL || !needed(f, all[i])) {
            continue;
        }
        struct bt_peer_facts p = bt_machine_facts(f->sequence->r->mc, all[i]);
        /* A worker for both is asked for its prefill role first, then for its decode role. */
        if (p.leaving || gives_up(f, &p, i == 0, i == 1, now_ns)) {
            return true;
        }
    }
    return false;
}

static void on_tick_running(struct bt_sequence *sq, const struct bt_sequence_input *in)
{
    if (past_deadline(sq->r, in->now_ns)) {
        return;
    }
    struct bt_flight *f = sq->flight;
    if (needs_leaving(f, in->now_ns)) {
        bt_sequence_move(sq, in->now_ns);
        if (sq->flight != f) {
            return;
        }
    }
    if (sq->r->spec.max_tokens == 0 && sq->r->prompt == NULL) { /* only numbers are missing */
        if (in->now_ns - sq->progress_ns > (uint64_t)sq->r->mc->conf.settle_ms * 1000000) {
            (void)has_all(sq, in->now_ns);
        }
        return;
    }
    struct bt_peer *p = bt_sequence_due(sq);
    if (bt_sequence_watch(sq, in->now_ns) || p == NULL) {
        return;
    }
    /* A request in a queue makes no progress, but its worker only hangs if it finishes nothing at
     * all. */
    uint64_t last = BT_MAX(sq->progress_ns, bt_machine_facts(sq->r->mc, p).output_ns);
    last = BT_MAX(last, sq->r->mc->awake_ns);
    double limit_ms = sq->r->mc->conf.stall_ms;
    if (sq->state == BT_SEQ_PREFILLING) {
        limit_ms += 2 * f->plan.first.ms;
    }
    if (in->now_ns > last && (double)(in->now_ns - last) / 1e6 > limit_ms) {
        bt_sequence_avoid(sq, p);
        char why[128];
        snprintf(why, sizeof(why), "%s has not finished anything for %.0f s", p->name,
                 (double)(in->now_ns - last) / 1e9);
        bt_sequence_replan(sq, p, why, in->now_ns);
    }
}

/* ---- the table ---- */

static const state_fn table[BT_SEQ_STATES][BT_EV_EVENTS] = {
#define BT_SEQUENCE_ROW(state, event, fn) [BT_SEQ_##state][BT_EV_##event] = fn,
#include "conductor/request/states.def"
#undef BT_SEQUENCE_ROW
};

void bt_sequence_event(struct bt_sequence *sq, bt_event_type_t ev,
                       const struct bt_sequence_input *in)
{
    BT_ASSERT(sq->state < BT_SEQ_STATES && ev < BT_EV_EVENTS);
    state_fn fn = table[sq->state][ev];
    if (fn != NULL) {
        fn(sq, in);
    }
}
