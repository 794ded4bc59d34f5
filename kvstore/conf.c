/* The configuration table of baton-kvstore. Its texts become help, example and docs/CONFIG.md. */
#include "kvstore/conf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"
#include "common/engine/model_config.h"
#include "kvstore/wire/cards.h"

#define ROW(member) offsetof(struct bt_kvstore_conf, member)

static const struct bt_conf_row kvstore_rows[] = {
    {.key = "kvstore.slab_bytes",
     .type = BT_CONF_SIZE,
     .offset = ROW(slab_bytes),
     .def = "1GiB",
     .min = 65536,
     .max = 0x1p46,
     .doc = "Bytes of shared memory for KV on this node; all of it is reserved and touched before "
            "the kvstore is ready."},
    {.key = "kvstore.slab_path",
     .type = BT_CONF_STR,
     .offset = ROW(slab_path),
     .doc = "File of the slab; by default one in /dev/shm named after cluster, node and run_dir."},
    {.key = "kvstore.slab_keep",
     .type = BT_CONF_BOOL,
     .offset = ROW(slab_keep),
     .def = "false",
     .doc = "Leave the shared memory when the kvstore is stopped, so that the next start finds its "
            "blocks (as it does after a crash); the memory stays in use until then."},
    {.key = "kvstore.eviction",
     .type = BT_CONF_STR,
     .offset = ROW(eviction),
     .def = "density",
     .doc = "Which block goes when room is needed: density (what earns least while it waits, as "
            "learned from the requests), slru (new blocks are on probation until a second use), "
            "lru, lfu, length_aware (lfu, among equals the end of a prompt first)."},
    {.key = "kvstore.transit_max",
     .type = BT_CONF_FLOAT,
     .offset = ROW(transit_max),
     .def = "0.5",
     .min = 0.01,
     .max = 1.0,
     .doc = "Part of the slots that may hold KV which only passes through (handed to a decode "
            "worker and not kept)."},
    {.key = "kvstore.reclaim_ms",
     .type = BT_CONF_MS,
     .offset = ROW(reclaim_ms),
     .def = "30s",
     .min = 100,
     .max = 3600000,
     .doc = "A worker that keeps slots so long after they were taken back is hung, and is killed: "
            "its memory is never reused under it."},
    {.key = "kvstore.wire.listen",
     .type = BT_CONF_LIST,
     .offset = ROW(wire_listen),
     .def = "127.0.0.1",
     .one_is_list = true,
     .doc =
         "Addresses of the network cards that KV moves over to other nodes, up to 8; loopback or "
         "private networks, because the transport does not authenticate anybody. A peer that "
         "uses one card is reached over the first that it shares a network with."},
    {.key = "kvstore.wire.allow_routable",
     .type = BT_CONF_BOOL,
     .offset = ROW(wire_allow_routable),
     .def = "false",
     .doc = "Allow a kvstore.wire.listen that is neither loopback nor private: whoever reaches it "
            "may be able to read and write KV."},
    {.key = "kvstore.wire.transport",
     .type = BT_CONF_STR,
     .offset = ROW(wire_transport),
     .def = "ucx",
     .doc = "What KV goes over between nodes: ucx (fast; neither encrypted nor authenticated), or "
            "grpc (in messages of a gRPC stream, with cluster.tls.* encrypted and authenticated; "
            "for networks that are not trusted; slower, docs/MEASURED.md; one address in "
            "kvstore.wire.listen). The same in all kvstores."},
    {.key = "kvstore.wire.port",
     .type = BT_CONF_INT,
     .offset = ROW(wire_port),
     .def = "0",
     .max = 65535,
     .doc = "Port of kvstore.wire.listen with kvstore.wire.transport: grpc; 0 takes any free one. "
            "UCX chooses its own."},
    {.key = "kvstore.wire.in_flight_bytes",
     .type = BT_CONF_SIZE,
     .offset = ROW(wire_in_flight_bytes),
     .def = "4MiB",
     .min = 65536,
     .max = 1073741824,
     .doc = "Bytes that may be under way to one peer at once."},
    {.key = "kvstore.wire.idle_ms",
     .type = BT_CONF_MS,
     .offset = ROW(wire_idle_ms),
     .def = "300s",
     .min = 1000,
     .max = 86400000,
     .doc =
         "A connection to a peer that carries nothing for so long is closed; the next flow makes "
         "a new one."},
    {.key = "kvstore.fetch.wait_ms",
     .type = BT_CONF_MS,
     .offset = ROW(fetch_wait_ms),
     .def = "5s",
     .min = 1,
     .max = 60000,
     .doc = "A request waits so long for blocks of its prefix that other nodes have; what has not "
            "come by then is computed."},
    {.key = "kvstore.overlap",
     .type = BT_CONF_BOOL,
     .offset = ROW(overlap),
     .def = "true",
     .doc = "Where loading a prefix from the SSD or from other nodes takes more than a quarter of "
            "the time of computing it, the worker computes from its beginning while it is loaded "
            "from its end, until they meet. Without, it is waited for if that is faster."},
    {.key = "kvstore.fetch.stall_ms",
     .type = BT_CONF_MS,
     .offset = ROW(fetch_stall_ms),
     .def = "1s",
     .min = 1,
     .max = 60000,
     .doc = "A node that brings nothing of what it was asked for within this time is replaced by "
            "another that has the blocks, or they are computed."},
    {.key = "kvstore.replica_max",
     .type = BT_CONF_FLOAT,
     .offset = ROW(replica_max),
     .def = "0.25",
     .min = 0,
     .max = 1,
     .doc = "Part of the slots that may hold blocks fetched from other nodes which only one "
            "request has used here; beyond it they leave when that request has ended. A second "
            "use makes one a block like any other."},
    {.key = "kvstore.stream_max",
     .type = BT_CONF_FLOAT,
     .offset = ROW(stream_max),
     .def = "0.125",
     .min = 0.001,
     .max = 0.5,
     .doc = "Part of the slots through which a prompt that no slab holds goes to the SSD, and "
            "again as much through which it comes back; all such prompts together, and at least "
            "one slot."},
    {.key = "kvstore.pin_max",
     .type = BT_CONF_FLOAT,
     .offset = ROW(pin_max),
     .def = "0.25",
     .min = 0,
     .max = 0.9,
     .doc =
         "Part of the slots, and of the SSD's, in which blocks may be protected by pins (batonctl "
         "pin); what is pinned beyond that can be evicted as ever, which batonctl pins shows."},
    {.key = "kvstore.quota.tenants",
     .type = BT_CONF_LIST,
     .offset = ROW(quota_tenants),
     .doc =
         "Shares of tenants, NAME=SHARE or NAME=SLAB/SSD (parts of the slots in shared memory and "
         "on the SSD). A tenant may use more while nobody wants it; when room is needed, what he "
         "has beyond his share goes first. NAME is the tenant= of his API key; - is who has "
         "none."},
    {.key = "kvstore.quota.default",
     .type = BT_CONF_STR,
     .offset = ROW(quota_default),
     .def = "1",
     .doc = "Share (or SLAB/SSD) of each tenant that kvstore.quota.tenants does not name; 1: "
            "none, they use what the shares of others leave and give it up first. Requests without "
            "an API key have none."},
    {.key = "kvstore.ssd.path",
     .type = BT_CONF_STR,
     .offset = ROW(ssd_path),
     .doc = "Folder on a local SSD for the pool's second tier, for this kvstore alone; without it "
            "there is none. Its blocks are found again after a restart."},
    {.key = "kvstore.ssd.bytes",
     .type = BT_CONF_SIZE,
     .offset = ROW(ssd_bytes),
     .def = "64GiB",
     .min = 1048576,
     .max = 0x1p50,
     .doc =
         "Bytes of the SSD's slab file, all of them reserved at start; a disk with less room gets "
         "a smaller one, which leaves room for the index. That takes about 100 bytes a block "
         "more."},
    {.key = "kvstore.ssd.write_policy",
     .type = BT_CONF_STR,
     .offset = ROW(ssd_write_policy),
     .def = "second_use",
     .doc =
         "What is written to the SSD: second_use (blocks that a second request used), evict "
         "(all that the shared memory gives up), always (every block, at once). second_use wears "
         "the disk least."},
    {.key = "kvstore.ssd.eviction",
     .type = BT_CONF_STR,
     .offset = ROW(ssd_eviction),
     .def = "lru",
     .doc = "Which block goes when the SSD is full; policies as of kvstore.eviction."},
    {.key = "kvstore.ssd.queue_depth",
     .type = BT_CONF_INT,
     .offset = ROW(ssd_queue_depth),
     .def = "16",
     .min = 1,
     .max = 1024,
     .doc = "Blocks that are being read from or written to the SSD at once."},
    {.key = "kvstore.ssd.backlog",
     .type = BT_CONF_INT,
     .offset = ROW(ssd_backlog),
     .def = "64",
     .min = 1,
     .max = 65536,
     .doc = "Blocks that may be under way to the SSD at once; others wait for their turn in the "
            "slab, as long as they stay there."},
    {.key = "kvstore.ssd.load_ms",
     .type = BT_CONF_MS,
     .offset = ROW(ssd_load_ms),
     .def = "1500ms",
     .min = 1,
     .max = 1800,
     .doc = "A request waits so long for its blocks of the SSD; what has not come by then is "
            "computed."},
    {.key = "kvstore.ssd.probe_ms",
     .type = BT_CONF_MS,
     .offset = ROW(ssd_probe_ms),
     .def = "1s",
     .min = 10,
     .max = 3600000,
     .doc = "Between attempts to use an SSD again that failed."},
    {.key = "kvstore.ssd.stall_ms",
     .type = BT_CONF_MS,
     .offset = ROW(ssd_stall_ms),
     .def = "5s",
     .min = 100,
     .max = 3600000,
     .doc = "An SSD that does not finish a read or write within this time has failed."},
};

