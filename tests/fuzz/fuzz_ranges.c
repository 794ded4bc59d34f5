/* libFuzzer: messages of the local, the peer and the session protocols. The first byte chooses the
 * kind. Then either raw bytes follow, or (every other kind byte) a tape from which a message is
 * built: known fields with values at and beside their bounds. What is unpacked is within its
 * ranges, and packing it and unpacking it again gives the same bytes. */
#include <stdlib.h>
#include <string.h>

#include "common/rpc/ranges.h"
#include "tests/fuzz/message.h"
#include "tests/fuzz/rig.h"

typedef void *(*unpack_fn)(const void *data, size_t len, char *text, size_t cap);

static const struct {
    const ProtobufCMessageDescriptor *d;
    unpack_fn unpack;
} kinds[] = {
    {&baton__local_msg__descriptor, (unpack_fn)bt_local_unpack},
    {&baton__peer_msg__descriptor, (unpack_fn)bt_peer_unpack},
    {&baton__to_kvstore__descriptor, (unpack_fn)bt_to_kvstore_unpack},
    {&baton__to_worker__descriptor, (unpack_fn)bt_to_worker_unpack},
    {&baton__from_kvstore__descriptor, (unpack_fn)bt_from_kvstore_unpack},
    {&baton__blocks_credit__descriptor, (unpack_fn)bt_blocks_credit_unpack},
};

static bt_status_t check(const ProtobufCMessage *m)
{
    char why[256] = "";
    bt_status_t st = bt_message_check(m, why, sizeof(why));
    BT_ASSERT(st == BT_OK || why[0] != '\0');
    return st;
}

static void try(size_t kind, const uint8_t *data, size_t len)
{
    char why[256] = "";
    ProtobufCMessage *m = kinds[kind].unpack(data, len, why, sizeof(why));
    if (m == NULL) {
        BT_ASSERT(why[0] != '\0');
        return;
    }
    bt_status_t st = check(m);
    BT_ASSERT(st == BT_OK);
    size_t n = protobuf_c_message_get_packed_size(m);
    uint8_t *again = bt_malloc(n + 1);
    BT_ASSERT(protobuf_c_message_pack(m, again) == n);
    ProtobufCMessage *copy = kinds[kind].unpack(again, n, why, sizeof(why));
    /* Packed anew it may be smaller, and the bound of memory goes by its size. */
    BT_ASSERT(copy != NULL || strstr(why, "bytes of memory") != NULL);
    if (copy != NULL) {
        BT_ASSERT(protobuf_c_message_get_packed_size(copy) == n);
        protobuf_c_message_free_unpacked(copy, NULL);
    }
    free(again);
    protobuf_c_message_free_unpacked(m, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    rig_reset();
    size_t kind = data[0] / 2 % BT_ARRAY_LEN(kinds);
    if (data[0] % 2 == 0) {
        try(kind, data + 1, size - 1);
        return 0;
    }
    struct tape t = tape_of(data + 1, size - 1);
    struct message_arena a = {0};
    ProtobufCMessage *m = message_make(&a, kinds[kind].d, &t, NULL, NULL);
    size_t n = protobuf_c_message_get_packed_size(m);
    uint8_t *packed = bt_malloc(n + 1);
    protobuf_c_message_pack(m, packed);
    (void)check(m);
    try(kind, packed, n);
    free(packed);
    message_free(&a);
    return 0;
}
