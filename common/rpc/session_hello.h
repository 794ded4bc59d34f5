/* What daemons compare before they talk to each other: the identity in SessionHello and PeerHello.
 * Pure. */
#ifndef BT_RPC_SESSION_HELLO_H
#define BT_RPC_SESSION_HELLO_H

#include "common/kv/key.h"
#include "session.pb-c.h"

/* The newest and the oldest version of the messages between daemons that this program speaks; two
 * daemons use the newest that both speak. docs/UPGRADING.md says when they are raised. */
#ifndef BT_RPC_SESSION_VERSION
#define BT_RPC_SESSION_VERSION 1
#endif
#define BT_RPC_SESSION_OLDEST 1

struct bt_rpc_identity {
    const char *cluster, *name, *node;
    uint64_t incarnation;
    const struct bt_kv_key *root; /* weights and settings that KV depends on */
    uint64_t layout_id;
};

/* The field that differs, the most serious one first. */
typedef enum {
    BT_HELLO_FITS,
    BT_HELLO_VERSION,
    BT_HELLO_CLUSTER,
    BT_HELLO_NAME,        /* the hello has no name */
    BT_HELLO_CERTIFICATE, /* it is not the daemon that it names */
    BT_HELLO_EXPECTED,    /* it means another incarnation than this one */
    BT_HELLO_INCARNATION, /* it is another one than was dialled */
    BT_HELLO_LAYOUT,
    BT_HELLO_ROOT
} bt_hello_fault_t;

/* A peer's hello, whichever message it came in. */
struct bt_rpc_hello {
    uint32_t version, oldest;             /* oldest 0: only `version` */
    const char *cluster, *name, *release; /* release "": not told */
    uint64_t incarnation;
    uint64_t expect_incarnation; /* 0: any */
    ProtobufCBinaryData root_key;
    uint64_t layout_id;
};

/* Returns whether the hello fits a daemon that is `self`. dialled: the incarnation that this side
 * wants to reach, 0 for a listener. proved: the peer's certificate belongs to the daemon that the
 * hello names, or there is no TLS. */
bt_hello_fault_t bt_rpc_hello_compare(const struct bt_rpc_identity *self,
                                      const struct bt_rpc_hello *h, uint64_t dialled, bool proved);

/* Why a hello with this fault is refused, for both logs: both sides by name, both values, and what
 * to do. NULL only for FITS; else the text is in buf (BT_RPC_SESSION_WHY bytes hold it). self, h,
 * dialled: as they were compared. */
const char *bt_rpc_hello_why(bt_hello_fault_t fault, const struct bt_rpc_identity *self,
                             const struct bt_rpc_hello *h, uint64_t dialled, char *buf, size_t cap);

/* Fills the hello of `self`, whose strings it points to. expect_incarnation: of the peer, 0: any.
 */
void bt_rpc_hello_fill(const struct bt_rpc_identity *self, uint64_t expect_incarnation,
                       Baton__SessionHello *h);
struct bt_rpc_hello bt_rpc_hello_read(const Baton__SessionHello *h);

#endif
