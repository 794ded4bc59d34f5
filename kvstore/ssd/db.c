/* RocksDB behind a queue. The index thread owns the database handle. Operations are queued to it
 * under a lock and come back in the same way, with an eventfd that wakes the loop. */
#include "kvstore/ssd/db.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <rocksdb/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/crc32c.h"
#include "common/conf/conf.h"
#include "common/log/log.h"

#define RECORD_VERSION 3
#define BATCH_MAX      4096
#define IDENTITY_KEY   "identity" /* shorter than any block's key */
#define NO_LOG         6
#define WRITE_BUFFER   (8u << 20)

struct record { /* value of a block's key; little-endian, as all supported machines are */
    uint32_t version, slot, generation, depth, digest;
    uint32_t used; /* time of last use; in version 2 seconds since 1970 */
    uint32_t tenant;
    uint32_t crc; /* CRC32C over the key and the fields above */
};

struct record_v1 { /* the format before there were tenants */
    uint32_t version, slot, generation, depth, digest, used_s;
    uint32_t crc;
};

struct queue {
    struct bt_ssd_db_op *head, **tail;
};

struct bt_ssd_db {
    struct bt_ssd_db_config c;
    bt_ssd_record_fn on_record; /* called while loading */
    void *record_arg;
    char *path;
    rocksdb_options_t *opts;
    rocksdb_writeoptions_t *sync, *lazy;
    rocksdb_t *db; /* NULL: the disk returned an error */
    pthread_t thread;
    pthread_mutex_t lock; /* of todo, ready, stop, health, why */
    pthread_cond_t wake;
    struct queue todo, ready;
    bool stop, threaded;
    bool renew;
    bool down, told_down; /* as the index thread knows it; as the loop was told */
    bool emptied;         /* the loop was not told yet */
    char why[256];
    int efd;
    struct bt_loop_fd *w;
};

static void queue_init(struct queue *q)
{
    q->head = NULL;
    q->tail = &q->head;
}

static void queue_put(struct queue *q, struct bt_ssd_db_op *op)
{
    op->next = NULL;
    *q->tail = op;
    q->tail = &op->next;
}

static struct bt_ssd_db_op *queue_get(struct queue *q)
{
    struct bt_ssd_db_op *op = q->head;
    if (op != NULL) {
        q->head = op->next;
        if (q->head == NULL) {
            q->tail = &q->head;
        }
    }
    return op;
}

/* ---- records ---- */

static uint32_t record_crc(const struct bt_kv_key *key, const struct record *r)
{
    return bt_crc32c(bt_crc32c(0, key, sizeof(*key)), r, offsetof(struct record, crc));
}

static void record_make(const struct bt_ssd_db_op *op, struct record *r)
{
    *r = (struct record){.version = RECORD_VERSION,
                         .slot = op->slot,
                         .generation = op->e.generation,
                         .depth = op->e.depth,
                         .digest = op->e.digest,
                         .used = op->e.used,
                         .tenant = op->tenant};
    r->crc = record_crc(&op->e.key, r);
}

/* false: the record is damaged or has an unknown version. */
static bool record_read(const struct bt_kv_key *key, const char *v, size_t len, struct record *r)
{
    struct record_v1 old;
    if (len == sizeof(*r)) {
        memcpy(r, v, sizeof(*r));
        bool whole = r->crc == record_crc(key, r);
        if (r->version == 2) {
            r->used = bt_ssd_moment_s(r->used);
        }
        return whole && (r->version == RECORD_VERSION || r->version == 2);
    }
    if (len != sizeof(old)) {
        return false;
    }
    memcpy(&old, v, sizeof(old));
    *r = (struct record){.slot = old.slot,
                         .generation = old.generation,
                         .depth = old.depth,
                         .digest = old.digest,
                         .used = bt_ssd_moment_s(old.used_s)};
    return old.version == 1 && old.crc == bt_crc32c(bt_crc32c(0, key, sizeof(*key)), &old,
                                                    offsetof(struct record_v1, crc));
}

