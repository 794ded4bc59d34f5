/* Makes and opens the slab file of the SSD tier (only at start), and checks that it still
 * exists. */
#include "kvstore/ssd/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/base/crc32c.h"
#include "common/conf/conf.h"
#include "common/log/log.h"

#define FILE_MAGIC   0x31445353544142ull /* "BATSSD1" */
#define FILE_VERSION 1
#define ALLOC_STEP   (256ull << 20)
#define INDEX_LEAST  (2ull << 20) /* room that the index in the same folder needs to open */
/* Room that its log (db.c) needs to run well, if there is as much. */
#define INDEX_BYTES (48ull << 20)
/* Room for each block: records of 100 bytes, also while they are compacted. */
#define INDEX_BLOCK  300ull
#define LOCK_WAIT_MS 3000 /* the kernel first ends the I/O of a killed predecessor */

struct header { /* at offset 0 */
    uint64_t magic;
    uint32_t version, pad;
    uint64_t slot_bytes;
    uint8_t uuid[16];
    uint32_t crc;
};

static bt_status_t failed(bt_status_t st, char *err, size_t cap, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
static bt_status_t failed(bt_status_t st, char *err, size_t cap, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, cap, fmt, ap);
    va_end(ap);
    return st;
}

static bt_status_t class_of(int why)
{
    switch (why) {
    case EACCES:
    case EPERM:
    case ENOENT:
    case ENOTDIR:
    case ELOOP:
    case EISDIR: return BT_ERR_CONFIG;
    case ENOSPC:
    case EDQUOT:
    case EFBIG: return BT_ERR_EXHAUSTED;
    default: return BT_ERR_IO;
    }
}

/* Returns 0 or errno. After kill -9 the lock stays until the last write of the process has ended,
 * so the next holder may use the slots safely. */
static int lock(int fd)
{
    for (int ms = 0;; ms += 10) {
        struct flock lk = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        if (fcntl(fd, F_OFD_SETLK, &lk) == 0) {
            return 0;
        }
        if ((errno != EAGAIN && errno != EACCES) || ms >= LOCK_WAIT_MS) {
            return errno;
        }
        usleep(10000);
    }
}

static bt_status_t open_locked(const char *path, struct bt_ssd_file *f, char *err, size_t cap)
{
    const int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
    f->direct = true;
    f->fd = open(path, flags | O_DIRECT, 0600);
    if (f->fd < 0 && errno == EINVAL) {
        f->direct = false;
        f->fd = open(path, flags, 0600);
        BT_WARN("ssd_no_direct", "path=%s why=%s", path,
                "this file system has no O_DIRECT: blocks also pass the page cache");
    }
    if (f->fd < 0) {
        return failed(
            class_of(errno), err, cap, "kvstore.ssd.path: cannot open %s: %s. %s", path,
            strerror(errno),
            bt_file_remedy(errno,
                           "It must be a folder on the SSD that the kvstore's user may write"));
    }
    struct stat is;
    if (fstat(f->fd, &is) != 0 || !S_ISREG(is.st_mode) || is.st_uid != geteuid() ||
        is.st_nlink != 1) {
        close(f->fd);
        f->fd = -1;
        return failed(BT_ERR_CONFIG, err, cap,
                      "kvstore.ssd.path: %s is not a regular file that belongs to this user and "
                      "has one name (%s); remove it, or give another folder",
                      path, "left as it is");
    }
    int why = lock(f->fd);
    if (why != 0) {
        bool busy = why == EAGAIN || why == EACCES;
        bt_status_t st = failed(busy ? BT_ERR_CONFIG : BT_ERR_IO, err, cap,
                                busy ? "kvstore.ssd.path: %s is in use by another kvstore; each "
                                       "needs a folder of its own (%s)"
                                     : "kvstore.ssd.path: cannot lock %s: %s. It must be on a file "
                                       "system of this host that has locks",
                                path, strerror(why));
        close(f->fd);
        return st;
    }
    return BT_OK;
}

/* Reserves the bytes up to end, or as many as there is room for. Returns 0, or the errno of the
 * failure. */
