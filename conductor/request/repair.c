/* Failure is re-planning: the epoch rises, which frees what older epochs hold everywhere, and the
 * lane is planned again with prompt and emitted tokens as its tokens. Loop thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/request_priv.h"

#define DEATH_DELAY_MS 50u /* a node's other sessions break at about the same time: let them */
#define RETRY_MS       20u
#define RETRY_MAX_MS   1000u
#define STAY_NS        1000000000ull /* between two looks for somebody else */
#define FULL_NS        1000000000ull /* how long a full daemon is gone around */

/* The lane's note about s, made if there is none. */
static struct bt_lane_avoid *avoid_of(struct bt_lane *k, const struct bt_session *s)
{
    for (uint32_t i = 0; i < k->n_avoid; i++) {
        if (k->avoid[i].incarnation == s->member->incarnation) {
            return &k->avoid[i];
        }
    }
    /* The oldest is forgotten: it may have recovered by now. */
    if (k->n_avoid == AVOID_MAX) {
        memmove(k->avoid, k->avoid + 1, (AVOID_MAX - 1) * sizeof(k->avoid[0]));
        k->n_avoid--;
    }
    k->avoid[k->n_avoid] = (struct bt_lane_avoid){.incarnation = s->member->incarnation};
    return &k->avoid[k->n_avoid++];
}

void bt_lane_avoid(struct bt_lane *k, const struct bt_session *s)
{
    if (s != NULL) {
        avoid_of(k, s)->failed = true;
    }
}

static void leave_plan(struct bt_lane *k, uint64_t now_ns)
{
    struct bt_flight *f = k->flight;
    k->flight = NULL;
    if (f != NULL) {
        bt_flight_wind(f, true, now_ns);
    }
    k->no_worker_ns = 0;
    bt_lane_set_state(k, LANE_PLANNING);
}

/* Choices that have been given tokens go on by themselves; while none has, one prefill serves all.
 * k keeps the first unfinished one. */
static void split(struct bt_lane *k)
{
    struct bt_request *r = k->r;
    bool begun = false;
    for (uint32_t i = k->first; i < k->first + k->n; i++) {
        begun = begun || r->choices[i].journal.n != 0;
    }
    if (k->n == 1 || !begun) {
        return;
    }
    uint32_t end = k->first + k->n;
    while (r->choices[k->first].finished) {
        k->first++;
    }
    for (uint32_t i = k->first + 1; i < end; i++) {
        if (r->choices[i].finished) {
            continue;
        }
        struct bt_lane *one = bt_lane_create(r, i, 1);
        one->epoch = k->epoch; /* the choice's journal has seen this one */
        one->n_avoid = k->n_avoid;
        memcpy(one->avoid, k->avoid, sizeof(one->avoid));
        one->replans = k->replans;
        one->stuck = k->stuck;
        one->put_offs = k->put_offs;
        one->queued_ns = k->queued_ns;
        one->plan_at_ns = k->plan_at_ns;
        bt_lane_set_state(one, LANE_PLANNING);
        bt_requests_queue_planning(one);
    }
    k->n = 1;
    k->n_tokens = 0; /* gathered from another choice, perhaps */
}

/* lost, a daemon of the lane's plan f, was lost. Whoever was dead before the request got there, and
 * whoever says that it is leaving, has not been killed by it. A node's workers go together: a plan
 * counts one. */
static void count_death(struct bt_lane *k, struct bt_flight *f, const struct bt_session *lost)
{
    struct bt_request *r = k->r;
    if (lost == NULL || f == NULL || f->killed || !bt_flight_works_on(f, lost) || lost->departed ||
        bt_session_leaving(lost) || r->n_killed == DEATHS_MAX) {
        return;
    }
    f->killed = true;
    for (uint32_t i = 0; i < r->n_killed; i++) {
        if (r->killed[i] == lost->member->incarnation) {
            return; /* another choice was with it as well */
        }
    }
    r->killed[r->n_killed++] = lost->member->incarnation;
}

static bool killed_enough(struct bt_lane *k)
{
    if (k->r->n_killed < DEATHS_MAX) {
        return false;
    }
    bt_request_fail(
        k->r, REJECT_FAILED, 500, 0,
        "two workers were lost while they worked on this request; it is not tried again");
    return true;
}

void bt_lane_lost_late(struct bt_lane *k, struct bt_flight *f, const struct bt_session *lost)
{
    uint32_t before = k->r->n_killed;
    count_death(k, f, lost);
    if (k->r->n_killed == before) {
        return;
    }
    BT_WARN("request_death", "req=%016" PRIx64 " epoch=%u deaths=%u worker=%s", k->id, f->epoch,
            k->r->n_killed, lost->member->name);
    if (k->state == LANE_PLANNING || k->state == LANE_PREFILLING) {
        (void)killed_enough(k);
    }
}

/* The worker of its plan whose session is down already. Requests are told of that in slices, and a
 * kvstore may say first that the worker has gone. */
static const struct bt_session *gone(const struct bt_lane *k)
{
    const struct bt_flight *f = k->flight;
    if (f != NULL && f->prefill != NULL && f->prefill->state != BT_SESSION_UP) {
        return f->prefill;
    }
    return f != NULL && f->decode != NULL && f->decode->state != BT_SESSION_UP ? f->decode : NULL;
}

