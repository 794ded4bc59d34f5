/* Calls of the etcd client against answers that a real etcd gives when it is ill, busy or of
 * another mind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "etcd_answers.h"

static void on_range(void *arg, bt_status_t st, const struct bt_etcd_kv *kvs, size_t n,
                     int64_t revision)
{
    struct ea_got *g = arg;
    g->n++;
    g->st = st;
    g->n_kvs = n;
    g->revision = revision;
    for (size_t i = 0; i < n && i < 4; i++) {
        snprintf(g->keys[i], sizeof(g->keys[i]), "%s", kvs[i].key);
    }
}

static void on_cas(void *arg, bt_status_t st, bool succeeded, const struct bt_etcd_kv *cur)
{
    struct ea_got *g = arg;
    g->n++;
    g->st = st;
    g->succeeded = succeeded;
    g->has_current = cur != NULL;
    g->revision = cur != NULL ? cur->mod_revision : -1;
    g->lease = cur != NULL ? cur->lease : -1;
    if (cur != NULL) {
        snprintf(g->keys[0], sizeof(g->keys[0]), "%s", cur->key);
        snprintf(g->value, sizeof(g->value), "%.*s", (int)cur->value_len,
                 cur->value != NULL ? (const char *)cur->value : "");
    }
}

static void on_swap(void *arg, bt_status_t st, bool succeeded)
{
    struct ea_got *g = arg;
    g->n++;
    g->st = st;
    g->succeeded = succeeded;
}

static void test_statuses(void **state)
{
    static const struct {
        int code;
        bt_status_t st;
    } codes[] = {
        {BT_GRPC_CANCELLED, BT_ERR_CANCELLED},     {BT_GRPC_INVALID_ARGUMENT, BT_ERR_INVALID},
        {BT_GRPC_DEADLINE, BT_ERR_TIMEOUT},        {BT_GRPC_NOT_FOUND, BT_ERR_NOT_FOUND},
        {BT_GRPC_EXHAUSTED, BT_ERR_EXHAUSTED},     {BT_GRPC_UNIMPLEMENTED, BT_ERR_UNSUPPORTED},
        {BT_GRPC_UNAVAILABLE, BT_ERR_UNAVAILABLE}, {BT_GRPC_PERMISSION_DENIED, BT_ERR_INTERNAL}};
    (void)state;
    for (uint32_t i = 0; i < BT_ARRAY_LEN(codes); i++) {
        struct ea_got g = {0};
        bt_etcd_put(EA.e, "k", "v", 1, 0, ea_on_put, &g);
        ea_refuse(0, EA_PUT, codes[i].code);
        UNTIL(g.n == 1);
        assert_int_equal(g.st, codes[i].st);
    }
    static struct ea_got g; /* told once more when this function has returned */
    Etcdserverpb__DeleteRangeResponse r = ETCDSERVERPB__DELETE_RANGE_RESPONSE__INIT;
    bt_etcd_delete(EA.e, "k", ea_on_put, &g);
    ea_reply(0, EA_DELETE, &r);
    UNTIL(g.n == 1);
    assert_int_equal(g.st, BT_OK);
    bt_etcd_put(EA.e, "k", "v", 1, 0, NULL, NULL); /* nobody wants to know */
    ea_refuse(0, EA_PUT, BT_GRPC_OK);
    bt_etcd_put(EA.e, "k", "v", 1, 0, ea_on_put, &g); /* pending at the end: told before it */
    UNTIL(EA.ends[0].methods[EA_PUT].n_calls == 1);
}

