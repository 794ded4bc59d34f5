/* Leases and what is left of records, against answers that a real etcd gives when it is ill or
 * busy.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/etcd/remain.h"
#include "etcd_answers.h"

static struct {
    uint32_t granted, lost;
    int64_t id;
} L;

static void on_granted(void *arg, int64_t lease)
{
    (void)arg;
    L.granted++;
    L.id = lease;
}
static void on_lost(void *arg)
{
    (void)arg;
    L.lost++;
}
static const struct bt_etcd_lease_ops lease_ops = {.on_granted = on_granted, .on_lost = on_lost};

static void grant(uint32_t end, int64_t id)
{
    Etcdserverpb__LeaseGrantResponse r = ETCDSERVERPB__LEASE_GRANT_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = header_of(1);
    r.header = &h;
    r.id = id;
    r.ttl = 5;
    ea_reply(end, EA_GRANT, &r);
}

static void alive(uint32_t end, int64_t id, int64_t ttl)
{
    Etcdserverpb__LeaseKeepAliveResponse r = ETCDSERVERPB__LEASE_KEEP_ALIVE_RESPONSE__INIT;
    r.id = id;
    r.ttl = ttl;
    ea_send(&EA.ends[end].alive, &r);
}

static int64_t revoked(uint32_t end)
{
    struct ea_method *m = &EA.ends[end].methods[EA_REVOKE];
    UNTIL(m->n_calls == 1);
    Etcdserverpb__LeaseRevokeRequest *q =
        etcdserverpb__lease_revoke_request__unpack(NULL, m->len, m->last);
    int64_t id = q->id;
    etcdserverpb__lease_revoke_request__free_unpacked(q, NULL);
    ea_refuse(end, EA_REVOKE, BT_GRPC_OK);
    return id;
}

static void test_a_lease(void **state)
{
    struct ea_stream *x = &EA.ends[0].alive;
    (void)state;
    memset(&L, 0, sizeof(L));
    struct bt_etcd_lease *l = bt_etcd_lease_start(EA.e, 5, &lease_ops, NULL);
    ea_refuse(0, EA_GRANT, BT_GRPC_EXHAUSTED);
    grant(0, 0); /* no lease: asked again */
    ea_garbage(0, EA_GRANT);
    assert_int_equal(L.granted, 0);
    grant(0, 17);
    UNTIL(L.granted == 1 && x->heard == 1); /* the first keepalive leaves at once */
    assert_int_equal(L.id, 17);
    alive(0, 16, 0); /* of a lease that was before */
    alive(0, 17, 5);
    if (x->s != NULL) { /* what cannot be read: another stream */
        assert_int_equal(bt_rpc_stream_send(x->s, "\xff\xff", 2), BT_OK);
    }
    UNTIL(x->opened == 2 && x->heard == 2);
    assert_int_equal(L.lost, 0);
    bt_rpc_stream_close(x->s, BT_GRPC_UNAVAILABLE, "leader changed", false);
    x->s = NULL;
    UNTIL(x->opened == 3 && x->heard == 3);
    assert_int_equal(L.lost, 0); /* unreachable is not gone */
    alive(0, 17, 0);
    UNTIL(L.lost == 1);
    grant(0, 18);
    UNTIL(L.granted == 2 && x->heard == 4);
    assert_int_equal(L.id, 18);
    bt_rpc_stream_close(x->s, BT_GRPC_NOT_FOUND, "no such lease", false);
    x->s = NULL;
    UNTIL(L.lost == 2);
    grant(0, 19);
    UNTIL(L.granted == 3);
    bt_etcd_lease_stop(l);
    assert_int_equal(revoked(0), 19);
    /* stopped while it is granted: revoked as soon as it is known */
    l = bt_etcd_lease_start(EA.e, 5, &lease_ops, NULL);
    UNTIL(EA.ends[0].methods[EA_GRANT].n_calls == 1);
    bt_etcd_lease_stop(l);
    grant(0, 20);
    assert_int_equal(revoked(0), 20);
    l = bt_etcd_lease_start(EA.e, 5, &lease_ops, NULL);
    UNTIL(EA.ends[0].methods[EA_GRANT].n_calls == 1);
    bt_etcd_lease_stop(l);
    ea_refuse(0, EA_GRANT, BT_GRPC_EXHAUSTED); /* nothing to revoke */
    struct ea_got g = {0};
    bt_etcd_put(EA.e, "k", "v", 1, 0, ea_on_put, &g);
    ea_refuse(0, EA_PUT, BT_GRPC_OK);
    UNTIL(g.n == 1);
    assert_int_equal(EA.ends[0].methods[EA_REVOKE].n_seen, 2);
    assert_int_equal(L.granted, 3);
    assert_int_equal(L.lost, 2);
}

