/* Every policy on table-driven snapshots, the admissions, the forecast. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/policy/sched/expected.h"
#include "common/policy/sched/sched.h"

#define N_P 4 /* prefill workers 0..3 on nodes 0..3, decode workers 4 and 5 on nodes 4 and 5 */
#define N   6

/* 1 ms a token, nothing for attention: times are token counts. */
static const struct bt_batch_cost prefill_cost = {.token_ns = BT_BATCH_TOKEN_NS(1e6)};
/* 10 ms a step and 1 ms for each thousand tokens of context. */
static const struct bt_batch_cost decode_cost = {.base_ns = 10e6, .kv_ns = 1000};

struct world {
    struct bt_sched_worker w[N];
    struct bt_sched_kvstore k[N];
    struct bt_sched_snapshot s;
    struct bt_sched_request req;
    struct bt_sched_params c;
};

static void world_init(struct world *x)
{
    memset(x, 0, sizeof(*x));
    for (uint32_t i = 0; i < N; i++) {
        x->w[i] = (struct bt_sched_worker){.kvstore = i,
                                           .prefill = i < N_P,
                                           .decode = i >= N_P,
                                           .capacity.slots = 64,
                                           .capacity.pages = i < N_P ? 0 : 1000,
                                           .capacity.pages_free = 1000,
                                           .speed.cost = i < N_P ? &prefill_cost : &decode_cost};
    }
    x->s = (struct bt_sched_snapshot){
        .workers = x->w, .n_workers = N, .kvstores = x->k, .n_kvstores = N};
    /* 10 blocks of 100 tokens; a token's KV takes 0.1 ms on the link */
    x->req = (struct bt_sched_request){.n_tokens = 1000,
                                       .max_new = 100,
                                       .n_choices = 1,
                                       .block_tokens = 100,
                                       .token_bytes = 1000,
                                       .random = 5};
    x->c = (struct bt_sched_params){.prior.prefill_tokens_per_s = 1,
                                    .prior.step_ms = 1,
                                    .prior.link_bytes_per_s = 10e6,
                                    .place.fetch_ratio = 2};
}

static struct bt_sched_plan place(const struct world *x, const struct bt_sched_policy *p)
{
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    memset(&plan, 0xee, sizeof(plan));
    assert_int_equal(p->place(&x->c, &x->s, &x->req, &plan, &rej), BT_SCHED_PLANNED);
    return plan;
}

struct row {
    const char *name;
    const struct bt_sched_policy *policy;
    uint32_t match[N_P], queue_ms[N_P], send_ms[N_P];
    uint32_t prefill, fetch_from, fetch_tokens, cached, ttft_ms;
};

#define NO BT_SCHED_NONE
static const struct row rows[] = {
    {"nothing known: the shortest queue",
     &bt_sched_kvcache,
     {0},
     {9, 8, 7, 9},
     {0},
     2,
     NO,
     0,
     0,
     1007},
    {"least-load sees no cache",
     &bt_sched_least_load,
     {9, 0, 0, 0},
     {20, 10, 30, 30},
     {0},
     1,
     NO,
     0,
     0,
     1010},
    {"cache-aware waits for its prefix",
     &bt_sched_cache_aware,
     {0, 8, 0, 0},
     {0, 500, 0, 0},
     {0},
     1,
     NO,
     0,
     800,
     700},
    {"cache-aware recomputes rather than wait",
     &bt_sched_cache_aware,
     {0, 8, 0, 0},
     {0, 900, 5, 5},
     {0},
     0,
     NO,
     0,
     0,
     1000},
    /* 800 tokens take 80 ms to fetch: 5 + 80 + 200 */
    {"kvcache fetches to an idle worker",
     &bt_sched_kvcache,
     {0, 8, 0, 0},
     {5, 500, 9, 9},
     {0},
     0,
     1,
     800,
     800,
     285},
    {"kvcache stays with the holder when that is sooner",
     &bt_sched_kvcache,
     {0, 8, 0, 0},
     {0, 50, 0, 0},
     {0},
     1,
     NO,
     0,
     800,
     250},
    {"kvcache counts the sender's link",
     &bt_sched_kvcache,
     {0, 8, 0, 0},
     {5, 300, 9, 9},
     {0, 700, 0, 0},
     1,
     NO,
     0,
     800,
     500},
    /* 8 / 5 is below the threshold of 2: computes what it lacks */
    {"below the threshold nothing moves",
     &bt_sched_kvcache,
     {5, 8, 0, 0},
     {0, 900, 900, 900},
     {0},
     0,
     NO,
     0,
     500,
     500},
    {"at the threshold it does",
     &bt_sched_kvcache,
     {4, 8, 0, 0},
     {0, 900, 900, 900},
     {0},
     0,
     1,
     400,
     800,
     240},
    /* the last token is always computed: nine of ten blocks count */
    {"a whole prompt cached",
     &bt_sched_kvcache,
     {0, 10, 0, 0},
     {0, 0, 0, 0},
     {0},
     1,
     NO,
     0,
     900,
     100},
    {"baton fetches behind the queue: no time of its own",
     &bt_sched_baton,
     {0, 8, 0, 0},
     {100, 500, 900, 900},
     {0},
     0,
     1,
     800,
     800,
     300},
    /* An idle worker computes block 0 (100 ms) while the other seven come in 70. */
    {"baton computes the head meanwhile",
     &bt_sched_baton,
     {0, 8, 0, 0},
     {0, 900, 900, 900},
     {0},
     0,
     1,
     700,
     700,
     300},
    {"baton does not wait for a busy link",
     &bt_sched_baton,
     {0, 8, 0, 0},
     {0, 900, 900, 900},
     {0, 5000, 0, 0},
     0,
     NO,
     0,
     0,
     1000},
};

/* As live clusters are: no engine loads a prefix's end beside computing its head. */
struct live_row {
    struct row r;
    uint32_t spread; /* blocks that holders have together; 0: not known */
    double link;     /* measured from 1 to 0, bytes per second; 0: not */
};

