/* Sets of characters: sorted ranges, complement, case folding, Unicode's general categories (made
 * by categories_gen.py while Baton is built) and scripts (scripts.def). Pure. */
#include <stdlib.h>

#include "common/grammar/chars.h"

struct category {
    uint32_t first, last;
    char name[3];
};
static const struct category categories[] = {
#define CATEGORY(first, last, name) {first, last, #name},
#include "categories.def"
#undef CATEGORY
};

struct fold {
    uint32_t cp, to;
};
static const struct fold folds[] = {
#define FOLD(cp, to) {cp, to},
#include "categories.def"
#undef FOLD
};

enum script {
#define SCRIPT(name, brief) SCRIPT_##name,
#include "common/grammar/scripts.def"
#undef SCRIPT
    SCRIPTS
};
static const char *const scripts[SCRIPTS][2] = {
#define SCRIPT(name, brief) {#name, #brief},
#include "common/grammar/scripts.def"
#undef SCRIPT
};
static const struct {
    enum script script;
    uint32_t first, last;
} script_ranges[] = {
#define RANGE(name, first, last) {SCRIPT_##name, first, last},
#include "common/grammar/scripts.def"
#undef RANGE
};

static const char *const long_names[][2] = {
    {"Letter", "L"},
    {"Cased_Letter", "LC"},
    {"Uppercase_Letter", "Lu"},
    {"Lowercase_Letter", "Ll"},
    {"Titlecase_Letter", "Lt"},
    {"Modifier_Letter", "Lm"},
    {"Other_Letter", "Lo"},
    {"Mark", "M"},
    {"Combining_Mark", "M"},
    {"Nonspacing_Mark", "Mn"},
    {"Spacing_Mark", "Mc"},
    {"Enclosing_Mark", "Me"},
    {"Number", "N"},
    {"Decimal_Number", "Nd"},
    {"digit", "Nd"},
    {"Letter_Number", "Nl"},
    {"Other_Number", "No"},
    {"Punctuation", "P"},
    {"punct", "P"},
    {"Connector_Punctuation", "Pc"},
    {"Dash_Punctuation", "Pd"},
    {"Open_Punctuation", "Ps"},
    {"Close_Punctuation", "Pe"},
    {"Initial_Punctuation", "Pi"},
    {"Final_Punctuation", "Pf"},
    {"Other_Punctuation", "Po"},
    {"Symbol", "S"},
    {"Math_Symbol", "Sm"},
    {"Currency_Symbol", "Sc"},
    {"Modifier_Symbol", "Sk"},
    {"Other_Symbol", "So"},
    {"Separator", "Z"},
    {"Space_Separator", "Zs"},
    {"Line_Separator", "Zl"},
    {"Paragraph_Separator", "Zp"},
    {"Other", "C"},
    {"Control", "Cc"},
    {"cntrl", "Cc"},
    {"Format", "Cf"},
    {"Surrogate", "Cs"},
    {"Private_Use", "Co"},
    {"Unassigned", "Cn"},
};

void bt_chars_cleanup(struct bt_chars *c)
{
    free(c->v);
    *c = (struct bt_chars){0};
}

void bt_chars_add(struct bt_chars *c, uint32_t first, uint32_t last)
{
    if (c->n == c->cap) {
        c->cap = c->cap > 0 ? 2 * c->cap : 8;
        c->v = bt_realloc(c->v, c->cap * sizeof(*c->v));
    }
    c->v[c->n++] = (struct bt_rx_range){first, last};
}

static int by_first(const void *a, const void *b)
{
    uint32_t x = ((const struct bt_rx_range *)a)->first, y = ((const struct bt_rx_range *)b)->first;
    return x < y ? -1 : x > y;
}

void bt_chars_sort(struct bt_chars *c)
{
    if (c->n < 2) {
        return;
    }
    qsort(c->v, c->n, sizeof(*c->v), by_first);
    size_t n = 0;
    for (size_t i = 1; i < c->n; i++) {
        if (c->v[i].first <= c->v[n].last + 1) {
            c->v[n].last = BT_MAX(c->v[n].last, c->v[i].last);
        } else {
            c->v[++n] = c->v[i];
        }
    }
    c->n = n + 1;
}

void bt_chars_negate(struct bt_chars *c)
{
    bt_chars_sort(c);
    struct bt_chars out = {0};
    uint32_t next = 0;
    for (size_t i = 0; i < c->n; i++) {
        if (c->v[i].first > next) {
            bt_chars_add(&out, next, c->v[i].first - 1);
        }
        next = c->v[i].last + 1;
    }
    if (next <= BT_CHAR_MAX) {
        bt_chars_add(&out, next, BT_CHAR_MAX);
    }
    bt_chars_cleanup(c);
    *c = out;
}

static bool has(const struct bt_rx_range *v, size_t n, uint32_t cp)
{
    size_t lo = 0, hi = n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (cp > v[mid].last) {
            lo = mid + 1;
        } else if (cp < v[mid].first) {
            hi = mid;
        } else {
            return true;
        }
    }
    return false;
}

void bt_chars_fold(struct bt_chars *c)
{
    bt_chars_sort(c);
    size_t n = c->n; /* characters that this call adds come behind the first n */
    for (size_t i = 0; i < BT_ARRAY_LEN(folds); i++) {
        if (has(c->v, n, folds[i].cp)) {
            bt_chars_add(c, folds[i].to, folds[i].to);
        }
    }
    bt_chars_sort(c);
    n = c->n;
    for (size_t i = 0; i < BT_ARRAY_LEN(folds); i++) {
        if (has(c->v, n, folds[i].to)) {
            bt_chars_add(c, folds[i].cp, folds[i].cp);
        }
    }
    bt_chars_sort(c);
}

