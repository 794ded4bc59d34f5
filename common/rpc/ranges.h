/* Ranges of the fields of what arrives: every message of the local, peer and session protocols is
 * unpacked here, within a bound of memory, and each of its fields is held against its entry in
 * local.def, peer.def or session.def before any handler sees it. A field without an entry is
 * refused, so that a new one cannot be forgotten. Any thread. */
#ifndef BT_RPC_RANGES_H
#define BT_RPC_RANGES_H

#include <protobuf-c/protobuf-c.h>

#include "common/base/base.h"
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

struct bt_ranges; /* one protocol */

/* Each gives the message, to be freed with the generated free_unpacked(m, NULL); or NULL, and text
 * says which field is out of its range, or that the bytes are no such message. */
Baton__LocalMsg *bt_local_unpack(const void *data, size_t len, char *text, size_t cap);
Baton__PeerMsg *bt_peer_unpack(const void *data, size_t len, char *text, size_t cap);
Baton__ToKvstore *bt_to_kvstore_unpack(const void *data, size_t len, char *text, size_t cap);
Baton__ToWorker *bt_to_worker_unpack(const void *data, size_t len, char *text, size_t cap);
Baton__FromKvstore *bt_from_kvstore_unpack(const void *data, size_t len, char *text, size_t cap);
Baton__BlocksCredit *bt_blocks_credit_unpack(const void *data, size_t len, char *text, size_t cap);

/* Fields alone, of a message that is unpacked: ERR_PEER_PROTOCOL with the text as above. */
bt_status_t bt_local_check(const Baton__LocalMsg *m, char *text, size_t cap) BT_MUST_CHECK;
bt_status_t bt_peer_check(const Baton__PeerMsg *m, char *text, size_t cap) BT_MUST_CHECK;
bt_status_t bt_session_check(const ProtobufCMessage *m, char *text, size_t cap) BT_MUST_CHECK;

/* The entry of a field; NULL: none. For the test that every field has one. */
const struct bt_range *bt_range_of(const ProtobufCMessageDescriptor *message, const char *field);

#endif