/* An endpoint that says nothing to a keepalive for a whole beat is left. */
static void test_a_keepalive_without_an_answer(void **state)
{
    (void)state;
    memset(&L, 0, sizeof(L));
    struct bt_etcd_lease *l = bt_etcd_lease_start(EA.e, 1, &lease_ops, NULL);
    grant(0, 17);
    UNTIL(EA.ends[0].alive.heard == 1);
    alive(0, 17, 1);
    UNTIL(EA.ends[0].alive.heard == 2); /* a third of a second later; not answered */
    UNTIL(EA.ends[1].alive.heard == 1);
    alive(1, 17, 1);
    assert_int_equal(EA.ends[0].alive.heard, 2);
    assert_int_equal(EA.ends[0].alive.opened, 1);
    assert_int_equal(L.lost, 0);
    bt_etcd_lease_stop(l);
    assert_int_equal(revoked(1), 17);
}

static void on_once(void *arg, bt_status_t st, int64_t lease, uint64_t raft_term)
{
    struct ea_got *g = arg;
    g->n++;
    g->st = st;
    g->lease = lease;
    g->term = raft_term;
}

static void on_time(void *arg, bt_status_t st, const struct bt_etcd_lease_time *t)
{
    struct ea_got *g = arg;
    g->n++;
    g->st = st;
    g->has_current = t != NULL;
    g->left_s = t != NULL ? t->left_s : 0;
    g->granted_s = t != NULL ? t->granted_s : 0;
    g->term = t != NULL ? t->raft_term : 0;
}

static void answer_time(int64_t ttl, int64_t granted_s, bool header)
{
    Etcdserverpb__LeaseTimeToLiveResponse r = ETCDSERVERPB__LEASE_TIME_TO_LIVE_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = header_of(1);
    r.header = header ? &h : NULL;
    r.ttl = ttl;
    r.grantedttl = granted_s;
    ea_reply(0, EA_TIME, &r);
}

static void test_leases_that_nobody_keeps(void **state)
{
    struct ea_got g = {0};
    (void)state;
    bt_etcd_grant(EA.e, 60, on_once, &g);
    grant(0, 31);
    UNTIL(g.n == 1);
    assert_true(g.st == BT_OK && g.lease == 31 && g.term == 7);
    bt_etcd_grant(EA.e, 60, on_once, &g);
    ea_garbage(0, EA_GRANT);
    UNTIL(g.n == 2);
    assert_true(g.st == BT_ERR_PEER_PROTOCOL && g.lease == 0);
    static const struct {
        int64_t ttl, granted;
        bool header;
        bt_status_t st;
    } times[] = {{20, 60, true, BT_OK},
                 {60, 60, true, BT_OK},
                 {0, 60, true, BT_OK},
                 {-1, 0, true, BT_ERR_NOT_FOUND},
                 {61, 60, true, BT_ERR_PEER_PROTOCOL},
                 {20, 60, false, BT_ERR_PEER_PROTOCOL}};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(times); i++) {
        struct ea_got t = {0};
        bt_etcd_lease_time(EA.e, 31, on_time, &t);
        answer_time(times[i].ttl, times[i].granted, times[i].header);
        UNTIL(t.n == 1);
        assert_int_equal(t.st, times[i].st);
        assert_int_equal(t.has_current, t.st == BT_OK);
        assert_true(t.st != BT_OK ||
                    (t.left_s == (uint64_t)times[i].ttl && t.granted_s == 60 && t.term == 7));
    }
    bt_etcd_lease_time(EA.e, 31, on_time, &g);
    ea_garbage(0, EA_TIME);
    UNTIL(g.n == 3);
    assert_int_equal(g.st, BT_ERR_PEER_PROTOCOL);
}

/* ---- what is left of records ---- */

static struct {
    uint32_t n;
    uint64_t id, ends_ns;
} R;

static void on_sooner(void *arg, uint64_t id, uint64_t ends_ns)
{
    (void)arg;
    R.n++;
    R.id = id;
    R.ends_ns = ends_ns;
}

