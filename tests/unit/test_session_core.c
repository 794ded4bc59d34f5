/* The state machine of a session, alone and in pairs, by a virtual clock: nothing here waits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/rpc/rpc.h"
#include "common/rpc/session_core.h"
#include "common/rpc/session_hello.h"

#define MS     1000000ull
#define SILENT "nothing was heard for 2000 ms"
#define TWICE  "a second hello, or a hello before the other side asked for it"

static const struct bt_rpc_session_rules plain = {
    .tick_ms = 100,
    .backoff_first_ms = 100,
    .backoff_max_ms = 2000,
};
/* As kvstores have it between themselves. */
static const struct bt_rpc_session_rules joining = {
    .prepares = true, .joins = true, .beats_if_quiet = true, .tick_ms = 250};

static uint32_t event(struct bt_rpc_session_core *c, bt_rpc_session_event_t kind, uint64_t now_ns)
{
    return bt_rpc_session_step(c, &(struct bt_rpc_session_event){.kind = kind}, now_ns);
}

static uint32_t message(struct bt_rpc_session_core *c, bool hello, uint64_t now_ns)
{
    return bt_rpc_session_step(
        c, &(struct bt_rpc_session_event){.kind = BT_RPC_SESSION_EV_MESSAGE, .hello = hello},
        now_ns);
}

static uint32_t checked(struct bt_rpc_session_core *c, const char *why, uint64_t now_ns)
{
    return bt_rpc_session_step(
        c, &(struct bt_rpc_session_event){.kind = BT_RPC_SESSION_EV_HELLO, .why = why}, now_ns);
}

static uint32_t fault(struct bt_rpc_session_core *c, bt_rpc_session_event_t kind, const char *why,
                      uint64_t now_ns)
{
    return bt_rpc_session_step(
        c,
        &(struct bt_rpc_session_event){
            .kind = kind, .cause = BT_RPC_SESSION_BROKEN, .code = BT_GRPC_UNAVAILABLE, .why = why},
        now_ns);
}

static void assert_end(const struct bt_rpc_session_core *c, bt_rpc_session_cause_t cause, int code,
                       const char *why, bool was_up)
{
    assert_int_equal(c->end.cause, cause);
    assert_int_equal(c->end.code, code);
    assert_string_equal(c->end.why, why);
    assert_int_equal(c->end.was_up, was_up);
}

/* A listener that is up at now_ns. */
static void listener_up(struct bt_rpc_session_core *c, uint64_t now_ns)
{
    bt_rpc_session_core_init(c, &plain, false);
    assert_int_equal(event(c, BT_RPC_SESSION_EV_OPEN, now_ns), 0);
    assert_int_equal(message(c, true, now_ns), BT_RPC_SESSION_DO_CHECK);
    assert_int_equal(checked(c, NULL, now_ns), BT_RPC_SESSION_DO_HELLO | BT_RPC_SESSION_DO_UP);
    assert_int_equal(c->state, BT_RPC_SESSION_UP);
}

static void dialer_up(struct bt_rpc_session_core *c, uint64_t now_ns)
{
    assert_int_equal(event(c, BT_RPC_SESSION_EV_OPEN, now_ns), 0);
    assert_int_equal(c->state, BT_RPC_SESSION_PREPARING);
    assert_int_equal(event(c, BT_RPC_SESSION_EV_READY, now_ns), BT_RPC_SESSION_DO_HELLO);
    assert_int_equal(c->state, BT_RPC_SESSION_AWAITING);
    assert_int_equal(message(c, true, now_ns), BT_RPC_SESSION_DO_CHECK);
    assert_int_equal(checked(c, NULL, now_ns), BT_RPC_SESSION_DO_UP);
}

/* ---- hellos ---- */

static void test_hello(void **state)
{
    (void)state;
    struct bt_rpc_session_core l, d;
    listener_up(&l, 5 * MS);
    assert_int_equal(message(&l, false, 6 * MS), BT_RPC_SESSION_DO_DELIVER);
    bt_rpc_session_core_init(&d, &plain, true);
    dialer_up(&d, 5 * MS);
    assert_int_equal(event(&d, BT_RPC_SESSION_EV_READY, 6 * MS), 0); /* it was said */
    assert_int_equal(message(&d, false, 7 * MS), BT_RPC_SESSION_DO_DELIVER);
}

/* A listener whose hello carries what takes time to make, and a path that is proved before the
 * peer's hello comes. */
