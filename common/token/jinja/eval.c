/* Evaluator of chat templates: walks the syntax tree. Errors return to the render by longjmp; all
 * memory of a render is in its arena. Steps, depth and sizes are limited. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/token/jinja/jinja.h"

enum flow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE };

static enum flow exec_body(struct bt_j_render *r, const struct bt_j_nodes *body);

static __attribute__((noreturn)) void leave(struct bt_j_render *r, bt_status_t st, const char *fmt,
                                            va_list ap)
{
    char msg[512];
    vsnprintf(msg, sizeof(msg), fmt, ap);
    if (r->err_cap > 0) {
        snprintf(r->err, r->err_cap, "chat template line %d: %s", r->line, msg);
    }
    r->status = st;
    longjmp(r->fail, 1);
}

void bt_j_fail(struct bt_j_render *r, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    leave(r, BT_ERR_INVALID, fmt, ap);
    va_end(ap);
}

static __attribute__((noreturn, format(printf, 3, 4))) void
fail_with(struct bt_j_render *r, bt_status_t st, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    leave(r, st, fmt, ap);
    va_end(ap);
}

void bt_j_look(struct bt_j_render *r)
{
    if (r->work > r->work_max) {
        uint64_t steps = r->work_max / J_STEP;
        r->work_max = UINT64_MAX; /* so that writing the message is not limited */
        r->look_at = UINT64_MAX;
        fail_with(r, BT_ERR_EXHAUSTED, "more than %llu steps", (unsigned long long)steps);
    }
    if (r->stop != NULL && r->stop(r->stop_arg)) {
        fail_with(r, BT_ERR_CANCELLED, "stopped");
    }
    r->look_at = BT_MIN(r->work + J_LOOK, r->work_max + 1);
}

void bt_j_charge_value(struct bt_j_render *r, struct bt_j_value v)
{
    if (v.kind == J_STR) {
        j_work(r, v.s.n);
    } else if (v.kind == J_LIST || v.kind == J_TUPLE) {
        j_work(r, v.list->n * J_ELEMENT);
    } else if (v.kind == J_DICT || v.kind == J_NAMESPACE) {
        j_work(r, v.dict->n * J_ELEMENT);
    }
}

void bt_j_charge_call(struct bt_j_render *r, enum bt_j_cost cost, struct bt_j_value v,
                      const struct bt_j_call *c)
{
    j_charge(r, 1);
    if (cost == COST_READS) {
        bt_j_charge_value(r, v);
        for (size_t i = 0; i < c->n; i++) {
            bt_j_charge_value(r, c->v[i]);
        }
    }
}

void bt_j_enter(struct bt_j_render *r)
{
    if (++r->depth > J_DEPTH_MAX) {
        bt_j_fail(r, "nested deeper than %d", J_DEPTH_MAX);
    }
}

void bt_j_leave(struct bt_j_render *r)
{
    r->depth--;
}

/* ---- scopes ---- */

static struct bt_j_scope *push_scope(struct bt_j_render *r, struct bt_j_scope *parent)
{
    struct bt_j_scope *s = bt_j_alloc(&r->arena, sizeof(*s));
    s->parent = parent;
    return s;
}

static struct bt_j_value lookup(struct bt_j_render *r, struct bt_j_str name)
{
    const struct bt_j_value *v = bt_j_scope_get(r, r->scope, name);
    if (v != NULL) {
        return *v;
    }
    if (bt_j_is_global(name)) {
        return (struct bt_j_value){.kind = J_GLOBAL, .s = name};
    }
    return (struct bt_j_value){.kind = J_UNDEFINED, .s = name};
}

/* ---- attributes and items ---- */

static __attribute__((noreturn)) void fail_undefined(struct bt_j_render *r, struct bt_j_value v)
{
    bt_j_fail(r, "'%.*s' is undefined", (int)BT_MIN(v.s.n, (size_t)100), v.s.p);
}

