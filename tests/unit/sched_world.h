/* A small cluster for tests of placement, through sched.h alone: two prefill workers, two decode
 * workers. Include after cmocka.h. */
#ifndef BT_TESTS_SCHED_WORLD_H
#define BT_TESTS_SCHED_WORLD_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/policy/sched/sched.h"

/* NaN is near nothing. */
#define NEAR(a, b, by) assert_true(fabs((a) - (b)) <= (by))

#define P 2 /* prefill workers 0 and 1, decode workers 2 and 3, each on a node of its own */
#define N 4

/* 1 ms a prompt token; 10 ms a decode step and 1 ms for each thousand tokens of context. */
static const struct bt_batch_cost prompts = {.token_ns = BT_BATCH_TOKEN_NS(1e6)};
static const struct bt_batch_cost rows = {.base_ns = 10e6, .kv_ns = 1000};

/* On the heap, each as large as it is: the sanitizer of tests/bench/mutants sees a step beyond. */
struct world {
    struct bt_sched_worker *w;
    struct bt_sched_kvstore *k;
    struct bt_sched_snapshot s;
    struct bt_sched_request req;
    struct bt_sched_params c;
};

static struct world X;

/* ---- the only lines that know how a worker is laid out ---- */

static inline void make_worker(uint32_t i, bool prefill, bool decode)
{
    X.w[i] = (struct bt_sched_worker){.kvstore = i, .prefill = prefill, .decode = decode};
    X.w[i].speed.cost = decode ? &rows : &prompts;
    X.w[i].speed.prompt_cost = &prompts;
    X.w[i].capacity.slots = 64;
    X.w[i].capacity.pages = X.w[i].capacity.pages_free = decode ? 1000 : 0;
}
static inline void set_cost(uint32_t i, const struct bt_batch_cost *steps,
                            const struct bt_batch_cost *prompt)
{
    X.w[i].speed.cost = steps;
    X.w[i].speed.prompt_cost = prompt;
}
static inline void set_rows(uint32_t i, uint32_t running, uint64_t kv)
{
    X.w[i].rows.running = running;
    X.w[i].rows.kv_tokens = kv;
}
static inline void set_waiting(uint32_t i, uint32_t n)
{
    X.w[i].rows.waiting = n;
}
/* Sent, but still in prefill; all: with those that it has. */
static inline void set_coming(uint32_t i, uint32_t all, uint32_t coming, uint64_t tokens)
{
    X.w[i].rows.own = all;
    X.w[i].rows.own_coming = coming;
    X.w[i].rows.own_coming_tokens = tokens;
}
static inline void set_late(uint32_t i, uint64_t tokens)
{
    X.w[i].rows.own_late_tokens = tokens;
}
static inline void set_yield(uint32_t i, uint32_t n, uint32_t pages)
{
    X.w[i].rows.yield = n;
    X.w[i].rows.yield_pages = pages;
}
static inline void set_room(uint32_t i, uint32_t slots, uint32_t pages, uint32_t pages_free)
{
    X.w[i].capacity.slots = slots;
    X.w[i].capacity.pages = pages;
    X.w[i].capacity.pages_free = pages_free;
}
static inline void set_queue(uint32_t i, double ms)
{
    X.w[i].queue.ms = ms;
}
static inline void set_context(uint32_t i, uint32_t tokens)
{
    X.w[i].capacity.context_tokens = tokens;
}
static inline void set_rates(uint32_t i, double tokens_per_s, double step_ms)
{
    X.w[i].speed.cost = X.w[i].speed.prompt_cost = NULL;
    X.w[i].speed.prefill_tokens_per_s = tokens_per_s;
    X.w[i].speed.step_ms = step_ms;
}
static inline void set_ahead(uint32_t i, const struct bt_batch_ahead *a)
{
    X.w[i].queue.ahead = a;
    X.w[i].speed.chunk_tokens = 128;
}

/* The shared parameters of steps with prompts beside rows. */
static inline void mix(double step_ms, double gap_ms)
{
    X.c.mixed.step_ms = step_ms;
    X.c.mixed.gap_ms = gap_ms;
}

/* ---- the world ---- */

static inline int start(void **state)
{
    (void)state;
    memset(&X, 0, sizeof(X));
    X.w = calloc(N, sizeof(*X.w));
    X.k = calloc(N, sizeof(*X.k));
    assert_true(X.w != NULL && X.k != NULL);
    for (uint32_t i = 0; i < N; i++) {
        make_worker(i, i < P, i >= P);
    }
    X.s = (struct bt_sched_snapshot){
        .workers = X.w, .n_workers = N, .kvstores = X.k, .n_kvstores = N};
    /* 10 blocks of 100 tokens; a token's KV takes 0.1 ms on the link */
    X.req = (struct bt_sched_request){.n_tokens = 1000,
                                      .max_new = 100,
                                      .n_choices = 1,
                                      .block_tokens = 100,
                                      .token_bytes = 1000,
                                      .random = 5};
    X.c = (struct bt_sched_params){
        .prior = {.prefill_tokens_per_s = 1000, .step_ms = 20, .link_bytes_per_s = 10e6},
        .place = {.fetch_ratio = 2}};
    return 0;
}

static inline int stop(void **state)
{
    (void)state;
    free(X.w);
    free(X.k);
    return 0;
}

static inline void again(void)
{
    stop(NULL);
    start(NULL);
}

static inline struct bt_sched_plan place(const struct bt_sched_policy *p)
{
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    memset(&plan, 0xee, sizeof(plan));
    assert_int_equal(p->place(&X.c, &X.s, &X.req, &plan, &rej), BT_SCHED_PLANNED);
    return plan;
}

static inline struct bt_sched_reject refused(const struct bt_sched_policy *p,
                                             bt_sched_verdict_t want)
{
    struct bt_sched_plan plan;
    struct bt_sched_reject rej = {0};
    assert_int_equal(p->place(&X.c, &X.s, &X.req, &plan, &rej), want);
    assert_int_equal(rej.verdict, want);
    return rej;
}

static inline struct bt_sched_reject decided(const struct bt_sched_policy *p,
                                             const struct bt_sched_admission *a,
                                             bt_sched_verdict_t want)
{
    struct bt_sched_plan plan;
    struct bt_sched_reject rej = {0};
    assert_int_equal(bt_sched_decide(p, a, &X.c, &X.s, &X.req, &plan, &rej), want);
    return rej;
}

#endif
