/* The batchers: which tokens of which sequences the next engine step computes. The worker runs
 * them. The conductor predicts with the same cost model (cost.h) in closed form; tests compare that
 * with these functions, rolled forward (bt_batch_apply). The simulator runs them, too. The state is
 * a plain struct in caller memory. Pure: no clock, allocation, lock, I/O or log. */
#ifndef BT_BATCH_BATCH_H
#define BT_BATCH_BATCH_H

#include "common/base/base.h"
#include "common/batch/cost.h"

typedef enum {
    BT_BATCH_PROMPT = 0,  /* tokens [pos, len) are known and must be computed, in chunks */
    BT_BATCH_DECODE = 1,  /* one token a step, and its drafts; it joins every step */
    BT_BATCH_BLOCKED = 2, /* takes part in no step (no page, not landed) */
    BT_BATCH_DONE = 3     /* rolling forward only: finished */
} bt_batch_kind_t;

/* Limit of a step that has only late prompts, because every new prompt waits for it: this long by
 * the cost, or one block. */
#define BT_BATCH_LATE_NS 50e6

struct bt_batch_seq {
    uint64_t order;        /* arrival: smaller goes first */
    uint32_t pos;          /* next position to compute */
    uint32_t len;          /* PROMPT: known tokens; DECODE: unused */
    uint32_t chunk_tokens; /* a row ends at the next multiple of this at the latest (a flow item);
                              0: no flow */
    uint32_t drafts; /* DECODE: tokens behind the one at pos that are tried in the same step */
    uint32_t left;   /* tokens it will still generate, for rolling forward; 0: none */
    uint32_t stop;   /* rows end there too, because the following blocks may be loaded instead; 0:
                        nowhere */
    bt_batch_kind_t kind;
    bool late; /* PROMPT: it delays no other: it comes after all others and joins no step of theirs
                */
    double waited_ns; /* DECODE: time that a row from another node has waited for its first step
                         here; 0 after that step */
};

struct bt_batch_limits {
    uint32_t max_rows;     /* tokens of one step; >= block_tokens */
    uint32_t block_tokens; /* chunks end on its multiples, or at the prompt's end */
    uint32_t
        prompt_tokens; /* most prompt tokens in a step that also has decode rows; 0: no limit */
    bool mixed;        /* the engine can mix prompt chunks and single tokens in a step */
    bool rows_due;     /* decode: a row is on its way: prompt_tokens counts without rows, too */
};

struct bt_batch {
    struct bt_batch_limits lim;
    struct bt_batch_seq *seqs; /* [n], by rising order; caller memory */
    uint32_t n;
    const struct bt_batch_cost *cost; /* cost of its steps; NULL: prompts fill all the room */
    uint32_t cursor;  /* decode: where the next step starts when there are more rows than room */
    bool prompt_turn; /* without mixed steps: whose turn it is when both kinds wait */
    bool trial;       /* prefill: this step takes up to twice as many prompts as would pay */
};

struct bt_batch_row {
    uint32_t seq; /* index into seqs */
    uint32_t pos, n;
    bool last;      /* reaches the last known token, whose logits are sampled */
    bool chunk_end; /* ends a flow chunk (or the prompt): its layers complete items */
};

/* The prefill role's step: prompts only, first come first served. The oldest prompt takes what it
 * can use up to the end of its flow chunk; a row that does not reach the prompt's end stops at a
 * block boundary. The next prompt joins if there is room and, with b->cost, if that makes the sum
 * of all prompts' completion times smaller. Joining makes earlier prompts of the step end later by
 * the time that it adds. It makes the joining prompt and all after it end earlier by the additional
 * cost of a step of its own. So if the time of a step is proportional to its tokens, prompts end
 * one after the other; short prompts, or many waiting ones, share a step. b->trial: as many prompts
 * again join as there is room for. Without such trials a wrong cost that allows no sharing would
 * never be corrected. Writes at most max rows, returns their number. */
uint32_t bt_batch_prefill(const struct bt_batch *b, struct bt_batch_row *rows, uint32_t max);

/* Returns whether the sum of completion times becomes smaller if n tokens of the prompt at *s join
 * the step *w, which has `before` prompts, instead of having steps of their own. behind: number of
 * waiting prompts, including this one. */
bool bt_batch_joins(const struct bt_batch *b, const struct bt_batch_work *w,
                    const struct bt_batch_seq *s, uint32_t n, uint32_t before, uint32_t behind);
/* Prompts with tokens to be computed. */
uint32_t bt_batch_waiting(const struct bt_batch *b);
/* Returns whether this step computes the last known token of any sequence. */
bool bt_batch_ends_one(const struct bt_batch_row *rows, uint32_t n);

/* The decode role's step (continuous batching): every DECODE row, with as many of its drafts as
 * there is room for beside all rows, then prompt chunks into the remaining room. While prompts
 * wait, room for one block of them is kept, so that neither kind starves. Moves cursor and
 * prompt_turn. */
uint32_t bt_batch_decode(struct bt_batch *b, struct bt_batch_row *rows, uint32_t max);

/* Applies a step to the state, for rolling forward: prompts advance, finished ones become DECODE
 * (left > 0) or DONE, decode rows lose one of left. The worker keeps its own state. */
void bt_batch_apply(struct bt_batch *b, const struct bt_batch_row *rows, uint32_t n);

/* The contents of a step, and its cost in ns (cost.h). */
struct bt_batch_work bt_batch_work_of(const struct bt_batch *b, const struct bt_batch_row *rows,
                                      uint32_t n);
/* How long the next step with all decode rows may last: step_ns, or less if a row has waited for
 * its first step: that step and the wait together may last gap_ns (0: no limit). May be
 * below 0. */
double bt_batch_mixed_ns(const struct bt_batch *b, double step_ns, double gap_ns);
/* The number of prompt tokens with which a step of all decode rows lasts at most budget_ns by c. It
 * is a number of whole blocks, at least one, so that prompts advance, and at most max_rows.
 * Attention is counted as if all of them were of the oldest prompt. */
uint32_t bt_batch_prompt_room(const struct bt_batch *b, const struct bt_batch_cost *c,
                              double budget_ns);
double bt_batch_step_ns(const struct bt_batch_cost *c, const struct bt_batch *b,
                        const struct bt_batch_row *rows, uint32_t n);

#endif
