/* Exact decimals, and sets of numbers. A set consists of intervals, each with constraints of
 * multipleOf. */
#include "common/grammar/schema_priv.h"

#include <stdlib.h>
#include <string.h>

#define MULT_MAX 1000000000000ull

static int cmp_magnitude(const struct bt_dec *a, const struct bt_dec *b)
{
    if (!a->n || !b->n)
        return a->n ? 1 : b->n ? -1 : 0;
    if (a->exp != b->exp)
        return a->exp < b->exp ? -1 : 1;
    return bt_sj_text_cmp((struct bt_sj_text){a->d, a->n}, (struct bt_sj_text){b->d, b->n});
}

int bt_dec_cmp(const struct bt_dec *a, const struct bt_dec *b)
{
    if (a->neg != b->neg)
        return a->neg ? -1 : 1;
    int d = cmp_magnitude(a, b);
    return a->neg ? -d : d;
}

bool bt_mult_of(const struct bt_dec *d, struct bt_mult *m_p)
{
    if (d->n > 12 || !d->n || d->neg || abs(d->exp) > 100)
        return false;
    struct bt_mult m = {.e = d->exp - (int32_t)d->n};
    for (uint32_t i = 0; i < d->n; i++)
        m.m = m.m * 10 + (uint64_t)(d->d[i] - '0');
    *m_p = m;
    return true;
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t t = a % b;
        a = b;
        b = t;
    }
    return a;
}

/* Writes both as whole numbers of 10^min(a.e, b.e). false: they are too large. */
static bool align(struct bt_mult a, struct bt_mult b, uint64_t *x, uint64_t *y)
{
    for (; a.e > b.e; a.e--)
        if ((a.m *= 10) > MULT_MAX * 10)
            return false;
    for (; b.e > a.e; b.e--)
        if ((b.m *= 10) > MULT_MAX * 10)
            return false;
    *x = a.m;
    *y = b.m;
    return true;
}

static bool lcm(struct bt_mult a, struct bt_mult b, struct bt_mult *out)
{
    uint64_t x, y;
    if (!align(a, b, &x, &y))
        return false;
    unsigned __int128 l = (unsigned __int128)x / gcd(x, y) * y;
    int32_t e = a.e < b.e ? a.e : b.e;
    while (l % 10 == 0) {
        l /= 10;
        e++;
    }
    if (l > MULT_MAX)
        return false;
    *out = (struct bt_mult){(uint64_t)l, e};
    return true;
}

/* Returns whether every multiple of a is a multiple of b. */
static bool divides(struct bt_mult b, struct bt_mult a)
{
    uint64_t x, y;
    return a.m && align(a, b, &x, &y) && x % y == 0;
}

static bool is_multiple(const struct bt_dec *v, struct bt_mult m)
{
    if (!v->n)
        return true;
    int64_t shift = (int64_t)v->exp - (int64_t)v->n - m.e;
    if (shift < 0)
        return false; /* v has more decimal places than a multiple of m can have */
    uint64_t r = 0, ten = 10 % m.m, power = 1 % m.m;
    for (uint32_t i = 0; i < v->n; i++)
        r = (r * 10 + (uint64_t)(v->d[i] - '0')) % m.m;
    for (; shift; shift >>= 1) {
        if (shift & 1)
            power = (uint64_t)((unsigned __int128)power * ten % m.m);
        ten = (uint64_t)((unsigned __int128)ten * ten % m.m);
    }
    return (unsigned __int128)r * power % m.m == 0;
}

/* v / m, rounded up or down. false: the numbers are too large. */
static bool quotient(const struct bt_dec *v, struct bt_mult m, bool up, __int128 *out, bool *exact)
{
    int64_t shift = (int64_t)v->exp - (int64_t)v->n - m.e;
    if (v->n > 18 || shift > 15 || shift < -15)
        return false;
    __int128 x = 0, y = (__int128)m.m;
    for (uint32_t i = 0; i < v->n; i++)
        x = x * 10 + (v->d[i] - '0');
    for (; shift > 0; shift--)
        x *= 10;
    for (; shift < 0; shift++)
        y *= 10;
    if (v->neg)
        x = -x;
    __int128 q = x / y;
    *exact = x % y == 0;
    if (!*exact && up && x > 0)
        q++;
    if (!*exact && !up && x < 0)
        q--;
    *out = q;
    return true;
}

