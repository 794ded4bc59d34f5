/* Frames, states and steps of the automaton. */
#include "common/grammar/automaton.h"

#include <stdlib.h>

#include "common/grammar/room.h"

#define THREADS_MAX 4096u  /* of one state */
#define OPS_MAX     32768u /* operations that one closure may do */
/* The work of the automaton itself, in the units of bt_rx_set_budget. */
#define OP_WORK   6u /* for an operation of a closure */
#define SORT_WORK 8u /* for a thread, where a step has many */

enum op { OP_ENTER, OP_RETURN };

/* ---- memory ---- */

bool bt_automaton_take(struct bt_automaton *m, size_t bytes)
{
    return bt_room_take(&m->full, m->max_bytes, &m->bytes, bytes);
}

bool bt_automaton_grow(struct bt_automaton *m, void *array_p, uint32_t n, uint32_t *cap,
                       size_t size)
{
    if (n < *cap) {
        return true;
    }
    uint32_t want = *cap ? *cap * 2 : 32;
    if (!bt_automaton_take(m, (want - *cap) * size)) {
        return false;
    }
    bt_room_enlarge(array_p, cap, want, size);
    return true;
}

bool bt_automaton_heads(struct bt_automaton *m, uint32_t **heads, uint32_t *n, uint32_t want)
{
    if (!bt_automaton_take(m, (want - *n) * sizeof(uint32_t))) {
        return false;
    }
    *heads = bt_realloc(*heads, want * sizeof(uint32_t));
    *n = want;
    memset(*heads, 0xFF, want * sizeof(uint32_t));
    return true;
}

static bool begin(struct bt_automaton *m)
{
    m->n_frames = 1; /* 0 means that the text may end */
    if (!bt_automaton_grow(m, &m->frames, 1, &m->frames_cap, sizeof(*m->frames))) {
        return false;
    }
    m->frames[0] = (struct bt_frame){0};
    /* A state without threads points into these arrays, so they must exist from the beginning. */
    return bt_automaton_grow(m, &m->pool, 0, &m->pool_cap, sizeof(*m->pool)) &&
           bt_automaton_grow(m, &m->arena, 0, &m->arena_cap, sizeof(*m->arena)) &&
           bt_automaton_heads(m, &m->frame_heads, &m->n_frame_heads, 64) &&
           bt_automaton_heads(m, &m->state_heads, &m->n_state_heads, 64);
}

bool bt_automaton_init(struct bt_automaton *m, struct bt_program *p, size_t max_bytes)
{
    *m = (struct bt_automaton){.p = p, .rx = p->rx, .max_bytes = max_bytes};
    bt_rx_mark(p->rx, &m->mark);
    return begin(m);
}

void bt_automaton_cleanup(struct bt_automaton *m)
{
    free(m->frames);
    free(m->frame_heads);
    free(m->states);
    free(m->state_heads);
    free(m->pool);
    free(m->seen);
    free(m->memo);
    free(m->arena);
    free(m->ops);
    free(m->done);
    free(m->distinct.nodes);
    free(m->distinct.heads);
    free(m->distinct.rich);
    free(m->distinct.found);
}

void bt_automaton_reset(struct bt_automaton *m)
{
    struct bt_automaton old = *m;
    bt_automaton_cleanup(m);
    bt_rx_rewind(old.rx, &old.mark);
    *m = (struct bt_automaton){
        .p = old.p, .rx = old.rx, .max_bytes = old.max_bytes, .mark = old.mark};
    (void)begin(m);
}

/* ---- memo ---- */

