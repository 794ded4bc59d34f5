/* The decode role's steps of a request. Wait until its KV has landed in the node's slab, load it,
 * join the batch, generate. Also: fork it into choices, preempt it, reload it. Private to decode/;
 * engine thread. */
#ifndef BT_DECODE_DECODE_H
#define BT_DECODE_DECODE_H

#include "common/spec/choose.h"
#include "common/spec/match.h"
#include "common/spec/predict.h"
#include "common/worker/core.h"

/* The decode role's state of a sequence. */
struct bt_row {
    /* the token that the prefill worker sampled, if this request reads its KV */
    uint32_t first_token;
    bool finished;  /* whether that first token ends the answer */
    bool page_wait; /* the row skips a step, because no page is free for its next position */
    /* when its KV landed (mono), for a reader that was in no step yet; otherwise 0 */
    uint64_t landed_ns;
    uint32_t load_first;            /* number of the first block that is, or was, loaded again */
    struct bt_spec_predict predict; /* its place in the predicted text */
    struct bt_spec_match *index;    /* index of its tokens, behind `shared`; NULL: none yet */
    bool rated;
    struct bt_spec_rates rates; /* acceptance rates of its drafts, if `rated` */
    uint32_t match;             /* how long a text the drafts of this step have matched */
    uint64_t model_owner;       /* identifies its sequence in the draft model's engine; 0: none */
    uint32_t model_pos;         /* number of tokens whose KV the draft model has */
    /* the beams of a beam search, behind `shared`; NULL: not admitted yet */
    struct bt_beams *beams;
    /* Only in the lead: pages of the prompt that are kept for choices that have not begun. */
    struct bt_wreq *lead;
    struct bt_list shared_link;
    uint32_t n_shared; /* includes the last, partial page; 0: none are kept */
    uint32_t shared[]; /* [blocks of the prompt] */
};

/* ---- fork.c ---- */
/* Keeps the pages of r, which have the prompt's KV, for the choices that need them. Does nothing if
 * they are kept already. */
void bt_decode_fork_keep(struct bt_wcore *c, struct bt_wreq *r);
/* Calls bt_decode_fork_keep, and puts the lead's other choices into the queue. */
void bt_decode_fork_start(struct bt_wcore *c, struct bt_wreq *lead);
/* Call it after slot_open. Copies the last kept page, and sets the position at which r begins to
 * compute. */
bt_status_t bt_decode_fork_copy(struct bt_wcore *c, struct bt_wreq *r) BT_MUST_CHECK;
/* These four implement kept_blocks, take_kept, release_kept and reclaim of bt_decode_ops. */
uint32_t bt_decode_fork_blocks(const struct bt_wreq *r);
void bt_decode_fork_take(struct bt_wcore *c, struct bt_wreq *r);
void bt_decode_fork_release(struct bt_wcore *c, struct bt_wreq *lead);
bool bt_decode_fork_drop(struct bt_wcore *c, const struct bt_wreq *except);

/* ---- reload.c ---- */
/* These two implement ready and missing of bt_decode_ops. */
bool bt_decode_reload_ready(struct bt_wcore *c, struct bt_wreq *r);
uint32_t bt_decode_reload_missing(const struct bt_wcore *c, const struct bt_wreq *r);
/* Call it after slot_open. Starts the load, after which quiet() calls bt_decode_reload_loaded.
 * Without a load it starts computing. r->stage says which. */
bt_status_t bt_decode_reload_begin(struct bt_wcore *c, struct bt_wreq *r) BT_MUST_CHECK;
/* The engine has loaded the blocks of r's lease. */
bt_status_t bt_decode_reload_loaded(struct bt_wcore *c, struct bt_wreq *r) BT_MUST_CHECK;
/* Implements pieces_over of bt_role_ops. */
void bt_decode_reload_pieces_over(struct bt_wcore *c, struct bt_wreq *r);

