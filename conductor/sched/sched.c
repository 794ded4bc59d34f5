/* The placement policies. Pure: see sched.h. Costs are in milliseconds, loads in shares of what a
 * worker has. */
#include "conductor/sched/sched.h"

#include <string.h>

/* A choice among candidates: smaller wins, equal ones are drawn by the request's random word. */
struct pick {
    uint32_t best;
    double cost;
    uint32_t ties;
};

static uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

static void pick_offer(struct pick *p, uint32_t index, double cost, uint64_t random)
{
    double eps = 1e-9 + p->cost * 1e-9;
    if (p->best == BT_SCHED_NONE || cost < p->cost - eps) {
        *p = (struct pick){index, cost, 1};
        return;
    }
    if (cost > p->cost + eps) {
        return;
    }
    /* Reservoir of one: every one of the equal candidates is as likely. */
    p->ties++;
    if (mix(random + p->ties) % p->ties == 0) {
        p->best = index;
    }
}

static uint32_t blocks_of(const struct bt_sched_request *req)
{
    return BT_DIV_UP(req->n_tokens, req->block_tokens);
}

/* At least the last token of a prompt is computed, so a cached prefix never covers all of it. */
static uint32_t cached_at(const struct bt_sched_snapshot *s, uint32_t kv,
                          const struct bt_sched_request *req, bool use_cache)
{
    if (kv == BT_SCHED_NONE || !use_cache) {
        return 0;
    }
    uint64_t tokens = (uint64_t)s->kvstores[kv].match_blocks * req->block_tokens;
    if (tokens >= req->n_tokens) {
        tokens = (req->n_tokens - 1) / req->block_tokens * req->block_tokens;
    }
    return (uint32_t)tokens;
}

static double rate_of(const struct bt_sched_params *c, const struct bt_sched_worker *w)
{
    return w->prefill_tokens_per_s > 0 ? w->prefill_tokens_per_s : c->prefill_tokens_per_s;
}

static double queue_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w)
{
    uint64_t tokens = BT_MAX(w->queued_prefill_tokens, w->own_prefill_tokens);
    return 1e3 * (double)tokens / rate_of(c, w);
}

/* Time of the hand-off that the prefill does not hide: it streams layer by layer beside it. */
static double handoff_ms(const struct bt_sched_params *c, const struct bt_sched_request *req,
                         uint32_t resident_there, double prefill)
{
    double bytes =
        (double)(req->n_tokens - BT_MIN(resident_there, req->n_tokens)) * req->token_bytes;
    double move = 1e3 * bytes / c->link_bytes_per_s;
    return move > prefill ? move - prefill : 0;
}

/* Could this worker and its kvstore ever hold the request? */
static bool fits(const struct bt_sched_snapshot *s, const struct bt_sched_worker *w,
                 const struct bt_sched_request *req)
{
    if (w->max_model_len != 0 && req->n_tokens > w->max_model_len) {
        return false;
    }
    if (w->pages_total != 0 && blocks_of(req) > w->pages_total) {
        return false;
    }
    const struct bt_sched_kvstore *kv = &s->kvstores[w->kvstore];
    return kv->slots_total == 0 || blocks_of(req) <= kv->slots_total;
}

/* Share of a decode worker that is in use once it has this request too; above 1 it has to wait. */
static double decode_load(const struct bt_sched_worker *w, const struct bt_sched_request *req)
{
    uint32_t active = BT_MAX(w->running + w->waiting, w->own_requests);
    uint32_t n = BT_MAX(req->n_choices, 1u);
    double rows = (double)(active + n) / (w->slots_total != 0 ? w->slots_total : 64);
    double pages = 0;
    if (w->pages_total != 0) {
        uint32_t one = BT_DIV_UP(req->n_tokens + BT_MIN(req->max_new, 512u), req->block_tokens);
        uint32_t shared = req->n_tokens / req->block_tokens; /* the prompt's full blocks */
        uint32_t need = shared + n * (one - shared);
        pages = (double)(w->pages_total - BT_MIN(w->pages_free, w->pages_total) + need) /
                w->pages_total;
    }
    double load = BT_MAX(rows, pages);
    return w->waiting > 0 ? load + 1 : load;
}

/* What place() works on; collected so that each step is a short function. */
struct job {
    const struct bt_sched_params *c;
    const struct bt_sched_snapshot *s;
    const struct bt_sched_request *req;
    bool use_cache;
    bool allow_draining;
    bool no_prefill_role, no_decode_role; /* nobody has that role: the others do both */
    bool seen_role, seen_kvstore;         /* why there was no candidate */
};

