"""An SSD that is as slow as a test wants: a library loaded into a kvstore, under which reads and writes that bypass the
page cache share so many bytes a second (and io_uring is refused, so that all of them are system calls). While a file
that the test names exists they fail, behind the first so many that stand in the file."""
import os
import subprocess

SOURCE = r"""
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double free_at; /* when the disk has done what it was given */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int failing(void)
{
    static _Atomic long done;
    const char *file = getenv("SLOW_DISK_FAILS_WHILE");
    char text[32] = "";
    int fd = file != NULL ? open(file, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) {
        return 0;
    }
    long n = syscall(SYS_read, fd, text, sizeof(text) - 1);
    close(fd);
    return n < 0 || ++done > atol(text);
}

/* 0, or an error. */
static int wait_turn(int fd, size_t n)
{
    static double bytes_per_s;
    if ((fcntl(fd, F_GETFL) & O_DIRECT) == 0) {
        return 0;
    }
    pthread_mutex_lock(&lock);
    if (bytes_per_s == 0) {
        bytes_per_s = atof(getenv("SLOW_DISK_BYTES_PER_S"));
    }
    double t = now();
    free_at = (free_at > t ? free_at : t) + (double)n / bytes_per_s;
    double until = free_at;
    pthread_mutex_unlock(&lock);
    while ((t = now()) < until) {
        struct timespec d = {(time_t)(until - t), (long)((until - t - (double)(time_t)(until - t)) * 1e9)};
        nanosleep(&d, NULL);
    }
    return failing() ? EIO : 0;
}

ssize_t pread(int fd, void *p, size_t n, off_t at)
{
    errno = wait_turn(fd, n);
    return errno != 0 ? -1 : syscall(SYS_pread64, fd, p, n, at);
}

ssize_t pread64(int fd, void *p, size_t n, off_t at)
{
    return pread(fd, p, n, at);
}

ssize_t pwrite(int fd, const void *p, size_t n, off_t at)
{
    errno = wait_turn(fd, n);
    return errno != 0 ? -1 : syscall(SYS_pwrite64, fd, p, n, at);
}

ssize_t pwrite64(int fd, const void *p, size_t n, off_t at)
{
    return pwrite(fd, p, n, at);
}

int io_uring_queue_init(unsigned entries, void *ring, unsigned flags)
{
    (void)entries, (void)ring, (void)flags;
    return -EPERM;
}
"""


def build(folder):
    """Compiles it into folder; its path."""
    source, lib = os.path.join(folder, "slow_disk.c"), os.path.join(folder, "slow_disk.so")
    with open(source, "w") as f:
        f.write(SOURCE)
    subprocess.run(["gcc", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-o", lib, source, "-lpthread"], check=True, timeout=60)
    return lib


def environment(env, lib, bytes_per_s, fails_while=""):
    """A daemon's environment under which its disk moves so many bytes a second, and fails while that file exists."""
    return {**env, "LD_PRELOAD": lib, "SLOW_DISK_BYTES_PER_S": f"{bytes_per_s:.0f}", "SLOW_DISK_FAILS_WHILE": fails_while,
            "ASAN_OPTIONS": env.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}
