/* Inside common/rpc: what tls.c (files) and tls_peer.c (other people's certificates) share. */
#ifndef BT_RPC_TLS_PRIV_H
#define BT_RPC_TLS_PRIV_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "common/base/cert.h"
#include "common/base/revoked.h"
#include "common/conf/watch.h"
#include "common/rpc/rpc_priv.h"
#include "common/rpc/tls.h"

#define BT_TLS_SCHEME    "baton://"
#define BT_TLS_LOOK_S    5u /* between looks at the files, gRPC's and ours */
#define BT_TLS_REFUSALS  16 /* different ones that are remembered, so that each is logged rarely */
#define BT_TLS_REPEAT_NS (60ull * 1000000000)

enum { BT_TLS_CA, BT_TLS_CERT, BT_TLS_KEY, BT_TLS_REVOKED, BT_TLS_FILES };

struct bt_tls {
    _Atomic uint32_t refs; /* the owner's, one for each credentials object in gRPC */
    /* constant */
    char *key, *files[BT_TLS_FILES]; /* BT_TLS_REVOKED: NULL if there is none */
    char *cluster, *role, *node;
    bool host_names;
    grpc_tls_certificate_provider *provider;
    /* under the lock: handshakes are checked on gRPC's threads */
    pthread_mutex_t lock;
    struct bt_cert_ca *ca;
    struct bt_revoked *revoked; /* NULL: none */
    struct bt_metric *m_not_after, *m_refused;
    struct {
        uint64_t hash, at_ns;
    } refusals[BT_TLS_REFUSALS];
    /* the loop's thread writes; it alone reads without the lock */
    struct bt_cert own;
    struct bt_loop *loop;
    struct bt_timer timer;
    struct bt_conf_stamp stamps[BT_TLS_FILES];
    struct bt_conf_expiry expiry; /* of own */
};

void bt_tls_unref(struct bt_tls *t);

/* ---- tls_peer.c ---- */
/* tls NULL: plaintext. who: "role" or "role/node" that must answer; NULL: any daemon of the
 * cluster.
 */
grpc_channel_credentials *bt_tls_channel_credentials(struct bt_tls *tls, const char *who);
grpc_server_credentials *bt_tls_server_credentials(struct bt_tls *tls);
/* May the caller use a method that only `role` may use (NULL: every member of the cluster)? text
 * gets a name for the caller. Counts and logs a refusal. tls NULL: yes. */
bool bt_tls_may_call(struct bt_tls *tls, grpc_call *call, const char *method, const char *role,
                     char *text, size_t cap);
/* Does the certificate at the other end of a call name this role and node? tls NULL: true. */
bool bt_tls_call_is(struct bt_tls *tls, grpc_call *call, const char *role, const char *node);
/* The first URI in the certificate at the other end of a call, for logs. */
void bt_tls_call_name(grpc_call *call, char *text, size_t cap);
/* Does the certificate at the other end of a call still count? False once it has expired or is on
 * the list; text says which and whose it is. True before the handshake, and if tls is NULL or knows
 * servers by host names. Counts and logs a refusal. */
bool bt_tls_call_counts(struct bt_tls *tls, grpc_call *call, char *text, size_t cap);
/* Translates gRPC's message about a failed handshake; false: it is about something else. */
bool bt_tls_log(const char *file, const char *message);

#endif
