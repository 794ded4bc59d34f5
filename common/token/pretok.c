/* Pre-tokenizers of tokenizer.json: they split a text into the words for BPE. All that split by a
 * kind of character are a Split with a fixed pattern. Pure, except for the match data inside a
 * regex (one user thread). */
#include <stdlib.h>
#include <string.h>

#include "common/token/token_priv.h"

#define GPT2_PATTERN                                                                               \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define PUNCT_PATTERN "[\\p{P}$+<=>^`|~]"

enum behavior { REMOVED, ISOLATED, CONTIGUOUS, WITH_PREVIOUS, WITH_NEXT };
enum step_kind { STEP_SPLIT, STEP_PREFIX_SPACE, STEP_METASPACE };
enum scheme { PREPEND_ALWAYS, PREPEND_FIRST, PREPEND_NEVER };

struct step {
    enum step_kind kind;
    struct bt_regex *re;
    enum behavior behavior;
    bool invert;
    enum scheme scheme;
    char mark[5]; /* METASPACE's replacement for a space */
};

struct bt_pretok {
    struct step *steps;
    size_t n;
    bool byte_level;
};

void bt_pieces_cleanup(struct bt_pieces *p)
{
    bt_buf_cleanup(&p->text);
    free(p->refs);
    *p = (struct bt_pieces){0};
}

static void pieces_add(struct bt_pieces *p, size_t off, size_t len)
{
    if (len == 0) {
        return;
    }
    if (p->n == p->cap) {
        p->cap = p->cap == 0 ? 256 : p->cap * 2;
        p->refs = bt_realloc(p->refs, p->cap * sizeof(*p->refs));
    }
    p->refs[p->n++] = (struct bt_str_ref){(uint32_t)off, (uint32_t)len};
}

void bt_pretok_destroy(struct bt_pretok *p)
{
    if (p == NULL) {
        return;
    }
    for (size_t i = 0; i < p->n; i++) {
        bt_regex_destroy(p->steps[i].re);
    }
    free(p->steps);
    free(p);
}

bool bt_pretok_byte_level(const struct bt_pretok *p)
{
    return p != NULL && p->byte_level;
}

static struct step *add_step(struct bt_pretok *p, enum step_kind kind)
{
    p->steps = bt_realloc(p->steps, (p->n + 1) * sizeof(*p->steps));
    p->steps[p->n] = (struct step){.kind = kind};
    return &p->steps[p->n++];
}

static bt_status_t add_split(struct bt_pretok *p, const char *pattern, enum behavior behavior,
                             bool invert, const struct bt_token_err *e)
{
    struct step *s = add_step(p, STEP_SPLIT);
    s->behavior = behavior;
    s->invert = invert;
    return bt_regex_create(pattern, strlen(pattern), false, &s->re, e);
}

static bt_status_t parse_behavior(const json_t *j, enum behavior *b_p, const struct bt_token_err *e)
{
    static const char *const names[] = {"Removed", "Isolated", "Contiguous", "MergedWithPrevious",
                                        "MergedWithNext"};
    const char *name = json_string_value(json_object_get(j, "behavior"));
    for (size_t i = 0; name != NULL && i < BT_ARRAY_LEN(names); i++) {
        if (strcmp(name, names[i]) == 0) {
            *b_p = (enum behavior)i;
            return BT_OK;
        }
    }
    return bt_token_fail(e, BT_ERR_UNSUPPORTED, "pre_tokenizer: behavior \"%s\" is not supported",
                         name == NULL ? "(none)" : name);
}

/* An optional boolean field. */
static bt_status_t get_bool(const json_t *j, const char *key, bool missing, bool *v_p,
                            const struct bt_token_err *e)
{
    const json_t *v = json_object_get(j, key);
    if (v != NULL && !json_is_boolean(v)) {
        return bt_token_fail(e, BT_ERR_INVALID, "pre_tokenizer: \"%s\" must be true or false", key);
    }
    *v_p = v == NULL ? missing : json_is_true(v);
    return BT_OK;
}

