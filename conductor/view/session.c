/* One session with a worker or a kvstore (common/rpc/session.h): its messages, loads and block
 * events, and when it is dialled. Loop thread. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/pb.h"
#include "common/rpc/ranges.h"
#include "common/rpc/session_hello.h"
#include "conductor/view/view_priv.h"

#define BACKOFF_FIRST_MS    100u  /* a dial that is refused costs little */
#define BACKOFF_MAX_MS      2000u /* as SILENCE: a daemon is found as fast as it is lost */
#define FLIGHTS_MS          5u    /* between two looks whether all plans know that it was lost */
#define BLOCKS_CREDIT       64u   /* BlockEvents under way at most */
#define UNSWEPT_MAX         2u    /* forgotten contents of a kvstore that may wait to be swept */
#define BLOCK_ADDED_BYTES   36u   /* key and depth, see BlockEvents */
#define BLOCK_REMOVED_BYTES 32u   /* key */
#define MIXED_TELL_NS       1000000000ull /* two heartbeats: all workers have heard and answered */
#define MIXED_ROUNDING_MS   0.01          /* a worker keeps nanoseconds */

static struct bt_metric *up_gauge(const struct bt_session *s)
{
    return s->view->m.up[s->kind == BT_SESSION_KVSTORE];
}

/* ---- block events ---- */

static void blocks_credit(struct bt_session *s, uint32_t n)
{
    Baton__BlocksCredit c = BATON__BLOCKS_CREDIT__INIT;
    c.messages = n;
    if (bt_rpc_stream_send_pb(s->blocks.stream, &c.base) != BT_OK) {
        bt_session_break(s, "the block event stream takes no more credit");
    }
}

/* Gives credit back. Each time a kvstore's contents are forgotten, the index has to sweep once. A
 * kvstore that announces them again and again gets no more credit until the sweeps are over. */
static void blocks_more(struct bt_session *s)
{
    if (s->blocks.stream != NULL && s->blocks.unacked >= BLOCKS_CREDIT / 2 &&
        bt_holders_unswept(s->view->index, s->kv_id) <= UNSWEPT_MAX) {
        blocks_credit(s, s->blocks.unacked);
        s->blocks.unacked = 0;
    }
}

static void forget_blocks(struct bt_session *s)
{
    bt_holders_forget(s->view->index, s->kv_id);
    s->blocks.synced = false;
    s->blocks.seq = 0;
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
        s->blocks.synced = true;
    } else if (s->blocks.seq != 0 && e->seq != s->blocks.seq) {
        /* Deltas were lost on the way, so the index may have blocks that are gone. An inventory
         * follows. */
        BT_INFO("blocks_gap", "kvstore=%s expected=%" PRIu64 " got=%" PRIu64, s->member->name,
                s->blocks.seq, e->seq);
        bt_metric_add(s->view->m.gaps, 1);
        forget_blocks(s);
    }
    s->blocks.seq = e->seq + n_added + n_removed;
    for (size_t i = 0; i < n_added; i++) {
        const uint8_t *p = e->added.data + i * BLOCK_ADDED_BYTES;
        struct bt_kv_key key;
        memcpy(key.b, p, sizeof(key.b));
        uint32_t depth =
            p[32] | (uint32_t)p[33] << 8 | (uint32_t)p[34] << 16 | (uint32_t)p[35] << 24;
        if ((depth + 1) % s->view->conf.extent_blocks != 0) {
            continue; /* inside an extent: the extent's last block stands for it */
        }
        if (!bt_holders_add(s->view->index, &key, depth, s->kv_id)) {
            bt_metric_add(s->view->m.index_full, 1);
        }
    }
    for (size_t i = 0; i < n_removed; i++) {
        struct bt_kv_key key;
        memcpy(key.b, e->removed.data + i * BLOCK_REMOVED_BYTES, sizeof(key.b));
        bt_holders_remove(s->view->index, &key, s->kv_id);
    }
    bt_metric_set(s->view->m.index_keys, (double)bt_holders_keys(s->view->index));
}

