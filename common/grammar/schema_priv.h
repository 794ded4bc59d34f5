/* Inside of the JSON Schema front end. schema_json.c reads the text, schema_ref.c finds what a
 * reference means, schema_eval.c turns keywords into normal forms, schema_shape.c, schema_number.c
 * and schema_string.c compute with them, schema_emit.c makes the program.
 *
 * All memory comes out of one arena, and an error leaves through longjmp to
 * bt_grammar_build_schema, which frees the arena. No function of another module calls back into
 * these files while a jump can happen. */
#ifndef BT_GRAMMAR_SCHEMA_PRIV_H
#define BT_GRAMMAR_SCHEMA_PRIV_H

#include "common/grammar/program.h"

#include <setjmp.h>

struct bt_nf;

/* ---- limits ---- */
#define BT_SCHEMA_ARENA_MAX    (30u << 20) /* bytes; the program has its own limit */
#define BT_SCHEMA_DEPTH_MAX    200         /* nesting of the text */
#define BT_SCHEMA_EVAL_MAX     150     /* nesting of allOf, anyOf, references, ... in one place */
#define BT_SCHEMA_WORK_MAX     400000u /* steps of merging: properties copied, pairs compared */
#define BT_SCHEMA_SHAPES_MAX   2048u   /* alternatives of one value */
#define BT_SCHEMA_CLASSES      64      /* of keys that patterns tell apart */
#define BT_SCHEMA_MULTIPLE_MAX 5000    /* of multipleOf with bounds or a fraction */
#define BT_SCHEMA_DIGITS_MAX   400u    /* of a number in a schema, and of its exponent's value */
#define BT_SCHEMA_SPACE_MAX    64u     /* white space in a row where any is asked for */
#define BT_SCHEMA_INDENT_MAX   40u     /* spaces at the beginning of a line; tabs: a quarter */

/* ---- JSON values (schema_json.c) ---- */
enum bt_sj_type {
    BT_SJ_NULL,
    BT_SJ_FALSE,
    BT_SJ_TRUE,
    BT_SJ_NUMBER,
    BT_SJ_STRING,
    BT_SJ_ARRAY,
    BT_SJ_OBJECT
};
struct bt_sj_text {
    const char *s; /* UTF-8, decoded; may hold NUL */
    uint32_t n;
};
struct bt_dec { /* 0.d[0]d[1]... * 10^exp; no leading or trailing zero; n == 0: zero */
    const char *d;
    uint32_t n;
    int32_t exp;
    bool neg;
};
struct bt_sj {
    enum bt_sj_type type;
    uint32_t n;             /* items of an array, members of an object */
    const struct bt_sj *up; /* NULL: the root */
    struct bt_sj_text key;  /* in an object */
    uint32_t index;         /* in an array */
    uint32_t id;            /* of bt_schema.values */
    union {
        struct bt_sj_text text;
        struct bt_dec num;
        struct {
            struct bt_sj **items;
            struct bt_sj **sorted; /* members by key */
        };
    };
    const char *base;            /* schema_ref.c: the base URI, without a fragment */
    const struct bt_nf *memo[4]; /* by the two low bits of a literal */
    uint8_t busy;                /* a bit for each literal that is being computed */
};

/* A constraint on a value: values[lit >> 2] as a schema, or as a constant; or its opposite. */
typedef uint32_t bt_lit_t;
#define BT_LIT_NOT   1u
#define BT_LIT_CONST 2u
/* A set of constraints that all hold (bt_schema.sets); equal sets have equal numbers. */
typedef uint32_t bt_set_t;
#define BT_SET_TRUE 0u
#define BT_SET_NONE 1u

