/* Filters of the template interpreter, as Jinja defines them; tojson as transformers does. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/token/jinja/jinja.h"

typedef struct j_value (*filter_fn)(struct j_render *r, struct j_value v, struct j_call *c);

static struct j_value str_value(struct j_render *r, struct j_value v)
{
    return j_string(j_to_str(r, v));
}

/* ---- looking into elements: attribute="a.b" or an index ---- */

static struct j_value get_path(struct j_render *r, struct j_value v, struct j_value path)
{
    if (path.kind != J_STR) {
        return j_get_item(r, v, path);
    }
    struct j_str rest = path.s;
    while (rest.n > 0) {
        size_t dot = j_find(r, rest, j_cstr("."), 0);
        struct j_str part = {rest.p, dot == SIZE_MAX ? rest.n : dot};
        char *end, tmp[24];
        long index = 0;
        bool number = part.n > 0 && part.n < sizeof(tmp) && part.p[0] >= '0' && part.p[0] <= '9';
        if (number) {
            memcpy(tmp, part.p, part.n);
            tmp[part.n] = '\0';
            index = strtol(tmp, &end, 10);
            number = *end == '\0';
        }
        v = j_get_item(r, v, number ? j_int(index) : j_string(part));
        rest = dot == SIZE_MAX ? (struct j_str){"", 0}
                               : (struct j_str){rest.p + dot + 1, rest.n - dot - 1};
    }
    return v;
}

/* ---- strings ---- */

static struct j_value f_trim(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value chars;
    struct j_str s = j_to_str(r, v), set;
    bool given = j_arg_get(c, 0, "chars", &chars) && chars.kind != J_NONE;
    set = given ? j_to_str(r, chars) : j_cstr("");
    return j_string(j_strip(r, s, given ? &set : NULL, true, true));
}

static struct j_value f_upper(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    return j_string(j_change_case(r, j_to_str(r, v), CASE_UPPER));
}

static struct j_value f_lower(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    return j_string(j_change_case(r, j_to_str(r, v), CASE_LOWER));
}

static struct j_value f_title(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    return j_string(j_change_case(r, j_to_str(r, v), CASE_JINJA_TITLE));
}

static struct j_value f_capitalize(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    return j_string(j_change_case(r, j_to_str(r, v), CASE_CAPITALIZE));
}

static struct j_value f_replace(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value old, with, count;
    if (!j_arg_get(c, 0, "old", &old) || !j_arg_get(c, 1, "new", &with)) {
        j_fail(r, "replace needs the old and the new text");
    }
    bool limited = j_arg_get(c, 2, "count", &count) && count.kind != J_NONE;
    return j_string(j_replace(r, j_to_str(r, v), j_to_str(r, old), j_to_str(r, with),
                              limited ? j_arg_int(r, c, 2, "count", -1) : -1));
}

static struct j_value f_string(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    return str_value(r, v);
}

static struct j_value f_escape(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    struct j_str s = j_to_str(r, v);
    struct j_sb sb = {0};
    for (size_t i = 0; i < s.n; i++) {
        const char *esc = s.p[i] == '&'    ? "&amp;"
                          : s.p[i] == '<'  ? "&lt;"
                          : s.p[i] == '>'  ? "&gt;"
                          : s.p[i] == '"'  ? "&#34;"
                          : s.p[i] == '\'' ? "&#39;"
                                           : NULL;
        if (esc != NULL) {
            j_sb_puts(r, &sb, esc);
        } else {
            j_sb_put(r, &sb, s.p + i, 1);
        }
    }
    return j_string(j_sb_done(&sb));
}

