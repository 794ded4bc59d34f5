/* The role table: who may change it and when, against a real etcd and scripted workers. */
#include "tests/unit/conductor_fixture.h"
#include "tests/unit/etcd_fixture.h"

static struct etcd_fixture etcd;

struct world {
    struct fixture f;
    struct fake *p, *d1, *d2, *k1, *k2;
};

static void world_init(struct world *w)
{
    char *const eps[] = {etcd.endpoint, NULL};
    etcd_del(&etcd, "/baton/test/roles");
    fixture_init(&w->f);
    fixture_start(&w->f);
    assert_int_equal(bt_etcd_create(w->f.rpc, eps, NULL, &w->f.etcd), BT_OK);
    bt_view_watch(w->f.view, w->f.etcd);
    w->k1 = fake_add(&w->f, "kvstore", "k1", "n1");
    w->k2 = fake_add(&w->f, "kvstore", "k2", "n2");
    w->p = fake_add(&w->f, "prefill", "p", "n1");
    w->d1 = fake_add(&w->f, "decode", "d1", "n1");
    w->d2 = fake_add(&w->f, "decode", "d2", "n2");
    until(&w->f,
          fake_up(w->k1) && fake_up(w->k2) && fake_up(w->p) && fake_up(w->d1) && fake_up(w->d2));
}

static void world_cleanup(struct world *w)
{
    fixture_cleanup(&w->f);
}

struct answer {
    int code, calls;
    char why[256];
    uint32_t before, role;
    uint64_t epoch;
};

static void on_done(void *arg, const struct bt_view_role_done *d)
{
    struct answer *a = arg;
    a->calls++;
    a->code = d->code;
    a->before = d->before;
    a->role = d->role;
    a->epoch = d->epoch;
    snprintf(a->why, sizeof(a->why), "%s", d->why != NULL ? d->why : "");
}

static struct answer set(struct world *w, const struct bt_view_role_wish *wish)
{
    struct answer a = {0};
    bt_view_role_set(w->f.view, wish, on_done, &a);
    until(&w->f, a.calls == 1);
    return a;
}

static struct answer command(struct world *w, const char *worker, uint32_t role)
{
    struct bt_view_role_wish wish = {.worker = worker, .role = role, .by = "operator"};
    return set(w, &wish);
}

static struct answer policy(struct world *w, const char *worker, uint32_t role, uint64_t inc,
                            int64_t epoch)
{
    struct bt_view_role_wish wish = {
        .worker = worker, .role = role, .by = "c", .incarnation = inc, .owner_epoch = epoch};
    return set(w, &wish);
}

static uint32_t wanted(struct world *w, struct fake *k)
{
    return bt_view_role_wanted(w->f.view, session_of_fake(k), NULL);
}

static void test_commands(void **state)
{
    (void)state;
    struct world w;
    world_init(&w);
    struct answer a = command(&w, "nobody", BT_ROLES_DECODE);
    assert_int_equal(a.code, BT_GRPC_NOT_FOUND);
    assert_non_null(strstr(a.why, " d1"));
    a = command(&w, "p", BT_ROLES_DECODE);
    assert_int_equal(a.code, BT_GRPC_FAILED_PRECONDITION);
    assert_non_null(strstr(a.why, "p is the last worker for prefill"));
    assert_non_null(strstr(a.why, "--force"));
    a = command(&w, "decode/d1", BT_ROLES_PREFILL);
    assert_int_equal(a.code, BT_GRPC_OK);
    assert_int_equal(a.before, BT_ROLES_DECODE);
    assert_int_equal(a.role, BT_ROLES_PREFILL);
    assert_int_equal(a.epoch, 1);
    until(&w.f, wanted(&w, w.d1) == BT_ROLES_PREFILL);
    /* Again: nothing is written. */
    a = command(&w, "d1", BT_ROLES_PREFILL);
    assert_int_equal(a.code, BT_GRPC_OK);
    assert_int_equal(a.epoch, 1);
    /* What counts is what the others are to do, not what they still say that they do. */
    a = command(&w, "d2", BT_ROLES_PREFILL);
    assert_int_equal(a.code, BT_GRPC_FAILED_PRECONDITION);
    a = command(&w, "p", BT_ROLES_BOTH);
    assert_int_equal(a.code, BT_GRPC_OK);
    until(&w.f, wanted(&w, w.p) == BT_ROLES_BOTH);
    a = command(&w, "d2", BT_ROLES_PREFILL);
    assert_int_equal(a.code, BT_GRPC_OK);
    assert_int_equal(a.epoch, 3);
    a = command(&w, "d1", 0);
    assert_int_equal(a.code, BT_GRPC_OK);
    assert_int_equal(a.role, BT_ROLES_DECODE);
    world_cleanup(&w);
}

static void test_context_and_drain(void **state)
{
    (void)state;
    struct world w;
    world_init(&w);
    w.d1->load.max_model_len = 4096;
    w.d2->load.max_model_len = 1024;
    until(&w.f, session_of_fake(w.d1)->load.max_model_len == 4096 &&
                    session_of_fake(w.d2)->load.max_model_len == 1024);
    struct answer a = command(&w, "d1", BT_ROLES_PREFILL);
    assert_int_equal(a.code, BT_GRPC_FAILED_PRECONDITION);
    assert_non_null(strstr(a.why, "up to 4096 tokens"));
    assert_int_equal(command(&w, "d2", BT_ROLES_PREFILL).code, BT_GRPC_OK);
    assert_int_equal(command(&w, "d2", 0).code, BT_GRPC_OK);
    bt_view_node_set(w.f.view, "n2", true);
    a = command(&w, "d2", BT_ROLES_PREFILL);
    assert_int_equal(a.code, BT_GRPC_FAILED_PRECONDITION);
    assert_non_null(strstr(a.why, "batonctl undrain n2"));
    world_cleanup(&w);
}

