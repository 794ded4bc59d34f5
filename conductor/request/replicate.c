/* Copies of hot prefixes before they are needed. A prefix that many requests use within a minute
 * gets a copy in a further node's slab for each so many of them, while the budget of bytes lasts,
 * so that neither the queue at its holder nor the holder's death makes others compute it again.
 * Each conductor goes by the requests that it sees and has a budget of its own; kvstores move the
 * blocks behind hand-offs and fetches. Loop thread. */
#include <inttypes.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/request_priv.h"
#include "conductor/request/sources.h"

#define WINDOW_MS  60000.0
#define SAVE_S     10.0           /* the budget that may be saved up */
#define PENDING_NS 60000000000ull /* an answer that does not come by then never comes */

void bt_replicate_init(struct bt_requests *rs, uint64_t now_ns)
{
    struct bt_replicate *r = &rs->replicate;
    bt_hot_init(&r->hot, WINDOW_MS);
    r->filled_ns = now_ns;
    r->started = bt_metrics_counter(rs->metrics, "baton_replicas_started_total", NULL,
                                    "Copies of hot prefixes that were ordered.");
    r->blocks = bt_metrics_counter(rs->metrics, "baton_replica_blocks_total", NULL,
                                   "Blocks that these copies have put into slabs.");
}

static uint64_t key_word(const struct bt_kv_key *key)
{
    uint64_t w;
    memcpy(&w, key->b, sizeof(w));
    return w;
}

/* The deepest part of what is cached somewhere that enough requests use: all of it, and its halves,
 * quarters... as requests with a common beginning share no more than that. 0: none. */
static uint32_t hot_blocks(struct bt_requests *rs, const struct bt_lane *k, uint32_t matched,
                           double now_ms, double *uses_p)
{
    uint32_t found = 0, extent = bt_view_extent_blocks(rs->view);
    for (uint32_t p = 1; p != 0 && p / 2 < matched; p *= 2) {
        uint32_t d = BT_MIN(p, matched) / extent * extent;
        if (d == 0 || d == found) {
            continue;
        }
        /* To the nearest: they fade from the first moment on. */
        double uses = bt_hot_use(&rs->replicate.hot, key_word(&k->keys[d - 1]), now_ms) + 0.5;
        if (uses >= rs->conf.replica_uses) {
            found = d;
            *uses_p = uses;
        }
    }
    return found;
}

/* Of the nodes that could prefill with it and do not have it, the one with the shortest queue.
 * *copies_p: how many have it. */
static uint32_t choose_target(const struct bt_requests *rs, const struct bt_view_snapshot *v,
                              uint32_t blocks, uint32_t *copies_p, uint32_t *nodes_p)
{
    uint32_t best = BT_SCHED_NONE;
    double best_ms = 0;
    *copies_p = *nodes_p = 0;
    for (uint32_t i = 0; i < v->snap.n_workers; i++) {
        const struct bt_sched_worker *w = &v->workers[i];
        if (!w->prefill || w->draining || w->kvstore == BT_SCHED_NONE) {
            continue;
        }
        const struct bt_sched_kvstore *kv = &v->kvstores[w->kvstore];
        double ms = bt_sched_pressure(&rs->conf.sched, w);
        ++*nodes_p;
        if (kv->match_blocks >= blocks) {
            ++*copies_p;
        } else if (!kv->avoid && !kv->draining && kv->slots_free >= blocks &&
                   (best == BT_SCHED_NONE || ms < best_ms)) {
            best = w->kvstore;
            best_ms = ms;
        }
    }
    return best;
}

static void order(struct bt_requests *rs, const struct bt_lane *k, struct bt_session *to,
                  uint32_t blocks, const struct bt_sources *from)
{
    struct bt_replicate *r = &rs->replicate;
    Baton__Source source[BT_SOURCES_MAX], *sources[BT_SOURCES_MAX];
    Baton__Replicate m = BATON__REPLICATE__INIT;
    bt_random(&r->id, sizeof(r->id));
    m.id = r->id;
    m.keys.data = (uint8_t *)k->keys;
    m.keys.len = blocks * sizeof(*k->keys);
    m.tenant = k->r->spec.tenant != NULL ? k->r->spec.tenant : (char *)"";
    m.sources = sources;
    m.n_sources = bt_sources_pack(from, source, sources);
    Baton__ToKvstore t = BATON__TO_KVSTORE__INIT;
    t.m_case = BATON__TO_KVSTORE__M_REPLICATE;
    t.replicate = &m;
    if (bt_session_send_kvstore(to, &t)) {
        r->to = to;
        r->ordered_ns = bt_mono_ns();
        bt_metric_add(r->started, 1);
    }
}

void bt_replicate_look(struct bt_lane *k, const struct bt_view_snapshot *v, uint64_t now_ns)
{
    struct bt_requests *rs = k->r->rs;
    struct bt_replicate *r = &rs->replicate;
    double rate = rs->conf.replica_bytes_per_s, now_ms = (double)now_ns / 1e6, uses = 0;
    if (rate <= 0 || k->epoch != 1 || k->r->spec.no_cache) {
        return;
    }
    r->budget = BT_MIN(r->budget + rate * (double)(now_ns - r->filled_ns) / 1e9, rate * SAVE_S);
    r->filled_ns = now_ns;
    uint32_t matched = 0, holder = BT_SCHED_NONE;
    for (uint32_t i = 0; i < v->snap.n_kvstores; i++) {
        if (v->kvstores[i].match_blocks > matched) {
            matched = BT_MIN(v->kvstores[i].match_blocks, k->n_keys);
            holder = i;
        }
    }
    uint32_t blocks = hot_blocks(rs, k, matched, now_ms, &uses), copies, nodes;
    if (r->to != NULL && now_ns - r->ordered_ns > PENDING_NS) {
        r->to = NULL;
    }
    if (blocks == 0 || r->to != NULL) {
        return;
    }
    uint32_t target = choose_target(rs, v, blocks, &copies, &nodes);
    double bytes = (double)blocks * rs->conf.block_tokens * rs->conf.token_bytes;
    if (target == BT_SCHED_NONE || bytes > r->budget ||
        copies >= bt_hot_copies(uses, rs->conf.replica_uses, nodes)) {
        return;
    }
    struct bt_sched_plan plan = {.kv_prefill = target, .fetch_from = holder, .fetch_tokens = 1};
    struct bt_sources from;
    bt_sources_find(rs->view, v, &plan, k->keys, k->n_keys, blocks, &from);
    if (from.n != 0) {
        r->budget -= bytes;
        order(rs, k, v->kvstore[target], blocks, &from);
        BT_DEBUG("replicate", "kvstore=%s blocks=%u uses=%.0f copies=%u",
                 v->kvstore[target]->member->name, blocks, uses, copies);
    }
    bt_sources_cleanup(&from);
}

void bt_replicate_answer(struct bt_requests *rs, const struct bt_session *s,
                         const Baton__Replicated *m)
{
    struct bt_replicate *r = &rs->replicate;
    if (r->to == s && r->id == m->id) {
        r->to = NULL;
        bt_metric_add(r->blocks, m->blocks);
    }
}

void bt_replicate_lost(struct bt_requests *rs, const struct bt_session *s)
{
    if (rs->replicate.to == s) {
        rs->replicate.to = NULL;
    }
}
