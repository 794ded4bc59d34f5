/* Identifies a process so that another process of the same machine can check it: boot, PID
 * namespace, pid and start time. */
#ifndef BT_ETCD_PROCESS_H
#define BT_ETCD_PROCESS_H

#include "cluster.pb-c.h"
#include "common/base/base.h"

struct bt_process_id {
    char boot_id[40];
    uint64_t pid_ns, start_ticks;
    uint32_t pid;
};

/* Reads this from /proc. false: the process is not there, or /proc does not say. */
bool bt_process_id(uint32_t pid, struct bt_process_id *id_p);

typedef enum {
    BT_PROCESS_UNKNOWN, /* it is of another machine, boot or PID namespace, or its record does not
                           say */
    BT_PROCESS_ALIVE,
    BT_PROCESS_DEAD /* proved: no thread of it runs any more */
} bt_process_state_t;
bt_process_state_t bt_process_state(const Baton__Member *m);

#endif
