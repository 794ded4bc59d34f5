/* HTTP/1.1 request parser. Pure; see http_parse.h. It collects the head byte by byte in one buffer
 * (16 KiB at most). Each line is checked, and split into strings in place, when its CRLF has come.
 * Bodies are copied in blocks. */
#include "common/http/http_parse.h"

#include <string.h>
#include <strings.h>

#include "common/base/base.h"

#define TLS_HANDSHAKE 0x16 /* first byte of a TLS record that opens a connection */

enum { /* step */
       STEP_REQUEST_LINE,
       STEP_FIELD_LINE,
       STEP_LENGTH_BODY,
       STEP_CHUNK_SIZE, /* digits */
       STEP_CHUNK_EXT,  /* behind ';' */
       STEP_CHUNK_SIZE_LF,
       STEP_CHUNK_DATA,
       STEP_CHUNK_DATA_CR,
       STEP_CHUNK_DATA_LF
};

enum { /* ext: inside a chunk extension */
       EXT_START,
       EXT_NAME,
       EXT_VALUE_START,
       EXT_VALUE,
       EXT_QUOTED,
       EXT_ESCAPE,
       EXT_QUOTE_END
};

void bt_http_parser_init(struct bt_http_parser *p, size_t body_max)
{
    *p = (struct bt_http_parser){.phase = BT_HTTP_HEAD, .body_max = body_max};
}

void bt_http_parser_cleanup(struct bt_http_parser *p)
{
    bt_buf_cleanup(&p->head);
    bt_buf_cleanup(&p->body);
}

void bt_http_parser_reset(struct bt_http_parser *p)
{
    size_t body_max = p->body_max;
    bt_http_parser_cleanup(p);
    bt_http_parser_init(p, body_max);
}

bool bt_http_parser_started(const struct bt_http_parser *p)
{
    return p->step != STEP_REQUEST_LINE || p->head.len > p->line;
}

const char *bt_http_parser_field(const struct bt_http_parser *p, const char *name)
{
    for (uint32_t i = 0; i < p->n_fields; i++) {
        if (strcasecmp(p->head.data + p->fields[i].name, name) == 0) {
            return p->head.data + p->fields[i].value;
        }
    }
    return NULL;
}

bool bt_http_parser_ambiguous(const struct bt_http_parser *p, const char *name)
{
    const char *first = bt_http_parser_field(p, name);
    for (uint32_t i = 0; i < p->n_fields; i++) {
        if (strcasecmp(p->head.data + p->fields[i].name, name) == 0 &&
            strcmp(p->head.data + p->fields[i].value, first) != 0) {
            return true;
        }
    }
    return false;
}

static bool refuse(struct bt_http_parser *p, int status, const char *why)
{
    p->phase = BT_HTTP_REFUSE;
    p->status = status;
    p->why = why;
    return false;
}

/* ---- characters (RFC 9110, section 5.6.2; RFC 3986) ---- */

static bool is_token_char(unsigned char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c != '\0' && strchr("!#$%&'*+-.^_`|~", c) != NULL);
}

static int hex_digit(unsigned char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f') {
        return (c | 0x20) - 'a' + 10;
    }
    return -1;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t';
}

/* ---- the request line ---- */

/* Decodes %XX in place; refuses bad escapes, and escapes of control characters. */
static bool decode_path(struct bt_http_parser *p, char *s)
{
    char *to = s;
    for (; *s != '\0'; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '%') {
            int hi = hex_digit((unsigned char)s[1]);
            int lo = hi < 0 ? -1 : hex_digit((unsigned char)s[2]);
            if (lo < 0) {
                return refuse(p, 400, "bad percent-encoding in the path");
            }
            c = (unsigned char)(hi * 16 + lo);
            if (c < 0x20 || c == 0x7f) {
                return refuse(p, 400, "control character in the path");
            }
            s += 2;
        }
        *to++ = (char)c;
    }
    *to = '\0';
    return true;
}

