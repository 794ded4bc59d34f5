/* Finds sequences in a parsed pattern that decide their look-around alone. In (?!-)[a-z-]+(?<!-)
 * both look-arounds concern only text that the sequence itself matches, whatever is around it. Such
 * a sequence is as simple as one without assertions: it may be repeated, and it may stand anywhere.
 * Pure. */
#include "common/grammar/rx_ast.h"

static uint32_t sum(uint32_t a, uint32_t b)
{
    return a > UINT32_MAX - b ? UINT32_MAX : a + b;
}

static uint32_t product(uint32_t a, uint32_t b)
{
    uint64_t p = (uint64_t)a * b;
    return p > UINT32_MAX ? UINT32_MAX : (uint32_t)p;
}

static bool is_look(const struct bt_ast_node *a, bool behind)
{
    return a->kind == BT_AST_LOOK && a->behind == behind;
}

/* Returns whether the look-around's pattern is plain and matches at most `room` characters. */
static bool fits(const struct bt_ast *ast, const struct bt_ast_node *look, uint32_t room)
{
    const struct bt_ast_node *child = &ast->nodes[look->last];
    return child->plain && child->longest <= room;
}

/* Returns whether the sequence decides all its look-around. The nodes behind a look-ahead must be
 * long enough for it. A look-behind needs this of the nodes before it, from the last look-ahead
 * on. */
static bool decides(const struct bt_ast *ast, uint32_t id)
{
    /* least characters of the nodes behind; this loop goes from the last node to the first */
    uint32_t behind = 0;
    for (uint32_t i = ast->nodes[id].last; i != BT_AST_NO_NODE; i = ast->nodes[i].prev) {
        const struct bt_ast_node *a = &ast->nodes[i];
        if (is_look(a, false) && !fits(ast, a, behind)) {
            return false;
        }
        if (is_look(a, true)) {
            uint32_t before = 0;
            for (uint32_t k = a->prev; k != BT_AST_NO_NODE && !is_look(&ast->nodes[k], false);
                 k = ast->nodes[k].prev) {
                before = sum(before, ast->nodes[k].shortest);
            }
            if (!fits(ast, a, before)) {
                return false;
            }
        }
        if (a->kind != BT_AST_LOOK && !a->plain) {
            return false;
        }
        behind = sum(behind, a->shortest);
    }
    return true;
}

void bt_ast_settle(struct bt_ast *ast, uint32_t id)
{
    struct bt_ast_node *a = &ast->nodes[id];
    bool cat = a->kind == BT_AST_CAT, looks = false;
    a->shortest = a->kind == BT_AST_ALT ? UINT32_MAX : a->kind == BT_AST_CHARS;
    a->longest = a->kind == BT_AST_CHARS;
    bool plain = true, edges = true;
    for (uint32_t i = a->last; i != BT_AST_NO_NODE; i = ast->nodes[i].prev) {
        bt_ast_settle(ast, i);
        const struct bt_ast_node *c = &ast->nodes[i];
        plain = plain && c->plain;
        edges = edges && c->edges;
        looks = looks || c->kind == BT_AST_LOOK;
        if (a->kind == BT_AST_ALT) {
            a->shortest = BT_MIN(a->shortest, c->shortest);
            a->longest = BT_MAX(a->longest, c->longest);
        } else if (a->kind != BT_AST_LOOK) {
            a->shortest = sum(a->shortest, c->shortest);
            a->longest = sum(a->longest, c->longest);
        }
    }
    if (a->kind == BT_AST_REPEAT) {
        a->shortest = product(a->shortest, a->min);
        a->longest = product(a->longest, a->max);
    }
    if (a->kind == BT_AST_LOOK || a->last == BT_AST_NO_NODE) {
        return;
    }
    a->decides = cat && looks && decides(ast, id);
    a->plain = plain || a->decides;
    a->edges = edges || a->decides;
}
