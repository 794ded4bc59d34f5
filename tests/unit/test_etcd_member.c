/* common/etcd's membership against a real private etcd: joining, settings that differ, names that
 * are taken by the dead and by the living, lost leases, an etcd that goes away. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/etcd/member.h"
#include "common/etcd/process.h"
#include "tests/unit/etcd_fixture.h"
#include "tests/unit/loop_wait.h"
#include "tests/unit/virtual_clock.h"

static struct etcd_fixture etcd;

struct fixture {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
    struct bt_etcd *e;
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    char *const eps[] = {etcd.endpoint, NULL};
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    assert_int_equal(bt_rpc_create(f->loop, &f->rpc), BT_OK);
    assert_int_equal(bt_etcd_create(f->rpc, eps, NULL, &f->e), BT_OK);
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

/* ---- one member ---- */

struct one {
    struct bt_member *m;
    int joined, refused, lost;
    bt_status_t st;
    char why[512];
    bool leave_in_callback;
};

static void leave(struct one *o)
{
    bt_member_leave(o->m);
    o->m = NULL;
}

static void on_joined(void *arg)
{
    struct one *o = arg;
    o->joined++;
    if (o->leave_in_callback) {
        leave(o);
    }
}

static void on_refused(void *arg, bt_status_t st, const char *why)
{
    struct one *o = arg;
    o->refused++;
    o->st = st;
    snprintf(o->why, sizeof(o->why), "%s", why);
    if (o->leave_in_callback) {
        leave(o);
    }
}

static void on_lost(void *arg)
{
    struct one *o = arg;
    o->lost++;
}

static const struct bt_member_ops member_ops = {on_joined, on_refused, on_lost};

static Baton__ClusterSettings settings(void)
{
    static uint8_t root[32] = {1, 2, 3}, salt[32] = {9};
    Baton__ClusterSettings s = BATON__CLUSTER_SETTINGS__INIT;
    s.root_key = (ProtobufCBinaryData){.data = root, .len = 32};
    s.salt_id = (ProtobufCBinaryData){.data = salt, .len = 32};
    s.layout_id = 0x1234;
    s.block_tokens = 16;
    s.flow_chunk_tokens = 64;
    s.model_id = (char *)"model";
    return s;
}

/* who: the process that it says it is; NULL: it does not say. */
static void join_as(struct fixture *f, struct one *o, const char *cluster, const char *name,
                    uint64_t incarnation, const Baton__ClusterSettings *s,
                    const struct bt_process_id *who)
{
    Baton__Member self = BATON__MEMBER__INIT;
    Baton__ClusterSettings def = settings();
    self.kind = (char *)"kvstore";
    self.name = (char *)name;
    self.node = (char *)"n1";
    self.incarnation = incarnation;
    self.pid = 42;
    if (who != NULL) {
        self.pid = who->pid;
        self.boot_id = (char *)who->boot_id;
        self.pid_ns = who->pid_ns;
        self.start_ticks = who->start_ticks;
    }
    self.rpc = (char *)"127.0.0.1:1";
    o->m = bt_member_join(f->e, cluster, &self, s == NULL ? &def : s, &member_ops, o);
}

static void join(struct fixture *f, struct one *o, const char *cluster, const char *name,
                 uint64_t incarnation, const Baton__ClusterSettings *s)
{
    join_as(f, o, cluster, name, incarnation, s, NULL);
}

/* ---- the table ---- */

struct table {
    int ups, downs;
    uint64_t incarnation;
    Baton__MemberState state;
    char log[512];
};

static void on_up(void *arg, const Baton__Member *m)
{
    struct table *t = arg;
    size_t n = strlen(t->log);
    t->ups++;
    t->incarnation = m->incarnation;
    t->state = m->state;
    snprintf(t->log + n, sizeof(t->log) - n, "+%s/%s@%s ", m->kind, m->name, m->rpc);
}

static void on_down(void *arg, const char *kind, const char *name)
{
    struct table *t = arg;
    size_t n = strlen(t->log);
    t->downs++;
    snprintf(t->log + n, sizeof(t->log) - n, "-%s/%s ", kind, name);
}

