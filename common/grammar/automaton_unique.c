/* Arrays of different scalars. The threads of an item carry the item's text in their frames; when
 * the item ends, all texts of the same value are taken out of what later items may be. A set of
 * seen items is their number and the expression of all their texts. */
#include "common/grammar/automaton.h"

#include <stdlib.h>

#define ALIVE_STATES 20000u
#define OWNER        0x8000000u /* of sets; objects have the smaller numbers */
#define TEXT_MAX     (1u << 20)

enum { COUNT, TEXTS, SET_WORDS };

static uint32_t make_set(struct bt_automaton *m, uint32_t count, bt_rx_t texts)
{
    uint32_t *set = bt_seen_room(m, SET_WORDS);
    if (!set || texts == BT_RX_FAILED) {
        return UINT32_MAX;
    }
    set[COUNT] = count;
    set[TEXTS] = texts;
    return bt_seen_intern(m, OWNER, SET_WORDS);
}

bool bt_unique_enter(struct bt_automaton *m, bt_node_t node, uint32_t parent)
{
    uint32_t set = make_set(m, 0, BT_RX_NONE);
    return set != UINT32_MAX && bt_push_thread(m, m->p->uniques[m->p->nodes[node].a].open,
                                               bt_frame(m, node, set, parent));
}

/* What the next item may be. */
static bt_rx_t item_rx(struct bt_automaton *m, const struct bt_unique *u, bt_rx_t texts)
{
    return bt_rx_and(m->rx, u->item, bt_rx_not(m->rx, texts));
}

bool bt_unique_item(struct bt_automaton *m, uint32_t id)
{
    struct bt_frame f = m->frames[id];
    const struct bt_unique *u = &m->p->uniques[m->p->nodes[f.node].a];
    uint32_t count = m->seen[f.payload + COUNT];
    if (count == 0 && u->min == 0 && m->seen[f.payload + TEXTS] == BT_RX_NONE &&
        !bt_push_thread(m, u->close, f.parent)) {
        return false;
    }
    return u->max == 0 || bt_push_thread(m, item_rx(m, u, m->seen[f.payload + TEXTS]),
                                         bt_text_frame(m, f.node, BT_TEXT_BEGIN, id));
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

bool bt_unique_item_done(struct bt_automaton *m, uint32_t text_frame)
{
    uint32_t n, base;
    char *text = bt_frame_text(m, text_frame, &n, &base);
    if (!text) {
        return false;
    }
    struct bt_frame f = m->frames[base];
    const struct bt_unique *u = &m->p->uniques[m->p->nodes[f.node].a];
    bt_rx_t texts = bt_rx_or(m->rx, m->seen[f.payload + TEXTS], u->spellings(m->rx, text, n));
    free(text);
    uint32_t count = m->seen[f.payload + COUNT] + 1;
    bool more = count < u->max, none = true;
    if (u->max == BT_RX_NO_MAX) { /* more than the minimum is as good as the minimum */
        count = BT_MIN(count, u->min);
    }
    if (more && bt_rx_is_none(m->rx, item_rx(m, u, texts), ALIVE_STATES, &none) != BT_OK) {
        return false;
    }
    uint32_t set = make_set(m, count, texts);
    return set != UINT32_MAX && (count < u->min || bt_push_thread(m, u->close, f.parent)) &&
           (none || bt_push_thread(m, u->comma, bt_frame(m, f.node, set, f.parent)));
}
