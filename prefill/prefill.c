/* The steps of a prompt in the prefill role, and the role's table. This file uses the engine and
 * the requests only through common/worker/core.h. Engine thread. */
#include <stdio.h>

#include "common/log/log.h"
#include "prefill/prefill.h"

static void opened(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_wcore_enqueue(c, r);
}

/* The first item of the chunk that contains block b. */
static uint32_t item_of(const struct bt_wcore *c, const struct bt_wgrant *g, uint32_t b)
{
    return b / (g->chunk_tokens / c->block_tokens) * c->layout.n_layers;
}

/* Copies the resident prefix (r->pos tokens) from the slab to the pages, together with the part of
 * the tail that has landed directly behind it. Layer l of all these blocks is item l, so the layers
 * arrive in the order in which the first chunk needs them. */
static bt_status_t load_prefix(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t tokens = r->pos, n = BT_DIV_UP(tokens, c->block_tokens);
    bool met = bt_prefill_tail_reached(c, r) && bt_prefill_tail_valid(r);
    if (n == 0 && !met) {
        return BT_OK;
    }
    bt_status_t st = c->vt->flow_open(c->eng, BT_ENGINE_LOAD, BT_ENGINE_PRIO_LAND, NULL,
                                      r->sub->epoch, NULL, NULL, &r->load_flow);
    if (st != BT_OK) {
        r->load_flow = 0;
        return st;
    }
    for (uint32_t b = 0; b < n; b++) {
        c->blocks[b] = (struct bt_engine_block){
            .mem = bt_slab_data(r->grant.slab->slab, r->grant.terms->slots[b]),
            .page = r->pages[b],
            .toks = BT_MIN(c->block_tokens, tokens - b * c->block_tokens),
            .seq = 0,
        };
    }
    if (met) {
        n += bt_prefill_tail_blocks(c, r, c->blocks + n);
        bt_prefill_tail_skip(c, r);
    }
    return c->vt->flow_add(c->eng, r->load_flow, c->blocks, n);
}

/* Copies the blocks that are not resident from the pages to the slab. The flow raises the grant's
 * progress word. The kvstore has raised it past the items that are completely resident; the items
 * of this flow come next. */
static bt_status_t store_rest(struct bt_wcore *c, struct bt_wreq *r)
{
    const struct bt_wgrant *g = r->grant.terms;
    bt_status_t st = c->vt->flow_open(c->eng, BT_ENGINE_STORE, BT_ENGINE_PRIO_LAND,
                                      &r->grant.slab->slab->flows[g->flow_word], r->sub->epoch,
                                      c->bell, c->bell_arg, &r->store_flow);
    if (st != BT_OK) {
        r->store_flow = 0;
        return st;
    }
    uint32_t n = 0;
    for (uint32_t b = g->resident_blocks; b < g->n_slots; b++) {
        c->blocks[n++] = (struct bt_engine_block){
            .mem = bt_slab_data(r->grant.slab->slab, g->slots[b]),
            .page = r->pages[b],
            .toks = BT_MIN(c->block_tokens, r->sub->n - b * c->block_tokens),
            .seq = item_of(c, g, b),
        };
    }
    return c->vt->flow_add(c->eng, r->store_flow, c->blocks, n);
}

static bt_status_t begin(struct bt_wcore *c, struct bt_wreq *r, char *err, size_t err_cap)
{
    const struct bt_wgrant *g = r->grant.terms;
    bt_status_t st = bt_wcore_slot_open(c, r);
    if (st != BT_OK) {
        snprintf(err, err_cap, "engine: cannot open the sequence: %s", bt_status_text(st));
        return st;
    }
    if (!bt_wgrant_valid(r, 0, g->n_slots)) {
        snprintf(err, err_cap, "the kvstore has given a slot of the grant to another request");
        return BT_ERR_STALE;
    }
    /* The last prompt token is always computed: its logits choose the first token. */
    r->cached =
        r->sub->prompt_logprobs ? 0 : BT_MIN(g->resident_blocks * c->block_tokens, r->sub->n - 1);
    r->pos = r->cached;
    bt_metric_add(c->stats->prefix_queries, r->sub->n);
    bt_metric_add(c->stats->prefix_hits, r->cached);
    bt_metric_add(c->stats->prompt_cached, r->cached);
    st = load_prefix(c, r);
    r->prompt->filled = g->resident_blocks == g->n_slots;
    if (st == BT_OK && !r->prompt->filled) {
        st = store_rest(c, r);
    }
    if (st != BT_OK) {
        snprintf(err, err_cap, "engine: cannot start the copies: %s", bt_status_text(st));
        return st;
    }
    r->stage = BT_WREQ_PROMPT;
    return BT_OK;
}

static void row(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                struct bt_engine_row *e)
{
    if (r->load_flow != 0) {
        e->wait = (struct bt_engine_at){.flow = r->load_flow, .seq = 0};
    }
    if (r->sub->prompt_logprobs) {
        e->flags |= BT_ROW_PROMPT_LOGPROBS;
    }
    const struct bt_wgrant *g = r->grant.terms;
    uint32_t last_block = (b->pos + b->n - 1) / c->block_tokens;
    /* Does not store two kinds of blocks: resident ones that are computed again (for
     * prompt_logprobs), and those behind the end of a grant that does not cover the whole
     * prompt. */
    if (b->chunk_end && r->store_flow != 0 && !r->prompt->filled &&
        last_block >= g->resident_blocks) {
        uint32_t seq = item_of(c, g, last_block), end = item_of(c, g, g->n_slots - 1);
        e->fire = (struct bt_engine_at){.flow = r->store_flow, .seq = BT_MIN(seq, end)};
        r->prompt->filled = seq >= end;
    }
}

