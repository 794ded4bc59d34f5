/* Tests of the tokenizer and the detokenizer: recorded vectors, properties on random ids,
 * pathological inputs, broken and mutated files. Runs in the repository root. */
#include <dirent.h>
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <pthread.h>

#include "common/base/philox.h"
#include "common/token/token.h"

#define MODEL "deploy/models/shakespeare-llama-6m"

static struct bt_tokenizer *tok;
static char tmp_dir[] = "/tmp/test_token_XXXXXX";

static int setup(void **state)
{
    (void)state;
    char err[512] = "";
    if (mkdtemp(tmp_dir) == NULL) {
        return -1;
    }
    bt_status_t st = bt_tokenizer_load(MODEL, &tok, err, sizeof(err));
    if (st != BT_OK) {
        fprintf(stderr, "%s\n", err);
    }
    return st == BT_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    char path[128];
    snprintf(path, sizeof(path), "%s/tokenizer.json", tmp_dir);
    unlink(path);
    rmdir(tmp_dir);
    bt_tokenizer_destroy(tok);
    return 0;
}

static void check_ids(const json_t *want, const struct bt_tokens *got, const char *text)
{
    bool same = json_array_size(want) == got->n;
    for (size_t i = 0; same && i < got->n; i++) {
        same = json_integer_value(json_array_get(want, i)) == (json_int_t)got->ids[i];
    }
    if (!same) {
        fail_msg("wrong ids for \"%.60s\" (%zu ids, want %zu)", text, got->n,
                 json_array_size(want));
    }
}

static void test_vectors(void **state)
{
    (void)state;
    json_error_t je;
    json_t *all = json_load_file("tests/golden/tokenizer.json", JSON_ALLOW_NUL, &je);
    assert_non_null(all);
    assert_true(json_array_size(all) > 10);
    for (size_t i = 0; i < json_array_size(all); i++) {
        const json_t *v = json_array_get(all, i), *text = json_object_get(v, "text");
        const char *s = json_string_value(text), *decoded;
        size_t len = json_string_length(text);
        struct bt_tokens with = {0}, without = {0};
        assert_int_equal(bt_tokenizer_encode(tok, s, len, true, &with), BT_OK);
        assert_int_equal(bt_tokenizer_encode(tok, s, len, false, &without), BT_OK);
        check_ids(json_object_get(v, "ids"), &with, s);
        check_ids(json_object_get(v, "ids_no_special"), &without, s);
        struct bt_buf out;
        bt_buf_init(&out);
        assert_int_equal(bt_tokenizer_decode(tok, without.ids, without.n, false, &out), BT_OK);
        decoded = json_string_value(json_object_get(v, "decoded"));
        assert_string_equal(out.data == NULL ? "" : out.data, decoded);
        bt_buf_cleanup(&out);
        bt_tokens_cleanup(&with);
        bt_tokens_cleanup(&without);
    }
    json_decref(all);
}

static uint32_t next_random(uint32_t *counter, uint32_t seed)
{
    uint32_t key[2] = {seed, 0}, c[4] = {(*counter)++, 0, 0, 0}, out[4];
    bt_philox4x32(key, c, out);
    return out[0];
}

/* Ids at random: half of them single bytes, so that characters are cut everywhere. */
static void random_ids(uint32_t *ids, size_t n, uint32_t seed)
{
    uint32_t at = 0, vocab = bt_tokenizer_vocab(tok);
    for (size_t i = 0; i < n; i++) {
        uint32_t r = next_random(&at, seed);
        ids[i] = r % 2 == 0 ? next_random(&at, seed) % 256 : next_random(&at, seed) % vocab;
    }
}

static bool is_utf8(const char *p, size_t n)
{
    json_t *s = json_stringn(p, n); /* refuses what is not UTF-8 */
    json_decref(s);
    return s != NULL;
}

static void test_detok_equals_decode(void **state)
{
    (void)state;
    for (uint32_t seed = 0; seed < 300; seed++) {
        uint32_t ids[64];
        bool skip = seed % 2 == 0;
        random_ids(ids, 64, seed);
        struct bt_buf whole, part;
        bt_buf_init(&whole);
        bt_buf_init(&part);
        assert_int_equal(bt_tokenizer_decode(tok, ids, 64, skip, &whole), BT_OK);
        struct bt_detok *d = bt_detok_create(tok, skip);
        for (size_t i = 0; i < 64; i++) {
            assert_int_equal(bt_detok_push(d, ids[i], &part), BT_OK);
            assert_true(is_utf8(part.data == NULL ? "" : part.data, part.len));
        }
        bt_detok_flush(d, &part);
        bt_detok_destroy(d);
        assert_int_equal(whole.len, part.len);
        assert_memory_equal(whole.data, part.data, whole.len);
        bt_buf_cleanup(&whole);
        bt_buf_cleanup(&part);
    }
}

