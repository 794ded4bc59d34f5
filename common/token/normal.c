/* Normalizers of tokenizer.json: Unicode's forms, Prepend, Replace, Strip and sequences of these.
 * Language-specific ones are refused by name. Pure. */
#include <stdlib.h>
#include <string.h>

#include "common/token/token_priv.h"

enum normal_kind { NORMAL_FORM, NORMAL_PREPEND, NORMAL_REPLACE, NORMAL_STRIP };

struct normal_step {
    enum normal_kind kind;
    enum bt_normal_form form;
    struct bt_buf text; /* the text to insert */
    struct bt_regex *re;
    bool left, right;
};

struct bt_normalizer {
    struct normal_step *steps;
    size_t n;
};

void bt_normalizer_destroy(struct bt_normalizer *n)
{
    if (n == NULL) {
        return;
    }
    for (size_t i = 0; i < n->n; i++) {
        bt_buf_cleanup(&n->steps[i].text);
        bt_regex_destroy(n->steps[i].re);
    }
    free(n->steps);
    free(n);
}

static struct normal_step *add_step(struct bt_normalizer *n, enum normal_kind kind)
{
    n->steps = bt_realloc(n->steps, (n->n + 1) * sizeof(*n->steps));
    struct normal_step *s = &n->steps[n->n++];
    *s = (struct normal_step){.kind = kind};
    return s;
}

static bt_status_t set_text(struct normal_step *s, const json_t *j, const char *key,
                            const struct bt_token_err *e)
{
    const json_t *v = json_object_get(j, key);
    if (!json_is_string(v)) {
        return bt_token_fail(e, BT_ERR_INVALID, "normalizer: \"%s\" must be a string", key);
    }
    bt_buf_append(&s->text, json_string_value(v), json_string_length(v));
    return BT_OK;
}

static bt_status_t parse_replace(struct bt_normalizer *n, const json_t *j,
                                 const struct bt_token_err *e)
{
    struct normal_step *s = add_step(n, NORMAL_REPLACE);
    const json_t *pattern = json_object_get(j, "pattern");
    const json_t *text = json_object_get(pattern, "String");
    bool literal = text != NULL;
    if (!literal) {
        text = json_object_get(pattern, "Regex");
    }
    if (!json_is_string(text)) {
        return bt_token_fail(e, BT_ERR_INVALID,
                             "normalizer Replace: \"pattern\" needs a \"String\" or a \"Regex\"");
    }
    bt_status_t st = set_text(s, j, "content", e);
    return st != BT_OK ? st
                       : bt_regex_create(json_string_value(text), json_string_length(text), literal,
                                         &s->re, e);
}

static bt_status_t parse_into(struct bt_normalizer *n, const json_t *j, int depth,
                              const struct bt_token_err *e)
{
    const char *type = json_string_value(json_object_get(j, "type"));
    if (type == NULL || depth > 4) {
        return bt_token_fail(e, BT_ERR_INVALID, "normalizer: an object with a \"type\" is needed");
    }
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(j, "normalizers");
        if (!json_is_array(list)) {
            return bt_token_fail(e, BT_ERR_INVALID, "normalizer Sequence: no \"normalizers\"");
        }
        for (size_t i = 0; i < json_array_size(list); i++) {
            bt_status_t st = parse_into(n, json_array_get(list, i), depth + 1, e);
            if (st != BT_OK) {
                return st;
            }
        }
        return BT_OK;
    }
    static const char *const forms[] = {
        [BT_NFC] = "NFC", [BT_NFD] = "NFD", [BT_NFKC] = "NFKC", [BT_NFKD] = "NFKD"};
    for (size_t i = 0; i < BT_ARRAY_LEN(forms); i++) {
        if (strcmp(type, forms[i]) == 0) {
            add_step(n, NORMAL_FORM)->form = (enum bt_normal_form)i;
            return BT_OK;
        }
    }
    if (strcmp(type, "Prepend") == 0) {
        return set_text(add_step(n, NORMAL_PREPEND), j, "prepend", e);
    }
    if (strcmp(type, "Replace") == 0) {
        return parse_replace(n, j, e);
    }
    if (strcmp(type, "Strip") == 0) {
        struct normal_step *s = add_step(n, NORMAL_STRIP);
        s->left = json_is_true(json_object_get(j, "strip_left"));
        s->right = json_is_true(json_object_get(j, "strip_right"));
        return BT_OK;
    }
    return bt_token_fail(
        e, BT_ERR_UNSUPPORTED,
        "normalizer type \"%s\" is not supported (known: Sequence, NFC, NFD, NFKC, "
        "NFKD, Prepend, Replace, Strip)",
        type);
}

