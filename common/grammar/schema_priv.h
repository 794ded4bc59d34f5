/* Private to the JSON Schema front end. schema_json.c reads the text. schema_ref.c resolves
 * references. schema_eval.c and schema_members.c turn keywords into normal forms. schema_set.c,
 * schema_object.c, schema_array.c, schema_number.c, schema_string.c and schema_strset.c compute
 * with normal forms. schema_emit.c builds the program from them.
 *
 * All memory comes from one arena. An error leaves by longjmp to bt_grammar_build_schema, which
 * frees the arena. While a jump is possible, no function of another module calls back into these
 * files. */
#ifndef BT_GRAMMAR_SCHEMA_PRIV_H
#define BT_GRAMMAR_SCHEMA_PRIV_H

#include "common/grammar/program.h"

#include <setjmp.h>

struct bt_nf;

/* ---- limits ---- */
#define BT_SCHEMA_ARENA_MAX    (30u << 20) /* bytes; the program has its own limit */
#define BT_SCHEMA_DEPTH_MAX    200         /* depth of nested values in the text */
#define BT_SCHEMA_EVAL_MAX     150 /* depth of nested allOf, anyOf, references, ... of one value */
#define BT_SCHEMA_WORK_MAX     400000u /* steps of merging: copied properties, compared pairs */
#define BT_SCHEMA_SHAPES_MAX   2048u   /* alternatives of one value */
#define BT_SCHEMA_CLASSES      64      /* classes of keys that patterns tell apart */
#define BT_SCHEMA_MULTIPLE_MAX 5000    /* of multipleOf with bounds or a fraction */
#define BT_SCHEMA_DIGITS_MAX   400u    /* of a number; also limits its exponent */
#define BT_SCHEMA_SPACE_MAX    64u     /* white space in a row where the schema allows any amount */
#define BT_SCHEMA_INDENT_MAX   40u /* spaces at the beginning of a line; tabs: a quarter of that */

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
    const char *s; /* UTF-8, decoded; may contain NUL */
    uint32_t n;
};
struct bt_dec { /* 0.d[0]d[1]... * 10^exp; no zero at either end of d; n == 0: zero */
    const char *d;
    uint32_t n;
    int32_t exp;
    bool neg;
};
struct bt_sj {
    enum bt_sj_type type;
    uint32_t n;             /* items of an array, members of an object */
    const struct bt_sj *up; /* the value that contains this one; NULL: this is the root */
    struct bt_sj_text key;  /* its key, if `up` is an object */
    uint32_t index;         /* its index, if `up` is an array */
    uint32_t id;            /* index in bt_schema.values */
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

/* A literal: one constraint on a value. values[lit >> 2] is the schema or, with BT_LIT_CONST, the
 * constant that the value must equal. BT_LIT_NOT negates the constraint. */
typedef uint32_t bt_lit_t;
#define BT_LIT_NOT   1u
#define BT_LIT_CONST 2u
/* A set of constraints that must all hold: an index in bt_schema.sets. Equal sets have equal
 * numbers. */
typedef uint32_t bt_set_t;
#define BT_SET_TRUE 0u
#define BT_SET_NONE 1u

/* ---- normal forms: what a value may be, by type ---- */
struct bt_why { /* why Baton cannot enforce a part of a normal form */
    const struct bt_sj *at;
    const char *text;
};
struct bt_mult { /* m * 10^e, where 10 does not divide m; m == 0: no such constraint */
    uint64_t m;
    int32_t e;
};
struct bt_piece {                 /* the numbers between two bounds */
    const struct bt_dec *lo, *hi; /* NULL: no bound */
    bool lo_open, hi_open;
    uint8_t n_nots;
    struct bt_mult of;          /* each number is a multiple of `of` */
    const struct bt_mult *nots; /* no number is a multiple of one of `nots` */
};
struct bt_numset {
    struct bt_piece *p;
    uint32_t n;
};
struct bt_strset { /* rx without the texts; if rx is NONE, only the texts */
    bt_rx_t rx;    /* the bytes between the quotes */
    uint32_t n;
    struct bt_sj_text *texts; /* sorted */
};
struct bt_prop {
    struct bt_sj_text name;
    bt_set_t value;
    bool required;
};
/* keys that have no bt_prop; the classes of an object are disjoint and cover all keys */
struct bt_class {
    bt_rx_t key; /* the bytes between the quotes */
    bt_set_t value;
};
/* requires that some property has a key in `keys` and a value that fulfils `lit` */
struct bt_some {
    bt_rx_t keys;
    bt_lit_t lit;
    const struct bt_why *why; /* the keyword that requires it */
};
struct bt_obj {
    struct bt_prop *props; /* sorted by name */
    struct bt_class *classes;
    struct bt_some *some;
    uint32_t n_props, cap_props, n_classes, n_some;
    uint32_t min, max;
    const struct bt_why *why; /* NULL: Baton can enforce the shape */
};
struct bt_has { /* requires that some item fulfils the set `item` */
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
    const struct bt_arr **arr; /* alternatives: an array must have one of these shapes */
    const struct bt_obj **obj;
    uint32_t n_arr, n_obj;
    const struct bt_why *why_str, *why_num;
};

struct bt_schema_set {
    const bt_lit_t *lits; /* sorted */
    uint32_t n;
    uint32_t hash_next;
    bt_set_t part[2]; /* two sets whose constraints together are this set; 0: unknown */
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
struct bt_schema_kept { /* expressions that schemas often need; NONE: not made yet */
    bt_rx_t any_char;
    bt_rx_t space, blank; /* white space where a new line may begin; white space elsewhere */
    bt_rx_t formats[BT_SCHEMA_FORMATS];
    struct {
        struct bt_sj_text text;
        bt_rx_t rx;
    } patterns[BT_SCHEMA_PATTERNS]; /* a hash table */
};

/* The compiler of one schema. */
struct bt_schema {
    struct bt_program *p;
    struct bt_rx_set *rx;
    struct bt_schema_chunk *chunks; /* the arena */
    size_t bytes, chunk_left;
    char *err;
    size_t err_cap;
    bt_status_t status; /* the error that the jump reports */
    jmp_buf *jump;      /* the destination of an error's jump */
    uint32_t work, depth, probes;
    uint32_t recursive; /* number of schemas with $recursiveAnchor */
    uint32_t draft;     /* 4 to 7, 2019, 2020; without $schema: 2020 */
    const struct bt_sj *root;
    struct bt_sj **values;
    struct bt_schema_set *sets;
    struct bt_schema_uri *uris;
    bt_lit_t *busy;        /* a stack of the literals that are being computed */
    bt_set_t *todo;        /* sets whose rule has no body yet */
    struct bt_prop *props; /* scratch memory of bt_obj_meet */
    uint32_t cap_props;
    uint32_t n_values, n_sets, n_uris, n_busy, n_todo;
    uint32_t cap_values, cap_sets, cap_uris, cap_busy, cap_todo;
    uint32_t set_heads[1024];
    const struct bt_nf *all;
    /* the last multipleOf above BT_SCHEMA_MULTIPLE_MAX, for the error message */
    const struct bt_sj *large_multiple;
    struct bt_schema_kept kept;
    bt_rx_t str_all, num_all, num_plain;
};

/* schema.c */
void *bt_schema_alloc(struct bt_schema *c, size_t n); /* returns zeroed memory */
/* Makes room for one more element of an array in the arena. */
void *bt_schema_grow(struct bt_schema *c, void *p, uint32_t n, uint32_t *cap, size_t size);
_Noreturn void bt_schema_fail(struct bt_schema *c, bt_status_t status, const struct bt_sj *at,
                              const char *fmt, ...) __attribute__((format(printf, 4, 5)));
_Noreturn void bt_schema_throw(struct bt_schema *c, bt_status_t status);
void bt_schema_work(struct bt_schema *c, uint32_t n);  /* counts steps; fails beyond the limit */
bt_rx_t bt_schema_rx(struct bt_schema *c, bt_rx_t rx); /* fails if rx is BT_RX_FAILED */
const struct bt_why *bt_schema_why(struct bt_schema *c, const struct bt_sj *at, const char *text);

/* schema_json.c */
struct bt_sj *bt_sj_parse(struct bt_schema *c, const char *text, size_t len);
/* NULL: the object has no such key */
const struct bt_sj *bt_sj_get(const struct bt_sj *object, const char *key);
const struct bt_sj *bt_sj_get_n(const struct bt_sj *object, const char *key, uint32_t n);
int bt_sj_text_cmp(struct bt_sj_text a, struct bt_sj_text b);
bool bt_sj_is(const struct bt_sj *v, const char *string);
/* Writes the JSON pointer of a value as a URI fragment: "#/a/0". */
void bt_sj_pointer(const struct bt_sj *v, char *out, size_t cap);
/* Reads one number, or one string with its quotes, at text. false: there is none. */
bool bt_sj_number(struct bt_schema *c, const char *text, size_t n, struct bt_dec *out);
/* returns the number of bytes; 0: not UTF-8 */
uint32_t bt_sj_utf8(const char *s, uint32_t n, uint32_t *code);

/* schema_ref.c */
void bt_schema_names(struct bt_schema *c);
const struct bt_sj *bt_schema_deref(struct bt_schema *c, const struct bt_sj *ref, bool dynamic);

/* schema_number.c: exact decimals and sets of numbers */
int bt_dec_cmp(const struct bt_dec *a, const struct bt_dec *b);
bool bt_mult_of(const struct bt_dec *d, struct bt_mult *m_p); /* false: the multiple is too large */
/* The least and the greatest multiple within the bounds, divided by p->of. false: unknown. */
bool bt_piece_multiples(const struct bt_piece *p, __int128 *first, __int128 *last);
struct bt_numset bt_num_all(struct bt_schema *c);
struct bt_numset bt_num_one(struct bt_schema *c, const struct bt_piece *p);
struct bt_numset bt_num_values(struct bt_schema *c, const struct bt_sj *const *v, uint32_t n);
struct bt_numset bt_num_meet(struct bt_schema *c, struct bt_numset a, struct bt_numset b);
struct bt_numset bt_num_join(struct bt_schema *c, const struct bt_numset *a, uint32_t n);
struct bt_numset bt_num_not(struct bt_schema *c, struct bt_numset a);
/* schema_number_rx.c: the texts of a set of numbers */
bt_rx_t bt_num_rx(struct bt_schema *c, struct bt_numset a);
bt_rx_t bt_num_rx_all(struct bt_rx_set *s);
bt_rx_t bt_num_rx_plain(struct bt_rx_set *s);

/* schema_string.c */
bt_rx_t bt_str_any(struct bt_schema *c); /* any string */
/* One of n texts, each followed by its tail (NULL: by nothing). json: the texts are spelled as in a
 * JSON string. */
struct bt_trie_text {
    struct bt_sj_text text;
    bt_rx_t tail;
};
bt_rx_t bt_str_trie(struct bt_schema *c, struct bt_trie_text *t, uint32_t n, bool json);
bt_rx_t bt_str_length(struct bt_schema *c, uint32_t min, uint32_t max);
bool bt_str_match(struct bt_schema *c, bt_rx_t rx, struct bt_sj_text text);
/* true: no text matches. false: a text may match. */
bool bt_str_none(struct bt_schema *c, bt_rx_t rx);
/* schema_strset.c */
struct bt_strset bt_strset_rx(bt_rx_t rx);
struct bt_strset bt_strset_values(struct bt_schema *c, const struct bt_sj *const *v, uint32_t n);
bt_rx_t bt_strset_to_rx(struct bt_schema *c, struct bt_strset a);
bool bt_strset_none(struct bt_strset a);
/* true: one is empty, or both are lists without a common text */
bool bt_strset_apart(struct bt_strset a, struct bt_strset b);
bool bt_strset_match(struct bt_schema *c, struct bt_strset a, struct bt_sj_text text);
struct bt_strset bt_strset_meet(struct bt_schema *c, struct bt_strset a, struct bt_strset b);
struct bt_strset bt_strset_join(struct bt_schema *c, const struct bt_strset *a, uint32_t n);
struct bt_strset bt_strset_not(struct bt_schema *c, struct bt_strset a);
struct bt_strset bt_strset_minus(struct bt_schema *c, struct bt_strset a, struct bt_strset b);
/* schema_format.c. Returns false if the format is only an annotation. */
bool bt_str_format(struct bt_schema *c, const struct bt_sj *format, bt_rx_t *out);

/* schema_set.c: constraints and their sets */
bt_set_t bt_set_lit(struct bt_schema *c, bt_lit_t lit);
bt_set_t bt_set_of(struct bt_schema *c, const struct bt_sj *schema);
bt_set_t bt_set_meet(struct bt_schema *c, bt_set_t a, bt_set_t b);
const struct bt_nf *bt_set_nf(struct bt_schema *c, bt_set_t set);
/* true: no value fulfils the set. false: a value may fulfil it. */
bool bt_set_none(struct bt_schema *c, bt_set_t set);
/* Returns whether constants show that no value fulfils both sets. This does not make the set of
 * both, which would cost more. depth: 0; more within nested objects. false: a value may fulfil
 * both. */
bool bt_set_apart(struct bt_schema *c, bt_set_t a, bt_set_t b, uint32_t depth);
bool bt_nf_none(const struct bt_nf *f);
const struct bt_nf *bt_nf_meet(struct bt_schema *c, const struct bt_nf *a, const struct bt_nf *b);
const struct bt_nf *bt_nf_join(struct bt_schema *c, const struct bt_nf *const *f, uint32_t n);
const struct bt_nf *bt_nf_not(struct bt_schema *c, const struct bt_nf *a, const struct bt_sj *at);
/* The values that fulfil exactly one of n normal forms. at: the place of the oneOf. */
const struct bt_nf *bt_nf_one(struct bt_schema *c, const struct bt_nf **f, uint32_t n,
                              const struct bt_sj *at);

/* schema_object.c and schema_array.c. NULL: no value fulfils both. */
const struct bt_obj *bt_obj_meet(struct bt_schema *c, const struct bt_obj *a,
                                 const struct bt_obj *b);
/* Returns whether a required property shows that no object fulfils both (see bt_set_apart). false:
 * an object may fulfil both. */
bool bt_obj_apart(struct bt_schema *c, const struct bt_obj *a, const struct bt_obj *b,
                  uint32_t depth);
/* Adds a property. If the object has this property already, adds a constraint to it. */
void bt_obj_prop(struct bt_schema *c, struct bt_obj *o, struct bt_sj_text name, bt_set_t value,
                 bool required);
/* Splits the classes so that all keys that match rx also have the constraint `value`. named: adds
 * it to the named properties, too. */
void bt_obj_split(struct bt_schema *c, struct bt_obj *o, bt_rx_t rx, bt_set_t value, bool named);
/* Sets the classes. Joins classes that have the same value. */
void bt_obj_classes(struct bt_schema *c, struct bt_obj *o, const struct bt_class *k, uint32_t n);
/* the limits on the number of properties contradict each other */
bool bt_obj_fails(const struct bt_obj *o);
struct bt_obj *bt_obj_new(struct bt_schema *c);
struct bt_obj *bt_obj_copy(struct bt_schema *c, const struct bt_obj *o);
bool bt_obj_is_all(const struct bt_obj *o);
/* The negation of o among objects: *out_p[n]. */
uint32_t bt_obj_not(struct bt_schema *c, const struct bt_obj *o, const struct bt_sj *at,
                    const struct bt_obj ***out_p);
/* Removes all bt_some. A shape for which this is impossible gets the bt_some's reason as its
 * `why`. */
uint32_t bt_obj_resolve(struct bt_schema *c, const struct bt_obj *o, const struct bt_obj ***out_p);
const struct bt_arr *bt_arr_meet(struct bt_schema *c, const struct bt_arr *a,
                                 const struct bt_arr *b);
struct bt_arr *bt_arr_new(struct bt_schema *c);
/* Lowers max to the number of items that are possible. false: no array is possible. */
bool bt_arr_settle(struct bt_schema *c, struct bt_arr *a);
bool bt_arr_is_all(const struct bt_arr *a);
uint32_t bt_arr_not(struct bt_schema *c, const struct bt_arr *a, const struct bt_sj *at,
                    const struct bt_arr ***out_p);

/* schema_eval.c, schema_members.c: keywords */
/* The value of a keyword in a schema. NULL: it is missing, or the schema's draft does not have this
 * keyword. */
const struct bt_sj *bt_schema_key(const struct bt_schema *c, const struct bt_sj *s,
                                  const char *key);
const struct bt_nf *bt_schema_eval(struct bt_schema *c, bt_lit_t lit);
uint32_t bt_schema_count(struct bt_schema *c, const struct bt_sj *v, uint32_t otherwise);
/* Reads a number. Fails if it exceeds the limits of decimals. */
const struct bt_dec *bt_schema_number(struct bt_schema *c, const struct bt_sj *v);
bt_rx_t bt_schema_pattern(struct bt_schema *c, const struct bt_sj *at, struct bt_sj_text pattern,
                          const struct bt_why **why_p);
struct bt_obj *bt_schema_object(struct bt_schema *c, const struct bt_sj *s);
struct bt_arr *bt_schema_array(struct bt_schema *c, const struct bt_sj *s);
/* schema_unique.c */
/* Replaces classes of few names by properties, so that minProperties knows how many keys are
 * possible. NULL: there are not enough keys. */
const struct bt_obj *bt_schema_name_classes(struct bt_schema *c, const struct bt_obj *o);
/* Returns whether f has at least n different scalar values. */
bool bt_schema_has_values(struct bt_schema *c, const struct bt_nf *f, uint32_t n);
/* schema_emit.c */
bt_node_t bt_schema_emit(struct bt_schema *c, bt_set_t start);

#endif
