/* The token journal: order, epochs, duplicates, the window of tokens that came too early. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "conductor/request/journal.h"

static bt_status_t put(struct bt_journal *j, uint32_t epoch, uint32_t offset, uint32_t token)
{
    struct bt_journal_entry e = {.epoch = epoch, .token = token, .logprob = -1.5f};
    return bt_journal_put(j, offset, &e);
}

static void take(struct bt_journal *j, uint32_t token)
{
    const struct bt_journal_entry *e = bt_journal_take(j);
    assert_non_null(e);
    assert_int_equal(e->token, token);
}

static void test_order(void **state)
{
    (void)state;
    struct bt_journal j;
    bt_journal_init(&j);
    assert_int_equal(put(&j, 0, 0, 1), BT_ERR_STALE); /* no plan yet */
    bt_journal_begin(&j, 1);
    assert_null(bt_journal_take(&j));
    assert_int_equal(put(&j, 1, 0, 100), BT_OK);
    take(&j, 100);
    assert_null(bt_journal_take(&j));
    /* The decode worker's tokens overtake the prefill worker's... */
    assert_int_equal(put(&j, 1, 2, 102), BT_OK);
    assert_int_equal(put(&j, 1, 3, 103), BT_OK);
    assert_null(bt_journal_take(&j));
    assert_int_equal(put(&j, 1, 1, 101), BT_OK);
    take(&j, 101);
    take(&j, 102);
    take(&j, 103);
    assert_null(bt_journal_take(&j));
    assert_int_equal(j.n, 4);
    assert_int_equal(j.tokens[2], 102);
    bt_journal_cleanup(&j);
}

static void test_duplicates_and_epochs(void **state)
{
    (void)state;
    struct bt_journal j;
    bt_journal_init(&j);
    bt_journal_begin(&j, 3);
    assert_int_equal(put(&j, 3, 0, 1), BT_OK);
    assert_int_equal(put(&j, 3, 0, 9), BT_ERR_EXISTS); /* still in the window */
    take(&j, 1);
    assert_int_equal(put(&j, 3, 0, 9), BT_ERR_EXISTS); /* given to the client */
    assert_int_equal(put(&j, 2, 1, 9), BT_ERR_STALE);
    assert_int_equal(put(&j, 4, 1, 9), BT_ERR_STALE);
    assert_int_equal(put(&j, 3, 5, 6), BT_OK); /* waits... */
    bt_journal_begin(&j, 4);                   /* ...and is dropped by the next plan */
    assert_int_equal(put(&j, 3, 1, 9), BT_ERR_STALE);
    assert_int_equal(put(&j, 4, 0, 2), BT_OK); /* offsets begin again */
    take(&j, 2);
    assert_null(bt_journal_take(&j));
    assert_int_equal(j.n, 2);
    for (uint32_t i = 1; i < 5; i++) {
        assert_int_equal(put(&j, 4, i, 10 + i), BT_OK);
        take(&j, 10 + i);
    }
    assert_int_equal(j.n, 6);
    assert_int_equal(j.tokens[0], 1);
    assert_int_equal(j.tokens[1], 2);
    assert_int_equal(j.tokens[5], 14);
    bt_journal_cleanup(&j);
}

static void test_window(void **state)
{
    (void)state;
    struct bt_journal j;
    bt_journal_init(&j);
    bt_journal_begin(&j, 1);
    assert_int_equal(put(&j, 1, BT_JOURNAL_WINDOW, 1), BT_ERR_EXHAUSTED);
    assert_int_equal(put(&j, 1, UINT32_MAX, 1), BT_ERR_EXHAUSTED);
    for (uint32_t i = BT_JOURNAL_WINDOW - 1; i > 0; i--) {
        assert_int_equal(put(&j, 1, i, i), BT_OK);
        assert_null(bt_journal_take(&j));
    }
    assert_int_equal(put(&j, 1, 0, 0), BT_OK);
    for (uint32_t i = 0; i < BT_JOURNAL_WINDOW; i++) {
        take(&j, i);
    }
    /* Far beyond the window, one by one. */
    for (uint32_t i = BT_JOURNAL_WINDOW; i < BT_JOURNAL_WINDOW + 1000; i++) {
        assert_int_equal(put(&j, 1, i, i), BT_OK);
        take(&j, i);
    }
    assert_int_equal(j.n, BT_JOURNAL_WINDOW + 1000);
    assert_int_equal(j.tokens[999], 999);
    assert_int_equal(j.tokens[BT_JOURNAL_WINDOW + 999], BT_JOURNAL_WINDOW + 999);
    bt_journal_cleanup(&j);
}

/* The window grows while tokens wait in it, wherever the journal stands. */
static void test_growth(void **state)
{
    (void)state;
    struct bt_journal j;
    bt_journal_init(&j);
    bt_journal_begin(&j, 1);
    uint32_t n = 0;
    for (uint32_t ahead = 1; ahead < 300; ahead += 7) {
        for (uint32_t i = 1; i <= ahead; i++) {
            assert_int_equal(put(&j, 1, n + i, n + i), BT_OK);
        }
        assert_int_equal(put(&j, 1, n + ahead, 0), BT_ERR_EXISTS);
        assert_null(bt_journal_take(&j));
        assert_int_equal(put(&j, 1, n, n), BT_OK);
        for (uint32_t i = 0; i <= ahead; i++) {
            take(&j, n++);
        }
        assert_null(bt_journal_take(&j));
        assert_int_equal(j.waiting, 0);
    }
    bt_journal_cleanup(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_duplicates_and_epochs),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_growth),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
