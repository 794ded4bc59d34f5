/* What this conductor has queued at one worker, and how far that will have come: the worker's own
 * batcher, rolled forward over the prompts that were sent to it (common/batch/ahead.h). Who is sent
 * is told by add, who is computed by done; in between time passes at the worker's pace. PURE: time
 * is an argument. */
#ifndef BT_POLICY_SCHED_BACKLOG_H
#define BT_POLICY_SCHED_BACKLOG_H

#include "common/base/list.h"
#include "common/batch/ahead.h"

/* How the worker computes. */
struct bt_sched_pace {
    const struct bt_batch_cost *cost; /* NULL: not known, or not as the prefill role does: prompts
                                         are counted one after the other */
    uint32_t max_rows, chunk_tokens;  /* of its batcher; chunk_tokens 0: all in one */
    double slow;                      /* it takes so many times what its costs say */
};

struct bt_sched_prompt {
    struct bt_list link; /* empty: it is in no queue */
    uint32_t pos, len;   /* tokens [pos, len) are to be computed, as far as is known */
    uint32_t in_step;    /* so many of them in the step under way */
    double alone_ms;     /* what they take by themselves */
    int32_t priority;
};

struct bt_sched_backlog {
    double alone_ms;             /* of all prompts */
    double rolled_ms;            /* of those that ahead counts */
    uint64_t from_ns;            /* ahead's zero; without one, since when the oldest is computed */
    struct bt_batch_ahead ahead; /* of those that do not wait for all others */
    struct bt_list prompts;      /* oldest first */
};

void bt_sched_backlog_init(struct bt_sched_backlog *q);
/* The prompt was sent to the worker. p is the caller's, until done. */
void bt_sched_backlog_add(struct bt_sched_backlog *q, struct bt_sched_prompt *p,
                          const struct bt_sched_pace *pace, uint64_t now_ns);
/* It is computed, or will not be. */
void bt_sched_backlog_done(struct bt_sched_backlog *q, struct bt_sched_prompt *p,
                           const struct bt_sched_pace *pace, uint64_t now_ns);
/* So much of what is counted from from_ns on has passed, in the units of costs: no more than leaves
 * the next prompt undone that has not been said to be. */
double bt_sched_backlog_past_ms(const struct bt_sched_backlog *q, double slow, uint64_t now_ns);
/* Until all are computed, in the units of costs, but for prompts that take without_ms. */
double bt_sched_backlog_ms(const struct bt_sched_backlog *q, double without_ms, double slow,
                           uint64_t now_ns);

#endif
