/* Shapes of objects: what the value of each key may be. Named properties come first. Classes divide
 * the other keys, so that each key belongs to one property or one class. */
#include "common/grammar/schema_priv.h"

#include <string.h>

struct bt_obj *bt_obj_new(struct bt_schema *c)
{
    struct bt_obj *o = bt_schema_alloc(c, sizeof(*o));
    o->classes = bt_schema_alloc(c, sizeof(*o->classes));
    o->classes[0] = (struct bt_class){c->str_all, BT_SET_TRUE};
    o->n_classes = 1;
    o->max = BT_RX_NO_MAX;
    return o;
}

struct bt_obj *bt_obj_copy(struct bt_schema *c, const struct bt_obj *o)
{
    struct bt_obj *n = bt_schema_alloc(c, sizeof(*n));
    *n = *o;
    n->cap_props = o->n_props + 1;
    bt_schema_work(c, 1 + o->n_props / 8);
    n->props = bt_schema_alloc(c, (o->n_props + 1) * sizeof(*n->props));
    if (o->n_props)
        memcpy(n->props, o->props, o->n_props * sizeof(*n->props));
    return n;
}

bool bt_obj_is_all(const struct bt_obj *o)
{
    return !o->n_props && !o->n_some && !o->why && o->n_classes == 1 &&
           o->classes[0].value == BT_SET_TRUE && o->min == 0 && o->max == BT_RX_NO_MAX;
}

