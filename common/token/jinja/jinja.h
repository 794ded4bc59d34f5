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
struct j_chunk;
struct j_arena {
    struct j_chunk *chunks;
    size_t total, max;
    jmp_buf *oom; /* where to go when `max` is passed */
};
void *j_alloc(struct j_arena *a, size_t n); /* zeroed, 16-byte aligned */
void j_arena_cleanup(struct j_arena *a);

struct j_str {
    const char *p; /* UTF-8, not NUL-terminated */
    size_t n;
};
static inline struct j_str j_cstr(const char *s)
{
    return (struct j_str){s, __builtin_strlen(s)};
}
bool j_str_eq(struct j_str a, struct j_str b);
bool j_str_is(struct j_str a, const char *b);

/* ---- values ---- */
enum j_kind {
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
struct j_list;
struct j_dict;
struct j_loop;
struct j_macro;
struct j_method;
struct j_value {
    enum j_kind kind;
    union {
        bool b;
        int64_t i;
        double f;
        struct j_str s; /* J_UNDEFINED: what was looked for */
        struct j_list *list;
        struct j_dict *dict;
        struct j_loop *loop;
        const struct j_macro *macro;
        const struct j_method *method;
        const char *global;
    };
};
struct j_list {
    struct j_value *v;
    size_t n, cap;
};
struct j_entry {
    struct j_value key, value;
    uint64_t hash; /* of the key */
};
struct j_dict { /* in order of insertion */
    struct j_entry *v;
    size_t n, cap;
    uint32_t *slots; /* [mask + 1] index of an entry + 1; NULL: few entries, no index */
    uint32_t mask;
};
struct j_loop {
    const struct j_list *items;
    size_t at;
    int depth;
    struct j_value last_changed;
    bool has_changed;
};
struct j_method {
    struct j_value self;
    struct j_str name;
};

/* ---- syntax tree ---- */
enum j_node_kind {
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
enum j_op {
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
struct j_node;
struct j_nodes {
    struct j_node **v;
    size_t n, cap;
};
struct j_arg { /* of a call: positional, name=, *x, **x; of a macro: name and default */
    struct j_str name;
    struct j_node *value;
    uint8_t stars;
};
struct j_args {
    struct j_arg *v;
    size_t n, cap;
};
struct j_node {
    enum j_node_kind kind;
    enum j_op op;
    int line;
    int fn; /* filter, test: index into its table; macro: var_use */
    struct j_str name;
    struct j_value value;
    struct j_node *a, *b, *c;
    struct j_nodes list, body, orelse;
    struct j_args args;
    enum j_op *ops;
};
struct j_scope;
struct j_macro {
    const struct j_node *node;
    struct j_scope *closure;
};

/* ---- lexer ---- */
enum j_tok_kind {
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
struct j_token {
    enum j_tok_kind kind;
    int line;
    struct j_str s;
    int64_t i;
    double f;
};
struct j_compile {
    struct j_arena *arena;
    jmp_buf fail;
    bt_status_t status;
    char *err;
    size_t err_cap;
    struct j_token *tokens;
    size_t n_tokens, cap_tokens, at;
    int depth, loops;
    int var_use;           /* 1: varargs, 2: kwargs were named in the macro being parsed */
    struct j_str *defined; /* names that the template itself binds */
    size_t n_defined, cap_defined;
    struct j_str *called; /* global functions called, checked at the end */
    int *called_line;
    size_t n_called, cap_called;
};
__attribute__((noreturn, format(printf, 4, 5))) void
j_compile_fail(struct j_compile *c, bt_status_t st, int line, const char *fmt, ...);
void j_lex(struct j_compile *c, const char *source, size_t len);
/* Grows an array on the arena. */
void *j_grow(struct j_arena *a, void *old, size_t n, size_t *cap, size_t size);

/* ---- parser ---- */
struct j_nodes j_parse(struct j_compile *c);
bool j_is_global(struct j_str name); /* a function every template has */

/* ---- evaluator ---- */
struct j_scope {
    struct j_scope *parent;
    struct j_dict vars;
};
struct j_sb { /* string builder on the arena */
    char *p;
    size_t n, cap;
};
struct j_render {
    struct j_arena arena;
    jmp_buf fail;
    bt_status_t status;
    char *err;
    size_t err_cap;
    int line, depth;
    uint64_t work, work_max; /* units done, and how many may be */
    uint64_t look_at;        /* work at which to look at the limit and at stop */
    bool (*stop)(void *arg); /* asked at intervals; NULL: nobody stops it */
    void *stop_arg;
    locale_t locale; /* character classes and case; 0: ASCII only */
    struct j_scope *scope;
    struct j_sb *out;
};
struct j_call {
    struct j_value *v; /* positional */
    size_t n, cap;
    struct j_dict named;
};
__attribute__((noreturn, format(printf, 2, 3))) void j_fail(struct j_render *r, const char *fmt,
                                                            ...);
/* Every operation charges what it does before it does it: steps, or units for what depends on the
 * size of its operands. Ends the render beyond its limit, or if somebody wants it to stop. */
void j_look(struct j_render *r);
static inline void j_work(struct j_render *r, uint64_t units)
{
    r->work += units;
    if (r->work >= r->look_at) {
        j_look(r);
    }
}
static inline void j_charge(struct j_render *r, size_t steps)
{
    j_work(r, (uint64_t)steps * J_STEP);
}
void j_charge_value(struct j_render *r, struct j_value v); /* for reading all of it once */
void j_enter(struct j_render *r); /* one level deeper; j_leave on the way back */
void j_leave(struct j_render *r);
/* Runs the statements of a whole template. */
void j_exec(struct j_render *r, const struct j_nodes *body);
struct j_value j_eval(struct j_render *r, const struct j_node *n);
struct j_value j_apply_call(struct j_render *r, struct j_value fn, struct j_call *call);
struct j_value j_get_attr(struct j_render *r, struct j_value v, struct j_str name);
struct j_value j_get_item(struct j_render *r, struct j_value v, struct j_value key);
struct j_value j_binary(struct j_render *r, enum j_op op, struct j_value a, struct j_value b);
/* Argument `i` or the one called `name`; J_UNDEFINED kind with *found_p false if absent. */
bool j_arg_get(const struct j_call *c, size_t i, const char *name, struct j_value *v_p);
int64_t j_arg_int(struct j_render *r, const struct j_call *c, size_t i, const char *name,
                  int64_t missing);
bool j_arg_bool(struct j_render *r, const struct j_call *c, size_t i, const char *name,
                bool missing);
struct j_str j_arg_str(struct j_render *r, const struct j_call *c, size_t i, const char *name,
                       const char *missing);

/* ---- call.c: functions, macros, operators ---- */
struct j_value j_global_call(struct j_render *r, struct j_str name, struct j_call *c);
void j_call_add(struct j_render *r, struct j_call *c, struct j_value v);

/* ---- dict.c ---- */
void j_dict_set(struct j_render *r, struct j_dict *d, struct j_value key, struct j_value v);
const struct j_value *j_dict_get(struct j_render *r, const struct j_dict *d, struct j_value key);
const struct j_value *j_dict_get_str(const struct j_dict *d, struct j_str key);
bool j_dict_del(struct j_render *r, struct j_dict *d, struct j_value key);
void j_scope_set(struct j_render *r, struct j_scope *s, struct j_str name, struct j_value v);
/* The variable of this name in s or around it; NULL if there is none. */
const struct j_value *j_scope_get(struct j_render *r, const struct j_scope *s, struct j_str name);

/* ---- value.c ---- */
struct j_value j_undefined(const char *name);
struct j_value j_none(void);
struct j_value j_bool(bool b);
struct j_value j_int(int64_t i);
struct j_value j_float(double f);
struct j_value j_string(struct j_str s);
struct j_value j_new_list(struct j_render *r, enum j_kind kind);
struct j_value j_new_dict(struct j_render *r);
void j_list_add(struct j_render *r, struct j_list *l, struct j_value v);
/* Texts are j's own: it must outlive the render. */
struct j_value j_from_json(struct j_render *r, const json_t *j);
bool j_truth(struct j_value v);
const char *j_type_name(struct j_value v); /* as Python calls it */
bool j_equal(struct j_render *r, struct j_value a, struct j_value b);
/* <0, 0, >0; types that have no order fail the render. */
int j_compare(struct j_render *r, struct j_value a, struct j_value b);
bool j_contains(struct j_render *r, struct j_value in, struct j_value what);
struct j_str j_to_str(struct j_render *r, struct j_value v); /* Python's str() */
void j_repr(struct j_render *r, struct j_sb *sb, struct j_value v);
/* What a for loop sees: elements, keys or characters. */
struct j_list *j_iterate(struct j_render *r, struct j_value v);
size_t j_length(struct j_render *r, struct j_value v);
bool j_is_num(struct j_value v);
double j_num(struct j_value v);
int64_t j_as_int(struct j_value v); /* of a bool or int */
bool j_is_intlike(struct j_value v);

/* ---- text.c: strings as Python sees them ---- */
void j_sb_put(struct j_render *r, struct j_sb *sb, const char *p, size_t n);
void j_sb_str(struct j_render *r, struct j_sb *sb, struct j_str s);
void j_sb_puts(struct j_render *r, struct j_sb *sb, const char *s);
struct j_str j_sb_done(const struct j_sb *sb);
size_t j_str_chars(struct j_str s);
struct j_str j_str_slice(struct j_str s, size_t from, size_t to); /* in characters */
bool j_is_space(uint32_t cp);                                     /* str.isspace */
/* r NULL: nothing is charged (when compiling). */
struct j_str j_strip(struct j_render *r, struct j_str s, const struct j_str *chars, bool left,
                     bool right);
enum j_case { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_CAPITALIZE, CASE_SWAP, CASE_JINJA_TITLE };
struct j_str j_change_case(struct j_render *r, struct j_str s, enum j_case how);
struct j_str j_replace(struct j_render *r, struct j_str s, struct j_str from, struct j_str to,
                       int64_t count);
/* Index in bytes of the first `what` at or after `from`; SIZE_MAX if none. */
size_t j_find(struct j_render *r, struct j_str s, struct j_str what, size_t from);
void j_float_repr(double f, char out[40]);
void j_json(struct j_render *r, struct j_sb *sb, struct j_value v, const struct j_call *opts);
struct j_str j_format_percent(struct j_render *r, struct j_str fmt, struct j_value args);
enum j_class { CLASS_ALPHA, CLASS_DIGIT, CLASS_ALNUM, CLASS_SPACE, CLASS_UPPER, CLASS_LOWER };
bool j_all_of(struct j_render *r, struct j_str s, enum j_class cls);
struct j_value j_splitlines(struct j_render *r, struct j_str s);

/* ---- filters, tests, methods ----
 * Each of the tables says what an entry costs before it runs. What costs more than that (characters
 * that are decoded, elements that are compared, what is written) is charged where it is done. */
enum j_cost {
    COST_READS = 1, /* its operand and its positional arguments are read once */
    COST_FLAT,      /* the same for every size, or charged by the function itself */
};
void j_charge_call(struct j_render *r, enum j_cost cost, struct j_value v, const struct j_call *c);
int j_filter_find(struct j_str name); /* -1: unknown */
const char *j_filter_name(size_t i);  /* of the i-th one; NULL behind the last */
const char *j_test_name(size_t i);
const char *j_method_name(size_t i);
const char *j_global_name(size_t i);
int j_test_find(struct j_str name);
bool j_method_known(struct j_str name); /* of any type: for the check at compile time */
struct j_value j_filter_run(struct j_render *r, int fn, struct j_value v, struct j_call *c);
bool j_test_run(struct j_render *r, int fn, struct j_value v, struct j_call *c);
/* Whether values of v's type have this method. */
bool j_has_method(struct j_value v, struct j_str name);
struct j_value j_method_run(struct j_render *r, struct j_value self, struct j_str name,
                            struct j_call *c);

#endif
