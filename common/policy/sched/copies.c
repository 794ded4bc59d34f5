/* Chooses a hot prefix, its holder, and the node that gets a copy. Pure: see copies.h. */
#include "common/policy/sched/copies.h"

#define WINDOW_MS 60000.0 /* over which uses fade */
/* At most this time's budget is saved up; without saving, a large prefix could never be copied. */
#define SAVE_S 10.0

void bt_sched_copies_init(struct bt_sched_copies *c, double bytes_per_s, double uses_per_copy,
                          double now_ms)
{
    bt_hot_init(&c->hot, WINDOW_MS);
    c->bytes_per_s = bytes_per_s;
    c->uses_per_copy = uses_per_copy;
    c->budget = 0;
    c->filled_ms = now_ms;
}

static void fill(struct bt_sched_copies *c, double now_ms)
{
    c->budget =
        BT_MIN(c->budget + c->bytes_per_s * (now_ms - c->filled_ms) / 1e3, c->bytes_per_s * SAVE_S);
    c->filled_ms = now_ms;
}

/* The longest match, and the kvstore that has it. */
static uint32_t find_holder(const struct bt_sched_snapshot *s, const struct bt_sched_prefix *p,
                            uint32_t *holder_p)
{
    uint32_t matched = 0;
    for (uint32_t i = 0; i < s->n_kvstores; i++) {
        if (!s->kvstores[i].avoid && s->kvstores[i].match_blocks > matched) {
            matched = BT_MIN(s->kvstores[i].match_blocks, p->blocks);
            *holder_p = i;
        }
    }
    return matched;
}

/* The longest hot part of the cached prefix: all of it, its half, its quarter and so on, because
 * requests may share only a beginning. 0: none is hot. */
static uint32_t hot_blocks(struct bt_sched_copies *c, const struct bt_sched_prefix *p,
                           uint32_t matched, double now_ms, double *uses_p)
{
    uint32_t found = 0, extent = p->extent_blocks;
    for (uint32_t k = 1; k != 0 && k / 2 < matched; k *= 2) {
        uint32_t blocks = BT_MIN(k, matched) / extent * extent;
        if (blocks == 0 || blocks == found) {
            continue;
        }
        /* Rounded to the nearest number, because uses fade at once. */
        double uses = bt_hot_use(&c->hot, p->key(p->arg, blocks), now_ms) + 0.5;
        if (uses >= c->uses_per_copy) {
            found = blocks;
            *uses_p = uses;
        }
    }
    return found;
}

/* The node with the shortest queue of those that compute prompts and do not have the prefix.
 * *copies_p: the number of nodes that have it, of *nodes_p. */
static uint32_t choose_target(const struct bt_sched_params *params,
                              const struct bt_sched_snapshot *s, uint32_t blocks,
                              uint32_t *copies_p, uint32_t *nodes_p)
{
    uint32_t best = BT_SCHED_NONE;
    double best_pressure = 0;
    *copies_p = *nodes_p = 0;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        const struct bt_sched_worker *w = &s->workers[i];
        if (!w->prefill || w->draining || w->kvstore == BT_SCHED_NONE) {
            continue;
        }
        const struct bt_sched_kvstore *kv = &s->kvstores[w->kvstore];
        double pressure = bt_sched_pressure(params, w);
        bool room = kv->slots_total == 0 || kv->slots_free >= blocks;
        ++*nodes_p;
        if (kv->match_blocks >= blocks) {
            ++*copies_p;
        } else if (!kv->avoid && !kv->draining && room &&
                   (best == BT_SCHED_NONE || pressure < best_pressure)) {
            best = w->kvstore;
            best_pressure = pressure;
        }
    }
    return best;
}

bool bt_sched_copies_look(struct bt_sched_copies *c, const struct bt_sched_params *params,
                          const struct bt_sched_snapshot *snap, const struct bt_sched_prefix *p,
                          bool may_copy, struct bt_sched_copy *copy_p)
{
    struct bt_sched_copy copy = {.from = BT_SCHED_NONE};
    uint32_t copies, nodes;
    if (!(c->bytes_per_s > 0)) {
        return false;
    }
    fill(c, snap->now_ms);
    uint32_t matched = find_holder(snap, p, &copy.from);
    copy.blocks = hot_blocks(c, p, matched, snap->now_ms, &copy.uses);
    if (copy.blocks == 0 || !may_copy) {
        return false;
    }
    copy.to = choose_target(params, snap, copy.blocks, &copies, &nodes);
    copy.bytes = copy.blocks * p->block_bytes;
    if (copy.to == BT_SCHED_NONE || copy.bytes > c->budget ||
        copies >= bt_hot_copies(copy.uses, c->uses_per_copy, nodes)) {
        return false;
    }
    *copy_p = copy;
    return true;
}

void bt_sched_copies_spend(struct bt_sched_copies *c, const struct bt_sched_copy *copy)
{
    c->budget -= copy->bytes;
}
