/* The steps of a sequence in the decode role, and the role's table. This file uses the engine and
 * the requests only through common/worker/core.h. Engine thread. */
#include <stdio.h>

#include "decode/decode.h"

static void opened(struct bt_wcore *c, struct bt_wreq *r)
{
    (void)c;
    /* requests of this stage are in the same list as those of OPENING */
    r->stage = BT_WREQ_LANDING;
}

/* The prompt's KV is in the slab. The row takes its pages only now. */
static void landed(struct bt_wcore *c, struct bt_wreq *r, uint32_t first_token, bool finished)
{
    r->row->first_token = first_token;
    if (r->row->first_token >= c->info->vocab) {
        bt_wcore_end(c, r, BT_ERR_PEER_PROTOCOL,
                     "the hand-off's first token %u is outside the "
                     "vocabulary of %u",
                     r->row->first_token, c->info->vocab);
        return;
    }
    /* a beam search has no first token */
    r->row->finished =
        !r->sub->search && (finished || bt_submission_finish(r->sub, r->sub->n + 1, first_token) !=
                                            BATON__FINISH__NOT_FINISHED);
    if (r->row->finished && r->next_choice == NULL) {
        bt_wcore_end(c, r, BT_OK, "%s", ""); /* the prefill worker has already sent the token */
        return;
    }
    r->row->landed_ns = bt_mono_ns();
    bt_wcore_enqueue(c, r);
}

/* Begins a further choice, or resumes a preempted row. Tokens whose pages the submission has not
 * kept are loaded from the slab or computed; this concerns prompt and generated tokens. The
 * sequence opens a slot of its own, and does not use the engine's slot_fork: the lead may have gone
 * on or ended. */
static bt_status_t begin_again(struct bt_wcore *c, struct bt_wreq *r, char *err, size_t err_cap)
{
    bt_status_t st = bt_wcore_slot_open(c, r);
    st = st == BT_OK ? bt_decode_reload_begin(c, r) : st;
    if (st != BT_OK) {
        snprintf(err, err_cap, "engine: cannot open the sequence: %s", bt_status_text(st));
    }
    return st;
}

static bt_status_t begin(struct bt_wcore *c, struct bt_wreq *r, char *err, size_t err_cap)
{
    if (r->resumed || r != r->lead) {
        return begin_again(c, r, err, err_cap);
    }
    const struct bt_wgrant *g = r->grant.terms;
    bt_status_t st = bt_wcore_slot_open(c, r);
    if (st == BT_OK) {
        st = c->vt->flow_open(c->eng, BT_ENGINE_LOAD, BT_ENGINE_PRIO_LAND, NULL, r->sub->epoch,
                              NULL, NULL, &r->load_flow);
        r->load_flow = st == BT_OK ? r->load_flow : 0;
    }
    if (st == BT_OK) {
        for (uint32_t b = 0; b < g->n_slots; b++) {
            c->blocks[b] = (struct bt_engine_block){
                .mem = bt_slab_data(r->grant.slab->slab, g->slots[b]),
                .page = r->pages[b],
                .toks = BT_MIN(c->block_tokens, r->sub->n - b * c->block_tokens),
                .seq = 0,
            };
        }
        st = c->vt->flow_add(c->eng, r->load_flow, c->blocks, g->n_slots);
    }
    if (st != BT_OK) {
        snprintf(err, err_cap, "engine: cannot load the prompt's KV: %s", bt_status_text(st));
        return st;
    }
    r->cached = r->sub->n;
    /* quiet() follows when the engine has copied all blocks */
    bt_wcore_flow_close(c, r, &r->load_flow, false);
    return BT_OK;
}

