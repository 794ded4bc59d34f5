/* Revoked certificates: they are made by the CA and have not expired, but are no longer accepted.
 * The list is a text file with one certificate a line, by its SHA-256 fingerprint or its serial
 * number. Pure; see revoked.h. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"
#include "common/base/revoked.h"

#define LINES_MAX 4096u /* of up to 250 bytes; a list that needs more calls for a new CA */

struct bt_revoked {
    size_t n;
    struct {
        bool serial; /* id is a serial number; else a fingerprint */
        char id[BT_CERT_ID_MAX];
    } list[];
};

/* Copies hexadecimal digits in lower case, without openssl's colons and without a serial number's
 * leading zeros. False: the text has other characters or is too long. */
static bool take_hex(const char *from, size_t len, bool serial, char to[BT_CERT_ID_MAX])
{
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        if (from[i] == ':' || (serial && n == 0 && from[i] == '0' && i + 1 < len)) {
            continue;
        }
        if (!isxdigit((unsigned char)from[i]) || n + 1 == BT_CERT_ID_MAX) {
            return false;
        }
        to[n++] = (char)tolower((unsigned char)from[i]);
    }
    to[n] = '\0';
    return serial ? n > 0 : n == 64;
}

static bool take_line(struct bt_revoked *r, const char *line, size_t len)
{
    static const char sha[] = "sha256:", serial[] = "serial:";
    bool by_serial = len > sizeof(serial) && strncmp(line, serial, sizeof(serial) - 1) == 0;
    if (!by_serial && (len < sizeof(sha) || strncmp(line, sha, sizeof(sha) - 1) != 0)) {
        return false;
    }
    size_t skip = by_serial ? sizeof(serial) - 1 : sizeof(sha) - 1;
    r->list[r->n].serial = by_serial;
    return take_hex(line + skip, len - skip, by_serial, r->list[r->n].id);
}

bt_status_t bt_revoked_parse(const char *text, struct bt_revoked **list_p, char *err,
                             size_t err_cap)
{
    struct bt_revoked *r = bt_calloc(1, sizeof(*r) + LINES_MAX * sizeof(r->list[0]));
    for (unsigned number = 1; *text != '\0'; number++) {
        size_t whole = strcspn(text, "\n"), len = strcspn(text, "#\n");
        while (len > 0 && isspace((unsigned char)text[len - 1])) {
            len--;
        }
        if (len > 0) {
            if (r->n == LINES_MAX || !take_line(r, text, len)) {
                snprintf(err, err_cap,
                         r->n == LINES_MAX
                             ? "line %u: more than 4096 certificates; make a new CA instead"
                             : "line %u is neither sha256: with 64 hexadecimal digits nor serial: "
                               "with digits",
                         number);
                free(r);
                return BT_ERR_INVALID;
            }
            r->n++;
        }
        text += whole + (text[whole] == '\n');
    }
    *list_p = r;
    return BT_OK;
}

bool bt_revoked_has(const struct bt_revoked *r, const struct bt_cert *c)
{
    for (size_t i = 0; r != NULL && i < r->n; i++) {
        if (strcmp(r->list[i].id, r->list[i].serial ? c->serial : c->sha256) == 0) {
            return true;
        }
    }
    return false;
}