static void on_blocks_message(void *arg, struct bt_rpc_stream *st, const void *data, size_t len)
{
    struct bt_session *s = arg;
    (void)st;
    char why[256];
    if (!bt_session_takes(s)) {
        return;
    }
    if (s->blocks.unacked >= BLOCKS_CREDIT) {
        bt_session_break(s, "more block events than it had credit for");
        return;
    }
    Baton__BlockEvents *e = bt_block_events_unpack(data, len, why, sizeof(why));
    if (e == NULL) {
        bt_session_break(s, why);
    } else if (e->incarnation != 0 && e->incarnation != s->member->incarnation) {
        bt_session_break(s, "block events of another incarnation");
    } else {
        apply_events(s, e);
        s->blocks.unacked++;
        blocks_more(s);
    }
    if (e != NULL) {
        baton__block_events__free_unpacked(e, NULL);
    }
}

static void on_blocks_close(void *arg, struct bt_rpc_stream *st, int code, const char *detail)
{
    struct bt_session *s = arg;
    (void)st;
    s->blocks.stream = NULL;
    forget_blocks(s);
    if (code == BT_GRPC_UNIMPLEMENTED) { /* an older kvstore: its blocks are not in the index */
        BT_WARN("blocks_unsupported", "kvstore=%s", s->member->name);
        return;
    }
    if (bt_session_up(s)) {
        BT_INFO("blocks_closed", "kvstore=%s code=%d detail=%s", s->member->name, code, detail);
        bt_session_break(s, "its block event stream ended");
    }
}

static const struct bt_rpc_stream_ops blocks_ops = {.on_message = on_blocks_message,
                                                    .on_close = on_blocks_close};

static void blocks_close(struct bt_session *s)
{
    if (s->blocks.stream != NULL) {
        bt_rpc_stream_close(s->blocks.stream, BT_GRPC_CANCELLED, "session ended", false);
        s->blocks.stream = NULL;
    }
    if (s->blocks.seq != 0 || s->blocks.synced) {
        forget_blocks(s);
    }
}

static void blocks_open(struct bt_session *s)
{
    s->blocks.unacked = 0;
    s->blocks.seq = 0;
    bt_status_t st = bt_rpc_stream_open(s->rpc.channel, "/baton.Kvstore/Blocks", false, &blocks_ops,
                                        s, &s->blocks.stream);
    if (st != BT_OK) {
        s->blocks.stream = NULL;
        bt_session_break(s, "its block event stream could not be opened");
        return;
    }
    blocks_credit(s, BLOCKS_CREDIT);
}

/* ---- loads ---- */

/* Takes a worker's step cost. A worker of another version may have fewer segments: the missing ones
 * get the last price. A cost that is not finite or is negative is ignored. */
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

/* Takes the limits of mixed steps that are in force at the worker. A worker that reports none may
 * have any limit, or none: plans then do not rely on it. */
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

/* Warns if a worker's mixed steps are shorter than this conductor asks for. Predictions use the
 * worker's own limits, but the operator probably did not want them. */
static void note_mixed(struct bt_session *s, uint64_t now_ns)
{
    const struct bt_view *v = s->view;
    bool is_short = v->mixed.step_ms > 0 && s->has_load && s->decode &&
                    (s->said.mixed_step_ms < v->mixed.step_ms - MIXED_ROUNDING_MS ||
                     s->said.mixed_gap_ms < v->mixed.gap_ms - MIXED_ROUNDING_MS);
    if (now_ns - v->mixed.set_ns < MIXED_TELL_NS) {
        return; /* it may not have heard yet */
    }
    double step = is_short ? s->said.mixed_step_ms : 0, gap = is_short ? s->said.mixed_gap_ms : 0;
    if (is_short && (step != s->short_step_ms || gap != s->short_gap_ms)) {
        BT_WARN("mixed_steps_short",
                "worker=%s step_ms=%.1f gap_ms=%.1f asked_step_ms=%.1f asked_gap_ms=%.1f why=%s",
                s->member->name, BT_MAX(step, 0), gap, v->mixed.step_ms, v->mixed.gap_ms,
                s->load.mixed == NULL
                    ? "it runs an older release, which takes no conductor's word: no "
                      "prompts go beside its rows"
                    : "its own engine.mixed_step_ms and engine.mixed_gap_ms are shorter, "
                      "or the objective of another conductor");
    }
    s->short_step_ms = step;
    s->short_gap_ms = gap;
}