/* Any cut of the ids into a prompt and a rest: the rest's text completes the prompt's. */
static void test_detok_seed(void **state)
{
    (void)state;
    static const char text[] = "na\xc3\xafve \xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x98\x80!";
    struct bt_tokens ids = {0};
    assert_int_equal(bt_tokenizer_encode(tok, text, sizeof(text) - 1, false, &ids), BT_OK);
    for (size_t cut = 0; cut <= ids.n; cut++) {
        struct bt_detok *a = bt_detok_create(tok, true), *b = bt_detok_create(tok, true);
        struct bt_buf out;
        bt_buf_init(&out);
        for (size_t i = 0; i < cut; i++) {
            assert_int_equal(bt_detok_push(a, ids.ids[i], &out), BT_OK);
        }
        bt_detok_seed(b, ids.ids, cut);
        for (size_t i = cut; i < ids.n; i++) {
            assert_int_equal(bt_detok_push(b, ids.ids[i], &out), BT_OK);
        }
        bt_detok_flush(b, &out);
        assert_string_equal(out.data, text);
        bt_buf_cleanup(&out);
        bt_detok_destroy(a);
        bt_detok_destroy(b);
    }
    bt_tokens_cleanup(&ids);
}

static void test_detok_keeps(void **state)
{
    (void)state;
    static const char *const names[] = {"<|eot_id|>", "<|start_header_id|>"};
    uint32_t ids[2];
    for (size_t i = 0; i < 2; i++) {
        assert_true(bt_tokenizer_find(tok, names[i], &ids[i]));
    }
    struct bt_buf out;
    bt_buf_init(&out);
    struct bt_detok *d = bt_detok_create(tok, true);
    bt_detok_keep(d, &ids[1], 1);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(bt_detok_push(d, ids[i], &out), BT_OK);
    }
    assert_string_equal(out.data, names[1]);
    bt_detok_destroy(d);
    bt_buf_cleanup(&out);
}

static void test_lookups(void **state)
{
    (void)state;
    uint32_t id;
    assert_true(bt_tokenizer_find(tok, "<|eot_id|>", &id));
    assert_int_equal(id, 2047);
    assert_true(bt_tokenizer_is_special(tok, id));
    assert_false(bt_tokenizer_is_special(tok, 5));
    assert_false(bt_tokenizer_find(tok, "<|nothing|>", &id));
    assert_int_equal(bt_tokenizer_vocab(tok), 2048);
    struct bt_buf out;
    bt_buf_init(&out);
    assert_int_equal(bt_tokenizer_piece(tok, 160, &out), BT_OK);
    assert_int_equal(out.len, 1);
    assert_int_equal((uint8_t)out.data[0], 0xe4);
    uint32_t bad = 2048;
    assert_int_equal(bt_tokenizer_piece(tok, bad, &out), BT_ERR_INVALID);
    assert_int_equal(bt_tokenizer_decode(tok, &bad, 1, true, &out), BT_ERR_INVALID);
    struct bt_tokens ids = {0};
    assert_int_equal(bt_tokenizer_encode(tok, "ok\xff", 3, true, &ids), BT_ERR_INVALID);
    assert_int_equal(bt_tokenizer_encode(tok, "\xed\xa0\x80", 3, true, &ids), BT_ERR_INVALID);
    assert_int_equal(ids.n, 0);
    bt_tokens_cleanup(&ids);
    bt_buf_cleanup(&out);
}

static void round_trip(const char *unit, size_t times)
{
    size_t k = strlen(unit), len = k * times;
    char *text = malloc(len + 1);
    for (size_t i = 0; i < times; i++) {
        memcpy(text + i * k, unit, k);
    }
    struct bt_tokens ids = {0};
    struct bt_buf out;
    bt_buf_init(&out);
    assert_int_equal(bt_tokenizer_encode(tok, text, len, false, &ids), BT_OK);
    assert_int_equal(bt_tokenizer_decode(tok, ids.ids, ids.n, false, &out), BT_OK);
    assert_int_equal(out.len, len);
    assert_memory_equal(out.data, text, len);
    bt_tokens_cleanup(&ids);
    bt_buf_cleanup(&out);
    free(text);
}