/* The policy's writes: for one process, never over an operator's, never of an owner that has been
 * replaced. */
static void test_fencing(void **state)
{
    (void)state;
    struct world w;
    world_init(&w);
    struct answer a = policy(&w, "d1", BT_ROLES_PREFILL, 4711, 10);
    assert_int_equal(a.code, BT_GRPC_FAILED_PRECONDITION);
    assert_non_null(strstr(a.why, "has restarted"));
    assert_int_equal(policy(&w, "d1", BT_ROLES_PREFILL, w.d1->incarnation, 10).code, BT_GRPC_OK);
    until(&w.f, wanted(&w, w.d1) == BT_ROLES_PREFILL);
    assert_int_equal(policy(&w, "d1", 0, w.d1->incarnation, 9).code, BT_GRPC_FAILED_PRECONDITION);
    assert_int_equal(policy(&w, "d1", 0, w.d1->incarnation, 11).code, BT_GRPC_OK);
    assert_int_equal(policy(&w, "d1", BT_ROLES_BOTH, w.d1->incarnation, 10).code,
                     BT_GRPC_FAILED_PRECONDITION);
    assert_int_equal(command(&w, "d1", BT_ROLES_BOTH).code, BT_GRPC_OK);
    a = policy(&w, "d1", BT_ROLES_PREFILL, w.d1->incarnation, 12);
    assert_int_equal(a.code, BT_GRPC_FAILED_PRECONDITION);
    assert_non_null(strstr(a.why, "an operator has chosen"));
    /* A process that the policy meant is no more: its successor does what it was started for. */
    until(&w.f, wanted(&w, w.d1) == BT_ROLES_BOTH);
    assert_int_equal(command(&w, "d1", 0).code, BT_GRPC_OK);
    until(&w.f, wanted(&w, w.d1) != BT_ROLES_BOTH); /* the watch brings what the answer has told */
    assert_int_equal(policy(&w, "d1", BT_ROLES_PREFILL, w.d1->incarnation, 12).code, BT_GRPC_OK);
    until(&w.f, wanted(&w, w.d1) == BT_ROLES_PREFILL);
    w.d1->incarnation++;
    w.d1->hello_incarnation++;
    fake_register(w.d1, BATON__MEMBER_STATE__READY);
    assert_int_equal(wanted(&w, w.d1), BT_ROLES_DECODE);
    world_cleanup(&w);
}

/* Another conductor changes the table at the same time: each change is checked against what the
 * other has made of it. */
static void test_races(void **state)
{
    (void)state;
    struct world w;
    world_init(&w);
    struct answer a = {0}, b = {0};
    struct bt_view_role_wish one = {.worker = "d1", .role = BT_ROLES_PREFILL, .by = "operator"};
    struct bt_view_role_wish two = {.worker = "d2", .role = BT_ROLES_PREFILL, .by = "operator"};
    bt_view_role_set(w.f.view, &one, on_done, &a);
    bt_view_role_set(w.f.view, &two, on_done, &b);
    until(&w.f, a.calls == 1 && b.calls == 1);
    assert_true((a.code == BT_GRPC_OK) != (b.code == BT_GRPC_OK));
    assert_non_null(strstr(a.code == BT_GRPC_OK ? b.why : a.why, "is the last worker for decode"));
    world_cleanup(&w);
}

/* What a session offers while its worker changes. */
static void test_member(void **state)
{
    (void)state;
    struct world w;
    world_init(&w);
    struct bt_session *s = session_of_fake(w.d1);
    Baton__Member m = *s->member;
    m.role_epoch = 1;
    m.next_role = BT_ROLES_PREFILL;
    m.role = 0;
    bt_view_member_up(w.f.view, &m);
    s = session_of_fake(w.d1);
    assert_false(s->prefill || s->decode);
    uint64_t now = bt_mono_ns();
    struct bt_peer_facts facts;
    bt_session_facts(s, &facts);
    assert_true(facts.gives_up_decode && !facts.gives_up_prefill);
    assert_true(facts.gives_up_ns <= now && now - facts.gives_up_ns < 1000000000);
    struct bt_view_snapshot v;
    bt_view_snapshot(w.f.view, NULL, 0, &v);
    for (uint32_t i = 0; i < v.snap.n_workers; i++) {
        if (v.worker[i] == &s->peer) {
            assert_false(v.workers[i].prefill || v.workers[i].decode);
        }
    }
    m = *s->member;
    m.next_role = 0;
    m.role = BT_ROLES_PREFILL;
    bt_view_member_up(w.f.view, &m);
    s = session_of_fake(w.d1);
    assert_true(s->prefill && !s->decode);
    bt_session_facts(s, &facts);
    assert_false(facts.gives_up_prefill || facts.gives_up_decode);
    world_cleanup(&w);
}

static int start_etcd(void **state)
{
    (void)state;
    etcd_init(&etcd);
    return 0;
}

static int stop_etcd(void **state)
{
    (void)state;
    etcd_cleanup(&etcd);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_commands),
                                       cmocka_unit_test(test_context_and_drain),
                                       cmocka_unit_test(test_fencing), cmocka_unit_test(test_races),
                                       cmocka_unit_test(test_member)};
    return cmocka_run_group_tests(tests, start_etcd, stop_etcd);
}
