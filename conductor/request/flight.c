/* A flight: one plan that was submitted. This file is the one place that sends Cancel and Release,
 * so that every (request, epoch) ever submitted is taken back exactly once, whatever order the
 * messages cross in. Loop thread. */
#include <inttypes.h>
#include <stdlib.h>

#include "common/log/log.h"
#include "conductor/request/request_priv.h"

/* A request that finished by itself: how long its workers may take to end before they are told. */
#define SOFT_NS 2000000000ull

struct bt_flight *bt_flight_create(struct bt_lane *k)
{
    struct bt_flight *f = bt_calloc(1, sizeof(*f));
    f->lane = k;
    f->epoch = k->epoch;
    bt_list_init(&f->prompt.link);
    for (size_t i = 0; i < BT_ARRAY_LEN(f->uses); i++) {
        bt_list_init(&f->uses[i].link);
        f->uses[i].f = f;
    }
    bt_list_insert_tail(&k->flights, &f->link);
    return f;
}

/* The session, or all of them (NULL), knows nothing of the flight any more. */
static void forget_uses(struct bt_flight *f, const struct bt_session *of)
{
    const struct bt_session *const all[] = {f->prefill, f->decode, f->kv_prefill, f->kv_decode};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (of == NULL || all[i] == of) {
            bt_list_remove(&f->uses[i].link);
        }
    }
}

void bt_flight_count(struct bt_flight *f, uint64_t now_ns)
{
    struct bt_session *const all[] = {f->prefill, f->decode, f->kv_prefill, f->kv_decode};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (all[i] != NULL) {
            bt_list_insert_tail(&all[i]->own_flights, &f->uses[i].link);
        }
    }
    struct bt_sched_pace pace = bt_session_pace(f->prefill);
    f->prefill->own.prefill_tokens += f->own_tokens;
    f->prompt.pos = BT_MIN(f->plan.cached_tokens, f->lane->n_tokens);
    f->prompt.len = f->lane->n_tokens;
    f->prompt.alone_ms = f->plan.prefill_ms;
    f->prompt.priority = bt_flight_class(f);
    bt_sched_own_prompt(&f->prefill->own, &f->prompt, &pace, now_ns);
    if (f->decode != NULL) {
        f->decode->own.rows += f->own_rows;
        f->decode->own.kv_tokens += f->own_kv;
        if (f->plan.background) {
            f->decode->own.late += f->own_rows;
            f->decode->own.late_kv += f->own_kv;
            f->late_coming = true;
        }
        bt_classes_join(&f->decode->own.classes, f->prompt.priority)->rows += f->own_rows;
    }
}

static void leave_queue(struct bt_flight *f)
{
    if (!bt_list_empty(&f->prompt.link)) {
        struct bt_sched_pace pace = bt_session_pace(f->prefill);
        bt_sched_own_prompt_done(&f->prefill->own, &f->prompt, &pace, bt_mono_ns());
    }
}

void bt_flight_prefilled(struct bt_flight *f)
{
    if (f->prefill != NULL) {
        f->prefill->own.prefill_tokens -= BT_MIN(f->own_tokens, f->prefill->own.prefill_tokens);
        leave_queue(f);
    }
    f->own_tokens = 0;
}

void bt_flight_late_over(struct bt_flight *f)
{
    if (f->late_coming && f->decode != NULL) {
        f->decode->own.late -= BT_MIN(f->own_rows, f->decode->own.late);
        f->decode->own.late_kv -= BT_MIN(f->own_kv, f->decode->own.late_kv);
        f->late_coming = false;
    }
}

static void decode_over(struct bt_flight *f)
{
    bt_flight_late_over(f);
    if (!f->decode_ended && f->decode != NULL) {
        f->decode->own.rows -= BT_MIN(f->own_rows, f->decode->own.rows);
        f->decode->own.kv_tokens -= BT_MIN(f->own_kv, f->decode->own.kv_tokens);
        bt_classes_at(&f->decode->own.classes, f->prompt.priority)->rows -= f->own_rows;
        bt_classes_leave(&f->decode->own.classes, f->prompt.priority);
        if (f->decoding) {
            f->decode->own.decoding -= BT_MIN(f->own_rows, f->decode->own.decoding);
            f->decode->own.decoding_kv -= BT_MIN(f->own_kv, f->decode->own.decoding_kv);
        }
    }
    f->decoding = false;
    f->decode_ended = true;
}

static void prefill_over(struct bt_flight *f)
{
    bt_flight_prefilled(f);
    f->prefill_ended = true;
}

void bt_flight_destroy(struct bt_flight *f)
{
    prefill_over(f);
    decode_over(f);
    forget_uses(f, NULL);
    bt_list_remove(&f->link);
    if (f->lane->flight == f) {
        f->lane->flight = NULL;
    }
    free(f);
}

static void cancel(struct bt_flight *f, struct bt_session *s, bool ended, bool *cancelled)
{
    if (s == NULL || ended || *cancelled) {
        return;
    }
    *cancelled = true;
    Baton__Cancel c = BATON__CANCEL__INIT;
    c.request = f->lane->id;
    c.epoch = f->epoch;
    Baton__ToWorker m = BATON__TO_WORKER__INIT;
    m.m_case = BATON__TO_WORKER__M_CANCEL;
    m.cancel = &c;
    /* A session that takes nothing more breaks, which ends the request there as well. */
    (void)bt_session_send_worker(s, &m);
}

