/* Makers of expressions. Each applies laws that keep the number of derivatives small.
 * Alternatives are sorted sets, and common beginnings and ends are taken out of them, so that
 * many texts become a trie. A repeat keeps its counts, so .{0,5000} has one state for each
 * character, and no more. */
#include "common/grammar/rx_priv.h"

#include <stdlib.h>

#define DEPTH_MAX 600u /* depth of nested calls */

/* ---- sequences ---- */

/* Returns whether b is a repeat of x that can take one or more x before it into its counts. */
static bool is_repeat_of(const struct bt_rx_set *s, bt_rx_t b, bt_rx_t x)
{
    return s->nodes[b].kind == BT_RX_K_REPEAT && s->nodes[b].a == x;
}

/* a is no concatenation, and neither is NONE or EMPTY. */
static bt_rx_t concat_one(struct bt_rx_set *s, bt_rx_t a, bt_rx_t b)
{
    bool chain = s->nodes[b].kind == BT_RX_K_CONCAT;
    bt_rx_t first = chain ? s->nodes[b].a : b, rest = chain ? s->nodes[b].b : BT_RX_EMPTY;
    if (first == BT_RX_ANY && bt_rx_nullable(s, a)) {
        return b;
    }
    /* x x{m,n} = x{m+1,n+1} and x{i,j} x{m,n} = x{i+m,j+n} */
    bt_rx_t fused = BT_RX_NONE;
    if (is_repeat_of(s, first, a)) {
        struct bt_rx_node r = s->nodes[first];
        fused = bt_rx_repeat(s, a, bt_rx_add_counts(r.b, 1), bt_rx_add_counts(r.c, 1));
    } else if (s->nodes[a].kind == BT_RX_K_REPEAT && is_repeat_of(s, first, s->nodes[a].a)) {
        struct bt_rx_node p = s->nodes[a], r = s->nodes[first];
        fused = bt_rx_repeat(s, p.a, bt_rx_add_counts(p.b, r.b), bt_rx_add_counts(p.c, r.c));
    }
    if (fused != BT_RX_NONE) {
        return fused == BT_RX_FAILED || rest == BT_RX_EMPTY ? fused : bt_rx_concat(s, fused, rest);
    }
    uint16_t flags = s->nodes[a].flags & s->nodes[b].flags &
                     (BT_RX_F_NULLABLE | BT_RX_F_POSITIVE | BT_RX_F_CHARS_ALL | BT_RX_F_FINITE);
    return bt_rx_intern(
        s, (struct bt_rx_node){.kind = BT_RX_K_CONCAT, .flags = flags, .a = a, .b = b});
}

bt_rx_t bt_rx_concat(struct bt_rx_set *s, bt_rx_t a, bt_rx_t b)
{
    if (a == BT_RX_FAILED || b == BT_RX_FAILED) {
        return BT_RX_FAILED;
    }
    if (a == BT_RX_NONE || b == BT_RX_NONE) {
        return BT_RX_NONE;
    }
    if (a == BT_RX_EMPTY || b == BT_RX_EMPTY) {
        return a == BT_RX_EMPTY ? b : a;
    }
    uint32_t base = s->n_scratch;
    uint8_t chars = s->nodes[a].flags & s->nodes[b].flags & BT_RX_F_CHARS_ALL;
    while (s->nodes[a].kind == BT_RX_K_CONCAT) {
        if (!bt_rx_push(s, s->nodes[a].a)) {
            return bt_rx_fail(s, base);
        }
        a = s->nodes[a].b;
    }
    bt_rx_t r = concat_one(s, a, b);
    while (s->n_scratch > base && r != BT_RX_FAILED) {
        r = concat_one(s, s->scratch[--s->n_scratch], r);
    }
    s->n_scratch = base;
    if (r != BT_RX_FAILED) {
        s->nodes[r].flags |= chars;
    }
    return r;
}

