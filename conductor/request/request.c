/* What the client of a request receives: tokens, which pass through the journals and become text,
 * the end of each choice, usage, errors. Pure: callbacks are actions, which run after the event. */
#include <inttypes.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/machine_priv.h"

/* In the fair share between tenants, a generated token counts as this many prompt tokens
 * (share.h). */
#define GENERATED_WEIGHT 2

static const char *log_id(const struct bt_request *r)
{
    return r->spec.id != NULL ? r->spec.id : "";
}

static uint64_t wire_id(const struct bt_request *r)
{
    return BT_CONTAINER_OF(r->sequences.next, struct bt_sequence, link)->id;
}

static uint32_t tokens_of(const struct bt_request *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->spec.n; i++) {
        n += r->choices[i].journal.n;
    }
    return n;
}

/* ---- the end ---- */

/* The phases of a request that has a first token, as vLLM divides them. */
static void observe_times(const struct bt_request *r)
{
    const struct bt_machine_metrics *m = &r->mc->m;
    double first = (double)(r->first_ns - r->spec.received_ns) / 1e9;
    double prefill = BT_MAX(first - BT_MAX(r->usage.queue_ms, 0.0) / 1e3, 0.0);
    double decode = (double)(r->last_ns - r->first_ns) / 1e9;
    bt_metric_observe(m->prefill, prefill);
    bt_metric_observe(m->decode, decode);
    bt_metric_observe(m->inference, prefill + decode);
}

static void observe_lengths(const struct bt_request *r)
{
    const struct bt_machine_metrics *m = &r->mc->m;
    uint32_t longest = 0;
    for (uint32_t i = 0; i < r->spec.n; i++) {
        longest = BT_MAX(longest, r->choices[i].journal.n);
    }
    bt_metric_observe(m->prompt_length, (double)r->spec.prompt.n);
    bt_metric_observe(m->answer_length, tokens_of(r));
    bt_metric_observe(m->longest_answer, longest);
    bt_metric_observe(m->max_tokens, r->spec.max_tokens);
    bt_metric_observe(m->choices, r->spec.n);
}

static void observe_end(struct bt_request *r, int success, uint64_t now_ns)
{
    bt_metric_add(r->mc->m.finished[success], 1);
    bt_metric_observe(r->mc->m.e2e, (double)(now_ns - r->spec.received_ns) / 1e9);
    if (r->first_ns != 0) {
        observe_times(r);
        observe_lengths(r);
    }
}

bool bt_request_in_time(const struct bt_request *r)
{
    const struct bt_sched_params *p = &r->mc->conf.sched;
    double ttft_ms = bt_request_objective(r->spec.slo_ttft_ms, p->objective.ttft_ms);
    double tbt_ms = bt_request_objective(r->spec.slo_tbt_ms, p->objective.tbt_ms);
    return (ttft_ms == 0 || r->usage.ttft_ms <= ttft_ms) &&
           (tbt_ms == 0 || r->usage.tbt_ms <= tbt_ms);
}

/* Adds a request that has ended well to the counts since the start. */
static void count_done(const struct bt_request *r)
{
    struct bt_requests_stats *s = &r->mc->done;
    bool in_time = bt_request_in_time(r);
    s->finished++;
    s->in_time += in_time;
    s->ttft_ms += BT_MAX(r->usage.ttft_ms, 0.0);
    s->tbt_ms += BT_MAX(r->usage.tbt_ms, 0.0);
    bt_metric_add(r->mc->m.in_time, in_time);
}

/* Ends all sequences. The request then only waits for their workers to end. */
static void end_sequences(struct bt_request *r, uint64_t now_ns)
{
    struct bt_list *l;
    bt_list_for_each (l, &r->sequences) {
        bt_sequence_finishing(BT_CONTAINER_OF(l, struct bt_sequence, link), true, now_ns);
    }
    bt_queue_uncount(r);
}

