/* The policies: each is a rule for the cost of a prefill and of a decode worker. Pure: see sched.h.
 */
#include "common/policy/sched/sched_priv.h"

#include <string.h>

/* ---- what several rules share ---- */

static const struct bt_sched_worker *worker(const struct bt_sched_job *j, uint32_t i)
{
    return &j->s->workers[i];
}

/* The time in the queue, then the prefill of the tokens that are not cached on the worker's own
 * node. */
static void estimate_local(const struct bt_sched_job *j, uint32_t i, struct bt_sched_estimate *e)
{
    const struct bt_sched_worker *w = worker(j, i);
    e->fetch_from = BT_SCHED_NONE;
    e->fetch_tokens = e->prefix_tokens = 0;
    e->beside = false;
    /* The node's kvstore uses the blocks that it has, whether the policy considers them or not. */
    e->cached_tokens = bt_sched_cached_at(j->s, w->kvstore, j->req);
    e->prefill_ms = bt_sched_prefill_ms(j->c, w, j->req, j->req->n_tokens, e->cached_tokens);
    e->local_ms = e->prefill_ms;
    e->wait_ms = bt_sched_wait_ms(j->c, w, e->cached_tokens, j->req->n_tokens, &e->beside_ms);
    e->ttft_ms = e->wait_ms + e->beside_ms + e->prefill_ms;
}

/* The part of the hand-off that the prefill does not hide. It delays only the second token, but it
 * counts, because a plan that moves less is better for all requests. */
static double handoff(const struct bt_sched_job *j, uint32_t i, uint32_t decode, double prefill_ms)
{
    uint32_t from = worker(j, i)->kvstore, to = worker(j, decode)->kvstore;
    return from == to ? 0 : bt_sched_handoff_ms(j->c, j->s, j->req, from, to, prefill_ms);
}

/* ---- random, round-robin, least-load ---- */

static void prefill_random(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal,
                           uint32_t decode, struct bt_sched_estimate *e)
{
    (void)ordinal;
    (void)decode;
    estimate_local(j, i, e);
    e->cost = 0; /* all equal: chosen at random */
}

static double decode_random(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal)
{
    (void)j;
    (void)i;
    (void)ordinal;
    return 0;
}

/* Distance from the worker whose turn it is. */
static double turn(const struct bt_sched_job *j, uint32_t ordinal, uint32_t n)
{
    n = BT_MAX(n, 1u);
    return (double)((ordinal % n + n - (uint32_t)(j->req->sequence % n)) % n);
}

static void prefill_turn(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal,
                         uint32_t decode, struct bt_sched_estimate *e)
{
    (void)decode;
    estimate_local(j, i, e);
    e->cost = turn(j, ordinal, j->n_prefill);
}

static double decode_turn(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal)
{
    (void)i;
    return turn(j, ordinal, j->n_decode);
}

static void prefill_queue(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal,
                          uint32_t decode, struct bt_sched_estimate *e)
{
    (void)ordinal;
    (void)decode;
    estimate_local(j, i, e);
    e->cost = e->wait_ms;
}

static double decode_load(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal)
{
    (void)ordinal;
    return bt_sched_decode_load(worker(j, i), j->req);
}

/* ---- cache-aware ---- */

static void prefill_cached(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal,
                           uint32_t decode, struct bt_sched_estimate *e)
{
    (void)ordinal;
    estimate_local(j, i, e);
    e->cost = e->ttft_ms + handoff(j, i, decode, e->prefill_ms);
}

/* Blocks that the node already has need not be moved. They are worth up to a tenth of a worker's
 * load. */
static double there_already(const struct bt_sched_job *j, uint32_t i)
{
    return 0.1 * bt_sched_cached_at(j->s, worker(j, i)->kvstore, j->req) / j->req->n_tokens;
}

static double decode_cached(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal)
{
    (void)ordinal;
    return bt_sched_decode_load(worker(j, i), j->req) - there_already(j, i);
}

/* ---- KVCache-centric ---- */

/* Compares best_len / prefix_len with the threshold. Without a local prefix the ratio is infinite.
 * If fetching is not allowed, there is no best match. */
static bool worth_fetching(const struct bt_sched_job *j, uint32_t local)
{
    return j->c->place.fetch_ratio > 0 && j->best_tokens > local &&
           (local == 0 || (double)j->best_tokens / local >= j->c->place.fetch_ratio);
}

