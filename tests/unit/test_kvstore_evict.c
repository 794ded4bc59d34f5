/* Eviction policies against a plain model: who goes first, and that what is in use never goes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/policy/evict/evict.h"

#define N      53u
#define GROUPS 3u

struct model {
    bool cached, pinned;
    uint64_t used;
    uint32_t uses, depth;
    uint8_t group;
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
static bool among(uint32_t set, const struct model *m)
{
    return (set >> m->group / 100 & 1) != 0;
}

/* The victim of a set of groups (bit i: group 100 i) is the model's, or as good. */
static uint32_t expect_victim(const struct model *m, uint32_t got, uint32_t set,
                              bool (*before)(const struct model *, const struct model *))
{
    uint32_t v = BT_EVICT_NONE;
    for (uint32_t i = 0; i < N; i++) {
        if (m[i].cached && !m[i].pinned && among(set, &m[i])) {
            v = v == BT_EVICT_NONE || before(&m[i], &m[v]) ? i : v;
        }
    }
    assert_int_equal(got == BT_EVICT_NONE, v == BT_EVICT_NONE);
    if (got != v) { /* only if neither goes before the other */
        assert_false(before(&m[v], &m[got]) || m[got].pinned || !m[got].cached);
        assert_true(among(set, &m[got]));
    }
    return v;
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
                m[s] = (struct model){true, true, ++tick, 1, rnd(8), (uint8_t)(rnd(GROUPS) * 100)};
                struct bt_evict_block b = {.hash = step * 77u,
                                           .depth = m[s].depth,
                                           .parent = BT_EVICT_NONE,
                                           .group = m[s].group};
                p->admit(e, s, &b);
            }
            break;
        case 1:
            if (m[s].cached) {
                m[s].uses++;
                m[s].used = ++tick;
                p->hit(e, s, BT_EVICT_NONE);
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
            n += m[i].cached && !m[i].pinned;
        }
        assert_int_equal(p->evictable(e), n);
        v = expect_victim(m, p->victim(e, NULL), UINT32_MAX, before);
        for (uint32_t g = 0; g < GROUPS; g++) {
            (void)expect_victim(m, p->victim_of(e, (uint8_t)(g * 100)), 1u << g, before);
        }
        struct bt_evict_groups of = {{0}};
        uint32_t set = rnd(1u << GROUPS);
        for (uint32_t g = 0; g < GROUPS; g++) {
            bt_evict_groups_set(&of, g * 100, (set >> g & 1) != 0);
        }
        (void)expect_victim(m, p->victim(e, &of), set, before);
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
            p->hit(e, slot, BT_EVICT_NONE);
            continue;
        }
        if (free_slots > 0) {
            slot = --free_slots;
        } else {
            slot = p->victim(e, NULL);
            p->drop(e, slot);
        }
        key_of[slot] = key;
        struct bt_evict_block b = {.hash = key * 0x9e3779b97f4a7c15ull, .parent = BT_EVICT_NONE};
        p->admit(e, slot, &b);
        p->unpin(e, slot);
        if (i / 4 / HOT == 0 && i % 4 == 0) { /* its second use comes soon */
            p->hit(e, slot, BT_EVICT_NONE);
        }
    }
    p->destroy(e);
    return found;
}

static void what_is_used_again_resists_a_scan(void **state)
{
    (void)state;
    assert_int_equal(scan(&bt_evict_lru), 0);
    assert_true(scan(&bt_evict_density) > 300);
}

/* ---- chains ---- */

#define CHAINS 40u
#define LONG   12u
#define ROOM   128u

/* Chains that share their heads come and go; no victim may be the head of what is cached, unless
 * all that is cached behind it is in use. */