/* Fills in the figures that are known at the request's end. */
static void fill_usage(struct bt_request *r)
{
    struct bt_gen_usage *u = &r->usage;
    u->prompt_tokens = (uint32_t)r->spec.prompt.n;
    u->completion_tokens = tokens_of(r);
    u->predicted_tokens = u->accepted_tokens = 0;
    for (uint32_t i = 0; i < r->spec.n && r->spec.prediction.n > 0; i++) {
        u->predicted_tokens += (uint32_t)r->spec.prediction.n;
        u->accepted_tokens += r->choices[i].predict.accepted;
    }
    if (r->first_ns == 0) {
        return;
    }
    u->ttft_ms = (double)(r->first_ns - r->spec.received_ns) / 1e6;
    u->decode_ms = (double)(r->last_ns - r->first_ns) / 1e6;
    /* The share of the transfer's time that lay before the end of the computing. */
    if (r->flow_first_ns != 0 && r->flow_last_ns > r->flow_first_ns && r->last_compute_ns != 0) {
        double all = (double)(r->flow_last_ns - r->flow_first_ns);
        double late = r->flow_last_ns > r->last_compute_ns
                          ? (double)(r->flow_last_ns - r->last_compute_ns)
                          : 0;
        u->hidden_fraction = late < all ? 1 - late / all : 0;
    }
}

void bt_request_fail(struct bt_request *r, int reject, int http, uint32_t retry_after_s,
                     const char *why)
{
    uint64_t now = r->mc->now_ns;
    /* Under overload most answers are refusals. Metrics count them by reason, so the log need
     * not. */
    bt_log_level_t level = http == 429 ? BT_LOG_DEBUG : BT_LOG_WARN;
    if (bt_log_enabled(level)) {
        bt_log(level, "request_failed", "req=%016" PRIx64 " id=%s http=%d tokens=%u why=%s",
               wire_id(r), log_id(r), http, tokens_of(r), why);
    }
    bt_metric_add(r->mc->m.rejected[reject], 1);
    r->mc->done.failed += http != 429;
    observe_end(r, BT_SUCCESS_ERROR, now);
    fill_usage(r);
    bt_explain_outcome(r, why);
    end_sequences(r, now);
    struct bt_action *a = bt_action_client(r, BT_ACT_CLIENT_ERROR);
    if (a != NULL) {
        a->error.http = http;
        a->error.retry_after_s = retry_after_s;
        a->error.text_at = bt_action_text(r->mc, why);
        r->ended = true;
    }
    bt_record_end(r, BT_SUCCESS_ERROR, http, why, now);
}

const struct bt_gen_usage *bt_request_usage(const struct bt_request *r)
{
    return &r->usage;
}

void bt_machine_cancel(struct bt_machine *mc, struct bt_request *r, uint64_t now_ns)
{
    mc->now_ns = now_ns;
    r->ops = NULL;
    if (r->ended) {
        return; /* the client's last callback is already made */
    }
    r->ended = true;
    observe_end(r, BT_SUCCESS_ABORT, now_ns);
    fill_usage(r);
    bt_explain_outcome(r, "cancelled by its client");
    BT_INFO("request_cancelled", "req=%016" PRIx64 " id=%s tokens=%u", wire_id(r), log_id(r),
            tokens_of(r));
    end_sequences(r, now_ns);
    bt_record_end(r, BT_SUCCESS_ABORT, 0, "cancelled by its client", now_ns);
}

void bt_request_settled(struct bt_request *r, uint64_t now_ns)
{
    struct bt_list *l;
    bt_list_for_each (l, &r->sequences) {
        if (BT_CONTAINER_OF(l, struct bt_sequence, link)->state != BT_SEQ_FINISHING) {
            return;
        }
    }
    if (bt_action_client(r, BT_ACT_CLIENT_DONE) == NULL) {
        return;
    }
    r->ended = true;
    struct bt_gen_usage *u = &r->usage;
    fill_usage(r);
    bt_explain_outcome(r, NULL);
    observe_end(r, r->success, now_ns);
    count_done(r);
    bt_metric_add(r->mc->m.cached, u->cached_tokens);
    BT_INFO("request_done",
            "req=%016" PRIx64 " id=%s n=%u prompt=%u completion=%u cached=%u ttft_ms=%.1f "
            "decode_ms=%.1f replans=%u prefill=%s decode=%s",
            wire_id(r), log_id(r), r->spec.n, u->prompt_tokens, u->completion_tokens,
            u->cached_tokens, u->ttft_ms, u->decode_ms, u->replans, u->prefill, u->decode);
    bt_record_end(r, r->success, 0, NULL, now_ns);
}

