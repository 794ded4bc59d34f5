/* Makes a struct bt_tls from the configuration. Called at a daemon's start and end, on the loop's
 * thread. */
#include "common/rpc/tls_conf.h"

#include <string.h>

#include "common/log/log.h"
#include "common/rpc/address.h"

static bool make(const struct bt_tls_config *conf, struct bt_rpc *rpc, struct bt_metrics *metrics,
                 struct bt_tls **tls_p)
{
    char err[700];
    if (bt_tls_create(conf, tls_p, err, sizeof(err)) != BT_OK) {
        BT_ERROR("config", "why=%s", err);
        return false;
    }
    bt_tls_watch(*tls_p, bt_rpc_loop(rpc), metrics);
    return true;
}

bool bt_tls_conf_start(struct bt_tls_conf *t, const struct bt_conf_common *c, const char *role,
                       struct bt_rpc *rpc, struct bt_metrics *metrics)
{
    struct bt_tls_config cluster = {.key = "cluster.tls",
                                    .ca = c->cluster_tls_ca,
                                    .cert = c->cluster_tls_cert,
                                    .private_key = c->cluster_tls_key,
                                    .revoked = c->cluster_tls_revoked,
                                    .cluster = c->cluster_name,
                                    .role = role,
                                    .node = c->node_id};
    bool own = c->etcd_tls_cert != NULL;
    struct bt_tls_config etcd = {.key = own || c->etcd_tls_ca != NULL ? "etcd.tls" : "cluster.tls",
                                 .ca = c->etcd_tls_ca != NULL ? c->etcd_tls_ca : c->cluster_tls_ca,
                                 .cert = own ? c->etcd_tls_cert : c->cluster_tls_cert,
                                 .private_key = own ? c->etcd_tls_key : c->cluster_tls_key,
                                 .host_names = true};
    bool secure = false;
    for (size_t i = 0; c->etcd_endpoints[i] != NULL; i++) {
        secure |= strncmp(c->etcd_endpoints[i], "https://", 8) == 0;
    }
    if (cluster.ca != NULL) {
        if (!make(&cluster, rpc, metrics, &t->cluster)) {
            return false;
        }
        bt_rpc_set_tls(rpc, t->cluster);
        BT_INFO("tls", "cert=%s", cluster.cert);
    } else if (!bt_address_port_private(c->rpc_listen)) {
        BT_WARN("rpc_plaintext", "listen=%s why=%s remedy=%s", c->rpc_listen,
                "gRPC here is neither encrypted nor authenticated: every host that reaches this "
                "address can send the calls of a conductor or batonctl and read all traffic",
                "set cluster.tls.ca, .cert and .key, or listen on a private address");
    }
    return !secure || make(&etcd, rpc, etcd.ca == cluster.ca ? NULL : metrics, &t->etcd);
}

void bt_tls_conf_stop(struct bt_tls_conf *t)
{
    bt_tls_release(t->etcd);
    bt_tls_release(t->cluster);
    t->etcd = t->cluster = NULL;
}
