/* Inside sched/: what a placement works on, the predictions (cost.c) and the rules in which the
 * policies differ (policies.c). */
#ifndef BT_POLICY_SCHED_PRIV_H
#define BT_POLICY_SCHED_PRIV_H

#include "common/policy/sched/sched.h"

struct bt_sched_job;

/* What a request would meet at one prefill worker. */
struct bt_sched_estimate {
    double cost; /* the rule's: smaller wins */
    double ttft_ms, prefill_ms;
    double wait_ms, queue_ms; /* for its turn; queue_ms: mixed ones only */
    double beside_ms;         /* of ttft_ms: what others add to its steps */
    uint32_t cached_tokens;   /* with what is fetched */
    uint32_t fetch_from, fetch_tokens;
    uint32_t prefix_tokens; /* end of what is fetched: that of cached_tokens, or of a tail */
    double local_ms;        /* prefill_ms without the fetch */
    bool beside;            /* prefill_ms is beside a decode worker's rows */
};

struct bt_sched_rule {
    const char *name;
    bool use_cache; /* looks at where blocks are */
    bool fetch;     /* may have them moved */
    bool mixed;     /* a decode worker may compute a prompt beside its rows */
    bool queue;     /* a prefill worker never costs less than its queue */
    /* ordinal: number of the worker among those of its role */
    void (*prefill)(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal, uint32_t decode,
                    struct bt_sched_estimate *e);
    double (*decode)(const struct bt_sched_job *j, uint32_t i, uint32_t ordinal);
};

/* One placement; collected so that each step is a short function. */
struct bt_sched_job {
    const struct bt_sched_params *c;
    const struct bt_sched_snapshot *s;
    const struct bt_sched_request *req;
    const struct bt_sched_rule *rule;
    bool allow_draining;
    bool late; /* refused as it would be late: placed where it delays nobody who is in time */
    bool beyond_slab;                     /* no slab holds the prompt: one worker does both */
    bool no_prefill_role, no_decode_role; /* nobody has that role: the others do both */
    uint32_t n_prefill, n_decode;         /* workers of each role */
    double least_queue_ms;                /* of those that prefill */
    uint32_t places_short; /* rows that decode workers will hardly have places for; 0: they will */
    bool packing;          /* rows go to few decode workers */
    uint32_t best_kv, best_tokens; /* rules that fetch: the longest match, and where */
    uint32_t spread_tokens;        /* what several holders have together, if that is more */
};

/* A shorter queue is a burst: it has no price, rows are packed while prompts wait for no longer,
 * and the demand of now is taken over no less. */
#define BT_SCHED_BURST_MS 1000.0

/* Decode workers that are expected to be less full than this have no price. */
#define BT_SCHED_DECODE_FREE 0.7

/* A decode worker's load, the mean over all of them. */
struct bt_sched_pool {
    double rows, kv;                /* kv: tokens of context */
    double yield_rows, yield_pages; /* of now: who of them will be left, nobody knows */
    double rows_dev, kv_dev;        /* standard deviations of rows and kv */
};

/* A choice among candidates: smaller wins, equal ones are drawn by the request's random word. */
struct bt_sched_pick {
    uint32_t best;
    double cost;
    uint32_t ties;
};
void bt_sched_pick_offer(struct bt_sched_pick *p, uint32_t index, double cost, uint64_t random);
uint64_t bt_sched_mix(uint64_t x);

/* ---- predictions: ms, tokens, shares ---- */
uint32_t bt_sched_blocks_of(const struct bt_sched_request *req);
/* Tokens that need not be computed where the first `blocks` of the request are. */
uint32_t bt_sched_usable(const struct bt_sched_request *req, uint32_t blocks);
/* Tokens of the request that need not be computed at kvstore kv (index or NONE). */
uint32_t bt_sched_cached_at(const struct bt_sched_snapshot *s, uint32_t kv,
                            const struct bt_sched_request *req);
double bt_sched_queue_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w);
/* What a prompt waits for at least, whatever is to be computed of it. */
double bt_sched_least_wait_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w);
/* Until the first step of tokens [from, to) of a prompt begins there: its queue, or less where they
 * share a step with others (bt_batch_prefill); *beside_p: what those add to its steps. */
double bt_sched_wait_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                        uint32_t from, uint32_t to, double *beside_p);
/* Of n tokens the first `cached` are in the slab of the worker's node. */
double bt_sched_prefill_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                           const struct bt_sched_request *req, uint32_t n, uint32_t cached);
/* All of it, beside nothing else, whatever w's role is. */
double bt_sched_compute_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                           const struct bt_sched_request *req, uint32_t cached);
/* Rows of w and their context after t_ms: those of now thinned out as rows end, and those on their
 * way to it, which come one by one over over_ms (t_ms at least) and are thinned out too; their
 * context is that of the others, or `tokens`. */
void bt_sched_rows_after(const struct bt_sched_snapshot *s, const struct bt_sched_worker *w,
                         uint32_t tokens, double t_ms, double over_ms, double *rows_p,
                         double *kv_p);
/* What a decode worker is expected to have after t_ms, where rows take `slow` times as long as they
 * are said to. Late rows on their way are not in it: they make way. False: no forecast is kept, or
 * nobody decodes. */
bool bt_sched_pool_after(const struct bt_sched_snapshot *s, uint32_t block_tokens, double t_ms,
                         double slow, struct bt_sched_pool *pool_p);
