/* Arrays whose items may be any values and must differ (nodes DISTINCT and ITEM). The reader
 * (reader.h) knows the values. A thread ends when its item has become equal to an earlier one.
 * No thread may be left that can only become equal to an earlier item. So after each byte, a
 * thread within an item must pass one of these tests:
 *   - its item can still become more values than an array can hold (it is rich), or
 *   - the part of the item that was read is not the beginning of an earlier item, or
 *   - a search finds a text that leads to a thread of the first two kinds, or out of the array.
 * The search looks only at beginnings of earlier items, so it is short. */
#include "common/grammar/automaton.h"

#include <stdlib.h>

#define TAG_RICH 0x60000000u
/* number of values; an array with so many items does not fit into the memory */
#define RICH        (1u << 20)
#define RICH_DEPTH  64u
#define RICH_STATES 400u
#define FIND_DEPTH  3000u
#define FOUND_SLOTS 1024u /* a power of two */

struct bt_found { /* the result of a search */
    struct bt_thread t;
    uint32_t reader, generation;
    bool found;
};

/* ---- how many values an expression has ---- */

struct count {
    struct bt_automaton *m;
    uint32_t states, depth;
};

/* A lower bound of how many values the texts from state q on have, at most RICH. Outside
 * strings, only one spelling of a number counts: an integer without leading zeros. A state that
 * comes back to itself stands for texts of any length. */
static uint32_t values_of(struct count *c, bt_rx_t q, bool in_string)
{
    struct bt_automaton *m = c->m;
    uint32_t key[4] = {TAG_RICH, q, in_string, 0}, known = bt_memo_get(m, key), n = 0;
    if (known != UINT32_MAX) {
        return known;
    }
    if (c->depth >= RICH_DEPTH || c->states >= RICH_STATES) {
        return 1; /* every state that is left has at least one text */
    }
    struct bt_rx_row *row = bt_rx_row_make(m->rx, q);
    if (!row || !bt_memo_put(m, key, RICH)) {
        return 1;
    }
    c->states++;
    c->depth++;
    const uint8_t *map = row->map;
    uint16_t plain[256] = {0};
    for (uint32_t b = in_string ? 0x20 : '1'; b < 0x7F; b++) {
        if (in_string ? b != '"' && b != '\\' : b <= '9' || (b >= 'a' && b <= 'z')) {
            plain[map[b]]++;
        }
    }
    for (uint32_t b = 0x20; b < 0x7F && n < RICH; b++) {
        bool other = b == '"' || (!in_string && strchr("[]{},:-", (int)b));
        uint32_t times = other ? 1 : plain[map[b]];
        uint32_t to = times ? bt_rx_next(m->rx, q, (uint8_t)b) : BT_RX_NONE;
        if (!other) {
            plain[map[b]] = 0;
        }
        if (to != BT_RX_NONE && to != BT_RX_UNKNOWN) {
            uint64_t more = values_of(c, to & ~BT_RX_ENDS, in_string != (b == '"'));
            n = (uint32_t)BT_MIN(n + more * times, (uint64_t)RICH);
        }
    }
    n = BT_MIN(n + bt_rx_nullable(m->rx, q), RICH);
    n = BT_MAX(n, 1);
    c->depth--;
    (void)bt_memo_put(m, key, n);
    return n;
}

static bool rx_rich(struct bt_automaton *m, bt_rx_t q, bool in_string)
{
    struct count c = {.m = m};
    uint8_t kinds;
    if (in_string && bt_rx_free_chars(m->rx, q, &kinds) >= 1 &&
        kinds & BT_RX_F_CHARS << BT_RX_JSON_STRING) {
        return true;
    }
    return values_of(&c, q, in_string) >= RICH;
}

/* ---- how many values a node has ---- */

enum { UNKNOWN, POOR, RICH_NODE };

static bool node_rich(struct bt_automaton *m, bt_node_t id);
static bool items_rich(struct bt_automaton *m, bt_node_t id, uint32_t depth);

static bool key_rich(struct bt_automaton *m, const struct bt_object *o, uint32_t i)
{
    const struct bt_object_key *k = &o->keys[i];
    return bt_node_is(m->p, k->value, BT_NODE_F_PRODUCTIVE) &&
           (node_rich(m, k->value) || (k->pattern && rx_rich(m, k->name, true)));
}

static bool any_rich(struct bt_automaton *m, uint32_t from, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (node_rich(m, m->p->lists[from + i])) {
            return true;
        }
    }
    return false;
}

