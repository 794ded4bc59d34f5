/* Admission: does the best plan meet the objectives? Pure: see sched.h. */
#include "common/policy/sched/sched_priv.h"

#include <math.h>
#include <string.h>

static uint32_t seconds(double ms)
{
    return ms < 1000 ? 1 : ms > 60000 ? 60 : (uint32_t)ceil(ms / 1e3);
}

static bt_sched_verdict_t check_ttft(const struct bt_sched_params *c,
                                     const struct bt_sched_plan *plan, struct bt_sched_reject *r)
{
    /* A worker without a queue is judged without its learned slowness. Otherwise it could stay idle
     * for ever, and nothing new would be learned of it. */
    double ttft_ms = plan->first.queue_ms > 0 ? plan->first.most_ms
                                              : plan->first.waited_ms + plan->first.work_ms;
    if (c->objective.ttft_ms == 0 || ttft_ms <= c->objective.ttft_ms) {
        return BT_SCHED_PLANNED;
    }
    /* Retry when the queue is shorter by the excess. If computing alone takes too long, retrying
     * does not help. */
    bool never = plan->first.work_ms - plan->first.queue_ms > c->objective.ttft_ms;
    bt_sched_verdict_t v = bt_sched_refuse(
        r, BT_SCHED_OVERLOADED, never ? 0 : seconds(ttft_ms - c->objective.ttft_ms),
        never ? "the time to first token would miss its objective even without a queue"
              : "the time to first token would miss its objective");
    r->miss = BT_SCHED_MISS_TTFT;
    r->predicted_ms = ttft_ms;
    r->objective_ms = c->objective.ttft_ms;
    return v;
}

/* tbt_of: the predicted time between tokens of the plan's rows. Of a worker without rows the step
 * alone counts, for the same reason as in check_ttft. The gap of the hand-off is left out: it is
 * not the decode worker's load, and no wait makes it shorter. alone: is it such a worker?
 */
static bool alone(const struct bt_sched_snapshot *s, const struct bt_sched_plan *plan)
{
    const struct bt_sched_worker *d = &s->workers[plan->at.decode];
    return d->rows.running + d->rows.waiting + d->rows.landing == 0;
}
static double tbt_of(const struct bt_sched_snapshot *s, const struct bt_sched_plan *plan)
{
    return alone(s, plan) ? plan->gaps.step_ms : plan->gaps.tail_ms;
}

/* never: no row will end, so retrying does not help. */
static bt_sched_verdict_t check_tbt(const struct bt_sched_params *c,
                                    const struct bt_sched_snapshot *s, double tbt_ms, bool never,
                                    struct bt_sched_reject *r)
{
    double limit = bt_sched_tbt_limit(c, c->objective.tbt_ms);
    if (limit == 0 || tbt_ms <= limit) {
        return BT_SCHED_PLANNED;
    }
    /* Rows end one by one: after their mean life 1/e of them are left. */
    double life = s->forecast != NULL ? s->forecast->life_ms : 0;
    bt_sched_verdict_t v = bt_sched_refuse(
        r, BT_SCHED_OVERLOADED, never ? 0 : seconds(life * log(tbt_ms / limit)),
        never ? "the time between tokens would miss its objective even without other rows"
              : "the time between tokens would miss its objective");
    r->miss = BT_SCHED_MISS_TBT;
    r->by_decode = true;
    r->predicted_ms = tbt_ms;
    r->objective_ms = c->objective.tbt_ms;
    return v;
}

static bt_sched_verdict_t admit_none(const struct bt_sched_params *c,
                                     const struct bt_sched_snapshot *s,
                                     const struct bt_sched_request *req,
                                     const struct bt_sched_plan *plan, struct bt_sched_reject *r)
{
    (void)c;
    (void)s;
    (void)req;
    (void)plan;
    (void)r;
    return BT_SCHED_PLANNED;
}

static bt_sched_verdict_t admit_late(const struct bt_sched_params *c,
                                     const struct bt_sched_snapshot *s,
                                     const struct bt_sched_request *req,
                                     const struct bt_sched_plan *plan, struct bt_sched_reject *r)
{
    (void)s;
    (void)req;
    return check_ttft(c, plan, r);
}

