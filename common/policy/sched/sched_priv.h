/* Inside sched/: the state of one placement, the predictions (cost.c), and the rules that make the
 * difference between policies (policies.c). */
#ifndef BT_POLICY_SCHED_PRIV_H
#define BT_POLICY_SCHED_PRIV_H

#include "common/policy/sched/sched.h"

struct bt_sched_job;

/* The times that are expected for a request at one prefill worker. */
struct bt_sched_estimate {
    double cost; /* by the rule; the smallest wins */
    double ttft_ms, prefill_ms;
    double wait_ms, queue_ms; /* wait for its turn; queue_ms: only for prompts beside rows */
    double beside_ms;         /* part of ttft_ms that other prompts add to its steps */
    uint32_t cached_tokens;   /* includes fetched tokens */
    uint32_t fetch_from, fetch_tokens;
    uint32_t prefix_tokens; /* end of the fetched tokens: cached_tokens, or the end of a tail */
    double local_ms;        /* prefill_ms without the fetch */
    bool beside;            /* prefill_ms is beside a decode worker's rows */
};

struct bt_sched_rule {
    const char *name;
    bool use_cache; /* considers where blocks are */
    bool fetch;     /* may have blocks moved */
    bool mixed;     /* a decode worker may compute a prompt beside its rows */
    bool queue;     /* a prefill worker never costs less than its queue */
    /* ordinal: number of the worker among those of its role */
    void (*prefill)(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal, uint32_t decode,
                    struct bt_sched_estimate *e);
    double (*decode)(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal);
};

/* The state of one placement, shared by its steps. */
struct bt_sched_job {
    const struct bt_sched_params *c;
    const struct bt_sched_snapshot *s;
    const struct bt_sched_request *req;
    const struct bt_sched_rule *rule;
    bool allow_draining;
    bool late; /* the request was refused and is served late: it must delay no request that is in
                  time */
    bool beyond_slab;                     /* no slab holds the prompt: one worker does both */
    bool no_prefill_role, no_decode_role; /* no worker has this role: the others do both */
    uint32_t n_prefill, n_decode;         /* workers of each role */
    double least_queue_ms;                /* the shortest queue of a prefill worker */
    uint32_t places_short; /* rows expected on each decode worker, if their slots will probably not
                              suffice; 0: they will */
    bool packing;          /* rows go to few decode workers */
    uint32_t best_kv, best_tokens; /* rules that fetch: the longest match, and its kvstore */
    uint32_t spread_tokens;        /* what several holders have together, if that is longer */
};

/* A queue up to this length is a burst: it has no price, and rows stay packed. The present demand
 * is measured over at least this time. Without a TTFT objective, a worker with such a queue is at
 * its limit. */
#define BT_SCHED_BURST_MS 1000.0

/* Decode workers have a price only when they are expected to be fuller than this. */
#define BT_SCHED_DECODE_FREE 0.7

/* The mean load of the decode workers. */
struct bt_sched_pool {
    double rows, kv; /* kv: tokens of context */
    /* the present ones: which of them will be left at the end of the prefill is not known */
    double yield_rows, yield_pages;
    double rows_dev, kv_dev; /* standard deviations of rows and kv */
};

/* A choice among candidates: the smallest cost wins; the request's random word decides between
 * equal ones. */
struct bt_sched_pick {
    uint32_t best;
    double cost;
    uint32_t ties;
};
void bt_sched_pick_offer(struct bt_sched_pick *p, uint32_t index, double cost, uint64_t random);
uint64_t bt_sched_mix(uint64_t x);

/* ---- predictions: ms, tokens, shares ---- */
uint32_t bt_sched_blocks_of(const struct bt_sched_request *req);
/* Tokens that need not be computed on a node that has the first `blocks` of the request. */
uint32_t bt_sched_usable(const struct bt_sched_request *req, uint32_t blocks);
/* Tokens of the request that need not be computed at kvstore kv (index or NONE). */
uint32_t bt_sched_cached_at(const struct bt_sched_snapshot *s, uint32_t kv,
                            const struct bt_sched_request *req);
