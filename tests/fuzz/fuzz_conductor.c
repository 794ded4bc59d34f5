/* libFuzzer: a conductor's view and its requests between clients and hostile workers and kvstores,
 * and batonctl's calls. The tape lets members come and go, starts and cancels requests, and chooses
 * what workers and kvstores say: proper tokens, ends and grants of what was submitted, or anything.
 * What the conductor sends is within the ranges of the protocol. Each request ends once: when
 * everybody has fallen silent, within its time limits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin.pb-c.h"
#include "common/rpc/ranges.h"
#include "conductor/admin.h"
#include "conductor/request/requests.h"
#include "conductor/view/view.h"
#include "tests/fuzz/fake_rpc.h"
#include "tests/fuzz/message.h"
#include "tests/fuzz/rig.h"

#define MODEL   "deploy/models/shakespeare-llama-6m"
#define BLOCK   16u
#define CLIENTS 4
#define TASKS   12
#define STEPS   96
#define WORKER  "/baton.Worker/Session"
#define KVSTORE "/baton.Kvstore/Session"
#define BLOCKS  "/baton.Kvstore/Blocks"

static const struct {
    const char *kind, *name, *node, *rpc;
} members[] = {{"prefill", "p1", "n1", "p1:1"},
               {"decode", "d1", "n2", "d1:1"},
               {"kvstore", "k1", "n1", "k1:1"},
               {"kvstore", "k2", "n2", "k2:1"}};

struct client {
    struct bt_request *r; /* NULL: it has ended */
    uint32_t finishes, n;
};

struct task { /* what was submitted to somebody */
    char target[16];
    uint64_t request;
    uint32_t epoch, offset, choice;
};

static struct bt_loop *loop;
static struct bt_tokenizer *tok;
static struct bt_metrics *metrics;
static struct {
    struct bt_rpc *rpc;
    struct bt_rpc_server *server;
    struct bt_view *view;
    struct bt_requests *rs;
    struct bt_admin_gate gate;
    struct bt_admin *admin;
    struct client clients[CLIENTS];
    struct task tasks[TASKS];
    uint32_t n_tasks;
    uint64_t incarnations[BT_ARRAY_LEN(members)];
    bool up[BT_ARRAY_LEN(members)];
    uint64_t seq;
} x;

/* ---- clients ---- */

static void on_prompt(void *arg, const struct bt_gen_token *tokens, size_t n)
{
    BT_ASSERT(((struct client *)arg)->r != NULL && n > 0 && tokens != NULL);
}

static void on_delta(void *arg, const struct bt_gen_delta *d)
{
    const struct client *c = arg;
    BT_ASSERT(c->r != NULL && d->choice < c->n);
    for (size_t i = 0; i < d->n_tokens; i++) {
        BT_ASSERT(d->tokens[i].id < bt_tokenizer_vocab(tok));
        BT_ASSERT(d->tokens[i].n_top <= BT_ENGINE_MAX_TOP);
    }
}

static void on_finish(void *arg, uint32_t choice, bt_finish_t reason, const char *stop_string)
{
    struct client *c = arg;
    (void)reason, (void)stop_string;
    BT_ASSERT(c->r != NULL && choice < c->n && c->finishes < c->n);
    c->finishes++;
}

static void on_done(void *arg, const struct bt_gen_usage *u)
{
    struct client *c = arg;
    BT_ASSERT(c->r != NULL && u != NULL);
    c->r = NULL;
}

static void on_error(void *arg, int http, const char *message, uint32_t retry_after_s)
{
    struct client *c = arg;
    (void)retry_after_s;
    BT_ASSERT(c->r != NULL && http >= 400 && http < 600 && message[0] != '\0');
    c->r = NULL;
}

