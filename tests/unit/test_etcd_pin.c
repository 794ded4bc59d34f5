/* Keys of pins in etcd: which ones are read, whatever somebody wrote there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "common/etcd/pin.h"

static void test_keys(void **state)
{
    static const char *const wrong[] = {
        "/baton/c/pins/",
        "/baton/c/pins/00000000000000f",   /* a digit less */
        "/baton/c/pins/00000000000000ff0", /* a digit more */
        "/baton/c/pins/00000000000000FF",
        "/baton/c/pins/000000000000 0ff",
        "/baton/c/pin/00000000000000ff",
        "/baton/d/pins/00000000000000ff",
    };
    (void)state;
    char *prefix = bt_pin_prefix("c");
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        uint64_t id = 7;
        assert_false(bt_pin_key_id(prefix, wrong[i], &id));
        assert_int_equal(id, 7);
    }
    static const uint64_t ids[] = {0, 0xff, UINT64_MAX};
    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++) {
        uint64_t id = 7;
        char *key = bt_pin_key(prefix, ids[i]);
        assert_true(bt_pin_key_id(prefix, key, &id));
        assert_true(id == ids[i]);
        free(key);
    }
    free(prefix);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_keys)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
