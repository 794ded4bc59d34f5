/* batonctl role WORKER ROLE. */
#include <stdio.h>

#include "admin.pb-c.h"
#include "common/etcd/roles.h"
#include "conductor/ctl/ctl.h"

static void role_text(const Baton__AdminRole *r)
{
    if (r->before == r->role) {
        printf("%s keeps its role: %s\n", r->worker, bt_roles_name(r->role));
        return;
    }
    printf("%s on %s changes from %s to %s (epoch %llu)\n", r->worker, r->node,
           bt_roles_name(r->before), bt_roles_name(r->role), (unsigned long long)r->epoch);
    printf("%u request%s of this conductor use it. Those that its new role does not serve end "
           "there or are planned on other workers; 'batonctl nodes' shows when this is done\n",
           r->requests, r->requests == 1 ? "" : "s");
}

int bt_ctl_role(const struct bt_ctl *c)
{
    Baton__AdminRoleRequest q = BATON__ADMIN_ROLE_REQUEST__INIT;
    if (!bt_roles_parse(c->arg2, &q.role)) {
        fprintf(stderr,
                "batonctl: '%s' is not a role; use prefill, decode, both, or own (the role that "
                "the worker was started with)\n",
                c->arg2);
        return 2;
    }
    q.worker = (char *)c->arg;
    q.force = c->opt[BT_CTL_FORCE] != NULL;
    Baton__AdminRole *r =
        bt_ctl_ask(c, "/baton.Admin/Role", &q.base, &baton__admin_role__descriptor);
    if (r == NULL) {
        return 1;
    }
    int rc = 0;
    if (c->json) {
        rc = bt_ctl_print_json(
            json_pack("{s:s,s:s,s:s,s:s,s:s,s:b,s:I,s:I}", "kind", r->kind, "worker", r->worker,
                      "node", r->node, "before", bt_roles_name(r->before), "role",
                      bt_roles_name(r->role), "changed", r->before != r->role, "epoch",
                      (json_int_t)r->epoch, "requests", (json_int_t)r->requests));
    } else {
        role_text(r);
    }
    baton__admin_role__free_unpacked(r, NULL);
    return rc;
}