static void prefill_kvcache(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal,
                            uint32_t decode, struct bt_sched_estimate *e)
{
    (void)ordinal;
    const struct bt_sched_worker *w = worker(j, i);
    estimate_local(j, i, e);
    if (worth_fetching(j, e->cached_tokens)) {
        e->fetch_from = j->best_kv;
        e->fetch_tokens = j->best_tokens - e->cached_tokens;
        e->cached_tokens = j->best_tokens;
        e->prefill_ms = bt_sched_prefill_ms(j->c, w, j->req, j->req->n_tokens, j->best_tokens);
        double transfer =
            j->s->kvstores[j->best_kv].send_busy_ms +
            bt_sched_move_ms(j->c, j->s, j->req, j->best_kv, w->kvstore, e->fetch_tokens);
        e->beside_ms = 0;
        e->wait_ms = bt_sched_queue_ms(j->c, w);
        e->ttft_ms = e->wait_ms + transfer + e->prefill_ms;
    }
    e->cost = e->ttft_ms + handoff(j, i, decode, e->prefill_ms);
}

/* ---- baton ---- */

/* Chooses how much of the prefix to fetch while the rest of it is computed. The fetch brings the
 * prefix's end, whose attention is the dearest, and should be complete when the computing arrives
 * there. Blocks [local, k) are computed. k is found by bisection, because the computing's time
 * grows with k and the fetch's falls. */
static void fetch_beside(const struct bt_sched_job *j, uint32_t i, uint32_t local,
                         struct bt_sched_estimate *e)
{
    const struct bt_sched_worker *w = worker(j, i);
    const struct bt_sched_kvstore *src = &j->s->kvstores[j->best_kv];
    const struct bt_sched_kvstore *dst = &j->s->kvstores[w->kvstore];
    uint32_t block = j->req->block_tokens, most = BT_MAX(j->best_tokens, j->spread_tokens);
    uint32_t lo = local / block, hi = most / block;
    double queue = bt_sched_queue_ms(j->c, w), busy = BT_MAX(src->send_busy_ms, dst->recv_busy_ms);
    while (lo < hi) { /* the smallest k for which the computing does not wait for the fetch */
        uint32_t k = (lo + hi) / 2;
        double there =
            busy + bt_sched_move_ms(j->c, j->s, j->req, j->best_kv, w->kvstore, most - k * block);
        double head =
            k * block > local ? bt_sched_prefill_ms(j->c, w, j->req, k * block, local) : 0;
        if (there <= queue + head) {
            hi = k;
        } else {
            lo = k + 1;
        }
    }
    uint32_t k = BT_MAX(lo * block, local);
    double head = k > local ? bt_sched_prefill_ms(j->c, w, j->req, k, local) : 0;
    e->fetch_tokens = most - BT_MIN(k, most);
    e->cached_tokens = local + e->fetch_tokens;
    e->prefill_ms = head + bt_sched_prefill_ms(j->c, w, j->req, j->req->n_tokens, most);
    e->fetch_from = e->fetch_tokens != 0 ? j->best_kv : BT_SCHED_NONE;
    e->prefix_tokens = most;
    e->beside_ms = 0;
    e->wait_ms = queue;
    e->ttft_ms = queue + e->prefill_ms;
}

/* Without kvstore.overlap the fetched part begins directly behind the local one, and computing
 * begins when all of it is there, so only the queue hides the fetch. Each fetched token adds the
 * link's time and saves its computing, and later tokens save more. So the best choice is to fetch
 * everything, or as much as the queue hides. */
static void fetch_before(const struct bt_sched_job *j, uint32_t i, uint32_t local,
                         struct bt_sched_estimate *e)
{
    const struct bt_sched_worker *w = worker(j, i);
    const struct bt_sched_kvstore *src = &j->s->kvstores[j->best_kv];
    const struct bt_sched_kvstore *dst = &j->s->kvstores[w->kvstore];
    uint32_t block = j->req->block_tokens, most = BT_MAX(j->best_tokens, j->spread_tokens) - local;
    double queue = bt_sched_queue_ms(j->c, w), busy = BT_MAX(src->send_busy_ms, dst->recv_busy_ms);
    double one = bt_sched_move_ms(j->c, j->s, j->req, j->best_kv, w->kvstore, block);
    double blocks = queue > busy && one > 0 ? (queue - busy) / one : 0;
    uint32_t hidden = blocks * block < most ? (uint32_t)blocks * block : most;
    for (int all = 0; all < 2; all++) {
        uint32_t n = all ? most : hidden;
        double ms = bt_sched_prefill_ms(j->c, w, j->req, j->req->n_tokens, local + n);
        double ttft = BT_MAX(queue, busy + one * n / block) + ms;
        if (n != 0 && ttft < e->ttft_ms) {
            e->fetch_from = j->best_kv;
            e->fetch_tokens = n;
            e->cached_tokens = local + n;
            e->prefill_ms = ms;
            e->beside_ms = 0;
            e->wait_ms = queue;
            e->ttft_ms = ttft;
        }
    }
}

/* The same as cache-aware, but with the rows and pages that will be in use when the prefill ends:
 * while prompts queue, rows on their way matter more than present ones. If rows are packed, it
 * prefers the fullest worker instead. */