static struct j_value f_indent(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value width;
    struct j_str pad;
    if (j_arg_get(c, 0, "width", &width) && width.kind == J_STR) {
        pad = width.s;
    } else {
        int64_t n = BT_MIN(BT_MAX(j_arg_int(r, c, 0, "width", 4), 0), 1000);
        char *p = j_alloc(&r->arena, (size_t)n);
        memset(p, ' ', (size_t)n);
        pad = (struct j_str){p, (size_t)n};
    }
    bool first = j_arg_bool(r, c, 1, "first", false), blank = j_arg_bool(r, c, 2, "blank", false);
    struct j_sb text = {0}, sb = {0};
    j_sb_str(r, &text, j_to_str(r, v));
    j_sb_puts(r, &text, "\n"); /* as the reference does, for a newline at the end */
    struct j_list *lines = j_splitlines(r, j_sb_done(&text)).list;
    for (size_t i = 0; i < lines->n; i++) {
        j_sb_puts(r, &sb, i > 0 ? "\n" : "");
        if (i == 0 ? first : blank || lines->v[i].s.n > 0) {
            j_sb_str(r, &sb, pad);
        }
        j_sb_str(r, &sb, lines->v[i].s);
    }
    return j_string(j_sb_done(&sb));
}

static struct j_value f_center(struct j_render *r, struct j_value v, struct j_call *c)
{
    v = str_value(r, v);
    struct j_call args = {0};
    j_call_add(r, &args, j_int(j_arg_int(r, c, 0, "width", 80)));
    return j_method_run(r, v, j_cstr("center"), &args);
}

static struct j_value f_format(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value args = j_new_list(r, J_TUPLE);
    for (size_t i = 0; i < c->n; i++) {
        j_list_add(r, args.list, c->v[i]);
    }
    if (c->named.n > 0) {
        args = (struct j_value){.kind = J_DICT, .dict = &c->named};
    }
    return j_string(j_format_percent(r, j_to_str(r, v), args));
}

static struct j_value f_wordcount(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    struct j_str s = j_to_str(r, v);
    int64_t n = 0;
    bool in_word = false;
    for (size_t i = 0; i < s.n; i++) {
        struct j_str one = {s.p + i, 1};
        bool word = (uint8_t)s.p[i] >= 0x80 || s.p[i] == '_' || j_all_of(r, one, CLASS_ALNUM);
        n += word && !in_word;
        in_word = word;
    }
    return j_int(n);
}

static struct j_value f_tojson(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_sb sb = {0};
    j_json(r, &sb, v, c);
    return j_string(j_sb_done(&sb));
}

/* ---- numbers ---- */

