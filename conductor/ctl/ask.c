/* Asks a conductor's Admin service one question and takes the answer. */
#include <stdio.h>
#include <stdlib.h>

#include "common/rpc/ranges.h"
#include "common/rpc/rpc.h"
#include "conductor/ctl/ctl.h"

/* Longer than a conductor waits for etcd (twice 3 s), so that the conductor can still answer. */
#define DEADLINE_MS 10000

/* Says on stderr why a call failed. */
static void say_failure(const struct bt_ctl *c, int code, const char *detail)
{
    if (code == BT_GRPC_NOT_FOUND || code == BT_GRPC_FAILED_PRECONDITION ||
        code == BT_GRPC_INVALID_ARGUMENT ||
        code == BT_GRPC_UNAUTHENTICATED) { /* the conductor's message says it all */
        fprintf(stderr, "batonctl: %s\n", detail);
        return;
    }
    const char *hint = "";
    if (code == BT_GRPC_UNAVAILABLE || code == BT_GRPC_DEADLINE) {
        hint =
            c->tls == NULL
                ? "; check that the conductor runs, that this is its gRPC address and not its HTTP "
                  "address, and whether it needs a certificate (--tls)"
                : "; check that the conductor runs, that this is its gRPC address and not its HTTP "
                  "address, and that it accepts this certificate (if not, its log says why)";
    } else if (code == BT_GRPC_UNIMPLEMENTED) {
        hint = "; this is not a conductor's gRPC address";
    }
    fprintf(stderr, "batonctl: %s (from %s): %s (gRPC %d)%s\n", c->addr, c->addr_from,
            detail[0] != '\0' ? detail : "no answer", code, hint);
}

void *bt_ctl_ask(const struct bt_ctl *c, const char *method, const ProtobufCMessage *q,
                 const ProtobufCMessageDescriptor *reply_type)
{
    size_t n = protobuf_c_message_get_packed_size(q), len = 0;
    uint8_t *data = bt_malloc(n + 1);
    protobuf_c_message_pack(q, data);
    void *bytes = NULL;
    char detail[700] = "";
    struct bt_rpc_question ask = {.target = c->addr,
                                  .tls = c->tls,
                                  .who = "conductor",
                                  .method = method,
                                  .authorization = c->authorization,
                                  .data = data,
                                  .len = n,
                                  .deadline_ms = DEADLINE_MS};
    int code = bt_rpc_unary_blocking(&ask, &bytes, &len, detail, sizeof(detail));
    free(data);
    void *reply = NULL;
    char why[256];
    if (code != BT_GRPC_OK) {
        say_failure(c, code, detail);
    } else if ((reply = bt_message_unpack(reply_type, bytes, len, why, sizeof(why))) == NULL) {
        fprintf(stderr,
                "batonctl: %s: the answer is malformed (%s); check that batonctl and the conductor "
                "have the same version\n",
                c->addr, why);
    }
    free(bytes);
    return reply;
}
