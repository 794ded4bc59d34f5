/* Builds the trie and the slices of a vocabulary. */
#include "common/grammar/vocab.h"

#include <stdlib.h>

bool bt_vocab_is_eos(const struct bt_grammar_vocab *v, uint32_t id)
{
    for (uint32_t i = 0; i < v->n_eos; i++) {
        if (v->eos[i] == id) {
            return true;
        }
    }
    return false;
}

/* ---- characters of a slice ---- */

static bool in_set(enum bt_slice_set set, uint8_t c)
{
    bool text = (c >= 0x20 && c != 0x7F) || c == '\t' || c == '\n' || c == '\r';
    bool json = c >= 0x20 && c != 0x7F && c != '"' && c != '\\';
    bool lower = c >= 'a' && c <= 'z', alpha = lower || (c >= 'A' && c <= 'Z');
    bool alnum = alpha || (c >= '0' && c <= '9');
    switch (set) {
    case BT_SLICE_TEXT: return text;
    case BT_SLICE_NO_TAG: return text && c != '<';
    case BT_SLICE_JSON:
    case BT_SLICE_LINE:
    case BT_SLICE_BELOW_EF:
    case BT_SLICE_ASCII: return json;
    case BT_SLICE_GRAPHIC: return json && c != ' ';
    case BT_SLICE_ALPHA_SPACE: return alpha || c == ' ';
    case BT_SLICE_ALNUM: return alnum;
    case BT_SLICE_ALPHA: return alpha;
    case BT_SLICE_LOWER: return lower;
    case BT_SLICE_SETS: break;
    }
    return false;
}

/* The state after the first byte of a character (Unicode 15, table 3-7). */
static uint8_t first_byte(enum bt_slice_set set, uint8_t b)
{
    if (b < 0x80) {
        return in_set(set, b) ? 0 : BT_SLICE_DEAD;
    }
    if (set > BT_SLICE_GRAPHIC || b < 0xC2 || b > (set == BT_SLICE_BELOW_EF ? 0xEE : 0xF4)) {
        return BT_SLICE_DEAD;
    }
    if (set == BT_SLICE_GRAPHIC) {
        /* It lacks the 64 characters that share all bytes but the last with a space: U+00A0,
         * U+1680, U+2000 to U+200A, U+2028, U+2029, U+202F, U+205F, U+3000, U+FEFF. */
        switch (b) {
        case 0xC2: return BT_SLICE_DEAD;
        case 0xE1: return 8;
        case 0xE2: return 9;
        case 0xE3: return 10;
        case 0xEF: return 11;
        default: break;
        }
    }
    if (set == BT_SLICE_LINE && b == 0xE2) {
        return 12;
    }
    return b < 0xE0    ? 1
           : b == 0xE0 ? 4
           : b == 0xED ? 5
           : b < 0xF0  ? 2
           : b == 0xF0 ? 6
           : b < 0xF4  ? 3
                       : 7;
}

static uint8_t slice_step(enum bt_slice_set set, uint8_t state, uint8_t byte)
{
    /* 1 to 3: as many bytes are missing. 4 to 7: only some continuation bytes may come next. 8 to
     * 11, after E1, E2, E3, EF: those of white space may not. 12, 13, after E2, E2 80: LINE lacks
     * U+2028 and U+2029. not_lo to not_hi: what may not come although lo to hi have it. */
    static const struct {
        uint8_t lo, hi, to, not_lo, not_hi;
    } next[BT_SLICE_STATES] = {{0},
                               {0x80, 0xBF, 0, 1, 0},
                               {0x80, 0xBF, 1, 1, 0},
                               {0x80, 0xBF, 2, 1, 0},
                               {0xA0, 0xBF, 1, 1, 0},
                               {0x80, 0x9F, 1, 1, 0},
                               {0x90, 0xBF, 2, 1, 0},
                               {0x80, 0x8F, 2, 1, 0},
                               {0x80, 0xBF, 1, 0x9A, 0x9A},
                               {0x80, 0xBF, 1, 0x80, 0x81},
                               {0x80, 0xBF, 1, 0x80, 0x80},
                               {0x80, 0xBF, 1, 0xBB, 0xBB},
                               {0x81, 0xBF, 1, 1, 0},
                               {0x80, 0xBF, 0, 0xA8, 0xA9}};
    if (state == 0) {
        return first_byte(set, byte);
    }
    if (state == 12 && byte == 0x80) {
        return 13;
    }
    bool in = byte >= next[state].lo && byte <= next[state].hi;
    bool out = byte >= next[state].not_lo && byte <= next[state].not_hi;
    return in && !out ? next[state].to : BT_SLICE_DEAD;
}

