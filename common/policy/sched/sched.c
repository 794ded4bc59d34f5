/* Placement: which workers may take a request, which of them is the best by the policy's rule, and
 * the reason if none may. Pure: see sched.h. */
#include <math.h>

#include "common/policy/sched/sched_priv.h"

uint64_t bt_sched_mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

void bt_sched_pick_offer(struct bt_sched_pick *p, uint32_t index, double cost, uint64_t random)
{
    double eps = 1e-9 + p->cost * 1e-9;
    if (p->best == BT_SCHED_NONE || cost < p->cost - eps) {
        *p = (struct bt_sched_pick){index, cost, 1};
        return;
    }
    if (cost > p->cost + eps) {
        return;
    }
    /* A reservoir of one: equal candidates have the same chance. */
    p->ties++;
    if (bt_sched_mix(random + p->ties) % p->ties == 0) {
        p->best = index;
    }
}

const char *const bt_sched_reason_names[BT_SCHED_REASONS] = {
#define BT_SCHED_REASON(name, text, apart, both, meaning) text,
#include "common/policy/sched/reasons.def"
#undef BT_SCHED_REASON
};
const char *const bt_sched_reason_meanings[BT_SCHED_REASONS] = {
#define BT_SCHED_REASON(name, text, apart, both, meaning) meaning,
#include "common/policy/sched/reasons.def"
#undef BT_SCHED_REASON
};
const bool bt_sched_reason_of[BT_SCHED_REASONS][2] = {
#define BT_SCHED_REASON(name, text, apart, both, meaning) {apart, both},
#include "common/policy/sched/reasons.def"
#undef BT_SCHED_REASON
};

bool bt_sched_fits(const struct bt_sched_worker *w, const struct bt_sched_request *req)
{
    if (w->capacity.context_tokens != 0 && req->n_tokens > w->capacity.context_tokens) {
        return false;
    }
    if (w->capacity.pages != 0 && bt_sched_blocks_of(req) > w->capacity.pages) {
        return false;
    }
    return true;
}

bool bt_sched_fits_slab(const struct bt_sched_snapshot *s, const struct bt_sched_worker *w,
                        const struct bt_sched_request *req)
{
    const struct bt_sched_kvstore *kv = &s->kvstores[w->kvstore];
    return kv->slots_total == 0 || bt_sched_blocks_of(req) <= kv->slots_total;
}

/* Its kvstore is up, and both nodes are not drained, or drained nodes are allowed. */
bool bt_sched_present(const struct bt_sched_job *j, uint32_t i)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    return w->kvstore != BT_SCHED_NONE &&
           (j->allow_draining || (!w->draining && !j->s->kvstores[w->kvstore].draining));
}

static bool usable(const struct bt_sched_job *j, uint32_t i, bool for_prefill, bool allow_avoided)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    bool role = for_prefill ? (w->prefill || j->no_prefill_role) : (w->decode || j->no_decode_role);
    if (!role || !bt_sched_present(j, i)) {
        return false;
    }
    if (!allow_avoided && (w->avoid || j->s->kvstores[w->kvstore].avoid)) {
        return false;
    }
    return bt_sched_fits(w, j->req) && (j->beyond_slab || bt_sched_fits_slab(j->s, w, j->req));
}

/* A prompt that no slab holds is computed by its decode worker, and computing is most of the work.
 * So it goes where its prefix is. */
static double decode_cost(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal)
{
    struct bt_sched_estimate e;
    if (!j->beyond_slab || !j->rule->use_cache) {
        return j->rule->decode(j, i, ordinal);
    }
    j->rule->prefill(j, i, ordinal, i, &e);
    return e.cost;
}

static uint32_t choose_decode(struct bt_sched_job *j, bool allow_avoided)
{
    struct bt_sched_pick p = {BT_SCHED_NONE, 0, 0};
    uint32_t ordinal = 0;
    for (uint32_t i = 0; i < j->s->n_workers; i++) {
        if (usable(j, i, false, allow_avoided)) {
            bt_sched_pick_offer(&p, i, decode_cost(j, i, ordinal) + 1, j->req->random);
        }
        ordinal += j->s->workers[i].decode;
    }
    return p.best;
}