static bool parse_int(struct j_render *r, struct j_str s, int base, int64_t *i_p)
{
    char tmp[72], *end;
    s = j_strip(r, s, NULL, true, true);
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

static bool parse_float(struct j_render *r, struct j_str s, double *f_p)
{
    char tmp[72], *end;
    s = j_strip(r, s, NULL, true, true);
    if (s.n == 0 || s.n >= sizeof(tmp) || memchr(s.p, 'x', s.n) != NULL ||
        memchr(s.p, 'X', s.n) != NULL) {
        return false;
    }
    memcpy(tmp, s.p, s.n);
    tmp[s.n] = '\0';
    *f_p = strtod(tmp, &end);
    return *end == '\0';
}

static struct j_value f_int(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value missing;
    if (!j_arg_get(c, 0, "default", &missing)) {
        missing = j_int(0);
    }
    int base = (int)j_arg_int(r, c, 1, "base", 10);
    int64_t i;
    double f;
    if (j_is_intlike(v)) {
        return j_int(j_as_int(v));
    }
    if (v.kind == J_STR) {
        if (parse_int(r, v.s, base >= 2 && base <= 36 ? base : 10, &i)) {
            return j_int(i);
        }
        if (!parse_float(r, v.s, &f)) {
            return missing;
        }
        v = j_float(f);
    }
    return v.kind == J_FLOAT && v.f > -9e18 && v.f < 9e18 ? j_int((int64_t)v.f) : missing;
}

static struct j_value f_float(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value missing;
    double f;
    if (!j_arg_get(c, 0, "default", &missing)) {
        missing = j_float(0);
    }
    if (j_is_num(v)) {
        return j_float(j_num(v));
    }
    return v.kind == J_STR && parse_float(r, v.s, &f) ? j_float(f) : missing;
}

static struct j_value f_abs(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    if (v.kind == J_FLOAT) {
        return j_float(fabs(v.f));
    }
    if (!j_is_intlike(v)) {
        j_fail(r, "bad operand type for abs(): '%s'", j_type_name(v));
    }
    return j_as_int(v) < 0 ? j_binary(r, OP_SUB, j_int(0), v) : j_int(j_as_int(v));
}

static struct j_value f_round(struct j_render *r, struct j_value v, struct j_call *c)
{
    int64_t digits = j_arg_int(r, c, 0, "precision", 0);
    struct j_str how = j_arg_str(r, c, 1, "method", "common");
    if (!j_is_num(v) || digits < -15 || digits > 15) {
        j_fail(r, "round needs a number and a precision of -15 to 15");
    }
    double scale = pow(10, (double)digits), f = j_num(v);
    if (j_str_is(how, "ceil")) {
        f = ceil(f * scale) / scale;
    } else if (j_str_is(how, "floor")) {
        f = floor(f * scale) / scale;
    } else if (j_str_is(how, "common")) {
        if (digits > 0) { /* the decimal nearest to the binary value, as Python rounds */
            char tmp[400];
            snprintf(tmp, sizeof(tmp), "%.*f", (int)digits, f);
            f = strtod(tmp, NULL);
        } else {
            f = nearbyint(f * scale) / scale;
        }
    } else {
        j_fail(r, "method must be common, ceil or floor");
    }
    return j_is_intlike(v) && j_str_is(how, "common") ? j_int((int64_t)f) : j_float(f);
}

/* ---- any value ---- */

static struct j_value f_default(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value missing;
    if (!j_arg_get(c, 0, "default_value", &missing)) {
        missing = j_string(j_cstr(""));
    }
    bool also_false = j_arg_bool(r, c, 1, "boolean", false);
    return v.kind == J_UNDEFINED || (also_false && !j_truth(v)) ? missing : v;
}

static struct j_value f_safe(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    return str_value(r, v); /* nothing is escaped by itself */
}

static struct j_value f_length(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    return j_int((int64_t)j_length(r, v));
}

static struct j_value f_attr(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_str name = j_arg_str(r, c, 0, "name", NULL);
    if (v.kind == J_DICT && !j_has_method(v, name)) {
        return j_undefined("the attribute"); /* attr looks at attributes only, not at items */
    }
    return j_get_attr(r, v, name);
}

/* ---- sequences ---- */

static struct j_value f_list(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    struct j_value out = j_new_list(r, J_LIST);
    const struct j_list *l = j_iterate(r, v);
    for (size_t i = 0; i < l->n; i++) {
        j_list_add(r, out.list, l->v[i]);
    }
    return out;
}

static struct j_value f_first(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    const struct j_list *l = j_iterate(r, v);
    return l->n > 0 ? l->v[0] : j_undefined("the first element of an empty sequence");
}

static struct j_value f_last(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    const struct j_list *l = j_iterate(r, v);
    return l->n > 0 ? l->v[l->n - 1] : j_undefined("the last element of an empty sequence");
}

static struct j_value f_join(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value sep, path;
    j_arg_get(c, 0, "d", &sep);
    bool by = j_arg_get(c, 1, "attribute", &path) && path.kind != J_NONE;
    struct j_str between = j_to_str(r, sep);
    const struct j_list *l = j_iterate(r, v);
    struct j_sb sb = {0};
    for (size_t i = 0; i < l->n; i++) {
        j_charge(r, 1);
        if (i > 0) {
            j_sb_str(r, &sb, between);
        }
        j_sb_str(r, &sb, j_to_str(r, by ? get_path(r, l->v[i], path) : l->v[i]));
    }
    return j_string(j_sb_done(&sb));
}

static struct j_value f_items(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_call none = {0};
    (void)c;
    if (v.kind == J_UNDEFINED) {
        return j_new_list(r, J_LIST);
    }
    if (v.kind != J_DICT) {
        j_fail(r, "Can only get item pairs from a mapping.");
    }
    return j_method_run(r, v, j_cstr("items"), &none);
}

static struct j_value f_reverse(struct j_render *r, struct j_value v, struct j_call *c)
{
    (void)c;
    const struct j_list *l = j_iterate(r, v);
    struct j_value out = j_new_list(r, J_LIST);
    struct j_sb sb = {0};
    for (size_t i = l->n; i > 0; i--) {
        if (v.kind == J_STR) {
            j_sb_str(r, &sb, l->v[i - 1].s);
        } else {
            j_list_add(r, out.list, l->v[i - 1]);
        }
    }
    return v.kind == J_STR ? j_string(j_sb_done(&sb)) : out;
}

/* What sort, unique, min and max compare by. */
static struct j_value sort_key(struct j_render *r, struct j_value v, const struct j_value *path,
                               bool case_sensitive)
{
    if (path != NULL) {
        v = get_path(r, v, *path);
    }
    return v.kind == J_STR && !case_sensitive ? j_string(j_change_case(r, v.s, CASE_LOWER)) : v;
}

struct keyed {
    struct j_value key, value;
};

/* Stable merge sort: comparing may fail the render, which qsort would not survive. */
static void merge_sort(struct j_render *r, struct keyed *v, struct keyed *tmp, size_t n, bool down)
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
            int c = j_compare(r, v[b].key, v[a].key);
            left = down ? c <= 0 : c >= 0;
        }
        tmp[i] = a < half && left ? v[a++] : v[b++];
    }
    memcpy(v, tmp, n * sizeof(*v));
}

