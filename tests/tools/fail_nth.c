/* Loaded into a daemon (LD_PRELOAD): makes the n-th allocation fail with ENOMEM, or the n-th write
 * to a file with ENOSPC, once or from then on. Each process makes a file FAIL_NTH_DIR/PID, which
 * holds struct control: whoever tests maps it, arms it while the daemon runs, and reads what has
 * been counted. FAIL_NTH_START="memory|disk N once|on" arms it from the start of the program.
 * Any thread; nothing here allocates. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MEMORY = 1, DISK = 2 };

struct control {           /* tests/cluster/nth_rounds.py knows it */
    _Atomic uint32_t kind; /* 0: nothing fails */
    _Atomic uint32_t on;   /* 1: the n-th call and all behind it fail */
    _Atomic uint64_t n;
    _Atomic uint64_t counted, failed; /* calls of this kind since it was armed */
    _Atomic uint64_t calls[3];        /* of each kind since the start */
};

static struct control own, *control = &own;
static int full_fd = -1;
static char folder[200];

static void map_control(void)
{
    char path[256], at[24];
    size_t n = strlen(folder), i = sizeof(at);
    at[--i] = '\0';
    for (long pid = syscall(SYS_getpid); pid > 0; pid /= 10) {
        at[--i] = (char)('0' + pid % 10);
    }
    memcpy(path, folder, n);
    path[n] = '/';
    memcpy(path + n + 1, at + i, sizeof(at) - i);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
        return;
    }
    if (syscall(SYS_ftruncate, fd, 4096) == 0) {
        void *p = (void *)syscall(SYS_mmap, NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        control = p != MAP_FAILED ? p : control;
    }
    syscall(SYS_close, fd);
}

__attribute__((constructor)) static void begin(void)
{
    const char *dir = getenv("FAIL_NTH_DIR"), *start = getenv("FAIL_NTH_START");
    full_fd = (int)syscall(SYS_openat, AT_FDCWD, "/dev/full", O_RDWR | O_CLOEXEC, 0);
    if (dir != NULL && strlen(dir) < sizeof(folder)) {
        memcpy(folder, dir, strlen(dir) + 1);
        map_control();
        pthread_atfork(NULL, NULL, map_control);
    }
    char kind[16], how[16];
    unsigned long long n;
    if (start != NULL && sscanf(start, "%15s %llu %15s", kind, &n, how) == 3) {
        control->n = n;
        control->on = strcmp(how, "on") == 0;
        control->kind = strcmp(kind, "disk") == 0 ? DISK : MEMORY;
    }
}

/* Shall this call fail? */
static int fails(uint32_t kind)
{
    struct control *c = control;
    atomic_fetch_add_explicit(&c->calls[kind], 1, memory_order_relaxed);
    if (atomic_load_explicit(&c->kind, memory_order_acquire) != kind) {
        return 0;
    }
    uint64_t i = atomic_fetch_add(&c->counted, 1) + 1;
    if (i != c->n && (i < c->n || !c->on)) {
        return 0;
    }
    atomic_fetch_add(&c->failed, 1);
    return 1;
}

/* ---- memory ---- */

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t size);
void *__libc_memalign(size_t align, size_t size);

static void *no_memory(void)
{
    errno = ENOMEM;
    return NULL;
}

void *malloc(size_t size)
{
    return fails(MEMORY) ? no_memory() : __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    return fails(MEMORY) ? no_memory() : __libc_calloc(n, size);
}

void *realloc(void *p, size_t size)
{
    return fails(MEMORY) ? no_memory() : __libc_realloc(p, size);
}

void *memalign(size_t align, size_t size)
{
    return fails(MEMORY) ? no_memory() : __libc_memalign(align, size);
}

void *aligned_alloc(size_t align, size_t size)
{
    return memalign(align, size);
}

int posix_memalign(void **p, size_t align, size_t size)
{
    void *got = memalign(align, size);
    if (got == NULL) {
        return ENOMEM;
    }
    *p = got;
    return 0;
}

void *mmap(void *at, size_t len, int prot, int flags, int fd, off_t off)
{
    if (fails(MEMORY)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, at, len, prot, flags, fd, off);
}

void *mmap64(void *at, size_t len, int prot, int flags, int fd, off_t off)
{
    return mmap(at, len, prot, flags, fd, off);
}

/* ---- files ---- */

/* Is it a call on a file that is to fail? Sockets, pipes and eventfds have no disk, and what a
 * daemon says on stderr is what its tester reads. */
static int no_space(int fd)
{
    struct stat st;
    if (fd == STDERR_FILENO || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || !fails(DISK)) {
        return 0;
    }
    errno = ENOSPC;
    return 1;
}

ssize_t write(int fd, const void *p, size_t n)
{
    return no_space(fd) ? -1 : syscall(SYS_write, fd, p, n);
}

ssize_t writev(int fd, const struct iovec *v, int n)
{
    return no_space(fd) ? -1 : syscall(SYS_writev, fd, v, n);
}

ssize_t pwrite(int fd, const void *p, size_t n, off_t at)
{
    return no_space(fd) ? -1 : syscall(SYS_pwrite64, fd, p, n, at);
}

ssize_t pwrite64(int fd, const void *p, size_t n, off_t at)
{
    return pwrite(fd, p, n, at);
}

int ftruncate(int fd, off_t n)
{
    return no_space(fd) ? -1 : (int)syscall(SYS_ftruncate, fd, n);
}

int ftruncate64(int fd, off_t n)
{
    return ftruncate(fd, n);
}

int fallocate(int fd, int mode, off_t at, off_t n)
{
    return no_space(fd) ? -1 : (int)syscall(SYS_fallocate, fd, mode, at, n);
}

int fallocate64(int fd, int mode, off_t at, off_t n)
{
    return fallocate(fd, mode, at, n);
}

int posix_fallocate(int fd, off_t at, off_t n)
{
    return fallocate(fd, 0, at, n) == 0 ? 0 : errno;
}

int posix_fallocate64(int fd, off_t at, off_t n)
{
    return posix_fallocate(fd, at, n);
}

int fsync(int fd)
{
    return no_space(fd) ? -1 : (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd)
{
    return no_space(fd) ? -1 : (int)syscall(SYS_fdatasync, fd);
}

/* io_uring: a write that shall fail goes to /dev/full, which answers ENOSPC. */
static void look_at(struct io_uring *ring)
{
    struct io_uring_sq *sq = &ring->sq;
    for (unsigned i = sq->sqe_head; i != sq->sqe_tail; i++) {
        struct io_uring_sqe *e = &sq->sqes[i & *sq->kring_mask];
        int writes = e->opcode == IORING_OP_WRITE || e->opcode == IORING_OP_WRITE_FIXED;
        if (writes && fails(DISK)) {
            e->fd = full_fd;
        }
    }
}

int io_uring_submit_and_wait(struct io_uring *ring, unsigned n)
{
    static int (*real)(struct io_uring *, unsigned);
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "io_uring_submit_and_wait");
    }
    look_at(ring);
    return real(ring, n);
}

int io_uring_submit_and_get_events(struct io_uring *ring)
{
    static int (*real)(struct io_uring *);
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "io_uring_submit_and_get_events");
    }
    look_at(ring);
    return real(ring);
}