static bool check(const void *conf, char *err, size_t cap)
{
    const struct bt_kvstore_conf *c = conf;
    bt_tier_policy_t policy;
    if (!bt_kvstore_write_policy(c->ssd_write_policy, &policy)) {
        snprintf(err, cap,
                 "kvstore.ssd.write_policy: \"%.40s\" is none of second_use, evict, always",
                 c->ssd_write_policy);
        return false;
    }
    if (bt_evict_by_name(c->eviction) == NULL) {
        snprintf(err, cap, "kvstore.eviction: \"%.40s\" is none of %s", c->eviction,
                 bt_evict_names);
        return false;
    }
    if (bt_evict_by_name(c->ssd_eviction) == NULL) {
        snprintf(err, cap, "kvstore.ssd.eviction: \"%.40s\" is none of %s", c->ssd_eviction,
                 bt_evict_names);
        return false;
    }
    if (strcmp(c->wire_transport, "ucx") != 0 && strcmp(c->wire_transport, "grpc") != 0) {
        snprintf(err, cap, "kvstore.wire.transport: \"%.40s\" is neither ucx nor grpc",
                 c->wire_transport);
        return false;
    }
    bool in_tls = strcmp(c->wire_transport, "grpc") == 0 && c->common.cluster_tls_ca != NULL;
    if (bt_wire_listen_check((const char *const *)c->wire_listen, c->wire_allow_routable || in_tls,
                             err, cap) != BT_OK) {
        return false;
    }
    struct bt_tenants *tenants;
    if (bt_tenants_create(c->quota_tenants, c->quota_default, &tenants, err, cap) != BT_OK) {
        return false;
    }
    bt_tenants_destroy(tenants);
    return true;
}