/* How many characters of the set a token consists of; 0: it does not belong to the slice. */
static uint32_t slice_chars(enum bt_slice_set set, const uint8_t *p, uint32_t n)
{
    uint8_t state = 0;
    uint32_t chars = 0;
    for (uint32_t i = 0; i < n && state != BT_SLICE_DEAD; i++) {
        state = slice_step(set, state, p[i]);
        chars += state == 0;
    }
    return state == 0 && chars <= BT_SLICE_CHARS ? chars : 0;
}

/* ---- the trie ---- */

static int by_bytes(const void *a, const void *b, void *arg)
{
    const struct bt_grammar_vocab *v = arg;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b, n, m;
    const uint8_t *p = bt_vocab_bytes(v, x, &n), *q = bt_vocab_bytes(v, y, &m);
    int d = memcmp(p, q, BT_MIN(n, m));
    return d != 0 ? d : n != m ? (n < m ? -1 : 1) : x < y ? -1 : x > y;
}

/* ids: sorted by bytes; of tokens with equal bytes only the first. */
static void trie_init(struct bt_trie *t, const struct bt_grammar_vocab *v, const uint32_t *ids,
                      uint32_t n)
{
    /* the path of nodes to the last token */
    uint32_t open[BT_TOKEN_BYTES + 1], depth = 0, cap = 0;
    const uint8_t *last = NULL;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t len, common = 0;
        const uint8_t *p = bt_vocab_bytes(v, ids[i], &len);
        while (common < depth && common < len && last[common] == p[common]) {
            common++;
        }
        for (; depth > common; depth--) {
            t->nodes[open[depth - 1]].skip = t->n;
        }
        if (t->n + len > cap) {
            cap = BT_MAX(cap * 2, t->n + len + 256);
            t->nodes = bt_realloc(t->nodes, cap * sizeof(*t->nodes));
        }
        for (; depth < len; depth++) {
            open[depth] = t->n;
            t->nodes[t->n++] = (struct bt_trie_node){
                .token = BT_VOCAB_NO_TOKEN, .depth = (uint16_t)(depth + 1), .byte = p[depth]};
        }
        t->nodes[open[len - 1]].token = ids[i];
        last = p;
    }
    for (; depth > 0; depth--) {
        t->nodes[open[depth - 1]].skip = t->n;
    }
    if (t->n > 0) {
        t->nodes = bt_realloc(t->nodes, t->n * sizeof(*t->nodes));
    }
}

static void slice_init(struct bt_grammar_vocab *v, enum bt_slice_set set, const uint32_t *ids,
                       uint32_t n)
{
    struct bt_slice *s = &v->slices[set];
    uint32_t *rest = bt_malloc((n + 1) * sizeof(*rest)), n_rest = 0;
    uint32_t *bits = bt_calloc((BT_SLICE_CHARS + 1) * (size_t)v->words + 1, sizeof(*bits));
    for (uint32_t i = 0; i <= BT_SLICE_CHARS; i++) {
        s->bits[i] = bits + (size_t)i * v->words;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t len;
        const uint8_t *p = bt_vocab_bytes(v, ids[i], &len);
        uint32_t chars = slice_chars(set, p, len);
        if (chars == 0) {
            rest[n_rest++] = ids[i];
        }
        for (uint32_t id = ids[i]; chars > 0 && id != BT_VOCAB_NO_TOKEN; id = v->same[id]) {
            s->bits[chars][id >> 5] |= 1u << (id & 31);
        }
    }
    for (size_t i = v->words; i < (BT_SLICE_CHARS + 1) * (size_t)v->words; i++) {
        bits[i] |= bits[i - v->words]; /* bitmap i holds all tokens of up to i characters */
    }
    trie_init(&s->rest, v, rest, n_rest);
    free(rest);
}

