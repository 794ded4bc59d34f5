/* Pieces: one transfer of a gather, from asking a peer to the last callback of the wire. A piece
 * owns the slots that it writes to until then; who waits for it is told as soon as it is known
 * whether its blocks come. */
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "kvstore/fetch/fetch_priv.h"

static void piece_free(struct piece *p)
{
    BT_ASSERT(p->over && p->quiet);
    bt_cache_put(p->gs->c.cache, p->slots, p->n_taken);
    bt_list_remove(&p->link);
    p->gs->n_pieces--;
    free(p->keys);
    free(p->at);
    free(p->slots);
    free(p);
}

/* false: block i has been given back before. */
static bool unfly(struct piece *p, uint32_t i)
{
    bool ours = bt_map_get(p->gs->flying, &p->keys[i]) == p;
    if (ours) {
        bt_map_del(p->gs->flying, &p->keys[i]);
    }
    return ours;
}

/* Block i of the piece does not come from this source. */
static void missed(struct piece *p, uint32_t i)
{
    if (unfly(p, i) && p->g != NULL) {
        p->g->blocks[p->first + i].tried |= (uint16_t)(1u << p->source);
        gather_block(p->g, p->first + i, BT_POOL_NONE);
    }
}

/* The piece moves nothing any more as far as its gather is concerned. */
static void piece_over(struct piece *p)
{
    struct bt_gather *g = p->g;
    struct bt_gathers *gs = p->gs;
    p->over = true;
    p->g = NULL;
    bt_timer_stop(gs->c.loop, &p->stall);
    if (g != NULL) {
        g->n_active--;
        g->sources[p->source].n_pieces--;
        gather_pump(g);
    }
    gather_foreign(gs);
}

static void give_up(struct piece *p, bt_status_t st, const char *why)
{
    struct bt_gather *g = p->g;
    for (uint32_t i = 0; i < p->n; i++) {
        missed(p, i);
    }
    if (g != NULL) {
        struct gather_source *s = &g->sources[p->source];
        /* One that only lacks these blocks, or sent one that had gone bad, may have others. */
        s->bad = s->bad || (st != BT_ERR_NOT_FOUND && st != BT_ERR_DATA_LOSS);
        BT_INFO("fetch_failed", "req=%016llx epoch=%u peer=%s block=%u blocks=%u status=%s why=%s",
                (unsigned long long)g->request, g->epoch, s->name, p->first, p->n,
                bt_status_name(st), why);
    }
    gather_count(st == BT_ERR_NOT_FOUND ? p->gs->m.lacking : p->gs->m.failed, 1);
    piece_over(p);
}

/* Ends the transfer; on_quiet comes, maybe at once: p may be gone afterwards. */
static void cancel(struct piece *p)
{
    if (!p->gs->stopping && p->recv != NULL && !p->quiet) {
        p->gs->wire.recv_cancel(p->recv);
    }
}

static void on_stall(void *arg)
{
    struct piece *p = arg;
    give_up(p, BT_ERR_TIMEOUT, "it brought nothing for kvstore.fetch.stall_ms");
    cancel(p);
}

static void on_offer(void *arg, const uint8_t *have, uint32_t n)
{
    struct piece *p = arg;
    struct bt_gathers *gs = p->gs;
    BT_ASSERT(n == p->n && !p->over);
    bt_timer_start(gs->c.loop, &p->stall, gs->c.stall_ms, 0, on_stall, p);
    for (uint32_t i = 0; i < n; i++) {
        if (have[i] == BT_WIRE_LACKS) {
            missed(p, i);
            continue;
        }
        p->at[p->n_taken++] = i;
        p->n_ssd += have[i] == BT_WIRE_FROM_SSD;
    }
    gather_count(gs->m.lacking, p->n_taken < n);
    uint32_t want = p->n_taken;
    if (gs->stopping || bt_cache_take_for(gs->c.cache, p->group, want, p->slots) != BT_OK) {
        p->n_taken = 0;
        for (uint32_t i = 0; p->g != NULL && i < p->n; i++) { /* no other source changes that */
            p->g->blocks[p->first + i].tried = UINT16_MAX;
        }
        give_up(p, BT_ERR_EXHAUSTED, "no slots are free to fetch into");
        cancel(p);
        return;
    }
    gs->wire.fetch_take(p->recv, p->slots);
    if (want < n && p->g != NULL) { /* others may have the rest */
        gather_pump(p->g);
    }
}

static void on_progress(void *arg)
{
    struct piece *p = arg;
    if (!p->over) {
        bt_timer_start(p->gs->c.loop, &p->stall, p->gs->c.stall_ms, 0, on_stall, p);
    }
}

