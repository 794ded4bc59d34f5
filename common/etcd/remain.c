/* The remaining time of records: asks etcd once for each record, a few at a time, and again while
 * etcd is away. */
#include "common/etcd/remain.h"

#include <stdlib.h>

#include "common/base/list.h"
#include "common/base/map.h"
#include "common/log/log.h"

#define ASKED_MAX 16u /* calls at a time: after a restart all records are asked for at once */
#define AGAIN_MS  1000

struct ask {
    struct bt_list link;  /* in `waiting`; in no list while the call runs */
    struct bt_remain *of; /* NULL: the owner no longer wants the answer */
    uint64_t id;
    int64_t lease;
    struct bt_remain_term term;
    uint64_t ends_ns; /* the latest possible end */
    bool asked;
};

struct bt_remain {
    struct bt_etcd *e;
    bt_remain_fn fn;
    void *arg;
    struct bt_map *asks; /* id -> ask, until the answer comes */
    struct bt_list waiting;
    uint32_t n_asked;
    struct bt_timer again;
};

static uint64_t sum(uint64_t a, uint64_t b)
{
    return a + b < a ? UINT64_MAX : a + b;
}

static uint64_t ns_of(uint64_t ms)
{
    return ms > UINT64_MAX / 1000000 ? UINT64_MAX : ms * 1000000;
}

uint64_t bt_remain_left_ms(const struct bt_remain_term *r, const struct bt_etcd_lease_time *t,
                           uint64_t wall_ns)
{
    uint64_t passed_s = t->granted_s - BT_MIN(t->granted_s, t->left_s);
    uint64_t passed_ms = passed_s > 0 ? (passed_s - 1) * 1000 : 0; /* left_s is rounded down */
    uint64_t left_ms = r->ttl_ms - BT_MIN(r->ttl_ms, passed_ms);
    if (t->raft_term != r->raft_term) {
        uint64_t wall_ms = (r->expires_ns - BT_MIN(r->expires_ns, wall_ns)) / 1000000;
        left_ms = BT_MIN(left_ms, wall_ms);
    }
    return left_ms;
}

/* ---- asking ---- */

static void next(struct bt_remain *m);

static void on_again(void *arg)
{
    next(arg);
}

static void on_time(void *arg, bt_status_t st, const struct bt_etcd_lease_time *t)
{
    struct ask *a = arg;
    struct bt_remain *m = a->of;
    if (m == NULL) {
        free(a);
        return;
    }
    m->n_asked--;
    a->asked = false;
    if (st != BT_OK && st != BT_ERR_NOT_FOUND) {
        bt_list_insert_tail(&m->waiting, &a->link);
        bt_timer_start(bt_etcd_loop(m->e), &m->again, AGAIN_MS, 0, on_again, m);
        return;
    }
    /* A record without its lease is deleted too; the watch reports that, or has done so. */
    uint64_t left_ms = st == BT_OK ? bt_remain_left_ms(&a->term, t, bt_real_ns()) : 0;
    uint64_t id = a->id, ends_ns = sum(bt_mono_ns(), ns_of(left_ms));
    bool sooner = ends_ns < a->ends_ns;
    (void)bt_map_del(m->asks, &id);
    free(a);
    if (sooner) {
        m->fn(m->arg, id, ends_ns);
    }
    next(m);
}

static void next(struct bt_remain *m)
{
    while (m->n_asked < ASKED_MAX && !bt_list_empty(&m->waiting)) {
        struct ask *a = BT_CONTAINER_OF(m->waiting.next, struct ask, link);
        bt_list_remove(&a->link);
        a->asked = true;
        m->n_asked++;
        bt_etcd_lease_time(m->e, a->lease, on_time, a);
    }
}

static void give_up(struct bt_remain *m, struct ask *a)
{
    if (a->asked) {
        a->of = NULL;
        m->n_asked--;
    } else {
        bt_list_remove(&a->link);
        free(a);
    }
}

/* ---- create and destroy ---- */

struct bt_remain *bt_remain_create(struct bt_etcd *e, bt_remain_fn fn, void *arg)
{
    struct bt_remain *m = bt_calloc(1, sizeof(*m));
    m->e = e;
    m->fn = fn;
    m->arg = arg;
    m->asks = bt_map_create(sizeof(uint64_t));
    bt_list_init(&m->waiting);
    return m;
}

void bt_remain_destroy(struct bt_remain *m)
{
    if (m == NULL) {
        return;
    }
    size_t it = 0;
    struct ask *a;
    bt_timer_stop(bt_etcd_loop(m->e), &m->again);
    while ((a = bt_map_next(m->asks, &it, NULL)) != NULL) {
        give_up(m, a);
    }
    bt_map_destroy(m->asks);
    free(m);
}

uint64_t bt_remain_follow(struct bt_remain *m, uint64_t id, int64_t lease,
                          const struct bt_remain_term *r)
{
    struct ask *a = bt_calloc(1, sizeof(*a));
    bt_remain_forget(m, id);
    a->of = m;
    a->id = id;
    a->lease = lease;
    a->term = *r;
    a->ends_ns = sum(bt_mono_ns(), ns_of(r->ttl_ms));
    uint64_t ends_ns = a->ends_ns;
    bt_map_put(m->asks, &a->id, a);
    bt_list_insert_tail(&m->waiting, &a->link);
    next(m);
    return ends_ns;
}

void bt_remain_forget(struct bt_remain *m, uint64_t id)
{
    struct ask *a = bt_map_del(m->asks, &id);
    if (a != NULL) {
        give_up(m, a);
        next(m);
    }
}