/* ---- draft.c ---- */
/* These two implement state_bytes and draft of bt_decode_ops. */
size_t bt_decode_row_bytes(const struct bt_wcore *c, const struct bt_submission *s);
void bt_decode_draft(struct bt_wcore *c);
/* A step has tried n drafts of r, and accepted the first `accepted` of them. */
void bt_decode_drafted(struct bt_wcore *c, struct bt_wreq *r, uint32_t n, uint32_t accepted);

/* Returns whether r's drafts come from the draft model. */
bool bt_decode_by_model(const struct bt_wcore *c, const struct bt_wreq *r);
/* Returns whether r's drafts come from the MTP layer. */
bool bt_decode_by_mtp(const struct bt_wcore *c, const struct bt_wreq *r);
/* The probability that a draft of r with this match is accepted. */
float bt_decode_draft_rate(const struct bt_wcore *c, struct bt_wreq *r, uint32_t match);
/* Takes pages for n drafts of r, but leaves enough free for every active request to get its next
 * page. Never takes pages from other requests. Returns for how many drafts r has room. */
uint32_t bt_decode_draft_pages(struct bt_wcore *c, struct bt_wreq *r, uint32_t n);

/* ---- draft_model.c ---- */
/* Gives the rows of c's batch drafts of the draft model. work: the step without them. most: tokens
 * for which the step has room. */
void bt_decode_draft_by_model(struct bt_wcore *c, const struct bt_batch_work *work, uint32_t most);

/* ---- draft_mtp.c ---- */
/* The same, with the MTP layer. */
void bt_decode_draft_by_mtp(struct bt_wcore *c, const struct bt_batch_work *work, uint32_t most);

/* ---- beam.c ---- */
/* The bytes of a search within the state of its row, and their offset. */
size_t bt_decode_beam_bytes(const struct bt_wcore *c, const struct bt_submission *s);
void *bt_decode_beam_memory(const struct bt_wcore *c, const struct bt_wreq *r);
/* These implement search, plan_beams, beam_row, beam_pages, take_beam_pages, beam_growth,
 * return_beam_pages and tell of bt_decode_ops. */
void bt_decode_search(struct bt_wcore *c, struct bt_wreq *r, const struct bt_engine_out *out);
uint32_t bt_decode_plan_beams(struct bt_wcore *c, struct bt_wreq *r, uint32_t first);
void bt_decode_beam_row(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                        struct bt_engine_row *e);
uint32_t bt_decode_beam_pages(const struct bt_wcore *c, struct bt_wreq *r);
void bt_decode_take_beam_pages(struct bt_wcore *c, struct bt_wreq *r);
uint32_t bt_decode_beam_growth(const struct bt_wcore *c, struct bt_wreq *r, uint32_t tokens);
void bt_decode_return_beam_pages(struct bt_wcore *c, struct bt_wreq *r);
bool bt_decode_tell(struct bt_wcore *c);
/* The step with this row of a beam is over. out == NULL: the step computed the beam's tokens
 * again. */
void bt_decode_beam_stepped(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                            const struct bt_engine_out *out);
/* Pages that r's beams still need for their next rows. */
uint32_t bt_decode_beam_missing(const struct bt_wcore *c, const struct bt_wreq *r);
/* Gives r's beams these pages. */
bt_status_t bt_decode_beam_grow(struct bt_wcore *c, struct bt_wreq *r,
                                const uint32_t *pages) BT_MUST_CHECK;
/* Returns whether r is a search that has ended and only has to report its answers. It will soon
 * give its pages back. */
bool bt_decode_beams_over(const struct bt_wreq *r);

/* ---- preempt.c, mixed_step.c: these implement the functions of bt_decode_ops ---- */
void bt_decode_make_way(struct bt_wcore *c, const struct bt_wreq *r, uint32_t want);
void bt_decode_provide_pages(struct bt_wcore *c);
void bt_decode_bound_prompts(struct bt_wcore *c);

#endif
