/* Receiving ends of flows, on the transfer thread: messages are received straight into the slots'
 * segments, checked, and committed in the order of items by raising the flow word. Every field of a
 * message is the peer's claim until checked. Writes slots of WRITING blocks, their CRC rows, the
 * flow word.
 *
 * Over TCP all bytes come through a buffer of UCX's, and the copy from there is ours: it computes
 * the CRC on the way and goes past the cache. UCX is never given the address of a slot then. With
 * RDMA the network card writes into the slots, and CRCs are computed behind it. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/crc32c.h"
#include "common/log/log.h"
#include "kvstore/wire/xfer_priv.h"

struct bt_wx_land { /* one message */
    uint32_t magic;
    struct bt_wx_recv *recv;
    struct bt_wx_lane *lane;
    struct bt_wire_seg_hdr hdr;
    const uint8_t *crcs; /* what the sender computed */
    uint64_t at;         /* payload bytes that are in the slots, in order */
    uint32_t crc;        /* of the segment that is at `at`, so far */
    bool loose;          /* the card wrote them, or they came out of order: CRCs at the end */
};

struct bt_wx_pull { /* one rendezvous receive */
    struct bt_wx_land land;
    uint8_t crcs[4 * BT_WIRE_SEGS_MAX];
    ucp_dt_iov_t iov[]; /* RDMA */
};

void bt_wx_recv_add(struct bt_wx_recv *r)
{
    r->added = true;
    r->n_items = bt_flow_items(&r->shape);
    r->progress = bt_flow_resident_items(&r->shape, r->first_block);
    uint64_t bits = (uint64_t)bt_flow_blocks(&r->shape) * r->shape.n_layers;
    r->started = bt_calloc(BT_DIV_UP(bits, 64) + 1, sizeof(uint64_t));
    r->landed = bt_calloc(r->n_items + 1u, sizeof(uint32_t));
    bt_list_init(&r->notify_link);
    bt_list_insert_tail(&r->conn->recvs, &r->link);
    BT_ASSERT(bt_map_put(r->conn->streams, &r->stream, r) == NULL);
    if (r->progress == r->n_items) {
        bt_wx_event(r->conn->x, &r->obj, BT_WX_EV_LANDED);
    }
}

void bt_wx_recv_stop(struct bt_wx_recv *r)
{
    if (r->stopping) {
        return;
    }
    r->stopping = true;
    r->stop_ns = r->conn->x->now_ns;
    r->conn->n_stopping++;
    bt_list_remove(&r->notify_link);
    bt_map_del(r->conn->streams, &r->stream);
    bt_wx_conn_hot(r->conn);
}

void bt_wx_recv_reap(struct bt_wx_conn *c)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &c->recvs) {
        struct bt_wx_recv *r = BT_CONTAINER_OF(i, struct bt_wx_recv, link);
        if (!r->stopping) {
            continue;
        }
        if (r->outstanding == 0 || bt_list_empty(&c->lanes)) {
            c->n_stopping--;
            bt_list_remove(&r->link);
            free(r->started);
            free(r->landed);
            bt_wx_event(c->x, &r->obj, BT_WX_EV_STOPPED);
        } else if (c->x->now_ns - r->stop_ns > BT_WX_GRACE_NS) {
            /* ucp_request_cancel does not end the receive of an active message; this does */
            bt_wx_conn_kill(c, BT_ERR_PEER_LOST, "%u receives of an ended flow do not finish",
                            r->outstanding);
        }
    }
}

static void recv_fail(struct bt_wx_recv *r, bt_status_t st, const char *fmt, ...)
{
    va_list ap;
    if (r->failed || r->stopping) {
        return;
    }
    va_start(ap, fmt);
    vsnprintf(r->why, sizeof(r->why), fmt, ap);
    va_end(ap);
    r->failed = true;
    r->lost = st;
    bt_wx_event(r->conn->x, &r->obj, BT_WX_EV_LOST);
}

/* Segments that an item must bring, given what was resident. */
static uint32_t item_segments(const struct bt_wx_recv *r, uint32_t item)
{
    uint32_t first, end;
    bt_flow_item_blocks(&r->shape, item, &first, &end);
    first = BT_MAX(first, r->first_block);
    return end > first ? end - first : 0;
}

static void recv_commit(struct bt_wx_recv *r)
{
    uint32_t before = r->progress;
    while (r->progress < r->n_items && r->landed[r->progress] == item_segments(r, r->progress)) {
        r->progress++;
    }
    if (r->progress == before) {
        return;
    }
    bt_flow_raise(r->word, r->epoch, r->progress);
    r->notify |=
        r->progress == r->n_items ? BT_WX_EV_PROGRESS | BT_WX_EV_LANDED : BT_WX_EV_PROGRESS;
    if (bt_list_empty(&r->notify_link)) {
        bt_list_insert_tail(&r->conn->x->notify, &r->notify_link);
    }
}

