/* Parser of chat templates: recursive descent with Jinja's precedences. It checks the names of all
 * filters, tests, methods and global functions: unknown ones are refused with their line. Pure. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/token/jinja/jinja.h"

static struct bt_j_node *parse_expr(struct bt_j_compile *c);
static struct bt_j_node *parse_or(struct bt_j_compile *c);
static struct bt_j_node *parse_unary(struct bt_j_compile *c, bool with_filter);
static struct bt_j_node *parse_primary(struct bt_j_compile *c);
static struct bt_j_node *parse_postfix(struct bt_j_compile *c, struct bt_j_node *n);
static struct bt_j_node *parse_filters(struct bt_j_compile *c, struct bt_j_node *n);
static struct bt_j_nodes parse_body(struct bt_j_compile *c, const char *const *ends);

void bt_j_compile_fail(struct bt_j_compile *c, bt_status_t st, int line, const char *fmt, ...)
{
    char msg[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    if (c->err_cap > 0) {
        snprintf(c->err, c->err_cap, "chat template line %d: %s", line, msg);
    }
    c->status = st;
    longjmp(c->fail, 1);
}

static struct bt_j_token *cur(struct bt_j_compile *c)
{
    return &c->tokens[c->at];
}

static struct bt_j_token *ahead(struct bt_j_compile *c)
{
    return &c->tokens[BT_MIN(c->at + 1, c->n_tokens - 1)];
}

static bool is_op(const struct bt_j_token *t, const char *op)
{
    return t->kind == T_OP && bt_j_str_is(t->s, op);
}

static bool is_name(const struct bt_j_token *t, const char *name)
{
    return t->kind == T_NAME && bt_j_str_is(t->s, name);
}

static bool eat_op(struct bt_j_compile *c, const char *op)
{
    bool yes = is_op(cur(c), op);
    c->at += yes;
    return yes;
}

static bool eat_name(struct bt_j_compile *c, const char *name)
{
    bool yes = is_name(cur(c), name);
    c->at += yes;
    return yes;
}

static __attribute__((noreturn)) void unexpected(struct bt_j_compile *c, const char *want)
{
    static const char *const kinds[] = {"the end of the template",
                                        "text",
                                        "{%",
                                        "%}",
                                        "{{",
                                        "}}",
                                        "",
                                        "a string",
                                        "a number",
                                        "a number",
                                        ""};
    struct bt_j_token *t = cur(c);
    bool shown = t->kind == T_NAME || t->kind == T_OP;
    bt_j_compile_fail(c, BT_ERR_INVALID, t->line, "expected %s, found %s%.*s", want, kinds[t->kind],
                      shown ? (int)BT_MIN(t->s.n, (size_t)60) : 0, shown ? t->s.p : "");
}

static void expect_op(struct bt_j_compile *c, const char *op)
{
    if (!eat_op(c, op)) {
        unexpected(c, op);
    }
}

static struct bt_j_str expect_name(struct bt_j_compile *c)
{
    if (cur(c)->kind != T_NAME) {
        unexpected(c, "a name");
    }
    return c->tokens[c->at++].s;
}

static void expect_kind(struct bt_j_compile *c, enum bt_j_tok_kind kind, const char *what)
{
    if (cur(c)->kind != kind) {
        unexpected(c, what);
    }
    c->at++;
}

static struct bt_j_node *node(struct bt_j_compile *c, enum bt_j_node_kind kind)
{
    struct bt_j_node *n = bt_j_alloc(c->arena, sizeof(*n));
    n->kind = kind;
    n->line = cur(c)->line;
    return n;
}

static void add(struct bt_j_compile *c, struct bt_j_nodes *l, struct bt_j_node *n)
{
    l->v = bt_j_grow(c->arena, l->v, l->n, &l->cap, sizeof(struct bt_j_node *));
    l->v[l->n++] = n;
}

static void define(struct bt_j_compile *c, struct bt_j_str name)
{
    c->defined = bt_j_grow(c->arena, c->defined, c->n_defined, &c->cap_defined, sizeof(name));
    c->defined[c->n_defined++] = name;
}

static void deeper(struct bt_j_compile *c)
{
    if (++c->depth > J_PARSE_MAX) {
        bt_j_compile_fail(c, BT_ERR_UNSUPPORTED, cur(c)->line, "nested deeper than %d",
                          J_PARSE_MAX);
    }
}

/* ---- expressions ---- */

