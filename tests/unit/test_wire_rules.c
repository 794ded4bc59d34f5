/* A listening wire against a dialer that breaks the rules. What does not fit ends the session, or
 * the flow, or is passed over and counted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "wire_raw.h"

static void say_take(struct raw *r, uint32_t stream)
{
    Baton__FlowTake t = BATON__FLOW_TAKE__INIT;
    t.stream = stream;
    SAY(r, flow_take, FLOW_TAKE, Baton__FlowTake, t);
}

static Baton__FlowOpen an_open(uint32_t stream, const struct wp_source *s)
{
    Baton__FlowOpen o = BATON__FLOW_OPEN__INIT;
    o.stream = stream;
    o.request = s->request;
    o.epoch = s->epoch;
    o.n_tokens = s->shape.n_tokens;
    o.chunk_tokens = s->shape.chunk_tokens;
    return o;
}

static void say_open(struct raw *r, const Baton__FlowOpen *o)
{
    SAY(r, flow_open, FLOW_OPEN, Baton__FlowOpen, *o);
}

/* A dialer whose session with A is up: hellos, a stream of segments, proofs. */
static void join(struct raw *r, struct raw *segments)
{
    Baton__PeerHello h = a_hello();
    dial(r, A->target, SESSION);
    say_hello(r, &h);
    WAIT_FOR(&P, r->n[BATON__PEER_MSG__M_HELLO] == 1);
    assert_int_equal(r->incarnation, A->incarnation);
    dial(segments, r->address, SEGMENTS);
    say_proof(segments, r->nonce);
    WAIT_FOR(&P, segments->n_raw == 1);
    struct bt_wire_proof p;
    assert_int_equal(segments->raw_len, sizeof(p));
    memcpy(&p, segments->raw, sizeof(p));
    assert_true(p.magic == BT_WIRE_PROOF_MAGIC && p.version == BT_WIRE_VERSION && p.nonce == 1234);
}

static void test_hellos(void **state)
{
    struct raw r;
    (void)state;
    Baton__PeerHeartbeat beat = BATON__PEER_HEARTBEAT__INIT;
    dial(&r, A->target, SESSION);
    SAY(&r, heartbeat, HEARTBEAT, Baton__PeerHeartbeat, beat);
    assert_ended(&r, BT_GRPC_INVALID_ARGUMENT, "before the hello");
    Baton__PeerHello h[9];
    Baton__PeerCard card[2] = {BATON__PEER_CARD__INIT, BATON__PEER_CARD__INIT};
    Baton__PeerCard *cards[2] = {&card[0], &card[1]}, *two[2] = {&card[0], &card[1]};
    uint8_t address[16] = {127, 0, 0, 1};
    card[0].address = (ProtobufCBinaryData){4, address};
    card[0].prefix = 8;
    card[0].up = true;
    card[1].address = (ProtobufCBinaryData){8, address};
    static const char *const why[] = {"session version 0",
                                      "cluster.name \"best\"",
                                      "asks for incarnation",
                                      "layout",
                                      "root key",
                                      "transport is ucx",
                                      "has no KV address",
                                      "malformed list of network cards",
                                      "malformed list of network cards"};
    uint8_t other[32] = {1};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(h); i++) {
        h[i] = a_hello();
    }
    h[0].version = 0;
    h[1].cluster = (char *)(uintptr_t) "best";
    h[2].expect_incarnation++;
    h[3].layout_id++;
    h[4].root_key.data = other;
    h[5].transport = BATON__KV_TRANSPORT__UCX;
    h[6].ucx_address.len = 0;
    h[7].n_cards = 1; /* of which the first lane has the second */
    h[7].cards = cards;
    h[7].card = 1;
    h[8].n_cards = 2; /* an address of 8 bytes */
    h[8].cards = two;
    for (uint32_t i = 0; i < BT_ARRAY_LEN(h); i++) {
        dial(&r, A->target, SESSION);
        say_hello(&r, &h[i]);
        assert_ended(&r, BT_GRPC_FAILED_PRECONDITION, why[i]);
        assert_int_equal(r.n[BATON__PEER_MSG__M_HELLO], 0);
    }
    /* a network of more bits than the address has; as many are fine */
    for (uint32_t bits = 32; bits <= 33; bits++) {
        Baton__PeerHello one = a_hello();
        one.n_cards = 1;
        one.cards = cards;
        card[0].prefix = bits;
        dial(&r, A->target, SESSION);
        say_hello(&r, &one);
        if (bits > 32) {
            assert_ended(&r, BT_GRPC_FAILED_PRECONDITION, "malformed list of network cards");
        } else {
            WAIT_FOR(&P, r.n[BATON__PEER_MSG__M_HELLO] == 1);
            hang_up(&r);
        }
    }
    /* IPv6 as well */
    Baton__PeerHello six = a_hello();
    six.n_cards = 1;
    six.cards = cards;
    card[0].address.len = 16;
    card[0].prefix = 128;
    dial(&r, A->target, SESSION);
    say_hello(&r, &six);
    WAIT_FOR(&P, r.n[BATON__PEER_MSG__M_HELLO] == 1);
    say_hello(&r, &six); /* twice */
    assert_ended(&r, BT_GRPC_INVALID_ARGUMENT, "a second hello");
    assert_true(wp_metric(A, "baton_kv_peer_sessions") == 0);
    assert_true(wp_metric(A, "baton_kv_peer_sessions_lost_total") == 0);
}

