/* Two wires whose machines have two network cards: KV takes both, a card that goes down is left,
 * and one that comes back is used again. The program makes a network namespace with two cards for
 * itself; where that is not allowed nothing is tested. */
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mount.h>

#include <cmocka.h>

#include "kvstore/wire/cards.h"
#include "kvstore/wire/wire_priv.h"
#include "kvstore/wire/wx_child.h"
#include "kvstore/wire/wx_priv.h"
#include "wire_pair.h"

static bool have_cards;

static int ip(const char *args)
{
    char line[200];
    snprintf(line, sizeof(line), "ip %s >/dev/null 2>&1", args);
    return system(line);
}

/* UCX looks for cards in /sys, which shows those of the namespace that it was mounted in. */
static bool make_cards(void)
{
    return unshare(CLONE_NEWNET | CLONE_NEWNS) == 0 &&
           mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("sysfs", "/sys", "sysfs", 0, NULL) == 0 && ip("link set lo up") == 0 &&
           ip("link add card1 type veth peer name far1") == 0 &&
           ip("link add card2 type veth peer name far2") == 0 &&
           ip("addr add 10.231.1.1/24 dev card1") == 0 &&
           ip("addr add 10.231.2.1/24 dev card2") == 0 && ip("link set far1 up") == 0 &&
           ip("link set far2 up") == 0 && ip("link set card1 up") == 0 &&
           ip("link set card2 up") == 0;
}

static int start_with(uint32_t seg)
{
    static const char *const cards[] = {"10.231.1.1", "10.231.2.1", NULL};
    if (!have_cards) {
        return 0;
    }
    while (ip("link show card1 | grep -q 'state UP'") != 0 ||
           ip("link show card2 | grep -q 'state UP'") != 0) {
    }
    wp_open(&P, &(struct wp_options){
                    .listen = cards, .secret = "a secret of at least 32 characters", .seg = seg});
    return 0;
}

static int start(void **state)
{
    (void)state;
    return start_with(0);
}

static int start_large(void **state)
{
    (void)state;
    return start_with(32 << 10);
}

static int stop(void **state)
{
    (void)state;
    if (have_cards) {
        wp_close(&P);
    }
    return 0;
}

#define NEED_CARDS()                                                                               \
    do {                                                                                           \
        if (!have_cards) {                                                                         \
            skip();                                                                                \
        }                                                                                          \
    } while (0)

static double both(const struct wp_end *e, const char *what, const char *dir)
{
    char one[100], two[100];
    snprintf(one, sizeof(one), "baton_kv_card_%s{interface=\"card1\"%s}", what, dir);
    snprintf(two, sizeof(two), "baton_kv_card_%s{interface=\"card2\"%s}", what, dir);
    double a = wp_metric(e, one), b = wp_metric(e, two);
    return a >= 0 && b >= 0 ? a + b : -1;
}

static double of_card(const struct wp_end *e, const char *what, uint32_t card)
{
    char name[100];
    snprintf(name, sizeof(name), "baton_kv_card_%s{interface=\"card%u\"}", what, card);
    return wp_metric(e, name);
}

static double sent_over(const struct wp_end *e, uint32_t card)
{
    char name[100];
    snprintf(name, sizeof(name), "baton_kv_card_segments_total{interface=\"card%u\",dir=\"sent\"}",
             card);
    return wp_metric(e, name);
}

/* A flow of 60 blocks that has begun: all of its first items are there. */
static struct wp_source *begun(struct wp_sink *k, uint64_t request, uint32_t items)
{
    struct wp_source *s = wp_grant(&P, A, request, 1, 960, 64);
    wp_raise(A, s, items);
    wp_pull(&P, k, s, 0);
    WAIT_FOR(&P, bt_flow_read(&k->word, 1) == items || k->n_failed > 0);
    if (k->n_failed > 0) {
        fail_msg("%s", k->why);
    }
    return s;
}

static void assert_whole(const struct wp_sink *k, const struct wp_source *s)
{
    assert_int_equal(k->n_done, 1);
    assert_int_equal(k->segments, 60 * WP_LAYERS);
    wp_check(&P, B, k, s->request, 0, 60);
    assert_int_equal(s->ended, BT_OK);
}

static void test_each_card_has_a_way(void **state)
{
    struct wp_sink k;
    (void)state;
    NEED_CARDS();
    struct wp_source *s = begun(&k, 1, 1);
    WAIT_FOR(&P, both(A, "lanes", "") == 2 && both(B, "lanes", "") == 2);
    assert_true(wp_metric(A, "baton_kv_peer_sessions") == 1); /* one session all the same */
    wp_send_all(&P, s);
    WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 1);
    assert_whole(&k, s);
    assert_true(both(A, "segments_total", ",dir=\"sent\"") == 60 * WP_LAYERS);
    assert_true(both(B, "segments_total", ",dir=\"received\"") == 60 * WP_LAYERS);
    assert_true(wp_metric(A, "baton_kv_resent_segments_total") == 0);
    for (uint32_t e = 0; e < 2; e++) {
        assert_true(both(&P.e[e], "up", "") == 2);
        assert_true(both(&P.e[e], "failures_total", "") == 0);
    }
}

