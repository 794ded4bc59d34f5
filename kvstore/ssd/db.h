/* The durable index of the SSD tier: block key -> record, in RocksDB. It has a thread of its own,
 * because every batch is synced. While one batch is written, further operations collect for the
 * next one. Before a batch with puts, the data file is flushed, so that a record is never durable
 * before its bytes. Control thread unless marked.
 *
 * A put may fail. Then its record may or may not be there: delete it before you use the slot again.
 * A delete never fails; it waits until the disk accepts it. */
#ifndef BT_KVSTORE_SSD_DB_H
#define BT_KVSTORE_SSD_DB_H

#include "common/base/base.h"
#include "common/kv/key.h"
#include "common/loop/loop.h"
#include "common/policy/evict/ssd_dir.h"
#include "kvstore/ssd/io.h"

/* The identity that all records of a database share; a database with another one is emptied. */
struct bt_ssd_identity {
    uint8_t file_uuid[16]; /* of the slab file */
    uint64_t slot_bytes, block_bytes, layout_id;
    uint8_t root_key[32];
};

typedef enum {
    BT_SSD_PUT,
    BT_SSD_TOUCH, /* a put that need not be durable: no flush */
    BT_SSD_DELETE
} bt_ssd_db_verb_t;

struct bt_ssd_db_op { /* heap; the database frees it after done */
    struct bt_ssd_db_op *next;
    bt_ssd_db_verb_t verb;
    uint32_t slot;
    struct bt_ssd_entry e; /* DELETE: the key only */
    uint32_t tenant;       /* bt_kv_tenant_tag, in place of e's group */
    bt_status_t st;        /* OK or ERR_IO */
    /* called on the loop's thread; NULL: no callback */
    void (*done)(void *arg, struct bt_ssd_db_op *op);
    void *arg;
};

struct bt_ssd_db_config {
    struct bt_loop *loop;
    const char *path; /* its folder */
    int data_fd;      /* flushed before puts */
    struct bt_ssd_identity identity;
    const struct bt_ssd_sys *sys; /* for flush; NULL: fdatasync */
    uint64_t retry_ms;            /* between attempts while the disk refuses */
    /* On the loop's thread: writing has begun to fail (why), or works again (NULL). emptied: all
     * earlier records are lost. */
    void (*on_health)(void *arg, const char *why, bool emptied);
    void *arg;
};

struct bt_ssd_db;

/* e's group is not set: tenant has the tag. */
typedef void (*bt_ssd_record_fn)(void *arg, uint32_t slot, const struct bt_ssd_entry *e,
                                 uint32_t tenant);

/* Opens or makes the database and reads it through: on_record gets every record with a right
 * checksum, in the order of the keys. A damaged one, or one of another identity, is emptied (said
 * in the log); last_try: also one that the disk cannot read. ERR_IO, ERR_EXHAUSTED (err says why,
 * with the remedy): the disk refuses, nothing was changed. One that can be read but not written is
 * OK: on_health tells once it was started. Any thread. */
bt_status_t bt_ssd_db_load(const struct bt_ssd_db_config *c, bool last_try,
                           bt_ssd_record_fn on_record, void *arg, struct bt_ssd_db **db_p,
                           char *err, size_t err_cap) BT_MUST_CHECK;
/* Operations may be submitted from now on. */
void bt_ssd_db_start(struct bt_ssd_db *db);
/* Its files are gone: it is opened, that is made, anew. on_health tells. */
void bt_ssd_db_renew(struct bt_ssd_db *db);
/* Also for an index that was not started. Writes the queued operations if the disk accepts them.
 * Afterwards `done` of every operation has run or will never run. */
void bt_ssd_db_close(struct bt_ssd_db *db);
/* Takes op. */
void bt_ssd_db_submit(struct bt_ssd_db *db, struct bt_ssd_db_op *op);

#endif
