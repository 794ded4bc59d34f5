/* Serves the fetches of other nodes; see server.h. Blocks on the SSD are read in runs of their
 * chain, one bt_tier_read each. When the last read has ended, every block that is in the slab is
 * leased and announced to the peer. While the fetches being served cover half of the slab, new ones
 * wait for a moment. That is needed because a peer that has received a piece asks for the next one
 * before this node knows that the first has ended, and a refusal would make the peer drop this node
 * as a source. */
#include "kvstore/fetch/server.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/list.h"
#include "common/log/log.h"

#define ROOM_WAIT_MS 250 /* well below kvstore.fetch.stall_ms of the peers */

struct peer_fetch {
    struct bt_list link;
    struct bt_fetch_server *sv;
    struct bt_wire_send *snd;
    uint64_t request;
    uint32_t epoch;
    struct bt_kv_key *keys; /* [n]; after the answer, the announced ones come first */
    uint8_t *have;          /* [n] */
    uint32_t *slots;        /* [n_held] */
    uint32_t n, n_held;
    bool passing; /* blocks that are read from the SSD for it are dropped afterwards */
    bool waits;   /* for room; no read has been started */
    bool refused; /* it has waited too long for room */
    struct bt_tier_read **reads;
    uint32_t n_reads, pending;
    bt_flow_word_t word;
    struct bt_timer answer; /* while it waits: the time of its refusal */
};

struct bt_fetch_server {
    struct bt_fetch_server_config c;
    struct bt_list all;
    uint32_t n;               /* open fetches */
    uint32_t blocks, waiting; /* blocks of the fetches that have begun, and of those that wait */
    uint32_t blocks_max;      /* limit for each of the two */
    struct bt_timer room;
    struct {
        struct bt_metric *slab, *ssd, *lacking, *refused;
    } m;
};

struct bt_fetch_server *bt_fetch_server_create(const struct bt_fetch_server_config *c)
{
    struct bt_fetch_server *sv = bt_calloc(1, sizeof(*sv));
    struct bt_pool_counts n;
    sv->c = *c;
    bt_list_init(&sv->all);
    bt_pool_counts(c->cache->pool, &n);
    sv->blocks_max = n.total / 2;
    if (c->metrics != NULL) {
        static const char *const name = "baton_kvstore_offered_blocks_total";
        sv->m.slab = bt_metrics_counter(c->metrics, name, "tier=\"slab\"");
        sv->m.ssd = bt_metrics_counter(c->metrics, name, "tier=\"ssd\"");
        sv->m.lacking = bt_metrics_counter(c->metrics, name, "tier=\"none\"");
        sv->m.refused = bt_metrics_counter(c->metrics, "baton_kvstore_offers_refused_total", NULL);
    }
    return sv;
}

void bt_fetch_server_destroy(struct bt_fetch_server *sv)
{
    if (sv != NULL) {
        BT_ASSERT(bt_list_empty(&sv->all));
        bt_timer_stop(sv->c.loop, &sv->room);
        free(sv);
    }
}

uint32_t bt_fetch_server_count(const struct bt_fetch_server *sv)
{
    return sv->n;
}

static void end_reads(struct peer_fetch *f)
{
    for (uint32_t i = 0; i < f->n_reads; i++) {
        if (f->reads[i] != NULL) {
            bt_tier_read_end(f->reads[i]);
            f->reads[i] = NULL;
        }
    }
}

static void count(const struct bt_fetch_server *sv, const uint8_t *have, uint32_t n)
{
    for (uint32_t i = 0; i < n && sv->m.slab != NULL; i++) {
        bt_metric_add(have[i] == BT_WIRE_LACKS     ? sv->m.lacking
                      : have[i] == BT_WIRE_IN_SLAB ? sv->m.slab
                                                   : sv->m.ssd,
                      1);
    }
}

static void on_answer(void *arg)
{
    struct peer_fetch *f = arg;
    struct bt_fetch_server *sv = f->sv;
    for (uint32_t i = 0; i < f->n; i++) {
        uint32_t slot = bt_cache_hold(sv->c.cache, &f->keys[i]);
        if (slot == UINT32_MAX) {
            f->have[i] = BT_WIRE_LACKS;
            continue;
        }
        f->have[i] = f->have[i] == BT_WIRE_LACKS ? BT_WIRE_FROM_SSD : BT_WIRE_IN_SLAB;
        f->keys[f->n_held] = f->keys[i];
        f->slots[f->n_held++] = slot;
    }
    end_reads(f); /* this fetch has its own leases now */
    count(sv, f->have, f->n);
    if (f->n_held == 0) {
        sv->c.send_abort(f->snd, BT_ERR_NOT_FOUND, "this node has none of these blocks");
        return; /* want_end has freed f */
    }
    uint32_t tokens = f->n_held * sv->c.block_tokens;
    struct bt_wire_source src = {.shape = {.n_tokens = tokens,
                                           .block_tokens = sv->c.block_tokens,
                                           .chunk_tokens = tokens,
                                           .n_layers = sv->c.n_layers},
                                 .slots = f->slots,
                                 .names = f->keys,
                                 .word = &f->word,
                                 .grant = f};
    bt_flow_raise(&f->word, f->epoch, sv->c.n_layers); /* the whole flow is readable */
    sv->c.send_offer(f->snd, &src, f->have, f->n);
}

static void on_read(void *arg)
{
    struct peer_fetch *f = arg;
    if (--f->pending == 0) {
        on_answer(f);
    }
}

