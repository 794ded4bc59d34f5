/* The block caches of the simulated nodes, each a slab governed by one of the kvstore's own
 * eviction policies (common/policy/evict/evict.h) and, if there is one, an SSD below it (disk.h).
 * Finds for a chain of blocks how long its prefix is on every node at once. */
#ifndef BT_CONDUCTOR_SIM_CACHE_H
#define BT_CONDUCTOR_SIM_CACHE_H

#include "common/base/base.h"
#include "common/policy/evict/evict.h"
#include "conductor/sim/disk.h"

struct bt_sim_caches;

/* capacity: blocks of each node's slab, 0: all. Block ids are below n_unique. disk: of each node;
 * NULL: none. */
struct bt_sim_caches *bt_sim_caches_create(uint32_t n_nodes, uint32_t capacity, uint32_t n_unique,
                                           const struct bt_evict_policy *policy,
                                           const struct bt_sim_disk_config *disk);
void bt_sim_caches_destroy(struct bt_sim_caches *c);
/* match: [n_nodes], written: how many of blocks[0, n) are there, in the slab or on the SSD, without
 * a hole from the first on. */
void bt_sim_caches_match(const struct bt_sim_caches *c, const uint32_t *blocks, uint32_t n,
                         uint32_t *match);
uint32_t bt_sim_caches_match_one(const struct bt_sim_caches *c, uint32_t node,
                                 const uint32_t *blocks, uint32_t n);
bool bt_sim_caches_has(const struct bt_sim_caches *c, uint32_t node, uint32_t block);
/* What of the prefix of blocks[0, n) that is there lies on the SSD alone begins to be read. Returns
 * when all of it will be in memory; ms. */
double bt_sim_caches_read(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                          uint32_t n, double now_ms);
/* A request uses the prefix of blocks[0, n) that is there, and holds it (it does not leave
 * meanwhile) until bt_sim_caches_put or _release of as many. What lay on the SSD alone is in the
 * slab from now on, as far as there is room. Returns how many; *ssd_p: of these from the SSD. */
uint32_t bt_sim_caches_use(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                           uint32_t n, double now_ms, uint32_t *ssd_p);
void bt_sim_caches_release(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                           uint32_t n);

struct bt_sim_put {
    const uint32_t *blocks;      /* the request's full ones, [n] */
    uint32_t n, held;            /* of these held by bt_sim_caches_use; let go of by the put */
    uint32_t copied, copied_end; /* [copied, copied_end) came from another node */
};
/* What is not there yet of a request's blocks is cached now, as far as there is room beside what is
 * held. The request lets go of all of them, its last block first, as the kvstore does. */
void bt_sim_caches_put(struct bt_sim_caches *c, uint32_t node, const struct bt_sim_put *p,
                       double now_ms);
/* The node's slab is empty, whoever holds something there; what is on its SSD stays. */
void bt_sim_caches_clear(struct bt_sim_caches *c, uint32_t node);
uint64_t bt_sim_caches_replicas(const struct bt_sim_caches *c); /* blocks in slabs, all nodes */
double bt_sim_caches_written(const struct bt_sim_caches *c);    /* bytes, to all SSDs */

#endif
