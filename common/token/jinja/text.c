/* Strings of the template interpreter as in Python: sequences of characters, with Unicode white
 * space and case; JSON and printf-style output. Pure. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wctype.h>

#include "common/token/jinja/jinja.h"
#include "common/token/token_priv.h"

void bt_j_sb_put(struct bt_j_render *r, struct bt_j_sb *sb, const char *p, size_t n)
{
    j_work(r, n + J_APPEND);
    if (n > J_OUTPUT_MAX - BT_MIN(sb->n, J_OUTPUT_MAX)) {
        bt_j_fail(r, "a text of more than %zu bytes", J_OUTPUT_MAX);
    }
    if (sb->n + n > sb->cap) {
        size_t cap = BT_MAX(sb->cap * 2, sb->n + n + 32);
        char *to = bt_j_alloc(&r->arena, cap);
        if (sb->n > 0) {
            memcpy(to, sb->p, sb->n);
        }
        sb->p = to;
        sb->cap = cap;
    }
    if (n > 0) {
        memcpy(sb->p + sb->n, p, n);
    }
    sb->n += n;
}

void bt_j_sb_str(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_str s)
{
    bt_j_sb_put(r, sb, s.p, s.n);
}

void bt_j_sb_puts(struct bt_j_render *r, struct bt_j_sb *sb, const char *s)
{
    bt_j_sb_put(r, sb, s, strlen(s));
}

struct bt_j_str bt_j_sb_done(const struct bt_j_sb *sb)
{
    return (struct bt_j_str){sb->n == 0 ? "" : sb->p, sb->n};
}

static bool continues(char c)
{
    return ((uint8_t)c & 0xc0) == 0x80;
}

size_t bt_j_str_chars(struct bt_j_str s)
{
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) {
        n += !continues(s.p[i]);
    }
    return n;
}

struct bt_j_str bt_j_str_slice(struct bt_j_str s, size_t from, size_t to)
{
    size_t at = 0, i = 0;
    while (i < s.n && at < from) {
        for (i++; i < s.n && continues(s.p[i]); i++) {
        }
        at++;
    }
    size_t start = i;
    while (i < s.n && at < to) {
        for (i++; i < s.n && continues(s.p[i]); i++) {
        }
        at++;
    }
    return (struct bt_j_str){s.p + start, i - start};
}

bool bt_j_is_space(uint32_t cp)
{
    return bt_utf8_is_space(cp) || (cp >= 0x1c && cp <= 0x1f);
}

static bool strips(struct bt_j_render *r, uint32_t cp, const char *p, size_t k,
                   const struct bt_j_str *chars)
{
    if (r != NULL) {
        j_work(r, J_APPEND);
    }
    return chars == NULL ? bt_j_is_space(cp)
                         : bt_j_find(r, *chars, (struct bt_j_str){p, k}, 0) != SIZE_MAX;
}

struct bt_j_str bt_j_strip(struct bt_j_render *r, struct bt_j_str s, const struct bt_j_str *chars,
                           bool left, bool right)
{
    uint32_t cp;
    while (left && s.n > 0) {
        size_t k = bt_utf8_decode(s.p, s.p + s.n, &cp);
        if (k == 0 || !strips(r, cp, s.p, k, chars)) {
            break;
        }
        s.p += k;
        s.n -= k;
    }
    while (right && s.n > 0) {
        size_t at = s.n - 1;
        while (at > 0 && continues(s.p[at])) {
            at--;
        }
        size_t k = bt_utf8_decode(s.p + at, s.p + s.n, &cp);
        if (k == 0 || !strips(r, cp, s.p + at, k, chars)) {
            break;
        }
        s.n = at;
    }
    return s;
}

static uint32_t upper(const struct bt_j_render *r, uint32_t cp)
{
    if (cp < 0x80 || r->locale == (locale_t)0) {
        return cp >= 'a' && cp <= 'z' ? cp - 32 : cp;
    }
    return (uint32_t)towupper_l((wint_t)cp, r->locale);
}

static uint32_t lower(const struct bt_j_render *r, uint32_t cp)
{
    if (cp < 0x80 || r->locale == (locale_t)0) {
        return cp >= 'A' && cp <= 'Z' ? cp + 32 : cp;
    }
    return (uint32_t)towlower_l((wint_t)cp, r->locale);
}

static void put_cp(struct bt_j_render *r, struct bt_j_sb *sb, uint32_t cp)
{
    char tmp[4];
    bt_j_sb_put(r, sb, tmp, bt_utf8_encode(cp, tmp));
}

static void put_upper(struct bt_j_render *r, struct bt_j_sb *sb, uint32_t cp, bool title)
{
    if (cp == 0xdf) { /* the only common letter that becomes two */
        bt_j_sb_puts(r, sb, title ? "Ss" : "SS");
    } else {
        put_cp(r, sb, upper(r, cp));
    }
}

