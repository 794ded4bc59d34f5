/* Structured log lines (logfmt, or JSON by configuration) on stderr. Every line has a level, ev=
 * (what happened, snake_case), the node, and fields. Any thread. The log escapes every value itself
 * (fields.h), so a caller passes names and texts from outside as they are. A line waits at most
 * 10 ms for the reader of stderr; lines that the reader does not take, or for which a file's disk
 * has no room, are lost and counted in ev=log_lost later.
 * Secrets, prompts and generated text are never logged. */
#ifndef BT_LOG_LOG_H
#define BT_LOG_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    BT_LOG_ERROR = 3,
    BT_LOG_WARN = 4,
    BT_LOG_INFO = 6,
    BT_LOG_DEBUG = 7
} bt_log_level_t;

/* Call once at start; daemon and node are copied. Before it, lines go out at INFO. */
void bt_log_init(const char *daemon, const char *node, bt_log_level_t level, bool json);
bool bt_log_enabled(bt_log_level_t level);

/* Under journald, stderr is the stream that JOURNAL_STREAM names as device:inode. Only then do
 * lines begin with the priority as <N>. Takes the value of that variable (NULL: not set); returns
 * whether lines have the prefix. */
bool bt_log_set_journal(const char *journal_stream);

/* How this process logs, for a process of its own program that is to log in the same way. */
struct bt_log_settings {
    char daemon[64], node[300]; /* as they stand in lines */
    bt_log_level_t level;
    bool json, prefix;
};
void bt_log_settings_get(struct bt_log_settings *s_p);
void bt_log_settings_set(const struct bt_log_settings *s);

/* BT_INFO("peer_up", "peer=%s incarnation=%llu", name, inc): fmt is key=value pairs separated by
 * spaces, each with a literal key. A value ends at the next space of fmt, whatever its arguments
 * contain. NULL for %s is written as "-". */
void bt_log(bt_log_level_t level, const char *ev, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* For an event that may come thousands of times a second: a line from time to time, which says how
 * often it came. All zero at the start; its user guards it. */
struct bt_log_pace {
    uint64_t said_ns;
    uint32_t unsaid;
};
/* Counts the event. Returns how often it came since the last line, itself included, if the next
 * line is due: the first one at once, the others at least every_ns apart. Otherwise 0. */
uint32_t bt_log_due(struct bt_log_pace *p, uint64_t now_ns, uint64_t every_ns);

/* A line made in advance: what composes lines may not be called in a signal handler. */
struct bt_log_line {
    size_t len, stamp_at; /* bytes; where in text the time stands */
    char text[4096];
};
/* Composes a line for later, after bt_log_init. */
void bt_log_line_prepare(struct bt_log_line *l, bt_log_level_t level, const char *ev,
                         const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* Writes it with the present time. Async-signal-safe; takes no lock, so a reader of stderr that
 * hangs costs at most 10 ms and the line. */
void bt_log_line_write(struct bt_log_line *l);

#define BT_ERROR(ev, ...) bt_log(BT_LOG_ERROR, ev, __VA_ARGS__)
#define BT_WARN(ev, ...)  bt_log(BT_LOG_WARN, ev, __VA_ARGS__)
#define BT_INFO(ev, ...)  bt_log(BT_LOG_INFO, ev, __VA_ARGS__)
#define BT_DEBUG(ev, ...)                                                                          \
    do {                                                                                           \
        if (bt_log_enabled(BT_LOG_DEBUG)) {                                                        \
            bt_log(BT_LOG_DEBUG, ev, __VA_ARGS__);                                                 \
        }                                                                                          \
    } while (0)

#endif
