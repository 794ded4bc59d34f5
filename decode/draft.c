/* Speculation: drafts behind the next token of each row. Text that the row's grammar forces comes
 * first. Otherwise an index of the row's own tokens proposes drafts (common/spec/match.h). The cost
 * of a step and the number of drafts accepted so far decide how many a step tries (choose.h). The
 * index depends on the tokens only, so a row that was handed off, resumed or forked has the same
 * drafts as any other. Engine thread. */
#include "decode/decode.h"

/* Tokens that are added to indexes before one step. They take 0.1 ms; a prompt of 128k tokens is in
 * its index after 16 steps. */
#define INDEX_TOKENS 8192
/* Tokens of one answer that are looked up in its prediction before one step. */
#define PREDICT_TOKENS 64

static bt_spec_kind_t kind_of(const struct bt_wcore *c, const struct bt_submission *s)
{
    if (s->search || s->params.n_dola > 0 || s->params.penalty_alpha > 0) {
        /* engines do not take drafts there; a beam search needs the row of each token */
        return BT_SPEC_OFF;
    }
    bool own = c->spec.kind == BT_SPEC_OFF || s->speculation == BT_SPEC_AUTO ||
               (s->speculation == BT_SPEC_MODEL && c->spec.model.eng == NULL) ||
               (s->speculation == BT_SPEC_MTP && c->spec.mtp.slots == NULL);
    return own ? c->spec.kind : s->speculation;
}

bool bt_decode_by_model(const struct bt_wcore *c, const struct bt_wreq *r)
{
    return kind_of(c, r->sub) == BT_SPEC_MODEL;
}

bool bt_decode_by_mtp(const struct bt_wcore *c, const struct bt_wreq *r)
{
    return kind_of(c, r->sub) == BT_SPEC_MTP;
}

static size_t index_at(const struct bt_wcore *c, const struct bt_submission *s)
{
    uint32_t blocks = BT_DIV_UP(s->n, c->block_tokens);
    return BT_ALIGN_UP(sizeof(struct bt_row) + blocks * sizeof(uint32_t), sizeof(uint64_t));
}

size_t bt_decode_row_bytes(const struct bt_wcore *c, const struct bt_submission *s)
{
    /* If the draft model fails, rows use drafts of their own text, so they need an index. */
    bt_spec_kind_t kind = kind_of(c, s);
    bool drafts = kind != BT_SPEC_OFF && kind != BT_SPEC_MTP && s->phases != BATON__PHASES__PREFILL;
    size_t beams = s->beams.width > 0 ? bt_decode_beam_bytes(c, s) : 0;
    return index_at(c, s) + (drafts ? bt_spec_match_bytes(s->len_max) : beams);
}

void *bt_decode_beam_memory(const struct bt_wcore *c, const struct bt_wreq *r)
{
    return (char *)r->row + index_at(c, r->sub);
}

static struct bt_spec_rates *rates_of(const struct bt_wcore *c, struct bt_wreq *r)
{
    if (!r->row->rated) {
        r->row->rated = true;
        r->row->rates = c->spec.rates;
    }
    return &r->row->rates;
}

float bt_decode_draft_rate(const struct bt_wcore *c, struct bt_wreq *r, uint32_t match)
{
    return bt_spec_rate(rates_of(c, r), match);
}

/* Adds at most *most_p of r's tokens to its index. Returns true when all are in. */
static bool update_index(const struct bt_wcore *c, struct bt_wreq *r, uint32_t *most_p)
{
    struct bt_row *w = r->row;
    if (w->index == NULL) {
        w->index = (struct bt_spec_match *)((char *)w + index_at(c, r->sub));
        bt_spec_match_init(w->index, kind_of(c, r->sub), r->sub->len_max);
    }
    uint32_t before = w->index->n;
    bool all = bt_spec_match_extend(w->index, r->tokens, r->len, *most_p);
    *most_p -= w->index->n - before;
    return all;
}

/* Follows the answer through its prediction. Uses the predicted text as drafts if it has matched at
 * least as long a text as *d. */
static void predict(struct bt_wreq *r, uint32_t most, struct bt_spec_draft *d)
{
    struct bt_spec_predict *p = &r->row->predict;
    const struct bt_submission *s = r->sub;
    struct bt_spec_draft own;
    for (uint32_t i = 0; i < PREDICT_TOKENS && s->n_prompt + p->n < r->len; i++) {
        bt_spec_predict_take(p, s->prediction, s->n_prediction, r->tokens[s->n_prompt + p->n]);
    }
    if (s->n_prompt + p->n < r->len) {
        return;
    }
    bt_spec_predict_find(p, s->prediction, s->n_prediction, most, &own);
    if (own.n > 0 && own.match >= d->match) {
        *d = own;
    }
}

/* Writes drafts behind r's tokens. Returns their number. There are none beyond the longest answer,
 * because they would be dropped. */
