/* Write-back: asks the kvstore for a slot, copies page -> slot at the lowest priority, reports it.
 * So the next turn of a conversation finds the blocks, and so does a preempted row. A put holds its
 * own references to page and slab, as its request may end or be preempted meanwhile.
 * A prompt that is larger than the slab is written in the same way while it is computed, from the
 * end of its grant on. The kvstore then answers as fast as its SSD writes; puts wait for it, steps
 * do not. When the request ends, the pages that remain are kept until they are written or another
 * request needs them. Engine thread. */
#include <string.h>

#include "common/worker/core.h"

#define ANSWER_NS 100000000ull /* after this time a put gives its page up if a request needs it */

static struct bt_wput *free_put(struct bt_wcore *c)
{
    for (uint32_t i = 0; i < c->puts.all; i++) {
        if (c->puts.put[i].id == 0) {
            return &c->puts.put[i];
        }
    }
    return NULL;
}

static void release_put(struct bt_wcore *c, struct bt_wput *p)
{
    bt_page_pool_put(c->pages, &p->page, 1);
    bt_wslab_put(p->slab);
    memset(p, 0, sizeof(*p));
    c->puts.n--;
}

/* Advances the key chain to the first block that may be missing in the pool. The full blocks of the
 * submitted prompt came through the grant; earlier blocks were leased from the pool. */
static void advance_chain(struct bt_wcore *c, struct bt_wreq *r)
{
    if (!r->wback.chain_known) {
        r->wback.chain_known = true;
        r->wback.chain = r->sub->root;
        for (r->wback.next = 0; r->wback.next < r->wback.from; r->wback.next++) {
            bt_kv_key_next(&r->wback.chain, r->tokens + r->wback.next * c->block_tokens,
                           c->block_tokens, &r->wback.chain);
        }
    }
}

/* Offers r's full blocks as long as fewer than `max` puts are open. */
static void offer(struct bt_wcore *c, struct bt_wreq *r, uint32_t max, bool preempted)
{
    if (!c->conf->writeback || r->sub->no_cache || r->wback.off || c->slab == NULL ||
        r->pos / c->block_tokens <= r->wback.from) {
        return;
    }
    advance_chain(c, r);
    while (r->pos >= (r->wback.next + 1) * c->block_tokens && c->puts.n < max) {
        struct bt_wput *p = free_put(c);
        uint32_t b = r->wback.next++;
        bt_kv_key_next(&r->wback.chain, r->tokens + b * c->block_tokens, c->block_tokens,
                       &r->wback.chain);
        p->id = ++c->puts.next_id << 16 | (uint64_t)(p - c->puts.put + 1);
        p->page = r->pages[b];
        p->slab = c->slab;
        p->preempted = preempted;
        p->asked_ns = bt_mono_ns();
        p->stage = BT_WPUT_ASKED;
        p->req = r;
        p->slab->refs++;
        bt_page_pool_ref(c->pages, p->page);
        c->puts.n++;
        struct bt_wout o = {.kind = BT_WOUT_PUT, .attach = c->slab->attach};
        o.u.put.id = p->id;
        o.u.put.key = r->wback.chain;
        o.u.put.depth = b;
        o.u.put.n_tokens = c->block_tokens;
        o.u.put.tenant = r->sub->tenant;
        o.u.put.passing = r->oversized;
        bt_wcore_emit(c, &o);
    }
}

/* An oversized prompt waits for the SSD, so it leaves half of the puts to other requests. */
void bt_wback_offer(struct bt_wcore *c, struct bt_wreq *r)
{
    offer(c, r, r->oversized ? BT_MAX(c->puts.max / 2, 1u) : c->puts.max, false);
}

void bt_wback_restart(struct bt_wreq *r, uint32_t from, bool off)
{
    r->wback.from = from;
    r->wback.chain_known = false;
    r->wback.off = off;
}

void bt_wback_leave(struct bt_wcore *c, const struct bt_wreq *r)
{
    for (uint32_t i = 0; i < c->puts.all; i++) {
        if (c->puts.put[i].req == r) {
            c->puts.put[i].req = NULL;
        }
    }
}

/* ---- draining ---- */

static bool left_to_offer(const struct bt_wcore *c, const struct bt_wreq *r)
{
    uint32_t next = r->wback.chain_known ? r->wback.next : r->wback.from;
    return c->conf->writeback && !r->wback.off && c->slab != NULL &&
           r->pos / c->block_tokens > next;
}

bool bt_wback_drain(struct bt_wcore *c, struct bt_wreq *r)
{
    /* A client that has its answer may cancel the rest: that counts as done. */
    bool done =
        r->end_status == BT_OK || (r->end_status == BT_ERR_CANCELLED && r->pos >= r->sub->n);
    if (!r->oversized || !done || c->fatal) {
        return false;
    }
    bt_wback_offer(c, r);
    return left_to_offer(c, r);
}

/* A put has ended, so there is room for another. Requests that only wait to be written offer their
 * next blocks, the oldest first. */
static void drain_on(struct bt_wcore *c)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &c->puts.draining) {
        struct bt_wreq *r = BT_CONTAINER_OF(i, struct bt_wreq, link);
        bt_wback_offer(c, r);
        if (!left_to_offer(c, r)) {
            bt_wcore_drained(c, r);
        }
    }
}