bt_rx_t bt_rx_seq(struct bt_rx_set *s, const bt_rx_t *parts, size_t n)
{
    bt_rx_t r = BT_RX_EMPTY;
    for (size_t i = n; i > 0 && r != BT_RX_FAILED; i--) {
        r = bt_rx_concat(s, parts[i - 1], r);
    }
    return r;
}

bt_rx_t bt_rx_text(struct bt_rx_set *s, const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    bt_rx_t r = BT_RX_EMPTY;
    for (size_t i = n; i > 0 && r != BT_RX_FAILED; i--) {
        uint64_t bits[4] = {0};
        bits[p[i - 1] >> 6] = 1ull << (p[i - 1] & 63);
        r = bt_rx_concat(s, bt_rx_class(s, bits), r);
    }
    return r;
}

bt_rx_t bt_rx_repeat(struct bt_rx_set *s, bt_rx_t a, uint32_t min, uint32_t max)
{
    if (a == BT_RX_FAILED) {
        return BT_RX_FAILED;
    }
    if (min > max) {
        return BT_RX_NONE;
    }
    if (a == BT_RX_NONE || max == 0) {
        return min == 0 ? BT_RX_EMPTY : BT_RX_NONE;
    }
    if (a == BT_RX_EMPTY || a == BT_RX_ANY || (min == 1 && max == 1)) {
        return a == BT_RX_ANY && min == 0 ? BT_RX_ANY : a;
    }
    if (bt_rx_nullable(s, a)) {
        min = 0;
    }
    struct bt_rx_node n = s->nodes[a];
    if (n.kind == BT_RX_K_OR && s->lists[n.a] == BT_RX_EMPTY) { /* (x|y|)* = (x|y)* */
        uint32_t base = s->n_scratch;
        for (uint32_t i = 1; i < n.b; i++) {
            if (!bt_rx_push(s, s->lists[n.a + i])) {
                return bt_rx_fail(s, base);
            }
        }
        return bt_rx_repeat(s, bt_rx_or_scratch(s, base), min, max);
    }
    if (n.kind == BT_RX_K_REPEAT) {
        if (n.c == BT_RX_NO_MAX && n.b <= 1) { /* (x*){i,j}, (x+){i,j} */
            return bt_rx_repeat(s, n.a, n.b * min, BT_RX_NO_MAX);
        }
        if (n.b <= 1 && max == BT_RX_NO_MAX) { /* (x{0,j})*, (x{1,j}){i,} */
            return bt_rx_repeat(s, n.a, n.b * min, BT_RX_NO_MAX);
        }
        if (n.b == 0 && n.c == 1) { /* (x?){0,j} */
            return bt_rx_repeat(s, n.a, 0, max);
        }
    }
    if (a == s->nodes[BT_RX_ANY].a && min == 0 && max == BT_RX_NO_MAX) {
        return BT_RX_ANY;
    }
    uint16_t flags = s->nodes[a].flags & (BT_RX_F_POSITIVE | BT_RX_F_CHARS_ALL);
    flags |= max == BT_RX_NO_MAX ? 0 : s->nodes[a].flags & BT_RX_F_FINITE;
    flags |= min == 0 ? BT_RX_F_NULLABLE : 0;
    return bt_rx_intern(
        s, (struct bt_rx_node){.kind = BT_RX_K_REPEAT, .flags = flags, .a = a, .b = min, .c = max});
}

bt_rx_t bt_rx_multiple(struct bt_rx_set *s, uint32_t m, uint32_t rest, bool points)
{
    /* From any remainder, some digits lead to 0, so it always matches some text. */
    uint16_t flags = BT_RX_F_POSITIVE | (rest == 0 ? BT_RX_F_NULLABLE : 0);
    return bt_rx_intern(
        s, (struct bt_rx_node){
               .kind = BT_RX_K_MULTIPLE, .flags = flags, .a = m, .b = rest, .c = points});
}

/* ---- sets of alternatives and of conditions ---- */

