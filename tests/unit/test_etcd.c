/* common/etcd against a real private etcd: calls, leases, watches, and an etcd that is stopped,
 * killed, restarted, compacted or emptied. One etcd serves all tests; each has its own keys. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>

#include "common/etcd/remain.h"
#include "tests/unit/etcd_fixture.h"
#include "tests/unit/loop_wait.h"
#include "tests/unit/stop_process.h"

static struct etcd_fixture etcd;

struct fixture {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
    struct bt_etcd *e;
};

static struct bt_etcd *connect_to(struct fixture *f, const char *a, const char *b)
{
    char *const eps[] = {(char *)a, (char *)b, NULL};
    struct bt_etcd *e = NULL;
    assert_int_equal(bt_etcd_create(f->rpc, eps, NULL, &e), BT_OK);
    return e;
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    assert_int_equal(bt_rpc_create(f->loop, &f->rpc), BT_OK);
    f->e = connect_to(f, etcd.endpoint, NULL);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    bt_etcd_destroy(f->e);
    bt_rpc_destroy(f->rpc);
    bt_loop_destroy(f->loop);
    free(f);
    return 0;
}

/* ---- what came back ---- */

struct result {
    int calls;
    bt_status_t st;
    bool succeeded;
    size_t n;
    int64_t revision, mod_revision;
    char text[256]; /* of a range: "key=value " each; of a swap: the current value */
};

static void on_put(void *arg, bt_status_t st)
{
    struct result *r = arg;
    r->calls++;
    r->st = st;
}

static void on_range(void *arg, bt_status_t st, const struct bt_etcd_kv *kvs, size_t n,
                     int64_t revision)
{
    struct result *r = arg;
    size_t len = 0;
    r->calls++;
    r->st = st;
    r->n = n;
    r->revision = revision;
    r->text[0] = '\0';
    for (size_t i = 0; i < n; i++) {
        len += (size_t)snprintf(r->text + len, sizeof(r->text) - len, "%s=%.*s ", kvs[i].key,
                                (int)kvs[i].value_len, (const char *)kvs[i].value);
    }
}

static void on_cas(void *arg, bt_status_t st, bool succeeded, const struct bt_etcd_kv *cur)
{
    struct result *r = arg;
    r->calls++;
    r->st = st;
    r->succeeded = succeeded;
    r->text[0] = '\0';
    if (cur != NULL) {
        r->mod_revision = cur->mod_revision;
        snprintf(r->text, sizeof(r->text), "%.*s", (int)cur->value_len,
                 (const char *)(cur->value == NULL ? "" : cur->value));
    }
}

static void put(struct fixture *f, const char *key, const char *value)
{
    struct result r = {0};
    bt_etcd_put(f->e, key, value, strlen(value), 0, on_put, &r);
    WAIT_FOR(f, r.calls == 1);
    assert_int_equal(r.st, BT_OK);
}

static struct result cas(struct fixture *f, const char *key, int64_t expect, const char *value)
{
    struct result r = {0};
    bt_etcd_cas(f->e, key, expect, value, strlen(value), 0, on_cas, &r);
    WAIT_FOR(f, r.calls == 1);
    assert_int_equal(r.st, BT_OK);
    return r;
}

/* ---- calls ---- */

static void test_put_range_delete(void **state)
{
    struct fixture *f = *state;
    struct result r = {0}, d = {0};
    put(f, "/pr/a", "1");
    put(f, "/pr/b", "");
    put(f, "/pr0", "a neighbour");
    put(f, "/pr", "another");
    bt_etcd_range_prefix(f->e, "/pr/", on_range, &r);
    WAIT_FOR(f, r.calls == 1);
    assert_int_equal(r.st, BT_OK);
    assert_string_equal(r.text, "/pr/a=1 /pr/b= ");
    assert_true(r.revision > 0);
    bt_etcd_delete(f->e, "/pr/a", on_put, &d);
    WAIT_FOR(f, d.calls == 1);
    assert_int_equal(d.st, BT_OK);
    bt_etcd_range_prefix(f->e, "/pr/", on_range, &r);
    WAIT_FOR(f, r.calls == 2);
    assert_string_equal(r.text, "/pr/b= ");
    bt_etcd_range_prefix(f->e, "/nothing/", on_range, &r);
    WAIT_FOR(f, r.calls == 3);
    assert_int_equal(r.st, BT_OK);
    assert_int_equal(r.n, 0);
}

