/* Calls and operators of the template interpreter: arguments, global functions, arithmetic. */
#include <math.h>
#include <string.h>
#include <time.h>

#include "common/base/clock.h"
#include "common/token/jinja/jinja.h"

static const char *const globals[] = {"range", "dict", "namespace", "raise_exception",
                                      "strftime_now"};

const char *bt_j_global_name(size_t i)
{
    return i < BT_ARRAY_LEN(globals) ? globals[i] : NULL;
}

bool bt_j_is_global(struct bt_j_str name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(globals); i++) {
        if (bt_j_str_is(name, globals[i])) {
            return true;
        }
    }
    return false;
}

void bt_j_call_add(struct bt_j_render *r, struct bt_j_call *c, struct bt_j_value v)
{
    c->v = bt_j_grow(&r->arena, c->v, c->n, &c->cap, sizeof(v));
    c->v[c->n++] = v;
}

bool bt_j_arg_get(const struct bt_j_call *c, size_t i, const char *name, struct bt_j_value *v_p)
{
    const struct bt_j_value *v = i < c->n ? &c->v[i] : NULL;
    if (v == NULL && name != NULL) {
        v = bt_j_dict_get_str(&c->named, j_cstr(name));
    }
    *v_p = v == NULL ? bt_j_undefined(name == NULL ? "argument" : name) : *v;
    return v != NULL;
}

int64_t bt_j_arg_int(struct bt_j_render *r, const struct bt_j_call *c, size_t i, const char *name,
                     int64_t missing)
{
    struct bt_j_value v;
    if (!bt_j_arg_get(c, i, name, &v)) {
        return missing;
    }
    if (!bt_j_is_intlike(v)) {
        bt_j_fail(r, "'%s' object cannot be interpreted as an integer", bt_j_type_name(v));
    }
    return bt_j_as_int(v);
}

bool bt_j_arg_bool(struct bt_j_render *r, const struct bt_j_call *c, size_t i, const char *name,
                   bool missing)
{
    (void)r;
    struct bt_j_value v;
    return bt_j_arg_get(c, i, name, &v) ? bt_j_truth(v) : missing;
}

struct bt_j_str bt_j_arg_str(struct bt_j_render *r, const struct bt_j_call *c, size_t i,
                             const char *name, const char *missing)
{
    struct bt_j_value v;
    if (!bt_j_arg_get(c, i, name, &v)) {
        if (missing == NULL) {
            bt_j_fail(r, "an argument is missing: %s", name);
        }
        return j_cstr(missing);
    }
    if (v.kind != J_STR) {
        bt_j_fail(r, "argument %s must be str, not %s", name, bt_j_type_name(v));
    }
    return v.s;
}

static struct bt_j_value range(struct bt_j_render *r, const struct bt_j_call *c)
{
    int64_t from = 0, to, step = bt_j_arg_int(r, c, 2, NULL, 1);
    if (c->n == 0 || c->n > 3 || step == 0) {
        bt_j_fail(r, "range() needs one to three integers, and a step that is not 0");
    }
    to = bt_j_arg_int(r, c, 0, NULL, 0);
    if (c->n > 1) {
        from = to;
        to = bt_j_arg_int(r, c, 1, NULL, 0);
    }
    struct bt_j_value out = bt_j_new_list(r, J_LIST);
    for (int64_t i = from; step > 0 ? i < to : i > to;) {
        j_work(r, J_ELEMENT);
        if (out.list->n == J_RANGE_MAX) {
            bt_j_fail(r, "range() of more than %d", J_RANGE_MAX);
        }
        bt_j_list_add(r, out.list, bt_j_int(i));
        if (__builtin_add_overflow(i, step, &i)) {
            break;
        }
    }
    return out;
}

static void dict_from(struct bt_j_render *r, struct bt_j_dict *to, struct bt_j_value from)
{
    if (from.kind == J_DICT || from.kind == J_NAMESPACE) {
        for (size_t i = 0; i < from.dict->n; i++) {
            bt_j_dict_set(r, to, from.dict->v[i].key, from.dict->v[i].value);
        }
        return;
    }
    const struct bt_j_list *pairs = bt_j_iterate(r, from);
    j_charge(r, pairs->n);
    for (size_t i = 0; i < pairs->n; i++) {
        const struct bt_j_list *pair = bt_j_iterate(r, pairs->v[i]);
        if (pair->n != 2) {
            bt_j_fail(r, "dictionary update sequence element #%zu has length %zu; 2 is required", i,
                      pair->n);
        }
        bt_j_dict_set(r, to, pair->v[0], pair->v[1]);
    }
}

