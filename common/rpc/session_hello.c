/* See session_hello.h. Pure. */
#include "common/rpc/session_hello.h"

#include <string.h>

bt_hello_fault_t bt_rpc_hello_compare(const struct bt_rpc_identity *self,
                                      const struct bt_rpc_hello *h, uint64_t dialled, bool proved)
{
    if (h->version != BT_RPC_SESSION_VERSION) {
        return BT_HELLO_VERSION;
    }
    if (strcmp(h->cluster, self->cluster) != 0) {
        return BT_HELLO_CLUSTER;
    }
    if (!proved) {
        return BT_HELLO_CERTIFICATE;
    }
    if (h->expect_incarnation != 0 && h->expect_incarnation != self->incarnation) {
        return BT_HELLO_EXPECTED;
    }
    if (dialled != 0 && h->incarnation != dialled) {
        return BT_HELLO_INCARNATION;
    }
    if (h->layout_id != self->layout_id) {
        return BT_HELLO_LAYOUT;
    }
    if (h->root_key.len != sizeof(self->root->b) ||
        memcmp(h->root_key.data, self->root->b, sizeof(self->root->b)) != 0) {
        return BT_HELLO_ROOT;
    }
    return BT_HELLO_FITS;
}

void bt_rpc_hello_fill(const struct bt_rpc_identity *self, uint64_t expect_incarnation,
                       Baton__SessionHello *h)
{
    baton__session_hello__init(h);
    h->version = BT_RPC_SESSION_VERSION;
    h->cluster = (char *)self->cluster;
    h->name = (char *)self->name;
    h->node = (char *)self->node;
    h->incarnation = self->incarnation;
    h->root_key.data = (uint8_t *)self->root->b;
    h->root_key.len = sizeof(self->root->b);
    h->layout_id = self->layout_id;
    h->expect_incarnation = expect_incarnation;
}

struct bt_rpc_hello bt_rpc_hello_read(const Baton__SessionHello *h)
{
    return (struct bt_rpc_hello){.version = h->version,
                                 .cluster = h->cluster,
                                 .incarnation = h->incarnation,
                                 .expect_incarnation = h->expect_incarnation,
                                 .root_key = h->root_key,
                                 .layout_id = h->layout_id};
}