static int reserve(int fd, uint64_t end, uint64_t *at_p)
{
    uint64_t at = 0, step = ALLOC_STEP;
    int why = 0;
    while (at < end) {
        uint64_t n = BT_MIN(step, end - at);
        why = posix_fallocate(fd, (off_t)at, (off_t)n);
        if (why == 0) {
            at += n;
        } else if ((why == ENOSPC || why == EFBIG || why == EDQUOT) && step > (1u << 20)) {
            step /= 4; /* use the rest of the room in smaller steps */
        } else if (why != EINTR) {
            break;
        }
    }
    *at_p = at;
    return why;
}

/* How many of the `at` reserved bytes to keep, so that the index on the same disk has room. The
 * first `had` bytes are of an earlier run and are kept, since its index had its room. */
static uint64_t leave_room(const char *folder, const struct bt_ssd_file *f, uint64_t had,
                           uint64_t at)
{
    struct statvfs fs;
    char *index = bt_sprintf("%s/index/CURRENT", folder);
    bool has_index = access(index, F_OK) == 0;
    free(index);
    if (fstatvfs(f->fd, &fs) != 0) {
        return at;
    }
    uint64_t room = BT_MAX(INDEX_LEAST, BT_MIN(INDEX_BYTES, at / 8));
    room += at / f->slot_bytes * INDEX_BLOCK;
    uint64_t left = (uint64_t)fs.f_bavail * fs.f_frsize;
    uint64_t back = left < room ? room - left : 0, floor = has_index ? had : 0;
    return at <= floor ? at : BT_MAX(floor, at - BT_MIN(back, at));
}

/* Reserves as much of the wanted length as there is room for beside the index; sets n_slots to the
 * result. */
static bt_status_t allocate(const char *folder, const char *path, struct bt_ssd_file *f,
                            uint64_t bytes, char *err, size_t cap)
{
    uint64_t want = bytes > BT_SSD_DATA_OFF ? (bytes - BT_SSD_DATA_OFF) / f->slot_bytes : 0;
    want = BT_MIN(want, (uint64_t)UINT32_MAX / 4);
    uint64_t end = BT_SSD_DATA_OFF + want * f->slot_bytes, at;
    struct stat before;
    if (want == 0) {
        return failed(BT_ERR_CONFIG, err, cap,
                      "kvstore.ssd.bytes = %llu is too small: a block of this model takes %llu "
                      "bytes, and the file itself %u; give more than both",
                      (unsigned long long)bytes, (unsigned long long)f->slot_bytes,
                      BT_SSD_DATA_OFF);
    }
    uint64_t had = fstat(f->fd, &before) == 0 ? (uint64_t)before.st_size : 0;
    int why = reserve(f->fd, end, &at);
    uint64_t keep = leave_room(folder, f, had, at);
    if (keep < at) {
        at = keep;
        why = ENOSPC;
    }
    f->n_slots = at > BT_SSD_DATA_OFF ? (uint32_t)((at - BT_SSD_DATA_OFF) / f->slot_bytes) : 0;
    if (f->n_slots == 0) {
        return failed(class_of(why), err, cap,
                      "kvstore.ssd.path: no room for one block in %s: %s. Free space on that disk",
                      path, strerror(why));
    }
    if (at < end) {
        BT_WARN("ssd_smaller", "path=%s wanted=%llu slots=%u why=%s", path,
                (unsigned long long)want, f->n_slots, strerror(why));
    }
    if (ftruncate(f->fd, (off_t)(BT_SSD_DATA_OFF + f->n_slots * f->slot_bytes)) != 0) {
        return failed(class_of(errno), err, cap, "kvstore.ssd.path: cannot set the size of %s: %s",
                      path, strerror(errno));
    }
    return BT_OK;
}

/* page: an aligned page of zeros. Returns 0 or errno. */
static int write_header(const struct bt_ssd_file *f, void *page)
{
    struct header *h = page;
    *h = (struct header){.magic = FILE_MAGIC, .version = FILE_VERSION, .slot_bytes = f->slot_bytes};
    memcpy(h->uuid, f->uuid, sizeof(h->uuid));
    h->crc = bt_crc32c(0, h, offsetof(struct header, crc));
    ssize_t n = pwrite(f->fd, page, BT_SSD_PAGE, 0);
    return n < 0 ? errno : n != (ssize_t)BT_SSD_PAGE ? EIO : fdatasync(f->fd) != 0 ? errno : 0;
}

