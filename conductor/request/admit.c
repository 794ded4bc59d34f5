/* The queues of requests that no worker has: for a place among the running (waiting), for a plan
 * (planning), for room (starved).
 *
 * A kvstore or worker that is full says so (ERR_EXHAUSTED). Its request tries whoever else could
 * take it, and when all of those are full too it waits here; newer ones of its tenant and class
 * queue up behind it, so that small requests do not starve a large one, and tenants take turns as
 * for a place: else one who has filled the room would be served for all that he has sent before
 * another gets any. Only the first whose turn it is, the probe, is tried: when somebody has given
 * room back, and otherwise after a growing pause (others' conductors free room as well). Once it
 * has its slots the next one is tried. So a full cluster sees one reservation at a time, whatever
 * the length of the queue. Loop thread. */
#include <math.h>
#include <string.h>

#include "conductor/request/request_priv.h"

#define PROBE_FIRST_MS 50u
#define PROBE_MAX_MS   500u
#define RATE_NS        1000000000ull /* between two looks at how many have ended */
#define RATE_PART      0.3           /* of a look, against those before */
#define RETRY_MAX_S    60

static struct bt_lane *queued_of(struct bt_list *l)
{
    return BT_CONTAINER_OF(l, struct bt_lane, queue);
}

const char bt_queue_full_text[] =
    "too many requests are waiting already, in all or of this API key (conductor.max_waiting)";

static void refuse(struct bt_request *r)
{
    switch (r->refuse) {
    case REJECT_QUEUE_FULL:
        bt_request_fail(r, r->refuse, 429, bt_requests_retry_after_s(r->rs), bt_queue_full_text);
        return;
    case REJECT_OVERLOADED:
        bt_request_fail(r, r->refuse, 429, bt_requests_retry_after_s(r->rs),
                        "the time to first token would miss its objective: those who wait already "
                        "would take longer");
        return;
    case REJECT_DRAINING:
        bt_request_fail(r, r->refuse, 503, 1, "this conductor is being stopped");
        return;
    default:
        bt_request_fail(
            r, REJECT_INVALID, 400, 0,
            "the prompt has no token or one outside the vocabulary, no token is asked for, or "
            "n is above 16");
        return;
    }
}

/* ---- in and out ---- */

/* Who waits in list and is not of a lower class. */
static uint32_t ahead_in(const struct bt_list *list, int32_t priority)
{
    uint32_t n = 0;
    const struct bt_list *l;
    bt_list_for_each (l, list) {
        n += BT_CONTAINER_OF(l, struct bt_lane, queue)->r->spec.priority <= priority;
    }
    return n;
}

/* At the rate at which requests end. */
double bt_requests_wait_ms(const struct bt_requests *rs, int32_t priority)
{
    double ahead = ahead_in(&rs->waiting, priority) + ahead_in(&rs->starved, priority);
    return rs->ends_per_s > 0 ? 1e3 * ahead / rs->ends_per_s : 0;
}

/* With the wait for its turn, what it would meet now behind that misses its objective: said at
 * once, not when the turn comes. */
static bool too_late(struct bt_lane *k)
{
    struct bt_sched_reject rej;
    return bt_lane_hopeless(k, bt_mono_ns(), bt_requests_wait_ms(k->r->rs, k->r->spec.priority),
                            &rej);
}

static bool crowded(const struct bt_requests *rs)
{
    return rs->n_starved != 0 || rs->probe != NULL;
}

/* Places for a request of this class: those of lower classes do not count against it, as far as
 * max_overtaking goes. What is beyond max_running is always of a higher class than as many within
 * it. */
static uint32_t places_for(const struct bt_requests *rs, int32_t priority)
{
    uint32_t lower = bt_classes_below(&rs->running, priority).rows;
    return rs->conf.max_running + BT_MIN(lower, rs->conf.max_overtaking);
}

bool bt_requests_at_once(const struct bt_requests *rs, int32_t priority)
{
    return !crowded(rs) &&
           rs->n_active + ahead_in(&rs->waiting, priority) < places_for(rs, priority);
}

