/* Reads JSON beside the automaton. The automaton checks the syntax, so what the reader sees is
 * always the beginning of a JSON value. */
#include "common/grammar/automaton.h"

#include <stdlib.h>

/* b of an array */
#define EXPECTS   1u /* a value comes next */
#define TRACKED   2u /* its items must differ */
#define ARMED     4u /* the next value is such an array (also of TOP and OBJECT) */
#define KEY_ARMED 0x80000000u

/* b of a string */
#define IS_KEY 1u
/* 0: between characters; 1: after a backslash; 2 to 5: after \u and 0 to 3 digits */
#define PHASE_SHIFT 1
#define PHASE_MASK  7u
#define CODE_SHIFT  4 /* shift of the digits read so far */
#define HIGH_SHIFT  20
#define HIGH        0x400u /* set together with the bits of a surrogate pair's first half */

#define PATH_MAX_PLACES 256u

static uint32_t hash_node(const struct bt_reader_node *n)
{
    uint64_t h = ((uint64_t)n->kind << 56 | (uint64_t)n->type << 48 | n->level) ^
                 ((uint64_t)n->a << 32 | n->b) * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 29) ^ n->parent) * 0xD6E8FEB86659FD93u;
    return (uint32_t)(h >> 32);
}

static uint32_t intern(struct bt_automaton *m, struct bt_reader_node n)
{
    if (n.a == BT_READER_FAILED || n.b == BT_READER_FAILED || n.parent == BT_READER_FAILED) {
        return BT_READER_FAILED;
    }
    if (m->distinct.n_nodes >= m->distinct.n_heads) {
        uint32_t want = m->distinct.n_heads ? m->distinct.n_heads * 2 : 64;
        if (!bt_automaton_heads(m, &m->distinct.heads, &m->distinct.n_heads, want)) {
            return BT_READER_FAILED;
        }
        for (uint32_t i = 1; i < m->distinct.n_nodes; i++) {
            struct bt_reader_node *x = &m->distinct.nodes[i];
            uint32_t *head = &m->distinct.heads[hash_node(x) & (want - 1)];
            x->next = *head;
            *head = i;
        }
    }
    uint32_t *head = &m->distinct.heads[hash_node(&n) & (m->distinct.n_heads - 1)];
    for (uint32_t i = *head; i != UINT32_MAX; i = m->distinct.nodes[i].next) {
        const struct bt_reader_node *x = &m->distinct.nodes[i];
        if (x->kind == n.kind && x->type == n.type && x->level == n.level && x->a == n.a &&
            x->b == n.b && x->parent == n.parent) {
            return i;
        }
    }
    m->distinct.n_nodes = BT_MAX(m->distinct.n_nodes, 1); /* 0: no reader */
    if (!bt_automaton_grow(m, &m->distinct.nodes, m->distinct.n_nodes, &m->distinct.nodes_cap,
                           sizeof(*m->distinct.nodes))) {
        return BT_READER_FAILED;
    }
    n.next = *head;
    m->distinct.nodes[m->distinct.n_nodes] = n;
    *head = m->distinct.n_nodes;
    return m->distinct.n_nodes++;
}

void bt_reader_drop(struct bt_automaton *m, uint32_t n)
{
    n = BT_MAX(n, 1);
    while (m->distinct.n_nodes > n) { /* the youngest node of a hash chain is the first in it */
        const struct bt_reader_node *x = &m->distinct.nodes[--m->distinct.n_nodes];
        m->distinct.heads[hash_node(x) & (m->distinct.n_heads - 1)] = x->next;
    }
}

static const struct bt_reader_node *at(const struct bt_automaton *m, uint32_t id)
{
    return &m->distinct.nodes[id];
}

/* ---- values ---- */

static uint32_t empty(struct bt_automaton *m, char type)
{
    return intern(m, (struct bt_reader_node){.kind = BT_READER_K_EMPTY, .type = (uint8_t)type});
}

static uint32_t length(const struct bt_automaton *m, uint32_t list)
{
    return at(m, list)->kind == BT_READER_K_EMPTY ? 0 : at(m, list)->b;
}

