/* TLS with certificates on both sides, for the servers and channels of common/rpc. The identity of
 * a daemon is in the certificate's subject alternative names, as URIs baton://CLUSTER/ROLE/NODE,
 * one or more: roles are conductor, prefill, decode, kvstore and admin (batonctl).
 *
 * The files are watched: a certificate, key or CA that is replaced is used for new connections
 * within seconds; those that stand go on. A peer whose certificate expires or is put on the list of
 * revoked ones loses its standing streams within seconds and cannot make new calls. */
#ifndef BT_RPC_TLS_H
#define BT_RPC_TLS_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"

struct bt_tls; /* counted: channels keep it until gRPC has let go of them */

struct bt_tls_config {
    const char *key; /* beginning of the keys in error messages: "cluster.tls" */
    const char *ca, *cert, *private_key; /* files in PEM */
    const char *revoked;     /* file with a list of certificates that count no more; NULL: none */
    const char *cluster;     /* NULL: the one of our certificate */
    const char *role, *node; /* that our certificate must name; role NULL: any */
    /* Servers (etcd's) are known by the host name or address that is dialed, as everywhere else,
     * and not by a role. cluster, role and node do not matter. */
    bool host_names;
};

/* Reads and checks the files: ERR_CONFIG, err names key, file, fault and remedy. */
bt_status_t bt_tls_create(const struct bt_tls_config *conf, struct bt_tls **tls_p, char *err,
                          size_t err_cap) BT_MUST_CHECK;
/* Looks at the files every few seconds on this loop, and tells of new ones, and of old ones that
 * are about to end, in the log; metrics may be NULL. */
void bt_tls_watch(struct bt_tls *tls, struct bt_loop *loop, struct bt_metrics *metrics);
/* When our certificate ends, in seconds since 1970. */
int64_t bt_tls_not_after_s(struct bt_tls *tls);
/* Ends the watching and the caller's reference. NULL is allowed. */
void bt_tls_release(struct bt_tls *tls);

/* Does the URI name this cluster, role and node (NULL: any of it)? Pure. */
bool bt_tls_uri_is(const char *uri, const char *cluster, const char *role, const char *node);

#endif
