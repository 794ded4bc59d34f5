/* The simulator: its parts against plain models, and whole runs against recorded ones. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "conductor/sim/bound.h"
#include "conductor/sim/cache.h"
#include "conductor/sim/decode.h"
#include "conductor/sim/plan.h"
#include "conductor/sim/report.h"

#define SMALL "tests/sim/small.jsonl"

static uint64_t next(uint64_t *s)
{
    *s = *s * 6364136223846793005ull + 1442695040888963407ull;
    return *s >> 33;
}

/* ---- caches against an array of last uses ---- */

#define IDS   60
#define NODES 3
#define CHAIN 12

struct model {
    uint32_t capacity;
    uint64_t now, used[NODES][IDS]; /* 0: not there */
    uint32_t held[NODES][IDS];
};

static uint32_t model_match(const struct model *m, uint32_t node, const uint32_t *chain, uint32_t n)
{
    uint32_t k = 0;
    while (k < n && m->used[node][chain[k]] != 0) {
        k++;
    }
    return k;
}

/* Makes room on the node for one more; false: everything is held. */
static bool model_room(struct model *m, uint32_t node)
{
    uint32_t have = 0, oldest = IDS;
    for (uint32_t i = 0; i < IDS; i++) {
        have += m->used[node][i] != 0;
        if (m->used[node][i] != 0 && m->held[node][i] == 0 &&
            (oldest == IDS || m->used[node][i] < m->used[node][oldest])) {
            oldest = i;
        }
    }
    if (have < m->capacity) {
        return true;
    }
    if (oldest != IDS) {
        m->used[node][oldest] = 0;
    }
    return oldest != IDS;
}

static void model_put(struct model *m, uint32_t node, const uint32_t *chain, uint32_t n,
                      uint32_t held)
{
    uint32_t k = held;
    for (; k < n; k++) {
        if (m->used[node][chain[k]] == 0 && !model_room(m, node)) {
            break;
        }
        m->used[node][chain[k]] += m->used[node][chain[k]] == 0;
        m->held[node][chain[k]]++;
    }
    while (k-- > 0) {
        if (--m->held[node][chain[k]] == 0) {
            m->used[node][chain[k]] = ++m->now;
        }
    }
}

/* As bt_sim_caches_match, block by block. */
static uint32_t match_one(const struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                          uint32_t n)
{
    uint32_t k = 0;
    while (k < n && bt_sim_caches_has(c, node, blocks[k])) {
        k++;
    }
    return k;
}

/* On each node a chain is in use while others come and go. */
static void test_cache(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (uint32_t capacity = 1; capacity < 40; capacity += 7) {
        struct bt_sim_caches *c = bt_sim_caches_create(NODES, capacity, IDS, &bt_evict_lru, NULL);
        static struct model m;
        memset(&m, 0, sizeof(m));
        m.capacity = capacity;
        uint32_t open[NODES][CHAIN], n_open[NODES] = {0}, held[NODES] = {0}, ssd;
        for (int round = 0; round < 3000; round++) {
            uint32_t node = (uint32_t)next(&seed) % NODES, n = 1 + (uint32_t)next(&seed) % CHAIN;
            uint32_t start = (uint32_t)next(&seed) % (IDS - CHAIN), chain[CHAIN], match[NODES];
            for (uint32_t k = 0; k < n; k++) {
                chain[k] = start + k;
            }
            bt_sim_caches_match(c, chain, n, match);
            for (uint32_t d = 0; d < NODES; d++) {
                assert_int_equal(match[d], model_match(&m, d, chain, n));
                assert_int_equal(match_one(c, d, chain, n), match[d]);
            }
            if (n_open[node] != 0) { /* the one before ends, this one begins */
                struct bt_sim_put put = {
                    .blocks = open[node], .n = n_open[node], .held = held[node]};
                bt_sim_caches_put(c, node, &put, 0);
                model_put(&m, node, open[node], n_open[node], held[node]);
            }
            memcpy(open[node], chain, sizeof(chain));
            n_open[node] = n;
            held[node] = bt_sim_caches_use(c, node, chain, n, 0, &ssd);
            assert_int_equal(held[node], model_match(&m, node, chain, n));
            for (uint32_t k = 0; k < held[node]; k++) {
                m.held[node][chain[k]]++;
            }
        }
        uint64_t replicas = 0;
        for (uint32_t i = 0; i < NODES * IDS; i++) {
            replicas += m.used[i / IDS][i % IDS] != 0;
        }
        assert_int_equal(bt_sim_caches_replicas(c), replicas);
        bt_sim_caches_destroy(c);
    }
}

/* Blocks [first, first + n) pass through node 0; how many of them were there. */
static uint32_t pass(struct bt_sim_caches *c, uint32_t first, uint32_t n, double now_ms,
                     uint32_t *ssd_p)
{
    uint32_t chain[CHAIN];
    for (uint32_t k = 0; k < n; k++) {
        chain[k] = first + k;
    }
    uint32_t held = bt_sim_caches_use(c, 0, chain, n, now_ms, ssd_p);
    struct bt_sim_put put = {.blocks = chain, .n = n, .held = held};
    bt_sim_caches_put(c, 0, &put, now_ms);
    return held;
}

static uint32_t matched(const struct bt_sim_caches *c, uint32_t first)
{
    uint32_t chain[4] = {first, first + 1, first + 2, first + 3}, match[1];
    bt_sim_caches_match(c, chain, 4, match);
    return match[0];
}