static const struct bt_member_table_ops table_ops = {on_up, on_down};

/* ---- tests ---- */

static void test_join_state_leave(void **state)
{
    struct fixture *f = *state;
    struct one a = {0}, b = {0};
    struct table all = {0}, conductors = {0};
    struct bt_member_table *w = bt_member_watch(f->e, "c1", NULL, &table_ops, &all);
    struct bt_member_table *v = bt_member_watch(f->e, "c1", "conductor", &table_ops, &conductors);
    join(f, &a, "c1", "kv-1", 11, NULL);
    WAIT_FOR(f, a.joined == 1 && all.ups == 1);
    assert_string_equal(all.log, "+kvstore/kv-1@127.0.0.1:1 ");
    assert_int_equal(all.incarnation, 11);
    assert_int_equal(all.state, BATON__MEMBER_STATE__STARTING);
    bt_member_set_state(a.m, BATON__MEMBER_STATE__READY);
    bt_member_set_state(a.m, BATON__MEMBER_STATE__DRAINING); /* while the first is on its way */
    WAIT_FOR(f, all.state == BATON__MEMBER_STATE__DRAINING);
    assert_true(etcd_lease_of(&etcd, "/baton/c1/members/kvstore/kv-1") != 0);
    join(f, &b, "c1", "kv-2", 12, NULL); /* same settings */
    WAIT_FOR(f, b.joined == 1);
    leave(&a);
    WAIT_FOR(f, all.downs == 1);
    assert_non_null(strstr(all.log, "-kvstore/kv-1"));
    assert_false(etcd_has(&etcd, "/baton/c1/members/kvstore/kv-1"));
    /* values that are no members are left out */
    int ups = all.ups;
    etcd_put(&etcd, "/baton/c1/members/kvstore/kv-3", "\xff\xff", 0);
    etcd_put(&etcd, "/baton/c1/members/kvstore", "", 0);
    etcd_put(&etcd, "/baton/c1/members/kvstore/kv-4", "", 0);
    bt_member_set_state(b.m, BATON__MEMBER_STATE__READY);
    WAIT_FOR(f, all.state == BATON__MEMBER_STATE__READY);
    assert_true(all.ups <= ups + 2); /* kv-2 itself, and its change */
    assert_int_equal(conductors.ups + conductors.downs, 0);
    assert_int_equal(a.joined, 1);
    assert_int_equal(a.refused + a.lost + b.refused + b.lost, 0);
    leave(&b);
    bt_member_unwatch(w);
    bt_member_unwatch(v);
}

static void test_settings_differ(void **state)
{
    struct fixture *f = *state;
    static uint8_t other[32] = {7};
    struct one a = {0};
    join(f, &a, "c2", "kv-1", 21, NULL);
    WAIT_FOR(f, a.joined == 1);
    static const char *const names[] = {"root_key: model weights or settings (model.*, "
                                        "kv.block_tokens, engine.deterministic) differ",
                                        "layout_id", "block_tokens", "flow_chunk_tokens",
                                        "salt_id"};
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        struct one b = {.leave_in_callback = i % 2 == 0};
        Baton__ClusterSettings s = settings();
        switch (i) {
        case 0: s.root_key.data = other; break;
        case 1: s.layout_id++; break;
        case 2: s.block_tokens = 64; break;
        case 3: s.flow_chunk_tokens = 128; break;
        default: s.salt_id.len = 0; break;
        }
        join(f, &b, "c2", "kv-2", 22, &s);
        WAIT_FOR(f, b.refused == 1);
        assert_int_equal(b.st, BT_ERR_MISMATCH);
        assert_non_null(strstr(b.why, names[i]));
        for (size_t j = 0; j < BT_ARRAY_LEN(names); j++) { /* and nothing else is named */
            if (j != i && !(i == 0 && j == 2)) {
                assert_null(strstr(b.why, names[j]));
            }
        }
        assert_int_equal(b.joined, 0);
        leave(&b);
    }
    assert_false(etcd_has(&etcd, "/baton/c2/members/kvstore/kv-2"));
    /* written once: a model_id that differs is no reason, and does not overwrite */
    struct one c = {0};
    Baton__ClusterSettings s = settings();
    s.model_id = (char *)"called otherwise";
    join(f, &c, "c2", "kv-3", 23, &s);
    WAIT_FOR(f, c.joined == 1);
    leave(&c);
    leave(&a);
}

