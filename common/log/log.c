/* Log lines on stderr: one write per line, so that lines of threads do not mix. Any thread. */
#include "common/log/log.h"

#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/base/buf.h"

#define LINE_MAX_BYTES 4096
#define QUOTE_SLOTS    8
#define QUOTE_BYTES    600
#define READER_WAIT_MS 10 /* for a reader of stderr that is slow; one that hangs costs it once */

static char log_daemon[32] = "baton", log_node[64] = "-";
static bt_log_level_t log_level = BT_LOG_INFO;
static bool log_json;
static pthread_mutex_t out_lock = PTHREAD_MUTEX_INITIALIZER; /* of stderr and out_lost */
static unsigned long out_lost;                               /* lines, since stderr last took one */

void bt_log_init(const char *daemon, const char *node, bt_log_level_t level, bool json)
{
    snprintf(log_daemon, sizeof(log_daemon), "%s", daemon);
    snprintf(log_node, sizeof(log_node), "%s", node);
    log_level = level;
    log_json = json;
}

bool bt_log_enabled(bt_log_level_t level)
{
    return level <= log_level;
}

static const char *level_name(bt_log_level_t level)
{
    switch (level) {
    case BT_LOG_ERROR: return "error";
    case BT_LOG_WARN: return "warn";
    case BT_LOG_INFO: return "info";
    case BT_LOG_DEBUG: return "debug";
    }
    return "?";
}

/* Escapes for a quoted value: valid in logfmt and in JSON. */
static size_t escape(char *out, size_t cap, const char *s)
{
    size_t n = 0;
    for (; *s != '\0' && n + 7 < cap; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\') {
            out[n++] = '\\';
            out[n++] = (char)c;
        } else if (c < 0x20 || c == 0x7f) {
            n += (size_t)snprintf(out + n, cap - n, "\\u%04x", c);
        } else {
            out[n++] = (char)c;
        }
    }
    out[n] = '\0';
    return n;
}

const char *bt_log_q(const char *s)
{
    static __thread char slots[QUOTE_SLOTS][QUOTE_BYTES];
    static __thread unsigned next;
    char *q = slots[next++ % QUOTE_SLOTS];
    q[0] = '"';
    size_t n = escape(q + 1, QUOTE_BYTES - 2, s == NULL ? "" : s);
    q[n + 1] = '"';
    q[n + 2] = '\0';
    return q;
}

/* Turns `k=v k2="v 2"` into `,"k":"v","k2":"v 2"`. Values were escaped by bt_log_q already. */
static void fields_to_json(char *out, size_t cap, const char *f)
{
    size_t n = 0;
    while (*f != '\0' && n + 8 < cap) {
        while (*f == ' ') {
            f++;
        }
        size_t k = strcspn(f, "= ");
        if (k == 0) {
            break;
        }
        n += (size_t)snprintf(out + n, cap - n, ",\"%.*s\":", (int)k, f);
        f += k;
        if (*f == '=') {
            f++;
        }
        bool quoted = *f == '"';
        size_t v = 0;
        if (quoted) {
            f++;
            while (f[v] != '\0' && f[v] != '"') {
                v += f[v] == '\\' && f[v + 1] != '\0' ? 2 : 1;
            }
        } else {
            v = strcspn(f, " ");
        }
        if (n < cap) {
            n += (size_t)snprintf(out + n, cap - n, "\"%.*s\"", (int)v, f);
        }
        f += v;
        if (quoted && *f == '"') {
            f++;
        }
    }
    out[n < cap ? n : cap - 1] = '\0';
}

/* Writes a line of at most PIPE_BUF bytes into line; returns its length. */
static size_t compose(char *line, bt_log_level_t level, const char *ev, const char *fields)
{
    char stamp[40];
    struct timespec ts;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &ts);
    gmtime_r(&ts.tv_sec, &tm);
    size_t t = strftime(stamp, sizeof(stamp), "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(stamp + t, sizeof(stamp) - t, ".%06ldZ", ts.tv_nsec / 1000);

    int n;
    if (log_json) {
        char json[LINE_MAX_BYTES];
        fields_to_json(json, sizeof(json), fields);
        n = snprintf(line, PIPE_BUF,
                     "<%d>{\"ts\":\"%s\",\"level\":\"%s\",\"daemon\":\"%s\",\"node\":\"%s\","
                     "\"ev\":\"%s\"%s}\n",
                     level, stamp, level_name(level), log_daemon, log_node, ev, json);
    } else {
        n = snprintf(line, PIPE_BUF, "<%d>ts=%s level=%s daemon=%s node=%s ev=%s %s\n", level,
                     stamp, level_name(level), log_daemon, log_node, ev, fields);
    }
    if (n >= PIPE_BUF) {
        n = PIPE_BUF - 1;
        line[n - 1] = '\n';
    }
    return (size_t)n;
}

