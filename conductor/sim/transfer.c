/* KV between nodes: links, fetches of plans, hand-offs, copies made ahead of need. */
#include "conductor/sim/sim_priv.h"

/* Each end of a link makes one transfer after another, in order of arrival, and each takes as long
 * as its bytes need. Streams share a link piece by piece, so an end does not wait for the other
 * end. Returns when both ends have finished. */
static double send(struct bt_sim *s, uint32_t from, uint32_t to, double bytes)
{
    double *out = &s->links[from].send_free_ms, *in = &s->links[to].recv_free_ms;
    double ms = 1e3 * bytes / s->c->link_bytes_per_s;
    *out = BT_MAX(*out, s->now_ms) + ms;
    *in = BT_MAX(*in, s->now_ms) + ms;
    return BT_MAX(*out, *in);
}

/* Returns when a late prompt's KV is handed over: after the links' other work, and without delaying
 * any of it. The KV is sent while it is computed, which takes only a small part of a link. */
static double send_late(const struct bt_sim *s, uint32_t from, uint32_t to, double bytes)
{
    double busy = BT_MAX(s->links[from].send_free_ms, s->links[to].recv_free_ms);
    return BT_MAX(busy, s->now_ms) + 1e3 * bytes / s->c->link_bytes_per_s;
}

/* ---- fetches ---- */

void bt_sim_fetch(struct bt_sim *s, uint32_t id, const struct bt_sched_plan *plan)
{
    struct bt_sim_live *l = &s->live[id];
    uint32_t n = BT_MIN(s->match[plan->prefix.fetch_from], bt_sim_usable_blocks(s, id)), ssd;
    double bytes = (double)plan->prefix.fetch_tokens * s->c->token_bytes;
    l->best_tokens = n * BT_SIM_BLOCK_TOKENS;
    l->fetch_from = plan->prefix.fetch_from;
    l->fetch_tokens = plan->prefix.fetch_tokens;
    l->fetch_end_ms = send(s, plan->prefix.fetch_from, plan->at.prefill, bytes);
    s->r->bytes_fetch += bytes;
    const uint32_t *blocks = bt_sim_blocks_of(s, id); /* used there too */
    double read = bt_sim_caches_read(s->caches, plan->prefix.fetch_from, blocks, n, s->now_ms);
    l->fetch_end_ms = BT_MAX(l->fetch_end_ms, read);
    uint32_t used =
        bt_sim_caches_use(s->caches, plan->prefix.fetch_from, blocks, n, s->now_ms, &ssd);
    bt_sim_caches_release(s->caches, plan->prefix.fetch_from, blocks, used);
}

bool bt_sim_fetch_lost(const struct bt_sim *s, uint32_t id)
{
    const struct bt_sim_live *l = &s->live[id];
    return bt_sim_failed_since(s, id, l->fetch_from) &&
           s->failed_ms[l->fetch_from] < l->fetch_end_ms;
}

/* ---- hand-offs ---- */

static double kv_bytes(const struct bt_sim *s, uint32_t id)
{
    return (double)s->req[id].input * s->c->token_bytes;
}

void bt_sim_handoff_begin(struct bt_sim *s, uint32_t id)
{
    const struct bt_sim_record *rec = &s->r->records[id];
    if (!bt_sim_row_needless(s, id)) {
        s->live[id].handed_ms =
            (s->live[id].job.late ? send_late(s, rec->prefill, rec->decode, kv_bytes(s, id))
                                  : send(s, rec->prefill, rec->decode, kv_bytes(s, id)));
        s->r->bytes_handoff += kv_bytes(s, id);
    }
}

void bt_sim_handoff(struct bt_sim *s, uint32_t id)
{
    uint32_t decode = s->r->records[id].decode;
    if (bt_sim_failed_since(s, id, decode)) {
        s->live[id].given++;
        bt_sim_abandon(s, id, decode, true);
        return;
    }
    double layer = 1e3 * kv_bytes(s, id) / s->c->link_bytes_per_s / s->c->layers; /* the last one */
    bt_sim_push(s, BT_MAX(s->now_ms + layer, s->live[id].handed_ms), EV_HANDOFF_END, id, 0);
}

/* ---- copies ---- */

static uint64_t copy_key(const void *blocks, uint32_t n)
{
    return (((const uint32_t *)blocks)[n - 1] + 1ull) * 0x9e3779b97f4a7c15ull;
}

void bt_sim_copy_begin(struct bt_sim *s, uint32_t id)
{
    struct bt_sched_prefix p = {.key = copy_key,
                                .arg = bt_sim_blocks_of(s, id),
                                .blocks = bt_sim_full_blocks(s, id),
                                .extent_blocks = 1,
                                .block_bytes = BT_SIM_BLOCK_TOKENS * s->c->token_bytes};
    struct bt_sched_copy copy;
    if (!bt_sched_copies_look(&s->copies, &s->params, &s->snap, &p, !s->copying.now, &copy)) {
        return;
    }
    bt_sched_copies_spend(&s->copies, &copy);
    const struct bt_sim_link *src = &s->links[copy.from], *dst = &s->links[copy.to];
    double start = BT_MAX(s->now_ms, BT_MAX(src->send_free_ms, dst->recv_free_ms));
    s->copying.what = copy;
    s->copying.of = id;
    s->copying.begun_ms = s->now_ms;
    s->copying.now = true;
    s->r->copies++;
    s->r->bytes_copied += copy.bytes;
    bt_sim_push(s, start + 1e3 * copy.bytes / s->c->link_bytes_per_s, EV_COPY, 0, 0);
}

void bt_sim_copy_end(struct bt_sim *s)
{
    const struct bt_sched_copy *c = &s->copying.what;
    const uint32_t *blocks = bt_sim_blocks_of(s, s->copying.of);
    s->copying.now = false;
    if (s->failed_ms[c->from] >= s->copying.begun_ms ||
        s->failed_ms[c->to] >= s->copying.begun_ms) {
        return;
    }
    uint32_t ssd, held = bt_sim_caches_use(s->caches, c->to, blocks, c->blocks, s->now_ms, &ssd);
    struct bt_sim_put put = {
        .blocks = blocks, .n = c->blocks, .held = held, .copied = held, .copied_end = c->blocks};
    bt_sim_caches_put(s->caches, c->to, &put, s->now_ms);
}
