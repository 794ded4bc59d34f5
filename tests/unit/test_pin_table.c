/* What a conductor does with pins when etcd goes between two of its answers. etcd here is a gRPC
 * server of the test's own that answers what it is told to: a real one cannot be made to take a
 * write and keep silent about it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/rpc/pb.h"
#include "conductor/pin_table.h"
#include "etcd.pb-c.h"
#include "loop_wait.h"

#define OLD_LEASE 11
#define NEW_LEASE 12

struct fix {
    struct bt_loop *loop;
    struct bt_rpc *rpc, *far;
    struct bt_rpc_server *server;
    struct bt_etcd *etcd;
    struct bt_pin_table *pins;
    struct bt_kv_key key;
    Baton__Pin record; /* what etcd has from the start */
    const char *name;  /* ... under this key; NULL: nothing */
    int put_code;      /* what a write is answered with */
    bool silent;       /* it is not answered */
    struct bt_rpc_call *unanswered;
    int64_t revoked;
    uint32_t puts, listings, done;
    bt_status_t last;
    char why[256];
};

static void on_range(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct fix *f = arg;
    Etcdserverpb__RangeResponse m = ETCDSERVERPB__RANGE_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = ETCDSERVERPB__RESPONSE_HEADER__INIT;
    Etcdserverpb__KeyValue kv = ETCDSERVERPB__KEY_VALUE__INIT, *list = &kv;
    char key[64];
    uint8_t value[256];
    (void)data;
    (void)len;
    f->listings++;
    m.header = &h;
    if (f->name != NULL) {
        size_t n = (size_t)snprintf(key, sizeof(key), "/baton/t/pins/%s", f->name);
        kv.key = (ProtobufCBinaryData){.data = (uint8_t *)key, .len = n};
        kv.value = (ProtobufCBinaryData){.data = value, .len = baton__pin__pack(&f->record, value)};
        kv.lease = OLD_LEASE;
        m.kvs = &list;
        m.n_kvs = 1;
    }
    bt_rpc_call_reply_pb(call, &m.base);
}

static void on_grant(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    Etcdserverpb__LeaseGrantResponse m = ETCDSERVERPB__LEASE_GRANT_RESPONSE__INIT;
    (void)arg;
    (void)data;
    (void)len;
    m.id = NEW_LEASE;
    m.ttl = 3600;
    bt_rpc_call_reply_pb(call, &m.base);
}

static void on_write(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct fix *f = arg;
    (void)data;
    (void)len;
    f->puts++;
    if (f->silent) {
        f->unanswered = call;
        return;
    }
    bt_rpc_call_reply(call, f->put_code, "as the test says", NULL, 0);
}

static void on_revoke(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct fix *f = arg;
    Etcdserverpb__LeaseRevokeRequest *q =
        etcdserverpb__lease_revoke_request__unpack(NULL, len, data);
    assert_non_null(q);
    f->revoked = q->id;
    etcdserverpb__lease_revoke_request__free_unpacked(q, NULL);
    bt_rpc_call_reply(call, BT_GRPC_OK, "", NULL, 0);
}

#define ID   0x0102030405060708ull /* of the key below */
#define NAME "0102030405060708"

static void prepare(struct fix *f, const char *name)
{
    memset(f, 0, sizeof(*f));
    for (uint8_t i = 0; i < sizeof(f->key.b); i++) {
        f->key.b[i] = (uint8_t)(i + 1);
    }
    baton__pin__init(&f->record);
    f->record.id = ID;
    f->record.created_ns = bt_real_ns();
    f->record.expires_ns = bt_real_ns() + 3600ull * 1000000000;
    f->record.ttl_ms = 3600000;
    f->record.keys = (ProtobufCBinaryData){.data = f->key.b, .len = sizeof(f->key)};
    f->name = name;
}

static void start_prepared(struct fix *f)
{
    int port;
    char endpoint[32], *endpoints[] = {endpoint, NULL};
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    assert_int_equal(bt_rpc_create(f->loop, &f->far), BT_OK);
    assert_int_equal(bt_rpc_server_create(f->far, "127.0.0.1:0", &f->server, &port), BT_OK);
    bt_rpc_server_unary(f->server, "/etcdserverpb.KV/Range", NULL, on_range, f);
    bt_rpc_server_unary(f->server, "/etcdserverpb.KV/Put", NULL, on_write, f);
    bt_rpc_server_unary(f->server, "/etcdserverpb.KV/DeleteRange", NULL, on_write, f);
    bt_rpc_server_unary(f->server, "/etcdserverpb.Lease/LeaseGrant", NULL, on_grant, f);
    bt_rpc_server_unary(f->server, "/etcdserverpb.Lease/LeaseRevoke", NULL, on_revoke, f);
    bt_rpc_server_start(f->server);
    snprintf(endpoint, sizeof(endpoint), "127.0.0.1:%d", port);
    assert_int_equal(bt_rpc_create(f->loop, &f->rpc), BT_OK);
    assert_int_equal(bt_etcd_create(f->rpc, endpoints, NULL, &f->etcd), BT_OK);
    f->pins = bt_pin_table_create(f->etcd, "t");
    WAIT_FOR(f, f->listings > 0);
    loop_run_for(f->loop, 200);
}

static void start(struct fix *f, bool has_record)
{
    prepare(f, has_record ? NAME : NULL);
    start_prepared(f);
}

static void stop(struct fix *f)
{
    bt_pin_table_destroy(f->pins);
    bt_etcd_destroy(f->etcd);
    bt_rpc_destroy(f->rpc);
    bt_rpc_server_destroy(f->server);
    bt_rpc_destroy(f->far);
    bt_loop_destroy(f->loop);
}