/* origin-form, absolute-form (a proxy's) or "*". */
static bool take_target(struct bt_http_parser *p, char *target)
{
    for (const char *s = target; *s != '\0'; s++) {
        unsigned char c = (unsigned char)*s;
        if (c <= 0x20 || c >= 0x7f || strchr("#\"<>\\^`{|}", c) != NULL) {
            return refuse(p, 400, "illegal character in the request target");
        }
    }
    if (strncasecmp(target, "http://", 7) == 0 || strncasecmp(target, "https://", 8) == 0) {
        char *authority = strchr(target, ':') + 3;
        char *path = authority + strcspn(authority, "/?");
        if (path == authority || *path != '/') {
            return refuse(p, 400, "the request target has no path");
        }
        target = path;
    } else if (*target != '/' && strcmp(target, "*") != 0) {
        return refuse(p, 400, "the request target must begin with '/'");
    }
    char *query = strchr(target, '?');
    if (query != NULL) {
        *query++ = '\0';
    } else {
        query = target + strlen(target);
    }
    p->path = (uint32_t)(target - p->head.data);
    p->query = (uint32_t)(query - p->head.data);
    return decode_path(p, target);
}

static bool take_version(struct bt_http_parser *p, const char *v)
{
    bool shaped = strlen(v) == 8 && strncmp(v, "HTTP/", 5) == 0 && v[5] >= '0' && v[5] <= '9' &&
                  v[6] == '.' && v[7] >= '0' && v[7] <= '9';
    if (!shaped) {
        return refuse(p, 400, "malformed request line");
    }
    if (v[5] != '1' || v[7] > '1') {
        return refuse(p, 505, "only HTTP/1.1 and HTTP/1.0 are supported");
    }
    p->http10 = v[7] == '0';
    p->keep_alive = !p->http10;
    return true;
}

/* An unknown method is often the rest of a body whose length a proxy saw differently. So it ends
 * the connection instead of reaching a handler. */
static bool known_method(const char *m)
{
    static const char *const known[] = {"GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"};
    for (size_t i = 0; i < BT_ARRAY_LEN(known); i++) {
        if (strcmp(m, known[i]) == 0) {
            return true;
        }
    }
    return false;
}

static bool take_request_line(struct bt_http_parser *p, char *line, size_t len)
{
    if (memchr(line, '\0', len) != NULL) {
        return refuse(p, 400, "NUL in the request line");
    }
    char *sp1 = strchr(line, ' ');
    char *sp2 = sp1 != NULL ? strchr(sp1 + 1, ' ') : NULL;
    if (sp2 == NULL || sp1 == line || sp2 == sp1 + 1) {
        return refuse(p, 400, "malformed request line");
    }
    *sp1 = *sp2 = '\0';
    for (const char *s = line; *s != '\0'; s++) {
        if (!is_token_char((unsigned char)*s)) {
            return refuse(p, 400, "illegal character in the method");
        }
    }
    p->method = (uint32_t)(line - p->head.data);
    if (!take_version(p, sp2 + 1) || !take_target(p, sp1 + 1)) {
        return false;
    }
    return known_method(line) ? true : refuse(p, 501, "unknown method");
}

/* ---- fields ---- */

static bool take_length(struct bt_http_parser *p, const char *v)
{
    if (p->has_length) {
        return refuse(p, 400, "two Content-Length fields");
    }
    p->has_length = true;
    uint64_t n = 0;
    size_t i = 0;
    for (; v[i] >= '0' && v[i] <= '9' && i < 19; i++) {
        n = n * 10 + (uint64_t)(v[i] - '0');
    }
    if (i == 0 || v[i] != '\0' || n > INT64_MAX) {
        return refuse(p, 400, "Content-Length is not a plain decimal number below 2^63");
    }
    p->left = n;
    return true;
}

static bool take_host(struct bt_http_parser *p, const char *v)
{
    if (p->hosts++ > 0) {
        return refuse(p, 400, "two Host fields");
    }
    if (*v == '\0') {
        return refuse(p, 400, "the Host field is empty");
    }
    for (; *v != '\0'; v++) {
        unsigned char c = (unsigned char)*v;
        if (c <= 0x20 || c >= 0x7f || strchr("/?#@\\\"<>^`{|},", c) != NULL) {
            return refuse(p, 400, "illegal character in the Host field");
        }
    }
    return true;
}