static bt_status_t parse_split(struct bt_pretok *p, const json_t *j, const struct bt_token_err *e)
{
    const json_t *pattern = json_object_get(j, "pattern");
    const json_t *text = json_object_get(pattern, "String");
    bool literal = text != NULL;
    if (!literal) {
        text = json_object_get(pattern, "Regex");
    }
    if (!json_is_string(text)) {
        return bt_token_fail(e, BT_ERR_INVALID,
                             "pre_tokenizer Split: \"pattern\" needs a \"String\" or a \"Regex\"");
    }
    struct step *s = add_step(p, STEP_SPLIT);
    bt_status_t st = parse_behavior(j, &s->behavior, e);
    if (st == BT_OK) {
        st = get_bool(j, "invert", false, &s->invert, e);
    }
    return st != BT_OK ? st
                       : bt_regex_create(json_string_value(text), json_string_length(text), literal,
                                         &s->re, e);
}

static bt_status_t parse_byte_level(struct bt_pretok *p, const json_t *j,
                                    const struct bt_token_err *e)
{
    bool prefix = true, use_regex = true;
    bt_status_t st = get_bool(j, "add_prefix_space", true, &prefix, e);
    if (st == BT_OK) {
        st = get_bool(j, "use_regex", true, &use_regex, e);
    }
    if (st != BT_OK) {
        return st;
    }
    p->byte_level = true;
    if (prefix) {
        add_step(p, STEP_PREFIX_SPACE);
    }
    return use_regex ? add_split(p, GPT2_PATTERN, ISOLATED, false, e) : BT_OK;
}

static bt_status_t parse_metaspace(struct bt_pretok *p, const json_t *j,
                                   const struct bt_token_err *e)
{
    const json_t *mark = json_object_get(j, "replacement");
    uint32_t cp;
    if (!json_is_string(mark) || json_string_length(mark) > 4 ||
        bt_utf8_decode(json_string_value(mark), json_string_value(mark) + json_string_length(mark),
                       &cp) != json_string_length(mark)) {
        return bt_token_fail(e, BT_ERR_INVALID,
                             "pre_tokenizer Metaspace: \"replacement\" must be one character");
    }
    struct step *s = add_step(p, STEP_METASPACE);
    memcpy(s->mark, json_string_value(mark), json_string_length(mark));
    const char *scheme = json_string_value(json_object_get(j, "prepend_scheme"));
    bool split = true;
    bt_status_t st = get_bool(j, "split", true, &split, e);
    if (st != BT_OK) {
        return st;
    }
    if (scheme == NULL) { /* older files */
        bool prefix = true;
        st = get_bool(j, "add_prefix_space", true, &prefix, e);
        s->scheme = st == BT_OK && prefix ? PREPEND_ALWAYS : PREPEND_NEVER;
    } else if (strcmp(scheme, "always") == 0) {
        s->scheme = PREPEND_ALWAYS;
    } else if (strcmp(scheme, "first") == 0) {
        s->scheme = PREPEND_FIRST;
    } else if (strcmp(scheme, "never") == 0) {
        s->scheme = PREPEND_NEVER;
    } else {
        return bt_token_fail(e, BT_ERR_UNSUPPORTED,
                             "pre_tokenizer Metaspace: prepend_scheme \"%s\" is not supported",
                             scheme);
    }
    if (st == BT_OK && split) {
        char literal[5];
        memcpy(literal, s->mark, sizeof(literal));
        struct step *cut = add_step(p, STEP_SPLIT);
        cut->behavior = WITH_NEXT;
        st = bt_regex_create(literal, strlen(literal), true, &cut->re, e);
    }
    return st;
}

