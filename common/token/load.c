/* Reads tokenizer.json into a tokenizer. Copies all it needs; the caller frees the JSON tree.
 * Everything in the file is either implemented or refused by name. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/token/token_priv.h"

#define SPACE_MARK "\xe2\x96\x81" /* U+2581 */

bt_status_t bt_token_fail(const struct bt_token_err *e, bt_status_t status, const char *fmt, ...)
{
    char msg[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    if (e->cap > 0) {
        snprintf(e->buf, e->cap, "%s: %s", e->path, msg);
    }
    return status;
}

bt_status_t bt_token_read_file(const char *path, size_t max, struct bt_buf *out,
                               const struct bt_token_err *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return bt_token_fail(e, errno == ENOENT ? BT_ERR_NOT_FOUND : BT_ERR_IO, "%s",
                             strerror(errno));
    }
    struct stat sb;
    bt_status_t st = BT_OK;
    if (fstat(fd, &sb) != 0 || !S_ISREG(sb.st_mode)) {
        st = bt_token_fail(e, BT_ERR_INVALID, "not a regular file");
    } else if ((uint64_t)sb.st_size > max) {
        st = bt_token_fail(e, BT_ERR_TOO_LARGE, "%lld bytes, the limit is %zu",
                           (long long)sb.st_size, max);
    }
    while (st == BT_OK) {
        ssize_t n = read(fd, bt_buf_reserve(out, 1 << 16), 1 << 16);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            st = bt_token_fail(e, BT_ERR_IO, "%s", strerror(errno));
        }
        if (n <= 0) {
            break;
        }
        out->len += (size_t)n;
        out->data[out->len] = '\0';
        if (out->len > max) {
            st = bt_token_fail(e, BT_ERR_TOO_LARGE, "more than %zu bytes", max);
        }
    }
    close(fd);
    return st;
}

static bt_status_t parse_vocab(const json_t *model, struct bt_tokenizer *t,
                               const struct bt_token_err *e)
{
    json_t *vocab = json_object_get(model, "vocab");
    if (!json_is_object(vocab) || json_object_size(vocab) == 0) {
        return bt_token_fail(e, BT_ERR_INVALID, "model.vocab must be an object that is not empty");
    }
    json_int_t max = 0;
    const char *key;
    json_t *value;
    json_object_foreach(vocab, key, value)
    {
        json_int_t id = json_integer_value(value);
        if (!json_is_integer(value) || id < 0 || id >= BT_TOKEN_ID_MAX) {
            return bt_token_fail(e, BT_ERR_INVALID,
                                 "model.vocab: the id of \"%.80s\" must be 0..%u", key,
                                 BT_TOKEN_ID_MAX - 1);
        }
        max = BT_MAX(max, id);
    }
    bt_vocab_reserve(&t->vocab, (uint32_t)max + 1);
    json_object_foreach(vocab, key, value)
    {
        uint32_t id = (uint32_t)json_integer_value(value);
        if (t->vocab.flags[id] != 0) {
            return bt_token_fail(e, BT_ERR_INVALID,
                                 "model.vocab: id %u of \"%.80s\" is already the id of \"%.*s\"",
                                 id, key, (int)BT_MIN(t->vocab.content[id].len, 80u),
                                 t->vocab.pool.data + t->vocab.content[id].off);
        }
        size_t len = strlen(key);
        if (len == 0) {
            return bt_token_fail(e, BT_ERR_INVALID, "model.vocab: token %u is empty", id);
        }
        bt_vocab_put(&t->vocab, id, key, len, BT_TOK_MODEL);
    }
    return BT_OK;
}

/* The two halves of merge `i`, as a pair or as "a b". */
static bool merge_halves(const json_t *m, const char **a_p, size_t *an_p, const char **b_p,
                         size_t *bn_p)
{
    if (json_is_array(m) && json_array_size(m) == 2) {
        const json_t *a = json_array_get(m, 0), *b = json_array_get(m, 1);
        *a_p = json_string_value(a);
        *b_p = json_string_value(b);
        *an_p = json_string_length(a);
        *bn_p = json_string_length(b);
        return *a_p != NULL && *b_p != NULL;
    }
    const char *s = json_string_value(m);
    const char *space = s == NULL ? NULL : strchr(s, ' ');
    if (space == NULL || strchr(space + 1, ' ') != NULL) {
        return false;
    }
    *a_p = s;
    *an_p = (size_t)(space - s);
    *b_p = space + 1;
    *bn_p = json_string_length(m) - *an_p - 1;
    return true;
}

