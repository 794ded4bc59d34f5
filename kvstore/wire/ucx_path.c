/* Paths on the transfer thread: a ucp_worker and its endpoint between two network cards, from the
 * first handshake to the forced close; proof, silence, arming. A failed path does not end its
 * flows: the control thread decides what happens to them. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "common/log/log.h"
#include "kvstore/wire/ucx_priv.h"

#define WIREUP_MAX_NS  (3000ull * 1000000) /* from the creation of the endpoint */
#define WIREUP_TAIL_NS (100ull * 1000000)
#define AM_IDS         64
/* A path may use this many calls and about this much time in a turn. Then flow words, hand-offs and
 * events have their turn. */
#define PROGRESS_MAX    16
#define TURN_NS         (100ull * 1000)
#define EMPTY_WAKES_MAX 64 /* useless wake-ups after which a path is polled by the clock */
#define CLOSE_NS        (3000ull * 1000000)
/* A card carries nothing although its peer still sends messages over gRPC: */
#define ASK_NS   (300ull * 1000000)  /* after this time the path asks for an echo, ... */
#define QUIET_NS (1500ull * 1000000) /* ... after this time the path is lost ... */
#define HEARD    2                   /* ... if the peer has sent this many messages meanwhile */

static void path_moved(struct bt_wx_path *l)
{
    l->ucx->moved_ns = l->conn->x->now_ns;
    l->ucx->heard = atomic_load_explicit(l->conn->heard_at, memory_order_relaxed);
}

/* ---- small messages: proof and echo ---- */

static void on_note_sent(void *request, ucs_status_t status, void *user)
{
    struct bt_wx_path *l = user;
    BT_ASSERT(l->obj.kind == BT_WX_PATH);
    l->n_sends--;
    ucp_request_free(request);
    if (status != UCS_OK) {
        bt_wx_path_kill(l, BT_ERR_PEER_LOST, "UCX: %s", ucs_status_string(status));
    }
}

static void note_send(struct bt_wx_path *l, unsigned id, struct bt_wire_proof *note)
{
    *note = (struct bt_wire_proof){BT_WIRE_PROOF_MAGIC, BT_WIRE_VERSION, l->nonce_peer};
    ucp_request_param_t rp = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_note_sent,
        .user_data = l,
    };
    ucs_status_ptr_t r = ucp_am_send_nbx(l->ucx->ep, id, note, sizeof(*note), NULL, 0, &rp);
    if (UCS_PTR_IS_ERR(r)) {
        bt_wx_path_kill(l, BT_ERR_PEER_LOST, "UCX: %s", ucs_status_string(UCS_PTR_STATUS(r)));
    } else if (r != NULL) {
        l->n_sends++;
    }
    bt_wx_path_hot(l);
}

/* true: the note has this path's nonce; any other note is from a stranger. */
static bool note_is_ours(struct bt_wx_path *l, const void *header, size_t header_len)
{
    struct bt_wire_proof p;
    BT_ASSERT(l->obj.kind == BT_WX_PATH);
    if (header_len == sizeof(p)) {
        memcpy(&p, header, sizeof(p));
        if (p.magic == BT_WIRE_PROOF_MAGIC && p.version == BT_WIRE_VERSION && p.nonce == l->nonce) {
            return true;
        }
    }
    bt_metric_add(l->conn->x->conf.m.drop_garbled, 1);
    return false;
}

static ucs_status_t on_proof(void *arg, const void *header, size_t header_len, void *data,
                             size_t len, const ucp_am_recv_param_t *param)
{
    struct bt_wx_path *l = arg;
    (void)data;
    (void)len;
    (void)param;
    if (note_is_ours(l, header, header_len) && !l->proven) {
        path_moved(l);
        bt_wx_path_proven(l);
    }
    return UCS_OK;
}

static ucs_status_t on_ask(void *arg, const void *header, size_t header_len, void *data, size_t len,
                           const ucp_am_recv_param_t *param)
{
    struct bt_wx_path *l = arg;
    (void)data;
    (void)len;
    (void)param;
    if (note_is_ours(l, header, header_len) && bt_wx_path_open(l)) {
        note_send(l, BT_WIRE_AM_ECHO, &l->ucx->echo);
    }
    return UCS_OK;
}