static void on_done(void *arg, bt_status_t st, const struct bt_pin_info *x, const char *why)
{
    struct fix *f = arg;
    assert_true((st == BT_OK) == (x != NULL));
    f->done++;
    f->last = st;
    snprintf(f->why, sizeof(f->why), "%s", why != NULL ? why : "");
}

static void pin(struct fix *f, int code)
{
    struct bt_pin_spec s = {
        .keys = &f->key, .n = 1, .tokens = 16, .ttl_ms = 7200000, .label = "", .tenant = ""};
    uint32_t before = f->done;
    f->put_code = code;
    f->revoked = 0;
    bt_pin_table_pin(f->pins, &s, on_done, f);
    WAIT_FOR(f, f->done == before + 1);
    loop_run_for(f->loop, 300); /* a revocation would come */
}

static void a_new_pin_that_nobody_knows_of_is_taken_back(void **state)
{
    struct fix f;
    (void)state;
    start(&f, false);
    pin(&f, BT_GRPC_UNAVAILABLE);
    assert_int_equal(f.last, BT_ERR_UNAVAILABLE);
    assert_int_equal(f.revoked, NEW_LEASE);
    assert_non_null(strstr(f.why, "may or may not be stored"));
    pin(&f, BT_GRPC_EXHAUSTED);
    assert_int_equal(f.revoked, NEW_LEASE);
    assert_non_null(strstr(f.why, "nothing has changed"));
    stop(&f);
}

/* etcd may hold the pin under the new lease by now: to end that would end the pin. */
static void a_renewal_that_nobody_knows_of_ends_no_pin(void **state)
{
    struct fix f;
    (void)state;
    start(&f, true);
    pin(&f, BT_GRPC_UNAVAILABLE);
    assert_int_equal(f.last, BT_ERR_UNAVAILABLE);
    assert_int_equal(f.puts, 1);
    assert_int_equal(f.revoked, 0);
    assert_non_null(strstr(f.why, "may or may not be stored"));
    pin(&f, BT_GRPC_EXHAUSTED); /* refused: the old record stands under the old lease */
    assert_int_equal(f.revoked, NEW_LEASE);
    stop(&f);
}

static void an_unpin_says_what_it_does_not_know(void **state)
{
    struct fix f;
    (void)state;
    start(&f, true);
    f.put_code = BT_GRPC_UNAVAILABLE;
    bt_pin_table_unpin(f.pins, f.record.id, on_done, &f);
    WAIT_FOR(&f, f.done == 1);
    assert_int_equal(f.last, BT_ERR_UNAVAILABLE);
    assert_non_null(strstr(f.why, "may or may not be stored"));
    size_t it = 0;
    struct bt_pin_info x;
    assert_true(bt_pin_table_next(f.pins, &it, &x)); /* what etcd has said last */
    stop(&f);
}

/* Entries that somebody else wrote, or that are damaged: none is listed under a name that is not
 * its own, where unpinning it would end another pin and not it. */
static void strange_entries_are_not_listed(void **state)
{
    static const struct {
        const char *name, *label;
        uint64_t id;
        int cut; /* bytes of the block's key that are others */
        bool listed;
    } rows[] = {{NAME, "all is well", ID, 0, true},
                {"0102030405060709", "", ID, 0, false},
                {NAME, "", ID + 1, 0, false},
                {"0102030405060709", "", ID + 1, 0, false},
                {NAME, "", ID, 1, false},
                {"102030405060708", "", ID, 0, false},
                {"0x02030405060708", "", ID, 0, false},
                {NAME "0", "", ID, 0, false},
                {NAME, "\033[2J", ID, 0, false}};
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        struct fix f;
        struct bt_pin_info x;
        size_t it = 0;
        prepare(&f, rows[i].name);
        f.record.id = rows[i].id;
        f.record.label = (char *)rows[i].label;
        for (int c = 0; c < rows[i].cut; c++) {
            f.key.b[c] ^= 0x40;
        }
        start_prepared(&f);
        assert_int_equal(bt_pin_table_next(f.pins, &it, &x), rows[i].listed);
        stop(&f);
    }
}

/* A conductor that ends while a pin is under way: the table goes before etcd's client, which then
 * ends its calls. */
static void a_pin_under_way_outlives_the_table(void **state)
{
    struct fix f;
    (void)state;
    start(&f, false);
    struct bt_pin_spec s = {
        .keys = &f.key, .n = 1, .tokens = 16, .ttl_ms = 7200000, .label = "", .tenant = ""};
    f.silent = true;
    bt_pin_table_pin(f.pins, &s, on_done, &f);
    WAIT_FOR(&f, f.puts == 1);
    assert_int_equal(f.done, 0);
    bt_pin_table_destroy(f.pins);
    f.pins = NULL;
    bt_etcd_destroy(f.etcd);
    f.etcd = NULL;
    assert_int_equal(f.done, 1);
    assert_int_equal(f.last, BT_ERR_CANCELLED);
    bt_rpc_call_reply(f.unanswered, BT_GRPC_UNAVAILABLE, "too late", NULL, 0);
    stop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_new_pin_that_nobody_knows_of_is_taken_back),
        cmocka_unit_test(a_renewal_that_nobody_knows_of_ends_no_pin),
        cmocka_unit_test(an_unpin_says_what_it_does_not_know),
        cmocka_unit_test(strange_entries_are_not_listed),
        cmocka_unit_test(a_pin_under_way_outlives_the_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
