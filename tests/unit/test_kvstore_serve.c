/* The Kvstore service over a real gRPC connection within one process and loop: hello, reservations
 * that end with their session, silence, and block events under credit and overflow. */
#include "kv_node.h"

#include "common/rpc/pb.h"
#include "kvstore/serve/serve.h"
#include "tests/unit/virtual_clock.h"

static struct node node;
static struct bt_rpc *rpc;
static struct bt_rpc_server *server;
static struct bt_rpc_channel *channel;
static struct bt_serve *serve;
static char target[64];

/* Either kind of stream. Static in each test: the stream may end in teardown, after the test's own
 * frame is gone. */
struct client {
    struct bt_rpc_stream *s;
    bool closed, blocks;
    int code;
    char detail[200];
    uint32_t n_hello, n_beats, n_reserved, n_free, n_writing;
    int32_t status;
    /* block events */
    uint32_t n_messages, n_resets, n_added, n_removed;
    uint64_t next_seq, gaps;
    size_t largest;
    uint8_t have[256]; /* by second byte of the key: is it there? */
    uint32_t n_replicated, replica_blocks;
    uint64_t replica_id;
};

static void on_events(struct client *c, const Baton__BlockEvents *e, size_t len)
{
    c->n_messages++;
    c->largest = BT_MAX(c->largest, len);
    assert_true(e->added.len == 0 || e->removed.len == 0);
    assert_int_equal(e->added.len % 36, 0);
    assert_int_equal(e->removed.len % 32, 0);
    if (e->reset) {
        c->n_resets++;
        memset(c->have, 0, sizeof(c->have));
    } else if (e->seq != c->next_seq) {
        c->gaps++;
    }
    c->next_seq = e->seq + e->added.len / 36 + e->removed.len / 32;
    for (size_t i = 0; i < e->added.len; i += 36) {
        c->have[e->added.data[i + 4]] = 1; /* the block number of node_key */
        assert_int_equal(e->added.data[i + 32], e->added.data[i + 4]); /* and its depth */
        c->n_added++;
    }
    for (size_t i = 0; i < e->removed.len; i += 32) {
        c->have[e->removed.data[i + 4]] = 0;
        c->n_removed++;
    }
}

static void on_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct client *c = arg;
    (void)s;
    if (c->blocks) {
        Baton__BlockEvents *e = baton__block_events__unpack(NULL, len, data);
        assert_non_null(e);
        on_events(c, e, len);
        baton__block_events__free_unpacked(e, NULL);
        return;
    }
    Baton__FromKvstore *m = baton__from_kvstore__unpack(NULL, len, data);
    assert_non_null(m);
    if (m->m_case == BATON__FROM_KVSTORE__M_HELLO) {
        c->n_hello++;
        assert_string_equal(m->hello->name, "kvstore-n1");
        assert_int_equal(m->hello->incarnation, 99);
    } else if (m->m_case == BATON__FROM_KVSTORE__M_HEARTBEAT) {
        c->n_beats++;
        c->n_free = m->heartbeat->pool->slots_free;
        c->n_writing = m->heartbeat->pool->slots_writing;
    } else if (m->m_case == BATON__FROM_KVSTORE__M_RESERVED) {
        c->n_reserved++;
        c->status = m->reserved->status;
    } else if (m->m_case == BATON__FROM_KVSTORE__M_REPLICATED) {
        c->n_replicated++;
        c->replica_id = m->replicated->id;
        c->status = m->replicated->status;
        c->replica_blocks = m->replicated->blocks;
    }
    baton__from_kvstore__free_unpacked(m, NULL);
}

static void on_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    struct client *c = arg;
    (void)s;
    c->closed = true;
    c->code = code;
    snprintf(c->detail, sizeof(c->detail), "%s", detail != NULL ? detail : "");
}

static const struct bt_rpc_stream_ops ops = {.on_message = on_message, .on_close = on_close};

static void dial(struct client *c, bool blocks)
{
    memset(c, 0, sizeof(*c));
    c->blocks = blocks;
    assert_int_equal(bt_rpc_stream_open(channel,
                                        blocks ? "/baton.Kvstore/Blocks" : "/baton.Kvstore/Session",
                                        true, &ops, c, &c->s),
                     BT_OK);
}

static void say(struct client *c, const Baton__ToKvstore *m)
{
    assert_int_equal(bt_rpc_stream_send_pb(c->s, &m->base), BT_OK);
}