void bt_flight_cancel_choice(struct bt_flight *f, uint32_t choice)
{
    if (f->decode == NULL || f->decode_ended || f->decode_cancelled) {
        return;
    }
    Baton__Cancel c = BATON__CANCEL__INIT;
    c.request = f->lane->id;
    c.epoch = f->epoch;
    c.one_choice = true;
    c.choice = choice;
    Baton__ToWorker m = BATON__TO_WORKER__INIT;
    m.m_case = BATON__TO_WORKER__M_CANCEL;
    m.cancel = &c;
    (void)bt_session_send_worker(f->decode, &m);
}

static void release(struct bt_flight *f, struct bt_session *kv, bool *released)
{
    if (*released) {
        return;
    }
    *released = true;
    if (kv == NULL) {
        return; /* its session broke: that has released everything */
    }
    Baton__Release rel = BATON__RELEASE__INIT;
    rel.request = f->lane->id;
    rel.epoch = f->epoch;
    Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
    m.m_case = BATON__TO_KVSTORE__M_RELEASE;
    m.release = &rel;
    (void)bt_session_send_kvstore(kv, &m);
    if (!f->no_room) {
        bt_requests_room(f->lane->r->rs);
    }
}

void bt_flight_wind(struct bt_flight *f, bool hard, uint64_t now_ns)
{
    if (f->wind == FLIGHT_ACTIVE) {
        f->wind_ns = now_ns;
        bt_expect_settled(f, now_ns);
    }
    if (hard) {
        f->wind = FLIGHT_HARD;
    } else if (f->wind == FLIGHT_ACTIVE) {
        f->wind = FLIGHT_SOFT;
    }
    bt_flight_step(f, now_ns);
}

bool bt_flight_uses(const struct bt_flight *f, const struct bt_session *s)
{
    return s == f->prefill || s == f->decode || s == f->kv_prefill || s == f->kv_decode;
}

void bt_flight_lose(struct bt_flight *f, const struct bt_session *s)
{
    if (s == f->prefill) {
        prefill_over(f);
    }
    if (s == f->decode) {
        decode_over(f);
    }
    forget_uses(f, s);
    f->prefill = s == f->prefill ? NULL : f->prefill;
    f->decode = s == f->decode ? NULL : f->decode;
    f->kv_prefill = s == f->kv_prefill ? NULL : f->kv_prefill;
    f->kv_decode = s == f->kv_decode ? NULL : f->kv_decode;
}

void bt_flight_received(struct bt_flight *f, const struct bt_session *s)
{
    if (s == f->prefill && !f->prefill_ended) {
        f->working[0] = s->member->incarnation;
    } else if (s == f->decode && !f->decode_ended) {
        f->working[1] = s->member->incarnation;
    }
}

bool bt_flight_works_on(const struct bt_flight *f, const struct bt_session *s)
{
    return s->member->incarnation == f->working[0] || s->member->incarnation == f->working[1];
}

void bt_flight_ended(struct bt_flight *f, const struct bt_session *s)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(f->working); i++) {
        if (f->working[i] == s->member->incarnation) {
            f->working[i] = 0;
        }
    }
    if (!f->no_room) {
        bt_requests_room(f->lane->r->rs);
    }
    if (s == f->prefill) {
        prefill_over(f);
    }
    if (s == f->decode) {
        decode_over(f);
    }
}

bool bt_flight_over(const struct bt_flight *f)
{
    return f->wind != FLIGHT_ACTIVE && f->prefill_ended && f->decode_ended && f->prefill_released &&
           f->decode_released;
}

static void step_releases(struct bt_flight *f)
{
    if (f->same_kv) {
        if (f->prefill_ended && f->decode_ended) {
            release(f, f->kv_prefill, &f->prefill_released);
            f->decode_released = true;
        }
        return;
    }
    if (f->prefill_ended && (f->flow_done || f->decode_ended)) {
        release(f, f->kv_prefill, &f->prefill_released);
    }
    if (f->decode_ended) {
        release(f, f->kv_decode, &f->decode_released);
    }
}

void bt_flight_step(struct bt_flight *f, uint64_t now_ns)
{
    if (f->wind == FLIGHT_ACTIVE) {
        /* All has landed at the decode side: the prefill side need not hold its slots for the
         * whole generation. */
        if (!f->same_kv && f->prefill_ended && f->flow_done) {
            release(f, f->kv_prefill, &f->prefill_released);
        }
        return;
    }
    if (f->wind == FLIGHT_SOFT) {
        if (f->decode_useless) {
            cancel(f, f->decode, f->decode_ended, &f->decode_cancelled);
        }
        step_releases(f);
        if (now_ns - f->wind_ns > SOFT_NS) {
            f->wind = FLIGHT_HARD;
        }
    }
    if (f->wind == FLIGHT_HARD) {
        if (!f->both) {
            cancel(f, f->prefill, f->prefill_ended, &f->prefill_cancelled);
        }
        cancel(f, f->decode, f->decode_ended, &f->decode_cancelled);
        release(f, f->kv_prefill, &f->prefill_released);
        if (!f->same_kv) {
            release(f, f->kv_decode, &f->decode_released);
        }
        f->decode_released = true;
    }
    if (bt_flight_over(f)) {
        return;
    }
    uint64_t bound_ns = (uint64_t)f->lane->r->rs->conf.ended_ms * 1000000;
    if (f->wind == FLIGHT_HARD && now_ns - f->wind_ns > bound_ns) {
        bt_metric_add(f->lane->r->rs->m.ended_late, 1);
        BT_WARN("request_never_ended", "req=%016" PRIx64 " epoch=%u prefill=%s decode=%s",
                f->lane->id, f->epoch,
                f->prefill != NULL && !f->prefill_ended ? f->prefill->member->name : "-",
                f->decode != NULL && !f->decode_ended ? f->decode->member->name : "-");
        prefill_over(f);
        decode_over(f);
    }
}
