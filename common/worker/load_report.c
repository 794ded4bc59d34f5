/* The worker's reports of its speed and its queue: the cost of a step, fitted to its own steps, and
 * the load in heartbeats. Engine thread; allocates nothing. */
#include "common/batch/ahead.h"
#include "common/worker/core.h"

void bt_wcost_measure(struct bt_wcore *c)
{
    struct bt_wstep *s = &c->step;
    double ns = (double)(bt_mono_ns() - s->launched_ns), secs = ns / 1e9;
    bt_metric_observe(c->stats->iteration_tokens, s->prompt_tokens + s->decode_tokens);
    bt_metric_add(c->stats->steps, 1);
    bt_metric_add(c->stats->prompt_tokens, s->prompt_tokens);
    if (s->searches > 0) {
        return; /* it says nothing of the cost of steps like others */
    }
    bt_spec_trial_over(&c->spec.trial, ns);
    bt_spec_trial_over(&c->spec.passes, ns + c->spec.drafting_ns);
    if (s->decode_rows > 0) {
        double each = (double)s->decode_tokens / s->decode_rows;
        c->speed.row_tokens += (c->speed.row_tokens > 0 ? 0.05 : 1) * (each - c->speed.row_tokens);
    }
    double error = bt_batch_fit_step(&c->speed.fit, &s->work, ns);
    bt_metric_observe(c->stats->step_error[s->work.prompt], error < 0 ? -error : error);
    if (s->prompt_tokens == 0 && secs > 0) {
        double ms = secs * 1e3;
        c->speed.step_ewma_ms =
            c->speed.step_ewma_ms > 0 ? 0.9 * c->speed.step_ewma_ms + 0.1 * ms : ms;
    } else if (s->decode_tokens == 0 && s->prompt_tokens >= c->block_tokens && secs > 0) {
        double tps = s->prompt_tokens / secs;
        c->speed.prefill_ewma_tps =
            c->speed.prefill_ewma_tps > 0 ? 0.8 * c->speed.prefill_ewma_tps + 0.2 * tps : tps;
    }
}

/* Prompt tokens of one request in one step, at most. */
static uint32_t chunk_tokens(const struct bt_wcore *c)
{
    int64_t flow = c->conf->common.kv_flow_chunk_tokens;
    return flow > 0 ? (uint32_t)BT_MIN(flow, (int64_t)c->max_rows) : c->max_rows;
}

/* The class by which rows and prompts are ordered: the upper 16 bits of the order. */
static int32_t class_of(const struct bt_wreq *r)
{
    return (int32_t)(r->order >> 48) + INT16_MIN;
}

/* Adds the tokens of r that are still to be computed as a prompt to the queue of its class. */
static uint64_t add_prompt(const struct bt_wcore *c, const struct bt_wreq *r,
                           struct bt_classes *classes)
{
    bt_classes_at(classes, class_of(r))->queue_ns +=
        bt_batch_prefill_ns(&c->speed.fit.cost, r->pos, r->len, chunk_tokens(c));
    return r->len - r->pos;
}

static void add_waiting(const struct bt_list *list, bool landing, struct bt_classes *classes)
{
    const struct bt_list *it;
    bt_list_for_each (it, list) {
        struct bt_class *k =
            bt_classes_at(classes, class_of(BT_CONTAINER_OF(it, struct bt_wreq, link)));
        k->waiting++;
        k->landing += landing;
    }
}

static void add_seq(const struct bt_wcore *c, const struct bt_wreq *r, struct bt_batch *b)
{
    if (b->n < BT_BATCH_AHEAD_SEQS) {
        b->seqs[b->n++] = (struct bt_batch_seq){
            .pos = r->pos, .len = r->len, .chunk_tokens = chunk_tokens(c), .kind = BT_BATCH_PROMPT};
    }
}

/* Prompts that share steps are computed sooner than one after the other. So the classes' queues
 * shrink by what the first prompts save. With active rows other rules of the batcher apply, and
 * nothing is subtracted. */
