/* Constrained output. A grammar, made from a JSON schema, a regular expression, a list of choices
 * or GBNF, says which tokens may follow the tokens so far. The state follows from the tokens alone,
 * so forks, preempted rows, other workers and drafts that are taken back need no further state.
 * Pure: no clock, no I/O.
 * A vocabulary never changes, and threads share it. Threads also share a grammar, which locks
 * itself. A matcher belongs to one thread at a time. */
#ifndef BT_GRAMMAR_GRAMMAR_H
#define BT_GRAMMAR_GRAMMAR_H

#include "common/base/base.h"

struct bt_grammar_vocab;
struct bt_grammar;
struct bt_matcher;

/* ---- vocabulary: a trie over the bytes of all tokens, with slices ---- */
struct bt_grammar_token {
    const void *bytes; /* raw bytes (bt_tokenizer_piece) */
    uint32_t n;        /* 0: the id has no token; it is never allowed */
    bool special;      /* allowed only where the grammar names this token */
};
/* Copies tokens[vocab]. eos: the ids that may come only where the grammar may end. */
bt_status_t bt_grammar_vocab_create(const struct bt_grammar_token *tokens, uint32_t vocab,
                                    const uint32_t *eos, uint32_t n_eos,
                                    struct bt_grammar_vocab **v_p) BT_MUST_CHECK;
void bt_grammar_vocab_destroy(struct bt_grammar_vocab *v);
/* A token of the vocabulary, which owns the bytes. n is 0 for ids that add nothing to a text. */
struct bt_grammar_token bt_grammar_vocab_token(const struct bt_grammar_vocab *v, uint32_t id);

/* ---- compiling ---- */
/* The numbers are part of the message Submit. */
enum bt_grammar_kind {
    BT_GRAMMAR_ANY = 0,         /* no constraint; not compiled */
    BT_GRAMMAR_JSON_SCHEMA = 1, /* text: a schema. true or {}: any JSON value */
    BT_GRAMMAR_JSON_OBJECT = 2, /* text is ignored: any JSON object */
    BT_GRAMMAR_REGEX = 3,       /* the whole text matches */
    BT_GRAMMAR_CHOICE = 4,      /* text: a JSON array of strings */
    BT_GRAMMAR_GBNF = 5,        /* llama.cpp's EBNF; root is the start */
    BT_GRAMMAR_TAGS = 6,        /* text: JSON as tags.c says; free text with constrained parts */
};
struct bt_grammar_spec {
    enum bt_grammar_kind kind;
    const char *text; /* UTF-8 */
    size_t len;
};
/* Compiles within the limits below. ERR_INVALID: the text is not of its kind. ERR_UNSUPPORTED:
 * the text asks for something that cannot be enforced. ERR_EXHAUSTED: the text is too large. err
 * names the place (in a schema its JSON pointer, "#/properties/a/not: ...") and the remedy. */
bt_status_t bt_grammar_compile(const struct bt_grammar_spec *spec, struct bt_grammar **g_p,
                               char *err, size_t err_cap) BT_MUST_CHECK;
#define BT_GRAMMAR_TEXT_MAX (512 * 1024) /* bytes of a spec's text */
#define BT_GRAMMAR_BYTES_MAX                                                                       \
    (64 * 1024 * 1024) /* memory of one grammar and of all that it keeps                           \
                        */
struct bt_grammar *bt_grammar_ref(struct bt_grammar *g);
void bt_grammar_unref(struct bt_grammar *g);

/* A cache of compiled grammars by kind and text. They have at most max_bytes of memory together:
 * the cache evicts those that were used least recently, but none that is in use. Threads share a
 * cache. */
struct bt_grammar_cache;
struct bt_grammar_cache *bt_grammar_cache_create(size_t max_bytes);
void bt_grammar_cache_destroy(struct bt_grammar_cache *c);
/* As bt_grammar_compile. The caller gets a reference in *g_p. Also ERR_EXHAUSTED: with the
 * grammars in use, all would have more than four times max_bytes. */
bt_status_t bt_grammar_cache_get(struct bt_grammar_cache *c, const struct bt_grammar_spec *spec,
                                 struct bt_grammar **g_p, char *err, size_t err_cap) BT_MUST_CHECK;

/* ---- matching ---- */
/* A matcher at the start of g. It keeps references to both. */
struct bt_matcher *bt_matcher_create(struct bt_grammar *g, const struct bt_grammar_vocab *v);
void bt_matcher_destroy(struct bt_matcher *m);

/* Limits later calls of m to this much work (units of about 10 ns). A call that needs more returns
 * BT_AGAIN. So does a call while another matcher's call without a limit uses the grammar. m has not
 * moved then; a later call uses what was built so far. UINT32_MAX, the default: only the grammar's
 * own limit (0.1 s). */
void bt_matcher_limit(struct bt_matcher *m, uint32_t work);
uint64_t bt_matcher_work(const struct bt_matcher *m); /* The work of all calls of m so far. */

/* Moves m on by a token. ERR_INVALID: the grammar does not allow the token here, and m has not
 * moved. ERR_EXHAUSTED: a limit of the grammar (threads, memory) was met. After an accepted EOS, m
 * allows no more tokens. */
bt_status_t bt_matcher_accept(struct bt_matcher *m, uint32_t token) BT_MUST_CHECK;
/* Takes back the last n accepted tokens. */
void bt_matcher_rollback(struct bt_matcher *m, uint32_t n);
uint32_t bt_matcher_tokens(const struct bt_matcher *m); /* The number of accepted tokens. */
/* bits[ceil(vocab / 32)]: bit id & 31 of word id >> 5 says that the token may follow. At least one
 * bit is set unless m is over. */
bt_status_t bt_matcher_mask(struct bt_matcher *m, uint32_t *bits) BT_MUST_CHECK;
/* Says whether EOS is allowed. */
bt_status_t bt_matcher_may_end(struct bt_matcher *m, bool *may_p) BT_MUST_CHECK;
/* The bytes that must follow because the grammar leaves no choice, at most cap of them. Returns
 * their number. */
size_t bt_matcher_forced(struct bt_matcher *m, void *bytes, size_t cap);
/* Moves m on by bytes that need not end with a token. For tests and the benchmark. */
bt_status_t bt_matcher_accept_bytes(struct bt_matcher *m, const void *bytes,
                                    size_t n) BT_MUST_CHECK;

#endif