static struct bt_j_args parse_args(struct bt_j_compile *c)
{
    struct bt_j_args args = {0};
    expect_op(c, "(");
    while (!is_op(cur(c), ")")) {
        if (args.n > 0) {
            expect_op(c, ",");
            if (is_op(cur(c), ")")) {
                break;
            }
        }
        struct bt_j_arg a = {0};
        if (eat_op(c, "**")) {
            a.stars = 2;
        } else if (eat_op(c, "*")) {
            a.stars = 1;
        } else if (cur(c)->kind == T_NAME && is_op(ahead(c), "=")) {
            a.name = expect_name(c);
            c->at++;
        }
        a.value = parse_expr(c);
        args.v = bt_j_grow(c->arena, args.v, args.n, &args.cap, sizeof(a));
        args.v[args.n++] = a;
    }
    expect_op(c, ")");
    return args;
}

static struct bt_j_node *constant(struct bt_j_compile *c, struct bt_j_value v)
{
    struct bt_j_node *n = node(c, N_CONST);
    n->value = v;
    return n;
}

/* Elements up to the closing bracket. */
static void parse_elements(struct bt_j_compile *c, struct bt_j_nodes *l, const char *close)
{
    while (!eat_op(c, close)) {
        if (l->n > 0) {
            expect_op(c, ",");
            if (eat_op(c, close)) {
                return;
            }
        }
        add(c, l, parse_expr(c));
    }
}

static struct bt_j_node *parse_paren(struct bt_j_compile *c)
{
    struct bt_j_node *tuple = node(c, N_TUPLE);
    c->at++;
    if (eat_op(c, ")")) {
        return tuple;
    }
    struct bt_j_node *first = parse_expr(c);
    if (eat_op(c, ")")) {
        return first;
    }
    add(c, &tuple->list, first);
    parse_elements(c, &tuple->list, ")");
    return tuple;
}

static struct bt_j_node *parse_dict(struct bt_j_compile *c)
{
    struct bt_j_node *n = node(c, N_DICT);
    c->at++;
    while (!eat_op(c, "}")) {
        if (n->list.n > 0) {
            expect_op(c, ",");
            if (eat_op(c, "}")) {
                break;
            }
        }
        add(c, &n->list, parse_expr(c));
        expect_op(c, ":");
        add(c, &n->list, parse_expr(c));
    }
    return n;
}

static struct bt_j_node *parse_name(struct bt_j_compile *c)
{
    struct bt_j_token *t = cur(c);
    struct bt_j_node *n;
    if (is_name(t, "true") || is_name(t, "True")) {
        n = constant(c, bt_j_bool(true));
    } else if (is_name(t, "false") || is_name(t, "False")) {
        n = constant(c, bt_j_bool(false));
    } else if (is_name(t, "none") || is_name(t, "None")) {
        n = constant(c, bt_j_none());
    } else {
        static const char *const reserved[] = {"in", "is", "if", "else", "and", "or"};
        for (size_t i = 0; i < BT_ARRAY_LEN(reserved); i++) {
            if (is_name(t, reserved[i])) {
                unexpected(c, "an expression");
            }
        }
        n = node(c, N_NAME);
        n->name = t->s;
        c->var_use |= is_name(t, "varargs") ? 1 : is_name(t, "kwargs") ? 2 : 0;
    }
    c->at++;
    return n;
}

