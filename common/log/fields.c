/* Formats the fields of a log line and escapes every value. Pure, any thread. Arguments are
 * formatted one conversion at a time, so the end of a value is determined by the format, never by
 * the content of an argument. */
#include "common/log/fields.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

#include "common/base/assert.h"

#define RAW_BYTES 700u /* one value before it is escaped */
#define CUT_BYTES 16u  /* for `,"cut":true` */

/* Length in bytes of the UTF-8 character at s, and its code point; 0: not UTF-8. */
static size_t utf8_next(const unsigned char *s, uint32_t *code_p)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t n = s[0] < 0x80 ? 1 : s[0] >> 5 == 6 ? 2 : s[0] >> 4 == 14 ? 3 : s[0] >> 3 == 30 ? 4 : 0;
    if (n <= 1) {
        *code_p = s[0];
        return n;
    }
    uint32_t code = s[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80) {
            return 0;
        }
        code = code << 6 | (s[i] & 0x3fu);
    }
    if (code < least[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
        return 0;
    }
    *code_p = code;
    return n;
}

/* Characters that a terminal, or a program that reads lines, could interpret. */
static bool needs_escape(uint32_t code)
{
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x2028 || code == 0x2029 ||
           (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

static bool is_bare(const char *s)
{
    if (*s == '\0') {
        return false;
    }
    for (; *s != '\0'; s++) {
        if (*s <= ' ' || *s >= 0x7f || strchr("\"\\=", *s) != NULL) {
            return false;
        }
    }
    return true;
}

size_t bt_log_value(char *out, size_t cap, bool json, const char *s)
{
    size_t len = strlen(s);
    if (!json && len < cap && is_bare(s)) {
        memcpy(out, s, len + 1);
        return len;
    }
    size_t n = 0;
    out[n++] = '"';
    const unsigned char *at = (const unsigned char *)s, *end = at + len;
    while (at < end) {
        if (n + 12 > cap) { /* the longest escape, "...", the quote and NUL */
            memcpy(out + n, "...", 3);
            n += 3;
            break;
        }
        uint32_t code = 0;
        size_t used = utf8_next(at, &code);
        if (used == 0) {
            memcpy(out + n, "\xef\xbf\xbd", 3);
            n += 3;
            used = 1;
        } else if (code == '"' || code == '\\') {
            out[n++] = '\\';
            out[n++] = (char)code;
        } else if (needs_escape(code)) {
            n += (size_t)snprintf(out + n, cap - n, "\\u%04x", code);
        } else {
            memcpy(out + n, at, used);
            n += used;
        }
        at += used;
    }
    out[n++] = '"';
    out[n] = '\0';
    return n;
}

/* ---- one conversion of a format ---- */

enum size_of_int { AS_INT, AS_LONG, AS_LONG_LONG, AS_SIZE };

struct conversion {
    char spec[16]; /* with its '%', as snprintf takes it */
    size_t len;
    enum size_of_int size;
    char kind; /* d i u x X c p s e f g, or '%' */
};

static struct conversion parse_conversion(const char *fmt)
{
    struct conversion c = {.size = AS_INT};
    c.len = 1 + strspn(fmt + 1, "-+ #0123456789.");
    size_t l = strspn(fmt + c.len, "lzhj");
    if (l > 0) {
        const char *mod = fmt + c.len;
        c.size = mod[0] == 'z'            ? AS_SIZE
                 : mod[0] == 'h'          ? AS_INT
                 : l > 1 || mod[0] == 'j' ? AS_LONG_LONG
                                          : AS_LONG;
    }
    c.len += l;
    c.kind = fmt[c.len];
    c.len++;
    BT_ASSERT(c.len < sizeof(c.spec) && strchr("diuxXcpsefg%", c.kind) != NULL);
    memcpy(c.spec, fmt, c.len);
    c.spec[c.len] = '\0';
    return c;
}

/* Prints with a part of a format: the compiler has checked the whole format at the call of
 * bt_log. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
static void print_one(char *out, size_t cap, const struct conversion *c, va_list *ap)
{
    switch (c->kind) {
    case '%': snprintf(out, cap, "%%"); return;
    case 's': {
        const char *s = va_arg(*ap, const char *);
        snprintf(out, cap, c->spec, s != NULL ? s : "-");
        return;
    }
    case 'p': snprintf(out, cap, c->spec, va_arg(*ap, void *)); return;
    case 'e':
    case 'f':
    case 'g': snprintf(out, cap, c->spec, va_arg(*ap, double)); return;
    default: break;
    }
    switch (c->size) {
    case AS_INT: snprintf(out, cap, c->spec, va_arg(*ap, int)); return;
    case AS_LONG: snprintf(out, cap, c->spec, va_arg(*ap, long)); return;
    case AS_LONG_LONG: snprintf(out, cap, c->spec, va_arg(*ap, long long)); return;
    case AS_SIZE: snprintf(out, cap, c->spec, va_arg(*ap, size_t)); return;
    }
}
#pragma GCC diagnostic pop

/* ---- fields ---- */

/* Returns whether the text is a number of JSON. Text of arguments (%s) never counts as one. */
static bool is_number(const char *s)
{
    s += *s == '-';
    size_t whole = strspn(s, "0123456789");
    if (whole == 0 || (whole > 1 && *s == '0')) {
        return false;
    }
    s += whole;
    if (*s == '.') {
        size_t part = strspn(s + 1, "0123456789");
        if (part == 0) {
            return false;
        }
        s += 1 + part;
    }
    if (*s == 'e') {
        s++;
        s += *s == '-' || *s == '+';
        size_t power = strspn(s, "0123456789");
        if (power == 0) {
            return false;
        }
        s += power;
    }
    return *s == '\0';
}

struct value {
    char text[RAW_BYTES];
    bool from_text; /* it has the text of an argument or hexadecimal digits: a string in JSON */
};

/* Formats the value that begins at fmt and ends at the next space outside quotes. Quotes in fmt
 * (key="two words") group words and are not part of the value. */
static const char *format_value(struct value *v, const char *fmt, va_list *ap)
{
    size_t n = 0;
    bool quoted = *fmt == '"';
    fmt += quoted;
    v->text[0] = '\0';
    v->from_text = quoted;
    while (*fmt != '\0' && *fmt != (quoted ? '"' : ' ')) {
        if (*fmt == '%') {
            struct conversion c = parse_conversion(fmt);
            print_one(v->text + n, sizeof(v->text) - n, &c, ap);
            v->from_text = v->from_text || strchr("sxXpc", c.kind) != NULL;
            fmt += c.len;
        } else if (n + 1 < sizeof(v->text)) {
            v->text[n] = *fmt++;
            v->text[n + 1] = '\0';
        } else {
            fmt++;
        }
        n += strlen(v->text + n);
    }
    if (n + 1 >= sizeof(v->text)) {
        memcpy(v->text + n - 3, "...", 3);
    }
    return fmt + (quoted && *fmt == '"');
}

size_t bt_log_fields(char *out, size_t cap, bool json, const char *fmt, va_list ap)
{
    size_t n = 0;
    va_list args;
    va_copy(args, ap);
    out[0] = '\0';
    while (*(fmt += strspn(fmt, " ")) != '\0') {
        size_t key = strcspn(fmt, "=% ");
        BT_ASSERT(key > 0 && fmt[key] == '='); /* every field of a format has a key */
        struct value v;
        const char *name = fmt;
        fmt = format_value(&v, fmt + key + 1, &args);

        char text[BT_LOG_VALUE_BYTES];
        size_t len = json && !v.from_text && is_number(v.text)
                         ? (size_t)snprintf(text, sizeof(text), "%s", v.text)
                         : bt_log_value(text, sizeof(text), json, v.text);
        if (n + key + len + 5 + CUT_BYTES > cap) {
            n += (size_t)snprintf(out + n, cap - n, json ? ",\"cut\":true" : " cut=true");
            break;
        }
        n += (size_t)snprintf(out + n, cap - n, json ? ",\"%.*s\":%s" : " %.*s=%s", (int)key, name,
                              text);
    }
    va_end(args);
    return n;
}
