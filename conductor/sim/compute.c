/* Prompts: what of one is computed and how long that takes, at a prefill node or beside the rows of
 * a decode node, and what its node's cache has of it afterwards. */
#include <math.h>

#include "conductor/sim/sim_priv.h"

void bt_sim_compute_queue(struct sim *s, uint32_t id)
{
    uint32_t node = s->r->records[id].prefill;
    struct live *l = &s->live[id];
    if (s->workers[node].decode) { /* once what is fetched is there */
        double there = BT_MAX(s->now_ms, BT_MAX(l->fetch_end_ms, l->read_end_ms));
        bt_sim_push(s, there, EV_PROMPT, id, 0);
        return;
    }
    struct bt_sim_prefill *p = &s->p[node];
    if (bt_sim_prefill_add(p, &l->job, s->now_ms)) {
        bt_sim_push(s, p->free_ms, EV_PREFILL_FREE, node, p->version);
    }
    bt_sim_compute_next(s, node);
}

/* ---- its prefix ---- */

/* The computing begins: what its node has now of the prompt is used. Returns tokens. */
static uint32_t hold_prefix(struct sim *s, uint32_t id, uint32_t node)
{
    uint32_t ssd;
    s->live[id].held = bt_sim_caches_use(s->caches, node, bt_sim_blocks_of(s, id),
                                         bt_sim_usable_blocks(s, id), s->now_ms, &ssd);
    s->r->ssd_tokens += (uint64_t)ssd * BT_SIM_BLOCK_TOKENS;
    return s->live[id].held * BT_SIM_BLOCK_TOKENS;
}

/* ... of these tokens, besides what was fetched. */
static void count_prefix(struct sim *s, uint32_t id)
{
    const struct bt_sim_record *rec = &s->r->records[id];
    s->r->input_tokens += s->req[id].input;
    s->r->cached_tokens += rec->cached_tokens;
    s->r->fetched_tokens += rec->fetched_tokens;
    s->r->bytes_load += (double)rec->cached_tokens * s->c->token_bytes;
}

/* The computing has ended: all full blocks of the prompt are in the node's cache. */
static void keep_prompt(struct sim *s, uint32_t id, uint32_t node)
{
    const struct live *l = &s->live[id];
    uint32_t fetched = s->r->records[id].fetched_tokens / BT_SIM_BLOCK_TOKENS;
    uint32_t end = l->best_tokens / BT_SIM_BLOCK_TOKENS;
    struct bt_sim_put put = {.blocks = bt_sim_blocks_of(s, id),
                             .n = bt_sim_full_blocks(s, id),
                             .held = l->held,
                             .copied = end - BT_MIN(fetched, end),
                             .copied_end = end};
    bt_sim_caches_put(s->caches, node, &put, s->now_ms);
}

/* ---- at a prefill node ---- */

static double compute_ms(const struct sim *s, uint32_t n, uint32_t cached)
{
    double ms = 1e-6 * bt_batch_prefill_ns(&s->c->prefill, cached, n, s->c->chunk_tokens);
    return BT_MAX(ms, 1e3 * cached * s->c->token_bytes / s->c->load_bytes_per_s);
}

/* The computing begins: returns its ms. */
static double begin(struct sim *s, uint32_t node, uint32_t id)
{
    struct live *l = &s->live[id];
    struct bt_sim_record *rec = &s->r->records[id];
    uint32_t local = hold_prefix(s, id, node), tokens = bt_sim_tokens_of(s, id);
    double end = BT_MAX(s->now_ms, l->read_end_ms);
    if (l->fetch_tokens != 0 && l->best_tokens > local && !bt_sim_fetch_lost(s, id)) {
        uint32_t from = BT_MAX(l->best_tokens - l->fetch_tokens, local);
        end += from > local ? compute_ms(s, from, local) : 0;
        end = BT_MAX(end, l->fetch_end_ms) + compute_ms(s, tokens, l->best_tokens);
        rec->fetched_tokens = l->best_tokens - from;
    } else {
        end += compute_ms(s, tokens, local);
    }
    rec->cached_tokens = local + rec->fetched_tokens;
    count_prefix(s, id);
    s->r->prefill_busy_ms += end - s->now_ms;
    l->start_ms = s->now_ms;
    bt_sim_handoff_begin(s, id);
    return end - s->now_ms;
}

