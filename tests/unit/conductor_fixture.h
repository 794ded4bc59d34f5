/* A conductor's view and request machine in front of scripted workers and kvstores: real gRPC
 * servers in the same process and loop, whose every message a test sends itself.
 *
 * Each fake has a session of its own, and messages of different sessions have no order: what one
 * fake has seen says nothing of what another has. Tests wait for each condition that they count on.
 * With BATON_TEST_JITTER_MS=N every message is held back by up to N ms, each session for itself:
 * a test that is wrong about this then fails. */
#ifndef BT_TESTS_CONDUCTOR_FIXTURE_H
#define BT_TESTS_CONDUCTOR_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/log/log.h"
#include "common/rpc/pb.h"
#include "common/rpc/rpc.h"
#include "conductor/request/requests.h"
#include "conductor/view/view.h"
#include "tests/unit/delay_line.h"
#include "tests/unit/hold_port.h"
#include "tests/unit/virtual_clock.h"

#define MODEL        "deploy/models/shakespeare-llama-6m"
#define WAIT_MS      30000 /* a bound for what hangs, not for what is slow */
#define BLOCK_TOKENS 16
#define INDEX_KEYS   2000
#ifndef MAX_FAKES
#define MAX_FAKES 8
#endif
#ifndef MAX_SEEN
#define MAX_SEEN 32
#endif
#define SILENCE_MS   600 /* of fixtures whose test is about silence */
#define HEARTBEAT_MS 50

struct seen_submit {
    uint64_t request, seed;
    uint32_t epoch, phases, n_tokens, n_prompt, max_new, choice, n;
    bool prompt_logprobs;
    uint32_t prompt_top;
    int32_t priority;
    bool late;
    uint32_t tokens[512];
    uint8_t root[32];
};
struct seen_reserve {
    uint64_t request, peer_incarnation;
    uint32_t epoch, role, n_tokens, n_keys;
    int32_t answer; /* the status that it was given */
    char peer[32];
    uint8_t keys[16 * 32];
    double prefill_tokens_per_s;
    uint32_t n_sources;
    struct {
        char peer[32];
        uint64_t incarnation;
        uint32_t n_runs, first, count; /* of the first run */
    } sources[4];
};
struct seen_replicate {
    uint64_t id;
    uint32_t n_keys, n_sources;
    uint8_t first_key[32];
    char peer[32]; /* the first source */
};
struct seen_pair {
    uint64_t request;
    uint32_t epoch;
    bool one_choice; /* of a Cancel */
    uint32_t choice;
};

struct fixture;
struct fake { /* a worker or a kvstore */
    struct fixture *f;
    const char *kind, *name, *node, *model;
    uint64_t incarnation, hello_incarnation;
    uint64_t hello_layout;
    bool is_kv, mute;        /* mute: says nothing, not even heartbeats */
    bool deaf;               /* a worker that was dead before a Submit reached it */
    int32_t reserved_status; /* answer to Reserve */
    struct bt_rpc_server *server;
    struct bt_rpc_stream *stream, *blocks;
    struct delay_line in, out; /* of its session */
    uint32_t mark;             /* in its heartbeats: settle() */
    uint64_t beat;             /* number of the conductor's last heartbeat that came */
    int port, holder;          /* holder: keeps the port while it is dead */
    int sessions, submits, cancels, reserves, releases;
    uint32_t credit;
    Baton__WorkerLoad load;
    double told_step_ms, told_gap_ms; /* of steps with prompts beside rows; < 0: nothing */
    struct seen_submit submit[MAX_SEEN];
    struct seen_reserve reserve[MAX_SEEN];
    int replicates;
    struct seen_replicate replicate[MAX_SEEN];
    struct seen_pair cancel[MAX_SEEN], release[MAX_SEEN];
};

struct fixture {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
    struct bt_metrics *metrics;
    struct bt_tokenizer *tok;
    struct bt_view *view;
    struct bt_etcd *etcd; /* of tests whose view follows one; else NULL */
    struct bt_requests *rs;
    struct bt_requests_config rc;
    struct fake fakes[MAX_FAKES];
    int n_fakes;
};

struct client {
    struct bt_request *r;
    struct bt_buf text;
    uint32_t tokens[256], offsets[256];
    int n_tokens, finishes, dones, errors, http;
    uint32_t retry_after_s;
    bt_finish_t reason;
    char stop[64], message[256];
    bool has_stop, cancel_in_delta;
    struct bt_gen_usage usage;
};