static struct bt_sched_turn turn_of(const struct bt_lane *k)
{
    const struct bt_request *r = k->r;
    return (struct bt_sched_turn){r->spec.priority, bt_sched_fair_counter(&r->rs->fair, r->tenant),
                                  r->arrival};
}

/* Whose turn it is among those who wait for a place or for room, or (last) who would be the last.
 * of: among those of its tenant; NULL: among all. */
static struct bt_lane *pick(struct bt_list *queue, bool last, const struct bt_request *of)
{
    struct bt_lane *best = NULL;
    struct bt_sched_turn best_turn = {0};
    struct bt_list *l;
    bt_list_for_each (l, queue) {
        struct bt_lane *k = queued_of(l);
        struct bt_sched_turn t = turn_of(k);
        bool better = best != NULL && (last ? bt_sched_turn_before(&best_turn, &t)
                                            : bt_sched_turn_before(&t, &best_turn));
        bool meant = k->r->refuse < 0 && (of == NULL || k->r->tenant == of->tenant);
        if (meant && (best == NULL || better)) {
            best = k;
            best_turn = t;
        }
    }
    return best;
}

static uint32_t count_of(const struct bt_list *list, uint64_t tenant)
{
    uint32_t n = 0;
    const struct bt_list *l;
    bt_list_for_each (l, list) {
        n += BT_CONTAINER_OF(l, struct bt_lane, queue)->r->tenant == tenant;
    }
    return n;
}

uint32_t bt_requests_queued(const struct bt_requests *rs)
{
    return rs->n_waiting + rs->n_starved + (rs->probe != NULL);
}

/* A tenant has at most half of the waiting places, and the last eighth is for tenants that have
 * none: so nobody, and no few together, can take the queue from all others. */
static uint32_t share_of(const struct bt_requests *rs)
{
    return (rs->conf.max_waiting + 1) / 2;
}

bool bt_requests_share_taken(const struct bt_requests *rs, const char *tenant)
{
    if (tenant == NULL) {
        return false; /* without API keys all clients are one */
    }
    uint64_t id = bt_hash64(tenant, strlen(tenant), 0);
    uint32_t own = count_of(&rs->waiting, id) + count_of(&rs->starved, id);
    uint32_t queued = bt_requests_queued(rs), most = rs->conf.max_waiting;
    bool last = queued >= most - most / 8 && queued < most; /* full: classes decide */
    return own >= share_of(rs) || (own > 0 && last);
}

uint32_t bt_requests_prompts_max(const struct bt_requests *rs, bool has_tenant)
{
    return rs->conf.max_running + (has_tenant ? share_of(rs) : rs->conf.max_waiting);
}

/* There is no place in the queue for r: one of a lower class (of its own tenant, if that has its
 * share) gives it its place. */
static bool displace(const struct bt_request *r, bool own)
{
    struct bt_lane *k = pick(&r->rs->waiting, true, own ? r : NULL);
    if (k == NULL || k->r->spec.priority <= r->spec.priority) {
        return false;
    }
    k->r->refuse = REJECT_QUEUE_FULL;
    return true;
}

void bt_requests_enter(struct bt_lane *k)
{
    struct bt_request *r = k->r;
    struct bt_requests *rs = r->rs;
    bool at_once = bt_requests_at_once(rs, r->spec.priority);
    bool share = !at_once && bt_requests_share_taken(rs, r->spec.tenant);
    bool full = !at_once && (share || bt_requests_queued(rs) >= rs->conf.max_waiting);
    if (rs->draining) {
        r->refuse = REJECT_DRAINING;
    } else if (r->refuse < 0 && full && !displace(r, share)) {
        r->refuse = REJECT_QUEUE_FULL;
    } else if (r->refuse < 0 && !at_once && too_late(k)) {
        r->refuse = REJECT_OVERLOADED;
    }
    r->arrival = ++rs->total;
    k->queued_ns = r->spec.received_ns;
    bt_list_insert_tail(&rs->waiting, &k->queue);
    rs->n_waiting++;
    bt_sched_fair_wait(&rs->fair, r->tenant);
    bt_requests_kick(rs);
}