static struct bt_j_node *parse_primary(struct bt_j_compile *c)
{
    struct bt_j_token *t = cur(c);
    struct bt_j_node *n;
    switch (t->kind) {
    case T_NAME: return parse_name(c);
    case T_INT: n = constant(c, bt_j_int(t->i)); break;
    case T_FLOAT: n = constant(c, bt_j_float(t->f)); break;
    case T_STR: {
        struct bt_j_str s = t->s;
        n = constant(c, bt_j_none());
        while (ahead(c)->kind == T_STR) { /* adjacent strings are joined */
            c->at++;
            struct bt_j_str more = cur(c)->s;
            char *p = bt_j_alloc(c->arena, s.n + more.n + 1);
            memcpy(p, s.p, s.n);
            memcpy(p + s.n, more.p, more.n);
            s = (struct bt_j_str){p, s.n + more.n};
        }
        n->value = bt_j_string(s);
        break;
    }
    case T_OP:
        if (is_op(t, "(")) {
            return parse_paren(c);
        }
        if (is_op(t, "[")) {
            n = node(c, N_LIST);
            c->at++;
            parse_elements(c, &n->list, "]");
            return n;
        }
        if (is_op(t, "{")) {
            return parse_dict(c);
        }
        unexpected(c, "an expression");
    case T_EOF:
    case T_DATA:
    case T_BLOCK_BEGIN:
    case T_BLOCK_END:
    case T_VAR_BEGIN:
    case T_VAR_END:
    default: unexpected(c, "an expression");
    }
    c->at++;
    return n;
}

static struct bt_j_node *parse_subscript(struct bt_j_compile *c, struct bt_j_node *of)
{
    struct bt_j_node *n = node(c, N_ITEM);
    n->a = of;
    c->at++;
    struct bt_j_node *part[3] = {NULL, NULL, NULL};
    int at = 0;
    bool slice = false;
    for (;;) {
        if (is_op(cur(c), "]")) {
            break;
        }
        if (eat_op(c, ":")) {
            slice = true;
            if (++at > 2) {
                unexpected(c, "]");
            }
            continue;
        }
        if (part[at] != NULL) {
            unexpected(c, "]");
        }
        part[at] = parse_expr(c);
        if (is_op(cur(c), ",")) {
            bt_j_compile_fail(c, BT_ERR_UNSUPPORTED, n->line, "a tuple as subscript");
        }
    }
    expect_op(c, "]");
    if (slice) {
        n->kind = N_SLICE;
        for (int i = 0; i < 3; i++) {
            add(c, &n->list, part[i]);
        }
    } else if ((n->b = part[0]) == NULL) {
        c->at--;
        unexpected(c, "a subscript");
    }
    return n;
}

static struct bt_j_node *parse_call(struct bt_j_compile *c, struct bt_j_node *fn)
{
    struct bt_j_node *n = node(c, N_CALL);
    n->a = fn;
    n->args = parse_args(c);
    if (fn->kind == N_ATTR && !bt_j_method_known(fn->name)) {
        bt_j_compile_fail(c, BT_ERR_UNSUPPORTED, n->line, "the method .%.*s() is not supported",
                          (int)BT_MIN(fn->name.n, (size_t)60), fn->name.p);
    }
    if (fn->kind == N_NAME && !bt_j_is_global(fn->name)) {
        size_t cap = c->cap_called;
        c->called = bt_j_grow(c->arena, c->called, c->n_called, &cap, sizeof(*c->called));
        c->called_line =
            bt_j_grow(c->arena, c->called_line, c->n_called, &c->cap_called, sizeof(int));
        c->called[c->n_called] = fn->name;
        c->called_line[c->n_called++] = n->line;
    }
    return n;
}

static struct bt_j_node *parse_postfix(struct bt_j_compile *c, struct bt_j_node *n)
{
    for (;;) {
        if (is_op(cur(c), ".")) {
            c->at++;
            if (cur(c)->kind == T_INT) {
                struct bt_j_node *item = node(c, N_ITEM);
                item->a = n;
                item->b = constant(c, bt_j_int(cur(c)->i));
                c->at++;
                n = item;
                continue;
            }
            struct bt_j_node *attr = node(c, N_ATTR);
            attr->a = n;
            attr->name = expect_name(c);
            n = attr;
        } else if (is_op(cur(c), "[")) {
            n = parse_subscript(c, n);
        } else if (is_op(cur(c), "(")) {
            n = parse_call(c, n);
        } else {
            return n;
        }
    }
}

