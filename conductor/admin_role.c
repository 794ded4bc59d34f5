/* Roles of running workers by command; see admin_role.h. */
#include "conductor/admin_role.h"

#include <stdlib.h>

#include "admin.pb-c.h"
#include "common/etcd/roles.h"
#include "common/rpc/pb.h"
#include "common/rpc/ranges.h"
#include "conductor/request/inspect.h"

struct role_call { /* waits for etcd */
    struct bt_admin_role *a;
    struct bt_rpc_call *call;
};

static void on_done(void *arg, const struct bt_view_role_done *d)
{
    struct role_call *c = arg;
    if (d->code != BT_GRPC_OK) {
        bt_rpc_call_reply(c->call, d->code, d->why, NULL, 0);
        free(c);
        return;
    }
    Baton__AdminRole r = BATON__ADMIN_ROLE__INIT;
    r.kind = d->worker->member->kind;
    r.worker = d->worker->member->name;
    r.node = d->worker->member->node;
    r.before = d->before;
    r.role = d->role;
    r.epoch = d->epoch;
    r.requests = bt_requests_on_worker(c->a->rs, d->worker);
    bt_rpc_call_reply_pb(c->call, &r.base);
    free(c);
}

static void on_role(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct bt_admin_role *a = arg;
    char why[256];
    Baton__AdminRoleRequest *q = bt_admin_role_request_unpack(data, len, why, sizeof(why));
    if (q != NULL) {
        bt_admin_gate_target(call, "worker=%s role=%s%s", q->worker,
                             q->role != 0 ? bt_roles_name(q->role) : "own",
                             q->force ? " force" : "");
    }
    if (q == NULL) {
        bt_rpc_call_reply(call, BT_GRPC_INVALID_ARGUMENT, why, NULL, 0);
    } else if (q->worker[0] == '\0') {
        bt_rpc_call_reply(call, BT_GRPC_INVALID_ARGUMENT,
                          "role needs the name of a worker, as 'batonctl nodes' shows it, and "
                          "prefill, decode, both or own",
                          NULL, 0);
    } else {
        struct role_call *c = bt_calloc(1, sizeof(*c));
        c->a = a;
        c->call = call;
        struct bt_view_role_wish wish = {
            .worker = q->worker, .role = q->role, .by = "operator", .force = q->force};
        bt_view_role_set(a->view, &wish, on_done, c);
    }
    if (q != NULL) {
        baton__admin_role_request__free_unpacked(q, NULL);
    }
}

void bt_admin_role_register(struct bt_admin_gate *gate, struct bt_admin_role *a)
{
    bt_admin_gate_serve(gate, "Role", on_role, a);
}
