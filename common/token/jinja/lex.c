/* Lexer of chat templates: Jinja with trim_blocks and lstrip_blocks, as in transformers. Text
 * between tags becomes T_DATA, with white space already removed as needed. Pure. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/token/jinja/jinja.h"
#include "common/token/token_priv.h"

struct lexer {
    struct bt_j_compile *c;
    const char *s;
    size_t len, at;
    int line;
    bool line_starting; /* the text before ended with a newline, or there was none */
};

static void push(struct lexer *x, struct bt_j_token t)
{
    struct bt_j_compile *c = x->c;
    c->tokens = bt_j_grow(c->arena, c->tokens, c->n_tokens, &c->cap_tokens, sizeof(*c->tokens));
    c->tokens[c->n_tokens++] = t;
}

static void push_kind(struct lexer *x, enum bt_j_tok_kind kind)
{
    push(x, (struct bt_j_token){.kind = kind, .line = x->line});
}

static bool looking_at(const struct lexer *x, const char *what)
{
    size_t n = strlen(what);
    return x->len - x->at >= n && memcmp(x->s + x->at, what, n) == 0;
}

static void advance(struct lexer *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x->line += x->s[x->at + i] == '\n';
    }
    x->at += n;
    if (n > 0) {
        x->line_starting = x->s[x->at - 1] == '\n';
    }
}

static size_t space_at(const struct lexer *x, size_t at)
{
    uint32_t cp;
    size_t k = bt_utf8_decode(x->s + at, x->s + x->len, &cp);
    return k > 0 && bt_j_is_space(cp) ? k : 0;
}

static void skip_space(struct lexer *x)
{
    for (size_t k; (k = space_at(x, x->at)) > 0;) {
        advance(x, k);
    }
}

/* Reads the end of a tag after its sign, and the white space that trim_blocks or "-" remove. */
static void after_end(struct lexer *x, char sign, bool block)
{
    if (sign == '-') {
        skip_space(x);
    } else if (block && sign != '+' && x->at < x->len && x->s[x->at] == '\n') {
        advance(x, 1);
    }
}

/* Adds the text before a tag that begins at `to`; sign is the character after the tag's first
 * two. */
static void push_data(struct lexer *x, size_t to, char sign, bool variable)
{
    struct bt_j_str s = {x->s + x->at, to - x->at};
    int line = x->line;
    bool line_starting = x->line_starting;
    advance(x, s.n);
    if (sign == '-') {
        s = bt_j_strip(NULL, s, NULL, false, true);
    } else if (sign != '+' && !variable) {
        size_t from = s.n;
        while (from > 0 && s.p[from - 1] != '\n') {
            from--;
        }
        struct bt_j_str last = {s.p + from, s.n - from};
        if ((from > 0 || line_starting) && bt_j_strip(NULL, last, NULL, true, false).n == 0) {
            s.n = from;
        }
    }
    if (s.n > 0) {
        push(x, (struct bt_j_token){.kind = T_DATA, .line = line, .s = s});
    }
}

static void lex_comment(struct lexer *x)
{
    int line = x->line;
    advance(x, 2);
    while (x->at < x->len && !looking_at(x, "#}")) {
        advance(x, 1);
    }
    if (x->at >= x->len) {
        bt_j_compile_fail(x->c, BT_ERR_INVALID, line, "a comment is not closed");
    }
    char sign = x->s[x->at - 1];
    advance(x, 2);
    after_end(x, sign, true);
}

static bool name_char(char c, bool first)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (uint8_t)c >= 0x80 ||
           (!first && c >= '0' && c <= '9');
}

static int hex(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Python's escapes. p is after the backslash; returns the number of characters read. */
static size_t unescape(struct lexer *x, const char *p, const char *end, char **out)
{
    static const char plain[] = "\\\\''\"\"a\ab\bf\fn\nr\rt\tv\v";
    if (*p == '\n') {
        return 1;
    }
    for (size_t i = 0; i + 1 < sizeof(plain); i += 2) {
        if (*p == plain[i]) {
            *(*out)++ = plain[i + 1];
            return 1;
        }
    }
    size_t digits = *p == 'x' ? 2 : *p == 'u' ? 4 : *p == 'U' ? 8 : 0, n = 0;
    uint32_t cp = 0;
    if (digits > 0) {
        for (; n < digits && p + 1 + n < end && hex(p[1 + n]) >= 0; n++) {
            cp = cp << 4 | (uint32_t)hex(p[1 + n]);
        }
        if (n != digits || cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000)) {
            bt_j_compile_fail(x->c, BT_ERR_INVALID, x->line, "a wrong \\%c escape", *p);
        }
        *out += bt_utf8_encode(cp, *out);
        return 1 + n;
    }
    for (; n < 3 && p + n < end && p[n] >= '0' && p[n] <= '7'; n++) {
        cp = cp * 8 + (uint32_t)(p[n] - '0');
    }
    if (n > 0) {
        *out += bt_utf8_encode(cp, *out);
        return n;
    }
    *(*out)++ = '\\'; /* unknown: unchanged */
    *(*out)++ = *p;
    return 1;
}