double bt_sched_queue_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w);
/* The shortest possible wait of a prompt, whatever part of it must be computed. */
double bt_sched_least_wait_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w);
/* Time until the first step with tokens [from, to) of a prompt begins: the worker's queue, or less
 * if they share a step with other prompts (bt_batch_prefill). *beside_p: what those add to its
 * steps. */
double bt_sched_wait_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                        uint32_t from, uint32_t to, double *beside_p);
/* The time to compute a prompt of n tokens whose first `cached` tokens are in the slab of the
 * worker's node. */
double bt_sched_prefill_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                           const struct bt_sched_request *req, uint32_t n, uint32_t cached);
/* The time to compute the whole request alone, whatever role w has. */
double bt_sched_compute_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                           const struct bt_sched_request *req, uint32_t cached);
/* The expected rows of w and their context after t_ms. Present rows end at the rate of their mean
 * life. Rows on their way come one by one within over_ms (at least t_ms) and end at the same rate;
 * their context is that of the others, or `tokens`. */
void bt_sched_rows_after(const struct bt_sched_snapshot *s, const struct bt_sched_worker *w,
                         uint32_t tokens, double t_ms, double over_ms, double *rows_p,
                         double *kv_p);
/* The expected load of a decode worker after t_ms, if rows take `slow` times as long as predicted.
 * Late rows on their way do not count, because they are preempted for others. False: there is no
 * forecast, or no decode worker. */
bool bt_sched_pool_after(const struct bt_sched_snapshot *s, uint32_t block_tokens, double t_ms,
                         double slow, struct bt_sched_pool *pool_p);
/* The time in which decode worker w computes the prompt's tokens from `cached` on beside its rows,
 * in steps of mixed.step_ms. *queue_p: the time of the prompts that it already has. over_ms: as
 * above. w has a cost model. < 0: its steps or pages have no room. */
double bt_sched_mixed_ms(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                         const struct bt_sched_worker *w, const struct bt_sched_request *req,
                         uint32_t cached, double over_ms, double *queue_p);
/* Of decode worker w: the longest step with prompts beside rows, and the longest such step together
 * with the wait of a row that joins it. <= 0: it takes no prompts; there is no such limit. */
static inline double bt_sched_mixed_step(const struct bt_sched_params *c,
                                         const struct bt_sched_worker *w)
{
    return w->speed.mixed_step_ms != 0 ? w->speed.mixed_step_ms : c->mixed.step_ms;
}
static inline double bt_sched_mixed_gap(const struct bt_sched_params *c,
                                        const struct bt_sched_worker *w)
{
    return w->speed.mixed_step_ms != 0 ? w->speed.mixed_gap_ms : c->mixed.gap_ms;
}
/* The time to move tokens from kvstore `from` to `to`, at the link's measured rate. from
 * BT_SCHED_NONE: not known yet; the fastest measured link to `to` counts. */
double bt_sched_move_ms(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                        const struct bt_sched_request *req, uint32_t from, uint32_t to,
                        uint32_t tokens);
/* The part of the hand-off's time that the prefill does not hide. */
double bt_sched_handoff_ms(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                           const struct bt_sched_request *req, uint32_t from, uint32_t to,
                           double prefill_ms);
/* Share of decode worker w in use with this request; above 1 the request has to wait. */
double bt_sched_decode_load(const struct bt_sched_worker *w, const struct bt_sched_request *req);
/* The mean number of tokens that each of the request's rows will generate. */
double bt_sched_answer(const struct bt_sched_request *req);
/* What the request's rows take from decode worker w: the larger share of its pages or slots, in
 * percent, times their tokens. Tokens and not time, so that a request takes the same amount
 * whatever the present steps are. */
double bt_sched_decode_work(const struct bt_sched_worker *w, const struct bt_sched_request *req);
/* The step with this request's rows in it; longer if there are more rows than slots. */
double bt_sched_step_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                        const struct bt_sched_request *req);
/* The step that the rows will have when their prompt is computed, in t_ms: some present rows have
 * ended by then, and rows on their way have come. If no life of rows is known, or there are more
 * rows than slots: bt_sched_step_ms. */
