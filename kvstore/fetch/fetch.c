/* The plan of a fetch: where each block comes from, and when the fetch is complete. Examines blocks
 * in the order of the chain: blocks in the slab are leased, blocks on this node's SSD are read, and
 * the others are requested from sources in pieces, with a limit of open pieces for each source. A
 * block counts as fetched when all its layers have arrived. Control thread. */
#include "kvstore/fetch/fetch.h"

#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "kvstore/fetch/fetch_priv.h"

/* Reading from the SSD uses no network, so a peer is chosen only if it is this many times as
 * fast. */
#define PEER_GAIN 2.0

void bt_fetch_count(struct bt_metric *m, uint64_t n)
{
    if (m != NULL) {
        bt_metric_add(m, n);
    }
}

/* ---- choice of the source ---- */

double bt_fetch_block_s(const struct bt_fetches *fs, uint64_t incarnation, bt_rate_tier_t tier)
{
    return (double)fs->c.layout->block_bytes / bt_rates_get(&fs->rates, incarnation, tier);
}

/* Is fetching a block faster than computing it? A backward fetch accepts slower sources, since no
 * request waits for it. */
static bool worth(const struct bt_fetch *f, double s)
{
    double computed = f->fs->c.layout->page_tokens * (f->backward ? BACKWARD_WORTH : 1.0);
    return f->prefill_tokens_per_s <= 0 || s * f->prefill_tokens_per_s < computed;
}

/* A backward fetch always reads from the SSD. That keeps the measured speed up to date, so that a
 * disk that was slow once gets another chance. */
static bool ssd_worth(const struct bt_fetch *f)
{
    return f->backward || !bt_rates_measured(&f->fs->rates, BT_RATES_OWN, BT_RATE_SSD) ||
           worth(f, bt_fetch_block_s(f->fs, BT_RATES_OWN, BT_RATE_SSD));
}

static bool ssd_has(const struct bt_fetch *f, uint32_t i)
{
    return (f->blocks[i].tried & TRIED_SSD) == 0 && f->fs->c.tier != NULL &&
           bt_ssd_has(bt_tier_ssd(f->fs->c.tier), &f->keys[i]) && ssd_worth(f);
}

/* The source that would deliver block i first; n_sources: none. *busy_p: some source has it, but
 * all of those have PIECES_MAX pieces under way. */
static uint32_t choose_source(const struct bt_fetch *f, uint32_t i, bool *busy_p)
{
    uint32_t best = f->n_sources;
    double best_s = 0;
    *busy_p = false;
    for (uint32_t s = 0; s < f->n_sources; s++) {
        const struct bt_fetch_peer *src = &f->sources[s];
        double one = bt_fetch_block_s(f->fs, src->incarnation, BT_RATE_SLAB);
        if (src->bad || !src->has[i] || (f->blocks[i].tried & 1u << s) != 0 || !worth(f, one)) {
            continue;
        }
        if (src->n_pieces >= PIECES_MAX) {
            *busy_p = true;
            continue;
        }
        double s_there = one * (src->n_pieces + 1);
        if (best == f->n_sources || s_there < best_s) {
            best = s;
            best_s = s_there;
        }
    }
    return best;
}

/* ---- this node's SSD ---- */

static void on_run(void *arg)
{
    struct bt_fetch_ssd_read *r = arg;
    struct bt_fetch *f = r->f;
    struct bt_fetches *fs = f->fs;
    uint32_t came = 0;
    for (uint32_t i = r->first; i < r->first + r->n; i++) {
        uint32_t slot = bt_cache_hold(fs->c.cache, &f->keys[i]);
        f->blocks[i].tried |= TRIED_SSD;
        came += slot != UINT32_MAX;
        bt_fetch_block_came(f, i, slot);
    }
    uint64_t now = bt_mono_ns();
    bt_rates_add(&fs->rates, BT_RATES_OWN, BT_RATE_SSD,
                 (uint64_t)BT_MIN(came, r->n_read) * fs->c.layout->block_bytes,
                 now - BT_MAX(r->start_ns, f->ssd_ns));
    f->ssd_ns = now;
    bt_tier_read_end(r->read);
    r->read = NULL;
    f->n_active--;
    f->n_ssd_reads--;
    bt_fetch_pump(f);
}

