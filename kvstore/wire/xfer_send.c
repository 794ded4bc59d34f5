/* The sending ends of flows, on the transfer thread. Complete items become, in order, messages with
 * one layer's segments of consecutive blocks. A message has at most BT_WIRE_MSG_BYTES_MAX; a peer
 * has at most bytes_in_flight_max in flight. Classes are served by priority, the flows of a class
 * in turn. Reads slots; writes none. */
#include <stdlib.h>
#include <string.h>

#include "kvstore/wire/cards.h"
#include "kvstore/wire/xfer_priv.h"

/* UCX has no priorities, neither within an endpoint nor among endpoints of one network, so a
 * hand-off waits for messages that were posted earlier. Therefore, while there are hand-offs,
 * fetches and replicas to all peers together stay below this limit. */
#define HANDOFF_RECENT_NS    (20ull * 1000000)
#define BACKGROUND_BYTES_MAX (1u << 20)

static struct bt_wx_out *out_get(struct bt_wx *x)
{
    struct bt_wx_out *o = x->out_free;
    if (o == NULL) {
        return bt_malloc(sizeof(*o));
    }
    x->out_free = o->next;
    return o;
}

static void out_put(struct bt_wx *x, struct bt_wx_out *o)
{
    o->next = x->out_free;
    x->out_free = o;
}

void bt_wx_send_free_pool(struct bt_wx *x)
{
    while (x->out_free != NULL) {
        struct bt_wx_out *o = x->out_free;
        x->out_free = o->next;
        free(o);
    }
}

void bt_wx_send_add(struct bt_wx_send *s)
{
    s->added = true;
    s->n_items = bt_flow_items(&s->src.shape);
    s->next_item = bt_flow_resident_items(&s->src.shape, s->first_block);
    s->next_block = s->first_block;
    s->available = s->next_item;
    bt_list_init(&s->ready_link);
    bt_list_insert_tail(&s->conn->sends, &s->link);
    if (s->next_item == s->n_items) { /* all of it is resident at the receiver */
        s->sent = true;
        bt_wx_event(s->conn->x, &s->obj, BT_WX_EV_SENT);
        return;
    }
    bt_wx_send_look(s);
}

void bt_wx_send_look(struct bt_wx_send *s)
{
    uint32_t p = BT_MIN(bt_flow_read(s->src.word, s->epoch), s->n_items);
    if (s->stopping || s->sent || p <= s->available) {
        return;
    }
    s->available = p;
    if (bt_list_empty(&s->ready_link)) {
        bt_list_insert_tail(&s->conn->ready[s->class], &s->ready_link);
        bt_wx_conn_hot(s->conn);
    }
}

void bt_wx_send_stop(struct bt_wx_send *s)
{
    if (s->stopping) {
        return;
    }
    s->stopping = true;
    s->stop_ns = s->conn->x->now_ns;
    s->conn->n_stopping++;
    bt_list_remove(&s->ready_link);
    bt_wx_conn_hot(s->conn);
}

void bt_wx_send_reap(struct bt_wx_conn *c)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &c->sends) {
        struct bt_wx_send *s = BT_CONTAINER_OF(i, struct bt_wx_send, link);
        if (!s->stopping) {
            continue;
        }
        /* A path ends only with all its sends. */
        if (s->outstanding == 0 || bt_list_empty(&c->paths)) {
            c->n_stopping--;
            bt_list_remove(&s->link);
            free(s->log);
            free(s->again);
            bt_wx_event(c->x, &s->obj, BT_WX_EV_STOPPED);
        } else if (c->x->now_ns - s->stop_ns > BT_WX_GRACE_NS) {
            bt_wx_conn_kill(c, BT_ERR_PEER_LOST,
                            "the peer does not take %u messages of an ended transfer",
                            s->outstanding);
        }
    }
}