static void test_the_older_session_goes(void **state)
{
    struct raw r[2], segments[2];
    (void)state;
    join(&r[0], &segments[0]);
    WAIT_FOR(&P, wp_metric(A, "baton_kv_peer_sessions") == 1);
    join(&r[1], &segments[1]);
    assert_ended(&r[0], BT_GRPC_CANCELLED, "replaced by a newer session");
    WAIT_FOR(&P, segments[0].closed);
    WAIT_FOR(&P, wp_metric(A, "baton_kv_peer_sessions") == 1);
    assert_true(wp_metric(A, "baton_kv_peer_sessions_lost_total") == 1);
    assert_false(r[1].closed || segments[1].closed);
    hang_up(&segments[1]); /* without its stream of segments a session is none */
    assert_ended(&r[1], BT_GRPC_UNAVAILABLE, "KV stream ended");
    assert_true(wp_metric(A, "baton_kv_peer_sessions") == 0);
    hang_up(&segments[0]);
}

/* Who calls the port of segments without a session that waits for him. */
static void test_strangers_among_segments(void **state)
{
    struct raw r, own, s, again;
    uint8_t text[] = "who are you";
    (void)state;
    join(&r, &own);
    double garbled = wp_metric(A, "baton_kv_dropped_messages_total{reason=\"garbled\"}");
    dial(&s, r.address, SEGMENTS);
    assert_int_equal(bt_rpc_stream_send(s.stream, text, sizeof(text)), BT_OK);
    assert_ended(&s, BT_GRPC_NOT_FOUND, "no session of this kvstore waits");
    dial(&s, r.address, SEGMENTS);
    say_proof(&s, r.nonce + 1);
    assert_ended(&s, BT_GRPC_NOT_FOUND, "no session of this kvstore waits");
    dial(&again, r.address, SEGMENTS); /* the one that has its stream already */
    say_proof(&again, r.nonce);
    assert_ended(&again, BT_GRPC_NOT_FOUND, "no session of this kvstore waits");
    assert_true(wp_metric(A, "baton_kv_dropped_messages_total{reason=\"garbled\"}") == garbled + 3);
    static const struct bt_wire_proof wrong[] = {{BT_WIRE_PROOF_MAGIC + 1, BT_WIRE_VERSION, 0},
                                                 {BT_WIRE_PROOF_MAGIC, BT_WIRE_VERSION + 1, 0}};
    for (uint32_t i = 0; i < 3; i++) { /* of a session that does wait */
        struct raw t;
        Baton__PeerHello h = a_hello();
        h.incarnation = 60 + i;
        dial(&t, A->target, SESSION);
        say_hello(&t, &h);
        WAIT_FOR(&P, t.n[BATON__PEER_MSG__M_HELLO] == 1);
        struct bt_wire_proof p = wrong[i % 2];
        p.nonce = t.nonce;
        p.magic = i == 2 ? BT_WIRE_PROOF_MAGIC : p.magic;
        dial(&s, r.address, SEGMENTS);
        assert_int_equal(bt_rpc_stream_send(s.stream, &p, sizeof(p) - (i == 2 ? 1 : 0)), BT_OK);
        assert_ended(&s, BT_GRPC_NOT_FOUND, "no session of this kvstore waits");
        hang_up(&t);
    }
    assert_false(r.closed || own.closed);
    /* a listener's end of segments is there to send: a message there is out of turn */
    assert_int_equal(bt_rpc_stream_send(own.stream, text, sizeof(text)), BT_OK);
    assert_ended(&r, BT_GRPC_INVALID_ARGUMENT, "a message before its proof of the session");
    hang_up(&own);
}

