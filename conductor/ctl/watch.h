/* A command that is repeated (--watch), and the live picture (top). */
#ifndef BT_CONDUCTOR_CTL_WATCH_H
#define BT_CONDUCTOR_CTL_WATCH_H

#include "conductor/ctl/help.h"

/* Runs the command once, or with --watch again and again until SIGINT or SIGTERM; on a terminal
 * each time from the top of an empty screen. Returns the exit status of the last time. */
int bt_ctl_watch(const struct bt_ctl *c, const struct bt_ctl_command *k);

#endif
