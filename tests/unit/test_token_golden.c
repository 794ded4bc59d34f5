/* Tokenizers of the kinds in the field (GPT-2, Qwen, Llama 3, DeepSeek, single digits under NFKC,
 * SentencePiece in both spellings) against vectors of the reference implementation
 * (tests/tools/make_references.py, make_token_vectors.js), and against texts that are made to break
 * them. Runs in the repository root. */
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "common/token/token.h"

static const char *const names[] = {"gpt2",   "qwen",       "llama3",       "deepseek",
                                    "digits", "spm-legacy", "spm-metaspace"};
static struct bt_tokenizer *toks[BT_ARRAY_LEN(names)];

static int setup(void **state)
{
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        char dir[128], err[512] = "";
        snprintf(dir, sizeof(dir), "tests/golden/tokenizers/%s", names[i]);
        if (bt_tokenizer_load(dir, &toks[i], err, sizeof(err)) != BT_OK) {
            fprintf(stderr, "%s\n", err);
            return -1;
        }
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        bt_tokenizer_destroy(toks[i]);
    }
    return 0;
}

static bool same_ids(const json_t *want, const struct bt_tokens *got)
{
    bool same = json_array_size(want) == got->n;
    for (size_t i = 0; same && i < got->n; i++) {
        same = json_integer_value(json_array_get(want, i)) == (json_int_t)got->ids[i];
    }
    return same;
}

static bool same_text(const json_t *want, const struct bt_buf *got)
{
    return json_string_length(want) == got->len &&
           (got->len == 0 || memcmp(json_string_value(want), got->data, got->len) == 0);
}

static bool decodes(const struct bt_tokenizer *t, const struct bt_tokens *ids, bool skip,
                    const json_t *want)
{
    struct bt_buf out;
    bt_buf_init(&out);
    assert_int_equal(bt_tokenizer_decode(t, ids->ids, ids->n, skip, &out), BT_OK);
    bool same = same_text(want, &out);
    if (!same) {
        print_error("want: %s\n got: %.*s\n", json_string_value(want), (int)out.len,
                    out.data == NULL ? "" : out.data);
    }
    bt_buf_cleanup(&out);
    return same;
}

/* For every prefix of ids, what was streamed and the flush are the decoding of the prefix. */
static void check_stream(const struct bt_tokenizer *t, const uint32_t *ids, size_t n, bool skip)
{
    struct bt_buf streamed, whole;
    bt_buf_init(&streamed);
    bt_buf_init(&whole);
    for (size_t k = 0; k <= n; k++) {
        struct bt_detok *d = bt_detok_create(t, skip);
        bt_buf_clear(&streamed);
        bt_buf_clear(&whole);
        for (size_t i = 0; i < k; i++) {
            assert_int_equal(bt_detok_push(d, ids[i], &streamed), BT_OK);
        }
        json_t *valid = json_stringn(streamed.data == NULL ? "" : streamed.data, streamed.len);
        assert_non_null(valid); /* never half a character */
        json_decref(valid);
        bt_detok_flush(d, &streamed);
        bt_detok_destroy(d);
        assert_int_equal(bt_tokenizer_decode(t, ids, k, skip, &whole), BT_OK);
        assert_int_equal(whole.len, streamed.len);
        assert_true(whole.len == 0 || memcmp(whole.data, streamed.data, whole.len) == 0);
    }
    bt_buf_cleanup(&streamed);
    bt_buf_cleanup(&whole);
}

/* Both files of a tokenizer: chosen texts, and random ones (make_token_vectors.js). */
static void check_vectors(const char *file)
{
    unsigned wrong = 0;
    for (size_t m = 0; m < BT_ARRAY_LEN(names); m++) {
        char path[128];
        json_error_t je;
        snprintf(path, sizeof(path), "tests/golden/tokenizers/%s/%s", names[m], file);
        json_t *all = json_load_file(path, JSON_ALLOW_NUL, &je);
        assert_non_null(all);
        assert_true(json_array_size(all) >= 20);
        for (size_t i = 0; i < json_array_size(all); i++) {
            const json_t *v = json_array_get(all, i), *text = json_object_get(v, "text");
            struct bt_tokens with = {0}, without = {0};
            const char *s = json_string_value(text);
            size_t len = json_string_length(text);
            assert_int_equal(bt_tokenizer_encode(toks[m], s, len, true, &with), BT_OK);
            assert_int_equal(bt_tokenizer_encode(toks[m], s, len, false, &without), BT_OK);
            if (!same_ids(json_object_get(v, "ids"), &with) ||
                !same_ids(json_object_get(v, "ids_no_special"), &without) ||
                !decodes(toks[m], &with, true, json_object_get(v, "decoded")) ||
                !decodes(toks[m], &with, false, json_object_get(v, "decoded_special"))) {
                print_error("%s: vector %zu: \"%.60s\"\n", names[m], i, s);
                wrong++;
            }
            size_t n = BT_MIN(with.n, (size_t)200);
            check_stream(toks[m], with.ids, n, true);
            check_stream(toks[m], with.ids, n, false);
            bt_tokens_cleanup(&with);
            bt_tokens_cleanup(&without);
        }
        json_decref(all);
    }
    assert_int_equal(wrong, 0);
}

