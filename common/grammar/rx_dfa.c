/* The automaton: derivatives by byte, one for each class of bytes that an expression does not
 * tell apart. They are kept in a row of the expression's node (Owens, Reppy, Turon 2009,
 * sections 4.1 and 4.2). A derivative that matches no text is replaced by NONE, so no step leads
 * to a dead end. */
#include "common/grammar/rx_priv.h"

#define DEPTH_MAX    600u
#define FEW_PAIRS    1024u  /* of classes, for which refine has a table */
#define ALIVE_STATES 20000u /* states that a proof may visit */

/* ---- partitions ---- */

/* Splits the n classes of map so that they also respect the classes of by. Returns the new
 * number. */
static uint32_t refine(uint8_t map[256], uint32_t n, const uint8_t by[256], uint32_t by_n)
{
    if (by_n == 1) {
        return n;
    }
    if (n * by_n <= FEW_PAIRS) {
        uint16_t of[FEW_PAIRS]; /* by pair of classes: 1 + the new class */
        uint16_t k = 0;
        memset(of, 0, n * by_n * sizeof(of[0]));
        for (uint32_t i = 0; i < 256; i++) {
            uint16_t *class = &of[map[i] * by_n + by[i]];
            *class = *class != 0 ? *class : ++k;
            map[i] = (uint8_t)(*class - 1);
        }
        return k;
    }
    uint16_t key[512], val[512]; /* pairs of classes; open addressing */
    memset(key, 0xFF, sizeof(key));
    uint32_t k = 0;
    for (uint32_t i = 0; i < 256; i++) {
        uint16_t pair = (uint16_t)(map[i] << 8 | by[i]);
        uint32_t h = (pair * 40503u >> 4) & 511;
        while (key[h] != pair && key[h] != 0xFFFF) {
            h = (h + 1) & 511;
        }
        if (key[h] == 0xFFFF && pair != 0xFFFF) {
            key[h] = pair;
            val[h] = (uint16_t)k++;
        } else if (pair == 0xFFFF) { /* only possible if both maps have 256 classes */
            return 256;
        }
        map[i] = (uint8_t)val[h];
    }
    return k;
}

