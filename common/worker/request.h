/* A request inside a worker: what was asked for (immutable), the control thread's part and the
 * engine thread's part. Made and checked by the control thread (submit.c), then the engine
 * thread's until BT_WCMD_FORGET. */
#ifndef BT_WORKER_REQUEST_H
#define BT_WORKER_REQUEST_H

#include "common/base/list.h"
#include "common/engine/engine.h"
#include "common/kv/key.h"
#include "common/search/beam.h"
#include "common/spec/spec.h"
#include "common/worker/grant.h"
#include "common/worker/lease.h"
#include "common/worker/mask.h"
#include "common/worker/worker.h"
#include "common/worker/writeback.h"
#include "session.pb-c.h"

#define BT_WORKER_DETAIL  192 /* bytes of an Ended's detail */
#define BT_WORKER_NO_SLOT UINT32_MAX
#define BT_WORKER_CHOICES BT_ENGINE_CHOICES_MAX /* most of a submission */

typedef enum {
    BT_WREQ_OPENING,    /* LocalOpen sent */
    BT_WREQ_LANDING,    /* reader: waits for the trailer */
    BT_WREQ_FORKING,    /* a further choice: waits for its lead's prompt */
    BT_WREQ_QUEUED,     /* waits for a slot and pages */
    BT_WREQ_LOADING,    /* the engine copies slab -> pages */
    BT_WREQ_PROMPT,     /* known tokens are being computed, in chunks */
    BT_WREQ_ROW,        /* generates: one token a step */
    BT_WREQ_PREEMPTING, /* its pages are being taken away; then QUEUED again (reload.c) */
    BT_WREQ_CLOSING,    /* waits for quiet */
    BT_WREQ_ENDED       /* Ended reported; freed by BT_WCMD_FORGET */
} bt_wreq_stage_t;

/* What a conductor has asked for: the content of its Submit, checked (submit.c). Immutable. */
struct bt_submission {
    uint64_t request, session; /* session: number of the conductor's session */
    uint32_t epoch, choice;
    Baton__Phases phases;
    uint64_t deadline_ns; /* bt_mono_ns; 0: none */
    uint64_t arrived_ns;  /* bt_mono_ns */
    uint32_t n, n_prompt; /* submitted tokens; how many of them are prompt */
    uint32_t max_new;
    uint32_t len_max; /* tokens known when it ends by length */
    bool no_cache;
    bool prompt_logprobs; /* of every prompt token: nothing is read from the cache */
    uint32_t prompt_top;
    int32_t logprobs; /* asked for; params.logprobs serves prompt_top as well */
    uint32_t tenant;  /* tag whose blocks the answer's blocks are */
    int32_t
        priority; /* class: the smaller number goes first, and takes pages and slots from others */
    bt_spec_kind_t speculation;
    bool late; /* it may delay no other request: a class of its own behind all others */
    struct bt_kv_key root;
    struct bt_engine_params params; /* bias arrays: in the lead's allocation */
    uint32_t n_prediction;
    uint32_t *prediction;        /* [n_prediction], the lead's; tokens that drafts come from */
    struct bt_wgrammar *grammar; /* the lead has the reference; NULL: the answer is free */
    bool search;                 /* a beam search: the prompt's end gives no token. Its answers
                                    are `choice` and the next ones; there is only the lead */
    struct bt_beam_conf beams;   /* of a search; width 0 where only its prompt is computed */
    uint32_t n_slots;            /* that it needs: one, or one for each beam */
    uint64_t attach;             /* attachment that its LocalOpen went to */
};

/* Hidden states that all contrastive searches of a worker may keep. */
#define BT_WORKER_HIDDEN_BYTES (512ull << 20)
/* What s keeps of that, at its longest; 0: it is no contrastive search. */
static inline uint64_t bt_submission_hidden(const struct bt_submission *s,
                                            const struct bt_engine_info *info)
{
    return s->params.penalty_alpha > 0 ? (uint64_t)s->len_max * info->hidden_bytes : 0;
}

/* The control thread's part of a lead: what the kvstore and the conductor have said of it already.
 */
struct bt_wreq_ctl {
    struct bt_list link; /* in its bt_wknown */
    bool cancel_sent, opened_seen, trailer_seen, revoke_seen;
};

/* A lead's: its submission as a whole. */
struct bt_wreq_group {
    uint32_t n_left;    /* choices that have not ended */
    uint32_t n_holding; /* choices that hold a slot and pages */
    bt_status_t status; /* the first that is not OK */
    char detail[BT_WORKER_DETAIL];
};

/* One choice of a submission. The first one, the lead, has the grant and the prompt; the others are
 * forked from it once the prompt's KV is in its pages (decode/fork.c). The control thread knows
 * leads only. */
struct bt_wreq {
    const struct bt_submission *sub;
    struct bt_wreq *lead;        /* of its submission; the lead's is itself */
    struct bt_wreq *next_choice; /* freed with the lead */
    struct bt_wreq_ctl ctl;      /* written by the control thread; the rest by the engine thread */

    struct bt_prompt *prompt;   /* written by prefill/ only */
    struct bt_row *row;         /* written by decode/ only */
    struct bt_wreq_grant grant; /* grant.c */
    struct bt_wreq_lease lease; /* lease.c */
    struct bt_wreq_wback wback; /* writeback.c */
    struct bt_wreq_group group; /* core.c, admission.c */
    struct bt_wmatch match;     /* mask.c; the matcher: mask_make.c */

    /* the sequence: core.c, admission.c and step.c, between two calls the role */
    struct bt_list link; /* queue, or active by rising order */
    const struct bt_role_ops *role;
    bt_wreq_stage_t stage;
    uint64_t order;    /* class, then arrival: smaller goes first everywhere */
    uint32_t len, pos; /* known tokens; next position to compute */
    uint32_t cached;   /* tokens whose KV was loaded and not computed */
    uint32_t slot, n_pages;
    uint32_t beam_pages;  /* of its beams, beside n_pages; one that they share counts for each */
    uint32_t *more_slots; /* [sub->n_slots - 1] of beams, held together with slot */
    uint32_t *tokens;     /* [len_max + 1] */
    uint32_t *pages;      /* [pages_max] */
    bool resumed;         /* preempted before: no grant, no flows but the one of a reload */
    bool oversized; /* a lead whose grant has only the beginning of its prompt: no slab holds it */
    bool in_step;
    uint32_t load_flow, store_flow;     /* 0: none open */
    uint64_t start_ns, last_compute_ns; /* wall clock */
    Baton__Finish finish;

    /* its end: core.c */
    bt_status_t end_status;
    bool doomed;      /* ends once it is in no step */
    bool leaving;     /* a lead that was cancelled: ends once its other choices have the prompt */
    bool draining;    /* ended; its pages are kept for blocks still to be offered */
    bool forgotten;   /* draining: is freed afterwards */
    uint32_t pending; /* tickets of its slot and flows not yet polled */
    uint32_t flows_pending; /* of these: closed flows */
};

/* The first choice of s, the lead, for the engine of c, which is open: copies s, its bias arrays
 * and its tokens ([n] uint32_t at any address). The other fields are zero. */
struct bt_wreq *bt_wreq_alloc(const struct bt_wcore *c, const struct bt_submission *s,
                              const void *tokens);
/* Adds choice number `choice` to lead, which is not submitted yet. */
void bt_wreq_add_choice(const struct bt_wcore *c, struct bt_wreq *lead, uint32_t choice);
uint32_t bt_wreq_choices(const struct bt_wreq *lead);
/* Frees a lead with its choices. */
void bt_wreq_free(struct bt_wreq *lead);

#endif
