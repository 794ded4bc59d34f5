/* The prefill role's steps of a request (PREFILL and BOTH submissions). Load the resident prefix.
 * Compute the rest in chunks. Copy each (chunk, layer) to the grant's slots while the engine
 * computes the next layer. Sample the first token. Private to prefill/; engine thread. */
#ifndef BT_PREFILL_PREFILL_H
#define BT_PREFILL_PREFILL_H

#include "common/worker/core.h"

/* The prefill role's state of a prompt. */
struct bt_prompt {
    bool filled; /* all items of its grant are stored, or were there from the start */
    /* the tail: blocks [tail->first, tail_end), which arrive in pieces; NULL: none */
    struct bt_wtail *tail;
    uint32_t tail_end;
    bool tail_over; /* the worker is at the tail or behind it, so further blocks are useless */
};

/* ---- prefix_tail.c ---- */
/* The kvstore has fetched more blocks at the end of the prefix. Takes ownership of t. */
void bt_prefill_tail_add(struct bt_wcore *c, struct bt_wreq *r, struct bt_wtail *t);
/* Returns whether the part that has landed begins at r's next position or before it. */
bool bt_prefill_tail_reached(const struct bt_wcore *c, const struct bt_wreq *r);
/* Returns whether the tail's slots still have the generations that the kvstore named. */
bool bt_prefill_tail_valid(const struct bt_wreq *r);
/* Writes the tail's blocks from r's next position on to b, as loads of item 0. Returns their
 * number. */
uint32_t bt_prefill_tail_blocks(const struct bt_wcore *c, const struct bt_wreq *r,
                                struct bt_engine_block *b);
/* Lets r continue behind the tail, whose blocks are being loaded. */
void bt_prefill_tail_skip(struct bt_wcore *c, struct bt_wreq *r);
/* Called before each step. Loads the tail if r has reached it. Returns the position at which the
 * tail begins, up to which r has to compute; 0: there is no tail. */
uint32_t bt_prefill_tail_plan(struct bt_wcore *c, struct bt_wreq *r);
/* r has computed the tokens before pos and loads nothing. Tells the kvstore if pos is behind the
 * tail. */
void bt_prefill_tail_past(struct bt_wcore *c, struct bt_wreq *r, uint32_t pos);
void bt_prefill_tail_free(struct bt_wreq *r);

/* ---- prompt_logprobs.c ---- */
/* bt_prefill_ops.logprobs. */
void bt_prefill_logprobs(struct bt_wcore *c, const struct bt_engine_event *ev);

#endif
