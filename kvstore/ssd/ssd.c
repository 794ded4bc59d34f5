/* The SSD tier: combines directory, block I/O and durable index. A write has this order: delete the
 * slot's old record durably (before that the slot is not free), write the data, flush, write the
 * record and sync (db.c), make the block findable. An eviction has this order: make the block
 * unfindable, delete its record durably, free the slot. Control thread, except check_crc. */
#include "kvstore/ssd/ssd.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/crc32c.h"
#include "common/base/list.h"
#include "common/base/map.h"
#include "common/base/sha256.h"
#include "common/log/log.h"
#include "common/policy/evict/ssd_dir.h"
#include "kvstore/ssd/opener.h"

#define READ_ERRORS_MAX                                                                            \
    3 /* failures in a row after which the disk is not used until a probe succeeds */
#define TOUCH_S     60 /* least time between two updates of a record's time of last use */
#define TICK_MS     250
#define BAD_TELL_NS (10ull * 1000000000)

struct job { /* one read or write */
    struct bt_ssd_op op;
    struct bt_list link; /* in ssd->jobs while the operation is under way */
    struct bt_ssd *s;
    uint32_t pos, slab_slot;
    struct bt_ssd_entry e;
    bt_ssd_done_fn done;
    void *arg;
};

struct bt_ssd {
    struct bt_ssd_config c;
    char *path;
    struct bt_ssd_file file; /* this field, dir and db are set when the files are open */
    struct bt_ssd_dir *dir;
    struct bt_ssd_db *db;
    struct bt_ssd_io *io;
    struct bt_ssd_opener *opener; /* set while they are not open */
    struct bt_map *writing;       /* key -> job, until its record is durable or given up */
    struct bt_list jobs;
    uint32_t forgetting; /* slots whose record is being deleted */
    uint32_t room;       /* slots that are kept free */
    bool removed;        /* its file was removed; this was logged */
    bool unrecorded;     /* the index lacks records of blocks that can be found */
    bool io_down, db_down, probing, closing;
    uint32_t read_failures; /* failures in a row */
    uint64_t bad_told_ns;
    struct bt_timer tick, probe_timer;
    struct bt_ssd_op probe;
    uint8_t *probe_buf;
    uint64_t probe_mark;
    struct bt_ssd_stats n;
    struct {
        struct bt_metric *written_bytes, *read_bytes, *read_errors, *write_errors, *crc_errors;
        struct bt_metric *evicted, *dropped, *blocks, *slots, *backlog, *up;
    } m;
};

static void make_room(struct bt_ssd *s);

static uint32_t moment_now(void)
{
    return bt_ssd_moment(bt_real_ns());
}

static void count(struct bt_metric *m, uint64_t *n, uint64_t by)
{
    *n += by;
    if (m != NULL) {
        bt_metric_add(m, by);
    }
}

/* ---- health ---- */

static bool usable(const struct bt_ssd *s)
{
    return s->dir != NULL && !s->io_down && !s->closing;
}

static void report(struct bt_ssd *s, bool was_up, const char *what, const char *why)
{
    bool up = !s->io_down && !s->db_down;
    if (up != was_up && !s->closing) {
        if (up) {
            BT_INFO("ssd_up", "path=%s blocks=%u", s->path, bt_ssd_dir_valid(s->dir));
        } else {
            BT_ERROR("ssd_down", "path=%s what=%s why=%s then=%s", s->path, what, why,
                     "the kvstore serves without the SSD and tries it again");
        }
    }
}

static void probe_start(void *arg);

static void io_failed(struct bt_ssd *s, const char *what, const char *why)
{
    bool was_up = !s->io_down && !s->db_down;
    if (s->io_down || s->closing) {
        return;
    }
    s->io_down = true;
    report(s, was_up, what, why);
    bt_timer_start(s->c.loop, &s->probe_timer, s->c.probe_ms, 0, probe_start, s);
}

static void probe_again(struct bt_ssd *s)
{
    s->probing = false;
    if (!s->closing) {
        bt_timer_start(s->c.loop, &s->probe_timer, s->c.probe_ms, 0, probe_start, s);
    }
}

