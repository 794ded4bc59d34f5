/* Rows that lost their pages, on their way back: the kvstore is asked which of their blocks lie in
 * the slab or on its SSD, leases the longest prefix of them, and the engine loads it into the new
 * pages. What is not there (the last, partial block; what was evicted meanwhile; everything, if the
 * kvstore is away or does not answer in time) is computed again. The row waits in the queue
 * meanwhile: no step waits. Further choices whose prompt is no longer kept begin in the same way.
 * A prompt that no slab holds is asked for in pieces: the kvstore lends what its window has room
 * for, the engine loads it, the next piece is asked for, until there is none or it is late.
 * Engine thread. */
#include <stdatomic.h>
#include <stdlib.h>

#include "common/log/log.h"
#include "common/worker/core.h"

#define ANSWER_NS   100000000ull  /* a kvstore answers at once, ... */
#define LOADING_NS  2000000000ull /* ... or says that it reads its SSD: 1.8 s at most */
#define PAUSE_NS    1000000000ull /* not asked after it has not answered */
#define BLOCKS_MAX  24000u        /* of one LocalLease */
#define PIECE_FIRST 64u           /* of the first that asks for a piece */

/* Pages that r's submission keeps for it, but for the tail. */
static uint32_t kept_blocks(const struct bt_wreq *r)
{
    return r->lead->n_shared > 0 ? r->lead->n_shared - 1 : 0;
}

/* Full blocks before the last known token, which is computed in any case: its logits are wanted. */
static uint32_t full_blocks(const struct bt_wcore *c, const struct bt_wreq *r)
{
    return (r->len - 1) / c->block_tokens;
}

static bool worth_asking(const struct bt_wcore *c, const struct bt_wreq *r)
{
    return c->slab != NULL && !r->sub->no_cache && full_blocks(c, r) > kept_blocks(r) &&
           bt_mono_ns() >= c->reload_after_ns;
}

/* The keys of blocks [first, first + n). */
static struct bt_wkeys *keys_of(const struct bt_wcore *c, struct bt_wreq *r, uint32_t first,
                                uint32_t n)
{
    struct bt_wkeys *k = bt_malloc(sizeof(*k) + n * sizeof(k->keys[0]));
    bool known = r->window && r->chain_at <= first; /* where the last piece began */
    struct bt_kv_key chain = known ? r->piece_chain : r->sub->root;
    for (uint32_t b = known ? r->chain_at : 0; b < first + n; b++) {
        if (b == first) {
            r->piece_chain = chain;
            r->chain_at = first;
        }
        bt_kv_key_next(&chain, r->tokens + b * c->block_tokens, c->block_tokens, &chain);
        if (b >= first) {
            k->keys[b - first] = chain;
        }
    }
    k->n = n;
    return k;
}

static void ask(struct bt_wcore *c, struct bt_wreq *r, uint32_t first)
{
    uint32_t n = BT_MIN(full_blocks(c, r) - first, r->window ? r->piece_most : BLOCKS_MAX);
    struct bt_wkeys *k = keys_of(c, r, first, n);
    r->reload = BT_WRELOAD_ASKED;
    r->lease_id = ++c->next_lease;
    /* To wait for a piece costs nobody else anything, to compute a prompt of that size does. */
    r->lease_until_ns = bt_mono_ns() + (r->window ? LOADING_NS : ANSWER_NS);
    r->lease_first = first;
    r->lease_want = n;
    c->n_asked++;
    struct bt_wout o = {.kind = BT_WOUT_LEASE, .attach = c->slab->attach};
    o.u.lease.id = r->lease_id;
    o.u.lease.keys = k;
    o.u.lease.passing = r->streams;
    o.u.lease.request = r->sub->request;
    o.u.lease.epoch = r->sub->epoch;
    o.u.lease.first = first;
    bt_wcore_emit(c, &o);
}

static void emit_unlease(struct bt_wcore *c, uint64_t id, uint64_t attach)
{
    struct bt_wout o = {.kind = BT_WOUT_UNLEASE, .attach = attach};
    o.u.lease.id = id;
    bt_wcore_emit(c, &o);
}

