/* The three queues of requests that no worker has. Requests wait for a place among the running ones
 * (waiting), for a plan (planning) or for room (starved). A full kvstore or worker answers
 * ERR_EXHAUSTED. The request then tries the other daemons that could take it. When all of them are
 * full, it waits here, and newer requests of its tenant and class wait behind it: small requests
 * must not starve a large one. Tenants take turns, as for a place: otherwise one tenant that fills
 * the cluster would be served completely before another. Only one waiting request, the probe, is
 * tried at a time. It is tried when a daemon has room again, or after a growing pause, because
 * other conductors free room too. When the probe has its slots, the next request becomes the probe.
 * So a full cluster sees one reservation at a time, however long the queue is. Pure. */
#include <math.h>
#include <string.h>

#include "conductor/request/machine_priv.h"

#define PROBE_FIRST_MS 50u           /* one or two decode steps: what can have ended by then */
#define PROBE_MAX_MS   500u          /* freed room lies idle for no longer than that */
#define RATE_NS        1000000000ull /* between two looks at how many have ended */
#define RATE_PART      0.3           /* of a look, against those before: mean of about 3 s */
#define RETRY_MAX_S    60            /* the load of more than a minute ahead cannot be predicted */

static struct bt_sequence *queued_of(struct bt_list *l)
{
    return BT_CONTAINER_OF(l, struct bt_sequence, queue);
}

const char bt_queue_full_text[] = "too many requests wait already: the limit of all requests or of "
                                  "this API key is reached (conductor.max_waiting)";

static void refuse(struct bt_request *r)
{
    switch (r->refuse) {
    case BT_REJECT_QUEUE_FULL:
        bt_request_fail(r, r->refuse, 429, bt_queue_retry_after_s(r->mc), bt_queue_full_text);
        return;
    case BT_REJECT_OVERLOADED:
        bt_request_fail(r, r->refuse, 429, bt_queue_retry_after_s(r->mc),
                        "the time to first token would miss its objective, because the requests "
                        "that already wait take too long");
        return;
    case BT_REJECT_DRAINING:
        bt_request_fail(r, r->refuse, 503, 1, "this conductor is being stopped");
        return;
    default:
        bt_request_fail(r, BT_REJECT_INVALID, 400, 0,
                        "the request is not valid: its prompt is empty or has a token outside the "
                        "vocabulary, it asks for no token, or n is above 16");
        return;
    }
}

/* ---- in and out ---- */

/* Counts the sequences in list that have this class or a higher one. */
static uint32_t ahead_in(const struct bt_list *list, int32_t priority)
{
    uint32_t n = 0;
    const struct bt_list *l;
    bt_list_for_each (l, list) {
        n += BT_CONTAINER_OF(l, struct bt_sequence, queue)->r->spec.priority <= priority;
    }
    return n;
}

/* How long the requests ahead take, at the rate at which requests end. */
double bt_queue_wait_ms(const struct bt_machine *mc, int32_t priority)
{
    double ahead =
        ahead_in(&mc->queues.waiting, priority) + ahead_in(&mc->queues.starved, priority);
    return mc->rate.ends_per_s > 0 ? 1e3 * ahead / mc->rate.ends_per_s : 0;
}

/* Returns whether the sequence would miss its objective after waiting for its turn. Then it is
 * refused before it waits, not when its turn comes. rej says which objective. */
static bool too_late(struct bt_sequence *sq, struct bt_sched_reject *rej)
{
    const struct bt_machine *mc = sq->r->mc;
    return bt_sequence_hopeless(sq, mc->now_ns, bt_queue_wait_ms(mc, sq->r->spec.priority), rej);
}

static bool crowded(const struct bt_machine *mc)
{
    return mc->queues.n_starved != 0 || mc->queues.probe != NULL;
}

/* Places for a request of this class: running requests of lower classes do not count, up to
 * max_overtaking of them. So every request beyond max_running has a higher class than one within
 * it. */
static uint32_t places_for(const struct bt_machine *mc, int32_t priority)
{
    uint32_t lower = bt_classes_below(&mc->queues.running, priority).rows;
    return mc->conf.max_running + BT_MIN(lower, mc->conf.max_overtaking);
}

/* Would a new request of this class have a place at once, and be planned without waiting for room?
 */
