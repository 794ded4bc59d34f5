/* One prefill node in simulated time: two queues, of prompts that are to be in time and of late
 * ones, and the prompt at hand. A late one that is being computed gives way to one that is to be in
 * time at the end of its step, and goes on once there are none. */
#ifndef BT_CONDUCTOR_SIM_PREFILL_H
#define BT_CONDUCTOR_SIM_PREFILL_H

#include "common/base/base.h"

struct bt_sim_job {          /* a prompt to be computed; the caller's memory */
    struct bt_sim_job *next; /* in its queue */
    uint32_t id;             /* the caller's */
    bool late;               /* in the background */
    double planned_ms;       /* its computing, as predicted: what others wait for */
    double rest_ms;          /* of its computing, once it gave way; 0: all of it */
};

struct bt_sim_jobs {
    struct bt_sim_job *first, *last; /* NULL: none */
    double ms;                       /* as planned */
};

struct bt_sim_prefill { /* all 0: it has nothing */
    struct bt_sim_jobs queue[2];
    struct bt_sim_job *running; /* NULL: none */
    uint32_t version;           /* counts its failures, and late prompts that gave way */
    double run_ms, run_end_ms;  /* running: since when in this go, until when */
    double run_chunk_ms;        /* ... its steps */
    double free_ms;             /* until then the step of one that gives way */
};

/* What a prompt that is to be in time waits for. */
double bt_sim_prefill_queue_ms(const struct bt_sim_prefill *p, double now_ms);
/* What late ones have left, which wait for that too. */
double bt_sim_prefill_late_ms(const struct bt_sim_prefill *p, double now_ms);
/* Of the computing that has begun, what is left. */
double bt_sim_prefill_begun_ms(const struct bt_sim_prefill *p, double now_ms);
bool bt_sim_prefill_idle(const struct bt_sim_prefill *p);

/* A job joins its queue. True: a late one gives way to it, and the node is free at p->free_ms, if
 * p->version is the same then. */
bool bt_sim_prefill_add(struct bt_sim_prefill *p, struct bt_sim_job *job, double now_ms);
/* The next one, which is running from now on, if the node is free; else NULL. */
struct bt_sim_job *bt_sim_prefill_next(struct bt_sim_prefill *p, double now_ms);
/* ... for so long, in so many steps: it ends at p->run_end_ms, if p->version is the same then. */
void bt_sim_prefill_run(struct bt_sim_prefill *p, double now_ms, double ms, uint32_t steps);
/* It has ended. */
struct bt_sim_job *bt_sim_prefill_end(struct bt_sim_prefill *p);
/* The node loses everything; lost is told of each prompt. */
void bt_sim_prefill_fail(struct bt_sim_prefill *p, void (*lost)(void *arg, uint32_t id), void *arg);

#endif
