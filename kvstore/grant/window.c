/* Pass-through prompts, which are larger than the slab: how many slots they may use, so that
 * several of them make progress and other requests do too. Their beginnings (grants) may use half
 * of the slots. When less than a quarter of that half is left, further ones still get a quarter of
 * it each, until all together have half as much again. The blocks after the beginnings pass through
 * one window in each direction. A prompt that finds no room waits for one that has room, and that
 * one needs no more to go on. Control thread. */
#include "kvstore/grant/grant_priv.h"

/* Slots of beginnings: granted, wanted by waiting reservations, or kept until the SSD has them. */
static uint32_t beginnings(const struct bt_grants *gs)
{
    uint32_t n =
        bt_grant_pending_beginnings(gs) + (gs->c.tier != NULL ? bt_tier_beginnings(gs->c.tier) : 0);
    struct bt_list *i;
    bt_list_for_each (i, &gs->all) {
        const struct bt_grant *g = BT_CONTAINER_OF(i, struct bt_grant, in_all);
        n += g->res.beginning ? g->blocks.n : 0;
    }
    return n;
}

uint32_t bt_grant_window_beginning(const struct bt_grants *gs, uint32_t n)
{
    uint32_t half = BT_MAX(gs->c.slab->super->n_slots / 2, 1u), quarter = BT_MAX(half / 4, 1u);
    uint32_t held = beginnings(gs), left = half - BT_MIN(held, half);
    uint32_t part = BT_MIN(n, BT_MAX(left, quarter));
    return held + part <= half + half / 2 ? part : 0;
}

uint32_t bt_grant_window_piece(const struct bt_grants *gs, uint32_t n)
{
    uint32_t quarter = BT_MAX(gs->window.slots / 4, 1u),
             most = BT_MAX(gs->window.slots - quarter, 1u);
    uint32_t left = gs->window.slots - BT_MIN(gs->window.in, gs->window.slots);
    return left >= BT_MIN(n, quarter) ? BT_MIN(n, BT_MIN(left, most)) : 0;
}