/* true: an operation has been under way for longer than stall_ms. */
static bool stalled(const struct bt_ssd *s)
{
    if (bt_list_empty(&s->jobs)) {
        return false;
    }
    const struct job *oldest = BT_CONTAINER_OF(s->jobs.next, struct job, link);
    return bt_mono_ns() - oldest->op.submitted_ns > s->c.stall_ms * 1000000ull;
}

static void probe_read(struct bt_ssd_op *op)
{
    struct bt_ssd *s = BT_CONTAINER_OF(op, struct bt_ssd, probe);
    uint64_t mark;
    memcpy(&mark, s->probe_buf, sizeof(mark));
    if (op->res != 0 || mark != s->probe_mark || s->closing || stalled(s)) {
        probe_again(s);
        return;
    }
    bool was_up = !s->io_down && !s->db_down;
    s->probing = s->io_down = false;
    s->read_failures = 0;
    report(s, was_up, "", "");
    make_room(s);
}

static void probe_written(struct bt_ssd_op *op)
{
    struct bt_ssd *s = BT_CONTAINER_OF(op, struct bt_ssd, probe);
    if (op->res != 0 || s->closing) {
        probe_again(s);
        return;
    }
    memset(s->probe_buf, 0, BT_SSD_PAGE);
    op->write = false;
    op->done = probe_read;
    bt_ssd_io_submit(s->io, op);
}

/* Writes a page that belongs to no block, and reads it back. */
static void probe_start(void *arg)
{
    struct bt_ssd *s = arg;
    if (s->probing) {
        return;
    }
    s->probing = true;
    bt_random(&s->probe_mark, sizeof(s->probe_mark));
    memset(s->probe_buf, 0x5a, BT_SSD_PAGE);
    memcpy(s->probe_buf, &s->probe_mark, sizeof(s->probe_mark));
    s->probe = (struct bt_ssd_op){.write = true,
                                  .buf = s->probe_buf,
                                  .off = BT_SSD_PROBE_OFF,
                                  .len = BT_SSD_PAGE,
                                  .done = probe_written};
    bt_ssd_io_submit(s->io, &s->probe);
}

static void rerecord(struct bt_ssd *s);

static void on_db_health(void *arg, const char *why, bool emptied)
{
    struct bt_ssd *s = arg;
    bool was_up = !s->io_down && !s->db_down;
    s->unrecorded = s->unrecorded || emptied;
    s->db_down = why != NULL;
    if (why != NULL) {
        count(s->m.write_errors, &s->n.write_errors, 1);
    }
    report(s, was_up, "index", why != NULL ? why : "");
    if (why == NULL && s->unrecorded) {
        rerecord(s);
    }
}

static void gauges(const struct bt_ssd *s)
{
    if (s->m.up != NULL) {
        bt_metric_set(s->m.up, s->dir != NULL && !s->io_down && !s->db_down);
        bt_metric_set(s->m.blocks, s->dir != NULL ? bt_ssd_dir_valid(s->dir) : 0);
        bt_metric_set(s->m.backlog, s->n.backlog);
    }
}

/* An open file keeps working after its name was removed, but the next start would not find it. A
 * file that was shortened fails for every block beyond its end. So both are checked. */
static void look_for_file(struct bt_ssd *s)
{
    uint64_t bytes = 0;
    bt_ssd_file_state_t is =
        s->dir != NULL ? bt_ssd_file_look(&s->file, s->path, &bytes) : BT_SSD_FILE_OK;
    if (is == BT_SSD_FILE_GONE && !s->removed) {
        BT_WARN("ssd_removed", "path=%s why=%s then=%s", s->path,
                "its file 'blocks' was removed, moved or replaced while the kvstore uses "
                "it",
                "the kvstore uses the open file until it stops, then its blocks are lost; move it "
                "back, or "
                "restart the kvstore to make a new one");
    }
    s->removed = is == BT_SSD_FILE_GONE;
    if (is == BT_SSD_FILE_CUT && !s->io_down) {
        BT_WARN("ssd_cut", "path=%s bytes=%llu of=%llu then=%s", s->path, (unsigned long long)bytes,
                (unsigned long long)bt_ssd_file_off(&s->file, s->file.n_slots),
                "its file 'blocks' was shortened; the kvstore restores its length, and blocks "
                "behind the cut "
                "are lost. To change its size set kvstore.ssd.bytes");
        if (bt_ssd_file_mend(&s->file) != BT_OK) {
            io_failed(s, "mending", "its file was cut and cannot be made longer");
        }
    }
}

