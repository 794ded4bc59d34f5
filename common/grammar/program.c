/* Makers of a program's nodes. Regular neighbours become one expression. So a sequence of tokens, a
 * choice or a list of scalars is one state of an automaton, and not many threads. */
#include <stdlib.h>

#include "common/grammar/program_priv.h"
#include "common/grammar/room.h"
#include "common/grammar/rx_priv.h"

#define ALIVE_STATES 20000u

bool bt_program_take(struct bt_program *p, size_t bytes)
{
    return bt_room_take(&p->full, p->max_bytes, &p->bytes, bytes);
}

bool bt_program_grow(struct bt_program *p, void *array_p, uint32_t n, uint32_t *cap, size_t size)
{
    if (n < *cap) {
        return true;
    }
    uint32_t want = *cap ? *cap * 2 : 32;
    if (!bt_program_take(p, (want - *cap) * size)) {
        return false;
    }
    bt_room_enlarge(array_p, cap, want, size);
    return true;
}

static bt_node_t add(struct bt_program *p, struct bt_node n)
{
    if (!bt_program_grow(p, &p->nodes, p->n_nodes, &p->nodes_cap, sizeof(*p->nodes))) {
        return BT_NODE_FAILED;
    }
    p->nodes[p->n_nodes] = n;
    return p->n_nodes++;
}

struct bt_program *bt_program_create(size_t max_bytes)
{
    struct bt_program *p = bt_calloc(1, sizeof(*p));
    p->max_bytes = max_bytes / 4;
    p->rx = bt_rx_set_create(max_bytes / 2);
    uint64_t mark[4] = {0};
    mark[BT_RX_MARK >> 6] = 1ull << (BT_RX_MARK & 63);
    p->rx->mark_class = bt_rx_class(p->rx, mark);
    p->rx->has_marks = true;
    (void)add(p, (struct bt_node){.kind = BT_NODE_K_NONE});
    (void)add(p, (struct bt_node){.kind = BT_NODE_K_EMPTY,
                                  .flags = BT_NODE_F_PRODUCTIVE | BT_NODE_F_NULLABLE});
    return p;
}

void bt_program_destroy(struct bt_program *p)
{
    if (!p) {
        return;
    }
    for (uint32_t i = 0; i < p->n_objects; i++) {
        free(p->objects[i].keys);
        free(p->objects[i].optional);
    }
    for (uint32_t i = 0; i < p->n_names; i++) {
        free(p->names[i]);
    }
    free(p->names);
    free(p->objects);
    free(p->lists);
    free(p->nodes);
    bt_rx_set_destroy(p->rx);
    free(p);
}

struct bt_rx_set *bt_program_rx(struct bt_program *p)
{
    return p->rx;
}

bt_node_t bt_program_regex(struct bt_program *p, bt_rx_t rx)
{
    bool none = false;
    if (rx == BT_RX_EMPTY) {
        return BT_NODE_EMPTY;
    }
    if (bt_rx_is_none(p->rx, rx, ALIVE_STATES, &none) != BT_OK) {
        p->full = true;
        return BT_NODE_FAILED;
    }
    return none ? BT_NODE_NONE : add(p, (struct bt_node){.kind = BT_NODE_K_RX, .a = rx});
}

bt_node_t bt_program_special(struct bt_program *p, const char *text)
{
    static const uint8_t lead = BT_RX_SPECIAL;
    bt_rx_t parts[2] = {bt_rx_text(p->rx, &lead, 1), bt_rx_text(p->rx, text, strlen(text))};
    return bt_program_regex(p, bt_rx_seq(p->rx, parts, 2));
}

/* ---- sequences and alternatives ---- */

/* Appends the node to lists. Of a list node, appends its members instead. */
static bool append(struct bt_program *p, bt_node_t n, uint8_t kind)
{
    bool same = p->nodes[n].kind == kind;
    uint32_t count = same ? p->nodes[n].b : 1;
    for (uint32_t i = 0; i < count; i++) {
        if (!bt_program_grow(p, &p->lists, p->n_lists, &p->lists_cap, sizeof(uint32_t))) {
            return false;
        }
        p->lists[p->n_lists++] = same ? p->lists[p->nodes[n].a + i] : n;
    }
    return true;
}

/* Makes one expression node of the members lists[from..to) of a sequence. */
static bt_node_t join_seq(struct bt_program *p, uint32_t from, uint32_t to)
{
    bt_rx_t r = BT_RX_EMPTY;
    for (uint32_t i = to; i > from && r != BT_RX_FAILED; i--) {
        r = bt_rx_concat(p->rx, p->nodes[p->lists[i - 1]].a, r);
    }
    return bt_program_regex(p, r);
}

