/* One session with a worker or a kvstore: dial, hello, heartbeats, block events, end, dial again.
 * Loop thread. A session ends only from its own callbacks or timer, never inside a send, so that
 * whoever sends need not expect on_down below it. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/pb.h"
#include "common/rpc/ranges.h"
#include "conductor/view/view_priv.h"

#define BACKOFF_FIRST_MS    100u
#define BACKOFF_MAX_MS      2000u
#define BACKOFF_DOUBLINGS   8u  /* more than it takes to the longest */
#define FLIGHTS_MS          5u  /* between two looks whether all plans know that it was lost */
#define BLOCKS_CREDIT       64u /* BlockEvents under way at most */
#define BLOCK_ADDED_BYTES   36u
#define BLOCK_REMOVED_BYTES 32u
#define MIXED_TELL_NS       1000000000ull
#define MIXED_ROUNDING_MS   0.01

static void dial(void *arg);
static void session_end(struct bt_session *s, const char *why);

static struct bt_metric *up_gauge(const struct bt_session *s)
{
    return s->view->m_up[s->kind == BT_SESSION_KVSTORE];
}

/* ---- block events ---- */

static void blocks_credit(struct bt_session *s, uint32_t n)
{
    Baton__BlocksCredit c = BATON__BLOCKS_CREDIT__INIT;
    c.messages = n;
    if (bt_rpc_stream_send_pb(s->blocks, &c.base) != BT_OK) {
        bt_session_break(s, "the block event stream takes no more credit");
    }
}

static void forget_blocks(struct bt_session *s)
{
    bt_holders_forget(s->view->index, s->kv_id);
    s->blocks_synced = false;
    s->blocks_seq = 0;
}

static void forget_pins(struct bt_session *s)
{
    if (s->pins != NULL) {
        baton__pin_states__free_unpacked(s->pins, NULL);
        s->pins = NULL;
    }
}

static void apply_events(struct bt_session *s, const Baton__BlockEvents *e)
{
    size_t n_added = e->added.len / BLOCK_ADDED_BYTES;
    size_t n_removed = e->removed.len / BLOCK_REMOVED_BYTES;
    if (e->reset) {
        forget_blocks(s);
        s->blocks_synced = true;
    } else if (s->blocks_seq != 0 && e->seq != s->blocks_seq) {
        /* Deltas were dropped on the way: what we have may be gone by now. An inventory follows. */
        BT_INFO("blocks_gap", "kvstore=%s expected=%" PRIu64 " got=%" PRIu64, s->member->name,
                s->blocks_seq, e->seq);
        bt_metric_add(s->view->m_gaps, 1);
        forget_blocks(s);
    }
    s->blocks_seq = e->seq + n_added + n_removed;
    for (size_t i = 0; i < n_added; i++) {
        const uint8_t *p = e->added.data + i * BLOCK_ADDED_BYTES;
        struct bt_kv_key key;
        memcpy(key.b, p, sizeof(key.b));
        uint32_t depth =
            p[32] | (uint32_t)p[33] << 8 | (uint32_t)p[34] << 16 | (uint32_t)p[35] << 24;
        if ((depth + 1) % s->view->conf.extent_blocks != 0) {
            continue; /* inside of an extent: its last block stands for it */
        }
        if (!bt_holders_add(s->view->index, &key, depth, s->kv_id)) {
            bt_metric_add(s->view->m_index_full, 1);
        }
    }
    for (size_t i = 0; i < n_removed; i++) {
        struct bt_kv_key key;
        memcpy(key.b, e->removed.data + i * BLOCK_REMOVED_BYTES, sizeof(key.b));
        bt_holders_remove(s->view->index, &key, s->kv_id);
    }
    bt_metric_set(s->view->m_index_keys, (double)bt_holders_keys(s->view->index));
}

