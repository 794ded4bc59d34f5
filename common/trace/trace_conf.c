/* OpenTelemetry's environment variables, as its specification defines them: the endpoint, headers,
 * the sampler. What Baton does not support is refused by name, so that nobody waits for spans that
 * will never come. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/conf/conf.h"
#include "common/trace/trace_priv.h"

#define DELAY_MS    5000
#define TIMEOUT_MS  10000
#define MS_MAX      600000
#define VALUE_MAX   4096
#define HEADERS_MAX 32

struct reader {
    char *err;
    size_t cap;
    bool failed;
};

/* An empty variable counts as one that is not set. */
static const char *env(const char *name)
{
    const char *v = bt_conf_env(name);
    return v != NULL && v[0] != '\0' ? v : NULL;
}

static const char *either(const char *first, const char *second)
{
    const char *v = env(first);
    return v != NULL ? v : env(second);
}

static void wrong(struct reader *r, const char *name, const char *value, const char *remedy)
{
    if (!r->failed) {
        snprintf(r->err, r->cap, "environment variable %s is '%.80s': %s", name, value, remedy);
        r->failed = true;
    }
}

static uint64_t milliseconds(struct reader *r, const char *name, uint64_t fallback)
{
    const char *v = env(name);
    char *end;
    unsigned long n = v != NULL ? strtoul(v, &end, 10) : fallback;
    if (v != NULL &&
        (strspn(v, "0123456789") != strlen(v) || strlen(v) > 9 || n == 0 || n > MS_MAX)) {
        wrong(r, name, v, "give milliseconds, 1 to 600000");
    }
    return n;
}

static void read_url(struct reader *r, struct bt_trace_conf *c)
{
    const char *name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", *v = env(name);
    bool base = v == NULL;
    if (base) {
        v = env(name = "OTEL_EXPORTER_OTLP_ENDPOINT");
    }
    if (v == NULL) {
        return;
    }
    if (strchr(v, '@') != NULL) { /* the log names the address */
        wrong(r, name, "...",
              "put credentials into OTEL_EXPORTER_OTLP_HEADERS, not into the address");
        return;
    }
    size_t len = strlen(v);
    if ((strncasecmp(v, "http://", 7) != 0 && strncasecmp(v, "https://", 8) != 0) ||
        len > VALUE_MAX || strpbrk(v, " \t\r\n") != NULL) {
        wrong(r, name, strchr(v, '?') == NULL ? v : "...",
              "give an address that begins with http:// or https://");
        return;
    }
    c->url = base ? bt_sprintf("%s%sv1/traces", v, v[len - 1] == '/' ? "" : "/") : bt_strdup(v);
    c->shown =
        bt_sprintf("%.*s", (int)strcspn(c->url, "?#"), c->url); /* a token may be behind it */
}