static void test_bad_input(void **state)
{
    struct fixture *f = *state;
    struct one a = {.leave_in_callback = true}, b = {0}, c = {.leave_in_callback = true};
    join(f, &a, "c3", "a/b", 31, NULL);
    assert_int_equal(a.refused, 0); /* never from inside join */
    join(f, &b, "c3", "", 32, NULL);
    WAIT_FOR(f, a.refused == 1 && b.refused == 1);
    assert_int_equal(a.st, BT_ERR_INVALID);
    assert_int_equal(b.st, BT_ERR_INVALID);
    leave(&b);
    etcd_put(&etcd, "/baton/c3/settings", "\xff\xff\xff", 0);
    join(f, &c, "c3", "kv", 33, NULL);
    WAIT_FOR(f, c.refused == 1);
    assert_int_equal(c.st, BT_ERR_MISMATCH);
    assert_non_null(strstr(c.why, "/baton/c3/settings"));
}

/* Writes the kvstore `name` under a member's key ("kvstore/NAME"). */
static void plant_at(const char *cluster, const char *at, const char *name, uint64_t incarnation,
                     int64_t lease)
{
    Baton__Member m = BATON__MEMBER__INIT;
    char key[128];
    uint8_t buf[256];
    m.kind = (char *)"kvstore";
    m.name = (char *)name;
    m.incarnation = incarnation;
    m.rpc = (char *)"127.0.0.1:2";
    Etcdserverpb__PutRequest req = ETCDSERVERPB__PUT_REQUEST__INIT;
    snprintf(key, sizeof(key), "/baton/%s/members/%s", cluster, at);
    req.key = etcd_text(key);
    req.value.len = baton__member__pack(&m, buf);
    req.value.data = buf;
    req.lease = lease;
    Etcdserverpb__PutResponse *r =
        etcd_ask(&etcd, "/etcdserverpb.KV/Put", &req.base, &etcdserverpb__put_response__descriptor);
    assert_non_null(r);
    protobuf_c_message_free_unpacked(&r->base, NULL);
}

/* Writes a member as a process that we do not run would have left it. */
static void plant(const char *cluster, const char *name, uint64_t incarnation, int64_t lease)
{
    char at[64];
    snprintf(at, sizeof(at), "kvstore/%s", name);
    plant_at(cluster, at, name, incarnation, lease);
}

/* A value under the key of another kind or another name is nobody's. */
static void test_values_of_other_keys(void **state)
{
    struct fixture *f = *state;
    struct table t = {0};
    plant_at("c20", "prefill/a", "a", 1, 0);
    plant_at("c20", "kvstore/b", "c", 2, 0);
    struct bt_member_table *table = bt_member_watch(f->e, "c20", NULL, &table_ops, &t);
    plant_at("c20", "kvstore/d", "d", 3, 0);
    WAIT_FOR(f, t.ups > 0 && t.incarnation == 3);
    assert_string_equal(t.log, "+kvstore/d@127.0.0.1:2 ");
    bt_member_unwatch(table);
}

static void test_crashed_predecessor(void **state)
{
    struct fixture *f = *state;
    struct one a = {0};
    struct table t = {0};
    plant("c4", "kv", 40, etcd_grant(&etcd, 5)); /* nobody keeps this lease */
    struct bt_member_table *w = bt_member_watch(f->e, "c4", "kvstore", &table_ops, &t);
    WAIT_FOR(f, t.ups == 1 && t.incarnation == 40);
    join(f, &a, "c4", "kv", 41, NULL);
    loop_run_for(f->loop, 600);
    assert_int_equal(a.joined + a.refused, 0); /* it waits */
    WAIT_FOR(f, a.joined == 1 && t.incarnation == 41);
    assert_string_equal(t.log, "+kvstore/kv@127.0.0.1:2 -kvstore/kv +kvstore/kv@127.0.0.1:1 ");
    leave(&a);
    bt_member_unwatch(w);
}

