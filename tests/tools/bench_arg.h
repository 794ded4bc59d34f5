/* What the tools that measure have in common. */
#ifndef BT_TESTS_BENCH_ARG_H
#define BT_TESTS_BENCH_ARG_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

/* CPU seconds of this process so far, of all threads. */
static inline double cpu_s(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* The value of KEY=NUMBER among the arguments behind the first, or `def`. */
static inline uint64_t opt(int argc, char **argv, const char *key, uint64_t def)
{
    size_t n = strlen(key);
    for (int i = 2; i < argc; i++) {
        if (strncmp(argv[i], key, n) == 0 && argv[i][n] == '=') {
            return strtoull(argv[i] + n + 1, NULL, 10);
        }
    }
    return def;
}

#endif
