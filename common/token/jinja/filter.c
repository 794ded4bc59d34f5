/* Filters of the template interpreter, as in Jinja; tojson as in transformers. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/token/jinja/jinja.h"

typedef struct bt_j_value (*filter_fn)(struct bt_j_render *r, struct bt_j_value v,
                                       struct bt_j_call *c);

static struct bt_j_value str_value(struct bt_j_render *r, struct bt_j_value v)
{
    return bt_j_string(bt_j_to_str(r, v));
}

/* ---- values of elements: attribute="a.b" or an index ---- */

static struct bt_j_value get_path(struct bt_j_render *r, struct bt_j_value v,
                                  struct bt_j_value path)
{
    if (path.kind != J_STR) {
        return bt_j_get_item(r, v, path);
    }
    struct bt_j_str rest = path.s;
    while (rest.n > 0) {
        size_t dot = bt_j_find(r, rest, j_cstr("."), 0);
        struct bt_j_str part = {rest.p, dot == SIZE_MAX ? rest.n : dot};
        char *end, tmp[24];
        long index = 0;
        bool number = part.n > 0 && part.n < sizeof(tmp) && part.p[0] >= '0' && part.p[0] <= '9';
        if (number) {
            memcpy(tmp, part.p, part.n);
            tmp[part.n] = '\0';
            index = strtol(tmp, &end, 10);
            number = *end == '\0';
        }
        v = bt_j_get_item(r, v, number ? bt_j_int(index) : bt_j_string(part));
        rest = dot == SIZE_MAX ? (struct bt_j_str){"", 0}
                               : (struct bt_j_str){rest.p + dot + 1, rest.n - dot - 1};
    }
    return v;
}

/* ---- strings ---- */

static struct bt_j_value f_trim(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value chars;
    struct bt_j_str s = bt_j_to_str(r, v), set;
    bool given = bt_j_arg_get(c, 0, "chars", &chars) && chars.kind != J_NONE;
    set = given ? bt_j_to_str(r, chars) : j_cstr("");
    return bt_j_string(bt_j_strip(r, s, given ? &set : NULL, true, true));
}

static struct bt_j_value f_upper(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    return bt_j_string(bt_j_change_case(r, bt_j_to_str(r, v), CASE_UPPER));
}

static struct bt_j_value f_lower(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    return bt_j_string(bt_j_change_case(r, bt_j_to_str(r, v), CASE_LOWER));
}

static struct bt_j_value f_title(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    return bt_j_string(bt_j_change_case(r, bt_j_to_str(r, v), CASE_JINJA_TITLE));
}

static struct bt_j_value f_capitalize(struct bt_j_render *r, struct bt_j_value v,
                                      struct bt_j_call *c)
{
    (void)c;
    return bt_j_string(bt_j_change_case(r, bt_j_to_str(r, v), CASE_CAPITALIZE));
}

static struct bt_j_value f_replace(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value old, with, count;
    if (!bt_j_arg_get(c, 0, "old", &old) || !bt_j_arg_get(c, 1, "new", &with)) {
        bt_j_fail(r, "replace needs the old and the new text");
    }
    bool limited = bt_j_arg_get(c, 2, "count", &count) && count.kind != J_NONE;
    return bt_j_string(bt_j_replace(r, bt_j_to_str(r, v), bt_j_to_str(r, old), bt_j_to_str(r, with),
                                    limited ? bt_j_arg_int(r, c, 2, "count", -1) : -1));
}

static struct bt_j_value f_string(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    return str_value(r, v);
}

static struct bt_j_value f_escape(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    struct bt_j_str s = bt_j_to_str(r, v);
    struct bt_j_sb sb = {0};
    for (size_t i = 0; i < s.n; i++) {
        const char *esc = s.p[i] == '&'    ? "&amp;"
                          : s.p[i] == '<'  ? "&lt;"
                          : s.p[i] == '>'  ? "&gt;"
                          : s.p[i] == '"'  ? "&#34;"
                          : s.p[i] == '\'' ? "&#39;"
                                           : NULL;
        if (esc != NULL) {
            bt_j_sb_puts(r, &sb, esc);
        } else {
            bt_j_sb_put(r, &sb, s.p + i, 1);
        }
    }
    return bt_j_string(bt_j_sb_done(&sb));
}