/* One event for all items of a turn: waking control for each cost a quarter of the throughput. */
void bt_wx_recv_notify(struct bt_wx *x)
{
    while (!bt_list_empty(&x->notify)) {
        struct bt_wx_recv *r = BT_CONTAINER_OF(x->notify.next, struct bt_wx_recv, notify_link);
        bt_list_remove(&r->notify_link);
        bt_wx_event(x, &r->obj, r->notify);
        r->notify = 0;
    }
}

static uint8_t *segment_at(const struct bt_wx_land *l, uint32_t i)
{
    const struct bt_wx_recv *r = l->recv;
    const struct bt_wx_config *conf = &r->conn->x->conf;
    uint32_t bytes;
    return (uint8_t *)bt_slab_data(conf->slab, r->slots[l->hdr.first_block + i]) +
           bt_kv_segment(conf->layout, l->hdr.item % r->shape.n_layers, &bytes);
}

/* Segment i is in its slot and has this CRC: is it the right one? Else the flow fails. */
static bool segment_check(const struct bt_wx_land *l, uint32_t i, uint32_t crc)
{
    struct bt_wx_recv *r = l->recv;
    const struct bt_wx_config *conf = &r->conn->x->conf;
    uint32_t block = l->hdr.first_block + i, layer = l->hdr.item % r->shape.n_layers, want;
    memcpy(&want, l->crcs + 4u * i, 4);
    if (crc != want) {
        bt_metric_add(conf->m.crc_errors, 1);
        recv_fail(r, BT_ERR_DATA_LOSS, "CRC of block %u layer %u is %08x, not %08x", block, layer,
                  crc, want);
        return false;
    }
    conf->slab->crcs[(uint64_t)r->slots[block] * conf->layout->n_layers + layer] = crc;
    return true;
}

/* n more bytes of the payload, from where it is at; nothing for a flow that has ended. */
static void land_bytes(struct bt_wx_land *l, const uint8_t *from, size_t n)
{
    struct bt_wx_recv *r = l->recv;
    uint32_t seg_bytes = l->hdr.seg_bytes, layer = l->hdr.item % r->shape.n_layers;
    while (n > 0 && !r->stopping && !r->failed) {
        uint32_t i = (uint32_t)(l->at / seg_bytes), off = (uint32_t)(l->at % seg_bytes);
        uint32_t part = (uint32_t)BT_MIN(n, (size_t)(seg_bytes - off));
        if (off == 0) {
            l->crc = bt_slab_segment_seed(&r->names[l->hdr.first_block + i], layer,
                                          r->conn->x->conf.layout->layout_id, seg_bytes);
        }
        l->crc = bt_crc32c_stream(l->crc, segment_at(l, i) + off, from, part);
        l->at += part;
        from += part;
        n -= part;
        if (off + part == seg_bytes && !segment_check(l, i, l->crc)) {
            return;
        }
    }
}

/* The same, of a message that UCX has spread over several connections. */
static void land_loose(const struct bt_wx_land *l, uint64_t at, const uint8_t *from, size_t n)
{
    while (n > 0 && !l->recv->stopping && !l->recv->failed) {
        uint32_t off = (uint32_t)(at % l->hdr.seg_bytes);
        size_t part = BT_MIN(n, (size_t)(l->hdr.seg_bytes - off));
        memcpy(segment_at(l, (uint32_t)(at / l->hdr.seg_bytes)) + off, from, part);
        at += part;
        from += part;
        n -= part;
    }
}

/* All bytes of the message are in the slots. */
static void land_end(const struct bt_wx_land *l)
{
    struct bt_wx_recv *r = l->recv;
    const struct bt_wx_config *conf = &r->conn->x->conf;
    uint32_t n = l->hdr.n_segs, bytes = l->hdr.seg_bytes, layer = l->hdr.item % r->shape.n_layers;
    for (uint32_t i = 0; i < n && l->loose && !r->stopping && !r->failed; i++) {
        (void)segment_check(l, i,
                            bt_slab_segment_crc(&r->names[l->hdr.first_block + i], layer,
                                                conf->layout->layout_id, segment_at(l, i), bytes));
    }
    if (r->stopping || r->failed) {
        return;
    }
    BT_ASSERT(l->loose || l->at == (uint64_t)n * bytes);
    r->last_ns = bt_real_ns();
    r->bytes += (uint64_t)n * bytes;
    r->segments += n;
    bt_metric_add(conf->m.recv_bytes, (uint64_t)n * bytes);
    bt_metric_add(conf->m.recv_segs, n);
    bt_metric_add(conf->cards[l->lane->card].recv_bytes, (uint64_t)n * bytes);
    bt_metric_add(conf->cards[l->lane->card].recv_segs, n);
    r->landed[l->hdr.item] += n;
    recv_commit(r);
}

