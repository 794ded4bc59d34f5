/* All requests of a conductor: how main creates the machine behind request.h, drains and ends it.
 * Loop thread. */
#ifndef BT_CONDUCTOR_REQUESTS_H
#define BT_CONDUCTOR_REQUESTS_H

#include "common/kv/key.h"
#include "common/metrics/metrics.h"
#include "common/policy/sched/sched.h"
#include "conductor/request/request.h"

struct bt_loop;
struct bt_trace;
struct bt_view;

struct bt_requests_config { /* copied */
    const struct bt_sched_policy *policy;
    const struct bt_sched_admission *admission; /* NULL: priced */
    struct bt_sched_params sched;
    uint32_t max_running, max_waiting;
    uint32_t max_overtaking;   /* requests of higher classes beyond max_running, at most as many as
                                  lower classes have within it */
    uint32_t no_worker_ms;     /* how long a request waits for workers before its 503 */
    uint32_t queue_timeout_ms; /* how long it waits for a place or for room; 0: no limit */
    uint32_t stall_ms; /* without a token and other finished work for this time, the worker hangs */
    uint32_t settle_ms; /* after the last token, for the numbers that usage reports */
    uint32_t ended_ms;  /* how long a worker may take to say that a request is quiet */
    uint32_t max_replans;
    uint32_t role_move_ms; /* how long requests may stay on a worker that gives up their role */
    double replica_bytes_per_s; /* for copies of hot prefixes ahead of need; 0: none are made */
    uint32_t replica_uses;      /* within a minute, for each copy */
    uint32_t block_tokens;
    uint32_t token_bytes;  /* KV of one token */
    uint32_t vocab;        /* token ids of a prompt must be below; 0: not checked */
    struct bt_kv_key root; /* shared (saltless) root */
    const uint8_t *secret; /* cluster secret of tenant salts; copied */
    size_t secret_len;
    const char *model_name; /* label of metrics; copied */
};

/* Sets the ops of the view. tok, view and metrics outlive it. */
struct bt_requests *bt_requests_create(struct bt_loop *loop, struct bt_view *view,
                                       const struct bt_tokenizer *tok,
                                       const struct bt_requests_config *conf,
                                       struct bt_metrics *metrics);
/* Spans of traced requests go to t from now on. model: in their names. Both outlive rs. */
void bt_requests_set_trace(struct bt_requests *rs, struct bt_trace *t, const char *model);
/* Ends everything with on_error(503). Workers are told, without waiting for them. */
void bt_requests_destroy(struct bt_requests *rs);
/* Sets the parameters for requests that are planned from now on. None may be NULL. */
void bt_requests_set_sched(struct bt_requests *rs, const struct bt_sched_policy *policy,
                           const struct bt_sched_admission *admission,
                           const struct bt_sched_params *sched);
/* New requests get 503 from now on; open ones go on. */
void bt_requests_drain(struct bt_requests *rs);

/* The present configuration, without strings and the secret. */
const struct bt_requests_config *bt_requests_config(const struct bt_requests *rs);

struct bt_requests_stats {
    uint32_t running, waiting; /* planned and submitted; queued or without a worker yet */
    uint32_t open; /* all requests that exist, also those whose workers are still ending */
    uint64_t total, replanned;
    /* since the start: complete answers, of these in time for their objectives, errors, 429 */
    uint64_t finished, in_time, failed, refused;
    uint64_t prompt_tokens, cached_tokens, tokens; /* as the metrics of vLLM's names count them */
    double ttft_ms, tbt_ms;                        /* sums over the finished ones */
};
void bt_requests_stats(const struct bt_requests *rs, struct bt_requests_stats *out);

/* Root of a tenant's chains: the shared root with HMAC(secret, tenant, salt). */
void bt_requests_salted_root(const struct bt_kv_key *root, const uint8_t *secret, size_t secret_len,
                             const char *tenant, const char *cache_salt, struct bt_kv_key *out);

#endif
