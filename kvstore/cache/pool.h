/* The slots of the slab: states, generations, leases, free list, segment CRCs. Knows nothing of
 * keys in the index, of eviction or of who holds what. Control thread, except
 * bt_pool_segment_crc. Pure over the mapped slab.
 *
 *   FREE --take--> WRITING --seal--> SEALED --put--> FREE
 *                     \--quarantine--> QUARANTINE --put--> FREE
 *
 * A lease is one holder's right to the slot in whatever state but FREE; the holder that drops the
 * last one frees the slot, unless the slot is sealed and cached. */
#ifndef BT_KVSTORE_CACHE_POOL_H
#define BT_KVSTORE_CACHE_POOL_H

#include "common/base/base.h"
#include "common/slab/crcs.h"

#define BT_POOL_NONE UINT32_MAX
/* How long a slot stays unusable after its writer has died: the writer's device may still write. A
 * killed worker's GPU was seen to write for 159 ms. */
#define BT_POOL_QUARANTINE_MS 1000

struct bt_pool;

struct bt_pool_counts {
    uint32_t total, free, writing, sealed, quarantine, transit, leases;
};

/* The slab outlives the pool. transit_max: limit of slots that are TRANSIT at once. */
struct bt_pool *bt_pool_create(struct bt_slab *slab, const struct bt_kv_layout *layout,
                               uint32_t transit_max);
void bt_pool_destroy(struct bt_pool *p);
void bt_pool_counts(const struct bt_pool *p, struct bt_pool_counts *c_p);

/* Call it only at the start, on an adopted slab. SEALED slots whose header passes its CRC stay
 * SEALED. Slots to which a process might still write become QUARANTINE. Both get one lease, which
 * belongs to the caller, and fn is called for each of them. All other slots become FREE. */
void bt_pool_adopt(struct bt_pool *p, void (*fn)(void *arg, uint32_t slot, bool sealed), void *arg);
/* Returns whether the header of a SEALED slot and its row of segment CRCs belong together. After
 * the row was computed again (bt_pool_segment_crc of every layer), this shows whether the bytes are
 * the sealed ones. */
bool bt_pool_header_ok(const struct bt_pool *p, uint32_t slot);

/* FREE -> WRITING with a new generation and one lease; BT_POOL_NONE when nothing is free. */
uint32_t bt_pool_take(struct bt_pool *p);
void bt_pool_lease(struct bt_pool *p, uint32_t slot);
/* Drops one lease; returns how many are left. At 0 the caller frees the slot or keeps it cached. */
uint32_t bt_pool_unlease(struct bt_pool *p, uint32_t slot);
/* WRITING -> SEALED: writes the header with its CRC, then the state. All segment CRCs must be
 * known. now_ns: bt_mono_ns(), by which the next kvstore sorts the blocks that it adopts. */
void bt_pool_seal(struct bt_pool *p, uint32_t slot, const struct bt_kv_key *key, uint32_t n_tokens,
                  uint32_t depth, uint64_t now_ns);
/* Another request uses a SEALED slot's block. Counted in the header. */
void bt_pool_used(struct bt_pool *p, uint32_t slot, uint64_t now_ns, bool again);
/* When a SEALED slot's block was used last (bt_mono_ns), and how often; 1: only by the request that
 * made it. */
uint64_t bt_pool_last_use(const struct bt_pool *p, uint32_t slot, uint32_t *count_p);
/* Sets the tenant of the block (bt_kv_tenant_tag), in the header. For WRITING slots; newly taken
 * slots have 0. */
void bt_pool_set_tenant(struct bt_pool *p, uint32_t slot, uint32_t tag);
/* WRITING or SEALED -> QUARANTINE: a dead holder might still write. Leases stay. */
void bt_pool_quarantine(struct bt_pool *p, uint32_t slot);
/* Any state -> FREE; no lease may be left. */
void bt_pool_free(struct bt_pool *p, uint32_t slot);

bt_slot_state_t bt_pool_state(const struct bt_pool *p, uint32_t slot);
uint32_t bt_pool_generation(const struct bt_pool *p, uint32_t slot);
uint32_t bt_pool_leases(const struct bt_pool *p, uint32_t slot);
const struct bt_kv_key *bt_pool_key(const struct bt_pool *p, uint32_t slot); /* of a sealed slot */
/* Header of a slot, whatever its state. */
const struct bt_slot_header *bt_pool_header(const struct bt_pool *p, uint32_t slot);
uint32_t bt_pool_depth(const struct bt_pool *p, uint32_t slot);

/* Reserves room for n more TRANSIT slots; ERR_EXHAUSTED beyond the cap. */
bt_status_t bt_pool_transit_get(struct bt_pool *p, uint32_t n) BT_MUST_CHECK;
void bt_pool_transit_put(struct bt_pool *p, uint32_t n);

/* CRC of a segment whose bytes are final, computed once per slot, layer and generation. ANY THREAD,
 * while somebody on the control thread holds a lease of the slot. */
uint32_t bt_pool_segment_crc(struct bt_pool *p, uint32_t slot, uint32_t layer,
                             const struct bt_kv_key *name);
/* The marks of known CRCs, for the process that sends blocks to other nodes. Valid as long as the
 * pool. */
struct bt_slab_crcs *bt_pool_crcs(struct bt_pool *p);
/* The CRCs of the slot's segments are in the slab already (checked when they came by the wire). */
void bt_pool_crcs_known(struct bt_pool *p, uint32_t slot);

/* Verifies a SEALED slot against its header and every segment's CRC: ERR_DATA_LOSS. Slow. */
bt_status_t bt_pool_verify(const struct bt_pool *p, uint32_t slot) BT_MUST_CHECK;

#endif
