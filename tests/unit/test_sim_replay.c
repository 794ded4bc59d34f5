/* baton-sim cache: the replay against plain models, and against published figures where the traces
 * are at hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "conductor/sim/replay.h"

#define SMALL "tests/sim/small.jsonl"

static struct bt_sim_cluster cluster;

static void load(const char *path, struct bt_sim_trace *t)
{
    char err[256] = "";
    if (bt_sim_trace_load(path, t, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
}

static struct bt_sim_replay_result replay(const struct bt_sim_trace *t, const char *policy,
                                          uint32_t n, bt_sim_replay_t mode, double from, double to)
{
    struct bt_sim_replay_options o = {.mode = mode, .from = from, .to = to, .cluster = &cluster};
    struct bt_sim_replay_result r;
    char err[256] = "";
    assert_int_equal(bt_sim_replay(t, policy != NULL ? bt_evict_by_name(policy) : NULL, n, &o, &r,
                                   err, sizeof(err)),
                     BT_OK);
    return r;
}

static double ratio(const struct bt_sim_replay_result *r)
{
    return (double)r->hit_blocks / (double)r->blocks;
}

static uint32_t longest(const struct bt_sim_trace *t)
{
    uint32_t n = 1;
    for (uint32_t i = 0; i < t->n; i++) {
        n = BT_MAX(n, t->requests[i].n_blocks);
    }
    return n;
}

/* Hits of LRU by definition: fewer than n other blocks since the last use. */
static uint64_t lru_hits(const struct bt_sim_trace *t, uint32_t n)
{
    uint64_t hits = 0;
    uint32_t *last = bt_malloc(t->n_unique * sizeof(*last));
    bool *seen = bt_calloc(t->n_unique, sizeof(*seen));
    memset(last, 0xff, t->n_unique * sizeof(*last));
    for (uint32_t i = 0; i < t->n_blocks; i++) {
        uint32_t b = t->blocks[i], others = 0;
        if (last[b] != UINT32_MAX) {
            memset(seen, 0, t->n_unique * sizeof(*seen));
            for (uint32_t k = last[b] + 1; k < i; k++) {
                others += !seen[t->blocks[k]];
                seen[t->blocks[k]] = true;
            }
            hits += others < n;
        }
        last[b] = i;
    }
    free(last);
    free(seen);
    return hits;
}

static void lru_by_definition(void **state)
{
    (void)state;
    struct bt_sim_trace t;
    load(SMALL, &t);
    uint32_t room = longest(&t);
    for (uint32_t n = room; n < 6 * room; n += 1 + room / 2) {
        struct bt_sim_replay_result r = replay(&t, "lru", n, BT_SIM_REPLAY_SEQUENCE, 0, 1);
        assert_int_equal(r.blocks, t.n_blocks);
        assert_int_equal(r.hit_blocks, lru_hits(&t, n));
    }
    bt_sim_trace_cleanup(&t);
}

/* Nobody beats who knows the future; with room for all, all find the same; halves add up. */
static void bounds(void **state)
{
    (void)state;
    static const char *const names[] = {"density", "slru", "lru", "lfu", "length_aware"};
    struct bt_sim_trace t;
    load(SMALL, &t);
    uint32_t n = 2 * longest(&t);
    struct bt_sim_replay_result best = replay(&t, NULL, n, BT_SIM_REPLAY_SEQUENCE, 0, 1);
    struct bt_sim_replay_result all = replay(&t, NULL, 0, BT_SIM_REPLAY_SEQUENCE, 0, 1);
    assert_int_equal(all.evicted, 0);
    assert_int_equal(all.hit_blocks, t.n_blocks - t.n_unique);
    assert_true(best.evicted > 0);
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        struct bt_sim_replay_result r = replay(&t, names[i], n, BT_SIM_REPLAY_SEQUENCE, 0, 1);
        struct bt_sim_replay_result u = replay(&t, names[i], 0, BT_SIM_REPLAY_SEQUENCE, 0, 1);
        struct bt_sim_replay_result a = replay(&t, names[i], n, BT_SIM_REPLAY_SEQUENCE, 0, 0.5);
        struct bt_sim_replay_result b = replay(&t, names[i], n, BT_SIM_REPLAY_SEQUENCE, 0.5, 1);
        assert_true(r.hit_blocks <= best.hit_blocks);
        assert_int_equal(u.hit_blocks, all.hit_blocks);
        assert_int_equal(a.hit_blocks + b.hit_blocks, r.hit_blocks);
        assert_true(r.prefix_tokens <= r.hit_tokens && r.hit_tokens <= r.tokens);
        assert_true(r.saved_s >= 0 && r.saved_s < r.prefill_s);
    }
    bt_sim_trace_cleanup(&t);
}