/* A text with one more byte, or an array with one more item. */
static uint32_t append(struct bt_automaton *m, uint8_t kind, uint32_t list, uint32_t a)
{
    if (list == BT_READER_FAILED) {
        return list;
    }
    return intern(m, (struct bt_reader_node){.kind = kind,
                                             .type = at(m, list)->type,
                                             .a = a,
                                             .b = length(m, list) + 1,
                                             .parent = list});
}

static uint32_t append_char(struct bt_automaton *m, uint32_t text, uint32_t c)
{
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    uint32_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits = c >> 6 * (n - 1 - i);
        text = append(m, BT_READER_K_TEXT, text, i == 0 ? lead[n] | bits : 0x80 | (bits & 63));
    }
    return text;
}

/* The first n bytes of a text, or the first n items of an array. */
static uint32_t first_of(const struct bt_automaton *m, uint32_t list, uint32_t n)
{
    for (uint32_t k = length(m, list); k > n; k--) {
        list = at(m, list)->parent;
    }
    return list;
}

/* An object with one more member. Members are sorted by the numbers of their keys. */
static uint32_t add_member(struct bt_automaton *m, uint32_t members, uint32_t key, uint32_t value)
{
    uint32_t n = 0, list = members;
    for (; at(m, list)->kind == BT_READER_K_MEMBER && at(m, list)->a > key; n++) {
        list = at(m, list)->parent;
    }
    uint32_t *later = bt_malloc((2 * n + 2) * sizeof(uint32_t)), k = n;
    list = members;
    for (; k > 0; k--) {
        later[2 * k - 2] = at(m, list)->a;
        later[2 * k - 1] = at(m, list)->b;
        list = at(m, list)->parent;
    }
    struct bt_reader_node one = {.kind = BT_READER_K_MEMBER, .type = 'O'};
    if (!bt_rx_work(m->rx, n)) {
        list = BT_READER_FAILED;
    }
    one.a = key;
    one.b = value;
    one.parent = list;
    list = intern(m, one);
    for (; k < n; k++) {
        one.a = later[2 * k];
        one.b = later[2 * k + 1];
        one.parent = list;
        list = intern(m, one);
    }
    free(later);
    return list;
}

/* Copies digits to out, without zeros at the beginning. Returns how many digits out has now. */
static uint32_t digits(const char *t, uint32_t n, uint32_t *i, char *out, uint32_t k)
{
    for (; *i < n && t[*i] >= '0' && t[*i] <= '9'; (*i)++) {
        if (k > 0 || t[*i] != '0') {
            out[k++] = t[*i];
        }
    }
    return k;
}

/* Writes a number as an integer without zeros at its end, and an exponent of ten. So equal
 * numbers have equal texts. An exponent of more than 15 digits stays as it was written. */
static uint32_t normalise(const char *t, uint32_t n, char *out)
{
    uint32_t i = t[0] == '-', from, k;
    int64_t exp = 0;
    char *d = out + 1; /* behind the sign */
    k = digits(t, n, &i, d, 0);
    if (i < n && t[i] == '.') {
        from = ++i;
        k = digits(t, n, &i, d, k);
        exp -= (int64_t)(i - from);
    }
    for (; k > 0 && d[k - 1] == '0'; k--) {
        exp++;
    }
    if (k == 0) {
        out[0] = '0';
        return 1;
    }
    out[0] = t[0] == '-' ? '-' : '+';
    if (i < n && (t[i] | 32) == 'e') {
        bool minus = ++i < n && t[i] == '-';
        i += i < n && (t[i] == '-' || t[i] == '+');
        while (i < n && t[i] == '0') {
            i++;
        }
        if (n - i > 15) {
            d[k++] = minus ? 'm' : 'p';
            memcpy(d + k, t + i, n - i);
            return k + 1 + (n - i);
        }
        int64_t e = 0;
        for (; i < n; i++) {
            e = e * 10 + (t[i] - '0');
        }
        exp += minus ? -e : e;
    }
    d[k++] = 'e';
    memcpy(d + k, &exp, sizeof(exp));
    return k + 1 + (uint32_t)sizeof(exp);
}