struct bt_j_str bt_j_change_case(struct bt_j_render *r, struct bt_j_str s, enum bt_j_case how)
{
    struct bt_j_sb sb = {0};
    bool begin = true; /* at the beginning of a word or of the text */
    for (size_t i = 0; i < s.n;) {
        uint32_t cp;
        size_t k = bt_utf8_decode(s.p + i, s.p + s.n, &cp);
        if (k == 0) {
            break;
        }
        i += k;
        j_work(r, J_STEP);
        bool cased = upper(r, cp) != cp || lower(r, cp) != cp || cp == 0xdf;
        bool up = how == CASE_UPPER || (how != CASE_LOWER && how != CASE_SWAP && begin) ||
                  (how == CASE_SWAP && upper(r, cp) != cp);
        if (up) {
            put_upper(r, &sb, cp, how != CASE_UPPER && how != CASE_SWAP);
        } else {
            put_cp(r, &sb, lower(r, cp));
        }
        if (how == CASE_TITLE) {
            begin = !cased;
        } else if (how == CASE_JINJA_TITLE) {
            begin = bt_j_is_space(cp) || (cp < 0x80 && strchr("-({[<", (int)cp) != NULL);
        } else {
            begin = false;
        }
    }
    return bt_j_sb_done(&sb);
}

size_t bt_j_find(struct bt_j_render *r, struct bt_j_str s, struct bt_j_str what, size_t from)
{
    if (what.n == 0) {
        return from <= s.n ? from : SIZE_MAX;
    }
    if (from >= s.n) {
        return SIZE_MAX;
    }
    const char *p = memmem(s.p + from, s.n - from, what.p, what.n);
    size_t hit = p == NULL ? SIZE_MAX : (size_t)(p - s.p);
    j_work(r, what.n + BT_MIN(hit, s.n) - from); /* the length of the search is known only now */
    return hit;
}

struct bt_j_str bt_j_replace(struct bt_j_render *r, struct bt_j_str s, struct bt_j_str from,
                             struct bt_j_str to, int64_t count)
{
    struct bt_j_sb sb = {0};
    size_t at = 0;
    while (count != 0) {
        size_t hit = bt_j_find(r, s, from, at);
        if (hit == SIZE_MAX) {
            break;
        }
        bt_j_sb_put(r, &sb, s.p + at, hit - at);
        bt_j_sb_str(r, &sb, to);
        at = hit + from.n;
        count--;
        if (from.n == 0) { /* an empty string is found between all characters */
            struct bt_j_str one = bt_j_str_slice((struct bt_j_str){s.p + at, s.n - at}, 0, 1);
            if (one.n == 0) {
                at = s.n + 1;
                break;
            }
            bt_j_sb_str(r, &sb, one);
            at += one.n;
        }
    }
    if (at < s.n) {
        bt_j_sb_put(r, &sb, s.p + at, s.n - at);
    }
    return bt_j_sb_done(&sb);
}

void bt_j_float_repr(double f, char out[40])
{
    if (isnan(f) || isinf(f)) {
        strcpy(out, isnan(f) ? "nan" : f > 0 ? "inf" : "-inf");
        return;
    }
    char tmp[40];
    /* The shortest number that reads back as the same value. */
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(tmp, sizeof(tmp), "%.*e", digits - 1, f);
        if (strtod(tmp, NULL) == f) {
            break;
        }
    }
    char *e = strchr(tmp, 'e');
    int exp = atoi(e + 1), digits = (int)(e - tmp) - (tmp[0] == '-') - (strchr(tmp, '.') != NULL);
    if (exp < -4 || exp >= 16) {
        snprintf(out, 40, "%.*se%c%02d", (int)(e - tmp), tmp, exp < 0 ? '-' : '+', abs(exp));
    } else {
        snprintf(out, 40, "%.*f", BT_MAX(digits - 1 - exp, 1), f);
    }
}

