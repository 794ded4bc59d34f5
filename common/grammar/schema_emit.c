/* Builds the program from normal forms. Each set of constraints that some value can fulfil becomes
 * a rule. */
#include "common/grammar/schema_priv.h"

#include <string.h>

#define HAS_COUNT_MAX 16 /* limit of minItems and maxItems together with contains */

static bt_node_t ok(struct bt_schema *c, bt_node_t n)
{
    if (n == BT_NODE_FAILED)
        bt_schema_fail(c, BT_ERR_EXHAUSTED, NULL,
                       "the grammar of the schema is too large; make it smaller");
    return n;
}

static _Noreturn void refuse(struct bt_schema *c, const struct bt_why *why)
{
    bt_schema_fail(c, BT_ERR_UNSUPPORTED, why->at, "%s", why->text);
}

static bt_node_t seq(struct bt_schema *c, const bt_node_t *n, size_t count)
{
    return ok(c, bt_program_seq(c->p, n, count));
}

static bt_node_t alt(struct bt_schema *c, bt_node_t a, bt_node_t b)
{
    return ok(c, bt_program_alt(c->p, (bt_node_t[]){a, b}, 2));
}

static bt_node_t regex3(struct bt_schema *c, bt_rx_t before, const char *text, bt_rx_t after)
{
    bt_rx_t rx = bt_rx_concat(c->rx, bt_rx_text(c->rx, text, 1), after);
    return ok(c, bt_program_regex(c->p, bt_schema_rx(c, bt_rx_concat(c->rx, before, rx))));
}

static bt_node_t comma(struct bt_schema *c)
{
    return regex3(c, c->kept.blank, ",", c->kept.space);
}

static bt_rx_t quoted(struct bt_schema *c, bt_rx_t str)
{
    bt_rx_t quote = bt_rx_text(c->rx, "\"", 1);
    return bt_schema_rx(c, bt_rx_concat(c->rx, quote, bt_rx_concat(c->rx, str, quote)));
}

/* Null, booleans, numbers and strings as one expression. */
static bt_rx_t scalars(struct bt_schema *c, const struct bt_nf *f)
{
    bt_rx_t r = BT_RX_NONE;
    static const char *const words[] = {"null", "false", "true"};
    for (int i = 0; i < 3; i++)
        if (f->bits >> i & 1)
            r = bt_rx_or(c->rx, r, bt_rx_text(c->rx, words[i], strlen(words[i])));
    if (f->num.n) {
        if (f->why_num)
            refuse(c, f->why_num);
        r = bt_rx_or(c->rx, r, bt_num_rx(c, f->num));
    }
    if (!bt_strset_none(f->str)) {
        if (f->why_str)
            refuse(c, f->why_str);
        r = bt_rx_or(c->rx, r, quoted(c, bt_strset_to_rx(c, f->str)));
    }
    return bt_schema_rx(c, r);
}

static bt_node_t node_of(struct bt_schema *c, bt_set_t set)
{
    if (c->sets[set].node != BT_NODE_FAILED)
        return c->sets[set].node;
    const struct bt_nf *f = bt_set_nf(c, set);
    bt_node_t n;
    if (f->n_arr || f->n_obj) {
        n = ok(c, bt_program_rule(c->p));
        c->todo = bt_schema_grow(c, c->todo, c->n_todo, &c->cap_todo, sizeof(*c->todo));
        c->todo[c->n_todo++] = set;
    } else {
        bt_rx_t rx = scalars(c, f);
        n = rx == BT_RX_NONE || bt_str_none(c, rx) ? BT_NODE_NONE
                                                   : ok(c, bt_program_regex(c->p, rx));
    }
    c->sets[set].node = n;
    return n;
}

/* ---- arrays ---- */
static uint32_t less(uint32_t a, uint32_t b)
{
    return a == BT_RX_NO_MAX ? a : a > b ? a - b : 0;
}

/* One item of the array. */
static bt_node_t item_of(struct bt_schema *c, const struct bt_arr *a, bt_set_t set)
{
    bt_node_t n = node_of(c, set);
    return a->unique && a->max > 1 ? ok(c, bt_program_item(c->p, n)) : n;
}

/* All items of the array, with commas. */
static bt_node_t items(struct bt_schema *c, const struct bt_arr *a)
{
    return ok(c, bt_program_repeat_sep(c->p, item_of(c, a, a->rest), comma(c), a->min, a->max));
}

/* From min to max more items, with a comma before each. */
static bt_node_t more_items(struct bt_schema *c, const struct bt_arr *a, uint32_t min, uint32_t max)
{
    if (max == 0)
        return BT_NODE_EMPTY;
    bt_node_t parts[2] = {comma(c), item_of(c, a, a->rest)};
    if (parts[1] == BT_NODE_NONE)
        return min ? BT_NODE_NONE : BT_NODE_EMPTY;
    return ok(c, bt_program_repeat(c->p, seq(c, parts, 2), min, max));
}

/* All items of an array in which at least one item fulfils has[0]. `bound` is the last position of
 * the first such item. */
static bt_node_t some_item(struct bt_schema *c, const struct bt_arr *a)
{
    const struct bt_why *why = a->has[0].why;
    uint32_t bound = a->max == BT_RX_NO_MAX ? (a->min ? a->min - 1 : 0) : a->max - 1;
    if (a->n_has > 1 || a->n_prefix || bound > HAS_COUNT_MAX)
        refuse(c, why);
    bt_set_t set = bt_set_meet(c, a->rest, a->has[0].item);
    bt_node_t all = BT_NODE_NONE, it = item_of(c, a, set);
    bt_node_t other = seq(c, (bt_node_t[]){item_of(c, a, a->rest), comma(c)}, 2);
    for (uint32_t i = 0; i <= bound; i++) { /* i items come before it; for the last i, i or more */
        bool last = i == bound && a->max == BT_RX_NO_MAX;
        bt_node_t parts[3];
        parts[0] = ok(c, bt_program_repeat(c->p, other, i, last ? BT_RX_NO_MAX : i));
        parts[1] = it;
        parts[2] = more_items(c, a, less(a->min, i + 1), less(a->max, i + 1));
        all = alt(c, all, seq(c, parts, 3));
    }
    return all;
}

