/* The transfer thread: UCX context, one worker and endpoint per connection, the wake-up loop,
 * commands from and events to the control thread. Everything but bt_wx_create, bt_wx_destroy,
 * bt_wx_command and bt_wx_kick runs on the transfer thread, which alone touches UCX. */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/log/log.h"
#include "kvstore/wire/xfer_priv.h"

#define SPIN_TURNS      32 /* empty turns before arming: a few microseconds */
#define WIREUP_TAIL_NS  (100ull * 1000000)
#define AM_IDS          64
#define PROGRESS_MAX    16              /* calls per connection and turn, */
#define TURN_NS         (100ull * 1000) /* and about so long: then flow words, hand-offs, news */
#define EMPTY_WAKES_MAX 64 /* wake-ups for nothing before a connection is polled by the clock */
#define THROTTLED_MS    2
#define CLOSE_NS        (3000ull * 1000000)
#define EVENTS_PER_TURN 64
#define SLICE_US        300

struct bt_wx_mail { /* outlives the thread while its task is posted */
    pthread_mutex_t lock;
    struct bt_wx_obj *head, **tail;
    struct bt_task task;
    bool posted;
    struct bt_wx *x; /* NULL: destroyed */
};

/* ---- events, transfer thread -> control ---- */

static struct bt_wx_obj *mail_take(struct bt_wx_mail *m, uint32_t *events_p)
{
    pthread_mutex_lock(&m->lock);
    struct bt_wx_obj *o = m->head;
    if (o != NULL) {
        m->head = o->ev_next;
        if (m->head == NULL) {
            m->tail = &m->head;
        }
        *events_p = o->events;
        o->events = 0;
        o->ev_queued = false;
    }
    pthread_mutex_unlock(&m->lock);
    return o;
}

static void mail_deliver(struct bt_wx_mail *m)
{
    struct bt_wx_obj *o;
    uint32_t events;
    while (m->x != NULL && (o = mail_take(m, &events)) != NULL) {
        m->x->conf.on_event(m->x->conf.arg, o, events);
    }
}

static void mail_task(void *arg)
{
    struct bt_wx_mail *m = arg;
    pthread_mutex_lock(&m->lock);
    m->posted = false;
    pthread_mutex_unlock(&m->lock);
    if (m->x == NULL) {
        pthread_mutex_destroy(&m->lock);
        free(m);
        return;
    }
    mail_deliver(m);
}

void bt_wx_event(struct bt_wx *x, struct bt_wx_obj *o, uint32_t ev)
{
    struct bt_wx_mail *m = x->mail;
    pthread_mutex_lock(&m->lock);
    o->events |= ev;
    if (!o->ev_queued) {
        o->ev_queued = true;
        o->ev_next = NULL;
        *m->tail = o;
        m->tail = &o->ev_next;
    }
    bool post = !m->posted;
    m->posted = true;
    if (post) { /* under the lock: the task clears the flag only after it was posted */
        bt_loop_post(x->conf.loop, &m->task);
    }
    pthread_mutex_unlock(&m->lock);
}

/* ---- commands, control -> transfer thread ---- */

static void wake(struct bt_wx *x)
{
    if (!atomic_exchange(&x->woken, true)) {
        uint64_t one = 1;
        BT_ASSERT(write(x->wakefd, &one, sizeof(one)) == sizeof(one) || errno == EAGAIN);
    }
}

void bt_wx_command(struct bt_wx *x, struct bt_wx_obj *o, uint32_t cmd)
{
    pthread_mutex_lock(&x->lock);
    o->cmds |= cmd;
    if (!o->cmd_queued) {
        o->cmd_queued = true;
        o->cmd_next = NULL;
        *x->cmd_tail = o;
        x->cmd_tail = &o->cmd_next;
    }
    pthread_mutex_unlock(&x->lock);
    wake(x);
}

void bt_wx_kick(struct bt_wx *x)
{
    if (!atomic_exchange(&x->kicked, true)) {
        wake(x);
    }
}

