/* The scheduler's plain values at their edges: what is learned, asked for, counted, and shown of a
 * worker. Values are on the heap, so that the sanitizer of tests/bench/mutants sees a step beyond.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/policy/sched/balance.h"
#include "common/policy/sched/copies.h"
#include "common/policy/sched/load.h"
#include "common/policy/sched/share.h"
#include "common/policy/sched/survival.h"

/* NaN is near nothing. */
#define NEAR(a, b, by) assert_true(fabs((a) - (b)) <= (by))

/* ---- learn.h ---- */

static void test_the_first_tokens_of_a_worker(void **state)
{
    struct bt_sched_learned l = {0};
    (void)state;
    for (uint32_t i = 0; i < 8; i++) { /* a spread is asked for behind eight */
        bt_sched_learn_ttft(&l, 100, -1, i == 0 ? 100 : 300);
        assert_true(l.spread == 0);
    }
    bt_sched_learn_ttft(&l, 100, -1, 300);
    assert_true(l.spread >= 1);
    memset(&l, 0, sizeof(l)); /* as predicted, always: no spread, nothing slow */
    for (uint32_t i = 0; i < 30; i++) {
        bt_sched_learn_ttft(&l, 100, -1, 100);
    }
    NEAR(l.spread, 1, 1e-12);
    NEAR(l.slow, 1, 0.01);
    NEAR(bt_sched_learned_ttft(&l, 200), 200, 1);
    memset(&l, 0, sizeof(l)); /* what is no time is not looked at; no work is work */
    bt_sched_learn_ttft(&l, 100, -1, 0);
    bt_sched_learn_ttft(&l, -1, -1, 100);
    bt_sched_learn_ttft(&l, NAN, -1, 100);
    assert_int_equal(l.n_ttft, 0);
    bt_sched_learn_ttft(&l, 0, 0, 30); /* nothing to compute, and nobody before it */
    assert_int_equal(l.n_ttft, 1);
    assert_int_equal(l.n_idle, 1);
    NEAR(l.overhead_ms, 30, 1e-9);
    NEAR(l.slow, 1, 1e-9);
    bt_sched_learn_ttft(&l, 100, 0, 30); /* computed in no time says nothing of slowness */
    NEAR(l.slow, 1, 1e-9);
    bt_sched_learn_ttft(&l, 0, 100, 130);
    NEAR(l.slow, 1, 1e-9);
    bt_sched_learn_ttft(&l, 100, 131, 130); /* longer than all of it: it was not alone */
    assert_int_equal(l.n_idle, 3);
}

/* The first one that met no queue says what the overhead is; what others have told is forgotten. */
static void test_the_first_idle_one_counts(void **state)
{
    struct bt_sched_learned l = {0};
    (void)state;
    for (uint32_t i = 0; i < 20; i++) {
        bt_sched_learn_ttft(&l, 100, -1, 5000);
    }
    assert_true(l.overhead_ms > 100);
    bt_sched_learn_ttft(&l, 100, 100, 107);
    NEAR(l.overhead_ms, 7, 1e-9);
    double before = l.overhead_ms;
    bt_sched_learn_ttft(&l, 100, 100, 5100); /* a second one that was held up moves it by little */
    assert_true(l.overhead_ms > before && l.overhead_ms < 20);
}

/* The fifth miss in a row to one side goes to the nearest of the five, the fourth does not. */
static void test_five_in_a_row(void **state)
{
    struct bt_sched_learned l = {0};
    (void)state;
    for (uint32_t i = 0; i < 40; i++) {
        bt_sched_learn_ttft(&l, 0, 0, 10);
    }
    NEAR(l.overhead_ms, 10, 1e-6);
    for (uint32_t i = 0; i < 4; i++) {
        bt_sched_learn_ttft(&l, 0, 0, 1000 + i);
    }
    assert_true(l.overhead_ms < 20);
    bt_sched_learn_ttft(&l, 0, 0, 1100);
    NEAR(l.overhead_ms, 1000, 1e-3);
    for (uint32_t i = 0; i < 40; i++) { /* to and fro is no run */
        bt_sched_learn_ttft(&l, 0, 0, i % 4 == 3 ? 2000 : 5000);
        bt_sched_learn_ttft(&l, 0, 0, 10);
    }
    assert_true(l.overhead_ms < 2000);
}