static void on_blocks_message(void *arg, struct bt_rpc_stream *st, const void *data, size_t len)
{
    struct bt_session *s = arg;
    (void)st;
    char why[256];
    Baton__BlockEvents *e = bt_block_events_unpack(data, len, why, sizeof(why));
    if (e == NULL) {
        bt_session_break(s, why);
    } else if (e->incarnation != 0 && e->incarnation != s->member->incarnation) {
        bt_session_break(s, "block events of another incarnation");
    } else {
        apply_events(s, e);
        if (++s->blocks_unacked >= BLOCKS_CREDIT / 2) {
            blocks_credit(s, s->blocks_unacked);
            s->blocks_unacked = 0;
        }
    }
    if (e != NULL) {
        baton__block_events__free_unpacked(e, NULL);
    }
}

static void on_blocks_close(void *arg, struct bt_rpc_stream *st, int code, const char *detail)
{
    struct bt_session *s = arg;
    (void)st;
    s->blocks = NULL;
    forget_blocks(s);
    if (code == BT_GRPC_UNIMPLEMENTED) { /* an older kvstore: served without its index */
        BT_WARN("blocks_unsupported", "kvstore=%s", s->member->name);
        return;
    }
    if (s->state == BT_SESSION_UP) {
        BT_INFO("blocks_closed", "kvstore=%s code=%d detail=%s", s->member->name, code, detail);
        bt_session_break(s, "its block event stream ended");
    }
}

static const struct bt_rpc_stream_ops blocks_ops = {.on_message = on_blocks_message,
                                                    .on_close = on_blocks_close};

static void blocks_open(struct bt_session *s)
{
    s->blocks_unacked = 0;
    s->blocks_seq = 0;
    bt_status_t st =
        bt_rpc_stream_open(s->channel, "/baton.Kvstore/Blocks", false, &blocks_ops, s, &s->blocks);
    if (st != BT_OK) {
        s->blocks = NULL;
        bt_session_break(s, "its block event stream could not be opened");
        return;
    }
    blocks_credit(s, BLOCKS_CREDIT);
}

/* ---- hello and messages ---- */

/* NULL: the peer is who we took it for. */
static const char *hello_fault(const struct bt_session *s, const Baton__SessionHello *h)
{
    const struct bt_view_config *c = &s->view->conf;
    if (h->version != 1) {
        return "its protocol version differs (update the older of the two)";
    }
    if (strcmp(h->cluster, s->view->cluster) != 0) {
        return "it belongs to another cluster (cluster.name)";
    }
    if (h->incarnation != s->member->incarnation) {
        return "its incarnation is not the one in etcd";
    }
    if (h->layout_id != c->layout_id) {
        return "its KV layout differs (model.path, kv.block_tokens)";
    }
    if (h->root_key.len != sizeof(c->root.b) ||
        memcmp(h->root_key.data, c->root.b, sizeof(c->root.b)) != 0) {
        return "its root key differs (not the same weights or model.activations)";
    }
    return NULL;
}

static void on_hello(struct bt_session *s, const Baton__SessionHello *h)
{
    const char *fault = s->state == BT_SESSION_DIALLING ? hello_fault(s, h) : "a second hello";
    if (fault != NULL) {
        bt_metric_add(s->view->m_mismatch, 1);
        BT_WARN("session_refused", "kind=%s peer=%s why=%s", s->member->kind, s->member->name,
                fault);
        s->failures = BACKOFF_DOUBLINGS; /* it will not get better soon */
        bt_session_break(s, fault);
        return;
    }
    s->state = BT_SESSION_UP;
    s->failures = 0;
    bt_metric_set(up_gauge(s), bt_metric_value(up_gauge(s)) + 1);
    BT_INFO("session_up", "kind=%s peer=%s peer_node=%s incarnation=%016" PRIx64, s->member->kind,
            s->member->name, s->member->node, s->member->incarnation);
    if (s->kind == BT_SESSION_KVSTORE) {
        blocks_open(s);
    }
    if (s->view->ops != NULL && !s->broken) {
        s->view->ops->on_up(s->view->ops_arg, s);
    }
}

/* A worker of another version may have other segments: the last price goes for those missing. One
 * that is no number is as good as none. */
