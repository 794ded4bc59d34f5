/* Computes masks by a depth-first walk of the trie, with the automaton's threads at each depth.
 * If a thread allows all texts of a slice, the slice's tokens come from a bitmap. */
#include "common/grammar/mask.h"

#include <stdlib.h>

#include "common/grammar/slice.h"

struct bt_mask_level {
    uint32_t at, n; /* in the automaton's arena */
    uint32_t reader;
};
struct mask { /* what is kept with a state */
    size_t bytes;
    uint8_t slice; /* BT_SLICE_SETS: no slice */
    uint8_t chars; /* only the slice's tokens with at most this many characters */
    bool full;     /* whether ids is a bitmap */
    uint32_t n, n_later;
    /* [n] tokens, then [n_later] nodes of the slice's trie that wait for the items */
    uint32_t ids[];
};

/* ---- the walk ---- */

static void push_id(uint32_t **ids, uint32_t *n, uint32_t *cap, uint32_t id)
{
    if (*n == *cap) {
        *cap = *cap ? *cap * 2 : 1024;
        *ids = bt_realloc(*ids, *cap * sizeof(**ids));
    }
    (*ids)[(*n)++] = id;
}

static void add_token(struct bt_mask_cache *c, const struct bt_grammar_vocab *v, uint32_t id)
{
    for (; id != BT_VOCAB_NO_TOKEN; id = v->same[id]) {
        push_id(&c->ids, &c->n_ids, &c->ids_cap, id);
    }
}

/* Returns whether the tests of items change nothing for a thread that moves on within its
 * expression only. */
static bool needs_no_test(const struct bt_automaton *m, uint32_t frame, uint32_t reader)
{
    return reader == 0 || reader == (BT_READER_ANY | BT_READER_OUT) ||
           (reader >= BT_READER_ANY && frame != 0 && m->frames[frame].flags & BT_FRAME_F_SAFE);
}

/* Moves the threads at a depth on by a byte, to the next depth. false: a limit was met. */
static bool descend(struct bt_mask_cache *c, struct bt_automaton *m, uint32_t depth, uint8_t byte)
{
    struct bt_mask_level *up = &c->levels[depth - 1], *here = &c->levels[depth];
    here->at = m->n_arena = up->at + up->n;
    m->reader = up->reader;
    here->n = bt_automaton_step(m, up->at, up->n, byte);
    here->reader = m->reader;
    return here->n != UINT32_MAX;
}

/* Collects the tokens of the trie's nodes from..to that the threads above them allow. Puts nodes
 * off at which the reader cannot decide. false: a limit was met. */
static bool walk(struct bt_mask_cache *c, struct bt_automaton *m, const struct bt_grammar_vocab *v,
                 const struct bt_trie *t, uint32_t from, uint32_t to)
{
    struct bt_mask_level *levels = c->levels;
    const struct bt_trie_node *nodes = t->nodes;
    for (uint32_t i = from; i < to;) {
        const struct bt_trie_node *node = &nodes[i];
        if (c->walked != 0 && !(v->seen[i] & c->walked)) {
            i = node->skip;
            continue;
        }
        struct bt_mask_level up = levels[node->depth - 1], *here = &levels[node->depth];
        here->at = up.at + up.n;
        struct bt_thread one = m->arena[up.at];
        if (up.n == 1 && node->byte != BT_RX_MARK && !(one.frame & BT_FRAME_TEXT) &&
            needs_no_test(m, one.frame, up.reader)) {
            uint32_t next = bt_rx_next(m->rx, one.q, node->byte);
            if (next == BT_RX_NONE) {
                i = node->skip;
                continue;
            }
            if (!(next & BT_RX_ENDS) && here->at < m->arena_cap) {
                here->n = 1;
                here->reader = up.reader;
                m->arena[here->at] = (struct bt_thread){next, one.frame};
                if (node->token != BT_VOCAB_NO_TOKEN) {
                    add_token(c, v, node->token);
                }
                i++;
                continue;
            }
        }
        if (!descend(c, m, node->depth, node->byte)) {
            return false;
        }
        if (m->distinct.uncertain) {
            m->distinct.uncertain = false;
            push_id(&c->later, &c->n_later, &c->later_cap, i);
            i = node->skip;
            continue;
        }
        if (node->token != BT_VOCAB_NO_TOKEN && (here->n > 0 || m->final)) {
            add_token(c, v, node->token);
        }
        i = here->n > 0 ? i + 1 : node->skip;
    }
    return true;
}

static void set_bits(uint32_t *bits, const uint32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        bits[ids[i] >> 5] |= 1u << (ids[i] & 31);
    }
}

