/* Upper bounds against everything that can be tried in small. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "conductor/sim/bound.h"
#include "conductor/sim/capacity.h"
#include "conductor/sim/decode.h"

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
static uint32_t most_by_trying(const struct bt_sim_due_job *jobs, uint32_t n, double due)
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
        struct bt_sim_due_job jobs[10];
        double at = 0, due = 5 + (double)(next(&seed) % 30);
        for (uint32_t i = 0; i < BT_ARRAY_LEN(jobs); i++) {
            at += (double)(next(&seed) % 12);
            jobs[i] = (struct bt_sim_due_job){at, 1 + (double)(next(&seed) % 25)};
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

/* No set of this much work has more good ones than the bound for so much time. */
static void hold_set(const struct small *s, struct bt_sim_forest *f, uint32_t set)
{
    double rows[WANTS], work = work_of(s, set, rows), decode = 0;
    uint32_t good = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        good += rows[i] >= 0;
        decode += BT_MAX(rows[i], 0);
    }
    assert_true(good <= bt_sim_capacity_of(f, work + decode, decode));
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
        for (int k = 0; k < 3; k++) {
            hold_set(&s, f, (uint32_t)upto(&seed, 1u << s.n));
        }
        bt_sim_forest_destroy(f);
    }
}

#define MACHINES 2

struct trial { /* a schedule that is being tried */
    const struct small *s;
    double free_ms[MACHINES], done_ms[WANTS];
    uint32_t used, most; /* of all schedules: the most good ones */
};

/* Every order of every subset; each begins at once on any machine, or when another one's end has
 * left a longer prefix. */
static void try_all(struct trial *t, uint32_t good)
{
    const struct small *s = t->s;
    t->most = BT_MAX(t->most, good);
    for (uint32_t i = 0; i < s->n; i++) {
        for (uint32_t m = 0; (t->used >> i & 1) == 0 && m < MACHINES; m++) {
            const struct bt_sim_want *w = &s->wants[i];
            double at = BT_MAX(t->free_ms[m], w->at_ms), was = t->free_ms[m];
            for (uint32_t wait = 0; wait <= s->n; wait++) { /* s->n: for nobody */
                if (wait < s->n && ((t->used >> wait & 1) == 0 || t->done_ms[wait] <= at)) {
                    continue;
                }
                double begin = wait < s->n ? t->done_ms[wait] : at;
                uint32_t cached = 0;
                for (uint32_t j = 0; j < s->n; j++) {
                    if (t->used >> j & 1 && t->done_ms[j] <= begin) {
                        cached = BT_MAX(cached, in_common(w, &s->wants[j]));
                    }
                }
                double end = begin + w->prompt_ms - s->prefix_ms[cached];
                t->used |= 1u << i;
                t->free_ms[m] = t->done_ms[i] = end;
                try_all(t, good + (!w->hopeless && end <= w->at_ms + s->due_ms + 1e-9));
                t->free_ms[m] = was;
                t->used &= ~(1u << i);
            }
        }
    }
}

static void test_capacity(void **state)
{
    (void)state;
    uint64_t seed = 3;
    uint32_t slack = 0, reached = 0;
    for (int round = 0; round < 400; round++) {
        struct small s;
        make(&s, &seed, 4);
        for (uint32_t i = 0; i < s.n; i++) {
            s.wants[i].rows_ms = 0; /* only prompts are scheduled here */
        }
        struct trial t = {.s = &s};
        try_all(&t, 0);
        struct bt_sim_forest *f = bt_sim_forest_create(s.wants, s.n, s.prefix_ms, s.due_ms);
        double end = s.wants[s.n - 1].at_ms + s.due_ms;
        uint32_t bound = bt_sim_capacity_of(f, MACHINES * end, MACHINES * end);
        assert_true(t.most <= bound);
        slack += bound - t.most;
        reached += bound == t.most;
        bt_sim_forest_destroy(f);
    }
    print_message("# reached in %u of 400, %u above in all\n", reached, slack);
    assert_true(reached > 200);
}

