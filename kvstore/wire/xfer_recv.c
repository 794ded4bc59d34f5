/* The receiving ends of flows, on the transfer thread. Bytes of messages are written to the slots'
 * segments and checked; raising the flow word commits them in the order of items. Every field of a
 * message may be wrong until it is checked. Writes slots of WRITING blocks, their CRC rows, the
 * flow word.
 *
 * If the transport has the bytes in its own buffer, this code copies them with stores that bypass
 * the cache and computes the CRC at the same time. If a card wrote them into the slots, the CRC is
 * computed afterwards. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/crc32c.h"
#include "common/log/log.h"
#include "kvstore/wire/xfer_priv.h"

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
        if (r->outstanding == 0 || bt_list_empty(&c->paths)) {
            c->n_stopping--;
            bt_list_remove(&r->link);
            free(r->started);
            free(r->landed);
            bt_wx_event(c->x, &r->obj, BT_WX_EV_STOPPED);
        } else if (c->x->now_ns - r->stop_ns > BT_WX_GRACE_NS) {
            /* ucp_request_cancel does not end the receive of an active message, but this does */
            bt_wx_conn_kill(c, BT_ERR_PEER_LOST, "%u receives of an ended transfer do not finish",
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

/* The number of segments that must arrive for an item; resident ones are not sent. */
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

/* Sends one event for all items of a turn: waking the control thread for each item cost a quarter
 * of the throughput. */
void bt_wx_recv_notify(struct bt_wx *x)
{
    while (!bt_list_empty(&x->notify)) {
        struct bt_wx_recv *r = BT_CONTAINER_OF(x->notify.next, struct bt_wx_recv, notify_link);
        bt_list_remove(&r->notify_link);
        bt_wx_event(x, &r->obj, r->notify);
        r->notify = 0;
    }
}

uint8_t *bt_wx_land_segment(const struct bt_wx_land *l, uint32_t i)
{
    const struct bt_wx_recv *r = l->recv;
    const struct bt_wx_config *conf = &r->conn->x->conf;
    uint32_t bytes;
    return (uint8_t *)bt_slab_data(conf->slab, r->slots[l->hdr.first_block + i]) +
           bt_kv_segment(conf->layout, l->hdr.item % r->shape.n_layers, &bytes);
}

/* Checks the CRC of segment i, which is in its slot. A wrong CRC fails the flow. */
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

void bt_wx_land_bytes(struct bt_wx_land *l, const uint8_t *from, size_t n)
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
        l->crc = bt_crc32c_stream(l->crc, bt_wx_land_segment(l, i) + off, from, part);
        l->at += part;
        from += part;
        n -= part;
        if (off + part == seg_bytes && !segment_check(l, i, l->crc)) {
            return;
        }
    }
}

void bt_wx_land_loose(const struct bt_wx_land *l, uint64_t at, const uint8_t *from, size_t n)
{
    while (n > 0 && !l->recv->stopping && !l->recv->failed) {
        uint32_t off = (uint32_t)(at % l->hdr.seg_bytes);
        size_t part = BT_MIN(n, (size_t)(l->hdr.seg_bytes - off));
        memcpy(bt_wx_land_segment(l, (uint32_t)(at / l->hdr.seg_bytes)) + off, from, part);
        at += part;
        from += part;
        n -= part;
    }
}

void bt_wx_land_end(const struct bt_wx_land *l)
{
    struct bt_wx_recv *r = l->recv;
    const struct bt_wx_config *conf = &r->conn->x->conf;
    uint32_t n = l->hdr.n_segs, bytes = l->hdr.seg_bytes, layer = l->hdr.item % r->shape.n_layers;
    for (uint32_t i = 0; i < n && l->loose && !r->stopping && !r->failed; i++) {
        (void)segment_check(l, i,
                            bt_slab_segment_crc(&r->names[l->hdr.first_block + i], layer,
                                                conf->layout->layout_id, bt_wx_land_segment(l, i),
                                                bytes));
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
    bt_metric_add(conf->cards[l->path->card].recv_bytes, (uint64_t)n * bytes);
    bt_metric_add(conf->cards[l->path->card].recv_segs, n);
    r->landed[l->hdr.item] += n;
    recv_commit(r);
}

/* Sets for all segments of the message whether they have begun. */
static void mark(struct bt_wx_recv *r, const struct bt_wire_seg_hdr *h, bool as_begun)
{
    uint32_t layer = h->item % r->shape.n_layers;
    for (uint32_t i = 0; i < h->n_segs; i++) {
        uint64_t bit = (uint64_t)(h->first_block + i) * r->shape.n_layers + layer;
        r->started[bit / 64] &= ~(1ull << bit % 64);
        r->started[bit / 64] |= (uint64_t)as_begun << bit % 64;
    }
}

/* ---- messages ---- */

void bt_wx_land_undo(const struct bt_wx_land *l)
{
    mark(l->recv, &l->hdr, false);
}

/* false: a segment of the message had begun before. */
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

static struct bt_wx_recv *recv_find(struct bt_wx_conn *c, const struct bt_wire_seg_hdr *h)
{
    struct bt_wx_recv *r = bt_map_get(c->streams, &h->stream);
    if (r == NULL) {
        bt_wx_absorb_adds(c->x);
        r = bt_map_get(c->streams, &h->stream);
    }
    return r;
}

bool bt_wx_land_begin(struct bt_wx_path *l, const void *header, size_t header_len, size_t payload,
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
            bt_wx_conn_kill(c, BT_ERR_PEER_PROTOCOL, "malformed KV message: %s", why);
        }
        return false;
    }
    struct bt_wx_recv *r = recv_find(c, &h);
    if (r == NULL) { /* cancelled, but the message was already on its way */
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
        bt_wx_conn_kill(c, BT_ERR_PEER_PROTOCOL, "malformed KV message: %s", why);
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
    *land = (struct bt_wx_land){.recv = r, .path = l, .hdr = h, .crcs = crcs};
    return true;
}