/* Sets *e_p if a worker is found. */
static uint32_t choose_prefill(struct bt_sched_job *j, uint32_t decode, bool allow_avoided,
                               struct bt_sched_estimate *e_p)
{
    struct bt_sched_pick p = {BT_SCHED_NONE, 0, 0};
    uint64_t random =
        bt_sched_mix(j->req->random + 1); /* a different random number from the decode worker's */
    uint32_t ordinal = 0;
    for (uint32_t i = 0; i < j->s->n_workers; i++) {
        const struct bt_sched_worker *w = &j->s->workers[i];
        /* Most of a thousand workers cannot win because of their queue alone. */
        bool hopeless = j->rule->queue && p.best != BT_SCHED_NONE &&
                        bt_sched_least_wait_ms(j->c, w) > p.cost * (1 + 1e-8) + 1e-8;
        if (!hopeless && usable(j, i, true, allow_avoided)) {
            struct bt_sched_estimate e;
            uint32_t before = p.best;
            j->rule->prefill(j, i, ordinal, decode, &e);
            bt_sched_pick_offer(&p, i, e.cost, random);
            if (p.best != before) {
                *e_p = e;
            }
        }
        ordinal += w->prefill;
    }
    return p.best;
}

/* The longest match; of several holders the one whose link is free first. */
static void find_best_match(struct bt_sched_job *j)
{
    struct bt_sched_pick p = {BT_SCHED_NONE, 0, 0};
    for (uint32_t k = 0; k < j->s->n_kvstores; k++) {
        const struct bt_sched_kvstore *kv = &j->s->kvstores[k];
        uint32_t tokens = kv->avoid ? 0 : bt_sched_cached_at(j->s, k, j->req);
        if (tokens == 0 || tokens < j->best_tokens) {
            continue;
        }
        if (tokens > j->best_tokens) {
            p.best = BT_SCHED_NONE;
            j->best_tokens = tokens;
        }
        bt_sched_pick_offer(&p, k, kv->send_busy_ms, bt_sched_mix(j->req->random));
    }
    j->best_kv = p.best;
    j->spread_tokens = p.best != BT_SCHED_NONE ? bt_sched_usable(j->req, j->s->spread_blocks) : 0;
}

bt_sched_verdict_t bt_sched_refuse(struct bt_sched_reject *r, bt_sched_verdict_t v,
                                   uint32_t after_s, const char *why)
{
    *r = (struct bt_sched_reject){.verdict = v, .retry_after_s = after_s, .reason = why};
    return v;
}

/* Workers of the role are up (survey), but none can hold the request. Reports the most tokens that
 * one could take, and which limit that is. */
static bt_sched_verdict_t too_large(const struct bt_sched_job *j, bool prefill,
                                    struct bt_sched_reject *r)
{
    uint64_t most = 0;
    const char *why = NULL;
    for (uint32_t i = 0; i < j->s->n_workers; i++) {
        const struct bt_sched_worker *w = &j->s->workers[i];
        uint64_t pages = (uint64_t)w->capacity.pages * j->req->block_tokens;
        uint64_t context =
            w->capacity.context_tokens != 0 ? w->capacity.context_tokens : UINT32_MAX;
        if ((prefill ? w->prefill || j->no_prefill_role : w->decode || j->no_decode_role) &&
            bt_sched_present(j, i) && (why == NULL || BT_MIN(pages, context) > most)) {
            most = BT_MIN(pages, context);
            why = pages < context ? "no worker has KV pages for this prompt: raise engine.pages or "
                                    "engine.mem, or send fewer tokens"
                                  : "the prompt is longer than any worker's context: send fewer "
                                    "tokens, or serve a model with a longer one";
        }
    }
    bt_sched_refuse(r, BT_SCHED_TOO_LARGE, 0,
                    why != NULL ? why : "the prompt does not fit into any worker's pages");
    r->fits_tokens = (uint32_t)most;
    return BT_SCHED_TOO_LARGE;
}

/* Decides whether the decode worker also computes the prompt: if a role is missing, or if the KV
 * could not be handed over. */
