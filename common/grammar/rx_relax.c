/* Limits that are far away. A string of at most 1,000 characters has a state for each character,
 * but as long as no token can reach the limit, all of them allow the same tokens. */
#include "common/grammar/rx_priv.h"

/* Whether a is characters of an encoding with an upper limit of at least `least`. */
static bool has_limit(const struct bt_rx_set *s, bt_rx_t a, uint64_t least)
{
    const struct bt_rx_node *n = &s->nodes[a];
    return n->kind == BT_RX_K_REPEAT && n->c != BT_RX_NO_MAX && n->c >= least &&
           (n->a == s->all_chars[BT_RX_UTF8] || n->a == s->all_chars[BT_RX_JSON_STRING]);
}

/* One part of a sequence; BT_RX_NONE: it stays as it is.
 *
 * x and C{0,n}, where C is a character: behind a text of k bytes of x at most k characters are used
 * up, and the rest of x can end within `need` bytes, so within as many characters. So nothing that
 * x allows is cut off if n >= bytes + need. */
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
            x = bt_rx_repeat(s, s->nodes[x].a, 0, BT_RX_NO_MAX); /* goes if x has characters only */
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

/* Of an alternative: all characters, before something that can end. */
static uint8_t free_part(const struct bt_rx_set *s, bt_rx_t a)
{
    const struct bt_rx_node *n = &s->nodes[a];
    return n->kind == BT_RX_K_CONCAT && s->nodes[n->b].flags & BT_RX_F_POSITIVE
               ? bt_rx_universe(s, &s->nodes[n->a])
               : bt_rx_universe(s, n);
}

uint8_t bt_rx_begins_free(const struct bt_rx_set *s, bt_rx_t a)
{
    const struct bt_rx_node *n = &s->nodes[a];
    uint8_t r = free_part(s, a);
    if (n->kind == BT_RX_K_CONCAT && s->nodes[n->b].flags & BT_RX_F_POSITIVE) {
        n = &s->nodes[n->a];
    }
    for (uint32_t i = 0; n->kind == BT_RX_K_OR && i < n->b; i++) {
        r |= free_part(s, s->lists[n->a + i]);
    }
    return r;
}
