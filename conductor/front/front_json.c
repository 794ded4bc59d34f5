/* Reads and writes the front's JSON. Pure. */
#include "conductor/front/front_json.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A body of 4 MiB could hold millions of empty containers, each of which takes ~100 bytes of
 * memory. */
#define CONTAINERS_MAX 65536
#define WHOLE_MAX      9007199254740992.0 /* beyond 2^53 a double is not exact */

#define INT64_DIGITS      19      /* with fewer digits every integer fits */
#define SHORTEST_OVERFLOW 5       /* 9e308 */
#define HUGE_TEXT         "1e308" /* no longer than the number it replaces */
#define HUGE_MIN          9223372036854775808.0

bool bt_front_fail(struct bt_front_error *e, int http, const char *param, const char *code,
                   const char *fmt, ...)
{
    va_list ap;
    e->http = http;
    e->code = code;
    e->type = http == 429   ? "rate_limit_error"
              : http >= 500 ? "server_error"
                            : "invalid_request_error";
    snprintf(e->param, sizeof(e->param), "%s", param != NULL ? param : "");
    va_start(ap, fmt);
    vsnprintf(e->message, sizeof(e->message), fmt, ap);
    va_end(ap);
    return false;
}

void bt_front_error_json(const struct bt_front_error *e, struct bt_buf *out)
{
    bt_buf_puts(out, "{\"error\":{\"message\":");
    bt_front_put_cstr(out, e->message);
    bt_buf_printf(out, ",\"type\":\"%s\",\"param\":", e->type);
    if (e->param[0] != '\0') {
        bt_front_put_cstr(out, e->param);
    } else {
        bt_buf_puts(out, "null");
    }
    if (e->code != NULL) {
        bt_buf_printf(out, ",\"code\":\"%s\"}}", e->code);
    } else {
        bt_buf_puts(out, ",\"code\":null}}");
    }
}

/* ---- reading ---- */

static size_t count_containers(const char *s, size_t len)
{
    size_t n = 0;
    bool in_string = false;
    for (size_t i = 0; i < len; i++) {
        if (s[i] == '"') {
            in_string = !in_string;
        } else if (s[i] == '\\') {
            i++;
        } else if (!in_string && (s[i] == '{' || s[i] == '[')) {
            n++;
        }
    }
    return n;
}

/* ---- numbers that jansson does not take ----
 * Integers beyond 64 bits and reals beyond doubles are valid JSON, and jansson refuses the whole
 * text for one. They are replaced by a real of the same length that is out of every field's range.
 */

static size_t digits_at(const char *s, size_t len)
{
    size_t n = 0;
    while (n < len && s[n] >= '0' && s[n] <= '9') {
        n++;
    }
    return n;
}

struct number {              /* one number of the JSON grammar */
    size_t len, sign, whole; /* bytes; whole: digits before a point or exponent */
    bool real;
};

/* Reads the number at the first character of s. False: this is no JSON number, and jansson will
 * report it. */
static bool read_number(const char *s, size_t len, struct number *x)
{
    size_t at = len > 0 && s[0] == '-', n;
    *x = (struct number){.sign = at, .whole = digits_at(s + at, len - at)};
    if (x->whole == 0 || (s[at] == '0' && x->whole > 1)) {
        return false;
    }
    at += x->whole;
    if (at < len && s[at] == '.') {
        n = digits_at(s + at + 1, len - at - 1);
        if (n == 0) {
            return false;
        }
        at += 1 + n;
        x->real = true;
    }
    if (at < len && (s[at] | 0x20) == 'e') {
        size_t sign = at + 1 < len && (s[at + 1] == '+' || s[at + 1] == '-');
        n = digits_at(s + at + 1 + sign, len - at - 1 - sign);
        if (n == 0) {
            return false;
        }
        at += 1 + sign + n;
        x->real = true;
    }
    x->len = at;
    return true;
}

static bool fits(const char *s, const struct number *x)
{
    char text[32];
    if (!x->real && x->whole < INT64_DIGITS) {
        return true;
    }
    if (!x->real && x->whole == INT64_DIGITS) {
        memcpy(text, s, x->len);
        text[x->len] = '\0';
        errno = 0;
        (void)strtoll(text, NULL, 10);
        return errno == 0;
    }
    if (!x->real) {
        return false;
    }
    if (x->len < SHORTEST_OVERFLOW) {
        return true;
    }
    char *copy = bt_malloc(x->len + 1);
    memcpy(copy, s, x->len);
    copy[x->len] = '\0';
    bool finite = isfinite(strtod(copy, NULL));
    free(copy);
    return finite;
}

