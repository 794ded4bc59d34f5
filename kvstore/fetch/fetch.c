/* The plan of a gather: which block comes from where, and when nothing is left to wait for. Blocks
 * are looked at in the order of the chain; what is in the slab is leased, what lies on the own SSD
 * is read, what others have is asked for in pieces, from each source that has it as long as few
 * pieces are under way there. Layers of a piece travel in order, but a block can be used only when
 * all of them are there: the grant that it becomes part of shows whole blocks. */
#include "kvstore/fetch/fetch.h"

#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "kvstore/fetch/fetch_priv.h"

/* Reading a block from the own SSD takes nobody's network; a peer must be so many times as fast. */
#define PEER_GAIN 2.0

void gather_count(struct bt_metric *m, uint64_t n)
{
    if (m != NULL) {
        bt_metric_add(m, n);
    }
}

/* ---- what is worth it ---- */

double gather_block_s(const struct bt_gathers *gs, uint64_t incarnation, bt_rate_tier_t tier)
{
    return (double)gs->c.layout->block_bytes / bt_rates_get(&gs->rates, incarnation, tier);
}

/* Does a block come sooner than it is computed? In a tail it only has to come. */
static bool worth(const struct bt_gather *g, double s)
{
    double computed = g->gs->c.layout->page_tokens * (g->tail ? TAIL_WORTH : 1.0);
    return g->prefill_tokens_per_s <= 0 || s * g->prefill_tokens_per_s < computed;
}

/* The own disk takes nobody's network, and a tail that reads from it keeps what is known of its
 * speed fresh: that it was slow is no reason for never asking again. */
static bool disk_worth(const struct bt_gather *g)
{
    return g->tail || !bt_rates_measured(&g->gs->rates, BT_RATES_OWN, BT_RATE_SSD) ||
           worth(g, gather_block_s(g->gs, BT_RATES_OWN, BT_RATE_SSD));
}

static bool disk_has(const struct bt_gather *g, uint32_t i)
{
    return (g->blocks[i].tried & TRIED_DISK) == 0 && g->gs->c.tier != NULL &&
           bt_ssd_has(bt_tier_ssd(g->gs->c.tier), &g->keys[i]) && disk_worth(g);
}

/* The source that would bring block i first; n_sources: none. *busy_p: some could, but all have
 * enough to do. */
static uint32_t choose_source(const struct bt_gather *g, uint32_t i, bool *busy_p)
{
    uint32_t best = g->n_sources;
    double best_s = 0;
    *busy_p = false;
    for (uint32_t s = 0; s < g->n_sources; s++) {
        const struct gather_source *src = &g->sources[s];
        double one = gather_block_s(g->gs, src->incarnation, BT_RATE_SLAB);
        if (src->bad || !src->has[i] || (g->blocks[i].tried & 1u << s) != 0 || !worth(g, one)) {
            continue;
        }
        if (src->n_pieces >= PIECES_MAX) {
            *busy_p = true;
            continue;
        }
        double s_there = one * (src->n_pieces + 1);
        if (best == g->n_sources || s_there < best_s) {
            best = s;
            best_s = s_there;
        }
    }
    return best;
}

/* ---- the own SSD ---- */

static void on_run(void *arg)
{
    struct disk_run *r = arg;
    struct bt_gather *g = r->g;
    struct bt_gathers *gs = g->gs;
    uint32_t came = 0;
    for (uint32_t i = r->first; i < r->first + r->n; i++) {
        uint32_t slot = bt_cache_hold(gs->c.cache, &g->keys[i]);
        g->blocks[i].tried |= TRIED_DISK;
        came += slot != UINT32_MAX;
        gather_block(g, i, slot);
    }
    uint64_t now = bt_mono_ns();
    bt_rates_add(&gs->rates, BT_RATES_OWN, BT_RATE_SSD,
                 (uint64_t)BT_MIN(came, r->n_read) * gs->c.layout->block_bytes,
                 now - BT_MAX(r->start_ns, g->disk_ns));
    g->disk_ns = now;
    bt_tier_load_end(r->load);
    r->load = NULL;
    g->n_active--;
    g->n_disk--;
    gather_pump(g);
}

void gather_run(struct bt_gather *g, uint32_t first, uint32_t n)
{
    struct disk_run *r = bt_calloc(1, sizeof(*r));
    r->g = g;
    r->first = first;
    r->n = r->n_read = n;
    r->start_ns = bt_mono_ns();
    r->load =
        bt_tier_load(g->gs->c.tier, &g->keys[first], n, g->class == BT_WIRE_WINDOW, on_run, r);
    for (uint32_t i = first; i < first + n; i++) {
        g->blocks[i].state = r->load != NULL ? BLOCK_DISK : BLOCK_MISSING;
        g->blocks[i].tried |= TRIED_DISK;
    }
    if (r->load == NULL) { /* no slot is free to read into */
        free(r);
        return;
    }
    if (g->n_runs == g->runs_cap) {
        g->runs_cap = g->runs_cap != 0 ? g->runs_cap * 2 : 4;
        g->runs = bt_realloc(g->runs, g->runs_cap * sizeof(struct disk_run *));
    }
    g->runs[g->n_runs++] = r;
    g->n_active++;
    g->n_disk++;
}

