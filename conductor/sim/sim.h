/* A cluster in simulated time that is scheduled by the conductor's own policies
 * (common/policy/sched). Discrete events; the same trace, options and seed give the same result to
 * the last digit.
 *
 * The model:
 *   - A node runs the worker's batcher (common/batch) step by step; only steps of rows alone are
 *     summed in closed form.
 *   - The conductor's knowledge of a node comes from the conductor's own code: the prompts that it
 *     has sent there, rolled forward (common/policy/sched/backlog.h), heartbeats that are never
 *     old, and the times of first tokens there (learn.h).
 *   - A prefill node uses the prefix that it has when the prompt's first step begins. Blocks that
 *     the plan fetches come from another node; the prompt waits for them while others are computed.
 *     Full blocks are then in the node's cache, with the kvstore's own eviction policy.
 *   - Where nodes have an SSD (disk.h), blocks that lie only there are read from the moment when
 *     the request is placed. The computing waits for them, and they are in the slab again. The
 *     scheduler does not know which blocks these are.
 *   - The KV streams to the decode node during the prefill. A link has two ends. Each end serves
 *     transfers in order of arrival, and a transfer is over when both ends have done their part.
 *   - A decode node steps with all its rows (continuous batching). A row joins at the beginning of
 *     a step when its KV has landed and pages for its prompt and answer are free.
 *   - If the plan leaves a prompt to its decode node, that node computes a chunk in each step
 * beside the rows. Another decode node computes it in whole chunks, as long as it has no row and
 * none on its way.
 *   - Lengths of answers are the trace's; policies do not see them.
 *   - A node that fails loses its slab and its work. Two seconds later its requests are planned
 *     again with the tokens that they have given out, without admission.
 */
#ifndef BT_CONDUCTOR_SIM_SIM_H
#define BT_CONDUCTOR_SIM_SIM_H

#include "common/policy/evict/evict.h"
#include "common/policy/sched/sched.h"
#include "conductor/sim/cluster.h"
#include "conductor/sim/disk.h"
#include "conductor/sim/trace.h"

struct bt_sim_failure {
    double at_ms, down_ms; /* down_ms later it is back, its cache empty */
    uint32_t node;         /* prefill nodes, then decode nodes */
};

struct bt_sim_options {
    const struct bt_sched_policy *policy;
    const struct bt_sched_admission *admission;
    const struct bt_evict_policy
        *eviction;            /* of the nodes' caches; NULL: density, the kvstore's default */
    bt_sim_write_t ssd_write; /* what their SSDs get */
    double rate;              /* speed of the trace: 2 is twice as fast */
    double from, to;          /* part of the trace, shares of its requests: 0 to 1 */
    uint64_t seed;            /* ties and the random policy */
    uint32_t ttft_ms, tbt_ms; /* objectives, of admission and of goodput */
    double fetch_ratio, work_weight, demand_price;
    double late_wait_ms;  /* baton: late requests wait at most so long; 0: they are refused */
    double mixed_step_ms; /* decode nodes fill their steps with prompt tokens up to this; 0: not */
    double pack_share;    /* rows are packed up to this share of the TBT objective; 0: spread */
    double mixed_gap_ms;  /* ... and the first gap of a row is at most this; 0: no limit */
    double life_ms;       /* decode time expected of a request, until some have ended */
    bool lengths;   /* how long answers get is learned by class of prompt, as the conductor does */
    bool one_token; /* every answer is one token: prefill alone */
    double roles_window_ms; /* roles by load, averaged over so long (roles.h); 0: they are fixed */
    double replica_bytes_per_s, replica_uses; /* copies ahead of need (sched/copies.h); 0: none */
    const struct bt_sim_failure *failures;
    uint32_t n_failures;
    double sample_ms;                                        /* of the series; 0: none */
    void (*progress)(void *arg, uint32_t done, uint32_t of); /* NULL: none */
    void *progress_arg;
};

typedef enum {
    BT_SIM_PENDING = 0,
    BT_SIM_SERVED,
    BT_SIM_REFUSED_TTFT,   /* at arrival */
    BT_SIM_REFUSED_TBT,    /* at arrival */
    BT_SIM_REFUSED_PRICE,  /* at arrival: too long a prefill for the queue */
    BT_SIM_REFUSED_DECODE, /* after its prefill, which was for nothing */
    BT_SIM_REFUSED_OTHER,  /* fits nowhere */
    BT_SIM_LOST,           /* its node failed, and for a minute no other could take it */
    BT_SIM_OUTCOMES
} bt_sim_outcome_t;
extern const char *const bt_sim_outcome_names[BT_SIM_OUTCOMES];

struct bt_sim_record {                     /* of one request */
    double at_ms, ttft_ms, tbt_ms, end_ms; /* tbt: mean of the longest 10 % of gaps; 0: one token */
    double plan_ttft_ms, plan_tbt_ms;
    uint32_t cached_tokens, fetched_tokens;
    uint32_t prefill, decode; /* nodes: prefill nodes, then decode nodes, as they were at first */
    bt_sim_outcome_t outcome;
};

struct bt_sim_sample { /* every sample_ms */
    double at_ms;
    double prefill_load, decode_load; /* mean queue / TTFT objective; mean step / TBT objective */
    uint32_t arrived, refused;        /* since the last one */
    uint32_t prefill_nodes;           /* in that role */
    uint64_t replicas;                /* blocks cached, over all nodes */
};

struct bt_sim_result {
    struct bt_sim_record *records; /* [n], in the order of the trace */
    uint32_t n;
    struct bt_sim_sample *samples;
    uint32_t n_samples;
    double span_ms; /* first to last arrival */
    double end_ms;  /* the last token */
    /* of the requests that were prefilled; of the cached ones fetched came from others, ssd from
     * the node's own SSD */
    uint64_t input_tokens, cached_tokens, fetched_tokens, ssd_tokens;
    double bytes_fetch, bytes_handoff, bytes_load, bytes_written; /* written: to SSDs */
    double prefill_busy_ms, wasted_ms; /* sum over nodes; of prefills refused afterwards */
    double prefill_node_ms;            /* time of nodes in that role */
    uint64_t decode_steps;
    uint32_t role_changes;
    uint32_t copies; /* of hot prefixes, ahead of need */
    double bytes_copied;
    uint32_t background;    /* admitted to be late */
    uint32_t replans;       /* of requests whose node failed */
    uint32_t mixed_prompts; /* computed by the node that decodes them */
};

void bt_sim_run(const struct bt_sim_cluster *cluster, const struct bt_sim_trace *trace,
                const struct bt_sim_options *o, struct bt_sim_result *r);
void bt_sim_result_cleanup(struct bt_sim_result *r);

#endif
