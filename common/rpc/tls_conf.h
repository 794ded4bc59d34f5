/* A daemon's TLS as its configuration says: cluster.tls.* between daemons, etcd.tls.* to etcd. */
#ifndef BT_RPC_TLS_CONF_H
#define BT_RPC_TLS_CONF_H

#include "common/conf/conf.h"
#include "common/rpc/rpc.h"
#include "common/rpc/tls.h"

struct bt_tls_conf {
    struct bt_tls *cluster; /* NULL: plaintext */
    struct bt_tls *etcd;    /* for endpoints with https://; NULL: none has it */
};

/* Reads the files, watches them on rpc's loop, and has rpc use `cluster` from now on. Warns of
 * plaintext on an address that is not private. False: the reason was logged. */
bool bt_tls_conf_start(struct bt_tls_conf *t, const struct bt_conf_common *c, const char *role,
                       struct bt_rpc *rpc, struct bt_metrics *metrics) BT_MUST_CHECK;
void bt_tls_conf_stop(struct bt_tls_conf *t); /* after rpc is gone */

#endif