static struct keyed *sorted(struct j_render *r, const struct j_list *l, const struct j_value *path,
                            bool case_sensitive, bool down)
{
    j_work(r, 2 * J_ELEMENT * l->n);
    struct keyed *v = j_alloc(&r->arena, (l->n + 1) * sizeof(*v));
    struct keyed *tmp = j_alloc(&r->arena, (l->n + 1) * sizeof(*v));
    for (size_t i = 0; i < l->n; i++) {
        v[i] = (struct keyed){sort_key(r, l->v[i], path, case_sensitive), l->v[i]};
    }
    merge_sort(r, v, tmp, l->n, down);
    return v;
}

static struct j_value f_sort(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value path;
    bool down = j_arg_bool(r, c, 0, "reverse", false);
    bool cs = j_arg_bool(r, c, 1, "case_sensitive", false);
    bool by = j_arg_get(c, 2, "attribute", &path) && path.kind != J_NONE;
    const struct j_list *l = j_iterate(r, v);
    struct keyed *order = sorted(r, l, by ? &path : NULL, cs, down);
    struct j_value out = j_new_list(r, J_LIST);
    for (size_t i = 0; i < l->n; i++) {
        j_list_add(r, out.list, order[i].value);
    }
    return out;
}

static struct j_value f_dictsort(struct j_render *r, struct j_value v, struct j_call *c)
{
    bool cs = j_arg_bool(r, c, 0, "case_sensitive", false);
    if (v.kind != J_DICT) {
        j_fail(r, "'%s' object has no attribute 'items'", j_type_name(v));
    }
    struct j_value by = j_int(j_str_is(j_arg_str(r, c, 1, "by", "key"), "value"));
    bool down = j_arg_bool(r, c, 2, "reverse", false);
    const struct j_list *l = f_items(r, v, c).list;
    struct keyed *order = sorted(r, l, &by, cs, down);
    struct j_value out = j_new_list(r, J_LIST);
    for (size_t i = 0; i < l->n; i++) {
        j_list_add(r, out.list, order[i].value);
    }
    return out;
}

static struct j_value f_unique(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value path;
    bool cs = j_arg_bool(r, c, 0, "case_sensitive", false);
    bool by = j_arg_get(c, 1, "attribute", &path) && path.kind != J_NONE;
    const struct j_list *l = j_iterate(r, v);
    struct j_value out = j_new_list(r, J_LIST), seen = j_new_dict(r);
    for (size_t i = 0; i < l->n; i++) {
        struct j_value key = sort_key(r, l->v[i], by ? &path : NULL, cs);
        if (j_dict_get(r, seen.dict, key) == NULL) {
            j_dict_set(r, seen.dict, key, j_none());
            j_list_add(r, out.list, l->v[i]);
        }
    }
    return out;
}