static void test_prepares_and_joins(void **state)
{
    (void)state;
    struct bt_rpc_session_core c;
    for (int early = 0; early < 2; early++) {
        bt_rpc_session_core_init(&c, &joining, false);
        assert_int_equal(event(&c, BT_RPC_SESSION_EV_OPEN, MS), 0);
        assert_int_equal(message(&c, true, MS), BT_RPC_SESSION_DO_CHECK);
        if (early) { /* while the hello is being checked */
            assert_int_equal(event(&c, BT_RPC_SESSION_EV_READY, MS), 0);
            assert_int_equal(checked(&c, NULL, MS), BT_RPC_SESSION_DO_HELLO);
        } else {
            assert_int_equal(checked(&c, NULL, MS), 0);
            assert_int_equal(c.state, BT_RPC_SESSION_PREPARING);
            assert_int_equal(message(&c, true, MS), BT_RPC_SESSION_DO_TURN); /* a second one */
            assert_int_equal(c.end.cause, BT_RPC_SESSION_VIOLATION);
            assert_string_equal(c.end.why, TWICE);
            continue;
        }
        assert_int_equal(c.state, BT_RPC_SESSION_JOINING);
        assert_int_equal(message(&c, false, MS), BT_RPC_SESSION_DO_DELIVER);
        assert_int_equal(event(&c, BT_RPC_SESSION_EV_BEAT, MS), BT_RPC_SESSION_DO_BEAT);
        assert_int_equal(event(&c, BT_RPC_SESSION_EV_JOINED, MS), BT_RPC_SESSION_DO_UP);
        assert_int_equal(event(&c, BT_RPC_SESSION_EV_JOINED, MS), 0);
    }
    bt_rpc_session_core_init(&c, &joining, true);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_OPEN, MS), 0);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_READY, MS), BT_RPC_SESSION_DO_HELLO);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_JOINED, MS), 0); /* overtook the hello */
    assert_int_equal(c.state, BT_RPC_SESSION_AWAITING);
    assert_int_equal(message(&c, true, MS), BT_RPC_SESSION_DO_CHECK);
    assert_int_equal(checked(&c, NULL, MS), BT_RPC_SESSION_DO_UP);
}

static void test_refused(void **state)
{
    (void)state;
    struct bt_rpc_session_core c;
    bt_rpc_session_core_init(&c, &plain, true);
    (void)event(&c, BT_RPC_SESSION_EV_OPEN, MS);
    (void)event(&c, BT_RPC_SESSION_EV_READY, MS);
    (void)message(&c, true, MS);
    assert_int_equal(checked(&c, "another cluster", MS), BT_RPC_SESSION_DO_TURN);
    assert_int_equal(c.state, BT_RPC_SESSION_ENDING);
    assert_int_equal(message(&c, false, MS), 0); /* dropped */
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, MS + 9000 * MS), 0);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_TURN, MS),
                     BT_RPC_SESSION_DO_END | BT_RPC_SESSION_DO_REDIAL);
    assert_int_equal(c.state, BT_RPC_SESSION_IDLE);
    assert_int_equal(c.wait_ms, 2000); /* another try will hardly help */
    assert_end(&c, BT_RPC_SESSION_REFUSED, BT_GRPC_FAILED_PRECONDITION, "another cluster", false);
    dialer_up(&c, 3000 * MS); /* but it is made */
    assert_int_equal(c.backoff.failures, 0);
}

static void test_out_of_turn(void **state)
{
    (void)state;
    struct bt_rpc_session_core c;
    bt_rpc_session_core_init(&c, &plain, false);
    (void)event(&c, BT_RPC_SESSION_EV_OPEN, MS);
    assert_int_equal(message(&c, false, MS), BT_RPC_SESSION_DO_TURN);
    assert_end(&c, BT_RPC_SESSION_VIOLATION, BT_GRPC_INVALID_ARGUMENT, "a message before the hello",
               false);
    listener_up(&c, MS);
    assert_int_equal(message(&c, true, MS), BT_RPC_SESSION_DO_TURN);
    assert_end(&c, BT_RPC_SESSION_VIOLATION, BT_GRPC_INVALID_ARGUMENT, TWICE, true);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_TURN, MS) & BT_RPC_SESSION_DO_END,
                     BT_RPC_SESSION_DO_END);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_TURN, MS), 0);
}

