/* Computes the normal form of a schema. */
#include "common/grammar/schema_priv.h"

#include <string.h>

#define COUNT_MAX 1000000000u /* no document is so large: a higher limit is as good as none */

const struct bt_sj *bt_schema_key(const struct bt_schema *c, const struct bt_sj *s, const char *key)
{
    static const struct {
        const char *key;
        uint32_t since;
    } drafts[] = {
        {"const", 6},
        {"contains", 6},
        {"propertyNames", 6},
        {"if", 7},
        {"dependentRequired", 2019},
        {"dependentSchemas", 2019},
        {"unevaluatedItems", 2019},
        {"unevaluatedProperties", 2019},
        {"$recursiveRef", 2019},
        {"prefixItems", 2020},
        {"$dynamicRef", 2020},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(drafts); i++)
        if (c->draft < drafts[i].since && strcmp(key, drafts[i].key) == 0)
            return NULL;
    return bt_sj_get(s, key);
}

uint32_t bt_schema_count(struct bt_schema *c, const struct bt_sj *v, uint32_t otherwise)
{
    if (!v)
        return otherwise;
    bool whole = v->type == BT_SJ_NUMBER && !v->num.neg &&
                 (!v->num.n || (v->num.exp > 0 && (uint32_t)v->num.exp >= v->num.n));
    if (!whole)
        bt_schema_fail(c, BT_ERR_INVALID, v, "this must be a whole number of 0 or more");
    uint64_t n = 0;
    for (int32_t i = 0; v->num.n && i < v->num.exp && n < UINT32_MAX; i++)
        n = n * 10 + (uint64_t)((uint32_t)i < v->num.n ? v->num.d[i] - '0' : 0);
    if (n >= COUNT_MAX)
        return otherwise == BT_RX_NO_MAX ? BT_RX_NO_MAX : COUNT_MAX;
    return (uint32_t)n;
}

const struct bt_dec *bt_schema_number(struct bt_schema *c, const struct bt_sj *v)
{
    if (v->type != BT_SJ_NUMBER)
        bt_schema_fail(c, BT_ERR_INVALID, v, "this is a number");
    int32_t e = v->num.exp;
    if (v->num.n > BT_SCHEMA_DIGITS_MAX || e > (int32_t)BT_SCHEMA_DIGITS_MAX ||
        e < -(int32_t)BT_SCHEMA_DIGITS_MAX)
        bt_schema_fail(c, BT_ERR_UNSUPPORTED, v,
                       "a number has at most %u digits and stays between 1e-%u and 1e%u",
                       BT_SCHEMA_DIGITS_MAX, BT_SCHEMA_DIGITS_MAX, BT_SCHEMA_DIGITS_MAX);
    return &v->num;
}

/* ---- constants ---- */
static const struct bt_nf *values_nf(struct bt_schema *c, const struct bt_sj *const *v, uint32_t n)
{
    struct bt_nf *f = bt_schema_alloc(c, sizeof(*f));
    const struct bt_sj **num = bt_schema_alloc(c, (n + 1) * sizeof(*num));
    const struct bt_sj **str = bt_schema_alloc(c, (n + 1) * sizeof(*str));
    const struct bt_nf **sum = bt_schema_alloc(c, (n + 1) * sizeof(*sum));
    uint32_t n_num = 0, n_str = 0, n_sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        switch (v[i]->type) {
        case BT_SJ_NULL: f->bits |= BT_NF_NULL; break;
        case BT_SJ_FALSE: f->bits |= BT_NF_FALSE; break;
        case BT_SJ_TRUE: f->bits |= BT_NF_TRUE; break;
        case BT_SJ_NUMBER:
            bt_schema_number(c, v[i]);
            num[n_num++] = v[i];
            break;
        case BT_SJ_STRING: str[n_str++] = v[i]; break;
        case BT_SJ_ARRAY:
        case BT_SJ_OBJECT: break;
        }
    }
    f->num = bt_num_values(c, num, n_num);
    f->str = bt_strset_values(c, str, n_str);
    sum[n_sum++] = f;
    for (uint32_t i = 0; i < n; i++)
        if (v[i]->type == BT_SJ_ARRAY || v[i]->type == BT_SJ_OBJECT)
            sum[n_sum++] = bt_schema_eval(c, v[i]->id << 2 | BT_LIT_CONST);
    return n_sum == 1 ? f : bt_nf_join(c, sum, n_sum);
}

