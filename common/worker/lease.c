/* Leases: which blocks of a request the pool has, and the right to read them. The worker sends the
 * blocks' keys, the kvstore leases the longest cached prefix of them, and the engine loads it. Two
 * kinds of request are loaded in this way: rows that lost their pages (decode/reload.c), and
 * prompts that are larger than the slab. Of the latter the kvstore leases as much as its window has
 * room for. Once that piece is loaded the worker asks for the next one, until no more blocks are
 * cached or an answer is late. No step waits for the kvstore. Engine thread. */
#include <stdatomic.h>
#include <stdlib.h>

#include "common/log/log.h"
#include "common/worker/core.h"

#define ANSWER_NS  100000000ull  /* a kvstore answers at once, ... */
#define LOADING_NS 2000000000ull /* ... or says that it reads its SSD: 1.8 s at most */
#define PAUSE_NS   1000000000ull /* no new lease is asked for this long after a missing answer */
#define BLOCKS_MAX 24000u        /* in one LocalLease */
/* In the first LocalLease of a request that is loaded in pieces. */
#define PIECE_FIRST 64u

/* Full blocks before the last known token. That token is computed in any case, as its logits are
 * needed. */
static uint32_t full_blocks(const struct bt_wcore *c, const struct bt_wreq *r)
{
    return (r->len - 1) / c->block_tokens;
}

static bool worth_asking(const struct bt_wcore *c, const struct bt_wreq *r, uint32_t first)
{
    return c->slab != NULL && !r->sub->no_cache && full_blocks(c, r) > first &&
           bt_mono_ns() >= c->leases.ask_from_ns;
}

