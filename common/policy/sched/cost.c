/* Predicted costs of a placement: from a worker's fitted cost model, or from its measured rates.
 * Pure: see sched.h. */
#include "common/policy/sched/sched_priv.h"
#include "common/policy/sched/survival.h"

#include <math.h>

uint32_t bt_sched_blocks_of(const struct bt_sched_request *req)
{
    return BT_DIV_UP(req->n_tokens, req->block_tokens);
}

/* At least the last token of a prompt is computed, so a cached prefix never covers all of it. */
uint32_t bt_sched_usable(const struct bt_sched_request *req, uint32_t blocks)
{
    uint64_t tokens = (uint64_t)blocks * req->block_tokens;
    if (tokens >= req->n_tokens) {
        tokens = (req->n_tokens - 1) / req->block_tokens * req->block_tokens;
    }
    return (uint32_t)tokens;
}

uint32_t bt_sched_cached_at(const struct bt_sched_snapshot *s, uint32_t kv,
                            const struct bt_sched_request *req)
{
    if (kv == BT_SCHED_NONE) {
        return 0;
    }
    return bt_sched_usable(req, s->kvstores[kv].match_blocks);
}

static double rate_of(const struct bt_sched_params *c, const struct bt_sched_worker *w)
{
    return w->speed.prefill_tokens_per_s > 0 ? w->speed.prefill_tokens_per_s
                                             : c->prior.prefill_tokens_per_s;
}

double bt_sched_queue_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w)
{
    if (w->speed.cost != NULL) {
        return w->queue.ms;
    }
    uint64_t tokens = BT_MAX(w->queue.tokens, w->queue.own_tokens);
    return 1e3 * (double)tokens / rate_of(c, w);
}

static uint32_t chunk_of(const struct bt_sched_params *c, const struct bt_sched_worker *w)
{
    return w->speed.chunk_tokens != 0 ? w->speed.chunk_tokens : c->prior.chunk_tokens;
}

/* Time from now until begin_ns. If that has passed, the step has begun: the next one is half a step
 * away in the mean. */
static double from_now(const struct bt_sched_worker *w, double begin_ns)
{
    double ms = begin_ns / 1e6 - w->queue.ahead_past_ms;
    return ms > 0 ? ms : BT_MIN(w->queue.ahead->step_ns / 2e6, w->queue.ms);
}

double bt_sched_least_wait_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w)
{
    if (w->speed.cost == NULL || w->queue.ahead == NULL || w->queue.ahead->n_joins == 0) {
        return bt_sched_queue_ms(c, w);
    }
    return from_now(w, w->queue.ahead->joins[0].begin_ns);
}

double bt_sched_wait_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                        uint32_t from, uint32_t to, double *beside_p)
{
    *beside_p = 0;
    if (w->speed.cost == NULL || w->queue.ahead == NULL) {
        return bt_sched_queue_ms(c, w);
    }
    double begin =
        bt_batch_ahead_of(w->queue.ahead, w->speed.cost, from, to, chunk_of(c, w), beside_p);
    *beside_p /= 1e6;
    return begin < w->queue.ahead->all_ns ? from_now(w, begin) : bt_sched_queue_ms(c, w);
}

/* The sum of the chunks' costs, plus the part of the prefix's load that computing does not hide.
 * The sum of n(h + n/2) over the chunks equals that of the whole prompt. */
double bt_sched_prefill_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                           const struct bt_sched_request *req, uint32_t n, uint32_t cached)
{
    if (w->speed.cost == NULL) {
        return 1e3 * (n - cached) / rate_of(c, w);
    }
    double ms = 1e-6 * bt_batch_prefill_ns(w->speed.cost, cached, n, chunk_of(c, w));
    double load = c->prior.load_bytes_per_s > 0
                      ? 1e3 * cached * req->token_bytes / c->prior.load_bytes_per_s
                      : 0;
    return BT_MAX(ms, load);
}

double bt_sched_compute_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                           const struct bt_sched_request *req, uint32_t cached)
{
    struct bt_sched_worker alone = *w;
    alone.speed.cost = w->speed.prompt_cost != NULL ? w->speed.prompt_cost : w->speed.cost;
    return bt_sched_prefill_ms(c, &alone, req, req->n_tokens, cached);
}

