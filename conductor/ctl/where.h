/* Which conductor batonctl asks, and with which certificate. */
#ifndef BT_CONDUCTOR_CTL_WHERE_H
#define BT_CONDUCTOR_CTL_WHERE_H

#include "conductor/ctl/ctl.h"

/* Fills the values that the command line has left open, from the environment, then from the local
 * cluster's state directory. False after an error message. */
bool bt_ctl_find_conductor(struct bt_ctl *c);
/* The folder with a local cluster's logs; NULL: there is none, or another user's. The caller frees
 * it. */
char *bt_ctl_local_logs(const struct bt_ctl *c);

#endif
