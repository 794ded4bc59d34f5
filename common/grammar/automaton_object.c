/* Objects: which keys were seen, and what may come before the next value. All keys that are left
 * are one expression, in which each key ends with the marker of its number. Expressions of
 * ranges of keys are kept, so that a seen key changes only those ranges that contain it. */
#include <stdlib.h>

#include "common/base/map.h"
#include "common/grammar/automaton.h"

#define TEXT_MAX (1u << 20)

enum tag {
    TAG_SEEN = 0x10000000,
    TAG_KEYS = 0x20000000,
    TAG_FIRST = 0x30000000,
    TAG_NEXT = 0x40000000
};

static uint32_t *seen_at(struct bt_automaton *m, uint32_t seen)
{
    return m->seen + seen;
}

/* Takes room for a set at the end; the caller fills it in. */
uint32_t *bt_seen_room(struct bt_automaton *m, uint32_t words)
{
    while (m->n_seen + words > m->seen_cap) {
        if (!bt_automaton_grow(m, &m->seen, m->seen_cap, &m->seen_cap, sizeof(uint32_t))) {
            return NULL;
        }
    }
    return m->seen + m->n_seen;
}

/* Returns the number of the set at the end. If an equal set is there already, returns its number
 * and drops the new one. */
uint32_t bt_seen_intern(struct bt_automaton *m, uint32_t owner, uint32_t words)
{
    uint32_t *set = m->seen + m->n_seen;
    uint64_t h = bt_hash64(set, words * sizeof(uint32_t), owner);
    for (uint32_t probe = 0;; probe++) {
        uint32_t key[4] = {TAG_SEEN + owner, (uint32_t)h, (uint32_t)(h >> 32), probe};
        uint32_t old = bt_memo_get(m, key);
        if (old == UINT32_MAX) {
            if (!bt_memo_put(m, key, m->n_seen)) {
                return UINT32_MAX;
            }
            m->n_seen += words;
            return m->n_seen - words;
        }
        if (memcmp(m->seen + old, set, words * sizeof(uint32_t)) == 0) {
            return old;
        }
    }
}

/* A set is: the number of properties, one bit for each declared property, the spellings of the
 * others. */
static uint32_t set_words(const struct bt_object *o)
{
    return 1 + o->words + o->distinct;
}

uint32_t bt_seen_first(struct bt_automaton *m, uint32_t object)
{
    uint32_t words = set_words(&m->p->objects[object]), *set = bt_seen_room(m, words);
    if (!set) {
        return UINT32_MAX;
    }
    memset(set, 0, words * sizeof(uint32_t));
    return bt_seen_intern(m, object, words);
}

uint32_t bt_seen_add(struct bt_automaton *m, uint32_t object, uint32_t seen, uint32_t key,
                     bt_rx_t name)
{
    const struct bt_object *o = &m->p->objects[object];
    uint32_t words = set_words(o), *set = bt_seen_room(m, words);
    if (!set) {
        return UINT32_MAX;
    }
    memcpy(set, seen_at(m, seen), words * sizeof(uint32_t));
    set[0]++;
    /* a number above the minimum has the same meaning as the minimum */
    if (o->max == BT_RX_NO_MAX) {
        set[0] = BT_MIN(set[0], o->min);
    }
    if (key < o->n_props) {
        set[1 + (key >> 5)] |= 1u << (key & 31);
    }
    if (o->distinct) {
        set[1 + o->words] = bt_rx_or(m->rx, set[1 + o->words], name);
        if (set[1 + o->words] == BT_RX_FAILED) {
            return UINT32_MAX;
        }
    }
    return bt_seen_intern(m, object, words);
}

/* The expression of the keys lo..lo+size of one word that are not in bits. */
static bt_rx_t keys_of(struct bt_automaton *m, uint32_t object, uint32_t lo, uint32_t size,
                       uint32_t bits)
{
    const struct bt_object *o = &m->p->objects[object];
    uint32_t all = size == 32 ? UINT32_MAX : (1u << size) - 1;
    if (lo >= o->n_props || (bits & all) == all) {
        return BT_RX_NONE;
    }
    if (size == 1) {
        return o->keys[lo].rx;
    }
    uint32_t key[4] = {TAG_KEYS + object, lo, size, bits & all};
    uint32_t r = bt_memo_get(m, key);
    if (r != UINT32_MAX) {
        return r;
    }
    uint32_t half = size / 2;
    bt_rx_t a = keys_of(m, object, lo, half, bits);
    bt_rx_t b = keys_of(m, object, lo + half, half, bits >> half);
    r = bt_rx_or(m->rx, a, b);
    return r == BT_RX_FAILED || !bt_memo_put(m, key, r) ? BT_RX_FAILED : r;
}