/* The database also keeps working after its names were removed, but its content is lost at its end,
 * like the blocks. */
static void look_for_index(struct bt_ssd *s)
{
    char *path = bt_sprintf("%s/index/CURRENT", s->path);
    bool wanted = s->dir != NULL && !s->db_down && !s->removed;
    if (wanted && access(path, F_OK) != 0 && errno == ENOENT) {
        bt_ssd_db_renew(s->db);
    }
    free(path);
}

static void on_tick(void *arg)
{
    struct bt_ssd *s = arg;
    look_for_file(s);
    look_for_index(s);
    if (stalled(s)) {
        io_failed(s, "waiting", "the disk does not answer");
    }
    make_room(s);
    gauges(s);
}

/* ---- eviction ---- */

static void tell(const struct bt_ssd *s, bool added, uint32_t pos, const struct bt_ssd_entry *e)
{
    if (s->c.on_change != NULL && !s->closing) {
        s->c.on_change(s->c.arg, added, pos, &e->key, e->depth);
    }
}

static struct bt_ssd_db_op *db_op(const struct bt_ssd *s, bt_ssd_db_verb_t verb, uint32_t pos,
                                  const struct bt_ssd_entry *e)
{
    struct bt_ssd_db_op *op = bt_calloc(1, sizeof(*op));
    op->verb = verb;
    op->slot = pos;
    op->e = *e;
    op->tenant = s->c.tenants != NULL ? bt_tenants_tag(s->c.tenants, (uint8_t)e->group) : 0;
    return op;
}

static void on_rerecorded(void *arg, struct bt_ssd_db_op *op)
{
    struct bt_ssd *s = arg;
    s->unrecorded = s->unrecorded || op->st != BT_OK; /* then all are written again */
}

/* The index was emptied while in use: write the records of all blocks again. */
static void rerecord(struct bt_ssd *s)
{
    s->unrecorded = false;
    for (uint32_t pos = 0; pos < s->file.n_slots; pos++) {
        if (bt_ssd_dir_is_valid(s->dir, pos)) {
            struct bt_ssd_db_op *op = db_op(s, BT_SSD_PUT, pos, bt_ssd_dir_entry(s->dir, pos));
            op->done = on_rerecorded;
            op->arg = s;
            bt_ssd_db_submit(s->db, op);
        }
    }
}

static void on_forgotten(void *arg, struct bt_ssd_db_op *op)
{
    struct bt_ssd *s = arg;
    s->forgetting--;
    bt_ssd_dir_free(s->dir, op->slot);
}

/* Deletes the record of a BUSY slot, then frees the slot. */
static void forget_record(struct bt_ssd *s, uint32_t pos, const struct bt_ssd_entry *e)
{
    struct bt_ssd_db_op *op = db_op(s, BT_SSD_DELETE, pos, e);
    op->done = on_forgotten;
    op->arg = s;
    s->forgetting++;
    bt_ssd_db_submit(s->db, op);
}

/* why: for the log. */
static void say_gone(const struct bt_ssd_entry *e, const char *why)
{
    if (bt_log_enabled(BT_LOG_DEBUG)) {
        char key[17];
        bt_hex(e->key.b, 8, key);
        BT_DEBUG("block_gone", "tier=ssd key=%s why=%s", key, why);
    }
}

static void forget(struct bt_ssd *s, uint32_t pos, const char *why)
{
    struct bt_ssd_entry e = *bt_ssd_dir_entry(s->dir, pos);
    say_gone(&e, why);
    bt_ssd_dir_remove(s->dir, pos);
    tell(s, false, pos, &e);
    forget_record(s, pos, &e);
}