/* What the slab has given up is found on the SSD as far as the write policy had it written. */
static void test_disk(void **state)
{
    (void)state;
    for (bt_sim_write_t w = BT_SIM_WRITE_SECOND_USE; w <= BT_SIM_WRITE_ALWAYS; w++) {
        struct bt_sim_disk_config disk = {.blocks = 8,
                                          .block_bytes = 1e6,
                                          .read_bytes_per_s = 1e9,
                                          .write_bytes_per_s = 1e9,
                                          .write = w};
        struct bt_sim_caches *c = bt_sim_caches_create(1, 4, IDS, &bt_evict_lru, &disk);
        bool once = w != BT_SIM_WRITE_SECOND_USE;
        uint32_t ssd, chain[4] = {0, 1, 2, 3};
        assert_int_equal(pass(c, 0, 4, 0, &ssd), 0);
        assert_int_equal(pass(c, 10, 4, 100, &ssd), 0); /* the first four leave the slab */
        assert_int_equal(matched(c, 0), once ? 4 : 0);
        assert_float_equal(bt_sim_caches_read(c, 0, chain, 4, 200), once ? 204 : 200, 1e-9);
        assert_float_equal(bt_sim_caches_read(c, 0, chain, 3, 200), once ? 207 : 200, 1e-9);
        assert_int_equal(pass(c, 0, 4, 300, &ssd), once ? 4 : 0); /* a second use */
        assert_int_equal(ssd, once ? 4 : 0);
        assert_int_equal(pass(c, 0, 4, 400, &ssd), 4);
        assert_int_equal(ssd, 0); /* back in the slab */
        assert_int_equal(pass(c, 20, 4, 500, &ssd), 0);
        assert_int_equal(matched(c, 0), 4);
        assert_int_equal(matched(c, 10), w == BT_SIM_WRITE_EVICT ? 4 : 0); /* it has eight places */
        double written[] = {4e6, 8e6, 12e6}; /* 0 to 3; and 10 to 13; and 20 to 23 */
        assert_float_equal(bt_sim_caches_written(c), written[w], 1);
        bt_sim_caches_clear(c, 0); /* the node fails: its SSD has what it had */
        assert_int_equal(matched(c, 20), w == BT_SIM_WRITE_ALWAYS ? 4 : 0);
        assert_int_equal(matched(c, 0), 4);
        assert_int_equal(bt_sim_caches_replicas(c), 0);
        assert_int_equal(pass(c, 0, 4, 600, &ssd), 4); /* ... and serves it when it is back */
        assert_int_equal(ssd, 4);
        bt_sim_caches_destroy(c);
    }
    /* A disk that is a second behind is not written to. */
    struct bt_sim_disk_config slow = {
        .blocks = 40, .block_bytes = 1e6, .write_bytes_per_s = 1e6, .write = BT_SIM_WRITE_ALWAYS};
    struct bt_sim_caches *c = bt_sim_caches_create(1, 20, IDS, &bt_evict_lru, &slow);
    uint32_t ssd;
    (void)pass(c, 0, 4, 0, &ssd);
    assert_float_equal(bt_sim_caches_written(c), 2e6, 1); /* one is being written, one waits */
    (void)pass(c, 10, 4, 5000, &ssd);
    assert_float_equal(bt_sim_caches_written(c), 4e6, 1);
    bt_sim_caches_destroy(c);
}

/* ---- a decode node against the worker's batcher, step by step ---- */

#define ROWS 40

struct expected {
    double end_ms, tbt_ms;
    double gaps[512];
    uint32_t n;
};

static int longer_first(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Rows join at the first boundary at or after at_ms. */
static void step_by_step(const struct bt_batch_cost *cost, const double *at_ms,
                         const struct bt_sim_row *rows, struct expected *out)
{
    struct bt_batch_seq seqs[ROWS];
    struct bt_batch_row step[ROWS];
    uint32_t of[ROWS], joined = 0, left = ROWS;
    double last[ROWS];
    struct bt_batch b = {.lim = {.max_rows = ROWS, .block_tokens = 16, .mixed = true},
                         .seqs = seqs};
    for (double now = 0; left > 0;) {
        if (b.n == 0 && joined < ROWS) {
            now = BT_MAX(now, at_ms[joined]);
        }
        for (; joined < ROWS && at_ms[joined] <= now; joined++) {
            of[b.n] = joined;
            last[joined] = rows[joined].first_ms;
            seqs[b.n++] = (struct bt_batch_seq){.order = joined,
                                                .pos = rows[joined].tokens,
                                                .left = rows[joined].steps,
                                                .kind = BT_BATCH_DECODE};
        }
        uint32_t n = bt_batch_decode(&b, step, ROWS);
        assert_int_equal(n, b.n);
        now += bt_batch_step_ns(cost, &b, step, n) / 1e6;
        bt_batch_apply(&b, step, n);
        uint32_t kept = 0;
        for (uint32_t i = 0; i < b.n; i++) {
            struct expected *e = &out[of[i]];
            e->gaps[e->n++] = now - last[of[i]];
            last[of[i]] = now;
            if (seqs[i].kind == BT_BATCH_DONE) {
                e->end_ms = now;
                left--;
            } else {
                of[kept] = of[i];
                seqs[kept++] = seqs[i];
            }
        }
        b.n = kept;
    }
    for (uint32_t i = 0; i < ROWS; i++) {
        qsort(out[i].gaps, out[i].n, sizeof(double), longer_first);
        uint32_t tenth = BT_DIV_UP(out[i].n, 10u);
        for (uint32_t k = 0; k < tenth; k++) {
            out[i].tbt_ms += out[i].gaps[k] / tenth;
        }
    }
}

static void test_decode(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {
        .base_ns = 5e6, .kv_ns = 40, .token_ns = BT_BATCH_TOKEN_NS(30000)};
    static struct expected want[ROWS];
    uint64_t seed = 3;
    for (int round = 0; round < 20; round++) {
        double at[ROWS];
        struct bt_sim_row rows[ROWS];
        struct bt_sim_done done[ROWS];
        memset(want, 0, sizeof(want));
        for (uint32_t i = 0; i < ROWS; i++) {
            double gap = next(&seed) % 4 == 0 ? 2000.25 : (double)(next(&seed) % 9000) / 37.0;
            at[i] = i == 0 ? 3.7 : at[i - 1] + gap;
            rows[i] = (struct bt_sim_row){.id = i,
                                          .tokens = 1 + (uint32_t)next(&seed) % 30000,
                                          .steps = 1 + (uint32_t)next(&seed) % 400,
                                          .first_ms = at[i] - 1.5};
        }
        step_by_step(&cost, at, rows, want);
        struct bt_sim_decode *d = bt_sim_decode_create(&cost, 1e9, ROWS);
        uint32_t n = 0;
        for (uint32_t i = 0; i <= ROWS; i++) {
            while (bt_sim_decode_next_ms(d) >= 0 &&
                   (i == ROWS || bt_sim_decode_next_ms(d) < at[i])) {
                n += bt_sim_decode_advance(d, done + n, ROWS - n);
            }
            if (i < ROWS) {
                assert_true(bt_sim_decode_add(d, at[i], &rows[i]));
            }
        }
        assert_int_equal(n, ROWS);
        for (uint32_t i = 0; i < n; i++) {
            const struct expected *e = &want[done[i].id];
            assert_true(done[i].end_ms > e->end_ms * 0.999999 &&
                        done[i].end_ms < e->end_ms * 1.000001);
            /* steps of one run count with its mean */
            assert_true(done[i].tbt_ms > e->tbt_ms * 0.99 && done[i].tbt_ms < e->tbt_ms * 1.01);
        }
        struct bt_sim_held left = bt_sim_decode_running(d);
        assert_true(left.rows == 0 && left.kv < 1e-6 && left.reserved < 1e-6);
        bt_sim_decode_destroy(d);
    }
}

/* A row that comes within a step has a slot at once, as on a worker; only one without room waits.
 * What it was in time is told by gap: the first one holds its wait. */
static void test_decode_joining(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 10e6};
    struct bt_sim_decode *d = bt_sim_decode_create(&cost, 1e9, 2);
    struct bt_sim_done done[4];
    struct bt_sim_row row = {.id = 0, .tokens = 100, .steps = 8};
    assert_true(bt_sim_decode_add(d, 0, &row));
    for (uint32_t id = 1; id < 3; id++) {
        row = (struct bt_sim_row){.id = id, .tokens = 50, .steps = 3, .first_ms = 14};
        assert_true(bt_sim_decode_add(d, 15, &row));
    }
    struct bt_sim_held running = bt_sim_decode_running(d), waiting = bt_sim_decode_waiting(d);
    assert_true(running.rows == 2 && running.kv == 150 && running.reserved == 161);
    assert_true(waiting.rows == 1 && waiting.kv == 50);
    assert_int_equal(bt_sim_decode_advance(d, done, 4), 0); /* at 20 ms row 1 joins */
    assert_int_equal(bt_sim_decode_advance(d, done, 4), 1);
    assert_true(done[0].id == 1 && done[0].n_gaps == 3 && done[0].life_ms == 36);
    assert_true(done[0].first_gap_ms == 16 && done[0].tbt_ms == 16 && done[0].others_ms == 10);
    bt_sim_decode_destroy(d);
}