bool bt_chars_meet(const struct bt_rx_range *a, size_t n_a, const struct bt_rx_range *b, size_t n_b)
{
    for (size_t i = 0, j = 0; i < n_a && j < n_b;) {
        if (a[i].last < b[j].first) {
            i++;
        } else if (b[j].last < a[i].first) {
            j++;
        } else {
            return true;
        }
    }
    return false;
}

static bool is(const char *name, size_t n, const char *what)
{
    return strlen(what) == n && memcmp(name, what, n) == 0;
}

static bool add_category(struct bt_chars *c, const char *name, size_t n)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(long_names); i++) {
        if (is(name, n, long_names[i][0])) {
            return add_category(c, long_names[i][1], strlen(long_names[i][1]));
        }
    }
    if (is(name, n, "LC")) {
        return add_category(c, "Lu", 2) && add_category(c, "Ll", 2) && add_category(c, "Lt", 2);
    }
    bool found = false;
    for (size_t i = 0; i < BT_ARRAY_LEN(categories) && n >= 1 && n <= 2; i++) {
        const struct category *g = &categories[i];
        if (memcmp(name, g->name, n) == 0) {
            bt_chars_add(c, g->first, g->last);
            found = true;
        }
    }
    return found;
}

static bool add_script(struct bt_chars *c, const char *name, size_t n)
{
    enum script s = 0;
    while (s < SCRIPTS && !is(name, n, scripts[s][0]) && !is(name, n, scripts[s][1])) {
        s++;
    }
    for (size_t i = 0; s < SCRIPTS && i < BT_ARRAY_LEN(script_ranges); i++) {
        if (script_ranges[i].script == s) {
            bt_chars_add(c, script_ranges[i].first, script_ranges[i].last);
        }
    }
    return s < SCRIPTS;
}

static bool add_binary(struct bt_chars *c, const char *name, size_t n)
{
    if (is(name, n, "Any")) {
        bt_chars_add(c, 0, BT_CHAR_MAX);
    } else if (is(name, n, "ASCII")) {
        bt_chars_add(c, 0, 0x7f);
    } else if (is(name, n, "Assigned")) {
        struct bt_chars cn = {0};
        (void)add_category(&cn, "Cn", 2);
        bt_chars_negate(&cn);
        for (size_t i = 0; i < cn.n; i++) {
            bt_chars_add(c, cn.v[i].first, cn.v[i].last);
        }
        bt_chars_cleanup(&cn);
    } else if (is(name, n, "White_Space") || is(name, n, "space")) {
        bt_chars_add(c, 9, 13);
        bt_chars_add(c, 0x85, 0x85);
        bt_chars_add(c, 0x2028, 0x2029);
        (void)add_category(c, "Zs", 2);
    } else if (is(name, n, "ASCII_Hex_Digit") || is(name, n, "AHex")) {
        bt_chars_add(c, '0', '9');
        bt_chars_add(c, 'A', 'F');
        bt_chars_add(c, 'a', 'f');
    } else {
        return false;
    }
    return true;
}

bool bt_chars_property(struct bt_chars *c, const char *name, size_t n)
{
    const char *eq = memchr(name, '=', n);
    /* ECMA-262 allows names of scripts only after "Script=". Other dialects also allow the name
     * alone. */
    if (eq == NULL) {
        return add_category(c, name, n) || add_binary(c, name, n) || add_script(c, name, n);
    }
    size_t key = (size_t)(eq - name), rest = n - key - 1;
    if (is(name, key, "General_Category") || is(name, key, "gc")) {
        return add_category(c, eq + 1, rest);
    }
    return (is(name, key, "Script") || is(name, key, "sc")) && add_script(c, eq + 1, rest);
}

void bt_chars_digit(struct bt_chars *c)
{
    bt_chars_add(c, '0', '9');
}

void bt_chars_word(struct bt_chars *c)
{
    bt_chars_add(c, '0', '9');
    bt_chars_add(c, 'A', 'Z');
    bt_chars_add(c, '_', '_');
    bt_chars_add(c, 'a', 'z');
}

void bt_chars_space(struct bt_chars *c)
{
    bt_chars_add(c, 9, 13);
    bt_chars_add(c, 0x2028, 0x2029);
    bt_chars_add(c, 0xfeff, 0xfeff);
    (void)add_category(c, "Zs", 2);
}

size_t bt_chars_decode(const char *p, size_t n, uint32_t *cp_p)
{
    const uint8_t *s = (const uint8_t *)p;
    if (n == 0) {
        return 0;
    }
    if (s[0] < 0x80) {
        *cp_p = s[0];
        return 1;
    }
    size_t len = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    uint32_t cp = s[0] & (0x7f >> len);
    if (s[0] < 0xc2 || s[0] > 0xf4 || n < len) {
        return 0;
    }
    for (size_t i = 1; i < len; i++) {
        if ((s[i] & 0xc0) != 0x80) {
            return 0;
        }
        cp = cp << 6 | (s[i] & 0x3f);
    }
    bool short_enough = len == 2 || (len == 3 && cp >= 0x800) || (len == 4 && cp >= 0x10000);
    if (!short_enough || cp > BT_CHAR_MAX || (cp >= 0xd800 && cp <= 0xdfff)) {
        return 0;
    }
    *cp_p = cp;
    return len;
}
