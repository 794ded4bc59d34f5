/* Where a request runs: a policy looks at a snapshot of the cluster and returns a plan or a
 * rejection. PURE: no clock, allocation, lock, I/O or log. Time, randomness and the snapshot are
 * arguments, so the conductor, the simulator and the tests run the same code, and a recorded
 * (snapshot, request) can be replayed. */
#ifndef BT_POLICY_SCHED_H
#define BT_POLICY_SCHED_H

#include "common/base/base.h"
#include "common/batch/ahead.h"
#include "common/policy/sched/demand.h"
#include "common/policy/sched/forecast.h"
#include "common/policy/sched/learn.h"

#define BT_SCHED_NONE UINT32_MAX

/* The class (Submit.priority) of late requests: behind all others. */
#define BT_SCHED_CLASS_LATE INT16_MAX

/* The capacity of a worker; 0: not known. */
struct bt_sched_capacity {
    uint32_t pages, pages_free; /* of kv.block_tokens tokens */
    uint32_t slots;             /* places for sequences */
    uint32_t context_tokens;    /* the longest sequence */
};

/* How fast a worker computes. A fitted cost model replaces the rates. */
struct bt_sched_speed {
    double prefill_tokens_per_s, step_ms; /* measured; 0: not yet */
    double row_tokens;                /* of a row in a step: 1 and its drafts; below 1: not known */
    const struct bt_batch_cost *cost; /* NULL: none */
    const struct bt_batch_cost *prompt_cost; /* for prompt tokens, if it differs; NULL: cost */
    uint32_t chunk_tokens; /* most tokens of one prompt in a step; 0: as in params */
    /* The worker's own limits, as it reports them: mixed_step_ms of a step with prompts beside
     * rows, mixed_gap_ms of such a step together with the wait of a row that joins it.
     * mixed_step_ms 0: params has both; < 0: it computes no prompts for other workers */
    double mixed_step_ms, mixed_gap_ms;
};

/* Prompts that a worker has not computed yet. own: those that this conductor has sent, which the
 * last heartbeat may not contain. */
struct bt_sched_queue {
    uint64_t tokens, own_tokens; /* of all prompts; of own prompts */
    double ms;                   /* with a cost model: time until they are computed */
    double
        late_ms; /* the same, with the prompts of all lower classes, down to BT_SCHED_CLASS_LATE */
    /* how they share steps, beginning ahead_past_ms before now (negative: after the prompts of
     * other conductors); NULL: they are computed one after the other */
    const struct bt_batch_ahead *ahead;
    double ahead_past_ms;
};

/* Rows of a worker, and rows that will come to it. */
struct bt_sched_rows {
    uint32_t running;   /* hold a slot */
    uint32_t waiting;   /* want a slot or pages */
    uint32_t landing;   /* their KV is still on its way; most are in prefill on another worker */
    uint64_t kv_tokens; /* context of the running rows, read in every step */
    /* of these: rows of lower classes than the request's, and their pages; they would be preempted
     * for it */
    uint32_t yield, yield_pages;
    uint32_t own;        /* rows of this conductor, also those in prefill, without late ones */
    uint32_t own_coming; /* of own: those still in prefill */
    uint64_t own_coming_tokens; /* context of own_coming, tokens */
    uint64_t
        own_late_tokens; /* context of this conductor's late rows, for which no row is preempted */
};

/* The state of a worker: its own report, plus what this conductor has sent it since. */
struct bt_sched_worker {
    uint32_t kvstore; /* index of its node's kvstore in the snapshot, BT_SCHED_NONE: none is up */
    bool prefill, decode; /* the roles that it offers */
    bool avoid;    /* it has failed this request before: used only if no other worker is eligible */
    bool draining; /* its node is drained: used only if no other worker could ever take the request
                    */
    struct bt_sched_capacity capacity;
    struct bt_sched_speed speed;
    struct bt_sched_queue queue;
    struct bt_sched_rows rows;
    struct bt_sched_learned learned;
};

/* Measured rates at which blocks come from another kvstore; 0: not yet measured. */
#define BT_SCHED_LINKS_MAX 64
struct bt_sched_link {
    uint64_t incarnation;
    double slab_bytes_per_s, ssd_bytes_per_s;
};

struct bt_sched_kvstore {
    bool avoid, draining;
    uint32_t slots_total, slots_free; /* 0 total: not known */
    uint32_t match_blocks; /* full blocks of this request that this kvstore has, according to the
                              index */
    double send_busy_ms,
        recv_busy_ms; /* until its link has sent, and received, all that is under way */
    uint64_t incarnation;
    const struct bt_sched_link *links; /* [n_links] from other kvstores to this one; a missing link
                                          has the rate of params */
    uint32_t n_links;
};

