/* See secret.h. */
#include "common/conf/secret.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/file.h"
#include "common/conf/conf.h"

bt_status_t bt_conf_secret_read(const char *path, struct bt_secret *s, char *err, size_t err_cap)
{
    struct stat st;
    char why[200];
    const char *reason;
    FILE *f = bt_file_open(path, &st, &reason);
    memset(s, 0, sizeof(*s));
    if (f == NULL) {
        snprintf(err, err_cap, "%.200s cannot be read: %s", path, reason);
        return BT_ERR_CONFIG;
    }
    size_t n = fread(s->bytes, 1, sizeof(s->bytes), f);
    bool good = ferror(f) == 0 && (n < sizeof(s->bytes) || fgetc(f) == EOF);
    (void)fclose(f);
    while (n > 0 && memchr(" \r\n", s->bytes[n - 1], 3) != NULL) {
        n--; /* white space at the end comes from an editor and is not part of the secret */
    }
    if (n == 0 || !good) {
        snprintf(err, err_cap, "%.200s must be a file of 1 to %d bytes", path, BT_SECRET_MAX);
    } else if (!bt_conf_secret_private(&st, why, sizeof(why))) {
        good = false;
        snprintf(err, err_cap, "%.200s: %s", path, why);
    }
    if (n == 0 || !good) {
        explicit_bzero(s, sizeof(*s));
        return BT_ERR_CONFIG;
    }
    s->len = n;
    s->id_len = sizeof(s->id);
    bt_sha256(s->bytes, n, s->id);
    return BT_OK;
}
