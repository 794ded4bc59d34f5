/* Headers of the active messages between transfer threads, little-endian (every platform that we
 * build for is). They come from the network: bt_wire_seg_parse believes nothing. Pure. */
#ifndef BT_KVSTORE_WIRE_MSG_H
#define BT_KVSTORE_WIRE_MSG_H

#include "common/base/base.h"
#include "common/kv/flow.h"

#define BT_WIRE_VERSION     1
#define BT_WIRE_SEG_MAGIC   0x47455342u /* "BSEG" */
#define BT_WIRE_PROOF_MAGIC 0x464F5250u /* "PROF" */
#define BT_WIRE_SEGS_MAX    256         /* segments of one message */
#define BT_WIRE_MSG_BYTES_MAX                                                                      \
    (1u << 20) /* payload of one message, unless one segment is larger                             \
                */

enum { BT_WIRE_AM_PROOF = 1, BT_WIRE_AM_SEGMENTS = 2, BT_WIRE_AM_ASK = 3, BT_WIRE_AM_ECHO = 4 };

/* The first message on an endpoint: echoes the nonce that the other side sent over gRPC. The same
 * later as ASK, from a sender with several paths, and ECHO, the answer. */
struct bt_wire_proof {
    uint32_t magic, version;
    uint64_t nonce;
};

/* Segments of one layer of consecutive blocks; their bytes are the message's payload, one after
 * another. Followed by crcs[n_segs]. */
struct bt_wire_seg_hdr {
    uint32_t magic;
    uint16_t version, n_segs;
    uint64_t nonce; /* the receiver's, of this session */
    uint64_t request;
    uint32_t epoch, stream;
    uint32_t item, first_block;
    uint32_t seg_bytes;
    uint32_t crc; /* CRC32C over the header with this field 0, and crcs */
};

#define BT_WIRE_SEG_HDR_MAX (sizeof(struct bt_wire_seg_hdr) + 4 * BT_WIRE_SEGS_MAX)

/* Fills magic, version and crc of a header whose crcs follow it in memory. Returns its length. */
size_t bt_wire_seg_finish(struct bt_wire_seg_hdr *h);

/* Checks a received header of len bytes (any alignment) and copies it. crcs_p points into p.
 * ERR_PEER_PROTOCOL: *why_p names the fault. */
bt_status_t bt_wire_seg_parse(const void *p, size_t len, uint64_t nonce, struct bt_wire_seg_hdr *h,
                              const uint8_t **crcs_p, const char **why_p) BT_MUST_CHECK;

/* Returns whether the header's blocks are within its item and not below first_block, and whether
 * the payload has as many bytes as seg_bytes says. layer_bytes: of the item's layer. */
bt_status_t bt_wire_seg_check(const struct bt_wire_seg_hdr *h, const struct bt_flow_shape *shape,
                              uint32_t first_block, uint32_t layer_bytes, size_t payload,
                              const char **why_p) BT_MUST_CHECK;

#endif