/* The value of a number or a word. */
static uint32_t scalar_value(struct bt_automaton *m, uint32_t text)
{
    uint32_t n = length(m, text), k = n;
    if (n == 0 || !bt_rx_work(m->rx, n)) {
        m->full = true;
        return BT_READER_FAILED;
    }
    char *t = bt_malloc(n), *out = bt_malloc(n + 16);
    for (uint32_t x = text; k > 0; x = at(m, x)->parent) {
        t[--k] = (char)at(m, x)->a;
    }
    bool number = t[0] == '-' || (t[0] >= '0' && t[0] <= '9');
    k = number ? normalise(t, n, out) : n;
    uint32_t v = empty(m, number ? 'N' : 'W');
    for (uint32_t i = 0; i < k; i++) {
        v = append(m, BT_READER_K_TEXT, v, (uint8_t)(number ? out : t)[i]);
    }
    free(t);
    free(out);
    return v;
}

/* ---- places ---- */

static uint32_t place(struct bt_automaton *m, uint8_t kind, uint32_t level, uint32_t a, uint32_t b,
                      uint32_t parent)
{
    if (level >= UINT16_MAX) {
        m->full = true;
        return BT_READER_FAILED;
    }
    return intern(m, (struct bt_reader_node){
                         .kind = kind, .level = (uint16_t)level, .a = a, .b = b, .parent = parent});
}

uint32_t bt_reader_expect(struct bt_automaton *m, uint32_t reader)
{
    if (reader == 0 || (at(m, reader)->kind == BT_READER_K_TOP && at(m, reader)->a)) {
        return place(m, BT_READER_K_TOP, 0, 0, ARMED, 0);
    }
    struct bt_reader_node n = *at(m, reader);
    if (n.kind == BT_READER_K_TOP || (n.kind == BT_READER_K_ARRAY && n.b & EXPECTS)) {
        n.b |= ARMED;
    } else if (n.kind == BT_READER_K_OBJECT && n.b != 0) {
        n.b |= KEY_ARMED;
    } else { /* the byte belongs to another thread, which is at another place of another text */
        m->full = true;
        return BT_READER_FAILED;
    }
    return intern(m, n);
}

/* The place after `around` has received a complete value. */
static uint32_t value_ends(struct bt_automaton *m, uint32_t around, uint32_t value)
{
    if (value == BT_READER_FAILED) {
        return value;
    }
    struct bt_reader_node n = *at(m, around);
    if (n.kind == BT_READER_K_ARRAY) {
        n.a = append(m, BT_READER_K_ITEM, n.a, value);
    } else if (n.kind == BT_READER_K_OBJECT) {
        n.a = add_member(m, n.a, n.b, value);
        n.b = 0;
    } else {
        n.a = 1;
    }
    return intern(m, n);
}

static uint32_t hex(uint8_t byte)
{
    return byte <= '9' ? byte - (uint32_t)'0' : (byte | 32u) - 'a' + 10;
}

static uint32_t string_step(struct bt_automaton *m, struct bt_reader_node n, uint8_t byte)
{
    static const char letters[] = "bfnrt", controls[] = "\b\f\n\r\t";
    uint32_t phase = n.b >> PHASE_SHIFT & PHASE_MASK;
    uint32_t code = n.b >> CODE_SHIFT & 0xFFFF, high = n.b >> HIGH_SHIFT;
    if (phase == 0 && byte == '"') {
        struct bt_reader_node around = *at(m, n.parent);
        if (!(n.b & IS_KEY)) {
            return value_ends(m, n.parent, n.a);
        }
        around.b = n.a;
        return intern(m, around);
    }
    if (phase == 0 && byte != '\\') {
        n.a = append(m, BT_READER_K_TEXT, n.a, byte);
    } else if (phase == 0) {
        phase = 1;
    } else if (phase == 1 && byte == 'u') {
        phase = 2;
        code = 0;
    } else if (phase == 1) {
        const char *letter = strchr(letters, byte);
        n.a = append(m, BT_READER_K_TEXT, n.a,
                     letter && byte ? (uint32_t)controls[letter - letters] : byte);
        phase = 0;
    } else {
        code = (code << 4 | hex(byte)) & 0xFFFF;
        if (++phase == 6) {
            phase = 0;
            if (code >= 0xD800 && code < 0xDC00) {
                high = HIGH | (code & 0x3FF);
            } else {
                code = high && code >= 0xDC00 && code < 0xE000
                           ? 0x10000 + ((high & 0x3FF) << 10) + (code & 0x3FF)
                           : code;
                n.a = append_char(m, n.a, code);
                high = 0;
            }
        }
    }
    n.b = (n.b & IS_KEY) | phase << PHASE_SHIFT | (phase ? code : 0) << CODE_SHIFT |
          high << HIGH_SHIFT;
    return intern(m, n);
}

