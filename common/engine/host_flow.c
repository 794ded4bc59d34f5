/* Flows of back ends in host memory: copies between KV pages and the mapped slab, made by the
 * engine's owner thread. The slab is shared with other processes: a STORE raises the flow's word
 * with release order only after its bytes, a LOAD reads bytes only below the word's progress. */
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/engine/host.h"
#include "common/engine/host_priv.h"

struct bt_host_flow *bt_host_flow_of(const struct bt_host *h, uint32_t flow)
{
    return flow > 0 && flow <= h->n_flows && h->flows[flow - 1].used ? &h->flows[flow - 1] : NULL;
}

bt_status_t bt_host_flow_open(struct bt_host *h, int dir, bt_flow_word_t *word, uint32_t epoch,
                              void (*bell)(void *), void *bell_arg, uint32_t *flow_p)
{
    if (dir != BT_ENGINE_LOAD && dir != BT_ENGINE_STORE) {
        return BT_ERR_INVALID;
    }
    for (uint32_t i = 0; i < h->n_flows; i++) {
        struct bt_host_flow *f = &h->flows[i];
        if (f->used) {
            continue;
        }
        struct bt_engine_block *blocks = f->blocks; /* reuses the memory of the flow's last user */
        uint32_t cap = f->cap;
        *f = (struct bt_host_flow){.used = true,
                                   .dir = dir,
                                   .word = word,
                                   .epoch = epoch,
                                   .bell = bell,
                                   .bell_arg = bell_arg,
                                   .blocks = blocks,
                                   .cap = cap};
        *flow_p = i + 1;
        return BT_OK;
    }
    return BT_ERR_EXHAUSTED;
}

bt_status_t bt_host_flow_add(struct bt_host *h, uint32_t flow, const struct bt_engine_block *b,
                             uint32_t n)
{
    struct bt_host_flow *f = bt_host_flow_of(h, flow);
    const struct bt_kv_layout *l = &h->info.layout;
    if (!f || f->closing) {
        return BT_ERR_INVALID;
    }
    uint32_t last = f->n ? f->blocks[f->n - 1].seq : 0;
    for (uint32_t i = 0; i < n; i++) {
        if (!b[i].mem || b[i].page >= h->info.pages || b[i].toks == 0 ||
            b[i].toks > l->page_tokens || b[i].seq < last || b[i].seq < f->done ||
            b[i].seq > UINT32_MAX - l->n_layers) {
            return BT_ERR_INVALID;
        }
        last = b[i].seq;
    }
    if (f->first > 0 && f->first == f->n) {
        f->first = f->n = 0;
    }
    if (n > f->cap - f->n) {
        f->cap = BT_MAX(f->n + n, f->cap * 2);
        f->blocks = bt_realloc(f->blocks, f->cap * sizeof(*f->blocks));
    }
    bt_copy(f->blocks + f->n, b, n * sizeof(*b));
    f->n += n;
    return BT_OK;
}

static void copy_segment(const struct bt_host *h, const struct bt_engine_block *b, uint32_t layer,
                         int dir)
{
    const struct bt_kv_layout *l = &h->info.layout;
    const struct bt_kv_group *g = &l->groups[0];
    uint32_t bytes;
    uint8_t *slab = (uint8_t *)b->mem + bt_kv_segment(l, layer, &bytes);
    uint8_t *page = bt_host_segment(h, layer, b->page);
    if (dir == BT_ENGINE_LOAD || b->toks == l->page_tokens) {
        memcpy(dir == BT_ENGINE_LOAD ? page : slab, dir == BT_ENGINE_LOAD ? slab : page, bytes);
        return;
    }
    /* Behind the last token the page may hold KV of another sequence. */
    size_t row = bt_kv_row_bytes(g), plane = row * l->page_tokens;
    memset(slab, 0, bytes);
    for (uint32_t p = 0; p < bt_kv_planes(g); p++) {
        size_t scales = g->scale_off + (size_t)p * l->page_tokens;
        memcpy(slab + p * plane, page + p * plane, row * b->toks);
        memcpy(slab + scales, page + scales, g->scale_off ? b->toks : 0);
    }
}

uint32_t bt_host_flow_next(const struct bt_host_flow *f)
{
    return f->first < f->n ? BT_MAX(f->done, f->blocks[f->first].seq) : UINT32_MAX;
}

bool bt_host_flow_passed(const struct bt_host_flow *f, uint32_t seq)
{
    return f->done >= seq || bt_host_flow_next(f) >= seq;
}

uint32_t bt_host_flow_loadable(const struct bt_host *h, const struct bt_host_flow *f)
{
    if (f->n == f->first) {
        return 0;
    }
    uint32_t end = f->blocks[f->n - 1].seq + h->info.layout.n_layers;
    return f->word ? BT_MIN(end, bt_flow_read(f->word, f->epoch)) : end;
}

void bt_host_flow_done(const struct bt_host *h, struct bt_host_flow *f, uint32_t end)
{
    f->done = end;
    while (f->first < f->n && f->blocks[f->first].seq + h->info.layout.n_layers <= end) {
        f->first++;
    }
}

void bt_host_flow_free(struct bt_host_flow *f)
{
    f->used = f->closing = false;
    f->n = f->first = 0;
    f->word = NULL;
    f->bell = NULL;
}

