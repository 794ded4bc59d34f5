/* Keywords that concern the members of objects and arrays. */
#include "common/grammar/schema_priv.h"

#include <string.h>

static const struct bt_sj *get(struct bt_schema *c, const struct bt_sj *s, const char *key,
                               enum bt_sj_type type, const char *what)
{
    const struct bt_sj *v = bt_sj_get(s, key);
    if (v && v->type != type)
        bt_schema_fail(c, BT_ERR_INVALID, v, "%s is %s", key, what);
    return v;
}

static bool has(const struct bt_sj *s, const char *key)
{
    return bt_sj_get(s, key) != NULL;
}

/* Adds the expressions of all patterns of `map` to *seen. */
static void patterns(struct bt_schema *c, struct bt_obj *o, const struct bt_sj *map, bt_rx_t *seen)
{
    for (uint32_t i = 0; map && i < map->n; i++)
        *seen = bt_rx_or(c->rx, *seen,
                         bt_schema_pattern(c, map->items[i], map->items[i]->key, &o->why));
}

/* Splits all keys into classes by the patterns of `map`. Keys that match no pattern get the
 * constraint `others`. */
static void divide_keys(struct bt_schema *c, struct bt_obj *o, const struct bt_sj *map,
                        bt_set_t others)
{
    struct bt_class *all = bt_schema_alloc(c, 2 * BT_SCHEMA_CLASSES * sizeof(*all));
    bool matched[2 * BT_SCHEMA_CLASSES] = {false};
    uint32_t n = 1;
    all[0] = (struct bt_class){c->str_all, BT_SET_TRUE};
    for (uint32_t i = 0; map && i < map->n; i++) {
        const struct bt_sj *m = map->items[i];
        bt_rx_t rx = bt_schema_pattern(c, m, m->key, &o->why), no = bt_rx_not(c->rx, rx);
        for (uint32_t k = 0, old = n; k < old; k++) {
            bt_rx_t with = bt_schema_rx(c, bt_rx_and(c->rx, all[k].key, rx));
            bt_schema_work(c, 20);
            if (bt_str_none(c, with))
                continue;
            bt_set_t value = bt_set_meet(c, all[k].value, bt_set_of(c, m));
            bt_rx_t without = bt_schema_rx(c, bt_rx_and(c->rx, all[k].key, no));
            if (bt_str_none(c, without)) {
                all[k].value = value;
                matched[k] = true;
                continue;
            }
            all[k].key = without;
            all[n] = (struct bt_class){with, value};
            matched[n++] = true;
            if (n > BT_SCHEMA_CLASSES)
                bt_schema_fail(c, BT_ERR_EXHAUSTED, map,
                               "these patterns overlap in more than %d ways; use fewer",
                               BT_SCHEMA_CLASSES);
        }
    }
    for (uint32_t k = 0; k < n; k++)
        if (!matched[k])
            all[k].value = bt_set_meet(c, all[k].value, others);
    bt_obj_classes(c, o, all, n);
}

/* Gives the constraint `schema` to all keys that have no name in o and match no pattern (seen). */
static void others(struct bt_schema *c, struct bt_obj *o, bt_rx_t seen, const struct bt_sj *schema)
{
    bt_set_t value = bt_set_of(c, schema);
    if (value == BT_SET_TRUE)
        return;
    if (seen == BT_RX_NONE && o->n_classes == 1)
        o->classes[0].value = bt_set_meet(c, o->classes[0].value, value);
    else
        bt_obj_split(c, o, bt_schema_rx(c, bt_rx_and(c->rx, c->str_all, bt_rx_not(c->rx, seen))),
                     value, false);
}

/* The properties that unevaluatedProperties leaves alone: those of s, and those of all schemas that
 * must hold together with s. */
struct evaluated {
    bt_rx_t seen;
    bool all;
    const struct bt_sj *unclear; /* an alternative that evaluates properties only where it holds */
    uint32_t depth;
};

static void gather(struct bt_schema *c, struct bt_obj *o, const struct bt_sj *s, bool top,
                   struct evaluated *e);

static bool evaluates(struct bt_schema *c, const struct bt_sj *s)
{
    struct bt_obj *o = bt_obj_new(c);
    struct evaluated e = {.seen = BT_RX_NONE};
    gather(c, o, s, false, &e);
    return e.all || e.unclear || o->n_props || e.seen != BT_RX_NONE;
}