/* ---- normal forms: what a value may be, by type ---- */
struct bt_why { /* why a part of a normal form cannot be enforced */
    const struct bt_sj *at;
    const char *text;
};
struct bt_mult { /* m * 10^e, m not divisible by 10; m == 0: no such constraint */
    uint64_t m;
    int32_t e;
};
struct bt_piece {                 /* numbers between bounds */
    const struct bt_dec *lo, *hi; /* NULL: none */
    bool lo_open, hi_open;
    uint8_t n_nots;
    struct bt_mult of;          /* a multiple of it */
    const struct bt_mult *nots; /* no multiple of these */
};
struct bt_numset {
    struct bt_piece *p;
    uint32_t n;
};
struct bt_strset { /* rx without the texts; rx NONE: the texts alone */
    bt_rx_t rx;    /* the bytes between the quotes */
    uint32_t n;
    struct bt_sj_text *texts; /* sorted */
};
struct bt_prop {
    struct bt_sj_text name;
    bt_set_t value;
    bool required;
};
struct bt_class { /* keys without a bt_prop; the classes of an object are disjoint and cover all */
    bt_rx_t key;  /* the bytes between the quotes */
    bt_set_t value;
};
struct bt_some { /* an object has a property out of keys whose value fulfils lit */
    bt_rx_t keys;
    bt_lit_t lit;
    const struct bt_why *why; /* what asked for it */
};
struct bt_obj {
    struct bt_prop *props; /* by name */
    struct bt_class *classes;
    struct bt_some *some;
    uint32_t n_props, cap_props, n_classes, n_some;
    uint32_t min, max;
    const struct bt_why *why; /* NULL: enforceable */
};
struct bt_has { /* an array has an item that fulfils a set */
    bt_set_t item;
    const struct bt_why *why;
};
struct bt_arr {
    bt_set_t *prefix;
    struct bt_has *has;
    uint32_t n_prefix, n_has;
    bt_set_t rest;
    uint32_t min, max;
    const struct bt_why *unique; /* NULL: items may be equal */
    const struct bt_why *why;
};
#define BT_NF_NULL  1u
#define BT_NF_FALSE 2u
#define BT_NF_TRUE  4u
struct bt_nf {
    uint32_t bits;
    struct bt_strset str;
    struct bt_numset num;
    const struct bt_arr **arr; /* any of them */
    const struct bt_obj **obj;
    uint32_t n_arr, n_obj;
    const struct bt_why *why_str, *why_num;
};

struct bt_schema_set {
    const bt_lit_t *lits; /* sorted */
    uint32_t n;
    uint32_t hash_next;
    bt_set_t part[2]; /* two sets that it is the union of; 0: unknown */
    const struct bt_nf *nf;
    bt_node_t node; /* BT_NODE_FAILED: not made yet */
};
struct bt_schema_uri { /* a schema with a name: a URI, or a URI with #anchor */
    const char *uri;
    const struct bt_sj *at;
    bool dynamic;
};

#define BT_SCHEMA_FORMATS  24
#define BT_SCHEMA_PATTERNS 256
struct bt_schema_kept { /* expressions that schemas ask for again and again; NONE: not made */
    bt_rx_t any_char;
    bt_rx_t space, blank; /* white space where a line may begin; elsewhere */
    bt_rx_t formats[BT_SCHEMA_FORMATS];
    struct {
        struct bt_sj_text text;
        bt_rx_t rx;
    } patterns[BT_SCHEMA_PATTERNS]; /* by hash */
};

/* The compiler of one schema. */
struct bt_schema {
    struct bt_program *p;
    struct bt_rx_set *rx;
    struct bt_schema_chunk *chunks; /* the arena */
    size_t bytes, chunk_left;
    char *err;
    size_t err_cap;
    bt_status_t status; /* of the jump */
    jmp_buf *jump;      /* where an error goes */
    uint32_t work, depth, probes;
    uint32_t recursive; /* schemas with $recursiveAnchor */
    uint32_t draft;     /* 4 to 7, 2019, 2020; without $schema: 2020 */
    const struct bt_sj *root;
    struct bt_sj **values;
    struct bt_schema_set *sets;
    struct bt_schema_uri *uris;
    bt_lit_t *busy;        /* literals that are being computed, as a stack */
    bt_set_t *todo;        /* sets whose rule waits for its body */
    struct bt_prop *props; /* room of bt_obj_meet */
    uint32_t cap_props;
    uint32_t n_values, n_sets, n_uris, n_busy, n_todo;
    uint32_t cap_values, cap_sets, cap_uris, cap_busy, cap_todo;
    uint32_t set_heads[1024];
    const struct bt_nf *all;
    const struct bt_sj *large_multiple; /* the last multipleOf above BT_SCHEMA_MULTIPLE_MAX */
    struct bt_schema_kept kept;
    bt_rx_t str_all, num_all, num_plain;
};

/* schema.c */
void *bt_schema_alloc(struct bt_schema *c, size_t n); /* zeroed */
/* Room for one more element of an array out of the arena. */
void *bt_schema_grow(struct bt_schema *c, void *p, uint32_t n, uint32_t *cap, size_t size);
_Noreturn void bt_schema_fail(struct bt_schema *c, bt_status_t status, const struct bt_sj *at,
                              const char *fmt, ...) __attribute__((format(printf, 4, 5)));
_Noreturn void bt_schema_throw(struct bt_schema *c, bt_status_t status);
void bt_schema_work(struct bt_schema *c, uint32_t n);  /* counts steps; fails over the limit */
bt_rx_t bt_schema_rx(struct bt_schema *c, bt_rx_t rx); /* fails if rx did */
const struct bt_why *bt_schema_why(struct bt_schema *c, const struct bt_sj *at, const char *text);

