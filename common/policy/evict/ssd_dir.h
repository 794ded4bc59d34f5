/* Directory of the SSD slab: which block lies in which slot of the file, and, by an eviction policy
 * (common/policy/evict/evict.h), which slot is given up next. All of it is in memory;
 * kvstore/ssd/db.h keeps the durable copy. Pure, one owner thread.
 *
 *   FREE --take--> BUSY --add--> VALID --remove--> BUSY --free--> FREE
 *
 * BUSY is a slot whose bytes or whose record are under way: being written, or being forgotten. Only
 * VALID slots are found. A VALID slot that is being read, or that a pin of an operator protects, is
 * pinned and never the victim. */
#ifndef BT_POLICY_EVICT_SSD_DIR_H
#define BT_POLICY_EVICT_SSD_DIR_H

#include "common/base/base.h"
#include "common/kv/key.h"
#include "common/policy/evict/quota.h"

#define BT_SSD_NONE UINT32_MAX

struct bt_ssd_dir;

/* Moments are counted in sixteenths of a second since the start of 2026 and wrap around after 8.5
 * years: which of two is later is certain if they are less than 4.25 years apart. */
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

/* What is known of a block on the SSD. */
struct bt_ssd_entry {
    struct bt_kv_key key;
    uint32_t depth : 24; /* ordinal in its chain */
    uint32_t group : 8;  /* tenant's (common/policy/evict/tenants.h); the durable record has his tag
                            instead */
    uint32_t digest;     /* CRC32C over the row of segment CRCs, seeded with the key */
    uint32_t generation; /* of the slot: rises with every write */
    uint32_t used;       /* moment of the last use that its record tells of */
};

/* tenants: NULL without quotas; outlives it. */
struct bt_ssd_dir *bt_ssd_dir_create(uint32_t n_slots, const struct bt_evict_policy *policy,
                                     struct bt_tenants *tenants);
void bt_ssd_dir_destroy(struct bt_ssd_dir *d);

/* VALID slot of key, or BT_SSD_NONE. */
uint32_t bt_ssd_dir_find(const struct bt_ssd_dir *d, const struct bt_kv_key *key);
/* Entry of a slot that is not FREE. */
const struct bt_ssd_entry *bt_ssd_dir_entry(const struct bt_ssd_dir *d, uint32_t slot);

/* FREE -> BUSY with a new generation; BT_SSD_NONE when none is free. */
uint32_t bt_ssd_dir_take(struct bt_ssd_dir *d);
/* A certain FREE slot -> BUSY, for recovery; false: it is not free. */
bool bt_ssd_dir_claim(struct bt_ssd_dir *d, uint32_t slot, uint32_t generation);
/* BUSY -> VALID, just used; generation stays the slot's. The key must not be there. */
void bt_ssd_dir_add(struct bt_ssd_dir *d, uint32_t slot, const struct bt_ssd_entry *e);
/* The same at start, of a block that was there before: its coming is no use. Those used last come
 * last. */
void bt_ssd_dir_restore(struct bt_ssd_dir *d, uint32_t slot, const struct bt_ssd_entry *e);
/* VALID -> BUSY: not found from now on. */
void bt_ssd_dir_remove(struct bt_ssd_dir *d, uint32_t slot);
/* BUSY -> FREE. */
void bt_ssd_dir_free(struct bt_ssd_dir *d, uint32_t slot);

/* A VALID slot was used. */
void bt_ssd_dir_touch(struct bt_ssd_dir *d, uint32_t slot);
/* Its record tells of a use at this moment now. */
void bt_ssd_dir_set_used(struct bt_ssd_dir *d, uint32_t slot, uint32_t used);
void bt_ssd_dir_pin(struct bt_ssd_dir *d, uint32_t slot); /* counted to 255; any state but FREE */
void bt_ssd_dir_unpin(struct bt_ssd_dir *d, uint32_t slot);
/* The VALID slot that is given up first: of a tenant beyond his quota, else by the policy;
 * BT_SSD_NONE when none is left that is not pinned. */
uint32_t bt_ssd_dir_victim(const struct bt_ssd_dir *d);

/* VALID slots of a group. */
uint32_t bt_ssd_dir_used(const struct bt_ssd_dir *d, uint8_t group);
uint32_t bt_ssd_dir_valid(const struct bt_ssd_dir *d);
uint32_t bt_ssd_dir_free_count(const struct bt_ssd_dir *d);
bool bt_ssd_dir_is_valid(const struct bt_ssd_dir *d, uint32_t slot);

#endif
