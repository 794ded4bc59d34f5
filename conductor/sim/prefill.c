/* The queues of a prefill node and who gives way. See prefill.h. */
#include "conductor/sim/prefill.h"

#include <math.h>

/* The end of the step at hand of a late prompt: there it gives way. */
static double step_end_ms(const struct bt_sim_prefill *p, double now_ms)
{
    double steps = ceil(BT_MAX(now_ms - p->run_ms, 0) / p->run_chunk_ms);
    return BT_MIN(p->run_ms + steps * p->run_chunk_ms, p->run_end_ms);
}

double bt_sim_prefill_queue_ms(const struct bt_sim_prefill *p, double now_ms)
{
    double ms = p->queue[0].ms + BT_MAX(p->free_ms - now_ms, 0);
    if (p->running != NULL) {
        ms += (p->running->late ? step_end_ms(p, now_ms) : p->run_end_ms) - now_ms;
    }
    return ms;
}

double bt_sim_prefill_late_ms(const struct bt_sim_prefill *p, double now_ms)
{
    bool late = p->running != NULL && p->running->late;
    return p->queue[1].ms + (late ? p->run_end_ms - step_end_ms(p, now_ms) : 0);
}

double bt_sim_prefill_begun_ms(const struct bt_sim_prefill *p, double now_ms)
{
    double ms = p->running != NULL ? p->run_end_ms - now_ms : BT_MAX(p->free_ms - now_ms, 0);
    for (const struct bt_sim_job *job = p->queue[1].first; job != NULL; job = job->next) {
        ms += job->rest_ms; /* those that gave way */
    }
    return ms;
}

bool bt_sim_prefill_idle(const struct bt_sim_prefill *p)
{
    return p->running == NULL && p->queue[0].first == NULL && p->queue[1].first == NULL;
}

static void push_front(struct bt_sim_jobs *q, struct bt_sim_job *job)
{
    job->next = q->first;
    q->last = job->next == NULL ? job : q->last;
    q->first = job;
    q->ms += job->planned_ms;
}

static void push_back(struct bt_sim_jobs *q, struct bt_sim_job *job)
{
    job->next = NULL;
    *(q->first == NULL ? &q->first : &q->last->next) = job;
    q->last = job;
    q->ms += job->planned_ms;
}

static struct bt_sim_job *pop(struct bt_sim_jobs *q)
{
    struct bt_sim_job *job = q->first;
    q->first = job->next;
    q->ms = q->first != NULL ? q->ms - job->planned_ms : 0;
    return job;
}

/* The late one at hand ends its step and waits before all other late ones. */
static bool give_way(struct bt_sim_prefill *p, double now_ms)
{
    struct bt_sim_job *job = p->running;
    if (job == NULL || !job->late) {
        return false;
    }
    double end = step_end_ms(p, now_ms);
    if (end >= p->run_end_ms) {
        return false;
    }
    job->rest_ms = job->planned_ms = p->run_end_ms - end;
    push_front(&p->queue[1], job);
    p->running = NULL;
    p->version++;
    p->free_ms = end;
    return true;
}

bool bt_sim_prefill_add(struct bt_sim_prefill *p, struct bt_sim_job *job, double now_ms)
{
    push_back(&p->queue[job->late], job);
    return !job->late && give_way(p, now_ms);
}

struct bt_sim_job *bt_sim_prefill_next(struct bt_sim_prefill *p, double now_ms)
{
    struct bt_sim_jobs *q = &p->queue[p->queue[0].first == NULL];
    if (p->running != NULL || q->first == NULL || now_ms < p->free_ms) {
        return NULL;
    }
    p->running = pop(q);
    return p->running;
}

void bt_sim_prefill_run(struct bt_sim_prefill *p, double now_ms, double ms, uint32_t steps)
{
    p->running->rest_ms = ms;
    p->run_ms = now_ms;
    p->run_chunk_ms = ms / steps;
    p->run_end_ms = now_ms + ms;
}

struct bt_sim_job *bt_sim_prefill_end(struct bt_sim_prefill *p)
{
    struct bt_sim_job *job = p->running;
    p->running = NULL;
    return job;
}

void bt_sim_prefill_fail(struct bt_sim_prefill *p, void (*lost)(void *arg, uint32_t id), void *arg)
{
    if (p->running != NULL) {
        lost(arg, p->running->id);
    }
    for (int late = 0; late < 2; late++) {
        for (const struct bt_sim_job *job = p->queue[late].first; job != NULL; job = job->next) {
            lost(arg, job->id);
        }
    }
    *p = (struct bt_sim_prefill){.version = p->version + 1};
}
