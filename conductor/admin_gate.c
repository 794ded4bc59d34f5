/* See admin_gate.h. */
#include "conductor/admin_gate.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"

struct audit { /* one call */
    const char *what;
    char who[240], target[200];
};

static void on_reply(void *arg, int code, const char *detail)
{
    struct audit *a = arg;
    bool denied = code == BT_GRPC_UNAUTHENTICATED || code == BT_GRPC_PERMISSION_DENIED;
    if (code == BT_GRPC_OK) {
        BT_INFO("audit", "who=%s what=%s target=%s result=ok", a->who, a->what, a->target);
    } else {
        bt_log(denied ? BT_LOG_WARN : BT_LOG_INFO, "audit",
               "who=%s what=%s target=%s result=%s code=%d why=%s", a->who, a->what, a->target,
               denied ? "denied" : "failed", code, detail != NULL ? detail : "");
    }
    free(a);
}

/* Returns whether the caller may go on. If not, the call was answered. */
static bool may_enter(struct bt_admin_gate *g, struct bt_rpc_call *call, struct audit *a)
{
    char id[33] = "", why[512];
    const char *key = bt_rpc_call_authorization(call);
    bool known = false;
    if (g->closed) {
        bt_rpc_call_reply(call, BT_GRPC_UNAVAILABLE, "this conductor is stopping", NULL, 0);
        return false;
    }
    if (g->front == NULL || !bt_front_has_keys(g->front) ||
        (key == NULL && bt_rpc_call_has_certificate(call))) {
        return true;
    }
    if (bt_front_admin_key(g->front, key, id, &known, why, sizeof(why))) {
        snprintf(a->who, sizeof(a->who), "key:%s", id);
        return true;
    }
    bt_rpc_call_reply(call, known ? BT_GRPC_PERMISSION_DENIED : BT_GRPC_UNAUTHENTICATED, why, NULL,
                      0);
    return false;
}

static void on_call(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct bt_admin_method *m = arg;
    struct audit *a = bt_calloc(1, sizeof(*a));
    a->what = m->name;
    bt_rpc_call_caller(call, a->who, sizeof(a->who));
    bt_rpc_call_on_reply(call, on_reply, a);
    if (may_enter(m->gate, call, a)) {
        m->fn(m->arg, call, data, len);
    }
}

void bt_admin_gate_serve(struct bt_admin_gate *g, const char *name, bt_rpc_unary_fn fn, void *arg)
{
    BT_ASSERT(g->n_methods < BT_ADMIN_METHODS_MAX);
    struct bt_admin_method *m = &g->methods[g->n_methods++];
    *m = (struct bt_admin_method){.gate = g, .name = name, .fn = fn, .arg = arg};
    char *method = bt_sprintf("/baton.Admin/%s", name);
    bt_rpc_server_unary(g->server, method, "admin", on_call, m);
    free(method);
}

void bt_admin_gate_target(struct bt_rpc_call *call, const char *fmt, ...)
{
    struct audit *a = bt_rpc_call_watcher(call, on_reply);
    va_list ap;
    if (a == NULL) {
        return;
    }
    va_start(ap, fmt);
    vsnprintf(a->target, sizeof(a->target), fmt, ap);
    va_end(ap);
}
