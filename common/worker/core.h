/* The engine thread's state and the helpers that the roles' steps are written with. Everything here
 * belongs to the engine thread, except parts that are marked otherwise. */
#ifndef BT_WORKER_CORE_H
#define BT_WORKER_CORE_H

#include <stdatomic.h>

#include "common/batch/batch.h"
#include "common/batch/fit.h"
#include "common/etcd/roles.h"
#include "common/kv/page_pool.h"
#include "common/spec/choose.h"
#include "common/worker/conf.h"
#include "common/worker/request.h"
#include "common/worker/ring.h"
#include "common/worker/stats.h"
#include "common/worker/worker.h"
#include "session.pb-c.h"

/* ---- control thread -> engine thread ---- */
typedef enum {
    BT_WCMD_SUBMIT,
    BT_WCMD_OPENED, /* grant (owned from here) or status */
    BT_WCMD_TRAILER,
    BT_WCMD_TAIL,          /* tail (owned from here) */
    BT_WCMD_COMPILED,      /* req's grammar: status and detail */
    BT_WCMD_MASK_MADE,     /* of a choice of req: ahead (owned from here) */
    BT_WCMD_CANCEL,        /* status: OK for a Cancel, otherwise why */
    BT_WCMD_CANCEL_CHOICE, /* req: any choice, not only a lead */
    BT_WCMD_REVOKE,        /* status: why the kvstore takes the grant back */
    BT_WCMD_ATTACHED,
    BT_WCMD_DETACHED,
    BT_WCMD_PUT_SLOT,
    BT_WCMD_LEASED, /* a lease (owned from here), or status; AGAIN: another answer comes */
    BT_WCMD_RECALL, /* the kvstore wants a lease back */
    BT_WCMD_FORGET, /* the last command with this request: it is freed */
    BT_WCMD_STOP
} bt_wcmd_kind_t;
struct bt_wcmd {
    bt_wcmd_kind_t kind;
    bt_status_t status;
    struct bt_wreq *req;
    union {
        struct bt_wgrant *grant;
        struct bt_wtail *tail;
        struct bt_wslab *slab;
        struct bt_wahead *ahead;
        struct {
            uint32_t first_token;
            bool finished;
        } trailer;
        struct {
            uint64_t id;
            uint32_t slot, generation;
        } put;
        struct {
            uint64_t id;
            struct bt_wlease *lease;
        } lease;
    } u;
    char detail[BT_WORKER_DETAIL];
};

/* ---- engine thread -> control thread ---- */
struct bt_wtoken {
    uint64_t request, session;
    uint32_t epoch, choice, offset, token;
    float logprob;
    uint32_t n_top;
    Baton__Finish finish;
    uint32_t top_id[BT_ENGINE_MAX_TOP];
    float top_logprob[BT_ENGINE_MAX_TOP];
};
struct bt_wtokens { /* of one step; goes back to the engine thread through `busy` */
    _Atomic bool busy;
    uint32_t n;
    struct bt_wtoken *t; /* [max_tokens] */
};
/* Prompt tokens with their logprobs, in order: heap memory, since they are no part of decoding. */
struct bt_wprompt {
    uint64_t request, session;
    uint32_t epoch, first, n; /* positions [first, first + n) */
    struct {
        uint32_t token, rank, n_top;
        float logprob;
        uint32_t top_id[BT_ENGINE_MAX_TOP];
        float top_logprob[BT_ENGINE_MAX_TOP];
    } t[];
};
#define BT_WORKER_PROMPT_MSG 128 /* tokens of one such message: <= 40 KiB packed */

typedef enum {
    BT_WOUT_PROGRESS, /* loading: fraction */
    BT_WOUT_READY,    /* the engine is open: root, layout and info are set */
    BT_WOUT_FAILED,   /* it could not be opened */
    BT_WOUT_FATAL,    /* the device failed: out of service */
    BT_WOUT_TOKENS,
    BT_WOUT_PROMPT_LOGPROBS, /* the control thread frees them */
    BT_WOUT_PREFILL_DONE,
    BT_WOUT_SEARCHING,
    BT_WOUT_TRAILER,  /* to the kvstore */
    BT_WOUT_CLOSE,    /* to the kvstore */
    BT_WOUT_TAIL_END, /* to the kvstore */
    BT_WOUT_PUT,      /* to the kvstore */
    BT_WOUT_PUT_DONE,
    BT_WOUT_LEASE,   /* to the kvstore */
    BT_WOUT_UNLEASE, /* to the kvstore */
    BT_WOUT_ENDED    /* the control thread drops req from its tables and answers BT_WCMD_FORGET */
} bt_wout_kind_t;
struct bt_wout {
    bt_wout_kind_t kind;
    bt_status_t status;
    uint64_t attach; /* messages to the kvstore: dropped if the attachment is another by now */
    struct bt_wreq *req;
    union {
        struct bt_wtokens *tokens;
        struct bt_wprompt *prompt;
        double fraction;
        struct {
            uint64_t request;
            uint32_t epoch, first_token;
            bool finished, abort, writer;
            uint64_t last_compute_ns;
        } local;
        struct {
            uint64_t request, session, start_ns, last_compute_ns;
            uint32_t epoch, cached, computed;
        } prefill;
        struct {
            uint64_t request, session;
            uint32_t epoch, tokens;
        } searching;
        struct {
            uint64_t id;
            uint32_t depth, n_tokens, tenant;
            bool abort, passing;
            struct bt_kv_key key;
        } put;
        struct {
            uint64_t id;
            struct bt_wkeys *keys; /* of LEASE, as the rest */
            bool passing;
            uint64_t request;
            uint32_t epoch, first;
        } lease;
    } u;
    char detail[BT_WORKER_DETAIL];
};