static const struct bt_nf *const_nf(struct bt_schema *c, const struct bt_sj *v)
{
    if (v->type != BT_SJ_ARRAY && v->type != BT_SJ_OBJECT)
        return values_nf(c, &v, 1);
    struct bt_nf *f = bt_schema_alloc(c, sizeof(*f));
    if (v->type == BT_SJ_ARRAY) {
        struct bt_arr *a = bt_arr_new(c);
        f->arr = bt_schema_alloc(c, sizeof(*f->arr));
        f->arr[f->n_arr++] = a;
        a->rest = BT_SET_NONE;
        a->n_prefix = a->min = a->max = v->n;
        a->prefix = bt_schema_alloc(c, (v->n + 1) * sizeof(*a->prefix));
        for (uint32_t i = 0; i < v->n; i++)
            a->prefix[i] = bt_set_lit(c, v->items[i]->id << 2 | BT_LIT_CONST);
        return f;
    }
    struct bt_obj *o = bt_obj_new(c);
    f->obj = bt_schema_alloc(c, sizeof(*f->obj));
    f->obj[f->n_obj++] = o;
    for (uint32_t i = 0; i < v->n; i++)
        bt_obj_prop(c, o, v->sorted[i]->key, bt_set_lit(c, v->sorted[i]->id << 2 | BT_LIT_CONST),
                    true);
    o->classes[0].value = BT_SET_NONE;
    return f;
}

/* ---- types, numbers, strings ---- */
static void one_type(struct bt_schema *c, struct bt_nf *f, const struct bt_sj *v, bool *integer)
{
    if (bt_sj_is(v, "null"))
        f->bits |= BT_NF_NULL;
    else if (bt_sj_is(v, "boolean"))
        f->bits |= BT_NF_FALSE | BT_NF_TRUE;
    else if (bt_sj_is(v, "number"))
        f->num = c->all->num;
    else if (bt_sj_is(v, "integer"))
        *integer = true;
    else if (bt_sj_is(v, "string"))
        f->str = bt_strset_rx(c->str_all);
    else if (bt_sj_is(v, "array"))
        f->arr = c->all->arr, f->n_arr = 1;
    else if (bt_sj_is(v, "object"))
        f->obj = c->all->obj, f->n_obj = 1;
    else
        bt_schema_fail(c, BT_ERR_INVALID, v,
                       "a type is null, boolean, number, integer, string, array or object");
}

static struct bt_nf *types(struct bt_schema *c, const struct bt_sj *s)
{
    struct bt_nf *f = bt_schema_alloc(c, sizeof(*f));
    const struct bt_sj *v = bt_sj_get(s, "type");
    bool integer = false;
    if (!v) {
        *f = *c->all;
        return f;
    }
    if (v->type == BT_SJ_ARRAY)
        for (uint32_t i = 0; i < v->n; i++)
            one_type(c, f, v->items[i], &integer);
    else
        one_type(c, f, v, &integer);
    if (integer && !f->num.n)
        f->num = bt_num_one(c, &(struct bt_piece){.of = {1, 0}});
    return f;
}

static void number(struct bt_schema *c, struct bt_nf *f, const struct bt_sj *s)
{
    struct bt_piece p = {0};
    const struct bt_sj *v;
    bool open_lo = false, open_hi = false, any = false;
    if ((v = bt_sj_get(s, "exclusiveMinimum"))) {
        if (v->type == BT_SJ_TRUE || v->type == BT_SJ_FALSE) /* in draft-04 it is a boolean */
            open_lo = v->type == BT_SJ_TRUE;
        else if (c->draft > 4)
            p.lo = bt_schema_number(c, v), p.lo_open = any = true;
    }
    if ((v = bt_sj_get(s, "exclusiveMaximum"))) {
        if (v->type == BT_SJ_TRUE || v->type == BT_SJ_FALSE)
            open_hi = v->type == BT_SJ_TRUE;
        else if (c->draft > 4)
            p.hi = bt_schema_number(c, v), p.hi_open = any = true;
    }
    if ((v = bt_sj_get(s, "multipleOf"))) {
        bt_schema_number(c, v);
        if (!v->num.n || v->num.neg)
            bt_schema_fail(c, BT_ERR_INVALID, v, "multipleOf is above 0");
        if (!bt_mult_of(&v->num, &p.of))
            bt_schema_fail(c, BT_ERR_UNSUPPORTED, v, "multipleOf has at most 12 digits");
        if (p.of.m > 1000000000)
            f->why_num = bt_schema_why(c, v, "multipleOf has at most 9 digits; use fewer");
        if (p.of.m > BT_SCHEMA_MULTIPLE_MAX)
            c->large_multiple = v;
        any = true;
    }
    if (any)
        f->num = bt_num_meet(c, f->num, bt_num_one(c, &p));
    p = (struct bt_piece){0};
    if ((v = bt_sj_get(s, "minimum")))
        p.lo = bt_schema_number(c, v), p.lo_open = open_lo;
    if ((v = bt_sj_get(s, "maximum")))
        p.hi = bt_schema_number(c, v), p.hi_open = open_hi;
    if (p.lo || p.hi)
        f->num = bt_num_meet(c, f->num, bt_num_one(c, &p));
}

