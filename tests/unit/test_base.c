/* common/base: known answers, and the map against a slow reference. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/base.h"
#include "common/base/buf.h"
#include "common/base/crc32c.h"
#include "common/base/list.h"
#include "common/base/map.h"
#include "common/base/philox.h"
#include "common/base/sha256.h"

static uint32_t crc_slow(uint32_t crc, const uint8_t *p, size_t n)
{
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int k = 0; k < 8; k++) {
            crc = crc & 1 ? 0x82f63b78u ^ (crc >> 1) : crc >> 1;
        }
    }
    return ~crc;
}

static void crc32c_known_answer(void **state)
{
    (void)state;
    assert_int_equal(bt_crc32c(0, "123456789", 9), 0xe3069283u);
    assert_int_equal(bt_crc32c(0, "", 0), 0);
    uint8_t zeros[32] = {0}; /* RFC 3720, appendix B.4 */
    assert_int_equal(bt_crc32c(0, zeros, sizeof(zeros)), 0x8a9136aau);
}

static void crc32c_equals_bitwise_at_every_length_and_split(void)
{
    static uint8_t data[40000];
    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = (uint8_t)(i * 131 + (i >> 5));
    }
    static const size_t lens[] = {1,     7,     8,     63,    255,   256,   257,   320,
                                  511,   1024,  3071,  3072,  3073,  6143,  6144,  7999,
                                  12287, 12288, 12289, 16383, 16384, 16385, 16447, 16448,
                                  16700, 24576, 27648, 32768, 39999};
    for (size_t i = 0; i < BT_ARRAY_LEN(lens); i++) {
        uint32_t want = crc_slow(7, data + 1, lens[i]);
        assert_int_equal(bt_crc32c(7, data + 1, lens[i]), want);
        size_t half = lens[i] / 3;
        uint32_t part = bt_crc32c(7, data + 1, half);
        assert_int_equal(bt_crc32c(part, data + 1 + half, lens[i] - half), want);
        static uint8_t copy[sizeof(data)];
        memset(copy, 0xEE, sizeof(copy));
        assert_int_equal(bt_crc32c_copy(7, copy, data + 1, lens[i]), want);
        assert_memory_equal(copy, data + 1, lens[i]);
        assert_int_equal(copy[lens[i]], 0xEE);
        for (size_t to = 0; to < 65 && to + lens[i] < sizeof(copy); to += 13) { /* any alignment */
            memset(copy, 0xEE, sizeof(copy));
            assert_int_equal(bt_crc32c_stream(7, copy + to, data + 1, lens[i]), want);
            assert_memory_equal(copy + to, data + 1, lens[i]);
            assert_int_equal(copy[to + lens[i]], 0xEE);
            assert_true(to == 0 || copy[to - 1] == 0xEE);
        }
    }
}

static void crc32c_every_way(void **state)
{
    (void)state;
    for (int most = 0; most <= 2; most++) {
        bt_crc32c_ways(most);
        crc32c_equals_bitwise_at_every_length_and_split();
    }
}

static void philox_known_answer(void **state)
{
    (void)state;
    uint32_t key[2] = {0}, ctr[4] = {0}, out[4];
    bt_philox4x32(key, ctr, out);
    assert_int_equal(out[0], 0x6627e8d5u);
    assert_int_equal(out[1], 0xe169c58du);
    assert_int_equal(out[2], 0xbc57ac4cu);
    assert_int_equal(out[3], 0x9b00dbd8u);
}

static void sha256_streaming_equals_one_shot(void **state)
{
    (void)state;
    uint8_t a[32], b[32];
    char hex[65];
    bt_sha256("abc", 3, a);
    bt_hex(a, 32, hex);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    struct bt_sha256 *h = bt_sha256_create();
    bt_sha256_update(h, "a", 1);
    bt_sha256_update(h, "bc", 2);
    bt_sha256_finish(h, b);
    assert_memory_equal(a, b, 32);
}

/* 20,000 random operations on keys from a small range, compared with an array. */
static void map_behaves_like_an_array(void **state)
{
    (void)state;
    enum { KEYS = 500 };
    static char marks[KEYS];
    void *ref[KEYS] = {0};
    struct bt_map *m = bt_map_create(sizeof(uint32_t));
    unsigned rng = 12345;
    size_t count = 0;
    for (int i = 0; i < 20000; i++) {
        rng = rng * 1103515245u + 12345u;
        uint32_t k = (rng >> 8) % KEYS;
        if (rng >> 31) {
            count += ref[k] == NULL;
            assert_ptr_equal(bt_map_put(m, &k, &marks[i % KEYS]), ref[k]);
            ref[k] = &marks[i % KEYS];
        } else {
            count -= ref[k] != NULL;
            assert_ptr_equal(bt_map_del(m, &k), ref[k]);
            ref[k] = NULL;
        }
        assert_int_equal(bt_map_count(m), count);
        uint32_t probe = (rng >> 3) % KEYS;
        assert_ptr_equal(bt_map_get(m, &probe), ref[probe]);
    }
    size_t it = 0, seen = 0;
    const void *key;
    for (void *v; (v = bt_map_next(m, &it, &key)) != NULL; seen++) {
        uint32_t k;
        memcpy(&k, key, sizeof(k));
        assert_ptr_equal(v, ref[k]);
    }
    assert_int_equal(seen, count);
    bt_map_destroy(m);
}

static void buf_grows_consumes_and_gives_away(void **state)
{
    (void)state;
    struct bt_buf b;
    bt_buf_init(&b);
    for (int i = 0; i < 1000; i++) {
        bt_buf_printf(&b, "%d,", i);
    }
    assert_int_equal(b.len, 3890);
    bt_buf_consume(&b, 4);
    assert_memory_equal(b.data, "2,3,4", 5);
    char long_text[500];
    memset(long_text, 'x', sizeof(long_text) - 1);
    long_text[sizeof(long_text) - 1] = '\0';
    bt_buf_clear(&b);
    bt_buf_printf(&b, "<%s>", long_text);
    assert_int_equal(b.len, sizeof(long_text) + 1);
    char *p = bt_buf_take(&b);
    assert_int_equal(strlen(p), sizeof(long_text) + 1);
    assert_null(b.data);
    free(p);
}

static void list_remove_twice_is_harmless(void **state)
{
    (void)state;
    struct bt_list head, a, b, *pos;
    bt_list_init(&head);
    bt_list_init(&a);
    bt_list_insert_tail(&head, &a);
    bt_list_insert_head(&head, &b);
    bt_list_remove(&a);
    bt_list_remove(&a);
    int n = 0;
    bt_list_for_each (pos, &head) {
        assert_ptr_equal(pos, &b);
        n++;
    }
    assert_int_equal(n, 1);
}

static void status_names_and_texts(void **state)
{
    (void)state;
    assert_string_equal(bt_status_name(BT_ERR_STALE), "ERR_STALE");
    assert_string_equal(bt_status_text(BT_OK), "ok");
    assert_string_equal(bt_status_text((bt_status_t)-999), "unknown status");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crc32c_known_answer),
        cmocka_unit_test(crc32c_every_way),
        cmocka_unit_test(philox_known_answer),
        cmocka_unit_test(sha256_streaming_equals_one_shot),
        cmocka_unit_test(map_behaves_like_an_array),
        cmocka_unit_test(buf_grows_consumes_and_gives_away),
        cmocka_unit_test(list_remove_twice_is_harmless),
        cmocka_unit_test(status_names_and_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
