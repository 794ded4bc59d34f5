/* Backward fetches: a chain is fetched from its end while a worker computes it from its beginning.
 * Where the two meet is not planned: both continue until the worker reaches the first block that
 * has arrived. So a slow or broken source costs only the blocks that it does not deliver. Reads are
 * short: the last blocks come first, in a few runs at once. */
#include "kvstore/fetch/fetch_priv.h"

/* Overlap pays if computing takes at most this many times as long as fetching. */
#define OVERLAP_FROM  4.0
#define RUNS_MAX      2u /* SSD reads at once: one reads while the next is queued */
#define BACKWARD_PART 4u /* backward fetches may use one in this many slots */
#define RUN_PART      4u /* an SSD read is this fraction of a piece: short reads arrive sooner */

/* Seconds to fetch the first block that is not in the slab, from its fastest source; 0: no source.
 */
static double first_missing_s(const struct bt_fetches *fs, const struct bt_fetch_ask *ask)
{
    uint32_t i = 0;
    double best = 0;
    while (i < ask->n && bt_index_find(fs->c.cache->index, &ask->keys[i]) != UINT32_MAX) {
        i++;
    }
    if (i == ask->n) {
        return 0;
    }
    if (fs->c.tier != NULL && bt_ssd_has(bt_tier_ssd(fs->c.tier), &ask->keys[i])) {
        best = bt_fetch_block_s(fs, BT_RATES_OWN, BT_RATE_SSD);
    }
    for (size_t s = 0; s < ask->n_sources; s++) {
        const struct bt_fetch_source *src = &ask->sources[s];
        double there = bt_fetch_block_s(fs, src->incarnation, BT_RATE_SLAB);
        for (size_t k = 0; k < src->n_runs; k++) {
            if (i >= src->first[k] && i - src->first[k] < src->count[k] &&
                (best == 0 || there < best)) {
                best = there;
            }
        }
    }
    return best;
}

bool bt_fetch_overlap_pays(const struct bt_fetches *fs, const struct bt_fetch_ask *ask)
{
    double computed_s =
        ask->prefill_tokens_per_s > 0 ? fs->c.layout->page_tokens / ask->prefill_tokens_per_s : 0;
    return computed_s > 0 && first_missing_s(fs, ask) * OVERLAP_FROM >= computed_s;
}

/* Block i cannot be fetched. At the end of the chain only this block is lost. Elsewhere the fetch
 * stops at this block. */
static void lose(struct bt_fetch *f, uint32_t i)
{
    f->blocks[i].state = BLOCK_LOST;
    if (i + 1 == f->end) {
        f->end = f->first = i;
    } else {
        f->floor = i + 1;
    }
}

/* Starts the read or transfer of block i and of the blocks before it that come in the same way. */
static void start_back(struct bt_fetch *f, uint32_t i)
{
    uint32_t source, other, n = 1;
    bt_fetch_block_state_t way = bt_fetch_choose_way(f, i, &source);
    if (way == BLOCK_LOST) {
        lose(f, i);
        return;
    }
    if (way == BLOCK_MISSING || (way == BLOCK_READING && f->n_ssd_reads >= RUNS_MAX)) {
        return;
    }
    uint32_t max = f->fs->piece_blocks;
    /* A short read costs no network round trip. */
    max = way == BLOCK_READING ? BT_MAX(max / RUN_PART, 1u) : max;
    while (n < max && i >= f->floor + n && bt_fetch_block_missing(f, i - n) &&
           bt_fetch_choose_way(f, i - n, &other) == way &&
           (way == BLOCK_READING || other == source)) {
        n++;
    }
    if (way == BLOCK_FLYING) {
        bt_fetch_piece_start(f, source, i + 1 - n, n);
        return;
    }
    bt_fetch_read_ssd(f, i + 1 - n, n);
    f->again = f->again || f->blocks[i].state == BLOCK_MISSING; /* no slot was free */
}

static void on_landed(void *arg)
{
    struct bt_fetch *f = arg;
    bt_timer_stop(f->fs->c.loop, &f->due);
    if (f->told > f->first) {
        bt_fetch_count(f->fs->m.overlap_blocks, f->told - f->first);
        f->told = f->first;
        f->done(f->arg);
    }
}

void bt_fetch_pump_backward(struct bt_fetch *f)
{
    for (uint32_t i = f->first; i > f->floor;) {
        if (bt_fetch_block_missing(f, --i)) {
            start_back(f, i);
        }
    }
    while (f->first > f->floor && f->blocks[f->first - 1].state == BLOCK_HERE) {
        f->first--;
    }
    f->told = BT_MIN(f->told, f->end); /* before the first call the end may still move */
    if (f->told > f->first) {
        bt_timer_start(f->fs->c.loop, &f->due, 0, 0, on_landed, f);
    }
}

/* Number of slots that f may use. Its blocks exist twice, since the grant has slots for them too.
 * So all backward fetches together are limited to a quarter of the slab. */
static uint32_t room(const struct bt_fetch *f)
{
    const struct bt_fetches *fs = f->fs;
    uint32_t most = bt_index_slots(fs->c.cache->index) / BACKWARD_PART, taken = 0;
    struct bt_list *i;
    bt_list_for_each (i, &fs->all) {
        const struct bt_fetch *other = BT_CONTAINER_OF(i, struct bt_fetch, link);
        taken += other != f && other->backward ? other->end - BT_MIN(other->floor, other->end) : 0;
    }
    return most - BT_MIN(taken, most);
}

struct bt_fetch *bt_fetch_backward(struct bt_fetches *fs, const struct bt_fetch_ask *ask,
                                   void (*landed)(void *arg), void *arg)
{
    uint32_t source, here;
    if (fs->stopping) {
        return NULL;
    }
    struct bt_fetch *f = bt_fetch_create(fs, ask, landed, arg);
    f->backward = true;
    /* The end is before the first block that no source has. The worker already has the beginning
     * that is in the slab. */
    for (f->end = 0; f->end < f->n; f->end++) {
        if (bt_fetch_block_missing(f, f->end) &&
            bt_fetch_choose_way(f, f->end, &source) == BLOCK_LOST) {
            break;
        }
    }
    for (here = 0; here < f->end && f->blocks[here].state == BLOCK_HERE; here++) {
    }
    uint32_t most = room(f);
    f->floor = BT_MAX(here, f->end - BT_MIN(f->end, most));
    f->first = f->end;
    f->told = f->n;
    if (f->end > f->floor) {
        bt_fetch_pump(f);
    }
    if (f->first == f->end && f->n_active == 0 && f->n_shared == 0) {
        bt_fetch_end(f);
        return NULL;
    }
    bt_fetch_count(fs->m.overlaps, 1);
    return f;
}

void bt_fetch_landed(const struct bt_fetch *f, uint32_t *first_p, uint32_t *end_p)
{
    *first_p = f->first;
    *end_p = f->end;
}

uint32_t bt_fetch_slot(const struct bt_fetch *f, uint32_t block)
{
    BT_ASSERT(block < f->n && f->blocks[block].state == BLOCK_HERE);
    return f->blocks[block].slot;
}

void bt_fetch_computed(struct bt_fetch *f, uint32_t computed)
{
    f->floor = BT_MAX(f->floor, computed);
}