static void take_cost(struct bt_session *s, const Baton__StepCost *c)
{
    s->load.cost = NULL;
    s->said.has_cost = false;
    if (c == NULL || c->n_token_ns == 0) {
        return;
    }
    struct bt_batch_cost x = {.base_ns = c->base_ns, .kv_ns = c->kv_ns, .attn_ns = c->attn_ns};
    double sum = x.base_ns + x.kv_ns + x.attn_ns,
           least = BT_MIN(BT_MIN(x.base_ns, x.kv_ns), x.attn_ns);
    for (size_t i = 0; i < BT_BATCH_SEGMENTS; i++) {
        x.token_ns[i] = c->token_ns[BT_MIN(i, c->n_token_ns - 1)];
        sum += x.token_ns[i];
        least = BT_MIN(least, x.token_ns[i]);
    }
    if (!isfinite(sum) || least < 0) {
        return;
    }
    s->said.has_cost = true;
    s->said.cost = x;
    s->load_cost = *c;
    s->load_cost.base.n_unknown_fields = 0;
    s->load_cost.base.unknown_fields = NULL;
    s->load_cost.n_token_ns = BT_BATCH_SEGMENTS;
    s->load_cost.token_ns = s->said.cost.token_ns;
    s->load.cost = &s->load_cost;
}

/* What is in force there. One that says nothing may have any limit, or none: nothing is counted on.
 */
static void take_mixed(struct bt_session *s, const Baton__MixedSteps *m)
{
    bool some = m != NULL && isfinite(m->step_ms) && m->step_ms > 0;
    s->said.mixed_step_ms = some ? m->step_ms : -1;
    s->said.mixed_gap_ms = some && isfinite(m->gap_ms) && m->gap_ms > 0 ? m->gap_ms : 0;
    baton__mixed_steps__init(&s->load_mixed);
    s->load_mixed.step_ms = some ? s->said.mixed_step_ms : 0;
    s->load_mixed.gap_ms = s->said.mixed_gap_ms;
    s->load.mixed = m != NULL ? &s->load_mixed : NULL;
}

/* A worker whose steps are shorter than this conductor asks for is predicted as it is, but an
 * operator did not mean it so. */
static void note_mixed(struct bt_session *s, uint64_t now_ns)
{
    const struct bt_view *v = s->view;
    bool is_short = v->mixed_step_ms > 0 && s->has_load && s->decode &&
                    (s->said.mixed_step_ms < v->mixed_step_ms - MIXED_ROUNDING_MS ||
                     s->said.mixed_gap_ms < v->mixed_gap_ms - MIXED_ROUNDING_MS);
    if (now_ns - v->mixed_ns < MIXED_TELL_NS) {
        return; /* it may not have heard yet */
    }
    double step = is_short ? s->said.mixed_step_ms : 0, gap = is_short ? s->said.mixed_gap_ms : 0;
    if (is_short && (step != s->short_step_ms || gap != s->short_gap_ms)) {
        BT_WARN("mixed_steps_short",
                "worker=%s step_ms=%.1f gap_ms=%.1f asked_step_ms=%.1f asked_gap_ms=%.1f why=%s",
                s->member->name, BT_MAX(step, 0), gap, v->mixed_step_ms, v->mixed_gap_ms,
                s->load.mixed == NULL
                    ? "it runs an older release, which takes no conductor's word: no "
                      "prompts go beside its rows"
                    : "its own engine.mixed_step_ms and engine.mixed_gap_ms are shorter, "
                      "or the objective of another conductor");
    }
    s->short_step_ms = step;
    s->short_gap_ms = gap;
}

/* A worker says at most as many as there are places for. */
static void take_classes(struct bt_session *s, const Baton__WorkerLoad *l)
{
    s->load.n_classes = 0;
    s->load.classes = NULL;
    s->said.classes = (struct bt_classes){0};
    for (size_t i = 0; i < l->n_classes; i++) {
        const Baton__ClassLoad *k = l->classes[i];
        struct bt_class *to = bt_classes_at(&s->said.classes, k->priority);
        to->queue_ns += k->queue_ms > 0 ? 1e6 * k->queue_ms : 0;
        to->rows += k->rows;
        to->pages += k->pages;
        to->waiting += BT_MAX(k->waiting, k->landing);
        to->landing += k->landing;
    }
}