/* Makes a mask of c->ids, to be kept with the state. */
static struct mask *keep(struct bt_mask_cache *c, const struct bt_grammar_vocab *v,
                         const struct bt_slice_choice *choice)
{
    bool holes = bt_slice_has_holes(choice), full = holes || c->n_ids > v->words;
    uint32_t n = full ? v->words : c->n_ids;
    size_t bytes = sizeof(struct mask) + (n + (size_t)c->n_later) * sizeof(uint32_t);
    struct mask *k = bt_calloc(1, bytes);
    k->bytes = bytes;
    k->slice = holes ? BT_SLICE_SETS : choice->set;
    k->chars = choice->chars;
    k->full = full;
    k->n = n;
    k->n_later = c->n_later;
    bt_copy(k->ids + n, c->later, c->n_later * sizeof(uint32_t));
    if (full) {
        set_bits(k->ids, c->ids, c->n_ids);
        if (holes) {
            bt_slice_bits(v, choice, k->ids);
        }
    } else {
        bt_copy(k->ids, c->ids, n * sizeof(uint32_t));
    }
    c->bytes += k->bytes;
    return k;
}

static void apply(const struct mask *k, const struct bt_grammar_vocab *v, bool final,
                  uint32_t *bits)
{
    if (k->full) {
        memcpy(bits, k->ids, v->words * sizeof(*bits));
    } else {
        memset(bits, 0, v->words * sizeof(*bits));
        set_bits(bits, k->ids, k->n);
    }
    if (k->slice != BT_SLICE_SETS) {
        const uint32_t *slice = v->slices[k->slice].bits[k->chars];
        for (uint32_t i = 0; i < v->words; i++) {
            bits[i] |= slice[i];
        }
    }
    if (final) {
        set_bits(bits, v->eos, v->n_eos);
    }
}

/* The state whose mask is looked up. It has no limits that no token can reach, and no items of
 * arrays that must differ if one mask can serve all items. FAILED: a limit was met. */
static uint32_t relaxed(struct bt_automaton *m, const struct bt_grammar_vocab *v, uint32_t state)
{
    uint32_t n = m->states[state].n, at = bt_automaton_load(m, state);
    bool changed = m->reader != 0 && bt_distinct_forgets(m, state);
    if (changed) {
        m->reader = BT_READER_ANY | BT_READER_OUT;
    }
    for (uint32_t i = at; at != UINT32_MAX && i < at + n; i++) {
        bt_rx_t q = bt_rx_relax(m->rx, m->arena[i].q, v->longest);
        if (q == BT_RX_FAILED) {
            m->n_arena = at;
            return BT_STATE_FAILED;
        }
        changed |= q != m->arena[i].q;
        m->arena[i].q = q;
    }
    if (at == UINT32_MAX || !changed) {
        m->n_arena = BT_MIN(at, m->n_arena);
        return at == UINT32_MAX ? BT_STATE_FAILED : state;
    }
    bt_automaton_sort(m, at);
    return bt_automaton_intern(m, at, m->states[state].final);
}

/* Puts the state's threads at the root of the trie. false: a limit was met. */
static bool enter(struct bt_mask_cache *c, struct bt_automaton *m, const struct bt_grammar_vocab *v,
                  uint32_t state)
{
    if (c->n_levels < v->longest + 1) {
        c->n_levels = v->longest + 1;
        c->levels = bt_realloc(c->levels, c->n_levels * sizeof(*c->levels));
    }
    c->n_ids = c->n_later = 0;
    c->n_frames = m->n_frames;
    c->n_readers = m->distinct.n_nodes;
    m->distinct.uncertain = false;
    uint32_t at = bt_automaton_load(m, state);
    c->levels[0] = (struct bt_mask_level){at, m->states[state].n, m->reader};
    return at != UINT32_MAX;
}

/* Forgets frames and readers of a walk: no state has them. */
static void leave(struct bt_mask_cache *c, struct bt_automaton *m)
{
    m->n_arena = c->levels[0].at;
    bt_automaton_drop_frames(m, c->n_frames);
    if (m->p->has_distinct) {
        bt_reader_drop(m, c->n_readers);
        bt_distinct_forget(m);
    }
}

static const struct bt_trie *trie_of(const struct bt_grammar_vocab *v, uint32_t set)
{
    return set == BT_SLICE_SETS ? &v->all : &v->slices[set].rest;
}

/* Makes the mask of a state. */
static bool make(struct bt_mask_cache *c, struct bt_automaton *m, const struct bt_grammar_vocab *v,
                 uint32_t state)
{
    if (!enter(c, m, v, state)) {
        return false;
    }
    struct bt_slice_choice choice;
    struct bt_mask_level root = c->levels[0];
    bt_slice_choose(m, v, root.at, root.n, &choice);
    bool holes = bt_slice_has_holes(&choice);
    const struct bt_trie *t = trie_of(v, holes ? BT_SLICE_SETS : choice.set);
    c->walked = holes ? bt_slice_walked(&choice) : 0;
    bool ok = root.n == 0 || walk(c, m, v, t, 0, t->n);
    c->walked = 0;
    leave(c, m);
    if (!ok) {
        return false;
    }
    if (c->bytes > c->max_bytes) {
        bt_mask_drop(c, m);
    }
    m->states[state].mask = keep(c, v, &choice);
    return true;
}

