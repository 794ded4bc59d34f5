/* Drafts from a prediction: an answer is followed through it, where it says the same, leaves
 * something out, or puts something in. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/spec/predict.h"

#define N 100u

static uint32_t prediction[N];

static void take(struct bt_spec_predict *p, uint32_t from, uint32_t to)
{
    for (uint32_t t = from; t < to; t++) {
        bt_spec_predict_take(p, prediction, N, t);
    }
}

/* The first draft; UINT32_MAX: none. */
static uint32_t next(const struct bt_spec_predict *p, uint32_t most, uint32_t *n_p)
{
    struct bt_spec_draft d;
    bt_spec_predict_find(p, prediction, N, most, &d);
    *n_p = d.n;
    for (uint32_t i = 1; i < d.n; i++) {
        assert_int_equal(d.tokens[i], d.tokens[0] + i);
    }
    return d.n > 0 ? d.tokens[0] : UINT32_MAX;
}

static void test_an_answer_is_followed(void **state)
{
    (void)state;
    struct bt_spec_predict p = {0};
    uint32_t n;
    for (uint32_t i = 0; i < N; i++) {
        prediction[i] = 1000 + i;
    }
    assert_int_equal(next(&p, 99, &n), 1000); /* from the first token on */
    assert_int_equal(n, BT_SPEC_MAX);
    take(&p, 1000, 1010);
    assert_int_equal(next(&p, 3, &n), 1010);
    assert_int_equal(n, 3);
    take(&p, 5, 8); /* put in */
    assert_int_equal(next(&p, 99, &n), UINT32_MAX);
    take(&p, 1010, 1011); /* one token may be chance */
    assert_int_equal(next(&p, 99, &n), UINT32_MAX);
    take(&p, 1011, 1012);
    assert_int_equal(next(&p, 99, &n), 1012);
    take(&p, 1050, 1052); /* left out */
    assert_int_equal(next(&p, 99, &n), 1052);
    take(&p, 1052, 1095);
    assert_int_equal(next(&p, 99, &n), 1095);
    assert_int_equal(n, 5);
    take(&p, 1095, 1100); /* at its end */
    assert_int_equal(next(&p, 99, &n), UINT32_MAX);
    take(&p, 1000, 1010); /* it does not begin again */
    assert_int_equal(next(&p, 99, &n), UINT32_MAX);
    assert_int_equal(p.accepted, 10 + 2 + 50);
    assert_int_equal(p.n, 10 + 3 + 2 + 50 + 10);
}

static void test_another_answer(void **state)
{
    (void)state;
    struct bt_spec_predict p = {0};
    uint32_t n;
    take(&p, 1, 500);
    assert_int_equal(next(&p, 99, &n), UINT32_MAX);
    assert_int_equal(p.accepted, 0);
    bt_spec_predict_take(&p, NULL, 0, 7); /* an empty prediction */
    assert_int_equal(p.accepted, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_answer_is_followed),
        cmocka_unit_test(test_another_answer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
