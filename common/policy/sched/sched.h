/* Where a request runs: a policy looks at a snapshot of the cluster and returns a plan or a
 * rejection. PURE: no clock, allocation, lock, I/O or log; time, randomness and the snapshot are
 * arguments, so that the conductor, the simulator and the tests run the very same objects and a
 * recorded (snapshot, request) replays. */
#ifndef BT_POLICY_SCHED_H
#define BT_POLICY_SCHED_H

#include "common/base/base.h"
#include "common/batch/ahead.h"
#include "common/policy/sched/demand.h"
#include "common/policy/sched/forecast.h"
#include "common/policy/sched/learn.h"

#define BT_SCHED_NONE UINT32_MAX

/* The class (Submit.priority) of what is planned in the background: behind all others. */
#define BT_SCHED_CLASS_LATE INT16_MAX

/* What a worker can hold; 0: not known. */
struct bt_sched_capacity {
    uint32_t pages, pages_free; /* of kv.block_tokens tokens */
    uint32_t slots;             /* places for sequences */
    uint32_t context_tokens;    /* the longest sequence */
};

/* How fast it computes. Where a cost model is fitted, that counts in place of the rates. */
struct bt_sched_speed {
    double prefill_tokens_per_s, step_ms;    /* measured; 0: not yet */
    const struct bt_batch_cost *cost;        /* NULL: none */
    const struct bt_batch_cost *prompt_cost; /* of prompt tokens, where it differs; NULL: cost */
    uint32_t chunk_tokens;                   /* of a prompt in a step; 0: params' */
    /* how long its steps with prompts beside rows are, by its own word, and such a step and the
     * wait of a row that joins in it; mixed_step_ms 0: params' both; < 0: it takes no prompts from
     * others */
    double mixed_step_ms, mixed_gap_ms;
};

/* Prompts that it has not computed yet. own: of this conductor's submissions, which a heartbeat may
 * not have counted. */
struct bt_sched_queue {
    uint64_t tokens, own_tokens; /* of all, own */
    double ms;                   /* with a cost: until they are computed */
    double late_ms; /* ... and then what lower classes have, down to BT_SCHED_CLASS_LATE */
    /* how they share steps, from ahead_past_ms before now on (below 0: behind what others have
     * there); NULL: one is computed after the other */
    const struct bt_batch_ahead *ahead;
    double ahead_past_ms;
};

/* Sequences that decode there, and those that will. */
struct bt_sched_rows {
    uint32_t running;   /* hold a slot */
    uint32_t waiting;   /* want a slot or pages */
    uint32_t landing;   /* their KV is still on its way: in prefill elsewhere, mostly */
    uint64_t kv_tokens; /* context of those that run, read in every step */
    /* of these: rows of lower classes than the request's and their pages, which would make way */
    uint32_t yield, yield_pages;
    uint32_t own;               /* of this conductor, in prefill too, but not late ones */
    uint32_t own_coming;        /* of own: still in prefill ... */
    uint64_t own_coming_tokens; /* ... and their context, tokens */
    uint64_t own_late_tokens;   /* context of late ones, for which nobody makes room */
};

/* What one worker says of itself, and what this conductor has sent it since. */
struct bt_sched_worker {
    uint32_t kvstore; /* index of its node's kvstore in the snapshot, BT_SCHED_NONE: none is up */
    bool prefill, decode; /* the role it runs in */
    bool avoid;           /* it has failed this request before: only if there is nobody else */
    bool draining;        /* its node is to be emptied: only if nobody else could do it at all */
    struct bt_sched_capacity capacity;
    struct bt_sched_speed speed;
    struct bt_sched_queue queue;
    struct bt_sched_rows rows;
    struct bt_sched_learned learned;
};

/* How fast blocks come from another kvstore, measured; 0: not yet. */
#define BT_SCHED_LINKS_MAX 64
struct bt_sched_link {
    uint64_t incarnation;
    double slab_bytes_per_s, ssd_bytes_per_s;
};

struct bt_sched_kvstore {
    bool avoid, draining;
    uint32_t slots_total, slots_free; /* 0 total: not known */
    uint32_t match_blocks; /* full blocks of this request resident here, as far as the index says */
    double send_busy_ms, recv_busy_ms; /* until its link has sent, received what it has to */
    uint64_t incarnation;
    const struct bt_sched_link *links; /* [n_links] from others to this one; params' rate if none */
    uint32_t n_links;
};