/* Returns whether the node has RICH values or more. false: this function could not show it. */
static bool node_rich(struct bt_automaton *m, bt_node_t id)
{
    const struct bt_program *p = m->p;
    const struct bt_node *n = &p->nodes[id];
    if (!m->distinct.rich) {
        if (!bt_automaton_take(m, p->n_nodes)) {
            return false;
        }
        m->distinct.rich = bt_calloc(p->n_nodes, 1);
    }
    if (!(n->flags & BT_NODE_F_PRODUCTIVE) || m->distinct.rich[id] != UNKNOWN) {
        return m->distinct.rich[id] == RICH_NODE;
    }
    /* the answer while it is not known, also for the node within itself */
    m->distinct.rich[id] = POOR;
    bool r = false;
    switch ((enum bt_node_kind)n->kind) {
    case BT_NODE_K_NONE:
    case BT_NODE_K_EMPTY: break;
    case BT_NODE_K_RX: r = rx_rich(m, n->a, false); break;
    case BT_NODE_K_SEQ:
    case BT_NODE_K_ALT: r = any_rich(m, n->a, n->b); break;
    case BT_NODE_K_REPEAT: r = n->d == BT_RX_NO_MAX || (n->d > 0 && node_rich(m, n->a)); break;
    case BT_NODE_K_OBJECT: {
        const struct bt_object *o = &p->objects[n->a];
        for (uint32_t i = 0; i < o->n_props + o->n_patterns && !r; i++) {
            r = (o->keys[i].required || o->n_required < o->max) && key_rich(m, o, i);
        }
        break;
    }
    case BT_NODE_K_DISTINCT: r = items_rich(m, n->a, 0) && node_rich(m, n->a); break;
    case BT_NODE_K_ITEM:
    case BT_NODE_K_RULE: r = node_rich(m, n->a); break;
    }
    m->distinct.rich[id] = r ? RICH_NODE : POOR;
    return r;
}

/* Returns whether all items of a DISTINCT's body are rich. */
static bool items_rich(struct bt_automaton *m, bt_node_t id, uint32_t depth)
{
    const struct bt_node *n = &m->p->nodes[id];
    bool r = depth < RICH_DEPTH;
    if (n->kind == BT_NODE_K_ITEM) {
        return node_rich(m, n->a);
    }
    if (n->kind == BT_NODE_K_SEQ || n->kind == BT_NODE_K_ALT) {
        for (uint32_t i = 0; i < n->b && r; i++) {
            r = items_rich(m, m->p->lists[n->a + i], depth + 1);
        }
    } else if (n->kind == BT_NODE_K_REPEAT) {
        r = r && items_rich(m, n->a, depth + 1);
    }
    return r;
}

/* ---- frames ---- */

static const struct bt_frame *frame_at(const struct bt_automaton *m, uint32_t id)
{
    return &m->frames[id & ~BT_FRAME_TEXT];
}

/* Returns whether the rest of the text above the frame's parent can become RICH values. */
static bool rest_rich(struct bt_automaton *m, const struct bt_frame *f)
{
    const struct bt_node *n = &m->p->nodes[f->node];
    if (n->kind == BT_NODE_K_SEQ) {
        return any_rich(m, n->a + f->payload, n->b - f->payload);
    }
    if (n->kind == BT_NODE_K_REPEAT) {
        uint32_t count = f->payload >> 1; /* the level counts items that have ended */
        bool differ = m->p->nodes[frame_at(m, f->inner)->node].kind == BT_NODE_K_DISTINCT;
        return (n->d == BT_RX_NO_MAX && !differ) || (count + 1 < n->d && node_rich(m, n->a));
    }
    if (n->kind != BT_NODE_K_OBJECT) {
        return false;
    }
    const struct bt_object *o = &m->p->objects[n->a];
    const uint32_t *set = m->seen + (f->payload >> 1);
    if (o->max != BT_RX_NO_MAX && set[0] >= o->max) {
        return false;
    }
    for (uint32_t i = 0; i < o->n_props + o->n_patterns; i++) {
        bool seen = i < o->n_props && set[1 + (i >> 5)] >> (i & 31) & 1;
        if (!seen && (o->keys[i].required || o->max == BT_RX_NO_MAX) && key_rich(m, o, i)) {
            return true;
        }
    }
    return false;
}

