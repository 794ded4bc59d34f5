/* libFuzzer: a model's tokenizer.json and, behind a zero byte, tokenizer_config.json. What is
 * accepted encodes and decodes a few texts: ids are those of the vocabulary, and decoding takes
 * them back. */
#include <stdlib.h>
#include <string.h>

#include "common/token/token.h"
#include "tests/fuzz/rig.h"

static const char *const texts[] = {"", "Hello, world!  12345\n",
                                    "a\xcc\x81 \xe2\x96\x81 \xf0\x9f\x98\x80 it's",
                                    "<s>[INST]<|eot_id|>x</s>"};

static void use(const struct bt_tokenizer *t)
{
    uint32_t vocab = bt_tokenizer_vocab(t), id;
    struct bt_buf out;
    bt_buf_init(&out);
    for (size_t i = 0; i < BT_ARRAY_LEN(texts); i++) {
        struct bt_tokens ids = {0};
        bt_status_t st = bt_tokenizer_encode(t, texts[i], strlen(texts[i]), i % 2 == 0, &ids);
        BT_ASSERT(st == BT_OK || ids.n == 0);
        for (size_t k = 0; k < ids.n; k++) {
            BT_ASSERT(ids.ids[k] < vocab);
            bt_buf_clear(&out);
            (void)bt_tokenizer_is_special(t, ids.ids[k]);
            st = bt_tokenizer_piece(t, ids.ids[k], &out);
            BT_ASSERT(st == BT_OK);
        }
        bt_buf_clear(&out);
        st = bt_tokenizer_decode(t, ids.ids, ids.n, i % 2 != 0, &out);
        BT_ASSERT(st == BT_OK);
        bt_tokens_cleanup(&ids);
    }
    for (id = 0; id < vocab && id < 64; id++) {
        bt_buf_clear(&out);
        bt_status_t st = bt_tokenizer_string(t, id, &out);
        BT_ASSERT(st == BT_OK || st == BT_ERR_INVALID);
    }
    (void)bt_tokenizer_find(t, "<s>", &id);
    bt_buf_cleanup(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bt_tokenizer *t = NULL;
    char err[512] = "";
    rig_reset();
    size_t n = strnlen((const char *)data, size), behind = BT_MIN(n + 1, size);
    (void)rig_file("tokenizer.json", data, n);
    if (behind < size) {
        (void)rig_file("tokenizer_config.json", data + behind, size - behind);
    } else {
        rig_no_file("tokenizer_config.json");
    }
    if (bt_tokenizer_load(rig_dir(), &t, err, sizeof(err)) == BT_OK) {
        use(t);
        bt_tokenizer_destroy(t);
    } else {
        BT_ASSERT(err[0] != '\0' && t == NULL);
    }
    return 0;
}