static struct bt_rx_part *intern_part(struct bt_rx_set *s, const uint8_t map[256], uint32_t n)
{
    uint64_t h = n;
    for (uint32_t i = 0; i < 256; i += 8) {
        uint64_t w;
        memcpy(&w, map + i, sizeof(w));
        h = (h ^ w) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    uint32_t *head = &s->part_heads[h % BT_ARRAY_LEN(s->part_heads)];
    for (uint32_t i = *head; i != UINT32_MAX; i = s->parts[i]->next) {
        if (s->parts[i]->hash == h && memcmp(s->parts[i]->map, map, 256) == 0) {
            return s->parts[i];
        }
    }
    if (!bt_rx_grow(s, &s->parts, s->n_parts, &s->parts_cap, sizeof(struct bt_rx_part *))) {
        return NULL;
    }
    struct bt_rx_part *p = bt_rx_alloc(s, sizeof(*p));
    if (!p) {
        return NULL;
    }
    memcpy(p->map, map, 256);
    for (uint32_t i = 256; i > 0; i--) {
        p->rep[map[i - 1]] = (uint8_t)(i - 1);
    }
    p->n = n;
    p->hash = h;
    p->id = s->n_parts;
    p->next = *head;
    *head = s->n_parts;
    s->parts[s->n_parts++] = p;
    return p;
}

struct bt_rx_part *bt_rx_part_meet(struct bt_rx_set *s, struct bt_rx_part *p, struct bt_rx_part *q)
{
    if (!p || !q || p == q || q->n == 1) {
        return q ? p : NULL;
    }
    if (p->n == 1) {
        return q;
    }
    if (!bt_rx_work(s, 60)) {
        return NULL;
    }
    uint8_t map[256];
    memcpy(map, p->map, 256);
    uint32_t n = refine(map, p->n, q->map, q->n);
    return intern_part(s, map, n);
}

static struct bt_rx_part *class_part(struct bt_rx_set *s, bt_rx_t a)
{
    const uint64_t *bits = s->classes[s->nodes[a].a];
    uint8_t map[256];
    bool first = bits[0] & 1, mixed = false;
    for (uint32_t i = 0; i < 256; i++) {
        bool in = bits[i >> 6] >> (i & 63) & 1;
        map[i] = in != first;
        mixed |= in != first;
    }
    return intern_part(s, map, mixed ? 2 : 1);
}

/* The partition of an expression of digits: each digit, the dot, all other bytes. */
static struct bt_rx_part *digits_part(struct bt_rx_set *s)
{
    uint8_t map[256] = {0};
    for (uint32_t d = 0; d < 10; d++) {
        map['0' + d] = (uint8_t)(d + 1);
    }
    map['.'] = 11;
    return intern_part(s, map, 12);
}

static struct bt_rx_part *trivial_part(struct bt_rx_set *s)
{
    static const uint8_t map[256];
    return intern_part(s, map, 1);
}

/* The partition of a list. It refines one map, so partitions between the steps are not kept. */
static struct bt_rx_part *list_part(struct bt_rx_set *s, struct bt_rx_node n)
{
    uint8_t map[256] = {0};
    uint32_t classes = 1;
    struct bt_rx_part *last = NULL;
    for (uint32_t i = 0; i < n.b; i++) {
        struct bt_rx_part *p = bt_rx_part(s, s->lists[n.a + i]);
        if (!p || !bt_rx_work(s, 1)) {
            return NULL;
        }
        if (p != last && p->n > 1) {
            if (!bt_rx_work(s, 50)) {
                return NULL;
            }
            classes = refine(map, classes, p->map, p->n);
        }
        last = p;
    }
    return intern_part(s, map, classes);
}

struct bt_rx_part *bt_rx_part(struct bt_rx_set *s, bt_rx_t a)
{
    struct bt_rx_node n = s->nodes[a];
    if (n.part) {
        return n.part;
    }
    if (s->depth >= DEPTH_MAX || !bt_rx_work(s, 1)) {
        s->full = true;
        return NULL;
    }
    s->depth++;
    struct bt_rx_part *p = NULL;
    switch ((enum bt_rx_kind)n.kind) {
    case BT_RX_K_NONE:
    case BT_RX_K_EMPTY: p = trivial_part(s); break;
    case BT_RX_K_CLASS: p = class_part(s, a); break;
    case BT_RX_K_MULTIPLE: p = digits_part(s); break;
    case BT_RX_K_REPEAT:
    case BT_RX_K_NOT: p = bt_rx_part(s, n.a); break;
    case BT_RX_K_OR:
    case BT_RX_K_AND: p = list_part(s, n); break;
    case BT_RX_K_CONCAT:
        p = bt_rx_part(s, n.a);
        while (p && bt_rx_nullable(s, n.a)) { /* a chain of parts that may be left out */
            bt_rx_t rest = n.b;
            n = s->nodes[rest];
            bool chain = n.kind == BT_RX_K_CONCAT;
            p = bt_rx_part_meet(s, p, bt_rx_part(s, chain ? n.a : rest));
            if (!chain) {
                break;
            }
        }
        break;
    }
    s->depth--;
    s->nodes[a].part = p;
    return p;
}

struct bt_rx_row *bt_rx_row_make(struct bt_rx_set *s, bt_rx_t a)
{
    if (s->nodes[a].row) {
        return s->nodes[a].row;
    }
    struct bt_rx_part *p = bt_rx_part(s, a);
    struct bt_rx_row *r = p ? bt_rx_alloc(s, sizeof(*r) + p->n * sizeof(uint32_t)) : NULL;
    if (!r) {
        return NULL;
    }
    r->map = p->map;
    r->n = p->n;
    memset(r->to, 0xFF, p->n * sizeof(uint32_t));
    s->nodes[a].row = r;
    return r;
}

/* ---- derivatives ---- */

static bt_rx_t derive(struct bt_rx_set *s, bt_rx_t a, uint8_t byte);

/* The derivative. It is kept in a row if it will probably be needed again. */
static bt_rx_t derive_kept(struct bt_rx_set *s, bt_rx_t a, uint8_t byte)
{
    struct bt_rx_node *n = &s->nodes[a];
    bool keep = n->flags & BT_RX_F_POSITIVE && n->kind != BT_RX_K_CLASS;
    if (!keep && !n->row) {
        return derive(s, a, byte);
    }
    uint32_t t = bt_rx_next(s, a, byte);
    return t == BT_RX_UNKNOWN ? BT_RX_FAILED : t & ~BT_RX_ENDS;
}

/* The derivative of a sequence: its head's, followed by the rest; and each rest's if the parts
 * before it may be empty. */
static bt_rx_t derive_concat(struct bt_rx_set *s, bt_rx_t a, uint8_t byte)
{
    uint32_t base = s->n_scratch;
    for (;;) {
        struct bt_rx_node n = s->nodes[a];
        bool chain = n.kind == BT_RX_K_CONCAT;
        bt_rx_t d = derive(s, chain ? n.a : a, byte);
        d = chain ? bt_rx_concat(s, d, n.b) : d;
        if (d != BT_RX_NONE && !bt_rx_push(s, d)) {
            s->n_scratch = base;
            return BT_RX_FAILED;
        }
        if (!chain || !bt_rx_nullable(s, n.a)) {
            break;
        }
        a = n.b;
    }
    if (s->n_scratch - base <= 1) {
        bt_rx_t one = s->n_scratch > base ? s->scratch[base] : BT_RX_NONE;
        s->n_scratch = base;
        return one;
    }
    return bt_rx_or_scratch(s, base);
}

static bt_rx_t derive_list(struct bt_rx_set *s, struct bt_rx_node n, uint8_t byte)
{
    uint32_t base = s->n_scratch;
    bool or = n.kind == BT_RX_K_OR;
    for (uint32_t i = 0; i < n.b; i++) {
        bt_rx_t d = derive(s, s->lists[n.a + i], byte);
        if (! or &&d == BT_RX_NONE) {
            s->n_scratch = base;
            return BT_RX_NONE;
        }
        if ((! or || d != BT_RX_NONE) && !bt_rx_push(s, d)) {
            s->n_scratch = base;
            return BT_RX_FAILED;
        }
    }
    return or ? bt_rx_or_scratch(s, base) : bt_rx_and_scratch(s, base);
}

static bt_rx_t derive(struct bt_rx_set *s, bt_rx_t a, uint8_t byte)
{
    struct bt_rx_node n = s->nodes[a];
    if (n.row && n.row->to[n.row->map[byte]] != BT_RX_UNKNOWN) {
        return n.row->to[n.row->map[byte]] & ~BT_RX_ENDS;
    }
    if (s->depth >= DEPTH_MAX || !bt_rx_work(s, 1)) {
        s->full = true;
        return BT_RX_FAILED;
    }
    s->depth++;
    bt_rx_t d = BT_RX_NONE;
    switch ((enum bt_rx_kind)n.kind) {
    case BT_RX_K_NONE:
    case BT_RX_K_EMPTY: break;
    case BT_RX_K_CLASS:
        d = s->classes[n.a][byte >> 6] >> (byte & 63) & 1 ? BT_RX_EMPTY : BT_RX_NONE;
        break;
    case BT_RX_K_CONCAT: d = derive_concat(s, a, byte); break;
    case BT_RX_K_REPEAT: {
        d = derive_kept(s, n.a, byte);
        if (d != BT_RX_NONE && d != BT_RX_FAILED) {
            uint32_t max = n.c == BT_RX_NO_MAX ? BT_RX_NO_MAX : n.c - 1;
            d = bt_rx_concat(s, d, bt_rx_repeat(s, n.a, n.b ? n.b - 1 : 0, max));
        }
        break;
    }
    case BT_RX_K_OR:
    case BT_RX_K_AND: d = derive_list(s, n, byte); break;
    case BT_RX_K_MULTIPLE:
        if (byte == '.' && n.c) {
            d = a;
        } else if (byte >= '0' && byte <= '9') {
            d = bt_rx_multiple(s, n.a, (uint32_t)((n.b * 10ull + byte - '0') % n.a), n.c);
        }
        break;
    case BT_RX_K_NOT:
        d = derive(s, n.a, byte);
        d = d == BT_RX_FAILED ? d : bt_rx_not(s, d);
        break;
    }
    s->depth--;
    return d;
}

/* ---- dead states ---- */

/* The derivative by class c of a's row. It may match no text. */
static bt_rx_t raw_to(struct bt_rx_set *s, bt_rx_t a, uint32_t c)
{
    struct bt_rx_row *r = s->nodes[a].row;
    if (r->to[c] != BT_RX_UNKNOWN) {
        return r->to[c] & ~BT_RX_ENDS;
    }
    bt_rx_t d = derive(s, a, s->nodes[a].part->rep[c]);
    if (d == BT_RX_NONE) {
        r->to[c] = BT_RX_NONE;
    }
    return d;
}

/* Returns whether a is x and C{0,hi}, and x has a text of at most hi characters. */
static bool limited_alive(const struct bt_rx_set *s, const struct bt_rx_node *n)
{
    for (uint32_t i = 0; n->b == 2 && i < 2; i++) {
        const struct bt_rx_node *r = &s->nodes[s->lists[n->a + i]];
        const struct bt_rx_node *x = &s->nodes[s->lists[n->a + 1 - i]];
        uint8_t chars = 0;
        for (int e = 0; e < 2 && r->kind == BT_RX_K_REPEAT && r->b == 0; e++) {
            chars |= r->a == s->all_chars[e] ? BT_RX_F_CHARS << e : 0;
        }
        if (x->flags & chars && x->flags & BT_RX_F_POSITIVE && x->min_len <= r->c) {
            return true;
        }
    }
    return false;
}

/* Returns whether it is known that a matches some text or that it matches none (*alive_p). */
static bool known(const struct bt_rx_set *s, bt_rx_t a, bool *alive_p)
{
    uint8_t encodings;
    if (s->nodes[a].kind == BT_RX_K_AND && !(s->nodes[a].flags & (BT_RX_F_ALIVE | BT_RX_F_DEAD)) &&
        (limited_alive(s, &s->nodes[a]) || bt_rx_free_chars(s, a, &encodings) >= 0)) {
        s->nodes[a].flags |= BT_RX_F_ALIVE;
    }
    uint16_t f = s->nodes[a].flags;
    *alive_p = a != BT_RX_NONE && (f & (BT_RX_F_NULLABLE | BT_RX_F_POSITIVE | BT_RX_F_ALIVE));
    return *alive_p || f & BT_RX_F_DEAD;
}

/* ---- the search: best first, by a lower bound of the bytes that are still missing ---- */

static bool met_before(const struct bt_rx_search *h, uint32_t x, uint32_t y)
{
    /* the younger state first */
    return h->bound[x] != h->bound[y] ? h->bound[x] < h->bound[y] : x > y;
}

/* Adds a state to the search, and its number to the heap. */
static bool meet(struct bt_rx_set *s, bt_rx_t a, uint32_t parent)
{
    struct bt_rx_search *h = &s->search;
    if (h->n == h->cap) {
        uint32_t want = h->cap ? h->cap * 2 : 64;
        if (!bt_rx_take(s, (want - h->cap) * 4 * sizeof(uint32_t))) {
            return false;
        }
        h->state = bt_realloc(h->state, want * sizeof(uint32_t));
        h->parent = bt_realloc(h->parent, want * sizeof(uint32_t));
        h->bound = bt_realloc(h->bound, want * sizeof(uint32_t));
        h->heap = bt_realloc(h->heap, want * sizeof(uint32_t));
        h->cap = want;
    }
    uint32_t i = h->n_heap++, x = h->n++;
    s->nodes[a].seen = h->number;
    h->state[x] = a;
    h->parent[x] = parent;
    h->bound[x] = s->nodes[a].min_len;
    for (; i > 0 && met_before(h, x, h->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        h->heap[i] = h->heap[(i - 1) / 2];
    }
    h->heap[i] = x;
    return bt_rx_row_make(s, a) != NULL;
}

static uint32_t take_best(struct bt_rx_search *h)
{
    uint32_t best = h->heap[0], last = h->heap[--h->n_heap], i = 0;
    for (uint32_t c; (c = 2 * i + 1) < h->n_heap; i = c) {
        c += c + 1 < h->n_heap && met_before(h, h->heap[c + 1], h->heap[c]);
        if (!met_before(h, h->heap[c], last)) {
            break;
        }
        h->heap[i] = h->heap[c];
    }
    h->heap[i] = last;
    return best;
}

/* Searches for a state that accepts. If there is one, the states on the way to it are alive. If
 * there is none, all visited states are dead. */
static bt_status_t search(struct bt_rx_set *s, bt_rx_t a, uint32_t max_states, bool *alive_p)
{
    struct bt_rx_search *h = &s->search;
    bool found = false;
    h->n = h->n_heap = 0;
    h->number++;
    if (!meet(s, a, UINT32_MAX)) {
        return BT_ERR_EXHAUSTED;
    }
    while (h->n_heap > 0 && !found) {
        uint32_t x = take_best(h);
        bt_rx_t at = h->state[x];
        for (uint32_t c = 0; c < s->nodes[at].row->n && !found; c++) {
            bt_rx_t d = raw_to(s, at, c);
            if (d == BT_RX_FAILED) {
                return BT_ERR_EXHAUSTED;
            }
            if (known(s, d, &found)) {
                for (uint32_t i = x; found && i != UINT32_MAX; i = h->parent[i]) {
                    s->nodes[h->state[i]].flags |= BT_RX_F_ALIVE;
                }
            } else if (s->nodes[d].seen != h->number && (h->n >= max_states || !meet(s, d, x))) {
                return BT_ERR_EXHAUSTED;
            }
        }
    }
    for (uint32_t i = 0; i < h->n && !found; i++) {
        s->nodes[h->state[i]].flags |= BT_RX_F_DEAD;
    }
    *alive_p = found;
    return BT_OK;
}

/* A sequence matches some text if all its parts do, and alternatives if one does. Only And and
 * Not need a search. */
static bt_status_t is_alive(struct bt_rx_set *s, bt_rx_t a, uint32_t max_states, bool *alive_p)
{
    struct bt_rx_node n = s->nodes[a];
    bt_status_t st = BT_OK;
    bool alive = false;
    if (known(s, a, alive_p)) {
        return BT_OK;
    }
    if (s->depth >= DEPTH_MAX) {
        return BT_ERR_EXHAUSTED;
    }
    s->depth++;
    if (n.kind == BT_RX_K_CONCAT) {
        st = is_alive(s, n.a, max_states, &alive);
        for (bt_rx_t rest = n.b; st == BT_OK && alive && rest != BT_RX_EMPTY;) {
            bool chain = s->nodes[rest].kind == BT_RX_K_CONCAT;
            if (known(s, rest, &alive)) {
                break;
            }
            st = is_alive(s, chain ? s->nodes[rest].a : rest, max_states, &alive);
            rest = chain ? s->nodes[rest].b : BT_RX_EMPTY;
        }
    } else if (n.kind == BT_RX_K_OR) {
        for (uint32_t i = 0; i < n.b && !alive; i++) {
            (void)known(s, s->lists[n.a + i], &alive);
        }
        for (uint32_t i = 0; i < n.b && !alive && st == BT_OK; i++) {
            st = is_alive(s, s->lists[n.a + i], max_states, &alive);
        }
    } else if (n.kind == BT_RX_K_REPEAT) {
        st = is_alive(s, n.a, max_states, &alive);
    } else {
        st = search(s, a, max_states, &alive);
    }
    s->depth--;
    if (st == BT_OK) {
        s->nodes[a].flags |= alive ? BT_RX_F_ALIVE : BT_RX_F_DEAD;
        *alive_p = alive;
    }
    return st;
}

bt_status_t bt_rx_is_none(struct bt_rx_set *s, bt_rx_t a, uint32_t max_states, bool *none_p)
{
    bool alive = false;
    bt_status_t st = a == BT_RX_FAILED ? BT_ERR_EXHAUSTED : is_alive(s, a, max_states, &alive);
    if (st == BT_OK) {
        *none_p = !alive;
    }
    return st;
}

/* ---- steps ---- */

/* The expression, with BT_RX_ENDS if it accepts or a marker may follow. */
static uint32_t with_ends(struct bt_rx_set *s, bt_rx_t a)
{
    if (!(s->nodes[a].flags & BT_RX_F_ENDS_KNOWN)) {
        bool ends = bt_rx_nullable(s, a);
        if (!ends && s->has_marks) {
            bt_rx_t d = derive(s, a, BT_RX_MARK);
            if (d == BT_RX_FAILED) {
                return BT_RX_UNKNOWN;
            }
            ends = d != BT_RX_NONE;
        }
        s->nodes[a].flags |= BT_RX_F_ENDS_KNOWN | (ends ? BT_RX_F_ENDS : 0);
    }
    return s->nodes[a].flags & BT_RX_F_ENDS ? a | BT_RX_ENDS : a;
}

uint32_t bt_rx_fill(struct bt_rx_set *s, bt_rx_t a, uint8_t byte)
{
    bool none = true;
    struct bt_rx_row *r = bt_rx_row_make(s, a);
    bt_rx_t d = r ? derive(s, a, byte) : BT_RX_FAILED;
    if (bt_rx_is_none(s, d, ALIVE_STATES, &none) != BT_OK) {
        return BT_RX_UNKNOWN;
    }
    uint32_t t = none ? BT_RX_NONE : with_ends(s, d);
    r->to[r->map[byte]] = t;
    return t;
}

bt_rx_t bt_rx_step(struct bt_rx_set *s, bt_rx_t a, uint8_t byte)
{
    uint32_t t = a == BT_RX_FAILED ? BT_RX_UNKNOWN : bt_rx_next(s, a, byte);
    return t == BT_RX_UNKNOWN ? BT_RX_FAILED : t & ~BT_RX_ENDS;
}

bool bt_rx_accepts(const struct bt_rx_set *s, bt_rx_t a)
{
    return a != BT_RX_FAILED && bt_rx_nullable(s, a);
}
