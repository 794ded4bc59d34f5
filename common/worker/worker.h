/* The worker runtime, shared by baton-prefill and baton-decode: both binaries hold both roles and
 * start in their own. Two threads: the control thread (loop: sessions with conductors, the session
 * with this node's kvstore, etcd, HTTP) and the engine thread (the one owner of the engine, its
 * pages and every request's state), with a bounded ring each way. */
#ifndef BT_WORKER_WORKER_H
#define BT_WORKER_WORKER_H

#include "common/base/base.h"
#include "common/batch/batch.h"
#include "common/engine/engine.h"

typedef enum { BT_ROLE_PREFILL = 0, BT_ROLE_DECODE = 1 } bt_role_t;

struct bt_wcore;      /* the engine thread's state: common/worker/core.h */
struct bt_wreq;       /* one choice of a submission: common/worker/request.h */
struct bt_submission; /* likewise */
struct bt_wtail;      /* likewise */

/* What a role does with a request at each turn of its life. All on the engine thread. The steps of
 * a PREFILL submission are the prefill role's, those of a DECODE submission the decode role's; a
 * BOTH submission starts with the former and goes on with the latter. */
struct bt_role_ops {
    const char *kind; /* member kind: "prefill" | "decode" */
    /* The kvstore has opened the grant. */
    void (*opened)(struct bt_wcore *c, struct bt_wreq *r);
    /* Reader: everything has landed. finished: the first token ends the answer. NULL: the role
     * reads no grant. */
    void (*landed)(struct bt_wcore *c, struct bt_wreq *r, uint32_t first_token, bool finished);
    /* A slot and pages are taken: open the sequence and start. An error fails the request. */
    bt_status_t (*begin)(struct bt_wcore *c, struct bt_wreq *r, char *err, size_t err_cap);
    /* A step is about to be planned, r in stage PROMPT or ROW. May move r on, and may set s->stop
     * and s->waited_ns. False: r has no part in this step. */
    bool (*plan)(struct bt_wcore *c, struct bt_wreq *r, struct bt_batch_seq *s);
    /* Completes the engine row of a planned row (flows); may be NULL. */
    void (*row)(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                struct bt_engine_row *e);
    /* The step with this row is over. out: its n_out sampled tokens, several of a row with drafts;
     * NULL: none. */
    void (*stepped)(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                    const struct bt_engine_out *out, uint32_t n_out);
    /* All flows of r are closed and quiet (and it is not ending). */
    void (*quiet)(struct bt_wcore *c, struct bt_wreq *r);
    /* A piece of r, `tokens` long, was loaded (bt_wlease_pieces). May be NULL. */
    void (*piece)(struct bt_wcore *c, struct bt_wreq *r, uint32_t tokens);
    /* There are no more pieces: r goes on as PROMPT. */
    void (*pieces_over)(struct bt_wcore *c, struct bt_wreq *r);
    /* r is about to be freed: frees what the role's state of r points to. Either thread. May be
     * NULL. */
    void (*release)(struct bt_wreq *r);
};

/* The prefill role, and what the engine thread passes on to it. */
struct bt_prefill_ops {
    struct bt_role_ops role;
    size_t state_bytes; /* of struct bt_prompt: zeroed, a part of each request */
    /* The kvstore has brought more blocks from the end of r's prefix. Takes t. */
    void (*tail)(struct bt_wcore *c, struct bt_wreq *r, struct bt_wtail *t);
    /* A forward is done: reports the logprobs of prompt tokens that it has computed. */
    void (*logprobs)(struct bt_wcore *c, const struct bt_engine_event *ev);
};