static bool at_once(const struct bt_machine *mc, int32_t priority)
{
    return !crowded(mc) &&
           mc->queues.n_active + ahead_in(&mc->queues.waiting, priority) < places_for(mc, priority);
}

static struct bt_sched_turn turn_of(const struct bt_sequence *sq)
{
    const struct bt_request *r = sq->r;
    return (struct bt_sched_turn){
        r->spec.priority, bt_sched_fair_counter(&r->mc->queues.fair, r->tenant), r->arrival};
}

/* The sequence whose turn it is in this queue, or (last) the one whose turn comes last. of: only
 * sequences of the tenant with this hash; NULL: all. */
static struct bt_sequence *pick(struct bt_list *queue, bool last, const uint64_t *of)
{
    struct bt_sequence *best = NULL;
    struct bt_sched_turn best_turn = {0};
    struct bt_list *l;
    bt_list_for_each (l, queue) {
        struct bt_sequence *sq = queued_of(l);
        struct bt_sched_turn t = turn_of(sq);
        bool better = best != NULL && (last ? bt_sched_turn_before(&best_turn, &t)
                                            : bt_sched_turn_before(&t, &best_turn));
        bool meant = sq->r->refuse < 0 && (of == NULL || sq->r->tenant == *of);
        if (meant && (best == NULL || better)) {
            best = sq;
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
        n += BT_CONTAINER_OF(l, struct bt_sequence, queue)->r->tenant == tenant;
    }
    return n;
}

/* How many sequences wait for a place or for room. */
static uint32_t queued(const struct bt_machine *mc)
{
    return mc->queues.n_waiting + mc->queues.n_starved + (mc->queues.probe != NULL);
}

/* A tenant may have half of the waiting places, and the last eighth is for tenants that have none.
 * So neither one tenant nor a few together can fill the queue. */
static uint32_t share_of(const struct bt_machine *mc)
{
    return (mc->conf.max_waiting + 1) / 2;
}

/* Returns whether the tenant has as many waiting places as one tenant may have. */
static bool share_taken(const struct bt_machine *mc, uint64_t tenant)
{
    uint32_t own = count_of(&mc->queues.waiting, tenant) + count_of(&mc->queues.starved, tenant);
    uint32_t n = queued(mc), most = mc->conf.max_waiting;
    bool last = n >= most - most / 8 && n < most; /* full: classes decide */
    return own >= share_of(mc) || (own > 0 && last);
}

uint32_t bt_machine_prompts_max(const struct bt_machine *mc, bool has_tenant)
{
    return mc->conf.max_running + (has_tenant ? share_of(mc) : mc->conf.max_waiting);
}

bt_queue_answer_t bt_queue_ask(struct bt_machine *mc, int32_t priority, const char *tenant,
                               struct bt_sequence **instead_p)
{
    *instead_p = NULL;
    if (at_once(mc, priority)) {
        return BT_QUEUE_AT_ONCE;
    }
    uint64_t id = tenant != NULL ? bt_hash64(tenant, strlen(tenant), 0) : 0;
    bool share = tenant != NULL && share_taken(mc, id); /* without API keys all clients are one */
    if (!share && queued(mc) < mc->conf.max_waiting) {
        return BT_QUEUE_WAITS;
    }
    struct bt_sequence *sq = pick(&mc->queues.waiting, true, share ? &id : NULL);
    if (sq == NULL || sq->r->spec.priority <= priority) {
        return BT_QUEUE_FULL;
    }
    *instead_p = sq;
    return BT_QUEUE_WAITS;
}

void bt_queue_enter(struct bt_sequence *sq)
{
    struct bt_request *r = sq->r;
    struct bt_machine *mc = r->mc;
    struct bt_sequence *instead = NULL;
    struct bt_sched_reject rej;
    bt_queue_answer_t answer = bt_queue_ask(mc, r->spec.priority, r->spec.tenant, &instead);
    if (mc->draining) {
        r->refuse = BT_REJECT_DRAINING;
    } else if (r->refuse < 0 && answer == BT_QUEUE_FULL) {
        r->refuse = BT_REJECT_QUEUE_FULL;
    } else if (r->refuse < 0 && answer == BT_QUEUE_WAITS && too_late(sq, &rej)) {
        r->refuse = BT_REJECT_OVERLOADED;
    } else if (r->refuse < 0 && instead != NULL) {
        instead->r->refuse = BT_REJECT_QUEUE_FULL;
    }
    r->arrival = ++mc->total;
    sq->queued_ns = r->spec.received_ns;
    bt_list_insert_tail(&mc->queues.waiting, &sq->queue);
    mc->queues.n_waiting++;
    bt_sched_fair_wait(&mc->queues.fair, r->tenant);
    bt_queue_kick(mc);
}

void bt_queue_leave(struct bt_sequence *sq)
{
    struct bt_machine *mc = sq->r->mc;
    if (!bt_list_empty(&sq->queue)) {
        if (sq->state == BT_SEQ_WAITING) {
            mc->queues.n_waiting--;
            bt_sched_fair_leave(&mc->queues.fair, sq->r->tenant);
        }
        mc->queues.n_starved -= sq->starved;
    }
    bt_list_remove(&sq->queue);
}

void bt_queue_plan(struct bt_sequence *sq)
{
    bt_queue_leave(sq);
    bt_queue_fits(sq);
    bt_list_insert_tail(&sq->r->mc->queues.planning, &sq->queue);
    bt_queue_kick(sq->r->mc);
}

/* Returns whether the request got a plan. A request that was refused while it waited does not count
 * as ended, because it made no room. */
static bool was_planned(const struct bt_request *r)
{
    const struct bt_list *l;
    bt_list_for_each (l, &r->sequences) {
        if (BT_CONTAINER_OF(l, struct bt_sequence, link)->epoch != 0) {
            return true;
        }
    }
    return false;
}

void bt_queue_count(struct bt_request *r)
{
    r->counted = true;
    r->mc->queues.n_active++;
    bt_classes_join(&r->mc->queues.running, r->spec.priority)->rows++;
}

void bt_queue_uncount(struct bt_request *r)
{
    if (r->counted) {
        r->counted = false;
        r->mc->queues.n_active--;
        r->mc->queues.n_late -= r->late;
        r->late = false;
        bt_classes_at(&r->mc->queues.running, r->spec.priority)->rows--;
        bt_classes_leave(&r->mc->queues.running, r->spec.priority);
        r->mc->rate.ended += was_planned(r);
        bt_queue_kick(r->mc);
    }
}

/* ---- room ---- */

void bt_queue_starve(struct bt_sequence *sq, uint64_t now_ns)
{
    struct bt_machine *mc = sq->r->mc;
    if (mc->queues.probe == sq) {
        uint32_t ms = BT_MIN(PROBE_FIRST_MS << BT_MIN(mc->queues.probe_misses, 8u), PROBE_MAX_MS);
        mc->queues.probe_misses++;
        mc->queues.probe_at_ns = now_ns + (uint64_t)ms * 1000000;
        mc->queues.probe = NULL;
    } else if (!crowded(mc)) {
        mc->queues.probe_misses = 0;
        mc->queues.probe_at_ns = now_ns + (uint64_t)PROBE_FIRST_MS * 1000000;
    }
    bt_queue_leave(sq);
    /* The plan found no room, so the tenant is not charged for it. */
    bt_sched_fair_serve(&mc->queues.fair, sq->r->tenant, -(double)sq->charged, sq->r->spec.weight);
    sq->charged = 0;
    sq->starved = true;
    if (sq->queued_ns == 0) {
        sq->queued_ns = now_ns;
    }
    bt_list_insert_tail(&mc->queues.starved, &sq->queue);
    mc->queues.n_starved++;
}

void bt_queue_fits(struct bt_sequence *sq)
{
    sq->starved = false;
    sq->charged = 0;
    if (sq->r->mc->queues.probe == sq) {
        sq->r->mc->queues.probe = NULL;
        bt_queue_room(sq->r->mc); /* there may be more room */
    }
}

void bt_queue_room(struct bt_machine *mc)
{
    if (!crowded(mc)) {
        return;
    }
    /* This also helps a probe that is being tried. If daemons that were full a moment ago refuse
     * it, it does not wait for the longest pause. */
    mc->queues.probe_misses = 0;
    mc->queues.probe_at_ns = 0;
    bt_queue_kick(mc);
}

void bt_queue_nobody(struct bt_machine *mc)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &mc->queues.starved) {
        struct bt_sequence *sq = queued_of(l);
        bt_queue_leave(sq);
        sq->starved = false;
        bt_list_insert_tail(&mc->queues.planning, &sq->queue);
    }
}

