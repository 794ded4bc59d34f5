/* The analysis at the end of building: which nodes can produce a text, which can produce the
 * empty text, repeats of items that may be empty, and left recursion. The automaton enters only
 * nodes that can produce a text, so each of its threads can end. */
#include <stdio.h>
#include <stdlib.h>

#include "common/grammar/program_priv.h"
#include "common/grammar/rx_priv.h"

/* ---- a flag by its least fixed point ---- */

/* Returns whether an object can have as many properties as it must, given the flags so far. */
static bool object_productive(const struct bt_program *p, const struct bt_object *o)
{
    uint64_t available = 0;
    for (uint32_t i = 0; i < o->n_props + o->n_patterns; i++) {
        const struct bt_object_key *k = &o->keys[i];
        if (!bt_node_is(p, k->value, BT_NODE_F_PRODUCTIVE)) {
            if (k->required) {
                return false;
            }
        } else {
            available += k->pattern ? UINT32_MAX : 1;
        }
    }
    return o->n_required <= o->max && o->min <= available;
}

/* Returns whether the node has the flag, given the flags of its parts. */
static bool has_flag(const struct bt_program *p, const struct bt_node *n, uint8_t flag)
{
    switch ((enum bt_node_kind)n->kind) {
    case BT_NODE_K_NONE: return false;
    case BT_NODE_K_EMPTY: return true;
    case BT_NODE_K_RX: return flag == BT_NODE_F_PRODUCTIVE || bt_rx_nullable(p->rx, n->a);
    case BT_NODE_K_SEQ:
    case BT_NODE_K_ALT:
        for (uint32_t i = 0; i < n->b; i++) {
            if (bt_node_is(p, p->lists[n->a + i], flag) == (n->kind == BT_NODE_K_ALT)) {
                return n->kind == BT_NODE_K_ALT;
            }
        }
        return n->kind == BT_NODE_K_SEQ;
    case BT_NODE_K_REPEAT:
        return n->c == 0 || (bt_node_is(p, n->a, flag) && (n->c == 1 || bt_node_is(p, n->b, flag)));
    case BT_NODE_K_OBJECT:
        return flag == BT_NODE_F_PRODUCTIVE && object_productive(p, &p->objects[n->a]);
    case BT_NODE_K_DISTINCT:
    case BT_NODE_K_ITEM:
    case BT_NODE_K_RULE: return bt_node_is(p, n->a, flag);
    }
    return false;
}

/* Calls fn for each part of the node. */
typedef void (*child_fn)(void *arg, bt_node_t parent, bt_node_t child);
static void children(const struct bt_program *p, bt_node_t id, child_fn fn, void *arg)
{
    const struct bt_node *n = &p->nodes[id];
    switch ((enum bt_node_kind)n->kind) {
    case BT_NODE_K_SEQ:
    case BT_NODE_K_ALT:
        for (uint32_t i = 0; i < n->b; i++) {
            fn(arg, id, p->lists[n->a + i]);
        }
        break;
    case BT_NODE_K_REPEAT:
        fn(arg, id, n->b);
        fn(arg, id, n->a);
        break;
    case BT_NODE_K_DISTINCT:
    case BT_NODE_K_ITEM:
    case BT_NODE_K_RULE: fn(arg, id, n->a); break;
    case BT_NODE_K_OBJECT: {
        const struct bt_object *o = &p->objects[n->a];
        for (uint32_t i = 0; i < o->n_props + o->n_patterns; i++) {
            fn(arg, id, o->keys[i].value);
        }
        break;
    }
    case BT_NODE_K_NONE:
    case BT_NODE_K_EMPTY:
    case BT_NODE_K_RX: break;
    }
}

struct users { /* the nodes that have node n as a part: list[first[n]..first[n+1]) */
    uint32_t *first, *list;
    uint64_t n;
};

static void count_user(void *arg, bt_node_t parent, bt_node_t child)
{
    struct users *u = arg;
    (void)parent;
    u->first[child + 1]++;
    u->n++;
}

static void add_user(void *arg, bt_node_t parent, bt_node_t child)
{
    struct users *u = arg;
    u->list[u->first[child]++] = parent;
}

static bool make_users(struct bt_program *p, struct users *u)
{
    *u = (struct users){.first = bt_calloc(p->n_nodes + 2, sizeof(uint32_t))};
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        children(p, i, count_user, u);
    }
    if (u->n * sizeof(uint32_t) > p->max_bytes) {
        free(u->first);
        return false;
    }
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        u->first[i + 1] += u->first[i];
    }
    u->list = bt_malloc((u->n + 1) * sizeof(uint32_t));
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        children(p, i, add_user, u);
    }
    /* adding has moved each first[n] to the end of its range */
    memmove(u->first + 1, u->first, p->n_nodes * sizeof(uint32_t));
    u->first[0] = 0;
    return true;
}

