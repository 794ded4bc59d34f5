/* The tokenizer's public functions: loading, text to ids, ids to text. Nothing changes after load,
 * except the scratch memory of the one thread that uses it. The only I/O is reading tokenizer.json,
 * and BOS and EOS from tokenizer_config.json. */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/token/token_priv.h"

#define FILE_MAX ((size_t)256 << 20)

void bt_tokenizer_destroy(struct bt_tokenizer *t)
{
    if (t == NULL) {
        return;
    }
    if (!t->shared) {
        bt_vocab_cleanup(&t->vocab);
        bt_added_cleanup(&t->raw);
        bt_added_cleanup(&t->normalized);
        bt_normalizer_destroy(t->normalizer);
        bt_pretok_destroy(t->pretok);
        bt_tokens_cleanup(&t->prefix);
        bt_tokens_cleanup(&t->suffix);
    }
    bt_bpe_cleanup(t->bpe);
    free(t->bpe);
    bt_pieces_cleanup(t->pieces);
    free(t->pieces);
    free(t);
}

struct bt_tokenizer *bt_tokenizer_share(const struct bt_tokenizer *t)
{
    struct bt_tokenizer *s = bt_malloc(sizeof(*s));
    *s = *t;
    s->shared = true;
    s->pieces = bt_calloc(1, sizeof(*s->pieces));
    s->bpe = bt_malloc(sizeof(*s->bpe));
    *s->bpe = *t->bpe;
    s->bpe->watch = NULL;
    s->bpe->symbols = NULL;
    s->bpe->heap = NULL;
    s->bpe->symbols_cap = s->bpe->heap_n = s->bpe->heap_cap = 0;
    s->bpe->cache = bt_calloc(BT_WORD_CACHE, sizeof(*s->bpe->cache));
    return s;
}

bt_status_t bt_tokenizer_load(const char *dir, struct bt_tokenizer **t_p, char *err, size_t err_cap)
{
    char *path = bt_sprintf("%s/tokenizer.json", dir);
    struct bt_token_err e = {path, err, err_cap};
    struct bt_buf file;
    bt_buf_init(&file);
    json_error_t je;
    json_t *root = NULL;
    struct bt_tokenizer *t = bt_calloc(1, sizeof(*t));
    t->bpe = bt_calloc(1, sizeof(*t->bpe));
    t->bpe->cache = bt_calloc(BT_WORD_CACHE, sizeof(*t->bpe->cache));
    t->pieces = bt_calloc(1, sizeof(*t->pieces));
    bt_status_t st = bt_token_read_file(path, FILE_MAX, &file, &e);
    if (st == BT_ERR_NOT_FOUND) {
        st = bt_token_fail(&e, st,
                           "No such file; model.path must be a directory in Hugging Face form, "
                           "with its tokenizer.json");
    }
    if (st == BT_OK) {
        root = json_loadb(file.data == NULL ? "" : file.data, file.len,
                          JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &je);
        st = root != NULL ? bt_tokenizer_parse(root, t, &e)
                          : bt_token_fail(&e, BT_ERR_INVALID, "line %d column %d: %s", je.line,
                                          je.column, je.text);
    }
    json_decref(root);
    bt_buf_cleanup(&file);
    /* Returns the memory of a big file's JSON tree, ten times as much as stays in use. */
    malloc_trim(0);
    free(path);
    if (st == BT_OK) {
        st = bt_token_around_load(dir, t, err, err_cap);
    }
    if (st != BT_OK) {
        bt_tokenizer_destroy(t);
        return st;
    }
    *t_p = t;
    return BT_OK;
}

void bt_tokenizer_watch(struct bt_tokenizer *t, const struct bt_token_watch *w)
{
    t->bpe->watch = w;
}

uint32_t bt_tokenizer_vocab(const struct bt_tokenizer *t)
{
    return t->vocab.n;
}

static bool has_added(const struct bt_added_set *s, uint32_t id)
{
    for (size_t i = 0; i < s->n; i++) {
        if (s->items[i].id == id) {
            return true;
        }
    }
    return false;
}

bool bt_tokenizer_is_added(const struct bt_tokenizer *t, uint32_t id)
{
    return has_added(&t->raw, id) || has_added(&t->normalized, id);
}

bool bt_tokenizer_is_special(const struct bt_tokenizer *t, uint32_t id)
{
    return id < t->vocab.n && (t->vocab.flags[id] & BT_TOK_SPECIAL) != 0;
}

bool bt_tokenizer_find(const struct bt_tokenizer *t, const char *content, uint32_t *id_p)
{
    uint32_t id = bt_vocab_find(&t->vocab, content, strlen(content));
    if (id == BT_TOKEN_NONE) {
        return false;
    }
    *id_p = id;
    return true;
}

static bt_status_t encode_words(const struct bt_tokenizer *t, const char *text, size_t len,
                                bool at_start, struct bt_tokens *out)
{
    if (len == 0) {
        return BT_OK;
    }
    bt_status_t st = bt_pretok_run(t->pretok, text, len, at_start, t->pieces);
    for (size_t i = 0; st == BT_OK && i < t->pieces->n; i++) {
        struct bt_str_ref r = t->pieces->refs[i];
        if (i % BT_LOOK == 0 && bt_token_stopped(t->bpe->watch)) {
            return BT_ERR_CANCELLED;
        }
        bt_bpe_encode_word(t->bpe, &t->vocab, t->pieces->text.data + r.off, r.len, out);
    }
    return st;
}

