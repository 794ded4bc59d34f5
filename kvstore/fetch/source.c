/* Offers; see offer.h. A block of the SSD is read in runs of its chain, each by one load of the
 * tier; once the last has ended everything that is in the slab by then is leased and offered.
 * Where half of the slab is on offer the next waits a moment: a receiver that has all of a piece
 * asks for the next one before this end has heard of that, and a refusal loses it as a source. */
#include "kvstore/fetch/source.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/list.h"
#include "common/log/log.h"

#define ROOM_WAIT_MS 250 /* well below the receivers' kvstore.fetch.stall_ms */

struct offer {
    struct bt_list link;
    struct bt_offers *o;
    struct bt_wire_send *snd;
    uint64_t request;
    uint32_t epoch;
    struct bt_kv_key *keys; /* [n]; once answered, those that are offered come first */
    uint8_t *have;          /* [n] */
    uint32_t *slots;        /* [n_held] */
    uint32_t n, n_held;
    bool passing; /* what is read from the SSD for it does not stay */
    bool waits;   /* for room; nothing of it has begun */
    bool refused; /* it has waited too long */
    struct bt_tier_load **loads;
    uint32_t n_loads, pending;
    bt_flow_word_t word;
    struct bt_timer answer; /* waits: until it is refused */
};

struct bt_offers {
    struct bt_offers_config c;
    struct bt_list all;
    uint32_t n;               /* open */
    uint32_t blocks, waiting; /* asked for by those that have begun, and that wait */
    uint32_t blocks_max;      /* of each */
    struct bt_timer room;
    struct {
        struct bt_metric *slab, *ssd, *lacking, *refused;
    } m;
};

struct bt_offers *bt_offers_create(const struct bt_offers_config *c)
{
    struct bt_offers *o = bt_calloc(1, sizeof(*o));
    struct bt_pool_counts n;
    o->c = *c;
    bt_list_init(&o->all);
    bt_pool_counts(c->cache->pool, &n);
    o->blocks_max = n.total / 2;
    if (c->metrics != NULL) {
        static const char *const name = "baton_kvstore_offered_blocks_total";
        static const char *const help = "Blocks that other nodes asked for, by where they were";
        o->m.slab = bt_metrics_counter(c->metrics, name, "tier=\"slab\"", help);
        o->m.ssd = bt_metrics_counter(c->metrics, name, "tier=\"ssd\"", help);
        o->m.lacking = bt_metrics_counter(c->metrics, name, "tier=\"none\"", help);
        o->m.refused = bt_metrics_counter(c->metrics, "baton_kvstore_offers_refused_total", NULL,
                                          "Fetches of other nodes that were refused: not a member, "
                                          "or too many at once");
    }
    return o;
}

void bt_offers_destroy(struct bt_offers *o)
{
    if (o != NULL) {
        BT_ASSERT(bt_list_empty(&o->all));
        bt_timer_stop(o->c.loop, &o->room);
        free(o);
    }
}

uint32_t bt_offers_count(const struct bt_offers *o)
{
    return o->n;
}

static void end_loads(struct offer *f)
{
    for (uint32_t i = 0; i < f->n_loads; i++) {
        if (f->loads[i] != NULL) {
            bt_tier_load_end(f->loads[i]);
            f->loads[i] = NULL;
        }
    }
}

static void count(const struct bt_offers *o, const uint8_t *have, uint32_t n)
{
    for (uint32_t i = 0; i < n && o->m.slab != NULL; i++) {
        bt_metric_add(have[i] == BT_WIRE_LACKS     ? o->m.lacking
                      : have[i] == BT_WIRE_IN_SLAB ? o->m.slab
                                                   : o->m.ssd,
                      1);
    }
}

static void on_answer(void *arg)
{
    struct offer *f = arg;
    struct bt_offers *o = f->o;
    for (uint32_t i = 0; i < f->n; i++) {
        uint32_t slot = bt_cache_hold(o->c.cache, &f->keys[i]);
        if (slot == UINT32_MAX) {
            f->have[i] = BT_WIRE_LACKS;
            continue;
        }
        f->have[i] = f->have[i] == BT_WIRE_LACKS ? BT_WIRE_FROM_SSD : BT_WIRE_IN_SLAB;
        f->keys[f->n_held] = f->keys[i];
        f->slots[f->n_held++] = slot;
    }
    end_loads(f); /* the leases are ours now */
    count(o, f->have, f->n);
    if (f->n_held == 0) {
        o->c.send_abort(f->snd, BT_ERR_NOT_FOUND, "none of these blocks is here");
        return; /* f is gone */
    }
    uint32_t tokens = f->n_held * o->c.block_tokens;
    struct bt_wire_source src = {.shape = {.n_tokens = tokens,
                                           .block_tokens = o->c.block_tokens,
                                           .chunk_tokens = tokens,
                                           .n_layers = o->c.n_layers},
                                 .slots = f->slots,
                                 .names = f->keys,
                                 .word = &f->word,
                                 .grant = f};
    bt_flow_raise(&f->word, f->epoch, o->c.n_layers); /* all of it is there */
    o->c.send_offer(f->snd, &src, f->have, f->n);
}

static void on_loaded(void *arg)
{
    struct offer *f = arg;
    if (--f->pending == 0) {
        on_answer(f);
    }
}