static bt_node_t list_node(struct bt_program *p, uint8_t kind, uint32_t base, bt_node_t none)
{
    uint32_t n = p->n_lists - base;
    if (n > 1) {
        return add(p, (struct bt_node){.kind = kind, .a = base, .b = n});
    }
    bt_node_t one = n == 1 ? p->lists[base] : none;
    p->n_lists = base;
    return one;
}

bt_node_t bt_program_seq(struct bt_program *p, const bt_node_t *nodes, size_t n)
{
    uint32_t base = p->n_lists;
    for (size_t i = 0; i < n; i++) {
        if (nodes[i] == BT_NODE_FAILED ||
            (nodes[i] != BT_NODE_EMPTY && !append(p, nodes[i], BT_NODE_K_SEQ))) {
            p->n_lists = base;
            return BT_NODE_FAILED;
        }
    }
    uint32_t k = base, end = p->n_lists;
    for (uint32_t i = base; i < end;) {
        uint32_t j = i;
        while (j < end && p->nodes[p->lists[j]].kind == BT_NODE_K_RX) {
            j++;
        }
        bt_node_t one = j > i + 1 ? join_seq(p, i, j) : p->lists[i];
        if (one == BT_NODE_FAILED || one == BT_NODE_NONE) {
            p->n_lists = base;
            return one;
        }
        p->lists[k++] = one;
        i = BT_MAX(j, i + 1);
    }
    p->n_lists = k;
    return list_node(p, BT_NODE_K_SEQ, base, BT_NODE_EMPTY);
}

/* Returns whether the node can be part of an expression. The empty alternative can. */
static bool is_regular(const struct bt_program *p, bt_node_t n)
{
    return p->nodes[n].kind == BT_NODE_K_RX || n == BT_NODE_EMPTY;
}

static bt_rx_t rx_of(const struct bt_program *p, bt_node_t n)
{
    return n == BT_NODE_EMPTY ? BT_RX_EMPTY : p->nodes[n].a;
}

bt_node_t bt_program_alt(struct bt_program *p, const bt_node_t *nodes, size_t n)
{
    uint32_t base = p->n_lists, k = base;
    for (size_t i = 0; i < n; i++) {
        if (nodes[i] == BT_NODE_FAILED ||
            (nodes[i] != BT_NODE_NONE && !append(p, nodes[i], BT_NODE_K_ALT))) {
            p->n_lists = base;
            return BT_NODE_FAILED;
        }
    }
    uint32_t rx_base = p->rx->n_scratch;
    bt_node_t first = BT_NODE_NONE;
    for (uint32_t i = base; i < p->n_lists; i++) {
        bt_node_t x = p->lists[i];
        if (!is_regular(p, x)) {
            p->lists[k++] = x;
        } else if (!bt_rx_push(p->rx, rx_of(p, x))) {
            p->n_lists = base;
            p->rx->n_scratch = rx_base;
            return BT_NODE_FAILED;
        }
        first = is_regular(p, x) && first == BT_NODE_NONE ? x : first;
    }
    if (p->rx->n_scratch > rx_base) {
        bool one = p->rx->n_scratch == rx_base + 1;
        bt_rx_t r = one ? BT_RX_NONE : bt_rx_or_scratch(p->rx, rx_base);
        p->rx->n_scratch = rx_base;
        bt_node_t x = one ? first : bt_program_regex(p, r);
        if (x == BT_NODE_FAILED) {
            p->n_lists = base;
            return BT_NODE_FAILED;
        }
        p->lists[k++] = x; /* there is room, because at least one regular member was removed */
    }
    p->n_lists = k;
    return list_node(p, BT_NODE_K_ALT, base, BT_NODE_NONE);
}

/* ---- repeats ---- */

bt_node_t bt_program_repeat(struct bt_program *p, bt_node_t item, uint32_t min, uint32_t max)
{
    return bt_program_repeat_sep(p, item, BT_NODE_EMPTY, min, max);
}

