/* Copies ahead of need: which prefix, where to, within the budget. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>

#include "common/policy/sched/copies.h"

#define BLOCKS 9

/* Three nodes that prefill, the last one with the shortest queue, and one that decodes. */
struct world {
    struct bt_sched_copies copies;
    struct bt_sched_params params;
    struct bt_sched_worker w[4];
    struct bt_sched_kvstore kv[4];
    struct bt_sched_snapshot s;
    uint64_t keys[BLOCKS];
    struct bt_sched_prefix p;
};

static uint64_t key_of(const void *keys, uint32_t blocks)
{
    return ((const uint64_t *)keys)[blocks - 1];
}

static void world_init(struct world *x, double bytes_per_s)
{
    *x = (struct world){.params = {.prior.prefill_tokens_per_s = 1000}};
    for (uint32_t i = 0; i < 4; i++) {
        x->w[i] = (struct bt_sched_worker){
            .kvstore = i, .prefill = i < 3, .decode = i == 3, .queue.tokens = 900 - 300 * i};
    }
    for (uint32_t i = 0; i < BLOCKS; i++) {
        x->keys[i] = 1000 + i;
    }
    x->kv[0].match_blocks = 8;
    x->s = (struct bt_sched_snapshot){
        .workers = x->w, .n_workers = 4, .kvstores = x->kv, .n_kvstores = 4};
    x->p = (struct bt_sched_prefix){
        .key = key_of, .arg = x->keys, .blocks = BLOCKS, .extent_blocks = 1, .block_bytes = 1e6};
    bt_sched_copies_init(&x->copies, bytes_per_s, 4, 0);
}

/* A request half a second later. True: a copy is worth it, and is spent. */
static bool use(struct world *x, struct bt_sched_copy *c)
{
    x->s.now_ms += 500;
    bool due = bt_sched_copies_look(&x->copies, &x->params, &x->s, &x->p, true, c);
    if (due) {
        bt_sched_copies_spend(&x->copies, c);
    }
    return due;
}

static void test_off(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_copy c;
    world_init(&x, 0);
    for (int i = 0; i < 40; i++) {
        assert_false(use(&x, &c));
    }
}

/* One prefix used again and again: a copy for each four uses within a minute as the budget allows,
 * on the node with the shortest queue that has none. What no node has does not count. */
static void test_one_prefix(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_copy c;
    uint32_t copies = 0;
    world_init(&x, 2e6); /* a copy takes four seconds of it */
    for (uint32_t i = 0; i < 40; i++) {
        x.keys[8] = 2000 + i;
        if (!use(&x, &c)) {
            continue;
        }
        assert_int_equal(c.from, 0);
        assert_int_equal(c.to, copies == 0 ? 2 : 1);
        assert_int_equal(c.blocks, 8);
        assert_true(c.bytes == 8e6 && c.uses >= 4);
        assert_true(x.s.now_ms >= (copies == 0 ? 4000 : 8000));
        x.kv[c.to].match_blocks = 8;
        copies++;
    }
    assert_int_equal(copies, 2); /* all three have it; the decode node needs none */
}

/* Requests that share two blocks, or one extent of four: their head gets the copy. */
static void test_head(void **state)
{
    (void)state;
    for (uint32_t extent = 1; extent <= 4; extent += 3) {
        struct world x;
        struct bt_sched_copy c;
        bool found = false;
        uint32_t head = extent == 1 ? 2 : 4;
        world_init(&x, 1e9);
        x.p.extent_blocks = extent;
        for (uint32_t i = 0; i < 5 && !found; i++) {
            for (uint32_t k = head; k < BLOCKS; k++) {
                x.keys[k] = 3000 + 10 * i + k;
            }
            found = use(&x, &c);
        }
        assert_true(found);
        assert_int_equal(c.blocks, head);
    }
}

/* Nodes that cannot take it, and the moment at which another copy is under way. */
static void test_targets(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_copy c;
    world_init(&x, 1e9);
    for (int i = 0; i < 8; i++) {
        x.s.now_ms += 500;
        assert_false(bt_sched_copies_look(&x.copies, &x.params, &x.s, &x.p, false, &c));
    }
    x.kv[2].slots_total = 100; /* full */
    x.kv[1].draining = true;
    assert_false(use(&x, &c));
    x.kv[2].slots_free = 8;
    x.w[2].draining = true;
    assert_false(use(&x, &c));
    x.w[2].draining = false;
    x.kv[2].avoid = true;
    assert_false(use(&x, &c));
    x.kv[2].avoid = false;
    assert_true(use(&x, &c)); /* counted all the while */
    assert_int_equal(c.to, 2);
    x.kv[0].avoid = true; /* nobody to copy from */
    assert_false(use(&x, &c));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_off),
        cmocka_unit_test(test_one_prefix),
        cmocka_unit_test(test_head),
        cmocka_unit_test(test_targets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