/* Returns a text of the same length without such numbers. NULL: there are none. */
static char *tame_numbers(const char *s, size_t len)
{
    char *copy = NULL, huge[8];
    bool in_string = false;
    struct number x;
    for (size_t i = 0; i < len; i++) {
        if (s[i] == '"') {
            in_string = !in_string;
        } else if (s[i] == '\\') {
            i++;
        } else if (!in_string && (s[i] == '-' || (s[i] >= '0' && s[i] <= '9'))) {
            if (!read_number(s + i, len - i, &x)) {
                return copy;
            }
            if (!fits(s + i, &x)) {
                if (copy == NULL) {
                    copy = bt_malloc(len);
                    memcpy(copy, s, len);
                }
                int n = snprintf(huge, sizeof(huge), "%s%s", x.sign != 0 ? "-" : "", HUGE_TEXT);
                memset(copy + i, ' ', x.len);
                memcpy(copy + i, huge, (size_t)n);
            }
            i += x.len - 1;
        }
    }
    return copy;
}

bool bt_front_is_huge(const json_t *v)
{
    return json_is_real(v) && fabs(json_real_value(v)) >= HUGE_MIN;
}

json_t *bt_front_json_parse(const void *body, size_t len, struct bt_front_error *e)
{
    json_error_t je;
    if (len == 0) {
        bt_front_fail(e, 400, NULL, "invalid_json", "the body is empty; a JSON object is expected");
        return NULL;
    }
    if (count_containers(body, len) > CONTAINERS_MAX) {
        bt_front_fail(e, 400, NULL, "invalid_json",
                      "the body has more than %d arrays and objects; send less", CONTAINERS_MAX);
        return NULL;
    }
    /* Text may contain NUL; bt_front_get_str refuses it in other fields. */
    char *tamed = tame_numbers(body, len);
    json_t *root =
        json_loadb(tamed != NULL ? tamed : body, len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &je);
    free(tamed);
    if (root == NULL) {
        bt_front_fail(e, 400, NULL, "invalid_json",
                      "the body is not valid JSON: line %d, column %d: %s", je.line, je.column,
                      je.text);
        return NULL;
    }
    if (!json_is_object(root)) {
        json_decref(root);
        bt_front_fail(e, 400, NULL, "invalid_json", "the body must be a JSON object");
        return NULL;
    }
    return root;
}

bool bt_front_has(const json_t *root, const char *key)
{
    const json_t *v = json_object_get(root, key);
    return v != NULL && !json_is_null(v);
}

bool bt_front_asked_for(const json_t *v)
{
    switch (v == NULL ? JSON_NULL : json_typeof(v)) {
    case JSON_NULL:
    case JSON_FALSE: return false;
    case JSON_INTEGER: return json_integer_value(v) != 0;
    case JSON_REAL: return json_real_value(v) != 0;
    case JSON_STRING: return json_string_length(v) > 0;
    case JSON_ARRAY: return json_array_size(v) > 0;
    case JSON_OBJECT: return json_object_size(v) > 0;
    case JSON_TRUE: return true;
    }
    return true;
}

static bool wrong_type(struct bt_front_error *e, const char *key, const char *want)
{
    return bt_front_fail(e, 400, key, "invalid_type", "'%s' must be %s", key, want);
}

bool bt_front_get_int(const json_t *root, const char *key, int64_t min, int64_t max, int64_t *v_p,
                      struct bt_front_error *e)
{
    if (!bt_front_has(root, key)) {
        return true;
    }
    const json_t *v = json_object_get(root, key);
    double real = json_is_real(v) ? json_real_value(v) : 0.5;
    bool whole = real == floor(real) && fabs(real) <= WHOLE_MAX; /* 16.0 is an integer */
    if (bt_front_is_huge(v)) {
        return bt_front_fail(
            e, 400, key, "invalid_value",
            "'%s' is a number that does not fit into 64 bits; allowed: %lld to %lld", key,
            (long long)min, (long long)max);
    }
    if (!json_is_integer(v) && !whole) {
        return wrong_type(e, key, "an integer");
    }
    int64_t n = whole ? (int64_t)real : json_integer_value(v);
    if (n < min || n > max) {
        return bt_front_fail(e, 400, key, "invalid_value", "'%s' is %lld; allowed: %lld to %lld",
                             key, (long long)n, (long long)min, (long long)max);
    }
    *v_p = n;
    return true;
}

bool bt_front_get_num(const json_t *root, const char *key, double min, bool min_open, double max,
                      float *v_p, struct bt_front_error *e)
{
    if (!bt_front_has(root, key)) {
        return true;
    }
    const json_t *v = json_object_get(root, key);
    if (!json_is_number(v)) {
        return wrong_type(e, key, "a number");
    }
    double n = json_number_value(v);
    if (bt_front_is_huge(v)) { /* the text does not repeat the number: tame_numbers may have changed
                                * it */
        return bt_front_fail(e, 400, key, "invalid_value",
                             "'%s' is out of range; allowed: %s%g to %g", key,
                             min_open ? "above " : "", min, max);
    }
    if (!(n >= min && n <= max) || (min_open && n <= min)) {
        return bt_front_fail(e, 400, key, "invalid_value", "'%s' is %g; allowed: %s%g to %g", key,
                             n, min_open ? "above " : "", min, max);
    }
    *v_p = (float)n;
    return true;
}