/* ---- what tokens consist of ---- */

static uint64_t seen_in(const struct bt_grammar_vocab *v, uint32_t id)
{
    uint32_t n;
    const uint8_t *p = bt_vocab_bytes(v, id, &n);
    uint64_t seen = (slice_chars(BT_SLICE_LINE, p, n) > 0 ? 0 : BT_SEEN_NO_LINE) |
                    (slice_chars(BT_SLICE_GRAPHIC, p, n) > 0 ? 0 : BT_SEEN_NO_GRAPHIC);
    for (uint32_t i = 0; i < n; i++) {
        seen |= p[i] >= ' ' && p[i] < 0x80 ? bt_seen_bit(p[i]) : 0; /* others are in no slice */
    }
    return seen;
}

static void has_init(struct bt_grammar_vocab *v)
{
    uint32_t *bits = bt_calloc((128 - ' ') * (size_t)v->words, sizeof(*bits));
    for (uint32_t c = ' '; c < 128; c++) {
        v->has[c] = bits + (c - ' ') * (size_t)v->words;
    }
    for (uint32_t id = 0; id < v->vocab; id++) {
        uint32_t n;
        const uint8_t *p = bt_vocab_bytes(v, id, &n);
        for (uint32_t i = 0; i < n; i++) {
            if (p[i] >= ' ' && p[i] < 0x80) {
                v->has[p[i]][id >> 5] |= 1u << (id & 31);
            }
        }
    }
}

static void seen_init(struct bt_grammar_vocab *v)
{
    v->seen = bt_calloc(v->all.n + 1, sizeof(*v->seen));
    for (uint32_t i = v->all.n; i-- > 0;) { /* subtrees before the node above them */
        const struct bt_trie_node *node = &v->all.nodes[i];
        if (node->token != BT_VOCAB_NO_TOKEN) {
            v->seen[i] |= seen_in(v, node->token);
        }
        for (uint32_t k = i + 1; k < node->skip; k = v->all.nodes[k].skip) {
            v->seen[i] |= v->seen[k];
        }
    }
}

/* ---- the vocabulary ---- */

/* The bytes that a token adds to the text; 0: the token is never allowed. No UTF-8 text contains
 * the bytes of markers and of special tokens. */
static uint32_t stored_bytes(const struct bt_grammar_token *t)
{
    if (t->n == 0 || t->n >= BT_TOKEN_BYTES || memchr(t->bytes, 0xFE, t->n) ||
        memchr(t->bytes, 0xFF, t->n)) {
        return 0;
    }
    return t->n + t->special;
}

static void copy_tokens(struct bt_grammar_vocab *v, const struct bt_grammar_token *tokens)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < v->vocab; i++) {
        uint32_t n = bt_vocab_is_eos(v, i) ? 0 : stored_bytes(&tokens[i]);
        v->at[i] = at;
        if (n > 0) {
            v->text[at] = 0xFF;
            memcpy(v->text + at + tokens[i].special, tokens[i].bytes, tokens[i].n);
        }
        at += n;
        v->longest = BT_MAX(v->longest, n);
    }
    v->at[v->vocab] = at;
}