static bool decide_local(const struct bt_sched_job *j, bt_sched_reason_t *reason_p)
{
    if (j->beyond_slab) {
        *reason_p = BT_SCHED_LARGER_THAN_SLAB;
        return true;
    }
    if (j->req->one_worker) {
        *reason_p = BT_SCHED_ONE_WORKER;
        return true;
    }
    if (j->no_prefill_role || j->no_decode_role) {
        *reason_p = j->no_prefill_role ? BT_SCHED_NO_PREFILL_WORKER : BT_SCHED_NO_DECODE_WORKER;
        return true;
    }
    return false;
}

/* The time in which decode worker w computes the prompt from `cached` on: beside its rows, or, if
 * rows are packed on other workers, as a prefill worker does. < 0: it has no room. */
static double decode_side_ms(const struct bt_sched_job *j, const struct bt_sched_worker *w,
                             uint32_t cached, double *queue_p)
{
    double over = isfinite(j->least_queue_ms) ? j->least_queue_ms : 0;
    if (j->packing && bt_sched_row_free(w)) {
        *queue_p = w->queue.ms;
        return bt_sched_compute_ms(j->c, w, j->req, cached);
    }
    return j->places_short ? -1 : bt_sched_mixed_ms(j->c, j->s, w, j->req, cached, over, queue_p);
}

bool bt_sched_estimate_mixed(const struct bt_sched_job *j, uint32_t i, struct bt_sched_estimate *e)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    const struct bt_sched_kvstore *kv = &j->s->kvstores[w->kvstore];
    double queue = 0, there = 0;
    if (w->speed.cost == NULL || w->rows.waiting > 0 || !(bt_sched_mixed_step(j->c, w) > 0)) {
        return false;
    }
    uint32_t local = bt_sched_cached_at(j->s, w->kvstore, j->req);
    *e = (struct bt_sched_estimate){
        .cached_tokens = local, .fetch_from = BT_SCHED_NONE, .beside = true};
    if (j->c->place.fetch_ratio > 0 && j->best_tokens > local) {
        there =
            BT_MAX(j->s->kvstores[j->best_kv].send_busy_ms, kv->recv_busy_ms) +
            bt_sched_move_ms(j->c, j->s, j->req, j->best_kv, w->kvstore, j->best_tokens - local);
        e->cached_tokens = j->best_tokens;
        e->fetch_from = j->best_kv;
        e->fetch_tokens = j->best_tokens - local;
    }
    e->prefill_ms = decode_side_ms(j, w, e->cached_tokens, &queue);
    if (e->prefill_ms < 0) {
        return false;
    }
    e->local_ms = decode_side_ms(j, w, local, &queue);
    e->queue_ms = queue;
    e->ttft_ms = BT_MAX(queue, there) + e->prefill_ms;
    e->cost = e->ttft_ms;
    return true;
}

static bool mixes(const struct bt_sched_job *j)
{
    return j->rule->mixed && j->c->mixed.step_ms > 0;
}

/* Rows last longer where prompts share their steps, and keep their slots meanwhile. Would all slots
 * be taken if that went on until this prompt becomes a row? Then no prompt should be computed
 * beside rows, so that steps become short. This uses the forecast of admission, so that prompts
 * beside rows stop before a request is refused. Returns the rows expected on each worker, or 0. */
static uint32_t places_short(const struct bt_sched_job *j, uint32_t decode)
{
    const struct bt_sched_worker *w = &j->s->workers[decode];
    struct bt_sched_pool pool;
    double at = isfinite(j->least_queue_ms) ? j->least_queue_ms : 0;
    double step = bt_sched_mixed_step(j->c, w);
    double slow = BT_MAX(step / bt_sched_full_step_ms(j->c, w, j->req), 1);
    bool is_short = w->capacity.slots != 0 &&
                    bt_sched_pool_after(j->s, j->req->block_tokens, at, slow, &pool) &&
                    pool.rows - pool.yield_rows > w->capacity.slots;
    return is_short ? (uint32_t)ceil(pool.rows) : 0;
}

/* The decode worker whose first token would come before prefill worker p's estimate, if there is
 * one; *e_p becomes its estimate. */
