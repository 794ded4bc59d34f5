/* Rows that lost their pages, on their way back: the kvstore is asked which of their blocks lie in
 * the slab or on its SSD, leases the longest prefix of them, and the engine loads it into the new
 * pages. What is not there (the last, partial block; what was evicted meanwhile; everything, if the
 * kvstore is away or does not answer in time) is computed again. The row waits in the queue
 * meanwhile: no step waits. Further choices whose prompt is no longer kept begin in the same way.
 * Engine thread. */
#include <stdatomic.h>
#include <stdlib.h>

#include "common/log/log.h"
#include "common/worker/core.h"

#define ANSWER_NS  100000000ull  /* a kvstore answers at once, ... */
#define LOADING_NS 2000000000ull /* ... or says that it reads its SSD: 1.8 s at most */
#define PAUSE_NS   1000000000ull /* not asked after it has not answered */
#define BLOCKS_MAX 24000u        /* of one LocalLease */

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
    return c->slab != NULL && !r->no_cache && full_blocks(c, r) > kept_blocks(r) &&
           bt_mono_ns() >= c->reload_after_ns;
}

static void ask(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t first = kept_blocks(r), n = BT_MIN(full_blocks(c, r) - first, BLOCKS_MAX);
    struct bt_wkeys *k = bt_malloc(sizeof(*k) + n * sizeof(k->keys[0]));
    struct bt_kv_key chain = r->root;
    for (uint32_t b = 0; b < first + n; b++) {
        bt_kv_key_next(&chain, r->tokens + b * c->block_tokens, c->block_tokens, &chain);
        if (b >= first) {
            k->keys[b - first] = chain;
        }
    }
    k->n = n;
    r->reload = BT_WRELOAD_ASKED;
    r->lease_id = ++c->next_lease;
    r->lease_until_ns = bt_mono_ns() + ANSWER_NS;
    r->lease_first = first;
    r->lease_want = n;
    c->n_asked++;
    struct bt_wout o = {.kind = BT_WOUT_LEASE, .attach = c->slab->attach};
    o.u.lease.id = r->lease_id;
    o.u.lease.keys = k;
    bt_wcore_emit(c, &o);
}

static void emit_unlease(struct bt_wcore *c, uint64_t id, uint64_t attach)
{
    struct bt_wout o = {.kind = BT_WOUT_UNLEASE, .attach = attach};
    o.u.lease.id = id;
    bt_wcore_emit(c, &o);
}

bool bt_wreload_ready(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->reload == BT_WRELOAD_KNOWN || (r == r->lead && !r->resumed)) {
        return true;
    }
    if (r->reload == BT_WRELOAD_NONE && worth_asking(c, r)) {
        ask(c, r);
        return false;
    }
    if (r->reload == BT_WRELOAD_ASKED) {
        if (bt_mono_ns() < r->lease_until_ns) {
            return false;
        }
        BT_WARN("lease_unanswered", "req=%016llx epoch=%u", (unsigned long long)r->request,
                r->epoch);
        bt_wreload_drop(c, r);
        c->reload_after_ns = bt_mono_ns() + PAUSE_NS;
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
    uint32_t kept = r->lead->n_shared > 0 ? r->n - 1 : 0;
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

static struct bt_wreq *find_asked(const struct bt_wcore *c, uint64_t id)
{
    struct bt_list *it;
    bt_list_for_each (it, &c->queue) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->reload == BT_WRELOAD_ASKED && r->lease_id == id) {
            return r;
        }
    }
    return NULL;
}

void bt_wreload_leased(struct bt_wcore *c, const struct bt_wcmd *cmd)
{
    struct bt_wreq *r = find_asked(c, cmd->u.lease.id);
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
                (unsigned long long)r->request, r->epoch, l->n,
                bt_log_q("the kvstore's lease names other slots than were asked for"));
        emit_unlease(c, r->lease_id, c->slab->attach);
        free(l);
        l = NULL;
    }
    if (l != NULL) {
        r->lease = l;
        r->lease_slab = c->slab;
        c->slab->refs++;
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
}

/* ---- loading ---- */

static void count(struct bt_wcore *c, struct bt_wreq *r, uint32_t loaded)
{
    bt_metric_add(c->stats->reloaded, (uint64_t)loaded * c->block_tokens);
    bt_metric_add(c->stats->recomputed, r->len - 1 - r->pos);
    if (r->resumed) {
        /* What the pool does not have is offered to it again. */
        r->wb_from = BT_MAX(loaded > 0 ? r->load_first + loaded : 0, kept_blocks(r));
        r->chain_known = r->wb_off = false;
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

bt_status_t bt_wreload_begin(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t end = bt_wreload_blocks(r);
    if (end == 0) {
        bt_wreload_drop(c, r);
        return compute(c, r);
    }
    bt_status_t st = c->vt->flow_open(c->eng, BT_ENGINE_LOAD, BT_ENGINE_PRIO_PREEMPT, NULL,
                                      r->epoch, NULL, NULL, &r->load_flow);
    if (st != BT_OK) {
        r->load_flow = 0;
        return st;
    }
    r->load_first = kept_blocks(r);
    for (uint32_t b = r->load_first; b < end; b++) {
        c->blocks[b - r->load_first] = (struct bt_engine_block){
            .mem = bt_slab_data(r->lease_slab->slab, r->lease->slots[b - r->lease_first]),
            .page = r->pages[b],
            .toks = c->block_tokens,
            .seq = 0,
        };
    }
    st = c->vt->flow_add(c->eng, r->load_flow, c->blocks, end - r->load_first);
    if (st == BT_OK) {
        r->pos = end * c->block_tokens;
        bt_wcore_flow_close(c, r, &r->load_flow, false); /* bt_wreload_loaded when it is quiet */
    }
    return st;
}

bt_status_t bt_wreload_loaded(struct bt_wcore *c, struct bt_wreq *r)
{
    atomic_thread_fence(memory_order_acquire); /* the words are read behind the copies */
    bool valid = slots_sealed(r->lease_slab->slab, r->lease);
    uint32_t loaded = r->pos / c->block_tokens - r->load_first;
    bt_wreload_drop(c, r);
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
