/* Tests ("is ...") and the methods of str, list and dict that templates call. Methods that change a
 * dict in place, or need more of Python, are refused by name. */
#include <string.h>

#include "common/token/jinja/jinja.h"
#include "common/token/token_priv.h"

/* ---- tests ---- */

static bool t_compare(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c,
                      enum bt_j_op op)
{
    struct bt_j_value o;
    if (!bt_j_arg_get(c, 0, NULL, &o)) {
        bt_j_fail(r, "the test needs an argument");
    }
    if (op == OP_EQ || op == OP_NE) {
        return bt_j_equal(r, v, o) == (op == OP_EQ);
    }
    if (op == OP_IN) {
        return bt_j_contains(r, o, v);
    }
    int cmp = bt_j_compare(r, v, o);
    return op == OP_LT ? cmp < 0 : op == OP_LE ? cmp <= 0 : op == OP_GT ? cmp > 0 : cmp >= 0;
}

static int64_t need_int(struct bt_j_render *r, struct bt_j_value v)
{
    if (!bt_j_is_intlike(v)) {
        bt_j_fail(r, "the test needs an integer, not %s", bt_j_type_name(v));
    }
    return bt_j_as_int(v);
}

enum test {
    IS_BOOLEAN,
    IS_CALLABLE,
    IS_DEFINED,
    IS_DIVISIBLE,
    IS_EQ,
    IS_EVEN,
    IS_FALSE,
    IS_FILTER,
    IS_FLOAT,
    IS_GE,
    IS_GT,
    IS_IN,
    IS_INTEGER,
    IS_ITERABLE,
    IS_LE,
    IS_LOWER,
    IS_LT,
    IS_MAPPING,
    IS_NE,
    IS_NONE,
    IS_NUMBER,
    IS_ODD,
    IS_SAMEAS,
    IS_SEQUENCE,
    IS_STRING,
    IS_TEST,
    IS_TRUE,
    IS_UNDEFINED,
    IS_UPPER,
};

static const struct {
    const char *name;
    enum test test;
    enum bt_j_cost cost;
} tests[] = {
    {"boolean", IS_BOOLEAN, COST_FLAT},
    {"callable", IS_CALLABLE, COST_FLAT},
    {"defined", IS_DEFINED, COST_FLAT},
    {"divisibleby", IS_DIVISIBLE, COST_FLAT},
    {"eq", IS_EQ, COST_FLAT},
    {"equalto", IS_EQ, COST_FLAT},
    {"==", IS_EQ, COST_FLAT},
    {"even", IS_EVEN, COST_FLAT},
    {"false", IS_FALSE, COST_FLAT},
    {"filter", IS_FILTER, COST_FLAT},
    {"float", IS_FLOAT, COST_FLAT},
    {"ge", IS_GE, COST_FLAT},
    {">=", IS_GE, COST_FLAT},
    {"gt", IS_GT, COST_FLAT},
    {"greaterthan", IS_GT, COST_FLAT},
    {">", IS_GT, COST_FLAT},
    {"in", IS_IN, COST_FLAT},
    {"integer", IS_INTEGER, COST_FLAT},
    {"iterable", IS_ITERABLE, COST_FLAT},
    {"le", IS_LE, COST_FLAT},
    {"<=", IS_LE, COST_FLAT},
    {"lower", IS_LOWER, COST_FLAT},
    {"lt", IS_LT, COST_FLAT},
    {"lessthan", IS_LT, COST_FLAT},
    {"<", IS_LT, COST_FLAT},
    {"mapping", IS_MAPPING, COST_FLAT},
    {"ne", IS_NE, COST_FLAT},
    {"!=", IS_NE, COST_FLAT},
    {"none", IS_NONE, COST_FLAT},
    {"number", IS_NUMBER, COST_FLAT},
    {"odd", IS_ODD, COST_FLAT},
    {"sameas", IS_SAMEAS, COST_FLAT},
    {"sequence", IS_SEQUENCE, COST_FLAT},
    {"string", IS_STRING, COST_FLAT},
    {"test", IS_TEST, COST_FLAT},
    {"true", IS_TRUE, COST_FLAT},
    {"undefined", IS_UNDEFINED, COST_FLAT},
    {"upper", IS_UPPER, COST_FLAT},
};

const char *bt_j_test_name(size_t i)
{
    return i < BT_ARRAY_LEN(tests) ? tests[i].name : NULL;
}

int bt_j_test_find(struct bt_j_str name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(tests); i++) {
        if (bt_j_str_is(name, tests[i].name)) {
            return (int)i;
        }
    }
    return -1;
}

static bool same_as(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value o;
    bt_j_arg_get(c, 0, NULL, &o);
    if (v.kind != o.kind) {
        return false;
    }
    return v.kind == J_LIST || v.kind == J_TUPLE ? v.list == o.list
           : v.kind == J_DICT                    ? v.dict == o.dict
                                                 : bt_j_equal(r, v, o);
}