/* Takes the load of each class. A worker reports at most as many classes as there are places. */
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

static void on_heartbeat(void *arg, const void *heartbeat)
{
    struct bt_session *s = arg;
    const Baton__Heartbeat *h = heartbeat;
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

/* ---- hellos and heartbeats ---- */

static Baton__MixedSteps *fill_mixed(const struct bt_view *v, Baton__MixedSteps *m)
{
    baton__mixed_steps__init(m);
    m->step_ms = v->mixed.step_ms;
    m->gap_ms = v->mixed.gap_ms;
    return m;
}

static void say_hello(void *arg)
{
    struct bt_session *s = arg;
    const struct bt_view *v = s->view;
    struct bt_rpc_identity self = bt_view_identity(v);
    Baton__SessionHello h;
    Baton__MixedSteps mixed;
    bt_rpc_hello_fill(&self, s->member->incarnation, &h);
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

static void say_heartbeat(void *arg, uint64_t seq)
{
    struct bt_session *s = arg;
    Baton__Heartbeat h = BATON__HEARTBEAT__INIT;
    Baton__MixedSteps mixed;
    h.seq = seq;
    if (s->kind == BT_SESSION_WORKER) {
        note_mixed(s, bt_mono_ns());
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
        blocks_more(s);
    }
}

static const char *on_hello(void *arg, const void *hello, char *buf, size_t cap)
{
    struct bt_session *s = arg;
    struct bt_rpc_identity self = bt_view_identity(s->view);
    struct bt_rpc_hello h = bt_rpc_hello_read(hello);
    bt_hello_fault_t fault = bt_rpc_hello_compare(&self, &h, s->member->incarnation,
                                                  true /* the channel checks the certificate */);
    if (fault == BT_HELLO_FITS) {
        return NULL;
    }
    const char *why = bt_rpc_hello_why(fault, &self, &h, s->member->incarnation, buf, cap);
    bt_metric_add(s->view->m.mismatch, 1);
    BT_WARN("session_refused", "kind=%s peer=%s why=%s", s->member->kind, s->member->name, why);
    return why;
}

static void on_up(void *arg)
{
    struct bt_session *s = arg;
    bt_metric_set(up_gauge(s), bt_metric_value(up_gauge(s)) + 1);
    BT_INFO("session_up", "kind=%s peer=%s peer_node=%s incarnation=%016" PRIx64, s->member->kind,
            s->member->name, s->member->node, s->member->incarnation);
    if (s->kind == BT_SESSION_KVSTORE) {
        blocks_open(s);
    }
    if (s->view->ops != NULL && bt_session_takes(s)) {
        s->view->ops->on_up(s->view->ops_arg, s);
    }
}

/* ---- messages ---- */

static void on_worker(void *arg, ProtobufCMessage *msg)
{
    struct bt_session *s = arg;
    const Baton__FromWorker *m = (const Baton__FromWorker *)msg;
    if (m->m_case != BATON__FROM_WORKER__M__NOT_SET && s->view->ops != NULL) {
        s->output_ns = s->rpc.core.heard_ns;
        s->view->ops->on_worker(s->view->ops_arg, s, m);
    }
}

static void on_kvstore(void *arg, ProtobufCMessage *msg)
{
    struct bt_session *s = arg;
    Baton__FromKvstore *m = (Baton__FromKvstore *)msg;
    if (m->m_case == BATON__FROM_KVSTORE__M_PINS) {
        forget_pins(s);
        s->pins = m->pins; /* s owns them: they are taken out of the message */
        m->m_case = BATON__FROM_KVSTORE__M__NOT_SET;
        m->pins = NULL;
    } else if (m->m_case != BATON__FROM_KVSTORE__M__NOT_SET && s->view->ops != NULL) {
        s->output_ns = s->rpc.core.heard_ns;
        s->view->ops->on_kvstore(s->view->ops_arg, s, m);
    }
}

/* ---- life ---- */

static void on_fail(void *arg, const struct bt_rpc_session_end *e)
{
    struct bt_session *s = arg;
    (void)e; /* on_end tells it */
    s->broken = true;
}

/* Writes why the session ended, for logs and error messages. */
static void end_text(const struct bt_rpc_session_end *e, char *why, size_t cap)
{
    switch (e->cause) {
    case BT_RPC_SESSION_CLOSED:
        snprintf(why, cap, "stream closed (%d: %s)", e->code, e->why);
        return;
    case BT_RPC_SESSION_FULL:
    case BT_RPC_SESSION_VIOLATION:
    case BT_RPC_SESSION_REFUSED:
    case BT_RPC_SESSION_BROKEN: snprintf(why, cap, "broken by this conductor: %s", e->why); return;
    case BT_RPC_SESSION_SILENT:
    case BT_RPC_SESSION_STOPPED: snprintf(why, cap, "%s", e->why); return;
    }
}

/* The session has ended: all that the peer said is dropped. The session dials again by itself. */
static void on_end(void *arg, const struct bt_rpc_session_end *e)
{
    struct bt_session *s = arg;
    char why[BT_RPC_SESSION_WHY + 40];
    end_text(e, why, sizeof(why));
    s->has_load = s->has_pool = false;
    s->n_links = 0;
    s->said.classes = (struct bt_classes){0};
    forget_pins(s);
    blocks_close(s);
    if (!e->was_up && (e->cause == BT_RPC_SESSION_VIOLATION || e->cause == BT_RPC_SESSION_BROKEN)) {
        BT_WARN("session_down", "kind=%s peer=%s was_up=0 why=%s", s->member->kind, s->member->name,
                why);
        return;
    }
    if (!e->was_up) {
        BT_DEBUG("session_dial_failed", "kind=%s peer=%s why=%s", s->member->kind, s->member->name,
                 why);
        return;
    }
    bt_metric_set(up_gauge(s), bt_metric_value(up_gauge(s)) - 1);
    bt_metric_add(s->view->m.down, 1);
    BT_WARN("session_down", "kind=%s peer=%s why=%s", s->member->kind, s->member->name, why);
    if (s->view->ops != NULL) {
        s->view->ops->on_down(s->view->ops_arg, s, why);
    }
}

void bt_session_break(struct bt_session *s, const char *why)
{
    bt_rpc_session_fail(&s->rpc, BT_RPC_SESSION_BROKEN, BT_GRPC_CANCELLED, why);
}

static void take_member(struct bt_session *s, Baton__Member *m);

static void dial(void *arg)
{
    struct bt_session *s = arg;
    if (!bt_list_empty(&s->peer.own_flights)) {
        bt_rpc_session_redial_in(&s->rpc, FLIGHTS_MS);
        return;
    }
    if (s->next_member != NULL) {
        take_member(s, s->next_member);
    }
    if (s->departed) {
        return; /* the peer has left; bt_session_update dials again */
    }
    char *who = bt_sprintf("%s/%s", s->member->kind, s->member->node);
    bt_status_t st = bt_rpc_session_dial(&s->rpc, s->view->rpc, s->member->rpc, who,
                                         s->kind == BT_SESSION_WORKER ? "/baton.Worker/Session"
                                                                      : "/baton.Kvstore/Session");
    free(who);
    if (st == BT_ERR_INVALID) {
        BT_WARN("session_bad_address", "kind=%s peer=%s addr=%s", s->member->kind, s->member->name,
                s->member->rpc);
    }
}

const struct bt_rpc_session_rules bt_session_rules = {
    .tick_ms = BT_RPC_SESSION_HEARTBEAT_MS,
    .backoff_first_ms = BACKOFF_FIRST_MS,
    .backoff_max_ms = BACKOFF_MAX_MS,
};

#define SESSION_OPS(type, message)                                                                 \
    {                                                                                              \
        .incoming = &type, .say_hello = say_hello, .say_heartbeat = say_heartbeat,                 \
        .on_hello = on_hello, .on_up = on_up, .on_heartbeat = on_heartbeat, .on_message = message, \
        .on_fail = on_fail, .on_end = on_end, .on_redial = dial,                                   \
    }
static const struct bt_rpc_session_ops worker_ops =
    SESSION_OPS(baton__from_worker__descriptor, on_worker);
static const struct bt_rpc_session_ops kvstore_ops =
    SESSION_OPS(baton__from_kvstore__descriptor, on_kvstore);

bool bt_session_send_worker(struct bt_session *s, const Baton__ToWorker *m)
{
    BT_ASSERT(s->kind == BT_SESSION_WORKER);
    return bt_rpc_session_send(&s->rpc, &m->base);
}

bool bt_session_send_kvstore(struct bt_session *s, const Baton__ToKvstore *m)
{
    BT_ASSERT(s->kind == BT_SESSION_KVSTORE);
    return bt_rpc_session_send(&s->rpc, &m->base);
}

void bt_session_beat(struct bt_session *s, uint64_t now_ns, bool asked)
{
    if (asked) {
        bt_rpc_session_beat(&s->rpc);
    }
    (void)bt_rpc_session_tick(&s->rpc, now_ns);
}

/* ---- members ---- */

/* Reads what every plan asks of every member. */
static void read_member(struct bt_session *s)
{
    const Baton__Member *m = s->member;
    s->peer.kind = m->kind;
    s->peer.name = m->name;
    s->peer.node = m->node;
    s->peer.incarnation = m->incarnation;
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
    bt_list_init(&s->peer.own_flights);
    bt_list_init(&s->peer.own_lost);
    bt_sched_own_init(&s->peer.own);
    bt_rpc_session_init(&s->rpc, v->loop, true, &v->rules,
                        kind == BT_SESSION_WORKER ? &worker_ops : &kvstore_ops, s);
    if (kind != BT_SESSION_OTHER) {
        bt_rpc_session_redial_now(&s->rpc);
    }
    return s;
}

void bt_session_destroy(struct bt_session *s, const char *why)
{
    BT_ASSERT(bt_list_empty(&s->peer.own_flights));
    BT_ASSERT(bt_list_empty(&s->peer.own_lost));
    bt_list_remove(&s->link);
    bt_rpc_session_end(&s->rpc, BT_RPC_SESSION_STOPPED, BT_GRPC_CANCELLED, why);
    bt_rpc_session_cleanup(&s->rpc);
    baton__member__free_unpacked(s->member, NULL);
    if (s->next_member != NULL) {
        baton__member__free_unpacked(s->next_member, NULL);
    }
    free(s);
}

/* The session takes ownership of m. */
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
    if (anew) {
        bt_rpc_session_end(&s->rpc, BT_RPC_SESSION_STOPPED, BT_GRPC_CANCELLED,
                           "a new incarnation is up");
    }
    if (s->next_member != NULL) {
        baton__member__free_unpacked(s->next_member, NULL);
        s->next_member = NULL;
    }
    if (anew && !bt_list_empty(&s->peer.own_flights)) { /* the flights belong to the old one */
        s->next_member = bt_message_copy(&m->base);
    } else {
        take_member(s, bt_message_copy(&m->base));
    }
    if (s->kind != BT_SESSION_OTHER && (anew || was_departed) &&
        bt_rpc_session_state(&s->rpc) == BT_RPC_SESSION_IDLE) {
        bt_rpc_session_redial_now(&s->rpc);
    }
}
