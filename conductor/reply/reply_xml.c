/* Reads a call whose arguments are elements, <parameter=city>\nRome\n</parameter>, and writes them
 * as a JSON object; see reply_priv.h. Values are text: whether it is a string or JSON follows from
 * the kinds that the tool's schema allows. Strings leave as they come. */
#include "conductor/reply/reply_priv.h"

#include <strings.h>

#define NAME_MAX 256 /* bytes of a function's name, and of a key */

enum { NAME, BODY, KEY, BEFORE_VALUE, VALUE, OVER };

void bt_reply_xml_init(struct bt_reply_xml *x, const struct bt_reply_xml_form *f)
{
    x->f = f;
    x->state = NAME;
    x->sure = x->first = x->newline = false;
    x->n = 0;
    bt_buf_clear(&x->name);
    bt_buf_clear(&x->key);
    bt_buf_clear(&x->value);
}

void bt_reply_xml_cleanup(struct bt_reply_xml *x)
{
    bt_buf_cleanup(&x->name);
    bt_buf_cleanup(&x->key);
    bt_buf_cleanup(&x->value);
}

bool bt_reply_xml_between(const struct bt_reply_xml *x)
{
    return x->state == BODY || (x->state == NAME && x->f->call_open == NULL && x->name.len > 0);
}

/* ---- JSON out ---- */

static void put_escaped(const char *p, size_t n, struct bt_buf *out)
{
    static const char from[] = "\"\\\n\t\r\b\f", to[] = "\"\\ntrbf";
    for (size_t i = 0; i < n; i++) {
        const char *at = p[i] != '\0' ? strchr(from, p[i]) : NULL;
        if (at != NULL) {
            bt_buf_append(out, (char[]){'\\', to[at - from]}, 2);
        } else if ((unsigned char)p[i] < 0x20) {
            bt_buf_printf(out, "\\u%04x", (unsigned)(unsigned char)p[i]);
        } else {
            bt_buf_append(out, p + i, 1);
        }
    }
}

static void put_string(const char *p, size_t n, struct bt_buf *out)
{
    bt_buf_puts(out, "\"");
    put_escaped(p, n, out);
    bt_buf_puts(out, "\"");
}

/* Words of JSON, as Python's templates write them too. */
static const char *word_of(const char *p, size_t n)
{
    static const char *const words[][2] = {
        {"true", "true"}, {"false", "false"}, {"null", "null"}, {"none", "null"}};
    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        if (strlen(words[i][0]) == n && strncasecmp(words[i][0], p, n) == 0) {
            return words[i][1];
        }
    }
    return NULL;
}

/* The complete value: JSON if it is of a kind that may be here, otherwise a string. */
static void put_value(unsigned kinds, const struct bt_buf *v, struct bt_buf *out)
{
    const char *p = v->len > 0 ? v->data : "";
    size_t from = 0, to = v->len;
    while (from < to && memchr(" \t\r\n", p[from], 4) != NULL) {
        from++;
    }
    while (to > from && memchr(" \t\r\n", p[to - 1], 4) != NULL) {
        to--;
    }
    const char *word = word_of(p + from, to - from);
    const char *json = word != NULL ? word : p + from;
    size_t n = word != NULL ? strlen(word) : to - from;
    unsigned is = bt_json_kind(json, n);
    bool text = (kinds & BT_REPLY_IS_STRING) != 0 && kinds != BT_REPLY_IS_ANY;
    if (is != 0 && ((kinds & is) != 0 || !text) && !(text && is == BT_REPLY_IS_STRING)) {
        bt_buf_append(out, json, n);
    } else {
        put_string(p, v->len, out);
    }
}

/* ---- steps ---- */

static size_t go(struct bt_reply_xml *x, int state, const char *marker)
{
    x->state = (uint8_t)state;
    return marker != NULL ? strlen(marker) : 0;
}

