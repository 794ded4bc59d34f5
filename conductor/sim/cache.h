/* The block caches of the simulated nodes. Each is a slab with one of the kvstore's own eviction
 * policies (common/policy/evict/evict.h), and may have an SSD below it (disk.h). For a chain of
 * blocks it finds the length of the cached prefix on all nodes at once. */
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
/* match: [n_nodes], written: how many of blocks[0, n) the node has, in the slab or on the SSD,
 * without a gap from the first on. */
void bt_sim_caches_match(const struct bt_sim_caches *c, const uint32_t *blocks, uint32_t n,
                         uint32_t *match);
bool bt_sim_caches_has(const struct bt_sim_caches *c, uint32_t node, uint32_t block);
/* Begins to read the cached part of the prefix of blocks[0, n) that lies only on the SSD. Returns
 * the time when all of it will be in memory; ms. */
double bt_sim_caches_read(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                          uint32_t n, double now_ms);
/* A request uses the cached prefix of blocks[0, n) and holds it (it is not evicted) until
 * bt_sim_caches_put or _release of the same number of blocks. Blocks that lay only on the SSD are
 * in the slab from now on, as far as there is room. Returns the number of blocks; *ssd_p: how many
 * of them came from the SSD. */
uint32_t bt_sim_caches_use(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                           uint32_t n, double now_ms, uint32_t *ssd_p);
void bt_sim_caches_release(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                           uint32_t n);

struct bt_sim_put {
    const uint32_t *blocks; /* the request's full ones, [n] */
    uint32_t n, held; /* held: blocks held by bt_sim_caches_use; bt_sim_caches_put releases them */
    uint32_t copied, copied_end; /* [copied, copied_end) came from another node */
};
/* Caches the missing blocks of a request, as far as there is room beside held blocks. The request
 * releases all of them, its last block first, as in the kvstore. */
void bt_sim_caches_put(struct bt_sim_caches *c, uint32_t node, const struct bt_sim_put *p,
                       double now_ms);
/* Empties the node's slab, also of held blocks. Its SSD keeps its content. */
void bt_sim_caches_clear(struct bt_sim_caches *c, uint32_t node);
uint64_t bt_sim_caches_replicas(const struct bt_sim_caches *c); /* blocks in slabs, all nodes */
double bt_sim_caches_written(const struct bt_sim_caches *c);    /* bytes, to all SSDs */

#endif
