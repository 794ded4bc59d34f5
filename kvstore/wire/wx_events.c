/* The messages of the wire process, as its kvstore handles them: events of objects and answers
 * about cards. Control thread.
 *
 * The wire process reads data from strangers, so each of its messages is checked before it is used.
 * If a message does not fit its object, the kvstore kills the process. */
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/ranges.h"
#include "kvstore/wire/wx_priv.h"

static void deliver(struct bt_wx_proxy *p, struct bt_wx_obj *o, uint32_t ev)
{
    p->x->conf.on_event(p->x->conf.arg, o, ev);
}

/* Returns whether this is the first event of its kind for the object. */
static bool first(struct bt_wx_obj *o, uint32_t ev)
{
    bool is = (o->seen & ev) == 0;
    o->seen |= ev;
    return is;
}

static bool on_ready(struct bt_wx_proxy *p, struct bt_wx_obj *o, const struct bt_wx_ipc_msg *m)
{
    struct bt_wx_path *l = BT_CONTAINER_OF(o, struct bt_wx_path, obj);
    if (o->kind != BT_WX_PATH || m->n == 0 || m->n > BT_RANGE_ADDRESS_MAX ||
        !first(o, BT_WX_EV_READY)) {
        return false;
    }
    l->address = bt_malloc(m->n);
    l->address_len = m->n;
    memcpy(l->address, m->body, m->n);
    deliver(p, o, BT_WX_EV_READY);
    return true;
}

static bool on_proven(struct bt_wx_proxy *p, struct bt_wx_obj *o)
{
    if (o->kind != BT_WX_PATH || !first(o, BT_WX_EV_PROVEN)) {
        return false; /* it may come before CONNECT: the echo can overtake the peer's hello */
    }
    deliver(p, o, BT_WX_EV_PROVEN);
    return true;
}

static bool on_progress(struct bt_wx_proxy *p, struct bt_wx_obj *o, struct bt_wx_ipc_msg *m)
{
    const struct bt_slab *slab = p->x->conf.slab;
    struct bt_wx_recv *r = BT_CONTAINER_OF(o, struct bt_wx_recv, obj);
    uint32_t progress;
    if (o->kind != BT_WX_RECV || !bt_wx_ipc_take(m, &progress, sizeof(progress)) || m->n != 0 ||
        progress > bt_flow_items(&r->shape)) {
        return false;
    }
    /* The wire process raises a word in the slab itself, before it reports the progress. */
    bool there = r->word >= slab->flows && r->word < slab->flows + slab->super->n_flow_words;
    if (!there && progress > bt_flow_read(r->word, r->epoch)) {
        bt_flow_raise(r->word, r->epoch, progress);
    }
    deliver(p, o, BT_WX_EV_PROGRESS);
    return true;
}

static bool on_landed(struct bt_wx_proxy *p, struct bt_wx_obj *o, struct bt_wx_ipc_msg *m)
{
    struct bt_wx_recv *r = BT_CONTAINER_OF(o, struct bt_wx_recv, obj);
    struct bt_wx_ipc_landed b;
    if (o->kind != BT_WX_RECV || !bt_wx_ipc_take(m, &b, sizeof(b)) || m->n != 0 ||
        b.first_ns > b.last_ns || !first(o, BT_WX_EV_LANDED)) {
        return false;
    }
    r->first_ns = b.first_ns;
    r->last_ns = b.last_ns;
    r->bytes = b.bytes;
    r->segments = b.segments;
    deliver(p, o, BT_WX_EV_LANDED);
    return true;
}

static bool on_lost(struct bt_wx_proxy *p, struct bt_wx_obj *o, struct bt_wx_ipc_msg *m)
{
    int32_t status;
    char why[160];
    if (o->kind == BT_WX_SEND || !bt_wx_ipc_take(m, &status, sizeof(status)) || status >= 0 ||
        status < BT_ERR_CONFIG || !first(o, BT_WX_EV_LOST)) {
        return false;
    }
    bt_wx_ipc_text(m, why, sizeof(why));
    if (o->kind == BT_WX_CONN) {
        struct bt_wx_conn *c = BT_CONTAINER_OF(o, struct bt_wx_conn, obj);
        c->lost = (bt_status_t)status;
        memcpy(c->why, why, sizeof(why));
    } else if (o->kind == BT_WX_PATH) {
        struct bt_wx_path *l = BT_CONTAINER_OF(o, struct bt_wx_path, obj);
        l->lost = (bt_status_t)status;
        memcpy(l->why, why, sizeof(why));
    } else {
        struct bt_wx_recv *r = BT_CONTAINER_OF(o, struct bt_wx_recv, obj);
        r->lost = (bt_status_t)status;
        memcpy(r->why, why, sizeof(why));
    }
    deliver(p, o, BT_WX_EV_LOST);
    return true;
}