static void test_pathological(void **state)
{
    (void)state;
    round_trip("a", 1 << 20);
    round_trip(" ", 1 << 20);
    round_trip("\xf0\x9f\x98\x80", 1 << 18);
    round_trip("\n", 1 << 19);
    round_trip("<|", 1 << 18);
    round_trip("the ", 1 << 17);
    round_trip("<|eot_id|>", 1 << 14);
    round_trip(" a\r\n", 1 << 16);
}

/* A tokenizer made of 256 byte tokens and what `patch` (JSON, merged over the file) says. */
static bt_status_t load_patched(const char *patch, struct bt_tokenizer **t_p, char *err)
{
    json_error_t je;
    json_t *root = json_load_file(MODEL "/tokenizer.json", 0, &je);
    json_t *over = json_loads(patch, 0, &je);
    assert_non_null(root);
    if (over == NULL) {
        fail_msg("%s: %s", patch, je.text);
    }
    const char *key;
    json_t *value;
    json_object_foreach(over, key, value)
    {
        if (strcmp(key, "model") == 0) {
            json_object_update(json_object_get(root, key), value);
        } else if (strcmp(key, "vocab+") == 0) {
            json_object_update(json_object_get(json_object_get(root, "model"), "vocab"), value);
        } else if (strcmp(key, "added+") == 0) {
            json_array_extend(json_object_get(root, "added_tokens"), value);
        } else {
            json_object_set(root, key, value);
        }
    }
    char path[128];
    snprintf(path, sizeof(path), "%s/tokenizer.json", tmp_dir);
    assert_int_equal(json_dump_file(root, path, 0), 0);
    json_decref(root);
    json_decref(over);
    return bt_tokenizer_load(tmp_dir, t_p, err, 512);
}

/* What tokenizer_config.json says of BOS and EOS, in front of and behind "a": DeepSeek's models
 * (LlamaTokenizerFast over a tokenizer.json that adds none), and classes that do not decide it. */
static void test_tokens_around(void **state)
{
    (void)state;
    static const char none[] = "{\"post_processor\":{\"type\":\"ByteLevel\"}}", own[] = "{}";
    static const char names[] = "\"bos_token\":{\"content\":\"<|begin_of_text|>\"},"
                                "\"eos_token\":\"<|end_of_text|>\",\"model_max_length\":1e30";
    static const struct {
        const char *tokenizer, *config;
        const char *want; /* b: BOS, e: EOS */
    } cases[] = {
        {none, "\"tokenizer_class\":\"LlamaTokenizerFast\",\"add_bos_token\":true", "ba"},
        {none,
         "\"tokenizer_class\":\"LlamaTokenizer\",\"add_bos_token\":true,"
         "\"add_eos_token\":true",
         "bae"},
        {none, "\"tokenizer_class\":\"GemmaTokenizerFast\",\"add_bos_token\":true", "ba"},
        {none, "\"tokenizer_class\":\"LlamaTokenizerFast\"", "a"},
        {none, "\"tokenizer_class\":\"PreTrainedTokenizerFast\",\"add_bos_token\":true", "a"},
        {none, "\"tokenizer_class\":\"Qwen2Tokenizer\",\"add_bos_token\":true", "a"},
        {own, "\"tokenizer_class\":\"LlamaTokenizerFast\",\"add_bos_token\":true", "ba"},
        {own, "\"tokenizer_class\":\"LlamaTokenizerFast\",\"add_bos_token\":false", "a"},
        {own, "\"tokenizer_class\":\"PreTrainedTokenizerFast\",\"add_bos_token\":false", "ba"},
    };
    char path[128], err[512];
    snprintf(path, sizeof(path), "%s/tokenizer_config.json", tmp_dir);
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fprintf(f, "{%s,%s}", names, cases[i].config);
        fclose(f);
        struct bt_tokenizer *t = NULL;
        assert_int_equal(load_patched(cases[i].tokenizer, &t, err), BT_OK);
        uint32_t id[256] = {0};
        assert_true(bt_tokenizer_find(t, "<|begin_of_text|>", &id['b']));
        assert_true(bt_tokenizer_find(t, "<|end_of_text|>", &id['e']));
        assert_true(bt_tokenizer_find(t, "a", &id['a']));
        struct bt_tokens got = {0};
        assert_int_equal(bt_tokenizer_encode(t, "a", 1, true, &got), BT_OK);
        assert_int_equal(got.n, strlen(cases[i].want));
        for (size_t j = 0; j < got.n; j++) {
            assert_int_equal(got.ids[j], id[(unsigned char)cases[i].want[j]]);
        }
        bt_tokens_cleanup(&got);
        bt_tokenizer_destroy(t);
    }
    struct bt_tokenizer *t = NULL;
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("{\"tokenizer_class\":\"LlamaTokenizerFast\",\"add_bos_token\":true,"
          "\"bos_token\":\"<s>\"}",
          f);
    fclose(f);
    assert_int_equal(load_patched(none, &t, err), BT_ERR_INVALID);
    assert_non_null(strstr(err, "tokenizer_config.json"));
    assert_non_null(strstr(err, "<s>"));
    assert_int_equal(unlink(path), 0);
}