struct bt_sched_snapshot {
    const struct bt_sched_worker *workers;
    uint32_t n_workers;
    const struct bt_sched_kvstore *kvstores;
    uint32_t n_kvstores;
    uint32_t spread_blocks; /* full blocks of this request, from the first on, of which each is in
                               some kvstore; 0: not known */
    double now_ms;          /* on the forecast's clock */
    const struct bt_sched_forecast *forecast;      /* of the decode pool; NULL: not kept */
    const struct bt_sched_forecast *late_forecast; /* of late rows on their way, which make way for
                                                      all others; NULL: not kept */
    const struct bt_sched_demand *demand;          /* of prefills; NULL: not kept */
    const struct bt_sched_demand *decodes;     /* of decode workers' time, by those whose prefill is
                                                  let in; NULL: not kept */
    const struct bt_sched_demand *let_in;      /* ... and of prefills, by the same */
    const struct bt_sched_demand *late_demand; /* of prefills that are not let in; NULL: not kept */
};

struct bt_sched_request {
    uint32_t n_tokens;   /* prompt, and what was generated in earlier epochs */
    uint32_t max_new;    /* of each choice, at most */
    uint32_t expect_new; /* of each choice, a quantile; 0: not known */
    uint32_t likely_new; /* of each choice, the median; 0: not known */
    double mean_new;     /* of each choice, in the mean; 0: not known */
    uint32_t n_choices;  /* rows at the decode worker; 0 counts as 1 */
    uint32_t block_tokens;
    uint32_t token_bytes; /* of KV, over all layers */
    double waited_ms;     /* since its last byte: part of its time to first token */
    uint64_t random;      /* breaks ties */
    uint64_t sequence;    /* counts this conductor's decisions: round-robin's only state */
};

/* What is promised to requests, ms; 0: nothing. */
struct bt_sched_objective {
    double ttft_ms, tbt_ms;
    double tbt_margin; /* admission asks for this share of tbt_ms: rows that come after make the
                          step longer for those that are there. 0: all of it */
};

/* What counts until it is measured, or where it is not. */
struct bt_sched_prior {
    double prefill_tokens_per_s;
    double step_ms;
    double link_bytes_per_s; /* between nodes */
    double load_bytes_per_s; /* slab to GPU; 0: hidden */
    uint32_t chunk_tokens;   /* of a prefill step; 0: all in one */
};

/* How places are compared. */
struct bt_sched_place {
    uint32_t local_prefill_tokens; /* an uncached tail up to this is prefilled by the decode worker
                                      itself; 0: always apart */
    /* kvcache_balancing_threshold of Algorithm 1: a prefix is fetched where the best match is at
     * least so many times the local one. 0: there is nobody to fetch it, so never. */
    double fetch_ratio;
    bool tail_load;     /* an engine can load a prefix's end while it computes its head (baton) */
    double work_weight; /* baton: weight of the worker's time that a placement takes from others */
};

/* Admission priced: exponents. */
struct bt_sched_price {
    double work;   /* how fast a queue raises the price of work; 0: not */
    double demand; /* how fast it, or decode workers that get full, lower the share of the stage's
                      work asked for that may come in, the least first; 0: not */
};

/* baton: prompts beside rows at decode workers. */
struct bt_sched_mixed {
    double step_ms;       /* a decode worker fills its steps with prompt tokens up to so long, if
                             it says nothing else; 0: none takes prompts from others */
    uint32_t step_tokens; /* ... in multiples of so many; 0: to the token */
    double gap_ms;        /* ... but no row that joins has its first gap made longer by them than
                             this: steps that rows join have less room. 0: they do not */
    /* Then rows are packed: they go to the fullest decode worker whose step stays within this share
     * of the TBT objective, so that others have none and compute prompts as prefill workers do
     * (pack.c). 0: rows are spread. */
    double pack_share;
};

/* baton: a request that admission refuses is served late where it delays nobody who is in time
 * (bt_sched_late). */
struct bt_sched_late_limits {
    double wait_ms;       /* ... if it would wait for prefill workers for less. 0: it is refused */
    double others_tbt_ms; /* the TBT objective of those that it must not delay; 0: none */
};

struct bt_sched_params {
    struct bt_sched_objective objective;
    struct bt_sched_prior prior;
    struct bt_sched_place place;
    struct bt_sched_price price;
    struct bt_sched_mixed mixed;
    struct bt_sched_late_limits late;
};

typedef enum {
    BT_SCHED_PLANNED = 0,
    BT_SCHED_NO_DECODE,  /* no worker is up */
    BT_SCHED_NO_KVSTORE, /* workers, but not the kvstore of their node */
    BT_SCHED_TOO_LARGE,  /* will never fit, whoever is asked */
    BT_SCHED_OVERLOADED  /* an objective cannot be met */
} bt_sched_verdict_t;