static const struct live_row live_rows[] = {
    /* The whole is fetched first: 80 ms, and 200 of computing. */
    {.r = {"baton fetches before it computes",
           &bt_sched_baton,
           {0, 8, 0, 0},
           {0, 900, 900, 900},
           {0},
           0,
           1,
           800,
           800,
           280}},
    /* At 0.5 MB/s a token comes in 2 ms and is computed in 1: 450 ms of queue hide two blocks. */
    {.r = {"baton fetches what the queue hides over a slow link",
           &bt_sched_baton,
           {0, 8, 0, 0},
           {450, 5000, 5000, 5000},
           {0},
           0,
           1,
           200,
           200,
           1250},
     .link = 0.5e6},
    {.r = {"baton computes rather than fetch over a slow link",
           &bt_sched_baton,
           {0, 8, 0, 0},
           {40, 5000, 5000, 5000},
           {0},
           0,
           NO,
           0,
           0,
           1040},
     .link = 0.5e6},
    {.r = {"baton fetches from several what none has alone",
           &bt_sched_baton,
           {0, 4, 0, 0},
           {0, 900, 900, 900},
           {0},
           0,
           1,
           700,
           700,
           370},
     .spread = 7},
    {.r = {"kvcache knows the measured link",
           &bt_sched_kvcache,
           {0, 8, 0, 0},
           {5, 500, 900, 900},
           {0},
           0,
           1,
           800,
           800,
           245},
     .link = 20e6},
};

static void check_row(const struct row *t, bool tail_load, uint32_t spread, double link_rate)
{
    struct world x;
    struct bt_sched_link link = {.incarnation = 101, .slab_bytes_per_s = link_rate};
    world_init(&x);
    for (uint32_t i = 0; i < N_P; i++) {
        x.k[i].match_blocks = t->match[i];
        x.w[i].queue.ms = t->queue_ms[i];
        x.k[i].send_busy_ms = t->send_ms[i];
        x.k[i].incarnation = 100 + i;
    }
    x.k[0].links = &link;
    x.k[0].n_links = link_rate > 0;
    x.c.place.tail_load = tail_load;
    x.s.spread_blocks = spread;
    struct bt_sched_plan p = place(&x, t->policy);
    if (p.at.prefill != t->prefill || p.prefix.fetch_from != t->fetch_from ||
        p.prefix.fetch_tokens != t->fetch_tokens || p.prefix.cached_tokens != t->cached ||
        (uint32_t)(p.first.ms + 0.5) != t->ttft_ms) {
        fail_msg("%s: prefill %u, from %u, fetched %u, cached %u, ttft %.1f", t->name, p.at.prefill,
                 p.prefix.fetch_from, p.prefix.fetch_tokens, p.prefix.cached_tokens, p.first.ms);
    }
    /* a token is computed in a millisecond */
    double recompute = p.prefix.fetch_tokens != 0 ? 1000 : 0;
    assert_in_range((uint64_t)(p.prefix.recompute_tokens_per_s + 0.5), (uint64_t)recompute,
                    (uint64_t)recompute);
}

static void test_rows(void **state)
{
    (void)state;
    for (size_t r = 0; r < BT_ARRAY_LEN(rows); r++) {
        check_row(&rows[r], true, 0, 0);
    }
}

static void test_live_rows(void **state)
{
    (void)state;
    for (size_t r = 0; r < BT_ARRAY_LEN(live_rows); r++) {
        check_row(&live_rows[r].r, false, live_rows[r].spread, live_rows[r].link);
    }
}

/* A hand-off over a link that was measured to be fast is hidden by the prefill; the others are not.
 */
static void test_measured_link(void **state)
{
    (void)state;
    static const struct bt_sched_link link = {.incarnation = 102, .slab_bytes_per_s = 1e9};
    struct world x;
    world_init(&x);
    x.c.prior.link_bytes_per_s = 0.5e6; /* twice the time of the prefill */
    for (uint32_t i = 0; i < N; i++) {
        x.k[x.w[i].kvstore].incarnation = 100 + i;
    }
    for (uint32_t i = N_P; i < N; i++) {
        x.k[x.w[i].kvstore].links = &link;
        x.k[x.w[i].kvstore].n_links = 1;
    }
    x.w[2].queue.ms = 900;
    assert_int_equal(place(&x, &bt_sched_cache_aware).at.prefill, 2);
    x.w[2].queue.ms = 1100;
    assert_int_not_equal(place(&x, &bt_sched_cache_aware).at.prefill, 2);
}

/* Where nobody can fetch (ratio 0) the rules that would are cache-aware. */
static void test_nothing_fetched(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.c.place.fetch_ratio = 0;
    x.k[1].match_blocks = 8;
    for (uint32_t queue = 0; queue < 2000; queue += 100) {
        x.w[1].queue.ms = queue;
        struct bt_sched_plan a = place(&x, &bt_sched_cache_aware);
        struct bt_sched_plan k = place(&x, &bt_sched_kvcache), b = place(&x, &bt_sched_baton);
        assert_int_equal(a.at.prefill, k.at.prefill);
        assert_int_equal(a.at.prefill, b.at.prefill);
        assert_int_equal(k.prefix.fetch_from, BT_SCHED_NONE);
        assert_int_equal(b.prefix.fetch_tokens, 0);
    }
}

static void test_random_and_turns(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.w[0].queue.ms = 1e6; /* neither looks */
    uint32_t hits[N] = {0}, pairs[N][N] = {{0}};
    for (uint64_t i = 0; i < 8000; i++) {
        x.req.random = i * 0x9e3779b97f4a7c15ull;
        struct bt_sched_plan p = place(&x, &bt_sched_random);
        hits[p.at.prefill]++;
        hits[p.at.decode]++;
        pairs[p.at.prefill][p.at.decode]++;
    }
    for (uint32_t i = 0; i < N; i++) {
        assert_in_range(hits[i], i < N_P ? 1850 : 3800, i < N_P ? 2150 : 4200);
    }
    assert_in_range(pairs[0][4], 850, 1150); /* drawn apart from each other */
    for (uint64_t i = 0; i < 24; i++) {
        x.req.sequence = i;
        struct bt_sched_plan p = place(&x, &bt_sched_round_robin);
        assert_int_equal(p.at.prefill, i % N_P);
        assert_int_equal(p.at.decode, N_P + i % 2);
    }
    x.w[2].avoid = true; /* the next one takes its turn */
    x.req.sequence = 2;
    assert_int_equal(place(&x, &bt_sched_round_robin).at.prefill, 3);
}

static bt_sched_verdict_t decide(const struct world *x, const struct bt_sched_admission *a)
{
    struct bt_sched_plan p;
    struct bt_sched_reject rej = {0};
    bt_sched_verdict_t v = bt_sched_decide(&bt_sched_kvcache, a, &x->c, &x->s, &x->req, &p, &rej);
    assert_true(v == BT_SCHED_PLANNED ||
                (v == BT_SCHED_OVERLOADED && rej.reason != NULL &&
                 (rej.retry_after_s >= 1) == (strstr(rej.reason, "without") == NULL)));
    return v;
}

