/* Stop strings: every way to cut a text into pieces must give what a search of the whole gives. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/philox.h"
#include "conductor/request/stop.h"

/* The plain definition: the first byte at which some string is complete; of those that end there
 * the longest. */
static const char *whole(const char *text, char *const *stops, bool include, size_t *keep_p)
{
    size_t n = strlen(text);
    for (size_t end = 1; end <= n; end++) {
        const char *best = NULL;
        for (size_t i = 0; stops[i] != NULL; i++) {
            size_t len = strlen(stops[i]);
            if (len != 0 && len <= end && memcmp(text + end - len, stops[i], len) == 0 &&
                (best == NULL || len > strlen(best))) {
                best = stops[i];
            }
        }
        if (best != NULL) {
            *keep_p = include ? end : end - strlen(best);
            return best;
        }
    }
    *keep_p = n;
    return NULL;
}

static bool is_prefix_of_any(const char *p, size_t n, char *const *stops)
{
    for (size_t i = 0; stops[i] != NULL; i++) {
        if (n < strlen(stops[i]) && memcmp(p, stops[i], n) == 0) {
            return true;
        }
    }
    return n == 0;
}

/* Feeds text cut after the bytes whose bit is set in cuts, and compares with the definition. */
static void check(const char *text, char *const *stops, bool include, uint64_t cuts)
{
    size_t keep, n = strlen(text), fed = 0;
    const char *want = whole(text, stops, include, &keep), *got = NULL;
    struct bt_stop *s = bt_stop_create(stops, include);
    struct bt_buf out;
    bt_buf_init(&out);
    for (size_t i = 0; i < n && got == NULL; i++) {
        if (i + 1 < n && (cuts >> (i % 64) & 1) == 0) {
            continue;
        }
        got = bt_stop_feed(s, text + fed, i + 1 - fed, &out);
        fed = i + 1;
        if (got == NULL) {
            /* No more is held back than must. */
            assert_true(out.len <= keep);
            assert_true(is_prefix_of_any(text + out.len, fed - out.len, stops));
        }
    }
    if (got == NULL) {
        bt_stop_flush(s, &out);
    }
    if (want == NULL) {
        assert_null(got);
    } else {
        assert_non_null(got);
        assert_string_equal(got, want);
        assert_null(bt_stop_feed(s, "more", 4, &out)); /* nothing comes out after the match */
        bt_stop_flush(s, &out);
    }
    assert_int_equal(out.len, keep);
    if (keep != 0) {
        assert_memory_equal(out.data, text, keep);
    }
    bt_buf_cleanup(&out);
    bt_stop_destroy(s);
}

static void check_all_cuts(const char *text, char *const *stops)
{
    size_t n = strlen(text);
    assert_true(n <= 12);
    for (uint64_t cuts = 0; cuts < (uint64_t)1 << (n - 1); cuts++) {
        check(text, stops, false, cuts);
        check(text, stops, true, cuts);
    }
}

static void test_boundaries(void **state)
{
    (void)state;
    char *one[] = {"END", NULL};
    check_all_cuts("abENDcd", one);
    check_all_cuts("ENENDx", one);
    check_all_cuts("END", one);
    check_all_cuts("abcEN", one);
    check_all_cuts("EENNDD", one);
    check_all_cuts("x", one);
}

static void test_overlaps(void **state)
{
    (void)state;
    char *self[] = {"aab", NULL};
    check_all_cuts("aaaaab", self);
    char *periodic[] = {"ababac", NULL};
    check_all_cuts("abababac", periodic);
    char *nested[] = {"abcd", "bc", NULL};
    check_all_cuts("xabcdy", nested);
    char *same_end[] = {"c", "bc", "abc", NULL};
    check_all_cuts("zabcz", same_end);
    char *common[] = {"\n\nUser", "\n\nBot", "\n", NULL};
    check_all_cuts("a\n\nBot:", common);
    char *prefixes[] = {"<|im", "<|im_end|>", NULL};
    check_all_cuts("a<|im_end|>b", prefixes);
}

static void test_utf8(void **state)
{
    (void)state;
    char *e[] = {"\xc3\xa9t\xc3\xa9", NULL}; /* été */
    check_all_cuts("l'\xc3\xa9t\xc3\xa9 !", e);
    check_all_cuts("\xc3\xa8\xc3\xa9t\xc3\xa8", e);
    /* Whole characters in: never half a one out, although the stop string shares its lead byte. */
    struct bt_stop *s = bt_stop_create(e, false);
    struct bt_buf out;
    bt_buf_init(&out);
    assert_null(bt_stop_feed(s, "\xc3\xa8", 2, &out));
    assert_int_equal(out.len, 2);
    assert_null(bt_stop_feed(s, "\xc3\xa9", 2, &out));
    assert_int_equal(out.len, 2);
    assert_null(bt_stop_feed(s, "\xc3\xa9", 2, &out)); /* the first one is free now */
    assert_int_equal(out.len, 4);
    bt_buf_cleanup(&out);
    bt_stop_destroy(s);
}

static void test_random(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t r[4], q[4];
        bt_philox4x32((uint32_t[2]){1, 2}, (uint32_t[4]){round, 0, 0, 0}, r);
        bt_philox4x32((uint32_t[2]){1, 2}, (uint32_t[4]){round, 1, 0, 0}, q);
        char text[33], a[5], b[5];
        for (uint32_t i = 0; i < 32; i++) {
            text[i] = "ab"[r[0] >> i & 1];
        }
        text[32] = '\0';
        uint32_t la = 1 + r[1] % 4, lb = 1 + r[2] % 4;
        for (uint32_t i = 0; i < 4; i++) {
            a[i] = "abc"[(q[0] >> (4 * i)) % 3];
            b[i] = "abc"[(q[1] >> (4 * i)) % 3];
        }
        a[la] = b[lb] = '\0';
        char *stops[] = {a, b, NULL};
        check(text, stops, (q[3] & 1) != 0, (uint64_t)r[3] << 32 | q[2]);
    }
}

static void test_none_and_pass(void **state)
{
    (void)state;
    struct bt_buf out;
    bt_buf_init(&out);
    struct bt_stop *s = bt_stop_create(NULL, false);
    assert_null(bt_stop_feed(s, "anything", 8, &out));
    assert_int_equal(out.len, 8);
    bt_stop_destroy(s);
    char *empty[] = {"", NULL};
    s = bt_stop_create(empty, false);
    assert_null(bt_stop_feed(s, "x", 1, &out));
    assert_int_equal(out.len, 9);
    bt_stop_destroy(s);
    /* Not looked for at first: a string that begins before is not found after. */
    char *stops[] = {"END", NULL};
    s = bt_stop_create(stops, false);
    bt_buf_clear(&out);
    bt_stop_pass(s, "ENDEN", 5, &out);
    assert_int_equal(out.len, 5);
    assert_null(bt_stop_feed(s, "D", 1, &out));
    assert_string_equal(out.data, "ENDEND");
    assert_string_equal(bt_stop_feed(s, "END", 3, &out), "END");
    assert_string_equal(out.data, "ENDEND");
    bt_stop_destroy(s);
    bt_buf_cleanup(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_boundaries),    cmocka_unit_test(test_overlaps),
        cmocka_unit_test(test_utf8),          cmocka_unit_test(test_random),
        cmocka_unit_test(test_none_and_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
