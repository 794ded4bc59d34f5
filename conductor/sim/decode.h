/* One decode node in simulated time: continuous batching with a step cost linear in rows and
 * context. Between two changes of its rows nothing is simulated step by step: k steps cost a sum
 * that is known. */
#ifndef BT_CONDUCTOR_SIM_DECODE_H
#define BT_CONDUCTOR_SIM_DECODE_H

#include "common/base/base.h"
#include "common/batch/batch.h"

#define BT_SIM_STEP_TOKENS 64 /* as kv.block_tokens: chunks end on its multiples */

struct bt_sim_decode;

struct bt_sim_row {
    uint32_t id;     /* the caller's */
    uint32_t tokens; /* context at its first step: prompt and first token */
    uint32_t steps;  /* tokens it will still generate, >= 1 */
    double first_ms; /* when its first token was given out */
    bool late;       /* it gives up its slot or pages for others when these are short */
    uint32_t before; /* tokens that it generated here before it was preempted */
};

struct bt_sim_prompt { /* computed here, a chunk in each step beside the rows */
    uint32_t id;
    uint32_t from, tokens; /* [from, tokens) are to be computed */
    bool late;             /* behind all others, and in no step with their prompts */
};

struct bt_sim_done {
    uint32_t id;
    bool prompt; /* a prompt is computed; else a row has ended */
    double end_ms;
    /* rows: gaps, the mean of their longest tenth, that without the first one, the first one */
    uint32_t n_gaps;
    double tbt_ms, others_ms, first_gap_ms;
    double life_ms; /* rows: from the first token to the last */
};

struct bt_sim_decode *bt_sim_decode_create(const struct bt_batch_cost *cost, double kv_tokens,
                                           uint32_t rows_max);
void bt_sim_decode_destroy(struct bt_sim_decode *d);
/* Sets how prompts are computed beside rows; `prompt` is their cost. Call it before the first
 * bt_sim_decode_prompt. A step with rows, or while rows are on their way, takes as many prompt
 * tokens as keep it within mixed_ms. If a row joins it, the step and the time that the row has
 * waited must be within gap_ms (0: no limit). Each step has at most chunk_max prompt tokens. */
void bt_sim_decode_mix(struct bt_sim_decode *d, const struct bt_batch_cost *prompt, double mixed_ms,
                       double gap_ms, uint32_t chunk_max);
/* A prompt joins the queue: first come, first served. Its row is to be added when it is done. */
void bt_sim_decode_prompt(struct bt_sim_decode *d, double now_ms, const struct bt_sim_prompt *p);
/* A row will come (sign -1: will not come), so steps are as short as with rows. True: the next
 * change is earlier than before. */
bool bt_sim_decode_expect(struct bt_sim_decode *d, double now_ms, int sign);
/* Adds a row whose KV has landed. False: it never fits. */
bool bt_sim_decode_add(struct bt_sim_decode *d, double now_ms, const struct bt_sim_row *row);
/* The time of the next change; < 0: never. */
double bt_sim_decode_next_ms(const struct bt_sim_decode *d);
/* Simulates everything up to that moment. Up to max rows have ended by it (the rest at the next
 * call, whose next_ms is the same). Returns how many. */
uint32_t bt_sim_decode_advance(struct bt_sim_decode *d, struct bt_sim_done *done, uint32_t max);

/* The node loses everything at now_ms. Calls lost for each row, with the tokens that it has
 * generated here, and for each prompt that is not computed yet. */
void bt_sim_decode_fail(struct bt_sim_decode *d, double now_ms,
                        void (*lost)(void *arg, uint32_t id, uint32_t generated, bool prompt),
                        void *arg);

/* Calls fn for each row, with a lower bound of its tokens: those at the last change of the rows. */
void bt_sim_decode_each(const struct bt_sim_decode *d,
                        void (*row)(void *arg, uint32_t id, uint32_t generated), void *arg);
struct bt_sim_held { /* by rows */
    uint32_t rows;
    double kv;       /* context, tokens */
    double reserved; /* pages, as tokens */
};
/* The rows, and those that will join at the next boundary, because there is room for them: a worker
 * gives these a slot at once. */
struct bt_sim_held bt_sim_decode_running(const struct bt_sim_decode *d);
/* The rows for which there is no room, except late ones. reserved is 0. */
struct bt_sim_held bt_sim_decode_waiting(const struct bt_sim_decode *d);
struct bt_sim_late { /* late ones */
    uint32_t rows, waiting;
    double reserved; /* the rows' pages, as tokens */
};
struct bt_sim_late bt_sim_decode_late(const struct bt_sim_decode *d);
/* the time that they would take alone */
double bt_sim_decode_prompt_ms(const struct bt_sim_decode *d);
double bt_sim_decode_step_ms(const struct bt_sim_decode *d); /* the next one; 0 without rows */
uint64_t bt_sim_decode_steps(const struct bt_sim_decode *d);

#endif
