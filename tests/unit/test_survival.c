/* Estimates of what a request will still generate. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "common/policy/sched/survival.h"

static struct bt_sched_survival s;

static uint64_t rng(uint64_t *x)
{
    *x = *x * 6364136223846793005ull + 1442695040888963407ull;
    return *x >> 33;
}

/* Geometric with this mean. */
static uint32_t geometric(uint64_t *x, double mean)
{
    double u = ((double)(rng(x) % 1000000) + 0.5) / 1e6;
    return 1 + (uint32_t)(log(u) / log(1 - 1 / mean));
}

static void near(double got, double want, double share)
{
    if (fabs(got - want) > share * want) {
        fail_msg("%g is not within %g of %g", got, share, want);
    }
}

static void test_prior(void **state)
{
    (void)state;
    bt_survival_init(&s);
    struct bt_survival_key k = bt_survival_key(7, 100);
    near(bt_survival_mean(&s, k, 0, 1000000), 256, 0.05);
    for (uint32_t n = 256; n <= 1u << 17; n *= 2) { /* however long it is already, the widest too */
        near(bt_survival_mean(&s, k, n, 1000000), 256, 0.05);
    }
    near(bt_survival_mean(&s, k, 0, 10), 10, 0.05); /* the limit is what counts */
    near(bt_survival_quantile(&s, k, 0, 1000000, 0.5), 177, 0.05);
    assert_int_equal(bt_survival_quantile(&s, k, 0, 5, 0.9), 5);
    assert_int_equal(bt_survival_quantile(&s, k, 5, 5, 0.9), 0);
    assert_int_equal(bt_survival_quantile(&s, k, 900000, 1000000, 1), 100000);
}

static void test_learns_lengths(void **state)
{
    (void)state;
    uint64_t x = 1;
    bt_survival_init(&s);
    struct bt_survival_key k = bt_survival_key(7, 100);
    for (int i = 0; i < 2000; i++) {
        bt_survival_note(&s, k, 0, geometric(&x, 40), true);
    }
    near(bt_survival_mean(&s, k, 0, 100000), 40, 0.15);
    near(bt_survival_quantile(&s, k, 0, 100000, 0.9), 92, 0.15);
    /* a geometric one has no memory: what was generated says nothing */
    near(bt_survival_mean(&s, k, 50, 100000), 40, 0.3);
}

static void test_what_was_generated_counts(void **state)
{
    (void)state;
    bt_survival_init(&s);
    struct bt_survival_key k = bt_survival_key(7, 100);
    for (int i = 0; i < 500; i++) { /* nine of ten are short, the tenth is long */
        bt_survival_note(&s, k, 0, i % 10 != 0 ? 10 : 1000, true);
    }
    assert_true(bt_survival_quantile(&s, k, 0, 100000, 0.5) <= 12);
    assert_true(bt_survival_quantile(&s, k, 20, 100000, 0.5) > 700);
    assert_true(bt_survival_mean(&s, k, 20, 100000) > 600);
}

static void test_cut_off_ones_do_not_shorten(void **state)
{
    (void)state;
    uint64_t x = 1;
    bt_survival_init(&s);
    struct bt_survival_key k = bt_survival_key(7, 100);
    for (int i = 0; i < 2000; i++) { /* mean 200, every second one may only have 50 */
        uint32_t n = geometric(&x, 200);
        bool cut = i % 2 == 0 && n > 50;
        bt_survival_note(&s, k, 0, cut ? 50 : n, !cut);
    }
    near(bt_survival_mean(&s, k, 0, 100000), 200, 0.2);
}

