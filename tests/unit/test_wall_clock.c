/* A host whose wall clock is set back: gRPC's own timers stand still until it shows the old time
 * again. Calls end at their time all the same, and etcd is found again after it was away. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
/* after those above, as cmocka wants it */
#include <cmocka.h>

#include "common/etcd/etcd.h"
#include "tests/unit/etcd_fixture.h"
#include "tests/unit/loop_wait.h"
#include "tests/unit/stop_process.h"
#include "tests/unit/wall_clock.h"

#define DAY_S 86400

static atomic_llong ahead_s;

static int64_t wall_ahead_s(void)
{
    return atomic_load(&ahead_s);
}

struct fixture {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    assert_int_equal(bt_rpc_create(f->loop, &f->rpc), BT_OK);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    bt_rpc_destroy(f->rpc);
    bt_loop_destroy(f->loop);
    free(f);
    atomic_store(&ahead_s, 0);
    return 0;
}

struct result {
    int calls, code;
    bt_status_t st;
};

static void on_reply(void *arg, int code, const char *detail, const void *data, size_t len)
{
    struct result *r = arg;
    (void)detail;
    (void)data;
    (void)len;
    r->calls++;
    r->code = code;
}

static void on_put(void *arg, bt_status_t st)
{
    struct result *r = arg;
    r->calls++;
    r->st = st;
}

/* The end of one call that lists etcd's first key. */
static int range(struct fixture *f, struct bt_rpc_channel *ch, uint64_t deadline_ms)
{
    struct result r = {0};
    Etcdserverpb__RangeRequest req = ETCDSERVERPB__RANGE_REQUEST__INIT;
    uint8_t buf[32];
    req.key = etcd_text("a");
    size_t len = etcdserverpb__range_request__pack(&req, buf);
    bt_rpc_unary(ch, "/etcdserverpb.KV/Range", buf, len, deadline_ms, on_reply, &r);
    if (deadline_ms > 0) {
        atomic_store(&ahead_s, atomic_load(&ahead_s) - DAY_S); /* gRPC waits by the old time */
    }
    WAIT_FOR(f, r.calls == 1);
    return r.code;
}

static void test_a_call_ends_at_its_time(void **state)
{
    struct fixture *f = *state;
    struct etcd_fixture etcd;
    struct bt_rpc_channel *ch;
    etcd_init(&etcd);
    assert_int_equal(bt_rpc_channel_create(f->rpc, etcd.endpoint, NULL, &ch), BT_OK);
    assert_int_equal(range(f, ch, 0), BT_GRPC_OK);
    stop_process(etcd.pid);
    assert_int_equal(range(f, ch, 300), BT_GRPC_DEADLINE);
    assert_int_equal(range(f, ch, 300), BT_GRPC_DEADLINE);
    bt_rpc_channel_destroy(ch);
    etcd_cleanup(&etcd);
}

static bt_status_t put(struct fixture *f, struct bt_etcd *e)
{
    struct result r = {0};
    bt_etcd_put(e, "/clock", "x", 1, 0, on_put, &r);
    WAIT_FOR(f, r.calls == 1);
    return r.st;
}

static void test_etcd_is_found_again(void **state)
{
    struct fixture *f = *state;
    struct etcd_fixture etcd;
    struct bt_etcd *e;
    etcd_init(&etcd);
    char *const endpoints[] = {etcd.endpoint, NULL};
    assert_int_equal(bt_etcd_create(f->rpc, endpoints, NULL, &e), BT_OK);
    assert_int_equal(put(f, e), BT_OK);
    etcd_kill(&etcd);
    while (put(f, e) != BT_ERR_UNAVAILABLE) {
    }
    atomic_store(&ahead_s, -DAY_S); /* in the pause before gRPC's next attempt to connect */
    etcd_start(&etcd);
    uint64_t end_ns = bt_mono_ns() + 20000000000ull;
    bt_status_t st = put(f, e);
    while (st != BT_OK && bt_mono_ns() < end_ns) {
        usleep(100000);
        st = put(f, e);
    }
    assert_int_equal(st, BT_OK);
    bt_etcd_destroy(e);
    etcd_cleanup(&etcd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_call_ends_at_its_time, setup, teardown),
        cmocka_unit_test_setup_teardown(test_etcd_is_found_again, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