static void test_vectors(void **state)
{
    (void)state;
    check_vectors("vectors.json");
}

static void test_random_vectors(void **state)
{
    (void)state;
    check_vectors("random.json");
}

/* Tokens that stand for single bytes, in any order: streams still agree with the whole. */
static void test_single_bytes(void **state)
{
    (void)state;
    static const uint8_t runs[][6] = {
        {0xe6, 0x97, 0xa5, 'x', 0xe6, 0x97},  {0xff, 0xfe, 0xf0, 0x9f, 0x98, 0x80},
        {0xed, 0xa0, 0xbd, 0xed, 0xb8, 0x80}, /* a pair of surrogates is no character */
        {0xc0, 0x80, 0x00, 'a', 0xf4, 0x90},  {0xf0, 0x9f, 0xc3, 0xa9, 0x80, 'b'},
    };
    for (size_t m = 0; m < BT_ARRAY_LEN(names); m++) {
        uint32_t byte[256];
        bool spm = strncmp(names[m], "spm", 3) == 0;
        for (unsigned b = 0; b < 256; b++) {
            char name[16];
            uint32_t id;
            byte[b] = UINT32_MAX;
            for (id = 0; id < bt_tokenizer_vocab(toks[m]) && byte[b] == UINT32_MAX; id++) {
                struct bt_buf piece;
                bt_buf_init(&piece);
                assert_int_equal(bt_tokenizer_piece(toks[m], id, &piece), BT_OK);
                if (piece.len == 1 && (uint8_t)piece.data[0] == b) {
                    byte[b] = id;
                }
                bt_buf_cleanup(&piece);
            }
            snprintf(name, sizeof(name), "<0x%02X>", b);
            if (spm) { /* the byte's own token, not the character's */
                assert_true(bt_tokenizer_find(toks[m], name, &byte[b]));
            }
            assert_int_not_equal(byte[b], UINT32_MAX);
        }
        check_stream(toks[m], byte, 256, true);
        for (size_t r = 0; r < BT_ARRAY_LEN(runs); r++) {
            uint32_t ids[6];
            for (size_t i = 0; i < 6; i++) {
                ids[i] = byte[runs[r][i]];
            }
            check_stream(toks[m], ids, 6, true);
        }
    }
}

static void test_not_utf8(void **state)
{
    (void)state;
    static const char *const bad[] = {"\x80",
                                      "a\xff",
                                      "\xc3",
                                      "\xc0\x80",
                                      "\xed\xa0\xbd",
                                      "\xed\xa0\xbd\xed\xb8\x80",
                                      "\xf4\x90\x80\x80",
                                      "\xf0\x9f\x98",
                                      "\xe6\x97z"};
    for (size_t m = 0; m < BT_ARRAY_LEN(names); m++) {
        for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
            struct bt_tokens ids = {0};
            assert_int_equal(bt_tokenizer_encode(toks[m], bad[i], strlen(bad[i]), true, &ids),
                             BT_ERR_INVALID);
            assert_int_equal(ids.n, 0);
            bt_tokens_cleanup(&ids);
        }
    }
}

/* Texts that stay as they are through encode and decode in all of them but for what a normalizer
 * says: joined emoji, lone joiners and selectors, NULs, byte order marks, private use. */
static void test_round_trips(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t len;
    } cases[] = {
#define TEXT(s) {s, sizeof(s) - 1}
        TEXT("\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7"),
        TEXT("\xe2\x80\x8d\xef\xb8\x8f\xe2\x80\x8d"),
        TEXT("\xf0\x9f\x87\xa9\xf0\x9f\x87\xaa\xf0\x9f\x8f\xbd"),
        TEXT("a\0b\0\0c"),
        TEXT("\0"),
        TEXT("\xef\xbb\xbfmark"),
        TEXT("\xee\x80\x80\xf4\x8f\xbf\xbf\xef\xbf\xbf"),
        TEXT("\xe2\x80\xaertl\xe2\x80\xac"),
        TEXT("x\xcc\xb4\xcc\xb5\xcc\xb6\xcc\xb7"),
        TEXT("\x01\x02\x1b[m\x7f"),
#undef TEXT
    };
    for (size_t m = 0; m < BT_ARRAY_LEN(names); m++) {
        for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
            struct bt_tokens ids = {0};
            struct bt_buf out;
            bt_buf_init(&out);
            assert_int_equal(bt_tokenizer_encode(toks[m], cases[i].text, cases[i].len, true, &ids),
                             BT_OK);
            assert_int_equal(bt_tokenizer_decode(toks[m], ids.ids, ids.n, true, &out), BT_OK);
            size_t skip = strcmp(names[m], "digits") == 0; /* it puts a space in front */
            if (out.len != cases[i].len + skip ||
                memcmp(out.data + skip, cases[i].text, cases[i].len) != 0) {
                fail_msg("%s: case %zu: \"%.*s\"", names[m], i, (int)out.len, out.data);
            }
            bt_buf_cleanup(&out);
            bt_tokens_cleanup(&ids);
        }
    }
}