static void test_cas(void **state)
{
    struct fixture *f = *state;
    struct result made = cas(f, "/cas", 0, "one");
    assert_true(made.succeeded);
    assert_true(made.mod_revision > 0);
    struct result again = cas(f, "/cas", 0, "two");
    assert_false(again.succeeded);
    assert_string_equal(again.text, "one");
    assert_int_equal(again.mod_revision, made.mod_revision);
    struct result next = cas(f, "/cas", made.mod_revision, "two");
    assert_true(next.succeeded);
    assert_true(next.mod_revision > made.mod_revision);
    struct result stale = cas(f, "/cas", made.mod_revision, "three");
    assert_false(stale.succeeded);
    assert_string_equal(stale.text, "two");
    struct result absent = cas(f, "/cas-absent", 7, "x");
    assert_false(absent.succeeded);
    assert_int_equal(absent.mod_revision, 0);
}

static void test_unknown_lease(void **state)
{
    struct fixture *f = *state;
    struct result r = {0};
    bt_etcd_put(f->e, "/ul", "x", 1, 4711, on_put, &r);
    WAIT_FOR(f, r.calls == 1);
    assert_int_equal(r.st, BT_ERR_NOT_FOUND);
}

static void test_endpoints(void **state)
{
    struct fixture *f = *state;
    struct result r = {0};
    struct bt_etcd *e = NULL;
    int port = 0, holder = hold_port(&port);
    char url[80], nobody[64];
    char *const none[] = {NULL};
    char *const tls[] = {(char *)"https://127.0.0.1:2379", NULL};
    assert_int_equal(bt_etcd_create(f->rpc, none, NULL, &e), BT_ERR_INVALID);
    assert_int_equal(bt_etcd_create(f->rpc, tls, NULL, &e), BT_ERR_CONFIG);
    assert_null(e);
    /* the first is not there: the call goes to the second */
    snprintf(nobody, sizeof(nobody), "127.0.0.1:%d", port);
    snprintf(url, sizeof(url), "http://%s/", etcd.endpoint);
    e = connect_to(f, nobody, url);
    bt_etcd_put(e, "/ep", "x", 1, 0, on_put, &r);
    WAIT_FOR(f, r.calls == 1);
    assert_int_equal(r.st, BT_OK);
    bt_etcd_destroy(e);
    /* nobody at all */
    e = connect_to(f, nobody, NULL);
    bt_etcd_put(e, "/ep", "x", 1, 0, on_put, &r);
    WAIT_FOR(f, r.calls == 2);
    assert_int_equal(r.st, BT_ERR_UNAVAILABLE);
    bt_etcd_destroy(e);
    close(holder);
}

/* ---- leases ---- */

struct leased {
    int granted, lost;
    int64_t id;
    struct bt_etcd_lease *stop_in_lost;
};

static void on_granted(void *arg, int64_t lease)
{
    struct leased *l = arg;
    l->granted++;
    l->id = lease;
}

static void on_lost(void *arg)
{
    struct leased *l = arg;
    l->lost++;
    if (l->stop_in_lost != NULL) {
        bt_etcd_lease_stop(l->stop_in_lost);
    }
}

struct timed {
    int calls;
    bt_status_t st;
    struct bt_etcd_lease_time t;
    uint64_t id, ends_ns;
};

