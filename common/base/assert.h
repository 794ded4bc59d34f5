/* Assertions for bugs. Always on: the supervisor restarts the daemon, and the cluster re-plans. */
#ifndef BT_BASE_ASSERT_H
#define BT_BASE_ASSERT_H

__attribute__((noreturn, cold)) void bt_assert_fail(const char *file, int line, const char *func,
                                                    const char *expr);

#define BT_ASSERT(expr)                                                                            \
    do {                                                                                           \
        if (__builtin_expect(!(expr), 0)) {                                                        \
            bt_assert_fail(__FILE__, __LINE__, __func__, #expr);                                   \
        }                                                                                          \
    } while (0)

#endif