bt_rx_t bt_schema_pattern(struct bt_schema *c, const struct bt_sj *at, struct bt_sj_text pattern,
                          const struct bt_why **why_p)
{
    char err[200] = "";
    bt_rx_t rx = c->str_all;
    uint32_t hash = 2166136261u;
    for (uint32_t i = 0; i < pattern.n; i++)
        hash = (hash ^ (uint8_t)pattern.s[i]) * 16777619u;
    hash = (hash ^ hash >> 16) % BT_SCHEMA_PATTERNS;
    if (c->kept.patterns[hash].text.s && bt_sj_text_cmp(c->kept.patterns[hash].text, pattern) == 0)
        return c->kept.patterns[hash].rx;
    bt_status_t st =
        bt_rx_parse(c->rx, pattern.s, pattern.n, true, BT_RX_JSON_STRING, &rx, err, sizeof(err));
    if (st == BT_ERR_UNSUPPORTED) {
        char *text = bt_schema_alloc(c, sizeof(err));
        memcpy(text, err, sizeof(err));
        *why_p = bt_schema_why(c, at, text);
        return c->str_all;
    }
    if (st != BT_OK)
        bt_schema_fail(c, st, at, "%s", err);
    c->kept.patterns[hash].text = pattern;
    c->kept.patterns[hash].rx = bt_schema_rx(c, rx);
    return rx;
}

static void meet_string(struct bt_schema *c, struct bt_nf *f, bt_rx_t rx)
{
    rx = f->str.rx == c->str_all ? rx : bt_rx_and(c->rx, f->str.rx, rx);
    f->str = bt_strset_rx(bt_schema_rx(c, rx));
}

static void string(struct bt_schema *c, struct bt_nf *f, const struct bt_sj *s)
{
    const struct bt_sj *v;
    bt_rx_t rx;
    if ((v = bt_sj_get(s, "pattern"))) {
        if (v->type != BT_SJ_STRING)
            bt_schema_fail(c, BT_ERR_INVALID, v, "a pattern is a string");
        meet_string(c, f, bt_schema_pattern(c, v, v->text, &f->why_str));
    }
    if ((v = bt_sj_get(s, "format")) && bt_str_format(c, v, &rx))
        meet_string(c, f, rx);
    uint32_t min = bt_schema_count(c, bt_sj_get(s, "minLength"), 0);
    uint32_t max = bt_schema_count(c, bt_sj_get(s, "maxLength"), BT_RX_NO_MAX);
    if (min > max)
        f->str = bt_strset_rx(BT_RX_NONE);
    else if (min || max != BT_RX_NO_MAX)
        meet_string(c, f, bt_str_length(c, min, max));
    if (f->str.rx != c->str_all && bt_str_none(c, f->str.rx))
        f->str = bt_strset_rx(BT_RX_NONE);
}

static bool any_of(const struct bt_sj *s, const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bt_sj_get(s, names[i]))
            return true;
    return false;
}

/* The normal form of the keywords that concern one type each. */
static const struct bt_nf *typed(struct bt_schema *c, const struct bt_sj *s)
{
    static const char *const object[] = {
        "properties",    "required",      "additionalProperties", "patternProperties",
        "propertyNames", "minProperties", "maxProperties",        "unevaluatedProperties"};
    static const char *const array[] = {"items",    "prefixItems", "minItems",        "maxItems",
                                        "contains", "uniqueItems", "unevaluatedItems"};
    struct bt_nf *f = types(c, s);
    if (f->num.n)
        number(c, f, s);
    if (!bt_strset_none(f->str))
        string(c, f, s);
    if (f->n_obj && any_of(s, object, sizeof(object) / sizeof(object[0]))) {
        struct bt_obj *o = bt_schema_object(c, s);
        f->obj = bt_schema_alloc(c, sizeof(*f->obj));
        f->obj[0] = o;
        f->n_obj = !bt_obj_fails(o);
    }
    if (f->n_arr && any_of(s, array, sizeof(array) / sizeof(array[0]))) {
        struct bt_arr *a = bt_schema_array(c, s);
        f->arr = bt_schema_alloc(c, sizeof(*f->arr));
        f->arr[0] = a;
        f->n_arr = bt_arr_settle(c, a);
    }
    return f;
}

