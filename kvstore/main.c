/* baton-kvstore: the node's share of the pool. This file only connects the parts: configuration,
 * log, loop, metrics, gRPC, slab, cache, grants, local sessions, wire, membership. Then it runs the
 * loop, and stops the parts in reverse order. Everything is on the control thread. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/list.h"
#include "common/conf/daemon.h"
#include "common/engine/model_config.h"
#include "common/etcd/member.h"
#include "common/http/status_page.h"
#include "common/log/log.h"
#include "common/loop/notify.h"
#include "common/rpc/tls_conf.h"
#include "kvstore/cache/adopt.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/mem_limit.h"
#include "kvstore/cache/pins.h"
#include "kvstore/cache/quota_metrics.h"
#include "kvstore/cache/sealer.h"
#include "kvstore/cache/tier.h"
#include "kvstore/conf.h"
#include "kvstore/grant/grant.h"
#include "kvstore/serve/local.h"
#include "kvstore/serve/pin_watch.h"
#include "kvstore/serve/serve.h"
#include "kvstore/wire/wire.h"
#include "kvstore/wire/wx_child.h"

#define ADOPT_WAIT_MS 3000 /* time for workers to notice that the previous kvstore has ended */

struct peer { /* another kvstore, as last seen in etcd */
    struct bt_list link;
    char *name;
    uint64_t incarnation;
};

struct daemon {
    struct bt_kvstore_conf conf;
    char *name, *slab_path, *rpc_addr, *http_addr;
    uint64_t incarnation;
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    struct bt_secret secret; /* only its id, once the wire has the secret */
    char *model_id;

    struct bt_loop *loop;
    struct bt_metrics *metrics;
    struct bt_rpc *rpc;
    struct bt_tls_conf tls;
    struct bt_rpc_server *server;
    struct bt_status_page *page;
    struct bt_slab *slab;
    struct bt_tenants *tenants;
    struct bt_cache *cache;
    struct bt_quota_metrics *quota_metrics; /* NULL: no quotas */
    struct bt_sealer *sealer;
    struct bt_adopt *adopt; /* NULL: the slab is new */
    struct bt_tier *tier;   /* NULL: no SSD */
    struct bt_pins *pins;
    struct bt_pin_watch *pin_watch;
    struct bt_serve *serve;
    struct bt_grants *grants;
    struct bt_serve_local *local;
    struct bt_wire *wire;
    struct bt_etcd *etcd;
    struct bt_member *member;
    struct bt_member_table *table;
    struct bt_list peers;
    bool joined;
    int exit_code;
};

static void on_signal(void *arg, int signo)
{
    struct daemon *d = arg;
    BT_INFO("stopping", "signal=%d", signo);
    bt_notify_stopping();
    bt_loop_stop(d->loop);
}

static const char *health(void *arg)
{
    struct daemon *d = arg;
    return d->joined ? NULL : "not registered in etcd yet";
}

/* ---- membership ---- */

static void on_joined(void *arg)
{
    struct daemon *d = arg;
    if (d->joined) {
        BT_INFO("rejoined", "rpc=%s", d->rpc_addr);
        return;
    }
    d->joined = true;
    BT_INFO("ready", "rpc=%s http=%s incarnation=%016llx slab=%s slots=%u slot_bytes=%llu",
            d->rpc_addr, d->http_addr, (unsigned long long)d->incarnation, d->slab_path,
            d->slab->super->n_slots, (unsigned long long)d->slab->super->slot_bytes);
    bt_notify_status("serving %u slots of %llu bytes on %s", d->slab->super->n_slots,
                     (unsigned long long)d->slab->super->slot_bytes, d->rpc_addr);
    bt_notify_ready();
}

static void on_refused(void *arg, bt_status_t st, const char *why)
{
    struct daemon *d = arg;
    BT_ERROR("join_refused", "status=%s why=%s", bt_status_name(st), why);
    d->exit_code = BT_EXIT_REFUSED;
    bt_loop_stop(d->loop);
}

static void on_lost(void *arg)
{
    (void)arg;
    BT_WARN("membership_lost", "why=%s",
            "etcd or this process stood still for longer than the lease; registering again. If "
            "this repeats, look at etcd's disk and at the load of both hosts");
}

static struct peer *peer_find(struct daemon *d, const char *name)
{
    struct bt_list *i;
    bt_list_for_each (i, &d->peers) {
        struct peer *p = BT_CONTAINER_OF(i, struct peer, link);
        if (strcmp(p->name, name) == 0) {
            return p;
        }
    }
    return NULL;
}