static struct bt_j_value strftime_now(struct bt_j_render *r, const struct bt_j_call *c)
{
    struct bt_j_str fmt = bt_j_arg_str(r, c, 0, "format", NULL);
    char text[256], copy[128];
    if (fmt.n == 0 || fmt.n >= sizeof(copy)) {
        bt_j_fail(r, "strftime_now() needs a format of 1 to %zu bytes", sizeof(copy) - 1);
    }
    memcpy(copy, fmt.p, fmt.n);
    copy[fmt.n] = '\0';
    j_charge(r, 64);
    time_t now = (time_t)(bt_real_ns() / 1000000000u);
    struct tm tm;
    localtime_r(&now, &tm);
    size_t n = strftime(text, sizeof(text), copy, &tm);
    char *p = bt_j_alloc(&r->arena, n);
    memcpy(p, text, n);
    return bt_j_string((struct bt_j_str){p, n});
}

struct bt_j_value bt_j_global_call(struct bt_j_render *r, struct bt_j_str name, struct bt_j_call *c)
{
    j_charge(r, 1);
    if (bt_j_str_is(name, "range")) {
        return range(r, c);
    }
    if (bt_j_str_is(name, "strftime_now")) {
        return strftime_now(r, c);
    }
    if (bt_j_str_is(name, "raise_exception")) {
        struct bt_j_str msg = c->n > 0 ? bt_j_to_str(r, c->v[0]) : j_cstr("raise_exception()");
        bt_j_fail(r, "%.*s", (int)BT_MIN(msg.n, (size_t)400), msg.p);
    }
    struct bt_j_value out = bt_j_new_dict(r);
    for (size_t i = 0; i < c->n; i++) {
        dict_from(r, out.dict, c->v[i]);
    }
    for (size_t i = 0; i < c->named.n; i++) {
        bt_j_dict_set(r, out.dict, c->named.v[i].key, c->named.v[i].value);
    }
    if (bt_j_str_is(name, "namespace")) {
        out.kind = J_NAMESPACE;
    }
    return out;
}

static __attribute__((noreturn)) void bad_operands(struct bt_j_render *r, enum bt_j_op op,
                                                   struct bt_j_value a, struct bt_j_value b)
{
    static const char *const names[] = {"+", "-", "*", "/", "//", "%", "**"};
    if (a.kind == J_UNDEFINED || b.kind == J_UNDEFINED) {
        struct bt_j_str name = a.kind == J_UNDEFINED ? a.s : b.s;
        bt_j_fail(r, "'%.*s' is undefined", (int)BT_MIN(name.n, (size_t)100), name.p);
    }
    if (op == OP_ADD && a.kind == J_STR) {
        bt_j_fail(r, "can only concatenate str (not \"%s\") to str", bt_j_type_name(b));
    }
    bt_j_fail(r, "unsupported operand type(s) for %s: '%s' and '%s'", names[op], bt_j_type_name(a),
              bt_j_type_name(b));
}

static struct bt_j_value int_binary(struct bt_j_render *r, enum bt_j_op op, int64_t a, int64_t b)
{
    int64_t v = 0;
    bool over = false;
    if ((op == OP_FLOORDIV || op == OP_MOD) && (b == 0 || (b == -1 && a == INT64_MIN))) {
        bt_j_fail(r, b == 0 ? "integer division or modulo by zero" : "an integer beyond 64 bits");
    }
    switch (op) {
    case OP_ADD: over = __builtin_add_overflow(a, b, &v); break;
    case OP_SUB: over = __builtin_sub_overflow(a, b, &v); break;
    case OP_MUL: over = __builtin_mul_overflow(a, b, &v); break;
    case OP_FLOORDIV: v = a / b - (a % b != 0 && (a < 0) != (b < 0)); break;
    case OP_MOD:
        v = a % b;
        v += v != 0 && (v < 0) != (b < 0) ? b : 0;
        break;
    case OP_POW:
        if (b < 0) {
            return bt_j_float(pow((double)a, (double)b));
        }
        v = 1;
        for (int64_t i = 0; i < b && !over && v != 0 && !(a == 1); i++) {
            over = __builtin_mul_overflow(v, a, &v);
            if (a == -1) {
                v = b % 2 != 0 ? -1 : 1;
                break;
            }
        }
        break;
    case OP_DIV:
    case OP_EQ:
    case OP_NE:
    case OP_LT:
    case OP_LE:
    case OP_GT:
    case OP_GE:
    case OP_IN:
    case OP_NOTIN: break;
    }
    if (over) {
        bt_j_fail(r, "an integer beyond 64 bits");
    }
    return bt_j_int(v);
}