/* Preempted rows have puts of their own, so that rows that write much do not block them. */
void bt_wback_preempt(struct bt_wcore *c, struct bt_wreq *r)
{
    offer(c, r, c->puts.all, true);
}

static void put_done(struct bt_wcore *c, struct bt_wput *p)
{
    bt_metric_add(p->failed ? c->stats->wb_skipped : c->stats->wb_done, 1);
    struct bt_wout o = {.kind = BT_WOUT_PUT_DONE, .attach = p->slab->attach};
    o.u.put.id = p->id;
    o.u.put.abort = p->failed;
    bt_wcore_emit(c, &o);
    release_put(c, p);
    drain_on(c);
}

static void close_flow(struct bt_wcore *c, struct bt_wput *p)
{
    bt_engine_ticket_t quiet;
    bt_status_t st = c->vt->flow_close(c->eng, p->flow, p->failed, &quiet);
    if (st != BT_OK) {
        bt_wcore_fatal(c, st, "flow_close");
        return;
    }
    p->flow = 0;
    p->stage = BT_WPUT_CLOSING;
    bt_wcore_ticket(c, quiet, BT_WT_PUT, p);
}

static void start_copy(struct bt_wcore *c, struct bt_wput *p, uint32_t slot)
{
    int prio = p->preempted ? BT_ENGINE_PRIO_PREEMPT : BT_ENGINE_PRIO_WRITEBACK;
    bt_status_t st = c->vt->flow_open(c->eng, BT_ENGINE_STORE, prio, NULL, 0, NULL, NULL, &p->flow);
    if (st != BT_OK) {
        p->failed = true;
        put_done(c, p);
        return;
    }
    struct bt_engine_block b = {
        .mem = bt_slab_data(p->slab->slab, slot),
        .page = p->page,
        .toks = c->block_tokens,
        .seq = 0,
    };
    st = c->vt->flow_add(c->eng, p->flow, &b, 1);
    if (st == BT_OK) {
        st = c->vt->flow_release(c->eng, p->flow, c->layout.n_layers, &p->done);
    }
    if (st != BT_OK) {
        p->failed = true;
        close_flow(c, p);
        return;
    }
    p->stage = BT_WPUT_COPYING;
    bt_wcore_ticket(c, p->done, BT_WT_PUT, p);
}

void bt_wback_slot(struct bt_wcore *c, uint64_t id, bt_status_t st, uint32_t slot, uint32_t gen)
{
    uint64_t index = (id & 0xffff) - 1;
    if (index >= c->puts.all || c->puts.put[index].id != id ||
        c->puts.put[index].stage != BT_WPUT_ASKED) {
        if (st == BT_OK && c->slab != NULL) { /* the put was given up, or is of an earlier
                                                 attachment */
            struct bt_wout o = {.kind = BT_WOUT_PUT_DONE, .attach = c->slab->attach};
            o.u.put.id = id;
            o.u.put.abort = true;
            bt_wcore_emit(c, &o);
        }
        return;
    }
    struct bt_wput *p = &c->puts.put[index];
    const struct bt_slab *slab = p->slab->slab;
    if (st == BT_OK) {
        uint64_t w = slot < slab->super->n_slots
                         ? atomic_load_explicit(&slab->headers[slot].state, memory_order_acquire)
                         : 0;
        if (bt_slot_state(w) == BT_SLOT_WRITING && bt_slot_generation(w) == gen) {
            start_copy(c, p, slot);
        } else {
            p->failed = true;
            put_done(c, p);
        }
        return;
    }
    if (st != BT_ERR_EXISTS) {
        bt_metric_add(c->stats->wb_skipped, 1);
        if (p->req != NULL) {
            p->req->wback.off = true; /* blocks behind a gap would not be found */
        }
    }
    release_put(c, p);
    drain_on(c);
}

void bt_wback_ticket(struct bt_wcore *c, struct bt_wput *p)
{
    if (p->stage == BT_WPUT_COPYING) {
        close_flow(c, p);
    } else {
        put_done(c, p);
    }
}

bool bt_wback_expire(struct bt_wcore *c)
{
    uint64_t now = c->puts.n > 0 ? bt_mono_ns() : 0;
    bool any = false;
    if (!bt_list_empty(&c->puts.draining)) {
        bt_wcore_drained(c, BT_CONTAINER_OF(c->puts.draining.next, struct bt_wreq, link));
        return true;
    }
    for (uint32_t i = 0; i < c->puts.all && c->puts.n > 0; i++) {
        struct bt_wput *p = &c->puts.put[i];
        if (p->id != 0 && p->stage == BT_WPUT_ASKED && now - p->asked_ns > ANSWER_NS) {
            bt_metric_add(c->stats->wb_skipped, 1);
            if (p->req != NULL) {
                p->req->wback.off = true;
            }
            release_put(c, p);
            any = true;
        }
    }
    return any;
}

void bt_wback_detached(struct bt_wcore *c)
{
    for (uint32_t i = 0; i < c->puts.all; i++) {
        struct bt_wput *p = &c->puts.put[i];
        if (p->id != 0 && p->stage == BT_WPUT_ASKED) {
            release_put(c, p); /* no answer will come; copies under way end by themselves */
        }
    }
    while (!bt_list_empty(&c->puts.draining)) {
        bt_wcore_drained(c, BT_CONTAINER_OF(c->puts.draining.next, struct bt_wreq, link));
    }
}