static void take_load(struct bt_session *s, const Baton__WorkerLoad *l)
{
    struct bt_sched_said *to = &s->said;
    to->at_ns = bt_mono_ns();
    to->running = l->running;
    to->waiting = l->waiting;
    to->landing = l->landing;
    to->pages_total = l->pages_total;
    to->pages_free = l->pages_free;
    to->slots_total = l->slots_total;
    to->max_model_len = l->max_model_len;
    to->max_rows = l->max_rows;
    to->chunk_tokens = l->chunk_tokens;
    to->queued_prefill_tokens = l->queued_prefill_tokens;
    to->kv_tokens = l->kv_tokens;
    to->prefill_tokens_per_s = l->prefill_tokens_per_s;
    to->step_ms = l->step_ms;
    to->queue_ms = l->queue_ms;
}

static void on_heartbeat(struct bt_session *s, const Baton__Heartbeat *h)
{
    if (h->load != NULL) {
        s->load = *h->load;
        s->load.base.n_unknown_fields = 0;
        s->load.base.unknown_fields = NULL;
        take_load(s, h->load);
        take_cost(s, h->load->cost);
        take_mixed(s, h->load->mixed);
        take_classes(s, h->load);
        s->has_load = true;
    }
    if (h->pool != NULL) {
        s->pool = *h->pool;
        s->pool.base.n_unknown_fields = 0;
        s->pool.base.unknown_fields = NULL;
        s->pool.n_links = 0;
        s->pool.links = NULL;
        s->has_pool = true;
        s->n_links = (uint32_t)BT_MIN(h->pool->n_links, (size_t)BT_SCHED_LINKS_MAX);
        for (uint32_t i = 0; i < s->n_links; i++) {
            const Baton__LinkRate *l = h->pool->links[i];
            s->links[i] =
                (struct bt_sched_link){l->incarnation, l->slab_bytes_per_s, l->ssd_bytes_per_s};
        }
    }
}

static void worker_message(struct bt_session *s, const void *data, size_t len)
{
    char why[256];
    Baton__FromWorker *m = bt_from_worker_unpack(data, len, why, sizeof(why));
    if (m == NULL) {
        bt_session_break(s, why);
        return;
    }
    if (m->m_case == BATON__FROM_WORKER__M_HELLO) {
        on_hello(s, m->hello);
    } else if (s->state != BT_SESSION_UP) {
        bt_session_break(s, "a message before its hello");
    } else if (m->m_case == BATON__FROM_WORKER__M_HEARTBEAT) {
        on_heartbeat(s, m->heartbeat);
    } else if (m->m_case != BATON__FROM_WORKER__M__NOT_SET && s->view->ops != NULL) {
        s->output_ns = s->rx_ns;
        s->view->ops->on_worker(s->view->ops_arg, s, m);
    }
    baton__from_worker__free_unpacked(m, NULL);
}

static void kvstore_message(struct bt_session *s, const void *data, size_t len)
{
    char why[256];
    Baton__FromKvstore *m = bt_from_kvstore_unpack(data, len, why, sizeof(why));
    if (m == NULL) {
        bt_session_break(s, why);
        return;
    }
    if (m->m_case == BATON__FROM_KVSTORE__M_HELLO) {
        on_hello(s, m->hello);
    } else if (s->state != BT_SESSION_UP) {
        bt_session_break(s, "a message before its hello");
    } else if (m->m_case == BATON__FROM_KVSTORE__M_HEARTBEAT) {
        on_heartbeat(s, m->heartbeat);
    } else if (m->m_case == BATON__FROM_KVSTORE__M_PINS) {
        forget_pins(s);
        s->pins = m->pins; /* taken out of the message */
        m->m_case = BATON__FROM_KVSTORE__M__NOT_SET;
        m->pins = NULL;
    } else if (m->m_case != BATON__FROM_KVSTORE__M__NOT_SET && s->view->ops != NULL) {
        s->output_ns = s->rx_ns;
        s->view->ops->on_kvstore(s->view->ops_arg, s, m);
    }
    baton__from_kvstore__free_unpacked(m, NULL);
}

