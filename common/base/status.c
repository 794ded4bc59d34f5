/* Texts of the status codes, generated from status.def. Any thread. */
#include "common/base/status.h"

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
