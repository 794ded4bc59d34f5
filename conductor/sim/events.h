/* The future events in simulated time, the earliest first; of equal times the one that was added
 * first. */
#ifndef BT_CONDUCTOR_SIM_EVENTS_H
#define BT_CONDUCTOR_SIM_EVENTS_H

#include "common/base/base.h"

struct bt_sim_event {
    double at_ms;
    uint64_t seq;
    uint32_t type, id, version; /* the caller's */
};

struct bt_sim_events {         /* all 0: empty */
    struct bt_sim_event *heap; /* [n], the first is the earliest */
    uint32_t n, cap;
    uint64_t seq;
};

void bt_sim_events_push(struct bt_sim_events *q, double at_ms, uint32_t type, uint32_t id,
                        uint32_t version);
struct bt_sim_event bt_sim_events_pop(struct bt_sim_events *q); /* there is one */
void bt_sim_events_cleanup(struct bt_sim_events *q);

#endif
