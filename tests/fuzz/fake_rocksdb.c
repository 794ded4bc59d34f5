/* One database, sorted by key. Errors are heap strings, as RocksDB's are. */
#include "tests/fuzz/fake_rocksdb.h"

#include <rocksdb/c.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"

#define ENTRIES 128
#define KEY     64
#define VALUE   128

struct entry {
    size_t key_len, value_len;
    char key[KEY], value[VALUE];
};

struct rocksdb_iterator_t {
    size_t at;
};

struct rocksdb_writebatch_t {
    struct entry ops[ENTRIES];
    bool deletes[ENTRIES];
    size_t n;
};

static struct entry all[ENTRIES];
static size_t n_all;
static const char *failure;
static unsigned failures;

void fake_rocksdb_reset(void)
{
    n_all = 0;
    failures = 0;
}

void fake_rocksdb_fail(const char *why, unsigned n)
{
    failure = why;
    failures = why != NULL ? n : 0;
}

static bool fails(char **errptr)
{
    if (failures == 0) {
        return false;
    }
    failures--;
    free(*errptr);
    *errptr = bt_strdup(failure);
    return true;
}

static int compare(const char *a, size_t n, const char *b, size_t m)
{
    int c = memcmp(a, b, BT_MIN(n, m));
    return c != 0 ? c : n < m ? -1 : n > m;
}

/* The first entry that is not below the key. */
static size_t lower(const char *key, size_t len)
{
    size_t i = 0;
    while (i < n_all && compare(all[i].key, all[i].key_len, key, len) < 0) {
        i++;
    }
    return i;
}

static void delete_key(const char *key, size_t len)
{
    size_t i = lower(key, len);
    if (i < n_all && compare(all[i].key, all[i].key_len, key, len) == 0) {
        memmove(&all[i], &all[i + 1], (--n_all - i) * sizeof(all[0]));
    }
}

void fake_rocksdb_put(const void *key, size_t key_len, const void *value, size_t value_len)
{
    if (key_len > KEY || value_len > VALUE) {
        return;
    }
    delete_key(key, key_len);
    if (n_all == ENTRIES) {
        return;
    }
    size_t i = lower(key, key_len);
    memmove(&all[i + 1], &all[i], (n_all++ - i) * sizeof(all[0]));
    all[i].key_len = key_len;
    all[i].value_len = value_len;
    memcpy(all[i].key, key, key_len);
    bt_copy(all[i].value, value, value_len);
}

bool fake_rocksdb_at(size_t i, const void **key, size_t *key_len, const void **value,
                     size_t *value_len)
{
    if (i >= n_all) {
        return false;
    }
    *key = all[i].key;
    *key_len = all[i].key_len;
    *value = all[i].value;
    *value_len = all[i].value_len;
    return true;
}

/* ---- RocksDB's names; handles that hold nothing are one byte of heap ---- */

void rocksdb_free(void *p)
{
    free(p);
}

rocksdb_t *rocksdb_open(const rocksdb_options_t *o, const char *name, char **errptr)
{
    (void)o, (void)name;
    return fails(errptr) ? NULL : bt_malloc(1);
}

void rocksdb_close(rocksdb_t *db)
{
    free(db);
}

void rocksdb_destroy_db(const rocksdb_options_t *o, const char *name, char **errptr)
{
    (void)o, (void)name;
    if (!fails(errptr)) {
        n_all = 0;
    }
}

void rocksdb_put(rocksdb_t *db, const rocksdb_writeoptions_t *o, const char *key, size_t key_len,
                 const char *value, size_t value_len, char **errptr)
{
    (void)db, (void)o;
    if (!fails(errptr)) {
        fake_rocksdb_put(key, key_len, value, value_len);
    }
}

char *rocksdb_get(rocksdb_t *db, const rocksdb_readoptions_t *o, const char *key, size_t key_len,
                  size_t *value_len, char **errptr)
{
    size_t i = lower(key, key_len);
    (void)db, (void)o;
    *value_len = 0;
    if (fails(errptr) || i == n_all || compare(all[i].key, all[i].key_len, key, key_len) != 0) {
        return NULL;
    }
    *value_len = all[i].value_len;
    char *copy = bt_malloc(all[i].value_len + 1);
    memcpy(copy, all[i].value, all[i].value_len);
    return copy;
}

