/* Inside of the template interpreter: arena, values, syntax tree, and the seams between lexer,
 * parser, evaluator, filters, tests and methods. A compiled template is immutable and may be
 * rendered by several threads; everything of one render lies on that render's arena, so that an
 * error can unwind by longjmp and leave nothing behind. */
#ifndef BT_TOKEN_JINJA_H
#define BT_TOKEN_JINJA_H

#include <jansson.h>
#include <locale.h>
#include <setjmp.h>

#include "common/token/token.h"

#define J_ARENA_MAX  ((size_t)256 << 20) /* bytes of one render */
#define J_OUTPUT_MAX ((size_t)16 << 20)  /* bytes of one rendered text */
#define J_STEPS_MAX  20000000u           /* evaluated nodes; a second or less */
#define J_STEP       16u                 /* units of work of a step; a byte that is read is one */
#define J_ELEMENT    8u                  /* of an element that is visited or copied */
#define J_APPEND     4u                  /* of a piece of text, besides its bytes */
#define J_LOOK       65536u              /* units between two looks at whether to stop: ~0.1 ms */
#define J_DEPTH_MAX  1000                /* nested evaluation, calls included */
#define J_PARSE_MAX  150                 /* nested syntax */
#define J_RANGE_MAX  100000              /* as the sandbox of the reference implementation */
#define J_FLOAT_WORK 2048u               /* of printing a float */
#define J_SOURCE_MAX ((size_t)1 << 20)

/* ---- mem.c ---- */
struct bt_j_chunk;
struct bt_j_arena {
    struct bt_j_chunk *chunks;
    size_t total, max;
    jmp_buf *oom; /* where to go when `max` is passed */
};
void *bt_j_alloc(struct bt_j_arena *a, size_t n); /* zeroed, 16-byte aligned */
void bt_j_arena_cleanup(struct bt_j_arena *a);

struct bt_j_str {
    const char *p; /* UTF-8, not NUL-terminated */
    size_t n;
};
static inline struct bt_j_str j_cstr(const char *s)
{
    return (struct bt_j_str){s, __builtin_strlen(s)};
}
bool bt_j_str_eq(struct bt_j_str a, struct bt_j_str b);
bool bt_j_str_is(struct bt_j_str a, const char *b);

/* ---- values ---- */
enum bt_j_kind {
    J_UNDEFINED,
    J_NONE,
    J_BOOL,
    J_INT,
    J_FLOAT,
    J_STR,
    J_LIST,
    J_TUPLE,
    J_DICT,
    J_NAMESPACE,
    J_LOOP,
    J_MACRO,
    J_METHOD,
    J_GLOBAL,
};
struct bt_j_list;
struct bt_j_dict;
struct bt_j_loop;
struct bt_j_macro;
struct bt_j_method;
struct bt_j_value {
    enum bt_j_kind kind;
    union {
        bool b;
        int64_t i;
        double f;
        struct bt_j_str s; /* J_UNDEFINED: the name that was looked up */
        struct bt_j_list *list;
        struct bt_j_dict *dict;
        struct bt_j_loop *loop;
        const struct bt_j_macro *macro;
        const struct bt_j_method *method;
        const char *global;
    };
};
struct bt_j_list {
    struct bt_j_value *v;
    size_t n, cap;
};
struct bt_j_entry {
    struct bt_j_value key, value;
    uint64_t hash; /* of the key */
};
struct bt_j_dict { /* in order of insertion */
    struct bt_j_entry *v;
    size_t n, cap;
    uint32_t *slots; /* [mask + 1] index of an entry + 1; NULL: few entries, no index */
    uint32_t mask;
};
struct bt_j_loop {
    const struct bt_j_list *items;
    size_t at;
    int depth;
    struct bt_j_value last_changed;
    bool has_changed;
};
struct bt_j_method {
    struct bt_j_value self;
    struct bt_j_str name;
};