/* All tokens of a choice are delivered. by_worker: the worker stops here without a Cancel. */
static void finish(struct bt_sequence *sq, uint32_t choice, bt_finish_t reason,
                   const char *stop_string, bool by_worker, uint64_t now_ns)
{
    struct bt_request *r = sq->r;
    r->choices[choice].finished = true;
    bt_outcome_choice(sq, choice);
    bt_expect_choice_over(r, choice, reason == BT_FINISH_STOP);
    r->success = reason == BT_FINISH_STOP ? BT_SUCCESS_STOP : BT_SUCCESS_LENGTH;
    if (--r->n_unfinished == 0) {
        bt_queue_uncount(r);
    }
    struct bt_action *a = bt_action_client(r, BT_ACT_CLIENT_FINISH);
    if (a != NULL) {
        a->finish.choice = choice;
        a->finish.reason = reason;
        a->finish.stop_string = stop_string;
    }
    bt_sequence_choice_finished(sq, choice, by_worker, now_ns);
}

/* ---- tokens ---- */

static void observe_token(struct bt_sequence *sq, struct bt_choice *c, uint64_t now_ns)
{
    struct bt_request *r = sq->r;
    struct bt_machine *mc = r->mc;
    bt_metric_add(mc->m.generation, 1);
    bt_sched_fair_serve(&mc->queues.fair, r->tenant, GENERATED_WEIGHT, r->spec.weight);
    if (r->first_ns == 0) {
        r->first_ns = now_ns;
        bt_outcome_first_token(sq, now_ns);
        bt_metric_observe(mc->m.ttft, (double)(now_ns - r->spec.received_ns) / 1e9);
        bt_metric_add(mc->m.prompt, r->spec.prompt.n);
    }
    /* Answers of a beam search come whole: their gaps say nothing. */
    if (c->last_ns != 0 && r->spec.beams.width == 0) {
        bt_metric_observe(mc->m.itl, (double)(now_ns - c->last_ns) / 1e9);
        bt_metric_observe(mc->m.tpot, (double)(now_ns - c->last_ns) / 1e9);
        bt_outcome_gap(c, now_ns);
    }
    r->last_ns = c->last_ns = now_ns;
    bt_record_token(sq, now_ns);
}

/* Gives the client the token that the journal has just passed on. */
static void deliver(struct bt_sequence *sq, uint32_t choice, const struct bt_journal_entry *e,
                    uint64_t now_ns)
{
    struct bt_request *r = sq->r;
    struct bt_choice *c = &r->choices[choice];
    observe_token(sq, c, now_ns);
    bool look = c->journal.n > r->spec.sampling.min_new;
    if (r->spec.prediction.n > 0) {
        bt_spec_predict_take(&c->predict, r->spec.prediction.ids, (uint32_t)r->spec.prediction.n,
                             e->token);
    }
    bool by_id = e->finish == BT_TOKEN_STOP;
    bool by_length = e->finish == BT_TOKEN_LENGTH || c->journal.n >= r->spec.max_tokens;
    struct bt_buf *text = &r->mc->actions.text;
    size_t text_at = text->len;
    const char *stop = NULL;
    struct bt_gen_token t = {.id = e->token,
                             .logprob = e->logprob,
                             .n_top = e->n_top,
                             .top_id = e->top_id,
                             .top_logprob = e->top_logprob};
    bt_status_t st = bt_emit_token(&c->emit, e->token, by_id, look, text, &t.text_offset, &stop);
    BT_ASSERT(st == BT_OK); /* tokens outside the vocabulary do not get into the journal */
    if (stop == NULL && (by_id || by_length)) {
        bt_emit_end(&c->emit, look, text, &stop);
    }
    struct bt_action *a = bt_action_client(r, BT_ACT_CLIENT_DELTA);
    if (a != NULL) {
        a->delta.t = t;
        a->delta.text_at = text_at;
        a->delta.d =
            (struct bt_gen_delta){.choice = choice, .text_len = text->len - text_at, .n_tokens = 1};
    }
    if (stop != NULL || by_id) {
        finish(sq, choice, BT_FINISH_STOP, stop, by_id || by_length, now_ns);
    } else if (by_length) {
        finish(sq, choice, BT_FINISH_LENGTH, NULL, true, now_ns);
    }
}

/* Gives the client the prompt's logprobs. True: the client has them, or did not ask for them. */
static bool give_prompt(struct bt_request *r)
{
    struct bt_prompt *p = r->prompt;
    if (p == NULL) {
        return true;
    }
    if (!bt_prompt_complete(p)) {
        return false;
    }
    r->prompt = NULL;
    struct bt_action *a = bt_action_client(r, BT_ACT_CLIENT_PROMPT);
    if (a != NULL) {
        a->prompt.tokens = p;
    } else {
        bt_prompt_destroy(p);
    }
    return true;
}

