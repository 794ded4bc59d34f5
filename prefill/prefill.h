/* The prefill role's steps of a request (PREFILL and BOTH submissions): load the resident prefix,
 * compute the rest in chunks, store each (chunk, layer) into the grant's slots while the next layer
 * computes, sample the first token. Private to prefill/; engine thread. */
#ifndef BT_PREFILL_PREFILL_H
#define BT_PREFILL_PREFILL_H

#include "common/worker/core.h"

/* What the role knows of a prompt beside the request itself. */
struct bt_prompt {
    bool filled;           /* all items of its grant are stored or were there from the start */
    struct bt_wtail *tail; /* blocks [tail->first, tail_end), in pieces; NULL: none */
    uint32_t tail_end;
    bool tail_over; /* the worker has reached or passed it: further blocks are useless */
};

/* ---- prefix_tail.c ---- */
/* The kvstore has brought more blocks at the end of the prefix. Takes ownership of t. */
void bt_prefill_tail_add(struct bt_wcore *c, struct bt_wreq *r, struct bt_wtail *t);
/* Does the landed part begin at r's next position, or before it? */
bool bt_prefill_tail_reached(const struct bt_wcore *c, const struct bt_wreq *r);
/* Do the tail's slots still have the generations that were given? */
bool bt_prefill_tail_valid(const struct bt_wreq *r);
/* Writes the tail's blocks from r's next position on into b, as loads of item 0; returns their
 * number. */
uint32_t bt_prefill_tail_blocks(const struct bt_wcore *c, const struct bt_wreq *r,
                                struct bt_engine_block *b);
/* r continues after the tail, whose blocks are being loaded. */
void bt_prefill_tail_skip(struct bt_wcore *c, struct bt_wreq *r);
/* Before each step: loads the tail if r has reached it. Returns the position where the tail begins,
 * beyond which r need not compute; 0: there is none. */
uint32_t bt_prefill_tail_plan(struct bt_wcore *c, struct bt_wreq *r);
/* r has computed the tokens before pos and loads nothing: tells the kvstore if pos is beyond the
 * tail. */
void bt_prefill_tail_past(struct bt_wcore *c, struct bt_wreq *r, uint32_t pos);
/* Frees the tail. */
void bt_prefill_tail_free(struct bt_wreq *r);

/* ---- prompt_logprobs.c ---- */
/* bt_prefill_ops.logprobs. */
void bt_prefill_logprobs(struct bt_wcore *c, const struct bt_engine_event *ev);

#endif