/* ---- syntax tree ---- */
enum bt_j_node_kind {
    N_TEXT,
    N_PRINT,
    N_IF,          /* a cond, body, orelse */
    N_FOR,         /* a target, b iterable, c filter, body, orelse */
    N_SET,         /* a target, b value */
    N_SETBLOCK,    /* a target, list filters (N_FILTER chain in b), body */
    N_MACRO,       /* name, params, body */
    N_CALLBLOCK,   /* a call, params, body */
    N_FILTERBLOCK, /* b chain, body */
    N_WITH,        /* list of N_SET, body */
    N_SCOPE,       /* body */
    N_BREAK,
    N_CONTINUE,
    N_CONST,
    N_NAME,
    N_LIST,
    N_TUPLE,
    N_DICT,   /* list: key, value, key, value... */
    N_ATTR,   /* a, name */
    N_ITEM,   /* a, b */
    N_SLICE,  /* a, list of three, NULL where absent */
    N_CALL,   /* a, args */
    N_FILTER, /* a, name, args; a NULL inside a filter block */
    N_TEST,   /* a, name, args */
    N_NOT,
    N_NEG,
    N_POS,
    N_AND,
    N_OR,
    N_COND,    /* a cond, b then, c else or NULL */
    N_COMPARE, /* a, list of operands, ops */
    N_BINARY,  /* op, a, b */
    N_CONCAT,  /* list */
};
enum bt_j_op {
    OP_ADD,
    OP_SUB,
    OP_MUL,
    OP_DIV,
    OP_FLOORDIV,
    OP_MOD,
    OP_POW,
    OP_EQ,
    OP_NE,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_IN,
    OP_NOTIN,
};
struct bt_j_node;
struct bt_j_nodes {
    struct bt_j_node **v;
    size_t n, cap;
};
struct bt_j_arg { /* of a call: positional, name=, *x, **x; of a macro: name and default */
    struct bt_j_str name;
    struct bt_j_node *value;
    uint8_t stars;
};
struct bt_j_args {
    struct bt_j_arg *v;
    size_t n, cap;
};
struct bt_j_node {
    enum bt_j_node_kind kind;
    enum bt_j_op op;
    int line;
    int fn; /* filter, test: index into its table; macro: var_use */
    struct bt_j_str name;
    struct bt_j_value value;
    struct bt_j_node *a, *b, *c;
    struct bt_j_nodes list, body, orelse;
    struct bt_j_args args;
    enum bt_j_op *ops;
};
struct bt_j_scope;
struct bt_j_macro {
    const struct bt_j_node *node;
    struct bt_j_scope *closure;
};

/* ---- lexer ---- */
enum bt_j_tok_kind {
    T_EOF,
    T_DATA,
    T_BLOCK_BEGIN,
    T_BLOCK_END,
    T_VAR_BEGIN,
    T_VAR_END,
    T_NAME,
    T_STR,
    T_INT,
    T_FLOAT,
    T_OP, /* the operator's text in `s` */
};
struct bt_j_token {
    enum bt_j_tok_kind kind;
    int line;
    struct bt_j_str s;
    int64_t i;
    double f;
};
struct bt_j_compile {
    struct bt_j_arena *arena;
    jmp_buf fail;
    bt_status_t status;
    char *err;
    size_t err_cap;
    struct bt_j_token *tokens;
    size_t n_tokens, cap_tokens, at;
    int depth, loops;
    int var_use;              /* 1: varargs, 2: kwargs were named in the macro being parsed */
    struct bt_j_str *defined; /* names that the template itself binds */
    size_t n_defined, cap_defined;
    struct bt_j_str *called; /* global functions called, checked at the end */
    int *called_line;
    size_t n_called, cap_called;
};
__attribute__((noreturn, format(printf, 4, 5))) void
bt_j_compile_fail(struct bt_j_compile *c, bt_status_t st, int line, const char *fmt, ...);
void bt_j_lex(struct bt_j_compile *c, const char *source, size_t len);
/* Grows an array on the arena. */
void *bt_j_grow(struct bt_j_arena *a, void *old, size_t n, size_t *cap, size_t size);

/* ---- parser ---- */
struct bt_j_nodes bt_j_parse(struct bt_j_compile *c);
bool bt_j_is_global(struct bt_j_str name); /* a function every template has */

/* ---- evaluator ---- */
struct bt_j_scope {
    struct bt_j_scope *parent;
    struct bt_j_dict vars;
};
struct bt_j_sb { /* string builder on the arena */
    char *p;
    size_t n, cap;
};
struct bt_j_render {
    struct bt_j_arena arena;
    jmp_buf fail;
    bt_status_t status;
    char *err;
    size_t err_cap;
    int line, depth;
    uint64_t work, work_max; /* units done, and how many may be */
    uint64_t look_at;        /* work at which to look at the limit and at stop */
    bool (*stop)(void *arg); /* called at intervals; NULL: the render is never stopped */
    void *stop_arg;
    locale_t locale; /* character classes and case; 0: ASCII only */
    struct bt_j_scope *scope;
    struct bt_j_sb *out;
};
struct bt_j_call {
    struct bt_j_value *v; /* positional */
    size_t n, cap;
    struct bt_j_dict named;
};
__attribute__((noreturn, format(printf, 2, 3))) void bt_j_fail(struct bt_j_render *r,
                                                               const char *fmt, ...);