/* Has its kvstore, and may stay where it is. */
static bool present(const struct job *j, uint32_t i)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    return w->kvstore != BT_SCHED_NONE &&
           (j->allow_draining || (!w->draining && !j->s->kvstores[w->kvstore].draining));
}

static bool usable(struct job *j, uint32_t i, bool for_prefill, bool allow_avoided)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    bool role = for_prefill ? (w->prefill || j->no_prefill_role) : (w->decode || j->no_decode_role);
    if (!role) {
        return false;
    }
    j->seen_role = true;
    if (!present(j, i)) {
        return false;
    }
    j->seen_kvstore = true;
    if (!allow_avoided && (w->avoid || j->s->kvstores[w->kvstore].avoid)) {
        return false;
    }
    return fits(j->s, w, j->req);
}

static double prefill_cost(const struct job *j, uint32_t i, uint32_t decode, double *ttft_p)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    uint32_t cached = cached_at(j->s, w->kvstore, j->req, j->use_cache);
    double prefill = 1e3 * (double)(j->req->n_tokens - cached) / rate_of(j->c, w);
    double ttft = queue_ms(j->c, w) + prefill;
    /* The first token comes from the prefill worker; the hand-off delays the second, but a plan
     * that moves less is better for everybody, so it counts. */
    double move = 0;
    uint32_t kv_d = j->s->workers[decode].kvstore;
    if (decode != i && kv_d != w->kvstore) {
        move = handoff_ms(j->c, j->req, cached_at(j->s, kv_d, j->req, true), prefill);
    }
    *ttft_p = ttft;
    return j->use_cache ? ttft + move : queue_ms(j->c, w);
}

static uint32_t choose_decode(struct job *j, bool allow_avoided)
{
    struct pick p = {BT_SCHED_NONE, 0, 0};
    for (uint32_t i = 0; i < j->s->n_workers; i++) {
        if (!usable(j, i, false, allow_avoided)) {
            continue;
        }
        const struct bt_sched_worker *w = &j->s->workers[i];
        double cost = decode_load(w, j->req);
        if (j->use_cache) {
            /* What is there already need not be moved: worth up to a tenth of a worker's load. */
            cost -= 0.1 * cached_at(j->s, w->kvstore, j->req, true) / j->req->n_tokens;
        }
        pick_offer(&p, i, cost + 1, j->req->random);
    }
    return p.best;
}

static uint32_t choose_prefill(struct job *j, uint32_t decode, bool allow_avoided)
{
    struct pick p = {BT_SCHED_NONE, 0, 0};
    for (uint32_t i = 0; i < j->s->n_workers; i++) {
        double ttft;
        if (usable(j, i, true, allow_avoided)) {
            pick_offer(&p, i, prefill_cost(j, i, decode, &ttft), j->req->random);
        }
    }
    return p.best;
}

static bt_sched_verdict_t reject(struct bt_sched_reject *r, bt_sched_verdict_t v, uint32_t after_s,
                                 const char *why)
{
    *r = (struct bt_sched_reject){v, after_s, why};
    return v;
}

static bt_sched_verdict_t nobody(const struct job *j, bool prefill, struct bt_sched_reject *r)
{
    if (!j->seen_role) {
        return prefill ? reject(r, BT_SCHED_NO_PREFILL, 1, "no prefill worker is up")
                       : reject(r, BT_SCHED_NO_DECODE, 1, "no decode worker is up");
    }
    if (!j->seen_kvstore) {
        return reject(r, BT_SCHED_NO_KVSTORE, 1, "no kvstore is up on the workers' nodes");
    }
    return reject(r, BT_SCHED_TOO_LARGE, 0,
                  "the prompt does not fit into any worker's pages, context or kvstore");
}

/* The decode worker does the prefill too: nobody is apart, or the tail is short. */
static bool decide_local(const struct job *j, uint32_t decode, const char **reason_p)
{
    if (j->no_prefill_role || j->no_decode_role) {
        *reason_p = j->no_prefill_role ? "no_prefill_worker" : "no_decode_worker";
        return true;
    }
    const struct bt_sched_worker *d = &j->s->workers[decode];
    uint32_t tail = j->req->n_tokens - cached_at(j->s, d->kvstore, j->req, j->use_cache);
    if (j->c->local_prefill_tokens != 0 && tail <= j->c->local_prefill_tokens) {
        *reason_p = "short_tail";
        return true;
    }
    return false;
}

static double predicted_tbt_ms(const struct job *j, const struct bt_sched_worker *w)
{
    double step = w->step_ms > 0 ? w->step_ms : j->c->step_ms;
    double load = decode_load(w, j->req);
    return load > 1 ? step * load : step;
}