struct bt_wticket {
    bt_engine_ticket_t ticket;
    enum { BT_WT_FORWARD, BT_WT_SAMPLE, BT_WT_SLOT, BT_WT_FLOW, BT_WT_PUT } kind;
    void *ptr;
};

struct bt_wstep { /* the step in flight: one at a time */
    bool active;
    bool held; /* the forward's ticket was polled and is kept: its logits are still to be sampled */
    bt_engine_ticket_t forward, sample;
    uint32_t n_rows, n_sample; /* n_sample: sampled positions, 1 + n_draft of a SAMPLE row */
    uint64_t launched_ns;
    uint32_t prompt_tokens, decode_tokens, decode_rows;
    uint32_t searches; /* rows of contrastive search, whose candidates are passes of their own */
    struct bt_batch_work work;
    struct bt_wreq **reqs; /* [max_slots] */
    uint32_t *places; /* [max_slots] for batch.seqs: the place in its beam search; otherwise 0 */
    struct bt_batch_row *rows;   /* [max_slots] */
    struct bt_engine_row *erows; /* [max_slots] */
};

#define BT_WORKER_TOKEN_BUFS 4

/* Requests by where they are, and how many. core.c moves them. */
struct bt_wreqs {
    struct bt_list queue;   /* QUEUED, by rising order */
    struct bt_list active;  /* holds a slot, by rising order */
    struct bt_list waiting; /* OPENING, LANDING, FORKING */
    struct bt_list closing; /* PREEMPTING, CLOSING */
    uint32_t n_queue, n_active, n_waiting;
    uint64_t next_order;
};

/* Tickets of the engine that were not polled yet, and what each is for. */
struct bt_wtickets {
    struct bt_wticket *of; /* [max] */
    uint32_t n, max;
};

/* Tokens on their way to the control thread. tokens.c. */
struct bt_wtokens_out {
    struct bt_wtokens bufs[BT_WORKER_TOKEN_BUFS];
    struct bt_wtokens *now; /* of the step being finished */
    struct bt_wout *after;  /* [2 * max_slots] goes out behind its tokens */
    uint32_t n_after;
};

/* The speed of steps; see calibration.c and load_report.c. */
struct bt_wspeed {
    struct bt_batch_fit fit; /* of its own steps */
    double step_ewma_ms, prefill_ewma_tps;
    double row_tokens; /* of a row in a step: 1 and its drafts, a mean that fades; 0: none yet */
};

/* Rows that may have drafts in a step. Larger batches are bound by arithmetic: drafts do not pay.
 */
#define BT_WORKER_DRAFT_ROWS 256

/* Tokens of a row that the draft model computes with its next draft, at most. */
#define BT_WORKER_DRAFT_LAG 4u

/* A small model that drafts, in an engine of its own. Its KV of a token lies in the page of the
 * same number as the model's: a row's page table serves both. draft_engine.c opens it,
 * decode/draft_model.c runs it. */
struct bt_wdraft {
    struct bt_engine *eng; /* NULL: none */
    const struct bt_engine_info *info;
    uint64_t *owner; /* [max_slots] which opening of a row the slot's sequence is of; 0: none */
    uint64_t next_owner;
    double pass_ns; /* mean time of a pass, one token of each row; 0: none was measured */
};

/* Drafts of the MTP layer in a step, of one row. */
#define BT_WORKER_MTP_DRAFTS 8u

/* Scratch for drafts of the MTP layer; NULL without it. decode/draft_mtp.c. */
struct bt_wmtp {
    uint32_t *slots, *counts;   /* [BT_WORKER_DRAFT_ROWS] */
    uint32_t *seqs;             /* likewise: which of the batch they are */
    struct bt_engine_out *outs; /* [BT_WORKER_DRAFT_ROWS * BT_WORKER_MTP_DRAFTS] */
    double pass_ns;             /* mean time of a pass; 0: none was measured */
};

