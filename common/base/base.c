/* Memory that cannot fail, assertions, kernel randomness, the end of a program's output. Any
 * thread.
 */
#include "common/base/base.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

void bt_assert_fail(const char *file, int line, const char *func, const char *expr)
{
    fprintf(stderr, "<2>ev=assert_failed file=%s line=%d func=%s expr=\"%s\"\n", file, line, func,
            expr);
    abort();
}

static void *checked(void *p, size_t size)
{
    if (p == NULL && size != 0) {
        fprintf(stderr, "<2>ev=out_of_memory bytes=%zu\n", size);
        abort();
    }
    return p;
}

void *bt_malloc(size_t size)
{
    return checked(malloc(size), size);
}

void *bt_calloc(size_t n, size_t size)
{
    return checked(calloc(n, size), n == 0 ? 0 : size);
}

void *bt_realloc(void *ptr, size_t size)
{
    return checked(realloc(ptr, size), size);
}

char *bt_strdup(const char *s)
{
    return checked(strdup(s), 1);
}

char *bt_sprintf(const char *fmt, ...)
{
    va_list ap;
    char *s = NULL;
    va_start(ap, fmt);
    int n = vasprintf(&s, fmt, ap);
    va_end(ap);
    return checked(n < 0 ? NULL : s, 1);
}

void bt_random(void *buf, size_t len)
{
    char *p = buf;
    while (len > 0) {
        ssize_t n = getrandom(p, len, 0);
        if (n < 0) {
            BT_ASSERT(errno == EINTR);
            continue;
        }
        p += n;
        len -= (size_t)n;
    }
}

int bt_end_of_output(const char *program, int rc)
{
    errno = EIO; /* where an earlier write has failed and this one has nothing to do */
    if (fflush(stdout) == 0 && !ferror(stdout)) {
        return rc;
    }
    fprintf(stderr, "%s: standard output: %s\n", program, strerror(errno));
    return rc != 0 ? rc : 1;
}