static uint32_t choose_mixed(struct bt_sched_job *j, uint32_t p, struct bt_sched_estimate *e_p)
{
    struct bt_sched_pick best = {BT_SCHED_NONE, 0, 0};
    struct bt_sched_estimate e, found = *e_p;
    for (uint32_t i = 0; i < j->s->n_workers; i++) {
        /* A free prefill worker keeps the prompt: prompts beside rows slow the rows down.
         */
        if (j->s->workers[i].decode && i != p && usable(j, i, false, false) &&
            bt_sched_estimate_mixed(j, i, &e) && e.cost < e_p->ttft_ms) {
            uint32_t before = best.best;
            bt_sched_pick_offer(&best, i, e.cost, j->req->random);
            if (best.best != before) {
                found = e;
            }
        }
    }
    *e_p = found;
    return best.best;
}

static void finish_plan(const struct bt_sched_job *j, uint32_t p, uint32_t d,
                        const struct bt_sched_estimate *e, struct bt_sched_plan *plan)
{
    const struct bt_sched_worker *wp = &j->s->workers[p], *wd = &j->s->workers[d];
    const struct bt_sched_kvstore *kd = &j->s->kvstores[wd->kvstore];
    plan->at.prefill = p;
    plan->at.decode = d;
    plan->at.kv_prefill = wp->kvstore;
    plan->at.kv_decode = wd->kvstore;
    plan->at.both = p == d;
    if (j->beyond_slab) { /* other requests use the slab as well, so one gets at most half of it */
        uint32_t blocks = BT_MAX(kd->slots_total / 2, 1u);
        plan->prefix.grant_tokens =
            BT_MIN(blocks, bt_sched_blocks_of(j->req) - 1) * j->req->block_tokens;
    }
    /* Kept blocks take cache space from others, so they are kept only while half of the slab is
     * free. */
    plan->prefix.keep =
        plan->at.kv_prefill != plan->at.kv_decode &&
        (uint64_t)2 * kd->slots_free >= (uint64_t)kd->slots_total + bt_sched_blocks_of(j->req);
    plan->prefix.cached_tokens = e->cached_tokens;
    plan->prefix.fetch_from = e->fetch_from;
    plan->prefix.fetch_tokens = e->fetch_tokens;
    plan->prefix.end_tokens = BT_MAX(plan->prefix.cached_tokens, e->prefix_tokens);
    plan->prefix.recompute_tokens_per_s =
        e->fetch_tokens != 0 && e->local_ms > e->prefill_ms
            ? 1e3 * e->fetch_tokens / (e->local_ms - e->prefill_ms)
            : 0;
    plan->first.prefill_ms = e->prefill_ms;
    plan->takes.compute_ms = bt_sched_compute_ms(j->c, wp, j->req, plan->prefix.cached_tokens);
    plan->takes.alone_ms = e->beside ? plan->takes.compute_ms : plan->first.prefill_ms;
    plan->first.beside_ms = e->beside_ms;
    plan->first.queue_ms = e->wait_ms;
    plan->first.overhead_ms = wp->learned.overhead_ms;
    plan->first.waited_ms = j->req->waited_ms;
    plan->first.work_ms = e->ttft_ms;
    double ttft_ms = bt_sched_learned_ttft(&wp->learned, e->ttft_ms);
    plan->first.ms = j->req->waited_ms + ttft_ms;
    plan->first.most_ms = j->req->waited_ms + BT_MAX(wp->learned.spread, 1) * ttft_ms;
    plan->gaps.step_ms = bt_sched_step_then_ms(j->c, wd, j->req, ttft_ms);
    plan->gaps.mixed_ms = bt_sched_mixed_step(j->c, wd);
    plan->takes.row_ms = bt_sched_answer(j->req) * bt_sched_full_step_ms(j->c, wd, j->req);
    plan->gaps.tail_ms = bt_sched_learned_gap(&wd->learned, plan->gaps.step_ms);
    plan->takes.decode_work = bt_sched_decode_work(wd, j->req);
    uint32_t more = j->req->likely_new != 0 ? j->req->likely_new : j->req->max_new;
    plan->gaps.ms = bt_sched_learned_tbt(&wd->learned, plan->gaps.step_ms, plan->gaps.mixed_ms,
                                         more - BT_MIN(more, 1u), !plan->at.both);
}

