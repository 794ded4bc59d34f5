/* Messages of protobuf-c made from a tape by their descriptors: mostly with values in their ranges,
 * at the bounds or beside them. All memory is of one arena. */
#ifndef TESTS_FUZZ_MESSAGE_H
#define TESTS_FUZZ_MESSAGE_H

#include <protobuf-c/protobuf-c.h>

#include "common/rpc/ranges.h"
#include "tests/fuzz/tape.h"

struct message_arena {
    void *blocks[512];
    uint32_t n;
};

/* A target's own idea of a field: true if it has set it (message_set_*). Asked for every field. */
typedef bool (*message_field_fn)(void *arg, struct message_arena *a, ProtobufCMessage *m,
                                 const ProtobufCFieldDescriptor *f, struct tape *t);

/* Of a message whose only field is a oneof, one of its cases is chosen. fn may be NULL. */
ProtobufCMessage *message_make(struct message_arena *a, const ProtobufCMessageDescriptor *d,
                               struct tape *t, message_field_fn fn, void *arg);
/* For a message_field_fn: f is neither repeated nor a message. Numbers of all kinds; text is copied
 * (bytes too). */
void message_set_number(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, uint64_t v);
void message_set_bytes(struct message_arena *a, ProtobufCMessage *m,
                       const ProtobufCFieldDescriptor *f, const void *data, size_t n);
void message_free(struct message_arena *a);

#endif
