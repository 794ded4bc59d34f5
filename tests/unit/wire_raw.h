/* The other kvstore of a wire (kvstore/wire/wire.h), played message by message over gRPC; A
 * of wire_pair.h is the wire that is tested. Include after cmocka.h. */
#ifndef BT_TESTS_WIRE_RAW_H
#define BT_TESTS_WIRE_RAW_H

#include "common/rpc/pb.h"
#include "common/rpc/session_hello.h"
#include "kvstore/wire/msg.h"
#include "peer.pb-c.h"
#include "wire_pair.h"

#define SESSION  "/baton.Peer/Session"
#define SEGMENTS "/baton.Peer/Segments"

/* The other side of one stream. */
struct raw {
    struct bt_rpc_channel *channel; /* of a dialer */
    struct bt_rpc_stream *stream;
    bool closed;
    int code;
    char detail[300];
    uint32_t n[16]; /* messages by kind */
    uint32_t n_raw; /* messages on a stream of segments */
    uint8_t raw[256];
    size_t raw_len;
    char address[64]; /* of the hello */
    uint64_t nonce, incarnation;
    uint32_t stream_id, lane;
    int32_t status;
    char why[200];
};

static inline void on_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct raw *r = arg;
    (void)s;
    Baton__PeerMsg *m = baton__peer_msg__unpack(NULL, len, data);
    assert_non_null(m);
    r->n[m->m_case]++;
    if (m->m_case == BATON__PEER_MSG__M_HELLO) {
        snprintf(r->address, sizeof(r->address), "%.*s", (int)m->hello->ucx_address.len,
                 (const char *)m->hello->ucx_address.data);
        r->nonce = m->hello->nonce;
        r->incarnation = m->hello->incarnation;
    } else if (m->m_case == BATON__PEER_MSG__M_FLOW_OPEN) {
        r->stream_id = m->flow_open->stream;
    } else if (m->m_case == BATON__PEER_MSG__M_FLOW_REFUSED) {
        r->stream_id = m->flow_refused->stream;
        r->status = m->flow_refused->status;
        snprintf(r->why, sizeof(r->why), "%s", m->flow_refused->detail);
    } else if (m->m_case == BATON__PEER_MSG__M_FLOW_CLOSE) {
        r->stream_id = m->flow_close->stream;
        r->status = m->flow_close->status;
    } else if (m->m_case == BATON__PEER_MSG__M_LANE_CLOSE) {
        r->lane = m->lane_close->lane;
    }
    baton__peer_msg__free_unpacked(m, NULL);
}

static inline void on_raw(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct raw *r = arg;
    (void)s;
    r->n_raw++;
    r->raw_len = len;
    memcpy(r->raw, data, BT_MIN(len, sizeof(r->raw)));
}

static inline void on_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    struct raw *r = arg;
    (void)s;
    r->stream = NULL;
    r->closed = true;
    r->code = code;
    snprintf(r->detail, sizeof(r->detail), "%s", detail);
}

static const struct bt_rpc_stream_ops session_ops = {.on_message = on_message,
                                                     .on_close = on_close};
static const struct bt_rpc_stream_ops raw_ops = {.on_message = on_raw, .on_close = on_close};

static inline void dial(struct raw *r, const char *target, const char *method)
{
    *r = (struct raw){0};
    assert_int_equal(bt_rpc_channel_create(P.rpc, target, "kvstore", &r->channel), BT_OK);
    assert_int_equal(bt_rpc_stream_open(r->channel, method, false,
                                        strcmp(method, SESSION) == 0 ? &session_ops : &raw_ops, r,
                                        &r->stream),
                     BT_OK);
}

static inline void hang_up(struct raw *r)
{
    if (r->stream != NULL) {
        bt_rpc_stream_close(r->stream, BT_GRPC_OK, "", false);
        r->stream = NULL;
    }
    if (r->channel != NULL) {
        bt_rpc_channel_destroy(r->channel);
        r->channel = NULL;
    }
}

/* The session ends with this code, and its text says `word`. */
static inline void assert_ended(struct raw *r, int code, const char *word)
{
    WAIT_FOR(&P, r->closed);
    if (r->code != code || strstr(r->detail, word) == NULL) {
        fail_msg("code %d: %s; not %d: %s", r->code, r->detail, code, word);
    }
    hang_up(r);
}

/* ---- messages ---- */

#define SAY(r, kind, CASE, TYPE, ...)                                                              \
    do {                                                                                           \
        Baton__PeerMsg m_ = BATON__PEER_MSG__INIT;                                                 \
        TYPE b_ = __VA_ARGS__;                                                                     \
        m_.m_case = BATON__PEER_MSG__M_##CASE;                                                     \
        m_.kind = &b_;                                                                             \
        assert_int_equal(bt_rpc_stream_send_pb((r)->stream, &m_.base), BT_OK);                     \
    } while (0)

static inline Baton__PeerHello a_hello(void)
{
    Baton__PeerHello h = BATON__PEER_HELLO__INIT;
    h.version = BT_RPC_SESSION_VERSION;
    h.cluster = (char *)(uintptr_t) "test";
    h.name = (char *)(uintptr_t) "kvstore-x";
    h.incarnation = 55;
    h.expect_incarnation = A->incarnation;
    h.layout_id = P.layout.layout_id;
    h.root_key = (ProtobufCBinaryData){sizeof(P.root), P.root.b};
    h.ucx_address = (ProtobufCBinaryData){11, (uint8_t *)(uintptr_t) "127.0.0.1:1"};
    h.nonce = 1234;
    h.transport = BATON__KV_TRANSPORT__GRPC;
    return h;
}

static inline void say_hello(struct raw *r, const Baton__PeerHello *h)
{
    SAY(r, hello, HELLO, Baton__PeerHello, *h);
}

static inline void say_proof(struct raw *r, uint64_t nonce)
{
    struct bt_wire_proof p = {BT_WIRE_PROOF_MAGIC, BT_WIRE_VERSION, nonce};
    assert_int_equal(bt_rpc_stream_send(r->stream, &p, sizeof(p)), BT_OK);
}

static inline void say_close(struct raw *r, uint32_t stream, int32_t status, const char *why)
{
    Baton__FlowClose c = BATON__FLOW_CLOSE__INIT;
    c.stream = stream;
    c.status = status;
    c.detail = (char *)(uintptr_t)why;
    SAY(r, flow_close, FLOW_CLOSE, Baton__FlowClose, c);
}

#endif