void bt_lane_replan(struct bt_lane *k, const struct bt_session *lost, const char *why,
                    uint64_t now_ns)
{
    struct bt_request *r = k->r;
    struct bt_requests *rs = r->rs;
    lost = lost != NULL ? lost : gone(k);
    count_death(k, k->flight, lost);
    k->replans++;
    r->usage.replans++;
    snprintf(r->usage.again, sizeof(r->usage.again), "%s", why);
    rs->replanned++;
    bt_metric_add(rs->m.replanned, 1);
    BT_WARN("request_replan",
            "req=%016" PRIx64 " epoch=%u tokens=%u deaths=%u replans=%u prefill=%s decode=%s "
            "why=%s",
            k->id, k->epoch, r->choices[k->first].journal.n, r->n_killed, k->replans,
            r->usage.prefill, r->usage.decode, why);
    char text[320];
    if (killed_enough(k)) {
        return;
    }
    if (k->replans > rs->conf.max_replans) {
        snprintf(text, sizeof(text), "failed %u times, the last time: %s", k->replans, why);
        bt_request_fail(r, REJECT_FAILED, 500, 0, text);
        return;
    }
    uint32_t shift = BT_MIN(k->replans - 1, 6u);
    uint32_t delay = lost != NULL ? DEATH_DELAY_MS : BT_MIN(RETRY_MS << shift, RETRY_MAX_MS);
    leave_plan(k, now_ns);
    k->queued_ns = 0; /* it had its place; what it waits for now is another worker */
    k->plan_at_ns = now_ns + (uint64_t)delay * 1000000;
    bt_requests_queue_planning(k);
    split(k);
}

void bt_lane_move(struct bt_lane *k, uint64_t now_ns)
{
    struct bt_requests *rs = k->r->rs;
    if (now_ns < k->stay_ns || rs->moves_left == 0) {
        return;
    }
    if (!bt_lane_movable(k, now_ns)) {
        k->stay_ns = now_ns + STAY_NS;
        return;
    }
    rs->moves_left--;
    bt_metric_add(rs->m.moved, 1);
    snprintf(k->r->usage.again, sizeof(k->r->usage.again),
             "a daemon of the plan was leaving, or gave its role up");
    BT_INFO("request_move", "req=%016" PRIx64 " epoch=%u tokens=%u prefill=%s decode=%s", k->id,
            k->epoch, k->r->choices[k->first].journal.n, k->r->usage.prefill, k->r->usage.decode);
    leave_plan(k, now_ns);
    k->plan_at_ns = 0;
    bt_requests_queue_planning(k);
    split(k);
}

bool bt_lane_queued_too_long(struct bt_lane *k, uint64_t now_ns)
{
    struct bt_requests *rs = k->r->rs;
    uint64_t limit_ns = (uint64_t)rs->conf.queue_timeout_ms * 1000000;
    if (limit_ns == 0 || k->queued_ns == 0 || now_ns < k->queued_ns + limit_ns) {
        return false;
    }
    char text[128];
    snprintf(text, sizeof(text), "no room for this request in %.1f s (conductor.queue_timeout_ms)",
             (double)(now_ns - k->queued_ns) / 1e9);
    bt_request_fail(k->r, REJECT_NO_ROOM, 503, bt_requests_retry_after_s(rs), text);
    return true;
}

/* After so many refusals in a row not even all the others can have been tried, or those forgotten
 * among them refuse again: the tries become slower. */
static uint64_t pause_ns(uint32_t put_offs)
{
    uint32_t shift = BT_MIN(put_offs - BT_MIN(put_offs, AVOID_MAX), 6u);
    return put_offs <= AVOID_MAX ? 0 : BT_MIN(RETRY_MS << shift, RETRY_MAX_MS) * 1000000ull;
}

/* s has no room now. Not a failure: elsewhere at once, or it waits until there is some. */
static void put_off(struct bt_lane *k, const struct bt_session *s, const char *why, uint64_t now_ns)
{
    BT_DEBUG("request_put_off", "req=%016" PRIx64 " epoch=%u why=%s", k->id, k->epoch, why);
    struct bt_flight *f = k->flight;
    if (s != NULL) {
        avoid_of(k, s)->full_until_ns = now_ns + FULL_NS;
    }
    f->no_room = true;
    /* One that had been given room and was at work for a while begins to wait anew. */
    bool had_room = bt_flight_reserved(f) && now_ns - f->planned_ns > FULL_NS;
    leave_plan(k, now_ns);
    if (k->queued_ns == 0 || had_room) {
        k->queued_ns = now_ns;
    }
    if (bt_lane_queued_too_long(k, now_ns)) {
        return;
    }
    if (k->r->rs->probe == k) {
        bt_requests_starve(k, now_ns);
    } else {
        k->put_offs++;
        k->plan_at_ns = now_ns + pause_ns(k->put_offs);
        bt_requests_queue_planning(k);
    }
    split(k);
}

void bt_lane_repair(struct bt_lane *k, const struct bt_session *s, int32_t status,
                    const char *detail, uint64_t now_ns)
{
    char why[256];
    snprintf(why, sizeof(why), "%s: %s (%s)", s != NULL ? s->member->name : "a worker",
             detail != NULL && detail[0] != '\0' ? detail : bt_status_text((bt_status_t)status),
             bt_status_name((bt_status_t)status));
    if (status == BT_ERR_INVALID || status == BT_ERR_UNSUPPORTED || status == BT_ERR_TOO_LARGE) {
        bt_request_fail(k->r, REJECT_INVALID, 400, 0, why);
        return;
    }
    if (status == BT_ERR_EXHAUSTED || status == BT_AGAIN) {
        put_off(k, s, why, now_ns);
        return;
    }
    bt_lane_avoid(k, s);
    bt_lane_replan(k, NULL, why, now_ns);
}