void bt_machine_probe(struct bt_machine *mc, uint64_t now_ns)
{
    mc->now_ns = now_ns;
    struct bt_sequence *sq = NULL;
    if (mc->queues.probe == NULL && now_ns >= mc->queues.probe_at_ns) {
        sq = pick(&mc->queues.starved, false, NULL);
    }
    if (sq == NULL) {
        return;
    }
    bt_queue_leave(sq);
    mc->queues.probe = sq;
    struct bt_sequence_input in = {.now_ns = now_ns};
    bt_sequence_event(sq, BT_EV_PLAN, &in);
}

/* ---- a round ---- */

bool bt_machine_wants_round(const struct bt_machine *mc)
{
    return mc->queues.look;
}

void bt_machine_round(struct bt_machine *mc, uint64_t now_ns)
{
    mc->now_ns = now_ns;
    mc->queues.look = false;
    mc->queues.round++;
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &mc->queues.waiting) {
        struct bt_sequence *sq = queued_of(l);
        if (sq->r->refuse >= 0) {
            refuse(sq->r);
        }
    }
}

static struct bt_sequence *next_placed(struct bt_machine *mc)
{
    struct bt_sequence *next = pick(&mc->queues.waiting, false, NULL);
    return next != NULL && mc->queues.n_active < places_for(mc, next->r->spec.priority) ? next
                                                                                        : NULL;
}

