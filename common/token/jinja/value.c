/* Values of the template interpreter: makes, compares and walks them as Python does. All memory is
 * in the render's arena. */
#include <math.h>
#include <string.h>

#include "common/token/jinja/jinja.h"
#include "common/token/token_priv.h"

struct bt_j_value bt_j_undefined(const char *name)
{
    return (struct bt_j_value){.kind = J_UNDEFINED, .s = j_cstr(name)};
}

struct bt_j_value bt_j_none(void)
{
    return (struct bt_j_value){.kind = J_NONE};
}

struct bt_j_value bt_j_bool(bool b)
{
    return (struct bt_j_value){.kind = J_BOOL, .b = b};
}

struct bt_j_value bt_j_int(int64_t i)
{
    return (struct bt_j_value){.kind = J_INT, .i = i};
}

struct bt_j_value bt_j_float(double f)
{
    return (struct bt_j_value){.kind = J_FLOAT, .f = f};
}

struct bt_j_value bt_j_string(struct bt_j_str s)
{
    return (struct bt_j_value){.kind = J_STR, .s = s};
}

struct bt_j_value bt_j_new_list(struct bt_j_render *r, enum bt_j_kind kind)
{
    return (struct bt_j_value){.kind = kind,
                               .list = bt_j_alloc(&r->arena, sizeof(struct bt_j_list))};
}

struct bt_j_value bt_j_new_dict(struct bt_j_render *r)
{
    return (struct bt_j_value){.kind = J_DICT,
                               .dict = bt_j_alloc(&r->arena, sizeof(struct bt_j_dict))};
}

void bt_j_list_add(struct bt_j_render *r, struct bt_j_list *l, struct bt_j_value v)
{
    l->v = bt_j_grow(&r->arena, l->v, l->n, &l->cap, sizeof(v));
    l->v[l->n++] = v;
}

struct bt_j_value bt_j_from_json(struct bt_j_render *r, const json_t *j)
{
    struct bt_j_value v = bt_j_none();
    bt_j_enter(r);
    j_charge(r, 1);
    switch (json_typeof(j)) {
    case JSON_OBJECT: {
        v = bt_j_new_dict(r);
        const char *key;
        json_t *value;
        json_object_foreach((json_t *)j, key, value)
        {
            bt_j_dict_set(r, v.dict, bt_j_string(j_cstr(key)), bt_j_from_json(r, value));
        }
        break;
    }
    case JSON_ARRAY:
        v = bt_j_new_list(r, J_LIST);
        for (size_t i = 0; i < json_array_size(j); i++) {
            bt_j_list_add(r, v.list, bt_j_from_json(r, json_array_get(j, i)));
        }
        break;
    case JSON_STRING:
        v = bt_j_string((struct bt_j_str){json_string_value(j), json_string_length(j)});
        break;
    case JSON_INTEGER: v = bt_j_int(json_integer_value(j)); break;
    case JSON_REAL: v = bt_j_float(json_real_value(j)); break;
    case JSON_TRUE: v = bt_j_bool(true); break;
    case JSON_FALSE: v = bt_j_bool(false); break;
    case JSON_NULL: break;
    }
    bt_j_leave(r);
    return v;
}

bool bt_j_truth(struct bt_j_value v)
{
    switch (v.kind) {
    case J_UNDEFINED:
    case J_NONE: return false;
    case J_BOOL: return v.b;
    case J_INT: return v.i != 0;
    case J_FLOAT: return v.f != 0;
    case J_STR: return v.s.n > 0;
    case J_LIST:
    case J_TUPLE: return v.list->n > 0;
    case J_DICT: return v.dict->n > 0;
    case J_NAMESPACE:
    case J_LOOP:
    case J_MACRO:
    case J_METHOD:
    case J_GLOBAL: break;
    }
    return true;
}

const char *bt_j_type_name(struct bt_j_value v)
{
    static const char *const names[] = {[J_UNDEFINED] = "Undefined", [J_NONE] = "NoneType",
                                        [J_BOOL] = "bool",           [J_INT] = "int",
                                        [J_FLOAT] = "float",         [J_STR] = "str",
                                        [J_LIST] = "list",           [J_TUPLE] = "tuple",
                                        [J_DICT] = "dict",           [J_NAMESPACE] = "Namespace",
                                        [J_LOOP] = "LoopContext",    [J_MACRO] = "Macro",
                                        [J_METHOD] = "method",       [J_GLOBAL] = "function"};
    return names[v.kind];
}