void bt_wx_absorb_adds(struct bt_wx *x)
{
    pthread_mutex_lock(&x->lock);
    for (struct bt_wx_obj *o = x->cmd_head; o != NULL; o = o->cmd_next) {
        if (o->kind == BT_WX_RECV && (o->cmds & BT_WX_CMD_ADD)) {
            o->cmds &= ~(uint32_t)BT_WX_CMD_ADD;
            bt_wx_recv_add(BT_CONTAINER_OF(o, struct bt_wx_recv, obj));
        }
    }
    pthread_mutex_unlock(&x->lock);
}

/* ---- connections ---- */

void bt_wx_conn_hot(struct bt_wx_conn *c)
{
    if (bt_list_empty(&c->hot_link)) {
        bt_list_insert_tail(&c->x->hot, &c->hot_link);
    }
}

void bt_wx_conn_kill(struct bt_wx_conn *c, bt_status_t st, const char *fmt, ...)
{
    if (c->kill_wanted || c->killed) {
        return;
    }
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->why, sizeof(c->why), fmt, ap);
    va_end(ap);
    c->lost = st;
    c->kill_wanted = true;
    bt_wx_conn_hot(c);
}

static void on_ep_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct bt_wx_conn *c = arg;
    (void)ep;
    BT_ASSERT(c->obj.kind == BT_WX_CONN);
    bt_wx_conn_kill(c, BT_ERR_PEER_LOST, "UCX: %s", ucs_status_string(status));
}

static ucs_status_t on_proof(void *arg, const void *header, size_t header_len, void *data,
                             size_t len, const ucp_am_recv_param_t *param)
{
    struct bt_wx_conn *c = arg;
    struct bt_wire_proof p;
    (void)data;
    (void)len;
    (void)param;
    BT_ASSERT(c->obj.kind == BT_WX_CONN);
    if (header_len != sizeof(p)) {
        bt_metric_add(c->x->conf.m.drop_garbled, 1);
        return UCS_OK;
    }
    memcpy(&p, header, sizeof(p));
    if (p.magic != BT_WIRE_PROOF_MAGIC || p.version != BT_WIRE_VERSION || p.nonce != c->nonce) {
        bt_metric_add(c->x->conf.m.drop_garbled, 1); /* a stranger: ours knows the nonce */
        return UCS_OK;
    }
    if (!c->proven) {
        c->proven = true;
        c->proven_ns = bt_mono_ns();
        bt_wx_event(c->x, &c->obj, BT_WX_EV_PROVEN);
    }
    return UCS_OK;
}

static ucs_status_t on_nonsense(void *arg, const void *header, size_t header_len, void *data,
                                size_t len, const ucp_am_recv_param_t *param)
{
    struct bt_wx_conn *c = arg;
    (void)header;
    (void)header_len;
    (void)data;
    (void)len;
    (void)param;
    bt_metric_add(c->x->conf.m.drop_garbled, 1);
    return UCS_OK;
}

/* UCX 1.13.1 keeps handlers in an array that it grows in steps and does not clear: a message with
 * an id in between calls whatever is there. So every id of the array has a handler. */
static ucs_status_t conn_handlers(struct bt_wx_conn *c)
{
    ucs_status_t st = UCS_OK;
    for (unsigned id = 0; id < AM_IDS && st == UCS_OK; id++) {
        ucp_am_handler_param_t p = {
            .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                          UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
            .id = id,
            .flags = UCP_AM_FLAG_WHOLE_MSG,
            .cb = id == BT_WIRE_AM_PROOF      ? on_proof
                  : id == BT_WIRE_AM_SEGMENTS ? bt_wx_recv_am
                                              : on_nonsense,
            .arg = c,
        };
        st = ucp_worker_set_am_recv_handler(c->worker, &p);
    }
    return st;
}

