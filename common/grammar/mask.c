/* Computes masks: a depth-first walk of the trie with the automaton's threads at each depth. A
 * slice that a thread allows whole comes from its bitmap. */
#include "common/grammar/mask.h"

#include <stdlib.h>

#define LEVELS_MAX 48u  /* characters that the test of a slice looks ahead */
#define PAIRS_MAX  768u /* states that it looks at */
#define LOOK_TABLE 8192u
#define PAIR_WORK  50u /* bt_rx_set_budget: of the 256 bytes behind a pair */
#define TAG_SLICE  0x50000000u
#define AT_LEAST   0x100u /* a cap: so many characters are allowed, more may be */
#define ENDLESS    0xFFu

struct bt_mask_level {
    uint32_t at, n; /* in the automaton's arena */
};
struct mask { /* kept with a state */
    size_t bytes;
    uint8_t slice; /* BT_SLICE_SETS: none */
    uint8_t chars; /* of the slice's tokens at most */
    bool full;     /* ids is a bitmap */
    uint32_t n, ids[];
};

/* ---- slices ---- */

/* Encodings all of whose texts contain the set's: characters of a JSON string that stand for
 * themselves are texts of either one. */
static const uint8_t slice_encodings[BT_SLICE_SETS] = {
    [BT_SLICE_TEXT] = BT_RX_F_CHARS << BT_RX_UTF8, [BT_SLICE_NO_TAG] = BT_RX_F_CHARS << BT_RX_UTF8,
    [BT_SLICE_JSON] = BT_RX_F_CHARS_ALL,           [BT_SLICE_ALPHA_SPACE] = BT_RX_F_CHARS_ALL,
    [BT_SLICE_ALPHA] = BT_RX_F_CHARS_ALL,          [BT_SLICE_LOWER] = BT_RX_F_CHARS_ALL};

struct pair { /* a state of an expression and one of the slice's automaton */
    bt_rx_t q;
    uint8_t s, level;
};
struct look { /* breadth first by characters */
    struct pair *v;
    uint32_t n, cap;
    uint16_t table[LOOK_TABLE];  /* 1 + a number of a pair, by open addressing */
    const uint8_t (*steps)[256]; /* of the set */
    uint8_t encodings;
    bool again; /* a pair was met again at a higher level, or an expression may end */
};

static bool look_add(struct bt_automaton *m, struct look *l, bt_rx_t q, uint8_t s, uint8_t level)
{
    uint8_t kinds;
    if (s == 0 && bt_rx_free_chars(m->rx, q, &kinds) >= LEVELS_MAX && kinds & l->encodings) {
        l->again = true; /* anything may follow: no need to look */
        return true;
    }
    q = s == 0 ? bt_rx_relax(m->rx, q, LEVELS_MAX) : q; /* the test sees no further */
    if (q == BT_RX_FAILED) {
        return false;
    }
    uint32_t h = (q * BT_SLICE_STATES + s) * 2654435761u >> 19;
    for (; l->table[h] != 0; h = (h + 1) & (LOOK_TABLE - 1)) {
        const struct pair *p = &l->v[l->table[h] - 1];
        if (p->q == q && p->s == s) {
            l->again |= p->level != level;
            return true;
        }
    }
    if (l->n >= PAIRS_MAX || !bt_rx_row_make(m->rx, q)) {
        return false;
    }
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 64;
        l->v = bt_realloc(l->v, l->cap * sizeof(*l->v));
    }
    l->v[l->n++] = (struct pair){q, s, level};
    l->table[h] = (uint16_t)l->n;
    return true;
}

/* Steps the pair i by all bytes that the slice allows. alive, dead: whether any step is. */
static bool look_step(struct bt_automaton *m, struct look *l, uint32_t i, bool *alive, bool *dead)
{
    struct pair p = l->v[i];
    const uint8_t *map = m->rx->nodes[p.q].row->map;
    if (!bt_rx_work(m->rx, PAIR_WORK)) {
        return false;
    }
    uint8_t done[256] = {0}; /* by class: bits of the slice's states */
    for (uint32_t b = 0; b < 256; b++) {
        uint8_t s = l->steps[p.s][b];
        if (s == BT_SLICE_DEAD || done[map[b]] >> s & 1) {
            continue;
        }
        done[map[b]] |= (uint8_t)(1u << s);
        uint32_t to = bt_rx_next(m->rx, p.q, (uint8_t)b);
        if (to == BT_RX_NONE) {
            *dead = true;
            if (*alive || p.level == 0) {
                return true; /* the answer is known */
            }
            continue;
        }
        l->again |= (to & BT_RX_ENDS) != 0;
        *alive = true;
        if (to == BT_RX_UNKNOWN ||
            !look_add(m, l, to & ~BT_RX_ENDS, s, (uint8_t)(p.level + (s == 0)))) {
            return false;
        }
    }
    return true;
}