void bt_sim_compute_next(struct sim *s, uint32_t node)
{
    struct bt_sim_prefill *p = &s->p[node];
    const struct bt_sim_job *job = bt_sim_prefill_next(p, s->now_ms);
    if (job == NULL) {
        return;
    }
    double ms = job->rest_ms > 0 ? job->rest_ms : begin(s, node, job->id);
    uint32_t tokens = bt_sim_tokens_of(s, job->id);
    uint32_t todo = tokens - BT_MIN(s->r->records[job->id].cached_tokens, tokens);
    uint32_t steps = BT_DIV_UP(BT_MAX(todo, 1u), BT_SIM_SHORT_CHUNK);
    if (job->late) {
        steps = BT_MAX(steps, (uint32_t)ceil(1e6 * ms / BT_BATCH_LATE_NS));
    }
    bt_sim_prefill_run(p, s->now_ms, ms, steps);
    bt_sim_push(s, p->run_end_ms, EV_PREFILL_END, node, p->version);
}

void bt_sim_compute_end(struct sim *s, uint32_t node)
{
    uint32_t id = bt_sim_prefill_end(&s->p[node])->id;
    uint32_t decode = s->r->records[id].decode;
    bt_sim_row_first(s, id);
    keep_prompt(s, id, node);
    bt_sim_compute_next(s, node);
    if (bt_sim_row_needless(s, id)) {
        (void)bt_sim_row_begin(s, id);
        return;
    }
    if (s->o->admission->at_decode && !bt_sim_failed_since(s, id, decode)) {
        struct bt_sched_request want = bt_sim_ask(s, id);
        struct bt_sched_reject rej;
        bt_sim_show_decode(s, decode);
        if (bt_sched_admit_decode(&s->params, &s->snap, &want, decode, &rej) != BT_SCHED_PLANNED) {
            s->r->wasted_ms += s->now_ms - s->live[id].start_ms;
            bt_sim_row_expect(s, id, -1);
            bt_sim_finish(s, id, BT_SIM_REFUSED_DECODE);
            return;
        }
    }
    bt_sim_handoff(s, id);
}

/* ---- at a decode node ---- */

void bt_sim_compute_beside(struct sim *s, uint32_t id)
{
    struct bt_sim_record *rec = &s->r->records[id];
    const struct live *l = &s->live[id];
    if (bt_sim_failed_since(s, id, rec->prefill)) {
        bt_sim_abandon(s, id, rec->prefill, true);
        return;
    }
    uint32_t local = hold_prefix(s, id, rec->prefill);
    bool fetched = l->best_tokens > local && !bt_sim_fetch_lost(s, id);
    rec->fetched_tokens = fetched ? BT_MIN(l->fetch_tokens, l->best_tokens - local) : 0;
    rec->cached_tokens = BT_MAX(local, rec->fetched_tokens != 0 ? l->best_tokens : 0);
    count_prefix(s, id);
    if (rec->decode != rec->prefill) {
        bt_sim_handoff_begin(s, id);
    }
    struct bt_sim_prompt p = {
        .id = id, .from = rec->cached_tokens, .tokens = bt_sim_tokens_of(s, id)};
    bt_sim_decode_prompt(s->d[rec->prefill].d, s->now_ms, &p);
    bt_sim_rows_wake(s, rec->prefill);
}

/* Its row goes on where it is, or where rows are packed. */
void bt_sim_compute_beside_end(struct sim *s, uint32_t id)
{
    const struct bt_sim_record *rec = &s->r->records[id];
    bt_sim_row_first(s, id);
    s->r->mixed_prompts++;
    keep_prompt(s, id, rec->prefill);
    if (rec->decode != rec->prefill && !bt_sim_row_needless(s, id)) {
        bt_sim_handoff(s, id);
        return;
    }
    (void)bt_sim_row_begin(s, id);
}
