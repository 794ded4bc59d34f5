/* The Admin service that batonctl asks: members, sessions, loads, requests, the block index. */
#ifndef BT_CONDUCTOR_ADMIN_H
#define BT_CONDUCTOR_ADMIN_H

#include "common/etcd/starting.h"
#include "conductor/admin_gate.h"
#include "conductor/history.h"
#include "conductor/request/requests.h"
#include "conductor/view/view.h"

struct bt_admin;

struct bt_admin_config { /* strings are the caller's */
    const char *cluster, *name, *model_id;
    uint32_t block_tokens;
    const struct bt_history *history;   /* NULL: none is kept */
    struct bt_starting_table *starting; /* until bt_admin_leave_view; NULL: none */
};

/* Serves /baton.Admin behind the gate (before its server's start). view and rs outlive it. */
struct bt_admin *bt_admin_create(struct bt_admin_gate *gate, struct bt_view *view,
                                 struct bt_requests *rs, const struct bt_admin_config *conf);
/* Appends the JSON that a page asks for: "status", "requests", "history", "explain/ID". Returns
 * 200, or 404 with the reason in why. arg: the bt_admin; for bt_front_show. */
int bt_admin_page(void *arg, const char *what, struct bt_buf *out, char *why, size_t cap);
/* The view and the table of those that start are about to be destroyed. Calls that wait for etcd
 * are still answered, when etcd's client ends. */
void bt_admin_leave_view(struct bt_admin *a);
void bt_admin_destroy(struct bt_admin *a);

#endif
