/* Sets of strings. Constants stay lists, so discriminators ("kind": {"const": "a"}) can be compared
 * without an automaton. */
#include "common/grammar/schema_priv.h"

#include <stdlib.h>
#include <string.h>

static bool is_list(struct bt_strset a)
{
    return a.rx == BT_RX_NONE;
}

static int by_text(const void *a, const void *b)
{
    return bt_sj_text_cmp(*(const struct bt_sj_text *)a, *(const struct bt_sj_text *)b);
}

static void sort(struct bt_strset *a)
{
    struct bt_sj_text *t = a->texts;
    uint32_t n = 0;
    if (a->n)
        qsort(t, a->n, sizeof(*t), by_text);
    for (uint32_t i = 0; i < a->n; i++)
        if (!n || by_text(&t[n - 1], &t[i]) != 0)
            t[n++] = t[i];
    a->n = n;
}

static bool has(struct bt_strset a, struct bt_sj_text text)
{
    return a.n && bsearch(&text, a.texts, a.n, sizeof(*a.texts), by_text);
}

struct bt_strset bt_strset_rx(bt_rx_t rx)
{
    return (struct bt_strset){.rx = rx};
}

struct bt_strset bt_strset_values(struct bt_schema *c, const struct bt_sj *const *v, uint32_t n)
{
    struct bt_strset s = {.texts = bt_schema_alloc(c, n * sizeof(*s.texts)), .n = n};
    for (uint32_t i = 0; i < n; i++)
        s.texts[i] = v[i]->text;
    sort(&s);
    return s;
}

static bt_rx_t trie(struct bt_schema *c, struct bt_strset a)
{
    struct bt_trie_text *t = bt_schema_alloc(c, (a.n + 1) * sizeof(*t));
    for (uint32_t i = 0; i < a.n; i++)
        t[i] = (struct bt_trie_text){a.texts[i], BT_RX_EMPTY};
    return bt_str_trie(c, t, a.n, true);
}

bt_rx_t bt_strset_to_rx(struct bt_schema *c, struct bt_strset a)
{
    if (is_list(a))
        return trie(c, a);
    if (!a.n)
        return a.rx;
    return bt_schema_rx(c, bt_rx_and(c->rx, a.rx, bt_rx_not(c->rx, trie(c, a))));
}

bool bt_strset_none(struct bt_strset a)
{
    return is_list(a) && !a.n;
}

bool bt_strset_apart(struct bt_strset a, struct bt_strset b)
{
    const struct bt_strset few = a.n <= b.n ? a : b, many = a.n <= b.n ? b : a;
    if (!is_list(a) || !is_list(b))
        return bt_strset_none(a) || bt_strset_none(b);
    for (uint32_t i = 0; i < few.n; i++)
        if (has(many, few.texts[i]))
            return false;
    return true;
}

bool bt_strset_match(struct bt_schema *c, struct bt_strset a, struct bt_sj_text text)
{
    if (is_list(a) || has(a, text))
        return is_list(a) && has(a, text);
    return a.rx == c->str_all || bt_str_match(c, a.rx, text);
}

/* The texts of list a that are in b (keep), or that are not in b (not keep). */
static struct bt_strset filter(struct bt_schema *c, struct bt_strset a, struct bt_strset b,
                               bool keep)
{
    uint32_t i = 0;
    bt_schema_work(c, a.n / 16);
    while (i < a.n && bt_strset_match(c, b, a.texts[i]) == keep)
        i++;
    if (i == a.n)
        return a;
    struct bt_strset s = {.texts = bt_schema_alloc(c, a.n * sizeof(*s.texts)), .n = i};
    if (i)
        memcpy(s.texts, a.texts, i * sizeof(*s.texts));
    for (i++; i < a.n; i++)
        if (bt_strset_match(c, b, a.texts[i]) == keep)
            s.texts[s.n++] = a.texts[i];
    return s;
}