static void json_string_out(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_str s,
                            bool ascii)
{
    bt_j_sb_puts(r, sb, "\"");
    for (size_t i = 0; i < s.n;) {
        uint32_t cp = 0;
        char tmp[16];
        size_t k = bt_utf8_decode(s.p + i, s.p + s.n, &cp);
        k = k == 0 ? 1 : k;
        static const char plain[] = "\"\"\\\\\nn\rr\tt\bb\ff";
        const char *esc = NULL;
        for (size_t e = 0; e + 1 < sizeof(plain); e += 2) {
            esc = cp == (uint8_t)plain[e] ? &plain[e + 1] : esc;
        }
        if (esc != NULL) {
            tmp[0] = '\\';
            tmp[1] = *esc;
            bt_j_sb_put(r, sb, tmp, 2);
        } else if (cp < 0x20 || (ascii && cp >= 0x7f && cp < 0x10000 && cp != 0x7f)) {
            snprintf(tmp, sizeof(tmp), "\\u%04x", cp);
            bt_j_sb_puts(r, sb, tmp);
        } else if (ascii && cp >= 0x10000) {
            snprintf(tmp, sizeof(tmp), "\\u%04x\\u%04x", 0xd800 + ((cp - 0x10000) >> 10),
                     0xdc00 + ((cp - 0x10000) & 0x3ff));
            bt_j_sb_puts(r, sb, tmp);
        } else {
            bt_j_sb_put(r, sb, s.p + i, k);
        }
        i += k;
    }
    bt_j_sb_puts(r, sb, "\"");
}

struct json_opts {
    struct bt_j_str indent, item_sep, key_sep;
    bool pretty, ascii, sort;
};

static void json_newline(struct bt_j_render *r, struct bt_j_sb *sb, const struct json_opts *o,
                         int level)
{
    if (o->pretty) {
        bt_j_sb_puts(r, sb, "\n");
        for (int i = 0; i < level; i++) {
            bt_j_sb_str(r, sb, o->indent);
        }
    }
}

static void json_out(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_value v,
                     const struct json_opts *o, int level);

static void json_dict(struct bt_j_render *r, struct bt_j_sb *sb, const struct bt_j_dict *d,
                      const struct json_opts *o, int level)
{
    const struct bt_j_entry **order = bt_j_alloc(&r->arena, (d->n + 1) * sizeof(*order));
    for (size_t i = 0; i < d->n; i++) {
        size_t at = i;
        while (o->sort && at > 0 && bt_j_compare(r, d->v[i].key, order[at - 1]->key) < 0) {
            order[at] = order[at - 1];
            at--;
        }
        order[at] = &d->v[i];
    }
    bt_j_sb_puts(r, sb, "{");
    for (size_t i = 0; i < d->n; i++) {
        if (i > 0) {
            bt_j_sb_str(r, sb, o->item_sep);
        }
        json_newline(r, sb, o, level + 1);
        struct bt_j_value key = order[i]->key;
        if (key.kind == J_STR) {
            json_string_out(r, sb, key.s, o->ascii);
        } else if (bt_j_is_num(key) || key.kind == J_NONE) {
            bt_j_sb_puts(r, sb, "\"");
            json_out(r, sb, key, o, level);
            bt_j_sb_puts(r, sb, "\"");
        } else {
            bt_j_fail(r, "keys must be str, int, float, bool or None, not %s", bt_j_type_name(key));
        }
        bt_j_sb_str(r, sb, o->key_sep);
        json_out(r, sb, order[i]->value, o, level + 1);
    }
    if (d->n > 0) {
        json_newline(r, sb, o, level);
    }
    bt_j_sb_puts(r, sb, "}");
}

static void json_out(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_value v,
                     const struct json_opts *o, int level)
{
    char tmp[40];
    bt_j_enter(r);
    switch (v.kind) {
    case J_NONE: bt_j_sb_puts(r, sb, "null"); break;
    case J_BOOL: bt_j_sb_puts(r, sb, v.b ? "true" : "false"); break;
    case J_INT: bt_j_repr(r, sb, v); break;
    case J_FLOAT:
        j_work(r, J_FLOAT_WORK);
        bt_j_float_repr(v.f, tmp);
        bt_j_sb_puts(r, sb,
                     isnan(v.f)   ? "NaN"
                     : isinf(v.f) ? (v.f > 0 ? "Infinity" : "-Infinity")
                                  : tmp);
        break;
    case J_STR: json_string_out(r, sb, v.s, o->ascii); break;
    case J_LIST:
    case J_TUPLE:
        bt_j_sb_puts(r, sb, "[");
        for (size_t i = 0; i < v.list->n; i++) {
            if (i > 0) {
                bt_j_sb_str(r, sb, o->item_sep);
            }
            json_newline(r, sb, o, level + 1);
            json_out(r, sb, v.list->v[i], o, level + 1);
        }
        if (v.list->n > 0) {
            json_newline(r, sb, o, level);
        }
        bt_j_sb_puts(r, sb, "]");
        break;
    case J_DICT: json_dict(r, sb, v.dict, o, level); break;
    case J_UNDEFINED:
    case J_NAMESPACE:
    case J_LOOP:
    case J_MACRO:
    case J_METHOD:
    case J_GLOBAL: bt_j_fail(r, "Object of type %s is not JSON serializable", bt_j_type_name(v));
    }
    bt_j_leave(r);
}

