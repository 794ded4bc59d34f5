/* Plans a sequence again after a failure. Its prompt is then the old prompt and the tokens that the
 * client already has. The new epoch frees everything that older epochs hold. Pure. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/machine_priv.h"

/* After a daemon was lost: sessions of daemons that died with it end within milliseconds, so the
 * next plan does not choose one of them. */
#define DEATH_DELAY_MS 50u
/* for a plan that failed although no daemon was lost; a step of a decode worker has passed by
 * then */
#define RETRY_MS     20u
#define RETRY_MAX_MS 1000u /* far below the deadlines of requests; few tries a second are cheap */
#define STAY_NS      1000000000ull /* between two searches for another worker */
#define FULL_NS      1000000000ull /* how long a full daemon is gone around */

/* The sequence's note about p. It is created if there is none. */
static struct bt_sequence_avoid *avoid_of(struct bt_sequence *sq, const struct bt_peer *p)
{
    for (uint32_t i = 0; i < sq->n_avoid; i++) {
        if (sq->avoid[i].incarnation == p->incarnation) {
            return &sq->avoid[i];
        }
    }
    /* The oldest note is dropped: its daemon may have recovered by now. */
    if (sq->n_avoid == BT_SEQ_AVOID_MAX) {
        memmove(sq->avoid, sq->avoid + 1, (BT_SEQ_AVOID_MAX - 1) * sizeof(sq->avoid[0]));
        sq->n_avoid--;
    }
    sq->avoid[sq->n_avoid] = (struct bt_sequence_avoid){.incarnation = p->incarnation};
    return &sq->avoid[sq->n_avoid++];
}

void bt_sequence_avoid(struct bt_sequence *sq, const struct bt_peer *p)
{
    if (p != NULL) {
        avoid_of(sq, p)->failed = true;
    }
}

void bt_sequence_leave_plan(struct bt_sequence *sq, uint64_t now_ns)
{
    struct bt_flight *f = sq->flight;
    sq->flight = NULL;
    if (f != NULL) {
        bt_flight_wind(f, true, now_ns);
    }
    sq->no_worker_ns = 0;
    bt_record_waits(sq, NULL, now_ns);
    bt_sequence_set_state(sq, BT_SEQ_PLANNING);
}

bool bt_sequence_splits(const struct bt_sequence *sq)
{
    bool begun = false;
    if (sq->r->spec.beams.width > 0) {
        return false; /* one search has them all */
    }
    for (uint32_t i = sq->first; i < sq->first + sq->n; i++) {
        begun = begun || sq->r->choices[i].journal.n != 0;
    }
    return sq->n > 1 && begun;
}

/* Once a choice has tokens, each unfinished choice goes on in a sequence of its own; sq keeps the
 * first of them. Before that one prefill serves all choices. */
static void split(struct bt_sequence *sq)
{
    struct bt_request *r = sq->r;
    if (!bt_sequence_splits(sq)) {
        return;
    }
    uint32_t end = sq->first + sq->n;
    while (r->choices[sq->first].finished) {
        sq->first++;
    }
    for (uint32_t i = sq->first + 1; i < end; i++) {
        if (r->choices[i].finished) {
            continue;
        }
        struct bt_sequence *one = bt_sequence_create(r, i, 1);
        one->epoch = sq->epoch; /* the choice's journal has seen this epoch */
        one->n_avoid = sq->n_avoid;
        memcpy(one->avoid, sq->avoid, sizeof(one->avoid));
        one->replans = sq->replans;
        one->stuck = sq->stuck;
        one->put_offs = sq->put_offs;
        one->queued_ns = sq->queued_ns;
        one->plan_at_ns = sq->plan_at_ns;
        one->wait = sq->wait;
        bt_sequence_set_state(one, BT_SEQ_PLANNING);
        bt_queue_plan(one);
    }
    sq->n = 1;
    sq->n_tokens = 0; /* sq may have gathered another choice's tokens */
}

/* A daemon (lost) of the sequence's plan f was lost: counts it as killed by the request. A daemon
 * that was dead before the request came, or that said that it would leave, does not count. A node's
 * workers die together, so a plan counts only one. */