/* Keeps some slots free in advance, since a slot can be written only after a synced delete. */
static void make_room(struct bt_ssd *s)
{
    if (!usable(s) || s->db_down) {
        return;
    }
    while (bt_ssd_dir_free_count(s->dir) + s->forgetting < s->room) {
        uint32_t pos = bt_ssd_dir_victim(s->dir);
        if (pos == BT_SSD_NONE) {
            return;
        }
        count(s->m.evicted, &s->n.evicted, 1);
        forget(s, pos, "evicted");
    }
}

/* ---- writing ---- */

/* CRC32C over the row of segment CRCs, seeded with the key: identifies the whole block. */
static uint32_t row_digest(const struct bt_kv_key *key, const uint32_t *row, uint32_t n)
{
    return bt_crc32c(bt_crc32c(0, key, sizeof(*key)), row, n * sizeof(*row));
}

static void on_recorded(void *arg, struct bt_ssd_db_op *op)
{
    struct job *j = arg;
    struct bt_ssd *s = j->s;
    bt_map_del(s->writing, &j->e.key);
    if (op->st == BT_OK) {
        count(NULL, &s->n.written, 1);
        bt_ssd_dir_add(s->dir, j->pos, &j->e);
        tell(s, true, j->pos, &j->e);
    } else {
        forget_record(s, j->pos, &j->e); /* its record may be on the disk nevertheless */
    }
    bt_tenants_release(s->c.tenants, (uint8_t)j->e.group);
    free(j);
    make_room(s);
}

static void on_written(struct bt_ssd_op *op)
{
    struct job *j = BT_CONTAINER_OF(op, struct job, op);
    struct bt_ssd *s = j->s;
    bt_list_remove(&j->link);
    s->n.backlog--;
    if (op->res == 0) {
        count(s->m.written_bytes, &s->n.written_bytes, op->len);
        struct bt_ssd_db_op *put = db_op(s, BT_SSD_PUT, j->pos, &j->e);
        put->done = on_recorded;
        put->arg = j;
        j->done(j->arg, BT_OK);
        bt_ssd_db_submit(s->db, put);
        return;
    }
    bool cancelled = op->res == -ECANCELED;
    if (!cancelled) {
        count(s->m.write_errors, &s->n.write_errors, 1);
        io_failed(s, "write", strerror(-op->res));
    }
    j->done(j->arg, cancelled ? BT_ERR_CANCELLED : BT_ERR_IO);
    bt_map_del(s->writing, &j->e.key);
    bt_ssd_dir_free(s->dir, j->pos); /* it has no record */
    bt_tenants_release(s->c.tenants, (uint8_t)j->e.group);
    free(j);
}

static void submit(struct job *j, bool write, void (*done)(struct bt_ssd_op *))
{
    struct bt_ssd *s = j->s;
    j->op.write = write;
    j->op.buf = bt_slab_data(s->c.slab, j->slab_slot);
    j->op.off = bt_ssd_file_off(&s->file, j->pos);
    j->op.len = (uint32_t)s->file.slot_bytes;
    j->op.done = done;
    bt_list_insert_tail(&s->jobs, &j->link);
    bt_ssd_io_submit(s->io, &j->op);
}

bt_status_t bt_ssd_write(struct bt_ssd *s, uint32_t slab_slot, const struct bt_kv_key *key,
                         uint32_t depth, uint8_t group, bt_ssd_done_fn done, void *arg)
{
    uint32_t layers = s->c.slab->super->n_layers;
    if (!usable(s) || s->db_down) {
        return BT_ERR_UNAVAILABLE;
    }
    if (bt_ssd_dir_find(s->dir, key) != BT_SSD_NONE || bt_map_get(s->writing, key) != NULL) {
        return BT_ERR_EXISTS;
    }
    uint32_t pos = s->n.backlog < s->c.backlog_max ? bt_ssd_dir_take(s->dir, group) : BT_SSD_NONE;
    if (pos == BT_SSD_NONE) {
        count(s->m.dropped, &s->n.dropped, 1);
        make_room(s);
        return BT_AGAIN;
    }
    struct job *j = bt_calloc(1, sizeof(*j));
    j->s = s;
    j->pos = pos;
    j->slab_slot = slab_slot;
    j->e = (struct bt_ssd_entry){
        .key = *key,
        .depth = depth & 0xffffff, /* the mask is larger than any context */
        .group = group,
        .digest = row_digest(key, s->c.slab->crcs + (size_t)slab_slot * layers, layers),
        .generation = bt_ssd_dir_entry(s->dir, pos)->generation,
        .used = moment_now()};
    j->done = done;
    j->arg = arg;
    bt_map_put(s->writing, key, j);
    bt_tenants_hold(s->c.tenants, group); /* until the block can be found, or is given up */
    s->n.backlog++;
    submit(j, true, on_written);
    make_room(s);
    return BT_OK;
}

