/* Small things used everywhere: status, assertions, sizes, memory. No clock and no I/O. */
#ifndef BT_BASE_BASE_H
#define BT_BASE_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common/base/assert.h"
#include "common/base/status.h"

#define BT_ARRAY_LEN(a)                    (sizeof(a) / sizeof((a)[0]))
#define BT_ALIGN_UP(x, a)                  (((x) + ((a)-1)) & ~((__typeof__(x))(a)-1)) /* a: power of two */
#define BT_DIV_UP(x, d)                    (((x) + (d)-1) / (d))
#define BT_MIN(a, b)                       ((a) < (b) ? (a) : (b))
#define BT_MAX(a, b)                       ((a) > (b) ? (a) : (b))
#define BT_CONTAINER_OF(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))

/* malloc family for control work: these never return NULL (the process ends with a message). */
void *bt_malloc(size_t size);
void *bt_calloc(size_t n, size_t size);
void *bt_realloc(void *ptr, size_t size);
/* memcpy, and memcmp (0: equal), of n bytes. n may be 0, and then the addresses may be NULL. */
static inline void bt_copy(void *to, const void *from, size_t n)
{
    if (n > 0) {
        memcpy(to, from, n);
    }
}
static inline int bt_compare(const void *a, const void *b, size_t n)
{
    return n > 0 ? memcmp(a, b, n) : 0;
}
/* The release (deploy/VERSION): "0.1.0"; static. */
const char *bt_release(void);
/* The release and the commit that was built: "0.1.0 (230fe750)"; static. */
const char *bt_version(void);

char *bt_strdup(const char *s);
char *bt_sprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2))); /* caller frees */

/* For the end of a program whose result is printed: returns its exit status. That is rc, or 1
 * instead of 0 if standard output could not be written completely (a full disk), which is then
 * reported. */
int bt_end_of_output(const char *program, int rc);

/* Fills buf with random bytes from the kernel. */
void bt_random(void *buf, size_t len);

#endif