/* A prompt beside rows, step by step: each step is filled up to the bound, the rows' gaps never
 * exceed it, the prompt is computed once and as early as the steps allow. */
static void test_prompt_beside_rows(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 5e6, .kv_ns = 40},
                                      prompt_cost = {.base_ns = 1e6,
                                                     .token_ns = BT_BATCH_TOKEN_NS(20000),
                                                     .attn_ns = 0.5};
    struct bt_sim_decode *d = bt_sim_decode_create(&cost, 1e9, 8);
    struct bt_sim_done done[4];
    bt_sim_decode_mix(d, &prompt_cost, 20, 0, 8192);
    for (uint32_t i = 0; i < 2; i++) {
        struct bt_sim_row row = {.id = i, .tokens = 10000, .steps = 400};
        assert_true(bt_sim_decode_add(d, 0, &row));
    }
    bt_sim_decode_prompt(d, 0, &(struct bt_sim_prompt){.id = 7, .from = 4096, .tokens = 24576});
    assert_true(bt_sim_decode_prompt_ms(d) > 20480 * 0.02);
    double now = 0, kv = 20000, at = 4096;
    while (at < 24576) { /* by hand */
        double rows = 5 + 40e-6 * kv, token = 0.02 + 0.5e-6 * at;
        double chunk = BT_MIN(floor((20 - rows) / token), 24576 - at);
        now += rows + chunk * 0.02 + 0.5e-6 * chunk * (at + chunk / 2);
        at += chunk;
        kv += 2;
    }
    double prompt_end = -1, worst = 0;
    uint32_t rows = 0;
    while (bt_sim_decode_next_ms(d) >= 0) {
        uint32_t n = bt_sim_decode_advance(d, done, 4);
        for (uint32_t i = 0; i < n; i++) {
            if (done[i].prompt) {
                assert_int_equal(done[i].id, 7);
                prompt_end = done[i].end_ms;
            } else {
                rows++;
                worst = BT_MAX(worst, done[i].tbt_ms);
            }
        }
    }
    assert_int_equal(rows, 2);
    assert_true(fabs(prompt_end - now) < 0.03 * now);
    assert_true(worst > 19 && worst < 20.6);
    assert_true(bt_sim_decode_prompt_ms(d) == 0);
    /* alone, one after the other, each step within the bound */
    double from = prompt_end + 1e6, first = -1, second = -1;
    bt_sim_decode_prompt(d, from, &(struct bt_sim_prompt){.id = 1, .tokens = 950});
    bt_sim_decode_prompt(d, from, &(struct bt_sim_prompt){.id = 2, .tokens = 950});
    while (bt_sim_decode_next_ms(d) >= 0) {
        if (bt_sim_decode_advance(d, done, 4) == 1) {
            *(done[0].id == 1 ? &first : &second) = done[0].end_ms - from;
        }
    }
    double one = 1 + 950 * 0.02 + 0.5e-6 * 950 * 475;
    assert_true(fabs(first - one) < 1.5 && fabs(second - 2 * one) < 3);
    bt_sim_decode_destroy(d);
}

/* Without rows a prompt is computed in whole chunks; from the step on after a row was announced,
 * which will wait for the step at hand, they are as short as with rows. */
static void test_row_due(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 5e6},
                                      prompt_cost = {.base_ns = 1e6,
                                                     .token_ns = BT_BATCH_TOKEN_NS(20000)};
    struct bt_sim_done done[1];
    struct bt_sim_decode *d = bt_sim_decode_create(&cost, 1e9, 8);
    bt_sim_decode_mix(d, &prompt_cost, 20, 0, 2000);
    bt_sim_decode_prompt(d, 0,
                         &(struct bt_sim_prompt){.id = 7, .tokens = 10000}); /* steps of 41 ms */
    assert_int_equal(bt_sim_decode_advance(d, done, 1), 0);
    assert_true(bt_sim_decode_expect(d, 50, 1));
    assert_false(bt_sim_decode_expect(d, 51, 1)); /* the steps are short already */
    assert_float_equal(bt_sim_decode_next_ms(d), 82, 1e-6);
    assert_int_equal(bt_sim_decode_advance(d, done, 1), 0);
    uint64_t before = bt_sim_decode_steps(d);
    double at = 82;
    do {
        assert_true(bt_sim_decode_next_ms(d) - at <= 20);
        at = bt_sim_decode_next_ms(d);
    } while (bt_sim_decode_advance(d, done, 1) == 0);
    /* 6,000 tokens are left, whole blocks of at most 950 a step of 20 ms */
    uint64_t steps = bt_sim_decode_steps(d) - before;
    assert_in_range(steps, 7, 9);
    assert_float_equal(done[0].end_ms, 82 + (double)steps + 120, 1e-6);
    assert_false(bt_sim_decode_expect(d, 300, -1));
    assert_false(bt_sim_decode_expect(d, 300, -1));
    bt_sim_decode_prompt(d, 300, &(struct bt_sim_prompt){.id = 8, .tokens = 10000});
    while (bt_sim_decode_advance(d, done, 1) == 0) {
    }
    assert_float_equal(done[0].end_ms, 505, 1e-6);
    bt_sim_decode_destroy(d);
}

/* A row that joins beside a prompt: its wait and its first step together keep the bound, and the
 * steps after that are as long as before. */
