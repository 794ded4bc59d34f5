/* Upper bounds against everything that can be tried in small. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "conductor/sim/bound.h"
#include "conductor/sim/forest.h"

static uint64_t next(uint64_t *s)
{
    *s = *s * 6364136223846793005ull + 1442695040888963407ull;
    return *s >> 33;
}

static double upto(uint64_t *s, uint32_t n) /* 0 to n - 1 */
{
    return (double)(next(s) % n);
}

/* ---- due times, every earlier prefix for nothing ---- */

/* Every subset, each in order of release. */
static uint32_t most_by_trying(const struct bt_sim_job *jobs, uint32_t n, double due)
{
    uint32_t most = 0;
    for (uint32_t set = 0; set < 1u << n; set++) {
        double end = 0;
        uint32_t i = 0;
        for (; i < n; i++) {
            if (set >> i & 1) {
                end = BT_MAX(end, jobs[i].release_ms) + jobs[i].work_ms;
                if (end > jobs[i].release_ms + due) {
                    break;
                }
            }
        }
        most = i == n ? BT_MAX(most, (uint32_t)__builtin_popcount(set)) : most;
    }
    return most;
}

static void test_most_in_time(void **state)
{
    (void)state;
    uint64_t seed = 11;
    for (int round = 0; round < 2000; round++) {
        struct bt_sim_job jobs[10];
        double at = 0, due = 5 + (double)(next(&seed) % 30);
        for (uint32_t i = 0; i < BT_ARRAY_LEN(jobs); i++) {
            at += (double)(next(&seed) % 12);
            jobs[i] = (struct bt_sim_job){at, 1 + (double)(next(&seed) % 25)};
        }
        assert_int_equal(bt_sim_most_in_time(jobs, BT_ARRAY_LEN(jobs), due),
                         most_by_trying(jobs, BT_ARRAY_LEN(jobs), due));
    }
    assert_int_equal(bt_sim_most_in_time(NULL, 0, 1), 0);
}

/* ---- prefixes that must have been computed ---- */

#define WANTS 7
#define DEEP  6

struct small { /* an instance */
    struct bt_sim_want wants[WANTS];
    uint32_t n, blocks[WANTS][DEEP];
    double prefix_ms[DEEP + 1], due_ms;
};

/* Prompts of up to DEEP blocks and a rest, out of a binary tree: many share much. Several arrive at
 * the same moment. */
static void make(struct small *s, uint64_t *seed, uint32_t n)
{
    double at = 0, token = 1 + upto(seed, 4);
    s->n = n;
    s->due_ms = 4 + upto(seed, 16);
    for (uint32_t d = 0; d <= DEEP; d++) {
        s->prefix_ms[d] = token * d + 0.1 * d * d;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t deep = (uint32_t)upto(seed, DEEP + 1), name = 1;
        at += upto(seed, 3) * upto(seed, 6);
        for (uint32_t d = 0; d < deep; d++) {
            name = 2 * name + (upto(seed, 4) == 0);
            s->blocks[i][d] = name;
        }
        s->wants[i] = (struct bt_sim_want){.at_ms = at,
                                           .blocks = s->blocks[i],
                                           .n_blocks = deep,
                                           .prompt_ms = s->prefix_ms[deep] + 0.5 * upto(seed, 4),
                                           .rows_ms = upto(seed, 4),
                                           .hopeless = upto(seed, 8) == 0};
    }
}

static uint32_t in_common(const struct bt_sim_want *a, const struct bt_sim_want *b)
{
    uint32_t k = 0;
    while (k < a->n_blocks && k < b->n_blocks && a->blocks[k] == b->blocks[k]) {
        k++;
    }
    return k;
}

/* May i be good beside the others of the set? cached: blocks that an earlier one of it has left. */
static bool may_be_good(const struct small *s, uint32_t set, uint32_t i, uint32_t cached)
{
    const struct bt_sim_want *w = &s->wants[i];
    uint32_t branch = 0, first = i;
    for (uint32_t j = s->n; j-- > 0;) {
        uint32_t k = in_common(w, &s->wants[j]);
        if (j != i && k < cached) {
            branch = BT_MAX(branch, k);
        } else if (j != i && set >> j & 1) {
            first = j;
        }
    }
    double whole = w->prompt_ms, due_ms = s->due_ms + 1e-6;
    return !w->hopeless && whole - s->prefix_ms[cached] <= due_ms &&
           (cached == 0 ||
            s->wants[first].at_ms + (whole - s->prefix_ms[branch]) <= w->at_ms + due_ms);
}

/* A set's work, and of its good ones each one's rows (-1: it is not good). */
static double work_of(const struct small *s, uint32_t set, double rows_ms[WANTS])
{
    double work = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        const struct bt_sim_want *w = &s->wants[i];
        uint32_t cached = 0;
        for (uint32_t j = 0; j < i; j++) {
            cached = set >> j & 1 ? BT_MAX(cached, in_common(w, &s->wants[j])) : cached;
        }
        bool in = set >> i & 1;
        work += in ? w->prompt_ms - s->prefix_ms[cached] : 0;
        rows_ms[i] = in && may_be_good(s, set, i, cached) ? w->rows_ms : -1;
    }
    return work;
}

static double best_by_trying(const struct small *s, double prompt_price, double row_price)
{
    double best = 0, rows[WANTS];
    for (uint32_t set = 0; set < 1u << s->n; set++) {
        double worth = -prompt_price * work_of(s, set, rows);
        for (uint32_t i = 0; i < s->n; i++) {
            worth += rows[i] >= 0 ? BT_MAX(1 - row_price * rows[i], 0) : 0;
        }
        best = BT_MAX(best, worth);
    }
    return best;
}

static void test_forest(void **state)
{
    (void)state;
    uint64_t seed = 5;
    for (int round = 0; round < 3000; round++) {
        struct small s;
        make(&s, &seed, (uint32_t)upto(&seed, WANTS + 1));
        struct bt_sim_forest *f = bt_sim_forest_create(s.wants, s.n, s.prefix_ms, s.due_ms);
        double prompt = 0.03 * upto(&seed, 10), row = prompt + 0.1 * upto(&seed, 3);
        double best = bt_sim_forest_best(f, prompt, row), tried = best_by_trying(&s, prompt, row);
        assert_true(best - tried < 1e-9 && tried - best < 1e-9);
        bt_sim_forest_destroy(f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_most_in_time),
        cmocka_unit_test(test_forest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
