/* Log lines on stderr: one write per line, so that the lines of several threads do not mix. Any
 * thread. */
#include "common/log/log.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/base/assert.h"
#include "common/log/fields.h"

#define READER_WAIT_MS 10 /* for a slow reader of stderr */
/* For this long after a failed wait there is no new wait. Otherwise a reader that rarely takes a
 * line would make most lines wait. */
#define WAIT_AGAIN_NS 1000000000ull

static char log_daemon[64] = "baton", log_node[300] = "-"; /* as values, quoted where needed */
static bt_log_level_t log_level = BT_LOG_INFO;
static bool log_json, log_prefix;
static pthread_mutex_t out_lock = PTHREAD_MUTEX_INITIALIZER; /* for stderr and out_lost */
static unsigned long out_lost;                               /* lines lost since the last write */
static int out_why;            /* errno of the last failed write; 0: the reader had no room */
static bool out_torn;          /* the last write took a part of its line */
static uint64_t out_waited_ns; /* end of the last failed wait; 0: none */

static void say_last(const char *ev, const char *why)
{
    BT_ERROR(ev, "why=%s", why);
}

void bt_log_init(const char *daemon, const char *node, bt_log_level_t level, bool json)
{
    bt_log_value(log_daemon, sizeof(log_daemon), json, daemon);
    bt_log_value(log_node, sizeof(log_node), json, node);
    log_level = level;
    log_json = json;
    bt_last_say(say_last);
}

void bt_log_settings_get(struct bt_log_settings *s_p)
{
    _Static_assert(sizeof(s_p->daemon) == sizeof(log_daemon) &&
                       sizeof(s_p->node) == sizeof(log_node),
                   "names fit");
    memset(s_p, 0, sizeof(*s_p)); /* all bytes are sent to another process, also padding */
    memcpy(s_p->daemon, log_daemon, sizeof(log_daemon));
    memcpy(s_p->node, log_node, sizeof(log_node));
    s_p->level = log_level;
    s_p->json = log_json;
    s_p->prefix = log_prefix;
}