static void conn_open(struct bt_wx *x, struct bt_wx_conn *c)
{
    c->x = x;
    c->efd = -1;
    c->streams = bt_map_create(sizeof(uint32_t));
    bt_list_init(&c->sends);
    bt_list_init(&c->recvs);
    for (int i = 0; i < BT_WX_CLASSES; i++) {
        bt_list_init(&c->ready[i]);
    }
    bt_list_init(&c->hot_link);
    bt_list_insert_tail(&x->conns, &c->link);
    ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                              .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucs_status_t st = ucp_worker_create(x->context, &wp, &c->worker);
    if (st != UCS_OK) {
        c->worker = NULL;
        bt_wx_conn_kill(c, BT_ERR_IO, "ucp_worker_create: %s", ucs_status_string(st));
        return;
    }
    ucp_address_t *a = NULL;
    ucp_worker_attr_t at = {.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER};
    if ((st = conn_handlers(c)) != UCS_OK || (st = ucp_worker_get_efd(c->worker, &c->efd)) ||
        (st = ucp_worker_query(c->worker, &at)) ||
        (st = ucp_worker_get_address(c->worker, &a, &c->address_len))) {
        bt_wx_conn_kill(c, BT_ERR_IO, "UCX worker: %s", ucs_status_string(st));
        return;
    }
    x->am_header_max = at.max_am_header;
    c->address = bt_malloc(c->address_len);
    memcpy(c->address, a, c->address_len);
    ucp_worker_release_address(c->worker, a);
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = c};
    BT_ASSERT(epoll_ctl(x->epfd, EPOLL_CTL_ADD, c->efd, &ev) == 0);
    bt_wx_conn_hot(c);
    bt_wx_event(x, &c->obj, BT_WX_EV_READY);
}

static void on_proof_sent(void *request, ucs_status_t status, void *user)
{
    struct bt_wx_conn *c = user;
    BT_ASSERT(c->obj.kind == BT_WX_CONN);
    c->n_sends--;
    ucp_request_free(request);
    if (status != UCS_OK) {
        bt_wx_conn_kill(c, BT_ERR_PEER_LOST, "UCX: %s", ucs_status_string(status));
    }
}

static void conn_connect(struct bt_wx_conn *c)
{
    if (c->killed || c->kill_wanted || c->worker == NULL) {
        return;
    }
    ucp_ep_params_t p = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = c->peer_address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_ep_error, .arg = c},
    };
    c->connect_ns = c->x->now_ns;
    ucs_status_t st = ucp_ep_create(c->worker, &p, &c->ep); /* a refused connect fails in here */
    if (st != UCS_OK) {
        c->ep = NULL;
        bt_wx_conn_kill(c, BT_ERR_PEER_LOST, "UCX endpoint: %s", ucs_status_string(st));
        return;
    }
    c->proof = (struct bt_wire_proof){BT_WIRE_PROOF_MAGIC, BT_WIRE_VERSION, c->nonce_peer};
    ucp_request_param_t rp = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_proof_sent,
        .user_data = c,
    };
    ucs_status_ptr_t r =
        ucp_am_send_nbx(c->ep, BT_WIRE_AM_PROOF, &c->proof, sizeof(c->proof), NULL, 0, &rp);
    if (UCS_PTR_IS_ERR(r)) {
        bt_wx_conn_kill(c, BT_ERR_PEER_LOST, "UCX: %s", ucs_status_string(UCS_PTR_STATUS(r)));
    } else if (r != NULL) {
        c->n_sends++;
    }
    bt_wx_conn_hot(c);
}

static void conn_close_begin(struct bt_wx_conn *c)
{
    c->closing = true;
    c->close_ns = c->x->now_ns;
    if (c->ep == NULL) {
        return;
    }
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                             .flags = UCP_EP_CLOSE_FLAG_FORCE};
    c->close_req = ucp_ep_close_nbx(c->ep, &p);
    c->ep = NULL;
    if (UCS_PTR_IS_ERR(c->close_req)) {
        BT_WARN("wire_close_failed", "peer=%s error=%s", c->peer,
                bt_log_q(ucs_status_string(UCS_PTR_STATUS(c->close_req))));
        c->close_req = NULL;
    }
}

/* True once the endpoint is closed and every request has called back. A connection that does not
 * get there in CLOSE_NS has hit a bug in UCX: its worker is destroyed all the same, which ends
 * whatever could still write. */
static bool conn_closed(struct bt_wx_conn *c)
{
    if (c->close_req != NULL && ucp_request_check_status(c->close_req) != UCS_INPROGRESS) {
        ucp_request_free(c->close_req);
        c->close_req = NULL;
    }
    if (c->close_req == NULL && c->n_sends == 0 && c->n_recvs == 0) {
        return true;
    }
    if (c->x->now_ns - c->close_ns < CLOSE_NS || !c->stopping) {
        return false;
    }
    if (!c->broken_close) {
        c->broken_close = true;
        BT_ERROR("wire_close_stuck", "peer=%s sends=%u recvs=%u", c->peer, c->n_sends, c->n_recvs);
    }
    return true;
}

