/* A dialing wire against a listener that breaks the rules: hellos, offers, segments and ends of
 * flows that do not fit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "wire_raw.h"

/* The address that a peer listens on: a session server of its own, and one of segments. */
struct host {
    struct bt_rpc_server *server;
    char target[64];
    uint64_t incarnation; /* of each one another */
    struct raw session, segments;
};

static void on_session(void *arg, struct bt_rpc_stream *s)
{
    struct raw *r = &((struct host *)arg)->session;
    r->stream = s;
    bt_rpc_stream_set_arg(s, &session_ops, r);
}

static void on_segments(void *arg, struct bt_rpc_stream *s)
{
    struct raw *r = &((struct host *)arg)->segments;
    r->stream = s;
    bt_rpc_stream_set_arg(s, &raw_ops, r);
}

static void host_start(struct host *h)
{
    static uint64_t last = 500;
    int port;
    *h = (struct host){.incarnation = ++last};
    assert_int_equal(bt_rpc_server_create(P.rpc, "127.0.0.1:0", &h->server, &port), BT_OK);
    snprintf(h->target, sizeof(h->target), "127.0.0.1:%d", port);
    bt_rpc_server_stream(h->server, SESSION, "kvstore", on_session, h);
    bt_rpc_server_stream(h->server, SEGMENTS, "kvstore", on_segments, h);
    bt_rpc_server_start(h->server);
}

/* A flow that A pulls from the host, as far as its FlowOpen: 4 blocks in chunks of 2. */
static void pulled(struct host *h, struct wp_sink *k)
{
    struct bt_wire_peer_addr a = {"kvstore-x", h->target, h->incarnation};
    Baton__PeerHello hello = a_hello();
    hello.incarnation = h->incarnation;
    wp_recv(&P, A, k, &a, 6, 3, 64, 32, 0, 0);
    WAIT_FOR(&P, h->session.n[BATON__PEER_MSG__M_HELLO] == 1);
    hello.ucx_address = (ProtobufCBinaryData){strlen(h->target), (uint8_t *)h->target};
    say_hello(&h->session, &hello);
    WAIT_FOR(&P, h->segments.n_raw == 1);
    say_proof(&h->segments, h->session.nonce);
    WAIT_FOR(&P, h->session.n[BATON__PEER_MSG__M_FLOW_OPEN] == 1);
}

/* The host's end; what A had of it fails or has ended. */
static void host_stop(struct host *h)
{
    bt_rpc_server_destroy(h->server);
}

struct message {
    struct bt_wire_seg_hdr h;
    uint32_t crcs[2];
};

/* Blocks [first, first + n) of the item, with contents that are all zero. */
static void say_segments(struct host *h, struct wp_sink *k, uint32_t item, uint32_t first,
                         uint16_t n, const struct bt_wire_seg_hdr *other, size_t cut)
{
    static uint8_t out[sizeof(struct message) + 2 * WP_SEG];
    static const uint8_t zeros[WP_SEG];
    struct message m = {{.n_segs = n,
                         .nonce = h->session.nonce,
                         .request = 6,
                         .epoch = 3,
                         .stream = h->session.stream_id,
                         .item = item,
                         .first_block = first,
                         .seg_bytes = WP_SEG},
                        {0}};
    for (uint32_t i = 0; i < n; i++) {
        m.crcs[i] = bt_slab_segment_crc(&k->names[first + i < 4 ? first + i : 0], item % WP_LAYERS,
                                        P.layout.layout_id, zeros, WP_SEG);
    }
    if (other != NULL) { /* what differs */
        m.h.nonce += other->nonce;
        m.h.request += other->request;
        m.h.epoch += other->epoch;
        m.h.stream += other->stream;
    }
    size_t len = bt_wire_seg_finish(&m.h), all = len + (size_t)n * WP_SEG;
    memset(out, 0, sizeof(out));
    memcpy(out, &m, len);
    assert_int_equal(bt_rpc_stream_send(h->segments.stream, out, all - cut), BT_OK);
}

