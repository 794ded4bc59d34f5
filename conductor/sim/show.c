/* The snapshot for policies: the present state of the nodes, the places of a request's blocks, and
 * its demands. */
#include "conductor/sim/sim_priv.h"

#define FORECAST_MS 250 /* of a bucket: two minutes ahead */

static struct bt_sched_params params_of(const struct bt_sim_cluster *c,
                                        const struct bt_sim_options *o)
{
    return (struct bt_sched_params){
        .objective = {.ttft_ms = o->ttft_ms, .tbt_ms = o->tbt_ms, .tbt_margin = BT_SCHED_GAP_SHARE},
        .prior = {.prefill_tokens_per_s = 1,
                  .step_ms = 1,
                  .link_bytes_per_s = c->link_bytes_per_s,
                  .load_bytes_per_s = c->load_bytes_per_s,
                  .chunk_tokens = (uint32_t)c->chunk_tokens},
        .place = {.fetch_ratio = o->fetch_ratio, .tail_load = true, .work_weight = o->work_weight},
        .price = {.demand = o->demand_price},
        .mixed = {.step_ms = o->mixed_step_ms,
                  .step_tokens = BT_SIM_STEP_TOKENS,
                  .gap_ms = o->mixed_gap_ms,
                  .pack_share = o->pack_share},
        .late = {.wait_ms = o->late_wait_ms, .others_tbt_ms = o->tbt_ms},
    };
}

void bt_sim_show_init(struct bt_sim *s)
{
    bt_sched_expected_init(&s->stages, FORECAST_MS, s->o->life_ms, 0);
    s->stages.forecast.one_life = s->stages.late_forecast.one_life = !s->o->lengths;
    s->snap = (struct bt_sched_snapshot){
        .workers = s->workers, .n_workers = s->n, .kvstores = s->kvstores, .n_kvstores = s->n};
    s->params = params_of(s->c, s->o);
}

/* ---- the nodes ---- */

/* The conductor's view does not share this code. It knows a kvstore's name, slots and measured
 * links from heartbeats, but not the work under way on its link. Here it is the other way round. */
static void show_kvstore(struct bt_sim *s, uint32_t i)
{
    s->kvstores[i].send_busy_ms = BT_MAX(s->links[i].send_free_ms - s->now_ms, 0);
    s->kvstores[i].recv_busy_ms = BT_MAX(s->links[i].recv_free_ms - s->now_ms, 0);
    s->kvstores[i].match_blocks = s->match[i];
}

/* Makes the heartbeat that a decode node would send now. */
static void say(struct bt_sim *s, uint32_t node)
{
    const struct bt_sim_decode_node *d = &s->d[node];
    struct bt_sched_said *said = &s->nodes[node].said;
    struct bt_sched_own *own = &s->nodes[node].own;
    struct bt_sim_late late = bt_sim_decode_late(d->d);
    struct bt_sim_held rows = bt_sim_decode_running(d->d), waiting = bt_sim_decode_waiting(d->d);
    double free_tokens = BT_MAX(s->c->kv_tokens - rows.reserved, 0); /* late rows make way */
    said->running = rows.rows;
    said->waiting = waiting.rows + late.waiting;
    said->kv_tokens = (uint64_t)rows.kv;
    said->pages_free = (uint32_t)(free_tokens / BT_SIM_BLOCK_TOKENS);
    said->queue_ms = bt_sim_decode_prompt_ms(d->d);
    said->classes = (struct bt_classes){0};
    if (late.rows + late.waiting > 0) {
        struct bt_class *k = bt_classes_at(&said->classes, BT_SCHED_CLASS_LATE);
        k->rows = late.rows;
        k->pages = (uint32_t)(late.reserved / BT_SIM_BLOCK_TOKENS);
        k->waiting = late.waiting;
    }
    /* The first token of a row tells the conductor that it has begun. */
    uint64_t coming = d->coming_tokens + (uint64_t)waiting.kv;
    own->decoding = rows.rows;
    own->decoding_kv = own->kv_tokens - BT_MIN(own->late_kv + coming, own->kv_tokens);
    own->late = d->late_coming + late.waiting;
}

void bt_sim_show_node(struct bt_sim *s, uint32_t node)
{
    struct bt_sched_worker *w = &s->workers[node];
    struct bt_sim_node *n = &s->nodes[node];
    bool prefill = w->prefill, decode = w->decode;
    uint64_t now = bt_sim_now_ns(s);
    n->said.at_ns = now;
    if (decode) {
        say(s, node);
    }
    bt_sched_show_worker(&n->said, &n->own, &n->learned, now, w);
    bt_sched_show_class(&n->said, &n->own, &n->learned, now, 0, w);
    w->prefill = prefill;
    w->decode = decode;
    w->speed.prompt_cost = &s->c->prefill;
    w->kvstore = s->kvstores[node].avoid ? BT_SCHED_NONE : node;
}

struct bt_sched_pace bt_sim_pace(const struct bt_sim *s, uint32_t node)
{
    const struct bt_sim_node *n = &s->nodes[node];
    return bt_sched_pace_of(&n->said, &n->learned, s->workers[node].prefill);
}

double bt_sim_queue_ms(const struct bt_sim *s, uint32_t node)
{
    const struct bt_sched_own *own = &s->nodes[node].own;
    double late_ms = bt_classes_below(&own->classes, 0).queue_ns / 1e6;
    return bt_sched_backlog_ms(&own->backlog, late_ms, 1, bt_sim_now_ns(s));
}

void bt_sim_show(struct bt_sim *s)
{
    double rows = 0;
    bt_sim_lengths_look(s);
    for (uint32_t i = 0; i < s->n; i++) {
        show_kvstore(s, i);
        bt_sim_show_node(s, i);
        rows += s->workers[i].rows.running;
    }
    bt_sim_lengths_look_alike(s, rows);
    bt_sched_expected_show(&s->stages, s->now_ms, &s->snap);
}

/* ---- a request ---- */

struct bt_sched_request bt_sim_ask(const struct bt_sim *s, uint32_t id)
{
    return (struct bt_sched_request){.n_tokens = bt_sim_tokens_of(s, id),
                                     .max_new = BT_SIM_MAX_NEW,
                                     .mean_new = bt_sim_lengths_mean(s, id),
                                     .n_choices = 1,
                                     .waited_ms = s->now_ms - s->r->records[id].at_ms,
                                     .block_tokens = BT_SIM_BLOCK_TOKENS,
                                     .token_bytes = (uint32_t)s->c->token_bytes,
                                     .random = (s->o->seed + id + 1) * 0x9e3779b97f4a7c15ull,
                                     .sequence = id};
}

struct bt_sched_request bt_sim_show_request(struct bt_sim *s, uint32_t id)
{
    bt_sim_caches_match(s->caches, bt_sim_blocks_of(s, id), bt_sim_full_blocks(s, id), s->match);
    bt_sim_show(s);
    return bt_sim_ask(s, id);
}