void bt_requests_unqueue(struct bt_lane *k)
{
    struct bt_requests *rs = k->r->rs;
    if (!bt_list_empty(&k->queue)) {
        if (k->state == LANE_WAITING) {
            rs->n_waiting--;
            bt_sched_fair_leave(&rs->fair, k->r->tenant);
        }
        rs->n_starved -= k->starved;
    }
    bt_list_remove(&k->queue);
}

void bt_requests_queue_planning(struct bt_lane *k)
{
    bt_requests_unqueue(k);
    bt_requests_fits(k);
    bt_list_insert_tail(&k->r->rs->planning, &k->queue);
    bt_requests_kick(k->r->rs);
}

/* One that was refused in the queue has made nobody's wait shorter. */
static bool was_planned(const struct bt_request *r)
{
    const struct bt_list *l;
    bt_list_for_each (l, &r->lanes) {
        if (BT_CONTAINER_OF(l, struct bt_lane, link)->epoch != 0) {
            return true;
        }
    }
    return false;
}

void bt_requests_count(struct bt_request *r)
{
    r->counted = true;
    r->rs->n_active++;
    bt_classes_join(&r->rs->running, r->spec.priority)->rows++;
}

void bt_requests_uncount(struct bt_request *r)
{
    if (r->counted) {
        r->counted = false;
        r->rs->n_active--;
        r->rs->n_late -= r->late;
        r->late = false;
        bt_classes_at(&r->rs->running, r->spec.priority)->rows--;
        bt_classes_leave(&r->rs->running, r->spec.priority);
        r->rs->ended += was_planned(r);
        bt_requests_kick(r->rs);
    }
}

/* ---- room ---- */

void bt_requests_starve(struct bt_lane *k, uint64_t now_ns)
{
    struct bt_requests *rs = k->r->rs;
    if (rs->probe == k) {
        uint32_t ms = BT_MIN(PROBE_FIRST_MS << BT_MIN(rs->probe_misses, 8u), PROBE_MAX_MS);
        rs->probe_misses++;
        rs->probe_at_ns = now_ns + (uint64_t)ms * 1000000;
        rs->probe = NULL;
    } else if (!crowded(rs)) {
        rs->probe_misses = 0;
        rs->probe_at_ns = now_ns + (uint64_t)PROBE_FIRST_MS * 1000000;
    }
    bt_requests_unqueue(k);
    /* It was not served: a try that found no room costs its tenant nothing. */
    bt_sched_fair_serve(&rs->fair, k->r->tenant, -(double)k->charged, k->r->spec.weight);
    k->charged = 0;
    k->starved = true;
    if (k->queued_ns == 0) {
        k->queued_ns = now_ns;
    }
    bt_list_insert_tail(&rs->starved, &k->queue);
    rs->n_starved++;
}

void bt_requests_fits(struct bt_lane *k)
{
    k->starved = false;
    k->charged = 0;
    if (k->r->rs->probe == k) {
        k->r->rs->probe = NULL;
        bt_requests_room(k->r->rs); /* perhaps there is more */
    }
}

void bt_requests_room(struct bt_requests *rs)
{
    if (!crowded(rs)) {
        return;
    }
    /* Also of use to a probe under way: it may be refused for what was full a moment ago, and
     * should not wait the longest pause then. */
    rs->probe_misses = 0;
    rs->probe_at_ns = 0;
    bt_requests_kick(rs);
}

void bt_requests_nobody(struct bt_requests *rs)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &rs->starved) {
        struct bt_lane *k = queued_of(l);
        bt_requests_unqueue(k);
        k->starved = false;
        bt_list_insert_tail(&rs->planning, &k->queue);
    }
}

static void try_probe(struct bt_requests *rs, uint64_t now_ns)
{
    struct bt_lane *k = NULL;
    if (rs->probe == NULL && now_ns >= rs->probe_at_ns) {
        k = pick(&rs->starved, false, NULL);
    }
    if (k == NULL) {
        return;
    }
    bt_requests_unqueue(k);
    rs->probe = k;
    struct bt_lane_input in = {.now_ns = now_ns};
    bt_lane_event(k, EV_PLAN, &in);
}