static struct bt_j_value loop_attr(struct bt_j_render *r, const struct bt_j_loop *l,
                                   struct bt_j_str name)
{
    int64_t at = (int64_t)l->at, n = (int64_t)l->items->n;
    const struct {
        const char *name;
        struct bt_j_value v;
    } fields[] = {
        {"index", bt_j_int(at + 1)},
        {"index0", bt_j_int(at)},
        {"first", bt_j_bool(at == 0)},
        {"last", bt_j_bool(at + 1 == n)},
        {"length", bt_j_int(n)},
        {"revindex", bt_j_int(n - at)},
        {"revindex0", bt_j_int(n - at - 1)},
        {"depth", bt_j_int(l->depth)},
        {"depth0", bt_j_int(l->depth - 1)},
        {"previtem", at > 0 ? l->items->v[at - 1] : bt_j_undefined("there is no previous item")},
        {"nextitem", at + 1 < n ? l->items->v[at + 1] : bt_j_undefined("there is no next item")},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(fields); i++) {
        if (bt_j_str_is(name, fields[i].name)) {
            return fields[i].v;
        }
    }
    (void)r;
    return (struct bt_j_value){.kind = J_UNDEFINED, .s = name};
}

struct bt_j_value bt_j_get_attr(struct bt_j_render *r, struct bt_j_value v, struct bt_j_str name)
{
    if (v.kind == J_UNDEFINED) {
        fail_undefined(r, v);
    }
    if (bt_j_has_method(v, name)) {
        struct bt_j_method *m = bt_j_alloc(&r->arena, sizeof(*m));
        *m = (struct bt_j_method){v, name};
        return (struct bt_j_value){.kind = J_METHOD, .method = m};
    }
    if (v.kind == J_DICT || v.kind == J_NAMESPACE) {
        const struct bt_j_value *hit = bt_j_dict_get(r, v.dict, bt_j_string(name));
        if (hit != NULL) {
            return *hit;
        }
    } else if (v.kind == J_LOOP) {
        return loop_attr(r, v.loop, name);
    } else if (v.kind == J_MACRO && bt_j_str_is(name, "name")) {
        return bt_j_string(v.macro->node->name);
    }
    return (struct bt_j_value){.kind = J_UNDEFINED, .s = name};
}

struct bt_j_value bt_j_get_item(struct bt_j_render *r, struct bt_j_value v, struct bt_j_value key)
{
    if (v.kind == J_UNDEFINED) {
        fail_undefined(r, v);
    }
    if (v.kind == J_DICT) {
        const struct bt_j_value *hit = NULL;
        if (key.kind != J_LIST && key.kind != J_DICT) {
            hit = bt_j_dict_get(r, v.dict, key);
        }
        if (hit != NULL) {
            return *hit;
        }
    } else if (bt_j_is_intlike(key) && (v.kind == J_LIST || v.kind == J_TUPLE || v.kind == J_STR)) {
        int64_t n = (int64_t)bt_j_length(r, v), i = bt_j_as_int(key);
        i += i < 0 ? n : 0;
        if (i >= 0 && i < n) {
            if (v.kind == J_STR) {
                j_work(r, v.s.n);
                return bt_j_string(bt_j_str_slice(v.s, (size_t)i, (size_t)i + 1));
            }
            return v.list->v[i];
        }
        return bt_j_undefined("the element");
    }
    return key.kind == J_STR ? bt_j_get_attr(r, v, key.s) : bt_j_undefined("the element");
}

/* Python's slice bounds. */
static void slice_bounds(struct bt_j_render *r, const struct bt_j_value part[3], int64_t n,
                         int64_t *from, int64_t *to, int64_t *step)
{
    for (int i = 0; i < 3; i++) {
        if (part[i].kind != J_NONE && !bt_j_is_intlike(part[i])) {
            bt_j_fail(r, "slice indices must be integers or None");
        }
    }
    *step = part[2].kind == J_NONE ? 1 : bt_j_as_int(part[2]);
    if (*step == 0) {
        bt_j_fail(r, "slice step cannot be zero");
    }
    int64_t low = *step > 0 ? 0 : -1, high = *step > 0 ? n : n - 1;
    *from = *step > 0 ? low : high;
    *to = *step > 0 ? high : low;
    int64_t *bound[2] = {from, to};
    for (int i = 0; i < 2; i++) {
        if (part[i].kind != J_NONE) {
            int64_t x = bt_j_as_int(part[i]);
            x += x < 0 ? n : 0;
            *bound[i] = x < low ? low : x > high ? high : x;
        }
    }
}