bool bt_kvstore_write_policy(const char *text, bt_tier_policy_t *policy_p)
{
    static const char *const names[] = {[BT_TIER_SECOND_USE] = "second_use",
                                        [BT_TIER_EVICT] = "evict",
                                        [BT_TIER_ALWAYS] = "always"};
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        if (strcmp(text, names[i]) == 0) {
            *policy_p = (bt_tier_policy_t)i;
            return true;
        }
    }
    return false;
}

static bool look(const void *conf, char *err, size_t err_cap)
{
    const struct bt_kvstore_conf *c = conf;
    struct bt_model_config model;
    char *slab = bt_kvstore_slab_path(c);
    bool ok = bt_conf_look_parent("kvstore.slab_path", slab, true);
    free(slab);
    ok = bt_conf_look_own("run_dir", c->common.run_dir) && ok;
    if (c->ssd_path != NULL) {
        ok = bt_conf_look_parent("kvstore.ssd.path", c->ssd_path, true) && ok;
        ok = bt_conf_look_own("kvstore.ssd.path", c->ssd_path) && ok;
    }
    for (char **a = c->wire_listen; a != NULL && *a != NULL; a++) {
        char *with_port = bt_sprintf(strchr(*a, ':') != NULL ? "[%s]:0" : "%s:0", *a);
        ok = bt_conf_look_listen("kvstore.wire.listen", with_port) && ok;
        free(with_port);
    }
    return bt_model_config_load(c->common.model_path, &model, err, err_cap) == BT_OK && ok;
}

static const struct bt_conf_row *const tables[] = {bt_conf_common_rows, kvstore_rows, NULL};
static size_t table_lens[] = {0, BT_ARRAY_LEN(kvstore_rows)};

const struct bt_conf_schema bt_kvstore_schema = {
    .daemon = "kvstore",
    .summary = "The node's share of the KV pool: shared memory, and all KV traffic between nodes.",
    .tables = tables,
    .table_lens = table_lens,
    .conf_size = sizeof(struct bt_kvstore_conf),
    .check = check,
    .look = look,
};

/* The length of another file's table is no constant expression. */
__attribute__((constructor)) static void fill_lens(void)
{
    table_lens[0] = bt_conf_common_len;
}

static void put_name(char *to, size_t cap, const char *name)
{
    size_t n = 0;
    for (; name[n] != '\0' && n + 1 < cap; n++) {
        to[n] = name[n] == '/' ? '_' : name[n];
    }
    to[n] = '\0';
}

char *bt_kvstore_slab_path(const struct bt_kvstore_conf *c)
{
    char cluster[80], node[80];
    if (c->slab_path != NULL) {
        return bt_strdup(c->slab_path);
    }
    /* run_dir tells apart clusters of the same name on one machine. */
    char *real = realpath(c->common.run_dir, NULL);
    const char *dir = real != NULL ? real : c->common.run_dir;
    uint32_t tag = (uint32_t)bt_hash64(dir, strlen(dir), 0);
    free(real);
    put_name(cluster, sizeof(cluster), c->common.cluster_name);
    put_name(node, sizeof(node), c->common.node_id);
    return bt_sprintf("/dev/shm/baton-%s-%s-%08x", cluster, node, tag);
}