/* Rows on their way to w, without those that it has. */
static double rows_coming(const struct bt_sched_worker *w)
{
    double rows = w->rows.running + w->rows.waiting;
    return BT_MAX((double)w->rows.landing, w->rows.own - rows);
}

void bt_sched_rows_after(const struct bt_sched_snapshot *s, const struct bt_sched_worker *w,
                         uint32_t tokens, double t_ms, double over_ms, double *rows_p, double *kv_p)
{
    double rows = w->rows.running + w->rows.waiting,
           life = s->forecast != NULL ? s->forecast->life_ms : 0;
    double coming = rows_coming(w);
    double each = w->rows.running > 0 ? (double)w->rows.kv_tokens / w->rows.running : tokens;
    double each_coming =
        w->rows.own_coming > 0 ? (double)w->rows.own_coming_tokens / w->rows.own_coming : each;
    over_ms = BT_MAX(over_ms, t_ms);
    if (coming > 0 && t_ms > 0 && life > 0) {
        double stay = exp(-t_ms / life);
        rows *= stay;
        coming *= life / over_ms * (1 - stay);
    } else {
        coming *= t_ms > 0 ? t_ms / over_ms : 0;
    }
    *rows_p = rows + coming;
    *kv_p = rows * each + coming * each_coming;
}

bool bt_sched_pool_after(const struct bt_sched_snapshot *s, uint32_t block_tokens, double t_ms,
                         double slow, struct bt_sched_pool *pool_p)
{
    uint32_t n = 0;
    double yield_rows = 0, yield_pages = 0;
    struct bt_sched_load load = {0};
    struct bt_sched_room room = {0};
    for (uint32_t i = 0; i < s->n_workers; i++) {
        const struct bt_sched_worker *w = &s->workers[i];
        if (w->decode) {
            double waiting = w->rows.running > 0 ? (double)w->rows.waiting / w->rows.running : 0;
            n++;
            load.rows += w->rows.running + w->rows.waiting;
            load.kv += (double)w->rows.kv_tokens *
                       (1 + waiting); /* waiting rows have the mean context of the others */
            yield_rows += w->rows.yield;
            yield_pages += w->rows.yield_pages;
            room.places += w->capacity.slots;
            room.kv += (double)w->capacity.pages * block_tokens;
        }
    }
    if (s->forecast == NULL || n == 0) {
        return false;
    }
    bt_sched_forecast_at(s->forecast, &room, s->now_ms + t_ms, slow, &load);
    *pool_p = (struct bt_sched_pool){load.rows / n,           load.kv / n,
                                     yield_rows / n,          yield_pages / n,
                                     sqrt(load.rows_var / n), sqrt(load.kv_var / n)};
    return true;
}

/* The mean step of w with prompt tokens in it. Steps that a row joins are shorter by the row's
 * wait, half a step in the mean. */
static double mixed_step_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                            double over_ms)
{
    double step = bt_sched_mixed_step(c, w), gap = bt_sched_mixed_gap(c, w);
    double joined = BT_MIN(gap - step / 2, step);
    if (gap > 0 && over_ms > 0) {
        double none = exp(-rows_coming(w) * step / BT_MAX(over_ms, step));
        step = none * step + (1 - none) * BT_MAX(joined, 0);
    }
    return step;
}

/* Rows last longer where prompts share their steps, and hold their pages meanwhile. So only a
 * worker that uses at most this share of its pages takes prompts beside its rows. */
#define MIXED_PAGES 0.4

static bool has_pages(const struct bt_sched_worker *w, double tokens, uint32_t block_tokens)
{
    double pages = tokens / block_tokens;
    double used = w->capacity.pages - BT_MIN(w->capacity.pages_free, w->capacity.pages);
    return w->capacity.pages == 0 || BT_MAX(used, pages) <= MIXED_PAGES * w->capacity.pages;
}

