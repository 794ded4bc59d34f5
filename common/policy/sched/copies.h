/* Copies of hot prefixes ahead of need: which prefix gets one, from where, to where, within a
 * budget of bytes. The caller moves the blocks. A plain value in the caller's memory.
 * PURE: time is the snapshot's. */
#ifndef BT_POLICY_SCHED_COPIES_H
#define BT_POLICY_SCHED_COPIES_H

#include "common/policy/sched/hot.h"
#include "common/policy/sched/sched.h"

#define BT_SCHED_COPY_USES 16 /* uses_per_copy of a conductor */

struct bt_sched_copies {
    struct bt_hot hot;
    double bytes_per_s;       /* sched.replica_bytes_per_s; 0: no copies */
    double uses_per_copy;     /* within a minute */
    double budget, filled_ms; /* bytes that may be spent, as of filled_ms */
};

/* The prompt of a request that was placed. */
struct bt_sched_prefix {
    uint64_t (*key)(const void *arg,
                    uint32_t blocks); /* key of its first `blocks` blocks (not 0) */
    const void *arg;
    uint32_t blocks;        /* full ones */
    uint32_t extent_blocks; /* the index knows prefixes in steps of this many blocks */
    double block_bytes;
};

struct bt_sched_copy {
    uint32_t from, to; /* kvstores of the snapshot */
    uint32_t blocks;   /* number of first blocks of the prompt */
    double bytes;
    double uses; /* recent uses of that prefix */
};

void bt_sched_copies_init(struct bt_sched_copies *c, double bytes_per_s, double uses_per_copy,
                          double now_ms);
/* A request was placed with snap (whose match_blocks are for this request): counts the use of its
 * prefix. True: *copy_p is worth making and within the budget; the caller then makes it and calls
 * bt_sched_copies_spend. may_copy false: only counts. */
bool bt_sched_copies_look(struct bt_sched_copies *c, const struct bt_sched_params *params,
                          const struct bt_sched_snapshot *snap, const struct bt_sched_prefix *p,
                          bool may_copy, struct bt_sched_copy *copy_p);
void bt_sched_copies_spend(struct bt_sched_copies *c, const struct bt_sched_copy *copy);

#endif
