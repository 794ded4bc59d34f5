/* See session_hello.h. Pure. */
#include "common/rpc/session_hello.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/base/base.h"

static uint32_t oldest_of(const struct bt_rpc_hello *h)
{
    return h->oldest == 0 || h->oldest > h->version ? h->version : h->oldest;
}

bt_hello_fault_t bt_rpc_hello_compare(const struct bt_rpc_identity *self,
                                      const struct bt_rpc_hello *h, uint64_t dialled, bool proved)
{
    if (h->version < BT_RPC_SESSION_OLDEST || oldest_of(h) > BT_RPC_SESSION_VERSION) {
        return BT_HELLO_VERSION;
    }
    if (strcmp(h->cluster, self->cluster) != 0) {
        return BT_HELLO_CLUSTER;
    }
    if (h->name[0] == '\0') {
        return BT_HELLO_NAME;
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

#define NAME "%.40s" /* the longest texts stay within BT_RPC_SESSION_WHY */

static void range_text(uint32_t oldest, uint32_t newest, char *buf, size_t cap)
{
    if (oldest == newest) {
        snprintf(buf, cap, "%u", newest);
    } else {
        snprintf(buf, cap, "%u to %u", oldest, newest);
    }
}

/* Both ends with their releases and the versions that they speak. */
static void version_why(const struct bt_rpc_identity *self, const struct bt_rpc_hello *h, char *buf,
                        size_t cap)
{
    const char *release = h->release == NULL || h->release[0] == '\0' ? "unknown" : h->release;
    char theirs[32], mine[32];
    range_text(oldest_of(h), h->version, theirs, sizeof(theirs));
    range_text(BT_RPC_SESSION_OLDEST, BT_RPC_SESSION_VERSION, mine, sizeof(mine));
    snprintf(buf, cap,
             NAME " (release %.16s) speaks session version %s, " NAME
                  " (release %.16s) version %s: update the older one",
             h->name, release, theirs, self->name, bt_release(), mine);
}

/* A fault without a case fails to compile (-Wswitch-enum). */
const char *bt_rpc_hello_why(bt_hello_fault_t fault, const struct bt_rpc_identity *self,
                             const struct bt_rpc_hello *h, uint64_t dialled, char *buf, size_t cap)
{
    switch (fault) {
    case BT_HELLO_FITS: return NULL;
    case BT_HELLO_VERSION: version_why(self, h, buf, cap); return buf;
    case BT_HELLO_CLUSTER:
        snprintf(buf, cap,
                 NAME " has cluster.name \"" NAME "\", " NAME " has \"" NAME
                      "\": set the same in both files",
                 h->name, h->cluster, self->name, self->cluster);
        return buf;
    case BT_HELLO_NAME:
        snprintf(buf, cap,
                 "the hello to " NAME " has an empty name: run the same release in all daemons",
                 self->name);
        return buf;
    case BT_HELLO_CERTIFICATE:
        snprintf(buf, cap,
                 "the hello to " NAME " says " NAME ", its certificate says another role or node: "
                 "install the certificate of that node",
                 self->name, h->name);
        return buf;
    case BT_HELLO_EXPECTED:
        snprintf(buf, cap,
                 NAME " asks for incarnation %016" PRIx64 " of " NAME ", which is %016" PRIx64
                      " now: wait until etcd tells it",
                 h->name, h->expect_incarnation, self->name, self->incarnation);
        return buf;
    case BT_HELLO_INCARNATION:
        snprintf(buf, cap,
                 NAME " dialed incarnation %016" PRIx64 " of " NAME ", %016" PRIx64
                      " answered: wait until etcd tells it",
                 self->name, dialled, h->name, h->incarnation);
        return buf;
    case BT_HELLO_LAYOUT:
        snprintf(buf, cap,
                 NAME " has KV layout %016" PRIx64 ", " NAME " has %016" PRIx64
                      ": set the same model.path, model.kv_dtype, model.mtp and kv.block_tokens",
                 h->name, h->layout_id, self->name, self->layout_id);
        return buf;
    case BT_HELLO_ROOT:
        /* Its bytes stay out of the text: it comes from kv.salt_file, and a stranger may ask. */
        snprintf(buf, cap,
                 "the root keys of " NAME " and " NAME
                 " differ: use the same weights, model.*, engine.deterministic and kv.salt_file",
                 h->name, self->name);
        return buf;
    }
    snprintf(buf, cap, "the hello of " NAME " does not fit " NAME, h->name, self->name);
    return buf;
}

void bt_rpc_hello_fill(const struct bt_rpc_identity *self, uint64_t expect_incarnation,
                       Baton__SessionHello *h)
{
    baton__session_hello__init(h);
    h->version = BT_RPC_SESSION_VERSION;
    h->oldest = BT_RPC_SESSION_OLDEST;
    h->release = (char *)bt_release();
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
                                 .oldest = h->oldest,
                                 .cluster = h->cluster,
                                 .name = h->name,
                                 .release = h->release,
                                 .incarnation = h->incarnation,
                                 .expect_incarnation = h->expect_incarnation,
                                 .root_key = h->root_key,
                                 .layout_id = h->layout_id};
}
