/* Inside of a set of expressions. rx.c has the makers, rx_dfa.c the automaton, rx_chars.c the bytes
 * of characters; automaton.c and vocab code step through rows directly. */
#ifndef BT_GRAMMAR_RX_PRIV_H
#define BT_GRAMMAR_RX_PRIV_H

#include "common/grammar/rx.h"

enum bt_rx_kind {
    BT_RX_K_NONE,
    BT_RX_K_EMPTY,
    BT_RX_K_CLASS,   /* a: number of the class */
    BT_RX_K_CONCAT,  /* a, then b; a is no concat */
    BT_RX_K_REPEAT,  /* a, b to c times */
    BT_RX_K_OR,      /* lists[a..a+b), sorted */
    BT_RX_K_AND,     /* lists[a..a+b), sorted */
    BT_RX_K_NOT,     /* a */
    BT_RX_K_MULTIPLE /* decimal digits that make b, the number so far modulo a, a multiple of a */
};
#define BT_RX_ANY 2u /* all texts: the class of all bytes, repeated */

/* flags of a node */
#define BT_RX_F_NULLABLE   1u  /* matches the empty text */
#define BT_RX_F_POSITIVE   2u  /* has no And or Not inside, so it matches something */
#define BT_RX_F_ALIVE      4u  /* proved to match something */
#define BT_RX_F_DEAD       8u  /* proved to match nothing */
#define BT_RX_F_ENDS       16u /* accepts, or goes on by BT_RX_MARK */
#define BT_RX_F_ENDS_KNOWN 32u
/* Matches sequences of whole characters of an encoding only: a subset of all texts of the encoding.
 * Not all nodes of which that is true have it. */
#define BT_RX_F_CHARS     0x40u /* << enum bt_rx_encoding */
#define BT_RX_F_CHARS_ALL (3u * BT_RX_F_CHARS)
#define BT_RX_F_FINITE    0x100u /* matches finitely many texts */

/* What the byte of a marker is; no UTF-8 text has it. program.c ends the keys of objects with it.
 */
#define BT_RX_MARK    0xFE
#define BT_RX_SPECIAL 0xFF /* before the text of a special token */

/* A transition: an expression, or BT_RX_UNKNOWN. The highest bit says that the target accepts or
 * may go on by BT_RX_MARK. */
#define BT_RX_UNKNOWN UINT32_MAX
#define BT_RX_ENDS    0x80000000u
#define BT_RX_ID_MAX  0x3FFFFFFFu

struct bt_rx_part { /* a partition of the bytes; interned */
    uint8_t map[256];
    uint8_t rep[256]; /* a byte of each class */
    uint32_t n, id, next;
};
struct bt_rx_row {
    const uint8_t *map; /* of the node's partition */
    uint32_t n;
    uint32_t to[];
};
struct bt_rx_node {
    uint8_t kind;
    uint16_t flags;
    uint32_t a, b, c;
    uint32_t next;    /* in its hash chain */
    uint32_t seen;    /* number of the last search that came here */
    uint32_t need;    /* no derivative's shortest text has more bytes (without And and Not) */
    uint32_t min_len; /* bytes of a text, at least (without And and Not: exactly) */
    struct bt_rx_part *part; /* NULL: not computed yet */
    struct bt_rx_row *row;   /* NULL: no step was made yet */
};
struct bt_rx_mark { /* how much a set held */
    uint32_t n_nodes, n_lists, n_classes, n_chunks;
    char *chunk;
    size_t chunk_left, chunk_bytes;
};
struct bt_rx_search { /* for a state that accepts; states have numbers in the order of meeting */
    uint32_t *state, *parent, *bound; /* [cap] */
    uint32_t n, cap, number;
    uint32_t *heap; /* [cap] numbers of states to look at */
    uint32_t n_heap;
};
struct bt_rx_set {
    size_t max_bytes, bytes;
    bool full;
    bt_rx_t all_chars[2]; /* by encoding: any one character, BT_RX_NONE: not made yet */
    bool has_marks;       /* expressions may contain BT_RX_MARK */
    bt_rx_t mark_class;   /* of that byte alone */
    uint64_t work;        /* left */
    uint32_t depth;
    struct bt_rx_node *nodes;
    uint32_t n_nodes, nodes_cap;
    uint32_t *heads; /* hash chains of nodes */
    uint32_t n_heads;
    uint32_t *lists;
    uint32_t n_lists, lists_cap;
    uint64_t (*classes)[4];
    uint32_t n_classes, classes_cap;
    uint32_t *scratch; /* a stack of lists under construction */
    uint32_t n_scratch, scratch_cap;
    struct bt_rx_search search;
    struct bt_rx_part **parts;
    uint32_t n_parts, parts_cap;
    uint32_t part_heads[256];
    char *chunk; /* rows and partitions come out of chunks, which never move */
    size_t chunk_left, chunk_bytes;
    void **chunks;
    uint32_t n_chunks, chunks_cap;
    bt_rx_t json_char[128]; /* of strings; names and constants consist of them. NONE: not made */
};