/* What two daemons compare, in the order of gravity. */
static void test_compare(void **state)
{
    (void)state;
    struct bt_kv_key root = {{7}}, other = {{8}};
    const struct bt_rpc_identity me = {.cluster = "c",
                                       .name = "kvstore-n1",
                                       .node = "n1",
                                       .incarnation = 5,
                                       .root = &root,
                                       .layout_id = 77};
    struct bt_rpc_identity you = me;
    Baton__SessionHello m;
    you.incarnation = 6;
    you.name = "conductor-n2";
    bt_rpc_hello_fill(&you, 5, &m);
    struct bt_rpc_hello h = bt_rpc_hello_read(&m);
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 6, true), BT_HELLO_FITS);
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 0, true), BT_HELLO_FITS);
    h.root_key.data = other.b;
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 6, true), BT_HELLO_ROOT);
    h.root_key.data = root.b;
    h.root_key.len = 31;
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 6, true), BT_HELLO_ROOT);
    h.layout_id = 78;
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 6, true), BT_HELLO_LAYOUT);
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 7, true), BT_HELLO_INCARNATION);
    h.expect_incarnation = 4;
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 7, true), BT_HELLO_EXPECTED);
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 7, false), BT_HELLO_CERTIFICATE);
    h.name = "";
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 7, false), BT_HELLO_NAME);
    h.cluster = "d";
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 7, false), BT_HELLO_CLUSTER);
    h.version = h.oldest = BT_RPC_SESSION_VERSION + 1;
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 7, false), BT_HELLO_VERSION);
}

/* Two releases talk if one version is within the ranges of both, whichever is newer. */
static void test_versions(void **state)
{
    (void)state;
    struct bt_kv_key root = {{7}};
    const struct bt_rpc_identity me = {.cluster = "c", .name = "kvstore-n1", .root = &root};
    const uint32_t newest = BT_RPC_SESSION_VERSION, oldest = BT_RPC_SESSION_OLDEST;
    const struct {
        uint32_t version, oldest;
        bt_hello_fault_t fault;
        const char *says;
    } cases[] = {
        {newest, oldest, BT_HELLO_FITS, NULL},
        {newest, 0, BT_HELLO_FITS, NULL},
        {newest + 1, newest, BT_HELLO_FITS, NULL}, /* N+1 speaks N, too */
        {newest + 7, 1, BT_HELLO_FITS, NULL},
        {oldest, 0, BT_HELLO_FITS, NULL},
        {newest + 1, 0, BT_HELLO_VERSION, "session version 2,"},
        {newest + 2, newest + 1, BT_HELLO_VERSION, "session version 2 to 3,"},
        {newest + 1, newest + 9, BT_HELLO_VERSION, "session version 2,"},
        {oldest - 1, 0, BT_HELLO_VERSION, "session version 0,"},
        {oldest - 1, newest, BT_HELLO_VERSION, "session version 0,"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        const struct bt_rpc_hello h = {.version = cases[i].version,
                                       .oldest = cases[i].oldest,
                                       .cluster = "c",
                                       .name = "kvstore-n2",
                                       .release = "0.9.3",
                                       .root_key = {sizeof(root.b), root.b}};
        char buf[BT_RPC_SESSION_WHY];
        assert_int_equal(bt_rpc_hello_compare(&me, &h, 0, true), cases[i].fault);
        const char *why = bt_rpc_hello_why(cases[i].fault, &me, &h, 0, buf, sizeof(buf));
        assert_true((why == NULL) == (cases[i].says == NULL));
        if (why != NULL) {
            assert_non_null(strstr(why, cases[i].says));
            assert_non_null(strstr(why, "kvstore-n2 (release 0.9.3)"));
            assert_non_null(strstr(why, bt_release()));
        }
    }
}

/* Every fault has a text with both names, both values where there are two, and what to do. */
static void test_why(void **state)
{
    (void)state;
    static const struct {
        bt_hello_fault_t fault;
        const char *has[5];
    } cases[] = {
        {BT_HELLO_VERSION, {"version 2", "version 1", "update the older"}},
        {BT_HELLO_CLUSTER, {"\"blue\"", "\"red\"", "cluster.name", "set the same"}},
        {BT_HELLO_NAME, {"empty name", "the same release"}},
        {BT_HELLO_CERTIFICATE, {"conductor-n2", "install the certificate"}},
        {BT_HELLO_EXPECTED, {"incarnation 0000000000000004", "0000000000000005", "wait"}},
        {BT_HELLO_INCARNATION, {"incarnation 0000000000000007", "0000000000000006", "wait"}},
        {BT_HELLO_LAYOUT,
         {"layout 000000000000004e", "000000000000004d", "kv.block_tokens", "model.kv_dtype"}},
        {BT_HELLO_ROOT, {"root keys", "engine.deterministic", "kv.salt_file"}},
    };
    struct bt_kv_key root = {{7}}, other = {{8}};
    const struct bt_rpc_identity me = {
        .cluster = "red", .name = "kvstore-n1", .incarnation = 5, .root = &root, .layout_id = 77};
    const struct bt_rpc_hello h = {.version = 2,
                                   .cluster = "blue",
                                   .name = "conductor-n2",
                                   .incarnation = 6,
                                   .expect_incarnation = 4,
                                   .root_key = {sizeof(other.b), other.b},
                                   .layout_id = 78};
    char buf[BT_RPC_SESSION_WHY];
    assert_null(bt_rpc_hello_why(BT_HELLO_FITS, &me, &h, 7, buf, sizeof(buf)));
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        assert_int_equal(cases[i].fault, BT_HELLO_FITS + 1 + i);
        const char *why = bt_rpc_hello_why(cases[i].fault, &me, &h, 7, buf, sizeof(buf));
        assert_non_null(strstr(why, "kvstore-n1"));
        for (size_t j = 0; j < 5 && cases[i].has[j] != NULL; j++) {
            assert_non_null(strstr(why, cases[i].has[j]));
        }
    }
    assert_non_null(bt_rpc_hello_why(BT_HELLO_ROOT + 1, &me, &h, 7, buf, sizeof(buf)));
}