static void test_broken_files(void **state)
{
    (void)state;
    static const struct {
        const char *patch;
        bt_status_t status;
        const char *word;
    } cases[] = {
        {"{\"model\":{\"merges\":[[\"t\",\"zzzz\"]]}}", BT_ERR_INVALID, "merges[0]"},
        {"{\"model\":{\"merges\":[\"a\"]}}", BT_ERR_INVALID, "merges[0]"},
        {"{\"model\":{\"merges\":[\"a b c\"]}}", BT_ERR_INVALID, "merges[0]"},
        {"{\"model\":{\"merges\":7}}", BT_ERR_INVALID, "merges"},
        {"{\"model\":{\"vocab\":{}}}", BT_ERR_INVALID, "vocab"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}", BT_ERR_INVALID, "byte 0x00"},
        {"{\"vocab+\":{\"newtoken\":5}}", BT_ERR_INVALID, "id 5"},
        {"{\"vocab+\":{\"newtoken\":-1}}", BT_ERR_INVALID, "newtoken"},
        {"{\"vocab+\":{\"newtoken\":4000000000}}", BT_ERR_INVALID, "newtoken"},
        {"{\"vocab+\":{\"newtoken\":\"5\"}}", BT_ERR_INVALID, "newtoken"},
        {"{\"added+\":[{\"id\":7,\"content\":\"<x>\"}]}", BT_ERR_INVALID, "<x>"},
        {"{\"added+\":[{\"id\":3000,\"content\":\"<|eot_id|>\"}]}", BT_ERR_INVALID, "two ids"},
        {"{\"added+\":[{\"id\":3000}]}", BT_ERR_INVALID, "content"},
        {"{\"model\":{\"type\":\"Unigram\"}}", BT_ERR_UNSUPPORTED, "Unigram"},
        {"{\"model\":{\"dropout\":0.1}}", BT_ERR_UNSUPPORTED, "dropout"},
        {"{\"model\":{\"end_of_word_suffix\":\"</w>\"}}", BT_ERR_UNSUPPORTED, "end_of_word"},
        {"{\"model\":{\"unk_token\":\"<unk>\"}}", BT_ERR_INVALID, "<unk>"},
        {"{\"normalizer\":{\"type\":\"Nmt\"}}", BT_ERR_UNSUPPORTED, "Nmt"},
        {"{\"pre_tokenizer\":{\"type\":\"Foo\"}}", BT_ERR_UNSUPPORTED, "Foo"},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},"
         "\"behavior\":\"Isolated\"}}",
         BT_ERR_INVALID, "pattern"},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a&&b]\"},"
         "\"behavior\":\"Isolated\"}}",
         BT_ERR_UNSUPPORTED, "intersection"},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[[:punct:]]\"},"
         "\"behavior\":\"Isolated\"}}",
         BT_ERR_UNSUPPORTED, "[:name:]"},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},"
         "\"behavior\":\"Sideways\"}}",
         BT_ERR_UNSUPPORTED, "Sideways"},
        {"{\"decoder\":{\"type\":\"CTC\"}}", BT_ERR_UNSUPPORTED, "CTC"},
        {"{\"decoder\":null}", BT_ERR_UNSUPPORTED, "decoder"},
        {"{\"post_processor\":{\"type\":\"Bar\"}}", BT_ERR_UNSUPPORTED, "Bar"},
        {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":"
         "{\"id\":\"<q>\"}}]}}",
         BT_ERR_INVALID, "<q>"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        struct bt_tokenizer *t = NULL;
        char err[512] = "";
        bt_status_t st = load_patched(cases[i].patch, &t, err);
        if (st != cases[i].status || strstr(err, cases[i].word) == NULL ||
            strstr(err, "tokenizer.json") == NULL) {
            fail_msg("%s: %s, \"%s\"", cases[i].patch, bt_status_name(st), err);
        }
        assert_null(t);
    }
    struct bt_tokenizer *t = NULL;
    char err[512];
    assert_int_equal(bt_tokenizer_load("/nonexistent", &t, err, sizeof(err)), BT_ERR_NOT_FOUND);
}