/* The keys of blocks [first, first + n). */
static struct bt_wkeys *keys_of(const struct bt_wcore *c, struct bt_wreq *r, uint32_t first,
                                uint32_t n)
{
    struct bt_wkeys *k = bt_malloc(sizeof(*k) + n * sizeof(k->keys[0]));
    bool known = r->lease.by_pieces && r->lease.chain_at <= first; /* the key chain is known up to
                                                                      there */
    struct bt_kv_key chain = known ? r->lease.chain : r->sub->root;
    for (uint32_t b = known ? r->lease.chain_at : 0; b < first + n; b++) {
        if (b == first) {
            r->lease.chain = chain;
            r->lease.chain_at = first;
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
    uint32_t n =
        BT_MIN(full_blocks(c, r) - first, r->lease.by_pieces ? r->lease.ask_blocks : BLOCKS_MAX);
    struct bt_wkeys *k = keys_of(c, r, first, n);
    r->lease.state = BT_WLEASE_ASKED;
    r->lease.id = ++c->leases.next_id;
    /* Waiting for a piece delays only this request. Computing a prompt of that size would delay all
     * others. */
    r->lease.until_ns = bt_mono_ns() + (r->lease.by_pieces ? LOADING_NS : ANSWER_NS);
    r->lease.first = first;
    r->lease.want = n;
    c->leases.n_asked++;
    struct bt_wout o = {.kind = BT_WOUT_LEASE, .attach = c->slab->attach};
    o.u.lease.id = r->lease.id;
    o.u.lease.keys = k;
    o.u.lease.passing = r->oversized;
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

/* Stops waiting for the answer to r if it is overdue. Returns whether it was. */
static bool late(struct bt_wcore *c, struct bt_wreq *r)
{
    if (bt_mono_ns() < r->lease.until_ns) {
        return false;
    }
    BT_WARN("lease_unanswered", "req=%016llx epoch=%u why=%s", (unsigned long long)r->sub->request,
            r->sub->epoch, "the kvstore did not answer in time; the blocks are computed instead");
    bt_wlease_drop(c, r);
    c->leases.ask_from_ns = bt_mono_ns() + PAUSE_NS;
    return true;
}

bool bt_wlease_known(struct bt_wcore *c, struct bt_wreq *r, uint32_t first)
{
    if (r->lease.state == BT_WLEASE_KNOWN) {
        return true;
    }
    if (r->lease.state == BT_WLEASE_NONE && worth_asking(c, r, first)) {
        ask(c, r, first);
        return false;
    }
    if (r->lease.state == BT_WLEASE_ASKED && !late(c, r)) {
        return false;
    }
    r->lease.state = BT_WLEASE_KNOWN;
    return true;
}

bool bt_wlease_may_ask(const struct bt_wcore *c, const struct bt_wreq *r, uint32_t first)
{
    return r->lease.state != BT_WLEASE_KNOWN && worth_asking(c, r, first);
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
        if (r->lease.state == BT_WLEASE_ASKED && r->lease.id == id) {
            return r;
        }
    }
    return NULL;
}

static void piece_come(struct bt_wcore *c, struct bt_wreq *r);
static void pieces_end(struct bt_wcore *c, struct bt_wreq *r);

void bt_wlease_answered(struct bt_wcore *c, const struct bt_wcmd *cmd)
{
    struct bt_wreq *r = find_asked(&c->reqs.queue, cmd->u.lease.id);
    r = r != NULL ? r : find_asked(&c->reqs.active, cmd->u.lease.id);
    struct bt_wlease *l = cmd->u.lease.lease;
    if (r == NULL || c->slab == NULL) { /* the answer is late, or its kvstore has gone */
        if (l != NULL && c->slab != NULL) {
            emit_unlease(c, cmd->u.lease.id, c->slab->attach);
        }
        free(l);
        return;
    }
    if (cmd->status == BT_AGAIN) {
        r->lease.until_ns = bt_mono_ns() + LOADING_NS;
        return;
    }
    c->leases.n_asked--;
    r->lease.state = BT_WLEASE_KNOWN;
    if (l != NULL && (l->n == 0 || l->n > r->lease.want || !slots_sealed(c->slab->slab, l))) {
        BT_WARN("lease_refused", "req=%016llx epoch=%u blocks=%u why=%s",
                (unsigned long long)r->sub->request, r->sub->epoch, l->n,
                "the kvstore's lease has other slots than the worker asked for");
        emit_unlease(c, r->lease.id, c->slab->attach);
        free(l);
        l = NULL;
    }
    if (l != NULL) {
        r->lease.got = l;
        r->lease.slab = c->slab;
        c->slab->refs++;
    }
    if (r->lease.by_pieces) {
        piece_come(c, r);
    }
}

void bt_wlease_recalled(struct bt_wcore *c, uint64_t id)
{
    struct bt_list *it;
    bt_list_for_each (it, &c->reqs.queue) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->lease.got != NULL && r->lease.id == id) {
            bt_wlease_drop(c, r); /* it asks again when it is at the head of the queue */
            return;
        }
    } /* a lease that the engine reads from is returned when the copies end */
}

void bt_wlease_drop(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->lease.state == BT_WLEASE_ASKED) {
        c->leases.n_asked--; /* bt_wlease_answered drops an answer that still comes */
    }
    r->lease.state = BT_WLEASE_NONE;
    if (r->lease.got != NULL) {
        emit_unlease(c, r->lease.id, r->lease.slab->attach);
        bt_wslab_put(r->lease.slab);
        free(r->lease.got);
        r->lease.got = NULL;
        r->lease.slab = NULL;
    }
}

void bt_wlease_detached(struct bt_wcore *c)
{
    struct bt_list *it;
    bt_list_for_each (it, &c->reqs.queue) {
        bt_wlease_drop(c, BT_CONTAINER_OF(it, struct bt_wreq, link));
    }
    bt_list_for_each (it, &c->reqs.active) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->lease.by_pieces && r->lease.state == BT_WLEASE_ASKED) {
            pieces_end(c, r);
        } /* a piece that the engine is loading ends with its quiet ticket */
    }
}

/* ---- loading ---- */

