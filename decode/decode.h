/* The decode role's steps of a request: wait until its KV has landed in the node's slab, load it,
 * join the batch, generate; fork it into choices, preempt and reload it. Private to decode/; engine
 * thread. */
#ifndef BT_DECODE_DECODE_H
#define BT_DECODE_DECODE_H

#include "common/spec/choose.h"
#include "common/spec/match.h"
#include "common/spec/predict.h"
#include "common/worker/core.h"

/* What the role knows of a sequence beside the request itself. */
struct bt_row {
    uint32_t first_token; /* of a reader: the token that the prefill worker has sampled */
    bool finished;        /* of a reader: the first token ends the answer */
    bool page_wait;       /* skips a step: no page is free for its next position */
    uint64_t landed_ns; /* when its KV landed (mono), of a reader that was in no step yet; else 0 */
    uint32_t load_first;            /* first block that is, or was, loaded again */
    struct bt_spec_predict predict; /* its place in the prediction */
    struct bt_spec_match *index;    /* of its tokens, behind `shared`; NULL: none yet */
    bool rated;
    struct bt_spec_rates rates; /* of its drafts, if rated */
    uint32_t match;             /* of the drafts of the step under way */
    uint64_t model_owner;       /* its opening in the draft model's engine; 0: none */
    uint32_t model_pos;         /* tokens whose KV the draft model has */
    struct bt_beams *beams;     /* of a beam search, behind `shared`; NULL: not admitted yet */
    /* Of the lead: pages of the prompt that are kept for choices that have not begun. */
    struct bt_wreq *lead;
    struct bt_list shared_link;
    uint32_t n_shared; /* with the last, partial one; 0: none */
    uint32_t shared[]; /* [blocks of the prompt] */
};

/* ---- fork.c ---- */
/* The prompt's KV is in r's pages: keeps them for the choices that need them, if no choice has yet.
 */
void bt_decode_fork_keep(struct bt_wcore *c, struct bt_wreq *r);
/* bt_decode_fork_keep, and lets the lead's other choices queue. */
void bt_decode_fork_start(struct bt_wcore *c, struct bt_wreq *lead);
/* After slot_open: copies the last kept page, and sets where r begins to compute. */
bt_status_t bt_decode_fork_copy(struct bt_wcore *c, struct bt_wreq *r) BT_MUST_CHECK;
/* As kept_blocks, take_kept, release_kept and reclaim of bt_decode_ops. */
uint32_t bt_decode_fork_blocks(const struct bt_wreq *r);
void bt_decode_fork_take(struct bt_wcore *c, struct bt_wreq *r);
void bt_decode_fork_release(struct bt_wcore *c, struct bt_wreq *lead);
bool bt_decode_fork_drop(struct bt_wcore *c, const struct bt_wreq *except);

/* ---- reload.c ---- */
/* As ready and missing of bt_decode_ops. */
bool bt_decode_reload_ready(struct bt_wcore *c, struct bt_wreq *r);
uint32_t bt_decode_reload_missing(const struct bt_wcore *c, const struct bt_wreq *r);
/* After slot_open: starts the load (then bt_decode_reload_loaded, from quiet()) or, without one,
 * the computing; the stage says which. */
bt_status_t bt_decode_reload_begin(struct bt_wcore *c, struct bt_wreq *r) BT_MUST_CHECK;
/* The flow that loads r's lease is quiet. */
bt_status_t bt_decode_reload_loaded(struct bt_wcore *c, struct bt_wreq *r) BT_MUST_CHECK;
/* As pieces_over of bt_role_ops. */
void bt_decode_reload_pieces_over(struct bt_wcore *c, struct bt_wreq *r);

/* ---- draft.c ---- */
/* As state_bytes and draft of bt_decode_ops. */
size_t bt_decode_row_bytes(const struct bt_wcore *c, const struct bt_submission *s);
void bt_decode_draft(struct bt_wcore *c);
/* A step tried n drafts of r and accepted the first `accepted` of them. */
void bt_decode_drafted(struct bt_wcore *c, struct bt_wreq *r, uint32_t n, uint32_t accepted);

/* Do r's drafts come from the draft model? */
bool bt_decode_by_model(const struct bt_wcore *c, const struct bt_wreq *r);
/* Do they come from the MTP layer? */
bool bt_decode_by_mtp(const struct bt_wcore *c, const struct bt_wreq *r);
/* How likely a draft of r with this match is accepted. */
float bt_decode_draft_rate(const struct bt_wcore *c, struct bt_wreq *r, uint32_t match);
/* Takes pages for n drafts of r as long as every active request can still get its next page, and
 * returns for how many there is room. Nothing is taken from others for drafts. */
uint32_t bt_decode_draft_pages(struct bt_wcore *c, struct bt_wreq *r, uint32_t n);

/* ---- draft_model.c ---- */
/* Gives rows of c's batch drafts of the draft model. work: the step without them; most: tokens that
 * it has room for. */
void bt_decode_draft_by_model(struct bt_wcore *c, const struct bt_batch_work *work, uint32_t most);

/* ---- draft_mtp.c ---- */
/* The same by the MTP layer. */
void bt_decode_draft_by_mtp(struct bt_wcore *c, const struct bt_batch_work *work, uint32_t most);

/* ---- beam.c ---- */
/* Bytes that a search takes in its row's state, and where. */
size_t bt_decode_beam_bytes(const struct bt_wcore *c, const struct bt_submission *s);
void *bt_decode_beam_memory(const struct bt_wcore *c, const struct bt_wreq *r);
/* As search, plan_beams, beam_row, beam_pages, take_beam_pages, beam_growth, return_beam_pages and
 * tell of bt_decode_ops. */
void bt_decode_search(struct bt_wcore *c, struct bt_wreq *r, const struct bt_engine_out *out);
uint32_t bt_decode_plan_beams(struct bt_wcore *c, struct bt_wreq *r, uint32_t first);
void bt_decode_beam_row(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                        struct bt_engine_row *e);
uint32_t bt_decode_beam_pages(const struct bt_wcore *c, struct bt_wreq *r);
void bt_decode_take_beam_pages(struct bt_wcore *c, struct bt_wreq *r);
uint32_t bt_decode_beam_growth(const struct bt_wcore *c, struct bt_wreq *r, uint32_t tokens);
void bt_decode_return_beam_pages(struct bt_wcore *c, struct bt_wreq *r);
bool bt_decode_tell(struct bt_wcore *c);
/* The step with this row of a beam is over; out: NULL: its tokens were computed again. */
void bt_decode_beam_stepped(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                            const struct bt_engine_out *out);
/* Pages that r's beams lack for their next rows. */
uint32_t bt_decode_beam_missing(const struct bt_wcore *c, const struct bt_wreq *r);
/* Gives them these pages. */
bt_status_t bt_decode_beam_grow(struct bt_wcore *c, struct bt_wreq *r,
                                const uint32_t *pages) BT_MUST_CHECK;
/* Is r a search that is over, but for telling its answers? It will soon give its pages back. */
bool bt_decode_beams_over(const struct bt_wreq *r);

/* ---- preempt.c, mixed_step.c: as the functions of bt_decode_ops ---- */
void bt_decode_make_way(struct bt_wcore *c, const struct bt_wreq *r, uint32_t want);
void bt_decode_provide_pages(struct bt_wcore *c);
void bt_decode_bound_prompts(struct bt_wcore *c);

#endif