static struct j_value extreme(struct j_render *r, struct j_value v, struct j_call *c, int sign)
{
    struct j_value path;
    bool cs = j_arg_bool(r, c, 0, "case_sensitive", false);
    bool by = j_arg_get(c, 1, "attribute", &path) && path.kind != J_NONE;
    const struct j_list *l = j_iterate(r, v);
    if (l->n == 0) {
        return j_undefined("an element of an empty sequence");
    }
    size_t best = 0;
    struct j_value best_key = sort_key(r, l->v[0], by ? &path : NULL, cs);
    for (size_t i = 1; i < l->n; i++) {
        struct j_value key = sort_key(r, l->v[i], by ? &path : NULL, cs);
        int cmp = j_compare(r, key, best_key);
        if ((sign > 0 && cmp > 0) || (sign < 0 && cmp < 0)) {
            best = i;
            best_key = key;
        }
    }
    return l->v[best];
}

static struct j_value f_min(struct j_render *r, struct j_value v, struct j_call *c)
{
    return extreme(r, v, c, -1);
}

static struct j_value f_max(struct j_render *r, struct j_value v, struct j_call *c)
{
    return extreme(r, v, c, 1);
}

static struct j_value f_sum(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value path, total;
    bool by = j_arg_get(c, 0, "attribute", &path) && path.kind != J_NONE;
    if (!j_arg_get(c, 1, "start", &total)) {
        total = j_int(0);
    }
    const struct j_list *l = j_iterate(r, v);
    for (size_t i = 0; i < l->n; i++) {
        total = j_binary(r, OP_ADD, total, by ? get_path(r, l->v[i], path) : l->v[i]);
    }
    return total;
}

/* The call that is left when the first `skip` positional arguments are taken. */
static struct j_call rest_of(const struct j_call *c, size_t skip)
{
    struct j_call rest = *c;
    skip = BT_MIN(skip, c->n);
    if (skip > 0) { /* without arguments v is NULL */
        rest.v += skip;
        rest.n -= skip;
    }
    return rest;
}

static struct j_value f_map(struct j_render *r, struct j_value v, struct j_call *c)
{
    const struct j_value *path = j_dict_get_str(&c->named, j_cstr("attribute"));
    const struct j_value *missing = j_dict_get_str(&c->named, j_cstr("default"));
    if (!j_truth(v)) { /* as Jinja does: none and undefined have no elements */
        return j_new_list(r, J_LIST);
    }
    const struct j_list *l = j_iterate(r, v);
    struct j_value out = j_new_list(r, J_LIST);
    int fn = -1;
    if (path == NULL || c->n > 0) {
        path = NULL;
        fn = c->n > 0 && c->v[0].kind == J_STR ? j_filter_find(c->v[0].s) : -1;
        if (fn < 0) {
            j_fail(r, "map needs the name of a filter, or attribute=");
        }
    }
    struct j_call rest = rest_of(c, 1);
    for (size_t i = 0; i < l->n; i++) {
        j_charge(r, 1);
        struct j_value item =
            path != NULL ? get_path(r, l->v[i], *path) : j_filter_run(r, fn, l->v[i], &rest);
        if (path != NULL && missing != NULL && item.kind == J_UNDEFINED) {
            item = *missing;
        }
        j_list_add(r, out.list, item);
    }
    return out;
}