/* Returns whether threads with this frame need no test, whatever the items are. */
static bool always_safe(struct bt_automaton *m, const struct bt_frame *f)
{
    const struct bt_frame *in = frame_at(m, f->inner);
    if (m->p->nodes[in->node].kind == BT_NODE_K_ITEM) {
        return f->flags & BT_FRAME_F_RICH && in->flags & BT_FRAME_F_SAFE_UP;
    }
    const struct bt_frame *up = frame_at(m, in->parent);
    return in->flags & BT_FRAME_F_ITEMS_RICH && in->flags & BT_FRAME_F_SAFE_UP &&
           (up->inner == 0 || (up->flags | f->flags) & BT_FRAME_F_RICH);
}

void bt_distinct_frame(struct bt_automaton *m, uint32_t id, bool text)
{
    struct bt_frame f = m->frames[id];
    struct bt_frame up = *frame_at(m, f.parent);
    const struct bt_node *n = &m->p->nodes[f.node];
    f.inner = f.parent == 0 ? 0 : up.inner;
    if (n->kind == BT_NODE_K_DISTINCT || n->kind == BT_NODE_K_ITEM) {
        bool outer_safe = f.inner == 0 || frame_at(m, f.inner)->flags & BT_FRAME_F_SAFE_UP;
        f.inner = id;
        if (n->kind == BT_NODE_K_DISTINCT) {
            bool rich = items_rich(m, n->a, 0);
            f.flags = (rich ? BT_FRAME_F_ITEMS_RICH : 0) |
                      (outer_safe && (rich || n->b <= 1) ? BT_FRAME_F_SAFE_UP : 0);
        } else {
            f.flags = outer_safe ? BT_FRAME_F_SAFE_UP : 0;
        }
    } else if (f.inner != 0) {
        bool above = up.flags & BT_FRAME_F_RICH && f.parent != f.inner;
        f.flags = above || (!text && rest_rich(m, &f)) ? BT_FRAME_F_RICH : 0;
    }
    m->frames[id].inner = f.inner;
    m->frames[id].flags = f.flags;
    if (f.inner != 0 && always_safe(m, &f)) {
        m->frames[id].flags |= BT_FRAME_F_SAFE;
    }
}

/* ---- the closure ---- */

static bool is_any(uint32_t reader)
{
    return reader >= BT_READER_ANY;
}

uint32_t bt_distinct_enter(struct bt_automaton *m, bt_node_t node, uint32_t parent)
{
    if (is_any(m->reader)) {
        m->distinct.uncertain = true;
        return bt_frame(m, node, 0, parent);
    }
    m->reader = bt_reader_expect(m, m->reader);
    return m->reader == BT_READER_FAILED
               ? UINT32_MAX
               : bt_frame(m, node, m->distinct.nodes[m->reader].level + 1u, parent);
}

uint32_t bt_distinct_item(struct bt_automaton *m, bt_node_t node, uint32_t parent)
{
    const struct bt_frame *in = frame_at(m, frame_at(m, parent)->inner);
    return bt_frame(m, node, in->payload, parent);
}

bool bt_distinct_item_done(struct bt_automaton *m, uint32_t id)
{
    uint32_t level = m->frames[id].payload;
    if (!is_any(m->reader)) {
        return !bt_reader_is_double(m, m->reader, level);
    }
    if ((m->reader & BT_READER_OUT) <= level) {
        m->distinct.uncertain = true;
    }
    m->distinct.out = BT_MIN(m->distinct.out, level);
    return true;
}

/* ---- tests ---- */

static bool thread_rich(struct bt_automaton *m, bt_rx_t q, uint32_t reader)
{
    bool in_string = bt_reader_in_string(m, reader);
    return rx_rich(m, q, in_string) && (in_string || !bt_reader_in_exponent(m, reader));
}

/* Returns whether the thread can end its item and all items around it with different values.
 * Does not search. */
static bool safe(struct bt_automaton *m, struct bt_thread t, uint32_t reader)
{
    const struct bt_frame *f = frame_at(m, t.frame);
    if (f->flags & BT_FRAME_F_SAFE) {
        return true;
    }
    bool rich = f->flags & BT_FRAME_F_RICH || thread_rich(m, t.q, reader), in_item = false;
    for (uint32_t id = f->inner; id != 0;) {
        const struct bt_frame *in = frame_at(m, id), *up = frame_at(m, in->parent);
        const struct bt_node *n = &m->p->nodes[in->node];
        if (n->kind == BT_NODE_K_ITEM) {
            if (!rich && bt_reader_may_double(m, reader, in->payload)) {
                return false;
            }
            in_item = true;
        } else {
            bool few = !(in->flags & BT_FRAME_F_ITEMS_RICH);
            if (few && (n->b > 1 || (!in_item && bt_reader_may_double(m, reader, in->payload)))) {
                return false;
            }
            in_item = false;
        }
        rich |= in->parent != 0 && up->flags & BT_FRAME_F_RICH;
        id = in->parent == 0 ? 0 : up->inner;
    }
    return true;
}

