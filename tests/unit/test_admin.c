/* What batonctl asked for when the conductor ends: a drain whose mark etcd has not taken yet. */
#include "tests/unit/conductor_fixture.h"
#include "tests/unit/etcd_fixture.h"

#include "admin.pb-c.h"
#include "conductor/admin.h"
#include "loop_wait.h"

struct answer {
    int calls, code;
    char why[256];
};

static void on_answer(void *arg, int code, const char *detail, const void *data, size_t len)
{
    struct answer *a = arg;
    (void)data;
    (void)len;
    a->calls++;
    a->code = code;
    snprintf(a->why, sizeof(a->why), "%s", detail);
}

/* The order is that of conductor/main.c: the view goes before etcd's client, which then ends the
 * call. Under the address sanitizer a look at the view would end the test. */
static void a_drain_under_way_outlives_the_view(void **state)
{
    struct etcd_fixture etcd;
    struct fixture f;
    struct answer a = {0};
    int port;
    char target[32];
    (void)state;
    etcd_init(&etcd);
    char *const eps[] = {etcd.endpoint, NULL};
    fixture_init(&f);
    fixture_start(&f);
    assert_int_equal(bt_etcd_create(f.rpc, eps, NULL, &f.etcd), BT_OK);
    bt_view_watch(f.view, f.etcd);
    struct fake *k = fake_add(&f, "kvstore", "k1", "n1");
    until(&f, fake_up(k));

    struct bt_rpc *far, *near;
    struct bt_rpc_server *server;
    struct bt_rpc_channel *ch;
    assert_int_equal(bt_rpc_create(f.loop, &far), BT_OK);
    assert_int_equal(bt_rpc_create(f.loop, &near), BT_OK);
    assert_int_equal(bt_rpc_server_create(far, "127.0.0.1:0", &server, &port), BT_OK);
    struct bt_admin_config conf = {.cluster = "test", .name = "c", .model_id = "m"};
    struct bt_admin *admin = bt_admin_create(server, f.view, f.rs, &conf);
    bt_rpc_server_start(server);
    snprintf(target, sizeof(target), "127.0.0.1:%d", port);
    assert_int_equal(bt_rpc_channel_create(near, target, NULL, &ch), BT_OK);

    assert_int_equal(kill(etcd.pid, SIGSTOP), 0);
    Baton__AdminDrainRequest q = BATON__ADMIN_DRAIN_REQUEST__INIT;
    uint8_t buf[64];
    q.node = (char *)"n1";
    q.force = true;
    bt_rpc_unary(ch, "/baton.Admin/Drain", buf, baton__admin_drain_request__pack(&q, buf), 30000,
                 on_answer, &a);
    until(&f, bt_view_node_draining(f.view, "n1")); /* marked; the write is under way */
    assert_int_equal(a.calls, 0);

    bt_requests_destroy(f.rs);
    f.rs = NULL;
    bt_admin_leave_view(admin);
    bt_view_destroy(f.view);
    f.view = NULL;
    bt_etcd_destroy(f.etcd);
    f.etcd = NULL;
    WAIT_FOR(&f, a.calls == 1);
    assert_int_equal(a.code, BT_GRPC_FAILED_PRECONDITION);
    assert_non_null(strstr(a.why, "etcd did not take the mark of n1"));

    bt_rpc_channel_destroy(ch);
    bt_rpc_server_destroy(server);
    bt_admin_destroy(admin);
    bt_rpc_destroy(near);
    bt_rpc_destroy(far);
    fixture_cleanup(&f);
    etcd_cleanup(&etcd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_drain_under_way_outlives_the_view)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
