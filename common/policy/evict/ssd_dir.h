/* Directory of the SSD's slab file: which block lies in which slot, and which slot is given up
 * next, by an eviction policy (common/policy/evict/evict.h). It is all in memory; kvstore/ssd/db.h
 * keeps the durable copy. Pure, one owner thread.
 *
 *   FREE --take--> BUSY --add--> VALID --remove--> BUSY --free--> FREE
 *
 * A BUSY slot is being written, or its record is being deleted. Only VALID slots are found. A
 * VALID slot that is being read, or that an operator has pinned, is never the victim. */
#ifndef BT_POLICY_EVICT_SSD_DIR_H
#define BT_POLICY_EVICT_SSD_DIR_H

#include "common/base/base.h"
#include "common/kv/key.h"
#include "common/policy/evict/quota.h"

#define BT_SSD_NONE UINT32_MAX

struct bt_ssd_dir;

/* Moments are sixteenths of a second since the start of 2026. They wrap around after 8.5 years, so
 * two moments can be compared if they are less than 4.25 years apart. */
#define BT_SSD_TICKS_S 16u
#define BT_SSD_EPOCH_S 1767225600u /* of 1970 */

/* The moment of a wall-clock time in ns, or in whole seconds. */
static inline uint32_t bt_ssd_moment(uint64_t real_ns)
{
    return (uint32_t)(real_ns / (1000000000u / BT_SSD_TICKS_S)) - BT_SSD_EPOCH_S * BT_SSD_TICKS_S;
}
static inline uint32_t bt_ssd_moment_s(uint32_t real_s)
{
    return (real_s - BT_SSD_EPOCH_S) * BT_SSD_TICKS_S;
}
/* Ticks from b to a; below zero: b is later. */
static inline int32_t bt_ssd_since(uint32_t a, uint32_t b)
{
    return (int32_t)(a - b);
}

/* A block on the SSD. */
struct bt_ssd_entry {
    struct bt_kv_key key;
    uint32_t depth : 24; /* ordinal in its chain */
    uint32_t group : 8;  /* tenant's (common/policy/evict/tenants.h); the durable record has its tag
                            instead */
    uint32_t digest;     /* CRC32C over the row of segment CRCs, seeded with the key */
    uint32_t generation; /* of the slot: rises with every write */
    uint32_t used;       /* moment of the last use in its record */
};

/* tenants: NULL without quotas; outlives it. */
struct bt_ssd_dir *bt_ssd_dir_create(uint32_t n_slots, const struct bt_evict_policy *policy,
                                     struct bt_tenants *tenants);
void bt_ssd_dir_destroy(struct bt_ssd_dir *d);

/* VALID slot of key, or BT_SSD_NONE. */
uint32_t bt_ssd_dir_find(const struct bt_ssd_dir *d, const struct bt_kv_key *key);
/* Entry of a slot that is not FREE. */
const struct bt_ssd_entry *bt_ssd_dir_entry(const struct bt_ssd_dir *d, uint32_t slot);

/* FREE -> BUSY with a new generation; BT_SSD_NONE when none is free. The slot counts for the group
 * from now on: while a slow disk writes its blocks, a tenant must not take the slots of others. */
uint32_t bt_ssd_dir_take(struct bt_ssd_dir *d, uint8_t group);
/* Takes this FREE slot -> BUSY, for recovery. false: it is not free. */
bool bt_ssd_dir_claim(struct bt_ssd_dir *d, uint32_t slot, uint32_t generation);
/* BUSY -> VALID, just used; generation stays the slot's. The key must not be there. */
void bt_ssd_dir_add(struct bt_ssd_dir *d, uint32_t slot, const struct bt_ssd_entry *e);
/* The same at the start, for a block that was there before. This does not count as a use. Call it
 * in the order of the last uses. */
void bt_ssd_dir_restore(struct bt_ssd_dir *d, uint32_t slot, const struct bt_ssd_entry *e);
/* VALID -> BUSY: the block cannot be found any more. */
void bt_ssd_dir_remove(struct bt_ssd_dir *d, uint32_t slot);
/* BUSY -> FREE. */
void bt_ssd_dir_free(struct bt_ssd_dir *d, uint32_t slot);

/* A VALID slot was used. */
void bt_ssd_dir_touch(struct bt_ssd_dir *d, uint32_t slot);
/* The record's last use is now this moment. */
void bt_ssd_dir_set_used(struct bt_ssd_dir *d, uint32_t slot, uint32_t used);
void bt_ssd_dir_pin(struct bt_ssd_dir *d, uint32_t slot); /* counted to 255; any state but FREE */
void bt_ssd_dir_unpin(struct bt_ssd_dir *d, uint32_t slot);
/* The VALID slot to give up first: of a tenant beyond its quota, else by the policy. BT_SSD_NONE:
 * all are pinned. */
uint32_t bt_ssd_dir_victim(const struct bt_ssd_dir *d);

/* VALID slots of a group, and those that were taken for it. */
uint32_t bt_ssd_dir_used(const struct bt_ssd_dir *d, uint8_t group);
uint32_t bt_ssd_dir_valid(const struct bt_ssd_dir *d);
uint32_t bt_ssd_dir_free_count(const struct bt_ssd_dir *d);
bool bt_ssd_dir_is_valid(const struct bt_ssd_dir *d, uint32_t slot);

#endif
