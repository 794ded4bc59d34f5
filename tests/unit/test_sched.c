/* The placement policy: choices, exclusions, rejections, ties, replay of recorded snapshots. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/policy/sched/sched.h"

static const struct bt_sched_params defaults = {
    .prior.prefill_tokens_per_s = 1000, .prior.step_ms = 20, .prior.link_bytes_per_s = 1e9};

/* Two nodes of one prefill and one decode worker each: workers 0 P/n0, 1 P/n1, 2 D/n0, 3 D/n1. */
struct world {
    struct bt_sched_worker w[8];
    struct bt_sched_kvstore k[4];
    struct bt_sched_snapshot s;
    struct bt_sched_request req;
};

static struct bt_sched_worker worker(bool prefill, uint32_t kvstore)
{
    return (struct bt_sched_worker){.kvstore = kvstore,
                                    .prefill = prefill,
                                    .decode = !prefill,
                                    .capacity.pages = 1000,
                                    .capacity.pages_free = 1000,
                                    .capacity.slots = 16,
                                    .capacity.context_tokens = 4096};
}

static void world_init(struct world *x)
{
    memset(x, 0, sizeof(*x));
    x->w[0] = worker(true, 0);
    x->w[1] = worker(true, 1);
    x->w[2] = worker(false, 0);
    x->w[3] = worker(false, 1);
    for (uint32_t i = 0; i < 2; i++) {
        x->k[i] = (struct bt_sched_kvstore){.slots_total = 1000, .slots_free = 1000};
    }
    x->s = (struct bt_sched_snapshot){
        .workers = x->w, .n_workers = 4, .kvstores = x->k, .n_kvstores = 2};
    x->req = (struct bt_sched_request){
        .n_tokens = 1000, .max_new = 100, .block_tokens = 16, .token_bytes = 1000, .random = 1};
}

static struct bt_sched_plan place(struct world *x, const struct bt_sched_params *c)
{
    struct bt_sched_plan p;
    struct bt_sched_reject r;
    memset(&p, 0xee, sizeof(p));
    assert_int_equal(bt_sched_cache_aware.place(c, &x->s, &x->req, &p, &r), BT_SCHED_PLANNED);
    return p;
}

static struct bt_sched_reject rejected(struct world *x, const struct bt_sched_params *c,
                                       bt_sched_verdict_t want)
{
    struct bt_sched_plan p, untouched;
    struct bt_sched_reject r = {0};
    memset(&p, 0xee, sizeof(p));
    memset(&untouched, 0xee, sizeof(untouched));
    assert_int_equal(
        bt_sched_decide(&bt_sched_cache_aware, &bt_sched_admit_early, c, &x->s, &x->req, &p, &r),
        want);
    assert_int_equal(r.verdict, want);
    assert_non_null(r.reason);
    assert_memory_equal(&p, &untouched, sizeof(p)); /* outputs only on success */
    return r;
}

static void test_apart(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    struct bt_sched_plan p = place(&x, &defaults);
    assert_false(p.at.both);
    assert_true(x.w[p.at.prefill].prefill);
    assert_true(x.w[p.at.decode].decode);
    assert_int_equal(p.at.kv_prefill, x.w[p.at.prefill].kvstore);
    assert_int_equal(p.at.kv_decode, x.w[p.at.decode].kvstore);
    assert_int_equal(p.reason, BT_SCHED_APART);
    assert_int_equal(p.prefix.cached_tokens, 0);
    assert_true(p.first.ms > 999 && p.first.ms < 1001); /* 1000 tokens at the prior's speed */
    assert_true(p.gaps.ms > 19 && p.gaps.ms < 21);
}

static void test_cached_prefix_wins(void **state)
{
    (void)state;
    struct world x;
    for (uint32_t holder = 0; holder < 2; holder++) {
        world_init(&x);
        x.k[holder].match_blocks = 50;
        for (uint64_t seed = 0; seed < 32; seed++) {
            x.req.random = seed;
            struct bt_sched_plan p = place(&x, &defaults);
            assert_int_equal(p.at.prefill, holder);
            assert_int_equal(p.prefix.cached_tokens, 800);
            assert_true(p.first.ms > 199 && p.first.ms < 201);
        }
    }
}