bool bt_j_is_intlike(struct bt_j_value v)
{
    return v.kind == J_INT || v.kind == J_BOOL;
}

int64_t bt_j_as_int(struct bt_j_value v)
{
    return v.kind == J_BOOL ? v.b : v.i;
}

bool bt_j_is_num(struct bt_j_value v)
{
    return bt_j_is_intlike(v) || v.kind == J_FLOAT;
}

double bt_j_num(struct bt_j_value v)
{
    return v.kind == J_FLOAT ? v.f : (double)bt_j_as_int(v);
}

static bool lists_equal(struct bt_j_render *r, const struct bt_j_list *a, const struct bt_j_list *b)
{
    if (a->n != b->n) {
        return false;
    }
    for (size_t i = 0; i < a->n; i++) {
        if (!bt_j_equal(r, a->v[i], b->v[i])) {
            return false;
        }
    }
    return true;
}

static bool dicts_equal(struct bt_j_render *r, const struct bt_j_dict *a, const struct bt_j_dict *b)
{
    if (a->n != b->n) {
        return false;
    }
    for (size_t i = 0; i < a->n; i++) {
        const struct bt_j_value *other = bt_j_dict_get(r, b, a->v[i].key);
        if (other == NULL || !bt_j_equal(r, a->v[i].value, *other)) {
            return false;
        }
    }
    return true;
}

bool bt_j_equal(struct bt_j_render *r, struct bt_j_value a, struct bt_j_value b)
{
    j_charge(r, 1);
    if (bt_j_is_num(a) && bt_j_is_num(b)) {
        return bt_j_is_intlike(a) && bt_j_is_intlike(b) ? bt_j_as_int(a) == bt_j_as_int(b)
                                                        : bt_j_num(a) == bt_j_num(b);
    }
    if (a.kind != b.kind) {
        return false;
    }
    bool same = false;
    bt_j_enter(r);
    switch (a.kind) {
    case J_UNDEFINED:
    case J_NONE: same = true; break;
    case J_STR:
        j_work(r, a.s.n == b.s.n ? a.s.n : 0);
        same = bt_j_str_eq(a.s, b.s);
        break;
    case J_LIST:
    case J_TUPLE: same = a.list == b.list || lists_equal(r, a.list, b.list); break;
    case J_DICT: same = a.dict == b.dict || dicts_equal(r, a.dict, b.dict); break;
    case J_NAMESPACE: same = a.dict == b.dict; break;
    case J_LOOP: same = a.loop == b.loop; break;
    case J_MACRO: same = a.macro == b.macro; break;
    case J_METHOD: same = a.method == b.method; break;
    case J_GLOBAL: same = a.global == b.global; break;
    case J_BOOL:
    case J_INT:
    case J_FLOAT: break;
    }
    bt_j_leave(r);
    return same;
}

/* Compares in pieces, so that only the compared part counts as work. */
static int compare_str(struct bt_j_render *r, struct bt_j_str a, struct bt_j_str b)
{
    size_t n = BT_MIN(a.n, b.n), piece;
    for (size_t at = 0; at < n; at += piece) {
        piece = BT_MIN(n - at, (size_t)1024);
        j_work(r, piece);
        int c = memcmp(a.p + at, b.p + at, piece);
        if (c != 0) {
            return c;
        }
    }
    return (a.n > b.n) - (a.n < b.n);
}

int bt_j_compare(struct bt_j_render *r, struct bt_j_value a, struct bt_j_value b)
{
    j_charge(r, 1);
    if (bt_j_is_intlike(a) && bt_j_is_intlike(b)) {
        return (bt_j_as_int(a) > bt_j_as_int(b)) - (bt_j_as_int(a) < bt_j_as_int(b));
    }
    if (bt_j_is_num(a) && bt_j_is_num(b)) {
        return (bt_j_num(a) > bt_j_num(b)) - (bt_j_num(a) < bt_j_num(b));
    }
    if (a.kind == J_STR && b.kind == J_STR) {
        return compare_str(r, a.s, b.s);
    }
    if (a.kind == b.kind && (a.kind == J_LIST || a.kind == J_TUPLE)) {
        for (size_t i = 0; i < a.list->n && i < b.list->n; i++) {
            if (!bt_j_equal(r, a.list->v[i], b.list->v[i])) {
                return bt_j_compare(r, a.list->v[i], b.list->v[i]);
            }
        }
        return (a.list->n > b.list->n) - (a.list->n < b.list->n);
    }
    bt_j_fail(r, "'<' not supported between instances of '%s' and '%s'", bt_j_type_name(a),
              bt_j_type_name(b));
}

