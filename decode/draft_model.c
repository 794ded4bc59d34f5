/* Drafts of a small model (worker.speculate names its directory). The model follows each row:
 * before a step it computes the tokens that it does not have yet, then makes one pass for each
 * draft, for all rows at once. It samples with the row's own parameters and random numbers, so it
 * often draws the same token as the large model. When a row begins or comes back, the model
 * computes its KV from the tokens: for such a small model this is faster than moving KV. The engine
 * thread waits for each pass, so the model must be fast. */
#include "common/base/clock.h"
#include "common/log/log.h"
#include "decode/decode.h"

#define PROMPT_TOKENS 512u /* prompt tokens that the model computes before one step */
#define MOST          8u   /* most passes before one step */
#define PASS_STEP     0.1  /* weight of one pass in the mean time of passes */

struct follower {
    struct bt_wreq *r;
    uint32_t seq; /* index in the batch */
    uint32_t n;   /* drafts so far, behind r's tokens */
};

/* Waits for a ticket, and releases all other tickets. Returns false if the engine has failed. */
static bool wait_for(struct bt_wcore *c, bt_engine_ticket_t want, struct bt_engine_event *ev_p)
{
    struct bt_engine *eng = c->spec.model.eng;
    for (;;) {
        struct bt_engine_event ev;
        if (c->vt->poll(eng, &ev, 1, 1000) == 0) {
            continue;
        }
        if (ev.ticket == want) {
            *ev_p = ev;
            return ev.status == BT_OK;
        }
        c->vt->release(eng, ev.ticket);
    }
}

/* Runs rows. If they are sampled, gives each follower the result of its row. */
static bool pass(struct bt_wcore *c, struct bt_engine_row *rows, struct follower *f, uint32_t n,
                 bool sampled)
{
    struct bt_engine *eng = c->spec.model.eng;
    const struct bt_engine_batch b = {.n_rows = n, .rows = rows};
    bt_engine_ticket_t fwd, smp;
    struct bt_engine_event ev;
    if (c->vt->forward(eng, &b, &fwd) != BT_OK) {
        return false;
    }
    if (!sampled) {
        bool ok = wait_for(c, fwd, &ev);
        c->vt->release(eng, fwd);
        return ok;
    }
    if (c->vt->sample(eng, fwd, NULL, &smp) != BT_OK) {
        return false;
    }
    bool ok = wait_for(c, smp, &ev) && ev.n_out == n;
    for (uint32_t i = 0; ok && i < n; i++) {
        struct bt_wreq *r = f[i].r;
        ok = !ev.out[i].bad;
        r->tokens[r->len + f[i].n++] = ev.out[i].token;
    }
    c->vt->release(eng, smp);
    c->vt->release(eng, fwd);
    return ok;
}

/* Opens r's sequence again: afterwards the draft engine has r's tokens, without refused drafts. */
static bool open_sequence(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_wdraft *m = &c->spec.model;
    struct bt_engine_event ev;
    bt_engine_ticket_t quiet;
    if (m->owner[r->slot] != 0) {
        if (c->vt->slot_close(m->eng, r->slot, &quiet) != BT_OK || !wait_for(c, quiet, &ev)) {
            return false;
        }
        c->vt->release(m->eng, quiet);
    }
    if (r->row->model_owner == 0 || m->owner[r->slot] != r->row->model_owner) {
        /* the KV in these pages belongs to another sequence */
        r->row->model_owner = ++m->next_owner;
        r->row->model_pos = 0;
    }
    m->owner[r->slot] = 0;
    struct bt_engine_params p = r->sub->params;
    p.logprobs = -1;
    if (c->vt->slot_open(m->eng, r->slot, &p, r->tokens, r->len, r->sub->n_prompt) != BT_OK) {
        return false;
    }
    m->owner[r->slot] = r->row->model_owner;
    return c->vt->slot_pages(m->eng, r->slot, 0, r->pages, r->n_pages) == BT_OK;
}

/* Computes the tokens of r except the last, but at most *most_p. Returns true if the draft model
 * has them all. */
static bool catch_up(struct bt_wcore *c, struct bt_wreq *r, uint32_t *most_p, bool *ok_p)
{
    while (*ok_p && r->row->model_pos + 1 < r->len && *most_p > 0) {
        uint32_t n = BT_MIN(r->len - 1 - r->row->model_pos, *most_p);
        struct bt_engine_row row = {.slot = r->slot,
                                    .pos = r->row->model_pos,
                                    .n = n,
                                    .tokens = r->tokens + r->row->model_pos};
        *ok_p = pass(c, &row, NULL, 1, false);
        r->row->model_pos += n;
        *most_p -= n;
    }
    return r->row->model_pos + 1 >= r->len;
}

