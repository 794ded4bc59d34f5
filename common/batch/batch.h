/* The batchers: which tokens of which sequences the next engine step computes. The worker runs them
 * for real. The conductor predicts with the same cost model (cost.h) in closed form and the
 * simulator likewise; tests roll these functions forward (bt_batch_apply) and hold both against
 * them. The state is a plain struct in caller memory. Pure: no clock, allocation, lock, I/O or log.
 */
#ifndef BT_BATCH_BATCH_H
#define BT_BATCH_BATCH_H

#include "common/base/base.h"
#include "common/batch/cost.h"

typedef enum {
    BT_BATCH_PROMPT = 0,  /* tokens [pos, len) are known and must be computed, in chunks */
    BT_BATCH_DECODE = 1,  /* one token a step; it joins every step */
    BT_BATCH_BLOCKED = 2, /* takes part in no step (no page, not landed) */
    BT_BATCH_DONE = 3     /* rolling forward only: finished */
} bt_batch_kind_t;

/* A step with the prompts of late ones alone is waited for by whoever comes: it takes no longer
 * than this, by the cost, or a block. */
#define BT_BATCH_LATE_NS 50e6

struct bt_batch_seq {
    uint64_t order;        /* arrival: smaller goes first */
    uint32_t pos;          /* next position to compute */
    uint32_t len;          /* PROMPT: known tokens; DECODE: unused */
    uint32_t chunk_tokens; /* rows end at its multiples at the latest (a flow item); 0: no flow */
    uint32_t left;         /* tokens it will still generate, for rolling forward; 0: none */
    uint32_t stop;         /* rows end there too: what follows may come otherwise; 0: nowhere */
    bt_batch_kind_t kind;
    bool late;        /* PROMPT: it delays nobody: behind all others, and in no step of theirs */
    double waited_ns; /* DECODE: its KV came from elsewhere and it has waited so long for its first
                         step here; 0 after that */
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
    const struct bt_batch_cost *cost; /* of its steps; NULL: prompts fill whatever room there is */
    uint32_t cursor;  /* decode: where the next step starts when there are more rows than room */
    bool prompt_turn; /* without mixed steps: whose turn it is when both kinds wait */
    bool trial;       /* prefill: this step takes up to twice the prompts that would pay */
};

struct bt_batch_row {
    uint32_t seq; /* index into seqs */
    uint32_t pos, n;
    bool last;      /* reaches the end of what is known: its last token's logits are sampled */
    bool chunk_end; /* ends a flow chunk (or the prompt): its layers complete items */
};

/* The prefill role's step: prompts only, first come first served. The oldest takes what it can use
 * up to its flow chunk's end; a row that does not reach the prompt's end stops at a block boundary.
 * The next one joins where there is room and, if b->cost is set, where that makes the sum of all
 * prompts' completion times smaller: those before it in the step end later by what it adds, it and
 * all behind it end earlier by what a step of its own would have cost more. So a step whose time
 * goes with its tokens ends one prompt after the other, and short prompts, or many that wait, share
 * one. With b->trial as many again join as room and queue have: under a wrong cost by which no more
 * should share a step there would be no step that tells otherwise, ever. Writes at most max rows,
 * returns their number. */
uint32_t bt_batch_prefill(const struct bt_batch *b, struct bt_batch_row *rows, uint32_t max);

/* Is the sum of completion times smaller with n tokens of the prompt at *s in the step *w, which
 * has `before` prompts, than with all of them in steps of their own? behind: prompts that wait,
 * this one included. */
bool bt_batch_joins(const struct bt_batch *b, const struct bt_batch_work *w,
                    const struct bt_batch_seq *s, uint32_t n, uint32_t before, uint32_t behind);
/* Prompts with tokens to be computed. */
uint32_t bt_batch_waiting(const struct bt_batch *b);
/* Does a step of these rows reach the end of what is known of somebody? */
bool bt_batch_ends_one(const struct bt_batch_row *rows, uint32_t n);

/* The decode role's step (continuous batching): every DECODE row, then prompt chunks into what is
 * left. While prompts wait, room for one block of them is kept, so neither kind starves. Moves
 * cursor and prompt_turn. */
uint32_t bt_batch_decode(struct bt_batch *b, struct bt_batch_row *rows, uint32_t max);

/* Applies a step to the state: prompts advance, finished ones become DECODE (left > 0) or DONE,
 * decode rows lose one of left. For rolling forward; the worker keeps its own truth. */
void bt_batch_apply(struct bt_batch *b, const struct bt_batch_row *rows, uint32_t n);

/* What is in a step, and its cost in ns (cost.h). */
struct bt_batch_work bt_batch_work_of(const struct bt_batch *b, const struct bt_batch_row *rows,
                                      uint32_t n);
/* How long the next step of all decode rows may last: step_ns, and where a row has waited for its
 * first one no longer than leaves it gap_ns with the wait (0: that is not asked). May be below 0.
 */
double bt_batch_mixed_ns(const struct bt_batch *b, double step_ns, double gap_ns);
/* The prompt_tokens with which a step of all decode rows lasts at most budget_ns by c: whole
 * blocks, at least one, so that prompts get on, at most max_rows. Attention is counted as if all of
 * them were the oldest prompt's. */
uint32_t bt_batch_prompt_room(const struct bt_batch *b, const struct bt_batch_cost *c,
                              double budget_ns);
double bt_batch_step_ns(const struct bt_batch_cost *c, const struct bt_batch *b,
                        const struct bt_batch_row *rows, uint32_t n);

#endif