/* The decode role, and what the engine thread asks of it. */
struct bt_decode_ops {
    struct bt_role_ops role;
    /* Bytes of struct bt_row, zeroed, a part of each request; its size depends on the blocks of the
     * prompt and on where its drafts come from. */
    size_t (*state_bytes)(const struct bt_wcore *c, const struct bt_submission *s);
    /* ---- choices that share the pages of a prompt ---- */
    /* The prompt's KV is in lead's pages: its other choices may begin. */
    void (*prompt_done)(struct bt_wcore *c, struct bt_wreq *lead);
    /* Blocks of the prompt whose pages r's submission keeps for r, from the first on. */
    uint32_t (*kept_blocks)(const struct bt_wreq *r);
    /* Puts their pages into r's page table, with references. */
    void (*take_kept)(struct bt_wcore *c, struct bt_wreq *r);
    /* The submission has ended: nothing is kept any more. */
    void (*release_kept)(struct bt_wcore *c, struct bt_wreq *lead);
    /* Pages are short: gives back pages that only wait for choices still to come, of another
     * submission than `except`'s. False: there are none. */
    bool (*reclaim)(struct bt_wcore *c, const struct bt_wreq *except);
    /* ---- rows that lose their pages ---- */
    /* Is it known what the pool has of r, or is that no question? Asks when called first. */
    bool (*ready)(struct bt_wcore *c, struct bt_wreq *r);
    /* Tokens of r, which was preempted, that are computed again, as far as is known. */
    uint32_t (*missing)(const struct bt_wcore *c, const struct bt_wreq *r);
    /* Preempts rows of a lower class than r's, the last one first, until a slot and `want` pages
     * are free or on their way back; no row if all of them would not be enough. */
    void (*make_way)(struct bt_wcore *c, const struct bt_wreq *r, uint32_t want);
    /* ---- before each step ---- */
    /* Gives each row the page of its next position; preempts rows if there are too few. */
    void (*provide_pages)(struct bt_wcore *c);
    /* Writes drafts behind the tokens of rows of c's batch and sets how many each has. */
    void (*draft)(struct bt_wcore *c);
    /* Sets in c's batch how many prompt tokens may join rows, by time if that is bounded, by tokens
     * otherwise. */
    void (*bound_prompts)(struct bt_wcore *c);
    /* ---- beam searches (sub->beams.width > 0), from their prompt's end on; all in stage ROW ----
     */
    /* r's prompt is in its pages, and out are the most likely tokens behind it: begins the search,
     * or goes on with it. */
    void (*search)(struct bt_wcore *c, struct bt_wreq *r, const struct bt_engine_out *out);
    /* Plans the rows of r's beams as c's batch.seqs from number `first` on, with seq_reqs and
     * step.places; returns their number. */
    uint32_t (*plan_beams)(struct bt_wcore *c, struct bt_wreq *r, uint32_t first);
    /* Completes the engine row of one of them: slot and tokens. */
    void (*beam_row)(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                     struct bt_engine_row *e);
    /* Pages that r's beams take beside r->pages when r is admitted. */
    uint32_t (*beam_pages)(const struct bt_wcore *c, struct bt_wreq *r);
    /* Takes them: so many are free. */
    void (*take_beam_pages)(struct bt_wcore *c, struct bt_wreq *r);
    /* Pages that the beams, which have begun, still need to grow by `tokens`. */
    uint32_t (*beam_growth)(const struct bt_wcore *c, struct bt_wreq *r, uint32_t tokens);
    /* r ends or is preempted, and its slots are quiet: gives the beams' pages back. */
    void (*return_beam_pages)(struct bt_wcore *c, struct bt_wreq *r);
    /* Gives a part of a finished search's answers to its conductor. There is a buffer for tokens.
     * False: there is no such search. */
    bool (*tell)(struct bt_wcore *c);
};

/* The two roles. prefill/ and decode/ define them, and both binaries link both: a worker can change
 * its role at run time, and a BOTH submission needs both. Only the two mains name them: neither
 * daemon includes the other. */
extern const struct bt_prefill_ops bt_prefill;
extern const struct bt_decode_ops bt_decode;

/* Runs a worker until it is told to stop; returns the exit status: 0 after SIGTERM, 1 failed to
 * start, 2 configuration, 3 may not join the cluster, 4 the device failed. */
int bt_worker_main(int argc, char **argv, bt_role_t start, const struct bt_prefill_ops *prefill,
                   const struct bt_decode_ops *decode);

#endif