static void test_admissions(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.c.objective.ttft_ms = 1500;
    x.c.objective.tbt_ms = 30;
    const struct bt_sched_admission *const all[] = {&bt_sched_admit_none, &bt_sched_admit_late,
                                                    &bt_sched_admit_early, &bt_sched_admit_predict};
    for (int i = 0; i < 4; i++) { /* 1000 and 11 ms */
        assert_int_equal(decide(&x, all[i]), BT_SCHED_PLANNED);
    }
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 600;
    }
    for (int i = 0; i < 4; i++) { /* 1600 ms: only none does not mind */
        assert_int_equal(decide(&x, all[i]), i == 0 ? BT_SCHED_PLANNED : BT_SCHED_OVERLOADED);
    }
    world_init(&x);
    x.c.objective.tbt_ms = 30;
    x.w[4].rows.kv_tokens = x.w[5].rows.kv_tokens = 25000; /* 36 ms with this one */
    for (int i = 0; i < 4; i++) {                          /* late finds out after the prefill */
        assert_int_equal(decide(&x, all[i]), i < 2 ? BT_SCHED_PLANNED : BT_SCHED_OVERLOADED);
    }
    struct bt_sched_reject rej;
    assert_int_equal(bt_sched_admit_decode(&x.c, &x.s, &x.req, 4, &rej), BT_SCHED_OVERLOADED);
    x.w[4].rows.kv_tokens = 18000; /* 29 ms */
    assert_int_equal(bt_sched_admit_decode(&x.c, &x.s, &x.req, 4, &rej), BT_SCHED_PLANNED);
    x.c.objective.tbt_margin = 0.9; /* of 30: 27 */
    assert_int_equal(bt_sched_admit_decode(&x.c, &x.s, &x.req, 4, &rej), BT_SCHED_OVERLOADED);
}

/* Full now but empty by then: only the prediction admits; and the other way round. */
static void test_prediction(void **state)
{
    (void)state;
    static struct bt_sched_forecast f;
    struct world x;
    world_init(&x);
    x.c.objective.tbt_ms = 30;
    x.s.forecast = &f;
    bt_sched_forecast_init(&f, 100, 500, 0); /* rows last half a second, the prefill a whole one */
    x.w[4].rows.kv_tokens = x.w[5].rows.kv_tokens = 25000;
    assert_int_equal(decide(&x, &bt_sched_admit_early), BT_SCHED_OVERLOADED);
    assert_int_equal(decide(&x, &bt_sched_admit_predict), BT_SCHED_PLANNED);

    x.w[4].rows.kv_tokens = x.w[5].rows.kv_tokens = 0;
    for (int i = 0; i < 60; i++) { /* 60,000 tokens of context come out of prefill before it */
        bt_sched_forecast_note(&f, 0, 950, 1000, 500, 1);
    }
    assert_int_equal(decide(&x, &bt_sched_admit_early), BT_SCHED_PLANNED);
    assert_int_equal(decide(&x, &bt_sched_admit_predict), BT_SCHED_OVERLOADED);
}

static const struct bt_sched_room no_limit = {0};

static void test_forecast(void **state)
{
    (void)state;
    static struct bt_sched_forecast f;
    bt_sched_forecast_init(&f, 10, 1e9, 0); /* rows stay */
    for (uint32_t i = 0; i < 100; i++) {
        bt_sched_forecast_note(&f, 0, 100.0 * i, 7, 1e9, 1);
    }
    f.rows_per_ms = f.kv_per_ms = f.time_per_ms = 0; /* nobody comes after them */
    struct bt_sched_load l = {.rows = 3, .kv = 30};
    bt_sched_forecast_at(&f, &no_limit, 4955, 1, &l);
    assert_float_equal(l.rows, 3 + 50, 0.01); /* of 0, 100 .. 4900 */
    assert_float_equal(l.kv, 30 + 50 * 7, 0.1);
    for (uint32_t i = 0; i < 100; i++) { /* taken back late, when they are overdue */
        bt_sched_forecast_note(&f, 20000, 100.0 * i, 7, 1e9, -1);
    }
    l = (struct bt_sched_load){0};
    bt_sched_forecast_at(&f, &no_limit, 25000, 1, &l);
    assert_float_equal(l.rows, 0, 1e-9);
    assert_float_equal(l.kv, 0, 1e-9);
    f.life_ms = 1000;
    for (int one = 0; one < 2;
         one++) { /* a life later, or half of one if all takes twice as long */
        f.one_life = one != 0;
        for (int slow = 1; slow <= 2; slow++) {
            double stay = exp(-1.0 / slow);
            l = (struct bt_sched_load){.rows = 100};
            bt_sched_forecast_at(&f, &no_limit, 21000, slow, &l);
            assert_float_equal(l.rows, 100 * stay, 0.1);
            /* who is left of a hundred is drawn */
            assert_float_equal(l.rows_var, 100 * stay * (1 - stay), 0.5);
        }
    }
}

/* Requests that came in a burst are expected to go on coming for some seconds only, also if nobody
 * notes another row: late rows are refused by what is expected, so none might ever be noted. */
static void test_forecast_forgets(void **state)
{
    (void)state;
    static struct bt_sched_expected e;
    struct bt_sched_snapshot s = {0};
    bt_sched_expected_init(&e, 250, 10000, 0);
    for (int late = 0; late < 2; late++) {
        for (uint32_t i = 0; i < 20; i++) {
            bt_sched_expected_row(&e, late, 100.0 * i, 100.0 * i + 5000, 1000, 10000, 1);
            bt_sched_expected_row(&e, late, 100.0 * i, 100.0 * i + 5000, 1000, 10000, -1);
        }
    }
    bt_sched_expected_show(&e, 2000, &s);
    const struct bt_sched_forecast *of[] = {s.forecast, s.late_forecast};
    for (size_t i = 0; i < BT_ARRAY_LEN(of); i++) {
        struct bt_sched_load l = {0};
        bt_sched_forecast_at(of[i], &no_limit, s.now_ms + 20000, 1, &l);
        assert_true(l.rows > 5);
    }
    bt_sched_expected_show(&e, 300000, &s);
    for (size_t i = 0; i < BT_ARRAY_LEN(of); i++) {
        struct bt_sched_load l = {0};
        bt_sched_forecast_at(of[i], &no_limit, s.now_ms + 20000, 1, &l);
        assert_true(l.rows < 0.01);
    }
}

/* What prefill workers let in asks for both stages; neither is what could be in time, nor what was
 * refused. */
