/* libFuzzer: the SSD tier over a database and a disk that the tape plays. The database has records
 * of all versions, right and wrong: of one slot twice, beyond the file, of another identity. What
 * is adopted lies in a slot of its own. Then blocks are read, written, protected and given up while
 * disk and index fail and come back. Each operation ends once; a read that says OK gives the bytes
 * that were written. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/crc32c.h"
#include "kvstore/ssd/db.h"
#include "kvstore/ssd/file.h"
#include "kvstore/ssd/ssd.h"
#include "tests/fuzz/fake_rocksdb.h"
#include "tests/fuzz/rig.h"
#include "tests/fuzz/tape.h"

#define SLOTS  8u  /* of the slab */
#define PLACES 16u /* of the file */
#define KEYS   24u
#define TOKENS 16u
#define STEPS  80
#define OPS    32

struct record { /* as db.c has it */
    uint32_t version, slot, generation, depth, digest, used, tenant, crc;
};

static struct bt_loop *loop;
static struct bt_slab *slab;
static struct bt_kv_layout layout;
static struct bt_kv_key root;

static struct {
    struct bt_ssd *ssd;
    struct bt_ssd_op *ops[OPS]; /* submitted to the disk */
    uint32_t n_ops;
    uint8_t disk[PLACES][8192]; /* first bytes of each place */
    bool busy[SLOTS];           /* slab slots with an operation */
    uint32_t key_of[SLOTS], started, ended;
    bool reading[SLOTS];
    uint32_t protected[PLACES];
    void *(*thread)(void *arg); /* the index thread */
    void *thread_arg;
    jmp_buf out;
    bool flush_fails, retry;
} x;

/* ---- threads: the index thread runs when the target says, until it would wait ---- */

int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg);
int __wrap_pthread_join(pthread_t t, void **value);
int __wrap_pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m);
int __wrap_pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *at);

int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg)
{
    (void)a;
    memset(t, 0, sizeof(*t));
    BT_ASSERT(x.thread == NULL);
    x.thread = fn;
    x.thread_arg = arg;
    return 0;
}

static void run_index(void)
{
    if (x.thread != NULL && setjmp(x.out) == 0) {
        x.thread(x.thread_arg);
        x.thread = NULL; /* it has ended */
    }
}

int __wrap_pthread_join(pthread_t t, void **value)
{
    (void)t, (void)value;
    run_index();
    BT_ASSERT(x.thread == NULL);
    return 0;
}

int __wrap_pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m)
{
    (void)c;
    pthread_mutex_unlock(m);
    longjmp(x.out, 1);
}

int __wrap_pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *at)
{
    (void)c, (void)at;
    if (x.retry) {
        x.retry = false;
        return ETIMEDOUT;
    }
    pthread_mutex_unlock(m);
    longjmp(x.out, 1);
}

/* ---- the disk ---- */

static struct bt_ssd_io io;

bt_status_t bt_ssd_io_create(const struct bt_ssd_io_config *c, struct bt_ssd_io **io_p)
{
    (void)c;
    *io_p = &io;
    return BT_OK;
}

void bt_ssd_io_use(struct bt_ssd_io *i, int fd)
{
    (void)i, (void)fd;
}

void bt_ssd_io_submit(struct bt_ssd_io *i, struct bt_ssd_op *op)
{
    (void)i;
    BT_ASSERT(x.n_ops < OPS);
    op->submitted_ns = bt_mono_ns();
    x.ops[x.n_ops++] = op;
}

static void disk_ends(uint32_t at, int res, bool rots)
{
    struct bt_ssd_op *op = x.ops[at];
    x.ops[at] = x.ops[--x.n_ops];
    op->res = res;
    if (res == 0 && op->off >= BT_SSD_DATA_OFF) {
        uint64_t place = (op->off - BT_SSD_DATA_OFF) / slab->super->slot_bytes;
        BT_ASSERT(place < PLACES && op->len <= sizeof(x.disk[0]));
        if (op->write) {
            memcpy(x.disk[place], op->buf, op->len);
        } else {
            memcpy(op->buf, x.disk[place], op->len);
            *(uint8_t *)op->buf ^= rots;
        }
    } else if (res == 0 && !op->write) { /* the probe's page */
        memcpy(op->buf, x.disk[PLACES - 1] + 4096, 8);
    } else if (res == 0) {
        memcpy(x.disk[PLACES - 1] + 4096, op->buf, 8);
    }
    if (res == 0 && op->finish != NULL) {
        op->finish(op);
    }
    op->done(op);
}

void bt_ssd_io_destroy(struct bt_ssd_io *i)
{
    (void)i;
    while (x.n_ops > 0) {
        disk_ends(0, -ECANCELED, false);
    }
}

const char *bt_ssd_io_kind(const struct bt_ssd_io *i)
{
    (void)i;
    return "the tape";
}

bt_status_t bt_ssd_file_open(const char *folder, uint64_t bytes, uint64_t slot_bytes,
                             struct bt_ssd_file *f_p, char *err, size_t err_cap)
{
    (void)folder, (void)bytes, (void)err, (void)err_cap;
    *f_p = (struct bt_ssd_file){.fd = -1, .n_slots = PLACES, .slot_bytes = slot_bytes};
    memset(f_p->uuid, 3, sizeof(f_p->uuid));
    return BT_OK;
}

