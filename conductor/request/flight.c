/* A flight: one plan that was submitted. Only this file asks for Cancel and Release, so that every
 * (request, epoch) is released exactly once, in whatever order messages arrive. Only this file
 * writes what peers have of this conductor (own_*, peer.h). Pure. */
#include <inttypes.h>
#include <stdlib.h>

#include "common/log/log.h"
#include "conductor/request/machine_priv.h"

/* How long workers may take to end a request that finished normally, before they get a Cancel. */
#define SOFT_NS 2000000000ull

struct bt_flight *bt_flight_create(struct bt_sequence *sq)
{
    struct bt_flight *f = bt_calloc(1, sizeof(*f));
    f->sequence = sq;
    f->epoch = sq->epoch;
    bt_list_init(&f->prompt.link);
    for (size_t i = 0; i < BT_ARRAY_LEN(f->uses); i++) {
        bt_list_init(&f->uses[i].link);
        f->uses[i].f = f;
    }
    bt_list_insert_tail(&sq->flights, &f->link);
    return f;
}

static struct bt_sched_pace pace_of(const struct bt_flight *f)
{
    return bt_machine_facts(f->sequence->r->mc, f->prefill).pace;
}

/* Checks that the counts are exact: a peer without flights has nothing of this conductor. */
static void check_nothing_left(const struct bt_peer *p)
{
    BT_ASSERT(p->own.rows == 0 && p->own.decoding == 0 && p->own.late == 0);
    BT_ASSERT(p->own.prefill_tokens == 0 && p->own.kv_tokens == 0);
    BT_ASSERT(p->own.decoding_kv == 0 && p->own.late_kv == 0);
    BT_ASSERT(bt_list_empty(&p->own.backlog.prompts));
}

/* Removes the flight from this peer's flights, or from those of all its peers (NULL). */
static void forget_uses(struct bt_flight *f, const struct bt_peer *of)
{
    struct bt_peer *const all[] = {f->prefill, f->decode, f->kv_prefill, f->kv_decode};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (all[i] == NULL || (of != NULL && all[i] != of)) {
            continue;
        }
        bt_list_remove(&f->uses[i].link);
        if (bt_list_empty(&all[i]->own_flights)) {
            bt_list_remove(&all[i]->own_lost);
            check_nothing_left(all[i]);
        }
    }
}

void bt_flight_count(struct bt_flight *f, uint64_t now_ns)
{
    struct bt_peer *const all[] = {f->prefill, f->decode, f->kv_prefill, f->kv_decode};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (all[i] != NULL) {
            bt_list_insert_tail(&all[i]->own_flights, &f->uses[i].link);
        }
    }
    struct bt_sched_pace pace = pace_of(f);
    f->prefill->own.prefill_tokens += f->own_tokens;
    f->prompt.pos = BT_MIN(f->plan.prefix.cached_tokens, f->sequence->n_tokens);
    f->prompt.len = f->sequence->n_tokens;
    f->prompt.alone_ms = f->plan.takes.alone_ms;
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
        struct bt_sched_pace pace = pace_of(f);
        bt_sched_own_prompt_done(&f->prefill->own, &f->prompt, &pace, f->sequence->r->mc->now_ns);
    }
}

void bt_flight_prefilled(struct bt_flight *f)
{
    if (f->prefill != NULL) {
        f->prefill->own.prefill_tokens -= f->own_tokens;
        leave_queue(f);
    }
    f->own_tokens = 0;
}

void bt_flight_late_over(struct bt_flight *f)
{
    if (f->late_coming && f->decode != NULL) {
        f->decode->own.late -= f->own_rows;
        f->decode->own.late_kv -= f->own_kv;
        f->late_coming = false;
    }
}