static const struct bt_etcd_lease_ops lease_ops = {on_granted, on_lost};

static void test_lease_is_kept(void **state)
{
    struct fixture *f = *state;
    struct leased l = {0};
    struct bt_etcd_lease *lease = bt_etcd_lease_start(f->e, 6, &lease_ops, &l);
    WAIT_FOR(f, l.granted == 1);
    etcd_put(&etcd, "/kept", "x", l.id);
    etcd_put(&etcd, "/not-kept", "x", etcd_grant(&etcd, 6));
    /* Both have six seconds: when the one that nobody keeps is gone, the other is there. The loop
     * renews nothing while etcd_has() runs, which may take most of a second on a busy machine. */
    WAIT_FOR(f, !etcd_has(&etcd, "/not-kept"));
    loop_run_for(f->loop, 1500);
    assert_true(etcd_has(&etcd, "/kept"));
    assert_int_equal(l.lost, 0);
    bt_etcd_lease_stop(lease);
    WAIT_FOR(f, !etcd_has(&etcd, "/kept"));
    assert_int_equal(l.granted, 1);
}

static void test_lease_lost_and_granted_again(void **state)
{
    struct fixture *f = *state;
    struct leased l = {0};
    struct bt_etcd_lease *lease = bt_etcd_lease_start(f->e, 5, &lease_ops, &l);
    WAIT_FOR(f, l.granted == 1);
    int64_t first = l.id;
    etcd_revoke(&etcd, first);
    WAIT_FOR(f, l.granted == 2);
    assert_int_equal(l.lost, 1);
    assert_true(l.id != first);
    l.stop_in_lost = lease; /* the owner may end it in the callback */
    etcd_revoke(&etcd, l.id);
    WAIT_FOR(f, l.lost == 2);
    loop_run_for(f->loop, 300);
    assert_int_equal(l.granted, 2);
}

static void on_time(void *arg, bt_status_t st, const struct bt_etcd_lease_time *t)
{
    struct timed *r = arg;
    r->calls++;
    r->st = st;
    r->t = t != NULL ? *t : (struct bt_etcd_lease_time){0};
}

static void on_remain(void *arg, uint64_t id, uint64_t ends_ns)
{
    struct timed *r = arg;
    r->calls++;
    r->id = id;
    r->ends_ns = ends_ns;
}

static void test_what_is_left_of_a_lease(void **state)
{
    struct fixture *f = *state;
    struct timed r = {0}, ends = {0};
    int64_t lease = etcd_grant(&etcd, 100);
    bt_etcd_lease_time(f->e, lease, on_time, &r);
    WAIT_FOR(f, r.calls == 1);
    assert_int_equal(r.st, BT_OK);
    assert_int_equal(r.t.granted_s, 100);
    assert_in_range(r.t.left_s, 95, 100);
    assert_true(r.t.raft_term > 0);
    bt_etcd_lease_time(f->e, 4711, on_time, &r);
    WAIT_FOR(f, r.calls == 2);
    assert_int_equal(r.st, BT_ERR_NOT_FOUND);

    /* A record of this etcd's term goes by its count, whatever the wall clock says. */
    bt_etcd_lease_time(f->e, lease, on_time, &r);
    WAIT_FOR(f, r.calls == 3);
    struct bt_remain *m = bt_remain_create(f->e, on_remain, &ends);
    struct bt_remain_term term = {.ttl_ms = 90000, .expires_ns = 1, .raft_term = r.t.raft_term};
    loop_run_for(f->loop, 3500);
    uint64_t now = bt_mono_ns(), at = bt_remain_follow(m, 7, lease, &term);
    assert_true(at >= now + 90 * 1000000000ull); /* as if it had been written now */
    WAIT_FOR(f, ends.calls == 1);                /* which etcd knows better */
    assert_int_equal(ends.id, 7);
    assert_true(ends.ends_ns < at && ends.ends_ns > now + 60 * 1000000000ull);
    /* Of another term: etcd has begun to count anew, and the wall clock ends it. */
    term.raft_term++;
    bt_remain_follow(m, 8, lease, &term);
    WAIT_FOR(f, ends.calls == 2);
    assert_int_equal(ends.id, 8);
    assert_true(ends.ends_ns <= bt_mono_ns());
    /* One that was renewed or has gone before etcd answered. */
    bt_remain_follow(m, 8, lease, &term);
    bt_remain_forget(m, 8);
    bt_remain_follow(m, 9, 4711, &term);
    WAIT_FOR(f, ends.calls == 3);
    assert_int_equal(ends.id, 9); /* its lease is gone */
    bt_remain_follow(m, 10, lease, &term);
    bt_remain_destroy(m);
    loop_run_for(f->loop, 300);
    assert_int_equal(ends.calls, 3);
}