/* ---- the database ---- */

/* Takes an error message of RocksDB; true: there was none. */
static bool no_error(char *err, char *why, size_t cap)
{
    if (err == NULL) {
        return true;
    }
    snprintf(why, cap, "%s", err);
    rocksdb_free(err);
    return false;
}

static rocksdb_options_t *make_options(void)
{
    rocksdb_options_t *plain = rocksdb_options_create(), *o = rocksdb_options_create();
    char *err = NULL;
    /* The OPTIONS file cannot store the log level set below. The file is not needed, but RocksDB
     * 8.x and later do not open a database without it, and the C interface has no other way to set
     * this option. */
    rocksdb_get_options_from_string(plain, "fail_if_options_file_error=false", o, &err);
    rocksdb_free(err); /* versions that do not know the name ignore it */
    rocksdb_options_destroy(plain);
    rocksdb_options_set_create_if_missing(o, 1);
    rocksdb_options_set_write_buffer_size(o, WRITE_BUFFER);
    rocksdb_options_set_max_write_buffer_number(o, 2);
    rocksdb_options_set_max_total_wal_size(o, 4 * WRITE_BUFFER);
    rocksdb_options_set_max_open_files(o, 64);
    rocksdb_options_set_max_background_jobs(o, 2);
    rocksdb_options_set_compression(o, rocksdb_no_compression); /* hashes do not compress */
    /* No LOG file: the level is above all of RocksDB's. The library of Debian and Ubuntu is built
     * with assertions, and aborts if it writes to a LOG after the disk has returned an error.
     * Errors are returned as a status and are in this daemon's log. */
    rocksdb_options_set_info_log_level(o, NO_LOG);
    rocksdb_options_set_keep_log_file_num(o, 1);
    rocksdb_options_set_stats_dump_period_sec(o, 0);
    rocksdb_options_set_paranoid_checks(o, 1);
    return o;
}

/* Removes files from the index's folder whose names have this beginning and end. */
static void remove_files(const char *path, const char *begin, const char *end)
{
    char name[4096];
    DIR *d = opendir(path);
    if (d == NULL) {
        return;
    }
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        size_t n = strlen(e->d_name), tail = strlen(end);
        if (e->d_type == DT_REG && strncmp(e->d_name, begin, strlen(begin)) == 0 && n >= tail &&
            strcmp(e->d_name + n - tail, end) == 0) {
            snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
            unlink(name);
        }
    }
    closedir(d);
}

/* Removes the files, because RocksDB may be unable to destroy a database that it cannot open. */
static void wipe(const char *path)
{
    char *err = NULL;
    rocksdb_options_t *o = rocksdb_options_create();
    rocksdb_destroy_db(o, path, &err);
    rocksdb_options_destroy(o);
    rocksdb_free(err);
    remove_files(path, "", "");
}

static bool put_identity(struct bt_ssd_db *s, char *why, size_t cap)
{
    char *err = NULL;
    rocksdb_put(s->db, s->sync, IDENTITY_KEY, strlen(IDENTITY_KEY), (const char *)&s->c.identity,
                sizeof(s->c.identity), &err);
    return no_error(err, why, cap);
}

/* Reads all records. false: the database is damaged (why says how) or belongs to another file or
 * model (why is empty). */