static struct bt_j_value f_indent(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value width;
    struct bt_j_str pad;
    if (bt_j_arg_get(c, 0, "width", &width) && width.kind == J_STR) {
        pad = width.s;
    } else {
        int64_t n = BT_MIN(BT_MAX(bt_j_arg_int(r, c, 0, "width", 4), 0), 1000);
        char *p = bt_j_alloc(&r->arena, (size_t)n);
        memset(p, ' ', (size_t)n);
        pad = (struct bt_j_str){p, (size_t)n};
    }
    bool first = bt_j_arg_bool(r, c, 1, "first", false),
         blank = bt_j_arg_bool(r, c, 2, "blank", false);
    struct bt_j_sb text = {0}, sb = {0};
    bt_j_sb_str(r, &text, bt_j_to_str(r, v));
    bt_j_sb_puts(r, &text, "\n"); /* as in Jinja, for a newline at the end */
    struct bt_j_list *lines = bt_j_splitlines(r, bt_j_sb_done(&text)).list;
    for (size_t i = 0; i < lines->n; i++) {
        bt_j_sb_puts(r, &sb, i > 0 ? "\n" : "");
        if (i == 0 ? first : blank || lines->v[i].s.n > 0) {
            bt_j_sb_str(r, &sb, pad);
        }
        bt_j_sb_str(r, &sb, lines->v[i].s);
    }
    return bt_j_string(bt_j_sb_done(&sb));
}

static struct bt_j_value f_center(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    v = str_value(r, v);
    struct bt_j_call args = {0};
    bt_j_call_add(r, &args, bt_j_int(bt_j_arg_int(r, c, 0, "width", 80)));
    return bt_j_method_run(r, v, j_cstr("center"), &args);
}

static struct bt_j_value f_format(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value args = bt_j_new_list(r, J_TUPLE);
    for (size_t i = 0; i < c->n; i++) {
        bt_j_list_add(r, args.list, c->v[i]);
    }
    if (c->named.n > 0) {
        args = (struct bt_j_value){.kind = J_DICT, .dict = &c->named};
    }
    return bt_j_string(bt_j_format_percent(r, bt_j_to_str(r, v), args));
}

static struct bt_j_value f_wordcount(struct bt_j_render *r, struct bt_j_value v,
                                     struct bt_j_call *c)
{
    (void)c;
    struct bt_j_str s = bt_j_to_str(r, v);
    int64_t n = 0;
    bool in_word = false;
    for (size_t i = 0; i < s.n; i++) {
        struct bt_j_str one = {s.p + i, 1};
        bool word = (uint8_t)s.p[i] >= 0x80 || s.p[i] == '_' || bt_j_all_of(r, one, CLASS_ALNUM);
        n += word && !in_word;
        in_word = word;
    }
    return bt_j_int(n);
}

static struct bt_j_value f_tojson(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_sb sb = {0};
    bt_j_json(r, &sb, v, c);
    return bt_j_string(bt_j_sb_done(&sb));
}

/* ---- numbers ---- */

static bool parse_int(struct bt_j_render *r, struct bt_j_str s, int base, int64_t *i_p)
{
    char tmp[72], *end;
    s = bt_j_strip(r, s, NULL, true, true);
    size_t n = 0;
    for (size_t i = 0; i < s.n && n < sizeof(tmp) - 1; i++) {
        if (s.p[i] != '_') {
            tmp[n++] = s.p[i];
        }
    }
    tmp[n] = '\0';
    errno = 0;
    *i_p = strtoll(tmp, &end, base);
    return n > 0 && *end == '\0' && errno == 0 && end != tmp;
}

static bool parse_float(struct bt_j_render *r, struct bt_j_str s, double *f_p)
{
    char tmp[72], *end;
    s = bt_j_strip(r, s, NULL, true, true);
    if (s.n == 0 || s.n >= sizeof(tmp) || memchr(s.p, 'x', s.n) != NULL ||
        memchr(s.p, 'X', s.n) != NULL) {
        return false;
    }
    memcpy(tmp, s.p, s.n);
    tmp[s.n] = '\0';
    *f_p = strtod(tmp, &end);
    return *end == '\0';
}