static void test_the_first_landing_counts(void **state)
{
    struct bt_sched_learned l = {0};
    (void)state;
    bt_sched_learn_landing(&l, 10, 110);
    NEAR(l.land_ms, 100, 1e-9);
    bt_sched_learn_landing(&l, 10, 100000); /* a second one moves it by a step */
    assert_true(l.land_ms > 100 && l.land_ms < 200);
    bt_sched_learn_landing(&l, 0, 50);
    bt_sched_learn_landing(&l, 10, 0);
    assert_int_equal(l.n_land, 2);
    l.land_ms = 20;
    NEAR(bt_sched_learned_tbt(&l, 10, 0, 30, false), 10, 1e-9); /* nothing lands */
    NEAR(bt_sched_learned_tbt(&l, 10, 0, 31, true), (30 + 3 * 10) / 4.0, 1e-9);
}

/* ---- survival.h ---- */

static struct bt_sched_survival *survival(void)
{
    struct bt_sched_survival *s = malloc(sizeof(*s));
    assert_non_null(s);
    bt_survival_init(s);
    return s;
}

static void test_lengths_to_the_token(void **state)
{
    struct bt_sched_survival *s = survival();
    struct bt_survival_key k = bt_survival_key(1, 1000);
    double rest[BT_SURVIVAL_BUCKETS];
    (void)state;
    static const uint32_t firsts[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128};
    for (uint32_t b = 0; b < BT_ARRAY_LEN(firsts); b++) {
        assert_int_equal(bt_survival_bucket(firsts[b] - 1), b);
        bt_survival_rest(s, k, firsts[b], rest); /* one more may come, and it does */
        NEAR(rest[b], 1, 1e-6);
        assert_true(rest[b + 1] == 0);
        bt_survival_rest(s, k, firsts[b] + 1, rest);
        assert_true(rest[b] > 1.9 && rest[b] <= 2);
    }
    assert_int_equal(bt_survival_bucket(UINT32_MAX), BT_SURVIVAL_BUCKETS - 1);
    assert_int_equal(bt_survival_quantile(s, k, 10, 10, 0.5), 0);
    assert_int_equal(bt_survival_quantile(s, k, 11, 10, 0.5), 0);
    assert_int_equal(bt_survival_quantile(s, k, 9, 10, 0.5), 1);
    free(s);
}

static void test_classes_of_prompts(void **state)
{
    (void)state;
    assert_int_equal(bt_survival_key(7, 1).prompt_class, 0);
    assert_int_equal(bt_survival_key(7, 191).prompt_class, 0);
    assert_int_equal(bt_survival_key(7, 192).prompt_class, 1);
    assert_int_equal(bt_survival_key(7, 256).prompt_class, 2);
    assert_int_equal(bt_survival_key(7, 65535).prompt_class, BT_SURVIVAL_CLASSES - 2);
    assert_int_equal(bt_survival_key(7, 65536).prompt_class, BT_SURVIVAL_CLASSES - 1);
    assert_int_equal(bt_survival_key(7, UINT32_MAX).prompt_class, BT_SURVIVAL_CLASSES - 1);
}

