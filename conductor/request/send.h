/* Carries out the actions of the request machine. Loop thread. */
#ifndef BT_CONDUCTOR_REQUEST_SEND_H
#define BT_CONDUCTOR_REQUEST_SEND_H

#include "conductor/request/machine.h"

/* Sends the message or makes the callback, and ends the action. The callback may cancel its request
 * and start others. */
void bt_action_apply(struct bt_action *a);

#endif