static void test_tenants_and_classes_differ(void **state)
{
    (void)state;
    uint64_t x = 1;
    bt_survival_init(&s);
    struct bt_survival_key a = bt_survival_key(1, 100), b = bt_survival_key(2, 100),
                           far = bt_survival_key(1, 100000), fresh = bt_survival_key(3, 100);
    assert_true(a.tenant != b.tenant && fresh.tenant != a.tenant && fresh.tenant != b.tenant);
    for (int i = 0; i < 1000; i++) {
        bt_survival_note(&s, a, 0, geometric(&x, 20), true);
        bt_survival_note(&s, b, 0, geometric(&x, 1000), true);
    }
    near(bt_survival_mean(&s, a, 0, 100000), 20, 0.3);
    near(bt_survival_mean(&s, b, 0, 100000), 1000, 0.3);
    double mixed = bt_survival_mean(&s, fresh, 0, 100000);  /* a new tenant: as all */
    assert_true(mixed > 350 && mixed < 900);                /* more than the prior */
    near(bt_survival_mean(&s, far, 0, 100000), mixed, 0.1); /* nothing of that class yet: as all */
    for (int i = 0; i < 1000; i++) { /* nor do prompts half as long again say much of these */
        bt_survival_note(&s, bt_survival_key(3, 1600), 0, geometric(&x, 50), true);
        bt_survival_note(&s, bt_survival_key(3, 1100), 0, geometric(&x, 400), true);
    }
    near(bt_survival_mean(&s, bt_survival_key(3, 1700), 0, 100000), 50, 0.3);
    near(bt_survival_mean(&s, bt_survival_key(3, 1200), 0, 100000), 400, 0.3);
}

/* Thirty requests begin every ten tokens' time, and answers have 200 in the mean. While the oldest
 * is at 150 hardly any but short ones have ended: those that run say that there are longer ones. */
static void test_running_ones_count(void **state)
{
    (void)state;
    enum { N = 30 * 15 };
    static struct {
        uint32_t length, told;
    } all[N];
    struct bt_survival_key k = bt_survival_key(7, 100);
    double mean[2];
    for (int reach = 0; reach < 2; reach++) {
        uint64_t x = 1;
        bt_survival_init(&s);
        for (uint32_t i = 0; i < N; i++) {
            all[i].length = geometric(&x, 200);
            all[i].told = 0;
        }
        for (uint32_t now = 10; now <= 150; now += 10) {
            for (uint32_t i = 0; i < N && i / 30 * 10 < now; i++) {
                uint32_t age = now - i / 30 * 10;
                if (all[i].length == 0) {
                    continue; /* over */
                }
                if (age >= all[i].length) {
                    bt_survival_note(&s, k, all[i].told, all[i].length, true);
                    all[i].length = 0;
                } else if (reach) {
                    bt_survival_reach(&s, k, all[i].told, age);
                    all[i].told = age;
                }
            }
        }
        mean[reach] = bt_survival_mean(&s, k, 0, 100000);
    }
    assert_true(mean[0] < 100);
    near(mean[1], 200, 0.25);
}

/* The table says of a bucket's begin what the walk from there says. */
static void test_rest(void **state)
{
    (void)state;
    uint64_t x = 1;
    double rest[BT_SURVIVAL_BUCKETS];
    bt_survival_init(&s);
    struct bt_survival_key k = bt_survival_key(7, 100);
    for (int i = 0; i < 2000; i++) {
        bt_survival_note(&s, k, 0, geometric(&x, 40), true);
    }
    bt_survival_rest(&s, k, 1000, rest);
    for (uint32_t n = 1; n < 1024; n *= 2) {
        assert_float_equal(rest[bt_survival_bucket(n - 1)], bt_survival_mean(&s, k, n - 1, 1000),
                           1e-3);
    }
    assert_true(rest[bt_survival_bucket(2000)] == 0);
}

static void test_buckets_cover_all_lengths(void **state)
{
    (void)state;
    bt_survival_init(&s);
    struct bt_survival_key k = bt_survival_key(0, 0);
    for (uint64_t n = 1; n < UINT32_MAX; n = n * 5 / 4 + 1) {
        bt_survival_note(&s, k, 0, (uint32_t)n, n % 3 == 0);
        uint32_t left = bt_survival_quantile(&s, k, (uint32_t)n, UINT32_MAX, 0.99);
        assert_true(left >= 1 && left <= UINT32_MAX - (uint32_t)n);
        assert_true(isfinite(bt_survival_mean(&s, k, (uint32_t)n, UINT32_MAX)));
    }
    bt_survival_note(&s, k, 0, 0, true); /* nothing was generated: nothing is learned */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prior),
        cmocka_unit_test(test_learns_lengths),
        cmocka_unit_test(test_what_was_generated_counts),
        cmocka_unit_test(test_cut_off_ones_do_not_shorten),
        cmocka_unit_test(test_tenants_and_classes_differ),
        cmocka_unit_test(test_running_ones_count),
        cmocka_unit_test(test_rest),
        cmocka_unit_test(test_buckets_cover_all_lengths),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