static void on_message(void *arg, struct bt_rpc_stream *st, const void *data, size_t len)
{
    struct bt_session *s = arg;
    (void)st;
    if (s->broken) {
        return;
    }
    s->rx_ns = bt_mono_ns();
    if (s->kind == BT_SESSION_WORKER) {
        worker_message(s, data, len);
    } else {
        kvstore_message(s, data, len);
    }
}

static void on_close(void *arg, struct bt_rpc_stream *st, int code, const char *detail)
{
    struct bt_session *s = arg;
    (void)st;
    s->stream = NULL;
    char why[160];
    snprintf(why, sizeof(why), "stream closed (%d: %s)", code, detail != NULL ? detail : "");
    session_end(s, why);
}

static const struct bt_rpc_stream_ops session_ops = {.on_message = on_message,
                                                     .on_close = on_close};

/* ---- life ---- */

static Baton__MixedSteps *fill_mixed(const struct bt_view *v, Baton__MixedSteps *m)
{
    baton__mixed_steps__init(m);
    m->step_ms = v->mixed_step_ms;
    m->gap_ms = v->mixed_gap_ms;
    return m;
}

static void send_hello(struct bt_session *s)
{
    const struct bt_view *v = s->view;
    Baton__SessionHello h = BATON__SESSION_HELLO__INIT;
    h.version = 1;
    h.cluster = v->cluster;
    h.name = v->name;
    h.node = v->node;
    h.incarnation = v->conf.incarnation;
    h.root_key.data = (uint8_t *)v->conf.root.b;
    h.root_key.len = sizeof(v->conf.root.b);
    h.layout_id = v->conf.layout_id;
    h.expect_incarnation = s->member->incarnation;
    Baton__MixedSteps mixed;
    if (s->kind == BT_SESSION_WORKER) {
        h.mixed = fill_mixed(v, &mixed);
        Baton__ToWorker m = BATON__TO_WORKER__INIT;
        m.m_case = BATON__TO_WORKER__M_HELLO;
        m.hello = &h;
        (void)bt_session_send_worker(s, &m);
    } else {
        Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
        m.m_case = BATON__TO_KVSTORE__M_HELLO;
        m.hello = &h;
        (void)bt_session_send_kvstore(s, &m);
    }
}

static void redial_later(struct bt_session *s)
{
    uint32_t shift = BT_MIN(s->failures, BACKOFF_DOUBLINGS);
    uint32_t ms = BT_MIN(BACKOFF_FIRST_MS << shift, BACKOFF_MAX_MS);
    s->failures++;
    bt_timer_start(s->view->loop, &s->timer, ms, 0, dial, s);
}

/* Closes streams and the channel. The channel goes with them: gRPC's own reconnect backoff would
 * otherwise decide when a restarted peer is seen again. */
static void disconnect(struct bt_session *s)
{
    if (s->blocks != NULL) {
        bt_rpc_stream_close(s->blocks, BT_GRPC_CANCELLED, "session ended", false);
        s->blocks = NULL;
    }
    if (s->stream != NULL) {
        bt_rpc_stream_close(s->stream, BT_GRPC_CANCELLED, "session ended", false);
        s->stream = NULL;
    }
    if (s->blocks_seq != 0 || s->blocks_synced) {
        forget_blocks(s);
    }
}

/* From up or dialling to idle: tells the owner, dials again later. */
static void session_end(struct bt_session *s, const char *why)
{
    bool was_up = s->state == BT_SESSION_UP;
    s->state = BT_SESSION_IDLE;
    s->broken = false;
    s->has_load = s->has_pool = false;
    s->learned = (struct bt_sched_learned){0};
    s->n_links = 0;
    s->said.classes = (struct bt_classes){0};
    forget_pins(s);
    disconnect(s);
    redial_later(s);
    if (!was_up) {
        BT_DEBUG("session_dial_failed", "kind=%s peer=%s why=%s", s->member->kind, s->member->name,
                 why);
        return;
    }
    bt_metric_set(up_gauge(s), bt_metric_value(up_gauge(s)) - 1);
    bt_metric_add(s->view->m_down, 1);
    BT_WARN("session_down", "kind=%s peer=%s why=%s", s->member->kind, s->member->name, why);
    if (s->view->ops != NULL) {
        s->view->ops->on_down(s->view->ops_arg, s, why);
    }
    s->own.rows = s->own.decoding = s->own.late = 0;
    s->own.prefill_tokens = s->own.kv_tokens = s->own.decoding_kv = s->own.late_kv = 0;
}