void bt_log_settings_set(const struct bt_log_settings *s)
{
    memcpy(log_daemon, s->daemon, sizeof(log_daemon));
    memcpy(log_node, s->node, sizeof(log_node));
    log_level = s->level;
    log_json = s->json;
    log_prefix = s->prefix;
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

bool bt_log_set_journal(const char *journal_stream)
{
    struct stat st;
    char mine[64];
    log_prefix = false;
    if (journal_stream != NULL && fstat(STDERR_FILENO, &st) == 0) {
        snprintf(mine, sizeof(mine), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
        log_prefix = strcmp(mine, journal_stream) == 0;
    }
    return log_prefix;
}

/* Writes a line of at most PIPE_BUF bytes, which a pipe takes as a whole; returns its length. */
static size_t compose(char *line, bt_log_level_t level, const char *ev, const char *fmt, va_list ap)
{
    char stamp[40];
    struct timespec ts;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &ts);
    gmtime_r(&ts.tv_sec, &tm);
    size_t t = strftime(stamp, sizeof(stamp), "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(stamp + t, sizeof(stamp) - t, ".%06ldZ", ts.tv_nsec / 1000);

    size_t n = 0;
    if (log_prefix) {
        n += (size_t)snprintf(line, PIPE_BUF, "<%d>", level);
    }
    n += (size_t)snprintf(line + n, PIPE_BUF - n,
                          log_json ? "{\"ts\":\"%s\",\"level\":\"%s\",\"daemon\":%s,"
                                     "\"node\":%s,\"ev\":\"%s\""
                                   : "ts=%s level=%s daemon=%s node=%s ev=%s",
                          stamp, level_name(level), log_daemon, log_node, ev);
    const char *end = log_json ? "}\n" : "\n";
    n += bt_log_fields(line + n, PIPE_BUF - n - strlen(end), log_json, fmt, ap);
    memcpy(line + n, end, strlen(end));
    return n + strlen(end);
}

static size_t compose_of(char *line, bt_log_level_t level, const char *ev, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    size_t n = compose(line, level, ev, fmt, ap);
    va_end(ap);
    return n;
}

/* For a pipe or socket: returns whether it can take PIPE_BUF bytes at once. */
static bool has_room(int wait_ms)
{
    struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
    return poll(&p, 1, wait_ms) > 0 && (p.revents & POLLOUT) != 0;
}

static uint64_t mono_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

/* Writes a line as a whole. False: it is lost, for the reason in out_why. A full disk may take the
 * beginning of a line; then the next line begins on a line of its own. */
static bool write_line(const char *line, size_t n)
{
    if (out_torn && write(STDERR_FILENO, "\n", 1) != 1) {
        return false;
    }
    out_torn = false;
    for (size_t at = 0; at < n;) {
        ssize_t got = write(STDERR_FILENO, line + at, n - at);
        if (got > 0) {
            at += (size_t)got;
        } else if (got == 0 || errno != EINTR) {
            out_torn = at > 0;
            out_why = got == 0 ? EIO : errno;
            return false;
        }
    }
    return true;
}

static bool say_lost(void)
{
    char line[PIPE_BUF], why[160];
    if (out_why == 0) {
        snprintf(why, sizeof(why), "the reader of stderr did not take them");
    } else {
        snprintf(why, sizeof(why), "stderr could not be written: %s%s", strerror(out_why),
                 out_why == ENOSPC || out_why == EDQUOT ? "; free space on the log's disk" : "");
    }
    size_t n = compose_of(line, BT_LOG_WARN, "log_lost", "lines=%lu why=%s", out_lost, why);
    return write_line(line, n);
}

/* A log that cannot be written (a full disk, a reader that is gone or hangs) must not stop the
 * daemon. Lines without room are lost and counted; the count is the first line that is written
 * later. */
static void put(const char *line, size_t n)
{
    pthread_mutex_lock(&out_lock);
    bool room = has_room(0);
    if (!room && out_lost == 0 &&
        (out_waited_ns == 0 || mono_ns() - out_waited_ns >= WAIT_AGAIN_NS)) {
        room = has_room(READER_WAIT_MS);
        out_waited_ns = room ? out_waited_ns : mono_ns();
    }
    if (!room) {
        out_why = 0;
    } else if (out_lost > 0) {
        bool said = say_lost();
        out_lost = said ? 0 : out_lost;
        room = said && has_room(0);
    }
    if (!room || !write_line(line, n)) {
        out_lost++;
    }
    pthread_mutex_unlock(&out_lock);
}

void bt_log(bt_log_level_t level, const char *ev, const char *fmt, ...)
{
    if (!bt_log_enabled(level)) {
        return;
    }
    char line[PIPE_BUF];
    va_list ap;
    va_start(ap, fmt);
    size_t n = compose(line, level, ev, fmt, ap);
    va_end(ap);
    put(line, n);
}

/* ---- for signal handlers ---- */

_Static_assert(sizeof(((struct bt_log_line *)0)->text) >= PIPE_BUF, "a line fits");

void bt_log_line_prepare(struct bt_log_line *l, bt_log_level_t level, const char *ev,
                         const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    l->len = compose(l->text, level, ev, fmt, ap);
    va_end(ap);
    l->stamp_at = log_prefix ? strlen("<3>") : 0;
    l->stamp_at += strcspn(l->text + l->stamp_at, "0123456789");
}

static char *digits(char *at, unsigned long value, unsigned n)
{
    for (unsigned i = n; i-- > 0; value /= 10) {
        at[i] = (char)('0' + value % 10);
    }
    return at + n + 1; /* behind the separator, which is there already */
}

static unsigned days_of_month(unsigned year, unsigned month)
{
    static const unsigned char days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    bool leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    return days[month - 1] + (month == 2 && leap);
}

/* Writes the current time over an older one of the same format: gmtime_r and strftime may take
 * locks. */
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

uint32_t bt_log_due(struct bt_log_pace *p, uint64_t now_ns, uint64_t every_ns)
{
    uint32_t times = ++p->unsaid;
    if (p->said_ns != 0 && now_ns - p->said_ns < every_ns) {
        return 0;
    }
    p->said_ns = now_ns;
    p->unsaid = 0;
    return times;
}
