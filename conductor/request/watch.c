/* The watchdog for requests that a worker has but does not advance. The conductor plans such a
 * request again; if that does not help, the request fails. Other code finds lost sessions, and
 * workers that finish nothing at all (LOST, on_tick_running). This file finds requests that a bug
 * or a lost message leaves behind while the worker serves others. Pure; reads the worker's last
 * heartbeat. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/machine_priv.h"

/* In units of conductor.stall_ms (10 s by default). A worker that reports no requests cannot
 * advance this one. The unit is far longer than a message and the next heartbeat take. Two units
 * let the check for hanging workers act first. */
#define IDLE_STALLS 2
/* A busy worker may have long queues. The plan knew them when it predicted the time to first token.
 * So a request is stuck only when it is late by ten times that time and ten minutes more. */
#define BUSY_STALLS    60
#define BUSY_PREDICTED 10
#define FEW_PAGES      8 /* if less than this fraction of the pages is free, rows wait for pages */

struct bt_peer *bt_sequence_due(const struct bt_sequence *sq)
{
    const struct bt_flight *f = sq->flight;
    /* The prefill worker of a beam search sends no token. */
    bool search = sq->r->spec.beams.width > 0 && !f->both && f->prefill_ended;
    if (!search && (sq->state == BT_SEQ_PREFILLING || (!f->both && !f->got_first))) {
        return f->prefill_ended ? NULL : f->prefill;
    }
    return f->decode_ended ? NULL : f->decode;
}

/* Returns whether the worker has requests of a higher class, which go first. */
static bool higher_class_works(const struct bt_peer_facts *p, int32_t class)
{
    for (uint32_t i = 0; i < p->classes->n; i++) {
        const struct bt_class *c = &p->classes->of[i];
        if (c->priority < class && (c->queue_ns > 0 || c->rows != 0 || c->waiting != 0)) {
            return true;
        }
    }
    return false;
}

/* Returns whether the request may wait for a time that no prediction can limit. Late requests are
 * preempted for all others. Rows wait for slots and pages until others have ended. */
static bool may_wait(const struct bt_sequence *sq, const struct bt_peer_facts *p)
{
    int32_t class = bt_flight_class(sq->flight);
    return class == BT_SCHED_CLASS_LATE || higher_class_works(p, class) || p->slots_free == 0 ||
           p->pages_free < p->pages_total / FEW_PAGES;
}

static const char *why_stuck(struct bt_sequence *sq, const struct bt_peer_facts *p, uint64_t now_ns)
{
    uint64_t stall_ns = (uint64_t)sq->r->mc->conf.stall_ms * 1000000;
    uint64_t from_ns = BT_MAX(sq->progress_ns, sq->r->mc->awake_ns);
    if (p == NULL) {
        return now_ns > from_ns + IDLE_STALLS * stall_ns ? "no worker has the request" : NULL;
    }
    if (p->running + p->waiting == 0) {
        return p->load_ns > from_ns + IDLE_STALLS * stall_ns
                   ? "its worker reports no running or waiting request"
                   : NULL;
    }
    if (may_wait(sq, p)) {
        sq->excused_ns = now_ns;
    }
    double limit_ms = (double)BUSY_STALLS * sq->r->mc->conf.stall_ms +
                      BUSY_PREDICTED * BT_MAX(sq->flight->plan.first.ms, 0);
    from_ns = BT_MAX(sq->progress_ns, sq->excused_ns);
    return now_ns > from_ns && (double)(now_ns - from_ns) / 1e6 > limit_ms
               ? "its worker serves other requests but not this one"
               : NULL;
}

/* Writes, for the log, which messages have not arrived. */
static void missing_text(const struct bt_sequence *sq, char *out, size_t cap)
{
    const struct bt_flight *f = sq->flight;
    bool tokens = sq->r->spec.max_tokens != 0;
    bool kv = tokens && !f->same_kv && !f->flow_done && !f->got_decode;
    snprintf(out, cap, "%s%s%s%s%s", bt_flight_reserved(f) ? "" : "reservation,",
             sq->r->prompt != NULL ? "prompt_logprobs," : "",
             tokens && !f->got_first ? "first_token," : "", kv ? "kv," : "",
             f->decode_ended ? "" : "tokens,");
    size_t len = strlen(out);
    out[len != 0 ? len - 1 : 0] = '\0'; /* the last comma */
    if (len == 0) {
        snprintf(out, cap, "prefill_done");
    }
}

bool bt_sequence_watch(struct bt_sequence *sq, uint64_t now_ns)
{
    struct bt_request *r = sq->r;
    struct bt_peer *p = bt_sequence_due(sq);
    struct bt_peer_facts facts;
    if (p != NULL) {
        facts = bt_machine_facts(r->mc, p);
    }
    const char *why = why_stuck(sq, p != NULL ? &facts : NULL, now_ns);
    if (why == NULL) {
        return false;
    }
    char missing[96], text[256];
    missing_text(sq, missing, sizeof(missing));
    bt_metric_add(r->mc->m.stuck, 1);
    BT_ERROR("request_stuck",
             "req=%016" PRIx64 " epoch=%u state=%s missing=%s age_s=%.1f silent_s=%.1f tokens=%u "
             "prefill=%s decode=%s why=%s",
             sq->id, sq->epoch, bt_sequence_state_name(sq->state), missing,
             (double)(now_ns - r->spec.received_ns) / 1e9, (double)(now_ns - sq->progress_ns) / 1e9,
             r->choices[sq->first].journal.n, r->usage.prefill, r->usage.decode, why);
    if (sq->stuck) {
        snprintf(text, sizeof(text),
                 "the request made no progress in two attempts in a row: %s; still missing: %s",
                 why, missing);
        bt_request_fail(r, BT_REJECT_FAILED, 500, 0, text);
        return true;
    }
    sq->stuck = true;
    bt_sequence_avoid(sq, p);
    snprintf(text, sizeof(text), "the request made no progress: %s", why);
    bt_sequence_replan(sq, NULL, text, now_ns);
    return true;
}
