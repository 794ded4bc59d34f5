/* Which slice a state allows: follows all texts over a slice's characters and the state's
 * expression side by side. See slice.h. */
#include "common/grammar/slice.h"

#include <stdlib.h>

#define LEVELS_MAX 48u  /* a slice's test looks this many characters ahead */
#define PAIRS_MAX  768u /* a slice's test visits this many pairs of states */
#define LOOK_TABLE 8192u
#define PAIR_WORK  50u /* bt_rx_set_budget for the 256 bytes that may follow a pair */
#define TAG_SLICE  0x50000000u
#define TAG_HOLES  0x51000000u /* + number of the part; the parts have 24 characters each */
#define NO_HOLES   (1u << 31)  /* flag of the first part */
#define HOLES_MAX  32u         /* few tokens lack more characters than this */
#define LETTER     11u         /* a letter counts as this many: most tokens have a few */
#define ROUNDS     12u         /* each finds a class of characters that the expression forbids */
#define AT_LEAST   0x100u /* flag of a cap: this many characters are allowed, and perhaps more */
#define ENDLESS    0xFFu

/* For each set of characters, the encodings that allow every text over the set. Plain characters of
 * a JSON string are text in both encodings. */
static const uint8_t slice_encodings[BT_SLICE_SETS] = {
    [BT_SLICE_TEXT] = BT_RX_F_CHARS << BT_RX_UTF8, [BT_SLICE_NO_TAG] = BT_RX_F_CHARS << BT_RX_UTF8,
    [BT_SLICE_JSON] = BT_RX_F_CHARS_ALL,           [BT_SLICE_LINE] = BT_RX_F_CHARS_ALL,
    [BT_SLICE_BELOW_EF] = BT_RX_F_CHARS_ALL,       [BT_SLICE_GRAPHIC] = BT_RX_F_CHARS_ALL,
    [BT_SLICE_ASCII] = BT_RX_F_CHARS_ALL,          [BT_SLICE_ALPHA_SPACE] = BT_RX_F_CHARS_ALL,
    [BT_SLICE_ALNUM] = BT_RX_F_CHARS_ALL,          [BT_SLICE_ALPHA] = BT_RX_F_CHARS_ALL,
    [BT_SLICE_LOWER] = BT_RX_F_CHARS_ALL};

struct pair { /* a state of an expression and one of the slice's automaton */
    bt_rx_t q;
    uint8_t s, level;
};
struct look { /* the pairs, in the order of the number of characters that lead to them */
    struct pair *v;
    uint32_t n, cap;
    uint16_t table[LOOK_TABLE];  /* 1 + the number of a pair; open addressing */
    const uint8_t (*steps)[256]; /* the slice's automaton */
    uint8_t encodings;
    bool again; /* a pair was met again at a later level, or an expression may end */
};

