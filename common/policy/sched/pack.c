/* Packing (policy baton): rows on few decode workers. Pure: see sched.h.
 *
 * Every decode step pays its base, reading the weights once, whatever rows are in it. Where decode
 * workers also compute prompts, each worker with a row pays the base in every step, and prompts get
 * the rest of the time between two tokens. With all rows on half of the workers only half of these
 * bases are paid, and the other workers compute prompts in whole chunks, as prefill workers do. The
 * price are longer steps, so rows are packed only as far as the TBT objective allows. */
#include "common/policy/sched/sched_priv.h"

/* Steps of packed rows may reach the share of the TBT objective that is asked of the prefill
 * workers' time: at least this share, at most mixed.pack_share. Longer steps would make the
 * shortest answers, whose first gap is one of their longest, miss their objective, and while
 * prefill workers are idle the room is not needed. */
#define SHARE_IDLE 0.5

/* If the first token is expected within this share of its objective, prompts need no more room, and
 * longer steps would only harm short answers. */
#define TTFT_SAFE 0.03

/* The request's first token with the shortest queue and the best prefix, without moving KV.
 */
static double first_token_ms(const struct bt_sched_job *j)
{
    for (uint32_t i = 0; i < j->s->n_workers; i++) {
        const struct bt_sched_worker *w = &j->s->workers[i];
        if (w->prefill && w->speed.cost != NULL) {
            return j->least_queue_ms + bt_sched_compute_ms(j->c, w, j->req, j->best_tokens);
        }
    }
    return 0;
}

/* Packing saves the base of decode steps. If the base is less than this share of a step, the longer
 * steps of packed rows make more requests miss their objective than packing saves. */
#define BASE_SHARE 0.5

static bool base_is_dear(const struct bt_sched_job *j)
{
    for (uint32_t i = 0; i < j->s->n_workers; i++) {
        const struct bt_sched_worker *w = &j->s->workers[i];
        if (w->decode && w->speed.cost != NULL) {
            double step = bt_sched_mixed_step(j->c, w);
            return step > 0 && 1e-6 * w->speed.cost->base_ns >= BASE_SHARE * step;
        }
    }
    return false;
}

/* While prompts wait for longer than a burst, it is uncertain when they become rows, and all decode
 * workers have rows on their way. So rows are packed only while queues are short. */
bool bt_sched_packs(const struct bt_sched_job *j)
{
    const struct bt_sched_params *c = j->c;
    return j->rule->mixed && c->mixed.step_ms > 0 && c->mixed.pack_share > 0 &&
           c->objective.tbt_ms > 0 && !j->no_prefill_role && !j->no_decode_role &&
           j->least_queue_ms <= BT_SCHED_BURST_MS && base_is_dear(j) &&
           first_token_ms(j) >= TTFT_SAFE * c->objective.ttft_ms;
}

bool bt_sched_row_free(const struct bt_sched_worker *w)
{
    return w->rows.running + w->rows.waiting + w->rows.landing + w->rows.own_coming == 0;
}

static double most_step_ms(const struct bt_sched_job *j)
{
    double asked = 1;
    if (j->s->demand != NULL) {
        asked = bt_sched_demand_rate(j->s->demand, j->s->now_ms, BT_SCHED_BURST_MS) /
                BT_MAX(j->n_prefill, 1u);
    }
    return j->c->objective.tbt_ms * BT_MIN(BT_MAX(asked, SHARE_IDLE), j->c->mixed.pack_share);
}

/* The step of w with the request, its present rows and those on their way to it. */
static double full_step_ms(const struct bt_sched_job *j, const struct bt_sched_worker *w)
{
    double rows, kv;
    double queue = BT_MAX(j->least_queue_ms, 1);
    bt_sched_rows_after(j->s, w, j->req->n_tokens, queue, queue, &rows, &kv);
    struct bt_batch_work work = {.tokens = BT_MAX(rows, (double)w->rows.running) + 1,
                                 .kv = BT_MAX(kv, (double)w->rows.kv_tokens) + j->req->n_tokens};
    return 1e-6 * bt_batch_work_ns(w->speed.cost, &work);
}

/* The share of w's pages or slots (the larger one) that is used with the request and all rows on
 * their way. 1: there is no room for it. */
static double full(const struct bt_sched_job *j, const struct bt_sched_worker *w, double load)
{
    double tokens = (double)w->rows.own_coming_tokens + j->req->n_tokens;
    double pages = w->capacity.pages - BT_MIN(w->capacity.pages_free, w->capacity.pages);
    double rows = (double)w->rows.running + w->rows.own_coming + 1;
    pages += tokens / j->req->block_tokens;
    return BT_MAX(load, BT_MAX(pages / w->capacity.pages, rows / w->capacity.slots));
}

/* Time from now until decode worker w has the request's KV: all KV on its way to w comes first.
 * from: as in bt_sched_move_ms. */
static double landed_ms(const struct bt_sched_job *j, uint32_t from,
                        const struct bt_sched_worker *w)
{
    const struct bt_sched_request *req = j->req;
    uint32_t own = req->n_tokens - bt_sched_cached_at(j->s, w->kvstore, req);
    uint32_t all_tokens = own + (uint32_t)w->rows.own_coming_tokens;
    double busy = j->s->kvstores[w->kvstore].recv_busy_ms +
                  bt_sched_move_ms(j->c, j->s, req, from, w->kvstore, own);
    double all = bt_sched_move_ms(j->c, j->s, req, from, w->kvstore, all_tokens);
    return BT_MAX(busy, all);
}

/* The part of the KV's transfer that the prefill does not hide: it makes the row's first gap
 * longer. */
static double late_ms(const struct bt_sched_job *j, const struct bt_sched_worker *w)
{
    uint32_t there = bt_sched_cached_at(j->s, w->kvstore, j->req);
    double ready =
        j->least_queue_ms + bt_sched_compute_ms(j->c, w, j->req, BT_MAX(j->best_tokens, there));
    return BT_MAX(landed_ms(j, BT_SCHED_NONE, w) - ready, 0);
}

/* First the fullest worker with room, then one without rows, then the emptiest. */
double bt_sched_packed_cost(const struct bt_sched_job *j, uint32_t i, double load)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    double late = late_ms(j, w);
    if (late > 0 || full(j, w, load) >= 1 || full_step_ms(j, w) > most_step_ms(j)) {
        return 2 + load + late / j->c->objective.tbt_ms;
    }
    return bt_sched_row_free(w) ? 1 : 1 - load;
}

bool bt_sched_hands_over(const struct bt_sched_job *j, uint32_t m, uint32_t d, double ready_ms)
{
    const struct bt_sched_worker *to = &j->s->workers[d];
    uint32_t from = j->s->workers[m].kvstore;
    uint32_t own = j->req->n_tokens - bt_sched_cached_at(j->s, to->kvstore, j->req);
    double sent = j->s->kvstores[from].send_busy_ms +
                  bt_sched_move_ms(j->c, j->s, j->req, from, to->kvstore, own);
    return j->packing && BT_MAX(sent, landed_ms(j, from, to)) <= ready_ms;
}