/* Its process is seen to be dead: nobody waits for its lease, which is even kept alive here. */
static void test_dead_predecessor_of_this_machine(void **state)
{
    struct fixture *f = *state;
    struct one a = {0}, b = {0};
    struct table t = {0};
    struct bt_process_id who;
    pid_t child = fork();
    if (child == 0) {
        for (;;) {
            pause();
        }
    }
    assert_true(bt_process_id((uint32_t)child, &who));
    join_as(f, &a, "c8", "kv", 81, NULL, &who);
    WAIT_FOR(f, a.joined == 1);
    struct bt_member_table *w = bt_member_watch(f->e, "c8", "kvstore", &table_ops, &t);
    WAIT_FOR(f, t.incarnation == 81);
    join(f, &b, "c8", "kv", 82, NULL);
    loop_run_for(f->loop, 600);
    assert_int_equal(b.joined + b.refused, 0); /* alive: it has its name */
    kill(child, SIGKILL);
    WAIT_FOR(f, b.joined == 1 && t.incarnation == 82); /* nobody has waited for the child yet */
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(a.lost, 0);
    leave(&a); /* its lease ends: the key is not its own any more */
    loop_run_for(f->loop, 300);
    assert_int_equal(t.downs, 0);
    assert_true(etcd_has(&etcd, "/baton/c8/members/kvstore/kv"));
    assert_int_equal(b.lost + b.refused, 0);
    leave(&b);
    WAIT_FOR(f, t.downs == 1);
    bt_member_unwatch(w);
}

static bt_process_state_t state_of(const struct bt_process_id *who)
{
    Baton__Member m = BATON__MEMBER__INIT;
    m.pid = who->pid;
    m.boot_id = (char *)who->boot_id;
    m.pid_ns = who->pid_ns;
    m.start_ticks = who->start_ticks;
    return bt_process_state(&m);
}

static void test_what_proves_a_death(void **state)
{
    (void)state;
    struct bt_process_id self, x;
    assert_true(bt_process_id((uint32_t)getpid(), &self));
    assert_int_equal(state_of(&self), BT_PROCESS_ALIVE);
    x = self;
    x.start_ticks--; /* its pid is another process's by now */
    assert_int_equal(state_of(&x), BT_PROCESS_DEAD);
    x = self;
    x.boot_id[0] ^= 1; /* another machine, or this one before it was booted */
    assert_int_equal(state_of(&x), BT_PROCESS_UNKNOWN);
    x = self;
    x.pid_ns++; /* a container's pids are its own */
    assert_int_equal(state_of(&x), BT_PROCESS_UNKNOWN);
    x = self;
    x.boot_id[0] = '\0';
    assert_int_equal(state_of(&x), BT_PROCESS_UNKNOWN);
    pid_t child = fork();
    if (child == 0) {
        _exit(0);
    }
    siginfo_t info;
    assert_int_equal(waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT), 0);
    x = self;
    x.pid = (uint32_t)child;
    assert_int_equal(state_of(&x), BT_PROCESS_DEAD); /* nobody has waited for it yet */
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(state_of(&x), BT_PROCESS_DEAD);
    assert_false(bt_process_id((uint32_t)child, &x));
}

static void test_live_namesake(void **state)
{
    struct fixture *f = *state;
    struct one a = {0}, b = {.leave_in_callback = true};
    struct table t = {0};
    join(f, &a, "c5", "kv", 51, NULL);
    WAIT_FOR(f, a.joined == 1);
    struct bt_member_table *w = bt_member_watch(f->e, "c5", "kvstore", &table_ops, &t);
    join(f, &b, "c5", "kv", 52, NULL);
    uint64_t start = bt_mono_ns();
    PASS_UNTIL(f, b.refused == 1);
    assert_true(bt_mono_ns() - start > BT_MEMBER_LEASE_S * 1000000000ull);
    assert_int_equal(b.st, BT_ERR_EXISTS);
    assert_non_null(strstr(b.why, "kv"));
    loop_run_for(f->loop, 200); /* its going must not take the other's key along */
    assert_int_equal(t.downs, 0);
    assert_int_equal(t.incarnation, 51);
    assert_int_equal(a.lost, 0);
    bt_member_set_state(a.m, BATON__MEMBER_STATE__READY);
    WAIT_FOR(f, t.state == BATON__MEMBER_STATE__READY);
    leave(&a);
    bt_member_unwatch(w);
}

