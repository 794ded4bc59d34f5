/* Flows and fetches between two wires, over gRPC and over UCX: what arrives, what each side is
 * told, and how often. Over UCX also with segments so large that messages go by rendezvous. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kvstore/wire/wx_child.h"
#include "wire_pair.h"

static void assert_done(const struct wp_sink *k, const struct wp_source *s)
{
    uint32_t n = bt_flow_blocks(&k->shape);
    uint64_t segments = (uint64_t)(n - k->first) * WP_LAYERS;
    if (k->n_done != 1 || k->n_failed != 0 || k->n_quiet != 1) {
        fail_msg("%u tokens, chunk %u, from block %u: %s", k->shape.n_tokens, k->shape.chunk_tokens,
                 k->first, k->why);
    }
    assert_int_equal(k->n_offer, 0);
    assert_int_equal(k->segments, segments);
    assert_int_equal(k->bytes, segments * P.seg);
    assert_memory_equal(&k->trailer, &wp_trailer, sizeof(wp_trailer));
    assert_true(k->first_ns <= k->last_ns && (k->first_ns != 0) == (segments != 0));
    assert_int_equal(bt_flow_read((bt_flow_word_t *)&k->word, k->epoch), bt_flow_items(&k->shape));
    wp_check(&P, B, k, k->request, k->first, n);
    assert_int_equal(s->n_ended, 1);
    assert_int_equal(s->ended, BT_OK);
}

/* ---- flows ---- */

static void test_flows_of_every_shape(void **state)
{
    static const struct {
        uint32_t tokens, chunk, first;
    } shapes[] = {{1, 16, 0},    {16, 16, 0},  {17, 16, 0},   {160, 32, 0},   {150, 64, 0},
                  {160, 32, 1},  {160, 32, 4}, {160, 160, 9}, {160, 320, 3},  {48, 16, 3},
                  {1000, 16, 0}, {48, 48, 0},  {160, 64, 7},  {1024, 512, 40}};
    (void)state;
    double sent = wp_metric(A, "baton_kv_sent_bytes_total");
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < BT_ARRAY_LEN(shapes); i++) {
        struct wp_sink k;
        A->n_sources = 0;
        A->next_slot = B->next_slot = 0;
        struct wp_source *s = wp_grant(&P, A, 100 + i, 1 + i, shapes[i].tokens, shapes[i].chunk);
        wp_send_all(&P, s);
        wp_pull(&P, &k, s, shapes[i].first);
        WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 1);
        assert_done(&k, s);
        assert_true(k.n_progress >= (k.segments != 0) && k.n_progress <= bt_flow_items(&s->shape));
        bytes += k.bytes;
    }
    /* each segment went once, over the card, and nobody complains */
    assert_true(wp_metric(A, "baton_kv_sent_bytes_total") == sent + (double)bytes);
    assert_true(wp_metric(B, "baton_kv_received_bytes_total") == sent + (double)bytes);
    double segs = wp_metric(A, "baton_kv_segments_total{dir=\"sent\"}");
    assert_true(segs == (sent + (double)bytes) / P.seg);
    assert_true(wp_metric(B, "baton_kv_segments_total{dir=\"received\"}") == segs);
    assert_true(wp_metric(A, "baton_kv_card_bytes_total{interface=\"lo\",dir=\"sent\"}") ==
                segs * P.seg);
    assert_true(wp_metric(B, "baton_kv_card_bytes_total{interface=\"lo\",dir=\"received\"}") ==
                segs * P.seg);
    assert_true(wp_metric(A, "baton_kv_card_segments_total{interface=\"lo\",dir=\"sent\"}") ==
                segs);
    assert_true(wp_metric(B, "baton_kv_card_segments_total{interface=\"lo\",dir=\"received\"}") ==
                segs);
    assert_true(wp_metric(B, "baton_kv_flows_failed_total") == 0);
    assert_true(wp_metric(B, "baton_kv_crc_errors_total") == 0);
    assert_true(wp_metric(A, "baton_kv_resent_segments_total") == 0);
    assert_true(wp_metric(B, "baton_kv_dropped_messages_total{reason=\"garbled\"}") == 0);
    assert_true(wp_metric(B, "baton_kv_dropped_messages_total{reason=\"duplicate\"}") == 0);
    assert_true(wp_metric(B, "baton_kv_dropped_messages_total{reason=\"unknown_stream\"}") == 0);
    assert_true(wp_metric(B, "baton_kv_dropped_messages_total{reason=\"stale\"}") == 0);
    assert_true(wp_metric(A, "baton_kv_peer_sessions") == 1);
    assert_true(wp_metric(B, "baton_kv_peer_sessions") == 1);
    assert_true(wp_metric(B, "baton_kv_card_up{interface=\"lo\"}") == 1);
    assert_true(wp_metric(B, "baton_kv_card_lanes{interface=\"lo\"}") == 1);
    assert_true(wp_metric(B, "baton_kv_peer_sessions_lost_total") == 0);
    assert_true(wp_metric(B, "baton_kv_transfer_seconds_count") >= 1);
}

