/* protobuf-c messages over bt_rpc: pack into a temporary buffer and send. */
#ifndef BT_RPC_PB_H
#define BT_RPC_PB_H

#include <protobuf-c/protobuf-c.h>

#include "common/base/buf.h"
#include "common/rpc/rpc.h"

/* Packs msg and queues it; status codes as bt_rpc_stream_send. */
bt_status_t bt_rpc_stream_send_pb(struct bt_rpc_stream *s,
                                  const ProtobufCMessage *msg) BT_MUST_CHECK;
/* Packs msg and replies OK. */
void bt_rpc_call_reply_pb(struct bt_rpc_call *call, const ProtobufCMessage *msg);

/* Appends msg as JSON: every field by the name that it has in its .proto. fixed64 (ids) and bytes
 * are hexadecimal text, enums their names, absent messages and numbers that are not finite null.
 * Strings are escaped as in logs. */
void bt_pb_json(const ProtobufCMessage *msg, struct bt_buf *out);

/* Bytes of one value of this type in the struct of an unpacked message. */
size_t bt_pb_size(ProtobufCType type);

/* Frees the unknown fields of an unpacked message and of the messages in it. A message that is
 * packed again must not have them, because protobuf-c writes some unknown tags in a form that it
 * cannot read again. */
void bt_pb_forget_unknown(ProtobufCMessage *m);

#endif
