/* Sessions between two wires: who is refused, when one ends and is made again, and what becomes of
 * its flows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <arpa/inet.h>
#include <cmocka.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kvstore/wire/wx_child.h"
#include "tests/unit/hold_port.h"
#include "tests/unit/virtual_clock.h"
#include "wire_pair.h"

/* The cluster says that a peer is gone: its flows end, others may be opened to it again. */
static void test_a_peer_that_is_gone(void **state)
{
    struct wp_sink k, waits;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 1, 96, 16);
    wp_raise(A, s, 2);
    wp_pull(&P, &k, s, 0);
    WAIT_FOR(&P, bt_flow_read(&k.word, 1) == 2);
    bt_wire_peer_down(B->wire, A->name, A->incarnation + 1); /* another one of that name */
    bt_wire_peer_down(B->wire, B->name, A->incarnation);
    assert_int_equal(k.n_failed, 0);
    bt_wire_peer_down(B->wire, A->name, A->incarnation);
    WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 1);
    assert_int_equal(k.failed, BT_ERR_PEER_LOST);
    assert_non_null(strstr(k.why, "has left the cluster"));
    assert_int_equal(s->ended, BT_ERR_PEER_LOST);
    assert_true(wp_metric(B, "baton_kv_peer_sessions_lost_total") == 1);
    WAIT_FOR(&P, wp_metric(A, "baton_kv_peer_sessions") == 0);
    assert_true(wp_metric(B, "baton_kv_peer_sessions") == 0);
    assert_true(wp_metric(B, "baton_kv_card_lanes{interface=\"lo\"}") == 0);
    wp_send_all(&P, s);
    wp_pull(&P, &k, s, 0);
    WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 2);
    assert_int_equal(k.n_done, 1);
    /* one that is being dialed and does not answer */
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(here);
    char target[32];
    int deaf = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(deaf, (struct sockaddr *)&here, len), 0);
    assert_int_equal(listen(deaf, 1), 0);
    assert_int_equal(getsockname(deaf, (struct sockaddr *)&here, &len), 0);
    snprintf(target, sizeof(target), "127.0.0.1:%u", ntohs(here.sin_port));
    struct bt_wire_peer_addr nobody = {"kvstore-n9", target, 9};
    wp_recv(&P, B, &waits, &nobody, 1, 1, 96, 16, 0, 0);
    bt_wire_peer_down(B->wire, "kvstore-n9", 9);
    WAIT_FOR(&P, waits.n_quiet == 1);
    assert_int_equal(waits.failed, BT_ERR_PEER_LOST);
    assert_non_null(strstr(waits.why, "has left the cluster"));
    close(deaf);
}

/* A's wire ends and begins again as another incarnation: flows to the old one fail, at once. */
static void test_a_new_incarnation(void **state)
{
    struct wp_sink k;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 1, 96, 16);
    wp_raise(A, s, 2);
    wp_pull(&P, &k, s, 0);
    WAIT_FOR(&P, bt_flow_read(&k.word, 1) == 2);
    wp_end_stop(A);
    assert_int_equal(s->n_ended, 1);
    WAIT_FOR(&P, k.n_quiet == 1);
    assert_int_equal(k.failed, BT_ERR_PEER_LOST);
    struct bt_wire_peer_addr old = wp_addr(A);
    A->incarnation = 777;
    struct bt_wire_config conf = wp_config(&P, A);
    wp_end_start(&P, A, &conf);
    old.rpc = A->target;
    wp_recv(&P, B, &k, &old, 1, 1, 96, 16, 0, 0);
    WAIT_FOR(&P, k.n_quiet == 1);
    assert_int_equal(k.failed, BT_ERR_PEER_LOST);
    assert_non_null(strstr(k.why, "asks for incarnation"));
    wp_send_all(&P, s);
    wp_pull(&P, &k, s, 0);
    WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 2);
    assert_int_equal(k.n_done, 1);
}

/* A peer that does not listen yet is dialled again: a flow waits for it up to two seconds. */
static void test_a_peer_that_starts_later(void **state)
{
    struct wp_sink k;
    char at[64];
    int port = 0;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 1, 96, 16);
    struct bt_wire_config conf = wp_config(&P, A);
    wp_end_stop(A);
    assert_int_equal(sscanf(A->target, "127.0.0.1:%d", &port), 1);
    int holder = hold_port(&port);
    wp_pull(&P, &k, s, 0);
    for (uint64_t until_ns = bt_mono_ns() + 300000000ull; bt_mono_ns() < until_ns;) {
        bt_loop_poll(P.loop, 10); /* it is dialled, in vain */
    }
    assert_int_equal(k.n_failed, 0);
    snprintf(at, sizeof(at), "%s", A->target);
    A->rpc_listen = at;
    wp_end_start(&P, A, &conf);
    wp_send_all(&P, s);
    WAIT_FOR(&P, k.n_quiet == 1);
    assert_int_equal(k.n_done, 1);
    close(holder);
}

/* ... and made again when they are wanted. Meanwhile nobody answers a flow to a third kvstore: it
 * fails after two seconds. */
