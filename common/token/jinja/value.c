/* Values of the template interpreter: making, comparing and walking them as Python does. All memory
 * is the render's arena. */
#include <math.h>
#include <string.h>

#include "common/token/jinja/jinja.h"
#include "common/token/token_priv.h"

struct j_value j_undefined(const char *name)
{
    return (struct j_value){.kind = J_UNDEFINED, .s = j_cstr(name)};
}

struct j_value j_none(void)
{
    return (struct j_value){.kind = J_NONE};
}

struct j_value j_bool(bool b)
{
    return (struct j_value){.kind = J_BOOL, .b = b};
}

struct j_value j_int(int64_t i)
{
    return (struct j_value){.kind = J_INT, .i = i};
}

struct j_value j_float(double f)
{
    return (struct j_value){.kind = J_FLOAT, .f = f};
}

struct j_value j_string(struct j_str s)
{
    return (struct j_value){.kind = J_STR, .s = s};
}

struct j_value j_new_list(struct j_render *r, enum j_kind kind)
{
    return (struct j_value){.kind = kind, .list = j_alloc(&r->arena, sizeof(struct j_list))};
}

struct j_value j_new_dict(struct j_render *r)
{
    return (struct j_value){.kind = J_DICT, .dict = j_alloc(&r->arena, sizeof(struct j_dict))};
}

void j_list_add(struct j_render *r, struct j_list *l, struct j_value v)
{
    l->v = j_grow(&r->arena, l->v, l->n, &l->cap, sizeof(v));
    l->v[l->n++] = v;
}

struct j_value j_from_json(struct j_render *r, const json_t *j)
{
    struct j_value v = j_none();
    j_enter(r);
    j_charge(r, 1);
    switch (json_typeof(j)) {
    case JSON_OBJECT: {
        v = j_new_dict(r);
        const char *key;
        json_t *value;
        json_object_foreach((json_t *)j, key, value)
        {
            j_dict_set(r, v.dict, j_string(j_cstr(key)), j_from_json(r, value));
        }
        break;
    }
    case JSON_ARRAY:
        v = j_new_list(r, J_LIST);
        for (size_t i = 0; i < json_array_size(j); i++) {
            j_list_add(r, v.list, j_from_json(r, json_array_get(j, i)));
        }
        break;
    case JSON_STRING:
        v = j_string((struct j_str){json_string_value(j), json_string_length(j)});
        break;
    case JSON_INTEGER: v = j_int(json_integer_value(j)); break;
    case JSON_REAL: v = j_float(json_real_value(j)); break;
    case JSON_TRUE: v = j_bool(true); break;
    case JSON_FALSE: v = j_bool(false); break;
    case JSON_NULL: break;
    }
    j_leave(r);
    return v;
}

bool j_truth(struct j_value v)
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

const char *j_type_name(struct j_value v)
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

bool j_is_intlike(struct j_value v)
{
    return v.kind == J_INT || v.kind == J_BOOL;
}

int64_t j_as_int(struct j_value v)
{
    return v.kind == J_BOOL ? v.b : v.i;
}

bool j_is_num(struct j_value v)
{
    return j_is_intlike(v) || v.kind == J_FLOAT;
}

double j_num(struct j_value v)
{
    return v.kind == J_FLOAT ? v.f : (double)j_as_int(v);
}

static bool lists_equal(struct j_render *r, const struct j_list *a, const struct j_list *b)
{
    if (a->n != b->n) {
        return false;
    }
    for (size_t i = 0; i < a->n; i++) {
        if (!j_equal(r, a->v[i], b->v[i])) {
            return false;
        }
    }
    return true;
}

static bool dicts_equal(struct j_render *r, const struct j_dict *a, const struct j_dict *b)
{
    if (a->n != b->n) {
        return false;
    }
    for (size_t i = 0; i < a->n; i++) {
        const struct j_value *other = j_dict_get(r, b, a->v[i].key);
        if (other == NULL || !j_equal(r, a->v[i].value, *other)) {
            return false;
        }
    }
    return true;
}

