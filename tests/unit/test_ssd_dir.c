/* The directory of the SSD slab against a plain model: what is found, what goes first, no slot
 * lost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/policy/evict/ssd_dir.h"

#define N    97u /* slots */
#define KEYS 400u

struct model { /* of a slot */
    enum { FREE, BUSY, VALID } state;
    uint32_t key, pins, generation;
    uint64_t used; /* order of use */
};

static void key_of(uint32_t i, struct bt_kv_key *k)
{
    memset(k, 0, sizeof(*k)); /* little entropy: runs of the table collide */
    k->b[0] = (uint8_t)i;
    k->b[1] = (uint8_t)(i >> 8);
}

static uint64_t seed = 88172645463325252ull;
static uint32_t rnd(uint32_t n)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 11) % n;
}

static void check(const struct bt_ssd_dir *d, const struct model *m)
{
    uint32_t n_free = 0, n_valid = 0, victim = BT_SSD_NONE;
    uint32_t where[KEYS];
    memset(where, 0xff, sizeof(where));
    for (uint32_t s = 0; s < N; s++) {
        n_free += m[s].state == FREE;
        assert_int_equal(bt_ssd_dir_is_valid(d, s), m[s].state == VALID);
        if (m[s].state == VALID) {
            n_valid++;
            where[m[s].key] = s;
            if (m[s].pins == 0 && (victim == BT_SSD_NONE || m[s].used < m[victim].used)) {
                victim = s;
            }
        }
        if (m[s].state != FREE) {
            assert_int_equal(bt_ssd_dir_entry(d, s)->generation, m[s].generation);
        }
    }
    assert_int_equal(bt_ssd_dir_free_count(d), n_free);
    assert_int_equal(bt_ssd_dir_valid(d), n_valid);
    assert_int_equal(bt_ssd_dir_victim(d), victim);
    for (uint32_t i = 0; i < KEYS; i++) {
        struct bt_kv_key k;
        key_of(i, &k);
        assert_int_equal(bt_ssd_dir_find(d, &k), where[i]);
    }
}

/* One random step of both. */
static void step(struct bt_ssd_dir *d, struct model *m, uint64_t now)
{
    uint32_t s = rnd(N), i = rnd(KEYS);
    struct bt_ssd_entry e = {.depth = i, .digest = i * 3, .used = (uint32_t)now};
    key_of(i, &e.key);
    switch (rnd(6)) {
    case 0:
        s = bt_ssd_dir_take(d, 0);
        if (s != BT_SSD_NONE) {
            assert_int_equal(m[s].state, FREE);
            m[s].state = BUSY;
            m[s].generation++;
        }
        break;
    case 1:
        if (m[s].state == BUSY && bt_ssd_dir_find(d, &e.key) == BT_SSD_NONE) {
            bt_ssd_dir_add(d, s, &e);
            m[s].state = VALID;
            m[s].key = i;
            m[s].used = now;
            assert_int_equal(bt_ssd_dir_entry(d, s)->digest, i * 3);
        }
        break;
    case 2:
        if (m[s].state == VALID && rnd(3) == 0) {
            bt_ssd_dir_remove(d, s);
            m[s].state = BUSY;
        }
        break;
    case 3:
        if (m[s].state == BUSY && m[s].pins == 0 && rnd(3) == 0) {
            bt_ssd_dir_free(d, s);
            m[s].state = FREE;
        }
        break;
    case 4:
        if (m[s].state == VALID) {
            bt_ssd_dir_touch(d, s);
            m[s].used = now;
        }
        break;
    default:
        if (m[s].state != FREE && rnd(2) == 0) {
            bt_ssd_dir_pin(d, s);
            m[s].pins++;
        } else if (m[s].pins > 0) {
            bt_ssd_dir_unpin(d, s);
            if (--m[s].pins == 0) {
                m[s].used = now; /* in use until now */
            }
        }
    }
}

static void walk(void **state)
{
    static struct model m[N];
    struct bt_ssd_dir *d = bt_ssd_dir_create(N, &bt_evict_lru, NULL);
    (void)state;
    for (uint64_t now = 1; now <= 40000; now++) {
        step(d, m, now);
        if (now % 16 == 0) {
            check(d, m);
        }
    }
    assert_true(bt_ssd_dir_valid(d) > N / 4);
    bt_ssd_dir_destroy(d);
}

/* A slow disk: what one tenant writes counts before it can be found, so the other keeps its share.
 */
static void slots_count_while_they_are_written(void **state)
{
    char *rules[] = {(char[]){"a=0.3"}, (char[]){"b=0.5"}, NULL}, err[200];
    struct bt_tenants *who = NULL;
    (void)state;
    assert_int_equal(bt_tenants_create(rules, &who, err, sizeof(err)), BT_OK);
    struct bt_ssd_dir *d = bt_ssd_dir_create(10, &bt_evict_lru, who);
    uint8_t a = bt_tenants_group(who, "a"), b = bt_tenants_group(who, "b");
    uint32_t busy[3];
    for (uint32_t i = 0; i < 7; i++) { /* b's four are the older ones */
        struct bt_ssd_entry e = {.group = i < 4 ? b : a};
        key_of(i, &e.key);
        bt_ssd_dir_add(d, bt_ssd_dir_take(d, i < 4 ? b : a), &e);
    }
    for (uint32_t i = 0; i < 3; i++) {
        busy[i] = bt_ssd_dir_take(d, a);
    }
    assert_int_equal(bt_ssd_dir_used(d, a), 6);
    assert_int_equal(bt_ssd_dir_entry(d, bt_ssd_dir_victim(d))->group, a);
    for (uint32_t i = 0; i < 3; i++) { /* the disk failed */
        bt_ssd_dir_free(d, busy[i]);
    }
    assert_int_equal(bt_ssd_dir_used(d, a), 3);
    assert_int_equal(bt_ssd_dir_entry(d, bt_ssd_dir_victim(d))->group, b); /* nobody is beyond it */
    bt_ssd_dir_destroy(d);
    bt_tenants_destroy(who);
}

static void claims(void **state)
{
    struct bt_ssd_dir *d = bt_ssd_dir_create(8, &bt_evict_lru, NULL);
    (void)state;
    assert_true(bt_ssd_dir_claim(d, 5, 77));
    assert_false(bt_ssd_dir_claim(d, 5, 78)); /* not twice */
    assert_false(bt_ssd_dir_claim(d, 8, 1));  /* not beyond the end */
    assert_int_equal(bt_ssd_dir_entry(d, 5)->generation, 77);
    for (uint32_t i = 0; i < 7; i++) {
        uint32_t s = bt_ssd_dir_take(d, 0);
        assert_true(s < 8 && s != 5);
    }
    assert_int_equal(bt_ssd_dir_take(d, 0), BT_SSD_NONE);
    assert_int_equal(bt_ssd_dir_victim(d), BT_SSD_NONE);
    bt_ssd_dir_free(d, 5);
    assert_int_equal(bt_ssd_dir_take(d, 0), 5);
    assert_int_equal(bt_ssd_dir_entry(d, 5)->generation, 78); /* rises with every use */
    bt_ssd_dir_destroy(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(walk), cmocka_unit_test(claims),
                                       cmocka_unit_test(slots_count_while_they_are_written)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