/* Whatever a peer says, no text is cut. */
static void test_why_is_whole(void **state)
{
    (void)state;
    char name[256], buf[BT_RPC_SESSION_WHY];
    struct bt_kv_key root = {{7}};
    memset(name, 'x', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    const struct bt_rpc_identity me = {.cluster = name, .name = name, .root = &root};
    const struct bt_rpc_hello h = {.version = UINT32_MAX,
                                   .oldest = UINT32_MAX - 1,
                                   .cluster = name,
                                   .name = name,
                                   .release = name};
    for (int f = BT_HELLO_VERSION; f <= BT_HELLO_ROOT; f++) {
        assert_in_range(strlen(bt_rpc_hello_why(f, &me, &h, 7, buf, sizeof(buf))), 1,
                        sizeof(buf) - 2);
    }
}

/* ---- heartbeats and silence ---- */

static void test_silence(void **state)
{
    (void)state;
    struct bt_rpc_session_core c;
    listener_up(&c, 10 * MS);
    uint64_t now = 10 * MS;
    for (; now <= 2010 * MS; now += 100 * MS) {
        assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, now) & BT_RPC_SESSION_DO_END, 0);
    }
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, now),
                     BT_RPC_SESSION_DO_END | BT_RPC_SESSION_DO_REDIAL);
    assert_end(&c, BT_RPC_SESSION_SILENT, BT_GRPC_DEADLINE, SILENT, true);
    /* Before the hellos, too: who takes the connection and says nothing. */
    bt_rpc_session_core_init(&c, &plain, true);
    (void)event(&c, BT_RPC_SESSION_EV_OPEN, 0);
    (void)event(&c, BT_RPC_SESSION_EV_READY, 0);
    for (now = 0; now <= 2000 * MS; now += 500 * MS) {
        assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, now), 0);
    }
    assert_true((event(&c, BT_RPC_SESSION_EV_TICK, now) & BT_RPC_SESSION_DO_END) != 0);
    assert_end(&c, BT_RPC_SESSION_SILENT, BT_GRPC_DEADLINE, SILENT, false);
}

