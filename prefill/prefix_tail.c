/* The prefix tail is the end of a prompt's prefix. The kvstore fetches it while the engine computes
 * the beginning. When the engine reaches the part that has landed, it continues behind that part.
 * It computes what has not landed in time: no prompt waits for its tail. This is possible because
 * the KV of a position is the same on every worker. The tail is loaded layer by layer while the
 * next row runs, like a resident prefix. The store flow copies the tail's pages to the grant's
 * slots like computed pages. Engine thread. */
#include <stdlib.h>

#include "common/log/log.h"
#include "prefill/prefill.h"

bool bt_prefill_tail_valid(const struct bt_wreq *r)
{
    for (const struct bt_wtail *t = r->prompt->tail; t != NULL; t = t->next) {
        for (uint32_t i = 0; i < t->n; i++) {
            if (!bt_wgrant_slot_valid(r, t->slots[i], t->slots[t->n + i])) {
                return false;
            }
        }
    }
    return true;
}

/* Pieces arrive from the end backwards: each ends where the one before it begins. This worker
 * always computes the prompt's last token, so no piece may contain it. */
static bool tail_fits(const struct bt_wcore *c, const struct bt_wreq *r, const struct bt_wtail *t)
{
    uint64_t end = (uint64_t)t->first + t->n;
    if (t->n == 0 || t->first < r->grant.terms->resident_blocks ||
        end * c->block_tokens >= r->sub->n ||
        (r->prompt->tail != NULL && end != r->prompt->tail->first)) {
        return false;
    }
    for (uint32_t i = 0; i < t->n; i++) {
        if (t->slots[i] >= r->grant.slab->slab->super->n_slots) {
            return false;
        }
    }
    return true;
}

void bt_prefill_tail_add(struct bt_wcore *c, struct bt_wreq *r, struct bt_wtail *t)
{
    if (r->role != &bt_prefill.role || !r->grant.open || r->prompt->tail_over ||
        bt_wreq_ending(r)) {
        free(t); /* the kvstore knows this already, or learns it when the grant is closed */
        return;
    }
    if (!tail_fits(c, r, t)) {
        BT_WARN("tail_refused", "req=%016llx epoch=%u first=%u blocks=%u why=%s",
                (unsigned long long)r->sub->request, r->sub->epoch, t->first, t->n,
                "the kvstore's blocks do not fit the prompt; they are computed instead");
        free(t);
        return;
    }
    r->prompt->tail_end = r->prompt->tail != NULL ? r->prompt->tail_end : t->first + t->n;
    t->next = r->prompt->tail;
    r->prompt->tail = t;
}

void bt_prefill_tail_free(struct bt_wreq *r)
{
    while (r->prompt->tail != NULL) {
        struct bt_wtail *t = r->prompt->tail;
        r->prompt->tail = t->next;
        free(t);
    }
}

void bt_prefill_tail_past(struct bt_wcore *c, struct bt_wreq *r, uint32_t pos)
{
    if (r->prompt->tail == NULL || r->load_flow != 0 ||
        pos < r->prompt->tail_end * c->block_tokens) {
        return;
    }
    bt_prefill_tail_free(r);
    r->prompt->tail_over = true;
    struct bt_wout o = {.kind = BT_WOUT_TAIL_END, .attach = r->sub->attach};
    o.u.local.request = r->sub->request;
    o.u.local.epoch = r->sub->epoch;
    bt_wcore_emit(c, &o);
}

bool bt_prefill_tail_reached(const struct bt_wcore *c, const struct bt_wreq *r)
{
    return r->prompt->tail != NULL && !r->sub->prompt_logprobs &&
           r->prompt->tail->first * c->block_tokens <= r->pos &&
           r->pos < r->prompt->tail_end * c->block_tokens;
}

uint32_t bt_prefill_tail_blocks(const struct bt_wcore *c, const struct bt_wreq *r,
                                struct bt_engine_block *b)
{
    uint32_t from = r->pos / c->block_tokens, n = 0;
    for (const struct bt_wtail *t = r->prompt->tail; t != NULL; t = t->next) {
        for (uint32_t i = 0; i < t->n; i++) {
            if (t->first + i >= from) {
                b[n++] = (struct bt_engine_block){
                    .mem = bt_slab_data(r->grant.slab->slab, t->slots[i]),
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
    uint32_t end = r->prompt->tail_end * c->block_tokens, n = end - r->pos;
    BT_DEBUG("tail_met", "req=%016llx epoch=%u at=%u loaded=%u of=%u",
             (unsigned long long)r->sub->request, r->sub->epoch, r->pos, n, r->sub->n);
    r->pos = end;
    r->cached += n;
    bt_metric_add(c->stats->prefix_hits, n);
    bt_metric_add(c->stats->prompt_cached, n);
}

/* Returns false if no flow is free, or if the slots were given to other blocks. The engine then
 * computes the tail. */
static bool load(struct bt_wcore *c, struct bt_wreq *r)
{
    if (!bt_prefill_tail_valid(r) ||
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

uint32_t bt_prefill_tail_plan(struct bt_wcore *c, struct bt_wreq *r)
{
    /* While the head of the prefix is being loaded, the first row waits for that flow only. */
    if (bt_prefill_tail_reached(c, r) && r->load_flow == 0 && load(c, r)) {
        bt_prefill_tail_skip(c, r);
    }
    uint32_t stop = r->prompt->tail != NULL && !r->sub->prompt_logprobs
                        ? r->prompt->tail->first * c->block_tokens
                        : 0;
    return stop > r->pos ? stop : 0;
}
