/* Prompts: how much of a prompt a prefill node, or a decode node beside its rows, has to compute,
 * and what the node's cache keeps of it. */
#include "conductor/sim/sim_priv.h"

static void next_step(struct bt_sim *s, uint32_t node);

void bt_sim_compute_queue(struct bt_sim *s, uint32_t id)
{
    uint32_t node = s->r->records[id].prefill;
    struct bt_sim_live *l = &s->live[id];
    if (s->workers[node].decode) { /* when its fetch has ended */
        double there = BT_MAX(s->now_ms, BT_MAX(l->fetch_end_ms, l->read_end_ms));
        bt_sim_push(s, there, EV_PROMPT, id, 0);
        return;
    }
    bt_sim_prefill_add(&s->p[node], &l->job);
    if (!s->p[node].stepping) {
        next_step(s, node);
    }
}

void bt_sim_compute_forget(struct bt_sim *s, uint32_t id)
{
    uint32_t node = s->r->records[id].prefill;
    struct bt_sched_prompt *p = &s->live[id].prompt;
    if (!bt_list_empty(&p->link)) {
        struct bt_sched_pace pace = bt_sim_pace(s, node);
        bt_sched_own_prompt_done(&s->nodes[node].own, p, &pace, bt_sim_now_ns(s));
    }
}

/* ---- its prefix ---- */

/* The computing begins, and uses the part of the prompt that the node has now. Returns tokens. */
static uint32_t hold_prefix(struct bt_sim *s, uint32_t id, uint32_t node)
{
    uint32_t ssd;
    s->live[id].held = bt_sim_caches_use(s->caches, node, bt_sim_blocks_of(s, id),
                                         bt_sim_usable_blocks(s, id), s->now_ms, &ssd);
    s->r->ssd_tokens += (uint64_t)ssd * BT_SIM_BLOCK_TOKENS;
    return s->live[id].held * BT_SIM_BLOCK_TOKENS;
}

/* Counts the prompt's tokens and where they come from. */
static void count_prefix(struct bt_sim *s, uint32_t id)
{
    const struct bt_sim_record *rec = &s->r->records[id];
    s->r->input_tokens += s->req[id].input;
    s->r->cached_tokens += rec->cached_tokens;
    s->r->fetched_tokens += rec->fetched_tokens;
    s->r->bytes_load += (double)rec->cached_tokens * s->c->token_bytes;
}