/* At the name after "|". */
static struct bt_j_node *parse_filter(struct bt_j_compile *c, struct bt_j_node *of)
{
    struct bt_j_node *n = node(c, N_FILTER);
    n->a = of;
    n->name = expect_name(c);
    n->fn = bt_j_filter_find(n->name);
    if (n->fn < 0 || is_op(cur(c), ".")) {
        bt_j_compile_fail(c, BT_ERR_UNSUPPORTED, n->line, "the filter \"%.*s\" is not supported",
                          (int)BT_MIN(n->name.n, (size_t)60), n->name.p);
    }
    if (is_op(cur(c), "(")) {
        n->args = parse_args(c);
    }
    /* map, select and similar filters name another filter or test in their first argument */
    const struct bt_j_node *first = n->args.n > 0 ? n->args.v[0].value : NULL;
    bool literal = first != NULL && n->args.v[0].name.n == 0 && first->kind == N_CONST &&
                   first->value.kind == J_STR;
    const struct bt_j_node *second = n->args.n > 1 ? n->args.v[1].value : NULL;
    if (bt_j_str_is(n->name, "map") && literal && bt_j_filter_find(first->value.s) < 0) {
        bt_j_compile_fail(c, BT_ERR_UNSUPPORTED, n->line, "the filter \"%.*s\" is not supported",
                          (int)BT_MIN(first->value.s.n, (size_t)60), first->value.s.p);
    }
    const struct bt_j_node *test = NULL;
    if (bt_j_str_is(n->name, "select") || bt_j_str_is(n->name, "reject")) {
        test = first;
    } else if (bt_j_str_is(n->name, "selectattr") || bt_j_str_is(n->name, "rejectattr")) {
        test = second;
    }
    if (test != NULL && test->kind == N_CONST && test->value.kind == J_STR &&
        bt_j_test_find(test->value.s) < 0) {
        bt_j_compile_fail(c, BT_ERR_UNSUPPORTED, n->line, "the test \"%.*s\" is not supported",
                          (int)BT_MIN(test->value.s.n, (size_t)60), test->value.s.p);
    }
    return n;
}

static struct bt_j_node *parse_test(struct bt_j_compile *c, struct bt_j_node *of)
{
    struct bt_j_node *n = node(c, N_TEST);
    bool negated = eat_name(c, "not");
    n->a = of;
    n->name = expect_name(c);
    n->fn = bt_j_test_find(n->name);
    if (n->fn < 0 || is_op(cur(c), ".")) {
        bt_j_compile_fail(c, BT_ERR_UNSUPPORTED, n->line, "the test \"%.*s\" is not supported",
                          (int)BT_MIN(n->name.n, (size_t)60), n->name.p);
    }
    static const char *const stop[] = {"else", "or", "and", "if", "in", "is", "not"};
    struct bt_j_token *t = cur(c);
    bool arg = t->kind == T_STR || t->kind == T_INT || t->kind == T_FLOAT || is_op(t, "[") ||
               is_op(t, "{") || t->kind == T_NAME;
    for (size_t i = 0; i < BT_ARRAY_LEN(stop); i++) {
        arg = arg && !is_name(t, stop[i]);
    }
    if (is_op(t, "(")) {
        n->args = parse_args(c);
    } else if (arg) {
        struct bt_j_arg a = {.value = parse_postfix(c, parse_primary(c))};
        n->args.v = bt_j_grow(c->arena, NULL, 0, &n->args.cap, sizeof(a));
        n->args.v[n->args.n++] = a;
    }
    if (negated) {
        struct bt_j_node *not = node(c, N_NOT);
        not ->a = n;
        return not ;
    }
    return n;
}

static struct bt_j_node *parse_filters(struct bt_j_compile *c, struct bt_j_node *n)
{
    for (;;) {
        if (eat_op(c, "|")) {
            n = parse_filter(c, n);
        } else if (eat_name(c, "is")) {
            n = parse_test(c, n);
        } else if (is_op(cur(c), "(")) {
            n = parse_call(c, n);
        } else {
            return n;
        }
    }
}

