/* The prompts that this conductor has sent to one worker, and how far they have come: a simulation
 * of the worker's batcher (common/batch/ahead.h). The caller reports sent prompts by add and
 * computed ones by done; between them time passes at the worker's pace. PURE: time is an argument.
 */
#ifndef BT_POLICY_SCHED_BACKLOG_H
#define BT_POLICY_SCHED_BACKLOG_H

#include "common/base/list.h"
#include "common/batch/ahead.h"

/* How the worker computes. */
struct bt_sched_pace {
    const struct bt_batch_cost *cost; /* NULL: not known, or the worker is not in the prefill role
                                         alone: prompts then count one after the other */
    uint32_t max_rows,
        chunk_tokens; /* of its batcher; chunk_tokens 0: a whole prompt in one step */
    double slow;      /* actual over predicted time */
};

struct bt_sched_prompt {
    struct bt_list link; /* empty: the prompt is in no queue */
    uint32_t pos, len;   /* tokens [pos, len) are still to be computed, as far as is known */
    uint32_t in_step;    /* number of them in the step under way */
    double alone_ms;     /* predicted time of the prompt alone */
    int32_t priority;
};

struct bt_sched_backlog {
    double alone_ms;  /* sum over all prompts */
    double rolled_ms; /* sum over the prompts in ahead */
    uint64_t from_ns; /* when ahead begins; without ahead, when the oldest prompt began */
    struct bt_batch_ahead ahead; /* of all prompts but late ones */
    struct bt_list prompts;      /* oldest first */
};

void bt_sched_backlog_init(struct bt_sched_backlog *q);
/* The prompt was sent to the worker. The caller owns p and keeps it until done. */
void bt_sched_backlog_add(struct bt_sched_backlog *q, struct bt_sched_prompt *p,
                          const struct bt_sched_pace *pace, uint64_t now_ns);
/* The prompt is computed, or will not be. */
void bt_sched_backlog_done(struct bt_sched_backlog *q, struct bt_sched_prompt *p,
                           const struct bt_sched_pace *pace, uint64_t now_ns);
/* The predicted time that has passed since from_ns. It stops before the end of the next prompt,
 * until the worker reports that prompt as computed. */
double bt_sched_backlog_past_ms(const struct bt_sched_backlog *q, double slow, uint64_t now_ns);
/* Predicted time until all prompts are computed, without without_ms of them. */
double bt_sched_backlog_ms(const struct bt_sched_backlog *q, double without_ms, double slow,
                           uint64_t now_ns);

#endif
