/* The shared-memory slab: creation by the kvstore, mapping by workers, segment CRCs. Called on the
 * owner's control thread at start or attach; bt_slab_segment_crc on any thread. The owner holds an
 * OFD lock on byte 0 of the file as long as it lives; each worker holds a shared lock on byte 1.
 * These locks, and no pid, distinguish a slab in use from one left behind. An OFD lock belongs to
 * the open file description, so descriptors for workers must be opened anew and not be dup'ed. */
#include "common/slab/slab.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/base/crc32c.h"
#include "common/base/sha256.h"
#include "common/slab/guard.h"

#define SLAB_PAGE      4096u
#define SLAB_STEP      (64u << 20) /* bytes reserved between two calls of progress */
#define LOCK_OWNER     0           /* byte that the kvstore locks */
#define LOCK_USERS     1           /* byte that every process with the slab mapped locks */
#define SLAB_FLOWS_MIN 512u
#define SLAB_FLOWS_MAX 65536u

static void slab_errf(char *err, size_t cap, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void slab_errf(char *err, size_t cap, const char *fmt, ...)
{
    if (err == NULL || cap == 0) {
        return;
    }
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, cap, fmt, ap);
    va_end(ap);
}

static void read_line(const char *path, char *out, size_t cap)
{
    memset(out, 0, cap);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return;
    }
    ssize_t n = read(fd, out, cap - 1);
    close(fd);
    if (n > 0 && out[n - 1] == '\n') {
        out[n - 1] = '\0';
    }
}

static uint32_t super_crc(const struct bt_slab_super *s)
{
    return bt_crc32c(0, s, offsetof(struct bt_slab_super, header_crc));
}

/* Computes the offsets and file size of a slab of n slots. */
static void slab_plan(struct bt_slab_super *s, uint32_t n)
{
    s->n_slots = n;
    s->headers_off = SLAB_PAGE;
    s->crcs_off =
        BT_ALIGN_UP(s->headers_off + (uint64_t)n * sizeof(struct bt_slot_header), SLAB_PAGE);
    s->flows_off = BT_ALIGN_UP(s->crcs_off + (uint64_t)n * s->n_layers * 4, SLAB_PAGE);
    s->data_off =
        BT_ALIGN_UP(s->flows_off + (uint64_t)s->n_flow_words * sizeof(bt_flow_word_t), SLAB_PAGE);
    s->file_bytes = s->data_off + (uint64_t)n * s->slot_bytes;
}

/* Returns whether this file is a slab, or an unfinished one. */
static bool was_slab(int fd, const struct stat *st)
{
    uint64_t magic;
    return S_ISREG(st->st_mode) && pread(fd, &magic, sizeof(magic), 0) == sizeof(magic) &&
           (magic == BT_SLAB_MAGIC || magic == 0);
}

static bool own_group(gid_t gid)
{
    gid_t groups[256];
    int n = getgroups(BT_ARRAY_LEN(groups), groups);
    bool own = gid == getegid();
    for (int i = 0; i < n; i++) {
        own = own || groups[i] == gid;
    }
    return own;
}

/* NULL, or the reason why another user may have made this file: every user can write to its folder
 * (/dev/shm). A user who has the file open, or has another name for it, could write into the
 * cache. */
static const char *foreign(const struct stat *st)
{
    if (!S_ISREG(st->st_mode)) {
        return "it is not a regular file";
    }
    if (st->st_uid != geteuid()) {
        return "it belongs to another user";
    }
    if (!own_group(st->st_gid)) {
        return "it belongs to a group that is not this user's";
    }
    return st->st_nlink > 1 ? "it has more than one name" : NULL;
}

/* Returns whether users other than owner and group may open it. Also true if they could until a
 * moment ago. */
static bool open_to_others(const struct stat *st)
{
    return (st->st_mode & (S_IRWXO | S_ISUID | S_ISGID)) != 0;
}

/* Checks that path still names the open file. */
static bt_status_t same_file(int fd, const char *path)
{
    struct stat by_fd, by_path;
    if (lstat(path, &by_path) != 0) {
        return errno == ENOENT || errno == ENOTDIR ? BT_ERR_NOT_FOUND : BT_ERR_IO;
    }
    if (fstat(fd, &by_fd) != 0) {
        return BT_ERR_IO;
    }
    return by_fd.st_ino == by_path.st_ino && by_fd.st_dev == by_path.st_dev ? BT_OK : BT_ERR_EXISTS;
}