/* ---- late ---- */

/* The share of prefill workers' time that is left for late work, because prompts in time go first;
 * from the recently admitted work. 0: nothing is left. */
static double share_left(const struct bt_sched_job *j)
{
    double asked = 0;
    if (j->s->let_in != NULL) {
        asked = bt_sched_demand_rate(j->s->let_in, j->s->now_ms, BT_SCHED_BURST_MS);
    }
    return BT_MAX(1 - asked / BT_MAX(j->no_prefill_role ? j->n_decode : j->n_prefill, 1u), 0);
}

/* Is this late prompt too long? Of the late work only the share that prefill workers have time for
 * is admitted, the shortest prompts first. More would make all of them wait longer, until the next
 * turn of a session came before its prefix was there. */
static bool too_much_late(const struct bt_sched_job *j, double compute_ms)
{
    double n = BT_MAX(j->no_prefill_role ? j->n_decode : j->n_prefill, 1u);
    double asked = 0, have = share_left(j) * n;
    if (j->s->late_demand != NULL) {
        asked = bt_sched_demand_rate(j->s->late_demand, j->s->now_ms, BT_SCHED_BURST_MS);
    }
    return asked > have && bt_sched_demand_below(j->s->late_demand, compute_ms) > have / asked;
}

/* Estimates a late prompt at worker p. False: it would wait there for too long, or make other late
 * prompts wait for too long. The longer it waits, the shorter its own prefill must be, because
 * prefixes of short prompts are used again as often as those of long ones. */
static bool estimate_late(const struct bt_sched_job *j, uint32_t p, uint32_t d,
                          struct bt_sched_estimate *e)
{
    const struct bt_sched_worker *w = &j->s->workers[p];
    double left = share_left(j), before = bt_sched_queue_ms(j->c, w) + w->queue.late_ms;
    if (before > 0 && !(before + left * j->req->waited_ms < left * j->c->late.wait_ms)) {
        return false;
    }
    j->rule->prefill(j, p, 0, d, e);
    e->queue_ms = before > 0 ? before / left : 0;
    e->ttft_ms = BT_MAX(e->ttft_ms, e->queue_ms + e->prefill_ms);
    double free = 1 - e->queue_ms / j->c->late.wait_ms;
    return before <= 0 || e->prefill_ms <= j->c->late.wait_ms * free * free;
}

/* The worker whose first token of a late prompt would come first. p: the worker that it would have
 * if it were in time. p == d: one worker does both; if no worker has the prefill role alone, any of
 * them may. */
static uint32_t choose_late(const struct bt_sched_job *j, uint32_t p, uint32_t d,
                            struct bt_sched_estimate *e_p)
{
    struct bt_sched_pick best = {BT_SCHED_NONE, 0, 0};
    bool apart = p != d;
    for (uint32_t i = 0; i < j->s->n_workers; i++) {
        struct bt_sched_estimate e;
        bool may = apart ? usable(j, i, true, false)
                         : i == d || (j->no_prefill_role && usable(j, i, false, false));
        if (!may || !estimate_late(j, i, apart ? d : i, &e)) {
            continue;
        }
        uint32_t before = best.best;
        bt_sched_pick_offer(&best, i, e.ttft_ms, j->req->random);
        if (best.best != before) {
            *e_p = e;
        }
    }
    return best.best;
}

