/* Meeting the tail. KV of a position does not depend on who computed it, so the pages are the same
 * either way. Loads go layer by layer under the next row, as those of a resident prefix do; the
 * store flow copies the tail's pages into the grant's slots like computed ones. */
#include "prefill/tail.h"

#include "common/log/log.h"

bool bt_prefill_tail_met(const struct bt_wcore *c, const struct bt_wreq *r)
{
    return r->tail != NULL && !r->sub->prompt_logprobs &&
           r->tail->first * c->block_tokens <= r->pos && r->pos < r->tail_end * c->block_tokens;
}

uint32_t bt_prefill_tail_blocks(const struct bt_wcore *c, const struct bt_wreq *r,
                                struct bt_engine_block *b)
{
    uint32_t from = r->pos / c->block_tokens, n = 0;
    for (const struct bt_wtail *t = r->tail; t != NULL; t = t->next) {
        for (uint32_t i = 0; i < t->n; i++) {
            if (t->first + i >= from) {
                b[n++] = (struct bt_engine_block){
                    .mem = bt_slab_data(r->slab->slab, t->slots[i]),
                    .page = r->pages[t->first + i],
                    .toks = c->block_tokens,
                    .seq = 0,
                };
            }
        }
    }
    return n;
}

void bt_prefill_tail_skip(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t end = r->tail_end * c->block_tokens, n = end - r->pos;
    BT_DEBUG("tail_met", "req=%016llx epoch=%u at=%u loaded=%u of=%u",
             (unsigned long long)r->sub->request, r->sub->epoch, r->pos, n, r->sub->n);
    r->pos = end;
    r->cached += n;
    bt_metric_add(c->stats->prefix_hits, n);
    bt_metric_add(c->stats->prompt_cached, n);
}

/* false: there is no room for another flow now, or the slots are not what they were; computing it
 * needs neither. */
static bool load(struct bt_wcore *c, struct bt_wreq *r)
{
    if (!bt_wcore_tail_valid(r) ||
        c->vt->flow_open(c->eng, BT_ENGINE_LOAD, BT_ENGINE_PRIO_LAND, NULL, r->sub->epoch, NULL,
                         NULL, &r->load_flow) != BT_OK) {
        r->load_flow = 0;
        return false;
    }
    uint32_t n = bt_prefill_tail_blocks(c, r, c->blocks);
    bt_status_t st = c->vt->flow_add(c->eng, r->load_flow, c->blocks, n);
    if (st != BT_OK) {
        bt_wcore_flow_close(c, r, &r->load_flow, true);
    }
    return st == BT_OK;
}

uint32_t bt_prefill_meet(struct bt_wcore *c, struct bt_wreq *r)
{
    /* While the head is still being loaded the first row waits for that flow, not for another. */
    if (bt_prefill_tail_met(c, r) && r->load_flow == 0 && load(c, r)) {
        bt_prefill_tail_skip(c, r);
    }
    uint32_t stop =
        r->tail != NULL && !r->sub->prompt_logprobs ? r->tail->first * c->block_tokens : 0;
    return stop > r->pos ? stop : 0;
}