/* ---- reading ---- */

/* I/O thread. true: the bytes from the disk are the block that was written. */
static void check_crc(struct bt_ssd_op *op)
{
    struct job *j = BT_CONTAINER_OF(op, struct job, op);
    const struct bt_ssd *s = j->s;
    uint32_t layers = s->c.slab->super->n_layers;
    uint32_t crc = bt_crc32c(0, &j->e.key, sizeof(j->e.key));
    for (uint32_t l = 0; l < layers; l++) {
        uint32_t seg = s->c.segment_crc(s->c.arg, j->slab_slot, l, &j->e.key);
        crc = bt_crc32c(crc, &seg, sizeof(seg));
    }
    if (crc != j->e.digest) {
        op->res = -EBADMSG;
    }
}

/* A failing disk damages many blocks: log only one line now and then; the counter counts all. */
static void report_bad(struct bt_ssd *s, const struct job *j)
{
    char key[17];
    uint64_t now = bt_mono_ns();
    if (s->bad_told_ns != 0 && now - s->bad_told_ns < BAD_TELL_NS) {
        return;
    }
    s->bad_told_ns = now;
    bt_hex(j->e.key.b, 8, key);
    BT_WARN("ssd_bad_block", "key=%s pos=%u so_far=%llu why=%s", key, j->pos,
            (unsigned long long)s->n.crc_errors, "wrong checksum; the block is removed");
}

static void touch(struct bt_ssd *s, uint32_t pos)
{
    uint32_t now = moment_now();
    int32_t since = bt_ssd_since(now, bt_ssd_dir_entry(s->dir, pos)->used);
    bool due = since < 0 /* the clock was set back */ || since >= TOUCH_S * (int32_t)BT_SSD_TICKS_S;
    bt_ssd_dir_touch(s->dir, pos);
    if (due && !s->db_down && !s->closing) {
        bt_ssd_dir_set_used(s->dir, pos, now);
        bt_ssd_db_submit(s->db, db_op(s, BT_SSD_TOUCH, pos, bt_ssd_dir_entry(s->dir, pos)));
    }
}

static void on_read(struct bt_ssd_op *op)
{
    struct job *j = BT_CONTAINER_OF(op, struct job, op);
    struct bt_ssd *s = j->s;
    bt_status_t st = BT_OK;
    bt_list_remove(&j->link);
    s->n.reading--;
    bt_ssd_dir_unpin(s->dir, j->pos);
    if (op->res == 0) {
        s->read_failures = 0;
        count(NULL, &s->n.read, 1);
        count(s->m.read_bytes, &s->n.read_bytes, op->len);
        touch(s, j->pos);
    } else if (op->res == -EBADMSG) {
        st = BT_ERR_DATA_LOSS;
        count(s->m.crc_errors, &s->n.crc_errors, 1);
        report_bad(s, j);
        forget(s, j->pos, "wrong checksum");
    } else if (op->res == -ECANCELED) {
        st = BT_ERR_CANCELLED;
    } else {
        st = BT_ERR_IO;
        count(s->m.read_errors, &s->n.read_errors, 1);
        if (++s->read_failures >= READ_ERRORS_MAX) {
            io_failed(s, "read", strerror(-op->res));
        }
        /* A bad spot; a disk that has failed may come back with all its blocks. */
        if (!s->io_down) {
            forget(s, j->pos, "cannot be read");
        }
    }
    j->done(j->arg, st);
    free(j);
}