double bt_sched_mixed_ms(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                         const struct bt_sched_worker *w, const struct bt_sched_request *req,
                         uint32_t cached, double over_ms, double *queue_p)
{
    uint32_t n = req->n_tokens, chunk = chunk_of(c, w);
    const struct bt_batch_cost *k =
        w->speed.prompt_cost != NULL ? w->speed.prompt_cost : w->speed.cost;
    double step = mixed_step_ms(c, w, over_ms), m = n - cached, room = INFINITY, then_ms = 0;
    double token_ns = k->token_ns[BT_BATCH_SEGMENTS - 1];
    double alone = 1e-6 * (token_ns * m + k->attn_ns * m * (cached + m / 2));
    /* A step takes whole blocks, so up to one block's time stays unused. */
    double lost = 1e-6 * token_ns * c->mixed.step_tokens;
    for (int i = 0; i < 2;
         i++) { /* beside the present rows, then beside the rows expected at its end */
        struct bt_batch_work work = {0};
        bt_sched_rows_after(s, w, n, then_ms, over_ms, &work.tokens, &work.kv);
        double base =
            1e-6 * (work.tokens > 0 ? bt_batch_work_ns(w->speed.cost, &work) : k->base_ns);
        /* Prompt tokens also hit the experts that the rows do not use. */
        const struct bt_batch_cost *x = work.tokens > 0 ? w->speed.cost : k;
        base += 1e-6 * (x->experts_ns - bt_batch_experts_ns(x, work.tokens));
        room = BT_MIN(room, step - base - lost);
        if (room <= 0 || !has_pages(w, work.kv + n, req->block_tokens) ||
            (w->capacity.slots != 0 && work.tokens + 1 > w->capacity.slots)) {
            return -1; /* the rows need all of the step */
        }
        then_ms = (w->queue.ms + alone) * step / room;
    }
    /* Each step has room for `room` ms of prompt tokens, at most one chunk of a prompt, beside its
     * rows. */
    double chunks = chunk != 0 ? BT_DIV_UP(n, chunk) - cached / chunk : 1;
    *queue_p = w->queue.ms * step / room;
    return alone + BT_MAX(alone / room, chunks) * (step - room);
}

/* The index does not say whether the holder has blocks in memory or on its SSD. */
double bt_sched_move_ms(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                        const struct bt_sched_request *req, uint32_t from, uint32_t to,
                        uint32_t tokens)
{
    const struct bt_sched_kvstore *dst = &s->kvstores[to];
    double rate = 0;
    for (uint32_t i = 0; i < dst->n_links; i++) {
        const struct bt_sched_link *l = &dst->links[i];
        if (from == BT_SCHED_NONE) {
            rate = BT_MAX(rate, l->slab_bytes_per_s);
        } else if (l->incarnation == s->kvstores[from].incarnation) {
            rate = l->slab_bytes_per_s > 0 ? l->slab_bytes_per_s : l->ssd_bytes_per_s;
        }
    }
    rate = rate > 0 ? rate : c->prior.link_bytes_per_s;
    return 1e3 * (double)tokens * req->token_bytes / rate;
}

/* The hand-off streams layer by layer while the prefill computes. */
double bt_sched_handoff_ms(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                           const struct bt_sched_request *req, uint32_t from, uint32_t to,
                           double prefill_ms)
{
    uint32_t own = req->n_tokens - bt_sched_cached_at(s, to, req);
    double move = bt_sched_move_ms(c, s, req, from, to, own);
    return move > prefill_ms ? move - prefill_ms : 0;
}

/* A worker that has not reported its slots counts as one of 64. */
static double slots_of(const struct bt_sched_worker *w)
{
    return w->capacity.slots != 0 ? w->capacity.slots : 64;
}

/* The same as bt_sched_decode_load, but without this number of the present rows and pages. */
static double load_without(const struct bt_sched_worker *w, const struct bt_sched_request *req,
                           uint32_t yield_rows, uint32_t yield_pages)
{
    uint32_t active = BT_MAX(w->rows.running + w->rows.waiting + w->rows.landing, w->rows.own);
    uint32_t more =
        req->expect_new != 0 ? req->expect_new : BT_MIN(req->max_new, BT_SURVIVAL_ANSWER_TOKENS);
    uint32_t n = BT_MAX(req->n_choices, 1u);
    active -= BT_MIN(yield_rows, active);
    double rows = (double)(active + n) / slots_of(w);
    double pages = 0;
    if (w->capacity.pages != 0) {
        uint32_t one = BT_DIV_UP(req->n_tokens + more, req->block_tokens);
        uint32_t shared = req->n_tokens / req->block_tokens; /* the prompt's full blocks */
        uint32_t need = shared + n * (one - shared);
        uint32_t used = w->capacity.pages - BT_MIN(w->capacity.pages_free, w->capacity.pages);
        pages = (double)(used - BT_MIN(yield_pages, used) + need) / w->capacity.pages;
    }
    double load = BT_MAX(rows, pages);
    return w->rows.waiting > 0 ? load + 1 : load;
}