/* Lets other connections send the background messages that were held back. */
static void background_done(struct bt_wx *x, uint32_t bytes)
{
    struct bt_list *i;
    x->background -= bytes;
    if (!x->background_waits) {
        return;
    }
    x->background_waits = false;
    bt_list_for_each (i, &x->conns) {
        struct bt_wx_conn *c = BT_CONTAINER_OF(i, struct bt_wx_conn, link);
        for (int k = 1; k < BT_WX_CLASSES; k++) {
            if (!bt_list_empty(&c->ready[k])) {
                bt_wx_conn_hot(c);
            }
        }
    }
}

void bt_wx_out_done(struct bt_wx_out *o, const char *lost)
{
    struct bt_wx_path *l = o->path;
    struct bt_wx_conn *c = l->conn;
    struct bt_wx_send *s = o->send;
    const struct bt_wx_card *card = &c->x->conf.cards[l->card];
    l->n_sends--;
    l->bytes_in_flight -= o->bytes;
    c->bytes_in_flight -= o->bytes;
    s->outstanding--;
    if (s->class != 0) {
        background_done(c->x, o->bytes);
    }
    if (lost == NULL) {
        bt_nic_rate_add(&l->rate, o->bytes, o->posted_ns, bt_mono_ns());
        bt_metric_add(c->x->conf.m.sent_bytes, o->bytes);
        bt_metric_add(c->x->conf.m.sent_segs, o->hdr.n_segs);
        bt_metric_add(card->sent_bytes, o->bytes);
        bt_metric_add(card->sent_segs, o->hdr.n_segs);
        if (s->outstanding == 0 && s->next_item == s->n_items && s->n_again == 0 && !s->sent &&
            !s->stopping) {
            s->sent = true;
            bt_wx_event(c->x, &s->obj, BT_WX_EV_SENT);
        }
    } else {
        bt_wx_path_kill(l, BT_ERR_PEER_LOST, "send: %s", lost);
    }
    out_put(c->x, o);
    bt_wx_conn_hot(c);
}

/* Takes the next message of s and advances s. There must be one. */
static struct bt_wx_sent next_run(struct bt_wx_send *s)
{
    const struct bt_wx *x = s->conn->x;
    uint32_t first, end, seg_bytes;
    if (s->n_again > 0) {
        return s->again[--s->n_again];
    }
    bt_kv_segment(x->conf.layout, s->next_item % s->src.shape.n_layers, &seg_bytes);
    bt_flow_item_blocks(&s->src.shape, s->next_item, &first, &end);
    first = BT_MAX(BT_MAX(first, s->first_block), s->next_block);
    uint32_t n = BT_MIN(end - first, BT_MAX(1u, BT_WIRE_MSG_BYTES_MAX / seg_bytes));
    n = BT_MIN(n, (uint32_t)BT_WIRE_SEGS_MAX);
    n = BT_MIN(n, (uint32_t)((x->header_max - sizeof(struct bt_wire_seg_hdr)) / 4));
    if (seg_bytes >= x->alone_min) {
        n = 1;
    }
    struct bt_wx_sent run = {.item = s->next_item, .first_block = first, .n_segs = n};
    s->next_block = first + n;
    if (s->next_block >= end) {
        s->next_item++;
        s->next_block = 0; /* the next item has its own first block */
    }
    return run;
}

static uint32_t crc_of(const struct bt_wx_config *conf, uint32_t slot, uint32_t layer,
                       const struct bt_kv_key *name)
{
    uint32_t bytes;
    uint64_t off = bt_kv_segment(conf->layout, layer, &bytes);
    return conf->crcs != NULL
               ? bt_slab_crcs_get(conf->crcs, slot, layer, name)
               : bt_slab_segment_crc(name, layer, conf->layout->layout_id,
                                     (const uint8_t *)bt_slab_data(conf->slab, slot) + off, bytes);
}