static void hello(struct client *c)
{
    Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
    Baton__SessionHello h = BATON__SESSION_HELLO__INIT;
    h.version = 1;
    h.cluster = "unit";
    h.name = "conductor";
    h.incarnation = 1;
    h.expect_incarnation = 99;
    h.layout_id = node.layout.layout_id;
    h.root_key.data = node.root.b;
    h.root_key.len = 32;
    m.m_case = BATON__TO_KVSTORE__M_HELLO;
    m.hello = &h;
    say(c, &m);
    NODE_UNTIL(&node, c->n_hello == 1);
}

static void reserve(struct client *c, uint64_t request)
{
    Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
    Baton__Reserve r = BATON__RESERVE__INIT;
    r.request = request;
    r.epoch = 1;
    r.n_tokens = 5; /* one private block */
    m.m_case = BATON__TO_KVSTORE__M_RESERVE;
    m.reserve = &r;
    uint32_t before = c->n_reserved;
    say(c, &m);
    NODE_UNTIL(&node, c->n_reserved == before + 1);
    assert_int_equal(c->status, BT_OK);
}

static void credit(struct client *c, uint32_t n)
{
    Baton__BlocksCredit m = BATON__BLOCKS_CREDIT__INIT;
    m.messages = n;
    assert_int_equal(bt_rpc_stream_send_pb(c->s, &m.base), BT_OK);
}

static int setup(void **state)
{
    int port;
    (void)state;
    node_start(&node, 32, 60000);
    assert_int_equal(bt_rpc_create(node.loop, &rpc), BT_OK);
    assert_int_equal(bt_rpc_server_create(rpc, "127.0.0.1:0", &server, &port), BT_OK);
    struct bt_serve_config sc = {.loop = node.loop,
                                 .cluster = "unit",
                                 .name = "kvstore-n1",
                                 .node = "n1",
                                 .incarnation = 99,
                                 .root = node.root,
                                 .layout_id = node.layout.layout_id,
                                 .cache = node.cache};
    serve = bt_serve_create(&sc);
    bt_serve_set_grants(serve, node.grants);
    node.to_real = bt_serve_to_session;
    bt_serve_register(serve, server);
    bt_rpc_server_start(server);
    snprintf(target, sizeof(target), "127.0.0.1:%d", port);
    assert_int_equal(bt_rpc_channel_create(rpc, target, NULL, &channel), BT_OK);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    bt_serve_destroy(serve);
    bt_rpc_channel_destroy(channel);
    bt_rpc_server_destroy(server);
    bt_rpc_destroy(rpc);
    node_stop(&node);
    return 0;
}

static void say_heartbeat(struct client *c)
{
    Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
    Baton__Heartbeat h = BATON__HEARTBEAT__INIT;
    m.m_case = BATON__TO_KVSTORE__M_HEARTBEAT;
    m.heartbeat = &h;
    say(c, &m);
}

/* The time of a heartbeat passes, and no more: the kvstore has sent one to this session. */
static void beat_passes(struct client *c)
{
    uint32_t beats = c->n_beats;
    clock_stop();
    clock_jump(550); /* its looks are not exact */
    NODE_UNTIL(&node, c->n_beats > beats || c->closed);
    clock_go_on();
}

/* What was said before on any session of the connection has arrived: messages keep their order, and
 * this one is answered. */
static void all_is_heard(struct client *other)
{
    static uint64_t request = 1000;
    Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
    Baton__Release r = BATON__RELEASE__INIT;
    reserve(other, ++request);
    r.request = request;
    r.epoch = 1;
    m.m_case = BATON__TO_KVSTORE__M_RELEASE;
    m.release = &r;
    say(other, &m);
}

static void session_owns_reservations(void **state)
{
    static struct client a, b;
    (void)state;
    dial(&a, false);
    dial(&b, false);
    hello(&a);
    hello(&b);
    reserve(&a, 1);
    reserve(&a, 2);
    reserve(&b, 3);
    assert_int_equal(node_counts(&node).writing, 3);
    uint32_t beats = b.n_beats;
    NODE_UNTIL(&node, b.n_beats > beats);
    assert_int_equal(b.n_writing, 3);
    assert_int_equal(b.n_free, node_counts(&node).total - 3);
    bt_rpc_stream_close(a.s, 0, NULL, false); /* the conductor vanishes */
    NODE_UNTIL(&node, node_counts(&node).writing == 1);
    assert_false(b.closed);
    /* b is silent: no heartbeat is sent for it, after two seconds that is its end. */
    for (int i = 0; i < 5 && !b.closed; i++) {
        beat_passes(&b);
    }
    NODE_UNTIL(&node, b.closed);
    assert_int_equal(b.code, BT_GRPC_DEADLINE);
    assert_int_equal(node_counts(&node).writing, 0);
}