static double decode_then(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal)
{
    const struct bt_sched_worker *w = worker(j, i);
    double rows, kv;
    if (w->capacity.pages == 0 || w->capacity.slots == 0) {
        return decode_cached(j, i, ordinal);
    }
    double queue = BT_MAX(j->least_queue_ms, 1);
    bt_sched_rows_after(j->s, w, j->req->n_tokens, queue, queue, &rows, &kv);
    if (!j->packing) { /* it is uncertain when late rows come, so other workers are preferred */
        kv += (double)w->rows.own_late_tokens;
    }
    double pages = (kv + j->req->n_tokens) / j->req->block_tokens / w->capacity.pages;
    double load = BT_MAX(pages, (rows + 1) / w->capacity.slots);
    if (load > 1 && w->rows.yield != 0 &&
        !j->late) { /* rows of lower classes are preempted only if there is no room without that */
        pages -= (double)w->rows.yield_pages / w->capacity.pages;
        rows -= w->rows.yield;
        load = BT_MAX(BT_MAX(pages, (rows + 1) / w->capacity.slots), 1);
    }
    if (j->packing && w->speed.cost != NULL) {
        load = bt_sched_packed_cost(j, i, load);
    }
    return load - there_already(j, i);
}

static void prefill_baton(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal,
                          uint32_t decode, struct bt_sched_estimate *e)
{
    (void)ordinal;
    estimate_local(j, i, e);
    uint32_t local = e->cached_tokens;
    uint32_t most = BT_MAX(j->best_tokens, j->spread_tokens);
    if (j->c->place.fetch_ratio > 0 && j->c->place.tail_load && most > local) {
        struct bt_sched_estimate f = *e;
        fetch_beside(j, i, local, &f);
        if (f.ttft_ms < e->ttft_ms) {
            *e = f;
        }
    } else if (j->c->place.fetch_ratio > 0 && !j->c->place.tail_load && most > local) {
        fetch_before(j, i, local, e);
    }
    /* Later requests lose the worker's time, so it has a price besides the wait. */
    e->cost =
        e->ttft_ms + j->c->place.work_weight * e->prefill_ms + handoff(j, i, decode, e->prefill_ms);
}

/* ---- the table ---- */

#define POLICY(id, label, late, use_cache, fetch, mixes, ...)                                      \
    static const struct bt_sched_rule rule_##id = {label, use_cache, fetch, mixes, __VA_ARGS__};   \
    static bt_sched_verdict_t place_##id(                                                          \
        const struct bt_sched_params *c, const struct bt_sched_snapshot *s,                        \
        const struct bt_sched_request *req, struct bt_sched_plan *plan_p,                          \
        struct bt_sched_reject *reject_p)                                                          \
    {                                                                                              \
        return bt_sched_place(c, s, req, &rule_##id, plan_p, reject_p);                            \
    }                                                                                              \
    const struct bt_sched_policy bt_sched_##id = {label, fetch, mixes, place_##id, late};

POLICY(random, "random", NULL, false, false, false, false, prefill_random, decode_random)
POLICY(round_robin, "round-robin", NULL, false, false, false, false, prefill_turn, decode_turn)
POLICY(least_load, "least-load", NULL, false, false, false, true, prefill_queue, decode_load)
POLICY(cache_aware, "cache-aware", NULL, true, false, false, true, prefill_cached, decode_cached)
POLICY(kvcache, "kvcache", NULL, true, true, false, true, prefill_kvcache, decode_cached)

static bt_sched_verdict_t late_baton(const struct bt_sched_params *c,
                                     const struct bt_sched_snapshot *s,
                                     const struct bt_sched_request *req,
                                     struct bt_sched_plan *plan_p,
                                     struct bt_sched_reject *reject_p);
POLICY(baton, "baton", late_baton, true, true, true, true, prefill_baton, decode_then)

static bt_sched_verdict_t late_baton(const struct bt_sched_params *c,
                                     const struct bt_sched_snapshot *s,
                                     const struct bt_sched_request *req,
                                     struct bt_sched_plan *plan_p, struct bt_sched_reject *reject_p)
{
    return bt_sched_place_late(c, s, req, &rule_baton, plan_p, reject_p);
}

const char bt_sched_policy_names[] =
    "random, round-robin, least-load, cache-aware, kvcache or baton";

const struct bt_sched_policy *bt_sched_policy_find(const char *name)
{
    static const struct bt_sched_policy *const all[] = {&bt_sched_random,     &bt_sched_round_robin,
                                                        &bt_sched_least_load, &bt_sched_cache_aware,
                                                        &bt_sched_kvcache,    &bt_sched_baton};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (strcmp(all[i]->name, name) == 0) {
            return all[i];
        }
    }
    return NULL;
}