static int by_id(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void sort_unique(struct bt_rx_set *s, uint32_t base)
{
    uint32_t *list = s->scratch + base, n = s->n_scratch - base, k = 0;
    if (n < 12) {
        for (uint32_t i = 1; i < n; i++) {
            uint32_t x = list[i], j = i;
            for (; j > 0 && list[j - 1] > x; j--) {
                list[j] = list[j - 1];
            }
            list[j] = x;
        }
    } else {
        bt_rx_work(s, n);
        qsort(list, n, sizeof(*list), by_id);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (k == 0 || list[k - 1] != list[i]) {
            list[k++] = list[i];
        }
    }
    s->n_scratch = base + k;
}

/* Replaces the nodes of a kind in scratch[base..) by their members. */
static bool flatten(struct bt_rx_set *s, uint32_t base, uint8_t kind)
{
    uint32_t n = s->n_scratch;
    for (uint32_t i = base; i < n; i++) {
        struct bt_rx_node o = s->nodes[s->scratch[i]];
        if (o.kind != kind) {
            continue;
        }
        s->scratch[i] = s->lists[o.a];
        for (uint32_t j = 1; j < o.b; j++) {
            if (!bt_rx_push(s, s->lists[o.a + j])) {
                return false;
            }
        }
    }
    return bt_rx_work(s, s->n_scratch - base);
}

static bt_rx_t head_of(const struct bt_rx_set *s, bt_rx_t a)
{
    return s->nodes[a].kind == BT_RX_K_CONCAT ? s->nodes[a].a : a;
}

static bt_rx_t tail_of(const struct bt_rx_set *s, bt_rx_t a)
{
    return s->nodes[a].kind == BT_RX_K_CONCAT ? s->nodes[a].b : BT_RX_EMPTY;
}

/* Sorts scratch[base..) by head, or by tail. */
static void sort_by(struct bt_rx_set *s, uint32_t base,
                    bt_rx_t (*key)(const struct bt_rx_set *, bt_rx_t))
{
    uint32_t *list = s->scratch + base, n = s->n_scratch - base;
    uint32_t gap = 1;
    while (gap < n / 3) {
        gap = gap * 3 + 1;
    }
    for (; gap > 0; gap /= 3) {
        for (uint32_t i = gap; i < n; i++) {
            uint32_t x = list[i], kx = key(s, x), j = i;
            for (; j >= gap && key(s, list[j - gap]) > kx; j -= gap) {
                list[j] = list[j - gap];
            }
            list[j] = x;
        }
    }
}

/* The union of two heads that have the same tail, if the union is simple. NONE: it is not
 * simple. */
static bt_rx_t join_heads(struct bt_rx_set *s, bt_rx_t a, bt_rx_t b)
{
    struct bt_rx_node p = s->nodes[a], q = s->nodes[b];
    if (p.kind == BT_RX_K_CLASS && q.kind == BT_RX_K_CLASS) {
        uint64_t bits[4];
        for (int i = 0; i < 4; i++) {
            bits[i] = s->classes[p.a][i] | s->classes[q.a][i];
        }
        return bt_rx_class(s, bits);
    }
    if (p.kind == BT_RX_K_REPEAT && q.kind == BT_RX_K_REPEAT && p.a == q.a &&
        p.b <= bt_rx_add_counts(q.c, 1) && q.b <= bt_rx_add_counts(p.c, 1)) {
        return bt_rx_repeat(s, p.a, BT_MIN(p.b, q.b), BT_MAX(p.c, q.c));
    }
    if (p.kind == BT_RX_K_REPEAT && p.a == b && p.b <= 2) {
        return bt_rx_repeat(s, p.a, BT_MIN(p.b, 1), BT_MAX(p.c, 1));
    }
    if (q.kind == BT_RX_K_REPEAT && q.a == a && q.b <= 2) {
        return bt_rx_repeat(s, q.a, BT_MIN(q.b, 1), BT_MAX(q.c, 1));
    }
    return BT_RX_NONE;
}

/* x a | x b = x (a | b): takes common heads out of the alternatives scratch[base..). */
static bool factor_heads(struct bt_rx_set *s, uint32_t base)
{
    sort_by(s, base, head_of);
    uint32_t k = base, end = s->n_scratch;
    for (uint32_t i = base; i < end;) {
        bt_rx_t head = head_of(s, s->scratch[i]);
        uint32_t j = i + 1;
        while (j < end && head_of(s, s->scratch[j]) == head) {
            j++;
        }
        bt_rx_t one = s->scratch[i];
        if (j > i + 1 && s->depth < DEPTH_MAX / 2) {
            uint32_t sub = s->n_scratch;
            for (uint32_t x = i; x < j; x++) {
                if (!bt_rx_push(s, tail_of(s, s->scratch[x]))) {
                    return false;
                }
            }
            one = bt_rx_concat(s, head, bt_rx_or_scratch(s, sub));
            if (one == BT_RX_FAILED) {
                return false;
            }
            i = j;
        } else {
            i++;
        }
        s->scratch[k++] = one;
    }
    s->n_scratch = k;
    return true;
}

/* a x | b x = (a | b) x, if the union of a and b is simple. */
static bool factor_tails(struct bt_rx_set *s, uint32_t base)
{
    sort_by(s, base, tail_of);
    uint32_t k = base, end = s->n_scratch;
    for (uint32_t i = base; i < end; i++) {
        bt_rx_t x = s->scratch[i], tail = tail_of(s, x);
        for (uint32_t j = k; j > base && tail_of(s, s->scratch[j - 1]) == tail && k - j < 16; j--) {
            bt_rx_t head = join_heads(s, head_of(s, x), head_of(s, s->scratch[j - 1]));
            if (head == BT_RX_NONE) {
                continue;
            }
            bt_rx_t both = bt_rx_concat(s, head, tail);
            if (both == BT_RX_FAILED) {
                return false;
            }
            /* the union has taken in a part of the tail, so it stays as it is */
            if (tail_of(s, both) != tail) {
                continue;
            }
            x = both;
            s->scratch[j - 1] = s->scratch[--k];
            j = k + 1;
        }
        s->scratch[k++] = x;
    }
    s->n_scratch = k;
    return true;
}

/* Removes the Not nodes from scratch[base..), and appends their bodies behind the rest, from
 * *nots on. */
static void split_nots(struct bt_rx_set *s, uint32_t base, uint32_t *n_nots)
{
    uint32_t *list = s->scratch + base, n = s->n_scratch - base, k = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (s->nodes[list[i]].kind != BT_RX_K_NOT) {
            uint32_t x = list[i];
            list[i] = list[k];
            list[k++] = x;
        }
    }
    for (uint32_t i = k; i < n; i++) {
        list[i] = s->nodes[list[i]].a;
    }
    *n_nots = n - k;
}

