/* Between host.c and host_flow.c. */
#ifndef BT_ENGINE_HOST_PRIV_H
#define BT_ENGINE_HOST_PRIV_H

#include "common/engine/host.h"

/* Copies what LOAD flows may load by now; finishes the tickets that waited for it. */
void bt_host_flows_advance(struct bt_host *h);

#endif
