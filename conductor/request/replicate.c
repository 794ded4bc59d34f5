/* Orders copies of hot prefixes before they are needed, as common/policy/sched/copies.h says. If
 * many requests use a prefix within a minute, further nodes get a copy in their slabs: one for each
 * uses_per_copy requests, within a budget of bytes. Then a long queue at the holder, or its death,
 * does not make others compute the prefix again. Each conductor counts only its own requests and
 * has a budget of its own. Kvstores move hand-offs and fetches before these blocks. Pure. */
#include <inttypes.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/machine_priv.h"
#include "conductor/request/sources.h"

#define PENDING_NS 60000000000ull /* an answer that is later than this is lost */

void bt_replicate_init(struct bt_machine *mc, uint64_t now_ns)
{
    struct bt_replicate *r = &mc->replicate;
    bt_sched_copies_init(&r->copies, mc->conf.replica_bytes_per_s, mc->conf.replica_uses,
                         (double)now_ns / 1e6);
    r->started = bt_metrics_counter(mc->metrics, "baton_replicas_started_total", NULL);
    r->blocks = bt_metrics_counter(mc->metrics, "baton_replica_blocks_total", NULL);
}

/* The key of the last block stands for the whole prefix. */
static uint64_t key_word(const void *keys, uint32_t blocks)
{
    uint64_t w;
    memcpy(&w, ((const struct bt_kv_key *)keys)[blocks - 1].b, sizeof(w));
    return w;
}

static void order(struct bt_machine *mc, const struct bt_sequence *sq, struct bt_peer *to,
                  uint32_t blocks, struct bt_sources *from, uint64_t now_ns)
{
    struct bt_replicate *r = &mc->replicate;
    mc->env->random(mc->env_arg, &r->id, sizeof(r->id));
    struct bt_action *a = bt_action_add(mc, BT_ACT_REPLICATE);
    a->to = to;
    a->id = r->id;
    a->replicate.keys = sq->keys;
    a->replicate.blocks = blocks;
    a->replicate.tenant = sq->r->spec.tenant;
    a->replicate.from = bt_sources_take(from);
    r->to = to;
    r->ordered_ns = now_ns;
    bt_metric_add(r->started, 1);
}

void bt_replicate_look(struct bt_sequence *sq, const struct bt_view_snapshot *v, uint64_t now_ns)
{
    struct bt_machine *mc = sq->r->mc;
    struct bt_replicate *r = &mc->replicate;
    if (mc->conf.replica_bytes_per_s <= 0 || sq->epoch != 1 || sq->r->spec.no_cache) {
        return;
    }
    if (r->to != NULL && now_ns - r->ordered_ns > PENDING_NS) {
        r->to = NULL;
    }
    struct bt_sched_prefix p = {.key = key_word,
                                .arg = sq->keys,
                                .blocks = sq->n_keys,
                                .extent_blocks = mc->env->extent_blocks,
                                .block_bytes =
                                    (double)mc->conf.block_tokens * mc->conf.token_bytes};
    struct bt_sched_copy copy;
    if (!bt_sched_copies_look(&r->copies, &mc->conf.sched, &v->snap, &p, r->to == NULL, &copy)) {
        return;
    }
    struct bt_sched_plan plan = {
        .at.kv_prefill = copy.to, .prefix.fetch_from = copy.from, .prefix.fetch_tokens = 1};
    struct bt_sources from;
    mc->env->sources(mc->env_arg, v, &plan, sq->keys, sq->n_keys, copy.blocks, &from);
    if (from.n != 0) {
        bt_sched_copies_spend(&r->copies, &copy);
        BT_DEBUG("replicate", "kvstore=%s blocks=%u uses=%.0f", v->kvstore[copy.to]->name,
                 copy.blocks, copy.uses);
        order(mc, sq, v->kvstore[copy.to], copy.blocks, &from, now_ns);
    }
    bt_sources_cleanup(&from);
}

void bt_replicate_answer(struct bt_machine *mc, const struct bt_event *ev)
{
    struct bt_replicate *r = &mc->replicate;
    if (r->to == ev->from && r->id == ev->request) {
        r->to = NULL;
        bt_metric_add(r->blocks, ev->replicated_blocks);
    }
}

void bt_replicate_lost(struct bt_machine *mc, const struct bt_peer *p)
{
    if (mc->replicate.to == p) {
        mc->replicate.to = NULL;
    }
}