#define until(f, cond)                                                                             \
    do {                                                                                           \
        uint64_t until_end = clock_machine_ns() + WAIT_MS * 1000000ull;                            \
        while (!(cond)) {                                                                          \
            if (clock_machine_ns() > until_end) {                                                  \
                fail_msg("waited in vain for: %s", #cond);                                         \
            }                                                                                      \
            bt_loop_poll((f)->loop, 10);                                                           \
            delay_lines_turn();                                                                    \
        }                                                                                          \
    } while (0)

static inline void send_ok(struct bt_rpc_stream *s, const ProtobufCMessage *m)
{
    assert_non_null(s);
    assert_int_equal(bt_rpc_stream_send_pb(s, m), BT_OK);
}

static inline void fake_send(struct fake *k, const ProtobufCMessage *m)
{
    assert_non_null(k->stream);
    size_t len = protobuf_c_message_get_packed_size(m);
    uint8_t *data = bt_malloc(len + 1);
    protobuf_c_message_pack(m, data);
    delay_line_put(&k->out, data, len);
    free(data);
}

static inline void to_conductor_w(struct fake *k, Baton__FromWorker__MCase c, void *m)
{
    Baton__FromWorker w = BATON__FROM_WORKER__INIT;
    w.m_case = c;
    w.hello = m; /* the members of the union are pointers of one size */
    fake_send(k, &w.base);
}
static inline void to_conductor_k(struct fake *k, Baton__FromKvstore__MCase c, void *m)
{
    Baton__FromKvstore w = BATON__FROM_KVSTORE__INIT;
    w.m_case = c;
    w.hello = m;
    fake_send(k, &w.base);
}

static inline void fake_hello(struct fake *k)
{
    static uint8_t root[32];
    memset(root, 7, sizeof(root));
    Baton__SessionHello h = BATON__SESSION_HELLO__INIT;
    h.version = 1;
    h.cluster = (char *)"test";
    h.name = (char *)k->name;
    h.node = (char *)k->node;
    h.incarnation = k->hello_incarnation;
    h.layout_id = k->hello_layout;
    h.root_key.data = root;
    h.root_key.len = sizeof(root);
    if (k->is_kv) {
        to_conductor_k(k, BATON__FROM_KVSTORE__M_HELLO, &h);
    } else {
        to_conductor_w(k, BATON__FROM_WORKER__M_HELLO, &h);
    }
}

static inline void fake_heartbeat(struct fake *k)
{
    Baton__Heartbeat h = BATON__HEARTBEAT__INIT;
    Baton__PoolLoad p = BATON__POOL_LOAD__INIT;
    p.slots_total = 1000;
    p.slots_free = 1000;
    p.leases = k->mark;
    if (k->mark > 0) {
        k->load.pages_free = k->load.pages_total + k->mark; /* enough, as without a mark */
    }
    if (k->is_kv) {
        h.pool = &p;
        to_conductor_k(k, BATON__FROM_KVSTORE__M_HEARTBEAT, &h);
    } else {
        h.load = &k->load;
        to_conductor_w(k, BATON__FROM_WORKER__M_HEARTBEAT, &h);
    }
}

static inline void fake_told(struct fake *k, const Baton__MixedSteps *m)
{
    k->told_step_ms = m != NULL ? m->step_ms : -1;
    k->told_gap_ms = m != NULL ? m->gap_ms : -1;
}

static inline void on_worker_in(struct fake *k, const Baton__ToWorker *m)
{
    if (m->m_case == BATON__TO_WORKER__M_HELLO) {
        assert_true(m->hello->expect_incarnation == k->incarnation);
        fake_told(k, m->hello->mixed);
        fake_hello(k);
    } else if (m->m_case == BATON__TO_WORKER__M_HEARTBEAT) {
        k->beat = m->heartbeat->seq;
        fake_told(k, m->heartbeat->mixed);
        fake_heartbeat(k);
    } else if (m->m_case == BATON__TO_WORKER__M_SUBMIT && k->submits < MAX_SEEN) {
        const Baton__Submit *v = m->submit;
        Baton__Received got = BATON__RECEIVED__INIT;
        got.request = v->request;
        got.epoch = v->epoch;
        if (!k->deaf) {
            to_conductor_w(k, BATON__FROM_WORKER__M_RECEIVED, &got);
        }
        struct seen_submit *s = &k->submit[k->submits++];
        *s = (struct seen_submit){.request = v->request,
                                  .priority = v->priority,
                                  .late = v->late,
                                  .seed = v->sampling->seed,
                                  .epoch = v->epoch,
                                  .phases = (uint32_t)v->phases,
                                  .n_tokens = (uint32_t)(v->tokens.len / 4),
                                  .n_prompt = v->n_prompt,
                                  .max_new = v->sampling->max_new,
                                  .choice = v->choice,
                                  .n = v->n,
                                  .prompt_logprobs = v->prompt_logprobs,
                                  .prompt_top = v->prompt_top};
        memcpy(s->tokens, v->tokens.data, BT_MIN(v->tokens.len, sizeof(s->tokens)));
        memcpy(s->root, v->root_key.data, 32);
    } else if (m->m_case == BATON__TO_WORKER__M_CANCEL && k->cancels < MAX_SEEN) {
        k->cancel[k->cancels++] = (struct seen_pair){m->cancel->request, m->cancel->epoch,
                                                     m->cancel->one_choice, m->cancel->choice};
    }
}

static inline void on_kvstore_in(struct fake *k, const Baton__ToKvstore *m)
{
    if (m->m_case == BATON__TO_KVSTORE__M_HELLO) {
        fake_hello(k);
    } else if (m->m_case == BATON__TO_KVSTORE__M_HEARTBEAT) {
        k->beat = m->heartbeat->seq;
        fake_heartbeat(k);
    } else if (m->m_case == BATON__TO_KVSTORE__M_RESERVE && k->reserves < MAX_SEEN) {
        const Baton__Reserve *v = m->reserve;
        struct seen_reserve *s = &k->reserve[k->reserves++];
        *s = (struct seen_reserve){.request = v->request,
                                   .peer_incarnation = v->peer_incarnation,
                                   .epoch = v->epoch,
                                   .role = (uint32_t)v->role,
                                   .answer = k->reserved_status,
                                   .n_tokens = v->n_tokens,
                                   .n_keys = (uint32_t)(v->keys.len / 32)};
        snprintf(s->peer, sizeof(s->peer), "%s", v->peer);
        if (v->keys.len > 0) {
            memcpy(s->keys, v->keys.data, BT_MIN(v->keys.len, sizeof(s->keys)));
        }
        s->prefill_tokens_per_s = v->prefill_tokens_per_s;
        s->n_sources = (uint32_t)v->n_sources;
        for (size_t i = 0; i < BT_MIN(v->n_sources, BT_ARRAY_LEN(s->sources)); i++) {
            const Baton__Source *from = v->sources[i];
            assert_true(from->n_first == from->n_count && from->n_first > 0);
            snprintf(s->sources[i].peer, sizeof(s->sources[i].peer), "%s", from->peer);
            s->sources[i].incarnation = from->peer_incarnation;
            s->sources[i].n_runs = (uint32_t)from->n_first;
            s->sources[i].first = from->first[0];
            s->sources[i].count = from->count[0];
        }
        Baton__Reserved r = BATON__RESERVED__INIT;
        r.request = v->request;
        r.epoch = v->epoch;
        r.status = k->reserved_status;
        to_conductor_k(k, BATON__FROM_KVSTORE__M_RESERVED, &r);
    } else if (m->m_case == BATON__TO_KVSTORE__M_REPLICATE && k->replicates < MAX_SEEN) {
        const Baton__Replicate *v = m->replicate;
        struct seen_replicate *s = &k->replicate[k->replicates++];
        *s = (struct seen_replicate){.id = v->id,
                                     .n_keys = (uint32_t)(v->keys.len / 32),
                                     .n_sources = (uint32_t)v->n_sources};
        assert_true(v->keys.len >= 32 && v->n_sources > 0);
        memcpy(s->first_key, v->keys.data, 32);
        snprintf(s->peer, sizeof(s->peer), "%s", v->sources[0]->peer);
    } else if (m->m_case == BATON__TO_KVSTORE__M_RELEASE && k->releases < MAX_SEEN) {
        k->release[k->releases++] =
            (struct seen_pair){m->release->request, m->release->epoch, false, 0};
    }
}

static inline void fake_sent(void *arg, const void *data, size_t len)
{
    struct fake *k = arg;
    assert_non_null(k->stream);
    assert_int_equal(bt_rpc_stream_send(k->stream, data, len), BT_OK);
}

static inline void fake_seen(void *arg, const void *data, size_t len)
{
    struct fake *k = arg;
    if (k->mute) {
        return;
    }
    if (k->is_kv) {
        Baton__ToKvstore *m = baton__to_kvstore__unpack(NULL, len, data);
        assert_non_null(m);
        on_kvstore_in(k, m);
        baton__to_kvstore__free_unpacked(m, NULL);
    } else {
        Baton__ToWorker *m = baton__to_worker__unpack(NULL, len, data);
        assert_non_null(m);
        on_worker_in(k, m);
        baton__to_worker__free_unpacked(m, NULL);
    }
}

static inline void fake_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct fake *k = arg;
    if (s == k->stream) {
        delay_line_put(&k->in, data, len);
    }
}

