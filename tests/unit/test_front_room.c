/* Who may keep how much of answers: keys, addresses, single answers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "conductor/front/front_room.h"

#define MIB   ((size_t)1 << 20)
#define MAX   (64 * MIB)
#define SHARE (MAX / 4)
#define LARGE (4 * MIB)

static struct bt_front_room room;
static struct bt_front_hold holds[256];
static uint32_t n;

static int setup(void **state)
{
    (void)state;
    n = 0;
    bt_front_room_init(&room, MAX);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < n; i++) {
        bt_front_room_give_back(&room, &holds[i]);
    }
    assert_int_equal(room.used, 0);
    bt_front_room_cleanup(&room);
    return 0;
}

static bool take(uint64_t owner, size_t bytes, struct bt_front_error *e)
{
    *e = (struct bt_front_error){0};
    if (!bt_front_room_fits(&room, owner, bytes, e)) {
        return false;
    }
    bt_front_room_take(&room, &holds[n++], owner, bytes);
    return true;
}

static uint32_t take_all(uint64_t owner, size_t bytes, struct bt_front_error *e)
{
    uint32_t taken = 0;
    while (take(owner, bytes, e)) {
        taken++;
    }
    return taken;
}

static void test_addresses_share(void **state)
{
    (void)state;
    struct bt_front_error e;
    uint64_t a = bt_front_room_owner(NULL, "192.0.2.1"), b = bt_front_room_owner(NULL, "192.0.2.2"),
             c = bt_front_room_owner(NULL, "2001:db8::");
    assert_true(a != b && b != c && a == bt_front_room_owner(NULL, "192.0.2.1"));
    assert_true(bt_front_room_owner("192.0.2.1", "192.0.2.2") != a);
    /* Alone it has half; of an eighth of the rest nothing is missing to others. */
    assert_int_equal(take_all(a, LARGE, &e), MAX / 2 / LARGE);
    assert_int_equal(e.http, 503);
    assert_int_equal(e.retry_after_s, 5);
    assert_non_null(strstr(e.message, "your address"));
    assert_non_null(strstr(e.message, "conductor.http.answers_max"));
    assert_false(take(a, 1024, &e)); /* nor a small one */
    /* The next one has what a new large answer may take of all. */
    assert_int_equal(take_all(b, LARGE, &e), MAX / 4 / LARGE);
    assert_int_equal(take_all(c, 64 * 1024, &e), MAX / 8 / (64 * 1024));
    assert_false(take(c, 64 * 1024, &e));
    /* It may not grow beyond its part either, until something of it has been read. */
    assert_false(bt_front_room_grow(&room, &holds[0], LARGE + MIB, &e));
    assert_int_equal(e.http, 503);
}

static void test_given_back(void **state)
{
    (void)state;
    struct bt_front_error e;
    uint64_t a = bt_front_room_owner(NULL, "192.0.2.1");
    assert_int_equal(take_all(a, LARGE, &e), MAX / 2 / LARGE);
    bt_front_room_give_back(&room, &holds[--n]);
    assert_true(take(a, LARGE, &e));
    assert_false(take(a, LARGE, &e));
}

static void test_key_and_answer(void **state)
{
    (void)state;
    struct bt_front_error e;
    uint64_t key = bt_front_room_owner("k", "192.0.2.1"),
             other = bt_front_room_owner("o", "192.0.2.1");
    assert_int_equal(take_all(key, LARGE, &e), SHARE / LARGE);
    assert_int_equal(e.http, 503);
    assert_non_null(strstr(e.message, "your API key"));
    assert_true(take(other, LARGE, &e));
    /* What can never be is told so, and not to come again. */
    assert_false(take(other, SHARE + 1, &e));
    assert_int_equal(e.http, 400);
    assert_int_equal(e.retry_after_s, 0);
    e = (struct bt_front_error){0};
    assert_true(bt_front_room_grow(&room, &holds[n - 1], SHARE - MIB, &e));
    assert_false(bt_front_room_grow(&room, &holds[n - 1], SHARE + 1, &e));
    assert_int_equal(e.http, 400);
    assert_int_equal(e.retry_after_s, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_addresses_share, setup, teardown),
        cmocka_unit_test_setup_teardown(test_given_back, setup, teardown),
        cmocka_unit_test_setup_teardown(test_key_and_answer, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