struct bt_sched_snapshot {
    const struct bt_sched_worker *workers;
    uint32_t n_workers;
    const struct bt_sched_kvstore *kvstores;
    uint32_t n_kvstores;
    uint32_t spread_blocks; /* full blocks of this request, from the first on, that are in some
                               kvstore each; 0: not known */
    double now_ms;          /* on the forecast's clock */
    const struct bt_sched_forecast *forecast;      /* of the decode pool; NULL: not kept */
    const struct bt_sched_forecast *late_forecast; /* of late rows on their way, which are preempted
                                                      for all others; NULL: not kept */
    const struct bt_sched_demand *demand;          /* of prefills; NULL: not kept */
    const struct bt_sched_demand
        *decodes; /* for decode workers, of requests whose prefill is admitted; NULL: not kept */
    const struct bt_sched_demand *let_in; /* prefills of the same requests */
    const struct bt_sched_demand
        *late_demand; /* of prefills that are not admitted; NULL: not kept */
};

struct bt_sched_request {
    uint32_t n_tokens;   /* prompt, and tokens generated in earlier epochs */
    uint32_t max_new;    /* limit for each choice */
    uint32_t expect_new; /* expected for each choice, as a quantile; 0: not known */
    uint32_t likely_new; /* the median for each choice; 0: not known */
    double mean_new;     /* the mean for each choice; 0: not known */
    uint32_t n_choices;  /* rows at the decode worker; 0 counts as 1 */
    bool one_worker;     /* the decode worker must compute the prompt */
    uint32_t block_tokens;
    uint32_t token_bytes; /* of KV, over all layers */
    double waited_ms;     /* since the last byte of its body: part of its time to first token */
    uint64_t random;      /* breaks ties */
    uint64_t sequence;    /* number of this conductor's decision: the only state of round-robin */
};

/* Objectives, ms; 0: none. */
struct bt_sched_objective {
    double ttft_ms, tbt_ms;
    double tbt_margin; /* admission allows this share of tbt_ms, because predictions have errors and
                          later rows make the steps of earlier ones longer. 0: all of it */
};

/* Values that are used until measured ones exist. */
struct bt_sched_prior {
    double prefill_tokens_per_s;
    double step_ms;
    double link_bytes_per_s; /* between nodes */
    double load_bytes_per_s; /* slab to GPU; 0: hidden */
    uint32_t chunk_tokens;   /* tokens of a prefill step; 0: the whole prompt in one step */
};

/* Values of the parameters below. Simulations of whole traces chose them (docs/SIMULATION.md), and
 * no operator could know better ones. A conductor uses them; baton-sim can change some. */
#define BT_SCHED_FETCH_RATIO  1.5  /* place.fetch_ratio */
#define BT_SCHED_WORK_WEIGHT  0.5  /* place.work_weight */
#define BT_SCHED_DEMAND_PRICE 0.4  /* price.demand */
#define BT_SCHED_STEP_SHARE   0.75 /* mixed.step_ms over the TBT objective, and mixed.pack_share */
#define BT_SCHED_GAP_SHARE    0.95 /* mixed.gap_ms over it, and objective.tbt_margin */

/* How workers are compared. */
struct bt_sched_place {
    /* kvcache_balancing_threshold of Algorithm 1: a prefix is fetched if the longest match is at
     * least this many times the local one. 0: never. */
    double fetch_ratio;
    bool tail_load; /* an engine can load a prefix's end while it computes its beginning (baton) */
    double work_weight; /* baton: weight of the worker's time that later requests lose */
};

/* Admission priced. */
struct bt_sched_price {
    double demand; /* exponent: how fast a queue, or full decode workers, lower the admitted share
                      of the stage's demand, the smallest requests first; 0: no effect */
};

/* baton: prompts beside rows at decode workers. */
struct bt_sched_mixed {
    double step_ms; /* a decode worker adds prompt tokens to its steps up to this length, unless it
                       reports another limit; 0: decode workers compute no prompts for others */
    uint32_t step_tokens; /* prompt tokens come in multiples of this number; 0: any number */
    double gap_ms; /* limit of the first gap of a row that joins such a step, so those steps have
                      less room for prompts. 0: no limit */
    /* Rows are packed (pack.c): they go to the fullest decode worker whose step stays within this
     * share of the TBT objective, so that other workers have no rows and compute prompts as prefill
     * workers do. 0: rows are spread. */
    double pack_share;
};