/* Reads the header; if the file has no header of this format, writes a new one with a new uuid. */
static bt_status_t identify(const char *path, struct bt_ssd_file *f, char *err, size_t cap)
{
    struct header *h = NULL;
    if (posix_memalign((void **)&h, BT_SSD_PAGE, BT_SSD_PAGE) != 0) {
        return failed(BT_ERR_NO_MEMORY, err, cap, "out of memory");
    }
    memset(h, 0, BT_SSD_PAGE);
    ssize_t n = pread(f->fd, h, BT_SSD_PAGE, 0);
    bt_status_t st = BT_OK;
    if (n == (ssize_t)BT_SSD_PAGE && h->magic == FILE_MAGIC && h->version == FILE_VERSION &&
        h->slot_bytes == f->slot_bytes && h->crc == bt_crc32c(0, h, offsetof(struct header, crc))) {
        memcpy(f->uuid, h->uuid, sizeof(f->uuid));
    } else {
        memset(h, 0, BT_SSD_PAGE);
        bt_random(f->uuid, sizeof(f->uuid));
        int why = write_header(f, h);
        if (why != 0) {
            st = failed(class_of(why), err, cap, "kvstore.ssd.path: cannot write %s: %s", path,
                        strerror(why));
        }
    }
    free(h);
    return st;
}

bt_status_t bt_ssd_file_open(const char *folder, uint64_t bytes, uint64_t slot_bytes,
                             struct bt_ssd_file *f_p, char *err, size_t err_cap)
{
    struct bt_ssd_file f = {.fd = -1, .slot_bytes = slot_bytes};
    if (mkdir(folder, 0700) != 0 && errno != EEXIST) {
        return failed(
            class_of(errno), err, err_cap, "kvstore.ssd.path: cannot make the folder %s: %s. %s",
            folder, strerror(errno),
            bt_file_remedy(errno,
                           "The folder above it must be one that the kvstore's user may write"));
    }
    char why[512];
    bt_status_t st = bt_conf_dir_private(folder, why, sizeof(why));
    if (st != BT_OK) {
        return failed(st, err, err_cap, "kvstore.ssd.path: %s: %s", folder, why);
    }
    char *path = bt_sprintf("%s/blocks", folder);
    st = open_locked(path, &f, err, err_cap);
    if (st == BT_OK) {
        st = allocate(folder, path, &f, bytes, err, err_cap);
        if (st == BT_OK) {
            st = identify(path, &f, err, err_cap);
        }
        if (st != BT_OK) {
            close(f.fd);
        } else {
            *f_p = f;
        }
    }
    free(path);
    return st;
}

bt_ssd_file_state_t bt_ssd_file_look(const struct bt_ssd_file *f, const char *folder,
                                     uint64_t *bytes_p)
{
    struct stat by_fd, by_path;
    if (fstat(f->fd, &by_fd) != 0) {
        return BT_SSD_FILE_OK;
    }
    if ((uint64_t)by_fd.st_size < bt_ssd_file_off(f, f->n_slots)) {
        *bytes_p = (uint64_t)by_fd.st_size;
        return BT_SSD_FILE_CUT;
    }
    char *path = bt_sprintf("%s/blocks", folder);
    int rc = stat(path, &by_path) == 0 ? 0 : errno;
    free(path);
    bool there = rc == 0 ? by_path.st_ino == by_fd.st_ino && by_path.st_dev == by_fd.st_dev
                         : rc != ENOENT && rc != ENOTDIR; /* if it cannot be examined, it may still
                                                             exist */
    return by_fd.st_nlink > 0 && there ? BT_SSD_FILE_OK : BT_SSD_FILE_GONE;
}

bt_status_t bt_ssd_file_mend(const struct bt_ssd_file *f)
{
    void *page = NULL;
    if (posix_memalign(&page, BT_SSD_PAGE, BT_SSD_PAGE) != 0) {
        return BT_ERR_NO_MEMORY;
    }
    memset(page, 0, BT_SSD_PAGE);
    bool ok =
        ftruncate(f->fd, (off_t)bt_ssd_file_off(f, f->n_slots)) == 0 && write_header(f, page) == 0;
    free(page);
    return ok ? BT_OK : BT_ERR_IO;
}

void bt_ssd_file_close(struct bt_ssd_file *f)
{
    if (f->fd >= 0) {
        close(f->fd);
        f->fd = -1;
    }
}