static inline void fake_drop(struct fake *k)
{
    delay_line_clear(&k->in);
    delay_line_clear(&k->out);
}

static inline void fake_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    struct fake *k = arg;
    (void)code;
    (void)detail;
    if (k->stream == s) {
        fake_drop(k);
        k->stream = NULL;
    }
    k->blocks = k->blocks == s ? NULL : k->blocks;
}

static inline void blocks_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct fake *k = arg;
    (void)s;
    Baton__BlocksCredit *c = baton__blocks_credit__unpack(NULL, len, data);
    assert_non_null(c);
    k->credit += c->messages;
    baton__blocks_credit__free_unpacked(c, NULL);
}

static const struct bt_rpc_stream_ops fake_ops = {.on_message = fake_message,
                                                  .on_close = fake_close};
static const struct bt_rpc_stream_ops fake_blocks_ops = {.on_message = blocks_message,
                                                         .on_close = fake_close};

static inline void fake_accept(void *arg, struct bt_rpc_stream *s)
{
    struct fake *k = arg;
    fake_drop(k);
    k->stream = s;
    k->sessions++;
    bt_rpc_stream_set_arg(s, &fake_ops, k);
}
static inline void fake_accept_blocks(void *arg, struct bt_rpc_stream *s)
{
    struct fake *k = arg;
    k->blocks = s;
    k->credit = 0;
    bt_rpc_stream_set_arg(s, &fake_blocks_ops, k);
}