/* What runs on is told to all three: of a tenant, of a class, of everybody. */
static void test_whom_running_ones_tell(void **state)
{
    struct bt_sched_survival *s = survival(), *before = survival();
    struct bt_survival_key k = bt_survival_key(1, 1000), other_tenant = bt_survival_key(2, 1000),
                           other_class = bt_survival_key(1, 10);
    (void)state;
    assert_int_not_equal(k.tenant, other_tenant.tenant);
    bt_survival_reach(s, k, 0, 0);
    bt_survival_reach(s, k, 100, 100);
    bt_survival_reach(s, k, 200, 100);
    bt_survival_note(s, k, 0, 0, true);
    assert_memory_equal(s, before, sizeof(*s)); /* nothing has come */
    for (uint32_t i = 0; i < 50; i++) {
        bt_survival_reach(s, k, 0, 4000);
    }
    double own = bt_survival_mean(s, k, 0, 4000),
           tenant = bt_survival_mean(s, other_tenant, 0, 4000),
           class = bt_survival_mean(s, other_class, 0, 4000),
           none = bt_survival_mean(before, k, 0, 4000);
    assert_true(own > tenant && tenant > class && class > none);
    /* in two steps it is the same */
    struct bt_sched_survival *t = survival();
    for (uint32_t i = 0; i < 50; i++) {
        bt_survival_reach(t, k, 0, 100);
        bt_survival_reach(t, k, 100, 4000);
    }
    NEAR(bt_survival_mean(t, k, 0, 4000), own, 1e-3);
    free(s);
    free(t);
    free(before);
}

/* ---- demand.h, hot.h, share.h ---- */

static void test_demand_of_the_largest(void **state)
{
    struct bt_sched_demand *d = malloc(sizeof(*d));
    (void)state;
    assert_non_null(d);
    bt_sched_demand_init(d, 64000);
    bt_sched_demand_note(d, 0, 1e9); /* beyond the last bucket: as that */
    NEAR(bt_sched_demand_at(d, 0.5), exp2(67 / 4.0), 1e-6);
    NEAR(bt_sched_demand_at(d, 1), exp2(67 / 4.0), 1e-6);
    NEAR(bt_sched_demand_below(d, 1e9), 0.5, 1e-9);
    NEAR(bt_sched_demand_below(d, 1e4), 0, 1e-9);
    bt_sched_demand_note(d, 64000, 0); /* a window later */
    NEAR(bt_sched_demand_rate(d, 64000, 1), 1e9 * exp(-1) / (64000 * (1 - exp(-1))), 1e-3);
    bt_sched_demand_init(d, 64000);
    bt_sched_demand_note(d, 0, 1); /* the least, and no work at all */
    bt_sched_demand_note(d, 0, 0);
    assert_true(bt_sched_demand_at(d, 0) == 1);
    free(d);
}

/* Each set of keys keeps to its own places. */
static void test_hot_keys_beside_each_other(void **state)
{
    struct bt_hot *h = malloc(sizeof(*h));
    (void)state;
    assert_non_null(h);
    for (uint64_t set = 0; set < BT_HOT_SETS; set++) {
        bt_hot_init(h, 1000);
        uint64_t next = (set + 1) % BT_HOT_SETS;
        for (uint32_t i = 0; i < 2; i++) {
            NEAR(bt_hot_use(h, next + BT_HOT_SETS, 0), 1 + i, 1e-9);
        }
        for (uint64_t k = 1; k <= BT_HOT_WAYS; k++) {
            for (uint32_t i = 0; i < 9; i++) {
                NEAR(bt_hot_use(h, set + k * BT_HOT_SETS, 0), 1 + i, 1e-9);
            }
        }
        /* a fifth one takes a place of its own set */
        NEAR(bt_hot_use(h, set + 9 * BT_HOT_SETS, 0), 1, 1e-9);
        NEAR(bt_hot_use(h, next + BT_HOT_SETS, 0), next == set ? 1 : 3, 1e-9);
    }
    assert_int_equal(bt_hot_copies(0, 2, 3), 1);
    assert_int_equal(bt_hot_copies(1.9, 2, 3), 1);
    assert_int_equal(bt_hot_copies(2, 2, 3), 2);
    assert_int_equal(bt_hot_copies(100, 2, 3), 3);
    free(h);
}

