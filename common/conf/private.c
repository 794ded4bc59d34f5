/* Checks whether other users of the machine can change files and directories that a daemon trusts,
 * or read its secrets. Changes nothing; any thread. */
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/conf/conf.h"

static bool is_ours(const struct stat *st)
{
    return st->st_uid == geteuid() || st->st_uid == 0;
}

bool bt_conf_secret_private(const struct stat *st, char *why, size_t cap)
{
    if ((st->st_mode & (S_IRWXO | S_IWGRP)) != 0) {
        snprintf(why, cap, "it is open to %s (mode %04o): chmod 0600 it, or 0640",
                 (st->st_mode & S_IRWXO) != 0 ? "everybody" : "writes of its group",
                 st->st_mode & 07777u);
        return false;
    }
    if (!is_ours(st) && geteuid() != 0) { /* root may read another user's file */
        snprintf(why, cap,
                 "it belongs to user %u, who can change it, and this daemon runs as user %u: chown "
                 "it to that user or to root",
                 (unsigned)st->st_uid, (unsigned)geteuid());
        return false;
    }
    return true;
}

bt_status_t bt_conf_dir_private(const char *path, char *why, size_t cap)
{
    char bare[4096];
    struct stat st;
    int n = snprintf(bare, sizeof(bare), "%s", path);
    /* With "/" at its end the name of a link is its target. */
    while (n > 1 && (size_t)n < sizeof(bare) && bare[n - 1] == '/') {
        bare[--n] = '\0';
    }
    if (lstat(bare, &st) != 0) {
        snprintf(why, cap, "%s", strerror(errno));
        return errno == ENOENT ? BT_ERR_NOT_FOUND : BT_ERR_IO;
    }
    if (S_ISLNK(st.st_mode)) {
        char *real = realpath(bare, NULL);
        snprintf(why, cap,
                 "it is a symbolic link, whose target can change: name the directory "
                 "itself (%s)",
                 real != NULL ? real : "its target does not exist");
        free(real);
    } else if (!S_ISDIR(st.st_mode)) {
        snprintf(why, cap, "it is not a directory");
    } else if (!is_ours(&st)) {
        snprintf(why, cap,
                 "it belongs to user %u, and this daemon runs as user %u: chown it, or name "
                 "another directory",
                 (unsigned)st.st_uid, (unsigned)geteuid());
    } else if ((st.st_mode & (S_IWOTH | S_IWGRP)) != 0) {
        snprintf(why, cap,
                 "other users can put files into it (mode %04o): chmod go-w it, or name a "
                 "directory in it",
                 st.st_mode & 07777u);
    } else {
        return BT_OK;
    }
    return BT_ERR_CONFIG;
}

bool bt_conf_user(const char *key, const char *text, uid_t *uid_p, char *err, size_t err_cap)
{
    char *end, room[16384];
    struct passwd entry, *found = NULL;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0 && number < (uid_t)-1) {
        *uid_p = (uid_t)number;
        return true;
    }
    if (getpwnam_r(text, &entry, room, sizeof(room), &found) != 0 || found == NULL) {
        snprintf(err, err_cap,
                 "%s: there is no user '%.60s': use a name that `getent passwd` knows, or a number",
                 key, text);
        return false;
    }
    *uid_p = found->pw_uid;
    return true;
}