/* A few tokens share a step with a long prompt's next chunk and do not wait for all of it. */
static void test_a_short_prompt_shares_a_step(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 5e6, .token_ns = BT_BATCH_TOKEN_NS(2e5)};
    struct world x;
    world_init(&x);
    for (uint32_t i = 0; i < 2; i++) {
        x.w[i].speed.cost = &cost;
        x.w[i].speed.chunk_tokens = 128;
        x.w[i].queue.ms = i == 0 ? 306 : 100;
    }
    /* Ten chunks of 30.6 ms on worker 0, of which the first is under way for 10. */
    struct bt_batch_seq seq = {.len = 1280, .chunk_tokens = 128, .kind = BT_BATCH_PROMPT};
    struct bt_batch b = {
        .lim = {.max_rows = 2048, .block_tokens = 16}, .seqs = &seq, .n = 1, .cost = &cost};
    struct bt_batch_row row = {.n = 128};
    struct bt_batch_ahead ahead;
    bt_batch_ahead(&b, &row, 1, 128, &ahead);
    x.w[0].queue.ahead = &ahead;
    x.w[0].queue.ahead_past_ms = 10;
    x.req.n_tokens = 16; /* 3.2 ms beside others, 8.2 alone */
    struct bt_sched_plan p = place(&x, &defaults);
    assert_int_equal(p.at.prefill, 0);
    assert_true(fabs(p.first.queue_ms - 20.6) < 1e-6 && fabs(p.first.prefill_ms - 8.2) < 1e-6);
    assert_true(fabs(p.first.beside_ms - 25.6) < 1e-6);
    assert_true(fabs(p.first.ms - (20.6 + 30.6 + 3.2)) < 1e-6);
    x.req.n_tokens = 100; /* 20 and 25: those before it would lose more than it gains */
    p = place(&x, &defaults);
    assert_int_equal(p.at.prefill, 1);
    assert_true(p.first.queue_ms == 100 && p.first.beside_ms == 0);
    x.req.n_tokens = 16;
    x.w[0].queue.ahead_past_ms =
        40; /* nobody has looked since: the next step is half of one away */
    p = place(&x, &defaults);
    assert_true(p.at.prefill == 0 && fabs(p.first.queue_ms - 15.3) < 1e-6);
}

/* A short answer's time between tokens is the gap in which it is handed over; admission does not
 * count that: another's end makes it no shorter. */
static void test_the_gap_of_the_hand_off(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    for (int i = 2; i < 4; i++) {
        x.w[i].learned.land_ms = 50;
    }
    x.w[2].rows.running = x.w[3].rows.running = 1;
    x.req.likely_new = 3;
    struct bt_sched_params c = defaults;
    c.objective.tbt_ms = 30;
    struct bt_sched_plan p = place(&x, &c);
    assert_true(p.gaps.ms == 70 && p.gaps.tail_ms == 20);
    struct bt_sched_reject r;
    assert_int_equal(
        bt_sched_decide(&bt_sched_cache_aware, &bt_sched_admit_early, &c, &x.s, &x.req, &p, &r),
        BT_SCHED_PLANNED);
    x.req.likely_new = 71; /* one of the longest seven gaps */
    p = place(&x, &c);
    assert_true(p.gaps.ms > 27 && p.gaps.ms < 28);
}

/* Rows that decode for less time than the prompt takes are mostly gone when it is computed, and so
 * are those that come before it. */
static void test_the_step_when_the_prompt_is_computed(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 1e6, .token_ns = BT_BATCH_TOKEN_NS(1e6)};
    struct world x;
    world_init(&x);
    for (int i = 2; i < 4; i++) {
        x.w[i].speed.cost = &cost;
        x.w[i].rows.running = 4;
        x.w[i].rows.landing = 5;
    }
    struct bt_sched_plan p = place(&x, &defaults); /* nobody's life is known: all of them */
    assert_true(fabs(p.gaps.step_ms - 11) < 1e-6);
    for (int i = 2; i < 4; i++) { /* in a second: one of five is there then */
        bt_sched_learn_life(&x.w[i].learned, 200);
    }
    p = place(&x, &defaults);
    assert_true(p.gaps.step_ms > 3 && p.gaps.step_ms < 3.05 && p.gaps.tail_ms == p.gaps.step_ms);
    for (int i = 2; i < 4; i++) { /* they stay */
        x.w[i].learned.life_ms = 1e6;
    }
    p = place(&x, &defaults);
    assert_true(p.gaps.step_ms > 10.9 && p.gaps.step_ms < 11);
    x.w[2].rows.running = x.w[3].rows.running = 20; /* more than places: they take turns */
    assert_true(place(&x, &defaults).gaps.step_ms > 27);
}

