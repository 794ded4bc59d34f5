/* One block cache and a trace: the hits of each eviction policy of the kvstore. The policies are
 * the kvstore's own objects (common/policy/evict/evict.h). */
#ifndef BT_CONDUCTOR_SIM_REPLAY_H
#define BT_CONDUCTOR_SIM_REPLAY_H

#include "common/base/base.h"
#include "common/policy/evict/evict.h"
#include "conductor/sim/cluster.h"
#include "conductor/sim/trace.h"

typedef enum {
    /* Every block of a request is looked up by itself, first to last, and cached if it is absent. A
     * block is a hit wherever it is in the request. The published tables count this way. */
    BT_SIM_REPLAY_SEQUENCE,
    /* The same as the kvstore: it uses the prefix up to the first gap, computes and caches the
     * rest, and the request releases its last block first. Partial blocks are never cached. */
    BT_SIM_REPLAY_REQUEST
} bt_sim_replay_t;

struct bt_sim_replay_options {
    bt_sim_replay_t mode;
    double from, to; /* the requests that are counted, as shares; those before warm the cache */
    const struct bt_sim_cluster *cluster;                    /* gives the cost of a prefill */
    void (*progress)(void *arg, uint32_t done, uint32_t of); /* may be NULL */
    void *arg;
};

struct bt_sim_replay_result {
    uint64_t blocks, hit_blocks;                /* looked up, found anywhere in the chain */
    uint64_t tokens, hit_tokens, prefix_tokens; /* of prompts; in found blocks; before a hole */
    double prefill_s, saved_s;  /* of all prompts without a cache; less with the prefixes found */
    uint64_t evicted, headless; /* blocks given up; of those, while one behind was cached */
    uint64_t events;            /* calls of the policy */
    double wall_s;              /* time of the whole replay */
};

/* Is a capacity (0: unlimited) enough for the longest request? ERR_INVALID: it is not, said in err.
 */
bt_status_t bt_sim_replay_check(const struct bt_sim_trace *t, uint32_t n_blocks, char *err,
                                size_t err_cap);
/* policy NULL: Belady's optimum, which knows the future (sequence only). n_blocks: capacity, more
 * than the longest request has; 0: unlimited. ERR_INVALID: too small a capacity, said in err. */
bt_status_t bt_sim_replay(const struct bt_sim_trace *t, const struct bt_evict_policy *policy,
                          uint32_t n_blocks, const struct bt_sim_replay_options *o,
                          struct bt_sim_replay_result *r, char *err, size_t err_cap) BT_MUST_CHECK;

#endif