/* Notes what is in the slab, and starts to read what lies below it. */
static void look(struct offer *f)
{
    struct bt_offers *o = f->o;
    struct bt_index *index = o->c.cache->index;
    const struct bt_ssd *ssd = o->c.tier != NULL ? bt_tier_ssd(o->c.tier) : NULL;
    uint32_t first = 0;
    bool any = false; /* of the run from first on, to be read */
    for (uint32_t i = 0; i <= f->n; i++) {
        bool here = i < f->n && bt_index_find(index, &f->keys[i]) != UINT32_MAX;
        bool below = i < f->n && !here && ssd != NULL && bt_ssd_has(ssd, &f->keys[i]);
        if (here) {
            f->have[i] = BT_WIRE_IN_SLAB;
        }
        if (here || below) {
            any = any || below;
            continue;
        }
        if (any) {
            struct bt_tier_load *l =
                bt_tier_load(o->c.tier, &f->keys[first], i - first, f->passing, on_loaded, f);
            if (l != NULL) {
                f->loads[f->n_loads++] = l;
                f->pending++;
            }
        }
        first = i + 1;
        any = false;
    }
}

static void begin(struct offer *f)
{
    struct bt_offers *o = f->o;
    o->blocks += f->n;
    look(f);
    if (f->pending == 0) { /* not from inside of the wire's own call */
        bt_timer_start(o->c.loop, &f->answer, 0, 0, on_answer, f);
    }
}

/* ---- room ---- */

static void count_refused(struct bt_offers *o, uint64_t request, uint32_t n, bt_status_t st)
{
    BT_DEBUG("fetch_refused", "req=%016llx blocks=%u status=%s", (unsigned long long)request, n,
             bt_status_name(st));
    if (o->m.refused != NULL) {
        bt_metric_add(o->m.refused, 1);
    }
}

static void on_no_room(void *arg)
{
    struct offer *f = arg;
    f->refused = true; /* want_end may come later: it gets no room meanwhile */
    count_refused(f->o, f->request, f->n, BT_ERR_EXHAUSTED);
    f->o->c.send_abort(f->snd, BT_ERR_EXHAUSTED, "half of the slab is on offer already");
}

/* One that asks for more than there is for all is served alone. */
static bool has_room(uint32_t n, uint32_t taken, uint32_t most)
{
    return taken == 0 || n <= most - BT_MIN(taken, most);
}

/* Those that wait begin in their order, so that a large one is not passed by for ever. */
static void on_room(void *arg)
{
    struct bt_offers *o = arg;
    struct bt_list *i;
    bt_list_for_each (i, &o->all) {
        struct offer *f = BT_CONTAINER_OF(i, struct offer, link);
        if (!f->waits || f->refused) {
            continue;
        }
        if (!has_room(f->n, o->blocks, o->blocks_max)) {
            return;
        }
        bt_timer_stop(o->c.loop, &f->answer);
        f->waits = false;
        o->waiting -= f->n;
        begin(f);
    }
}

/* ---- wants ---- */

bt_status_t bt_offers_want(struct bt_offers *o, const struct bt_wire_want *want,
                           struct bt_wire_send *snd, void **handle_p)
{
    if (o->c.peer_known != NULL && !o->c.peer_known(o->c.arg, want->peer, want->incarnation)) {
        count_refused(o, want->request, want->n, BT_ERR_UNAVAILABLE);
        return BT_ERR_UNAVAILABLE;
    }
    bool waits = o->waiting > 0 || !has_room(want->n, o->blocks, o->blocks_max);
    if (waits && !has_room(want->n, o->waiting, o->blocks_max)) {
        count_refused(o, want->request, want->n, BT_ERR_EXHAUSTED);
        return BT_ERR_EXHAUSTED;
    }
    struct offer *f = bt_calloc(1, sizeof(*f));
    f->o = o;
    f->snd = snd;
    f->request = want->request;
    f->epoch = want->epoch;
    f->n = want->n;
    f->passing = want->class == BT_WIRE_WINDOW;
    f->keys = bt_calloc(f->n, sizeof(*f->keys));
    f->have = bt_calloc(f->n, 1);
    f->slots = bt_calloc(f->n, sizeof(*f->slots));
    f->loads = bt_calloc(f->n / 2 + 1, sizeof(struct bt_tier_load *));
    memcpy(f->keys, want->keys, f->n * sizeof(*f->keys));
    bt_list_insert_tail(&o->all, &f->link);
    o->n++;
    *handle_p = f;
    f->waits = waits;
    if (waits) {
        o->waiting += f->n;
        bt_timer_start(o->c.loop, &f->answer, ROOM_WAIT_MS, 0, on_no_room, f);
    } else {
        begin(f);
    }
    return BT_OK;
}

void bt_offers_want_end(struct bt_offers *o, void *handle, bt_status_t status)
{
    struct offer *f = handle;
    BT_ASSERT(f->o == o);
    bt_timer_stop(o->c.loop, &f->answer);
    end_loads(f);
    /* A block that has gone bad here must not be served again, to anybody. */
    (status == BT_ERR_DATA_LOSS ? bt_cache_put_doubted : bt_cache_put)(o->c.cache, f->slots,
                                                                       f->n_held);
    bt_list_remove(&f->link);
    o->n--;
    *(f->waits ? &o->waiting : &o->blocks) -= f->n;
    if (o->waiting > 0) { /* not from inside of the wire's own call */
        bt_timer_start(o->c.loop, &o->room, 0, 0, on_room, o);
    }
    free(f->keys);
    free(f->have);
    free(f->slots);
    free(f->loads);
    free(f);
}