static void client(struct tape *t)
{
    static const struct bt_gen_ops ops = {.on_prompt = on_prompt,
                                          .on_delta = on_delta,
                                          .on_finish = on_finish,
                                          .on_done = on_done,
                                          .on_error = on_error};
    struct client *c = &x.clients[tape_below(t, CLIENTS)];
    if (c->r != NULL) {
        if (tape_one_in(t, 4)) {
            bt_request_cancel(c->r);
            c->r = NULL;
        }
        return;
    }
    uint32_t n = 1 + tape_below(t, 80), chain = tape_below(t, 3);
    struct bt_gen_spec s = {.max_tokens = 1 + tape_below(t, 12), .skip_special = tape_bool(t)};
    s.n = tape_one_in(t, 4) ? 3 : 1;
    s.prompt_logprobs = tape_one_in(t, 6);
    s.prompt_top = s.prompt_logprobs ? 2 : 0;
    s.no_cache = tape_one_in(t, 8);
    s.prompt.ids = bt_malloc(n * sizeof(uint32_t));
    s.prompt.n = s.prompt.cap = n;
    for (uint32_t i = 0; i < n; i++) {
        s.prompt.ids[i] = 400 + chain;
    }
    s.sampling.top_p = 1;
    s.sampling.repetition_penalty = 1;
    s.sampling.logprobs = tape_one_in(t, 3) ? 2 : -1;
    s.id = bt_strdup("cmpl-fuzz");
    s.received_ns = bt_mono_ns();
    s.priority = (int32_t)tape_below(t, 3);
    *c = (struct client){.n = s.n};
    c->r = bt_request_start(x.rs, &s, &ops, c);
}

/* ---- what the conductor says ---- */

static void add_task(const char *target, uint64_t request, uint32_t epoch, uint32_t choice)
{
    struct task *k = &x.tasks[x.n_tasks++ % TASKS];
    *k = (struct task){.request = request, .epoch = epoch, .choice = choice};
    snprintf(k->target, sizeof(k->target), "%s", target);
}

static void drain(void)
{
    char why[256] = "";
    size_t len;
    const void *data;
    for (uint32_t i = 0; i < fake_rpc_streams(x.rpc); i++) {
        struct bt_rpc_stream *s = fake_rpc_stream(x.rpc, i);
        const char *method = fake_rpc_stream_method(s), *target = fake_rpc_stream_target(s);
        while (fake_rpc_stands(x.rpc, s) && (data = fake_rpc_sent(s, &len)) != NULL) {
            if (strcmp(method, WORKER) == 0) {
                Baton__ToWorker *m = bt_to_worker_unpack(data, len, why, sizeof(why));
                BT_ASSERT(m != NULL);
                if (m->m_case == BATON__TO_WORKER__M_SUBMIT) {
                    add_task(target, m->submit->request, m->submit->epoch, 0);
                }
                baton__to_worker__free_unpacked(m, NULL);
            } else if (strcmp(method, KVSTORE) == 0) {
                Baton__ToKvstore *m = bt_to_kvstore_unpack(data, len, why, sizeof(why));
                BT_ASSERT(m != NULL);
                if (m->m_case == BATON__TO_KVSTORE__M_RESERVE) {
                    add_task(target, m->reserve->request, m->reserve->epoch, 0);
                }
                baton__to_kvstore__free_unpacked(m, NULL);
            }
            fake_rpc_sent_done(s);
        }
    }
}

/* ---- what members say ---- */

static int member_of(const struct bt_rpc_stream *s)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(members); i++) {
        if (strcmp(fake_rpc_stream_target(s), members[i].rpc) == 0) {
            return (int)i;
        }
    }
    return 0;
}

static void deliver(struct bt_rpc_stream *s, const ProtobufCMessage *m, struct tape *t)
{
    size_t n = protobuf_c_message_get_packed_size(m);
    uint8_t *buf = bt_malloc(n + 1);
    protobuf_c_message_pack(m, buf);
    if (n > 0 && tape_one_in(t, 32)) {
        buf[tape_below(t, (uint32_t)n)] ^= tape_u8(t);
    }
    fake_rpc_deliver(s, buf, n, 0);
    free(buf);
}

static struct bt_rpc_stream *any_stream(struct tape *t)
{
    uint32_t n = fake_rpc_streams(x.rpc);
    return n > 0 ? fake_rpc_stream(x.rpc, tape_below(t, n)) : NULL;
}

