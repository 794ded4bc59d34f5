/* Ranges of received fields. Every message that a daemon or batonctl receives, from peers, from
 * etcd or from each other, is unpacked here, within a limit of memory. Each of its fields is
 * compared with its entry in the table of its protocol (*.def, one for each file of proto/) before
 * any handler sees it. A field without an entry is refused, so that a new one cannot be forgotten;
 * tests/lint finds a message that is unpacked elsewhere. Any thread. */
#ifndef BT_RPC_RANGES_H
#define BT_RPC_RANGES_H

#include <protobuf-c/protobuf-c.h>

#include "admin.pb-c.h"
#include "cluster.pb-c.h"
#include "common/base/base.h"
#include "etcd.pb-c.h"
#include "local.pb-c.h"
#include "peer.pb-c.h"
#include "session.pb-c.h"

/* Limits that the tables share with the code that relies on them. */
#define BT_RANGE_BLOCKS_MAX  24000      /* of one grant or lease */
#define BT_RANGE_DEPTH_MAX   (1u << 24) /* number of a block in its prompt */
#define BT_RANGE_TOKENS_MAX  (1u << 28) /* of one prompt */
#define BT_RANGE_FETCH_MAX   4096       /* keys of one fetch from a peer */
#define BT_RANGE_FLOWS_MAX   4096       /* flows that one LaneEnd names */
#define BT_RANGE_CARDS_MAX   8          /* network cards of one machine */
#define BT_RANGE_ADDRESS_MAX 4096       /* bytes of a UCX address */
#define BT_RANGE_EVENTS_MAX  2048       /* block events of one message */
#define BT_RANGE_TOP_MAX     64         /* most likely tokens beside one */
#define BT_RANGE_STEP_MAX    65536      /* tokens that one message of a worker brings */

typedef enum {
    BT_RANGE_ANY,     /* every value is handled: identifiers, counters, what is only compared */
    BT_RANGE_NUMBER,  /* integer or enum, also repeated */
    BT_RANGE_REAL,    /* float or double, also repeated; NaN is never in range */
    BT_RANGE_LENGTH,  /* bytes of a string or of bytes: a multiple of `unit` */
    BT_RANGE_MESSAGES /* repeated message: count_max only */
} bt_range_kind_t;

struct bt_range {
    const char *message, *field;
    bt_range_kind_t kind;
    double real_min, real_max;
    int64_t min;
    uint64_t max;
    uint32_t unit;
    uint32_t count_max; /* repeated fields: entries */
};

/* Received messages: X(name in C, type, its descriptor's name). */
#define BT_RANGE_ROOTS(X)                                                                          \
    X(local, Baton__LocalMsg, baton__local_msg)                                                    \
    X(peer, Baton__PeerMsg, baton__peer_msg)                                                       \
    X(to_kvstore, Baton__ToKvstore, baton__to_kvstore)                                             \
    X(to_worker, Baton__ToWorker, baton__to_worker)                                                \
    X(from_kvstore, Baton__FromKvstore, baton__from_kvstore)                                       \
    X(from_worker, Baton__FromWorker, baton__from_worker)                                          \
    X(blocks_credit, Baton__BlocksCredit, baton__blocks_credit)                                    \
    X(block_events, Baton__BlockEvents, baton__block_events)                                       \
    X(member, Baton__Member, baton__member)                                                        \
    X(starting, Baton__Starting, baton__starting)                                                  \
    X(role_table, Baton__RoleTable, baton__role_table)                                             \
    X(cluster_settings, Baton__ClusterSettings, baton__cluster_settings)                           \
    X(pin, Baton__Pin, baton__pin)                                                                 \
    X(admin_status_request, Baton__AdminStatusRequest, baton__admin_status_request)                \
    X(admin_blocks_request, Baton__AdminBlocksRequest, baton__admin_blocks_request)                \
    X(admin_requests_request, Baton__AdminRequestsRequest, baton__admin_requests_request)          \
    X(admin_explain_request, Baton__AdminExplainRequest, baton__admin_explain_request)             \
    X(admin_drain_request, Baton__AdminDrainRequest, baton__admin_drain_request)                   \
    X(admin_role_request, Baton__AdminRoleRequest, baton__admin_role_request)                      \
    X(admin_pin_request, Baton__AdminPinRequest, baton__admin_pin_request)                         \
    X(admin_unpin_request, Baton__AdminUnpinRequest, baton__admin_unpin_request)                   \
    X(admin_pins_request, Baton__AdminPinsRequest, baton__admin_pins_request)                      \
    X(admin_status, Baton__AdminStatus, baton__admin_status)                                       \
    X(admin_blocks, Baton__AdminBlocks, baton__admin_blocks)                                       \
    X(admin_requests, Baton__AdminRequests, baton__admin_requests)                                 \
    X(admin_explanation, Baton__AdminExplanation, baton__admin_explanation)                        \
    X(admin_drain, Baton__AdminDrain, baton__admin_drain)                                          \
    X(admin_role, Baton__AdminRole, baton__admin_role)                                             \
    X(admin_pin, Baton__AdminPin, baton__admin_pin)                                                \
    X(admin_pins, Baton__AdminPins, baton__admin_pins)                                             \
    X(watch_response, Etcdserverpb__WatchResponse, etcdserverpb__watch_response)                   \
    X(range_response, Etcdserverpb__RangeResponse, etcdserverpb__range_response)                   \
    X(txn_response, Etcdserverpb__TxnResponse, etcdserverpb__txn_response)                         \
    X(grant_response, Etcdserverpb__LeaseGrantResponse, etcdserverpb__lease_grant_response)        \
    X(alive_response, Etcdserverpb__LeaseKeepAliveResponse,                                        \
      etcdserverpb__lease_keep_alive_response)                                                     \
    X(time_response, Etcdserverpb__LeaseTimeToLiveResponse,                                        \
      etcdserverpb__lease_time_to_live_response)

/* bt_<name>_unpack returns the message, which the caller frees with the generated free_unpacked(m,
 * NULL). It returns NULL if the bytes are not such a message, or if a field is out of its range;
 * text names the fault. */
#define BT_RANGE_DECLARE(name, type, of)                                                           \
    type *bt_##name##_unpack(const void *data, size_t len, char *text, size_t cap);
BT_RANGE_ROOTS(BT_RANGE_DECLARE)
#undef BT_RANGE_DECLARE

/* The same of any of these, by its descriptor. */
ProtobufCMessage *bt_message_unpack(const ProtobufCMessageDescriptor *d, const void *data,
                                    size_t len, char *text, size_t cap);
/* A copy of a message that this process has made or checked already; it is freed in the same
 * way. */
void *bt_message_copy(const ProtobufCMessage *m);

/* Checks only the fields of an unpacked message: ERR_PEER_PROTOCOL with the text as above. For
 * fuzzers and tests, which make messages by hand: a daemon cannot unpack without the check. */
bt_status_t bt_message_check(const ProtobufCMessage *m, char *text, size_t cap) BT_MUST_CHECK;

/* The entry of a field; NULL: none. For the test that every field has one. */
const struct bt_range *bt_range_of(const ProtobufCMessageDescriptor *message, const char *field);
/* The i-th received message; NULL: there are no more. For that test. */
const ProtobufCMessageDescriptor *bt_range_root(size_t i);

#endif