/* Sets the flag on all nodes that have it. Visits a node once for each of its parts. */
static bool spread(struct bt_program *p, const struct users *u, uint8_t flag)
{
    uint32_t *todo = bt_malloc((p->n_nodes + 1) * sizeof(uint32_t)), n = 0;
    uint64_t work = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        p->nodes[i].flags &= (uint8_t)~flag;
    }
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        if (has_flag(p, &p->nodes[i], flag)) {
            p->nodes[i].flags |= flag;
            todo[n++] = i;
        }
    }
    bool ok = true;
    while (n > 0 && ok) {
        uint32_t x = todo[--n];
        for (uint32_t i = u->first[x]; i < u->first[x + 1]; i++) {
            struct bt_node *parent = &p->nodes[u->list[i]];
            work +=
                1 + (parent->kind == BT_NODE_K_SEQ || parent->kind == BT_NODE_K_ALT ? parent->b / 8
                     : parent->kind == BT_NODE_K_OBJECT ? p->objects[parent->a].n_props
                                                        : 0);
            if (!(parent->flags & flag) && has_flag(p, parent, flag)) {
                parent->flags |= flag;
                todo[n++] = u->list[i];
            }
        }
        ok = work < 20000000;
    }
    free(todo);
    return ok;
}

static bool flags(struct bt_program *p)
{
    struct users u;
    if (!make_users(p, &u)) {
        return false;
    }
    bool ok = spread(p, &u, BT_NODE_F_PRODUCTIVE) && spread(p, &u, BT_NODE_F_NULLABLE);
    free(u.first);
    free(u.list);
    return ok;
}

/* ---- left recursion ---- */

/* The c-th node that may come first in n. false: there are fewer. */
static bool leftmost(const struct bt_program *p, const struct bt_node *n, uint32_t c,
                     bt_node_t *out)
{
    switch ((enum bt_node_kind)n->kind) {
    case BT_NODE_K_SEQ:
        if (c >= n->b || (c > 0 && !bt_node_is(p, p->lists[n->a + c - 1], BT_NODE_F_NULLABLE))) {
            return false;
        }
        *out = p->lists[n->a + c];
        return true;
    case BT_NODE_K_ALT: *out = c < n->b ? p->lists[n->a + c] : BT_NODE_NONE; return c < n->b;
    case BT_NODE_K_REPEAT:
        *out = c == 0 ? n->a : n->b;
        return c == 0 || (c == 1 && bt_node_is(p, n->a, BT_NODE_F_NULLABLE));
    case BT_NODE_K_DISTINCT:
    case BT_NODE_K_ITEM:
    case BT_NODE_K_RULE: *out = n->a; return c == 0;
    case BT_NODE_K_NONE:
    case BT_NODE_K_EMPTY:
    case BT_NODE_K_RX:
    case BT_NODE_K_OBJECT: break;
    }
    return false;
}

/* Searches depth first through what may come first. A node that is met again on its own path is
 * left recursive. */
static bool left_recursive(const struct bt_program *p)
{
    uint8_t *seen = bt_calloc(p->n_nodes, 1); /* 1: on the path, 2: done */
    struct {
        bt_node_t node;
        uint32_t next;
    } *path = bt_malloc((p->n_nodes + 1) * sizeof(*path));
    bool found = false;
    for (uint32_t i = 0; i < p->n_nodes && !found; i++) {
        uint32_t n = 0;
        if (!seen[i] && bt_node_is(p, i, BT_NODE_F_PRODUCTIVE)) {
            path[n].node = i;
            path[n++].next = 0;
            seen[i] = 1;
        }
        while (n > 0 && !found) {
            bt_node_t x = path[n - 1].node, y;
            if (!leftmost(p, &p->nodes[x], path[n - 1].next++, &y)) {
                seen[x] = 2;
                n--;
            } else if (bt_node_is(p, y, BT_NODE_F_PRODUCTIVE) && seen[y] != 2) {
                found = seen[y] == 1;
                seen[y] = 1;
                path[n].node = y;
                path[n].next = 0;
                n += !found;
            }
        }
    }
    free(path);
    free(seen);
    return found;
}

bt_status_t bt_program_finish(struct bt_program *p, bt_node_t start, char *err, size_t err_cap)
{
    if (start == BT_NODE_FAILED || p->full || p->rx->full || !flags(p)) {
        snprintf(err, err_cap, "the grammar is too large: simplify it or split it");
        return BT_ERR_EXHAUSTED;
    }
    if (!bt_node_is(p, start, BT_NODE_F_PRODUCTIVE)) {
        snprintf(err, err_cap,
                 "no text can satisfy the grammar: it contradicts itself or never ends");
        return BT_ERR_INVALID;
    }
    if (left_recursive(p)) {
        snprintf(err, err_cap,
                 "a rule begins with itself (left recursion): let it begin with "
                 "something else, or use a repeat");
        return BT_ERR_UNSUPPORTED;
    }
    /* items that may be empty can always fill up a minimum */
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        struct bt_node *n = &p->nodes[i];
        if (n->kind == BT_NODE_K_REPEAT && bt_node_is(p, n->a, BT_NODE_F_NULLABLE) &&
            bt_node_is(p, n->b, BT_NODE_F_NULLABLE)) {
            n->c = 0;
        }
    }
    for (uint32_t i = 0; i < p->n_objects; i++) {
        struct bt_object *o = &p->objects[i];
        for (uint32_t k = 0; k < o->n_props + o->n_patterns; k++) {
            if (!bt_node_is(p, o->keys[k].value, BT_NODE_F_PRODUCTIVE)) {
                o->keys[k].rx = BT_RX_NONE;
            }
        }
    }
    p->start = start;
    return BT_OK;
}
