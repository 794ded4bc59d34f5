/* The transfer thread, independent of the transport: connections, paths, commands from the control
 * thread and events to it; start and end. All functions run on the transfer thread, except
 * bt_wx_create, bt_wx_destroy, bt_wx_card_start, bt_wx_start_thread, bt_wx_command and
 * bt_wx_kick. */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kvstore/wire/xfer_priv.h"

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
    if (x->conf.inside != NULL) {
        x->conf.on_event(x->conf.arg, o, ev);
        return;
    }
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
    if (post) { /* under the lock, because the task clears the flag only after it was posted */
        bt_loop_post(x->conf.loop, &m->task);
    }
    pthread_mutex_unlock(&m->lock);
}

/* ---- commands, control -> transfer thread ---- */

static void wake(struct bt_wx *x)
{
    if (!atomic_exchange(&x->bell->woken, true)) {
        uint64_t one = 1;
        BT_ASSERT(write(x->wakefd, &one, sizeof(one)) == sizeof(one) || errno == EAGAIN);
    }
}

void bt_wx_enqueue(struct bt_wx *x, struct bt_wx_obj *o, uint32_t cmd)
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
}

void bt_wx_command(struct bt_wx *x, struct bt_wx_obj *o, uint32_t cmd)
{
    if (x->t->command != NULL) {
        x->t->command(x, o, cmd);
        return;
    }
    bt_wx_enqueue(x, o, cmd);
    wake(x);
}

void bt_wx_kick(struct bt_wx *x)
{
    if (!atomic_exchange(&x->bell->kicked, true)) {
        wake(x);
    }
}

void bt_wx_unwake(struct bt_wx *x)
{
    uint64_t v;
    BT_ASSERT(read(x->wakefd, &v, sizeof(v)) == sizeof(v) || errno == EAGAIN);
    atomic_store(&x->bell->woken, false);
}