static bool may_be_name(char c)
{
    return c == '_' || c == '-' || c == '.' || c == ':' || c == '/' || (c >= '0' && c <= '9') ||
           (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static size_t step_name(struct bt_reply_xml *x, char c, enum bt_scan *result)
{
    bool named = x->name.len > 0;
    if (x->f->call_open != NULL && c == '>' && named) {
        x->sure = true;
        x->state = BODY;
        return 1;
    }
    if (x->f->call_open == NULL && named && (c == '\n' || c == '<')) {
        x->state = BODY;
        return c == '\n';
    }
    if (!may_be_name(c) || x->name.len == NAME_MAX) {
        *result = BT_SCAN_BAD;
        return 0;
    }
    bt_buf_append(&x->name, &c, 1);
    return 1;
}

static size_t step_body(struct bt_reply_xml *x, const struct bt_reply *r, const char *p, size_t n,
                        struct bt_buf *out, enum bt_scan *result)
{
    const struct bt_reply_xml_form *f = x->f;
    enum bt_found key = bt_reply_begins(r, p, n, f->key_open);
    enum bt_found end = bt_reply_begins(r, p, n, f->call_close);
    if (key == FOUND) {
        x->sure = true;
        bt_buf_clear(&x->key);
        return go(x, KEY, f->key_open);
    }
    if (end == FOUND) {
        bt_reply_xml_end(x, out);
        *result = BT_SCAN_DONE;
        return go(x, OVER, f->call_close);
    }
    if (key == FOUND_PART || end == FOUND_PART) {
        return 0;
    }
    if (!x->sure && memchr(" \t\r\n", p[0], 4) == NULL) {
        *result = BT_SCAN_BAD;
        return 0;
    }
    return 1; /* models write white space here, and sometimes a word */
}

/* Writes what precedes the value in the object. */
static void begin_value(struct bt_reply_xml *x, const struct bt_reply *r, struct bt_buf *out)
{
    size_t from = 0, to = x->key.len;
    while (from < to && x->key.data[from] == ' ') {
        from++;
    }
    while (to > from && x->key.data[to - 1] == ' ') {
        to--;
    }
    bt_buf_puts(out, x->n++ == 0 ? "{" : ", ");
    put_string(to > 0 ? x->key.data + from : "", to - from, out);
    bt_buf_puts(out, ": ");
    x->kinds = bt_reply_kinds(r, &x->name, to > 0 ? x->key.data + from : "", to - from);
    bt_buf_puts(out, x->kinds == BT_REPLY_IS_STRING ? "\"" : "");
    bt_buf_clear(&x->value);
    x->first = true;
    x->newline = false;
}

static size_t step_key(struct bt_reply_xml *x, const struct bt_reply *r, const char *p, size_t n,
                       enum bt_scan *result)
{
    const struct bt_reply_xml_form *f = x->f;
    enum bt_found end = bt_reply_begins(r, p, n, f->key_close);
    if (end == FOUND) {
        return go(x, BEFORE_VALUE, f->key_close);
    }
    if (end == FOUND_PART) {
        return 0;
    }
    if (x->key.len == NAME_MAX) {
        *result = BT_SCAN_BAD;
        return 0;
    }
    bt_buf_append(&x->key, p, 1);
    return 1;
}

static size_t step_before_value(struct bt_reply_xml *x, const struct bt_reply *r, const char *p,
                                size_t n, struct bt_buf *out)
{
    const char *open = x->f->value_open;
    enum bt_found at = open != NULL ? bt_reply_begins(r, p, n, open) : FOUND;
    if (at == FOUND_PART) {
        return 0;
    }
    if (at == FOUND) {
        begin_value(x, r, out);
        return go(x, VALUE, open);
    }
    return 1;
}

static void add(struct bt_reply_xml *x, char c, struct bt_buf *out)
{
    if (x->kinds == BT_REPLY_IS_STRING) {
        put_escaped(&c, 1, out);
    } else {
        bt_buf_append(&x->value, &c, 1);
    }
}

static size_t step_value(struct bt_reply_xml *x, const struct bt_reply *r, const char *p, size_t n,
                         struct bt_buf *out)
{
    const struct bt_reply_xml_form *f = x->f;
    enum bt_found end = bt_reply_begins(r, p, n, f->value_close);
    if (end == FOUND_PART) {
        return 0;
    }
    if (end == FOUND) {
        if (x->kinds == BT_REPLY_IS_STRING) {
            bt_buf_puts(out, "\"");
        } else {
            put_value(x->kinds, &x->value, out);
        }
        return go(x, BODY, f->value_close);
    }
    bool first = x->first;
    x->first = false;
    if (f->lines && p[0] == '\n' && first) {
        return 1;
    }
    if (x->newline) {
        add(x, '\n', out);
        x->newline = false;
    }
    if (f->lines && p[0] == '\n') { /* the last one belongs to the element */
        x->newline = true;
    } else {
        add(x, p[0], out);
    }
    return 1;
}

size_t bt_reply_xml_step(struct bt_reply_xml *x, const struct bt_reply *r, const char *p, size_t n,
                         struct bt_buf *out, enum bt_scan *result)
{
    *result = BT_SCAN_MORE;
    switch (x->state) {
    case NAME: return step_name(x, p[0], result);
    case BODY: return step_body(x, r, p, n, out, result);
    case KEY: return step_key(x, r, p, n, result);
    case BEFORE_VALUE: return step_before_value(x, r, p, n, out);
    default: return step_value(x, r, p, n, out);
    }
}

void bt_reply_xml_end(struct bt_reply_xml *x, struct bt_buf *out)
{
    bt_buf_puts(out, x->n > 0 ? "}" : "{}");
}

void bt_reply_xml_cut(struct bt_reply_xml *x, struct bt_buf *out)
{
    if (x->state == VALUE && x->kinds != BT_REPLY_IS_STRING) {
        bt_buf_append(out, x->value.data, x->value.len);
    }
}