/* One that is not there is followed by the next one, each once; one that hangs is not. */
static void test_endpoints_in_turn(void **state)
{
    (void)state;
    struct ea_got g = {0};
    bt_etcd_put(EA.e, "k", "v", 1, 0, ea_on_put, &g);
    ea_refuse(0, EA_PUT, BT_GRPC_UNAVAILABLE);
    ea_refuse(1, EA_PUT, BT_GRPC_OK);
    UNTIL(g.n == 1);
    assert_int_equal(g.st, BT_OK);
    bt_etcd_put(EA.e, "k", "v", 1, 0, ea_on_put, &g); /* it stays with the one that answers */
    ea_refuse(1, EA_PUT, BT_GRPC_UNAVAILABLE);
    ea_refuse(0, EA_PUT, BT_GRPC_UNAVAILABLE);
    UNTIL(g.n == 2);
    assert_int_equal(g.st, BT_ERR_UNAVAILABLE);
    assert_int_equal(EA.ends[0].methods[EA_PUT].n_seen, 2);
    assert_int_equal(EA.ends[1].methods[EA_PUT].n_seen, 2);
    bt_etcd_put(EA.e, "k", "v", 1, 0, ea_on_put, &g);
    ea_refuse(1, EA_PUT, BT_GRPC_DEADLINE);
    UNTIL(g.n == 3);
    assert_int_equal(g.st, BT_ERR_TIMEOUT);
    bt_etcd_put(EA.e, "k", "v", 1, 0, ea_on_put, &g); /* ... but the next call goes elsewhere */
    ea_refuse(0, EA_PUT, BT_GRPC_OK);
    UNTIL(g.n == 4);
    assert_int_equal(g.st, BT_OK);
}

static void test_ranges(void **state)
{
    static const struct {
        const char *prefix, *key, *end;
        size_t key_len, end_len;
    } ranges[] = {{"ab", "ab", "ac", 2, 2},
                  {"a\xff\xff", "a\xff\xff", "b", 3, 1},
                  {"", "\0", "\0", 1, 1},
                  {"\xff", "\xff", "\0", 1, 1}};
    (void)state;
    for (uint32_t i = 0; i < BT_ARRAY_LEN(ranges); i++) {
        struct ea_got g = {0};
        struct ea_method *m = &EA.ends[0].methods[EA_RANGE];
        bt_etcd_range_prefix(EA.e, ranges[i].prefix, on_range, &g);
        UNTIL(m->n_calls == 1);
        Etcdserverpb__RangeRequest *q = etcdserverpb__range_request__unpack(NULL, m->len, m->last);
        assert_int_equal(q->key.len, ranges[i].key_len);
        assert_memory_equal(q->key.data, ranges[i].key, q->key.len);
        assert_int_equal(q->range_end.len, ranges[i].end_len);
        assert_memory_equal(q->range_end.data, ranges[i].end, q->range_end.len);
        etcdserverpb__range_request__free_unpacked(q, NULL);
        Etcdserverpb__RangeResponse r = ETCDSERVERPB__RANGE_RESPONSE__INIT;
        Etcdserverpb__ResponseHeader h = header_of(40);
        Etcdserverpb__KeyValue kvs[] = {kv_of("a", "1", 3), kv_of("b", "2", 4), kv_of("c", "3", 5)};
        Etcdserverpb__KeyValue *list[] = {&kvs[0], &kvs[1], &kvs[2]};
        kvs[1].key = (ProtobufCBinaryData){3, (uint8_t *)(uintptr_t) "b\0b"}; /* none of ours */
        r.header = i == 1 ? NULL : &h;
        r.n_kvs = 3;
        r.kvs = list;
        if (i == 2) {
            ea_garbage(0, EA_RANGE);
        } else {
            ea_reply(0, EA_RANGE, &r);
        }
        UNTIL(g.n == 1);
        assert_int_equal(g.st, i == 1 || i == 2 ? BT_ERR_PEER_PROTOCOL : BT_OK);
        assert_int_equal(g.n_kvs, g.st == BT_OK ? 2 : 0);
        assert_true(g.st != BT_OK || (strcmp(g.keys[0], "a") == 0 && strcmp(g.keys[1], "c") == 0));
        assert_true(g.st != BT_OK || g.revision == 40);
    }
}