static void heartbeats_keep_a_session(void **state)
{
    static struct client a, other;
    (void)state;
    dial(&a, false);
    dial(&other, false);
    hello(&a);
    hello(&other);
    reserve(&a, 1);
    for (int i = 0; i < 6; i++) { /* three seconds */
        say_heartbeat(&a);
        all_is_heard(&other);
        beat_passes(&a);
    }
    assert_false(a.closed);
    assert_int_equal(node_counts(&node).writing, 1);
    assert_true(a.n_beats >= 4);
}

static void garbage_ends_a_session(void **state)
{
    static struct client a;
    (void)state;
    dial(&a, false);
    hello(&a);
    reserve(&a, 1);
    assert_int_equal(bt_rpc_stream_send(a.s, "\xff\xff\xff\xff", 4), BT_OK);
    NODE_UNTIL(&node, a.closed);
    assert_int_equal(a.code, BT_GRPC_INVALID_ARGUMENT);
    assert_int_equal(node_counts(&node).writing, 0);
    dial(&a, false);
    hello(&a); /* the next one is welcome */
    Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
    Baton__SessionHello h = BATON__SESSION_HELLO__INIT;
    m.m_case = BATON__TO_KVSTORE__M_HELLO;
    m.hello = &h;
    say(&a, &m);
    NODE_UNTIL(&node, a.closed);
    assert_int_equal(a.code, BT_GRPC_INVALID_ARGUMENT);
}

/* Puts block b of chain 1 into the index, in a slot of its own; leases as a cached block has. */
static void cache_block(uint32_t b)
{
    struct bt_kv_key k;
    uint32_t slot;
    node_key(1, b, &k);
    assert_int_equal(cache_take(node.cache, 1, &slot), BT_OK);
    bt_pool_crcs_known(node.cache->pool, slot);
    assert_true(cache_seal(node.cache, slot, &k, NODE_BT, b));
    bt_cache_put(node.cache, &slot, 1);
}

/* The client knows of the blocks that are here, and of no others. */
static bool knows_all(const struct client *c)
{
    for (uint32_t b = 0; b < 256; b++) {
        struct bt_kv_key k;
        node_key(1, b, &k);
        if (c->have[b] != (bt_index_find(node.cache->index, &k) != UINT32_MAX)) {
            return false;
        }
    }
    return true;
}

/* Block events are a session's: a stranger gets none, a session one stream, and that ends with it.
 */
static void blocks_need_a_session(void **state)
{
    static struct client s, c, second;
    (void)state;
    cache_block(1);
    dial(&c, true);
    credit(&c, 1);
    NODE_UNTIL(&node, c.closed);
    assert_int_equal(c.code, BT_GRPC_FAILED_PRECONDITION);
    assert_non_null(strstr(c.detail, "SessionHello"));
    dial(&s, false); /* a session without its hello is none either */
    dial(&c, true);
    NODE_UNTIL(&node, c.closed);
    hello(&s);
    dial(&c, true);
    credit(&c, 1);
    NODE_UNTIL(&node, c.n_added == 1);
    dial(&second, true);
    NODE_UNTIL(&node, second.closed);
    assert_int_equal(second.code, BT_GRPC_FAILED_PRECONDITION);
    assert_false(c.closed);
    bt_rpc_stream_close(s.s, 0, NULL, false);
    NODE_UNTIL(&node, c.closed);
}

/* Of another connection, though a session is up. */
static void blocks_need_the_session_of_their_connection(void **state)
{
    static struct client s, c;
    struct bt_rpc_channel *own = channel, *other;
    (void)state;
    dial(&s, false);
    hello(&s);
    assert_int_equal(bt_rpc_channel_create(rpc, target, NULL, &other), BT_OK);
    channel = other;
    dial(&c, true);
    NODE_UNTIL(&node, c.closed);
    assert_int_equal(c.code, BT_GRPC_FAILED_PRECONDITION);
    channel = own;
    bt_rpc_channel_destroy(other);
}

/* Who says nothing on a stream is not kept, nor who gives no credit. */
static void silent_streams_end(void **state)
{
    static struct client s, c, other;
    (void)state;
    dial(&s, false);
    dial(&other, false);
    hello(&s);
    hello(&other);
    dial(&c, true);
    for (int i = 0; i < 40 && !c.closed; i++) { /* twenty seconds */
        say_heartbeat(&s);
        all_is_heard(&other);
        beat_passes(&s);
    }
    assert_int_equal(c.code, BT_GRPC_DEADLINE);
    assert_false(s.closed);
}