/* ---- the plan ---- */

static void hold(struct bt_gather *g, uint32_t i, uint32_t slot)
{
    g->blocks[i].state = BLOCK_HERE;
    g->blocks[i].slot = slot;
}

void gather_block(struct bt_gather *g, uint32_t i, uint32_t slot)
{
    BT_ASSERT(g->blocks[i].state == BLOCK_DISK || g->blocks[i].state == BLOCK_FLYING);
    if (slot != BT_POOL_NONE) {
        hold(g, i, slot);
    } else {
        g->blocks[i].state = BLOCK_MISSING;
    }
}

block_state_t gather_way(const struct bt_gather *g, uint32_t i, uint32_t *source_p)
{
    bool busy, disk = disk_has(g, i);
    *source_p = choose_source(g, i, &busy);
    bool peer = *source_p < g->n_sources;
    if (disk && peer) {
        double there = gather_block_s(g->gs, g->sources[*source_p].incarnation, BT_RATE_SLAB);
        disk = there * PEER_GAIN >= gather_block_s(g->gs, BT_RATES_OWN, BT_RATE_SSD);
    }
    if (disk) {
        return BLOCK_DISK;
    }
    return peer ? BLOCK_FLYING : busy ? BLOCK_MISSING : BLOCK_LOST;
}

bool gather_missing(struct bt_gather *g, uint32_t i)
{
    if (g->blocks[i].state != BLOCK_MISSING) {
        return false;
    }
    uint32_t slot = bt_cache_hold(g->gs->c.cache, &g->keys[i]);
    if (slot != UINT32_MAX) {
        hold(g, i, slot);
        return false;
    }
    if (bt_map_get(g->gs->flying, &g->keys[i]) != NULL) {
        g->blocks[i].state = BLOCK_FOREIGN;
        g->n_foreign++;
        return false;
    }
    return true;
}

/* Starts what brings block i and those behind it that come the same way. */
static void start_at(struct bt_gather *g, uint32_t i)
{
    uint32_t source, other, n = 1, max;
    block_state_t way = gather_way(g, i, &source);
    if (way == BLOCK_LOST) {
        g->blocks[i].state = BLOCK_LOST;
        g->end = BT_MIN(g->end, i);
        return;
    }
    if (way == BLOCK_MISSING) {
        return;
    }
    max = way == BLOCK_DISK ? g->n : g->gs->piece_blocks;
    while (i + n < g->end && n < max && gather_missing(g, i + n) &&
           gather_way(g, i + n, &other) == way && (way == BLOCK_DISK || other == source)) {
        n++;
    }
    if (way == BLOCK_DISK) {
        gather_run(g, i, n);
    } else {
        piece_start(g, source, i, n);
    }
}

static void on_due(void *arg)
{
    struct bt_gather *g = arg;
    bt_timer_stop(g->gs->c.loop, &g->wait);
    if (g->gs->m.wait_s != NULL) {
        bt_metric_observe(g->gs->m.wait_s, (double)(bt_mono_ns() - g->start_ns) * 1e-9);
    }
    g->done(g->arg); /* may end it */
}

static void on_wait(void *arg)
{
    struct bt_gather *g = arg;
    gather_count(g->gs->m.late, 1);
    g->ended = true;
    on_due(g);
}

static void pump_once(struct bt_gather *g)
{
    for (uint32_t i = g->low; i < g->end; i++) {
        if (gather_missing(g, i)) {
            start_at(g, i);
        }
        if (g->low == i && g->blocks[i].state == BLOCK_HERE) {
            g->low++;
        }
    }
}

void gather_pump(struct bt_gather *g)
{
    g->again = true;
    if (g->pumping || g->ended || g->gs->stopping) {
        return;
    }
    g->pumping = true;
    while (g->again) { /* what ends at once inside of a start pumps again */
        g->again = false;
        if (g->tail) {
            tail_pump(g);
        } else {
            pump_once(g);
        }
    }
    g->pumping = false;
    if (!g->tail && g->low >= g->end) {
        g->ended = true;
        bt_timer_start(g->gs->c.loop, &g->due, 0, 0, on_due, g);
    }
}