static void heads_stay(void **state)
{
    (void)state;
    const struct bt_evict_policy *p = &bt_evict_density;
    struct bt_evict *e = p->create(ROOM);
    uint32_t slot_of[CHAINS][LONG], owner[ROOM], n_free = ROOM, free_slots[ROOM], headless = 0;
    bool pinned[ROOM] = {false};
    memset(slot_of, 0xff, sizeof(slot_of));
    for (uint32_t i = 0; i < ROOM; i++) {
        free_slots[i] = i;
    }
    for (int round = 0; round < 20000; round++) {
        uint32_t c = rnd(4) != 0 ? rnd(8) : rnd(CHAINS), n = 1 + rnd(LONG), slots[LONG];
        for (uint32_t k = 0; k < n; k++) {
            uint32_t head = k < LONG / 2 ? c / 4 * 4 : c, s = slot_of[head][k]; /* four share */
            if (s != UINT32_MAX) {
                p->pin(e, s);
                p->hit(e, s, k > 0 ? slots[k - 1] : BT_EVICT_NONE);
            } else {
                if (n_free > 0) {
                    s = free_slots[--n_free];
                } else {
                    s = p->victim(e, NULL);
                    assert_int_not_equal(s, BT_EVICT_NONE);
                    assert_false(pinned[s]);
                    uint32_t vc = owner[s] / LONG, vk = owner[s] % LONG;
                    for (uint32_t b = vc; vk + 1 < LONG && b < BT_MIN(CHAINS, vc + 4); b++) {
                        bool shares = b == vc || vk < LONG / 2;
                        headless += shares && slot_of[b][vk + 1] != UINT32_MAX;
                    }
                    slot_of[vc][vk] = UINT32_MAX;
                    p->drop(e, s);
                }
                struct bt_evict_block b = {.hash = (head * LONG + k + 1) * 0x9e3779b97f4a7c15ull,
                                           .depth = k,
                                           .parent = k > 0 ? slots[k - 1] : BT_EVICT_NONE};
                p->admit(e, s, &b);
                slot_of[head][k] = s;
                owner[s] = head * LONG + k;
            }
            pinned[s] = true;
            slots[k] = s;
        }
        for (uint32_t k = n; k-- > 0;) {
            p->unpin(e, slots[k]);
            pinned[slots[k]] = false;
        }
    }
    assert_int_equal(headless, 0);
    p->destroy(e);
}

/* The head of a chain goes when everything behind it is in use, and nothing breaks when a head goes
 * out of turn (its bytes were found to be bad). */
static void heads_go_last(void **state)
{
    (void)state;
    const struct bt_evict_policy *p = &bt_evict_density;
    struct bt_evict *e = p->create(4);
    for (uint32_t s = 0; s < 4; s++) {
        struct bt_evict_block b = {
            .hash = s + 1, .depth = s, .parent = s > 0 ? s - 1 : BT_EVICT_NONE};
        p->admit(e, s, &b);
    }
    for (uint32_t s = 0; s < 3; s++) {
        p->unpin(e, s);
    }
    assert_int_equal(p->evictable(e), 3); /* 3 is in use; 2 is its head */
    uint32_t v = p->victim(e, NULL);
    assert_in_range(v, 0, 2);
    p->unpin(e, 3);
    assert_int_equal(p->victim(e, NULL), 3);
    p->drop(e, 1); /* out of turn */
    struct bt_evict_block other = {.hash = 99, .parent = BT_EVICT_NONE};
    p->admit(e, 1, &other);
    p->unpin(e, 1);
    p->drop(e, 3);
    p->drop(e, 2); /* its head's slot has another block now */
    assert_int_equal(p->evictable(e), 2);
    p->drop(e, 0);
    assert_int_equal(p->victim(e, NULL), 1);
    p->drop(e, 1);
    assert_int_equal(p->victim(e, NULL), BT_EVICT_NONE);
    p->destroy(e);
}

/* A copy that another node has goes before a block that would have to be computed. */
static void copies_go_first(void **state)
{
    (void)state;
    const struct bt_evict_policy *p = &bt_evict_density;
    struct bt_evict *e = p->create(8);
    for (uint32_t s = 0; s < 8; s++) {
        struct bt_evict_block b = {.hash = s + 1,
                                   .parent = BT_EVICT_NONE,
                                   .origin = s == 5 ? BT_EVICT_COPY : BT_EVICT_COMPUTED};
        p->admit(e, s, &b);
        p->unpin(e, s);
    }
    assert_int_equal(p->victim(e, NULL), 5);
    p->destroy(e);
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
        cmocka_unit_test(lru_order),          cmocka_unit_test(lfu_order),
        cmocka_unit_test(length_aware_order), cmocka_unit_test(what_is_used_again_resists_a_scan),
        cmocka_unit_test(heads_stay),         cmocka_unit_test(heads_go_last),
        cmocka_unit_test(copies_go_first),    cmocka_unit_test(names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
