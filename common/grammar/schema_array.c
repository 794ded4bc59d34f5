/* Shapes of arrays: what each position may contain. */
#include "common/grammar/schema_priv.h"

#include <string.h>

struct bt_arr *bt_arr_new(struct bt_schema *c)
{
    struct bt_arr *a = bt_schema_alloc(c, sizeof(*a));
    a->rest = BT_SET_TRUE;
    a->max = BT_RX_NO_MAX;
    return a;
}

bool bt_arr_is_all(const struct bt_arr *a)
{
    return !a->n_prefix && !a->n_has && !a->unique && !a->why && a->rest == BT_SET_TRUE &&
           a->min == 0 && a->max == BT_RX_NO_MAX;
}

static bt_set_t item(const struct bt_arr *a, uint32_t i)
{
    return i < a->n_prefix ? a->prefix[i] : a->rest;
}

bool bt_arr_settle(struct bt_schema *c, struct bt_arr *a)
{
    if (a->n_has && a->min == 0)
        a->min = 1;
    for (uint32_t i = 0; i < a->n_prefix && i < a->max; i++)
        if (a->prefix[i] == BT_SET_NONE || (i < a->min && bt_set_none(c, a->prefix[i])))
            a->max = i;
    if (a->max > a->n_prefix &&
        (a->rest == BT_SET_NONE || (a->min > a->n_prefix && bt_set_none(c, a->rest))))
        a->max = a->n_prefix;
    if (a->max < a->n_prefix)
        a->n_prefix = a->max;
    return a->min <= a->max;
}

const struct bt_arr *bt_arr_meet(struct bt_schema *c, const struct bt_arr *a,
                                 const struct bt_arr *b)
{
    if (bt_arr_is_all(a) || bt_arr_is_all(b))
        return bt_arr_is_all(a) ? b : a;
    struct bt_arr *r = bt_schema_alloc(c, sizeof(*r));
    r->n_prefix = a->n_prefix > b->n_prefix ? a->n_prefix : b->n_prefix;
    r->min = a->min > b->min ? a->min : b->min;
    r->max = a->max < b->max ? a->max : b->max;
    r->unique = a->unique ? a->unique : b->unique;
    r->why = a->why ? a->why : b->why;
    r->rest = bt_set_meet(c, a->rest, b->rest);
    bt_schema_work(c, 1 + r->n_prefix / 4);
    r->prefix = bt_schema_alloc(c, (r->n_prefix + 1) * sizeof(*r->prefix));
    for (uint32_t i = 0; i < r->n_prefix; i++)
        r->prefix[i] = bt_set_meet(c, item(a, i), item(b, i));
    r->n_has = a->n_has + b->n_has;
    r->has = bt_schema_alloc(c, (r->n_has + 1) * sizeof(*r->has));
    if (a->n_has)
        memcpy(r->has, a->has, a->n_has * sizeof(*r->has));
    if (b->n_has)
        memcpy(r->has + a->n_has, b->has, b->n_has * sizeof(*r->has));
    return bt_arr_settle(c, r) ? r : NULL;
}

struct list {
    const struct bt_arr **a;
    uint32_t n, cap;
};

static struct bt_arr *push(struct bt_schema *c, struct list *l)
{
    struct bt_arr *a = bt_arr_new(c);
    l->a = bt_schema_grow(c, l->a, l->n, &l->cap, sizeof(*l->a));
    l->a[l->n++] = a;
    return a;
}

/* The negations of a set's constraints, one by one. The negation of NONE is TRUE. */
static uint32_t opposites(struct bt_schema *c, bt_set_t set, bt_set_t *out, uint32_t cap)
{
    uint32_t n = 0;
    if (set == BT_SET_NONE) {
        out[n++] = BT_SET_TRUE;
        return n;
    }
    if (c->sets[set].n > cap)
        bt_schema_fail(c, BT_ERR_EXHAUSTED, NULL, "a negated array combines more than %u schemas",
                       cap);
    for (uint32_t k = 0; k < c->sets[set].n; k++) {
        bt_set_t no = bt_set_lit(c, c->sets[set].lits[k] ^ BT_LIT_NOT);
        if (!bt_set_none(c, no))
            out[n++] = no;
    }
    return n;
}

uint32_t bt_arr_not(struct bt_schema *c, const struct bt_arr *a, const struct bt_sj *at,
                    const struct bt_arr ***out_p)
{
    struct list l = {0};
    bt_set_t no[32];
    if (a->why || a->unique || a->n_has > 1) {
        push(c, &l)->why = a->why      ? a->why
                           : a->unique ? a->unique
                                       : bt_schema_why(c, at, "several contains cannot be negated");
        *out_p = l.a;
        return l.n;
    }
    for (uint32_t i = 0; i < a->n_prefix; i++) {
        uint32_t n = opposites(c, a->prefix[i], no, 32);
        for (uint32_t k = 0; k < n; k++) {
            struct bt_arr *r = push(c, &l);
            r->n_prefix = r->min = i + 1;
            r->prefix = bt_schema_alloc(c, (i + 1) * sizeof(*r->prefix));
            r->prefix[i] = no[k];
        }
        bt_schema_work(c, 1 + i);
    }
    if (a->rest != BT_SET_TRUE) {
        uint32_t n = opposites(c, a->rest, no, 32);
        for (uint32_t k = 0; k < n; k++) {
            struct bt_arr *r = push(c, &l);
            const struct bt_why *why = bt_schema_why(
                c, at,
                "an item after the first ones that must not fulfil a schema cannot be "
                "enforced; write out what is allowed");
            if (no[k] == BT_SET_TRUE) {
                r->min = a->n_prefix + 1;
            } else if (a->n_prefix) {
                r->why = why;
            } else {
                r->has = bt_schema_alloc(c, sizeof(*r->has));
                r->has[0] = (struct bt_has){no[k], why};
                r->n_has = r->min = 1;
            }
        }
    }
    if (a->n_has) { /* no item fulfils what `contains` requires */
        bt_set_t set = a->has[0].item;
        if (c->sets[set].n == 1)
            push(c, &l)->rest = bt_set_lit(c, c->sets[set].lits[0] ^ BT_LIT_NOT);
        else
            push(c, &l)->why = a->has[0].why;
    }
    if (a->min > (a->n_has ? 1u : 0u))
        push(c, &l)->max = a->min - 1;
    if (a->max != BT_RX_NO_MAX)
        push(c, &l)->min = a->max + 1;
    *out_p = l.a;
    return l.n;
}