static void test_row_joins_prompt(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 5e6},
                                      prompt_cost = {.base_ns = 1e6,
                                                     .token_ns = BT_BATCH_TOKEN_NS(20000)};
    for (double gap = 0; gap < 40; gap += 26) {
        struct bt_sim_decode *d = bt_sim_decode_create(&cost, 1e9, 8);
        struct bt_sim_done done[4];
        double tbt[2] = {0, 0}, prompt_ms = 0;
        bt_sim_decode_mix(d, &prompt_cost, 20, gap, 8192);
        assert_true(bt_sim_decode_add(d, 0, &(struct bt_sim_row){.tokens = 100, .steps = 60}));
        bt_sim_decode_prompt(d, 0, &(struct bt_sim_prompt){.id = 7, .tokens = 30000});
        /* two steps of 20 ms; it comes 14 ms before the third */
        while (bt_sim_decode_next_ms(d) < 26) {
            assert_int_equal(bt_sim_decode_advance(d, done, 4), 0);
        }
        assert_true(bt_sim_decode_add(
            d, 26, &(struct bt_sim_row){.id = 1, .tokens = 100, .steps = 5, .first_ms = 26}));
        while (bt_sim_decode_next_ms(d) >= 0) {
            uint32_t n = bt_sim_decode_advance(d, done, 4);
            for (uint32_t i = 0; i < n; i++) {
                if (done[i].prompt) {
                    prompt_ms = done[i].end_ms;
                } else {
                    tbt[done[i].id] = done[i].tbt_ms;
                }
            }
        }
        /* Whole blocks: 704 tokens a step of 19.08 ms, up to 1.3 ms less than the bound. */
        assert_float_equal(tbt[0], 19.08, 0.1);
        double first = gap > 0 ? 26 : 3 * 19.08 - 26;
        assert_in_range((uint64_t)(1e3 * tbt[1]), (uint64_t)(1e3 * first) - 1300,
                        (uint64_t)(1e3 * first) + 100); /* the longest of five gaps */
        assert_float_equal(prompt_ms, 30000 / 704.0 * 19.08, 25);
        bt_sim_decode_destroy(d);
    }
}

/* A late row makes way where places or pages are short, and goes on with what it has when there is
 * room again; it keeps no other row out, and nobody makes way for it. */
static void test_decode_late(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 1e6};
    for (int pages = 0; pages < 2; pages++) {
        struct bt_sim_decode *d = bt_sim_decode_create(&cost, pages ? 250 : 1e9, pages ? 8 : 2);
        struct bt_sim_done done[4];
        double end[4] = {0};
        struct bt_sim_row row = {.id = 0, .tokens = 100, .steps = 20, .late = true};
        assert_true(bt_sim_decode_add(d, 0, &row));
        row = (struct bt_sim_row){.id = 1, .tokens = 100, .steps = 10};
        assert_true(bt_sim_decode_add(d, 0, &row));
        row.id = 2; /* comes within the fifth step */
        assert_true(bt_sim_decode_add(d, 4.5, &row));
        row = (struct bt_sim_row){.id = 3, .tokens = 100, .steps = 10, .first_ms = 4, .late = true};
        assert_true(bt_sim_decode_add(d, 4.6, &row));
        while (bt_sim_decode_next_ms(d) >= 0) {
            uint32_t n = bt_sim_decode_advance(d, done, 4);
            for (uint32_t i = 0; i < n; i++) {
                end[done[i].id] = done[i].end_ms;
            }
            if (bt_sim_decode_next_ms(d) == 10) { /* 1 and 2 run, 0 and 3 wait */
                struct bt_sim_late late = bt_sim_decode_late(d);
                assert_true(late.rows == 0 && late.waiting == 2 && late.reserved == 0);
                assert_int_equal(bt_sim_decode_running(d).rows, 2);
                assert_int_equal(bt_sim_decode_waiting(d).rows, 0);
            }
        }
        assert_float_equal(end[1], 10, 1e-6);
        assert_float_equal(end[2], 15, 1e-6);
        assert_float_equal(end[0], 25, 1e-6); /* five steps, and fifteen from the tenth on */
        assert_float_equal(end[3], 25, 1e-6); /* behind row 2 */
        bt_sim_decode_destroy(d);
    }
}

/* Pages for two rows: the third joins when one has ended, and its first gap says so. */
static void test_decode_full(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 1e6};
    struct bt_sim_decode *d = bt_sim_decode_create(&cost, 250, 8);
    struct bt_sim_done done[4];
    assert_false(bt_sim_decode_add(d, 0, &(struct bt_sim_row){.tokens = 200, .steps = 51}));
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(bt_sim_decode_add(
            d, 0, &(struct bt_sim_row){.id = i, .tokens = 100, .steps = 10 + 5 * i}));
    }
    assert_int_equal(bt_sim_decode_running(d).rows, 2);
    assert_int_equal(bt_sim_decode_waiting(d).rows, 1);
    uint32_t n = 0;
    while (bt_sim_decode_next_ms(d) >= 0) {
        n += bt_sim_decode_advance(d, done + n, 4 - n);
    }
    assert_int_equal(n, 3);
    assert_int_equal(done[2].id, 2);
    assert_float_equal(done[2].end_ms, 30, 1e-6);             /* from the tenth step on */
    assert_float_equal(done[2].tbt_ms, (11 + 1) / 2.0, 1e-6); /* two of twenty gaps: 11 and 1 */
    bt_sim_decode_destroy(d);
}

/* ---- traces ---- */