static void blocks_follow_credit(void **state)
{
    static struct client s, c, other;
    (void)state;
    dial(&s, false);
    dial(&other, false);
    hello(&s);
    hello(&other);
    for (uint32_t b = 0; b < 10; b++) {
        cache_block(b);
    }
    dial(&c, true);
    node_poll_ms(&node, 100);
    assert_int_equal(c.n_messages, 0); /* no credit, no message */
    credit(&c, 1);
    NODE_UNTIL(&node, c.n_messages == 1);
    assert_int_equal(c.n_resets, 1);
    assert_int_equal(c.n_added, 10);
    for (uint32_t b = 10; b < 60; b++) { /* more than the 32 slots: others are evicted */
        cache_block(b);
    }
    node_poll_ms(&node, 100);
    assert_int_equal(c.n_messages, 1);
    credit(&c, 1000);
    NODE_UNTIL(&node, c.n_added == 60);
    NODE_UNTIL(&node, knows_all(&c));
    assert_true(c.n_removed >= 60 - node_counts(&node).total);
    assert_int_equal(c.gaps, 0);
    assert_int_equal(c.n_resets, 1);
}

static void blocks_overflow_resyncs(void **state)
{
    static struct client s, c, other;
    (void)state;
    dial(&s, false);
    dial(&other, false);
    hello(&s);
    hello(&other);
    dial(&c, true);
    credit(&c, 1);
    NODE_UNTIL(&node, c.n_messages == 1); /* the empty inventory */
    assert_int_equal(c.n_resets, 1);
    assert_int_equal(c.n_added, 0);
    for (uint32_t i = 0; i < BT_BLOCKS_PENDING_MAX + 100; i++) { /* all in one turn, no credit */
        cache_block(i % 200);
        uint32_t slot = node.cache->policy->victim(node.cache->evict, NULL);
        node.cache->policy->drop(node.cache->evict, slot);
        bt_index_remove(node.cache->index, slot);
        bt_pool_free(node.cache->pool, slot);
    }
    for (uint32_t b = 0; b < 7; b++) {
        cache_block(b);
    }
    uint64_t seq = c.next_seq;
    credit(&c, 100);
    NODE_UNTIL(&node, c.n_resets == 2);
    NODE_UNTIL(&node, knows_all(&c));
    assert_int_equal(c.gaps, 0);
    assert_true(c.next_seq > seq + BT_BLOCKS_PENDING_MAX); /* what was dropped is counted */
    assert_true(c.largest <= 65536);
    bt_rpc_stream_close(c.s, 0, NULL, false);
    node_poll_ms(&node, 50);
    cache_block(100); /* nobody listens: no harm */
}

/* Orders of copies are answered whatever they are worth: keys that are none, more blocks than there
 * are slots, a prefix that nobody has. */
static void orders_of_copies_are_answered(void **state)
{
    (void)state;
    struct client c;
    dial(&c, false);
    hello(&c);
    static uint8_t keys[64 * 32];
    const struct {
        size_t len;
        int32_t status;
    } cases[] = {{0, BT_ERR_INVALID},
                 {33, BT_ERR_INVALID},
                 {sizeof(keys), BT_ERR_INVALID}, /* of 32 slots */
                 {64, BT_OK}};
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
        Baton__Replicate r = BATON__REPLICATE__INIT;
        r.id = 1000 + i;
        r.keys.data = keys;
        r.keys.len = cases[i].len;
        m.m_case = BATON__TO_KVSTORE__M_REPLICATE;
        m.replicate = &r;
        say(&c, &m);
        NODE_UNTIL(&node, c.n_replicated == i + 1);
        assert_true(c.replica_id == 1000 + i && c.replica_blocks == 0);
        assert_int_equal(c.status, cases[i].status);
    }
    bt_rpc_stream_close(c.s, 0, NULL, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(session_owns_reservations, setup, teardown),
        cmocka_unit_test_setup_teardown(heartbeats_keep_a_session, setup, teardown),
        cmocka_unit_test_setup_teardown(garbage_ends_a_session, setup, teardown),
        cmocka_unit_test_setup_teardown(blocks_need_a_session, setup, teardown),
        cmocka_unit_test_setup_teardown(blocks_need_the_session_of_their_connection, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(silent_streams_end, setup, teardown),
        cmocka_unit_test_setup_teardown(blocks_follow_credit, setup, teardown),
        cmocka_unit_test_setup_teardown(blocks_overflow_resyncs, setup, teardown),
        cmocka_unit_test_setup_teardown(orders_of_copies_are_answered, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