/* baton: a request that admission refuses is served late if that delays no request that is in time
 * (bt_sched_late). */
struct bt_sched_late_limits {
    double wait_ms;       /* longest wait for a prefill worker. 0: no request is served late */
    double others_tbt_ms; /* the TBT objective of the requests that must not be delayed; 0: none */
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
    BT_SCHED_TOO_LARGE,  /* no worker can ever hold it */
    BT_SCHED_OVERLOADED  /* an objective cannot be met */
} bt_sched_verdict_t;

/* The reason for a plan's form: reasons.def. */
typedef enum {
#define BT_SCHED_REASON(name, text, apart, both, meaning) BT_SCHED_##name,
#include "common/policy/sched/reasons.def"
#undef BT_SCHED_REASON
    BT_SCHED_REASONS
} bt_sched_reason_t;
extern const char *const bt_sched_reason_names[BT_SCHED_REASONS];
extern const char *const bt_sched_reason_meanings[BT_SCHED_REASONS]; /* in words */
/* Whether a plan with two workers [0], or with one worker for both [1], can have the reason. */
extern const bool bt_sched_reason_of[BT_SCHED_REASONS][2];

/* The workers and kvstores of a plan: indices in the snapshot. */
struct bt_sched_where {
    uint32_t prefill, decode;       /* equal: one worker does both */
    uint32_t kv_prefill, kv_decode; /* may be equal */
    bool both;
};

/* The tokens of the prompt that the prefill side does not compute, and those that go through its
 * slab.
 */
struct bt_sched_reuse {
    uint32_t cached_tokens; /* cached tokens expected there, with those that are fetched */
    uint32_t fetch_from;    /* kvstore that sends some of them; BT_SCHED_NONE: none does */
    uint32_t fetch_tokens;
    uint32_t end_tokens; /* where the fetched tokens end: cached_tokens, or the end of what
                            fetch_from has, if the part before them is computed meanwhile */
    double recompute_tokens_per_s; /* rate at which the fetched tokens would be computed instead; 0:
                                      none are fetched */
    uint32_t grant_tokens; /* if both: only this many first tokens go through the slab, because it
                              is smaller than the prompt; 0: all */
    bool keep; /* the decode side keeps received blocks in its cache; else they are freed once
                  landed */
};

/* The predicted first token, ms. ms = waited_ms + bt_sched_learned_ttft(queue_ms + beside_ms +
 * prefill_ms). */
struct bt_sched_first {
    double ms;          /* from the request's last byte on */
    double most_ms;     /* nine of ten first tokens come within this time, by learned values */
    double waited_ms;   /* of ms: the wait before the plan */
    double queue_ms;    /* of ms: the queue of the worker */
    double beside_ms;   /* of ms: what other prompts add to its steps */
    double prefill_ms;  /* of ms: the computing */
    double work_ms;     /* of ms: queue, fetch and computing, from the cost model */
    double overhead_ms; /* of ms: the learned overhead of the worker */
};

/* Predicted gaps between tokens, ms. */
struct bt_sched_gaps {
    double ms;       /* TBT: the mean of the longest tenth */
    double step_ms;  /* the step of rows alone, without learned values */
    double mixed_ms; /* longest step with prompts beside its rows; <= 0: there are none */
    double tail_ms;  /* ms without the gap of the hand-off, and without prompts */
};

/* The work and room that a plan takes from the workers. */
struct bt_sched_takes {
    double compute_ms; /* time of a prefill worker that does nothing else */
    double alone_ms; /* part of the prefill side's queue: first.prefill_ms as if a decode worker had
                        no rows */
    double decode_work; /* share of a decode worker that its rows take, in percent, times their
                           tokens */
    double row_ms;      /* how long each of its rows lasts on a full worker */
};

struct bt_sched_plan {
    struct bt_sched_where at;
    struct bt_sched_reuse prefix;
    struct bt_sched_first first;
    struct bt_sched_gaps gaps;
    struct bt_sched_takes takes;
    bt_sched_reason_t reason;
    bool background;  /* served late, behind all others (BT_SCHED_CLASS_LATE) */
    bool draining;    /* it uses a drained node, because no other node could take it */
    bool last_resort; /* it uses a worker or kvstore to avoid, because no other is eligible */
    /* rows expected on each decode worker, if too few slots are the only reason why none of them
     * computes the prompt, although its first token would come earlier there; else 0 */
    uint32_t places_wanted;
};

typedef enum { BT_SCHED_MISS_TTFT, BT_SCHED_MISS_TBT, BT_SCHED_MISS_PRICE } bt_sched_miss_t;

