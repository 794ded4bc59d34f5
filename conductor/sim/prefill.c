/* The queues of a prefill node, and its steps, cut as the worker's batcher does. See prefill.h. */
#include "conductor/sim/prefill.h"

#include <math.h>

#define PROMPTS      64 /* of each queue: how many a step may be cut from */
#define BLOCK_TOKENS 64 /* as kv.block_tokens: steps end at its multiples */

void bt_sim_prefill_init(struct bt_sim_prefill *p, const struct bt_batch_cost *cost,
                         uint32_t chunk_tokens)
{
    *p = (struct bt_sim_prefill){.cost = cost, .chunk_tokens = chunk_tokens};
}

bool bt_sim_prefill_idle(const struct bt_sim_prefill *p)
{
    return !p->stepping && p->queue[0].first == NULL && p->queue[1].first == NULL;
}

void bt_sim_prefill_add(struct bt_sim_prefill *p, struct bt_sim_job *job)
{
    struct bt_sim_jobs *q = &p->queue[job->late];
    job->next = NULL;
    *(q->first == NULL ? &q->first : &q->last->next) = job;
    q->last = job;
}

/* If the tail that the prompt waits for at stop has landed, the prompt continues behind it. */
static void resume(struct bt_sim_job *job, double now_ms)
{
    if (job->stop > 0 && job->pos == job->stop && now_ms >= job->fetch_ms) {
        job->pos = job->resume;
        job->stop = 0;
    }
}

/* When the prompt can be computed: now, or a later time. */
static double due_ms(const struct bt_sim_job *job, double now_ms)
{
    double due = BT_MAX(now_ms, job->read_ms);
    return job->stop > 0 && job->pos == job->stop ? BT_MAX(due, job->fetch_ms) : due;
}

struct step {
    struct bt_batch b;
    struct bt_batch_seq seqs[2 * PROMPTS];
    struct bt_sim_job *jobs[2 * PROMPTS];
    struct bt_batch_row rows[PROMPTS];
    uint32_t n_rows;
    double due_ms; /* the earliest due_ms of prompts that cannot be computed yet */
};

static void collect(const struct bt_sim_prefill *p, double now_ms, struct step *s)
{
    s->due_ms = INFINITY;
    s->b = (struct bt_batch){
        .lim = {.max_rows = p->chunk_tokens, .block_tokens = BT_MIN(BLOCK_TOKENS, p->chunk_tokens)},
        .seqs = s->seqs,
        .cost = p->cost};
    for (int late = 0; late < 2; late++) {
        uint32_t n = 0;
        for (struct bt_sim_job *job = p->queue[late].first; job != NULL && n < PROMPTS;
             job = job->next, n++) {
            resume(job, now_ms);
            double due = due_ms(job, now_ms);
            bool blocked = due > now_ms;
            s->due_ms = blocked ? BT_MIN(s->due_ms, due) : s->due_ms;
            s->jobs[s->b.n] = job;
            s->seqs[s->b.n] =
                (struct bt_batch_seq){.order = s->b.n,
                                      .pos = job->pos,
                                      .len = job->len,
                                      .chunk_tokens = p->chunk_tokens,
                                      .stop = job->stop,
                                      .kind = blocked ? BT_BATCH_BLOCKED : BT_BATCH_PROMPT,
                                      .late = job->late};
            s->b.n++;
        }
    }
}

/* Begins the step's new prompts, which may then differ from the plan. True: there were some. */
static bool begin_some(struct step *s, void (*begin)(void *arg, struct bt_sim_job *job), void *arg)
{
    bool some = false;
    for (uint32_t i = 0; i < s->n_rows; i++) {
        struct bt_sim_job *job = s->jobs[s->rows[i].seq];
        if (!job->begun) {
            job->begun = some = true;
            begin(arg, job);
        }
    }
    return some;
}

double bt_sim_prefill_step(struct bt_sim_prefill *p, double now_ms,
                           void (*begin)(void *arg, struct bt_sim_job *job), void *arg)
{
    struct step s;
    if (p->stepping) {
        return p->end_ms;
    }
    p->version++;
    do {
        collect(p, now_ms, &s);
        s.n_rows = bt_batch_prefill(&s.b, s.rows, PROMPTS);
    } while (begin_some(&s, begin, arg));
    if (s.n_rows == 0) {
        return isfinite(s.due_ms) ? s.due_ms : -1;
    }
    p->stepping = true;
    p->begin_ms = now_ms;
    p->end_ms = now_ms + 1e-6 * bt_batch_step_ns(p->cost, &s.b, s.rows, s.n_rows);
    for (uint32_t i = 0; i < s.n_rows; i++) {
        struct bt_sim_job *job = s.jobs[s.rows[i].seq];
        job->in_step = s.rows[i].n;
        if (s.rows[i].last) { /* its prefix is loaded layer by layer while the step computes */
            p->end_ms = BT_MAX(p->end_ms, job->loaded_ms);
        }
    }
    return p->end_ms;
}

struct bt_sim_job *bt_sim_prefill_end(struct bt_sim_prefill *p)
{
    struct bt_sim_job *done = NULL, **end = &done;
    for (int late = 0; late < 2; late++) {
        struct bt_sim_jobs *q = &p->queue[late];
        struct bt_sim_job **at = &q->first, *last = NULL;
        for (uint32_t n = 0; *at != NULL && n < PROMPTS; n++) {
            struct bt_sim_job *job = *at;
            job->pos += job->in_step;
            job->in_step = 0;
            if (job->pos < job->len) {
                last = job;
                at = &job->next;
                continue;
            }
            *at = job->next;
            q->last = q->last == job ? last : q->last;
            job->next = NULL;
            *end = job;
            end = &job->next;
        }
    }
    p->stepping = false;
    return done;
}

void bt_sim_prefill_fail(struct bt_sim_prefill *p, void (*lost)(void *arg, uint32_t id), void *arg)
{
    for (int late = 0; late < 2; late++) {
        const struct bt_sim_job *next;
        for (const struct bt_sim_job *job = p->queue[late].first; job != NULL; job = next) {
            next = job->next;
            lost(arg, job->id);
        }
        p->queue[late] = (struct bt_sim_jobs){0};
    }
    p->stepping = false;
    p->version++;
}
