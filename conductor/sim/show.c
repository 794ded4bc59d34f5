/* What policies see: the nodes as they are now, where a request's blocks are, what it asks for. */
#include "conductor/sim/sim_priv.h"

#define FORECAST_MS 250   /* of a bucket: two minutes ahead */
#define DEMAND_MS   60000 /* as request/expect.c */

static struct bt_sched_params params_of(const struct bt_sim_cluster *c,
                                        const struct bt_sim_options *o)
{
    return (struct bt_sched_params){.prefill_tokens_per_s = 1,
                                    .step_ms = 1,
                                    .link_bytes_per_s = c->link_bytes_per_s,
                                    .load_bytes_per_s = c->load_bytes_per_s,
                                    .chunk_tokens = (uint32_t)c->chunk_tokens,
                                    .ttft_objective_ms = o->ttft_ms,
                                    .tbt_objective_ms = o->tbt_ms,
                                    .tbt_margin = o->tbt_margin,
                                    .fetch_ratio = o->fetch_ratio,
                                    .tail_load = true,
                                    .work_weight = o->work_weight,
                                    .work_price = o->work_price,
                                    .demand_price = o->demand_price,
                                    .late_wait_ms = o->late_wait_ms,
                                    .others_tbt_ms = o->tbt_ms,
                                    .pack_share = o->pack_share,
                                    .mixed_step_ms = o->mixed_step_ms,
                                    .mixed_gap_ms = o->mixed_gap_ms};
}

void bt_sim_show_init(struct sim *s)
{
    bt_sched_forecast_init(&s->forecast, FORECAST_MS, s->o->life_ms, 0);
    bt_sched_forecast_init(&s->late_forecast, FORECAST_MS, s->o->life_ms, 0);
    s->forecast.one_life = s->late_forecast.one_life = !s->o->lengths;
    bt_sched_demand_init(&s->demand, DEMAND_MS);
    bt_sched_demand_init(&s->decodes, DEMAND_MS);
    bt_sched_demand_init(&s->let_in, DEMAND_MS);
    bt_sched_demand_init(&s->late_demand, DEMAND_MS);
    s->snap = (struct bt_sched_snapshot){.workers = s->workers,
                                         .n_workers = s->n,
                                         .kvstores = s->kvstores,
                                         .n_kvstores = s->n,
                                         .forecast = &s->forecast,
                                         .late_forecast = &s->late_forecast,
                                         .late_demand = &s->late_demand,
                                         .demand = &s->demand,
                                         .decodes = &s->decodes,
                                         .let_in = &s->let_in};
    s->params = params_of(s->c, s->o);
}

/* ---- the nodes ---- */

static void show_kvstore(struct sim *s, uint32_t i)
{
    s->kvstores[i].send_busy_ms = BT_MAX(s->links[i].send_free_ms - s->now_ms, 0);
    s->kvstores[i].recv_busy_ms = BT_MAX(s->links[i].recv_free_ms - s->now_ms, 0);
    s->kvstores[i].match_blocks = s->match[i];
}

static void show_prefill(struct sim *s, uint32_t i)
{
    s->workers[i].queue_ms = bt_sim_prefill_queue_ms(&s->p[i], s->now_ms);
    s->workers[i].late_ms = bt_sim_prefill_late_ms(&s->p[i], s->now_ms);
}

void bt_sim_show_decode(struct sim *s, uint32_t node)
{
    const struct decode_node *d = &s->d[node];
    struct bt_sched_worker *w = &s->workers[node];
    struct bt_sim_late late = bt_sim_decode_late(d->d);
    w->running = bt_sim_decode_rows(d->d);
    w->waiting = bt_sim_decode_waiting(d->d);
    w->kv_tokens = (uint64_t)bt_sim_decode_kv_tokens(d->d);
    w->pages_free =
        (uint32_t)((s->c->kv_tokens - bt_sim_decode_reserved(d->d)) / BT_SIM_BLOCK_TOKENS);
    w->yield_rows = late.rows;
    w->yield_pages = (uint32_t)(late.reserved / BT_SIM_BLOCK_TOKENS);
    w->own_requests = d->assigned - d->late_coming - late.waiting;
    w->own_coming = d->coming;
    w->own_late_tokens = d->late_tokens;
    w->own_coming_tokens = d->coming_tokens;
    w->queue_ms = bt_sim_decode_prompt_ms(d->d);
}

void bt_sim_show(struct sim *s)
{
    double rows = 0;
    bt_sim_lengths_look(s);
    for (uint32_t i = 0; i < s->n; i++) {
        show_kvstore(s, i);
        if (s->workers[i].prefill) {
            show_prefill(s, i);
        }
        if (!s->workers[i].decode) {
            continue;
        }
        bt_sim_show_decode(s, i);
        rows += s->workers[i].running;
    }
    bt_sim_lengths_look_alike(s, rows);
    s->snap.now_ms = s->now_ms;
}

/* ---- a request ---- */

struct bt_sched_request bt_sim_ask(const struct sim *s, uint32_t id)
{
    return (struct bt_sched_request){.n_tokens = bt_sim_tokens_of(s, id),
                                     .max_new = BT_SIM_MAX_NEW,
                                     .mean_new = bt_sim_lengths_mean(s, id),
                                     .n_choices = 1,
                                     .block_tokens = BT_SIM_BLOCK_TOKENS,
                                     .token_bytes = (uint32_t)s->c->token_bytes,
                                     .random = (s->o->seed + id + 1) * 0x9e3779b97f4a7c15ull,
                                     .sequence = id};
}

struct bt_sched_request bt_sim_show_request(struct sim *s, uint32_t id)
{
    bt_sim_caches_match(s->caches, bt_sim_blocks_of(s, id), bt_sim_full_blocks(s, id), s->match);
    bt_sim_show(s);
    return bt_sim_ask(s, id);
}
