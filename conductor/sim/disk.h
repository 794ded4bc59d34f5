/* The SSD of a simulated node: the kvstore's own directory and memory of recent keys
 * (common/policy/evict/ssd_dir.h, common/policy/evict/recent.h), its write policies, and a disk
 * that does one read after the other and writes at the same time. */
#ifndef BT_CONDUCTOR_SIM_DISK_H
#define BT_CONDUCTOR_SIM_DISK_H

#include "common/base/base.h"
#include "common/policy/evict/evict.h"

/* kvstore.ssd.write_policy: blocks that a second request uses; blocks that leave the slab; all
 * blocks. */
typedef enum { BT_SIM_WRITE_SECOND_USE, BT_SIM_WRITE_EVICT, BT_SIM_WRITE_ALWAYS } bt_sim_write_t;
extern const char *const bt_sim_write_names[3];

typedef enum { BT_SIM_DISK_NEW, BT_SIM_DISK_HIT, BT_SIM_DISK_GIVEN_UP } bt_sim_disk_event_t;

struct bt_sim_disk_config {
    uint32_t blocks; /* capacity; 0: there is no SSD */
    double block_bytes;
    double read_bytes_per_s, write_bytes_per_s; /* 0: at once */
    bt_sim_write_t write;
    const struct bt_evict_policy *policy; /* eviction policy; NULL: LRU, the kvstore's default */
};

struct bt_sim_disk;

/* seen: number of keys to remember, to recognize a second use */
struct bt_sim_disk *bt_sim_disk_create(const struct bt_sim_disk_config *c, uint32_t seen);
void bt_sim_disk_destroy(struct bt_sim_disk *d);
bool bt_sim_disk_has(const struct bt_sim_disk *d, uint32_t block);
/* A block is in the slab: just computed or fetched, found by a request, or about to be evicted. If
 * the write policy wants it now, it is written, unless the disk is more than a second behind.
 * *old_p: the block that was evicted for it, or NONE. True: it is on the SSD now and was not
 * before. */
#define BT_SIM_DISK_NONE UINT32_MAX
bool bt_sim_disk_offer(struct bt_sim_disk *d, uint32_t block, uint32_t depth,
                       bt_sim_disk_event_t event, double now_ms, uint32_t *old_p);
/* The block comes back into the slab; bt_sim_disk_read has counted the time. */
void bt_sim_disk_touch(struct bt_sim_disk *d, uint32_t block);
/* Reads n blocks from now on; returns when they will have been read, in ms. */
double bt_sim_disk_read(struct bt_sim_disk *d, uint32_t n, double now_ms);
double bt_sim_disk_written(const struct bt_sim_disk *d); /* bytes */

#endif