/* Closes the grant of a prompt that no slab can hold. The prompt needs its grant only up to the
 * grant's end. If the pool has the blocks behind it, they are loaded piece by piece. The copies to
 * the grant's slots end first. */
static void leave_grant(struct bt_wcore *c, struct bt_wreq *r)
{
    r->stage = BT_WREQ_LOADING;
    bt_wgrant_trailer(r, 0); /* no decode worker reads this grant */
    bt_wcore_flow_close(c, r, &r->load_flow, false);
    bt_wcore_flow_close(c, r, &r->store_flow, false);
    BT_ASSERT(r->flows_pending > 0 || c->fatal); /* one of the flows was open, so quiet() follows */
}

static bool plan(struct bt_wcore *c, struct bt_wreq *r, struct bt_batch_seq *s)
{
    if (r->oversized && r->grant.open && r->prompt->filled && !r->sub->prompt_logprobs) {
        leave_grant(c, r);
        return false;
    }
    s->stop = bt_prefill_tail_plan(c, r);
    return true;
}

static void report(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_wout o = {.kind = BT_WOUT_PREFILL_DONE};
    o.u.prefill.request = r->sub->request;
    o.u.prefill.session = r->sub->session;
    o.u.prefill.epoch = r->sub->epoch;
    o.u.prefill.cached = r->cached;
    o.u.prefill.computed = r->sub->n - r->cached;
    o.u.prefill.start_ns = r->start_ns;
    o.u.prefill.last_compute_ns = r->last_compute_ns;
    bt_wcore_emit_after(c, &o); /* this message follows the first token */
}

static void stepped(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                    const struct bt_engine_out *out, uint32_t n_out)
{
    (void)n_out; /* prompts have no drafts */
    if (r->load_flow != 0) {
        /* The first row of the prompt has waited for every layer of the load. */
        if (!bt_wgrant_valid(r, 0, r->grant.terms->resident_blocks) || !bt_prefill_tail_valid(r)) {
            bt_wcore_end(c, r, BT_ERR_STALE, "a slot of the prefix was given away while it loaded");
            return;
        }
        bt_wcore_flow_close(c, r, &r->load_flow, false);
    }
    bt_prefill_tail_past(c, r, b->pos + b->n);
    if (r->oversized) {
        bt_wback_offer(c, r);
    }
    if (out == NULL && !b->last) {
        return;
    }
    if (out == NULL) { /* max_new is 0: nothing is generated */
        report(c, r);
        r->finish = BATON__FINISH__LENGTH;
        bt_wgrant_trailer(r, 0);
        bt_wcore_end(c, r, BT_OK, "%s", "");
        return;
    }
    if (!r->sub->search && !bt_wcore_token(c, r, out)) {
        return;
    }
    report(c, r);
    bt_wgrant_trailer(r, r->sub->search ? 0 : out->token);
    c->decode->prompt_done(c, r);
    if (r->leaving) {
        r->finish = BATON__FINISH__STOP;
    }
    if (r->sub->phases == BATON__PHASES__BOTH && r->finish == BATON__FINISH__NOT_FINISHED) {
        /* The request goes on in this worker. The copies of its prompt to the slab end during its
         * first rows. */
        bt_prefill_tail_free(r);
        r->role = &c->decode->role;
        r->stage = BT_WREQ_ROW;
        bt_wcore_flow_close(c, r, &r->store_flow, false);
        if (r->flows_pending == 0) {
            r->role->quiet(c, r);
        }
        if (r->sub->search) {
            c->decode->search(c, r, out);
        }
        return;
    }
    bt_wcore_end(c, r, BT_OK, "%s", "");
}

static void quiet(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->lease.by_pieces) {
        bt_wlease_piece_loaded(c, r);
    } else if (r->stage == BT_WREQ_LOADING) {
        if (!bt_wgrant_valid(r, 0, r->grant.terms->resident_blocks) || !bt_prefill_tail_valid(r)) {
            bt_wcore_end(c, r, BT_ERR_STALE, "a slot of the prefix was given away while it loaded");
            return;
        }
        bt_wgrant_close(c, r);
        bt_prefill_tail_free(r);
        bt_wlease_pieces(c, r);
    } else {
        /* Only the load of the prefix has ended; the prompt goes on. */
        BT_ASSERT(r->stage == BT_WREQ_PROMPT);
    }
}

static void piece(struct bt_wcore *c, struct bt_wreq *r, uint32_t tokens)
{
    r->cached += tokens;
    bt_metric_add(c->stats->prefix_hits, tokens);
    bt_metric_add(c->stats->prompt_cached, tokens);
}

static void pieces_over(struct bt_wcore *c, struct bt_wreq *r)
{
    (void)c;
    BT_DEBUG("streamed", "req=%016llx epoch=%u cached=%u of=%u",
             (unsigned long long)r->sub->request, r->sub->epoch, r->cached, r->sub->n);
}

const struct bt_prefill_ops bt_prefill = {
    .role =
        {
            .kind = "prefill",
            .opened = opened,
            .begin = begin,
            .plan = plan,
            .row = row,
            .stepped = stepped,
            .quiet = quiet,
            .piece = piece,
            .pieces_over = pieces_over,
            .release = bt_prefill_tail_free,
        },
    .state_bytes = sizeof(struct bt_prompt),
    .tail = bt_prefill_tail_add,
    .logprobs = bt_prefill_logprobs,
};