void bt_ssd_file_close(struct bt_ssd_file *f)
{
    (void)f;
}

bt_ssd_file_state_t bt_ssd_file_look(const struct bt_ssd_file *f, const char *folder,
                                     uint64_t *bytes_p)
{
    (void)f, (void)folder, (void)bytes_p;
    return BT_SSD_FILE_OK;
}

bt_status_t bt_ssd_file_mend(const struct bt_ssd_file *f)
{
    (void)f;
    return BT_OK;
}

static int disk_flush(void *arg, int fd)
{
    (void)arg, (void)fd;
    return x.flush_fails ? -EIO : 0;
}

/* ---- what the database has ---- */

static void name_of(uint32_t i, struct bt_kv_key *k)
{
    memset(k, 0, sizeof(*k));
    k->b[0] = (uint8_t)i;
    k->b[31] = 1;
}

static void put_identity(bool ours)
{
    struct bt_ssd_identity id = {.slot_bytes = slab->super->slot_bytes,
                                 .block_bytes = slab->super->block_bytes,
                                 .layout_id = slab->super->layout_id + !ours};
    memset(id.file_uuid, 3, sizeof(id.file_uuid));
    memcpy(id.root_key, slab->super->root_key, sizeof(id.root_key));
    fake_rocksdb_put("identity", 8, &id, sizeof(id));
}

static void put_record(struct tape *t)
{
    struct bt_kv_key k;
    struct record r = {.version = tape_one_in(t, 4) ? tape_below(t, 5) : 3,
                       .slot = tape_one_in(t, 8) ? (uint32_t)tape_u64(t) : tape_below(t, PLACES),
                       .generation = tape_below(t, 4),
                       .depth = tape_below(t, 8),
                       .used = tape_one_in(t, 4) ? (uint32_t)tape_u64(t) : tape_below(t, 4)};
    size_t n = sizeof(r), in_crc = offsetof(struct record, crc);
    name_of(tape_below(t, KEYS), &k);
    if (r.version == 1) { /* of seven words */
        n -= 4;
        in_crc -= 4;
    }
    uint32_t crc = bt_crc32c(bt_crc32c(0, &k, sizeof(k)), &r, in_crc);
    memcpy((uint8_t *)&r + in_crc, &crc, sizeof(crc));
    if (tape_one_in(t, 8)) {
        ((uint8_t *)&r)[tape_below(t, (uint32_t)n)] ^= tape_u8(t);
    }
    fake_rocksdb_put(&k, sizeof(k) - (tape_one_in(t, 16) ? tape_below(t, 33) : 0), &r,
                     n - (tape_one_in(t, 16) ? tape_below(t, 8) : 0));
}

/* ---- what the kvstore does ---- */

static uint32_t segment_crc(void *arg, uint32_t slot, uint32_t layer, const struct bt_kv_key *key)
{
    uint32_t bytes;
    (void)arg;
    uint64_t at = bt_kv_segment(&layout, layer, &bytes);
    uint32_t crc = bt_slab_segment_crc(key, layer, layout.layout_id,
                                       (uint8_t *)bt_slab_data(slab, slot) + at, bytes);
    slab->crcs[slot * layout.n_layers + layer] = crc;
    return crc;
}

static void on_change(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key,
                      uint32_t depth)
{
    (void)arg, (void)key, (void)depth;
    BT_ASSERT(pos < PLACES);
    while (!added && x.protected[pos] > 0) { /* at the latest now */
        x.protected[pos]--;
        bt_ssd_unprotect(x.ssd, pos);
    }
}

static void on_done(void *arg, bt_status_t st)
{
    uint32_t slot = (uint32_t)(uintptr_t)arg;
    BT_ASSERT(x.busy[slot]);
    x.busy[slot] = false;
    x.ended++;
    if (x.reading[slot] && st == BT_OK) {
        const uint8_t *p = bt_slab_data(slab, slot);
        BT_ASSERT(p[0] == (uint8_t)x.key_of[slot] && p[1] == (uint8_t)x.key_of[slot]);
    }
}

static void move(struct tape *t)
{
    uint32_t slot = tape_below(t, SLOTS), key = tape_below(t, KEYS), depth;
    struct bt_kv_key k;
    if (x.busy[slot]) {
        return;
    }
    name_of(key, &k);
    x.busy[slot] = true;
    x.key_of[slot] = key;
    x.reading[slot] = tape_bool(t);
    bt_status_t st;
    if (x.reading[slot]) {
        st = bt_ssd_read(x.ssd, &k, slot, &depth, on_done, (void *)(uintptr_t)slot);
    } else {
        memset(bt_slab_data(slab, slot), (int)key, layout.block_bytes);
        for (uint32_t l = 0; l < layout.n_layers; l++) { /* as of a sealed block */
            (void)segment_crc(NULL, slot, l, &k);
        }
        st = bt_ssd_write(x.ssd, slot, &k, key, 0, on_done, (void *)(uintptr_t)slot);
    }
    x.started += st == BT_OK;
    if (st != BT_OK) {
        x.busy[slot] = false;
    }
}