static void take_connection(struct bt_http_parser *p, const char *v)
{
    while (*v != '\0') {
        size_t n = strcspn(v, ",");
        const char *s = v;
        size_t m = n;
        while (m > 0 && is_blank(*s)) {
            s++;
            m--;
        }
        while (m > 0 && is_blank(s[m - 1])) {
            m--;
        }
        if (m == 5 && strncasecmp(s, "close", 5) == 0) {
            p->keep_alive = false;
        }
        v += n + (v[n] == ',');
    }
}

/* Handles a field that affects framing. */
static bool take_framing_field(struct bt_http_parser *p, const char *name, const char *value)
{
    bool length = strcasecmp(name, "content-length") == 0;
    bool coding = strcasecmp(name, "transfer-encoding") == 0;
    bool host = strcasecmp(name, "host") == 0;
    if (p->trailer) {
        return length || coding || host ? refuse(p, 400, "a framing field in the trailers") : true;
    }
    if (length) {
        return take_length(p, value);
    }
    if (host) {
        return take_host(p, value);
    }
    if (coding) {
        if (p->te_fields++ > 0 || strcasecmp(value, "chunked") != 0) {
            return refuse(p, 400, "the only supported Transfer-Encoding is \"chunked\"");
        }
        p->chunked = true;
    } else if (strcasecmp(name, "connection") == 0) {
        take_connection(p, value);
    } else if (strcasecmp(name, "expect") == 0) {
        if (strcasecmp(value, "100-continue") != 0) {
            return refuse(p, 417, "the only supported expectation is \"100-continue\"");
        }
        p->expect_continue = true;
    }
    return true;
}

static bool take_field(struct bt_http_parser *p, char *line, size_t len)
{
    if (is_blank(line[0])) {
        return refuse(p, 400, "a header field is folded over two lines");
    }
    char *end = line + len, *colon = line;
    while (colon < end && is_token_char((unsigned char)*colon)) {
        colon++;
    }
    if (colon == line || colon == end || *colon != ':') {
        return refuse(p, 400, "malformed header field");
    }
    char *value = colon + 1;
    while (value < end && is_blank(*value)) {
        value++;
    }
    while (end > value && is_blank(end[-1])) {
        end--;
    }
    *colon = *end = '\0';
    for (const char *s = value; s < end; s++) {
        unsigned char c = (unsigned char)*s;
        if ((c < 0x20 && c != '\t') || c == 0x7f) {
            return refuse(p, 400, "control character in a header field");
        }
    }
    if (p->n_fields + p->n_trailers == BT_HTTP_FIELDS_MAX) {
        return refuse(p, 431, "more than 64 header fields");
    }
    if (p->trailer) {
        p->n_trailers++; /* checked and then ignored */
    } else {
        p->fields[p->n_fields++] = (struct bt_http_field){
            .name = (uint32_t)(line - p->head.data), .value = (uint32_t)(value - p->head.data)};
    }
    return take_framing_field(p, line, value);
}

/* Handles the empty line after the fields. */
static bool end_of_fields(struct bt_http_parser *p)
{
    if (p->hosts == 0 && !p->http10) {
        return refuse(p, 400, "no Host field");
    }
    if (p->chunked && (p->has_length || p->http10)) {
        return refuse(p, 400,
                      p->http10 ? "Transfer-Encoding in an HTTP/1.0 request"
                                : "both Content-Length and Transfer-Encoding");
    }
    if (p->has_length && p->left > p->body_max) {
        return refuse(p, 413, "the body is larger than this server accepts");
    }
    p->phase = BT_HTTP_BODY;
    if (p->chunked) {
        p->step = STEP_CHUNK_SIZE;
    } else if (p->left > 0) {
        p->step = STEP_LENGTH_BODY;
        bt_buf_reserve(&p->body, (size_t)BT_MIN(p->left, 64 * 1024));
    } else {
        p->phase = BT_HTTP_DONE;
    }
    return true;
}