/* Marks the message's segments as begun or not. */
static void mark(struct bt_wx_recv *r, const struct bt_wire_seg_hdr *h, bool as_begun)
{
    uint32_t layer = h->item % r->shape.n_layers;
    for (uint32_t i = 0; i < h->n_segs; i++) {
        uint64_t bit = (uint64_t)(h->first_block + i) * r->shape.n_layers + layer;
        r->started[bit / 64] &= ~(1ull << bit % 64);
        r->started[bit / 64] |= (uint64_t)as_begun << bit % 64;
    }
}

static void pull_done(struct bt_wx_pull *p, ucs_status_t status, size_t len)
{
    struct bt_wx_recv *r = p->land.recv;
    struct bt_wx_lane *l = p->land.lane;
    r->outstanding--;
    l->n_recvs--;
    if (status != UCS_OK) {
        mark(r, &p->land.hdr, false); /* it may come again over another lane */
        bt_wx_lane_kill(l, BT_ERR_PEER_LOST, "UCX receive: %s", ucs_status_string(status));
    } else if (len != (size_t)p->land.hdr.n_segs * p->land.hdr.seg_bytes) {
        bt_wx_conn_kill(r->conn, BT_ERR_PEER_PROTOCOL, "short message");
    } else {
        land_end(&p->land);
    }
    bt_wx_conn_hot(r->conn);
    free(p);
}

static void on_received(void *request, ucs_status_t status, size_t length, void *user)
{
    struct bt_wx_pull *p = user;
    BT_ASSERT(p->land.magic == BT_WX_LAND_MAGIC);
    ucp_request_free(request);
    pull_done(p, status, length);
}

/* ---- what UCX asks a datatype of ours for ---- */

static void *unpack_start(void *context, void *buffer, size_t count)
{
    (void)context;
    (void)count;
    return buffer; /* the bt_wx_pull */
}

static size_t unpack_size(void *state)
{
    const struct bt_wx_pull *p = state;
    return (size_t)p->land.hdr.n_segs * p->land.hdr.seg_bytes;
}

static ucs_status_t unpack(void *state, size_t offset, const void *src, size_t length)
{
    struct bt_wx_pull *p = state;
    BT_ASSERT(p->land.magic == BT_WX_LAND_MAGIC);
    if (offset > unpack_size(state) || length > unpack_size(state) - offset) {
        return UCS_ERR_MESSAGE_TRUNCATED;
    }
    if (p->land.loose || offset != p->land.at) {
        if (!p->land.loose) {
            bt_metric_add(p->land.lane->conn->x->conf.m.unordered, 1);
        }
        p->land.loose = true;
        land_loose(&p->land, offset, src, length);
    } else {
        land_bytes(&p->land, src, length);
    }
    return UCS_OK;
}

static void unpack_finish(void *state)
{
    (void)state; /* on_received frees it */
}

ucs_status_t bt_wx_recv_datatype(ucp_datatype_t *dt_p)
{
    static const ucp_generic_dt_ops_t ops = {.start_unpack = unpack_start,
                                             .packed_size = unpack_size,
                                             .unpack = unpack,
                                             .finish = unpack_finish};
    return ucp_dt_create_generic(&ops, NULL, dt_p);
}

/* ---- messages ---- */

/* False if a segment of the message was begun before. */
static bool recv_begin(struct bt_wx_recv *r, const struct bt_wire_seg_hdr *h)
{
    for (uint32_t i = 0; i < h->n_segs; i++) {
        if (bt_wx_recv_begun(r, h->item, h->first_block + i)) {
            return false;
        }
    }
    mark(r, h, true);
    r->touched = BT_MAX(r->touched, h->item + 1);
    return true;
}

/* Rendezvous: the sender waits until we ask for the bytes. */
static ucs_status_t recv_pull(const struct bt_wx_land *land, void *desc)
{
    struct bt_wx_recv *r = land->recv;
    struct bt_wx_lane *lane = land->lane;
    const struct bt_wx *x = lane->conn->x;
    const struct bt_wire_seg_hdr *h = &land->hdr;
    bool copy = x->copies;
    uint32_t n = h->n_segs;
    struct bt_wx_pull *l = bt_malloc(sizeof(*l) + (copy ? 0 : n * sizeof(ucp_dt_iov_t)));
    l->land = *land;
    l->land.crcs = l->crcs;
    l->land.loose = !copy;
    memcpy(l->crcs, land->crcs, 4u * n);
    for (uint32_t i = 0; i < n && !copy; i++) {
        l->iov[i].buffer = segment_at(land, i);
        l->iov[i].length = h->seg_bytes;
    }
    bool one = n == 1;
    ucp_request_param_t p = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .datatype = copy  ? x->unpacked
                    : one ? ucp_dt_make_contig(1)
                          : UCP_DATATYPE_IOV,
        .memory_type = UCS_MEMORY_TYPE_HOST,
        .cb.recv_am = on_received,
        .user_data = l,
    };
    r->outstanding++;
    lane->n_recvs++;
    ucs_status_ptr_t q = ucp_am_recv_data_nbx(lane->worker, desc,
                                              copy  ? (void *)l
                                              : one ? l->iov[0].buffer
                                                    : (void *)l->iov,
                                              copy  ? 1
                                              : one ? h->seg_bytes
                                                    : n,
                                              &p);
    if (q == NULL || UCS_PTR_IS_ERR(q)) {
        pull_done(l, UCS_PTR_STATUS(q), (size_t)n * h->seg_bytes);
    }
    return UCS_INPROGRESS;
}