/* A holder with a long queue loses to a free worker that computes everything. */
static void test_queue_beats_cache(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.k[0].match_blocks = 50;
    x.w[0].queue.tokens = 700; /* 0.7 + 0.2 s: still better than 1 s */
    assert_int_equal(place(&x, &defaults).at.prefill, 0);
    x.w[0].queue.tokens = 900; /* 0.9 + 0.2 s */
    assert_int_equal(place(&x, &defaults).at.prefill, 1);
    /* What this conductor has sent since the heartbeat counts as well. */
    x.w[0].queue.tokens = 0;
    x.w[0].queue.own_tokens = 900;
    assert_int_equal(place(&x, &defaults).at.prefill, 1);
    /* A faster worker has a shorter queue in time. */
    x.w[0].speed.prefill_tokens_per_s = 10000;
    assert_int_equal(place(&x, &defaults).at.prefill, 0);
}

static void test_whole_prompt_cached(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.req.n_tokens = 64;
    x.k[0].match_blocks = 4; /* all of it: the last block is computed again for its last token */
    assert_int_equal(place(&x, &defaults).prefix.cached_tokens, 48);
    x.req.n_tokens = 1;
    x.k[0].match_blocks = 0;
    assert_int_equal(place(&x, &defaults).prefix.cached_tokens, 0);
}

static void test_decode_least_load(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.w[2].rows.running = 3;
    assert_int_equal(place(&x, &defaults).at.decode, 3);
    x.w[3].rows.running = 5;
    assert_int_equal(place(&x, &defaults).at.decode, 2);
    x.w[2].rows.own = 9; /* sent, not yet in a heartbeat */
    assert_int_equal(place(&x, &defaults).at.decode, 3);
    world_init(&x);
    x.w[2].capacity.pages_free = 10; /* nearly full of pages, though idle in rows */
    assert_int_equal(place(&x, &defaults).at.decode, 3);
    world_init(&x);
    x.w[3].rows.waiting = 1; /* a queue there already */
    x.w[2].rows.running = 8;
    assert_int_equal(place(&x, &defaults).at.decode, 2);
}

/* Rows of lower classes make way where there is no room beside them, and only there. */
static void test_decode_among_lower_classes(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.w[2].rows.running = x.w[2].rows.yield = 16; /* full of lower classes */
    x.w[3].rows.running = 16;                     /* of others */
    struct bt_sched_plan p = place(&x, &defaults);
    assert_int_equal(p.at.decode, 2);
    assert_true(p.gaps.step_ms == 20); /* it has not to take turns with anybody */
    x.w[3].rows.running = 12;          /* room beside others: nobody has to go */
    assert_int_equal(place(&x, &defaults).at.decode, 3);
    x.w[3].rows.waiting = 1; /* ... which somebody waits for already */
    assert_int_equal(place(&x, &defaults).at.decode, 2);
    world_init(&x);
    x.w[2].rows.running = x.w[3].rows.running = 8;
    x.w[2].capacity.pages_free = x.w[3].capacity.pages_free = 0;
    x.w[3].rows.yield = 4;
    x.w[3].rows.yield_pages = 500;
    assert_int_equal(place(&x, &defaults).at.decode, 3);
    x.w[3].rows.yield_pages = 50; /* 69 are needed: not enough, and not more than the others' */
    x.w[2].rows.yield = 4;
    x.w[2].rows.yield_pages = 60;
    p = place(&x, &defaults);
    assert_int_equal(p.at.decode, 2);
    assert_true(p.gaps.step_ms > 20);
}

