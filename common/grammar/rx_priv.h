/* Private to sets of expressions. rx.c has the makers, rx_dfa.c the automaton, rx_chars.c the bytes
 * of characters. The program's automaton and the vocabulary step through rows directly. */
#ifndef BT_GRAMMAR_RX_PRIV_H
#define BT_GRAMMAR_RX_PRIV_H

#include "common/grammar/rx.h"

enum bt_rx_kind {
    BT_RX_K_NONE,
    BT_RX_K_EMPTY,
    BT_RX_K_CLASS,  /* a: number of the class */
    BT_RX_K_CONCAT, /* a, then b; a is no concat */
    BT_RX_K_REPEAT, /* a, b to c times */
    BT_RX_K_OR,     /* lists[a..a+b), sorted */
    BT_RX_K_AND,    /* lists[a..a+b), sorted */
    BT_RX_K_NOT,    /* a */
    /* decimal digits that make the number so far (whose remainder by a is b) a multiple of a */
    BT_RX_K_MULTIPLE
};
#define BT_RX_ANY 2u /* all texts: the class of all bytes, repeated */

/* flags of a node */
#define BT_RX_F_NULLABLE   1u  /* matches the empty text */
#define BT_RX_F_POSITIVE   2u  /* has no And or Not inside, so it matches something */
#define BT_RX_F_ALIVE      4u  /* proved to match something */
#define BT_RX_F_DEAD       8u  /* proved to match no text */
#define BT_RX_F_ENDS       16u /* accepts, or BT_RX_MARK may follow */
#define BT_RX_F_ENDS_KNOWN 32u
/* All its texts consist of whole characters of the encoding. The flag may be missing although this
 * is true. */
#define BT_RX_F_CHARS     0x40u /* << enum bt_rx_encoding */
#define BT_RX_F_CHARS_ALL (3u * BT_RX_F_CHARS)
#define BT_RX_F_FINITE    0x100u /* matches finitely many texts */

/* The byte of a marker, which no UTF-8 text contains. program.c ends the keys of objects with
 * it. */
#define BT_RX_MARK    0xFE
#define BT_RX_SPECIAL 0xFF /* before the text of a special token */

/* A transition is an expression or BT_RX_UNKNOWN. The highest bit says that its target accepts,
 * or that BT_RX_MARK may follow. */
#define BT_RX_UNKNOWN UINT32_MAX
#define BT_RX_ENDS    0x80000000u
#define BT_RX_ID_MAX  0x3FFFFFFFu

struct bt_rx_part { /* a partition of the bytes; equal partitions exist once */
    uint8_t map[256];
    uint8_t rep[256]; /* one byte of each class */
    uint32_t n, id, next;
    uint64_t hash; /* of map and n */
};
struct bt_rx_row {
    const uint8_t *map; /* the map of the node's partition */
    uint32_t n;
    uint32_t to[];
};
struct bt_rx_node {
    uint8_t kind;
    uint16_t flags;
    uint32_t a, b, c;
    uint32_t next; /* next node of the hash chain */
    uint32_t seen; /* number of the last search that visited this node */
    /* an upper bound: bytes of the shortest text of any derivative (without And and Not) */
    uint32_t need;
    uint32_t min_len; /* a lower bound: bytes of any text (without And and Not it is exact) */
    struct bt_rx_part *part; /* NULL: not computed yet */
    struct bt_rx_row *row;   /* NULL: no step was made yet */
};
struct bt_rx_mark { /* how much memory a set has used at one moment */
    uint32_t n_nodes, n_lists, n_classes, n_chunks;
    char *chunk;
    size_t chunk_left, chunk_bytes;
};
/* a search for a state that accepts; states are numbered as the search meets them */
struct bt_rx_search {
    uint32_t *state, *parent, *bound; /* [cap] */
    uint32_t n, cap, number;
    uint32_t *heap; /* [cap] numbers of states that were not visited yet */
    uint32_t n_heap;
};
struct bt_rx_set {
    size_t max_bytes, bytes;
    bool full;
    bt_rx_t all_chars[2]; /* by encoding: any one character; BT_RX_NONE: not made yet */
    bool has_marks;       /* expressions may contain BT_RX_MARK */
    bt_rx_t mark_class;   /* the class of the byte BT_RX_MARK */
    uint64_t work;        /* work that is left */
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
    uint32_t part_heads[1024];
    char *chunk; /* rows and partitions are in chunks, which never move */
    size_t chunk_left, chunk_bytes;
    void **chunks;
    uint32_t n_chunks, chunks_cap;
    /* the characters of JSON strings, for names and constants; NONE: not made yet */
    bt_rx_t json_char[128];
};