static void quiet(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->stage != BT_WREQ_LOADING) {
        bt_wgrant_close(c, r); /* a BOTH submission: the engine has copied the prompt to the slab */
        return;
    }
    if (r->lease.got != NULL) {
        bt_status_t st = bt_decode_reload_loaded(c, r);
        if (st != BT_OK) {
            bt_wcore_end(c, r, BT_ERR_INTERNAL, "engine: page_copy: %s", bt_status_text(st));
        }
        return;
    }
    bool valid = bt_wgrant_valid(r, 0, r->grant.terms->n_slots);
    bt_wgrant_close(c, r);
    if (!valid) {
        bt_wcore_end(c, r, BT_ERR_STALE, "a slot of the grant was given away while it loaded");
        return;
    }
    bt_decode_fork_start(c, r);
    if (r->row->finished || r->leaving) {
        bt_wcore_end(c, r, BT_OK, "%s", "");
        return;
    }
    if (r->sub->search) { /* a search begins with the row of the prompt's last token */
        r->pos = r->sub->n - 1;
        r->stage = BT_WREQ_PROMPT;
        return;
    }
    bt_status_t st = c->vt->slot_accept(c->eng, r->slot, r->row->first_token);
    if (st != BT_OK) {
        bt_wcore_end(c, r, BT_ERR_INTERNAL, "engine: first token: %s", bt_status_text(st));
        return;
    }
    r->pos = r->sub->n;
    r->tokens[r->len++] = r->row->first_token;
    r->stage = BT_WREQ_ROW;
}

/* Tells the batch how long a row whose KV came from another node has waited for its first step
 * here. */
static bool plan(struct bt_wcore *c, struct bt_wreq *r, struct bt_batch_seq *s)
{
    (void)c;
    s->waited_ns = r->row->landed_ns != 0 ? (double)(bt_mono_ns() - r->row->landed_ns) : 0;
    return r->stage == BT_WREQ_PROMPT || !r->row->page_wait;
}

static void stepped(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                    const struct bt_engine_out *out, uint32_t n_out)
{
    if (r->stage == BT_WREQ_ROW && r->sub->search) {
        bt_decode_beam_stepped(c, r, b, out);
        return;
    }
    if (r->stage == BT_WREQ_ROW) {
        r->row->landed_ns = 0;
        bt_decode_drafted(c, r, b->n - 1, n_out - 1);
    }
    if (out == NULL) {
        bt_wback_offer(c, r);
        return; /* a prompt chunk that is computed again */
    }
    if (r->sub->search) {
        bt_wback_offer(c, r);
        bt_decode_search(c, r, out);
        return;
    }
    /* Drops tokens behind the end of the answer. */
    for (uint32_t i = 0; i < n_out && r->finish == BATON__FINISH__NOT_FINISHED; i++) {
        r->pos = r->len; /* r->pos counts tokens that are final, not drafts that were refused */
        bt_wback_offer(c, r);
        if (!bt_wcore_token(c, r, &out[i])) {
            return;
        }
    }
    if (r->stage == BT_WREQ_PROMPT) {
        bt_decode_fork_keep(c, r);
    }
    if (r->finish != BATON__FINISH__NOT_FINISHED) {
        bt_wcore_end(c, r, BT_OK, "%s", "");
        return;
    }
    r->stage = BT_WREQ_ROW;
}

const struct bt_decode_ops bt_decode = {
    .role =
        {
            .kind = "decode",
            .opened = opened,
            .landed = landed,
            .begin = begin,
            .plan = plan,
            .stepped = stepped,
            .quiet = quiet,
            .pieces_over = bt_decode_reload_pieces_over,
        },
    .state_bytes = bt_decode_row_bytes,
    .prompt_done = bt_decode_fork_start,
    .kept_blocks = bt_decode_fork_blocks,
    .take_kept = bt_decode_fork_take,
    .release_kept = bt_decode_fork_release,
    .reclaim = bt_decode_fork_drop,
    .ready = bt_decode_reload_ready,
    .missing = bt_decode_reload_missing,
    .make_way = bt_decode_make_way,
    .provide_pages = bt_decode_provide_pages,
    .draft = bt_decode_draft,
    .bound_prompts = bt_decode_bound_prompts,
    .search = bt_decode_search,
    .plan_beams = bt_decode_plan_beams,
    .beam_row = bt_decode_beam_row,
    .beam_pages = bt_decode_beam_pages,
    .take_beam_pages = bt_decode_take_beam_pages,
    .beam_growth = bt_decode_beam_growth,
    .return_beam_pages = bt_decode_return_beam_pages,
    .tell = bt_decode_tell,
};