/* Places a refused request where it delays no request that is in time. */
static bt_sched_verdict_t place_late(const struct bt_sched_job *j, uint32_t p, uint32_t d,
                                     struct bt_sched_plan *plan, struct bt_sched_reject *r)
{
    struct bt_sched_estimate e;
    bool apart = p != d;
    p = choose_late(j, p, d, &e);
    if (p == BT_SCHED_NONE) {
        return bt_sched_refuse(r, BT_SCHED_OVERLOADED, 0,
                               "no prefill worker has time to serve it late");
    }
    d = apart ? d : p;
    /* A late row makes the steps of others longer, so it goes only to decode workers whose room has
     * no price. */
    struct bt_sched_params others = *j->c;
    others.objective.tbt_ms = bt_sched_late_tbt_ms(j->c, &j->s->workers[d]);
    if (bt_sched_pressure_then(&others, j->s, d, j->req, e.ttft_ms) > BT_SCHED_DECODE_FREE) {
        return bt_sched_refuse(r, BT_SCHED_OVERLOADED, 0,
                               "no decode worker has room to serve it late");
    }
    finish_plan(j, p, d, &e, plan);
    if (e.queue_ms > 0 && too_much_late(j, plan->takes.compute_ms)) {
        return bt_sched_refuse(r, BT_SCHED_OVERLOADED, 0,
                               "other requests that are served late already use all that is left");
    }
    plan->reason = BT_SCHED_BACKGROUND;
    plan->background = true;
    plan->first.queue_ms = e.queue_ms;
    return BT_SCHED_PLANNED;
}

/* Collects what the following choices need of the whole cluster. */
static bt_sched_verdict_t survey(struct bt_sched_job *j, struct bt_sched_reject *reject_p)
{
    const struct bt_sched_snapshot *s = j->s;
    j->best_kv = BT_SCHED_NONE;
    j->no_prefill_role = j->no_decode_role = true;
    j->least_queue_ms = INFINITY;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        const struct bt_sched_worker *w = &s->workers[i];
        j->n_prefill += w->prefill;
        j->n_decode += w->decode;
        /* A role counts as present only if a worker can be used in it. */
        if (bt_sched_present(j, i)) {
            j->no_prefill_role = j->no_prefill_role && !w->prefill;
            j->no_decode_role = j->no_decode_role && !w->decode;
        }
        if (w->prefill) {
            j->least_queue_ms = BT_MIN(j->least_queue_ms, bt_sched_queue_ms(j->c, w));
        }
    }
    if (j->no_prefill_role && j->no_decode_role) {
        return bt_sched_refuse(
            reject_p, s->n_workers != 0 ? BT_SCHED_NO_KVSTORE : BT_SCHED_NO_DECODE, 1,
            s->n_workers != 0 ? "no kvstore is up on the workers' nodes" : "no worker is up");
    }
    if (j->rule->fetch && j->c->place.fetch_ratio > 0) {
        find_best_match(j);
    }
    j->packing = bt_sched_packs(j);
    return BT_SCHED_PLANNED;
}

/* places_short, if too few slots are the only reason why no decode worker has the first token
 * before prefill worker p's estimate e; else 0. */
static uint32_t for_want_of_places(const struct bt_sched_job *j, uint32_t p,
                                   const struct bt_sched_estimate *e)
{
    struct bt_sched_job enough = *j;
    struct bt_sched_estimate there = *e;
    enough.places_short = 0;
    return j->places_short != 0 && choose_mixed(&enough, p, &there) != BT_SCHED_NONE
               ? j->places_short
               : 0;
}

bool bt_sched_survey_mixed(struct bt_sched_job *j, uint32_t decode)
{
    struct bt_sched_reject nobody_up;
    if (survey(j, &nobody_up) != BT_SCHED_PLANNED) {
        return false;
    }
    j->places_short = decode != BT_SCHED_NONE ? places_short(j, decode) : 0;
    return true;
}

/* Plans the prefill on a decode worker whose first token would come before prefill worker p's
 * estimate e. p == d: no worker has the prefill role alone, so all decode workers are compared.
 * False: there is no such worker. */
static bool place_mixed(struct bt_sched_job *j, uint32_t p, uint32_t d, struct bt_sched_estimate *e,
                        struct bt_sched_plan *plan)
{
    bool all_both = p == d && j->no_prefill_role;
    if (!mixes(j) || (p == d && !all_both)) {
        return false;
    }
    e->ttft_ms = all_both ? INFINITY : e->ttft_ms;
    uint32_t m = choose_mixed(j, all_both ? BT_SCHED_NONE : p, e);
    if (m == BT_SCHED_NONE) {
        plan->places_wanted = all_both ? 0 : for_want_of_places(j, p, e);
        return false;
    }
    bool spare = j->packing && bt_sched_row_free(&j->s->workers[m]);
    plan->reason = all_both ? plan->reason : spare ? BT_SCHED_SPARE : BT_SCHED_MIXED;
    bool over = !j->req->one_worker && bt_sched_hands_over(j, m, d, e->ttft_ms);
    finish_plan(j, m, over ? d : m, e, plan);
    plan->first.queue_ms = e->queue_ms;
    return true;
}