/* A card goes down under a flow, and comes back: the flow and the session go on. */
static void test_a_card_goes_and_comes_back(void **state)
{
    struct wp_sink k;
    (void)state;
    NEED_CARDS();
    for (uint32_t card = 1; card <= 2; card++) {
        char args[60];
        double failures = of_card(B, "failures_total", card);
        struct wp_source *s = begun(&k, card, 10);
        WAIT_FOR(&P, both(A, "lanes", "") == 2 && both(B, "lanes", "") == 2);
        snprintf(args, sizeof(args), "link set far%u down", card);
        assert_int_equal(ip(args), 0);
        WAIT_FOR(&P, of_card(A, "up", card) == 0 && of_card(B, "up", card) == 0);
        assert_true(of_card(A, "up", 3 - card) == 1 && of_card(B, "up", 3 - card) == 1);
        WAIT_FOR(&P, of_card(A, "lanes", card) == 0 && of_card(B, "lanes", card) == 0);
        assert_true(of_card(B, "failures_total", card) == failures + 1);
        double over = sent_over(A, card), other = sent_over(A, 3 - card);
        wp_raise(A, s, 25);
        WAIT_FOR(&P, bt_flow_read(&k.word, 1) == 25);
        assert_true(sent_over(A, card) == over && sent_over(A, 3 - card) > other);
        snprintf(args, sizeof(args), "link set far%u up", card);
        assert_int_equal(ip(args), 0);
        WAIT_FOR(&P, of_card(A, "up", card) == 1 && of_card(B, "up", card) == 1);
        WAIT_FOR(&P, of_card(A, "lanes", card) == 1 && of_card(B, "lanes", card) == 1);
        wp_send_all(&P, s);
        WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 1);
        assert_whole(&k, s);
        assert_true(wp_metric(B, "baton_kv_peer_sessions_lost_total") == 0);
        assert_true(wp_metric(B, "baton_kv_flows_failed_total") == 0);
    }
}

/* Messages that were on their way over a card when it went down go again over the other one. The
 * receiver's wire process stands still meanwhile, so that they are on their way for long enough. */
static void test_what_a_card_loses_goes_again(void **state)
{
    static const char resent[] = "baton_kv_resent_segments_total";
    (void)state;
    NEED_CARDS();
    /* Nothing tells when the sender's process has begun, so a busy machine may need more tries. */
    for (uint32_t i = 1; i <= 8 && wp_metric(A, resent) == 0; i++) {
        struct wp_sink k;
        A->next_slot = B->next_slot = 0;
        struct wp_source *s = begun(&k, i, 2);
        WAIT_FOR(&P, both(A, "lanes", "") == 2 && both(B, "lanes", "") == 2);
        pid_t pid = B->wire->x->proxy->process.pid;
        assert_int_equal(kill(pid, SIGSTOP), 0);
        wp_send_all(&P, s);
        loop_run_for(P.loop, 100);
        assert_int_equal(ip("link set far1 down"), 0);
        WAIT_FOR(&P, of_card(A, "up", 1) == 0 && of_card(B, "up", 1) == 0);
        assert_int_equal(kill(pid, SIGCONT), 0);
        WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 1);
        assert_whole(&k, s);
        assert_true(wp_metric(B, "baton_kv_dropped_messages_total{reason=\"duplicate\"}") == 0);
        assert_true(wp_metric(B, "baton_kv_wire_process_losses_total") == 0);
        assert_true(wp_metric(B, "baton_kv_peer_sessions_lost_total") == 0);
        assert_int_equal(ip("link set far1 up"), 0);
    }
    assert_true(wp_metric(A, resent) > 0);
}

/* A card that is down when the wire starts is used once it is up; with no card at all a session is
 * none. */
