/* Removes limits that are far away. A string of at most 1,000 characters has a state for each
 * character. As long as no token can reach the limit, all these states allow the same tokens. */
#include "common/grammar/rx_priv.h"

/* Returns whether a is characters of an encoding with an upper limit of `least` or more. */
static bool has_limit(const struct bt_rx_set *s, bt_rx_t a, uint64_t least)
{
    const struct bt_rx_node *n = &s->nodes[a];
    return n->kind == BT_RX_K_REPEAT && n->c != BT_RX_NO_MAX && n->c >= least &&
           (n->a == s->all_chars[BT_RX_UTF8] || n->a == s->all_chars[BT_RX_JSON_STRING]);
}

/* Removes the upper limit from one part of a sequence. BT_RX_NONE: the part must stay as it is.
 *
 * Where the part is "x and C{0,n}" for any character C: k bytes of x use at most k characters.
 * After them x can end within `need` bytes, which are at most as many characters. So if n >= bytes
 * + need, the limit n excludes nothing that x allows. */
static bt_rx_t relax_part(struct bt_rx_set *s, bt_rx_t a, uint32_t bytes)
{
    struct bt_rx_node n = s->nodes[a];
    if (has_limit(s, a, (uint64_t)bytes + n.b)) {
        return bt_rx_repeat(s, n.a, n.b, BT_RX_NO_MAX);
    }
    if (n.kind != BT_RX_K_AND) {
        return BT_RX_NONE;
    }
    uint32_t base = s->n_scratch, limit = 0;
    for (uint32_t i = 0; i < n.b; i++) {
        bt_rx_t x = s->lists[n.a + i];
        if (limit == 0 && has_limit(s, x, bytes) && s->nodes[x].b == 0) {
            limit = s->nodes[x].c;
            /* bt_rx_and drops this if x consists of characters */
            x = bt_rx_repeat(s, s->nodes[x].a, 0, BT_RX_NO_MAX);
        }
        if (!bt_rx_push(s, x)) {
            s->n_scratch = base;
            return BT_RX_FAILED;
        }
    }
    bt_rx_t r = limit ? bt_rx_and_scratch(s, base) : BT_RX_NONE;
    s->n_scratch = base;
    if (r == BT_RX_FAILED || r == BT_RX_NONE) {
        return r;
    }
    bool free = s->nodes[r].flags & BT_RX_F_POSITIVE && (uint64_t)s->nodes[r].need + bytes <= limit;
    return free ? r : BT_RX_NONE;
}

bt_rx_t bt_rx_relax(struct bt_rx_set *s, bt_rx_t a, uint32_t bytes)
{
    struct bt_rx_node n = s->nodes[a];
    bool chain = n.kind == BT_RX_K_CONCAT;
    bt_rx_t part = relax_part(s, chain ? n.a : a, bytes);
    if (part == BT_RX_NONE || part == BT_RX_FAILED) {
        return part == BT_RX_NONE ? a : part;
    }
    return chain ? bt_rx_concat(s, part, n.b) : part;
}

/* Returns whether the node is any lo to hi characters of an encoding. */
static bool is_chars(const struct bt_rx_set *s, const struct bt_rx_node *n, uint8_t *encodings)
{
    *encodings = 0;
    for (int e = 0; e < 2 && n->kind == BT_RX_K_REPEAT && n->a != BT_RX_NONE; e++) {
        *encodings |= n->a == s->all_chars[e] ? BT_RX_F_CHARS << e : 0;
    }
    return *encodings != 0;
}

#define MANY 4 /* so many characters can spell more texts than an array can have items */

/* For an And of three kinds of members: an expression that begins freely, limits on the number of
 * characters, and finitely many excluded texts. A text may begin freely as long as enough
 * characters are left to end it in a way that is not excluded. */
static int64_t free_and(const struct bt_rx_set *s, const struct bt_rx_node *n, uint8_t *encodings)
{
    int64_t limit = BT_RX_FREE, used = 0;
    bool beginning = false;
    *encodings = BT_RX_F_CHARS_ALL;
    for (uint32_t i = 0; i < n->b; i++) {
        bt_rx_t id = s->lists[n->a + i];
        const struct bt_rx_node *x = &s->nodes[id];
        uint8_t e;
        if (x->kind == BT_RX_K_NOT && s->nodes[x->a].flags & BT_RX_F_FINITE) {
            used += MANY;
            continue;
        }
        if (is_chars(s, x, &e)) {
            limit = x->c == BT_RX_NO_MAX ? limit : BT_MIN(limit, (int64_t)x->c);
            used += x->b;
        } else if (!beginning && x->flags & BT_RX_F_POSITIVE &&
                   bt_rx_free_chars(s, id, &e) == BT_RX_FREE) {
            beginning = true;
            used += x->need;
        } else {
            return -1;
        }
        *encodings &= e;
    }
    if (*encodings == 0) {
        return -1;
    }
    return limit == BT_RX_FREE ? limit : BT_MAX(limit - used, (int64_t)-1);
}

int64_t bt_rx_free_chars(const struct bt_rx_set *s, bt_rx_t a, uint8_t *encodings)
{
    const struct bt_rx_node *n = &s->nodes[a];
    if (n->kind == BT_RX_K_CONCAT && s->nodes[n->b].flags & BT_RX_F_POSITIVE) {
        n = &s->nodes[n->a];
    }
    if (is_chars(s, n, encodings)) {
        return n->c == BT_RX_NO_MAX ? BT_RX_FREE : n->c;
    }
    if (n->kind == BT_RX_K_AND) {
        return free_and(s, n, encodings);
    }
    for (uint32_t i = 0; n->kind == BT_RX_K_OR && i < n->b; i++) {
        const struct bt_rx_node *x = &s->nodes[s->lists[n->a + i]];
        if (x->kind == BT_RX_K_CONCAT && s->nodes[x->b].flags & BT_RX_F_POSITIVE) {
            x = &s->nodes[x->a];
        }
        if (is_chars(s, x, encodings) && x->c == BT_RX_NO_MAX) {
            return BT_RX_FREE;
        }
    }
    return -1;
}