/* Opens path as an empty file with exclusive ownership. A slab whose owner has ended is unlinked
 * and made anew: processes that still map the old file keep its pages and do no harm. A file that
 * is not a slab stays unchanged. */
static bt_status_t slab_own(const char *path, int *fd_p, char *err, size_t cap)
{
    for (int tries = 0; tries < 16; tries++) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0660);
        if (fd < 0) {
            slab_errf(err, cap, "cannot create the slab %s: %s. %s", path, strerror(errno),
                      bt_file_remedy(errno,
                                     "kvstore.slab_path is a file in a folder that is there and "
                                     "that the kvstore may write, best in memory as /dev/shm"));
            return BT_ERR_IO;
        }
        struct flock lk = {
            .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCK_OWNER, .l_len = 1};
        if (fcntl(fd, F_OFD_SETLK, &lk) != 0) {
            bool busy = errno == EAGAIN || errno == EACCES;
            slab_errf(err, cap,
                      busy ? "the slab %s belongs to another running kvstore: a node has exactly "
                             "one; stop that one, or give this one its own node.id and run_dir"
                           : "cannot lock the slab %s",
                      path);
            close(fd);
            return busy ? BT_ERR_EXISTS : BT_ERR_IO;
        }
        struct stat by_fd;
        if (same_file(fd, path) != BT_OK || fstat(fd, &by_fd) != 0) {
            close(fd); /* the file was replaced between open and lock */
            continue;
        }
        const char *why = foreign(&by_fd);
        if (why != NULL) {
            slab_errf(err, cap,
                      "%s is left as it is: %s. Remove it, or give another kvstore.slab_path", path,
                      why);
            close(fd);
            return BT_ERR_CONFIG;
        }
        if (by_fd.st_size == 0 && !open_to_others(&by_fd)) {
            (void)fchmod(fd, 0660); /* independent of the umask: workers run as other users of the
                                       group */
            *fd_p = fd;
            return BT_OK;
        }
        if (by_fd.st_size != 0 && !was_slab(fd, &by_fd)) {
            slab_errf(err, cap,
                      "%s is not a slab of a kvstore and is left as it is: remove it, or give "
                      "another kvstore.slab_path",
                      path);
            close(fd);
            return BT_ERR_CONFIG;
        }
        unlink(path);
        close(fd);
    }
    slab_errf(err, cap, "cannot take the slab %s: it keeps being replaced", path);
    return BT_ERR_IO;
}

static void no_space(const char *path, int fd, uint64_t want, int why, char *err, size_t cap)
{
    struct statvfs vfs;
    uint64_t total = 0, left = 0;
    if (fstatvfs(fd, &vfs) == 0) {
        total = (uint64_t)vfs.f_blocks * vfs.f_frsize;
        left = (uint64_t)vfs.f_bavail * vfs.f_frsize;
    }
    slab_errf(err, cap,
              "no room for the slab %s: %llu MiB are wanted, its file system has %llu MiB of which "
              "%llu MiB are free (%s). Lower kvstore.slab_bytes, or enlarge it: mount -o "
              "remount,size=... /dev/shm, in Docker --shm-size",
              path, (unsigned long long)BT_DIV_UP(want, 1u << 20),
              (unsigned long long)(total >> 20), (unsigned long long)(left >> 20), strerror(why));
}

/* Reserves all bytes. ftruncate alone would succeed beyond a tmpfs's limit, and then the first
 * write there would raise SIGBUS. */
static bt_status_t slab_reserve(const char *path, int fd, uint64_t bytes,
                                void (*progress)(void *, double), void *arg, char *err, size_t cap)
{
    struct statvfs vfs;
    if (fstatvfs(fd, &vfs) == 0 && vfs.f_blocks != 0 &&
        bytes > (uint64_t)vfs.f_bavail * vfs.f_frsize) {
        no_space(path, fd, bytes, ENOSPC, err, cap);
        return BT_ERR_EXHAUSTED;
    }
    for (uint64_t at = 0; at < bytes; at += SLAB_STEP) {
        uint64_t n = BT_MIN((uint64_t)SLAB_STEP, bytes - at);
        int rc;
        do {
            rc = posix_fallocate(fd, (off_t)at, (off_t)n);
        } while (rc == EINTR);
        if (rc != 0) {
            no_space(path, fd, bytes, rc, err, cap);
            return rc == ENOSPC || rc == ENOMEM ? BT_ERR_EXHAUSTED : BT_ERR_IO;
        }
        if (progress != NULL) {
            progress(arg, 0.8 * (double)(at + n) / (double)bytes);
        }
    }
    return BT_OK;
}

