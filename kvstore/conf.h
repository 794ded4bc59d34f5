/* Configuration of baton-kvstore. */
#ifndef BT_KVSTORE_CONF_H
#define BT_KVSTORE_CONF_H

#include "common/conf/conf.h"
#include "kvstore/cache/tier.h"

struct bt_kvstore_conf {
    struct bt_conf_common common;
    uint64_t slab_bytes;
    char *slab_path;
    bool slab_keep;
    char *eviction;
    double transit_max;
    uint64_t reclaim_ms;
    char **wire_listen;
    bool wire_allow_routable;
    char *wire_transport;
    int64_t wire_port;
    uint64_t wire_in_flight_bytes;
    uint64_t wire_idle_ms;
    uint64_t fetch_wait_ms, fetch_stall_ms;
    bool overlap;
    double replica_max, pin_max, stream_max;
    char *quota_default, **quota_tenants;
    char *ssd_path; /* NULL: no SSD tier */
    uint64_t ssd_bytes;
    int64_t ssd_queue_depth, ssd_backlog;
    char *ssd_write_policy, *ssd_eviction;
    uint64_t ssd_load_ms, ssd_probe_ms, ssd_stall_ms;
};

extern const struct bt_conf_schema bt_kvstore_schema;
/* false: text names no policy. */
bool bt_kvstore_write_policy(const char *text, bt_tier_policy_t *policy_p);
/* Path of the slab: kvstore.slab_path, or /dev/shm/baton-<cluster>-<node>-<hash of run_dir>; heap.
 */
char *bt_kvstore_slab_path(const struct bt_kvstore_conf *c);

#endif
