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

#define PROBE_FIRST_MS 50u
#define PROBE_MAX_MS   500u
#define RATE_NS        1000000000ull /* between two counts of ended requests */
#define RATE_PART      0.3           /* weight of a count against those before */
#define RETRY_MAX_S    60

static struct bt_sequence *queued_of(struct bt_list *l)
{
    return BT_CONTAINER_OF(l, struct bt_sequence, queue);
}

const char bt_queue_full_text[] =
    "too many requests are waiting already, in all or of this API key (conductor.max_waiting)";

static void refuse(struct bt_request *r)
{
    switch (r->refuse) {
    case BT_REJECT_QUEUE_FULL:
        bt_request_fail(r, r->refuse, 429, bt_queue_retry_after_s(r->mc), bt_queue_full_text);
        return;
    case BT_REJECT_OVERLOADED:
        bt_request_fail(r, r->refuse, 429, bt_queue_retry_after_s(r->mc),
                        "the time to first token would miss its objective: those who wait already "
                        "would take longer");
        return;
    case BT_REJECT_DRAINING:
        bt_request_fail(r, r->refuse, 503, 1, "this conductor is being stopped");
        return;
    default:
        bt_request_fail(
            r, BT_REJECT_INVALID, 400, 0,
            "the prompt has no token or one outside the vocabulary, no token is asked for, or "
            "n is above 16");
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

/* Would the sequence miss its objective after waiting for its turn? It is then refused at once, not
 * when its turn comes. */
static bool too_late(struct bt_sequence *sq)
{
    struct bt_sched_reject rej;
    return bt_sequence_hopeless(sq, sq->r->mc->now_ns,
                                bt_queue_wait_ms(sq->r->mc, sq->r->spec.priority), &rej);
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

bool bt_queue_at_once(const struct bt_machine *mc, int32_t priority)
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
 * sequences of its tenant; NULL: all. */
static struct bt_sequence *pick(struct bt_list *queue, bool last, const struct bt_request *of)
{
    struct bt_sequence *best = NULL;
    struct bt_sched_turn best_turn = {0};
    struct bt_list *l;
    bt_list_for_each (l, queue) {
        struct bt_sequence *sq = queued_of(l);
        struct bt_sched_turn t = turn_of(sq);
        bool better = best != NULL && (last ? bt_sched_turn_before(&best_turn, &t)
                                            : bt_sched_turn_before(&t, &best_turn));
        bool meant = sq->r->refuse < 0 && (of == NULL || sq->r->tenant == of->tenant);
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

uint32_t bt_queue_queued(const struct bt_machine *mc)
{
    return mc->queues.n_waiting + mc->queues.n_starved + (mc->queues.probe != NULL);
}

/* A tenant may have half of the waiting places. The last eighth is for tenants that have none. So
 * neither one tenant nor a few together can fill the queue. */
static uint32_t share_of(const struct bt_machine *mc)
{
    return (mc->conf.max_waiting + 1) / 2;
}

bool bt_queue_share_taken(const struct bt_machine *mc, const char *tenant)
{
    if (tenant == NULL) {
        return false; /* without API keys all clients are one tenant */
    }
    uint64_t id = bt_hash64(tenant, strlen(tenant), 0);
    uint32_t own = count_of(&mc->queues.waiting, id) + count_of(&mc->queues.starved, id);
    uint32_t queued = bt_queue_queued(mc), most = mc->conf.max_waiting;
    bool last = queued >= most - most / 8 && queued < most; /* a full queue refuses by class */
    return own >= share_of(mc) || (own > 0 && last);
}

uint32_t bt_machine_prompts_max(const struct bt_machine *mc, bool has_tenant)
{
    return mc->conf.max_running + (has_tenant ? share_of(mc) : mc->conf.max_waiting);
}

/* Makes a place in the full queue for r: refuses a request of a lower class instead, if there is
 * one (own: only of the same tenant). */
static bool displace(const struct bt_request *r, bool own)
{
    struct bt_sequence *sq = pick(&r->mc->queues.waiting, true, own ? r : NULL);
    if (sq == NULL || sq->r->spec.priority <= r->spec.priority) {
        return false;
    }
    sq->r->refuse = BT_REJECT_QUEUE_FULL;
    return true;
}

void bt_queue_enter(struct bt_sequence *sq)
{
    struct bt_request *r = sq->r;
    struct bt_machine *mc = r->mc;
    bool at_once = bt_queue_at_once(mc, r->spec.priority);
    bool share = !at_once && bt_queue_share_taken(mc, r->spec.tenant);
    bool full = !at_once && (share || bt_queue_queued(mc) >= mc->conf.max_waiting);
    if (mc->draining) {
        r->refuse = BT_REJECT_DRAINING;
    } else if (r->refuse < 0 && full && !displace(r, share)) {
        r->refuse = BT_REJECT_QUEUE_FULL;
    } else if (r->refuse < 0 && !at_once && too_late(sq)) {
        r->refuse = BT_REJECT_OVERLOADED;
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

/* Did the request get a plan? A request that was refused while it waited does not count as ended,
 * because it made no room. */
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
        if (!bt_sequence_refused_early(sq, now_ns, bt_queue_wait_ms(mc, sq->r->spec.priority))) {
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
