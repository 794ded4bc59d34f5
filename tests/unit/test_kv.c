/* common/kv: layout arithmetic, key chains that must not alias, flow arithmetic, page pool. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/sha256.h"
#include "common/kv/flow.h"
#include "common/kv/key.h"
#include "common/kv/layout.h"
#include "common/kv/page_pool.h"

static struct bt_kv_layout demo_layout(uint32_t page_tokens)
{
    struct bt_kv_layout l;
    assert_int_equal(bt_kv_layout_gqa(page_tokens, 6, 2, 64, BT_DT_BF16, 0, &l), BT_OK);
    return l;
}

static void layout_has_the_documented_sizes(void **state)
{
    (void)state;
    struct bt_kv_layout l = demo_layout(16);
    uint32_t bytes;
    assert_int_equal(l.groups[0].seg_bytes, 16 * 2 * 2 * 64 * 2);
    assert_int_equal(l.block_bytes, 6 * 8192);
    assert_int_equal(bt_kv_segment(&l, 0, &bytes), 0);
    assert_int_equal(bt_kv_segment(&l, 5, &bytes), 5 * 8192);
    assert_int_equal(bytes, 8192);
}

static void fp8_has_a_scale_for_each_token_and_head(void **state)
{
    (void)state;
    struct bt_kv_layout l;
    assert_int_equal(bt_kv_layout_gqa(16, 6, 2, 64, BT_DT_FP8_E4M3, 0, &l), BT_OK);
    assert_int_equal(bt_kv_row_bytes(&l.groups[0]), 64);
    assert_int_equal(l.groups[0].scale_off, 2 * 2 * 16 * 64);
    assert_int_equal(l.groups[0].seg_bytes, 2 * 2 * 16 * 64 + 2 * 2 * 16 + 64); /* to 128 */
    assert_int_equal(bt_kv_layout_gqa(16, 6, 1, 256, BT_DT_FP8_E4M3, 0, &l), BT_OK);
    assert_int_equal(l.groups[0].seg_bytes % 256, 0); /* whole rows */
    assert_int_equal(bt_kv_layout_gqa(16, 6, 2, 96, BT_DT_FP8_E4M3, 0, &l), BT_OK);
    assert_int_equal(l.groups[0].seg_bytes % BT_KV_SEG_ALIGN, 0);
    assert_int_equal(demo_layout(16).groups[0].scale_off, 0);
}

static void layout_ids_differ_when_any_number_does(void **state)
{
    (void)state;
    struct bt_kv_layout l[7];
    l[0] = demo_layout(16);
    l[1] = demo_layout(32);
    assert_int_equal(bt_kv_layout_gqa(16, 7, 2, 64, BT_DT_BF16, 0, &l[2]), BT_OK);
    assert_int_equal(bt_kv_layout_gqa(16, 6, 2, 64, BT_DT_F16, 0, &l[3]), BT_OK);
    assert_int_equal(bt_kv_layout_gqa(16, 6, 2, 64, BT_DT_FP8_E4M3, 0, &l[6]), BT_OK);
    assert_int_equal(bt_kv_layout_gqa(16, 6, 2, 64, BT_DT_BF16, 4096, &l[4]), BT_OK);
    assert_int_equal(bt_kv_layout_gqa(16, 6, 4, 32, BT_DT_BF16, 0, &l[5]), BT_OK);
    for (size_t i = 0; i < BT_ARRAY_LEN(l); i++) {
        for (size_t j = 0; j < i; j++) {
            assert_int_not_equal(l[i].layout_id, l[j].layout_id);
        }
    }
}

static void layout_refuses_zero_and_overflow(void **state)
{
    (void)state;
    struct bt_kv_layout l;
    assert_int_equal(bt_kv_layout_gqa(0, 6, 2, 64, BT_DT_BF16, 0, &l), BT_ERR_INVALID);
    assert_int_equal(bt_kv_layout_gqa(16, 0, 2, 64, BT_DT_BF16, 0, &l), BT_ERR_INVALID);
    assert_int_equal(bt_kv_layout_gqa(16, 6, 1u << 31, 1u << 31, BT_DT_BF16, 0, &l),
                     BT_ERR_INVALID);
}

static struct bt_kv_key root_with(const char *arch, const char *rope, const char *salt,
                                  const struct bt_kv_layout *l)
{
    struct bt_kv_root r = {.architecture = arch,
                           .layout = l,
                           .rope = rope,
                           .salt = (const uint8_t *)salt,
                           .salt_len = (uint32_t)strlen(salt)};
    struct bt_kv_key k;
    bt_kv_root_key(&r, &k);
    return k;
}

