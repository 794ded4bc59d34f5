/* The SSD tier: sealed blocks in a slab file, which are found again after a restart. It moves
 * blocks directly between slots of the slab and slots of the file. It knows nothing about
 * requests, leases or write policies; kvstore/cache/tier.h does. Control thread unless marked.
 *
 * A read returns the block that was written, or fails: segment CRCs, seeded with the key, are
 * computed again from the bytes of the disk. A block can be found once its bytes and its record
 * are durable. While a disk is full, fails or does not answer, calls fail (UNAVAILABLE, AGAIN).
 * This is reported once, and the disk is used again as soon as it answers. */
#ifndef BT_KVSTORE_SSD_SSD_H
#define BT_KVSTORE_SSD_SSD_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "common/policy/evict/tenants.h"
#include "common/slab/slab.h"
#include "kvstore/ssd/io.h"

struct bt_ssd;

struct bt_ssd_config {
    struct bt_loop *loop;
    const char *path; /* a folder on the SSD, for this kvstore alone */
    uint64_t bytes;   /* of the slab file */
    uint32_t queue_depth;
    uint32_t backlog_max;                 /* writes that wait or are under way */
    uint64_t probe_ms;                    /* between attempts to use a failed disk again */
    uint64_t stall_ms;                    /* an operation that takes longer shows a failed disk */
    const struct bt_evict_policy *policy; /* the eviction policy; NULL: LRU */
    struct bt_tenants *tenants;           /* NULL: no tenants */
    struct bt_slab *slab;
    struct bt_metrics *metrics;   /* may be NULL */
    const struct bt_ssd_sys *sys; /* NULL but in tests */
    /* ANY THREAD. CRC of a segment of a slab slot, stored in the slab's CRC row. */
    uint32_t (*segment_crc)(void *arg, uint32_t slot, uint32_t layer, const struct bt_kv_key *key);
    /* A block can be found now, or cannot any more; pos: its slot in the file. May be NULL. Not
     * called within bt_ssd_close. */
    void (*on_change)(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key,
                      uint32_t depth);
    void *arg;
};

/* Opens or makes the tier and recovers its durable blocks. ERR_CONFIG: the folder cannot be used;
 * err gives the reason and the remedy. A full or broken disk does not make this fail: the fault is
 * reported, the tier stays empty, and opening is tried again at growing intervals. */
bt_status_t bt_ssd_open(const struct bt_ssd_config *c, struct bt_ssd **s_p, char *err,
                        size_t err_cap) BT_MUST_CHECK;
/* Waits for reads and writes under way; the others end with ERR_CANCELLED. Every done runs inside.
 */
void bt_ssd_close(struct bt_ssd *s);

/* st: OK, ERR_IO, ERR_DATA_LOSS (reads), ERR_CANCELLED. The slab slot is the caller's again. */
typedef void (*bt_ssd_done_fn)(void *arg, bt_status_t st);

bool bt_ssd_has(const struct bt_ssd *s, const struct bt_kv_key *key);
/* The same, but true also while the disk fails: the block can be read when the disk works again.
 * bt_ssd_at lists these blocks. */
bool bt_ssd_keeps(const struct bt_ssd *s, const struct bt_kv_key *key);
/* Position of the block in the file, UINT32_MAX: it is not there. */
uint32_t bt_ssd_find(const struct bt_ssd *s, const struct bt_kv_key *key);
/* Keeps the block from eviction until it is unprotected. Each protect needs one unprotect, at the
 * latest inside the on_change that says that the block cannot be found any more. */
void bt_ssd_protect(struct bt_ssd *s, uint32_t pos);
void bt_ssd_unprotect(struct bt_ssd *s, uint32_t pos);
/* slots of the file; 0 until it is open */
uint32_t bt_ssd_slots(const struct bt_ssd *s);
/* Group of the tenant whose block is at pos; it can be found. */
uint8_t bt_ssd_group(const struct bt_ssd *s, uint32_t pos);
/* Blocks of a group that can be found. */
uint32_t bt_ssd_used(const struct bt_ssd *s, uint8_t group);
/* Writes the block of a sealed slab slot, whose bytes must not change until done. done is called
 * only after OK. ERR_EXISTS: it is written or being written. AGAIN: the backlog is full or no slot
 * is free. ERR_UNAVAILABLE: the disk is not in use. */
bt_status_t bt_ssd_write(struct bt_ssd *s, uint32_t slab_slot, const struct bt_kv_key *key,
                         uint32_t depth, uint8_t group, bt_ssd_done_fn done,
                         void *arg) BT_MUST_CHECK;
/* Reads a block into a WRITING slab slot of the caller; *depth_p: its ordinal. After done with OK
 * the slot's CRC row is valid. ERR_NOT_FOUND. AGAIN: it is being read already. ERR_UNAVAILABLE. A
 * block with a wrong CRC is removed. */
bt_status_t bt_ssd_read(struct bt_ssd *s, const struct bt_kv_key *key, uint32_t slab_slot,
                        uint32_t *depth_p, bt_ssd_done_fn done, void *arg) BT_MUST_CHECK;

struct bt_ssd_stats {
    const char *io; /* what reads and writes: io_uring or threads; NULL: not open */
    uint32_t slots, blocks, backlog, reading;
    bool up;
    uint64_t written, read, written_bytes, read_bytes, evicted, dropped, read_errors, write_errors,
        crc_errors, recovered;
};
void bt_ssd_stats(const struct bt_ssd *s, struct bt_ssd_stats *st_p);
/* The block at position pos of the file, NULL: none there. For inventories: 0..slots-1. */
const struct bt_kv_key *bt_ssd_at(const struct bt_ssd *s, uint32_t pos, uint32_t *depth_p);

#endif
