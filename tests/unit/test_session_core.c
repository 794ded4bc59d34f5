/* The state machine of a session by a virtual clock: nothing here waits. */
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

#define MS 1000000ull

static const struct bt_rpc_session_rules plain = {
    .tick_ms = 100,
    .backoff_first_ms = 100,
    .backoff_max_ms = 2000,
    .silent = "silent",
    .silent_code = BT_GRPC_DEADLINE,
    .full = "full",
    .full_code = BT_GRPC_EXHAUSTED,
    .early = "early",
    .early_code = BT_GRPC_FAILED_PRECONDITION,
    .twice = "twice",
    .twice_code = BT_GRPC_FAILED_PRECONDITION,
};
/* As kvstores have it between themselves. */
static const struct bt_rpc_session_rules joining = {.prepares = true,
                                                    .joins = true,
                                                    .beats_if_quiet = true,
                                                    .tick_ms = 250,
                                                    .silent = "silent",
                                                    .full = "full",
                                                    .early = "early",
                                                    .twice = "twice"};

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
            assert_string_equal(c.end.why, "twice");
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
    assert_end(&c, BT_RPC_SESSION_VIOLATION, BT_GRPC_FAILED_PRECONDITION, "early", false);
    listener_up(&c, MS);
    assert_int_equal(message(&c, true, MS), BT_RPC_SESSION_DO_TURN);
    assert_end(&c, BT_RPC_SESSION_VIOLATION, BT_GRPC_FAILED_PRECONDITION, "twice", true);
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
    h.cluster = "d";
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 7, false), BT_HELLO_CLUSTER);
    h.version = 2;
    assert_int_equal(bt_rpc_hello_compare(&me, &h, 7, false), BT_HELLO_VERSION);
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
    assert_end(&c, BT_RPC_SESSION_SILENT, BT_GRPC_DEADLINE, "silent", true);
    /* Before the hellos, too: who takes the connection and says nothing. */
    bt_rpc_session_core_init(&c, &plain, true);
    (void)event(&c, BT_RPC_SESSION_EV_OPEN, 0);
    (void)event(&c, BT_RPC_SESSION_EV_READY, 0);
    for (now = 0; now <= 2000 * MS; now += 500 * MS) {
        assert_int_equal(event(&c, BT_RPC_SESSION_EV_TICK, now), 0);
    }
    assert_true((event(&c, BT_RPC_SESSION_EV_TICK, now) & BT_RPC_SESSION_DO_END) != 0);
    assert_end(&c, BT_RPC_SESSION_SILENT, BT_GRPC_DEADLINE, "silent", false);
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
    assert_end(&c, BT_RPC_SESSION_FULL, BT_GRPC_EXHAUSTED, "full", true);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hello),      cmocka_unit_test(test_prepares_and_joins),
        cmocka_unit_test(test_refused),    cmocka_unit_test(test_out_of_turn),
        cmocka_unit_test(test_compare),    cmocka_unit_test(test_silence),
        cmocka_unit_test(test_beats),      cmocka_unit_test(test_own_standstill),
        cmocka_unit_test(test_queue_full), cmocka_unit_test(test_backoff),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