static void test_flows_that_are_asked_for_wrongly(void **state)
{
    struct raw r, segments;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 2, 64, 16);
    Baton__FlowOpen o = an_open(9, s), past = o;
    join(&r, &segments);
    past.stream = 10;
    past.first_block = 5; /* of 4 */
    say_open(&r, &past);
    WAIT_FOR(&P, r.n[BATON__PEER_MSG__M_FLOW_REFUSED] == 1);
    assert_int_equal(r.status, BT_ERR_MISMATCH);
    assert_int_equal(r.stream_id, 10);
    past.first_block = 4; /* all of it is there */
    say_open(&r, &past);
    bt_flow_raise(s->word, 2, 12);
    s->early = &wp_trailer;
    WAIT_FOR(&P, s->send != NULL);
    bt_wire_send_trailer(s->send, &wp_trailer);
    WAIT_FOR(&P, r.n[BATON__PEER_MSG__M_FLOW_TRAILER] == 1);
    assert_int_equal(segments.n_raw, 1); /* the proof alone */
    say_open(&r, &past);                 /* the number is in use */
    assert_ended(&r, BT_GRPC_INVALID_ARGUMENT, "used a stream number twice");
    WAIT_FOR(&P, s->n_ended == 2);
    assert_int_equal(s->ended, BT_ERR_PEER_LOST);
    hang_up(&segments);
    /* the same of fetches */
    join(&r, &segments);
    o.keys = (ProtobufCBinaryData){64, s->names[0].b};
    o.epoch = 0;
    say_open(&r, &o);
    assert_ended(&r, BT_GRPC_INVALID_ARGUMENT, "FlowOpen of a fetch");
    hang_up(&segments);
    join(&r, &segments);
    o.epoch = 1;
    say_open(&r, &o);
    say_open(&r, &o);
    assert_ended(&r, BT_GRPC_INVALID_ARGUMENT, "FlowOpen of a fetch");
    WAIT_FOR(&P, A->want.n_ended == 1);
    assert_int_equal(A->want.ended, BT_ERR_PEER_LOST);
    hang_up(&segments);
}

/* A fetch never overtakes hand-offs, and what is beyond the last class is of the last. */
static void test_classes_that_a_peer_may_name(void **state)
{
    struct raw r, segments;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 2, 64, 16);
    static const uint32_t asked[] = {0, 1, 2, 3, 4, 255}, got[] = {1, 1, 2, 3, 3, 3};
    join(&r, &segments);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(asked); i++) {
        Baton__FlowOpen o = an_open(20 + i, s);
        A->want = (struct wp_want){0};
        o.keys = (ProtobufCBinaryData){96, s->names[0].b};
        o.priority = asked[i];
        say_open(&r, &o);
        WAIT_FOR(&P, A->want.send != NULL);
        assert_int_equal(A->want.class, got[i]);
        assert_int_equal(A->want.n, 3);
        assert_int_equal(A->want.incarnation, 55);
        assert_string_equal(A->want.peer, "kvstore-x");
        say_close(&r, 20 + i, BT_ERR_CANCELLED, "");
        WAIT_FOR(&P, A->want.n_ended == 1);
    }
    hang_up(&r);
    hang_up(&segments);
}

