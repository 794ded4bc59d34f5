/* Copies of hot prefixes. See replicate.h. */
#include "conductor/sim/replicate.h"

#define WINDOW_MS 60000.0
#define SAVE_S    10.0

void bt_sim_replicate_init(struct bt_sim_replicate *r, double bytes_per_s, double uses_per_copy)
{
    bt_hot_init(&r->hot, WINDOW_MS);
    r->bytes_per_s = bytes_per_s;
    r->uses_per_copy = uses_per_copy;
    r->budget = r->filled_ms = 0;
    r->pending = false;
}

/* The deepest of the matched part, its halves, quarters... that enough requests use. */
static uint32_t hot_blocks(struct bt_sim_replicate *r, const uint32_t *blocks, uint32_t matched,
                           double now_ms, double *uses_p)
{
    uint32_t found = 0;
    for (uint32_t p = 1; p != 0 && p / 2 < matched; p *= 2) {
        uint32_t d = BT_MIN(p, matched);
        uint64_t key = (blocks[d - 1] + 1ull) * 0x9e3779b97f4a7c15ull;
        double uses = bt_hot_use(&r->hot, key, now_ms) + 0.5;
        if (uses >= r->uses_per_copy) {
            found = d;
            *uses_p = uses;
        }
    }
    return found;
}

bool bt_sim_replicate_look(struct bt_sim_replicate *r, const struct bt_sched_params *params,
                           const struct bt_sched_snapshot *snap, const uint32_t *blocks, uint32_t n,
                           double block_bytes, struct bt_sim_copy *copy_p)
{
    struct bt_sim_copy c = {.from = BT_SCHED_NONE, .to = BT_SCHED_NONE};
    uint32_t matched = 0, copies = 0, nodes = 0;
    double best_ms = 0, uses = 0;
    if (!(r->bytes_per_s > 0)) {
        return false;
    }
    r->budget = BT_MIN(r->budget + r->bytes_per_s * (snap->now_ms - r->filled_ms) / 1e3,
                       r->bytes_per_s * SAVE_S);
    r->filled_ms = snap->now_ms;
    for (uint32_t i = 0; i < snap->n_kvstores; i++) {
        if (!snap->kvstores[i].avoid && snap->kvstores[i].match_blocks > matched) {
            matched = BT_MIN(snap->kvstores[i].match_blocks, n);
            c.from = i;
        }
    }
    c.blocks = hot_blocks(r, blocks, matched, snap->now_ms, &uses);
    if (c.blocks == 0 || r->pending) {
        return false;
    }
    for (uint32_t i = 0; i < snap->n_workers; i++) {
        const struct bt_sched_worker *w = &snap->workers[i];
        if (!w->prefill || w->kvstore == BT_SCHED_NONE) {
            continue;
        }
        double ms = bt_sched_pressure(params, w);
        nodes++;
        if (snap->kvstores[w->kvstore].match_blocks >= c.blocks) {
            copies++;
        } else if (c.to == BT_SCHED_NONE || ms < best_ms) {
            c.to = w->kvstore;
            best_ms = ms;
        }
    }
    double bytes = c.blocks * block_bytes;
    if (c.to == BT_SCHED_NONE || bytes > r->budget ||
        copies >= bt_hot_copies(uses, r->uses_per_copy, nodes)) {
        return false;
    }
    r->budget -= bytes;
    *copy_p = c;
    return true;
}