static void expect_ids(const char *patch, const char *text, const char *want)
{
    struct bt_tokenizer *t = NULL;
    char err[512] = "";
    if (load_patched(patch, &t, err) != BT_OK) {
        fail_msg("%s", err);
    }
    struct bt_tokens ids = {0};
    assert_int_equal(bt_tokenizer_encode(t, text, strlen(text), true, &ids), BT_OK);
    struct bt_buf got;
    bt_buf_init(&got);
    for (size_t i = 0; i < ids.n; i++) {
        struct bt_buf piece;
        bt_buf_init(&piece);
        assert_int_equal(bt_tokenizer_piece(t, ids.ids[i], &piece), BT_OK);
        bt_buf_printf(&got, "%s%s", i == 0 ? "" : "|", piece.data);
        bt_buf_cleanup(&piece);
    }
    if (strcmp(got.data == NULL ? "" : got.data, want) != 0) {
        fail_msg("\"%s\" gives \"%s\", want \"%s\" with %s", text, got.data, want, patch);
    }
    bt_buf_cleanup(&got);
    bt_tokens_cleanup(&ids);
    bt_tokenizer_destroy(t);
}

#define BYTES "\"post_processor\":null,\"model\":{\"merges\":[],\"ignore_merges\":true}"
#define WORDS(s)                                                                                   \
    "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" s ","                           \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]}"
#define SPLIT(re, how)                                                                             \
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" re "\"},\"behavior\":\"" how "\"}"