/* ---- the search ---- */

struct find {
    struct bt_automaton *m;
    struct bt_found *met; /* open addressing; generation 0: the slot is free */
    uint32_t n_met, cap;
};

static uint32_t slot_of(struct bt_thread t, uint32_t reader)
{
    uint64_t h = ((uint64_t)t.q << 32 | t.frame) * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 32) ^ reader) * 0xD6E8FEB86659FD93u;
    return (uint32_t)(h >> 33);
}

static bool same(const struct bt_found *f, struct bt_thread t, uint32_t reader)
{
    return f->t.q == t.q && f->t.frame == t.frame && f->reader == reader;
}

/* Returns whether the search has been here before. If not, marks the place. */
static bool was_met(struct find *s, struct bt_thread t, uint32_t reader)
{
    reader = bt_reader_without_zeros(s->m, reader);
    if (s->n_met * 2 >= s->cap) {
        uint32_t cap = s->cap ? s->cap * 2 : 64;
        struct bt_found *met = bt_calloc(cap, sizeof(*met));
        for (uint32_t i = 0; i < s->cap; i++) {
            if (s->met[i].generation) {
                uint32_t k = slot_of(s->met[i].t, s->met[i].reader) & (cap - 1);
                while (met[k].generation) {
                    k = (k + 1) & (cap - 1);
                }
                met[k] = s->met[i];
            }
        }
        free(s->met);
        s->met = met;
        s->cap = cap;
    }
    uint32_t k = slot_of(t, reader) & (s->cap - 1);
    for (; s->met[k].generation; k = (k + 1) & (s->cap - 1)) {
        if (same(&s->met[k], t, reader)) {
            return true;
        }
    }
    s->met[k] = (struct bt_found){.t = t, .reader = reader, .generation = 1};
    s->n_met++;
    return false;
}

/* Properties that an object still needs are tried in one order only, because the order does not
 * change the result. */
static bt_rx_t first_required(struct bt_automaton *m, struct bt_thread t)
{
    const struct bt_frame *f = bt_frame_at(m, t.frame);
    if (t.frame & BT_FRAME_TEXT) {
        f = bt_frame_at(m, f->parent);
    }
    const struct bt_node *n = &m->p->nodes[f->node];
    if (n->kind != BT_NODE_K_OBJECT || f->payload & 1) {
        return t.q;
    }
    const struct bt_object *o = &m->p->objects[n->a];
    uint32_t seen = f->payload >> 1;
    bool first = t.q == bt_object_rx(m, n->a, seen, true);
    if (!first && t.q != bt_object_rx(m, n->a, seen, false)) {
        return t.q;
    }
    for (uint32_t i = 0; i < o->n_props; i++) {
        if (o->keys[i].required && !(m->seen[seen + 1 + (i >> 5)] >> (i & 31) & 1)) {
            bt_rx_t before = first ? bt_rx_concat(m->rx, o->open, bt_rx_text(m->rx, "\"", 1))
                                   : bt_rx_concat(m->rx, o->blank, o->comma);
            return bt_rx_concat(m->rx, before, o->keys[i].rx);
        }
    }
    return t.q;
}

/* The i-th byte that a search tries; 0: there is no further byte. The first bytes end something;
 * exponents are there because some numbers can end only with one. The last bytes begin something
 * or change nothing. Control characters are left out: JSON text has none. */
#define FIRST 6
#define TRIES (FIRST + 222 + 4)
static uint8_t byte_to_try(uint32_t i)
{
    static const char first[] = "\"}],:e", last[] = "{[\\ ";
    if (i < FIRST || i >= FIRST + 222) {
        return (uint8_t)(i < FIRST ? first[i] : last[i - FIRST - 222]);
    }
    uint8_t byte = (uint8_t)('!' + (i - FIRST));
    return strchr(first, byte) || strchr(last, byte) ? 0 : byte;
}

static bool in_item(const struct bt_automaton *m, struct bt_thread t)
{
    uint32_t inner = frame_at(m, t.frame)->inner;
    return inner != 0 && m->p->nodes[frame_at(m, inner)->node].kind == BT_NODE_K_ITEM;
}