static struct bt_wx_recv *recv_find(struct bt_wx_conn *c, const struct bt_wire_seg_hdr *h)
{
    struct bt_wx_recv *r = bt_map_get(c->streams, &h->stream);
    if (r == NULL) {
        bt_wx_absorb_adds(c->x);
        r = bt_map_get(c->streams, &h->stream);
    }
    return r;
}

/* Reads a message's header and finds where its bytes belong. False: they belong nowhere. ours: it
 * came from the session's peer for certain; what strangers send is only dropped. */
static bool recv_accept(struct bt_wx_lane *l, const void *header, size_t header_len, size_t payload,
                        bool ours, struct bt_wx_land *land)
{
    struct bt_wx_conn *c = l->conn;
    const struct bt_wx_config *conf = &c->x->conf;
    struct bt_wire_seg_hdr h;
    const uint8_t *crcs;
    const char *why;
    uint32_t layer_bytes;
    if (c->kill_wanted || l->kill_wanted || l->stopping) {
        return false;
    }
    if (bt_wire_seg_parse(header, header_len, l->nonce, &h, &crcs, &why) != BT_OK) {
        bt_metric_add(conf->m.drop_garbled, 1);
        if (ours) {
            bt_wx_conn_kill(c, BT_ERR_PEER_PROTOCOL, "message with a wrong %s", why);
        }
        return false;
    }
    struct bt_wx_recv *r = recv_find(c, &h);
    if (r == NULL) { /* cancelled a moment ago */
        bt_metric_add(conf->m.drop_unknown, 1);
        return false;
    }
    if (r->request != h.request || r->epoch != h.epoch || r->failed) {
        bt_metric_add(conf->m.drop_stale, 1);
        return false;
    }
    (void)bt_kv_segment(conf->layout, h.item % r->shape.n_layers, &layer_bytes);
    if (bt_wire_seg_check(&h, &r->shape, r->first_block, layer_bytes, payload, &why) != BT_OK) {
        bt_metric_add(conf->m.drop_garbled, 1);
        bt_wx_conn_kill(c, BT_ERR_PEER_PROTOCOL, "message with a wrong %s", why);
        return false;
    }
    if (!recv_begin(r, &h)) {
        bt_metric_add(conf->m.drop_duplicate, 1);
        bt_wx_conn_kill(c, BT_ERR_PEER_PROTOCOL, "segment sent twice: item %u block %u", h.item,
                        h.first_block);
        return false;
    }
    if (r->first_ns == 0) {
        r->first_ns = bt_real_ns();
    }
    *land = (struct bt_wx_land){
        .magic = BT_WX_LAND_MAGIC, .recv = r, .lane = l, .hdr = h, .crcs = crcs};
    return true;
}

ucs_status_t bt_wx_recv_am(void *arg, const void *header, size_t header_len, void *data, size_t len,
                           const ucp_am_recv_param_t *param)
{
    struct bt_wx_lane *l = arg;
    struct bt_wx_land land;
    BT_ASSERT(l->obj.kind == BT_WX_LANE);
    /* anybody can connect to UCX's port */
    bool ours = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) && param->reply_ep == l->ep;
    if (!recv_accept(l, header, header_len, len, ours, &land)) {
        return UCS_OK;
    }
    if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) {
        return recv_pull(&land, data);
    }
    land_bytes(&land, data, len);
    land_end(&land);
    return UCS_OK;
}

void bt_wx_recv_pieces(struct bt_wx_lane *l, const void *header, size_t header_len,
                       const struct iovec *pieces, size_t n, size_t skip, size_t payload)
{
    struct bt_wx_land land;
    if (!recv_accept(l, header, header_len, payload, true, &land)) {
        return;
    }
    for (size_t i = 0; i < n; i++) {
        size_t past = BT_MIN(skip, pieces[i].iov_len);
        skip -= past;
        land_bytes(&land, (const uint8_t *)pieces[i].iov_base + past, pieces[i].iov_len - past);
    }
    land_end(&land);
}