/* schema_json.c */
struct bt_sj *bt_sj_parse(struct bt_schema *c, const char *text, size_t len);
const struct bt_sj *bt_sj_get(const struct bt_sj *object, const char *key); /* NULL: no such */
const struct bt_sj *bt_sj_get_n(const struct bt_sj *object, const char *key, uint32_t n);
int bt_sj_text_cmp(struct bt_sj_text a, struct bt_sj_text b);
bool bt_sj_is(const struct bt_sj *v, const char *string);
/* The JSON pointer of a value as a fragment, "#/a/0". */
void bt_sj_pointer(const struct bt_sj *v, char *out, size_t cap);
/* Reads one number or one string with its quotes at text; false: it is none. */
bool bt_sj_number(struct bt_schema *c, const char *text, size_t n, struct bt_dec *out);
uint32_t bt_sj_utf8(const char *s, uint32_t n, uint32_t *code); /* bytes; 0: not UTF-8 */

/* schema_ref.c */
void bt_schema_names(struct bt_schema *c);
const struct bt_sj *bt_schema_deref(struct bt_schema *c, const struct bt_sj *ref, bool dynamic);

/* schema_number.c: exact decimals and sets of numbers */
int bt_dec_cmp(const struct bt_dec *a, const struct bt_dec *b);
bool bt_mult_of(const struct bt_dec *d, struct bt_mult *m_p); /* false: too large */
/* The quotients of the least and the greatest multiple within the bounds; false: unknown. */
bool bt_piece_multiples(const struct bt_piece *p, __int128 *first, __int128 *last);
struct bt_numset bt_num_all(struct bt_schema *c);
struct bt_numset bt_num_one(struct bt_schema *c, const struct bt_piece *p);
struct bt_numset bt_num_values(struct bt_schema *c, const struct bt_sj *const *v, uint32_t n);
struct bt_numset bt_num_meet(struct bt_schema *c, struct bt_numset a, struct bt_numset b);
struct bt_numset bt_num_join(struct bt_schema *c, const struct bt_numset *a, uint32_t n);
struct bt_numset bt_num_not(struct bt_schema *c, struct bt_numset a);
/* schema_number_rx.c: their texts */
bt_rx_t bt_num_rx(struct bt_schema *c, struct bt_numset a);
bt_rx_t bt_num_rx_all(struct bt_rx_set *s);
bt_rx_t bt_num_rx_plain(struct bt_rx_set *s);

/* schema_string.c */
bt_rx_t bt_str_any(struct bt_schema *c); /* any string */
/* One of n texts, each followed by its tail (NULL: by nothing). json: spelled as in a string. */
struct bt_trie_text {
    struct bt_sj_text text;
    bt_rx_t tail;
};
bt_rx_t bt_str_trie(struct bt_schema *c, struct bt_trie_text *t, uint32_t n, bool json);
bt_rx_t bt_str_length(struct bt_schema *c, uint32_t min, uint32_t max);
bool bt_str_match(struct bt_schema *c, bt_rx_t rx, struct bt_sj_text text);
bool bt_str_none(struct bt_schema *c, bt_rx_t rx); /* false: it may match something */
/* schema_strset.c */
struct bt_strset bt_strset_rx(bt_rx_t rx);
struct bt_strset bt_strset_values(struct bt_schema *c, const struct bt_sj *const *v, uint32_t n);
bt_rx_t bt_strset_to_rx(struct bt_schema *c, struct bt_strset a);
bool bt_strset_none(struct bt_strset a);
bool bt_strset_apart(struct bt_strset a, struct bt_strset b); /* one is empty, or lists differ */
bool bt_strset_match(struct bt_schema *c, struct bt_strset a, struct bt_sj_text text);
struct bt_strset bt_strset_meet(struct bt_schema *c, struct bt_strset a, struct bt_strset b);
struct bt_strset bt_strset_join(struct bt_schema *c, const struct bt_strset *a, uint32_t n);
struct bt_strset bt_strset_not(struct bt_schema *c, struct bt_strset a);
struct bt_strset bt_strset_minus(struct bt_schema *c, struct bt_strset a, struct bt_strset b);
/* schema_format.c: false: the format is an annotation. */
bool bt_str_format(struct bt_schema *c, const struct bt_sj *format, bt_rx_t *out);

/* schema_set.c: constraints and their sets */
bt_set_t bt_set_lit(struct bt_schema *c, bt_lit_t lit);
bt_set_t bt_set_of(struct bt_schema *c, const struct bt_sj *schema);
bt_set_t bt_set_meet(struct bt_schema *c, bt_set_t a, bt_set_t b);
const struct bt_nf *bt_set_nf(struct bt_schema *c, bt_set_t set);
bool bt_set_none(struct bt_schema *c, bt_set_t set); /* false: it may hold for something */
/* Is there no value of both, as constants say? Makes no set of both. depth: 0, more in objects.
 * false: there may be one. */