static bool look_add(struct bt_automaton *m, struct look *l, bt_rx_t q, uint8_t s, uint8_t level)
{
    uint8_t kinds;
    if (s == 0 && bt_rx_free_chars(m->rx, q, &kinds) >= LEVELS_MAX && kinds & l->encodings) {
        l->again = true; /* anything may follow, so the test is over */
        return true;
    }
    /* limits that are further away than the test looks do not matter */
    q = s == 0 ? bt_rx_relax(m->rx, q, LEVELS_MAX) : q;
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

/* Moves pair i on by all bytes that the slice allows. alive, dead: whether some byte can be
 * followed, and whether some byte cannot. */
static bool look_step(struct bt_automaton *m, struct look *l, uint32_t i, bool *alive, bool *dead)
{
    struct pair p = l->v[i];
    const uint8_t *map = m->rx->nodes[p.q].row->map;
    if (!bt_rx_work(m->rx, PAIR_WORK)) {
        return false;
    }
    /* by class of byte: a bit for each state of the slice that was tried */
    uint16_t done[256] = {0};
    for (uint32_t b = 0; b < 256; b++) {
        uint8_t s = l->steps[p.s][b];
        if (s == BT_SLICE_DEAD || done[map[b]] >> s & 1) {
            continue;
        }
        done[map[b]] |= (uint16_t)(1u << s);
        uint32_t to = bt_rx_next(m->rx, p.q, (uint8_t)b);
        if (to == BT_RX_NONE) {
            *dead = true;
            if (*alive || p.level == 0) {
                return true; /* both answers are known */
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

/* How many characters of the set q allows, whatever they are. The result is a number, plus the flag
 * AT_LEAST if q may allow more. ENDLESS | AT_LEAST: any number. */
static uint32_t slice_cap(struct bt_automaton *m, const struct bt_grammar_vocab *v,
                          enum bt_slice_set set, bt_rx_t q)
{
    uint8_t kinds;
    if (bt_rx_free_chars(m->rx, q, &kinds) >= BT_SLICE_CHARS && kinds & slice_encodings[set]) {
        return LEVELS_MAX | AT_LEAST; /* more than choose_whole needs */
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
            continue; /* this cap is of no use, or a better one is known */
        }
        (void)bt_memo_put(m, of, value);
    }
    free(l.v);
    return cap;
}

/* ---- slices with holes ---- */

enum { FOLLOWS_ALL = -1, GIVES_UP = -2 };

/* A byte that q does not allow after some text over the slice of l; map_p: its class is that of
 * this partition. FOLLOWS_ALL: there is none. Other characters than ASCII come first, because
 * without them nothing is gained. */
static int first_dead(struct bt_automaton *m, struct look *l, bt_rx_t q, const uint8_t **map_p)
{
    bool ok = look_add(m, l, q, 0, 0);
    for (uint32_t i = 0; ok && i < l->n && l->v[i].level < BT_SLICE_CHARS; i++) {
        struct pair p = l->v[i];
        const uint8_t *map = *map_p = m->rx->nodes[p.q].row->map;
        uint16_t done[256] = {0};
        ok = bt_rx_work(m->rx, PAIR_WORK);
        for (uint32_t b = 256; ok && b-- > 0;) {
            uint8_t s = l->steps[p.s][b];
            if (s == BT_SLICE_DEAD || done[map[b]] >> s & 1) {
                continue;
            }
            done[map[b]] |= (uint16_t)(1u << s);
            uint32_t to = bt_rx_next(m->rx, p.q, (uint8_t)b);
            if (to == BT_RX_NONE) {
                return b < 0x80 ? (int)b : GIVES_UP;
            }
            ok = to != BT_RX_UNKNOWN &&
                 look_add(m, l, to & ~BT_RX_ENDS, s, (uint8_t)(p.level + (s == 0)));
        }
    }
    return ok ? FOLLOWS_ALL : GIVES_UP;
}

/* Finds a few ASCII characters without which q allows any text over the set. */
static bool search_holes(struct bt_automaton *m, const struct bt_grammar_vocab *v,
                         enum bt_slice_set set, bt_rx_t q, uint64_t holes[2])
{
    uint8_t steps[BT_SLICE_STATES][256];
    uint32_t n = 0;
    memcpy(steps, v->steps[set], sizeof(steps));
    holes[0] = holes[1] = 0;
    for (uint32_t round = 0; round < ROUNDS && n <= HOLES_MAX; round++) {
        struct look l = {.steps = (const uint8_t(*)[256])steps, .encodings = slice_encodings[set]};
        const uint8_t *map = NULL;
        int dead = first_dead(m, &l, q, &map);
        free(l.v);
        if (dead < 0) {
            return dead == FOLLOWS_ALL && n > 0;
        }
        for (uint32_t c = ' '; c < 0x80; c++) { /* all that the expression does not tell apart */
            if (steps[0][c] == 0 && map[c] == map[dead]) {
                steps[0][c] = BT_SLICE_DEAD;
                bool letter = (c | 32) >= 'a' && (c | 32) <= 'z';
                holes[c >> 6] |= 1ull << (c & 63);
                n += letter ? LETTER : 1;
            }
        }
    }
    return false;
}

static bool find_holes(struct bt_automaton *m, const struct bt_grammar_vocab *v,
                       enum bt_slice_set set, bt_rx_t q, uint64_t holes[2])
{
    q = bt_rx_relax(m->rx, q, LEVELS_MAX);
    uint32_t key[4] = {TAG_HOLES, set, q, 0}, part[4] = {0};
    part[0] = q == BT_RX_FAILED ? NO_HOLES : bt_memo_get(m, key);
    if (part[0] != UINT32_MAX) {
        holes[0] = holes[1] = 0;
        for (uint32_t i = 0; i < 4 && !(part[0] & NO_HOLES); i++) {
            key[0] = TAG_HOLES + i;
            part[i] = bt_memo_get(m, key);
            for (uint32_t k = 0; k < 24; k++) {
                uint32_t c = ' ' + 24 * i + k;
                holes[c >> 6] |= (uint64_t)(part[i] >> k & 1) << (c & 63);
            }
        }
        return !(part[0] & NO_HOLES);
    }
    bool found = search_holes(m, v, set, q, holes);
    for (uint32_t c = ' '; c < 0x80; c++) {
        part[(c - ' ') / 24] |= (uint32_t)(holes[c >> 6] >> (c & 63) & 1) << (c - ' ') % 24;
    }
    for (uint32_t i = found ? 4 : 1;
         i-- > 0;) { /* the first part last: it says that all are there */
        key[0] = TAG_HOLES + i;
        if (!bt_memo_put(m, key, found ? part[i] : NO_HOLES)) {
            break;
        }
    }
    return found;
}

/* ---- the choice ---- */

/* Whether some thread's test of an item may depend on the items before it. */
static bool tests_items(const struct bt_automaton *m)
{
    return m->reader != 0 && m->reader != (BT_READER_ANY | BT_READER_OUT);
}

/* The first of the sets from..to that some thread allows. Where an item must differ from earlier
 * ones, the slice must allow a few more characters, with which the item can become different. */
static bool choose_whole(struct bt_automaton *m, const struct bt_grammar_vocab *v, uint32_t at,
                         uint32_t n, uint32_t from, uint32_t to, struct bt_slice_choice *choice)
{
    bool tests = tests_items(m);
    for (uint32_t set = from; set < to; set++) {
        for (uint32_t i = 0; i < n && i < 8; i++) {
            uint32_t cap = slice_cap(m, v, (enum bt_slice_set)set, m->arena[at + i].q);
            uint32_t count = cap & 0xFF;
            bool exact = !(cap & AT_LEAST) && n == 1;
            if (tests ? count > BT_SLICE_CHARS + 8
                      : count >= BT_SLICE_CHARS || (exact && count > 0)) {
                choice->set = (uint8_t)set;
                choice->chars = (uint8_t)BT_MIN(count, BT_SLICE_CHARS);
                return true;
            }
        }
    }
    return false;
}

static bool choose_with_holes(struct bt_automaton *m, const struct bt_grammar_vocab *v, uint32_t at,
                              uint32_t n, struct bt_slice_choice *choice)
{
    static const enum bt_slice_set sets[] = {BT_SLICE_LINE, BT_SLICE_GRAPHIC};
    for (uint32_t k = 0; k < BT_ARRAY_LEN(sets) && !tests_items(m); k++) {
        for (uint32_t i = 0; i < n && i < 8; i++) {
            if (find_holes(m, v, sets[k], m->arena[at + i].q, choice->holes)) {
                choice->set = (uint8_t)sets[k];
                choice->chars = BT_SLICE_CHARS;
                return true;
            }
        }
    }
    choice->holes[0] = choice->holes[1] = 0;
    return false;
}

void bt_slice_choose(struct bt_automaton *m, const struct bt_grammar_vocab *v, uint32_t at,
                     uint32_t n, struct bt_slice_choice *choice)
{
    *choice = (struct bt_slice_choice){.set = BT_SLICE_SETS};
    (void)(choose_whole(m, v, at, n, 0, BT_SLICE_GRAPHIC + 1, choice) ||
           choose_with_holes(m, v, at, n, choice) ||
           choose_whole(m, v, at, n, BT_SLICE_GRAPHIC + 1, BT_SLICE_SETS, choice));
}

void bt_slice_bits(const struct bt_grammar_vocab *v, const struct bt_slice_choice *choice,
                   uint32_t *bits)
{
    const uint32_t *slice = v->slices[choice->set].bits[choice->chars];
    uint32_t *without = bt_malloc(v->words * sizeof(*without));
    bt_copy(without, slice, v->words * sizeof(*without));
    for (uint32_t c = ' '; c < 0x80; c++) {
        for (uint32_t i = 0; choice->holes[c >> 6] >> (c & 63) & 1 && i < v->words; i++) {
            without[i] &= ~v->has[c][i];
        }
    }
    for (uint32_t i = 0; i < v->words; i++) {
        bits[i] |= without[i];
    }
    free(without);
}

uint64_t bt_slice_walked(const struct bt_slice_choice *choice)
{
    uint64_t walked = choice->set == BT_SLICE_LINE ? BT_SEEN_NO_LINE : BT_SEEN_NO_GRAPHIC;
    for (uint32_t c = ' '; c < 0x80; c++) {
        walked |= choice->holes[c >> 6] >> (c & 63) & 1 ? bt_seen_bit((uint8_t)c) : 0;
    }
    return walked;
}