static void count_death(struct bt_sequence *sq, struct bt_flight *f, const struct bt_peer *lost)
{
    struct bt_request *r = sq->r;
    if (lost == NULL || f == NULL || f->killed || !bt_flight_works_on(f, lost) ||
        r->n_killed == BT_SEQ_DEATHS_MAX) {
        return;
    }
    struct bt_peer_facts p = bt_machine_facts(r->mc, lost);
    if (p.departed || p.leaving) {
        return;
    }
    f->killed = true;
    for (uint32_t i = 0; i < r->n_killed; i++) {
        if (r->killed[i] == lost->incarnation) {
            return; /* another choice of the request was there too */
        }
    }
    r->killed[r->n_killed++] = lost->incarnation;
}

static bool killed_enough(struct bt_sequence *sq)
{
    if (sq->r->n_killed < BT_SEQ_DEATHS_MAX) {
        return false;
    }
    bt_request_fail(
        sq->r, BT_REJECT_FAILED, 500, 0,
        "two workers were lost while they worked on this request, so it is not tried a third time");
    return true;
}

bool bt_sequence_count_late(struct bt_sequence *sq, struct bt_flight *f, const struct bt_peer *lost)
{
    uint32_t before = sq->r->n_killed;
    count_death(sq, f, lost);
    if (sq->r->n_killed == before) {
        return false;
    }
    BT_WARN("request_death", "req=%016" PRIx64 " epoch=%u deaths=%u worker=%s", sq->id, f->epoch,
            sq->r->n_killed, lost->name);
    return true;
}

void bt_sequence_died_late(struct bt_sequence *sq)
{
    if (sq->state == BT_SEQ_PLANNING || sq->state == BT_SEQ_PREFILLING) {
        (void)killed_enough(sq);
    }
}

/* The plan's worker whose session is already down. Requests learn of a lost session in slices, so a
 * kvstore may report the loss first. */
static const struct bt_peer *gone(const struct bt_sequence *sq)
{
    const struct bt_flight *f = sq->flight;
    const struct bt_peer *const workers[] = {f != NULL ? f->prefill : NULL,
                                             f != NULL ? f->decode : NULL};
    for (size_t i = 0; i < BT_ARRAY_LEN(workers); i++) {
        if (workers[i] != NULL && !bt_machine_facts(sq->r->mc, workers[i]).up) {
            return workers[i];
        }
    }
    return NULL;
}

uint32_t bt_replan_delay_ms(bool lost, uint32_t replans)
{
    uint32_t shift = BT_MIN(BT_MAX(replans, 1u) - 1, 6u);
    return BT_MIN((lost ? DEATH_DELAY_MS : RETRY_MS) << shift, RETRY_MAX_MS);
}

void bt_sequence_replan(struct bt_sequence *sq, const struct bt_peer *lost, const char *why,
                        uint64_t now_ns)
{
    struct bt_request *r = sq->r;
    struct bt_machine *mc = r->mc;
    lost = lost != NULL ? lost : gone(sq);
    count_death(sq, sq->flight, lost);
    sq->replans++;
    r->usage.replans++;
    snprintf(r->usage.again, sizeof(r->usage.again), "%s", why);
    mc->replanned++;
    bt_metric_add(mc->m.replanned, 1);
    BT_WARN("request_replan",
            "req=%016" PRIx64 " epoch=%u tokens=%u deaths=%u replans=%u prefill=%s decode=%s "
            "why=%s",
            sq->id, sq->epoch, r->choices[sq->first].journal.n, r->n_killed, sq->replans,
            r->usage.prefill, r->usage.decode, why);
    char text[320];
    if (killed_enough(sq)) {
        return;
    }
    if (sq->replans > mc->conf.max_replans) {
        snprintf(text, sizeof(text), "the request failed %u times; the last reason: %s",
                 sq->replans, why);
        bt_request_fail(r, BT_REJECT_FAILED, 500, 0, text);
        return;
    }
    bt_sequence_leave_plan(sq, now_ns);
    bt_record_waits(sq, why, now_ns);
    sq->queued_ns = 0; /* it keeps its place and waits only for another worker */
    sq->plan_at_ns = now_ns + (uint64_t)bt_replan_delay_ms(lost != NULL, sq->replans) * 1000000;
    bt_queue_plan(sq);
    split(sq);
}