/* How many characters of the set q allows in any case: a number; with AT_LEAST: perhaps more;
 * ENDLESS | AT_LEAST: any number. */
static uint32_t slice_cap(struct bt_automaton *m, const struct bt_grammar_vocab *v,
                          enum bt_slice_set set, bt_rx_t q)
{
    uint8_t kinds;
    if (bt_rx_free_chars(m->rx, q, &kinds) >= BT_SLICE_CHARS && kinds & slice_encodings[set]) {
        return BT_SLICE_CHARS | AT_LEAST;
    }
    q = bt_rx_relax(m->rx, q, LEVELS_MAX);
    uint32_t key[4] = {TAG_SLICE, set, q, 0};
    uint32_t known = q == BT_RX_FAILED ? AT_LEAST : bt_memo_get(m, key);
    if (known != UINT32_MAX) {
        return known;
    }
    struct look l = {.steps = v->steps[set], .encodings = slice_encodings[set]};
    bool ok = look_add(m, &l, q, 0, 0), dead = false, alive = false;
    l.again |= bt_rx_nullable(m->rx, q);
    uint32_t level = 0, i = 0;
    for (; ok && i < l.n && l.v[i].level < LEVELS_MAX; i++) {
        if (l.v[i].level != level) {
            if (dead) {
                break;
            }
            level = l.v[i].level;
            alive = false;
        }
        ok = look_step(m, &l, i, &alive, &dead);
        if (dead && (alive || level == 0)) {
            break;
        }
    }
    bool exact = ok && dead && !alive && !l.again && level > 0;
    uint32_t cap = !ok ? 0 : dead ? level : i == l.n ? ENDLESS : LEVELS_MAX;
    cap = !ok ? AT_LEAST : exact ? cap : cap | AT_LEAST;
    for (uint32_t k = 0; ok && k < l.n && l.v[k].level <= (cap & 0xFF); k++) {
        uint32_t of[4] = {TAG_SLICE, set, l.v[k].q, 0};
        uint32_t value = cap == (ENDLESS | AT_LEAST) ? cap : cap - l.v[k].level;
        if (l.v[k].s != 0 || (!exact && k > 0 && (value & 0xFF) < BT_SLICE_CHARS) ||
            bt_memo_get(m, of) != UINT32_MAX) {
            continue; /* worth nothing, or known better */
        }
        (void)bt_memo_put(m, of, value);
    }
    free(l.v);
    return cap;
}

/* The slice that the threads arena[at..at+n) allow; BT_SLICE_SETS: none. */
static enum bt_slice_set choose_slice(struct bt_automaton *m, const struct bt_grammar_vocab *v,
                                      uint32_t at, uint32_t n, uint8_t *chars)
{
    for (uint32_t set = 0; set < BT_SLICE_SETS; set++) {
        for (uint32_t i = 0; i < n && i < 8; i++) {
            uint32_t cap = slice_cap(m, v, (enum bt_slice_set)set, m->arena[at + i].q);
            uint32_t count = cap & 0xFF;
            bool exact = !(cap & AT_LEAST) && n == 1;
            if (count >= BT_SLICE_CHARS || (exact && count > 0)) {
                *chars = (uint8_t)BT_MIN(count, BT_SLICE_CHARS);
                return (enum bt_slice_set)set;
            }
        }
    }
    *chars = 0;
    return BT_SLICE_SETS;
}

/* ---- the walk ---- */

static void add_token(struct bt_mask_cache *c, const struct bt_grammar_vocab *v, uint32_t id)
{
    for (; id != BT_VOCAB_NO_TOKEN; id = v->same[id]) {
        if (c->n_ids == c->ids_cap) {
            c->ids_cap = c->ids_cap ? c->ids_cap * 2 : 1024;
            c->ids = bt_realloc(c->ids, c->ids_cap * sizeof(*c->ids));
        }
        c->ids[c->n_ids++] = id;
    }
}