struct bt_sched_reject {
    bt_sched_verdict_t verdict;
    bt_sched_miss_t
        miss; /* OVERLOADED: the objective, or PRICE: the prefill is too long for the queue */
    uint32_t retry_after_s; /* 0: do not retry */
    const char *reason;     /* static text */
    uint32_t fits_tokens;   /* TOO_LARGE: tokens that the largest worker could take */
    /* OVERLOADED: the predicted value and its objective; 0: the reason is not a time */
    double predicted_ms, objective_ms;
    double compute_ms, decode_work; /* OVERLOADED: the plan's */
    bool by_decode; /* OVERLOADED: decode workers refuse it; its prefill would be admitted */
};

/* A policy. place returns BT_SCHED_PLANNED and fills plan_p, or another verdict and fills
 * reject_p. It only looks for the best workers; admission decides whether they are good enough. */
struct bt_sched_policy {
    const char *name;
    bool fetches; /* may order prefix fetches */
    bool mixes;   /* may have prompts computed beside rows, and requests served late */
    bt_sched_verdict_t (*place)(const struct bt_sched_params *params,
                                const struct bt_sched_snapshot *snap,
                                const struct bt_sched_request *req, struct bt_sched_plan *plan_p,
                                struct bt_sched_reject *reject_p);
    /* Plans a request that admission has refused, to be served late; NULL: the policy has no late
     * requests. As place, but BT_SCHED_OVERLOADED if it would delay others or wait too long. */
    bt_sched_verdict_t (*late)(const struct bt_sched_params *params,
                               const struct bt_sched_snapshot *snap,
                               const struct bt_sched_request *req, struct bt_sched_plan *plan_p,
                               struct bt_sched_reject *reject_p);
};

/* Any worker that can take the request, each with the same chance. */
extern const struct bt_sched_policy bt_sched_random;
/* One after the other, by the request's sequence number. */
extern const struct bt_sched_policy bt_sched_round_robin;
/* Ignores the caches: shortest prefill queue, least loaded decode worker. */
extern const struct bt_sched_policy bt_sched_least_load;
/* Local cache-aware: the least sum of queue, prefill of what is not cached on the worker's own
 * node, and the part of the hand-off that the prefill does not hide; the decode worker with the
 * least load and pages. */
extern const struct bt_sched_policy bt_sched_cache_aware;
/* KVCache-centric: Algorithm 1 of Mooncake (arXiv 2407.00079), with its balancing threshold
 * (place.fetch_ratio): queue + prefill with the local prefix, or queue + fetch from the best
 * holder + prefill with the best prefix; a missing local prefix is an infinite ratio. */
extern const struct bt_sched_policy bt_sched_kvcache;
/* KVCache-centric, with these differences: the fetch runs beside the queue and beside the computing
 * of the prefix's beginning; the source is the least busy holder; predicted times decide between
 * fetching and computing, not a ratio; and the worker's time that later requests lose has a price.
 */
extern const struct bt_sched_policy bt_sched_baton;

/* Is the best plan good enough? Returns BT_SCHED_PLANNED, or BT_SCHED_OVERLOADED and fills
 * reject_p. The objectives are in params (0: not checked). */
struct bt_sched_admission {
    const char *name;
    bt_sched_verdict_t (*admit)(const struct bt_sched_params *params,
                                const struct bt_sched_snapshot *snap,
                                const struct bt_sched_request *req,
                                const struct bt_sched_plan *plan, struct bt_sched_reject *reject_p);
    bool at_decode; /* TBT is checked when the prefill has ended, by bt_sched_admit_decode */
};
extern const struct bt_sched_admission bt_sched_admit_none; /* nothing is refused */
/* The baseline of Mooncake's section 7: TTFT at arrival, TBT once the prefill is done and paid. */
extern const struct bt_sched_admission bt_sched_admit_late;
/* Early rejection: both at arrival, against the decode load of now. */
extern const struct bt_sched_admission bt_sched_admit_early;
/* Early rejection with prediction: against the decode pool's load at the time the prefill will
 * end (snapshot.forecast; as early without one). */
extern const struct bt_sched_admission bt_sched_admit_predict;

/* As predict, and a queue has a price (docs/SCHEDULING.md, "Admission"). The longer the queue of
 * prefills is, the shorter a prefill must be: it may take (1 - queue / objective) of the
 * time that is left until the objective. A queue of less than a second is a burst and has no price.
 * If all prefills are short compared with the objective, this limit acts too late. So only the
 * share (1 - queue / objective)^demand_price of the demand (snapshot.demand) is admitted, the
 * shortest prefills first, but never less than prefill workers have time for. Under overload many
 * short prefills then replace few long ones, and the admitted work becomes what can be served.
 * Decode workers have such a price too (snapshot.decodes): the fuller they are expected to be at
 * the end of the prefill, the smaller the admitted share of their demand. */