static void test_idle_sessions_are_closed(void **state)
{
    struct wp_sink k, kept, waits;
    struct bt_wire_peer_addr nobody = {"kvstore-n9", "127.0.0.1:1", 9}, b = wp_addr(B);
    uint64_t begun_ns = bt_mono_ns();
    (void)state;
    wp_recv(&P, B, &waits, &nobody, 1, 1, 96, 16, 0, 0);
    struct wp_source *s = wp_grant(&P, A, 1, 1, 32, 16);
    wp_pull(&P, &kept, s, 0);
    WAIT_FOR(&P, s->send != NULL);
    for (uint32_t i = 0; i < 2; i++) { /* the same in the other direction, to the end */
        struct wp_source *t = wp_grant(&P, B, 2 + i, 1, 32, 16);
        t->early = &wp_trailer;
        wp_raise(B, t, bt_flow_items(&t->shape));
        wp_recv(&P, A, &k, &b, t->request, 1, 32, 16, 0, 0);
        WAIT_FOR(&P, k.n_quiet == 1 && t->n_ended == 1);
        assert_int_equal(k.n_done, 1);
        assert_true(wp_metric(B, "baton_kv_peer_sessions") == 2);
        WAIT_FOR(&P, wp_metric(A, "baton_kv_peer_sessions") == 1 &&
                         wp_metric(B, "baton_kv_peer_sessions") == 1);
        assert_int_equal(kept.n_failed, 0); /* one with a flow is not idle */
    }
    wp_send_all(&P, s);
    WAIT_FOR(&P, kept.n_quiet == 1);
    assert_int_equal(kept.n_done, 1);
    WAIT_FOR(&P, waits.n_quiet == 1);
    assert_int_equal(waits.failed, BT_ERR_PEER_LOST);
    assert_non_null(strstr(waits.why, "two seconds"));
    assert_true(bt_mono_ns() - begun_ns >= 1900 * 1000000ull);
}

static int idle_soon(void **state)
{
    (void)state;
    clock_skip_stalls(); /* a session is looked at before it is idle for so long */
    wp_open(&P, &(struct wp_options){.over_grpc = true, .idle_ms = 1000});
    return 0;
}

/* Who does not belong together: the one who dials is told why, at once. */
static void test_strangers_are_refused(void **state)
{
    (void)state;
    struct bt_kv_key other_root;
    struct bt_kv_layout other_layout;
    struct bt_wire_config usual = wp_config(&P, A), c[7];
    memset(&other_root, 8, sizeof(other_root));
    assert_int_equal(bt_kv_layout_gqa(WP_PAGE, WP_LAYERS + 1, 4, 8, BT_DT_BF16, 0, &other_layout),
                     BT_OK);
    static const char *const why[] = {"cluster.name",
                                      "layout",
                                      "root keys",
                                      "\"kvstore-n7\" answered",
                                      "asks for incarnation",
                                      "kvstore.wire.transport is grpc at the peer and ucx here",
                                      "did not prove that it belongs"};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(c); i++) {
        c[i] = usual;
    }
    c[0].cluster = "other";
    c[1].layout = &other_layout;
    c[2].root = &other_root;
    c[3].name = "kvstore-n7";
    c[4].incarnation = 12345;
    c[5].over_grpc = false;
    c[6].secret = "another secret, of 32 characters too";
    c[6].secret_len = strlen(c[6].secret);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(c); i++) {
        struct wp_sink k;
        if (i == 6) {
            struct bt_wire_config b = wp_config(&P, B);
            b.secret = "the secret of this cluster, of 32 or more";
            b.secret_len = strlen(b.secret);
            wp_end_stop(B);
            wp_end_start(&P, B, &b);
        }
        wp_end_stop(A);
        wp_end_start(&P, A, &c[i]);
        struct bt_wire_peer_addr a = wp_addr(A);
        wp_recv(&P, B, &k, &a, 1, 1, 32, 16, 0, 0);
        WAIT_FOR(&P, k.n_quiet == 1);
        assert_int_equal(k.failed, BT_ERR_PEER_LOST);
        if (strstr(k.why, why[i]) == NULL) {
            fail_msg("\"%s\" does not say \"%s\"", k.why, why[i]);
        }
        assert_true(wp_metric(B, "baton_kv_peer_sessions") == 0);
    }
}

static void test_nobody_serves_fetches(void **state)
{
    struct wp_sink k;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 1, 96, 96);
    struct bt_wire_peer_addr a = wp_addr(A);
    k = (struct wp_sink){.epoch = 2};
    k.recv = bt_wire_fetch_start(B->wire, &a, 5, 2, s->names, 6, BT_WIRE_FETCH, &wp_sink_ops, &k);
    WAIT_FOR(&P, k.n_quiet == 1);
    assert_int_equal(k.failed, BT_ERR_UNSUPPORTED);
}

static int no_fetches(void **state)
{
    (void)state;
    wp_open(&P, &(struct wp_options){.over_grpc = true, .no_want = true});
    return 0;
}

int main(int argc, char **argv)
{
    bt_wx_child_main_if_asked(argc, argv);
    setenv("UCX_LOG_LEVEL", "fatal", 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_peer_that_is_gone, wp_over_grpc, wp_over),
        {"grpc: a new incarnation", test_a_new_incarnation, wp_over_grpc, wp_over, NULL},
        {"ucx: a new incarnation", test_a_new_incarnation, wp_over_ucx, wp_over, NULL},
        cmocka_unit_test_setup_teardown(test_a_peer_that_starts_later, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_idle_sessions_are_closed, idle_soon, wp_over),
        cmocka_unit_test_setup_teardown(test_strangers_are_refused, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_nobody_serves_fetches, no_fetches, wp_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
