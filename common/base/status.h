/* Status codes of every fallible function. One table (status.def); 0 is success, 1 "not now". */
#ifndef BT_BASE_STATUS_H
#define BT_BASE_STATUS_H

typedef enum {
#define BT_STATUS(name, value, text) BT_##name = (value),
#include "status.def"
#undef BT_STATUS
} bt_status_t;

#define BT_MUST_CHECK __attribute__((warn_unused_result))

/* Returns a static English text for `status`, never NULL. */
const char *bt_status_text(bt_status_t status);

/* Returns what an operator does about `error` (an errno) of a file: on a full file system it is to
 * make room, whatever the file is; otherwise the text `usual`. */
const char *bt_file_remedy(int error, const char *usual);

/* Returns the identifier of `status` ("ERR_STALE"), never NULL. */
const char *bt_status_name(bt_status_t status);

#endif