static struct bt_j_value f_int(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value missing;
    if (!bt_j_arg_get(c, 0, "default", &missing)) {
        missing = bt_j_int(0);
    }
    int base = (int)bt_j_arg_int(r, c, 1, "base", 10);
    int64_t i;
    double f;
    if (bt_j_is_intlike(v)) {
        return bt_j_int(bt_j_as_int(v));
    }
    if (v.kind == J_STR) {
        if (parse_int(r, v.s, base >= 2 && base <= 36 ? base : 10, &i)) {
            return bt_j_int(i);
        }
        if (!parse_float(r, v.s, &f)) {
            return missing;
        }
        v = bt_j_float(f);
    }
    return v.kind == J_FLOAT && v.f > -9e18 && v.f < 9e18 ? bt_j_int((int64_t)v.f) : missing;
}

static struct bt_j_value f_float(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value missing;
    double f;
    if (!bt_j_arg_get(c, 0, "default", &missing)) {
        missing = bt_j_float(0);
    }
    if (bt_j_is_num(v)) {
        return bt_j_float(bt_j_num(v));
    }
    return v.kind == J_STR && parse_float(r, v.s, &f) ? bt_j_float(f) : missing;
}

static struct bt_j_value f_abs(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    if (v.kind == J_FLOAT) {
        return bt_j_float(fabs(v.f));
    }
    if (!bt_j_is_intlike(v)) {
        bt_j_fail(r, "bad operand type for abs(): '%s'", bt_j_type_name(v));
    }
    return bt_j_as_int(v) < 0 ? bt_j_binary(r, OP_SUB, bt_j_int(0), v) : bt_j_int(bt_j_as_int(v));
}

static struct bt_j_value f_round(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    int64_t digits = bt_j_arg_int(r, c, 0, "precision", 0);
    struct bt_j_str how = bt_j_arg_str(r, c, 1, "method", "common");
    if (!bt_j_is_num(v) || digits < -15 || digits > 15) {
        bt_j_fail(r, "round needs a number and a precision of -15 to 15");
    }
    double scale = pow(10, (double)digits), f = bt_j_num(v);
    if (bt_j_str_is(how, "ceil")) {
        f = ceil(f * scale) / scale;
    } else if (bt_j_str_is(how, "floor")) {
        f = floor(f * scale) / scale;
    } else if (bt_j_str_is(how, "common")) {
        if (digits > 0) { /* rounds the exact binary value in decimal, as Python does */
            char tmp[400];
            snprintf(tmp, sizeof(tmp), "%.*f", (int)digits, f);
            f = strtod(tmp, NULL);
        } else {
            f = nearbyint(f * scale) / scale;
        }
    } else {
        bt_j_fail(r, "method must be common, ceil or floor");
    }
    return bt_j_is_intlike(v) && bt_j_str_is(how, "common") ? bt_j_int((int64_t)f) : bt_j_float(f);
}

/* ---- any value ---- */

static struct bt_j_value f_default(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value missing;
    if (!bt_j_arg_get(c, 0, "default_value", &missing)) {
        missing = bt_j_string(j_cstr(""));
    }
    bool also_false = bt_j_arg_bool(r, c, 1, "boolean", false);
    return v.kind == J_UNDEFINED || (also_false && !bt_j_truth(v)) ? missing : v;
}

static struct bt_j_value f_safe(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    return str_value(r, v); /* this interpreter never escapes automatically */
}

static struct bt_j_value f_length(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    return bt_j_int((int64_t)bt_j_length(r, v));
}

static struct bt_j_value f_attr(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_str name = bt_j_arg_str(r, c, 0, "name", NULL);
    if (v.kind == J_DICT && !bt_j_has_method(v, name)) {
        /* Unlike ".", attr finds only attributes, no items. */
        return bt_j_undefined("the attribute");
    }
    return bt_j_get_attr(r, v, name);
}

/* ---- sequences ---- */

static struct bt_j_value f_list(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    const struct bt_j_list *l = bt_j_iterate(r, v);
    for (size_t i = 0; i < l->n; i++) {
        bt_j_list_add(r, out.list, l->v[i]);
    }
    return out;
}