/* The computing has ended: the node's cache gets all full blocks of the prompt. */
static void keep_prompt(struct bt_sim *s, uint32_t id, uint32_t node)
{
    const struct bt_sim_live *l = &s->live[id];
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

/* The prompt's first step begins, and uses the part of the prompt that the node has now. */
static void begin(void *arg, struct bt_sim_job *job)
{
    struct bt_sim *s = arg;
    uint32_t id = job->id;
    struct bt_sim_live *l = &s->live[id];
    struct bt_sim_record *rec = &s->r->records[id];
    uint32_t local = hold_prefix(s, id, rec->prefill);
    l->begun_ms = s->now_ms;
    job->pos = local;
    job->read_ms = l->read_end_ms;
    if (l->fetch_tokens != 0 && l->best_tokens > local && !bt_sim_fetch_lost(s, id)) {
        job->stop = BT_MAX(l->best_tokens - l->fetch_tokens, local);
        job->resume = l->best_tokens;
        job->fetch_ms = l->fetch_end_ms;
        rec->fetched_tokens = l->best_tokens - job->stop;
        if (job->stop == 0) { /* nothing is computed before the tail */
            job->pos = job->resume;
            job->read_ms = BT_MAX(job->read_ms, job->fetch_ms);
        }
    }
    rec->cached_tokens = local + rec->fetched_tokens;
    job->loaded_ms =
        s->now_ms + 1e3 * rec->cached_tokens * s->c->token_bytes / s->c->load_bytes_per_s;
    count_prefix(s, id);
    bt_sim_handoff_begin(s, id);
}

static void next_step(struct bt_sim *s, uint32_t node)
{
    struct bt_sim_prefill *p = &s->p[node];
    double at_ms = bt_sim_prefill_step(p, s->now_ms, begin, s);
    if (at_ms >= 0) {
        bt_sim_push(s, at_ms, EV_PREFILL, node, p->version);
    }
    if (p->stepping) {
        s->r->prefill_busy_ms += p->end_ms - p->begin_ms;
    }
}

/* A prefill node has computed a prompt. */
static void computed(struct bt_sim *s, uint32_t id)
{
    uint32_t node = s->r->records[id].prefill, decode = s->r->records[id].decode;
    bt_sim_compute_forget(s, id);
    bt_sim_row_first(s, id);
    keep_prompt(s, id, node);
    if (bt_sim_row_needless(s, id)) {
        (void)bt_sim_row_begin(s, id);
        return;
    }
    if (s->o->admission->at_decode && !bt_sim_failed_since(s, id, decode)) {
        struct bt_sched_request want = bt_sim_ask(s, id);
        struct bt_sched_reject rej;
        bt_sim_show_node(s, decode);
        if (bt_sched_admit_decode(&s->params, &s->snap, &want, decode, &rej) != BT_SCHED_PLANNED) {
            s->r->wasted_ms += s->live[id].prompt.alone_ms;
            bt_sim_row_expect(s, id, -1);
            bt_sim_finish(s, id, BT_SIM_REFUSED_DECODE);
            return;
        }
    }
    bt_sim_handoff(s, id);
}

void bt_sim_compute_step(struct bt_sim *s, uint32_t node)
{
    struct bt_sim_prefill *p = &s->p[node];
    struct bt_sim_job *next, *job = p->stepping ? bt_sim_prefill_end(p) : NULL;
    next_step(s, node);
    for (; job != NULL; job = next) {
        next = job->next;
        computed(s, job->id);
    }
}

/* ---- at a decode node ---- */

void bt_sim_compute_beside(struct bt_sim *s, uint32_t id)
{
    struct bt_sim_record *rec = &s->r->records[id];
    const struct bt_sim_live *l = &s->live[id];
    if (bt_sim_failed_since(s, id, rec->prefill)) {
        bt_sim_abandon(s, id, rec->prefill, true);
        return;
    }
    s->live[id].begun_ms = s->now_ms;
    uint32_t local = hold_prefix(s, id, rec->prefill);
    bool fetched = l->best_tokens > local && !bt_sim_fetch_lost(s, id);
    rec->fetched_tokens = fetched ? BT_MIN(l->fetch_tokens, l->best_tokens - local) : 0;
    rec->cached_tokens = BT_MAX(local, rec->fetched_tokens != 0 ? l->best_tokens : 0);
    count_prefix(s, id);
    if (rec->decode != rec->prefill) {
        bt_sim_handoff_begin(s, id);
    }
    struct bt_sim_prompt p = {.id = id,
                              .from = rec->cached_tokens,
                              .tokens = bt_sim_tokens_of(s, id),
                              .late = l->job.late};
    bt_sim_decode_prompt(s->d[rec->prefill].d, s->now_ms, &p);
    bt_sim_rows_wake(s, rec->prefill);
}

/* The row continues on this node, or moves to the node where rows are packed. */
void bt_sim_compute_beside_end(struct bt_sim *s, uint32_t id)
{
    const struct bt_sim_record *rec = &s->r->records[id];
    bt_sim_compute_forget(s, id);
    bt_sim_row_first(s, id);
    s->r->mixed_prompts++;
    keep_prompt(s, id, rec->prefill);
    if (rec->decode != rec->prefill && !bt_sim_row_needless(s, id)) {
        bt_sim_handoff(s, id);
        return;
    }
    (void)bt_sim_row_begin(s, id);
}
