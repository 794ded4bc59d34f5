/* Reload. A preempted row gets pages again, or a further choice begins after its prompt's pages
 * were released. The kvstore leases the blocks that are in the pool (common/worker/lease.c), and
 * the engine loads them into the new pages. The engine computes everything else again: the last,
 * partial block, and blocks that were evicted. It computes all blocks if the kvstore does not
 * answer in time. The row waits in the queue meanwhile, so no step waits. Engine thread. */
#include "decode/decode.h"

bool bt_decode_reload_ready(struct bt_wcore *c, struct bt_wreq *r)
{
    return (r == r->lead && !r->resumed) || bt_wlease_known(c, r, bt_decode_fork_blocks(r));
}

/* How many of r's first blocks the kept pages and the lease contain together. 0: there is nothing
 * to load. */
static uint32_t blocks_with_lease(const struct bt_wreq *r)
{
    uint32_t kept = bt_decode_fork_blocks(r);
    if (r->lease.got == NULL || r->lease.first > kept) {
        /* the pages that were kept when the worker asked for the lease have been released */
        return 0;
    }
    uint32_t end = r->lease.first + r->lease.got->n;
    return end > kept ? end : 0;
}

uint32_t bt_decode_reload_missing(const struct bt_wcore *c, const struct bt_wreq *r)
{
    if (bt_wlease_may_ask(c, r, bt_decode_fork_blocks(r))) {
        return 0; /* a lease cannot contain more */
    }
    uint32_t kept = r->lead->row->n_shared > 0 ? r->sub->n - 1 : 0;
    return r->len - BT_MAX(kept, blocks_with_lease(r) * c->block_tokens);
}

static void count(struct bt_wcore *c, struct bt_wreq *r, uint32_t loaded)
{
    bt_metric_add(c->stats->reloaded, (uint64_t)loaded * c->block_tokens);
    bt_metric_add(c->stats->recomputed, r->len - 1 - r->pos);
    if (r->resumed) {
        /* Offers the blocks that the pool does not have, unless there is a gap before them. */
        uint32_t from = loaded > 0 ? r->row->load_first + loaded : 0;
        bt_wback_restart(r, BT_MAX(from, bt_decode_fork_blocks(r)),
                         r->lead->oversized && r != r->lead);
    }
}

/* Computes without a load: from the end of the kept pages, or from the beginning. */
static bt_status_t compute(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_status_t st = bt_decode_fork_copy(c, r);
    if (st == BT_OK) {
        count(c, r, 0);
        r->stage = BT_WREQ_PROMPT;
    }
    return st;
}

bt_status_t bt_decode_reload_begin(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t end = blocks_with_lease(r);
    if (end == 0) {
        bt_wlease_drop(c, r);
        return compute(c, r);
    }
    r->row->load_first = bt_decode_fork_blocks(r);
    bt_status_t st = bt_wlease_load(c, r, r->row->load_first, end);
    r->pos = st == BT_OK ? end * c->block_tokens : r->pos;
    return st;
}

void bt_decode_reload_pieces_over(struct bt_wcore *c, struct bt_wreq *r)
{
    count(c, r, r->pos / c->block_tokens - r->row->load_first);
}

bt_status_t bt_decode_reload_loaded(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->lease.by_pieces) {
        bt_wlease_piece_loaded(c, r);
        return BT_OK;
    }
    uint32_t loaded = r->pos / c->block_tokens - r->row->load_first;
    bool valid = bt_wlease_loaded(c, r);
    if (valid && r->oversized) {
        bt_wlease_pieces(c, r); /* this was the first piece; asks for the others */
        return BT_OK;
    }
    if (valid) {
        count(c, r, loaded);
        r->stage = BT_WREQ_PROMPT;
        return BT_OK;
    }
    /* The slots are no longer valid: a restarted kvstore has given them to other blocks. The pages
     * before load_first are still kept, because they are not released while a choice has a slot.
     * Pages that another choice has kept since then do not belong to r. */
    if (r->row->load_first > 0) {
        return compute(c, r);
    }
    r->pos = 0;
    count(c, r, 0);
    r->stage = BT_WREQ_PROMPT;
    return BT_OK;
}