static struct bt_j_value f_first(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    const struct bt_j_list *l = bt_j_iterate(r, v);
    return l->n > 0 ? l->v[0] : bt_j_undefined("the first element of an empty sequence");
}

static struct bt_j_value f_last(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    const struct bt_j_list *l = bt_j_iterate(r, v);
    return l->n > 0 ? l->v[l->n - 1] : bt_j_undefined("the last element of an empty sequence");
}

static struct bt_j_value f_join(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value sep, path;
    bt_j_arg_get(c, 0, "d", &sep);
    bool by = bt_j_arg_get(c, 1, "attribute", &path) && path.kind != J_NONE;
    struct bt_j_str between = bt_j_to_str(r, sep);
    const struct bt_j_list *l = bt_j_iterate(r, v);
    struct bt_j_sb sb = {0};
    for (size_t i = 0; i < l->n; i++) {
        j_charge(r, 1);
        if (i > 0) {
            bt_j_sb_str(r, &sb, between);
        }
        bt_j_sb_str(r, &sb, bt_j_to_str(r, by ? get_path(r, l->v[i], path) : l->v[i]));
    }
    return bt_j_string(bt_j_sb_done(&sb));
}

static struct bt_j_value f_items(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_call none = {0};
    (void)c;
    if (v.kind == J_UNDEFINED) {
        return bt_j_new_list(r, J_LIST);
    }
    if (v.kind != J_DICT) {
        bt_j_fail(r, "Can only get item pairs from a mapping.");
    }
    return bt_j_method_run(r, v, j_cstr("items"), &none);
}

static struct bt_j_value f_reverse(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    const struct bt_j_list *l = bt_j_iterate(r, v);
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    struct bt_j_sb sb = {0};
    for (size_t i = l->n; i > 0; i--) {
        if (v.kind == J_STR) {
            bt_j_sb_str(r, &sb, l->v[i - 1].s);
        } else {
            bt_j_list_add(r, out.list, l->v[i - 1]);
        }
    }
    return v.kind == J_STR ? bt_j_string(bt_j_sb_done(&sb)) : out;
}

/* The value by which sort, unique, min and max compare. */
static struct bt_j_value sort_key(struct bt_j_render *r, struct bt_j_value v,
                                  const struct bt_j_value *path, bool case_sensitive)
{
    if (path != NULL) {
        v = get_path(r, v, *path);
    }
    return v.kind == J_STR && !case_sensitive ? bt_j_string(bt_j_change_case(r, v.s, CASE_LOWER))
                                              : v;
}

struct keyed {
    struct bt_j_value key, value;
};

/* Stable merge sort. It is not qsort, because a comparison may fail the render and leave by
 * longjmp. */
static void merge_sort(struct bt_j_render *r, struct keyed *v, struct keyed *tmp, size_t n,
                       bool down)
{
    if (n < 2) {
        return;
    }
    size_t half = n / 2, a = 0, b = half;
    merge_sort(r, v, tmp, half, down);
    merge_sort(r, v + half, tmp, n - half, down);
    j_work(r, J_ELEMENT * n);
    for (size_t i = 0; i < n; i++) {
        bool left = b == n;
        if (a < half && b < n) {
            int c = bt_j_compare(r, v[b].key, v[a].key);
            left = down ? c <= 0 : c >= 0;
        }
        tmp[i] = a < half && left ? v[a++] : v[b++];
    }
    memcpy(v, tmp, n * sizeof(*v));
}

static struct keyed *sorted(struct bt_j_render *r, const struct bt_j_list *l,
                            const struct bt_j_value *path, bool case_sensitive, bool down)
{
    j_work(r, 2 * J_ELEMENT * l->n);
    struct keyed *v = bt_j_alloc(&r->arena, (l->n + 1) * sizeof(*v));
    struct keyed *tmp = bt_j_alloc(&r->arena, (l->n + 1) * sizeof(*v));
    for (size_t i = 0; i < l->n; i++) {
        v[i] = (struct keyed){sort_key(r, l->v[i], path, case_sensitive), l->v[i]};
    }
    merge_sort(r, v, tmp, l->n, down);
    return v;
}