static void test_what_is_left_of_a_record(void **state)
{
    static const uint64_t s = 1000000000;
    struct bt_remain_term r = {.ttl_ms = 60500, .expires_ns = 1000 * s, .raft_term = 5};
    struct bt_etcd_lease_time t = {.granted_s = 70, .left_s = 70, .raft_term = 5};
    (void)state;
    assert_int_equal(bt_remain_left_ms(&r, &t, 0), 60500);
    assert_int_equal(bt_remain_left_ms(&r, &t, 2000 * s), 60500);
    t.left_s = 69; /* less than a second may have passed */
    assert_int_equal(bt_remain_left_ms(&r, &t, 0), 60500);
    t.left_s = 40;
    assert_int_equal(bt_remain_left_ms(&r, &t, 2000 * s), 31500);
    t.left_s = 0;
    assert_int_equal(bt_remain_left_ms(&r, &t, 0), 0);
    t.left_s = 40;
    t.raft_term = 6; /* what etcd has counted since is a lower bound of what has passed */
    assert_int_equal(bt_remain_left_ms(&r, &t, 990 * s), 10000);
    assert_int_equal(bt_remain_left_ms(&r, &t, 900 * s), 31500);
    assert_int_equal(bt_remain_left_ms(&r, &t, 2000 * s), 0);
}

/* The loop does not run any more when a daemon's main takes things down. */
static void test_destroy_revokes(void **state)
{
    struct fixture *f = *state;
    struct leased a = {0}, b = {0}, c = {0};
    struct result r = {0};
    struct bt_etcd *e = connect_to(f, etcd.endpoint, NULL);
    struct bt_etcd_lease *la = bt_etcd_lease_start(e, 60, &lease_ops, &a);
    bt_etcd_lease_start(e, 60, &lease_ops, &b);
    WAIT_FOR(f, a.granted == 1 && b.granted == 1);
    etcd_put(&etcd, "/bye/a", "x", a.id);
    etcd_put(&etcd, "/bye/b", "x", b.id);
    bt_etcd_lease_stop(la);
    bt_etcd_lease_start(e, 60, &lease_ops, &c); /* its grant is on the way */
    bt_etcd_put(e, "/bye/c", "x", 1, 0, on_put, &r);
    bt_etcd_destroy(e);
    assert_int_equal(r.calls, 1);
    assert_int_equal(r.st, BT_ERR_CANCELLED);
    assert_false(etcd_has(&etcd, "/bye/a"));
    assert_false(etcd_has(&etcd, "/bye/b"));
    loop_run_for(f->loop, 100);
    assert_int_equal(c.granted, 0);
}

/* ---- watches ---- */

struct seen {
    int puts, deletes, syncs;
    char log[512]; /* "+key=value " and "-key " */
    struct bt_etcd_watch *stop_at_put;
};