bool bt_j_test_run(struct bt_j_render *r, int fn, struct bt_j_value v, struct bt_j_call *c)
{
    bool seq = v.kind == J_STR || v.kind == J_LIST || v.kind == J_TUPLE || v.kind == J_DICT ||
               v.kind == J_UNDEFINED;
    int64_t by;
    bt_j_charge_call(r, tests[fn].cost, v, c);
    switch (tests[fn].test) {
    case IS_BOOLEAN: return v.kind == J_BOOL;
    case IS_CALLABLE: return v.kind == J_MACRO || v.kind == J_METHOD || v.kind == J_GLOBAL;
    case IS_DEFINED: return v.kind != J_UNDEFINED;
    case IS_UNDEFINED: return v.kind == J_UNDEFINED;
    case IS_DIVISIBLE:
        by = bt_j_arg_int(r, c, 0, "num", 0);
        if (by == 0) {
            bt_j_fail(r, "integer modulo by zero");
        }
        return by == -1 || need_int(r, v) % by == 0;
    case IS_EVEN: return need_int(r, v) % 2 == 0;
    case IS_ODD: return need_int(r, v) % 2 != 0;
    case IS_FALSE: return v.kind == J_BOOL && !v.b;
    case IS_TRUE: return v.kind == J_BOOL && v.b;
    case IS_FILTER: return v.kind == J_STR && bt_j_filter_find(v.s) >= 0;
    case IS_TEST: return v.kind == J_STR && bt_j_test_find(v.s) >= 0;
    case IS_FLOAT: return v.kind == J_FLOAT;
    case IS_INTEGER: return v.kind == J_INT;
    case IS_NUMBER: return bt_j_is_num(v);
    case IS_ITERABLE: return seq || v.kind == J_LOOP;
    case IS_SEQUENCE: return seq || v.kind == J_LOOP;
    case IS_MAPPING: return v.kind == J_DICT;
    case IS_NONE: return v.kind == J_NONE;
    case IS_STRING: return v.kind == J_STR;
    case IS_LOWER: return bt_j_all_of(r, bt_j_to_str(r, v), CLASS_LOWER);
    case IS_UPPER: return bt_j_all_of(r, bt_j_to_str(r, v), CLASS_UPPER);
    case IS_SAMEAS: return same_as(r, v, c);
    case IS_EQ: return t_compare(r, v, c, OP_EQ);
    case IS_NE: return t_compare(r, v, c, OP_NE);
    case IS_LT: return t_compare(r, v, c, OP_LT);
    case IS_LE: return t_compare(r, v, c, OP_LE);
    case IS_GT: return t_compare(r, v, c, OP_GT);
    case IS_GE: return t_compare(r, v, c, OP_GE);
    case IS_IN: return t_compare(r, v, c, OP_IN);
    }
    return false;
}

/* ---- methods ---- */

typedef struct bt_j_value (*method_fn)(struct bt_j_render *r, struct bt_j_value self,
                                       struct bt_j_call *c);

static struct bt_j_value m_strip_sides(struct bt_j_render *r, struct bt_j_value s,
                                       struct bt_j_call *c, bool left, bool right)
{
    struct bt_j_value chars;
    bool given = bt_j_arg_get(c, 0, NULL, &chars) && chars.kind != J_NONE;
    if (given && chars.kind != J_STR) {
        bt_j_fail(r, "strip arg must be None or str");
    }
    return bt_j_string(bt_j_strip(r, s.s, given ? &chars.s : NULL, left, right));
}

static struct bt_j_value m_strip(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    return m_strip_sides(r, s, c, true, true);
}

static struct bt_j_value m_lstrip(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    return m_strip_sides(r, s, c, true, false);
}

static struct bt_j_value m_rstrip(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    return m_strip_sides(r, s, c, false, true);
}

/* The end of the white space (or, with !space, of the other text) that begins at `at`. */
static size_t skip(struct bt_j_render *r, struct bt_j_str s, size_t at, bool space)
{
    size_t from = at;
    while (at < s.n) {
        uint32_t cp;
        size_t k = bt_utf8_decode(s.p + at, s.p + s.n, &cp);
        if ((k > 0 && bt_j_is_space(cp)) != space) {
            break;
        }
        at += BT_MAX(k, (size_t)1);
    }
    j_work(r, (at - from + 1) * J_APPEND);
    return at;
}

/* The beginning of the white space (or, with !space, of the other text) that ends at `end`. */
static size_t skip_back(struct bt_j_render *r, struct bt_j_str s, size_t end, bool space)
{
    size_t from = end;
    while (end > 0) {
        uint32_t cp;
        size_t at = end - 1;
        while (at > 0 && ((uint8_t)s.p[at] & 0xc0) == 0x80) {
            at--;
        }
        if ((bt_utf8_decode(s.p + at, s.p + end, &cp) > 0 && bt_j_is_space(cp)) != space) {
            break;
        }
        end = at;
    }
    j_work(r, (from - end + 1) * J_APPEND);
    return end;
}

