/* The seal thread through its own interface: the order of jobs, what is known when one is done, and
 * the end in the middle of them. */
#include "kv_node.h"

#include <dirent.h>

static struct node node;

struct done {
    uint32_t n, order[16];
};
struct job {
    struct done *to;
    uint32_t number, slot;
    bool again; /* its end submits another one */
};

static void on_done(void *arg)
{
    struct job *j = arg;
    assert_true(j->to->n < 16);
    j->to->order[j->to->n++] = j->number;
    for (uint32_t l = 0; l < node.layout.n_layers; l++) {
        assert_true(bt_slab_crcs_known(bt_pool_crcs(node.cache->pool), j->slot, l));
    }
    if (j->again) {
        struct bt_kv_key k;
        node_key(1, j->number, &k);
        j->again = false;
        bt_sealer_submit(node.sealer, &j->slot, &k, 1, on_done, j);
    }
}

static void jobs_are_done_in_order(void **state)
{
    struct done d = {0};
    struct job jobs[8];
    uint32_t slots[8];
    (void)state;
    node_start(&node, 24, 60000);
    assert_int_equal(cache_take(node.cache, 8, slots), BT_OK);
    for (uint32_t i = 0; i < 8; i++) {
        struct bt_kv_key k;
        node_key(1, i, &k);
        jobs[i] = (struct job){.to = &d, .number = i, .slot = slots[i], .again = i == 2};
        assert_false(bt_slab_crcs_known(bt_pool_crcs(node.cache->pool), slots[i], 1));
        bt_sealer_submit(node.sealer, &slots[i], &k, 1, on_done, &jobs[i]);
    }
    assert_int_equal(d.n, 0); /* on the loop only */
    NODE_UNTIL(&node, d.n == 9);
    for (uint32_t i = 0; i < 8; i++) {
        struct bt_kv_key k;
        node_key(1, i, &k);
        assert_int_equal(d.order[i], i);
        struct bt_cache_block b = {.key = &k, .n_tokens = NODE_BT, .depth = i};
        assert_true(bt_cache_seal(node.cache, slots[i], &b));
        assert_int_equal(bt_pool_verify(node.cache->pool, slots[i]), BT_OK);
    }
    assert_int_equal(d.order[8], 2);
    bt_cache_put(node.cache, slots, 8);
    node_stop(&node);
}

static uint32_t open_files(void)
{
    uint32_t n = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir) != NULL) {
        n++;
    }
    closedir(dir);
    return n;
}

/* Jobs that are open then are dropped. Its descriptor and its thread end. */
static void the_end_drops_jobs(void **state)
{
    struct done d = {0};
    struct job jobs[8];
    uint32_t slots[8];
    struct bt_sealer *s;
    (void)state;
    node_start(&node, 24, 60000);
    assert_int_equal(cache_take(node.cache, 8, slots), BT_OK);
    uint32_t files = open_files();
    for (int round = 0; round < 20; round++) {
        assert_int_equal(bt_sealer_create(node.loop, node.cache->pool, 2, &s), BT_OK);
        assert_int_equal(open_files(), files + 1);
        for (uint32_t i = 0; i < 8; i++) {
            struct bt_kv_key k;
            node_key(1, i, &k);
            jobs[i] = (struct job){.to = &d, .number = i, .slot = slots[i]};
            bt_sealer_submit(s, &slots[i], &k, 1, on_done, &jobs[i]);
        }
        bt_sealer_destroy(s);
        bt_loop_poll(node.loop, 0);
        assert_int_equal(open_files(), files);
    }
    assert_int_equal(d.n, 0);
    bt_sealer_destroy(NULL);
    bt_cache_put(node.cache, slots, 8);
    node_stop(&node);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_are_done_in_order),
        cmocka_unit_test(the_end_drops_jobs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