static bool scan(struct bt_ssd_db *s, char *why, size_t cap)
{
    rocksdb_readoptions_t *ro = rocksdb_readoptions_create();
    rocksdb_readoptions_set_verify_checksums(ro, 1);
    rocksdb_readoptions_set_fill_cache(ro, 0);
    rocksdb_iterator_t *it = rocksdb_create_iterator(s->db, ro);
    bool ours = false, empty = true;
    uint32_t bad = 0;
    why[0] = '\0';
    /* The identity comes first: records of another identity must not be announced. */
    rocksdb_iter_seek(it, IDENTITY_KEY, strlen(IDENTITY_KEY));
    if (rocksdb_iter_valid(it)) {
        size_t kl, vl;
        const char *k = rocksdb_iter_key(it, &kl), *v = rocksdb_iter_value(it, &vl);
        ours = kl == strlen(IDENTITY_KEY) && memcmp(k, IDENTITY_KEY, kl) == 0 &&
               vl == sizeof(s->c.identity) && memcmp(v, &s->c.identity, vl) == 0;
    }
    for (rocksdb_iter_seek_to_first(it); rocksdb_iter_valid(it); rocksdb_iter_next(it)) {
        size_t kl, vl;
        const char *k = rocksdb_iter_key(it, &kl), *v = rocksdb_iter_value(it, &vl);
        struct bt_kv_key key;
        struct record r;
        empty = false;
        if (!ours) {
            break;
        }
        if (kl == strlen(IDENTITY_KEY)) {
            continue;
        }
        if (kl != sizeof(key)) {
            bad++;
            continue;
        }
        memcpy(&key, k, sizeof(key));
        if (!record_read(&key, v, vl, &r)) {
            bad++;
            continue;
        }
        struct bt_ssd_entry e = {.key = key,
                                 .depth = r.depth & 0xffffff,
                                 .digest = r.digest,
                                 .generation = r.generation,
                                 .used = r.used};
        s->on_record(s->record_arg, r.slot, &e, r.tenant);
    }
    char *err = NULL;
    rocksdb_iter_get_error(it, &err);
    bool whole = no_error(err, why, cap);
    rocksdb_iter_destroy(it);
    rocksdb_readoptions_destroy(ro);
    if (bad > 0) {
        BT_WARN("ssd_bad_records", "n=%u why=%s", bad, "wrong checksum; left out");
    }
    return whole && (ours || empty);
}

/* Links and files of other users are neither read nor removed. */
static bool is_own(const struct bt_ssd_db *s, char *why, size_t cap)
{
    bt_status_t st = bt_conf_dir_private(s->path, why, cap);
    return st == BT_OK || st == BT_ERR_NOT_FOUND;
}

static bool open_db(struct bt_ssd_db *s, char *why, size_t cap)
{
    char *err = NULL;
    (void)mkdir(s->path, 0700); /* RocksDB would use the umask's permissions */
    /* Temporary OPTIONS files (make_options): each start would leave one more. */
    remove_files(s->path, "OPTIONS-", ".dbtmp");
    s->db = rocksdb_open(s->opts, s->path, &err);
    return no_error(err, why, cap);
}

static void close_db(struct bt_ssd_db *s)
{
    if (s->db != NULL) {
        rocksdb_close(s->db);
        s->db = NULL;
    }
}

/* Makes an empty database with the current identity; its old content is lost. */
static bool start_over(struct bt_ssd_db *s, char *why, size_t cap)
{
    close_db(s);
    wipe(s->path);
    if (open_db(s, why, cap) && put_identity(s, why, cap)) {
        return true;
    }
    close_db(s);
    return false;
}

static bool damaged(const char *why)
{
    return strncmp(why, "Corruption", 10) == 0 || strstr(why, "does not exist") != NULL ||
           strstr(why, "No such file") != NULL;
}

/* Opens and reads the database. One that is damaged or belongs to another file is emptied. If the
 * disk returns an error, the database stays unchanged (false), unless this is the last try. */