static void decode_over(struct bt_flight *f)
{
    bt_flight_late_over(f);
    if (!f->decode_ended && f->decode != NULL) {
        f->decode->own.rows -= f->own_rows;
        f->decode->own.kv_tokens -= f->own_kv;
        bt_classes_at(&f->decode->own.classes, f->prompt.priority)->rows -= f->own_rows;
        bt_classes_leave(&f->decode->own.classes, f->prompt.priority);
        if (f->decoding) {
            f->decode->own.decoding -= f->own_rows;
            f->decode->own.decoding_kv -= f->own_kv;
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
    if (f->sequence->flight == f) {
        f->sequence->flight = NULL;
    }
    free(f);
}

static struct bt_action *tell(const struct bt_flight *f, bt_action_type_t type, struct bt_peer *to)
{
    struct bt_action *a = bt_action_add(f->sequence->r->mc, type);
    a->to = to;
    a->id = f->sequence->id;
    a->epoch = f->epoch;
    return a;
}

static void cancel(struct bt_flight *f, struct bt_peer *p, bool ended, bool *cancelled)
{
    if (p != NULL && !ended && !*cancelled) {
        *cancelled = true;
        (void)tell(f, BT_ACT_CANCEL, p);
    }
}

void bt_flight_cancel_choice(struct bt_flight *f, uint32_t choice)
{
    if (f->decode != NULL && !f->decode_ended && !f->decode_cancelled) {
        struct bt_action *a = tell(f, BT_ACT_CANCEL, f->decode);
        a->cancel.one_choice = true;
        a->cancel.choice = choice;
    }
}

static void release(struct bt_flight *f, struct bt_peer *kv, bool *released)
{
    if (*released) {
        return;
    }
    *released = true;
    if (kv == NULL) {
        return; /* its session broke, which released everything */
    }
    (void)tell(f, BT_ACT_RELEASE, kv);
    if (!f->no_room) {
        bt_queue_room(f->sequence->r->mc);
    }
}

void bt_flight_wind(struct bt_flight *f, bool hard, uint64_t now_ns)
{
    if (f->wind == BT_FLIGHT_ACTIVE) {
        f->wind_ns = now_ns;
        bt_record_left(f);
        bt_expect_settled(f, now_ns);
    }
    if (hard) {
        f->wind = BT_FLIGHT_HARD;
    } else if (f->wind == BT_FLIGHT_ACTIVE) {
        f->wind = BT_FLIGHT_SOFT;
    }
    bt_flight_step(f, now_ns);
}

bool bt_flight_uses(const struct bt_flight *f, const struct bt_peer *p)
{
    return p == f->prefill || p == f->decode || p == f->kv_prefill || p == f->kv_decode;
}

void bt_flight_lose(struct bt_flight *f, const struct bt_peer *p)
{
    if (p == f->prefill) {
        prefill_over(f);
    }
    if (p == f->decode) {
        decode_over(f);
    }
    forget_uses(f, p);
    f->prefill = p == f->prefill ? NULL : f->prefill;
    f->decode = p == f->decode ? NULL : f->decode;
    f->kv_prefill = p == f->kv_prefill ? NULL : f->kv_prefill;
    f->kv_decode = p == f->kv_decode ? NULL : f->kv_decode;
}

void bt_flight_received(struct bt_flight *f, const struct bt_peer *p)
{
    if (p == f->prefill && !f->prefill_ended) {
        f->working[0] = p->incarnation;
    } else if (p == f->decode && !f->decode_ended) {
        f->working[1] = p->incarnation;
    }
}

bool bt_flight_works_on(const struct bt_flight *f, const struct bt_peer *p)
{
    return p->incarnation == f->working[0] || p->incarnation == f->working[1];
}

void bt_flight_ended(struct bt_flight *f, const struct bt_peer *p)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(f->working); i++) {
        if (f->working[i] == p->incarnation) {
            f->working[i] = 0;
        }
    }
    if (!f->no_room) {
        bt_queue_room(f->sequence->r->mc);
    }
    if (p == f->prefill) {
        prefill_over(f);
    }
    if (p == f->decode) {
        decode_over(f);
    }
}

bool bt_flight_over(const struct bt_flight *f)
{
    return f->wind != BT_FLIGHT_ACTIVE && f->prefill_ended && f->decode_ended &&
           f->prefill_released && f->decode_released;
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
    if (f->wind == BT_FLIGHT_ACTIVE) {
        /* All KV has landed at the decode side: the prefill side need not keep its slots until the
         * generation ends. */
        if (!f->same_kv && f->prefill_ended && f->flow_done) {
            release(f, f->kv_prefill, &f->prefill_released);
        }
        return;
    }
    if (f->wind == BT_FLIGHT_SOFT) {
        if (f->decode_useless) {
            cancel(f, f->decode, f->decode_ended, &f->decode_cancelled);
        }
        step_releases(f);
        if (now_ns - f->wind_ns > SOFT_NS) {
            f->wind = BT_FLIGHT_HARD;
        }
    }
    if (f->wind == BT_FLIGHT_HARD) {
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
    uint64_t bound_ns = (uint64_t)f->sequence->r->mc->conf.ended_ms * 1000000;
    if (f->wind == BT_FLIGHT_HARD && now_ns - f->wind_ns > bound_ns) {
        bt_metric_add(f->sequence->r->mc->m.ended_late, 1);
        BT_WARN("request_never_ended", "req=%016" PRIx64 " epoch=%u prefill=%s decode=%s why=%s",
                f->sequence->id, f->epoch,
                f->prefill != NULL && !f->prefill_ended ? f->prefill->name : "-",
                f->decode != NULL && !f->decode_ended ? f->decode->name : "-",
                "the workers have not confirmed the end of the cancelled request; it no longer "
                "counts as load");
        prefill_over(f);
        decode_over(f);
    }
}