/* As the kvstore serves, hits are prefixes, and density leaves no block without its head. */
static void prefixes(void **state)
{
    (void)state;
    struct bt_sim_trace t;
    load(SMALL, &t);
    struct bt_sim_replay_result r =
        replay(&t, "density", 2 * longest(&t), BT_SIM_REPLAY_REQUEST, 0, 1);
    assert_true(r.evicted > 0 && r.hit_blocks > 0);
    assert_int_equal(r.headless, 0);
    assert_int_equal(r.hit_tokens, r.prefix_tokens);
    bt_sim_trace_cleanup(&t);
}

static void too_small(void **state)
{
    (void)state;
    struct bt_sim_trace t;
    struct bt_sim_replay_options o = {.to = 1, .cluster = &cluster};
    struct bt_sim_replay_result r;
    char err[256] = "";
    load(SMALL, &t);
    assert_int_equal(
        bt_sim_replay(&t, bt_evict_by_name("lru"), longest(&t) - 1, &o, &r, err, sizeof(err)),
        BT_ERR_INVALID);
    assert_non_null(strstr(err, "--blocks"));
    bt_sim_trace_cleanup(&t);
}

/* ---- the traces of FAST'25 ---- */

static const struct {
    const char *trace;
    uint32_t blocks;
    double lru; /* published to three places */
} golden[] = {
    {"conversation_trace.jsonl", 1000, .044},   {"conversation_trace.jsonl", 10000, .211},
    {"conversation_trace.jsonl", 30000, .326},  {"conversation_trace.jsonl", 50000, .355},
    {"conversation_trace.jsonl", 100000, .364}, {"synthetic_trace.jsonl", 1000, .082},
    {"synthetic_trace.jsonl", 10000, .423},     {"synthetic_trace.jsonl", 30000, .624},
    {"synthetic_trace.jsonl", 50000, .640},     {"synthetic_trace.jsonl", 100000, .640},
};

/* LRU is reproduced; density finds more than the better of LRU and LFU on the second half at each
 * of these capacities below the trace's blocks, and as much above. */
static void published(void **state)
{
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(golden); i++) {
        struct bt_sim_trace t;
        char *path = bt_sprintf("../shared/traces/%s", golden[i].trace);
        if (access(path, R_OK) != 0) {
            free(path);
            skip();
        }
        load(path, &t);
        free(path);
        uint32_t n = golden[i].blocks;
        struct bt_sim_replay_result r = replay(&t, "lru", n, BT_SIM_REPLAY_SEQUENCE, 0, 1);
        assert_in_range((uint64_t)(1e4 * ratio(&r)), (uint64_t)(1e4 * golden[i].lru - 5),
                        (uint64_t)(1e4 * golden[i].lru + 9)); /* rounded or cut off */
        struct bt_sim_replay_result lru = replay(&t, "lru", n, BT_SIM_REPLAY_SEQUENCE, 0.5, 1);
        struct bt_sim_replay_result lfu = replay(&t, "lfu", n, BT_SIM_REPLAY_SEQUENCE, 0.5, 1);
        struct bt_sim_replay_result own = replay(&t, "density", n, BT_SIM_REPLAY_SEQUENCE, 0.5, 1);
        uint64_t better = BT_MAX(lru.hit_blocks, lfu.hit_blocks);
        if (n < t.n_unique) {
            assert_true(own.hit_blocks > better);
        } else {
            assert_int_equal(own.hit_blocks, better);
        }
        assert_int_equal(own.headless, 0);
        bt_sim_trace_cleanup(&t);
    }
}

int main(void)
{
    char err[256];
    if (bt_sim_cluster_load("h200-8b", &cluster, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lru_by_definition), cmocka_unit_test(bounds),
        cmocka_unit_test(prefixes),          cmocka_unit_test(too_small),
        cmocka_unit_test(published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
