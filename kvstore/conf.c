/* The configuration table of baton-kvstore. The help, the example file and docs/CONFIG.md are made
 * from its texts. */
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
     .doc = "Bytes of shared memory for KV on this node, all reserved and touched at start.",
     .when = "always: as much memory as the node can spare (docs/OPERATING.md)."},
    {.key = "kvstore.slab_path",
     .type = BT_CONF_STR,
     .offset = ROW(slab_path),
     .doc = "File of the slab. Default: one in /dev/shm named after cluster, node and run_dir.",
     .when = "when the slab shall be on a hugetlbfs or tmpfs mount of its own."},
    {.key = "kvstore.slab_keep",
     .type = BT_CONF_BOOL,
     .offset = ROW(slab_keep),
     .def = "false",
     .doc = "Keep the shared memory when the kvstore stops, so that the next start finds its "
            "blocks.",
     .when = "when you restart kvstores for an upgrade and want a warm cache afterwards."},
    {.key = "kvstore.eviction",
     .type = BT_CONF_STR,
     .offset = ROW(eviction),
     .def = "density",
     .doc = "Which block is evicted when room is needed: density (the block that saves the "
            "least time while it stays, learned from requests), slru, lru, lfu or length_aware "
            "(lfu, then the end of a prompt first).",
     .when = "to compare policies."},
    {.key = "kvstore.reclaim_ms",
     .type = BT_CONF_MS,
     .offset = ROW(reclaim_ms),
     .def = "30s",
     .min = 100,
     .max = 3600000,
     .hidden = true,
     .doc = "A worker that keeps slots this long after they were taken back hangs and is killed: "
            "its memory is never reused under it. 30 s is far above the longest copy (0.1 s); "
            "tests lower it to see the kill, and raise it under sanitizers."},
    {.key = "kvstore.wire.listen",
     .type = BT_CONF_LIST,
     .offset = ROW(wire_listen),
     .def = "127.0.0.1",
     .one_is_list = true,
     .doc = "Addresses of up to 8 network cards that carry KV to other nodes: loopback or "
            "private networks, because UCX does not check who connects.",
     .when = "set it as soon as the cluster has two nodes; one address for each card."},
    {.key = "kvstore.wire.allow_routable",
     .type = BT_CONF_BOOL,
     .offset = ROW(wire_allow_routable),
     .def = "false",
     .doc = "Allow a kvstore.wire.listen that is neither loopback nor private. Anybody who "
            "reaches it may be able to read and write KV.",
     .when = "only if a firewall lets nothing but the cluster's nodes reach them."},
    {.key = "kvstore.wire.transport",
     .type = BT_CONF_STR,
     .offset = ROW(wire_transport),
     .def = "ucx",
     .doc = "Transport of KV between nodes: ucx (fast; neither encrypted nor authenticated), "
            "or grpc (with cluster.tls.* encrypted and authenticated; slower; one address in "
            "kvstore.wire.listen, with a port if a firewall must know it: 10.0.0.1:7000). The same "
            "in all kvstores.",
     .when = "set grpc, with cluster.tls.*, when you do not trust the network between the nodes."},
    {.key = "kvstore.fetch.wait_ms",
     .type = BT_CONF_MS,
     .offset = ROW(fetch_wait_ms),
     .def = "5s",
     .min = 1,
     .max = 60000,
     .hidden = true,
     .doc = "A request waits this long for blocks of its prefix that other nodes have; the rest "
            "is computed. In 5 s a 10 Gbit/s network brings 6 GB, more than any plan expects."},
    {.key = "kvstore.overlap",
     .type = BT_CONF_BOOL,
     .offset = ROW(overlap),
     .def = "true",
     .hidden = true,
     .doc = "Where loading a prefix from the SSD or from other nodes takes more than a quarter of "
            "the time of computing it, the worker computes from its beginning while it is loaded "
            "from its end, until they meet. Off: the request waits if loading is faster. "
            "Benchmarks compare both."},
    {.key = "kvstore.fetch.stall_ms",
     .type = BT_CONF_MS,
     .offset = ROW(fetch_stall_ms),
     .def = "1s",
     .min = 1,
     .max = 60000,
     .hidden = true,
     .doc = "If a node sends no block for this time, the blocks are fetched from another node that "
            "has them, or are computed. 1 s is four times the time that a sender waits for room "
            "(250 ms)."},
    {.key = "kvstore.pin_max",
     .type = BT_CONF_FLOAT,
     .offset = ROW(pin_max),
     .def = "0.25",
     .min = 0,
     .max = 0.9,
     .doc = "Part of the slots, and of the SSD's, in which pins (batonctl pin) protect blocks. "
            "Pinned blocks beyond it can be evicted.",
     .when = "raise it when system prompts that you pin do not fit."},
    {.key = "kvstore.quota.tenants",
     .type = BT_CONF_LIST,
     .offset = ROW(quota_tenants),
     .doc = "Shares of tenants, NAME=SHARE or NAME=SLAB/SSD (parts of the slots in memory and "
            "on the SSD). NAME is the tenant= of an API key; - stands for requests without a "
            "key, * for each tenant that is not named (without it 1). A tenant may use more "
            "while no other tenant needs the room. 1: the tenant has no share of its own; it uses "
            "what others leave and loses it first.",
     .when = "when one tenant's prompts push out those of another."},
    {.key = "kvstore.ssd.path",
     .type = BT_CONF_STR,
     .offset = ROW(ssd_path),
     .doc = "Directory on a local SSD for the pool's second tier, for this kvstore alone. "
            "Blocks are found again after a restart.",
     .when = "when the node has an NVMe disk and prompts come back after they have left the "
             "memory."},
    {.key = "kvstore.ssd.bytes",
     .type = BT_CONF_SIZE,
     .offset = ROW(ssd_bytes),
     .def = "64GiB",
     .min = 1048576,
     .max = 0x1p50,
     .doc = "Bytes of the SSD's slab file, reserved at start. A disk with less room gets a "
            "smaller file. The index takes about 100 bytes a block more.",
     .when = "set it together with kvstore.ssd.path."},
    {.key = "kvstore.ssd.write_policy",
     .type = BT_CONF_STR,
     .offset = ROW(ssd_write_policy),
     .def = "second_use",
     .doc = "What is written to the SSD: second_use (blocks that a second request used: wears "
            "the disk least), evict (every block that leaves the memory), always (every block, "
            "at once).",
     .when = "set evict or always when a prompt must be found on the SSD after its first use."},
    {.key = "kvstore.ssd.backlog",
     .type = BT_CONF_INT,
     .offset = ROW(ssd_backlog),
     .def = "64",
     .min = 1,
     .max = 65536,
     .hidden = true,
     .doc = "Blocks that may be under way to the SSD at once; others wait in the slab for their "
            "turn, as long as they stay there. 64 keep 16 writes in the disk's queue busy while "
            "others wait; tests raise it to write everything."},
    {.key = "kvstore.ssd.load_ms",
     .type = BT_CONF_MS,
     .offset = ROW(ssd_load_ms),
     .def = "1500ms",
     .min = 1,
     .max = 1800,
     .hidden = true,
     .doc = "A request waits this long for its blocks on the SSD; the rest is computed. A worker "
            "gives up after 2 s, so 1.8 s is the maximum."},
    {.key = "kvstore.ssd.probe_ms",
     .type = BT_CONF_MS,
     .offset = ROW(ssd_probe_ms),
     .def = "1s",
     .min = 10,
     .max = 3600000,
     .hidden = true,
     .doc = "Pause between attempts to use a failed SSD again. Each attempt is one write: once a "
            "second costs nothing."},
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
    if (strcmp(c->wire_transport, "ucx") != 0 && strcmp(c->wire_transport, "grpc") != 0) {
        snprintf(err, cap, "kvstore.wire.transport: \"%.40s\" is neither ucx nor grpc",
                 c->wire_transport);
        return false;
    }
    bool grpc = strcmp(c->wire_transport, "grpc") == 0;
    bool in_tls = grpc && c->common.cluster_tls_ca != NULL;
    if (bt_wire_listen_check((const char *const *)c->wire_listen, grpc,
                             c->wire_allow_routable || in_tls, err, cap) != BT_OK) {
        return false;
    }
    struct bt_tenants *tenants;
    if (bt_tenants_create(c->quota_tenants, &tenants, err, cap) != BT_OK) {
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
        const char *colon = strchr(*a, ':');
        bool has_port = **a == '[' || (colon != NULL && colon == strrchr(*a, ':'));
        char *with_port = bt_sprintf(has_port ? "%s" : colon != NULL ? "[%s]:0" : "%s:0", *a);
        ok = bt_conf_look_listen("kvstore.wire.listen", with_port) && ok;
        free(with_port);
    }
    return bt_model_config_load(c->common.model_path, &model, err, err_cap) == BT_OK && ok;
}