static void test_what_is_let_in(void **state)
{
    (void)state;
    static struct bt_sched_expected e;
    struct bt_sched_snapshot s = {0};
    bt_sched_expected_init(&e, 250, 10000, 0);
    for (uint32_t i = 0; i < 200; i++) {
        bt_sched_expected_let_in(&e, 1000.0 * i, 500, 50);
    }
    bt_sched_expected_show(&e, 200000, &s);
    assert_float_equal(bt_sched_demand_rate(s.let_in, s.now_ms, 1), 0.5, 0.05);
    assert_float_equal(bt_sched_demand_rate(s.decodes, s.now_ms, 1), 0.05, 0.005);
    assert_true(bt_sched_demand_rate(s.demand, s.now_ms, 1) == 0);
    assert_true(bt_sched_demand_rate(s.late_demand, s.now_ms, 1) == 0);
}

/* Of what comes each goes on for as long as is said of it, and a row that waits for a place does
 * not end. */
static void test_forecast_lives(void **state)
{
    (void)state;
    static struct bt_sched_forecast f;
    double left[2];
    for (int shorter = 0; shorter < 2; shorter++) {
        bt_sched_forecast_init(&f, 10, 1000, 0);
        for (int i = 0; i < 100; i++) {
            bt_sched_forecast_note(&f, 0, 1000, 10, shorter ? 100 : 1000, 1);
        }
        f.rows_per_ms = f.kv_per_ms = f.time_per_ms = 0;
        struct bt_sched_load l = {0};
        bt_sched_forecast_at(&f, &no_limit, 2000, 1, &l);
        left[shorter] = l.rows;
    }
    assert_float_equal(left[0], 100 / 2.71828, 1);
    assert_float_equal(left[1], 0, 0.1);
    bt_sched_forecast_init(&f, 10, 1000, 0);
    const struct bt_sched_room room = {.places = 50}, pages = {.kv = 500};
    for (int by_pages = 0; by_pages < 2;
         by_pages++) { /* twenty of the fifty that run end in 400 ms */
        struct bt_sched_load l = {.rows = 100, .kv = 1000};
        bt_sched_forecast_at(&f, by_pages ? &pages : &room, 400, 1, &l);
        assert_float_equal(l.rows, 80, 0.5);
        assert_float_equal(l.kv, 800, 5);
    }
    /* Where long rows have most of the context, who ends matters more. */
    double dev[2];
    for (int mixed = 0; mixed < 2; mixed++) {
        bt_sched_forecast_init(&f, 10, 1000, 0);
        for (int i = 0; i < 100; i++) {
            bt_sched_forecast_note(&f, 0, 1e6, mixed && i % 10 != 0 ? 10 : 1000, 1000, 1);
        }
        struct bt_sched_load l = {.rows = 100, .kv = mixed ? 10900 : 100000};
        bt_sched_forecast_at(&f, &no_limit, 1000, 1, &l);
        dev[mixed] = sqrt(l.kv_var) / l.kv;
    }
    assert_float_equal(dev[0], sqrt(100 * 0.3679 * 0.6321) / (100 * 0.3679), 0.01);
    assert_true(dev[1] > 2.5 * dev[0]);
}

/* Of those that have not arrived yet, who is out of prefill before this one? Nobody where all wait
 * their turn; where every other one takes a tenth of the time, half of those that arrive until a
 * second before its end. */
static void test_forecast_overtaken(void **state)
{
    (void)state;
    static struct bt_sched_forecast f;
    for (int mixed = 0; mixed < 2; mixed++) {
        bt_sched_forecast_init(&f, 100, 1e9, 0);
        double now = 0;
        struct bt_sched_load l = {0};
        for (int i = 0; i < 20000; i++) { /* long enough that old ones have faded, and all moved */
            now += 20;
            double lead = mixed && i % 2 == 0 ? 1000 : 10000;
            bt_sched_forecast_note(&f, now, now + lead, 10, 1e9, 1);
            bt_sched_forecast_note(&f, now, now + lead, 10, 1e9,
                                   -1); /* known ones are counted apart */
        }
        bt_sched_forecast_at(&f, &no_limit, now + 9900, 1, &l);
        assert_float_equal(l.rows, mixed ? 8.9 * 50 / 2 : 0, 5);
        assert_float_equal(l.kv, 10 * l.rows, 1);
    }
}

/* A decode worker takes a prompt beside its rows where prefill workers are busy, and as far as its
 * rows leave room in a step. */
