/* Copies of hot prefixes before they are needed: orders them as common/policy/sched/copies.h says.
 * A prefix that many requests use within a minute gets a copy in a further node's slab for each so
 * many of them, while the budget of bytes lasts, so that neither the queue at its holder nor the
 * holder's death makes others compute it again. Each conductor goes by the requests that it sees
 * and has a budget of its own; kvstores move the blocks behind hand-offs and fetches. Loop thread.
 */
#include <inttypes.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/request_priv.h"
#include "conductor/request/sources.h"

#define PENDING_NS 60000000000ull /* an answer that does not come by then never comes */

void bt_replicate_init(struct bt_requests *rs, uint64_t now_ns)
{
    struct bt_replicate *r = &rs->replicate;
    bt_sched_copies_init(&r->copies, rs->conf.replica_bytes_per_s, rs->conf.replica_uses,
                         (double)now_ns / 1e6);
    r->started = bt_metrics_counter(rs->metrics, "baton_replicas_started_total", NULL,
                                    "Copies of hot prefixes that were ordered.");
    r->blocks = bt_metrics_counter(rs->metrics, "baton_replica_blocks_total", NULL,
                                   "Blocks that these copies have put into slabs.");
}

/* Of the prefix of so many blocks: the last one's key stands for all. */
static uint64_t key_word(const void *keys, uint32_t blocks)
{
    uint64_t w;
    memcpy(&w, ((const struct bt_kv_key *)keys)[blocks - 1].b, sizeof(w));
    return w;
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
    if (rs->conf.replica_bytes_per_s <= 0 || k->epoch != 1 || k->r->spec.no_cache) {
        return;
    }
    if (r->to != NULL && now_ns - r->ordered_ns > PENDING_NS) {
        r->to = NULL;
    }
    struct bt_sched_prefix p = {.key = key_word,
                                .arg = k->keys,
                                .blocks = k->n_keys,
                                .extent_blocks = bt_view_extent_blocks(rs->view),
                                .block_bytes =
                                    (double)rs->conf.block_tokens * rs->conf.token_bytes};
    struct bt_sched_copy copy;
    if (!bt_sched_copies_look(&r->copies, &rs->conf.sched, &v->snap, &p, r->to == NULL, &copy)) {
        return;
    }
    struct bt_sched_plan plan = {.kv_prefill = copy.to, .fetch_from = copy.from, .fetch_tokens = 1};
    struct bt_sources from;
    bt_sources_find(rs->view, v, &plan, k->keys, k->n_keys, copy.blocks, &from);
    if (from.n != 0) {
        bt_sched_copies_spend(&r->copies, &copy);
        order(rs, k, v->kvstore[copy.to], copy.blocks, &from);
        BT_DEBUG("replicate", "kvstore=%s blocks=%u uses=%.0f", v->kvstore[copy.to]->member->name,
                 copy.blocks, copy.uses);
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