/* The filter tojson as in transformers: (ensure_ascii, indent, separators, sort_keys). */
void bt_j_json(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_value v,
               const struct bt_j_call *opts)
{
    struct json_opts o = {.key_sep = j_cstr(": "), .item_sep = j_cstr(", ")};
    struct bt_j_value a;
    o.ascii = bt_j_arg_bool(r, opts, 0, "ensure_ascii", false);
    if (bt_j_arg_get(opts, 1, "indent", &a) && a.kind != J_NONE) {
        o.pretty = true;
        o.item_sep = j_cstr(",");
        if (a.kind == J_STR) {
            o.indent = a.s;
        } else {
            int64_t n = BT_MIN(BT_MAX(bt_j_arg_int(r, opts, 1, "indent", 0), 0), 64);
            char *p = bt_j_alloc(&r->arena, (size_t)n);
            memset(p, ' ', (size_t)n);
            o.indent = (struct bt_j_str){p, (size_t)n};
        }
    }
    if (bt_j_arg_get(opts, 2, "separators", &a) && a.kind != J_NONE) {
        if ((a.kind != J_LIST && a.kind != J_TUPLE) || a.list->n != 2 ||
            a.list->v[0].kind != J_STR || a.list->v[1].kind != J_STR) {
            bt_j_fail(r, "tojson: separators must be two strings");
        }
        o.item_sep = a.list->v[0].s;
        o.key_sep = a.list->v[1].s;
    }
    o.sort = bt_j_arg_bool(r, opts, 3, "sort_keys", false);
    json_out(r, sb, v, &o, 0);
}

/* Formats one conversion of a "%" format; returns the position after it. */
static size_t format_one(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_str fmt, size_t i,
                         struct bt_j_value v)
{
    char spec[32] = "%", num[64];
    size_t n = 1;
    while (i < fmt.n && strchr("-+ 0#.123456789", fmt.p[i]) != NULL && n < 12) {
        spec[n++] = fmt.p[i++];
    }
    char conv = i < fmt.n ? fmt.p[i] : '\0';
    if (conv == 's' || conv == 'r') {
        struct bt_j_sb one = {0};
        if (conv == 'r') {
            bt_j_repr(r, &one, v);
        } else {
            bt_j_sb_str(r, &one, bt_j_to_str(r, v));
        }
        int64_t width = n > 1 ? strtoll(spec + (spec[1] == '-' ? 2 : 1), NULL, 10) : 0;
        int64_t pad = BT_MIN(width, 1000) - (int64_t)bt_j_str_chars(bt_j_sb_done(&one));
        for (; spec[1] != '-' && pad > 0; pad--) {
            bt_j_sb_puts(r, sb, " ");
        }
        bt_j_sb_str(r, sb, bt_j_sb_done(&one));
        for (; pad > 0; pad--) {
            bt_j_sb_puts(r, sb, " ");
        }
    } else if (strchr("dixX", conv) != NULL && conv != '\0' && bt_j_is_num(v)) {
        spec[n++] = 'l';
        spec[n++] = 'l';
        spec[n++] = conv;
        spec[n] = '\0';
        bool fits = v.kind != J_FLOAT || (v.f > -9e18 && v.f < 9e18);
        if (!fits) {
            bt_j_fail(r, "a float that is no integer of 64 bits");
        }
        snprintf(num, sizeof(num), spec,
                 v.kind == J_FLOAT ? (long long)v.f : (long long)bt_j_as_int(v));
        bt_j_sb_puts(r, sb, num);
    } else if (strchr("feEgG", conv) != NULL && conv != '\0' && bt_j_is_num(v)) {
        spec[n++] = conv;
        spec[n] = '\0';
        snprintf(num, sizeof(num), spec, bt_j_num(v));
        bt_j_sb_puts(r, sb, num);
    } else {
        bt_j_fail(r, "the format %%%c of a %s is not supported", conv, bt_j_type_name(v));
    }
    return i + 1;
}

