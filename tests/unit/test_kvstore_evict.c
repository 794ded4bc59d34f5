/* Eviction policies against a plain model: who goes first, and that what is in use never goes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "kvstore/evict.h"

#define N 53u

struct model {
    bool cached, pinned;
    uint64_t used;
    uint32_t uses, depth;
};

static uint64_t seed = 88172645463325252ull;
static uint32_t rnd(uint32_t n)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 11) % n;
}

static bool lru(const struct model *a, const struct model *b)
{
    return a->used < b->used;
}
static bool lfu(const struct model *a, const struct model *b)
{
    return a->uses != b->uses ? a->uses < b->uses : lru(a, b);
}
static bool length_aware(const struct model *a, const struct model *b)
{
    return a->uses != b->uses     ? a->uses < b->uses
           : a->depth != b->depth ? a->depth > b->depth
                                  : lru(a, b);
}
static bool reuse(const struct model *a, const struct model *b)
{
    return a->used + (a->uses > 1 ? 2 * N : 0) < b->used + (b->uses > 1 ? 2 * N : 0);
}

/* Random events on both; the victim is always the model's. */
static void against(const struct bt_evict_policy *p,
                    bool (*before)(const struct model *, const struct model *))
{
    struct model m[N] = {0};
    struct bt_evict *e = p->create(N);
    uint64_t tick = 0, victims = 0;
    assert_ptr_equal(bt_evict_by_name(p->name), p);
    for (int step = 0; step < 50000; step++) {
        uint32_t s = rnd(N), n = 0, v = BT_EVICT_NONE;
        switch (rnd(5)) {
        case 0:
            if (!m[s].cached) {
                m[s] = (struct model){true, true, ++tick, 1, rnd(8)};
                p->admit(e, s, m[s].depth);
            }
            break;
        case 1:
            if (m[s].cached) {
                m[s].uses++;
                m[s].used = ++tick;
                p->hit(e, s);
            }
            break;
        case 2:
            if (m[s].cached) {
                m[s].pinned = true;
                p->pin(e, s);
            }
            break;
        case 3:
            if (m[s].cached) {
                m[s].used = m[s].pinned ? ++tick : m[s].used;
                m[s].pinned = false;
                p->unpin(e, s);
            }
            break;
        default:
            if (m[s].cached && rnd(4) == 0) {
                m[s].cached = false;
                p->drop(e, s);
            }
        }
        for (uint32_t i = 0; i < N; i++) {
            if (m[i].cached && !m[i].pinned) {
                n++;
                v = v == BT_EVICT_NONE || before(&m[i], &m[v]) ? i : v;
            }
        }
        assert_int_equal(p->evictable(e), n);
        uint32_t got = p->victim(e);
        assert_int_equal(got == BT_EVICT_NONE, v == BT_EVICT_NONE);
        if (got != v) { /* only if neither goes before the other */
            assert_false(before(&m[v], &m[got]) || m[got].pinned || !m[got].cached);
        }
        victims += v != BT_EVICT_NONE;
    }
    assert_true(victims > 10000);
    p->destroy(e);
}

static void lru_order(void **state)
{
    (void)state;
    against(&bt_evict_lru, lru);
}
static void lfu_order(void **state)
{
    (void)state;
    against(&bt_evict_lfu, lfu);
}
static void length_aware_order(void **state)
{
    (void)state;
    against(&bt_evict_length_aware, length_aware);
}
static void reuse_order(void **state)
{
    (void)state;
    against(&bt_evict_reuse, reuse);
}

/* Blocks that are used again and again among a stream of blocks that are used once; returns how
 * many of the uses found their block. */
static uint32_t scan(const struct bt_evict_policy *p)
{
    enum { SLOTS = 64, HOT = 24, ROUNDS = 40 };
    struct bt_evict *e = p->create(SLOTS);
    uint32_t key_of[SLOTS], free_slots = SLOTS, found = 0, once = 1000;
    memset(key_of, 0xff, sizeof(key_of));
    for (uint32_t i = 0; i < ROUNDS * 2 * HOT; i++) {
        uint32_t key = i % 4 == 0 ? i / 4 % HOT : once++, slot = 0; /* each hot one of 96 */
        while (slot < SLOTS && key_of[slot] != key) {
            slot++;
        }
        if (slot < SLOTS) {
            found++;
            p->hit(e, slot);
            continue;
        }
        if (free_slots > 0) {
            slot = --free_slots;
        } else {
            slot = p->victim(e);
            p->drop(e, slot);
        }
        key_of[slot] = key;
        p->admit(e, slot, 0);
        p->unpin(e, slot);
        if (i / 4 / HOT == 0 && i % 4 == 0) { /* its second use comes soon */
            p->hit(e, slot);
        }
    }
    p->destroy(e);
    return found;
}

static void a_second_use_resists_a_scan(void **state)
{
    (void)state;
    assert_int_equal(scan(&bt_evict_lru), 0);
    assert_true(scan(&bt_evict_reuse) > 400);
}

static void names(void **state)
{
    (void)state;
    assert_ptr_equal(bt_evict_by_name("slru"), &bt_evict_slru);
    assert_null(bt_evict_by_name("fifo"));
    assert_null(bt_evict_by_name(""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lru_order),
        cmocka_unit_test(lfu_order),
        cmocka_unit_test(length_aware_order),
        cmocka_unit_test(reuse_order),
        cmocka_unit_test(a_second_use_resists_a_scan),
        cmocka_unit_test(names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