static void lex_string(struct lexer *x)
{
    char quote = x->s[x->at];
    size_t end = x->at + 1;
    while (end < x->len && x->s[end] != quote) {
        end += x->s[end] == '\\' ? 2 : 1;
    }
    if (end >= x->len) {
        bt_j_compile_fail(x->c, BT_ERR_INVALID, x->line, "a string is not closed");
    }
    char *text = bt_j_alloc(x->c->arena, (end - x->at) * 2 + 8), *to = text;
    for (const char *p = x->s + x->at + 1; p < x->s + end;) {
        if (*p == '\\') {
            p += 1 + unescape(x, p + 1, x->s + end, &to);
        } else {
            *to++ = *p++;
        }
    }
    push(x, (struct bt_j_token){.kind = T_STR, .line = x->line, .s = {text, (size_t)(to - text)}});
    advance(x, end + 1 - x->at);
}

static void lex_number(struct lexer *x)
{
    char text[64];
    size_t n = 0, at = x->at;
    bool real = false, prefixed = false;
    for (; at < x->len && n < sizeof(text) - 1; at++) {
        char c = x->s[at];
        bool digit = c >= '0' && c <= '9';
        if (c == '_') {
            continue;
        }
        if (n == 1 && text[0] == '0' && strchr("xXbBoO", c) != NULL) {
            prefixed = true;
        } else if (!prefixed && c == '.' && !real && at + 1 < x->len && x->s[at + 1] >= '0' &&
                   x->s[at + 1] <= '9') {
            real = true;
        } else if (!prefixed && (c == 'e' || c == 'E') && at + 1 < x->len &&
                   strchr("0123456789+-", x->s[at + 1]) != NULL) {
            real = true;
            text[n++] = c;
            c = x->s[++at];
        } else if (!digit && !(prefixed && hex(c) >= 0)) {
            break;
        }
        text[n++] = c;
    }
    text[n] = '\0';
    struct bt_j_token t = {.kind = real ? T_FLOAT : T_INT, .line = x->line};
    char *stop;
    errno = 0;
    if (real) {
        t.f = strtod(text, &stop);
    } else {
        int base = !prefixed ? 10 : (text[1] | 32) == 'x' ? 16 : (text[1] | 32) == 'b' ? 2 : 8;
        t.i = strtoll(text + (prefixed ? 2 : 0), &stop, base);
    }
    if (*stop != '\0' || (errno == ERANGE && !real)) {
        bt_j_compile_fail(x->c, BT_ERR_INVALID, x->line, "a wrong number \"%s\"", text);
    }
    push(x, t);
    advance(x, at - x->at);
}

static void lex_operator(struct lexer *x, int *nesting)
{
    static const char *const ops[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                      "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                      ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    for (size_t i = 0; i < BT_ARRAY_LEN(ops); i++) {
        if (looking_at(x, ops[i])) {
            *nesting += strchr("[({", ops[i][0]) != NULL ? 1 : strchr("])}", ops[i][0]) ? -1 : 0;
            push(x, (struct bt_j_token){.kind = T_OP, .line = x->line, .s = j_cstr(ops[i])});
            advance(x, strlen(ops[i]));
            return;
        }
    }
    bt_j_compile_fail(x->c, BT_ERR_INVALID, x->line, "unexpected character \"%.1s\"", x->s + x->at);
}

