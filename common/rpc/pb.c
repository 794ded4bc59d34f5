/* protobuf-c messages over bt_rpc. Loop's thread. */
#include "common/rpc/pb.h"

#include <stdlib.h>

#define STACK_BYTES 2048 /* most messages of a session are smaller: no allocation for those */

bt_status_t bt_rpc_stream_send_pb(struct bt_rpc_stream *s, const ProtobufCMessage *msg)
{
    uint8_t small[STACK_BYTES];
    size_t len = protobuf_c_message_get_packed_size(msg);
    uint8_t *buf = len <= sizeof(small) ? small : bt_malloc(len);
    protobuf_c_message_pack(msg, buf);
    bt_status_t st = bt_rpc_stream_send(s, buf, len);
    if (buf != small) {
        free(buf);
    }
    return st;
}

void bt_rpc_call_reply_pb(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    uint8_t small[STACK_BYTES];
    size_t len = protobuf_c_message_get_packed_size(msg);
    uint8_t *buf = len <= sizeof(small) ? small : bt_malloc(len);
    protobuf_c_message_pack(msg, buf);
    bt_rpc_call_reply(call, BT_GRPC_OK, "", buf, len);
    if (buf != small) {
        free(buf);
    }
}