bool bt_piece_multiples(const struct bt_piece *p, __int128 *first, __int128 *last)
{
    __int128 a, b;
    bool exact_a, exact_b;
    if (!quotient(p->lo, p->of, true, &a, &exact_a) || !quotient(p->hi, p->of, false, &b, &exact_b))
        return false;
    *first = a + (exact_a && p->lo_open);
    *last = b - (exact_b && p->hi_open);
    return true;
}

static bool piece_none(const struct bt_piece *p)
{
    for (uint32_t i = 0; i < p->n_nots; i++)
        if (divides(p->nots[i], p->of))
            return true;
    if (!p->lo || !p->hi)
        return false;
    int d = bt_dec_cmp(p->lo, p->hi);
    if (d > 0 || (d == 0 && (p->lo_open || p->hi_open)))
        return true;
    if (d == 0) {
        if (p->of.m && !is_multiple(p->lo, p->of))
            return true;
        for (uint32_t i = 0; i < p->n_nots; i++)
            if (is_multiple(p->lo, p->nots[i]))
                return true;
        return false;
    }
    __int128 a, b;
    return p->of.m && bt_piece_multiples(p, &a, &b) && a > b;
}

static bool is_value(const struct bt_piece *p)
{
    return p->lo && p->hi && !p->lo_open && !p->hi_open && bt_dec_cmp(p->lo, p->hi) == 0;
}

struct bt_numset bt_num_one(struct bt_schema *c, const struct bt_piece *p)
{
    struct bt_numset s = {0};
    if (!piece_none(p)) {
        s.p = bt_schema_alloc(c, sizeof(*s.p));
        s.p[0] = *p;
        s.n = 1;
    }
    return s;
}

struct bt_numset bt_num_all(struct bt_schema *c)
{
    return bt_num_one(c, &(struct bt_piece){0});
}

static int by_value(const void *a, const void *b)
{
    return bt_dec_cmp(((const struct bt_piece *)a)->lo, ((const struct bt_piece *)b)->lo);
}

struct bt_numset bt_num_values(struct bt_schema *c, const struct bt_sj *const *v, uint32_t n)
{
    struct bt_numset s = {.p = bt_schema_alloc(c, n * sizeof(*s.p))};
    for (uint32_t i = 0; i < n; i++)
        s.p[i] = (struct bt_piece){.lo = &v[i]->num, .hi = &v[i]->num};
    qsort(s.p, n, sizeof(*s.p), by_value);
    for (uint32_t i = 0; i < n; i++)
        if (!s.n || by_value(&s.p[s.n - 1], &s.p[i]) != 0)
            s.p[s.n++] = s.p[i];
    return s;
}

static bool same_mult(struct bt_mult a, struct bt_mult b)
{
    return a.m == b.m && a.e == b.e;
}

static void meet_piece(struct bt_schema *c, struct bt_piece *a, const struct bt_piece *b)
{
    int d;
    if (b->lo && (!a->lo || (d = bt_dec_cmp(b->lo, a->lo)) > 0 || (d == 0 && b->lo_open))) {
        a->lo = b->lo;
        a->lo_open = b->lo_open;
    }
    if (b->hi && (!a->hi || (d = bt_dec_cmp(b->hi, a->hi)) < 0 || (d == 0 && b->hi_open))) {
        a->hi = b->hi;
        a->hi_open = b->hi_open;
    }
    if (!a->of.m)
        a->of = b->of;
    else if (b->of.m && !lcm(a->of, b->of, &a->of))
        bt_schema_fail(
            c, BT_ERR_UNSUPPORTED, NULL,
            "the least common multiple of two multipleOf is above 10^12; use one of them");
    for (uint32_t i = 0; i < b->n_nots; i++) {
        bool known = false;
        for (uint32_t j = 0; j < a->n_nots; j++)
            known |= same_mult(a->nots[j], b->nots[i]);
        if (known)
            continue;
        if (a->n_nots == 8)
            bt_schema_fail(c, BT_ERR_UNSUPPORTED, NULL,
                           "more than eight excluded multipleOf meet; use fewer");
        struct bt_mult *more = bt_schema_alloc(c, (a->n_nots + 1u) * sizeof(*more));
        for (uint32_t j = 0; j < a->n_nots; j++)
            more[j] = a->nots[j];
        more[a->n_nots++] = b->nots[i];
        a->nots = more;
    }
}