static void test_compare_and_swap(void **state)
{
    (void)state;
    Etcdserverpb__ResponseHeader h = header_of(50);
    Etcdserverpb__KeyValue kv = kv_of("k", "theirs", 45), *kvs[] = {&kv};
    Etcdserverpb__RangeResponse range = ETCDSERVERPB__RANGE_RESPONSE__INIT;
    Etcdserverpb__PutResponse put = ETCDSERVERPB__PUT_RESPONSE__INIT;
    Etcdserverpb__ResponseOp op = ETCDSERVERPB__RESPONSE_OP__INIT, *ops[] = {&op, &op};
    for (uint32_t i = 0; i < 7; i++) {
        struct ea_got g = {0};
        Etcdserverpb__TxnResponse r = ETCDSERVERPB__TXN_RESPONSE__INIT;
        r.header = i == 5 ? NULL : &h;
        r.succeeded = i == 0 || i == 5;
        r.n_responses = i == 3 ? 2 : i == 6 ? 0 : 1;
        r.responses = ops;
        op.response_case = i == 4 ? ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_PUT
                                  : ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_RANGE;
        if (i == 4) {
            op.response_put = &put;
        } else {
            op.response_range = &range;
        }
        range.n_kvs = i == 2 ? 0 : 1;
        range.kvs = kvs;
        bt_etcd_cas(EA.e, "k", 44, "mine", 4, 0, on_cas, &g);
        ea_reply(0, EA_TXN, &r);
        UNTIL(g.n == 1);
        assert_int_equal(g.st, i < 3 ? BT_OK : BT_ERR_PEER_PROTOCOL);
        assert_int_equal(g.succeeded, i == 0);
        assert_int_equal(g.has_current, i < 3);
        assert_true(i >= 3 || strcmp(g.keys[0], "k") == 0);
        assert_true(i != 0 || g.revision == 50);                    /* what it has become */
        assert_true(i != 1 || (g.revision == 45 && g.lease == 99 && /* what is there */
                               strcmp(g.value, "theirs") == 0));
        assert_true(i != 2 || (g.revision == 0 && g.value[0] == '\0')); /* nothing */
    }
    struct ea_got g = {0};
    bt_etcd_cas(EA.e, "k", 44, "mine", 4, 0, on_cas, &g);
    ea_garbage(0, EA_TXN);
    UNTIL(g.n == 1);
    assert_true(g.st == BT_ERR_PEER_PROTOCOL && !g.succeeded && !g.has_current);
    bt_etcd_cas(EA.e, "k", 44, "mine", 4, 0, on_cas, &g);
    ea_refuse(0, EA_TXN, BT_GRPC_DEADLINE);
    UNTIL(g.n == 2);
    assert_true(g.st == BT_ERR_TIMEOUT && !g.succeeded && !g.has_current);
    static const struct bt_etcd_expect e[] = {{"a", 1}, {"b", 0}};
    static const struct bt_etcd_set s[] = {{"a", "x", 1}};
    for (uint32_t i = 0; i < 4; i++) {
        struct ea_got w = {0};
        Etcdserverpb__TxnResponse r = ETCDSERVERPB__TXN_RESPONSE__INIT;
        struct ea_method *m = &EA.ends[0].methods[EA_TXN];
        r.succeeded = i == 0;
        bt_etcd_swap(EA.e, e, 2, s, 1, on_swap, &w);
        UNTIL(m->n_calls == 1);
        Etcdserverpb__TxnRequest *q = etcdserverpb__txn_request__unpack(NULL, m->len, m->last);
        assert_true(q->n_compare == 2 && q->n_success == 1 && q->n_failure == 0);
        assert_true(q->compare[0]->mod_revision == 1 && q->compare[1]->mod_revision == 0);
        etcdserverpb__txn_request__free_unpacked(q, NULL);
        if (i == 2) {
            ea_garbage(0, EA_TXN);
        } else if (i == 3) {
            ea_refuse(0, EA_TXN, BT_GRPC_UNAVAILABLE);
        } else {
            ea_reply(0, EA_TXN, &r);
        }
        UNTIL(w.n == 1);
        assert_int_equal(w.st, i < 2 ? BT_OK : i == 2 ? BT_ERR_PEER_PROTOCOL : BT_ERR_UNAVAILABLE);
        assert_int_equal(w.succeeded, i == 0);
    }
}

#define T1(f) cmocka_unit_test_setup_teardown(f, ea_one, ea_stop)
#define T2(f) cmocka_unit_test_setup_teardown(f, ea_two, ea_stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T1(test_statuses),
        T2(test_endpoints_in_turn),
        T1(test_ranges),
        T1(test_compare_and_swap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