static void test_avoid(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.w[0].avoid = true;
    x.w[3].avoid = true;
    for (uint64_t seed = 0; seed < 32; seed++) {
        x.req.random = seed;
        struct bt_sched_plan p = place(&x, &defaults);
        assert_int_equal(p.at.prefill, 1);
        assert_int_equal(p.at.decode, 2);
    }
    x.k[1].avoid = true; /* its workers go with it: only avoided ones are left for the prefill */
    struct bt_sched_plan p = place(&x, &defaults);
    assert_int_equal(p.at.decode, 2);
    x.w[2].avoid = x.k[0].avoid = true;
    x.w[1].avoid = true;
    p = place(&x, &defaults); /* everybody has failed before: then one of them all the same */
    assert_true(x.w[p.at.prefill].prefill && x.w[p.at.decode].decode);
}

static void test_one_role_left(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.s.n_workers = 2; /* prefill workers only */
    struct bt_sched_plan p = place(&x, &defaults);
    assert_true(p.at.both);
    assert_int_equal(p.reason, BT_SCHED_NO_DECODE_WORKER);
    world_init(&x);
    x.w[0].kvstore = x.w[1].kvstore = BT_SCHED_NONE; /* there, but of no use */
    p = place(&x, &defaults);
    assert_true(p.at.both);
    assert_true(p.at.prefill >= 2);
    assert_int_equal(p.reason, BT_SCHED_NO_PREFILL_WORKER);
}

static void test_same_node(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.w[1] = x.w[2]; /* one prefill, one decode, both on node 0 */
    x.s.n_workers = 2;
    struct bt_sched_plan p = place(&x, &defaults);
    assert_false(p.at.both);
    assert_int_equal(p.at.kv_prefill, p.at.kv_decode);
    assert_false(p.prefix.keep);
}

static void test_keep(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.s.n_workers = 4;
    x.w[1] = x.w[0];
    x.w[2] = x.w[3]; /* prefill on node 0, decode on node 1 */
    assert_true(place(&x, &defaults).prefix.keep);
    x.k[1].slots_free = 500; /* less than half would be free */
    assert_false(place(&x, &defaults).prefix.keep);
}

static void test_rejections(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.s.n_workers = 0;
    assert_true(rejected(&x, &defaults, BT_SCHED_NO_DECODE).retry_after_s > 0);
    world_init(&x);
    for (uint32_t i = 0; i < 4; i++) {
        x.w[i].kvstore = BT_SCHED_NONE;
    }
    assert_true(rejected(&x, &defaults, BT_SCHED_NO_KVSTORE).retry_after_s > 0);
    world_init(&x);
    x.req.n_tokens = 4097; /* beyond every context */
    assert_int_equal(rejected(&x, &defaults, BT_SCHED_TOO_LARGE).retry_after_s, 0);
    world_init(&x);
    x.w[2].capacity.pages = x.w[3].capacity.pages = 10; /* of those that decode */
    struct bt_sched_reject r = rejected(&x, &defaults, BT_SCHED_TOO_LARGE);
    assert_non_null(strstr(r.reason, "engine.pages"));
    assert_int_equal(r.fits_tokens, 10 * x.req.block_tokens);
    x.w[2].capacity.context_tokens = x.w[3].capacity.context_tokens = 100;
    r = rejected(&x, &defaults, BT_SCHED_TOO_LARGE);
    assert_non_null(strstr(r.reason, "context"));
    assert_int_equal(r.fits_tokens, 100);
}

/* A hand-off needs all of a prompt's KV in both slabs. Where none is large enough one worker does
 * both, and only a part goes through its slab. */
