/* Texts of the status codes, generated from status.def. Any thread. */
#include "common/base/status.h"

#include <errno.h>

const char *bt_status_text(bt_status_t status)
{
    switch (status) {
#define BT_STATUS(name, value, text)                                                               \
    case BT_##name:                                                                                \
        return text;
#include "common/base/status.def"
#undef BT_STATUS
    }
    return "unknown status";
}

const char *bt_status_name(bt_status_t status)
{
    switch (status) {
#define BT_STATUS(name, value, text)                                                               \
    case BT_##name:                                                                                \
        return #name;
#include "common/base/status.def"
#undef BT_STATUS
    }
    return "UNKNOWN";
}

const char *bt_file_remedy(int error, const char *usual)
{
    return error == ENOSPC || error == EDQUOT ? "Its file system or quota is full: make room there "
                                                "(df, df -i), or give another path"
                                              : usual;
}