static void test_mixed(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.c.mixed.step_ms = 50;
    for (uint32_t i = N_P; i < N; i++) {
        x.w[i].speed.prompt_cost = &prefill_cost;
        x.w[i].rows.running = 10;
        x.w[i].rows.kv_tokens =
            15000; /* 25 ms a step: half of it is room, so a prompt takes twice as long */
    }
    struct bt_sched_plan p = place(&x, &bt_sched_baton);
    assert_true(!p.at.both && p.at.prefill < N_P); /* idle ones are faster */
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 1700;
    }
    x.w[4].queue.ms = 300; /* another prompt is beside its rows already */
    p = place(&x, &bt_sched_baton);
    assert_true(p.at.both && p.at.prefill == 5 && p.at.decode == 5);
    assert_int_equal(p.reason, BT_SCHED_MIXED);
    struct bt_sched_candidate why[8];
    assert_int_equal(bt_sched_explain(&bt_sched_baton, &x.c, &x.s, &x.req, &p, why, 8), 8);
    assert_true(why[0].chosen && why[0].worker == 5 && why[0].ttft_ms == p.first.ms);
    /* The next prompt waits for it beside rows: it is queued as what it takes without them. */
    assert_float_equal(p.takes.alone_ms, 1000, 1);
    x.c.mixed.step_tokens = 5; /* steps take whole blocks: of 25 ms of room 20 are sure */
    assert_float_equal(place(&x, &bt_sched_baton).first.ms, 1000 * (20 + 30) / 20.0, 1);
    x.c.mixed.step_tokens = 0;
    /* Ten rows leave 0.35 of the experts to the prompt, which takes them: 2 ms a step in all. */
    const struct bt_batch_cost *without = x.w[5].speed.cost;
    struct bt_batch_cost experts = *without;
    experts.experts_ns = 2e6;
    experts.missed = 0.9;
    x.w[5].speed.cost = &experts;
    assert_float_equal(place(&x, &bt_sched_baton).first.ms, 1000 * (23 + 27) / 23.0, 1);
    x.w[5].speed.cost = without;
    assert_non_null(strstr(why[2].verdict, "no better")); /* a prefill worker, compared with it */
    /* ... as was the other decode worker: twice the 300 ms, then 2000 ms. */
    assert_true(why[6].worker == 4 && why[6].use == BT_SCHED_FOR_PREFILL && !why[6].chosen);
    assert_float_equal(why[6].ttft_ms, 2600, 1);
    assert_non_null(strstr(why[6].verdict, "no better"));
    x.w[4].rows.kv_tokens = 41000;
    p = place(&x, &bt_sched_baton);
    assert_int_equal(bt_sched_explain(&bt_sched_baton, &x.c, &x.s, &x.req, &p, why, 8), 8);
    assert_true(why[6].worker == 4 && why[6].ttft_ms < 0);
    assert_non_null(strstr(why[6].verdict, "no room for a prompt beside its rows"));
    x.w[4].rows.kv_tokens = 15000;
    p = place(&x, &bt_sched_baton);
    assert_int_equal(bt_sched_explain(&bt_sched_kvcache, &x.c, &x.s, &x.req, &p, why, 8), 7);
    assert_float_equal(p.first.ms, 2000, 1);
    x.w[5].speed.chunk_tokens =
        10; /* of a prompt at a time: a hundred steps with 25 ms for the rows */
    assert_int_equal(place(&x, &bt_sched_baton).at.prefill, 4); /* twice the 300 ms, then 2000 ms */
    x.w[5].speed.chunk_tokens = 0;
    /* What is less than a step's room has all of the step's rows beside it. */
    x.req.n_tokens = 10;
    x.w[4].queue.ms = 1700;
    x.w[0].queue.ms = 15;
    assert_int_equal(place(&x, &bt_sched_baton).at.prefill, 0); /* 15 + 10 against 25 + 10 */
    x.w[0].queue.ms = 1700;
    p = place(&x, &bt_sched_baton);
    assert_int_equal(p.at.prefill, 5);
    assert_float_equal(p.first.ms, 25 + 10, 0.1);
    x.req.n_tokens = 1000;
    x.w[4].queue.ms = 300;
    /* Steps that rows join have less room: of 50 ms 60 - 25. Rows that come over 1.7 s, one in
     * about every step, leave a third of the steps as they were. */
    x.c.mixed.gap_ms = 60;
    x.w[5].rows.own = 10;
    assert_float_equal(place(&x, &bt_sched_baton).first.ms, 2000, 1); /* nobody is on the way */
    x.w[5].rows.own = 10 + 34;
    x.w[4].queue.ms = 3000;
    x.s.forecast = NULL;
    p = place(&x, &bt_sched_baton);
    assert_true(!p.at.both || p.first.ms > 2400);
    x.w[5].rows.own = 0;
    x.w[4].queue.ms = 300;
    x.c.mixed.gap_ms = 0;
    uint32_t pages =
        x.w[5].capacity.pages_free; /* more than four tenths in use: rows would hold them longer */
    x.w[5].capacity.pages_free = (uint32_t)(0.55 * x.w[5].capacity.pages);
    x.w[4].queue.ms = 5000;
    assert_false(place(&x, &bt_sched_baton).at.both);
    x.w[5].capacity.pages_free = pages;
    x.w[4].queue.ms = 300;
    assert_true(place(&x, &bt_sched_baton).at.prefill == 5);
    x.w[5].rows.kv_tokens = 38000; /* 48 ms a step: no room */
    p = place(&x, &bt_sched_baton);
    assert_true(p.at.both &&
                p.at.prefill == 4); /* twice the 300 ms, then 2000 ms: 2600 against 2700 */
    assert_float_equal(p.first.queue_ms, 600, 1);
    x.w[4].queue.ms = 1000;
    assert_false(place(&x, &bt_sched_baton).at.both);
    x.k[0].match_blocks = 9; /* what others have is fetched to it */
    x.w[4].queue.ms = 0;
    x.c.place.work_weight = 0;
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 5000;
    }
    p = place(&x, &bt_sched_baton);
    assert_true(p.at.both && p.at.prefill == 4 && p.prefix.fetch_from == 0 &&
                p.prefix.fetch_tokens == 900);
    assert_float_equal(p.first.ms, 290, 1);
    assert_false(place(&x, &bt_sched_kvcache).at.both);
    x.c.mixed.step_ms = 0;
    assert_false(place(&x, &bt_sched_baton).at.both);
}

/* What a decode worker says of its own steps counts, not what is asked of all. */
static void test_mixed_by_worker(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.c.mixed.step_ms = 50;
    for (uint32_t i = 0; i < N; i++) {
        x.w[i].speed.prompt_cost = &prefill_cost;
        x.w[i].rows.running = i < N_P ? 0 : 10;
        x.w[i].rows.kv_tokens = i < N_P ? 0 : 15000; /* 25 ms a step */
        x.w[i].queue.ms = i < N_P ? 5000 : 0;
    }
    struct bt_sched_plan p = place(&x, &bt_sched_baton);
    assert_true(p.at.both);
    assert_float_equal(p.first.ms, 2000, 1);
    for (uint32_t i = N_P; i < N; i++) { /* three quarters of each step are the rows' */
        x.w[i].speed.mixed_step_ms = i == 5 ? 100 / 3.0 : -1;
    }
    p = place(&x, &bt_sched_baton);
    assert_true(p.at.both && p.at.prefill == 5);
    assert_float_equal(p.first.ms, 4000, 1);
    x.w[5].speed.mixed_step_ms = -1; /* nobody takes any */
    assert_false(place(&x, &bt_sched_baton).at.both);
    x.w[5].speed.mixed_step_ms = 50;
    x.c.mixed.step_ms = 0; /* nobody is asked to */
    assert_false(place(&x, &bt_sched_baton).at.both);
}

/* Rows go to the fullest decode worker that has room, so that others have none; prompts that these
 * compute are handed to it. */