static bt_status_t parse_merges(const json_t *model, struct bt_tokenizer *t,
                                const struct bt_token_err *e)
{
    const json_t *merges = json_object_get(model, "merges");
    if (!json_is_array(merges)) {
        return bt_token_fail(e, BT_ERR_INVALID, "model.merges must be an array");
    }
    struct bt_vocab *v = &t->vocab;
    struct bt_buf joined;
    bt_buf_init(&joined);
    bt_status_t st = BT_OK;
    bt_vocab_merges_init(v, json_array_size(merges));
    uint32_t rank = 0;
    for (size_t i = 0; i < json_array_size(merges) && st == BT_OK; i++) {
        const json_t *m = json_array_get(merges, i);
        const char *a, *b;
        size_t an, bn;
        if (json_is_string(m) && strncmp(json_string_value(m), "#version", 8) == 0) {
            continue; /* the header of a merges.txt */
        }
        if (!merge_halves(m, &a, &an, &b, &bn)) {
            st = bt_token_fail(e, BT_ERR_INVALID,
                               "model.merges[%zu] must be [\"a\", \"b\"] or \"a b\"", i);
            break;
        }
        bt_buf_clear(&joined);
        bt_buf_append(&joined, a, an);
        bt_buf_append(&joined, b, bn);
        uint32_t ia = bt_vocab_find(v, a, an), ib = bt_vocab_find(v, b, bn);
        uint32_t id = bt_vocab_find(v, joined.data, joined.len);
        uint32_t ids[3] = {ia, ib, id};
        for (int k = 0; k < 3 && st == BT_OK; k++) {
            if (ids[k] == BT_TOKEN_NONE || (v->flags[ids[k]] & BT_TOK_MODEL) == 0) {
                const char *s = k == 0 ? a : k == 1 ? b : joined.data;
                size_t n = k == 0 ? an : k == 1 ? bn : joined.len;
                st = bt_token_fail(e, BT_ERR_INVALID,
                                   "model.merges[%zu]: token \"%.*s\" is not in model.vocab", i,
                                   (int)BT_MIN(n, (size_t)80), s);
            }
        }
        if (st == BT_OK) {
            bt_vocab_merge_put(v, ia, ib, rank++, id);
        }
    }
    bt_buf_cleanup(&joined);
    return st;
}

static bool flag(const json_t *j, const char *key)
{
    return json_is_true(json_object_get(j, key));
}

/* Refuses fields of the model that would change results and are not implemented. */
static bt_status_t check_model(const json_t *model, const struct bt_token_err *e)
{
    const char *type = json_string_value(json_object_get(model, "type"));
    if (!json_is_object(model)) {
        return bt_token_fail(e, BT_ERR_INVALID, "\"model\" must be an object");
    }
    if (type != NULL ? strcmp(type, "BPE") != 0 : json_object_get(model, "merges") == NULL) {
        return bt_token_fail(e, BT_ERR_UNSUPPORTED,
                             "model type \"%s\" is not supported (known: BPE)",
                             type == NULL ? "(none)" : type);
    }
    if (json_number_value(json_object_get(model, "dropout")) != 0) {
        return bt_token_fail(e, BT_ERR_UNSUPPORTED,
                             "model.dropout is not supported; set it to null");
    }
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < BT_ARRAY_LEN(affixes); i++) {
        if (json_string_length(json_object_get(model, affixes[i])) > 0) {
            return bt_token_fail(e, BT_ERR_UNSUPPORTED, "model.%s is not supported", affixes[i]);
        }
    }
    return BT_OK;
}

