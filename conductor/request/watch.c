/* The watchdog of requests that workers have: one that nothing moves is planned again and, if that
 * does not help, fails. Lost sessions and workers that finish nothing at all are found elsewhere
 * (LOST, on_tick_running); this is for what a bug or a lost message leaves behind while its worker
 * serves others. Loop thread; reads the worker's last heartbeat. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/request_priv.h"

/* In units of conductor.stall_ms (10 s by default). A worker that says that it has no request at
 * all cannot move this one. The unit is far above the time that a message and the next heartbeat
 * take, and two of them let the check for hanging workers act first. */
#define IDLE_STALLS 2
/* A busy worker may have long queues. They are known: the plan predicted the time to first token,
 * so a request must be ten times as late as that, and ten minutes late beside it. */
#define BUSY_STALLS    60
#define BUSY_PREDICTED 10
#define FEW_PAGES      8 /* less than one of so many pages is free: rows wait for them */

struct bt_session *bt_lane_due(const struct bt_lane *k)
{
    const struct bt_flight *f = k->flight;
    if (k->state == LANE_PREFILLING || (!f->both && !f->got_first)) {
        return f->prefill_ended ? NULL : f->prefill;
    }
    return f->decode_ended ? NULL : f->decode;
}

/* Those of a higher class go first, for as long as there are any. */
static bool higher_class_works(const struct bt_session *s, int32_t class)
{
    for (uint32_t i = 0; i < s->said.classes.n; i++) {
        const struct bt_class *c = &s->said.classes.of[i];
        if (c->priority < class && (c->queue_ns > 0 || c->rows != 0 || c->waiting != 0)) {
            return true;
        }
    }
    return false;
}

/* A wait without a bound that a prediction could give: what runs late makes way for all others, and
 * rows wait for slots and pages until others have generated what they want. */
static bool may_wait(const struct bt_lane *k, const struct bt_session *s)
{
    const Baton__WorkerLoad *l = &s->load;
    int32_t class = bt_flight_class(k->flight);
    return class == BT_SCHED_CLASS_LATE || higher_class_works(s, class) || l->slots_free == 0 ||
           l->pages_free < l->pages_total / FEW_PAGES;
}

static const char *why_stuck(struct bt_lane *k, const struct bt_session *s, uint64_t now_ns)
{
    uint64_t stall_ns = (uint64_t)k->r->rs->conf.stall_ms * 1000000;
    uint64_t from_ns = BT_MAX(k->progress_ns, k->r->rs->awake_ns);
    if (s == NULL) {
        return now_ns > from_ns + IDLE_STALLS * stall_ns ? "no worker has it" : NULL;
    }
    if (s->load.running + s->load.waiting == 0) {
        return s->said.at_ns > from_ns + IDLE_STALLS * stall_ns
                   ? "its worker says that it has no request"
                   : NULL;
    }
    if (may_wait(k, s)) {
        k->excused_ns = now_ns;
    }
    double limit_ms = (double)BUSY_STALLS * k->r->rs->conf.stall_ms +
                      BUSY_PREDICTED * BT_MAX(k->flight->plan.ttft_ms, 0);
    from_ns = BT_MAX(k->progress_ns, k->excused_ns);
    return now_ns > from_ns && (double)(now_ns - from_ns) / 1e6 > limit_ms
               ? "its worker serves others but not it"
               : NULL;
}

/* What has not come, for the log. */
static void missing_text(const struct bt_lane *k, char *out, size_t cap)
{
    const struct bt_flight *f = k->flight;
    bool tokens = k->r->spec.max_tokens != 0;
    bool kv = tokens && !f->same_kv && !f->flow_done && !f->got_decode;
    snprintf(out, cap, "%s%s%s%s%s", bt_flight_reserved(f) ? "" : "reservation,",
             k->r->prompt != NULL ? "prompt_logprobs," : "",
             tokens && !f->got_first ? "first_token," : "", kv ? "kv," : "",
             f->decode_ended ? "" : "tokens,");
    size_t len = strlen(out);
    out[len != 0 ? len - 1 : 0] = '\0'; /* the last comma */
    if (len == 0) {
        snprintf(out, cap, "prefill_done");
    }
}

bool bt_lane_watch(struct bt_lane *k, uint64_t now_ns)
{
    struct bt_request *r = k->r;
    struct bt_session *s = bt_lane_due(k);
    const char *why = why_stuck(k, s, now_ns);
    if (why == NULL) {
        return false;
    }
    char missing[96], text[256];
    missing_text(k, missing, sizeof(missing));
    bt_metric_add(r->rs->m.stuck, 1);
    BT_ERROR("request_stuck",
             "req=%016" PRIx64 " epoch=%u state=%s missing=%s age_s=%.1f silent_s=%.1f tokens=%u "
             "prefill=%s decode=%s why=%s",
             k->id, k->epoch, bt_lane_state_name(k->state), missing,
             (double)(now_ns - r->spec.received_ns) / 1e9, (double)(now_ns - k->progress_ns) / 1e9,
             r->choices[k->first].journal.n, r->usage.prefill, r->usage.decode, why);
    if (k->stuck) {
        snprintf(text, sizeof(text),
                 "nothing came of this request for the second time, without any progress in "
                 "between: %s (%s is missing)",
                 why, missing);
        bt_request_fail(r, REJECT_FAILED, 500, 0, text);
        return true;
    }
    k->stuck = true;
    bt_lane_avoid(k, s);
    snprintf(text, sizeof(text), "it stood still: %s", why);
    bt_lane_replan(k, NULL, text, now_ns);
    return true;
}
