/* Expressions for the texts of a set of numbers. A number without constraints may have every
 * spelling of JSON. A number with constraints has two spellings: digits without an exponent, and
 * normalised with an exponent (one digit that is not zero before the point). Other spellings are
 * left out: to decide whether 0.00012e7 is within bounds, an automaton would have to count zeros
 * against the exponent, and no regular expression can do this. */
#include "common/grammar/schema_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIECES_MAX 200 /* intervals of one set of numbers */
#define SIG_MAX    18  /* fraction digits that the exponent of an integer must cover */

struct num { /* expressions that all functions for one set use */
    struct bt_schema *c;
    struct bt_rx_set *s;
    bt_rx_t digit, digits; /* [0-9], [0-9]* */
    bt_rx_t any_frac;      /* (\.[0-9]+)? */
    bt_rx_t zero_frac;     /* (\.0+)? */
    bt_rx_t zeros, point;
    bt_rx_t zero_exp; /* zero with an exponent, without a sign */
    int32_t last_exp; /* cache of value_texts: an exponent, and what follows the digits */
    bt_rx_t last_tail[2];
};

static bt_rx_t range(struct bt_rx_set *s, int first, int last)
{
    uint64_t bits[4] = {0};
    if (first > last)
        return BT_RX_NONE;
    for (int ch = first; ch <= last; ch++)
        bits[ch / 64] |= 1ull << (ch % 64);
    return bt_rx_class(s, bits);
}

static bt_rx_t ch(struct bt_rx_set *s, int c)
{
    return range(s, c, c);
}

static bt_rx_t opt(struct bt_rx_set *s, bt_rx_t a)
{
    return bt_rx_or(s, a, BT_RX_EMPTY);
}

static bt_rx_t cat3(struct bt_rx_set *s, bt_rx_t a, bt_rx_t b, bt_rx_t c)
{
    return bt_rx_concat(s, a, bt_rx_concat(s, b, c));
}

static bt_rx_t or3(struct bt_rx_set *s, bt_rx_t a, bt_rx_t b, bt_rx_t c)
{
    return bt_rx_or(s, a, bt_rx_or(s, b, c));
}

static bt_rx_t many(struct bt_rx_set *s, bt_rx_t a, uint32_t min)
{
    return bt_rx_repeat(s, a, min, BT_RX_NO_MAX);
}

static bt_rx_t exponent_mark(struct bt_rx_set *s)
{
    return bt_rx_or(s, ch(s, 'e'), ch(s, 'E'));
}

bt_rx_t bt_num_rx_plain(struct bt_rx_set *s)
{
    bt_rx_t digit = range(s, '0', '9');
    bt_rx_t whole = bt_rx_or(s, ch(s, '0'), bt_rx_concat(s, range(s, '1', '9'), many(s, digit, 0)));
    bt_rx_t frac = opt(s, bt_rx_concat(s, ch(s, '.'), many(s, digit, 1)));
    return cat3(s, opt(s, ch(s, '-')), whole, frac);
}

static bt_rx_t any_exponent(struct bt_rx_set *s)
{
    bt_rx_t sign = opt(s, bt_rx_or(s, ch(s, '+'), ch(s, '-')));
    return cat3(s, exponent_mark(s), sign, many(s, range(s, '0', '9'), 1));
}

bt_rx_t bt_num_rx_all(struct bt_rx_set *s)
{
    return bt_rx_concat(s, bt_num_rx_plain(s), opt(s, any_exponent(s)));
}

static struct num makers(struct bt_schema *c)
{
    struct bt_rx_set *s = c->rx;
    struct num x = {.c = c, .s = s};
    x.digit = range(s, '0', '9');
    x.digits = many(s, x.digit, 0);
    x.point = ch(s, '.');
    x.any_frac = opt(s, bt_rx_concat(s, x.point, many(s, x.digit, 1)));
    x.zeros = many(s, ch(s, '0'), 0);
    x.zero_frac = opt(s, bt_rx_concat(s, x.point, many(s, ch(s, '0'), 1)));
    x.zero_exp = cat3(s, ch(s, '0'), x.zero_frac, any_exponent(s));
    return x;
}