static inline void fake_listen(struct fake *k)
{
    char listen[32];
    snprintf(listen, sizeof(listen), "127.0.0.1:%d", k->port);
    assert_int_equal(bt_rpc_server_create(k->f->rpc, listen, &k->server, &k->port), BT_OK);
    if (k->is_kv) {
        bt_rpc_server_stream(k->server, "/baton.Kvstore/Session", "conductor", fake_accept, k);
        bt_rpc_server_stream(k->server, "/baton.Kvstore/Blocks", "conductor", fake_accept_blocks,
                             k);
    } else {
        bt_rpc_server_stream(k->server, "/baton.Worker/Session", "conductor", fake_accept, k);
    }
    bt_rpc_server_start(k->server);
}

/* The process dies: its streams break, its port refuses. */
static inline void fake_kill(struct fake *k)
{
    bt_rpc_server_destroy(k->server);
    k->server = NULL;
}

static inline void fake_register(struct fake *k, Baton__MemberState state)
{
    char rpc[32];
    snprintf(rpc, sizeof(rpc), "127.0.0.1:%d", k->port);
    Baton__Member m = BATON__MEMBER__INIT;
    m.kind = (char *)k->kind;
    m.name = (char *)k->name;
    m.node = (char *)k->node;
    m.incarnation = k->incarnation;
    m.rpc = rpc;
    m.state = state;
    m.model = (char *)(k->model != NULL ? k->model : "");
    bt_view_member_up(k->f->view, &m);
}

static inline struct bt_session *session_of_fake(struct fake *k)
{
    struct bt_list *l;
    bt_list_for_each (l, bt_view_sessions(k->f->view)) {
        struct bt_session *s = BT_CONTAINER_OF(l, struct bt_session, link);
        if (strcmp(s->member->name, k->name) == 0) {
            return s;
        }
    }
    return NULL;
}

static inline bool fake_up(struct fake *k)
{
    struct bt_session *s = session_of_fake(k);
    return s != NULL && bt_session_up(s) && (k->is_kv ? s->has_pool : s->has_load);
}

/* ---- time, and what is under way ---- */

static inline bool fake_answers(struct fake *k)
{
    return !k->mute && k->stream != NULL && fake_up(k) && bt_session_takes(session_of_fake(k));
}