void bt_wx_absorb_adds(struct bt_wx *x)
{
    if (x->conf.inside != NULL) {
        x->conf.inside->pull(x->conf.inside->arg, false);
    }
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
    struct bt_list *i;
    bt_list_for_each (i, &c->paths) {
        bt_wx_path_hot(BT_CONTAINER_OF(i, struct bt_wx_path, link));
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

uint32_t bt_wx_conn_open_paths(const struct bt_wx_conn *c)
{
    const struct bt_list *i;
    uint32_t n = 0;
    bt_list_for_each (i, &c->paths) {
        n += bt_wx_path_open(BT_CONTAINER_OF(i, struct bt_wx_path, link));
    }
    return n;
}

static void conn_open(struct bt_wx *x, struct bt_wx_conn *c)
{
    c->x = x;
    c->streams = bt_map_create(sizeof(uint32_t));
    bt_list_init(&c->paths);
    bt_list_init(&c->sends);
    bt_list_init(&c->recvs);
    for (int i = 0; i < BT_WX_CLASSES; i++) {
        bt_list_init(&c->ready[i]);
    }
    bt_list_insert_tail(&x->conns, &c->link);
}

/* Does the connection's work that is due now, after that of its paths. This may free c. */
void bt_wx_conn_step(struct bt_wx_conn *c)
{
    if (c->kill_wanted && !c->killed) {
        c->killed = true;
        bt_wx_event(c->x, &c->obj, BT_WX_EV_LOST);
        bt_wx_conn_hot(c); /* so that they close */
    }
    if (c->n_stopping > 0) {
        bt_wx_recv_reap(c);
        bt_wx_send_reap(c);
    }
    if (c->stopping && bt_list_empty(&c->paths)) {
        BT_ASSERT(bt_list_empty(&c->sends) && bt_list_empty(&c->recvs));
        bt_map_destroy(c->streams);
        bt_list_remove(&c->link);
        bt_wx_event(c->x, &c->obj, BT_WX_EV_STOPPED);
    }
}

/* ---- paths ---- */

void bt_wx_path_hot(struct bt_wx_path *l)
{
    if (bt_list_empty(&l->hot_link)) {
        bt_list_insert_tail(&l->conn->x->hot, &l->hot_link);
    }
}

void bt_wx_path_kill(struct bt_wx_path *l, bt_status_t st, const char *fmt, ...)
{
    if (l->kill_wanted || l->killed) {
        return;
    }
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(l->why, sizeof(l->why), fmt, ap);
    va_end(ap);
    l->lost = st;
    l->kill_wanted = true;
    bt_wx_path_hot(l);
}

bool bt_wx_path_open(const struct bt_wx_path *l)
{
    return l->proven && l->connected && !l->kill_wanted && !l->stopping && !l->conn->kill_wanted;
}

void bt_wx_path_proven(struct bt_wx_path *l)
{
    l->proven = true;
    l->proven_ns = bt_mono_ns();
    bt_wx_event(l->conn->x, &l->obj, BT_WX_EV_PROVEN);
}

bool bt_wx_path_ends(struct bt_wx_path *l)
{
    if (l->kill_wanted && !l->killed) {
        l->killed = true;
        bt_wx_event(l->conn->x, &l->obj, BT_WX_EV_LOST);
    }
    return l->killed || l->stopping || l->conn->killed;
}

void bt_wx_path_gone(struct bt_wx_path *l)
{
    bt_list_remove(&l->hot_link);
    bt_list_remove(&l->link);
    bt_wx_recv_report(l);
    bt_wx_event(l->conn->x, &l->obj, BT_WX_EV_STOPPED);
}

static void path_apply(struct bt_wx *x, struct bt_wx_path *l, uint32_t cmds)
{
    if (cmds & BT_WX_CMD_OPEN) {
        bt_list_init(&l->hot_link);
        bt_list_insert_tail(&l->conn->paths, &l->link);
        x->t->path_open(l);
    }
    if ((cmds & BT_WX_CMD_CONNECT) && !l->killed && !l->kill_wanted) {
        l->connect_ns = x->now_ns;
        x->t->path_connect(l);
    }
    if (cmds & BT_WX_CMD_STOP) {
        l->stopping = true;
        l->stop_ns = x->now_ns;
    }
    if (cmds & BT_WX_CMD_RESEND) { /* a path that is in no list any more */
        bt_wx_send_resend(l);
        bt_wx_event(x, &l->obj, BT_WX_EV_RESENT);
        return;
    }
    bt_wx_path_hot(l);
}

/* ---- what the transport's loop calls ---- */

static void apply(struct bt_wx *x, struct bt_wx_obj *o, uint32_t cmds)
{
    switch (o->kind) {
    case BT_WX_CONN: {
        struct bt_wx_conn *c = BT_CONTAINER_OF(o, struct bt_wx_conn, obj);
        if (cmds & BT_WX_CMD_OPEN) {
            conn_open(x, c);
        }
        if ((cmds & BT_WX_CMD_OPEN) && (cmds & BT_WX_CMD_STOP)) {
            /* It ended before it began. Its paths come after it in the queue, but must end
             * first. */
            bt_wx_enqueue(x, o, BT_WX_CMD_STOP);
        } else if (cmds & BT_WX_CMD_STOP) {
            c->stopping = true;
            bt_wx_conn_step(c);
        }
        break;
    }
    case BT_WX_PATH: path_apply(x, BT_CONTAINER_OF(o, struct bt_wx_path, obj), cmds); break;
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

void bt_wx_take_commands(struct bt_wx *x)
{
    if (x->conf.inside != NULL) {
        x->conf.inside->turn(x->conf.inside->arg);
    }
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

void bt_wx_look_at_words(struct bt_wx *x)
{
    struct bt_list *i, *j;
    if (!atomic_exchange(&x->bell->kicked, false)) {
        return;
    }
    bt_list_for_each (i, &x->conns) {
        struct bt_wx_conn *c = BT_CONTAINER_OF(i, struct bt_wx_conn, link);
        bt_list_for_each (j, &c->sends) {
            bt_wx_send_look(BT_CONTAINER_OF(j, struct bt_wx_send, link));
        }
    }
}

bool bt_wx_over(const struct bt_wx *x)
{
    return x->quit && bt_list_empty(&x->conns);
}

bool bt_wx_flush(struct bt_wx *x)
{
    return x->conf.inside == NULL || x->conf.inside->flush(x->conf.inside->arg);
}

/* ---- start and end, control thread ---- */

void bt_wx_start_thread(struct bt_wx *x, void *(*thread)(void *x))
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals belong to the loop's thread */
    BT_ASSERT(pthread_create(&x->thread, NULL, thread, x) == 0);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_setname_np(x->thread, "baton-wire");
    x->running = true;
}

struct bt_wx *bt_wx_create(const struct bt_wx_config *conf)
{
    struct bt_wx *x = bt_calloc(1, sizeof(*x));
    x->conf = *conf;
    x->t = conf->grpc_listen != NULL ? &bt_wx_over_grpc
           : conf->inside != NULL    ? &bt_wx_over_ucx
                                     : &bt_wx_over_process;
    for (uint32_t i = 0; i < conf->n_cards; i++) {
        x->by_node |= conf->cards[i].node >= 0 && conf->cards[i].node != conf->cards[0].node;
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
    x->bell = conf->inside != NULL ? conf->inside->bell : &x->own_bell;
    x->wakefd =
        conf->inside != NULL ? conf->inside->wakefd : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    BT_ASSERT(x->wakefd >= 0);
    x->t->create(x);
    return x;
}

bt_status_t bt_wx_card_start(struct bt_wx *x, uint32_t card, bool wait, char *err, size_t err_cap)
{
    return x->t->card_start(x, card, wait, err, err_cap);
}

void bt_wx_quit(struct bt_wx *x)
{
    pthread_mutex_lock(&x->lock);
    x->quit_wanted = true;
    pthread_mutex_unlock(&x->lock);
}

void bt_wx_destroy(struct bt_wx *x)
{
    bt_wx_quit(x);
    if (x->t->finish != NULL) {
        x->t->finish(x);
    } else if (x->running) {
        wake(x);
        pthread_join(x->thread, NULL);
    }
    mail_deliver(x->mail);
    struct bt_wx_mail *m = x->mail;
    m->x = NULL;
    if (!m->posted) { /* otherwise its task is still in the loop and frees it */
        pthread_mutex_destroy(&m->lock);
        free(m);
    }
    bt_wx_send_free_pool(x);
    x->t->destroy(x);
    close(x->wakefd);
    pthread_mutex_destroy(&x->lock);
    free(x);
}