/* ---- balance.h ---- */

/* Two windows with these pressures; whether a worker is changed. */
static struct bt_balance_change balanced(uint32_t prefills, uint32_t decodes, double prefill,
                                         double decode)
{
    static const struct bt_balance_params params = {.window_ms = 4000, .high = 0.5};
    uint32_t n = prefills + decodes;
    struct bt_balance_worker *w = calloc(n, sizeof(*w));
    struct bt_balance b = {0};
    struct bt_balance_change c = {.worker = BT_BALANCE_NONE};
    assert_non_null(w);
    for (uint32_t i = 0; i < n; i++) {
        w[i] = (struct bt_balance_worker){.prefill = i < prefills,
                                          .decode = i >= prefills,
                                          .pressure = i < prefills ? prefill : decode};
    }
    for (double ms = 0; ms < 12000 && c.worker == BT_BALANCE_NONE; ms += 1000) {
        bt_balance_step(&b, &params, w, n, ms, &c);
    }
    free(w);
    return c;
}

static void test_balance_at_its_limits(void **state)
{
    (void)state;
    assert_int_equal(balanced(2, 2, 0.5, 0).worker, BT_BALANCE_NONE); /* not above `high` */
    assert_int_equal(balanced(2, 2, 0, 0.5).worker, BT_BALANCE_NONE);
    struct bt_balance_change c = balanced(2, 2, 1, 0.125); /* of two one may go */
    assert_int_equal(c.worker, 2);
    assert_true(c.to_prefill);
    c = balanced(2, 2, 0.125, 1);
    assert_int_equal(c.worker, 0);
    assert_false(c.to_prefill);
    assert_int_equal(balanced(2, 1, 1, 0).worker, BT_BALANCE_NONE); /* the last one never */
    assert_int_equal(balanced(1, 2, 0, 1).worker, BT_BALANCE_NONE);
    assert_int_equal(balanced(2, 2, 1, 0.25).worker, BT_BALANCE_NONE); /* 0.5 without one */
    assert_int_equal(balanced(2, 4, 1, 0.375).worker, BT_BALANCE_NONE);
    assert_int_equal(balanced(2, 4, 1, 0.25).worker, 2); /* a third */
    assert_int_equal(balanced(2, 2, 1, 0.5).worker, BT_BALANCE_NONE);
}

/* ---- copies.h ---- */

static uint64_t key_of(const void *arg, uint32_t blocks)
{
    return *(const uint64_t *)arg + blocks;
}

/* As many uses as a copy takes are enough; nobody is looked at beyond the last worker. */
static void test_copies_to_the_use(void **state)
{
    struct bt_sched_worker *w = calloc(2, sizeof(*w));
    struct bt_sched_kvstore *k = calloc(2, sizeof(*k));
    struct bt_sched_copies *c = malloc(sizeof(*c));
    struct bt_sched_params params = {.prior.prefill_tokens_per_s = 1000};
    struct bt_sched_copy copy;
    uint64_t key = 1;
    struct bt_sched_prefix p = {key_of, &key, 4, 1, 100};
    (void)state;
    assert_true(w != NULL && k != NULL && c != NULL);
    w[0] = (struct bt_sched_worker){.kvstore = 0, .prefill = true};
    w[1] = (struct bt_sched_worker){.kvstore = 1, .prefill = true};
    k[0].match_blocks = 4;
    struct bt_sched_snapshot s = {.workers = w, .n_workers = 2, .kvstores = k, .n_kvstores = 2};
    bt_sched_copies_init(c, 1000, 2.5, 0);
    s.now_ms = 10000;
    assert_false(bt_sched_copies_look(c, &params, &s, &p, true, &copy)); /* 1 and a half */
    assert_true(bt_sched_copies_look(c, &params, &s, &p, true, &copy));
    assert_int_equal(copy.from, 0);
    assert_int_equal(copy.to, 1);
    assert_int_equal(copy.blocks, 4);
    NEAR(copy.bytes, 400, 1e-9);
    NEAR(copy.uses, 2.5, 1e-9);
    assert_false(bt_sched_copies_look(c, &params, &s, &p, false, &copy));
    free(w);
    free(k);
    free(c);
}

