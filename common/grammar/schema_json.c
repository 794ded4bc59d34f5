/* Reads the text of a schema. Unlike jansson it keeps numbers exact (2^64 - 1 is a common maximum).
 * It also knows the parent of each value, so that error messages can name its JSON pointer. */
#include "common/grammar/schema_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct reader {
    struct bt_schema *c;
    const char *s, *end, *start;
    struct bt_sj **stack; /* the arrays and objects that have not ended yet */
    uint32_t n_stack, cap_stack, depth;
};

static _Noreturn void syntax(struct reader *r, const char *what)
{
    bt_schema_fail(r->c, BT_ERR_INVALID, NULL, "the schema is not JSON: %s at byte %zu", what,
                   (size_t)(r->s - r->start));
}

static void skip_space(struct reader *r)
{
    while (r->s < r->end && (*r->s == ' ' || *r->s == '\t' || *r->s == '\n' || *r->s == '\r'))
        r->s++;
}

uint32_t bt_sj_utf8(const char *text, uint32_t n, uint32_t *code)
{
    const uint8_t *s = (const uint8_t *)text;
    if (n == 0)
        return 0;
    if (s[0] < 0x80) {
        *code = s[0];
        return 1;
    }
    uint32_t len = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
    static const uint32_t first[5] = {0, 0, 0x80, 0x800, 0x10000};
    if (s[0] < 0xC2 || s[0] > 0xF4 || n < len)
        return 0;
    uint32_t v = s[0] & (0xFFu >> (len + 1));
    for (uint32_t i = 1; i < len; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return 0;
        v = v << 6 | (s[i] & 0x3F);
    }
    if (v < first[len] || v > 0x10FFFF || (v >= 0xD800 && v < 0xE000))
        return 0;
    *code = v;
    return len;
}

static uint32_t put_utf8(char *out, uint32_t v)
{
    if (v < 0x80) {
        out[0] = (char)v;
        return 1;
    }
    uint32_t n = v < 0x800 ? 2 : v < 0x10000 ? 3 : 4;
    for (uint32_t i = n - 1; i > 0; i--, v >>= 6)
        out[i] = (char)(0x80 | (v & 0x3F));
    out[0] = (char)((0xF00u >> n & 0xFF) | v);
    return n;
}

static uint32_t hex4(struct reader *r)
{
    uint32_t v = 0;
    for (int i = 0; i < 4; i++, r->s++) {
        char ch = r->s < r->end ? *r->s : 0;
        uint32_t d = ch >= '0' && ch <= '9'   ? (uint32_t)(ch - '0')
                     : ch >= 'a' && ch <= 'f' ? (uint32_t)(ch - 'a' + 10)
                     : ch >= 'A' && ch <= 'F' ? (uint32_t)(ch - 'A' + 10)
                                              : 16;
        if (d == 16)
            syntax(r, "a \\u needs four hexadecimal digits");
        v = v << 4 | d;
    }
    return v;
}

static uint32_t escape(struct reader *r)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char ch = r->s < r->end ? *r->s++ : 0;
    if (ch != 'u') {
        const char *at = ch ? strchr(from, ch) : NULL;
        if (!at)
            syntax(r, "an escape that JSON does not have");
        return (uint32_t)to[at - from];
    }
    uint32_t v = hex4(r);
    if (v >= 0xD800 && v < 0xDC00 && r->end - r->s >= 6 && r->s[0] == '\\' && r->s[1] == 'u') {
        r->s += 2;
        uint32_t low = hex4(r);
        if (low >= 0xDC00 && low < 0xE000)
            return 0x10000 + ((v - 0xD800) << 10) + (low - 0xDC00);
        v = 0xD800;
    }
    if (v >= 0xD800 && v < 0xE000)
        syntax(r, "half of a surrogate pair, which is no character");
    return v;
}

/* Reads a string, at its opening quote. */
static struct bt_sj_text string(struct reader *r)
{
    const char *close = ++r->s;
    while (close < r->end && *close != '"')
        close += *close == '\\' ? 2 : 1;
    if (close >= r->end)
        syntax(r, "a string without its closing quote");
    char *out = bt_schema_alloc(r->c, (size_t)(close - r->s) + 1);
    uint32_t n = 0;
    while (r->s < r->end && *r->s != '"') {
        if ((uint8_t)*r->s < 0x20)
            syntax(r, "a control character in a string");
        if (*r->s == '\\') {
            r->s++;
            n += put_utf8(out + n, escape(r));
            continue;
        }
        uint32_t code, len = bt_sj_utf8(r->s, (uint32_t)(r->end - r->s), &code);
        if (!len)
            syntax(r, "bytes that are not UTF-8");
        memcpy(out + n, r->s, len);
        n += len;
        r->s += len;
    }
    r->s++;
    return (struct bt_sj_text){out, n};
}

