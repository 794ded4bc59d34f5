/* uniqueItems for scalars: the texts of one value, which later items must not have, and whether
 * enough different values exist. */
#include "common/grammar/schema_priv.h"

#include <string.h>

#define COUNT_STEPS 20000 /* of the search for different strings; beyond: there are enough */
#define COUNT_DEPTH 100

/* ---- while a document is matched ---- */

static bt_rx_t texts_of(struct bt_schema *c, const char *text, size_t n)
{
    struct bt_sj *v = bt_sj_parse(c, text, n);
    if (v->type == BT_SJ_STRING) {
        struct bt_trie_text t = {v->text, BT_RX_EMPTY};
        bt_rx_t quote = bt_rx_text(c->rx, "\"", 1);
        return bt_rx_concat(c->rx, quote, bt_rx_concat(c->rx, bt_str_trie(c, &t, 1, true), quote));
    }
    if (v->type == BT_SJ_NUMBER) {
        if (v->num.n > BT_SCHEMA_DIGITS_MAX || v->num.exp > (int32_t)BT_SCHEMA_DIGITS_MAX ||
            v->num.exp < -(int32_t)BT_SCHEMA_DIGITS_MAX)
            return bt_rx_text(c->rx, text, n);
        const struct bt_sj *one = v;
        return bt_num_rx(c, bt_num_values(c, &one, 1));
    }
    return bt_rx_text(c->rx, text, n);
}

bt_rx_t bt_schema_spellings(struct bt_rx_set *s, const void *text, size_t n)
{
    struct bt_schema c = {.rx = s};
    bt_rx_t out = BT_RX_FAILED;
    bt_schema_guard(&c, texts_of, text, n, &out);
    return out;
}

/* ---- while a schema is compiled ---- */

struct count {
    struct bt_schema *c;
    uint32_t found, want, steps;
};

/* Strings from state a on, each in one spelling; stops at want. */
static void count_strings(struct count *k, bt_rx_t a, uint32_t depth)
{
    if (++k->steps > COUNT_STEPS || depth > COUNT_DEPTH) {
        k->found = k->want;
        return;
    }
    k->found += bt_rx_accepts(k->c->rx, a);
    for (uint32_t ch = 0x20; ch < 256 && k->found < k->want; ch++) {
        if (ch == '"' || ch == '\\')
            continue;
        bt_rx_t next = bt_schema_rx(k->c, bt_rx_step(k->c->rx, a, (uint8_t)ch));
        if (next != BT_RX_NONE)
            count_strings(k, next, depth + 1);
    }
    bt_rx_t escape = bt_schema_rx(k->c, bt_rx_step(k->c->rx, a, '\\'));
    static const char after[] = "\"\\bfnrt";
    for (uint32_t i = 0; after[i] && escape != BT_RX_NONE && k->found < k->want; i++) {
        bt_rx_t next = bt_schema_rx(k->c, bt_rx_step(k->c->rx, escape, (uint8_t)after[i]));
        if (next != BT_RX_NONE)
            count_strings(k, next, depth + 1);
    }
}

/* Values of a piece, at most want. */
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
    struct count k = {.c = c, .found = n, .want = want};
    if (!bt_strset_none(f->str) && n < want)
        count_strings(&k, bt_strset_to_rx(c, f->str), 0);
    return k.found;
}

bool bt_schema_has_values(struct bt_schema *c, const struct bt_nf *f, uint32_t n)
{
    return n == 0 || count_values(c, f, n) >= n;
}