static void test_traces(void **state)
{
    (void)state;
    static const struct {
        const char *text, *error; /* NULL: good */
        uint32_t n, blocks;
    } cases[] = {
        {"{\"timestamp\": 5, \"input_length\": 513, \"output_length\": 0, \"hash_ids\": [7, 9]}\n",
         NULL, 1, 2},
        {"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-30 23:59:59.5,600,3\n"
         "2023-12-01 00:00:00.5,1,1\n",
         NULL, 2, 3},
        {"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-05-10 23:59:59.500000+00:00,600,3\r\n"
         "2024-05-11 01:00:00.5+01:00,1,1\r\n",
         NULL, 2, 3},
        {"\xef\xbb\xbf"
         "timestamp,context,generated\n2024-05-10T00:00:00Z,1,0\n"
         "2024-05-09 19:00:01-05:00,513,1",
         NULL, 2, 3},
        /* ids are names: the largest take no more room than the smallest */
        {"{\"timestamp\": -9, \"input_length\": 1024, \"output_length\": 1, \"hash_ids\": "
         "[18446744073709551615, 268435456]}\n"
         "{\"timestamp\": 991, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": "
         "[18446744073709551615, 3]}\n",
         NULL, 2, 4},
        {"{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": [7]}\n",
         ":1: hash_ids has not one number", 0, 0},
        {"{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1}\n", ":1: not a line", 0, 0},
        {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [-4]}\n",
         "hash_ids is not a list", 0, 0},
        {"{\"timestamp\": 0, \"input_length\": 1.5, \"output_length\": 1, \"hash_ids\": [4]}\n",
         "whole numbers", 0, 0},
        {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [4]}\n"
         "{\"timestamp\": 1e300, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [4]}\n",
         ":2: its time is more than thirty years", 0, 0},
        {"{\"timestamp\": Infinity, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": "
         "[4]}\n",
         ":1: its time is more than thirty years", 0, 0},
        {"{\"timestamp\": NaN, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [4]}\n",
         ":1: not a line", 0, 0},
        {"{\"hash_ids\": [4], \"timestamp\": 0, \"input_length\": 1, \"output_length\": 50",
         "it does not end on the line", 0, 0}, /* it may have been 500 */
        /* Half of two requests is not one. */
        {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [4]}"
         "{\"timestamp\": 9, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [4]}\n",
         ":1: not one JSON object", 0, 0},
        {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [4,,]}\n",
         ":1: not one JSON object", 0, 0},
        {"{\"timestamp\": 0, \"input_length\": 1x, \"output_length\": 1, \"hash_ids\": [4]}\n",
         ":1: not one JSON object", 0, 0},
        {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [4.0]}\n",
         "hash_ids is not a list", 0, 0},
        /* Only its own members count. */
        {"{\"a\": {\"timestamp\": 7000, \"b\": [\"\\\"timestamp\\\": 8\"]}, \"timestamp\": 0, "
         "\"input_length\": 1, \"output_length\": 1, \"hash_ids\": [ 4 ]}\n"
         "{\"timestamp\": 1000.0, \"input_length\": 1.0, \"output_length\": 1, \"hash_ids\": "
         "[4]}\n",
         NULL, 2, 2},
        /* Columns as the header has them, quoted or not. */
        {"Model,GeneratedTokens,\"TIMESTAMP\",ContextTokens\r\n\"a,b\",10,2023-11-16 "
         "18:17:04.5,\"600\"\r\n\"a,b\",10,2023-11-16 18:17:05.5,600\r\n",
         NULL, 2, 4},
        {"TIMESTAMP,GeneratedTokens,Tokens\n2023-11-16 18:17:04.5,10,600\n",
         ":1: its columns are not", 0, 0},
        {"2023-02-29 18:17:04.5,10,1\n", ":1: neither TIMESTAMP", 0, 0},
        {"2023-11-16 18:17:04.5,0x10,1\n", ":1: neither TIMESTAMP", 0, 0},
        {"\x1f\x8b\x08", "gunzip", 0, 0},
        {"2023-11-16 18:17:04.5,10,1,3\n", ":1: neither TIMESTAMP", 0, 0},
        {"2023-11-16 18:17:04.5,99999999999,1\n", "its lengths", 0, 0},
        {"2023-13-16 18:17:04.5,10,1\n", ":1: neither TIMESTAMP", 0, 0},
        {"2023-11-16 18:17:04.5,10,1\n2023-11-16 18:17:03.5,10,1\n", ":2: its time", 0, 0},
        {"2023-11-16 18:17:04.5,0,1\n", "its lengths", 0, 0},
        {"hello\n", ":1: neither TIMESTAMP", 0, 0},
        {"", "no requests", 0, 0},
    };
    char path[] = "/tmp/baton-trace-XXXXXX", err[256];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fputs(cases[i].text, f);
        fclose(f);
        struct bt_sim_trace t;
        bt_status_t st = bt_sim_trace_load(path, &t, err, sizeof(err));
        if (cases[i].error != NULL) {
            assert_int_equal(st, BT_ERR_INVALID);
            assert_non_null(strstr(err, cases[i].error));
            continue;
        }
        assert_int_equal(st, BT_OK);
        assert_int_equal(t.n, cases[i].n);
        assert_int_equal(t.n_blocks, cases[i].blocks);
        assert_float_equal(t.requests[0].at_ms, 0, 0);
        assert_float_equal(t.requests[t.n - 1].at_ms, t.n == 2 ? 1000 : 0, 0.01);
        bt_sim_trace_cleanup(&t);
    }
    unlink(path);
    struct bt_sim_trace t;
    assert_int_equal(bt_sim_trace_load(path, &t, err, sizeof(err)), BT_ERR_NOT_FOUND);
    assert_int_equal(bt_sim_trace_load("/tmp", &t, err, sizeof(err)), BT_ERR_INVALID);
    assert_non_null(strstr(err, "directory"));
}

static void test_clusters(void **state)
{
    (void)state;
    struct bt_sim_cluster c;
    char err[256];
    assert_int_equal(bt_sim_cluster_load("a800-70b", &c, err, sizeof(err)), BT_OK);
    assert_int_equal(bt_sim_cluster_set(&c, "decode_nodes=3", err, sizeof(err)), BT_OK);
    assert_true(c.decode_nodes == 3);
    static const char *const bad[] = {"decode_nodes=0",   "decode_nodes=x",  "decode_nodes=nan",
                                      "decode_nodes=1e9", "decode_node=1",   "decode_nodes",
                                      "decode_nodes=2.5", "cache_tokens=100"};
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        assert_int_equal(bt_sim_cluster_set(&c, bad[i], err, sizeof(err)), BT_ERR_INVALID);
    }
    assert_true(c.decode_nodes == 3);
    assert_int_equal(bt_sim_cluster_load("a900", &c, err, sizeof(err)), BT_ERR_NOT_FOUND);
    assert_non_null(strstr(err, "a800-70b"));
    assert_int_equal(bt_sim_cluster_load("/tmp", &c, err, sizeof(err)), BT_ERR_INVALID);
    assert_non_null(strstr(err, "directory"));
}

static bt_status_t load_cluster_text(const char *text, struct bt_sim_cluster *c, char *err,
                                     size_t cap)
{
    char path[] = "/tmp/baton-cluster-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    bt_status_t st = bt_sim_cluster_load(path, c, err, cap);
    unlink(path);
    return st;
}

static void test_cluster_files(void **state)
{
    (void)state;
    struct bt_sim_cluster c;
    char err[256], text[2048];
    snprintf(text, sizeof(text), "# %01000d decode_nodes: 5\npreset: h200-8b\nlayers: 7\n", 0);
    assert_int_equal(load_cluster_text(text, &c, err, sizeof(err)), BT_OK);
    assert_true(c.layers == 7 && c.decode_nodes == 8);
    /* What stands above a preset would be lost. */
    assert_int_equal(load_cluster_text("layers: 7\npreset: h200-8b\n", &c, err, sizeof(err)),
                     BT_ERR_INVALID);
    assert_non_null(strstr(err, ":2: preset"));
    /* Two clusters in a file, as baton-sim clusters prints them, would be a mixture. */
    assert_int_equal(
        load_cluster_text("preset: h200-8b\nlayers: 7\nlayers: 8\n", &c, err, sizeof(err)),
        BT_ERR_INVALID);
    assert_non_null(strstr(err, ":3: layers stands above already"));
    assert_int_equal(load_cluster_text("preset: h200-8b\npreset: a800-70b\n", &c, err, sizeof(err)),
                     BT_ERR_INVALID);
    assert_int_equal(
        load_cluster_text("\xef\xbb\xbfpreset: h200-8b\r\nlayers: 9\r\n", &c, err, sizeof(err)),
        BT_OK);
    assert_true(c.layers == 9);
    assert_int_equal(load_cluster_text("layers: 7\n", &c, err, sizeof(err)), BT_ERR_INVALID);
    assert_non_null(strstr(err, "is missing"));
}

/* ---- whole runs ---- */