bt_status_t bt_ssd_read(struct bt_ssd *s, const struct bt_kv_key *key, uint32_t slab_slot,
                        uint32_t *depth_p, bt_ssd_done_fn done, void *arg)
{
    struct job *other;
    struct bt_list *i;
    if (!usable(s)) {
        return BT_ERR_UNAVAILABLE;
    }
    uint32_t pos = bt_ssd_dir_find(s->dir, key);
    if (pos == BT_SSD_NONE) {
        return BT_ERR_NOT_FOUND;
    }
    bt_list_for_each (i, &s->jobs) { /* there are as many jobs as operations under way or waiting */
        other = BT_CONTAINER_OF(i, struct job, link);
        if (other->pos == pos) {
            return BT_AGAIN;
        }
    }
    struct job *j = bt_calloc(1, sizeof(*j));
    j->s = s;
    j->pos = pos;
    j->slab_slot = slab_slot;
    j->e = *bt_ssd_dir_entry(s->dir, pos);
    j->done = done;
    j->arg = arg;
    j->op.finish = check_crc;
    *depth_p = j->e.depth;
    bt_ssd_dir_pin(s->dir, pos);
    s->n.reading++;
    submit(j, false, on_read);
    return BT_OK;
}

bool bt_ssd_has(const struct bt_ssd *s, const struct bt_kv_key *key)
{
    return bt_ssd_find(s, key) != BT_SSD_NONE;
}

bool bt_ssd_keeps(const struct bt_ssd *s, const struct bt_kv_key *key)
{
    return s->dir != NULL && bt_ssd_dir_find(s->dir, key) != BT_SSD_NONE;
}

uint32_t bt_ssd_find(const struct bt_ssd *s, const struct bt_kv_key *key)
{
    return usable(s) ? bt_ssd_dir_find(s->dir, key) : BT_SSD_NONE;
}

void bt_ssd_protect(struct bt_ssd *s, uint32_t pos)
{
    BT_ASSERT(s->dir != NULL && bt_ssd_dir_is_valid(s->dir, pos));
    bt_ssd_dir_pin(s->dir, pos);
}

void bt_ssd_unprotect(struct bt_ssd *s, uint32_t pos)
{
    BT_ASSERT(s->dir != NULL);
    bt_ssd_dir_unpin(s->dir, pos);
}

uint8_t bt_ssd_group(const struct bt_ssd *s, uint32_t pos)
{
    BT_ASSERT(s->dir != NULL && bt_ssd_dir_is_valid(s->dir, pos));
    return (uint8_t)bt_ssd_dir_entry(s->dir, pos)->group;
}

uint32_t bt_ssd_used(const struct bt_ssd *s, uint8_t group)
{
    return s->dir != NULL ? bt_ssd_dir_used(s->dir, group) : 0;
}

uint32_t bt_ssd_slots(const struct bt_ssd *s)
{
    return s->file.n_slots;
}

/* ---- opening ---- */

/* Oldest use first; for equal times the deeper block first, so that chains are evicted from their
 * end. now: the middle of the range of times that can be compared. */
static int by_use(const void *a, const void *b, void *now)
{
    const struct bt_ssd_entry *x = &((const struct bt_ssd_found *)a)->e,
                              *y = &((const struct bt_ssd_found *)b)->e;
    const uint32_t *mid = now;
    if (x->used != y->used) {
        return bt_ssd_since(x->used, *mid) < bt_ssd_since(y->used, *mid) ? -1 : 1;
    }
    return x->depth == y->depth ? 0 : x->depth > y->depth ? -1 : 1;
}

/* Fills the directory from the records. If a slot has two records, the later write is valid: the
 * delete of the other one did not reach the disk. */