static void gather(struct bt_schema *c, struct bt_obj *o, const struct bt_sj *s, bool top,
                   struct evaluated *e)
{
    if (s->type != BT_SJ_OBJECT)
        return;
    bt_schema_work(c, 50);
    if (++e->depth > 20) {
        e->unclear = s;
        return;
    }
    e->all |= has(s, "additionalProperties") || (!top && has(s, "unevaluatedProperties"));
    const struct bt_sj *v = get(c, s, "properties", BT_SJ_OBJECT, "an object of schemas");
    for (uint32_t i = 0; v && i < v->n; i++)
        bt_obj_prop(c, o, v->sorted[i]->key, BT_SET_TRUE, false);
    patterns(c, o, bt_sj_get(s, "patternProperties"), &e->seen);
    if ((v = bt_sj_get(s, "$ref")))
        gather(c, o, bt_schema_deref(c, v, false), false, e);
    if ((v = bt_sj_get(s, "$dynamicRef")))
        gather(c, o, bt_schema_deref(c, v, true), false, e);
    v = bt_sj_get(s, "allOf");
    for (uint32_t i = 0; v && i < v->n; i++)
        gather(c, o, v->items[i], false, e);
    static const char *const lists[] = {"anyOf", "oneOf", "dependentSchemas"};
    static const char *const ones[] = {"if", "then", "else"};
    for (int k = 0; k < 3; k++) {
        if ((v = bt_sj_get(s, ones[k])) && evaluates(c, v))
            e->unclear = v;
        v = bt_sj_get(s, lists[k]);
        for (uint32_t i = 0; v && i < v->n; i++)
            if (evaluates(c, v->items[i]))
                e->unclear = v;
    }
    e->depth--;
}

static void unevaluated(struct bt_schema *c, struct bt_obj *o, const struct bt_sj *s,
                        const struct bt_sj *schema)
{
    struct evaluated e = {.seen = BT_RX_NONE};
    struct bt_obj *names = bt_obj_new(c);
    if (bt_set_of(c, schema) == BT_SET_TRUE)
        return;
    gather(c, names, s, true, &e);
    if (e.all)
        return;
    if (e.unclear) {
        o->why = bt_schema_why(c, schema,
                               "unevaluatedProperties depends on which alternative of anyOf, oneOf "
                               "or if holds; use additionalProperties in each alternative");
        return;
    }
    for (uint32_t i = 0; i < names->n_props; i++)
        bt_obj_prop(c, o, names->props[i].name, BT_SET_TRUE, false);
    others(c, o, e.seen, schema);
}

struct bt_obj *bt_schema_object(struct bt_schema *c, const struct bt_sj *s)
{
    struct bt_obj *o = bt_obj_new(c);
    const struct bt_sj *v;
    /* patternProperties constrain named properties, too; only the remaining keys get the additional
     * schema. */
    const struct bt_sj *map = get(c, s, "patternProperties", BT_SJ_OBJECT, "an object of schemas");
    const struct bt_sj *more = bt_sj_get(s, "additionalProperties");
    if (map && map->n)
        divide_keys(c, o, map, BT_SET_TRUE);
    v = get(c, s, "properties", BT_SJ_OBJECT, "an object of schemas");
    for (uint32_t i = 0; v && i < v->n; i++)
        bt_obj_prop(c, o, v->sorted[i]->key, bt_set_of(c, v->sorted[i]), false);
    if (more && bt_set_of(c, more) != BT_SET_TRUE)
        divide_keys(c, o, map, bt_set_of(c, more));
    if ((v = bt_schema_key(c, s, "unevaluatedProperties")))
        unevaluated(c, o, s, v);
    v = bt_sj_get(s, "required");
    if (v && v->type != BT_SJ_ARRAY)
        bt_schema_fail(c, BT_ERR_INVALID, v, "required is a list of names");
    for (uint32_t i = 0; v && i < v->n; i++) {
        if (v->items[i]->type != BT_SJ_STRING)
            bt_schema_fail(c, BT_ERR_INVALID, v->items[i], "required is a list of names");
        bt_obj_prop(c, o, v->items[i]->text, BT_SET_TRUE, true);
    }
    if ((v = bt_schema_key(c, s, "propertyNames")) && bt_set_of(c, v) != BT_SET_TRUE) {
        const struct bt_nf *f = bt_schema_eval(c, v->id << 2);
        o->why = o->why ? o->why : f->why_str;
        bt_rx_t good = bt_strset_to_rx(c, f->str);
        bt_rx_t bad = bt_rx_and(c->rx, c->str_all, bt_rx_not(c->rx, good));
        if (good != c->str_all)
            bt_obj_split(c, o, bt_schema_rx(c, bad), BT_SET_NONE, true);
    }
    o->min = bt_schema_count(c, bt_sj_get(s, "minProperties"), 0);
    o->max = bt_schema_count(c, bt_sj_get(s, "maxProperties"), BT_RX_NO_MAX);
    return o;
}