/* A point and digits such that 0.DIGITS is at most (above: at least) 0.f[0..n). open: equal is not
 * allowed. The point and the digits may be missing where zero is allowed. */
static bt_rx_t fraction(struct num *x, const char *f, uint32_t n, bool above, bool open)
{
    struct bt_rx_set *s = x->s;
    bt_rx_t nonzero = cat3(s, x->zeros, range(s, '1', '9'), x->digits), r;
    uint32_t least = n ? 0 : 1; /* least number of digits after the last one of f */
    if (above)
        r = open ? nonzero : many(s, x->digit, least);
    else
        r = open ? BT_RX_NONE : many(s, ch(s, '0'), least);
    for (uint32_t i = n; i-- > 0;) {
        bt_rx_t other = above ? range(s, f[i] + 1, '9') : range(s, '0', f[i] - 1);
        r = bt_rx_or(s, bt_rx_concat(s, other, x->digits), bt_rx_concat(s, ch(s, f[i]), r));
        if (!above && i)
            r = opt(s, r); /* the text may end here: a shorter fraction is smaller */
    }
    r = bt_rx_concat(s, x->point, r);
    bool bare = above ? n == 0 && !open : n > 0 || !open;
    return bare ? opt(s, r) : r;
}

/* Whole numbers below (above: over) b[0..n), each followed by `any`, and b itself, followed by
 * `tail`. zero: the numbers start at 0, otherwise at 1. */
static bt_rx_t whole(struct num *x, const char *b, uint32_t n, bool above, bool zero, bt_rx_t any,
                     bt_rx_t tail)
{
    struct bt_rx_set *s = x->s;
    bt_rx_t r = tail, first = range(s, '1', '9');
    for (uint32_t i = n; i-- > 0;) {
        int least = i || (zero && n == 1) ? '0' : '1';
        bt_rx_t other =
            above ? range(s, b[i] + 1 > least ? b[i] + 1 : least, '9') : range(s, least, b[i] - 1);
        bt_rx_t more = bt_rx_repeat(s, x->digit, n - 1 - i, n - 1 - i);
        r = bt_rx_or(s, cat3(s, other, more, any),
                     b[i] >= least ? bt_rx_concat(s, ch(s, b[i]), r) : BT_RX_NONE);
    }
    if (above)
        return bt_rx_or(s, r, cat3(s, first, many(s, x->digit, n), any));
    if (n == 1)
        return r;
    bt_rx_t shorter = bt_rx_concat(s, first, bt_rx_repeat(s, x->digit, 0, n - 2));
    if (zero)
        shorter = bt_rx_or(s, shorter, ch(s, '0'));
    return bt_rx_or(s, r, bt_rx_concat(s, shorter, any));
}

/* Whole numbers from 1 to n (above: from n up), without leading zeros. n >= 1. */
static bt_rx_t counting(struct num *x, int64_t n, bool above)
{
    char b[24];
    int len = snprintf(b, sizeof(b), "%lld", (long long)n);
    return whole(x, b, (uint32_t)len, above, false, BT_RX_EMPTY, BT_RX_EMPTY);
}

/* An exponent of at most (above: at least) v, with its letter e. */
static bt_rx_t exponent(struct num *x, int64_t v, bool above)
{
    struct bt_rx_set *s = x->s;
    bt_rx_t plus = opt(s, ch(s, '+')), minus = ch(s, '-'), zero = many(s, ch(s, '0'), 1);
    int64_t m = v < 0 ? -v : v;
    bt_rx_t near = m ? bt_rx_concat(s, x->zeros, counting(x, m, false)) : BT_RX_NONE;
    bt_rx_t far = bt_rx_concat(s, x->zeros, counting(x, m ? m : 1, true));
    bt_rx_t any = many(s, x->digit, 1), r;
    if (above)
        r = v > 0 ? bt_rx_concat(s, plus, far)
                  : bt_rx_or(s, bt_rx_concat(s, plus, any),
                             bt_rx_concat(s, minus, bt_rx_or(s, zero, near)));
    else
        r = v < 0 ? bt_rx_concat(s, minus, far)
                  : or3(s, bt_rx_concat(s, minus, any), bt_rx_concat(s, plus, zero),
                        bt_rx_concat(s, plus, near));
    return bt_rx_concat(s, exponent_mark(s), r);
}