static bool peer_known(void *arg, const char *name, uint64_t incarnation)
{
    struct peer *p = peer_find(arg, name);
    return p != NULL && p->incarnation == incarnation;
}

static void peer_free(struct peer *p)
{
    bt_list_remove(&p->link);
    free(p->name);
    free(p);
}

static void on_peer_up(void *arg, const Baton__Member *m)
{
    struct daemon *d = arg;
    if (strcmp(m->name, d->name) == 0) {
        return;
    }
    struct peer *p = peer_find(d, m->name);
    if (p == NULL) {
        p = bt_calloc(1, sizeof(*p));
        p->name = bt_strdup(m->name);
        bt_list_insert_tail(&d->peers, &p->link);
    } else if (p->incarnation != m->incarnation) {
        bt_wire_peer_down(d->wire, p->name, p->incarnation);
    }
    p->incarnation = m->incarnation;
}

static void on_peer_down(void *arg, const char *kind, const char *name)
{
    struct daemon *d = arg;
    (void)kind;
    struct peer *p = peer_find(d, name);
    if (p != NULL) {
        bt_wire_peer_down(d->wire, p->name, p->incarnation);
        peer_free(p);
    }
}

static bool join(struct daemon *d)
{
    static const struct bt_member_ops ops = {
        .on_joined = on_joined, .on_refused = on_refused, .on_lost = on_lost};
    static const struct bt_member_table_ops table_ops = {.on_up = on_peer_up,
                                                         .on_down = on_peer_down};
    if (bt_etcd_create(d->rpc, d->conf.common.etcd_endpoints, d->tls.etcd, &d->etcd) != BT_OK) {
        BT_ERROR("etcd", "why=%s", "etcd.endpoints cannot be used");
        return false;
    }
    const struct bt_conf_common *c = &d->conf.common;
    Baton__Member self = BATON__MEMBER__INIT;
    Baton__ClusterSettings s = BATON__CLUSTER_SETTINGS__INIT;
    self.kind = "kvstore";
    self.name = d->name;
    self.node = c->node_id;
    self.incarnation = d->incarnation;
    self.pid = (uint32_t)getpid();
    self.rpc = d->rpc_addr;
    self.http = d->http_addr;
    self.state = BATON__MEMBER_STATE__READY;
    self.started_ns = bt_real_ns();
    self.version = (char *)bt_version();
    self.model = d->model_id;
    s.root_key.data = d->root.b;
    s.root_key.len = sizeof(d->root.b);
    s.layout_id = d->layout.layout_id;
    s.block_tokens = (uint32_t)c->kv_block_tokens;
    s.flow_chunk_tokens = (uint32_t)c->kv_flow_chunk_tokens;
    s.salt_id.data = d->secret.id;
    s.salt_id.len = d->secret.id_len;
    s.model_id = d->model_id;
    d->member = bt_member_join(d->etcd, c->cluster_name, &self, &s, &ops, d);
    d->table = bt_member_watch(d->etcd, c->cluster_name, "kvstore", &table_ops, d);
    d->pin_watch = bt_pin_watch_start(d->etcd, c->cluster_name, d->pins);
    return true;
}

/* ---- start ---- */

static void slab_progress(void *arg, double fraction)
{
    int *shown = arg, now = (int)(fraction * 10);
    if (now > *shown) {
        *shown = now;
        BT_INFO("loading", "what=slab percent=%d", now * 10);
        bt_notify_status("reserving the slab: %d%%", now * 10);
    }
}

/* Opens the listening sockets, so that a port in use is reported before memory is reserved. */
static bool start_servers(struct daemon *d)
{
    const struct bt_conf_common *c = &d->conf.common;
    char why[256];
    int port;
    if (bt_rpc_create(d->loop, &d->rpc) != BT_OK) {
        BT_ERROR("rpc", "why=%s", "gRPC cannot be started");
        return false;
    }
    if (!bt_tls_conf_start(&d->tls, c, "kvstore", d->rpc, d->metrics)) {
        return false;
    }
    if (bt_rpc_server_create(d->rpc, c->rpc_listen, &d->server, &port) != BT_OK) {
        (void)bt_conf_listen_why(c->rpc_listen, why, sizeof(why));
        BT_ERROR("config", "key=rpc.listen value=%s why=%s", c->rpc_listen, why);
        return false;
    }
    d->rpc_addr = bt_conf_dialled(c->rpc_listen, c->rpc_advertise, port);
    if (bt_status_page_create(d->loop, c->http_listen, d->metrics, health, d, &d->page, &port) !=
        BT_OK) {
        (void)bt_conf_listen_why(c->http_listen, why, sizeof(why));
        BT_ERROR("config", "key=http.listen value=%s why=%s", c->http_listen, why);
        return false;
    }
    d->http_addr = bt_conf_dialled(c->http_listen, NULL, port);
    return true;
}

