/* Fetches: flows of sealed blocks that are named by their keys. The receiver asks for blocks. The
 * sender leases those that it has, reads those on its SSD, and answers which ones they are. The
 * receiver takes slots for exactly these, and the flow begins. Control thread. */
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "kvstore/wire/wire_priv.h"

/* ---- receiving ---- */

struct bt_wire_recv *bt_wire_fetch_start(struct bt_wire *w, const struct bt_wire_peer_addr *peer,
                                         uint64_t request, uint32_t epoch,
                                         const struct bt_kv_key *keys, uint32_t n, uint32_t class,
                                         const struct bt_wire_recv_ops *ops, void *arg)
{
    BT_ASSERT(n > 0 && n <= BT_WIRE_FETCH_MAX && epoch != 0);
    struct bt_wire_recv *r = bt_calloc(1, sizeof(*r));
    r->w = w;
    r->ops = *ops;
    r->arg = arg;
    r->n_keys = n;
    r->class = class;
    r->slots = bt_calloc(n, sizeof(*r->slots));
    r->names = bt_calloc(n, sizeof(*r->names));
    memcpy(r->names, keys, n * sizeof(*keys));
    r->x.obj.kind = BT_WX_RECV;
    r->x.slots = r->slots;
    r->x.names = r->names;
    r->x.word = &r->own_word;
    r->x.request = request;
    r->x.epoch = epoch;
    bt_wire_recv_begin(r, peer);
    return r;
}

/* The whole fetch is one chunk, so that messages are as large as they can be. */
static struct bt_flow_shape shape_of(const struct bt_wire *w, uint32_t blocks)
{
    uint32_t tokens = blocks * w->layout.page_tokens;
    return (struct bt_flow_shape){.n_tokens = tokens,
                                  .block_tokens = w->layout.page_tokens,
                                  .chunk_tokens = tokens,
                                  .n_layers = w->layout.n_layers};
}

void bt_wire_fetch_offered(struct bt_wire_session *s, const Baton__FlowOffer *m)
{
    struct bt_wire_recv *r = bt_wire_recv_of(s, m->stream);
    if (r == NULL) {
        return; /* cancelled, but the answer was already on its way */
    }
    uint32_t n = 0;
    bool known = true;
    for (size_t i = 0; i < m->have.len && m->have.len == r->n_keys; i++) {
        known = known && m->have.data[i] <= BT_WIRE_FROM_SSD;
        if (m->have.data[i] != BT_WIRE_LACKS) {
            r->names[n++] = r->names[i];
        }
    }
    if (n == 0 || !known || r->offered) { /* a sender without any block refuses instead */
        bt_wire_session_fail(s,
                             "the peer's FlowOffer does not match the blocks that were asked for",
                             BT_GRPC_INVALID_ARGUMENT);
        return;
    }
    r->offered = true;
    r->x.shape = shape_of(r->w, n);
    r->ops.on_offer(r->arg, m->have.data, r->n_keys);
}

void bt_wire_fetch_take(struct bt_wire_recv *r, const uint32_t *slots)
{
    Baton__FlowTake t = BATON__FLOW_TAKE__INIT;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    BT_ASSERT(r->offered && !r->taken && !r->ended);
    r->taken = r->added = true;
    r->has_trailer = true; /* a fetch has no trailer */
    memcpy(r->slots, slots, bt_flow_blocks(&r->x.shape) * sizeof(*slots));
    bt_flow_raise(r->x.word, r->x.epoch, 0);
    bt_wx_command(r->w->x, &r->x.obj, BT_WX_CMD_ADD); /* before anything can arrive */
    t.stream = r->x.stream;
    m.m_case = BATON__PEER_MSG__M_FLOW_TAKE;
    m.flow_take = &t;
    bt_wire_session_send(r->session, &m);
}

/* ---- sending ---- */