void gather_foreign(struct bt_gathers *gs)
{
    struct bt_list *i;
    bt_list_for_each (i, &gs->all) {
        struct bt_gather *g = BT_CONTAINER_OF(i, struct bt_gather, link);
        if (g->n_foreign == 0) {
            continue;
        }
        for (uint32_t b = g->low; b < g->n; b++) {
            if (g->blocks[b].state == BLOCK_FOREIGN &&
                bt_map_get(gs->flying, &g->keys[b]) == NULL) {
                g->blocks[b].state = BLOCK_MISSING;
                g->n_foreign--;
            }
        }
        gather_pump(g);
    }
}

/* ---- start and end ---- */

static void add_source(struct bt_gather *g, const struct bt_gather_source *from)
{
    if (g->n_sources == BT_GATHER_SOURCES_MAX || from->incarnation == g->gs->c.incarnation ||
        from->name[0] == '\0' || from->rpc[0] == '\0') {
        return;
    }
    struct gather_source *s = &g->sources[g->n_sources++];
    s->name = bt_strdup(from->name);
    s->rpc = bt_strdup(from->rpc);
    s->incarnation = from->incarnation;
    s->has = bt_calloc(BT_MAX(g->n, 1u), 1);
    for (size_t k = 0; k < from->n_runs; k++) {
        uint32_t first = BT_MIN(from->first[k], g->n);
        memset(s->has + first, 1, BT_MIN(from->count[k], g->n - first));
    }
}

/* Could anything come that is not here? Most prompts are all here, or nowhere. */
static bool any_way(const struct bt_gathers *gs, const struct bt_gather_ask *ask)
{
    uint32_t i = 0;
    while (i < ask->n && bt_index_find(gs->c.cache->index, &ask->keys[i]) != UINT32_MAX) {
        i++;
    }
    if (i == ask->n) {
        return false;
    }
    if ((gs->c.tier != NULL && bt_ssd_has(bt_tier_ssd(gs->c.tier), &ask->keys[i])) ||
        bt_map_get(gs->flying, &ask->keys[i]) != NULL) {
        return true;
    }
    for (size_t s = 0; s < ask->n_sources; s++) {
        const struct bt_gather_source *src = &ask->sources[s];
        for (size_t k = 0; k < src->n_runs; k++) {
            if (i >= src->first[k] && i - src->first[k] < src->count[k]) {
                return true;
            }
        }
    }
    return false;
}

struct bt_gather *gather_new(struct bt_gathers *gs, const struct bt_gather_ask *ask,
                             void (*done)(void *arg), void *arg)
{
    struct bt_gather *g = bt_calloc(1, sizeof(*g));
    g->gs = gs;
    g->request = ask->request;
    g->epoch = ask->epoch;
    g->group = ask->group;
    bt_tenants_hold(gs->c.cache->tenants, g->group);
    g->class = ask->class;
    g->prefill_tokens_per_s = ask->prefill_tokens_per_s;
    g->n = g->end = ask->n;
    g->keys = bt_calloc(g->n, sizeof(*g->keys));
    g->blocks = bt_calloc(g->n, sizeof(*g->blocks));
    memcpy(g->keys, ask->keys, g->n * sizeof(*g->keys));
    for (size_t i = 0; i < ask->n_sources; i++) {
        add_source(g, &ask->sources[i]);
    }
    g->done = done;
    g->arg = arg;
    g->start_ns = bt_mono_ns();
    bt_list_insert_tail(&gs->all, &g->link);
    return g;
}

struct bt_gather *bt_gather_start(struct bt_gathers *gs, const struct bt_gather_ask *ask,
                                  void (*done)(void *arg), void *arg)
{
    if (gs->stopping || !any_way(gs, ask)) {
        return NULL;
    }
    struct bt_gather *g = gather_new(gs, ask, done, arg);
    gather_pump(g);
    if (g->n_active == 0 && g->n_foreign == 0) {
        bt_gather_end(g);
        return NULL;
    }
    if (!g->ended) {
        uint64_t wait_ms = ask->wait_ms != 0 ? BT_MIN(ask->wait_ms, gs->c.wait_ms) : gs->c.wait_ms;
        bt_timer_start(gs->c.loop, &g->wait, wait_ms, 0, on_wait, g);
    }
    return g;
}

void bt_gather_end(struct bt_gather *g)
{
    struct bt_gathers *gs = g->gs;
    bt_timer_stop(gs->c.loop, &g->wait);
    bt_timer_stop(gs->c.loop, &g->due);
    g->ended = true;
    bt_list_remove(&g->link);
    piece_detach(g);
    for (uint32_t i = 0; i < g->n_runs; i++) {
        if (g->runs[i]->load != NULL) {
            bt_tier_load_end(g->runs[i]->load);
        }
        free(g->runs[i]);
    }
    for (uint32_t i = g->n; i-- > 0;) { /* the chain's head is left the youngest */
        if (g->blocks[i].state == BLOCK_HERE) {
            bt_cache_put(gs->c.cache, &g->blocks[i].slot, 1);
        }
    }
    for (uint32_t s = 0; s < g->n_sources; s++) {
        free(g->sources[s].name);
        free(g->sources[s].rpc);
        free(g->sources[s].has);
    }
    free(g->runs);
    free(g->keys);
    free(g->blocks);
    bt_tenants_release(g->gs->c.cache->tenants, g->group);
    free(g);
}