/* Why a plan is as it is: reasons.def. */
typedef enum {
#define BT_SCHED_REASON(name, text, apart, both, meaning) BT_SCHED_##name,
#include "common/policy/sched/reasons.def"
#undef BT_SCHED_REASON
    BT_SCHED_REASONS
} bt_sched_reason_t;
extern const char *const bt_sched_reason_names[BT_SCHED_REASONS];
/* May a plan of two workers [0], of one that does both [1] have the reason? */
extern const bool bt_sched_reason_of[BT_SCHED_REASONS][2];

/* Where it runs: indices of workers and kvstores in the snapshot. */
struct bt_sched_where {
    uint32_t prefill, decode;       /* equal: one worker does both */
    uint32_t kv_prefill, kv_decode; /* may be equal */
    bool both;
};

/* What of the prompt is not computed at the prefill side, and what goes through its slab; tokens.
 */
struct bt_sched_reuse {
    uint32_t cached_tokens; /* expected there, with those that are fetched */
    uint32_t fetch_from;    /* kvstore that sends some of them; BT_SCHED_NONE: nobody */
    uint32_t fetch_tokens;
    uint32_t end_tokens; /* where they end: cached_tokens, or, if the part in front of them is
                            computed meanwhile, the end of what fetch_from has */
    double
        recompute_tokens_per_s; /* at which they would be computed instead; 0: none are fetched */
    uint32_t grant_tokens; /* both: only so many from the beginning go through the slab, as it is
                              smaller than the prompt; 0: all */
    bool keep; /* what the decode side receives enters its cache; else it is freed once landed */
};

/* The first token as it is predicted, ms. ms = waited + learned of (queue + beside + prefill). */
struct bt_sched_first {
    double ms;          /* from the request's last byte on */
    double most_ms;     /* nine of ten first tokens are out by then, as far as was learned */
    double waited_ms;   /* of ms: before the plan */
    double queue_ms;    /* of ms: what others have queued there */
    double beside_ms;   /* of ms: what others add to its steps */
    double prefill_ms;  /* of ms: the computing */
    double work_ms;     /* of ms: queue, fetch and computing as costs have it */
    double overhead_ms; /* of ms: what was learned of the worker beside its steps */
};

/* Gaps between tokens as they are predicted, ms. */
struct bt_sched_gaps {
    double ms;         /* TBT: the mean of the longest tenth */
    double step_ms;    /* the step of rows alone: ms without what was learned */
    double mixed_ms;   /* what steps with prompts beside its rows take at most; <= 0: none have */
    double tail_ms;    /* ms without the gap in which it is handed over, and without prompts */
    double landing_ms; /* steps in that gap; 0: it is not handed over */
};

/* What it takes of the workers. */
struct bt_sched_takes {
    double compute_ms; /* of a prefill worker that has nothing else to do */
    double alone_ms; /* of the prefill side's queue: first.prefill_ms without the rows beside which
                        a decode worker computes it */
    double decode_work; /* its rows' share of a decode worker in percent, times tokens */
    double row_ms;      /* how long each of its rows decodes, on a full worker */
};

struct bt_sched_plan {
    struct bt_sched_where at;
    struct bt_sched_reuse prefix;
    struct bt_sched_first first;
    struct bt_sched_gaps gaps;
    struct bt_sched_takes takes;
    bt_sched_reason_t reason;
    bool background;  /* it is served late, behind all others (BT_SCHED_CLASS_LATE) */
    bool draining;    /* it stays on a node that is to be emptied: nobody else could take it */
    bool last_resort; /* somebody is in it who is to be avoided: there was nobody else */
    /* a decode worker would have had the first token out earlier, beside its rows, but that its
     * places would not last: so many rows are expected on each; 0: they would, or none would */
    uint32_t places_wanted;
};

typedef enum { BT_SCHED_MISS_TTFT, BT_SCHED_MISS_TBT, BT_SCHED_MISS_PRICE } bt_sched_miss_t;

struct bt_sched_reject {
    bt_sched_verdict_t verdict;
    bt_sched_miss_t miss;   /* OVERLOADED: which objective, or too long a prefill for the queue */
    uint32_t retry_after_s; /* 0: do not retry */
    const char *reason;     /* static text */
    uint32_t fits_tokens;   /* TOO_LARGE: what the largest worker could take */
    /* OVERLOADED: what would be missed, and by how much; 0: it is no time */
    double predicted_ms, objective_ms;
    double compute_ms, decode_work; /* OVERLOADED: the plan's */
    bool by_decode; /* OVERLOADED: decode workers refuse it; its prefill would be let in */
};