struct bt_j_str bt_j_format_percent(struct bt_j_render *r, struct bt_j_str fmt,
                                    struct bt_j_value args)
{
    struct bt_j_sb sb = {0};
    size_t used = 0, total = args.kind == J_TUPLE ? args.list->n : 1;
    for (size_t i = 0; i < fmt.n;) {
        if (fmt.p[i] != '%') {
            bt_j_sb_put(r, &sb, fmt.p + i++, 1);
            continue;
        }
        i++;
        if (i < fmt.n && fmt.p[i] == '%') {
            bt_j_sb_puts(r, &sb, "%");
            i++;
            continue;
        }
        struct bt_j_value v;
        if (i < fmt.n && fmt.p[i] == '(' && args.kind == J_DICT) {
            size_t close = bt_j_find(r, fmt, j_cstr(")"), i);
            if (close == SIZE_MAX) {
                bt_j_fail(r, "incomplete format key");
            }
            const struct bt_j_value *hit =
                bt_j_dict_get_str(args.dict, (struct bt_j_str){fmt.p + i + 1, close - i - 1});
            if (hit == NULL) {
                bt_j_fail(r, "a format key is missing");
            }
            v = *hit;
            i = close + 1;
        } else {
            if (used == total) {
                bt_j_fail(r, "not enough arguments for format string");
            }
            v = args.kind == J_TUPLE ? args.list->v[used] : args;
            used++;
        }
        i = format_one(r, &sb, fmt, i, v);
    }
    if (used < total && args.kind != J_DICT) {
        bt_j_fail(r, "not all arguments converted during string formatting");
    }
    return bt_j_sb_done(&sb);
}

static bool in_class(const struct bt_j_render *r, uint32_t cp, enum bt_j_class cls)
{
    bool ascii = cp < 0x80 || r->locale == (locale_t)0;
    bool digit = cp >= '0' && cp <= '9';
    bool alpha = ascii ? (cp | 32) >= 'a' && (cp | 32) <= 'z' && cp < 0x80
                       : iswalpha_l((wint_t)cp, r->locale) != 0;
    switch (cls) {
    case CLASS_ALPHA: return alpha;
    case CLASS_DIGIT: return digit;
    case CLASS_ALNUM: return alpha || digit;
    case CLASS_SPACE: return bt_j_is_space(cp);
    case CLASS_UPPER:
    case CLASS_LOWER: break;
    }
    return false;
}

bool bt_j_all_of(struct bt_j_render *r, struct bt_j_str s, enum bt_j_class cls)
{
    bool any = false;
    for (size_t i = 0; i < s.n;) {
        uint32_t cp;
        size_t k = bt_utf8_decode(s.p + i, s.p + s.n, &cp);
        if (k == 0) {
            return false;
        }
        i += k;
        j_work(r, J_ELEMENT);
        if (cls == CLASS_UPPER || cls == CLASS_LOWER) {
            bool is_up = lower(r, cp) != cp, is_low = upper(r, cp) != cp || cp == 0xdf;
            if (cls == CLASS_UPPER ? is_low : is_up) {
                return false;
            }
            any = any || is_up || is_low;
        } else if (!in_class(r, cp, cls)) {
            return false;
        } else {
            any = true;
        }
    }
    return any;
}

struct bt_j_value bt_j_splitlines(struct bt_j_render *r, struct bt_j_str s)
{
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    size_t from = 0;
    for (size_t i = 0; i < s.n;) {
        uint32_t cp = 0;
        size_t k = bt_utf8_decode(s.p + i, s.p + s.n, &cp);
        k = k == 0 ? 1 : k;
        j_work(r, J_APPEND);
        bool end = (cp >= 10 && cp <= 13) || (cp >= 0x1c && cp <= 0x1e) || cp == 0x85 ||
                   cp == 0x2028 || cp == 0x2029;
        if (end) {
            bt_j_list_add(r, out.list, bt_j_string((struct bt_j_str){s.p + from, i - from}));
            k += cp == '\r' && i + 1 < s.n && s.p[i + 1] == '\n';
            from = i + k;
        }
        i += k;
    }
    if (from < s.n) {
        bt_j_list_add(r, out.list, bt_j_string((struct bt_j_str){s.p + from, s.n - from}));
    }
    return out;
}
