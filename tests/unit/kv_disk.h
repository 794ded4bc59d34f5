/* A disk below the cache in a test (bt_ssd_config.sys): it waits and fails as the test says. */
#ifndef TESTS_UNIT_KV_DISK_H
#define TESTS_UNIT_KV_DISK_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "kvstore/ssd/ssd.h"

static pthread_mutex_t reads = PTHREAD_MUTEX_INITIALIZER; /* held: nothing is read */
static pthread_mutex_t writes = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int read_errno, write_errno;

static inline ssize_t disk_read(void *arg, int fd, void *buf, size_t len, off_t off)
{
    (void)arg;
    pthread_mutex_lock(&reads);
    pthread_mutex_unlock(&reads);
    ssize_t n = read_errno != 0 ? -1 : pread(fd, buf, len, off);
    return read_errno != 0 ? -read_errno : n < 0 ? -errno : n;
}

static inline ssize_t disk_write(void *arg, int fd, const void *buf, size_t len, off_t off)
{
    (void)arg;
    pthread_mutex_lock(&writes);
    pthread_mutex_unlock(&writes);
    ssize_t n = write_errno != 0 ? -1 : pwrite(fd, buf, len, off);
    return write_errno != 0 ? -write_errno : n < 0 ? -errno : n;
}

static inline int disk_flush(void *arg, int fd)
{
    (void)arg;
    return fdatasync(fd) == 0 ? 0 : -errno;
}

static const struct bt_ssd_sys kv_disk = {disk_read, disk_write, disk_flush, NULL};

#endif
