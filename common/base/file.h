/* Opens the files that daemons and tools read whole: configuration, certificates, keys, models. */
#ifndef BT_BASE_FILE_H
#define BT_BASE_FILE_H

#include <stdio.h>
#include <sys/stat.h>

/* Opens a regular file for reading, with close-on-exec, and sets *st to what fstat says of it. It
 * never waits: a pipe, a socket or a device is refused, because its other end could let the reader
 * wait for ever. The caller closes the result with fclose. NULL: *why_p is a short text that says
 * why (valid until the next call of strerror), and errno is ENOENT if there is no such file. */
FILE *bt_file_open(const char *path, struct stat *st, const char **why_p);

#endif