static void test_what_is_left(void **state)
{
    (void)state;
    struct bt_remain_term r = {.ttl_ms = 60000, .expires_ns = 100000000000ull, .raft_term = 7};
    struct bt_etcd_lease_time t = {.granted_s = 60, .left_s = 60, .raft_term = 7};
    uint64_t wall = 95000000000ull; /* five seconds before the end, by the wall clock */
    assert_int_equal(bt_remain_left_ms(&r, &t, wall), 60000);
    t.left_s = 59; /* rounded down: nothing is sure to have passed */
    assert_int_equal(bt_remain_left_ms(&r, &t, wall), 60000);
    t.left_s = 58;
    assert_int_equal(bt_remain_left_ms(&r, &t, wall), 59000);
    t.left_s = 0;
    assert_int_equal(bt_remain_left_ms(&r, &t, wall), 1000);
    t.left_s = 70; /* more than was granted */
    assert_int_equal(bt_remain_left_ms(&r, &t, wall), 60000);
    r.ttl_ms = 30000; /* less than its lease */
    t.left_s = 20;
    assert_int_equal(bt_remain_left_ms(&r, &t, wall), 0);
    r.ttl_ms = 60000;
    t.left_s = 60;
    t.raft_term = 8; /* etcd counts anew: the wall clock is what is left */
    assert_int_equal(bt_remain_left_ms(&r, &t, wall), 5000);
    assert_int_equal(bt_remain_left_ms(&r, &t, 200000000000ull), 0);
    t.left_s = 2; /* ... unless etcd's own count is shorter */
    assert_int_equal(bt_remain_left_ms(&r, &t, 1), 3000);
}

static void test_records_are_asked_for(void **state)
{
    struct ea_method *m = &EA.ends[0].methods[EA_TIME];
    struct bt_remain *x = bt_remain_create(EA.e, on_sooner, NULL);
    struct bt_remain_term r = {.ttl_ms = 60000, .raft_term = 7};
    (void)state;
    memset(&R, 0, sizeof(R));
    uint64_t before = bt_mono_ns(), ends = bt_remain_follow(x, 1, 500, &r);
    assert_true(ends >= before + 60000 * 1000000ull);
    answer_time(60, 60, true); /* as it says itself */
    bt_remain_follow(x, 2, 500, &r);
    answer_time(30, 60, true); /* half of it has passed */
    UNTIL(R.n == 1);
    assert_int_equal(R.id, 2);
    assert_true(R.ends_ns < bt_mono_ns() + 31000 * 1000000ull &&
                R.ends_ns > before + 29000000000ull);
    bt_remain_follow(x, 3, 500, &r);
    answer_time(-1, 0, true); /* its lease is gone: now */
    UNTIL(R.n == 2);
    assert_true(R.id == 3 && R.ends_ns <= bt_mono_ns());
    bt_remain_follow(x, 4, 500, &r); /* no answer: asked again, a second later */
    ea_refuse(0, EA_TIME, BT_GRPC_EXHAUSTED);
    answer_time(-1, 0, true);
    UNTIL(R.n == 3);
    assert_int_equal(R.id, 4);
    r.ttl_ms = UINT64_MAX; /* for ever */
    assert_true(bt_remain_follow(x, 5, 500, &r) == UINT64_MAX);
    bt_remain_forget(x, 5); /* while it is asked */
    bt_remain_forget(x, 77);
    UNTIL(m->n_calls == 1);
    answer_time(-1, 0, true);
    /* no more than sixteen at a time; who waits may be forgotten too */
    r.ttl_ms = 60000;
    for (uint64_t id = 100; id < 120; id++) {
        bt_remain_follow(x, id, 500, &r);
    }
    UNTIL(m->n_calls == 16);
    bt_remain_forget(x, 118);
    uint32_t seen = m->n_seen;
    for (uint32_t i = 0; i < 18; i++) {
        UNTIL(m->n_calls > 0);
        assert_true(m->n_calls <= 16);
        answer_time(-1, 0, true);
    }
    UNTIL(R.n == 3 + 19 - 1);
    answer_time(-1, 0, true);
    UNTIL(R.n == 3 + 19);
    assert_int_equal(m->n_seen, seen + 3);
    bt_remain_follow(x, 200, 500, &r);
    bt_remain_follow(x, 200, 501, &r); /* another record under the id */
    UNTIL(m->n_calls == 2);
    bt_remain_destroy(x);
    answer_time(-1, 0, true);
    answer_time(-1, 0, true);
    bt_remain_destroy(NULL);
}

#define T1(f) cmocka_unit_test_setup_teardown(f, ea_one, ea_stop)
#define T2(f) cmocka_unit_test_setup_teardown(f, ea_two, ea_stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T1(test_a_lease),
        T2(test_a_keepalive_without_an_answer),
        T1(test_leases_that_nobody_keeps),
        cmocka_unit_test(test_what_is_left),
        T1(test_records_are_asked_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
