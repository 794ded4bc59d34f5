/* Which policy the SSD tier wants: a trace through two tiers, each governed by the kvstore's own
 * objects (common/policy/evict/evict.h over the slab, the simulator's SSD below), with the write
 * policy second_use. As the kvstore serves: a prefix up to the first hole is used, what lies on the
 * SSD comes into the slab, the rest is computed. Half of the trace warms up, the rest is counted.
 * Usage: tier_replay TRACE SLAB_BLOCKS SSD_BLOCKS. Prints a line for each policy. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/policy/evict/evict.h"
#include "conductor/sim/disk.h"
#include "conductor/sim/trace.h"

#define NONE UINT32_MAX

struct tiers {
    const struct bt_evict_policy *slab_policy;
    struct bt_evict *slab;
    uint32_t n_slab, n_used;
    uint32_t *slot_of, *block_in; /* [unique], [n_slab] */
    struct bt_sim_disk *ssd;
    uint64_t slab_hits, ssd_hits, blocks, written;
    bool counting;
};

static void offer(struct tiers *t, uint32_t block, uint32_t depth, bt_sim_disk_event_t event)
{
    uint32_t old;
    bool written = bt_sim_disk_offer(t->ssd, block, depth, event, 0, &old);
    t->written += written && t->counting;
}

/* Into the slab; in use until the request has ended. */
static void admit(struct tiers *t, uint32_t block, uint32_t depth, uint32_t parent,
                  uint32_t reused_tokens)
{
    uint32_t slot = t->n_used;
    if (slot == t->n_slab) {
        slot = t->slab_policy->victim(t->slab, NULL);
        if (slot == BT_EVICT_NONE) {
            fprintf(stderr, "tier_replay: a request is larger than the slab\n");
            exit(1);
        }
        t->slab_policy->drop(t->slab, slot);
        t->slot_of[t->block_in[slot]] = NONE;
    } else {
        t->n_used++;
    }
    t->block_in[slot] = block;
    t->slot_of[block] = slot;
    struct bt_evict_block b = {.hash = block * 0x9e3779b97f4a7c15ull >> 16,
                               .depth = depth,
                               .start_tokens = depth * BT_SIM_BLOCK_TOKENS,
                               .parent = parent,
                               .reused_tokens = reused_tokens};
    t->slab_policy->admit(t->slab, slot, &b);
    offer(t, block, depth, BT_SIM_DISK_NEW);
}

static void serve(struct tiers *t, const uint32_t *blocks, uint32_t n)
{
    uint32_t i = 0, parent = BT_EVICT_NONE;
    for (; i < n; i++) {
        uint32_t slot = t->slot_of[blocks[i]];
        if (slot != NONE) {
            t->slab_policy->pin(t->slab, slot);
            t->slab_policy->hit(t->slab, slot, parent);
            offer(t, blocks[i], i, BT_SIM_DISK_HIT);
            t->slab_hits += t->counting;
        } else if (bt_sim_disk_has(t->ssd, blocks[i])) {
            bt_sim_disk_touch(t->ssd, blocks[i]);
            admit(t, blocks[i], i, parent, 0);
            t->ssd_hits += t->counting;
        } else {
            break;
        }
        parent = t->slot_of[blocks[i]];
    }
    uint32_t reused = i * BT_SIM_BLOCK_TOKENS;
    for (; i < n; i++) {
        if (t->slot_of[blocks[i]] != NONE) { /* behind a hole: computed again, that copy serves */
            t->slab_policy->pin(t->slab, t->slot_of[blocks[i]]);
        } else {
            admit(t, blocks[i], i, parent, reused);
        }
        parent = t->slot_of[blocks[i]];
    }
    while (i-- > 0) {
        t->slab_policy->unpin(t->slab, t->slot_of[blocks[i]]);
    }
    t->blocks += t->counting ? n : 0;
}

static void replay(const struct bt_sim_trace *trace, const struct bt_evict_policy *policy,
                   uint32_t n_slab, uint32_t n_ssd)
{
    struct tiers t = {.slab_policy = &bt_evict_density, .n_slab = n_slab};
    t.slab = t.slab_policy->create(n_slab);
    t.slot_of = bt_malloc(trace->n_unique * sizeof(*t.slot_of));
    memset(t.slot_of, 0xff, trace->n_unique * sizeof(*t.slot_of));
    t.block_in = bt_calloc(n_slab, sizeof(*t.block_in));
    struct bt_sim_disk_config disk = {
        .blocks = n_ssd, .write = BT_SIM_WRITE_SECOND_USE, .policy = policy};
    t.ssd = bt_sim_disk_create(&disk, 8 * n_slab);
    for (uint32_t r = 0; r < trace->n; r++) {
        const struct bt_sim_request *q = &trace->requests[r];
        t.counting = r >= trace->n / 2;
        serve(&t, trace->blocks + q->first, BT_MIN(q->n_blocks, q->input / BT_SIM_BLOCK_TOKENS));
    }
    double n = (double)BT_MAX(t.blocks, (uint64_t)1);
    printf("slab=%u ssd=%u policy=%s slab_hits=%.4f ssd_hits=%.4f all=%.4f written=%llu\n", n_slab,
           n_ssd, policy->name, (double)t.slab_hits / n, (double)t.ssd_hits / n,
           (double)(t.slab_hits + t.ssd_hits) / n, (unsigned long long)t.written);
    t.slab_policy->destroy(t.slab);
    bt_sim_disk_destroy(t.ssd);
    free(t.slot_of);
    free(t.block_in);
}

int main(int argc, char **argv)
{
    static const struct bt_evict_policy *const all[] = {
        &bt_evict_lru, &bt_evict_lfu, &bt_evict_slru, &bt_evict_length_aware, &bt_evict_density};
    struct bt_sim_trace trace;
    char err[512];
    uint32_t n_slab = argc == 4 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
    uint32_t n_ssd = argc == 4 ? (uint32_t)strtoul(argv[3], NULL, 10) : 0;
    if (n_slab < 100 || n_ssd < 100) {
        fprintf(stderr, "usage: tier_replay TRACE SLAB_BLOCKS SSD_BLOCKS (100 or more each)\n");
        return 2;
    }
    if (bt_sim_trace_load(argv[1], &trace, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "tier_replay: %s\n", err);
        return 1;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        replay(&trace, all[i], n_slab, n_ssd);
    }
    bt_sim_trace_cleanup(&trace);
    return 0;
}