static bt_status_t parse_added(const json_t *list, struct bt_tokenizer *t,
                               const struct bt_token_err *e)
{
    if (list != NULL && !json_is_array(list)) {
        return bt_token_fail(e, BT_ERR_INVALID, "added_tokens must be an array");
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *j = json_array_get(list, i), *c = json_object_get(j, "content");
        const json_t *idj = json_object_get(j, "id");
        json_int_t id = json_integer_value(idj);
        if (!json_is_string(c) || json_string_length(c) == 0 || !json_is_integer(idj) || id < 0 ||
            id >= BT_TOKEN_ID_MAX) {
            return bt_token_fail(e, BT_ERR_INVALID,
                                 "added_tokens[%zu] needs a \"content\" and an \"id\" of 0..%u", i,
                                 BT_TOKEN_ID_MAX - 1);
        }
        const char *s = json_string_value(c);
        size_t len = json_string_length(c);
        uint8_t special = flag(j, "special") ? BT_TOK_SPECIAL : 0;
        struct bt_vocab *v = &t->vocab;
        if ((uint32_t)id < v->n && (v->flags[id] & BT_TOK_PRESENT) != 0) {
            struct bt_str_ref r = v->content[id];
            if (r.len != len || memcmp(v->pool.data + r.off, s, len) != 0) {
                return bt_token_fail(
                    e, BT_ERR_INVALID, "added_tokens[%zu] \"%.80s\": id %lld is already \"%.*s\"",
                    i, s, (long long)id, (int)BT_MIN(r.len, 80u), v->pool.data + r.off);
            }
            v->flags[id] |= special;
        } else {
            bt_vocab_put(v, (uint32_t)id, s, len, special);
        }
    }
    return BT_OK;
}

/* Indexes the tokens to search for in texts, after the vocabulary is indexed. */
static bt_status_t index_added(const json_t *list, struct bt_tokenizer *t)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *j = json_array_get(list, i), *c = json_object_get(j, "content");
        struct bt_added a = {.id = (uint32_t)json_integer_value(json_object_get(j, "id")),
                             .single_word = flag(j, "single_word"),
                             .lstrip = flag(j, "lstrip"),
                             .rstrip = flag(j, "rstrip")};
        const json_t *norm = json_object_get(j, "normalized");
        bool normalized = norm == NULL ? !flag(j, "special") : json_is_true(norm);
        if (!normalized || t->normalizer == NULL) {
            bt_added_put(normalized ? &t->normalized : &t->raw, a, json_string_value(c),
                         json_string_length(c));
            continue;
        }
        struct bt_buf text;
        bt_buf_init(&text);
        bt_buf_append(&text, json_string_value(c), json_string_length(c));
        bt_status_t st = bt_normalizer_run(t->normalizer, &text);
        if (st == BT_OK && text.len > 0) {
            bt_added_put(&t->normalized, a, text.data, text.len);
        }
        bt_buf_cleanup(&text);
        if (st != BT_OK) {
            return st;
        }
    }
    bt_added_index(&t->raw);
    bt_added_index(&t->normalized);
    return BT_OK;
}

/* Reads one piece of a TemplateProcessing's "single". *seen: the text's place was already read. */
static bt_status_t template_piece(const json_t *piece, const json_t *specials,
                                  struct bt_tokenizer *t, bool *seen, const struct bt_token_err *e)
{
    const json_t *seq = json_object_get(piece, "Sequence"),
                 *sp = json_object_get(piece, "SpecialToken");
    const char *id = json_string_value(json_object_get(seq != NULL ? seq : sp, "id"));
    if (id == NULL) {
        return bt_token_fail(e, BT_ERR_INVALID,
                             "post_processor.single: a piece is neither Sequence nor SpecialToken");
    }
    if (seq != NULL) {
        if (strcmp(id, "A") != 0 || *seen) {
            return bt_token_fail(e, BT_ERR_INVALID,
                                 "post_processor.single must hold the sequence A once");
        }
        *seen = true;
        return BT_OK;
    }
    const json_t *ids = json_object_get(json_object_get(specials, id), "ids");
    if (!json_is_array(ids)) {
        return bt_token_fail(e, BT_ERR_INVALID,
                             "post_processor.special_tokens has no \"ids\" for \"%.80s\"", id);
    }
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *v = json_array_get(ids, i);
        json_int_t n = json_integer_value(v);
        if (!json_is_integer(v) || n < 0 || n >= t->vocab.n ||
            (t->vocab.flags[n] & BT_TOK_PRESENT) == 0) {
            return bt_token_fail(e, BT_ERR_INVALID,
                                 "post_processor: \"%.80s\" has an id that is not a token", id);
        }
        bt_tokens_push(*seen ? &t->suffix : &t->prefix, (uint32_t)n);
    }
    return BT_OK;
}

static bt_status_t parse_pair(const json_t *j, const char *key, struct bt_tokens *to,
                              const struct bt_tokenizer *t, const struct bt_token_err *e)
{
    const json_t *id = json_array_get(json_object_get(j, key), 1);
    json_int_t n = json_integer_value(id);
    if (!json_is_integer(id) || n < 0 || n >= t->vocab.n) {
        return bt_token_fail(e, BT_ERR_INVALID, "post_processor.%s must be [token, id]", key);
    }
    bt_tokens_push(to, (uint32_t)n);
    return BT_OK;
}