/* ---- load.h ---- */

static const struct bt_batch_cost cost = {.base_ns = 1e6, .token_ns = BT_BATCH_TOKEN_NS(1e5)};
static const struct bt_sched_learned nothing_learned;

static struct bt_sched_worker shown(const struct bt_sched_said *said,
                                    const struct bt_sched_own *own, uint64_t now_ns)
{
    struct bt_sched_worker w;
    bt_sched_show_worker(said, own, &nothing_learned, now_ns, &w);
    return w;
}

static void test_rows_that_a_heartbeat_has_not_counted(void **state)
{
    struct bt_sched_said said = {.running = 3, .waiting = 4, .landing = 2};
    struct bt_sched_own own;
    (void)state;
    bt_sched_own_init(&own);
    struct bt_sched_worker w = shown(&said, &own, 0);
    assert_int_equal(w.rows.running, 3);
    assert_int_equal(w.rows.waiting, 2);
    assert_int_equal(w.rows.landing, 2);
    own.rows = 7; /* as many as it says */
    assert_int_equal(shown(&said, &own, 0).rows.landing, 2);
    own.rows = 9; /* two more are on their way */
    w = shown(&said, &own, 0);
    assert_int_equal(w.rows.landing, 4);
    assert_int_equal(w.rows.waiting, 2);
    own.decoding = 5; /* more run than it says */
    w = shown(&said, &own, 0);
    assert_int_equal(w.rows.running, 5);
    assert_int_equal(w.rows.landing, 2);
    assert_int_equal(w.rows.own_coming, 4);
    own.late = 3; /* late ones are no rows */
    assert_int_equal(shown(&said, &own, 0).rows.own, 6);
    said.landing = 9; /* more than wait is what waits */
    w = shown(&said, &own, 0);
    assert_int_equal(w.rows.waiting, 0);
}

static void test_the_pace_of_a_worker(void **state)
{
    struct bt_sched_said said = {.max_rows = 256, .chunk_tokens = 128, .has_cost = true};
    struct bt_sched_learned slow = {.slow = 2};
    (void)state;
    said.cost = cost;
    struct bt_sched_pace p = bt_sched_pace_of(&said, &slow, true);
    assert_ptr_equal(p.cost, &said.cost);
    assert_int_equal(p.max_rows, 256);
    assert_int_equal(p.chunk_tokens, 128);
    assert_true(p.slow == 2);
    assert_null(bt_sched_pace_of(&said, &slow, false).cost); /* it decodes as well */
    said.max_rows = 0;
    assert_int_equal(bt_sched_pace_of(&said, &slow, true).max_rows, UINT32_MAX);
    said.has_cost = false;
    assert_null(bt_sched_pace_of(&said, &slow, true).cost);
    p = bt_sched_pace_of(NULL, &nothing_learned, true);
    assert_true(p.cost == NULL && p.slow == 1 && p.max_rows == UINT32_MAX);
}

/* ---- backlog.h ---- */

static void add(struct bt_sched_own *own, struct bt_sched_prompt *p, uint32_t tokens,
                int32_t priority, const struct bt_sched_pace *pace, uint64_t now_ns)
{
    *p = (struct bt_sched_prompt){.len = tokens,
                                  .priority = priority,
                                  .alone_ms = 1e-6 * bt_batch_prefill_ns(&cost, 0, tokens, 128)};
    bt_sched_own_prompt(own, p, pace, now_ns);
}

/* A prompt that is done sooner than expected: the steps that it took are over for those before it,
 * too, the next one begins, and its class has it no more. */