static struct bt_j_node *parse_unary(struct bt_j_compile *c, bool with_filter)
{
    struct bt_j_node *n;
    deeper(c);
    if (is_op(cur(c), "-") || is_op(cur(c), "+")) {
        n = node(c, is_op(cur(c), "-") ? N_NEG : N_POS);
        c->at++;
        n->a = parse_unary(c, false);
    } else {
        n = parse_primary(c);
    }
    n = parse_postfix(c, n);
    if (with_filter) {
        n = parse_filters(c, n);
    }
    c->depth--;
    return n;
}

struct level {
    const char *text;
    enum bt_j_op op;
};

static struct bt_j_node *binary(struct bt_j_compile *c, enum bt_j_op op, struct bt_j_node *a)
{
    struct bt_j_node *n = node(c, N_BINARY);
    n->op = op;
    n->a = a;
    return n;
}

static struct bt_j_node *parse_pow(struct bt_j_compile *c)
{
    struct bt_j_node *left = parse_unary(c, true);
    while (is_op(cur(c), "**")) {
        struct bt_j_node *n = binary(c, OP_POW, left);
        c->at++;
        n->b = parse_unary(c, true);
        left = n;
    }
    return left;
}

static struct bt_j_node *parse_product(struct bt_j_compile *c)
{
    static const struct level ops[] = {
        {"*", OP_MUL}, {"/", OP_DIV}, {"//", OP_FLOORDIV}, {"%", OP_MOD}};
    struct bt_j_node *left = parse_pow(c);
    for (size_t i = 0; i < BT_ARRAY_LEN(ops);) {
        if (!is_op(cur(c), ops[i].text)) {
            i++;
            continue;
        }
        struct bt_j_node *n = binary(c, ops[i].op, left);
        c->at++;
        n->b = parse_pow(c);
        left = n;
        i = 0;
    }
    return left;
}

static struct bt_j_node *parse_concat(struct bt_j_compile *c)
{
    struct bt_j_node *first = parse_product(c);
    if (!is_op(cur(c), "~")) {
        return first;
    }
    struct bt_j_node *n = node(c, N_CONCAT);
    add(c, &n->list, first);
    while (eat_op(c, "~")) {
        add(c, &n->list, parse_product(c));
    }
    return n;
}

static struct bt_j_node *parse_sum(struct bt_j_compile *c)
{
    struct bt_j_node *left = parse_concat(c);
    while (is_op(cur(c), "+") || is_op(cur(c), "-")) {
        struct bt_j_node *n = binary(c, is_op(cur(c), "+") ? OP_ADD : OP_SUB, left);
        c->at++;
        n->b = parse_concat(c);
        left = n;
    }
    return left;
}

static bool compare_op(struct bt_j_compile *c, enum bt_j_op *op_p)
{
    static const struct level ops[] = {{"==", OP_EQ}, {"!=", OP_NE}, {"<", OP_LT},
                                       {"<=", OP_LE}, {">", OP_GT},  {">=", OP_GE}};
    for (size_t i = 0; i < BT_ARRAY_LEN(ops); i++) {
        if (eat_op(c, ops[i].text)) {
            *op_p = ops[i].op;
            return true;
        }
    }
    if (eat_name(c, "in")) {
        *op_p = OP_IN;
        return true;
    }
    if (is_name(cur(c), "not") && is_name(ahead(c), "in")) {
        c->at += 2;
        *op_p = OP_NOTIN;
        return true;
    }
    return false;
}

static struct bt_j_node *parse_compare(struct bt_j_compile *c)
{
    struct bt_j_node *first = parse_sum(c), *n = NULL;
    enum bt_j_op op;
    size_t cap = 0;
    while (compare_op(c, &op)) {
        if (n == NULL) {
            n = node(c, N_COMPARE);
            n->a = first;
        }
        n->ops = bt_j_grow(c->arena, n->ops, n->list.n, &cap, sizeof(op));
        n->ops[n->list.n] = op;
        add(c, &n->list, parse_sum(c));
    }
    return n == NULL ? first : n;
}

static struct bt_j_node *parse_not(struct bt_j_compile *c)
{
    if (!is_name(cur(c), "not")) {
        return parse_compare(c);
    }
    struct bt_j_node *n = node(c, N_NOT);
    deeper(c);
    c->at++;
    n->a = parse_not(c);
    c->depth--;
    return n;
}