/* Copies all items below `end` (in any order), then raises the word. */
static void flow_advance(struct bt_host *h, struct bt_host_flow *f, uint32_t end)
{
    if (end <= f->done) {
        return;
    }
    uint32_t layers = h->info.layout.n_layers;
    for (uint32_t i = f->first; i < f->n && f->blocks[i].seq < end; i++) {
        const struct bt_engine_block *b = &f->blocks[i];
        uint32_t from = BT_MAX(b->seq, f->done), to = BT_MIN(b->seq + layers, end);
        for (uint32_t item = from; item < to; item++) {
            copy_segment(h, b, item - b->seq, f->dir);
        }
    }
    bt_host_flow_done(h, f, end);
    if (f->dir == BT_ENGINE_STORE) {
        if (f->word) {
            bt_flow_raise(f->word, f->epoch, end);
        }
        if (f->bell) {
            f->bell(f->bell_arg);
        }
    }
}

static void load_advance(struct bt_host *h, struct bt_host_flow *f)
{
    flow_advance(h, f, bt_host_flow_loadable(h, f));
}

void bt_host_flows_advance(struct bt_host *h)
{
    for (uint32_t i = 0; i < h->n_flows; i++) {
        if (h->flows[i].used && h->flows[i].dir == BT_ENGINE_LOAD) {
            load_advance(h, &h->flows[i]);
        }
    }
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &h->waiting) {
        struct bt_host_ticket *t = BT_CONTAINER_OF(l, struct bt_host_ticket, link);
        struct bt_host_flow *f = bt_host_flow_of(h, t->flow);
        if (f && !bt_host_flow_passed(f, t->seq)) {
            continue;
        }
        if (f && t->close_flow) {
            bt_host_flow_free(f);
        }
        bt_host_ticket_done(h, t, f ? BT_OK : BT_ERR_CANCELLED);
    }
}

bt_status_t bt_host_flow_release(struct bt_host *h, uint32_t flow, uint32_t seq,
                                 bt_engine_ticket_t *done_p)
{
    struct bt_host_flow *f = bt_host_flow_of(h, flow);
    if (!f || f->closing) {
        return BT_ERR_INVALID;
    }
    struct bt_host_ticket *t = bt_host_ticket_new(h, 0);
    *done_p = t->id;
    if (f->dir == BT_ENGINE_STORE) {
        flow_advance(h, f, seq);
        bt_host_ticket_done(h, t, BT_OK);
        return BT_OK;
    }
    t->flow = flow;
    t->seq = seq;
    bt_list_insert_tail(&h->waiting, &t->link);
    bt_host_flows_advance(h);
    return BT_OK;
}

bt_status_t bt_host_flow_close(struct bt_host *h, uint32_t flow, bool abort,
                               bt_engine_ticket_t *quiet_p)
{
    struct bt_host_flow *f = bt_host_flow_of(h, flow);
    if (!f || f->closing) {
        return BT_ERR_INVALID;
    }
    struct bt_host_ticket *t = bt_host_ticket_new(h, 0);
    *quiet_p = t->id;
    if (f->dir == BT_ENGINE_LOAD && !abort && f->first < f->n) {
        f->closing = true; /* the items that were added are still loaded */
        t->flow = flow;
        t->seq = f->blocks[f->n - 1].seq + h->info.layout.n_layers;
        t->close_flow = true;
        bt_list_insert_tail(&h->waiting, &t->link);
        bt_host_flows_advance(h);
        return BT_OK;
    }
    bt_host_flow_free(f);
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &h->waiting) { /* ends waits for items that will never come */
        struct bt_host_ticket *w = BT_CONTAINER_OF(l, struct bt_host_ticket, link);
        if (w->flow == flow) {
            bt_host_ticket_done(h, w, BT_ERR_CANCELLED);
        }
    }
    bt_host_ticket_done(h, t, BT_OK);
    return BT_OK;
}

bt_status_t bt_host_layer_wait(struct bt_host *h, const struct bt_engine_batch *b, uint32_t layer)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < b->n_rows; i++) {
        const struct bt_engine_at *at = &b->rows[i].wait;
        struct bt_host_flow *f = at->flow ? bt_host_flow_of(h, at->flow) : NULL;
        if (!f) {
            continue;
        }
        load_advance(h, f);
        while (!bt_host_flow_passed(f, at->seq + layer + 1)) {
            uint64_t now = bt_mono_ns();
            end = end ? end : now + BT_HOST_WAIT_NS;
            if (now > end) {
                return BT_ERR_TIMEOUT;
            }
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
            load_advance(h, f);
        }
    }
    return BT_OK;
}

void bt_host_layer_fire(struct bt_host *h, const struct bt_engine_batch *b, uint32_t layer)
{
    for (uint32_t i = 0; i < b->n_rows; i++) {
        const struct bt_engine_at *at = &b->rows[i].fire;
        struct bt_host_flow *f = at->flow ? bt_host_flow_of(h, at->flow) : NULL;
        /* A step may have two chunks of one flow. Then the second chunk's items wait for all layers
         * of the first, as the word counts items in order. */
        if (f && bt_host_flow_next(f) >= at->seq + layer) {
            flow_advance(h, f, at->seq + layer + 1);
        }
    }
}

void bt_host_step_end(struct bt_host *h, const struct bt_engine_batch *b)
{
    uint32_t layers = h->info.layout.n_layers;
    for (uint32_t i = 0; i < b->n_rows; i++) {
        const struct bt_engine_row *r = &b->rows[i];
        struct bt_host_flow *f = r->fire.flow ? bt_host_flow_of(h, r->fire.flow) : NULL;
        if (f) {
            flow_advance(h, f, r->fire.seq + layers);
        }
        h->slots[r->slot].next_pos = bt_host_row_pos(h, r) + r->n;
    }
}