static void say_trailer(struct host *h, uint32_t stream)
{
    Baton__FlowTrailer t = BATON__FLOW_TRAILER__INIT;
    t.stream = stream;
    t.first_token = 99;
    SAY(&h->session, flow_trailer, FLOW_TRAILER, Baton__FlowTrailer, t);
}

/* Items come in any order; the word is raised in theirs, and the end needs both, segments and
 * trailer. */
static void test_items_out_of_order(void **state)
{
    struct host h;
    struct wp_sink k;
    (void)state;
    host_start(&h);
    pulled(&h, &k);
    say_trailer(&h, h.session.stream_id + 1); /* of no flow */
    say_trailer(&h, h.session.stream_id);
    for (uint32_t item = 5; item > 0; item--) {
        say_segments(&h, &k, item, item / 3 * 2, 2, NULL, 0);
    }
    say_segments(&h, &k, 0, 1, 1, NULL, 0); /* half of the first */
    WAIT_FOR(&P, wp_metric(A, "baton_kv_segments_total{dir=\"received\"}") == 11);
    assert_int_equal(bt_flow_read(&k.word, 3), 0);
    assert_int_equal(k.n_done + k.n_progress, 0);
    /* strangers' messages are dropped and counted: another stream, request, epoch */
    static const struct bt_wire_seg_hdr other[] = {{.stream = 1}, {.request = 1}, {.epoch = 1}};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(other); i++) {
        say_segments(&h, &k, 0, 0, 1, &other[i], 0);
    }
    WAIT_FOR(&P, wp_metric(A, "baton_kv_dropped_messages_total{reason=\"stale\"}") == 2);
    assert_true(wp_metric(A, "baton_kv_dropped_messages_total{reason=\"unknown_stream\"}") == 1);
    assert_int_equal(bt_flow_read(&k.word, 3), 0);
    say_segments(&h, &k, 0, 0, 1, NULL, 0);
    WAIT_FOR(&P, k.n_quiet == 1);
    assert_int_equal(k.n_done, 1);
    assert_int_equal(k.trailer.first_token, 99);
    assert_int_equal(k.segments, 12);
    assert_int_equal(bt_flow_read(&k.word, 3), 6);
    WAIT_FOR(&P, h.session.n[BATON__PEER_MSG__M_FLOW_CLOSE] == 1);
    assert_int_equal(h.session.status, BT_OK);
    say_trailer(&h, h.session.stream_id); /* once more: of a flow that has ended */
    host_stop(&h);
}

static void test_segments_that_do_not_fit(void **state)
{
    (void)state;
    static const struct {
        uint32_t item, first;
        uint16_t n;
        size_t cut;
        uint64_t nonce;
        uint32_t twice;
        const char *why;
    } bad[] = {{0, 0, 2, 0, 1, 0, "malformed KV message: it has the nonce"},
               {0, 1, 2, 0, 0, 0, "malformed KV message"}, /* beyond the chunk */
               {6, 0, 1, 0, 0, 0, "malformed KV message"}, /* beyond the flow */
               {0, 0, 2, 1, 0, 0, "malformed KV message"}, /* a byte too few */
               {0, 0, 1, WP_SEG, 0, 0, "malformed KV message"},
               {0, 0, 0, 0, 0, 0, "malformed KV message"}, /* nothing but a whole header */
               {0, 0, 0, 1, 0, 0, "wrong number of segments"},
               {0, 0, 2, 2 * WP_SEG + 4, 0, 0, "wrong number of segments"},
               {0, 0, 2, 2 * WP_SEG + 30, 0, 0, "wrong number of segments"},
               {1, 0, 2, 0, 0, 1, "segment sent twice"}};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        struct host h;
        struct wp_sink k;
        host_start(&h);
        pulled(&h, &k);
        double garbled = wp_metric(A, "baton_kv_dropped_messages_total{reason=\"garbled\"}"),
               twice = wp_metric(A, "baton_kv_dropped_messages_total{reason=\"duplicate\"}");
        for (uint32_t t = 0; t <= bad[i].twice; t++) {
            struct bt_wire_seg_hdr other = {.nonce = bad[i].nonce};
            say_segments(&h, &k, bad[i].item, bad[i].first, bad[i].n, &other, bad[i].cut);
        }
        WAIT_FOR(&P, k.n_quiet == 1 && h.session.closed);
        assert_int_equal(k.failed, BT_ERR_PEER_LOST);
        if (strstr(k.why, bad[i].why) == NULL) {
            fail_msg("case %u: \"%s\"", i, k.why);
        }
        assert_true(wp_metric(A, "baton_kv_dropped_messages_total{reason=\"garbled\"}") ==
                    garbled + !bad[i].twice);
        assert_true(wp_metric(A, "baton_kv_dropped_messages_total{reason=\"duplicate\"}") ==
                    twice + bad[i].twice);
        assert_int_equal(bt_flow_read(&k.word, 3), 0);
        host_stop(&h);
    }
}