static inline struct bt_rx_node *bt_rx_at(const struct bt_rx_set *s, bt_rx_t a)
{
    return &s->nodes[a];
}
static inline bool bt_rx_nullable(const struct bt_rx_set *s, bt_rx_t a)
{
    return s->nodes[a].flags & BT_RX_F_NULLABLE;
}
/* Flags of the encodings of which the node matches all texts. */
static inline uint8_t bt_rx_universe(const struct bt_rx_set *s, const struct bt_rx_node *n)
{
    if (n->kind != BT_RX_K_REPEAT || n->b != 0 || n->c != BT_RX_NO_MAX) {
        return 0;
    }
    return n->a == s->all_chars[BT_RX_UTF8]          ? BT_RX_F_CHARS << BT_RX_UTF8
           : n->a == s->all_chars[BT_RX_JSON_STRING] ? BT_RX_F_CHARS << BT_RX_JSON_STRING
                                                     : 0;
}
/* Takes work from the budget. false: the set has no budget or no memory left. */
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

/* rx_set.c: the node with this content; flags and bounds are computed here. BT_RX_FAILED: a
 * limit was met. */
bt_rx_t bt_rx_intern(struct bt_rx_set *s, struct bt_rx_node n);
/* An Or or And node of scratch[base..), which must be sorted and without doubles. Takes them off
 * the stack. */
bt_rx_t bt_rx_intern_list(struct bt_rx_set *s, uint8_t kind, uint32_t base);
/* Gives up: marks the set as full and cuts the scratch stack to base. Returns BT_RX_FAILED. */
bt_rx_t bt_rx_fail(struct bt_rx_set *s, uint32_t base);
uint32_t bt_rx_add_counts(uint32_t a, uint32_t b); /* a sum with BT_RX_NO_MAX is BT_RX_NO_MAX */
/* Memory that lives as long as the set. NULL: over the limit. */
void *bt_rx_alloc(struct bt_rx_set *s, size_t n);
/* Makes room for one more element in an array of the set. */
bool bt_rx_grow(struct bt_rx_set *s, void *array_p, uint32_t n, uint32_t *cap, size_t size);
bool bt_rx_take(struct bt_rx_set *s, size_t bytes); /* takes bytes from the limit */
bool bt_rx_push(struct bt_rx_set *s, bt_rx_t a);    /* pushes onto the scratch stack */
/* rx.c: Or and And of scratch[base..), which they take off the stack. */
bt_rx_t bt_rx_or_scratch(struct bt_rx_set *s, uint32_t base);
bt_rx_t bt_rx_and_scratch(struct bt_rx_set *s, uint32_t base);

/* bt_rx_mark records what the set contains now. bt_rx_rewind removes all that was made later. */
void bt_rx_mark(const struct bt_rx_set *s, struct bt_rx_mark *mark);
void bt_rx_rewind(struct bt_rx_set *s, const struct bt_rx_mark *mark);

/* rx_relax.c: the expression without upper limits on characters that are `bytes` bytes away or
 * more. In the result the same texts of up to that many bytes may follow as in a. */
bt_rx_t bt_rx_relax(struct bt_rx_set *s, bt_rx_t a, uint32_t bytes);

/* Returns how many characters of an encoding may come next, whatever they are. *encodings: flags
 * BT_RX_F_CHARS of these encodings. BT_RX_FREE: any number of characters. -1: not known. If the
 * result is not negative, a matches some text. */
#define BT_RX_FREE INT64_MAX
int64_t bt_rx_free_chars(const struct bt_rx_set *s, bt_rx_t a, uint8_t *encodings);

/* rx_dfa.c */
struct bt_rx_part *bt_rx_part(struct bt_rx_set *s, bt_rx_t a);    /* NULL: failed */
struct bt_rx_row *bt_rx_row_make(struct bt_rx_set *s, bt_rx_t a); /* NULL: failed */
uint32_t bt_rx_fill(struct bt_rx_set *s, bt_rx_t a,
                    uint8_t byte); /* a transition; UNKNOWN: a limit was met */
struct bt_rx_part *bt_rx_part_meet(struct bt_rx_set *s, struct bt_rx_part *p, struct bt_rx_part *q);

/* A transition with its bit BT_RX_ENDS. 0 (BT_RX_NONE): no text can follow. BT_RX_UNKNOWN: a
 * limit was met. */
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