/* Is an answer that r waits for overdue? Then it is not waited for any more. */
static bool late(struct bt_wcore *c, struct bt_wreq *r)
{
    if (bt_mono_ns() < r->lease_until_ns) {
        return false;
    }
    BT_WARN("lease_unanswered", "req=%016llx epoch=%u", (unsigned long long)r->sub->request,
            r->sub->epoch);
    bt_wreload_drop(c, r);
    c->reload_after_ns = bt_mono_ns() + PAUSE_NS;
    return true;
}

bool bt_wreload_ready(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->reload == BT_WRELOAD_KNOWN || (r == r->lead && !r->resumed)) {
        return true;
    }
    if (r->reload == BT_WRELOAD_NONE && worth_asking(c, r)) {
        ask(c, r, kept_blocks(r));
        return false;
    }
    if (r->reload == BT_WRELOAD_ASKED && !late(c, r)) {
        return false;
    }
    r->reload = BT_WRELOAD_KNOWN;
    return true;
}

uint32_t bt_wreload_blocks(const struct bt_wreq *r)
{
    uint32_t kept = kept_blocks(r);
    if (r->lease == NULL || r->lease_first > kept) {
        return 0; /* what was kept when we asked is kept no longer */
    }
    uint32_t end = r->lease_first + r->lease->n;
    return end > kept ? end : 0;
}

uint32_t bt_wreload_missing(const struct bt_wcore *c, const struct bt_wreq *r)
{
    if (r->reload != BT_WRELOAD_KNOWN && worth_asking(c, r)) {
        return 0; /* the best that can come of asking */
    }
    uint32_t kept = r->lead->n_shared > 0 ? r->sub->n - 1 : 0;
    return r->len - BT_MAX(kept, bt_wreload_blocks(r) * c->block_tokens);
}

/* ---- the answer ---- */

static bool slots_sealed(const struct bt_slab *slab, const struct bt_wlease *l)
{
    for (uint32_t i = 0; i < l->n; i++) {
        if (l->slots[i] >= slab->super->n_slots) {
            return false;
        }
        uint64_t w = atomic_load_explicit(&slab->headers[l->slots[i]].state, memory_order_acquire);
        if (bt_slot_generation(w) != l->slots[l->n + i] || bt_slot_state(w) != BT_SLOT_SEALED) {
            return false;
        }
    }
    return true;
}

static struct bt_wreq *find_asked(const struct bt_list *head, uint64_t id)
{
    for (const struct bt_list *it = head->next; it != head; it = it->next) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->reload == BT_WRELOAD_ASKED && r->lease_id == id) {
            return r;
        }
    }
    return NULL;
}

static void piece_come(struct bt_wcore *c, struct bt_wreq *r);
static void window_end(struct bt_wcore *c, struct bt_wreq *r);

void bt_wreload_leased(struct bt_wcore *c, const struct bt_wcmd *cmd)
{
    struct bt_wreq *r = find_asked(&c->queue, cmd->u.lease.id);
    r = r != NULL ? r : find_asked(&c->active, cmd->u.lease.id);
    struct bt_wlease *l = cmd->u.lease.lease;
    if (r == NULL || c->slab == NULL) { /* too late, or of a kvstore that has gone */
        if (l != NULL && c->slab != NULL) {
            emit_unlease(c, cmd->u.lease.id, c->slab->attach);
        }
        free(l);
        return;
    }
    if (cmd->status == BT_AGAIN) {
        r->lease_until_ns = bt_mono_ns() + LOADING_NS;
        return;
    }
    c->n_asked--;
    r->reload = BT_WRELOAD_KNOWN;
    if (l != NULL && (l->n == 0 || l->n > r->lease_want || !slots_sealed(c->slab->slab, l))) {
        BT_WARN("lease_refused", "req=%016llx epoch=%u blocks=%u why=%s",
                (unsigned long long)r->sub->request, r->sub->epoch, l->n,
                "the kvstore's lease names other slots than were asked for");
        emit_unlease(c, r->lease_id, c->slab->attach);
        free(l);
        l = NULL;
    }
    if (l != NULL) {
        r->lease = l;
        r->lease_slab = c->slab;
        c->slab->refs++;
    }
    if (r->window) {
        piece_come(c, r);
    }
}