static void out_fill(struct bt_wx_send *s, const struct bt_wx_sent *run, struct bt_wx_out *o)
{
    struct bt_wx *x = s->conn->x;
    struct bt_slab *slab = x->conf.slab;
    uint32_t layer = run->item % s->src.shape.n_layers, seg_bytes;
    uint64_t off = bt_kv_segment(x->conf.layout, layer, &seg_bytes);
    uint32_t *crcs = (uint32_t *)(void *)(o->raw + sizeof(o->hdr));
    for (uint32_t i = 0; i < run->n_segs; i++) {
        uint32_t block = run->first_block + i, slot = s->src.slots[block];
        crcs[i] = crc_of(&x->conf, slot, layer, &s->src.names[block]);
        o->iov[i].iov_base = (uint8_t *)bt_slab_data(slab, slot) + off;
        o->iov[i].iov_len = seg_bytes;
    }
    o->hdr = (struct bt_wire_seg_hdr){
        .n_segs = (uint16_t)run->n_segs,
        .request = s->request,
        .epoch = s->epoch,
        .stream = s->stream,
        .item = run->item,
        .first_block = run->first_block,
        .seg_bytes = seg_bytes,
    };
    o->send = s;
    o->bytes = run->n_segs * seg_bytes;
}

/* Chooses the path of the message. At least one is open. */
static struct bt_wx_path *path_for(const struct bt_wx_conn *c, const struct bt_wx_out *o)
{
    struct bt_wx_path *open[BT_NICS_MAX];
    struct bt_nic_load load[BT_NICS_MAX];
    const struct bt_list *i;
    uint32_t n = 0;
    bt_list_for_each (i, &c->paths) {
        struct bt_wx_path *l = BT_CONTAINER_OF(i, struct bt_wx_path, link);
        if (bt_wx_path_open(l) && n < BT_NICS_MAX) {
            open[n] = l;
            load[n++] = (struct bt_nic_load){.in_flight = l->bytes_in_flight,
                                             .rate = bt_nic_rate_get(&l->rate, c->x->now_ns),
                                             .node = c->x->conf.cards[l->card].node};
        }
    }
    if (n == 1) {
        return open[0];
    }
    int32_t node = c->x->by_node ? bt_wire_memory_node(o->iov[0].iov_base) : -1;
    return open[bt_nics_pick(load, n, o->bytes, node)];
}

static void out_post(struct bt_wx_conn *c, struct bt_wx_out *o)
{
    struct bt_wx_path *l = path_for(c, o);
    o->path = l;
    o->posted_ns = bt_mono_ns();
    o->hdr.nonce = l->nonce_peer;
    size_t header_len = bt_wire_seg_finish(&o->hdr);
    l->n_sends++;
    l->bytes_in_flight += o->bytes;
    c->bytes_in_flight += o->bytes;
    o->send->outstanding++;
    if (o->send->class == 0) {
        c->x->handoff_ns = c->x->now_ns;
    } else {
        c->x->background += o->bytes;
    }
    if (c->several) {
        bt_wx_send_log(o->send, &(struct bt_wx_sent){.path = l->number,
                                                     .item = o->hdr.item,
                                                     .first_block = o->hdr.first_block,
                                                     .n_segs = o->hdr.n_segs});
    }
    c->x->t->post(o, header_len);
}

static bool may_post(const struct bt_wx_conn *c, int class)
{
    struct bt_wx *x = c->x;
    if (c->bytes_in_flight >= x->conf.bytes_in_flight_max) {
        return false;
    }
    if (class != 0 && x->background >= BACKGROUND_BYTES_MAX &&
        x->now_ns - x->handoff_ns < HANDOFF_RECENT_NS) {
        x->background_waits = true;
        return false;
    }
    return true;
}

void bt_wx_send_pump(struct bt_wx_conn *c)
{
    for (int k = 0; k < BT_WX_CLASSES; k++) {
        while (!bt_list_empty(&c->ready[k]) && bt_wx_conn_open_paths(c) > 0) {
            if (!may_post(c, k)) {
                return;
            }
            struct bt_wx_send *s = BT_CONTAINER_OF(c->ready[k].next, struct bt_wx_send, ready_link);
            struct bt_wx_out *o = out_get(c->x);
            struct bt_wx_sent run = next_run(s);
            bt_list_remove(&s->ready_link);
            out_fill(s, &run, o);
            if (s->next_item < s->available || s->n_again > 0) {
                bt_list_insert_tail(&c->ready[k], &s->ready_link);
            }
            out_post(c, o);
        }
    }
}