static bt_sched_verdict_t admit_early(const struct bt_sched_params *c,
                                      const struct bt_sched_snapshot *s,
                                      const struct bt_sched_request *req,
                                      const struct bt_sched_plan *plan, struct bt_sched_reject *r)
{
    (void)req;
    bt_sched_verdict_t v = check_ttft(c, plan, r);
    return v == BT_SCHED_PLANNED ? check_tbt(c, s, tbt_of(s, plan), alone(s, plan), r) : v;
}

/* A row that finds no pages waits until other rows have ended, and such a wait is longer than a TBT
 * objective. So pages are used up to this share only, because workers never fill equally, and a
 * standard deviation of the expected pages and slots is kept free. */
#define PAGES_FULL 0.95

/* The share that a step of tbt_ms takes of the time that the TBT objective leaves beside the base
 * of a step. */
static double step_share(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                         double tbt_ms)
{
    double limit = bt_sched_tbt_limit(c, c->objective.tbt_ms);
    double base = w->speed.cost != NULL ? 1e-6 * w->speed.cost->base_ns : limit;
    return base < limit ? (tbt_ms - base) / (limit - base) : 0;
}

/* The predicted TBT at the end of the prefill, with the rows expected then spread evenly over the
 * decode workers, and this request's rows. *full_p: the largest share of a worker's pages, slots or
 * time between two tokens that they use (1: all that may be used; 0: not known, or no other row).
 * *alone_p: no other row is or will be there. */
static double expected_tbt_ms(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                              const struct bt_sched_request *req, const struct bt_sched_plan *plan,
                              double *full_p, bool *alone_p)
{
    *full_p = 0;
    *alone_p = alone(s, plan);
    const struct bt_sched_worker *d = &s->workers[plan->at.decode];
    struct bt_sched_pool pool;
    if (!bt_sched_pool_after(s, req->block_tokens, plan->first.ms, 1, &pool)) {
        return tbt_of(s, plan);
    }
    struct bt_sched_worker then = *d;
    then.rows.running = (uint32_t)pool.rows;
    *alone_p = *alone_p && then.rows.running == 0;
    if (then.rows.running == 0) {
        then.learned.tail = then.learned.stall_ms = 0; /* as in tbt_of */
    }
    then.rows.waiting = then.rows.landing = then.rows.own = 0;
    then.rows.kv_tokens = (uint64_t)pool.kv;
    uint64_t pages = BT_DIV_UP(then.rows.kv_tokens, (uint64_t)req->block_tokens);
    then.capacity.pages_free =
        then.capacity.pages - (uint32_t)BT_MIN(pages, (uint64_t)then.capacity.pages);
    then.rows.yield = (uint32_t)pool.yield_rows;
    then.rows.yield_pages = (uint32_t)pool.yield_pages;
    if (d->speed.cost == NULL && d->speed.step_ms > 0 && d->rows.running > 0) {
        /* Only the present step is known. It is scaled by the number of additional rows. */
        double grown = (double)then.rows.running / d->rows.running;
        return bt_sched_tbt_ms(c, &then, req) * BT_MAX(grown, 1);
    }
    double tbt = bt_sched_tbt_ms(c, &then, req);
    /* there is no other row, so a request that fits has room, and there is no row to wait for */
    if (*alone_p) {
        return tbt;
    }
    double full = 0, n_rows = BT_MAX(req->n_choices, 1u);
    if (then.capacity.pages != 0) {
        pages -= BT_MIN((uint64_t)then.rows.yield_pages, pages);
        double taken = (double)(pages + bt_sched_blocks_of(req)) + pool.kv_dev / req->block_tokens;
        full = taken / (then.capacity.pages * PAGES_FULL);
    }
    if (then.capacity.slots != 0) {
        double stay = BT_MAX(pool.rows - pool.yield_rows, 0);
        full = BT_MAX(full, (stay + n_rows + pool.rows_dev) / then.capacity.slots);
    }
    *full_p = BT_MAX(full, step_share(c, &then, tbt));
    return full > 1 ? full * BT_MAX(tbt, c->objective.tbt_ms) : tbt;
}

static bt_sched_verdict_t check_expected(const struct bt_sched_params *c,
                                         const struct bt_sched_snapshot *s,
                                         const struct bt_sched_request *req,
                                         const struct bt_sched_plan *plan, double *full_p,
                                         struct bt_sched_reject *r)
{
    bool nobody = false;
    double tbt_ms = expected_tbt_ms(c, s, req, plan, full_p, &nobody);
    return check_tbt(c, s, tbt_ms, nobody, r);
}