static void run(const char *cluster, const char *policy, const char *admission, double rate,
                uint64_t seed, struct bt_sim_result *r, struct bt_sim_summary *s)
{
    struct bt_sim_cluster c;
    struct bt_sim_trace t;
    char err[256];
    assert_int_equal(bt_sim_cluster_load(cluster, &c, err, sizeof(err)), BT_OK);
    c.prefill_nodes = 3; /* small enough for the small trace to load it */
    c.decode_nodes = 1;
    c.cache_tokens = 300000;
    assert_int_equal(bt_sim_trace_load(SMALL, &t, err, sizeof(err)), BT_OK);
    struct bt_sim_options o = {.policy = bt_sched_policy_find(policy),
                               .admission = bt_sched_admission_find(admission),
                               .eviction = &bt_evict_lru,
                               .rate = rate,
                               .to = 1,
                               .seed = seed,
                               .ttft_ms = 10000,
                               .tbt_ms = 50,
                               .fetch_ratio = 1.5,
                               .work_weight = 0.5,
                               .life_ms = 10000,
                               .demand_price = 0.4,
                               .mixed_step_ms = strcmp(admission, "priced") == 0 ? 37.5 : 0,
                               .mixed_gap_ms = 47.5,
                               .sample_ms = 5000};
    bt_sim_run(&c, &t, &o, r);
    bt_sim_summarize(r, &o, s);
    s->bound = bt_sim_bound(&c, &t, &o);
    bt_sim_trace_cleanup(&t);
}

/* What every run keeps: each request ends once and in order, nobody is better than the bound. */
static void check_run(const struct bt_sim_result *r, const struct bt_sim_summary *s)
{
    uint32_t ended[BT_SIM_OUTCOMES] = {0}, all = 0;
    uint64_t cached = 0, fetched = 0;
    for (uint32_t i = 0; i < r->n; i++) {
        const struct bt_sim_record *x = &r->records[i];
        ended[x->outcome]++;
        assert_true(x->end_ms >= x->at_ms && x->end_ms <= r->end_ms);
        assert_true(x->fetched_tokens <= x->cached_tokens);
        if (x->outcome == BT_SIM_SERVED) {
            assert_true(x->ttft_ms > 0 && x->tbt_ms >= 0 && x->at_ms + x->ttft_ms <= x->end_ms);
            cached += x->cached_tokens;
            fetched += x->fetched_tokens;
        }
    }
    assert_int_equal(ended[BT_SIM_PENDING], 0);
    for (int o = 0; o < BT_SIM_OUTCOMES; o++) {
        assert_int_equal(s->outcomes[o], ended[o]);
        all += ended[o];
    }
    assert_int_equal(all, r->n);
    assert_true(s->good <= s->outcomes[BT_SIM_SERVED] && s->good <= s->bound);
    assert_true(r->cached_tokens >= cached && r->fetched_tokens >= fetched);
    assert_true(r->cached_tokens <= r->input_tokens);
    assert_true(r->prefill_busy_ms <= r->prefill_node_ms * (1 + 1e-9));
}

static void test_runs(void **state)
{
    (void)state;
    static const char *const policies[] = {"random",      "round-robin", "least-load",
                                           "cache-aware", "kvcache",     "baton"};
    static const char *const admissions[] = {"none", "late", "early", "predict", "priced"};
    double ttft[BT_ARRAY_LEN(policies)];
    for (size_t p = 0; p < BT_ARRAY_LEN(policies); p++) {
        for (size_t a = 0; a < BT_ARRAY_LEN(admissions); a++) {
            struct bt_sim_result r;
            struct bt_sim_summary s;
            run("a800-70b", policies[p], admissions[a], 1 + (double)a, 1, &r, &s);
            check_run(&r, &s);
            if (a == 0) { /* none: nobody is refused */
                assert_int_equal(s.outcomes[BT_SIM_SERVED], r.n);
                ttft[p] = s.ttft_ms.mean;
            }
            bt_sim_result_cleanup(&r);
        }
    }
    assert_true(ttft[2] < ttft[0]); /* the order of the paper's Figure 5 */
    assert_true(ttft[3] < ttft[2]);
    assert_true(ttft[4] < ttft[3] && ttft[5] < ttft[3]);
}

static void test_seed(void **state)
{
    (void)state;
    struct bt_sim_result a, b, c;
    struct bt_sim_summary s;
    run("a800-70b", "random", "predict", 1, 7, &a, &s);
    run("a800-70b", "random", "predict", 1, 7, &b, &s);
    run("a800-70b", "random", "predict", 1, 8, &c, &s);
    assert_memory_equal(a.records, b.records, a.n * sizeof(*a.records));
    assert_memory_not_equal(a.records, c.records, a.n * sizeof(*a.records));
    bt_sim_result_cleanup(&a);
    bt_sim_result_cleanup(&b);
    bt_sim_result_cleanup(&c);
}

/* Two prompts of 2,000 tokens at once, links of 1 GB/s (655 ms each), 235 ms of computing each:
 * from one node to two the second hand-off waits for the first at the sender, from two to one at
 * the receiver. The gap behind the first token is what the computing has not hidden, and a step. */
static void test_link_ends(void **state)
{
    (void)state;
    static const uint32_t nodes[][2] = {{1, 2}, {2, 1}, {2, 2}};
    static struct bt_sim_request requests[] = {{0, 2000, 2, 0, 4}, {0, 2000, 2, 4, 4}};
    static uint32_t blocks[] = {0, 1, 2, 3, 4, 5, 6, 7};
    struct bt_sim_trace t = {
        .requests = requests, .n = 2, .blocks = blocks, .n_blocks = 8, .n_unique = 8};
    for (size_t i = 0; i < BT_ARRAY_LEN(nodes); i++) {
        struct bt_sim_cluster c;
        struct bt_sim_result r;
        char err[256];
        assert_int_equal(bt_sim_cluster_load("a800-70b", &c, err, sizeof(err)), BT_OK);
        c.prefill_nodes = nodes[i][0];
        c.decode_nodes = nodes[i][1];
        c.link_bytes_per_s = 1e9;
        struct bt_sim_options o = {.policy = &bt_sched_least_load,
                                   .admission = &bt_sched_admit_none,
                                   .rate = 1,
                                   .to = 1,
                                   .seed = 1,
                                   .life_ms = 1000};
        bt_sim_run(&c, &t, &o, &r);
        double move = 2000.0 * c.token_bytes / 1e6;
        double late = BT_MAX(r.records[0].ttft_ms, r.records[1].ttft_ms);
        double first =
            r.records[0].end_ms < r.records[1].end_ms ? r.records[0].end_ms : r.records[1].end_ms;
        double last = BT_MAX(r.records[0].end_ms, r.records[1].end_ms);
        assert_true(late < (nodes[i][0] == 1 ? 480 : 240));
        assert_true(first > move && first < move + 40);
        bool shared = nodes[i][0] == 1 || nodes[i][1] == 1;
        assert_true(last > (shared ? 2 : 1) * move && last < (shared ? 2 : 1) * move + 40);
        bt_sim_result_cleanup(&r);
    }
}