void rocksdb_write(rocksdb_t *db, const rocksdb_writeoptions_t *o, rocksdb_writebatch_t *b,
                   char **errptr)
{
    (void)db, (void)o;
    if (fails(errptr)) {
        return;
    }
    for (size_t i = 0; i < b->n; i++) {
        const struct entry *e = &b->ops[i];
        if (b->deletes[i]) {
            delete_key(e->key, e->key_len);
        } else {
            fake_rocksdb_put(e->key, e->key_len, e->value, e->value_len);
        }
    }
}

rocksdb_writebatch_t *rocksdb_writebatch_create(void)
{
    return bt_calloc(1, sizeof(rocksdb_writebatch_t));
}

void rocksdb_writebatch_destroy(rocksdb_writebatch_t *b)
{
    free(b);
}

static struct entry *batch_add(rocksdb_writebatch_t *b, const char *key, size_t len, bool deletes)
{
    BT_ASSERT(b->n < ENTRIES && len <= KEY);
    struct entry *e = &b->ops[b->n];
    b->deletes[b->n++] = deletes;
    memcpy(e->key, key, len);
    e->key_len = len;
    return e;
}

void rocksdb_writebatch_put(rocksdb_writebatch_t *b, const char *key, size_t key_len,
                            const char *value, size_t value_len)
{
    struct entry *e = batch_add(b, key, key_len, false);
    BT_ASSERT(value_len <= VALUE);
    memcpy(e->value, value, value_len);
    e->value_len = value_len;
}

void rocksdb_writebatch_delete(rocksdb_writebatch_t *b, const char *key, size_t key_len)
{
    (void)batch_add(b, key, key_len, true);
}

rocksdb_iterator_t *rocksdb_create_iterator(rocksdb_t *db, const rocksdb_readoptions_t *o)
{
    (void)db, (void)o;
    return bt_calloc(1, sizeof(rocksdb_iterator_t));
}

void rocksdb_iter_destroy(rocksdb_iterator_t *it)
{
    free(it);
}

unsigned char rocksdb_iter_valid(const rocksdb_iterator_t *it)
{
    return it->at < n_all;
}

void rocksdb_iter_seek_to_first(rocksdb_iterator_t *it)
{
    it->at = 0;
}

void rocksdb_iter_seek(rocksdb_iterator_t *it, const char *key, size_t len)
{
    it->at = lower(key, len);
}

void rocksdb_iter_next(rocksdb_iterator_t *it)
{
    it->at++;
}

const char *rocksdb_iter_key(const rocksdb_iterator_t *it, size_t *len)
{
    *len = all[it->at].key_len;
    return all[it->at].key;
}

const char *rocksdb_iter_value(const rocksdb_iterator_t *it, size_t *len)
{
    *len = all[it->at].value_len;
    return all[it->at].value;
}

void rocksdb_iter_get_error(const rocksdb_iterator_t *it, char **errptr)
{
    (void)it;
    (void)fails(errptr);
}

#define HANDLE(name)                                                                               \
    name##_t *name##_create(void)                                                                  \
    {                                                                                              \
        return bt_malloc(1);                                                                       \
    }                                                                                              \
    void name##_destroy(name##_t *p)                                                               \
    {                                                                                              \
        free(p);                                                                                   \
    }
HANDLE(rocksdb_options)
HANDLE(rocksdb_readoptions)
HANDLE(rocksdb_writeoptions)

#define OPTION(of, name, type)                                                                     \
    void rocksdb_##of##_set_##name(rocksdb_##of##_t *o, type v)                                    \
    {                                                                                              \
        (void)o, (void)v;                                                                          \
    }
OPTION(options, create_if_missing, unsigned char)
OPTION(options, write_buffer_size, size_t)
OPTION(options, max_write_buffer_number, int)
OPTION(options, max_total_wal_size, uint64_t)
OPTION(options, max_open_files, int)
OPTION(options, max_background_jobs, int)
OPTION(options, compression, int)
OPTION(options, info_log_level, int)
OPTION(options, keep_log_file_num, size_t)
OPTION(options, stats_dump_period_sec, unsigned int)
OPTION(options, paranoid_checks, unsigned char)
OPTION(readoptions, verify_checksums, unsigned char)
OPTION(readoptions, fill_cache, unsigned char)
OPTION(writeoptions, sync, unsigned char)

void rocksdb_get_options_from_string(const rocksdb_options_t *base, const char *text,
                                     rocksdb_options_t *o, char **errptr)
{
    (void)base, (void)text, (void)o, (void)errptr;
}