/* Adds blocks [first, end) of the lease to r's open flow, to be copied into its pages. */
static bt_status_t add_blocks(struct bt_wcore *c, const struct bt_wreq *r, uint32_t first,
                              uint32_t end)
{
    for (uint32_t b = first; b < end; b++) {
        c->blocks[b - first] = (struct bt_engine_block){
            .mem = bt_slab_data(r->lease.slab->slab, r->lease.got->slots[b - r->lease.first]),
            .page = r->pages[b],
            .toks = c->block_tokens,
            .seq = 0,
        };
    }
    return c->vt->flow_add(c->eng, r->load_flow, c->blocks, end - first);
}

bt_status_t bt_wlease_load(struct bt_wcore *c, struct bt_wreq *r, uint32_t first, uint32_t end)
{
    bt_status_t st = c->vt->flow_open(c->eng, BT_ENGINE_LOAD, BT_ENGINE_PRIO_PREEMPT, NULL,
                                      r->sub->epoch, NULL, NULL, &r->load_flow);
    if (st != BT_OK) {
        r->load_flow = 0;
        return st;
    }
    st = add_blocks(c, r, first, end);
    if (st == BT_OK) {
        bt_wcore_flow_close(c, r, &r->load_flow, false); /* its quiet ticket continues r */
    }
    return st;
}

bool bt_wlease_loaded(struct bt_wcore *c, struct bt_wreq *r)
{
    atomic_thread_fence(memory_order_acquire); /* read the slots' states only after the copies */
    bool valid = slots_sealed(r->lease.slab->slab, r->lease.got);
    bt_wlease_drop(c, r);
    return valid;
}

/* ---- loading in pieces ---- */

/* No more blocks are cached, or no answer comes: the rest is computed. */
static void pieces_end(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_wlease_drop(c, r);
    r->lease.by_pieces = false;
    r->role->pieces_over(c, r);
    r->stage = BT_WREQ_PROMPT;
}

static void piece_ask(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t first = r->pos / c->block_tokens;
    if (c->slab == NULL || first >= full_blocks(c, r)) {
        pieces_end(c, r);
        return;
    }
    ask(c, r, first);
}

/* The answer has come. Without a lease no more blocks are cached. */
static void piece_come(struct bt_wcore *c, struct bt_wreq *r)
{
    const struct bt_wreq_lease *l = &r->lease;
    bt_status_t st =
        l->got != NULL ? bt_wlease_load(c, r, l->first, l->first + l->got->n) : BT_ERR_NOT_FOUND;
    if (st != BT_OK && r->load_flow != 0) {
        bt_wcore_end(c, r, st, "engine: cannot load the prompt's KV: %s", bt_status_text(st));
    } else if (st != BT_OK) { /* no more blocks, or no free flow */
        pieces_end(c, r);
    }
}

/* n: blocks that are in the pages now. */
static void piece_loaded(struct bt_wcore *c, struct bt_wreq *r, uint32_t n)
{
    uint32_t tokens = n * c->block_tokens;
    r->pos += tokens;
    r->lease.ask_blocks = BT_MAX(2 * n, 1u); /* the kvstore leases about as many at once */
    if (r->role->piece != NULL) {
        r->role->piece(c, r, tokens);
    }
    if (n > 0) {
        piece_ask(c, r);
    } else { /* the kvstore has restarted and has reused the slots */
        pieces_end(c, r);
    }
}

void bt_wlease_pieces(struct bt_wcore *c, struct bt_wreq *r)
{
    r->stage = BT_WREQ_LOADING;
    r->lease.by_pieces = true;
    r->lease.chain_at = UINT32_MAX;
    r->lease.ask_blocks = PIECE_FIRST;
    piece_ask(c, r);
}

void bt_wlease_piece_loaded(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t n = r->lease.got->n;
    piece_loaded(c, r, bt_wlease_loaded(c, r) ? n : 0);
}

void bt_wlease_tick(struct bt_wcore *c)
{
    struct bt_list *it;
    for (it = c->reqs.active.next; c->leases.n_asked > 0 && it != &c->reqs.active; it = it->next) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->lease.by_pieces && r->lease.state == BT_WLEASE_ASKED && late(c, r)) {
            pieces_end(c, r);
        }
    }
}
