/* What batonctl asks for: drains that meet others, and one whose mark etcd has not taken yet when
 * the conductor ends. */
#include "tests/unit/conductor_fixture.h"
#include "tests/unit/etcd_fixture.h"

#include "admin.pb-c.h"
#include "common/etcd/roles.h"
#include "conductor/admin.h"
#include "etcd.pb-c.h"
#include "loop_wait.h"
#include "tests/unit/stop_process.h"

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
    struct bt_admin_gate gate = {.server = server};
    struct bt_admin *admin = bt_admin_create(&gate, f.view, f.rs, &conf);
    bt_rpc_server_start(server);
    snprintf(target, sizeof(target), "127.0.0.1:%d", port);
    assert_int_equal(bt_rpc_channel_create(near, target, NULL, &ch), BT_OK);

    stop_process(etcd.pid);
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
    assert_non_null(strstr(a.why, "etcd did not accept the change of node n1"));

    bt_rpc_channel_destroy(ch);
    bt_rpc_server_destroy(server);
    bt_admin_destroy(admin);
    bt_rpc_destroy(near);
    bt_rpc_destroy(far);
    fixture_cleanup(&f);
    etcd_cleanup(&etcd);
}

/* ---- a drain that comes second ---- */

#define TURN "/baton/test/drain/"
#define MARK "/baton/test/drain/n2" /* of another conductor */

struct far_etcd { /* in which the other conductor's drain has come just before ours */
    struct bt_rpc *rpc;
    struct bt_rpc_server *server;
    int64_t turn;        /* revision of the turn's key */
    bool damaged;        /* the role table is */
    uint32_t txns, took; /* asked for, and done */
    char compared[64];   /* keys of the last one, by their last letters */
};

static void far_range(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct far_etcd *e = arg;
    Etcdserverpb__RangeRequest *q = etcdserverpb__range_request__unpack(NULL, len, data);
    assert_non_null(q);
    Etcdserverpb__RangeResponse m = ETCDSERVERPB__RANGE_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = ETCDSERVERPB__RESPONSE_HEADER__INIT;
    Etcdserverpb__KeyValue kv[2], *list[2] = {&kv[0], &kv[1]};
    static const char *const keys[] = {TURN, MARK};
    bool marks = q->key.len >= strlen(TURN) && memcmp(q->key.data, TURN, strlen(TURN)) == 0;
    char *roles = bt_roles_key("test");
    bool of_roles = q->key.len == strlen(roles) && memcmp(q->key.data, roles, q->key.len) == 0;
    for (int i = 0; i < 2; i++) {
        etcdserverpb__key_value__init(&kv[i]);
        const char *key = of_roles ? roles : keys[i];
        kv[i].key = (ProtobufCBinaryData){.data = (uint8_t *)(uintptr_t)key, .len = strlen(key)};
        kv[i].value = (ProtobufCBinaryData){.data = (uint8_t *)(uintptr_t) "\xff", .len = 1};
        kv[i].mod_revision = e->turn;
    }
    m.header = &h;
    m.kvs = list;
    m.n_kvs = marks && e->turn != 0 ? 2 : of_roles && e->damaged ? 1 : 0;
    bt_rpc_call_reply_pb(call, &m.base);
    free(roles);
    etcdserverpb__range_request__free_unpacked(q, NULL);
}

static void far_txn(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct far_etcd *e = arg;
    Etcdserverpb__TxnRequest *q = etcdserverpb__txn_request__unpack(NULL, len, data);
    assert_non_null(q);
    Etcdserverpb__TxnResponse m = ETCDSERVERPB__TXN_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = ETCDSERVERPB__RESPONSE_HEADER__INIT;
    e->turn = e->txns++ == 0 ? 7 : e->turn; /* since we have looked */
    e->compared[0] = '\0';
    m.header = &h;
    m.succeeded = true;
    for (size_t i = 0; i < q->n_compare; i++) {
        const Etcdserverpb__Compare *c = q->compare[i];
        bool turn = c->key.len == strlen(TURN) && memcmp(c->key.data, TURN, c->key.len) == 0;
        m.succeeded = m.succeeded && (!turn || c->mod_revision == e->turn);
        strcat(e->compared, turn ? "turn " : "other ");
    }
    e->took += m.succeeded;
    bt_rpc_call_reply_pb(call, &m.base);
    etcdserverpb__txn_request__free_unpacked(q, NULL);
}

static void far_start(struct far_etcd *e, struct fixture *f)
{
    int port;
    char endpoint[32], *endpoints[] = {endpoint, NULL};
    memset(e, 0, sizeof(*e));
    assert_int_equal(bt_rpc_create(f->loop, &e->rpc), BT_OK);
    assert_int_equal(bt_rpc_server_create(e->rpc, "127.0.0.1:0", &e->server, &port), BT_OK);
    bt_rpc_server_unary(e->server, "/etcdserverpb.KV/Range", NULL, far_range, e);
    bt_rpc_server_unary(e->server, "/etcdserverpb.KV/Txn", NULL, far_txn, e);
    bt_rpc_server_start(e->server);
    snprintf(endpoint, sizeof(endpoint), "127.0.0.1:%d", port);
    assert_int_equal(bt_etcd_create(f->rpc, endpoints, NULL, &f->etcd), BT_OK);
    bt_view_watch(f->view, f->etcd);
}

struct drained {
    int calls;
    bt_status_t st;
};

static void on_drained(void *arg, bt_status_t st, const char *why)
{
    struct drained *d = arg;
    (void)why;
    d->calls++;
    d->st = st;
}

/* Force means that nobody asks who would be left. That another conductor drains at the same time is
 * noticed all the same, and a role table that nobody can read is no obstacle. */
static void a_forced_drain_comes_behind_the_other(void **state)
{
    (void)state;
    for (int force = 0; force < 2; force++) {
        struct fixture f;
        struct far_etcd e;
        struct drained d = {0};
        fixture_init(&f);
        fixture_start(&f);
        far_start(&e, &f);
        e.damaged = force;
        pass(&f, 200); /* it has listed what there is */
        bt_view_drain(f.view, "n1", force, on_drained, &d);
        until(&f, d.calls == 1);
        assert_int_equal(d.st, BT_OK);
        assert_int_equal(e.txns, 2);
        assert_int_equal(e.took, 1);
        assert_string_equal(e.compared, force ? "turn " : "turn other ");
        assert_true(bt_view_node_draining(f.view, "n1") && bt_view_node_draining(f.view, "n2"));
        bt_requests_destroy(f.rs);
        bt_view_destroy(f.view);
        bt_etcd_destroy(f.etcd);
        f.rs = NULL;
        f.view = NULL;
        f.etcd = NULL;
        bt_rpc_server_destroy(e.server);
        bt_rpc_destroy(e.rpc);
        fixture_cleanup(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_drain_under_way_outlives_the_view),
        cmocka_unit_test(a_forced_drain_comes_behind_the_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