/* Words between white space; right: from the end, with the last word first. Makes at most `max`
 * cuts (negative: no limit). As in Python, the rest after the last cut keeps the white space at its
 * far end. */
static struct bt_j_value split_words(struct bt_j_render *r, struct bt_j_str s, int64_t max,
                                     bool right)
{
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    size_t at = 0, end = s.n;
    for (; !right && (at = skip(r, s, at, true)) < s.n; max--) {
        end = max == 0 ? s.n : skip(r, s, at, false);
        bt_j_list_add(r, out.list, bt_j_string((struct bt_j_str){s.p + at, end - at}));
        at = end;
    }
    for (; right && (end = skip_back(r, s, end, true)) > 0; max--) {
        at = max == 0 ? 0 : skip_back(r, s, end, false);
        bt_j_list_add(r, out.list, bt_j_string((struct bt_j_str){s.p + at, end - at}));
        end = at;
    }
    return out;
}

static struct bt_j_value split_by(struct bt_j_render *r, struct bt_j_str s, struct bt_j_str sep,
                                  int64_t max)
{
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    size_t from = 0;
    for (size_t hit; max != 0 && (hit = bt_j_find(r, s, sep, from)) != SIZE_MAX; max--) {
        j_charge(r, 1);
        bt_j_list_add(r, out.list, bt_j_string((struct bt_j_str){s.p + from, hit - from}));
        from = hit + sep.n;
    }
    bt_j_list_add(r, out.list, bt_j_string((struct bt_j_str){s.p + from, s.n - from}));
    return out;
}

/* The last occurrence of `what` in s[0..end). */
static size_t find_last(struct bt_j_render *r, struct bt_j_str s, struct bt_j_str what, size_t end)
{
    if (what.n == 0) {
        return end;
    }
    for (size_t i = end < what.n ? 0 : end - what.n + 1; i > 0; i--) {
        const char *p = s.p + i - 1;
        bool may = p[0] == what.p[0] && p[what.n - 1] == what.p[what.n - 1];
        j_work(r, may ? what.n + 1 : 1);
        if (may && memcmp(p, what.p, what.n) == 0) {
            return i - 1;
        }
    }
    return SIZE_MAX;
}

static void turn_around(struct bt_j_list *l)
{
    for (size_t i = 0; i + 1 < l->n - i; i++) {
        struct bt_j_value t = l->v[i];
        l->v[i] = l->v[l->n - 1 - i];
        l->v[l->n - 1 - i] = t;
    }
}

static struct bt_j_value m_split_any(struct bt_j_render *r, struct bt_j_value s,
                                     struct bt_j_call *c, bool right)
{
    struct bt_j_value sep;
    bool given = bt_j_arg_get(c, 0, "sep", &sep) && sep.kind != J_NONE;
    int64_t max = bt_j_arg_int(r, c, 1, "maxsplit", -1);
    struct bt_j_value out;
    if (!given) {
        out = split_words(r, s.s, max, right && max >= 0);
        if (right && max >= 0 && out.list->n > 0) {
            turn_around(out.list);
        }
        return out;
    }
    if (sep.kind != J_STR || sep.s.n == 0) {
        bt_j_fail(r, sep.kind == J_STR ? "empty separator" : "must be str or None");
    }
    if (!right || max < 0) {
        return split_by(r, s.s, sep.s, max);
    }
    out = bt_j_new_list(r, J_LIST);
    size_t end = s.s.n;
    for (size_t hit; max != 0 && (hit = find_last(r, s.s, sep.s, end)) != SIZE_MAX; max--) {
        bt_j_list_add(r, out.list,
                      bt_j_string((struct bt_j_str){s.s.p + hit + sep.s.n, end - hit - sep.s.n}));
        end = hit;
    }
    bt_j_list_add(r, out.list, bt_j_string((struct bt_j_str){s.s.p, end}));
    turn_around(out.list);
    return out;
}

static struct bt_j_value m_split(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    return m_split_any(r, s, c, false);
}

static struct bt_j_value m_rsplit(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    return m_split_any(r, s, c, true);
}

static struct bt_j_value m_splitlines(struct bt_j_render *r, struct bt_j_value s,
                                      struct bt_j_call *c)
{
    if (bt_j_arg_bool(r, c, 0, "keepends", false)) {
        bt_j_fail(r, "splitlines(keepends) is not supported");
    }
    return bt_j_splitlines(r, s.s);
}