/* Reads the types that are only a Split by certain characters. */
static bt_status_t parse_by_class(struct bt_pretok *p, const json_t *j, const char *type,
                                  const struct bt_token_err *e)
{
    if (strcmp(type, "Digits") == 0) {
        bool individual = false;
        bt_status_t st = get_bool(j, "individual_digits", false, &individual, e);
        return st != BT_OK ? st
                           : add_split(p, "\\p{N}", individual ? ISOLATED : CONTIGUOUS, false, e);
    }
    if (strcmp(type, "Punctuation") == 0) {
        enum behavior b = ISOLATED;
        bt_status_t st = json_object_get(j, "behavior") == NULL ? BT_OK : parse_behavior(j, &b, e);
        return st != BT_OK ? st : add_split(p, PUNCT_PATTERN, b, false, e);
    }
    if (strcmp(type, "Whitespace") == 0) {
        /* \w in Rust, unlike in Oniguruma, has the joiners. */
        return add_split(p, "[\\w\\p{Join_Control}]+|[^\\w\\p{Join_Control}\\s]+", REMOVED, true,
                         e);
    }
    if (strcmp(type, "WhitespaceSplit") == 0) {
        return add_split(p, "\\s", REMOVED, false, e);
    }
    if (strcmp(type, "BertPreTokenizer") == 0) {
        bt_status_t st = add_split(p, "\\s", REMOVED, false, e);
        return st != BT_OK ? st : add_split(p, PUNCT_PATTERN, ISOLATED, false, e);
    }
    return bt_token_fail(e, BT_ERR_UNSUPPORTED,
                         "pre_tokenizer type \"%s\" is not supported (known: Sequence, Split, "
                         "ByteLevel, Metaspace, Digits, Punctuation, Whitespace, WhitespaceSplit, "
                         "BertPreTokenizer)",
                         type);
}

static bt_status_t parse_into(struct bt_pretok *p, const json_t *j, int depth,
                              const struct bt_token_err *e)
{
    const char *type = json_string_value(json_object_get(j, "type"));
    if (type == NULL || depth > 4) {
        return bt_token_fail(e, BT_ERR_INVALID,
                             "pre_tokenizer: an object with a \"type\" is needed");
    }
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(j, "pretokenizers");
        if (!json_is_array(list)) {
            return bt_token_fail(e, BT_ERR_INVALID, "pre_tokenizer Sequence: no \"pretokenizers\"");
        }
        for (size_t i = 0; i < json_array_size(list); i++) {
            bt_status_t st = parse_into(p, json_array_get(list, i), depth + 1, e);
            if (st != BT_OK) {
                return st;
            }
        }
        return BT_OK;
    }
    if (p->byte_level) { /* steps after it would get the byte alphabet instead of the text */
        return bt_token_fail(e, BT_ERR_UNSUPPORTED,
                             "pre_tokenizer \"%s\" after ByteLevel is not supported", type);
    }
    if (strcmp(type, "Split") == 0) {
        return parse_split(p, j, e);
    }
    if (strcmp(type, "ByteLevel") == 0) {
        return parse_byte_level(p, j, e);
    }
    return strcmp(type, "Metaspace") == 0 ? parse_metaspace(p, j, e)
                                          : parse_by_class(p, j, type, e);
}

bt_status_t bt_pretok_parse(const json_t *j, struct bt_pretok **p_p, const struct bt_token_err *e)
{
    if (j == NULL || json_is_null(j)) {
        *p_p = NULL;
        return BT_OK;
    }
    struct bt_pretok *p = bt_calloc(1, sizeof(*p));
    bt_status_t st = parse_into(p, j, 0, e);
    if (st != BT_OK) {
        bt_pretok_destroy(p);
        return st;
    }
    *p_p = p;
    return BT_OK;
}

/* Ranges of one piece in order, matching and not matching. */
struct cut {
    uint32_t off, len;
    bool match;
};
struct cuts {
    struct cut *v;
    size_t n, cap;
};

static void cuts_add(struct cuts *c, size_t from, size_t to, bool match)
{
    if (c->n == c->cap) {
        c->cap = c->cap == 0 ? 256 : c->cap * 2;
        c->v = bt_realloc(c->v, c->cap * sizeof(*c->v));
    }
    c->v[c->n++] = (struct cut){(uint32_t)from, (uint32_t)(to - from), match};
}