void bt_wreload_recalled(struct bt_wcore *c, uint64_t id)
{
    struct bt_list *it;
    bt_list_for_each (it, &c->queue) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->lease != NULL && r->lease_id == id) {
            bt_wreload_drop(c, r); /* it asks again when its turn comes */
            return;
        }
    } /* one that is being read from goes back when it has been read */
}

void bt_wreload_drop(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->reload == BT_WRELOAD_ASKED) {
        c->n_asked--; /* should an answer come, nobody is found for it */
    }
    r->reload = BT_WRELOAD_NONE;
    if (r->lease != NULL) {
        emit_unlease(c, r->lease_id, r->lease_slab->attach);
        bt_wslab_put(r->lease_slab);
        free(r->lease);
        r->lease = NULL;
        r->lease_slab = NULL;
    }
}

void bt_wreload_detached(struct bt_wcore *c)
{
    struct bt_list *it;
    bt_list_for_each (it, &c->queue) {
        bt_wreload_drop(c, BT_CONTAINER_OF(it, struct bt_wreq, link));
    }
    bt_list_for_each (it, &c->active) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->window && r->reload == BT_WRELOAD_ASKED) {
            window_end(c, r);
        } /* a piece that is being read from ends by itself */
    }
}

/* ---- loading ---- */

static void count(struct bt_wcore *c, struct bt_wreq *r, uint32_t loaded)
{
    bt_metric_add(c->stats->reloaded, (uint64_t)loaded * c->block_tokens);
    bt_metric_add(c->stats->recomputed, r->len - 1 - r->pos);
    if (r->resumed) {
        /* What the pool does not have is offered to it again. */
        r->wb_from = BT_MAX(loaded > 0 ? r->load_first + loaded : 0, kept_blocks(r));
        r->chain_known = false;
        r->wb_off = r->lead->streams && r != r->lead; /* there is a gap in front of it */
    }
}

/* Without a load: from what is kept, or from the beginning. */
static bt_status_t compute(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_status_t st = bt_wfork_copy(c, r);
    if (st == BT_OK) {
        count(c, r, 0);
        r->stage = BT_WREQ_PROMPT;
    }
    return st;
}

/* Blocks [first, end) of what is leased, into the pages, under r's open flow. */
static bt_status_t add_blocks(struct bt_wcore *c, const struct bt_wreq *r, uint32_t first,
                              uint32_t end)
{
    for (uint32_t b = first; b < end; b++) {
        c->blocks[b - first] = (struct bt_engine_block){
            .mem = bt_slab_data(r->lease_slab->slab, r->lease->slots[b - r->lease_first]),
            .page = r->pages[b],
            .toks = c->block_tokens,
            .seq = 0,
        };
    }
    return c->vt->flow_add(c->eng, r->load_flow, c->blocks, end - first);
}

bt_status_t bt_wreload_begin(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t end = bt_wreload_blocks(r);
    if (end == 0) {
        bt_wreload_drop(c, r);
        return compute(c, r);
    }
    bt_status_t st = c->vt->flow_open(c->eng, BT_ENGINE_LOAD, BT_ENGINE_PRIO_PREEMPT, NULL,
                                      r->sub->epoch, NULL, NULL, &r->load_flow);
    if (st != BT_OK) {
        r->load_flow = 0;
        return st;
    }
    r->load_first = kept_blocks(r);
    st = add_blocks(c, r, r->load_first, end);
    if (st == BT_OK) {
        r->pos = end * c->block_tokens;
        bt_wcore_flow_close(c, r, &r->load_flow, false); /* bt_wreload_loaded when it is quiet */
    }
    return st;
}

