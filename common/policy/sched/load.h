/* What a conductor knows of a worker, from two sources: the worker's heartbeats, and what this
 * conductor has sent to it. One pure function combines both into the worker that policies see. The
 * conductor's view and the simulator call it. Plain values in the caller's memory. PURE. */
#ifndef BT_POLICY_SCHED_LOAD_H
#define BT_POLICY_SCHED_LOAD_H

#include "common/batch/classes.h"
#include "common/policy/sched/backlog.h"
#include "common/policy/sched/sched.h"

/* The last heartbeat. 0: not known, unless another meaning is given. */
struct bt_sched_said {
    uint64_t at_ns;            /* when it came */
    uint32_t running;          /* hold a slot */
    uint32_t waiting, landing; /* want a slot or pages; of these: those whose KV has not come */
    uint32_t pages_total, pages_free, slots_total, max_model_len;
    uint32_t max_rows, chunk_tokens; /* of its batcher */
    uint64_t queued_prefill_tokens, kv_tokens;
    double prefill_tokens_per_s, step_ms;
    double row_tokens; /* of a row in a step: 1 and its drafts; 0: not known */
    double queue_ms;   /* time until its prompts are computed */
    /* limits of its steps with prompts beside rows; < 0: it takes no prompts beside rows */
    double mixed_step_ms, mixed_gap_ms;
    bool has_cost;
    struct bt_batch_cost cost;
    struct bt_classes classes; /* the same by class; empty: it does not distinguish classes */
};

/* This conductor's own work at the worker. */
struct bt_sched_own {
    uint32_t rows, decoding; /* rows sent to it; those of them that have begun */
    uint32_t late;           /* of rows: late ones that have not begun */
    uint64_t prefill_tokens;
    uint64_t kv_tokens, decoding_kv, late_kv; /* context of rows, decoding, late */
    struct bt_sched_backlog backlog;          /* prompts that it has not computed */
    struct bt_classes classes;                /* queue_ns: of backlog; rows */
};

/* How fast the worker computes its backlog. said: NULL if no heartbeat has come. prefill: it has
 * the prefill role alone, so its batcher can be simulated. */
struct bt_sched_pace bt_sched_pace_of(const struct bt_sched_said *said,
                                      const struct bt_sched_learned *learned, bool prefill);

void bt_sched_own_init(struct bt_sched_own *own);
/* A prompt was sent to the worker; p is the caller's until done. */
void bt_sched_own_prompt(struct bt_sched_own *own, struct bt_sched_prompt *p,
                         const struct bt_sched_pace *pace, uint64_t now_ns);
/* The prompt is computed, or will not be. */
void bt_sched_own_prompt_done(struct bt_sched_own *own, struct bt_sched_prompt *p,
                              const struct bt_sched_pace *pace, uint64_t now_ns);

/* The worker that policies see at now_ns, for a request for which no row is preempted. said: NULL
 * if no heartbeat has arrived. The caller fills kvstore, roles and draining. */
void bt_sched_show_worker(const struct bt_sched_said *said, const struct bt_sched_own *own,
                          const struct bt_sched_learned *learned, uint64_t now_ns,
                          struct bt_sched_worker *w);
/* The same for a request of class `priority`: prompts of lower classes are taken out of the queue,
 * and rows of lower classes can be preempted. w: the result of bt_sched_show_worker at the same
 * time. */
void bt_sched_show_class(const struct bt_sched_said *said, const struct bt_sched_own *own,
                         const struct bt_sched_learned *learned, uint64_t now_ns, int32_t priority,
                         struct bt_sched_worker *w);

#endif
