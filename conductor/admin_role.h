/* batonctl role: the part of the Admin service that changes the role of a running worker. Loop
 * thread. */
#ifndef BT_CONDUCTOR_ADMIN_ROLE_H
#define BT_CONDUCTOR_ADMIN_ROLE_H

#include "conductor/admin_gate.h"
#include "conductor/request/requests.h"
#include "conductor/view/view.h"

struct bt_admin_role {
    struct bt_view *view;
    struct bt_requests *rs;
};

/* a outlives the gate's server. */
void bt_admin_role_register(struct bt_admin_gate *gate, struct bt_admin_role *a);

#endif