static void come_and_go(struct tape *t)
{
    uint32_t i = tape_below(t, BT_ARRAY_LEN(members));
    if (x.up[i] && tape_below(t, 3) == 2) {
        x.up[i] = false;
        bt_view_member_down(x.view, members[i].kind, members[i].name);
        return;
    }
    Baton__Member m = BATON__MEMBER__INIT;
    x.incarnations[i] += !x.up[i] || tape_one_in(t, 4);
    x.up[i] = true;
    m.kind = (char *)(uintptr_t)members[i].kind;
    m.name = (char *)(uintptr_t)members[i].name;
    m.node = (char *)(uintptr_t)members[i].node;
    m.rpc = (char *)(uintptr_t)members[i].rpc;
    m.incarnation = x.incarnations[i] + 100 * i;
    m.state = tape_one_in(t, 8) ? BATON__MEMBER_STATE__DRAINING : BATON__MEMBER_STATE__READY;
    bt_view_member_up(x.view, &m);
}

static void hello(struct tape *t)
{
    struct bt_rpc_stream *s = any_stream(t);
    Baton__FromWorker w = BATON__FROM_WORKER__INIT;
    Baton__FromKvstore k = BATON__FROM_KVSTORE__INIT;
    Baton__SessionHello h = BATON__SESSION_HELLO__INIT;
    uint8_t key[32];
    if (s == NULL) {
        return;
    }
    int i = member_of(s);
    memset(key, 7, sizeof(key));
    h.version = 1;
    h.cluster = (char *)(uintptr_t) "c";
    h.name = (char *)(uintptr_t)members[i].name;
    h.node = (char *)(uintptr_t)members[i].node;
    h.incarnation = x.incarnations[i] + 100 * (uint64_t)i;
    h.layout_id = 77;
    h.root_key = (ProtobufCBinaryData){.data = key, .len = sizeof(key)};
    w.m_case = BATON__FROM_WORKER__M_HELLO;
    w.hello = &h;
    k.m_case = BATON__FROM_KVSTORE__M_HELLO;
    k.hello = &h;
    deliver(s, strcmp(fake_rpc_stream_method(s), WORKER) == 0 ? &w.base : &k.base, t);
}

/* The session with whom the task was given to. */
static struct bt_rpc_stream *stream_of(const struct task *k)
{
    for (uint32_t i = 0; i < fake_rpc_streams(x.rpc); i++) {
        struct bt_rpc_stream *s = fake_rpc_stream(x.rpc, i);
        if (strcmp(fake_rpc_stream_target(s), k->target) == 0 &&
            strcmp(fake_rpc_stream_method(s), BLOCKS) != 0) {
            return s;
        }
    }
    return NULL;
}

static void worker_does(struct bt_rpc_stream *s, struct task *k, struct tape *t)
{
    Baton__FromWorker m = BATON__FROM_WORKER__INIT;
    Baton__Token one = BATON__TOKEN__INIT, *list[] = {&one};
    Baton__Tokens tokens = BATON__TOKENS__INIT;
    Baton__PrefillDone done = BATON__PREFILL_DONE__INIT;
    Baton__Ended ended = BATON__ENDED__INIT;
    Baton__Received received = BATON__RECEIVED__INIT;
    one.request = done.request = ended.request = received.request = k->request;
    one.epoch = done.epoch = ended.epoch = received.epoch = k->epoch;
    switch (tape_u8(t) % 8) {
    case 0:
        m.m_case = BATON__FROM_WORKER__M_RECEIVED;
        m.received = &received;
        break;
    case 1:
        m.m_case = BATON__FROM_WORKER__M_PREFILL_DONE;
        m.prefill_done = &done;
        break;
    case 2:
        ended.status = tape_one_in(t, 3) ? -(int)tape_below(t, 90) : 0;
        ended.detail = (char *)(uintptr_t) "why";
        m.m_case = BATON__FROM_WORKER__M_ENDED;
        m.ended = &ended;
        break;
    default:
        one.choice = tape_one_in(t, 3) ? tape_below(t, 3) : 0;
        one.offset = tape_one_in(t, 8) ? tape_below(t, 12) : k->offset++;
        one.token = 400 + tape_u8(t);
        one.logprob = -1;
        one.finish = tape_one_in(t, 8) ? 1 + tape_below(t, 3) : 0;
        tokens.n_tokens = 1;
        tokens.tokens = list;
        m.m_case = BATON__FROM_WORKER__M_TOKENS;
        m.tokens = &tokens;
        break;
    }
    deliver(s, &m.base, t);
}