static void test_takes(void **state)
{
    struct raw r, segments;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 2, 64, 16);
    static const uint8_t have[1] = {BT_WIRE_IN_SLAB};
    for (uint32_t i = 0; i < 3; i++) {
        Baton__FlowOpen o = an_open(5, s);
        o.keys = (ProtobufCBinaryData){32, s->names[0].b};
        A->want = (struct wp_want){0};
        join(&r, &segments);
        say_take(&r, 77); /* of a flow that has ended: passed over */
        if (i == 2) {     /* a hand-off */
            o.keys.len = 0;
            say_open(&r, &o);
            say_take(&r, 5);
            assert_ended(&r, BT_GRPC_INVALID_ARGUMENT, "a transfer that was not offered");
            hang_up(&segments);
            continue;
        }
        say_open(&r, &o);
        WAIT_FOR(&P, A->want.send != NULL);
        if (i == 1) {
            struct bt_wire_source src = {
                {WP_PAGE, WP_PAGE, WP_PAGE, WP_LAYERS}, s->slots, s->names, &A->want.word, NULL};
            bt_flow_raise(&A->want.word, 2, WP_LAYERS);
            bt_wire_send_offer(A->want.send, &src, have, 1);
            WAIT_FOR(&P, r.n[BATON__PEER_MSG__M_FLOW_OFFER] == 1);
            say_take(&r, 5);
            WAIT_FOR(&P, segments.n_raw == 1 + WP_LAYERS);
        }
        say_take(&r, 5); /* not offered; or taken for the second time */
        assert_ended(&r, BT_GRPC_INVALID_ARGUMENT, "a transfer that was not offered");
        WAIT_FOR(&P, A->want.n_ended == 1);
        hang_up(&segments);
    }
}

/* How a receiver says that a flow has ended, and what the core is told of it. */
static void test_how_flows_are_closed(void **state)
{
    struct raw r, segments;
    (void)state;
    static const struct {
        int32_t said;
        bt_status_t told;
        bool whole; /* all of it was sent */
    } ends[] = {
        {BT_OK, BT_ERR_PEER_PROTOCOL, false},  {BT_OK, BT_OK, true},
        {1, BT_ERR_PEER_PROTOCOL, true},       {BT_ERR_DATA_LOSS, BT_ERR_DATA_LOSS, true},
        {BT_ERR_CONFIG, BT_ERR_CONFIG, false}, {BT_ERR_CONFIG - 1, BT_ERR_PEER_PROTOCOL, false}};
    join(&r, &segments);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(ends); i++) {
        struct wp_source *s = wp_grant(&P, A, 1 + i, 2, 32, 16);
        Baton__FlowOpen o = an_open(40 + i, s);
        uint32_t before = segments.n_raw, trailers = r.n[BATON__PEER_MSG__M_FLOW_TRAILER];
        bt_flow_raise(s->word, 2, ends[i].whole ? 6 : 5);
        s->early = &wp_trailer;
        say_open(&r, &o);
        WAIT_FOR(&P, segments.n_raw == before + (ends[i].whole ? 6 : 5));
        WAIT_FOR(&P, r.n[BATON__PEER_MSG__M_FLOW_TRAILER] == trailers + ends[i].whole);
        say_close(&r, 999, BT_OK, "a flow that has ended");
        assert_int_equal(s->n_ended, 0);
        say_close(&r, 40 + i, ends[i].said, "");
        WAIT_FOR(&P, s->n_ended == 1);
        assert_int_equal(s->ended, ends[i].told);
    }
    hang_up(&r);
    hang_up(&segments);
}

/* A flow that the sender aborts waits for the receiver's close, which may tell of wrong bytes. The
 * receiver that never closes it delays the end by 2 s, the one that hangs up not at all. */
