/* A piece is one transfer of a fetch, from the request to the wire's last callback. Until then the
 * piece owns the slots that it fills. It reports each block to the fetch as soon as it is known
 * whether the block arrives. */
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "kvstore/fetch/fetch_priv.h"

static void piece_free(struct bt_fetch_piece *p)
{
    BT_ASSERT(p->over && p->quiet);
    bt_cache_put(p->fs->c.cache, p->slots, p->n_taken);
    bt_list_remove(&p->link);
    p->fs->n_pieces--;
    free(p->keys);
    free(p->at);
    free(p->slots);
    free(p);
}

/* Ends the transfer of block i in this piece; false: it had ended before. */
static bool unfly(struct bt_fetch_piece *p, uint32_t i)
{
    bool ours = bt_map_get(p->fs->flying, &p->keys[i]) == p;
    if (ours) {
        bt_map_del(p->fs->flying, &p->keys[i]);
    }
    return ours;
}

/* Block i of the piece does not come from this source. */
static void missed(struct bt_fetch_piece *p, uint32_t i)
{
    if (unfly(p, i) && p->f != NULL) {
        p->f->blocks[p->first + i].tried |= (uint16_t)(1u << p->source);
        bt_fetch_block_came(p->f, p->first + i, BT_POOL_NONE);
    }
}

/* The fetch expects nothing more of this piece. */
static void piece_over(struct bt_fetch_piece *p)
{
    struct bt_fetch *f = p->f;
    struct bt_fetches *fs = p->fs;
    p->over = true;
    p->f = NULL;
    bt_timer_stop(fs->c.loop, &p->stall);
    if (f != NULL) {
        f->n_active--;
        f->sources[p->source].n_pieces--;
        bt_fetch_pump(f);
    }
    bt_fetch_wake_sharers(fs);
}

static void give_up(struct bt_fetch_piece *p, bt_status_t st, const char *why)
{
    struct bt_fetch *f = p->f;
    for (uint32_t i = 0; i < p->n; i++) {
        missed(p, i);
    }
    if (f != NULL) {
        struct bt_fetch_peer *s = &f->sources[p->source];
        /* A source that lacks these blocks, or had a damaged one, may still have others. */
        s->bad = s->bad || (st != BT_ERR_NOT_FOUND && st != BT_ERR_DATA_LOSS);
        BT_INFO("fetch_failed", "req=%016llx epoch=%u peer=%s block=%u blocks=%u status=%s why=%s",
                (unsigned long long)f->request, f->epoch, s->name, p->first, p->n,
                bt_status_name(st), why);
    }
    bt_fetch_count(st == BT_ERR_NOT_FOUND ? p->fs->m.lacking : p->fs->m.failed, 1);
    piece_over(p);
}

/* Ends the transfer. on_quiet may come inside the call and free p. */
static void cancel(struct bt_fetch_piece *p)
{
    if (!p->fs->stopping && p->recv != NULL && !p->quiet) {
        p->fs->wire.recv_cancel(p->recv);
    }
}

static void on_stall(void *arg)
{
    struct bt_fetch_piece *p = arg;
    give_up(p, BT_ERR_TIMEOUT, "the source sent nothing for kvstore.fetch.stall_ms");
    cancel(p);
}

static void on_offer(void *arg, const uint8_t *have, uint32_t n)
{
    struct bt_fetch_piece *p = arg;
    struct bt_fetches *fs = p->fs;
    BT_ASSERT(n == p->n && !p->over);
    bt_timer_start(fs->c.loop, &p->stall, fs->c.stall_ms, 0, on_stall, p);
    for (uint32_t i = 0; i < n; i++) {
        if (have[i] == BT_WIRE_LACKS) {
            missed(p, i);
            continue;
        }
        p->at[p->n_taken++] = i;
        p->n_ssd += have[i] == BT_WIRE_FROM_SSD;
    }
    bt_fetch_count(fs->m.lacking, p->n_taken < n);
    uint32_t want = p->n_taken;
    if (fs->stopping || bt_cache_take(fs->c.cache, p->group, want, p->slots) != BT_OK) {
        p->n_taken = 0;
        for (uint32_t i = 0; p->f != NULL && i < p->n; i++) { /* the other sources would not help */
            p->f->blocks[p->first + i].tried = UINT16_MAX;
        }
        give_up(p, BT_ERR_EXHAUSTED, "no slots are free to fetch into");
        cancel(p);
        return;
    }
    fs->wire.fetch_take(p->recv, p->slots);
    if (want < n && p->f != NULL) { /* other sources may have the remaining blocks */
        bt_fetch_pump(p->f);
    }
}

static void on_progress(void *arg)
{
    struct bt_fetch_piece *p = arg;
    if (!p->over) {
        bt_timer_start(p->fs->c.loop, &p->stall, p->fs->c.stall_ms, 0, on_stall, p);
    }
}