static bool first_open(struct bt_ssd_db *s, bool last_try, char *why, size_t cap)
{
    if (!open_db(s, why, cap)) {
        if (!damaged(why) && !(last_try && strstr(why, "Input/output error") != NULL)) {
            return false;
        }
        BT_WARN("ssd_index_unreadable", "path=%s why=%s", s->path, why);
        return start_over(s, why, cap);
    }
    if (scan(s, why, cap)) {
        if (!put_identity(s, why, cap)) { /* it can at least be read */
            s->down = true;
            snprintf(s->why, sizeof(s->why), "%s", why);
        }
        return true;
    }
    if (why[0] != '\0' && !damaged(why) && !last_try) {
        close_db(s);
        return false;
    }
    BT_WARN("ssd_index_emptied", "path=%s why=%s", s->path,
            why[0] != '\0' ? why : "it belongs to another slab file, model or layout");
    return start_over(s, why, cap);
}

/* ---- the index thread ---- */

static bool flush_data(const struct bt_ssd_db *s, char *why, size_t cap)
{
    int rc;
    if (s->c.sys != NULL) {
        rc = s->c.sys->flush(s->c.sys->arg, s->c.data_fd);
    } else {
        rc = fdatasync(s->c.data_fd) == 0 ? 0 : -errno;
    }
    if (rc != 0) {
        snprintf(why, cap, "flushing the data: %s", strerror(-rc));
    }
    return rc == 0;
}

/* Writes the operations of a batch; false: any of them may be lost. */
static bool write_batch(struct bt_ssd_db *s, const struct bt_ssd_db_op *ops, char *why, size_t cap)
{
    rocksdb_writebatch_t *b = rocksdb_writebatch_create();
    bool puts = false, durable = false, ok = true;
    for (const struct bt_ssd_db_op *op = ops; op != NULL; op = op->next) {
        const char *key = (const char *)op->e.key.b;
        if (op->verb == BT_SSD_DELETE) {
            rocksdb_writebatch_delete(b, key, sizeof(op->e.key.b));
        } else {
            struct record r;
            record_make(op, &r);
            rocksdb_writebatch_put(b, key, sizeof(op->e.key.b), (const char *)&r, sizeof(r));
        }
        puts = puts || op->verb == BT_SSD_PUT;
        durable = durable || op->verb != BT_SSD_TOUCH;
    }
    if (puts) {
        ok = flush_data(s, why, cap);
    }
    if (ok) {
        char *err = NULL;
        rocksdb_write(s->db, durable ? s->sync : s->lazy, b, &err);
        ok = no_error(err, why, cap);
    }
    rocksdb_writebatch_destroy(b);
    return ok;
}

static void hand_back(struct bt_ssd_db *s)
{
    uint64_t one = 1;
    ssize_t n = write(s->efd, &one, sizeof(one));
    (void)n; /* the counter cannot be full */
}

static void set_emptied(struct bt_ssd_db *s, bool emptied)
{
    if (emptied) {
        BT_WARN(
            "ssd_index_emptied", "path=%s why=%s", s->path,
            "its files were removed or damaged while in use; the records of all blocks are written "
            "again");
        pthread_mutex_lock(&s->lock);
        s->emptied = true;
        pthread_mutex_unlock(&s->lock);
    }
}

static bool has_identity(struct bt_ssd_db *s)
{
    rocksdb_readoptions_t *ro = rocksdb_readoptions_create();
    size_t len = 0;
    char *err = NULL, *v = rocksdb_get(s->db, ro, IDENTITY_KEY, strlen(IDENTITY_KEY), &len, &err);
    bool has = v != NULL || err != NULL; /* a read error does not mean that the database is empty */
    rocksdb_readoptions_destroy(ro);
    rocksdb_free(v);
    rocksdb_free(err);
    return has;
}

/* After an error of the disk RocksDB accepts no writes until it is opened again. */
static bool reopen(struct bt_ssd_db *s, char *why, size_t cap)
{
    close_db(s);
    if (!is_own(s, why, cap)) {
        return false;
    }
    if (open_db(s, why, cap)) {
        bool empty = !has_identity(s);       /* its files were removed: these are new ones */
        bool ok = put_identity(s, why, cap); /* a test whether writes work */
        set_emptied(s, empty);
        return ok;
    }
    if (!damaged(why) || !start_over(s, why, cap)) {
        return false;
    }
    set_emptied(s, true);
    return true;
}

