/* protobuf-c messages over bt_rpc. Loop's thread. */
#include "common/rpc/pb.h"

#include <stdlib.h>

#define STACK_BYTES 2048 /* most messages of a session are smaller and need no allocation */

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

size_t bt_pb_size(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_FLOAT: return 4;
    case PROTOBUF_C_TYPE_ENUM: return sizeof(int);
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE: return 8;
    case PROTOBUF_C_TYPE_BOOL: return sizeof(protobuf_c_boolean);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE: return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES: return sizeof(ProtobufCBinaryData);
    }
    BT_ASSERT(false);
    return 0;
}

static void forget_unknown_in(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f)
{
    uint8_t *base = (uint8_t *)m;
    void *at = base + f->offset;
    if (f->type != PROTOBUF_C_TYPE_MESSAGE) {
        return;
    }
    if (f->label == PROTOBUF_C_LABEL_REPEATED) {
        size_t n = *(const size_t *)(const void *)(base + f->quantifier_offset);
        ProtobufCMessage **list = *(ProtobufCMessage ***)at;
        for (size_t i = 0; i < n; i++) {
            bt_pb_forget_unknown(list[i]);
        }
        return;
    }
    bool absent = (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0 &&
                  *(const uint32_t *)(const void *)(base + f->quantifier_offset) != f->id;
    ProtobufCMessage *sub = absent ? NULL : *(ProtobufCMessage **)at;
    if (sub != NULL) {
        bt_pb_forget_unknown(sub);
    }
}

void bt_pb_forget_unknown(ProtobufCMessage *m)
{
    for (unsigned i = 0; i < m->n_unknown_fields; i++) {
        free(m->unknown_fields[i].data);
    }
    free(m->unknown_fields);
    m->unknown_fields = NULL;
    m->n_unknown_fields = 0;
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        forget_unknown_in(m, &m->descriptor->fields[i]);
    }
}