/* Joins all Not nodes of scratch[base..) into one: !a | !b = !(a & b), !a & !b = !(a | b). */
static bool join_nots(struct bt_rx_set *s, uint32_t base, uint8_t kind)
{
    uint32_t nots = 0;
    for (uint32_t i = base; i < s->n_scratch; i++) {
        nots += s->nodes[s->scratch[i]].kind == BT_RX_K_NOT;
    }
    if (nots < 2) {
        return true;
    }
    split_nots(s, base, &nots);
    uint32_t at = s->n_scratch - nots;
    bt_rx_t body = kind == BT_RX_K_OR ? bt_rx_and_scratch(s, at) : bt_rx_or_scratch(s, at);
    return bt_rx_push(s, bt_rx_not(s, body));
}

/* Removes members that are subsets of a universe in scratch[base..). */
static void absorb(struct bt_rx_set *s, uint32_t base)
{
    uint8_t all = 0;
    for (uint32_t i = base; i < s->n_scratch; i++) {
        all |= bt_rx_universe(s, &s->nodes[s->scratch[i]]);
    }
    uint32_t k = base;
    for (uint32_t i = base; i < s->n_scratch && all; i++) {
        const struct bt_rx_node *n = &s->nodes[s->scratch[i]];
        if (!(n->flags & all) || bt_rx_universe(s, n)) {
            s->scratch[k++] = s->scratch[i];
        }
    }
    s->n_scratch = all ? k : s->n_scratch;
}

