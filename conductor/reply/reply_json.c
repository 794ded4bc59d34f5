/* JSON values byte by byte; see reply_json.h. */
#include "conductor/reply/reply_json.h"
#include "conductor/reply/reply.h"

enum {
    VALUE,
    VALUE_OR_END,
    KEY,
    KEY_OR_END,
    COLON,
    AFTER,
    WORD,
    STRING,
    STRING_KEY,
    ESCAPE,
    ESCAPE_KEY
};

void bt_json_scan_init(struct bt_json_scan *s)
{
    *s = (struct bt_json_scan){.state = VALUE};
}

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static bool is_word(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '+' ||
           c == '-' || c == '.';
}

static bool in_object(const struct bt_json_scan *s)
{
    unsigned i = s->depth - 1u;
    return (s->objects[i / 8] >> (i % 8)) & 1;
}

static enum bt_scan open_level(struct bt_json_scan *s, bool object)
{
    if (s->depth == BT_REPLY_DEPTH) {
        return BT_SCAN_BAD;
    }
    unsigned i = s->depth++;
    s->objects[i / 8] = (uint8_t)((s->objects[i / 8] & ~(1u << (i % 8))) | (object << (i % 8)));
    s->state = object ? KEY_OR_END : VALUE_OR_END;
    return BT_SCAN_MORE;
}

static enum bt_scan close_level(struct bt_json_scan *s, bool object)
{
    if (in_object(s) != object) {
        return BT_SCAN_BAD;
    }
    s->depth--;
    s->state = AFTER;
    return s->depth == 0 ? BT_SCAN_DONE : BT_SCAN_MORE;
}

static enum bt_scan go(struct bt_json_scan *s, int state)
{
    s->state = (uint8_t)state;
    return BT_SCAN_MORE;
}

static enum bt_scan value(struct bt_json_scan *s, char c)
{
    switch (c) {
    case '{': return open_level(s, true);
    case '[': return open_level(s, false);
    case ']': return s->state == VALUE_OR_END ? close_level(s, false) : BT_SCAN_BAD;
    case '"': return s->depth > 0 ? go(s, STRING) : BT_SCAN_BAD;
    default: return s->depth > 0 && is_word(c) ? go(s, WORD) : BT_SCAN_BAD;
    }
}

static enum bt_scan after(struct bt_json_scan *s, char c)
{
    switch (c) {
    case ',': return go(s, in_object(s) ? KEY : VALUE);
    case '}': return close_level(s, true);
    case ']': return close_level(s, false);
    default: return BT_SCAN_BAD;
    }
}

enum bt_scan bt_json_scan(struct bt_json_scan *s, char c)
{
    switch (s->state) {
    case STRING:
    case STRING_KEY:
        if (c == '\\') {
            return go(s, s->state == STRING ? ESCAPE : ESCAPE_KEY);
        }
        return c == '"' ? go(s, s->state == STRING ? AFTER : COLON) : BT_SCAN_MORE;
    case ESCAPE: return go(s, STRING);
    case ESCAPE_KEY: return go(s, STRING_KEY);
    case WORD:
        if (is_word(c)) {
            return BT_SCAN_MORE;
        }
        break; /* the word is over */
    default: break;
    }
    if (is_space(c)) {
        return s->state == WORD ? go(s, AFTER) : BT_SCAN_MORE;
    }
    switch (s->state) {
    case KEY_OR_END:
        if (c == '}') {
            return close_level(s, true);
        }
        return c == '"' ? go(s, STRING_KEY) : BT_SCAN_BAD;
    case KEY: return c == '"' ? go(s, STRING_KEY) : BT_SCAN_BAD;
    case COLON: return c == ':' ? go(s, VALUE) : BT_SCAN_BAD;
    case WORD:
    case AFTER: return after(s, c);
    default: return value(s, c);
    }
}

/* ---- whole values ---- */

static bool is_digits(const char *p, size_t n, size_t *i)
{
    size_t from = *i;
    while (*i < n && p[*i] >= '0' && p[*i] <= '9') {
        (*i)++;
    }
    return *i > from;
}

static bool is_number(const char *p, size_t n)
{
    size_t i = n > 0 && p[0] == '-', from = i;
    if (!is_digits(p, n, &i) || (p[from] == '0' && i > from + 1)) {
        return false;
    }
    if (i < n && p[i] == '.') {
        i++;
        if (!is_digits(p, n, &i)) {
            return false;
        }
    }
    if (i < n && (p[i] == 'e' || p[i] == 'E')) {
        i++;
        i += i < n && (p[i] == '+' || p[i] == '-');
        if (!is_digits(p, n, &i)) {
            return false;
        }
    }
    return i == n;
}

static unsigned kind_of_word(const char *p, size_t n)
{
    bool truth = (n == 4 && memcmp(p, "true", 4) == 0) || (n == 5 && memcmp(p, "false", 5) == 0);
    return truth                                 ? BT_REPLY_IS_BOOLEAN
           : n == 4 && memcmp(p, "null", 4) == 0 ? BT_REPLY_IS_NULL
           : is_number(p, n)                     ? BT_REPLY_IS_NUMBER
                                                 : 0;
}