static void share_steps(const struct bt_wcore *c, uint64_t rows, struct bt_classes *classes)
{
    struct bt_batch_seq seqs[BT_BATCH_AHEAD_SEQS];
    struct bt_batch b = {.lim = c->batch.lim, .seqs = seqs, .cost = c->batch.cost};
    struct bt_batch_ahead ahead;
    double alone = 0;
    const struct bt_list *it;
    if (b.cost == NULL || rows > 0 || atomic_load(&c->role) == BT_ROLES_DECODE) {
        return;
    }
    bt_list_for_each (it, &c->reqs.active) {
        const struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->stage == BT_WREQ_PROMPT) {
            add_seq(c, r, &b);
        }
    }
    bt_list_for_each (it, &c->reqs.queue) {
        const struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->sub->phases != BATON__PHASES__DECODE) {
            add_seq(c, r, &b);
        }
    }
    if (b.n < 2) {
        return;
    }
    for (uint32_t i = 0; i < b.n; i++) {
        alone += bt_batch_prefill_ns(b.cost, seqs[i].pos, seqs[i].len, chunk_tokens(c));
    }
    bt_batch_ahead(&b, NULL, 0, chunk_tokens(c), &ahead);
    for (uint32_t i = 0; i < classes->n && alone > 0; i++) {
        classes->of[i].queue_ns *= BT_MIN(ahead.all_ns / alone, 1);
    }
}

void bt_wload_publish(struct bt_wcore *c)
{
    struct bt_wstats *s = c->stats;
    /* Pages that are only kept for write-back count as free: they are given up when needed. */
    uint32_t pages_free =
        BT_MIN(bt_page_pool_free_count(c->pages) + c->puts.drain_pages, c->info->pages);
    uint64_t queued = 0, kv = 0, rows = 0;
    struct bt_classes classes = {0};
    struct bt_list *it;
    bt_list_for_each (it, &c->reqs.queue) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        queued += r->sub->phases != BATON__PHASES__DECODE ? add_prompt(c, r, &classes) : 0;
    }
    add_waiting(&c->reqs.queue, false, &classes);
    add_waiting(&c->reqs.waiting, true, &classes);
    bt_list_for_each (it, &c->reqs.active) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        queued += r->stage == BT_WREQ_PROMPT ? add_prompt(c, r, &classes) : 0;
        if (r->stage == BT_WREQ_ROW) {
            struct bt_class *k = bt_classes_at(&classes, class_of(r));
            kv += (uint64_t)r->pos * r->sub->n_slots;
            k->rows += r->sub->n_slots;
            rows++;
            k->pages += r->n_pages + r->beam_pages;
        }
    }
    share_steps(c, rows, &classes);
    double ns = 0;
    for (uint32_t i = 0; i < classes.n; i++) {
        ns += classes.of[i].queue_ns;
    }
    uint64_t now = bt_mono_ns();
    if (c->step.active && c->step.prompt_tokens > 0) { /* the step's rows were added above
                                                          already */
        ns += BT_MAX(bt_batch_work_ns(&c->speed.fit.cost, &c->step.work) -
                         (double)(now - c->step.launched_ns),
                     0);
    }
    uint64_t steps = c->speed.fit.seen[0].steps + c->speed.fit.seen[1].steps;
    if (c->speed.fit.seen[1].steps > 0) { /* without measured prefill steps the coefficients are
                                             only the prior's guess */
        bt_wstats_cost(s, &c->speed.fit.cost, steps);
    }
    bt_wstats_classes(s, &classes);
    atomic_store(&s->load.running, c->reqs.n_active);
    atomic_store(&s->load.waiting, c->reqs.n_queue + c->reqs.n_waiting);
    atomic_store(&s->load.landing, c->reqs.n_waiting);
    atomic_store(&s->load.pages_free, pages_free);
    atomic_store(&s->load.slots_free, c->n_free_slots);
    atomic_store(&s->load.queued_tokens, queued);
    atomic_store(&s->load.queue_end_ns, now + (uint64_t)ns);
    atomic_store(&s->load.kv_tokens, kv);
    atomic_store(&s->load.chunk_tokens, chunk_tokens(c));
    atomic_store(&s->load.prefill_mtps, (uint64_t)(c->speed.prefill_ewma_tps * 1e3));
    atomic_store(&s->load.row_mtokens, (uint64_t)(c->speed.row_tokens * 1e3));
    atomic_store(&s->load.step_us, (uint64_t)(c->speed.step_ewma_ms * 1e3));
    bt_metric_set(s->running, c->reqs.n_active);
    bt_metric_set(s->waiting, c->reqs.n_queue + c->reqs.n_waiting);
    bt_metric_set(s->pages_free, pages_free);
    double used = 1.0 - (double)pages_free / c->info->pages;
    bt_metric_set(s->kv_usage, used);
    bt_metric_set(s->kv_usage_old, used);
}