static bt_rx_t exponent_is(struct num *x, int64_t v)
{
    struct bt_rx_set *s = x->s;
    char b[24];
    int len = snprintf(b, sizeof(b), "%lld", (long long)(v < 0 ? -v : v));
    bt_rx_t sign = v > 0   ? opt(s, ch(s, '+'))
                   : v < 0 ? ch(s, '-')
                           : opt(s, bt_rx_or(s, ch(s, '+'), ch(s, '-')));
    bt_rx_t value = bt_rx_concat(s, x->zeros, bt_rx_text(s, b, (size_t)len));
    return cat3(s, exponent_mark(s), sign, value);
}

/* Unsigned texts whose value is at most (above: at least) |b|. */
static bt_rx_t bound(struct num *x, const struct bt_dec *b, bool above, bool open)
{
    struct bt_rx_set *s = x->s;
    uint32_t cap = b->n + (uint32_t)abs(b->exp) + 2, n = 0, at = 0;
    char *text = bt_schema_alloc(x->c, 2 * cap), *frac = text + cap;
    uint32_t n_frac = 0;
    if (b->exp <= 0)
        text[n++] = '0';
    for (int32_t i = 0; i < b->exp; i++)
        text[n++] = at < b->n ? b->d[at++] : '0';
    for (int32_t i = b->exp; i < 0; i++)
        frac[n_frac++] = '0';
    while (at < b->n)
        frac[n_frac++] = b->d[at++];
    bt_rx_t tail = fraction(x, frac, n_frac, above, open);
    bt_rx_t r = whole(x, text, n, above, true, x->any_frac, tail);
    bt_rx_t mant = bt_rx_concat(s, range(s, '1', '9'), x->any_frac);
    if (!b->n)
        return bt_rx_or(s, r, above ? bt_rx_concat(s, mant, any_exponent(s)) : BT_RX_NONE);
    int64_t e = (int64_t)b->exp - 1;
    bt_rx_t other = above ? range(s, b->d[0] + 1, '9') : range(s, '1', b->d[0] - 1);
    bt_rx_t same = bt_rx_concat(s, ch(s, b->d[0]), fraction(x, b->d + 1, b->n - 1, above, open));
    bt_rx_t near = bt_rx_or(s, bt_rx_concat(s, other, x->any_frac), same);
    return or3(s, r, bt_rx_concat(s, mant, exponent(x, above ? e + 1 : e - 1, above)),
               bt_rx_concat(s, near, exponent_is(x, e)));
}

/* Unsigned texts with a value from a to b; NULL: no bound. a >= 0. */
static bt_rx_t magnitude(struct num *x, const struct bt_dec *a, bool a_open, const struct bt_dec *b,
                         bool b_open)
{
    struct bt_rx_set *s = x->s;
    static const struct bt_dec zero = {0};
    bool from_zero = !a || (!a->n && !a_open);
    bt_rx_t lo = BT_RX_NONE, hi = BT_RX_NONE;
    if (b) {
        hi = bound(x, b, false, b_open);
        if (b->n || !b_open)
            hi = bt_rx_or(s, hi, x->zero_exp);
    }
    if (from_zero && b)
        return hi;
    lo = bound(x, a ? a : &zero, true, a_open);
    if (from_zero)
        lo = bt_rx_or(s, lo, x->zero_exp);
    return b ? bt_rx_and(s, lo, hi) : lo;
}

static bt_rx_t bounds(struct num *x, const struct bt_piece *p)
{
    struct bt_rx_set *s = x->s;
    bt_rx_t pos = BT_RX_NONE, neg = BT_RX_NONE;
    const struct bt_dec *lo = p->lo, *hi = p->hi;
    if (!hi || (!hi->neg && (hi->n || !p->hi_open))) {
        bool low = lo && !lo->neg;
        pos = magnitude(x, low ? lo : NULL, low && p->lo_open, hi, p->hi_open);
    }
    if (!lo || lo->neg || (!lo->n && !p->lo_open)) {
        bool high = hi && (hi->neg || !hi->n);
        neg = magnitude(x, high ? hi : NULL, high && p->hi_open, lo, p->lo_open);
    }
    return bt_rx_or(s, pos, bt_rx_concat(s, ch(s, '-'), neg));
}