static void kvstore_does(struct bt_rpc_stream *s, const struct task *k, struct tape *t)
{
    Baton__FromKvstore m = BATON__FROM_KVSTORE__INIT;
    Baton__Reserved reserved = BATON__RESERVED__INIT;
    Baton__FlowDone flow = BATON__FLOW_DONE__INIT;
    Baton__GrantFailed failed = BATON__GRANT_FAILED__INIT;
    reserved.request = flow.request = failed.request = k->request;
    reserved.epoch = flow.epoch = failed.epoch = k->epoch;
    switch (tape_u8(t) % 4) {
    case 0:
        flow.bytes = tape_u64(t);
        m.m_case = BATON__FROM_KVSTORE__M_FLOW_DONE;
        m.flow_done = &flow;
        break;
    case 1:
        failed.status = -(int)tape_below(t, 90);
        m.m_case = BATON__FROM_KVSTORE__M_GRANT_FAILED;
        m.grant_failed = &failed;
        break;
    default:
        reserved.status = tape_one_in(t, 4) ? -(int)tape_below(t, 90) : 0;
        reserved.resident_blocks = tape_below(t, 8);
        m.m_case = BATON__FROM_KVSTORE__M_RESERVED;
        m.reserved = &reserved;
        break;
    }
    deliver(s, &m.base, t);
}

static void work(struct tape *t)
{
    uint32_t n = BT_MIN(x.n_tasks, (uint32_t)TASKS);
    if (n == 0) {
        return;
    }
    struct task *k = &x.tasks[(x.n_tasks - 1 - tape_below(t, n)) % TASKS];
    struct bt_rpc_stream *s = stream_of(k);
    if (s != NULL && strcmp(fake_rpc_stream_method(s), WORKER) == 0) {
        worker_does(s, k, t);
    } else if (s != NULL) {
        kvstore_does(s, k, t);
    }
}

/* Numbers of what was submitted. */
static bool likely(void *arg, struct message_arena *a, ProtobufCMessage *m,
                   const ProtobufCFieldDescriptor *f, struct tape *t)
{
    uint32_t n = BT_MIN(x.n_tasks, (uint32_t)TASKS);
    (void)arg, (void)a;
    if (n == 0 || f->label == PROTOBUF_C_LABEL_REPEATED || tape_one_in(t, 16)) {
        return false;
    }
    if (strcmp(f->name, "request") == 0) {
        message_set_number(m, f, x.tasks[tape_below(t, n)].request);
    } else if (strcmp(f->name, "epoch") == 0 || strcmp(f->name, "first") == 0) {
        message_set_number(m, f, 1 + tape_below(t, 3));
    } else if (strcmp(f->name, "choice") == 0) {
        message_set_number(m, f, tape_below(t, 4));
    } else {
        return false;
    }
    return true;
}

static void say(struct tape *t)
{
    struct bt_rpc_stream *s = any_stream(t);
    struct message_arena a = {0};
    if (s == NULL) {
        return;
    }
    const char *method = fake_rpc_stream_method(s);
    const ProtobufCMessageDescriptor *d =
        strcmp(method, WORKER) == 0    ? &baton__from_worker__descriptor
        : strcmp(method, KVSTORE) == 0 ? &baton__from_kvstore__descriptor
                                       : &baton__block_events__descriptor;
    deliver(s, message_make(&a, d, t, likely, NULL), t);
    message_free(&a);
}