struct bt_numset bt_num_meet(struct bt_schema *c, struct bt_numset a, struct bt_numset b)
{
    struct bt_numset s = {0};
    uint32_t cap = 0;
    bool plain = b.n == 1 && !b.p[0].lo && !b.p[0].hi && !b.p[0].of.m && !b.p[0].n_nots;
    if (plain || !a.n)
        return a;
    for (uint32_t i = 0; i < a.n; i++) {
        bt_schema_work(c, b.n / 4);
        for (uint32_t j = 0; j < b.n; j++) {
            struct bt_piece p = a.p[i];
            meet_piece(c, &p, &b.p[j]);
            if (piece_none(&p))
                continue;
            s.p = bt_schema_grow(c, s.p, s.n, &cap, sizeof(*s.p));
            s.p[s.n++] = p;
        }
    }
    return s;
}

struct bt_numset bt_num_join(struct bt_schema *c, const struct bt_numset *a, uint32_t n)
{
    uint32_t total = 0, filled = 0;
    struct bt_numset s = {0};
    for (uint32_t i = 0; i < n; i++) {
        total += a[i].n;
        filled += a[i].n > 0;
        s = a[i].n ? a[i] : s;
    }
    if (filled <= 1)
        return s;
    bt_schema_work(c, total / 16);
    s = (struct bt_numset){.p = bt_schema_alloc(c, total * sizeof(*s.p))};
    for (uint32_t i = 0; i < n; i++) {
        if (a[i].n)
            memcpy(s.p + s.n, a[i].p, a[i].n * sizeof(*s.p));
        s.n += a[i].n;
    }
    return s;
}

static struct bt_numset piece_not(struct bt_schema *c, const struct bt_piece *p)
{
    struct bt_numset s = {.p = bt_schema_alloc(c, (3 + p->n_nots) * sizeof(*s.p))};
    if (p->lo)
        s.p[s.n++] = (struct bt_piece){.hi = p->lo, .hi_open = !p->lo_open};
    if (p->hi)
        s.p[s.n++] = (struct bt_piece){.lo = p->hi, .lo_open = !p->hi_open};
    if (p->of.m && !is_value(p))
        s.p[s.n++] = (struct bt_piece){.n_nots = 1, .nots = &p->of};
    for (uint32_t i = 0; i < p->n_nots; i++)
        s.p[s.n++] = (struct bt_piece){.of = p->nots[i]};
    return s;
}

struct bt_numset bt_num_not(struct bt_schema *c, struct bt_numset a)
{
    struct bt_numset s = bt_num_all(c);
    bool values = a.n > 0;
    for (uint32_t i = 0; i < a.n; i++)
        values &= is_value(&a.p[i]);
    if (!values) {
        for (uint32_t i = 0; i < a.n; i++)
            s = bt_num_meet(c, s, piece_not(c, &a.p[i]));
        return s;
    }
    struct bt_piece *v = bt_schema_alloc(c, a.n * sizeof(*v));
    memcpy(v, a.p, a.n * sizeof(*v));
    qsort(v, a.n, sizeof(*v), by_value);
    s = (struct bt_numset){.p = bt_schema_alloc(c, (a.n + 1) * sizeof(*s.p))};
    for (uint32_t i = 0; i <= a.n; i++) { /* the gaps between the values */
        struct bt_piece p = {.lo_open = true, .hi_open = true};
        p.lo = i ? v[i - 1].lo : NULL;
        p.hi = i < a.n ? v[i].lo : NULL;
        if (!piece_none(&p))
            s.p[s.n++] = p;
    }
    return s;
}
