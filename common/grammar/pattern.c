/* The front ends for a regular expression and for a list of choices. Each makes one expression,
 * which the whole answer must match. Pure. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/grammar/front_end.h"

bt_status_t bt_grammar_build_regex(struct bt_program *p, const char *text, size_t len,
                                   bt_node_t *start, char *err, size_t err_cap)
{
    bt_rx_t x;
    bt_status_t st = bt_rx_parse(bt_program_rx(p), text, len, false, BT_RX_UTF8, &x, err, err_cap);
    if (st == BT_OK) {
        *start = bt_program_regex(p, x);
    }
    return st;
}

struct choice {
    const char *text;
    size_t len;
};

static int by_text(const void *a, const void *b)
{
    const struct choice *x = a, *y = b;
    int c = memcmp(x->text, y->text, BT_MIN(x->len, y->len));
    return c != 0 ? c : x->len < y->len ? -1 : x->len > y->len;
}

/* The expression of the sorted texts v[0..n), without the `from` bytes that they share. It has
 * one branch for each next byte, so that the reader of an answer looks at few of them. The depth
 * is at most sqrt(2 * bytes), because each text above another one is a text of its own. */
static bt_rx_t tree(struct bt_rx_set *s, const struct choice *v, size_t n, size_t from)
{
    size_t common = v[0].len;
    for (size_t i = from; i < common; i++) {
        if (v[n - 1].len == i || v[n - 1].text[i] != v[0].text[i]) {
            common = i;
        }
    }
    bt_rx_t tail = BT_RX_EMPTY;
    bool ends = v[0].len == common;
    size_t i = 0;
    while (i < n && v[i].len == common) {
        i++;
    }
    if (i < n) {
        bt_rx_t parts[257];
        size_t k = 0;
        if (ends) {
            parts[k++] = BT_RX_EMPTY;
        }
        for (size_t j = i; i < n; i = j) {
            while (j < n && v[j].text[common] == v[i].text[common]) {
                j++;
            }
            parts[k++] = tree(s, v + i, j - i, common);
        }
        tail = bt_rx_or_list(s, parts, k);
    }
    return bt_rx_concat(s, bt_rx_text(s, v[0].text + from, common - from), tail);
}

bt_status_t bt_grammar_build_choice(struct bt_program *p, const char *text, size_t len,
                                    bt_node_t *start, char *err, size_t err_cap)
{
    json_error_t e;
    json_t *list = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &e), *item;
    size_t n = json_array_size(list), i;
    struct choice *v = bt_calloc(n + 1, sizeof(*v));
    bt_status_t st = BT_OK;
    if (list == NULL) {
        snprintf(err, err_cap, "the choices are not valid JSON: line %d: %s", e.line, e.text);
        st = BT_ERR_INVALID;
    } else if (n == 0) {
        snprintf(err, err_cap, "the choices must be an array of at least one string");
        st = BT_ERR_INVALID;
    }
    json_array_foreach(list, i, item)
    {
        if (!json_is_string(item) && st == BT_OK) {
            snprintf(err, err_cap, "choice %zu is not a string", i);
            st = BT_ERR_INVALID;
        }
        v[i] = (struct choice){json_string_value(item), json_string_length(item)};
    }
    if (st == BT_OK) {
        qsort(v, n, sizeof(*v), by_text);
        *start = bt_program_regex(p, tree(bt_program_rx(p), v, n, 0));
    }
    free(v);
    json_decref(list);
    return st;
}
