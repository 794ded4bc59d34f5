/* Memory with a limit, for programs, automata and sets of expressions: arrays that grow to twice
 * their size, and a count of bytes. Pure. */
#ifndef BT_GRAMMAR_ROOM_H
#define BT_GRAMMAR_ROOM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common/base/base.h"

/* Counts n more bytes. If the sum exceeds the limit, sets *full and returns false. *full stays
 * set. */
static inline bool bt_room_take(bool *full, size_t max_bytes, size_t *bytes, size_t n)
{
    if (*full || n > max_bytes - *bytes) {
        *full = true;
        return false;
    }
    *bytes += n;
    return true;
}

/* Gives the array at *array_p room for `want` elements of `size` bytes. */
static inline void bt_room_enlarge(void *array_p, uint32_t *cap, uint32_t want, size_t size)
{
    void *array = NULL;
    memcpy(&array, array_p, sizeof(array));
    array = bt_realloc(array, want * size);
    memcpy(array_p, &array, sizeof(array));
    *cap = want;
}

#endif
