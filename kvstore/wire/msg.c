/* Building and checking the headers of active messages. Pure; any thread. */
#include "kvstore/wire/msg.h"

#include <string.h>

#include "common/base/crc32c.h"

size_t bt_wire_seg_finish(struct bt_wire_seg_hdr *h)
{
    size_t len = sizeof(*h) + 4u * h->n_segs;
    h->magic = BT_WIRE_SEG_MAGIC;
    h->version = BT_WIRE_VERSION;
    h->crc = 0;
    h->crc = bt_crc32c(0, h, len);
    return len;
}

bt_status_t bt_wire_seg_parse(const void *p, size_t len, uint64_t nonce, struct bt_wire_seg_hdr *h,
                              const uint8_t **crcs_p, const char **why_p)
{
    struct bt_wire_seg_hdr got;
    if (len < sizeof(got)) {
        *why_p = "the header is too short";
        return BT_ERR_PEER_PROTOCOL;
    }
    memcpy(&got, p, sizeof(got));
    if (got.magic != BT_WIRE_SEG_MAGIC || got.version != BT_WIRE_VERSION) {
        *why_p = "wrong magic or version in the header";
        return BT_ERR_PEER_PROTOCOL;
    }
    if (got.n_segs == 0 || got.n_segs > BT_WIRE_SEGS_MAX || len != sizeof(got) + 4u * got.n_segs) {
        *why_p = "wrong number of segments";
        return BT_ERR_PEER_PROTOCOL;
    }
    const uint8_t *crcs = (const uint8_t *)p + sizeof(got);
    struct bt_wire_seg_hdr zeroed = got;
    zeroed.crc = 0;
    if (bt_crc32c(bt_crc32c(0, &zeroed, sizeof(zeroed)), crcs, 4u * got.n_segs) != got.crc) {
        *why_p = "header checksum";
        return BT_ERR_PEER_PROTOCOL;
    }
    if (got.nonce != nonce) {
        *why_p = "it has the nonce of another session";
        return BT_ERR_PEER_PROTOCOL;
    }
    *h = got;
    *crcs_p = crcs;
    return BT_OK;
}

bt_status_t bt_wire_seg_check(const struct bt_wire_seg_hdr *h, const struct bt_flow_shape *shape,
                              uint32_t first_block, uint32_t layer_bytes, size_t payload,
                              const char **why_p)
{
    uint32_t first, end;
    if (h->item >= bt_flow_items(shape)) {
        *why_p = "its item is beyond the end of the transfer";
        return BT_ERR_PEER_PROTOCOL;
    }
    bt_flow_item_blocks(shape, h->item, &first, &end);
    first = BT_MAX(first, first_block);
    if (h->first_block < first || h->first_block >= end || h->n_segs > end - h->first_block) {
        *why_p = "its blocks are outside its item";
        return BT_ERR_PEER_PROTOCOL;
    }
    if (h->seg_bytes != layer_bytes || payload != (size_t)h->n_segs * layer_bytes) {
        *why_p = "payload length";
        return BT_ERR_PEER_PROTOCOL;
    }
    return BT_OK;
}
