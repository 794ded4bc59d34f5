/* Messages to a service manager (systemd's Type=notify): ready, status, stopping, and a watchdog
 * that the loop feeds. Datagrams to $NOTIFY_SOCKET, without libsystemd; without that variable
 * nothing is sent. One per process, on the loop's thread. Protocol: sd_notify(3). */
#ifndef BT_LOOP_NOTIFY_H
#define BT_LOOP_NOTIFY_H

#include "common/loop/loop.h"

/* socket, watchdog_usec, watchdog_pid: the values of NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID
 * as the environment has them, NULL where unset. With a watchdog meant for this process, the loop
 * sends WATCHDOG=1 twice per period from here on, so a loop that hangs is restarted. */
void bt_notify_start(struct bt_loop *loop, const char *socket, const char *watchdog_usec,
                     const char *watchdog_pid);
/* One line for `systemctl status`; formatted, cut at 255 bytes. */
void bt_notify_status(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* The daemon serves. The first call counts. */
void bt_notify_ready(void);
/* The daemon has begun to stop; drain time counts against TimeoutStopSec from here. */
void bt_notify_stopping(void);
/* Call it before the loop is destroyed. */
void bt_notify_end(void);

#endif