/* The expression of the keys that may come next: all of them, or the required ones only. */
static bt_rx_t keys_left(struct bt_automaton *m, uint32_t object, const uint32_t *set,
                         bool required)
{
    const struct bt_object *o = &m->p->objects[object];
    uint32_t base = m->rx->n_scratch;
    for (uint32_t w = 0; w * 32 < o->n_props; w++) {
        uint32_t out = set[1 + w] | (required ? o->optional[w] : 0);
        if (!bt_rx_push(m->rx, keys_of(m, object, w * 32, 32, out))) {
            m->rx->n_scratch = base;
            return BT_RX_FAILED;
        }
    }
    for (uint32_t i = o->n_props; i < o->n_props + o->n_patterns && !required; i++) {
        bt_rx_t rx = o->keys[i].rx;
        if (o->distinct && set[1 + o->words] != BT_RX_NONE) {
            bt_rx_t name = bt_rx_not(m->rx, set[1 + o->words]);
            rx = bt_rx_concat(m->rx, bt_rx_and(m->rx, o->keys[i].name, name), o->keys[i].tail);
        }
        if (!bt_rx_push(m->rx, rx)) {
            m->rx->n_scratch = base;
            return BT_RX_FAILED;
        }
    }
    return bt_rx_or_scratch(m->rx, base);
}

static uint32_t missing(const struct bt_object *o, const uint32_t *set)
{
    uint32_t n = o->n_required;
    for (uint32_t w = 0; w < o->words; w++) {
        n -= (uint32_t)__builtin_popcount(set[1 + w] & ~o->optional[w]);
    }
    return n;
}

bt_rx_t bt_object_rx(struct bt_automaton *m, uint32_t object, uint32_t seen, bool first)
{
    const struct bt_object *o = &m->p->objects[object];
    struct bt_rx_set *s = m->rx;
    uint32_t key[4] = {(first ? TAG_FIRST : TAG_NEXT) + object, seen, 0, 0};
    uint32_t r = bt_memo_get(m, key);
    if (r != UINT32_MAX) {
        return r;
    }
    const uint32_t *set = seen_at(m, seen);
    uint32_t required = missing(o, set), count = set[0];
    bool close = required == 0 && count >= o->min, more = count < o->max;
    bt_rx_t keys = BT_RX_NONE;
    if (more) {
        keys = keys_left(m, object, set, o->max != BT_RX_NO_MAX && count + required >= o->max);
        keys = first ? bt_rx_concat(s, bt_rx_text(s, "\"", 1), keys)
                     : bt_rx_concat(s, o->blank, bt_rx_concat(s, o->comma, keys));
    }
    bt_rx_t end = first ? o->close : bt_rx_concat(s, o->space, o->close);
    r = close ? bt_rx_or(s, end, keys) : keys;
    r = first ? bt_rx_concat(s, o->open, r) : r;
    if (r == BT_RX_FAILED || r == BT_RX_NONE || !bt_memo_put(m, key, r)) {
        m->full = true;
        return BT_RX_FAILED;
    }
    return r;
}

uint32_t bt_object_frame(struct bt_automaton *m, bt_node_t node, uint32_t seen, uint32_t parent)
{
    uint32_t f = bt_frame(m, node, seen * 2, parent);
    if (f == UINT32_MAX || !m->p->objects[m->p->nodes[node].a].distinct) {
        return f;
    }
    return bt_text_frame(m, node, BT_TEXT_BEGIN, f);
}

char *bt_frame_text(struct bt_automaton *m, uint32_t frame, uint32_t *n_p, uint32_t *base_p)
{
    uint32_t n = 0, at = frame;
    for (; bt_frame_at(m, at)->payload != BT_TEXT_BEGIN; at = bt_frame_at(m, at)->parent) {
        n++;
    }
    if (n > TEXT_MAX || !bt_rx_work(m->rx, n)) {
        return NULL;
    }
    *base_p = bt_frame_at(m, at)->parent;
    *n_p = n;
    char *text = bt_malloc(n + 1);
    for (at = frame; n > 0; at = bt_frame_at(m, at)->parent) {
        text[--n] = (char)bt_frame_at(m, at)->payload;
    }
    return text;
}

/* The code unit of four hexadecimal digits. */
static uint32_t unit(const char *p)
{
    uint32_t u = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t d = (uint8_t)p[i];
        u = u << 4 | (d <= '9' ? d - '0' : (d | 32) - 'a' + 10);
    }
    return u;
}

static size_t put_char(char *out, uint32_t c)
{
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n; i-- > 1; c >>= 6) {
        out[i] = (char)(0x80 | (c & 63));
    }
    out[0] = (char)(lead[n] | c);
    return n;
}

bt_rx_t bt_object_name(struct bt_automaton *m, const char *text, uint32_t n)
{
    static const char letters[] = "bfnrt", controls[] = "\b\f\n\r\t";
    char *name = bt_malloc(n + 4);
    size_t len = 0;
    const char *p = memchr(text, '"', n), *end = text + n;
    for (p = p ? p + 1 : end; p < end && *p != '"'; p++) {
        const char *letter;
        if (*p != '\\') {
            name[len++] = *p;
        } else if (*++p != 'u') {
            letter = strchr(letters, *p);
            name[len++] = letter ? controls[letter - letters] : *p;
        } else { /* complete escapes and pairs only: the automaton lets nothing else through */
            uint32_t c = unit(p + 1);
            p += 4;
            if (c >= 0xD800 && c < 0xDC00) {
                c = 0x10000 + ((c & 0x3FF) << 10) + (unit(p + 3) & 0x3FF);
                p += 6;
            }
            len += put_char(name + len, c);
        }
    }
    bt_rx_t rx = bt_program_spelled(m->rx, name, len, BT_RX_EMPTY);
    free(name);
    return rx;
}