/* select, reject and the two that look at an attribute. */
static struct j_value select_items(struct j_render *r, struct j_value v, struct j_call *c,
                                   bool want, bool by_attr)
{
    size_t at = by_attr ? 1 : 0;
    if (!j_truth(v)) { /* as Jinja does: none and undefined have no elements */
        return j_new_list(r, J_LIST);
    }
    if (by_attr && c->n == 0) {
        j_fail(r, "selectattr and rejectattr need the name of an attribute");
    }
    int fn = -1;
    if (c->n > at) {
        fn = c->v[at].kind == J_STR ? j_test_find(c->v[at].s) : -1;
        if (fn < 0) {
            j_fail(r, "No test named '%.*s'.", (int)BT_MIN(j_to_str(r, c->v[at]).n, (size_t)60),
                   j_to_str(r, c->v[at]).p);
        }
    }
    struct j_call rest = rest_of(c, at + 1);
    const struct j_list *l = j_iterate(r, v);
    struct j_value out = j_new_list(r, J_LIST);
    for (size_t i = 0; i < l->n; i++) {
        j_charge(r, 1);
        struct j_value item = by_attr ? get_path(r, l->v[i], c->v[0]) : l->v[i];
        if ((fn < 0 ? j_truth(item) : j_test_run(r, fn, item, &rest)) == want) {
            j_list_add(r, out.list, l->v[i]);
        }
    }
    return out;
}

static struct j_value f_select(struct j_render *r, struct j_value v, struct j_call *c)
{
    return select_items(r, v, c, true, false);
}

static struct j_value f_reject(struct j_render *r, struct j_value v, struct j_call *c)
{
    return select_items(r, v, c, false, false);
}

static struct j_value f_selectattr(struct j_render *r, struct j_value v, struct j_call *c)
{
    return select_items(r, v, c, true, true);
}

static struct j_value f_rejectattr(struct j_render *r, struct j_value v, struct j_call *c)
{
    return select_items(r, v, c, false, true);
}

static struct j_value f_groupby(struct j_render *r, struct j_value v, struct j_call *c)
{
    struct j_value path;
    bool cs = j_arg_bool(r, c, 2, "case_sensitive", false);
    if (!j_arg_get(c, 0, "attribute", &path)) {
        j_fail(r, "groupby needs an attribute");
    }
    const struct j_list *l = j_iterate(r, v);
    struct keyed *order = sorted(r, l, &path, cs, false);
    struct j_value out = j_new_list(r, J_LIST), group = j_none();
    for (size_t i = 0; i < l->n; i++) {
        if (i == 0 || !j_equal(r, order[i].key, order[i - 1].key)) {
            struct j_value pair = j_new_list(r, J_TUPLE);
            group = j_new_list(r, J_LIST);
            j_list_add(r, pair.list, get_path(r, order[i].value, path));
            j_list_add(r, pair.list, group);
            j_list_add(r, out.list, pair);
        }
        j_list_add(r, group.list, order[i].value);
    }
    return out;
}

static struct j_value f_batch(struct j_render *r, struct j_value v, struct j_call *c)
{
    int64_t size = j_arg_int(r, c, 0, "linecount", 0);
    struct j_value fill;
    bool filled = j_arg_get(c, 1, "fill_with", &fill) && fill.kind != J_NONE;
    if (size <= 0 || size > J_RANGE_MAX) {
        j_fail(r, "batch needs a size of 1 to %d", J_RANGE_MAX);
    }
    const struct j_list *l = j_iterate(r, v);
    struct j_value out = j_new_list(r, J_LIST), row = j_none();
    for (size_t i = 0; i < l->n; i++) {
        if (i % (size_t)size == 0) {
            row = j_new_list(r, J_LIST);
            j_list_add(r, out.list, row);
        }
        j_list_add(r, row.list, l->v[i]);
    }
    while (filled && l->n > 0 && row.list->n < (size_t)size) {
        j_list_add(r, row.list, fill);
    }
    return out;
}

static const struct {
    const char *name;
    filter_fn run;
    enum j_cost cost;
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

const char *j_filter_name(size_t i)
{
    return i < BT_ARRAY_LEN(filters) ? filters[i].name : NULL;
}

int j_filter_find(struct j_str name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(filters); i++) {
        if (j_str_is(name, filters[i].name)) {
            return (int)i;
        }
    }
    return -1;
}

struct j_value j_filter_run(struct j_render *r, int fn, struct j_value v, struct j_call *c)
{
    j_enter(r);
    j_charge_call(r, filters[fn].cost, v, c);
    struct j_value out = filters[fn].run(r, v, c);
    j_leave(r);
    return out;
}
