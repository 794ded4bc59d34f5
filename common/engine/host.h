/* Shared by back ends: sequence slots, tickets, the state of flows between pages and slab. Back
 * ends with KV pages in host memory (cpu, null) use all of it. They copy inside the calls, so
 * nothing touches a page or a byte of the slab after the call that reports the copy. cuda makes its
 * own copies, on streams (cuda/copy.c). The engine's owner thread owns everything. */
#ifndef BT_ENGINE_HOST_H
#define BT_ENGINE_HOST_H

#include "common/base/base.h"
#include "common/base/list.h"
#include "common/engine/engine.h"
#include "common/engine/ids.h"
#include "common/engine/pace.h"
#include "common/engine/sampler.h"

struct bt_host_slot {
    bool open;
    struct bt_engine_params params; /* bias_ids and bias are own copies */
    uint32_t *tokens;               /* [max_model_len] known so far */
    uint32_t n_tokens, n_prompt;
    uint32_t next_pos; /* after the last token that was run */
    uint32_t *pages;   /* [max_model_len / page_tokens] page + 1; 0: not told */
    /* Contrastive search: hidden states of the first n_hidden tokens, of length 1. */
    float *hidden; /* [params.hidden_max][host.hidden], or NULL */
    uint32_t n_hidden;
    /* MTP: hidden states of the last tokens that ran, of those from position state_pos on. */
    float *states; /* [cap_states][host.hidden] */
    uint32_t state_pos, n_states, cap_states;
};

/* Slots behind max_slots and pages behind info.pages. Only the back end knows them: it runs the
 * candidates of a contrastive search there. */
#define BT_HOST_SPARE BT_ENGINE_CANDIDATES

struct bt_host_sample { /* a token that the sample of a forward will choose */
    uint32_t slot, pos; /* pos: of the token to be chosen */
    uint32_t row;       /* of the forward's logits */
    uint32_t early;     /* row of its early logits; BT_HOST_NO_EARLY: its slot has no DoLa */
    uint32_t draft; /* if this is chosen, the next of the list follows; BT_HOST_NO_DRAFT: the last
                       of its row */
};
#define BT_HOST_NO_DRAFT UINT32_MAX
#define BT_HOST_NO_EARLY UINT32_MAX

struct bt_host_ticket {
    struct bt_list link; /* in done, waiting, given (delivered, not released) or free */
    bt_engine_ticket_t id;
    bt_status_t status;
    float run_us;
    uint32_t n_out;
    struct bt_engine_out *out; /* [cap_out] */
    uint32_t cap_out;
    float *logits; /* forward: [n_rows][vocab] */
    size_t cap_logits;
    float *early; /* forward: [n_early][vocab], by the layers that DoLa has chosen */
    uint32_t n_early;
    size_t cap_early;
    struct bt_host_sample *samples;        /* forward: of the SAMPLE rows, then of their forks */
    uint32_t n_rows, n_sample, cap_sample; /* n_rows: rows of logits, one a sampled position */
    bool forward, sampled;
    uint32_t flow, seq; /* waits until flow's items below seq are done; flow 0: no */
    bool close_flow;    /* the flow ends with this ticket */
};

struct bt_host_flow {
    bool used, closing;
    int dir;
    bt_flow_word_t *word;
    uint32_t epoch;
    void (*bell)(void *);
    void *bell_arg;
    struct bt_engine_block *blocks; /* rising seq; those before `first` are finished */
    uint32_t n, first, cap;
    uint32_t done; /* items below are copied (cuda: given to the copy stream) */
};

/* Longest wait of a step for items that it needs. The loader has ended or failed long before. */
#define BT_HOST_WAIT_NS 30000000000ull

struct bt_host {
    struct bt_engine_info info;
    uint8_t *kv; /* [layer][page] segments */
    size_t kv_bytes;
    uint32_t max_pages_of_slot;
    uint32_t hidden;            /* values that a slot's hidden state has; 0: slots keep none here */
    struct bt_host_slot *slots; /* [max_slots + BT_HOST_SPARE] */
    struct bt_host_flow *flows; /* [n_flows]; index + 1 is the number */
    uint32_t n_flows;
    bt_engine_ticket_t next_ticket;
    struct bt_list done, waiting, given, free;
    struct bt_sampler *sampler;
    struct bt_ids ids;   /* which may be drawn; bt_ids_load fills it when an engine opens */
    struct bt_pace pace; /* of forward; the back end calls bt_pace_wait */
};