bool bt_sj_number(struct bt_schema *c, const char *s, size_t n, struct bt_dec *out)
{
    const char *end = s + n;
    struct bt_dec d = {0};
    char *digits = bt_schema_alloc(c, n + 1);
    int64_t point = 0, exp = 0;
    uint32_t used = 0;
    d.d = digits;
    if (s < end && *s == '-')
        d.neg = true, s++;
    const char *whole = s;
    for (; s < end && *s >= '0' && *s <= '9'; s++) {
        if (used || *s != '0')
            digits[used++] = *s, point++;
    }
    if (s == whole || (s - whole > 1 && *whole == '0'))
        return false;
    if (s < end && *s == '.') {
        const char *frac = ++s;
        for (; s < end && *s >= '0' && *s <= '9'; s++) {
            if (used || *s != '0')
                digits[used++] = *s;
            else
                point--;
        }
        if (s == frac)
            return false;
    }
    if (s < end && (*s == 'e' || *s == 'E')) {
        bool neg = ++s < end && *s == '-';
        if (s < end && (*s == '-' || *s == '+'))
            s++;
        const char *first = s;
        for (; s < end && *s >= '0' && *s <= '9'; s++)
            exp = exp < 1000000000 ? exp * 10 + (*s - '0') : exp;
        if (s == first)
            return false;
        exp = neg ? -exp : exp;
    }
    while (used && digits[used - 1] == '0')
        used--;
    d.n = used;
    d.exp = used ? (int32_t)(point + exp) : 0;
    d.neg = d.neg && used;
    *out = d;
    return s == end;
}

static void number(struct reader *r, struct bt_sj *v)
{
    const char *s = r->s;
    while (r->s < r->end && *r->s && strchr("+-.eE0123456789", *r->s))
        r->s++;
    if (r->s == s || !bt_sj_number(r->c, s, (size_t)(r->s - s), &v->num)) {
        r->s = s;
        syntax(r, "something that is no JSON value");
    }
}

static void word(struct reader *r, struct bt_sj *v, const char *text, enum bt_sj_type type)
{
    size_t n = strlen(text);
    if ((size_t)(r->end - r->s) < n || memcmp(r->s, text, n) != 0)
        syntax(r, "something that is no JSON value");
    r->s += n;
    v->type = type;
}

int bt_sj_text_cmp(struct bt_sj_text a, struct bt_sj_text b)
{
    uint32_t n = a.n < b.n ? a.n : b.n;
    int d = n ? memcmp(a.s, b.s, n) : 0;
    return d ? d : a.n < b.n ? -1 : a.n > b.n;
}

static int by_key(const void *a, const void *b)
{
    return bt_sj_text_cmp((*(struct bt_sj *const *)a)->key, (*(struct bt_sj *const *)b)->key);
}

static struct bt_sj *value(struct reader *r, const struct bt_sj *up);

static void members(struct reader *r, struct bt_sj *v, char close)
{
    uint32_t from = r->n_stack;
    r->s++;
    if (++r->depth > BT_SCHEMA_DEPTH_MAX)
        bt_schema_fail(r->c, BT_ERR_EXHAUSTED, NULL,
                       "the schema is nested deeper than %d levels; use $defs and $ref",
                       BT_SCHEMA_DEPTH_MAX);
    skip_space(r);
    while (r->s < r->end && *r->s != close) {
        struct bt_sj_text key = {0};
        if (close == '}') {
            if (*r->s != '"')
                syntax(r, "a name in quotes is missing");
            key = string(r);
            skip_space(r);
            if (r->s >= r->end || *r->s != ':')
                syntax(r, "a colon is missing");
            r->s++;
        }
        struct bt_sj *m = value(r, v);
        m->key = key;
        m->index = r->n_stack - from;
        r->stack = bt_schema_grow(r->c, r->stack, r->n_stack, &r->cap_stack, sizeof(*r->stack));
        r->stack[r->n_stack++] = m;
        skip_space(r);
        if (r->s < r->end && *r->s == ',') {
            r->s++;
            skip_space(r);
            if (r->s < r->end && *r->s == close)
                syntax(r, "a comma before the end");
        } else if (r->s >= r->end || *r->s != close) {
            syntax(r, "a comma or the end of an array or object is missing");
        }
    }
    if (r->s >= r->end)
        syntax(r, "the end of an array or object is missing");
    r->s++;
    r->depth--;
    v->n = r->n_stack - from;
    v->items = bt_schema_alloc(r->c, v->n * sizeof(*v->items));
    if (v->n)
        memcpy(v->items, r->stack + from, v->n * sizeof(*v->items));
    r->n_stack = from;
    if (close == ']')
        return;
    v->sorted = bt_schema_alloc(r->c, v->n * sizeof(*v->sorted));
    if (v->n)
        memcpy(v->sorted, v->items, v->n * sizeof(*v->sorted));
    qsort(v->sorted, v->n, sizeof(*v->sorted), by_key);
    for (uint32_t i = 1; i < v->n; i++)
        if (by_key(&v->sorted[i - 1], &v->sorted[i]) == 0)
            bt_schema_fail(r->c, BT_ERR_INVALID, v->sorted[i], "the name occurs twice");
}