static struct bt_j_node *parse_and(struct bt_j_compile *c)
{
    struct bt_j_node *left = parse_not(c);
    while (is_name(cur(c), "and")) {
        struct bt_j_node *n = node(c, N_AND);
        c->at++;
        n->a = left;
        n->b = parse_not(c);
        left = n;
    }
    return left;
}

static struct bt_j_node *parse_or(struct bt_j_compile *c)
{
    struct bt_j_node *left = parse_and(c);
    while (is_name(cur(c), "or")) {
        struct bt_j_node *n = node(c, N_OR);
        c->at++;
        n->a = left;
        n->b = parse_and(c);
        left = n;
    }
    return left;
}

static struct bt_j_node *parse_expr(struct bt_j_compile *c)
{
    deeper(c);
    struct bt_j_node *n = parse_or(c);
    while (is_name(cur(c), "if")) {
        struct bt_j_node *cond = node(c, N_COND);
        c->at++;
        cond->b = n;
        cond->a = parse_or(c);
        if (eat_name(c, "else")) {
            cond->c = parse_expr(c);
        }
        n = cond;
    }
    c->depth--;
    return n;
}

/* expr or expr, expr ... (a tuple without parentheses). */
static struct bt_j_node *parse_tuple(struct bt_j_compile *c, bool with_cond)
{
    struct bt_j_node *first = with_cond ? parse_expr(c) : parse_or(c);
    if (!is_op(cur(c), ",")) {
        return first;
    }
    struct bt_j_node *n = node(c, N_TUPLE);
    add(c, &n->list, first);
    while (eat_op(c, ",")) {
        if (cur(c)->kind == T_BLOCK_END || cur(c)->kind == T_VAR_END || is_op(cur(c), "=")) {
            break;
        }
        add(c, &n->list, with_cond ? parse_expr(c) : parse_or(c));
    }
    return n;
}

/* ---- statements ---- */

/* name, name.attr (of a namespace) or a tuple of names. */
static struct bt_j_node *parse_target(struct bt_j_compile *c, bool with_attr)
{
    struct bt_j_node *tuple = node(c, N_TUPLE), *one = NULL;
    bool paren = eat_op(c, "(");
    do {
        if (tuple->list.n > 0 && cur(c)->kind != T_NAME) {
            break;
        }
        one = node(c, N_NAME);
        one->name = expect_name(c);
        if (with_attr && is_op(cur(c), ".")) {
            c->at++;
            struct bt_j_node *attr = node(c, N_ATTR);
            attr->a = one;
            attr->name = expect_name(c);
            one = attr;
        } else {
            define(c, one->name);
        }
        add(c, &tuple->list, one);
    } while (eat_op(c, ","));
    if (paren) {
        expect_op(c, ")");
    }
    return tuple->list.n == 1 && !is_op(&c->tokens[c->at - 1], ",") ? one : tuple;
}

static void block_end(struct bt_j_compile *c)
{
    expect_kind(c, T_BLOCK_END, "%}");
}

/* After {% NAME: reads "NAME %}" of the end tag. */
static void end_tag(struct bt_j_compile *c, const char *name)
{
    if (!eat_name(c, name)) {
        unexpected(c, name);
    }
    if (cur(c)->kind == T_NAME) { /* {% endmacro name %} */
        c->at++;
    }
    block_end(c);
}

static void parse_if(struct bt_j_compile *c, struct bt_j_node *n)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    n->kind = N_IF;
    n->a = parse_tuple(c, false);
    block_end(c);
    n->body = parse_body(c, ends);
    if (is_name(cur(c), "elif")) {
        struct bt_j_node *inner = node(c, N_IF);
        c->at++;
        deeper(c);
        parse_if(c, inner); /* reads the endif */
        c->depth--;
        add(c, &n->orelse, inner);
        return;
    }
    if (eat_name(c, "else")) {
        block_end(c);
        n->orelse = parse_body(c, ends + 2);
    }
    end_tag(c, "endif");
}