bt_node_t bt_program_repeat_sep(struct bt_program *p, bt_node_t item, bt_node_t sep, uint32_t min,
                                uint32_t max)
{
    if (item == BT_NODE_FAILED || sep == BT_NODE_FAILED) {
        return BT_NODE_FAILED;
    }
    if (min > max) {
        return BT_NODE_NONE;
    }
    if (sep == BT_NODE_NONE) {
        if (min > 1) {
            return BT_NODE_NONE;
        }
        max = BT_MIN(max, 1);
    }
    if (max == 0 || (item == BT_NODE_EMPTY && sep == BT_NODE_EMPTY)) {
        return BT_NODE_EMPTY;
    }
    if (item == BT_NODE_NONE) {
        return min == 0 ? BT_NODE_EMPTY : BT_NODE_NONE;
    }
    if (min == 1 && max == 1) {
        return item;
    }
    if (is_regular(p, item) && (is_regular(p, sep) || max == 1)) {
        struct bt_rx_set *s = p->rx;
        bt_rx_t x = rx_of(p, item), r;
        if (sep == BT_NODE_EMPTY || max == 1) {
            r = bt_rx_repeat(s, x, min, max);
        } else {
            bt_rx_t more = bt_rx_concat(s, rx_of(p, sep), x);
            more = bt_rx_repeat(s, more, min ? min - 1 : 0, max == BT_RX_NO_MAX ? max : max - 1);
            r = bt_rx_concat(s, x, more);
            r = min == 0 ? bt_rx_or(s, r, BT_RX_EMPTY) : r;
        }
        return bt_program_regex(p, r);
    }
    return add(p,
               (struct bt_node){.kind = BT_NODE_K_REPEAT, .a = item, .b = sep, .c = min, .d = max});
}

/* ---- rules ---- */

bt_node_t bt_program_rule(struct bt_program *p)
{
    return add(p, (struct bt_node){.kind = BT_NODE_K_RULE, .a = BT_NODE_NONE});
}

void bt_program_rule_set(struct bt_program *p, bt_node_t rule, bt_node_t body)
{
    if (rule == BT_NODE_FAILED || body == BT_NODE_FAILED) {
        p->full = true;
        return;
    }
    p->nodes[rule].a = body;
}

/* ---- objects ---- */

/* The marker byte and a number below 2^24. */
static bt_rx_t marker(struct bt_rx_set *s, uint32_t number)
{
    uint8_t b[4] = {BT_RX_MARK, (uint8_t)(number >> 16), (uint8_t)(number >> 8), (uint8_t)number};
    return bt_rx_text(s, b, sizeof(b));
}

/* The code point at *at; moves *at behind it. UINT32_MAX: the bytes are not UTF-8. */
static uint32_t next_char(const uint8_t *text, size_t len, size_t *at)
{
    uint8_t b = text[(*at)++];
    uint32_t n = b < 0x80 ? 0 : b >= 0xC2 && b < 0xE0 ? 1 : b >= 0xE0 && b < 0xF0 ? 2 : 3;
    if (b >= 0x80 && (b < 0xC2 || b > 0xF4 || n > len - *at)) {
        return UINT32_MAX;
    }
    uint32_t c = n == 0 ? b : b & (0x3Fu >> n);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t t = text[(*at)++];
        if ((t & 0xC0) != 0x80) {
            return UINT32_MAX;
        }
        c = c << 6 | (t & 0x3F);
    }
    return c;
}

bt_rx_t bt_program_spelled(struct bt_rx_set *s, const char *name, size_t len, bt_rx_t tail)
{
    uint32_t base = s->n_scratch;
    size_t at = 0;
    while (at < len) {
        uint32_t c = next_char((const uint8_t *)name, len, &at);
        struct bt_rx_range r = {c, c};
        bt_rx_t x = c == UINT32_MAX ? BT_RX_NONE : bt_rx_chars(s, BT_RX_JSON_STRING, &r, 1);
        if (!bt_rx_push(s, x)) {
            s->n_scratch = base;
            return BT_RX_FAILED;
        }
    }
    while (s->n_scratch > base && tail != BT_RX_FAILED) {
        tail = bt_rx_concat(s, s->scratch[--s->n_scratch], tail);
    }
    s->n_scratch = base;
    return tail;
}

static int by_name(const void *a, const void *b)
{
    const struct bt_program_property *x = *(const struct bt_program_property *const *)a;
    const struct bt_program_property *y = *(const struct bt_program_property *const *)b;
    int d = bt_compare(x->name, y->name, BT_MIN(x->name_len, y->name_len));
    return d != 0 ? d : x->name_len < y->name_len ? -1 : x->name_len > y->name_len;
}

