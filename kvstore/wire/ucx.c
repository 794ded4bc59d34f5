/* The transfer thread over UCX, which is the main thread of the wire process: its loop, its start
 * and its end. The loop sleeps only while every worker is armed. */
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "kvstore/wire/ucx_priv.h"

#define SPIN_TURNS      32 /* empty turns before arming: a few microseconds */
#define EVENTS_PER_TURN 64
#define UNTOLD_MS       2 /* interval for offering events again that the kvstore did not read */

/* Arms every hot path; false if a path must be progressed first. */
static bool arm_all(struct bt_wx *x)
{
    struct bt_list *i, *tmp;
    bool ready = true;
    bt_list_for_each_safe (i, tmp, &x->hot) {
        ready &= bt_ucx_path_arm(BT_CONTAINER_OF(i, struct bt_wx_path, hot_link));
    }
    return ready;
}

/* How long to sleep, ms; -1: until an event. */
static int sleep_ms(const struct bt_wx *x)
{
    const struct bt_list *i, *j;
    int ms = -1;
    bt_list_for_each (i, &x->conns) {
        const struct bt_wx_conn *c = BT_CONTAINER_OF(i, struct bt_wx_conn, link);
        int may = c->n_stopping > 0 || c->stopping ? 50 : -1; /* stopped flows have deadlines */
        ms = may >= 0 && (ms < 0 || may < ms) ? may : ms;
        bt_list_for_each (j, &c->paths) {
            may = bt_ucx_path_sleep_ms(BT_CONTAINER_OF(j, struct bt_wx_path, link));
            ms = may >= 0 && (ms < 0 || may < ms) ? may : ms;
        }
    }
    return ms;
}

static void conn_look(struct bt_wx_conn *c)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &c->paths) {
        struct bt_wx_path *l = BT_CONTAINER_OF(i, struct bt_wx_path, link);
        bt_ucx_path_look(l);
        bt_ucx_path_step(l);
    }
    bt_wx_conn_step(c);
}

static void take_wakeups(struct bt_wx *x, const struct epoll_event *ev, int n)
{
    struct bt_list *i, *tmp;
    for (int k = 0; k < n; k++) {
        if (ev[k].data.ptr == NULL) {
            bt_wx_unwake(x);
        } else if (ev[k].data.ptr == x) {
            x->conf.inside->pull(x->conf.inside->arg, true);
        } else {
            bt_ucx_path_woken(ev[k].data.ptr);
        }
    }
    x->now_ns = bt_mono_ns();
    bt_list_for_each_safe (i, tmp, &x->conns) {
        conn_look(BT_CONTAINER_OF(i, struct bt_wx_conn, link));
    }
}

static void run(struct bt_wx *x)
{
    bt_loop_short_slices(BT_WX_SLICE_US);
    struct epoll_event ev[EVENTS_PER_TURN];
    int idle = 0;
    for (;;) {
        struct bt_list *i, *tmp;
        bool moved = false;
        x->now_ns = bt_mono_ns();
        bt_wx_take_commands(x);
        bt_wx_look_at_words(x);
        bt_list_for_each_safe (i, tmp, &x->hot) {
            struct bt_wx_path *l = BT_CONTAINER_OF(i, struct bt_wx_path, hot_link);
            struct bt_wx_conn *c = l->conn;
            moved |= bt_ucx_path_progress(l);
            bt_wx_recv_notify(x);
            bt_ucx_path_step(l); /* may free it */
            bt_wx_conn_step(c);
            (void)bt_wx_flush(x);
        }
        bool told = bt_wx_flush(x);
        if (bt_wx_over(x)) {
            return;
        }
        if (moved || (!bt_list_empty(&x->hot) && ++idle < SPIN_TURNS)) {
            idle = moved ? 0 : idle;
            continue;
        }
        idle = 0;
        if (arm_all(x)) {
            int ms = sleep_ms(x);
            int n = epoll_wait(x->ucx->epfd, ev, EVENTS_PER_TURN,
                               told      ? ms
                               : ms >= 0 ? BT_MIN(ms, UNTOLD_MS)
                                         : UNTOLD_MS);
            BT_ASSERT(n >= 0 || errno == EINTR);
            take_wakeups(x, ev, BT_MAX(n, 0));
        }
    }
}

/* ---- start and end, control thread ---- */

static void create(struct bt_wx *x)
{
    struct bt_wx_ucx *u = bt_calloc(1, sizeof(*u));
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};
    struct epoll_event sock = {.events = EPOLLIN, .data.ptr = x};
    x->ucx = u;
    x->alone_min = BT_UCX_ZCOPY_MIN; /* messages are sent from the slots; several segments would be
                                        gathered into a buffer */
    BT_ASSERT(bt_ucx_datatype(&u->unpacked) == UCS_OK); /* allocates a few bytes */
    u->epfd = epoll_create1(EPOLL_CLOEXEC);
    BT_ASSERT(u->epfd >= 0 && epoll_ctl(u->epfd, EPOLL_CTL_ADD, x->wakefd, &ev) == 0 &&
              epoll_ctl(u->epfd, EPOLL_CTL_ADD, x->conf.inside->sock, &sock) == 0);
}

static void destroy(struct bt_wx *x)
{
    struct bt_wx_ucx *u = x->ucx;
    ucp_dt_destroy(u->unpacked);
    for (uint32_t i = 0; i < x->conf.n_cards; i++) {
        if (u->contexts[i] != NULL) {
            ucp_cleanup(u->contexts[i]);
        }
    }
    close(u->epfd);
    free(u);
}

const struct bt_wx_transport bt_wx_over_ucx = {.create = create,
                                               .card_start = bt_ucx_card_start,
                                               .destroy = destroy,
                                               .run = run,
                                               .path_open = bt_ucx_path_open,
                                               .path_connect = bt_ucx_path_connect,
                                               .post = bt_ucx_post};
