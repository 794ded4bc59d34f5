/* See lines.h. */
#include "conductor/sim/lines.h"

#include <errno.h>
#include <string.h>

#define LINE_MAX_BYTES (16u << 20)

bool bt_sim_next_line(FILE *f, struct bt_buf *line, const char **wrong_p)
{
    int c = 0;
    *wrong_p = NULL;
    bt_buf_clear(line);
    errno = 0;
    while (c != '\n' && (c = getc_unlocked(f)) != EOF) {
        if (line->len == LINE_MAX_BYTES) {
            *wrong_p = "a line is longer than 16 MiB, so this is not text";
            return false;
        }
        *bt_buf_reserve(line, 2) = (char)c;
        line->data[++line->len] = '\0';
    }
    if (c == EOF && ferror(f)) {
        *wrong_p = strerror(errno);
        return false;
    }
    return line->len > 0;
}
