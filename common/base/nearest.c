/* Levenshtein distance of two short names; see nearest.h. */
#include "common/base/nearest.h"

#include <limits.h>
#include <string.h>

#include "common/base/base.h"

#define NAME_MAX_BYTES 127

unsigned bt_edit_distance(const char *a, const char *b)
{
    unsigned row[NAME_MAX_BYTES + 1];
    size_t n = strnlen(b, NAME_MAX_BYTES + 1);
    if (n > NAME_MAX_BYTES || strnlen(a, NAME_MAX_BYTES + 1) > NAME_MAX_BYTES) {
        return UINT_MAX;
    }
    for (size_t j = 0; j <= n; j++) {
        row[j] = (unsigned)j;
    }
    for (size_t i = 1; a[i - 1] != '\0'; i++) {
        unsigned diag = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= n; j++) {
            unsigned up = row[j];
            unsigned change = diag + (a[i - 1] != b[j - 1]);
            row[j] = BT_MIN(change, BT_MIN(up, row[j - 1]) + 1);
            diag = up;
        }
    }
    return row[n];
}
