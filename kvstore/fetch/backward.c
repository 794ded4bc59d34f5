/* Tails: a chain that comes from its end backwards while a worker computes it from its beginning.
 * Nobody has to know beforehand where the two meet: both do what they can until the worker reaches
 * the first block of the part that has landed. So a slow or broken source costs nothing but the
 * blocks that it does not bring. Loads are short runs, the last blocks first, a few at once. */
#include "kvstore/fetch/fetch_priv.h"

#define DEAR       4.0 /* from 1/so much of the time of computing on, loading is worth splitting */
#define RUNS_MAX   2u  /* reads of the own SSD at once: one reads, one is asked */
#define TAILS_PART 4u  /* of the slots: one in so many for tails */
#define RUN_PART   4u  /* of a piece: the sooner a run has come, the sooner it is of use */

/* The first block that is not in the slab, and how long one like it takes from where it comes
 * soonest; 0: from nowhere. */
static double first_missing_s(const struct bt_gathers *gs, const struct bt_gather_ask *ask)
{
    uint32_t i = 0;
    double best = 0;
    while (i < ask->n && bt_index_find(gs->c.cache->index, &ask->keys[i]) != UINT32_MAX) {
        i++;
    }
    if (i == ask->n) {
        return 0;
    }
    if (gs->c.tier != NULL && bt_ssd_has(bt_tier_ssd(gs->c.tier), &ask->keys[i])) {
        best = gather_block_s(gs, BT_RATES_OWN, BT_RATE_SSD);
    }
    for (size_t s = 0; s < ask->n_sources; s++) {
        const struct bt_gather_source *src = &ask->sources[s];
        double there = gather_block_s(gs, src->incarnation, BT_RATE_SLAB);
        for (size_t k = 0; k < src->n_runs; k++) {
            if (i >= src->first[k] && i - src->first[k] < src->count[k] &&
                (best == 0 || there < best)) {
                best = there;
            }
        }
    }
    return best;
}

bool bt_gather_dear(const struct bt_gathers *gs, const struct bt_gather_ask *ask)
{
    double computed_s =
        ask->prefill_tokens_per_s > 0 ? gs->c.layout->page_tokens / ask->prefill_tokens_per_s : 0;
    return computed_s > 0 && first_missing_s(gs, ask) * DEAR >= computed_s;
}

/* Block i does not come. At the end of what can be had nothing is lost but itself; elsewhere the
 * tail cannot reach further down. */
static void lose(struct bt_gather *g, uint32_t i)
{
    g->blocks[i].state = BLOCK_LOST;
    if (i + 1 == g->end) {
        g->end = g->first = i;
    } else {
        g->floor = i + 1;
    }
}

/* Starts what brings block i and those in front of it that come the same way. */
static void start_back(struct bt_gather *g, uint32_t i)
{
    uint32_t source, other, n = 1;
    block_state_t way = gather_way(g, i, &source);
    if (way == BLOCK_LOST) {
        lose(g, i);
        return;
    }
    if (way == BLOCK_MISSING || (way == BLOCK_DISK && g->n_disk >= RUNS_MAX)) {
        return;
    }
    uint32_t max = g->gs->piece_blocks;
    max = way == BLOCK_DISK ? BT_MAX(max / RUN_PART, 1u) : max; /* no asking back and forth */
    while (n < max && i >= g->floor + n && gather_missing(g, i - n) &&
           gather_way(g, i - n, &other) == way && (way == BLOCK_DISK || other == source)) {
        n++;
    }
    if (way == BLOCK_FLYING) {
        piece_start(g, source, i + 1 - n, n);
        return;
    }
    gather_run(g, i + 1 - n, n);
    g->again = g->again || g->blocks[i].state == BLOCK_MISSING; /* no slot was free to read into */
}

static void on_landed(void *arg)
{
    struct bt_gather *g = arg;
    bt_timer_stop(g->gs->c.loop, &g->due);
    if (g->told > g->first) {
        gather_count(g->gs->m.tail_blocks, g->told - g->first);
        g->told = g->first;
        g->done(g->arg);
    }
}

void tail_pump(struct bt_gather *g)
{
    for (uint32_t i = g->first; i > g->floor;) {
        if (gather_missing(g, --i)) {
            start_back(g, i);
        }
    }
    while (g->first > g->floor && g->blocks[g->first - 1].state == BLOCK_HERE) {
        g->first--;
    }
    g->told = BT_MIN(g->told, g->end); /* until something is told the end may move */
    if (g->told > g->first) {
        bt_timer_start(g->gs->c.loop, &g->due, 0, 0, on_landed, g);
    }
}

/* Slots that g may have: what it brings is in the grant a second time, and all tails together keep
 * to a quarter of the slab. */
static uint32_t room(const struct bt_gather *g)
{
    const struct bt_gathers *gs = g->gs;
    uint32_t most = bt_index_slots(gs->c.cache->index) / TAILS_PART, taken = 0;
    struct bt_list *i;
    bt_list_for_each (i, &gs->all) {
        const struct bt_gather *other = BT_CONTAINER_OF(i, struct bt_gather, link);
        taken += other != g && other->tail ? other->end - BT_MIN(other->floor, other->end) : 0;
    }
    return most - BT_MIN(taken, most);
}

struct bt_gather *bt_gather_tail(struct bt_gathers *gs, const struct bt_gather_ask *ask,
                                 void (*landed)(void *arg), void *arg)
{
    uint32_t source, here;
    if (gs->stopping) {
        return NULL;
    }
    struct bt_gather *g = gather_new(gs, ask, landed, arg);
    g->tail = true;
    /* As far as each block can be had from somewhere; the beginning that is in the slab is the
     * worker's already. */
    for (g->end = 0; g->end < g->n; g->end++) {
        if (gather_missing(g, g->end) && gather_way(g, g->end, &source) == BLOCK_LOST) {
            break;
        }
    }
    for (here = 0; here < g->end && g->blocks[here].state == BLOCK_HERE; here++) {
    }
    uint32_t most = room(g);
    g->floor = BT_MAX(here, g->end - BT_MIN(g->end, most));
    g->first = g->end;
    g->told = g->n;
    if (g->end > g->floor) {
        gather_pump(g);
    }
    if (g->first == g->end && g->n_active == 0 && g->n_foreign == 0) {
        bt_gather_end(g);
        return NULL;
    }
    gather_count(gs->m.tails, 1);
    return g;
}

void bt_gather_landed(const struct bt_gather *g, uint32_t *first_p, uint32_t *end_p)
{
    *first_p = g->first;
    *end_p = g->end;
}

uint32_t bt_gather_slot(const struct bt_gather *g, uint32_t block)
{
    BT_ASSERT(block < g->n && g->blocks[block].state == BLOCK_HERE);
    return g->blocks[block].slot;
}

void bt_gather_front(struct bt_gather *g, uint32_t computed)
{
    g->floor = BT_MAX(g->floor, computed);
}