static void seen_put(void *arg, const struct bt_etcd_kv *kv)
{
    struct seen *s = arg;
    size_t n = strlen(s->log);
    s->puts++;
    snprintf(s->log + n, sizeof(s->log) - n, "+%s=%.*s ", kv->key, (int)kv->value_len,
             (const char *)kv->value);
    if (s->stop_at_put != NULL) {
        bt_etcd_watch_stop(s->stop_at_put);
        s->stop_at_put = NULL;
    }
}

static void seen_delete(void *arg, const char *key)
{
    struct seen *s = arg;
    size_t n = strlen(s->log);
    s->deletes++;
    snprintf(s->log + n, sizeof(s->log) - n, "-%s ", key);
}

static void seen_synced(void *arg)
{
    struct seen *s = arg;
    size_t n = strlen(s->log);
    s->syncs++;
    snprintf(s->log + n, sizeof(s->log) - n, "| ");
}

static const struct bt_etcd_watch_ops watch_ops = {seen_put, seen_delete, seen_synced};

static void test_watch(void **state)
{
    struct fixture *f = *state;
    struct seen s = {0}, t = {0};
    put(f, "/w/b", "1");
    put(f, "/w/a", "2");
    put(f, "/w0", "a neighbour");
    struct bt_etcd_watch *w = bt_etcd_watch_start(f->e, "/w/", &watch_ops, &s);
    WAIT_FOR(f, s.syncs == 1);
    put(f, "/w/c", "3");
    put(f, "/w0", "still a neighbour");
    etcd_del(&etcd, "/w/a");
    etcd_del(&etcd, "/w/never-there");
    put(f, "/w/b", "4");
    WAIT_FOR(f, s.puts == 4);
    assert_string_equal(s.log, "+/w/a=2 +/w/b=1 | +/w/c=3 -/w/a +/w/b=4 ");
    bt_etcd_watch_stop(w);
    put(f, "/w/b", "5");
    loop_run_for(f->loop, 100);
    assert_int_equal(s.puts, 4);

    /* stopped from inside a callback, in the listing */
    t.stop_at_put = bt_etcd_watch_start(f->e, "/w/", &watch_ops, &t);
    WAIT_FOR(f, t.puts == 1);
    loop_run_for(f->loop, 100);
    assert_int_equal(t.puts, 1);
    assert_int_equal(t.syncs, 0);
}

/* etcd goes and comes back with its data; while we are away, things change. No key is reported
 * twice, none is missed, and the lease lives on. */
static void test_restart(void **state)
{
    struct fixture *f = *state;
    struct seen s = {0};
    struct leased l = {0};
    struct result r = {0};
    put(f, "/rs/same", "1");
    put(f, "/rs/gone", "1");
    bt_etcd_watch_start(f->e, "/rs/", &watch_ops, &s);
    bt_etcd_lease_start(f->e, 60, &lease_ops, &l);
    WAIT_FOR(f, s.syncs == 1 && l.granted == 1);
    etcd_kill(&etcd);
    bt_etcd_put(f->e, "/rs/x", "x", 1, 0, on_put, &r);
    WAIT_FOR(f, r.calls == 1);
    assert_int_equal(r.st, BT_ERR_UNAVAILABLE);
    loop_run_for(f->loop, 300);
    etcd_start(&etcd);
    etcd_put(&etcd, "/rs/new", "2", 0); /* before our loop turns again */
    etcd_del(&etcd, "/rs/gone");
    WAIT_FOR(f, s.deletes == 1 && s.puts == 3);
    assert_string_equal(s.log, "+/rs/gone=1 +/rs/same=1 | +/rs/new=2 -/rs/gone ");
    put(f, "/rs/new", "3");
    WAIT_FOR(f, s.puts == 4);
    assert_int_equal(l.lost, 0);
    assert_int_equal(l.granted, 1);
}

