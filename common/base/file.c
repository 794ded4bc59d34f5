/* See file.h. */
#include "common/base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

FILE *bt_file_open(const char *path, struct stat *st, const char **why_p)
{
    /* Without O_NONBLOCK, open itself waits for the writer of a pipe. Regular files ignore it. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    FILE *f = NULL;
    if (fd < 0 || fstat(fd, st) != 0) {
        *why_p = strerror(errno);
    } else if (!S_ISREG(st->st_mode)) {
        *why_p = S_ISDIR(st->st_mode) ? "it is a directory; name a file"
                                      : "it is a pipe, a socket or a device; name a file";
        errno = EINVAL;
    } else if ((f = fdopen(fd, "r")) == NULL) {
        *why_p = strerror(errno);
    }
    if (f == NULL && fd >= 0) {
        int e = errno;
        (void)close(fd);
        errno = e;
    }
    return f;
}
