/* kvstore/wire/nics: which cards belong together, and which of them takes a message. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <arpa/inet.h>
#include <cmocka.h>

#include "kvstore/wire/nics.h"

/* "10.0.0.1/24", "fd00::1/64"; a "!" in front: its link is down */
static struct bt_nic nic(const char *text)
{
    struct bt_nic n = {.up = text[0] != '!', .node = -1};
    char address[64];
    unsigned prefix;
    assert_int_equal(sscanf(text + !n.up, "%63[^/]/%u", address, &prefix), 2);
    n.prefix = (uint8_t)prefix;
    n.family = strchr(address, ':') != NULL ? 6 : 4;
    assert_int_equal(inet_pton(n.family == 4 ? AF_INET : AF_INET6, address, n.addr), 1);
    return n;
}

static uint32_t cards(const char *text, struct bt_nic *out)
{
    char copy[256], *save = NULL;
    uint32_t n = 0;
    snprintf(copy, sizeof(copy), "%s", text);
    for (char *p = strtok_r(copy, " ", &save); p != NULL; p = strtok_r(NULL, " ", &save)) {
        out[n++] = nic(p);
    }
    return n;
}

/* want: "00 12" is local 0 with remote 0, local 1 with remote 2. Asked from either end. */
static void expect(const char *local, const char *remote, const char *want)
{
    struct bt_nic a[BT_NICS_MAX], b[BT_NICS_MAX];
    struct bt_nic_pair p[BT_NICS_MAX], q[BT_NICS_MAX];
    char got[64] = "";
    uint32_t n_a = cards(local, a), n_b = cards(remote, b), n = bt_nics_match(a, n_a, b, n_b, p);
    for (uint32_t i = 0; i < n; i++) {
        snprintf(got + strlen(got), sizeof(got) - strlen(got), "%s%u%u", i > 0 ? " " : "",
                 p[i].local, p[i].remote);
    }
    assert_string_equal(got, want);
    assert_int_equal(bt_nics_match(b, n_b, a, n_a, q), n);
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j < n; j++) {
            assert_true((p[i].local == q[j].remote) == (p[i].remote == q[j].local));
        }
    }
}

static void test_same_net(void **state)
{
    static const struct {
        const char *a, *b;
        bool same;
    } t[] = {
        {"10.1.2.3/24", "10.1.2.200/24", true},
        {"10.1.2.3/24", "10.1.3.3/24", false},
        {"10.1.2.3/23", "10.1.3.3/23", true},
        {"10.1.2.3/23", "10.1.3.3/24", false},
        {"10.1.2.3/31", "10.1.2.2/31", true},
        {"10.1.2.3/32", "10.1.2.2/32", false},
        {"10.1.2.3/0", "99.1.2.2/0", true},
        {"127.0.0.1/8", "127.9.9.9/8", true},
        {"fd00:1::1/64", "fd00:1::ff/64", true},
        {"fd00:1::1/64", "fd00:2::1/64", false},
        {"fd00::1/127", "fd00::2/127", false},
        {"fd00::1/128", "fd00::1/128", true},
        {"0.0.0.0/0", "::/0", false},
    };
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(t); i++) {
        struct bt_nic a = nic(t[i].a), b = nic(t[i].b);
        assert_int_equal(bt_nics_same_net(&a, &b), t[i].same);
        assert_int_equal(bt_nics_same_net(&b, &a), t[i].same);
    }
}

static void test_pairs(void **state)
{
    (void)state;
    expect("10.0.1.1/24", "10.0.1.2/24", "00");
    expect("10.0.1.1/24 10.0.2.1/24", "10.0.1.2/24 10.0.2.2/24", "00 11");
    /* the network decides, not the place */
    expect("10.0.1.1/24 10.0.2.1/24", "10.0.2.2/24 10.0.1.2/24", "01 10");
    expect("10.0.1.1/24 10.0.2.1/24", "10.0.2.2/24", "10");
    /* all on one network: equal places; what is left over stays without a partner */
    expect("10.0.0.1/16 10.0.0.2/16 10.0.0.3/16", "10.0.0.4/16 10.0.0.5/16", "00 11");
    /* a network between: by places, after those that share one */
    expect("10.0.1.1/31 10.0.2.1/31", "10.1.1.1/31 10.1.2.1/31", "00 11");
    expect("10.0.1.1/24 10.0.2.1/24", "10.0.2.2/24 10.9.9.9/24", "01 10");
    expect("10.0.1.1/24", "fd00::1/64", "");
    expect("10.0.1.1/24 fd00::2/64", "fd00::1/64", "10");
    /* nobody reaches another machine's loopback */
    expect("127.0.0.1/8", "127.0.0.1/8", "00");
    expect("127.0.0.1/8", "10.0.0.1/24", "");
    expect("127.0.0.1/8 10.0.0.2/24", "10.0.0.1/24", "10");
    expect("", "10.0.0.1/24", "");
}

