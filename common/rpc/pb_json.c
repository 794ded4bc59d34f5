/* protobuf-c messages as JSON, for people and pages; see pb.h. Any thread. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/log/fields.h"
#include "common/rpc/pb.h"

static void put_string(const char *s, struct bt_buf *out)
{
    size_t cap = 6 * strlen(s) + 32; /* the longest escape of a byte, and what bt_log_value wants */
    char *at = bt_buf_reserve(out, cap);
    out->len += bt_log_value(at, cap, true, s);
}

static void put_double(double v, struct bt_buf *out)
{
    if (isfinite(v)) {
        bt_buf_printf(out, "%.17g", v);
    } else {
        bt_buf_puts(out, "null");
    }
}

static void put_bytes(const ProtobufCBinaryData *b, struct bt_buf *out)
{
    bt_buf_puts(out, "\"");
    for (size_t i = 0; i < b->len; i++) {
        bt_buf_printf(out, "%02x", b->data[i]);
    }
    bt_buf_puts(out, "\"");
}

static void put_enum(const ProtobufCFieldDescriptor *f, int value, struct bt_buf *out)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(f->descriptor, value);
    if (v != NULL) {
        put_string(v->name, out);
    } else {
        bt_buf_printf(out, "%d", value);
    }
}

/* Appends the value at `at`. */
static void put_value(const ProtobufCFieldDescriptor *f, const void *at, struct bt_buf *out)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32: bt_buf_printf(out, "%" PRId32, *(const int32_t *)at); break;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32: bt_buf_printf(out, "%" PRIu32, *(const uint32_t *)at); break;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64: bt_buf_printf(out, "%" PRId64, *(const int64_t *)at); break;
    case PROTOBUF_C_TYPE_UINT64: bt_buf_printf(out, "%" PRIu64, *(const uint64_t *)at); break;
    case PROTOBUF_C_TYPE_FIXED64:
        bt_buf_printf(out, "\"%016" PRIx64 "\"", *(const uint64_t *)at);
        break;
    case PROTOBUF_C_TYPE_FLOAT: put_double((double)*(const float *)at, out); break;
    case PROTOBUF_C_TYPE_DOUBLE: put_double(*(const double *)at, out); break;
    case PROTOBUF_C_TYPE_BOOL:
        bt_buf_puts(out, *(const protobuf_c_boolean *)at ? "true" : "false");
        break;
    case PROTOBUF_C_TYPE_ENUM: put_enum(f, *(const int *)at, out); break;
    case PROTOBUF_C_TYPE_STRING: put_string(*(char *const *)at, out); break;
    case PROTOBUF_C_TYPE_BYTES: put_bytes(at, out); break;
    case PROTOBUF_C_TYPE_MESSAGE: bt_pb_json(*(ProtobufCMessage *const *)at, out); break;
    }
}

static void put_field(const uint8_t *base, const ProtobufCFieldDescriptor *f, struct bt_buf *out)
{
    const uint8_t *at = base + f->offset;
    if (f->label == PROTOBUF_C_LABEL_REPEATED) {
        size_t n = *(const size_t *)(const void *)(base + f->quantifier_offset);
        const uint8_t *list = *(const uint8_t *const *)(const void *)at;
        bt_buf_puts(out, "[");
        for (size_t i = 0; i < n; i++) {
            bt_buf_puts(out, i > 0 ? "," : "");
            put_value(f, list + i * bt_pb_size(f->type), out);
        }
        bt_buf_puts(out, "]");
        return;
    }
    bool other = (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0 &&
                 *(const uint32_t *)(const void *)(base + f->quantifier_offset) != f->id;
    bool absent = f->type == PROTOBUF_C_TYPE_MESSAGE && !other &&
                  *(ProtobufCMessage *const *)(const void *)at == NULL;
    if (other || absent) {
        bt_buf_puts(out, "null");
        return;
    }
    put_value(f, at, out);
}

void bt_pb_json(const ProtobufCMessage *msg, struct bt_buf *out)
{
    const ProtobufCMessageDescriptor *d = msg->descriptor;
    bt_buf_puts(out, "{");
    for (unsigned i = 0; i < d->n_fields; i++) {
        bt_buf_printf(out, "%s\"%s\":", i > 0 ? "," : "", d->fields[i].name);
        put_field((const uint8_t *)msg, &d->fields[i], out);
    }
    bt_buf_puts(out, "}");
}