static inline bool fake_marked(struct fake *k)
{
    const struct bt_session *s = session_of_fake(k);
    return k->is_kv ? s->pool.leases == k->mark
                    : s->load.pages_free == k->load.pages_total + k->mark;
}

/* One way: all that the fakes have said is read. */
static inline void settle_in(struct fixture *f)
{
    for (int i = 0; i < f->n_fakes; i++) {
        if (fake_answers(&f->fakes[i])) {
            f->fakes[i].mark++;
            fake_heartbeat(&f->fakes[i]);
        }
    }
    for (int i = 0; i < f->n_fakes; i++) {
        struct fake *k = &f->fakes[i];
        until(f, !fake_answers(k) || fake_marked(k));
    }
    for (int i = 0; i < 4; i++) { /* what is planned in the next turns */
        bt_loop_poll(f->loop, 0);
    }
}

/* ... and back: all that the conductor has said. */
static inline void settle_out(struct fixture *f)
{
    uint64_t beat[MAX_FAKES] = {0};
    for (int i = 0; i < f->n_fakes; i++) {
        if (fake_answers(&f->fakes[i])) {
            struct bt_session *s = session_of_fake(&f->fakes[i]);
            bt_rpc_session_beat(&s->rpc);
            beat[i] = s->rpc.core.seq;
        }
    }
    for (int i = 0; i < f->n_fakes; i++) {
        struct fake *k = &f->fakes[i];
        until(f, !fake_answers(k) || k->beat >= beat[i]);
    }
}

/* Nothing is under way between the conductor and the fakes that answer, nor what came of it: what
 * has not happened by now does not happen without new messages or more time. */
static inline void settle(struct fixture *f)
{
    for (int i = 0; i < 2; i++) {
        settle_in(f);
        settle_out(f);
    }
    settle_in(f);
}

#define PASS_STEP_MS 40 /* less than a heartbeat: nobody seems to stand still */

/* So much time passes and no more, however slow the machine is, and everybody hears of it. */
static inline void pass(struct fixture *f, uint64_t ms)
{
    bool stood = clock_stands();
    clock_stop();
    settle(f);
    while (ms > 0) {
        uint64_t step = BT_MIN(ms, (uint64_t)PASS_STEP_MS);
        clock_jump(step);
        settle_in(f);
        settle_out(f);
        ms -= step;
    }
    settle(f);
    if (!stood) {
        clock_go_on();
    }
}