static struct bt_j_value partition(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c,
                                   bool right)
{
    struct bt_j_str sep = bt_j_arg_str(r, c, 0, "sep", NULL);
    if (sep.n == 0) {
        bt_j_fail(r, "empty separator");
    }
    size_t hit = right ? find_last(r, s.s, sep, s.s.n) : bt_j_find(r, s.s, sep, 0);
    struct bt_j_value out = bt_j_new_list(r, J_TUPLE), empty = bt_j_string(j_cstr(""));
    if (hit == SIZE_MAX) {
        bt_j_list_add(r, out.list, right ? empty : s);
        bt_j_list_add(r, out.list, empty);
        bt_j_list_add(r, out.list, right ? s : empty);
        return out;
    }
    size_t after = hit + sep.n;
    bt_j_list_add(r, out.list, bt_j_string((struct bt_j_str){s.s.p, hit}));
    bt_j_list_add(r, out.list, bt_j_string(sep));
    bt_j_list_add(r, out.list, bt_j_string((struct bt_j_str){s.s.p + after, s.s.n - after}));
    return out;
}

static struct bt_j_value m_partition(struct bt_j_render *r, struct bt_j_value s,
                                     struct bt_j_call *c)
{
    return partition(r, s, c, false);
}

static struct bt_j_value m_rpartition(struct bt_j_render *r, struct bt_j_value s,
                                      struct bt_j_call *c)
{
    return partition(r, s, c, true);
}

static bool has_affix(struct bt_j_render *r, struct bt_j_str s, struct bt_j_str a, bool end)
{
    j_work(r, J_ELEMENT + (a.n <= s.n ? a.n : 0));
    return a.n <= s.n && (a.n == 0 || memcmp(s.p + (end ? s.n - a.n : 0), a.p, a.n) == 0);
}

static struct bt_j_value affix_test(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c,
                                    bool end)
{
    struct bt_j_value a;
    bt_j_arg_get(c, 0, NULL, &a);
    if (c->n != 1 || (a.kind != J_STR && a.kind != J_TUPLE)) {
        bt_j_fail(r, "%s needs one str or a tuple of str", end ? "endswith" : "startswith");
    }
    if (a.kind == J_STR) {
        return bt_j_bool(has_affix(r, s.s, a.s, end));
    }
    for (size_t i = 0; i < a.list->n; i++) {
        if (a.list->v[i].kind == J_STR && has_affix(r, s.s, a.list->v[i].s, end)) {
            return bt_j_bool(true);
        }
    }
    return bt_j_bool(false);
}

static struct bt_j_value m_startswith(struct bt_j_render *r, struct bt_j_value s,
                                      struct bt_j_call *c)
{
    return affix_test(r, s, c, false);
}

static struct bt_j_value m_endswith(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    return affix_test(r, s, c, true);
}

static struct bt_j_value m_removeprefix(struct bt_j_render *r, struct bt_j_value s,
                                        struct bt_j_call *c)
{
    struct bt_j_str a = bt_j_arg_str(r, c, 0, "prefix", NULL);
    return has_affix(r, s.s, a, false) ? bt_j_string((struct bt_j_str){s.s.p + a.n, s.s.n - a.n})
                                       : s;
}

static struct bt_j_value m_removesuffix(struct bt_j_render *r, struct bt_j_value s,
                                        struct bt_j_call *c)
{
    struct bt_j_str a = bt_j_arg_str(r, c, 0, "suffix", NULL);
    return has_affix(r, s.s, a, true) ? bt_j_string((struct bt_j_str){s.s.p, s.s.n - a.n}) : s;
}

#define CASE_METHOD(name, how)                                                                     \
    static struct bt_j_value name(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c) \
    {                                                                                              \
        (void)c;                                                                                   \
        return bt_j_string(bt_j_change_case(r, s.s, how));                                         \
    }
CASE_METHOD(m_upper, CASE_UPPER)
CASE_METHOD(m_lower, CASE_LOWER)
CASE_METHOD(m_title, CASE_TITLE)
CASE_METHOD(m_capitalize, CASE_CAPITALIZE)
CASE_METHOD(m_swapcase, CASE_SWAP)

#define CLASS_METHOD(name, cls)                                                                    \
    static struct bt_j_value name(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c) \
    {                                                                                              \
        (void)c;                                                                                   \
        return bt_j_bool(bt_j_all_of(r, s.s, cls));                                                \
    }
CLASS_METHOD(m_isalpha, CLASS_ALPHA)
CLASS_METHOD(m_isdigit, CLASS_DIGIT)
CLASS_METHOD(m_isalnum, CLASS_ALNUM)
CLASS_METHOD(m_isspace, CLASS_SPACE)
CLASS_METHOD(m_isupper, CLASS_UPPER)
CLASS_METHOD(m_islower, CLASS_LOWER)