void bt_fetch_read_ssd(struct bt_fetch *f, uint32_t first, uint32_t n)
{
    struct bt_fetch_ssd_read *r = bt_calloc(1, sizeof(*r));
    r->f = f;
    r->first = first;
    r->n = r->n_read = n;
    r->start_ns = bt_mono_ns();
    r->read =
        bt_tier_read(f->fs->c.tier, &f->keys[first], n, f->class == BT_WIRE_WINDOW, on_run, r);
    for (uint32_t i = first; i < first + n; i++) {
        f->blocks[i].state = r->read != NULL ? BLOCK_READING : BLOCK_MISSING;
        f->blocks[i].tried |= TRIED_SSD;
    }
    if (r->read == NULL) { /* no slot is free to read into */
        free(r);
        return;
    }
    if (f->n_runs == f->runs_cap) {
        f->runs_cap = f->runs_cap != 0 ? f->runs_cap * 2 : 4;
        f->runs = bt_realloc(f->runs, f->runs_cap * sizeof(struct bt_fetch_ssd_read *));
    }
    f->runs[f->n_runs++] = r;
    f->n_active++;
    f->n_ssd_reads++;
}

/* ---- the plan ---- */

static void hold(struct bt_fetch *f, uint32_t i, uint32_t slot)
{
    f->blocks[i].state = BLOCK_HERE;
    f->blocks[i].slot = slot;
}

void bt_fetch_block_came(struct bt_fetch *f, uint32_t i, uint32_t slot)
{
    BT_ASSERT(f->blocks[i].state == BLOCK_READING || f->blocks[i].state == BLOCK_FLYING);
    if (slot != BT_POOL_NONE) {
        hold(f, i, slot);
    } else {
        f->blocks[i].state = BLOCK_MISSING;
    }
}

bt_fetch_block_state_t bt_fetch_choose_way(const struct bt_fetch *f, uint32_t i, uint32_t *source_p)
{
    bool busy, disk = ssd_has(f, i);
    *source_p = choose_source(f, i, &busy);
    bool peer = *source_p < f->n_sources;
    if (disk && peer) {
        double there = bt_fetch_block_s(f->fs, f->sources[*source_p].incarnation, BT_RATE_SLAB);
        disk = there * PEER_GAIN >= bt_fetch_block_s(f->fs, BT_RATES_OWN, BT_RATE_SSD);
    }
    if (disk) {
        return BLOCK_READING;
    }
    return peer ? BLOCK_FLYING : busy ? BLOCK_MISSING : BLOCK_LOST;
}

bool bt_fetch_block_missing(struct bt_fetch *f, uint32_t i)
{
    if (f->blocks[i].state != BLOCK_MISSING) {
        return false;
    }
    uint32_t slot = bt_cache_hold(f->fs->c.cache, &f->keys[i]);
    if (slot != UINT32_MAX) {
        hold(f, i, slot);
        return false;
    }
    if (bt_map_get(f->fs->flying, &f->keys[i]) != NULL) {
        f->blocks[i].state = BLOCK_SHARED;
        f->n_shared++;
        return false;
    }
    return true;
}

/* Starts the read or transfer of block i and of the blocks behind it that come in the same way. */
static void start_at(struct bt_fetch *f, uint32_t i)
{
    uint32_t source, other, n = 1, max;
    bt_fetch_block_state_t way = bt_fetch_choose_way(f, i, &source);
    if (way == BLOCK_LOST) {
        f->blocks[i].state = BLOCK_LOST;
        f->end = BT_MIN(f->end, i);
        return;
    }
    if (way == BLOCK_MISSING) {
        return;
    }
    max = way == BLOCK_READING ? f->n : f->fs->piece_blocks;
    while (i + n < f->end && n < max && bt_fetch_block_missing(f, i + n) &&
           bt_fetch_choose_way(f, i + n, &other) == way &&
           (way == BLOCK_READING || other == source)) {
        n++;
    }
    if (way == BLOCK_READING) {
        bt_fetch_read_ssd(f, i, n);
    } else {
        bt_fetch_piece_start(f, source, i, n);
    }
}

static void on_due(void *arg)
{
    struct bt_fetch *f = arg;
    bt_timer_stop(f->fs->c.loop, &f->wait);
    if (f->fs->m.wait_s != NULL) {
        bt_metric_observe(f->fs->m.wait_s, (double)(bt_mono_ns() - f->start_ns) * 1e-9);
    }
    f->done(f->arg); /* may end the fetch */
}

static void on_wait(void *arg)
{
    struct bt_fetch *f = arg;
    bt_fetch_count(f->fs->m.late, 1);
    f->ended = true;
    on_due(f);
}

static void pump_once(struct bt_fetch *f)
{
    for (uint32_t i = f->low; i < f->end; i++) {
        if (bt_fetch_block_missing(f, i)) {
            start_at(f, i);
        }
        if (f->low == i && f->blocks[i].state == BLOCK_HERE) {
            f->low++;
        }
    }
}

void bt_fetch_pump(struct bt_fetch *f)
{
    f->again = true;
    if (f->pumping || f->ended || f->fs->stopping) {
        return;
    }
    f->pumping = true;
    while (f->again) { /* a start that ends at once sets `again` */
        f->again = false;
        if (f->backward) {
            bt_fetch_pump_backward(f);
        } else {
            pump_once(f);
        }
    }
    f->pumping = false;
    if (!f->backward && f->low >= f->end) {
        f->ended = true;
        bt_timer_start(f->fs->c.loop, &f->due, 0, 0, on_due, f);
    }
}

