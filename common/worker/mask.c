/* The engine thread's part of constrained output: which rows of a step need masks, and what becomes
 * of a request whose grammar or mask cannot be made. Allocates nothing per step. */
#include "common/worker/mask.h"

#include <stdlib.h>
#include <string.h>

#include "common/spec/match.h"
#include "common/worker/core.h"

/* A step waits this long for masks: less would lose steps of rows on a busy machine, more would be
 * felt by rows without a grammar. */
#define WAIT_LEAST_NS 3e6
#define WAIT_MOST_NS  50e6

void bt_wmask_init(struct bt_wmasks *m, uint32_t places, uint32_t vocab)
{
    m->places = places;
    m->words = BT_DIV_UP(vocab, 32u);
    /* Zeroed memory of this size is not in use until it is written. */
    m->bits = bt_calloc((size_t)places * m->words, sizeof(m->bits[0]));
    m->free = bt_calloc(places, sizeof(m->free[0]));
    m->jobs = bt_calloc(places, sizeof(m->jobs[0]));
}

void bt_wmask_cleanup(struct bt_wmasks *m)
{
    free(m->bits);
    free(m->free);
    free(m->jobs);
    *m = (struct bt_wmasks){0};
}

/* ---- grammars ---- */

bool bt_wmask_needed(const struct bt_wreq *r)
{
    const struct bt_wgrammar *g = r->sub->grammar;
    return g != NULL && (g->kind != BT_GRAMMAR_ANY || !bt_wthoughts_over(&r->match.thoughts));
}

bool bt_wmask_ready(struct bt_wreq *r)
{
    struct bt_wmatch *lead = &r->lead->match;
    if (r->sub->grammar == NULL || lead->compiled) {
        return true;
    }
    BT_ASSERT(r == r->lead); /* the others come behind their lead's prompt */
    lead->queue_due = true;
    return false;
}

/* The conductor tries another worker when this one is EXHAUSTED; a grammar is too large anywhere.
 */
static bt_status_t told(bt_status_t st)
{
    return st == BT_ERR_EXHAUSTED ? BT_ERR_TOO_LARGE : st;
}

void bt_wmask_compiled(struct bt_wcore *c, struct bt_wreq *r, bt_status_t st, const char *detail)
{
    if (bt_wreq_ending(r)) {
        return;
    }
    if (st != BT_OK) {
        bt_metric_add(c->stats->grammars_failed, 1);
        bt_wcore_end(c, r, told(st), "%s", detail);
        return;
    }
    r->match.compiled = true;
    bt_wmask_made(c, r, r->sub->grammar->first);
    r->sub->grammar->first = NULL;
    if (bt_wreq_ending(r)) {
        return;
    }
    if (r->match.queue_due) {
        bt_wcore_enqueue(c, r);
    }
}

/* ---- masks of a step ---- */

void bt_wmask_row(struct bt_wcore *c, struct bt_wreq *r, uint32_t at, const uint32_t *drafts,
                  uint32_t n_draft)
{
    struct bt_wmasks *m = &c->masks;
    BT_ASSERT(m->n_jobs < m->places && at + n_draft < m->places);
    m->jobs[m->n_jobs++] =
        (struct bt_wmask_job){.r = r,
                              .at = at,
                              .drafts = drafts,
                              .n_draft = n_draft,
                              .must = r->role != &c->decode->role}; /* a prompt: made ahead */
    r->match.late = r->match.slow = false;
    memset(&m->free[at], 0, (n_draft + 1) * sizeof(m->free[0]));
}

void bt_wmask_start(struct bt_wcore *c)
{
    struct bt_wmasks *m = &c->masks;
    if (m->n_jobs > 0) {
        bt_wmask_pool_start(m->pool, m->jobs, m->n_jobs, m->bits, m->words);
    }
}

uint32_t bt_wmask_forced(const struct bt_wreq *r, uint32_t most, struct bt_spec_draft *d)
{
    const struct bt_wmatch *m = &r->match;
    uint32_t drawn = r->len - m->forced_at; /* since the look ahead */
    if (r->len <= m->forced_at || drawn >= m->n_forced ||
        memcmp(&r->tokens[m->forced_at], m->forced, drawn * sizeof(m->forced[0])) != 0) {
        return 0;
    }
    d->n = BT_MIN(BT_MIN(m->n_forced - drawn, most), (uint32_t)BT_SPEC_MAX);
    d->match = BT_SPEC_MATCH_MAX; /* as sure as a long match with earlier text */
    memcpy(d->tokens, &m->forced[drawn], d->n * sizeof(d->tokens[0]));
    return d->n;
}

