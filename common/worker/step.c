/* One engine step: plan (common/batch), launch, take the results. Runs on the engine thread. Masks
 * of constrained rows are made meanwhile (mask.h).
 * Between two steps the engine uses no request's slot. Allocates nothing. */
#include <stdio.h>
#include <string.h>

#include "common/log/log.h"
#include "common/worker/core.h"

/* One of this many steps with prompts is a trial (bt_batch_prefill). On average that delays the end
 * of a prompt by a hundredth of a step. */
#define TRIAL_STEPS 32

uint32_t bt_wcore_rows(const struct bt_wcore *c)
{
    uint32_t n = 0;
    struct bt_list *it;
    bt_list_for_each (it, &c->reqs.active) {
        n += BT_CONTAINER_OF(it, struct bt_wreq, link)->stage == BT_WREQ_ROW;
    }
    return n;
}

static void fill_seq(const struct bt_wreq *r, struct bt_batch_seq *s)
{
    s->order = r->order;
    s->pos = r->pos;
    s->len = r->len;
    s->chunk_tokens = r->grant.terms != NULL ? r->grant.terms->chunk_tokens : 0;
    s->late = r->sub->late;
    s->kind = r->stage == BT_WREQ_ROW ? BT_BATCH_DECODE : BT_BATCH_PROMPT;
}

static void fill_batch(struct bt_wcore *c)
{
    uint32_t n = 0;
    struct bt_list *it;
    bt_list_for_each (it, &c->reqs.active) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->stage == BT_WREQ_ROW && r->sub->beams.width > 0) {
            n += c->decode->plan_beams(c, r, n);
            continue;
        }
        struct bt_batch_seq *s = &c->batch.seqs[n];
        *s = (struct bt_batch_seq){0};
        c->step.places[n] = 0;
        if ((r->stage == BT_WREQ_PROMPT || r->stage == BT_WREQ_ROW) && r->match.away == NULL &&
            r->role->plan(c, r, s)) {
            fill_seq(r, s);
            c->seq_reqs[n++] = r;
        }
    }
    c->batch.n = n;
}

static void fill_beam_row(struct bt_wcore *c, uint32_t i)
{
    struct bt_wstep *s = &c->step;
    const struct bt_batch_row *b = &s->rows[i];
    struct bt_engine_row *e = &s->erows[i];
    bool next = c->batch.seqs[b->seq].kind == BT_BATCH_DECODE;
    *e = (struct bt_engine_row){.pos = b->pos, .n = b->n, .flags = next ? BT_ROW_SAMPLE : 0};
    s->reqs[i] = c->seq_reqs[b->seq];
    s->reqs[i]->in_step = true;
    c->decode->beam_row(c, s->reqs[i], b, e);
    s->n_sample += next;
    s->decode_tokens += next;
    s->decode_rows += next;
    s->prompt_tokens += next ? 0 : b->n; /* a beam that was preempted is computed again */
}

static void fill_row(struct bt_wcore *c, uint32_t i)
{
    struct bt_wstep *s = &c->step;
    const struct bt_batch_row *b = &s->rows[i];
    struct bt_wreq *r = c->seq_reqs[b->seq];
    struct bt_engine_row *e = &s->erows[i];
    if (r->stage == BT_WREQ_ROW && r->sub->beams.width > 0) {
        fill_beam_row(c, i);
        return;
    }
    memset(e, 0, sizeof(*e));
    e->slot = r->slot;
    e->pos = b->pos;
    e->n = b->n;
    e->tokens = &r->tokens[b->pos];
    e->flags = b->last && r->sub->max_new > 0 ? BT_ROW_SAMPLE : 0;
    e->n_draft = r->stage == BT_WREQ_ROW ? b->n - 1 : 0;
    if (r->role->row != NULL) {
        r->role->row(c, r, b, e);
    }
    if (r->start_ns == 0) {
        r->start_ns = bt_real_ns();
    }
    if (r->stage == BT_WREQ_ROW) {
        s->decode_tokens += b->n;
        s->decode_rows++;
    } else {
        s->prompt_tokens += b->n;
    }
    if ((e->flags & BT_ROW_SAMPLE) != 0 && bt_wmask_needed(r)) {
        bt_wmask_row(c, r, s->n_sample, &r->tokens[r->len], e->n_draft);
    }
    s->n_sample += e->flags & BT_ROW_SAMPLE ? 1 + e->n_draft : 0;
    s->searches += (e->flags & BT_ROW_SAMPLE) != 0 && r->sub->params.penalty_alpha > 0;
    s->reqs[i] = r;
    r->in_step = true;
    r->pos = b->pos + b->n - e->n_draft; /* drafts count once they are accepted */
}

static void release_forward(struct bt_wcore *c)
{
    if (c->step.held) {
        c->step.held = false;
        c->vt->release(c->eng, c->step.forward);
    }
}

bool bt_wcore_step_holds(struct bt_wcore *c, bt_engine_ticket_t forward)
{
    struct bt_wstep *s = &c->step;
    s->held = s->active && s->forward == forward && s->n_sample > 0;
    return s->held;
}

static void step_failed(struct bt_wcore *c, bt_status_t st, const char *what)
{
    struct bt_wstep *s = &c->step;
    s->active = false;
    release_forward(c);
    if (st == BT_ERR_DEVICE) {
        bt_wcore_fatal(c, st, what);
        return;
    }
    BT_ERROR("step_failed", "what=%s status=%s rows=%u", what, bt_status_name(st), s->n_rows);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        struct bt_wreq *r = s->reqs[i];
        r->in_step = false;
        bt_wcore_end(c, r, BT_ERR_INTERNAL, "engine: %s: %s", what, bt_status_text(st));
        bt_wcore_close_doomed(c, r);
    }
}

