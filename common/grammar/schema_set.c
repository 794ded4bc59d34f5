/* Sets of constraints, and operations on normal forms. A set stands for the intersection of its
 * schemas. Its normal form is computed once, when a function first asks for it. So recursive
 * schemas need no unfolding. */
#include "common/grammar/schema_priv.h"

#include <string.h>

#define APART_DEPTH 4  /* depth of nested objects in which to look for a discriminator */
#define PROBE_DEPTH 12 /* depth of nested calls of bt_set_none; beyond it: false */

/* ---- sets ---- */
static bt_set_t intern(struct bt_schema *c, const bt_lit_t *lits, uint32_t n)
{
    uint32_t h = 2166136261u;
    for (uint32_t i = 0; i < n; i++)
        h = (h ^ lits[i]) * 16777619u;
    uint32_t *head = &c->set_heads[(h ^ h >> 15) % 1024];
    for (uint32_t i = *head; i; i = c->sets[i].hash_next)
        if (c->sets[i].n == n && memcmp(c->sets[i].lits, lits, n * sizeof(*lits)) == 0)
            return i;
    bt_schema_work(c, 1);
    c->sets = bt_schema_grow(c, c->sets, c->n_sets, &c->cap_sets, sizeof(*c->sets));
    bt_lit_t *copy = bt_schema_alloc(c, n * sizeof(*copy));
    memcpy(copy, lits, n * sizeof(*copy));
    c->sets[c->n_sets] =
        (struct bt_schema_set){.lits = copy, .n = n, .hash_next = *head, .node = BT_NODE_FAILED};
    return *head = c->n_sets++;
}