/* With ignore_merges and no merges, a word that is a token shows where the cuts are. */
static void test_pretokenizers(void **state)
{
    (void)state;
    static const char vocab[] = "\"vocab+\":{\"ab\":3000,\"-ab\":3001,\"ab-\":3002,\"--\":3003,"
                                "\"12\":3004,\"\\u0120xy\":3005,\"\\u0120\\u0120\":3006,\"-\":12}";
    static const struct {
        const char *words, *text, *want;
    } cases[] = {
        {WORDS(SPLIT("-", "Isolated")), "ab--ab", "ab|-|-|ab"},
        {WORDS(SPLIT("-", "Contiguous")), "ab--ab", "ab|--|ab"},
        {WORDS(SPLIT("-", "Removed")), "ab--ab", "ab|ab"},
        {WORDS(SPLIT("-", "MergedWithPrevious")), "ab-ab", "ab-|ab"},
        {WORDS(SPLIT("-", "MergedWithNext")), "ab-ab", "ab|-ab"},
        {WORDS(SPLIT("(?=-)", "Isolated")), "ab-ab", "ab|-ab"},
        {WORDS(SPLIT("\\\\b", "Isolated")), "ab--", "ab|--"},
        {WORDS(SPLIT("[[:alpha:]]+", "Isolated")), "-ab-", "-|ab|-"},
        {WORDS("{\"type\":\"Digits\",\"individual_digits\":true}"), "ab12", "ab|1|2"},
        {WORDS("{\"type\":\"Digits\",\"individual_digits\":false}"), "ab12", "ab|12"},
        {WORDS("{\"type\":\"Punctuation\"}"), "ab--", "ab|-|-"},
        {WORDS("{\"type\":\"WhitespaceSplit\"}"), "ab  ab", "ab|ab"},
        {WORDS("{\"type\":\"Whitespace\"}"), "ab-- ab", "ab|--|ab"},
        {"\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true}", "xy xy",
         " xy| xy"},
        {"\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false}", "   xy",
         "  | xy"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        char *patch = bt_sprintf("{" BYTES ",%s,%s}", cases[i].words, vocab);
        expect_ids(patch, cases[i].text, cases[i].want);
        free(patch);
    }
}

static void test_added_tokens(void **state)
{
    (void)state;
    static const char base[] =
        "{" BYTES ",\"added+\":[{\"id\":3000,\"content\":\"<a>\",\"lstrip\":true,\"rstrip\":true},"
        "{\"id\":3001,\"content\":\"word\",\"single_word\":true,\"normalized\":true},"
        "{\"id\":3002,\"content\":\"<a>b\"},{\"id\":3003,\"content\":\"<ab\"}]}";
    expect_ids(base, "x  <a>  y", "x|<a>|y");
    expect_ids(base, "<a>b<a", "<a>b|<|a");
    expect_ids(base, "<ab<a>", "<ab|<a>");
    expect_ids(base, "a word,word", "a| |word|,|word");
    expect_ids(base, "xword", "x|w|o|r|d");
    expect_ids(base, "\xe2\x80\x8dword", "\xe2|\x80|\x8d|w|o|r|d"); /* a joiner is of the word */
    /* either spelling of a merge */
    expect_ids("{\"post_processor\":null,\"model\":{\"merges\":[\"t h\"],\"ignore_merges\":false}}",
               "tthx", "t|th|x");
    /* both sides of the text */
    expect_ids("{" BYTES ",\"post_processor\":{\"type\":\"RobertaProcessing\",\"cls\":[\"x\",2043],"
               "\"sep\":[\"y\",2044]}}",
               "a", "<|begin_of_text|>|a|<|end_of_text|>");
}

/* The four forms: composed, marks in canonical order, Hangul, what is excluded from composition. */
static void test_normal_forms(void **state)
{
    (void)state;
    static const struct {
        const char *text, *nfc, *nfd, *nfkc, *nfkd;
    } cases[] = {
        {"plain", "plain", "plain", "plain", "plain"},
        {"e\xcc\x81", "\xc3\xa9", "e\xcc\x81", "\xc3\xa9", "e\xcc\x81"},
        {"\xe1\xba\x9b\xcc\xa3", "\xe1\xba\x9b\xcc\xa3", "\xc5\xbf\xcc\xa3\xcc\x87", "\xe1\xb9\xa9",
         "s\xcc\xa3\xcc\x87"},
        {"a\xcc\x81\xcc\xa3", "\xe1\xba\xa1\xcc\x81", "a\xcc\xa3\xcc\x81", "\xe1\xba\xa1\xcc\x81",
         "a\xcc\xa3\xcc\x81"},
        {"\xea\xb0\x81", "\xea\xb0\x81", "\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81",
         "\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8"},
        {"\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc", "\xe0\xa4\x95\xe0\xa4\xbc",
         "\xe0\xa4\x95\xe0\xa4\xbc", "\xe0\xa4\x95\xe0\xa4\xbc"},
        {"\xe2\x84\xab", "\xc3\x85", "A\xcc\x8a", "\xc3\x85", "A\xcc\x8a"},
        {"\xef\xac\x81\xc2\xbd\xc2\xa0", "\xef\xac\x81\xc2\xbd\xc2\xa0",
         "\xef\xac\x81\xc2\xbd\xc2\xa0",
         "fi1\xe2\x81\x84"
         "2 ",
         "fi1\xe2\x81\x84"
         "2 "},
        {"e<|eot_id|>\xcc\x81", "e<|eot_id|>\xcc\x81", "e<|eot_id|>\xcc\x81", "e<|eot_id|>\xcc\x81",
         "e<|eot_id|>\xcc\x81"},
    };
    static const char *const forms[] = {"NFC", "NFD", "NFKC", "NFKD"};
    for (size_t f = 0; f < 4; f++) {
        struct bt_tokenizer *t = NULL;
        char err[512] = "", patch[64];
        snprintf(patch, sizeof(patch), "{\"normalizer\":{\"type\":\"%s\"}}", forms[f]);
        if (load_patched(patch, &t, err) != BT_OK) {
            fail_msg("%s", err);
        }
        for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
            const char *want[] = {cases[i].nfc, cases[i].nfd, cases[i].nfkc, cases[i].nfkd};
            struct bt_tokens ids = {0};
            struct bt_buf out;
            bt_buf_init(&out);
            assert_int_equal(
                bt_tokenizer_encode(t, cases[i].text, strlen(cases[i].text), false, &ids), BT_OK);
            assert_int_equal(bt_tokenizer_decode(t, ids.ids, ids.n, false, &out), BT_OK);
            assert_string_equal(out.data, want[f]);
            bt_buf_cleanup(&out);
            bt_tokens_cleanup(&ids);
        }
        bt_tokenizer_destroy(t);
    }
}