static struct bt_j_value f_sort(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value path;
    bool down = bt_j_arg_bool(r, c, 0, "reverse", false);
    bool cs = bt_j_arg_bool(r, c, 1, "case_sensitive", false);
    bool by = bt_j_arg_get(c, 2, "attribute", &path) && path.kind != J_NONE;
    const struct bt_j_list *l = bt_j_iterate(r, v);
    struct keyed *order = sorted(r, l, by ? &path : NULL, cs, down);
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    for (size_t i = 0; i < l->n; i++) {
        bt_j_list_add(r, out.list, order[i].value);
    }
    return out;
}

static struct bt_j_value f_dictsort(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    bool cs = bt_j_arg_bool(r, c, 0, "case_sensitive", false);
    if (v.kind != J_DICT) {
        bt_j_fail(r, "'%s' object has no attribute 'items'", bt_j_type_name(v));
    }
    struct bt_j_value by = bt_j_int(bt_j_str_is(bt_j_arg_str(r, c, 1, "by", "key"), "value"));
    bool down = bt_j_arg_bool(r, c, 2, "reverse", false);
    const struct bt_j_list *l = f_items(r, v, c).list;
    struct keyed *order = sorted(r, l, &by, cs, down);
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    for (size_t i = 0; i < l->n; i++) {
        bt_j_list_add(r, out.list, order[i].value);
    }
    return out;
}

static struct bt_j_value f_unique(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value path;
    bool cs = bt_j_arg_bool(r, c, 0, "case_sensitive", false);
    bool by = bt_j_arg_get(c, 1, "attribute", &path) && path.kind != J_NONE;
    const struct bt_j_list *l = bt_j_iterate(r, v);
    struct bt_j_value out = bt_j_new_list(r, J_LIST), seen = bt_j_new_dict(r);
    for (size_t i = 0; i < l->n; i++) {
        struct bt_j_value key = sort_key(r, l->v[i], by ? &path : NULL, cs);
        if (bt_j_dict_get(r, seen.dict, key) == NULL) {
            bt_j_dict_set(r, seen.dict, key, bt_j_none());
            bt_j_list_add(r, out.list, l->v[i]);
        }
    }
    return out;
}

static struct bt_j_value extreme(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c,
                                 int sign)
{
    struct bt_j_value path;
    bool cs = bt_j_arg_bool(r, c, 0, "case_sensitive", false);
    bool by = bt_j_arg_get(c, 1, "attribute", &path) && path.kind != J_NONE;
    const struct bt_j_list *l = bt_j_iterate(r, v);
    if (l->n == 0) {
        return bt_j_undefined("an element of an empty sequence");
    }
    size_t best = 0;
    struct bt_j_value best_key = sort_key(r, l->v[0], by ? &path : NULL, cs);
    for (size_t i = 1; i < l->n; i++) {
        struct bt_j_value key = sort_key(r, l->v[i], by ? &path : NULL, cs);
        int cmp = bt_j_compare(r, key, best_key);
        if ((sign > 0 && cmp > 0) || (sign < 0 && cmp < 0)) {
            best = i;
            best_key = key;
        }
    }
    return l->v[best];
}

static struct bt_j_value f_min(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    return extreme(r, v, c, -1);
}

static struct bt_j_value f_max(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    return extreme(r, v, c, 1);
}

static struct bt_j_value f_sum(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value path, total;
    bool by = bt_j_arg_get(c, 0, "attribute", &path) && path.kind != J_NONE;
    if (!bt_j_arg_get(c, 1, "start", &total)) {
        total = bt_j_int(0);
    }
    const struct bt_j_list *l = bt_j_iterate(r, v);
    for (size_t i = 0; i < l->n; i++) {
        total = bt_j_binary(r, OP_ADD, total, by ? get_path(r, l->v[i], path) : l->v[i]);
    }
    return total;
}

/* The call without its first `skip` positional arguments. */
static struct bt_j_call rest_of(const struct bt_j_call *c, size_t skip)
{
    struct bt_j_call rest = *c;
    skip = BT_MIN(skip, c->n);
    if (skip > 0) { /* without arguments v is NULL */
        rest.v += skip;
        rest.n -= skip;
    }
    return rest;
}