/* Notes which blocks are in the slab, and starts to read those on the SSD. */
static void look(struct peer_fetch *f)
{
    struct bt_fetch_server *sv = f->sv;
    struct bt_index *index = sv->c.cache->index;
    const struct bt_ssd *ssd = sv->c.tier != NULL ? bt_tier_ssd(sv->c.tier) : NULL;
    uint32_t first = 0;
    bool any = false; /* a block of the run from `first` on must be read */
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
            struct bt_tier_read *l =
                bt_tier_read(sv->c.tier, &f->keys[first], i - first, f->passing, on_read, f);
            if (l != NULL) {
                f->reads[f->n_reads++] = l;
                f->pending++;
            }
        }
        first = i + 1;
        any = false;
    }
}

static void begin(struct peer_fetch *f)
{
    struct bt_fetch_server *sv = f->sv;
    sv->blocks += f->n;
    look(f);
    if (f->pending == 0) { /* not inside the wire's own call */
        bt_timer_start(sv->c.loop, &f->answer, 0, 0, on_answer, f);
    }
}

/* ---- room ---- */

static void count_refused(struct bt_fetch_server *sv, uint64_t request, uint32_t n, bt_status_t st)
{
    BT_DEBUG("fetch_refused", "req=%016llx blocks=%u status=%s", (unsigned long long)request, n,
             bt_status_name(st));
    if (sv->m.refused != NULL) {
        bt_metric_add(sv->m.refused, 1);
    }
}

static void on_no_room(void *arg)
{
    struct peer_fetch *f = arg;
    f->refused = true; /* want_end may come later; it gets no room until then */
    count_refused(f->sv, f->request, f->n, BT_ERR_EXHAUSTED);
    f->sv->c.send_abort(f->snd, BT_ERR_EXHAUSTED,
                        "half of the slab is being sent to other nodes already");
}

/* A fetch that is larger than the limit is served alone. */
static bool has_room(uint32_t n, uint32_t taken, uint32_t most)
{
    return taken == 0 || n <= most - BT_MIN(taken, most);
}

/* Waiting fetches begin in their order, so that a large one is not overtaken forever. */
static void on_room(void *arg)
{
    struct bt_fetch_server *sv = arg;
    struct bt_list *i;
    bt_list_for_each (i, &sv->all) {
        struct peer_fetch *f = BT_CONTAINER_OF(i, struct peer_fetch, link);
        if (!f->waits || f->refused) {
            continue;
        }
        if (!has_room(f->n, sv->blocks, sv->blocks_max)) {
            return;
        }
        bt_timer_stop(sv->c.loop, &f->answer);
        f->waits = false;
        sv->waiting -= f->n;
        begin(f);
    }
}

/* ---- calls of the wire ---- */

bt_status_t bt_fetch_server_want(struct bt_fetch_server *sv, const struct bt_wire_want *want,
                                 struct bt_wire_send *snd, void **handle_p)
{
    if (sv->c.peer_known != NULL && !sv->c.peer_known(sv->c.arg, want->peer, want->incarnation)) {
        count_refused(sv, want->request, want->n, BT_ERR_UNAVAILABLE);
        return BT_ERR_UNAVAILABLE;
    }
    bool waits = sv->waiting > 0 || !has_room(want->n, sv->blocks, sv->blocks_max);
    if (waits && !has_room(want->n, sv->waiting, sv->blocks_max)) {
        count_refused(sv, want->request, want->n, BT_ERR_EXHAUSTED);
        return BT_ERR_EXHAUSTED;
    }
    struct peer_fetch *f = bt_calloc(1, sizeof(*f));
    f->sv = sv;
    f->snd = snd;
    f->request = want->request;
    f->epoch = want->epoch;
    f->n = want->n;
    f->passing = want->class == BT_WIRE_WINDOW;
    f->keys = bt_calloc(f->n, sizeof(*f->keys));
    f->have = bt_calloc(f->n, 1);
    f->slots = bt_calloc(f->n, sizeof(*f->slots));
    f->reads = bt_calloc(f->n / 2 + 1, sizeof(struct bt_tier_read *));
    memcpy(f->keys, want->keys, f->n * sizeof(*f->keys));
    bt_list_insert_tail(&sv->all, &f->link);
    sv->n++;
    *handle_p = f;
    f->waits = waits;
    if (waits) {
        sv->waiting += f->n;
        bt_timer_start(sv->c.loop, &f->answer, ROOM_WAIT_MS, 0, on_no_room, f);
    } else {
        begin(f);
    }
    return BT_OK;
}

void bt_fetch_server_want_end(struct bt_fetch_server *sv, void *handle, bt_status_t status)
{
    struct peer_fetch *f = handle;
    BT_ASSERT(f->sv == sv);
    bt_timer_stop(sv->c.loop, &f->answer);
    end_reads(f);
    /* A block that is damaged here must not be sent again. */
    (status == BT_ERR_DATA_LOSS ? bt_cache_put_doubted : bt_cache_put)(sv->c.cache, f->slots,
                                                                       f->n_held);
    bt_list_remove(&f->link);
    sv->n--;
    *(f->waits ? &sv->waiting : &sv->blocks) -= f->n;
    if (sv->waiting > 0) { /* not inside the wire's own call */
        bt_timer_start(sv->c.loop, &sv->room, 0, 0, on_room, sv);
    }
    free(f->keys);
    free(f->have);
    free(f->slots);
    free(f->reads);
    free(f);
}