static void adopt(struct bt_ssd *s, struct bt_ssd_found *found, uint32_t n)
{
    uint32_t *best = bt_calloc(s->file.n_slots, sizeof(*best)), now = moment_now();
    for (uint32_t i = 0; i < n; i++) {
        if (found[i].pos < s->file.n_slots) {
            uint32_t *b = &best[found[i].pos];
            *b = BT_MAX(*b, found[i].e.generation);
        }
    }
    if (n > 0) {
        qsort_r(found, n, sizeof(*found), by_use, &now);
    }
    for (uint32_t i = 0; i < n; i++) {
        struct bt_ssd_found *f = &found[i];
        if (s->c.tenants != NULL) {
            f->e.group = bt_tenants_by_tag(s->c.tenants, f->tenant);
        }
        if (f->pos < s->file.n_slots && f->e.generation == best[f->pos] &&
            bt_ssd_dir_claim(s->dir, f->pos, f->e.generation)) {
            bt_ssd_dir_restore(s->dir, f->pos, &f->e);
            s->n.recovered++;
        } else {
            say_gone(&f->e, "its slot has another record");
            bt_ssd_db_submit(s->db, db_op(s, BT_SSD_DELETE, f->pos, &f->e));
        }
    }
    free(best);
    free(found);
}

static void metrics_create(struct bt_ssd *s, struct bt_metrics *ms)
{
    static const char *const err = "baton_ssd_errors_total";
    s->m.read_bytes = bt_metrics_counter(ms, "baton_ssd_read_bytes_total", NULL);
    s->m.written_bytes = bt_metrics_counter(ms, "baton_ssd_written_bytes_total", NULL);
    s->m.read_errors = bt_metrics_counter(ms, err, "what=\"read\"");
    s->m.write_errors = bt_metrics_counter(ms, err, "what=\"write\"");
    s->m.crc_errors = bt_metrics_counter(ms, err, "what=\"crc\"");
    s->m.evicted = bt_metrics_counter(ms, "baton_ssd_blocks_evicted_total", NULL);
    s->m.dropped = bt_metrics_counter(ms, "baton_ssd_blocks_dropped_total", NULL);
    s->m.blocks = bt_metrics_gauge(ms, "baton_ssd_blocks", NULL);
    s->m.slots = bt_metrics_gauge(ms, "baton_ssd_slots", NULL);
    s->m.backlog = bt_metrics_gauge(ms, "baton_ssd_backlog", NULL);
    s->m.up = bt_metrics_gauge(ms, "baton_ssd_up", NULL);
}

/* The files are open: starts the tier. Takes ownership of the contents of f. */
static void begin(struct bt_ssd *s, struct bt_ssd_files *f)
{
    s->file = f->file;
    s->db = f->db;
    s->dir = bt_ssd_dir_create(s->file.n_slots, s->c.policy != NULL ? s->c.policy : &bt_evict_lru,
                               s->c.tenants);
    s->room = BT_MIN(BT_MAX(4 * s->c.queue_depth, s->file.n_slots / 64), s->file.n_slots / 8 + 1);
    bt_ssd_io_use(s->io, s->file.fd);
    bt_ssd_db_start(s->db);
    adopt(s, f->found, f->n_found);
    if (s->m.slots != NULL) {
        bt_metric_set(s->m.slots, s->file.n_slots);
    }
    BT_INFO("ssd_open", "path=%s slots=%u slot_bytes=%llu blocks=%llu ms=%llu io=%s direct=%s",
            s->path, s->file.n_slots, (unsigned long long)s->file.slot_bytes,
            (unsigned long long)s->n.recovered, (unsigned long long)f->ms, bt_ssd_io_kind(s->io),
            s->file.direct ? "yes" : "no");
    make_room(s);
    gauges(s);
}

static void on_opened(void *arg, struct bt_ssd_files *f)
{
    struct bt_ssd *s = arg;
    struct bt_ssd_files files = *f; /* f belongs to the opener */
    bt_ssd_opener_destroy(s->opener);
    s->opener = NULL;
    begin(s, &files);
    for (uint32_t pos = 0; pos < s->file.n_slots; pos++) {
        if (bt_ssd_dir_is_valid(s->dir, pos)) {
            tell(s, true, pos, bt_ssd_dir_entry(s->dir, pos));
        }
    }
}

