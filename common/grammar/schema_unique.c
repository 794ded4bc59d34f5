/* Decides whether enough different values exist: scalars for uniqueItems, names for
 * minProperties. */
#include "common/grammar/schema_priv.h"

#include <string.h>

#define COUNT_STEPS 20000 /* steps of a search for different strings; more mean: enough */
#define COUNT_DEPTH 100
#define FINITE_MAX  64 /* a class of at most so many names becomes properties */

struct count {
    struct bt_schema *c;
    uint32_t found, want, steps;
    struct bt_sj_text *names; /* [want]; NULL: the caller needs no names */
    char text[COUNT_DEPTH + 1];
};

static void found(struct count *k, uint32_t len)
{
    if (k->names) {
        char *copy = bt_schema_alloc(k->c, len + 1);
        memcpy(copy, k->text, len);
        k->names[k->found] = (struct bt_sj_text){copy, len};
    }
    k->found++;
}

/* Counts the strings from state a on, each in one spelling, until there are `want`. Skips strings
 * with a control character that has no short escape. */
static void count_strings(struct count *k, bt_rx_t a, uint32_t depth)
{
    static const char after[] = "\"\\bfnrt", means[] = "\"\\\b\f\n\r\t";
    if (++k->steps > COUNT_STEPS || depth > COUNT_DEPTH - 1) {
        k->found = k->want;
        return;
    }
    if (bt_rx_accepts(k->c->rx, a))
        found(k, depth);
    for (uint32_t ch = 0x20; ch < 256 && k->found < k->want; ch++) {
        if (ch == '"' || ch == '\\')
            continue;
        bt_rx_t next = bt_schema_rx(k->c, bt_rx_step(k->c->rx, a, (uint8_t)ch));
        k->text[depth] = (char)ch;
        if (next != BT_RX_NONE)
            count_strings(k, next, depth + 1);
    }
    bt_rx_t escape = bt_schema_rx(k->c, bt_rx_step(k->c->rx, a, '\\'));
    for (uint32_t i = 0; after[i] && escape != BT_RX_NONE && k->found < k->want; i++) {
        bt_rx_t next = bt_schema_rx(k->c, bt_rx_step(k->c->rx, escape, (uint8_t)after[i]));
        k->text[depth] = means[i];
        if (next != BT_RX_NONE)
            count_strings(k, next, depth + 1);
    }
}

/* Adds the names of a class as properties if they are few. false: they are not. */
static bool name_class(struct bt_schema *c, struct bt_obj *o, const struct bt_class *k)
{
    struct bt_sj_text names[FINITE_MAX + 1];
    struct count n = {.c = c, .want = FINITE_MAX + 1, .names = names};
    if (k->key == c->str_all)
        return false;
    count_strings(&n, k->key, 0);
    if (n.found > FINITE_MAX)
        return false;
    struct bt_trie_text t[FINITE_MAX];
    for (uint32_t i = 0; i < n.found; i++)
        t[i] = (struct bt_trie_text){names[i], BT_RX_EMPTY};
    bt_rx_t others = bt_rx_not(c->rx, bt_str_trie(c, t, n.found, true));
    if (!bt_str_none(c, bt_schema_rx(c, bt_rx_and(c->rx, k->key, others))))
        return false;
    for (uint32_t i = 0; i < n.found; i++)
        bt_obj_prop(c, o, names[i], BT_SET_TRUE, false);
    return true;
}

const struct bt_obj *bt_schema_name_classes(struct bt_schema *c, const struct bt_obj *o)
{
    struct bt_obj *n = bt_obj_copy(c, o);
    n->classes = bt_schema_alloc(c, (o->n_classes + 1) * sizeof(*n->classes));
    memcpy(n->classes, o->classes, o->n_classes * sizeof(*n->classes));
    for (uint32_t i = 0; i < n->n_classes; i++)
        if (n->classes[i].value != BT_SET_NONE && name_class(c, n, &o->classes[i]))
            n->classes[i].value = BT_SET_NONE;
    return bt_obj_fails(n) ? NULL : n;
}

/* The number of values of a piece, but at most `want`. */
static uint32_t count_piece(const struct bt_piece *p, uint32_t want)
{
    __int128 a, b;
    if (!p->lo || !p->hi)
        return want;
    if (bt_dec_cmp(p->lo, p->hi) == 0)
        return 1;
    if (!p->of.m || !bt_piece_multiples(p, &a, &b))
        return want;
    return b - a + 1 < (__int128)want ? (uint32_t)(b - a + 1) : want;
}

static uint32_t count_values(struct bt_schema *c, const struct bt_nf *f, uint32_t want)
{
    uint32_t n = (uint32_t)__builtin_popcount(f->bits);
    for (uint32_t i = 0; i < f->num.n && n < want; i++)
        n += count_piece(&f->num.p[i], want);
    struct count k = {.c = c, .found = n, .want = want, .names = NULL};
    if (!bt_strset_none(f->str) && n < want)
        count_strings(&k, bt_strset_to_rx(c, f->str), 0);
    return k.found;
}

bool bt_schema_has_values(struct bt_schema *c, const struct bt_nf *f, uint32_t n)
{
    return n == 0 || count_values(c, f, n) >= n;
}