static void test_larger_than_the_slab(void **state)
{
    struct world x;
    (void)state;
    world_init(&x);
    x.k[0].slots_total = x.k[1].slots_total = 62; /* 63 blocks */
    struct bt_sched_plan p = place(&x, &defaults);
    assert_true(p.at.both && p.at.prefill == p.at.decode && p.at.kv_prefill == p.at.kv_decode);
    assert_int_equal(p.reason, BT_SCHED_LARGER_THAN_SLAB);
    assert_int_equal(p.prefix.grant_tokens, 31 * x.req.block_tokens);
    /* What is cached comes piece by piece where the grant ends: it goes there, even if the worker
     * has more to do, and all of it counts. */
    for (uint32_t k = 0; k < 2; k++) {
        x.k[k].match_blocks = 50;
        x.k[1 - k].match_blocks = 0;
        for (uint32_t w = 2; w < 4; w++) {
            x.w[w].rows.running = x.w[w].kvstore == k ? 10 : 0;
        }
        p = place(&x, &defaults);
        assert_int_equal(p.at.kv_decode, k);
        assert_int_equal(p.prefix.cached_tokens, 50 * x.req.block_tokens);
    }
    world_init(&x);
    x.k[0].slots_total = x.k[1].slots_total = 62;
    x.k[1].slots_total = 63;
    p = place(&x, &defaults);
    assert_int_equal(p.at.prefill, 1);
    assert_int_equal(p.prefix.grant_tokens, 0);
    x.k[0].slots_total = x.k[1].slots_total = 1;
    assert_int_equal(place(&x, &defaults).prefix.grant_tokens, x.req.block_tokens);
}

static void test_objectives(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    struct bt_sched_params c = defaults;
    c.objective.ttft_ms = 1100;
    assert_true(place(&x, &c).first.ms <= 1100);
    x.w[0].queue.tokens = x.w[1].queue.tokens = 5000;
    struct bt_sched_reject r = rejected(&x, &c, BT_SCHED_OVERLOADED);
    assert_int_equal(r.retry_after_s, 5); /* 6 s predicted, 1.1 s wanted */
    world_init(&x);
    c = defaults;
    c.objective.tbt_ms = 10; /* below one step: a row's end may help, or there is no row */
    x.w[2].rows.running = x.w[3].rows.running = 4;
    assert_true(rejected(&x, &c, BT_SCHED_OVERLOADED).retry_after_s >= 1);
    x.w[2].rows.running = x.w[3].rows.running = 0;
    assert_int_equal(rejected(&x, &c, BT_SCHED_OVERLOADED).retry_after_s, 0);
    c = defaults; /* computing alone takes longer: no time is the right one, with a queue and
                     without */
    c.objective.ttft_ms = 100;
    for (uint32_t queued = 0; queued <= 5000; queued += 5000) {
        x.w[0].queue.tokens = x.w[1].queue.tokens = queued;
        r = rejected(&x, &c, BT_SCHED_OVERLOADED);
        assert_int_equal(r.retry_after_s, 0);
        assert_non_null(strstr(r.reason, "without a queue"));
    }
}

static void test_ties(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    for (uint32_t i = 0; i < 8; i++) { /* eight equal prefill workers, one decode */
        x.w[i] = worker(true, 0);
    }
    x.w[7] = worker(false, 1);
    x.s.n_workers = 8;
    uint32_t hits[8] = {0};
    for (uint64_t seed = 0; seed < 7000; seed++) {
        x.req.random = seed * 0x9e3779b97f4a7c15ull;
        struct bt_sched_plan p = place(&x, &defaults), again = place(&x, &defaults);
        assert_memory_equal(&p, &again, sizeof(p)); /* decided by the arguments alone */
        hits[p.at.prefill]++;
    }
    for (uint32_t i = 0; i < 7; i++) {
        assert_in_range(hits[i], 800, 1200);
    }
}

static void test_names(void **state)
{
    (void)state;
    assert_ptr_equal(bt_sched_policy_find("cache-aware"), &bt_sched_cache_aware);
    assert_ptr_equal(bt_sched_policy_find("least-load"), &bt_sched_least_load);
    assert_ptr_equal(bt_sched_policy_find("kvcache"), &bt_sched_kvcache);
    assert_null(bt_sched_policy_find("cache"));
    assert_ptr_equal(bt_sched_admission_find("predict"), &bt_sched_admit_predict);
    assert_null(bt_sched_admission_find("earl"));
    struct world x;
    world_init(&x);
    x.k[0].match_blocks = 50;
    x.w[0].queue.tokens = 1; /* the baseline sees the queue only */
    struct bt_sched_plan p;
    struct bt_sched_reject r;
    assert_int_equal(bt_sched_least_load.place(&defaults, &x.s, &x.req, &p, &r), BT_SCHED_PLANNED);
    assert_int_equal(p.at.prefill, 1);
}