static bt_status_t create_io(struct bt_ssd *s, char *err, size_t err_cap)
{
    const struct bt_slab_super *su = s->c.slab->super;
    struct bt_ssd_io_config ic = {.loop = s->c.loop,
                                  .fd = -1,
                                  .depth = s->c.queue_depth,
                                  .mem = s->c.slab->data,
                                  .mem_bytes = su->n_slots * su->slot_bytes,
                                  .mem_unit = (uint32_t)su->slot_bytes,
                                  .sys = s->c.sys};
    if (su->slot_bytes > UINT32_MAX ||
        posix_memalign((void **)&s->probe_buf, BT_SSD_PAGE, BT_SSD_PAGE) != 0 ||
        bt_ssd_io_create(&ic, &s->io) != BT_OK) {
        snprintf(err, err_cap,
                 "kvstore.ssd.path: no threads or descriptors for its I/O; raise the limits of the "
                 "kvstore's user (LimitNOFILE, TasksMax)");
        return BT_ERR_CONFIG;
    }
    return BT_OK;
}

bt_status_t bt_ssd_open(const struct bt_ssd_config *c, struct bt_ssd **s_p, char *err,
                        size_t err_cap)
{
    struct bt_ssd *s = bt_calloc(1, sizeof(*s));
    struct bt_ssd_files files;
    s->c = *c;
    bt_list_init(&s->jobs);
    s->path = bt_strdup(c->path);
    struct bt_ssd_files_config fc = {.path = s->path,
                                     .bytes = c->bytes,
                                     .super = c->slab->super,
                                     .db = {.loop = c->loop,
                                            .sys = c->sys,
                                            .retry_ms = c->probe_ms,
                                            .on_health = on_db_health,
                                            .arg = s}};
    bt_status_t made = create_io(s, err, err_cap);
    bt_status_t st = made == BT_OK ? bt_ssd_files_open(&fc, false, &files, err, err_cap) : made;
    if (st == BT_ERR_CONFIG) {
        bt_ssd_io_destroy(s->io);
        free(s->probe_buf);
        free(s->path);
        free(s);
        return st;
    }
    s->writing = bt_map_create(sizeof(struct bt_kv_key));
    if (c->metrics != NULL) {
        metrics_create(s, c->metrics);
    }
    if (st == BT_OK) {
        begin(s, &files);
    } else {
        BT_ERROR("ssd_unused", "path=%s status=%s why=%s then=%s", s->path, bt_status_name(st), err,
                 "the kvstore serves without the SSD and tries it again");
        s->opener = bt_ssd_opener_start(&fc, c->probe_ms, on_opened, s);
        gauges(s);
    }
    bt_timer_start(c->loop, &s->tick, TICK_MS, TICK_MS, on_tick, s);
    *s_p = s;
    return BT_OK;
}

void bt_ssd_close(struct bt_ssd *s)
{
    if (s == NULL) {
        return;
    }
    s->closing = true;
    bt_timer_stop(s->c.loop, &s->tick);
    bt_timer_stop(s->c.loop, &s->probe_timer);
    bt_ssd_opener_destroy(s->opener);
    bt_ssd_io_destroy(s->io); /* the records of completed writes go to the index ... */
    bt_ssd_db_close(s->db);   /* ... which writes them, if the disk accepts them */
    const void *key;
    size_t it = 0;
    for (struct job *j; (j = bt_map_next(s->writing, &it, &key)) != NULL;) {
        free(j); /* a job whose record cannot be written */
    }
    bt_map_destroy(s->writing);
    if (s->dir != NULL) {
        bt_ssd_dir_destroy(s->dir);
        bt_ssd_file_close(&s->file);
    }
    free(s->probe_buf);
    free(s->path);
    free(s);
}

void bt_ssd_stats(const struct bt_ssd *s, struct bt_ssd_stats *st_p)
{
    *st_p = s->n;
    st_p->io = bt_ssd_io_kind(s->io);
    st_p->slots = s->file.n_slots;
    st_p->blocks = s->dir != NULL ? bt_ssd_dir_valid(s->dir) : 0;
    st_p->up = s->dir != NULL && !s->io_down && !s->db_down;
}

const struct bt_kv_key *bt_ssd_at(const struct bt_ssd *s, uint32_t pos, uint32_t *depth_p)
{
    if (s->dir == NULL || !bt_ssd_dir_is_valid(s->dir, pos)) {
        return NULL;
    }
    const struct bt_ssd_entry *e = bt_ssd_dir_entry(s->dir, pos);
    *depth_p = e->depth;
    return &e->key;
}