/* Returns whether some text leads from the thread to a safe one. */
static bool find(struct find *s, struct bt_thread t, uint32_t reader, uint32_t depth)
{
    struct bt_automaton *m = s->m;
    if (frame_at(m, t.frame)->inner == 0 || t.frame == 0 || safe(m, t, reader)) {
        return true;
    }
    if (depth > FIND_DEPTH || !bt_rx_work(m->rx, 64)) {
        m->full = true;
        return true;
    }
    if (was_met(s, t, reader)) {
        return false;
    }
    t.q = first_required(m, t);
    uint32_t base = m->n_arena;
    bool found = false;
    if (!bt_push_thread(m, t.q, t.frame)) {
        return true;
    }
    for (uint32_t i = 0; i < TRIES && !found && !m->full; i++) {
        uint8_t byte = byte_to_try(i);
        if (bt_rx_next(m->rx, t.q, byte) == BT_RX_NONE) {
            continue;
        }
        m->reader = reader;
        uint32_t n = bt_automaton_step_all(m, base, 1, byte), next = m->reader;
        found = n == UINT32_MAX || m->final;
        /* White space and numbers can be long: the search first tries what ends them. */
        bool begins = memchr("{[,: ", byte, 5);
        for (uint32_t k = 0; k < 2 * n && !found; k++) {
            struct bt_thread x = m->arena[base + 1 + k % n];
            found = in_item(m, x) == ((k < n) == begins) && find(s, x, next, depth + 1);
        }
        m->n_arena = base + 1;
    }
    m->n_arena = base;
    return found || m->full;
}

bool bt_distinct_can_end(struct bt_automaton *m, struct bt_thread t, uint32_t reader)
{
    if (safe(m, t, reader)) {
        return true;
    }
    if (!m->distinct.found) {
        if (!bt_automaton_take(m, FOUND_SLOTS * sizeof(*m->distinct.found))) {
            return true;
        }
        m->distinct.found = bt_calloc(FOUND_SLOTS, sizeof(*m->distinct.found));
        m->distinct.generation = 1;
    }
    struct bt_found *f = &m->distinct.found[slot_of(t, reader) & (FOUND_SLOTS - 1)];
    if (f->generation != m->distinct.generation || !same(f, t, reader)) {
        struct find s = {.m = m};
        bool final = m->final;
        uint32_t kept = m->reader;
        bool found = find(&s, t, reader, 0);
        free(s.met);
        m->final = final;
        m->reader = kept;
        if (m->full) {
            return true;
        }
        *f = (struct bt_found){t, reader, m->distinct.generation, found};
    }
    return f->found;
}

void bt_distinct_forget(struct bt_automaton *m)
{
    m->distinct.generation++;
}

/* ---- after a step ---- */

/* The test with a reader that has forgotten the items. Where the reader cannot decide, the mask
 * that is being made becomes uncertain. */
static void test_any(struct bt_automaton *m, struct bt_thread t)
{
    const struct bt_frame *f = frame_at(m, t.frame);
    uint8_t kinds;
    if (!(frame_at(m, f->inner)->flags & BT_FRAME_F_SAFE_UP)) {
        m->distinct.uncertain = true;
    } else if ((m->reader & BT_READER_OUT) != BT_READER_OUT) {
        m->distinct.uncertain |= bt_rx_free_chars(m->rx, t.q, &kinds) < 1 ||
                                 !(kinds & BT_RX_F_CHARS << BT_RX_JSON_STRING);
    }
}

uint32_t bt_distinct_filter(struct bt_automaton *m, uint32_t top, uint32_t n)
{
    bool inside = false;
    uint32_t k = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct bt_thread t = m->arena[top + i];
        const struct bt_frame *f = frame_at(m, t.frame);
        if (t.frame != 0 && f->inner != 0) {
            if (!(f->flags & BT_FRAME_F_SAFE)) {
                if (is_any(m->reader)) {
                    test_any(m, t);
                } else if (!bt_distinct_can_end(m, t, m->reader)) {
                    continue;
                }
            }
            inside = true;
        }
        m->arena[top + k++] = t;
    }
    m->n_arena = top + k;
    if (!inside) {
        m->reader = 0;
    }
    return m->full ? UINT32_MAX : k;
}

bool bt_distinct_forgets(const struct bt_automaton *m, uint32_t state)
{
    const struct bt_state *s = &m->states[state];
    for (uint32_t i = 0; i < s->n; i++) {
        struct bt_thread t = m->pool[s->at + i];
        const struct bt_frame *f = frame_at(m, t.frame);
        if (t.frame != 0 && f->inner != 0 && !(frame_at(m, f->inner)->flags & BT_FRAME_F_SAFE_UP)) {
            return false;
        }
    }
    return true;
}