bt_status_t bt_normalizer_parse(const json_t *j, struct bt_normalizer **n_p,
                                const struct bt_token_err *e)
{
    if (j == NULL || json_is_null(j)) {
        *n_p = NULL;
        return BT_OK;
    }
    struct bt_normalizer *n = bt_calloc(1, sizeof(*n));
    bt_status_t st = parse_into(n, j, 0, e);
    if (st != BT_OK) {
        bt_normalizer_destroy(n);
        return st;
    }
    *n_p = n;
    return BT_OK;
}

static bt_status_t run_replace(const struct normal_step *s, struct bt_buf *text)
{
    struct bt_buf out;
    bt_buf_init(&out);
    size_t at = 0, start, end;
    int rc = 0;
    while (at <= text->len && text->len > 0 &&
           (rc = bt_regex_next(s->re, text->data, text->len, at, &start, &end)) > 0) {
        bt_buf_append(&out, text->data + at, start - at);
        bt_buf_append(&out, s->text.data, s->text.len);
        if (end == start) { /* an empty match: step over one character */
            uint32_t cp;
            size_t k = bt_utf8_decode(text->data + end, text->data + text->len, &cp);
            bt_buf_append(&out, text->data + end, k);
            end += k > 0 ? k : 1;
        }
        at = end;
    }
    if (rc < 0) {
        bt_buf_cleanup(&out);
        return BT_ERR_EXHAUSTED;
    }
    if (at < text->len) {
        bt_buf_append(&out, text->data + at, text->len - at);
    }
    bt_buf_cleanup(text);
    *text = out;
    return BT_OK;
}

static void run_strip(const struct normal_step *s, struct bt_buf *text)
{
    size_t from = 0, to = text->len;
    uint32_t cp;
    while (s->left && from < to) {
        size_t k = bt_utf8_decode(text->data + from, text->data + to, &cp);
        if (k == 0 || !bt_utf8_is_space(cp)) {
            break;
        }
        from += k;
    }
    while (s->right && to > from) {
        size_t at = to - 1;
        while (at > from && ((uint8_t)text->data[at] & 0xc0) == 0x80) {
            at--;
        }
        if (bt_utf8_decode(text->data + at, text->data + to, &cp) == 0 || !bt_utf8_is_space(cp)) {
            break;
        }
        to = at;
    }
    text->len = to;
    bt_buf_consume(text, from);
}

bt_status_t bt_normalizer_run(const struct bt_normalizer *n, struct bt_buf *text)
{
    for (size_t i = 0; n != NULL && i < n->n; i++) {
        const struct normal_step *s = &n->steps[i];
        switch (s->kind) {
        case NORMAL_FORM: bt_normal_form(text, s->form); break;
        case NORMAL_PREPEND:
            if (text->len > 0) {
                struct bt_buf out;
                bt_buf_init(&out);
                bt_buf_append(&out, s->text.data, s->text.len);
                bt_buf_append(&out, text->data, text->len);
                bt_buf_cleanup(text);
                *text = out;
            }
            break;
        case NORMAL_REPLACE: {
            bt_status_t st = run_replace(s, text);
            if (st != BT_OK) {
                return st;
            }
            break;
        }
        case NORMAL_STRIP: run_strip(s, text); break;
        }
    }
    return BT_OK;
}