static bool start_memory(struct daemon *d)
{
    const struct bt_conf_common *c = &d->conf.common;
    char err[512];
    int shown = 0;
    bt_status_t st =
        bt_model_root_key(c->model_path,
                          &(struct bt_model_settings){.load_format = c->model_load_format,
                                                      .activations = c->model_activations,
                                                      .quantize = c->model_quantize,
                                                      .kv_dtype = c->model_kv_dtype,
                                                      .deterministic = c->engine_deterministic,
                                                      .mtp = c->model_mtp,
                                                      .block_tokens = (uint32_t)c->kv_block_tokens},
                          &d->layout, &d->root, err, sizeof(err));
    if (st != BT_OK) {
        BT_ERROR("config", "key=model.path why=%s", err);
        d->exit_code = bt_conf_model_exit(st);
        return false;
    }
    d->slab_path = bt_kvstore_slab_path(&d->conf);
    struct bt_slab_spec spec = {.path = d->slab_path,
                                .bytes = d->conf.slab_bytes,
                                .layout = &d->layout,
                                .root = &d->root,
                                .incarnation = d->incarnation};
    if (!bt_mem_limit_allows(bt_mem_limit("/proc/self/cgroup", "/sys/fs/cgroup"), spec.bytes, err,
                             sizeof(err))) {
        BT_WARN("memory_limit", "why=%s", err);
    }
    bool adopted = bt_slab_adopt(&spec, ADOPT_WAIT_MS, &d->slab, err, sizeof(err)) == BT_OK;
    if (!adopted) {
        BT_INFO("slab_new", "path=%s why=%s", d->slab_path, err);
    }
    if (!adopted &&
        bt_slab_create(&spec, slab_progress, &shown, &d->slab, err, sizeof(err)) != BT_OK) {
        BT_ERROR("slab", "why=%s", err);
        return false;
    }
    uint32_t n = d->slab->super->n_slots;
    d->cache = bt_cache_create(d->slab, &d->layout,
                               BT_MAX(1u, (uint32_t)(BT_KVSTORE_TRANSIT_SHARE * (double)n)),
                               bt_evict_by_name(d->conf.eviction));
    BT_ASSERT(bt_tenants_create(d->conf.quota_tenants, &d->tenants, err, sizeof(err)) ==
              BT_OK); /* checked with the configuration */
    bt_cache_set_tenants(d->cache, d->tenants);
    d->cache->copies_max = (uint32_t)(BT_KVSTORE_COPIES_SHARE * (double)n);
    if (bt_sealer_create(d->loop, d->cache->pool, d->layout.n_layers, &d->sealer) != BT_OK) {
        return false;
    }
    d->adopt = adopted ? bt_adopt_start(d->loop, d->cache, d->sealer) : NULL;
    return true;
}

/* false: the configuration must be changed. A kvstore whose disk is full or broken still serves. */
static bool start_ssd(struct daemon *d)
{
    const struct bt_kvstore_conf *c = &d->conf;
    char err[512];
    if (c->ssd_path == NULL) {
        return true;
    }
    struct bt_tier_config tc = {.loop = d->loop,
                                .cache = d->cache,
                                .slab = d->slab,
                                .block_tokens = (uint32_t)c->common.kv_block_tokens,
                                .load_ms = c->ssd_load_ms,
                                .metrics = d->metrics};
    struct bt_ssd_config sc = {.path = c->ssd_path,
                               .bytes = c->ssd_bytes,
                               .queue_depth = BT_KVSTORE_SSD_QUEUE,
                               .backlog_max = (uint32_t)c->ssd_backlog,
                               .probe_ms = c->ssd_probe_ms,
                               .stall_ms = BT_KVSTORE_SSD_STALL_MS,
                               .policy = bt_evict_by_name(BT_KVSTORE_SSD_EVICTION)};
    /* Checked with the configuration. */
    BT_ASSERT(bt_kvstore_write_policy(c->ssd_write_policy, &tc.policy));
    if (bt_tier_create(&tc, &sc, &d->tier, err, sizeof(err)) != BT_OK) {
        BT_ERROR("config", "key=kvstore.ssd.path why=%s", err);
        return false;
    }
    return true;
}

