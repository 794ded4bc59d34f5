/* The block caches of the simulated nodes: least recently used goes first. Finds for a chain of
 * blocks how long its prefix is on every node at once. */
#ifndef BT_CONDUCTOR_SIM_CACHE_H
#define BT_CONDUCTOR_SIM_CACHE_H

#include "common/base/base.h"

struct bt_sim_caches;

/* capacity: blocks of each node, 0: all. Block ids are below n_unique. */
struct bt_sim_caches *bt_sim_caches_create(uint32_t n_nodes, uint32_t capacity, uint32_t n_unique);
void bt_sim_caches_destroy(struct bt_sim_caches *c);
/* match: [n_nodes], written: how many of blocks[0, n) are there without a hole from the first on.
 */
void bt_sim_caches_match(const struct bt_sim_caches *c, const uint32_t *blocks, uint32_t n,
                         uint32_t *match);
uint32_t bt_sim_caches_match_one(const struct bt_sim_caches *c, uint32_t node,
                                 const uint32_t *blocks, uint32_t n);
bool bt_sim_caches_has(const struct bt_sim_caches *c, uint32_t node, uint32_t block);
/* All of the chain is there and is the youngest, its head youngest of all, so that tails go first;
 * what does not fit beside it has left. */
void bt_sim_caches_put(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks, uint32_t n);
uint64_t bt_sim_caches_replicas(const struct bt_sim_caches *c); /* blocks, over all nodes */

#endif
