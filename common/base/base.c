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

static void say_plainly(const char *ev, const char *why)
{
    fprintf(stderr, "ev=%s why=\"%s\"\n", ev, why);
}

static bt_last_say_fn say = say_plainly;
static _Atomic bool said;

bool bt_last_said(void)
{
    return said;
}

void bt_last_say(bt_last_say_fn fn)
{
    say = fn;
}

/* Logs the reason and ends the process; common/log/last_words.h then logs nothing more. */
static void __attribute__((noreturn)) end(const char *ev, const char *fmt, ...)
{
    char why[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof(why), fmt, ap);
    va_end(ap);
    said = true;
    say(ev, why);
    abort();
}

void bt_assert_fail(const char *file, int line, const char *func, const char *expr)
{
    /* A library's failed allocation is not a bug of the code that asserts its success. */
    end(errno == ENOMEM ? "out_of_memory" : "assert_failed", "%s:%d %s: %s", file, line, func,
        expr);
}

static void *checked(void *p, size_t size)
{
    if (p == NULL && size != 0) {
        end("out_of_memory", "no memory for %zu bytes", size);
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
    errno = 0; /* it stays 0 where an earlier write failed and this one has nothing to do */
    if (fflush(stdout) == 0 && !ferror(stdout)) {
        return rc;
    }
    fprintf(stderr, "%s: standard output: %s\n", program,
            errno != 0 ? strerror(errno) : "not all of it could be written; is the disk full?");
    return rc != 0 ? rc : 1;
}