/* ---- the whole ---- */

static void metrics_create(struct bt_gathers *gs, struct bt_metrics *m)
{
    static const double bounds[] = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
                                    0.2,   0.5,   1,     2,    5,    10};
    const char *bytes = "baton_kvstore_fetched_bytes_total",
               *pieces = "baton_kvstore_fetches_total";
    const char *bytes_help = "KV bytes fetched from other nodes for a prefix, by where they were";
    const char *help = "Transfers of blocks from other nodes, by how they ended (lacking: in part)";
    gs->m.bytes[BT_RATE_SLAB] = bt_metrics_counter(m, bytes, "tier=\"slab\"", bytes_help);
    gs->m.bytes[BT_RATE_SSD] = bt_metrics_counter(m, bytes, "tier=\"ssd\"", bytes_help);
    gs->m.ok = bt_metrics_counter(m, pieces, "result=\"ok\"", help);
    gs->m.lacking = bt_metrics_counter(m, pieces, "result=\"lacking\"", help);
    gs->m.failed = bt_metrics_counter(m, pieces, "result=\"failed\"", help);
    gs->m.replaced = bt_metrics_counter(m, "baton_kvstore_fetch_replaced_total", NULL,
                                        "Blocks asked of another source after one had failed or "
                                        "lacked them");
    gs->m.late = bt_metrics_counter(m, "baton_kvstore_gather_late_total", NULL,
                                    "Requests that did not wait for all of their prefix");
    gs->m.tails = bt_metrics_counter(m, "baton_kvstore_tails_total", NULL,
                                     "Prefixes that were loaded from their end while a worker "
                                     "computed from their beginning");
    gs->m.tail_blocks = bt_metrics_counter(m, "baton_kvstore_tail_blocks_total", NULL,
                                           "Blocks of them that came in time to be offered");
    gs->m.piece_s = bt_metrics_histogram(m, "baton_kvstore_fetch_seconds", NULL,
                                         "From asking another node for blocks to having them",
                                         bounds, BT_ARRAY_LEN(bounds));
    gs->m.wait_s = bt_metrics_histogram(m, "baton_kvstore_gather_seconds", NULL,
                                        "How long reservations waited for their prefix", bounds,
                                        BT_ARRAY_LEN(bounds));
}

struct bt_gathers *bt_gathers_create(const struct bt_gathers_config *c)
{
    struct bt_gathers *gs = bt_calloc(1, sizeof(*gs));
    gs->c = *c;
    gs->flying = bt_map_create(sizeof(struct bt_kv_key));
    bt_list_init(&gs->all);
    bt_list_init(&gs->pieces);
    uint64_t most = BT_MIN(PIECE_TOKENS / c->layout->page_tokens, (uint64_t)BT_WIRE_FETCH_MAX);
    gs->piece_blocks = (uint32_t)BT_MAX(BT_MIN(PIECE_BYTES / c->layout->block_bytes, most), 1u);
    if (c->metrics != NULL) {
        metrics_create(gs, c->metrics);
    }
    return gs;
}

void bt_gathers_set_wire(struct bt_gathers *gs, const struct bt_gather_wire *wire)
{
    gs->wire = *wire;
}

void bt_gathers_stop(struct bt_gathers *gs)
{
    gs->stopping = true;
}

void bt_gathers_destroy(struct bt_gathers *gs)
{
    if (gs == NULL) {
        return;
    }
    BT_ASSERT(bt_list_empty(&gs->all) && bt_list_empty(&gs->pieces));
    BT_ASSERT(bt_map_count(gs->flying) == 0);
    bt_map_destroy(gs->flying);
    free(gs);
}

const struct bt_rates *bt_gathers_rates(const struct bt_gathers *gs)
{
    return &gs->rates;
}

uint32_t bt_gathers_pieces(const struct bt_gathers *gs)
{
    return gs->n_pieces;
}

uint32_t bt_gathers_tail_slots(const struct bt_gathers *gs)
{
    uint32_t n = 0;
    struct bt_list *i;
    bt_list_for_each (i, &gs->all) {
        const struct bt_gather *g = BT_CONTAINER_OF(i, struct bt_gather, link);
        for (uint32_t b = 0; g->tail && b < g->n; b++) {
            n += g->blocks[b].state == BLOCK_HERE;
        }
    }
    return n;
}