/* Fills in the keys of an object. Key i has the marker i + 1. */
static bool add_keys(struct bt_program *p, struct bt_object *o, const struct bt_program_object *in)
{
    struct bt_rx_set *s = p->rx;
    const struct bt_program_property **order = bt_malloc((in->n_props + 1) * sizeof(*order));
    uint32_t n = 0;
    for (size_t i = 0; i < in->n_props; i++) {
        if (in->props[i].value != BT_NODE_NONE) {
            order[n++] = &in->props[i];
        }
    }
    qsort(order, n, sizeof(*order), by_name);
    bt_rx_t colon[3] = {bt_rx_text(s, "\"", 1),
                        bt_rx_seq(s, (bt_rx_t[]){in->blank, bt_rx_text(s, ":", 1)}, 2), in->blank};
    bt_rx_t before = bt_rx_seq(s, colon, 3);
    bool ok = before != BT_RX_FAILED;
    for (uint32_t i = 0; i < n && ok; i++) {
        struct bt_object_key *k = &o->keys[i];
        bt_rx_t tail = bt_rx_concat(s, before, marker(s, i + 1));
        k->rx = bt_program_spelled(s, order[i]->name, order[i]->name_len, tail);
        k->value = order[i]->value;
        k->required = order[i]->required;
        o->n_required += k->required;
        if (!k->required) {
            o->optional[i >> 5] |= 1u << (i & 31);
        }
        ok = k->rx != BT_RX_FAILED && k->value != BT_NODE_FAILED;
    }
    free(order);
    o->n_props = n;
    for (size_t i = 0; i < in->n_patterns && ok; i++) {
        if (in->patterns[i].value == BT_NODE_NONE) {
            continue;
        }
        struct bt_object_key *k = &o->keys[n + o->n_patterns++];
        bt_rx_t tail = bt_rx_concat(s, before, marker(s, n + o->n_patterns));
        bool none = true;
        ok = bt_rx_is_none(s, in->patterns[i].key, ALIVE_STATES, &none) == BT_OK;
        *k = (struct bt_object_key){.rx = bt_rx_concat(s, in->patterns[i].key, tail),
                                    .name = in->patterns[i].key,
                                    .tail = tail,
                                    .value = in->patterns[i].value,
                                    .pattern = true};
        ok = ok && k->rx != BT_RX_FAILED && k->value != BT_NODE_FAILED;
        o->n_patterns -= none;
    }
    o->distinct = o->min > 1 && o->n_patterns > 0;
    return ok;
}

bt_node_t bt_program_object(struct bt_program *p, const struct bt_program_object *in)
{
    struct bt_rx_set *s = p->rx;
    size_t keys = in->n_props + in->n_patterns, words = BT_DIV_UP(in->n_props, 32);
    for (size_t i = 0; i < in->n_props; i++) {
        if (in->props[i].required && in->props[i].value == BT_NODE_NONE) {
            return BT_NODE_NONE;
        }
    }
    if (in->min > in->max) {
        return BT_NODE_NONE;
    }
    if (keys >= 1u << 23 ||
        !bt_program_grow(p, &p->objects, p->n_objects, &p->objects_cap, sizeof(*p->objects)) ||
        !bt_program_take(p, keys * sizeof(struct bt_object_key) + words * sizeof(uint32_t))) {
        p->full = true;
        return BT_NODE_FAILED;
    }
    struct bt_object *o = &p->objects[p->n_objects++];
    *o = (struct bt_object){.min = in->min, .max = in->max, .space = in->space, .blank = in->blank};
    o->keys = bt_calloc(keys + 1, sizeof(*o->keys));
    o->optional = bt_calloc(words + 1, sizeof(uint32_t));
    o->words = (uint32_t)words;
    o->open = bt_rx_concat(s, bt_rx_text(s, "{", 1), in->space);
    bt_rx_t comma[3] = {bt_rx_text(s, ",", 1), in->space, bt_rx_text(s, "\"", 1)};
    o->comma = bt_rx_seq(s, comma, 3);
    o->close = bt_rx_concat(s, bt_rx_text(s, "}", 1), marker(s, 0));
    if (!add_keys(p, o, in) || o->open == BT_RX_FAILED || o->comma == BT_RX_FAILED ||
        o->close == BT_RX_FAILED) {
        p->full = true;
        return BT_NODE_FAILED;
    }
    return add(p, (struct bt_node){.kind = BT_NODE_K_OBJECT, .a = p->n_objects - 1});
}

bt_node_t bt_program_item(struct bt_program *p, bt_node_t value)
{
    return value == BT_NODE_NONE || value == BT_NODE_FAILED
               ? value
               : add(p, (struct bt_node){.kind = BT_NODE_K_ITEM, .a = value});
}

bt_node_t bt_program_distinct(struct bt_program *p, bt_node_t body, uint32_t min, const char *where)
{
    if (body == BT_NODE_NONE || body == BT_NODE_FAILED) {
        return body;
    }
    if (!bt_program_grow(p, &p->names, p->n_names, &p->names_cap, sizeof(*p->names)) ||
        !bt_program_take(p, strlen(where) + 1)) {
        return BT_NODE_FAILED;
    }
    p->names[p->n_names] = bt_strdup(where);
    p->has_distinct = true;
    return add(
        p, (struct bt_node){.kind = BT_NODE_K_DISTINCT, .a = body, .b = min, .c = p->n_names++});
}