static struct bt_j_value eval_slice(struct bt_j_render *r, const struct bt_j_node *n)
{
    struct bt_j_value v = bt_j_eval(r, n->a), part[3];
    for (int i = 0; i < 3; i++) {
        part[i] = n->list.v[i] == NULL ? bt_j_none() : bt_j_eval(r, n->list.v[i]);
    }
    if (v.kind == J_UNDEFINED) {
        fail_undefined(r, v);
    }
    if (v.kind != J_STR && v.kind != J_LIST && v.kind != J_TUPLE) {
        bt_j_fail(r, "'%s' object is not subscriptable", bt_j_type_name(v));
    }
    int64_t from, to, step;
    slice_bounds(r, part, (int64_t)bt_j_length(r, v), &from, &to, &step);
    if (v.kind == J_STR && step == 1) {
        j_work(r, v.s.n);
        return bt_j_string(bt_j_str_slice(v.s, (size_t)from, (size_t)BT_MAX(to, from)));
    }
    const struct bt_j_list *items = bt_j_iterate(r, v);
    struct bt_j_value out = bt_j_new_list(r, v.kind == J_TUPLE ? J_TUPLE : J_LIST);
    struct bt_j_sb sb = {0};
    for (int64_t i = from; step > 0 ? i < to : i > to;) {
        if (v.kind == J_STR) {
            bt_j_sb_str(r, &sb, items->v[i].s);
        } else {
            bt_j_list_add(r, out.list, items->v[i]);
        }
        j_charge(r, 1);
        if (__builtin_add_overflow(i, step, &i)) {
            break;
        }
    }
    return v.kind == J_STR ? bt_j_string(bt_j_sb_done(&sb)) : out;
}

/* ---- calls ---- */

static void eval_args(struct bt_j_render *r, const struct bt_j_args *args, struct bt_j_call *c)
{
    for (size_t i = 0; i < args->n; i++) {
        const struct bt_j_arg *a = &args->v[i];
        struct bt_j_value v = bt_j_eval(r, a->value);
        if (a->stars == 1) {
            const struct bt_j_list *l = bt_j_iterate(r, v);
            j_work(r, l->n * J_ELEMENT);
            for (size_t k = 0; k < l->n; k++) {
                bt_j_call_add(r, c, l->v[k]);
            }
        } else if (a->stars == 2) {
            if (v.kind != J_DICT) {
                bt_j_fail(r, "argument after ** must be a mapping, not %s", bt_j_type_name(v));
            }
            for (size_t k = 0; k < v.dict->n; k++) {
                bt_j_dict_set(r, &c->named, v.dict->v[k].key, v.dict->v[k].value);
            }
        } else if (a->name.n > 0) {
            bt_j_dict_set(r, &c->named, bt_j_string(a->name), v);
        } else {
            bt_j_call_add(r, c, v);
        }
    }
}

/* Binds the arguments of a macro in its new scope. */
static void bind_params(struct bt_j_render *r, const struct bt_j_node *m, struct bt_j_scope *s,
                        const struct bt_j_call *c)
{
    size_t used = 0;
    for (size_t i = 0; i < m->args.n; i++) {
        const struct bt_j_arg *p = &m->args.v[i];
        const struct bt_j_value *named = bt_j_dict_get_str(&c->named, p->name);
        used += named != NULL;
        struct bt_j_value v = {.kind = J_UNDEFINED, .s = p->name};
        if (i < c->n) {
            if (named != NULL) {
                bt_j_fail(r, "macro '%.*s' got multiple values for argument '%.*s'", (int)m->name.n,
                          m->name.p, (int)p->name.n, p->name.p);
            }
            v = c->v[i];
        } else if (named != NULL) {
            v = *named;
        } else if (p->value != NULL) {
            v = bt_j_eval(r, p->value);
        }
        bt_j_scope_set(r, s, p->name, v);
    }
    const struct bt_j_value *caller = bt_j_dict_get_str(&c->named, j_cstr("caller"));
    if (caller != NULL) {
        bt_j_scope_set(r, s, j_cstr("caller"), *caller);
        used++;
    }
    if ((c->n > m->args.n && (m->fn & 1) == 0) || (used < c->named.n && (m->fn & 2) == 0)) {
        bt_j_fail(r, "macro '%.*s' got too many or unknown arguments", (int)m->name.n, m->name.p);
    }
    struct bt_j_value rest = bt_j_new_list(r, J_TUPLE), named = bt_j_new_dict(r);
    for (size_t i = m->args.n; i < c->n; i++) {
        bt_j_list_add(r, rest.list, c->v[i]);
    }
    for (size_t i = 0; i < c->named.n; i++) {
        j_work(r, J_ELEMENT * (m->args.n + 1));
        bool param = bt_j_str_is(c->named.v[i].key.s, "caller");
        for (size_t k = 0; k < m->args.n; k++) {
            param = param || bt_j_str_eq(m->args.v[k].name, c->named.v[i].key.s);
        }
        if (!param) {
            bt_j_dict_set(r, named.dict, c->named.v[i].key, c->named.v[i].value);
        }
    }
    bt_j_scope_set(r, s, j_cstr("varargs"), rest);
    bt_j_scope_set(r, s, j_cstr("kwargs"), named);
}