/* Drafts of this worker's rows. decode/draft.c. */
struct bt_wspec {
    struct bt_wdraft model;
    struct bt_wmtp mtp;
    struct bt_spec_trial passes; /* trials of drafts that take passes */
    double drafting_ns;          /* what these took before the step under way */
    bt_spec_kind_t kind;         /* where they come from; OFF: no drafts */
    struct bt_spec_rates rates;
    struct bt_spec_trial trial;
    struct bt_spec_row *rows; /* [BT_WORKER_DRAFT_ROWS] scratch */
    uint32_t *seqs;           /* likewise: which of the batch they are */
};

struct bt_wcore {
    const struct bt_worker_conf *conf;
    const struct bt_prefill_ops *prefill;
    const struct bt_decode_ops *decode;
    struct bt_wstats *stats;
    struct bt_ring in, out;
    void (*bell)(void *arg); /* rings the kvstore; any thread */
    void *bell_arg;
    /* The control thread changes these. role: BT_ROLES_*, how steps are filled. mixed_step_ns: how
     * long a step with prompts beside rows may last. mixed_gap_ns: how long the first step of a row
     * that has landed may last, together with the time that the row has waited. 0: no such bound.
     */
    _Atomic uint32_t role;
    _Atomic uint64_t mixed_step_ns, mixed_gap_ns;

    const struct bt_engine_vtable *vt; /* loaded before the thread starts */
    /* set while opening, constant after READY */
    struct bt_engine *eng;
    const struct bt_engine_info *info;
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    uint32_t max_slots, max_rows, block_tokens;
    uint32_t max_tokens; /* that a step may give */

    struct bt_wreqs reqs;
    uint32_t *free_slots, n_free_slots;
    struct bt_page_pool *pages;
    struct bt_list kept_prompts; /* decode/fork.c: leads' rows that keep pages, oldest first */
    struct bt_wslab *slab;       /* NULL while detached */
    struct bt_wputs puts;        /* writeback.c */
    struct bt_wleases leases;    /* lease.c */
    struct bt_batch batch;
    struct bt_wreq **seq_reqs; /* [max_slots]: whose batch.seqs are */
    struct bt_wstep step;
    struct bt_wmasks masks; /* mask.c */
    struct bt_wtickets tickets;
    struct bt_engine_block *blocks; /* [blocks of the longest prompt + 1]: scratch for flow_add */
    struct bt_wtokens_out tokens;
    struct bt_wspeed speed;
    struct bt_wspec spec;
    bool fatal, stop;
    _Atomic bool exited; /* the thread has returned; nothing comes any more */
};

/* ---- engine_thread.c ---- */
/* Thread entry: opens the engine, then runs steps until BT_WCMD_STOP. arg: struct bt_wcore. */
void *bt_wcore_thread(void *arg);
/* Sends to the control thread; waits when its ring is full (it never waits for us). */
void bt_wcore_emit(struct bt_wcore *c, const struct bt_wout *o);
/* Takes finished tickets, waiting at most timeout_us, and acts on them; returns their number. */
uint32_t bt_wcore_poll(struct bt_wcore *c, uint32_t timeout_us);
/* Records the purpose of a ticket: kind and ptr as in struct bt_wticket. */
void bt_wcore_ticket(struct bt_wcore *c, bt_engine_ticket_t t, int kind, void *ptr);
/* The engine's memory or device has failed: ends all requests and the worker. */
void bt_wcore_fatal(struct bt_wcore *c, bt_status_t st, const char *what);

/* ---- step.c ---- */
/* Plans and launches a step if there is something to compute; false if not. */
bool bt_wcore_launch(struct bt_wcore *c);
/* How many requests generate now (stage ROW). */
uint32_t bt_wcore_rows(const struct bt_wcore *c);
/* A ticket of the step (BT_WT_FORWARD, BT_WT_SAMPLE) is finished; one of another step is ignored.
 */
void bt_wcore_step_event(struct bt_wcore *c, int kind, const struct bt_engine_event *ev);
/* Does the step keep this ticket? Then it releases it itself. */
bool bt_wcore_step_holds(struct bt_wcore *c, bt_engine_ticket_t forward);

/* ---- calibration.c ---- */
/* A rough cost, from the size of the model and the kind of device. */
void bt_wcost_prior(struct bt_wcore *c);
/* Runs short steps of the usual shapes until calibrate_ms have passed. They warm the engine up and
 * give the fit first data. Before anything is submitted; it leaves no state. */
void bt_wcost_calibrate(struct bt_wcore *c);