static struct bt_j_value float_binary(struct bt_j_render *r, enum bt_j_op op, double a, double b)
{
    if (b == 0 && (op == OP_DIV || op == OP_FLOORDIV || op == OP_MOD)) {
        bt_j_fail(r, "division by zero");
    }
    double m;
    switch (op) {
    case OP_ADD: return bt_j_float(a + b);
    case OP_SUB: return bt_j_float(a - b);
    case OP_MUL: return bt_j_float(a * b);
    case OP_DIV: return bt_j_float(a / b);
    case OP_FLOORDIV: return bt_j_float(floor(a / b));
    case OP_MOD: m = fmod(a, b); return bt_j_float(m != 0 && (m < 0) != (b < 0) ? m + b : m);
    case OP_POW: return bt_j_float(pow(a, b));
    case OP_EQ:
    case OP_NE:
    case OP_LT:
    case OP_LE:
    case OP_GT:
    case OP_GE:
    case OP_IN:
    case OP_NOTIN: break;
    }
    return bt_j_none();
}

static struct bt_j_value repeat(struct bt_j_render *r, struct bt_j_value a, int64_t times)
{
    if (a.kind == J_STR) {
        struct bt_j_sb sb = {0};
        for (int64_t i = 0; i < times && a.s.n > 0; i++) {
            j_charge(r, 1);
            bt_j_sb_str(r, &sb, a.s);
        }
        return bt_j_string(bt_j_sb_done(&sb));
    }
    struct bt_j_value out = bt_j_new_list(r, a.kind);
    for (int64_t i = 0; i < times && a.list->n > 0; i++) {
        for (size_t k = 0; k < a.list->n; k++) {
            j_charge(r, 1);
            bt_j_list_add(r, out.list, a.list->v[k]);
        }
    }
    return out;
}

static bool is_seq(struct bt_j_value v)
{
    return v.kind == J_STR || v.kind == J_LIST || v.kind == J_TUPLE;
}

struct bt_j_value bt_j_binary(struct bt_j_render *r, enum bt_j_op op, struct bt_j_value a,
                              struct bt_j_value b)
{
    if (bt_j_is_intlike(a) && bt_j_is_intlike(b) && op != OP_DIV) {
        return int_binary(r, op, bt_j_as_int(a), bt_j_as_int(b));
    }
    if (bt_j_is_num(a) && bt_j_is_num(b)) {
        return float_binary(r, op, bt_j_num(a), bt_j_num(b));
    }
    if (op == OP_ADD && a.kind == b.kind && is_seq(a)) {
        if (a.kind == J_STR) {
            struct bt_j_sb sb = {0};
            bt_j_sb_str(r, &sb, a.s);
            bt_j_sb_str(r, &sb, b.s);
            return bt_j_string(bt_j_sb_done(&sb));
        }
        struct bt_j_value out = bt_j_new_list(r, a.kind);
        j_work(r, (a.list->n + b.list->n) * J_ELEMENT);
        for (size_t i = 0; i < a.list->n + b.list->n; i++) {
            bt_j_list_add(r, out.list, i < a.list->n ? a.list->v[i] : b.list->v[i - a.list->n]);
        }
        return out;
    }
    if (op == OP_MUL && is_seq(a) && bt_j_is_intlike(b)) {
        return repeat(r, a, bt_j_as_int(b));
    }
    if (op == OP_MUL && is_seq(b) && bt_j_is_intlike(a)) {
        return repeat(r, b, bt_j_as_int(a));
    }
    if (op == OP_MOD && a.kind == J_STR) {
        return bt_j_string(bt_j_format_percent(r, a.s, b));
    }
    bad_operands(r, op, a, b);
}