static bt_rx_t or_scratch(struct bt_rx_set *s, uint32_t base)
{
    if (s->depth >= DEPTH_MAX || !flatten(s, base, BT_RX_K_OR)) {
        return bt_rx_fail(s, base);
    }
    absorb(s, base);
    uint32_t k = base;
    bool empty = false;
    for (uint32_t i = base; i < s->n_scratch; i++) {
        bt_rx_t x = s->scratch[i];
        if (x == BT_RX_ANY) {
            s->n_scratch = base;
            return BT_RX_ANY;
        }
        empty |= x == BT_RX_EMPTY;
        if (x != BT_RX_NONE && x != BT_RX_EMPTY) {
            s->scratch[k++] = x;
        }
    }
    s->n_scratch = k;
    sort_unique(s, base);
    s->depth++;
    bool ok = true;
    for (int round = 0; ok && s->n_scratch - base > 1 && round < 2; round++) {
        uint32_t before = s->n_scratch;
        ok = factor_heads(s, base) && factor_tails(s, base);
        if (s->n_scratch == before) {
            break;
        }
    }
    ok = ok && join_nots(s, base, BT_RX_K_OR);
    s->depth--;
    for (uint32_t i = base; i < s->n_scratch && ok && empty; i++) {
        struct bt_rx_node n = s->nodes[s->scratch[i]];
        if (n.kind == BT_RX_K_REPEAT && n.b == 1) { /* x{1,n} | empty = x{0,n} */
            s->scratch[i] = bt_rx_repeat(s, n.a, 0, n.c);
            ok = s->scratch[i] != BT_RX_FAILED;
        }
        empty = ok && !bt_rx_nullable(s, s->scratch[i]);
    }
    ok = ok && (!empty || bt_rx_push(s, BT_RX_EMPTY));
    if (!ok) {
        return bt_rx_fail(s, base);
    }
    for (uint32_t i = base; i < s->n_scratch; i++) { /* a factored result may be an Or again */
        if (s->nodes[s->scratch[i]].kind == BT_RX_K_OR || s->scratch[i] == BT_RX_ANY) {
            return or_scratch(s, base);
        }
    }
    sort_unique(s, base);
    if (s->n_scratch - base <= 1) {
        bt_rx_t one = s->n_scratch > base ? s->scratch[base] : BT_RX_NONE;
        s->n_scratch = base;
        return one;
    }
    return bt_rx_intern_list(s, BT_RX_K_OR, base);
}

bt_rx_t bt_rx_or_scratch(struct bt_rx_set *s, uint32_t base)
{
    uint8_t chars = BT_RX_F_CHARS_ALL;
    for (uint32_t i = base; i < s->n_scratch; i++) {
        chars &= s->nodes[s->scratch[i]].flags;
    }
    bt_rx_t r = or_scratch(s, base);
    if (r != BT_RX_FAILED) {
        s->nodes[r].flags |= chars;
    }
    return r;
}

