/* Files that a daemon reads again when they change, and certificates that expire. Loop's thread. */
#ifndef BT_CONF_WATCH_H
#define BT_CONF_WATCH_H

#include <sys/stat.h>

#include "common/base/base.h"

/* Identifies one version of a file. Stamps are compared as bytes. A change of the mode also counts,
 * so that a file whose permissions were wrong is read again. */
struct bt_conf_stamp {
    uint64_t dev, ino, size, mode;
    struct timespec mtime, ctime;
};
void bt_conf_stamp_of(const struct stat *st, struct bt_conf_stamp *stamp_p);
/* The stamp of the file at path. All zero if path is NULL or the file is missing. */
void bt_conf_stamp_read(const char *path, struct bt_conf_stamp *stamp_p);

/* What a daemon has already said about the end of a certificate; zeros: nothing. */
struct bt_conf_expiry {
    uint64_t said_s;
    bool said_over;
};
/* Warns that the certificate in file ends within a week (ev=tls_expiring) or has ended
 * (ev=tls_expired): at most once a day, but also at the moment at which it ends. */
void bt_conf_expiry_warn(struct bt_conf_expiry *e, const char *file, uint64_t not_after_s);

#endif