/* The style of SentencePiece: marks for spaces, bytes as <0xNN>. */
static void test_sentencepiece_style(void **state)
{
    (void)state;
    static const char base[] =
        "{\"added_tokens\":[],\"post_processor\":null,\"pre_tokenizer\":null,"
        "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":"
        "\"\\u2581\"},{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":"
        "\"\\u2581\"}]},"
        "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":"
        "{\"String\":\"\\u2581\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":"
        "\"Fuse\"},{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]},"
        "\"model\":{\"byte_fallback\":true,\"ignore_merges\":false,\"vocab\":{\"\\u2581\":0,\"a\":"
        "1,"
        "\"b\":2,\"ab\":3,\"\\u2581ab\":4,\"<0xC3>\":5,\"<0xA9>\":6},\"merges\":[\"a b\",\"\\u2581 "
        "ab\"]}}";
    struct bt_tokenizer *t = NULL;
    char err[512] = "";
    if (load_patched(base, &t, err) != BT_OK) {
        fail_msg("%s", err);
    }
    static const char text[] = "ab ab\xc3\xa9 ab";
    static const uint32_t want[] = {4, 4, 5, 6, 4};
    struct bt_tokens ids = {0};
    struct bt_buf out;
    bt_buf_init(&out);
    assert_int_equal(bt_tokenizer_encode(t, text, sizeof(text) - 1, true, &ids), BT_OK);
    assert_int_equal(ids.n, 5);
    assert_memory_equal(ids.ids, want, sizeof(want));
    assert_int_equal(bt_tokenizer_decode(t, ids.ids, ids.n, true, &out), BT_OK);
    assert_string_equal(out.data, text);
    bt_buf_cleanup(&out);
    bt_tokens_cleanup(&ids);
    bt_tokenizer_destroy(t);
}

/* Flips bytes, cuts and doubles stretches: a load must answer, and what it accepts must work. */
static void test_mutated_files(void **state)
{
    (void)state;
    json_error_t je;
    json_t *root = json_load_file(MODEL "/tokenizer.json", 0, &je);
    assert_non_null(root);
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab"), *value;
    const char *key;
    void *tmp;
    json_object_foreach_safe(vocab, tmp, key, value)
    {
        if (json_integer_value(value) >= 300) {
            json_object_del(vocab, key);
        }
    }
    json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    while (json_array_size(merges) > 40) {
        json_array_remove(merges, json_array_size(merges) - 1);
    }
    char *good = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    size_t len = strlen(good);
    char path[128];
    snprintf(path, sizeof(path), "%s/tokenizer.json", tmp_dir);
    unsigned accepted = 0;
    for (uint32_t seed = 0; seed < 600; seed++) {
        uint32_t c = 0;
        char *bad = malloc(len * 2 + 1);
        memcpy(bad, good, len);
        size_t n = len;
        for (uint32_t k = 0; k <= seed % 3; k++) {
            size_t at = next_random(&c, seed) % n, span = next_random(&c, seed) % 24;
            span = BT_MIN(span, n - at);
            switch (next_random(&c, seed) % 4) {
            case 0: bad[at] = (char)next_random(&c, seed); break;
            case 1: bad[at] = "0123456789\"{}[],:tfn"[next_random(&c, seed) % 20]; break;
            case 2:
                memmove(bad + at, bad + at + span, n - at - span);
                n -= span;
                break;
            default:
                memmove(bad + at + span, bad + at, n - at);
                n += span;
                break;
            }
        }
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        assert_int_equal(fwrite(bad, 1, n, f), n);
        fclose(f);
        free(bad);
        struct bt_tokenizer *t = NULL;
        char err[512] = "";
        bt_status_t st = bt_tokenizer_load(tmp_dir, &t, err, sizeof(err));
        if (st != BT_OK) {
            assert_true(st == BT_ERR_INVALID || st == BT_ERR_UNSUPPORTED);
            assert_true(strlen(err) > 0);
            continue;
        }
        accepted++;
        struct bt_tokens ids = {0};
        struct bt_buf out;
        bt_buf_init(&out);
        st = bt_tokenizer_encode(t, "the <|eot_id|> \xc3\xa9 12", 19, true, &ids);
        assert_int_equal(st, BT_OK);
        assert_int_equal(bt_tokenizer_decode(t, ids.ids, ids.n, false, &out), BT_OK);
        bt_tokens_cleanup(&ids);
        bt_buf_cleanup(&out);
        bt_tokenizer_destroy(t);
    }
    free(good);
    assert_true(accepted < 600);
}

