/* The prefill role's steps of a request (PREFILL and BOTH submissions): load the resident prefix,
 * compute the rest in chunks, store each (chunk, layer) into the grant's slots while the next layer
 * computes, sample the first token. Private to prefill/; engine thread. */
#ifndef BT_PREFILL_PREFILL_H
#define BT_PREFILL_PREFILL_H

#include "common/worker/core.h"

/* What the role knows of a prompt beside the request itself. */
struct bt_prompt {
    bool filled;           /* the last item of its grant is fired, or was there from the start */
    struct bt_wtail *tail; /* blocks [tail->first, tail_end), in pieces; NULL: none */
    uint32_t tail_end;
    bool tail_over; /* it was reached, or passed: no more is of use */
};

/* ---- prefix_tail.c ---- */
/* The kvstore has brought more of the prefix's end. Takes t. */
void bt_prefill_tail_add(struct bt_wcore *c, struct bt_wreq *r, struct bt_wtail *t);
/* Does the part that has landed begin at r's next position, or before? */
bool bt_prefill_tail_reached(const struct bt_wcore *c, const struct bt_wreq *r);
/* Are the tail's slots still the ones that were given? */
bool bt_prefill_tail_valid(const struct bt_wreq *r);
/* Writes the tail's blocks from r's next position on into b, as loads of item 0; returns their
 * number. */
uint32_t bt_prefill_tail_blocks(const struct bt_wcore *c, const struct bt_wreq *r,
                                struct bt_engine_block *b);
/* r goes on behind the tail, whose blocks are being loaded. */
void bt_prefill_tail_skip(struct bt_wcore *c, struct bt_wreq *r);
/* Before each step: loads the tail if r has reached it. Returns the position where the tail begins,
 * beyond which r need not compute; 0: there is none. */
uint32_t bt_prefill_tail_plan(struct bt_wcore *c, struct bt_wreq *r);
/* r, which loads nothing, has the tokens before pos: tells the kvstore if that is beyond the tail.
 */
void bt_prefill_tail_past(struct bt_wcore *c, struct bt_wreq *r, uint32_t pos);
/* Frees what the kvstore has said of the tail. */
void bt_prefill_tail_free(struct bt_wreq *r);

/* ---- prompt_logprobs.c ---- */
/* bt_prefill_ops.logprobs. */
void bt_prefill_logprobs(struct bt_wcore *c, const struct bt_engine_event *ev);

#endif