static bt_sched_verdict_t finish_plan(const struct job *j, uint32_t p, uint32_t d,
                                      struct bt_sched_plan *plan, struct bt_sched_reject *r)
{
    const struct bt_sched_worker *wp = &j->s->workers[p], *wd = &j->s->workers[d];
    const struct bt_sched_kvstore *kd = &j->s->kvstores[wd->kvstore];
    plan->prefill = p;
    plan->decode = d;
    plan->kv_prefill = wp->kvstore;
    plan->kv_decode = wd->kvstore;
    plan->both = p == d;
    /* Keeping costs cache space that others use: only while half of the slab is free. */
    plan->keep = plan->kv_prefill != plan->kv_decode &&
                 (uint64_t)2 * kd->slots_free >= (uint64_t)kd->slots_total + blocks_of(j->req);
    plan->cached_tokens = cached_at(j->s, wp->kvstore, j->req, true);
    (void)prefill_cost(j, p, d, &plan->ttft_ms);
    plan->tbt_ms = predicted_tbt_ms(j, wd);
    if (j->c->ttft_objective_ms != 0 && plan->ttft_ms > j->c->ttft_objective_ms) {
        double over_s = (plan->ttft_ms - j->c->ttft_objective_ms) / 1e3;
        uint32_t after = over_s < 1 ? 1 : over_s > 60 ? 60 : (uint32_t)over_s;
        return reject(r, BT_SCHED_OVERLOADED, after,
                      "the time to first token would miss its objective");
    }
    if (j->c->tbt_objective_ms != 0 && plan->tbt_ms > j->c->tbt_objective_ms) {
        return reject(r, BT_SCHED_OVERLOADED, 1,
                      "the time between tokens would miss its objective");
    }
    return BT_SCHED_PLANNED;
}

static bt_sched_verdict_t place_within(const struct bt_sched_params *c,
                                       const struct bt_sched_snapshot *s,
                                       const struct bt_sched_request *req, bool use_cache,
                                       bool allow_draining, struct bt_sched_plan *plan_p,
                                       struct bt_sched_reject *reject_p)
{
    struct job j = {
        .c = c, .s = s, .req = req, .use_cache = use_cache, .allow_draining = allow_draining};
    j.no_prefill_role = j.no_decode_role = true;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        /* A role counts as present only where it could be used. */
        if (present(&j, i)) {
            j.no_prefill_role = j.no_prefill_role && !s->workers[i].prefill;
            j.no_decode_role = j.no_decode_role && !s->workers[i].decode;
        }
    }
    if (j.no_prefill_role && j.no_decode_role) {
        return reject(reject_p, s->n_workers != 0 ? BT_SCHED_NO_KVSTORE : BT_SCHED_NO_DECODE, 1,
                      s->n_workers != 0 ? "no kvstore is up on the workers' nodes"
                                        : "no worker is up");
    }
    uint32_t d = choose_decode(&j, false);
    bool last_resort = d == BT_SCHED_NONE;
    if (last_resort) {
        d = choose_decode(&j, true);
    }
    if (d == BT_SCHED_NONE) {
        return nobody(&j, false, reject_p);
    }
    struct bt_sched_plan plan = {.reason = "apart"};
    uint32_t p = d;
    if (!decide_local(&j, d, &plan.reason)) {
        j.seen_role = j.seen_kvstore = false;
        p = choose_prefill(&j, d, false);
        if (p == BT_SCHED_NONE) {
            last_resort = true;
            p = choose_prefill(&j, d, true);
        }
        if (p == BT_SCHED_NONE) {
            return nobody(&j, true, reject_p);
        }
    }
    bt_sched_verdict_t v = finish_plan(&j, p, d, &plan, reject_p);
    if (v == BT_SCHED_PLANNED) {
        *plan_p = plan;
        plan_p->last_resort = last_resort;
    }
    return v;
}

static bt_sched_verdict_t place(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                                const struct bt_sched_request *req, bool use_cache,
                                struct bt_sched_plan *plan_p, struct bt_sched_reject *reject_p)
{
    bt_sched_verdict_t v = place_within(c, s, req, use_cache, false, plan_p, reject_p);
    if (v == BT_SCHED_PLANNED || v == BT_SCHED_OVERLOADED) {
        return v;
    }
    for (uint32_t i = 0; i < s->n_workers; i++) {
        if (s->workers[i].draining) { /* better there than nowhere */
            v = place_within(c, s, req, use_cache, true, plan_p, reject_p);
            if (v == BT_SCHED_PLANNED) {
                plan_p->draining = true;
            }
            return v;
        }
    }
    return v;
}

/* ---- explanations ---- */

