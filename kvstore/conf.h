/* Configuration of baton-kvstore. */
#ifndef BT_KVSTORE_CONF_H
#define BT_KVSTORE_CONF_H

#include "common/conf/conf.h"
#include "kvstore/cache/tier.h"

/* Values that no operator needs to choose. Shares are parts of the slab's slots. */

/* KV that only passes through (handed to a decode worker, not kept). Half: the other half stays
 * cache, and a prompt in hand-off leaves as soon as its decode worker has it. */
#define BT_KVSTORE_TRANSIT_SHARE 0.5
/* Blocks fetched from other nodes that only one request has used here. Copies beyond a quarter
 * leave with their request; a second use makes one a block like any other. */
#define BT_KVSTORE_COPIES_SHARE 0.25
/* The window through which a prompt that no slab holds goes to the SSD, and again as much to come
 * back. An eighth: SSD and network keep busy with tens of blocks. */
#define BT_KVSTORE_STREAM_SHARE 0.125
enum {
    /* A connection that carries nothing is closed after this time. Connecting again is
     * a few round trips; an idle connection holds memory and is watched for nothing. */
    BT_KVSTORE_WIRE_IDLE_MS = 300000,
    /* Blocks in the disk's queue. 16 reads of a block reach an NVMe disk's full rate. */
    BT_KVSTORE_SSD_QUEUE = 16,
    /* An SSD that does not finish a read or write within this time has failed. Far
     * above the slowest answer of a working disk under this queue; requests do not wait for it. */
    BT_KVSTORE_SSD_STALL_MS = 5000
};
/* Every block on the SSD has been used twice already, so a better policy has nothing to distinguish
 * blocks by. */
#define BT_KVSTORE_SSD_EVICTION "lru"

struct bt_kvstore_conf {
    struct bt_conf_common common;
    uint64_t slab_bytes;
    char *slab_path;
    bool slab_keep;
    char *eviction;
    uint64_t reclaim_ms;
    char **wire_listen;
    bool wire_allow_routable;
    char *wire_transport;
    uint64_t fetch_wait_ms, fetch_stall_ms;
    bool overlap;
    double pin_max;
    char **quota_tenants;
    char *ssd_path; /* NULL: no SSD tier */
    uint64_t ssd_bytes;
    int64_t ssd_backlog;
    char *ssd_write_policy;
    uint64_t ssd_load_ms, ssd_probe_ms;
};

extern const struct bt_conf_schema bt_kvstore_schema;
/* false: text names no policy. */
bool bt_kvstore_write_policy(const char *text, bt_tier_policy_t *policy_p);
/* Path of the slab: kvstore.slab_path, or /dev/shm/baton-<cluster>-<node>-<hash of run_dir>; heap.
 */
char *bt_kvstore_slab_path(const struct bt_kvstore_conf *c);

#endif
