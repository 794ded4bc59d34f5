/* Owning a job, against a real etcd: one at a time, handed over when it ends or its lease does,
 * each owner with a higher epoch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>

#include "common/etcd/owner.h"
#include "tests/unit/etcd_fixture.h"
#include "tests/unit/loop_wait.h"

#define KEY "/baton/test/jobs/one"

static struct etcd_fixture etcd;

struct one {
    struct bt_owner *o;
    int owned, lost;
    int64_t epoch; /* 0: not the owner */
};

static void on_owner(void *arg, int64_t epoch)
{
    struct one *x = arg;
    x->owned++;
    x->epoch = epoch;
}

static void on_lost(void *arg)
{
    struct one *x = arg;
    x->lost++;
    x->epoch = 0;
}

static const struct bt_owner_ops ops = {.on_owner = on_owner, .on_lost = on_lost};

static struct bt_loop *loop;
static struct bt_rpc *rpc;
static struct bt_etcd *e;
static struct one x[3];

static void candidate(int i)
{
    char name[16];
    snprintf(name, sizeof(name), "c%d", i);
    x[i] = (struct one){0};
    x[i].o = bt_owner_start(e, KEY, name, 2, &ops, &x[i]);
}

static int three_candidates(void **state)
{
    (void)state;
    char *const eps[] = {etcd.endpoint, NULL};
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    assert_int_equal(bt_rpc_create(loop, &rpc), BT_OK);
    assert_int_equal(bt_etcd_create(rpc, eps, NULL, &e), BT_OK);
    for (int i = 0; i < 3; i++) {
        candidate(i);
    }
    return 0;
}

static int nobody_left(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        bt_owner_stop(x[i].o);
    }
    bt_etcd_destroy(e);
    assert_false(etcd_has(&etcd, KEY));
    bt_rpc_destroy(rpc);
    bt_loop_destroy(loop);
    return 0;
}

/* The one who leaves is a candidate again at once: others' tries, their answers and what the watch
 * tells them meet in every order, and the job never stays without an owner. */
static void test_many_hands(void **state)
{
    (void)state;
    int64_t last = 0;
    for (int round = 0; round < 40; round++) {
        LOOP_UNTIL(loop, x[0].epoch + x[1].epoch + x[2].epoch != 0);
        int a = x[0].epoch != 0 ? 0 : x[1].epoch != 0 ? 1 : 2;
        assert_true(x[a].epoch > last);
        last = x[a].epoch;
        bt_owner_stop(x[a].o);
        candidate(a);
    }
}

static void test_one_at_a_time(void **state)
{
    (void)state;
    LOOP_UNTIL(loop, x[0].epoch + x[1].epoch + x[2].epoch != 0);
    int a = x[0].epoch != 0 ? 0 : x[1].epoch != 0 ? 1 : 2;
    int64_t first = x[a].epoch;
    /* It leaves in order. */
    bt_owner_stop(x[a].o);
    x[a].o = NULL;
    x[a].epoch = 0;
    LOOP_UNTIL(loop, x[0].epoch + x[1].epoch + x[2].epoch != 0);
    int b = x[0].epoch != 0 ? 0 : x[1].epoch != 0 ? 1 : 2;
    int64_t second = x[b].epoch;
    assert_int_not_equal(a, b);
    assert_true(second > first);
    /* Its lease ends, as a dead process's does: it is told, and somebody owns the job, perhaps it
     * again, in a later epoch. */
    etcd_revoke(&etcd, etcd_lease_of(&etcd, KEY));
    LOOP_UNTIL(loop, x[b].lost == 1);
    LOOP_UNTIL(loop, x[0].epoch + x[1].epoch + x[2].epoch != 0);
    int64_t third = 0;
    int owners = 0;
    for (int i = 0; i < 3; i++) {
        owners += x[i].epoch != 0;
        third = BT_MAX(third, x[i].epoch);
    }
    assert_int_equal(owners, 1);
    assert_true(third > second);
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_one_at_a_time, three_candidates, nobody_left),
        cmocka_unit_test_setup_teardown(test_many_hands, three_candidates, nobody_left),
    };
    return cmocka_run_group_tests(tests, start_etcd, stop_etcd);
}