static void end_broken(void *arg)
{
    struct bt_session *s = arg;
    session_end(s, "broken by this conductor");
}

void bt_session_break(struct bt_session *s, const char *why)
{
    if (s->broken || s->state == BT_SESSION_IDLE) {
        return;
    }
    s->broken = true;
    BT_WARN("session_break", "kind=%s peer=%s why=%s", s->member->kind, s->member->name, why);
    bt_timer_start(s->view->loop, &s->timer, 0, 0, end_broken, s);
}

static void take_member(struct bt_session *s, Baton__Member *m);

/* Timer: the channel of the last attempt is closed here, outside of every callback of its. */
static void dial(void *arg)
{
    struct bt_session *s = arg;
    if (s->channel != NULL) {
        bt_rpc_channel_destroy(s->channel);
        s->channel = NULL;
    }
    if (!bt_list_empty(&s->own_flights)) {
        bt_timer_start(s->view->loop, &s->timer, FLIGHTS_MS, 0, dial, s);
        return;
    }
    if (s->next_member != NULL) {
        take_member(s, s->next_member);
    }
    if (s->departed) {
        return; /* nobody is expected there; bt_session_update dials again */
    }
    char *who = bt_sprintf("%s/%s", s->member->kind, s->member->node);
    bt_status_t st = bt_rpc_channel_create(s->view->rpc, s->member->rpc, who, &s->channel);
    free(who);
    if (st != BT_OK) {
        s->channel = NULL;
        BT_WARN("session_bad_address", "kind=%s peer=%s addr=%s", s->member->kind, s->member->name,
                s->member->rpc);
        redial_later(s);
        return;
    }
    const char *method =
        s->kind == BT_SESSION_WORKER ? "/baton.Worker/Session" : "/baton.Kvstore/Session";
    if (bt_rpc_stream_open(s->channel, method, false, &session_ops, s, &s->stream) != BT_OK) {
        s->stream = NULL;
        redial_later(s);
        return;
    }
    s->state = BT_SESSION_DIALLING;
    s->rx_ns = bt_mono_ns();
    send_hello(s);
}

static bool send_pb(struct bt_session *s, const ProtobufCMessage *m)
{
    if (s->stream == NULL || s->broken) {
        return false;
    }
    if (bt_rpc_stream_send_pb(s->stream, m) != BT_OK) {
        bt_session_break(s, "its stream takes no more messages");
        return false;
    }
    return true;
}

bool bt_session_send_worker(struct bt_session *s, const Baton__ToWorker *m)
{
    BT_ASSERT(s->kind == BT_SESSION_WORKER);
    return send_pb(s, &m->base);
}

bool bt_session_send_kvstore(struct bt_session *s, const Baton__ToKvstore *m)
{
    BT_ASSERT(s->kind == BT_SESSION_KVSTORE);
    return send_pb(s, &m->base);
}

void bt_session_beat(struct bt_session *s, uint64_t now_ns)
{
    if (s->state == BT_SESSION_IDLE || s->broken) {
        return;
    }
    if (now_ns > s->rx_ns && now_ns - s->rx_ns > (uint64_t)s->view->conf.silence_ms * 1000000) {
        session_end(s, "silent for too long");
        return;
    }
    if (s->state != BT_SESSION_UP) {
        return;
    }
    Baton__Heartbeat h = BATON__HEARTBEAT__INIT;
    Baton__MixedSteps mixed;
    h.seq = ++s->heartbeat_seq;
    if (s->kind == BT_SESSION_WORKER) {
        note_mixed(s, now_ns);
        h.mixed = fill_mixed(s->view, &mixed);
        Baton__ToWorker m = BATON__TO_WORKER__INIT;
        m.m_case = BATON__TO_WORKER__M_HEARTBEAT;
        m.heartbeat = &h;
        (void)bt_session_send_worker(s, &m);
    } else {
        Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
        m.m_case = BATON__TO_KVSTORE__M_HEARTBEAT;
        m.heartbeat = &h;
        (void)bt_session_send_kvstore(s, &m);
    }
}