/* Registers the area, so that the log names the file if another process cuts it. A worker knows the
 * file only by its descriptor. */
static void slab_guard(int fd, const void *meta, uint64_t meta_bytes, const void *body,
                       uint64_t body_bytes)
{
    char link[64], path[512];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof(path) - 1);
    path[n > 0 ? n : 0] = '\0';
    bt_slab_guard_add(meta, meta_bytes, path);
    bt_slab_guard_add(body, body_bytes, path);
}

/* Maps both halves and fills s; the first half is read-only for a worker. */
static bt_status_t slab_mmap(struct bt_slab *s, const struct bt_slab_super *super, bool owner,
                             char *err, size_t cap)
{
    int prot = owner ? PROT_READ | PROT_WRITE : PROT_READ;
    uint8_t *meta = mmap(NULL, super->flows_off, prot, MAP_SHARED, s->fd, 0);
    if (meta == MAP_FAILED) {
        slab_errf(err, cap, "cannot map the slab: %s", strerror(errno));
        return BT_ERR_NO_MEMORY;
    }
    uint64_t rest = super->file_bytes - super->flows_off;
    uint8_t *body =
        mmap(NULL, rest, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, (off_t)super->flows_off);
    if (body == MAP_FAILED) {
        slab_errf(err, cap, "cannot map the slab's %llu MiB of data: %s",
                  (unsigned long long)(rest >> 20), strerror(errno));
        munmap(meta, super->flows_off);
        return BT_ERR_NO_MEMORY;
    }
    slab_guard(s->fd, meta, super->flows_off, body, rest);
    s->super = (const struct bt_slab_super *)meta;
    s->headers = (struct bt_slot_header *)(meta + super->headers_off);
    s->crcs = (uint32_t *)(meta + super->crcs_off);
    s->flows = (bt_flow_word_t *)body;
    s->data = body + (super->data_off - super->flows_off);
    s->owner = owner;
    return BT_OK;
}

/* Writes to every page now, so that no request has to wait for a page fault. */
static void slab_prefault(struct bt_slab *s, void (*progress)(void *, double), void *arg)
{
    uint8_t *base = (uint8_t *)s->flows;
    uint64_t bytes = s->super->file_bytes - s->super->flows_off;
    for (uint64_t at = 0; at < bytes; at += SLAB_STEP) {
        uint64_t n = BT_MIN((uint64_t)SLAB_STEP, bytes - at);
#ifdef MADV_POPULATE_WRITE
        if (madvise(base + at, n, MADV_POPULATE_WRITE) != 0)
#endif
        {
            for (uint64_t i = 0; i < n; i += SLAB_PAGE) {
                *(volatile uint8_t *)(base + at + i) = 0;
            }
        }
        if (progress != NULL) {
            progress(arg, 0.8 + 0.2 * (double)(at + n) / (double)bytes);
        }
    }
}

/* Makes the superblock of a slab of this many bytes, except for boot_id, uuid and checksum. */
static bt_status_t plan_for(const struct bt_slab_spec *spec, struct bt_slab_super *plan_p,
                            char *err, size_t err_cap)
{
    const struct bt_kv_layout *layout = spec->layout;
    const uint64_t bytes = spec->bytes;
    struct bt_slab_super plan = {
        .magic = BT_SLAB_MAGIC,
        .version = BT_SLAB_VERSION,
        .slot_bytes = BT_ALIGN_UP(layout->block_bytes, SLAB_PAGE),
        .block_bytes = layout->block_bytes,
        .layout_id = layout->layout_id,
        .n_layers = layout->n_layers,
        .incarnation = spec->incarnation,
    };
    plan.n_flow_words =
        (uint32_t)BT_MAX(SLAB_FLOWS_MIN, BT_MIN(bytes / 16384, (uint64_t)SLAB_FLOWS_MAX));
    uint64_t fixed = 4 * SLAB_PAGE + (uint64_t)plan.n_flow_words * sizeof(bt_flow_word_t);
    uint64_t per = plan.slot_bytes + sizeof(struct bt_slot_header) + 4ull * plan.n_layers;
    uint64_t n = bytes > fixed ? (bytes - fixed) / per : 0;
    if (n < 2 || plan.slot_bytes == 0) {
        slab_errf(err, err_cap,
                  "kvstore.slab_bytes = %llu is too small: a block of this model takes %llu bytes, "
                  "at least %llu bytes are needed",
                  (unsigned long long)bytes, (unsigned long long)plan.slot_bytes,
                  (unsigned long long)(fixed + 2 * per));
        return BT_ERR_INVALID;
    }
    slab_plan(&plan, (uint32_t)BT_MIN(n, (uint64_t)UINT32_MAX / 2));
    memcpy(plan.root_key, spec->root->b, sizeof(plan.root_key));
    *plan_p = plan;
    return BT_OK;
}