/* Time passes until the condition holds; two minutes of it at most. */
#define pass_until(f, cond)                                                                        \
    do {                                                                                           \
        for (int steps_ = 0; !(cond); steps_++) {                                                  \
            if (steps_ * PASS_STEP_MS > 120000) {                                                  \
                fail_msg("two minutes passed without: %s", #cond);                                 \
            }                                                                                      \
            pass(f, PASS_STEP_MS);                                                                 \
        }                                                                                          \
    } while (0)

/* name and node: static strings. */
static inline struct fake *fake_add(struct fixture *f, const char *kind, const char *name,
                                    const char *node)
{
    assert_true(f->n_fakes < MAX_FAKES);
    struct fake *k = &f->fakes[f->n_fakes++];
    memset(k, 0, sizeof(*k));
    k->f = f;
    k->kind = kind;
    k->name = name;
    k->node = node;
    k->is_kv = strcmp(kind, "kvstore") == 0;
    k->incarnation = k->hello_incarnation = 1000 + (uint64_t)f->n_fakes;
    k->hello_layout = 77;
    delay_line_init(&k->in, f->loop, fake_seen, k);
    delay_line_init(&k->out, f->loop, fake_sent, k);
    baton__worker_load__init(&k->load);
    k->load.slots_total = 16;
    k->load.pages_total = k->load.pages_free = 100;
    k->load.prefill_tokens_per_s = 1e6;
    k->holder = hold_port(&k->port);
    fake_listen(k);
    fake_register(k, BATON__MEMBER_STATE__READY);
    return k;
}

/* silence_ms: after which a fake that says nothing is given up. index_keys: room of the index.
 * extent_blocks: see bt_view_config. */
static inline void fixture_init_index(struct fixture *f, uint32_t silence_ms, size_t index_keys,
                                      uint32_t extent_blocks)
{
    bt_log_init("test", "n0", BT_LOG_ERROR, false);
    memset(f, 0, sizeof(*f));
    clock_skip_stalls();
    char err[256] = "";
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    assert_int_equal(bt_rpc_create(f->loop, &f->rpc), BT_OK);
    if (bt_tokenizer_load(MODEL, &f->tok, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    f->metrics = bt_metrics_create();
    struct bt_view_config vc = {.cluster = "test",
                                .name = "conductor-n0",
                                .node = "n0",
                                .incarnation = 42,
                                .layout_id = 77,
                                .model = "shop/7b",
                                .heartbeat_ms = HEARTBEAT_MS,
                                .silence_ms = silence_ms,
                                .index_keys_max = index_keys,
                                .extent_blocks = extent_blocks};
    memset(vc.root.b, 7, sizeof(vc.root.b));
    f->view = bt_view_create(f->loop, f->rpc, &vc, f->metrics);
    f->rc = (struct bt_requests_config){.policy = &bt_sched_cache_aware,
                                        .sched = {.prior.prefill_tokens_per_s = 1000,
                                                  .prior.step_ms = 20,
                                                  .prior.link_bytes_per_s = 1e9},
                                        .max_running = 100,
                                        .max_waiting = 100,
                                        .no_worker_ms = 60000,
                                        .queue_timeout_ms = 60000,
                                        .stall_ms = 60000,
                                        .settle_ms = 60000,
                                        .ended_ms = 60000,
                                        .max_replans = 8,
                                        .block_tokens = BLOCK_TOKENS,
                                        .token_bytes = 3072,
                                        .vocab = bt_tokenizer_vocab(f->tok),
                                        .root = vc.root,
                                        .secret = (const uint8_t *)"secret",
                                        .secret_len = 6,
                                        .model_name = "m"};
}

static inline void fixture_init_silence(struct fixture *f, uint32_t silence_ms)
{
    fixture_init_index(f, silence_ms, INDEX_KEYS, 1);
}

/* For a busy machine silence is long. */
static inline void fixture_init(struct fixture *f)
{
    fixture_init_silence(f, 10000);
}

static inline void fixture_start(struct fixture *f)
{
    f->rs = bt_requests_create(f->loop, f->view, f->tok, &f->rc, f->metrics);
}

static inline void fixture_cleanup(struct fixture *f)
{
    bt_requests_destroy(f->rs);
    clock_go_on();
    clock_jump(100); /* a timer that is still set would find memory that is free */
    bt_loop_poll(f->loop, 0);
    bt_view_destroy(f->view);
    if (f->etcd != NULL) {
        bt_etcd_destroy(f->etcd);
    }
    for (int i = 0; i < f->n_fakes; i++) {
        fake_drop(&f->fakes[i]);
        if (f->fakes[i].server != NULL) {
            bt_rpc_server_destroy(f->fakes[i].server);
        }
        close(f->fakes[i].holder);
    }
    bt_rpc_destroy(f->rpc);
    bt_tokenizer_destroy(f->tok);
    bt_metrics_destroy(f->metrics);
    bt_loop_destroy(f->loop);
}

/* ---- what fakes say ---- */

static inline void say_choice(struct fake *k, uint64_t request, uint32_t epoch, uint32_t choice,
                              uint32_t offset, uint32_t token, Baton__Finish finish)
{
    Baton__Token t = BATON__TOKEN__INIT;
    t.request = request;
    t.epoch = epoch;
    t.choice = choice;
    t.offset = offset;
    t.token = token;
    t.logprob = -0.5f;
    t.finish = finish;
    Baton__Token *list[] = {&t};
    Baton__Tokens m = BATON__TOKENS__INIT;
    m.n_tokens = 1;
    m.tokens = list;
    to_conductor_w(k, BATON__FROM_WORKER__M_TOKENS, &m);
}

static inline void say_token(struct fake *k, uint64_t request, uint32_t epoch, uint32_t offset,
                             uint32_t token, Baton__Finish finish)
{
    say_choice(k, request, epoch, 0, offset, token, finish);
}

static inline void say_prefill_done(struct fake *k, uint64_t request, uint32_t epoch,
                                    uint32_t cached, uint64_t start_ns, uint64_t last_ns)
{
    Baton__PrefillDone m = BATON__PREFILL_DONE__INIT;
    m.request = request;
    m.epoch = epoch;
    m.cached_tokens = cached;
    m.start_ns = start_ns;
    m.last_compute_ns = last_ns;
    to_conductor_w(k, BATON__FROM_WORKER__M_PREFILL_DONE, &m);
}

static inline void say_ended(struct fake *k, uint64_t request, uint32_t epoch, int32_t status)
{
    Baton__Ended m = BATON__ENDED__INIT;
    m.request = request;
    m.epoch = epoch;
    m.status = status;
    m.detail = (char *)"scripted";
    to_conductor_w(k, BATON__FROM_WORKER__M_ENDED, &m);
}

static inline void say_flow_done(struct fake *k, uint64_t request, uint32_t epoch, uint64_t first,
                                 uint64_t last)
{
    Baton__FlowDone m = BATON__FLOW_DONE__INIT;
    m.request = request;
    m.epoch = epoch;
    m.first_ns = first;
    m.last_ns = last;
    m.bytes = 8192;
    m.segments = 6;
    to_conductor_k(k, BATON__FROM_KVSTORE__M_FLOW_DONE, &m);
}

static inline void say_grant_failed(struct fake *k, uint64_t request, uint32_t epoch,
                                    int32_t status)
{
    Baton__GrantFailed m = BATON__GRANT_FAILED__INIT;
    m.request = request;
    m.epoch = epoch;
    m.status = status;
    m.detail = (char *)"scripted";
    to_conductor_k(k, BATON__FROM_KVSTORE__M_GRANT_FAILED, &m);
}

/* ---- a client ---- */

static inline void client_delta(void *arg, const struct bt_gen_delta *d)
{
    struct client *c = arg;
    assert_int_equal(c->finishes + c->dones + c->errors, 0);
    bt_buf_append(&c->text, d->text, d->text_len);
    for (size_t i = 0; i < d->n_tokens; i++) {
        c->offsets[c->n_tokens] = d->tokens[i].text_offset;
        c->tokens[c->n_tokens++] = d->tokens[i].id;
    }
    if (c->cancel_in_delta) {
        bt_request_cancel(c->r);
    }
}
static inline void client_finish(void *arg, uint32_t choice, bt_finish_t reason, const char *stop)
{
    struct client *c = arg;
    assert_int_equal(choice, 0);
    c->finishes++;
    c->reason = reason;
    c->has_stop = stop != NULL;
    snprintf(c->stop, sizeof(c->stop), "%s", stop != NULL ? stop : "");
}
static inline void client_done(void *arg, const struct bt_gen_usage *u)
{
    struct client *c = arg;
    assert_int_equal(c->finishes, 1);
    c->dones++;
    c->usage = *u;
}
static inline void client_error(void *arg, int http, const char *message, uint32_t retry_after_s)
{
    struct client *c = arg;
    assert_int_equal(c->dones, 0);
    c->errors++;
    c->http = http;
    c->retry_after_s = retry_after_s;
    snprintf(c->message, sizeof(c->message), "%s", message);
}
static const struct bt_gen_ops client_ops = {.on_delta = client_delta,
                                             .on_finish = client_finish,
                                             .on_done = client_done,
                                             .on_error = client_error};

/* A request of n prompt tokens 400, 401, ...; the caller may change spec before client_start. */
static inline struct bt_gen_spec spec_of(uint32_t n, uint32_t max_tokens)
{
    struct bt_gen_spec s = {.max_tokens = max_tokens, .n = 1, .skip_special = true};
    s.prompt.ids = bt_malloc((n + 1) * sizeof(uint32_t));
    s.prompt.n = s.prompt.cap = n;
    for (uint32_t i = 0; i < n; i++) {
        s.prompt.ids[i] = 400 + i;
    }
    s.sampling.top_p = 1;
    s.sampling.repetition_penalty = 1;
    s.sampling.logprobs = -1;
    s.sampling.seed = 4711;
    s.id = bt_strdup("cmpl-test");
    s.received_ns = bt_mono_ns();
    return s;
}

static inline void client_start(struct fixture *f, struct client *c, struct bt_gen_spec *s)
{
    memset(c, 0, sizeof(*c));
    bt_buf_init(&c->text);
    c->r = bt_request_start(f->rs, s, &client_ops, c);
    assert_non_null(c->r);
    assert_int_equal(c->errors, 0); /* never at once */
}

static inline void client_cleanup(struct client *c)
{
    bt_buf_cleanup(&c->text);
}

static inline uint32_t open_requests(struct fixture *f)
{
    struct bt_requests_stats st;
    bt_requests_stats(f->rs, &st);
    return st.open;
}

#endif
