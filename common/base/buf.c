/* Growing byte buffer. One owner at a time. */
#include "common/base/buf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"

void bt_buf_init(struct bt_buf *b)
{
    *b = (struct bt_buf){0};
}

void bt_buf_cleanup(struct bt_buf *b)
{
    free(b->data);
    bt_buf_init(b);
}

void bt_buf_clear(struct bt_buf *b)
{
    b->len = 0;
    if (b->data != NULL) {
        b->data[0] = '\0';
    }
}

char *bt_buf_reserve(struct bt_buf *b, size_t n)
{
    size_t need = b->len + n + 1;
    BT_ASSERT(need > n);
    if (need > b->cap) {
        size_t cap = b->cap == 0 ? 64 : b->cap;
        while (cap < need) {
            BT_ASSERT(cap <= SIZE_MAX / 2);
            cap *= 2;
        }
        b->data = bt_realloc(b->data, cap);
        b->cap = cap;
    }
    return b->data + b->len;
}

void bt_buf_append(struct bt_buf *b, const void *p, size_t n)
{
    char *to = bt_buf_reserve(b, n);
    if (n > 0) {
        memcpy(to, p, n);
    }
    b->len += n;
    b->data[b->len] = '\0';
}

void bt_buf_puts(struct bt_buf *b, const char *s)
{
    bt_buf_append(b, s, strlen(s));
}

void bt_buf_printf(struct bt_buf *b, const char *fmt, ...)
{
    va_list ap;
    size_t room = 128;
    for (;;) {
        char *to = bt_buf_reserve(b, room);
        va_start(ap, fmt);
        int n = vsnprintf(to, room + 1, fmt, ap);
        va_end(ap);
        BT_ASSERT(n >= 0);
        if ((size_t)n <= room) {
            b->len += (size_t)n;
            return;
        }
        room = (size_t)n;
    }
}

void bt_buf_consume(struct bt_buf *b, size_t n)
{
    BT_ASSERT(n <= b->len);
    if (n == 0) {
        return;
    }
    memmove(b->data, b->data + n, b->len - n);
    b->len -= n;
    b->data[b->len] = '\0';
}

char *bt_buf_take(struct bt_buf *b)
{
    char *p = b->data;
    bt_buf_init(b);
    return p;
}