static void test_a_prompt_is_done_early(void **state)
{
    const struct bt_sched_pace pace = {
        .cost = &cost, .max_rows = 256, .chunk_tokens = 128, .slow = 1};
    struct bt_sched_prompt first, second, third;
    struct bt_sched_own own;
    (void)state;
    bt_sched_own_init(&own);
    add(&own, &first, 300, 0, &pace, 0); /* three steps */
    add(&own, &second, 256, 0, &pace, 0);
    add(&own, &third, 1280, 5, &pace, 0);
    assert_int_equal(first.in_step, 128);
    double all = bt_sched_backlog_ms(&own.backlog, 0, 1, 0);
    NEAR(all, first.alone_ms + second.alone_ms + third.alone_ms, 1e-6);
    bt_sched_own_prompt_done(&own, &second, &pace, 1000);
    assert_int_equal(first.pos, 300);
    assert_int_equal(second.pos, 256);
    assert_int_equal(third.pos, 0);
    assert_int_equal(third.in_step, 128);
    assert_int_equal(own.classes.n, 2);
    bt_sched_own_prompt_done(&own, &first, &pace, 1000);
    NEAR(bt_sched_backlog_ms(&own.backlog, 0, 1, 1000), third.alone_ms, 1e-6);
    assert_int_equal(own.classes.n, 1);
    bt_sched_own_prompt_done(&own, &third, &pace, 2000); /* it was aborted */
    assert_int_equal(own.classes.n, 0);
    assert_true(bt_sched_backlog_ms(&own.backlog, 0, 1, 3000) == 0);
}

/* Late prompts are counted one by one: that one of them is done says nothing of the others' steps;
 * but the oldest of all begins when it is. */
static void test_late_prompts_in_a_backlog(void **state)
{
    const struct bt_sched_pace pace = {
        .cost = &cost, .max_rows = 256, .chunk_tokens = 128, .slow = 1};
    struct bt_sched_prompt late, p;
    struct bt_sched_own own;
    (void)state;
    bt_sched_own_init(&own);
    add(&own, &p, 1280, 0, &pace, 0);
    add(&own, &late, 640, BT_SCHED_CLASS_LATE, &pace, 0);
    double both = bt_sched_backlog_ms(&own.backlog, 0, 1, 0);
    NEAR(both, p.alone_ms + late.alone_ms, 1e-6);
    bt_sched_own_prompt_done(&own, &late, &pace, 1);
    NEAR(bt_sched_backlog_ms(&own.backlog, 0, 1, 0), p.alone_ms, 1e-3);
    assert_int_equal(p.pos, 0); /* its first step is still under way */
    bt_sched_own_prompt_done(&own, &p, &pace, 2);
    add(&own, &late, 640, BT_SCHED_CLASS_LATE, &pace, 1000000000);
    add(&own, &p, 640, BT_SCHED_CLASS_LATE, &pace, 1000000000);
    bt_sched_own_prompt_done(&own, &late, &pace, 1020000000);
    NEAR(bt_sched_backlog_ms(&own.backlog, 0, 1, 1020000000), p.alone_ms, 1e-6);
    bt_sched_own_prompt_done(&own, &p, &pace, 1030000000);
}

/* Prompts beyond those that are rolled forward: that one of them is done says nothing of others. */
static void test_prompts_beyond_those_rolled_forward(void **state)
{
    const struct bt_sched_pace pace = {
        .cost = &cost, .max_rows = 256, .chunk_tokens = 128, .slow = 1};
    struct bt_sched_prompt p[BT_BATCH_AHEAD_SEQS + 1];
    struct bt_sched_own own;
    uint32_t n = BT_ARRAY_LEN(p);
    (void)state;
    bt_sched_own_init(&own);
    for (uint32_t i = 0; i < n; i++) {
        add(&own, &p[i], 256, 0, &pace, 0);
    }
    bt_sched_own_prompt_done(&own, &p[n - 1], &pace, 1);
    for (uint32_t i = 0; i + 1 < n; i++) {
        assert_int_equal(p[i].pos, 0);
    }
    for (uint32_t i = 0; i + 1 < n; i++) {
        bt_sched_own_prompt_done(&own, &p[i], &pace, 2);
    }
    assert_true(bt_sched_backlog_ms(&own.backlog, 0, 1, 3) == 0);
}

