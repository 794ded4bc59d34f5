/* One prefill node in simulated time: it runs the worker's batcher (common/batch) step by step over
 * the prompts that it has, by order of arrival, late ones behind all others. */
#ifndef BT_CONDUCTOR_SIM_PREFILL_H
#define BT_CONDUCTOR_SIM_PREFILL_H

#include "common/base/base.h"
#include "common/batch/batch.h"

struct bt_sim_job {          /* a prompt to be computed; the caller's memory */
    struct bt_sim_job *next; /* in its queue */
    uint32_t id;             /* the caller's */
    bool late;               /* in the background */
    bool begun;        /* a step has computed part of it, so the rest may differ from the plan */
    uint32_t pos, len; /* tokens [pos, len) are to be computed */
    uint32_t stop, resume; /* stop > 0: when it reaches stop it continues at resume, after the
                              blocks between were fetched */
    double read_ms;        /* it waits until then for blocks read from an SSD */
    double fetch_ms;       /* at stop it waits until then for fetched blocks */
    double loaded_ms;      /* the time when its prefix is in the GPU: it cannot end earlier */
    uint32_t in_step;      /* tokens in the step under way */
};

struct bt_sim_jobs {
    struct bt_sim_job *first, *last; /* NULL: none */
};

struct bt_sim_prefill {
    const struct bt_batch_cost *cost;
    uint32_t chunk_tokens;       /* of a step and of a prompt in it */
    struct bt_sim_jobs queue[2]; /* [1]: late ones */
    uint32_t version; /* number of the latest prediction of its next event; older events are void */
    bool stepping;    /* a step is under way, between these times: */
    double begin_ms, end_ms; /* beginning and end of the step */
};

/* Nothing is queued. cost outlives it. */
void bt_sim_prefill_init(struct bt_sim_prefill *p, const struct bt_batch_cost *cost,
                         uint32_t chunk_tokens);
/* True: no step is under way and no prompt waits. */
bool bt_sim_prefill_idle(const struct bt_sim_prefill *p);
/* A job joins its queue. */
void bt_sim_prefill_add(struct bt_sim_prefill *p, struct bt_sim_job *job);
/* Begins the next step if none is under way. Calls `begin` for each prompt whose first step this
 * is; `begin` sets the tokens that are really computed: pos, stop, resume and the times. Returns
 * when the node must be asked again: at the end of the step (p->stepping), or when blocks arrive
 * for which all prompts wait; < 0: it has nothing to do. Changes p->version. */
double bt_sim_prefill_step(struct bt_sim_prefill *p, double now_ms,
                           void (*begin)(void *arg, struct bt_sim_job *job), void *arg);
/* The step under way is over. Returns the finished prompts, linked by next, or NULL. */
struct bt_sim_job *bt_sim_prefill_end(struct bt_sim_prefill *p);
/* The node loses everything. Calls lost for each prompt. */
void bt_sim_prefill_fail(struct bt_sim_prefill *p, void (*lost)(void *arg, uint32_t id), void *arg);

#endif
