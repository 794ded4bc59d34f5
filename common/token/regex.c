/* Patterns of tokenizer.json in PCRE2 with JIT, UTF and Unicode properties, with limits. The
 * patterns are in Oniguruma's Ruby syntax: what differs in PCRE2 is translated or refused by name.
 * Several threads may match at once. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/token/token_priv.h"

#define MATCH_LIMIT    50000000u
#define HEAP_LIMIT_KIB 65536u
#define JIT_STACK_MAX  (32u << 20)

/* Characters of \s and \w in Oniguruma, as the inside of a PCRE2 class. */
#define SPACE_SET                                                                                  \
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"        \
    "\\x{205f}\\x{3000}"
#define WORD_SET "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
/* Outside a class Oniguruma uses its table of Latin-1, in which superscripts and fractions are word
 * characters too. */
#define LATIN "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}"
#define WORD  "[" WORD_SET LATIN "]"

struct scratch { /* for one match at a time */
    pcre2_match_data *data;
    pcre2_match_context *match;
    pcre2_jit_stack *stack;
};

struct bt_regex {
    pcre2_code *code;
    /* The thread that matches borrows it; a thread that matches meanwhile makes its own. */
    struct scratch *_Atomic *spare;
};

static bt_status_t unsupported(const struct bt_token_err *e, const char *what, const char *pattern)
{
    return bt_token_fail(e, BT_ERR_UNSUPPORTED, "%s in the pattern \"%.200s\" is not supported",
                         what, pattern);
}

/* Translates the escape at p (p[0] is the backslash). Returns the number of pattern bytes used. */
static size_t put_escape(struct bt_buf *out, const char *p, bool in_class, const char **why_p)
{
    switch (p[1]) {
    case 's': bt_buf_puts(out, in_class ? SPACE_SET : "[" SPACE_SET "]"); return 2;
    case 'w': bt_buf_puts(out, in_class ? WORD_SET : WORD); return 2;
    case 'S': bt_buf_puts(out, in_class ? "\\S" : "[^" SPACE_SET "]"); return 2;
    case 'W':
        if (in_class) {
            *why_p = "\\W in a class";
        }
        bt_buf_puts(out, "[^" WORD_SET LATIN "]");
        return 2;
    case 'b':
    case 'B':
        if (in_class) { /* backspace, in both syntaxes */
            break;
        }
        bt_buf_puts(out, p[1] == 'b' ? "(?:(?<=" WORD ")(?!" WORD ")|(?<!" WORD ")(?=" WORD "))"
                                     : "(?:(?<=" WORD ")(?=" WORD ")|(?<!" WORD ")(?!" WORD "))");
        return 2;
    case 'h':
    case 'H': *why_p = "\\h (a hexadecimal digit)"; return 2;
    case '\0': *why_p = "a backslash at the end"; return 1;
    default: break;
    }
    const char *close = p[2] == '{' && strchr("pPx", p[1]) != NULL ? strchr(p, '}') : NULL;
    size_t n = close == NULL ? 2 : (size_t)(close + 1 - p);
    bt_buf_append(out, p, n);
    return n;
}

/* Translates [:name:] at p. Accepts the names whose sets are the same in both libraries. */
static size_t put_posix(struct bt_buf *out, const char *p, const char **why_p)
{
    static const char *const sets[][2] = {{"[:alpha:]", "\\p{Alphabetic}"},
                                          {"[:digit:]", "\\p{Nd}"},
                                          {"[:space:]", SPACE_SET},
                                          {"[:word:]", WORD_SET}};
    for (size_t i = 0; i < BT_ARRAY_LEN(sets); i++) {
        size_t n = strlen(sets[i][0]);
        if (strncmp(p, sets[i][0], n) == 0) {
            bt_buf_puts(out, sets[i][1]);
            return n;
        }
    }
    *why_p = "a [:name:] other than alpha, digit, space and word";
    return 1;
}

/* Oniguruma pattern -> PCRE2 pattern. */
static bt_status_t translate(const char *pattern, size_t len, struct bt_buf *out,
                             const struct bt_token_err *e)
{
    bool in_class = false;
    const char *why = NULL;
    for (size_t i = 0; i < len && why == NULL;) {
        const char *p = pattern + i; /* NUL-terminated, so p[1] and p[2] may be read */
        if (*p == '\\') {
            i += put_escape(out, p, in_class, &why);
            continue;
        }
        if (in_class) {
            if (*p == '[' && p[1] != ':') {
                why = "a class inside a class";
            } else if (*p == '&' && p[1] == '&') {
                why = "an intersection of classes";
            } else if (*p == '[') {
                size_t n = put_posix(out, p, &why);
                i += n;
                continue;
            }
            in_class = *p != ']';
        } else if (*p == '[') {
            in_class = true;
            size_t n = p[1] == '^' ? 2 : 1;
            n += p[n] == ']'; /* a literal ] directly after the opening bracket */
            bt_buf_append(out, p, n);
            i += n;
            continue;
        } else if (*p == '}' && p[1] == '+') {
            why = "{n,m}+";
        } else if (*p == '(' && p[1] == '?' && p[2] == 'm') {
            why = "(?m)";
        }
        bt_buf_append(out, p, 1);
        i++;
    }
    return why == NULL ? BT_OK : unsupported(e, why, pattern);
}