static uint32_t hash4(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    uint64_t h = (a + 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
    h = (h ^ (h >> 32) ^ ((uint64_t)b << 32 | c)) * 0xD6E8FEB86659FD93u;
    h = (h ^ (h >> 32) ^ d) * 0xD6E8FEB86659FD93u;
    return (uint32_t)(h >> 32);
}

static struct bt_memo *memo_slot(struct bt_memo *memo, uint32_t cap, const uint32_t key[4])
{
    uint32_t i = hash4(key[0], key[1], key[2], key[3]) & (cap - 1);
    while (memo[i].value != UINT32_MAX && memcmp(memo[i].key, key, sizeof(memo[i].key)) != 0) {
        i = (i + 1) & (cap - 1);
    }
    return &memo[i];
}

uint32_t bt_memo_get(const struct bt_automaton *m, const uint32_t key[4])
{
    return m->memo_cap ? memo_slot(m->memo, m->memo_cap, key)->value : UINT32_MAX;
}

bool bt_memo_put(struct bt_automaton *m, const uint32_t key[4], uint32_t value)
{
    if (m->n_memo * 2 >= m->memo_cap) {
        uint32_t want = m->memo_cap ? m->memo_cap * 2 : 64;
        if (!bt_automaton_take(m, (want - m->memo_cap) * sizeof(struct bt_memo))) {
            return false;
        }
        struct bt_memo *memo = bt_malloc(want * sizeof(*memo));
        memset(memo, 0xFF, want * sizeof(*memo));
        for (uint32_t i = 0; i < m->memo_cap; i++) {
            if (m->memo[i].value != UINT32_MAX) {
                *memo_slot(memo, want, m->memo[i].key) = m->memo[i];
            }
        }
        free(m->memo);
        m->memo = memo;
        m->memo_cap = want;
    }
    struct bt_memo *slot = memo_slot(m->memo, m->memo_cap, key);
    m->n_memo += slot->value == UINT32_MAX;
    memcpy(slot->key, key, sizeof(slot->key));
    slot->value = value;
    return true;
}

/* ---- frames ---- */

static uint32_t frame_of(struct bt_automaton *m, bt_node_t node, uint32_t payload, uint32_t parent,
                         bool text)
{
    uint32_t hash = hash4(node, payload, parent, 0);
    for (uint32_t i = m->frame_heads[hash & (m->n_frame_heads - 1)]; i != UINT32_MAX;
         i = m->frames[i].next) {
        const struct bt_frame *f = &m->frames[i];
        if (f->node == node && f->payload == payload && f->parent == parent) {
            return i;
        }
    }
    if (m->n_frames >= m->n_frame_heads) {
        if (!bt_automaton_heads(m, &m->frame_heads, &m->n_frame_heads, m->n_frame_heads * 2)) {
            return UINT32_MAX;
        }
        for (uint32_t i = 1; i < m->n_frames; i++) {
            struct bt_frame *f = &m->frames[i];
            uint32_t *head =
                &m->frame_heads[hash4(f->node, f->payload, f->parent, 0) & (m->n_frame_heads - 1)];
            f->next = *head;
            *head = i;
        }
    }
    if (!bt_automaton_grow(m, &m->frames, m->n_frames, &m->frames_cap, sizeof(*m->frames))) {
        return UINT32_MAX;
    }
    uint32_t *head = &m->frame_heads[hash & (m->n_frame_heads - 1)];
    uint32_t id = m->n_frames++;
    m->frames[id] =
        (struct bt_frame){.node = node, .payload = payload, .parent = parent, .next = *head};
    *head = id;
    if (m->p->has_distinct) {
        bt_distinct_frame(m, id, text);
    }
    return id;
}

uint32_t bt_frame(struct bt_automaton *m, bt_node_t node, uint32_t payload, uint32_t parent)
{
    return frame_of(m, node, payload, parent, false);
}

uint32_t bt_text_frame(struct bt_automaton *m, bt_node_t node, uint32_t byte, uint32_t parent)
{
    uint32_t f = frame_of(m, node, byte, parent, true);
    return f == UINT32_MAX ? f : f | BT_FRAME_TEXT;
}

void bt_automaton_drop_frames(struct bt_automaton *m, uint32_t n)
{
    while (m->n_frames > n) { /* the youngest frame of a hash chain is the first in it */
        const struct bt_frame *f = &m->frames[--m->n_frames];
        m->frame_heads[hash4(f->node, f->payload, f->parent, 0) & (m->n_frame_heads - 1)] = f->next;
    }
}

/* ---- closure: what follows without a byte ---- */

bool bt_push_thread(struct bt_automaton *m, bt_rx_t q, uint32_t f)
{
    if (q == BT_RX_FAILED || f == UINT32_MAX ||
        !bt_automaton_grow(m, &m->arena, m->n_arena, &m->arena_cap, sizeof(*m->arena))) {
        m->full = true;
        return false;
    }
    m->arena[m->n_arena++] = (struct bt_thread){q, f};
    return true;
}

static bool push_op(struct bt_automaton *m, enum op op, uint32_t x, uint32_t f, bool fresh)
{
    if (f == UINT32_MAX || m->n_ops >= OPS_MAX ||
        !bt_automaton_grow(m, &m->ops, m->n_ops, &m->ops_cap, sizeof(*m->ops))) {
        m->full = true;
        return false;
    }
    m->ops[m->n_ops++] = (struct bt_closure_op){op, x, f, fresh};
    return true;
}

static struct bt_closure_op *done_slot(struct bt_closure_op *done, uint32_t cap,
                                       const struct bt_closure_op *o)
{
    uint32_t i = hash4(o->op, o->x, o->frame, o->fresh) & (cap - 1);
    while (done[i].op != UINT32_MAX && (done[i].op != o->op || done[i].x != o->x ||
                                        done[i].frame != o->frame || done[i].fresh != o->fresh)) {
        i = (i + 1) & (cap - 1);
    }
    return &done[i];
}

/* Returns whether this closure has already done an operation. If not, marks it as done. */
static bool was_done(struct bt_automaton *m, const struct bt_closure_op *o, bool *ok)
{
    if (m->n_done * 2 >= m->done_cap) {
        uint32_t want = m->done_cap ? m->done_cap * 2 : 32;
        *ok = want <= OPS_MAX * 2 &&
              bt_automaton_take(m, (want - m->done_cap) * sizeof(struct bt_closure_op));
        if (!*ok) {
            m->full = true;
            return true;
        }
        struct bt_closure_op *done = bt_malloc(want * sizeof(*done));
        memset(done, 0xFF, want * sizeof(*done));
        for (uint32_t i = 0; i < m->done_cap && m->n_done > 0; i++) {
            if (m->done[i].op != UINT32_MAX) {
                *done_slot(done, want, &m->done[i]) = m->done[i];
            }
        }
        free(m->done);
        m->done = done;
        m->done_cap = want;
    }
    struct bt_closure_op *slot = done_slot(m->done, m->done_cap, o);
    if (slot->op != UINT32_MAX) {
        return true;
    }
    *slot = *o;
    m->n_done++;
    return false;
}

static bool enter(struct bt_automaton *m, bt_node_t id, uint32_t f, bool fresh)
{
    const struct bt_program *p = m->p;
    const struct bt_node *n = &p->nodes[id];
    if (!(n->flags & BT_NODE_F_PRODUCTIVE)) {
        return true;
    }
    switch ((enum bt_node_kind)n->kind) {
    case BT_NODE_K_NONE: break;
    case BT_NODE_K_EMPTY: return push_op(m, OP_RETURN, 0, f, fresh);
    case BT_NODE_K_RX:
        return bt_push_thread(m, n->a, f) &&
               (!bt_rx_nullable(m->rx, n->a) || push_op(m, OP_RETURN, 0, f, fresh));
    case BT_NODE_K_SEQ: return push_op(m, OP_ENTER, p->lists[n->a], bt_frame(m, id, 1, f), fresh);
    case BT_NODE_K_ALT:
        for (uint32_t i = 0; i < n->b; i++) {
            if (!push_op(m, OP_ENTER, p->lists[n->a + i], f, fresh)) {
                return false;
            }
        }
        break;
    case BT_NODE_K_REPEAT:
        return push_op(m, OP_ENTER, n->a, bt_frame(m, id, 0, f), true) &&
               (n->c > 0 || push_op(m, OP_RETURN, 0, f, fresh));
    case BT_NODE_K_OBJECT: {
        uint32_t seen = bt_seen_first(m, n->a);
        return seen != UINT32_MAX && bt_push_thread(m, bt_object_rx(m, n->a, seen, true),
                                                    bt_object_frame(m, id, seen, f));
    }
    case BT_NODE_K_DISTINCT: return push_op(m, OP_ENTER, n->a, bt_distinct_enter(m, id, f), fresh);
    case BT_NODE_K_ITEM: return push_op(m, OP_ENTER, n->a, bt_distinct_item(m, id, f), fresh);
    case BT_NODE_K_RULE: return push_op(m, OP_ENTER, n->a, f, fresh);
    }
    return true;
}

/* An item or a separator of a repeat has ended. fresh: it was an item that read no byte. */
static bool repeat_on(struct bt_automaton *m, struct bt_frame f, bool fresh)
{
    const struct bt_node *n = &m->p->nodes[f.node];
    uint32_t count = f.payload >> 1;
    if (f.payload & 1) {
        return push_op(m, OP_ENTER, n->a, bt_frame(m, f.node, count << 1, f.parent), true);
    }
    if (fresh && n->b == BT_NODE_EMPTY) {
        return true; /* the repeat is where it was before the item */
    }
    count = n->d == BT_RX_NO_MAX ? BT_MIN(count + 1, n->c) : count + 1;
    if (count >= n->c && !push_op(m, OP_RETURN, 0, f.parent, false)) {
        return false;
    }
    if (count >= n->d) {
        return true;
    }
    if (count > UINT32_MAX / 4) {
        m->full = true;
        return false;
    }
    bool sep = n->b != BT_NODE_EMPTY;
    return push_op(m, OP_ENTER, sep ? n->b : n->a, bt_frame(m, f.node, count << 1 | sep, f.parent),
                   !sep);
}

/* The part of the text that belongs above frame `id` has ended. */
static bool leave(struct bt_automaton *m, uint32_t id, bool fresh)
{
    if (id == 0) {
        m->final = true;
        return true;
    }
    struct bt_frame f = m->frames[id];
    const struct bt_node *n = &m->p->nodes[f.node];
    if (n->kind == BT_NODE_K_SEQ) {
        uint32_t member = m->p->lists[n->a + f.payload];
        bool last = f.payload + 1 == n->b;
        return push_op(m, OP_ENTER, member,
                       last ? f.parent : bt_frame(m, f.node, f.payload + 1, f.parent), fresh);
    }
    if (n->kind == BT_NODE_K_REPEAT) {
        return repeat_on(m, f, fresh);
    }
    if (n->kind == BT_NODE_K_DISTINCT || n->kind == BT_NODE_K_ITEM) {
        bool goes_on = n->kind == BT_NODE_K_DISTINCT || bt_distinct_item_done(m, id);
        return !m->full && (!goes_on || push_op(m, OP_RETURN, 0, f.parent, fresh));
    }
    BT_ASSERT(n->kind == BT_NODE_K_OBJECT && f.payload & 1);
    uint32_t seen = f.payload >> 1;
    return bt_push_thread(m, bt_object_rx(m, n->a, seen, false),
                          bt_object_frame(m, f.node, seen, f.parent));
}

static bool closure(struct bt_automaton *m)
{
    bool ok = true, many = m->n_ops > 1;
    if (m->n_done > 0) {
        memset(m->done, 0xFF, m->done_cap * sizeof(*m->done));
        m->n_done = 0;
    }
    for (uint32_t steps = 0; m->n_ops > 0 && ok; steps++) {
        struct bt_closure_op o = m->ops[--m->n_ops];
        many |= m->n_ops > 0 || steps > 8;
        /* a chain of operations without branches needs no table */
        if (many && was_done(m, &o, &ok)) {
            continue;
        }
        ok = steps < OPS_MAX && bt_rx_work(m->rx, OP_WORK) &&
             (o.op == OP_ENTER ? enter(m, o.x, o.frame, o.fresh) : leave(m, o.frame, o.fresh));
    }
    m->n_ops = 0;
    m->full |= !ok;
    return ok;
}

/* ---- steps ---- */

/* Key number `key` of the object of frame `id` has ended; 0: the object itself has ended. text:
 * the frame of the key's text, 0: the text was not kept. */
static bool key_done(struct bt_automaton *m, uint32_t key, uint32_t id, uint32_t text)
{
    struct bt_frame f = m->frames[id];
    uint32_t object = m->p->nodes[f.node].a, n, base;
    bt_rx_t name = BT_RX_NONE;
    if (key == 0) {
        return push_op(m, OP_RETURN, 0, f.parent, false);
    }
    const struct bt_object_key *k = &m->p->objects[object].keys[key - 1];
    if (text && k->pattern) {
        char *t = bt_frame_text(m, text, &n, &base);
        name = t ? bt_object_name(m, t, n) : BT_RX_FAILED;
        free(t);
    }
    uint32_t seen =
        name == BT_RX_FAILED ? UINT32_MAX : bt_seen_add(m, object, f.payload >> 1, key - 1, name);
    return seen != UINT32_MAX &&
           push_op(m, OP_ENTER, k->value, bt_frame(m, f.node, seen << 1 | 1, f.parent), false);
}

/* Ends the keys whose numbers the markers in expression `a` spell. */
static bool keys_done(struct bt_automaton *m, bt_rx_t a, uint32_t number, uint32_t digits,
                      uint32_t id, uint32_t text)
{
    struct bt_rx_node n = m->rx->nodes[a];
    if (n.kind == BT_RX_K_OR) {
        for (uint32_t i = 0; i < n.b; i++) {
            if (!keys_done(m, m->rx->lists[n.a + i], number, digits, id, text)) {
                return false;
            }
        }
        return true;
    }
    struct bt_rx_node head = n.kind == BT_RX_K_CONCAT ? m->rx->nodes[n.a] : n;
    uint64_t bits[4] = {0};
    if (head.kind == BT_RX_K_CLASS) {
        memcpy(bits, m->rx->classes[head.a], sizeof(bits));
    }
    for (uint32_t w = 0; w < 4;) {
        if (bits[w] == 0) {
            w++;
            continue;
        }
        uint32_t b = w * 64 + (uint32_t)__builtin_ctzll(bits[w]), more = number << 8 | b;
        bool last = digits == 2;
        bits[w] &= bits[w] - 1;
        if (last ? !key_done(m, more, id, text)
                 : n.kind == BT_RX_K_CONCAT && !keys_done(m, n.b, more, digits + 1, id, text)) {
            return false;
        }
    }
    return true;
}

/* An expression accepts the text so far, or only a marker is left of it. */
static bool ended(struct bt_automaton *m, bt_rx_t q, uint32_t f)
{
    const struct bt_frame *fr = bt_frame_at(m, f);
    uint8_t kind = f == 0 ? BT_NODE_K_NONE : m->p->nodes[fr->node].kind;
    if (kind == BT_NODE_K_OBJECT && (f & BT_FRAME_TEXT || !(fr->payload & 1))) {
        bt_rx_t marks = bt_rx_step(m->rx, q, BT_RX_MARK);
        uint32_t id = f;
        while (id & BT_FRAME_TEXT && marks != BT_RX_NONE) {
            id = bt_frame_at(m, id)->parent;
        }
        return marks != BT_RX_FAILED && keys_done(m, marks, 0, 0, id, f & BT_FRAME_TEXT ? f : 0);
    }
    if (!bt_rx_nullable(m->rx, q)) {
        return true;
    }
    return push_op(m, OP_RETURN, 0, f, false);
}

/* Returns whether nothing but a marker may follow. */
static bool only_mark(const struct bt_rx_set *s, bt_rx_t q)
{
    const struct bt_rx_node *n = &s->nodes[q];
    return n->kind == BT_RX_K_CONCAT && n->a == s->mark_class;
}

static bool before(struct bt_thread a, struct bt_thread b)
{
    return a.q != b.q ? a.q < b.q : a.frame < b.frame;
}

static int by_thread(const void *a, const void *b)
{
    struct bt_thread x = *(const struct bt_thread *)a, y = *(const struct bt_thread *)b;
    return before(x, y) ? -1 : before(y, x);
}

uint32_t bt_automaton_sort(struct bt_automaton *m, uint32_t at)
{
    struct bt_thread *v = m->arena + at;
    uint32_t n = m->n_arena - at, k = 0;
    if (n < 16) {
        for (uint32_t i = 1; i < n; i++) {
            struct bt_thread x = v[i];
            uint32_t j = i;
            for (; j > 0 && before(x, v[j - 1]); j--) {
                v[j] = v[j - 1];
            }
            v[j] = x;
        }
    } else if (bt_rx_work(m->rx, n * SORT_WORK)) {
        qsort(v, n, sizeof(*v), by_thread);
    } else {
        m->n_arena = at;
        return UINT32_MAX;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (k == 0 || before(v[k - 1], v[i])) {
            v[k++] = v[i];
        }
    }
    m->n_arena = at + k;
    if (k > THREADS_MAX) {
        m->full = true;
        return UINT32_MAX;
    }
    return k;
}

/* Moves the reader on by a byte. false: a limit was met. */
static bool read_byte(struct bt_automaton *m, uint8_t byte)
{
    if (m->reader >= BT_READER_ANY) {
        m->distinct.out = m->reader & BT_READER_OUT;
    } else if (m->reader != 0) {
        m->reader = bt_reader_step(m, m->reader, byte);
    }
    return m->reader != BT_READER_FAILED;
}

uint32_t bt_automaton_step_all(struct bt_automaton *m, uint32_t at, uint32_t n, uint8_t byte)
{
    uint32_t top = m->n_arena;
    m->final = false;
    if (byte == BT_RX_MARK) {
        return 0;
    }
    if (!bt_rx_work(m->rx, n) || (m->reader != 0 && !read_byte(m, byte))) {
        return UINT32_MAX;
    }
    for (uint32_t i = at; i < at + n; i++) {
        struct bt_thread t = m->arena[i];
        uint32_t to = bt_rx_next(m->rx, t.q, byte);
        if (to == BT_RX_NONE) {
            continue;
        }
        bt_rx_t q = to & ~BT_RX_ENDS;
        if (t.frame & BT_FRAME_TEXT && to != BT_RX_UNKNOWN) {
            t.frame = bt_text_frame(m, bt_frame_at(m, t.frame)->node, byte, t.frame);
            to = t.frame == UINT32_MAX ? BT_RX_UNKNOWN : to;
        }
        if (to == BT_RX_UNKNOWN || ((to & BT_RX_ENDS) && !ended(m, q, t.frame)) ||
            (q != BT_RX_EMPTY && !only_mark(m->rx, q) && !bt_push_thread(m, q, t.frame))) {
            m->n_arena = top;
            m->n_ops = 0;
            return UINT32_MAX;
        }
    }
    if (m->n_ops > 0 && !closure(m)) {
        m->n_arena = top;
        return UINT32_MAX;
    }
    if (m->reader >= BT_READER_ANY) {
        m->reader = (m->reader & ~BT_READER_OUT) | m->distinct.out;
    }
    return m->n_arena - top <= 1 ? m->n_arena - top : bt_automaton_sort(m, top);
}

uint32_t bt_automaton_step(struct bt_automaton *m, uint32_t at, uint32_t n, uint8_t byte)
{
    uint32_t top = m->n_arena, count = bt_automaton_step_all(m, at, n, byte);
    if (m->reader != 0 && count != UINT32_MAX) {
        count = bt_distinct_filter(m, top, count);
        m->n_arena = count == UINT32_MAX ? top : m->n_arena;
    }
    return count;
}

/* ---- states ---- */

static uint32_t state_hash(const struct bt_thread *v, uint32_t n, bool final, uint32_t reader)
{
    uint64_t h = ((uint64_t)reader << 32) + n * 2 + final;
    for (uint32_t i = 0; i < n; i++) {
        h = (h ^ ((uint64_t)v[i].q << 32 | v[i].frame)) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    return (uint32_t)h;
}

uint32_t bt_automaton_intern(struct bt_automaton *m, uint32_t at, bool final)
{
    uint32_t n = m->n_arena - at, hash;
    const struct bt_thread *v = m->arena + at;
    m->n_arena = at;
    if (n == 0 && !final) {
        return BT_STATE_DEAD;
    }
    hash = state_hash(v, n, final, m->reader);
    for (uint32_t i = m->state_heads[hash & (m->n_state_heads - 1)]; i != UINT32_MAX;
         i = m->states[i].next) {
        const struct bt_state *s = &m->states[i];
        if (s->n == n && s->final == final && s->reader == m->reader &&
            bt_compare(m->pool + s->at, v, n * sizeof(*v)) == 0) {
            return i;
        }
    }
    if (m->n_states >= m->n_state_heads) {
        if (!bt_automaton_heads(m, &m->state_heads, &m->n_state_heads, m->n_state_heads * 2)) {
            return BT_STATE_FAILED;
        }
        for (uint32_t i = 0; i < m->n_states; i++) {
            struct bt_state *s = &m->states[i];
            uint32_t *head =
                &m->state_heads[state_hash(m->pool + s->at, s->n, s->final, s->reader) &
                                (m->n_state_heads - 1)];
            s->next = *head;
            *head = i;
        }
    }
    while (m->n_pool + n > m->pool_cap) {
        if (!bt_automaton_grow(m, &m->pool, m->pool_cap, &m->pool_cap, sizeof(*m->pool))) {
            return BT_STATE_FAILED;
        }
    }
    if (!bt_automaton_grow(m, &m->states, m->n_states, &m->states_cap, sizeof(*m->states))) {
        return BT_STATE_FAILED;
    }
    bt_copy(m->pool + m->n_pool, v, n * sizeof(*v));
    uint32_t *head = &m->state_heads[hash & (m->n_state_heads - 1)];
    m->states[m->n_states] = (struct bt_state){
        .at = m->n_pool, .n = n, .final = final, .reader = m->reader, .next = *head};
    *head = m->n_states;
    m->n_pool += n;
    return m->n_states++;
}

uint32_t bt_automaton_start(struct bt_automaton *m)
{
    uint32_t at = m->n_arena;
    m->final = false;
    m->reader = 0;
    if (!push_op(m, OP_ENTER, m->p->start, 0, false) || !closure(m) ||
        bt_automaton_sort(m, at) == UINT32_MAX) {
        m->n_arena = at;
        return BT_STATE_FAILED;
    }
    return bt_automaton_intern(m, at, m->final);
}

bool bt_distinct_exists(struct bt_automaton *m, bt_node_t node)
{
    uint32_t at = m->n_arena;
    m->reader = 0;
    bool found = push_op(m, OP_ENTER, node, 0, false) && closure(m) &&
                 bt_distinct_filter(m, at, m->n_arena - at) != UINT32_MAX && m->n_arena > at;
    m->n_arena = at;
    return found;
}

uint32_t bt_automaton_load(struct bt_automaton *m, uint32_t state)
{
    struct bt_state s = m->states[state];
    uint32_t at = m->n_arena;
    m->reader = s.reader;
    for (uint32_t i = 0; i < s.n; i++) {
        if (!bt_push_thread(m, m->pool[s.at + i].q, m->pool[s.at + i].frame)) {
            m->n_arena = at;
            return UINT32_MAX;
        }
    }
    return at;
}