/* Intersects the members of scratch[base..) that begin with a class. */
static bool and_classes(struct bt_rx_set *s, uint32_t base)
{
    uint64_t bits[4] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
    uint32_t n = 0;
    for (uint32_t i = base; i < s->n_scratch; i++) {
        n += s->nodes[head_of(s, s->scratch[i])].kind == BT_RX_K_CLASS;
    }
    if (n < 2) {
        return true;
    }
    uint32_t k = base, end = s->n_scratch;
    for (uint32_t i = base; i < end; i++) {
        bt_rx_t x = s->scratch[i];
        struct bt_rx_node h = s->nodes[head_of(s, x)];
        if (h.kind != BT_RX_K_CLASS) {
            s->scratch[k++] = x;
            continue;
        }
        for (int w = 0; w < 4; w++) {
            bits[w] &= s->classes[h.a][w];
        }
        if (!bt_rx_push(s, tail_of(s, x))) {
            return false;
        }
    }
    bt_rx_t tails = bt_rx_and_scratch(s, end);
    s->n_scratch = k;
    return bt_rx_push(s, bt_rx_concat(s, bt_rx_class(s, bits), tails));
}

static bool in_list(const struct bt_rx_set *s, const struct bt_rx_node *list, bt_rx_t x)
{
    return bsearch(&x, s->lists + list->a, list->b, sizeof(uint32_t), by_id) != NULL;
}

/* Returns whether !(a | b | ...) includes !x: x is one of the alternatives, or consists of some
 * of them. */
static bool excluded(const struct bt_rx_set *s, const struct bt_rx_node *alternatives, bt_rx_t x)
{
    struct bt_rx_node n = s->nodes[x];
    if (n.kind != BT_RX_K_OR) {
        return in_list(s, alternatives, x);
    }
    for (uint32_t i = 0; i < n.b; i++) {
        if (!in_list(s, alternatives, s->lists[n.a + i])) {
            return false;
        }
    }
    return true;
}

/* Returns whether scratch[base..) and !(alternatives) together prove x, one of the alternatives.
 * For example x is u & !a, where u is a member of scratch[base..) and a is an alternative. */
static bool proves(const struct bt_rx_set *s, uint32_t base, const struct bt_rx_node *alternatives,
                   bt_rx_t x)
{
    struct bt_rx_node n = s->nodes[x];
    for (uint32_t i = 0; i < n.b && n.kind == BT_RX_K_AND; i++) {
        bt_rx_t m = s->lists[n.a + i];
        bool known = s->nodes[m].kind == BT_RX_K_NOT && excluded(s, alternatives, s->nodes[m].a);
        for (uint32_t j = base; j < s->n_scratch && !known; j++) {
            known = s->scratch[j] == m;
        }
        if (!known) {
            return false;
        }
    }
    return n.kind == BT_RX_K_AND;
}

static bool contradicts(struct bt_rx_set *s, uint32_t base)
{
    for (uint32_t i = base; i < s->n_scratch; i++) {
        struct bt_rx_node n = s->nodes[s->scratch[i]];
        if (n.kind != BT_RX_K_NOT) {
            continue;
        }
        struct bt_rx_node body = s->nodes[n.a];
        for (uint32_t j = base; j < s->n_scratch; j++) {
            if (s->scratch[j] == n.a ||
                (body.kind == BT_RX_K_OR && in_list(s, &body, s->scratch[j]))) {
                return true;
            }
        }
        for (uint32_t k = 0; k < body.b && body.kind == BT_RX_K_OR && k < 64; k++) {
            if (proves(s, base, &body, s->lists[body.a + k])) {
                return true;
            }
        }
    }
    return false;
}