static void root_keys_do_not_alias(void **state)
{
    (void)state;
    struct bt_kv_layout a = demo_layout(16), b = demo_layout(32);
    struct bt_kv_key k[] = {
        root_with("L", "r", "", &a), root_with("M", "r", "", &a),
        root_with("L", "s", "", &a), root_with("L", "r", "x", &a),
        root_with("L", "r", "", &b), root_with("Lr", "", "", &a), /* the bytes of the first */
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(k); i++) {
        for (size_t j = 0; j < i; j++) {
            assert_memory_not_equal(&k[i], &k[j], sizeof(k[0]));
        }
    }
}

static void key_chain_is_sha256_of_parent_and_tokens(void **state)
{
    (void)state;
    struct bt_kv_layout l = demo_layout(16);
    struct bt_kv_key root = root_with("L", "r", "", &l), keys[2], want;
    uint32_t tokens[40];
    for (uint32_t i = 0; i < 40; i++) {
        tokens[i] = i * 7;
    }
    assert_int_equal(bt_kv_keys(&root, tokens, 40, 16, keys), 2);
    uint8_t text[32 + 64];
    memcpy(text, root.b, 32);
    memcpy(text + 32, tokens, 64);
    bt_sha256(text, sizeof(text), want.b);
    assert_memory_equal(&keys[0], &want, 32);
    tokens[3]++; /* an early token changes every later key */
    struct bt_kv_key other[2];
    bt_kv_keys(&root, tokens, 40, 16, other);
    assert_memory_not_equal(&keys[1], &other[1], 32);
}

static void flow_items_cover_every_block_once_per_layer(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 200; n++) {
        struct bt_flow_shape s = {n, 16, 64, 3};
        uint8_t seen[3][16] = {{0}};
        for (uint32_t i = 0; i < bt_flow_items(&s); i++) {
            uint32_t first, end;
            bt_flow_item_blocks(&s, i, &first, &end);
            assert_true(first < end && end <= bt_flow_blocks(&s));
            for (uint32_t b = first; b < end; b++) {
                seen[i % 3][b]++;
            }
        }
        for (uint32_t b = 0; b < bt_flow_blocks(&s); b++) {
            assert_int_equal(seen[0][b] + seen[1][b] + seen[2][b], 3);
        }
        assert_int_equal(bt_flow_resident_items(&s, bt_flow_blocks(&s)), bt_flow_items(&s));
        assert_int_equal(bt_flow_resident_items(&s, 0), 0);
    }
    struct bt_flow_shape s = {200, 16, 64, 3};
    assert_int_equal(bt_flow_resident_items(&s, 3), 0);
    assert_int_equal(bt_flow_resident_items(&s, 4), 3);
    assert_int_equal(bt_flow_resident_items(&s, 9), 6);
}

static void flow_word_belongs_to_one_epoch(void **state)
{
    (void)state;
    bt_flow_word_t w = 0;
    bt_flow_raise(&w, 3, 17);
    assert_int_equal(bt_flow_read(&w, 3), 17);
    assert_int_equal(bt_flow_read(&w, 2), 0);
    assert_int_equal(bt_flow_read(&w, 4), 0);
}

static void page_pool_gives_all_or_nothing(void **state)
{
    (void)state;
    struct bt_page_pool *p = bt_page_pool_create(5);
    uint32_t a[5], b[5];
    assert_int_equal(bt_page_pool_get(p, 3, a), BT_OK);
    assert_int_equal(bt_page_pool_get(p, 3, b), BT_ERR_EXHAUSTED);
    assert_int_equal(bt_page_pool_free_count(p), 2);
    bt_page_pool_ref(p, a[1]);
    bt_page_pool_put(p, a, 3);
    assert_int_equal(bt_page_pool_free_count(p), 4);
    bt_page_pool_put(p, &a[1], 1);
    assert_int_equal(bt_page_pool_get(p, 5, b), BT_OK);
    for (int i = 0; i < 5; i++) {
        for (int j = 0; j < i; j++) {
            assert_int_not_equal(b[i], b[j]);
        }
    }
    bt_page_pool_destroy(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout_has_the_documented_sizes),
        cmocka_unit_test(fp8_has_a_scale_for_each_token_and_head),
        cmocka_unit_test(layout_ids_differ_when_any_number_does),
        cmocka_unit_test(layout_refuses_zero_and_overflow),
        cmocka_unit_test(root_keys_do_not_alias),
        cmocka_unit_test(key_chain_is_sha256_of_parent_and_tokens),
        cmocka_unit_test(flow_items_cover_every_block_once_per_layer),
        cmocka_unit_test(flow_word_belongs_to_one_epoch),
        cmocka_unit_test(page_pool_gives_all_or_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