static bt_status_t parse_post(const json_t *j, struct bt_tokenizer *t, int depth,
                              const struct bt_token_err *e)
{
    if (j == NULL || json_is_null(j)) {
        return BT_OK;
    }
    const char *type = json_string_value(json_object_get(j, "type"));
    if (type == NULL || depth > 4) {
        return bt_token_fail(e, BT_ERR_INVALID,
                             "post_processor: an object with a \"type\" is needed");
    }
    bt_status_t st = BT_OK;
    if (strcmp(type, "ByteLevel") == 0) {
        return BT_OK; /* affects only offsets */
    }
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(j, "processors");
        for (size_t i = 0; i < json_array_size(list) && st == BT_OK; i++) {
            st = parse_post(json_array_get(list, i), t, depth + 1, e);
        }
        return st;
    }
    if (t->prefix.n + t->suffix.n > 0) {
        return bt_token_fail(e, BT_ERR_UNSUPPORTED,
                             "post_processor: a second one that adds tokens is not supported");
    }
    if (strcmp(type, "TemplateProcessing") == 0) {
        const json_t *single = json_object_get(j, "single");
        bool seen = false;
        for (size_t i = 0; i < json_array_size(single) && st == BT_OK; i++) {
            st = template_piece(json_array_get(single, i), json_object_get(j, "special_tokens"), t,
                                &seen, e);
        }
        return st != BT_OK || seen
                   ? st
                   : bt_token_fail(e, BT_ERR_INVALID,
                                   "post_processor.single must hold the sequence A");
    }
    if (strcmp(type, "BertProcessing") == 0 || strcmp(type, "RobertaProcessing") == 0) {
        st = parse_pair(j, "cls", &t->prefix, t, e);
        return st != BT_OK ? st : parse_pair(j, "sep", &t->suffix, t, e);
    }
    return bt_token_fail(e, BT_ERR_UNSUPPORTED,
                         "post_processor type \"%s\" is not supported (known: TemplateProcessing, "
                         "ByteLevel, BertProcessing, RobertaProcessing, Sequence)",
                         type);
}

static bt_status_t parse_decoder(const json_t *j, struct bt_decoder *d, int depth,
                                 const struct bt_token_err *e)
{
    if (j == NULL || json_is_null(j)) {
        return bt_token_fail(e, BT_ERR_UNSUPPORTED,
                             "no decoder: the text of a token is not known without one");
    }
    const char *type = json_string_value(json_object_get(j, "type"));
    if (type == NULL || depth > 4) {
        return bt_token_fail(e, BT_ERR_INVALID, "decoder: an object with a \"type\" is needed");
    }
    bool known = true;
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(j, "decoders");
        bt_status_t st = BT_OK;
        for (size_t i = 0; i < json_array_size(list) && st == BT_OK; i++) {
            st = parse_decoder(json_array_get(list, i), d, depth + 1, e);
        }
        return st;
    }
    if (strcmp(type, "ByteLevel") == 0) {
        d->byte_level = true;
    } else if (strcmp(type, "ByteFallback") == 0) {
        d->byte_fallback = true;
    } else if (strcmp(type, "Fuse") == 0) {
        known = true;
    } else if (strcmp(type, "Replace") == 0) {
        const char *from =
            json_string_value(json_object_get(json_object_get(j, "pattern"), "String"));
        const char *to = json_string_value(json_object_get(j, "content"));
        known = from != NULL && to != NULL && strcmp(from, SPACE_MARK) == 0 && strcmp(to, " ") == 0;
        d->space_mark = known;
    } else if (strcmp(type, "Strip") == 0) {
        const char *what = json_string_value(json_object_get(j, "content"));
        known = what != NULL && strcmp(what, " ") == 0 &&
                json_integer_value(json_object_get(j, "start")) == 1 &&
                json_integer_value(json_object_get(j, "stop")) == 0;
        d->strip_first = known;
    } else if (strcmp(type, "Metaspace") == 0) {
        const char *mark = json_string_value(json_object_get(j, "replacement"));
        const char *scheme = json_string_value(json_object_get(j, "prepend_scheme"));
        known = mark != NULL && strcmp(mark, SPACE_MARK) == 0;
        d->space_mark = known;
        d->strip_first = scheme != NULL ? strcmp(scheme, "never") != 0
                                        : !json_is_false(json_object_get(j, "add_prefix_space"));
    } else {
        known = false;
    }
    if (!known) {
        return bt_token_fail(e, BT_ERR_UNSUPPORTED,
                             "decoder type \"%s\" (or its parameters) is not supported (known: "
                             "ByteLevel, Sequence, ByteFallback, Fuse, Replace U+2581 by a space, "
                             "Strip one leading space, Metaspace)",
                             type);
    }
    return BT_OK;
}