static struct bt_j_value m_replace(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    return bt_j_string(bt_j_replace(r, s.s, bt_j_arg_str(r, c, 0, "old", NULL),
                                    bt_j_arg_str(r, c, 1, "new", NULL),
                                    bt_j_arg_int(r, c, 2, "count", -1)));
}

/* Byte offset to character index. */
static int64_t char_index(struct bt_j_str s, size_t at)
{
    return (int64_t)bt_j_str_chars((struct bt_j_str){s.p, at});
}

static struct bt_j_value m_find(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    size_t hit = bt_j_find(r, s.s, bt_j_arg_str(r, c, 0, "sub", NULL), 0);
    if (c->n > 1) {
        bt_j_fail(r, "find() with bounds is not supported");
    }
    return bt_j_int(hit == SIZE_MAX ? -1 : char_index(s.s, hit));
}

static struct bt_j_value m_rfind(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    size_t hit = find_last(r, s.s, bt_j_arg_str(r, c, 0, "sub", NULL), s.s.n);
    if (c->n > 1) {
        bt_j_fail(r, "rfind() with bounds is not supported");
    }
    return bt_j_int(hit == SIZE_MAX ? -1 : char_index(s.s, hit));
}

static struct bt_j_value m_str_index(struct bt_j_render *r, struct bt_j_value s,
                                     struct bt_j_call *c)
{
    struct bt_j_value at = m_find(r, s, c);
    if (at.i < 0) {
        bt_j_fail(r, "substring not found");
    }
    return at;
}

static struct bt_j_value m_str_count(struct bt_j_render *r, struct bt_j_value s,
                                     struct bt_j_call *c)
{
    struct bt_j_str what = bt_j_arg_str(r, c, 0, "sub", NULL);
    int64_t n = 0;
    if (what.n == 0) {
        return bt_j_int((int64_t)bt_j_str_chars(s.s) + 1);
    }
    for (size_t at = 0; (at = bt_j_find(r, s.s, what, at)) != SIZE_MAX; at += what.n) {
        j_charge(r, 1);
        n++;
    }
    return bt_j_int(n);
}

static struct bt_j_value m_join(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    struct bt_j_value arg;
    bt_j_arg_get(c, 0, NULL, &arg);
    const struct bt_j_list *l = bt_j_iterate(r, arg);
    struct bt_j_sb sb = {0};
    for (size_t i = 0; i < l->n; i++) {
        if (l->v[i].kind != J_STR) {
            bt_j_fail(r, "sequence item %zu: expected str instance, %s found", i,
                      bt_j_type_name(l->v[i]));
        }
        if (i > 0) {
            bt_j_sb_str(r, &sb, s.s);
        }
        bt_j_sb_str(r, &sb, l->v[i].s);
    }
    return bt_j_string(bt_j_sb_done(&sb));
}

/* Pads to a width. left_halves: how many halves of the padding go to the left. */
static struct bt_j_value pad(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c,
                             int left_halves)
{
    int64_t width = bt_j_arg_int(r, c, 0, "width", 0), n = (int64_t)bt_j_str_chars(s.s);
    struct bt_j_str fill = bt_j_arg_str(r, c, 1, "fillchar", " ");
    if (bt_j_str_chars(fill) != 1 || width > (int64_t)J_OUTPUT_MAX) {
        bt_j_fail(r, "padding needs one character and a sane width");
    }
    int64_t total = BT_MAX(width - n, 0);
    int64_t left = left_halves == 2   ? total
                   : left_halves == 0 ? 0
                                      : total / 2 + (total & width & 1);
    struct bt_j_sb sb = {0};
    for (int64_t i = 0; i < total; i++) {
        if (i == left) {
            bt_j_sb_str(r, &sb, s.s);
        }
        bt_j_sb_str(r, &sb, fill);
    }
    if (left >= total) {
        bt_j_sb_str(r, &sb, s.s);
    }
    return bt_j_string(bt_j_sb_done(&sb));
}

static struct bt_j_value m_ljust(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    return pad(r, s, c, 0);
}

static struct bt_j_value m_rjust(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    return pad(r, s, c, 2);
}

static struct bt_j_value m_center(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    return pad(r, s, c, 1);
}