/* ---- forecast.h ---- */

/* Who should have come out of prefill by now counts, and ends as if it had come just now. */
static void test_rows_that_are_due(void **state)
{
    struct bt_sched_forecast *f = malloc(sizeof(*f));
    struct bt_sched_room room = {0};
    (void)state;
    assert_non_null(f);
    for (int back = 0; back < 2; back++) { /* noted when they are due, or before */
        bt_sched_forecast_init(f, 10, 1000, 0);
        f->leads = 0;
        for (uint32_t i = 0; i < 10; i++) {
            bt_sched_forecast_note(f, back ? 0 : 5000, 4000, 100, 1000, 1);
        }
        bt_sched_forecast_note(f, 5000, 4000, 50, 1000, 1); /* one is taken back */
        bt_sched_forecast_note(f, 5000, 4000, 50, 1000, -1);
        f->rows_per_ms = f->kv_per_ms = f->time_per_ms = f->kv_time_per_ms = 0;
        struct bt_sched_load load = {0};
        bt_sched_forecast_at(f, &room, 5000, 1, &load);
        NEAR(load.rows, 10, 1e-9);
        NEAR(load.kv, 1000, 1e-9);
        load = (struct bt_sched_load){0};
        bt_sched_forecast_at(f, &room, 6000, 1, &load);
        NEAR(load.rows, 10 * exp(-1), 0.1);
        NEAR(load.kv, 1000 * exp(-1), 10);
    }
    free(f);
}

/* A step that ends now is over. */
static void test_the_end_of_a_step(void **state)
{
    const struct bt_sched_pace pace = {
        .cost = &cost, .max_rows = 256, .chunk_tokens = 100, .slow = 1};
    struct bt_sched_prompt p, q;
    struct bt_sched_own own;
    (void)state;
    bt_sched_own_init(&own);
    add(&own, &p, 1000, 0, &pace, 0);
    add(&own, &q, 10, 1, &pace, 10999999); /* a step of 11 ms has a ns to go */
    assert_int_equal(p.pos, 0);
    bt_sched_own_prompt_done(&own, &q, &pace, 10999999);
    bt_sched_own_prompt_done(&own, &p, &pace, 10999999);
    add(&own, &p, 1000, 0, &pace, 0);
    add(&own, &q, 10, 1, &pace, 11000000);
    assert_int_equal(p.pos, 100);
    bt_sched_own_prompt_done(&own, &q, &pace, 11000000);
    bt_sched_own_prompt_done(&own, &p, &pace, 11000000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_first_tokens_of_a_worker),
        cmocka_unit_test(test_the_first_idle_one_counts),
        cmocka_unit_test(test_five_in_a_row),
        cmocka_unit_test(test_the_first_landing_counts),
        cmocka_unit_test(test_lengths_to_the_token),
        cmocka_unit_test(test_classes_of_prompts),
        cmocka_unit_test(test_whom_running_ones_tell),
        cmocka_unit_test(test_demand_of_the_largest),
        cmocka_unit_test(test_hot_keys_beside_each_other),
        cmocka_unit_test(test_balance_at_its_limits),
        cmocka_unit_test(test_copies_to_the_use),
        cmocka_unit_test(test_rows_that_a_heartbeat_has_not_counted),
        cmocka_unit_test(test_the_pace_of_a_worker),
        cmocka_unit_test(test_a_prompt_is_done_early),
        cmocka_unit_test(test_late_prompts_in_a_backlog),
        cmocka_unit_test(test_prompts_beyond_those_rolled_forward),
        cmocka_unit_test(test_rows_that_are_due),
        cmocka_unit_test(test_the_end_of_a_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