static const char *const main_keys[] = {"kvstore.slab_bytes", "kvstore.wire.listen",
                                        "kvstore.ssd.path",   "kvstore.ssd.bytes",
                                        "rpc.listen",         NULL};

static const struct bt_conf_removed removed[] = {
    {"kvstore.transit_max", "it is always 0.5; remove the line"},
    {"kvstore.replica_max", "it is always 0.25; remove the line"},
    {"kvstore.stream_max", "it is always 0.125; remove the line"},
    {"kvstore.wire.in_flight_bytes", "it is always 4MiB; remove the line"},
    {"kvstore.wire.port",
     "write the port behind the address in kvstore.wire.listen, as in 10.0.0.1:7000; remove the "
     "line"},
    {"kvstore.wire.idle_ms", "it is always 300s; remove the line"},
    {"kvstore.quota.default", "write *=SHARE in kvstore.quota.tenants instead; remove the line"},
    {"kvstore.ssd.eviction", "it is always lru; remove the line"},
    {"kvstore.ssd.queue_depth", "it is always 16; remove the line"},
    {"kvstore.ssd.stall_ms", "it is always 5s; remove the line"},
    {NULL, NULL},
};

static const struct bt_conf_row *const tables[] = {bt_conf_common_rows, kvstore_rows, NULL};
static size_t table_lens[] = {0, BT_ARRAY_LEN(kvstore_rows)};

const struct bt_conf_schema bt_kvstore_schema = {
    .daemon = "kvstore",
    .summary = "The node's share of the KV pool: shared memory, and all KV traffic between nodes.",
    .tables = tables,
    .table_lens = table_lens,
    .conf_size = sizeof(struct bt_kvstore_conf),
    .main_keys = main_keys,
    .removed = removed,
    .check = check,
    .look = look,
};

/* Another file's table has no length that is a constant expression. */
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
    /* run_dir distinguishes clusters of the same name on one machine. */
    char *real = realpath(c->common.run_dir, NULL);
    const char *dir = real != NULL ? real : c->common.run_dir;
    uint32_t tag = (uint32_t)bt_hash64(dir, strlen(dir), 0);
    free(real);
    put_name(cluster, sizeof(cluster), c->common.cluster_name);
    put_name(node, sizeof(node), c->common.node_id);
    return bt_sprintf("/dev/shm/baton-%s-%s-%08x", cluster, node, tag);
}
