/* Stamps of files, and warnings about certificates that expire; see watch.h. */
#include "common/conf/watch.h"

#include <string.h>

#include "common/base/clock.h"
#include "common/log/log.h"

#define EXPIRING_S (7u * 86400)
#define REMIND_S   86400u

void bt_conf_stamp_of(const struct stat *st, struct bt_conf_stamp *stamp_p)
{
    memset(stamp_p, 0, sizeof(*stamp_p));
    stamp_p->dev = st->st_dev;
    stamp_p->ino = st->st_ino;
    stamp_p->size = (uint64_t)st->st_size;
    stamp_p->mode = st->st_mode;
    stamp_p->mtime = st->st_mtim;
    stamp_p->ctime = st->st_ctim;
}

void bt_conf_stamp_read(const char *path, struct bt_conf_stamp *stamp_p)
{
    struct stat st;
    memset(stamp_p, 0, sizeof(*stamp_p));
    if (path != NULL && stat(path, &st) == 0) {
        bt_conf_stamp_of(&st, stamp_p);
    }
}

void bt_conf_expiry_warn(struct bt_conf_expiry *e, const char *file, uint64_t not_after_s)
{
    uint64_t now_s = bt_real_ns() / 1000000000;
    bool over = now_s >= not_after_s, is_news = over && !e->said_over;
    if (now_s + EXPIRING_S < not_after_s || (now_s < e->said_s + REMIND_S && !is_news)) {
        return;
    }
    e->said_s = now_s;
    e->said_over = over;
    BT_WARN(over ? "tls_expired" : "tls_expiring", "file=%s hours_left=%lld remedy=%s", file,
            (long long)(not_after_s - now_s) / 3600,
            "put a new certificate and key in place of these files; the daemon reads them again "
            "by itself");
}
