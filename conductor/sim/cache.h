/* The block caches of the simulated nodes, each governed by one of the kvstore's own eviction
 * policies (kvstore/evict.h). Finds for a chain of blocks how long its prefix is on every node at
 * once. */
#ifndef BT_CONDUCTOR_SIM_CACHE_H
#define BT_CONDUCTOR_SIM_CACHE_H

#include "common/base/base.h"
#include "kvstore/evict.h"

struct bt_sim_caches;

/* capacity: blocks of each node, 0: all. Block ids are below n_unique. */
struct bt_sim_caches *bt_sim_caches_create(uint32_t n_nodes, uint32_t capacity, uint32_t n_unique,
                                           const struct bt_evict_policy *policy);
void bt_sim_caches_destroy(struct bt_sim_caches *c);
/* match: [n_nodes], written: how many of blocks[0, n) are there without a hole from the first on.
 */
void bt_sim_caches_match(const struct bt_sim_caches *c, const uint32_t *blocks, uint32_t n,
                         uint32_t *match);
uint32_t bt_sim_caches_match_one(const struct bt_sim_caches *c, uint32_t node,
                                 const uint32_t *blocks, uint32_t n);
bool bt_sim_caches_has(const struct bt_sim_caches *c, uint32_t node, uint32_t block);
/* A request uses the prefix of blocks[0, n) that is there, and holds it (it does not leave
 * meanwhile) until bt_sim_caches_put or _release of as many. Returns how many. */
uint32_t bt_sim_caches_use(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                           uint32_t n);
void bt_sim_caches_release(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                           uint32_t n);

struct bt_sim_put {
    const uint32_t *blocks;      /* the request's full ones, [n] */
    uint32_t n, held;            /* of these held by bt_sim_caches_use; let go of by the put */
    uint32_t copied, copied_end; /* [copied, copied_end) came from another node */
};
/* What is not there yet of a request's blocks is cached now, as far as there is room beside what is
 * held. The request lets go of all of them, its last block first, as the kvstore does. */
void bt_sim_caches_put(struct bt_sim_caches *c, uint32_t node, const struct bt_sim_put *p);
/* The node's cache is empty, whoever holds something there. */
void bt_sim_caches_clear(struct bt_sim_caches *c, uint32_t node);
uint64_t bt_sim_caches_replicas(const struct bt_sim_caches *c); /* blocks, over all nodes */

#endif