static void test_packing(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.c.mixed.step_ms = 20; /* half of it is the base of a step with rows */
    x.c.objective.tbt_ms = 100;
    for (uint32_t i = N_P; i < N; i++) {
        x.w[i].speed.prompt_cost = &prefill_cost;
    }
    x.w[5].rows.running = 10;
    x.w[5].rows.kv_tokens = 1000;
    assert_true(place(&x, &bt_sched_baton).at.decode != 5); /* spread */
    x.c.mixed.pack_share = 0.5;
    struct bt_sched_plan p = place(&x, &bt_sched_baton);
    assert_true(p.at.prefill < N_P && p.at.decode == 5);
    assert_int_equal(p.reason, BT_SCHED_APART);
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 900;
    }
    p = place(&x, &bt_sched_baton); /* one without rows computes it as a prefill worker would */
    assert_true(p.at.prefill >= N_P && p.at.prefill != 5 && p.at.decode == 5 && !p.at.both);
    assert_int_equal(p.reason, BT_SCHED_SPARE);
    assert_float_equal(p.first.ms, 1000, 1);
    uint32_t m = p.at.prefill;
    x.k[x.w[m].kvstore].send_busy_ms = 1e6; /* its link is busy for longer: the row stays */
    for (uint32_t i = N_P; i < N; i++) {
        x.w[i].queue.ms = i != m && i != 5 ? 5000 : 0;
    }
    p = place(&x, &bt_sched_baton);
    assert_true(p.at.prefill == m && p.at.both);
    struct bt_sched_candidate why[2 * N];
    uint32_t n = bt_sched_explain(&bt_sched_baton, &x.c, &x.s, &x.req, &p, why, 2 * N);
    uint32_t compared = 0;
    for (uint32_t i = 0; i < n; i++) {
        compared += why[i].use == BT_SCHED_FOR_PREFILL && why[i].worker < N_P &&
                    strstr(why[i].verdict, "no better: queue") != NULL;
    }
    assert_int_equal(compared, N_P);
    x.k[x.w[m].kvstore].send_busy_ms = 0;
    assert_int_equal(place(&x, &bt_sched_baton).at.decode, 5);
    for (uint32_t i = N_P; i < N; i++) {
        x.w[i].queue.ms = 0;
    }
    x.c.mixed.step_ms = 21; /* the base is less than half of it */
    assert_true(place(&x, &bt_sched_baton).at.decode != 5);
    x.c.mixed.step_ms = 20;
    x.w[5].rows.kv_tokens = 41000; /* its step would be longer than half of the objective */
    p = place(&x, &bt_sched_baton);
    assert_true(p.at.decode != 5);
    x.w[5].rows.kv_tokens = 1000;
    x.w[5].rows.own_coming = 53; /* places: 63 and this one of 64 */
    assert_true(place(&x, &bt_sched_baton).at.decode != 5);
    x.w[5].rows.own_coming = 0;
    x.k[x.w[5].kvstore].recv_busy_ms = 1e6; /* its link */
    assert_true(place(&x, &bt_sched_baton).at.decode != 5);
    x.k[x.w[5].kvstore].recv_busy_ms = 0;
    assert_true(place(&x, &bt_sched_baton).at.decode == 5);
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 1100; /* where it waits longer nobody knows what there will be by then */
    }
    assert_true(place(&x, &bt_sched_baton).at.decode != 5);
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 0;
    }
    assert_true(place(&x, &bt_sched_baton).at.decode == 5);
    assert_true(place(&x, &bt_sched_kvcache).at.decode != 5);
    x.c.objective.ttft_ms = 40000; /* a second is safe */
    assert_true(place(&x, &bt_sched_baton).at.decode != 5);
    x.c.objective.ttft_ms = 30000;
    assert_true(place(&x, &bt_sched_baton).at.decode == 5);
    x.c.objective.tbt_ms = 0; /* how long may a step be? */
    assert_true(place(&x, &bt_sched_baton).at.decode != 5);
    x.c.objective.tbt_ms = 100;
    for (uint32_t i = N_P; i < N; i++) { /* all have rows: the others' stay where they are */
        x.w[i].rows.running = 5;
        x.w[i].rows.kv_tokens = 1000;
    }
    x.w[4].rows.running = 6;
    assert_true(place(&x, &bt_sched_baton).at.decode == 4);
}

/* Prompts beside rows keep their places longer: they give way before places are short, and what is
 * only on its way takes none yet. */
static void test_mixed_places(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_forecast f;
    world_init(&x);
    bt_sched_forecast_init(&f, 100, 1000, 0);
    x.s.forecast = &f;
    x.c.mixed.step_ms = 50;
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 5000;
    }
    for (uint32_t i = N_P; i < N; i++) {
        x.w[i].speed.prompt_cost = &prefill_cost;
        x.w[i].rows.running = 10;
        x.w[i].rows.kv_tokens = 1000;
        x.w[i].rows.own = 10 + 100; /* in prefill queues; of 64 places */
        x.w[i].rows.own_coming = 100;
        x.w[i].rows.own_coming_tokens = 100 * 100;
    }
    struct bt_sched_plan p = place(&x, &bt_sched_baton);
    assert_true(p.at.both && p.places_wanted == 0);
    for (uint32_t i = 0; i < 2 * 63; i++) { /* 63 of 64 come to each, and of its 10 two are left */
        bt_sched_forecast_note(&f, 0, 5000, 100, 1000, 1);
    }
    p = place(&x, &bt_sched_baton);
    assert_true(!p.at.both && p.places_wanted == 65);
    x.w[0].queue.ms = 0; /* places are not what keeps it away */
    p = place(&x, &bt_sched_baton);
    assert_true(p.at.prefill == 0 && p.places_wanted == 0);
    x.w[0].queue.ms = 5000;
    for (uint32_t i = 0; i < 2 * 10; i++) {
        bt_sched_forecast_note(&f, 0, 5000, 100, 1000, -1);
    }
    assert_true(place(&x, &bt_sched_baton).at.both);
    x.w[4].rows.waiting = x.w[5].rows.waiting = 1; /* rows wait for pages */
    assert_false(place(&x, &bt_sched_baton).at.both);
}

/* What was learned under overload must not keep an idle cluster idle: nothing would be learned
 * anew. */
static void test_idle_workers_are_tried(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    static const struct bt_sched_admission *const all[] = {
        &bt_sched_admit_early, &bt_sched_admit_predict, &bt_sched_admit_priced};
    struct bt_sched_forecast f;
    bt_sched_forecast_init(&f, 100, 1000, 0);
    for (size_t a = 0; a < BT_ARRAY_LEN(all); a++) {
        world_init(&x);
        x.s.forecast = &f;
        x.c.objective.ttft_ms = 2000;
        x.c.objective.tbt_ms = 50;
        for (uint32_t i = 0; i < N; i++) {
            x.w[i].learned = (struct bt_sched_learned){.overhead_ms = 60000, .tail = 100};
        }
        assert_int_equal(bt_sched_decide(&bt_sched_baton, all[a], &x.c, &x.s, &x.req, &plan, &rej),
                         BT_SCHED_PLANNED);
        for (uint32_t i = 0; i < N; i++) {
            x.w[i].queue.ms = 1; /* somebody is being tried */
        }
        assert_int_equal(bt_sched_decide(&bt_sched_baton, all[a], &x.c, &x.s, &x.req, &plan, &rej),
                         BT_SCHED_OVERLOADED);
        for (uint32_t i = 0; i < N; i++) {
            x.w[i].queue.ms = 0;
            x.w[i].rows.running = i >= N_P;
        }
        if (a > 0) {
            continue; /* by then the row that is there has ended */
        }
        assert_int_equal(bt_sched_decide(&bt_sched_baton, all[a], &x.c, &x.s, &x.req, &plan, &rej),
                         BT_SCHED_OVERLOADED);
    }
}

