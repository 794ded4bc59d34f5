/* Unicode's normalization forms C, D, KC and KD (UAX #15): decomposition, canonical order of marks,
 * composition. normal_form_gen.py writes the tables while Baton is built. Pure. */
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
};
static const struct decomp decomps[] = {
#define DECOMP(cp, first, second) {cp, first, second},
#include "normal_form.def"
#undef DECOMP
};

struct compat {
    uint32_t cp;
    const char *text; /* whole form KD, UTF-8 */
};
static const struct compat compats[] = {
#define COMPAT(cp, text) {cp, text},
#include "normal_form.def"
#undef COMPAT
};

struct pair {
    uint32_t first, second, cp;
};
static const struct pair pairs[] = {
#define PAIR(first, second, cp) {first, second, cp},
#include "normal_form.def"
#undef PAIR
};

struct class_range {
    uint32_t from, to;
    uint8_t ccc;
};
static const struct class_range classes[] = {
#define CLASS(from, to, ccc) {from, to, ccc},
#include "normal_form.def"
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

/* Every row of a table begins with the code point (or pair) by which the table is sorted. */
static int by_cp(const void *key, const void *row)
{
    uint32_t a = *(const uint32_t *)key, b = *(const uint32_t *)row;
    return (a > b) - (a < b);
}

static int by_pair(const void *key, const void *row)
{
    const uint32_t *a = key, *b = row;
    return a[0] != b[0] ? (a[0] > b[0]) - (a[0] < b[0]) : (a[1] > b[1]) - (a[1] < b[1]);
}

/* The character that a and b compose to, 0 if none. */
static uint32_t compose(uint32_t a, uint32_t b)
{
    if (a >= HANGUL_L && a < HANGUL_L + L_COUNT && b >= HANGUL_V && b < HANGUL_V + V_COUNT) {
        return HANGUL_S + ((a - HANGUL_L) * V_COUNT + (b - HANGUL_V)) * T_COUNT;
    }
    if (a >= HANGUL_S && a < HANGUL_S + L_COUNT * V_COUNT * T_COUNT &&
        (a - HANGUL_S) % T_COUNT == 0 && b > HANGUL_T && b < HANGUL_T + T_COUNT) {
        return a + (b - HANGUL_T);
    }
    uint32_t key[2] = {a, b};
    const struct pair *hit = bsearch(key, pairs, BT_ARRAY_LEN(pairs), sizeof(pairs[0]), by_pair);
    return hit == NULL ? 0 : hit->cp;
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

static void decompose(struct chars *c, uint32_t cp, bool compat)
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
    const struct compat *k = NULL;
    if (compat) {
        k = bsearch(&cp, compats, BT_ARRAY_LEN(compats), sizeof(compats[0]), by_cp);
    }
    if (k != NULL) {
        const char *end = k->text + strlen(k->text);
        for (const char *p = k->text; p < end;) {
            uint32_t part;
            p += bt_utf8_decode(p, end, &part);
            push(c, part);
        }
        return;
    }
    const struct decomp *d =
        bsearch(&cp, decomps, BT_ARRAY_LEN(decomps), sizeof(decomps[0]), by_cp);
    if (d == NULL) {
        push(c, cp);
        return;
    }
    decompose(c, d->first, false); /* at most four levels in Unicode's data */
    if (d->second != 0) {
        push(c, d->second);
    }
}

/* Sorts each run of marks by class, stably. It takes linear time per class, as a run may be
 * long. */
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

/* Composes, in place, each starter with the characters behind it that are not blocked. */
static void compose_all(struct chars *c)
{
    size_t starter = SIZE_MAX, kept = 0;
    unsigned last_ccc = 0; /* class of the last character kept after the starter */
    for (size_t i = 0; i < c->n; i++) {
        unsigned ccc = c->v[i].ccc;
        bool adjacent = starter != SIZE_MAX && kept == starter + 1;
        if (starter != SIZE_MAX && (adjacent || last_ccc < ccc)) {
            uint32_t cp = compose(c->v[starter].cp, c->v[i].cp);
            if (cp != 0) {
                c->v[starter].cp = cp;
                continue;
            }
        }
        if (ccc == 0) {
            starter = kept;
        }
        last_ccc = ccc;
        c->v[kept++] = c->v[i];
    }
    c->n = kept;
}

void bt_normal_form(struct bt_buf *text, enum bt_normal_form form)
{
    bool compat = form == BT_NFKC || form == BT_NFKD, composed = form == BT_NFC || form == BT_NFKC;
    /* Characters below U+0300, U+00C0 or U+00A0 never change. This is the first byte of such a
     * character in UTF-8. */
    uint8_t first = compat ? 0xc2 : composed ? 0xcc : 0xc3;
    bool plain = true;
    for (size_t i = 0; i < text->len && plain; i++) {
        plain = (uint8_t)text->data[i] < first;
    }
    if (plain) {
        return;
    }
    struct chars c = {0};
    const char *end = text->data + text->len;
    for (const char *p = text->data; p < end;) {
        uint32_t cp;
        size_t k = bt_utf8_decode(p, end, &cp);
        BT_ASSERT(k > 0);
        decompose(&c, cp, compat);
        p += k;
    }
    order_marks(&c);
    if (composed) {
        compose_all(&c);
    }
    bt_buf_clear(text);
    for (size_t i = 0; i < c.n; i++) {
        char utf8[4];
        bt_buf_append(text, utf8, bt_utf8_encode(c.v[i].cp, utf8));
    }
    free(c.v);
}