static bt_sched_verdict_t place_within(const struct bt_sched_job *want,
                                       struct bt_sched_plan *plan_p,
                                       struct bt_sched_reject *reject_p)
{
    struct bt_sched_job j = *want;
    bt_sched_verdict_t v = survey(&j, reject_p);
    if (v != BT_SCHED_PLANNED) {
        return v;
    }
    uint32_t d = choose_decode(&j, false);
    bool last_resort = d == BT_SCHED_NONE;
    if (last_resort) {
        d = choose_decode(&j, true);
    }
    if (d == BT_SCHED_NONE) {
        return too_large(&j, false, reject_p);
    }
    struct bt_sched_plan plan = {.reason = BT_SCHED_APART};
    uint32_t p = d;
    struct bt_sched_estimate e;
    if (!decide_local(&j, &plan.reason)) {
        p = choose_prefill(&j, d, false, &e);
        if (p == BT_SCHED_NONE) {
            last_resort = true;
            p = choose_prefill(&j, d, true, &e);
        }
        if (p == BT_SCHED_NONE) {
            return too_large(&j, true, reject_p);
        }
    }
    if (j.late) {
        v = place_late(&j, p, d, &plan, reject_p);
        if (v != BT_SCHED_PLANNED) {
            return v;
        }
    } else {
        j.places_short = mixes(&j) ? places_short(&j, d) : 0;
        if (!place_mixed(&j, p, d, &e, &plan)) {
            if (p == d) { /* there was no choice of a prefill worker */
                j.rule->prefill(&j, d, 0, d, &e);
            }
            finish_plan(&j, p, d, &e, &plan);
        }
    }
    plan.last_resort = last_resort;
    *plan_p = plan;
    return BT_SCHED_PLANNED;
}

/* Places the request where all of its KV can go through the slab; otherwise on a worker that does
 * both and needs no slab. */
static bt_sched_verdict_t place_somehow(struct bt_sched_job *j, struct bt_sched_plan *plan_p,
                                        struct bt_sched_reject *reject_p)
{
    j->beyond_slab = false;
    bt_sched_verdict_t v = place_within(j, plan_p, reject_p);
    j->beyond_slab = true;
    return v == BT_SCHED_TOO_LARGE ? place_within(j, plan_p, reject_p) : v;
}

static bt_sched_verdict_t place(struct bt_sched_job *j, struct bt_sched_plan *plan_p,
                                struct bt_sched_reject *reject_p)
{
    bt_sched_verdict_t v = place_somehow(j, plan_p, reject_p);
    if (v == BT_SCHED_PLANNED || v == BT_SCHED_OVERLOADED) {
        return v;
    }
    for (uint32_t i = 0; i < j->s->n_workers; i++) {
        if (j->s->workers[i].draining) { /* a drained node is better than none */
            j->allow_draining = true;
            v = place_somehow(j, plan_p, reject_p);
            if (v == BT_SCHED_PLANNED) {
                plan_p->draining = true;
            }
            return v;
        }
    }
    return v;
}

bt_sched_verdict_t bt_sched_place(const struct bt_sched_params *c,
                                  const struct bt_sched_snapshot *s,
                                  const struct bt_sched_request *req,
                                  const struct bt_sched_rule *rule, struct bt_sched_plan *plan_p,
                                  struct bt_sched_reject *reject_p)
{
    struct bt_sched_job j = {.c = c, .s = s, .req = req, .rule = rule};
    return place(&j, plan_p, reject_p);
}

bt_sched_verdict_t
bt_sched_place_late(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                    const struct bt_sched_request *req, const struct bt_sched_rule *rule,
                    struct bt_sched_plan *plan_p, struct bt_sched_reject *reject_p)
{
    struct bt_sched_job j = {.c = c, .s = s, .req = req, .rule = rule, .late = true};
    return place(&j, plan_p, reject_p);
}