/* What the watch has missed was compacted away: it lists again and reports what differs. */
static void test_compaction(void **state)
{
    struct fixture *f = *state;
    struct seen s = {0};
    put(f, "/cp/changed", "1");
    put(f, "/cp/gone", "1");
    put(f, "/cp/same", "1");
    bt_etcd_watch_start(f->e, "/cp/", &watch_ops, &s);
    WAIT_FOR(f, s.syncs == 1);
    etcd_kill(&etcd);
    etcd_start(&etcd); /* our loop does not turn from here ... */
    etcd_put(&etcd, "/cp/changed", "2", 0);
    etcd_del(&etcd, "/cp/gone");
    etcd_compact(&etcd, etcd_put(&etcd, "/cp/new", "3", 0)); /* ... to here */
    s.log[0] = '\0';
    WAIT_FOR(f, s.syncs == 2);
    assert_string_equal(s.log, "+/cp/changed=2 +/cp/new=3 -/cp/gone | ");
    put(f, "/cp/same", "4");
    WAIT_FOR(f, strstr(s.log, "+/cp/same=4") != NULL);
}

/* etcd comes back empty: its revisions start anew, below ours. */
static void test_wiped(void **state)
{
    struct fixture *f = *state;
    struct seen s = {0};
    struct leased l = {0};
    for (int i = 0; i < 20; i++) {
        put(f, "/wp/a", "1"); /* revisions that the new etcd will not reach for a while */
    }
    bt_etcd_watch_start(f->e, "/wp/", &watch_ops, &s);
    bt_etcd_lease_start(f->e, 6, &lease_ops, &l);
    WAIT_FOR(f, s.syncs == 1 && l.granted == 1);
    etcd_kill(&etcd);
    etcd_wipe(&etcd);
    etcd_start(&etcd);
    WAIT_FOR(f, s.deletes == 1 && l.granted == 2);
    assert_int_equal(l.lost, 1);
    put(f, "/wp/b", "2");
    WAIT_FOR(f, strstr(s.log, "+/wp/b=2") != NULL);
}

struct ticker {
    struct bt_timer timer;
    int ticks;
};

static void on_tick(void *arg)
{
    ((struct ticker *)arg)->ticks++;
}

/* A stopped etcd: calls end with a timeout, the loop goes on turning, nothing counts as lost. */
static void test_stopped(void **state)
{
    struct fixture *f = *state;
    struct result r = {0};
    struct leased l = {0};
    struct ticker t = {0};
    bt_etcd_lease_start(f->e, 60, &lease_ops, &l);
    WAIT_FOR(f, l.granted == 1);
    bt_timer_start(f->loop, &t.timer, 10, 10, on_tick, &t);
    stop_process(etcd.pid);
    uint64_t start = bt_mono_ns();
    bt_etcd_put(f->e, "/st", "x", 1, 0, on_put, &r);
    WAIT_FOR(f, r.calls == 1);
    uint64_t took_ms = (bt_mono_ns() - start) / 1000000;
    kill(etcd.pid, SIGCONT);
    bt_timer_stop(f->loop, &t.timer);
    assert_int_equal(r.st, BT_ERR_TIMEOUT);
    assert_true(took_ms >= 2900);
    assert_true(t.ticks > 50);
    put(f, "/st", "y");
    assert_int_equal(l.lost, 0);
}

static int start_etcd(void **state)
{
    (void)state;
    etcd_init(&etcd);
    return 0;
}

static int end_etcd(void **state)
{
    (void)state;
    etcd_cleanup(&etcd);
    return 0;
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_put_range_delete),
        T(test_cas),
        T(test_unknown_lease),
        T(test_endpoints),
        T(test_lease_is_kept),
        T(test_lease_lost_and_granted_again),
        T(test_destroy_revokes),
        T(test_what_is_left_of_a_lease),
        T(test_what_is_left_of_a_record),
        T(test_watch),
        T(test_restart),
        T(test_compaction),
        T(test_stopped),
        T(test_wiped),
    };
    return cmocka_run_group_tests_name("etcd", tests, start_etcd, end_etcd);
}