/* What the local writer has not finished does not leave; the end waits for the trailer. */
static void test_items_follow_the_word(void **state)
{
    struct wp_sink k;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 7, 96, 32); /* 3 chunks of 3 layers */
    wp_pull(&P, &k, s, 0);
    WAIT_FOR(&P, s->send != NULL);
    bt_wire_send_trailer(s->send, &wp_trailer); /* long before the last item */
    for (uint32_t items = 1; items <= 9; items++) {
        assert_int_equal(k.n_done, 0);
        wp_raise(A, s, items);
        WAIT_FOR(&P, bt_flow_read(&k.word, 7) == items);
        assert_int_equal(bt_flow_read(&k.word, 8), 0); /* of another epoch: nothing */
        WAIT_FOR(&P, k.n_progress >= items);
    }
    WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 1);
    assert_done(&k, s);
    assert_int_equal(k.n_progress, 9);

    struct wp_source *t = wp_grant(&P, A, 2, 1, 96, 32);
    wp_raise(A, t, 9);
    wp_pull(&P, &k, t, 0);
    WAIT_FOR(&P, bt_flow_read(&k.word, 1) == 9 && t->send != NULL);
    assert_int_equal(k.n_done, 0); /* all of it is there, but for the first token */
    bt_wire_send_trailer(t->send, &wp_trailer);
    WAIT_FOR(&P, k.n_quiet == 1 && t->n_ended == 1);
    assert_done(&k, t);
    /* a word of another epoch says nothing */
    struct wp_source *u = wp_grant(&P, A, 3, 5, 32, 16);
    bt_flow_raise(u->word, 4, 6);
    wp_pull(&P, &k, u, 0);
    WAIT_FOR(&P, u->send != NULL);
    bt_wire_kick(A->wire);
    wp_raise(A, u, 1);
    WAIT_FOR(&P, bt_flow_read(&k.word, 5) == 1);
    wp_send_all(&P, u);
    WAIT_FOR(&P, k.n_quiet == 1 && u->n_ended == 1);
    assert_done(&k, u);
}

/* Not granted yet: asked again, for two seconds; AGAIN: as long as it takes. Other answers are
 * final. */