struct sharer {
    struct bt_tokenizer *t;
    const struct bt_tokens *want;
    const char *text;
    uint32_t wrong;
};

static void *encode_often(void *arg)
{
    struct sharer *s = arg;
    for (int i = 0; i < 300; i++) {
        struct bt_tokens got = {0};
        if (bt_tokenizer_encode(s->t, s->text, strlen(s->text), true, &got) != BT_OK ||
            got.n != s->want->n || memcmp(got.ids, s->want->ids, got.n * sizeof(got.ids[0])) != 0) {
            s->wrong++;
        }
        bt_tokens_cleanup(&got);
    }
    return NULL;
}

/* Handles on one tokenizer, each with a thread: all encode at once, and as one alone does. */
static void test_shared(void **state)
{
    (void)state;
    static const char text[] = "To be, or not to be: 12345 that's the question\n\n\xf0\x9f\x98\x80 "
                               "<|eot_id|>It's  \xc3\xa9t\xc3\xa9; DON'T!";
    struct bt_tokens want = {0};
    struct sharer s[4];
    pthread_t threads[BT_ARRAY_LEN(s)];
    assert_int_equal(bt_tokenizer_encode(tok, text, strlen(text), true, &want), BT_OK);
    for (size_t i = 0; i < BT_ARRAY_LEN(s); i++) {
        s[i] = (struct sharer){bt_tokenizer_share(tok), &want, text, 0};
        assert_int_equal(bt_tokenizer_vocab(s[i].t), bt_tokenizer_vocab(tok));
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, &s[i]), 0);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(s); i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(s[i].wrong, 0);
        bt_tokenizer_destroy(s[i].t);
    }
    struct bt_tokens again = {0}; /* its tables are still there */
    assert_int_equal(bt_tokenizer_encode(tok, text, strlen(text), true, &again), BT_OK);
    assert_int_equal(again.n, want.n);
    bt_tokens_cleanup(&again);
    bt_tokens_cleanup(&want);
}

static bool stop_at_once(void *arg)
{
    ++*(int *)arg;
    return true;
}

/* Long texts and long words end when the watch wants it, and leave nothing behind. */
static void test_watch(void **state)
{
    static char text[100000];
    struct bt_tokenizer *t = NULL;
    struct bt_tokens ids = {0}, again = {0};
    char err[256];
    int asked = 0;
    const struct bt_token_watch watch = {stop_at_once, &asked};
    (void)state;
    assert_int_equal(bt_tokenizer_load("deploy/models/shakespeare-llama-6m", &t, err, sizeof(err)),
                     BT_OK);
    struct bt_tokenizer *other = bt_tokenizer_share(t);
    for (int kind = 0; kind < 2; kind++) {
        for (size_t i = 0; i < sizeof(text); i++) {
            text[i] = kind == 0 && i % 5 == 0 ? ' ' : 'a';
        }
        asked = 0;
        ids.n = again.n = 0;
        bt_tokenizer_watch(t, &watch);
        assert_int_equal(bt_tokenizer_encode(t, text, sizeof(text), true, &ids), BT_ERR_CANCELLED);
        assert_int_equal(ids.n, 0);
        assert_true(asked > 0);
        bt_tokenizer_watch(t, NULL);
        assert_int_equal(bt_tokenizer_encode(t, text, sizeof(text), true, &ids), BT_OK);
        assert_int_equal(bt_tokenizer_encode(other, text, sizeof(text), true, &again), BT_OK);
        assert_int_equal(ids.n, again.n);
        assert_memory_equal(ids.ids, again.ids, ids.n * sizeof(ids.ids[0]));
    }
    bt_tokens_cleanup(&ids);
    bt_tokens_cleanup(&again);
    bt_tokenizer_destroy(other);
    bt_tokenizer_destroy(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_watch),
        cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_detok_equals_decode),
        cmocka_unit_test(test_detok_seed),
        cmocka_unit_test(test_detok_keeps),
        cmocka_unit_test(test_lookups),
        cmocka_unit_test(test_pathological),
        cmocka_unit_test(test_tokens_around),
        cmocka_unit_test(test_broken_files),
        cmocka_unit_test(test_pretokenizers),
        cmocka_unit_test(test_added_tokens),
        cmocka_unit_test(test_mutated_files),
        cmocka_unit_test(test_sentencepiece_style),
        cmocka_unit_test(test_normal_forms),
        cmocka_unit_test(test_shared),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