static void unevaluated_items(struct bt_schema *c, struct bt_arr *a, const struct bt_sj *s,
                              const struct bt_sj *v)
{
    static const char *const others_of[] = {"$ref",  "$dynamicRef", "allOf",    "anyOf",
                                            "oneOf", "if",          "contains", "not"};
    const struct bt_sj *items = bt_sj_get(s, "items");
    bool tuple = items && items->type == BT_SJ_ARRAY;
    if (bt_set_of(c, v) == BT_SET_TRUE || (items && !tuple) || (tuple && has(s, "additionalItems")))
        return;
    for (size_t i = 0; i < sizeof(others_of) / sizeof(others_of[0]); i++)
        if (has(s, others_of[i])) {
            a->why = bt_schema_why(c, v,
                                   "unevaluatedItems beside other schemas cannot be enforced; "
                                   "use items");
            return;
        }
    a->rest = bt_set_of(c, v);
}

static void contains(struct bt_schema *c, struct bt_arr *a, const struct bt_sj *s,
                     const struct bt_sj *v)
{
    uint32_t min = 1, max = BT_RX_NO_MAX;
    if (c->draft >= 2019) {
        min = bt_schema_count(c, bt_sj_get(s, "minContains"), 1);
        max = bt_schema_count(c, bt_sj_get(s, "maxContains"), BT_RX_NO_MAX);
    }
    if (max == 0 && min == 0) { /* no item may fulfil the schema */
        bt_set_t no = bt_set_lit(c, v->id << 2 | BT_LIT_NOT);
        for (uint32_t i = 0; i < a->n_prefix; i++)
            a->prefix[i] = bt_set_meet(c, a->prefix[i], no);
        a->rest = bt_set_meet(c, a->rest, no);
        return;
    }
    if (min == 0 && max == BT_RX_NO_MAX)
        return;
    const struct bt_why *why =
        bt_schema_why(c, v,
                      "contains together with prefixItems, a second contains or counts above 16 "
                      "cannot be enforced; use items");
    a->has = bt_schema_alloc(c, sizeof(*a->has));
    a->has[0] = (struct bt_has){bt_set_of(c, v), why};
    a->n_has = 1;
    if (min > max)
        a->max = 0;
    else if (min != 1 || max != BT_RX_NO_MAX)
        a->why = bt_schema_why(c, v,
                               "minContains other than 1 and maxContains cannot be enforced; "
                               "use items, minItems and maxItems");
}

struct bt_arr *bt_schema_array(struct bt_schema *c, const struct bt_sj *s)
{
    struct bt_arr *a = bt_arr_new(c);
    const struct bt_sj *items = bt_sj_get(s, "items"), *v;
    const struct bt_sj *prefix = bt_schema_key(c, s, "prefixItems");
    if (items && items->type == BT_SJ_ARRAY) {
        prefix = items;
        items = bt_sj_get(s, "additionalItems");
    }
    if (prefix && prefix->type != BT_SJ_ARRAY)
        bt_schema_fail(c, BT_ERR_INVALID, prefix, "prefixItems is a list of schemas");
    if (prefix) {
        a->n_prefix = prefix->n;
        a->prefix = bt_schema_alloc(c, (prefix->n + 1) * sizeof(*a->prefix));
        for (uint32_t i = 0; i < prefix->n; i++)
            a->prefix[i] = bt_set_of(c, prefix->items[i]);
    }
    if (items)
        a->rest = bt_set_of(c, items);
    a->min = bt_schema_count(c, bt_sj_get(s, "minItems"), 0);
    a->max = bt_schema_count(c, bt_sj_get(s, "maxItems"), BT_RX_NO_MAX);
    if ((v = bt_schema_key(c, s, "unevaluatedItems")))
        unevaluated_items(c, a, s, v);
    if ((v = bt_schema_key(c, s, "contains")))
        contains(c, a, s, v);
    v = bt_sj_get(s, "uniqueItems");
    if (v && v->type != BT_SJ_TRUE && v->type != BT_SJ_FALSE)
        bt_schema_fail(c, BT_ERR_INVALID, v, "uniqueItems is true or false");
    if (v && v->type == BT_SJ_TRUE)
        a->unique = bt_schema_why(c, v,
                                  "the opposite of uniqueItems cannot be enforced; write out what "
                                  "is allowed");
    return a;
}