/* ---- the pump ---- */

static void move_all(struct bt_list *to, struct bt_list *from)
{
    while (!bt_list_empty(from)) {
        struct bt_list *l = from->next;
        bt_list_remove(l);
        bt_list_insert_tail(to, l);
    }
}

/* One event may take any of them out of the queue: a request that fails takes all its lanes along.
 * So nobody remembers the next one; those who have had their turn stand apart until the end. A plan
 * takes some tens of microseconds and there may be a thousand: what is left at until_ns is planned
 * in the next turn of the loop, first. */
static void plan_all(struct bt_requests *rs, uint64_t now_ns, uint64_t until_ns)
{
    struct bt_list todo, had;
    bt_list_init(&todo);
    bt_list_init(&had);
    move_all(&todo, &rs->planning);
    while (!bt_list_empty(&todo) && bt_mono_ns() < until_ns) {
        struct bt_lane *k = queued_of(todo.next);
        bt_list_remove(&k->queue);
        bt_list_insert_tail(&had, &k->queue);
        if (crowded(rs) && now_ns >= k->plan_at_ns) {
            if (!bt_lane_refused_early(k, now_ns, bt_requests_wait_ms(rs, k->r->spec.priority))) {
                bt_requests_starve(k, now_ns); /* behind those who came before it */
            }
            continue;
        }
        struct bt_lane_input in = {.now_ns = now_ns};
        bt_lane_event(k, EV_PLAN, &in);
    }
    if (!bt_list_empty(&todo)) {
        bt_requests_kick(rs);
    }
    move_all(&todo, &had);          /* those who have had their turn go behind those who have not */
    move_all(&todo, &rs->planning); /* and whoever came meanwhile behind all */
    move_all(&rs->planning, &todo);
}

/* False: there was no time for all who could have a place. */
static bool admit_some(struct bt_requests *rs, uint64_t until_ns)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &rs->waiting) {
        struct bt_lane *k = queued_of(l);
        if (k->r->refuse >= 0) {
            refuse(k->r);
        }
    }
    struct bt_lane *next;
    while ((next = pick(&rs->waiting, false, NULL)) != NULL &&
           rs->n_active < places_for(rs, next->r->spec.priority)) {
        if (bt_mono_ns() >= until_ns) {
            return false;
        }
        struct bt_lane_input in = {.now_ns = bt_mono_ns()};
        bt_lane_event(next, EV_ADMIT, &in);
    }
    return true;
}

static void pump(void *arg)
{
    struct bt_requests *rs = arg;
    uint64_t from = bt_mono_ns();
    if (!admit_some(rs, from + BT_LOOP_SLICE_NS)) {
        bt_requests_kick(rs);
    }
    uint64_t now = bt_mono_ns();
    plan_all(rs, now, now + BT_LOOP_SLICE_NS);
    try_probe(rs, now);
}

void bt_requests_kick(struct bt_requests *rs)
{
    bt_timer_start(rs->loop, &rs->pump, 0, 0, pump, rs);
}

/* ---- how long it takes ---- */

void bt_requests_rate(struct bt_requests *rs, uint64_t now_ns)
{
    if (rs->rate_ns == 0 || rs->total == 0) {
        rs->rate_ns = now_ns;
        return;
    }
    if (now_ns - rs->rate_ns < RATE_NS) {
        return;
    }
    double per_s = rs->ended / ((double)(now_ns - rs->rate_ns) / 1e9);
    rs->ends_per_s += RATE_PART * (per_s - rs->ends_per_s);
    rs->ended = 0;
    rs->rate_ns = now_ns;
}

uint32_t bt_requests_retry_after_s(const struct bt_requests *rs)
{
    double ahead = rs->n_waiting + rs->n_starved;
    double s = rs->ends_per_s > 0 ? ahead / rs->ends_per_s : 1;
    return s < 1 ? 1 : s > RETRY_MAX_S ? RETRY_MAX_S : (uint32_t)ceil(s);
}