static bt_sched_verdict_t admit_predict(const struct bt_sched_params *c,
                                        const struct bt_sched_snapshot *s,
                                        const struct bt_sched_request *req,
                                        const struct bt_sched_plan *plan, struct bt_sched_reject *r)
{
    double full;
    bt_sched_verdict_t v = check_ttft(c, plan, r);
    return v == BT_SCHED_PLANNED ? check_expected(c, s, req, plan, &full, r) : v;
}

/* Refuses a request that takes too much of a stage. It may retry when the load has shrunk so far
 * that it would be admitted. */
static bt_sched_verdict_t too_dear(struct bt_sched_reject *r, const char *why, double ms,
                                   double most_ms, double shrink_ms)
{
    bt_sched_verdict_t v = bt_sched_refuse(r, BT_SCHED_OVERLOADED, seconds(shrink_ms), why);
    r->miss = BT_SCHED_MISS_PRICE;
    r->predicted_ms = ms;
    r->objective_ms = most_ms;
    return v;
}

static const char long_prefill[] =
    "its prefill is too long to be admitted while the queue has this length";
static const char large_row[] =
    "its KV is too large to be admitted while the decode workers are this full";

static double count_prefill(const struct bt_sched_snapshot *s)
{
    double n = 0;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        n += s->workers[i].prefill;
    }
    return n;
}

/* The price of decode workers: of the demand for their time and room the share ((1 - full) / (1 -
 * BT_SCHED_DECODE_FREE))^demand_price is admitted, the smallest requests first. If all requests are
 * of about the same size, none is refused for its size: differences below one bucket do not count.
 */
static bt_sched_verdict_t check_decode_price(const struct bt_sched_params *c,
                                             const struct bt_sched_snapshot *s,
                                             const struct bt_sched_plan *plan, double full,
                                             struct bt_sched_reject *r)
{
    if (c->objective.tbt_ms == 0 || s->decodes == NULL || c->price.demand <= 0 ||
        full <= BT_SCHED_DECODE_FREE) {
        return BT_SCHED_PLANNED;
    }
    double below = bt_sched_demand_below(s->decodes, plan->takes.decode_work * BT_DEMAND_STEP);
    double free = BT_MAX(1 - full, 0) / (1 - BT_SCHED_DECODE_FREE);
    if (below <= pow(free, c->price.demand)) {
        return BT_SCHED_PLANNED;
    }
    double then = 1 - (1 - BT_SCHED_DECODE_FREE) * pow(below, 1 / c->price.demand);
    double shrink = s->forecast != NULL ? s->forecast->life_ms * log(full / then) : 0;
    bt_sched_verdict_t v = too_dear(r, large_row, 0, 0, shrink);
    r->by_decode = true;
    return v;
}

/* The share of the demand for prefills that prefill workers have time for. Demand is measured over
 * at least the TTFT objective, because a burst that they compute within it is not too much. */
static double prefill_share(const struct bt_sched_params *c, const struct bt_sched_snapshot *s)
{
    double n_prefill = count_prefill(s);
    double asked = bt_sched_demand_rate(s->demand, s->now_ms, c->objective.ttft_ms);
    return asked > n_prefill ? n_prefill / asked : 1;
}

/* The price of a queue of prefills: long ones are refused first, but what prefill workers have time
 * for is admitted. */
static bt_sched_verdict_t check_prefill_price(const struct bt_sched_params *c,
                                              const struct bt_sched_snapshot *s,
                                              const struct bt_sched_request *req,
                                              const struct bt_sched_plan *plan,
                                              struct bt_sched_reject *r)
{
    if (c->objective.ttft_ms == 0) {
        return BT_SCHED_PLANNED;
    }
    double objective = c->objective.ttft_ms,
           left = objective - plan->first.queue_ms - req->waited_ms;
    double queue = BT_MAX(plan->first.queue_ms - BT_SCHED_BURST_MS, 0),
           free = BT_MAX(1 - queue / objective, 0);
    double most = left * free;
    if (plan->first.prefill_ms > most) {
        double share = sqrt(plan->first.prefill_ms / objective);
        return too_dear(r, long_prefill, plan->first.prefill_ms, most, objective * share - left);
    }
    if (s->demand == NULL || c->price.demand <= 0 || free >= 1) {
        return BT_SCHED_PLANNED;
    }
    double below = bt_sched_demand_below(s->demand, plan->takes.compute_ms);
    if (below <= pow(free, c->price.demand) || below <= prefill_share(c, s)) {
        return BT_SCHED_PLANNED;
    }
    double then = BT_SCHED_BURST_MS + objective * (1 - pow(below, 1 / c->price.demand));
    return too_dear(r, long_prefill, plan->takes.compute_ms,
                    bt_sched_demand_at(s->demand, pow(free, c->price.demand)),
                    plan->first.queue_ms - then);
}