static void test_the_last_word_about_an_aborted_flow(void **state)
{
    struct raw r, segments;
    (void)state;
    static const struct {
        int32_t said; /* 1: nothing */
        bt_status_t told;
    } ends[] = {{BT_ERR_DATA_LOSS, BT_ERR_DATA_LOSS},
                {BT_ERR_PEER_LOST, BT_ERR_STALE},
                {BT_OK, BT_ERR_STALE},
                {1, BT_ERR_STALE}};
    join(&r, &segments);
    struct wp_source *s;
    for (uint32_t i = 0; i < BT_ARRAY_LEN(ends); i++) {
        s = wp_grant(&P, A, 1 + i, 2, 32, 16);
        Baton__FlowOpen o = an_open(40 + i, s);
        say_open(&r, &o);
        WAIT_FOR(&P, s->send != NULL);
        uint64_t begun_ns = bt_mono_ns();
        bt_wire_send_abort(s->send, BT_ERR_STALE, "taken back");
        bt_wire_send_abort(s->send, BT_ERR_EXHAUSTED, "again");
        WAIT_FOR(&P, r.n[BATON__PEER_MSG__M_FLOW_CLOSE] == i + 1);
        assert_int_equal(s->n_ended, 0);
        if (ends[i].said != 1) {
            say_close(&r, 40 + i, ends[i].said, "");
        }
        while (s->n_ended == 0) { /* WAIT_FOR would let the session die of silence */
            Baton__PeerHeartbeat beat = BATON__PEER_HEARTBEAT__INIT;
            SAY(&r, heartbeat, HEARTBEAT, Baton__PeerHeartbeat, beat);
            loop_run_for(P.loop, 100);
        }
        assert_int_equal(s->ended, ends[i].told);
        assert_true(ends[i].said != 1 || bt_mono_ns() - begun_ns >= 2000 * 1000000ull);
        say_close(&r, 40 + i, BT_ERR_DATA_LOSS, "too late"); /* of a flow that has ended */
    }
    s = wp_grant(&P, A, 9, 2, 32, 16);
    Baton__FlowOpen o = an_open(50, s);
    say_open(&r, &o);
    WAIT_FOR(&P, s->send != NULL);
    bt_wire_send_abort(s->send, BT_ERR_STALE, "taken back");
    hang_up(&r);
    WAIT_FOR(&P, s->n_ended == 1);
    assert_int_equal(s->ended, BT_ERR_STALE);
    hang_up(&segments);
}

/* What only a listener says is passed over from a dialer. */
static void test_messages_of_the_other_side(void **state)
{
    struct raw r, segments;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 2, 32, 16);
    join(&r, &segments);
    Baton__FlowRefused refused = BATON__FLOW_REFUSED__INIT;
    Baton__FlowTrailer trailer = BATON__FLOW_TRAILER__INIT;
    Baton__FlowOffer offer = BATON__FLOW_OFFER__INIT;
    Baton__LaneOpened opened = BATON__LANE_OPENED__INIT;
    Baton__LaneClose closed = BATON__LANE_CLOSE__INIT;
    Baton__LaneEnd end = BATON__LANE_END__INIT;
    opened.lane = 3;
    opened.ucx_address = (ProtobufCBinaryData){11, (uint8_t *)(uintptr_t) "127.0.0.1:1"};
    closed.lane = end.lane = 3; /* a lane that there never was */
    SAY(&r, flow_refused, FLOW_REFUSED, Baton__FlowRefused, refused);
    SAY(&r, flow_trailer, FLOW_TRAILER, Baton__FlowTrailer, trailer);
    SAY(&r, flow_offer, FLOW_OFFER, Baton__FlowOffer, offer);
    SAY(&r, lane_opened, LANE_OPENED, Baton__LaneOpened, opened);
    SAY(&r, lane_close, LANE_CLOSE, Baton__LaneClose, closed);
    SAY(&r, lane_end, LANE_END, Baton__LaneEnd, end);
    Baton__FlowOpen o = an_open(1, s);
    say_open(&r, &o);
    WAIT_FOR(&P, s->send != NULL); /* the session goes on */
    Baton__LaneOpen lane = BATON__LANE_OPEN__INIT;
    lane.lane = 1;
    lane.card = 1; /* of one */
    lane.ucx_address = opened.ucx_address;
    SAY(&r, lane_open, LANE_OPEN, Baton__LaneOpen, lane);
    WAIT_FOR(&P, r.n[BATON__PEER_MSG__M_LANE_CLOSE] == 1);
    assert_int_equal(r.lane, 1);
    SAY(&r, lane_open, LANE_OPEN, Baton__LaneOpen, lane); /* not a larger one */
    assert_ended(&r, BT_GRPC_INVALID_ARGUMENT, "malformed LaneOpen");
    hang_up(&segments);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_hellos, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_the_older_session_goes, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_strangers_among_segments, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_flows_that_are_asked_for_wrongly, wp_over_grpc,
                                        wp_over),
        cmocka_unit_test_setup_teardown(test_classes_that_a_peer_may_name, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_takes, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_how_flows_are_closed, wp_over_grpc, wp_over),
        cmocka_unit_test_setup_teardown(test_the_last_word_about_an_aborted_flow, wp_over_grpc,
                                        wp_over),
        cmocka_unit_test_setup_teardown(test_messages_of_the_other_side, wp_over_grpc, wp_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
