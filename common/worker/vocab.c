/* The vocabulary that masks are made of: the bytes of all tokens of the model's tokenizer, and the
 * ids that end a text. A compiling thread reads it once; afterwards the tokenizer is not needed. */
#include <stdio.h>
#include <stdlib.h>

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
    struct bt_tokenizer *tok;
    bt_status_t st = bt_model_config_load(model_path, &config, err, err_cap);
    st = st == BT_OK ? bt_tokenizer_load(model_path, &tok, err, err_cap) : st;
    if (st != BT_OK) {
        return st;
    }
    struct bt_grammar_token *tokens = bt_calloc(vocab, sizeof(*tokens));
    struct bt_buf bytes;
    bt_buf_init(&bytes);
    read_tokens(tok, vocab, tokens, &bytes);
    *v = (struct bt_wvocab){0};
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
    bt_tokenizer_destroy(tok);
    return st;
}