static void test_pairs_whose_links_are_up_come_first(void **state)
{
    (void)state;
    expect("10.0.0.1/24", "!10.0.0.2/24 10.0.0.3/24", "01");
    expect("!10.0.0.1/24 10.0.0.4/24", "10.0.0.2/24", "10");
    /* a dead card keeps its partner on the other machine: it may come back */
    expect("!10.0.1.1/24 10.0.2.1/24", "10.0.1.2/24 10.0.2.2/24", "00 11");
    expect("!10.0.1.1/24 10.0.2.1/24", "10.0.1.2/24 !10.0.2.2/24", "00 11");
}

static void test_the_path_that_is_done_first(void **state)
{
    struct bt_nic_load l[3] = {{0, 100e6, 0}, {0, 100e6, 1}, {0, 100e6, -1}};
    (void)state;
    assert_int_equal(bt_nics_pick(l, 1, 1000, -1), 0);
    assert_int_equal(bt_nics_pick(l, 3, 1000, -1), 0);
    l[0].in_flight = 1;
    assert_int_equal(bt_nics_pick(l, 3, 1000, -1), 1);
    /* of three with rates 4:2:1, messages go out in proportion */
    uint32_t n[3] = {0};
    struct bt_nic_load r[3] = {{0, 400e6, -1}, {0, 200e6, -1}, {0, 100e6, -1}};
    for (int i = 0; i < 70; i++) {
        uint32_t k = bt_nics_pick(r, 3, 1000, -1);
        r[k].in_flight += 1000;
        n[k]++;
    }
    assert_in_range(n[0], 39, 41);
    assert_in_range(n[1], 19, 21);
    assert_in_range(n[2], 9, 11);
}

static void test_an_unknown_rate_is_as_good_as_the_best(void **state)
{
    struct bt_nic_load l[2] = {{5000, 100e6, -1}, {0, 0, -1}};
    (void)state;
    assert_int_equal(bt_nics_pick(l, 2, 1000, -1), 1);
    l[1].in_flight = 6000;
    assert_int_equal(bt_nics_pick(l, 2, 1000, -1), 0);
    l[0].rate = 0; /* nothing is known of either */
    assert_int_equal(bt_nics_pick(l, 2, 1000, -1), 0);
}

static void test_the_card_of_the_memorys_node(void **state)
{
    struct bt_nic_load l[2] = {{0, 100e6, 0}, {0, 100e6, 1}};
    (void)state;
    assert_int_equal(bt_nics_pick(l, 2, 1000, 0), 0);
    assert_int_equal(bt_nics_pick(l, 2, 1000, 1), 1);
    l[1].in_flight = 200;
    assert_int_equal(bt_nics_pick(l, 2, 1000, 1), 1); /* still sooner than across the nodes */
    l[1].in_flight = 2000;
    assert_int_equal(bt_nics_pick(l, 2, 1000, 1), 0);
    l[1].in_flight = 200;
    l[0].node = -1; /* a card that is nowhere is as near as any */
    assert_int_equal(bt_nics_pick(l, 2, 1000, 1), 0);
}

static void test_rates(void **state)
{
    const uint64_t ms = 1000000;
    struct bt_nic_rate r = {0};
    uint64_t now = 5000 * ms;
    (void)state;
    assert_true(bt_nic_rate_get(&r, now) == 0);
    /* 100 MB/s: a message of 1 MB each 10 ms, four in flight: each counts from the one before */
    for (int i = 0; i < 50; i++) {
        now += 10 * ms;
        bt_nic_rate_add(&r, 1000000, now - 40 * ms, now);
    }
    assert_in_range((uint64_t)bt_nic_rate_get(&r, now), 95000000, 105000000);
    /* ten times slower from now on: noticed within some tens of megabytes */
    for (int i = 0; i < 60; i++) {
        now += 100 * ms;
        bt_nic_rate_add(&r, 1000000, now - 400 * ms, now);
    }
    assert_in_range((uint64_t)bt_nic_rate_get(&r, now), 10000000, 13000000);
    /* small ones that the kernel takes at once do not hide that: they weigh little */
    for (int i = 0; i < 20; i++) {
        bt_nic_rate_add(&r, 16384, now, now);
    }
    assert_in_range((uint64_t)bt_nic_rate_get(&r, now), 10000000, 16000000);
    /* and after a while of nothing it is worth a try again */
    assert_true(bt_nic_rate_get(&r, now + 9000 * ms) > 9 * bt_nic_rate_get(&r, now));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_net),
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_pairs_whose_links_are_up_come_first),
        cmocka_unit_test(test_the_path_that_is_done_first),
        cmocka_unit_test(test_an_unknown_rate_is_as_good_as_the_best),
        cmocka_unit_test(test_the_card_of_the_memorys_node),
        cmocka_unit_test(test_rates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