/* Runs `body` in scope `s` and returns its output. */
static struct bt_j_value capture(struct bt_j_render *r, const struct bt_j_nodes *body,
                                 struct bt_j_scope *s)
{
    struct bt_j_sb text = {0}, *out = r->out;
    struct bt_j_scope *scope = r->scope;
    r->out = &text;
    r->scope = s;
    (void)exec_body(r, body);
    r->out = out;
    r->scope = scope;
    return bt_j_string(bt_j_sb_done(&text));
}

static struct bt_j_value call_macro(struct bt_j_render *r, const struct bt_j_macro *m,
                                    const struct bt_j_call *c)
{
    struct bt_j_scope *s = push_scope(r, m->closure), *scope = r->scope;
    r->scope = s; /* defaults may use earlier parameters */
    bind_params(r, m->node, s, c);
    r->scope = scope;
    return capture(r, &m->node->body, s);
}

struct bt_j_value bt_j_apply_call(struct bt_j_render *r, struct bt_j_value fn,
                                  struct bt_j_call *call)
{
    switch (fn.kind) {
    case J_MACRO: return call_macro(r, fn.macro, call);
    case J_METHOD: return bt_j_method_run(r, fn.method->self, fn.method->name, call);
    case J_GLOBAL: return bt_j_global_call(r, fn.s, call);
    case J_UNDEFINED: fail_undefined(r, fn);
    case J_NONE:
    case J_BOOL:
    case J_INT:
    case J_FLOAT:
    case J_STR:
    case J_LIST:
    case J_TUPLE:
    case J_DICT:
    case J_NAMESPACE:
    case J_LOOP: break;
    }
    bt_j_fail(r, "'%s' object is not callable", bt_j_type_name(fn));
}

static struct bt_j_value eval_call(struct bt_j_render *r, const struct bt_j_node *n,
                                   const struct bt_j_value *caller)
{
    struct bt_j_call call = {0};
    struct bt_j_value fn = bt_j_eval(r, n->a);
    eval_args(r, &n->args, &call);
    if (caller != NULL) {
        bt_j_dict_set(r, &call.named, bt_j_string(j_cstr("caller")), *caller);
    }
    r->line = n->line;
    return bt_j_apply_call(r, fn, &call);
}

/* ---- expressions ---- */

static bool compare_one(struct bt_j_render *r, enum bt_j_op op, struct bt_j_value a,
                        struct bt_j_value b)
{
    switch (op) {
    case OP_EQ: return bt_j_equal(r, a, b);
    case OP_NE: return !bt_j_equal(r, a, b);
    case OP_IN: return bt_j_contains(r, b, a);
    case OP_NOTIN: return !bt_j_contains(r, b, a);
    case OP_LT:
    case OP_LE:
    case OP_GT:
    case OP_GE:
    case OP_ADD:
    case OP_SUB:
    case OP_MUL:
    case OP_DIV:
    case OP_FLOORDIV:
    case OP_MOD:
    case OP_POW: break;
    }
    if (a.kind == J_UNDEFINED || b.kind == J_UNDEFINED) {
        fail_undefined(r, a.kind == J_UNDEFINED ? a : b);
    }
    int c = bt_j_compare(r, a, b);
    return op == OP_LT ? c < 0 : op == OP_LE ? c <= 0 : op == OP_GT ? c > 0 : c >= 0;
}