/* ---- combinations ---- */
static const struct bt_sj *list(struct bt_schema *c, const struct bt_sj *s, const char *key)
{
    const struct bt_sj *v = bt_sj_get(s, key);
    if (v && (v->type != BT_SJ_ARRAY || !v->n))
        bt_schema_fail(c, BT_ERR_INVALID, v, "%s is a list of at least one schema", key);
    return v;
}

static const struct bt_nf *eval(struct bt_schema *c, const struct bt_sj *v)
{
    return bt_schema_eval(c, v->id << 2);
}

/* All values that are no object, all objects without the property, and the objects that have the
 * property and fulfil `then`. */
static const struct bt_nf *if_present(struct bt_schema *c, struct bt_sj_text name,
                                      const struct bt_nf *then)
{
    struct bt_nf *f = bt_schema_alloc(c, sizeof(*f)), *has = bt_schema_alloc(c, sizeof(*has));
    struct bt_obj *without = bt_obj_new(c), *with = bt_obj_new(c);
    bt_obj_prop(c, without, name, BT_SET_NONE, false);
    bt_obj_prop(c, with, name, BT_SET_TRUE, true);
    *f = *has = *c->all;
    f->obj = bt_schema_alloc(c, sizeof(*f->obj));
    f->obj[0] = without;
    has->obj = bt_schema_alloc(c, sizeof(*has->obj));
    has->obj[0] = with;
    has->bits = 0;
    has->num.n = 0;
    has->str = bt_strset_rx(BT_RX_NONE);
    has->n_arr = 0;
    return bt_nf_join(c, (const struct bt_nf *[]){f, bt_nf_meet(c, has, then)}, 2);
}

static const struct bt_nf *require(struct bt_schema *c, const struct bt_sj *names)
{
    struct bt_nf *f = bt_schema_alloc(c, sizeof(*f));
    struct bt_obj *o = bt_obj_new(c);
    *f = *c->all;
    f->obj = bt_schema_alloc(c, sizeof(*f->obj));
    f->obj[0] = o;
    for (uint32_t i = 0; i < names->n; i++) {
        if (names->items[i]->type != BT_SJ_STRING)
            bt_schema_fail(c, BT_ERR_INVALID, names->items[i], "this is the name of a property");
        bt_obj_prop(c, o, names->items[i]->text, BT_SET_TRUE, true);
    }
    return f;
}

static const struct bt_nf *dependencies(struct bt_schema *c, const struct bt_nf *f,
                                        const struct bt_sj *s)
{
    static const char *const keys[] = {"dependencies", "dependentRequired", "dependentSchemas"};
    for (int k = 0; k < 3; k++) {
        const struct bt_sj *v = bt_schema_key(c, s, keys[k]);
        if (v && v->type != BT_SJ_OBJECT)
            bt_schema_fail(c, BT_ERR_INVALID, v, "%s is an object", keys[k]);
        for (uint32_t i = 0; v && i < v->n; i++) {
            const struct bt_sj *m = v->items[i];
            const struct bt_nf *then;
            if (k < 2 && m->type == BT_SJ_ARRAY)
                then = require(c, m);
            else if (k == 1)
                bt_schema_fail(c, BT_ERR_INVALID, m, "dependentRequired lists names");
            else
                then = eval(c, m);
            f = bt_nf_meet(c, f, if_present(c, m->key, then));
        }
    }
    return f;
}

static const struct bt_nf *conditional(struct bt_schema *c, const struct bt_nf *f,
                                       const struct bt_sj *s)
{
    const struct bt_sj *cond = bt_schema_key(c, s, "if"), *then = bt_sj_get(s, "then");
    const struct bt_sj *otherwise = bt_sj_get(s, "else");
    if (!cond || (!then && !otherwise))
        return f;
    const struct bt_nf *yes = bt_nf_meet(c, f, eval(c, cond));
    const struct bt_nf *no = bt_nf_meet(c, f, bt_schema_eval(c, cond->id << 2 | BT_LIT_NOT));
    if (then)
        yes = bt_nf_meet(c, yes, eval(c, then));
    if (otherwise)
        no = bt_nf_meet(c, no, eval(c, otherwise));
    return bt_nf_join(c, (const struct bt_nf *[]){yes, no}, 2);
}

