/* baton-sim cache: eviction policies on a trace, several capacities in one pass. */
#ifndef BT_CONDUCTOR_SIM_COMMAND_CACHE_H
#define BT_CONDUCTOR_SIM_COMMAND_CACHE_H

#include "conductor/sim/trace.h"

struct bt_sim_cache_args {
    const char *trace, *policies, *blocks, *replay,
        *cluster;     /* as the command line gives them; all except blocks may be NULL */
    const char *plot; /* folder or NULL */
    double from, to;
    void (*progress)(void *arg, uint32_t done, uint32_t of); /* may be NULL */
};

/* Prints a table to standard output; returns the exit status: 0, 1 (files), 2 (arguments). */
int bt_sim_cache_command(const struct bt_sim_cache_args *a);

#endif