/* A peer whose wire-up message meets a connection closed just then fails an assertion inside UCX
 * 1.13.1 (wireup_ep.c: pending_count == 0; ucp_request.c:684) and is gone. So a session that ends
 * during wire-up lets it finish first: as long as the proof may take, and, as the echo is not the
 * last message of wire-up, a little longer. */
static bool conn_lingers(struct bt_wx_conn *c)
{
    uint64_t since = c->connect_ns != 0 ? c->connect_ns : c->stop_ns, now = c->x->now_ns;
    if (c->killed || c->worker == NULL || c->address == NULL) {
        return false;
    }
    return c->proven ? now < c->proven_ns + WIREUP_TAIL_NS : now < since + BT_WX_PROOF_NS;
}

static void conn_free(struct bt_wx_conn *c)
{
    if (c->worker != NULL) {
        if (c->efd >= 0) {
            epoll_ctl(c->x->epfd, EPOLL_CTL_DEL, c->efd, NULL);
        }
        ucp_worker_destroy(c->worker);
        c->worker = NULL;
    }
    /* Only after a stuck close do flows still count requests here; the worker took those along. */
    bt_wx_recv_reap(c);
    bt_wx_send_reap(c);
    BT_ASSERT(bt_list_empty(&c->sends) && bt_list_empty(&c->recvs));
    bt_map_destroy(c->streams);
    bt_list_remove(&c->hot_link);
    bt_list_remove(&c->link);
    bt_wx_event(c->x, &c->obj, BT_WX_EV_STOPPED);
}

/* Timers and changes of state; c may be gone afterwards. */
static void conn_step(struct bt_wx_conn *c)
{
    if (c->connect_ns != 0 && !c->proven && c->x->now_ns - c->connect_ns > BT_WX_PROOF_NS) {
        bt_wx_conn_kill(c, BT_ERR_PEER_LOST, "endpoint not proved within a second");
    }
    if (c->kill_wanted && !c->killed) {
        c->killed = true;
        bt_wx_event(c->x, &c->obj, BT_WX_EV_LOST);
    }
    if ((c->killed || c->stopping) && !c->closing && !conn_lingers(c)) {
        conn_close_begin(c);
    }
    if (c->n_stopping > 0) {
        bt_wx_recv_reap(c);
        bt_wx_send_reap(c);
    }
    if (c->stopping && c->closing && conn_closed(c)) {
        conn_free(c);
    }
}

static void conn_throttle(struct bt_wx_conn *c, bool on)
{
    struct epoll_event ev = {.events = on ? 0 : EPOLLIN, .data.ptr = c};
    if (c->throttled != on && c->efd >= 0) {
        c->throttled = on;
        BT_ASSERT(epoll_ctl(c->x->epfd, EPOLL_CTL_MOD, c->efd, &ev) == 0);
    }
}

/* Returns whether anything moved. */
static bool conn_progress(struct bt_wx_conn *c)
{
    uint32_t n = 0;
    uint64_t end_ns = c->x->now_ns + TURN_NS;
    bool open = c->proven && c->ep != NULL && !c->kill_wanted;
    if (open && !bt_list_empty(&c->ready[0])) {
        bt_wx_send_pump(c); /* hand-offs before whatever UCX has to do */
    }
    while (c->worker != NULL && n < PROGRESS_MAX && ucp_worker_progress(c->worker) != 0) {
        n++;
        if (bt_mono_ns() > end_ns || atomic_load(&c->x->kicked)) {
            break; /* a call can move a MiB: what is more urgent does not wait for 16 of them */
        }
    }
    if (n > 0) {
        c->empty_wakes = 0;
        conn_throttle(c, false);
    }
    if (c->proven && c->ep != NULL && !c->kill_wanted) {
        bt_wx_send_pump(c);
    }
    return n > 0;
}

/* ---- the loop ---- */