/* ---- draft_engine.c ---- */
/* Opens the draft model in dir beside the engine, which is open. ERR_MISMATCH: their tokens differ;
 * ERR_UNSUPPORTED: the engine takes no drafts. */
bt_status_t bt_wdraft_open(struct bt_wcore *c, const char *dir, char *err,
                           size_t err_cap) BT_MUST_CHECK;
void bt_wdraft_close(struct bt_wcore *c);

/* ---- load_report.c ---- */
/* A step is over: its duration goes into the fit of their cost. */
void bt_wcost_measure(struct bt_wcore *c);
/* For the next heartbeats. */
void bt_wload_publish(struct bt_wcore *c);

/* ---- tokens.c ---- */
/* Is there a buffer for a step's tokens? The control thread keeps the buffers while a conductor
 * does not take its messages. Then no step is launched, and a wake-up through the ring says when to
 * try again. */
bool bt_wcore_may_step(const struct bt_wcore *c);
/* A step is over: takes a free buffer for its tokens. */
void bt_wcore_take_buffer(struct bt_wcore *c);
/* Sends the buffer to the control thread, then the messages that bt_wcore_emit_after held back. */
void bt_wcore_flush_tokens(struct bt_wcore *c);
/* Sends o to the control thread once the tokens of the step being finished have gone out. */
void bt_wcore_emit_after(struct bt_wcore *c, const struct bt_wout *o);
/* Does a sequence end with this token, the len-th that is known of it, and how? The only place that
 * decides it. The conductor ends a choice earlier at a stop string. */
Baton__Finish bt_submission_finish(const struct bt_submission *s, uint32_t len, uint32_t token);
/* Appends the sampled token to r, reports it to its conductor, and decides whether r is finished
 * (the answer is in r->finish). false: the token is not usable, r is ending. */
bool bt_wcore_token(struct bt_wcore *c, struct bt_wreq *r, const struct bt_engine_out *out);

/* ---- admission.c ---- */
/* Starts queued requests as far as slots and pages go. */
void bt_wcore_admit(struct bt_wcore *c);

/* ---- core.c: requests ---- */
/* Returns whether a's class is lower than that of `than`, so that `than` goes first even if it came
 * later. */
bool bt_wreq_lower_class(const struct bt_wreq *a, const struct bt_wreq *than);
/* Returns whether r's end has begun. */
bool bt_wreq_ending(const struct bt_wreq *r);
/* From the queue to the active ones, as LOADING: r has a slot and pages now. */
void bt_wcore_activate(struct bt_wcore *c, struct bt_wreq *r);
/* Takes a lead with its choices. */
void bt_wcore_submit(struct bt_wcore *c, struct bt_wreq *r);
/* Into the queue for a slot and pages, by order; later, if its grammar is still being compiled. */
void bt_wcore_enqueue(struct bt_wcore *c, struct bt_wreq *r);
/* Ends r: closes slot and flows, waits until they are quiet, returns pages, closes the grant. With
 * OK this choice alone, otherwise all of the submission. The last one to be quiet reports
 * Ended(status, detail). Does nothing if r is ending already. */
void bt_wcore_end(struct bt_wcore *c, struct bt_wreq *r, bt_status_t st, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* Ends this choice: the conductor wants no more of it. The others of its submission go on. */
void bt_wcore_end_choice(struct bt_wcore *c, struct bt_wreq *r);
/* Takes the slot and pages of the row r away. Once they are quiet r is queued again in the decode
 * role, as resumed. */
void bt_wcore_requeue(struct bt_wcore *c, struct bt_wreq *r);
/* Opens r's sequence in the engine: slot, parameters, known tokens, pages. */
bt_status_t bt_wcore_slot_open(struct bt_wcore *c, struct bt_wreq *r) BT_MUST_CHECK;
/* Closes a flow of r (pointer to load_flow or store_flow); quiet() follows. */
void bt_wcore_flow_close(struct bt_wcore *c, struct bt_wreq *r, uint32_t *flow, bool abort);
/* r was draining and no longer needs its pages; r may be freed by this call. */
void bt_wcore_drained(struct bt_wcore *c, struct bt_wreq *r);
/* The control thread has dropped the lead r from its tables: it is freed, when it has drained. */
void bt_wcore_forget(struct bt_wcore *c, struct bt_wreq *r);
/* Called after the step that a request to be ended was part of. */
void bt_wcore_close_doomed(struct bt_wcore *c, struct bt_wreq *r);
/* r's slot, or one of its flows, is quiet: the ticket of closing it was polled. */
void bt_wcore_slot_ticket(struct bt_wcore *c, struct bt_wreq *r);
void bt_wcore_flow_ticket(struct bt_wcore *c, struct bt_wreq *r);

#endif