static void test_refusals(void **state)
{
    struct wp_sink k;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 3, 48, 16);
    s->answer = BT_ERR_NOT_FOUND;
    wp_pull(&P, &k, s, 0);
    WAIT_FOR(&P, s->looked >= 2);
    s->answer = BT_AGAIN;
    s->looked = 0;
    WAIT_FOR(&P, s->looked >= 2);
    assert_int_equal(k.n_failed, 0);
    s->answer = BT_OK;
    wp_send_all(&P, s);
    WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 1);
    assert_done(&k, s);
    static const bt_status_t final[] = {BT_ERR_STALE, BT_ERR_EXHAUSTED, BT_ERR_CANCELLED};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(final); i++) {
        s->looked = 0;
        s->answer = final[i];
        wp_pull(&P, &k, s, 0);
        WAIT_FOR(&P, k.n_quiet == 1);
        assert_int_equal(k.n_failed, 1);
        assert_int_equal(k.failed, final[i]);
        assert_non_null(strstr(k.why, "kvstore-n1: "));
        assert_int_equal(s->looked, 1);
    }
    assert_int_equal(s->n_ended, 1); /* what was refused was never sent */
    s->answer = BT_OK;
    s->abort_inside = true; /* granted and taken back in one call */
    wp_pull(&P, &k, s, 0);
    WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 2);
    assert_int_equal(k.failed, BT_ERR_EXHAUSTED);
    assert_non_null(strstr(k.why, "no room after all"));
    assert_int_equal(s->ended, BT_ERR_EXHAUSTED);
    s->abort_inside = false;
    /* both sides must mean the same prompt */
    struct bt_wire_peer_addr a = wp_addr(A);
    static const struct {
        uint32_t tokens, chunk;
    } other[] = {{47, 16}, {48, 32}};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(other); i++) {
        wp_recv(&P, B, &k, &a, 1, 3, other[i].tokens, other[i].chunk, 0, 0);
        WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 3 + i);
        assert_int_equal(k.failed, BT_ERR_MISMATCH);
        assert_int_equal(s->ended, BT_ERR_MISMATCH);
    }
    assert_true(wp_metric(B, "baton_kv_flows_failed_total") == 6);
    wp_recv(&P, B, &k, &a, 99, 3, 48, 16, 0, 0); /* nobody ever grants it */
    uint64_t begun_ns = bt_mono_ns();
    WAIT_FOR(&P, k.n_quiet == 1);
    assert_int_equal(k.failed, BT_ERR_NOT_FOUND);
    assert_true(bt_mono_ns() - begun_ns >= 1900 * 1000000ull);
}

/* Either side ends a flow: the other one is told, and the rest of it never comes. */
static void test_ends(void **state)
{
    struct wp_sink k, all;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 3, 96, 16);
    for (uint32_t i = 0; i < 4; i++) {
        bool sent = i % 2 != 0; /* some of it is there by then */
        s->n_ended = 0;
        bt_flow_raise(s->word, 3, sent ? 4 : 0);
        wp_pull(&P, &k, s, 0);
        WAIT_FOR(&P, s->send != NULL && bt_flow_read(&k.word, 3) == (sent ? 4 : 0));
        if (i < 2) {
            bt_wire_send_abort(s->send, BT_ERR_STALE, "taken back");
            if (s->send != NULL) { /* once is enough */
                bt_wire_send_abort(s->send, BT_ERR_EXHAUSTED, "again");
            }
        } else {
            bt_wire_recv_cancel(k.recv);
            if (k.recv != NULL) {
                bt_wire_recv_cancel(k.recv);
            }
        }
        WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 1);
        assert_int_equal(k.n_done, 0);
        assert_int_equal(k.n_failed, i < 2);
        assert_int_equal(s->ended, i < 2 ? BT_ERR_STALE : BT_ERR_CANCELLED);
        assert_true(i >= 2 || (k.failed == BT_ERR_STALE && strstr(k.why, "taken back") != NULL));
        bt_flow_raise(s->word, 3, 18); /* nobody looks any more: its slots are B's again */
        bt_wire_kick(A->wire);
        s->early = NULL;
        struct wp_source *t = wp_grant(&P, A, 10 + i, 1, 16, 16);
        wp_send_all(&P, t); /* a later flow is done: the earlier one would have been */
        wp_pull(&P, &all, t, 0);
        WAIT_FOR(&P, all.n_quiet == 1 && t->n_ended == 1);
        for (uint32_t b = 2; b < 6; b++) {
            assert_int_equal(*wp_segment(&P, B, k.slots[b], 0), 0xee);
        }
        assert_int_equal(bt_flow_read(&k.word, 3), sent ? 4 : 0);
    }
    assert_true(wp_metric(B, "baton_kv_peer_sessions") == 1); /* the session is none the worse */
    assert_true(wp_metric(B, "baton_kv_peer_sessions_lost_total") == 0);
}