/* Handles a line of the head without its CRLF; line[len] is NUL. */
static bool take_line(struct bt_http_parser *p, char *line, size_t len)
{
    if (p->step == STEP_REQUEST_LINE) {
        if (len == 0) { /* RFC 9112, 2.2: one empty line before a request is allowed */
            if (p->blank_seen) {
                return refuse(p, 400, "empty lines instead of a request");
            }
            p->blank_seen = true;
            return true;
        }
        if (!take_request_line(p, line, len)) {
            return false;
        }
        p->step = STEP_FIELD_LINE;
        return true;
    }
    if (len > 0) {
        return take_field(p, line, len);
    }
    if (p->trailer) {
        p->phase = BT_HTTP_DONE;
        return true;
    }
    return end_of_fields(p);
}

/* Parses bytes of the head. Each is checked as it comes, so that a bad request is refused at its
 * first wrong byte. */
static size_t parse_head(struct bt_http_parser *p, const char *data, size_t len)
{
    size_t i = 0;
    bt_buf_reserve(&p->head, BT_MIN(len, BT_HTTP_HEAD_MAX));
    while (i < len) {
        char c = data[i++];
        if (p->head_used == 0 && c == TLS_HANDSHAKE) {
            refuse(p, 400,
                   "this is TLS, but this port serves plain HTTP: use http://, or a proxy that "
                   "ends TLS");
            return i;
        }
        if (p->head_used++ >= BT_HTTP_HEAD_MAX) {
            refuse(p, 431, "the header is larger than 16 KiB");
            return i;
        }
        if (p->last_cr != (c == '\n')) {
            refuse(p, 400, p->last_cr ? "CR without LF" : "LF without CR");
            return i;
        }
        if (c == '\0') {
            refuse(p, 400, "NUL in the header");
            return i;
        }
        p->last_cr = c == '\r';
        p->head.data[p->head.len++] = c;
        if (c != '\n') {
            continue;
        }
        size_t n = p->head.len - p->line - 2;
        char *line = p->head.data + p->line;
        line[n] = '\0';
        p->line = (uint32_t)p->head.len;
        bt_http_phase_t before = p->phase;
        if (!take_line(p, line, n) || p->phase != before) {
            return i;
        }
    }
    return i;
}

/* ---- bodies ---- */

static void start_trailers(struct bt_http_parser *p)
{
    p->trailer = true;
    p->step = STEP_FIELD_LINE;
    p->line = (uint32_t)p->head.len;
}

static bool chunk_line_ended(struct bt_http_parser *p)
{
    if (p->left == 0) {
        start_trailers(p);
        return true;
    }
    if (p->left > p->body_max - p->body.len) {
        return refuse(p, 413, "the body is larger than this server accepts");
    }
    p->step = STEP_CHUNK_DATA;
    return true;
}

/* Parses one byte of a chunk extension: ;name, ;name=token, ;name="quoted" (RFC 9112, 7.1.1),
 * without the optional blanks, which no client sends. Extensions are ignored, but must be parsed
 * strictly: otherwise this server and a proxy could find the end of the line at different
 * places. */
static bool parse_ext_byte(struct bt_http_parser *p, unsigned char c)
{
    static const char bad[] = "malformed chunk extension";
    if (p->ext_used++ >= BT_HTTP_EXT_MAX) {
        return refuse(p, 400, "more than 16 KiB of chunk extensions");
    }
    switch (p->ext) {
    case EXT_QUOTED:
        if ((c < 0x20 && c != '\t') || c == 0x7f) {
            return refuse(p, 400, bad);
        }
        p->ext = c == '"' ? EXT_QUOTE_END : c == '\\' ? EXT_ESCAPE : EXT_QUOTED;
        return true;
    case EXT_ESCAPE:
        p->ext = EXT_QUOTED;
        return (c >= 0x20 || c == '\t') && c != 0x7f ? true : refuse(p, 400, bad);
    default: break;
    }
    if (is_token_char(c) && p->ext != EXT_QUOTE_END) {
        p->ext = p->ext == EXT_START || p->ext == EXT_NAME ? EXT_NAME : EXT_VALUE;
        return true;
    }
    if (c == '"' && p->ext == EXT_VALUE_START) {
        p->ext = EXT_QUOTED;
        return true;
    }
    if (p->ext == EXT_START || p->ext == EXT_VALUE_START) {
        return refuse(p, 400, bad);
    }
    if (c == '=' && p->ext == EXT_NAME) {
        p->ext = EXT_VALUE_START;
    } else if (c == ';') {
        p->ext = EXT_START;
    } else if (c == '\r') {
        p->step = STEP_CHUNK_SIZE_LF;
    } else {
        return refuse(p, 400, bad);
    }
    return true;
}