static void blocks(struct tape *t)
{
    struct bt_rpc_stream *s = any_stream(t);
    Baton__BlockEvents e = BATON__BLOCK_EVENTS__INIT;
    uint8_t added[8 * 36], removed[4 * 32];
    if (s == NULL || strcmp(fake_rpc_stream_method(s), BLOCKS) != 0) {
        return;
    }
    memset(added, (int)tape_below(t, 4), sizeof(added));
    memset(removed, (int)tape_below(t, 4), sizeof(removed));
    for (uint32_t i = 0; i < 8; i++) {
        added[i * 36 + 1] = (uint8_t)i;
        memcpy(added + i * 36 + 32, &i, 4);
    }
    e.seq = tape_one_in(t, 4) ? tape_u64(t) : 0;
    e.reset = tape_one_in(t, 3);
    e.added = (ProtobufCBinaryData){.data = added, .len = 36 * tape_below(t, 9)};
    e.removed = (ProtobufCBinaryData){.data = removed, .len = 32 * tape_below(t, 5)};
    deliver(s, &e.base, t);
}

static void heartbeat(struct tape *t)
{
    struct bt_rpc_stream *s = any_stream(t);
    struct message_arena a = {0};
    Baton__FromWorker w = BATON__FROM_WORKER__INIT;
    Baton__FromKvstore k = BATON__FROM_KVSTORE__INIT;
    Baton__WorkerLoad load = BATON__WORKER_LOAD__INIT;
    Baton__Heartbeat h = BATON__HEARTBEAT__INIT;
    if (s == NULL) {
        return;
    }
    load.pages_total = load.pages_free = 100;
    load.slots_total = load.slots_free = 16;
    load.prefill_tokens_per_s = 1000;
    load.max_model_len = 256;
    load.max_rows = 256;
    load.chunk_tokens = 64;
    h.seq = ++x.seq;
    h.load = &load;
    w.m_case = BATON__FROM_WORKER__M_HEARTBEAT;
    w.heartbeat = tape_one_in(t, 4) ? (Baton__Heartbeat *)(void *)message_make(
                                          &a, &baton__heartbeat__descriptor, t, NULL, NULL)
                                    : &h;
    k.m_case = BATON__FROM_KVSTORE__M_HEARTBEAT;
    k.heartbeat = w.heartbeat;
    deliver(s, strcmp(fake_rpc_stream_method(s), WORKER) == 0 ? &w.base : &k.base, t);
    message_free(&a);
}

static void admin(struct tape *t)
{
    static const struct {
        const char *method;
        const ProtobufCMessageDescriptor *d;
    } calls[] = {{"/baton.Admin/Status", &baton__admin_status_request__descriptor},
                 {"/baton.Admin/Blocks", &baton__admin_blocks_request__descriptor},
                 {"/baton.Admin/Requests", &baton__admin_requests_request__descriptor},
                 {"/baton.Admin/Explain", &baton__admin_explain_request__descriptor},
                 {"/baton.Admin/Drain", &baton__admin_drain_request__descriptor}};
    struct message_arena a = {0};
    uint32_t i = tape_below(t, BT_ARRAY_LEN(calls));
    int code;
    ProtobufCMessage *m = message_make(&a, calls[i].d, t, NULL, NULL);
    size_t n = protobuf_c_message_get_packed_size(m);
    uint8_t *buf = bt_malloc(n + 1);
    protobuf_c_message_pack(m, buf);
    BT_ASSERT(fake_rpc_ask(x.rpc, calls[i].method, buf, n, &code));
    free(buf);
    message_free(&a);
}

static void stream_event(struct tape *t)
{
    struct bt_rpc_stream *s = any_stream(t);
    size_t n;
    if (s == NULL) {
        return;
    }
    switch (tape_u8(t) % 4) {
    case 0: fake_rpc_end(s, BT_GRPC_UNAVAILABLE, "the tape"); break;
    case 1: fake_rpc_full(s, tape_one_in(t, 4)); break;
    default: {
        const uint8_t *p = tape_blob(t, 64, &n);
        fake_rpc_deliver(s, p, n, 0);
        break;
    }
    }
}

