/* The tiers of one node joined: which blocks of the slab are written to the SSD, and when blocks of
 * the SSD come back into the slab. Control thread, but for the CRCs.
 *
 * Write policies (kvstore.ssd.write_policy):
 *   second_use  a block is written when a second request uses it, found in the slab or computed
 *               anew after it was lost: what is used once (three blocks of four) wears no disk;
 *   evict       every block that the slab gives up is written first, as far as the disk keeps up;
 *   always      every block is written as soon as it is sealed, or when its turn comes.
 * Writing never holds up anybody: blocks wait for their turn in the slab, as long as they stay
 * there, and leave it unwritten if the disk does not keep up. Blocks of a prompt that no slab holds
 * pass through a few slots instead; who computes them waits for that (or gives them up). */
#ifndef BT_KVSTORE_CACHE_TIER_H
#define BT_KVSTORE_CACHE_TIER_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "kvstore/cache/cache.h"
#include "kvstore/ssd/ssd.h"

typedef enum { BT_TIER_SECOND_USE, BT_TIER_EVICT, BT_TIER_ALWAYS } bt_tier_policy_t;

struct bt_tier;
struct bt_tier_read; /* blocks on their way into the slab for somebody who waits */
struct bt_tier_save; /* a block on its way through the slab to the SSD */

struct bt_tier_config {
    struct bt_loop *loop;
    struct bt_cache *cache;
    struct bt_slab *slab;
    uint32_t block_tokens;
    bt_tier_policy_t policy;
    uint64_t load_ms;           /* nobody waits longer for blocks of the SSD */
    struct bt_metrics *metrics; /* may be NULL */
};

/* ssd: loop, slab, segment_crc, on_change, arg, metrics and tenants are filled in here. Statuses
 * and err as of bt_ssd_open. */
bt_status_t bt_tier_create(const struct bt_tier_config *c, const struct bt_ssd_config *ssd,
                           struct bt_tier **t_p, char *err, size_t err_cap) BT_MUST_CHECK;
/* Loads that are still waited for must have been cancelled. Before bt_cache_destroy. */
void bt_tier_destroy(struct bt_tier *t);

/* Brings what the SSD has of the chain keys[0..n) into the slab, up to the first block that is on
 * neither. done is called once, later: when all of it is there, has failed, or load_ms have passed;
 * until bt_tier_read_end the blocks stay leased. passing: those that are read leave the slab then,
 * unless others have come to use them. NULL: nothing would become resident, done will not be
 * called. */
struct bt_tier_read *bt_tier_read(struct bt_tier *t, const struct bt_kv_key *keys, uint32_t n,
                                  bool passing, void (*done)(void *arg), void *arg);
/* Lets go of the blocks; before done: done will not be called. */
void bt_tier_read_end(struct bt_tier_read *l);

/* Writes a cached block that is not on the SSD yet, whatever the policy. AGAIN: the disk is busy.
 */
bt_status_t bt_tier_save(struct bt_tier *t, uint32_t slot) BT_MUST_CHECK;

/* Is a block of a prompt that no slab holds to be written, by the policy? With second_use that
 * somebody has asked is remembered, and is the first use. OK: yes. ERR_EXISTS: it is there, or not
 * used often enough. ERR_EXHAUSTED: it lies beyond what one prompt may take of the SSD (half of
 * it). ERR_UNAVAILABLE: the SSD is not in use. */
bt_status_t bt_tier_admit(struct bt_tier *t, const struct bt_kv_key *key,
                          uint32_t depth) BT_MUST_CHECK;
/* Writes a sealed block that was admitted, whose slot the caller holds until done, as soon as its
 * turn comes; done is called once, later, with what bt_ssd_write's says. NULL: it cannot be
 * written. */
struct bt_tier_save *bt_tier_pass(struct bt_tier *t, uint32_t slot,
                                  void (*done)(void *arg, bt_status_t st), void *arg);
/* done will not be called. */
void bt_tier_pass_forget(struct bt_tier_save *v);
/* A cached block of such a prompt's beginning: without it what passes behind it would never be
 * found. If the policy is to write it, with evict in any case, it is leased until that is done: it
 * must not be evicted while it waits for its turn. */
void bt_tier_save_beginning(struct bt_tier *t, uint32_t slot);
/* Slots that are leased so. */
uint32_t bt_tier_beginnings(const struct bt_tier *t);

/* The SSD below, for inventories, statistics and protection. */
struct bt_ssd *bt_tier_ssd(const struct bt_tier *t);
/* Is told of every block that is found on the SSD or no longer (bt_ssd_config.on_change). At most
 * BT_TIER_OBSERVERS; fn NULL: arg's is told no more. */
#define BT_TIER_OBSERVERS 2
void bt_tier_observe(struct bt_tier *t,
                     void (*fn)(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key,
                                uint32_t depth),
                     void *arg);

#endif