/* The first property whose name is not smaller than name. */
static uint32_t position(const struct bt_obj *o, struct bt_sj_text name)
{
    uint32_t lo = 0, hi = o->n_props;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (bt_sj_text_cmp(o->props[mid].name, name) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bt_set_t class_value(struct bt_schema *c, const struct bt_obj *o, struct bt_sj_text name)
{
    for (uint32_t i = 0; i + 1 < o->n_classes; i++)
        if (bt_str_match(c, o->classes[i].key, name))
            return o->classes[i].value;
    return o->classes[o->n_classes - 1].value;
}

void bt_obj_prop(struct bt_schema *c, struct bt_obj *o, struct bt_sj_text name, bt_set_t value,
                 bool required)
{
    uint32_t at = position(o, name);
    if (at < o->n_props && bt_sj_text_cmp(o->props[at].name, name) == 0) {
        o->props[at].value = bt_set_meet(c, o->props[at].value, value);
        o->props[at].required |= required;
        return;
    }
    value = bt_set_meet(c, value, class_value(c, o, name));
    o->props = bt_schema_grow(c, o->props, o->n_props, &o->cap_props, sizeof(*o->props));
    memmove(o->props + at + 1, o->props + at, (o->n_props - at) * sizeof(*o->props));
    o->props[at] = (struct bt_prop){name, value, required};
    o->n_props++;
}

static void join_class(struct bt_schema *c, struct bt_class *to, uint32_t *n, bt_rx_t key,
                       bt_set_t value)
{
    for (uint32_t i = 0; i < *n; i++)
        if (to[i].value == value) {
            to[i].key = bt_schema_rx(c, bt_rx_or(c->rx, to[i].key, key));
            return;
        }
    if (*n == BT_SCHEMA_CLASSES)
        bt_schema_fail(c, BT_ERR_EXHAUSTED, NULL,
                       "the patterns of properties overlap in more than 64 ways; use fewer");
    to[(*n)++] = (struct bt_class){key, value};
}

static void add_class(struct bt_schema *c, struct bt_class *to, uint32_t *n, bt_rx_t key,
                      bt_set_t value)
{
    if (!bt_str_none(c, key))
        join_class(c, to, n, key, value);
}

void bt_obj_classes(struct bt_schema *c, struct bt_obj *o, const struct bt_class *k, uint32_t n)
{
    o->classes = bt_schema_alloc(c, n * sizeof(*o->classes));
    o->n_classes = 0;
    for (uint32_t i = 0; i < n; i++)
        join_class(c, o->classes, &o->n_classes, k[i].key, k[i].value);
}

void bt_obj_split(struct bt_schema *c, struct bt_obj *o, bt_rx_t rx, bt_set_t value, bool named)
{
    struct bt_class *to = bt_schema_alloc(c, (BT_SCHEMA_CLASSES + 1) * sizeof(*to));
    uint32_t n = 0;
    for (uint32_t i = 0; i < o->n_classes; i++) {
        const struct bt_class *k = &o->classes[i];
        bt_schema_work(c, 20);
        bt_rx_t with = bt_schema_rx(c, bt_rx_and(c->rx, k->key, rx));
        bt_rx_t without = bt_schema_rx(c, bt_rx_and(c->rx, k->key, bt_rx_not(c->rx, rx)));
        add_class(c, to, &n, without, k->value);
        add_class(c, to, &n, with, bt_set_meet(c, k->value, value));
    }
    o->classes = to;
    o->n_classes = n;
    for (uint32_t i = 0; named && i < o->n_props; i++)
        if (bt_str_match(c, rx, o->props[i].name))
            o->props[i].value = bt_set_meet(c, o->props[i].value, value);
}

bool bt_obj_fails(const struct bt_obj *o)
{
    uint32_t required = 0, possible = 0;
    bool closed = true;
    for (uint32_t i = 0; i < o->n_props; i++) {
        required += o->props[i].required;
        possible += o->props[i].value != BT_SET_NONE;
        if (o->props[i].required && o->props[i].value == BT_SET_NONE)
            return true;
    }
    for (uint32_t i = 0; i < o->n_classes; i++)
        closed &= o->classes[i].value == BT_SET_NONE;
    return o->min > o->max || required > o->max || (closed && possible < o->min);
}

/* Writes the properties of both objects to c->props. Returns their number; UINT32_MAX: no value
 * fulfils a required one. bt_set_none may call this function again, so the calls of bt_set_none
 * come last. */
static uint32_t meet_props(struct bt_schema *c, const struct bt_obj *a, const struct bt_obj *b)
{
    uint32_t n = 0, n_changed = 0;
    if (a->n_props + b->n_props > c->cap_props) {
        c->cap_props = 2 * (a->n_props + b->n_props);
        c->props = bt_schema_alloc(c, c->cap_props * sizeof(*c->props));
    }
    bt_set_t few[8], *changed = few; /* required values that both objects constrain */
    if (a->n_props + b->n_props > 8)
        changed = bt_schema_alloc(c, (a->n_props + b->n_props) * sizeof(*changed));
    for (uint32_t i = 0, j = 0; i < a->n_props || j < b->n_props;) {
        int d = i == a->n_props   ? 1
                : j == b->n_props ? -1
                                  : bt_sj_text_cmp(a->props[i].name, b->props[j].name);
        struct bt_prop p = d <= 0 ? a->props[i] : b->props[j];
        bt_set_t other = d == 0  ? b->props[j].value
                         : d < 0 ? class_value(c, b, p.name)
                                 : class_value(c, a, p.name);
        bt_set_t value = bt_set_meet(c, p.value, other);
        p.required |= d == 0 && b->props[j].required;
        if (p.required && value == BT_SET_NONE)
            return UINT32_MAX;
        if (p.required && value != p.value)
            changed[n_changed++] = value;
        p.value = value;
        c->props[n++] = p;
        i += d <= 0;
        j += d >= 0;
    }
    struct bt_prop *mine = c->props;
    uint32_t cap = c->cap_props;
    bool none = false;
    if (n_changed) { /* a nested call must not overwrite c->props */
        c->props = NULL;
        c->cap_props = 0;
        for (uint32_t i = 0; i < n_changed && !none; i++)
            none = bt_set_none(c, changed[i]);
        c->props = mine;
        c->cap_props = cap;
    }
    return none ? UINT32_MAX : n;
}

/* Called before the intersection is computed. Otherwise hundreds of alternatives would make a set
 * for each pair. */
bool bt_obj_apart(struct bt_schema *c, const struct bt_obj *a, const struct bt_obj *b,
                  uint32_t depth)
{
    for (uint32_t i = 0, j = 0; i < a->n_props && j < b->n_props;) {
        const struct bt_prop *p = &a->props[i], *q = &b->props[j];
        int d = bt_sj_text_cmp(p->name, q->name);
        if (d == 0 && (p->required || q->required) && bt_set_apart(c, p->value, q->value, depth))
            return true;
        i += d <= 0;
        j += d >= 0;
    }
    return false;
}

const struct bt_obj *bt_obj_meet(struct bt_schema *c, const struct bt_obj *a,
                                 const struct bt_obj *b)
{
    if (bt_obj_is_all(a) || bt_obj_is_all(b))
        return bt_obj_is_all(a) ? b : a;
    bt_schema_work(c, 1 + (a->n_props + b->n_props) / 4);
    uint32_t n_props = bt_obj_apart(c, a, b, 0) ? UINT32_MAX : meet_props(c, a, b);
    if (n_props == UINT32_MAX)
        return NULL;
    struct bt_obj *o = bt_schema_alloc(c, sizeof(*o));
    o->n_props = o->cap_props = n_props;
    o->props = bt_schema_alloc(c, n_props * sizeof(*o->props));
    if (n_props)
        memcpy(o->props, c->props, n_props * sizeof(*o->props));
    if (b->n_classes == 1 && a->n_classes == 1) {
        o->classes = bt_schema_alloc(c, sizeof(*o->classes));
        o->classes[0].key = c->str_all;
        o->classes[0].value = bt_set_meet(c, a->classes[0].value, b->classes[0].value);
        o->n_classes = 1;
    } else {
        o->classes = bt_schema_alloc(c, (BT_SCHEMA_CLASSES + 1) * sizeof(*o->classes));
        for (uint32_t i = 0; i < a->n_classes; i++)
            for (uint32_t j = 0; j < b->n_classes; j++) {
                bt_schema_work(c, 20);
                add_class(c, o->classes, &o->n_classes,
                          bt_schema_rx(c, bt_rx_and(c->rx, a->classes[i].key, b->classes[j].key)),
                          bt_set_meet(c, a->classes[i].value, b->classes[j].value));
            }
    }
    o->min = a->min > b->min ? a->min : b->min;
    o->max = a->max < b->max ? a->max : b->max;
    o->why = a->why ? a->why : b->why;
    o->n_some = a->n_some + b->n_some;
    o->some = bt_schema_alloc(c, (o->n_some + 1) * sizeof(*o->some));
    if (a->n_some)
        memcpy(o->some, a->some, a->n_some * sizeof(*o->some));
    if (b->n_some)
        memcpy(o->some + a->n_some, b->some, b->n_some * sizeof(*o->some));
    return bt_obj_fails(o) ? NULL : o;
}

struct list {
    const struct bt_obj **o;
    uint32_t n, cap;
};

static void push(struct bt_schema *c, struct list *l, const struct bt_obj *o)
{
    l->o = bt_schema_grow(c, l->o, l->n, &l->cap, sizeof(*l->o));
    l->o[l->n++] = o;
}

static struct bt_obj *with_prop(struct bt_schema *c, struct bt_sj_text name, bt_set_t value,
                                bool required)
{
    struct bt_obj *o = bt_obj_new(c);
    bt_obj_prop(c, o, name, value, required);
    return o;
}

uint32_t bt_obj_not(struct bt_schema *c, const struct bt_obj *o, const struct bt_sj *at,
                    const struct bt_obj ***out_p)
{
    struct list l = {0};
    if (o->why || o->n_some) {
        struct bt_obj *any = bt_obj_new(c);
        any->why = o->why ? o->why
                          : bt_schema_why(c, at,
                                          "nested alternatives of objects cannot be "
                                          "negated; write out what is allowed");
        push(c, &l, any);
        *out_p = l.o;
        return l.n;
    }
    for (uint32_t i = 0; i < o->n_props; i++) {
        const struct bt_prop *p = &o->props[i];
        bt_schema_work(c, 2);
        if (p->required)
            push(c, &l, with_prop(c, p->name, BT_SET_NONE, false));
        if (p->value == BT_SET_NONE)
            push(c, &l, with_prop(c, p->name, BT_SET_TRUE, true));
        for (uint32_t k = 0; p->value != BT_SET_NONE && k < c->sets[p->value].n; k++) {
            bt_set_t no = bt_set_lit(c, c->sets[p->value].lits[k] ^ BT_LIT_NOT);
            if (!bt_set_none(c, no))
                push(c, &l, with_prop(c, p->name, no, true));
        }
    }
    bt_rx_t named = BT_RX_FAILED;
    for (uint32_t i = 0; i < o->n_classes; i++) {
        const struct bt_class *k = &o->classes[i];
        if (k->value == BT_SET_TRUE)
            continue;
        if (named == BT_RX_FAILED) {
            struct bt_trie_text *t = bt_schema_alloc(c, (o->n_props + 1) * sizeof(*t));
            for (uint32_t j = 0; j < o->n_props; j++)
                t[j] = (struct bt_trie_text){o->props[j].name, BT_RX_EMPTY};
            named = bt_str_trie(c, t, o->n_props, true);
        }
        bt_rx_t keys = bt_schema_rx(c, bt_rx_and(c->rx, k->key, bt_rx_not(c->rx, named)));
        const struct bt_why *why = bt_schema_why(
            c, at,
            "needs a further property that the other alternative does not allow, which cannot "
            "be enforced; tell the alternatives apart by a required property with a const");
        bool none = k->value == BT_SET_NONE;
        for (uint32_t j = 0; j < (none ? 1 : c->sets[k->value].n); j++) {
            struct bt_obj *n = bt_obj_new(c);
            n->some = bt_schema_alloc(c, sizeof(*n->some));
            n->some[0] = (struct bt_some){
                keys, none ? UINT32_MAX : c->sets[k->value].lits[j] ^ BT_LIT_NOT, why};
            n->n_some = 1;
            push(c, &l, n);
        }
    }
    if (o->min > 0) {
        struct bt_obj *n = bt_obj_new(c);
        n->max = o->min - 1;
        push(c, &l, n);
    }
    if (o->max != BT_RX_NO_MAX) {
        struct bt_obj *n = bt_obj_new(c);
        n->min = o->max + 1;
        push(c, &l, n);
    }
    *out_p = l.o;
    return l.n;
}

/* Fulfils one bt_some by each named property that can do so. This needs all other keys to be
 * excluded; otherwise the shape cannot be enforced. */
static void resolve_one(struct bt_schema *c, const struct bt_obj *o, struct bt_some s,
                        struct list *l)
{
    bt_set_t value = s.lit == UINT32_MAX ? BT_SET_TRUE : bt_set_lit(c, s.lit);
    bool closed = true;
    for (uint32_t i = 0; i < o->n_classes && closed; i++) {
        bt_set_t v = bt_set_meet(c, o->classes[i].value, value);
        if (v == BT_SET_NONE || bt_set_none(c, v))
            continue;
        closed = bt_str_none(c, bt_schema_rx(c, bt_rx_and(c->rx, o->classes[i].key, s.keys)));
    }
    if (!closed) {
        struct bt_obj *n = bt_obj_copy(c, o);
        n->why = n->why ? n->why : s.why;
        push(c, l, n);
        return;
    }
    for (uint32_t i = 0; i < o->n_props; i++) {
        if (!bt_str_match(c, s.keys, o->props[i].name))
            continue;
        bt_set_t v = bt_set_meet(c, o->props[i].value, value);
        if (bt_set_none(c, v))
            continue;
        struct bt_obj *n = bt_obj_copy(c, o);
        n->props[i].value = v;
        n->props[i].required = true;
        if (!bt_obj_fails(n))
            push(c, l, n);
    }
}

uint32_t bt_obj_resolve(struct bt_schema *c, const struct bt_obj *o, const struct bt_obj ***out_p)
{
    struct list from = {0};
    struct bt_obj *bare = bt_obj_copy(c, o);
    bare->n_some = 0;
    push(c, &from, bare);
    for (uint32_t i = 0; i < o->n_some; i++) {
        struct list to = {0};
        for (uint32_t j = 0; j < from.n; j++)
            resolve_one(c, from.o[j], o->some[i], &to);
        bt_schema_work(c, to.n);
        from = to;
    }
    *out_p = from.o;
    return from.n;
}