/* Every operation calls this before its work and charges its cost: steps, or units where the cost
 * depends on the size of its operands. Ends the render when the limit is exceeded, or when `stop`
 * says so. */
void bt_j_look(struct bt_j_render *r);
static inline void j_work(struct bt_j_render *r, uint64_t units)
{
    r->work += units;
    if (r->work >= r->look_at) {
        bt_j_look(r);
    }
}
static inline void j_charge(struct bt_j_render *r, size_t steps)
{
    j_work(r, (uint64_t)steps * J_STEP);
}
void bt_j_charge_value(struct bt_j_render *r, struct bt_j_value v); /* for reading all of it once */
void bt_j_enter(struct bt_j_render *r); /* one level deeper; bt_j_leave on the way back */
void bt_j_leave(struct bt_j_render *r);
/* Runs the statements of a whole template. */
void bt_j_exec(struct bt_j_render *r, const struct bt_j_nodes *body);
struct bt_j_value bt_j_eval(struct bt_j_render *r, const struct bt_j_node *n);
struct bt_j_value bt_j_apply_call(struct bt_j_render *r, struct bt_j_value fn,
                                  struct bt_j_call *call);
struct bt_j_value bt_j_get_attr(struct bt_j_render *r, struct bt_j_value v, struct bt_j_str name);
struct bt_j_value bt_j_get_item(struct bt_j_render *r, struct bt_j_value v, struct bt_j_value key);
struct bt_j_value bt_j_binary(struct bt_j_render *r, enum bt_j_op op, struct bt_j_value a,
                              struct bt_j_value b);
/* Argument `i` or the one called `name`; J_UNDEFINED kind with *found_p false if absent. */
bool bt_j_arg_get(const struct bt_j_call *c, size_t i, const char *name, struct bt_j_value *v_p);
int64_t bt_j_arg_int(struct bt_j_render *r, const struct bt_j_call *c, size_t i, const char *name,
                     int64_t missing);
bool bt_j_arg_bool(struct bt_j_render *r, const struct bt_j_call *c, size_t i, const char *name,
                   bool missing);
struct bt_j_str bt_j_arg_str(struct bt_j_render *r, const struct bt_j_call *c, size_t i,
                             const char *name, const char *missing);

/* ---- call.c: functions, macros, operators ---- */
struct bt_j_value bt_j_global_call(struct bt_j_render *r, struct bt_j_str name,
                                   struct bt_j_call *c);
void bt_j_call_add(struct bt_j_render *r, struct bt_j_call *c, struct bt_j_value v);

/* ---- dict.c ---- */
void bt_j_dict_set(struct bt_j_render *r, struct bt_j_dict *d, struct bt_j_value key,
                   struct bt_j_value v);
const struct bt_j_value *bt_j_dict_get(struct bt_j_render *r, const struct bt_j_dict *d,
                                       struct bt_j_value key);
const struct bt_j_value *bt_j_dict_get_str(const struct bt_j_dict *d, struct bt_j_str key);
bool bt_j_dict_del(struct bt_j_render *r, struct bt_j_dict *d, struct bt_j_value key);
void bt_j_scope_set(struct bt_j_render *r, struct bt_j_scope *s, struct bt_j_str name,
                    struct bt_j_value v);
/* The variable of this name in s or around it; NULL if there is none. */
const struct bt_j_value *bt_j_scope_get(struct bt_j_render *r, const struct bt_j_scope *s,
                                        struct bt_j_str name);

/* ---- value.c ---- */
struct bt_j_value bt_j_undefined(const char *name);
struct bt_j_value bt_j_none(void);
struct bt_j_value bt_j_bool(bool b);
struct bt_j_value bt_j_int(int64_t i);
struct bt_j_value bt_j_float(double f);
struct bt_j_value bt_j_string(struct bt_j_str s);
struct bt_j_value bt_j_new_list(struct bt_j_render *r, enum bt_j_kind kind);
struct bt_j_value bt_j_new_dict(struct bt_j_render *r);
void bt_j_list_add(struct bt_j_render *r, struct bt_j_list *l, struct bt_j_value v);
/* Texts are j's own: it must outlive the render. */
struct bt_j_value bt_j_from_json(struct bt_j_render *r, const json_t *j);
bool bt_j_truth(struct bt_j_value v);
const char *bt_j_type_name(struct bt_j_value v); /* as Python calls it */
bool bt_j_equal(struct bt_j_render *r, struct bt_j_value a, struct bt_j_value b);
/* <0, 0, >0; types that have no order fail the render. */
int bt_j_compare(struct bt_j_render *r, struct bt_j_value a, struct bt_j_value b);
bool bt_j_contains(struct bt_j_render *r, struct bt_j_value in, struct bt_j_value what);
struct bt_j_str bt_j_to_str(struct bt_j_render *r, struct bt_j_value v); /* Python's str() */
void bt_j_repr(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_value v);
/* The list over which a for loop runs: elements, keys or characters. */
struct bt_j_list *bt_j_iterate(struct bt_j_render *r, struct bt_j_value v);
size_t bt_j_length(struct bt_j_render *r, struct bt_j_value v);
bool bt_j_is_num(struct bt_j_value v);
double bt_j_num(struct bt_j_value v);
int64_t bt_j_as_int(struct bt_j_value v); /* of a bool or int */
bool bt_j_is_intlike(struct bt_j_value v);