static bool ends_scalar(uint8_t byte)
{
    return byte == ',' || byte == ']' || byte == '}' || byte <= ' ';
}

/* A value begins with this byte in place n, whose number is id. */
static uint32_t value_begins(struct bt_automaton *m, struct bt_reader_node n, uint8_t byte)
{
    bool armed = n.kind == BT_READER_K_OBJECT ? n.b & KEY_ARMED : n.b & ARMED;
    n.b = n.kind == BT_READER_K_OBJECT ? n.b & ~KEY_ARMED : n.b & TRACKED;
    uint32_t around = intern(m, n);
    if (around == BT_READER_FAILED) {
        return around;
    }
    if (byte == '[') {
        armed = armed && byte == '[';
        return place(m, BT_READER_K_ARRAY, n.level + armed, empty(m, 'A'),
                     EXPECTS | (armed ? TRACKED : 0), around);
    }
    if (byte == '{') {
        return place(m, BT_READER_K_OBJECT, n.level, empty(m, 'O'), 0, around);
    }
    if (byte == '"') {
        return place(m, BT_READER_K_STRING, n.level, empty(m, 'S'), 0, around);
    }
    uint32_t text = append(m, BT_READER_K_TEXT, empty(m, 'T'), byte);
    return place(m, BT_READER_K_SCALAR, n.level, text, 0, around);
}

uint32_t bt_reader_step(struct bt_automaton *m, uint32_t reader, uint8_t byte)
{
    struct bt_reader_node n = *at(m, reader);
    if (n.kind == BT_READER_K_STRING) {
        return string_step(m, n, byte);
    }
    if (n.kind == BT_READER_K_SCALAR) {
        if (!ends_scalar(byte)) {
            n.a = append(m, BT_READER_K_TEXT, n.a, byte);
            return intern(m, n);
        }
        reader = value_ends(m, n.parent, scalar_value(m, n.a));
        if (reader == BT_READER_FAILED) {
            return reader;
        }
        n = *at(m, reader);
    }
    if (n.kind == BT_READER_K_TOP && (n.a || byte == ']' || byte == '}')) {
        return reader; /* the array has ended, or no thread can read the byte */
    }
    if (byte <= ' ' || byte == ':') {
        return reader;
    }
    if (byte == ']' || byte == '}') {
        return value_ends(m, n.parent, n.a);
    }
    if (byte == ',') {
        n.b |= n.kind == BT_READER_K_ARRAY ? EXPECTS : 0;
        return intern(m, n);
    }
    if (byte == '"' && n.kind == BT_READER_K_OBJECT && n.b == 0) {
        return place(m, BT_READER_K_STRING, n.level, empty(m, 'S'), IS_KEY, reader);
    }
    return value_begins(m, n, byte);
}

/* ---- questions ---- */

bool bt_reader_in_string(const struct bt_automaton *m, uint32_t reader)
{
    return at(m, reader)->kind == BT_READER_K_STRING;
}

/* Returns whether the place is within a number. *e_p: within its exponent. *zero_p: all digits
 * before the exponent are zeros. */
static bool in_number(const struct bt_automaton *m, uint32_t reader, bool *e_p, bool *zero_p)
{
    const struct bt_reader_node *n = at(m, reader);
    *e_p = false;
    *zero_p = true;
    for (uint32_t x = n->a; n->kind == BT_READER_K_SCALAR && length(m, x) > 0;
         x = at(m, x)->parent) {
        uint32_t c = at(m, x)->a;
        if ((c | 32) == 'e') {
            *e_p = *zero_p = true;
        } else if (c >= '1' && c <= '9') {
            *zero_p = false;
        } else if (c > '9') {
            return false; /* true, false or null */
        }
    }
    return n->kind == BT_READER_K_SCALAR;
}

