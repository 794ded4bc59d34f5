/* See output.h. */
#include "conductor/sim/output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/assert.h"

static bt_status_t refuse(const char *path, int why, char *err, size_t cap)
{
    snprintf(err, cap, "%s: %s", *path != '\0' ? path : "''", strerror(why));
    return BT_ERR_INVALID;
}

bt_status_t bt_sim_output_check(const char *path, char *err, size_t err_cap)
{
    struct stat st;
    bool there = stat(path, &st) == 0;
    if (there && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode)) {
        return BT_OK; /* a pipe's reader would take this as the end */
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) {
        return refuse(path, errno, err, err_cap);
    }
    close(fd);
    if (!there) {
        unlink(path);
    }
    return BT_OK;
}

bt_status_t bt_sim_output_check_folder(const char *folder, char *err, size_t err_cap)
{
    bool made = mkdir(folder, 0777) == 0;
    if (!made && errno != EEXIST) {
        return refuse(folder, errno, err, err_cap);
    }
    char *path = bt_sprintf("%s/.writable-%ld", folder, (long)getpid());
    bt_status_t st = bt_sim_output_check(path, err, err_cap);
    int why = errno;
    free(path);
    if (made) {
        rmdir(folder);
    }
    return st == BT_OK ? st : refuse(folder, why, err, err_cap);
}

bt_status_t bt_sim_output_open(struct bt_sim_output *o, const char *folder, const char *name,
                               char *err, size_t err_cap)
{
    if (folder != NULL && mkdir(folder, 0777) != 0 && errno != EEXIST) {
        return refuse(folder, errno, err, err_cap);
    }
    char *path = folder != NULL ? bt_sprintf("%s/%s", folder, name) : bt_sprintf("%s", name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        bt_status_t st = refuse(path, errno, err, err_cap);
        free(path);
        return st;
    }
    *o = (struct bt_sim_output){.path = path, .fd = fd};
    o->f = open_memstream(&o->text, &o->len);
    BT_ASSERT(o->f != NULL);
    return BT_OK;
}

/* 0, or why not all of it was written. */
static int write_all(int fd, const char *p, size_t len)
{
    while (len > 0) {
        ssize_t n = write(fd, p, len);
        if (n < 0 && errno != EINTR) {
            return errno;
        }
        p += BT_MAX(n, 0);
        len -= (size_t)BT_MAX(n, 0);
    }
    return 0;
}

bt_status_t bt_sim_output_close(struct bt_sim_output *o, char *err, size_t err_cap)
{
    struct stat st;
    bool file = fstat(o->fd, &st) == 0 && S_ISREG(st.st_mode);
    BT_ASSERT(fclose(o->f) == 0); /* it is memory */
    int why = write_all(o->fd, o->text, o->len);
    if (close(o->fd) != 0 && why == 0) {
        why = errno;
    }
    bt_status_t rc = BT_OK;
    if (why != 0) {
        snprintf(err, err_cap, "%s: %s; %s%s", o->path, strerror(why),
                 file ? "the incomplete file was removed; " : "",
                 why == ENOSPC || why == EDQUOT || why == EFBIG
                     ? "free some space or name a file elsewhere"
                     : "name a file elsewhere");
        rc = BT_ERR_INVALID;
    }
    if (why != 0 && file) {
        unlink(o->path);
    }
    free(o->text);
    free(o->path);
    *o = (struct bt_sim_output){0};
    return rc;
}