/* Finds the tokens of the byte alphabet and the other data that BPE needs. */
static bt_status_t finish_model(const json_t *model, struct bt_tokenizer *t,
                                const struct bt_token_err *e)
{
    struct bt_bpe *b = t->bpe;
    b->byte_level = bt_pretok_byte_level(t->pretok);
    b->ignore_merges = flag(model, "ignore_merges");
    b->byte_fallback = flag(model, "byte_fallback");
    b->fuse_unk = flag(model, "fuse_unk");
    b->unk_id = BT_TOKEN_NONE;
    uint32_t dup;
    if (!bt_vocab_index(&t->vocab, b->byte_level || t->decoder.byte_level, &dup)) {
        struct bt_str_ref r = t->vocab.content[dup];
        return bt_token_fail(e, BT_ERR_INVALID, "token \"%.*s\" has two ids; one of them is %u",
                             (int)BT_MIN(r.len, 80u), t->vocab.pool.data + r.off, dup);
    }
    const json_t *unk = json_object_get(model, "unk_token");
    if (json_is_string(unk)) {
        b->unk_id = bt_vocab_find(&t->vocab, json_string_value(unk), json_string_length(unk));
        if (b->unk_id == BT_TOKEN_NONE) {
            return bt_token_fail(e, BT_ERR_INVALID, "model.unk_token \"%.80s\" is not a token",
                                 json_string_value(unk));
        }
    }
    for (unsigned c = 0; c < 256 && (b->byte_fallback || t->decoder.byte_fallback); c++) {
        char name[8];
        snprintf(name, sizeof(name), "<0x%02X>", c);
        uint32_t id = bt_vocab_find(&t->vocab, name, 6);
        if (id != BT_TOKEN_NONE && !b->byte_level) {
            t->vocab.byte_id[c] = id;
            t->vocab.flags[id] |= BT_TOK_BYTE;
        }
    }
    for (unsigned c = 0; c < 256 && b->byte_level; c++) {
        bool never = c == 0xc0 || c == 0xc1 || c >= 0xf5; /* no UTF-8 text has these bytes */
        if (t->vocab.byte_id[c] == BT_TOKEN_NONE && b->unk_id == BT_TOKEN_NONE && !never) {
            return bt_token_fail(e, BT_ERR_INVALID,
                                 "model.vocab lacks the token of byte 0x%02x; text would be lost",
                                 c);
        }
    }
    return BT_OK;
}

bt_status_t bt_tokenizer_parse(const json_t *root, struct bt_tokenizer *t,
                               const struct bt_token_err *e)
{
    const json_t *model = json_object_get(root, "model");
    const json_t *added = json_object_get(root, "added_tokens");
    bt_status_t st = check_model(model, e);
    if (st == BT_OK) {
        st = bt_normalizer_parse(json_object_get(root, "normalizer"), &t->normalizer, e);
    }
    if (st == BT_OK) {
        st = bt_pretok_parse(json_object_get(root, "pre_tokenizer"), &t->pretok, e);
    }
    if (st == BT_OK) {
        st = parse_decoder(json_object_get(root, "decoder"), &t->decoder, 0, e);
    }
    if (st == BT_OK) {
        st = parse_vocab(model, t, e);
    }
    if (st == BT_OK) {
        st = parse_added(added, t, e);
    }
    if (st == BT_OK) {
        st = finish_model(model, t, e);
    }
    if (st == BT_OK) {
        st = parse_merges(model, t, e);
    }
    if (st == BT_OK) {
        st = index_added(added, t);
        if (st != BT_OK) {
            return bt_token_fail(e, st, "an added token exceeds a limit of the normalizer");
        }
    }
    /* "truncation" and "padding" are ignored on purpose: they are the caller's decision. */
    return st == BT_OK ? parse_post(json_object_get(root, "post_processor"), t, 0, e) : st;
}