static void test_deadline(void **state)
{
    struct wp_sink k;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 3, 96, 16);
    struct bt_wire_peer_addr a = wp_addr(A);
    wp_raise(A, s, 5);
    wp_recv(&P, B, &k, &a, 1, 3, 96, 16, 0, 300);
    WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == (s->looked > 0));
    assert_int_equal(k.failed, BT_ERR_TIMEOUT);
    assert_int_equal(k.n_done, 0);
    assert_true(s->looked == 0 || s->ended == BT_ERR_TIMEOUT);
}

/* A byte turned over in the sender's slab, behind its CRC: found, told, and never committed. */
static void test_a_wrong_byte_is_never_committed(void **state)
{
    struct wp_sink k;
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 3, 96, 32);
    for (uint32_t l = 0; l < WP_LAYERS; l++) {
        (void)bt_slab_crcs_get(A->crcs, s->slots[3], l, &s->names[3]);
    }
    wp_segment(&P, A, s->slots[3], 1)[P.seg - 1] ^= 4; /* item 4: chunk 1, layer 1 */
    wp_send_all(&P, s);
    wp_pull(&P, &k, s, 0);
    WAIT_FOR(&P, k.n_quiet == 1 && s->n_ended == 1);
    assert_int_equal(k.failed, BT_ERR_DATA_LOSS);
    assert_non_null(strstr(k.why, "block 3 layer 1"));
    assert_int_equal(s->ended, BT_ERR_DATA_LOSS);
    assert_true(bt_flow_read(&k.word, 3) <= 4);
    assert_true(wp_metric(B, "baton_kv_crc_errors_total") == 1);
    assert_true(wp_metric(B, "baton_kv_flows_failed_total") == 1);
    assert_true(wp_metric(B, "baton_kv_peer_sessions") == 1);
}

/* Many flows at once, both ways, with room for one segment under way. */
static void test_many_at_once(void **state)
{
    struct wp_sink k[2][6];
    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        for (uint32_t e = 0; e < 2; e++) {
            struct wp_end *from = &P.e[e], *to = &P.e[1 - e];
            struct bt_wire_peer_addr a = wp_addr(from);
            struct wp_source *s = wp_grant(&P, from, 10 * e + i, 1, 128, 32);
            s->early = &wp_trailer;
            wp_raise(from, s, bt_flow_items(&s->shape));
            wp_recv(&P, to, &k[e][i], &a, s->request, 1, 128, 32, i, 0);
        }
    }
    for (uint32_t i = 0; i < 6; i++) {
        for (uint32_t e = 0; e < 2; e++) {
            WAIT_FOR(&P, k[e][i].n_quiet == 1 && P.e[e].sources[i].n_ended == 1);
            assert_int_equal(k[e][i].n_done, 1);
            wp_check(&P, &P.e[1 - e], &k[e][i], 10 * e + i, i, 8);
        }
    }
    for (uint32_t e = 0; e < 2; e++) { /* one session each way */
        assert_true(wp_metric(&P.e[e], "baton_kv_peer_sessions") == 2);
    }
}

/* ---- fetches ---- */

static const uint8_t have_some[6] = {BT_WIRE_IN_SLAB, BT_WIRE_LACKS, BT_WIRE_FROM_SSD,
                                     BT_WIRE_LACKS,   BT_WIRE_LACKS, BT_WIRE_IN_SLAB};

/* B asks for the six blocks of A's source. */
static void fetch(struct wp_sink *k, const struct wp_source *s, uint32_t class)
{
    struct bt_wire_peer_addr a = wp_addr(A);
    *k = (struct wp_sink){.request = 5, .epoch = 2};
    k->recv = bt_wire_fetch_start(B->wire, &a, 5, 2, s->names, 6, class, &wp_sink_ops, k);
}

/* A offers those blocks of have_some. */
static void offer(struct wp_source *s, uint32_t *slots, struct bt_kv_key *names)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < 6; i++) {
        if (have_some[i] != BT_WIRE_LACKS) {
            slots[n] = s->slots[i];
            names[n++] = s->names[i];
        }
    }
    struct bt_wire_source src = {
        {n * WP_PAGE, WP_PAGE, n * WP_PAGE, WP_LAYERS}, slots, names, &A->want.word, NULL};
    bt_flow_raise(&A->want.word, A->want.epoch, WP_LAYERS);
    bt_wire_send_offer(A->want.send, &src, have_some, 6);
}