bt_status_t bt_grammar_vocab_create(const struct bt_grammar_token *tokens, uint32_t vocab,
                                    const uint32_t *eos, uint32_t n_eos,
                                    struct bt_grammar_vocab **v_p)
{
    static uint64_t serials;
    size_t total = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        total += stored_bytes(&tokens[i]);
    }
    for (uint32_t i = 0; i < n_eos; i++) {
        if (eos[i] >= vocab) {
            return BT_ERR_INVALID;
        }
    }
    if (vocab == 0 || vocab > 1u << 24 || total > 1u << 28) {
        return BT_ERR_TOO_LARGE;
    }
    struct bt_grammar_vocab *v = bt_calloc(1, sizeof(*v));
    v->refs = 1;
    v->serial = __atomic_add_fetch(&serials, 1, __ATOMIC_RELAXED);
    v->vocab = vocab;
    v->words = BT_DIV_UP(vocab, 32);
    v->n_eos = n_eos;
    v->eos = bt_malloc((n_eos + 1) * sizeof(*v->eos));
    bt_copy(v->eos, eos, n_eos * sizeof(*eos));
    v->same = bt_malloc(vocab * sizeof(*v->same));
    memset(v->same, 0xFF, vocab * sizeof(*v->same));
    v->at = bt_malloc((vocab + 1) * sizeof(*v->at));
    v->text = bt_malloc(total + 1);
    copy_tokens(v, tokens);

    uint32_t *ids = bt_malloc(vocab * sizeof(*ids)), n = 0, k = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        if (v->at[i + 1] > v->at[i]) {
            ids[n++] = i;
        }
    }
    qsort_r(ids, n, sizeof(*ids), by_bytes, v);
    for (uint32_t i = 0; i < n; i++) { /* tokens with the same bytes are chained behind the first */
        uint32_t a = k ? v->at[ids[k - 1] + 1] - v->at[ids[k - 1]] : 0,
                 b = v->at[ids[i] + 1] - v->at[ids[i]];
        if (k && a == b && memcmp(v->text + v->at[ids[k - 1]], v->text + v->at[ids[i]], a) == 0) {
            v->same[ids[i]] = v->same[ids[k - 1]];
            v->same[ids[k - 1]] = ids[i];
        } else {
            ids[k++] = ids[i];
        }
    }
    for (uint32_t i = 0; i < BT_SLICE_SETS * BT_SLICE_STATES * 256u; i++) {
        uint32_t set = i / (BT_SLICE_STATES * 256u), state = i / 256 % BT_SLICE_STATES;
        v->steps[set][state][i & 255] =
            slice_step((enum bt_slice_set)set, (uint8_t)state, (uint8_t)i);
    }
    trie_init(&v->all, v, ids, k);
    seen_init(v);
    has_init(v);
    for (int s = 0; s < BT_SLICE_SETS; s++) {
        slice_init(v, (enum bt_slice_set)s, ids, k);
    }
    free(ids);
    *v_p = v;
    return BT_OK;
}

struct bt_grammar_token bt_grammar_vocab_token(const struct bt_grammar_vocab *v, uint32_t id)
{
    uint32_t n;
    const uint8_t *bytes = bt_vocab_bytes(v, id, &n);
    bool special = n > 0 && bytes[0] == 0xFF;
    return (struct bt_grammar_token){
        .bytes = bytes + special, .n = n - special, .special = special};
}

struct bt_grammar_vocab *bt_grammar_vocab_ref(struct bt_grammar_vocab *v)
{
    __atomic_add_fetch(&v->refs, 1, __ATOMIC_RELAXED);
    return v;
}

void bt_grammar_vocab_destroy(struct bt_grammar_vocab *v)
{
    if (!v || __atomic_sub_fetch(&v->refs, 1, __ATOMIC_ACQ_REL) > 0) {
        return;
    }
    for (int s = 0; s < BT_SLICE_SETS; s++) {
        free(v->slices[s].bits[0]);
        free(v->slices[s].rest.nodes);
    }
    free(v->all.nodes);
    free(v->seen);
    free(v->has[' ']);
    free(v->text);
    free(v->at);
    free(v->same);
    free(v->eos);
    free(v);
}
