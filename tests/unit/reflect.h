/* Messages made and changed by protobuf-c's descriptors, for tests that go through every field of a
 * protocol: a message of any type, its fields set to extreme values one after another. */
#ifndef TESTS_UNIT_REFLECT_H
#define TESTS_UNIT_REFLECT_H

#include <stdlib.h>
#include <string.h>

#include <protobuf-c/protobuf-c.h>

#include "common/rpc/ranges.h"

#define REFLECT_EXTREMES 12
#define REFLECT_BYTES    (1u << 20) /* content of fields that are set to some length */

static uint8_t reflect_content[REFLECT_BYTES];
static char reflect_text[REFLECT_BYTES];
static uint64_t reflect_zeros[REFLECT_BYTES / 8];

static inline ProtobufCMessage *reflect_new(const ProtobufCMessageDescriptor *d)
{
    ProtobufCMessage *m = calloc(1, d->sizeof_message);
    d->message_init(m);
    return m;
}

/* The message `which` of a oneof named m, in it. */
static inline void reflect_put(ProtobufCMessage *outer, const ProtobufCFieldDescriptor *which,
                               ProtobufCMessage *inner)
{
    uint8_t *p = (uint8_t *)outer;
    memcpy(p + which->quantifier_offset, &which->id, sizeof(uint32_t));
    memcpy(p + which->offset, &inner, sizeof(void *));
}

static inline void reflect_number(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
                                  uint64_t v)
{
    uint8_t *p = (uint8_t *)m + f->offset;
    double d = (double)v;
    float s = (float)v;
    uint32_t w = (uint32_t)v;
    protobuf_c_boolean b = v != 0;
    switch ((int)f->type) {
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64: memcpy(p, &v, 8); break;
    case PROTOBUF_C_TYPE_DOUBLE: memcpy(p, &d, 8); break;
    case PROTOBUF_C_TYPE_FLOAT: memcpy(p, &s, 4); break;
    case PROTOBUF_C_TYPE_BOOL: memcpy(p, &b, sizeof(b)); break;
    default: memcpy(p, &w, 4); break;
    }
}

static inline void reflect_length(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, size_t n)
{
    uint8_t *p = (uint8_t *)m + f->offset;
    n = n < REFLECT_BYTES ? n : REFLECT_BYTES - 1;
    if (f->type == PROTOBUF_C_TYPE_BYTES) {
        ProtobufCBinaryData b = {.len = n, .data = reflect_content};
        memcpy(p, &b, sizeof(b));
    } else {
        memset(reflect_text, 'a', n);
        reflect_text[n] = '\0';
        char *text = reflect_text;
        memcpy(p, &text, sizeof(text));
    }
}

/* Repeated numbers only. */
static inline void reflect_count(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, size_t n)
{
    uint8_t *p = (uint8_t *)m;
    void *zeros = reflect_zeros;
    n = n < REFLECT_BYTES / 8 ? n : REFLECT_BYTES / 8;
    memcpy(p + f->quantifier_offset, &n, sizeof(n));
    memcpy(p + f->offset, &zeros, sizeof(zeros));
}

/* Sets the field to the i-th extreme, i < REFLECT_EXTREMES: the ends of its type and of its range,
 * and what lies beside them. False: the field has none (a message). */
static inline bool reflect_extreme(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
                                   unsigned i)
{
    const struct bt_range *r = bt_range_of(m->descriptor, f->name);
    uint64_t lo = r != NULL ? (uint64_t)r->min : 0, hi = r != NULL ? r->max : 0;
    uint64_t v[REFLECT_EXTREMES] = {0,  1,  2,      UINT64_MAX, UINT64_MAX - 1, 1ull << 31,
                                    lo, hi, hi + 1, hi - 1,     lo - 1,         1ull << 63};
    if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
        return false;
    }
    if (f->label == PROTOBUF_C_LABEL_REPEATED) {
        reflect_count(m, f, v[i]);
    } else if (f->type == PROTOBUF_C_TYPE_BYTES || f->type == PROTOBUF_C_TYPE_STRING) {
        reflect_length(m, f, v[i]);
    } else {
        reflect_number(m, f, v[i]);
    }
    return true;
}

#endif