/* What every plan asks of every member. */
static void read_member(struct bt_session *s)
{
    const Baton__Member *m = s->member;
    s->ready = m->state == BATON__MEMBER_STATE__READY;
    uint32_t role = m->role_epoch != 0 ? m->role : bt_roles_of_kind(m->kind);
    s->prefill = (role & BT_ROLES_PREFILL) != 0;
    s->decode = (role & BT_ROLES_DECODE) != 0;
    uint32_t gives_up = m->next_role != 0 ? BT_ROLES_BOTH & ~m->next_role : 0;
    if (gives_up != s->gives_up) {
        s->gives_up = gives_up;
        s->gives_up_ns = bt_mono_ns();
    }
}

bool bt_session_gives_up(const struct bt_session *s, uint32_t roles, uint32_t after_ms,
                         uint64_t now_ns)
{
    return (s->gives_up & roles) != 0 && now_ns - s->gives_up_ns >= after_ms * 1000000ull;
}

struct bt_session *bt_session_create(struct bt_view *v, bt_session_kind_t kind,
                                     const Baton__Member *m)
{
    struct bt_session *s = bt_calloc(1, sizeof(*s));
    s->view = v;
    s->kind = kind;
    s->member = bt_message_copy(&m->base);
    read_member(s);
    s->kv_id = BT_HOLDERS_KVSTORES_MAX;
    bt_list_init(&s->link);
    bt_list_init(&s->own_flights);
    bt_list_init(&s->own_lost);
    bt_sched_own_init(&s->own);
    if (kind != BT_SESSION_OTHER) {
        bt_timer_start(v->loop, &s->timer, 0, 0, dial, s);
    }
    return s;
}

void bt_session_destroy(struct bt_session *s, const char *why)
{
    BT_ASSERT(bt_list_empty(&s->own_flights));
    bt_list_remove(&s->own_lost);
    bt_list_remove(&s->link);
    if (s->state != BT_SESSION_IDLE) {
        session_end(s, why);
    }
    bt_timer_stop(s->view->loop, &s->timer);
    if (s->channel != NULL) {
        bt_rpc_channel_destroy(s->channel);
    }
    baton__member__free_unpacked(s->member, NULL);
    if (s->next_member != NULL) {
        baton__member__free_unpacked(s->next_member, NULL);
    }
    free(s);
}

/* m is the session's from now on. */
static void take_member(struct bt_session *s, Baton__Member *m)
{
    baton__member__free_unpacked(s->member, NULL);
    s->member = m;
    s->next_member = NULL;
    s->view->links_stale = true;
    s->draining = bt_view_node_draining(s->view, m->node);
    read_member(s);
}

void bt_session_update(struct bt_session *s, const Baton__Member *m)
{
    bool anew = m->incarnation != s->member->incarnation || strcmp(m->rpc, s->member->rpc) != 0 ||
                strcmp(m->node, s->member->node) != 0;
    bool was_departed = s->departed;
    s->departed = false;
    if (anew && s->state != BT_SESSION_IDLE) {
        session_end(s, "a new incarnation is up");
    }
    if (s->next_member != NULL) {
        baton__member__free_unpacked(s->next_member, NULL);
        s->next_member = NULL;
    }
    if (anew && !bt_list_empty(&s->own_flights)) { /* theirs is the old one */
        s->next_member = bt_message_copy(&m->base);
    } else {
        take_member(s, bt_message_copy(&m->base));
    }
    if (s->kind != BT_SESSION_OTHER && s->state == BT_SESSION_IDLE && (anew || was_departed)) {
        s->failures = 0;
        bt_timer_start(s->view->loop, &s->timer, 0, 0, dial, s);
    }
}