static struct bt_j_value f_map(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    const struct bt_j_value *path = bt_j_dict_get_str(&c->named, j_cstr("attribute"));
    const struct bt_j_value *missing = bt_j_dict_get_str(&c->named, j_cstr("default"));
    if (!bt_j_truth(v)) { /* as in Jinja: none and undefined have no elements */
        return bt_j_new_list(r, J_LIST);
    }
    const struct bt_j_list *l = bt_j_iterate(r, v);
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    int fn = -1;
    if (path == NULL || c->n > 0) {
        path = NULL;
        fn = c->n > 0 && c->v[0].kind == J_STR ? bt_j_filter_find(c->v[0].s) : -1;
        if (fn < 0) {
            bt_j_fail(r, "map needs the name of a filter, or attribute=");
        }
    }
    struct bt_j_call rest = rest_of(c, 1);
    for (size_t i = 0; i < l->n; i++) {
        j_charge(r, 1);
        struct bt_j_value item =
            path != NULL ? get_path(r, l->v[i], *path) : bt_j_filter_run(r, fn, l->v[i], &rest);
        if (path != NULL && missing != NULL && item.kind == J_UNDEFINED) {
            item = *missing;
        }
        bt_j_list_add(r, out.list, item);
    }
    return out;
}

/* select, reject, selectattr and rejectattr. */
static struct bt_j_value select_items(struct bt_j_render *r, struct bt_j_value v,
                                      struct bt_j_call *c, bool want, bool by_attr)
{
    size_t at = by_attr ? 1 : 0;
    if (!bt_j_truth(v)) { /* as in Jinja: none and undefined have no elements */
        return bt_j_new_list(r, J_LIST);
    }
    if (by_attr && c->n == 0) {
        bt_j_fail(r, "selectattr and rejectattr need the name of an attribute");
    }
    int fn = -1;
    if (c->n > at) {
        fn = c->v[at].kind == J_STR ? bt_j_test_find(c->v[at].s) : -1;
        if (fn < 0) {
            bt_j_fail(r, "No test named '%.*s'.",
                      (int)BT_MIN(bt_j_to_str(r, c->v[at]).n, (size_t)60),
                      bt_j_to_str(r, c->v[at]).p);
        }
    }
    struct bt_j_call rest = rest_of(c, at + 1);
    const struct bt_j_list *l = bt_j_iterate(r, v);
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    for (size_t i = 0; i < l->n; i++) {
        j_charge(r, 1);
        struct bt_j_value item = by_attr ? get_path(r, l->v[i], c->v[0]) : l->v[i];
        if ((fn < 0 ? bt_j_truth(item) : bt_j_test_run(r, fn, item, &rest)) == want) {
            bt_j_list_add(r, out.list, l->v[i]);
        }
    }
    return out;
}

static struct bt_j_value f_select(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    return select_items(r, v, c, true, false);
}

static struct bt_j_value f_reject(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    return select_items(r, v, c, false, false);
}

static struct bt_j_value f_selectattr(struct bt_j_render *r, struct bt_j_value v,
                                      struct bt_j_call *c)
{
    return select_items(r, v, c, true, true);
}

static struct bt_j_value f_rejectattr(struct bt_j_render *r, struct bt_j_value v,
                                      struct bt_j_call *c)
{
    return select_items(r, v, c, false, true);
}

static struct bt_j_value f_groupby(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value path;
    bool cs = bt_j_arg_bool(r, c, 2, "case_sensitive", false);
    if (!bt_j_arg_get(c, 0, "attribute", &path)) {
        bt_j_fail(r, "groupby needs an attribute");
    }
    const struct bt_j_list *l = bt_j_iterate(r, v);
    struct keyed *order = sorted(r, l, &path, cs, false);
    struct bt_j_value out = bt_j_new_list(r, J_LIST), group = bt_j_none();
    for (size_t i = 0; i < l->n; i++) {
        if (i == 0 || !bt_j_equal(r, order[i].key, order[i - 1].key)) {
            struct bt_j_value pair = bt_j_new_list(r, J_TUPLE);
            group = bt_j_new_list(r, J_LIST);
            bt_j_list_add(r, pair.list, get_path(r, order[i].value, path));
            bt_j_list_add(r, pair.list, group);
            bt_j_list_add(r, out.list, pair);
        }
        bt_j_list_add(r, group.list, order[i].value);
    }
    return out;
}