/* Returns whether the keyword says nothing about a value. */
static bool is_annotation(const struct bt_sj *m)
{
    static const char *const names[] = {"title",     "description", "default",    "examples",
                                        "example",   "$comment",    "deprecated", "readOnly",
                                        "writeOnly", "$schema",     "$id",        "id",
                                        "$anchor",   "$defs",       "definitions"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (m->key.n == strlen(names[i]) && memcmp(m->key.s, names[i], m->key.n) == 0)
            return true;
    return false;
}

bt_set_t bt_set_lit(struct bt_schema *c, bt_lit_t lit)
{
    const struct bt_sj *v = c->values[lit >> 2];
    bool no = lit & BT_LIT_NOT;
    if (!(lit & BT_LIT_CONST)) {
        bool trivial = v->type == BT_SJ_OBJECT;
        for (uint32_t i = 0; trivial && i < v->n; i++)
            trivial = is_annotation(v->items[i]);
        if (trivial || v->type == BT_SJ_TRUE)
            return no ? BT_SET_NONE : BT_SET_TRUE;
        if (v->type == BT_SJ_FALSE)
            return no ? BT_SET_TRUE : BT_SET_NONE;
    }
    return intern(c, &lit, 1);
}

bt_set_t bt_set_of(struct bt_schema *c, const struct bt_sj *schema)
{
    return bt_set_lit(c, schema->id << 2);
}

bt_set_t bt_set_meet(struct bt_schema *c, bt_set_t a, bt_set_t b)
{
    if (a == b || b == BT_SET_TRUE || a == BT_SET_NONE)
        return a;
    if (a == BT_SET_TRUE || b == BT_SET_NONE)
        return b;
    const struct bt_schema_set *x = &c->sets[a], *y = &c->sets[b];
    bt_lit_t small[64], *out = small;
    if (x->n + y->n > 64)
        out = bt_schema_alloc(c, (x->n + y->n) * sizeof(*out));
    uint32_t n = 0, i = 0, j = 0;
    while (i < x->n || j < y->n) {
        bt_lit_t l;
        if (j == y->n || (i < x->n && x->lits[i] <= y->lits[j]))
            l = x->lits[i++];
        else
            l = y->lits[j++];
        if (n && out[n - 1] == l)
            continue;
        if (n && (out[n - 1] ^ l) == BT_LIT_NOT)
            return BT_SET_NONE;
        out[n++] = l;
    }
    bt_set_t set = intern(c, out, n);
    if (!c->sets[set].nf && !c->sets[set].part[0]) {
        c->sets[set].part[0] = a;
        c->sets[set].part[1] = b;
    }
    return set;
}

/* The normal form of a part of a set, if it is cheap to compute. */
static const struct bt_nf *part_nf(struct bt_schema *c, bt_set_t set)
{
    if (set && !c->sets[set].nf && c->sets[set].n == 1)
        c->sets[set].nf = bt_schema_eval(c, c->sets[set].lits[0]);
    return set ? c->sets[set].nf : NULL;
}

const struct bt_nf *bt_set_nf(struct bt_schema *c, bt_set_t set)
{
    if (c->sets[set].nf)
        return c->sets[set].nf;
    const struct bt_nf *f = c->all;
    const struct bt_nf *a = part_nf(c, c->sets[set].part[0]);
    const struct bt_nf *b = a ? part_nf(c, c->sets[set].part[1]) : NULL;
    if (b) {
        f = bt_nf_meet(c, a, b);
    } else {
        for (uint32_t i = 0; i < c->sets[set].n; i++)
            f = bt_nf_meet(c, f, bt_schema_eval(c, c->sets[set].lits[i]));
    }
    c->sets[set].nf = f;
    return f;
}

/* Tries to compute a normal form. NULL: a schema that is being computed refers to itself through
 * properties, so the form is not known yet. bt_schema_eval jumps here then. */
static const struct bt_nf *try_nf(struct bt_schema *c, bt_set_t set)
{
    jmp_buf jump, *outer = c->jump;
    const struct bt_nf *f = NULL;
    c->jump = &jump;
    c->probes++;
    if (setjmp(jump) == 0)
        f = bt_set_nf(c, set);
    c->probes--;
    c->jump = outer;
    return f;
}

bool bt_set_none(struct bt_schema *c, bt_set_t set)
{
    if (set == BT_SET_TRUE || set == BT_SET_NONE)
        return set == BT_SET_NONE;
    if (c->sets[set].nf)
        return bt_nf_none(c->sets[set].nf);
    if (c->probes >= PROBE_DEPTH)
        return false;
    uint32_t depth = c->depth, n_busy = c->n_busy;
    const struct bt_nf *f = try_nf(c, set);
    if (f)
        return bt_nf_none(f);
    c->depth = depth;
    while (c->n_busy > n_busy) {
        bt_lit_t l = c->busy[--c->n_busy];
        c->values[l >> 2]->busy &= (uint8_t) ~(1u << (l & 3));
    }
    if (c->status != BT_AGAIN) /* an error of the schema */
        bt_schema_throw(c, c->status);
    c->status = BT_OK;
    bt_schema_work(c, 4);
    return false;
}

/* Returns whether the schema can be a discriminator: it has constants, or it is an object with a
 * required property. */
static bool discriminates(const struct bt_schema *c, bt_lit_t l)
{
    const struct bt_sj *v = c->values[l >> 2];
    return !(l & (BT_LIT_CONST | BT_LIT_NOT)) && v->type == BT_SJ_OBJECT &&
           (bt_sj_get(v, "const") || bt_sj_get(v, "enum") ||
            (bt_sj_get(v, "properties") && bt_sj_get(v, "required")));
}

/* The normal form of one discriminator in the set. The set allows no more than this form. NULL:
 * none is known. */
static const struct bt_nf *discriminator(struct bt_schema *c, bt_set_t set)
{
    if (set == BT_SET_TRUE || set == BT_SET_NONE || c->sets[set].nf)
        return c->sets[set].nf;
    for (uint32_t i = 0; i < c->sets[set].n; i++) {
        bt_lit_t l = c->sets[set].lits[i];
        if (!discriminates(c, l))
            continue;
        bt_set_t one = c->sets[set].n == 1 ? set : bt_set_lit(c, l);
        /* computes the form, unless it depends on one that is being computed */
        (void)bt_set_none(c, one);
        return c->sets[one].nf;
    }
    return NULL;
}

bool bt_set_apart(struct bt_schema *c, bt_set_t a, bt_set_t b, uint32_t depth)
{
    const struct bt_nf *x = a != b && depth < APART_DEPTH ? discriminator(c, a) : NULL;
    const struct bt_nf *y = x ? discriminator(c, b) : NULL;
    if (!y || x->bits & y->bits || (x->n_arr && y->n_arr) || !bt_strset_apart(x->str, y->str))
        return false;
    for (uint32_t i = 0; i < x->n_obj; i++)
        for (uint32_t j = 0; j < y->n_obj; j++) {
            bt_schema_work(c, 1);
            if (x->n_obj * y->n_obj > 4 || !bt_obj_apart(c, x->obj[i], y->obj[j], depth + 1))
                return false;
        }
    return bt_num_meet(c, x->num, y->num).n == 0;
}

/* ---- normal forms ---- */
bool bt_nf_none(const struct bt_nf *f)
{
    return !f->bits && !f->num.n && bt_strset_none(f->str) && !f->n_arr && !f->n_obj;
}

static void limit(struct bt_schema *c, uint32_t n)
{
    if (n > BT_SCHEMA_SHAPES_MAX)
        bt_schema_fail(
            c, BT_ERR_EXHAUSTED, NULL,
            "a value has more than %u alternatives after allOf, anyOf, oneOf, not and if "
            "are combined; use fewer",
            BT_SCHEMA_SHAPES_MAX);
}

static void add_arr(struct bt_schema *c, struct bt_nf *f, uint32_t *cap, const struct bt_arr *a)
{
    if (!a || (f->n_arr && bt_arr_is_all(f->arr[0])))
        return;
    if (bt_arr_is_all(a))
        f->n_arr = 0;
    for (uint32_t i = 0; i < f->n_arr; i++)
        if (f->arr[i] == a)
            return;
    limit(c, f->n_arr + 1);
    f->arr = bt_schema_grow(c, f->arr, f->n_arr, cap, sizeof(*f->arr));
    f->arr[f->n_arr++] = a;
}

static bool obj_same(const struct bt_obj *a, const struct bt_obj *b)
{
    if (a->n_props != b->n_props || a->n_classes != b->n_classes || a->n_some || b->n_some ||
        a->min != b->min || a->max != b->max || a->why != b->why)
        return false;
    for (uint32_t i = 0; i < a->n_props; i++)
        if (a->props[i].value != b->props[i].value ||
            a->props[i].required != b->props[i].required ||
            bt_sj_text_cmp(a->props[i].name, b->props[i].name) != 0)
            return false;
    for (uint32_t i = 0; i < a->n_classes; i++)
        if (a->classes[i].key != b->classes[i].key || a->classes[i].value != b->classes[i].value)
            return false;
    return true;
}

static void add_obj(struct bt_schema *c, struct bt_nf *f, uint32_t *cap, const struct bt_obj *o)
{
    if (!o || (f->n_obj && bt_obj_is_all(f->obj[0])))
        return;
    if (bt_obj_is_all(o))
        f->n_obj = 0;
    for (uint32_t i = 0; i < f->n_obj && f->n_obj < 64; i++)
        if (f->obj[i] == o || obj_same(f->obj[i], o))
            return;
    limit(c, f->n_obj + 1);
    f->obj = bt_schema_grow(c, f->obj, f->n_obj, cap, sizeof(*f->obj));
    f->obj[f->n_obj++] = o;
}

const struct bt_nf *bt_nf_meet(struct bt_schema *c, const struct bt_nf *a, const struct bt_nf *b)
{
    if (a == c->all || b == c->all)
        return a == c->all ? b : a;
    struct bt_nf *f = bt_schema_alloc(c, sizeof(*f));
    uint32_t cap_arr = 0, cap_obj = 0;
    f->bits = a->bits & b->bits;
    f->num = bt_num_meet(c, a->num, b->num);
    f->str = bt_strset_meet(c, a->str, b->str);
    f->why_str = a->why_str ? a->why_str : b->why_str;
    f->why_num = a->why_num ? a->why_num : b->why_num;
    for (uint32_t i = 0; i < a->n_arr; i++)
        for (uint32_t j = 0; j < b->n_arr; j++)
            add_arr(c, f, &cap_arr, bt_arr_meet(c, a->arr[i], b->arr[j]));
    for (uint32_t i = 0; i < a->n_obj; i++)
        for (uint32_t j = 0; j < b->n_obj; j++)
            add_obj(c, f, &cap_obj, bt_obj_meet(c, a->obj[i], b->obj[j]));
    return f;
}

const struct bt_nf *bt_nf_join(struct bt_schema *c, const struct bt_nf *const *f, uint32_t n)
{
    struct bt_nf *r = bt_schema_alloc(c, sizeof(*r));
    struct bt_numset *num = bt_schema_alloc(c, n * sizeof(*num));
    struct bt_strset *str = bt_schema_alloc(c, n * sizeof(*str));
    uint32_t cap_arr = 0, cap_obj = 0;
    for (uint32_t i = 0; i < n; i++) {
        r->bits |= f[i]->bits;
        num[i] = f[i]->num;
        str[i] = f[i]->str;
        r->why_str = r->why_str ? r->why_str : f[i]->why_str;
        r->why_num = r->why_num ? r->why_num : f[i]->why_num;
        bt_schema_work(c, (f[i]->n_obj + f[i]->n_arr) / 4);
        for (uint32_t k = 0; k < f[i]->n_arr; k++)
            add_arr(c, r, &cap_arr, f[i]->arr[k]);
        for (uint32_t k = 0; k < f[i]->n_obj; k++)
            add_obj(c, r, &cap_obj, f[i]->obj[k]);
    }
    r->num = bt_num_join(c, num, n);
    r->str = bt_strset_join(c, str, n);
    return r;
}

const struct bt_nf *bt_nf_not(struct bt_schema *c, const struct bt_nf *a, const struct bt_sj *at)
{
    struct bt_nf *f = bt_schema_alloc(c, sizeof(*f));
    *f = *c->all;
    f->bits &= ~a->bits;
    f->num = bt_num_not(c, a->num);
    f->str = bt_strset_not(c, a->str);
    f->why_num = a->why_num;
    f->why_str = a->why_str;
    for (uint32_t i = 0; i < a->n_arr; i++) {
        struct bt_nf part = {0}, sum = {.n_arr = f->n_arr, .arr = f->arr};
        part.n_arr = bt_arr_not(c, a->arr[i], at, &part.arr);
        const struct bt_nf *m = bt_nf_meet(c, &sum, &part);
        f->n_arr = m->n_arr;
        f->arr = m->arr;
    }
    for (uint32_t i = 0; i < a->n_obj; i++) {
        struct bt_nf part = {0}, sum = {.n_obj = f->n_obj, .obj = f->obj};
        part.n_obj = bt_obj_not(c, a->obj[i], at, &part.obj);
        const struct bt_nf *m = bt_nf_meet(c, &sum, &part);
        f->n_obj = m->n_obj;
        f->obj = m->obj;
    }
    return f;
}

/* ---- exactly one ---- */
/* Returns whether some array or object may fulfil both. */
static bool overlap(struct bt_schema *c, const struct bt_nf *a, const struct bt_nf *b)
{
    for (uint32_t i = 0; i < a->n_arr; i++)
        for (uint32_t j = 0; j < b->n_arr; j++)
            if (bt_arr_meet(c, a->arr[i], b->arr[j]))
                return true;
    for (uint32_t i = 0; i < a->n_obj; i++)
        for (uint32_t j = 0; j < b->n_obj; j++)
            if (bt_obj_meet(c, a->obj[i], b->obj[j]))
                return true;
    return false;
}

/* For null, booleans, numbers and strings: the values that are in exactly one of f. */
static void one_scalar(struct bt_schema *c, struct bt_nf *r, const struct bt_nf **f, uint32_t n)
{
    struct bt_numset twice_num = {0};
    struct bt_strset twice_str = {0};
    uint32_t twice = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct bt_numset num[] = {twice_num, bt_num_meet(c, r->num, f[i]->num)};
        struct bt_strset str[] = {twice_str, bt_strset_meet(c, r->str, f[i]->str)};
        twice |= r->bits & f[i]->bits;
        r->bits |= f[i]->bits;
        twice_num = bt_num_join(c, num, 2);
        r->num = bt_num_join(c, (struct bt_numset[]){r->num, f[i]->num}, 2);
        twice_str = bt_strset_join(c, str, 2);
        r->str = bt_strset_join(c, (struct bt_strset[]){r->str, f[i]->str}, 2);
        r->why_str = r->why_str ? r->why_str : f[i]->why_str;
        r->why_num = r->why_num ? r->why_num : f[i]->why_num;
    }
    r->bits &= ~twice;
    if (twice_num.n)
        r->num = bt_num_meet(c, r->num, bt_num_not(c, twice_num));
    if (!bt_strset_none(twice_str))
        r->str = bt_strset_minus(c, r->str, twice_str);
}