static bool start_parts(struct daemon *d)
{
    const struct bt_conf_common *c = &d->conf.common;
    char err[512];
    struct bt_pins_config pc = {.loop = d->loop,
                                .cache = d->cache,
                                .tier = d->tier,
                                .pin_max = d->conf.pin_max,
                                .metrics = d->metrics};
    d->pins = bt_pins_create(&pc); /* it has no pins before etcd sends them */
    d->quota_metrics = bt_quota_metrics_create(d->metrics, d->cache, d->tier);
    struct bt_serve_config sc = {.loop = d->loop,
                                 .cluster = c->cluster_name,
                                 .name = d->name,
                                 .node = c->node_id,
                                 .incarnation = d->incarnation,
                                 .root = d->root,
                                 .layout_id = d->layout.layout_id,
                                 .cache = d->cache,
                                 .tier = d->tier,
                                 .pins = d->pins};
    struct bt_grants_config gc = {.loop = d->loop,
                                  .slab = d->slab,
                                  .layout = d->layout,
                                  .flow_chunk_tokens = (uint32_t)c->kv_flow_chunk_tokens,
                                  .reclaim_ms = d->conf.reclaim_ms,
                                  .cache = d->cache,
                                  .sealer = d->sealer,
                                  .tier = d->tier,
                                  .fetch_wait_ms = d->conf.fetch_wait_ms,
                                  .stream_max = BT_KVSTORE_STREAM_SHARE,
                                  .overlap = d->conf.overlap,
                                  .fetch_stall_ms = d->conf.fetch_stall_ms,
                                  .peer_known = peer_known,
                                  .peer_arg = d,
                                  .metrics = d->metrics,
                                  .to_session = bt_serve_to_session};
    d->serve = bt_serve_create(&sc);
    d->grants = bt_grants_create(&gc);
    bt_serve_set_grants(d->serve, d->grants);
    struct bt_serve_local_config lc = {.loop = d->loop,
                                       .run_dir = c->run_dir,
                                       .node = c->node_id,
                                       .incarnation = d->incarnation,
                                       .slab = d->slab,
                                       .grants = d->grants};
    if (bt_serve_local_create(&lc, &d->local, err, sizeof(err)) != BT_OK) {
        BT_ERROR("run_dir", "why=%s", err);
        return false;
    }
    struct bt_wire_config wc = {.cluster = c->cluster_name,
                                .name = d->name,
                                .incarnation = d->incarnation,
                                .layout = &d->layout,
                                .root = &d->root,
                                .crcs = bt_pool_crcs(d->cache->pool),
                                .listen = (const char *const *)d->conf.wire_listen,
                                .allow_routable = d->conf.wire_allow_routable,
                                .over_grpc = strcmp(d->conf.wire_transport, "grpc") == 0,
                                .tls = d->tls.cluster,
                                .secret = d->secret.bytes,
                                .secret_len = d->secret.len,
                                .idle_ms = BT_KVSTORE_WIRE_IDLE_MS};
    bt_status_t wired =
        bt_wire_create(d->loop, d->rpc, d->server, d->slab, &wc, &bt_grants_wire_ops, d->grants,
                       d->metrics, &d->wire, err, sizeof(err));
    explicit_bzero(d->secret.bytes, sizeof(d->secret.bytes));
    d->secret.len = 0;
    if (wired != BT_OK) {
        BT_ERROR("wire", "why=%s", err);
        return false;
    }
    struct bt_grants_wire gw = bt_grants_wire_real;
    gw.w = d->wire;
    bt_grants_set_wire(d->grants, &gw);
    bt_serve_register(d->serve, d->server);
    bt_rpc_server_start(d->server);
    return true;
}