bool bt_wcore_launch(struct bt_wcore *c)
{
    struct bt_wstep *s = &c->step;
    bool told = c->decode->tell(c);
    if (told && !bt_wcore_may_step(c)) {
        return true;
    }
    c->decode->provide_pages(c);
    if (c->fatal) {
        return false;
    }
    fill_batch(c);
    bool rows = bt_wcore_rows(c) > 0 || atomic_load(&c->role) == BT_ROLES_DECODE;
    c->decode->draft(c);
    c->decode->bound_prompts(c);
    c->batch.trial = c->speed.fit.seen[1].steps % TRIAL_STEPS == 0;
    s->n_rows = rows ? bt_batch_decode(&c->batch, s->rows, c->max_slots)
                     : bt_batch_prefill(&c->batch, s->rows, c->max_slots);
    if (s->n_rows == 0) {
        return told;
    }
    s->n_sample = s->prompt_tokens = s->decode_tokens = s->decode_rows = s->searches = 0;
    s->work = bt_batch_work_of(&c->batch, s->rows, s->n_rows);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        fill_row(c, i);
    }
    s->active = true;
    s->held = false;
    s->sample = 0;
    s->launched_ns = bt_mono_ns();
    bt_wload_publish(c); /* first, as an engine without a device spends the step inside forward */
    struct bt_engine_batch batch = {.n_rows = s->n_rows, .rows = s->erows};
    bt_wmask_start(c);
    bt_status_t st = c->vt->forward(c->eng, &batch, &s->forward);
    if (st != BT_OK) {
        (void)bt_wmask_wait(c, 0);
        step_failed(c, st, "forward");
        return true;
    }
    bt_wcore_ticket(c, s->forward, BT_WT_FORWARD, NULL);
    if (s->n_sample > 0) {
        /* An engine without a device has finished the forward pass by now: take its time before
         * sampling. */
        bt_wcore_poll(c, 0);
        const uint32_t *mask = bt_wmask_wait(c, s->n_sample);
        if (!s->active || c->fatal) {
            return true;
        }
        st = c->vt->sample(c->eng, s->forward, mask, &s->sample);
        if (st != BT_OK) {
            step_failed(c, st, "sample");
            return true;
        }
        bt_wcore_ticket(c, s->sample, BT_WT_SAMPLE, NULL);
    }
    return true;
}

/* The results of a row begin at out: how many are there? */
static uint32_t run_of(const struct bt_engine_event *ev, uint32_t out)
{
    uint32_t n = 1;
    BT_ASSERT(ev != NULL && out < ev->n_out);
    while (ev->out[out + n - 1].more) {
        BT_ASSERT(out + n < ev->n_out);
        n++;
    }
    return n;
}

/* Row i of the step has n results. Where its mask was late, the last one is none: nothing was drawn
 * behind the row's last token, which is computed again. */
static void row_stepped(struct bt_wcore *c, uint32_t i, const struct bt_engine_out *o, uint32_t n)
{
    const struct bt_engine_row *e = &c->step.erows[i];
    const struct bt_batch_row *b = &c->step.rows[i];
    struct bt_wreq *r = c->step.reqs[i];
    bool late = o != NULL && r->match.late && n == r->match.made + 1 && o[n - 1].bad;
    n -= late;
    if (late && n == 0) {
        BT_ASSERT(r->role == &c->decode->role); /* a prompt's first mask was made ahead */
        r->pos = b->pos + b->n - e->n_draft - 1;
    } else {
        r->role->stepped(c, r, b, o, n);
    }
    if (late) {
        bt_wmask_late(c, r);
    }
    r->match.late = false;
}

static void finish_step(struct bt_wcore *c, const struct bt_engine_event *ev)
{
    struct bt_wstep *s = &c->step;
    uint32_t out = 0;
    s->active = false;
    release_forward(c);
    bt_wcost_measure(c);
    bt_wcore_take_buffer(c);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        struct bt_wreq *r = s->reqs[i];
        const struct bt_engine_out *o = NULL;
        uint32_t n = 0;
        if (s->erows[i].flags & BT_ROW_SAMPLE) {
            n = run_of(ev, out);
            o = &ev->out[out];
            out += n;
        }
        r->in_step = false;
        if (r->doomed) {
            bt_wcore_close_doomed(c, r);
        } else {
            row_stepped(c, i, o, n);
        }
    }
    bt_wcore_flush_tokens(c);
}

void bt_wcore_step_event(struct bt_wcore *c, int kind, const struct bt_engine_event *ev)
{
    struct bt_wstep *s = &c->step;
    bool mine = s->active && (ev->ticket == s->forward || ev->ticket == s->sample);
    if (!mine) {
        return; /* of a step that failed */
    }
    if (ev->status != BT_OK) {
        step_failed(c, ev->status, kind == BT_WT_FORWARD ? "forward" : "sample");
        return;
    }
    if (kind == BT_WT_FORWARD) {
        uint64_t now = bt_real_ns();
        c->prefill->logprobs(c, ev);
        for (uint32_t i = 0; i < s->n_rows; i++) {
            s->reqs[i]->last_compute_ns = now;
        }
    }
    if (kind == BT_WT_SAMPLE || s->n_sample == 0) {
        finish_step(c, kind == BT_WT_SAMPLE ? ev : NULL);
    }
}
