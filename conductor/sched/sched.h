/* Where a request runs: a policy looks at a snapshot of the cluster and returns a plan or a
 * rejection. PURE: no clock, allocation, lock, I/O or log; time, randomness and the snapshot are
 * arguments, so that the conductor, the simulator and the tests run the very same objects and a
 * recorded (snapshot, request) replays. */
#ifndef BT_CONDUCTOR_SCHED_H
#define BT_CONDUCTOR_SCHED_H

#include "common/base/base.h"

#define BT_SCHED_NONE UINT32_MAX

/* What one worker says of itself, and what this conductor has sent it since. */
struct bt_sched_worker {
    uint32_t node;    /* number of its node, only compared */
    uint32_t kvstore; /* index of its node's kvstore in the snapshot, BT_SCHED_NONE: none is up */
    bool prefill, decode; /* the role it runs in */
    bool avoid;           /* it has failed this request before: only if there is nobody else */
    bool draining;        /* its node is to be emptied: only if nobody else could do it at all */
    uint32_t running, waiting;
    uint32_t pages_total, pages_free; /* 0 total: not known */
    uint32_t slots_total, slots_free; /* 0 total: not known */
    uint32_t max_model_len;           /* 0: not known */
    uint64_t queued_prefill_tokens;
    double prefill_tokens_per_s; /* 0: not measured yet */
    double step_ms;              /* 0: not measured yet */
    /* of this conductor's own submissions; a heartbeat may not have counted them yet */
    uint32_t own_requests;
    uint64_t own_prefill_tokens;
};

struct bt_sched_kvstore {
    uint32_t node;
    bool avoid, draining;
    uint32_t slots_total, slots_free, slots_sealed; /* 0 total: not known */
    uint32_t match_blocks; /* full blocks of this request resident here, as far as the index says */
};

struct bt_sched_snapshot {
    const struct bt_sched_worker *workers;
    uint32_t n_workers;
    const struct bt_sched_kvstore *kvstores;
    uint32_t n_kvstores;
};

struct bt_sched_request {
    uint32_t n_tokens;  /* prompt, and what was generated in earlier epochs */
    uint32_t max_new;   /* of each choice */
    uint32_t n_choices; /* rows at the decode worker; 0 counts as 1 */
    uint32_t block_tokens;
    uint32_t token_bytes; /* of KV, over all layers */
    uint64_t random;      /* breaks ties */
};

struct bt_sched_params {
    uint32_t local_prefill_tokens; /* an uncached tail up to this is prefilled by the decode worker
                                      itself; 0: always apart */
    double prefill_tokens_per_s;   /* prior, until a worker has measured */
    double step_ms;                /* prior */
    double link_bytes_per_s;       /* between nodes */
    uint32_t ttft_objective_ms, tbt_objective_ms; /* 0: none */
};

typedef enum {
    BT_SCHED_PLANNED = 0,
    BT_SCHED_NO_PREFILL, /* nobody can prefill, as far as is known */
    BT_SCHED_NO_DECODE,
    BT_SCHED_NO_KVSTORE, /* workers, but not the kvstore of their node */
    BT_SCHED_TOO_LARGE,  /* will never fit, whoever is asked */
    BT_SCHED_OVERLOADED  /* an objective cannot be met */
} bt_sched_verdict_t;

struct bt_sched_plan {
    uint32_t prefill, decode;       /* indices of workers; equal: one worker does both */
    uint32_t kv_prefill, kv_decode; /* indices of kvstores; may be equal */
    bool both;
    bool keep; /* what the decode side receives enters its cache, otherwise it is freed once landed
                */
    bool draining;    /* it stays on a node that is to be emptied: nobody else could take it */
    bool last_resort; /* somebody is in it who is to be avoided: there was nobody else */
    uint32_t cached_tokens; /* expected at the prefill side */
    double ttft_ms, tbt_ms; /* predicted */
    const char *reason;     /* static: why disaggregated or not; a bounded metric label */
};

struct bt_sched_reject {
    bt_sched_verdict_t verdict;
    uint32_t retry_after_s; /* 0: do not retry */
    const char *reason;     /* static text */
};

/* A policy. place returns BT_SCHED_PLANNED and fills plan_p, or another verdict and fills
 * reject_p. */
struct bt_sched_policy {
    const char *name;
    bt_sched_verdict_t (*place)(const struct bt_sched_params *params,
                                const struct bt_sched_snapshot *snap,
                                const struct bt_sched_request *req, struct bt_sched_plan *plan_p,
                                struct bt_sched_reject *reject_p);
};

/* KVCache-centric placement after Algorithm 1 of Mooncake (FAST'25), without the fetch branch: the
 * prefill worker with the smallest predicted TTFT (queue + prefill of what is not cached on its
 * node + what the hand-off does not hide), the decode worker with the least load and pages. */
extern const struct bt_sched_policy bt_sched_cache_aware;
/* Ignores the caches: least load first. The baseline that the other is compared with. */
extern const struct bt_sched_policy bt_sched_least_load;

/* ---- why a plan is as it is ---- */
typedef enum { BT_SCHED_FOR_PREFILL, BT_SCHED_FOR_DECODE } bt_sched_use_t;
struct bt_sched_candidate {
    uint32_t worker; /* index in the snapshot */
    bt_sched_use_t use;
    bool chosen;
    const char *verdict;    /* static: "chosen", or why not */
    uint32_t cached_tokens; /* of the request, at its node */
    double queue_ms;        /* prefill only */
    double ttft_ms;         /* predicted; prefill only, else < 0 */
    double tbt_ms;          /* predicted; decode only, else < 0 */
    double load;            /* decode only: share in use with this request, above 1 it waits */
};
/* What was looked at for the plan of (snap, req): every worker in each use that it has, the chosen
 * ones first. plan: NULL if the request was rejected. Writes at most cap, returns how many there
 * are. */
uint32_t bt_sched_explain(const struct bt_sched_params *params,
                          const struct bt_sched_snapshot *snap, const struct bt_sched_request *req,
                          const struct bt_sched_plan *plan, struct bt_sched_candidate *out,
                          uint32_t cap);

/* Policy by name, NULL if there is none. */
const struct bt_sched_policy *bt_sched_policy_find(const char *name);
const char *bt_sched_verdict_name(bt_sched_verdict_t v); /* bounded metric label */

#endif
