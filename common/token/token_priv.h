/* Inside of common/token: vocabulary tables, pre-tokenizer steps, BPE scratch. Everything is built
 * at load and immutable afterwards, except `scratch` and `cache`, which make one tokenizer usable
 * by one thread at a time; regexes lend their scratch to one thread and make it for another.
 * Nothing outside common/token includes this. */
#ifndef BT_TOKEN_TOKEN_PRIV_H
#define BT_TOKEN_TOKEN_PRIV_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <jansson.h>
#include <pcre2.h>

#include "common/token/token.h"

#define BT_TOKEN_NONE    UINT32_MAX
#define BT_TOKEN_ID_MAX  (1u << 24) /* an id beyond is taken for a broken file */
#define BT_TOKEN_LEN_MAX (1u << 30) /* bytes of one text */
#define BT_WORD_CACHE    8192u      /* entries, direct mapped */

/* Where a message about a broken file goes. */
struct bt_token_err {
    const char *path;
    char *buf;
    size_t cap;
};
/* Writes "PATH: message" and returns `status`. */
bt_status_t bt_token_fail(const struct bt_token_err *e, bt_status_t status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- utf8.c ---- */
/* Decodes one character of [p, end); returns its length, or 0 if it is not UTF-8 there. */
size_t bt_utf8_decode(const char *p, const char *end, uint32_t *cp_p);
size_t bt_utf8_encode(uint32_t cp, char out[4]);
bool bt_utf8_valid(const char *p, size_t n);
bool bt_utf8_is_space(uint32_t cp); /* White_Space of Unicode */
/* Appends [p, p+n). Bytes that are not UTF-8 become U+FFFD (maximal subparts). Returns how many
 * bytes at the end may still become a character; they are not appended unless `final`. */
size_t bt_utf8_append_lossy(struct bt_buf *out, const char *p, size_t n, bool final);

/* ---- vocab.c ---- */
struct bt_str_ref {
    uint32_t off, len;
};
/* Hash set of ids keyed by a string of `refs` in `pool`. */
struct bt_id_table {
    uint32_t *slots; /* id + 1; 0 = empty */
    uint32_t mask;
};
struct bt_merge {
    uint64_t pair; /* left << 32 | right; UINT64_MAX = empty */
    uint32_t rank, id;
};
struct bt_vocab {
    struct bt_buf pool;
    struct bt_str_ref *content; /* [n] as written in the file; len 0 = no such id */
    struct bt_str_ref *bytes;   /* [n] the decoded bytes of each token */
    uint8_t *flags;             /* [n] BT_TOK_* */
    uint32_t n;                 /* highest id + 1 */
    struct bt_id_table by_content;
    struct bt_id_table by_bytes; /* byte-level models only: whole words */
    struct bt_merge *merges;
    uint32_t merge_mask;
    uint32_t byte_id[256]; /* token of a single byte, BT_TOKEN_NONE if there is none */
};
enum {
    BT_TOK_PRESENT = 1,
    BT_TOK_SPECIAL = 2,
    BT_TOK_MODEL = 4,    /* in the model's vocabulary, not only in added_tokens */
    BT_TOK_ALPHABET = 8, /* every character is of the byte-level alphabet */
    BT_TOK_BYTE = 16,    /* <0xNN> of a byte-fallback model */
};
void bt_vocab_cleanup(struct bt_vocab *v);
void bt_vocab_reserve(struct bt_vocab *v, uint32_t n);
/* Puts a token; the id must be unused. */
void bt_vocab_put(struct bt_vocab *v, uint32_t id, const char *s, size_t len, uint8_t flags);
/* Builds by_content (and by_bytes) once all tokens are in. false: *dup_p is a repeated content. */
bool bt_vocab_index(struct bt_vocab *v, bool byte_level, uint32_t *dup_p);
uint32_t bt_vocab_find(const struct bt_vocab *v, const char *s, size_t len);
uint32_t bt_vocab_find_bytes(const struct bt_vocab *v, const char *s, size_t len);
void bt_vocab_merges_init(struct bt_vocab *v, size_t n);
/* A repeated pair takes the later rank, as the reference implementation does. */
void bt_vocab_merge_put(struct bt_vocab *v, uint32_t left, uint32_t right, uint32_t rank,
                        uint32_t id);
const struct bt_merge *bt_vocab_merge_get(const struct bt_vocab *v, uint32_t left, uint32_t right);
/* The byte of a code point of the byte-level alphabet; -1: not of the alphabet. */
int bt_char_to_byte(uint32_t cp);

/* ---- regex.c ---- */
struct bt_regex;
/* Compiles a pattern written for Oniguruma. Constructs that mean something else in PCRE2 are
 * ERR_UNSUPPORTED. literal: the pattern is plain text. */
bt_status_t bt_regex_create(const char *pattern, size_t len, bool literal, struct bt_regex **re_p,
                            const struct bt_token_err *e) BT_MUST_CHECK;
void bt_regex_destroy(struct bt_regex *re);
/* Next match in text[from..len): 1 with *start_p and *end_p, 0 none, -1 a limit was reached. */
int bt_regex_next(const struct bt_regex *re, const char *text, size_t len, size_t from,
                  size_t *start_p, size_t *end_p);

/* ---- normal.c: normalizers ---- */
struct bt_normalizer;
bt_status_t bt_normalizer_parse(const json_t *j, struct bt_normalizer **n_p,
                                const struct bt_token_err *e) BT_MUST_CHECK;
void bt_normalizer_destroy(struct bt_normalizer *n);
/* Replaces the content of `text` by its normal form. */
bt_status_t bt_normalizer_run(const struct bt_normalizer *n, struct bt_buf *text) BT_MUST_CHECK;

/* ---- normal_form.c ---- */
enum bt_normal_form { BT_NFC, BT_NFD, BT_NFKC, BT_NFKD };
/* Replaces UTF-8 text by its normalization form. A compatibility form may be 11 times as long. */
void bt_normal_form(struct bt_buf *text, enum bt_normal_form form);

/* ---- pretok.c: pre-tokenizers ---- */
struct bt_pretok;
struct bt_pieces { /* consecutive ranges of `text` */
    struct bt_buf text;
    struct bt_str_ref *refs;
    size_t n, cap;
};
void bt_pieces_cleanup(struct bt_pieces *p);
bt_status_t bt_pretok_parse(const json_t *j, struct bt_pretok **p_p,
                            const struct bt_token_err *e) BT_MUST_CHECK;
void bt_pretok_destroy(struct bt_pretok *p);
bool bt_pretok_byte_level(const struct bt_pretok *p);
/* Cuts text into words. at_start: the text begins at offset 0 of the input. */
bt_status_t bt_pretok_run(const struct bt_pretok *p, const char *text, size_t len, bool at_start,
                          struct bt_pieces *out) BT_MUST_CHECK;

/* ---- bpe.c ---- */
struct bt_bpe_symbol {
    uint32_t id;
    int32_t prev, next; /* -1 = none */
    uint32_t len;       /* 0 = merged away */
};
struct bt_bpe_cand {
    uint32_t rank;
    int32_t pos;
    uint32_t left, right;
};
struct bt_word_entry { /* one cache line */
    uint8_t len, n;
    char word[30];
    uint32_t ids[8];
};
struct bt_bpe {
    bool byte_level, ignore_merges, byte_fallback, fuse_unk;
    uint32_t unk_id;
    struct bt_bpe_symbol *symbols;
    size_t symbols_cap;
    struct bt_bpe_cand *heap;
    size_t heap_n, heap_cap;
    struct bt_word_entry *cache;
    const struct bt_token_watch *watch; /* NULL: it is never stopped */
};
/* Does somebody want long work to stop? Asked every BT_LOOK words or merges. */
#define BT_LOOK 1024
static inline bool bt_token_stopped(const struct bt_token_watch *w)
{
    return w != NULL && w->stop(w->arg);
}
void bt_bpe_cleanup(struct bt_bpe *b);
void bt_bpe_encode_word(struct bt_bpe *b, const struct bt_vocab *v, const char *word, size_t len,
                        struct bt_tokens *out);
/* Gives back the scratch of an unusually long word. */
void bt_bpe_trim(struct bt_bpe *b);
void bt_tokens_push(struct bt_tokens *t, uint32_t id);

/* ---- added.c: added tokens written in the text ---- */
struct bt_added {
    uint32_t id;
    struct bt_str_ref match; /* in bt_added_set.pool; the normalized content */
    bool single_word, lstrip, rstrip;
};
struct bt_added_set {
    struct bt_buf pool;
    struct bt_added *items; /* sorted by bytes after bt_added_index */
    size_t n, cap;
    uint32_t first[257]; /* items[first[b]..first[b+1]) begin with byte b */
    pcre2_code *word;    /* a word character, for single_word */
};
struct bt_added_hit {
    size_t start, end;
    uint32_t id;
};
void bt_added_cleanup(struct bt_added_set *s);
void bt_added_put(struct bt_added_set *s, struct bt_added item, const char *match, size_t len);
void bt_added_index(struct bt_added_set *s);
/* The next token in text[from..len), leftmost and then longest; *done is where the previous one
 * ended. false: no more. */
bool bt_added_next(const struct bt_added_set *s, const char *text, size_t len, size_t *from,
                   size_t done, struct bt_added_hit *hit);

/* ---- decoder ---- */
struct bt_decoder {
    bool byte_level;    /* tokens are in the byte alphabet */
    bool byte_fallback; /* <0xNN> is a byte */
    bool space_mark;    /* U+2581 is a space */
    bool strip_first;   /* one leading space of the whole text goes */
};

struct bt_tokenizer {
    struct bt_vocab vocab;
    struct bt_added_set raw, normalized; /* matched before and after the normalizer */
    struct bt_normalizer *normalizer;    /* NULL = none */
    struct bt_pretok *pretok;            /* NULL = none */
    struct bt_decoder decoder;
    struct bt_tokens prefix, suffix; /* tokens that the post-processor puts around a text */
    struct bt_bpe *bpe;
    struct bt_pieces *pieces; /* scratch */
    bool shared;              /* another tokenizer owns everything except bpe and pieces */
};

/* ---- load.c ---- */
bt_status_t bt_tokenizer_parse(const json_t *root, struct bt_tokenizer *t,
                               const struct bt_token_err *e) BT_MUST_CHECK;
/* Reads a whole file of at most `max` bytes. ERR_NOT_FOUND if it does not exist. */
bt_status_t bt_token_read_file(const char *path, size_t max, struct bt_buf *out,
                               const struct bt_token_err *e) BT_MUST_CHECK;

/* ---- around.c ---- */
/* What DIR/tokenizer_config.json, if there is one, says of the tokens around a text: where its
 * tokenizer_class lets it, add_bos_token and add_eos_token set prefix and suffix. ERR_INVALID: it
 * is no JSON, or names a token that there is not. */
bt_status_t bt_token_around_load(const char *dir, struct bt_tokenizer *t, char *err,
                                 size_t err_cap) BT_MUST_CHECK;

#endif
