/* Copies of hot prefixes ahead of need: which prefix gets one, from where, to where, within a
 * budget of bytes. What moves the blocks is the caller's. A plain value in the caller's memory.
 * PURE: time is the snapshot's. */
#ifndef BT_POLICY_SCHED_COPIES_H
#define BT_POLICY_SCHED_COPIES_H

#include "common/policy/sched/hot.h"
#include "common/policy/sched/sched.h"

struct bt_sched_copies {
    struct bt_hot hot;
    double bytes_per_s, uses_per_copy; /* sched.replica_bytes_per_s and _uses; 0 bytes: none */
    double budget, filled_ms;          /* bytes that may be spent, as of then */
};

/* The prompt of a request that was placed. */
struct bt_sched_prefix {
    uint64_t (*key)(const void *arg, uint32_t blocks); /* of its first so many blocks, not 0 */
    const void *arg;
    uint32_t blocks;        /* full ones */
    uint32_t extent_blocks; /* what is found where is known in steps of so many */
    double block_bytes;
};

struct bt_sched_copy {
    uint32_t from, to; /* kvstores of the snapshot */
    uint32_t blocks;   /* the prompt's first so many */
    double bytes;
    double uses; /* of that prefix, of late */
};

void bt_sched_copies_init(struct bt_sched_copies *c, double bytes_per_s, double uses_per_copy,
                          double now_ms);
/* A request was placed under snap (match_blocks are its own): what it uses is counted. True:
 * *copy_p is worth it and within the budget; if it is made its bytes are to be spent. may_copy:
 * else it is only counted. */
bool bt_sched_copies_look(struct bt_sched_copies *c, const struct bt_sched_params *params,
                          const struct bt_sched_snapshot *snap, const struct bt_sched_prefix *p,
                          bool may_copy, struct bt_sched_copy *copy_p);
void bt_sched_copies_spend(struct bt_sched_copies *c, const struct bt_sched_copy *copy);

#endif