static void measure(struct piece *p)
{
    struct bt_gathers *gs = p->gs;
    uint64_t block = gs->c.layout->block_bytes, now = bt_mono_ns(), ns = now - p->start_ns;
    uint64_t alone = ns;
    if (p->g != NULL) { /* two are under way at once: the second waits for the first */
        uint64_t *landed = &p->g->sources[p->source].landed_ns;
        alone = now - BT_MAX(p->start_ns, *landed);
        *landed = now;
    }
    bt_rates_add(&gs->rates, p->incarnation, p->n_ssd > 0 ? BT_RATE_SSD : BT_RATE_SLAB,
                 p->n_taken * block, alone);
    gather_count(gs->m.bytes[BT_RATE_SSD], p->n_ssd * block);
    gather_count(gs->m.bytes[BT_RATE_SLAB], (p->n_taken - p->n_ssd) * block);
    gather_count(gs->m.ok, 1);
    if (gs->m.piece_s != NULL) {
        bt_metric_observe(gs->m.piece_s, (double)ns * 1e-9);
    }
}

/* All of it is in the slots and checked. */
static void on_done(void *arg, const struct bt_wire_trailer *t, uint64_t first_ns, uint64_t last_ns,
                    uint64_t bytes, uint64_t segments)
{
    struct piece *p = arg;
    struct bt_cache *cache = p->gs->c.cache;
    (void)t, (void)first_ns, (void)last_ns, (void)bytes, (void)segments;
    if (p->over) {
        return;
    }
    for (uint32_t k = 0; k < p->n_taken; k++) {
        uint32_t i = p->at[k], block = p->first + i;
        bt_pool_crcs_known(cache->pool, p->slots[k]);
        struct bt_cache_block b = {.key = &p->keys[i],
                                   .n_tokens = p->gs->c.layout->page_tokens,
                                   .depth = block,
                                   .origin = BT_EVICT_COPY,
                                   .passing = p->passing};
        (void)bt_cache_seal_copy(cache, p->slots[k], &b); /* one computed meanwhile stays */
        (void)unfly(p, i);
        if (p->g != NULL) {
            gather_block(p->g, block, bt_cache_hold(cache, &p->keys[i]));
        }
    }
    measure(p);
    piece_over(p);
}

static void on_failed(void *arg, bt_status_t st, const char *why)
{
    struct piece *p = arg;
    if (!p->over) {
        give_up(p, st, why);
    }
}

static void on_quiet(void *arg)
{
    struct piece *p = arg;
    p->quiet = true;
    if (!p->over) { /* cancelled by nobody here: the wire is being destroyed */
        give_up(p, BT_ERR_CANCELLED, "shutting down");
    }
    if (!p->starting) {
        piece_free(p);
    }
}

void piece_start(struct bt_gather *g, uint32_t s, uint32_t first, uint32_t n)
{
    static const struct bt_wire_recv_ops ops = {.on_offer = on_offer,
                                                .on_progress = on_progress,
                                                .on_done = on_done,
                                                .on_failed = on_failed,
                                                .on_quiet = on_quiet};
    struct bt_gathers *gs = g->gs;
    struct gather_source *src = &g->sources[s];
    struct piece *p = bt_calloc(1, sizeof(*p));
    p->group = g->group;
    p->passing = g->class == BT_WIRE_WINDOW;
    p->gs = gs;
    p->g = g;
    p->source = s;
    p->incarnation = src->incarnation;
    p->first = first;
    p->n = n;
    p->keys = bt_calloc(n, sizeof(*p->keys));
    p->at = bt_calloc(n, sizeof(*p->at));
    p->slots = bt_calloc(n, sizeof(*p->slots));
    memcpy(p->keys, &g->keys[first], n * sizeof(*p->keys));
    for (uint32_t i = 0; i < n; i++) {
        g->blocks[first + i].state = BLOCK_FLYING;
        gather_count(gs->m.replaced, (g->blocks[first + i].tried & (TRIED_DISK - 1)) != 0);
        bt_map_put(gs->flying, &p->keys[i], p);
    }
    bt_list_insert_tail(&gs->pieces, &p->link);
    gs->n_pieces++;
    src->n_pieces++;
    g->n_active++;
    p->start_ns = bt_mono_ns();
    bt_timer_start(gs->c.loop, &p->stall, gs->c.stall_ms, 0, on_stall, p);
    struct bt_wire_peer_addr peer = {
        .name = src->name, .rpc = src->rpc, .incarnation = src->incarnation};
    p->starting = true; /* all of it may happen inside of the call */
    p->recv = gs->wire.fetch_start(gs->wire.w, &peer, g->request, g->epoch, p->keys, n, g->class,
                                   &ops, p);
    p->starting = false;
    if (p->quiet) {
        piece_free(p);
    }
}

void piece_detach(struct bt_gather *g)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &g->gs->pieces) {
        struct piece *p = BT_CONTAINER_OF(i, struct piece, link);
        if (p->g != g) {
            continue;
        }
        p->g = NULL;
        if (p->n_taken == 0) {
            p->over = true;
            bt_timer_stop(g->gs->c.loop, &p->stall);
            for (uint32_t k = 0; k < p->n; k++) {
                (void)unfly(p, k);
            }
            cancel(p);
        }
    }
    gather_foreign(g->gs);
}