/* A heartbeat each 500 ms; three in a row may be lost, and one that is late counts. */
static void test_beats(void **state)
{
    (void)state;
    struct bt_rpc_session_core c;
    listener_up(&c, 100 * MS);
    uint64_t heard = 100 * MS, beats = 0;
    for (uint64_t now = 100 * MS; now < 60100 * MS; now += 100 * MS) {
        uint32_t todo = event(&c, BT_RPC_SESSION_EV_TICK, now);
        assert_int_equal(todo & BT_RPC_SESSION_DO_END, 0);
        beats += (todo & BT_RPC_SESSION_DO_BEAT) != 0;
        if (now - heard >= 1990 * MS) {
            assert_int_equal(message(&c, false, now), BT_RPC_SESSION_DO_DELIVER);
            heard = now;
        }
    }
    assert_int_equal(beats, 120);
    assert_int_equal(c.seq, 120);
    /* One that is asked for puts the next one off. */
    (void)message(&c, false, 60150 * MS);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_BEAT, 60150 * MS), BT_RPC_SESSION_DO_BEAT);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, 60200 * MS), 0);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, 60600 * MS), BT_RPC_SESSION_DO_BEAT);
    /* Whoever only beats when it is quiet sends none beside other messages. */
    bt_rpc_session_core_init(&c, &joining, true);
    (void)event(&c, BT_RPC_SESSION_EV_OPEN, 1000 * MS);
    (void)event(&c, BT_RPC_SESSION_EV_READY, 1000 * MS);
    (void)event(&c, BT_RPC_SESSION_EV_JOINED, 1000 * MS);
    (void)message(&c, true, 1000 * MS);
    (void)checked(&c, NULL, 1000 * MS);
    for (uint64_t now = 1000 * MS; now <= 2250 * MS; now += 250 * MS) {
        assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, now), 0);
        (void)event(&c, BT_RPC_SESSION_EV_SENT, now);
    }
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, 2500 * MS), 0);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, 2750 * MS), BT_RPC_SESSION_DO_BEAT);
}

/* This process stood still: the peer's messages may lie unread, so it gets a new start. */
static void test_own_standstill(void **state)
{
    (void)state;
    struct bt_rpc_session_core c;
    listener_up(&c, 0);
    (void)event(&c, BT_RPC_SESSION_EV_TICK, 100 * MS);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, 9000 * MS) & BT_RPC_SESSION_DO_END, 0);
    for (uint64_t now = 9500 * MS; now <= 11000 * MS; now += 500 * MS) {
        assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, now) & BT_RPC_SESSION_DO_END, 0);
    }
    assert_true((event(&c, BT_RPC_SESSION_EV_TICK, 11100 * MS) & BT_RPC_SESSION_DO_END) != 0);
    /* A look that is one second late is an ordinary one. */
    listener_up(&c, 0);
    (void)event(&c, BT_RPC_SESSION_EV_TICK, 1000 * MS);
    (void)event(&c, BT_RPC_SESSION_EV_TICK, 2000 * MS);
    assert_true((event(&c, BT_RPC_SESSION_EV_TICK, 3000 * MS) & BT_RPC_SESSION_DO_END) != 0);
}

/* ---- ends ---- */

static void test_queue_full(void **state)
{
    (void)state;
    struct bt_rpc_session_core c;
    listener_up(&c, 0);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_UNSENT, MS), BT_RPC_SESSION_DO_TURN);
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_UNSENT, MS), 0); /* told once */
    assert_int_equal(event(&c, BT_RPC_SESSION_EV_BEAT, MS), 0);
    /* The connection breaks as well before the turn: the first fault counts. */
    assert_true((fault(&c, BT_RPC_SESSION_EV_CLOSED, "reset", MS) & BT_RPC_SESSION_DO_END) != 0);
    assert_end(&c, BT_RPC_SESSION_FULL, BT_GRPC_EXHAUSTED,
               "the queue to the peer is full, because the peer reads too slowly", true);
    assert_int_equal(fault(&c, BT_RPC_SESSION_EV_CLOSED, "reset", MS), 0);
    assert_int_equal(fault(&c, BT_RPC_SESSION_EV_END, "stop", MS), 0);
}

static void test_backoff(void **state)
{
    (void)state;
    struct bt_rpc_session_core c;
    static const uint32_t want[] = {100, 200, 400, 800, 1600, 2000, 2000};
    bt_rpc_session_core_init(&c, &plain, true);
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < BT_ARRAY_LEN(want); i++) {
            (void)event(&c, BT_RPC_SESSION_EV_OPEN, 0);
            (void)event(&c, BT_RPC_SESSION_EV_READY, 0);
            assert_int_equal(fault(&c, BT_RPC_SESSION_EV_CLOSED, "refused", 0),
                             BT_RPC_SESSION_DO_END | BT_RPC_SESSION_DO_REDIAL);
            assert_int_equal(c.wait_ms, want[i]);
        }
        dialer_up(&c, 0);
        c.backoff.failures = 0;
        assert_true((fault(&c, BT_RPC_SESSION_EV_CLOSED, "", 0) & BT_RPC_SESSION_DO_REDIAL) != 0);
        assert_int_equal(c.wait_ms, 100);
        c.backoff.failures = 0;
    }
    for (uint32_t n = 0; n < 100; n++) { /* and never overflows */
        assert_in_range(bt_rpc_backoff_next(&c.backoff), 100, 2000);
    }
}