/* A recorded decision: two prefill workers of different speed, one warm and busy; three decode
 * workers, one avoided. Must come out the same for ever, or the policy has changed. */
static void test_replay(void **state)
{
    (void)state;
    static const struct bt_sched_worker w[] = {
        {.kvstore = 0,
         .prefill = true,
         .capacity.pages = 512,
         .capacity.pages_free = 100,
         .capacity.slots = 64,
         .queue.tokens = 3000,
         .speed.prefill_tokens_per_s = 8000,
         .capacity.context_tokens = 8192},
        {.kvstore = 1,
         .prefill = true,
         .capacity.pages = 512,
         .capacity.pages_free = 512,
         .capacity.slots = 64,
         .speed.prefill_tokens_per_s = 5000,
         .capacity.context_tokens = 8192},
        {.kvstore = 1,
         .decode = true,
         .capacity.pages = 512,
         .capacity.pages_free = 300,
         .capacity.slots = 64,
         .rows.running = 12,
         .speed.step_ms = 9,
         .capacity.context_tokens = 8192},
        {.kvstore = 2,
         .decode = true,
         .capacity.pages = 512,
         .capacity.pages_free = 400,
         .capacity.slots = 64,
         .rows.running = 10,
         .speed.step_ms = 8,
         .capacity.context_tokens = 8192},
        {.kvstore = 2,
         .decode = true,
         .avoid = true,
         .capacity.pages = 512,
         .capacity.pages_free = 512,
         .capacity.slots = 64,
         .capacity.context_tokens = 8192},
    };
    static const struct bt_sched_kvstore k[] = {
        {.slots_total = 4096, .slots_free = 10, .match_blocks = 30},
        {.slots_total = 4096, .slots_free = 4096},
        {.slots_total = 4096, .slots_free = 2000, .match_blocks = 5},
    };
    const struct bt_sched_snapshot s = {
        .workers = w, .n_workers = BT_ARRAY_LEN(w), .kvstores = k, .n_kvstores = BT_ARRAY_LEN(k)};
    const struct bt_sched_request req = {
        .n_tokens = 2500, .max_new = 256, .block_tokens = 64, .token_bytes = 131072, .random = 7};
    struct bt_sched_plan p;
    struct bt_sched_reject r;
    assert_int_equal(bt_sched_cache_aware.place(&defaults, &s, &req, &p, &r), BT_SCHED_PLANNED);
    /* 0: 375 ms queue + 580 tokens = 72.5 ms; 1: 2500 tokens = 500 ms. The hand-off moves 2180
     * tokens = 286 ms, of which 0 hides 72.5 and 1 hides all. */
    assert_int_equal(p.at.prefill, 1);
    assert_int_equal(p.at.decode, 3);
    assert_int_equal(p.at.kv_prefill, 1);
    assert_int_equal(p.at.kv_decode, 2);
    assert_false(p.prefix.keep);
    assert_int_equal((int)p.first.ms, 500);
    assert_int_equal((int)p.gaps.ms, 8);
}

static void test_draining(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.w[0].draining = x.w[2].draining = x.k[0].draining = true;
    x.k[0].match_blocks = 60; /* whatever is cached there */
    for (uint64_t seed = 0; seed < 20; seed++) {
        x.req.random = seed;
        struct bt_sched_plan p = place(&x, &defaults);
        assert_int_equal(p.at.prefill, 1);
        assert_int_equal(p.at.decode, 3);
        assert_false(p.draining);
    }
    /* A worker that failed the request before is better than one that is to be emptied. */
    x.w[3].avoid = true;
    assert_int_equal(place(&x, &defaults).at.decode, 3);
    x.w[3].avoid = false;
    /* Where nobody else has a role, somebody else does both. */
    x.s.n_workers = 3;
    struct bt_sched_plan p = place(&x, &defaults);
    assert_true(p.at.both && p.at.decode == 1 && !p.draining);
    /* Better there than nowhere. */
    x.w[1].draining = x.k[1].draining = true;
    p = place(&x, &defaults);
    assert_true(p.draining && !p.at.both && p.at.decode == 2);
    x.req.n_tokens = 100000;
    rejected(&x, &defaults, BT_SCHED_TOO_LARGE);
}