bt_status_t bt_slab_create(const struct bt_slab_spec *spec,
                           void (*progress)(void *arg, double fraction), void *arg,
                           struct bt_slab **slab_p, char *err, size_t err_cap)
{
    struct bt_slab_super plan;
    bt_status_t st = plan_for(spec, &plan, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    read_line("/proc/sys/kernel/random/boot_id", plan.boot_id, sizeof(plan.boot_id));
    read_line("/proc/sys/kernel/random/uuid", plan.uuid, sizeof(plan.uuid));

    struct bt_slab *s = bt_calloc(1, sizeof(*s));
    st = slab_own(spec->path, &s->fd, err, err_cap);
    if (st != BT_OK) {
        free(s);
        return st;
    }
    st = slab_reserve(spec->path, s->fd, plan.file_bytes, progress, arg, err, err_cap);
    if (st != BT_OK) {
        goto err_file;
    }
    st = slab_mmap(s, &plan, true, err, err_cap);
    if (st != BT_OK) {
        goto err_file;
    }
    struct bt_slab_super *super = (struct bt_slab_super *)(uintptr_t)s->super;
    *super = plan;
    slab_prefault(s, progress, arg);
    /* Last, so that an unfinished slab never passes a check. */
    super->header_crc = super_crc(super);
    *slab_p = s;
    return BT_OK;

err_file:
    if (same_file(s->fd, spec->path) == BT_OK) {
        unlink(spec->path);
    }
    close(s->fd);
    free(s);
    return st;
}

/* Checks that the superblock is consistent and fits this process. */
static bt_status_t super_check(const struct bt_slab_super *s, uint64_t file_bytes,
                               const struct bt_kv_layout *layout, const struct bt_kv_key *root,
                               char *err, size_t cap)
{
    if (s->magic != BT_SLAB_MAGIC || s->header_crc != super_crc(s)) {
        slab_errf(err, cap, "this file is not a complete slab of Baton: magic or checksum differ");
        return BT_ERR_MISMATCH;
    }
    if (s->version != BT_SLAB_VERSION) {
        slab_errf(err, cap, "the slab has format version %u, this program knows %u: update both",
                  s->version, BT_SLAB_VERSION);
        return BT_ERR_MISMATCH;
    }
    if (s->layout_id != layout->layout_id) {
        slab_errf(err, cap,
                  "the slab holds KV of layout %016llx, this process uses %016llx: set the same "
                  "model.path, model.kv_dtype, model.mtp and kv.block_tokens in all daemons",
                  (unsigned long long)s->layout_id, (unsigned long long)layout->layout_id);
        return BT_ERR_MISMATCH;
    }
    if (memcmp(s->root_key, root->b, sizeof(s->root_key)) != 0) {
        char a[17], b[17];
        bt_hex(s->root_key, 8, a);
        bt_hex(root->b, 8, b);
        slab_errf(err, cap,
                  "the slab belongs to root key %s..., this process has %s...: the model's weights "
                  "or settings (model.*, engine.deterministic) differ",
                  a, b);
        return BT_ERR_MISMATCH;
    }
    struct bt_slab_super want = *s;
    slab_plan(&want, s->n_slots);
    if (want.headers_off != s->headers_off || want.crcs_off != s->crcs_off ||
        want.flows_off != s->flows_off || want.data_off != s->data_off ||
        want.file_bytes != s->file_bytes || s->file_bytes > file_bytes ||
        s->n_layers != layout->n_layers || s->block_bytes != layout->block_bytes) {
        slab_errf(err, cap, "the slab's sizes contradict each other or the file's length");
        return BT_ERR_MISMATCH;
    }
    return BT_OK;
}

/* rows: make the CRC rows writable. */
static bt_status_t slab_map(int fd, bool rows, const struct bt_kv_layout *layout,
                            const struct bt_kv_key *root, struct bt_slab **slab_p, char *err,
                            size_t err_cap)
{
    struct stat stt;
    if (fstat(fd, &stt) != 0) {
        slab_errf(err, err_cap, "cannot stat the slab: %s", strerror(errno));
        return BT_ERR_IO;
    }
    if ((uint64_t)stt.st_size < SLAB_PAGE) {
        slab_errf(err, err_cap, "the slab file has %llu bytes: less than its first page",
                  (unsigned long long)stt.st_size);
        return BT_ERR_MISMATCH;
    }
    struct bt_slab_super *page = mmap(NULL, SLAB_PAGE, PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) {
        slab_errf(err, err_cap, "cannot map the slab: %s", strerror(errno));
        return BT_ERR_IO;
    }
    struct bt_slab_super super = *page; /* a copy, so that the checked values are the ones that are
                                           used */
    munmap(page, SLAB_PAGE);
    bt_status_t st = super_check(&super, (uint64_t)stt.st_size, layout, root, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    struct bt_slab *s = bt_calloc(1, sizeof(*s));
    s->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (s->fd < 0) {
        slab_errf(err, err_cap, "cannot duplicate the slab's descriptor: %s", strerror(errno));
        free(s);
        return BT_ERR_IO;
    }
    struct flock lk = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = LOCK_USERS, .l_len = 1};
    if (fcntl(s->fd, F_OFD_SETLK, &lk) != 0) {
        slab_errf(err, err_cap, "cannot lock the slab: %s", strerror(errno));
        st = BT_ERR_IO;
    } else {
        st = slab_mmap(s, &super, false, err, err_cap);
    }
    if (st != BT_OK) {
        close(s->fd);
        free(s);
        return st;
    }
    if (rows && mprotect(s->crcs, super.flows_off - super.crcs_off, PROT_READ | PROT_WRITE) != 0) {
        slab_errf(err, err_cap, "cannot write the slab's CRCs: %s", strerror(errno));
        bt_slab_unmap(s);
        return BT_ERR_IO;
    }
    *slab_p = s;
    return BT_OK;
}

bt_status_t bt_slab_map(int fd, const struct bt_kv_layout *layout, const struct bt_kv_key *root,
                        struct bt_slab **slab_p, char *err, size_t err_cap)
{
    return slab_map(fd, false, layout, root, slab_p, err, err_cap);
}

bt_status_t bt_slab_map_rows(int fd, const struct bt_kv_layout *layout,
                             const struct bt_kv_key *root, struct bt_slab **slab_p, char *err,
                             size_t err_cap)
{
    return slab_map(fd, true, layout, root, slab_p, err, err_cap);
}

int bt_slab_open_again(const struct bt_slab *s)
{
    char self[64];
    snprintf(self, sizeof(self), "/proc/self/fd/%d", s->fd);
    return open(self, O_RDWR | O_CLOEXEC);
}

/* ---- taking over ---- */

/* Waits until no other process maps the slab, but at most wait_ms: workers notice soon that they
 * must let go. */
static bool wait_unused(int fd, uint32_t wait_ms)
{
    for (uint32_t ms = 0;; ms += 10) {
        struct flock lk = {
            .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCK_USERS, .l_len = 1};
        if (fcntl(fd, F_OFD_GETLK, &lk) != 0) {
            return false;
        }
        if (lk.l_type == F_UNLCK) {
            return true;
        }
        if (ms >= wait_ms) {
            return false;
        }
        usleep(10000);
    }
}

/* Returns whether the file is complete, of this boot, and as create would make it. */
static bool left_fits(int fd, const struct bt_slab_super *plan, const struct bt_kv_layout *layout,
                      const struct bt_kv_key *root, char *err, size_t cap)
{
    struct bt_slab_super super;
    struct stat st;
    char boot[sizeof(super.boot_id)];
    read_line("/proc/sys/kernel/random/boot_id", boot, sizeof(boot));
    if (pread(fd, &super, sizeof(super), 0) != (ssize_t)sizeof(super) || fstat(fd, &st) != 0) {
        slab_errf(err, cap, "it cannot be read");
        return false;
    }
    if (super_check(&super, (uint64_t)st.st_size, layout, root, err, cap) != BT_OK) {
        return false;
    }
    if (super.n_slots != plan->n_slots || super.n_flow_words != plan->n_flow_words ||
        super.file_bytes != plan->file_bytes) {
        slab_errf(err, cap, "it is of another size");
        return false;
    }
    if ((uint64_t)st.st_blocks * 512 < plan->file_bytes ||
        memcmp(super.boot_id, boot, sizeof(boot)) != 0) {
        slab_errf(err, cap, "it is incomplete, or from before the last boot");
        return false;
    }
    return true;
}

bt_status_t bt_slab_adopt(const struct bt_slab_spec *spec, uint32_t wait_ms,
                          struct bt_slab **slab_p, char *err, size_t err_cap)
{
    struct bt_slab_super plan;
    if (plan_for(spec, &plan, err, err_cap) != BT_OK) {
        return BT_ERR_NOT_FOUND; /* create logs this case */
    }
    int fd = open(spec->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        slab_errf(err, err_cap, "there is no such file");
        return BT_ERR_NOT_FOUND;
    }
    struct flock lk = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCK_OWNER, .l_len = 1};
    struct bt_slab *s = bt_calloc(1, sizeof(*s));
    s->fd = fd;
    struct stat st;
    const char *why = fstat(fd, &st) != 0    ? "its owner and mode cannot be read"
                      : foreign(&st) != NULL ? foreign(&st)
                      : open_to_others(&st)  ? "its mode lets other users open it"
                                             : NULL;
    if (why != NULL) {
        slab_errf(err, err_cap, "%s", why);
    } else if (fcntl(fd, F_OFD_SETLK, &lk) != 0) {
        slab_errf(err, err_cap, "it belongs to another running kvstore");
    } else if (!left_fits(fd, &plan, spec->layout, spec->root, err, err_cap)) {
        /* logged already */
    } else if (!wait_unused(fd, wait_ms)) {
        slab_errf(err, err_cap, "a worker of the previous kvstore still maps it");
    } else if (slab_mmap(s, &plan, true, err, err_cap) == BT_OK) {
        struct bt_slab_super *super = (struct bt_slab_super *)(uintptr_t)s->super;
        /* It is not part of the checksum, so a kill here loses nothing. */
        super->incarnation = spec->incarnation;
        memset((void *)s->flows, 0, super->n_flow_words * sizeof(*s->flows));
        *slab_p = s;
        return BT_OK;
    }
    close(fd);
    free(s);
    return BT_ERR_NOT_FOUND;
}