static struct bt_j_value f_batch(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    int64_t size = bt_j_arg_int(r, c, 0, "linecount", 0);
    struct bt_j_value fill;
    bool filled = bt_j_arg_get(c, 1, "fill_with", &fill) && fill.kind != J_NONE;
    if (size <= 0 || size > J_RANGE_MAX) {
        bt_j_fail(r, "batch needs a size of 1 to %d", J_RANGE_MAX);
    }
    const struct bt_j_list *l = bt_j_iterate(r, v);
    struct bt_j_value out = bt_j_new_list(r, J_LIST), row = bt_j_none();
    for (size_t i = 0; i < l->n; i++) {
        if (i % (size_t)size == 0) {
            row = bt_j_new_list(r, J_LIST);
            bt_j_list_add(r, out.list, row);
        }
        bt_j_list_add(r, row.list, l->v[i]);
    }
    while (filled && l->n > 0 && row.list->n < (size_t)size) {
        bt_j_list_add(r, row.list, fill);
    }
    return out;
}

static const struct {
    const char *name;
    filter_fn run;
    enum bt_j_cost cost;
} filters[] = {
    {"abs", f_abs, COST_FLAT},
    {"attr", f_attr, COST_FLAT},
    {"batch", f_batch, COST_READS},
    {"capitalize", f_capitalize, COST_FLAT},
    {"center", f_center, COST_READS},
    {"count", f_length, COST_FLAT},
    {"d", f_default, COST_FLAT},
    {"default", f_default, COST_FLAT},
    {"dictsort", f_dictsort, COST_READS},
    {"e", f_escape, COST_FLAT},
    {"escape", f_escape, COST_FLAT},
    {"first", f_first, COST_FLAT},
    {"float", f_float, COST_READS},
    {"format", f_format, COST_FLAT},
    {"groupby", f_groupby, COST_READS},
    {"indent", f_indent, COST_READS},
    {"int", f_int, COST_READS},
    {"items", f_items, COST_READS},
    {"join", f_join, COST_READS},
    {"last", f_last, COST_FLAT},
    {"length", f_length, COST_FLAT},
    {"list", f_list, COST_READS},
    {"lower", f_lower, COST_FLAT},
    {"map", f_map, COST_READS},
    {"max", f_max, COST_READS},
    {"min", f_min, COST_READS},
    {"reject", f_reject, COST_READS},
    {"rejectattr", f_rejectattr, COST_READS},
    {"replace", f_replace, COST_FLAT},
    {"reverse", f_reverse, COST_READS},
    {"round", f_round, COST_FLAT},
    {"safe", f_safe, COST_FLAT},
    {"select", f_select, COST_READS},
    {"selectattr", f_selectattr, COST_READS},
    {"sort", f_sort, COST_READS},
    {"string", f_string, COST_FLAT},
    {"sum", f_sum, COST_READS},
    {"title", f_title, COST_FLAT},
    {"tojson", f_tojson, COST_READS},
    {"trim", f_trim, COST_FLAT},
    {"unique", f_unique, COST_READS},
    {"upper", f_upper, COST_FLAT},
    {"wordcount", f_wordcount, COST_READS},
};

const char *bt_j_filter_name(size_t i)
{
    return i < BT_ARRAY_LEN(filters) ? filters[i].name : NULL;
}

int bt_j_filter_find(struct bt_j_str name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(filters); i++) {
        if (bt_j_str_is(name, filters[i].name)) {
            return (int)i;
        }
    }
    return -1;
}

struct bt_j_value bt_j_filter_run(struct bt_j_render *r, int fn, struct bt_j_value v,
                                  struct bt_j_call *c)
{
    bt_j_enter(r);
    bt_j_charge_call(r, filters[fn].cost, v, c);
    struct bt_j_value out = filters[fn].run(r, v, c);
    bt_j_leave(r);
    return out;
}