static void apply(struct bt_wx *x, struct bt_wx_obj *o, uint32_t cmds)
{
    switch (o->kind) {
    case BT_WX_CONN: {
        struct bt_wx_conn *c = BT_CONTAINER_OF(o, struct bt_wx_conn, obj);
        if (cmds & BT_WX_CMD_OPEN) {
            conn_open(x, c);
        }
        if (cmds & BT_WX_CMD_CONNECT) {
            conn_connect(c);
        }
        if (cmds & BT_WX_CMD_STOP) {
            c->stopping = true;
            c->stop_ns = x->now_ns;
        }
        bt_wx_conn_hot(c);
        break;
    }
    case BT_WX_SEND: {
        struct bt_wx_send *s = BT_CONTAINER_OF(o, struct bt_wx_send, obj);
        if (cmds & BT_WX_CMD_ADD) {
            bt_wx_send_add(s);
        }
        if (cmds & BT_WX_CMD_STOP) {
            bt_wx_send_stop(s);
        }
        break;
    }
    case BT_WX_RECV: {
        struct bt_wx_recv *r = BT_CONTAINER_OF(o, struct bt_wx_recv, obj);
        if (cmds & BT_WX_CMD_ADD) {
            bt_wx_recv_add(r);
        }
        if (cmds & BT_WX_CMD_STOP) {
            bt_wx_recv_stop(r);
        }
        break;
    }
    }
}

static void take_commands(struct bt_wx *x)
{
    for (;;) {
        pthread_mutex_lock(&x->lock);
        x->quit = x->quit_wanted;
        struct bt_wx_obj *o = x->cmd_head;
        uint32_t cmds = 0;
        if (o != NULL) {
            x->cmd_head = o->cmd_next;
            if (x->cmd_head == NULL) {
                x->cmd_tail = &x->cmd_head;
            }
            cmds = o->cmds;
            o->cmds = 0;
            o->cmd_queued = false;
        }
        pthread_mutex_unlock(&x->lock);
        if (o == NULL) {
            return;
        }
        apply(x, o, cmds);
    }
}

static void look_at_words(struct bt_wx *x)
{
    struct bt_list *i, *j;
    if (!atomic_exchange(&x->kicked, false)) {
        return;
    }
    bt_list_for_each (i, &x->conns) {
        struct bt_wx_conn *c = BT_CONTAINER_OF(i, struct bt_wx_conn, link);
        bt_list_for_each (j, &c->sends) {
            bt_wx_send_look(BT_CONTAINER_OF(j, struct bt_wx_send, link));
        }
    }
}

/* Arms every hot connection; false if one wants to be progressed first. */
static bool arm_all(struct bt_wx *x)
{
    struct bt_list *i, *tmp;
    bool ready = true;
    bt_list_for_each_safe (i, tmp, &x->hot) {
        struct bt_wx_conn *c = BT_CONTAINER_OF(i, struct bt_wx_conn, hot_link);
        if (c->worker == NULL || c->efd < 0) {
            bt_list_remove(&c->hot_link);
            continue;
        }
        if (c->throttled) {
            continue;
        }
        ucs_status_t st = ucp_worker_arm(c->worker);
        if (st == UCS_OK) {
            bt_list_remove(&c->hot_link);
        } else if (st != UCS_ERR_BUSY) {
            bt_wx_conn_kill(c, BT_ERR_IO, "ucp_worker_arm: %s", ucs_status_string(st));
            ready = false;
        } else if (++c->empty_wakes > EMPTY_WAKES_MAX) {
            conn_throttle(c, true);
        } else {
            ready = false;
        }
    }
    return ready;
}

/* How long to sleep, ms; -1: until something happens. */
static int sleep_ms(const struct bt_wx *x)
{
    const struct bt_list *i;
    int ms = -1;
    bt_list_for_each (i, &x->conns) {
        const struct bt_wx_conn *c = BT_CONTAINER_OF(i, struct bt_wx_conn, link);
        if (c->throttled || c->closing) {
            return THROTTLED_MS;
        }
        if ((c->connect_ns != 0 && !c->proven) || c->n_stopping > 0 || c->stopping) {
            ms = 50; /* deadlines of wire-up and of stopped flows */
        }
    }
    return ms;
}