bool bt_j_contains(struct bt_j_render *r, struct bt_j_value in, struct bt_j_value what)
{
    switch (in.kind) {
    case J_UNDEFINED: return false;
    case J_STR:
        if (what.kind != J_STR) {
            bt_j_fail(r, "'in <string>' requires string as left operand, not %s",
                      bt_j_type_name(what));
        }
        return bt_j_find(r, in.s, what.s, 0) != SIZE_MAX;
    case J_DICT: return bt_j_dict_get(r, in.dict, what) != NULL;
    case J_LIST:
    case J_TUPLE:
        for (size_t i = 0; i < in.list->n; i++) {
            if (bt_j_equal(r, in.list->v[i], what)) {
                return true;
            }
        }
        return false;
    case J_NONE:
    case J_BOOL:
    case J_INT:
    case J_FLOAT:
    case J_NAMESPACE:
    case J_LOOP:
    case J_MACRO:
    case J_METHOD:
    case J_GLOBAL: break;
    }
    bt_j_fail(r, "argument of type '%s' is not iterable", bt_j_type_name(in));
}

struct bt_j_list *bt_j_iterate(struct bt_j_render *r, struct bt_j_value v)
{
    struct bt_j_value out;
    switch (v.kind) {
    case J_LIST:
    case J_TUPLE: return v.list;
    case J_UNDEFINED: return bt_j_new_list(r, J_LIST).list;
    case J_DICT:
        out = bt_j_new_list(r, J_LIST);
        j_work(r, v.dict->n * J_ELEMENT);
        for (size_t i = 0; i < v.dict->n; i++) {
            bt_j_list_add(r, out.list, v.dict->v[i].key);
        }
        return out.list;
    case J_STR:
        out = bt_j_new_list(r, J_LIST);
        j_charge(r, v.s.n);
        for (size_t i = 0; i < v.s.n;) {
            uint32_t cp;
            size_t k = bt_utf8_decode(v.s.p + i, v.s.p + v.s.n, &cp);
            k = k == 0 ? 1 : k;
            bt_j_list_add(r, out.list, bt_j_string((struct bt_j_str){v.s.p + i, k}));
            i += k;
        }
        return out.list;
    case J_NONE:
    case J_BOOL:
    case J_INT:
    case J_FLOAT:
    case J_NAMESPACE:
    case J_LOOP:
    case J_MACRO:
    case J_METHOD:
    case J_GLOBAL: break;
    }
    bt_j_fail(r, "'%s' object is not iterable", bt_j_type_name(v));
}

size_t bt_j_length(struct bt_j_render *r, struct bt_j_value v)
{
    switch (v.kind) {
    case J_UNDEFINED: return 0;
    case J_STR: j_work(r, v.s.n); return bt_j_str_chars(v.s);
    case J_LIST:
    case J_TUPLE: return v.list->n;
    case J_DICT: return v.dict->n;
    case J_LOOP: return v.loop->items->n;
    case J_NONE:
    case J_BOOL:
    case J_INT:
    case J_FLOAT:
    case J_NAMESPACE:
    case J_MACRO:
    case J_METHOD:
    case J_GLOBAL: break;
    }
    bt_j_fail(r, "object of type '%s' has no len()", bt_j_type_name(v));
}

/* Characters that repr() does not escape: an approximation beyond Latin-1. */
static bool printable(uint32_t cp)
{
    return (cp >= 0x20 && cp < 0x7f) ||
           (cp > 0xa0 && cp != 0xad && cp != 0x1680 && !(cp >= 0x2000 && cp <= 0x200f) &&
            !(cp >= 0x2028 && cp <= 0x202f) && !(cp >= 0x205f && cp <= 0x206f) && cp != 0x3000 &&
            !(cp >= 0xd800 && cp <= 0xf8ff) && cp != 0xfeff);
}