static void test_choices_count_as_rows(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    double one = place(&x, &defaults).gaps.ms;
    x.req.n_choices = 64; /* four times the rows that a worker has at once */
    assert_true(place(&x, &defaults).gaps.ms > 3 * one);
}

/* Rows of a worker that speculates have drafts: its steps are longer. */
static void test_drafts_count_as_tokens(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 1e6, .token_ns = BT_BATCH_TOKEN_NS(1e6)};
    struct world x;
    world_init(&x);
    x.w[2].speed.cost = x.w[3].speed.cost = &cost;
    x.w[2].rows.running = x.w[3].rows.running = 9;
    double plain = place(&x, &defaults).gaps.tail_ms;
    x.w[2].speed.row_tokens = x.w[3].speed.row_tokens = 0.5; /* no worker has less than one */
    assert_true(place(&x, &defaults).gaps.tail_ms == plain);
    x.w[2].speed.row_tokens = x.w[3].speed.row_tokens = 4;
    double drafts = place(&x, &defaults).gaps.tail_ms;
    assert_true(plain == 11 && drafts == 41); /* ms of 10 rows */
}

static void test_explain(void **state)
{
    (void)state;
    struct world x;
    world_init(&x);
    x.k[0].match_blocks = 30;
    x.w[2].rows.waiting = 3;
    struct bt_sched_plan p = place(&x, &defaults);
    struct bt_sched_candidate c[8];
    assert_int_equal(bt_sched_explain(&bt_sched_cache_aware, &defaults, &x.s, &x.req, &p, c, 8), 4);
    for (int i = 0; i < 2; i++) { /* the chosen ones come first */
        assert_true(c[i].chosen);
        assert_string_equal(c[i].verdict, "chosen");
        bool prefill = c[i].use == BT_SCHED_FOR_PREFILL;
        assert_int_equal(c[i].worker, prefill ? p.at.prefill : p.at.decode);
        assert_true(prefill ? c[i].ttft_ms == p.first.ms : c[i].tbt_ms == p.gaps.ms);
    }
    for (int i = 2; i < 4; i++) {
        assert_false(c[i].chosen);
        assert_non_null(strstr(c[i].verdict, "no better"));
        assert_true(c[i].use != BT_SCHED_FOR_PREFILL || c[i].ttft_ms >= p.first.ms);
    }
    assert_int_equal(bt_sched_explain(&bt_sched_cache_aware, &defaults, &x.s, &x.req, &p, c, 1),
                     4); /* says how many */
    /* Every reason not to take one. */
    x.w[0].draining = true;
    x.w[1].kvstore = BT_SCHED_NONE;
    x.w[2].avoid = true;
    x.w[3].capacity.context_tokens = 10;
    assert_int_equal(bt_sched_explain(&bt_sched_cache_aware, &defaults, &x.s, &x.req, NULL, c, 8),
                     4);
    static const char *const want[] = {"drained", "no kvstore", "has failed", "too small"};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(c[i].worker, i);
        assert_non_null(strstr(c[i].verdict, want[i]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_apart),
        cmocka_unit_test(test_cached_prefix_wins),
        cmocka_unit_test(test_a_short_prompt_shares_a_step),
        cmocka_unit_test(test_the_gap_of_the_hand_off),
        cmocka_unit_test(test_the_step_when_the_prompt_is_computed),
        cmocka_unit_test(test_queue_beats_cache),
        cmocka_unit_test(test_whole_prompt_cached),
        cmocka_unit_test(test_decode_least_load),
        cmocka_unit_test(test_decode_among_lower_classes),
        cmocka_unit_test(test_avoid),
        cmocka_unit_test(test_one_role_left),
        cmocka_unit_test(test_same_node),
        cmocka_unit_test(test_keep),
        cmocka_unit_test(test_rejections),
        cmocka_unit_test(test_larger_than_the_slab),
        cmocka_unit_test(test_objectives),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_replay),
        cmocka_unit_test(test_draining),
        cmocka_unit_test(test_choices_count_as_rows),
        cmocka_unit_test(test_drafts_count_as_tokens),
        cmocka_unit_test(test_explain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