static ucs_status_t on_echo(void *arg, const void *header, size_t header_len, void *data,
                            size_t len, const ucp_am_recv_param_t *param)
{
    struct bt_wx_path *l = arg;
    (void)data;
    (void)len;
    (void)param;
    if (note_is_ours(l, header, header_len)) {
        l->ucx->asked_ns = 0;
        path_moved(l);
    }
    return UCS_OK;
}

static ucs_status_t on_nonsense(void *arg, const void *header, size_t header_len, void *data,
                                size_t len, const ucp_am_recv_param_t *param)
{
    struct bt_wx_path *l = arg;
    (void)header;
    (void)header_len;
    (void)data;
    (void)len;
    (void)param;
    bt_metric_add(l->conn->x->conf.m.drop_garbled, 1);
    return UCS_OK;
}

/* UCX 1.13.1 keeps handlers in an array that it grows in steps and does not clear. So for a message
 * with an unused id it would call a random address. Therefore every id of the array gets a
 * handler. */
static ucs_status_t path_handlers(struct bt_wx_path *l)
{
    ucs_status_t st = UCS_OK;
    for (unsigned id = 0; id < AM_IDS && st == UCS_OK; id++) {
        ucp_am_handler_param_t p = {
            .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                          UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
            .id = id,
            .flags = UCP_AM_FLAG_WHOLE_MSG,
            .cb = id == BT_WIRE_AM_PROOF      ? on_proof
                  : id == BT_WIRE_AM_SEGMENTS ? bt_ucx_on_segments
                  : id == BT_WIRE_AM_ASK      ? on_ask
                  : id == BT_WIRE_AM_ECHO     ? on_echo
                                              : on_nonsense,
            .arg = l,
        };
        st = ucp_worker_set_am_recv_handler(l->ucx->worker, &p);
    }
    return st;
}

/* ---- making ---- */

void bt_ucx_path_open(struct bt_wx_path *l)
{
    struct bt_wx *x = l->conn->x;
    l->ucx = bt_calloc(1, sizeof(*l->ucx));
    l->ucx->efd = -1;
    path_moved(l);
    if (x->ucx->contexts[l->card] == NULL) { /* it did not start again after the end of UCX */
        bt_wx_path_kill(l, BT_ERR_IO, "UCX did not start on this card");
        return;
    }
    ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                              .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucs_status_t st = ucp_worker_create(x->ucx->contexts[l->card], &wp, &l->ucx->worker);
    if (st != UCS_OK) {
        l->ucx->worker = NULL;
        bt_wx_path_kill(l, BT_ERR_IO, "ucp_worker_create: %s", ucs_status_string(st));
        return;
    }
    ucp_address_t *a = NULL;
    ucp_worker_attr_t at = {.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER};
    if ((st = path_handlers(l)) != UCS_OK ||
        (st = ucp_worker_get_efd(l->ucx->worker, &l->ucx->efd)) ||
        (st = ucp_worker_query(l->ucx->worker, &at)) ||
        (st = ucp_worker_get_address(l->ucx->worker, &a, &l->address_len))) {
        bt_wx_path_kill(l, BT_ERR_IO, "UCX worker: %s", ucs_status_string(st));
        return;
    }
    x->header_max = at.max_am_header;
    l->address = bt_malloc(l->address_len);
    memcpy(l->address, a, l->address_len);
    ucp_worker_release_address(l->ucx->worker, a);
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = l};
    BT_ASSERT(epoll_ctl(x->ucx->epfd, EPOLL_CTL_ADD, l->ucx->efd, &ev) == 0);
    bt_wx_event(x, &l->obj, BT_WX_EV_READY);
}

static void on_ep_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct bt_wx_path *l = arg;
    (void)ep;
    BT_ASSERT(l->obj.kind == BT_WX_PATH);
    l->ucx->failed = true;
    bt_wx_path_kill(l, BT_ERR_PEER_LOST, "UCX: %s", ucs_status_string(status));
}

void bt_ucx_path_connect(struct bt_wx_path *l)
{
    ucp_ep_params_t p = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = l->peer_address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_ep_error, .arg = l},
    };
    ucs_status_t st =
        /* The call itself may handle a refused connect. */
        ucp_ep_create(l->ucx->worker, &p, &l->ucx->ep);
    if (st != UCS_OK) {
        l->ucx->ep = NULL;
        l->ucx->failed = true;
        bt_wx_path_kill(l, BT_ERR_PEER_LOST, "UCX endpoint: %s", ucs_status_string(st));
        return;
    }
    l->connected = true;
    note_send(l, BT_WIRE_AM_PROOF, &l->ucx->proof);
}