/* Ends a batch. After a failure its deletes go back to the front of the queue; the others are
 * reported as failed. */
static void batch_ended(struct bt_ssd_db *s, struct bt_ssd_db_op *ops, bool ok)
{
    struct queue again;
    queue_init(&again);
    pthread_mutex_lock(&s->lock);
    while (ops != NULL) {
        struct bt_ssd_db_op *op = ops;
        ops = op->next;
        if (!ok && op->verb == BT_SSD_DELETE) {
            queue_put(&again, op);
        } else {
            op->st = ok ? BT_OK : BT_ERR_IO;
            queue_put(&s->ready, op);
        }
    }
    if (again.head != NULL) { /* before operations that came later */
        *again.tail = s->todo.head;
        s->todo.tail = s->todo.head != NULL ? s->todo.tail : again.tail;
        s->todo.head = again.head;
    }
    pthread_mutex_unlock(&s->lock);
    hand_back(s);
}

static void set_health(struct bt_ssd_db *s, bool down, const char *why)
{
    pthread_mutex_lock(&s->lock);
    s->down = down;
    snprintf(s->why, sizeof(s->why), "%s", why);
    pthread_mutex_unlock(&s->lock);
    hand_back(s);
}

/* Waits for work or, while the disk returns errors, for the next attempt. */
static struct bt_ssd_db_op *next_batch(struct bt_ssd_db *s, bool *stop_p)
{
    struct queue batch;
    queue_init(&batch);
    pthread_mutex_lock(&s->lock);
    if (s->down && !s->stop) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += (time_t)(s->c.retry_ms / 1000);
        until.tv_nsec += (long)(s->c.retry_ms % 1000) * 1000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        while (!s->stop && pthread_cond_timedwait(&s->wake, &s->lock, &until) == 0) {
        }
    }
    while (!s->stop && !s->down && s->todo.head == NULL && !s->renew) {
        pthread_cond_wait(&s->wake, &s->lock);
    }
    if (s->renew) {
        s->renew = false;
        if (!s->down) {
            s->down = true;
            snprintf(s->why, sizeof(s->why), "its files were removed");
            hand_back(s);
        }
    }
    for (int n = 0; !s->down && n < BATCH_MAX && s->todo.head != NULL; n++) {
        queue_put(&batch, queue_get(&s->todo));
    }
    *stop_p = s->stop;
    pthread_mutex_unlock(&s->lock);
    return batch.head;
}

static void *index_thread(void *arg)
{
    struct bt_ssd_db *s = arg;
    char why[256];
    for (;;) {
        bool stop;
        struct bt_ssd_db_op *ops = next_batch(s, &stop);
        if (ops != NULL) {
            bool ok = write_batch(s, ops, why, sizeof(why));
            if (!ok) {
                set_health(s, true, why);
            }
            batch_ended(s, ops, ok);
            continue;
        }
        if (stop) { /* nothing is left that could be written */
            return NULL;
        }
        if (s->down && reopen(s, why, sizeof(why)) && flush_data(s, why, sizeof(why))) {
            set_health(s, false, "");
        }
    }
}

/* ---- control thread ---- */

static void run_ready(struct bt_ssd_db *s)
{
    for (;;) {
        pthread_mutex_lock(&s->lock);
        struct bt_ssd_db_op *op = queue_get(&s->ready);
        pthread_mutex_unlock(&s->lock);
        if (op == NULL) {
            return;
        }
        if (op->done != NULL) {
            op->done(op->arg, op);
        }
        free(op);
    }
}

