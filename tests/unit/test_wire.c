/* kvstore/wire without a network: headers of active messages, which come from outside, and the
 * rules about listen addresses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "kvstore/wire/cards.h"
#include "kvstore/wire/msg.h"

static const struct bt_flow_shape shape = {100, 16, 32, 4}; /* 7 blocks, 4 chunks, 16 items */

union msg {
    struct bt_wire_seg_hdr h;
    uint8_t raw[BT_WIRE_SEG_HDR_MAX];
};

static size_t make(union msg *m, uint16_t n)
{
    memset(m, 0, sizeof(*m));
    m->h.n_segs = n;
    m->h.nonce = 77;
    m->h.request = 5;
    m->h.epoch = 2;
    m->h.stream = 9;
    m->h.seg_bytes = 8192;
    for (uint32_t i = 0; i < n; i++) {
        memcpy(m->raw + sizeof(m->h) + 4 * i, &i, 4);
    }
    return bt_wire_seg_finish(&m->h);
}

static void test_round_trip(void **state)
{
    (void)state;
    for (uint16_t n = 1; n <= BT_WIRE_SEGS_MAX; n = (uint16_t)(n * 3)) {
        union msg m;
        uint8_t moved[BT_WIRE_SEG_HDR_MAX + 1];
        struct bt_wire_seg_hdr h;
        const uint8_t *crcs;
        const char *why;
        uint32_t last;
        size_t len = make(&m, n);
        assert_int_equal(len, sizeof(m.h) + 4 * n);
        memcpy(moved + 1, &m, len); /* UCX aligns nothing */
        assert_int_equal(bt_wire_seg_parse(moved + 1, len, 77, &h, &crcs, &why), BT_OK);
        assert_memory_equal(&h, &m.h, sizeof(h));
        memcpy(&last, crcs + 4 * (n - 1), 4);
        assert_int_equal(last, n - 1);
    }
}