void bt_sequence_move(struct bt_sequence *sq, uint64_t now_ns)
{
    struct bt_machine *mc = sq->r->mc;
    if (now_ns < sq->stay_ns || mc->moves_left == 0) {
        return;
    }
    struct bt_gen_usage before = sq->r->usage;
    uint32_t epoch = sq->epoch;
    if (!bt_sequence_plan_away(sq, now_ns)) {
        sq->stay_ns = now_ns + STAY_NS;
        return;
    }
    mc->moves_left--;
    bt_metric_add(mc->m.moved, 1);
    snprintf(sq->r->usage.again, sizeof(sq->r->usage.again),
             "a daemon of the plan is leaving or has given up its role");
    BT_INFO("request_move", "req=%016" PRIx64 " epoch=%u tokens=%u prefill=%s decode=%s", sq->id,
            epoch, sq->r->choices[sq->first].journal.n, before.prefill, before.decode);
    if (sq->flight == NULL) { /* each of its choices is decided for itself */
        sq->plan_at_ns = 0;
        bt_queue_plan(sq);
        split(sq);
    }
}

bool bt_sequence_queued_too_long(struct bt_sequence *sq, uint64_t now_ns)
{
    struct bt_machine *mc = sq->r->mc;
    uint64_t limit_ns = (uint64_t)mc->conf.queue_timeout_ms * 1000000;
    if (limit_ns == 0 || sq->queued_ns == 0 || now_ns < sq->queued_ns + limit_ns) {
        return false;
    }
    char text[128];
    snprintf(text, sizeof(text), "no room for this request in %.1f s (conductor.queue_timeout_ms)",
             (double)(now_ns - sq->queued_ns) / 1e9);
    bt_request_fail(sq->r, BT_REJECT_NO_ROOM, 503, bt_queue_retry_after_s(mc), text);
    return true;
}

/* How long to wait before the next try. A sequence avoids only its last BT_SEQ_AVOID_MAX
 * daemons. After more refusals in a row, it probably tries the same full daemons again, so
 * the pause grows. */
static uint64_t pause_ns(uint32_t put_offs)
{
    uint32_t shift = BT_MIN(put_offs - BT_MIN(put_offs, BT_SEQ_AVOID_MAX), 6u);
    return put_offs <= BT_SEQ_AVOID_MAX ? 0 : BT_MIN(RETRY_MS << shift, RETRY_MAX_MS) * 1000000ull;
}

/* p has no room now. This is not a failure: the sequence tries other daemons at once, or waits for
 * room. */
static void put_off(struct bt_sequence *sq, const struct bt_peer *p, const char *why,
                    uint64_t now_ns)
{
    BT_DEBUG("request_put_off", "req=%016" PRIx64 " epoch=%u why=%s", sq->id, sq->epoch, why);
    struct bt_flight *f = sq->flight;
    if (p != NULL) {
        avoid_of(sq, p)->full_until_ns = now_ns + FULL_NS;
    }
    f->no_room = true;
    /* A sequence that had room and ran for a while starts to wait from now. */
    bool had_room = bt_flight_reserved(f) && now_ns - f->planned_ns > FULL_NS;
    bt_sequence_leave_plan(sq, now_ns);
    if (sq->queued_ns == 0 || had_room) {
        sq->queued_ns = now_ns;
    }
    if (bt_sequence_queued_too_long(sq, now_ns)) {
        return;
    }
    if (sq->r->mc->queues.probe == sq) {
        bt_queue_starve(sq, now_ns);
    } else {
        sq->put_offs++;
        sq->plan_at_ns = now_ns + pause_ns(sq->put_offs);
        bt_queue_plan(sq);
    }
    split(sq);
}

void bt_sequence_repair(struct bt_sequence *sq, const struct bt_peer *p, int32_t status,
                        const char *detail, uint64_t now_ns)
{
    char why[256];
    snprintf(why, sizeof(why), "%s: %s (%s)", p != NULL ? p->name : "a worker",
             detail != NULL && detail[0] != '\0' ? detail : bt_status_text((bt_status_t)status),
             bt_status_name((bt_status_t)status));
    if (status == BT_ERR_INVALID || status == BT_ERR_UNSUPPORTED || status == BT_ERR_TOO_LARGE) {
        bt_request_fail(sq->r, BT_REJECT_INVALID, 400, 0, why);
        return;
    }
    if (status == BT_ERR_EXHAUSTED || status == BT_AGAIN) {
        put_off(sq, p, why, now_ns);
        return;
    }
    bt_sequence_avoid(sq, p);
    bt_sequence_replan(sq, NULL, why, now_ns);
}