/* ---- piece by piece ---- */

/* There is no more to be had, or it does not come: the rest is computed. */
static void window_end(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_wreload_drop(c, r);
    r->window = false;
    if (r->resumed) {
        count(c, r, r->pos / c->block_tokens - r->load_first);
    } else {
        BT_DEBUG("streamed", "req=%016llx epoch=%u cached=%u of=%u",
                 (unsigned long long)r->sub->request, r->sub->epoch, r->cached, r->sub->n);
    }
    r->stage = BT_WREQ_PROMPT;
}

static void piece_ask(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t first = r->pos / c->block_tokens;
    if (c->slab == NULL || first >= full_blocks(c, r)) {
        window_end(c, r);
        return;
    }
    ask(c, r, first);
}

/* The answer is there; without a lease there is nothing more. */
static void piece_come(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->lease == NULL || c->vt->flow_open(c->eng, BT_ENGINE_LOAD, BT_ENGINE_PRIO_PREEMPT, NULL,
                                             r->sub->epoch, NULL, NULL, &r->load_flow) != BT_OK) {
        r->load_flow = 0;
        window_end(c, r);
        return;
    }
    bt_status_t st = add_blocks(c, r, r->lease_first, r->lease_first + r->lease->n);
    if (st != BT_OK) {
        bt_wcore_end(c, r, st, "engine: cannot load the prompt's KV: %s", bt_status_text(st));
        return;
    }
    bt_wcore_flow_close(c, r, &r->load_flow, false); /* bt_wreload_loaded when it is quiet */
}

/* n: blocks that are in the pages now. */
static void piece_loaded(struct bt_wcore *c, struct bt_wreq *r, uint32_t n)
{
    uint32_t tokens = n * c->block_tokens;
    r->pos += tokens;
    r->piece_most = BT_MAX(2 * n, 1u); /* about what is lent at once */
    if (!r->resumed) {
        r->cached += tokens;
        bt_metric_add(c->stats->prefix_hits, tokens);
        bt_metric_add(c->stats->prompt_cached, tokens);
    }
    if (n > 0) {
        piece_ask(c, r);
    } else { /* a kvstore that came back has given the slots away meanwhile */
        window_end(c, r);
    }
}

void bt_wreload_window(struct bt_wcore *c, struct bt_wreq *r)
{
    r->stage = BT_WREQ_LOADING;
    r->window = true;
    r->chain_at = UINT32_MAX;
    r->piece_most = PIECE_FIRST;
    piece_ask(c, r);
}

void bt_wreload_tick(struct bt_wcore *c)
{
    struct bt_list *it;
    for (it = c->active.next; c->n_asked > 0 && it != &c->active; it = it->next) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->window && r->reload == BT_WRELOAD_ASKED && late(c, r)) {
            window_end(c, r);
        }
    }
}

bt_status_t bt_wreload_loaded(struct bt_wcore *c, struct bt_wreq *r)
{
    atomic_thread_fence(memory_order_acquire); /* the words are read behind the copies */
    bool valid = slots_sealed(r->lease_slab->slab, r->lease);
    uint32_t loaded = r->pos / c->block_tokens - r->load_first, piece = r->lease->n;
    bt_wreload_drop(c, r);
    if (r->window) {
        piece_loaded(c, r, valid ? piece : 0);
        return BT_OK;
    }
    if (valid && r->streams) {
        bt_wreload_window(c, r); /* that was the first piece */
        return BT_OK;
    }
    if (valid) {
        count(c, r, loaded);
        r->stage = BT_WREQ_PROMPT;
        return BT_OK;
    }
    /* A kvstore that came back has given them away meanwhile. The pages in front of load_first are
     * kept ones still: while a choice holds a slot nothing of them is dropped. But pages that
     * another choice has begun to keep since are not r's. */
    if (r->load_first > 0) {
        return compute(c, r);
    }
    r->pos = 0;
    count(c, r, 0);
    r->stage = BT_WREQ_PROMPT;
    return BT_OK;
}
