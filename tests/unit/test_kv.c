/* common/kv: layout arithmetic, key chains that must not alias, flow arithmetic, page pool. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/sha256.h"
#include "common/kv/flow.h"
#include "common/kv/key.h"
#include "common/kv/latent.h"
#include "common/kv/layout.h"
#include "common/kv/page_pool.h"
#include "tests/unit/latent_row.h"

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

static struct bt_kv_layout latents(uint32_t latent, uint32_t rope)
{
    struct bt_kv_layout l;
    assert_int_equal(bt_kv_layout_mla(64, 27, latent, rope, BT_DT_FP8_E4M3, &l), BT_OK);
    return l;
}

static void fp8_latents_have_the_published_row(void **state)
{
    (void)state;
    struct bt_kv_layout l = latents(512, 64), f16;
    const struct bt_kv_group *g = &l.groups[0];
    assert_int_equal(bt_kv_latent(g), 512);
    assert_int_equal(bt_kv_latent_scales(g), 512);
    assert_int_equal(bt_kv_latent_rope(g), 528);
    assert_int_equal(bt_kv_row_bytes(g), 656);
    assert_int_equal(bt_kv_planes(g), 1);
    assert_int_equal(g->seg_bytes, 656 * 64);
    assert_int_equal(g->scale_off, 0); /* scales are inside the rows */
    assert_int_equal(l.block_bytes, 27 * 656 * 64);
    /* A last scale for fewer values; rows end at multiples of 16. */
    l = latents(192, 16);
    assert_int_equal(bt_kv_latent_rope(&l.groups[0]), 192 + 8);
    assert_int_equal(bt_kv_row_bytes(&l.groups[0]), 240);
    uint64_t ids[] = {latents(512, 64).layout_id, latents(448, 128).layout_id,
                      latents(528, 48).layout_id, latents(544, 32).layout_id};
    for (size_t i = 0; i < BT_ARRAY_LEN(ids); i++) {
        for (size_t j = 0; j < i; j++) {
            assert_int_not_equal(ids[i], ids[j]);
        }
    }
    /* What lies on SSDs stays valid: ids of other layouts do not change. */
    assert_int_equal(bt_kv_layout_mla(64, 27, 512, 64, BT_DT_F16, &f16), BT_OK);
    assert_int_equal(f16.layout_id, 0xfbbbb3502f875b3a);
    assert_int_equal(demo_layout(16).layout_id, 0x22bafa9fefd008e6);
    assert_int_equal(bt_kv_layout_gqa(16, 6, 2, 64, BT_DT_FP8_E4M3, 0, &l), BT_OK);
    assert_int_equal(l.layout_id, 0x6139ce5f56af036c);
    assert_int_equal(bt_kv_layout_mla(64, 27, 520, 64, BT_DT_FP8_E4M3, &l), BT_ERR_INVALID);
    assert_int_equal(bt_kv_layout_mla(64, 27, 512, 8, BT_DT_FP8_E4M3, &l), BT_ERR_INVALID);
    assert_int_equal(bt_kv_layout_mla(64, 27, 512, 64, BT_DT_F32, &l), BT_ERR_INVALID);
}

static void fp8_latents_round_to_the_nearest(void **state)
{
    (void)state;
    struct bt_kv_layout l = latents(512, 64);
    const struct bt_kv_group *g = &l.groups[0];
    uint8_t row[656], again[656];
    float x[576], y[576], scale[4];
    uint32_t r = 1;
    for (int turn = 0; turn < 200; turn++) {
        for (int i = 0; i < 576; i++) {
            r = r * 1664525u + 1013904223u;
            /* groups of different sizes, values over 20 powers of two inside each */
            x[i] = ldexpf((float)(int32_t)r / 2147483648.0f,
                          -(int)(r % 20) + 3 * (i / 128) + turn % 7 - 8);
        }
        bt_kv_latent_store(g, x, row);
        latent_row_read(g, row, y);
        memcpy(scale, row + 512, sizeof(scale));
        for (int i = 0; i < 512; i++) {
            float s = scale[i / 128], step = fmaxf(ldexpf(s, -9), ldexpf(fabsf(x[i]), -3));
            int k;
            assert_true(frexpf(s, &k) == 0.5f && k - 1 >= -15 && k - 1 <= 7);
            assert_true(fabsf(y[i] - x[i]) <= step / 2);
            assert_true((float)(_Float16)y[i] == y[i]);
        }
        for (int i = 512; i < 576; i++) {
            assert_true(fabsf(y[i] - x[i]) <= ldexpf(fabsf(x[i]), -8));
        }
        bt_kv_latent_store(g, y, again); /* values that fit stay */
        float z[576];
        latent_row_read(g, again, z);
        assert_memory_equal(y, z, sizeof(y));
    }
}

/* Ties, the ends of the range, zeros, NaN. */
static void fp8_latents_at_the_edges(void **state)
{
    (void)state;
    struct bt_kv_layout l = latents(512, 64);
    const struct bt_kv_group *g = &l.groups[0];
    static const struct {
        float top, in, out; /* a group's largest value, another one, what becomes of it */
    } cases[] = {
        {448, 17, 16},
        {448, 19, 20},
        {448, -17, -16},
        {448, 0x1p-10f, 0},
        {448, 0x1.8p-9f, 0x1p-8f},
        {448, 0x1.ffp-7f, 0x1p-6f},
        {449, 17, 16},
        {449, 0x1p-9f, 0},
        {57344, 57344, 57344},
        {1e9f, 60000, 57344},
        {1e9f, -INFINITY, -57344},
        {0, 0, 0},
        {0x1p-30f, 0x1p-24f, 0x1p-24f},
        {0x1p-30f, 0x1p-25f, 0},
        {0x1p-30f, 0x1.8p-24f, 0x1p-23f},
    };
    uint8_t row[656];
    float x[576], y[576];
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        memset(x, 0, sizeof(x));
        x[128] = cases[i].top;
        x[255] = cases[i].in;
        bt_kv_latent_store(g, x, row);
        latent_row_read(g, row, y);
        if (y[255] != cases[i].out || y[0] != 0 || y[256] != 0) {
            fail_msg("%g beside %g: %g instead of %g", (double)cases[i].in, (double)cases[i].top,
                     (double)y[255], (double)cases[i].out);
        }
    }
    x[130] = NAN;
    x[570] = NAN;
    bt_kv_latent_store(g, x, row);
    latent_row_read(g, row, y);
    for (int i = 0; i < 576; i++) {
        assert_int_equal(isnan(y[i]) != 0, (i >= 128 && i < 256) || i == 570);
    }
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
        cmocka_unit_test(fp8_latents_have_the_published_row),
        cmocka_unit_test(fp8_latents_round_to_the_nearest),
        cmocka_unit_test(fp8_latents_at_the_edges),
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