bool bt_reader_in_exponent(const struct bt_automaton *m, uint32_t reader)
{
    bool e, zero;
    return in_number(m, reader, &e, &zero) && e;
}

uint32_t bt_reader_without_zeros(struct bt_automaton *m, uint32_t reader)
{
    bool e, zero, point = false;
    if (!in_number(m, reader, &e, &zero)) {
        return reader;
    }
    struct bt_reader_node n = *at(m, reader);
    /* zero has the same value with any exponent */
    while (e && zero && (at(m, n.a)->a | 32) != 'e') {
        n.a = at(m, n.a)->parent;
    }
    uint32_t cut = n.a;
    for (; length(m, cut) > 0 && at(m, cut)->a == '0'; cut = at(m, cut)->parent) {
    }
    for (uint32_t x = cut; length(m, x) > 0; x = at(m, x)->parent) {
        point |= at(m, x)->a == '.' || (at(m, x)->a | 32) == 'e';
    }
    n.a = point ? cut : n.a;
    return intern(m, n);
}

/* The places from the array of the level, path[0], to the present one. Returns their number; 0:
 * there is no such array; more than PATH_MAX_PLACES: there are too many. */
static uint32_t path_to(const struct bt_automaton *m, uint32_t reader, uint32_t level,
                        uint32_t path[PATH_MAX_PLACES])
{
    uint32_t n = 0, x = reader;
    for (;; x = at(m, x)->parent) {
        const struct bt_reader_node *p = at(m, x);
        if (p->kind == BT_READER_K_TOP || p->level < level) {
            return 0;
        }
        if (n++ < PATH_MAX_PLACES) {
            path[n - 1] = x;
        }
        if (p->kind == BT_READER_K_ARRAY && p->b & TRACKED && p->level == level) {
            break;
        }
    }
    for (uint32_t i = 0; n <= PATH_MAX_PLACES && i < n / 2; i++) {
        uint32_t swap = path[i];
        path[i] = path[n - 1 - i];
        path[n - 1 - i] = swap;
    }
    return n;
}

bool bt_reader_is_double(struct bt_automaton *m, uint32_t reader, uint32_t level)
{
    uint32_t around = reader, value, list;
    if (at(m, reader)->kind == BT_READER_K_SCALAR) {
        around = at(m, reader)->parent;
    }
    struct bt_reader_node n = *at(m, around);
    if (n.kind != BT_READER_K_ARRAY || !(n.b & TRACKED) || n.level != level ||
        (around == reader && length(m, n.a) == 0)) {
        /* the reader belongs to another thread, which is at another place of another text */
        m->full = true;
        return false;
    }
    if (around != reader) {
        value = scalar_value(m, at(m, reader)->a);
        list = n.a;
    } else {
        value = at(m, n.a)->a;
        list = at(m, n.a)->parent;
    }
    if (value == BT_READER_FAILED || !bt_rx_work(m->rx, length(m, list))) {
        m->full = true;
        return false;
    }
    for (; length(m, list) > 0; list = at(m, list)->parent) {
        if (at(m, list)->a == value) {
            return true;
        }
    }
    return false;
}

/* The value of a key in an object; 0: the object does not have the key. */
static uint32_t member_of(const struct bt_automaton *m, uint32_t object, uint32_t key)
{
    while (at(m, object)->kind == BT_READER_K_MEMBER && at(m, object)->a > key) {
        object = at(m, object)->parent;
    }
    const struct bt_reader_node *n = at(m, object);
    return n->kind == BT_READER_K_MEMBER && n->a == key ? n->b : 0;
}