/* Finds all matches in text[0..len); offsets are relative to text. */
static bt_status_t find_cuts(const struct step *s, const char *text, size_t len, struct cuts *c)
{
    size_t prev = 0, from = 0, start, end;
    int rc = 0;
    c->n = 0;
    while (from <= len && (rc = bt_regex_next(s->re, text, len, from, &start, &end)) > 0) {
        if (start > prev) {
            cuts_add(c, prev, start, s->invert);
        }
        cuts_add(c, start, end, !s->invert);
        prev = end;
        from = end;
        if (end == start) {
            uint32_t cp;
            size_t k = bt_utf8_decode(text + end, text + len, &cp);
            from += k > 0 ? k : 1;
        }
    }
    if (rc < 0) {
        return BT_ERR_EXHAUSTED;
    }
    if (prev < len) {
        cuts_add(c, prev, len, s->invert);
    }
    return BT_OK;
}

/* Returns whether cut i is joined to cut i - 1. taken: cut i - 1 is already joined to its own
 * predecessor. */
static bool glued(const struct step *s, const struct cut *prev, const struct cut *cur)
{
    switch (s->behavior) {
    case CONTIGUOUS: return prev->match == cur->match;
    case WITH_PREVIOUS: return cur->match && !prev->match;
    case WITH_NEXT: return prev->match && !cur->match;
    case REMOVED:
    case ISOLATED: break;
    }
    return false;
}

static bt_status_t run_split(const struct step *s, struct bt_pieces *p, struct cuts *c)
{
    struct bt_str_ref *old = p->refs;
    size_t n = p->n;
    p->refs = NULL;
    p->n = p->cap = 0;
    bt_status_t st = BT_OK;
    for (size_t i = 0; i < n && st == BT_OK; i++) {
        st = find_cuts(s, p->text.data + old[i].off, old[i].len, c);
        for (size_t k = 0; st == BT_OK && k < c->n;) {
            size_t off = c->v[k].off, len = c->v[k].len;
            bool drop = s->behavior == REMOVED && c->v[k].match;
            for (k++; k < c->n && glued(s, &c->v[k - 1], &c->v[k]); k++) {
                len += c->v[k].len;
            }
            if (!drop) {
                pieces_add(p, old[i].off + off, len);
            }
        }
    }
    free(old);
    return st;
}

/* Rewrites the text: replaces spaces with the mark and, if configured, puts a space or mark in
 * front. */
static void run_rewrite(const struct step *s, struct bt_pieces *p, bool at_start)
{
    struct bt_pieces out = {0};
    bool meta = s->kind == STEP_METASPACE;
    const char *mark = meta ? s->mark : " ";
    size_t mark_len = strlen(mark);
    for (size_t i = 0; i < p->n; i++) {
        const char *t = p->text.data + p->refs[i].off;
        size_t len = p->refs[i].len, from = out.text.len;
        bool first = at_start && p->refs[i].off == 0;
        bool prepend =
            !meta || s->scheme == PREPEND_ALWAYS || (s->scheme == PREPEND_FIRST && first);
        bool has = (meta && t[0] == ' ') || (len >= mark_len && memcmp(t, mark, mark_len) == 0);
        if (prepend && !has) {
            bt_buf_append(&out.text, mark, mark_len);
        }
        for (size_t k = 0; k < len; k++) {
            if (meta && t[k] == ' ') {
                bt_buf_append(&out.text, mark, mark_len);
            } else {
                bt_buf_append(&out.text, t + k, 1);
            }
        }
        pieces_add(&out, from, out.text.len - from);
    }
    bt_pieces_cleanup(p);
    *p = out;
}

bt_status_t bt_pretok_run(const struct bt_pretok *p, const char *text, size_t len, bool at_start,
                          struct bt_pieces *out)
{
    bt_buf_clear(&out->text);
    bt_buf_append(&out->text, text, len);
    out->n = 0;
    pieces_add(out, 0, len);
    struct cuts cuts = {0};
    bt_status_t st = BT_OK;
    for (size_t i = 0; p != NULL && i < p->n && st == BT_OK && out->n > 0; i++) {
        if (p->steps[i].kind == STEP_SPLIT) {
            st = run_split(&p->steps[i], out, &cuts);
        } else {
            run_rewrite(&p->steps[i], out, at_start);
        }
    }
    free(cuts.v);
    return st;
}
