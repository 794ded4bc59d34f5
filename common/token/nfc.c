/* Unicode normalization form C (UAX #15): canonical decomposition, canonical order, composition.
 * The tables are made by nfc_gen.py. Pure. */
#include <stdlib.h>
#include <string.h>

#include "common/token/token_priv.h"

#define HANGUL_S 0xac00u
#define HANGUL_L 0x1100u
#define HANGUL_V 0x1161u
#define HANGUL_T 0x11a7u
#define L_COUNT  19u
#define V_COUNT  21u
#define T_COUNT  28u

struct decomp {
    uint32_t cp, first, second;
    uint8_t composes;
};
static const struct decomp decomps[] = {
#define DECOMP(cp, first, second, composes) {cp, first, second, composes},
#include "common/token/nfc_data.def"
#undef DECOMP
};

struct class_range {
    uint32_t from, to;
    uint8_t ccc;
};
static const struct class_range classes[] = {
#define CLASS(from, to, ccc) {from, to, ccc},
#include "common/token/nfc_data.def"
#undef CLASS
};

struct chars {
    struct {
        uint32_t cp;
        uint8_t ccc;
    } * v;
    size_t n, cap;
};

static uint8_t class_of(uint32_t cp)
{
    size_t lo = 0, hi = BT_ARRAY_LEN(classes);
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (cp > classes[mid].to) {
            lo = mid + 1;
        } else if (cp < classes[mid].from) {
            hi = mid;
        } else {
            return classes[mid].ccc;
        }
    }
    return 0;
}

static const struct decomp *decomp_of(uint32_t cp)
{
    size_t lo = 0, hi = BT_ARRAY_LEN(decomps);
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (decomps[mid].cp < cp) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo < BT_ARRAY_LEN(decomps) && decomps[lo].cp == cp ? &decomps[lo] : NULL;
}

static int by_pair(const void *a, const void *b)
{
    const struct decomp *x = *(const struct decomp *const *)a;
    const struct decomp *y = *(const struct decomp *const *)b;
    if (x->first != y->first) {
        return x->first < y->first ? -1 : 1;
    }
    return (x->second > y->second) - (x->second < y->second);
}

/* The compositions, sorted by pair; the caller frees. */
static const struct decomp **pair_index(size_t *n_p)
{
    const struct decomp **index = bt_malloc(sizeof(*index) * BT_ARRAY_LEN(decomps));
    size_t n = 0;
    for (size_t i = 0; i < BT_ARRAY_LEN(decomps); i++) {
        if (decomps[i].composes) {
            index[n++] = &decomps[i];
        }
    }
    qsort(index, n, sizeof(*index), by_pair);
    *n_p = n;
    return index;
}

static uint32_t compose(const struct decomp **index, size_t n, uint32_t a, uint32_t b)
{
    if (a >= HANGUL_L && a < HANGUL_L + L_COUNT && b >= HANGUL_V && b < HANGUL_V + V_COUNT) {
        return HANGUL_S + ((a - HANGUL_L) * V_COUNT + (b - HANGUL_V)) * T_COUNT;
    }
    if (a >= HANGUL_S && a < HANGUL_S + L_COUNT * V_COUNT * T_COUNT &&
        (a - HANGUL_S) % T_COUNT == 0 && b > HANGUL_T && b < HANGUL_T + T_COUNT) {
        return a + (b - HANGUL_T);
    }
    struct decomp key = {0, a, b, 0};
    const struct decomp *k = &key, **hit = bsearch(&k, index, n, sizeof(*index), by_pair);
    return hit == NULL ? 0 : (*hit)->cp;
}

static void push(struct chars *c, uint32_t cp)
{
    if (c->n == c->cap) {
        c->cap = c->cap == 0 ? 256 : c->cap * 2;
        c->v = bt_realloc(c->v, c->cap * sizeof(*c->v));
    }
    c->v[c->n].cp = cp;
    c->v[c->n++].ccc = class_of(cp);
}

static void decompose(struct chars *c, uint32_t cp)
{
    if (cp >= HANGUL_S && cp < HANGUL_S + L_COUNT * V_COUNT * T_COUNT) {
        uint32_t s = cp - HANGUL_S;
        push(c, HANGUL_L + s / (V_COUNT * T_COUNT));
        push(c, HANGUL_V + s % (V_COUNT * T_COUNT) / T_COUNT);
        if (s % T_COUNT != 0) {
            push(c, HANGUL_T + s % T_COUNT);
        }
        return;
    }
    const struct decomp *d = decomp_of(cp);
    if (d == NULL) {
        push(c, cp);
        return;
    }
    decompose(c, d->first); /* at most four levels in Unicode's data */
    if (d->second != 0) {
        push(c, d->second);
    }
}

/* Sorts each run of marks by class, stably, in linear time per class: a run may be long. */
static void order_marks(struct chars *c)
{
    struct chars tmp = {0};
    for (size_t i = 0; i < c->n;) {
        size_t end = i;
        bool sorted = true;
        while (end < c->n && c->v[end].ccc != 0) {
            sorted = sorted && (end == i || c->v[end - 1].ccc <= c->v[end].ccc);
            end++;
        }
        if (!sorted) {
            tmp.n = 0;
            for (unsigned ccc = 1; ccc < 255; ccc++) {
                for (size_t k = i; k < end; k++) {
                    if (c->v[k].ccc == ccc) {
                        push(&tmp, c->v[k].cp);
                    }
                }
            }
            BT_ASSERT(tmp.n == end - i);
            memcpy(&c->v[i], tmp.v, tmp.n * sizeof(*tmp.v));
        }
        i = end + 1;
    }
    free(tmp.v);
}

void bt_nfc(struct bt_buf *text)
{
    uint32_t cp;
    bool plain = true; /* nothing below U+0300 changes */
    const char *end = text->data + text->len;
    for (size_t i = 0; i < text->len && plain; i++) {
        plain = (uint8_t)text->data[i] < 0xcc;
    }
    if (plain) {
        return;
    }
    struct chars c = {0};
    for (const char *p = text->data; p < end;) {
        size_t k = bt_utf8_decode(p, end, &cp);
        BT_ASSERT(k > 0);
        decompose(&c, cp);
        p += k;
    }
    order_marks(&c);
    size_t n_index, starter = SIZE_MAX, kept = 0;
    const struct decomp **index = pair_index(&n_index);
    unsigned last_ccc = 0; /* class of what was kept last after the starter */
    for (size_t i = 0; i < c.n; i++) {
        unsigned ccc = c.v[i].ccc;
        bool adjacent = starter != SIZE_MAX && kept == starter + 1;
        if (starter != SIZE_MAX && (adjacent || last_ccc < ccc)) {
            cp = compose(index, n_index, c.v[starter].cp, c.v[i].cp);
            if (cp != 0) {
                c.v[starter].cp = cp;
                continue;
            }
        }
        if (ccc == 0) {
            starter = kept;
        }
        last_ccc = ccc;
        c.v[kept++] = c.v[i];
    }
    free(index);
    bt_buf_clear(text);
    for (size_t i = 0; i < kept; i++) {
        char utf8[4];
        bt_buf_append(text, utf8, bt_utf8_encode(c.v[i].cp, utf8));
    }
    free(c.v);
}
