/* Messages from tapes. A field is left at zero, set to something small, to an end of its range or
 * beside it, or to anything at all, as the tape says. */
#include "tests/fuzz/message.h"

#include <stdlib.h>

#include "common/rpc/pb.h"

#define DEPTH_MAX   6
#define ENTRIES_MAX 8
#define BYTES_MAX   512

static void *take(struct message_arena *a, size_t n)
{
    BT_ASSERT(a->n < BT_ARRAY_LEN(a->blocks));
    return a->blocks[a->n++] = bt_calloc(1, n + 1);
}

void message_free(struct message_arena *a)
{
    for (uint32_t i = 0; i < a->n; i++) {
        free(a->blocks[i]);
    }
    a->n = 0;
}

static void put_number(void *at, ProtobufCType type, uint64_t v)
{
    float s;
    uint32_t w = (uint32_t)v;
    protobuf_c_boolean b = v != 0;
    switch ((int)type) {
    case PROTOBUF_C_TYPE_DOUBLE:
        if (v < 1000) { /* else the bits are a number of their own */
            double d = (double)v;
            memcpy(&v, &d, 8);
        }
        memcpy(at, &v, 8);
        break;
    case PROTOBUF_C_TYPE_FLOAT:
        s = (float)v;
        memcpy(at, v < 1000 ? (const void *)&s : &w, 4);
        break;
    case PROTOBUF_C_TYPE_BOOL: memcpy(at, &b, sizeof(b)); break;
    default: memcpy(at, bt_pb_size(type) == 8 ? (const void *)&v : &w, bt_pb_size(type)); break;
    }
}

void message_set_number(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, uint64_t v)
{
    put_number((uint8_t *)m + f->offset, f->type, v);
}

static void put_bytes(struct message_arena *a, void *at, ProtobufCType type, const void *data,
                      size_t n)
{
    uint8_t *copy = take(a, n);
    bt_copy(copy, data, n);
    if (type == PROTOBUF_C_TYPE_STRING) {
        char *text = (char *)copy;
        memcpy(at, &text, sizeof(text));
    } else {
        ProtobufCBinaryData b = {.len = n, .data = copy};
        memcpy(at, &b, sizeof(b));
    }
}

void message_set_bytes(struct message_arena *a, ProtobufCMessage *m,
                       const ProtobufCFieldDescriptor *f, const void *data, size_t n)
{
    put_bytes(a, (uint8_t *)m + f->offset, f->type, data, n);
}

/* bt_range_of, which compares names, once for each field. */
static const struct bt_range *range_of(const ProtobufCMessageDescriptor *d,
                                       const ProtobufCFieldDescriptor *f)
{
    static struct {
        const ProtobufCFieldDescriptor *f;
        const struct bt_range *r;
    } known[4096];
    size_t at = ((uintptr_t)f >> 3) % BT_ARRAY_LEN(known);
    if (known[at].f != f) {
        known[at].f = f;
        known[at].r = bt_range_of(d, f->name);
    }
    return known[at].r;
}

/* A value for a field of this range; NULL: it has none. */
static uint64_t number(const struct bt_range *r, struct tape *t)
{
    uint8_t how = tape_u8(t);
    if (r == NULL || r->kind != BT_RANGE_NUMBER || how % 8 == 7) {
        return tape_u64(t);
    }
    uint64_t span = r->max - (uint64_t)r->min, some = tape_u8(t);
    switch (how % 8) {
    case 5: return r->max - how / 8 % 2;
    case 6: return how / 8 % 4 == 3 ? r->max + 1 : (uint64_t)r->min - (how / 8 % 4 == 2);
    default: return (uint64_t)r->min + (span < UINT64_MAX ? some % (span + 1) : some);
    }
}

static void bytes(struct message_arena *a, void *at, ProtobufCType type, const struct bt_range *r,
                  struct tape *t)
{
    static const uint8_t text[BYTES_MAX] = "kvstore-n1";
    uint8_t how = tape_u8(t);
    size_t n;
    if (r != NULL && how % 4 == 0) { /* as long as it may be, or a little more or less */
        size_t want = (how / 4 % 2 != 0 ? r->max : (uint64_t)r->min) + how / 8 % 2;
        n = BT_MIN(want, sizeof(text));
        put_bytes(a, at, type, text, n);
        return;
    }
    const uint8_t *p = tape_blob(t, 64, &n);
    n -= r != NULL && r->unit > 1 && how % 4 != 3 ? n % r->unit : 0;
    put_bytes(a, at, type, p, n);
}

static ProtobufCMessage *make(struct message_arena *a, const ProtobufCMessageDescriptor *d,
                              struct tape *t, message_field_fn fn, void *arg, int depth);

static void value(struct message_arena *a, const ProtobufCFieldDescriptor *f, void *at,
                  const struct bt_range *r, struct tape *t, message_field_fn fn, void *arg,
                  int depth)
{
    if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
        ProtobufCMessage *sub = make(a, f->descriptor, t, fn, arg, depth + 1);
        memcpy(at, &sub, sizeof(sub));
    } else if (f->type == PROTOBUF_C_TYPE_STRING || f->type == PROTOBUF_C_TYPE_BYTES) {
        bytes(a, at, f->type, r, t);
    } else {
        put_number(at, f->type, number(r, t));
    }
}

static void field(struct message_arena *a, ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
                  struct tape *t, message_field_fn fn, void *arg, int depth)
{
    const struct bt_range *r = range_of(m->descriptor, f);
    uint8_t *base = (uint8_t *)m;
    bool repeated = f->label == PROTOBUF_C_LABEL_REPEATED;
    if ((fn != NULL && fn(arg, a, m, f, t)) || tape_u8(t) % 4 == 0 ||
        (f->type == PROTOBUF_C_TYPE_MESSAGE && depth >= DEPTH_MAX)) {
        return;
    }
    if (!repeated) {
        value(a, f, base + f->offset, r, t, fn, arg, depth);
        return;
    }
    size_t n = tape_below(t, ENTRIES_MAX), size = bt_pb_size(f->type);
    uint8_t *list = take(a, n * size);
    for (size_t i = 0; i < n && a->n + 64 < BT_ARRAY_LEN(a->blocks); i++) {
        value(a, f, list + i * size, r, t, fn, arg, depth);
        memcpy(base + f->quantifier_offset, &(size_t){i + 1}, sizeof(size_t));
    }
    memcpy(base + f->offset, &list, sizeof(list));
}

static ProtobufCMessage *make(struct message_arena *a, const ProtobufCMessageDescriptor *d,
                              struct tape *t, message_field_fn fn, void *arg, int depth)
{
    ProtobufCMessage *m = take(a, d->sizeof_message);
    protobuf_c_message_init(d, m);
    uint32_t chosen = d->n_fields > 0 ? tape_u8(t) % d->n_fields : 0;
    for (unsigned i = 0; i < d->n_fields && a->n + 64 < BT_ARRAY_LEN(a->blocks); i++) {
        const ProtobufCFieldDescriptor *f = &d->fields[i];
        if ((f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) == 0) {
            field(a, m, f, t, fn, arg, depth);
        } else if (i == chosen) {
            value(a, f, (uint8_t *)m + f->offset, range_of(d, f), t, fn, arg, depth);
            memcpy((uint8_t *)m + f->quantifier_offset, &f->id, sizeof(f->id));
        }
    }
    return m;
}

ProtobufCMessage *message_make(struct message_arena *a, const ProtobufCMessageDescriptor *d,
                               struct tape *t, message_field_fn fn, void *arg)
{
    return make(a, d, t, fn, arg, 0);
}