static void set_free(struct bt_wmasks *m, uint32_t at)
{
    if (!m->free[at]) {
        memset(m->bits + (size_t)at * m->words, 0xff, m->words * sizeof(m->bits[0]));
        m->free[at] = true;
    }
}

/* Sets the places that no job writes. The jobs' places rise. */
static void free_others(struct bt_wmasks *m, uint32_t n)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < m->n_jobs; i++) {
        while (at < m->jobs[i].at) {
            set_free(m, at++);
        }
        at = m->jobs[i].at + m->jobs[i].n_draft + 1;
    }
    while (at < n) {
        set_free(m, at++);
    }
}

static void failed(struct bt_wcore *c, struct bt_wreq *r, bt_status_t st)
{
    uint32_t n = r->len - r->sub->n_prompt;
    bt_metric_add(c->stats->grammars_failed, 1);
    if (st == BT_ERR_INVALID) {
        bt_wcore_end(c, r, st, "the %u tokens behind the prompt do not follow the grammar", n);
    } else {
        bt_wcore_end(c, r, told(st),
                     "the grammar needs too much time or memory after %u tokens of the answer "
                     "(%s): make it simpler",
                     n, bt_status_text(st));
    }
}

/* How long a step waits for masks when the forward pass is launched, or done: half of the step. */
static uint64_t wait_ns(const struct bt_wcore *c)
{
    double step = bt_batch_work_ns(&c->speed.fit.cost, &c->step.work);
    return (uint64_t)BT_MIN(BT_MAX(step / 2, WAIT_LEAST_NS), WAIT_MOST_NS);
}

static void done(struct bt_wcore *c, const struct bt_wmask_job *j)
{
    struct bt_wreq *r = j->r;
    if (j->status == BT_AGAIN) {
        r->match.late = true;
        r->match.made = j->n_made;
        r->match.slow = j->begun;
        return;
    }
    for (uint32_t i = 0; i <= j->n_draft && j->status != BT_OK; i++) {
        set_free(&c->masks, j->at + i); /* the row is sampled, and the token is dropped */
    }
    if (j->status != BT_OK) {
        failed(c, r, j->status);
    }
}

const uint32_t *bt_wmask_wait(struct bt_wcore *c, uint32_t n)
{
    struct bt_wmasks *m = &c->masks;
    if (m->n_jobs == 0) {
        return NULL;
    }
    free_others(m, n);
    uint64_t t0 = bt_mono_ns();
    bt_wmask_pool_wait(m->pool, wait_ns(c));
    bt_metric_observe(c->stats->mask_wait, (double)(bt_mono_ns() - t0) / 1e9);
    for (uint32_t i = 0; i < m->n_jobs; i++) {
        done(c, &m->jobs[i]);
    }
    m->n_jobs = 0;
    return m->bits;
}

/* ---- masks that are made ahead ---- */

void bt_wmask_late(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_wmatch *m = &r->match;
    bool slow = m->slow;
    m->late = m->slow = false;
    bt_metric_add(c->stats->masks_late, 1);
    if (!slow || bt_wreq_ending(r)) {
        return;
    }
    struct bt_wahead *a =
        bt_wahead_create(r->tokens + r->sub->n_prompt, r->len - r->sub->n_prompt, c->masks.words);
    a->request = r->sub->request;
    a->epoch = r->sub->epoch;
    a->grammar = r->sub->grammar;
    a->grammar->refs++;
    a->matcher = m->matcher;
    m->matcher = NULL;
    m->away = a;
    bt_wmask_pool_slow(c->masks.pool, a);
}

void bt_wmask_made(struct bt_wcore *c, struct bt_wreq *lead, struct bt_wahead *a)
{
    struct bt_wreq *r = lead;
    if (a == NULL) {
        return;
    }
    bool first = a->grammar == NULL;
    while (!first && r != NULL && r->match.away != a) {
        r = r->next_choice;
    }
    if (r == NULL || bt_wreq_ending(r)) {
        bt_wahead_destroy(a);
        return;
    }
    r->match.away = NULL;
    r->match.matcher = a->matcher;
    a->matcher = NULL;
    bt_wahead_destroy(r->match.ahead);
    r->match.ahead = a;
    if (a->status != BT_OK) {
        failed(c, r, a->status);
    }
}