static const struct bt_nf *alternatives(struct bt_schema *c, const struct bt_nf *f,
                                        const struct bt_sj *s)
{
    const struct bt_sj *v;
    if ((v = list(c, s, "anyOf"))) {
        const struct bt_nf **each = bt_schema_alloc(c, v->n * sizeof(*each));
        for (uint32_t i = 0; i < v->n; i++)
            each[i] = bt_nf_meet(c, f, eval(c, v->items[i]));
        f = bt_nf_join(c, each, v->n);
    }
    if ((v = list(c, s, "oneOf"))) {
        const struct bt_nf **each = bt_schema_alloc(c, v->n * sizeof(*each));
        for (uint32_t i = 0; i < v->n; i++)
            each[i] = bt_nf_meet(c, f, eval(c, v->items[i]));
        f = bt_nf_one(c, each, v->n, v);
    }
    return f;
}

static const struct bt_nf *schema_nf(struct bt_schema *c, const struct bt_sj *s)
{
    if (s->type == BT_SJ_TRUE || s->type == BT_SJ_FALSE)
        return s->type == BT_SJ_TRUE ? c->all : c->sets[BT_SET_NONE].nf;
    if (s->type != BT_SJ_OBJECT)
        bt_schema_fail(c, BT_ERR_INVALID, s, "a schema is an object, true or false");
    const struct bt_sj *v = bt_sj_get(s, "$ref");
    if (v && c->draft < 2019)
        return eval(c, bt_schema_deref(c, v, false));
    const struct bt_nf *f = typed(c, s);
    if (v)
        f = bt_nf_meet(c, f, eval(c, bt_schema_deref(c, v, false)));
    if ((v = bt_schema_key(c, s, "$dynamicRef")))
        f = bt_nf_meet(c, f, eval(c, bt_schema_deref(c, v, true)));
    if ((v = bt_schema_key(c, s, "$recursiveRef")) && c->recursive > 1)
        bt_schema_fail(c, BT_ERR_UNSUPPORTED, v,
                       "the meaning of $recursiveRef depends on the path to it; use $ref");
    if (v)
        f = bt_nf_meet(c, f, eval(c, bt_schema_deref(c, v, false)));
    if ((v = bt_schema_key(c, s, "const")))
        f = bt_nf_meet(c, f, bt_schema_eval(c, v->id << 2 | BT_LIT_CONST));
    if ((v = bt_sj_get(s, "enum"))) {
        if (v->type != BT_SJ_ARRAY)
            bt_schema_fail(c, BT_ERR_INVALID, v, "enum is a list of values");
        f = bt_nf_meet(c, f, values_nf(c, (const struct bt_sj *const *)v->items, v->n));
    }
    if ((v = list(c, s, "allOf")))
        for (uint32_t i = 0; i < v->n; i++)
            f = bt_nf_meet(c, f, eval(c, v->items[i]));
    if ((v = bt_sj_get(s, "not")))
        f = bt_nf_meet(c, f, bt_schema_eval(c, v->id << 2 | BT_LIT_NOT));
    f = dependencies(c, f, s);
    f = conditional(c, f, s);
    return alternatives(c, f, s);
}

const struct bt_nf *bt_schema_eval(struct bt_schema *c, bt_lit_t lit)
{
    struct bt_sj *v = c->values[lit >> 2];
    uint32_t which = lit & 3;
    if (v->memo[which])
        return v->memo[which];
    bool loop = v->busy >> which & 1;
    if ((loop || c->depth >= BT_SCHEMA_EVAL_MAX) && c->probes)
        bt_schema_throw(c, BT_AGAIN);
    if (loop)
        bt_schema_fail(c, BT_ERR_INVALID, v,
                       "this schema refers to itself without an array or object in between; break "
                       "the loop");
    if (c->depth >= BT_SCHEMA_EVAL_MAX)
        bt_schema_fail(c, BT_ERR_EXHAUSTED, v,
                       "more than %d schemas are nested for one value; use fewer levels",
                       BT_SCHEMA_EVAL_MAX);
    bt_schema_work(c, 2);
    c->depth++;
    c->busy = bt_schema_grow(c, c->busy, c->n_busy, &c->cap_busy, sizeof(*c->busy));
    c->busy[c->n_busy++] = lit;
    v->busy |= (uint8_t)(1u << which);
    const struct bt_nf *f;
    if (lit & BT_LIT_NOT)
        f = bt_nf_not(c, bt_schema_eval(c, lit ^ BT_LIT_NOT), v);
    else
        f = lit & BT_LIT_CONST ? const_nf(c, v) : schema_nf(c, v);
    v->busy &= (uint8_t) ~(1u << which);
    c->n_busy--;
    c->depth--;
    v->memo[which] = f;
    return f;
}