static struct bt_j_value eval_compare(struct bt_j_render *r, const struct bt_j_node *n)
{
    struct bt_j_value left = bt_j_eval(r, n->a);
    for (size_t i = 0; i < n->list.n; i++) {
        struct bt_j_value right = bt_j_eval(r, n->list.v[i]);
        if (!compare_one(r, n->ops[i], left, right)) {
            return bt_j_bool(false);
        }
        left = right;
    }
    return bt_j_bool(true);
}

static struct bt_j_value eval_unary(struct bt_j_render *r, const struct bt_j_node *n)
{
    struct bt_j_value v = bt_j_eval(r, n->a);
    if (v.kind == J_UNDEFINED) {
        fail_undefined(r, v);
    }
    if (!bt_j_is_num(v)) {
        bt_j_fail(r, "bad operand type for unary %s: '%s'", n->kind == N_NEG ? "-" : "+",
                  bt_j_type_name(v));
    }
    if (v.kind == J_FLOAT) {
        return bt_j_float(n->kind == N_NEG ? -v.f : v.f);
    }
    return n->kind == N_NEG ? bt_j_binary(r, OP_SUB, bt_j_int(0), v) : bt_j_int(bt_j_as_int(v));
}

static struct bt_j_value eval_collection(struct bt_j_render *r, const struct bt_j_node *n)
{
    if (n->kind == N_CONCAT) {
        struct bt_j_sb sb = {0};
        for (size_t i = 0; i < n->list.n; i++) {
            bt_j_sb_str(r, &sb, bt_j_to_str(r, bt_j_eval(r, n->list.v[i])));
        }
        return bt_j_string(bt_j_sb_done(&sb));
    }
    if (n->kind == N_DICT) {
        struct bt_j_value d = bt_j_new_dict(r);
        for (size_t i = 0; i + 1 < n->list.n; i += 2) {
            struct bt_j_value key = bt_j_eval(r, n->list.v[i]);
            bt_j_dict_set(r, d.dict, key, bt_j_eval(r, n->list.v[i + 1]));
        }
        return d;
    }
    struct bt_j_value l = bt_j_new_list(r, n->kind == N_LIST ? J_LIST : J_TUPLE);
    for (size_t i = 0; i < n->list.n; i++) {
        bt_j_list_add(r, l.list, bt_j_eval(r, n->list.v[i]));
    }
    return l;
}

/* Evaluates a chain of filters. `input` is its start if the chain has none of its own (filter
 * blocks). */
static struct bt_j_value eval_filter(struct bt_j_render *r, const struct bt_j_node *n,
                                     const struct bt_j_value *input)
{
    struct bt_j_value v = n->a == NULL                              ? *input
                          : input != NULL && n->a->kind == N_FILTER ? eval_filter(r, n->a, input)
                                                                    : bt_j_eval(r, n->a);
    struct bt_j_call call = {0};
    eval_args(r, &n->args, &call);
    r->line = n->line;
    return bt_j_filter_run(r, n->fn, v, &call);
}

static struct bt_j_value eval_test(struct bt_j_render *r, const struct bt_j_node *n)
{
    struct bt_j_call call = {0};
    struct bt_j_value v = bt_j_eval(r, n->a);
    eval_args(r, &n->args, &call);
    r->line = n->line;
    return bt_j_bool(bt_j_test_run(r, n->fn, v, &call));
}

static struct bt_j_value eval_binary(struct bt_j_render *r, const struct bt_j_node *n)
{
    struct bt_j_value a = bt_j_eval(r, n->a), b = bt_j_eval(r, n->b);
    r->line = n->line;
    return bt_j_binary(r, n->op, a, b);
}