static bt_node_t array(struct bt_schema *c, const struct bt_arr *a)
{
    bt_node_t open = regex3(c, BT_RX_EMPTY, "[", c->kept.space), body;
    bt_node_t close = regex3(c, c->kept.space, "]", BT_RX_EMPTY);
    if (a->why)
        refuse(c, a->why);
    if (a->unique && a->max > 1 && !a->n_prefix && !a->n_has) {
        const struct bt_nf *f = bt_set_nf(c, a->rest);
        if (!f->n_arr && !f->n_obj && !bt_schema_has_values(c, f, a->min))
            return BT_NODE_NONE;
    }
    if (a->max == 0) {
        body = BT_NODE_EMPTY;
    } else if (a->n_has) {
        body = some_item(c, a);
    } else if (!a->n_prefix) {
        body = items(c, a);
    } else {
        bt_node_t tail = more_items(c, a, less(a->min, a->n_prefix), less(a->max, a->n_prefix));
        for (uint32_t i = a->n_prefix; i-- > 0;) {
            bt_node_t parts[3] = {i ? comma(c) : BT_NODE_EMPTY, item_of(c, a, a->prefix[i]), tail};
            tail = seq(c, parts, 3);
            if (i >= a->min)
                tail = alt(c, BT_NODE_EMPTY, tail);
        }
        body = tail;
    }
    bt_node_t all = seq(c, (bt_node_t[]){open, body, close}, 3);
    if (!a->unique || a->max < 2)
        return all;
    char where[256];
    bt_sj_pointer(a->unique->at, where, sizeof(where));
    return ok(c, bt_program_distinct(c->p, all, a->min, where));
}

/* ---- objects ---- */
static bt_node_t object(struct bt_schema *c, const struct bt_obj *o)
{
    if (o->why)
        refuse(c, o->why);
    if (o->min && !(o = bt_schema_name_classes(c, o)))
        return BT_NODE_NONE;
    struct bt_program_property *props = bt_schema_alloc(c, (o->n_props + 1) * sizeof(*props));
    struct bt_program_pattern *keys = bt_schema_alloc(c, (o->n_classes + 1) * sizeof(*keys));
    struct bt_trie_text *names = bt_schema_alloc(c, (o->n_props + 1) * sizeof(*names));
    struct bt_program_object out = {.props = props,
                                    .n_props = o->n_props,
                                    .patterns = keys,
                                    .min = o->min,
                                    .max = o->max,
                                    .space = c->kept.space,
                                    .blank = c->kept.blank};
    for (uint32_t i = 0; i < o->n_props; i++) {
        const struct bt_prop *p = &o->props[i];
        props[i] =
            (struct bt_program_property){p->name.s, p->name.n, node_of(c, p->value), p->required};
        if (p->required && props[i].value == BT_NODE_NONE)
            return BT_NODE_NONE;
        names[i] = (struct bt_trie_text){p->name, BT_RX_EMPTY};
    }
    bt_rx_t named = BT_RX_FAILED;
    for (uint32_t i = 0; i < o->n_classes; i++) {
        bt_node_t value = node_of(c, o->classes[i].value);
        if (value == BT_NODE_NONE)
            continue;
        bt_rx_t key = o->classes[i].key;
        if (o->n_props) {
            if (named == BT_RX_FAILED)
                named = bt_rx_not(c->rx, bt_str_trie(c, names, o->n_props, true));
            key = bt_schema_rx(c, bt_rx_and(c->rx, key, named));
        }
        keys[out.n_patterns++] = (struct bt_program_pattern){key, value};
    }
    return ok(c, bt_program_object(c->p, &out));
}

static bt_node_t body(struct bt_schema *c, const struct bt_nf *f)
{
    bt_rx_t rx = scalars(c, f);
    bt_node_t *parts = NULL;
    uint32_t n = 0, cap = 0;
    if (rx != BT_RX_NONE) {
        parts = bt_schema_grow(c, parts, n, &cap, sizeof(*parts));
        parts[n++] = ok(c, bt_program_regex(c->p, rx));
    }
    for (uint32_t i = 0; i < f->n_arr; i++) {
        parts = bt_schema_grow(c, parts, n, &cap, sizeof(*parts));
        parts[n++] = array(c, f->arr[i]);
    }
    for (uint32_t i = 0; i < f->n_obj; i++) {
        const struct bt_obj **o;
        uint32_t count = bt_obj_resolve(c, f->obj[i], &o);
        for (uint32_t j = 0; j < count; j++) {
            bt_schema_work(c, 1 + o[j]->n_props);
            parts = bt_schema_grow(c, parts, n, &cap, sizeof(*parts));
            parts[n++] = object(c, o[j]);
        }
    }
    return ok(c, bt_program_alt(c->p, parts, n));
}

bt_node_t bt_schema_emit(struct bt_schema *c, bt_set_t start)
{
    bt_node_t node = node_of(c, start);
    while (c->n_todo) {
        bt_set_t set = c->todo[--c->n_todo];
        bt_node_t b = body(c, c->sets[set].nf);
        bt_program_rule_set(c->p, c->sets[set].node, b);
    }
    return node;
}