const struct bt_nf *bt_nf_one(struct bt_schema *c, const struct bt_nf **f, uint32_t n,
                              const struct bt_sj *at)
{
    struct bt_nf *r = bt_schema_alloc(c, sizeof(*r));
    uint32_t cap_arr = 0, cap_obj = 0;
    one_scalar(c, r, f, n);
    const struct bt_nf **no = bt_schema_alloc(c, n * sizeof(*no));
    uint8_t *meets = bt_schema_alloc(c, (size_t)n * n);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = i + 1; j < n; j++) {
            bt_schema_work(c, 1);
            meets[i * n + j] = meets[j * n + i] = overlap(c, f[i], f[j]);
        }
    for (uint32_t i = 0; i < n; i++) {
        const struct bt_nf *only = f[i];
        for (uint32_t j = 0; j < n; j++) {
            if (!meets[i * n + j])
                continue;
            struct bt_nf other = {
                .n_arr = f[j]->n_arr, .arr = f[j]->arr, .n_obj = f[j]->n_obj, .obj = f[j]->obj};
            if (!no[j])
                no[j] = bt_nf_not(c, &other, at);
            only = bt_nf_meet(c, only, no[j]);
        }
        for (uint32_t k = 0; k < only->n_arr; k++)
            add_arr(c, r, &cap_arr, only->arr[k]);
        for (uint32_t k = 0; k < only->n_obj; k++)
            add_obj(c, r, &cap_obj, only->obj[k]);
    }
    return r;
}
