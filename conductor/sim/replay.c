/* Replays a trace through one cache. See replay.h. */
#include "conductor/sim/replay.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"

#define NONE UINT32_MAX

/* For Belady: the cached blocks, ordered by their next use, the latest on top. An outdated entry
 * stays in the heap until it comes to the top. */
struct future {
    uint64_t *heap; /* next use << 32 | slot */
    uint32_t n, cap;
    uint32_t *next_use; /* [t->n_blocks]: where in the trace the block is used again */
    uint32_t *expect;   /* [capacity]: the next use of the slot's block */
};

struct replay {
    const struct bt_sim_trace *t;
    const struct bt_sim_replay_options *o;
    struct bt_sim_replay_result *r;
    const struct bt_evict_policy *policy;
    struct bt_evict *evict;
    struct future future;
    uint32_t cap, used, at; /* at: position in t->blocks */
    uint32_t *slot_of;      /* [n_unique] */
    uint32_t *block_of;     /* [cap] */
    uint32_t *parent_of;    /* [n_unique]: the block before it in its chain */
    uint32_t *behind;       /* [n_unique]: cached blocks right behind it */
    uint32_t *held;         /* slots of the current request */
};

/* ---- Belady ---- */

static void future_push(struct future *f, uint64_t v)
{
    if (f->n == f->cap) {
        f->cap = f->cap != 0 ? 2 * f->cap : 1024;
        f->heap = bt_realloc(f->heap, f->cap * sizeof(*f->heap));
    }
    uint32_t i = f->n++;
    for (; i > 0 && f->heap[(i - 1) / 2] < v; i = (i - 1) / 2) {
        f->heap[i] = f->heap[(i - 1) / 2];
    }
    f->heap[i] = v;
}

static uint64_t future_pop(struct future *f)
{
    uint64_t top = f->heap[0], v = f->heap[--f->n];
    uint32_t i = 0;
    for (uint32_t kid = 1; kid < f->n; kid = 2 * i + 1) {
        kid += kid + 1 < f->n && f->heap[kid + 1] > f->heap[kid];
        if (f->heap[kid] <= v) {
            break;
        }
        f->heap[i] = f->heap[kid];
        i = kid;
    }
    f->heap[i] = v;
    return top;
}

static void future_use(struct replay *p, uint32_t slot)
{
    struct future *f = &p->future;
    f->expect[slot] = f->next_use[p->at];
    future_push(f, (uint64_t)f->expect[slot] << 32 | slot);
}

static uint32_t future_victim(struct replay *p)
{
    for (;;) {
        uint64_t v = future_pop(&p->future);
        uint32_t slot = (uint32_t)v;
        if (p->future.expect[slot] == v >> 32) {
            return slot;
        }
    }
}

static void future_init(struct replay *p)
{
    const struct bt_sim_trace *t = p->t;
    uint32_t *next = bt_malloc(BT_MAX(t->n_unique, 1u) * sizeof(*next));
    memset(next, 0xff, t->n_unique * sizeof(*next));
    p->future.next_use = bt_malloc(t->n_blocks * sizeof(*next));
    p->future.expect = bt_malloc(p->cap * sizeof(*next));
    for (uint32_t i = t->n_blocks; i-- > 0;) {
        p->future.next_use[i] = next[t->blocks[i]];
        next[t->blocks[i]] = i;
    }
    free(next);
}

/* ---- one cache, with a policy or with Belady ---- */

static void drop(struct replay *p, uint32_t slot)
{
    uint32_t block = p->block_of[slot], parent = p->parent_of[block];
    p->r->evicted++;
    p->r->headless += p->behind[block] > 0;
    if (parent != NONE) {
        p->behind[parent]--;
    }
    p->slot_of[block] = NONE;
}

static uint32_t take_slot(struct replay *p)
{
    if (p->used < p->cap) {
        return p->used++;
    }
    uint32_t slot;
    if (p->policy == NULL) {
        slot = future_victim(p);
    } else {
        slot = p->policy->victim(p->evict, NULL);
        BT_ASSERT(slot != BT_EVICT_NONE); /* a request never needs all slots */
        p->policy->drop(p->evict, slot);
        p->r->events += 2;
    }
    drop(p, slot);
    return slot;
}

/* Caches the k-th block of q. reused: how many of its tokens the request found before. */
static uint32_t put(struct replay *p, const struct bt_sim_request *q, uint32_t k, uint32_t reused)
{
    uint32_t block = p->t->blocks[q->first + k];
    uint32_t parent = k > 0 ? p->t->blocks[q->first + k - 1] : NONE;
    uint32_t slot = take_slot(p);
    bool partial = k + 1 == q->n_blocks && q->input % BT_SIM_BLOCK_TOKENS != 0;
    p->slot_of[block] = slot;
    p->block_of[slot] = block;
    p->parent_of[block] = parent;
    if (parent != NONE) {
        p->behind[parent]++;
    }
    if (p->policy != NULL) {
        struct bt_evict_block b = {.hash = block * 0x9e3779b97f4a7c15ull >> 16,
                                   .depth = k,
                                   .start_tokens = k * BT_SIM_BLOCK_TOKENS,
                                   .parent = parent != NONE ? p->slot_of[parent] : BT_EVICT_NONE,
                                   .reused_tokens = reused,
                                   .origin = partial ? BT_EVICT_PARTIAL : BT_EVICT_COMPUTED};
        p->policy->admit(p->evict, slot, &b);
        p->r->events++;
    } else {
        future_use(p, slot);
    }
    return slot;
}

static void hit(struct replay *p, uint32_t slot, uint32_t parent)
{
    if (p->policy != NULL) {
        p->policy->pin(p->evict, slot);
        p->policy->hit(p->evict, slot, parent);
        p->r->events += 2;
    } else {
        future_use(p, slot);
    }
}