static struct bt_sj *value(struct reader *r, const struct bt_sj *up)
{
    struct bt_schema *c = r->c;
    skip_space(r);
    struct bt_sj *v = bt_schema_alloc(c, sizeof(*v));
    v->up = up;
    v->id = c->n_values;
    c->values = bt_schema_grow(c, c->values, c->n_values, &c->cap_values, sizeof(*c->values));
    c->values[c->n_values++] = v;
    switch (r->s < r->end ? *r->s : 0) {
    case '{':
        v->type = BT_SJ_OBJECT;
        members(r, v, '}');
        break;
    case '[':
        v->type = BT_SJ_ARRAY;
        members(r, v, ']');
        break;
    case '"':
        v->type = BT_SJ_STRING;
        v->text = string(r);
        break;
    case 't': word(r, v, "true", BT_SJ_TRUE); break;
    case 'f': word(r, v, "false", BT_SJ_FALSE); break;
    case 'n': word(r, v, "null", BT_SJ_NULL); break;
    default:
        v->type = BT_SJ_NUMBER;
        number(r, v);
        break;
    }
    return v;
}

struct bt_sj *bt_sj_parse(struct bt_schema *c, const char *text, size_t len)
{
    struct reader r = {.c = c, .s = text, .start = text, .end = text + len};
    struct bt_sj *v = value(&r, NULL);
    skip_space(&r);
    if (r.s != r.end)
        syntax(&r, "something follows the value");
    return v;
}

const struct bt_sj *bt_sj_get_n(const struct bt_sj *o, const char *key, uint32_t n)
{
    struct bt_sj_text k = {key, n};
    uint32_t lo = 0, hi = o->type == BT_SJ_OBJECT ? o->n : 0;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        int d = bt_sj_text_cmp(o->sorted[mid]->key, k);
        if (d == 0)
            return o->sorted[mid];
        if (d < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

const struct bt_sj *bt_sj_get(const struct bt_sj *o, const char *key)
{
    return bt_sj_get_n(o, key, (uint32_t)strlen(key));
}

bool bt_sj_is(const struct bt_sj *v, const char *s)
{
    return v->type == BT_SJ_STRING && v->text.n == strlen(s) &&
           memcmp(v->text.s, s, v->text.n) == 0;
}

void bt_sj_pointer(const struct bt_sj *v, char *out, size_t cap)
{
    const struct bt_sj *path[BT_SCHEMA_DEPTH_MAX + 1];
    uint32_t n = 0;
    for (; v->up; v = v->up)
        path[n++] = v;
    size_t used = (size_t)snprintf(out, cap, "#");
    while (n-- > 0 && used + 16 < cap) {
        if (path[n]->up->type == BT_SJ_ARRAY) {
            used += (size_t)snprintf(out + used, cap - used, "/%u", path[n]->index);
            continue;
        }
        out[used++] = '/';
        for (uint32_t i = 0; i < path[n]->key.n && used + 8 < cap; i++) {
            uint8_t ch = (uint8_t)path[n]->key.s[i];
            if (ch == '~' || ch == '/')
                used += (size_t)snprintf(out + used, cap - used, ch == '~' ? "~0" : "~1");
            else if (ch < 0x20)
                out[used++] = '?';
            else
                out[used++] = (char)ch;
        }
        out[used] = 0;
    }
}