static void protect(struct tape *t)
{
    struct bt_kv_key k;
    name_of(tape_below(t, KEYS), &k);
    uint32_t pos = bt_ssd_find(x.ssd, &k);
    if (pos != UINT32_MAX && x.protected[pos] < 8 && tape_bool(t)) {
        bt_ssd_protect(x.ssd, pos);
        x.protected[pos]++;
    } else if (pos != UINT32_MAX && x.protected[pos] > 0) {
        x.protected[pos]--;
        bt_ssd_unprotect(x.ssd, pos);
    }
}

static void check(void)
{
    struct bt_ssd_stats s;
    uint32_t found = 0, depth;
    bool taken[PLACES] = {false};
    bt_ssd_stats(x.ssd, &s);
    for (uint32_t i = 0; i < KEYS; i++) {
        struct bt_kv_key k;
        name_of(i, &k);
        if (bt_ssd_keeps(x.ssd, &k)) {
            found++;
            uint32_t pos = bt_ssd_find(x.ssd, &k);
            BT_ASSERT(pos == UINT32_MAX || (pos < PLACES && !taken[pos]));
            if (pos != UINT32_MAX) {
                const struct bt_kv_key *at = bt_ssd_at(x.ssd, pos, &depth);
                taken[pos] = true;
                BT_ASSERT(at != NULL && memcmp(at, &k, sizeof(k)) == 0);
            }
        }
    }
    BT_ASSERT(found <= s.blocks && s.blocks <= PLACES);
}

static void step(struct tape *t)
{
    static const int errors[] = {-EIO, -ENOSPC, -EBADMSG};
    switch (tape_u8(t) % 10) {
    case 0:
    case 1:
    case 2: move(t); break;
    case 3:
    case 4:
        if (x.n_ops > 0) {
            bool good = !tape_one_in(t, 8);
            disk_ends(tape_below(t, x.n_ops), good ? 0 : errors[tape_u8(t) % 3], tape_one_in(t, 8));
        }
        break;
    case 5:
    case 6: run_index(); break;
    case 7: protect(t); break;
    case 8:
        fake_rocksdb_fail(tape_bool(t) ? "IO error: No space left on device" : "Corruption: tape",
                          tape_below(t, 4));
        x.flush_fails = tape_one_in(t, 4);
        x.retry = tape_bool(t);
        break;
    default: rig_pass_ms(tape_u8(t) * 40u); break;
    }
    bt_loop_poll(loop, 0);
    check();
}

/* ---- start and end ---- */

static void first_start(void)
{
    char err[512], path[128];
    BT_ASSERT(bt_loop_create(&loop) == BT_OK);
    BT_ASSERT(bt_kv_layout_gqa(TOKENS, 2, 1, 16, BT_DT_BF16, 0, &layout) == BT_OK);
    memset(root.b, 7, sizeof(root.b));
    snprintf(path, sizeof(path), "%s/slab", rig_dir());
    uint64_t slot = BT_ALIGN_UP(layout.block_bytes, 4096);
    struct bt_slab_spec spec = {.path = path,
                                .bytes = 5 * 4096 + SLOTS * (slot + 128 + 8),
                                .layout = &layout,
                                .root = &root,
                                .incarnation = 99};
    BT_ASSERT(bt_slab_create(&spec, NULL, NULL, &slab, err, sizeof(err)) == BT_OK);
    BT_ASSERT(unlink(path) == 0 && slab->super->n_slots >= SLOTS);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct bt_ssd_sys sys = {.flush = disk_flush};
    struct tape t = tape_of(data, size);
    char err[512] = "";
    rig_reset();
    if (loop == NULL) {
        first_start();
    }
    memset(&x, 0, sizeof(x));
    fake_rocksdb_reset();
    if (!tape_one_in(&t, 8)) {
        put_identity(!tape_one_in(&t, 8));
    }
    for (uint32_t i = 0, n = tape_below(&t, 24); i < n && tape_left(&t) > 0; i++) {
        put_record(&t);
    }
    if (tape_one_in(&t, 8)) {
        fake_rocksdb_fail("Corruption: tape", 1 + tape_below(&t, 3));
    }
    struct bt_ssd_config c = {.loop = loop,
                              .path = rig_dir(),
                              .bytes = 1u << 24,
                              .queue_depth = 2,
                              .backlog_max = 6,
                              .probe_ms = 50,
                              .stall_ms = 3000,
                              .slab = slab,
                              .sys = &sys,
                              .segment_crc = segment_crc,
                              .on_change = on_change};
    if (bt_ssd_open(&c, &x.ssd, err, sizeof(err)) != BT_OK) {
        BT_ASSERT(err[0] != '\0');
        return 0;
    }
    check();
    for (int i = 0; i < STEPS && tape_left(&t) > 0; i++) {
        step(&t);
    }
    bt_ssd_close(x.ssd);
    BT_ASSERT(x.started == x.ended);
    bt_loop_poll(loop, 0);
    return 0;
}