static bt_sched_verdict_t admit_priced(const struct bt_sched_params *c,
                                       const struct bt_sched_snapshot *s,
                                       const struct bt_sched_request *req,
                                       const struct bt_sched_plan *plan, struct bt_sched_reject *r)
{
    double full = 0;
    bt_sched_verdict_t v = check_ttft(c, plan, r);
    if (v == BT_SCHED_PLANNED) {
        v = check_prefill_price(c, s, req, plan, r);
    }
    if (v == BT_SCHED_PLANNED) {
        v = check_expected(c, s, req, plan, &full, r);
    }
    return v == BT_SCHED_PLANNED ? check_decode_price(c, s, plan, full, r) : v;
}

bt_sched_verdict_t bt_sched_admit_decode(const struct bt_sched_params *params,
                                         const struct bt_sched_snapshot *snap,
                                         const struct bt_sched_request *req, uint32_t decode,
                                         struct bt_sched_reject *reject_p)
{
    double tbt_ms = bt_sched_tbt_ms(params, &snap->workers[decode], req);
    return check_tbt(params, snap, tbt_ms, false, reject_p);
}

const struct bt_sched_admission bt_sched_admit_none = {"none", admit_none, false};
const struct bt_sched_admission bt_sched_admit_late = {"late", admit_late, true};
const struct bt_sched_admission bt_sched_admit_early = {"early", admit_early, false};
const struct bt_sched_admission bt_sched_admit_predict = {"predict", admit_predict, false};

const struct bt_sched_admission bt_sched_admit_priced = {"priced", admit_priced, false};

const char bt_sched_admission_names[] = "none, late, early, predict or priced";

const struct bt_sched_admission *bt_sched_admission_find(const char *name)
{
    static const struct bt_sched_admission *const all[] = {
        &bt_sched_admit_none, &bt_sched_admit_late, &bt_sched_admit_early, &bt_sched_admit_predict,
        &bt_sched_admit_priced};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (strcmp(all[i]->name, name) == 0) {
            return all[i];
        }
    }
    return NULL;
}

bool bt_sched_late(const struct bt_sched_policy *policy, const struct bt_sched_params *params,
                   const struct bt_sched_snapshot *snap, const struct bt_sched_request *req,
                   struct bt_sched_plan *plan_p)
{
    struct bt_sched_plan plan;
    struct bt_sched_reject nowhere;
    if (policy->late == NULL || !(params->late.wait_ms > 0) ||
        policy->late(params, snap, req, &plan, &nowhere) != BT_SCHED_PLANNED) {
        return false;
    }
    *plan_p = plan;
    return true;
}

bt_sched_verdict_t bt_sched_decide(const struct bt_sched_policy *policy,
                                   const struct bt_sched_admission *admission,
                                   const struct bt_sched_params *params,
                                   const struct bt_sched_snapshot *snap,
                                   const struct bt_sched_request *req, struct bt_sched_plan *plan_p,
                                   struct bt_sched_reject *reject_p)
{
    struct bt_sched_plan plan;
    bt_sched_verdict_t v = policy->place(params, snap, req, &plan, reject_p);
    if (v == BT_SCHED_PLANNED) {
        v = admission->admit(params, snap, req, &plan, reject_p);
        if (v != BT_SCHED_PLANNED) {
            reject_p->compute_ms = plan.takes.compute_ms;
            reject_p->decode_work = plan.takes.decode_work;
            v = bt_sched_late(policy, params, snap, req, &plan) ? BT_SCHED_PLANNED : v;
        }
    }
    if (v == BT_SCHED_PLANNED) {
        *plan_p = plan;
    }
    return v;
}
