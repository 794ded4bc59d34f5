/* proto/etcd.proto against etcd's own definitions: a field number that is off by one would be
 * skipped in silence by the other side. The table was taken from etcdserverpb/rpc.proto and
 * mvccpb/kv.proto of etcd 3.4.23 (Debian's golang-etcd-server-dev). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>
#include <stdbool.h>
#include <string.h>

#include "common/base/base.h"
#include "common/etcd/etcd_priv.h"
#include "etcd.pb-c.h"

static const struct {
    const char *message, *field;
    uint32_t number;
    ProtobufCType type;
    bool repeated;
} etcd_fields[] = {
    {"ResponseHeader", "revision", 3, PROTOBUF_C_TYPE_INT64, false},
    {"ResponseHeader", "raft_term", 4, PROTOBUF_C_TYPE_UINT64, false},
    {"KeyValue", "key", 1, PROTOBUF_C_TYPE_BYTES, false},
    {"KeyValue", "create_revision", 2, PROTOBUF_C_TYPE_INT64, false},
    {"KeyValue", "mod_revision", 3, PROTOBUF_C_TYPE_INT64, false},
    {"KeyValue", "value", 5, PROTOBUF_C_TYPE_BYTES, false},
    {"KeyValue", "lease", 6, PROTOBUF_C_TYPE_INT64, false},
    {"Event", "type", 1, PROTOBUF_C_TYPE_ENUM, false},
    {"Event", "kv", 2, PROTOBUF_C_TYPE_MESSAGE, false},
    {"RangeRequest", "key", 1, PROTOBUF_C_TYPE_BYTES, false},
    {"RangeRequest", "range_end", 2, PROTOBUF_C_TYPE_BYTES, false},
    {"RangeRequest", "limit", 3, PROTOBUF_C_TYPE_INT64, false},
    {"RangeResponse", "header", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"RangeResponse", "kvs", 2, PROTOBUF_C_TYPE_MESSAGE, true},
    {"RangeResponse", "more", 3, PROTOBUF_C_TYPE_BOOL, false},
    {"RangeResponse", "count", 4, PROTOBUF_C_TYPE_INT64, false},
    {"PutRequest", "key", 1, PROTOBUF_C_TYPE_BYTES, false},
    {"PutRequest", "value", 2, PROTOBUF_C_TYPE_BYTES, false},
    {"PutRequest", "lease", 3, PROTOBUF_C_TYPE_INT64, false},
    {"PutResponse", "header", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"DeleteRangeRequest", "key", 1, PROTOBUF_C_TYPE_BYTES, false},
    {"DeleteRangeRequest", "range_end", 2, PROTOBUF_C_TYPE_BYTES, false},
    {"DeleteRangeResponse", "header", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"DeleteRangeResponse", "deleted", 2, PROTOBUF_C_TYPE_INT64, false},
    {"Compare", "result", 1, PROTOBUF_C_TYPE_ENUM, false},
    {"Compare", "target", 2, PROTOBUF_C_TYPE_ENUM, false},
    {"Compare", "key", 3, PROTOBUF_C_TYPE_BYTES, false},
    {"Compare", "mod_revision", 6, PROTOBUF_C_TYPE_INT64, false},
    {"RequestOp", "request_range", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"RequestOp", "request_put", 2, PROTOBUF_C_TYPE_MESSAGE, false},
    {"RequestOp", "request_delete_range", 3, PROTOBUF_C_TYPE_MESSAGE, false},
    {"ResponseOp", "response_range", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"ResponseOp", "response_put", 2, PROTOBUF_C_TYPE_MESSAGE, false},
    {"ResponseOp", "response_delete_range", 3, PROTOBUF_C_TYPE_MESSAGE, false},
    {"TxnRequest", "compare", 1, PROTOBUF_C_TYPE_MESSAGE, true},
    {"TxnRequest", "success", 2, PROTOBUF_C_TYPE_MESSAGE, true},
    {"TxnRequest", "failure", 3, PROTOBUF_C_TYPE_MESSAGE, true},
    {"TxnResponse", "header", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"TxnResponse", "succeeded", 2, PROTOBUF_C_TYPE_BOOL, false},
    {"TxnResponse", "responses", 3, PROTOBUF_C_TYPE_MESSAGE, true},
    {"CompactionRequest", "revision", 1, PROTOBUF_C_TYPE_INT64, false},
    {"CompactionRequest", "physical", 2, PROTOBUF_C_TYPE_BOOL, false},
    {"CompactionResponse", "header", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"WatchRequest", "create_request", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"WatchRequest", "cancel_request", 2, PROTOBUF_C_TYPE_MESSAGE, false},
    {"WatchCreateRequest", "key", 1, PROTOBUF_C_TYPE_BYTES, false},
    {"WatchCreateRequest", "range_end", 2, PROTOBUF_C_TYPE_BYTES, false},
    {"WatchCreateRequest", "start_revision", 3, PROTOBUF_C_TYPE_INT64, false},
    {"WatchCreateRequest", "progress_notify", 4, PROTOBUF_C_TYPE_BOOL, false},
    {"WatchCancelRequest", "watch_id", 1, PROTOBUF_C_TYPE_INT64, false},
    {"WatchResponse", "header", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"WatchResponse", "watch_id", 2, PROTOBUF_C_TYPE_INT64, false},
    {"WatchResponse", "created", 3, PROTOBUF_C_TYPE_BOOL, false},
    {"WatchResponse", "canceled", 4, PROTOBUF_C_TYPE_BOOL, false},
    {"WatchResponse", "compact_revision", 5, PROTOBUF_C_TYPE_INT64, false},
    {"WatchResponse", "cancel_reason", 6, PROTOBUF_C_TYPE_STRING, false},
    {"WatchResponse", "events", 11, PROTOBUF_C_TYPE_MESSAGE, true},
    {"LeaseGrantRequest", "TTL", 1, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseGrantRequest", "ID", 2, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseGrantResponse", "header", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"LeaseGrantResponse", "ID", 2, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseGrantResponse", "TTL", 3, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseGrantResponse", "error", 4, PROTOBUF_C_TYPE_STRING, false},
    {"LeaseRevokeRequest", "ID", 1, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseRevokeResponse", "header", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"LeaseKeepAliveRequest", "ID", 1, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseKeepAliveResponse", "header", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"LeaseKeepAliveResponse", "ID", 2, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseKeepAliveResponse", "TTL", 3, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseTimeToLiveRequest", "ID", 1, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseTimeToLiveResponse", "header", 1, PROTOBUF_C_TYPE_MESSAGE, false},
    {"LeaseTimeToLiveResponse", "ID", 2, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseTimeToLiveResponse", "TTL", 3, PROTOBUF_C_TYPE_INT64, false},
    {"LeaseTimeToLiveResponse", "grantedTTL", 4, PROTOBUF_C_TYPE_INT64, false},
};

static const ProtobufCMessageDescriptor *const messages[] = {
    &etcdserverpb__response_header__descriptor,
    &etcdserverpb__key_value__descriptor,
    &etcdserverpb__event__descriptor,
    &etcdserverpb__range_request__descriptor,
    &etcdserverpb__range_response__descriptor,
    &etcdserverpb__put_request__descriptor,
    &etcdserverpb__put_response__descriptor,
    &etcdserverpb__delete_range_request__descriptor,
    &etcdserverpb__delete_range_response__descriptor,
    &etcdserverpb__compare__descriptor,
    &etcdserverpb__request_op__descriptor,
    &etcdserverpb__response_op__descriptor,
    &etcdserverpb__txn_request__descriptor,
    &etcdserverpb__txn_response__descriptor,
    &etcdserverpb__compaction_request__descriptor,
    &etcdserverpb__compaction_response__descriptor,
    &etcdserverpb__watch_request__descriptor,
    &etcdserverpb__watch_create_request__descriptor,
    &etcdserverpb__watch_cancel_request__descriptor,
    &etcdserverpb__watch_response__descriptor,
    &etcdserverpb__lease_grant_request__descriptor,
    &etcdserverpb__lease_grant_response__descriptor,
    &etcdserverpb__lease_revoke_request__descriptor,
    &etcdserverpb__lease_revoke_response__descriptor,
    &etcdserverpb__lease_keep_alive_request__descriptor,
    &etcdserverpb__lease_keep_alive_response__descriptor,
    &etcdserverpb__lease_time_to_live_request__descriptor,
    &etcdserverpb__lease_time_to_live_response__descriptor,
};

static void test_every_field_is_etcds(void **state)
{
    (void)state;
    size_t seen = 0;
    for (size_t i = 0; i < BT_ARRAY_LEN(messages); i++) {
        const ProtobufCMessageDescriptor *d = messages[i];
        for (unsigned j = 0; j < d->n_fields; j++) {
            const ProtobufCFieldDescriptor *f = &d->fields[j];
            bool found = false;
            for (size_t k = 0; k < BT_ARRAY_LEN(etcd_fields) && !found; k++) {
                if (strcmp(etcd_fields[k].message, d->short_name) == 0 &&
                    strcmp(etcd_fields[k].field, f->name) == 0) {
                    found = true;
                    assert_int_equal(f->id, etcd_fields[k].number);
                    assert_int_equal(f->type, etcd_fields[k].type);
                    assert_int_equal(f->label == PROTOBUF_C_LABEL_REPEATED,
                                     etcd_fields[k].repeated);
                }
            }
            if (!found) {
                fail_msg("%s.%s is not in etcd's table", d->short_name, f->name);
            }
            seen++;
        }
    }
    assert_int_equal(seen, BT_ARRAY_LEN(etcd_fields));
}

static void check_service(const ProtobufCServiceDescriptor *d, const char *name,
                          const char *const *methods, size_t n)
{
    assert_string_equal(d->name, name);
    assert_int_equal(d->n_methods, n);
    for (size_t i = 0; i < n; i++) {
        assert_string_equal(d->methods[i].name, methods[i]);
    }
}

static void test_services(void **state)
{
    static const char *const kv[] = {"Range", "Put", "DeleteRange", "Txn", "Compact"};
    static const char *const watch[] = {"Watch"};
    static const char *const lease[] = {"LeaseGrant", "LeaseRevoke", "LeaseKeepAlive",
                                        "LeaseTimeToLive"};
    (void)state;
    check_service(&etcdserverpb__kv__descriptor, "etcdserverpb.KV", kv, BT_ARRAY_LEN(kv));
    check_service(&etcdserverpb__watch__descriptor, "etcdserverpb.Watch", watch, 1);
    check_service(&etcdserverpb__lease__descriptor, "etcdserverpb.Lease", lease,
                  BT_ARRAY_LEN(lease));
}

static void test_enums(void **state)
{
    (void)state;
    assert_int_equal(ETCDSERVERPB__COMPARE__COMPARE_RESULT__EQUAL, 0);
    assert_int_equal(ETCDSERVERPB__COMPARE__COMPARE_TARGET__MOD, 2);
    assert_int_equal(ETCDSERVERPB__EVENT__EVENT_TYPE__PUT, 0);
    assert_int_equal(ETCDSERVERPB__EVENT__EVENT_TYPE__DELETE, 1);
}

/* What a watch asks for next. An etcd that says the last revision of all has no next one. */
static void test_revisions(void **state)
{
    (void)state;
    assert_int_equal(bt_etcd_after(0), 1);
    assert_int_equal(bt_etcd_after(INT64_MIN), INT64_MIN + 1);
    assert_int_equal(bt_etcd_after(INT64_MAX - 1), INT64_MAX);
    assert_int_equal(bt_etcd_after(INT64_MAX), INT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_field_is_etcds),
        cmocka_unit_test(test_services),
        cmocka_unit_test(test_enums),
        cmocka_unit_test(test_revisions),
    };
    return cmocka_run_group_tests_name("etcd_proto", tests, NULL, NULL);
}