/* The prompt's tokens from `cached` on, computed by decode worker w beside its rows, in steps of
 * mixed.step_ms; queue_p: the prompts that it has already; over_ms: as above. w has a cost.
 * < 0: there is no room beside its rows, in their steps or in its pages. */
double bt_sched_mixed_ms(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                         const struct bt_sched_worker *w, const struct bt_sched_request *req,
                         uint32_t cached, double over_ms, double *queue_p);
/* Steps with prompts beside rows at decode worker w: how long, and with what a row that joins has
 * waited. <= 0: it takes no prompts; no such bound. */
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
double bt_sched_move_ms(const struct bt_sched_params *c, const struct bt_sched_request *req,
                        uint32_t tokens);
/* From kvstore `from` to `to`, at the link's measured rate. */
double bt_sched_fetch_ms(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                         const struct bt_sched_request *req, uint32_t from, uint32_t to,
                         uint32_t tokens);
/* Time of the hand-off to the node of kvstore kv_d that the prefill does not hide. */
double bt_sched_handoff_ms(const struct bt_sched_params *c, const struct bt_sched_request *req,
                           uint32_t resident_there, double prefill_ms);
/* Share of a decode worker in use once it has this request too; above 1 it has to wait. */
double bt_sched_decode_load(const struct bt_sched_worker *w, const struct bt_sched_request *req);
/* Tokens that each of its rows will give out, in the mean. */
double bt_sched_answer(const struct bt_sched_request *req);
/* What its rows take of decode worker w: of its pages or places the larger share in percent, times
 * their tokens. Not times their time: the same request takes as much whatever the steps of now. */
double bt_sched_decode_work(const struct bt_sched_worker *w, const struct bt_sched_request *req);
/* The step with this request's rows in it, more where they have to take turns. */
double bt_sched_step_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                        const struct bt_sched_request *req);
/* The step that they will find there when their prompt is computed, in t_ms: rows of now have ended
 * by then or not, and those on their way come one by one until then and end too. Where nobody's
 * life is known, or more rows than places have to take turns, bt_sched_step_ms. */
double bt_sched_step_then_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                             const struct bt_sched_request *req, double t_ms);
/* The step of now with what requests have shown of the tail of their gaps there. */
double bt_sched_tbt_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w,
                       const struct bt_sched_request *req);

/* How long steps of decode worker w may become by a late row, ms. 0: as long as they like, because
 * already a step of a single row takes longer than the objective. */
double bt_sched_late_tbt_ms(const struct bt_sched_params *c, const struct bt_sched_worker *w);

/* bt_sched_pressure of decode worker `decode` with the rows that the pool is expected to have after
 * t_ms, late ones too, and those of req, spread evenly over its workers; without a forecast with
 * those of now. Where less than one other row is expected the TBT objective does not count. */
double bt_sched_pressure_then(const struct bt_sched_params *params,
                              const struct bt_sched_snapshot *s, uint32_t decode,
                              const struct bt_sched_request *req, double t_ms);

/* ---- a prompt beside a decode worker's rows ---- */
/* j as a placement by a rule that mixes sees the cluster, with its row at worker decode. False:
 * nobody is up. */
bool bt_sched_survey_mixed(struct bt_sched_job *j, uint32_t decode);
/* What the prompt would meet at decode worker i, computed there. False: the rows would miss their
 * objective meanwhile, or nothing is known of its cost. */
bool bt_sched_estimate_mixed(const struct bt_sched_job *j, uint32_t i, struct bt_sched_estimate *e);

/* ---- packing: pack.c ---- */
/* Are rows packed now? */
bool bt_sched_packs(const struct bt_sched_job *j);
/* Decode worker w has no rows and none on their way to it. */
bool bt_sched_row_free(const struct bt_sched_worker *w);
/* Decode worker i's cost where rows are packed; load: its share in use with this request when the
 * row comes. */
double bt_sched_packed_cost(const struct bt_sched_job *j, uint32_t i, double load);

/* Does decode worker m, which computes the prompt by ready_ms from now, hand it over to d, where
 * its row would be packed? Not where rows are spread, nor where the links are busy for longer. */
bool bt_sched_hands_over(const struct bt_sched_job *j, uint32_t m, uint32_t d, double ready_ms);

/* Is worker i there with its kvstore, and may it stay where it is? */
bool bt_sched_present(const struct bt_sched_job *j, uint32_t i);
/* Could this worker ever hold the request? */
bool bt_sched_fits(const struct bt_sched_worker *w, const struct bt_sched_request *req);
/* ... and its kvstore all of its KV at once, as a hand-off needs it? */
bool bt_sched_fits_slab(const struct bt_sched_snapshot *s, const struct bt_sched_worker *w,
                        const struct bt_sched_request *req);
/* Placement by a rule. */
bt_sched_verdict_t bt_sched_place(const struct bt_sched_params *c,
                                  const struct bt_sched_snapshot *s,
                                  const struct bt_sched_request *req,
                                  const struct bt_sched_rule *rule, struct bt_sched_plan *plan_p,
                                  struct bt_sched_reject *reject_p);
/* Where it delays nobody who is in time, or BT_SCHED_OVERLOADED. */
bt_sched_verdict_t
bt_sched_place_late(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                    const struct bt_sched_request *req, const struct bt_sched_rule *rule,
                    struct bt_sched_plan *plan_p, struct bt_sched_reject *reject_p);
bt_sched_verdict_t bt_sched_refuse(struct bt_sched_reject *r, bt_sched_verdict_t v,
                                   uint32_t after_s, const char *why);

#endif