/* While the worker has room, rows of lower classes count: the worker with the most room is the best
 * one for a higher class too. Without room they are preempted, and the request does not wait. */
double bt_sched_decode_load(const struct bt_sched_worker *w, const struct bt_sched_request *req)
{
    double load = load_without(w, req, 0, 0);
    if (load <= 1 || w->rows.yield == 0) {
        return load;
    }
    return BT_MAX(load_without(w, req, w->rows.yield, w->rows.yield_pages), 1);
}

double bt_sched_answer(const struct bt_sched_request *req)
{
    return BT_MIN(req->mean_new > 0 ? req->mean_new : (double)BT_SURVIVAL_ANSWER_TOKENS,
                  (double)req->max_new);
}

double bt_sched_decode_work(const struct bt_sched_worker *w, const struct bt_sched_request *req)
{
    double more = bt_sched_answer(req);
    double n = BT_MAX(req->n_choices, 1u), tokens = req->n_tokens + (n - 1) * more + more / 2;
    double share = w->capacity.slots != 0 ? n / w->capacity.slots : 0;
    if (w->capacity.pages != 0) {
        share = BT_MAX(share, tokens / req->block_tokens / w->capacity.pages);
    }
    return 100 * share * more;
}

/* A step of these rows with kv tokens of context; rows of a worker that speculates have drafts. */
static double rows_ms(const struct bt_sched_worker *w, double rows, double kv)
{
    double each = BT_MAX(w->speed.row_tokens, 1);
    struct bt_batch_work work = {.tokens = rows * each, .kv = kv * each};
    return 1e-6 * bt_batch_work_ns(w->speed.cost, &work);
}

double bt_sched_step_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                        const struct bt_sched_request *req)
{
    double step = w->speed.step_ms > 0 ? w->speed.step_ms : c->prior.step_ms;
    if (w->speed.cost != NULL) {
        uint32_t n = BT_MAX(req->n_choices, 1u);
        double rows = w->rows.running + w->rows.waiting + w->rows.landing + n;
        double kv = (double)w->rows.kv_tokens + (double)n * req->n_tokens;
        step = rows_ms(w, rows, kv + (w->rows.landing > 0 ? (double)w->rows.own_coming_tokens : 0));
    }
    double load = bt_sched_decode_load(w, req);
    return load > 1 ? step * load : step;
}

double bt_sched_step_then_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                             const struct bt_sched_request *req, double t_ms)
{
    double life = w->learned.life_ms, now = w->rows.running + w->rows.waiting,
           coming = rows_coming(w);
    if (w->speed.cost == NULL || !(life > 0) || !(t_ms > 0) || bt_sched_decode_load(w, req) > 1) {
        return bt_sched_step_ms(c, w, req);
    }
    double each = w->rows.running > 0 ? (double)w->rows.kv_tokens / w->rows.running : req->n_tokens;
    double each_coming =
        w->rows.own_coming > 0 ? (double)w->rows.own_coming_tokens / w->rows.own_coming : each;
    double stay = exp(-t_ms / life), n = BT_MAX(req->n_choices, 1u);
    now *= stay;
    coming *= life / t_ms * (1 - stay);
    return rows_ms(w, now + coming + n, now * each + coming * each_coming + n * req->n_tokens);
}

double bt_sched_full_step_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                             const struct bt_sched_request *req)
{
    if (w->speed.cost == NULL) {
        return w->speed.step_ms > 0 ? w->speed.step_ms : c->prior.step_ms;
    }
    double each = w->rows.running > 0 ? (double)w->rows.kv_tokens / w->rows.running : req->n_tokens;
    double room = (double)w->capacity.pages * req->block_tokens;
    double rows = w->capacity.slots != 0 ? w->capacity.slots : w->rows.running + 1;
    if (w->capacity.pages != 0 && each > 0) {
        rows = BT_MIN(rows, BT_MAX(room / each, 1));
    }
    return rows_ms(w, rows, rows * each);
}