/* ---- start, end, steps ---- */

static void start(void)
{
    char err[256];
    if (loop == NULL) {
        BT_ASSERT(bt_loop_create(&loop) == BT_OK);
        BT_ASSERT(bt_tokenizer_load(MODEL, &tok, err, sizeof(err)) == BT_OK);
    }
    memset(&x, 0, sizeof(x));
    metrics = bt_metrics_create();
    x.rpc = fake_rpc_create(loop);
    struct bt_view_config vc = {.cluster = "c",
                                .name = "conductor-n0",
                                .node = "n0",
                                .incarnation = 42,
                                .layout_id = 77,
                                .index_keys_max = 64};
    memset(vc.root.b, 7, sizeof(vc.root.b));
    x.view = bt_view_create(loop, x.rpc, &vc, metrics);
    struct bt_requests_config rc = {.policy = &bt_sched_cache_aware,
                                    .sched = {.prior.prefill_tokens_per_s = 1000,
                                              .prior.step_ms = 20,
                                              .prior.link_bytes_per_s = 1e9},
                                    .max_running = 3,
                                    .max_waiting = 3,
                                    .no_worker_ms = 2000,
                                    .queue_timeout_ms = 3000,
                                    .stall_ms = 3000,
                                    .settle_ms = 500,
                                    .ended_ms = 1000,
                                    .max_replans = 2,
                                    .block_tokens = BLOCK,
                                    .token_bytes = 3072,
                                    .vocab = bt_tokenizer_vocab(tok),
                                    .root = vc.root,
                                    .secret = (const uint8_t *)"secret",
                                    .secret_len = 6,
                                    .model_name = "m"};
    x.rs = bt_requests_create(loop, x.view, tok, &rc, metrics);
    BT_ASSERT(bt_rpc_server_create(x.rpc, "x", &x.server, NULL) == BT_OK);
    struct bt_admin_config ac = {.cluster = "c", .name = "conductor-n0", .model_id = "m"};
    ac.block_tokens = BLOCK;
    x.gate = (struct bt_admin_gate){.server = x.server};
    x.admin = bt_admin_create(&x.gate, x.view, x.rs, &ac);
    bt_rpc_server_start(x.server);
}

/* Members fall silent: sessions end, and so does each request. */
static void settle(void)
{
    for (int i = 0; i < 150; i++) {
        rig_pass_ms(200); /* less than makes the view think that it stood still itself */
        bt_loop_poll(loop, 0);
        drain();
    }
    for (int i = 0; i < CLIENTS; i++) {
        BT_ASSERT(x.clients[i].r == NULL);
    }
}

static void finish(void)
{
    bt_requests_destroy(x.rs);
    bt_admin_leave_view(x.admin);
    bt_view_destroy(x.view);
    bt_rpc_server_destroy(x.server);
    bt_admin_destroy(x.admin);
    bt_rpc_destroy(x.rpc);
    bt_metrics_destroy(metrics);
    bt_loop_poll(loop, 0);
}

static void step(struct tape *t)
{
    switch (tape_u8(t) % 20) {
    case 0:
    case 1: come_and_go(t); break;
    case 2:
    case 3:
    case 4: hello(t); break;
    case 5:
    case 6: client(t); break;
    case 7:
    case 8:
    case 9:
    case 10:
    case 11: work(t); break;
    case 12:
    case 13: say(t); break;
    case 14: blocks(t); break;
    case 15:
    case 16: heartbeat(t); break;
    case 17: admin(t); break;
    case 18: stream_event(t); break;
    default: rig_pass_ms(tape_u8(t) * 10u); break;
    }
    bt_loop_poll(loop, 0);
    drain();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tape t = tape_of(data, size);
    rig_reset();
    start();
    bool ends = tape_bool(&t);
    for (int i = 0; i < STEPS && tape_left(&t) > 0; i++) {
        step(&t);
    }
    if (ends) {
        settle();
    }
    finish();
    return 0;
}