/* ---- two daemons ---- */

/* A conductor that dials, a worker that listens, and messages that take LATENCY between them. A
 * worker keeps every session that it has accepted until that ends. */
#define LATENCY  (3 * MS)
#define SESSIONS 64
#define FLIGHT   4096

struct pair;
struct side {
    struct bt_rpc_session_core c;
    struct pair *p;
    uint32_t connection; /* 0: none */
    int ups, ends;
};
struct flight {
    uint64_t at_ns;
    uint32_t connection;
    bool to_dialer, hello, closed;
    uint64_t incarnation; /* of who says the hello */
};
struct pair {
    uint64_t now_ns, redial_ns, tick_ns;
    uint64_t incarnation, expected; /* of the worker; what etcd says of it */
    bool mute, deaf;                /* the worker says nothing; hears nothing */
    bool lost;                      /* the network drops everything */
    uint32_t connections;
    struct side d, l[SESSIONS]; /* l[connection % SESSIONS] */
    struct flight flight[FLIGHT];
    uint32_t n_flight;
};

static void fly(struct pair *p, bool to_dialer, uint32_t connection, bool hello, bool closed)
{
    assert_true(p->n_flight < FLIGHT);
    if (!p->lost) {
        p->flight[p->n_flight++] = (struct flight){.at_ns = p->now_ns + LATENCY,
                                                   .connection = connection,
                                                   .to_dialer = to_dialer,
                                                   .hello = hello,
                                                   .closed = closed,
                                                   .incarnation = p->incarnation};
    }
}

static void act(struct side *s, uint32_t todo)
{
    struct pair *p = s->p;
    bool dialer = s == &p->d, quiet = p->mute && !dialer;
    if (todo & BT_RPC_SESSION_DO_HELLO && !quiet) {
        fly(p, !dialer, s->connection, true, false);
    }
    if (todo & BT_RPC_SESSION_DO_BEAT && !quiet) {
        fly(p, !dialer, s->connection, false, false);
    }
    if (todo & BT_RPC_SESSION_DO_UP) {
        s->ups++;
    }
    if (todo & BT_RPC_SESSION_DO_TURN) {
        todo |= event(&s->c, BT_RPC_SESSION_EV_TURN, p->now_ns);
    }
    if (todo & BT_RPC_SESSION_DO_END) {
        s->ends++;
        fly(p, !dialer, s->connection, false, true);
        s->connection = 0;
    }
    if (todo & BT_RPC_SESSION_DO_REDIAL && dialer) {
        p->redial_ns = p->now_ns + s->c.wait_ms * MS;
    }
}

static void dial(struct pair *p)
{
    uint32_t n = ++p->connections;
    struct side *l = &p->l[n % SESSIONS];
    assert_int_equal(l->connection, 0);
    p->redial_ns = UINT64_MAX;
    *l = (struct side){.p = p, .connection = n};
    bt_rpc_session_core_init(&l->c, &plain, false);
    act(l, event(&l->c, BT_RPC_SESSION_EV_OPEN, p->now_ns));
    p->d.connection = n;
    act(&p->d, event(&p->d.c, BT_RPC_SESSION_EV_OPEN, p->now_ns));
    act(&p->d, event(&p->d.c, BT_RPC_SESSION_EV_READY, p->now_ns));
}

static void land(struct pair *p, const struct flight *f)
{
    struct side *s = f->to_dialer ? &p->d : &p->l[f->connection % SESSIONS];
    if (s->connection != f->connection || (p->deaf && !f->to_dialer)) {
        return;
    }
    if (f->closed) {
        act(s, fault(&s->c, BT_RPC_SESSION_EV_CLOSED, "cancelled", p->now_ns));
        return;
    }
    uint32_t todo = message(&s->c, f->hello, p->now_ns);
    if (todo & BT_RPC_SESSION_DO_CHECK) {
        bool fits = !f->to_dialer || f->incarnation == p->expected;
        todo = checked(&s->c, fits ? NULL : "another incarnation", p->now_ns);
    }
    act(s, todo);
}