void bt_fetch_wake_sharers(struct bt_fetches *fs)
{
    struct bt_list *i;
    bt_list_for_each (i, &fs->all) {
        struct bt_fetch *f = BT_CONTAINER_OF(i, struct bt_fetch, link);
        if (f->n_shared == 0) {
            continue;
        }
        for (uint32_t b = f->low; b < f->n; b++) {
            if (f->blocks[b].state == BLOCK_SHARED && bt_map_get(fs->flying, &f->keys[b]) == NULL) {
                f->blocks[b].state = BLOCK_MISSING;
                f->n_shared--;
            }
        }
        bt_fetch_pump(f);
    }
}

/* ---- start and end ---- */

static void add_source(struct bt_fetch *f, const struct bt_fetch_source *from)
{
    if (f->n_sources == BT_FETCH_SOURCES_MAX || from->incarnation == f->fs->c.incarnation ||
        from->name[0] == '\0' || from->rpc[0] == '\0') {
        return;
    }
    struct bt_fetch_peer *s = &f->sources[f->n_sources++];
    s->name = bt_strdup(from->name);
    s->rpc = bt_strdup(from->rpc);
    s->incarnation = from->incarnation;
    s->has = bt_calloc(BT_MAX(f->n, 1u), 1);
    for (size_t k = 0; k < from->n_runs; k++) {
        uint32_t first = BT_MIN(from->first[k], f->n);
        memset(s->has + first, 1, BT_MIN(from->count[k], f->n - first));
    }
}

/* Is the first missing block available anywhere? Checked first, because most prompts are either
 * fully cached or unknown everywhere. */
static bool any_way(const struct bt_fetches *fs, const struct bt_fetch_ask *ask)
{
    uint32_t i = 0;
    while (i < ask->n && bt_index_find(fs->c.cache->index, &ask->keys[i]) != UINT32_MAX) {
        i++;
    }
    if (i == ask->n) {
        return false;
    }
    if ((fs->c.tier != NULL && bt_ssd_has(bt_tier_ssd(fs->c.tier), &ask->keys[i])) ||
        bt_map_get(fs->flying, &ask->keys[i]) != NULL) {
        return true;
    }
    for (size_t s = 0; s < ask->n_sources; s++) {
        const struct bt_fetch_source *src = &ask->sources[s];
        for (size_t k = 0; k < src->n_runs; k++) {
            if (i >= src->first[k] && i - src->first[k] < src->count[k]) {
                return true;
            }
        }
    }
    return false;
}

struct bt_fetch *bt_fetch_create(struct bt_fetches *fs, const struct bt_fetch_ask *ask,
                                 void (*done)(void *arg), void *arg)
{
    struct bt_fetch *f = bt_calloc(1, sizeof(*f));
    f->fs = fs;
    f->request = ask->request;
    f->epoch = ask->epoch;
    f->group = ask->group;
    bt_tenants_hold(fs->c.cache->tenants, f->group);
    f->class = ask->class;
    f->prefill_tokens_per_s = ask->prefill_tokens_per_s;
    f->n = f->end = ask->n;
    f->keys = bt_calloc(f->n, sizeof(*f->keys));
    f->blocks = bt_calloc(f->n, sizeof(*f->blocks));
    memcpy(f->keys, ask->keys, f->n * sizeof(*f->keys));
    for (size_t i = 0; i < ask->n_sources; i++) {
        add_source(f, &ask->sources[i]);
    }
    f->done = done;
    f->arg = arg;
    f->start_ns = bt_mono_ns();
    bt_list_insert_tail(&fs->all, &f->link);
    return f;
}

struct bt_fetch *bt_fetch_start(struct bt_fetches *fs, const struct bt_fetch_ask *ask,
                                void (*done)(void *arg), void *arg)
{
    if (fs->stopping || !any_way(fs, ask)) {
        return NULL;
    }
    struct bt_fetch *f = bt_fetch_create(fs, ask, done, arg);
    bt_fetch_pump(f);
    if (f->n_active == 0 && f->n_shared == 0) {
        bt_fetch_end(f);
        return NULL;
    }
    if (!f->ended) {
        uint64_t wait_ms = ask->wait_ms != 0 ? BT_MIN(ask->wait_ms, fs->c.wait_ms) : fs->c.wait_ms;
        bt_timer_start(fs->c.loop, &f->wait, wait_ms, 0, on_wait, f);
    }
    return f;
}