/* Opens the followers' sequences, and computes tokens that they do not have yet. Removes followers
 * that are not ready: a long prompt takes several steps, and a row may have no free page. Returns
 * how many stay. */
static uint32_t prepare(struct bt_wcore *c, struct follower *f, uint32_t n, uint32_t k, bool *ok_p)
{
    uint32_t ready = 0, most = PROMPT_TOKENS;
    for (uint32_t i = 0; *ok_p && i < n; i++) {
        struct bt_wreq *r = f[i].r;
        bool pages = bt_decode_draft_pages(c, r, k) == k && !c->fatal;
        *ok_p = !pages || open_sequence(c, r);
        /* The first pass also computes the few tokens that follow the last accepted draft. */
        if (pages && *ok_p &&
            (r->row->model_pos + BT_WORKER_DRAFT_LAG >= r->len || catch_up(c, r, &most, ok_p))) {
            f[ready++] = f[i];
        }
    }
    return *ok_p ? ready : 0;
}

/* Computes draft number p of each follower. */
static bool draft(struct bt_wcore *c, struct follower *f, uint32_t n, uint32_t p)
{
    struct bt_engine_row rows[BT_WORKER_DRAFT_ROWS];
    for (uint32_t i = 0; i < n; i++) {
        struct bt_wreq *r = f[i].r;
        uint32_t pos = p == 0 ? r->row->model_pos : r->len + p - 1;
        rows[i] = (struct bt_engine_row){.slot = r->slot,
                                         .pos = pos,
                                         .n = r->len + p - pos,
                                         .tokens = r->tokens + pos,
                                         .flags = BT_ROW_SAMPLE};
    }
    return pass(c, rows, f, n, true);
}

void bt_decode_draft_by_model(struct bt_wcore *c, const struct bt_batch_work *work, uint32_t most)
{
    struct bt_wdraft *m = &c->spec.model;
    struct follower f[BT_WORKER_DRAFT_ROWS];
    float rates[BT_WORKER_DRAFT_ROWS];
    uint32_t n = 0, room = MOST;
    uint64_t begun = bt_mono_ns();
    bool ok = true;
    for (uint32_t i = 0; i < c->batch.n && n < BT_WORKER_DRAFT_ROWS; i++) {
        struct bt_wreq *r = c->seq_reqs[i];
        uint32_t end = BT_MIN(r->sub->len_max, m->info->max_model_len);
        if (c->batch.seqs[i].kind == BT_BATCH_DECODE && bt_decode_by_model(c, r) &&
            r->len + 1 < end) {
            room = BT_MIN(room, end - r->len - 1);
            rates[n] = bt_decode_draft_rate(c, r, 0);
            f[n++] = (struct follower){.r = r, .seq = i};
        }
    }
    if (n == 0) {
        return;
    }
    double pass_ns = m->pass_ns > 0 ? m->pass_ns : bt_batch_work_ns(&c->speed.fit.cost, work) / 4;
    uint32_t k = bt_spec_choose_passes(&c->speed.fit.cost, work, work->tokens,
                                       BT_MIN(room, most / n), rates, n, pass_ns, &c->spec.passes);
    n = k > 0 ? prepare(c, f, n, k, &ok) : 0;
    for (uint32_t p = 0; ok && n > 0 && p < k; p++) {
        uint64_t at = bt_mono_ns();
        ok = draft(c, f, n, p);
        double ns = (double)(bt_mono_ns() - at);
        m->pass_ns += (m->pass_ns > 0 ? PASS_STEP : 1) * (ns - m->pass_ns);
    }
    if (!ok) {
        BT_ERROR("draft_model_failed", "path=%s why=%s", c->conf->speculate,
                 "its engine failed; rows get drafts from their own text until a restart");
        bt_wdraft_close(c);
        c->spec.kind = BT_SPEC_SUFFIX;
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        f[i].r->row->match = 0;
        f[i].r->row->model_pos = f[i].r->len; /* the drafts behind them may be refused */
        c->batch.seqs[f[i].seq].drafts = k;
    }
    c->spec.drafting_ns += (double)(bt_mono_ns() - begun);
}