static void take_wakeups(struct bt_wx *x, const struct epoll_event *ev, int n)
{
    struct bt_list *i, *tmp;
    for (int k = 0; k < n; k++) {
        struct bt_wx_conn *c = ev[k].data.ptr;
        if (c == NULL) {
            uint64_t v;
            BT_ASSERT(read(x->wakefd, &v, sizeof(v)) == sizeof(v) || errno == EAGAIN);
            atomic_store(&x->woken, false);
        } else {
            if (++c->empty_wakes > EMPTY_WAKES_MAX) {
                conn_throttle(c, true);
            }
            bt_wx_conn_hot(c);
        }
    }
    x->now_ns = bt_mono_ns();
    bt_list_for_each_safe (i, tmp, &x->conns) {
        struct bt_wx_conn *c = BT_CONTAINER_OF(i, struct bt_wx_conn, link);
        if (c->throttled || c->closing) {
            bt_wx_conn_hot(c);
        }
        conn_step(c);
    }
}

static void *thread_main(void *arg)
{
    struct bt_wx *x = arg;
    bt_loop_short_slices(SLICE_US);
    struct epoll_event ev[EVENTS_PER_TURN];
    int idle = 0;
    for (;;) {
        struct bt_list *i, *tmp;
        bool moved = false;
        x->now_ns = bt_mono_ns();
        take_commands(x);
        look_at_words(x);
        bt_list_for_each_safe (i, tmp, &x->hot) {
            struct bt_wx_conn *c = BT_CONTAINER_OF(i, struct bt_wx_conn, hot_link);
            moved |= conn_progress(c);
            bt_wx_recv_notify(x);
            conn_step(c);
        }
        if (x->quit && bt_list_empty(&x->conns)) {
            return NULL;
        }
        if (moved || (!bt_list_empty(&x->hot) && ++idle < SPIN_TURNS)) {
            idle = moved ? 0 : idle;
            continue;
        }
        idle = 0;
        if (arm_all(x)) {
            int n = epoll_wait(x->epfd, ev, EVENTS_PER_TURN, sleep_ms(x));
            BT_ASSERT(n >= 0 || errno == EINTR);
            take_wakeups(x, ev, BT_MAX(n, 0));
        }
    }
}

/* ---- start and end, control thread ---- */

bt_status_t bt_wx_create(const struct bt_wx_config *conf, struct bt_wx **x_p, char *err,
                         size_t err_cap)
{
    struct bt_wx *x = bt_calloc(1, sizeof(*x));
    x->conf = *conf;
    bt_status_t st = bt_wx_context_create(x, err, err_cap);
    if (st != BT_OK) {
        free(x);
        return st;
    }
    bt_list_init(&x->conns);
    bt_list_init(&x->hot);
    bt_list_init(&x->notify);
    x->cmd_tail = &x->cmd_head;
    pthread_mutex_init(&x->lock, NULL);
    x->mail = bt_calloc(1, sizeof(*x->mail));
    pthread_mutex_init(&x->mail->lock, NULL);
    x->mail->tail = &x->mail->head;
    x->mail->x = x;
    x->mail->task.fn = mail_task;
    x->mail->task.arg = x->mail;
    x->epfd = epoll_create1(EPOLL_CLOEXEC);
    x->wakefd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    BT_ASSERT(x->epfd >= 0 && x->wakefd >= 0);
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};
    BT_ASSERT(epoll_ctl(x->epfd, EPOLL_CTL_ADD, x->wakefd, &ev) == 0);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals belong to the loop */
    BT_ASSERT(pthread_create(&x->thread, NULL, thread_main, x) == 0);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_setname_np(x->thread, "baton-wire");
    *x_p = x;
    return BT_OK;
}

void bt_wx_destroy(struct bt_wx *x)
{
    pthread_mutex_lock(&x->lock);
    x->quit_wanted = true;
    pthread_mutex_unlock(&x->lock);
    wake(x);
    pthread_join(x->thread, NULL);
    mail_deliver(x->mail);
    struct bt_wx_mail *m = x->mail;
    m->x = NULL;
    if (!m->posted) { /* else its task is still in the loop, and frees it */
        pthread_mutex_destroy(&m->lock);
        free(m);
    }
    bt_wx_send_free_pool(x);
    ucp_dt_destroy(x->unpacked);
    ucp_cleanup(x->context);
    close(x->epfd);
    close(x->wakefd);
    pthread_mutex_destroy(&x->lock);
    free(x);
}