double bt_sched_tbt_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                       const struct bt_sched_request *req)
{
    return bt_sched_learned_gap(&w->learned, bt_sched_step_ms(c, w, req));
}

/* The step of a single row: the part of a step that does not depend on the number of rows. */
static double idle_step_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w)
{
    struct bt_sched_request one = {.n_tokens = 1, .max_new = 1, .block_tokens = 1};
    struct bt_sched_worker idle = *w;
    idle.rows.running = idle.rows.waiting = idle.rows.landing = idle.rows.own = 0;
    idle.rows.kv_tokens = 0;
    idle.capacity.pages_free = idle.capacity.pages;
    return bt_sched_tbt_ms(c, &idle, &one);
}

double bt_sched_late_tbt_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w)
{
    double limit = bt_sched_tbt_limit(c, c->late.others_tbt_ms);
    return idle_step_ms(c, w) <= limit ? limit : 0;
}

double bt_sched_pressure(const struct bt_sched_params *params, const struct bt_sched_worker *w)
{
    double pressure = 0;
    if (w->prefill) {
        double ttft_ms = params->objective.ttft_ms;
        pressure = bt_sched_queue_ms(params, w) / (ttft_ms != 0 ? ttft_ms : BT_SCHED_BURST_MS);
    }
    uint32_t rows = w->rows.running + w->rows.waiting;
    if (w->decode && rows != 0) {
        struct bt_sched_request one = {.n_tokens = 1, .max_new = 1, .block_tokens = 1};
        double slots = slots_of(w);
        double pages =
            w->capacity.pages != 0
                ? 1 - (double)BT_MIN(w->capacity.pages_free, w->capacity.pages) / w->capacity.pages
                : 0;
        pressure = BT_MAX(pressure, BT_MAX(rows / slots, pages));
        pressure += w->rows.waiting > 0 ? 1 : 0;
        if (params->objective.tbt_ms != 0) {
            double least = w->speed.cost != NULL ? idle_step_ms(params, w) : 0;
            double room = BT_MAX(params->objective.tbt_ms - least, 1e-3 * least);
            pressure = BT_MAX(pressure, (bt_sched_tbt_ms(params, w, &one) - least) / room);
        }
    }
    return pressure;
}

double bt_sched_pressure_then(const struct bt_sched_params *params,
                              const struct bt_sched_snapshot *s, uint32_t decode,
                              const struct bt_sched_request *req, double t_ms)
{
    struct bt_sched_worker then = s->workers[decode];
    struct bt_sched_params p = *params;
    struct bt_sched_pool pool;
    uint32_t n_decode = 0;
    bool alone = then.rows.running + then.rows.waiting + then.rows.landing == 0;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        n_decode += s->workers[i].decode;
    }
    then.prefill = false;
    if (bt_sched_pool_after(s, req->block_tokens, t_ms, 1, &pool)) {
        double share = (double)BT_MAX(req->n_choices, 1u) / n_decode;
        struct bt_sched_load late = {0};
        if (s->late_forecast != NULL) {
            bt_sched_forecast_at(s->late_forecast, &(struct bt_sched_room){0}, s->now_ms + t_ms, 1,
                                 &late);
        }
        alone = alone && pool.rows + late.rows / n_decode < 1;
        pool.rows += share + late.rows / n_decode;
        pool.kv += share * req->n_tokens + late.kv / n_decode;
        uint32_t pages = (uint32_t)(pool.kv / req->block_tokens);
        then.rows.running = (uint32_t)ceil(pool.rows);
        then.rows.waiting = then.rows.landing = then.rows.own = 0;
        then.rows.kv_tokens = (uint64_t)pool.kv;
        then.capacity.pages_free = then.capacity.pages - BT_MIN(pages, then.capacity.pages);
    }
    if (alone) { /* it delays no other row */
        p.objective.tbt_ms = 0;
    }
    return bt_sched_pressure(&p, &then);
}