/* Stops in the reverse order of start; any part may be missing. */
static void stop(struct daemon *d)
{
    if (d->table != NULL) {
        bt_member_unwatch(d->table);
    }
    bt_pin_watch_stop(d->pin_watch);
    if (d->member != NULL) {
        bt_member_leave(d->member);
    }
    bt_etcd_destroy(d->etcd);
    while (!bt_list_empty(&d->peers)) {
        peer_free(BT_CONTAINER_OF(d->peers.next, struct peer, link));
    }
    /* Before the objects that calls need, since the loop turns once more below. */
    if (d->server != NULL) {
        bt_rpc_server_destroy(d->server);
    }
    if (d->serve != NULL && d->grants != NULL) {
        bt_serve_destroy(d->serve); /* releases the conductors' reservations, which uses the wire */
    }
    if (d->grants != NULL) {
        bt_grants_stop(d->grants);
    }
    bt_serve_local_destroy(d->local);
    bt_wire_destroy(d->wire); /* ends all sending and receiving; its last callbacks come now */
    if (d->loop != NULL) {
        bt_loop_poll(d->loop, 0); /* tasks that other threads posted free their data */
    }
    bt_sealer_destroy(d->sealer);
    bt_adopt_destroy(d->adopt);
    bt_grants_destroy(d->grants);
    bt_status_page_destroy(d->page);
    if (d->rpc != NULL) {
        bt_rpc_destroy(d->rpc);
    }
    bt_tls_conf_stop(&d->tls);
    bt_pins_destroy(d->pins);
    bt_quota_metrics_destroy(d->quota_metrics);
    bt_tier_destroy(d->tier);
    bt_cache_destroy(d->cache);
    bt_tenants_destroy(d->tenants);
    if (d->slab != NULL) {
        char err[256];
        if (!d->conf.slab_keep && /* while this process still holds its lock */
            bt_slab_unlink(d->slab, d->slab_path, err, sizeof(err)) != BT_OK) {
            BT_WARN("slab_left", "path=%s why=%s", d->slab_path, err);
        }
        bt_slab_unmap(d->slab);
    }
    bt_metrics_destroy(d->metrics);
    bt_notify_end();
    bt_loop_destroy(d->loop);
    free(d->name);
    free(d->slab_path);
    free(d->rpc_addr);
    free(d->http_addr);
    free(d->model_id);
    bt_conf_cleanup(&bt_kvstore_schema, &d->conf);
}

static void on_reload_signal(void *arg, int signo)
{
    struct daemon *d = arg;
    (void)signo;
    bt_conf_reload_all(&bt_kvstore_schema, &d->conf, "kvstore");
}

int main(int argc, char **argv)
{
    struct daemon d = {0};
    int exit_code = BT_EXIT_CONFIG;
    bt_wx_child_main_if_asked(argc, argv);
    if (!bt_conf_main(&bt_kvstore_schema, argc, argv, &d.conf, &exit_code)) {
        return exit_code;
    }
    bt_conf_log_start(&d.conf.common, "kvstore");
    (void)bt_loop_process_limits();
    bt_list_init(&d.peers);
    d.name = bt_sprintf("kvstore-%s", d.conf.common.node_id);
    d.model_id = bt_conf_model_id(&d.conf.common);
    do {
        bt_random(&d.incarnation, sizeof(d.incarnation));
    } while (d.incarnation == 0);
    BT_INFO("starting", "version=\"%s\" incarnation=%016llx slab_bytes=%llu", bt_version(),
            (unsigned long long)d.incarnation, (unsigned long long)d.conf.slab_bytes);
    if (bt_loop_create(&d.loop) != BT_OK) {
        return BT_EXIT_FAILED;
    }
    bt_loop_on_signal(d.loop, SIGTERM, on_signal, &d);
    bt_loop_on_signal(d.loop, SIGINT, on_signal, &d);
    bt_loop_on_signal(d.loop, SIGHUP, on_reload_signal, &d);
    bt_notify_start(d.loop, bt_conf_env("NOTIFY_SOCKET"), bt_conf_env("WATCHDOG_USEC"),
                    bt_conf_env("WATCHDOG_PID"));
    d.metrics = bt_metrics_create();
    if (!bt_conf_secret(&d.conf.common, &d.secret)) {
        d.exit_code = BT_EXIT_CONFIG;
    } else if (start_servers(&d) && start_memory(&d) && start_ssd(&d) && start_parts(&d) &&
               join(&d)) {
        bt_loop_run(d.loop);
    } else if (d.exit_code == BT_EXIT_OK) {
        d.exit_code = BT_EXIT_FAILED;
    }
    stop(&d);
    return d.exit_code;
}