/* A prefix that all use, under a policy that fetches nothing: each node computes it once, or, with
 * copies ahead of need, the first node alone. */
static void test_copies(void **state)
{
    (void)state;
    enum { N_REQ = 300, SHARED = 20, N_P = 4 };
    static struct bt_sim_request req[N_REQ];
    static uint32_t blocks[(SHARED + 1) * N_REQ];
    for (uint32_t i = 0; i < N_REQ; i++) { /* the first one is done before the others come */
        uint32_t first = (SHARED + 1) * i;
        req[i] = (struct bt_sim_request){.at_ms = i == 0 ? 0 : 3000 + 60.0 * i,
                                         .input = 512 * (SHARED + 1),
                                         .output = 4,
                                         .first = first,
                                         .n_blocks = SHARED + 1};
        for (uint32_t k = 0; k < SHARED; k++) {
            blocks[first + k] = k;
        }
        blocks[first + SHARED] = SHARED + i;
    }
    struct bt_sim_trace t = {.requests = req,
                             .n = N_REQ,
                             .blocks = blocks,
                             .n_blocks = BT_ARRAY_LEN(blocks),
                             .n_unique = SHARED + N_REQ};
    struct bt_sim_cluster c;
    char err[256];
    assert_int_equal(bt_sim_cluster_load("a800-70b", &c, err, sizeof(err)), BT_OK);
    c.prefill_nodes = N_P;
    c.decode_nodes = 2;
    for (int copies = 0; copies < 2; copies++) {
        struct bt_sim_options o = {.policy = &bt_sched_cache_aware,
                                   .admission = &bt_sched_admit_none,
                                   .rate = 1,
                                   .to = 1,
                                   .seed = 1,
                                   .life_ms = 1000,
                                   .replica_bytes_per_s = copies * 10e9,
                                   .replica_uses = 2};
        struct bt_sim_result r;
        bt_sim_run(&c, &t, &o, &r);
        uint32_t computed = N_REQ + SHARED * (copies ? 1 : N_P); /* blocks */
        /* Two that come at once to a node that has none of it may compute it in the same steps. */
        assert_in_range(r.input_tokens - r.cached_tokens, 512 * computed,
                        512 * (computed + (copies ? 0 : SHARED)));
        assert_int_equal(r.copies, copies ? N_P - 1 : 0);
        assert_true(r.bytes_copied == r.copies * SHARED * 512 * c.token_bytes);
        bt_sim_result_cleanup(&r);
    }
}

/* From a split that is wrong either way roles by load come to a better one, and everybody is
 * served.
 */
static void test_roles(void **state)
{
    (void)state;
    static const struct {
        double prefill, decode;
        uint32_t tbt_ms;
        double rate;
    } wrong[] = {{1, 5, 100, 0.5}, {5, 1, 50, 3}};
    for (size_t k = 0; k < BT_ARRAY_LEN(wrong); k++) {
        struct bt_sim_cluster c;
        struct bt_sim_trace t;
        double ttft[2], tbt[2];
        char err[256];
        assert_int_equal(bt_sim_cluster_load("a800-70b", &c, err, sizeof(err)), BT_OK);
        c.prefill_nodes = wrong[k].prefill;
        c.decode_nodes = wrong[k].decode;
        assert_int_equal(bt_sim_trace_load(SMALL, &t, err, sizeof(err)), BT_OK);
        for (int by_load = 0; by_load < 2; by_load++) {
            struct bt_sim_options o = {.policy = &bt_sched_kvcache,
                                       .admission = &bt_sched_admit_none,
                                       .rate = wrong[k].rate,
                                       .to = 1,
                                       .seed = 1,
                                       .ttft_ms = 5000,
                                       .tbt_ms = wrong[k].tbt_ms,
                                       .fetch_ratio = 1.5,
                                       .life_ms = 10000,
                                       .roles_window_ms = by_load ? 5000 : 0,
                                       .sample_ms = 1000};
            struct bt_sim_result r;
            struct bt_sim_summary s;
            bt_sim_run(&c, &t, &o, &r);
            bt_sim_summarize(&r, &o, &s);
            assert_true(s.prefill_busy > 0 && s.prefill_busy <= 1);
            assert_int_equal(s.outcomes[BT_SIM_SERVED], r.n);
            ttft[by_load] = s.ttft_ms.mean;
            tbt[by_load] = s.tbt_ms.mean;
            uint32_t last = r.samples[r.n_samples - 1].prefill_nodes;
            assert_true(by_load ? r.role_changes >= 1 : r.role_changes == 0);
            assert_true(by_load ? (k == 0 ? last > 1 : last < 5) : last == wrong[k].prefill);
            bt_sim_result_cleanup(&r);
        }
        assert_true(k == 0 ? ttft[1] < 0.9 * ttft[0] : tbt[1] < 0.9 * tbt[0]);
        bt_sim_trace_cleanup(&t);
    }
}

/* A prompt that nobody could prefill in time, prefilled late, brings later ones into time. */
static void test_late_pays(void **state)
{
    (void)state;
    struct bt_sim_cluster c;
    struct bt_sim_trace t;
    char err[256];
    uint32_t good[2];
    assert_int_equal(bt_sim_cluster_load("a800-70b", &c, err, sizeof(err)), BT_OK);
    c.prefill_nodes = 4;
    c.decode_nodes = 2;
    assert_int_equal(bt_sim_trace_load(SMALL, &t, err, sizeof(err)), BT_OK);
    for (int i = 0; i < 2; i++) {
        struct bt_sim_options o = {.policy = &bt_sched_baton,
                                   .admission = &bt_sched_admit_priced,
                                   .eviction = &bt_evict_lru,
                                   .rate = 1,
                                   .to = 1,
                                   .seed = 1,
                                   .ttft_ms = 1000,
                                   .tbt_ms = 50,
                                   .fetch_ratio = 1.5,
                                   .life_ms = 10000,
                                   .late_wait_ms = 60000 * i};
        struct bt_sim_result r;
        struct bt_sim_summary s;
        bt_sim_run(&c, &t, &o, &r);
        bt_sim_summarize(&r, &o, &s);
        good[i] = s.good;
        assert_int_equal(r.background > 0, i == 1);
        bt_sim_result_cleanup(&r);
    }
    assert_true(good[1] > 1.1 * good[0]);
    bt_sim_trace_cleanup(&t);
}

/* Short answers under overload: rows on few of the decode nodes, prompts in whole chunks on the
 * others, which hand them over. */