static void parse_for(struct bt_j_compile *c, struct bt_j_node *n)
{
    static const char *const ends[] = {"else", "endfor", NULL};
    n->kind = N_FOR;
    n->a = parse_target(c, false);
    if (!eat_name(c, "in")) {
        unexpected(c, "in");
    }
    n->b = parse_tuple(c, false);
    if (eat_name(c, "if")) {
        n->c = parse_expr(c);
    }
    if (is_name(cur(c), "recursive")) {
        bt_j_compile_fail(c, BT_ERR_UNSUPPORTED, n->line, "a recursive loop is not supported");
    }
    block_end(c);
    c->loops++;
    n->body = parse_body(c, ends);
    c->loops--;
    if (eat_name(c, "else")) {
        block_end(c);
        n->orelse = parse_body(c, ends + 1);
    }
    end_tag(c, "endfor");
}

static void parse_set(struct bt_j_compile *c, struct bt_j_node *n)
{
    static const char *const ends[] = {"endset", NULL};
    n->a = parse_target(c, true);
    if (eat_op(c, "=")) {
        n->kind = N_SET;
        n->b = parse_tuple(c, true);
        block_end(c);
        return;
    }
    n->kind = N_SETBLOCK;
    while (eat_op(c, "|")) {
        n->b = parse_filter(c, n->b);
    }
    block_end(c);
    n->body = parse_body(c, ends);
    end_tag(c, "endset");
}

/* (a, b=default): a macro's or call block's parameters. */
static struct bt_j_args parse_params(struct bt_j_compile *c)
{
    struct bt_j_args p = {0};
    expect_op(c, "(");
    while (!eat_op(c, ")")) {
        if (p.n > 0) {
            expect_op(c, ",");
            if (eat_op(c, ")")) {
                break;
            }
        }
        struct bt_j_arg a = {.name = expect_name(c)};
        define(c, a.name);
        if (eat_op(c, "=")) {
            a.value = parse_expr(c);
        } else if (p.n > 0 && p.v[p.n - 1].value != NULL) {
            bt_j_compile_fail(c, BT_ERR_INVALID, cur(c)->line,
                              "a parameter without default follows one with a default");
        }
        p.v = bt_j_grow(c->arena, p.v, p.n, &p.cap, sizeof(a));
        p.v[p.n++] = a;
    }
    return p;
}

static void parse_macro(struct bt_j_compile *c, struct bt_j_node *n)
{
    static const char *const ends[] = {"endmacro", NULL};
    n->kind = N_MACRO;
    n->name = expect_name(c);
    define(c, n->name);
    n->args = parse_params(c);
    block_end(c);
    int loops = c->loops, use = c->var_use;
    c->loops = c->var_use = 0;
    n->body = parse_body(c, ends);
    n->fn = c->var_use;
    c->loops = loops;
    c->var_use = use;
    end_tag(c, "endmacro");
}

static void parse_call_block(struct bt_j_compile *c, struct bt_j_node *n)
{
    static const char *const ends[] = {"endcall", NULL};
    n->kind = N_CALLBLOCK;
    if (is_op(cur(c), "(")) {
        n->args = parse_params(c);
    }
    n->a = parse_expr(c);
    if (n->a->kind != N_CALL) {
        bt_j_compile_fail(c, BT_ERR_INVALID, n->line, "{%% call %%} needs the call of a macro");
    }
    block_end(c);
    int loops = c->loops;
    c->loops = 0;
    n->body = parse_body(c, ends);
    c->loops = loops;
    end_tag(c, "endcall");
}

static void parse_with(struct bt_j_compile *c, struct bt_j_node *n)
{
    static const char *const ends[] = {"endwith", NULL};
    n->kind = N_WITH;
    while (cur(c)->kind != T_BLOCK_END) {
        if (n->list.n > 0) {
            expect_op(c, ",");
        }
        struct bt_j_node *set = node(c, N_SET), *name = node(c, N_NAME);
        name->name = expect_name(c);
        define(c, name->name);
        set->a = name;
        expect_op(c, "=");
        set->b = parse_expr(c);
        add(c, &n->list, set);
    }
    block_end(c);
    n->body = parse_body(c, ends);
    end_tag(c, "endwith");
}