static void repr_str(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_str s)
{
    bool single = memchr(s.n == 0 ? "" : s.p, '\'', s.n) != NULL;
    bool dbl = memchr(s.n == 0 ? "" : s.p, '"', s.n) != NULL;
    char quote = single && !dbl ? '"' : '\'';
    j_work(r, s.n);
    bt_j_sb_put(r, sb, &quote, 1);
    for (size_t i = 0; i < s.n;) {
        uint32_t cp = 0;
        char tmp[16];
        size_t k = bt_utf8_decode(s.p + i, s.p + s.n, &cp);
        k = k == 0 ? 1 : k;
        if (cp == '\n' || cp == '\r' || cp == '\t') {
            bt_j_sb_puts(r, sb, cp == '\n' ? "\\n" : cp == '\r' ? "\\r" : "\\t");
        } else if (cp == '\\' || cp == (uint8_t)quote) {
            tmp[0] = '\\';
            tmp[1] = (char)cp;
            bt_j_sb_put(r, sb, tmp, 2);
        } else if (printable(cp)) {
            bt_j_sb_put(r, sb, s.p + i, k);
        } else {
            snprintf(tmp, sizeof(tmp),
                     cp < 0x100     ? "\\x%02x"
                     : cp < 0x10000 ? "\\u%04x"
                                    : "\\U%08x",
                     cp);
            bt_j_sb_puts(r, sb, tmp);
        }
        i += k;
    }
    bt_j_sb_put(r, sb, &quote, 1);
}

static void repr_list(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_value v)
{
    bt_j_sb_puts(r, sb, v.kind == J_LIST ? "[" : "(");
    for (size_t i = 0; i < v.list->n; i++) {
        bt_j_sb_puts(r, sb, i > 0 ? ", " : "");
        bt_j_repr(r, sb, v.list->v[i]);
    }
    bt_j_sb_puts(r, sb, v.kind == J_LIST ? "]" : v.list->n == 1 ? ",)" : ")");
}

void bt_j_repr(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_value v)
{
    char tmp[64];
    bt_j_enter(r);
    switch (v.kind) {
    case J_UNDEFINED: bt_j_sb_puts(r, sb, "Undefined"); break;
    case J_NONE: bt_j_sb_puts(r, sb, "None"); break;
    case J_BOOL: bt_j_sb_puts(r, sb, v.b ? "True" : "False"); break;
    case J_INT:
        snprintf(tmp, sizeof(tmp), "%lld", (long long)v.i);
        bt_j_sb_puts(r, sb, tmp);
        break;
    case J_FLOAT:
        j_work(r, J_FLOAT_WORK);
        bt_j_float_repr(v.f, tmp);
        bt_j_sb_puts(r, sb, tmp);
        break;
    case J_STR: repr_str(r, sb, v.s); break;
    case J_LIST:
    case J_TUPLE: repr_list(r, sb, v); break;
    case J_DICT:
    case J_NAMESPACE:
        bt_j_sb_puts(r, sb, v.kind == J_DICT ? "{" : "<Namespace {");
        for (size_t i = 0; i < v.dict->n; i++) {
            bt_j_sb_puts(r, sb, i > 0 ? ", " : "");
            bt_j_repr(r, sb, v.dict->v[i].key);
            bt_j_sb_puts(r, sb, ": ");
            bt_j_repr(r, sb, v.dict->v[i].value);
        }
        bt_j_sb_puts(r, sb, v.kind == J_DICT ? "}" : "}>");
        break;
    case J_LOOP:
    case J_MACRO:
    case J_METHOD:
    case J_GLOBAL: bt_j_fail(r, "a %s cannot be printed", bt_j_type_name(v));
    }
    bt_j_leave(r);
}

struct bt_j_str bt_j_to_str(struct bt_j_render *r, struct bt_j_value v)
{
    if (v.kind == J_STR) {
        return v.s;
    }
    if (v.kind == J_UNDEFINED) {
        return j_cstr("");
    }
    struct bt_j_sb sb = {0};
    bt_j_repr(r, &sb, v);
    return bt_j_sb_done(&sb);
}