static uint32_t propose(const struct bt_wcore *c, struct bt_wreq *r, uint32_t *index_p)
{
    struct bt_spec_draft d;
    bt_spec_kind_t kind = kind_of(c, r->sub);
    if (kind == BT_SPEC_OFF || kind >= BT_SPEC_MODEL || r->len + 1 >= r->sub->len_max ||
        !update_index(c, r, index_p)) {
        return 0;
    }
    uint32_t most = r->sub->len_max - r->len - 1;
    if (bt_wmask_forced(r, most, &d) == 0) {
        bt_spec_match_find(r->row->index, r->tokens, r->len, most, &d);
        if (r->sub->n_prediction > 0) {
            predict(r, most, &d);
        }
    }
    for (uint32_t i = 0; i < d.n; i++) {
        r->tokens[r->len + i] = d.tokens[i];
    }
    r->row->match = d.match;
    return d.n;
}

uint32_t bt_decode_draft_pages(struct bt_wcore *c, struct bt_wreq *r, uint32_t n)
{
    uint32_t page;
    while ((r->pos + n) / c->block_tokens >= r->n_pages) {
        if (bt_page_pool_free_count(c->pages) <= c->reqs.n_active ||
            bt_page_pool_get(c->pages, 1, &page) != BT_OK) {
            return r->n_pages * c->block_tokens - r->pos - 1;
        }
        r->pages[r->n_pages] = page;
        bt_status_t st = c->vt->slot_pages(c->eng, r->slot, r->n_pages, &page, 1);
        r->n_pages++;
        if (st != BT_OK) {
            bt_wcore_fatal(c, st, "slot_pages");
            return 0;
        }
    }
    return n;
}

void bt_decode_draft(struct bt_wcore *c)
{
    struct bt_wspec *s = &c->spec;
    struct bt_batch_work work = {0};
    uint32_t n = 0, index = INDEX_TOKENS;
    s->drafting_ns = 0;
    if (s->kind == BT_SPEC_OFF) {
        return;
    }
    for (uint32_t i = 0; i < c->batch.n; i++) {
        struct bt_wreq *r = c->seq_reqs[i];
        if (c->batch.seqs[i].kind != BT_BATCH_DECODE) {
            continue;
        }
        work.tokens += 1;
        work.kv += c->batch.seqs[i].pos;
        uint32_t have = n < BT_WORKER_DRAFT_ROWS ? propose(c, r, &index) : 0;
        if (have > 0) {
            s->seqs[n] = i;
            s->rows[n++] = (struct bt_spec_row){
                .rate = bt_decode_draft_rate(c, r, r->row->match), .n = have, .pos = r->pos};
        }
    }
    uint32_t used = (uint32_t)work.tokens + (bt_batch_waiting(&c->batch) > 0 ? c->block_tokens : 0);
    uint32_t most = BT_MIN(c->max_rows - BT_MIN(used, c->max_rows), c->info->max_drafts);
    if (n > 0 && most > 0) {
        bt_spec_choose(&c->speed.fit.cost, &work, work.tokens, most, s->rows, n, &s->trial);
    }
    for (uint32_t i = 0; i < n && most > 0 && !c->fatal; i++) {
        struct bt_wreq *r = c->seq_reqs[s->seqs[i]];
        c->batch.seqs[s->seqs[i]].drafts = bt_decode_draft_pages(c, r, s->rows[i].take);
        most -= BT_MIN(s->rows[i].take, most);
    }
    if (s->model.eng != NULL && most > 0 && !c->fatal) {
        bt_decode_draft_by_model(c, &work, most);
    }
    if (s->mtp.slots != NULL && !c->fatal) {
        /* what rows with drafts of the draft model have taken */
        for (uint32_t i = 0; i < c->batch.n; i++) {
            uint32_t taken = bt_decode_by_model(c, c->seq_reqs[i]) ? c->batch.seqs[i].drafts : 0;
            most -= BT_MIN(taken, most);
        }
        bt_decode_draft_by_mtp(c, &work, most);
    }
}

void bt_decode_drafted(struct bt_wcore *c, struct bt_wreq *r, uint32_t n, uint32_t accepted)
{
    struct bt_wstats *s = c->stats;
    if (n == 0) {
        return;
    }
    if (bt_decode_by_model(c, r)) { /* the draft model has not computed KV of its last draft */
        r->row->model_pos = r->len + BT_MIN(accepted, n - 1);
    }
    bt_spec_rates_learn(rates_of(c, r), &c->spec.rates, r->row->match, n, accepted);
    bt_metric_add(s->drafts, 1);
    bt_metric_add(s->draft_tokens, n);
    bt_metric_add(s->drafts_accepted, accepted);
    for (uint32_t i = 0; i < accepted; i++) {
        bt_metric_add(s->accepted_at[i], 1);
    }
}