static void test_lease_lost(void **state)
{
    struct fixture *f = *state;
    struct one a = {0};
    struct table t = {0};
    struct bt_member_table *w = bt_member_watch(f->e, "c6", "kvstore", &table_ops, &t);
    join(f, &a, "c6", "kv", 61, NULL);
    WAIT_FOR(f, a.joined == 1 && t.ups == 1);
    bt_member_set_state(a.m, BATON__MEMBER_STATE__READY);
    WAIT_FOR(f, t.ups == 2);
    int64_t first = etcd_lease_of(&etcd, "/baton/c6/members/kvstore/kv");
    etcd_revoke(&etcd, first);
    WAIT_FOR(f, a.lost == 1 && a.joined == 2 && t.ups == 3);
    assert_int_equal(t.downs, 1);
    assert_int_equal(t.incarnation, 61);
    assert_int_equal(t.state, BATON__MEMBER_STATE__READY); /* as it was, not as it began */
    assert_int_equal(a.refused, 0);
    assert_true(etcd_lease_of(&etcd, "/baton/c6/members/kvstore/kv") != first);
    leave(&a);
    bt_member_unwatch(w);
}

static void test_etcd_away(void **state)
{
    struct fixture *f = *state;
    struct one a = {0}, late = {0};
    struct table t = {0};
    struct bt_member_table *w = bt_member_watch(f->e, "c7", "kvstore", &table_ops, &t);
    join(f, &a, "c7", "kv", 71, NULL);
    WAIT_FOR(f, a.joined == 1 && t.ups == 1);
    etcd_kill(&etcd);
    join(f, &late, "c7", "late", 72, NULL);
    bt_member_set_state(a.m, BATON__MEMBER_STATE__READY);
    loop_run_for(f->loop, 1000);
    assert_int_equal(t.downs + a.lost + late.joined + late.refused, 0); /* the last table stands */
    etcd_start(&etcd);
    WAIT_FOR(f, late.joined == 1 && t.ups == 3);
    assert_int_equal(t.downs + a.lost, 0);
    assert_int_equal(a.joined, 1);
    /* leaving while etcd is away does not hang, nor does the end of all (in teardown) */
    leave(&late);
    etcd_kill(&etcd);
    loop_run_for(f->loop, 200);
    leave(&a);
    bt_member_unwatch(w);
    bt_etcd_destroy(f->e);
    f->e = NULL;
    etcd_start(&etcd);
}

/* All of etcd's data are lost: settings and registration are written again. */
static void test_etcd_wiped(void **state)
{
    struct fixture *f = *state;
    struct one a = {0};
    struct table t = {0};
    struct bt_member_table *w = bt_member_watch(f->e, "c8", "kvstore", &table_ops, &t);
    join(f, &a, "c8", "kv", 81, NULL);
    WAIT_FOR(f, a.joined == 1 && t.ups == 1);
    etcd_kill(&etcd);
    etcd_wipe(&etcd);
    etcd_start(&etcd);
    WAIT_FOR(f, a.joined == 2 && a.lost == 1);
    WAIT_FOR(f, t.ups >= 2 && t.incarnation == 81);
    assert_true(etcd_has(&etcd, "/baton/c8/settings"));
    assert_int_equal(a.refused, 0);
    leave(&a);
    bt_member_unwatch(w);
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
        T(test_join_state_leave),
        T(test_settings_differ),
        T(test_bad_input),
        T(test_values_of_other_keys),
        T(test_crashed_predecessor),
        T(test_live_namesake),
        T(test_lease_lost),
        T(test_dead_predecessor_of_this_machine),
        cmocka_unit_test(test_what_proves_a_death),
        T(test_etcd_away),
        T(test_etcd_wiped),
    };
    return cmocka_run_group_tests_name("etcd_member", tests, start_etcd, end_etcd);
}