/* str.format with {}, {0} and {name}; a conversion or format inside the braces is refused. */
static struct bt_j_value m_format(struct bt_j_render *r, struct bt_j_value s, struct bt_j_call *c)
{
    struct bt_j_sb sb = {0};
    size_t next = 0;
    for (size_t i = 0; i < s.s.n; i++) {
        char ch = s.s.p[i];
        if ((ch == '{' || ch == '}') && i + 1 < s.s.n && s.s.p[i + 1] == ch) {
            bt_j_sb_put(r, &sb, &ch, 1);
            i++;
            continue;
        }
        if (ch != '{') {
            bt_j_sb_put(r, &sb, &ch, 1);
            continue;
        }
        size_t close = bt_j_find(r, s.s, j_cstr("}"), i);
        if (close == SIZE_MAX) {
            bt_j_fail(r, "expected '}' before end of string");
        }
        struct bt_j_str name = {s.s.p + i + 1, close - i - 1};
        const struct bt_j_value *v = NULL;
        if (name.n == 0 || (name.n == 1 && name.p[0] >= '0' && name.p[0] <= '9')) {
            size_t at = name.n == 0 ? next++ : (size_t)(name.p[0] - '0');
            v = at < c->n ? &c->v[at] : NULL;
        } else {
            v = bt_j_dict_get_str(&c->named, name);
        }
        if (v == NULL) {
            bt_j_fail(r, "format(): \"{%.*s}\" has no argument, or is not supported",
                      (int)BT_MIN(name.n, (size_t)40), name.p);
        }
        bt_j_sb_str(r, &sb, bt_j_to_str(r, *v));
        i = close;
    }
    return bt_j_string(bt_j_sb_done(&sb));
}

static struct bt_j_value m_items(struct bt_j_render *r, struct bt_j_value d, struct bt_j_call *c)
{
    (void)c;
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    for (size_t i = 0; i < d.dict->n; i++) {
        struct bt_j_value pair = bt_j_new_list(r, J_TUPLE);
        j_charge(r, 1);
        bt_j_list_add(r, pair.list, d.dict->v[i].key);
        bt_j_list_add(r, pair.list, d.dict->v[i].value);
        bt_j_list_add(r, out.list, pair);
    }
    return out;
}

static struct bt_j_value m_keys(struct bt_j_render *r, struct bt_j_value d, struct bt_j_call *c)
{
    (void)c;
    return (struct bt_j_value){.kind = J_LIST, .list = bt_j_iterate(r, d)};
}

static struct bt_j_value m_values(struct bt_j_render *r, struct bt_j_value d, struct bt_j_call *c)
{
    (void)c;
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    for (size_t i = 0; i < d.dict->n; i++) {
        bt_j_list_add(r, out.list, d.dict->v[i].value);
    }
    return out;
}

static struct bt_j_value m_get(struct bt_j_render *r, struct bt_j_value d, struct bt_j_call *c)
{
    struct bt_j_value key, missing;
    if (!bt_j_arg_get(c, 0, NULL, &key)) {
        bt_j_fail(r, "get() needs a key");
    }
    const struct bt_j_value *hit = bt_j_dict_get(r, d.dict, key);
    if (hit != NULL) {
        return *hit;
    }
    return bt_j_arg_get(c, 1, "default", &missing) ? missing : bt_j_none();
}

static struct bt_j_value m_copy(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    (void)c;
    struct bt_j_value out = v.kind == J_DICT ? bt_j_new_dict(r) : bt_j_new_list(r, v.kind);
    for (size_t i = 0; v.kind == J_DICT && i < v.dict->n; i++) {
        bt_j_dict_set(r, out.dict, v.dict->v[i].key, v.dict->v[i].value);
    }
    for (size_t i = 0; v.kind != J_DICT && i < v.list->n; i++) {
        bt_j_list_add(r, out.list, v.list->v[i]);
    }
    return out;
}

static struct bt_j_value m_update(struct bt_j_render *r, struct bt_j_value d, struct bt_j_call *c)
{
    struct bt_j_call copy = {.v = c->v, .n = c->n, .named = c->named};
    struct bt_j_value more = bt_j_global_call(r, j_cstr("dict"), &copy);
    for (size_t i = 0; i < more.dict->n; i++) {
        bt_j_dict_set(r, d.dict, more.dict->v[i].key, more.dict->v[i].value);
    }
    return bt_j_none();
}

static struct bt_j_value m_append(struct bt_j_render *r, struct bt_j_value l, struct bt_j_call *c)
{
    if (c->n != 1) {
        bt_j_fail(r, "append() takes exactly one argument");
    }
    bt_j_list_add(r, l.list, c->v[0]);
    return bt_j_none();
}

static struct bt_j_value m_extend(struct bt_j_render *r, struct bt_j_value l, struct bt_j_call *c)
{
    struct bt_j_value arg;
    bt_j_arg_get(c, 0, NULL, &arg);
    const struct bt_j_list *more = bt_j_iterate(r, arg);
    size_t n = more->n; /* `more` may be the list itself */
    j_work(r, n * J_ELEMENT);
    for (size_t i = 0; i < n; i++) {
        bt_j_list_add(r, l.list, more->v[i]);
    }
    return bt_j_none();
}