static void parse_plain_block(struct bt_j_compile *c, struct bt_j_node *n, struct bt_j_str tag)
{
    static const char *const gen[] = {"endgeneration", NULL}, *const filter[] = {"endfilter", NULL};
    if (bt_j_str_is(tag, "generation")) {
        n->kind = N_SCOPE;
        block_end(c);
        n->body = parse_body(c, gen);
        end_tag(c, gen[0]);
        return;
    }
    n->kind = N_FILTERBLOCK;
    do {
        n->b = parse_filter(c, n->b);
    } while (eat_op(c, "|"));
    block_end(c);
    n->body = parse_body(c, filter);
    end_tag(c, filter[0]);
}

/* After "{%", at the tag's name. */
static struct bt_j_node *parse_statement(struct bt_j_compile *c)
{
    struct bt_j_node *n = node(c, N_TEXT);
    struct bt_j_str tag = expect_name(c);
    if (bt_j_str_is(tag, "if")) {
        parse_if(c, n);
    } else if (bt_j_str_is(tag, "for")) {
        parse_for(c, n);
    } else if (bt_j_str_is(tag, "set")) {
        parse_set(c, n);
    } else if (bt_j_str_is(tag, "macro")) {
        parse_macro(c, n);
    } else if (bt_j_str_is(tag, "call")) {
        parse_call_block(c, n);
    } else if (bt_j_str_is(tag, "with")) {
        parse_with(c, n);
    } else if (bt_j_str_is(tag, "generation") || bt_j_str_is(tag, "filter")) {
        parse_plain_block(c, n, tag);
    } else if (bt_j_str_is(tag, "break") || bt_j_str_is(tag, "continue")) {
        n->kind = bt_j_str_is(tag, "break") ? N_BREAK : N_CONTINUE;
        if (c->loops == 0) {
            bt_j_compile_fail(c, BT_ERR_INVALID, n->line, "%.*s outside a loop", (int)tag.n, tag.p);
        }
        block_end(c);
    } else {
        bt_j_compile_fail(c, BT_ERR_UNSUPPORTED, n->line,
                          "the tag {%% %.*s %%} is not supported or not expected here",
                          (int)BT_MIN(tag.n, (size_t)60), tag.p);
    }
    return n;
}

/* Statements up to a tag in `ends`; its name is then the current token. */
static struct bt_j_nodes parse_body(struct bt_j_compile *c, const char *const *ends)
{
    struct bt_j_nodes body = {0};
    deeper(c);
    for (;;) {
        struct bt_j_token *t = cur(c);
        if (t->kind == T_EOF) {
            while (ends != NULL && ends[1] != NULL) {
                ends++; /* the last one ends the body in any case */
            }
            if (ends != NULL) {
                unexpected(c, ends[0]);
            }
            break;
        }
        if (t->kind == T_DATA) {
            struct bt_j_node *n = node(c, N_TEXT);
            n->name = t->s;
            add(c, &body, n);
            c->at++;
        } else if (t->kind == T_VAR_BEGIN) {
            struct bt_j_node *n = node(c, N_PRINT);
            c->at++;
            n->a = parse_tuple(c, true);
            expect_kind(c, T_VAR_END, "}}");
            add(c, &body, n);
        } else {
            expect_kind(c, T_BLOCK_BEGIN, "a tag");
            bool end = false;
            for (size_t i = 0; ends != NULL && ends[i] != NULL; i++) {
                end = end || is_name(cur(c), ends[i]);
            }
            if (end) {
                break;
            }
            add(c, &body, parse_statement(c));
        }
    }
    c->depth--;
    return body;
}

struct bt_j_nodes bt_j_parse(struct bt_j_compile *c)
{
    struct bt_j_nodes body = parse_body(c, NULL);
    for (size_t i = 0; i < c->n_called; i++) {
        bool known = bt_j_str_is(c->called[i], "caller");
        for (size_t k = 0; k < c->n_defined && !known; k++) {
            known = bt_j_str_eq(c->called[i], c->defined[k]);
        }
        if (!known) {
            bt_j_compile_fail(c, BT_ERR_UNSUPPORTED, c->called_line[i],
                              "the function %.*s() is not supported",
                              (int)BT_MIN(c->called[i].n, (size_t)60), c->called[i].p);
        }
    }
    return body;
}