static bool on_stopped(struct bt_wx_proxy *p, struct bt_wx_obj *o, const struct bt_wx_ipc_msg *m)
{
    struct bt_wx_has *has = NULL;
    if (!(o->cmds & BT_WX_CMD_STOP) || (o->kind == BT_WX_PATH && (o->cmds & BT_WX_CMD_RESEND)) ||
        (m->n != 0 && o->kind != BT_WX_PATH) || !bt_wx_has_unpack(m->body, m->n, &has)) {
        return false;
    }
    /* Empty for a sender: there the control thread sets it, from the peer's message. */
    if (o->kind == BT_WX_PATH) {
        struct bt_wx_path *l = BT_CONTAINER_OF(o, struct bt_wx_path, obj);
        if (has != NULL && l->has != NULL) {
            bt_wx_has_free(has);
            return false;
        }
        l->has = has != NULL ? has : l->has;
    } else if (o->kind == BT_WX_CONN) {
        bt_wx_proxy_unhear(p, BT_CONTAINER_OF(o, struct bt_wx_conn, obj));
    }
    bt_wx_proxy_unname(p, o);
    deliver(p, o, BT_WX_EV_STOPPED);
    return true;
}

static bool on_resent(struct bt_wx_proxy *p, struct bt_wx_obj *o)
{
    if (o->kind != BT_WX_PATH || !(o->cmds & BT_WX_CMD_RESEND)) {
        return false;
    }
    bt_wx_proxy_unname(p, o);
    deliver(p, o, BT_WX_EV_RESENT);
    return true;
}

static bool on_sent(struct bt_wx_proxy *p, struct bt_wx_obj *o)
{
    if (o->kind != BT_WX_SEND || !first(o, BT_WX_EV_SENT)) {
        return false;
    }
    deliver(p, o, BT_WX_EV_SENT);
    return true;
}

static bool on_card(struct bt_wx_proxy *p, struct bt_wx_ipc_msg *m)
{
    struct bt_wx_ipc_card b;
    if (!bt_wx_ipc_take(m, &b, sizeof(b)) || b.card >= p->x->conf.n_cards ||
        !p->cards[b.card].asked) {
        return false;
    }
    struct bt_wx_proxy_card *k = &p->cards[b.card];
    k->asked = false;
    k->started = b.status == BT_OK;
    k->failed = !k->started;
    bt_wx_ipc_text(m, k->why, sizeof(k->why));
    if (k->failed && k->kept) {
        BT_WARN("wire_card_start", "interface=%s why=%s", p->x->conf.cards[b.card].ifname, k->why);
    }
    k->kept |= k->started;
    return true;
}

bool bt_wx_proxy_message(struct bt_wx_proxy *p, struct bt_wx_ipc_msg *m)
{
    if (m->type == BT_WX_M_PONG) {
        p->process.ping_ns = 0;
        return m->n == 0;
    }
    if (m->type == BT_WX_M_CARD_STARTED) {
        return on_card(p, m);
    }
    struct bt_wx_obj *o = bt_map_get(p->objs, &m->handle);
    if (o == NULL) {
        return false;
    }
    switch (m->type) {
    case BT_WX_M_READY: return on_ready(p, o, m);
    case BT_WX_M_PROVEN: return on_proven(p, o);
    case BT_WX_M_PROGRESS: return on_progress(p, o, m);
    case BT_WX_M_LANDED: return on_landed(p, o, m);
    case BT_WX_M_SENT: return on_sent(p, o);
    case BT_WX_M_LOST: return on_lost(p, o, m);
    case BT_WX_M_STOPPED: return on_stopped(p, o, m);
    case BT_WX_M_RESENT: return on_resent(p, o);
    default: return false;
    }
}