static void test_fetch(void **state)
{
    struct wp_sink k;
    uint32_t slots[6];
    struct bt_kv_key names[6];
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 1, 96, 96);
    for (uint32_t class = BT_WIRE_FETCH; class <= BT_WIRE_REPLICA; class ++) {
        A->want = (struct wp_want){0};
        fetch(&k, s, class);
        WAIT_FOR(&P, A->want.send != NULL);
        assert_string_equal(A->want.peer, "kvstore-n2");
        assert_int_equal(A->want.incarnation, B->incarnation);
        assert_int_equal(A->want.request, 5);
        assert_int_equal(A->want.epoch, 2);
        assert_int_equal(A->want.class, class);
        assert_int_equal(A->want.n, 6);
        assert_memory_equal(A->want.keys, s->names, 6 * sizeof(s->names[0]));
        offer(s, slots, names);
        WAIT_FOR(&P, k.n_offer == 1);
        assert_memory_equal(k.have, have_some, 6);
        wp_take_slots(B, &k, 3);
        memcpy(k.names, names, sizeof(names));
        bt_wire_fetch_take(k.recv, k.slots);
        WAIT_FOR(&P, k.n_quiet == 1 && A->want.n_ended == 1);
        assert_int_equal(k.n_done, 1);
        assert_int_equal(k.n_failed, 0);
        assert_int_equal(k.segments, 3 * WP_LAYERS);
        assert_int_equal(k.bytes, 3 * WP_LAYERS * P.seg);
        assert_int_equal(k.trailer.first_token, 0);
        assert_int_equal(A->want.ended, BT_OK);
        assert_int_equal(A->want.n_seen, class - BT_WIRE_FETCH + 1 - (class - BT_WIRE_FETCH));
        for (uint32_t l = 0; l < WP_LAYERS; l++) {
            static const uint32_t block[] = {0, 2, 5};
            for (uint32_t b = 0; b < 3; b++) {
                for (uint32_t i = 0; i < P.seg; i++) {
                    assert_int_equal(wp_segment(&P, B, k.slots[b], l)[i],
                                     wp_byte(1, block[b], l, i));
                }
            }
        }
    }
}

/* Ended by either side, before and after the offer and after it was taken. */
static void test_fetch_ends(void **state)
{
    struct wp_sink k;
    uint32_t slots[6];
    struct bt_kv_key names[6];
    (void)state;
    struct wp_source *s = wp_grant(&P, A, 1, 1, 96, 96);
    for (uint32_t i = 0; i < 4; i++) {
        bool offered = i / 2 != 0, by_sender = i % 2 != 0;
        A->want = (struct wp_want){0};
        fetch(&k, s, BT_WIRE_FETCH);
        WAIT_FOR(&P, A->want.send != NULL);
        if (offered) {
            offer(s, slots, names);
            WAIT_FOR(&P, k.n_offer == 1);
        }
        if (by_sender) {
            bt_wire_send_abort(A->want.send, BT_ERR_NOT_FOUND, "nothing is here");
        } else {
            bt_wire_recv_cancel(k.recv);
        }
        WAIT_FOR(&P, k.n_quiet == 1 && A->want.n_ended == 1);
        assert_int_equal(k.n_done, 0);
        assert_int_equal(k.n_failed, by_sender);
        assert_true(!by_sender || k.failed == BT_ERR_NOT_FOUND);
        assert_true(!by_sender || strstr(k.why, "nothing is here") != NULL);
        assert_int_equal(A->want.ended, by_sender ? BT_ERR_NOT_FOUND : BT_ERR_CANCELLED);
    }
    A->want = (struct wp_want){.answer = BT_ERR_EXHAUSTED}; /* refused at once: not asked again */
    fetch(&k, s, BT_WIRE_FETCH);
    WAIT_FOR(&P, k.n_quiet == 1);
    assert_int_equal(k.failed, BT_ERR_EXHAUSTED);
    A->want.answer = BT_ERR_NOT_FOUND;
    fetch(&k, s, BT_WIRE_FETCH);
    WAIT_FOR(&P, k.n_quiet == 1);
    assert_int_equal(k.failed, BT_ERR_NOT_FOUND);
    assert_int_equal(A->want.n_seen, 2);
    assert_int_equal(A->want.n_ended, 0);
    A->want = (struct wp_want){0}; /* a wrong byte: the sender is told which */
    fetch(&k, s, BT_WIRE_FETCH);
    WAIT_FOR(&P, A->want.send != NULL);
    (void)bt_slab_crcs_get(A->crcs, s->slots[2], 0, &s->names[2]);
    wp_segment(&P, A, s->slots[2], 0)[0] ^= 1;
    offer(s, slots, names);
    WAIT_FOR(&P, k.n_offer == 1);
    wp_take_slots(B, &k, 3);
    bt_wire_fetch_take(k.recv, k.slots);
    WAIT_FOR(&P, k.n_quiet == 1 && A->want.n_ended == 1);
    assert_int_equal(k.failed, BT_ERR_DATA_LOSS);
    assert_int_equal(A->want.ended, BT_ERR_DATA_LOSS);
}