/* Of a pipe or socket: that it takes PIPE_BUF bytes at once. */
static bool has_room(int wait_ms)
{
    struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
    return poll(&p, 1, wait_ms) > 0 && (p.revents & POLLOUT) != 0;
}

/* A log that cannot be written (a full disk, a reader that is gone or hangs) must not stop serving.
 * Lines that find no room are lost and counted; the count is the first line that gets through. */
static void put(const char *line, size_t n)
{
    pthread_mutex_lock(&out_lock);
    bool room = has_room(out_lost == 0 ? READER_WAIT_MS : 0);
    if (room && out_lost > 0) {
        char told[PIPE_BUF], fields[64];
        snprintf(fields, sizeof(fields), "lines=%lu why=\"nobody read them\"", out_lost);
        ssize_t ignored =
            write(STDERR_FILENO, told, compose(told, BT_LOG_WARN, "log_lost", fields));
        (void)ignored;
        out_lost = 0;
        room = has_room(0);
    }
    if (room) {
        ssize_t ignored = write(STDERR_FILENO, line, n);
        (void)ignored;
    } else {
        out_lost++;
    }
    pthread_mutex_unlock(&out_lock);
}

void bt_log(bt_log_level_t level, const char *ev, const char *fmt, ...)
{
    if (!bt_log_enabled(level)) {
        return;
    }
    char fields[LINE_MAX_BYTES - 512], line[PIPE_BUF];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(fields, sizeof(fields), fmt, ap);
    va_end(ap);
    put(line, compose(line, level, ev, fields));
}

/* ---- for signal handlers ---- */

_Static_assert(sizeof(((struct bt_log_line *)0)->text) >= PIPE_BUF, "a line fits");

void bt_log_line_prepare(struct bt_log_line *l, bt_log_level_t level, const char *ev,
                         const char *fmt, ...)
{
    char fields[LINE_MAX_BYTES - 512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(fields, sizeof(fields), fmt, ap);
    va_end(ap);
    l->len = compose(l->text, level, ev, fields);
    l->stamp_at = strcspn(l->text, ">");
    l->stamp_at += strcspn(l->text + l->stamp_at, "0123456789");
}

static char *digits(char *at, unsigned long value, unsigned n)
{
    for (unsigned i = n; i-- > 0; value /= 10) {
        at[i] = (char)('0' + value % 10);
    }
    return at + n + 1; /* behind the separator, which stands there */
}

static unsigned days_of_month(unsigned year, unsigned month)
{
    static const unsigned char days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    bool leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    return days[month - 1] + (month == 2 && leap);
}

/* The time over an older one of the same form: gmtime_r and strftime may take locks. */
static void stamp_now(char *at)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    unsigned long days = (unsigned long)ts.tv_sec / 86400, s = (unsigned long)ts.tv_sec % 86400;
    unsigned year = 1970, month = 1;
    while (days >= days_of_month(year, month)) {
        days -= days_of_month(year, month);
        year += month == 12;
        month = month % 12 + 1;
    }
    at = digits(at, year, 4);
    at = digits(at, month, 2);
    at = digits(at, days + 1, 2);
    at = digits(at, s / 3600, 2);
    at = digits(at, s / 60 % 60, 2);
    at = digits(at, s % 60, 2);
    digits(at, (unsigned long)ts.tv_nsec / 1000, 6);
}

void bt_log_line_write(struct bt_log_line *l)
{
    stamp_now(l->text + l->stamp_at);
    if (has_room(READER_WAIT_MS)) {
        ssize_t ignored = write(STDERR_FILENO, l->text, l->len);
        (void)ignored;
    }
}
