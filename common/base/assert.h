/* Assertions for bugs. Always on: the supervisor restarts the daemon, and the cluster re-plans. */
#ifndef BT_BASE_ASSERT_H
#define BT_BASE_ASSERT_H

#include <stdbool.h>

__attribute__((noreturn, cold)) void bt_assert_fail(const char *file, int line, const char *func,
                                                    const char *expr);

/* Sets how the process reports why it ends: a failed assertion or a lack of memory. fn may not
 * allocate. Without it a line goes to stderr. */
typedef void (*bt_last_say_fn)(const char *ev, const char *why);
void bt_last_say(bt_last_say_fn fn);
/* Returns whether the reason was reported. Then the process is about to abort. */
bool bt_last_said(void);

#define BT_ASSERT(expr)                                                                            \
    do {                                                                                           \
        if (__builtin_expect(!(expr), 0)) {                                                        \
            bt_assert_fail(__FILE__, __LINE__, __func__, #expr);                                   \
        }                                                                                          \
    } while (0)

#endif