/* How a sender ends a flow, and what the core is told of it. */
static void test_how_a_sender_ends(void **state)
{
    (void)state;
    static const struct {
        int32_t status;
        const char *detail;
        bt_status_t told;
        const char *why;
    } ends[] = {{BT_ERR_STALE, "old", BT_ERR_STALE, "old"},
                {BT_OK, "", BT_ERR_PEER_LOST, "the sender ended the transfer"},
                {BT_ERR_CONFIG - 1, "", BT_ERR_PEER_LOST, "the sender ended the transfer"}};
    for (uint32_t i = 0; i < 2 * BT_ARRAY_LEN(ends); i++) {
        struct host h;
        struct wp_sink k;
        uint32_t e = i / 2;
        bool refuses = i % 2 != 0;
        host_start(&h);
        pulled(&h, &k);
        if (refuses) {
            Baton__FlowRefused m = BATON__FLOW_REFUSED__INIT;
            m.stream = h.session.stream_id + 1; /* of no flow */
            SAY(&h.session, flow_refused, FLOW_REFUSED, Baton__FlowRefused, m);
            m.stream--;
            m.status = ends[e].status;
            m.detail = (char *)(uintptr_t)ends[e].detail;
            SAY(&h.session, flow_refused, FLOW_REFUSED, Baton__FlowRefused, m);
        } else {
            say_close(&h.session, h.session.stream_id + 1, ends[e].status, "");
            say_close(&h.session, h.session.stream_id, ends[e].status, ends[e].detail);
        }
        WAIT_FOR(&P, k.n_quiet == 1);
        assert_int_equal(k.n_failed, 1);
        bool no_status = ends[e].told == BT_ERR_PEER_LOST;
        assert_int_equal(k.failed, refuses && no_status ? BT_ERR_PEER_PROTOCOL : ends[e].told);
        const char *why = refuses && no_status ? "flow refused" : ends[e].why;
        if (strstr(k.why, why) == NULL) {
            fail_msg("\"%s\" does not say \"%s\"", k.why, why);
        }
        assert_false(h.session.closed);
        host_stop(&h);
    }
}

/* Offers that do not answer what was asked for end the session; one that comes too late is passed
 * over. */
