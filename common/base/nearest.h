/* Finds the name that was probably meant, by edit distance, for "did you mean ...?". Pure. */
#ifndef BT_BASE_NEAREST_H
#define BT_BASE_NEAREST_H

#include <stddef.h>

/* Insertions, deletions and changed characters between two names. Names of more than 127 bytes are
 * far from everything (UINT_MAX), so that a stranger's text costs nothing. */
unsigned bt_edit_distance(const char *a, const char *b);

#endif