/* ---- masks that were made without the items of arrays ---- */

/* Collects the tokens of a node that was put off, now that the items are known. */
static bool walk_later(struct bt_mask_cache *c, struct bt_automaton *m,
                       const struct bt_grammar_vocab *v, const struct bt_trie *t, uint32_t i)
{
    uint32_t k = i, depth = t->nodes[i].depth, n;
    while (t->nodes[k].token == BT_VOCAB_NO_TOKEN) {
        k++;
    }
    const uint8_t *bytes = bt_vocab_bytes(v, t->nodes[k].token, &n);
    for (uint32_t d = 1; d <= depth; d++) {
        if (!descend(c, m, d, bytes[d - 1])) {
            return false;
        }
        if (c->levels[d].n == 0 && !(d == depth && m->final)) {
            return true;
        }
    }
    if (t->nodes[i].token != BT_VOCAB_NO_TOKEN) {
        add_token(c, v, t->nodes[i].token);
    }
    return c->levels[depth].n == 0 || walk(c, m, v, t, i + 1, t->nodes[i].skip);
}

static void set_bit(const struct bt_grammar_vocab *v, uint32_t id, bool on, uint32_t *bits)
{
    for (; id != BT_VOCAB_NO_TOKEN; id = v->same[id]) {
        uint32_t bit = 1u << (id & 31), *word = &bits[id >> 5];
        *word = on ? *word | bit : *word & ~bit;
    }
}

/* Corrects the bits of tokens after which an item is the beginning of an earlier item, or is
 * equal to one. */
static bool correct(struct bt_mask_cache *c, struct bt_automaton *m,
                    const struct bt_grammar_vocab *v, uint32_t *bits)
{
    const struct bt_trie_node *nodes = v->all.nodes;
    for (uint32_t i = 0; i < v->all.n;) {
        const struct bt_trie_node *node = &nodes[i];
        uint32_t up = c->levels[node->depth - 1].reader; /* 0: the threads have left all arrays */
        uint32_t reader = up != 0 ? bt_reader_step(m, up, node->byte) : 0;
        if (reader == BT_READER_FAILED) {
            return false;
        }
        if (reader == 0 || !bt_reader_may_double(m, reader, 0)) {
            i = node->skip;
            continue;
        }
        if (!descend(c, m, node->depth, node->byte)) {
            return false;
        }
        uint32_t n = c->levels[node->depth].n, end = n > 0 ? i + 1 : node->skip;
        for (uint32_t k = i; k < end; k++) {
            if (nodes[k].token != BT_VOCAB_NO_TOKEN) {
                set_bit(v, nodes[k].token, k == i && (n > 0 || m->final), bits);
            }
        }
        i = end;
    }
    return true;
}

/* Completes, for this state, a mask that was made without the items of arrays. */
static bool complete(struct bt_mask_cache *c, struct bt_automaton *m,
                     const struct bt_grammar_vocab *v, uint32_t state, const struct mask *k,
                     uint32_t *bits)
{
    if (!enter(c, m, v, state)) {
        return false;
    }
    bool ok = true;
    for (uint32_t i = 0; i < k->n_later && ok; i++) {
        ok = walk_later(c, m, v, trie_of(v, k->slice), k->ids[k->n + i]);
    }
    set_bits(bits, c->ids, c->n_ids);
    ok = ok && (!bt_reader_may_double(m, c->levels[0].reader, 0) || correct(c, m, v, bits));
    leave(c, m);
    return ok && !m->full;
}

bt_status_t bt_mask_get(struct bt_mask_cache *c, struct bt_automaton *m,
                        const struct bt_grammar_vocab *v, uint32_t state, uint32_t *bits)
{
    if (c->serial != v->serial) {
        bt_mask_drop(c, m);
        c->serial = v->serial;
    }
    uint32_t shared = m->states[state].mask ? state : relaxed(m, v, state);
    if (shared == BT_STATE_FAILED || (!m->states[shared].mask && !make(c, m, v, shared))) {
        return BT_ERR_EXHAUSTED;
    }
    const struct mask *k = m->states[shared].mask;
    apply(k, v, m->states[state].final, bits);
    bool whole = m->states[shared].reader == m->states[state].reader;
    return whole || complete(c, m, v, state, k, bits) ? BT_OK : BT_ERR_EXHAUSTED;
}

void bt_mask_drop(struct bt_mask_cache *c, struct bt_automaton *m)
{
    for (uint32_t i = 0; i < m->n_states && c->bytes > 0; i++) {
        free(m->states[i].mask);
        m->states[i].mask = NULL;
    }
    c->bytes = 0;
}

void bt_mask_cleanup(struct bt_mask_cache *c, struct bt_automaton *m)
{
    bt_mask_drop(c, m);
    free(c->levels);
    free(c->ids);
    free(c->later);
}