extern const struct bt_sched_admission bt_sched_admit_priced;

/* The second check of an admission with at_decode: may worker `decode` of snap take the row? */
bt_sched_verdict_t bt_sched_admit_decode(const struct bt_sched_params *params,
                                         const struct bt_sched_snapshot *snap,
                                         const struct bt_sched_request *req, uint32_t decode,
                                         struct bt_sched_reject *reject_p);
/* Admission has refused the request: can it be served late? True (and *plan_p is filled) if that
 * delays no request that is in time: a worker without other work computes the prompt within the
 * time that clients are expected to wait, and decode workers have free room for its rows. */
bool bt_sched_late(const struct bt_sched_policy *policy, const struct bt_sched_params *params,
                   const struct bt_sched_snapshot *snap, const struct bt_sched_request *req,
                   struct bt_sched_plan *plan_p);
/* The longest prefix of a request that another one is computing. */
struct bt_sched_coming {
    uint32_t blocks; /* full blocks; 0: no request computes a prefix of it */
    double ready_ms; /* from now, according to that request's plan; 0: it should be there already */
};
typedef void (*bt_sched_coming_fn)(void *arg, struct bt_sched_coming *coming_p);
/* Should a refused request wait for a prefix that another request is computing? Computing the
 * prefix a second time would take a worker's time from all others. True: its first token comes
 * earlier than by its late plan, it saves computing, and it waits less than params->late.wait_ms in
 * all. Then the caller plans it again every BT_SCHED_FOLLOW_MS, because predictions are rarely
 * exact to the second. late: its late plan, NULL: it has none; reject: from bt_sched_decide. coming
 * is called at most once, and not for short prompts. */
#define BT_SCHED_FOLLOW_MS 200
bool bt_sched_follows(const struct bt_sched_policy *policy, const struct bt_sched_params *params,
                      const struct bt_sched_snapshot *snap, const struct bt_sched_request *req,
                      const struct bt_sched_plan *late, const struct bt_sched_reject *reject,
                      bt_sched_coming_fn coming, void *arg);
/* place, then admit, then late. Outputs as of place; for a request that is planned late, *reject_p
 * says why it was refused. */
bt_sched_verdict_t bt_sched_decide(const struct bt_sched_policy *policy,
                                   const struct bt_sched_admission *admission,
                                   const struct bt_sched_params *params,
                                   const struct bt_sched_snapshot *snap,
                                   const struct bt_sched_request *req, struct bt_sched_plan *plan_p,
                                   struct bt_sched_reject *reject_p);

/* How close a worker is to its limit; 1: at the limit. The largest of three values: its queue over
 * the objective (or the time of a burst); its rows and pages over its capacity; what rows add to
 * its step over the time that the TBT objective leaves beside the step of a single row. While rows
 * wait for a decode worker, 1 is added to its rows. */
double bt_sched_pressure(const struct bt_sched_params *params, const struct bt_sched_worker *w);
/* The predicted step of decode worker w, ms, if rows as long as the present ones (without any: as
 * req) took all its slots or pages, without prompts. */
double bt_sched_full_step_ms(const struct bt_sched_params *params, const struct bt_sched_worker *w,
                             const struct bt_sched_request *req);

/* ---- the reasons for a plan's form ---- */
typedef enum { BT_SCHED_FOR_PREFILL, BT_SCHED_FOR_DECODE } bt_sched_use_t;
struct bt_sched_candidate {
    uint32_t worker; /* index in the snapshot */
    bt_sched_use_t use;
    bool chosen;
    const char *verdict;    /* static: "chosen", or why not */
    uint32_t cached_tokens; /* of the request, at its node */
    double queue_ms;        /* prefill only */
    double ttft_ms; /* predicted, for other workers than the chosen one without a fetch; < 0 for
                       decode, or without room */
    double tbt_ms; /* predicted, for other workers than the chosen one as of now; < 0 for prefill */
    double load;   /* decode only: share in use with this request; above 1 the request waits */
};
/* The candidates of policy's plan of (snap, req), the chosen ones first: every worker in each of
 * its roles; with policy baton also decode workers that could compute the prompt beside their rows.
 * plan: NULL if the request was rejected. Writes at most cap candidates, returns how many there
 * are. */
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
