/* A list of revoked certificates. Pure. */
#ifndef BT_BASE_REVOKED_H
#define BT_BASE_REVOKED_H

#include <stdbool.h>

#include "common/base/cert.h"

struct bt_revoked;

/* The list of a file's text: lines `sha256:FINGERPRINT` or `serial:NUMBER` in hexadecimal, colons
 * allowed, `#` begins a comment. ERR_INVALID with err, which names the line. free() ends it. */
bt_status_t bt_revoked_parse(const char *text, struct bt_revoked **list_p, char *err,
                             size_t err_cap) BT_MUST_CHECK;
/* list NULL: false. */
bool bt_revoked_has(const struct bt_revoked *list, const struct bt_cert *c);

#endif