bool bt_set_apart(struct bt_schema *c, bt_set_t a, bt_set_t b, uint32_t depth);
bool bt_nf_none(const struct bt_nf *f);
const struct bt_nf *bt_nf_meet(struct bt_schema *c, const struct bt_nf *a, const struct bt_nf *b);
const struct bt_nf *bt_nf_join(struct bt_schema *c, const struct bt_nf *const *f, uint32_t n);
const struct bt_nf *bt_nf_not(struct bt_schema *c, const struct bt_nf *a, const struct bt_sj *at);
/* Exactly one of n; at: the place of the oneOf. */
const struct bt_nf *bt_nf_one(struct bt_schema *c, const struct bt_nf **f, uint32_t n,
                              const struct bt_sj *at);

/* schema_object.c and schema_array.c. NULL: nothing fulfils both. */
const struct bt_obj *bt_obj_meet(struct bt_schema *c, const struct bt_obj *a,
                                 const struct bt_obj *b);
/* Does a property that must be there keep both apart (bt_set_apart)? false: it may be so. */
bool bt_obj_apart(struct bt_schema *c, const struct bt_obj *a, const struct bt_obj *b,
                  uint32_t depth);
/* Adds a property, or a further constraint of one. */
void bt_obj_prop(struct bt_schema *c, struct bt_obj *o, struct bt_sj_text name, bt_set_t value,
                 bool required);
/* Splits the classes: keys that match rx get value in addition. named: the properties, too. */
void bt_obj_split(struct bt_schema *c, struct bt_obj *o, bt_rx_t rx, bt_set_t value, bool named);
/* Sets the classes; those with the same value become one. */
void bt_obj_classes(struct bt_schema *c, struct bt_obj *o, const struct bt_class *k, uint32_t n);
bool bt_obj_fails(const struct bt_obj *o); /* the numbers of properties contradict each other */
struct bt_obj *bt_obj_new(struct bt_schema *c);
struct bt_obj *bt_obj_copy(struct bt_schema *c, const struct bt_obj *o);
bool bt_obj_is_all(const struct bt_obj *o);
/* The opposite among objects: *out_p[n]. */
uint32_t bt_obj_not(struct bt_schema *c, const struct bt_obj *o, const struct bt_sj *at,
                    const struct bt_obj ***out_p);
/* Without bt_some: each shape either loses it or keeps it as its why. */
uint32_t bt_obj_resolve(struct bt_schema *c, const struct bt_obj *o, const struct bt_obj ***out_p);
const struct bt_arr *bt_arr_meet(struct bt_schema *c, const struct bt_arr *a,
                                 const struct bt_arr *b);
struct bt_arr *bt_arr_new(struct bt_schema *c);
/* Cuts max where nothing may follow; false: no array is left. */
bool bt_arr_settle(struct bt_schema *c, struct bt_arr *a);
bool bt_arr_is_all(const struct bt_arr *a);
uint32_t bt_arr_not(struct bt_schema *c, const struct bt_arr *a, const struct bt_sj *at,
                    const struct bt_arr ***out_p);

/* schema_eval.c, schema_members.c: keywords */
/* The keyword of a schema; NULL: it is missing, or the schema's draft does not have it. */
const struct bt_sj *bt_schema_key(const struct bt_schema *c, const struct bt_sj *s,
                                  const char *key);
const struct bt_nf *bt_schema_eval(struct bt_schema *c, bt_lit_t lit);
uint32_t bt_schema_count(struct bt_schema *c, const struct bt_sj *v, uint32_t otherwise);
/* A number that fits into the limits of decimals. */
const struct bt_dec *bt_schema_number(struct bt_schema *c, const struct bt_sj *v);
bt_rx_t bt_schema_pattern(struct bt_schema *c, const struct bt_sj *at, struct bt_sj_text pattern,
                          const struct bt_why **why_p);
struct bt_obj *bt_schema_object(struct bt_schema *c, const struct bt_sj *s);
struct bt_arr *bt_schema_array(struct bt_schema *c, const struct bt_sj *s);
/* schema_unique.c */
/* With properties instead of classes of few names, so that minProperties knows how many keys are
 * left. NULL: there are not enough. */
const struct bt_obj *bt_schema_name_classes(struct bt_schema *c, const struct bt_obj *o);
/* Whether the scalars of f are at least n different values. */
bool bt_schema_has_values(struct bt_schema *c, const struct bt_nf *f, uint32_t n);
/* schema_emit.c */
bt_node_t bt_schema_emit(struct bt_schema *c, bt_set_t start);

#endif