/* ---- rows ---- */

/* Rows at random on one node, or all alike and at once, and prompts beside them. Returns its busy
 * time less what the prompts cost; sums_p: what those within tbt_ms must have taken. */
static double decode_some(const struct bt_sim_cluster *c, uint64_t *seed, double tbt_ms, bool alike,
                          double sums_p[BT_SIM_SHARES])
{
    enum { ROWS = 60 };
    struct bt_batch_cost prompt = c->prefill;
    prompt.base_ns = 0;
    struct bt_sim_decode *d = bt_sim_decode_create(&c->decode, c->kv_tokens, (uint32_t)c->rows_max);
    bt_sim_decode_mix(d, &prompt, tbt_ms * (0.5 + 0.1 * upto(seed, 10)), 0, 512);
    struct bt_sim_row rows[ROWS];
    double now = 0, end = 0, busy = 0;
    for (uint32_t k = 0; k <= ROWS; k++) {
        double at = k == ROWS ? 1e300 : alike ? 0 : now + upto(seed, 3) * upto(seed, 200), due;
        while ((due = bt_sim_decode_next_ms(d)) >= 0 && due <= at && (k == ROWS || !alike)) {
            struct bt_sim_done done;
            end = due;
            bool row = bt_sim_decode_advance(d, &done, 1) != 0 && !done.prompt;
            for (uint32_t share = 0; row && done.tbt_ms <= tbt_ms && share < BT_SIM_SHARES;
                 share++) {
                const struct bt_sim_row *r = &rows[done.id];
                sums_p[share] +=
                    bt_sim_rows_ms(c, r->tokens - 1, r->steps, tbt_ms, (bt_sim_share_t)share);
            }
        }
        if (k == ROWS) {
            break;
        }
        busy -= due < 0 ? at - end : 0; /* idle */
        end = due < 0 ? at : end;
        now = at;
        rows[k] = (struct bt_sim_row){.id = k,
                                      .tokens = 2 + (uint32_t)(alike ? 2000 : upto(seed, 6000)),
                                      .steps = 1 + (uint32_t)(alike ? 200 : upto(seed, 300)),
                                      .first_ms = alike ? 1e300 : now}; /* no wait in the gaps */
        if (!alike && upto(seed, 4) == 0) {
            struct bt_sim_prompt p = {.id = ROWS + k, .tokens = 1 + (uint32_t)upto(seed, 3000)};
            bt_sim_decode_prompt(d, now, &p);
            busy -= 1e-6 * bt_batch_prefill_ns(&prompt, 0, p.tokens, 0);
        }
        assert_true(bt_sim_decode_add(d, now, &rows[k]));
    }
    bt_sim_decode_destroy(d);
    return busy + end;
}

static void test_rows(void **state)
{
    (void)state;
    uint64_t seed = 17;
    double part[BT_SIM_SHARES] = {0};
    for (int round = 0; round < 600; round++) {
        struct bt_sim_cluster c = {
            .prefill = {.base_ns = 3e6, .token_ns = BT_BATCH_TOKEN_NS(20000), .attn_ns = 1},
            .decode = {.base_ns = 10e6, .kv_ns = 500, .token_ns = BT_BATCH_TOKEN_NS(100000)},
            .kv_tokens = 8000 + 1000 * upto(&seed, 30),
            .rows_max = 2 + upto(&seed, 30)};
        double sums[BT_SIM_SHARES] = {0}, tbt = 12 + upto(&seed, 30);
        double busy = decode_some(&c, &seed, tbt, round % 2 == 0, sums);
        for (uint32_t share = 0; share < BT_SIM_SHARES; share++) {
            assert_true(sums[share] <= busy + 1e-6);
            part[share] = BT_MAX(part[share], sums[share] / busy);
        }
    }
    for (uint32_t share = 0; share < BT_SIM_SHARES; share++) {
        print_message("# share %u: up to %.3f of the busy time\n", share, part[share]);
        assert_true(part[share] > 0.9);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_most_in_time),
        cmocka_unit_test(test_forest),
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
