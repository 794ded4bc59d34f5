/* Messages as JSON: the numbers that JSON cannot have, hostile strings, lists, what is absent. */
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
// clang-format on

#include <jansson.h>
#include <math.h>
#include <string.h>

#include "admin.pb-c.h"
#include "common/rpc/pb.h"

static json_t *as_json(const ProtobufCMessage *m)
{
    struct bt_buf out;
    bt_buf_init(&out);
    bt_pb_json(m, &out);
    json_error_t why;
    json_t *j = json_loadb(out.data, out.len, JSON_REJECT_DUPLICATES, &why);
    if (j == NULL) {
        fail_msg("%s: %.*s", why.text, (int)out.len, out.data);
    }
    assert_null(memchr(out.data, '\n', out.len));
    bt_buf_cleanup(&out);
    return j;
}

static void test_member(void **state)
{
    (void)state;
    Baton__Member m = BATON__MEMBER__INIT;
    Baton__AdminNode n = BATON__ADMIN_NODE__INIT, *nodes[] = {&n};
    Baton__AdminStatus s = BATON__ADMIN_STATUS__INIT;
    n.member = &m;
    m.name = (char *)"a\"\\</script>\n\x01\xff\xe2\x80\xa8";
    m.incarnation = UINT64_MAX;
    m.started_ns = UINT64_MAX;
    m.state = BATON__MEMBER_STATE__DRAINING;
    s.nodes = nodes;
    s.n_nodes = 1;
    s.serving = true;
    s.ttft_objective_ms = NAN;
    s.tbt_objective_ms = -INFINITY;
    /* a 64-bit count is a number of JSON, which this parser takes as an error above 2^63 */
    m.started_ns = INT64_MAX;
    json_t *j = as_json(&s.base), *node = json_array_get(json_object_get(j, "nodes"), 0);
    json_t *member = json_object_get(node, "member");
    assert_string_equal(json_string_value(json_object_get(member, "name")),
                        "a\"\\</script>\n\x01\xef\xbf\xbd\xe2\x80\xa8");
    assert_string_equal(json_string_value(json_object_get(member, "incarnation")),
                        "ffffffffffffffff");
    assert_string_equal(json_string_value(json_object_get(member, "state")), "DRAINING");
    assert_true(json_integer_value(json_object_get(member, "started_ns")) == INT64_MAX);
    assert_true(json_is_null(json_object_get(node, "load")));
    assert_true(json_is_null(json_object_get(j, "ttft_objective_ms")));
    assert_true(json_is_null(json_object_get(j, "tbt_objective_ms")));
    assert_true(json_is_true(json_object_get(j, "serving")));
    assert_string_equal(json_string_value(json_object_get(j, "reason")), "");
    json_decref(j);
}

static void test_lists(void **state)
{
    (void)state;
    uint8_t key[] = {0x00, 0xab};
    char *names[] = {(char *)"k1", (char *)""};
    Baton__AdminBlock b = BATON__ADMIN_BLOCK__INIT, *list[] = {&b, &b};
    Baton__AdminBlocks m = BATON__ADMIN_BLOCKS__INIT;
    double cost[] = {0.5, 1e300};
    Baton__StepCost c = BATON__STEP_COST__INIT;
    b.key.data = key;
    b.key.len = sizeof(key);
    b.kvstores = names;
    b.n_kvstores = 2;
    m.list = list;
    m.n_list = 2;
    json_t *j = as_json(&m.base), *one = json_array_get(json_object_get(j, "list"), 1);
    assert_string_equal(json_string_value(json_object_get(one, "key")), "00ab");
    assert_int_equal(json_array_size(json_object_get(one, "kvstores")), 2);
    json_decref(j);
    c.token_ns = cost;
    c.n_token_ns = 2;
    j = as_json(&c.base);
    assert_true(json_real_value(json_array_get(json_object_get(j, "token_ns"), 1)) == 1e300);
    json_decref(j);
}

static void test_one_of(void **state)
{
    (void)state;
    Baton__ToWorker m = BATON__TO_WORKER__INIT; /* a oneof of which nothing is set */
    json_t *j = as_json(&m.base), *v;
    const char *name;
    json_object_foreach(j, name, v)
    {
        assert_true(json_is_null(v));
    }
    json_decref(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_member), cmocka_unit_test(test_lists),
                                       cmocka_unit_test(test_one_of)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