static struct bt_j_value m_pop(struct bt_j_render *r, struct bt_j_value v, struct bt_j_call *c)
{
    struct bt_j_value key, missing;
    if (v.kind == J_DICT) {
        if (!bt_j_arg_get(c, 0, NULL, &key)) {
            bt_j_fail(r, "pop() of a dict needs a key");
        }
        const struct bt_j_value *hit = bt_j_dict_get(r, v.dict, key);
        bool fallback = bt_j_arg_get(c, 1, NULL, &missing);
        if (hit == NULL && !fallback) {
            bt_j_fail(r, "pop(): no such key");
        }
        struct bt_j_value out = hit == NULL ? missing : *hit;
        (void)bt_j_dict_del(r, v.dict, key);
        return out;
    }
    int64_t n = (int64_t)v.list->n, at = bt_j_arg_int(r, c, 0, NULL, -1);
    at += at < 0 ? n : 0;
    if (at < 0 || at >= n) {
        bt_j_fail(r, "pop index out of range");
    }
    struct bt_j_value out = v.list->v[at];
    j_work(r, J_ELEMENT * (uint64_t)(n - at));
    memmove(&v.list->v[at], &v.list->v[at + 1], (size_t)(n - at - 1) * sizeof(out));
    v.list->n--;
    return out;
}

static struct bt_j_value m_list_index(struct bt_j_render *r, struct bt_j_value l,
                                      struct bt_j_call *c)
{
    struct bt_j_value what;
    bt_j_arg_get(c, 0, NULL, &what);
    for (size_t i = 0; i < l.list->n; i++) {
        if (bt_j_equal(r, l.list->v[i], what)) {
            return bt_j_int((int64_t)i);
        }
    }
    bt_j_fail(r, "the value is not in the list");
}

static struct bt_j_value m_list_count(struct bt_j_render *r, struct bt_j_value l,
                                      struct bt_j_call *c)
{
    struct bt_j_value what;
    int64_t n = 0;
    bt_j_arg_get(c, 0, NULL, &what);
    for (size_t i = 0; i < l.list->n; i++) {
        n += bt_j_equal(r, l.list->v[i], what);
    }
    return bt_j_int(n);
}

static struct bt_j_value m_cycle(struct bt_j_render *r, struct bt_j_value l, struct bt_j_call *c)
{
    if (c->n == 0) {
        bt_j_fail(r, "no items for cycling given");
    }
    return c->v[l.loop->at % c->n];
}

static struct bt_j_value m_changed(struct bt_j_render *r, struct bt_j_value l, struct bt_j_call *c)
{
    struct bt_j_value now = bt_j_new_list(r, J_TUPLE);
    for (size_t i = 0; i < c->n; i++) {
        bt_j_list_add(r, now.list, c->v[i]);
    }
    bool same = l.loop->has_changed && bt_j_equal(r, now, l.loop->last_changed);
    l.loop->has_changed = true;
    l.loop->last_changed = now;
    return bt_j_bool(!same);
}

#define BIT(kind) (1u << (kind))
#define NAME(text)                                                                                 \
    {                                                                                              \
        text, sizeof(text) - 1                                                                     \
    }