/* ---- text.c: strings as Python sees them ---- */
void bt_j_sb_put(struct bt_j_render *r, struct bt_j_sb *sb, const char *p, size_t n);
void bt_j_sb_str(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_str s);
void bt_j_sb_puts(struct bt_j_render *r, struct bt_j_sb *sb, const char *s);
struct bt_j_str bt_j_sb_done(const struct bt_j_sb *sb);
size_t bt_j_str_chars(struct bt_j_str s);
struct bt_j_str bt_j_str_slice(struct bt_j_str s, size_t from, size_t to); /* in characters */
bool bt_j_is_space(uint32_t cp);                                           /* str.isspace */
/* r NULL: nothing is charged (when compiling). */
struct bt_j_str bt_j_strip(struct bt_j_render *r, struct bt_j_str s, const struct bt_j_str *chars,
                           bool left, bool right);
enum bt_j_case { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_CAPITALIZE, CASE_SWAP, CASE_JINJA_TITLE };
struct bt_j_str bt_j_change_case(struct bt_j_render *r, struct bt_j_str s, enum bt_j_case how);
struct bt_j_str bt_j_replace(struct bt_j_render *r, struct bt_j_str s, struct bt_j_str from,
                             struct bt_j_str to, int64_t count);
/* Index in bytes of the first `what` at or after `from`; SIZE_MAX if none. */
size_t bt_j_find(struct bt_j_render *r, struct bt_j_str s, struct bt_j_str what, size_t from);
void bt_j_float_repr(double f, char out[40]);
void bt_j_json(struct bt_j_render *r, struct bt_j_sb *sb, struct bt_j_value v,
               const struct bt_j_call *opts);
struct bt_j_str bt_j_format_percent(struct bt_j_render *r, struct bt_j_str fmt,
                                    struct bt_j_value args);
enum bt_j_class { CLASS_ALPHA, CLASS_DIGIT, CLASS_ALNUM, CLASS_SPACE, CLASS_UPPER, CLASS_LOWER };
bool bt_j_all_of(struct bt_j_render *r, struct bt_j_str s, enum bt_j_class cls);
struct bt_j_value bt_j_splitlines(struct bt_j_render *r, struct bt_j_str s);

/* ---- filters, tests, methods ---- Each table names the cost of an entry, which is charged before
 * it runs. Further cost (characters to decode, elements to compare, output) is charged where it
 * arises. */
enum bt_j_cost {
    COST_READS = 1, /* its operand and its positional arguments are read once */
    COST_FLAT,      /* the same for every size, or charged by the function itself */
};
void bt_j_charge_call(struct bt_j_render *r, enum bt_j_cost cost, struct bt_j_value v,
                      const struct bt_j_call *c);
int bt_j_filter_find(struct bt_j_str name); /* -1: unknown */
const char *bt_j_filter_name(size_t i);     /* of the i-th one; NULL behind the last */
const char *bt_j_test_name(size_t i);
const char *bt_j_method_name(size_t i);
const char *bt_j_global_name(size_t i);
int bt_j_test_find(struct bt_j_str name);
bool bt_j_method_known(struct bt_j_str name); /* of any type: for the check at compile time */
struct bt_j_value bt_j_filter_run(struct bt_j_render *r, int fn, struct bt_j_value v,
                                  struct bt_j_call *c);
bool bt_j_test_run(struct bt_j_render *r, int fn, struct bt_j_value v, struct bt_j_call *c);
/* Whether values of v's type have this method. */
bool bt_j_has_method(struct bt_j_value v, struct bt_j_str name);
struct bt_j_value bt_j_method_run(struct bt_j_render *r, struct bt_j_value self,
                                  struct bt_j_str name, struct bt_j_call *c);

#endif