/* Collects the tokens of the trie that arena[at..at+n) allow. */
static bool walk(struct bt_mask_cache *c, struct bt_automaton *m, const struct bt_grammar_vocab *v,
                 const struct bt_trie *t, uint32_t at, uint32_t n)
{
    struct bt_mask_level *levels = c->levels;
    const struct bt_trie_node *nodes = t->nodes;
    levels[0] = (struct bt_mask_level){at, n};
    for (uint32_t i = 0; i < t->n;) {
        const struct bt_trie_node *node = &nodes[i];
        struct bt_mask_level up = levels[node->depth - 1], *here = &levels[node->depth];
        here->at = up.at + up.n;
        struct bt_thread one = m->arena[up.at];
        if (up.n == 1 && node->byte != BT_RX_MARK && !(one.frame & BT_FRAME_TEXT)) {
            uint32_t to = bt_rx_next(m->rx, one.q, node->byte);
            if (to == BT_RX_NONE) {
                i = node->skip;
                continue;
            }
            if (!(to & BT_RX_ENDS) && here->at < m->arena_cap) {
                here->n = 1;
                m->arena[here->at] = (struct bt_thread){to, one.frame};
                if (node->token != BT_VOCAB_NO_TOKEN) {
                    add_token(c, v, node->token);
                }
                i++;
                continue;
            }
        }
        m->n_arena = here->at;
        here->n = bt_automaton_step(m, up.at, up.n, node->byte);
        if (here->n == UINT32_MAX) {
            return false;
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

/* The mask as it is kept, from c->ids. */
static struct mask *keep(struct bt_mask_cache *c, const struct bt_grammar_vocab *v, uint8_t slice,
                         uint8_t chars)
{
    bool full = c->n_ids > v->words;
    uint32_t n = full ? v->words : c->n_ids;
    struct mask *k = bt_calloc(1, sizeof(*k) + n * sizeof(uint32_t));
    k->bytes = sizeof(*k) + n * sizeof(uint32_t);
    k->slice = slice;
    k->chars = chars;
    k->full = full;
    k->n = n;
    if (full) {
        set_bits(k->ids, c->ids, c->n_ids);
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

/* The state without limits that no token can reach; FAILED: a limit of the automaton. */
static uint32_t relaxed(struct bt_automaton *m, const struct bt_grammar_vocab *v, uint32_t state)
{
    uint32_t n = m->states[state].n, at = bt_automaton_load(m, state);
    bool changed = false;
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

bt_status_t bt_mask_get(struct bt_mask_cache *c, struct bt_automaton *m,
                        const struct bt_grammar_vocab *v, uint32_t state, uint32_t *bits)
{
    if (c->serial != v->serial) {
        bt_mask_drop(c, m);
        c->serial = v->serial;
    }
    if (!m->states[state].mask) {
        state = relaxed(m, v, state);
        if (state == BT_STATE_FAILED) {
            return BT_ERR_EXHAUSTED;
        }
    }
    if (!m->states[state].mask) {
        if (c->n_levels < v->longest + 1) {
            c->n_levels = v->longest + 1;
            c->levels = bt_realloc(c->levels, c->n_levels * sizeof(*c->levels));
        }
        uint32_t at = bt_automaton_load(m, state), n = m->states[state].n;
        if (at == UINT32_MAX) {
            return BT_ERR_EXHAUSTED;
        }
        uint8_t chars;
        enum bt_slice_set set = choose_slice(m, v, at, n, &chars);
        c->n_ids = 0;
        uint32_t frames = m->n_frames;
        bool ok =
            n == 0 || walk(c, m, v, set == BT_SLICE_SETS ? &v->all : &v->slices[set].rest, at, n);
        m->n_arena = at;
        bt_automaton_drop_frames(m, frames); /* those of the walk are in no state */
        if (!ok) {
            return BT_ERR_EXHAUSTED;
        }
        if (c->bytes > c->max_bytes) {
            bt_mask_drop(c, m);
        }
        m->states[state].mask = keep(c, v, (uint8_t)set, chars);
    }
    apply(m->states[state].mask, v, m->states[state].final, bits);
    return BT_OK;
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
}