static void tell_health(struct bt_ssd_db *s)
{
    char why[sizeof(s->why)];
    pthread_mutex_lock(&s->lock);
    bool down = s->down, emptied = s->emptied;
    s->emptied = false;
    memcpy(why, s->why, sizeof(why));
    pthread_mutex_unlock(&s->lock);
    if (down != s->told_down || emptied) {
        s->told_down = down;
        s->c.on_health(s->c.arg, down ? why : NULL, emptied);
    }
}

static void on_ready(void *arg, uint32_t events)
{
    struct bt_ssd_db *s = arg;
    uint64_t n;
    (void)events;
    if (read(s->efd, &n, sizeof(n)) == (ssize_t)sizeof(n)) {
        tell_health(s); /* before the operations that failed because of it */
        run_ready(s);
    }
}

bt_status_t bt_ssd_db_load(const struct bt_ssd_db_config *c, bool last_try,
                           bt_ssd_record_fn on_record, void *arg, struct bt_ssd_db **db_p,
                           char *err, size_t err_cap)
{
    struct bt_ssd_db *s = bt_calloc(1, sizeof(*s));
    char why[256] = "";
    s->c = *c;
    s->on_record = on_record;
    s->record_arg = arg;
    s->path = bt_strdup(c->path);
    s->opts = make_options();
    s->sync = rocksdb_writeoptions_create();
    rocksdb_writeoptions_set_sync(s->sync, 1);
    s->lazy = rocksdb_writeoptions_create();
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_t mono; /* the wall clock may be set back during a wait */
    pthread_condattr_init(&mono);
    pthread_condattr_setclock(&mono, CLOCK_MONOTONIC);
    pthread_cond_init(&s->wake, &mono);
    pthread_condattr_destroy(&mono);
    queue_init(&s->todo);
    queue_init(&s->ready);
    if (!is_own(s, why, sizeof(why))) {
        snprintf(err, err_cap, "kvstore.ssd.path: the index %s is left as it is: %s", s->path, why);
        bt_ssd_db_close(s);
        return BT_ERR_CONFIG;
    }
    if (!first_open(s, last_try, why, sizeof(why))) {
        bool full = strstr(why, "No space left") != NULL;
        snprintf(err, err_cap, "kvstore.ssd.path: the index in %s cannot be opened: %s. %s",
                 s->path, why, full ? "Free space on that disk" : "Check that disk");
        bt_ssd_db_close(s);
        return full ? BT_ERR_EXHAUSTED : BT_ERR_IO;
    }
    *db_p = s;
    return BT_OK;
}

void bt_ssd_db_start(struct bt_ssd_db *s)
{
    s->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    BT_ASSERT(s->efd >= 0);
    s->w = bt_loop_fd_add(s->c.loop, s->efd, EPOLLIN, on_ready, s);
    s->threaded = pthread_create(&s->thread, NULL, index_thread, s) == 0;
    BT_ASSERT(s->threaded);
    if (s->down) {
        hand_back(s);
    }
}

void bt_ssd_db_submit(struct bt_ssd_db *s, struct bt_ssd_db_op *op)
{
    pthread_mutex_lock(&s->lock);
    queue_put(&s->todo, op);
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

void bt_ssd_db_renew(struct bt_ssd_db *s)
{
    pthread_mutex_lock(&s->lock);
    s->renew = true;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

void bt_ssd_db_close(struct bt_ssd_db *s)
{
    if (s == NULL) {
        return;
    }
    if (s->threaded) {
        pthread_mutex_lock(&s->lock);
        s->stop = true;
        pthread_cond_signal(&s->wake);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->thread, NULL);
        bt_loop_fd_del(s->c.loop, s->w);
        close(s->efd);
        run_ready(s);
    }
    for (struct bt_ssd_db_op *op; (op = queue_get(&s->todo)) != NULL;) {
        free(op);
    }
    close_db(s);
    rocksdb_options_destroy(s->opts);
    rocksdb_writeoptions_destroy(s->sync);
    rocksdb_writeoptions_destroy(s->lazy);
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
    free(s->path);
    free(s);
}