#define SEQ (BIT(J_LIST) | BIT(J_TUPLE))
static const struct {
    struct bt_j_str name;
    unsigned kinds;
    method_fn run; /* NULL: the method exists in Python, but is refused here */
    enum bt_j_cost cost;
} methods[] = {
    {NAME("strip"), BIT(J_STR), m_strip, COST_FLAT},
    {NAME("lstrip"), BIT(J_STR), m_lstrip, COST_FLAT},
    {NAME("rstrip"), BIT(J_STR), m_rstrip, COST_FLAT},
    {NAME("split"), BIT(J_STR), m_split, COST_FLAT},
    {NAME("rsplit"), BIT(J_STR), m_rsplit, COST_FLAT},
    {NAME("splitlines"), BIT(J_STR), m_splitlines, COST_FLAT},
    {NAME("partition"), BIT(J_STR), m_partition, COST_FLAT},
    {NAME("rpartition"), BIT(J_STR), m_rpartition, COST_FLAT},
    {NAME("startswith"), BIT(J_STR), m_startswith, COST_FLAT},
    {NAME("endswith"), BIT(J_STR), m_endswith, COST_FLAT},
    {NAME("removeprefix"), BIT(J_STR), m_removeprefix, COST_FLAT},
    {NAME("removesuffix"), BIT(J_STR), m_removesuffix, COST_FLAT},
    {NAME("upper"), BIT(J_STR), m_upper, COST_FLAT},
    {NAME("lower"), BIT(J_STR), m_lower, COST_FLAT},
    {NAME("title"), BIT(J_STR), m_title, COST_FLAT},
    {NAME("capitalize"), BIT(J_STR), m_capitalize, COST_FLAT},
    {NAME("swapcase"), BIT(J_STR), m_swapcase, COST_FLAT},
    {NAME("isalpha"), BIT(J_STR), m_isalpha, COST_FLAT},
    {NAME("isdigit"), BIT(J_STR), m_isdigit, COST_FLAT},
    {NAME("isnumeric"), BIT(J_STR), m_isdigit, COST_FLAT},
    {NAME("isdecimal"), BIT(J_STR), m_isdigit, COST_FLAT},
    {NAME("isalnum"), BIT(J_STR), m_isalnum, COST_FLAT},
    {NAME("isspace"), BIT(J_STR), m_isspace, COST_FLAT},
    {NAME("isupper"), BIT(J_STR), m_isupper, COST_FLAT},
    {NAME("islower"), BIT(J_STR), m_islower, COST_FLAT},
    {NAME("replace"), BIT(J_STR), m_replace, COST_FLAT},
    {NAME("find"), BIT(J_STR), m_find, COST_READS},
    {NAME("rfind"), BIT(J_STR), m_rfind, COST_READS},
    {NAME("index"), BIT(J_STR), m_str_index, COST_READS},
    {NAME("count"), BIT(J_STR), m_str_count, COST_READS},
    {NAME("join"), BIT(J_STR), m_join, COST_READS},
    {NAME("ljust"), BIT(J_STR), m_ljust, COST_READS},
    {NAME("rjust"), BIT(J_STR), m_rjust, COST_READS},
    {NAME("center"), BIT(J_STR), m_center, COST_READS},
    {NAME("format"), BIT(J_STR), m_format, COST_FLAT},
    {NAME("items"), BIT(J_DICT), m_items, COST_READS},
    {NAME("keys"), BIT(J_DICT), m_keys, COST_READS},
    {NAME("values"), BIT(J_DICT), m_values, COST_READS},
    {NAME("get"), BIT(J_DICT), m_get, COST_FLAT},
    {NAME("copy"), BIT(J_DICT) | BIT(J_LIST), m_copy, COST_READS},
    {NAME("update"), BIT(J_DICT), m_update, COST_FLAT},
    {NAME("pop"), BIT(J_DICT) | BIT(J_LIST), m_pop, COST_FLAT},
    {NAME("append"), BIT(J_LIST), m_append, COST_FLAT},
    {NAME("extend"), BIT(J_LIST), m_extend, COST_FLAT},
    {NAME("index"), SEQ, m_list_index, COST_FLAT},
    {NAME("count"), SEQ, m_list_count, COST_FLAT},
    {NAME("cycle"), BIT(J_LOOP), m_cycle, COST_FLAT},
    {NAME("changed"), BIT(J_LOOP), m_changed, COST_FLAT},
    {NAME("casefold"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("encode"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("expandtabs"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("format_map"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("isascii"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("isidentifier"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("isprintable"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("istitle"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("maketrans"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("rindex"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("translate"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("zfill"), BIT(J_STR), NULL, COST_FLAT},
    {NAME("clear"), BIT(J_DICT) | BIT(J_LIST), NULL, COST_FLAT},
    {NAME("fromkeys"), BIT(J_DICT), NULL, COST_FLAT},
    {NAME("popitem"), BIT(J_DICT), NULL, COST_FLAT},
    {NAME("setdefault"), BIT(J_DICT), NULL, COST_FLAT},
    {NAME("insert"), BIT(J_LIST), NULL, COST_FLAT},
    {NAME("remove"), BIT(J_LIST), NULL, COST_FLAT},
    {NAME("reverse"), BIT(J_LIST), NULL, COST_FLAT},
    {NAME("sort"), BIT(J_LIST), NULL, COST_FLAT},
};

const char *bt_j_method_name(size_t i)
{
    return i < BT_ARRAY_LEN(methods) ? methods[i].name.p : NULL;
}

bool bt_j_method_known(struct bt_j_str name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(methods); i++) {
        if (methods[i].run != NULL && bt_j_str_eq(name, methods[i].name)) {
            return true;
        }
    }
    return false;
}

bool bt_j_has_method(struct bt_j_value v, struct bt_j_str name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(methods); i++) {
        if ((methods[i].kinds & BIT(v.kind)) != 0 && bt_j_str_eq(name, methods[i].name)) {
            return true;
        }
    }
    return false;
}

struct bt_j_value bt_j_method_run(struct bt_j_render *r, struct bt_j_value self,
                                  struct bt_j_str name, struct bt_j_call *c)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(methods); i++) {
        if ((methods[i].kinds & BIT(self.kind)) != 0 && bt_j_str_eq(name, methods[i].name) &&
            methods[i].run != NULL) {
            bt_j_enter(r);
            bt_j_charge_call(r, methods[i].cost, self, c);
            struct bt_j_value v = methods[i].run(r, self, c);
            bt_j_leave(r);
            return v;
        }
    }
    bt_j_fail(r, "the method .%.*s() of %s is not supported", (int)BT_MIN(name.n, (size_t)60),
              name.p, bt_j_type_name(self));
}
