/* batonctl role: the Admin service's part that changes what a running worker does. Loop thread. */
#ifndef BT_CONDUCTOR_ADMIN_ROLE_H
#define BT_CONDUCTOR_ADMIN_ROLE_H

#include "common/rpc/rpc.h"
#include "conductor/request/requests.h"
#include "conductor/view/view.h"

struct bt_admin_role {
    struct bt_view *view;
    struct bt_requests *rs;
};

/* a outlives the server. */
void bt_admin_role_register(struct bt_rpc_server *server, struct bt_admin_role *a);

#endif