static void pair_run(struct pair *p, uint64_t ms)
{
    for (uint64_t until = p->now_ns + ms * MS; p->now_ns < until; p->now_ns += MS) {
        uint32_t n = 0, all = p->n_flight;
        for (uint32_t i = 0; i < p->n_flight; i++) { /* grows meanwhile */
            struct flight f = p->flight[i];
            if (i < all && f.at_ns <= p->now_ns) {
                land(p, &f);
            } else {
                p->flight[n++] = f;
            }
        }
        p->n_flight = n;
        if (p->redial_ns <= p->now_ns) {
            dial(p);
        }
        if (p->now_ns < p->tick_ns) {
            continue;
        }
        p->tick_ns = p->now_ns + 100 * MS;
        act(&p->d, event(&p->d.c, BT_RPC_SESSION_EV_TICK, p->now_ns));
        for (int i = 0; i < SESSIONS; i++) {
            if (p->l[i].connection != 0) {
                act(&p->l[i], event(&p->l[i].c, BT_RPC_SESSION_EV_TICK, p->now_ns));
            }
        }
    }
}

static struct pair *pair_new(void)
{
    struct pair *p = calloc(1, sizeof(*p));
    assert_non_null(p);
    p->now_ns = 1000 * MS;
    p->incarnation = p->expected = 11;
    p->d.p = p;
    bt_rpc_session_core_init(&p->d.c, &plain, true);
    dial(p);
    return p;
}

static bool pair_up(const struct pair *p)
{
    return p->d.c.state == BT_RPC_SESSION_UP &&
           p->l[p->d.connection % SESSIONS].c.state == BT_RPC_SESSION_UP;
}

/* It stays up for an hour, and a network that loses all for 1.9 s does not end it. */
static void test_pair_lives(void **state)
{
    (void)state;
    struct pair *p = pair_new();
    pair_run(p, 10);
    assert_true(pair_up(p));
    pair_run(p, 3600 * 1000);
    p->lost = true;
    pair_run(p, 1400);
    p->lost = false;
    pair_run(p, 5000);
    assert_true(pair_up(p) && p->connections == 1 && p->d.ups == 1 && p->d.ends == 0);
    assert_in_range(p->d.c.seq, 7210, 7215);
    free(p);
}

/* The worker hangs: both ends die by silence, each once; it is dialled again and met when it
 * goes on. */
static void test_pair_hangs(void **state)
{
    (void)state;
    struct pair *p = pair_new();
    pair_run(p, 1000);
    p->mute = p->deaf = true; /* it has been heard in the last 500 ms */
    pair_run(p, 1400);
    assert_int_equal(p->d.ends, 0);
    pair_run(p, 800);
    assert_int_equal(p->d.ends, 1);
    assert_end(&p->d.c, BT_RPC_SESSION_SILENT, BT_GRPC_DEADLINE, SILENT, true);
    pair_run(p, 20000); /* it takes connections, and says no hello: silent again and again */
    assert_true(p->d.ups == 1 && p->connections >= 5);
    p->mute = p->deaf = false;
    pair_run(p, 5000);
    assert_true(pair_up(p) && p->d.ups == 2);
    free(p);
}

/* The worker's process ends and another one takes its port. Until etcd names the new incarnation it
 * is refused; then it is met. */
static void test_peer_restarts(void **state)
{
    (void)state;
    struct pair *p = pair_new();
    pair_run(p, 1000);
    struct side *l = &p->l[1];
    act(l, fault(&l->c, BT_RPC_SESSION_EV_END, "killed", p->now_ns));
    p->incarnation = 12;
    pair_run(p, 9000);
    assert_true(p->d.ups == 1 && p->d.ends >= 4 && p->d.ends <= 6); /* about every 2 s */
    assert_int_equal(p->d.c.end.cause, BT_RPC_SESSION_REFUSED);
    p->expected = 12;
    pair_run(p, 2100);
    assert_true(pair_up(p) && p->d.ups == 2);
    assert_int_equal(p->d.ends, (int)p->connections - 1);
    free(p);
}

/* The network is cut so that only the conductor finds out. Its new session and the old one, which
 * the worker still believes in, are two sessions of one peer: they do not touch each other, and the
 * old one ends by silence, once. */