/* The longer the queue, the shorter a prefill must be; nobody waits: anybody who meets the
 * objective. */
static void test_priced(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    world_init(&x);
    x.c.objective.ttft_ms = 4000;
    x.req.n_tokens = 4000;
    x.w[4].capacity.pages = x.w[5].capacity.pages = 0;
    assert_int_equal(
        bt_sched_decide(&bt_sched_kvcache, &bt_sched_admit_priced, &x.c, &x.s, &x.req, &plan, &rej),
        BT_SCHED_PLANNED);
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 2000; /* a second more than a burst: of the 2000 left three quarters */
    }
    const struct {
        uint32_t tokens;
        bool in;
    } cases[] = {{1400, true}, {1500, true}, {1600, false}, {1900, false}};
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        x.req.n_tokens = cases[i].tokens;
        bt_sched_verdict_t v = bt_sched_decide(&bt_sched_kvcache, &bt_sched_admit_priced, &x.c,
                                               &x.s, &x.req, &plan, &rej);
        assert_int_equal(v, cases[i].in ? BT_SCHED_PLANNED : BT_SCHED_OVERLOADED);
        if (!cases[i].in) {
            assert_true(rej.retry_after_s >= 1 && rej.retry_after_s <= 2);
            assert_float_equal(rej.objective_ms, 1500, 1e-6);
            assert_int_equal(rej.miss, BT_SCHED_MISS_PRICE);
            assert_false(rej.by_decode);
        }
        assert_int_equal(bt_sched_decide(&bt_sched_kvcache, &bt_sched_admit_predict, &x.c, &x.s,
                                         &x.req, &plan, &rej),
                         BT_SCHED_PLANNED);
    }
    x.req.waited_ms = 1000; /* what it has waited is gone */
    x.req.n_tokens = 800;
    assert_int_equal(
        bt_sched_decide(&bt_sched_kvcache, &bt_sched_admit_priced, &x.c, &x.s, &x.req, &plan, &rej),
        BT_SCHED_OVERLOADED);
}

/* Where all are short beside the objective, the longer the queue the less of the work that is asked
 * for comes in, the shortest first. */
static void test_priced_by_demand(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    struct bt_sched_demand demand;
    world_init(&x);
    x.c.objective.ttft_ms = 30000;
    x.c.price.demand = 1;
    x.s.demand = &demand;
    x.w[4].capacity.pages = x.w[5].capacity.pages = 0;
    bt_sched_demand_init(&demand, 60000);
    for (uint32_t i = 0; i < 500; i++) { /* of 5500 ms those up to 700 have 2800 */
        bt_sched_demand_note(&demand, 0, 100 * (1 + i % 10));
    }
    for (uint32_t queue = 500; queue <= 30500; queue += 15000) {
        for (uint32_t i = 0; i < N_P; i++) {
            x.w[i].queue.ms = queue; /* 500: a burst; 15500: a little more than half may come in */
        }
        for (x.req.n_tokens = 100; x.req.n_tokens <= 1000; x.req.n_tokens += 100) {
            bt_sched_verdict_t v = bt_sched_decide(&bt_sched_kvcache, &bt_sched_admit_priced, &x.c,
                                                   &x.s, &x.req, &plan, &rej);
            bool in = queue == 500 || (queue == 15500 && x.req.n_tokens <= 700);
            assert_int_equal(v, in ? BT_SCHED_PLANNED : BT_SCHED_OVERLOADED);
            if (in) {
                assert_float_equal(plan.takes.compute_ms, x.req.n_tokens, 1e-6);
            } else {
                assert_float_equal(rej.compute_ms, x.req.n_tokens, 1e-6);
                assert_true(rej.retry_after_s >= 1 && rej.retry_after_s <= 30);
            }
            if (!in && queue == 15500) {
                assert_int_equal(rej.miss, BT_SCHED_MISS_PRICE);
                assert_true(rej.objective_ms > 550 && rej.objective_ms <= 800);
            }
        }
    }
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 15500;
    }
    x.req.n_tokens = 1000;
    x.c.price.demand = 0;
    assert_int_equal(
        bt_sched_decide(&bt_sched_kvcache, &bt_sched_admit_priced, &x.c, &x.s, &x.req, &plan, &rej),
        BT_SCHED_PLANNED);
}

/* Rows that would find no pages when their prefill ends are refused now; rows on their way count
 * for the choice of the decode worker. */