double bt_sched_step_then_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                             const struct bt_sched_request *req, double t_ms);
/* The TBT in the present steps, with the learned tail of gaps. */
double bt_sched_tbt_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                       const struct bt_sched_request *req);

/* The longest time between tokens that admission allows, of this objective. */
static inline double bt_sched_tbt_limit(const struct bt_sched_params *c, double objective_ms)
{
    return objective_ms * (c->objective.tbt_margin > 0 ? c->objective.tbt_margin : 1);
}
/* How long a late row may make the steps of decode worker w, ms. 0: no limit, because even the step
 * of a single row is longer than the objective. */
double bt_sched_late_tbt_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w);

/* bt_sched_pressure of decode worker `decode` after t_ms: with the rows expected then (late ones
 * too) and those of req, spread evenly over all decode workers; without a forecast, with the
 * present rows. The TBT objective does not count if less than one other row is expected. */
double bt_sched_pressure_then(const struct bt_sched_params *params,
                              const struct bt_sched_snapshot *s, uint32_t decode,
                              const struct bt_sched_request *req, double t_ms);

/* ---- a prompt beside a decode worker's rows ---- */
/* Fills j for a rule that computes prompts beside rows; the request's row is at worker decode.
 * False: no worker is up. */
bool bt_sched_survey_mixed(struct bt_sched_job *j, uint32_t decode);
/* The times that are expected if decode worker i computes the prompt. Returns false if its rows
 * would miss their objective, or if its cost is not known. */
bool bt_sched_estimate_mixed(const struct bt_sched_job *j, uint32_t i, struct bt_sched_estimate *e);

/* ---- packing: pack.c ---- */
/* Returns whether rows are packed now. */
bool bt_sched_packs(const struct bt_sched_job *j);
/* Returns whether decode worker w has no rows and none on their way to it. */
bool bt_sched_row_free(const struct bt_sched_worker *w);
/* The cost of decode worker i while rows are packed. load: its share in use with this request when
 * the row comes. */
double bt_sched_packed_cost(const struct bt_sched_job *j, uint32_t i, double load);

/* Should decode worker m, which has computed the prompt in ready_ms, hand it over to d, where its
 * row would be packed? No if rows are spread, or if the links are busy for longer. */
bool bt_sched_hands_over(const struct bt_sched_job *j, uint32_t m, uint32_t d, double ready_ms);

/* Returns whether worker i and its kvstore are up, and its node is not drained (or that is
 * allowed). */
bool bt_sched_present(const struct bt_sched_job *j, uint32_t i);
/* Returns whether this worker could ever hold the request. */
bool bt_sched_fits(const struct bt_sched_worker *w, const struct bt_sched_request *req);
/* ... and whether its kvstore could hold all of its KV at once, as a hand-off needs. */
bool bt_sched_fits_slab(const struct bt_sched_snapshot *s, const struct bt_sched_worker *w,
                        const struct bt_sched_request *req);
/* Placement by a rule. */
bt_sched_verdict_t bt_sched_place(const struct bt_sched_params *c,
                                  const struct bt_sched_snapshot *s,
                                  const struct bt_sched_request *req,
                                  const struct bt_sched_rule *rule, struct bt_sched_plan *plan_p,
                                  struct bt_sched_reject *reject_p);
/* Placement of a late request, which delays no request that is in time; else BT_SCHED_OVERLOADED.
 */
bt_sched_verdict_t
bt_sched_place_late(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                    const struct bt_sched_request *req, const struct bt_sched_rule *rule,
                    struct bt_sched_plan *plan_p, struct bt_sched_reject *reject_p);
bt_sched_verdict_t bt_sched_refuse(struct bt_sched_reject *r, bt_sched_verdict_t v,
                                   uint32_t after_s, const char *why);

#endif