static int hex(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* NAME=VALUE with percent-encoded bytes in VALUE, as "NAME: VALUE". NULL: it is none. */
static char *header_of(const char *at, size_t len)
{
    const char *eq = memchr(at, '=', len);
    if (eq == NULL || eq == at) {
        return NULL;
    }
    char *out = bt_malloc(len + 3);
    size_t n = 0;
    for (const char *p = at; p < eq; p++) {
        if (strchr("!#$%&'*+-.^_`|~0123456789", *p) == NULL &&
            !((*p | 32) >= 'a' && (*p | 32) <= 'z')) {
            free(out);
            return NULL;
        }
        out[n++] = *p;
    }
    out[n++] = ':';
    out[n++] = ' ';
    for (const char *p = eq + 1; p < at + len; p++) {
        int high = *p == '%' && p + 2 < at + len ? hex(p[1]) : -1, low = high >= 0 ? hex(p[2]) : -1;
        char c = low >= 0 ? (char)(high << 4 | low) : *p;
        p += low >= 0 ? 2 : 0;
        if ((unsigned char)c < ' ' || c == 127) { /* a line of its own would be another header */
            free(out);
            return NULL;
        }
        out[n++] = c;
    }
    out[n] = '\0';
    return out;
}

/* The values are secrets: an error does not repeat them. */
static void read_headers(struct reader *r, struct bt_trace_conf *c)
{
    const char *name = "OTEL_EXPORTER_OTLP_TRACES_HEADERS", *v = env(name);
    if (v == NULL) {
        v = env(name = "OTEL_EXPORTER_OTLP_HEADERS");
    }
    c->headers = bt_calloc(HEADERS_MAX + 1, sizeof(*c->headers));
    for (uint32_t n = 0; v != NULL && !r->failed;) {
        v += strspn(v, " \t");
        size_t len = strcspn(v, ","), used = len;
        while (used > 0 && strchr(" \t", v[used - 1]) != NULL) {
            used--;
        }
        if (used > 0 && (n == HEADERS_MAX || (c->headers[n++] = header_of(v, used)) == NULL)) {
            wrong(r, name, "...",
                  "give at most 32 headers: name=value,name=value, with "
                  "percent-encoded values");
        }
        v = v[len] == ',' ? v + len + 1 : NULL;
    }
}

static void read_sampler(struct reader *r, struct bt_trace_conf *c)
{
    static const struct {
        const char *name;
        bt_sample_t sample;
        bool parent_based;
    } known[] = {{"parentbased_always_on", BT_SAMPLE_ON, true},
                 {"parentbased_always_off", BT_SAMPLE_OFF, true},
                 {"parentbased_traceidratio", BT_SAMPLE_RATIO, true},
                 {"always_on", BT_SAMPLE_ON, false},
                 {"always_off", BT_SAMPLE_OFF, false},
                 {"traceidratio", BT_SAMPLE_RATIO, false}};
    const char *name = "OTEL_TRACES_SAMPLER", *v = env(name);
    v = v != NULL ? v : known[0].name;
    size_t i = 0;
    while (i < BT_ARRAY_LEN(known) && strcmp(v, known[i].name) != 0) {
        i++;
    }
    if (i == BT_ARRAY_LEN(known)) {
        wrong(r, name, v,
              "use always_on, always_off, traceidratio, or one of these after parentbased_");
        return;
    }
    c->sample = known[i].sample;
    c->parent_based = known[i].parent_based;
    c->ratio = 1;
    v = env(name = "OTEL_TRACES_SAMPLER_ARG");
    if (c->sample == BT_SAMPLE_RATIO && v != NULL) {
        char *end;
        c->ratio = strtod(v, &end);
        if (strspn(v, "0123456789.") != strlen(v) || *end != '\0' ||
            !(c->ratio >= 0 && c->ratio <= 1)) {
            wrong(r, name, v, "give a share of traces, 0 to 1");
        }
    }
}

/* Returns whether tracing is switched off. Reports variables that ask for an exporter or a protocol
 * that Baton does not have. */
static bool is_off(struct reader *r)
{
    const char *v = env("OTEL_SDK_DISABLED");
    if (v != NULL && strcasecmp(v, "true") == 0) {
        return true;
    }
    v = env("OTEL_TRACES_EXPORTER");
    if (v != NULL && strcmp(v, "otlp") != 0 && strcmp(v, "none") != 0) {
        wrong(r, "OTEL_TRACES_EXPORTER", v, "use otlp or none");
    }
    if (v != NULL && strcmp(v, "none") == 0) {
        return true;
    }
    v = either("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL");
    if (v != NULL && strcmp(v, "http/protobuf") != 0) {
        wrong(r, "OTEL_EXPORTER_OTLP_PROTOCOL", v,
              "use http/protobuf, and the collector's port for it (usually 4318)");
    }
    return false;
}

bt_status_t bt_trace_conf_read(struct bt_trace_conf *c, char *err, size_t err_cap)
{
    struct reader r = {.err = err, .cap = err_cap};
    *c = (struct bt_trace_conf){0};
    if (either("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT") == NULL ||
        is_off(&r)) {
        return BT_OK;
    }
    read_url(&r, c);
    read_headers(&r, c);
    read_sampler(&r, c);
    const char *service = env("OTEL_SERVICE_NAME");
    c->service = bt_strdup(service != NULL ? service : "baton-conductor");
    c->delay_ms = milliseconds(&r, "OTEL_BSP_SCHEDULE_DELAY", DELAY_MS);
    c->timeout_ms = milliseconds(&r, "OTEL_EXPORTER_OTLP_TIMEOUT", TIMEOUT_MS);
    if (r.failed) {
        bt_trace_conf_cleanup(c);
        return BT_ERR_CONFIG;
    }
    return BT_OK;
}

bt_status_t bt_trace_check(char *err, size_t err_cap)
{
    struct bt_trace_conf c;
    bt_status_t st = bt_trace_conf_read(&c, err, err_cap);
    bt_trace_conf_cleanup(&c);
    return st;
}

void bt_trace_conf_cleanup(struct bt_trace_conf *c)
{
    for (uint32_t i = 0; c->headers != NULL && c->headers[i] != NULL; i++) {
        free(c->headers[i]);
    }
    free(c->headers);
    free(c->url);
    free(c->shown);
    free(c->service);
    *c = (struct bt_trace_conf){0};
}
