/* The engine thread's part of constrained output: which rows of a step need masks, and what becomes
 * of a request whose grammar or mask cannot be made. Allocates nothing per step. */
#include "common/worker/mask.h"

#include <stdlib.h>
#include <string.h>

#include "common/spec/match.h"
#include "common/worker/core.h"

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
        (struct bt_wmask_job){.r = r, .at = at, .drafts = drafts, .n_draft = n_draft};
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

static void failed(struct bt_wcore *c, const struct bt_wmask_job *j)
{
    struct bt_wreq *r = j->r;
    uint32_t n = r->len - r->sub->n_prompt;
    bt_metric_add(c->stats->grammars_failed, 1);
    for (uint32_t i = 0; i <= j->n_draft; i++) { /* the row is sampled, and the token is dropped */
        set_free(&c->masks, j->at + i);
    }
    if (j->status == BT_ERR_INVALID) {
        bt_wcore_end(c, r, j->status, "the %u tokens behind the prompt do not follow the grammar",
                     n);
    } else {
        bt_wcore_end(c, r, told(j->status),
                     "the grammar needs too much behind %u tokens of the answer (%s): make it "
                     "simpler",
                     n, bt_status_text(j->status));
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
    bt_wmask_pool_wait(m->pool);
    bt_metric_observe(c->stats->mask_wait, (double)(bt_mono_ns() - t0) / 1e9);
    for (uint32_t i = 0; i < m->n_jobs; i++) {
        if (m->jobs[i].status != BT_OK) {
            failed(c, &m->jobs[i]);
        }
    }
    m->n_jobs = 0;
    return m->bits;
}