static struct bt_j_value eval_node(struct bt_j_render *r, const struct bt_j_node *n)
{
    struct bt_j_value v;
    switch (n->kind) {
    case N_CONST: return n->value;
    case N_NAME: return lookup(r, n->name);
    case N_LIST:
    case N_TUPLE:
    case N_DICT:
    case N_CONCAT: return eval_collection(r, n);
    case N_ATTR: return bt_j_get_attr(r, bt_j_eval(r, n->a), n->name);
    case N_ITEM: v = bt_j_eval(r, n->a); return bt_j_get_item(r, v, bt_j_eval(r, n->b));
    case N_SLICE: return eval_slice(r, n);
    case N_CALL: return eval_call(r, n, NULL);
    case N_FILTER: return eval_filter(r, n, NULL);
    case N_TEST: return eval_test(r, n);
    case N_NOT: return bt_j_bool(!bt_j_truth(bt_j_eval(r, n->a)));
    case N_NEG:
    case N_POS: return eval_unary(r, n);
    case N_AND: v = bt_j_eval(r, n->a); return bt_j_truth(v) ? bt_j_eval(r, n->b) : v;
    case N_OR: v = bt_j_eval(r, n->a); return bt_j_truth(v) ? v : bt_j_eval(r, n->b);
    case N_COND:
        return bt_j_truth(bt_j_eval(r, n->a)) ? bt_j_eval(r, n->b)
               : n->c != NULL                 ? bt_j_eval(r, n->c)
                                              : bt_j_undefined("the else branch");
    case N_COMPARE: return eval_compare(r, n);
    case N_BINARY: return eval_binary(r, n);
    case N_TEXT:
    case N_PRINT:
    case N_IF:
    case N_FOR:
    case N_SET:
    case N_SETBLOCK:
    case N_MACRO:
    case N_CALLBLOCK:
    case N_FILTERBLOCK:
    case N_WITH:
    case N_SCOPE:
    case N_BREAK:
    case N_CONTINUE: break;
    }
    bt_j_fail(r, "a statement where an expression is needed");
}

struct bt_j_value bt_j_eval(struct bt_j_render *r, const struct bt_j_node *n)
{
    bt_j_enter(r);
    j_charge(r, 1);
    r->line = n->line;
    struct bt_j_value v = eval_node(r, n);
    bt_j_leave(r);
    return v;
}

/* ---- statements ---- */

static void assign(struct bt_j_render *r, struct bt_j_scope *s, const struct bt_j_node *target,
                   struct bt_j_value v)
{
    if (target->kind == N_NAME) {
        bt_j_scope_set(r, s, target->name, v);
    } else if (target->kind == N_ATTR) {
        struct bt_j_value ns = lookup(r, target->a->name);
        if (ns.kind != J_NAMESPACE) {
            bt_j_fail(r, "cannot assign attribute on non-namespace object");
        }
        bt_j_dict_set(r, ns.dict, bt_j_string(target->name), v);
    } else {
        const struct bt_j_list *items = bt_j_iterate(r, v);
        if (items->n != target->list.n) {
            bt_j_fail(r, "%s values to unpack (expected %zu, got %zu)",
                      items->n < target->list.n ? "not enough" : "too many", target->list.n,
                      items->n);
        }
        for (size_t i = 0; i < items->n; i++) {
            assign(r, s, target->list.v[i], items->v[i]);
        }
    }
}

/* The elements of a loop: all, or those for which its condition is true. */
static const struct bt_j_list *loop_items(struct bt_j_render *r, const struct bt_j_node *n)
{
    const struct bt_j_list *all = bt_j_iterate(r, bt_j_eval(r, n->b));
    struct bt_j_list *kept = bt_j_new_list(r, J_LIST).list; /* a copy: the body may append */
    struct bt_j_scope *outer = r->scope;
    for (size_t i = 0; i < all->n; i++) {
        bool keep = true;
        j_charge(r, 1);
        if (n->c != NULL) {
            r->scope = push_scope(r, outer);
            assign(r, r->scope, n->a, all->v[i]);
            keep = bt_j_truth(bt_j_eval(r, n->c));
            r->scope = outer;
        }
        if (keep) {
            bt_j_list_add(r, kept, all->v[i]);
        }
    }
    return kept;
}

static enum flow exec_for(struct bt_j_render *r, const struct bt_j_node *n)
{
    const struct bt_j_list *items = loop_items(r, n);
    if (items->n == 0) {
        return exec_body(r, &n->orelse);
    }
    struct bt_j_scope *outer = r->scope;
    struct bt_j_loop *loop = bt_j_alloc(&r->arena, sizeof(*loop));
    loop->items = items;
    loop->depth = 1;
    for (size_t i = 0; i < items->n; i++) {
        loop->at = i;
        r->scope = push_scope(r, outer);
        bt_j_scope_set(r, r->scope, j_cstr("loop"),
                       (struct bt_j_value){.kind = J_LOOP, .loop = loop});
        assign(r, r->scope, n->a, items->v[i]);
        enum flow f = exec_body(r, &n->body);
        r->scope = outer;
        j_charge(r, 1);
        if (f == FLOW_BREAK) {
            break;
        }
    }
    return FLOW_NEXT;
}