bool bt_machine_place(struct bt_machine *mc, uint64_t now_ns)
{
    mc->now_ns = now_ns;
    struct bt_sequence *next = next_placed(mc);
    if (next == NULL) {
        return false;
    }
    struct bt_sequence_input in = {.now_ns = now_ns};
    bt_sequence_event(next, BT_EV_PLACE, &in);
    return true;
}

/* An event may take any sequence out of the queue, because a request that fails takes all its
 * sequences with it. So a round marks each sequence with its number and moves it to the end
 * of the queue before its turn. New sequences come behind it. The round ends at the first
 * marked sequence. */
bool bt_machine_plan(struct bt_machine *mc, uint64_t now_ns)
{
    mc->now_ns = now_ns;
    struct bt_queues *q = &mc->queues;
    struct bt_sequence *sq = bt_list_empty(&q->planning) ? NULL : queued_of(q->planning.next);
    if (sq == NULL || sq->round == q->round) {
        return false;
    }
    sq->round = q->round;
    bt_list_remove(&sq->queue);
    bt_list_insert_tail(&q->planning, &sq->queue);
    if (crowded(mc) && now_ns >= sq->plan_at_ns) {
        struct bt_sched_reject rej = {0};
        if (too_late(sq, &rej)) {
            bt_sequence_overloaded(sq, &rej);
        } else {
            bt_queue_starve(sq, now_ns); /* behind those that came before it */
        }
        return true;
    }
    struct bt_sequence_input in = {.now_ns = now_ns};
    bt_sequence_event(sq, BT_EV_PLAN, &in);
    return true;
}

/* ---- how long it takes ---- */

void bt_queue_rate(struct bt_machine *mc, uint64_t now_ns)
{
    if (mc->rate.from_ns == 0 || mc->total == 0) {
        mc->rate.from_ns = now_ns;
        return;
    }
    if (now_ns - mc->rate.from_ns < RATE_NS) {
        return;
    }
    double per_s = mc->rate.ended / ((double)(now_ns - mc->rate.from_ns) / 1e9);
    mc->rate.ends_per_s += RATE_PART * (per_s - mc->rate.ends_per_s);
    mc->rate.ended = 0;
    mc->rate.from_ns = now_ns;
}

uint32_t bt_queue_retry_after_s(const struct bt_machine *mc)
{
    double ahead = mc->queues.n_waiting + mc->queues.n_starved;
    double s = mc->rate.ends_per_s > 0 ? ahead / mc->rate.ends_per_s : 1;
    return s < 1 ? 1 : s > RETRY_MAX_S ? RETRY_MAX_S : (uint32_t)ceil(s);
}