/* The caller fills info. It may leave pages at 0, which means as many as mem_limit bytes allow.
 * ERR_NO_MEMORY if the pages cannot be mapped; err says how many bytes. */
bt_status_t bt_host_init(struct bt_host *h, const struct bt_engine_info *info, uint64_t mem_limit,
                         char *err, size_t err_cap) BT_MUST_CHECK;
/* Also for a zeroed host, which bt_host_init has not filled. */
void bt_host_cleanup(struct bt_host *h);

/* A layer's segment of a page. */
static inline uint8_t *bt_host_segment(const struct bt_host *h, uint32_t layer, uint32_t page)
{
    return h->kv + ((size_t)layer * (h->info.pages + BT_HOST_SPARE) + page) *
                       h->info.layout.groups[0].seg_bytes;
}

/* Checks a batch whole before anything is run; *n_tokens_p and *n_sample_p are its totals. */
bt_status_t bt_host_check_batch(const struct bt_host *h, const struct bt_engine_batch *b,
                                uint32_t *n_tokens_p, uint32_t *n_sample_p) BT_MUST_CHECK;
/* First position of a row, BT_ENGINE_POS_NEXT resolved. */
uint32_t bt_host_row_pos(const struct bt_host *h, const struct bt_engine_row *r);

/* How many prompt tokens a checked row reports: those behind its first so many tokens. */
uint32_t bt_host_row_prompt_outs(const struct bt_host *h, const struct bt_engine_row *r);
/* Reports the prompt token at `pos` of `slot` by the logits of the token before it. Any thread. */
void bt_host_prompt_out(const struct bt_host *h, uint32_t slot, uint32_t pos, const float *logits,
                        struct bt_engine_out *out);

/* State of a flow, for the code that copies. The open flow of that number; NULL: there is none. */
struct bt_host_flow *bt_host_flow_of(const struct bt_host *h, uint32_t flow);
/* The lowest item that still has bytes to copy; UINT32_MAX: none. */
uint32_t bt_host_flow_next(const struct bt_host_flow *f);
/* Returns whether all items below seq that exist are copied. */
bool bt_host_flow_passed(const struct bt_host_flow *f, uint32_t seq);
/* How far a LOAD flow may go now: to its word, or to the end of the added items. */
uint32_t bt_host_flow_loadable(const struct bt_host *h, const struct bt_host_flow *f);
/* Items below `end` are copied; those from `end` on remain. */
void bt_host_flow_done(const struct bt_host *h, struct bt_host_flow *f, uint32_t end);
/* The number of the flow may be reused; the memory of its blocks is kept. */
void bt_host_flow_free(struct bt_host_flow *f);

/* Layer `layer` begins: waits for the LOAD items of the batch's rows. ERR_TIMEOUT after 30 s. */
bt_status_t bt_host_layer_wait(struct bt_host *h, const struct bt_engine_batch *b,
                               uint32_t layer) BT_MUST_CHECK;
/* Layer `layer` is done: copies the STORE items that the rows fire. */
void bt_host_layer_fire(struct bt_host *h, const struct bt_engine_batch *b, uint32_t layer);
/* The step is done: fires the items that had to wait for other rows, advances next_pos. */
void bt_host_step_end(struct bt_host *h, const struct bt_engine_batch *b);

/* A ticket with room for cap_logits floats of logits; finished with bt_host_ticket_done. */
struct bt_host_ticket *bt_host_ticket_new(struct bt_host *h, size_t cap_logits);
/* Adds a token that the sample of this forward chooses. */
void bt_host_ticket_sample(struct bt_host_ticket *t, const struct bt_host_sample *s);
/* Adds those of the SAMPLE row r, whose logits are the ticket's next rows, and counts the rows.
 * With DoLa its early logits are the next row of those. */
void bt_host_ticket_sample_row(const struct bt_host *h, struct bt_host_ticket *t,
                               const struct bt_engine_row *r);
/* Room for the early logits of all its samples. */
void bt_host_ticket_early(const struct bt_host *h, struct bt_host_ticket *t);
void bt_host_ticket_outs(struct bt_host_ticket *t, uint32_t n); /* n_out = n, with room in out */
/* Finished with this status: bt_host_poll tells it. t stays the host's. */
void bt_host_ticket_done(struct bt_host *h, struct bt_host_ticket *t, bt_status_t status);

