/* Flows continue after the loss of a path. The sender remembers which message took which path. The
 * receiver first closes its end of the path, so that nothing more can arrive, and then tells which
 * segments it has. The sender sends the missing messages of that path again over another path. So
 * no segment is received twice. Transfer thread. */
#include <stdlib.h>
#include <string.h>

#include "kvstore/wire/xfer_priv.h"

/* ---- sending ---- */

static void append(struct bt_wx_sent **list_p, uint32_t *n_p, uint32_t *cap_p,
                   const struct bt_wx_sent *sent)
{
    if (*n_p == *cap_p) {
        *cap_p = BT_MAX(64u, *cap_p * 2);
        *list_p = bt_realloc(*list_p, *cap_p * sizeof(**list_p));
    }
    (*list_p)[(*n_p)++] = *sent;
}

void bt_wx_send_log(struct bt_wx_send *s, const struct bt_wx_sent *sent)
{
    append(&s->log, &s->n_log, &s->log_cap, sent);
}

static bool arrived(const struct bt_wx_has *h, const struct bt_flow_shape *shape,
                    const struct bt_wx_sent *sent)
{
    if (sent->item < h->item) {
        return true;
    }
    for (uint32_t i = 0; i < sent->n_segs; i++) {
        uint64_t bit = bt_wx_has_bit(shape, h->item, sent->item, sent->first_block + i);
        if (bit / 8 >= h->n || !(h->bits[bit / 8] >> bit % 8 & 1)) {
            return false;
        }
    }
    return true;
}

static void resend(struct bt_wx_send *s, uint32_t path, const struct bt_wx_has *has)
{
    struct bt_wx *x = s->conn->x;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->n_log; i++) {
        struct bt_wx_sent sent = s->log[i];
        if (sent.path != path) {
            s->log[kept++] = sent;
        } else if (has != NULL && !arrived(has, &s->src.shape, &sent)) {
            append(&s->again, &s->n_again, &s->again_cap, &sent);
            bt_metric_add(x->conf.m.resent_segs, sent.n_segs);
        }
    }
    s->n_log = kept;
    if (s->n_again > 0 && bt_list_empty(&s->ready_link)) {
        bt_list_insert_tail(&s->conn->ready[s->class], &s->ready_link);
        bt_wx_conn_hot(s->conn);
    }
}

void bt_wx_send_resend(const struct bt_wx_path *l)
{
    struct bt_list *i;
    bt_list_for_each (i, &l->conn->sends) {
        struct bt_wx_send *s = BT_CONTAINER_OF(i, struct bt_wx_send, link);
        const struct bt_wx_has *h = l->has;
        while (h != NULL && h->stream != s->stream) {
            h = h->next;
        }
        if (!s->stopping) { /* a flow that the receiver does not name has ended */
            resend(s, l->number, h);
        }
    }
}

/* ---- receiving ---- */

static struct bt_wx_has *has_of(const struct bt_wx_recv *r)
{
    uint64_t per = r->shape.chunk_tokens / r->shape.block_tokens;
    uint64_t items = r->touched > r->progress ? r->touched - r->progress : 0;
    size_t n = BT_DIV_UP(items * per, 8);
    struct bt_wx_has *h = bt_calloc(1, sizeof(*h) + n);
    h->stream = r->stream;
    h->item = r->progress;
    h->n = n;
    for (uint32_t item = r->progress; item < r->touched; item++) {
        uint32_t first, end;
        bt_flow_item_blocks(&r->shape, item, &first, &end);
        for (uint32_t b = first; b < end; b++) {
            uint64_t bit = bt_wx_has_bit(&r->shape, h->item, item, b);
            h->bits[bit / 8] |= (uint8_t)(bt_wx_recv_begun(r, item, b) << bit % 8);
        }
    }
    return h;
}

void bt_wx_recv_report(struct bt_wx_path *l)
{
    struct bt_list *i;
    if (!l->conn->several || l->conn->killed) {
        return;
    }
    bt_list_for_each (i, &l->conn->recvs) {
        const struct bt_wx_recv *r = BT_CONTAINER_OF(i, struct bt_wx_recv, link);
        if (!r->stopping && !r->failed) {
            struct bt_wx_has *h = has_of(r);
            h->next = l->has;
            l->has = h;
        }
    }
}