/* The length of the string at p, with its quotes; 0: it is none. */
static size_t string_at(const char *p, size_t n)
{
    size_t i = 1;
    while (i < n && p[i] != '"') {
        bool escape = p[i] == '\\';
        if ((unsigned char)p[i] < 0x20 || (escape && i + 1 == n)) {
            return 0;
        }
        size_t hex = escape && p[i + 1] == 'u' ? 4 : 0;
        if (escape && (p[i + 1] == '\0' || strchr("\"\\/bfnrtu", p[i + 1]) == NULL)) {
            return 0;
        }
        for (size_t k = 0; k < hex; k++) {
            char c = i + 2 + k < n ? p[i + 2 + k] : ' ';
            if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'))) {
                return 0;
            }
        }
        i += 1 + escape + hex;
    }
    return i < n ? i + 1 : 0;
}

unsigned bt_json_kind(const char *p, size_t n)
{
    if (n == 0) {
        return 0;
    }
    if (p[0] == '"') {
        return string_at(p, n) == n ? BT_REPLY_IS_STRING : 0;
    }
    if (p[0] != '{' && p[0] != '[') {
        return kind_of_word(p, n);
    }
    struct bt_json_scan s;
    bt_json_scan_init(&s);
    for (size_t i = 0, len; i < n; i += len) {
        bool word = is_word(p[i]);
        len = 1;
        while (word && i + len < n && is_word(p[i + len])) {
            len++;
        }
        if (p[i] == '"') {
            len = string_at(p + i, n - i);
        }
        if (len == 0 || (word && kind_of_word(p + i, len) == 0)) {
            return 0;
        }
        for (size_t k = 0; k < len; k++) {
            enum bt_scan r = bt_json_scan(&s, p[i + k]);
            if (r != BT_SCAN_MORE) {
                bool last = r == BT_SCAN_DONE && i + k + 1 == n;
                return !last ? 0 : p[0] == '{' ? BT_REPLY_IS_OBJECT : BT_REPLY_IS_ARRAY;
            }
        }
    }
    return 0;
}

/* ---- strings ---- */

enum { PLAIN, BACKSLASH, HEX1, HEX2, HEX3, HEX4 };

static void put_code(struct bt_buf *out, uint32_t cp)
{
    char b[4];
    size_t n = 0;
    if (cp < 0x80) {
        b[n++] = (char)cp;
    } else if (cp < 0x800) {
        b[n++] = (char)(0xc0 | (cp >> 6));
    } else if (cp < 0x10000) {
        b[n++] = (char)(0xe0 | (cp >> 12));
        b[n++] = (char)(0x80 | ((cp >> 6) & 0x3f));
    } else {
        b[n++] = (char)(0xf0 | (cp >> 18));
        b[n++] = (char)(0x80 | ((cp >> 12) & 0x3f));
        b[n++] = (char)(0x80 | ((cp >> 6) & 0x3f));
    }
    if (cp >= 0x80) {
        b[n++] = (char)(0x80 | (cp & 0x3f));
    }
    bt_buf_append(out, b, n);
}

/* A high surrogate without its other half becomes U+FFFD. */
static void drop_half(struct bt_json_string *s, struct bt_buf *out)
{
    if (s->high != 0) {
        put_code(out, 0xfffd);
        s->high = 0;
    }
}

static void end_hex(struct bt_json_string *s, struct bt_buf *out)
{
    uint32_t code = s->code;
    bool low = code >= 0xdc00 && code < 0xe000;
    s->state = PLAIN;
    if (low && s->high != 0) {
        put_code(out, 0x10000 + ((s->high - 0xd800u) << 10) + (code - 0xdc00));
        s->high = 0;
        return;
    }
    drop_half(s, out);
    if (code >= 0xd800 && code < 0xdc00) {
        s->high = (uint16_t)code;
    } else {
        put_code(out, low ? 0xfffd : code);
    }
}

static int hex_of(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

static void escape(struct bt_json_string *s, char c, struct bt_buf *out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *at = c != '\0' ? strchr(from, c) : NULL;
    s->state = PLAIN;
    if (c == 'u') {
        s->state = HEX1;
        s->code = 0;
        return;
    }
    drop_half(s, out);
    if (at != NULL) {
        bt_buf_append(out, &to[at - from], 1);
    } else {
        bt_buf_append(out, "\\", 1);
        bt_buf_append(out, &c, 1);
    }
}

enum bt_scan bt_json_string(struct bt_json_string *s, char c, struct bt_buf *out)
{
    if (s->state == BACKSLASH) {
        escape(s, c, out);
        return BT_SCAN_MORE;
    }
    if (s->state >= HEX1 && hex_of(c) >= 0) {
        s->code = (uint16_t)(s->code * 16 + hex_of(c));
        if (s->state++ == HEX4) {
            end_hex(s, out);
        }
        return BT_SCAN_MORE;
    }
    if (s->state >= HEX1) { /* too few digits */
        put_code(out, 0xfffd);
        s->state = PLAIN;
    }
    if (c == '\\') {
        s->state = BACKSLASH;
        return BT_SCAN_MORE;
    }
    drop_half(s, out);
    if (c == '"') {
        return BT_SCAN_DONE;
    }
    bt_buf_append(out, &c, 1);
    return BT_SCAN_MORE;
}