bool j_equal(struct j_render *r, struct j_value a, struct j_value b)
{
    j_charge(r, 1);
    if (j_is_num(a) && j_is_num(b)) {
        return j_is_intlike(a) && j_is_intlike(b) ? j_as_int(a) == j_as_int(b)
                                                  : j_num(a) == j_num(b);
    }
    if (a.kind != b.kind) {
        return false;
    }
    bool same = false;
    j_enter(r);
    switch (a.kind) {
    case J_UNDEFINED:
    case J_NONE: same = true; break;
    case J_STR:
        j_work(r, a.s.n == b.s.n ? a.s.n : 0);
        same = j_str_eq(a.s, b.s);
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
    j_leave(r);
    return same;
}

/* Piece by piece, so that only what is compared is charged. */
static int compare_str(struct j_render *r, struct j_str a, struct j_str b)
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

int j_compare(struct j_render *r, struct j_value a, struct j_value b)
{
    j_charge(r, 1);
    if (j_is_intlike(a) && j_is_intlike(b)) {
        return (j_as_int(a) > j_as_int(b)) - (j_as_int(a) < j_as_int(b));
    }
    if (j_is_num(a) && j_is_num(b)) {
        return (j_num(a) > j_num(b)) - (j_num(a) < j_num(b));
    }
    if (a.kind == J_STR && b.kind == J_STR) {
        return compare_str(r, a.s, b.s);
    }
    if (a.kind == b.kind && (a.kind == J_LIST || a.kind == J_TUPLE)) {
        for (size_t i = 0; i < a.list->n && i < b.list->n; i++) {
            if (!j_equal(r, a.list->v[i], b.list->v[i])) {
                return j_compare(r, a.list->v[i], b.list->v[i]);
            }
        }
        return (a.list->n > b.list->n) - (a.list->n < b.list->n);
    }
    j_fail(r, "'<' not supported between instances of '%s' and '%s'", j_type_name(a),
           j_type_name(b));
}

bool j_contains(struct j_render *r, struct j_value in, struct j_value what)
{
    switch (in.kind) {
    case J_UNDEFINED: return false;
    case J_STR:
        if (what.kind != J_STR) {
            j_fail(r, "'in <string>' requires string as left operand, not %s", j_type_name(what));
        }
        return j_find(r, in.s, what.s, 0) != SIZE_MAX;
    case J_DICT: return j_dict_get(r, in.dict, what) != NULL;
    case J_LIST:
    case J_TUPLE:
        for (size_t i = 0; i < in.list->n; i++) {
            if (j_equal(r, in.list->v[i], what)) {
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
    j_fail(r, "argument of type '%s' is not iterable", j_type_name(in));
}

struct j_list *j_iterate(struct j_render *r, struct j_value v)
{
    struct j_value out;
    switch (v.kind) {
    case J_LIST:
    case J_TUPLE: return v.list;
    case J_UNDEFINED: return j_new_list(r, J_LIST).list;
    case J_DICT:
        out = j_new_list(r, J_LIST);
        j_work(r, v.dict->n * J_ELEMENT);
        for (size_t i = 0; i < v.dict->n; i++) {
            j_list_add(r, out.list, v.dict->v[i].key);
        }
        return out.list;
    case J_STR:
        out = j_new_list(r, J_LIST);
        j_charge(r, v.s.n);
        for (size_t i = 0; i < v.s.n;) {
            uint32_t cp;
            size_t k = bt_utf8_decode(v.s.p + i, v.s.p + v.s.n, &cp);
            k = k == 0 ? 1 : k;
            j_list_add(r, out.list, j_string((struct j_str){v.s.p + i, k}));
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
    j_fail(r, "'%s' object is not iterable", j_type_name(v));
}

size_t j_length(struct j_render *r, struct j_value v)
{
    switch (v.kind) {
    case J_UNDEFINED: return 0;
    case J_STR: j_work(r, v.s.n); return j_str_chars(v.s);
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
    j_fail(r, "object of type '%s' has no len()", j_type_name(v));
}

/* Characters that repr() shows as they are: an approximation beyond Latin-1. */
static bool printable(uint32_t cp)
{
    return (cp >= 0x20 && cp < 0x7f) ||
           (cp > 0xa0 && cp != 0xad && cp != 0x1680 && !(cp >= 0x2000 && cp <= 0x200f) &&
            !(cp >= 0x2028 && cp <= 0x202f) && !(cp >= 0x205f && cp <= 0x206f) && cp != 0x3000 &&
            !(cp >= 0xd800 && cp <= 0xf8ff) && cp != 0xfeff);
}

static void repr_str(struct j_render *r, struct j_sb *sb, struct j_str s)
{
    bool single = memchr(s.n == 0 ? "" : s.p, '\'', s.n) != NULL;
    bool dbl = memchr(s.n == 0 ? "" : s.p, '"', s.n) != NULL;
    char quote = single && !dbl ? '"' : '\'';
    j_work(r, s.n);
    j_sb_put(r, sb, &quote, 1);
    for (size_t i = 0; i < s.n;) {
        uint32_t cp = 0;
        char tmp[16];
        size_t k = bt_utf8_decode(s.p + i, s.p + s.n, &cp);
        k = k == 0 ? 1 : k;
        if (cp == '\n' || cp == '\r' || cp == '\t') {
            j_sb_puts(r, sb, cp == '\n' ? "\\n" : cp == '\r' ? "\\r" : "\\t");
        } else if (cp == '\\' || cp == (uint8_t)quote) {
            tmp[0] = '\\';
            tmp[1] = (char)cp;
            j_sb_put(r, sb, tmp, 2);
        } else if (printable(cp)) {
            j_sb_put(r, sb, s.p + i, k);
        } else {
            snprintf(tmp, sizeof(tmp),
                     cp < 0x100     ? "\\x%02x"
                     : cp < 0x10000 ? "\\u%04x"
                                    : "\\U%08x",
                     cp);
            j_sb_puts(r, sb, tmp);
        }
        i += k;
    }
    j_sb_put(r, sb, &quote, 1);
}

static void repr_list(struct j_render *r, struct j_sb *sb, struct j_value v)
{
    j_sb_puts(r, sb, v.kind == J_LIST ? "[" : "(");
    for (size_t i = 0; i < v.list->n; i++) {
        j_sb_puts(r, sb, i > 0 ? ", " : "");
        j_repr(r, sb, v.list->v[i]);
    }
    j_sb_puts(r, sb, v.kind == J_LIST ? "]" : v.list->n == 1 ? ",)" : ")");
}

void j_repr(struct j_render *r, struct j_sb *sb, struct j_value v)
{
    char tmp[64];
    j_enter(r);
    switch (v.kind) {
    case J_UNDEFINED: j_sb_puts(r, sb, "Undefined"); break;
    case J_NONE: j_sb_puts(r, sb, "None"); break;
    case J_BOOL: j_sb_puts(r, sb, v.b ? "True" : "False"); break;
    case J_INT:
        snprintf(tmp, sizeof(tmp), "%lld", (long long)v.i);
        j_sb_puts(r, sb, tmp);
        break;
    case J_FLOAT:
        j_work(r, J_FLOAT_WORK);
        j_float_repr(v.f, tmp);
        j_sb_puts(r, sb, tmp);
        break;
    case J_STR: repr_str(r, sb, v.s); break;
    case J_LIST:
    case J_TUPLE: repr_list(r, sb, v); break;
    case J_DICT:
    case J_NAMESPACE:
        j_sb_puts(r, sb, v.kind == J_DICT ? "{" : "<Namespace {");
        for (size_t i = 0; i < v.dict->n; i++) {
            j_sb_puts(r, sb, i > 0 ? ", " : "");
            j_repr(r, sb, v.dict->v[i].key);
            j_sb_puts(r, sb, ": ");
            j_repr(r, sb, v.dict->v[i].value);
        }
        j_sb_puts(r, sb, v.kind == J_DICT ? "}" : "}>");
        break;
    case J_LOOP:
    case J_MACRO:
    case J_METHOD:
    case J_GLOBAL: j_fail(r, "a %s cannot be printed", j_type_name(v));
    }
    j_leave(r);
}

struct j_str j_to_str(struct j_render *r, struct j_value v)
{
    if (v.kind == J_STR) {
        return v.s;
    }
    if (v.kind == J_UNDEFINED) {
        return j_cstr("");
    }
    struct j_sb sb = {0};
    j_repr(r, &sb, v);
    return j_sb_done(&sb);
}
