/* What is known of a worker, from two sources: what it says of itself in heartbeats, and what this
 * conductor has sent it. One pure function makes of both the worker that policies look at; the
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
    uint32_t waiting, landing; /* want a slot or pages; of these: their KV has not come */
    uint32_t pages_total, pages_free, slots_total, max_model_len;
    uint32_t max_rows, chunk_tokens; /* of its batcher */
    uint64_t queued_prefill_tokens, kv_tokens;
    double prefill_tokens_per_s, step_ms;
    double queue_ms; /* until the prompts that it has are computed */
    /* its steps with prompts beside rows; < 0: it takes no prompts beside rows */
    double mixed_step_ms, mixed_gap_ms;
    bool has_cost;
    struct bt_batch_cost cost;
    struct bt_classes classes; /* the same by class; empty: it does not tell them apart */
};

/* What this conductor has at the worker. */
struct bt_sched_own {
    uint32_t rows, decoding; /* rows that it was sent; those of them that have begun */
    uint32_t late;           /* of rows: late, and not begun */
    uint64_t prefill_tokens;
    uint64_t kv_tokens, decoding_kv, late_kv; /* context of rows, decoding, late */
    struct bt_sched_backlog backlog;          /* prompts that it has not computed */
    struct bt_classes classes;                /* queue_ns: of backlog; rows */
};

/* How the worker computes the prompts of its backlog. said: NULL: it has said nothing. prefill:
 * its role is prefill alone, so that its batcher can be rolled forward. */
struct bt_sched_pace bt_sched_pace_of(const struct bt_sched_said *said,
                                      const struct bt_sched_learned *learned, bool prefill);

void bt_sched_own_init(struct bt_sched_own *own);
/* A prompt was sent to the worker; p is the caller's until done. */
void bt_sched_own_prompt(struct bt_sched_own *own, struct bt_sched_prompt *p,
                         const struct bt_sched_pace *pace, uint64_t now_ns);
/* It is computed, or will not be. */
void bt_sched_own_prompt_done(struct bt_sched_own *own, struct bt_sched_prompt *p,
                              const struct bt_sched_pace *pace, uint64_t now_ns);

/* What policies see of the worker at now_ns, for a request of any class: nobody makes way for it.
 * said: NULL: it has said nothing. kvstore, roles and draining are the caller's to fill. */
void bt_sched_show_worker(const struct bt_sched_said *said, const struct bt_sched_own *own,
                          const struct bt_sched_learned *learned, uint64_t now_ns,
                          struct bt_sched_worker *w);
/* ... for a request of class priority: what goes behind it is taken out of the queue, and rows of
 * lower classes would make way. w: as bt_sched_show_worker left it, at the same time. */
void bt_sched_show_class(const struct bt_sched_said *said, const struct bt_sched_own *own,
                         const struct bt_sched_learned *learned, uint64_t now_ns, int32_t priority,
                         struct bt_sched_worker *w);

#endif