/* Reads the inside of a tag and its end. */
static void lex_code(struct lexer *x, const char *end, bool block)
{
    int nesting = 0, line = x->line;
    for (;;) {
        skip_space(x);
        if (x->at >= x->len) {
            bt_j_compile_fail(x->c, BT_ERR_INVALID, line, "a tag is not closed by %s", end);
        }
        char c = x->s[x->at], sign = c == '-' || (block && c == '+') ? c : '\0';
        if (nesting <= 0) {
            size_t skip = sign != '\0' ? 1 : 0;
            x->at += skip;
            bool closed = looking_at(x, end);
            x->at -= skip;
            if (closed) {
                push_kind(x, block ? T_BLOCK_END : T_VAR_END);
                advance(x, skip + 2);
                after_end(x, sign, block);
                return;
            }
        }
        if (c == '\'' || c == '"') {
            lex_string(x);
        } else if (c >= '0' && c <= '9') {
            lex_number(x);
        } else if (name_char(c, true)) {
            size_t to = x->at;
            while (to < x->len && name_char(x->s[to], false)) {
                to++;
            }
            push(x, (struct bt_j_token){
                        .kind = T_NAME, .line = x->line, .s = {x->s + x->at, to - x->at}});
            advance(x, to - x->at);
        } else {
            lex_operator(x, &nesting);
        }
    }
}

/* At "{%": the length of a whole `{% NAME %}` tag, and its signs; 0: it is another tag. */
static size_t whole_tag(const struct lexer *x, size_t at, const char *name, char *begin, char *end)
{
    size_t i = at + 2, n = strlen(name);
    *begin = *end = '\0';
    if (i < x->len && (x->s[i] == '-' || x->s[i] == '+')) {
        *begin = x->s[i++];
    }
    for (size_t k; (k = space_at(x, i)) > 0;) {
        i += k;
    }
    if (x->len - i < n || memcmp(x->s + i, name, n) != 0) {
        return 0;
    }
    i += n;
    for (size_t k; (k = space_at(x, i)) > 0;) {
        i += k;
    }
    if (i < x->len && (x->s[i] == '-' || x->s[i] == '+')) {
        *end = x->s[i++];
    }
    return x->len - i >= 2 && memcmp(x->s + i, "%}", 2) == 0 ? i + 2 - at : 0;
}

/* {% raw %} ... {% endraw %}; x is at its "{%". */
static bool lex_raw(struct lexer *x)
{
    char begin, end;
    size_t n = whole_tag(x, x->at, "raw", &begin, &end);
    if (n == 0) {
        return false;
    }
    int line = x->line;
    advance(x, n);
    after_end(x, end, false); /* trim_blocks does not apply to the beginning of raw text */
    for (size_t at = x->at; at + 1 < x->len; at++) {
        if (x->s[at] == '{' && x->s[at + 1] == '%' &&
            (n = whole_tag(x, at, "endraw", &begin, &end)) > 0) {
            push_data(x, at, begin, false);
            advance(x, n);
            after_end(x, end, true);
            return true;
        }
    }
    bt_j_compile_fail(x->c, BT_ERR_INVALID, line, "{%% raw %%} is not closed");
}

void bt_j_lex(struct bt_j_compile *c, const char *source, size_t len)
{
    /* all newlines become "\n", and one at the very end is removed */
    char *s = bt_j_alloc(c->arena, len + 1);
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        if (source[i] == '\r') {
            s[n++] = '\n';
            i += i + 1 < len && source[i + 1] == '\n';
        } else {
            s[n++] = source[i];
        }
    }
    n -= n > 0 && s[n - 1] == '\n';
    s[n] = '\0';
    struct lexer x = {.c = c, .s = s, .len = n, .line = 1, .line_starting = true};
    while (x.at < x.len) {
        size_t to = x.at;
        while (to < x.len &&
               !(s[to] == '{' && to + 1 < x.len && strchr("{%#", s[to + 1]) != NULL)) {
            to++;
        }
        bool tag = to < x.len, variable = tag && s[to + 1] == '{';
        char sign = tag && to + 2 < x.len ? s[to + 2] : '\0';
        push_data(&x, to, tag ? (sign == '-' || sign == '+' ? sign : ' ') : '+', variable);
        if (!tag) {
            break;
        }
        if (s[to + 1] == '#') {
            lex_comment(&x);
        } else if (variable || !lex_raw(&x)) {
            push_kind(&x, variable ? T_VAR_BEGIN : T_BLOCK_BEGIN);
            advance(&x, sign == '-' || sign == '+' ? 3 : 2);
            lex_code(&x, variable ? "}}" : "%}", !variable);
        }
    }
    push_kind(&x, T_EOF);
}