static inline struct bt_rx_node *bt_rx_at(const struct bt_rx_set *s, bt_rx_t a)
{
    return &s->nodes[a];
}
static inline bool bt_rx_nullable(const struct bt_rx_set *s, bt_rx_t a)
{
    return s->nodes[a].flags & BT_RX_F_NULLABLE;
}
/* Flags of the encodings all of whose texts the node matches. */
static inline uint8_t bt_rx_universe(const struct bt_rx_set *s, const struct bt_rx_node *n)
{
    if (n->kind != BT_RX_K_REPEAT || n->b != 0 || n->c != BT_RX_NO_MAX) {
        return 0;
    }
    return n->a == s->all_chars[BT_RX_UTF8]          ? BT_RX_F_CHARS << BT_RX_UTF8
           : n->a == s->all_chars[BT_RX_JSON_STRING] ? BT_RX_F_CHARS << BT_RX_JSON_STRING
                                                     : 0;
}
/* Takes work from the budget; false: the set is out of budget or memory. */
static inline bool bt_rx_work(struct bt_rx_set *s, uint32_t n)
{
    if (s->work < n || s->full) {
        s->work = s->full ? s->work : 0;
        s->full = true;
        return false;
    }
    s->work -= n;
    return true;
}

/* rx_set.c. The node with this content (flags and bounds are made here), BT_RX_FAILED: a limit. */
bt_rx_t bt_rx_intern(struct bt_rx_set *s, struct bt_rx_node n);
/* An Or or And of scratch[base..), sorted and without doubles, which it takes off the stack. */
bt_rx_t bt_rx_intern_list(struct bt_rx_set *s, uint8_t kind, uint32_t base);
/* Gives up: the set is full, and the scratch stack is cut to base. Returns BT_RX_FAILED. */
bt_rx_t bt_rx_fail(struct bt_rx_set *s, uint32_t base);
uint32_t bt_rx_add_counts(uint32_t a, uint32_t b); /* BT_RX_NO_MAX stays that */
/* Memory that lives as long as the set; NULL: over the limit. */
void *bt_rx_alloc(struct bt_rx_set *s, size_t n);
/* Makes room for one element more in an array of the set. */
bool bt_rx_grow(struct bt_rx_set *s, void *array_p, uint32_t n, uint32_t *cap, size_t size);
bool bt_rx_take(struct bt_rx_set *s, size_t bytes); /* from the limit */
bool bt_rx_push(struct bt_rx_set *s, bt_rx_t a);    /* onto the scratch stack */
/* rx.c. Or and And of scratch[base..), which they take off the stack. */
bt_rx_t bt_rx_or_scratch(struct bt_rx_set *s, uint32_t base);
bt_rx_t bt_rx_and_scratch(struct bt_rx_set *s, uint32_t base);

/* What the set holds now, and back to it: what was made later is forgotten. */
void bt_rx_mark(const struct bt_rx_set *s, struct bt_rx_mark *mark);
void bt_rx_rewind(struct bt_rx_set *s, const struct bt_rx_mark *mark);

/* rx_relax.c. The expression without upper limits of characters that are at least `bytes` bytes
 * away: a text of so many bytes may follow in a if and only if it may follow in the result. */
bt_rx_t bt_rx_relax(struct bt_rx_set *s, bt_rx_t a, uint32_t bytes);

/* How many characters of an encoding may come next whatever they are; *encodings: flags
 * BT_RX_F_CHARS of those encodings. BT_RX_FREE: any number; -1: this does not show it. Not
 * negative: a matches something. */
#define BT_RX_FREE INT64_MAX
int64_t bt_rx_free_chars(const struct bt_rx_set *s, bt_rx_t a, uint8_t *encodings);

/* rx_dfa.c */
struct bt_rx_part *bt_rx_part(struct bt_rx_set *s, bt_rx_t a);    /* NULL: failed */
struct bt_rx_row *bt_rx_row_make(struct bt_rx_set *s, bt_rx_t a); /* NULL: failed */
uint32_t bt_rx_fill(struct bt_rx_set *s, bt_rx_t a,
                    uint8_t byte); /* a transition; UNKNOWN: failed */
struct bt_rx_part *bt_rx_part_meet(struct bt_rx_set *s, struct bt_rx_part *p, struct bt_rx_part *q);

/* A transition with its bit BT_RX_ENDS: 0 (BT_RX_NONE) is dead, BT_RX_UNKNOWN is a failure. */
static inline uint32_t bt_rx_next(struct bt_rx_set *s, bt_rx_t a, uint8_t byte)
{
    const struct bt_rx_row *r = s->nodes[a].row;
    if (__builtin_expect(r != NULL, 1)) {
        uint32_t t = r->to[r->map[byte]];
        if (__builtin_expect(t != BT_RX_UNKNOWN, 1)) {
            return t;
        }
    }
    return bt_rx_fill(s, a, byte);
}

#endif
