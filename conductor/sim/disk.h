/* The SSD of a simulated node: the kvstore's own directory and memory of keys
 * (common/policy/evict/ssd_dir.h, common/policy/evict/recent.h), its write policies, and a disk
 * that reads one thing after the other and writes beside that. */
#ifndef BT_CONDUCTOR_SIM_DISK_H
#define BT_CONDUCTOR_SIM_DISK_H

#include "common/base/base.h"
#include "common/policy/evict/evict.h"

/* kvstore.ssd.write_policy: what a second request uses; what the slab gives up; everything. */
typedef enum { BT_SIM_WRITE_SECOND_USE, BT_SIM_WRITE_EVICT, BT_SIM_WRITE_ALWAYS } bt_sim_write_t;
extern const char *const bt_sim_write_names[3];

typedef enum { BT_SIM_DISK_NEW, BT_SIM_DISK_HIT, BT_SIM_DISK_GIVEN_UP } bt_sim_disk_event_t;

struct bt_sim_disk_config {
    uint32_t blocks; /* capacity; 0: there is no SSD */
    double block_bytes;
    double read_bytes_per_s, write_bytes_per_s; /* 0: at once */
    bt_sim_write_t write;
    const struct bt_evict_policy *policy; /* who makes room; NULL: LRU, the kvstore's default */
};

struct bt_sim_disk;

/* seen: keys remembered, to know a second use. */
struct bt_sim_disk *bt_sim_disk_create(const struct bt_sim_disk_config *c, uint32_t seen);
void bt_sim_disk_destroy(struct bt_sim_disk *d);
bool bt_sim_disk_has(const struct bt_sim_disk *d, uint32_t block);
/* A block is in the slab: computed or fetched just now, found by a request, or about to leave. If
 * the write policy wants it then, it is written unless the disk is a second behind. *old_p: the
 * block that made room for it, or NONE. True: it is on the SSD now and was not before. */
#define BT_SIM_DISK_NONE UINT32_MAX
bool bt_sim_disk_offer(struct bt_sim_disk *d, uint32_t block, uint32_t depth,
                       bt_sim_disk_event_t event, double now_ms, uint32_t *old_p);
/* Comes back into the slab, which bt_sim_disk_read has paid for. */
void bt_sim_disk_touch(struct bt_sim_disk *d, uint32_t block);
/* n blocks are asked for now: when they will have been read; ms. */
double bt_sim_disk_read(struct bt_sim_disk *d, uint32_t n, double now_ms);
double bt_sim_disk_written(const struct bt_sim_disk *d); /* bytes */

#endif