static void measure(struct bt_fetch_piece *p)
{
    struct bt_fetches *fs = p->fs;
    uint64_t block = fs->c.layout->block_bytes, now = bt_mono_ns(), ns = now - p->start_ns;
    uint64_t alone = ns;
    if (p->f != NULL) { /* two pieces share the link: measure from the end of the previous one */
        uint64_t *landed = &p->f->sources[p->source].landed_ns;
        alone = now - BT_MAX(p->start_ns, *landed);
        *landed = now;
    }
    bt_rates_add(&fs->rates, p->incarnation, p->n_ssd > 0 ? BT_RATE_SSD : BT_RATE_SLAB,
                 p->n_taken * block, alone);
    bt_fetch_count(fs->m.bytes[BT_RATE_SSD], p->n_ssd * block);
    bt_fetch_count(fs->m.bytes[BT_RATE_SLAB], (p->n_taken - p->n_ssd) * block);
    bt_fetch_count(fs->m.ok, 1);
    if (fs->m.piece_s != NULL) {
        bt_metric_observe(fs->m.piece_s, (double)ns * 1e-9);
    }
}

/* All blocks are in their slots and verified. */
static void on_done(void *arg, const struct bt_wire_trailer *t, uint64_t first_ns, uint64_t last_ns,
                    uint64_t bytes, uint64_t segments)
{
    struct bt_fetch_piece *p = arg;
    struct bt_cache *cache = p->fs->c.cache;
    (void)t, (void)first_ns, (void)last_ns, (void)bytes, (void)segments;
    if (p->over) {
        return;
    }
    for (uint32_t k = 0; k < p->n_taken; k++) {
        uint32_t i = p->at[k], block = p->first + i;
        bt_pool_crcs_known(cache->pool, p->slots[k]);
        struct bt_cache_block b = {.key = &p->keys[i],
                                   .n_tokens = p->fs->c.layout->page_tokens,
                                   .depth = block,
                                   .origin = BT_EVICT_COPY,
                                   .passing = p->passing};
        (void)bt_cache_seal_copy(cache, p->slots[k],
                                 &b); /* if the same block was computed meanwhile, that one stays */
        (void)unfly(p, i);
        if (p->f != NULL) {
            bt_fetch_block_came(p->f, block, bt_cache_hold(cache, &p->keys[i]));
        }
    }
    measure(p);
    piece_over(p);
}

static void on_failed(void *arg, bt_status_t st, const char *why)
{
    struct bt_fetch_piece *p = arg;
    if (!p->over) {
        give_up(p, st, why);
    }
}

static void on_quiet(void *arg)
{
    struct bt_fetch_piece *p = arg;
    p->quiet = true;
    if (!p->over) { /* the wire is being destroyed */
        give_up(p, BT_ERR_CANCELLED, "shutting down");
    }
    if (!p->starting) {
        piece_free(p);
    }
}

void bt_fetch_piece_start(struct bt_fetch *f, uint32_t s, uint32_t first, uint32_t n)
{
    static const struct bt_wire_recv_ops ops = {.on_offer = on_offer,
                                                .on_progress = on_progress,
                                                .on_done = on_done,
                                                .on_failed = on_failed,
                                                .on_quiet = on_quiet};
    struct bt_fetches *fs = f->fs;
    struct bt_fetch_peer *src = &f->sources[s];
    struct bt_fetch_piece *p = bt_calloc(1, sizeof(*p));
    p->group = f->group;
    p->passing = f->class == BT_WIRE_WINDOW;
    p->fs = fs;
    p->f = f;
    p->source = s;
    p->incarnation = src->incarnation;
    p->first = first;
    p->n = n;
    p->keys = bt_calloc(n, sizeof(*p->keys));
    p->at = bt_calloc(n, sizeof(*p->at));
    p->slots = bt_calloc(n, sizeof(*p->slots));
    memcpy(p->keys, &f->keys[first], n * sizeof(*p->keys));
    for (uint32_t i = 0; i < n; i++) {
        f->blocks[first + i].state = BLOCK_FLYING;
        bt_fetch_count(fs->m.replaced, (f->blocks[first + i].tried & (TRIED_SSD - 1)) != 0);
        bt_map_put(fs->flying, &p->keys[i], p);
    }
    bt_list_insert_tail(&fs->pieces, &p->link);
    fs->n_pieces++;
    src->n_pieces++;
    f->n_active++;
    p->start_ns = bt_mono_ns();
    bt_timer_start(fs->c.loop, &p->stall, fs->c.stall_ms, 0, on_stall, p);
    struct bt_wire_peer_addr peer = {
        .name = src->name, .rpc = src->rpc, .incarnation = src->incarnation};
    p->starting = true; /* all callbacks may come inside the call */
    p->recv = fs->wire.fetch_start(fs->wire.w, &peer, f->request, f->epoch, p->keys, n, f->class,
                                   &ops, p);
    p->starting = false;
    if (p->quiet) {
        piece_free(p);
    }
}

void bt_fetch_piece_detach(struct bt_fetch *f)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &f->fs->pieces) {
        struct bt_fetch_piece *p = BT_CONTAINER_OF(i, struct bt_fetch_piece, link);
        if (p->f != f) {
            continue;
        }
        p->f = NULL;
        if (p->n_taken == 0) {
            p->over = true;
            bt_timer_stop(f->fs->c.loop, &p->stall);
            for (uint32_t k = 0; k < p->n; k++) {
                (void)unfly(p, k);
            }
            cancel(p);
        }
    }
    bt_fetch_wake_sharers(f->fs);
}