void bt_fetch_end(struct bt_fetch *f)
{
    struct bt_fetches *fs = f->fs;
    bt_timer_stop(fs->c.loop, &f->wait);
    bt_timer_stop(fs->c.loop, &f->due);
    f->ended = true;
    bt_list_remove(&f->link);
    bt_fetch_piece_detach(f);
    for (uint32_t i = 0; i < f->n_runs; i++) {
        if (f->runs[i]->read != NULL) {
            bt_tier_read_end(f->runs[i]->read);
        }
        free(f->runs[i]);
    }
    for (uint32_t i = f->n; i-- > 0;) { /* last first: a chain is evicted from its end */
        if (f->blocks[i].state == BLOCK_HERE) {
            bt_cache_put(fs->c.cache, &f->blocks[i].slot, 1);
        }
    }
    for (uint32_t s = 0; s < f->n_sources; s++) {
        free(f->sources[s].name);
        free(f->sources[s].rpc);
        free(f->sources[s].has);
    }
    free(f->runs);
    free(f->keys);
    free(f->blocks);
    bt_tenants_release(f->fs->c.cache->tenants, f->group);
    free(f);
}

/* ---- all fetches ---- */

static void metrics_create(struct bt_fetches *fs, struct bt_metrics *m)
{
    static const double bounds[] = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
                                    0.2,   0.5,   1,     2,    5,    10};
    const char *bytes = "baton_kvstore_fetched_bytes_total",
               *pieces = "baton_kvstore_fetches_total";
    fs->m.bytes[BT_RATE_SLAB] = bt_metrics_counter(m, bytes, "tier=\"slab\"");
    fs->m.bytes[BT_RATE_SSD] = bt_metrics_counter(m, bytes, "tier=\"ssd\"");
    fs->m.ok = bt_metrics_counter(m, pieces, "result=\"ok\"");
    fs->m.lacking = bt_metrics_counter(m, pieces, "result=\"lacking\"");
    fs->m.failed = bt_metrics_counter(m, pieces, "result=\"failed\"");
    fs->m.replaced = bt_metrics_counter(m, "baton_kvstore_fetch_replaced_total", NULL);
    fs->m.late = bt_metrics_counter(m, "baton_kvstore_gather_late_total", NULL);
    fs->m.overlaps = bt_metrics_counter(m, "baton_kvstore_tails_total", NULL);
    fs->m.overlap_blocks = bt_metrics_counter(m, "baton_kvstore_tail_blocks_total", NULL);
    fs->m.piece_s =
        bt_metrics_histogram(m, "baton_kvstore_fetch_seconds", NULL, bounds, BT_ARRAY_LEN(bounds));
    fs->m.wait_s =
        bt_metrics_histogram(m, "baton_kvstore_gather_seconds", NULL, bounds, BT_ARRAY_LEN(bounds));
}

struct bt_fetches *bt_fetches_create(const struct bt_fetches_config *c)
{
    struct bt_fetches *fs = bt_calloc(1, sizeof(*fs));
    fs->c = *c;
    fs->flying = bt_map_create(sizeof(struct bt_kv_key));
    bt_list_init(&fs->all);
    bt_list_init(&fs->pieces);
    uint64_t most = BT_MIN(PIECE_TOKENS / c->layout->page_tokens, (uint64_t)BT_WIRE_FETCH_MAX);
    fs->piece_blocks = (uint32_t)BT_MAX(BT_MIN(PIECE_BYTES / c->layout->block_bytes, most), 1u);
    if (c->metrics != NULL) {
        metrics_create(fs, c->metrics);
    }
    return fs;
}

void bt_fetches_set_wire(struct bt_fetches *fs, const struct bt_fetch_wire *wire)
{
    fs->wire = *wire;
}

void bt_fetches_stop(struct bt_fetches *fs)
{
    fs->stopping = true;
}

void bt_fetches_destroy(struct bt_fetches *fs)
{
    if (fs == NULL) {
        return;
    }
    BT_ASSERT(bt_list_empty(&fs->all) && bt_list_empty(&fs->pieces));
    BT_ASSERT(bt_map_count(fs->flying) == 0);
    bt_map_destroy(fs->flying);
    free(fs);
}

const struct bt_rates *bt_fetches_rates(const struct bt_fetches *fs)
{
    return &fs->rates;
}

uint32_t bt_fetches_pieces(const struct bt_fetches *fs)
{
    return fs->n_pieces;
}

uint32_t bt_fetches_backward_slots(const struct bt_fetches *fs)
{
    uint32_t n = 0;
    struct bt_list *i;
    bt_list_for_each (i, &fs->all) {
        const struct bt_fetch *f = BT_CONTAINER_OF(i, struct bt_fetch, link);
        for (uint32_t b = 0; f->backward && b < f->n; b++) {
            n += f->blocks[b].state == BLOCK_HERE;
        }
    }
    return n;
}