static void test_two_sessions_of_one_peer(void **state)
{
    (void)state;
    struct pair *p = pair_new();
    pair_run(p, 1000);
    p->lost = true;
    act(&p->d, fault(&p->d.c, BT_RPC_SESSION_EV_CLOSED, "reset", p->now_ns));
    p->lost = false;
    pair_run(p, 500);
    assert_int_equal(p->connections, 2);
    assert_true(pair_up(p));
    assert_int_equal(p->l[1].c.state, BT_RPC_SESSION_UP);
    pair_run(p, 2500);
    assert_true(pair_up(p));
    assert_int_equal(p->l[1].c.state, BT_RPC_SESSION_IDLE);
    assert_true(p->l[1].ends == 1 && p->l[2].ends == 0 && p->d.ends == 1);
    /* A user that wants the newer alone ends the older at once (kvstores do). */
    p->lost = true;
    act(&p->d, fault(&p->d.c, BT_RPC_SESSION_EV_CLOSED, "reset", p->now_ns));
    p->lost = false;
    pair_run(p, 500);
    struct side *old = &p->l[2];
    act(old, fault(&old->c, BT_RPC_SESSION_EV_END, "replaced", p->now_ns));
    pair_run(p, 5000);
    assert_true(pair_up(p) && old->ends == 1 && p->connections == 3 && p->l[3].ends == 0);
    free(p);
}

/* ---- every order of events ---- */

/* Whatever comes: each attempt ends at most once and, if it was told UP, with was_up; nothing is
 * said before its turn, and nothing at all once a fault is known. */
static void random_life(uint32_t seed, const struct bt_rpc_session_rules *rules, bool dialer)
{
    struct bt_rpc_session_core c;
    unsigned rnd = seed;
    uint64_t now = MS, seq = 0;
    bool open = false, hello = false, up = false, check = false, doomed = false;
    bt_rpc_session_core_init(&c, rules, dialer);
    for (int i = 0; i < 400; i++) {
        bt_rpc_session_event_t kind = (bt_rpc_session_event_t)(rand_r(&rnd) % 13);
        if ((kind == BT_RPC_SESSION_EV_OPEN) == open ||
            (kind == BT_RPC_SESSION_EV_HELLO) != (check && !doomed)) {
            continue; /* the caller's duty */
        }
        struct bt_rpc_session_event e = {.kind = kind,
                                         .hello = rand_r(&rnd) % 2,
                                         .cause = BT_RPC_SESSION_BROKEN,
                                         .code = 14,
                                         .why = rand_r(&rnd) % 4 == 0 ? "x" : NULL};
        now += (uint64_t)(rand_r(&rnd) % 600) * MS;
        uint32_t todo = bt_rpc_session_step(&c, &e, now);
        check = false;
        if (kind == BT_RPC_SESSION_EV_OPEN) {
            open = true;
            hello = up = doomed = false;
        }
        assert_true(!doomed ||
                    (todo & ~(uint32_t)(BT_RPC_SESSION_DO_END | BT_RPC_SESSION_DO_REDIAL)) == 0);
        if (todo & BT_RPC_SESSION_DO_HELLO) {
            assert_false(hello);
            hello = true;
        }
        if (todo & BT_RPC_SESSION_DO_UP) {
            assert_true(hello && !up && (!rules->joins || c.joined));
            up = true;
        }
        if (todo & BT_RPC_SESSION_DO_BEAT) {
            assert_true(hello && c.heard && c.seq == ++seq);
        }
        if (todo & BT_RPC_SESSION_DO_DELIVER) {
            assert_true(c.heard);
        }
        check = (todo & BT_RPC_SESSION_DO_CHECK) != 0;
        doomed = doomed || (todo & BT_RPC_SESSION_DO_TURN) != 0;
        if (todo & BT_RPC_SESSION_DO_END) {
            assert_true(open && c.state == BT_RPC_SESSION_IDLE && c.end.was_up == up);
            assert_int_equal((todo & BT_RPC_SESSION_DO_REDIAL) != 0, rules->backoff_first_ms != 0);
            open = false;
        }
        assert_int_equal(c.state == BT_RPC_SESSION_IDLE, !open);
        assert_int_equal(c.state == BT_RPC_SESSION_UP, open && up && !doomed);
    }
}

static void test_random(void **state)
{
    (void)state;
    for (uint32_t seed = 1; seed <= 20000; seed++) {
        random_life(seed, seed % 2 ? &plain : &joining, seed % 4 < 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hello),
        cmocka_unit_test(test_prepares_and_joins),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_out_of_turn),
        cmocka_unit_test(test_compare),
        cmocka_unit_test(test_versions),
        cmocka_unit_test(test_silence),
        cmocka_unit_test(test_beats),
        cmocka_unit_test(test_own_standstill),
        cmocka_unit_test(test_queue_full),
        cmocka_unit_test(test_backoff),
        cmocka_unit_test(test_pair_lives),
        cmocka_unit_test(test_pair_hangs),
        cmocka_unit_test(test_peer_restarts),
        cmocka_unit_test(test_two_sessions_of_one_peer),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_why),
        cmocka_unit_test(test_why_is_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