static uint32_t tokens_of(const struct bt_sim_request *q, uint32_t k)
{
    return BT_MIN(q->input - k * BT_SIM_BLOCK_TOKENS, (uint32_t)BT_SIM_BLOCK_TOKENS);
}

/* How long the prompt's prefill takes if its first `cached` tokens are cached. The last token is
 * always computed. */
static double prefill_s(const struct replay *p, const struct bt_sim_request *q, uint64_t cached)
{
    const struct bt_sim_cluster *c = p->o->cluster;
    uint32_t have = (uint32_t)BT_MIN(cached, q->input - 1ull);
    double ns = bt_batch_prefill_ns(&c->prefill, have, q->input, (uint32_t)c->chunk_tokens);
    double load = c->load_bytes_per_s > 0 ? 1e9 * have * c->token_bytes / c->load_bytes_per_s : 0;
    return 1e-9 * BT_MAX(ns, load);
}

/* Serves one request. counted: it goes into the result. */
static void serve(struct replay *p, const struct bt_sim_request *q, bool counted)
{
    const uint32_t *blocks = p->t->blocks + q->first;
    bool whole = p->o->mode == BT_SIM_REPLAY_SEQUENCE;
    uint32_t n = q->n_blocks, prefix = 0;
    uint64_t hits = 0, hit_tokens = 0, prefix_tokens = 0;
    n -= !whole && q->input % BT_SIM_BLOCK_TOKENS != 0;
    while (prefix < n && p->slot_of[blocks[prefix]] != NONE) {
        prefix_tokens += tokens_of(q, prefix++);
    }
    for (uint32_t k = 0; k < n; k++, p->at++) {
        uint32_t slot = p->slot_of[blocks[k]];
        bool found = slot != NONE;
        if (found && (whole || k < prefix)) {
            hit(p, slot, k > 0 ? p->held[k - 1] : BT_EVICT_NONE);
            hits++;
            hit_tokens += tokens_of(q, k);
        } else if (found) { /* computed again behind a hole: the old copy stays */
            p->policy->pin(p->evict, slot);
        } else {
            slot = put(p, q, k, (uint32_t)prefix_tokens);
        }
        p->held[k] = slot;
    }
    p->at += q->n_blocks - n;
    for (uint32_t k = 0; p->policy != NULL && k < n; k++) {
        p->policy->unpin(p->evict, p->held[whole ? k : n - 1 - k]);
        p->r->events++;
    }
    if (counted) {
        struct bt_sim_replay_result *r = p->r;
        double all = prefill_s(p, q, 0);
        r->blocks += n;
        r->hit_blocks += hits;
        r->tokens += q->input;
        r->hit_tokens += hit_tokens;
        r->prefix_tokens += prefix_tokens;
        r->prefill_s += all;
        r->saved_s += all - prefill_s(p, q, prefix_tokens);
    }
}

bt_status_t bt_sim_replay_check(const struct bt_sim_trace *t, uint32_t n_blocks, char *err,
                                size_t err_cap)
{
    uint32_t longest = 0;
    for (uint32_t i = 0; i < t->n; i++) {
        longest = BT_MAX(longest, t->requests[i].n_blocks);
    }
    if (n_blocks != 0 && n_blocks < longest) {
        snprintf(err, err_cap,
                 "--blocks %u: the longest request of the trace has %u blocks; give at least that",
                 n_blocks, longest);
        return BT_ERR_INVALID;
    }
    return BT_OK;
}

static uint32_t *numbers(uint32_t n, int fill)
{
    uint32_t *v = bt_malloc(BT_MAX(n, 1u) * sizeof(*v));
    memset(v, fill, n * sizeof(*v));
    return v;
}

bt_status_t bt_sim_replay(const struct bt_sim_trace *t, const struct bt_evict_policy *policy,
                          uint32_t n_blocks, const struct bt_sim_replay_options *o,
                          struct bt_sim_replay_result *r, char *err, size_t err_cap)
{
    struct replay p = {.t = t, .o = o, .r = r, .policy = policy};
    BT_ASSERT(policy != NULL || o->mode == BT_SIM_REPLAY_SEQUENCE);
    p.cap = BT_MAX(n_blocks == 0 ? t->n_unique : BT_MIN(n_blocks, t->n_unique), 1u);
    bt_status_t st = bt_sim_replay_check(t, n_blocks, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    memset(r, 0, sizeof(*r));
    p.slot_of = numbers(t->n_unique, 0xff);
    p.parent_of = numbers(t->n_unique, 0xff);
    p.behind = numbers(t->n_unique, 0);
    p.block_of = numbers(p.cap, 0xff);
    p.held = numbers(p.cap, 0xff);
    if (policy != NULL) {
        p.evict = policy->create(p.cap);
    } else {
        future_init(&p);
    }
    uint32_t from = (uint32_t)(o->from * t->n), to = (uint32_t)(o->to * t->n);
    uint64_t start = bt_mono_ns();
    for (uint32_t i = 0; i < to; i++) {
        serve(&p, &t->requests[i], i >= from);
        if (o->progress != NULL && (i % 256 == 0 || i + 1 == to)) {
            o->progress(o->arg, i + 1, to);
        }
    }
    r->wall_s = (double)(bt_mono_ns() - start) / 1e9;
    if (policy != NULL) {
        policy->destroy(p.evict);
    }
    free(p.slot_of);
    free(p.parent_of);
    free(p.behind);
    free(p.block_of);
    free(p.held);
    free(p.future.heap);
    free(p.future.next_use);
    free(p.future.expect);
    return BT_OK;
}
