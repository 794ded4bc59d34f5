/* Grants, prompts that no slab holds: how much of the slab they may take together, so that several
 * at once get on, and others beside them. Their beginnings (grants) have half of the slots, and
 * half as much again by quarters of that where several begin at the same moment; what is behind
 * passes through a window each way. Whoever finds no room waits for somebody who only copies or
 * computes what he has, and so ends. Control thread. */
#include "kvstore/grant/grant_priv.h"

/* Slots that are set aside for beginnings, or about to be, or wait to be written. */
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