/* Parses one byte of chunk framing (everything but the data). */
static bool parse_chunk_byte(struct bt_http_parser *p, unsigned char c)
{
    switch (p->step) {
    case STEP_CHUNK_SIZE: {
        int d = hex_digit(c);
        if (d >= 0) {
            if (p->digits++ >= 16 || p->left > (uint64_t)INT64_MAX >> 4) {
                return refuse(p, 400, "a chunk size does not fit in 63 bits");
            }
            p->left = p->left * 16 + (uint64_t)d;
            return true;
        }
        if (p->digits == 0 || (c != ';' && c != '\r')) {
            return refuse(p, 400, "malformed chunk size");
        }
        p->step = c == ';' ? STEP_CHUNK_EXT : STEP_CHUNK_SIZE_LF;
        p->ext = EXT_START;
        return true;
    }
    case STEP_CHUNK_EXT: return parse_ext_byte(p, c);
    case STEP_CHUNK_SIZE_LF:
        return c == '\n' ? chunk_line_ended(p) : refuse(p, 400, "CR without LF in a chunk size");
    case STEP_CHUNK_DATA_CR:
        p->step = STEP_CHUNK_DATA_LF;
        return c == '\r' ? true : refuse(p, 400, "a chunk does not end with CRLF");
    case STEP_CHUNK_DATA_LF:
        p->step = STEP_CHUNK_SIZE;
        p->digits = 0;
        p->left = 0;
        return c == '\n' ? true : refuse(p, 400, "a chunk does not end with CRLF");
    default: BT_ASSERT(false); return false;
    }
}

static size_t take_body(struct bt_http_parser *p, const char *data, size_t len)
{
    size_t n = (size_t)BT_MIN((uint64_t)len, p->left);
    if (!p->skip) {
        bt_buf_append(&p->body, data, n);
    }
    p->left -= n;
    if (p->left == 0) {
        if (p->step == STEP_LENGTH_BODY) {
            p->phase = BT_HTTP_DONE;
        } else {
            p->step = STEP_CHUNK_DATA_CR;
        }
    }
    return n;
}

uint64_t bt_http_parser_announced(const struct bt_http_parser *p)
{
    return p->phase == BT_HTTP_BODY && !p->chunked ? p->left : 0;
}

void bt_http_parser_skip_body(struct bt_http_parser *p)
{
    p->skip = true;
    bt_buf_cleanup(&p->body);
}

bool bt_http_parser_can_skip(const struct bt_http_parser *p, uint64_t max)
{
    return !p->expect_continue && !p->chunked && p->left <= max;
}

static size_t parse(struct bt_http_parser *p, const char *bytes, size_t len, bool head_only)
{
    size_t used = 0;
    while (used < len && (p->phase == BT_HTTP_HEAD || (p->phase == BT_HTTP_BODY && !head_only))) {
        if (p->step <= STEP_FIELD_LINE) {
            used += parse_head(p, bytes + used, len - used);
        } else if (p->step == STEP_LENGTH_BODY || p->step == STEP_CHUNK_DATA) {
            used += take_body(p, bytes + used, len - used);
        } else {
            parse_chunk_byte(p, (unsigned char)bytes[used++]);
        }
    }
    return used;
}

size_t bt_http_parse(struct bt_http_parser *p, const void *data, size_t len)
{
    return parse(p, data, len, false);
}

size_t bt_http_parse_head(struct bt_http_parser *p, const void *data, size_t len)
{
    return parse(p, data, len, true);
}
