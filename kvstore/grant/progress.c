/* The flow of a grant: what its producer has written, who is notified, and which blocks are sealed.
 * Control thread. */
#include "kvstore/grant/grant_priv.h"

void bt_grant_save_beginning(const struct bt_grant *g, uint32_t first, uint32_t end)
{
    for (uint32_t b = first; g->res.rest != NULL && g->gs->c.tier != NULL && b < end; b++) {
        bt_tier_save_beginning(g->gs->c.tier, g->blocks.slots[b]);
    }
}

static void on_sealed(void *arg)
{
    struct bt_grant *g = arg;
    struct bt_cache *cache = g->gs->c.cache;
    for (uint32_t b = g->blocks.resident; b < g->seal.end; b++) {
        if (bt_pool_state(cache->pool, g->blocks.slots[b]) == BT_SLOT_WRITING) {
            struct bt_cache_block block = {
                .key = &g->blocks.names[b],
                .parent = b > 0 ? &g->blocks.names[b - 1] : NULL,
                .n_tokens = g->blocks.shape.block_tokens,
                .depth = b,
                .reused_tokens = g->blocks.resident * g->blocks.shape.block_tokens,
                .origin = g->res.receive ? BT_EVICT_COPY : BT_EVICT_COMPUTED};
            if (bt_cache_seal(cache, g->blocks.slots[b], &block)) {
                bt_grant_save_beginning(g, b, b + 1);
            }
        }
    }
    g->seal.active = false;
    bt_grant_unref(g);
}

uint32_t bt_grant_complete_blocks(const struct bt_grant *g)
{
    uint32_t p = BT_MIN(bt_flow_read(g->flow.word, g->epoch), g->flow.items);
    uint32_t chunks = p / g->blocks.shape.n_layers,
             per = g->blocks.shape.chunk_tokens / g->blocks.shape.block_tokens;
    return BT_MIN((uint64_t)chunks * per, (uint64_t)g->blocks.n_full);
}

void bt_grant_produced(struct bt_grant *g)
{
    if (g->seal.produced) {
        return;
    }
    g->seal.produced = true;
    uint32_t end = bt_grant_complete_blocks(g);
    if (g->res.no_cache || (g->res.receive && !g->res.keep) || end <= g->blocks.resident) {
        return;
    }
    if (g->res.receive) { /* the wire has checked and stored these CRCs */
        for (uint32_t b = g->blocks.resident; b < end; b++) {
            bt_pool_crcs_known(g->gs->c.cache->pool, g->blocks.slots[b]);
        }
    }
    g->seal.active = true;
    g->seal.end = end;
    bt_sealer_submit(g->gs->c.sealer, g->blocks.slots + g->blocks.resident,
                     g->blocks.names + g->blocks.resident, end - g->blocks.resident, on_sealed, g);
}

void bt_grant_progress(struct bt_grant *g)
{
    uint32_t p = BT_MIN(bt_flow_read(g->flow.word, g->epoch), g->flow.items);
    bool moved = p > g->flow.announced,
         complete = !g->flow.done && g->flow.has_trailer && p >= g->flow.items;
    g->flow.announced = BT_MAX(g->flow.announced, p);
    g->flow.done = g->flow.done || complete;
    bt_grant_hold(g);
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &g->opens) {
        struct bt_grant_open *o = BT_CONTAINER_OF(i, struct bt_grant_open, in_grant);
        if (o->mode != BATON__LOCAL_MODE__READER || o->w == NULL || o->w->conn == NULL) {
            continue;
        }
        if (moved) {
            o->w->ops.ring(o->w->conn);
        }
        if (complete) {
            bt_grant_worker_send_trailer(o);
        }
    }
    if (moved) {
        bt_grant_overlap_advance(g);
    }
    /* Tell the wire here: a later bell would see no change. */
    if (moved && !bt_list_empty(&g->transfer.sends) && !g->gs->stopping) {
        g->gs->wire.kick(g->gs->wire.w);
    }
    if (complete) {
        bt_grant_produced(g);
    }
    bt_grant_unhold(g);
}