/* What only looks like a special token is text: other case, cut, widths that NFKC would fold, a
 * joiner inside. */
static void test_lookalikes(void **state)
{
    (void)state;
    static const char *const looks[] = {
        "<|im_end|",
        "|im_end|>",
        "<|IM_END|>",
        "<|im_end |>",
        "< |im_end|>",
        "<|im_\xe2\x80\x8d"
        "end|>",
        "\xef\xbc\x9c|im_end|\xef\xbc\x9e",
        "<\xef\xbd\x9cim_end\xef\xbd\x9c>",
        "<|im_\\u0065nd|>",
        "</s",
        "<S>",
        "\xef\xbc\x9cs\xef\xbc\x9e",
        "<|eot_id|",
        "<|eot_id\xcc\xb8|>",
    };
    for (size_t m = 0; m < BT_ARRAY_LEN(names); m++) {
        for (size_t i = 0; i < BT_ARRAY_LEN(looks); i++) {
            struct bt_tokens ids = {0};
            assert_int_equal(bt_tokenizer_encode(toks[m], looks[i], strlen(looks[i]), false, &ids),
                             BT_OK);
            for (size_t k = 0; k < ids.n; k++) {
                if (bt_tokenizer_is_special(toks[m], ids.ids[k])) {
                    fail_msg("%s: \"%s\" gives the special token %u", names[m], looks[i],
                             ids.ids[k]);
                }
            }
            bt_tokens_cleanup(&ids);
        }
    }
    struct bt_tokens ids = {0}; /* the real ones are recognised, as the reference does */
    uint32_t want;
    assert_true(bt_tokenizer_find(toks[1], "<|im_end|>", &want));
    assert_int_equal(bt_tokenizer_encode(toks[1], "a<|im_end|>", 11, false, &ids), BT_OK);
    assert_int_equal(ids.ids[ids.n - 1], want);
    bt_tokens_cleanup(&ids);
}

static double cpu_seconds(const struct bt_tokenizer *t, const char *text, size_t len)
{
    struct timespec a, b;
    struct bt_tokens ids = {0};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    assert_int_equal(bt_tokenizer_encode(t, text, len, true, &ids), BT_OK);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    assert_true(ids.n > 0);
    bt_tokens_cleanup(&ids);
    return (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
}

/* Sixteen times the text may cost some thirty times the CPU (caches), never the 256 of a quadratic
 * path. */
static void test_cost_grows_with_length(void **state)
{
    (void)state;
    static const char *const units[] = {
        "a",
        " ",
        "\n",
        " \n",
        "\t x",
        "1",
        "'",
        "aB",
        "<|",
        "<|im_end|>\xe6\x97\xa5",
        "\xe6\x97\xa5",
        "x\xcc\x81\xcc\xa3",
        "\xcc\x81\xcc\xa3",
        "\xf0\x9f\x91\xa9\xe2\x80\x8d",
        "\xe2\x96\x81",
        ".-",
    };
    enum { SMALL = 1 << 14, BIG = 1 << 18 };
    char *text = malloc(BIG);
    double worst = 0;
    for (size_t u = 0; u < BT_ARRAY_LEN(units); u++) {
        size_t k = strlen(units[u]);
        for (size_t i = 0; i < BIG; i++) {
            text[i] = units[u][i % k];
        }
        for (size_t m = 0; m < BT_ARRAY_LEN(names); m++) {
            double small = cpu_seconds(toks[m], text, SMALL / k * k);
            double big = cpu_seconds(toks[m], text, BIG / k * k);
            worst = BT_MAX(worst, big);
            if (big > 0.1 && big > 80 * small) { /* a quadratic path: seconds */
                fail_msg("%s: \"%s\": %.3f s for 16 KiB, %.3f s for 256 KiB", names[m], units[u],
                         small, big);
            }
        }
    }
    print_message("slowest 256 KiB: %.3f s of CPU\n", worst);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_random_vectors),
        cmocka_unit_test(test_single_bytes),
        cmocka_unit_test(test_not_utf8),
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_lookalikes),
        cmocka_unit_test(test_cost_grows_with_length),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