static void test_offers(void **state)
{
    (void)state;
    static uint8_t data[] = {1, 0, 2, 0, 0, 0, 0, 3, 1};
    static const struct {
        uint32_t at, len, times;
    } bad[] = {{0, 2, 1}, {0, 4, 1}, {3, 3, 1}, {6, 3, 1}, {0, 3, 2}};
    struct bt_kv_key keys[3];
    for (uint32_t i = 0; i < 3; i++) {
        bt_slab_private_key(1, 0, i, &keys[i]);
    }
    for (uint32_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        struct host h;
        struct wp_sink k, f = {.epoch = 1};
        host_start(&h);
        pulled(&h, &k);
        struct bt_wire_peer_addr a = {"kvstore-x", h.target, h.incarnation};
        f.recv = bt_wire_fetch_start(A->wire, &a, 7, 1, keys, 3, 1, &wp_sink_ops, &f);
        WAIT_FOR(&P, h.session.n[BATON__PEER_MSG__M_FLOW_OPEN] == 2);
        Baton__FlowOffer o = BATON__FLOW_OFFER__INIT;
        o.have = (ProtobufCBinaryData){bad[i].len, data + bad[i].at};
        o.stream = h.session.stream_id + 1;
        SAY(&h.session, flow_offer, FLOW_OFFER, Baton__FlowOffer, o);
        o.stream--;
        for (uint32_t n = 0; n < bad[i].times; n++) {
            SAY(&h.session, flow_offer, FLOW_OFFER, Baton__FlowOffer, o);
        }
        WAIT_FOR(&P, f.n_quiet == 1 && k.n_quiet == 1 && h.session.closed);
        assert_int_equal(f.failed, BT_ERR_PEER_LOST);
        assert_non_null(strstr(f.why, "FlowOffer does not match"));
        assert_int_equal(f.n_offer, bad[i].times - 1);
        host_stop(&h);
    }
}

/* Who answers is not who was dialed; or what it says makes no way for KV. */
static void test_answers_that_do_not_fit(void **state)
{
    (void)state;
    static const char *const why[] = {"dialed kvstore-x, but \"kvstore-y\" answered",
                                      "answered",
                                      "malformed list of network cards",
                                      "no network card in kvstore.wire.listen",
                                      "the KV stream echoes another nonce",
                                      "the peer's hello has no KV address"};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(why); i++) {
        struct host h;
        struct wp_sink k;
        host_start(&h);
        struct bt_wire_peer_addr a = {"kvstore-x", h.target, h.incarnation};
        wp_recv(&P, A, &k, &a, 6, 3, 64, 32, 0, 0);
        WAIT_FOR(&P, h.session.n[BATON__PEER_MSG__M_HELLO] == 1);
        Baton__PeerHello hello = a_hello();
        hello.incarnation = h.incarnation;
        Baton__PeerCard card = BATON__PEER_CARD__INIT, *cards[1] = {&card};
        uint8_t address[4] = {10, 0, 0, 1};
        card.address = (ProtobufCBinaryData){4, address};
        card.prefix = 24;
        card.up = true;
        hello.ucx_address = (ProtobufCBinaryData){strlen(h.target), (uint8_t *)h.target};
        if (i == 0) {
            hello.name = (char *)(uintptr_t) "kvstore-y";
        } else if (i == 1) {
            hello.incarnation++;
        } else if (i == 2) {
            hello.n_cards = 1;
            hello.cards = cards;
            hello.card = 1;
        } else if (i == 3) { /* its only card is of another network, and has no way here */
            hello.n_cards = 1;
            hello.cards = cards;
            hello.ucx_address.len = 0;
        } else if (i == 5) {
            hello.ucx_address.len = 0;
        }
        say_hello(&h.session, &hello);
        if (i == 4) {
            WAIT_FOR(&P, h.segments.n_raw == 1);
            say_proof(&h.segments, h.session.nonce + 1);
            assert_ended(&h.session, BT_GRPC_CANCELLED, "");
            bt_wire_recv_cancel(k.recv); /* it would try again */
            host_stop(&h);
            continue;
        }
        WAIT_FOR(&P, k.n_quiet == 1);
        assert_int_equal(k.failed, BT_ERR_PEER_LOST);
        if (strstr(k.why, why[i]) == NULL) {
            fail_msg("\"%s\" does not say \"%s\"", k.why, why[i]);
        }
        host_stop(&h);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_items_out_of_order, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_segments_that_do_not_fit, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_how_a_sender_ends, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_offers, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_answers_that_do_not_fit, wp_over_grpc, wp_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
