/* The vocabulary that masks are made of: the bytes of all tokens of the model's tokenizer, and the
 * ids that end a text. A compiling thread reads it once. The tokenizer stays, to split text that a
 * grammar forces. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/model_config.h"
#include "common/token/token.h"
#include "common/worker/mask.h"

/* Fills tokens[vocab], whose bytes lie in *bytes. Ids that the tokenizer does not have stay empty.
 */
static void read_tokens(const struct bt_tokenizer *tok, uint32_t vocab,
                        struct bt_grammar_token *tokens, struct bt_buf *bytes)
{
    uint32_t n = BT_MIN(bt_tokenizer_vocab(tok), vocab);
    for (uint32_t i = 0; i < n; i++) {
        size_t at = bytes->len;
        if (bt_tokenizer_piece(tok, i, bytes) == BT_OK) {
            tokens[i].n = (uint32_t)(bytes->len - at);
            tokens[i].special = bt_tokenizer_is_special(tok, i);
        }
    }
    size_t at = 0;
    for (uint32_t i = 0; i < n; i++) { /* now the buffer does not move any more */
        tokens[i].bytes = (const char *)bytes->data + at;
        at += tokens[i].n;
    }
}

bt_status_t bt_wvocab_load(const char *model_path, uint32_t vocab, struct bt_wvocab *v, char *err,
                           size_t err_cap)
{
    struct bt_model_config config;
    struct bt_tokenizer *tok = NULL;
    bt_status_t st = bt_model_config_load(model_path, &config, err, err_cap);
    st = st == BT_OK ? bt_tokenizer_load(model_path, &tok, err, err_cap) : st;
    if (st != BT_OK) {
        return st;
    }
    struct bt_grammar_token *tokens = bt_calloc(vocab, sizeof(*tokens));
    struct bt_buf bytes;
    bt_buf_init(&bytes);
    read_tokens(tok, vocab, tokens, &bytes);
    *v = (struct bt_wvocab){.tok = tok};
    for (uint32_t i = 0; i < config.n_eos && v->n_eos < BT_ENGINE_MAX_EOS; i++) {
        if (config.eos[i] < vocab) {
            v->eos[v->n_eos++] = config.eos[i];
        }
    }
    st = bt_grammar_vocab_create(tokens, vocab, v->eos, v->n_eos, &v->vocab);
    if (st != BT_OK) {
        snprintf(err, err_cap, "the vocabulary of %u tokens cannot be indexed: %s", vocab,
                 bt_status_text(st));
    }
    bt_buf_cleanup(&bytes);
    free(tokens);
    if (st != BT_OK) {
        bt_tokenizer_destroy(tok);
        *v = (struct bt_wvocab){0};
    }
    return st;
}

void bt_wvocab_cleanup(struct bt_wvocab *v)
{
    bt_grammar_vocab_destroy(v->vocab);
    bt_tokenizer_destroy(v->tok);
    *v = (struct bt_wvocab){0};
}

struct bt_wvocab bt_wvocab_share(const struct bt_wvocab *v)
{
    struct bt_wvocab s = *v;
    s.tok = bt_tokenizer_share(v->tok);
    return s;
}

void bt_wvocab_give_back(struct bt_wvocab *shared)
{
    bt_tokenizer_destroy(shared->tok);
    *shared = (struct bt_wvocab){0};
}

/* The length without a character that is cut off at the end. */
static size_t whole(const uint8_t *text, size_t n)
{
    size_t back = 1;
    while (back < n && back < 4 && (text[n - back] & 0xc0) == 0x80) {
        back++;
    }
    uint8_t first = n > 0 ? text[n - back] : 0;
    size_t len = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 1;
    return len > back ? n - back : n;
}

uint32_t bt_wvocab_tokens(const struct bt_wvocab *v, const void *text, size_t n, uint32_t *tokens,
                          uint32_t cap)
{
    struct bt_tokens ids = {0};
    bt_status_t st = bt_tokenizer_encode(v->tok, text, whole(text, n), false, &ids);
    uint32_t m = st == BT_OK && ids.n > 0 ? (uint32_t)BT_MIN(ids.n - 1, (size_t)cap) : 0;
    if (m > 0) {
        memcpy(tokens, ids.ids, m * sizeof(tokens[0]));
    }
    bt_tokens_cleanup(&ids);
    return m;
}