bool bt_front_get_bool(const json_t *root, const char *key, bool *v_p, struct bt_front_error *e)
{
    if (!bt_front_has(root, key)) {
        return true;
    }
    const json_t *v = json_object_get(root, key);
    if (!json_is_boolean(v)) {
        return wrong_type(e, key, "true or false");
    }
    *v_p = json_is_true(v);
    return true;
}

bool bt_front_get_str(const json_t *root, const char *key, const char **v_p,
                      struct bt_front_error *e)
{
    if (!bt_front_has(root, key)) {
        return true;
    }
    const json_t *v = json_object_get(root, key);
    if (!json_is_string(v)) {
        return wrong_type(e, key, "a string");
    }
    if (strlen(json_string_value(v)) != json_string_length(v)) {
        return bt_front_fail(e, 400, key, "invalid_value", "'%s' must not contain a NUL character",
                             key);
    }
    *v_p = json_string_value(v);
    return true;
}

/* ---- writing ---- */

size_t bt_front_utf8_len(const char *s, size_t len)
{
    const unsigned char *u = (const unsigned char *)s;
    size_t n = u[0] < 0x80             ? 1
               : (u[0] & 0xe0) == 0xc0 ? 2
               : (u[0] & 0xf0) == 0xe0 ? 3
               : (u[0] & 0xf8) == 0xf0 ? 4
                                       : 0;
    if (n == 0 || n > len) {
        return 0;
    }
    for (size_t i = 1; i < n; i++) {
        if ((u[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    bool bad = (n == 2 && u[0] < 0xc2) || (n == 3 && u[0] == 0xe0 && u[1] < 0xa0) ||
               (n == 3 && u[0] == 0xed && u[1] >= 0xa0) ||
               (n == 4 && u[0] == 0xf0 && u[1] < 0x90) ||
               (n == 4 && (u[0] > 0xf4 || (u[0] == 0xf4 && u[1] >= 0x90)));
    return bad ? 0 : n;
}

static void put_escape(struct bt_buf *out, unsigned char c)
{
    switch (c) {
    case '"': bt_buf_append(out, "\\\"", 2); break;
    case '\\': bt_buf_append(out, "\\\\", 2); break;
    case '\n': bt_buf_append(out, "\\n", 2); break;
    case '\r': bt_buf_append(out, "\\r", 2); break;
    case '\t': bt_buf_append(out, "\\t", 2); break;
    default: bt_buf_printf(out, "\\u%04x", c); break;
    }
}

void bt_front_put_text(struct bt_buf *out, const char *s, size_t len)
{
    size_t from = 0, i = 0; /* [from, i) is copied unchanged */
    s = s != NULL ? s : "";
    bt_buf_reserve(out, len);
    while (i < len) {
        unsigned char c = (unsigned char)s[i];
        bool plain = c >= 0x20 && c < 0x7f && c != '"' && c != '\\';
        size_t n = plain ? 1 : c < 0x80 ? 0 : bt_front_utf8_len(s + i, len - i);
        if (n > 0) {
            i += n;
            continue;
        }
        bt_buf_append(out, s + from, i - from);
        if (c < 0x80) {
            put_escape(out, c);
        } else {
            bt_buf_puts(out, "\xef\xbf\xbd");
        }
        from = ++i;
    }
    bt_buf_append(out, s + from, len - from);
}

void bt_front_put_str(struct bt_buf *out, const char *s, size_t len)
{
    bt_buf_append(out, "\"", 1);
    bt_front_put_text(out, s, len);
    bt_buf_append(out, "\"", 1);
}

void bt_front_put_cstr(struct bt_buf *out, const char *s)
{
    bt_front_put_str(out, s, strlen(s));
}

void bt_front_put_uint(struct bt_buf *out, uint64_t v)
{
    char digits[20];
    size_t n = 0;
    do {
        digits[sizeof(digits) - ++n] = (char)('0' + v % 10);
        v /= 10;
    } while (v > 0);
    bt_buf_append(out, digits + sizeof(digits) - n, n);
}

void bt_front_put_float(struct bt_buf *out, float v)
{
    bt_buf_printf(out, "%.9g", isfinite(v) ? (double)v : -9999.0);
}

void bt_front_put_known(struct bt_buf *out, double v)
{
    if (v < 0 || !isfinite(v)) {
        bt_buf_puts(out, "null");
    } else {
        bt_buf_printf(out, "%.6g", v);
    }
}