static void test_every_flipped_bit_and_every_cut_is_noticed(void **state)
{
    union msg m;
    struct bt_wire_seg_hdr h;
    const uint8_t *crcs;
    const char *why;
    (void)state;
    size_t len = make(&m, 5);
    for (size_t bit = 0; bit < len * 8; bit++) {
        m.raw[bit / 8] ^= (uint8_t)(1u << bit % 8);
        why = NULL;
        assert_int_equal(bt_wire_seg_parse(&m, len, 77, &h, &crcs, &why), BT_ERR_PEER_PROTOCOL);
        assert_non_null(why);
        m.raw[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (size_t cut = 0; cut < len; cut++) {
        assert_int_equal(bt_wire_seg_parse(&m, cut, 77, &h, &crcs, &why), BT_ERR_PEER_PROTOCOL);
    }
    assert_int_equal(bt_wire_seg_parse(&m, len + 4, 77, &h, &crcs, &why), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(bt_wire_seg_parse(&m, len, 78, &h, &crcs, &why), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(bt_wire_seg_parse(&m, len, 77, &h, &crcs, &why), BT_OK);
}

static bt_status_t fits(uint32_t item, uint32_t first, uint16_t n, uint32_t resident,
                        uint32_t seg_bytes, size_t payload)
{
    struct bt_wire_seg_hdr h = {
        .item = item, .first_block = first, .n_segs = n, .seg_bytes = seg_bytes};
    const char *why;
    return bt_wire_seg_check(&h, &shape, resident, 8192, payload, &why);
}

static void test_blocks_must_be_the_items(void **state)
{
    (void)state;
    /* exactly those of the item's chunk, at or above the resident ones */
    for (uint32_t resident = 0; resident <= 7; resident++) {
        for (uint32_t item = 0; item < 18; item++) {
            for (uint32_t first = 0; first < 9; first++) {
                for (uint16_t n = 1; n < 4; n++) {
                    uint32_t chunk = item / 4, end = chunk * 2 + 2 > 7 ? 7 : chunk * 2 + 2;
                    bool ok =
                        item < 16 && first >= chunk * 2 && first >= resident && first + n <= end;
                    assert_int_equal(fits(item, first, n, resident, 8192, 8192u * n) == BT_OK, ok);
                }
            }
        }
    }
    assert_int_not_equal(fits(UINT32_MAX, 0, 1, 0, 8192, 8192), BT_OK);
    assert_int_not_equal(fits(0, UINT32_MAX, 2, 0, 8192, 16384), BT_OK);
    assert_int_not_equal(fits(0, 0, UINT16_MAX, 0, 8192, 8192ull * UINT16_MAX), BT_OK);
    assert_int_not_equal(fits(0, 0, 1, 0, 8192, 8191), BT_OK);
    assert_int_not_equal(fits(0, 0, 1, 0, 4096, 4096), BT_OK);
    assert_int_not_equal(fits(0, 0, 2, 0, 8192, 8192), BT_OK);
}

static void refused(const char *const *listen, bool allow_routable, const char *word)
{
    struct bt_wire_card cards[BT_NICS_MAX];
    char err[512] = "";
    uint32_t n;
    assert_int_equal(bt_wire_cards(listen, allow_routable, cards, &n, err, sizeof(err)),
                     BT_ERR_CONFIG);
    assert_non_null(strstr(err, "kvstore.wire.listen"));
    if (strstr(err, word) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err, word);
    }
}

#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

static void test_cards_of_the_listen_addresses(void **state)
{
    struct bt_wire_card cards[BT_NICS_MAX];
    char err[512];
    uint32_t n = 0;
    (void)state;
    assert_int_equal(bt_wire_cards(LIST("127.0.0.1"), false, cards, &n, err, sizeof(err)), BT_OK);
    assert_int_equal(n, 1);
    assert_string_equal(cards[0].ifname, "lo");
    assert_string_equal(cards[0].address, "127.0.0.1");
    assert_int_equal(cards[0].nic.family, 4);
    assert_int_equal(cards[0].nic.prefix, 8);
    assert_int_equal(cards[0].nic.node, -1);
    assert_true(cards[0].nic.up);
    assert_true(bt_wire_link_up("lo"));
    assert_false(bt_wire_link_up("no-such-card"));
    assert_int_equal(cards[0].port, 0);
    assert_int_equal(bt_wire_cards(LIST("127.0.0.1:7000"), false, cards, &n, err, sizeof(err)),
                     BT_OK);
    assert_string_equal(cards[0].address, "127.0.0.1");
    assert_int_equal(cards[0].port, 7000);
    refused(LIST("8.8.8.8"), false, "kvstore.wire.allow_routable");
    refused(LIST("8.8.8.8"), true, "no interface of this machine has the address 8.8.8.8");
    refused(LIST("127.0.0.1", "8.8.8.8"), false, "8.8.8.8 is a routable address");
    refused(LIST("lo"), true, "numeric address");
    refused(LIST("127.0.0.1", "127.0.0.1"), false, "both of interface lo");
    refused(LIST("1", "2", "3", "4", "5", "6", "7", "8", "9"), false, "one to 8");
    refused(NULL, true, "0 addresses");
    /* UCX would find no transport, and say no more than that */
    refused(LIST("::1"), true, "::1");
}

/* What can be said of a list on another machine. */
static void test_lists_are_checked_without_interfaces(void **state)
{
    const struct {
        const char *const *list;
        bool allow_routable;
        const char *says; /* NULL: nothing */
        bool grpc;
    } cases[] = {{LIST("10.1.2.3"), false, NULL, false},
                 {LIST("192.168.1.1", "fd00::1"), false, NULL, false},
                 {LIST("8.8.8.8"), true, NULL, false},
                 {LIST("10.1.2.3", "8.8.8.8"), false, "8.8.8.8 is a routable address", false},
                 {LIST("8.8.8.8", "10.1.2.3"), false, "8.8.8.8 is a routable address", false},
                 {LIST("2001:DB8:0::1"), false, "2001:db8::1 is a routable address", false},
                 {LIST("10.1.2.3", "eth0"), true, "\"eth0\" is not a numeric address", false},
                 {LIST("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6",
                       "10.0.0.7", "10.0.0.8"),
                  false, NULL, false},
                 {LIST(NULL), true, "0 addresses", false},
                 {LIST("10.1.2.3:7000"), false, NULL, true},
                 {LIST("[fd00::1]:65535"), false, NULL, true},
                 {LIST("fd00::1"), false, NULL, true},
                 {LIST("10.1.2.3:7000"), false, "give 10.1.2.3 without port 7000", false},
                 {LIST("8.8.8.8:7000"), false, "8.8.8.8 is a routable address", true},
                 {LIST("10.1.2.3:"), false, "not a numeric address", true},
                 {LIST("10.1.2.3:0"), false, "port of 1 to 65535", true},
                 {LIST("10.1.2.3:65536"), false, "port of 1 to 65535", true},
                 {LIST("10.1.2.3:70a"), false, "port of 1 to 65535", true},
                 {LIST("10.1.2.3:4294968296"), false, "port of 1 to 65535", true},
                 {LIST("[fd00::1]"), false, "not a numeric address", true},
                 {LIST("[fd00::1:7000"), false, "not a numeric address", true},
                 {LIST(":7000"), false, "not a numeric address", true},
                 {LIST("["), false, "not a numeric address", true}};
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        char err[512] = "";
        bt_status_t st = bt_wire_listen_check(cases[i].list, cases[i].grpc, cases[i].allow_routable,
                                              err, sizeof(err));
        assert_int_equal(st, cases[i].says == NULL ? BT_OK : BT_ERR_CONFIG);
        if (strstr(err, cases[i].says == NULL ? "" : cases[i].says) == NULL) {
            fail_msg("\"%s\" does not say \"%s\"", err, cases[i].says);
        }
    }
}

static void test_memory_has_a_node(void **state)
{
    char here[1] = {0};
    (void)state;
    int32_t node = bt_wire_memory_node(here);
    assert_true(node >= -1 && node < 1024);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_every_flipped_bit_and_every_cut_is_noticed),
        cmocka_unit_test(test_blocks_must_be_the_items),
        cmocka_unit_test(test_cards_of_the_listen_addresses),
        cmocka_unit_test(test_lists_are_checked_without_interfaces),
        cmocka_unit_test(test_memory_has_a_node),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