static void test_a_card_that_is_down_at_first(void **state)
{
    struct wp_sink k;
    (void)state;
    NEED_CARDS();
    wp_end_stop(B);
    assert_int_equal(ip("link set far1 down"), 0);
    while (ip("link show card1 | grep -q 'state UP'") == 0) {
    }
    struct bt_wire_config conf = wp_config(&P, B);
    wp_end_start(&P, B, &conf);
    assert_true(of_card(B, "up", 1) == 0 && of_card(B, "up", 2) == 1);
    struct wp_source *s = begun(&k, 1, 5);
    assert_true(of_card(B, "lanes", 1) == 0 && of_card(B, "lanes", 2) == 1);
    assert_int_equal(ip("link set far1 up"), 0);
    WAIT_FOR(&P, both(A, "lanes", "") == 2 && both(B, "lanes", "") == 2);
    assert_int_equal(ip("link set far1 down"), 0);
    assert_int_equal(ip("link set far2 down"), 0);
    WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 1);
    assert_int_equal(k.failed, BT_ERR_PEER_LOST);
    assert_int_equal(s->ended, BT_ERR_PEER_LOST);
    WAIT_FOR(&P, both(B, "up", "") == 0);
    assert_true(both(B, "lanes", "") == 0);
    assert_int_equal(ip("link set far1 up"), 0);
    assert_int_equal(ip("link set far2 up"), 0);
    WAIT_FOR(&P, both(B, "up", "") == 2 && both(A, "up", "") == 2);
    struct wp_source *t = begun(&k, 2, 1);
    wp_send_all(&P, t);
    WAIT_FOR(&P, k.n_quiet == 1 && t->n_ended == 1);
    assert_whole(&k, t);
}

static void assert_refused(const struct bt_wire_config *conf, const char *word)
{
    static const struct bt_wire_ops ops = {.lookup = wp_lookup, .send_end = wp_send_end};
    struct bt_metrics *metrics = bt_metrics_create();
    struct bt_wire *w = NULL;
    char err[512] = "";
    assert_int_equal(bt_wire_create(P.loop, P.rpc, B->server, B->slab, conf, &ops, B, metrics, &w,
                                    err, sizeof(err)),
                     BT_ERR_CONFIG);
    if (strstr(err, word) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err, word);
    }
    assert_null(w);
    bt_metrics_destroy(metrics);
}

static void test_wires_that_do_not_start(void **state)
{
    (void)state;
    NEED_CARDS();
    struct bt_wire_config conf = wp_config(&P, B);
    conf.over_grpc = true; /* which takes one card */
    assert_refused(&conf, "uses one address");
    conf.over_grpc = false;
    conf.secret_len = 31;
    assert_refused(&conf, "31 bytes are too few");
    conf.secret_len = 0; /* beyond loopback members prove themselves */
    assert_refused(&conf, "on this address UCX needs proof");
}

static void assert_cards(const char *a, const char *b, const char *says)
{
    struct bt_wire_card cards[BT_NICS_MAX];
    const char *const list[] = {a, b, NULL};
    char err[512] = "";
    uint32_t n = 0;
    bt_status_t st = bt_wire_cards(list, false, cards, &n, err, sizeof(err));
    assert_int_equal(st, says == NULL ? BT_OK : BT_ERR_CONFIG);
    if (strstr(err, says == NULL ? "" : says) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err, says);
    }
}

/* Which interfaces may be named: those that are up, one of them at least, by their first address.
 */
static void test_interfaces_that_can_be_named(void **state)
{
    (void)state;
    NEED_CARDS();
    assert_cards("10.231.1.1", "10.231.2.1", NULL);
    assert_int_equal(ip("addr add 10.231.1.2/24 dev card1"), 0);
    assert_int_equal(ip("-6 addr add fd00:231::1/64 dev card1"), 0);
    assert_cards("10.231.1.1", NULL, NULL);
    assert_cards("fd00:231::1", NULL, NULL); /* the first one that is not link-local */
    assert_cards("10.231.1.2", NULL, "which is 10.231.1.1 and not 10.231.1.2");
    assert_int_equal(ip("-6 addr del fd00:231::1/64 dev card1"), 0);
    assert_int_equal(ip("addr del 10.231.1.2/24 dev card1"), 0);
    assert_int_equal(ip("link set card1 down"), 0);
    assert_cards("10.231.1.1", NULL, "interface card1 of 10.231.1.1 is down");
    assert_cards("10.231.1.1", "10.231.2.1", NULL); /* it may come up later */
    assert_int_equal(ip("link set card2 down"), 0);
    assert_cards("10.231.1.1", "10.231.2.1", "all its interfaces are down (card1 and 1 more)");
    assert_int_equal(ip("link set card1 up"), 0);
    assert_int_equal(ip("link set card2 up"), 0);
}

int main(int argc, char **argv)
{
    bt_wx_child_main_if_asked(argc, argv);
    setenv("UCX_LOG_LEVEL", "fatal", 0);
    have_cards = make_cards();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_each_card_has_a_way, start, stop),
        cmocka_unit_test_setup_teardown(test_a_card_goes_and_comes_back, start, stop),
        cmocka_unit_test_setup_teardown(test_what_a_card_loses_goes_again, start_large, stop),
        cmocka_unit_test_setup_teardown(test_a_card_that_is_down_at_first, start, stop),
        cmocka_unit_test_setup_teardown(test_wires_that_do_not_start, start, stop),
        cmocka_unit_test(test_interfaces_that_can_be_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