/* The multiples of 10^e. */
static bt_rx_t power(struct num *x, int32_t e)
{
    struct bt_rx_set *s = x->s;
    bt_rx_t nonzero = bt_rx_concat(s, range(s, '1', '9'), x->digits), zero = ch(s, '0'), r;
    if (e > 0) {
        uint32_t n = (uint32_t)e;
        r = bt_rx_or(s, zero, bt_rx_concat(s, nonzero, bt_rx_repeat(s, zero, n, n)));
        r = bt_rx_concat(s, r, x->zero_frac);
    } else {
        bt_rx_t frac = many(s, zero, 1);
        if (e < 0)
            frac = bt_rx_or(s, frac,
                            bt_rx_concat(s, bt_rx_repeat(s, x->digit, 1, (uint32_t)-e), x->zeros));
        r = bt_rx_concat(s, bt_rx_or(s, zero, nonzero), opt(s, bt_rx_concat(s, x->point, frac)));
    }
    /* A normalised text with j fraction digits needs an exponent of at least e + j. */
    bt_rx_t more = BT_RX_NONE;
    for (int32_t j = SIG_MAX; j > 0; j--) {
        bt_rx_t end = bt_rx_concat(s, x->zeros, exponent(x, (int64_t)e + j, true));
        more = bt_rx_or(s, end, bt_rx_concat(s, x->digit, more));
    }
    bt_rx_t least = exponent(x, e, true);
    more = bt_rx_or(s, bt_rx_concat(s, x->digit, more), bt_rx_concat(s, many(s, zero, 1), least));
    bt_rx_t frac = bt_rx_or(s, bt_rx_concat(s, x->point, more), least);
    return or3(s, r, x->zero_exp, bt_rx_concat(s, range(s, '1', '9'), frac));
}

static bt_rx_t multiple(struct num *x, struct bt_mult of)
{
    struct bt_rx_set *s = x->s;
    bt_rx_t r = BT_RX_NONE, zero = ch(s, '0');
    bt_rx_t nonzero = bt_rx_concat(s, range(s, '1', '9'), x->digits);
    if (of.m == 1) {
        r = power(x, of.e);
    } else if (of.e >= 0) {
        /* This avoids an intersection, which would have to search for the next multiple. */
        for (uint32_t d = 1; d < 10; d++) {
            bt_rx_t rest = bt_rx_multiple(s, (uint32_t)of.m, (uint32_t)(d % of.m), false);
            r = bt_rx_or(s, r, bt_rx_concat(s, ch(s, '0' + (int)d), rest));
        }
        r = bt_rx_concat(s, r, bt_rx_repeat(s, zero, (uint32_t)of.e, (uint32_t)of.e));
        r = bt_rx_concat(s, bt_rx_or(s, zero, r), x->zero_frac);
    } else {
        uint64_t m = of.m;
        uint32_t k = (uint32_t)-of.e;
        /* A text with j < k fraction digits stands for one with k - j more zeros. */
        for (uint32_t j = k + 1; j-- > 0;) {
            bt_rx_t text = bt_rx_or(s, zero, nonzero);
            if (j)
                text = cat3(s, text, x->point, bt_rx_repeat(s, x->digit, j, j));
            text = bt_rx_and(s, text, bt_rx_multiple(s, (uint32_t)m, 0, true));
            if (j == 0)
                text = bt_rx_concat(s, text, x->zero_frac);
            r = bt_rx_or(s, r, j == k ? bt_rx_concat(s, text, x->zeros) : text);
            if (m % 2 == 0)
                m /= 2;
            if (m % 5 == 0)
                m /= 5;
        }
    }
    return bt_rx_concat(s, opt(s, ch(s, '-')), r);
}

/* With bounds or a fraction this is an intersection, whose automaton has m states in which it
 * searches for the next multiple. */