/* Encodes a range without raw added tokens: normalizes it, finds the normalized ones, encodes the
 * rest. */
static bt_status_t encode_stretch(const struct bt_tokenizer *t, const char *text, size_t len,
                                  bool at_start, struct bt_tokens *out)
{
    struct bt_buf norm;
    bt_buf_init(&norm);
    bt_status_t st = BT_OK;
    if (t->normalizer != NULL && len > 0) {
        bt_buf_append(&norm, text, len);
        st = bt_normalizer_run(t->normalizer, &norm);
        text = norm.data == NULL ? "" : norm.data;
        len = norm.len;
    }
    size_t done = 0, from = 0;
    struct bt_added_hit hit;
    while (st == BT_OK && bt_added_next(&t->normalized, text, len, &from, done, &hit)) {
        st = encode_words(t, text + done, hit.start - done, at_start && done == 0, out);
        bt_tokens_push(out, hit.id);
        done = hit.end;
    }
    if (st == BT_OK) {
        st = encode_words(t, text + done, len - done, at_start && done == 0, out);
    }
    bt_buf_cleanup(&norm);
    return st;
}

bt_status_t bt_tokenizer_encode(const struct bt_tokenizer *t, const char *text, size_t len,
                                bool add_special, struct bt_tokens *out)
{
    if (len > BT_TOKEN_LEN_MAX) {
        return BT_ERR_TOO_LARGE;
    }
    if (!bt_utf8_valid(text, len)) {
        return BT_ERR_INVALID;
    }
    size_t before = out->n, done = 0, from = 0;
    for (size_t i = 0; add_special && i < t->prefix.n; i++) {
        bt_tokens_push(out, t->prefix.ids[i]);
    }
    bt_status_t st = BT_OK;
    struct bt_added_hit hit;
    while (st == BT_OK && bt_added_next(&t->raw, text, len, &from, done, &hit)) {
        st = encode_stretch(t, text + done, hit.start - done, done == 0, out);
        bt_tokens_push(out, hit.id);
        done = hit.end;
    }
    if (st == BT_OK) {
        st = encode_stretch(t, text + done, len - done, done == 0, out);
    }
    if (st == BT_OK && bt_token_stopped(t->bpe->watch)) {
        st = BT_ERR_CANCELLED; /* may be inside the last word */
    }
    bt_bpe_trim(t->bpe);
    if (t->pieces->text.cap > (1u << 20) || t->pieces->cap > (1u << 16)) {
        bt_pieces_cleanup(t->pieces);
    }
    if (st != BT_OK) {
        out->n = before;
        return st;
    }
    for (size_t i = 0; add_special && i < t->suffix.n; i++) {
        bt_tokens_push(out, t->suffix.ids[i]);
    }
    return BT_OK;
}

bt_status_t bt_tokenizer_string(const struct bt_tokenizer *t, uint32_t id, struct bt_buf *out)
{
    const struct bt_vocab *v = &t->vocab;
    if (id >= v->n || (v->flags[id] & BT_TOK_PRESENT) == 0) {
        return BT_ERR_INVALID;
    }
    bt_buf_append(out, v->pool.data + v->content[id].off, v->content[id].len);
    return BT_OK;
}

bt_status_t bt_tokenizer_piece(const struct bt_tokenizer *t, uint32_t id, struct bt_buf *out)
{
    const struct bt_vocab *v = &t->vocab;
    if (id >= v->n) {
        return BT_ERR_INVALID;
    }
    struct bt_str_ref r = t->decoder.byte_level ? v->bytes[id] : v->content[id];
    const char *s = v->pool.data + r.off;
    if (t->decoder.byte_fallback && (v->flags[id] & BT_TOK_BYTE) != 0) {
        char hex[3] = {s[3], s[4], '\0'};
        char byte = (char)strtoul(hex, NULL, 16);
        bt_buf_append(out, &byte, 1);
        return BT_OK;
    }
    if (!t->decoder.space_mark) {
        bt_buf_append(out, s, r.len);
        return BT_OK;
    }
    for (uint32_t i = 0; i < r.len;) {
        if (r.len - i >= 3 && memcmp(s + i, "\xe2\x96\x81", 3) == 0) {
            bt_buf_append(out, " ", 1);
            i += 3;
        } else {
            bt_buf_append(out, s + i++, 1);
        }
    }
    return BT_OK;
}

bt_status_t bt_tokenizer_decode(const struct bt_tokenizer *t, const uint32_t *ids, size_t n,
                                bool skip_special, struct bt_buf *out)
{
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= t->vocab.n) {
            return BT_ERR_INVALID;
        }
    }
    struct bt_buf raw;
    bt_buf_init(&raw);
    bool first = true;
    for (size_t i = 0; i < n; i++) {
        if (skip_special && bt_tokenizer_is_special(t, ids[i])) {
            continue;
        }
        size_t at = raw.len;
        bt_status_t st = bt_tokenizer_piece(t, ids[i], &raw);
        BT_ASSERT(st == BT_OK);
        if (first && t->decoder.strip_first && raw.len > at && raw.data[at] == ' ') {
            bt_buf_consume(&raw, 1);
        }
        first = false;
    }
    bt_utf8_append_lossy(out, raw.data, raw.len, true);
    bt_buf_cleanup(&raw);
    return BT_OK;
}
