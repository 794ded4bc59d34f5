/* The two tiers of one node: which blocks of the slab are written to the SSD, and when they come
 * back. Control thread, except the CRCs.
 *
 * Write policies (kvstore.ssd.write_policy):
 * - second_use: a block is written when a second request uses it, in the slab or computed again.
 * Three blocks of four are used once and cause no wear.
 * - evict: a block is written before the slab evicts it, as far as the disk keeps up.
 * - always: a block is written as soon as it is sealed, or when its turn comes.
 *
 * No request waits for a write. A block waits for its turn in the slab and stays unwritten if it
 * is evicted first. Blocks of pass-through prompts hold a slot until they are written; their
 * worker waits for that. */
#ifndef BT_KVSTORE_CACHE_TIER_H
#define BT_KVSTORE_CACHE_TIER_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "kvstore/cache/cache.h"
#include "kvstore/ssd/ssd.h"

typedef enum { BT_TIER_SECOND_USE, BT_TIER_EVICT, BT_TIER_ALWAYS } bt_tier_policy_t;

struct bt_tier;
struct bt_tier_read; /* blocks on their way into the slab */
struct bt_tier_save; /* a block on its way through the slab to the SSD */

struct bt_tier_config {
    struct bt_loop *loop;
    struct bt_cache *cache;
    struct bt_slab *slab;
    uint32_t block_tokens;
    bt_tier_policy_t policy;
    uint64_t load_ms;           /* longest wait for blocks of the SSD */
    struct bt_metrics *metrics; /* may be NULL */
};

/* Fills in loop, slab, segment_crc, on_change, arg, metrics and tenants of ssd. Statuses and err
 * as of bt_ssd_open. */
bt_status_t bt_tier_create(const struct bt_tier_config *c, const struct bt_ssd_config *ssd,
                           struct bt_tier **t_p, char *err, size_t err_cap) BT_MUST_CHECK;
/* Call after every bt_tier_read_end and before bt_cache_destroy. */
void bt_tier_destroy(struct bt_tier *t);

/* Reads the blocks of the chain keys[0..n) that are on the SSD into the slab, up to the first
 * block that neither tier has. done is called once, later: when every block has arrived or failed,
 * or when load_ms have passed. The blocks stay leased until bt_tier_read_end. passing: blocks that
 * were read leave the slab then, unless other requests use them. NULL: there is nothing to read,
 * and done is not called. */
struct bt_tier_read *bt_tier_read(struct bt_tier *t, const struct bt_kv_key *keys, uint32_t n,
                                  bool passing, void (*done)(void *arg), void *arg);
/* Drops the leases. done is not called any more. */
void bt_tier_read_end(struct bt_tier_read *l);

/* Writes a cached block that is not on the SSD, whatever the policy says. AGAIN: the disk is busy.
 */
bt_status_t bt_tier_save(struct bt_tier *t, uint32_t slot) BT_MUST_CHECK;

/* Does the policy want a block of a pass-through prompt on the SSD? With second_use the first call
 * counts as the first use. OK: yes. ERR_EXISTS: it is there, or not used often enough.
 * ERR_EXHAUSTED: one prompt may use half of the SSD, and the block lies beyond that.
 * ERR_UNAVAILABLE: the SSD is not in use. */
bt_status_t bt_tier_admit(struct bt_tier *t, const struct bt_kv_key *key,
                          uint32_t depth) BT_MUST_CHECK;
/* Writes a sealed, admitted block when its turn comes. The caller keeps the slot leased until
 * done, which is called once, later, with the status of bt_ssd_write. NULL: it cannot be written.
 */
struct bt_tier_save *bt_tier_pass(struct bt_tier *t, uint32_t slot,
                                  void (*done)(void *arg, bt_status_t st), void *arg);
/* done will not be called. */
void bt_tier_pass_forget(struct bt_tier_save *v);
/* Saves a cached block of such a prompt's beginning, without which the blocks behind would never
 * be found. If the policy wants it (evict always does), the block stays leased until it is
 * written. */
void bt_tier_save_beginning(struct bt_tier *t, uint32_t slot);
/* Slots that are leased for this. */
uint32_t bt_tier_beginnings(const struct bt_tier *t);

/* The SSD, for inventories, statistics and protection. */
struct bt_ssd *bt_tier_ssd(const struct bt_tier *t);
/* Calls fn for every block that can be found on the SSD from now on, or no longer
 * (bt_ssd_config.on_change). At most BT_TIER_OBSERVERS. fn NULL: removes the observer with this
 * arg. */
#define BT_TIER_OBSERVERS 2
void bt_tier_observe(struct bt_tier *t,
                     void (*fn)(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key,
                                uint32_t depth),
                     void *arg);

#endif