static bt_rx_t piece(struct num *x, const struct bt_piece *p)
{
    struct bt_rx_set *s = x->s;
    if (p->of.m > BT_SCHEMA_MULTIPLE_MAX && (p->of.e < 0 || p->lo || p->hi))
        bt_schema_fail(x->c, BT_ERR_UNSUPPORTED, x->c->large_multiple,
                       "with bounds or a fraction multipleOf has a value of at most %d, apart from "
                       "zeros; remove the bounds or use an enum",
                       BT_SCHEMA_MULTIPLE_MAX);
    bt_rx_t r = BT_RX_FAILED;
    if (p->lo || p->hi)
        r = bounds(x, p);
    if (p->of.m) {
        bt_rx_t m = multiple(x, p->of);
        r = p->lo || p->hi ? bt_rx_and(s, r, m) : m;
    } else if (!p->lo && !p->hi) {
        r = x->c->num_all;
    }
    for (uint32_t i = 0; i < p->n_nots; i++) {
        bt_rx_t no = bt_rx_not(s, multiple(x, p->nots[i]));
        r = bt_rx_and(s, r, bt_rx_and(s, x->c->num_plain, no));
    }
    return bt_schema_rx(x->c, r);
}

/* The two texts of a value that is not zero: digits alone, and normalised. */
static void value_texts(struct num *x, const struct bt_dec *v, struct bt_trie_text *out)
{
    uint32_t cap = v->n + (uint32_t)abs(v->exp) + 4, n = 0, at = 0;
    char *t = bt_schema_alloc(x->c, cap + v->n + 3), *norm = t + cap;
    if (v->neg)
        t[n++] = '-';
    if (v->exp <= 0)
        t[n++] = '0';
    for (int32_t i = 0; i < v->exp; i++)
        t[n++] = at < v->n ? v->d[at++] : '0';
    bool frac = at < v->n;
    if (frac)
        t[n++] = '.';
    for (int32_t i = v->exp; i < 0; i++)
        t[n++] = '0';
    while (at < v->n)
        t[n++] = v->d[at++];
    out[0] = (struct bt_trie_text){{t, n}, frac ? x->zeros : x->zero_frac};
    t = norm;
    n = 0;
    if (v->neg)
        t[n++] = '-';
    t[n++] = v->d[0];
    if (v->n > 1)
        t[n++] = '.';
    memcpy(t + n, v->d + 1, v->n - 1);
    n += v->n - 1;
    out[1].text = (struct bt_sj_text){t, n};
    /* values are sorted, so neighbours often share an exponent */
    if (v->exp != x->last_exp || !x->last_tail[0]) {
        bt_rx_t exp = exponent_is(x, (int64_t)v->exp - 1);
        x->last_exp = v->exp;
        x->last_tail[0] = bt_rx_concat(x->s, x->zero_frac, exp);
        x->last_tail[1] = bt_rx_concat(x->s, x->zeros, exp);
    }
    out[1].tail = x->last_tail[v->n > 1];
}

bt_rx_t bt_num_rx(struct bt_schema *c, struct bt_numset a)
{
    if (!a.n)
        return BT_RX_NONE;
    struct num x = makers(c);
    struct bt_trie_text *texts = bt_schema_alloc(c, 2 * a.n * sizeof(*texts));
    uint32_t n = 0, n_pieces = 0;
    bt_rx_t *pieces = bt_schema_alloc(c, (a.n + 1) * sizeof(*pieces));
    for (uint32_t i = 0; i < a.n; i++) {
        const struct bt_piece *p = &a.p[i];
        if (p->lo && p->hi && p->lo->n && bt_dec_cmp(p->lo, p->hi) == 0) {
            value_texts(&x, p->lo, texts + n);
            n += 2;
        } else {
            pieces[n_pieces++] = piece(&x, p);
        }
        if (n_pieces > PIECES_MAX)
            bt_schema_fail(c, BT_ERR_EXHAUSTED, NULL,
                           "a number has more than %d intervals; use fewer", PIECES_MAX);
    }
    pieces[n_pieces++] = bt_str_trie(c, texts, n, false);
    return bt_schema_rx(c, bt_rx_or_list(c->rx, pieces, n_pieces));
}