/* ---- ending ---- */

static void close_begin(struct bt_wx_path *l)
{
    l->closing = true;
    l->connected = false;
    l->ucx->close_ns = l->conn->x->now_ns;
    if (l->ucx->ep == NULL) {
        return;
    }
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                             .flags = UCP_EP_CLOSE_FLAG_FORCE};
    l->ucx->close_req = ucp_ep_close_nbx(l->ucx->ep, &p);
    l->ucx->ep = NULL;
    if (UCS_PTR_IS_ERR(l->ucx->close_req)) {
        BT_WARN("wire_close_failed", "peer=%s error=%s", l->conn->peer,
                ucs_status_string(UCS_PTR_STATUS(l->ucx->close_req)));
        l->ucx->close_req = NULL;
    }
}

/* True when the endpoint is closed and every request has called back. If that does not happen
 * within CLOSE_NS, the cause is a bug in UCX. Then the worker is destroyed anyway, which ends
 * everything that could still write. The connection ends too, because its flows count requests that
 * will never call back. */
static bool closed(struct bt_wx_path *l)
{
    if (l->ucx->close_req != NULL &&
        ucp_request_check_status(l->ucx->close_req) != UCS_INPROGRESS) {
        ucp_request_free(l->ucx->close_req);
        l->ucx->close_req = NULL;
    }
    if (l->ucx->close_req == NULL && l->n_sends == 0 && l->ucx->n_recvs == 0) {
        return true;
    }
    if (l->conn->x->now_ns - l->ucx->close_ns < CLOSE_NS || !l->stopping) {
        return false;
    }
    if (!l->ucx->broken_close) {
        l->ucx->broken_close = true;
        BT_ERROR("wire_close_stuck", "peer=%s sends=%u recvs=%u", l->conn->peer, l->n_sends,
                 l->ucx->n_recvs);
        bt_wx_conn_kill(l->conn, BT_ERR_IO, "UCX does not close an endpoint");
    }
    return true;
}

/* In UCX 1.13.1 a peer crashes with an assertion if its wire-up message arrives at an endpoint that
 * was just closed (wireup_ep.c: pending_count == 0; ucp_request.c:684). So a path that ends during
 * wire-up first lets it finish. A path that was not proved in time waits as well: its peer may have
 * been suspended, and will continue wire-up later. The echo is not the last message of wire-up, so
 * all paths wait a little longer than that. */
static bool lingers(const struct bt_wx_path *l)
{
    uint64_t now = l->conn->x->now_ns;
    if (l->ucx->failed || l->ucx->worker == NULL || l->address == NULL) {
        return false;
    }
    if (l->proven) {
        return now < l->proven_ns + WIREUP_TAIL_NS;
    }
    return l->connect_ns != 0 ? now < l->connect_ns + WIREUP_MAX_NS
                              : now < l->stop_ns + BT_WX_PROOF_NS;
}

static void path_free(struct bt_wx_path *l)
{
    struct bt_wx *x = l->conn->x;
    if (l->ucx->worker != NULL) {
        if (l->ucx->efd >= 0) {
            epoll_ctl(x->ucx->epfd, EPOLL_CTL_DEL, l->ucx->efd, NULL);
        }
        ucp_worker_destroy(l->ucx->worker);
    }
    free(l->ucx);
    l->ucx = NULL;
    bt_wx_path_gone(l);
}

/* true: nothing has moved for long, the peer is alive, and there is another path to it. */
static bool silent(const struct bt_wx_path *l)
{
    const struct bt_wx_conn *c = l->conn;
    uint32_t heard = atomic_load_explicit(c->heard_at, memory_order_relaxed);
    return l->ucx->asked_ns != 0 && c->x->now_ns - l->ucx->moved_ns > QUIET_NS &&
           heard - l->ucx->heard >= HEARD && bt_wx_conn_open_paths(c) > 1;
}

/* Checks whether messages of a sender's path arrive. Over TCP UCX reports a message as done when
 * the kernel has taken it, and the kernel notices a dead link only after minutes. */
