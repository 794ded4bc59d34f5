/* The names of draft sources. Pure: see spec.h. */
#include "common/spec/spec.h"

#include <string.h>

bt_spec_kind_t bt_spec_kind(const char *name)
{
    static const char *const names[BT_SPEC_KINDS] = {"auto",  "off",   "suffix",
                                                     "ngram", "draft", "mtp"};
    uint32_t k = 0;
    while (k < BT_SPEC_KINDS && strcmp(name, names[k]) != 0) {
        k++;
    }
    return (bt_spec_kind_t)k;
}