/* A policy. place returns BT_SCHED_PLANNED and fills plan_p, or another verdict and fills
 * reject_p. It looks for the best place only; whether that is good enough, admission says. */
struct bt_sched_policy {
    const char *name;
    bool fetches; /* may have a prefix moved between kvstores */
    bool mixes;   /* may have prompts computed beside rows, and late ones in the background */
    bt_sched_verdict_t (*place)(const struct bt_sched_params *params,
                                const struct bt_sched_snapshot *snap,
                                const struct bt_sched_request *req, struct bt_sched_plan *plan_p,
                                struct bt_sched_reject *reject_p);
    /* Where a request that admission refuses may be served late; NULL: nowhere. As place, but
     * BT_SCHED_OVERLOADED where it would delay others or wait for too long. */
    bt_sched_verdict_t (*late)(const struct bt_sched_params *params,
                               const struct bt_sched_snapshot *snap,
                               const struct bt_sched_request *req, struct bt_sched_plan *plan_p,
                               struct bt_sched_reject *reject_p);
};

/* Any worker that can take it, each as likely. */
extern const struct bt_sched_policy bt_sched_random;
/* One after the other, by the request's sequence number. */
extern const struct bt_sched_policy bt_sched_round_robin;
/* Ignores the caches: shortest prefill queue, least loaded decode worker. */
extern const struct bt_sched_policy bt_sched_least_load;
/* Local cache-aware: smallest queue + prefill of what is not cached on the worker's own node + what
 * the hand-off does not hide; the decode worker with the least load and pages. */
extern const struct bt_sched_policy bt_sched_cache_aware;
/* KVCache-centric: Algorithm 1 of Mooncake (arXiv 2407.00079), with its balancing threshold
 * (place.fetch_ratio): queue + prefill with the local prefix, or queue + fetch from the best
 * holder + prefill with the best prefix; a missing local prefix is an infinite ratio. */
extern const struct bt_sched_policy bt_sched_kvcache;
/* KVCache-centric, with: the fetch runs beside the queue and beside the computing of the prefix's
 * head; the source is the least busy holder; fetch or recompute by predicted time, not by a ratio;
 * and the worker's time that a placement takes from those behind it has a price. */
extern const struct bt_sched_policy bt_sched_baton;

/* Is the best plan good enough? Returns BT_SCHED_PLANNED, or BT_SCHED_OVERLOADED and fills
 * reject_p. Objectives are params' (0: that one is not asked). */
struct bt_sched_admission {
    const char *name;
    bt_sched_verdict_t (*admit)(const struct bt_sched_params *params,
                                const struct bt_sched_snapshot *snap,
                                const struct bt_sched_request *req,
                                const struct bt_sched_plan *plan, struct bt_sched_reject *reject_p);
    bool at_decode; /* TBT is asked when the prefill has ended, by bt_sched_admit_decode */
};
extern const struct bt_sched_admission bt_sched_admit_none; /* everybody */
/* The baseline of Mooncake's section 7: TTFT at arrival, TBT once the prefill is done and paid. */
extern const struct bt_sched_admission bt_sched_admit_late;
/* Early rejection: both at arrival, against the decode load of now. */
extern const struct bt_sched_admission bt_sched_admit_early;
/* Early rejection with prediction: against the decode pool's load at the time the prefill will
 * end (snapshot.forecast; as early without one). */
extern const struct bt_sched_admission bt_sched_admit_predict;

/* Predict, and: a queue is a price. Of the time that is left to the objective a prefill may take
 * the whole while nobody waits, and less the longer the queue is: (1 - queue /
 * objective)^work_price of it, where a queue of less than a second is a burst and costs nothing.
 * Where all prefills are short beside the objective that asks too late: of the work that is asked
 * for (snapshot.demand) the share (1 - queue / objective)^demand_price comes in, the shortest
 * first, and no less than prefill workers have time for. Under overload many short prefills then
 * take the place of few long ones, and the price settles where what is admitted is what can be
 * served. Decode workers have such a price too (snapshot.decodes): the fuller they are expected to
 * be at the end of the prefill, the less of their pages or places a row may take, and of what is
 * asked of them no more comes in than they can serve. */
extern const struct bt_sched_admission bt_sched_admit_priced;

/* The second question of an admission with at_decode: may worker `decode` of snap have the row? */
bt_sched_verdict_t bt_sched_admit_decode(const struct bt_sched_params *params,
                                         const struct bt_sched_snapshot *snap,
                                         const struct bt_sched_request *req, uint32_t decode,
                                         struct bt_sched_reject *reject_p);