static void test_pages_then(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    struct bt_sched_forecast f;
    world_init(&x);
    bt_sched_forecast_init(&f, 100, 10000, 0);
    x.s.forecast = &f;
    x.c.objective.tbt_ms = 500;
    for (uint32_t i = N_P; i < N; i++) {
        x.w[i].rows.running = 9;
        x.w[i].rows.kv_tokens = 93000; /* of 100,000 */
        x.w[i].capacity.pages_free = 70;
    }
    x.req.n_tokens = 100;
    assert_int_equal(
        bt_sched_decide(&bt_sched_baton, &bt_sched_admit_predict, &x.c, &x.s, &x.req, &plan, &rej),
        BT_SCHED_PLANNED);
    for (uint32_t k = 0; k < 20; k++) { /* eight thousand more tokens are about to land */
        bt_sched_forecast_note(&f, 0, 50, 400, 10000, 1);
    }
    assert_int_equal(
        bt_sched_decide(&bt_sched_baton, &bt_sched_admit_predict, &x.c, &x.s, &x.req, &plan, &rej),
        BT_SCHED_OVERLOADED);
    assert_int_equal(rej.miss, BT_SCHED_MISS_TBT);
    assert_true(rej.by_decode);
    assert_true(rej.predicted_ms >= 500 && rej.retry_after_s >= 1);
    for (uint32_t i = N_P; i < N; i++) { /* but for rows that would make way */
        x.w[i].rows.yield = 5;
        x.w[i].rows.yield_pages = 500;
    }
    assert_int_equal(
        bt_sched_decide(&bt_sched_baton, &bt_sched_admit_predict, &x.c, &x.s, &x.req, &plan, &rej),
        BT_SCHED_PLANNED);
    for (uint32_t i = N_P; i < N;
         i++) { /* nobody is there now: he may come back later all the same */
        x.w[i].rows.running = x.w[i].rows.yield = x.w[i].rows.yield_pages = 0;
        x.w[i].rows.kv_tokens = 0;
    }
    for (uint32_t k = 0; k < 200; k++) {
        bt_sched_forecast_note(&f, 0, 50, 1000, 10000, 1);
    }
    assert_int_equal(
        bt_sched_decide(&bt_sched_baton, &bt_sched_admit_predict, &x.c, &x.s, &x.req, &plan, &rej),
        BT_SCHED_OVERLOADED);
    assert_true(rej.retry_after_s >= 1 && strstr(rej.reason, "without") == NULL);
    /* All of an empty worker's pages may go to one. */
    world_init(&x);
    bt_sched_forecast_init(&f, 100, 10000, 0);
    x.s.forecast = &f;
    x.c.objective.tbt_ms = 500;
    x.req.n_tokens = 99 * 1000;
    for (int priced = 0; priced < 2; priced++) {
        const struct bt_sched_admission *a =
            priced ? &bt_sched_admit_priced : &bt_sched_admit_predict;
        assert_int_equal(bt_sched_decide(&bt_sched_baton, a, &x.c, &x.s, &x.req, &plan, &rej),
                         BT_SCHED_PLANNED);
    }
    /* Worker 4 has fewer rows, but many are on their way to it. */
    world_init(&x);
    x.s.forecast = &f;
    x.w[4].rows.running = 5;
    x.w[5].rows.running = 8;
    x.w[4].rows.kv_tokens = x.w[5].rows.kv_tokens = 8000;
    assert_int_equal(place(&x, &bt_sched_baton).at.decode, 4);
    x.w[4].rows.own = 30;
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 5000;
    }
    assert_int_equal(place(&x, &bt_sched_baton).at.decode, 5);
    /* As many rows come to both, the longer ones to worker 5; that 4 is full now is over by then.
     */
    x.w[5].rows.own = 33;
    x.w[4].rows.own_coming = x.w[5].rows.own_coming = 25;
    x.w[4].rows.own_coming_tokens = 25 * 1000;
    x.w[5].rows.own_coming_tokens = 25 * 3000;
    x.w[4].capacity.pages_free = 0;
    x.w[4].rows.waiting = 1;
    assert_int_equal(place(&x, &bt_sched_baton).at.decode, 4);
    x.w[4].rows.own_coming_tokens = 25 * 5000;
    assert_int_equal(place(&x, &bt_sched_baton).at.decode, 5);
}

/* The fuller decode workers will be, the less a row may take of them; where all take as much, only
 * who finds no room is refused. */
static void test_priced_decode(void **state)
{
    (void)state;
    /* Of what is asked for a fifth each is in prompts of 100, 200 ... 1600 tokens. Of 1000 pages
     * 950 are lent out: with 850 in use 35 % of it comes in, with 930 7 %. */
    static const struct {
        uint32_t used, most[2]; /* different ones, all alike */
    } cases[] = {{500, {1600, 1600}}, {850, {200, 1600}}, {930, {100, 1600}}, {960, {0, 0}}};
    for (int alike = 0; alike < 2; alike++) {
        for (size_t u = 0; u < BT_ARRAY_LEN(cases); u++) {
            struct world x;
            struct bt_sched_plan plan;
            struct bt_sched_reject rej;
            struct bt_sched_forecast f;
            struct bt_sched_demand demand;
            world_init(&x);
            bt_sched_forecast_init(&f, 100, 1e6, 0);
            bt_sched_demand_init(&demand, 60000);
            x.s.forecast = &f;
            x.s.decodes = &demand;
            x.c.objective.tbt_ms = 5000;
            x.req.max_new = 1000;
            x.req.mean_new = 100;
            x.c.price.demand = 1;
            for (uint32_t i = N_P; i < N; i++) {
                x.w[i].rows.running = 9;
                x.w[i].rows.kv_tokens = 100 * cases[u].used;
                x.w[i].capacity.pages_free = 1000 - cases[u].used;
                x.w[i].capacity.slots = alike ? 20 : 10000; /* all take a twentieth of a worker */
            }
            for (uint32_t n = 1; n <= 16; n *= 2) {
                for (uint32_t k = 0; k < 16 / n; k++) {
                    bt_sched_demand_note(&demand, 0, alike ? 500 : 10 * n + 5);
                }
            }
            uint32_t most = 0;
            for (x.req.n_tokens = 1600; x.req.n_tokens >= 100 && most == 0; x.req.n_tokens /= 2) {
                if (bt_sched_decide(&bt_sched_baton, &bt_sched_admit_priced, &x.c, &x.s, &x.req,
                                    &plan, &rej) == BT_SCHED_PLANNED) {
                    most = x.req.n_tokens;
                    assert_float_equal(plan.takes.decode_work, alike ? 500 : (most + 50) / 10.0,
                                       1e-6);
                    continue;
                }
                assert_int_equal(rej.verdict, BT_SCHED_OVERLOADED);
                assert_true(rej.retry_after_s >= 1);
                if (cases[u].used < 950) {
                    assert_int_equal(rej.miss, BT_SCHED_MISS_PRICE);
                    assert_true(rej.predicted_ms == 0 && rej.decode_work > 0);
                }
            }
            assert_int_equal(most, cases[u].most[alike]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_live_rows),
        cmocka_unit_test(test_measured_link),
        cmocka_unit_test(test_nothing_fetched),
        cmocka_unit_test(test_random_and_turns),
        cmocka_unit_test(test_admissions),
        cmocka_unit_test(test_prediction),
        cmocka_unit_test(test_forecast),
        cmocka_unit_test(test_forecast_forgets),
        cmocka_unit_test(test_what_is_let_in),
        cmocka_unit_test(test_forecast_lives),
        cmocka_unit_test(test_forecast_overtaken),
        cmocka_unit_test(test_mixed),
        cmocka_unit_test(test_packing),
        cmocka_unit_test(test_mixed_places),
        cmocka_unit_test(test_mixed_by_worker),
        cmocka_unit_test(test_priced),
        cmocka_unit_test(test_priced_by_demand),
        cmocka_unit_test(test_pages_then),
        cmocka_unit_test(test_priced_decode),
        cmocka_unit_test(test_idle_workers_are_tried),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
