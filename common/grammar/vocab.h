/* A vocabulary as masks need it: a trie of all tokens, and slices. A slice contains the tokens
 * whose characters all belong to one set, for example the plain characters of a JSON string. Where
 * a state allows every text over the set, a bitmap gives the slice's tokens, and only the trie of
 * the other tokens is walked. Immutable. */
#ifndef BT_GRAMMAR_VOCAB_H
#define BT_GRAMMAR_VOCAB_H

#include "common/grammar/grammar.h"

#define BT_VOCAB_NO_TOKEN UINT32_MAX
#define BT_TOKEN_BYTES    1024u /* longer tokens are never allowed */

struct bt_trie_node { /* in depth-first order */
    uint32_t skip;    /* index of the first node after the subtree */
    uint32_t token;   /* a token that ends here, or BT_VOCAB_NO_TOKEN; `same` chains others */
    uint16_t depth;   /* bytes from the root, 1 and more */
    uint8_t byte;
};
struct bt_trie {
    struct bt_trie_node *nodes;
    uint32_t n;
};

/* Sets of characters, the larger ones first. */
enum bt_slice_set {
    BT_SLICE_TEXT,        /* all characters but controls; also tab and line ends */
    BT_SLICE_NO_TAG,      /* the characters of TEXT except < */
    BT_SLICE_JSON,        /* characters that need no escape in a JSON string */
    BT_SLICE_LINE,        /* characters of JSON that the dot of a pattern matches */
    BT_SLICE_BELOW_EF,    /* characters of JSON below U+F000; many patterns name no others */
    BT_SLICE_GRAPHIC,     /* characters of JSON without white space */
    BT_SLICE_ASCII,       /* the ASCII characters of JSON */
    BT_SLICE_ALPHA_SPACE, /* A-Z a-z and space */
    BT_SLICE_ALNUM,       /* A-Z a-z 0-9 */
    BT_SLICE_ALPHA,
    BT_SLICE_LOWER,
    BT_SLICE_SETS
};
#define BT_SLICE_STATES 14u
#define BT_SLICE_DEAD   0xFFu
#define BT_SLICE_CHARS  32u /* longer tokens are in no slice */
struct bt_slice {
    uint32_t *bits[BT_SLICE_CHARS + 1]; /* [words] tokens of at most i characters */
    struct bt_trie rest;                /* the trie of all other tokens */
};

/* Bits of `seen`. */
#define BT_SEEN_NO_LINE    (1ull << 61) /* a token that is not in the slice LINE */
#define BT_SEEN_NO_GRAPHIC (1ull << 62)

/* The bit of an ASCII character from space on. All digits have one, as have a letter's two cases.
 */
static inline uint64_t bt_seen_bit(uint8_t c)
{
    bool letter = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    uint32_t bit = letter     ? c % 32u - 1
                   : c < '0'  ? 27u + c - ' '
                   : c <= '9' ? 26u
                   : c < 'A'  ? 43u + c - ':'
                   : c < 'a'  ? 50u + c - '['
                              : 56u + c - '{';
    return 1ull << bit;
}

struct bt_grammar_vocab {
    uint32_t refs, vocab, words, n_eos;
    uint64_t serial; /* unique in this process */
    uint32_t *eos;
    uint32_t *same;   /* [vocab] the next token that has the same bytes */
    uint32_t *at;     /* [vocab + 1] offsets of the tokens in text */
    uint8_t *text;    /* a special token begins with 0xFF */
    uint32_t longest; /* bytes of the longest token */
    /* The automata of valid UTF-8 over the sets: state 0 is between characters, others are within
     * one. BT_SLICE_DEAD: not allowed. */
    uint8_t steps[BT_SLICE_SETS][BT_SLICE_STATES][256];
    struct bt_trie all;
    uint64_t *seen;     /* [all.n] what the tokens of the node's subtree consist of */
    uint32_t *has[128]; /* [words] tokens with this character; NULL: control characters */
    struct bt_slice slices[BT_SLICE_SETS];
};

struct bt_grammar_vocab *bt_grammar_vocab_ref(struct bt_grammar_vocab *v);
static inline const uint8_t *bt_vocab_bytes(const struct bt_grammar_vocab *v, uint32_t id,
                                            uint32_t *n)
{
    *n = v->at[id + 1] - v->at[id];
    return v->text + v->at[id];
}
bool bt_vocab_is_eos(const struct bt_grammar_vocab *v, uint32_t id);

#endif