static struct scratch *scratch_create(const struct bt_regex *re)
{
    struct scratch *s = bt_calloc(1, sizeof(*s));
    s->data = pcre2_match_data_create_from_pattern(re->code, NULL);
    s->match = pcre2_match_context_create(NULL);
    s->stack = pcre2_jit_stack_create(32768, JIT_STACK_MAX, NULL);
    BT_ASSERT(s->data != NULL && s->match != NULL);
    pcre2_set_match_limit(s->match, MATCH_LIMIT);
    pcre2_set_heap_limit(s->match, HEAP_LIMIT_KIB);
    if (s->stack != NULL) {
        pcre2_jit_stack_assign(s->match, NULL, s->stack);
    }
    return s;
}

static void scratch_destroy(struct scratch *s)
{
    if (s == NULL) {
        return;
    }
    pcre2_match_data_free(s->data);
    pcre2_match_context_free(s->match);
    pcre2_jit_stack_free(s->stack);
    free(s);
}

static bt_status_t compile(struct bt_regex *re, const char *pattern, size_t len, bool literal,
                           const struct bt_token_err *e)
{
    int code;
    PCRE2_SIZE offset;
    uint32_t options =
        literal ? PCRE2_LITERAL | PCRE2_UTF : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE;
    pcre2_compile_context *ctx = pcre2_compile_context_create(NULL);
    BT_ASSERT(ctx != NULL);
    pcre2_set_newline(ctx, PCRE2_NEWLINE_LF);
    re->code = pcre2_compile((PCRE2_SPTR)pattern, len, options, &code, &offset, ctx);
    pcre2_compile_context_free(ctx);
    if (re->code == NULL) {
        char why[128];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof(why));
        return bt_token_fail(e, BT_ERR_INVALID, "the pattern \"%.200s\" is wrong: %s", pattern,
                             why);
    }
    /* Without JIT the pattern is interpreted. */
    (void)pcre2_jit_compile(re->code, PCRE2_JIT_COMPLETE);
    re->spare = bt_malloc(sizeof(*re->spare));
    atomic_init(re->spare, scratch_create(re));
    return BT_OK;
}

bt_status_t bt_regex_create(const char *pattern, size_t len, bool literal, struct bt_regex **re_p,
                            const struct bt_token_err *e)
{
    if (len == 0) {
        return bt_token_fail(e, BT_ERR_INVALID, "an empty pattern");
    }
    struct bt_buf pcre;
    bt_buf_init(&pcre);
    bt_status_t st = BT_OK;
    if (literal) {
        bt_buf_append(&pcre, pattern, len);
    } else {
        st = translate(pattern, len, &pcre, e);
    }
    struct bt_regex *re = bt_calloc(1, sizeof(*re));
    if (st == BT_OK) {
        st = compile(re, pcre.data, pcre.len, literal, e);
    }
    bt_buf_cleanup(&pcre);
    if (st != BT_OK) {
        bt_regex_destroy(re);
        return st;
    }
    *re_p = re;
    return BT_OK;
}

void bt_regex_destroy(struct bt_regex *re)
{
    if (re == NULL) {
        return;
    }
    if (re->spare != NULL) {
        scratch_destroy(atomic_load(re->spare));
        free((void *)re->spare);
    }
    pcre2_code_free(re->code);
    free(re);
}

int bt_regex_next(const struct bt_regex *re, const char *text, size_t len, size_t from,
                  size_t *start_p, size_t *end_p)
{
    struct scratch *s = atomic_exchange(re->spare, NULL);
    s = s != NULL ? s : scratch_create(re);
    int rc =
        pcre2_match(re->code, (PCRE2_SPTR)text, len, from, PCRE2_NO_UTF_CHECK, s->data, s->match);
    PCRE2_SIZE v[2] = {0, 0};
    if (rc >= 0) {
        memcpy(v, pcre2_get_ovector_pointer(s->data), sizeof(v));
    }
    scratch_destroy(atomic_exchange(re->spare, s));
    if (rc == PCRE2_ERROR_NOMATCH) {
        return 0;
    }
    if (rc < 0) {
        return -1;
    }
    if (v[0] > v[1] || v[0] < from) { /* \K can cause this */
        return -1;
    }
    *start_p = v[0];
    *end_p = v[1];
    return 1;
}
