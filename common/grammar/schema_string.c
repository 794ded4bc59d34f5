/* Strings as languages over the bytes between their quotes, with every escape that JSON has. */
#include "common/grammar/schema_priv.h"

#include <stdlib.h>
#include <string.h>

#define NONE_STATES 400 /* states to visit before bt_str_none gives up and says "may match" */

static const struct bt_rx_range any_char = {0, 0x10FFFF};

static bt_rx_t chars(struct bt_schema *c, const struct bt_rx_range *r, uint32_t n, bool json)
{
    return bt_rx_chars(c->rx, json ? BT_RX_JSON_STRING : BT_RX_UTF8, r, n);
}

bt_rx_t bt_str_any(struct bt_schema *c)
{
    return bt_str_length(c, 0, BT_RX_NO_MAX);
}

bt_rx_t bt_str_length(struct bt_schema *c, uint32_t min, uint32_t max)
{
    if (c->kept.any_char == BT_RX_NONE)
        c->kept.any_char = bt_schema_rx(c, chars(c, &any_char, 1, true));
    bt_rx_t one = c->kept.any_char;
    return bt_schema_rx(c, bt_rx_repeat(c->rx, one, min, max));
}

static int by_text(const void *a, const void *b)
{
    return bt_sj_text_cmp(((const struct bt_trie_text *)a)->text,
                          ((const struct bt_trie_text *)b)->text);
}

static uint32_t code_at(const struct bt_trie_text *t, uint32_t at, uint32_t *len)
{
    uint32_t code = 0;
    *len = bt_sj_utf8(t->text.s + at, t->text.n - at, &code);
    return code;
}

/* The text of t from byte `at` to its end, followed by r. */
static bt_rx_t prepend(struct bt_schema *c, const struct bt_trie_text *t, uint32_t at, uint32_t end,
                       bool json, bt_rx_t r)
{
    while (end > at) {
        uint32_t len;
        do
            end--;
        while ((t->text.s[end] & 0xC0) == 0x80);
        uint32_t code = code_at(t, end, &len);
        struct bt_rx_range one = {code, code};
        r = bt_rx_concat(c->rx, chars(c, &one, 1, json), r);
    }
    return r;
}

struct branch {
    uint32_t code;
    bt_rx_t rest;
};

static int by_rest(const void *a, const void *b)
{
    const struct branch *x = a, *y = b;
    if (x->rest != y->rest)
        return x->rest < y->rest ? -1 : 1;
    return x->code < y->code ? -1 : x->code > y->code;
}

/* The expression of the sorted texts t[0..n) without their first `at` bytes, which they share. */
static bt_rx_t trie(struct bt_schema *c, const struct bt_trie_text *t, uint32_t n, uint32_t at,
                    bool json)
{
    uint32_t from = at, len, len2;
    if (n == 1)
        return bt_schema_rx(c, prepend(c, t, at, t->text.n, json, t->tail));
    while (at < t[0].text.n) { /* what the first and the last text share, all texts share */
        uint32_t code = code_at(&t[0], at, &len);
        if (at >= t[n - 1].text.n || code_at(&t[n - 1], at, &len2) != code)
            break;
        at += len;
    }
    uint32_t first = 0, n_parts = 0, n_branches = 0, before = UINT32_MAX;
    while (first < n && t[first].text.n == at)
        first++;
    for (uint32_t i = first; i < n; i++) {
        uint32_t code = code_at(&t[i], at, &len);
        n_branches += code != before;
        before = code;
    }
    bt_rx_t *parts = bt_schema_alloc(c, (first + n_branches) * sizeof(*parts));
    struct branch *b = bt_schema_alloc(c, n_branches * sizeof(*b));
    for (; n_parts < first; n_parts++)
        parts[n_parts] = t[n_parts].tail;
    n_branches = 0;
    for (uint32_t i = first; i < n;) {
        uint32_t start = i, code = code_at(&t[i], at, &len);
        while (i < n && code_at(&t[i], at, &len2) == code)
            i++;
        b[n_branches++] = (struct branch){code, trie(c, t + start, i - start, at + len, json)};
    }
    /* Characters with the same remaining expression become one class. */
    if (n_branches)
        qsort(b, n_branches, sizeof(*b), by_rest);
    struct bt_rx_range *r = bt_schema_alloc(c, (n_branches + 1) * sizeof(*r));
    for (uint32_t j = 0; j < n_branches;) {
        bt_rx_t rest = b[j].rest;
        uint32_t k = 0;
        for (; j < n_branches && b[j].rest == rest; j++) {
            if (k && r[k - 1].last + 1 == b[j].code)
                r[k - 1].last++;
            else
                r[k++] = (struct bt_rx_range){b[j].code, b[j].code};
        }
        parts[n_parts++] = bt_rx_concat(c->rx, chars(c, r, k, json), rest);
    }
    bt_rx_t all = n_parts == 1 ? parts[0] : bt_rx_or_list(c->rx, parts, n_parts);
    return bt_schema_rx(c, prepend(c, &t[0], from, at, json, all));
}

bt_rx_t bt_str_trie(struct bt_schema *c, struct bt_trie_text *t, uint32_t n, bool json)
{
    if (!n)
        return BT_RX_NONE;
    qsort(t, n, sizeof(*t), by_text);
    return trie(c, t, n, 0, json);
}

/* Returns whether rx matches the text as JSON.stringify would write it. */
bool bt_str_match(struct bt_schema *c, bt_rx_t rx, struct bt_sj_text text)
{
    static const char hex[] = "0123456789abcdef";
    for (uint32_t i = 0; i < text.n && rx != BT_RX_NONE; i++) {
        uint8_t ch = (uint8_t)text.s[i];
        char out[6] = {(char)ch};
        uint32_t n = 1;
        if (ch == '"' || ch == '\\') {
            memcpy(out, (char[]){'\\', (char)ch}, n = 2);
        } else if (ch < 0x20) {
            memcpy(out, "\\u00", 4);
            out[4] = hex[ch >> 4];
            out[5] = hex[ch & 15];
            n = 6;
        }
        for (uint32_t j = 0; j < n; j++)
            rx = bt_schema_rx(c, bt_rx_step(c->rx, rx, (uint8_t)out[j]));
    }
    return bt_rx_accepts(c->rx, rx);
}

bool bt_str_none(struct bt_schema *c, bt_rx_t rx)
{
    bool none = false;
    bt_status_t st = bt_rx_is_none(c->rx, rx, NONE_STATES, &none);
    if (st == BT_ERR_EXHAUSTED && bt_rx_set_full(c->rx))
        bt_schema_rx(c, BT_RX_FAILED);
    return st == BT_OK && none;
}