void bt_wire_want_open(struct bt_wire_session *s, const Baton__FlowOpen *o)
{
    struct bt_wire *w = s->w;
    size_t n = o->keys.len / sizeof(struct bt_kv_key);
    if (o->epoch == 0 || bt_wire_send_of(s, o->stream) != NULL) {
        bt_wire_session_fail(
            s, "the peer's FlowOpen of a fetch has no epoch, or a stream number that is in use",
            BT_GRPC_INVALID_ARGUMENT);
        return;
    }
    /* A copy, because the bytes in a message are not aligned. */
    struct bt_kv_key *keys = bt_malloc(o->keys.len);
    memcpy(keys, o->keys.data, o->keys.len);
    /* A fetch never gets the priority of hand-offs, whatever class the peer names. */
    uint32_t class =
        BT_MAX(BT_MIN(o->priority, (uint32_t)BT_WX_CLASSES - 1), (uint32_t)BT_WIRE_FETCH);
    struct bt_wire_want want = {.peer = s->name,
                                .incarnation = s->incarnation,
                                .request = o->request,
                                .epoch = o->epoch,
                                .class = class,
                                .keys = keys,
                                .n = (uint32_t)n};
    struct bt_wire_send *snd = bt_calloc(1, sizeof(*snd));
    snd->w = w;
    snd->session = s;
    snd->want = true;
    snd->n_keys = want.n;
    snd->x.obj.kind = BT_WX_SEND;
    snd->x.conn = &s->conn;
    snd->x.request = o->request;
    snd->x.epoch = o->epoch;
    snd->x.stream = o->stream;
    snd->x.class = want.class;
    bt_status_t st =
        w->ops.want != NULL ? w->ops.want(w->ops_arg, &want, snd, &snd->grant) : BT_ERR_UNSUPPORTED;
    free(keys);
    if (st != BT_OK) {
        bt_wire_refuse(s, o->stream, st, bt_status_text(st));
        free(snd);
        return;
    }
    bt_list_insert_tail(&s->sends, &snd->link);
    s->n_flows++;
}

void bt_wire_send_offer(struct bt_wire_send *snd, const struct bt_wire_source *src,
                        const uint8_t *have, uint32_t n)
{
    Baton__FlowOffer o = BATON__FLOW_OFFER__INIT;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    BT_ASSERT(snd->want && !snd->ended && snd->offered_ns == 0 && n == snd->n_keys);
    snd->x.src = *src;
    snd->x.src.shape = shape_of(snd->w, bt_flow_blocks(&src->shape));
    snd->offered_ns = bt_mono_ns();
    o.stream = snd->x.stream;
    o.have.data = (uint8_t *)(uintptr_t)have;
    o.have.len = n;
    m.m_case = BATON__PEER_MSG__M_FLOW_OFFER;
    m.flow_offer = &o;
    bt_wire_session_send(snd->session, &m);
}

void bt_wire_want_taken(struct bt_wire_session *s, const Baton__FlowTake *m)
{
    struct bt_wire_send *snd = bt_wire_send_of(s, m->stream);
    if (snd == NULL) {
        return; /* aborted, but the message was already on its way */
    }
    if (!snd->want || snd->offered_ns == 0 || snd->open) {
        bt_wire_session_fail(
            s, "the peer's FlowTake is for a transfer that was not offered or is already taken",
            BT_GRPC_INVALID_ARGUMENT);
        return;
    }
    snd->open = true;
    bt_wx_command(s->w->x, &snd->x.obj, BT_WX_CMD_ADD);
}

/* Ends flows that a peer has abandoned, so that their blocks do not stay leased: fetches that the
 * peer asked for but did not read, and aborted flows that it does not close. */
void bt_wire_sends_tick(struct bt_wire_session *s, uint64_t now_ns)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &s->sends) {
        struct bt_wire_send *snd = BT_CONTAINER_OF(i, struct bt_wire_send, link);
        if (snd->want && !snd->open && snd->offered_ns != 0 && now_ns > snd->offered_ns &&
            now_ns - snd->offered_ns > BT_WIRE_TAKE_NS) {
            bt_wire_send_abort(snd, BT_ERR_TIMEOUT, "the receiver took nothing within 5 s");
        } else {
            bt_wire_send_tick(snd, now_ns);
        }
    }
}
