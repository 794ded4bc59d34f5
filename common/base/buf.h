/* A growing byte buffer: append at the end, read from `data`. One owner. */
#ifndef BT_BASE_BUF_H
#define BT_BASE_BUF_H

#include <stdarg.h>
#include <stddef.h>

struct bt_buf {
    char *data; /* NUL-terminated after any append; NULL while empty */
    size_t len;
    size_t cap;
};

void bt_buf_init(struct bt_buf *b);
void bt_buf_cleanup(struct bt_buf *b);
void bt_buf_clear(struct bt_buf *b); /* keeps the memory */
void bt_buf_append(struct bt_buf *b, const void *p, size_t n);
void bt_buf_puts(struct bt_buf *b, const char *s);
void bt_buf_printf(struct bt_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Makes room for n more bytes and returns where to write them; the caller adds to len. */
char *bt_buf_reserve(struct bt_buf *b, size_t n);
/* Drops the first n bytes. */
void bt_buf_consume(struct bt_buf *b, size_t n);
/* Takes the memory out of the buffer (caller frees); NULL if nothing was appended. */
char *bt_buf_take(struct bt_buf *b);

#endif
