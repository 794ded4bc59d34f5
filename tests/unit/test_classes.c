/* common/batch/classes: sums by class, with more classes than there are places for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/batch/classes.h"

static uint32_t rnd(uint64_t *x, uint32_t n)
{
    *x = *x * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*x >> 33) % n;
}

static void test_sums(void **state)
{
    (void)state;
    struct bt_classes c = {0};
    bt_classes_join(&c, 3)->queue_ns += 10;
    bt_classes_join(&c, -2)->rows += 4;
    bt_classes_join(&c, 3)->queue_ns += 5;
    assert_int_equal(c.n, 2);
    assert_int_equal(c.of[0].priority, -2);
    assert_true(bt_classes_below(&c, -2).queue_ns == 15);
    assert_int_equal(bt_classes_below(&c, -3).rows, 4);
    assert_true(bt_classes_below(&c, 3).queue_ns == 0);
    bt_classes_at(&c, 3)->queue_ns -= 10;
    bt_classes_leave(&c, 3);
    assert_true(bt_classes_below(&c, 0).queue_ns == 5);
    bt_classes_leave(&c, 3); /* the last one takes what rounding has left with it */
    assert_int_equal(c.n, 1);
    bt_classes_leave(&c, -2);
    assert_int_equal(c.n, 0);
}

/* Of this class and below no more is said than is there: nobody is taken for lower than it is. */
static void check(const struct bt_classes *c, const uint32_t *rows, uint32_t n)
{
    uint32_t all = 0, said_all = 0;
    assert_true(c->n <= BT_CLASSES_MAX);
    for (uint32_t k = 0; k < n; k++) {
        all += rows[k];
    }
    for (uint32_t i = 0; i < c->n; i++) {
        uint32_t there = 0;
        for (uint32_t k = (uint32_t)c->of[i].priority; k < n; k++) {
            there += rows[k];
        }
        assert_true(bt_classes_below(c, c->of[i].priority - 1).rows <= there);
        assert_true(c->of[i].priority <= c->of[i].lowest);
        assert_true(i == 0 || c->of[i - 1].lowest < c->of[i].priority);
        said_all += c->of[i].rows;
    }
    assert_int_equal(said_all, all);
}

static void test_more_than_places(void **state)
{
    (void)state;
    uint64_t x = 15;
    for (int round = 0; round < 200; round++) {
        struct bt_classes c = {0};
        uint32_t rows[40] = {0}, n = 0;
        uint8_t who[120];
        for (uint32_t i = 0; i < BT_ARRAY_LEN(who); i++) {
            if (n > 0 && rnd(&x, 3) == 0) { /* leaves by its own class, wherever it is counted */
                uint32_t k = rnd(&x, n), class = who[k];
                who[k] = who[--n];
                rows[class]--;
                bt_classes_at(&c, (int32_t) class)->rows--;
                bt_classes_leave(&c, (int32_t) class);
            } else {
                who[n] = (uint8_t)rnd(&x, 40);
                rows[who[n]]++;
                bt_classes_join(&c, who[n++])->rows++;
            }
            check(&c, rows, BT_ARRAY_LEN(rows));
        }
        while (n > 0) {
            bt_classes_leave(&c, who[--n]);
        }
        assert_int_equal(c.n, 0);
    }
}

static void fill(struct bt_classes *c)
{
    *c = (struct bt_classes){0};
    for (int32_t i = 0; i < BT_CLASSES_MAX; i++) { /* 0, 10, ... 70 */
        struct bt_class *k = bt_classes_join(c, 10 * i);
        k->queue_ns = 1 << i;
        k->rows = 2u << i;
        k->pages = 3u << i;
        k->waiting = 4u << i;
        k->landing = 5u << i;
    }
    assert_int_equal(c->n, BT_CLASSES_MAX);
}

static void assert_sums(const struct bt_class *k, uint32_t users, uint32_t times)
{
    assert_int_equal(k->users, users);
    assert_true(k->queue_ns == times);
    assert_int_equal(k->rows, 2 * times);
    assert_int_equal(k->pages, 3 * times);
    assert_int_equal(k->waiting, 4 * times);
    assert_int_equal(k->landing, 5 * times);
}

/* One class more than there are places for: where it comes in, and which two become one. */
static void test_the_ninth_class(void **state)
{
    (void)state;
    struct bt_classes c;
    struct bt_class *k, sum;
    fill(&c);
    sum = bt_classes_below(&c, 40);
    assert_sums(&sum, 3, 32 + 64 + 128);
    sum = bt_classes_below(&c, 70);
    assert_sums(&sum, 0, 0);
    k = bt_classes_at(&c, 90); /* below all */
    assert_ptr_equal(k, &c.of[7]);
    assert_int_equal(k->priority, 70);
    assert_int_equal(k->lowest, 90);
    assert_sums(k, 1, 128);
    assert_ptr_equal(bt_classes_at(&c, 80), k); /* which it counts, too */
    assert_ptr_equal(bt_classes_at(&c, 90), k);
    assert_ptr_equal(bt_classes_at(&c, 70), k);
    k = bt_classes_at(&c, 65); /* just above the lowest */
    assert_ptr_equal(k, &c.of[7]);
    assert_int_equal(k->priority, 65);
    assert_int_equal(k->lowest, 90);
    k = bt_classes_at(&c, 25); /* in the middle: the two lowest become one */
    assert_ptr_equal(k, &c.of[3]);
    assert_int_equal(k->priority, 25);
    assert_int_equal(k->lowest, 25);
    assert_sums(k, 0, 0);
    assert_int_equal(c.n, BT_CLASSES_MAX);
    assert_int_equal(c.of[7].priority, 60);
    assert_int_equal(c.of[7].lowest, 90);
    assert_sums(&c.of[7], 2, 64 + 128);
    assert_int_equal(c.of[2].priority, 20);
    assert_int_equal(c.of[4].priority, 30);
    assert_sums(&c.of[4], 1, 8);
    bt_classes_leave(&c, 75); /* who is counted in 60 to 90 leaves there */
    assert_int_equal(c.of[7].users, 1);
    bt_classes_leave(&c, 60);
    assert_int_equal(c.n, BT_CLASSES_MAX - 1);
    assert_int_equal(c.of[6].priority, 50);
    bt_classes_leave(&c, 0);
    assert_int_equal(c.n, BT_CLASSES_MAX - 2);
    assert_int_equal(c.of[0].priority, 10);
    assert_sums(&c.of[0], 1, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_more_than_places),
        cmocka_unit_test(test_the_ninth_class),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