/* Admission has refused the request: may it be served late? True, and *plan_p is filled, where
 * that delays nobody who is in time: its prompt is computed where nothing else is to be, within the
 * time that clients are expected to wait, and decode workers have room to spare for its rows. */
bool bt_sched_late(const struct bt_sched_policy *policy, const struct bt_sched_params *params,
                   const struct bt_sched_snapshot *snap, const struct bt_sched_request *req,
                   struct bt_sched_plan *plan_p);
/* The longest prefix of a request that another one is computing. */
struct bt_sched_coming {
    uint32_t blocks; /* full blocks; 0: none */
    double ready_ms; /* from now on, as that one's plan has it; 0: it should be there by now */
};
typedef void (*bt_sched_coming_fn)(void *arg, struct bt_sched_coming *coming_p);
/* Admission has refused the request; late: its late plan, NULL: it has none; reject: of
 * bt_sched_decide. If another request is computing its prefix, computing that again takes a
 * worker's time from all others. So it waits where that has its first token out earlier than the
 * late plan, saves computing, and takes less than params->late.wait_ms in all. True: it waits, and
 * is to be planned again every BT_SCHED_FOLLOW_MS, as predictions are seldom right to the second.
 * coming is called at most once, and not for short prompts. */
#define BT_SCHED_FOLLOW_MS 200
bool bt_sched_follows(const struct bt_sched_policy *policy, const struct bt_sched_params *params,
                      const struct bt_sched_snapshot *snap, const struct bt_sched_request *req,
                      const struct bt_sched_plan *late, const struct bt_sched_reject *reject,
                      bt_sched_coming_fn coming, void *arg);
/* place, then admit, then late. Outputs as of place; of a request that is planned late *reject_p
 * says why it was refused. */
bt_sched_verdict_t bt_sched_decide(const struct bt_sched_policy *policy,
                                   const struct bt_sched_admission *admission,
                                   const struct bt_sched_params *params,
                                   const struct bt_sched_snapshot *snap,
                                   const struct bt_sched_request *req, struct bt_sched_plan *plan_p,
                                   struct bt_sched_reject *reject_p);

/* How near a worker is to the limit of what its roles can take: its queue against the objective (or
 * BT_SCHED_QUEUE_MS), its rows and pages against what it has, and what rows add to its step against
 * what the TBT objective leaves beside the step of one. 1: at the limit. */
#define BT_SCHED_QUEUE_MS 2000.0
double bt_sched_pressure(const struct bt_sched_params *params, const struct bt_sched_worker *w);
/* Predicted: a step of decode worker w with all its places or pages taken by rows as long as those
 * of now (if there are none, as req), and nothing beside them; ms. */
double bt_sched_full_step_ms(const struct bt_sched_params *params, const struct bt_sched_worker *w,
                             const struct bt_sched_request *req);

/* ---- why a plan is as it is ---- */
typedef enum { BT_SCHED_FOR_PREFILL, BT_SCHED_FOR_DECODE } bt_sched_use_t;
struct bt_sched_candidate {
    uint32_t worker; /* index in the snapshot */
    bt_sched_use_t use;
    bool chosen;
    const char *verdict;    /* static: "chosen", or why not */
    uint32_t cached_tokens; /* of the request, at its node */
    double queue_ms;        /* prefill only */
    double ttft_ms; /* predicted: the plan's, of others without a fetch; prefill only, else or if it
                       has no room < 0 */
    double tbt_ms;  /* predicted: the plan's, of others now; decode only, else < 0 */
    double load;    /* decode only: share in use with this request, above 1 it waits */
};
/* What was looked at for policy's plan of (snap, req): every worker in each use that it has, with
 * baton also decode workers that could compute the prompt beside their rows; the chosen ones first.
 * plan: NULL if the request was rejected. Writes at most cap, returns how many there are. */
uint32_t bt_sched_explain(const struct bt_sched_policy *policy,
                          const struct bt_sched_params *params,
                          const struct bt_sched_snapshot *snap, const struct bt_sched_request *req,
                          const struct bt_sched_plan *plan, struct bt_sched_candidate *out,
                          uint32_t cap);

/* By name, NULL if there is none; and all names, for messages. */
const struct bt_sched_policy *bt_sched_policy_find(const char *name);
const struct bt_sched_admission *bt_sched_admission_find(const char *name);
extern const char bt_sched_policy_names[], bt_sched_admission_names[];

#endif