static bt_rx_t and_scratch(struct bt_rx_set *s, uint32_t base)
{
    if (s->depth >= DEPTH_MAX || !flatten(s, base, BT_RX_K_AND)) {
        return bt_rx_fail(s, base);
    }
    uint32_t k = base;
    uint8_t within = 0; /* the encodings of which a member has valid texts only */
    for (uint32_t i = base; i < s->n_scratch; i++) {
        const struct bt_rx_node *n = &s->nodes[s->scratch[i]];
        within |= bt_rx_universe(s, n) ? 0 : n->flags & BT_RX_F_CHARS_ALL;
    }
    bool empty = false, nullable = true;
    for (uint32_t i = base; i < s->n_scratch; i++) {
        bt_rx_t x = s->scratch[i];
        if (x == BT_RX_NONE) {
            s->n_scratch = base;
            return BT_RX_NONE;
        }
        empty |= x == BT_RX_EMPTY;
        nullable &= bt_rx_nullable(s, x);
        if (x != BT_RX_ANY && !(bt_rx_universe(s, &s->nodes[x]) & within)) {
            s->scratch[k++] = x;
        }
    }
    s->n_scratch = k;
    if (empty) {
        s->n_scratch = base;
        return nullable ? BT_RX_EMPTY : BT_RX_NONE;
    }
    s->depth++;
    sort_unique(s, base);
    bool ok = join_nots(s, base, BT_RX_K_AND) && (s->depth > DEPTH_MAX / 2 || and_classes(s, base));
    s->depth--;
    if (!ok) {
        return bt_rx_fail(s, base);
    }
    sort_unique(s, base);
    for (uint32_t i = base; i < s->n_scratch && s->n_scratch - base > 1; i++) {
        bt_rx_t x = s->scratch[i];
        if (x == BT_RX_NONE || x == BT_RX_ANY || x == BT_RX_EMPTY ||
            s->nodes[x].kind == BT_RX_K_AND) {
            return and_scratch(s, base);
        }
    }
    if (contradicts(s, base)) {
        s->n_scratch = base;
        return BT_RX_NONE;
    }
    if (s->n_scratch - base <= 1) {
        bt_rx_t one = s->n_scratch > base ? s->scratch[base] : BT_RX_ANY;
        s->n_scratch = base;
        return one;
    }
    return bt_rx_intern_list(s, BT_RX_K_AND, base);
}

bt_rx_t bt_rx_and_scratch(struct bt_rx_set *s, uint32_t base)
{
    uint8_t chars = 0;
    for (uint32_t i = base; i < s->n_scratch; i++) {
        chars |= s->nodes[s->scratch[i]].flags & BT_RX_F_CHARS_ALL;
    }
    bt_rx_t r = and_scratch(s, base);
    if (r != BT_RX_FAILED) {
        s->nodes[r].flags |= chars;
    }
    return r;
}

static bool push_all(struct bt_rx_set *s, const bt_rx_t *parts, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!bt_rx_push(s, parts[i])) {
            return false;
        }
    }
    return true;
}

bt_rx_t bt_rx_or_list(struct bt_rx_set *s, const bt_rx_t *parts, size_t n)
{
    uint32_t base = s->n_scratch;
    return push_all(s, parts, n) ? bt_rx_or_scratch(s, base) : bt_rx_fail(s, base);
}

bt_rx_t bt_rx_or(struct bt_rx_set *s, bt_rx_t a, bt_rx_t b)
{
    bt_rx_t two[2] = {a, b};
    return bt_rx_or_list(s, two, 2);
}

bt_rx_t bt_rx_and(struct bt_rx_set *s, bt_rx_t a, bt_rx_t b)
{
    bt_rx_t two[2] = {a, b};
    uint32_t base = s->n_scratch;
    return push_all(s, two, 2) ? bt_rx_and_scratch(s, base) : bt_rx_fail(s, base);
}

bt_rx_t bt_rx_not(struct bt_rx_set *s, bt_rx_t a)
{
    if (a == BT_RX_FAILED) {
        return BT_RX_FAILED;
    }
    if (a == BT_RX_NONE || a == BT_RX_ANY) {
        return a == BT_RX_NONE ? BT_RX_ANY : BT_RX_NONE;
    }
    if (s->nodes[a].kind == BT_RX_K_NOT) {
        return s->nodes[a].a;
    }
    uint16_t flags = bt_rx_nullable(s, a) ? 0 : BT_RX_F_NULLABLE;
    return bt_rx_intern(s, (struct bt_rx_node){.kind = BT_RX_K_NOT, .flags = flags, .a = a});
}