/* Returns NONE if a is proved to be empty. */
static struct bt_strset settle(struct bt_schema *c, struct bt_strset a)
{
    if (is_list(a) || a.rx == c->str_all)
        return a;
    if (bt_str_none(c, a.n ? bt_strset_to_rx(c, a) : a.rx))
        return (struct bt_strset){0};
    return a;
}

struct bt_strset bt_strset_meet(struct bt_schema *c, struct bt_strset a, struct bt_strset b)
{
    if (is_list(a) && (!is_list(b) || a.n <= b.n))
        return filter(c, a, b, true);
    if (is_list(b))
        return filter(c, b, a, true);
    if ((b.rx == c->str_all && !b.n) || (a.rx == b.rx && !b.n))
        return a;
    if (a.rx == c->str_all && !a.n)
        return b;
    struct bt_strset s = {.texts = bt_schema_alloc(c, (a.n + b.n) * sizeof(*s.texts))};
    s.n = a.n + b.n;
    if (a.n)
        memcpy(s.texts, a.texts, a.n * sizeof(*s.texts));
    if (b.n)
        memcpy(s.texts + a.n, b.texts, b.n * sizeof(*s.texts));
    sort(&s);
    s.rx = a.rx == c->str_all   ? b.rx
           : b.rx == c->str_all ? a.rx
                                : bt_schema_rx(c, bt_rx_and(c->rx, a.rx, b.rx));
    return settle(c, s);
}

struct bt_strset bt_strset_join(struct bt_schema *c, const struct bt_strset *a, uint32_t n)
{
    struct bt_strset list = {0}, rest = {0};
    uint32_t texts = 0;
    for (uint32_t i = 0; i < n; i++)
        texts += is_list(a[i]) ? a[i].n : 0;
    list.texts = bt_schema_alloc(c, texts * sizeof(*list.texts));
    for (uint32_t i = 0; i < n; i++) {
        if (is_list(a[i])) {
            if (a[i].n)
                memcpy(list.texts + list.n, a[i].texts, a[i].n * sizeof(*list.texts));
            list.n += a[i].n;
        } else if (is_list(rest)) {
            rest = a[i];
        } else if (a[i].rx == c->str_all || rest.rx == c->str_all) {
            /* The union excludes only texts that neither of the two contains. */
            struct bt_strset all = a[i].rx == c->str_all ? a[i] : rest;
            struct bt_strset other = a[i].rx == c->str_all ? rest : a[i];
            all.rx = BT_RX_NONE;
            rest = filter(c, all, other, false);
            rest.rx = c->str_all;
        } else {
            bt_rx_t both = bt_rx_or(c->rx, bt_strset_to_rx(c, rest), bt_strset_to_rx(c, a[i]));
            rest = bt_strset_rx(bt_schema_rx(c, both));
        }
    }
    sort(&list);
    if (is_list(rest) || !list.n)
        return is_list(rest) ? list : rest;
    struct bt_strset excluded = {.texts = rest.texts, .n = rest.n};
    struct bt_strset s = filter(c, excluded, list, false);
    s.rx =
        rest.rx == c->str_all ? rest.rx : bt_schema_rx(c, bt_rx_or(c->rx, rest.rx, trie(c, list)));
    return s;
}

struct bt_strset bt_strset_not(struct bt_schema *c, struct bt_strset a)
{
    struct bt_strset s = a;
    if (is_list(a)) {
        s.rx = c->str_all;
        return s;
    }
    s.rx = BT_RX_NONE; /* now s has only the texts that a excludes */
    if (a.rx == c->str_all)
        return s;
    struct bt_strset no =
        bt_strset_rx(bt_schema_rx(c, bt_rx_and(c->rx, c->str_all, bt_rx_not(c->rx, a.rx))));
    return bt_strset_join(c, (struct bt_strset[]){settle(c, no), s}, 2);
}

struct bt_strset bt_strset_minus(struct bt_schema *c, struct bt_strset a, struct bt_strset b)
{
    if (is_list(a) || a.rx != b.rx)
        return bt_strset_meet(c, a, bt_strset_not(c, b));
    b.rx = BT_RX_NONE; /* needs no search: only texts that b excludes can be left */
    return filter(c, b, a, true);
}