bt_status_t bt_slab_unlink(const struct bt_slab *s, const char *path, char *err, size_t err_cap)
{
    bt_status_t st = same_file(s->fd, path);
    if (st == BT_OK && unlink(path) != 0) {
        st = errno == ENOENT ? BT_ERR_NOT_FOUND : BT_ERR_IO;
    }
    if (st == BT_ERR_EXISTS) {
        slab_errf(err, err_cap,
                  "another program replaced the slab's file while it was in use; the new file is "
                  "left as it is. Remove it if it is not needed");
    } else if (st == BT_ERR_NOT_FOUND) {
        slab_errf(err, err_cap, "another program removed the slab's file while it was in use");
    } else if (st != BT_OK) {
        slab_errf(err, err_cap, "the slab's file cannot be removed: %s", strerror(errno));
    }
    return st;
}

void bt_slab_unmap(struct bt_slab *s)
{
    if (s == NULL) {
        return;
    }
    uint64_t flows_off = s->super->flows_off, file_bytes = s->super->file_bytes;
    bt_slab_guard_remove(s->flows);
    bt_slab_guard_remove(s->super);
    munmap(s->flows, file_bytes - flows_off);
    munmap((void *)(uintptr_t)s->super, flows_off);
    close(s->fd);
    free(s);
}

uint32_t bt_slab_segment_seed(const struct bt_kv_key *key, uint32_t layer, uint64_t layout_id,
                              uint32_t bytes)
{
    struct {
        struct bt_kv_key key;
        uint64_t layout_id;
        uint32_t layer, bytes;
    } seed = {*key, layout_id, layer, bytes};
    _Static_assert(sizeof(seed) == 48, "the seed has no padding");
    return bt_crc32c(0, &seed, sizeof(seed));
}

uint32_t bt_slab_segment_crc(const struct bt_kv_key *key, uint32_t layer, uint64_t layout_id,
                             const void *seg, uint32_t bytes)
{
    return bt_crc32c(bt_slab_segment_seed(key, layer, layout_id, bytes), seg, bytes);
}

void bt_slab_private_key(uint64_t request, uint32_t epoch, uint32_t index, struct bt_kv_key *key_p)
{
    struct {
        char tag[16];
        uint64_t request;
        uint32_t epoch, index;
    } name = {"baton-private-1", request, epoch, index};
    _Static_assert(sizeof(name) == 32, "the name has no padding");
    bt_sha256(&name, sizeof(name), key_p->b);
}
