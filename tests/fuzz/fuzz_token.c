/* libFuzzer: encoding and detokenizing. The first byte chooses one of the golden tokenizers, the
 * rest is the text. Text that is UTF-8 encodes; ids decode to it where nothing is normalized; a
 * stream of the ids is the decoding of them, also when its beginning is a prompt. Build and run in
 * the repository root: tests/fuzz/run token 60 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/token/token.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct {
    const char *name;
    bool exact; /* decode(encode(text)) is the text */
} kinds[] = {{"gpt2", true},    {"llama3", true},     {"deepseek", true},      {"qwen", false},
             {"digits", false}, {"spm-legacy", true}, {"spm-metaspace", false}};
static struct bt_tokenizer *toks[BT_ARRAY_LEN(kinds)];

static const struct bt_tokenizer *tokenizer(size_t i)
{
    if (toks[i] == NULL) {
        char dir[128], err[512] = "";
        snprintf(dir, sizeof(dir), "tests/golden/tokenizers/%s", kinds[i].name);
        bt_status_t st = bt_tokenizer_load(dir, &toks[i], err, sizeof(err));
        BT_ASSERT(st == BT_OK);
    }
    return toks[i];
}

static void check_stream(const struct bt_tokenizer *t, const struct bt_tokens *ids, size_t prompt)
{
    struct bt_buf whole, part;
    bt_buf_init(&whole);
    bt_buf_init(&part);
    struct bt_detok *d = bt_detok_create(t, true);
    bt_status_t st = BT_OK;
    for (size_t i = 0; i < ids->n && st == BT_OK; i++) {
        st = bt_detok_push(d, ids->ids[i], &part);
    }
    bt_detok_flush(d, &part);
    BT_ASSERT(st == BT_OK && bt_tokenizer_decode(t, ids->ids, ids->n, true, &whole) == BT_OK);
    BT_ASSERT(whole.len == part.len &&
              (whole.len == 0 || memcmp(whole.data, part.data, whole.len) == 0));
    bt_detok_destroy(d);
    bt_buf_clear(&part);
    d = bt_detok_create(t, true);
    bt_detok_seed(d, ids->ids, prompt);
    for (size_t i = prompt; i < ids->n; i++) {
        st = bt_detok_push(d, ids->ids[i], &part);
        BT_ASSERT(st == BT_OK);
    }
    bt_detok_flush(d, &part);
    BT_ASSERT(part.len <= whole.len && (part.len == 0 || memcmp(whole.data + whole.len - part.len,
                                                                part.data, part.len) == 0));
    bt_detok_destroy(d);
    bt_buf_cleanup(&whole);
    bt_buf_cleanup(&part);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    size_t kind = data[0] % BT_ARRAY_LEN(kinds), len = size - 1;
    const struct bt_tokenizer *t = tokenizer(kind);
    char *text = bt_malloc(len + 1); /* exact: a read beyond it is seen */
    memcpy(text, data + 1, len);
    text[len] = '\0';
    struct bt_tokens ids = {0};
    bt_status_t st = bt_tokenizer_encode(t, text, len, false, &ids);
    BT_ASSERT(st == BT_OK || (st == BT_ERR_INVALID && ids.n == 0));
    if (st == BT_OK) {
        struct bt_buf out;
        bt_buf_init(&out);
        st = bt_tokenizer_decode(t, ids.ids, ids.n, false, &out);
        BT_ASSERT(st == BT_OK);
        /* SentencePiece's mark is a space when decoded; specials swallow nothing in these files. */
        bool mark =
            memmem(text, len, "\xe2\x96\x81", 3) != NULL || memmem(text, len, "<", 1) != NULL;
        bool spm = strncmp(kinds[kind].name, "spm", 3) == 0;
        BT_ASSERT(!kinds[kind].exact || (spm && mark) ||
                  (out.len == len && (len == 0 || memcmp(out.data, text, len) == 0)));
        bt_buf_cleanup(&out);
        check_stream(t, &ids, data[0] < ids.n ? data[0] : ids.n);
    }
    bt_tokens_cleanup(&ids);
    free(text);
    return 0;
}