static void exec_macro(struct bt_j_render *r, const struct bt_j_node *n)
{
    struct bt_j_macro *m = bt_j_alloc(&r->arena, sizeof(*m));
    *m = (struct bt_j_macro){n, r->scope};
    bt_j_scope_set(r, r->scope, n->name, (struct bt_j_value){.kind = J_MACRO, .macro = m});
}

static void exec_call_block(struct bt_j_render *r, const struct bt_j_node *n)
{
    struct bt_j_macro *m = bt_j_alloc(&r->arena, sizeof(*m));
    *m = (struct bt_j_macro){n, r->scope};
    struct bt_j_value caller = {.kind = J_MACRO, .macro = m};
    bt_j_sb_str(r, r->out, bt_j_to_str(r, eval_call(r, n->a, &caller)));
}

static enum flow exec_scoped(struct bt_j_render *r, const struct bt_j_node *n)
{
    struct bt_j_scope *outer = r->scope, *s = push_scope(r, outer);
    for (size_t i = 0; i < n->list.n; i++) { /* with: values are evaluated in the outer scope */
        assign(r, s, n->list.v[i]->a, bt_j_eval(r, n->list.v[i]->b));
    }
    r->scope = s;
    enum flow f = exec_body(r, &n->body);
    r->scope = outer;
    return f;
}

static enum flow exec_node(struct bt_j_render *r, const struct bt_j_node *n)
{
    struct bt_j_value v;
    switch (n->kind) {
    case N_TEXT: bt_j_sb_str(r, r->out, n->name); break;
    case N_PRINT: bt_j_sb_str(r, r->out, bt_j_to_str(r, bt_j_eval(r, n->a))); break;
    case N_IF: return exec_body(r, bt_j_truth(bt_j_eval(r, n->a)) ? &n->body : &n->orelse);
    case N_FOR: return exec_for(r, n);
    case N_SET: assign(r, r->scope, n->a, bt_j_eval(r, n->b)); break;
    case N_SETBLOCK:
    case N_FILTERBLOCK:
        v = capture(r, &n->body, push_scope(r, r->scope));
        if (n->b != NULL) {
            v = eval_filter(r, n->b, &v);
        }
        if (n->kind == N_SETBLOCK) {
            assign(r, r->scope, n->a, v);
        } else {
            bt_j_sb_str(r, r->out, bt_j_to_str(r, v));
        }
        break;
    case N_MACRO: exec_macro(r, n); break;
    case N_CALLBLOCK: exec_call_block(r, n); break;
    case N_WITH:
    case N_SCOPE: return exec_scoped(r, n);
    case N_BREAK: return FLOW_BREAK;
    case N_CONTINUE: return FLOW_CONTINUE;
    case N_CONST:
    case N_NAME:
    case N_LIST:
    case N_TUPLE:
    case N_DICT:
    case N_ATTR:
    case N_ITEM:
    case N_SLICE:
    case N_CALL:
    case N_FILTER:
    case N_TEST:
    case N_NOT:
    case N_NEG:
    case N_POS:
    case N_AND:
    case N_OR:
    case N_COND:
    case N_COMPARE:
    case N_BINARY:
    case N_CONCAT: bt_j_fail(r, "an expression where a statement is needed");
    }
    return FLOW_NEXT;
}

static enum flow exec_body(struct bt_j_render *r, const struct bt_j_nodes *body)
{
    enum flow f = FLOW_NEXT;
    bt_j_enter(r);
    for (size_t i = 0; i < body->n && f == FLOW_NEXT; i++) {
        j_charge(r, 1);
        r->line = body->v[i]->line;
        f = exec_node(r, body->v[i]);
    }
    bt_j_leave(r);
    return f;
}

void bt_j_exec(struct bt_j_render *r, const struct bt_j_nodes *body)
{
    (void)exec_body(r, body);
}