void bt_request_no_tokens(struct bt_sequence *sq, uint64_t now_ns)
{
    struct bt_request *r = sq->r;
    if (!give_prompt(r)) {
        return;
    }
    r->first_ns = r->last_ns = now_ns;
    bt_metric_observe(r->mc->m.ttft, (double)(now_ns - r->spec.received_ns) / 1e9);
    bt_metric_add(r->mc->m.prompt, r->spec.prompt.n);
    for (uint32_t i = 0; i < r->spec.n; i++) {
        finish(sq, i, BT_FINISH_LENGTH, NULL, true, now_ns);
    }
}

void bt_request_deliver(struct bt_sequence *sq, uint32_t choice, uint64_t now_ns)
{
    struct bt_choice *c = &sq->r->choices[choice];
    if (!give_prompt(sq->r)) {
        return;
    }
    const struct bt_journal_entry *next;
    while (!c->finished && (next = bt_journal_take(&c->journal)) != NULL) {
        if (sq->state == BT_SEQ_PREFILLING) {
            bt_sequence_set_state(sq, BT_SEQ_DECODING);
        }
        deliver(sq, choice, next, now_ns);
    }
}

bt_status_t bt_request_put(struct bt_request *r, const struct bt_event *ev)
{
    struct bt_choice *c = &r->choices[ev->token.choice];
    if (c->finished) {
        return BT_OK; /* the token is behind the stop string: it is neither delivered nor billed */
    }
    if (ev->token.at->token >= bt_tokenizer_vocab(r->mc->tok)) {
        return BT_ERR_INVALID;
    }
    bt_status_t st = bt_journal_put(&c->journal, ev->token.offset, ev->token.at);
    bool other = st == BT_ERR_EXISTS && r->spec.beams.width > 0 &&
                 ev->token.offset < c->journal.n &&
                 c->journal.tokens[ev->token.offset] != ev->token.at->token;
    return other ? BT_ERR_MISMATCH : st;
}

/* ---- numbers ---- */

void bt_request_prefill_done(struct bt_request *r, const struct bt_event *ev, uint64_t now_ns)
{
    r->last_compute_ns = ev->prefill_done.last_compute_ns;
    if (r->have_prefill_done) {
        /* in later plans, the cached tokens include those that the first plan has computed */
        return;
    }
    r->have_prefill_done = true;
    r->usage.cached_tokens = BT_MIN(ev->prefill_done.cached_tokens, (uint32_t)r->spec.prompt.n);
    /* A worker's clock may be wrong: no part of a request may be longer than the request. */
    double life_ms = (double)(now_ns - r->spec.received_ns) / 1e6;
    if (ev->prefill_done.start_ns != 0 &&
        ev->prefill_done.last_compute_ns >= ev->prefill_done.start_ns) {
        double ms = (double)(ev->prefill_done.last_compute_ns - ev->prefill_done.start_ns) / 1e6;
        r->usage.prefill_ms = BT_MIN(ms, life_ms);
    }
    uint64_t received_wall_ns = bt_machine_wall_ns(r->mc) - (now_ns - r->spec.received_ns);
    if (ev->prefill_done.start_ns > received_wall_ns) {
        double ms = (double)(ev->prefill_done.start_ns - received_wall_ns) / 1e6;
        r->usage.queue_ms = BT_MIN(ms, life_ms);
    }
    bt_metric_observe(r->mc->m.queue, BT_MAX(r->usage.queue_ms, 0.0) / 1e3);
}

void bt_request_flow_done(struct bt_request *r, const struct bt_event *ev)
{
    r->usage.kv_bytes += ev->flow_done.bytes;
    r->usage.kv_segments += ev->flow_done.segments;
    r->flow_first_ns = ev->flow_done.first_ns;
    r->flow_last_ns = ev->flow_done.last_ns;
}

const struct bt_gen_ops *bt_request_client(struct bt_request *r, void **arg_p, bool last)
{
    const struct bt_gen_ops *ops = r->ops;
    *arg_p = r->arg;
    r->ops = last ? NULL : ops;
    return ops;
}

const struct bt_gen_spec *bt_request_spec(const struct bt_request *r)
{
    return &r->spec;
}

const struct bt_kv_key *bt_request_root(const struct bt_request *r)
{
    return &r->root;
}

void *bt_request_env(const struct bt_request *r)
{
    return r->mc->env_arg;
}