static void path_watch(struct bt_wx_path *l)
{
    uint64_t now = l->conn->x->now_ns;
    if (!l->conn->several || !bt_wx_path_open(l) || bt_list_empty(&l->conn->sends)) {
        l->ucx->asked_ns = 0;
        return;
    }
    if (silent(l)) {
        bt_wx_path_kill(l, BT_ERR_PEER_LOST, "no KV gets through although the peer is alive");
    } else if (l->ucx->asked_ns == 0 && now - l->ucx->moved_ns > ASK_NS) {
        path_moved(l); /* until now it may have been idle */
        l->ucx->asked_ns = now;
        note_send(l, BT_WIRE_AM_ASK, &l->ucx->echo);
    }
}

void bt_ucx_path_step(struct bt_wx_path *l)
{
    uint64_t now = l->conn->x->now_ns;
    if (l->connect_ns != 0 && !l->proven && now - l->connect_ns > BT_WX_PROOF_NS) {
        bt_wx_path_kill(
            l, BT_ERR_PEER_LOST,
            "the peer's end of the UCX connection did not prove its session within a second");
    }
    path_watch(l);
    if (bt_wx_path_ends(l) && !l->closing && !lingers(l)) {
        close_begin(l);
    }
    if (l->stopping && l->closing && closed(l)) {
        path_free(l);
    }
}

/* ---- the loop's calls ---- */

static void path_throttle(struct bt_wx_path *l, bool on)
{
    struct epoll_event ev = {.events = on ? 0 : EPOLLIN, .data.ptr = l};
    if (l->ucx->throttled != on && l->ucx->efd >= 0) {
        l->ucx->throttled = on;
        BT_ASSERT(epoll_ctl(l->conn->x->ucx->epfd, EPOLL_CTL_MOD, l->ucx->efd, &ev) == 0);
    }
}

bool bt_ucx_path_progress(struct bt_wx_path *l)
{
    struct bt_wx_conn *c = l->conn;
    uint32_t n = 0;
    uint64_t end_ns = c->x->now_ns + TURN_NS;
    if (!bt_list_empty(&c->ready[0])) {
        bt_wx_send_pump(c); /* hand-offs go before other work of UCX */
    }
    while (l->ucx->worker != NULL && n < PROGRESS_MAX && ucp_worker_progress(l->ucx->worker) != 0) {
        n++;
        if (bt_mono_ns() > end_ns || atomic_load(&c->x->bell->kicked)) {
            break; /* one call can move a MiB, so more urgent work must not wait for 16 calls */
        }
    }
    if (n > 0) {
        l->ucx->empty_wakes = 0;
        path_moved(l);
        path_throttle(l, false);
    }
    bt_wx_send_pump(c);
    return n > 0;
}

void bt_ucx_path_woken(struct bt_wx_path *l)
{
    if (++l->ucx->empty_wakes > EMPTY_WAKES_MAX) {
        path_throttle(l, true);
    }
    bt_wx_path_hot(l);
}

void bt_ucx_path_look(struct bt_wx_path *l)
{
    if (l->ucx->throttled || l->closing) {
        bt_wx_path_hot(l);
    }
}

bool bt_ucx_path_arm(struct bt_wx_path *l)
{
    if (l->ucx->worker == NULL || l->ucx->efd < 0) {
        bt_list_remove(&l->hot_link);
        return true;
    }
    if (l->ucx->throttled) {
        return true;
    }
    ucs_status_t st = ucp_worker_arm(l->ucx->worker);
    if (st == UCS_OK) {
        bt_list_remove(&l->hot_link);
        return true;
    }
    if (st != UCS_ERR_BUSY) {
        bt_wx_path_kill(l, BT_ERR_IO, "ucp_worker_arm: %s", ucs_status_string(st));
    } else if (++l->ucx->empty_wakes > EMPTY_WAKES_MAX) {
        path_throttle(l, true);
        return true;
    }
    return false;
}

int bt_ucx_path_sleep_ms(const struct bt_wx_path *l)
{
    if (l->ucx->throttled || l->closing) {
        return 2;
    }
    if ((l->connect_ns != 0 && !l->proven) || l->stopping || l->kill_wanted) {
        return 50; /* wire-up and stop have deadlines */
    }
    return l->conn->several && !bt_list_empty(&l->conn->sends) ? 100 : -1;
}