/* Whether the object has all members of part. */
static bool has_members(const struct bt_automaton *m, uint32_t object, uint32_t part)
{
    for (; at(m, part)->kind == BT_READER_K_MEMBER; part = at(m, part)->parent) {
        while (at(m, object)->kind == BT_READER_K_MEMBER && at(m, object)->a > at(m, part)->a) {
            object = at(m, object)->parent;
        }
        if (at(m, object)->kind != BT_READER_K_MEMBER || at(m, object)->a != at(m, part)->a ||
            at(m, object)->b != at(m, part)->b) {
            return false;
        }
    }
    return true;
}

/* Returns whether the object has a key that part lacks and that begins with the text. */
static bool has_key(const struct bt_automaton *m, uint32_t object, uint32_t part, uint32_t text)
{
    uint32_t n = length(m, text);
    for (; at(m, object)->kind == BT_READER_K_MEMBER; object = at(m, object)->parent) {
        uint32_t key = at(m, object)->a;
        if (length(m, key) >= n && first_of(m, key, n) == text && member_of(m, part, key) == 0) {
            return true;
        }
    }
    return false;
}

/* Returns whether what was read in path[i..n) can become the value v. */
static bool may_become(const struct bt_automaton *m, uint32_t v, const uint32_t *path, uint32_t i,
                       uint32_t n)
{
    for (; i < n; i++) {
        const struct bt_reader_node *p = at(m, path[i]);
        uint8_t type = at(m, v)->type;
        bool last = i + 1 == n;
        switch ((enum bt_reader_kind)p->kind) {
        case BT_READER_K_STRING:
            return type == 'S' && length(m, v) >= length(m, p->a) &&
                   first_of(m, v, length(m, p->a)) == p->a;
        case BT_READER_K_SCALAR: {
            uint32_t c = at(m, first_of(m, p->a, 1))->a;
            return type == (uint8_t)(c == '-' || c <= '9' ? 'N' : 'W');
        }
        case BT_READER_K_ARRAY:
            if (type != 'A' || length(m, v) < length(m, p->a) + !last ||
                first_of(m, v, length(m, p->a)) != p->a) {
                return false;
            }
            v = last ? v : at(m, first_of(m, v, length(m, p->a) + 1))->a;
            break;
        case BT_READER_K_OBJECT:
            if (type != 'O' || !has_members(m, v, p->a)) {
                return false;
            }
            if (!last && at(m, path[i + 1])->kind == BT_READER_K_STRING &&
                at(m, path[i + 1])->b & IS_KEY) {
                return has_key(m, v, p->a, at(m, path[i + 1])->a);
            }
            if (p->b != 0) {
                uint32_t value = member_of(m, v, p->b & ~KEY_ARMED);
                v = last ? v : value;
                if (value == 0) {
                    return false;
                }
            }
            break;
        case BT_READER_K_TOP:
        case BT_READER_K_EMPTY:
        case BT_READER_K_TEXT:
        case BT_READER_K_ITEM:
        case BT_READER_K_MEMBER: return true;
        }
    }
    return true;
}

static bool may_double(struct bt_automaton *m, uint32_t reader, uint32_t level)
{
    uint32_t path[PATH_MAX_PLACES], n = path_to(m, reader, level, path);
    if (n == 0) { /* the array has not begun */
        return false;
    }
    uint32_t list = at(m, path[0])->a;
    if (n > PATH_MAX_PLACES) {
        return length(m, list) > 0;
    }
    for (; length(m, list) > 0; list = at(m, list)->parent) {
        if (!bt_rx_work(m->rx, n)) {
            return true;
        }
        if (may_become(m, at(m, list)->a, path, 1, n)) {
            return true;
        }
    }
    return false;
}

bool bt_reader_may_double(struct bt_automaton *m, uint32_t reader, uint32_t level)
{
    if (level != 0) {
        return may_double(m, reader, level);
    }
    const struct bt_reader_node *n = at(m, reader);
    if (n->kind == BT_READER_K_SCALAR && at(m, n->parent)->kind == BT_READER_K_ARRAY &&
        at(m, n->parent)->b & TRACKED) {
        /* an item may have ended, and the next byte would make it equal to an earlier one */
        return true;
    }
    for (level = n->level; level > 0; level--) {
        if (may_double(m, reader, level)) {
            return true;
        }
    }
    return false;
}