/* The calls of the vtable that all back ends have in common; engine.h documents them. */
bt_status_t bt_host_slot_open(struct bt_host *h, uint32_t slot, const struct bt_engine_params *p,
                              const uint32_t *tokens, uint32_t n, uint32_t n_prompt);
/* Takes slot_open back, because the back end has no memory for the slot. */
void bt_host_slot_undo(struct bt_host *h, uint32_t slot);
bt_status_t bt_host_slot_pages(struct bt_host *h, uint32_t slot, uint32_t first,
                               const uint32_t *pages, uint32_t n);
bt_status_t bt_host_slot_fork(struct bt_host *h, uint32_t from, uint32_t to, uint32_t choice);
bt_status_t bt_host_page_copy(struct bt_host *h, uint32_t from, uint32_t to, uint32_t toks);
bt_status_t bt_host_slot_accept(struct bt_host *h, uint32_t slot, uint32_t token);
bt_status_t bt_host_slot_close(struct bt_host *h, uint32_t slot, bt_engine_ticket_t *quiet_p);
bt_status_t bt_host_flow_open(struct bt_host *h, int dir, bt_flow_word_t *word, uint32_t epoch,
                              void (*bell)(void *), void *bell_arg, uint32_t *flow_p);
bt_status_t bt_host_flow_add(struct bt_host *h, uint32_t flow, const struct bt_engine_block *b,
                             uint32_t n);
bt_status_t bt_host_flow_release(struct bt_host *h, uint32_t flow, uint32_t seq,
                                 bt_engine_ticket_t *done_p);
bt_status_t bt_host_flow_close(struct bt_host *h, uint32_t flow, bool abort,
                               bt_engine_ticket_t *quiet_p);
/* Writes for each of n tokens that may follow at `pos` of `slot` the largest cosine of its hidden
 * state with one of the tokens before. ERR_DEVICE, ERR_NO_MEMORY. */
typedef bt_status_t (*bt_host_cosines_fn)(void *arg, uint32_t slot, uint32_t pos,
                                          const uint32_t *tokens, uint32_t n, float *cosines);
/* cosines: for slots with contrastive search; NULL if none can be opened. */
bt_status_t bt_host_sample(struct bt_host *h, bt_engine_ticket_t fwd, const uint32_t *mask,
                           bt_host_cosines_fn cosines, void *arg, bt_engine_ticket_t *out_p);
/* The hidden state of the token at `pos` of `slot`; NULL: it is not kept. */
const float *bt_host_state(const struct bt_host *h, uint32_t slot, uint32_t pos);
/* Keeps those of n tokens from `pos` on, [n][hidden], in place of others, together with the one
 * before them, if it was kept. */
void bt_host_keep_states(struct bt_host *h, uint32_t slot, uint32_t pos, const float *states,
                         uint32_t n);
/* Draws a draft of `slot` by logits [vocab], which are changed, and adds it to the slot's tokens.
 */
void bt_host_draft(struct bt_host *h, uint32_t slot, float *logits, struct bt_engine_out *out);
/* Takes the last n tokens, which were drafts, away again. */
void bt_host_undraft(struct bt_host *h, uint32_t slot, uint32_t n);
/* Lets spare slot i stand at position `pos` of `slot`: it has the same pages, except a copy of the
 * page of pos. */
void bt_host_spare(struct bt_host *h, uint32_t i, uint32_t slot, uint32_t pos);
/* The same with a draw of the back end's own: fills *out, whose slot and pos are set; bad was set
 * to false. */
typedef void (*bt_host_draw_fn)(void *arg, const struct bt_host_ticket *f,
                                const struct bt_host_sample *want, struct bt_engine_out *out);
bt_status_t bt_host_sample_by(struct bt_host *h, bt_engine_ticket_t fwd, bt_host_draw_fn draw,
                              void *arg, bt_engine_ticket_t *out_p);
uint32_t bt_host_poll(struct bt_host *h, struct bt_engine_event *ev, uint32_t max,
                      uint32_t timeout_us);
void bt_host_release(struct bt_host *h, bt_engine_ticket_t ticket);

#endif