static void test_packing_pays(void **state)
{
    (void)state;
    enum { N_REQ = 1200 };
    static struct bt_sim_request req[N_REQ];
    static uint32_t blocks[4 * N_REQ];
    for (uint32_t i = 0; i < N_REQ; i++) {
        req[i] = (struct bt_sim_request){
            .at_ms = 20.0 * i, .input = 2048, .output = 15 + i % 30, .first = 4 * i};
        for (uint32_t b = 0; b < 4; b++) {
            blocks[4 * i + b] = 4 * i + b;
        }
    }
    struct bt_sim_trace t = {
        .requests = req, .n = N_REQ, .blocks = blocks, .n_unique = BT_ARRAY_LEN(blocks)};
    struct bt_sim_cluster c;
    char err[256];
    uint32_t good[2];
    assert_int_equal(bt_sim_cluster_load("a800-70b", &c, err, sizeof(err)), BT_OK);
    c.prefill_nodes = 2;
    c.decode_nodes = 6;
    for (int i = 0; i < 2; i++) {
        struct bt_sim_options o = {.policy = &bt_sched_baton,
                                   .admission = &bt_sched_admit_priced,
                                   .eviction = &bt_evict_lru,
                                   .rate = 1,
                                   .to = 1,
                                   .seed = 1,
                                   .ttft_ms = 1000,
                                   .tbt_ms = 50,
                                   .fetch_ratio = 1.5,
                                   .life_ms = 10000,
                                   .mixed_step_ms = 37.5,
                                   .mixed_gap_ms = 47.5,
                                   .pack_share = 0.75 * i};
        struct bt_sim_result r;
        struct bt_sim_summary s;
        uint32_t handed = 0;
        bt_sim_run(&c, &t, &o, &r);
        bt_sim_summarize(&r, &o, &s);
        good[i] = s.good;
        for (uint32_t k = 0; k < r.n; k++) {
            const struct bt_sim_record *x = &r.records[k];
            assert_int_not_equal(x->outcome, BT_SIM_PENDING);
            handed += x->outcome == BT_SIM_SERVED && x->prefill >= 2 && x->decode != x->prefill;
        }
        assert_true(i == 0 ? handed == 0 : handed > N_REQ / 5);
        bt_sim_result_cleanup(&r);
    }
    assert_true(good[1] > 1.2 * good[0]);
}

/* What docs/SIMULATION.md says of the public trace, where it is. */
static void test_published_order(void **state)
{
    (void)state;
    static const char path[] = "../shared/traces/conversation_trace.jsonl";
    if (access(path, R_OK) != 0) {
        skip();
    }
    static const char *const names[] = {"random", "least-load", "cache-aware", "kvcache"};
    static const double published_s[] = {19.65, 5.27, 3.58, 3.07};
    struct bt_sim_cluster c;
    struct bt_sim_trace t;
    char err[256];
    double mean_ms[4];
    assert_int_equal(bt_sim_cluster_load("a800-70b", &c, err, sizeof(err)), BT_OK);
    assert_int_equal(bt_sim_trace_load(path, &t, err, sizeof(err)), BT_OK);
    for (int i = 0; i < 4; i++) {
        struct bt_sim_options o = {.policy = bt_sched_policy_find(names[i]),
                                   .admission = &bt_sched_admit_none,
                                   .eviction = &bt_evict_density,
                                   .rate = 1,
                                   .to = 1,
                                   .seed = 1,
                                   .fetch_ratio = 1.5,
                                   .life_ms = 10000};
        struct bt_sim_result r;
        struct bt_sim_summary s;
        bt_sim_run(&c, &t, &o, &r);
        bt_sim_summarize(&r, &o, &s);
        mean_ms[i] = s.ttft_ms.mean;
        bt_sim_result_cleanup(&r);
    }
    for (int i = 0; i < 3; i++) { /* their ratios, within a fifth */
        double ours = mean_ms[i] / mean_ms[3], theirs = published_s[i] / published_s[3];
        assert_true(mean_ms[i] > mean_ms[i + 1]);
        assert_true(ours > 0.8 * theirs && ours < 1.2 * theirs);
    }
    bt_sim_trace_cleanup(&t);
}

/* A plan answers with a split, from a preset and from a model's shape; what cannot be planned is
 * named.
 */
static void test_plan(void **state)
{
    (void)state;
    struct bt_sim_cluster c;
    uint32_t per;
    char err[512], text[8192];
    assert_int_equal(
        bt_sim_plan_instance("tests/golden/models/tiny-qwen2", "h100", &c, &per, err, sizeof(err)),
        BT_OK);
    assert_int_equal(per, 1);
    assert_true(c.prefill.token_ns[0] > 0 && c.decode.kv_ns > 0 && c.kv_tokens > 1000);
    assert_int_equal(bt_sim_plan_instance("tests/golden/models/tiny-qwen2", "abacus", &c, &per, err,
                                          sizeof(err)),
                     BT_ERR_INVALID);
    assert_non_null(strstr(err, "abacus"));
    assert_int_equal(bt_sim_plan_instance("no-such", NULL, &c, &per, err, sizeof(err)),
                     BT_ERR_NOT_FOUND);
    struct bt_sim_trace t;
    assert_int_equal(bt_sim_trace_load(SMALL, &t, err, sizeof(err)), BT_OK);
    struct bt_sim_plan_options o = {.config = "a800-70b",
                                    .gpus = 32,
                                    .sim = {.rate = 1,
                                            .to = 1,
                                            .seed = 1,
                                            .ttft_ms = 10000,
                                            .tbt_ms = 100,
                                            .fetch_ratio = 1.5,
                                            .work_weight = 0.5,
                                            .life_ms = 10000}};
    FILE *f = tmpfile();
    assert_non_null(f);
    assert_int_equal(bt_sim_plan(&t, &o, f, err, sizeof(err)), BT_OK);
    rewind(f);
    text[fread(text, 1, sizeof(text) - 1, f)] = '\0';
    static const char *const parts[] = {"interference", "all do both", "1:3 ",
                                        "3:1 mixed",    "answer",      "how sure"};
    for (size_t i = 0; i < BT_ARRAY_LEN(parts); i++) {
        assert_non_null(strstr(text, parts[i]));
    }
    o.gpus = 8; /* one instance: nothing to take apart */
    assert_int_equal(bt_sim_plan(&t, &o, f, err, sizeof(err)), BT_ERR_INVALID);
    assert_non_null(strstr(err, "--gpus"));
    o.gpus = 32;
    o.sim.tbt_ms = 0;
    assert_int_equal(bt_sim_plan(&t, &o, f, err, sizeof(err)), BT_ERR_INVALID);
    assert_non_null(strstr(err, "--tbt"));
    fclose(f);
    bt_sim_trace_cleanup(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cache),
        cmocka_unit_test(test_disk),
        cmocka_unit_test(test_decode),
        cmocka_unit_test(test_decode_joining),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_prompt_beside_rows),
        cmocka_unit_test(test_row_due),
        cmocka_unit_test(test_row_joins_prompt),
        cmocka_unit_test(test_decode_late),
        cmocka_unit_test(test_decode_full),
        cmocka_unit_test(test_traces),
        cmocka_unit_test(test_clusters),
        cmocka_unit_test(test_cluster_files),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_late_pays),
        cmocka_unit_test(test_packing_pays),
        cmocka_unit_test(test_seed),
        cmocka_unit_test(test_link_ends),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_roles),
        cmocka_unit_test(test_published_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