/* What the wire process says of UCX is the reason that the kvstore gives. */
static void test_ucx_that_does_not_start(void **state)
{
    static const struct bt_wire_ops ops = {.lookup = wp_lookup, .send_end = wp_send_end};
    struct bt_wire_config conf = wp_config(&P, B);
    struct bt_metrics *metrics = bt_metrics_create();
    struct bt_wire *w = NULL;
    char err[512] = "";
    (void)state;
    setenv("UCX_TLS", "sm", 1);
    bt_status_t st = bt_wire_create(P.loop, P.rpc, B->server, B->slab, &conf, &ops, B, metrics, &w,
                                    err, sizeof(err));
    unsetenv("UCX_TLS");
    assert_int_equal(st, BT_ERR_CONFIG);
    if (strstr(err, "UCX_TLS=sm has no transport between hosts") == NULL) {
        fail_msg("\"%s\"", err);
    }
    bt_metrics_destroy(metrics);
}

static int narrow(void **state)
{
    (void)state;
    wp_open(&P, &(struct wp_options){.over_grpc = true, .in_flight = 1});
    return 0;
}

static int narrow_ucx(void **state)
{
    (void)state;
    wp_open(&P, &(struct wp_options){.in_flight = 1, .no_crcs = true});
    return 0;
}

/* Some segments of this size are more than UCX sends without being asked (EAGER_MAX_TCP). */
static int large(void **state)
{
    (void)state;
    wp_open(&P, &(struct wp_options){.seg = 32 << 10});
    return 0;
}

#define LARGE(f)                                                                                   \
    {                                                                                              \
        "large: " #f, f, large, wp_over, NULL                                                      \
    }
#define BOTH(f)                                                                                    \
    {"grpc: " #f, f, wp_over_grpc, wp_over, NULL},                                                 \
    {                                                                                              \
        "ucx: " #f, f, wp_over_ucx, wp_over, NULL                                                  \
    }

int main(int argc, char **argv)
{
    bt_wx_child_main_if_asked(argc, argv);
    setenv("UCX_LOG_LEVEL", "fatal", 0);
    const struct CMUnitTest tests[] = {
        BOTH(test_flows_of_every_shape),
        BOTH(test_items_follow_the_word),
        cmocka_unit_test_setup_teardown(test_refusals, wp_over_grpc, wp_over),
        BOTH(test_ends),
        BOTH(test_deadline),
        BOTH(test_a_wrong_byte_is_never_committed),
        cmocka_unit_test_setup_teardown(test_many_at_once, narrow, wp_over),
        cmocka_unit_test_setup_teardown(test_many_at_once, narrow_ucx, wp_over),
        BOTH(test_fetch),
        BOTH(test_fetch_ends),
        cmocka_unit_test_setup_teardown(test_ucx_that_does_not_start, wp_over_ucx, wp_over),
        LARGE(test_flows_of_every_shape),
        LARGE(test_items_follow_the_word),
        LARGE(test_ends),
        LARGE(test_a_wrong_byte_is_never_committed),
        LARGE(test_many_at_once),
        LARGE(test_fetch),
        LARGE(test_fetch_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