/* Why worker i is not the one, for this use. */
static const char *why_not(const struct job *j, uint32_t i, bt_sched_use_t use,
                           const struct bt_sched_plan *plan)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    if (w->kvstore == BT_SCHED_NONE) {
        return "no kvstore is up on its node";
    }
    if (!present(j, i)) {
        return "its node is being drained";
    }
    if (!fits(j->s, w, j->req)) {
        return "too small: context, pages or slots of its kvstore";
    }
    if (w->avoid || j->s->kvstores[w->kvstore].avoid) {
        return "it, or its kvstore, has failed this request or was full";
    }
    if (plan == NULL) {
        return "the request was rejected";
    }
    if (use == BT_SCHED_FOR_PREFILL && plan->both) {
        return "the decode worker prefills this one itself";
    }
    return use == BT_SCHED_FOR_PREFILL ? "no better: queue, prefill and hand-off"
                                       : "no better: load and pages";
}

static struct bt_sched_candidate candidate(const struct job *j, uint32_t i, bt_sched_use_t use,
                                           const struct bt_sched_plan *plan)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    struct bt_sched_candidate c = {.worker = i, .use = use, .ttft_ms = -1, .tbt_ms = -1};
    c.cached_tokens = cached_at(j->s, w->kvstore, j->req, true);
    if (use == BT_SCHED_FOR_PREFILL) {
        c.queue_ms = queue_ms(j->c, w);
        c.ttft_ms =
            c.queue_ms + 1e3 * (double)(j->req->n_tokens - c.cached_tokens) / rate_of(j->c, w);
        c.chosen = plan != NULL && plan->prefill == i;
    } else {
        c.load = decode_load(w, j->req);
        c.tbt_ms = predicted_tbt_ms(j, w);
        c.chosen = plan != NULL && plan->decode == i;
    }
    c.verdict = c.chosen ? "chosen" : why_not(j, i, use, plan);
    return c;
}

uint32_t bt_sched_explain(const struct bt_sched_params *params,
                          const struct bt_sched_snapshot *snap, const struct bt_sched_request *req,
                          const struct bt_sched_plan *plan, struct bt_sched_candidate *out,
                          uint32_t cap)
{
    struct job j = {.c = params, .s = snap, .req = req, .use_cache = true};
    j.allow_draining = plan != NULL && plan->draining;
    uint32_t n = 0;
    for (int chosen = 1; chosen >= 0; chosen--) {
        for (uint32_t i = 0; i < snap->n_workers; i++) {
            for (int use = BT_SCHED_FOR_PREFILL; use <= BT_SCHED_FOR_DECODE; use++) {
                bool for_prefill = use == BT_SCHED_FOR_PREFILL;
                bool role = for_prefill ? snap->workers[i].prefill : snap->workers[i].decode;
                bool taken = plan != NULL && i == (for_prefill ? plan->prefill : plan->decode);
                if (taken != (chosen == 1) || (!role && !taken)) {
                    continue;
                }
                if (n < cap) { /* the rest is only counted */
                    out[n] = candidate(&j, i, (bt_sched_use_t)use, plan);
                }
                n++;
            }
        }
    }
    return n;
}

static bt_sched_verdict_t place_cache_aware(const struct bt_sched_params *c,
                                            const struct bt_sched_snapshot *s,
                                            const struct bt_sched_request *req,
                                            struct bt_sched_plan *plan_p,
                                            struct bt_sched_reject *reject_p)
{
    return place(c, s, req, true, plan_p, reject_p);
}

static bt_sched_verdict_t place_least_load(const struct bt_sched_params *c,
                                           const struct bt_sched_snapshot *s,
                                           const struct bt_sched_request *req,
                                           struct bt_sched_plan *plan_p,
                                           struct bt_sched_reject *reject_p)
{
    return place(c, s, req, false, plan_p, reject_p);
}

const struct bt_sched_policy bt_sched_cache_aware = {"cache-aware", place_cache_aware};
const struct bt_sched_policy bt_sched_least_load = {"least-load", place_least_load};

const struct bt_sched_policy *bt_sched_policy_find(const char *name)
{
    static const struct bt_sched_policy *const all[] = {&bt_sched_cache_aware,
                                                        &bt_sched_least_load};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (strcmp(all[i]->name, name) == 0) {
            return all[i];
        }
    }
    return NULL;
}

const char *bt_sched_verdict_name(bt_sched_verdict_t v)
{
    switch (v) {
    case BT_SCHED_PLANNED: return "planned";
    case BT_SCHED_NO_PREFILL: return "no_prefill";
    case BT_SCHED_NO_DECODE: return "no_decode";
    case BT_SCHED_NO_KVSTORE: return "no_kvstore";
    case BT_SCHED_TOO_LARGE: return "too_large";
    case BT_SCHED_OVERLOADED: return "overloaded";
    }
    return "unknown";
}
